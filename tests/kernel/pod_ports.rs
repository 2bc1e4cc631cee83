//! Shell: pods with several ports that count, and opaque ports, of which each connection is one request.
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics and waits on plain threads"
)]

mod byte_server;
mod probes;

use std::{
    collections::BTreeMap,
    io::{Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpStream},
    thread,
    time::{Duration, Instant},
};

use agent::{
    kernel::{
        maps::{KernelEventRing, KernelMaps},
        pod_registration::PodRegistration,
    },
    net::sockdiag::SockDiag,
};
use datapath::abi::{self, ConnectionActivity};
use socket2::SockRef;

use crate::{
    fixture::{
        KernelFixture, NetnsFixture, SERVING_PORT, SharedKernelFixture, in_netns, registration,
    },
    program_replacement::load_next_abi,
    request_counts::counting_server::CountingServer,
    scripted_process::ScriptedProcess,
};

/// Timeout of every wait and response.
const WAIT_TIMEOUT: Duration = Duration::from_secs(120);
/// Opaque port of the pods.
const RAW_PORT: u16 = 5432;
/// Port of the pods for HTTP, besides the serving port.
const ADMIN_PORT: u16 = 9090;
/// Port of the pods that does not count.
const OTHER_PORT: u16 = 9999;
/// Both ports that count besides the serving port.
const PORTS: [(u16, bool); 2] = [(RAW_PORT, true), (ADMIN_PORT, false)];

/// A pod with several ports, and a client's namespace.
struct PodPortsFixture {
    kernel: SharedKernelFixture,
    pod: NetnsFixture,
    client: NetnsFixture,
}

impl PodPortsFixture {
    fn new(flags: u16, ports: &[(u16, bool)]) -> Self {
        Self::with_kernel(SharedKernelFixture::new(), flags, ports)
    }

    fn with_kernel(mut kernel: SharedKernelFixture, flags: u16, ports: &[(u16, bool)]) -> Self {
        let (pod, client) = (kernel.add_pod(), kernel.add_client());
        kernel.register_pod_with_ports(&pod, flags, ports);
        Self { kernel, pod, client }
    }

    fn slot(&self) -> u32 {
        u32::from(self.pod.number)
    }

    /// Changes the pod's ports.
    fn set_ports(&mut self, ports: &[(u16, bool)]) {
        let pod = registration(&self.pod, 0, ports);
        self.kernel.maps.register_pod(self.pod.cookie, &pod).unwrap();
    }

    fn connect(&self, port: u16) -> TcpStream {
        self.connect_from(&self.client.netns, port)
    }

    fn connect_from(&self, netns: &str, port: u16) -> TcpStream {
        let address = self.address(port);
        let stream = in_netns(netns, || TcpStream::connect(address).unwrap());
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
        stream
    }

    fn address(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.pod.ipv4().parse().unwrap(), port)
    }

    /// Number of open connections, of requests in flight, and of connections without a request.
    fn gauges(&self) -> [u64; 3] {
        gauges_of(&self.kernel.maps, self.slot())
    }

    /// Waits until the gauges have these values.
    #[track_caller]
    fn wait_gauges(&self, expected: [u64; 3]) {
        wait_gauges_of(&self.kernel.maps, self.slot(), expected);
    }

    /// Numbers of requests that have begun and ended.
    fn totals(&self) -> (u64, u64) {
        let totals = self.kernel.maps.totals(self.slot());
        (totals.started, totals.finished)
    }

    /// Number of open listeners of one of the pod's ports.
    fn listener_count(&self, port: u16) -> u32 {
        self.kernel.maps.listener(self.pod.cookie, port).unwrap().reachable
    }
}

fn gauges_of(maps: &KernelMaps, slot: u32) -> [u64; 3] {
    let state = maps.pod_state(slot);
    [state.connections, state.in_flight, state.awaiting_first_request]
}

#[track_caller]
fn wait_gauges_of(maps: &KernelMaps, slot: u32, expected: [u64; 3]) {
    let until = Instant::now() + WAIT_TIMEOUT;
    while gauges_of(maps, slot) != expected {
        assert!(Instant::now() < until, "{:?} and not {expected:?}", maps.pod_state(slot));
        thread::sleep(Duration::from_millis(2));
    }
}

#[track_caller]
fn expect_bytes(stream: &mut TcpStream, expected: &[u8]) {
    let mut bytes = vec![0; expected.len()];
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(bytes, expected);
}

/// Sends a request, and reads the response of a `CountingServer`.
#[track_caller]
fn send_request(stream: &mut TcpStream) {
    stream.write_all(b"GET /length/5 HTTP/1.1\r\nHost: pod\r\n\r\n").unwrap();
    let mut received = Vec::new();
    while !received.ends_with(b"xxxxx") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        received.extend(byte);
    }
}

#[test]
fn a_connection_to_an_opaque_port_is_one_request_from_its_accept_to_its_close() {
    let fixture = PodPortsFixture::new(0, &PORTS);
    let mut server = byte_server::start(&fixture.pod, &RAW_PORT.to_string());
    let mut client = fixture.connect(RAW_PORT);
    fixture.wait_gauges([1, 1, 0]);
    server.expect_step("accept");
    server.expect_step("send greeting");
    expect_bytes(&mut client, b"greeting");
    client.write_all(b"query").unwrap();
    assert_eq!(server.expect_step("receive"), "query");
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(server.expect_step("receive"), "", "the client has ended its direction");
    server.expect_step("send rest");
    expect_bytes(&mut client, b"rest");
    assert_eq!((fixture.gauges(), fixture.totals()), ([1, 1, 0], (1, 0)));
    server.expect_step("close");
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    fixture.wait_gauges([0, 0, 0]);
    assert_eq!(fixture.totals(), (1, 1));
    let row = fixture.kernel.maps.responses(fixture.slot());
    assert_eq!((row.status, row.unknown_status, row.aborted), ([0; 5], 1, 0), "{row:?}");
    assert_eq!((row.received, row.sent), (5, 12));
    assert_eq!(row.latency.iter().sum::<u64>(), 1);
}

#[test]
fn a_connection_whose_server_has_ended_its_direction_is_in_flight_until_its_client_closes() {
    let fixture = PodPortsFixture::new(0, &PORTS);
    let mut server = byte_server::start(&fixture.pod, &RAW_PORT.to_string());
    let mut client = fixture.connect(RAW_PORT);
    server.expect_step("accept");
    server.expect_step("send all");
    server.expect_step("finish");
    let mut received = String::new();
    client.read_to_string(&mut received).unwrap();
    assert_eq!(received, "all");
    client.write_all(b"upload").unwrap();
    assert_eq!(server.expect_step("receive"), "upload");
    assert_eq!((fixture.gauges(), fixture.totals()), ([1, 1, 0], (1, 0)));
    drop(client);
    assert_eq!(server.expect_step("receive"), "");
    fixture.wait_gauges([0, 0, 0]);
    assert_eq!(fixture.totals(), (1, 1));
}

#[test]
fn a_reset_by_either_end_ends_the_request_of_a_connection() {
    let fixture = PodPortsFixture::new(0, &PORTS);
    let mut server = byte_server::start(&fixture.pod, &RAW_PORT.to_string());
    let by_server = fixture.connect(RAW_PORT);
    server.expect_step("accept");
    fixture.wait_gauges([1, 1, 0]);
    server.expect_step("reset");
    fixture.wait_gauges([0, 0, 0]);
    let by_client = fixture.connect(RAW_PORT);
    server.expect_step("accept");
    fixture.wait_gauges([1, 1, 0]);
    SockRef::from(&by_client).set_linger(Some(Duration::ZERO)).unwrap();
    drop((by_client, by_server));
    fixture.wait_gauges([0, 0, 0]);
    let row = fixture.kernel.maps.responses(fixture.slot());
    assert_eq!((fixture.totals(), row.unknown_status, row.aborted), ((2, 2), 2, 0), "{row:?}");
}

#[test]
fn thousands_of_connections_to_an_opaque_port_leave_nothing_behind() {
    const CONNECTIONS: u64 = 2_000;
    let fixture = PodPortsFixture::new(0, &PORTS);
    let mut server = fixture.pod.start_process();
    server.expect_step(&format!("listen 0.0.0.0:{RAW_PORT} one"));
    let mut clients = [fixture.client.start_process(), fixture.client.start_process()];
    // One closes its connections, the other resets them.
    for (client, step) in clients.iter_mut().zip(["hammer", "flood"]) {
        client.send_step(&format!("{step} {} {CONNECTIONS}", fixture.address(RAW_PORT)));
    }
    for client in &mut clients {
        assert_eq!(client.read_reply(), Ok(format!("one={CONNECTIONS}")));
    }
    fixture.wait_gauges([0, 0, 0]);
    let state = fixture.kernel.maps.pod_state(fixture.slot());
    assert_eq!(fixture.totals(), (2 * CONNECTIONS, 2 * CONNECTIONS), "{state:?}");
    let unread = (state.desynced_connections, state.stray_responses, state.opaque_connections);
    assert_eq!(unread, (0, 0, 0));
}

#[test]
fn the_ports_of_a_pod_count_together_and_its_other_ports_do_not() {
    let fixture = PodPortsFixture::new(0, &PORTS);
    let ports = [SERVING_PORT, ADMIN_PORT, RAW_PORT, OTHER_PORT];
    let _servers = ports.map(|port| CountingServer::start(&fixture.pod, port));
    let mut connections = ports.map(|port| fixture.connect(port));
    fixture.wait_gauges([3, 1, 2]);
    for stream in &mut connections {
        send_request(stream);
        send_request(stream);
    }
    // Two requests at each port for HTTP, and one connection.
    fixture.wait_gauges([3, 1, 0]);
    assert_eq!(fixture.totals(), (5, 4));
    drop(connections);
    fixture.wait_gauges([0, 0, 0]);
    assert_eq!(fixture.totals(), (5, 5));
    let row = fixture.kernel.maps.responses(fixture.slot());
    assert_eq!((row.status, row.unknown_status, row.aborted), ([0, 4, 0, 0, 0], 1, 0), "{row:?}");
}

#[test]
fn an_opaque_serving_port_needs_no_further_port() {
    let fixture = PodPortsFixture::new(abi::POD_OPAQUE, &[]);
    let _servers = [SERVING_PORT, OTHER_PORT].map(|port| CountingServer::start(&fixture.pod, port));
    let mut connections = [fixture.connect(SERVING_PORT), fixture.connect(OTHER_PORT)];
    fixture.wait_gauges([1, 1, 0]);
    connections.iter_mut().for_each(send_request);
    connections.iter_mut().for_each(send_request);
    assert_eq!((fixture.gauges(), fixture.totals()), ([1, 1, 0], (1, 0)));
    drop(connections);
    fixture.wait_gauges([0, 0, 0]);
    assert_eq!(fixture.totals(), (1, 1));
}

#[test]
fn a_connection_counts_as_its_port_did_when_it_was_established() {
    let mut fixture = PodPortsFixture::new(0, &[(RAW_PORT, true)]);
    let _servers = [RAW_PORT, ADMIN_PORT].map(|port| CountingServer::start(&fixture.pod, port));
    let (raw, mut early) = (fixture.connect(RAW_PORT), fixture.connect(ADMIN_PORT));
    send_request(&mut early);
    fixture.wait_gauges([1, 1, 0]);
    fixture.set_ports(&[(ADMIN_PORT, false)]);
    let (raw_later, mut later) = (fixture.connect(RAW_PORT), fixture.connect(ADMIN_PORT));
    fixture.wait_gauges([2, 1, 1]);
    send_request(&mut early);
    send_request(&mut later);
    assert_eq!((fixture.gauges(), fixture.totals()), ([2, 1, 0], (2, 1)));
    fixture.set_ports(&[]);
    let mut last = fixture.connect(ADMIN_PORT);
    send_request(&mut last);
    send_request(&mut later);
    assert_eq!((fixture.gauges(), fixture.totals()), ([2, 1, 0], (3, 2)));
    drop((raw, raw_later, early, later, last));
    fixture.wait_gauges([0, 0, 0]);
    assert_eq!(fixture.totals(), (3, 3));
}

#[test]
fn a_namespace_that_is_forgotten_leaves_no_port_behind() {
    let mut fixture = PodPortsFixture::new(0, &PORTS);
    let _server = CountingServer::start(&fixture.pod, ADMIN_PORT);
    fixture.kernel.maps.unregister(fixture.pod.cookie).unwrap();
    // An entry that was left would count again, as this registration lets the programs look for entries.
    fixture.set_ports(&[(OTHER_PORT, false)]);
    send_request(&mut fixture.connect(ADMIN_PORT));
    assert_eq!((fixture.gauges(), fixture.totals()), ([0, 0, 0], (0, 0)));
}

#[test]
fn a_connection_to_an_opaque_port_reports_growth_when_it_is_accepted() {
    let fixture = PodPortsFixture::new(0, &PORTS);
    let mut server = byte_server::start(&fixture.pod, &RAW_PORT.to_string());
    let mut ring = KernelEventRing::open(&fixture.kernel.paths().pins()).unwrap();
    let mut growth_events = || {
        let events = std::iter::from_fn(|| ring.next());
        let growth = (abi::EVENT_GROWTH, fixture.slot());
        events.filter(|event| (event.kind, event.port_or_slot) == growth).count()
    };
    fixture.kernel.maps.arm_growth_event(fixture.slot(), 0);
    let mut accept = || {
        let client = fixture.connect(RAW_PORT);
        server.expect_step("accept");
        client
    };
    let _first = accept();
    fixture.wait_gauges([1, 1, 0]);
    assert_eq!(growth_events(), 1);
    fixture.kernel.maps.arm_growth_event(fixture.slot(), 2);
    let _second = accept();
    fixture.wait_gauges([2, 2, 0]);
    assert_eq!(growth_events(), 0, "as many as are known of");
    let _third = accept();
    fixture.wait_gauges([3, 3, 0]);
    assert_eq!(growth_events(), 1);
}

#[test]
fn a_connection_to_an_opaque_port_is_in_use_and_has_no_deadline() {
    let fixture = PodPortsFixture::new(0, &PORTS);
    let mut server = byte_server::start(&fixture.pod, &RAW_PORT.to_string());
    let client = fixture.connect(RAW_PORT);
    server.expect_step("accept");
    fixture.wait_gauges([1, 1, 0]);
    let conns = fixture.kernel.maps.conns();
    let (in_use, open_requests, upgraded) = in_netns(&fixture.pod.netns, || {
        let diag = SockDiag::open().unwrap();
        let open_requests = conns.open_requests(&diag).unwrap().len();
        (conns.in_use(&diag).unwrap(), open_requests, conns.count_upgraded(&diag).unwrap())
    });
    let address = client.local_addr().unwrap();
    assert_eq!(in_use, BTreeMap::from([(address, ConnectionActivity::MessageInFlight)]));
    assert_eq!((open_requests, upgraded), (0, 1), "it is awaited like an upgraded connection");
}

#[test]
fn each_port_that_counts_is_followed_in_a_pod_that_listens_on_thousands() {
    let mut kernel = SharedKernelFixture::of_one_test(KernelFixture::new());
    let pod = kernel.add_pod();
    let mut server = pod.start_process();
    kernel.register_pod_with_ports(&pod, 0, &PORTS);
    server.expect_step("ports 20000 17000");
    let client = kernel.add_client();
    let fixture = PodPortsFixture { kernel, pod, client };
    for port in [SERVING_PORT, RAW_PORT, ADMIN_PORT, OTHER_PORT] {
        server.expect_step(&format!("listen 0.0.0.0:{port} one"));
    }
    let listens = |port| fixture.listener_count(port);
    assert_eq!([SERVING_PORT, RAW_PORT, ADMIN_PORT, OTHER_PORT].map(listens), [1, 1, 1, 0]);
    server.expect_step("close");
    server.expect_step("close");
    assert_eq!([SERVING_PORT, RAW_PORT, ADMIN_PORT].map(listens), [1, 1, 0]);
}

#[test]
fn ports_beyond_those_that_fit_are_an_error_until_another_pod_is_gone() {
    let mut kernel = SharedKernelFixture::exclusive();
    let [first, second, third] = [(); 3].map(|()| kernel.add_pod());
    // Room for one more is left.
    let most_ports: Vec<_> = (1..abi::POD_PORTS_MAX).map(|it| (10_000 + it as u16, true)).collect();
    kernel.maps.register_pod(first.cookie, &registration(&first, 0, &most_ports)).unwrap();
    let two_ports = registration(&second, 0, &PORTS);
    let error = kernel.maps.register_pod(second.cookie, &two_ports).unwrap_err().to_string();
    assert!(error.contains(abi::maps::POD_PORTS), "{error}");
    let one_port = registration(&third, 0, &PORTS[..1]);
    kernel.maps.register_pod(third.cookie, &one_port).expect("the refused pod takes no room");
    kernel.maps.unregister(first.cookie).unwrap();
    kernel.maps.register_pod(second.cookie, &two_ports).unwrap();
}

/// Upgrade like the one in `request_counts/upgrade.rs`, for ports besides the serving port.
#[test]
fn an_upgrade_to_another_abi_hands_all_ports_of_a_pod_over() {
    let kernel = SharedKernelFixture::exclusive();
    let mut fixture = PodPortsFixture::with_kernel(kernel, 0, &PORTS);
    let mut server = byte_server::start(&fixture.pod, &RAW_PORT.to_string());
    let earlier = fixture.connect(RAW_PORT);
    server.expect_step("accept");
    fixture.wait_gauges([1, 1, 0]);

    let (paths, mut programs) = load_next_abi(&mut fixture.kernel);
    let maps = KernelMaps::open(&paths.pins()).unwrap();
    fixture.kernel.maps = maps.with_previous(programs.previous_pins());
    let slot = fixture.slot() + 100;
    let pod = PodRegistration { slot, ..registration(&fixture.pod, 0, &PORTS) };
    fixture.kernel.maps.register_pod(fixture.pod.cookie, &pod).unwrap();
    programs.take_over().unwrap();
    let later = fixture.connect(RAW_PORT);
    wait_gauges_of(&fixture.kernel.maps, slot, [2, 2, 0]);

    end_connection(earlier, &mut server);
    wait_gauges_of(&fixture.kernel.maps, slot, [1, 1, 0]);
    assert!(
        fixture.kernel.maps.fold_previous(true),
        "the old programs count none of the later ones"
    );
    assert_eq!(gauges_of(&fixture.kernel.maps, slot), [1, 1, 0]);
    programs.retire_previous().unwrap();
    server.expect_step("accept");
    end_connection(later, &mut server);
    wait_gauges_of(&fixture.kernel.maps, slot, [0, 0, 0]);
    let totals = fixture.kernel.maps.totals(slot);
    assert_eq!((totals.started, totals.finished), (2, 2));
    fixture.kernel.programs = Some(programs);
}

/// Closes a connection at both ends; it is the newest one that the server has accepted.
fn end_connection(client: TcpStream, server: &mut ScriptedProcess) {
    drop(client);
    assert_eq!(server.expect_step("receive"), "");
    server.expect_step("close");
}
