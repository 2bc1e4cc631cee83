//! Pure: capabilities that the agent needs.

/// Capabilities that the agent needs, each with its reason. A manifest gives it these, besides user 0, the host's
/// network and process namespaces, and the host's `/sys/fs/bpf` and `/sys/fs/cgroup`.
///
/// `tests/kernel/agent.rs` runs every agent with exactly these. Not needed are `DAC_OVERRIDE` (user 0 owns all files it
/// touches), `KILL` (the self-test's process is its own child) and `NET_RAW` (it opens TCP, UDP and netlink sockets
/// only).
pub const CAPABILITIES: [(&str, &str); 3] = [
    (
        "SYS_ADMIN",
        "enters pods' network namespaces (setns), for which nothing less is enough; it includes what loading and attaching \
         programs needs (BPF, PERFMON), which is therefore not asked for",
    ),
    (
        "NET_ADMIN",
        "ends stale connections in clients' namespaces, and those of requests that take too long in pods' \
         (SOCK_DESTROY); keeps the routes of a cluster without kube-proxy",
    ),
    ("SYS_PTRACE", "opens /proc/PID/ns/net of processes that have capabilities the agent has not"),
];

/// Bits of these capabilities in a process's sets (`include/uapi/linux/capability.h`).
const CAPABILITY_BITS: [(&str, u32); 3] =
    [("SYS_ADMIN", 21), ("NET_ADMIN", 12), ("SYS_PTRACE", 19)];

/// Returns the names of the needed capabilities that a set does not have. The set has one bit for each.
pub(crate) fn missing_capabilities(set: u64) -> Vec<&'static str> {
    let missing = CAPABILITY_BITS.into_iter().filter(|&(_, bit)| (set >> bit) & 1 == 0);
    missing.map(|(name, _)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_needed_capability_has_its_bit() {
        assert_eq!(missing_capabilities(0), CAPABILITIES.map(|(name, _)| name));
        assert_eq!(missing_capabilities(u64::MAX), [""; 0]);
        assert_eq!(missing_capabilities(1 << 21 | 1 << 12), ["SYS_PTRACE"]);
    }
}
