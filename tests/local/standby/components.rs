//! Frozen pods while components are killed: the kernel and the agent of the node alone answer a request.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use tests::frozen_pods::frozen_pods;
use tests::http_client::PlainHttpClient;
use tests::multi_process_node::{COMPONENTS, MultiProcessNode, get_once, wait_for};

use super::{UP_OPTIONS, manifest};
use crate::component_restarts::in_client_netns;

/// Components that take no part in the thaw of a pod.
const OTHERS: [&str; 3] = ["controller", "autoscaler", "activator"];

/// Waits until one pod is frozen, without any component.
fn wait_one_frozen(node: &MultiProcessNode) -> BTreeSet<String> {
    wait_for("a frozen pod", || {
        let frozen = frozen_pods(&node.layout);
        (frozen.len() == 1).then_some(frozen)
    })
}

/// Waits until the service has one pod, as users see it, and that one is frozen. Returns its uid.
fn wait_only_frozen(node: &MultiProcessNode) -> BTreeSet<String> {
    wait_for("one pod that is frozen, and no other one", || {
        let frozen = frozen_pods(&node.layout);
        (frozen.len() == 1 && node.pods("kept").len() == 1).then_some(frozen)
    })
}

/// Kills the agent while the pod is frozen.
fn kill_agent_of_frozen(node: &MultiProcessNode, frozen: &BTreeSet<String>) {
    wait_for("the agent to be killed while the pod is frozen", || {
        assert_eq!(wait_only_frozen(node), *frozen);
        node.kill("agent");
        let is_frozen = frozen_pods(&node.layout) == *frozen;
        // The agent has thawed the pod in the moment before: it follows a late order, or its last check came late.
        if !is_frozen {
            node.start(&["agent"]);
        }
        is_frozen.then_some(())
    });
}

fn assert_answers_directly(node: &MultiProcessNode, address: SocketAddr) {
    let response = in_client_netns(node, || get_once(address, "/")).expect("a response");
    assert_eq!((response.status, response.direct), (200, true), "{response:?}");
}

/// Both parts begin and end with one frozen pod, so they share a node.
#[test]
fn a_frozen_pod_answers_while_other_components_are_gone_and_once_an_agent_has_started() {
    // A request that passes the pod over finds no activator while the others are gone.
    let node = MultiProcessNode::with_options("standby-alone", &UP_OPTIONS);
    node.start(&COMPONENTS);
    node.apply(&manifest("kept", 1, "", ""));
    let address = node.cluster_ip("kept");
    node.join_client_cgroup();
    let frozen = wait_one_frozen(&node);
    a_frozen_pod_answers_and_is_frozen_again_without_the_others(&node, address, &frozen);
    a_request_that_finds_no_agent_is_answered_once_one_has_started(&node, address, &frozen);
}

fn a_frozen_pod_answers_and_is_frozen_again_without_the_others(
    node: &MultiProcessNode,
    address: SocketAddr,
    frozen: &BTreeSet<String>,
) {
    OTHERS.iter().for_each(|component| node.kill(component));
    for _ in 0..2 {
        assert_answers_directly(node, address);
        // No decision comes: the agent itself waits until the pod is quiet.
        assert_eq!(wait_one_frozen(node), *frozen);
    }
    node.start(&OTHERS);
    assert_eq!(wait_only_frozen(node), *frozen, "the pod outlives them");
    assert_answers_directly(node, address);
    assert_eq!(wait_only_frozen(node), *frozen);
}

fn a_request_that_finds_no_agent_is_answered_once_one_has_started(
    node: &MultiProcessNode,
    address: SocketAddr,
    frozen: &BTreeSet<String>,
) {
    kill_agent_of_frozen(node, frozen);
    // The kernel completes the handshake and keeps the request.
    let connect = || PlainHttpClient::connect(address);
    let mut client = in_client_netns(node, connect).expect("a connection");
    client.send(b"GET / HTTP/1.1\r\nHost: kept\r\n\r\n").expect("a request");
    assert_eq!(frozen_pods(&node.layout), *frozen, "only an agent thaws a pod");
    node.start(&["agent"]);
    assert_eq!(client.read_response().expect("a response").status, 200);
    drop(client);
    // Another pod may have started, if the agent was not there again within the timeout.
    wait_only_frozen(node);
    assert_answers_directly(node, address);
    wait_only_frozen(node);
}
