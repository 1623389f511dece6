package interop;

import com.alibaba.fastjson.JSONArray;
import com.alibaba.fastjson.JSONObject;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.impl.factory.MQClientInstance;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.sysflag.MessageSysFlag;
import org.apache.rocketmq.remoting.netty.NettyRemotingServer;
import org.apache.rocketmq.remoting.protocol.header.EndTransactionRequestHeader;

/**
 * A producer of transactions for one broker, which RocketMQ's own client is, and a name server that knows one broker.
 */
final class Transactions implements TransactionListener {
    private static final Map<String, Transactions> PRODUCERS = new ConcurrentHashMap<>();

    private final NettyRemotingServer names;
    private final TransactionMQProducer producer;
    private final String broker;
    private final Map<String, LocalTransactionState> answers = new ConcurrentHashMap<>();
    private final List<String> asked = Collections.synchronizedList(new ArrayList<>());

    private Transactions(JSONObject command) throws Exception {
        broker = command.getString("broker");
        names = Route.start(command.getIntValue("names"), broker);
        producer = new TransactionMQProducer(command.getString("group"));
        producer.setNamesrvAddr("127.0.0.1:" + command.getIntValue("names"));
        producer.setInstanceName("producer-" + command.getIntValue("names"));
        producer.setVipChannelEnabled(false);
        producer.setHeartbeatBrokerInterval(200);
        producer.setTransactionListener(this);
        producer.start();
        MQClientInstance client = producer.getDefaultMQProducerImpl().getMqClientFactory();
        client.updateTopicRouteInfoFromNameServer(command.getString("topic"));
        client.sendHeartbeatToAllBrokerWithLock(); // now the broker knows that the group has a live producer
    }

    static Object act(JSONObject command) throws Exception {
        String group = command.getString("group");
        if ("start".equals(command.getString("action"))) {
            Transactions started = new Transactions(command);
            started.answer(command.getJSONObject("answers"));
            PRODUCERS.put(group, started);
            return null;
        }
        Transactions producer = PRODUCERS.get(group);
        switch (command.getString("action")) {
            case "send":
                return producer.send(command.getString("topic"), command.getJSONArray("messages"));
            case "end":
                return producer.end(command);
            case "answers":
                producer.answer(command.getJSONObject("answers"));
                return null;
            case "asked":
                return new ArrayList<>(producer.asked);
            case "stop":
                PRODUCERS.remove(group);
                producer.producer.shutdown();
                producer.names.shutdown();
                return null;
            default:
                throw new IllegalArgumentException("no such action: " + command.getString("action"));
        }
    }

    private void answer(JSONObject found) {
        for (String body : found.keySet()) {
            answers.put(body, LocalTransactionState.valueOf(found.getString(body)));
        }
    }

    private Object send(String topic, JSONArray messages) throws Exception {
        JSONArray sent = new JSONArray();
        for (int i = 0; i < messages.size(); i++) {
            JSONObject given = messages.getJSONObject(i);
            Message message = new Message(topic, given.getString("tags"), given.getString("keys"),
                given.getString("body").getBytes(StandardCharsets.UTF_8));
            message.setFlag(given.getIntValue("flag"));
            if (given.containsKey("immunity")) {
                message.putUserProperty("CHECK_IMMUNITY_TIME_IN_SECONDS", given.getString("immunity"));
            }
            SendResult result = producer.sendMessageInTransaction(message,
                LocalTransactionState.valueOf(given.getString("state")));
            JSONObject one = new JSONObject();
            // a broker before 5.1 does not name the transaction in its answer; its id is the message's UNIQ_KEY in all of them
            one.put("transactionId", result.getTransactionId() == null ? result.getMsgId() : result.getTransactionId());
            one.put("status", result.getSendStatus().name());
            sent.add(one);
        }
        return sent;
    }

    /** What a client says at the end of its transaction, for a half message that somebody else has prepared. */
    private Object end(JSONObject command) throws Exception {
        EndTransactionRequestHeader header = new EndTransactionRequestHeader();
        header.setProducerGroup(command.getString("group"));
        header.setCommitLogOffset(command.getLong("physicalOffset"));
        header.setTranStateTableOffset(command.getLong("queueOffset"));
        header.setTransactionId(command.getString("transactionId"));
        header.setMsgId(command.getString("transactionId"));
        header.setFromTransactionCheck(false);
        header.setCommitOrRollback(command.getBooleanValue("commit") ? MessageSysFlag.TRANSACTION_COMMIT_TYPE
            : MessageSysFlag.TRANSACTION_ROLLBACK_TYPE);
        producer.getDefaultMQProducerImpl().getMqClientFactory().getMQClientAPIImpl()
            .endTransactionOneway(broker, header, null, 3000);
        return null;
    }

    @Override
    public LocalTransactionState executeLocalTransaction(Message message, Object state) {
        return (LocalTransactionState) state;
    }

    @Override
    public LocalTransactionState checkLocalTransaction(MessageExt message) {
        String body = new String(message.getBody(), StandardCharsets.UTF_8);
        asked.add(body);
        return answers.getOrDefault(body, LocalTransactionState.UNKNOW);
    }
}
