//! Access to `bpf_sock_addr`, word by word.
//!
//! The verifier refuses wide or merged accesses, and pointers moved inside a context. The compiler likes to make both;
//! volatile accesses of single fields keep it from that.

use core::{ffi::c_void, mem::transmute, ptr};

use aya_ebpf::{
    bindings::{bpf_sock, bpf_sock_addr},
    helpers::generated::{bpf_get_netns_cookie, bpf_get_socket_cookie, bpf_skc_to_mptcp_sock},
};
use datapath::{abi, load_balancing};

/// Verdict: the call goes on with the present address.
pub const ALLOW: i32 = 1;
/// Verdict: the call fails.
pub const DENY: i32 = 0;

const TCP: u32 = abi::IPPROTO_TCP as u32;
const UDP: u32 = abi::IPPROTO_UDP as u32;
const MPTCP: u32 = 262;
/// State of a connected socket, also of UDP.
const ESTABLISHED: u32 = 1;

/// Flag: 1 if `bpf_skc_to_mptcp_sock` exists (5.19). Set by the agent before loading.
#[unsafe(no_mangle)]
static HAVE_MPTCP_SOCK: u8 = 0;

/// Context of a connect, bind, getpeername, sendmsg or recvmsg.
#[derive(Clone, Copy)]
pub struct BpfSockAddr(pub *mut bpf_sock_addr);

macro_rules! read {
    ($ctx:expr, $field:ident $([$word:literal])?) => {
        // SAFETY: the kernel hands in a live context with a live socket, and this reads one word of either.
        unsafe { ptr::read_volatile(ptr::addr_of!((*$ctx).$field$([$word])?)) }
    };
}

macro_rules! write {
    ($ctx:expr, $field:ident $([$word:literal])?, $value:expr) => {
        // SAFETY: the kernel hands in a live context, and this writes one of the words it lets programs write.
        unsafe { ptr::write_volatile(ptr::addr_of_mut!((*$ctx).$field$([$word])?), $value) }
    };
}

impl BpfSockAddr {
    /// Returns true if the socket speaks TCP, or MPTCP, which falls back to it.
    #[inline(always)]
    pub fn is_tcp(self) -> bool {
        let protocol = read!(self.0, protocol);
        protocol == TCP || protocol == MPTCP
    }

    /// Returns true if the socket speaks UDP.
    #[inline(always)]
    pub fn is_udp(self) -> bool {
        read!(self.0, protocol) == UDP
    }

    /// Returns the protocol of the frontends to which the socket can connect; `None` if there are none for it.
    #[inline(always)]
    pub fn frontend_protocol(self) -> Option<u8> {
        match read!(self.0, protocol) {
            TCP | MPTCP => Some(abi::IPPROTO_TCP),
            UDP => Some(abi::IPPROTO_UDP),
            _ => None,
        }
    }

    /// Returns true if the socket is connected.
    #[inline(always)]
    pub fn is_connected(self) -> bool {
        let socket = self.socket().cast::<bpf_sock>();
        // SAFETY: the context has a socket; a single word of it.
        unsafe { ptr::read_volatile(&raw const (*socket).state) == ESTABLISHED }
    }

    /// Returns the address of a connected socket's peer over IPv4 as an IPv4-mapped one, in memory order.
    #[inline(always)]
    pub fn peer_ipv4(self) -> [u32; 4] {
        let socket = self.socket().cast::<bpf_sock>();
        [0, 0, load_balancing::IPV4_MAPPED_WORD, read!(socket, dst_ip4)]
    }

    /// Returns the address of a connected socket's peer over IPv6, in memory order.
    #[inline(always)]
    pub fn peer_ipv6(self) -> [u32; 4] {
        let socket = self.socket().cast::<bpf_sock>();
        [
            read!(socket, dst_ip6[0]),
            read!(socket, dst_ip6[1]),
            read!(socket, dst_ip6[2]),
            read!(socket, dst_ip6[3]),
        ]
    }

    /// Returns the port of a connected socket's peer, in network byte order.
    #[inline(always)]
    pub fn peer_port_be(self) -> u16 {
        let socket = self.socket().cast::<bpf_sock>();
        // A whole word: kernels before 5.18 refuse to read a half of it.
        // SAFETY: the context has a socket; a single word of it, of which the port is the first half.
        unsafe { ptr::read_volatile((&raw const (*socket).dst_port).cast::<u32>()) as u16 }
    }

    /// Returns the IPv4 address as an IPv4-mapped one, in memory order.
    #[inline(always)]
    pub fn ipv4(self) -> [u32; 4] {
        [0, 0, load_balancing::IPV4_MAPPED_WORD, read!(self.0, user_ip4)]
    }

    /// Returns the IPv6 address, in memory order.
    #[inline(always)]
    pub fn ipv6(self) -> [u32; 4] {
        [
            read!(self.0, user_ip6[0]),
            read!(self.0, user_ip6[1]),
            read!(self.0, user_ip6[2]),
            read!(self.0, user_ip6[3]),
        ]
    }

    /// Returns the port, in network byte order.
    #[inline(always)]
    pub fn port_be(self) -> u16 {
        read!(self.0, user_port) as u16
    }

    /// Replaces the IPv4 address by the last word of an IPv4-mapped one.
    #[inline(always)]
    pub fn set_ipv4(self, words: &[u32; 4]) {
        write!(self.0, user_ip4, words[3]);
    }

    /// Replaces the IPv6 address, word by word.
    #[inline(always)]
    pub fn set_ipv6(self, words: &[u32; 4]) {
        write!(self.0, user_ip6[0], words[0]);
        write!(self.0, user_ip6[1], words[1]);
        write!(self.0, user_ip6[2], words[2]);
        write!(self.0, user_ip6[3], words[3]);
    }

    /// Replaces the port, in network byte order.
    #[inline(always)]
    pub fn set_port_be(self, port: u16) {
        write!(self.0, user_port, u32::from(port));
    }

    /// Returns the local port that the socket has before the call, host byte order; 0 if none was chosen.
    #[inline(always)]
    pub fn local_port(self) -> u16 {
        let socket = self.socket().cast::<bpf_sock>();
        read!(socket, src_port) as u16
    }

    /// Returns true if the socket is bound to a device, so that it sends by that device only.
    #[inline(always)]
    pub fn is_bound_to_device(self) -> bool {
        let socket = self.socket().cast::<bpf_sock>();
        read!(socket, bound_dev_if) != 0
    }

    /// Returns the socket of the call.
    #[inline(always)]
    pub fn socket(self) -> *mut c_void {
        // SAFETY: a live context; the field is a pointer in every kernel that runs this program type with storage.
        unsafe { (*self.0).__bindgen_anon_1.sk.cast() }
    }

    /// Returns true if the socket is the kernel's own, a subflow of an MPTCP socket; always false before 5.19.
    #[inline(always)]
    pub fn is_mptcp_subflow(self) -> bool {
        // SAFETY: a live static; volatile because the agent overwrites it before loading.
        let known = unsafe { ptr::read_volatile(&HAVE_MPTCP_SOCK) } != 0;
        // SAFETY: a socket of the context. Where the helper is missing, the verifier drops this call.
        known && !unsafe { bpf_skc_to_mptcp_sock(self.socket()) }.is_null()
    }

    /// Returns the socket's cookie, which no other socket has or will have.
    #[inline(always)]
    pub fn socket_cookie(self) -> u64 {
        // SAFETY: the helper takes the context as it is.
        unsafe { bpf_get_socket_cookie(self.0.cast()) }
    }

    /// Returns the cookie of the caller's network namespace.
    #[inline(always)]
    pub fn netns_cookie(self) -> u64 {
        // SAFETY: the helper takes the context as it is.
        unsafe { bpf_get_netns_cookie(self.0.cast()) }
    }
}

/// Converts address words to the bytes of a map key or value.
#[inline(always)]
pub fn address_bytes(words: [u32; 4]) -> [u8; 16] {
    // SAFETY: same size, and every bit pattern is valid.
    unsafe { transmute(words) }
}

/// Converts address bytes of a map value to words, in memory order.
#[inline(always)]
pub fn address_words(bytes: [u8; 16]) -> [u32; 4] {
    // SAFETY: same size, and every bit pattern is valid.
    unsafe { transmute(bytes) }
}
