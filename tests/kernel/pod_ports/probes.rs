//! Shell: probes of opaque ports, which bring no request, and clients on the node, which may look like them.

use agent::kernel::features::VerifierFeatures;
use aya::maps::{HashMap, Map, MapData};
use socket2::{Domain, Socket, Type};

use super::*;

/// Request of the kubelet's HTTP probes.
const KUBELET_REQUEST: &[u8] =
    b"GET /length/5 HTTP/1.1\r\nHost: pod\r\nUser-Agent: kube-probe/1.36\r\n\r\n";

/// Sends that request, and reads the begin of the response.
fn send_kubelet_request(stream: &mut TcpStream) {
    stream.write_all(KUBELET_REQUEST).unwrap();
    expect_bytes(stream, b"HTTP/1.1 200 OK");
}

#[test]
fn a_client_on_the_node_that_sends_nothing_may_be_a_probe_and_counts_from_its_first_byte() {
    let mut fixture = PodPortsFixture::new(0, &PORTS);
    fixture.kernel.write_node_addresses();
    let node = fixture.kernel.node_netns();
    let mut server = byte_server::start(&fixture.pod, &RAW_PORT.to_string());
    let before = fixture.kernel.maps.pod_state(fixture.slot()).last_activity_ns;
    let mut client = fixture.connect_from(&node, RAW_PORT);
    server.expect_step("accept");
    server.expect_step("send greeting");
    expect_bytes(&mut client, b"greeting");
    assert_eq!((fixture.gauges(), fixture.totals()), ([1, 0, 1], (0, 0)));
    let after = fixture.kernel.maps.pod_state(fixture.slot()).last_activity_ns;
    assert_eq!(after, before, "a probe does not make the pod look active");
    client.write_all(b"a").unwrap();
    assert_eq!(server.expect_step("receive"), "a");
    assert_eq!((fixture.gauges(), fixture.totals()), ([1, 1, 0], (1, 0)));
    client.write_all(b"b").unwrap();
    assert_eq!(server.expect_step("receive"), "b");
    assert_eq!(fixture.totals(), (1, 0), "the connection is one request");
    end_connection(client, &mut server);
    fixture.wait_gauges([0, 0, 0]);
    assert_eq!(fixture.totals(), (1, 1));
    assert_eq!(fixture.kernel.maps.responses(fixture.slot()).received, 2);
}

#[test]
fn where_the_kubelet_is_marked_a_client_on_the_node_counts_at_once() {
    let mut fixture = PodPortsFixture::new(0, &PORTS);
    fixture.kernel.write_node_addresses();
    fixture.kernel.maps.set_kubelet_marked(true);
    let _server = byte_server::start(&fixture.pod, &RAW_PORT.to_string());
    let _client = fixture.connect_from(&fixture.kernel.node_netns(), RAW_PORT);
    fixture.wait_gauges([1, 1, 0]);
    fixture.kernel.maps.set_kubelet_marked(false);
}

#[test]
fn probes_of_an_opaque_port_are_no_requests() {
    let mut fixture = PodPortsFixture::new(abi::POD_OPAQUE, &PORTS);
    fixture.kernel.write_node_addresses();
    let node = fixture.kernel.node_netns();
    let mut servers =
        [SERVING_PORT, RAW_PORT].map(|port| CountingServer::start(&fixture.pod, port));
    for port in [SERVING_PORT, RAW_PORT] {
        // A TCP probe connects, and an HTTP probe sends its request.
        drop(fixture.connect_from(&node, port));
        send_kubelet_request(&mut fixture.connect_from(&node, port));
    }
    fixture.wait_gauges([0, 0, 0]);
    assert_eq!(fixture.totals(), (0, 0));
    // The same request from elsewhere counts, and another one from the node.
    send_kubelet_request(&mut fixture.connect(RAW_PORT));
    send_request(&mut fixture.connect_from(&node, RAW_PORT));
    let served: u64 = servers.iter_mut().map(CountingServer::request_count).sum();
    fixture.wait_gauges([0, 0, 0]);
    assert_eq!((fixture.totals(), served), ((2, 2), 4));
}

/// The agent's probes and those from the kubelet's cgroup.
#[test]
fn a_marked_connection_to_an_opaque_port_does_not_count() {
    const PROBE_PORT: u16 = 40_000;
    let fixture = PodPortsFixture::new(0, &PORTS);
    let mut server = byte_server::start(&fixture.pod, &RAW_PORT.to_string());
    let pin = fixture.kernel.paths().pins().join(abi::maps::PROBES);
    let marks = Map::LruHashMap(MapData::from_pin(pin).unwrap());
    let mut marks: HashMap<MapData, abi::ProbeKey, u64> = marks.try_into().unwrap();
    let client_ip: std::net::Ipv4Addr = fixture.client.ipv4().parse().unwrap();
    let words = client_ip.to_ipv6_mapped().octets();
    let word = |at: usize| u32::from_ne_bytes(words[at * 4..][..4].try_into().unwrap());
    let remote = [word(0), word(1), word(2), word(3)];
    let key = abi::ProbeKey { remote, remote_port: PROBE_PORT.into() };
    marks.insert(key, u64::MAX, 0).unwrap();
    let address = fixture.address(RAW_PORT);
    let probe = in_netns(&fixture.client.netns, || {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from(([0, 0, 0, 0], PROBE_PORT)).into()).unwrap();
        socket.connect(&address.into()).unwrap();
        socket
    });
    server.expect_step("accept");
    assert_eq!((fixture.gauges(), fixture.totals()), ([0, 0, 0], (0, 0)));
    let other = fixture.connect(RAW_PORT);
    fixture.wait_gauges([1, 1, 0]);
    drop((probe, other));
}

/// With a deferred listener the first bytes come before the connection.
#[test]
fn a_client_on_the_node_counts_if_its_first_bytes_came_before_the_connection() {
    let mut fixture = PodPortsFixture::new(0, &PORTS);
    fixture.kernel.write_node_addresses();
    let node = fixture.kernel.node_netns();
    let mut server = byte_server::start(&fixture.pod, &format!("{RAW_PORT} deferred"));
    let mut client = fixture.connect_from(&node, RAW_PORT);
    client.write_all(b"first").unwrap();
    server.expect_step("accept");
    assert_eq!(server.expect_step("receive"), "first");
    assert_eq!((fixture.gauges(), fixture.totals()), ([1, 1, 0], (1, 0)));
    end_connection(client, &mut server);
    fixture.wait_gauges([0, 0, 0]);
    let mut probe = fixture.connect_from(&node, RAW_PORT);
    probe.write_all(KUBELET_REQUEST).unwrap();
    server.expect_step("accept");
    assert_eq!((fixture.gauges(), fixture.totals()), ([0, 0, 0], (1, 1)));
    drop(probe);
}

/// Storage costs a connection 1 µs and nearly a kilobyte.
#[test]
fn a_connection_to_a_port_that_does_not_count_has_no_storage() {
    let fixture = PodPortsFixture::new(0, &PORTS);
    let mut servers =
        [RAW_PORT, OTHER_PORT].map(|port| byte_server::start(&fixture.pod, &port.to_string()));
    let _clients = [RAW_PORT, OTHER_PORT].map(|port| fixture.connect(port));
    for server in &mut servers {
        server.expect_step("accept");
    }
    let conns = fixture.kernel.maps.conns();
    let connections =
        in_netns(&fixture.pod.netns, || conns.all_connections(&SockDiag::open().unwrap()).unwrap());
    let stored = connections.into_iter().map(|(socket, stored)| {
        (
            socket.canonical_local().port(),
            stored.is_some_and(|it| it.is_counted(fixture.slot())),
            stored.is_some(),
        )
    });
    let mut stored: Vec<_> = stored.collect();
    stored.sort_unstable();
    // Kernels before 5.15 begin each with a copy of its listener's.
    let copied = !VerifierFeatures::detect().sock_ops_netns_cookie;
    assert_eq!(stored, [(RAW_PORT, true, true), (OTHER_PORT, false, copied)]);
}
