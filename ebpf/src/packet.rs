//! Bounds-checked reads of packets: the TCP header in place, the payload by copying.
//!
//! In cgroup_skb programs a packet begins at its IP header. The IP and TCP headers are in the linear part, which
//! programs may read in place (5.0). Most payload is in fragments, which only `bpf_skb_load_bytes` reaches.

use core::{hint::black_box, ptr};

use aya_ebpf::{
    bindings::{__sk_buff, bpf_sock_ops},
    helpers::generated::bpf_skb_load_bytes,
};
use datapath::load_balancing;

use crate::maps::monotonic_ns;

const TCP: u8 = 6;
const HOP_BY_HOP: u8 = 0;
const IPV4: u8 = 4;
const IPV6: u8 = 6;
const IPV6_HEADER_BYTES: u32 = 40;
/// Length of the only extension header before TCP that the kernel itself writes: the jumbo payload option. The header's
/// own length field counts units of 8 bytes beyond the first (RFC 8200 §4.3).
const JUMBO_HEADER_BYTES: u32 = 8;

const FIN: u8 = 1;
const SYN: u8 = 2;
const ACK: u8 = 16;

/// A TCP segment of a packet.
#[derive(Clone, Copy)]
pub struct PacketSegment {
    /// Sequence number of the first payload byte.
    pub seq: u32,
    /// Number of payload bytes in the packet.
    pub len: u32,
    /// Offset of the payload in the packet.
    pub offset: u32,
    /// True if the sender sends nothing after this segment (FIN).
    pub fin: bool,
    /// True if it is a connection's first segment (SYN).
    pub syn: bool,
    /// Acknowledgement number; `None` if the segment acknowledges nothing.
    pub ack: Option<u32>,
}

/// Parses the TCP segment of a packet; `None` for anything else, and for segments with neither payload nor FIN.
#[inline(always)]
pub fn parse_segment(skb: *mut __sk_buff) -> Option<PacketSegment> {
    // SAFETY: a live context; the fields are 32-bit numbers that the verifier turns into packet pointers.
    let (data, end, total) = unsafe {
        let data = ptr::read_volatile(&raw const (*skb).data) as usize as *const u8;
        let end = ptr::read_volatile(&raw const (*skb).data_end) as usize as *const u8;
        (data, end, ptr::read_volatile(&raw const (*skb).len))
    };
    let network = network_header_len(data, end)?;
    let tcp = data.wrapping_add(network as usize);
    if tcp.wrapping_add(20) > end {
        return None;
    }
    // SAFETY: inside the linear part, checked above. The header may lie at any address.
    let (seq, ack, lengths, flags) = unsafe {
        (
            ptr::read_unaligned(tcp.add(4).cast::<u32>()),
            ptr::read_unaligned(tcp.add(8).cast::<u32>()),
            ptr::read(tcp.add(12)),
            ptr::read(tcp.add(13)),
        )
    };
    let offset = network + u32::from(lengths >> 4) * 4;
    let len = total.wrapping_sub(offset);
    let fin = flags & FIN != 0;
    // `len` has wrapped if the header's length exceeds the packet.
    if (len == 0 && !fin) || total < offset {
        return None;
    }
    // Fast open: a SYN takes one number of the sequence, and its data follow.
    let syn = flags & SYN != 0;
    let seq = u32::from_be(seq).wrapping_add(u32::from(syn));
    let ack = if flags & ACK != 0 { Some(u32::from_be(ack)) } else { None };
    Some(PacketSegment { seq, len, offset, fin, syn, ack })
}

/// Returns the time at which a packet is sent, CLOCK_MONOTONIC ns.
///
/// TCP notes it on the packet since 4.20, for pacing. Reading the clock costs as much as a look-up of socket storage.
#[inline(always)]
pub fn sent_ns(skb: *mut __sk_buff) -> u64 {
    // SAFETY: a live context; a single word.
    let timestamp_ns = unsafe { ptr::read_volatile(&raw const (*skb).tstamp) };
    if timestamp_ns == 0 { monotonic_ns() } else { timestamp_ns }
}

/// Flag of a connection's first packet, in the form that sock_ops has.
pub const SYN_FLAG: u32 = SYN as u32;

/// Returns the sequence number of the first payload byte of the packet that established a connection (5.10).
#[inline(always)]
pub fn first_payload_seq(ops: *mut bpf_sock_ops) -> Option<u32> {
    // SAFETY: a live context; the fields are 64-bit pointers to the packet at its TCP header, or null.
    let (data, end, flags) = unsafe {
        let data = ptr::read_volatile(&raw const (*ops).__bindgen_anon_3.skb_data);
        let end = ptr::read_volatile(&raw const (*ops).__bindgen_anon_4.skb_data_end);
        (data.cast::<u8>(), end.cast::<u8>(), ptr::read_volatile(&raw const (*ops).skb_tcp_flags))
    };
    if data.wrapping_add(20).cast_const() > end.cast_const() {
        return None;
    }
    // SAFETY: inside the packet, checked above. The header may lie at any address.
    let seq = u32::from_be(unsafe { ptr::read_unaligned(data.add(4).cast::<u32>()) });
    Some(seq.wrapping_add(u32::from(flags & SYN_FLAG != 0)))
}

/// Returns the length of the IP header of a TCP packet; `None` for other packets.
#[inline(always)]
fn network_header_len(data: *const u8, end: *const u8) -> Option<u32> {
    // The headers of IPv4 (20 bytes) and TCP (20 bytes) together have as many bytes.
    if data.wrapping_add(IPV6_HEADER_BYTES as usize) > end {
        return None;
    }
    // SAFETY: inside the linear part, checked above.
    let first = unsafe { ptr::read(data) };
    if first >> 4 == IPV4 {
        // SAFETY: inside the linear part, checked above.
        let protocol = unsafe { ptr::read(data.add(9)) };
        return (protocol == TCP).then_some(u32::from(first & 15) * 4);
    }
    if first >> 4 != IPV6 {
        return None;
    }
    // SAFETY: inside the linear part, checked above.
    let next = unsafe { ptr::read(data.add(6)) };
    if next == TCP {
        return Some(IPV6_HEADER_BYTES);
    }
    let jumbo = data.wrapping_add(IPV6_HEADER_BYTES as usize);
    if next != HOP_BY_HOP || jumbo.wrapping_add(JUMBO_HEADER_BYTES as usize) > end {
        return None;
    }
    // SAFETY: inside the linear part, checked above.
    let (next, units_beyond_first) = unsafe { (ptr::read(jumbo), ptr::read(jumbo.add(1))) };
    (next == TCP && units_beyond_first == 0).then_some(IPV6_HEADER_BYTES + JUMBO_HEADER_BYTES)
}

/// Returns the sender's address (IPv4 as a mapped one, in memory order) and port of a TCP packet.
#[inline(always)]
pub fn parse_sender(skb: *mut __sk_buff) -> Option<([u32; 4], u32)> {
    // SAFETY: a live context; the fields are 32-bit numbers that the verifier turns into packet pointers.
    let (data, end) = unsafe {
        let data = ptr::read_volatile(&raw const (*skb).data) as usize as *const u8;
        (data, ptr::read_volatile(&raw const (*skb).data_end) as usize as *const u8)
    };
    let network = network_header_len(data, end)?;
    let tcp = data.wrapping_add(network as usize);
    if tcp.wrapping_add(20) > end || data.wrapping_add(IPV6_HEADER_BYTES as usize) > end {
        return None;
    }
    // SAFETY: inside the linear part, checked above.
    unsafe {
        let port = u16::from_be(ptr::read_unaligned(tcp.cast::<u16>()));
        let word = |offset: usize| ptr::read_unaligned(data.add(offset).cast::<u32>());
        let address = if ptr::read(data) >> 4 == IPV4 {
            [0, 0, load_balancing::IPV4_MAPPED_WORD, word(12)]
        } else {
            [word(8), word(12), word(16), word(20)]
        };
        Some((address, u32::from(port)))
    }
}

/// Ends of a packet that a pod sends.
#[derive(Clone, Copy)]
pub struct PacketEnds {
    /// Address of the receiver in memory order; IPv4 as a mapped one.
    pub receiver: [u32; 4],
    /// Port of the receiver, host byte order.
    pub receiver_port: u32,
    /// Port of the sender, host byte order.
    pub sender_port: u32,
}

/// Returns the receiver of a TCP packet, and the port of its sender.
#[inline(always)]
pub fn parse_ends(skb: *mut __sk_buff) -> Option<PacketEnds> {
    // SAFETY: a live context; the fields are 32-bit numbers that the verifier turns into packet pointers.
    let (data, end) = unsafe {
        let data = ptr::read_volatile(&raw const (*skb).data) as usize as *const u8;
        (data, ptr::read_volatile(&raw const (*skb).data_end) as usize as *const u8)
    };
    let network = network_header_len(data, end)?;
    let tcp = data.wrapping_add(network as usize);
    if tcp.wrapping_add(20) > end || data.wrapping_add(IPV6_HEADER_BYTES as usize) > end {
        return None;
    }
    // SAFETY: inside the linear part, checked above.
    unsafe {
        let port = |offset: usize| {
            u32::from(u16::from_be(ptr::read_unaligned(tcp.add(offset).cast::<u16>())))
        };
        let word = |offset: usize| ptr::read_unaligned(data.add(offset).cast::<u32>());
        let receiver = if ptr::read(data) >> 4 == IPV4 {
            [0, 0, load_balancing::IPV4_MAPPED_WORD, word(16)]
        } else {
            [word(24), word(28), word(32), word(36)]
        };
        Some(PacketEnds { receiver, receiver_port: port(2), sender_port: port(0) })
    }
}

/// Copies bytes of the packet from `offset` on into `window`: the `len` that are left, but at most `most`, which the
/// caller bounds by the window.
///
/// Returns the number of bytes; 0 if there are none, or the copy failed.
#[inline(always)]
pub fn load_window<const WORDS: usize>(
    skb: *mut __sk_buff,
    offset: u32,
    len: u32,
    window: &mut [u64; WORDS],
    most: u32,
) -> u32 {
    let Some(len) = nonzero_at_most(len, most) else { return 0 };
    // SAFETY: the window holds that many bytes, and the verifier checks that against `len`.
    let failed = unsafe { bpf_skb_load_bytes(skb.cast(), offset, window.as_mut_ptr().cast(), len) };
    if failed == 0 { len } else { 0 }
}

/// Returns `value`, at most `most`; `None` for 0. Neither the compiler nor the verifier loses the bounds.
///
/// Before 6.8 the verifier learns nothing from a comparison with 0. It learns that `value - 1` is less than `most`, and
/// that the sum of that and 1 therefore is not 0.
#[inline(always)]
pub fn nonzero_at_most(value: u32, most: u32) -> Option<u32> {
    let value = if value > most { most } else { value };
    let less = black_box(value.wrapping_sub(1));
    if less < most { Some(less + 1) } else { None }
}

/// Returns `value`, at most `most`; neither the compiler nor the verifier loses the bound.
#[inline(always)]
pub fn at_most(value: u32, most: u32) -> u32 {
    let value = black_box(value);
    if value > most { most } else { value }
}
