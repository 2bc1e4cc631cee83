//! Pure: what the kernel half and the agent agree on, byte by byte.
//!
//! Integers and arrays of integers only, padding spelled out, sizes asserted. Every change of layout or meaning
//! raises [`ABI_VERSION`]: pins live in a folder named after it, and the agent refuses an object of another version.
//!
//! How a connect finds its pod: `FRONTENDS[address, port]` → service number → [`SvcState`](crate::flow::SvcState)
//! in `SVC_STATE` → extent of `SLOTS` → backend number → `BACKENDS`. Writers fill new backends and a new extent
//! first and then store one word of `SVC_STATE`; what that frees rests for [`REST_NS`] before it is used again.
//! A reader that was kept from running for longer than that finds the words changed when it [reads](crate::flow::Read)
//! them again, and begins once more.

use core::mem::size_of;

/// Version of everything in this file, of [`crate::flow`]'s packing and of the maps' meaning.
pub const ABI_VERSION: u32 = 5;

/// Stands in the kernel object's read-only data, so that the agent knows its version before loading it.
pub const ABI_MARK: [u8; 16] = *b"rouse-abi-000005";

/// How long a freed backend, extent or service number rests before reuse, in ns.
///
/// A connect runs for microseconds; a second covers nearly any preemption on a live machine, and for the others it
/// [reads again](crate::flow::Read) what led it to a backend.
pub const REST_NS: u64 = 1_000_000_000;

/// Names of the maps: pins in `bpf/v<ABI>/` and symbols of the kernel object.
pub mod maps {
    /// Hash: [`FrontendKey`](super::FrontendKey) → service number (`u32`).
    pub const FRONTENDS: &str = "FRONTENDS";
    /// Mmapable array by service number: packed [`SvcState`](crate::flow::SvcState) (`u64`).
    pub const SVC_STATE: &str = "SVC_STATE";
    /// Mmapable array by service number: packed [`SvcInfo`](crate::flow::SvcInfo) (`u64`).
    pub const SVC_INFO: &str = "SVC_INFO";
    /// Mmapable array: backend numbers (`u64`), in extents.
    pub const SLOTS: &str = "SLOTS";
    /// Mmapable array by backend number: [`Backend`](super::Backend).
    pub const BACKENDS: &str = "BACKENDS";
    /// Hash: [`ListenKey`](super::ListenKey) → [`Listen`](super::Listen).
    pub const LISTEN: &str = "LISTEN";
    /// Hash: netns cookie (`u64`) → how many entries it has in `LISTEN` (`u32`). The programs count up, the agent sets it
    /// right when it has removed entries.
    pub const LISTENERS: &str = "LISTENERS";
    /// Hash: netns cookie (`u64`) → [`Pod`](super::Pod).
    pub const PODS: &str = "PODS";
    /// Mmapable array by pod slot: [`PodState`](super::PodState).
    pub const POD_STATE: &str = "POD_STATE";
    /// Mmapable array by `cpu * PODS_MAX + slot`: [`Counters`](super::Counters). Behind the last possible CPU stands one
    /// that only user space writes.
    pub const COUNTERS: &str = "COUNTERS";
    /// As `COUNTERS`: [`Responses`](super::Responses).
    pub const RESPONSES: &str = "RESPONSES";
    /// Mmapable array by the `CONTROL_*` numbers: single words (`u64`).
    pub const CONTROL: &str = "CONTROL";
    /// Ring buffer of [`Event`](super::Event)s.
    pub const EVENTS: &str = "EVENTS";
    /// Program array: program `ingress`, for packets that take more than one run; `suspects`, for those that may be probes
    /// of the kubelet's; `ingress_http2` and `ingress_other`, for connections that do not speak HTTP/1.
    pub const INGRESS: &str = "INGRESS";
    /// Program array: as `INGRESS`, without `suspects`.
    pub const EGRESS: &str = "EGRESS";
    /// Program array: program `sockets`, for first data that take more than one run, and `sockets_http2`.
    pub const SOCKETS: &str = "SOCKETS";
    /// LRU hash: [`KeptKey`](super::KeptKey) → [`Kept`](super::Kept).
    pub const KEPT: &str = "KEPT";
    /// LRU hash: [`ProbeKey`](super::ProbeKey) → until when it holds, CLOCK_MONOTONIC ns (`u64`).
    pub const PROBES: &str = "PROBES";
    /// Hash: an address of the node itself (16 bytes in memory order, IPv4 as mapped) → 1 (`u32`).
    pub const NODE: &str = "NODE";
    /// Array by socket cookie modulo `CLIENTS_MAX`: not 0 while a socket has that row of `CLIENTS` (`u64`).
    pub const CLAIMS: &str = "CLAIMS";
    /// Array by socket cookie modulo `CLIENTS_MAX`: [`Client`](super::Client).
    pub const CLIENTS: &str = "CLIENTS";
    /// Socket storage of client sockets whose row of `CLIENTS` is taken: [`Client`](super::Client).
    pub const OVERFLOW: &str = "OVERFLOW";
    /// Socket storage of listeners and what they accept: [`Conn`](super::Conn).
    pub const CONNS: &str = "CONNS";
    /// Socket storage of connections that speak HTTP/2: [`h2::Conn`](crate::h2::Conn).
    pub const STREAMS: &str = "STREAMS";
    /// `CONNS` of the version before, while its programs still count connections that they saw established.
    pub const OLD_CONNS: &str = "OLD_CONNS";
    /// Socket hash: an activator's address (16 bytes in memory order, IPv4 as mapped) → the socket that listens there for
    /// all [`ACTIVATOR_PORTS`](super::ACTIVATOR_PORTS). The activator writes it.
    pub const PORTS: &str = "PORTS";
    /// Hash: socket cookie (`u64`) → [`Ending`](super::Ending). Not pinned: it lives with the agent that fills it.
    pub const ENDING: &str = "ENDING";
}

/// Most frontends (address, port). Two families of 16 384 services.
pub const FRONTENDS_MAX: u32 = 32_768;
/// Most service numbers: one for each frontend, the two activator lists, and some to rest.
pub const SERVICES_MAX: u32 = 40_960;
/// Most backend numbers in lists, counting resting extents. Holds each backend in two lists (a revision and its route)
/// while both rest and are written anew.
pub const SLOTS_MAX: u32 = 131_072;
/// Most different backends.
pub const BACKENDS_MAX: u32 = 32_768;
/// Most pods of Rouse on one node, plus one: slot 0 means none. Kubernetes' own bound is 110 to 500.
pub const PODS_MAX: u32 = 1_024;
/// Most (namespace, port) pairs with a listener.
pub const LISTEN_MAX: u32 = 16_384;
/// Most of them of one namespace, so that none fills the map alone: with the serving port of its pod, which is entered all
/// the same, 963 namespaces find room. What a pod listens on besides is not asked for.
pub const LISTEN_EACH: u32 = 16;
/// Most namespaces whose entries in `LISTEN` are counted.
pub const LISTENERS_MAX: u32 = 4_096;
/// Rows for client sockets: 576 KiB. With 1 000 open, one connect in eight finds its row taken.
pub const CLIENTS_MAX: u32 = 8_192;
/// Most addresses of the node itself that are known. Without room for one, the kubelet's probes from there are counted.
pub const NODE_MAX: u32 = 1_024;
/// Most connections that are to be ended in one walk over a namespace's sockets.
pub const ENDING_MAX: u32 = 4_096;
/// Most addresses of activators in one network namespace.
pub const PORTS_MAX: u32 = 16;
/// First and last port of services at the activators; one listener serves them all.
pub const ACTIVATOR_PORTS: [u16; 2] = [20_000, 29_999];
/// Bytes of the event ring: 2 000 events. Events only wake the agent; losing one is harmless.
pub const EVENTS_BYTES: u32 = 65_536;

/// Service number of the list of activators with an IPv4 address.
pub const ACTIVATORS_V4: u32 = 0;
/// Service number of the list of activators with an IPv6 address.
pub const ACTIVATORS_V6: u32 = 1;
/// Service number of the canary: its mode is `Canary`, and [`CANARY`] leads to it.
pub const CANARY_SERVICE: u32 = 2;
/// First service number that a planned frontend may have.
pub const FIRST_SERVICE: u32 = 3;

/// The canary's address: 192.0.0.8, the IPv4 dummy address (RFC 7600), which nobody can serve; port 1.
pub const CANARY: FrontendKey = FrontendKey {
    address: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 192, 0, 0, 8],
    port_be: 1u16.to_be(),
    protocol: 6,
    reserved: 0,
};

/// `CONTROL` word: events that found the ring full.
pub const CONTROL_DROPPED: u32 = 0;
/// `CONTROL` word: connects to a frontend of mode `Canary`.
pub const CONTROL_CANARY: u32 = 1;
/// `CONTROL` word: connects that went through without bookkeeping: there was no memory for it, or they were MPTCP's.
pub const CONTROL_UNTRACKED: u32 = 2;
/// `CONTROL` word: connects that fell back to the activator because no local pick listened.
pub const CONTROL_FALLBACK: u32 = 3;
/// `CONTROL` word: listeners that found `LISTEN` full.
pub const CONTROL_LISTEN_FULL: u32 = 4;
/// `CONTROL` word: connects that were left unanswered for as long as TCP waits first.
pub const CONTROL_UNANSWERED: u32 = 5;
/// `CONTROL` word: listeners beyond the [`LISTEN_EACH`] ports of their namespace.
pub const CONTROL_LISTEN_BEYOND: u32 = 6;
/// `CONTROL` word: client sockets that use `OVERFLOW`. Read by every socket that closes, so it and those behind it
/// share no cache line with the counters above.
pub const CONTROL_OVERFLOW: u32 = 8;
/// Words in `CONTROL`.
pub const CONTROL_WORDS: u32 = 16;

/// Address and port clients connect to: key of `FRONTENDS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FrontendKey {
    /// Sixteen bytes as they stand in a packet; IPv4 as `::ffff:a.b.c.d`.
    pub address: [u8; 16],
    /// Port, network byte order.
    pub port_be: u16,
    /// IP protocol number; 6 (TCP) in this version.
    pub protocol: u8,
    /// Always zero.
    pub reserved: u8,
}
const _: () = assert!(size_of::<FrontendKey>() == 20);

/// One target of connects: value of `BACKENDS`. All but the gauge stand still while any list names it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backend {
    /// Sixteen bytes as they stand in a packet; IPv4 as `::ffff:a.b.c.d`.
    pub address: [u8; 16],
    /// Netns cookie of a pod on this node, whose listener `connect` checks; 0: elsewhere or unknown.
    pub cookie: u64,
    /// Slot of a pod on this node; 0: elsewhere or unknown.
    pub slot: u32,
    /// Port, network byte order; 0: the service's own port at the activators.
    pub port_be: u16,
    /// Always zero.
    pub reserved: u16,
    /// Counts uses of this number, so that a socket of an earlier use does not disturb the gauge.
    pub generation: u64,
    /// This node's open connections to it. Only the kernel writes it while the number is in use.
    pub open: u64,
    /// When a connect to it was last left unanswered for as long as TCP waits first (1 s), CLOCK_MONOTONIC; 0: never.
    pub unanswered_ns: u64,
    /// Fills the cache line: neighbours' gauges do not share one.
    pub spare: u64,
}
const _: () = assert!(size_of::<Backend>() == 64);

/// For how long connects rather go elsewhere than where one was left unanswered. Kubernetes calls a node lost after 40 s;
/// an answer that came late, or a lost packet, shall cost a pod no more than this.
pub const UNANSWERED_NS: u64 = 10_000_000_000;

/// Key of `LISTEN`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ListenKey {
    /// Cookie of the network namespace.
    pub cookie: u64,
    /// Port, host byte order.
    pub port: u32,
    /// Always zero.
    pub reserved: u32,
}
const _: () = assert!(size_of::<ListenKey>() == 16);

/// Open listeners of one namespace and port: value of `LISTEN`.
///
/// The kernel counts up and down and never deletes; the agent removes entries whose listeners have closed.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Listen {
    /// Listeners that others can reach.
    pub open: u32,
    /// Those of them whose bind was widened from loopback to any address.
    pub widened: u32,
    /// Listeners on loopback only, which nobody outside the namespace reaches.
    pub loopback: u32,
    /// `FAMILY_*` bits of binds that were widened, and `SERVES_*` bits of listeners that opened, since the last listener
    /// closed. Not added to at one go: of two listeners that open in the same moment, one may leave no bit.
    pub families: u32,
    /// CLOCK_MONOTONIC of the latest listen, ns.
    pub since_ns: u64,
}
const _: () = assert!(size_of::<Listen>() == 24);

/// Bit of [`Listen::families`]: 127.0.0.1 became 0.0.0.0.
pub const FAMILY_V4: u32 = 1;
/// Bit of [`Listen::families`]: ::1 became ::.
pub const FAMILY_V6: u32 = 2;
/// Bits of [`Listen::families`] about widened binds.
pub const FAMILIES: u32 = FAMILY_V4 | FAMILY_V6;
/// Bit of [`Listen::families`]: IPv4 clients are served.
pub const SERVES_V4: u32 = 4;
/// Bit of [`Listen::families`]: IPv6 clients are served.
pub const SERVES_V6: u32 = 8;

/// One pod of Rouse on this node: value of `PODS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pod {
    /// Its slot in `POD_STATE`, `COUNTERS` and `RESPONSES`, from 1.
    pub slot: u32,
    /// Its serving port, host byte order.
    pub port: u16,
    /// `POD_*` bits.
    pub flags: u16,
}
const _: () = assert!(size_of::<Pod>() == 8);

/// Flag of [`Pod`]: a bind of the serving port to loopback is widened to any address.
pub const POD_WIDEN_BIND: u16 = 1;
/// Flag of [`Pod`]: the agent saw (by sock_diag) a reachable listener on the serving port that the kernel half did not
/// see begin, and therefore does not count in `LISTEN`.
pub const POD_LISTENS: u16 = 4;

/// One pod's levels, shared by all CPUs: value of `POD_STATE`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PodState {
    /// Requests in flight. Added to and subtracted from blindly, so read it as `i64` and clamp at 0.
    pub in_flight: u64,
    /// How many in flight send one event as a further request begins, which clears this: one more than the agent last
    /// reported. 1: any request that begins does. 0: none does.
    pub armed: u64,
    /// Accepted connections that are open.
    pub connections: u64,
    /// Those of them that have not brought a first request yet.
    pub fresh: u64,
    /// CLOCK_MONOTONIC of the latest request end or new connection, ns.
    pub changed_ns: u64,
    /// Connections whose message boundaries were lost.
    pub desync: u64,
    /// Open connections whose requests are an estimate.
    pub opaque: u64,
    /// Responses without a request, which are not counted.
    pub stray: u64,
}
const _: () = assert!(size_of::<PodState>() == 64);

/// Running totals of one pod on one CPU: value of `COUNTERS`.
///
/// A writer adds 1 to `begin`, adds to the totals, adds 1 to `end`. A reader takes a row only when `begin` and
/// `end` were equal before and are unchanged after. Written under a connection's lock, which keeps interrupts away.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Writes begun.
    pub begin: u64,
    /// Requests begun.
    pub started: u64,
    /// Requests ended.
    pub finished: u64,
    /// Sum of the times requests began, CLOCK_MONOTONIC ns, wrapping.
    pub started_sum_ns: u64,
    /// Sum of the times requests ended, CLOCK_MONOTONIC ns, wrapping.
    pub finished_sum_ns: u64,
    /// Always zero.
    pub reserved: [u64; 2],
    /// Writes ended.
    pub end: u64,
}
const _: () = assert!(size_of::<Counters>() == 64);

/// Response classes counted: 1xx to 5xx.
pub const STATUS_CLASSES: usize = 5;
/// Upper bounds of the latency buckets in µs; one more bucket holds everything above.
///
/// Knative's bounds of `kn.serving.invocation.duration` (knative.md §4.8), three finer ones below and two coarser ones
/// above.
pub const LATENCY_BOUNDS_US: [u64; 19] = [
    500,
    1_000,
    2_500,
    5_000,
    10_000,
    25_000,
    50_000,
    75_000,
    100_000,
    250_000,
    500_000,
    750_000,
    1_000_000,
    2_500_000,
    5_000_000,
    7_500_000,
    10_000_000,
    60_000_000,
    300_000_000,
];
/// Latency buckets.
pub const LATENCY_BUCKETS: usize = LATENCY_BOUNDS_US.len() + 1;

/// How requests of one pod ended on one CPU: value of `RESPONSES`. Plain totals, each word by itself.
///
/// Every request that has ended is either cut or in one bucket of `latency`, and then in one of `status` or `unseen`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Responses {
    /// By status class, 1xx first (101 and tunnels).
    pub status: [u64; STATUS_CLASSES],
    /// Answered with a status that cannot be seen: HTTP/2 that refers to an earlier one, estimates.
    pub unseen: u64,
    /// gRPC calls that ended with status OK, where that can be seen.
    pub grpc_ok: u64,
    /// gRPC calls that ended with another status, where that can be seen.
    pub grpc_failed: u64,
    /// Requests that ended without a whole response: the connection closed, or the stream was reset.
    pub cut: u64,
    /// Payload bytes that came.
    pub received: u64,
    /// Payload bytes that were sent.
    pub sent: u64,
    /// Sum of the times in `latency`, ns.
    pub latency_sum_ns: u64,
    /// By time from request to the end of the response, each bucket by itself.
    pub latency: [u64; LATENCY_BUCKETS],
}
const _: () = assert!(size_of::<Responses>() == 8 * RESPONSE_WORDS);

/// Words of [`Responses`].
pub const RESPONSE_WORDS: usize = 12 + LATENCY_BUCKETS;

impl Responses {
    /// The row as words, in the order of the fields.
    pub const fn words(self) -> [u64; RESPONSE_WORDS] {
        // SAFETY: `repr(C)` of nothing but words, as many.
        unsafe { core::mem::transmute(self) }
    }

    /// The row from its words.
    pub const fn from_words(words: [u64; RESPONSE_WORDS]) -> Self {
        // SAFETY: as in `words`; every bit pattern is valid.
        unsafe { core::mem::transmute(words) }
    }
}

/// What a client socket remembers of its rewritten connect: value of `CLIENTS` and `OVERFLOW`.
///
/// Storage takes a connect 1 µs to allocate, a row of an array nearly nothing. A socket's row is
/// `cookie % CLIENTS_MAX`; while another socket has that one, it takes storage. Rows are given back when the socket
/// closes (sock_release), which the kernel does not report for sockets of its own, such as a mount's: their rows stay
/// taken, and at worst all sockets use storage.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Client {
    /// The address the program asked for, as in [`FrontendKey`]; shown by getpeername.
    pub asked: [u8; 16],
    /// The address it was given.
    pub given: [u8; 16],
    /// Generation of the backend at the time; 0 once the socket does not count in its gauge any more.
    pub generation: u64,
    /// The socket's cookie. Stays when the row is free again.
    pub cookie: u64,
    /// Number of the backend.
    pub backend: u32,
    /// Port asked for, network byte order.
    pub asked_port_be: u16,
    /// Port given, network byte order.
    pub given_port_be: u16,
    /// Fills the cache line.
    pub spare: u64,
}
const _: () = assert!(size_of::<Client>() == 64);

/// What a listener, and each connection it accepts, remembers.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Conn {
    /// Netns cookie of the process that bound it; 0: not known.
    pub cookie: u64,
    /// Cgroup of the process that bound it.
    pub cgroup: u64,
    /// Slot of its pod; 0: none, or not the serving port. Set when the connection is established.
    pub slot: u32,
    /// `CONN_*` bits.
    pub flags: u32,
    /// Held while `http`, or the connection's entry of `STREAMS`, changes: packets of one connection can meet on two CPUs.
    /// Here and not in [`Http`]: before 6.11 the kernel looks for a lock in the value's own fields only.
    pub lock: bpf_spin_lock,
    /// Always zero.
    pub reserved: u32,
    /// Segments that wait in `KEPT` until the gap before them is filled.
    pub late: [Late; LATE_MAX],
    /// HTTP state; see `ebpf/src/count.rs`.
    pub http: Http,
    /// Room for the part of a response that is being read: too large for the stack.
    pub draft: crate::h1::ResponseDraft,
}

/// The eight bytes that begin at byte `at` of `words`, or as near to their end as there are eight, little-endian.
#[inline(always)]
pub(crate) fn word_at<const COUNT: usize>(words: &[u64; COUNT], at: usize) -> u64 {
    let last = (COUNT - 1) * 8;
    let at = if at > last { last } else { at };
    // SAFETY: eight bytes from there are inside `words`; any bytes are an integer.
    u64::from_le(unsafe { words.as_ptr().byte_add(at).read_unaligned() })
}

/// What a connection is in the middle of, as far as the node of its pod knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InUse {
    /// A message is under way.
    Yes,
    /// None is.
    No,
    /// No request is. A frame may be, of HTTP/2: perhaps the first part of a request's head.
    NoRequest,
}

impl Conn {
    /// As it stands in the kernel's memory; `None` where that has another size, as another version's may.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let fits = bytes.len() == size_of::<Self>();
        // SAFETY: as many bytes as are read, wherever they begin; any bytes are integers.
        fits.then(|| unsafe { core::ptr::read_unaligned(bytes.as_ptr().cast()) })
    }

    /// Whether a [message is under way](crate::h1::Conn::in_use), or bytes of one wait for those before them. `None` where
    /// nobody knows, and of what is not a counted connection.
    pub fn in_use(&self) -> Option<InUse> {
        let known = match self.http.speaks {
            SPEAKS_HTTP1 if self.http.h1.in_use()? => InUse::Yes,
            SPEAKS_HTTP1 => InUse::No,
            SPEAKS_HTTP2 if self.http.open > 0 => InUse::Yes,
            SPEAKS_HTTP2 => InUse::NoRequest,
            _ => return None,
        };
        let waits = self.late.iter().any(|late| late.len > 0);
        (self.slot != 0).then_some(if waits { InUse::Yes } else { known })
    }

    /// Whether it counts in the gauges of the pod with this slot.
    pub fn is_counted(&self, slot: u32) -> bool {
        self.slot == slot && self.flags & CONN_OPEN != 0
    }

    /// Whether it is a counted connection whose one request in flight has changed the protocol (WebSocket).
    pub fn is_upgraded(&self) -> bool {
        self.slot != 0 && self.http.speaks == SPEAKS_HTTP1 && self.http.h1.is_upgraded()
    }

    /// When the request began whose end the connection waits for, CLOCK_MONOTONIC in ns: once its time is over, nothing is
    /// left that the connection is good for. A tunnel (WebSocket, CONNECT) is the request that opened it. Of HTTP/2 it is
    /// the one that began last, whether that is still open or not: while any is open, all of those began no later.
    ///
    /// `None` while none is in flight, where nobody knows, and of what is not a counted connection.
    pub fn overdue_since(&self) -> Option<u64> {
        let waits = match self.http.speaks {
            SPEAKS_HTTP1 => self.http.h1.is_busy(),
            SPEAKS_HTTP2 => self.http.open > 0,
            _ => false,
        };
        (waits && self.in_use() == Some(InUse::Yes)).then_some(self.http.began_ns)
    }
}

/// Most segments of one connection that wait at once.
pub const LATE_MAX: usize = 8;

/// A segment that waits in `KEPT`, by its sequence number, until the gap before it is filled.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Late {
    /// Sequence number of its first byte.
    pub seq: u32,
    /// Its bytes; 0: none waits here.
    pub len: u32,
}

/// Flag of [`Conn`]: its bind was widened from loopback.
pub const CONN_WIDENED: u32 = 1;
/// Flag of [`Conn`]: it counts in `LISTEN` as reachable.
pub const CONN_LISTENS: u32 = 2;
/// Flag of [`Conn`]: it counts in `LISTEN` as bound to loopback only.
pub const CONN_LOOPBACK: u32 = 4;
/// Flag of [`Conn`]: it is an accepted connection that was announced as opened and not yet as closed.
pub const CONN_OPEN: u32 = 8;

/// HTTP state of one accepted connection. Belongs to `ebpf/src/count.rs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Http {
    /// `HTTP_*` bits.
    pub flags: u32,
    /// What the packet at hand brought about so far, as [`crate::h1::Happened`].
    pub happened: u32,
    /// CLOCK_MONOTONIC of the begin of the request that began last, ns.
    pub began_ns: u64,
    /// CLOCK_MONOTONIC of the client's packet that came last, ns.
    pub came_ns: u64,
    /// Boundaries of HTTP/1; what comes before anything else is known.
    pub h1: crate::h1::Conn,
    /// The estimate, in mode `SPEAKS_OTHER`.
    pub turns: crate::turns::Turns,
    /// What is spoken: one of `SPEAKS_*`.
    pub speaks: u32,
    /// Requests in flight.
    pub open: u32,
    /// Sequence number up to which received bytes have been added to the pod's.
    pub received: u32,
    /// The same of sent ones.
    pub sent: u32,
    /// Sequence number behind all that was ever sent. Written by the sender only, which the kernel lets be one at a time.
    pub sent_until: u32,
    /// Always zero.
    pub reserved: u32,
}
const _: () = assert!(size_of::<Http>() == 168);

/// HTTP/1, or nobody knows yet.
pub const SPEAKS_HTTP1: u32 = 0;
/// HTTP/2: its streams are in `STREAMS`.
pub const SPEAKS_HTTP2: u32 = 1;
/// Nobody can follow it: requests are an estimate.
pub const SPEAKS_OTHER: u32 = 2;

/// Flag of [`Http`]: its first request has not come yet; it counts in [`PodState::fresh`].
pub const HTTP_FRESH: u32 = 1;
/// Flag of [`Http`]: it comes from the node itself and has not brought a byte yet: it may be a probe of the kubelet's.
pub const HTTP_SUSPECT: u32 = 2;

/// The kernel's lock inside map values, which it finds by this name in BTF (5.1).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(non_camel_case_types, reason = "the kernel knows it by this name")]
pub struct bpf_spin_lock {
    /// The kernel's own.
    pub val: u32,
}

/// Names a part of a segment that could not be read when it came, by its first byte: key of `KEPT`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeptKey {
    /// The client's address, as in [`FrontendKey`], in words of memory order.
    pub remote: [u32; 4],
    /// The client's port, host byte order.
    pub remote_port: u32,
    /// Sequence number of the first byte.
    pub seq: u32,
}
const _: () = assert!(size_of::<KeptKey>() == 24);

/// Names a connection to a pod that is a probe and no request: key of `PROBES`.
///
/// Whoever probes writes it before its connect. The kernel half removes it when the pod has accepted the connection,
/// and ignores it past its time, so that a later connection from the same port is counted.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProbeKey {
    /// The prober's address as the pod sees it, as in [`FrontendKey`], in words of memory order.
    pub remote: [u32; 4],
    /// The prober's port, host byte order.
    pub remote_port: u32,
}
const _: () = assert!(size_of::<ProbeKey>() == 20);

/// Most probes under way at once, on up to four CPUs: one for each pod. The agent sets 256 for each CPU if that is
/// more, because each keeps up to 128 free entries for itself and then takes used ones.
pub const PROBES_MAX: u32 = 1_024;

/// Bytes of one part of a segment that is kept: more than a packet of Ethernet's size.
pub const KEPT_BYTES: usize = 4_096;
/// Most parts of a segment: 64 KiB, as a client on the same node, or a device that joins packets, sends at once.
pub const KEPT_PARTS: usize = 16;
/// Most parts kept at once. They wait for microseconds (first data on a listener) to a round trip (a gap).
pub const KEPT_MAX: u32 = 1_024;

/// A part of a segment that could not be read when it came: value of `KEPT`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Bytes of the segment from here on, of which the first `KEPT_BYTES` are in this part.
    pub len: u32,
    /// 1: it came with a SYN.
    pub syn: u32,
    /// The bytes, and room for one window more.
    pub bytes: [u8; KEPT_BYTES + crate::h1::REQUEST_BYTES],
}
const _: () = assert!(size_of::<Kept>() == 8 + 4_096 + 768);

/// A client's connection that is to be ended if it still looks like this: value of `ENDING`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ending {
    /// Bytes of the client's that the other end had acknowledged (`tcpi_bytes_acked`).
    pub acked: u64,
    /// Bytes that had come from the other end (`tcpi_bytes_received`).
    pub received: u64,
    /// What became of it: one of `ENDING_*`. The kernel half writes it.
    pub verdict: u64,
}
const _: () = assert!(size_of::<Ending>() == 24);

/// The walk has not met it: it has closed by itself.
pub const ENDING_UNSEEN: u64 = 0;
/// It was ended.
pub const ENDING_ENDED: u64 = 1;
/// It was left alone: it has been used since, or is in use.
pub const ENDING_SPARED: u64 = 2;

/// Where fields of the kernel's sockets are, in bytes from the socket's begin. Kernels differ; the agent reads it from the
/// running one's BTF.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketFields {
    /// State (`u8`).
    pub state: u16,
    /// Bytes of segments that came while the socket was in use and are not processed yet (`i32`).
    pub backlog: u16,
    /// Sequence number behind the last byte that the program wrote (`u32`).
    pub write_seq: u16,
    /// The first one that is not acknowledged (`u32`).
    pub snd_una: u16,
    /// Sequence number that is expected next (`u32`).
    pub rcv_nxt: u16,
    /// The first one that the program has not read (`u32`).
    pub copied_seq: u16,
    /// Sequence number of the last segment that came and acknowledged or carried anything (`u32`).
    pub snd_wl1: u16,
    /// Bytes acknowledged (`u64`).
    pub bytes_acked: u16,
    /// Bytes received (`u64`).
    pub bytes_received: u16,
}
const _: () = assert!(size_of::<SocketFields>() == 18);

/// So many bytes of a socket hold what the programs read of it from its beginning.
pub const SOCKET_HEAD: usize = 32;

/// A single bit among the first bytes of a socket.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bit {
    /// Which byte, below [`SOCKET_HEAD`].
    pub at: u8,
    /// The bit in it; 0: there is none.
    pub mask: u8,
}
const _: () = assert!(size_of::<Bit>() == 2);

/// Number of a helper that no kernel has. In its place the agent puts a call of the kernel's function `bpf_sock_destroy`
/// (6.5), whose number differs from kernel to kernel, before it loads the object.
pub const SOCK_DESTROY: u32 = 0x5E4D_0E5D;

/// What `EVENTS` carries. A hint: the maps hold the truth.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Event {
    /// One of `EVENT_*`.
    pub kind: u32,
    /// Port (listen, closed) or pod slot (busy).
    pub subject: u32,
    /// Netns cookie (listen, closed); 0 otherwise.
    pub cookie: u64,
    /// CLOCK_MONOTONIC, ns.
    pub at_ns: u64,
}
const _: () = assert!(size_of::<Event>() == 24);

/// A socket began to listen.
pub const EVENT_LISTEN: u32 = 1;
/// A listener closed.
pub const EVENT_CLOSED: u32 = 2;
/// In an armed pod more requests are in flight than were last reported.
pub const EVENT_BUSY: u32 = 3;

#[cfg(test)]
mod tests {
    use super::*;

    /// Fits all texts here.
    type Window = [u64; 30];

    /// A counted connection that was opened at sequence numbers 0.
    fn open() -> Conn {
        let mut conn = Conn { slot: 1, ..Conn::default() };
        conn.http.h1.open(0, 0);
        conn.http.began_ns = 7;
        conn
    }

    /// Reads all of `text` by `step`, which says how many bytes it has taken.
    fn reads(text: &str, mut step: impl FnMut(&Window, u32) -> u32) {
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            let mut window = [0; 30];
            for (word, bytes) in window.iter_mut().zip(rest.chunks(8)) {
                let mut eight = [0; 8];
                eight[..bytes.len()].copy_from_slice(bytes);
                *word = u64::from_ne_bytes(eight);
            }
            rest = &rest[step(&window, rest.len() as u32) as usize..];
        }
    }

    fn asks(conn: &mut Conn, text: &str) {
        reads(text, |window, len| conn.http.h1.read_request(window, len, true).used);
    }

    fn answers(conn: &mut Conn, text: &str) {
        reads(text, |window, len| conn.http.h1.read_response(window, len, true).used);
    }

    const UPGRADE: &str = "GET / HTTP/1.1\r\nUpgrade: a\r\nConnection: upgrade\r\n\r\n";

    #[test]
    fn a_request_is_overdue_from_its_head_to_the_end_of_its_response() {
        let mut conn = open();
        assert_eq!(conn.overdue_since(), None, "nothing came");
        asks(&mut conn, "GET / HTTP/1.1\r\n");
        assert_eq!(conn.overdue_since(), None, "no whole head came");
        asks(&mut conn, "\r\n");
        assert_eq!(conn.overdue_since(), Some(7));
        answers(&mut conn, "HTTP/1.1 204 No\r\n");
        assert_eq!(conn.overdue_since(), Some(7), "the answer has begun");
        answers(&mut conn, "\r\n");
        assert_eq!(conn.overdue_since(), None, "it has ended");
    }

    #[test]
    fn a_tunnel_is_overdue_with_the_request_that_opened_it() {
        let mut conn = open();
        asks(&mut conn, UPGRADE);
        answers(&mut conn, "HTTP/1.1 101 Switching Protocols\r\n\r\n");
        assert_eq!(conn.overdue_since(), Some(7));
    }

    #[test]
    fn a_connection_is_upgraded_from_its_101_to_its_end() {
        let mut conn = open();
        asks(&mut conn, UPGRADE);
        assert!(!conn.is_upgraded(), "the server may refuse");
        let mut refused = conn;
        answers(&mut refused, "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n");
        assert!(!refused.is_upgraded());
        answers(&mut conn, "HTTP/1.1 101 Switching Protocols\r\n\r\n");
        assert!(conn.is_upgraded(), "before a byte of the new protocol");
        asks(&mut conn, "\u{1}\u{2}\u{3}\u{4}\u{5}\u{6}\u{7}\u{8}");
        answers(&mut conn, "\u{1}\u{2}\u{3}\u{4}\u{5}\u{6}\u{7}\u{8}");
        assert!(conn.is_upgraded());
        conn.http.h1.close(false);
        assert!(!conn.is_upgraded());
    }

    #[test]
    fn a_connection_of_http2_is_overdue_with_the_request_that_began_last() {
        let mut conn = open();
        conn.http.speaks = SPEAKS_HTTP2;
        assert_eq!(conn.in_use(), Some(InUse::NoRequest));
        assert_eq!(conn.overdue_since(), None, "none is open");
        conn.http.open = 2;
        assert_eq!(conn.in_use(), Some(InUse::Yes));
        assert_eq!(conn.overdue_since(), Some(7));
    }

    #[test]
    fn what_nobody_can_read_and_nobody_counts_is_never_overdue() {
        let mut foreign = open();
        (foreign.http.speaks, foreign.http.open) = (SPEAKS_OTHER, 1);
        let mut lost = open();
        asks(&mut lost, UPGRADE);
        lost.http.h1.lose_responses();
        let mut probe = open();
        asks(&mut probe, UPGRADE);
        probe.slot = 0;
        assert_eq!([foreign, lost, probe].map(|conn| conn.overdue_since()), [None; 3]);
    }
}

#[cfg(feature = "user")]
mod pod {
    // SAFETY: `repr(C)`, integers only, padding spelled out (sizes asserted above): every bit pattern is valid.
    unsafe impl aya::Pod for super::FrontendKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Backend {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::ListenKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Listen {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Pod {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::PodState {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Counters {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Responses {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Client {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Event {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::KeptKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::ProbeKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Kept {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Ending {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::SocketFields {}
    // SAFETY: two bytes.
    unsafe impl aya::Pod for super::Bit {}
}
