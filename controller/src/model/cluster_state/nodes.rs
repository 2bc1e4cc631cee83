//! Pure: state of a node, as far as the places of pods and the hints for its zone depend on it.

use std::net::IpAddr;

use common::quantity;
use ipnet::IpNet;
use serde_json::Value;

use super::{ObservedNodes, UnixMillis};
use crate::model::{
    object::{hash::stable_json_hash, json::array_items},
    zone_shares::ZoneNode,
};

/// Time after a rejection during which a node gets no bound pods, in ms.
pub(crate) const REJECTION_BACKOFF_MS: u64 = 60_000;
/// Host of Docker Hub in full image names.
const DOCKER_HUB: &str = "docker.io";
/// Labels of nodes of the control plane, whose CPU Kubernetes does not count for hints.
const CONTROL_PLANE_LABELS: [&str; 2] =
    ["node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master"];

/// State of a node, as far as the places of pods and the hints for its zone depend on it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeState {
    /// True if the node's condition `Ready` is `True`.
    is_ready: bool,
    /// True if the node is ready and not cordoned, and neither a taint nor a condition keeps new pods away.
    is_schedulable: bool,
    /// Hashes of the names of the images on the node, sorted.
    image_hashes: Box<[u64]>,
    /// Allocatable CPU in thousandths of a processor; 0: the node states none.
    cpu_milli: u64,
    /// True if a label calls it a node of the control plane.
    is_control_plane: bool,
    /// Addresses of the node inside the cluster.
    addresses: Box<[IpAddr]>,
    /// Networks that the node may give its pods addresses from; empty: the network plugin has ranges of its own.
    pod_networks: Box<[IpNet]>,
}

impl ObservedNodes {
    /// Records that a node has rejected a pod at this time. A later rejection on record stays.
    pub fn record_rejection(&mut self, node: &str, at: UnixMillis, now: UnixMillis) {
        let last = self.last_rejections.entry(node.to_owned()).or_insert(at);
        *last = at.max(*last);
        // Rejected pods may name nodes that are gone.
        self.last_rejections.retain(|_, at| is_backing_off(*at, now));
    }

    /// Returns true if a pod with these image hashes may be bound to a node with this name and state at `now`.
    pub(crate) fn accepts_pod(
        &self,
        name: &str,
        state: &NodeState,
        images: &[u64],
        now: UnixMillis,
    ) -> bool {
        let last_rejection = self.last_rejections.get(name);
        !last_rejection.is_some_and(|at| is_backing_off(*at, now)) && state.accepts_pod(images)
    }
}

/// Returns true if a node with a rejection at this time gets no bound pods at `now`.
fn is_backing_off(rejected_at: UnixMillis, now: UnixMillis) -> bool {
    now < rejected_at.plus_ms(REJECTION_BACKOFF_MS)
}

impl NodeState {
    /// Reads a Node object.
    pub fn from_object(object: &Value) -> Self {
        let status = &object["status"];
        let has_condition = |kind: &str| {
            array_items(&status["conditions"])
                .any(|it| it["type"] == kind && it["status"] == "True")
        };
        let blocking_conditions =
            ["MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable"];
        let is_closed = object["spec"]["unschedulable"] == true
            // `PreferNoSchedule` is only a preference; every other effect keeps pods without tolerations away.
            || array_items(&object["spec"]["taints"]).any(|it| it["effect"] != "PreferNoSchedule");
        let names = array_items(&status["images"]).flat_map(|it| array_items(&it["names"]));
        let mut images: Vec<u64> = names.map(image_name_hash).collect();
        images.sort_unstable();
        let is_ready = has_condition("Ready");
        let cpu = status["allocatable"]["cpu"].as_str().and_then(quantity::parse_milli);
        let labels = &object["metadata"]["labels"];
        let inside = array_items(&status["addresses"]).filter(|it| it["type"] == "InternalIP");
        let networks = array_items(&object["spec"]["podCIDRs"]);
        Self {
            is_ready,
            is_schedulable: is_ready
                && !is_closed
                && !blocking_conditions.into_iter().any(has_condition),
            image_hashes: images.into(),
            cpu_milli: cpu.unwrap_or(0),
            is_control_plane: CONTROL_PLANE_LABELS.iter().any(|it| labels.get(*it).is_some()),
            addresses: inside.filter_map(|it| it["address"].as_str()?.parse().ok()).collect(),
            pod_networks: networks.filter_map(|it| it.as_str()?.parse().ok()).collect(),
        }
    }

    /// Returns true if Kubernetes reports the node ready.
    pub fn is_ready(&self) -> bool {
        self.is_ready
    }

    /// Returns true if the address is the node's own.
    pub(crate) fn has_address(&self, address: IpAddr) -> bool {
        self.addresses.contains(&address)
    }

    /// Returns true if the address is in a pod network of the node.
    pub(crate) fn has_pod_address(&self, address: IpAddr) -> bool {
        self.pod_networks.iter().any(|it| it.contains(&address))
    }

    /// Returns what the share of the node's zone depends on.
    pub fn zone_node<'a>(&self, zone: &'a str) -> ZoneNode<'a> {
        ZoneNode {
            zone,
            cpu_milli: self.cpu_milli,
            is_ready: self.is_ready,
            is_control_plane: self.is_control_plane,
        }
    }

    /// Returns true if the node takes new pods and has these images.
    fn accepts_pod(&self, images: &[u64]) -> bool {
        self.is_schedulable && images.iter().all(|it| self.image_hashes.binary_search(it).is_ok())
    }
}

/// Returns the hash of an image name in its full form, because the same image has several names.
///
/// A spec may leave out the host of Docker Hub, `library/` and the tag. Resolved digests of Docker Hub have its older
/// host. A kubelet lists the names of its runtime: full ones with containerd, the shortest ones with Docker.
pub(crate) fn image_name_hash(image: &Value) -> u64 {
    stable_json_hash(&full_image_name(image.as_str().unwrap_or_default()).into())
}

/// Full form of an image name, as in distribution's `reference.ParseDockerRef`: a digest replaces the tag.
fn full_image_name(name: &str) -> String {
    let (host, path) = match name.split_once('/') {
        Some((host, path)) if host.contains(['.', ':']) || host == "localhost" => (host, path),
        Some(_) | None => (DOCKER_HUB, name),
    };
    let host = if host == "index.docker.io" { DOCKER_HUB } else { host };
    // Official images of Docker Hub have no owner in their names.
    let library = if host == DOCKER_HUB && !path.contains('/') { "library/" } else { "" };
    match path.split_once('@') {
        Some((tagged, digest)) => {
            let repository = tagged.split_once(':').map_or(tagged, |(repository, _)| repository);
            format!("{host}/{library}{repository}@{digest}")
        }
        None if path.contains(':') => format!("{host}/{library}{path}"),
        None => format!("{host}/{library}{path}:latest"),
    }
}
