//! Pure: paths, addresses and cgroups of one node. The other files of the crate take them from here.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Name of the bridge in the node's network namespace.
pub const BRIDGE_NAME: &str = "rouse0";
/// Address of the DNS server inside the node.
pub const DNS_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);
/// IPv4 network of ClusterIPs, with its prefix length.
pub const CLUSTER_IPS_V4: (Ipv4Addr, u8) = (Ipv4Addr::new(10, 96, 0, 0), 16);
/// IPv6 network of ClusterIPs, with its prefix length.
pub const CLUSTER_IPS_V6: (Ipv6Addr, u8) = (Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, 0), 112);
/// IPv4 address of the bridge: the pods' gateway, on which the activator listens.
pub const GATEWAY_V4: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 1);
/// IPv6 address of the bridge: the pods' gateway, on which the activator listens.
pub const GATEWAY_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x10, 0x244, 0, 0, 0, 0, 1);
/// Prefix length of the pods' IPv4 network.
pub const PODS_V4_PREFIX: u8 = 16;
/// Prefix length of the pods' IPv6 network.
pub const PODS_V6_PREFIX: u8 = 64;
/// IPv4 and IPv6 address of the client namespace.
pub const CLIENT_ADDRESSES: (Ipv4Addr, Ipv6Addr) =
    (Ipv4Addr::new(10, 244, 0, 2), Ipv6Addr::new(0xfd00, 0x10, 0x244, 0, 0, 0, 0, 2));

/// Error: a node name that cannot be used in paths.
#[derive(Debug, Error)]
#[error("node name {0:?} is not usable: use 1 to 32 of a-z, 0-9 and inner '-'")]
pub struct NodeNameError(String);

/// Paths and cgroups of the node with one name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeLayout {
    name: String,
}

impl NodeLayout {
    /// Returns the paths of node `name`: a DNS label of 1 to 32 characters.
    pub fn new(name: &str) -> Result<Self, NodeNameError> {
        if name.len() > 32 || !common::wire::is_dns_label(name) {
            return Err(NodeNameError(name.to_owned()));
        }
        Ok(Self { name: name.to_owned() })
    }

    /// Returns the name of the node.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Folder of everything that the node's removal deletes: `/run/rouse/NAME`.
    pub fn run_folder(&self) -> PathBuf {
        Path::new("/run/rouse").join(&self.name)
    }

    /// Folder of what may outlive the node: `/var/lib/rouse/NAME`.
    pub fn data_folder(&self) -> PathBuf {
        Path::new("/var/lib/rouse").join(&self.name)
    }

    /// Socket of the controller's services (Routes, Pods, Scale).
    pub fn controller_socket(&self) -> PathBuf {
        self.run_folder().join("controller.sock")
    }

    /// Socket of the autoscaler's service (Usage).
    pub fn autoscaler_socket(&self) -> PathBuf {
        self.run_folder().join("autoscaler.sock")
    }

    /// Mount point of the node's own bpffs.
    pub fn bpf(&self) -> PathBuf {
        self.run_folder().join("bpf")
    }

    /// Folder of mount points of the node's network namespaces.
    pub fn namespaces(&self) -> PathBuf {
        self.run_folder().join("netns")
    }

    /// Mount point of the node's network namespace.
    pub fn node_namespace(&self) -> PathBuf {
        self.namespaces().join("node")
    }

    /// Mount point of the clients' network namespace (`rouse run`).
    pub fn client_namespace(&self) -> PathBuf {
        self.namespaces().join("client")
    }

    /// Mount point of one pod's network namespace.
    pub fn pod_namespace(&self, uid: &str) -> PathBuf {
        self.namespaces().join(uid)
    }

    /// File that clients see in the place of `/etc/resolv.conf`.
    pub fn resolv_conf(&self) -> PathBuf {
        self.run_folder().join("resolv.conf")
    }

    /// Folder with one file for each process that runs a component of the node.
    pub fn processes(&self) -> PathBuf {
        self.run_folder().join("processes")
    }

    /// Folder of the pods' bundles and state files.
    pub fn pods(&self) -> PathBuf {
        self.run_folder().join("pods")
    }

    /// Folder of one pod: its bundles, state and `/etc` files.
    pub fn pod(&self, uid: &str) -> PathBuf {
        self.pods().join(uid)
    }

    /// State file of one pod, for a restart of the node's process.
    pub fn pod_state(&self, uid: &str) -> PathBuf {
        self.pod(uid).join("state.json")
    }

    /// Folder of the files of `/etc` that the containers of one pod share. No container has this name: it has a dot.
    pub fn pod_etc(&self, uid: &str) -> PathBuf {
        self.pod(uid).join("etc.d")
    }

    /// OCI bundle folder of one container.
    pub fn bundle(&self, uid: &str, container: &str) -> PathBuf {
        self.pod(uid).join(container)
    }

    /// State folder of the OCI runtime.
    pub fn runtime(&self) -> PathBuf {
        self.run_folder().join("runtime")
    }

    /// Folder of one pod's writable layers and volumes.
    pub fn pod_data(&self, uid: &str) -> PathBuf {
        self.pods_data().join(uid)
    }

    /// Folder of all pods' writable layers and volumes.
    pub fn pods_data(&self) -> PathBuf {
        self.data_folder().join("pods")
    }

    /// Folder of applied YAML files; the controller watches it.
    pub fn manifests(&self) -> PathBuf {
        self.data_folder().join("manifests")
    }

    /// Folder of objects with their status, written by the controller.
    pub fn objects(&self) -> PathBuf {
        self.data_folder().join("objects")
    }

    /// Folder of the image store: blobs, tags and unpacked files.
    pub fn images(&self) -> PathBuf {
        self.data_folder().join("images")
    }

    /// Folder of all containers' logs.
    pub fn logs(&self) -> PathBuf {
        self.data_folder().join("logs")
    }

    /// Log file of one container.
    pub fn log(&self, namespace: &str, pod: &str, container: &str) -> PathBuf {
        self.pod_logs(namespace, pod).join(format!("{container}.log"))
    }

    /// Folder of one pod's logs.
    pub fn pod_logs(&self, namespace: &str, pod: &str) -> PathBuf {
        self.logs().join(format!("{namespace}_{pod}"))
    }

    /// Cgroup of the node, below the mount point of a hierarchy.
    pub fn cgroup(&self, mount: &Path) -> PathBuf {
        mount.join(format!("rouse-{}", self.name))
    }

    /// Cgroup that holds all pods.
    pub fn pods_cgroup(&self, mount: &Path) -> PathBuf {
        self.cgroup(mount).join("pods")
    }

    /// Cgroup of clients (`rouse run`).
    pub fn clients_cgroup(&self, mount: &Path) -> PathBuf {
        self.cgroup(mount).join("clients")
    }

    /// Cgroup for runtime processes that are not created in a container's cgroup.
    pub fn runtime_cgroup(&self, mount: &Path) -> PathBuf {
        self.cgroup(mount).join("runtime")
    }

    /// Cgroup of one pod.
    pub fn pod_cgroup(&self, mount: &Path, uid: &str) -> PathBuf {
        self.pods_cgroup(mount).join(format!("pod{uid}"))
    }

    /// Cgroup of one container.
    pub fn container_cgroup(&self, mount: &Path, uid: &str, container: &str) -> PathBuf {
        self.pod_cgroup(mount, uid).join(container)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_no_dns_label_of_up_to_32_characters_is_refused() {
        for name in ["", "..", "a/b", "Rouse", "-a", &"a".repeat(33)] {
            assert!(NodeLayout::new(name).is_err(), "{name:?}");
        }
    }

    #[test]
    fn no_container_has_the_name_of_another_file_of_its_pod() {
        let layout = NodeLayout::new("rouse").unwrap();
        for path in [layout.pod_etc("1"), layout.pod_state("1")] {
            assert_eq!(path.parent(), layout.bundle("1", "web").parent());
            let name = path.file_name().and_then(|name| name.to_str()).unwrap();
            assert!(!common::wire::is_dns_label(name), "{name}");
        }
    }

    #[test]
    fn a_container_s_cgroup_names_its_pod() {
        let layout = NodeLayout::new("rouse").unwrap();
        assert_eq!(
            layout.container_cgroup(Path::new("/sys/fs/cgroup"), "1-2", "web"),
            Path::new("/sys/fs/cgroup/rouse-rouse/pods/pod1-2/web")
        );
    }
}
