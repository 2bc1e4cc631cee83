import com.sun.net.httpserver.HttpExchange;
import com.sun.net.httpserver.HttpServer;
import java.io.IOException;
import java.io.OutputStream;
import java.io.UncheckedIOException;
import java.net.InetSocketAddress;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.net.http.WebSocket;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionStage;
import java.util.concurrent.Executors;
import javax.servlet.http.HttpServletRequest;
import javax.servlet.http.HttpServletResponse;
import org.eclipse.jetty.http2.parser.RateControl;
import org.eclipse.jetty.http2.server.HTTP2CServerConnectionFactory;
import org.eclipse.jetty.server.HttpConfiguration;
import org.eclipse.jetty.server.HttpConnectionFactory;
import org.eclipse.jetty.server.Request;
import org.eclipse.jetty.server.Server;
import org.eclipse.jetty.server.ServerConnector;
import org.eclipse.jetty.server.handler.AbstractHandler;

/**
 * Servers and clients of the kernel tier's table, in Java: the JDK's own server and Jetty, and the JDK's own client. See
 * README.md for what a server must do.
 */
public final class App {
    private static final int PORT = Integer.parseInt(System.getenv().getOrDefault("PORT", "0"));
    private static final Path GATE = Path.of(System.getenv().getOrDefault("GATE", "/"));

    public static void main(String[] words) throws Exception {
        switch (words[0]) {
            case "jdk":
                serveJdk();
                break;
            case "jetty":
                serveJetty();
                break;
            case "requests":
                request(URI.create(words[1]), Integer.parseInt(words[2]));
                break;
            case "rounds":
                requestRounds(URI.create(words[1]), Integer.parseInt(words[2]));
                break;
            case "websockets":
                holdWebSockets(URI.create(words[1]), Integer.parseInt(words[2]));
                break;
            default:
                throw new IllegalArgumentException(words[0]);
        }
    }

    /**
     * Sends rounds of requests over the pool of the JDK's client. Each line of the input is the number of requests in a
     * round, and a line of output tells how many failed and how many each pod has served.
     */
    private static void requestRounds(URI url, int workers) throws IOException {
        HttpClient client = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).build();
        HttpRequest request = HttpRequest.newBuilder(url).build();
        var pool = Executors.newFixedThreadPool(workers);
        var input = new java.io.BufferedReader(new java.io.InputStreamReader(System.in));
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            var failed = new java.util.concurrent.atomic.AtomicInteger();
            var served = new java.util.concurrent.ConcurrentHashMap<String, Integer>();
            List<CompletableFuture<Void>> all = new ArrayList<>();
            for (int i = 0; i < Integer.parseInt(line); i++) {
                all.add(CompletableFuture.runAsync(() -> {
                    try {
                        var response = client.send(request, HttpResponse.BodyHandlers.discarding());
                        if (response.statusCode() != 200) throw new IOException("status " + response.statusCode());
                        served.merge(response.headers().firstValue("x-pod").orElse(""), 1, Integer::sum);
                    } catch (IOException | InterruptedException error) {
                        failed.incrementAndGet();
                        System.err.println(withCauses(error));
                    }
                }, pool));
            }
            all.forEach(CompletableFuture::join);
            var text = new StringBuilder().append(failed.get());
            served.forEach((pod, count) -> text.append(' ').append(pod).append('=').append(count));
            System.out.println(text);
        }
        System.exit(0);
    }

    /** Returns a failure with its causes in one line, which tell a refused write from a closed connection. */
    private static String withCauses(Throwable failure) {
        var text = new StringBuilder();
        for (Throwable error = failure; error != null; error = error.getCause()) {
            text.append(text.length() == 0 ? "" : ", because of ").append(error);
        }
        return text.toString();
    }

    /** A request that has begun; its end is noted when it is closed. Appended lines of two bytes stay whole. */
    private static final class Begun implements AutoCloseable {
        private static final FileChannel BOOK = open();

        private static FileChannel open() {
            try {
                Path book = Path.of(System.getenv("BOOK"));
                return FileChannel.open(book, StandardOpenOption.CREATE, StandardOpenOption.APPEND);
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
        }

        Begun() {
            note("+\n");
        }

        @Override
        public void close() {
            note("-\n");
        }

        private static void note(String line) {
            try {
                BOOK.write(ByteBuffer.wrap(line.getBytes()));
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
        }
    }

    private static void waitForGate() {
        while (!Files.exists(GATE)) {
            try {
                Thread.sleep(5);
            } catch (InterruptedException error) {
                return;
            }
        }
    }

    private static byte[] body(String path) {
        switch (path) {
            case "/wait":
                waitForGate();
                return "waited\n".getBytes();
            case "/chunks":
                return "some words\n".repeat(5).getBytes();
            case "/big":
                return "x".repeat(1 << 20).getBytes();
            case "/empty":
                return new byte[0];
            default:
                return "hello\n".getBytes();
        }
    }

    private static int status(String path) {
        switch (path) {
            case "/hello":
            case "/wait":
            case "/chunks":
            case "/big":
            case "/echo":
                return 200;
            case "/empty":
                return 204;
            case "/early":
                return 413;
            default:
                return 404;
        }
    }

    private static void serveJdk() throws IOException {
        // Otherwise each response waits 40 ms for an acknowledgement.
        System.setProperty("sun.net.httpserver.nodelay", "true");
        HttpServer server = HttpServer.create(new InetSocketAddress(PORT), 1024);
        server.setExecutor(Executors.newCachedThreadPool());
        server.createContext("/", App::answerJdk);
        server.start();
    }

    private static void answerJdk(HttpExchange exchange) throws IOException {
        try (Begun begun = new Begun()) {
            String path = exchange.getRequestURI().getPath();
            byte[] body = path.equals("/echo") ? exchange.getRequestBody().readAllBytes() : body(path);
            boolean isBare = status(path) == 204 || exchange.getRequestMethod().equals("HEAD");
            // 0 stands for chunks, -1 for no body.
            long length = path.equals("/chunks") || body.length == 0 ? 0 : body.length;
            exchange.sendResponseHeaders(status(path), isBare ? -1 : length);
            if (!isBare) {
                OutputStream out = exchange.getResponseBody();
                out.write(body);
            }
            exchange.close();
        }
    }

    private static void serveJetty() throws Exception {
        Server server = new Server();
        HttpConfiguration configuration = new HttpConfiguration();
        HTTP2CServerConnectionFactory http2 = new HTTP2CServerConnectionFactory(configuration);
        // By default Jetty ends connections of clients that open the window for a large response in many small steps.
        http2.setRateControlFactory(new RateControl.Factory() {});
        ServerConnector connector =
                new ServerConnector(server, new HttpConnectionFactory(configuration), http2);
        connector.setPort(PORT);
        server.addConnector(connector);
        server.setHandler(new AbstractHandler() {
            @Override
            public void handle(String path, Request base, HttpServletRequest in, HttpServletResponse out)
                    throws IOException {
                base.setHandled(true);
                try (Begun begun = new Begun()) {
                    answerJetty(path, in, out);
                }
            }
        });
        server.start();
        server.join();
    }

    private static void answerJetty(String path, HttpServletRequest in, HttpServletResponse out)
            throws IOException {
        byte[] body = path.equals("/echo") ? in.getInputStream().readAllBytes() : body(path);
        out.setStatus(status(path));
        if (path.equals("/chunks")) {
            out.flushBuffer();
        } else if (status(path) != 204) {
            out.setContentLength(body.length);
        }
        out.getOutputStream().write(body);
    }

    /** Sends {@code count} requests at once, by HTTP/2 if the server takes the Upgrade. */
    private static void request(URI uri, int count) {
        HttpClient client = HttpClient.newBuilder().version(HttpClient.Version.HTTP_2).build();
        List<CompletableFuture<HttpResponse<String>>> answers = new ArrayList<>();
        for (int sent = 0; sent < count; sent++) {
            HttpRequest request = HttpRequest.newBuilder(uri).build();
            answers.add(client.sendAsync(request, HttpResponse.BodyHandlers.ofString()));
        }
        for (CompletableFuture<HttpResponse<String>> answer : answers) {
            HttpResponse<String> response = answer.join();
            System.out.println(response.version() + " " + response.statusCode());
        }
    }

    /** Opens {@code count} WebSockets, has a message echoed on each, says so, and closes them when its input ends. */
    private static void holdWebSockets(URI uri, int count) throws IOException {
        HttpClient client = HttpClient.newHttpClient();
        List<WebSocket> sockets = new ArrayList<>();
        List<Listener> listeners = new ArrayList<>();
        for (int opened = 0; opened < count; opened++) {
            Listener listener = new Listener();
            listeners.add(listener);
            sockets.add(client.newWebSocketBuilder().buildAsync(uri, listener).join());
        }
        for (int each = 0; each < count; each++) {
            sockets.get(each).sendText("hello", true).join();
            if (!listeners.get(each).said.join().equals("hello")) {
                throw new IOException("the server said something else");
            }
        }
        System.out.println("open");
        System.in.readAllBytes();
        for (int each = 0; each < count; each++) {
            sockets.get(each).sendClose(WebSocket.NORMAL_CLOSURE, "").join();
            listeners.get(each).closed.join();
        }
    }

    private static final class Listener implements WebSocket.Listener {
        final CompletableFuture<String> said = new CompletableFuture<>();
        final CompletableFuture<Integer> closed = new CompletableFuture<>();

        @Override
        public CompletionStage<?> onText(WebSocket socket, CharSequence text, boolean isLast) {
            said.complete(text.toString());
            socket.request(1);
            return null;
        }

        @Override
        public CompletionStage<?> onClose(WebSocket socket, int code, String reason) {
            closed.complete(code);
            return null;
        }
    }
}
