package interop;

import com.alibaba.fastjson.JSONArray;
import com.alibaba.fastjson.JSONObject;
import java.util.ArrayList;
import java.util.Base64;
import java.util.Collections;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyContext;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.RPCHook;
import org.apache.rocketmq.remoting.exception.RemotingException;

/** RocketMQ's own producers and consumers of a cluster, which find its brokers by real name servers. */
final class Cluster implements MessageListenerConcurrently, TransactionListener {
    private static final Map<String, Cluster> STARTED = new ConcurrentHashMap<>();
    private static final long TRIED_MS = 60_000;
    /** So many messages come in one answer at most. */
    private static final int ANSWERED = 2_000;

    private TransactionMQProducer producer;
    private DefaultMQPushConsumer pushed;
    private DefaultLitePullConsumer pulled;
    private final List<JSONObject> received = Collections.synchronizedList(new ArrayList<>());

    static Object act(JSONObject command) throws Exception {
        String name = command.getString("name");
        switch (command.getString("action")) {
            case "start":
                Cluster started = new Cluster();
                STARTED.put(name, started); // also one that fails is stopped
                started.start(command);
                return null;
            case "send":
                return STARTED.get(name).send(command);
            case "count":
                return STARTED.get(name).received.size();
            case "received":
                return STARTED.get(name).received(command.getIntValue("from"));
            case "poll":
                return STARTED.get(name).poll(command.getLongValue("ms"));
            case "stop":
                STARTED.remove(name).stop();
                return null;
            default:
                throw new IllegalArgumentException("no such action: " + command.getString("action"));
        }
    }

    private void start(JSONObject command) throws Exception {
        String names = command.getString("names");
        String name = command.getString("name");
        RPCHook hook = command.containsKey("accessKey") ? new AclClientRPCHook(
            new SessionCredentials(command.getString("accessKey"), command.getString("secretKey"))) : null;
        String group = command.getString("group");
        switch (command.getString("kind")) {
            case "producer":
                producer = new TransactionMQProducer(group, hook);
                producer.setNamesrvAddr(names);
                producer.setInstanceName(name);
                producer.setVipChannelEnabled(false);
                producer.setTransactionListener(this);
                producer.setCompressMsgBodyOverHowmuch(4096);
                producer.start();
                return;
            case "push":
                pushed = new DefaultMQPushConsumer(group, hook, new AllocateMessageQueueAveragely());
                pushed.setNamesrvAddr(names);
                pushed.setInstanceName(name);
                pushed.setVipChannelEnabled(false);
                pushed.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
                pushed.setConsumeMessageBatchMaxSize(32);
                pushed.setPollNameServerInterval(1000);
                pushed.subscribe(command.getString("topic"), "*");
                pushed.registerMessageListener(this);
                pushed.start();
                return;
            case "litePull":
                pulled = new DefaultLitePullConsumer(group, hook);
                pulled.setNamesrvAddr(names);
                pulled.setInstanceName(name);
                pulled.setVipChannelEnabled(false);
                pulled.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
                pulled.subscribe(command.getString("topic"), "*");
                pulled.start();
                return;
            default:
                throw new IllegalArgumentException("no such kind: " + command.getString("kind"));
        }
    }

    private void stop() {
        if (producer != null) {
            producer.shutdown();
        }
        if (pushed != null) {
            pushed.shutdown();
        }
        if (pulled != null) {
            pulled.shutdown();
        }
    }

    // ---- sending

    private Object send(JSONObject command) throws Exception {
        String topic = command.getString("topic");
        JSONArray given = command.getJSONArray("messages");
        List<Message> messages = new ArrayList<>();
        for (int i = 0; i < given.size(); i++) {
            messages.add(message(topic, given.getJSONObject(i)));
        }

        List<SendResult> results = new ArrayList<>();
        String order = command.getString("order");
        if (command.getBooleanValue("batch")) {
            results.add(tried(() -> producer.send(messages)));
        } else if (command.containsKey("state")) {
            LocalTransactionState state = LocalTransactionState.valueOf(command.getString("state"));
            for (Message message : messages) {
                results.add(producer.sendMessageInTransaction(message, state));
            }
        } else {
            for (Message message : messages) {
                results.add(tried(() -> order == null ? producer.send(message) : producer.send(message,
                    (queues, one, key) -> queues.get(Math.floorMod(key.hashCode(), queues.size())), order)));
            }
        }

        JSONArray answer = new JSONArray();
        for (SendResult result : results) {
            JSONObject one = new JSONObject();
            one.put("status", result.getSendStatus().name());
            one.put("msgId", result.getMsgId());
            MessageQueue queue = result.getMessageQueue();
            one.put("broker", queue.getBrokerName());
            one.put("queueId", queue.getQueueId());
            one.put("queueOffset", result.getQueueOffset());
            answer.add(one);
        }
        return answer;
    }

    interface Sending {
        SendResult run() throws Exception;
    }

    /** A user repeats what fails while a broker is down. */
    private static SendResult tried(Sending sending) throws Exception {
        long untilMs = System.currentTimeMillis() + TRIED_MS;
        while (true) {
            try {
                return sending.run();
            } catch (RemotingException | MQBrokerException | MQClientException error) {
                if (System.currentTimeMillis() > untilMs) {
                    throw error;
                }
                Thread.sleep(100);
            }
        }
    }

    private static Message message(String topic, JSONObject given) {
        Message message = new Message(topic, Base64.getDecoder().decode(given.getString("body")));
        message.setFlag(given.getIntValue("flag"));
        if (given.containsKey("tags")) {
            message.setTags(given.getString("tags"));
        }
        if (given.containsKey("keys")) {
            message.setKeys(given.getString("keys"));
        }
        if (given.containsKey("delay")) {
            message.setDelayTimeLevel(given.getIntValue("delay"));
        }
        JSONObject properties = given.getJSONObject("properties");
        if (properties != null) {
            properties.forEach((key, value) -> message.putUserProperty(key, (String) value));
        }
        return message;
    }

    @Override
    public LocalTransactionState executeLocalTransaction(Message message, Object state) {
        return (LocalTransactionState) state;
    }

    @Override
    public LocalTransactionState checkLocalTransaction(MessageExt message) {
        return LocalTransactionState.UNKNOW;
    }

    // ---- receiving

    @Override
    public ConsumeConcurrentlyStatus consumeMessage(List<MessageExt> messages, ConsumeConcurrentlyContext context) {
        for (MessageExt message : messages) {
            received.add(fields(message));
        }
        return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
    }

    private Object received(int from) {
        synchronized (received) {
            return new ArrayList<>(received.subList(from, Math.min(received.size(), from + ANSWERED)));
        }
    }

    private Object poll(long ms) {
        List<JSONObject> polled = new ArrayList<>();
        for (MessageExt message : pulled.poll(ms)) {
            polled.add(fields(message));
        }
        return polled;
    }

    private static JSONObject fields(MessageExt message) {
        JSONObject one = new JSONObject();
        one.put("topic", message.getTopic());
        one.put("brokerName", message.getBrokerName());
        one.put("queueId", message.getQueueId());
        one.put("queueOffset", message.getQueueOffset());
        one.put("body", Base64.getEncoder().encodeToString(message.getBody()));
        one.put("tags", message.getTags());
        one.put("keys", message.getKeys());
        one.put("flag", message.getFlag());
        one.put("sysFlag", message.getSysFlag());
        one.put("msgId", message.getMsgId());
        one.put("offsetMsgId", message.getProperties() == null ? null : offsetMsgId(message));
        one.put("bornTimestamp", message.getBornTimestamp());
        one.put("storeTimestamp", message.getStoreTimestamp());
        one.put("bornHost", String.valueOf(message.getBornHost()));
        one.put("storeHost", String.valueOf(message.getStoreHost()));
        one.put("commitLogOffset", message.getCommitLogOffset());
        one.put("storeSize", message.getStoreSize());
        one.put("bodyCrc", message.getBodyCRC());
        one.put("reconsumeTimes", message.getReconsumeTimes());
        one.put("preparedTransactionOffset", message.getPreparedTransactionOffset());
        JSONObject properties = new JSONObject();
        for (String key : new HashSet<>(message.getProperties().keySet())) {
            properties.put(key, message.getProperty(key));
        }
        one.put("properties", properties);
        return one;
    }

    private static String offsetMsgId(MessageExt message) {
        return message instanceof org.apache.rocketmq.common.message.MessageClientExt
            ? ((org.apache.rocketmq.common.message.MessageClientExt) message).getOffsetMsgId() : message.getMsgId();
    }
}
