//! Shell: requests in flight, as the eBPF programs count them, compared with the server's own count.
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics and waits on plain threads"
)]

mod connection_storage;
pub(crate) mod counting_server;
mod full_maps;
mod kubelet_probes;
mod upgrade;

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use agent::kernel::maps::KernelEventRing;
use datapath::abi;
use nix::{
    sched::{CloneFlags, setns},
    sys::socket::{setsockopt, sockopt::Linger},
};

use self::counting_server::CountingServer;
use crate::{
    fixture::{NetnsFixture, SERVING_PORT, SharedKernelFixture},
    sys,
};

/// Timeout of every wait and response.
const WAIT_TIMEOUT: Duration = Duration::from_secs(120);
/// Number of requests in the test with resets. `ROUSE_COUNT_REQUESTS=10000000` sends ten million in about ten
/// minutes.
const REQUESTS: usize = 100_000;

/// A pod with a server that counts its requests, and a client's namespace.
struct CountFixture {
    kernel: SharedKernelFixture,
    pod: NetnsFixture,
    client: NetnsFixture,
    server: CountingServer,
}

impl CountFixture {
    /// Starts `clients` clients at once, each with `each` requests.
    fn start_clients(&self, clients: u64, each: usize) -> Vec<thread::JoinHandle<()>> {
        let (netns, address) = (&self.client.netns, self.pod.ipv4());
        let start_client = |seed| {
            let (netns, address) = (netns.clone(), address.clone());
            thread::spawn(move || send_random_requests(&netns, &address, each, seed))
        };
        (0..clients).map(start_client).collect()
    }

    fn new() -> Self {
        Self::with_kernel(SharedKernelFixture::new())
    }

    fn exclusive() -> Self {
        Self::with_kernel(SharedKernelFixture::exclusive())
    }

    fn with_kernel(mut kernel: SharedKernelFixture) -> Self {
        let (pod, client) = (kernel.add_pod(), kernel.add_client());
        kernel.register_pod(&pod, 0);
        let server = CountingServer::start(&pod, SERVING_PORT);
        Self { kernel, pod, client, server }
    }

    fn connect(&self) -> TcpStream {
        connect_from(&self.client.netns, &self.pod.ipv4())
    }

    fn slot(&self) -> u32 {
        u32::from(self.pod.number)
    }

    /// Number of requests in flight now.
    fn in_flight(&self) -> i64 {
        self.kernel.maps.pod_state(self.slot()).in_flight as i64
    }

    /// Waits until no request is in flight and no connection open, then compares the totals with the server's count.
    #[track_caller]
    fn wait_settled(&mut self, served: u64) {
        self.wait_settled_with_open(served, |_pod| 0);
    }

    /// Waits and compares as [`Self::wait_settled`] does, with the given number of connections still open in the pod.
    #[track_caller]
    fn wait_settled_with_open(&mut self, served: u64, open: impl Fn(&str) -> u64) {
        let until = Instant::now() + WAIT_TIMEOUT;
        let settled = |fixture: &Self| {
            let state = fixture.kernel.maps.pod_state(fixture.slot());
            let open = open(&fixture.pod.netns);
            state.in_flight == 0
                && state.connections == open
                && state.awaiting_first_request <= open
        };
        while !settled(self) && Instant::now() < until {
            thread::sleep(Duration::from_millis(10));
        }
        let totals = self.kernel.maps.totals(self.slot());
        let read = self.server.request_count();
        let state = self.kernel.maps.pod_state(self.slot());
        assert_eq!((totals.started, totals.finished, read), (served, served, served), "{state:?}");
        assert!(settled(self), "{state:?}");
    }

    /// Number of requests that the server has read, once it no longer grows and as many were counted in the row `slot`.
    /// After a timeout the number may be another one: then the counts differ.
    fn settled_request_count(&mut self, slot: u32) -> u64 {
        let until = Instant::now() + WAIT_TIMEOUT;
        loop {
            let count = self.server.settled_request_count();
            // A thread of the server may wait for long before it reads the request of a client that has gone.
            if count == self.kernel.maps.totals(slot).started || Instant::now() > until {
                return count;
            }
        }
    }

    /// Sends `request` and reads until `terminator`.
    #[track_caller]
    fn send_and_read(&self, stream: &mut TcpStream, request: &str, terminator: &str) {
        stream.write_all(request.as_bytes()).unwrap();
        read_until(stream, terminator);
    }
}

/// Connects from another network namespace: a socket stays in the namespace in which it was created.
fn connect_from(netns: &str, address: &str) -> TcpStream {
    let path = Path::new("/run/netns").join(netns);
    let address = format!("{address}:{SERVING_PORT}");
    let inside = thread::spawn(move || {
        let namespace = std::fs::File::open(path).expect("the fixture created it");
        setns(namespace, CloneFlags::CLONE_NEWNET).expect("root may enter it");
        TcpStream::connect(address).expect("the server listens")
    });
    let stream = inside.join().unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    stream
}

/// Reads from the stream until `terminator`.
#[track_caller]
fn read_until(stream: &mut TcpStream, terminator: &str) {
    let (mut received, mut buffer) = (Vec::new(), [0; 65_536]);
    while !received.ends_with(terminator.as_bytes()) {
        let count = stream.read(&mut buffer).unwrap();
        assert_ne!(count, 0, "closed after {:?}", String::from_utf8_lossy(&received));
        received.extend_from_slice(&buffer[..count]);
    }
}

fn get_request(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: pod\r\n\r\n")
}

#[test]
fn requests_between_containers_of_a_pod_are_not_counted() {
    let mut fixture = CountFixture::new();
    for _ in 0..3 {
        let mut stream = connect_from(&fixture.pod.netns, "127.0.0.1");
        fixture.send_and_read(&mut stream, &get_request("/length/5"), "xxxxx");
    }
    let mut stream = fixture.connect();
    fixture.send_and_read(&mut stream, &get_request("/length/5"), "xxxxx");
    drop(stream);
    // A pod's call to its own service is routed to the pod's own address, and counts.
    let mut stream = connect_from(&fixture.pod.netns, &fixture.pod.ipv4());
    fixture.send_and_read(&mut stream, &get_request("/length/5"), "xxxxx");
    drop(stream);
    let totals = fixture.kernel.maps.totals(fixture.slot());
    assert_eq!((totals.started, totals.finished, fixture.server.request_count()), (2, 2, 5));
}

#[test]
fn each_way_to_end_a_message_is_counted_exactly() {
    let mut fixture = CountFixture::new();
    let mut stream = fixture.connect();
    fixture.send_and_read(&mut stream, &get_request("/length/5"), "xxxxx");
    fixture.send_and_read(&mut stream, &get_request("/length/300000"), "x\n");
    fixture.send_and_read(&mut stream, &get_request("/chunks/40"), "\r\n0\r\nTrailer: x\r\n\r\n");
    fixture.send_and_read(&mut stream, &get_request("/status/204"), "\r\n\r\n");
    fixture.send_and_read(&mut stream, &get_request("/status/304"), "\r\n\r\n");
    fixture.send_and_read(&mut stream, &get_request("/interim"), "done");
    fixture.send_and_read(&mut stream, "HEAD /head HTTP/1.1\r\nHost: pod\r\n\r\n", "\r\n\r\n");
    fixture.send_and_read(&mut stream, &get_request("/split"), "split");
    let body = "x".repeat(100_000);
    let post = format!("POST /length/5 HTTP/1.1\r\nContent-Length: 100000\r\n\r\n{body}");
    fixture.send_and_read(&mut stream, &post, "xxxxx");
    let chunks = "5;a=b\r\nhello\r\n".repeat(60);
    let post = format!(
        "POST /length/5 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}0\r\nT: x\r\n\r\n"
    );
    fixture.send_and_read(&mut stream, &post, "xxxxx");
    assert_eq!(fixture.in_flight(), 0, "idle between requests");
    drop(stream);
    fixture.wait_settled(10);
    let row = fixture.kernel.maps.responses(fixture.slot());
    assert_eq!(row.status, [0, 9, 1, 0, 0], "{row:?}");
    assert_eq!((row.aborted, row.unknown_status), (0, 0));
}

#[test]
fn requests_split_at_any_byte_are_counted_once() {
    let mut fixture = CountFixture::new();
    let request = format!(
        "POST /length/5 HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc{}",
        get_request("/chunks/3")
    );
    for cut in 1..request.len() {
        let mut stream = fixture.connect();
        stream.write_all(&request.as_bytes()[..cut]).unwrap();
        // So that the server reads the parts one by one, if the machine is not busy.
        thread::sleep(Duration::from_millis(1));
        stream.write_all(&request.as_bytes()[cut..]).unwrap();
        read_until(&mut stream, "\r\n0\r\nTrailer: x\r\n\r\n");
    }
    fixture.wait_settled(2 * (request.len() as u64 - 1));
}

#[test]
fn a_pipeline_has_one_request_in_flight() {
    let mut fixture = CountFixture::new();
    let mut stream = fixture.connect();
    stream
        .write_all(
            (get_request("/wait") + &get_request("/length/5") + &get_request("/chunks/9"))
                .as_bytes(),
        )
        .unwrap();
    fixture.server.wait_request_count(1);
    assert_eq!(fixture.in_flight(), 1);
    fixture.server.open_gate();
    read_until(&mut stream, "\r\n0\r\nTrailer: x\r\n\r\n");
    drop(stream);
    fixture.wait_settled(3);
}

#[test]
fn an_upgraded_connection_counts_until_it_closes() {
    let mut fixture = CountFixture::new();
    let mut stream = fixture.connect();
    fixture.send_and_read(&mut stream, &get_request("/upgrade"), "\r\n\r\n");
    fixture.send_and_read(&mut stream, &get_request("/echo"), &get_request("/echo"));
    assert_eq!(fixture.in_flight(), 1);
    drop(stream);
    fixture.wait_settled(1);
}

#[test]
fn a_response_without_length_counts_until_the_server_closes() {
    let mut fixture = CountFixture::new();
    let mut stream = fixture.connect();
    stream.write_all(get_request("/close").as_bytes()).unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    assert_eq!(fixture.in_flight(), 0, "the client has not closed yet");
    drop(stream);
    fixture.wait_settled(1);
}

#[test]
fn garbage_half_heads_and_early_closes_leave_nothing_behind() {
    let mut fixture = CountFixture::new();
    for bytes in ["", "GET / HT", "\r\n\r\n", "GET /length/5 HTTP/1.1\r\nHost: a\r\n"] {
        let mut stream = fixture.connect();
        stream.write_all(bytes.as_bytes()).unwrap();
    }
    let endless =
        format!("GET /length/5 HTTP/1.1\r\n{}\r\n", "X: yyyyyyyyyyyyyyyyyyyy\r\n".repeat(5_000));
    let mut stream = fixture.connect();
    fixture.send_and_read(&mut stream, &endless, "xxxxx");
    drop(stream);
    fixture.wait_settled(1);
}

/// Number of events that report growth of this pod beyond the armed level.
fn growth_events(ring: &mut KernelEventRing, slot: u32) -> usize {
    let events = std::iter::from_fn(|| ring.next());
    events.filter(|event| (event.kind, event.port_or_slot) == (abi::EVENT_GROWTH, slot)).count()
}

#[test]
fn growth_beyond_the_armed_level_is_reported_once() {
    let fixture = CountFixture::new();
    let (slot, maps) = (fixture.slot(), &fixture.kernel.maps);
    let mut ring = KernelEventRing::open(&fixture.kernel.paths().pins()).unwrap();
    let mut open = Vec::new();
    let mut grow = |count: usize| {
        for _ in 0..count {
            let mut stream = fixture.connect();
            stream.write_all(get_request("/wait").as_bytes()).unwrap();
            open.push(stream);
        }
        let until = Instant::now() + WAIT_TIMEOUT;
        while fixture.in_flight() < open.len() as i64 && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(fixture.in_flight(), open.len() as i64);
    };
    grow(1);
    assert_eq!(growth_events(&mut ring, slot), 0, "no event is armed");
    maps.arm_growth_event(slot, 1);
    grow(1);
    assert_eq!(growth_events(&mut ring, slot), 1);
    grow(8);
    assert_eq!(growth_events(&mut ring, slot), 0, "an armed event comes once");
    maps.arm_growth_event(slot, 15);
    grow(5);
    assert_eq!(growth_events(&mut ring, slot), 0, "as many as are known of");
    grow(1);
    assert_eq!((growth_events(&mut ring, slot), maps.pod_state(slot).event_threshold), (1, 0));
    maps.arm_growth_event(slot, 0);
    grow(1);
    assert_eq!(growth_events(&mut ring, slot), 1, "any is news of a pod that is taken to be idle");
}

/// Positions of this client port's connection in the events of idle connections.
fn idle_positions(ring: &mut KernelEventRing, client_port: u16) -> Vec<[u32; 2]> {
    let read = std::iter::from_fn(|| ring.next()).filter(|event| event.kind == abi::EVENT_IDLE);
    let read = read.count();
    let events = ring.take_idle();
    assert_eq!(read, events.len(), "each is one of the events that a wake reads");
    let own = events.into_iter().filter(|event| event.client_port == u32::from(client_port));
    own.map(|event| [event.client_seq, event.pod_seq]).collect()
}

#[test]
fn a_connection_reports_its_position_at_the_end_of_each_response_while_it_is_asked_to() {
    let fixture = CountFixture::new();
    let (slot, maps) = (fixture.slot(), &fixture.kernel.maps);
    let pods = maps.pods().unwrap();
    let cookie = *pods.iter().find(|(_, pod)| pod.slot == slot).unwrap().0;
    let mut ring = KernelEventRing::open(&fixture.kernel.paths().pins()).unwrap();
    let flags = maps.idle_event_flags().unwrap();
    let mut stream = fixture.connect();
    let port = stream.local_addr().unwrap().port();
    let mut send = || {
        fixture.send_and_read(&mut stream, &get_request("/length/5"), "xxxxx");
        sys::next_sequence_numbers(&stream).unwrap()
    };
    send();
    assert_eq!(idle_positions(&mut ring, port), [[0; 2]; 0], "no event is asked for");
    assert!(flags.set(cookie, true).unwrap());
    for round in 0..3 {
        let position = send();
        assert_eq!(idle_positions(&mut ring, port), [position], "{round}");
    }
    assert!(flags.set(cookie, false).unwrap());
    send();
    assert_eq!(idle_positions(&mut ring, port), [[0; 2]; 0], "no longer");
    assert!(!flags.set(u64::MAX, true).unwrap(), "no pod is there");
}

/// Sends `count` requests on connections that end in every way, some with a reset in the middle.
fn send_random_requests(netns: &str, address: &str, count: usize, mut rng: u64) {
    let mut below = |bound: u64| {
        rng = rng.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (rng >> 33) % bound
    };
    let path = Path::new("/run/netns").join(netns);
    setns(std::fs::File::open(path).unwrap(), CloneFlags::CLONE_NEWNET).unwrap();
    let mut sent = 0;
    while sent < count {
        let Ok(mut stream) = TcpStream::connect((address, SERVING_PORT)) else { continue };
        stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
        for _ in 0..1 + below(30) {
            let kind = below(4);
            let request = match kind {
                0 => get_request("/chunks/4"),
                1 => "POST /length/5 HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc".into(),
                _ => get_request("/length/5"),
            };
            sent += 1;
            if stream.write_all(request.as_bytes()).is_err() || below(50) == 0 {
                break;
            }
            let end: &[u8] = if kind == 0 { b"\r\n0\r\nTrailer: x\r\n\r\n" } else { b"xxxxx" };
            let (mut received, mut buffer) = (Vec::new(), [0; 4096]);
            while !received.ends_with(end) {
                match stream.read(&mut buffer) {
                    Ok(0) | Err(_) => return,
                    Ok(count) => received.extend_from_slice(&buffer[..count]),
                }
            }
        }
        if below(2) == 0 {
            let linger = nix::libc::linger { l_onoff: 1, l_linger: 0 };
            setsockopt(&stream, Linger, &linger).unwrap();
        }
    }
}

#[test]
fn clients_that_reset_at_random_do_not_disturb_the_counts() {
    let mut fixture = CountFixture::new();
    let requests = std::env::var("ROUSE_COUNT_REQUESTS").ok().and_then(|it| it.parse().ok());
    let requests_per_client = requests.unwrap_or(REQUESTS) / 8;
    let clients = fixture.start_clients(8, requests_per_client);
    clients.into_iter().for_each(|client| client.join().unwrap());
    let served = fixture.settled_request_count(fixture.slot());
    assert!(served >= 8 * requests_per_client as u64 * 9 / 10, "{served}");
    fixture.wait_settled(served);
}

/// Deferred accept in nginx: a connection's first request arrives at the listening socket.
#[test]
fn requests_on_a_deferred_listener_are_counted() {
    let mut fixture = SharedKernelFixture::new();
    let (pod, client) = (fixture.add_pod(), fixture.add_client());
    fixture.register_pod(&pod, 0);
    let nginx = NginxFixture::start(&pod);
    let long_request = format!("GET / HTTP/1.1\r\nHost: a\r\nX: {}\r\n\r\n", "y".repeat(900));
    for cut in [1, 20, 200, long_request.len()] {
        let mut stream = connect_from(&client.netns, &pod.ipv4());
        stream.write_all(&long_request.as_bytes()[..cut]).unwrap();
        // So that nginx accepts the connection with the first part alone, if the machine is not busy.
        thread::sleep(Duration::from_millis(20));
        stream.write_all(&long_request.as_bytes()[cut..]).unwrap();
        read_until(&mut stream, "hello");
    }
    let url = format!("http://{}:{SERVING_PORT}/", pod.ipv4());
    let run = |program: &[&str]| {
        let mut ip = Command::new("ip");
        let status = ip.args(["netns", "exec", &client.netns]).args(program).output();
        assert!(status.unwrap().status.success(), "{program:?}");
    };
    run(&["wrk", "-t1", "-c20", "-d2", &url]);
    for _ in 0..20 {
        run(&["curl", "-s", &url]);
    }
    let slot = u32::from(pod.number);
    let until = Instant::now() + WAIT_TIMEOUT;
    while fixture.maps.pod_state(slot).connections != 0 && Instant::now() < until {
        thread::sleep(Duration::from_millis(10));
    }
    let log = nginx.stop();
    let (totals, state) = (fixture.maps.totals(slot), fixture.maps.pod_state(slot));
    assert_eq!((totals.started, totals.finished), (log, log), "{state:?}");
    assert_eq!(
        (
            state.in_flight,
            state.connections,
            state.awaiting_first_request,
            state.desynced_connections
        ),
        (0, 0, 0, 0)
    );
}

/// nginx in a pod, with its log in a directory of its own.
struct NginxFixture {
    child: std::process::Child,
    folder: std::path::PathBuf,
}

impl NginxFixture {
    fn start(pod: &NetnsFixture) -> Self {
        let folder = std::env::temp_dir().join(format!("{}-nginx", pod.netns));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.display();
        let config = format!(
            "daemon off; master_process off; pid {path}/pid; error_log stderr crit;
             events {{ worker_connections 512; }}
             http {{ access_log {path}/log; keepalive_requests 1000000;
                server {{ listen {SERVING_PORT} deferred; location / {{ return 200 hello; }} }} }}"
        );
        std::fs::write(folder.join("conf"), config).unwrap();
        let script = "echo $$ > \"$1\" && exec ip netns exec \"$2\" nginx -c \"$3\"";
        let mut sh = Command::new("sh");
        sh.args(["-c", script, "sh"]).arg(pod.cgroup.join("cgroup.procs")).arg(&pod.netns);
        let child = sh.arg(folder.join("conf")).spawn().expect("nginx is installed");
        while !folder.join("pid").exists() {
            thread::sleep(Duration::from_millis(10));
        }
        Self { child, folder }
    }

    /// Kills nginx and returns the number of lines in its log.
    fn stop(mut self) -> u64 {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        std::fs::read_to_string(self.folder.join("log")).unwrap().lines().count() as u64
    }
}

impl Drop for NginxFixture {
    fn drop(&mut self) {
        let _dead_already = self.child.kill();
        let _waited_already = self.child.wait();
        let _none = std::fs::remove_dir_all(&self.folder);
    }
}

/// Makes the egress of a namespace lossy: by netem, or, on kernels without it, by a queue that keeps overflowing.
fn make_lossy(netns: &str) {
    let netem = "netem delay 1ms reorder 30% 50% loss 2% duplicate 2%";
    let queue = "tbf rate 30mbit burst 4000 limit 5000";
    let add = |args: &str| {
        let mut tc = Command::new("tc");
        tc.args(["-n", netns, "qdisc", "add", "dev", "eth0", "root"]).args(args.split(' '));
        tc.output().expect("`tc` is installed (iproute2)")
    };
    if !add(netem).status.success() {
        let status = add(queue);
        assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stderr));
    }
}

#[test]
fn loss_and_reordering_do_not_disturb_the_counts() {
    let mut fixture = CountFixture::new();
    for netns in [&fixture.pod.netns, &fixture.client.netns] {
        make_lossy(netns);
    }
    fixture.start_clients(16, 300).into_iter().for_each(|client| client.join().unwrap());
    let served = fixture.settled_request_count(fixture.slot());
    // If a client's reset is lost, its connection stays open at the server.
    fixture.wait_settled_with_open(served, established_connections);
}

/// Number of established connections at a namespace's serving port.
fn established_connections(netns: &str) -> u64 {
    let mut ss = Command::new("ip");
    ss.args(["netns", "exec", netns, "ss", "-Htn", "state", "established", "sport", "=", ":8080"]);
    let output = ss.output().expect("`ss` is installed (iproute2)");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).lines().count() as u64
}
