//! Shell: gauges of a pod compared with its sockets: they agree, also under load; drift is corrected and reported.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use agent::{kernel::maps::gauges::PodGauges, pod_gauge::GaugeValues};

use super::*;

const AUDIT_SCANS: &str = "rouse_agent_audit_looks_total";
const UNCOUNTED: &str = "rouse_agent_audit_uncounted_connections";

fn drift_metric(gauge: &str) -> String {
    format!("rouse_agent_audit_drift_total{{gauge=\"{gauge}\"}}")
}

/// Starts a node and a pod with a server.
fn audit_fixture(test: &str) -> AgentFixture {
    let mut world = AgentFixture::new(test);
    world.set_pod(RoutingPhase::Ready, ProbeHandler::Listen);
    world.start_agent();
    world.pod = Some(world.spawn_in_cgroup("server", "pods/poduid-1/main"));
    world.wait_pod("looked into", |seen| !seen.not_ready_reason.is_empty());
    world.send_to_pod("listen");
    world.wait_pod("ready", |seen| seen.ready);
    world
}

fn read_gauges(world: &AgentFixture) -> PodGauges {
    let pins = world.folder.join(format!("bpf/v{}", abi::ABI_VERSION));
    KernelMaps::open(&pins).and_then(|maps| maps.gauges()).expect("pinned maps")
}

/// Connects from the node's network namespace.
fn connect(name: &str) -> TcpStream {
    let node = NetworkNamespace::open(format!("/run/netns/{name}-n")).expect("it exists");
    node.run_inside("connect", || TcpStream::connect(ADDRESS)).expect("it listens")
}

/// Sends a request that is answered at once, or never.
fn send_request(stream: &mut TcpStream, path: &str) {
    write!(stream, "GET {path} HTTP/1.1\r\nHost: a\r\n\r\n").expect("it stands");
    if path == "/hang" {
        return;
    }
    let mut answer = Vec::new();
    while !answer.ends_with(b"ok") {
        let mut byte = [0];
        stream.read_exact(&mut byte).expect("it stands");
        answer.extend(byte);
    }
}

#[test]
fn gauges_stand_by_their_sockets_under_load() {
    let world = audit_fixture("audit-load");
    let ends = Arc::new(AtomicBool::new(false));
    let clients = [1, 20, 400].map(|each| {
        let (ends, name) = (Arc::clone(&ends), world.name.clone());
        thread::spawn(move || {
            let mut asked = 0;
            while !ends.load(Ordering::Relaxed) {
                let mut stream = connect(&name);
                (0..each).for_each(|_| send_request(&mut stream, "/quick"));
                asked += each;
            }
            asked
        })
    });
    // Scans run at any moment under load, and once more when no request is in flight.
    let count = || -> u64 {
        let page = world.get_page("n", "127.0.0.1:7104", "/metrics");
        let lines = page.lines().filter_map(|it| it.strip_prefix(AUDIT_SCANS)?.rsplit(' ').next());
        lines.filter_map(|it| it.parse::<u64>().ok()).sum()
    };
    let end = Instant::now() + WAIT_TIMEOUT;
    while count() < 2 {
        assert!(Instant::now() < end, "nobody looks");
        thread::sleep(Duration::from_millis(100));
    }
    ends.store(true, Ordering::Relaxed);
    let asked: u64 = clients.map(|it| it.join().expect("no panic")).iter().sum();
    let mut kept = connect(&world.name);
    send_request(&mut kept, "/quick");
    world.wait_metric(&format!("{AUDIT_SCANS}{{result=\"still\"}}"), 1);
    let page = world.get_page("n", "127.0.0.1:7104", "/metrics");
    for gauge in ["connections", "in_flight", "fresh", "estimated"] {
        assert!(page.contains(&format!("{} 0\n", drift_metric(gauge))), "{page}");
    }
    let reading = read_gauges(&world).read(world.slot());
    assert_eq!((reading.values, reading.totals), ([1, 0, 0, 0], [asked + 1; 2]));
}

#[test]
fn a_gauge_that_was_disturbed_is_found_corrected_and_reported() {
    let world = audit_fixture("audit-drift");
    let mut busy = connect(&world.name);
    send_request(&mut busy, "/hang");
    let mut idle = connect(&world.name);
    send_request(&mut idle, "/quick");
    let fresh = connect(&world.name);
    let mut foreign = connect(&world.name);
    foreign.write_all(b"\x16").expect("it stands");
    foreign.read_exact(&mut [0]).expect("it comes back");
    let gauges = read_gauges(&world);
    // A TLS handshake is no request yet.
    let right: GaugeValues = [4, 1, 2, 1];
    assert_eq!(gauges.values(world.slot()), right);
    gauges.add(world.slot(), [4, -2, 1, -3]);
    for (gauge, by) in [("connections", 4), ("in_flight", 2), ("fresh", 1), ("estimated", 3)] {
        world.wait_metric(&drift_metric(gauge), by);
    }
    assert_eq!(gauges.values(world.slot()), right);
    // The correction loses no connection, and counts none twice.
    drop((busy, idle, fresh, foreign));
    let end = Instant::now() + WAIT_TIMEOUT;
    while gauges.values(world.slot()) != [1, 1, 0, 0] {
        assert!(Instant::now() < end, "{:?}", gauges.values(world.slot()));
        thread::sleep(Duration::from_millis(10));
    }
    let page = world.get_page("n", "127.0.0.1:7104", "/metrics");
    assert!(page.contains(&format!("{} 4\n", drift_metric("connections"))), "once: {page}");
}

#[test]
fn uncounted_connections_are_reported() {
    let mut world = AgentFixture::new("audit-uncounted");
    world.pod = Some(world.spawn_in_cgroup("server", "pods/poduid-1/main"));
    world.send_to_pod("listen");
    // Connected before any program was attached.
    let end = Instant::now() + WAIT_TIMEOUT;
    let node = NetworkNamespace::open(format!("/run/netns/{}-n", world.name)).expect("it exists");
    let early = loop {
        match node.run_inside("connect", || TcpStream::connect(ADDRESS)) {
            Ok(early) => break early,
            Err(error) => assert!(Instant::now() < end, "{error:?}"),
        }
        thread::sleep(Duration::from_millis(10));
    };
    world.set_pod(RoutingPhase::Ready, ProbeHandler::Listen);
    world.start_agent();
    world.wait_pod("ready", |seen| seen.ready);
    let counted = connect(&world.name);
    world.wait_metric(UNCOUNTED, 1);
    assert_eq!(read_gauges(&world).values(world.slot()), [1, 0, 1, 0]);
    drop((early, counted));
}
