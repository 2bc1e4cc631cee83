//! Pure: address ranges of a cluster. All of them are visible in the cluster's own namespaces only.

/// Address ranges of Services, IPv4 first.
pub(crate) const SERVICES: [&str; 2] = ["10.96.0.0/16", "fd00:10:96::/112"];
/// Address ranges of all pods, IPv4 first.
pub(crate) const PODS: [&str; 2] = ["10.244.0.0/16", "fd00:10:244::/48"];
/// ClusterIP of the name server's Service.
pub(crate) const DNS: &str = "10.96.0.10";
/// Addresses of the control plane, IPv4 first.
pub(crate) const CONTROL_PLANE: [&str; 2] = ["10.89.0.1", "fd00:10:89::1"];
/// ClusterIPs of the API server's Service.
pub(crate) const KUBERNETES: [&str; 2] = ["10.96.0.1", "fd00:10:96::1"];

/// Addresses of a node, IPv4 first.
pub(crate) fn node_addresses(node: u8) -> [String; 2] {
    [format!("10.89.0.{}", 10 + node), format!("fd00:10:89::{:x}", 0x10 + u16::from(node))]
}

/// Pod ranges of a node, IPv4 first.
pub(crate) fn pod_ranges(node: u8) -> [String; 2] {
    [format!("10.244.{node}.0/24"), format!("fd00:10:244:{node:x}::/64")]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::plan::MAX_NODES;

    #[test]
    fn no_two_nodes_share_an_address() {
        let addresses: Vec<String> = (1..=MAX_NODES)
            .flat_map(|node| node_addresses(node).into_iter().chain(pod_ranges(node)))
            .collect();
        let mut once = addresses.clone();
        once.sort();
        once.dedup();
        assert_eq!(once.len(), addresses.len());
    }
}
