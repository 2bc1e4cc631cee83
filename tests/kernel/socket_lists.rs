//! Shell: lists of the TCP sockets of a network namespace, in the running kernel.

use std::{
    collections::BTreeSet,
    net::{SocketAddr, TcpListener, TcpStream},
};

use agent::net::sockdiag::SockDiag;

use crate::fixture::{NetnsFixture, SharedKernelFixture, in_netns};

/// Creates a listener at an address, and the two ends of a connection to it.
fn connected_pair(at: &str) -> (TcpListener, [TcpStream; 2]) {
    let listener = TcpListener::bind(at).expect("a free port");
    let client = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
    let (server, _) = listener.accept().expect("it came");
    (listener, [client, server])
}

/// Local addresses of the established connections in a namespace.
fn list_connections(namespace: &NetnsFixture) -> Vec<SocketAddr> {
    in_netns(&namespace.netns, || {
        let connections = SockDiag::open().and_then(|diag| diag.connections());
        connections.expect("a dump").iter().map(|it| it.local).collect()
    })
}

/// The kernel lists both by the request of a time when it knew no other family (`TCPDIAG_GETSOCK`).
#[test]
fn one_list_has_the_sockets_of_both_families_and_of_its_namespace_alone() {
    let mut fixture = SharedKernelFixture::new();
    let [client, other] = [fixture.add_client(), fixture.add_client()];
    let pairs = in_netns(&client.netns, || ["127.0.0.1:0", "[::1]:0"].map(connected_pair));
    let ends = pairs.iter().flat_map(|(_, ends)| ends);
    let expected: BTreeSet<SocketAddr> =
        ends.map(|end| end.local_addr().expect("connected")).collect();
    let listed = list_connections(&client);
    assert_eq!(listed.len(), 4, "each end once: {listed:?}");
    assert_eq!(listed.into_iter().collect::<BTreeSet<_>>(), expected);
    assert_eq!(list_connections(&other), []);
    let listeners = in_netns(&client.netns, || SockDiag::open().and_then(|diag| diag.listeners()));
    let listening: BTreeSet<SocketAddr> =
        listeners.expect("a dump").into_iter().map(|(at, _)| at).collect();
    let bound = pairs.iter().map(|(listener, _)| listener.local_addr().expect("bound"));
    assert_eq!(listening, bound.collect::<BTreeSet<_>>());
}
