package interop;

import com.alibaba.fastjson.JSONObject;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Random;
import java.util.concurrent.locks.LockSupport;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExtBatch;
import org.apache.rocketmq.common.message.MessageExtBrokerInner;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.PutMessageResult;
import org.apache.rocketmq.store.PutMessageStatus;

/**
 * Puts many messages on a thread of its own, while somebody else reads: singles and batches by turns.
 *
 * <p>A body is the number of the message in its queue (8 bytes), then so many bytes of that number's last byte: a reader
 * can tell what must be there from the queue offset alone.
 */
final class Pump {
    private final DefaultMessageStore store;
    private final String topic;
    private final int queues;
    private final long count;
    private final int padding;
    private final int largestBatch;
    private final long pauseMicros;
    private final Random random;
    private final long[] next;
    private final InetSocketAddress host;
    private final Thread thread = new Thread(this::run, "pump");
    private volatile long put;
    private volatile boolean stopped;
    private volatile int refused;
    private volatile String failure;

    Pump(DefaultMessageStore store, JSONObject command) throws Exception {
        this.store = store;
        topic = command.getString("topic");
        queues = command.getIntValue("queues");
        count = command.getLongValue("count");
        padding = command.getIntValue("padding");
        largestBatch = command.getIntValue("largestBatch");
        pauseMicros = command.getLongValue("pauseMicros");
        random = new Random(command.getLongValue("seed"));
        next = new long[queues];
        for (int queue = 0; queue < queues; queue++) {
            next[queue] = store.getMaxOffsetInQueue(topic, queue);
        }
        host = new InetSocketAddress(InetAddress.getByName("127.0.0.1"), 10911);
        thread.setDaemon(true);
    }

    boolean begin() {
        thread.start();
        return true;
    }

    void stop() {
        stopped = true;
    }

    JSONObject done(long waitMs) throws InterruptedException {
        if (waitMs > 0) {
            thread.join(waitMs);
        }
        JSONObject json = new JSONObject();
        json.put("put", put);
        json.put("ends", next.clone());
        json.put("failure", failure);
        json.put("refused", refused);
        json.put("alive", thread.isAlive());
        return json;
    }

    private void run() {
        try {
            while (put < count && !stopped) {
                int queue = random.nextInt(queues);
                int size = largestBatch < 2 || random.nextBoolean() ? 1 : 1 + random.nextInt(largestBatch);
                size = (int) Math.min(size, count - put);
                PutMessageResult result = size == 1 ? single(queue) : batch(queue, size);
                if (result.getPutMessageStatus() == PutMessageStatus.CREATE_MAPPED_FILE_FAILED && refused < 1000) {
                    refused++; // the pool is empty, or the machine is busy: as a producer does, try again
                    Thread.sleep(10);
                    continue;
                }
                if (!result.isOk()) {
                    failure = result.toString();
                    return;
                }
                next[queue] += size;
                put += size;
                if (pauseMicros > 0) {
                    LockSupport.parkNanos(pauseMicros * 1000); // Thread.sleep rounds up to a millisecond
                }
            }
        } catch (Throwable error) { // seen by the test, which asks
            failure = error.toString();
        }
    }

    private byte[] body(long number) {
        byte[] body = new byte[8 + (int) (number % (padding + 1))];
        Arrays.fill(body, (byte) number);
        ByteBuffer.wrap(body).putLong(number);
        return body;
    }

    private PutMessageResult single(int queue) {
        MessageExtBrokerInner message = new MessageExtBrokerInner();
        MessageAccessor.setProperties(message, element(next[queue]).getProperties());
        message.setBody(body(next[queue]));
        return store.putMessage(fill(message, queue));
    }

    private PutMessageResult batch(int queue, int size) {
        List<Message> messages = new ArrayList<>();
        for (int i = 0; i < size; i++) {
            messages.add(element(next[queue] + i));
        }
        MessageExtBatch batch = new MessageExtBatch();
        MessageAccessor.setProperties(batch, new java.util.HashMap<>());
        batch.setBody(MessageDecoder.encodeMessages(messages));
        return store.putMessages((MessageExtBatch) fill(batch, queue));
    }

    private Message element(long number) {
        Message message = new Message(topic, body(number));
        MessageAccessor.clearProperty(message, MessageConst.PROPERTY_WAIT_STORE_MSG_OK);
        message.setTags("t" + number % 7);
        if (number % 64 == 0) {
            message.setKeys("n" + number);
        }
        return message;
    }

    private MessageExtBrokerInner fill(MessageExtBrokerInner message, int queue) {
        message.setTopic(topic);
        message.setQueueId(queue);
        message.setBornTimestamp(System.currentTimeMillis());
        message.setBornHost(host);
        message.setStoreHost(host);
        message.setPropertiesString(MessageDecoder.messageProperties2String(message.getProperties()));
        return message;
    }
}
