//! Zones for the nodes of the shared cluster, for the length of a test.

use tests::installed_cluster::RouseCluster;

/// Nodes of the cluster with their zones.
pub(crate) const NODE_ZONES: [(&str, &str); 2] = [("node1", "a"), ("node2", "b")];

/// Nodes with labels of zones, until drop.
pub(crate) struct ZonedNodes<'a>(&'a RouseCluster);

impl<'a> ZonedNodes<'a> {
    /// Labels each node with its zone.
    pub(crate) fn label(rouse: &'a RouseCluster) -> Self {
        let nodes = Self(rouse);
        for (node, zone) in NODE_ZONES {
            let label = format!("topology.kubernetes.io/zone={zone}");
            let args = ["label", "node", node, "--overwrite", label.as_str()];
            rouse.cluster.kubectl(&args).expect("an operator may");
        }
        nodes
    }
}

impl Drop for ZonedNodes<'_> {
    fn drop(&mut self) {
        for (node, _) in NODE_ZONES {
            let args = ["label", "node", node, "topology.kubernetes.io/zone-"];
            let _labelled = self.0.cluster.kubectl(&args);
        }
    }
}
