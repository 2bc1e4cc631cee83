//! Closes idle stale connections of clients, each while the connection's lock is held.
//!
//! So no write can come between the check and the close. A connection is idle by its activity since it was listed, or
//! because it stands at the sequence numbers at which its pod has seen it idle. The program walks over the sockets of one
//! network namespace (`iter/tcp`), and the kernel locks each socket for it (6.5, with `bpf_sock_destroy`). Older kernels
//! never load it.

use core::{
    ffi::{c_long, c_void},
    hint::black_box,
    mem::{MaybeUninit, size_of},
    ptr,
};

use aya_ebpf::helpers::generated::{bpf_get_socket_cookie, bpf_probe_read_kernel};
use datapath::{
    abi::{self, CloseRequest, SockFieldOffsets},
    close_position::{ClientSocketState, judge_position},
};

use crate::maps::ENDING;

/// The kernel's `struct bpf_iter__tcp`, the context of one visit.
#[repr(C)]
pub struct TcpIterContext {
    meta: *mut c_void,
    socket: *mut c_void,
    uid: u64,
}

/// Offsets of fields in the kernel's socket, from its BTF. Set by the agent before loading.
#[unsafe(no_mangle)]
static SOCKET_FIELDS: SockFieldOffsets = SockFieldOffsets {
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

/// The kernel's TCP state `TCP_ESTABLISHED`.
const TCP_ESTABLISHED: u8 = 1;
/// Return value: the walk continues, and nothing is printed.
const CONTINUE_WALK: i32 = 0;

/// Closes the visited socket if it is listed in `ENDING` and has not been used since it was listed, or stands at the
/// position that the request names.
#[inline(always)]
pub fn close_if_unused(ctx: *mut TcpIterContext) -> i32 {
    // SAFETY: the kernel hands in a live context.
    let socket = unsafe { (*ctx).socket };
    // The walk's last call has no socket.
    if socket.is_null() {
        return CONTINUE_WALK;
    }
    // SAFETY: a live socket of the context, of whatever state.
    let cookie = unsafe { bpf_get_socket_cookie(socket) };
    let Some(entry) = ENDING.get_ptr_mut(&cookie) else { return CONTINUE_WALK };
    // SAFETY: a map value stays in place while the program runs; the agent changes the map only after the walk.
    let request = unsafe { *entry };
    // The walk may visit a socket twice; the first visit decides.
    let verdict = match request.result {
        abi::CLOSE_NOT_FOUND if is_unused(socket, &request).is_ok_and(|unused| unused) => {
            abi::CLOSE_DONE
        }
        abi::CLOSE_NOT_FOUND => abi::CLOSE_SKIPPED,
        abi::CLOSE_AT_POSITION => compare_position(socket, &request).unwrap_or(abi::CLOSE_SKIPPED),
        _ => return CONTINUE_WALK,
    };
    // The agent patches one place of the call, so the compiler must not make two of it.
    let verdict = black_box(verdict);
    let is_refused = verdict == abi::CLOSE_DONE && destroy_socket(socket) != 0;
    let result = if is_refused { abi::CLOSE_SKIPPED } else { verdict };
    // SAFETY: a map value stays in place while the program runs.
    unsafe { (*entry).result = result };
    CONTINUE_WALK
}

/// Compares the connection with the position that the request names. Returns the result for the request.
#[inline(always)]
fn compare_position(socket: *mut c_void, request: &CloseRequest) -> Result<u64, c_long> {
    let fields = socket_fields();
    // The state comes first, as below.
    if read_field::<u8>(socket, fields.state)? != TCP_ESTABLISHED {
        return Ok(abi::CLOSE_SKIPPED);
    }
    let state = ClientSocketState {
        written: read_field(socket, fields.write_seq)?,
        acknowledged: read_field(socket, fields.snd_una)?,
        expected: read_field(socket, fields.rcv_nxt)?,
        read: read_field(socket, fields.copied_seq)?,
        backlog: read_field(socket, fields.backlog)?,
    };
    Ok(judge_position(&state, request.bytes_acked as u32, request.bytes_received as u32))
}

/// Returns true if the connection is idle, unchanged since it was listed, and the client has its response.
///
/// Nothing has been written or has arrived, nothing is in flight or unread. The state comes first: half-open and
/// closing connections are shorter structures that share a full one's cookie.
///
/// `snd_wl1` detects a request that the pod's kernel has acknowledged and the pod has not answered. The last segment
/// that arrived is then that acknowledgement, so it begins where the next one is expected. After a response, the last
/// segment begins with the response's bytes. Times do not distinguish the two where the previous response, the request
/// and its acknowledgement fall into one tick.
#[inline(always)]
fn is_unused(socket: *mut c_void, request: &CloseRequest) -> Result<bool, c_long> {
    let fields = socket_fields();
    if read_field::<u8>(socket, fields.state)? != TCP_ESTABLISHED {
        return Ok(false);
    }
    let expected = read_field::<u32>(socket, fields.rcv_nxt)?;
    Ok(read_field::<u32>(socket, fields.write_seq)? == read_field::<u32>(socket, fields.snd_una)?
        && read_field::<u64>(socket, fields.bytes_acked)? == request.bytes_acked
        && read_field::<u64>(socket, fields.bytes_received)? == request.bytes_received
        && read_field::<u32>(socket, fields.copied_seq)? == expected
        && read_field::<u32>(socket, fields.snd_wl1)? != expected
        && read_field::<u32>(socket, fields.backlog)? == 0)
}

/// Returns the field offsets that the agent has set.
#[inline(always)]
fn socket_fields() -> SockFieldOffsets {
    // SAFETY: a live static; volatile because the agent overwrites it before loading.
    unsafe { ptr::read_volatile(&SOCKET_FIELDS) }
}

/// Reads one field of the socket. Rust has no CO-RE: the offset is data, so a helper must read.
#[inline(always)]
fn read_field<T: Copy>(socket: *mut c_void, offset: u16) -> Result<T, c_long> {
    let mut value = MaybeUninit::<T>::uninit();
    let addr = socket.cast::<u8>().wrapping_add(usize::from(offset)).cast_const().cast();
    // SAFETY: writes as many bytes as `value` has, whatever is at `addr`; only integers are read.
    match unsafe { bpf_probe_read_kernel(value.as_mut_ptr().cast(), size_of::<T>() as u32, addr) } {
        // SAFETY: the helper has filled it.
        0 => Ok(unsafe { value.assume_init() }),
        error => Err(error),
    }
}

/// Calls the kernel's `bpf_sock_destroy`: the owner's next call returns ECONNABORTED, and the peer gets a reset.
#[inline(always)]
fn destroy_socket(socket: *mut c_void) -> i32 {
    // SAFETY: the agent replaces the number by the function, which takes a socket of the context, locked by the
    // kernel.
    unsafe {
        let call: unsafe extern "C" fn(*mut c_void) -> i32 =
            core::mem::transmute(abi::SOCK_DESTROY_PLACEHOLDER as usize);
        call(socket)
    }
}
