//! Connections to frozen pods: kept ones, ones without a request, and those on which the server speaks first.

use std::collections::BTreeSet;

use tests::http_client::PlainHttpClient;
use tests::rouse_node::RouseNode;

use super::{apply, assert_direct, manifest, send_request};
use crate::raw_tcp::GreetedConnection;

/// Sends a request on an open connection, which one of these pods must answer.
fn assert_answered(client: &mut PlainHttpClient, pods: &BTreeSet<String>) {
    let response = client.get("any", "/").expect("a response");
    assert_eq!(response.status, 200, "{response:?}");
    assert!(pods.contains(response.header("x-pod")), "{response:?}, not by {pods:?}");
}

pub(super) fn a_request_on_a_connection_from_before_the_freeze_thaws_the_pod(node: &RouseNode) {
    let services = ["kept", "unused"];
    services.iter().for_each(|name| apply(node, &manifest(name, 1, "", "")));
    let addresses = services.map(|name| node.wait_ready(name));
    let frozen = services.map(|name| node.wait_frozen(name, 1));
    let mut clients = addresses.map(|address| {
        node.in_client_netns(|| PlainHttpClient::connect(address)).expect("a connection")
    });
    // Only the first one brings a request; the other one thaws its pod all the same.
    assert_answered(&mut clients[0], &frozen[0]);
    assert_eq!(services.map(|name| node.wait_frozen(name, 1)), frozen);
    for (client, pods) in clients.iter_mut().zip(&frozen) {
        assert_answered(client, pods);
    }
    drop(clients);
    assert_eq!(services.map(|name| node.wait_frozen(name, 1)), frozen);
}

/// The connect itself thaws the pod: the client sends no byte before the greeting.
pub(super) fn a_pod_whose_server_speaks_first_is_thawed_and_runs_until_its_close(node: &RouseNode) {
    let echo = ", env: [{name: HELLO_ECHO_PORT, value: \"8080\"}], ports: [{containerPort: 8080}]";
    apply(node, &manifest("bytes", 1, ", rouse.dev/protocol: tcp", echo));
    apply(node, &manifest("other", 1, "", ""));
    let (address, other_address) = (node.wait_ready("bytes"), node.wait_ready("other"));
    let (frozen, others) = (node.wait_frozen("bytes", 1), node.wait_frozen("other", 1));
    let open = || GreetedConnection::open(address);
    let connection = node.in_client_netns(open).expect("a greeting before any byte is sent");
    assert!(frozen.contains(&connection.pod), "{} is not of {frozen:?}", connection.pod);
    assert_eq!(connection.peer, connection.local_ip().to_string(), "no activator is between");
    // Each freeze of the other service is at least one window later.
    for _ in 0..2 {
        assert_direct(&send_request(node, other_address, "/"), &others);
        assert_eq!(node.wait_frozen("other", 1), others);
        assert!(node.frozen_pods("bytes").is_empty(), "its connection is a request in flight");
    }
    assert_eq!(connection.finish("late").expect("the pod still serves it"), "late");
    assert_eq!(node.wait_frozen("bytes", 1), frozen);
    let connection = node.in_client_netns(open).expect("a greeting");
    assert_eq!(connection.finish("again").expect("an echo"), "again");
}
