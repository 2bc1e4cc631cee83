//! Shell: unusual behaviour of networks, servers and clients, in which counts still equal the server's own log.
//!
//! | file | subject |
//! |---|---|
//! | `tcp_segments` | segments that overlap, arrive in another order, are forged, or precede the connection |
//! | `http2_frames` | HTTP/2 frames that are lost and found again, and connections that both ends open at once |
//! | `packet_loss` | a link that loses, reorders and duplicates packets |
//! | `large_transfers` | packets of hundreds of kilobytes, bodies of a gigabyte, slow readers |
//! | `send_calls` | every system call that sends |
//! | `shared_sockets` | listeners and connections that several processes share or pass on |
//! | `abnormal_closes` | connections that end otherwise than by a close at both ends |
//! | `mptcp` | connections of more than one subflow |
//!
//! `tun_client` is a client in user space. `server_process`, `served_connection` and `io_uring_server` are the servers.
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
    fixture::{NetnsFixture, SERVING_PORT, SharedKernelFixture, in_netns},
    scripted_process::ScriptedProcess,
};

mod abnormal_closes;
mod http2_frames;
mod io_uring_server;
mod large_transfers;
mod mptcp;
mod packet_loss;
mod send_calls;
mod served_connection;
mod server_process;
mod shared_sockets;
mod tcp_segments;
mod tun_client;

/// Address on which the servers listen.
const ANY_ADDRESS: &str = "0.0.0.0:8080";

/// A pod whose servers share a log, and a client's namespace.
struct RobustnessFixture {
    kernel: SharedKernelFixture,
    pod: NetnsFixture,
    client: NetnsFixture,
    /// Log of the servers, with one byte for each request.
    log_path: PathBuf,
}

impl RobustnessFixture {
    fn new() -> Self {
        let mut kernel = SharedKernelFixture::new();
        let (pod, client) = (kernel.add_pod(), kernel.add_client());
        kernel.register_pod(&pod, 0);
        let log_path = std::env::temp_dir().join(format!("{}-log", pod.netns));
        fs::write(&log_path, "").unwrap();
        Self { kernel, pod, client, log_path }
    }

    /// Starts a server's process in the pod.
    fn start_server_process(&self) -> ScriptedProcess {
        server_process::start(&self.log_path, &self.pod.cgroup, &self.pod.netns)
    }

    /// Starts a server's process that listens and serves.
    fn start_server(&self) -> ScriptedProcess {
        let mut server = self.start_server_process();
        server.expect_step(&format!("listen {ANY_ADDRESS}"));
        server.expect_step("serve");
        server
    }

    fn pod_state(&self) -> abi::PodState {
        self.kernel.maps.pod_state(u32::from(self.pod.number))
    }

    /// Numbers of requests that have begun and ended.
    fn totals(&self) -> (u64, u64) {
        let totals = self.kernel.maps.totals(u32::from(self.pod.number));
        (totals.started, totals.finished)
    }

    /// Number of requests that servers have read.
    fn served_requests(&self) -> u64 {
        fs::metadata(&self.log_path).unwrap().len()
    }

    /// Waits until servers have read `count` requests.
    #[track_caller]
    fn wait_served(&self, count: u64) {
        self.wait("read", |it| it.served_requests() >= count);
    }

    /// Lets the server respond to the requests to `hold`.
    fn open_gate(&self) {
        fs::write(served_connection::RequestLogAndGate::gate_path(&self.log_path), "").unwrap();
    }

    #[track_caller]
    fn wait(&self, description: &str, is_done: impl Fn(&Self) -> bool) {
        let until = Instant::now() + Duration::from_secs(120);
        while !is_done(self) {
            let log = self.served_requests();
            assert!(
                Instant::now() < until,
                "{description}: {log}, {:?}, {:?}",
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
        let address = SocketAddr::new(address.parse().unwrap(), SERVING_PORT);
        let stream = in_netns(&self.client.netns, || TcpStream::connect(address).unwrap());
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }
}

impl Drop for RobustnessFixture {
    fn drop(&mut self) {
        let _none = fs::remove_file(&self.log_path);
        let gate_path = served_connection::RequestLogAndGate::gate_path(&self.log_path);
        let _none = fs::remove_file(gate_path);
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
    let mut pairs = names.split(' ').zip(figures.split(' '));
    pairs.find(|(it, _)| *it == name).unwrap().1.parse().unwrap()
}

fn get_request(path: &str) -> String {
    format!("GET /{path} HTTP/1.1\r\nHost: pod\r\n\r\n")
}

/// Sends a request and reads the response up to `terminator`.
#[track_caller]
fn send_and_read(stream: &mut TcpStream, request: &str, terminator: &str) {
    stream.write_all(request.as_bytes()).unwrap();
    read_until(stream, terminator);
}

/// Reads until `terminator`. Of long data, only the last bytes are kept.
#[track_caller]
fn read_until(stream: &mut TcpStream, terminator: &str) {
    let (mut total, mut received, mut buffer) = (0, Vec::new(), vec![0; 1 << 18]);
    while !received.ends_with(terminator.as_bytes()) {
        let read = stream.read(&mut buffer);
        let last = || String::from_utf8_lossy(&received);
        let count =
            read.unwrap_or_else(|error| panic!("{error} after {total} bytes, {:?}", last()));
        assert_ne!(count, 0, "closed after {total} bytes, {:?}", last());
        total += count;
        let old = received.len().saturating_sub(terminator.len());
        received.drain(..old);
        received.extend_from_slice(&buffer[..count]);
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
