import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.JSONObject;
import com.sun.management.OperatingSystemMXBean;
import java.io.BufferedReader;
import java.io.File;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.management.ManagementFactory;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import org.apache.activemq.broker.ConnectionContext;
import org.apache.activemq.command.ActiveMQBytesMessage;
import org.apache.activemq.command.ActiveMQQueue;
import org.apache.activemq.command.ConnectionId;
import org.apache.activemq.command.LocalTransactionId;
import org.apache.activemq.command.Message;
import org.apache.activemq.command.MessageId;
import org.apache.activemq.command.ProducerId;
import org.apache.activemq.command.TransactionId;
import org.apache.activemq.store.MessageRecoveryListener;
import org.apache.activemq.store.MessageStore;
import org.apache.activemq.store.kahadb.KahaDBPersistenceAdapter;
import org.apache.activemq.util.ByteSequence;

/**
 * ActiveMQ's store in the race: one JSON command a line on stdin, one JSON answer a line on stdout.
 *
 * <p>Messages are made before the time begins. The journal is synced with each transaction, or never, and the index is
 * a B-tree of message ids. An answer has the time by the clock and the CPU time of the process.
 */
public final class KahaRace {
    private static final String[] TAGS = {"created", "paid", "shipped", "returned", "lost"};
    private static final int QUEUES = 8;
    private static final int BODY_SIZE = 100;
    private static final OperatingSystemMXBean SYSTEM =
        (OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
    private static final Map<String, Opened> STORES = new HashMap<>();

    private KahaRace() {
    }

    interface Work {
        void run() throws Exception;
    }

    /** A store, its queues, and how many messages have been made for it. */
    private static final class Opened {
        final KahaDBPersistenceAdapter adapter = new KahaDBPersistenceAdapter();
        final List<MessageStore> queues = new ArrayList<>();
        final ConnectionContext context = new ConnectionContext();
        long made;
        long transactions;
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
        String name = command.getString("store");
        int count = command.getIntValue("count");
        Opened store = STORES.get(name);
        switch (command.getString("op")) {
            case "open":
                STORES.put(name, open(command.getString("root"), command.getString("sync")));
                return new JSONObject();
            case "append": {
                List<Message> messages = messages(store, count, command.getString("bodies"));
                int size = command.getIntValue("batch");
                return timed(() -> {
                    for (int begin = 0; begin < count; begin += size) {
                        commit(store, messages.subList(begin, Math.min(count, begin + size)), begin);
                    }
                });
            }
            case "put": {
                List<Message> messages = messages(store, count, command.getString("bodies"));
                messages.forEach(message -> message.setResponseRequired(true)); // each is synced only then
                return timed(() -> {
                    for (int i = 0; i < count; i++) {
                        store.queues.get(i % QUEUES).addMessage(store.context, messages.get(i));
                    }
                });
            }
            case "read":
                return timed(() -> read(store, count));
            case "close":
                STORES.remove(name).adapter.stop();
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

    private static Opened open(String root, String sync) throws Exception {
        Opened made = new Opened();
        made.adapter.setDirectory(new File(root));
        made.adapter.setJournalDiskSyncStrategy(sync);
        made.adapter.setConcurrentStoreAndDispatchQueues(false); // nobody consumes, so a put need not wait for a consumer
        made.adapter.start();
        for (int queue = 0; queue < QUEUES; queue++) {
            MessageStore store = made.adapter.createQueueMessageStore(new ActiveMQQueue("flights." + queue));
            store.start();
            made.queues.add(store);
        }
        return made;
    }

    private static void commit(Opened store, List<Message> messages, int first) throws Exception {
        TransactionId transaction = new LocalTransactionId(new ConnectionId("race"), ++store.transactions);
        for (int i = 0; i < messages.size(); i++) {
            messages.get(i).setTransactionId(transaction);
            store.queues.get((first + i) % QUEUES).addMessage(store.context, messages.get(i));
        }
        store.adapter.createTransactionStore().commit(transaction, false, null, null);
    }

    /** Reads the oldest `count` messages, queue by queue, and decodes each. */
    private static void read(Opened store, int count) throws Exception {
        long[] left = {count};
        for (MessageStore queue : store.queues) {
            queue.recover(new MessageRecoveryListener() {
                @Override
                public boolean recoverMessage(Message message) {
                    left[0] -= message.getContent().getLength() == BODY_SIZE ? 1 : 0;
                    return true;
                }

                @Override
                public boolean recoverMessageReference(MessageId id) {
                    return true;
                }

                @Override
                public boolean hasSpace() {
                    return true;
                }

                @Override
                public boolean isDuplicate(MessageId id) {
                    return false;
                }
            });
        }
        if (left[0] != 0) {
            throw new IllegalStateException(left[0] + " messages are missing");
        }
    }

    private static List<Message> messages(Opened store, int count, String bodies) throws Exception {
        Random random = new Random(3);
        ProducerId producer = new ProducerId("race:1:1");
        List<Message> made = new ArrayList<>();
        for (int number = 0; number < count; number++) {
            ActiveMQBytesMessage message = new ActiveMQBytesMessage();
            message.setMessageId(new MessageId(producer, ++store.made));
            message.setDestination(new ActiveMQQueue("flights." + number % QUEUES));
            message.setStringProperty("key", "ord-" + (int) (number * 7919L % 1_000_000));
            message.setStringProperty("tag", TAGS[number % TAGS.length]);
            message.setContent(new ByteSequence(body(random, bodies, number))); // after the properties: they clear it
            message.setPersistent(true);
            made.add(message);
        }
        return made;
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
}
