//! Program `sk_lookup` (5.9): one listener of the activator serves the ports of all services.
//!
//! Ten thousand listening sockets would need more file descriptors and memory than all the rest. The accepted
//! connection keeps the port that its client asked for, and this port identifies the service.

use core::ptr;

use aya_ebpf::{bindings::bpf_sk_lookup, programs::SkLookupContext};
use datapath::{abi, load_balancing};

use crate::maps;

/// Verdict: continue with the assigned socket, or else with the kernel's own look-up.
const PASS: u32 = 1;
const AF_INET: u32 = 2;
const TCP: u32 = 6;

macro_rules! read {
    ($ctx:expr, $field:ident $([$word:literal])?) => {
        // SAFETY: the kernel hands in a live context, and this reads one word of it.
        unsafe { ptr::read_volatile(ptr::addr_of!((*$ctx).$field$([$word])?)) }
    };
}

/// Assigns a packet to a service's port the activator's listener, if the activator listens at this address.
#[inline(always)]
pub fn assign_activator_listener(ctx: &SkLookupContext) -> u32 {
    let lookup = ctx.lookup;
    let [first, last] = abi::ACTIVATOR_PORTS;
    let port = read!(lookup, local_port);
    let is_service_port = port >= u32::from(first) && port <= u32::from(last);
    if is_service_port && read!(lookup, protocol) == TCP {
        // If there is none, the kernel looks for a listener of that port as usual.
        let _no_listener = maps::PORTS.redirect_sk_lookup(ctx, local_address(lookup), 0);
    }
    PASS
}

/// Returns the local address of the look-up in memory order; IPv4 as an IPv4-mapped one.
#[inline(always)]
fn local_address(lookup: *const bpf_sk_lookup) -> [u32; 4] {
    // All words are read in any case (those of the other family are 0). Otherwise the compiler would merge the last
    // reads of two branches into one, through a pointer moved inside the context, which the verifier refuses.
    let ipv4 = read!(lookup, local_ip4);
    let ipv6 = [
        read!(lookup, local_ip6[0]),
        read!(lookup, local_ip6[1]),
        read!(lookup, local_ip6[2]),
        read!(lookup, local_ip6[3]),
    ];
    let is_ipv4 = read!(lookup, family) == AF_INET;
    if is_ipv4 { [0, 0, load_balancing::IPV4_MAPPED_WORD, ipv4] } else { ipv6 }
}
