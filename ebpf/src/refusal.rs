//! Refuses calls to a service without an endpoint, with ECONNREFUSED wherever the kernel allows that.
//!
//! Before 5.18 a program cannot choose the errno, and a denied call fails with EPERM. So a connect of TCP is not denied
//! there. It is led to port 0 of the [unspecified address](load_balancing::unspecified_address), which is closed.
//!
//! - **No socket listens on port 0**, since a bind to it chooses another port. The client's own network namespace
//!   resets the connection at once. A connect that does not block fails by SO_ERROR, as where kube-proxy rejects its SYN.
//! - **The kernel replaces the unspecified address**: over IPv4 by the socket's own address, or by one of the device to
//!   which it is bound. Otherwise it takes loopback.
//! - **Loopback in all cases would be wrong.** From a socket that is bound to a device, the SYN would leave by the device.
//!   And on a node the kubelet's firewall drops packets from other addresses to 127.0.0.0/8.
//! - **The family stays.** An IPv6 socket may be in a namespace without IPv6, and use mapped addresses only.
//! - **Nothing shows the replaced address.** A failed connect leaves no peer, and there is no record of this one.
//!
//! Denied all the same, with EPERM, are:
//!
//! - **Calls of UDP.** A connect sends nothing, so it would succeed, and give the socket loopback as its own address. Its
//!   next connect, to an endpoint, would fail (EINVAL). So does a datagram to port 0, and another port may have a receiver.
//!   Unchanged calls would meet kube-proxy's rules, which drop what `internalTrafficPolicy: Local` keeps from endpoints.
//! - **Connects of kernel threads, if they are not [left alone](crate::backend_choice::is_exempt_from_refusal).** Before
//!   6.7 they keep the address that a program has written. So a mount would never find its server again. Where they are
//!   not recognized (no BTF), all connects are denied.
//! - **Connects over IPv6 of sockets that are bound to a device.** They would get loopback, and leave by the device.
//!
//! Where kernel threads are left alone, their calls go on unchanged, to kube-proxy's rules. These reject all packets to
//! such a service, from any sender.
//!
//! Two kinds of connects may wait for a timeout instead:
//!
//! - **From a namespace without a loopback address of the family**: `lo` is down, or has no IPv6 beside devices that do.
//!   No pod is so by itself.
//! - **From transparent sockets that are bound to the address of another host.** Their SYN goes to that host.

use core::ptr;

use aya_ebpf::helpers::generated::bpf_set_retval;
use datapath::{
    abi::{self, FrontendKey},
    load_balancing,
};

use crate::{
    backend_choice::may_be_kernel_thread,
    sock_addr::{BpfSockAddr, DENY, address_words},
};

const ECONNREFUSED: i32 = 111;

/// Flag: 1 if `bpf_set_retval` exists (5.18). Set by the agent before loading. A kernel that has it for connects has it
/// for sendmsg.
#[unsafe(no_mangle)]
static HAVE_SET_RETVAL: u8 = 0;

/// Returns the address to which a refused connect is led, with port 0; `None` if the call is to be [denied](deny_call).
///
/// Where programs can choose the errno, the verifier drops all of this but the `None`.
#[inline(always)]
pub fn refusing_address(ctx: BpfSockAddr, key: &FrontendKey) -> Option<[u32; 4]> {
    if has_set_retval() || key.protocol != abi::IPPROTO_TCP {
        return None;
    }
    let asked = address_words(key.address);
    let leaves_by_device = !load_balancing::is_ipv4_mapped(&asked) && ctx.is_bound_to_device();
    if leaves_by_device || may_be_kernel_thread() != 0 {
        return None;
    }
    Some(load_balancing::unspecified_address(&asked))
}

/// Makes the call fail with ECONNREFUSED, or with EPERM where programs cannot choose the errno.
#[inline(always)]
pub fn deny_call() -> i32 {
    if has_set_retval() {
        // SAFETY: takes a number. Where it is missing, the flag is 0 and the verifier drops this branch.
        unsafe { bpf_set_retval(-ECONNREFUSED) };
    }
    DENY
}

/// Returns true if programs can choose the errno of a call that they deny. The verifier knows the answer, and drops
/// branches.
#[inline(always)]
fn has_set_retval() -> bool {
    // SAFETY: a live static; volatile because the agent overwrites it before loading.
    unsafe { ptr::read_volatile(&HAVE_SET_RETVAL) != 0 }
}
