package interop;

import com.alibaba.fastjson.JSONObject;
import java.util.Map;
import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.broker.filter.ConsumerFilterManager;
import org.apache.rocketmq.broker.offset.ConsumerOffsetManager;
import org.apache.rocketmq.broker.subscription.SubscriptionGroupManager;
import org.apache.rocketmq.broker.topic.TopicConfigManager;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.remoting.netty.NettyClientConfig;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;
import org.apache.rocketmq.remoting.protocol.subscription.SubscriptionGroupConfig;
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
        switch (command.getString("file")) {
            case "topics":
                return topics(controller.getTopicConfigManager(), command);
            case "groups":
                return groups(controller.getSubscriptionGroupManager(), command);
            case "filters":
                return filters(controller.getConsumerFilterManager(), command);
            default:
                return offsets(controller.getConsumerOffsetManager(), command);
        }
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

    private static Object groups(SubscriptionGroupManager manager, JSONObject command) {
        if (!manager.load()) {
            throw new IllegalStateException("load refused " + manager.configFilePath());
        }
        JSONObject made = command.getJSONObject("put");
        if (made != null) { // group -> its fields
            made.forEach((group, fields) -> {
                SubscriptionGroupConfig each = ((JSONObject) fields).toJavaObject(SubscriptionGroupConfig.class);
                each.setGroupName(group);
                manager.updateSubscriptionGroupConfig(each);
            });
        }
        JSONObject forbidden = command.getJSONObject("forbid");
        if (forbidden != null) { // group -> topic
            forbidden.forEach((group, topic) -> manager.updateForbidden(group, (String) topic, 1, true));
        }
        JSONObject json = new JSONObject();
        json.put("groups", JSONObject.toJSON(manager.getSubscriptionGroupTable()));
        json.put("forbidden", JSONObject.toJSON(manager.getForbiddenTable()));
        json.put("version", JSONObject.toJSON(manager.getDataVersion()));
        return json;
    }

    private static Object filters(ConsumerFilterManager manager, JSONObject command) {
        if (!manager.load()) {
            throw new IllegalStateException("load refused " + manager.configFilePath());
        }
        com.alibaba.fastjson.JSONArray made = command.getJSONArray("put");
        if (made != null) { // [group, topic, expression, version of the client]
            made.forEach(each -> {
                com.alibaba.fastjson.JSONArray values = (com.alibaba.fastjson.JSONArray) each;
                if (!manager.register(values.getString(1), values.getString(0), values.getString(2), "SQL92",
                    values.getLongValue(3))) {
                    throw new IllegalStateException("register refused " + values);
                }
            });
        }
        if (command.getString("end") != null) {
            manager.unRegister(command.getString("end"));
        }
        if (made != null || command.getString("end") != null) {
            manager.persist();
        }
        com.alibaba.fastjson.JSONArray found = new com.alibaba.fastjson.JSONArray();
        manager.getFilterDataByTopic().forEach((topic, groups) -> groups.getGroupFilterData().forEach((group, data) -> {
            JSONObject each = new JSONObject();
            each.put("group", group);
            each.put("topic", topic);
            each.put("expression", data.getExpression());
            each.put("type", data.getExpressionType());
            each.put("born", data.getBornTime());
            each.put("dead", data.getDeadTime());
            each.put("version", data.getClientVersion());
            each.put("isDead", data.isDead());
            found.add(each);
        }));
        return found;
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
