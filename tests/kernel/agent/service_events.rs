//! Shell: Events on Services of the cluster that a node does not serve.

use serde_json::{Value, json};

use super::{fake_watch_server::FakeWatchServer, *};

/// Number of endpoints for which the map of backends has no room, as Services of the cluster may fill three quarters.
const TOO_MANY_ENDPOINTS: u32 = abi::BACKENDS_MAX;
/// Time after which a reason that comes again has another Event.
const REPEAT_PERIOD: Duration = Duration::from_secs(60);

fn labelled_service(name: &str, cluster_ip: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {
            "name": name, "namespace": "default", "uid": format!("uid-of-{name}"),
            "labels": {"rouse.dev/clusterip": "true"},
        },
        "spec": {
            "type": "ClusterIP", "clusterIP": cluster_ip, "clusterIPs": [cluster_ip],
            "ports": [{"name": "http", "port": 80, "protocol": "TCP"}],
        },
    })
}

fn endpoint_slice(service: &str, endpoints: u32) -> Value {
    let address = |number: u32| std::net::Ipv4Addr::from(0x0b00_0000 + number).to_string();
    let endpoints = (1..=endpoints).map(|number| json!({"addresses": [address(number)]}));
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {
            "name": format!("{service}-1"), "namespace": "default",
            "labels": {"kubernetes.io/service-name": service},
        },
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
        "endpoints": endpoints.collect::<Vec<_>>(),
    })
}

/// Waits for the Event with this reason on a Service, and returns it with the number of such Events so far.
fn wait_event(server: &FakeWatchServer, reason: &str, service: &str) -> (Value, usize) {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    loop {
        let events = server.written_events();
        let is_such = |it: &&Value| it["reason"] == reason && it["regarding"]["name"] == service;
        let mut such = events.iter().filter(is_such);
        if let Some(event) = such.next() {
            return (event.clone(), 1 + such.count());
        }
        assert!(Instant::now() < deadline, "no Event {reason} on {service}, but {events:?}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Waits until this number of Services does not fit.
fn wait_refused(fixture: &AgentFixture, count: u32) {
    let line = format!("rouse_agent_cluster_services_refused {count}\n");
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while !fixture.get_page("n", "127.0.0.1:7104", "/metrics").contains(&line) {
        assert!(Instant::now() < deadline, "never {line}");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_service_that_a_node_does_not_serve_has_one_event_with_the_reason() {
    let mut fixture = AgentFixture::new("events");
    let server = FakeWatchServer::start(&format!("{}-n", fixture.name));
    let metadata = json!({"name": "n1"});
    server.set(json!({"apiVersion": "v1", "kind": "Node", "metadata": metadata}));
    server.set(labelled_service("large", "10.96.0.8"));
    server.set(endpoint_slice("large", TOO_MANY_ENDPOINTS));
    // The address of the service of the RouteTable.
    server.set(labelled_service("second", "10.96.0.7"));
    server.set(endpoint_slice("second", 1));
    fixture.set_pod(RoutingPhase::Ready, ProbeHandler::Listen);
    fixture.add_direct_service();
    let began = Instant::now();
    fixture.start_agent_with_services("labelled");

    let (event, count) = wait_event(&server, "KernelMapFull", "large");
    assert_eq!(count, 1);
    assert_eq!(
        (&event["regarding"]["kind"], &event["regarding"]["uid"]),
        (&json!("Service"), &json!("uid-of-large"))
    );
    assert_eq!((&event["type"], &event["reportingInstance"]), (&json!("Warning"), &json!("n1")));
    let note = event["note"].as_str().expect("text");
    for part in ["map BACKENDS", "raise backends in --map-sizes", "#sizes-of-the-maps"] {
        assert!(note.contains(part), "{note}");
    }

    let (event, count) = wait_event(&server, "ClusterIPTaken", "second");
    assert_eq!(count, 1);
    let note = event["note"].as_str().expect("text");
    assert!(note.contains("10.96.0.7:80 leads to Rouse's service default/hello"), "{note}");

    // A Service that fits and does not fit again within a minute has no second Event.
    server.set(endpoint_slice("large", 1));
    wait_refused(&fixture, 0);
    server.set(endpoint_slice("large", TOO_MANY_ENDPOINTS));
    wait_refused(&fixture, 1);
    // Events are written in order: one on the Service `large` would come before this one.
    server.set(labelled_service("third", "10.96.0.7"));
    wait_event(&server, "ClusterIPTaken", "third");
    let count = wait_event(&server, "KernelMapFull", "large").1;
    // On a busy machine all this may take longer.
    assert!(count == 1 || began.elapsed() >= REPEAT_PERIOD, "{count} Events");
}
