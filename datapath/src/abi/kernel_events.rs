//! Pure: layout and kinds of the events that the eBPF programs send to the agent.

use core::mem::size_of;

/// Event in the ring `EVENTS`. It is a hint: the maps hold the truth.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelEvent {
    /// Kind of the event: one of `EVENT_*`.
    pub kind: u32,
    /// Port (listen, closed), pod row (growth) or backend number (standby connect).
    pub port_or_slot: u32,
    /// Netns cookie (listen, closed); 0 otherwise.
    pub netns_cookie: u64,
    /// Time of the event, CLOCK_MONOTONIC in ns.
    pub at_ns: u64,
}
const _: () = assert!(size_of::<KernelEvent>() == 24);

/// Kind: a socket began to listen.
pub const EVENT_LISTEN: u32 = 1;
/// Kind: a listener has closed.
pub const EVENT_LISTENER_CLOSED: u32 = 2;
/// Kind: more requests are in flight in a pod than the agent last reported, if the agent has armed this event at that
/// level. Or a new connection to a pod with [`POD_STANDBY`](super::POD_STANDBY) was established.
pub const EVENT_GROWTH: u32 = 3;
/// Kind of an [`IdleEvent`].
pub const EVENT_IDLE: u32 = 4;

/// Kind: a connect was led to a backend whose [`connect_event`](super::BackendValue::connect_event) was armed.
pub const EVENT_STANDBY_CONNECT: u32 = 5;

/// Event in the ring `EVENTS`: a connection of a pod has become idle. Each request that the pod's node has received on
/// it has its whole response. All bytes of both directions were read up to the two sequence numbers. Neither side has
/// announced the end of the connection.
///
/// Programs send it only for pods with [`idle_events`](super::PodCounters::idle_events). It is longer than
/// [`KernelEvent`], so a reader that does not know it skips it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IdleEvent {
    /// Kind of the event: [`EVENT_IDLE`].
    pub kind: u32,
    /// Port of the client, host byte order.
    pub client_port: u32,
    /// Netns cookie of the pod.
    pub netns_cookie: u64,
    /// Address of the client, as in [`FrontendKey`](super::FrontendKey), in words of memory order.
    pub client: [u32; 4],
    /// Port of the pod, host byte order.
    pub pod_port: u32,
    /// Sequence number of the client's next byte.
    pub client_seq: u32,
    /// Sequence number of the pod's next byte.
    pub pod_seq: u32,
    /// Padding that is always zero.
    pub reserved: u32,
}
const _: () = assert!(size_of::<IdleEvent>() == 48);
