//! Shell: a pod that serves HTTP in every way these tests need, and requests to it.

use super::*;

/// What asks for another protocol, and says so in the answer.
pub(super) const UPGRADE: &str = "Connection: upgrade\r\nUpgrade: chat\r\n";
/// How long `/slow` takes at least.
const SLOW: Duration = Duration::from_millis(300);

/// Serves after the line `listen`, each connection until it ends: `/quick` at once, `/slow` later, `/missing` and `/failed`
/// with another status, `/hang` never, `/drip` a little all the
/// time, `/upgrade` by another protocol. A connection that begins as TLS does is not HTTP.
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
    // Until the test has gone.
    lines.for_each(drop);
}

fn serve(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    loop {
        let mut head = vec![0];
        stream.read_exact(&mut head)?;
        if head == *b"\x16" {
            return serve_foreign(stream);
        }
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte)?;
            head.extend(byte);
        }
        let head = String::from_utf8_lossy(&head);
        match head.split(' ').nth(1) {
            Some("/quick") => answer(&mut stream, "200 OK")?,
            Some("/missing") => answer(&mut stream, "404 Not Found")?,
            Some("/failed") => answer(&mut stream, "503 Unavailable")?,
            Some("/slow") => {
                thread::sleep(SLOW);
                answer(&mut stream, "200 OK")?;
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
                thread::sleep(LIMIT);
            }
            _ => thread::sleep(LIMIT),
        }
    }
}

/// Answers the first byte, and the next `!`.
fn serve_foreign(mut stream: TcpStream) -> std::io::Result<()> {
    stream.write_all(b".")?;
    let mut byte = [0];
    while byte != *b"!" {
        stream.read_exact(&mut byte)?;
    }
    stream.write_all(b"!")?;
    // Until the client has gone.
    stream.read_exact(&mut byte)
}

fn answer(stream: &mut TcpStream, status: &str) -> std::io::Result<()> {
    write!(stream, "HTTP/1.1 {status}\r\nContent-Length: 2\r\n\r\nok")
}

/// A pod with the server, whose requests may take so long, and its node.
pub(super) fn scene(test: &str, timeout: Duration) -> World {
    let mut world = World::new(test);
    world.timeout = timeout;
    world.name_pod(PodPhase::Ready, ProbeHow::Listen);
    world.start_agent();
    world.start_server();
    world
}

impl World {
    /// Starts the server's process in the pod, once the agent knows that.
    pub(super) fn start_server(&mut self) {
        self.pod = Some(self.start_in("server", "pods/poduid-1/main"));
        // What listens from now on is seen by the kernel half, and its connections are followed.
        self.wait("looked into", |seen| !seen.trouble.is_empty());
        self.tell("listen");
        self.wait("ready", |seen| seen.ready);
    }

    pub(super) fn connect(&self) -> TcpStream {
        let node = Namespace::open(format!("/run/netns/{}-n", self.name)).expect("it exists");
        let stream = node.within("connect", || TcpStream::connect(ADDRESS)).expect("it listens");
        stream.set_read_timeout(Some(LIMIT)).expect("a socket");
        stream.set_nodelay(true).expect("a socket");
        stream
    }

    pub(super) fn metrics(&self) -> String {
        self.get("n", "127.0.0.1:7104", "/metrics")
    }
}

/// Sends a request that is answered with `ok`, and reads that. Returns how many bytes went and came.
pub(super) fn ask(stream: &mut TcpStream, path: &str) -> [u64; 2] {
    let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n");
    stream.write_all(request.as_bytes()).expect("it stands");
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\nok") {
        let mut byte = [0];
        stream.read_exact(&mut byte).expect("it stands");
        answer.extend(byte);
    }
    [request.len(), answer.len()].map(|bytes| bytes as u64)
}
