//! Pure: layout of the data about connects of sockets whose programs have chosen their local port.

use core::mem::size_of;

use super::FrontendKey;

/// Connection from a chosen local port: key of `BOUND_CONNECTS`, and value of `BOUND_SOCKETS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BoundConnectKey {
    /// Cookie of the socket's network namespace.
    pub netns_cookie: u64,
    /// Address of the backend, as in [`FrontendKey`].
    pub backend_address: [u8; 16],
    /// Port of the backend, network byte order.
    pub backend_port_be: u16,
    /// Local port of the socket, host byte order.
    pub local_port: u16,
    /// Padding, always zero: the kernel compares keys bytewise.
    pub reserved: u32,
}
const _: () = assert!(size_of::<BoundConnectKey>() == 32);

/// Latest connection with this local port and backend: value of `BOUND_CONNECTS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BoundConnect {
    /// Frontend that the socket asked for.
    pub frontend: FrontendKey,
    /// Padding that is always zero.
    pub reserved: u32,
    /// Time at which the socket was closed, CLOCK_MONOTONIC ns; 0 while it is open.
    pub closed_ns: u64,
}
const _: () = assert!(size_of::<BoundConnect>() == 32);
