import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.JSONObject;
import com.sun.management.OperatingSystemMXBean;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.management.ManagementFactory;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Collection;
import java.util.List;
import java.util.Random;
import java.util.concurrent.locks.LockSupport;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * RocketMQ's own clients in the race beside a broker that runs: one JSON command a line on stdin, one JSON answer a line
 * on stdout.
 *
 * <p>Messages are made before the time begins. An answer has the time by the clock and the CPU time of the process.
 */
public final class LiveRace {
    private static final int MOST = 32;
    private static final long PATIENCE_MS = 120_000;
    private static final OperatingSystemMXBean SYSTEM =
        (OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
    private static String names;
    private static DefaultMQProducer producer;
    private static int consumers;
    private static DefaultLitePullConsumer follower;
    private static Thread following;
    private static volatile boolean follows;
    private static final List<Double> DELAYS = new ArrayList<>();

    private LiveRace() {
    }

    interface Work {
        void run() throws Exception;
    }

    public static void main(String[] arguments) throws Exception {
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
        String topic = command.getString("topic");
        int count = command.getIntValue("count");
        int size = command.getIntValue("size");
        switch (command.getString("op")) {
            case "open":
                open(command.getString("names"));
                return new JSONObject();
            case "read":
                return read(topic, count);
            case "send":
                List<List<Message>> batches = batches(topic, count, size, command.getIntValue("batch"));
                return timed(() -> {
                    for (List<Message> batch : batches) {
                        check(producer.send(batch));
                    }
                });
            case "put":
                return put(topic, count, size, command.getLongValue("pauseMicros"));
            case "follow":
                follow(topic);
                return new JSONObject();
            case "rest":
                return rest(count);
            case "close":
                producer.shutdown();
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

    private static void open(String servers) throws Exception {
        names = servers;
        producer = new DefaultMQProducer("race-producers");
        producer.setNamesrvAddr(names);
        producer.setVipChannelEnabled(false);
        producer.start();
    }

    // ---- reading

    /**
     * A consumer of a group that is new, so that it reads from the first message on.
     *
     * <p>One that goes back by a seek would not do: a seek interrupts the threads that pull, within a request too, which
     * breaks the connection that all of them use, and messages of the pull before can be missing afterwards.
     */
    private static DefaultLitePullConsumer consumer() throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer("race-consumers-" + ++consumers);
        consumer.setNamesrvAddr(names);
        consumer.setVipChannelEnabled(false);
        consumer.setAutoCommit(false);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setPullBatchSize(MOST); // the default is 10
        consumer.start();
        return consumer;
    }

    private static JSONObject read(String topic, int count) throws Exception {
        DefaultLitePullConsumer consumer = consumer();
        try {
            Collection<MessageQueue> queues = consumer.fetchMessageQueues(topic);
            return timed(() -> readAll(consumer, queues, count));
        } finally {
            consumer.shutdown();
        }
    }

    /** All messages of the queues: four columns of each are looked at. */
    private static void readAll(DefaultLitePullConsumer consumer, Collection<MessageQueue> queues, int count) {
        consumer.assign(queues);
        long untilMs = System.currentTimeMillis() + PATIENCE_MS;
        long seen = 0;
        long sum = 0;
        while (seen < count) {
            for (MessageExt message : consumer.poll(1000)) {
                sum += message.getBody().length + message.getQueueId() + message.getQueueOffset();
                sum += message.getTags() == null ? 0 : message.getTags().length();
                seen++;
            }
            if (System.currentTimeMillis() > untilMs) {
                throw new IllegalStateException(seen + " of " + count + " messages came");
            }
        }
        if (seen != count || sum == 0) {
            throw new IllegalStateException("found " + seen + " messages; put were " + count);
        }
    }

    /** Read what comes to a topic that has no message yet, in a thread, and note how long each message was on its way. */
    private static void follow(String topic) throws Exception {
        DefaultLitePullConsumer consumer = consumer();
        follower = consumer;
        consumer.assign(consumer.fetchMessageQueues(topic));
        consumer.poll(1000); // its first pulls wait at the broker
        follows = true;
        DELAYS.clear();
        following = new Thread(() -> {
            while (follows) {
                for (MessageExt message : consumer.poll(100)) {
                    double delay = now() - ByteBuffer.wrap(message.getBody()).getDouble();
                    synchronized (DELAYS) {
                        DELAYS.add(delay);
                    }
                }
            }
        });
        following.start();
    }

    /** Wait until so many messages have come, and end the consumer. */
    private static JSONObject rest(int count) throws Exception {
        long untilMs = System.currentTimeMillis() + PATIENCE_MS;
        while (true) {
            synchronized (DELAYS) {
                if (DELAYS.size() >= count) {
                    break;
                }
            }
            if (System.currentTimeMillis() > untilMs) {
                throw new IllegalStateException(DELAYS.size() + " of " + count + " messages came");
            }
            Thread.sleep(10);
        }
        follows = false;
        following.join();
        follower.shutdown();
        JSONObject answer = new JSONObject();
        answer.put("delays_s", new ArrayList<>(DELAYS));
        return answer;
    }

    // ---- sending

    private static byte[] body(Random random, int size) {
        byte[] body = new byte[size];
        random.nextBytes(body);
        return body;
    }

    private static List<List<Message>> batches(String topic, int count, int size, int batch) {
        Random random = new Random(1);
        List<List<Message>> batches = new ArrayList<>();
        for (int first = 0; first < count; first += batch) {
            List<Message> messages = new ArrayList<>();
            for (int number = first; number < Math.min(count, first + batch); number++) {
                messages.add(new Message(topic, body(random, size)));
            }
            batches.add(messages);
        }
        return batches;
    }

    /** Single messages at a pace; how long each send took, in milliseconds. The time a body was made is its beginning. */
    private static JSONObject put(String topic, int count, int size, long pauseMicros) throws Exception {
        Random random = new Random(2);
        List<Double> times = new ArrayList<>();
        long next = System.nanoTime();
        for (int number = 0; number < count; number++) {
            next += pauseMicros * 1000;
            while (System.nanoTime() < next) {
                LockSupport.parkNanos(next - System.nanoTime());
            }
            byte[] body = body(random, size);
            ByteBuffer.wrap(body).putDouble(now());
            long start = System.nanoTime();
            check(producer.send(new Message(topic, body)));
            times.add((System.nanoTime() - start) / 1e6);
        }
        JSONObject answer = new JSONObject();
        answer.put("times_ms", times);
        return answer;
    }

    /** Seconds since 1970. */
    private static double now() {
        java.time.Instant instant = java.time.Instant.now();
        return instant.getEpochSecond() + instant.getNano() / 1e9;
    }

    private static void check(SendResult result) {
        if (result.getSendStatus() != SendStatus.SEND_OK) {
            throw new IllegalStateException("a put ended with " + result.getSendStatus());
        }
    }
}
