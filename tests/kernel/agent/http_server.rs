//! Shell: an HTTP server in a pod, with all behaviours that these tests need, and requests to it.

use super::{shared_agent::SharedAgentFixture, *};

/// Headers that request another protocol, and confirm it in the response.
pub(super) const UPGRADE: &str = "Connection: upgrade\r\nUpgrade: chat\r\n";
/// Least time that `/slow` takes.
const SLOW_DELAY: Duration = Duration::from_millis(300);

/// Serves each connection to its end after the line `listen`: `/quick` responds at once, `/slow` later, `/missing` and
/// `/failed` with another status. `/hang` never responds, `/drip` sends a little data all the time, `/upgrade`
/// switches to another protocol. A connection whose first byte is that of TLS is not HTTP.
pub(super) fn run() {
    let mut lines = std::io::stdin().lock().lines().map_while(Result::ok);
    assert_eq!(lines.next().as_deref(), Some("listen"));
    let listener = TcpListener::bind("0.0.0.0:8080").expect("a free port");
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || {
                let _ended = serve(stream);
            });
        }
    });
    // Until the test closes stdin.
    lines.for_each(drop);
}

fn serve(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    loop {
        let mut head = vec![0];
        stream.read_exact(&mut head)?;
        if head == *b"\x16" {
            return serve_opaque(stream);
        }
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte)?;
            head.extend(byte);
        }
        let head = String::from_utf8_lossy(&head);
        match head.split(' ').nth(1) {
            Some("/quick") => respond(&mut stream, "200 OK")?,
            Some("/missing") => respond(&mut stream, "404 Not Found")?,
            Some("/failed") => respond(&mut stream, "503 Unavailable")?,
            Some("/slow") => {
                thread::sleep(SLOW_DELAY);
                respond(&mut stream, "200 OK")?;
            }
            Some("/drip") => {
                stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")?;
                while stream.write_all(b"1\r\nx\r\n").is_ok() {
                    thread::sleep(Duration::from_millis(1));
                }
            }
            Some("/upgrade") => {
                let switched = "HTTP/1.1 101 Switching Protocols\r\n";
                write!(stream, "{switched}{UPGRADE}\r\nhello")?;
                thread::sleep(WAIT_TIMEOUT);
            }
            _ => thread::sleep(WAIT_TIMEOUT),
        }
    }
}

/// Serves a connection of a protocol that is not HTTP: answers the first byte, and the next `!`.
fn serve_opaque(mut stream: TcpStream) -> std::io::Result<()> {
    stream.write_all(b".")?;
    let mut byte = [0];
    while byte != *b"!" {
        stream.read_exact(&mut byte)?;
    }
    stream.write_all(b"!")?;
    // Until the client closes the connection.
    stream.read_exact(&mut byte)
}

fn respond(stream: &mut TcpStream, status: &str) -> std::io::Result<()> {
    write!(stream, "HTTP/1.1 {status}\r\nContent-Length: 2\r\n\r\nok")
}

/// Starts a node and a pod with the server, whose requests have the given timeout.
pub(super) fn server_fixture(test: &str, timeout: Duration) -> AgentFixture {
    let mut fixture = AgentFixture::new(test);
    fixture.request_timeout = timeout;
    fixture.set_pod(RoutingPhase::Ready, ProbeHandler::Listen);
    fixture.start_agent();
    fixture.start_server();
    fixture
}

/// Starts a pod with the server on the shared node, whose requests have the given timeout.
pub(super) fn shared_server_fixture(timeout: Duration) -> SharedAgentFixture {
    let mut fixture = SharedAgentFixture::new();
    fixture.request_timeout = timeout;
    fixture.set_pod(RoutingPhase::Ready, ProbeHandler::Listen);
    fixture.start_server();
    fixture
}

impl AgentFixture {
    /// Starts the server's process in the pod, and lets it listen once the agent knows the pod.
    pub(super) fn start_server(&mut self) {
        self.pod = Some(self.spawn_in_pod("server"));
        // Sockets that listen from now on are seen by the eBPF programs, which follow their connections.
        self.wait_pod("known to the agent", |pod| !pod.not_ready_reason.is_empty());
        self.send_to_pod("listen");
        self.wait_pod("ready", |pod| pod.ready);
    }

    pub(super) fn connect(&self) -> TcpStream {
        let node =
            NetworkNamespace::open(format!("/run/netns/{}-n", self.name)).expect("it exists");
        let stream =
            node.run_inside("connect", || TcpStream::connect(POD_ADDRESS)).expect("it listens");
        stream.set_read_timeout(Some(WAIT_TIMEOUT)).expect("a socket");
        stream.set_nodelay(true).expect("a socket");
        stream
    }

    pub(super) fn metrics(&self) -> String {
        self.get_page("n", "127.0.0.1:7104", "/metrics")
    }
}

/// Sends a request whose response ends with `ok`, and reads it. Returns the numbers of sent and received bytes.
pub(super) fn send_and_measure(stream: &mut TcpStream, path: &str) -> [u64; 2] {
    let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n");
    stream.write_all(request.as_bytes()).expect("an open connection");
    let mut response = Vec::new();
    while !response.ends_with(b"\r\n\r\nok") {
        let mut byte = [0];
        stream.read_exact(&mut byte).expect("an open connection");
        response.extend(byte);
    }
    [request.len(), response.len()].map(|bytes| bytes as u64)
}
