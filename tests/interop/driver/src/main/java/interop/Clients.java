package interop;

import com.alibaba.fastjson.JSONArray;
import com.alibaba.fastjson.JSONObject;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyContext;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.netty.NettyRemotingServer;

/** RocketMQ's own producer and consumer of one broker, and a name server that knows it. */
final class Clients implements MessageListenerConcurrently {
    private static final Map<String, Clients> STARTED = new ConcurrentHashMap<>();

    private final NettyRemotingServer names;
    private final DefaultMQProducer producer;
    private final DefaultMQPushConsumer consumer;
    private final JSONObject failures;
    private final List<JSONObject> received = Collections.synchronizedList(new ArrayList<>());

    private Clients(JSONObject command) throws Exception {
        int port = command.getIntValue("names");
        String group = command.getString("group");
        failures = command.getJSONObject("failures");
        names = Route.start(port, command.getString("broker"));
        producer = new DefaultMQProducer("producers-of-" + group);
        producer.setNamesrvAddr("127.0.0.1:" + port);
        producer.setInstanceName("producer-" + port);
        producer.setVipChannelEnabled(false);
        producer.start();
        consumer = new DefaultMQPushConsumer(group);
        consumer.setNamesrvAddr("127.0.0.1:" + port);
        consumer.setInstanceName("consumer-" + port);
        consumer.setVipChannelEnabled(false);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setMaxReconsumeTimes(command.getIntValue("maxReconsumeTimes"));
        consumer.subscribe(command.getString("topic"), "*");
        consumer.registerMessageListener(this);
        consumer.start();
    }

    static Object act(JSONObject command) throws Exception {
        String group = command.getString("group");
        switch (command.getString("action")) {
            case "start":
                STARTED.put(group, new Clients(command));
                return null;
            case "send":
                return STARTED.get(group).send(command);
            case "received":
                return new ArrayList<>(STARTED.get(group).received);
            case "stop":
                Clients clients = STARTED.remove(group);
                clients.consumer.shutdown();
                clients.producer.shutdown();
                clients.names.shutdown();
                return null;
            default:
                throw new IllegalArgumentException("no such action: " + command.getString("action"));
        }
    }

    private Object send(JSONObject command) throws Exception {
        JSONArray given = command.getJSONArray("messages");
        List<Message> messages = new ArrayList<>();
        for (int i = 0; i < given.size(); i++) {
            JSONObject one = given.getJSONObject(i);
            Message message = new Message(command.getString("topic"), one.getString("tags"), one.getString("keys"),
                one.getString("body").getBytes(StandardCharsets.UTF_8));
            if (one.containsKey("own")) {
                message.putUserProperty("own", one.getString("own"));
            }
            if (one.containsKey("delay")) {
                message.setDelayTimeLevel(one.getIntValue("delay"));
            }
            if (one.containsKey("deliverMs")) {
                message.setDeliverTimeMs(one.getLongValue("deliverMs"));
            }
            if (one.containsKey("reconsumeTimes")) {
                MessageAccessor.setReconsumeTime(message, one.getString("reconsumeTimes"));
            }
            messages.add(message);
        }
        List<String> statuses = new ArrayList<>();
        if (command.getBooleanValue("batch")) {
            statuses.add(producer.send(messages).getSendStatus().name());
        } else {
            for (Message message : messages) {
                statuses.add(producer.send(message).getSendStatus().name());
            }
        }
        return statuses;
    }

    /** A message fails as often as it was told, by its body. */
    @Override
    public ConsumeConcurrentlyStatus consumeMessage(List<MessageExt> messages, ConsumeConcurrentlyContext context) {
        MessageExt message = messages.get(0);
        String body = new String(message.getBody(), StandardCharsets.UTF_8);
        JSONObject one = new JSONObject();
        one.put("topic", message.getTopic());
        one.put("body", body);
        one.put("tags", message.getTags());
        one.put("keys", message.getKeys());
        one.put("reconsumeTimes", message.getReconsumeTimes());
        one.put("properties", message.getProperties());
        received.add(one);
        return message.getReconsumeTimes() < failures.getIntValue(body) ? ConsumeConcurrentlyStatus.RECONSUME_LATER
            : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
    }
}
