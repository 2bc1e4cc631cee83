//! Shell: requests lost while a plain Deployment scales from one pod to three and back, without a preStop hook: those of
//! clients on the pods' own node, and those from another node.

use anyhow::{Context as _, Result};

use super::DeploymentManifest;
use crate::bench::{
    cluster_context::{BenchClientPod, BenchCluster, ClusterBenchContext},
    report::{BenchGoal, BenchRow, case_row},
    scale_in::{LoadCounts, SCALING_CYCLES, SteadyLoad, wait_for_pods},
};

/// Node of all pods. A lost request does not show the pod that it was for, so the clients' nodes have to tell.
const PODS_NODE: &str = "node1";
const PODS_ON_ONE_NODE: &str = "nodeSelector: { kubernetes.io/hostname: node1 }";
const READINESS_PROBE: &str = "readinessProbe: { tcpSocket: { port: 8080 }, periodSeconds: 1 }";
/// Label by which Rouse serves a Service in the mode `labelled`.
const SERVED_BY_ROUSE: &str = "{ rouse.dev/clusterip: \"true\" }";

/// Requests to the Deployment of one subject.
#[derive(Clone, Copy, Debug)]
struct LostCounts {
    own_node: LoadCounts,
    other_node: LoadCounts,
}

/// Measures both subjects one after the other, each with the machine to itself. The peer's result is part of a goal.
pub(super) fn measure(
    cluster_context: &ClusterBenchContext,
    cluster: &BenchCluster,
    clients: &[BenchClientPod],
) -> Result<Vec<BenchRow>> {
    let peer = measure_subject(cluster_context, cluster, clients, "kube-proxy-iptables", "")?;
    let rouse = measure_subject(cluster_context, cluster, clients, "rouse", SERVED_BY_ROUSE)?;
    Ok(lost_rows(peer, rouse))
}

/// Scales a Deployment out and in under load from two nodes, and counts the requests that are lost.
fn measure_subject(
    cluster_context: &ClusterBenchContext,
    cluster: &BenchCluster,
    clients: &[BenchClientPod],
    subject: &str,
    labels: &str,
) -> Result<LostCounts> {
    // Two paths: on the pods' own node, and over the network between nodes.
    let find = |is_own: bool| clients.iter().find(|client| (client.node == PODS_NODE) == is_own);
    let own = find(true).context("a client is on the pods' node")?;
    let other = find(false).context("a client is on another node")?;
    let name = format!("lost-{subject}");
    let manifest = DeploymentManifest {
        name: &name,
        labels,
        port_name: "http",
        pod_field: PODS_ON_ONE_NODE,
        container_field: READINESS_PROBE,
        ..DeploymentManifest::default()
    };
    cluster.create(&manifest.text())?;
    // One pod before the load begins, or its first requests would be lost by the setup.
    scale(cluster, &name, 1)?;
    let address = cluster.cluster_ip(&name)?;
    let start = |client, place: &str| {
        let records = format!("{name}-{place}");
        SteadyLoad::start(cluster_context, cluster, client, &address, &records)
    };
    let (mut own_load, mut other_load) = (start(own, "own-node")?, start(other, "other-node")?);
    // Never to 0: with a pod left at each moment, each lost request is the subject's fault.
    for pods in [3, 1].repeat(SCALING_CYCLES as usize) {
        scale(cluster, &name, pods)?;
    }
    // Both before the wait for either: they end at the same time.
    own_load.ensure_running()?;
    other_load.ensure_running()?;
    let counts = LostCounts { own_node: own_load.finish()?, other_node: other_load.finish()? };
    scale(cluster, &name, 0)?;
    Ok(counts)
}

/// Sets the number of pods, waits until there are as many, all of them ready, and a while after that.
fn scale(cluster: &BenchCluster, name: &str, pods: usize) -> Result<()> {
    cluster.kubectl(&["scale", "deployment", name, "--replicas", &pods.to_string()])?;
    wait_for_pods(cluster, format!("app={name}"), pods)
}

fn lost_rows(peer: LostCounts, rouse: LostCounts) -> Vec<BenchRow> {
    let row = |case: &str, subject: &str, number: usize, goal| {
        let case = format!("lost_deployment_{case}");
        case_row(&case, subject, "requests", &[number as f64], goal)
    };
    let none = BenchGoal::None;
    let tenth = BenchGoal::AtMost(peer.other_node.lost as f64 / 10.0);
    vec![
        row("own_node_sent", "kube-proxy-iptables", peer.own_node.sent, none),
        row("own_node_sent", "rouse", rouse.own_node.sent, none),
        row("own_node", "kube-proxy-iptables", peer.own_node.lost, none),
        row("own_node", "rouse", rouse.own_node.lost, BenchGoal::AtMost(0.0)),
        row("other_node_sent", "kube-proxy-iptables", peer.other_node.sent, none),
        row("other_node_sent", "rouse", rouse.other_node.sent, none),
        row("other_node", "kube-proxy-iptables", peer.other_node.lost, none),
        row("other_node", "rouse", rouse.other_node.lost, tenth),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rouse_may_lose_a_tenth_of_the_peer_between_nodes_and_nothing_on_a_node() {
        let counts = |own, other| {
            let counts = |lost| LoadCounts { sent: 36_000, lost };
            LostCounts { own_node: counts(own), other_node: counts(other) }
        };
        let judge = |peer, rouse| -> Vec<bool> {
            lost_rows(peer, rouse).iter().filter_map(|row| row.reached).collect()
        };
        assert_eq!(judge(counts(100, 100), counts(0, 10)), [true, true]);
        assert_eq!(judge(counts(100, 100), counts(1, 11)), [false, false]);
        assert_eq!(judge(counts(0, 0), counts(0, 1)), [true, false], "none of none");
    }
}
