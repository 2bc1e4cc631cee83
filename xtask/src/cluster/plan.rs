//! Pure: processes of a cluster, and the steps that `up` still has to do.

use std::{collections::BTreeSet, fmt, str::FromStr};

/// Highest number of nodes: as many have addresses and certificates.
pub(crate) const MAX_NODES: u8 = 20;

/// A process of the cluster that xtask itself starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ClusterProcess {
    Etcd,
    ApiServer,
    ControllerManager,
    Scheduler,
    /// Forwards connections from the host's loopback to the API server.
    Forward,
    /// Keeps the namespaces of a node alive.
    Node(u8),
    Containerd(u8),
    Kubelet(u8),
    Proxy(u8),
}

impl ClusterProcess {
    /// Processes of one node, in the order of their start.
    pub(crate) fn node_processes(node: u8) -> [Self; 4] {
        [Self::Node(node), Self::Containerd(node), Self::Kubelet(node), Self::Proxy(node)]
    }

    /// Number of its node; `None` for the control plane's processes.
    pub(crate) fn node(self) -> Option<u8> {
        match self {
            Self::Node(node) | Self::Containerd(node) | Self::Kubelet(node) | Self::Proxy(node) => {
                Some(node)
            }
            Self::Etcd
            | Self::ApiServer
            | Self::ControllerManager
            | Self::Scheduler
            | Self::Forward => None,
        }
    }
}

impl fmt::Display for ClusterProcess {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Etcd => out.write_str("etcd"),
            Self::ApiServer => out.write_str("kube-apiserver"),
            Self::ControllerManager => out.write_str("kube-controller-manager"),
            Self::Scheduler => out.write_str("kube-scheduler"),
            Self::Forward => out.write_str("forward"),
            Self::Node(node) => write!(out, "node{node}"),
            Self::Containerd(node) => write!(out, "node{node}/containerd"),
            Self::Kubelet(node) => write!(out, "node{node}/kubelet"),
            Self::Proxy(node) => write!(out, "node{node}/kube-proxy"),
        }
    }
}

impl FromStr for ClusterProcess {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let process = match text {
            "etcd" => Some(Self::Etcd),
            "kube-apiserver" | "apiserver" => Some(Self::ApiServer),
            "kube-controller-manager" => Some(Self::ControllerManager),
            "kube-scheduler" => Some(Self::Scheduler),
            "forward" => Some(Self::Forward),
            _ => parse_node_process(text),
        };
        process.ok_or_else(|| {
            format!(
                "`{text}` is no part of a cluster: write etcd, kube-apiserver, kube-controller-manager, \
                 kube-scheduler, forward, node1, node1/containerd, node1/kubelet or node1/kube-proxy"
            )
        })
    }
}

fn parse_node_process(text: &str) -> Option<ClusterProcess> {
    let rest = text.strip_prefix("node")?;
    let (number, part) = rest.split_once('/').map_or((rest, None), |(n, part)| (n, Some(part)));
    let node = number.parse().ok().filter(|node| (1..=MAX_NODES).contains(node))?;
    match part {
        None => Some(ClusterProcess::Node(node)),
        Some("containerd") => Some(ClusterProcess::Containerd(node)),
        Some("kubelet") => Some(ClusterProcess::Kubelet(node)),
        Some("kube-proxy") => Some(ClusterProcess::Proxy(node)),
        Some(_) => None,
    }
}

/// Present state of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ObservedCluster {
    /// Processes that run now.
    pub(crate) running: BTreeSet<ClusterProcess>,
    /// Nodes whose containerd has all images in their present version.
    pub(crate) nodes_with_images: BTreeSet<u8>,
    /// True if certificates, network and cgroups of the control plane exist.
    pub(crate) has_base: bool,
    /// True if the API server has the objects of CoreDNS.
    pub(crate) has_addons: bool,
}

/// One step of `up`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClusterUpStep {
    /// Create certificates, cgroups and the network between nodes.
    CreateBase,
    StartProcess(ClusterProcess),
    /// Wait until the API server responds.
    WaitForApiServer,
    /// Import the images into a node's containerd.
    ImportImages(u8),
    /// Apply the objects of CoreDNS.
    ApplyAddons,
    /// Wait until all nodes are Ready and names resolve.
    WaitUntilReady,
}

impl ClusterUpStep {
    /// Expected time on two cores, in seconds, for the displayed time left.
    pub(crate) fn expected_seconds(self) -> u32 {
        match self {
            Self::StartProcess(_) | Self::CreateBase => 1,
            Self::WaitForApiServer => 8,
            Self::ImportImages(_) => 3,
            Self::ApplyAddons => 3,
            Self::WaitUntilReady => 20,
        }
    }
}

impl fmt::Display for ClusterUpStep {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CreateBase => out.write_str("certificates, cgroups and network"),
            Self::StartProcess(process) => write!(out, "start {process}"),
            Self::WaitForApiServer => out.write_str("wait for the API server"),
            Self::ImportImages(node) => write!(out, "load images into node{node}"),
            Self::ApplyAddons => out.write_str("apply CoreDNS"),
            Self::WaitUntilReady => out.write_str("wait until nodes and names are ready"),
        }
    }
}

/// Lists the steps from `observed` to a cluster of `nodes` nodes, in order.
///
/// A node without its namespaces has lost all processes in them, so all of them start again. Without nodes, the
/// cluster is an API server without other writers: no controllers, no scheduler, no addons.
pub(crate) fn plan(observed: &ObservedCluster, nodes: u8) -> Vec<ClusterUpStep> {
    let mut steps = Vec::new();
    if !observed.has_base {
        steps.push(ClusterUpStep::CreateBase);
    }
    let is_stopped = |process: &ClusterProcess| !observed.running.contains(process);
    for &process in control_plane_processes(nodes) {
        if is_stopped(&process) {
            steps.push(ClusterUpStep::StartProcess(process));
        }
        // A running API server responds only after it has connected to a restarted etcd.
        let is_unready =
            is_stopped(&ClusterProcess::Etcd) || is_stopped(&ClusterProcess::ApiServer);
        if process == ClusterProcess::ApiServer && is_unready {
            steps.push(ClusterUpStep::WaitForApiServer);
        }
    }
    steps.extend(Some(ClusterProcess::Forward).filter(is_stopped).map(ClusterUpStep::StartProcess));
    // Without nodes no pod can run, so CoreDNS would never be ready.
    if nodes == 0 {
        return steps;
    }
    for node in 1..=nodes {
        steps.extend(node_steps(observed, node));
    }
    if !observed.has_addons {
        steps.push(ClusterUpStep::ApplyAddons);
    }
    steps.push(ClusterUpStep::WaitUntilReady);
    steps
}

/// Processes of the control plane, in the order of their start.
fn control_plane_processes(nodes: u8) -> &'static [ClusterProcess] {
    match nodes {
        0 => &[ClusterProcess::Etcd, ClusterProcess::ApiServer],
        _ => &[
            ClusterProcess::Etcd,
            ClusterProcess::ApiServer,
            ClusterProcess::ControllerManager,
            ClusterProcess::Scheduler,
        ],
    }
}

fn node_steps(observed: &ObservedCluster, node: u8) -> Vec<ClusterUpStep> {
    let processes = ClusterProcess::node_processes(node);
    let is_gone = !observed.running.contains(&ClusterProcess::Node(node));
    let mut steps = Vec::new();
    for process in processes {
        // Processes of a lost namespace may still be alive, but cannot reach the new one.
        if is_gone || !observed.running.contains(&process) {
            steps.push(ClusterUpStep::StartProcess(process));
        }
        // Images come before the kubelet, which would otherwise try to pull them from a registry.
        if matches!(process, ClusterProcess::Containerd(_))
            && !observed.nodes_with_images.contains(&node)
        {
            steps.push(ClusterUpStep::ImportImages(node));
        }
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(nodes: u8) -> ObservedCluster {
        let control = [
            ClusterProcess::Etcd,
            ClusterProcess::ApiServer,
            ClusterProcess::ControllerManager,
            ClusterProcess::Scheduler,
            ClusterProcess::Forward,
        ];
        ObservedCluster {
            running: control
                .into_iter()
                .chain((1..=nodes).flat_map(ClusterProcess::node_processes))
                .collect(),
            nodes_with_images: (1..=nodes).collect(),
            has_base: true,
            has_addons: true,
        }
    }

    #[test]
    fn a_complete_cluster_is_only_checked() {
        assert_eq!(plan(&whole(2), 2), [ClusterUpStep::WaitUntilReady]);
    }

    #[test]
    fn a_node_without_namespaces_is_started_from_its_beginning() {
        let mut observed = whole(2);
        observed.running.remove(&ClusterProcess::Node(2));
        assert_eq!(
            plan(&observed, 2),
            [
                ClusterUpStep::StartProcess(ClusterProcess::Node(2)),
                ClusterUpStep::StartProcess(ClusterProcess::Containerd(2)),
                ClusterUpStep::StartProcess(ClusterProcess::Kubelet(2)),
                ClusterUpStep::StartProcess(ClusterProcess::Proxy(2)),
                ClusterUpStep::WaitUntilReady
            ]
        );
    }

    #[test]
    fn a_new_etcd_is_waited_for_through_the_api_server() {
        let mut observed = whole(1);
        observed.running.remove(&ClusterProcess::Etcd);
        assert_eq!(
            plan(&observed, 1),
            [
                ClusterUpStep::StartProcess(ClusterProcess::Etcd),
                ClusterUpStep::WaitForApiServer,
                ClusterUpStep::WaitUntilReady
            ]
        );
    }

    #[test]
    fn images_are_there_before_the_kubelet() {
        let steps = plan(&whole(1), 2);
        let position = |step| steps.iter().position(|&other| other == step).unwrap();
        assert!(
            position(ClusterUpStep::ImportImages(2))
                < position(ClusterUpStep::StartProcess(ClusterProcess::Kubelet(2)))
        );
        assert!(
            position(ClusterUpStep::ImportImages(2))
                > position(ClusterUpStep::StartProcess(ClusterProcess::Containerd(2)))
        );
    }

    #[test]
    fn a_new_cluster_waits_for_the_api_server_before_its_clients_start() {
        let steps = plan(&ObservedCluster::default(), 1);
        assert_eq!(steps.first(), Some(&ClusterUpStep::CreateBase));
        let position = |step| steps.iter().position(|&other| other == step).unwrap();
        assert!(
            position(ClusterUpStep::WaitForApiServer)
                < position(ClusterUpStep::StartProcess(ClusterProcess::ControllerManager))
        );
        assert!(
            position(ClusterUpStep::WaitForApiServer)
                < position(ClusterUpStep::StartProcess(ClusterProcess::Kubelet(1)))
        );
    }

    #[test]
    fn the_api_server_responds_before_a_lost_kubelet_starts_again() {
        let mut observed = whole(1);
        for lost in [ClusterProcess::Etcd, ClusterProcess::Node(1)] {
            observed.running.remove(&lost);
        }
        let steps = plan(&observed, 1);
        let position = |step| steps.iter().position(|&other| other == step).unwrap();
        assert!(
            position(ClusterUpStep::WaitForApiServer)
                < position(ClusterUpStep::StartProcess(ClusterProcess::Kubelet(1)))
        );
    }

    #[test]
    fn without_nodes_only_xtask_writes_to_the_api_server() {
        let steps = plan(&ObservedCluster::default(), 0);
        assert_eq!(
            steps,
            [
                ClusterUpStep::CreateBase,
                ClusterUpStep::StartProcess(ClusterProcess::Etcd),
                ClusterUpStep::StartProcess(ClusterProcess::ApiServer),
                ClusterUpStep::WaitForApiServer,
                ClusterUpStep::StartProcess(ClusterProcess::Forward)
            ]
        );
    }

    #[test]
    fn every_process_is_found_by_the_name_it_is_shown_with() {
        for process in whole(2).running {
            assert_eq!(process.to_string().parse(), Ok(process));
        }
        for bad in ["", "node0", "node21", "node1/etcd", "nodeX", "sshd"] {
            assert!(bad.parse::<ClusterProcess>().is_err(), "{bad}");
        }
    }
}
