//! Pure: layout of the data about UDP sockets whose connects or datagrams were redirected.

use core::mem::size_of;

/// Socket and one address: key of `UDP_FLOWS` and `UDP_REPLIES`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UdpFlowKey {
    /// Cookie of the socket.
    pub socket_cookie: u64,
    /// Address in network byte order; IPv4 as `::ffff:a.b.c.d`.
    pub address: [u8; 16],
    /// Port, network byte order.
    pub port_be: u16,
    /// Padding, always zero: the kernel compares keys bytewise.
    pub reserved: u16,
    /// Padding, always zero; a word of its own, as the verifier refuses unaligned stores to the stack.
    pub spare: u32,
}
const _: () = assert!(size_of::<UdpFlowKey>() == 32);

/// Frontend that a datagram from a backend answers for, as its socket has asked for it: value of `UDP_REPLIES`.
///
/// If a socket asks two frontends and both lead to one backend, answers are shown as of the one asked last. A datagram
/// to the backend's own address removes the entry.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UdpReplySource {
    /// Address of the frontend, as in [`FrontendKey`](super::FrontendKey).
    pub address: [u8; 16],
    /// Port of the frontend, network byte order.
    pub port_be: u16,
    /// Padding that is always zero.
    pub reserved: u16,
    /// Padding that is always zero.
    pub spare: u32,
}
const _: () = assert!(size_of::<UdpReplySource>() == 24);

/// State of a UDP socket of which a connect or a datagram was redirected: value of `UDP_SOCKETS`.
///
/// It is no socket storage, because sock_diag shows none of UDP sockets. The addresses are those of the latest
/// redirected connect, and 0 without one. They count only while the socket is connected, as a disconnect is not
/// reported.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UdpSocket {
    /// Address that the application asked for, as in [`FrontendKey`](super::FrontendKey). getpeername and recvmsg
    /// return it.
    pub original_address: [u8; 16],
    /// Address of the backend that the connect was rewritten to.
    pub backend_address: [u8; 16],
    /// Port that the application asked for, network byte order.
    pub original_port_be: u16,
    /// Port that the connect was rewritten to, network byte order.
    pub backend_port_be: u16,
    /// Padding that is always zero.
    pub reserved: u32,
    /// Cookie of the socket's network namespace; 0 without a redirected connect.
    pub netns_cookie: u64,
}
const _: () = assert!(size_of::<UdpSocket>() == 48);
