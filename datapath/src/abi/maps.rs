//! Pure: names of the maps: pins in `bpf/v<ABI>/` and symbols of the object.

/// Hash: [`FrontendKey`](super::FrontendKey) → service id (`u32`).
pub const FRONTENDS: &str = "FRONTENDS";
/// Mmapable array by service id: packed [`SvcState`](crate::load_balancing::SvcState) (`u64`).
pub const SVC_STATE: &str = "SVC_STATE";
/// Mmapable array by service id: packed [`SvcInfo`](crate::load_balancing::SvcInfo) (`u64`).
pub const SVC_INFO: &str = "SVC_INFO";
/// LRU hash: [`AffinityKey`](super::AffinityKey) → [`AffinityValue`](super::AffinityValue).
pub const AFFINITY: &str = "AFFINITY";
/// Mmapable array: backend numbers (`u64`), in extents.
pub const SLOTS: &str = "SLOTS";
/// Mmapable array by backend number: [`BackendValue`](super::BackendValue).
pub const BACKENDS: &str = "BACKENDS";
/// Hash of the open listeners of pods: [`ListenKey`](super::ListenKey) → [`ListenValue`](super::ListenValue).
pub const LISTEN: &str = "LISTEN";
/// Hash: netns cookie (`u64`) → number of its entries in `LISTEN` (`u32`). The programs count up; the agent
/// corrects it when it has removed entries.
pub const LISTENERS: &str = "LISTENERS";
/// Hash: netns cookie (`u64`) → [`PodValue`](super::PodValue).
pub const PODS: &str = "PODS";
/// Hash: [`ListenKey`](super::ListenKey) → [`PodPortValue`](super::PodPortValue), for pods with
/// [`POD_HAS_PORTS`](super::POD_HAS_PORTS).
pub const POD_PORTS: &str = "POD_PORTS";
/// Mmapable array by pod row: [`PodState`](super::PodState).
pub const POD_STATE: &str = "POD_STATE";
/// Mmapable array by `cpu * PODS_MAX + row`: [`PodCounters`](super::PodCounters). Behind the last possible CPU is
/// one more set of rows, which only user space writes.
pub const COUNTERS: &str = "COUNTERS";
/// Mmapable array of [`ResponseCounters`](super::ResponseCounters), with the same indexes as `COUNTERS`.
pub const RESPONSES: &str = "RESPONSES";
/// Mmapable array by the `CONTROL_*` numbers: single words (`u64`).
pub const CONTROL: &str = "CONTROL";
/// Ring buffer of [`KernelEvent`](super::KernelEvent)s for the agent.
pub const EVENTS: &str = "EVENTS";
/// Program array of `ingress`: the programs to which it and its successors jump. `suspects` is for possible probes of
/// the kubelet. Others are for protocols besides HTTP/1, for the rest of a long segment, and for buffered segments.
/// `TAIL_CALLS` in `agent/src/kernel/programs.rs` has the indexes.
pub const INGRESS: &str = "INGRESS";
/// Program array of `egress`: programs for other protocols than HTTP/1, and for the rest of a long segment.
pub const EGRESS: &str = "EGRESS";
/// Program array of `sockets`: programs that read the segments buffered before a connection was established.
pub const SOCKETS: &str = "SOCKETS";
/// LRU hash: [`BufferedSegmentKey`](super::BufferedSegmentKey) → [`BufferedSegment`](super::BufferedSegment).
pub const KEPT: &str = "KEPT";
/// LRU hash: [`ProbeKey`](super::ProbeKey) → end of its validity, CLOCK_MONOTONIC ns (`u64`).
pub const PROBES: &str = "PROBES";
/// Hash: an address of the node itself (16 bytes in memory order, IPv4 as mapped) → 1 (`u32`).
pub const NODE: &str = "NODE";
/// Array by socket cookie modulo its size: not 0 while a socket has that row of `CLIENTS` (`u64`).
pub const CLAIMS: &str = "CLAIMS";
/// Mmapable array by socket cookie modulo its size, a power of two: [`ConnectRecord`](super::ConnectRecord).
pub const CLIENTS: &str = "CLIENTS";
/// Socket storage of client sockets whose row of `CLIENTS` is taken: [`ConnectRecord`](super::ConnectRecord).
pub const OVERFLOW: &str = "OVERFLOW";
/// Hash: cookie of a socket whose record is in `OVERFLOW` (`u64`) → copy of the record, by which user space finds
/// it. A copy has the socket's [`netns_cookie`](super::ConnectRecord::netns_cookie), and goes with the connection.
pub const OVERFLOW_COPIES: &str = "OVERFLOW_COPIES";
/// LRU hash: [`BoundConnectKey`](super::BoundConnectKey) → [`BoundConnect`](super::BoundConnect).
pub const BOUND_CONNECTS: &str = "BOUND_CONNECTS";
/// LRU hash: cookie of a socket with a chosen local port (`u64`) → [`BoundConnectKey`](super::BoundConnectKey) of its
/// connection.
pub const BOUND_SOCKETS: &str = "BOUND_SOCKETS";
/// LRU hash: [`UdpFlowKey`](super::UdpFlowKey) with a frontend → number of the backend that gets the socket's
/// datagrams to it (`u32`). It counts only while the frontend's list names it.
pub const UDP_FLOWS: &str = "UDP_FLOWS";
/// LRU hash: [`UdpFlowKey`](super::UdpFlowKey) with a backend → [`UdpReplySource`](super::UdpReplySource).
pub const UDP_REPLIES: &str = "UDP_REPLIES";
/// Hash: cookie of an open UDP socket of which a connect or a datagram was redirected (`u64`) →
/// [`UdpSocket`](super::UdpSocket).
pub const UDP_SOCKETS: &str = "UDP_SOCKETS";
/// Hash: cookie of a meshed network namespace (`u64`) → 1 (`u32`). Connects and datagrams there go on unchanged, since
/// the mesh's proxy must see the address that was asked for. The agent writes it.
pub const MESHED_NETNS: &str = "MESHED_NETNS";
/// Socket storage of listeners and of connections that count: [`ServerSocket`](super::ServerSocket).
pub const CONNS: &str = "CONNS";
/// Socket storage of connections that speak HTTP/2: [`Http2Connection`](crate::h2::Http2Connection).
pub const STREAMS: &str = "STREAMS";
/// Map `CONNS` of the previous version, while its programs still count connections that they saw established.
pub const OLD_CONNS: &str = "OLD_CONNS";
/// Socket hash: an activator's address (16 bytes in memory order, IPv4 as mapped) → the socket that listens there
/// on all [`ACTIVATOR_PORTS`](super::ACTIVATOR_PORTS). The activator writes it.
pub const PORTS: &str = "PORTS";
/// Hash: socket cookie (`u64`) → [`CloseRequest`](super::CloseRequest). Not pinned: it lives as long as the agent
/// that fills it.
pub const ENDING: &str = "ENDING";
