import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.JSONObject;
import com.sun.management.OperatingSystemMXBean;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.management.ManagementFactory;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.Future;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageExtBatch;
import org.apache.rocketmq.common.message.MessageExtBrokerInner;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.GetMessageResult;
import org.apache.rocketmq.store.GetMessageStatus;
import org.apache.rocketmq.store.PutMessageResult;
import org.apache.rocketmq.store.config.FlushDiskType;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.stats.BrokerStatsManager;

/**
 * RocketMQ's own store in the race: one JSON command a line on stdin, one JSON answer a line on stdout.
 *
 * <p>Messages are made, and batches encoded as a producer encodes them, before the time begins. An answer has the time
 * by the clock and the CPU time of the process.
 */
public final class StoreRace {
    private static final String TOPIC = "flights";
    private static final String[] TAGS = {"created", "paid", "shipped", "returned", "lost"};
    private static final int QUEUES = 8;
    private static final int BODY_SIZE = 100;
    private static final int GET = 500;
    private static final OperatingSystemMXBean SYSTEM =
        (OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
    private static final Map<String, DefaultMessageStore> STORES = new HashMap<>();
    private static InetSocketAddress host;

    private StoreRace() {
    }

    interface Work {
        void run() throws Exception;
    }

    public static void main(String[] arguments) throws Exception {
        host = new InetSocketAddress(InetAddress.getByName("127.0.0.1"), 10911);
        PrintStream answers = new PrintStream(System.out, false, StandardCharsets.UTF_8);
        System.setOut(System.err); // whatever a library prints is not an answer
        BufferedReader commands = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = commands.readLine(); line != null; line = commands.readLine()) {
            JSONObject answer = new JSONObject();
            try {
                answer = act(JSON.parseObject(line));
            } catch (Throwable error) { // an Error too: the other side shall see it, and not wait for ever
                error.printStackTrace();
                answer.put("error", error.toString());
            }
            answers.println(answer.toJSONString());
            answers.flush();
        }
        System.exit(0);
    }

    private static JSONObject act(JSONObject command) throws Exception {
        String name = command.getString("store");
        int count = command.getIntValue("count");
        DefaultMessageStore store = STORES.get(name);
        switch (command.getString("op")) {
            case "open":
                STORES.put(name, open(command.getString("root"), FlushDiskType.valueOf(command.getString("flush"))));
                return new JSONObject();
            case "append":
                List<MessageExtBatch> batches = batches(count, command.getIntValue("batch"), command.getString("bodies"));
                return timed(() -> {
                    for (MessageExtBatch batch : batches) {
                        check(store.putMessages(batch));
                    }
                    while (store.dispatchBehindBytes() > 0) {
                        Thread.sleep(0, 100_000);
                    }
                });
            case "read":
                return timed(() -> read(store, count));
            case "put":
                return put(store, count, command.getIntValue("threads"), command.getString("bodies"));
            case "close":
                STORES.remove(name).shutdown();
                return new JSONObject();
            default:
                throw new IllegalArgumentException("no such command: " + command.getString("op"));
        }
    }

    private static JSONObject timed(Work work) throws Exception {
        System.gc();
        long cpu = SYSTEM.getProcessCpuTime();
        long wall = System.nanoTime();
        work.run();
        JSONObject answer = new JSONObject();
        answer.put("wall_s", (System.nanoTime() - wall) / 1e9);
        answer.put("cpu_s", (SYSTEM.getProcessCpuTime() - cpu) / 1e9);
        return answer;
    }

    private static DefaultMessageStore open(String root, FlushDiskType flush) throws Exception {
        MessageStoreConfig config = new MessageStoreConfig();
        config.setStorePathRootDir(root);
        config.setStorePathCommitLog(root + "/commitlog");
        config.setHaListenPort(0);
        config.setFlushDiskType(flush);
        config.setMaxTransferCountOnMessageInMemory(GET); // the default of 32 would make the reads small
        config.setMaxTransferBytesOnMessageInMemory(1 << 20);
        DefaultMessageStore store = new DefaultMessageStore(config, new BrokerStatsManager("race", true),
            (topic, queueId, offset, tags, time, filter, properties) -> { }, new BrokerConfig(),
            new ConcurrentHashMap<>());
        if (!store.load()) {
            throw new IllegalStateException("load refused " + root);
        }
        store.start();
        return store;
    }

    private static byte[] body(Random random, String bodies, int number) {
        byte[] body = new byte[BODY_SIZE];
        if ("random".equals(bodies)) {
            random.nextBytes(body);
        } else {
            byte[] text = Integer.toString(number).getBytes(StandardCharsets.US_ASCII);
            for (int i = 0; i < BODY_SIZE; i++) {
                body[i] = i < text.length ? text[i] : (byte) ('a' + (i - text.length) % 26);
            }
        }
        return body;
    }

    private static Message message(Random random, String bodies, int number) {
        Message message = new Message(TOPIC, body(random, bodies, number));
        MessageAccessor.clearProperty(message, MessageConst.PROPERTY_WAIT_STORE_MSG_OK);
        message.setKeys("ord-" + (int) (number * 7919L % 1_000_000));
        message.setTags(TAGS[number % TAGS.length]);
        return message;
    }

    private static List<MessageExtBatch> batches(int count, int size, String bodies) {
        Random random = new Random(3);
        List<MessageExtBatch> batches = new ArrayList<>();
        for (int begin = 0; begin < count; begin += size) {
            List<Message> messages = new ArrayList<>();
            for (int number = begin; number < Math.min(count, begin + size); number++) {
                messages.add(message(random, bodies, number));
            }
            MessageExtBatch batch = new MessageExtBatch();
            MessageAccessor.setProperties(batch, new HashMap<>());
            batch.setBody(MessageDecoder.encodeMessages(messages));
            batches.add((MessageExtBatch) fill(batch, batches.size() % QUEUES));
        }
        return batches;
    }

    private static MessageExtBrokerInner fill(MessageExtBrokerInner message, int queue) {
        message.setTopic(TOPIC);
        message.setQueueId(queue);
        message.setBornTimestamp(System.currentTimeMillis());
        message.setBornHost(host);
        message.setStoreHost(host);
        message.setPropertiesString(MessageDecoder.messageProperties2String(message.getProperties()));
        return message;
    }

    private static void check(PutMessageResult result) {
        if (!result.isOk()) {
            throw new IllegalStateException(result.toString());
        }
    }

    /** Reads the oldest `count` messages, queue by queue, and decodes each. */
    private static void read(DefaultMessageStore store, int count) throws Exception {
        int left = count;
        for (int queue = 0; queue < QUEUES && left > 0; queue++) {
            long end = store.getMaxOffsetInQueue(TOPIC, queue);
            for (long offset = 0; offset < end && left > 0; ) {
                GetMessageResult got = store.getMessage("race", TOPIC, queue, offset, Math.min(GET, left), null);
                if (got.getStatus() != GetMessageStatus.FOUND) {
                    throw new IllegalStateException(got.getStatus() + " at " + offset);
                }
                for (ByteBuffer buffer : got.getMessageBufferList()) {
                    MessageExt message = MessageDecoder.decode(buffer, true, false);
                    if (message == null) {
                        throw new IllegalStateException("cannot be decoded, near " + offset);
                    }
                    left--;
                }
                offset = got.getNextBeginOffset();
                got.release();
            }
        }
        if (left > 0) {
            throw new IllegalStateException(left + " messages are missing");
        }
    }

    private static JSONObject put(DefaultMessageStore store, int count, int threads, String bodies) throws Exception {
        Random random = new Random(3);
        List<List<MessageExtBrokerInner>> shares = new ArrayList<>();
        for (int thread = 0; thread < threads; thread++) {
            List<MessageExtBrokerInner> share = new ArrayList<>();
            for (int number = 0; number < count / threads; number++) {
                Message each = message(random, bodies, number);
                MessageExtBrokerInner inner = new MessageExtBrokerInner();
                MessageAccessor.setProperties(inner, each.getProperties());
                inner.setBody(each.getBody());
                share.add(fill(inner, number % QUEUES));
            }
            shares.add(share);
        }
        ExecutorService pool = Executors.newFixedThreadPool(threads);
        try {
            return timed(() -> {
                List<Future<?>> done = new ArrayList<>();
                for (List<MessageExtBrokerInner> share : shares) {
                    done.add(pool.submit(() -> share.forEach(message -> check(store.putMessage(message)))));
                }
                for (Future<?> each : done) {
                    each.get();
                }
            });
        } finally {
            pool.shutdown();
        }
    }
}
