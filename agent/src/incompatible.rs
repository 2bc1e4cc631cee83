//! Pure: incompatibilities of a pod or a node, recognized by marks that are visible from outside.

use std::fmt;

use datapath::abi;

/// Owner of a foreign program on the same hooks, recognized by the program's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ForeignProgramOwner {
    /// Cilium's socket load balancer (`bpf/bpf_sock.c`: `cil_sock4_connect`, …).
    Cilium,
    /// Calico's connect-time load balancer (`felix/bpf-gpl/connect_balancer*.c`: `calico_connect_v4`, …).
    Calico,
    /// Any other owner, or one without a known name.
    Other,
}

impl ForeignProgramOwner {
    /// Returns the owner of a program by its name, of which the kernel keeps 15 bytes.
    pub fn from_program_name(name: &str) -> Self {
        match name {
            _ if name.starts_with("cil_") => Self::Cilium,
            _ if name.starts_with("calico_") || name.starts_with("cali_") => Self::Calico,
            _ => Self::Other,
        }
    }

    /// Returns the owner's name in metrics and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cilium => "cilium",
            Self::Calico => "calico",
            Self::Other => "other",
        }
    }
}

/// Incompatibility of a pod: Rouse cannot count it, or cannot see its listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Incompatibility {
    /// The pod's processes run in a sandbox with sockets of its own, which the node's kernel does not see.
    Sandbox(&'static str),
    /// The pod's processes use the network namespace of the node.
    HostNetwork,
    /// Rules in the pod's namespace redirect connections, as for a mesh's sidecar.
    Redirected,
    /// No pod slot is free: the maps count as many pods of the node as they can.
    NoFreePodSlot,
}

impl fmt::Display for Incompatibility {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sandbox(name) => write!(
                out,
                "runs in a {name} sandbox, whose sockets the node's kernel does not see: its requests cannot be counted, \
                 nor its readiness learnt from its listener; use another runtime class for this service"
            ),
            Self::HostNetwork => write!(
                out,
                "uses the node's own network (hostNetwork), where its listener and its requests cannot be told from \
                 others': it never gets ready and is not counted; take hostNetwork off this service"
            ),
            Self::Redirected => write!(
                out,
                "its network namespace redirects connections, as the sidecar of a mesh does: what comes through there is \
                 not counted; keep the sidecar off this service"
            ),
            Self::NoFreePodSlot => write!(
                out,
                "its node runs more pods of services than the {} that Rouse counts there: it gets ready when another has \
                 gone; spread services over more nodes",
                abi::PODS_MAX - 1
            ),
        }
    }
}

/// Programs that run a pod's processes in a sandbox, by the prefix of their name (of which the kernel keeps 15 bytes).
const SANDBOXES: [(&str, &str); 7] = [
    ("runsc-sandbox", "gVisor"),
    ("runsc", "gVisor"),
    ("qemu-system-", "Kata"),
    ("qemu-kvm", "Kata"),
    ("cloud-hyperviso", "Kata"),
    ("firecracker", "Kata"),
    ("dragonball", "Kata"),
];

/// Returns the sandbox that a process of a pod's cgroup runs, by `/proc/PID/comm` and the first word of its command
/// line. gVisor executes itself again from `/proc/self/exe`, so only its command line shows the name.
pub fn detect_sandbox(comm: &str, command: &str) -> Option<Incompatibility> {
    let program = command.rsplit('/').next().unwrap_or_default();
    let found =
        SANDBOXES.iter().find(|(begin, _)| comm.starts_with(begin) || program.starts_with(begin));
    found.map(|(_, name)| Incompatibility::Sandbox(name))
}

/// Returns true if a namespace has a table that rewrites addresses: iptables' `nat`, by `/proc/net/ip_tables_names` or
/// its IPv6 counterpart.
pub fn has_nat_table(tables: &str) -> bool {
    tables.lines().any(|table| table == "nat")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_programs_are_recognized_by_their_names() {
        let owners = ["cil_sock4_conne", "calico_connect_", "cali_ctlb_v4", "sd_fw_ingress", ""];
        let owners = owners.map(|name| ForeignProgramOwner::from_program_name(name).name());
        assert_eq!(owners, ["cilium", "calico", "calico", "other", "other"]);
    }

    #[test]
    fn sandboxes_are_recognized_by_the_processes_of_the_pods_cgroup() {
        let cases = [
            ("exe", "runsc-sandbox", Some("gVisor")),
            ("runsc-gofer", "runsc-gofer", Some("gVisor")),
            ("qemu-system-x86", "/usr/bin/qemu-system-x86_64", Some("Kata")),
            ("cloud-hyperviso", "/opt/kata/bin/cloud-hypervisor", Some("Kata")),
            ("pause", "/pause", None),
            ("node", "node", None),
            ("my-runsc", "/bin/my-runsc", None),
        ];
        for (comm, command, wanted) in cases {
            assert_eq!(
                detect_sandbox(comm, command),
                wanted.map(Incompatibility::Sandbox),
                "{comm}"
            );
        }
    }

    #[test]
    fn a_nat_table_in_a_pod_is_a_redirection() {
        assert!(has_nat_table("filter\nnat\n"));
        assert!(!has_nat_table("filter\nmangle\n"));
        assert!(!has_nat_table(""));
    }
}
