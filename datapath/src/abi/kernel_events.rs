//! Pure: layout and kinds of the events that the eBPF programs send to the agent.

use core::mem::size_of;

/// Event in the ring `EVENTS`. It is a hint: the maps hold the truth.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelEvent {
    /// Kind of the event: one of `EVENT_*`.
    pub kind: u32,
    /// Port (listen, closed) or pod row (growth).
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
