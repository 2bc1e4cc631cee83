//! Shell: storage of accepted connections: those that count have it from their first byte on, others have none.

use std::net::SocketAddr;

use agent::{kernel::features::VerifierFeatures, net::sockdiag::SockDiag};

use super::*;
use crate::fixture::{enter_netns, in_netns};

/// Port of a pod at which no request counts.
const OTHER_PORT: u16 = 9090;

/// Returns for each connection of the pod's namespace, by its own address, if it has storage and counts.
fn storages(kernel: &SharedKernelFixture, pod: &NetnsFixture) -> Vec<(SocketAddr, bool, bool)> {
    let conns = kernel.maps.conns();
    let connections = in_netns(&pod.netns, || {
        let diag = SockDiag::open().expect("netlink");
        conns.all_connections(&diag).expect("a dump")
    });
    let slot = u32::from(pod.number);
    let facts = connections.into_iter().map(|(socket, stored)| {
        (socket.canonical_local(), stored.is_some(), stored.is_some_and(|it| it.is_counted(slot)))
    });
    facts.collect()
}

/// Storage costs a connection 1 µs and nearly a kilobyte.
#[test]
fn connections_that_do_not_count_have_no_storage() {
    let mut kernel = SharedKernelFixture::new();
    let (pod, foreign, client) = (kernel.add_pod(), kernel.add_pod(), kernel.add_client());
    kernel.register_pod(&pod, 0);
    let (mut server, mut foreign_server) = (pod.start_process(), foreign.start_process());
    server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} one"));
    server.expect_step(&format!("listen 0.0.0.0:{OTHER_PORT} admin"));
    foreign_server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} foreign"));
    let [serving, other, foreign_serving] =
        [(&pod, SERVING_PORT), (&pod, OTHER_PORT), (&foreign, SERVING_PORT)]
            .map(|(pod, port)| format!("{}:{port}", pod.ipv4()));
    let mut client = client.start_process();
    for address in [&serving, &other, &foreign_serving] {
        client.expect_step(&format!("connect {address}"));
    }
    let address = |text: &str| text.parse::<SocketAddr>().expect("an address");
    // Kernels before 5.15 begin each with a copy of its listener's.
    let copied = !VerifierFeatures::detect().sock_ops_netns_cookie;
    let mut of_pod = storages(&kernel, &pod);
    of_pod.sort();
    assert_eq!(of_pod, [(address(&serving), true, true), (address(&other), copied, false)]);
    assert_eq!(storages(&kernel, &foreign), [(address(&foreign_serving), copied, false)]);
}

/// A bind shows the namespace of a socket only on kernels before 5.15, and most sockets that are bound are no servers.
#[test]
fn a_client_in_a_pod_that_chooses_its_port_has_no_storage() {
    let mut kernel = SharedKernelFixture::new();
    let (pod, client_pod) = (kernel.add_pod(), kernel.add_pod());
    let (mut server, mut client) = (pod.start_process(), client_pod.start_process());
    server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} one"));
    client.expect_step(&format!("bound {OTHER_PORT} {}:{SERVING_PORT}", pod.ipv4()));
    let local = SocketAddr::new(client_pod.ipv4().parse().expect("an address"), OTHER_PORT);
    let recorded = !VerifierFeatures::detect().sock_ops_netns_cookie;
    assert_eq!(storages(&kernel, &client_pod), [(local, recorded, false)]);
}

/// The client's processor sends the first request while another one still establishes the connection.
#[test]
fn first_requests_that_come_while_connections_are_established_are_counted() {
    const CLIENTS: usize = 4;
    const CONNECTIONS: usize = 3_000;
    let mut fixture = CountFixture::new();
    let start_client = |_| {
        let (netns, address) = (fixture.client.netns.clone(), fixture.pod.ipv4());
        thread::spawn(move || {
            enter_netns(&netns);
            for _ in 0..CONNECTIONS {
                let mut stream = TcpStream::connect((address.as_str(), SERVING_PORT)).unwrap();
                stream.write_all(get_request("/length/5").as_bytes()).unwrap();
                read_until(&mut stream, "xxxxx");
            }
        })
    };
    let clients: Vec<_> = (0..CLIENTS).map(start_client).collect();
    clients.into_iter().for_each(|client| client.join().unwrap());
    fixture.wait_settled((CLIENTS * CONNECTIONS) as u64);
    let state = fixture.kernel.maps.pod_state(fixture.slot());
    assert_eq!((state.desynced_connections, state.stray_responses), (0, 0), "{state:?}");
}
