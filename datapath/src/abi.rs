//! Pure: layout of all data that the eBPF programs and the agent share.
//!
//! Types have integers and arrays of integers only, with explicit padding and asserted sizes. Every change of layout or
//! meaning raises [`ABI_VERSION`]: pins live in a folder named after it, and the agent refuses an object of another
//! version.
//!
//! A connect finds its pod in these steps: `FRONTENDS[address, port, protocol]` → service id →
//! [`SvcState`](crate::load_balancing::SvcState) in `SVC_STATE` → extent of `SLOTS` → backend number → `BACKENDS`.
//! Writers fill new backends and a new extent first, or change entries of the list's own extent, each to another backend
//! of the service. Then they store one word of `SVC_STATE`. Numbers and extents freed by that are in quarantine for
//! [`QUARANTINE_NS`]. A reader that was preempted for longer finds the words changed when it
//! [reads](crate::load_balancing::ServiceReading) them again, and starts over.

mod bound_connects;
mod close_request;
mod connection_activity;
mod control;
mod kernel_events;
mod kernel_fields;
pub mod maps;
mod response_counters;
mod udp_sockets;

use core::mem::size_of;

pub use self::{
    bound_connects::{BoundConnect, BoundConnectKey},
    close_request::{
        CLOSE_AT_POSITION, CLOSE_DONE, CLOSE_NOT_FOUND, CLOSE_NOT_REACHED, CLOSE_SKIPPED,
        CloseRequest,
    },
    connection_activity::ConnectionActivity,
    control::*,
    kernel_events::{
        EVENT_GROWTH, EVENT_IDLE, EVENT_LISTEN, EVENT_LISTENER_CLOSED, EVENT_STANDBY_CONNECT,
        IdleEvent, KernelEvent,
    },
    kernel_fields::{KERNEL_THREAD_FLAG, SOCK_HEAD_BYTES, SockFieldOffsets, SocketBit, TaskFlag},
    response_counters::*,
    udp_sockets::{UdpFlowKey, UdpReplySource, UdpSocket},
};

/// Version of everything in this file and its folder, of [`crate::load_balancing`]'s packing and of the maps' meaning.
pub const ABI_VERSION: u32 = 9;

/// Mark in the object's read-only data, by which the agent knows the version of an object before it loads it.
pub const ABI_MARK: [u8; 16] = *b"rouse-abi-000009";

/// Quarantine of a freed backend, extent or service id before reuse, in ns.
///
/// A connect runs for microseconds, so a second covers nearly any preemption on a live machine. For the others the
/// connect [reads again](crate::load_balancing::ServiceReading) the words by which it found its backend.
pub const QUARANTINE_NS: u64 = 1_000_000_000;

/// Most frontends (address and port) by default: two families of 16 384 services. Settings of the agent name other
/// sizes for the maps of frontends, services, lists, backends, and of clients.
pub const FRONTENDS_MAX: u32 = 32_768;
/// Most service ids by default: one for each frontend, the two activator lists, and some in quarantine.
pub const SERVICES_MAX: u32 = 40_960;
/// Most backend numbers in lists by default, including extents in quarantine. Each backend fits in two lists, such as
/// those of a Route and of one tag, each once in force and once in quarantine.
pub const SLOTS_MAX: u32 = 131_072;
/// Most different backends of all lists by default.
pub const BACKENDS_MAX: u32 = 32_768;
/// Most clients that keep a backend by default, each counted once for every frontend. Beyond them, those that connected
/// longest ago get another backend.
pub const AFFINITY_MAX: u32 = 16_384;
/// Most pairs of an unconnected UDP socket and a frontend that are remembered, on up to 64 CPUs. Beyond them, those
/// that were used longest ago are forgotten: the next datagram may go to another backend. The agent sets 256 for each
/// CPU if that is more, for the reason given at [`PROBES_MAX`].
pub const UDP_FLOWS_MAX: u32 = 16_384;
/// Most open UDP sockets of which a connect or a datagram was redirected. Those of further sockets go on unchanged.
pub const UDP_SOCKETS_MAX: u32 = 65_536;
/// Most pods of Rouse on one node, plus one: row 0 means none. Kubernetes' own limit is 110 to 500.
pub const PODS_MAX: u32 = 1_024;
/// Most pairs of a pod of this node and a port that counts besides the serving port.
pub const POD_PORTS_MAX: u32 = 4_096;
/// Most pairs of namespace and port with a listener.
pub const LISTEN_MAX: u32 = 16_384;
/// Most entries in `LISTEN` of one namespace, so that none fills the map alone. The serving port and the ports of
/// `POD_PORTS` are always entered as well. So 963 namespaces fit, or 722 if all of `POD_PORTS` is in use. Further
/// listeners of a pod are not needed.
pub const LISTEN_PER_NAMESPACE: u32 = 16;
/// Most namespaces whose entries in `LISTEN` are counted.
pub const LISTENERS_MAX: u32 = 4_096;
/// Rows for client sockets by default, a power of two: 576 KiB. With 1 000 open sockets, one connect in eight finds its
/// row taken.
pub const CLIENTS_MAX: u32 = 8_192;
/// Most copies of records in socket storage. Beyond them, connections to endpoints stay open when their endpoint leaves,
/// and only scans of all clients find connections to Rouse's pods.
pub const OVERFLOW_COPIES_MAX: u32 = 16_384;
/// Most connections from chosen local ports that are remembered, on up to 16 CPUs. Of those beyond them the kernel
/// refuses a second one to the same backend. The agent sets 256 for each CPU if that is more, as for [`PROBES_MAX`].
pub const BOUND_CONNECTS_MAX: u32 = 4_096;
/// Time for which the kernel keeps a closed connection in TIME_WAIT, in ns (`TCP_TIMEWAIT_LEN`).
pub const TIME_WAIT_NS: u64 = 60_000_000_000;
/// Most meshed network namespaces. Connects of further ones are redirected like others.
pub const MESHED_NETNS_MAX: u32 = 1_024;
/// Most known addresses of the node itself. Probes of the kubelet from further addresses are counted as requests.
pub const NODE_MAX: u32 = 1_024;
/// Most connections to close in one walk over a namespace's sockets.
pub const ENDING_MAX: u32 = 4_096;
/// Most activator addresses in one network namespace.
pub const PORTS_MAX: u32 = 16;
/// First and last port of services at the activators; one listener serves them all.
pub const ACTIVATOR_PORTS: [u16; 2] = [20_000, 29_999];
/// Bytes of the event ring: 2 000 events. Events only wake the agent; losing one is harmless.
pub const EVENTS_BYTES: u32 = 65_536;

/// Service id of the list of activators with an IPv4 address.
pub const ACTIVATORS_V4: u32 = 0;
/// Service id of the list of activators with an IPv6 address.
pub const ACTIVATORS_V6: u32 = 1;
/// Service id of the self-test: its mode is `SelfTest`, and [`SELF_TEST_FRONTEND`] maps to it.
pub const SELF_TEST_SERVICE: u32 = 2;
/// First service id for frontends of the RouteTable.
pub const FIRST_SERVICE: u32 = 3;

/// Frontend of the self-test: 192.0.0.8, the IPv4 dummy address (RFC 7600), at which no host can listen; port 1.
pub const SELF_TEST_FRONTEND: FrontendKey = FrontendKey {
    address: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 192, 0, 0, 8],
    port_be: 1u16.to_be(),
    protocol: IPPROTO_TCP,
    reserved: 0,
};
/// Frontend of the self-test for datagrams.
pub const SELF_TEST_DATAGRAM_FRONTEND: FrontendKey =
    FrontendKey { protocol: IPPROTO_UDP, ..SELF_TEST_FRONTEND };
/// Number of frontends of the self-test.
pub const SELF_TEST_FRONTENDS: u32 = 2;

/// IP protocol number of TCP.
pub const IPPROTO_TCP: u8 = 6;
/// IP protocol number of UDP.
pub const IPPROTO_UDP: u8 = 17;

/// Address and port that clients connect to: key of `FRONTENDS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FrontendKey {
    /// Address in network byte order; IPv4 as `::ffff:a.b.c.d`.
    pub address: [u8; 16],
    /// Port, network byte order.
    pub port_be: u16,
    /// IP protocol number: [`IPPROTO_TCP`] or [`IPPROTO_UDP`].
    pub protocol: u8,
    /// Padding, always zero: the kernel compares keys bytewise.
    pub reserved: u8,
}
const _: () = assert!(size_of::<FrontendKey>() == 20);

/// Target of connects: value of `BACKENDS`. All fields but `open_connections`, `unanswered_ns` and `connect_event` are
/// constant while any list names it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackendValue {
    /// Address in network byte order; IPv4 as `::ffff:a.b.c.d`.
    pub address: [u8; 16],
    /// Netns cookie of a pod on this node, whose listener `connect` checks; 0: elsewhere, unknown, or not seen open.
    pub netns_cookie: u64,
    /// Row of a pod on this node; 0: on another node or unknown.
    pub pod_slot: u32,
    /// Port, network byte order; 0: the service's own port at the activators.
    pub port_be: u16,
    /// Padding that is always zero.
    pub reserved: u16,
    /// Number of uses of this backend number, so that a socket of an earlier use does not change the gauge.
    pub generation: u64,
    /// Open connections from this node. Only the kernel writes it while the number is in use.
    pub open_connections: u64,
    /// Time at which a connect last got no response within TCP's first timeout (1 s), CLOCK_MONOTONIC; 0: never.
    pub unanswered_ns: u64,
    /// Not 0: the next connect that is led there sends an [`EVENT_STANDBY_CONNECT`] and clears this word. The agent writes
    /// it for pods of other nodes with a standby order.
    ///
    /// It fills a cache line, so that gauges of neighbours do not share one.
    pub connect_event: u64,
}
const _: () = assert!(size_of::<BackendValue>() == 64);

/// Client of a frontend that keeps its backend: key of `AFFINITY`. A client is a network namespace, as kube-proxy tells
/// clients apart by their address.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AffinityKey {
    /// Cookie of the client's network namespace.
    pub netns_cookie: u64,
    /// Service id of the frontend.
    pub service_id: u32,
    /// Padding, always zero: the kernel compares keys bytewise.
    pub reserved: u32,
}
const _: () = assert!(size_of::<AffinityKey>() == 16);

/// Backend that a client keeps: value of `AFFINITY`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AffinityValue {
    /// Time of the client's last connect, CLOCK_MONOTONIC ns.
    pub connected_ns: u64,
    /// Number of the backend. It counts only while the frontend's list names it.
    pub backend: u32,
    /// Padding that is always zero.
    pub reserved: u32,
}
const _: () = assert!(size_of::<AffinityValue>() == 16);

/// Time for which connects prefer other backends after one got no response. Kubernetes calls a node lost after 40 s; a
/// late response or a lost packet must not cost a pod more than this.
pub const AVOID_UNANSWERED_NS: u64 = 10_000_000_000;

/// Namespace and port of a listener: key of `LISTEN`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ListenKey {
    /// Cookie of the network namespace.
    pub netns_cookie: u64,
    /// Port, host byte order.
    pub port: u32,
    /// Padding, always zero: the kernel compares keys bytewise.
    pub reserved: u32,
}
const _: () = assert!(size_of::<ListenKey>() == 16);

/// Open listeners of one namespace and port: value of `LISTEN`.
///
/// The kernel counts up and down and never deletes; the agent removes entries whose listeners have closed.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListenValue {
    /// Listeners that other namespaces can reach.
    pub reachable: u32,
    /// Listeners among `reachable` whose bind was widened from loopback to any address.
    pub widened: u32,
    /// Listeners on loopback only, which are unreachable from outside the namespace.
    pub loopback: u32,
    /// `WIDENED_*` bits of widened binds and `SERVES_*` bits of opened listeners, since the last listener closed. The
    /// update is not atomic: of two listeners that open at the same moment, one may leave no bit.
    pub families: u32,
    /// CLOCK_MONOTONIC of the latest listen, ns.
    pub listening_since_ns: u64,
}
const _: () = assert!(size_of::<ListenValue>() == 24);

/// Bit of [`ListenValue::families`]: 127.0.0.1 became 0.0.0.0.
pub const WIDENED_V4: u32 = 1;
/// Bit of [`ListenValue::families`]: ::1 became ::.
pub const WIDENED_V6: u32 = 2;
/// Bits of [`ListenValue::families`] about widened binds.
pub const WIDENED_FAMILIES: u32 = WIDENED_V4 | WIDENED_V6;
/// Bit of [`ListenValue::families`]: IPv4 clients are served.
pub const SERVES_V4: u32 = 4;
/// Bit of [`ListenValue::families`]: IPv6 clients are served.
pub const SERVES_V6: u32 = 8;

/// Pod whose requests are counted, on this node: value of `PODS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PodValue {
    /// Row of the pod in `POD_STATE`, `COUNTERS` and `RESPONSES`, from 1.
    pub slot: u32,
    /// Serving port, host byte order; 0: no connection counts as one to it.
    pub port: u16,
    /// Any of the `POD_*` bits.
    pub flags: u16,
}
const _: () = assert!(size_of::<PodValue>() == 8);

/// Flag of [`PodValue`]: a bind of the serving port to loopback is widened to any address.
pub const POD_WIDEN_BIND: u16 = 1;
/// Flag of [`PodValue`]: a reachable listener on the serving port is not in `LISTEN`, because the eBPF programs did not
/// see it open. No agent sets it: for such a pod, it writes netns cookie 0 into [`BackendValue`] instead.
pub const POD_LISTENER_FOUND: u16 = 4;
/// Flag of [`PodValue`]: further ports of the pod count, which are in `POD_PORTS`.
pub const POD_HAS_PORTS: u16 = 8;
/// Flag of [`PodValue`]: the serving port is opaque, as one with [`POD_PORT_OPAQUE`].
pub const POD_OPAQUE: u16 = 16;
/// Flag of [`PodValue`]: the pod is frozen, or about to be. Each connection that any of its ports accepts sends an
/// [`EVENT_GROWTH`], whether it counts or not. Once the agent has [broken its promise](CONTROL_THAWS_UNTIL), connects of
/// this node pass the pod over.
///
/// Programs that do not know the flag send none, and no other flag has its bit, so it needs no version of its own.
pub const POD_STANDBY: u16 = 32;

/// Port of a pod that counts besides the serving port: value of `POD_PORTS`. All ports of a pod share the pod's row.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PodPortValue {
    /// Any of the `POD_PORT_*` bits.
    pub flags: u32,
}
const _: () = assert!(size_of::<PodPortValue>() == 4);

/// Flag of [`PodPortValue`]: the port is opaque. Each of its connections is one request, whatever bytes it carries. The
/// request is in flight from the accept to the close, and its status is not seen.
///
/// While connections of the kubelet are not [marked](CONTROL_KUBELET_MARKED), one from the node itself that brings no
/// byte may be a probe. It counts in [`PodState::awaiting_first_request`], and its request begins with its first byte.
pub const POD_PORT_OPAQUE: u32 = 1;

/// Gauges, totals and the event threshold of one pod, shared by all CPUs: value of `POD_STATE`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PodState {
    /// Requests in flight. Updated without a read, so it may be negative for a moment: read it as `i64` and clamp at 0.
    pub in_flight: u64,
    /// Threshold of requests in flight, one more than the agent last reported. A request that begins at or above it
    /// sends one event, which clears the threshold. 1: any request that begins sends one. 0: none does.
    pub event_threshold: u64,
    /// Accepted connections that are open.
    pub connections: u64,
    /// Open connections that have not brought a first request yet.
    pub awaiting_first_request: u64,
    /// CLOCK_MONOTONIC of the latest request end or new connection, ns.
    pub last_activity_ns: u64,
    /// Connections whose message boundaries were lost.
    pub desynced_connections: u64,
    /// Open connections with an opaque estimate of requests.
    pub opaque_connections: u64,
    /// Responses without a request, which are not counted elsewhere.
    pub stray_responses: u64,
}
const _: () = assert!(size_of::<PodState>() == 64);

/// Running totals of one pod on one CPU: value of `COUNTERS`.
///
/// A writer adds 1 to `write_begin`, adds to the totals, and adds 1 to `write_end`. A reader reads `write_end` first
/// and `write_begin` last, and accepts the row if they are equal. Rows are written under a
/// connection's lock, which keeps interrupts away.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PodCounters {
    /// Writes that have begun.
    pub write_begin: u64,
    /// Requests that have begun.
    pub started: u64,
    /// Requests that have ended.
    pub finished: u64,
    /// Sum of the times requests began, CLOCK_MONOTONIC ns, wrapping.
    pub started_sum_ns: u64,
    /// Sum of the times requests ended, CLOCK_MONOTONIC ns, wrapping.
    pub finished_sum_ns: u64,
    /// Not 0: a connection of the pod that becomes idle sends an [`IdleEvent`]. The agent writes it, in the rows of all
    /// CPUs. Programs that do not know the flag send none.
    pub idle_events: u64,
    /// Padding to a cache line, always zero.
    pub reserved: u64,
    /// Writes that have ended.
    pub write_end: u64,
}
const _: () = assert!(size_of::<PodCounters>() == 64);

impl ResponseCounters {
    /// Returns the row as words, in the order of the fields.
    pub const fn words(self) -> [u64; RESPONSE_WORDS] {
        // SAFETY: `repr(C)` with words only, and the same number of them.
        unsafe { core::mem::transmute(self) }
    }

    /// Returns the row from its words, in the order of the fields.
    pub const fn from_words(words: [u64; RESPONSE_WORDS]) -> Self {
        // SAFETY: the layout is that of `words`; every bit pattern is valid.
        unsafe { core::mem::transmute(words) }
    }
}

/// Connect record: state of a client socket with a rewritten connect. Value of `CLIENTS` and `OVERFLOW`.
///
/// Allocating socket storage costs a connect 1 µs, a row of an array nearly nothing. A socket's row is its cookie
/// modulo the number of rows; while another socket has that row, it uses storage. Rows are freed when the socket closes
/// (sock_release). The kernel does not report that for its own sockets, such as those of a mount. Their rows stay
/// taken, and at worst all sockets use storage.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectRecord {
    /// Address that the application asked for, as in [`FrontendKey`]; getpeername returns it.
    pub original_address: [u8; 16],
    /// Address of the backend that the connect was rewritten to.
    pub backend_address: [u8; 16],
    /// Generation of the backend at the connect; 0 once the socket no longer counts in its gauge.
    pub generation: u64,
    /// Cookie of the socket; 0 once it has released its row. In storage it stays.
    pub socket_cookie: u64,
    /// Number of the backend in `BACKENDS`.
    pub backend: u32,
    /// Port that the application asked for, network byte order.
    pub original_port_be: u16,
    /// Port that the connect was rewritten to, network byte order.
    pub backend_port_be: u16,
    /// Cookie of the socket's network namespace, with [`NETNS_OF_ROUTED`] or without; 0 once the socket is no longer
    /// connected to the backend.
    pub netns_cookie: u64,
}
const _: () = assert!(size_of::<ConnectRecord>() == 8 * CONNECT_RECORD_WORDS);

/// Flag of [`ConnectRecord::netns_cookie`]: the backend is one of Rouse's pods or activators. Without it, the backend is
/// an endpoint of a Service of the cluster, and the connection is ended once the endpoint has left.
///
/// The kernel counts cookies of namespaces up from 1, so none has this bit.
pub const NETNS_OF_ROUTED: u64 = 1 << 63;

/// Number of words in [`ConnectRecord`].
pub const CONNECT_RECORD_WORDS: usize = 8;

impl ConnectRecord {
    /// Returns the record from its words, in memory order.
    pub const fn from_words(words: [u64; CONNECT_RECORD_WORDS]) -> Self {
        // SAFETY: the sizes are equal, and the fields are integers without padding; every bit pattern is valid.
        unsafe { core::mem::transmute(words) }
    }

    /// Returns the cookie of the socket's network namespace; `None` once the socket is no longer connected to the
    /// backend.
    pub const fn namespace(&self) -> Option<u64> {
        match self.netns_cookie & !NETNS_OF_ROUTED {
            0 => None,
            cookie => Some(cookie),
        }
    }

    /// Returns true if the backend is one of Rouse's pods or activators, and not an endpoint of a Service of the
    /// cluster.
    pub const fn is_routed(&self) -> bool {
        self.netns_cookie & NETNS_OF_ROUTED != 0
    }
}

/// State of a listener, or of a connection that counts: value of `CONNS`.
///
/// On kernels before 5.15, each accepted connection begins with a copy of its listener's value.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerSocket {
    /// Netns cookie of the listener, and of a connection once it is established; 0: not known.
    pub netns_cookie: u64,
    /// Cgroup id of the process that bound the listener, if that bind was recorded.
    pub cgroup_id: u64,
    /// Row of the pod; 0: none, or no port that counts. Set when the connection is established.
    pub pod_slot: u32,
    /// Any of the `CONN_*` bits.
    pub flags: u32,
    /// Lock held while `http`, or the connection's entry of `STREAMS`, changes: packets of one connection can meet on
    /// two CPUs. It is here and not in [`HttpConnectionState`], since before 6.11 the kernel looks for a lock in the
    /// value's own fields only.
    pub lock: bpf_spin_lock,
    /// Padding that is always zero.
    pub reserved: u32,
    /// Segments that wait in `KEPT` until the gap before them is filled.
    pub pending: [PendingSegment; PENDING_SEGMENTS_MAX],
    /// HTTP state, maintained by `ebpf/src/count.rs`.
    pub http: HttpConnectionState,
    /// Space for the unlocked read of a response: too large for the stack.
    pub response_read: crate::h1::UnlockedResponseRead,
}

impl ServerSocket {
    /// Copies a value out of the kernel's memory; `None` if the size differs, as it may with another version.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let fits = bytes.len() == size_of::<Self>();
        // SAFETY: as many bytes as are read, at any alignment; any bytes are integers.
        fits.then(|| unsafe { core::ptr::read_unaligned(bytes.as_ptr().cast()) })
    }
}

/// Most segments of one connection that wait at once.
pub const PENDING_SEGMENTS_MAX: usize = 8;

/// Segment that waits in `KEPT`, by its sequence number, until the gap before it is filled.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PendingSegment {
    /// Sequence number of its first byte.
    pub seq: u32,
    /// Length in bytes; 0: the entry is free.
    pub len: u32,
}

/// Flag of [`ServerSocket`]: its bind was widened from loopback.
pub const CONN_WIDENED: u32 = 1;
/// Flag of [`ServerSocket`]: it counts in `LISTEN` as reachable.
pub const CONN_LISTENS: u32 = 2;
/// Flag of [`ServerSocket`]: it counts in `LISTEN` as bound to loopback only.
pub const CONN_LOOPBACK: u32 = 4;
/// Flag of [`ServerSocket`]: an accepted connection that was counted as opened and not yet as closed.
pub const CONN_OPEN: u32 = 8;
/// Flag of [`ServerSocket`]: an accepted connection that does not count. Most of them have no storage and no flag.
pub const CONN_UNCOUNTED: u32 = 16;

/// HTTP state of one accepted connection, maintained by `ebpf/src/count.rs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HttpConnectionState {
    /// Any of the `HTTP_*` bits.
    pub flags: u32,
    /// Events of the current packet so far, as [`crate::h1::Http1Events`].
    pub events: u32,
    /// CLOCK_MONOTONIC of the begin of the newest request, ns.
    pub request_started_ns: u64,
    /// CLOCK_MONOTONIC of the client's latest packet, ns.
    pub last_client_packet_ns: u64,
    /// Message boundaries of HTTP/1, which every connection is taken for until another protocol is recognised.
    pub h1: crate::h1::Http1Connection,
    /// Opaque estimate, if `protocol` is `PROTOCOL_OPAQUE`.
    pub opaque_estimate: crate::opaque_estimate::OpaqueEstimate,
    /// Protocol of the connection: one of `PROTOCOL_*`.
    pub protocol: u32,
    /// Requests in flight on the connection.
    pub requests_in_flight: u32,
    /// Sequence number up to which received bytes have been added to the pod's total.
    pub counted_rx_seq: u32,
    /// Sequence number up to which sent bytes have been added to the pod's total.
    pub counted_tx_seq: u32,
    /// Sequence number behind the last byte ever sent. Only the sender writes it, and the kernel runs one sender at a
    /// time.
    pub tx_end_seq: u32,
    /// Padding that is always zero.
    pub reserved: u32,
}
const _: () = assert!(size_of::<HttpConnectionState>() == 168);

/// HTTP/1, or a protocol that is not recognised yet.
pub const PROTOCOL_HTTP1: u32 = 0;
/// HTTP/2, whose streams are in `STREAMS`.
pub const PROTOCOL_HTTP2: u32 = 1;
/// Protocol that cannot be read: requests are an opaque estimate.
pub const PROTOCOL_OPAQUE: u32 = 2;
/// Bytes of any protocol, on an opaque port: the connection is one request, and nothing is read.
pub const PROTOCOL_TCP: u32 = 3;

/// Flag of [`HttpConnectionState`]: its first request has not come yet; it counts in
/// [`PodState::awaiting_first_request`].
pub const HTTP_AWAITS_FIRST_REQUEST: u32 = 1;
/// Flag of [`HttpConnectionState`]: it comes from the node itself and has not brought a byte yet, so it may be a probe
/// of the kubelet.
pub const HTTP_MAYBE_PROBE: u32 = 2;

/// Lock of the kernel inside map values, which it finds by this name in BTF (5.1).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(non_camel_case_types, reason = "the kernel knows it by this name")]
pub struct bpf_spin_lock {
    /// State that only the kernel uses.
    pub val: u32,
}

/// First byte of a part of a buffered segment: key of `KEPT`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BufferedSegmentKey {
    /// Address of the client, as in [`FrontendKey`], in words of memory order.
    pub remote: [u32; 4],
    /// Port of the client, host byte order.
    pub remote_port: u32,
    /// Sequence number of the part's first byte.
    pub seq: u32,
}
const _: () = assert!(size_of::<BufferedSegmentKey>() == 24);

/// Source of a connection to a pod that is a probe and no request: key of `PROBES`.
///
/// The prober writes it before its connect. The eBPF programs remove it when the pod has accepted the connection. They
/// ignore it after its time, so that a later connection from the same port is counted.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProbeKey {
    /// Address of the prober as the pod sees it, as in [`FrontendKey`], in words of memory order.
    pub remote: [u32; 4],
    /// Port of the prober, host byte order.
    pub remote_port: u32,
}
const _: () = assert!(size_of::<ProbeKey>() == 20);

/// Most probes under way at once, on up to four CPUs: one for each pod. The agent sets 256 for each CPU if that is
/// more. Each CPU keeps up to 128 free entries of the LRU for itself, and then evicts used ones.
pub const PROBES_MAX: u32 = 1_024;

/// Bytes of one part of a buffered segment: more than an Ethernet packet has.
pub const SEGMENT_PART_BYTES: usize = 4_096;
/// Most parts of a segment: 64 KiB, the largest that a client on the same node, or a device that merges packets,
/// delivers.
pub const SEGMENT_PARTS_MAX: usize = 16;
/// Most parts buffered at once. They wait from microseconds (first data on a listener) to a round trip (a gap). The
/// agent adds 128 for each CPU, for the reason given at [`PROBES_MAX`].
pub const KEPT_MAX: u32 = 1_024;

/// Part of a buffered segment, which could not be read when it came: value of `KEPT`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferedSegment {
    /// Bytes of the segment from here on, of which this part has the first `SEGMENT_PART_BYTES`.
    pub len: u32,
    /// 1 if the segment came with a SYN.
    pub syn: u32,
    /// Bytes of the part, with space for one more window behind them.
    pub bytes: [u8; SEGMENT_PART_BYTES + crate::h1::REQUEST_BYTES],
}
const _: () = assert!(size_of::<BufferedSegment>() == 8 + 4_096 + 768);

/// Number of a helper that no kernel has. Before the agent loads the object, it replaces it with a call of the kernel's
/// function `bpf_sock_destroy` (6.5), whose number differs between kernels.
pub const SOCK_DESTROY_PLACEHOLDER: u32 = 0x5E4D_0E5D;

#[cfg(feature = "user")]
mod pod {
    // SAFETY: `repr(C)`, integers only, padding spelled out (sizes asserted above): every bit pattern is valid.
    unsafe impl aya::Pod for super::FrontendKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::BackendValue {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::ListenKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::ListenValue {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::PodValue {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::PodPortValue {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::PodState {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::PodCounters {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::ResponseCounters {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::ConnectRecord {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::KernelEvent {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::BufferedSegmentKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::ProbeKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::BufferedSegment {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::CloseRequest {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::AffinityKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::AffinityValue {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::UdpFlowKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::UdpReplySource {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::UdpSocket {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::BoundConnectKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::BoundConnect {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::SockFieldOffsets {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::TaskFlag {}
    // SAFETY: two bytes.
    unsafe impl aya::Pod for super::SocketBit {}
}
