//! Reports connections of draining pods that become idle, so that they can be closed before their next request.

use aya_ebpf::bindings::__sk_buff;
use datapath::abi::{self, IdleEvent, ServerSocket};

use super::{connection_of, lock, segment_bytes, unlock};
use crate::{maps::send_idle_event, packet};

/// Sends an event if the packet's connection is idle. The packet is the last one of a response.
///
/// A function of its own: the verifier checks it once, and the programs of responses need their stack.
#[unsafe(no_mangle)]
#[inline(never)]
pub(super) extern "C" fn report_if_idle(skb: *mut __sk_buff) -> u32 {
    let Some(conn) = connection_of(skb) else { return 0 };
    let Some(ends) = packet::parse_ends(skb) else { return 0 };
    let Some([client_seq, pod_seq]) = idle_position(conn) else { return 0 };
    send_idle_event(&IdleEvent {
        kind: abi::EVENT_IDLE,
        client_port: ends.receiver_port,
        netns_cookie: conn.netns_cookie,
        client: ends.receiver,
        pod_port: ends.sender_port,
        client_seq,
        pod_seq,
        reserved: 0,
    });
    0
}

/// Returns the sequence numbers of the next bytes of client and pod, if only a next request can follow and all bytes
/// before these numbers were read.
///
/// Under the lock, so that both numbers and the boundaries are of one moment. A request that comes later begins at or
/// behind the client's number.
#[inline(always)]
fn idle_position(conn: &mut ServerSocket) -> Option<[u32; 2]> {
    lock(conn);
    let h1 = &conn.http.h1;
    let (client_seq, pod_seq) = (h1.rx.next, h1.tx.next);
    let is_idle = conn.pod_slot != 0
        && conn.http.protocol == abi::PROTOCOL_HTTP1
        && h1.awaits_request()
        && pod_seq == conn.http.tx_end_seq
        && !segment_bytes::has_pending(conn);
    unlock(conn);
    is_idle.then_some([client_seq, pod_seq])
}
