//! Records of client sockets whose TCP connect was rewritten, and the gauges of open connections of their backends.

use core::{ffi::c_void, ptr};

use aya_ebpf::bindings::bpf_sock;
use datapath::abi::{self, BackendValue, ConnectRecord, FrontendKey};

use crate::{
    backend_choice::ChosenBackend,
    maps::{
        BACKENDS, CLAIMS, CLIENTS, CONTROL, MINUS_ONE, OVERFLOW, OVERFLOW_COPIES, add_to_control,
        atomic_add, increment_control, monotonic_ns, send_event,
    },
    sock_addr::{BpfSockAddr, address_bytes, address_words},
};

/// Generation that no backend has: a socket with it counts in no gauge. Generations begin with 1.
const NO_GAUGE_GENERATION: u64 = 0;

/// Number of rows of `CLIENTS`, a power of two, less one. Set by the agent before loading.
#[unsafe(no_mangle)]
static CONNECT_RECORD_MASK: u32 = abi::CLIENTS_MAX - 1;

/// Records a connect of TCP, and counts the socket in the backend's gauge.
#[inline(always)]
pub fn record_tcp_connect(ctx: BpfSockAddr, key: &FrontendKey, target: &ChosenBackend) {
    // The kernel reports no close of such sockets, so they would count forever.
    if ctx.is_mptcp_subflow() {
        return increment_control(abi::CONTROL_UNTRACKED);
    }
    let (socket, cookie) = (ctx.socket(), ctx.socket_cookie());
    let client = match find_record(socket, cookie) {
        // A socket may connect again after a failed attempt.
        Some(client) => {
            leave_gauge(client);
            client
        }
        None => match claim_record(cookie).or_else(|| create_overflow_record(socket)) {
            Some(client) => client,
            // No memory. The connect works, and the agent scans all clients in place of the recorded ones.
            None => {
                increment_control(abi::CONTROL_UNLISTED);
                return increment_control(abi::CONTROL_UNTRACKED);
            }
        },
    };
    client.socket_cookie = cookie;
    client.original_address = key.address;
    client.original_port_be = key.port_be;
    client.backend_address = address_bytes(target.address);
    client.backend_port_be = target.port_be;
    client.backend = target.backend;
    client.generation = target.generation;
    client.netns_cookie = recorded_namespace(ctx, target);
    // If the row is another backend's by now, no gauge counts this socket, and none will be lowered for it.
    if let Some(row) = recorded_backend(client) {
        // SAFETY: a live map value.
        atomic_add(unsafe { &raw mut (*row).open_connections }, 1);
        report_standby_connect(row, client.backend);
    }
    if has_overflow_records() && claimed_record(cookie).is_none() {
        copy_overflow_record(client, cookie);
    }
}

/// Returns the network namespace for the record of a socket that is led to this backend.
#[inline(always)]
fn recorded_namespace(ctx: BpfSockAddr, target: &ChosenBackend) -> u64 {
    match target.netns_cookie {
        0 => ctx.netns_cookie() | abi::NETNS_OF_ROUTED,
        of_endpoint => of_endpoint,
    }
}

/// Sends the event of a standby connect if the agent has armed the backend, which is a pod of another node that may be
/// frozen. The agent then checks that the pod's own agent has thawed it.
#[inline(always)]
fn report_standby_connect(row: *mut BackendValue, backend: u32) {
    // SAFETY: a live map value; a single word. Volatile, as user space writes it.
    if unsafe { ptr::read_volatile(&raw const (*row).connect_event) } == 0 {
        return;
    }
    // Of two connects on two CPUs both may send an event, which is harmless: the agent checks the pod once.
    // SAFETY: a live map value; a single word.
    unsafe { ptr::write_volatile(&raw mut (*row).connect_event, 0) };
    send_standby_connect(backend);
}

/// Sends the event of a connect to a pod that may be frozen. Returns 0. A function of its own: it is rare, and its event
/// would take space on the stack of each connect.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn send_standby_connect(backend: u32) -> u32 {
    send_event(abi::EVENT_STANDBY_CONNECT, backend, 0);
    0
}

/// Frees the record of a socket that is released. Returns false if it has none.
#[inline(always)]
pub fn release_record(socket: *mut bpf_sock, cookie: u64) -> bool {
    if let Some((row, claims)) = claimed_record(cookie) {
        leave_gauge(row);
        // Before the claim falls: the TCP connection closes later, on any CPU, and must not take the next socket's row
        // for its own.
        // SAFETY: a live map value; a single word, which only the socket that claimed the row writes.
        unsafe { ptr::write_volatile(&raw mut row.socket_cookie, 0) };
        atomic_add(claims, MINUS_ONE);
        return true;
    }
    let Some(client) = find_overflow_record(socket.cast()) else { return false };
    leave_gauge(client);
    remove_overflow_copy(cookie);
    add_to_control(abi::CONTROL_OVERFLOW, MINUS_ONE);
    true
}

/// Returns true if a connect of the socket was rewritten.
#[inline(always)]
pub fn has_record(socket: *mut c_void, cookie: u64) -> bool {
    find_record(socket, cookie).is_some()
}

/// Handles a socket that is no longer connected: its connect failed, the peer reset it, or its program disconnected it.
///
/// The socket itself may stay open indefinitely, so its gauge cannot wait for the release. Without a namespace in its
/// record, it is not ended either, if its program now connects to the same endpoint by the endpoint's own address.
#[inline(always)]
pub fn handle_disconnect(socket: *mut c_void, cookie: u64) {
    if let Some(client) = find_record(socket, cookie) {
        leave_gauge(client);
        client.netns_cookie = 0;
        if has_overflow_records() {
            remove_overflow_copy(cookie);
        }
    }
}

/// Returns true while the socket is connected, or connects, to the backend of its record.
#[inline(always)]
pub fn is_in_force(client: &ConnectRecord) -> bool {
    client.generation != NO_GAUGE_GENERATION
}

/// Removes a socket from its backend's gauge, once.
#[inline(always)]
fn leave_gauge(client: &mut ConnectRecord) {
    if let Some(row) = recorded_backend(client) {
        // SAFETY: a live map value.
        atomic_add(unsafe { &raw mut (*row).open_connections }, MINUS_ONE);
    }
    client.generation = NO_GAUGE_GENERATION;
}

/// Returns the backend that a socket was given, unless the number has been used for another one since.
#[inline(always)]
fn recorded_backend(client: &ConnectRecord) -> Option<*mut BackendValue> {
    let row = BACKENDS.get_ptr_mut(client.backend)?;
    // SAFETY: a live map value.
    (unsafe { (*row).generation } == client.generation).then_some(row)
}

/// Records that a socket's connect to this address is unanswered: later connects avoid the backend for a while.
///
/// The socket may have been given another address before, and then have connected to one that is no frontend.
#[inline(always)]
pub fn handle_unanswered(socket: *mut c_void, cookie: u64, address: [u32; 4], port: u32) {
    let Some(client) = find_record(socket, cookie) else { return };
    let same = address_words(client.backend_address) == address;
    if !same || u32::from(u16::from_be(client.backend_port_be)) != port {
        return;
    }
    let Some(row) = recorded_backend(client) else { return };
    // SAFETY: a live map value; one word is written at once.
    unsafe { ptr::write_volatile(&raw mut (*row).unanswered_ns, monotonic_ns()) };
    increment_control(abi::CONTROL_UNANSWERED);
}

/// Returns the record of a socket's rewritten connect.
#[inline(always)]
pub fn find_record(socket: *mut c_void, cookie: u64) -> Option<&'static mut ConnectRecord> {
    match claimed_record(cookie) {
        Some((row, _)) => Some(row),
        None => find_overflow_record(socket),
    }
}

/// Returns the row that a socket has claimed, and its claim count.
///
/// Cookies are never used twice, and a row is released without one. So a row between its claim and the store of its
/// cookie is no socket's.
#[inline(always)]
fn claimed_record(cookie: u64) -> Option<(&'static mut ConnectRecord, *mut u64)> {
    let claims = claim_count(cookie)?;
    // Most sockets that close never had a row; their rows are not in the cache and should not be read.
    // SAFETY: a word of a live map value. Volatile, as another CPU may write it.
    if unsafe { ptr::read_volatile(claims) } == 0 {
        return None;
    }
    let row = record_at(cookie)?;
    (row.socket_cookie == cookie).then_some((row, claims))
}

/// Claims a socket's row, if it is free.
///
/// There is no compare-and-swap before 5.12. So a socket has the row if its own claim is the only one; of two that try
/// at once, both may fail.
#[inline(always)]
fn claim_record(cookie: u64) -> Option<&'static mut ConnectRecord> {
    let claims = claim_count(cookie)?;
    // SAFETY: a word of a live map value. Volatile, as another CPU may write it.
    if unsafe { ptr::read_volatile(claims) } != 0 {
        return None;
    }
    atomic_add(claims, 1);
    // SAFETY: a word of a live map value. Volatile, as another CPU may write it.
    if unsafe { ptr::read_volatile(claims) } == 1 {
        return record_at(cookie);
    }
    atomic_add(claims, MINUS_ONE);
    None
}

/// Returns the index of a socket's row of `CLIENTS` and `CLAIMS`.
#[inline(always)]
fn record_index(cookie: u64) -> u32 {
    // SAFETY: a live static; volatile because the agent overwrites it before loading.
    cookie as u32 & unsafe { ptr::read_volatile(&CONNECT_RECORD_MASK) }
}

/// Returns the claim count of a socket's row.
#[inline(always)]
fn claim_count(cookie: u64) -> Option<*mut u64> {
    CLAIMS.get_ptr_mut(record_index(cookie))
}

/// Returns a socket's row of `CLIENTS`.
#[inline(always)]
fn record_at(cookie: u64) -> Option<&'static mut ConnectRecord> {
    let row = CLIENTS.get_ptr_mut(record_index(cookie))?;
    // SAFETY: a live map value; only the socket that claimed it writes it.
    Some(unsafe { &mut *row })
}

/// Returns a socket's storage, creating it.
#[inline(always)]
fn create_overflow_record(socket: *mut c_void) -> Option<&'static mut ConnectRecord> {
    let client = OVERFLOW.get_or_zero(socket)?;
    increment_control(abi::CONTROL_OVERFLOW);
    Some(client)
}

/// Copies the record in a socket's storage to a map that user space can read.
///
/// A present copy is replaced, so that user space reads no mixture of two.
#[inline(always)]
fn copy_overflow_record(client: &ConnectRecord, cookie: u64) {
    // Without memory for a copy, the connection stays open when its endpoint leaves, and an earlier copy must go.
    if OVERFLOW_COPIES.insert(cookie, client, 0).is_err() {
        let _none = OVERFLOW_COPIES.remove(cookie);
        increment_control(abi::CONTROL_UNLISTED);
    }
}

/// Removes the copy of the record in a socket's storage.
#[inline(always)]
fn remove_overflow_copy(cookie: u64) {
    // The look-up comes first, as a removal takes a lock of the map.
    if OVERFLOW_COPIES.get_ptr(cookie).is_some() {
        let _gone_meanwhile = OVERFLOW_COPIES.remove(cookie);
    }
}

/// Returns a socket's storage, if it has any; no look-up takes place while no socket has storage.
#[inline(always)]
fn find_overflow_record(socket: *mut c_void) -> Option<&'static mut ConnectRecord> {
    if has_overflow_records() { OVERFLOW.get(socket) } else { None }
}

/// Returns true if any socket has storage.
#[inline(always)]
fn has_overflow_records() -> bool {
    CONTROL.get(abi::CONTROL_OVERFLOW).is_some_and(|sockets| *sockets != 0)
}
