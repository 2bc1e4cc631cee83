//! Shell: unusual behaviour of networks, servers and clients, in which counts still equal the server's own log.
//!
//! | file | subject |
//! |---|---|
//! | `segments` | segments that overlap, arrive in another order, are forged, or precede the connection |
//! | `frames` | HTTP/2 frames that are lost and found again, and connections that both ends open at once |
//! | `losses` | a link that loses, reorders and duplicates packets |
//! | `bulk` | packets of hundreds of kilobytes, bodies of a gigabyte, slow readers |
//! | `sending` | every system call that sends |
//! | `sharing` | listeners and connections that several processes share or pass on |
//! | `endings` | connections that end otherwise than by a close at both ends |
//! | `mptcp` | connections of more than one flow |
//!
//! `tcp` is a client in user space; `server`, `serve` and `uring` are the servers.
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics and waits on plain threads"
)]

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use datapath::abi;

use crate::{
    actor::ScriptedProcess,
    bed::{NetnsFixture, SERVING_PORT, SharedKernelFixture, in_netns},
};

mod bulk;
mod endings;
mod frames;
mod losses;
mod mptcp;
mod segments;
mod sending;
mod serve;
mod server;
mod sharing;
mod tcp;
mod uring;

/// Address on which the servers listen.
const ANY_ADDRESS: &str = "0.0.0.0:8080";

/// A pod whose servers share a log, and a client's namespace.
struct RobustnessFixture {
    fixture: SharedKernelFixture,
    pod: NetnsFixture,
    client: NetnsFixture,
    files: PathBuf,
}

impl RobustnessFixture {
    fn new() -> Self {
        let mut fixture = SharedKernelFixture::new();
        let (pod, client) = (fixture.add_pod(), fixture.add_client());
        fixture.register_pod(&pod, 0);
        let files = std::env::temp_dir().join(format!("{}-log", pod.netns));
        fs::write(&files, "").unwrap();
        Self { fixture, pod, client, files }
    }

    /// Starts a server's process in the pod.
    fn start_server_process(&self) -> ScriptedProcess {
        server::start(&self.files, &self.pod.cgroup, &self.pod.netns)
    }

    /// Starts a server's process that listens and serves.
    fn start_server(&self) -> ScriptedProcess {
        let mut server = self.start_server_process();
        server.expect_step(&format!("listen {ANY_ADDRESS}"));
        server.expect_step("serve");
        server
    }

    fn pod_state(&self) -> abi::PodState {
        self.fixture.maps.pod_state(u32::from(self.pod.number))
    }

    /// Numbers of requests that have begun and ended.
    fn totals(&self) -> (u64, u64) {
        let totals = self.fixture.maps.totals(u32::from(self.pod.number));
        (totals.started, totals.finished)
    }

    /// Number of requests that servers have read.
    fn served_requests(&self) -> u64 {
        fs::metadata(&self.files).unwrap().len()
    }

    /// Waits until servers have read `count` requests.
    #[track_caller]
    fn wait_served(&self, count: u64) {
        self.wait("read", |it| it.served_requests() >= count);
    }

    /// Lets the requests to `hold` be answered.
    fn open_gate(&self) {
        fs::write(serve::RequestLogAndGate::gate_path(&self.files), "").unwrap();
    }

    #[track_caller]
    fn wait(&self, what: &str, done: impl Fn(&Self) -> bool) {
        let until = Instant::now() + Duration::from_secs(30);
        while !done(self) {
            let log = self.served_requests();
            assert!(
                Instant::now() < until,
                "{what}: {log}, {:?}, {:?}",
                self.totals(),
                self.pod_state()
            );
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until all connections are closed, and asserts that as many requests began and ended as servers have
    /// read.
    #[track_caller]
    fn wait_settled(&self) {
        self.wait_settled_at(self.served_requests());
    }

    #[track_caller]
    fn wait_settled_at(&self, served: u64) {
        self.wait("closed", |it| it.pod_state().connections == 0);
        let state = self.pod_state();
        assert_eq!(
            (self.totals(), self.served_requests()),
            ((served, served), served),
            "{state:?}"
        );
        assert_eq!((state.in_flight, state.awaiting_first_request), (0, 0), "{state:?}");
    }

    /// Settles as [`Self::wait_settled`] does, and asserts that no boundary was lost and no response had no request.
    #[track_caller]
    fn wait_settled_in_sync(&self) {
        self.wait_settled();
        let state = self.pod_state();
        assert_eq!(
            (state.desynced_connections, state.stray_responses, state.opaque_connections),
            (0, 0, 0),
            "{state:?}"
        );
    }

    /// Settles as [`Self::wait_settled`] does. If TCP itself had to reorder packets (after a move to another CPU a
    /// sender overtakes itself), some are too large to be buffered: a boundary may be lost with them, but no count.
    #[track_caller]
    fn wait_settled_in_order(&self) {
        self.wait_settled();
        let (state, netstat) = (self.pod_state(), netstat_text(&self.pod.netns, "netstat"));
        let disordered = netstat_value(&netstat, "TcpExt:", "TCPOFOQueue");
        assert_eq!((state.stray_responses, state.opaque_connections), (0, 0), "{state:?}");
        assert!(state.desynced_connections == 0 || disordered > 0, "{state:?}");
    }

    /// Connects from the client's network namespace.
    fn connect(&self) -> TcpStream {
        self.connect_to(&self.pod.ipv4())
    }

    fn connect_to(&self, address: &str) -> TcpStream {
        let to = SocketAddr::new(address.parse().unwrap(), SERVING_PORT);
        let stream = in_netns(&self.client.netns, || TcpStream::connect(to).unwrap());
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }
}

impl Drop for RobustnessFixture {
    fn drop(&mut self) {
        let _none = fs::remove_file(&self.files);
        let _none = fs::remove_file(serve::RequestLogAndGate::gate_path(&self.files));
    }
}

/// Content of a file with network statistics of a namespace.
fn netstat_text(netns: &str, name: &str) -> String {
    in_netns(netns, || fs::read_to_string(format!("/proc/thread-self/net/{name}")).unwrap())
}

/// Value in a file that has two lines for each protocol: names, then values.
fn netstat_value(text: &str, protocol: &str, name: &str) -> u64 {
    let mut lines = text.lines().filter(|line| line.starts_with(protocol));
    let (names, figures) = (lines.next().unwrap(), lines.next().unwrap());
    let mut both = names.split(' ').zip(figures.split(' '));
    both.find(|(it, _)| *it == name).unwrap().1.parse().unwrap()
}

fn get_request(path: &str) -> String {
    format!("GET /{path} HTTP/1.1\r\nHost: pod\r\n\r\n")
}

/// Sends a request and reads the response up to `end`.
#[track_caller]
fn send_and_read(stream: &mut TcpStream, request: &str, end: &str) {
    stream.write_all(request.as_bytes()).unwrap();
    read_until(stream, end);
}

/// Reads until `end`. Of long data, only the last bytes are kept.
#[track_caller]
fn read_until(stream: &mut TcpStream, end: &str) {
    let (mut all, mut seen, mut buffer) = (0, Vec::new(), vec![0; 1 << 18]);
    while !seen.ends_with(end.as_bytes()) {
        let read = stream.read(&mut buffer);
        let last = || String::from_utf8_lossy(&seen);
        let count = read.unwrap_or_else(|error| panic!("{error} after {all} bytes, {:?}", last()));
        assert_ne!(count, 0, "closed after {all} bytes, {:?}", last());
        all += count;
        let old = seen.len().saturating_sub(end.len());
        seen.drain(..old);
        seen.extend_from_slice(&buffer[..count]);
    }
}

/// Generator of test cases: a linear congruential generator with Knuth's constants.
struct CaseRng(u64);

impl CaseRng {
    fn next_below(&mut self, bound: usize) -> usize {
        let next = self.0.wrapping_mul(6_364_136_223_846_793_005);
        self.0 = next.wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }
}
