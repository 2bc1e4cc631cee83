//! Pure: where everything of one node lies. The only file that spells these paths.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Bridge in the node's network namespace.
pub const BRIDGE: &str = "rouse0";
/// Where the names of services are answered.
pub const DNS: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);
/// IPv4 network of ClusterIPs, with its prefix length.
pub const CLUSTER_V4: (Ipv4Addr, u8) = (Ipv4Addr::new(10, 96, 0, 0), 16);
/// IPv6 network of ClusterIPs, with its prefix length.
pub const CLUSTER_V6: (Ipv6Addr, u8) = (Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, 0), 112);
/// The bridge's own address: gateway of the pods, and where the activator listens.
pub const GATEWAY_V4: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 1);
/// The same in IPv6.
pub const GATEWAY_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x10, 0x244, 0, 0, 0, 0, 1);
/// Prefix length of the pods' IPv4 network.
pub const PODS_V4_PREFIX: u8 = 16;
/// Prefix length of the pods' IPv6 network.
pub const PODS_V6_PREFIX: u8 = 64;
/// Address of the client namespace.
pub const CLIENT: (Ipv4Addr, Ipv6Addr) =
    (Ipv4Addr::new(10, 244, 0, 2), Ipv6Addr::new(0xfd00, 0x10, 0x244, 0, 0, 0, 0, 2));

/// A node's name that cannot be used.
#[derive(Debug, Error)]
#[error("node name {0:?} is not usable: use 1 to 32 of a-z, 0-9 and inner '-'")]
pub struct BadName(String);

/// All paths of the node of one name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    name: String,
}

impl Layout {
    /// The layout of node `name`: 1 to 32 characters of a DNS label.
    pub fn new(name: &str) -> Result<Self, BadName> {
        if name.len() > 32 || !common::wire::is_label(name) {
            return Err(BadName(name.to_owned()));
        }
        Ok(Self { name: name.to_owned() })
    }

    /// The node's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Everything that dies with the node: `/run/rouse/NAME`.
    pub fn run(&self) -> PathBuf {
        Path::new("/run/rouse").join(&self.name)
    }

    /// Everything that outlives it: `/var/lib/rouse/NAME`.
    pub fn data(&self) -> PathBuf {
        Path::new("/var/lib/rouse").join(&self.name)
    }

    /// Socket of the controller's services (Routes, Pods, Scale).
    pub fn controller_socket(&self) -> PathBuf {
        self.run().join("controller.sock")
    }

    /// Socket of the autoscaler's service (Usage).
    pub fn autoscaler_socket(&self) -> PathBuf {
        self.run().join("autoscaler.sock")
    }

    /// Mount point of the node's own bpffs.
    pub fn bpf(&self) -> PathBuf {
        self.run().join("bpf")
    }

    /// Folder of the network namespaces' mount points.
    pub fn namespaces(&self) -> PathBuf {
        self.run().join("netns")
    }

    /// The node's network namespace.
    pub fn node_namespace(&self) -> PathBuf {
        self.namespaces().join("node")
    }

    /// The network namespace of clients (`rouse run`).
    pub fn client_namespace(&self) -> PathBuf {
        self.namespaces().join("client")
    }

    /// The network namespace of one pod.
    pub fn pod_namespace(&self, uid: &str) -> PathBuf {
        self.namespaces().join(uid)
    }

    /// What clients have in the place of `/etc/resolv.conf`.
    pub fn resolv_conf(&self) -> PathBuf {
        self.run().join("resolv.conf")
    }

    /// Folder of the processes that make up the node, one file each.
    pub fn processes(&self) -> PathBuf {
        self.run().join("processes")
    }

    /// Folder of the pods' bundles and states.
    pub fn pods(&self) -> PathBuf {
        self.run().join("pods")
    }

    /// Folder of one pod.
    pub fn pod(&self, uid: &str) -> PathBuf {
        self.pods().join(uid)
    }

    /// What is remembered of one pod across restarts.
    pub fn pod_state(&self, uid: &str) -> PathBuf {
        self.pod(uid).join("state.json")
    }

    /// Bundle of one container.
    pub fn bundle(&self, uid: &str, container: &str) -> PathBuf {
        self.pod(uid).join(container)
    }

    /// State of the OCI runtime.
    pub fn runtime(&self) -> PathBuf {
        self.run().join("runtime")
    }

    /// Writable layers and volumes of one pod.
    pub fn pod_data(&self, uid: &str) -> PathBuf {
        self.pods_data().join(uid)
    }

    /// Folder of the pods' writable layers and volumes.
    pub fn pods_data(&self) -> PathBuf {
        self.data().join("pods")
    }

    /// YAML as applied; the controller watches it.
    pub fn manifests(&self) -> PathBuf {
        self.data().join("manifests")
    }

    /// Objects with their status, written by the controller.
    pub fn objects(&self) -> PathBuf {
        self.data().join("objects")
    }

    /// The image store.
    pub fn images(&self) -> PathBuf {
        self.data().join("images")
    }

    /// Folder of all logs.
    pub fn logs(&self) -> PathBuf {
        self.data().join("logs")
    }

    /// Log of one container.
    pub fn log(&self, namespace: &str, pod: &str, container: &str) -> PathBuf {
        self.pod_logs(namespace, pod).join(format!("{container}.log"))
    }

    /// Logs of one pod.
    pub fn pod_logs(&self, namespace: &str, pod: &str) -> PathBuf {
        self.logs().join(format!("{namespace}_{pod}"))
    }

    /// The node's cgroup below the mount point of a hierarchy.
    pub fn cgroup(&self, mount: &Path) -> PathBuf {
        mount.join(format!("rouse-{}", self.name))
    }

    /// The cgroup that holds the pods.
    pub fn pods_cgroup(&self, mount: &Path) -> PathBuf {
        self.cgroup(mount).join("pods")
    }

    /// The cgroup of clients (`rouse run`).
    pub fn clients_cgroup(&self, mount: &Path) -> PathBuf {
        self.cgroup(mount).join("clients")
    }

    /// The cgroup in which a runtime runs that moves its containers by itself.
    pub fn runtime_cgroup(&self, mount: &Path) -> PathBuf {
        self.cgroup(mount).join("runtime")
    }

    /// The cgroup of one pod.
    pub fn pod_cgroup(&self, mount: &Path, uid: &str) -> PathBuf {
        self.pods_cgroup(mount).join(format!("pod{uid}"))
    }

    /// The cgroup of one container.
    pub fn container_cgroup(&self, mount: &Path, uid: &str, container: &str) -> PathBuf {
        self.pod_cgroup(mount, uid).join(container)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_would_leave_its_folder_is_refused() {
        for name in ["", "..", "a/b", "Rouse", "-a", &"a".repeat(33)] {
            assert!(Layout::new(name).is_err(), "{name:?}");
        }
    }

    #[test]
    fn a_pod_is_found_by_its_cgroup() {
        let layout = Layout::new("rouse").unwrap();
        assert_eq!(
            layout.container_cgroup(Path::new("/sys/fs/cgroup"), "1-2", "web"),
            Path::new("/sys/fs/cgroup/rouse-rouse/pods/pod1-2/web")
        );
    }
}
