import java.io.FileInputStream;
import java.io.InputStream;
import java.lang.reflect.Field;
import java.lang.reflect.Method;
import java.lang.reflect.Modifier;
import java.nio.charset.StandardCharsets;
import java.util.Base64;
import java.util.Collection;
import java.util.Map;
import java.util.Properties;
import java.util.TreeMap;
import java.util.TreeSet;
import org.apache.rocketmq.common.MixAll;

/**
 * What names RocketMQ knows, and what it makes of a broker's file, as lines of four words: what, class or file, name, value
 * (Base64 for what comes from a file). Run as a source file, with RocketMQ's jars. A class that a version does not have is
 * left out.
 */
final class Names {
    private static final String[] SETTINGS = {
        "org.apache.rocketmq.store.config.MessageStoreConfig", "org.apache.rocketmq.common.BrokerConfig",
        "org.apache.rocketmq.remoting.netty.NettyServerConfig", "org.apache.rocketmq.remoting.netty.NettyClientConfig",
        "org.apache.rocketmq.auth.config.AuthConfig",
    };
    private static final String[] CONSTANTS = {
        "org.apache.rocketmq.common.message.MessageConst", "org.apache.rocketmq.common.topic.TopicValidator",
    };

    public static void main(String[] args) throws Exception {
        for (String name : args.length > 0 ? new String[0] : SETTINGS) {
            Class<?> type = find(name);
            for (Map.Entry<String, String> each : type == null ? new TreeMap<String, String>().entrySet() : settings(type).entrySet()) {
                System.out.println("setting " + type.getSimpleName() + " " + each.getKey() + " " + each.getValue());
            }
        }
        for (String conf : args) {
            read(conf);
        }
        for (String name : args.length > 0 ? new String[0] : CONSTANTS) {
            Class<?> type = Class.forName(name);
            for (Field field : type.getDeclaredFields()) {
                field.setAccessible(true);
                if (!Modifier.isStatic(field.getModifiers())) {
                    continue;
                }
                Object value = field.get(null);
                if (value instanceof String && !((String) value).isBlank()) {
                    System.out.println("constant " + type.getSimpleName() + " " + field.getName() + " " + value);
                } else if (value instanceof Collection) {
                    for (Object item : new TreeSet<>((Collection<?>) value)) {
                        System.out.println("member " + type.getSimpleName() + " " + field.getName() + " " + item);
                    }
                }
            }
        }
    }

    /** As MixAll.properties2Object: each setter's key, with the type that a value is read as. */
    private static Map<String, String> settings(Class<?> type) {
        Map<String, String> found = new TreeMap<>();
        for (Method method : type.getMethods()) {
            String name = method.getName();
            if (name.startsWith("set") && name.length() > 3 && method.getParameterCount() > 0) {
                String read = method.getParameterTypes()[0].getSimpleName();
                String key = name.substring(3, 4).toLowerCase() + name.substring(4);
                switch (read) {
                    case "int": case "Integer": case "long": case "Long": case "double": case "Double":
                    case "float": case "Float": case "boolean": case "Boolean": case "String":
                        found.merge(key, read.toLowerCase().replace("integer", "int"), Names::both);
                        break;
                    default:
                        break; // no text is read as this; another setter of the same name may be there
                }
            }
        }
        return found;
    }

    /** RocketMQ calls both of two setters, in any order. */
    private static String both(String one, String other) {
        return one.equals(other) ? one : one.compareTo(other) < 0 ? one + "|" + other : other + "|" + one;
    }

    /** What Java's Properties read from a file, and what is in the fields of the settings afterwards, as in BrokerStartup. */
    private static void read(String conf) throws Exception {
        Properties properties = new Properties();
        try (InputStream in = new FileInputStream(conf)) {
            properties.load(in);
        }
        for (String key : properties.stringPropertyNames()) {
            System.out.println("property " + conf + " " + text(key) + " " + text(properties.getProperty(key)));
        }
        for (String name : SETTINGS) {
            Class<?> type = find(name);
            if (type == null) {
                continue;
            }
            Object object = type.getDeclaredConstructor().newInstance();
            MixAll.properties2Object(properties, object);
            for (Class<?> each = type; each != Object.class; each = each.getSuperclass()) {
                for (Field field : each.getDeclaredFields()) {
                    if (!Modifier.isStatic(field.getModifiers())) {
                        field.setAccessible(true);
                        System.out.println("value " + conf + " " + field.getName() + " " + text("" + field.get(object)));
                    }
                }
            }
        }
    }

    /** One word, also for empty text. */
    private static String text(String value) {
        return "=" + Base64.getEncoder().encodeToString(value.getBytes(StandardCharsets.UTF_8));
    }

    private static Class<?> find(String name) {
        try {
            return Class.forName(name);
        } catch (ClassNotFoundException error) {
            return null;
        }
    }

    private Names() {
    }
}
