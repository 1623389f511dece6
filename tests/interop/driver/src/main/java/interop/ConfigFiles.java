package interop;

import com.alibaba.fastjson.JSONObject;
import java.util.Map;
import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.broker.offset.ConsumerOffsetManager;
import org.apache.rocketmq.broker.topic.TopicConfigManager;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.remoting.netty.NettyClientConfig;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;
import org.apache.rocketmq.store.config.MessageStoreConfig;

/** The broker's managers of its files in config/: what they load, and what they write. */
final class ConfigFiles {
    private ConfigFiles() {
    }

    static Object act(JSONObject command) {
        MessageStoreConfig config = new MessageStoreConfig();
        config.setStorePathRootDir(command.getString("root"));
        config.setHaListenPort(0);
        NettyServerConfig server = new NettyServerConfig();
        server.setListenPort(0);
        BrokerController controller = // made, never started
            new BrokerController(new BrokerConfig(), server, new NettyClientConfig(), config);
        return "topics".equals(command.getString("file"))
            ? topics(controller.getTopicConfigManager(), command)
            : offsets(controller.getConsumerOffsetManager(), command);
    }

    private static Object topics(TopicConfigManager manager, JSONObject command) {
        if (!manager.load()) {
            throw new IllegalStateException("load refused " + manager.configFilePath());
        }
        JSONObject made = command.getJSONObject("put");
        if (made != null) { // topic -> [read queues, write queues, perm, {attribute: value}]
            made.forEach((topic, fields) -> {
                com.alibaba.fastjson.JSONArray values = (com.alibaba.fastjson.JSONArray) fields;
                TopicConfig each = new TopicConfig(topic, values.getIntValue(0), values.getIntValue(1),
                    values.getIntValue(2));
                values.getJSONObject(3).forEach((name, value) -> each.getAttributes().put(name, (String) value));
                manager.getTopicConfigTable().put(topic, each);
                manager.getDataVersion().nextVersion();
            });
            manager.persist();
        }
        JSONObject json = new JSONObject();
        json.put("topics", JSONObject.toJSON(manager.getTopicConfigTable()));
        json.put("version", JSONObject.toJSON(manager.getDataVersion()));
        return json;
    }

    private static Object offsets(ConsumerOffsetManager manager, JSONObject command) {
        if (!manager.load()) {
            throw new IllegalStateException("load refused " + manager.configFilePath());
        }
        JSONObject made = command.getJSONObject("put");
        if (made != null) { // topic@group -> {queue id: offset}
            made.forEach((name, offsets) -> {
                String[] parts = name.split("@");
                ((JSONObject) offsets).forEach((queueId, offset) -> manager.commitOffset("interop", parts[1], parts[0],
                    Integer.parseInt(queueId), ((Number) offset).longValue()));
            });
            manager.persist();
        }
        JSONObject table = new JSONObject();
        for (Map.Entry<String, ? extends Map<Integer, Long>> each : manager.getOffsetTable().entrySet()) {
            JSONObject offsets = new JSONObject();
            each.getValue().forEach((queueId, offset) -> offsets.put(String.valueOf(queueId), offset));
            table.put(each.getKey(), offsets);
        }
        JSONObject json = new JSONObject();
        json.put("offsets", table);
        json.put("groups", JSONObject.toJSON(manager.getGroupTopicMap()));
        json.put("version", JSONObject.toJSON(manager.getDataVersion()));
        return json;
    }
}
