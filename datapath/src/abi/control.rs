//! Pure: indexes of the words in the map `CONTROL`: counters of the node, and switches that the agent writes.
//!
//! A cache line has eight words. Words that all CPUs read often are in another line than words that change often.

/// Index in `CONTROL`: events that found the ring full.
pub const CONTROL_DROPPED: u32 = 0;
/// Index in `CONTROL`: connects to a frontend of mode `SelfTest`.
pub const CONTROL_SELF_TEST: u32 = 1;
/// Index in `CONTROL`: redirected connects without a [`ConnectRecord`](super::ConnectRecord). Memory was short, or they
/// are subflows of Multipath TCP.
pub const CONTROL_UNTRACKED: u32 = 2;
/// Index in `CONTROL`: connects that were led to an activator, because each picked pod of the node had no listener or
/// was left frozen.
pub const CONTROL_FALLBACK: u32 = 3;
/// Index in `CONTROL`: listeners that found `LISTEN` full.
pub const CONTROL_LISTEN_FULL: u32 = 4;
/// Index in `CONTROL`: connects that got no response within TCP's first retransmission timeout.
pub const CONTROL_UNANSWERED: u32 = 5;
/// Index in `CONTROL`: listeners beyond the [`LISTEN_PER_NAMESPACE`](super::LISTEN_PER_NAMESPACE) ports of their
/// namespace.
pub const CONTROL_LISTEN_OVER_QUOTA: u32 = 6;
/// Index in `CONTROL`: datagrams to a frontend of mode `SelfTest`.
pub const CONTROL_SELF_TEST_DATAGRAMS: u32 = 7;
/// Index in `CONTROL`: client sockets that use `OVERFLOW`. Every socket that closes reads it, so it shares no cache
/// line with the counters above.
pub const CONTROL_OVERFLOW: u32 = 8;
/// Index in `CONTROL`: number of entries that `MESHED_NETNS` should have; without any, no look-up takes place. The
/// agent writes it. It shares the line of the word above, which also changes rarely.
pub const CONTROL_MESHED_NETNS: u32 = 9;
/// Index in `CONTROL`: 1 once a socket with a chosen local port has connected to a service. Without any, no look-up
/// takes place.
pub const CONTROL_BOUND_CONNECTS: u32 = 10;
/// Index in `CONTROL`: 1 while connects and datagrams of kernel threads go on unchanged. The agent writes it.
pub const CONTROL_KERNEL_THREADS_LEFT: u32 = 11;
/// Index in `CONTROL`: 1 while each connection from the kubelet's cgroup is marked in `PROBES`. The agent writes it.
pub const CONTROL_KUBELET_MARKED: u32 = 12;
/// Index in `CONTROL`: end of the agent's promise to thaw frozen pods, CLOCK_MONOTONIC ns; 0: it has none. After the end,
/// connects pass over the pods of this node with [`POD_STANDBY`](super::POD_STANDBY). The agent writes it.
pub const CONTROL_THAWS_UNTIL: u32 = 13;
/// Index in `CONTROL`: redirected connects of TCP of which user space can read no record, for want of memory. There is
/// none, or it is in socket storage and has no copy. Subflows of Multipath TCP are not among them. It changes rarely, so
/// it shares the line of the words above.
pub const CONTROL_UNLISTED: u32 = 14;
/// Index in `CONTROL`: number of entries in `UDP_SOCKETS`. It changes with each connect of a resolver, so it shares
/// no cache line with the word above.
pub const CONTROL_UDP_SOCKETS: u32 = 16;
/// Number of words in `CONTROL`.
pub const CONTROL_WORDS: u32 = 24;
