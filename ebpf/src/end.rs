//! Ends clients' idle kept connections, each while it holds the connection's lock, so that no write can come between the
//! look and the end. A program that walks over the sockets of one network namespace (`iter/tcp`), for which the kernel
//! locks each socket (6.5, with `bpf_sock_destroy`); older kernels never load it.

use core::{
    ffi::{c_long, c_void},
    mem::{MaybeUninit, size_of},
    ptr,
};

use aya_ebpf::helpers::generated::{bpf_get_socket_cookie, bpf_probe_read_kernel};
use common::abi::{self, Ending, SocketFields};

use crate::maps::ENDING;

/// The kernel's `struct bpf_iter__tcp`.
#[repr(C)]
pub struct Visit {
    meta: *mut c_void,
    socket: *mut c_void,
    uid: u64,
}

/// Set by the agent before loading.
#[unsafe(no_mangle)]
static SOCKET_FIELDS: SocketFields = SocketFields {
    state: 0,
    backlog: 0,
    write_seq: 0,
    snd_una: 0,
    rcv_nxt: 0,
    copied_seq: 0,
    snd_wl1: 0,
    bytes_acked: 0,
    bytes_received: 0,
};

/// The kernel's TCP_ESTABLISHED.
const ESTABLISHED: u8 = 1;
/// The walk goes on, and nothing is printed.
const NEXT: i32 = 0;

/// Ends the socket at hand if it is to be ended and has not been used since that was decided.
#[inline(always)]
pub fn end(ctx: *mut Visit) -> i32 {
    // SAFETY: the kernel hands in a live context.
    let socket = unsafe { (*ctx).socket };
    // The walk's last call is for no socket.
    if socket.is_null() {
        return NEXT;
    }
    // SAFETY: a live socket of the context, of whatever state.
    let cookie = unsafe { bpf_get_socket_cookie(socket) };
    let Some(ending) = ENDING.get_ptr_mut(&cookie) else { return NEXT };
    // SAFETY: a value of the map stays where it is while the program runs; the agent waits for the walk's end.
    let wanted = unsafe { *ending };
    // One that the walk meets again has been judged.
    if wanted.verdict == abi::ENDING_UNSEEN {
        let ended = is_unused(socket, &wanted).is_ok_and(|unused| unused) && destroy(socket) == 0;
        let verdict = if ended { abi::ENDING_ENDED } else { abi::ENDING_SPARED };
        // SAFETY: as above.
        unsafe { (*ending).verdict = verdict };
    }
    NEXT
}

/// Whether nothing has been written or has come since the connection was looked at, nothing is under way or unread, and the
/// client has its answer.
///
/// The state comes first: half-open and closing connections are shorter structures that share a full one's cookie.
///
/// A request that the pod's kernel has acknowledged and the pod has not answered: that acknowledgement then is the last
/// segment that came, so it begins where the next one is expected. After an answer, the last one begins with the answer's
/// bytes. Times do not tell them apart where one tick saw the answer before, the request and its acknowledgement.
#[inline(always)]
fn is_unused(socket: *mut c_void, wanted: &Ending) -> Result<bool, c_long> {
    let at = fields();
    if read::<u8>(socket, at.state)? != ESTABLISHED {
        return Ok(false);
    }
    let expected = read::<u32>(socket, at.rcv_nxt)?;
    Ok(read::<u32>(socket, at.write_seq)? == read::<u32>(socket, at.snd_una)?
        && read::<u64>(socket, at.bytes_acked)? == wanted.acked
        && read::<u64>(socket, at.bytes_received)? == wanted.received
        && read::<u32>(socket, at.copied_seq)? == expected
        && read::<u32>(socket, at.snd_wl1)? != expected
        && read::<u32>(socket, at.backlog)? == 0)
}

#[inline(always)]
fn fields() -> SocketFields {
    // SAFETY: a live static; volatile because the agent overwrites it before loading.
    unsafe { ptr::read_volatile(&SOCKET_FIELDS) }
}

/// One field of the socket. No CO-RE in Rust: the place is data, so the read is the helper's.
#[inline(always)]
fn read<T: Copy>(socket: *mut c_void, at: u16) -> Result<T, c_long> {
    let mut found = MaybeUninit::<T>::uninit();
    let from = socket.cast::<u8>().wrapping_add(usize::from(at)).cast_const().cast();
    // SAFETY: writes so many bytes to a live local, whatever `from` is; integers only are read.
    match unsafe { bpf_probe_read_kernel(found.as_mut_ptr().cast(), size_of::<T>() as u32, from) } {
        // SAFETY: the helper has filled it.
        0 => Ok(unsafe { found.assume_init() }),
        error => Err(error),
    }
}

/// The kernel's own `bpf_sock_destroy`: the owner's next call answers ECONNABORTED, the peer gets a reset.
#[inline(always)]
fn destroy(socket: *mut c_void) -> i32 {
    // SAFETY: the number stands for the function that the agent puts in its place; it takes a socket of the context,
    // which the kernel holds locked.
    unsafe {
        let call: unsafe extern "C" fn(*mut c_void) -> i32 =
            core::mem::transmute(abi::SOCK_DESTROY as usize);
        call(socket)
    }
}
