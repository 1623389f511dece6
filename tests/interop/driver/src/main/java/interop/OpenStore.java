package interop;

import com.alibaba.fastjson.JSONArray;
import com.alibaba.fastjson.JSONObject;
import java.lang.reflect.Method;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ConcurrentMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import org.apache.rocketmq.common.BoundaryType;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.common.SystemClock;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.store.AppendMessageResult;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.GetMessageResult;
import org.apache.rocketmq.store.GetMessageStatus;
import org.apache.rocketmq.store.MessageArrivingListener;
import org.apache.rocketmq.store.PutMessageResult;
import org.apache.rocketmq.store.QueryMessageResult;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.stats.BrokerStatsManager;

/** One DefaultMessageStore and what is asked of it. */
final class OpenStore {
    private static final MessageArrivingListener NOBODY = (topic, queueId, offset, tags, time, filter, properties) -> { };
    private static final long DISPATCH_MS = 20_000;

    final ExecutorService thread;
    private DefaultMessageStore store;
    private Pump pump;
    private volatile long clockMs = -1;

    OpenStore(String name) {
        thread = Executors.newSingleThreadExecutor(task -> {
            Thread made = new Thread(task, "store-" + name);
            made.setDaemon(true);
            return made;
        });
    }

    /** DefaultMessageStore with a clock that a test can set: the same times, the same bytes. */
    private final class Store extends DefaultMessageStore {
        private final SystemClock clock = new SystemClock() {
            @Override
            public long now() {
                return clockMs < 0 ? System.currentTimeMillis() : clockMs;
            }
        };

        Store(MessageStoreConfig config, ConcurrentMap<String, TopicConfig> topics) throws Exception {
            super(config, new BrokerStatsManager("interop", true), NOBODY, new BrokerConfig(), topics);
        }

        @Override
        public SystemClock getSystemClock() {
            return clock == null ? super.getSystemClock() : clock; // the constructor may ask
        }
    }

    Object act(JSONObject command) throws Exception {
        switch (command.getString("op")) {
            case "open":
                make(command);
                return load() && start();
            case "make":
                make(command);
                return true;
            case "load":
                return load();
            case "start":
                return start();
            case "put":
                return put(command.getJSONArray("messages"), command.getLongValue("pauseMs"));
            case "clock":
                clockMs = command.getLongValue("ms");
                return clockMs;
            case "get":
                List<Object> gets = new ArrayList<>();
                for (Object each : command.getJSONArray("at")) { // [queue offset, count]
                    gets.add(get(command, ((JSONArray) each).getLongValue(0), ((JSONArray) each).getIntValue(1)));
                }
                return gets;
            case "dump":
                return dump(command);
            case "look":
                return json(store.lookMessageByOffset(command.getLongValue("physicalOffset")));
            case "looks":
                List<Object> looks = new ArrayList<>();
                for (Object each : command.getJSONArray("physicalOffsets")) {
                    looks.add(json(store.lookMessageByOffset(((Number) each).longValue())));
                }
                return looks;
            case "query":
                return query(command);
            case "times":
                return times(command);
            case "ends":
                return ends(command.getString("topic"), command.getIntValue("queueId"));
            case "log":
                return log();
            case "delete":
                return store.deleteTopics(Collections.singleton(command.getString("topic")));
            case "clean": // what its schedule does every ten seconds, after the files were declared to be expired
                store.executeDeleteFilesManually();
                for (String name : new String[] {"cleanFilesPeriodically", "cleanQueueFilesPeriodically"}) {
                    Method clean = DefaultMessageStore.class.getDeclaredMethod(name);
                    clean.setAccessible(true);
                    clean.invoke(store);
                }
                return store.getMinPhyOffset();
            case "dispatched":
                return dispatched();
            case "flush":
                return store.flush();
            case "pump":
                pump = new Pump(store, command);
                return pump.begin();
            case "stop":
                pump.stop();
                return true;
            case "pumped":
                return pump.done(command.getLongValue("waitMs"));
            case "close":
                return close();
            case "forget": // as a process that dies would, but for the lock: it goes with the process
                return true;
            default:
                throw new IllegalArgumentException("no such command: " + command.getString("op"));
        }
    }

    private void make(JSONObject command) throws Exception {
        MessageStoreConfig config = new MessageStoreConfig();
        config.setStorePathRootDir(command.getString("root"));
        config.setStorePathCommitLog(command.getString("root") + "/commitlog");
        config.setHaListenPort(0);
        Properties settings = new Properties();
        JSONObject given = command.getJSONObject("config");
        if (given != null) {
            given.forEach((name, value) -> settings.setProperty(name, String.valueOf(value)));
        }
        MixAll.properties2Object(settings, config); // as the broker reads its own file
        ConcurrentMap<String, TopicConfig> topics = new ConcurrentHashMap<>();
        JSONObject attributes = command.getJSONObject("topics"); // topic -> {attribute: value}
        if (attributes != null) {
            attributes.forEach((topic, values) -> {
                TopicConfig each = new TopicConfig(topic, 8, 8);
                ((JSONObject) values).forEach((name, value) -> each.getAttributes().put(name, String.valueOf(value)));
                topics.put(topic, each);
            });
        }
        synchronized (OpenStore.class) { // the constructor fills a static TreeMap of StoreStatsService
            store = "defaultRocksDB".equals(config.getStoreType()) ? rocksdb(config, topics) : new Store(config, topics);
        }
    }

    private static DefaultMessageStore rocksdb(MessageStoreConfig config, ConcurrentMap<String, TopicConfig> topics)
        throws Exception {
        return (DefaultMessageStore) Class.forName("org.apache.rocketmq.store.RocksDBMessageStore")
            .getConstructor(MessageStoreConfig.class, BrokerStatsManager.class, MessageArrivingListener.class,
                BrokerConfig.class, ConcurrentMap.class) // 5.1 has no such class
            .newInstance(config, new BrokerStatsManager("interop", true), NOBODY, new BrokerConfig(), topics);
    }

    private boolean load() {
        if (!store.load()) {
            throw new IllegalStateException("load refused the store");
        }
        return true;
    }

    private boolean start() throws Exception {
        store.start();
        return true;
    }

    private Object put(JSONArray messages, long pauseMs) throws Exception {
        List<Object> results = new ArrayList<>();
        for (Object each : messages) {
            JSONObject json = (JSONObject) each;
            if (json.containsKey("clock")) {
                clockMs = json.getLongValue("clock");
            }
            results.add(result(json.containsKey("messages") ? putBatch(json) : store.putMessage(Messages.single(json))));
            if (pauseMs > 0) { // an index file is named by the millisecond it is made in: two of one name would be one
                dispatched();
                Thread.sleep(pauseMs);
            }
        }
        return results;
    }

    private PutMessageResult putBatch(JSONObject json) {
        try {
            return json.getBooleanValue("inner")
                ? store.putMessage(Messages.batch(json))
                : store.putMessages(Messages.batch(json));
        } catch (java.net.UnknownHostException error) {
            throw new IllegalArgumentException(error);
        }
    }

    private static JSONObject result(PutMessageResult put) {
        JSONObject json = new JSONObject();
        json.put("status", put.getPutMessageStatus().name());
        json.put("ok", put.isOk());
        AppendMessageResult append = put.getAppendMessageResult();
        if (append != null) {
            json.put("append", append.getStatus().name());
            json.put("physicalOffset", append.getWroteOffset());
            json.put("size", append.getWroteBytes());
            json.put("queueOffset", append.getLogicsOffset());
            json.put("stored", append.getStoreTimestamp());
            json.put("count", append.getMsgNum());
            json.put("messageId", put.isOk() ? append.getMsgId() : null);
        }
        return json;
    }

    private JSONObject get(JSONObject command, long queueOffset, int count) {
        GetMessageResult got = store.getMessage("interop", command.getString("topic"), command.getIntValue("queueId"),
            queueOffset, count, null);
        JSONObject json = new JSONObject();
        json.put("status", got.getStatus().name());
        json.put("next", got.getNextBeginOffset());
        json.put("min", got.getMinOffset());
        json.put("max", got.getMaxOffset());
        json.put("messages", decoded(got.getMessageBufferList()));
        got.release();
        return json;
    }

    /** Every message of a queue, from its first to its end. */
    private JSONObject dump(JSONObject command) throws Exception {
        String topic = command.getString("topic");
        int queueId = command.getIntValue("queueId");
        JSONObject json = ends(topic, queueId);
        List<Object> messages = new ArrayList<>();
        long offset = json.getLongValue("min");
        while (offset < json.getLongValue("max")) {
            GetMessageResult got = store.getMessage("interop", topic, queueId, offset, 32, null);
            if (got.getStatus() != GetMessageStatus.FOUND) {
                json.put("stopped", got.getStatus().name() + " at " + offset);
                got.release();
                break;
            }
            messages.addAll(decoded(got.getMessageBufferList()));
            offset = got.getNextBeginOffset();
            got.release();
        }
        json.put("messages", messages);
        return json;
    }

    private JSONObject ends(String topic, int queueId) throws Exception { // 5.3 declares one, 5.1 does not
        JSONObject json = new JSONObject();
        json.put("min", store.getMinOffsetInQueue(topic, queueId));
        json.put("max", store.getMaxOffsetInQueue(topic, queueId));
        return json;
    }

    private JSONObject log() {
        JSONObject json = new JSONObject();
        json.put("min", store.getMinPhyOffset());
        json.put("max", store.getMaxPhyOffset());
        json.put("behind", store.dispatchBehindBytes());
        json.put("writeable", store.getRunningFlags().isWriteable());
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

    private List<Object> times(JSONObject command) {
        List<Object> found = new ArrayList<>();
        for (Object time : command.getJSONArray("times")) {
            List<Long> pair = new ArrayList<>();
            for (BoundaryType boundary : new BoundaryType[] {BoundaryType.LOWER, BoundaryType.UPPER}) {
                pair.add(store.getOffsetInQueueByTime(command.getString("topic"), command.getIntValue("queueId"),
                    ((Number) time).longValue(), boundary));
            }
            found.add(pair);
        }
        return found;
    }

    private boolean dispatched() throws InterruptedException {
        long deadline = System.currentTimeMillis() + DISPATCH_MS;
        while (store.dispatchBehindBytes() > 0) {
            if (System.currentTimeMillis() > deadline) {
                return false;
            }
            Thread.sleep(1);
        }
        return true;
    }

    private boolean close() throws InterruptedException {
        if (store != null) {
            dispatched();
            store.shutdown();
            store = null;
        }
        return true;
    }

    private static List<Object> decoded(List<ByteBuffer> buffers) {
        List<Object> messages = new ArrayList<>();
        for (ByteBuffer buffer : buffers) {
            messages.add(json(MessageDecoder.decode(buffer, true, false)));
        }
        return messages;
    }

    private static JSONObject json(MessageExt message) {
        return message == null ? null : Messages.toJson(message);
    }
}
