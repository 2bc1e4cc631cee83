//! Shell: requests to a pod that take longer than they may: their connections are ended, and no others.

use std::thread::JoinHandle;

use super::*;

/// How long requests may take here.
const TIMEOUT: Duration = Duration::from_secs(2);
const ENDED: &str = "rouse_agent_deadlines_ended_total";
const UPGRADE: &str = "Connection: upgrade\r\nUpgrade: chat\r\n";

/// Serves after the line `listen`, each connection until it ends: `/quick` at once, `/hang` never, `/drip` a little all the
/// time, `/upgrade` by another protocol. Whatever is not HTTP comes back as it was sent.
pub(super) fn run_server() {
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
            stream.write_all(&head)?;
            return std::io::copy(&mut stream.try_clone()?, &mut stream).map(drop);
        }
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte)?;
            head.extend(byte);
        }
        let head = String::from_utf8_lossy(&head);
        match head.split(' ').nth(1) {
            Some("/quick") => {
                stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")?
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

/// A pod with the server, and its node.
fn scene(test: &str) -> World {
    let mut world = World::new(test);
    world.timeout = TIMEOUT;
    world.name_pod(PodPhase::Ready, ProbeHow::Listen);
    world.start_agent();
    world.pod = Some(world.start_in("server", "pods/poduid-1/main"));
    // What listens from now on is seen by the kernel half, and its connections are followed.
    world.wait("looked into", |seen| !seen.trouble.is_empty());
    world.tell("listen");
    world.wait("ready", |seen| seen.ready);
    world
}

impl World {
    fn connect(&self) -> TcpStream {
        let node = Namespace::open(format!("/run/netns/{}-n", self.name)).expect("it exists");
        let stream = node.within("connect", || TcpStream::connect(ADDRESS)).expect("it listens");
        stream.set_read_timeout(Some(LIMIT)).expect("a socket");
        stream
    }

    /// Sends a request on a connection of its own, reads until that ends, and says how much came before.
    fn asks(&self, path: &str) -> JoinHandle<(usize, ErrorKind)> {
        let mut stream = self.connect();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: a\r\n{UPGRADE}\r\n").expect("it stands");
        thread::spawn(move || {
            let (mut came, mut bytes) = (0, [0; 1024]);
            loop {
                match stream.read(&mut bytes) {
                    Ok(0) => return (came, ErrorKind::UnexpectedEof),
                    Ok(read) => came += read,
                    Err(error) => return (came, error.kind()),
                }
            }
        })
    }

    fn metrics(&self) -> String {
        self.get("n", "127.0.0.1:7104", "/metrics")
    }
}

/// Sends a request that is answered at once.
fn quick(stream: &mut TcpStream) {
    write!(stream, "GET /quick HTTP/1.1\r\nHost: a\r\n\r\n").expect("it stands");
    let mut answer = Vec::new();
    while !answer.ends_with(b"ok") {
        let mut byte = [0];
        stream.read_exact(&mut byte).expect("it stands");
        answer.extend(byte);
    }
}

#[test]
fn only_the_connections_of_requests_that_take_too_long_are_ended() {
    let world = scene("overdue");
    let (mut kept, mut unused, mut foreign) = (world.connect(), world.connect(), world.connect());
    foreign.write_all(b"\x16\x03").expect("it stands");
    quick(&mut kept);
    let long = ["/hang", "/drip", "/upgrade"].map(|path| world.asks(path));
    // Older than the long requests, in use all the time, and there when they are over: its time is each request's own.
    while long.iter().any(|it| !it.is_finished()) {
        quick(&mut kept);
    }
    let [hang, drip, upgrade] = long.map(|it| it.join().expect("no panic"));
    assert_eq!(hang, (0, ErrorKind::ConnectionReset));
    assert!(drip.0 > 0 && upgrade.0 > 0, "their answers had begun");
    assert_eq!([drip.1, upgrade.1], [ErrorKind::ConnectionReset; 2]);
    quick(&mut kept);
    quick(&mut unused);
    let mut back = [0; 2];
    foreign.read_exact(&mut back).expect("it stands");
    assert_eq!(back, *b"\x16\x03", "nobody knows what it does");
    world.wait_counted(ENDED, 3);
    let page = world.metrics();
    assert!(page.contains(&format!("{ENDED} 3\n")), "{page}");
    assert!(page.contains("rouse_agent_deadlines_kept 1\n"), "{page}");
    let pins = world.folder.join(format!("bpf/v{}", abi::ABI_VERSION));
    let state = Maps::open(&pins).expect("pinned maps").state(world.slot());
    assert_eq!((state.in_flight, state.connections), (1, 3), "the foreign one: {state:?}");
}

#[test]
fn a_request_from_before_the_agent_began_is_ended_too() {
    let mut world = scene("overdue-anew");
    world.kill_agent();
    let hang = world.asks("/hang");
    world.start_agent();
    assert_eq!(hang.join().expect("no panic"), (0, ErrorKind::ConnectionReset));
}
