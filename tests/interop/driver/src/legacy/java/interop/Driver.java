package interop;

import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.JSONArray;
import com.alibaba.fastjson.JSONObject;
import com.alibaba.fastjson.serializer.SerializerFeature;
import java.io.BufferedReader;
import java.io.File;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.SocketAddress;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.common.SystemClock;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageExtBatch;
import org.apache.rocketmq.store.AppendMessageResult;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.GetMessageResult;
import org.apache.rocketmq.store.GetMessageStatus;
import org.apache.rocketmq.store.MessageExtBrokerInner;
import org.apache.rocketmq.store.PutMessageResult;
import org.apache.rocketmq.store.QueryMessageResult;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.stats.BrokerStatsManager;

/** The same commands as the driver of 5.x understands, as far as random stores need them, for the store of 4.9. */
public final class Driver {
    private static final Map<String, Store> STORES = new ConcurrentHashMap<>();
    private static PrintStream answers;

    private Driver() {
    }

    public static void main(String[] arguments) throws Exception {
        answers = new PrintStream(System.out, false, StandardCharsets.UTF_8);
        System.setOut(System.err);
        BufferedReader commands = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = commands.readLine(); line != null; line = commands.readLine()) {
            JSONObject command = JSON.parseObject(line);
            String name = command.getString("store");
            if (name == null) {
                answer(command, Driver::hello);
            } else {
                Store store = STORES.computeIfAbsent(name, Store::new);
                store.thread.execute(() -> answer(command, () -> store.act(command)));
                if ("close".equals(command.getString("op"))) {
                    STORES.remove(name);
                    store.thread.shutdown();
                }
            }
        }
        System.exit(0);
    }

    interface Action {
        Object run() throws Exception;
    }

    private static void answer(JSONObject command, Action action) {
        JSONObject answer = new JSONObject();
        answer.put("id", command.get("id"));
        try {
            answer.put("result", action.run());
        } catch (Throwable error) {
            answer.put("error", error.toString());
            error.printStackTrace();
        }
        String line = JSON.toJSONString(answer, SerializerFeature.WriteMapNullValue,
            SerializerFeature.DisableCircularReferenceDetect);
        synchronized (answers) {
            answers.println(line);
            answers.flush();
        }
    }

    private static Object hello() throws Exception {
        Properties properties = new Properties();
        properties.load(DefaultMessageStore.class.getResourceAsStream(
            "/META-INF/maven/org.apache.rocketmq/rocketmq-store/pom.properties"));
        JSONObject hello = new JSONObject();
        hello.put("rocketmq", properties.getProperty("version"));
        hello.put("java", System.getProperty("java.version"));
        hello.put("pid", ProcessHandle.current().pid());
        return hello;
    }

    /** One DefaultMessageStore. */
    private static final class Store {
        final ExecutorService thread;
        private volatile long clockMs = -1;
        private String root;
        private DefaultMessageStore store;

        Store(String name) {
            thread = Executors.newSingleThreadExecutor(task -> {
                Thread made = new Thread(task, "store-" + name);
                made.setDaemon(true);
                return made;
            });
        }

        Object act(JSONObject command) throws Exception {
            switch (command.getString("op")) {
                case "open":
                    return open(command);
                case "put":
                    List<Object> results = new ArrayList<>();
                    for (Object each : command.getJSONArray("messages")) {
                        results.add(put((JSONObject) each));
                    }
                    return results;
                case "clock":
                    clockMs = command.getLongValue("ms");
                    return clockMs;
                case "dump":
                    return dump(command.getString("topic"), command.getIntValue("queueId"));
                case "looks":
                    List<Object> looks = new ArrayList<>();
                    for (Object each : command.getJSONArray("physicalOffsets")) {
                        MessageExt found = store.lookMessageByOffset(((Number) each).longValue());
                        looks.add(found == null ? null : json(found));
                    }
                    return looks;
                case "query":
                    return query(command);
                case "log":
                    JSONObject log = new JSONObject();
                    log.put("min", store.getMinPhyOffset());
                    log.put("max", store.getMaxPhyOffset());
                    log.put("behind", store.dispatchBehindBytes());
                    return log;
                case "delete":
                    return delete(command.getString("topic"));
                case "dispatched":
                    return dispatched();
                case "close":
                    dispatched();
                    store.shutdown();
                    return true;
                default:
                    throw new IllegalArgumentException("no such command: " + command.getString("op"));
            }
        }

        private boolean open(JSONObject command) throws Exception {
            root = command.getString("root");
            MessageStoreConfig config = new MessageStoreConfig();
            config.setStorePathRootDir(root);
            config.setStorePathCommitLog(root + "/commitlog");
            config.setHaListenPort(0);
            Properties settings = new Properties();
            command.getJSONObject("config").forEach((name, value) -> settings.setProperty(name, String.valueOf(value)));
            MixAll.properties2Object(settings, config);
            SystemClock clock = new SystemClock() {
                @Override
                public long now() {
                    return clockMs < 0 ? System.currentTimeMillis() : clockMs;
                }
            };
            synchronized (Driver.class) { // one after the other, as in the driver of 5.x
                store = made(config, clock);
            }
            if (!store.load()) {
                throw new IllegalStateException("load refused the store");
            }
            store.start();
            return true;
        }

        private static DefaultMessageStore made(MessageStoreConfig config, SystemClock clock) throws Exception {
            return new DefaultMessageStore(config, new BrokerStatsManager("interop", true),
                (topic, queueId, offset, tags, time, filter, properties) -> { }, new BrokerConfig()) {
                @Override
                public SystemClock getSystemClock() {
                    return clock;
                }
            };
        }

        /** As 4.9's broker: it names the topics that stay. */
        private int delete(String topic) {
            Set<String> stay = new HashSet<>();
            String[] there = new File(root, "consumequeue").list();
            for (String each : there == null ? new String[0] : there) {
                stay.add(each);
            }
            int before = stay.size();
            stay.remove(topic);
            store.cleanUnusedTopic(stay);
            return before - stay.size();
        }

        private boolean dispatched() throws InterruptedException {
            long deadline = System.currentTimeMillis() + 20_000;
            while (store.dispatchBehindBytes() > 0) {
                if (System.currentTimeMillis() > deadline) {
                    return false;
                }
                Thread.sleep(1);
            }
            return true;
        }

        private JSONObject put(JSONObject json) throws Exception {
            if (json.containsKey("clock")) {
                clockMs = json.getLongValue("clock");
            }
            PutMessageResult put;
            if (json.containsKey("messages")) {
                MessageExtBatch batch = new MessageExtBatch();
                List<Message> messages = new ArrayList<>();
                for (Object each : json.getJSONArray("messages")) {
                    JSONObject element = (JSONObject) each;
                    Message message = new Message(json.getString("topic"), body(element));
                    message.setFlag(element.getIntValue("flag"));
                    MessageAccessor.setProperties(message, properties(element));
                    messages.add(message);
                }
                common(batch, json);
                MessageAccessor.setProperties(batch, properties(json));
                batch.setBody(MessageDecoder.encodeMessages(messages));
                put = store.putMessages(batch);
            } else {
                MessageExtBrokerInner message = new MessageExtBrokerInner();
                common(message, json);
                Map<String, String> properties = properties(json);
                MessageAccessor.setProperties(message, properties);
                String text = json.getString("propertiesText");
                message.setPropertiesString(text == null ? MessageDecoder.messageProperties2String(properties) : text);
                message.setPreparedTransactionOffset(json.getLongValue("prepared"));
                message.setBody(body(json));
                put = store.putMessage(message);
            }
            JSONObject result = new JSONObject();
            result.put("status", put.getPutMessageStatus().name());
            result.put("ok", put.isOk());
            AppendMessageResult append = put.getAppendMessageResult();
            if (append != null) {
                result.put("append", append.getStatus().name());
                result.put("physicalOffset", append.getWroteOffset());
                result.put("size", append.getWroteBytes());
                result.put("queueOffset", append.getLogicsOffset());
                result.put("messageId", put.isOk() ? append.getMsgId() : null);
            }
            return result;
        }

        private static void common(MessageExt message, JSONObject json) throws Exception {
            message.setTopic(json.getString("topic"));
            message.setQueueId(json.getIntValue("queueId"));
            message.setFlag(json.getIntValue("flag"));
            message.setSysFlag(json.getIntValue("sysFlag"));
            message.setBornTimestamp(json.getLongValue("born"));
            message.setBornHost(host(json.getString("bornHost")));
            message.setStoreHost(host(json.getString("storeHost")));
            if (((InetSocketAddress) message.getBornHost()).getAddress() instanceof java.net.Inet6Address) {
                message.setBornHostV6Flag(); // in 4.9 the broker sets them, not the store
            }
            if (((InetSocketAddress) message.getStoreHost()).getAddress() instanceof java.net.Inet6Address) {
                message.setStoreHostAddressV6Flag();
            }
            message.setReconsumeTimes(json.getIntValue("reconsume"));
        }

        private JSONObject dump(String topic, int queueId) {
            JSONObject json = new JSONObject();
            long offset = store.getMinOffsetInQueue(topic, queueId);
            long end = store.getMaxOffsetInQueue(topic, queueId);
            json.put("min", offset);
            json.put("max", end);
            List<Object> messages = new ArrayList<>();
            while (offset < end) {
                GetMessageResult got = store.getMessage("interop", topic, queueId, offset, 32, null);
                if (got.getStatus() != GetMessageStatus.FOUND) {
                    json.put("stopped", got.getStatus().name() + " at " + offset);
                    got.release();
                    break;
                }
                for (ByteBuffer buffer : got.getMessageBufferList()) {
                    MessageExt message = MessageDecoder.decode(buffer, true, false);
                    messages.add(message == null ? null : json(message));
                }
                offset = got.getNextBeginOffset();
                got.release();
            }
            json.put("messages", messages);
            return json;
        }

        private List<Object> query(JSONObject command) {
            List<Object> found = new ArrayList<>();
            for (Object key : command.getJSONArray("keys")) {
                QueryMessageResult got = store.queryMessage(command.getString("topic"), (String) key,
                    command.getIntValue("count"), 0, Long.MAX_VALUE);
                List<Long> offsets = new ArrayList<>();
                for (ByteBuffer buffer : got.getMessageBufferList()) {
                    offsets.add(buffer.getLong(buffer.position() + 28)); // PHYSICALOFFSET
                }
                got.release();
                found.add(offsets);
            }
            return found;
        }

        private static JSONObject json(MessageExt message) {
            JSONObject json = new JSONObject(true);
            json.put("topic", message.getTopic());
            json.put("queueId", message.getQueueId());
            json.put("queueOffset", message.getQueueOffset());
            json.put("physicalOffset", message.getCommitLogOffset());
            json.put("size", message.getStoreSize());
            json.put("body", message.getBody() == null ? new byte[0] : message.getBody());
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

        private static byte[] body(JSONObject json) {
            return Base64.getDecoder().decode(json.getString("body"));
        }

        private static Map<String, String> properties(JSONObject json) {
            Map<String, String> properties = new LinkedHashMap<>();
            JSONArray pairs = json.getJSONArray("properties");
            for (int i = 0; pairs != null && i < pairs.size(); i++) {
                properties.put(pairs.getJSONArray(i).getString(0), pairs.getJSONArray(i).getString(1));
            }
            return properties;
        }

        private static SocketAddress host(String text) throws Exception {
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
}
