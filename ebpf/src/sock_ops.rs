//! Listeners and connections of pods, and client sockets: listen, accept, retransmit, close.

use core::{ffi::c_void, ptr};

use aya_ebpf::{
    bindings::{
        BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB, BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB,
        BPF_SOCK_OPS_RTO_CB, BPF_SOCK_OPS_RTO_CB_FLAG, BPF_SOCK_OPS_STATE_CB,
        BPF_SOCK_OPS_STATE_CB_FLAG, BPF_SOCK_OPS_TCP_CONNECT_CB, BPF_SOCK_OPS_TCP_LISTEN_CB,
        BPF_TCP_CLOSE, BPF_TCP_LISTEN, BPF_TCP_SYN_SENT, bpf_sock_ops,
    },
    helpers::generated::{
        bpf_get_netns_cookie, bpf_get_socket_cookie, bpf_load_hdr_opt, bpf_probe_read_kernel,
        bpf_sock_ops_cb_flags_set,
    },
};
use datapath::{
    abi::{self, ListenKey, PodValue, ProbeKey, ServerSocket, SocketBit},
    load_balancing,
};

use crate::{
    bind::{is_loopback, listen_entry},
    connect_records, count,
    maps::{
        CONNS, NODE, OLD_CONNS, POD_STATE, PODS, PROBES, atomic_add, atomic_add32,
        has_netns_cookie, increment_control, monotonic_ns, pod_port_flags, send_event,
    },
    packet,
};

const AF_INET6: u32 = 10;
/// Return value of all sock_ops programs.
const OK: u32 = 1;

/// Place of the bit in the kernel's socket that stands for IPV6_V6ONLY. Set by the agent before loading; the mask is 0
/// if the kernel's BTF does not show the place, or sock_ops programs may not read it.
#[unsafe(no_mangle)]
static V6_ONLY: SocketBit = SocketBit { byte_index: 0, mask: 0 };

/// Flag: 1 if programs of the previous ABI version still count connections. Set by the agent before loading.
#[unsafe(no_mangle)]
static HAVE_OLD: u8 = 0;

/// Validity of a mark on a connection of the kubelet's: from its end to the pod's it takes microseconds.
const PROBE_MARK_NS: u64 = 1_000_000_000;

/// Marks a connection of the kubelet's: if it ends at a pod of this node, the pod's program skips it as a probe.
#[inline(always)]
pub fn mark_kubelet_connection(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: the kernel hands in a live context.
    if unsafe { (*ops).op } == BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB {
        let key = ProbeKey { remote: local_address(ops), remote_port: local_port(ops) };
        let _better_a_probe_that_counts = PROBES.insert(key, monotonic_ns() + PROBE_MARK_NS, 0);
    }
    OK
}

/// Dispatches a sock_ops call to the function for its event.
#[inline(always)]
pub fn handle_sock_op(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: the kernel hands in a live context.
    match unsafe { (*ops).op } {
        BPF_SOCK_OPS_TCP_LISTEN_CB => handle_listen(ops),
        BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB => handle_established(ops),
        BPF_SOCK_OPS_STATE_CB => handle_state_change(ops),
        BPF_SOCK_OPS_TCP_CONNECT_CB => handle_connect(ops),
        BPF_SOCK_OPS_RTO_CB => handle_retransmit(ops),
        _ => {}
    }
    OK
}

/// Asks for retransmission and state events of a client socket whose connect was rewritten.
///
/// Its connect may be left unanswered, or may fail or be aborted long before the socket is closed.
#[inline(always)]
fn handle_connect(ops: *mut bpf_sock_ops) {
    // SAFETY: the helper takes the context as it is.
    let cookie = unsafe { bpf_get_socket_cookie(ops.cast()) };
    if connect_records::has_record(socket(ops), cookie) {
        enable_callbacks(ops, BPF_SOCK_OPS_RTO_CB_FLAG | BPF_SOCK_OPS_STATE_CB_FLAG);
    }
}

/// Handles a retransmission. That of a SYN means more than a lost packet: the backend may not answer.
#[inline(always)]
fn handle_retransmit(ops: *mut bpf_sock_ops) {
    // SAFETY: a live context; the helper takes it as it is.
    let (state, cookie) = unsafe { ((*ops).state, bpf_get_socket_cookie(ops.cast())) };
    if state == BPF_TCP_SYN_SENT {
        connect_records::handle_unanswered(
            socket(ops),
            cookie,
            count::remote_address(ops),
            count::remote_port(ops),
        );
    }
}

/// Counts a new listener under its namespace and port, and reports it.
#[inline(always)]
fn handle_listen(ops: *mut bpf_sock_ops) {
    let Some(conn) = identified_socket(ops) else { return };
    conn.pod_slot = 0;
    let entry = match listen_entry(&listen_key(ops, conn)) {
        Ok(entry) => entry,
        Err(control_word) => return increment_control(control_word),
    };
    enable_callbacks(ops, BPF_SOCK_OPS_STATE_CB_FLAG);
    // SAFETY: a live map value; single words.
    unsafe {
        (*entry).listening_since_ns = monotonic_ns();
        if is_loopback(&local_address(ops)) {
            conn.flags = abi::CONN_LOOPBACK;
            atomic_add32(&raw mut (*entry).loopback, 1);
        } else {
            if conn.flags & abi::CONN_WIDENED != 0 {
                atomic_add32(&raw mut (*entry).widened, 1);
            }
            conn.flags = conn.flags & abi::CONN_WIDENED | abi::CONN_LISTENS;
            (*entry).families |= served_families(ops);
            atomic_add32(&raw mut (*entry).reachable, 1);
        }
    }
    send_event(abi::EVENT_LISTEN, local_port(ops), conn.netns_cookie);
}

/// Handles an accepted connection.
///
/// It has no storage yet, except from an earlier run or from a packet on another CPU. Before 5.15 it has a copy of its
/// listener's storage, if that has any.
#[inline(always)]
fn handle_established(ops: *mut bpf_sock_ops) {
    let found = CONNS.get(socket(ops));
    let (cookie, is_open) = match &found {
        Some(conn) if conn.netns_cookie != 0 => {
            (conn.netns_cookie, conn.flags & abi::CONN_OPEN != 0)
        }
        _ => (netns_cookie(ops), false),
    };
    // Set only by an earlier run of this program for the same connection, which must not count twice.
    if !is_open {
        // SAFETY: the value is copied at once.
        let pod = unsafe { PODS.get(cookie).copied() };
        report_standby_connection(pod);
        if is_counted_by_previous_abi(ops) {
            return;
        }
        let (slot, protocol) = serving_pod(ops, cookie, pod);
        let slot = if slot != 0 && is_mptcp_join(ops) { count_mptcp_desync(slot) } else { slot };
        let Some(conn) = found.or_else(|| create_storage(ops, slot)) else { return };
        conn.netns_cookie = cookie;
        if slot == 0 {
            conn.flags = abi::CONN_UNCOUNTED;
            return;
        }
        enable_callbacks(ops, BPF_SOCK_OPS_STATE_CB_FLAG);
        count::open_connection(ops, conn, slot, protocol, is_from_node(ops));
    }
    let Some(conn) = CONNS.get(socket(ops)) else { return };
    if conn.http.protocol == abi::PROTOCOL_TCP {
        count::begin_opaque_connection(ops);
    } else {
        count::read_first_requests(ops, conn);
    }
}

/// Reports a connection to a pod that is frozen, or about to be: the agent thaws the pod. First of all, as a probe and
/// a connection that another version counts wait for the pod as well.
#[inline(always)]
fn report_standby_connection(pod: Option<PodValue>) {
    let Some(pod) = pod else { return };
    if pod.flags & abi::POD_STANDBY != 0 {
        send_event(abi::EVENT_GROWTH, pod.slot, 0);
    }
}

/// Returns true if a program of the previous ABI version has begun to count this connection.
///
/// That program was attached earlier, so it runs first, and it also counts the connection's end.
#[inline(always)]
fn is_counted_by_previous_abi(ops: *mut bpf_sock_ops) -> bool {
    // SAFETY: a live static; volatile because the agent overwrites it before loading.
    let has_previous = unsafe { ptr::read_volatile(&HAVE_OLD) } != 0;
    has_previous && OLD_CONNS.get(socket(ops)).is_some_and(|old| old.pod_slot != 0)
}

/// Returns true if the client has an address of the node itself, as the kubelet has.
#[inline(always)]
fn is_from_node(ops: *mut bpf_sock_ops) -> bool {
    // SAFETY: only the presence of the entry is used.
    unsafe { NODE.get(count::remote_address(ops)) }.is_some()
}

/// Returns the families of clients that a listener serves, as `SERVES_*` bits.
///
/// An IPv6 wildcard serves both families, unless its program has set IPV6_V6ONLY.
#[inline(always)]
fn served_families(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: a live context.
    if unsafe { ptr::read_volatile(&raw const (*ops).family) } != AF_INET6 {
        return abi::SERVES_V4;
    }
    match local_address(ops) {
        [0, 0, 0, 0] if !is_v6_only(ops) => abi::SERVES_V4 | abi::SERVES_V6,
        words if load_balancing::is_ipv4_mapped(&words) => abi::SERVES_V4,
        _ => abi::SERVES_V6,
    }
}

/// Returns true if the socket has IPV6_V6ONLY; false where that is unknown.
#[inline(always)]
fn is_v6_only(ops: *mut bpf_sock_ops) -> bool {
    // SAFETY: a live static; volatile because the agent overwrites it before loading.
    let bit = unsafe { ptr::read_volatile(&V6_ONLY) };
    if bit.mask == 0 {
        return false;
    }
    // Read from the socket's beginning: the verifier allows no offset to be added to its address.
    let mut head = [0_u8; abi::SOCK_HEAD_BYTES];
    let (to, size) = (head.as_mut_ptr().cast(), abi::SOCK_HEAD_BYTES as u32);
    // SAFETY: writes `size` bytes to a live local. Where the helper is missing, the verifier drops this branch.
    let failed = unsafe { bpf_probe_read_kernel(to, size, socket(ops).cast_const()) } != 0;
    !failed && head[usize::from(bit.byte_index) % abi::SOCK_HEAD_BYTES] & bit.mask != 0
}

/// Creates storage for a connection that counts; others have none, as its allocation would cost each of them 1 µs.
///
/// With Fast Open, further packets come in a state in which they would be buffered for a connection without storage.
#[inline(always)]
fn create_storage(ops: *mut bpf_sock_ops, slot: u32) -> Option<&'static mut ServerSocket> {
    let is_needed = slot != 0 || (has_netns_cookie() && is_fast_open(ops));
    if is_needed { CONNS.get_or_zero_shared(socket(ops)) } else { None }
}

/// Returns true if a SYN with data has established the connection, before the handshake ends.
#[inline(always)]
fn is_fast_open(ops: *mut bpf_sock_ops) -> bool {
    // SAFETY: a live context; a single word.
    unsafe { ptr::read_volatile(&raw const (*ops).skb_tcp_flags) & packet::SYN_FLAG != 0 }
}

/// Returns the row of the pod to which a connection brings requests, and the protocol with which it begins; row 0
/// means none. `pod` is the entry of the namespace with this cookie.
#[inline(always)]
fn serving_pod(ops: *mut bpf_sock_ops, cookie: u64, pod: Option<PodValue>) -> (u32, u32) {
    const NONE: (u32, u32) = (0, abi::PROTOCOL_HTTP1);
    let Some(pod) = pod else { return NONE };
    let key = ListenKey { netns_cookie: cookie, port: local_port(ops), reserved: 0 };
    let Some(flags) = pod_port_flags(pod, &key) else { return NONE };
    if is_uncounted(ops) {
        return NONE;
    }
    let is_opaque = flags & abi::POD_PORT_OPAQUE != 0;
    (pod.slot, if is_opaque { abi::PROTOCOL_TCP } else { abi::PROTOCOL_HTTP1 })
}

/// Returns true if the connection is a further subflow of a Multipath TCP connection.
///
/// The segment that ends its handshake has the MP_JOIN option (RFC 8684, §3.2).
#[inline(always)]
fn is_mptcp_join(ops: *mut bpf_sock_ops) -> bool {
    /// Kind number of Multipath TCP among TCP options.
    const MULTIPATH: u8 = 30;
    /// Subtype of MP_JOIN, in the upper half of the option's third byte.
    const JOIN: u8 = 1;
    let mut option = [MULTIPATH, 0, 0, 0];
    // SAFETY: a live context, and a buffer of the given length, to which a longer option is cut. (5.10)
    unsafe { bpf_load_hdr_opt(ops, option.as_mut_ptr().cast(), option.len() as u32, 0) };
    option[2] >> 4 == JOIN
}

/// Counts a further subflow of a Multipath TCP connection as a desync, and returns slot 0, which means no pod.
///
/// Messages are spread over all subflows, so boundaries are lost in each. The first subflow represents the connection;
/// the others are not counted.
#[inline(always)]
fn count_mptcp_desync(slot: u32) -> u32 {
    if let Some(pod) = POD_STATE.get_ptr_mut(slot) {
        // SAFETY: a live map value; a single word.
        unsafe { atomic_add(&raw mut (*pod).desynced_connections, 1) };
    }
    0
}

/// Returns true if the connection brings no requests of the service: a probe's, or one between containers of the pod.
///
/// Such a connection gets no row, so its packets are skipped and its close changes nothing.
#[inline(always)]
fn is_uncounted(ops: *mut bpf_sock_ops) -> bool {
    let key = ProbeKey { remote: count::remote_address(ops), remote_port: count::remote_port(ops) };
    if is_loopback(&key.remote) {
        return true;
    }
    // SAFETY: the value is read at once.
    let Some(until) = (unsafe { PROBES.get(key).copied() }) else { return false };
    let _gone_already = PROBES.remove(key);
    monotonic_ns() < until
}

/// Handles a state change: only the change to CLOSE matters.
#[inline(always)]
fn handle_state_change(ops: *mut bpf_sock_ops) {
    // SAFETY: a live context; STATE_CB comes with the old and the new state.
    let (old, new) = unsafe { ((*ops).__bindgen_anon_1.args[0], (*ops).__bindgen_anon_1.args[1]) };
    if new != BPF_TCP_CLOSE {
        return;
    }
    // SAFETY: the helper takes the context as it is.
    connect_records::handle_disconnect(socket(ops), unsafe { bpf_get_socket_cookie(ops.cast()) });
    let Some(conn) = CONNS.get(socket(ops)) else { return };
    // A connection may begin with its listener's flags, and close before it is established: the state tells them apart.
    if old == BPF_TCP_LISTEN {
        handle_listener_close(ops, conn);
    } else if conn.flags & abi::CONN_OPEN != 0 {
        conn.flags = 0;
        count::close_connection(conn, socket(ops));
    }
}

/// Removes a listener from the entry of its namespace and port, and reports it.
#[inline(always)]
fn handle_listener_close(ops: *mut bpf_sock_ops, conn: &mut ServerSocket) {
    const MINUS_ONE: u32 = 1u32.wrapping_neg();
    let counted = conn.flags & (abi::CONN_LISTENS | abi::CONN_LOOPBACK) != 0;
    if !counted {
        return;
    }
    let Ok(entry) = listen_entry(&listen_key(ops, conn)) else { return };
    // SAFETY: a live map value; single words.
    unsafe {
        if conn.flags & abi::CONN_LOOPBACK != 0 {
            atomic_add32(&raw mut (*entry).loopback, MINUS_ONE);
        } else {
            atomic_add32(&raw mut (*entry).reachable, MINUS_ONE);
            if conn.flags & abi::CONN_WIDENED != 0 {
                atomic_add32(&raw mut (*entry).widened, MINUS_ONE);
            }
        }
        if (*entry).reachable == 0 {
            (*entry).families = 0;
        }
    }
    conn.flags &= abi::CONN_WIDENED;
    send_event(abi::EVENT_LISTENER_CLOSED, local_port(ops), conn.netns_cookie);
}

/// Returns the socket's storage, with the cookie of its namespace; `None` if the cookie is unknown.
#[inline(always)]
fn identified_socket(ops: *mut bpf_sock_ops) -> Option<&'static mut ServerSocket> {
    let conn = CONNS.get_or_zero(socket(ops))?;
    if conn.netns_cookie == 0 {
        conn.netns_cookie = netns_cookie(ops);
    }
    (conn.netns_cookie != 0).then_some(conn)
}

/// Returns the cookie of the socket's network namespace; 0 means that it is unknown.
#[inline(always)]
fn netns_cookie(ops: *mut bpf_sock_ops) -> u64 {
    if !has_netns_cookie() {
        return 0;
    }
    // SAFETY: the helper takes the context as it is. Where it is missing, the verifier drops this branch.
    unsafe { bpf_get_netns_cookie(ops.cast()) }
}

/// Requests further events of this socket: state changes, or retransmissions.
#[inline(always)]
fn enable_callbacks(ops: *mut bpf_sock_ops, added_flags: u32) {
    // SAFETY: a live context. Flags that other programs have set are kept.
    unsafe {
        let flags = (*ops).bpf_sock_ops_cb_flags | added_flags;
        bpf_sock_ops_cb_flags_set(ops, flags as i32);
    }
}

/// Returns the key of a listener's entry.
#[inline(always)]
fn listen_key(ops: *mut bpf_sock_ops, conn: &ServerSocket) -> ListenKey {
    ListenKey { netns_cookie: conn.netns_cookie, port: local_port(ops), reserved: 0 }
}

/// Returns the local port, in host byte order.
#[inline(always)]
fn local_port(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: a live context.
    unsafe { ptr::read_volatile(&raw const (*ops).local_port) }
}

/// Returns the socket of the call.
#[inline(always)]
fn socket(ops: *mut bpf_sock_ops) -> *mut c_void {
    // SAFETY: a live context; the field is a pointer in every kernel that has socket storage for sock_ops.
    unsafe { (*ops).__bindgen_anon_2.sk.cast() }
}

/// Returns the local address in memory order; IPv4 as an IPv4-mapped one.
#[inline(always)]
fn local_address(ops: *mut bpf_sock_ops) -> [u32; 4] {
    // SAFETY: a live context; each word is read by itself and always. The compiler turns a choice between two words
    // into a choice between two pointers into the context, which the verifier refuses.
    let (is_ipv6, ipv4, words) = unsafe {
        let is_ipv6 = ptr::read_volatile(&raw const (*ops).family) == AF_INET6;
        let ipv4 = ptr::read_volatile(&raw const (*ops).local_ip4);
        let words = [
            ptr::read_volatile(&raw const (*ops).local_ip6[0]),
            ptr::read_volatile(&raw const (*ops).local_ip6[1]),
            ptr::read_volatile(&raw const (*ops).local_ip6[2]),
            ptr::read_volatile(&raw const (*ops).local_ip6[3]),
        ];
        (is_ipv6, ipv4, words)
    };
    if is_ipv6 { words } else { [0, 0, load_balancing::IPV4_MAPPED_WORD, ipv4] }
}
