package interop;

import com.alibaba.fastjson.JSON;
import io.netty.channel.ChannelHandlerContext;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.concurrent.Executors;
import org.apache.rocketmq.remoting.netty.NettyRemotingServer;
import org.apache.rocketmq.remoting.netty.NettyRequestProcessor;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;
import org.apache.rocketmq.remoting.protocol.RequestCode;
import org.apache.rocketmq.remoting.protocol.ResponseCode;
import org.apache.rocketmq.remoting.protocol.route.BrokerData;
import org.apache.rocketmq.remoting.protocol.route.QueueData;
import org.apache.rocketmq.remoting.protocol.route.TopicRouteData;

/** A name server that knows one broker, and one queue of every topic. */
final class Route implements NettyRequestProcessor {
    private final String broker;

    private Route(String broker) {
        this.broker = broker;
    }

    static NettyRemotingServer start(int port, String broker) {
        NettyServerConfig config = new NettyServerConfig();
        config.setListenPort(port);
        NettyRemotingServer names = new NettyRemotingServer(config);
        names.registerDefaultProcessor(new Route(broker), Executors.newCachedThreadPool());
        names.start();
        return names;
    }

    @Override
    public RemotingCommand processRequest(ChannelHandlerContext context, RemotingCommand request) {
        RemotingCommand answer = RemotingCommand.createResponseCommand(ResponseCode.SUCCESS, null);
        if (request.getCode() == RequestCode.GET_ROUTEINFO_BY_TOPIC) {
            QueueData queue = new QueueData();
            queue.setBrokerName("broker-a");
            queue.setPerm(6);
            queue.setReadQueueNums(1);
            queue.setWriteQueueNums(1);
            HashMap<Long, String> addresses = new HashMap<>();
            addresses.put(0L, broker);
            BrokerData data = new BrokerData("DefaultCluster", "broker-a", addresses);
            TopicRouteData route = new TopicRouteData();
            route.setQueueDatas(new ArrayList<>(List.of(queue)));
            route.setBrokerDatas(new ArrayList<>(List.of(data)));
            answer.setBody(JSON.toJSONString(route).getBytes(StandardCharsets.UTF_8));
        }
        answer.setOpaque(request.getOpaque());
        return answer;
    }

    @Override
    public boolean rejectRequest() {
        return false;
    }
}
