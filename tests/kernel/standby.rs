//! Shell: frozen pods in the kernel. Each connection to such a pod makes the eBPF programs send an event, and waits in
//! the kernel for the thaw.
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics and waits on plain threads"
)]

use std::{
    fs,
    io::{self, Read as _},
    net::{SocketAddr, TcpStream},
    thread,
    time::{Duration, Instant},
};

use agent::kernel::{
    freezer::{self, CgroupState},
    maps::KernelEventRing,
};
use common::wire::ConnectionPath;
use datapath::abi;
use socket2::SockRef;

use crate::{
    fixture::{NetnsFixture, SERVING_PORT, SharedKernelFixture, in_netns, registration},
    scripted_process::{ScriptedProcess, read_greeting},
};

/// Port of the pods at which connections do not count.
const OTHER_PORT: u16 = 9999;
/// Timeout of every wait.
const WAIT_TIMEOUT: Duration = Duration::from_secs(180);

/// A pod whose process greets the clients of both ports, and a client's namespace. The process ends before the cgroups
/// are removed.
struct StandbyFixture {
    server: ScriptedProcess,
    pod: NetnsFixture,
    client: NetnsFixture,
    ring: KernelEventRing,
    kernel: SharedKernelFixture,
}

impl StandbyFixture {
    /// Starts a pod. `options` are those of its process's step `listen`, see [`ScriptedProcess`].
    fn new(options: &str) -> Self {
        let mut kernel = SharedKernelFixture::new();
        let (pod, client) = (kernel.add_pod(), kernel.add_client());
        kernel.register_pod(&pod, 0);
        let mut server = pod.start_process();
        for port in [SERVING_PORT, OTHER_PORT] {
            server.expect_step(&format!("listen [::]:{port} one {options}"));
        }
        let ring = KernelEventRing::open(&kernel.paths().pins()).unwrap();
        let mut fixture = Self { server, pod, client, ring, kernel };
        let _of_earlier_tests = fixture.take_growth_events();
        fixture
    }

    /// Sets or clears the flag `POD_STANDBY`, by which each new connection to the pod sends an event.
    fn set_standby(&mut self, is_standby: bool) {
        let entry = registration(&self.pod, 0, &[]).entry();
        self.kernel.maps.set_connection_events(self.pod.cookie, entry, is_standby).unwrap();
    }

    /// Takes the growth events from the ring, and returns the number of those of the pod.
    fn take_growth_events(&mut self) -> usize {
        let growth = (abi::EVENT_GROWTH, u32::from(self.pod.number));
        let events = std::iter::from_fn(|| self.ring.next());
        events.filter(|event| (event.kind, event.port_or_slot) == growth).count()
    }

    /// Waits until the pod has sent `count` events that were not taken before. Fails if it has sent more than `most`.
    #[track_caller]
    fn wait_growth_events(&mut self, count: usize, most: usize) {
        let (mut seen, deadline) = (self.take_growth_events(), Instant::now() + WAIT_TIMEOUT);
        while seen < count {
            assert!(Instant::now() < deadline, "{seen} of {count} events");
            thread::sleep(Duration::from_millis(2));
            seen += self.take_growth_events();
        }
        assert!(seen <= most, "{seen} events");
    }

    fn freeze(&self) {
        freezer::freeze(&self.pod.cgroup).unwrap();
        self.wait_state(true);
    }

    fn thaw(&self) {
        freezer::thaw(&self.pod.cgroup).unwrap();
        self.wait_state(false);
    }

    #[track_caller]
    fn wait_state(&self, is_frozen: bool) {
        let wanted = Some(CgroupState { is_populated: true, is_frozen });
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while freezer::read_state(&self.pod.cgroup).unwrap() != wanted {
            assert!(Instant::now() < deadline, "never {wanted:?}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn address(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.pod.ipv4().parse().unwrap(), port)
    }

    fn connect(&self, address: SocketAddr) -> TcpStream {
        in_netns(&self.client.netns, || TcpStream::connect(address).unwrap())
    }
}

/// Returns true if nothing has come from the server yet.
fn has_no_greeting(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    let peeked = stream.peek(&mut [0]);
    stream.set_nonblocking(false).unwrap();
    peeked.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
}

#[test]
fn each_connection_of_a_pod_on_standby_sends_one_event_whether_it_counts_or_not() {
    let mut fixture = StandbyFixture::new("");
    let (mut client, mut inside) = (fixture.client.start_process(), fixture.pod.start_process());
    let (ipv4, ipv6) = (fixture.pod.ipv4(), fixture.pod.ipv6());
    let from_outside = [SERVING_PORT, OTHER_PORT]
        .map(|port| [format!("{ipv4}:{port}"), format!("[{ipv6}]:{port}")])
        .concat();
    // Connections between processes of a pod count at no port.
    let from_inside = [format!("127.0.0.1:{SERVING_PORT}"), format!("[::1]:{OTHER_PORT}")];
    for (is_standby, events) in [(false, 0), (true, 1), (false, 0)] {
        fixture.set_standby(is_standby);
        for address in &from_outside {
            client.expect_step(&format!("connect {address}"));
            assert_eq!(fixture.take_growth_events(), events, "{address}, {is_standby}");
        }
        for address in &from_inside {
            inside.expect_step(&format!("connect {address}"));
            assert_eq!(fixture.take_growth_events(), events, "{address}, {is_standby}");
        }
    }
    let state = fixture.kernel.maps.pod_state(u32::from(fixture.pod.number));
    assert_eq!(state.connections, 6, "one of each family in each round, at the serving port");
}

#[test]
fn the_flag_of_one_pod_concerns_no_other_and_ends_with_another_registration() {
    let mut fixture = StandbyFixture::new("");
    let other = fixture.kernel.add_pod();
    fixture.kernel.register_pod(&other, 0);
    let mut other_server = other.start_process();
    other_server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} other"));
    fixture.set_standby(true);
    let mut client = fixture.client.start_process();
    client.expect_step(&format!("connect {}:{SERVING_PORT}", other.ipv4()));
    let events = std::iter::from_fn(|| fixture.ring.next());
    assert_eq!(events.filter(|event| event.kind == abi::EVENT_GROWTH).count(), 0);
    let pod = registration(&fixture.pod, 0, &[]);
    fixture.kernel.maps.register_pod(fixture.pod.cookie, &pod).unwrap();
    client.expect_step(&format!("connect {}:{SERVING_PORT}", fixture.pod.ipv4()));
    assert_eq!(fixture.take_growth_events(), 0);
}

#[test]
fn a_connection_to_a_frozen_pod_is_established_and_served_after_the_thaw() {
    let mut fixture = StandbyFixture::new("");
    let ipv6 = SocketAddr::new(fixture.pod.ipv6().parse().unwrap(), SERVING_PORT);
    for address in [fixture.address(SERVING_PORT), ipv6, fixture.address(OTHER_PORT)] {
        fixture.set_standby(true);
        fixture.freeze();
        let mut stream = fixture.connect(address);
        fixture.wait_growth_events(1, 1);
        assert!(has_no_greeting(&stream), "a frozen process has served {address}");
        fixture.thaw();
        assert_eq!(read_greeting(&mut stream).unwrap(), "one");
        fixture.set_standby(false);
    }
}

#[test]
fn connections_that_end_before_the_thaw_leave_nothing_behind() {
    let mut fixture = StandbyFixture::new("");
    let address = fixture.address(SERVING_PORT);
    fixture.set_standby(true);
    fixture.freeze();
    let (closed, reset) = (fixture.connect(address), fixture.connect(address));
    SockRef::from(&reset).set_linger(Some(Duration::ZERO)).unwrap();
    drop((closed, reset));
    let mut waiting = fixture.connect(address);
    fixture.wait_growth_events(3, 3);
    fixture.thaw();
    assert_eq!(read_greeting(&mut waiting).unwrap(), "one");
    drop(waiting);
    let slot = u32::from(fixture.pod.number);
    let deadline = Instant::now() + WAIT_TIMEOUT;
    let gauges = || {
        let state = fixture.kernel.maps.pod_state(slot);
        [state.connections, state.in_flight, state.awaiting_first_request]
    };
    while gauges() != [0, 0, 0] {
        assert!(Instant::now() < deadline, "{:?}", gauges());
        thread::sleep(Duration::from_millis(2));
    }
}

/// With this backlog the kernel keeps two connections that the process has not accepted. It drops packets of the
/// handshakes of others, which client and server send again.
///
/// With SYN cookies the server would keep nothing of a handshake whose last packet it has dropped. A client that waits
/// for the server to speak would wait forever, frozen pod or not.
#[test]
fn more_clients_than_a_frozen_listener_can_keep_are_served_after_the_thaw() {
    const CLIENTS: usize = 5;
    let mut fixture = StandbyFixture::new("backlog1");
    let (address, netns) = (fixture.address(SERVING_PORT), fixture.client.netns.clone());
    let disable_cookies = || fs::write("/proc/sys/net/ipv4/tcp_syncookies", "0");
    in_netns(&fixture.pod.netns, disable_cookies).expect("root may write it");
    let connect = move || {
        let mut stream = TcpStream::connect(address).unwrap();
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            match read_greeting(&mut stream) {
                // While its queue is full, the kernel drops each packet of the handshake. Each drop doubles the wait.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    assert!(Instant::now() < deadline, "a client is never served");
                }
                greeting => return greeting.unwrap(),
            }
        }
    };
    fixture.set_standby(true);
    fixture.freeze();
    let greetings = thread::scope(|scope| {
        // The kernel establishes two of the connections before the thaw, and the others after it.
        let clients = [(); CLIENTS].map(|()| scope.spawn(|| in_netns(&netns, connect)));
        fixture.wait_growth_events(2, CLIENTS);
        fixture.thaw();
        clients.map(|client| client.join().unwrap())
    });
    assert_eq!(greetings, ["one"; CLIENTS]);
}

/// A request on a connection from before the freeze sends a growth event, because the pod's level is 0: any request in
/// flight is growth.
#[test]
fn bytes_for_a_frozen_pod_wait_in_the_socket() {
    let mut fixture = StandbyFixture::new("");
    let mut stream = fixture.connect(fixture.address(SERVING_PORT));
    assert_eq!(read_greeting(&mut stream).unwrap(), "one");
    fixture.kernel.maps.arm_growth_event(u32::from(fixture.pod.number), 0);
    fixture.set_standby(true);
    fixture.freeze();
    io::Write::write_all(&mut stream, b"GET / HTTP/1.1\r\nHost: pod\r\n\r\n").unwrap();
    fixture.wait_growth_events(1, 1);
    assert!(has_no_greeting(&stream), "the frozen process has not read it");
    fixture.thaw();
    // The server closes a connection on which anything arrives, and unread bytes make that a reset.
    match stream.read(&mut [0]) {
        Ok(read) => assert_eq!(read, 0),
        Err(error) => assert_eq!(error.kind(), io::ErrorKind::ConnectionReset),
    }
}

#[test]
fn a_frozen_process_ends_by_sigkill() {
    let fixture = StandbyFixture::new("");
    fixture.freeze();
    drop(fixture.server);
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while freezer::read_state(&fixture.pod.cgroup).unwrap().unwrap().is_populated {
        assert!(Instant::now() < deadline, "the frozen process still runs");
        thread::sleep(Duration::from_millis(1));
    }
    freezer::thaw(&fixture.pod.cgroup).unwrap();
}

impl StandbyFixture {
    /// Adds a service at 10.96.0.1 with this pod, and an activator for it. Returns the activator's process.
    fn serve(&mut self) -> ScriptedProcess {
        let activator = self.kernel.add_client();
        let mut process = activator.start_process();
        process.expect_step("listen 0.0.0.0:20001 activator");
        self.kernel.add_activator(&activator);
        self.kernel.add_service(1, ConnectionPath::Direct);
        self.kernel.add_ready_pod(&self.pod, 1);
        self.kernel.apply_table();
        process
    }

    /// Returns the number of the backend at the pod's IPv4 address.
    fn backend(&self) -> u32 {
        let address: std::net::Ipv4Addr = self.pod.ipv4().parse().unwrap();
        let address = address.to_ipv6_mapped().octets();
        let backends = self.kernel.maps.read_routes().unwrap().backends;
        backends.into_iter().find(|(_, it)| it.address == address).unwrap().0
    }

    /// Takes the events of connects that were led to this backend from the ring, and returns their number.
    fn take_connect_events(&mut self, backend: u32) -> usize {
        let connect = (abi::EVENT_STANDBY_CONNECT, backend);
        let events = std::iter::from_fn(|| self.ring.next());
        events.filter(|event| (event.kind, event.port_or_slot) == connect).count()
    }
}

#[test]
fn connects_pass_over_a_frozen_pod_of_the_node_once_the_promise_to_thaw_it_is_over() {
    /// A time that is long over.
    const PAST_NS: u64 = 1;
    let mut fixture = StandbyFixture::new("");
    let _activator = fixture.serve();
    let promise = fixture.kernel.maps.thaw_promise().unwrap();
    let mut client = fixture.client.start_process();
    let mut connect = || client.expect_step("hammer 10.96.0.1:80 5");
    promise.set(PAST_NS);
    assert_eq!(connect(), "one=5", "the pod runs");
    fixture.set_standby(true);
    for until_ns in [0, u64::MAX] {
        promise.set(until_ns);
        assert_eq!(connect(), "one=5", "{until_ns}");
    }
    promise.set(PAST_NS);
    fixture.freeze();
    assert_eq!(connect(), "activator=5");
    // Another pod comes before the activators.
    let other = fixture.kernel.add_pod();
    fixture.kernel.register_pod(&other, 0);
    let mut other_server = other.start_process();
    other_server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} other"));
    fixture.kernel.add_ready_pod(&other, 1);
    fixture.kernel.apply_table();
    assert_eq!(connect(), "other=5");
    fixture.thaw();
    fixture.set_standby(false);
    drop(other_server);
    assert_eq!(connect(), "one=5", "it is no standby pod any more");
    promise.set(0);
}

#[test]
fn the_next_connect_to_an_armed_backend_sends_one_event() {
    let mut fixture = StandbyFixture::new("");
    let _activator = fixture.serve();
    let backend = fixture.backend();
    let mut client = fixture.client.start_process();
    let direct = format!("connect {}", fixture.address(SERVING_PORT));
    for is_armed in [false, true, false] {
        if is_armed {
            fixture.kernel.maps.arm_connect_event(backend);
        }
        assert_eq!(fixture.kernel.maps.is_connect_event_armed(backend), is_armed);
        client.expect_step(&direct);
        assert_eq!(fixture.take_connect_events(backend), 0, "it names no service");
        client.expect_step("hammer 10.96.0.1:80 3");
        assert_eq!(fixture.take_connect_events(backend), usize::from(is_armed));
        assert!(!fixture.kernel.maps.is_connect_event_armed(backend));
    }
}
