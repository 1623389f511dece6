package interop;

import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.JSONObject;
import com.alibaba.fastjson.serializer.SerializerFeature;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.Method;
import java.nio.charset.StandardCharsets;
import java.util.Base64;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.common.compression.CompressionType;
import org.apache.rocketmq.common.compression.CompressorFactory;
import org.apache.rocketmq.store.DefaultMessageStore;

/**
 * RocketMQ's store behind a pipe: one JSON command a line on stdin, one JSON answer a line on stdout.
 *
 * <p>A command names the store it is for; each store has a thread of its own, so that many stores are open at once, and
 * one that closes (RocketMQ sleeps three seconds there) holds up no other. An answer carries its command's id.
 */
public final class Driver {
    private static final Map<String, OpenStore> STORES = new ConcurrentHashMap<>();
    private static PrintStream answers;

    private Driver() {
    }

    public static void main(String[] arguments) throws Exception {
        answers = new PrintStream(System.out, false, StandardCharsets.UTF_8);
        System.setOut(System.err); // whatever a library prints is not an answer
        BufferedReader commands = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = commands.readLine(); line != null; line = commands.readLine()) {
            JSONObject command = JSON.parseObject(line);
            String name = command.getString("store");
            if (name == null) {
                answer(command, () -> general(command));
            } else {
                OpenStore store = STORES.computeIfAbsent(name, OpenStore::new);
                store.thread.execute(() -> answer(command, () -> store.act(command)));
                if ("close".equals(command.getString("op")) || "forget".equals(command.getString("op"))) {
                    STORES.remove(name); // the next command under this name is for another store
                    store.thread.shutdown();
                }
            }
        }
        System.exit(0); // whoever started us is gone
    }

    interface Action {
        Object run() throws Exception;
    }

    private static void answer(JSONObject command, Action action) {
        JSONObject answer = new JSONObject();
        answer.put("id", command.get("id"));
        try {
            answer.put("result", action.run());
        } catch (Throwable error) { // an Error too: the test shall see it, not wait for ever
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

    private static Object general(JSONObject command) throws Exception {
        switch (command.getString("op")) {
            case "hello":
                JSONObject hello = new JSONObject();
                hello.put("rocketmq", version());
                hello.put("java", System.getProperty("java.version"));
                hello.put("pid", ProcessHandle.current().pid());
                return hello;
            case "gc": // lets go of the mappings of closed stores
                System.gc();
                return Runtime.getRuntime().totalMemory();
            case "halt":
                Runtime.getRuntime().halt(9);
                return null;
            case "compress":
                byte[] body = Base64.getDecoder().decode(command.getString("body"));
                CompressionType type = CompressionType.of(command.getString("type"));
                return CompressorFactory.getCompressor(type).compress(body, command.getIntValue("level"));
            case "config":
                return ConfigFiles.act(command);
            case "transactions":
                return Transactions.act(command);
            case "cluster":
                return Cluster.act(command);
            case "clients":
                return Clients.act(command);
            default:
                throw new IllegalArgumentException("no such command: " + command.getString("op"));
        }
    }

    private static String version() throws Exception {
        Properties properties = new Properties();
        properties.load(DefaultMessageStore.class.getResourceAsStream(
            "/META-INF/maven/org.apache.rocketmq/rocketmq-store/pom.properties"));
        return properties.getProperty("version");
    }
}
