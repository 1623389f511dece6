package interop;

import com.alibaba.fastjson.JSONArray;
import com.alibaba.fastjson.JSONObject;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.SocketAddress;
import java.net.UnknownHostException;
import java.util.ArrayList;
import java.util.Base64;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageExtBatch;
import org.apache.rocketmq.common.message.MessageExtBrokerInner;
import org.apache.rocketmq.common.sysflag.MessageSysFlag;

/** Messages from JSON and to JSON; properties are lists of pairs, because their order is in the bytes. */
final class Messages {
    private Messages() {
    }

    static MessageExtBrokerInner single(JSONObject json) throws UnknownHostException {
        MessageExtBrokerInner message = new MessageExtBrokerInner();
        common(message, json);
        message.setBody(bytes(json, "body"));
        Map<String, String> properties = properties(json);
        MessageAccessor.setProperties(message, properties);
        String text = json.getString("propertiesText"); // as a client sent it, when its form matters
        message.setPropertiesString(text == null ? MessageDecoder.messageProperties2String(properties) : text);
        message.setPreparedTransactionOffset(json.getLongValue("prepared"));
        return message;
    }

    /** As a producer encodes a batch: bodies, flags and properties; the rest is the batch's. */
    static MessageExtBatch batch(JSONObject json) throws UnknownHostException {
        MessageExtBatch batch = new MessageExtBatch();
        common(batch, json);
        List<Message> messages = new ArrayList<>();
        for (Object each : json.getJSONArray("messages")) {
            JSONObject element = (JSONObject) each;
            Message message = new Message(batch.getTopic(), bytes(element, "body"));
            message.setFlag(element.getIntValue("flag"));
            MessageAccessor.setProperties(message, properties(element));
            messages.add(message);
        }
        batch.setBody(MessageDecoder.encodeMessages(messages));
        Map<String, String> properties = properties(json);
        MessageAccessor.setProperties(batch, properties);
        if (json.getBooleanValue("inner")) { // as SendMessageProcessor does for a topic with queue.type=BatchCQ
            batch.setSysFlag(batch.getSysFlag() | MessageSysFlag.NEED_UNWRAP_FLAG | MessageSysFlag.INNER_BATCH_FLAG);
            batch.setInnerBatch(true);
            MessageAccessor.putProperty(batch, MessageConst.PROPERTY_INNER_NUM, String.valueOf(messages.size()));
        }
        batch.setPropertiesString(MessageDecoder.messageProperties2String(batch.getProperties()));
        return batch;
    }

    private static void common(MessageExtBrokerInner message, JSONObject json) throws UnknownHostException {
        message.setTopic(json.getString("topic"));
        message.setQueueId(json.getIntValue("queueId"));
        message.setFlag(json.getIntValue("flag"));
        message.setSysFlag(json.getIntValue("sysFlag"));
        message.setBornTimestamp(json.getLongValue("born"));
        message.setBornHost(host(json.getString("bornHost")));
        message.setStoreHost(host(json.getString("storeHost")));
        message.setReconsumeTimes(json.getIntValue("reconsume"));
    }

    static JSONObject toJson(MessageExt message) {
        JSONObject json = new JSONObject(true);
        json.put("topic", message.getTopic());
        json.put("queueId", message.getQueueId());
        json.put("queueOffset", message.getQueueOffset());
        json.put("physicalOffset", message.getCommitLogOffset());
        json.put("size", message.getStoreSize());
        json.put("body", message.getBody() == null ? new byte[0] : message.getBody()); // fastjson: base64
        json.put("bodyCrc", message.getBodyCRC());
        json.put("flag", message.getFlag());
        json.put("sysFlag", message.getSysFlag());
        json.put("born", message.getBornTimestamp());
        json.put("bornHost", host(message.getBornHost()));
        json.put("stored", message.getStoreTimestamp());
        json.put("storeHost", host(message.getStoreHost()));
        json.put("reconsume", message.getReconsumeTimes());
        json.put("prepared", message.getPreparedTransactionOffset());
        json.put("properties", message.getProperties());
        json.put("messageId", message.getMsgId());
        return json;
    }

    private static byte[] bytes(JSONObject json, String name) {
        return Base64.getDecoder().decode(json.getString(name));
    }

    private static Map<String, String> properties(JSONObject json) {
        Map<String, String> properties = new LinkedHashMap<>();
        JSONArray pairs = json.getJSONArray("properties");
        for (int i = 0; pairs != null && i < pairs.size(); i++) {
            properties.put(pairs.getJSONArray(i).getString(0), pairs.getJSONArray(i).getString(1));
        }
        return properties;
    }

    private static SocketAddress host(String text) throws UnknownHostException {
        String host = text == null ? "127.0.0.1:0" : text;
        int colon = host.lastIndexOf(':');
        return new InetSocketAddress(InetAddress.getByName(host.substring(0, colon)),
            Integer.parseInt(host.substring(colon + 1)));
    }

    private static String host(SocketAddress address) {
        InetSocketAddress host = (InetSocketAddress) address;
        return host.getAddress().getHostAddress() + " " + host.getPort();
    }
}
