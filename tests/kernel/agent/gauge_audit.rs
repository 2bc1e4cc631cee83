//! Shell: gauges of a pod compared with its sockets: they agree, also under load; drift is corrected and reported.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use agent::{kernel::maps::gauges::PodGauges, pod_gauge::GaugeValues};

use super::{http_server::shared_server_fixture, *};

const AUDIT_SCANS: &str = "rouse_agent_audit_looks_total";
const UNCOUNTED: &str = "rouse_agent_audit_uncounted_connections";
/// Names of a pod's gauges, in the order of [`GaugeValues`].
const GAUGES: [&str; 4] = ["connections", "in_flight", "fresh", "estimated"];

fn drift_metric(gauge: &str) -> String {
    format!("rouse_agent_audit_drift_total{{gauge=\"{gauge}\"}}")
}

impl AgentFixture {
    /// Sum of the drift that the agent has corrected, of each of [`GAUGES`].
    fn corrected_drift(&self) -> [u64; 4] {
        GAUGES.map(|gauge| self.metric_count(&drift_metric(gauge)))
    }
}

fn read_gauges(fixture: &AgentFixture) -> PodGauges {
    let pins = fixture.folder.join(format!("bpf/v{}", abi::ABI_VERSION));
    KernelMaps::open(&pins).and_then(|maps| maps.gauges()).expect("pinned maps")
}

/// Waits until the gauges of the only pod have these values.
fn wait_values(fixture: &AgentFixture, gauges: &PodGauges, expected: GaugeValues) {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while gauges.values(fixture.slot()) != expected {
        assert!(Instant::now() < deadline, "{:?}", gauges.values(fixture.slot()));
        thread::sleep(Duration::from_millis(10));
    }
}

/// Connects from the node's network namespace.
fn connect(name: &str) -> TcpStream {
    let node = NetworkNamespace::open(format!("/run/netns/{name}-n")).expect("it exists");
    node.run_inside("connect", || TcpStream::connect(POD_ADDRESS)).expect("it listens")
}

/// Sends a request that gets its response at once, or never.
fn send_request(stream: &mut TcpStream, path: &str) {
    write!(stream, "GET {path} HTTP/1.1\r\nHost: a\r\n\r\n").expect("the connection is open");
    if path == "/hang" {
        return;
    }
    let mut response = Vec::new();
    while !response.ends_with(b"ok") {
        let mut byte = [0];
        stream.read_exact(&mut byte).expect("the connection is open");
        response.extend(byte);
    }
}

#[test]
fn gauges_agree_with_their_sockets_under_load() {
    let fixture = shared_server_fixture(REQUEST_TIMEOUT);
    let drift = fixture.corrected_drift();
    let stop = Arc::new(AtomicBool::new(false));
    let clients = [1, 20, 400].map(|each| {
        let (stop, name) = (Arc::clone(&stop), fixture.name.clone());
        thread::spawn(move || {
            let mut count = 0;
            while !stop.load(Ordering::Relaxed) {
                let mut stream = connect(&name);
                (0..each).for_each(|_| send_request(&mut stream, "/quick"));
                count += each;
            }
            count
        })
    });
    // Scans run at any moment under load, and once more when no request is in flight.
    let scan_count = || -> u64 {
        let page = fixture.get_page("n", "127.0.0.1:7104", "/metrics");
        let lines = page.lines().filter_map(|it| it.strip_prefix(AUDIT_SCANS)?.rsplit(' ').next());
        lines.filter_map(|it| it.parse::<u64>().ok()).sum()
    };
    let (before, deadline) = (scan_count(), Instant::now() + WAIT_TIMEOUT);
    while scan_count() < before + 2 {
        assert!(Instant::now() < deadline, "no scan runs");
        thread::sleep(Duration::from_millis(100));
    }
    stop.store(true, Ordering::Relaxed);
    let requests: u64 = clients.map(|it| it.join().expect("no panic")).iter().sum();
    let mut connection = connect(&fixture.name);
    send_request(&mut connection, "/quick");
    let still = format!("{AUDIT_SCANS}{{result=\"still\"}}");
    fixture.wait_metric(&still, fixture.metric_count(&still) + 1);
    assert_eq!(fixture.corrected_drift(), drift);
    let reading = read_gauges(&fixture).read(fixture.slot());
    assert_eq!((reading.values, reading.totals), ([1, 0, 0, 0], [requests + 1; 2]));
}

#[test]
fn drift_of_a_gauge_is_corrected_and_reported() {
    let fixture = shared_server_fixture(REQUEST_TIMEOUT);
    let mut busy_connection = connect(&fixture.name);
    send_request(&mut busy_connection, "/hang");
    let mut idle_connection = connect(&fixture.name);
    send_request(&mut idle_connection, "/quick");
    let new_connection = connect(&fixture.name);
    let mut tls_connection = connect(&fixture.name);
    tls_connection.write_all(b"\x16").expect("the connection is open");
    tls_connection.read_exact(&mut [0]).expect("the byte is echoed");
    let gauges = read_gauges(&fixture);
    // A TLS handshake is no request yet.
    let correct: GaugeValues = [4, 1, 2, 1];
    wait_values(&fixture, &gauges, correct);
    let drift = fixture.corrected_drift();
    gauges.add(fixture.slot(), [4, -2, 1, -3]);
    for ((gauge, before), by) in GAUGES.into_iter().zip(drift).zip([4, 2, 1, 3]) {
        fixture.wait_metric(&drift_metric(gauge), before + by);
    }
    assert_eq!(gauges.values(fixture.slot()), correct);
    // The correction loses no connection, and counts none twice.
    drop((busy_connection, idle_connection, new_connection, tls_connection));
    wait_values(&fixture, &gauges, [1, 1, 0, 0]);
    assert_eq!(fixture.corrected_drift()[0], drift[0] + 4, "once");
}

#[test]
fn uncounted_connections_are_reported() {
    let mut fixture = AgentFixture::new("audit-uncounted");
    fixture.pod = Some(fixture.spawn_in_pod("server"));
    fixture.send_to_pod("listen");
    // Connected before any program was attached.
    let deadline = Instant::now() + WAIT_TIMEOUT;
    let node = NetworkNamespace::open(format!("/run/netns/{}-n", fixture.name)).expect("it exists");
    let early_connection = loop {
        match node.run_inside("connect", || TcpStream::connect(POD_ADDRESS)) {
            Ok(connection) => break connection,
            Err(error) => assert!(Instant::now() < deadline, "{error:?}"),
        }
        thread::sleep(Duration::from_millis(10));
    };
    fixture.set_pod(RoutingPhase::Ready, ProbeHandler::Listen);
    fixture.start_agent();
    fixture.wait_pod("ready", |pod| pod.ready);
    let counted = connect(&fixture.name);
    fixture.wait_metric(UNCOUNTED, 1);
    assert_eq!(read_gauges(&fixture).values(fixture.slot()), [1, 0, 1, 0]);
    drop((early_connection, counted));
}
