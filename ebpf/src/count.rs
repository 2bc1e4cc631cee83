//! Requests in flight, from the packets of pods' connections.
//!
//! [`common::h1`] tells message boundaries from segments in any order; this file brings it the segments and turns what
//! it says into counts. A segment is judged by our own next-sequence words, since the socket's own may stand still
//! while its program holds it. Heads and chunk sizes are copied in windows; bodies are not read.
//!
//! Data that comes before its connection is established, or behind a gap that matters, waits in `KEPT` under its
//! sender and sequence number, until `opened` or the segment before it calls for it.

use core::{ffi::c_void, hint::black_box, mem::MaybeUninit, ptr};

use aya_ebpf::{
    EbpfContext as _,
    bindings::{__sk_buff, bpf_sock_ops},
    helpers::generated::{
        bpf_get_smp_processor_id, bpf_skb_load_bytes, bpf_spin_lock, bpf_spin_unlock, bpf_tcp_sock,
    },
    maps::ProgramArray,
    programs::{SkBuffContext, SockOpsContext},
};
use common::{
    abi::{self, Conn, Kept, KeptKey, ProbeKey},
    flow,
    h1::{self, Happened, Seek, Window, probe},
};

use crate::{
    maps::{
        BLANK, CONNS, COUNTERS, EGRESS, HEAD, INGRESS, KEPT, NODE, POD_STATE, PODS, PROBES,
        RESPONSES, SOCKETS, add, announce, now,
    },
    packet::{self, Segment},
};

/// Verdict: let the packet pass.
const PASS: i32 = 1;
/// Windows read of one packet in one run of a program.
const ROUNDS: u32 = 2;
/// Index of program `suspects` in `INGRESS`.
const SUSPECTS: u32 = 1;
/// How long a probe that came to a listener may take to be accepted, ns.
const PROBE_NS: u64 = 1_000_000_000;
/// Minus one, for blind adds.
const LESS: u64 = 1u64.wrapping_neg();
const AF_INET6: u32 = 10;

/// Where the bytes of a segment are.
#[derive(Clone, Copy)]
struct Source {
    skb: *mut __sk_buff,
    /// Where the payload begins in the packet.
    offset: u32,
    /// Instead of the packet, if not null.
    kept: *const Kept,
    seq: u32,
    len: u32,
}

/// How the reading of a segment ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// Everything is taken in.
    Done,
    /// Bytes before it are missing.
    Gap,
    /// More windows than one run may read.
    Budget,
}

/// A connection to a pod's serving port is established.
#[inline(always)]
pub fn opened(ops: *mut bpf_sock_ops, conn: &mut Conn, is_suspect: bool) {
    // SAFETY: a live context; single words.
    let (rcv_nxt, snd_nxt) = unsafe {
        (
            ptr::read_volatile(&raw const (*ops).rcv_nxt),
            ptr::read_volatile(&raw const (*ops).snd_nxt),
        )
    };
    lock(conn);
    conn.http.h1.open(rcv_nxt, snd_nxt);
    conn.http.flags = abi::HTTP_FRESH | if is_suspect { abi::HTTP_SUSPECT } else { 0 };
    conn.http.kept = 0;
    unlock(conn);
    if let Some(pod) = POD_STATE.get_ptr_mut(conn.slot) {
        // SAFETY: a live map value; single words.
        unsafe {
            add(&raw mut (*pod).connections, 1);
            add(&raw mut (*pod).fresh, 1);
            // The kubelet knocks every second: that keeps no pod from being quiet.
            if !is_suspect {
                (*pod).changed_ns = now();
            }
        }
    }
}

/// Takes in what came to the listener before its connection was established.
#[inline(always)]
pub fn first_requests(ops: *mut bpf_sock_ops, conn: &mut Conn) {
    // SAFETY: a live context; a single word.
    let seq = unsafe { ptr::read_volatile(&raw const (*ops).rcv_nxt) };
    let key = KeptKey { remote: remote(ops), remote_port: remote_port(ops), seq };
    let Some(kept) = KEPT.get_ptr(key) else { return };
    // SAFETY: a live map value; a single word.
    let len = unsafe { (*kept).len };
    let source = Source { skb: ptr::null_mut(), offset: 0, kept, seq, len };
    if take_requests(conn, source, None, 1) != End::Done {
        // SAFETY: the program behind the array has this context's type.
        unsafe { SOCKETS.tail_call(&SockOpsContext::new(ops), 0) };
        lose(conn, true);
    }
    let _gone_already = KEPT.remove(key);
}

/// Whether a request's head has the kubelet's name.
#[inline(always)]
fn names_probe(skb: *mut __sk_buff, segment: &Segment) -> bool {
    let Some(head) = HEAD.get_ptr_mut(0) else { return false };
    let len = packet::bounded(segment.len, probe::SEARCHED);
    // SAFETY: `SEARCHED` bytes and more stand there, and `len` is at most that.
    if len == 0 || unsafe { bpf_skb_load_bytes(skb.cast(), segment.offset, head.cast(), len) } != 0
    {
        return false;
    }
    let bytes = head.cast::<u8>();
    probe::is_probe(len, |at| {
        // SAFETY: the search ends 24 bytes before `HEAD` does.
        u64::from_le(unsafe { ptr::read_unaligned(bytes.add(at).cast::<u64>()) })
    })
}

/// A connection that was `opened` is closed.
#[inline(always)]
pub fn closed(conn: &mut Conn) {
    end(conn);
    if let Some(pod) = POD_STATE.get_ptr_mut(conn.slot) {
        // SAFETY: a live map value; single words.
        unsafe {
            add(&raw mut (*pod).connections, LESS);
            if conn.http.flags & abi::HTTP_FRESH != 0 {
                add(&raw mut (*pod).fresh, LESS);
            }
        }
    }
    conn.http.flags = 0;
}

#[inline(always)]
pub fn ingress(ctx: &SkBuffContext) -> i32 {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    let Some(segment) = packet::segment(skb) else { return PASS };
    if segment.len == 0 {
        return PASS;
    }
    let Some(conn) = CONNS.get(socket(skb)) else { return PASS };
    let Segment { seq, len, offset, .. } = segment;
    let source = Source { skb, offset, kept: ptr::null(), seq, len };
    if conn.slot == 0 {
        if conn.flags & abi::CONN_LISTENS != 0 {
            early(ctx, &segment, conn);
        }
        return PASS;
    }
    if conn.http.flags & abi::HTTP_SUSPECT != 0 && segment.seq == conn.http.h1.rx.next {
        // SAFETY: the program behind the array has this context's type.
        unsafe { INGRESS.tail_call(ctx, SUSPECTS) };
        conn.http.flags &= !abi::HTTP_SUSPECT;
    }
    match take_requests(conn, source, Some(skb), ROUNDS) {
        End::Done => {}
        // Goes on in a new run of this program, where this one has stopped.
        End::Budget => again(ctx, &INGRESS, conn, true),
        End::Gap if keep(skb, &segment) => conn.http.kept += 1,
        End::Gap => lose(conn, true),
    }
    PASS
}

#[inline(always)]
pub fn egress(ctx: &SkBuffContext) -> i32 {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    let Some(segment) = packet::segment(skb) else { return PASS };
    let Some(conn) = CONNS.get(socket(skb)) else { return PASS };
    if conn.slot == 0 {
        return PASS;
    }
    if segment.len > 0 {
        match take_responses(conn, skb, &segment) {
            End::Done => {}
            End::Budget => again(ctx, &EGRESS, conn, false),
            End::Gap => lose(conn, false),
        }
    }
    if segment.fin && conn.http.h1.tx.next == segment.seq.wrapping_add(segment.len) {
        end(conn);
    }
    PASS
}

/// Data on a listener: its connection exists only once this very packet has been worked on.
#[inline(always)]
fn early(ctx: &SkBuffContext, segment: &Segment, conn: &Conn) {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    // SAFETY: only asks whether there is one.
    if unsafe { PODS.get(conn.cookie) }.is_none() {
        return;
    }
    let Some((remote, _)) = packet::sender(skb) else { return };
    // SAFETY: as above.
    if unsafe { NODE.get(remote) }.is_some() {
        // SAFETY: the program behind the array has this context's type.
        unsafe { INGRESS.tail_call(ctx, SUSPECTS) };
    }
    keep(skb, segment);
}

/// The first data of a connection from the node itself. A program of its own: the search is long for the verifier, which
/// would follow it anew from each way that leads to it.
#[inline(always)]
pub fn suspects(ctx: &SkBuffContext) -> i32 {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    let Some(segment) = packet::segment(skb) else { return PASS };
    let is_probe = segment.len > 0 && names_probe(skb, &segment);
    let Some(conn) = CONNS.get(socket(skb)) else { return PASS };
    if conn.slot == 0 {
        match packet::sender(skb) {
            // Its connection will be passed over like any other probe's.
            Some((remote, remote_port)) if is_probe => {
                let key = ProbeKey { remote, remote_port };
                let _counts_then = PROBES.insert(key, now() + PROBE_NS, 0);
            }
            _ => _ = keep(skb, &segment),
        }
        return PASS;
    }
    conn.http.flags &= !abi::HTTP_SUSPECT;
    if is_probe {
        // From now on nobody counts it.
        closed(conn);
        conn.slot = 0;
        conn.flags = 0;
    } else {
        // SAFETY: the program behind the array has this context's type.
        unsafe { INGRESS.tail_call(ctx, 0) };
    }
    PASS
}

/// Walks the requests in a segment, and in kept ones that follow it.
#[inline(always)]
fn take_requests(
    conn: &mut Conn,
    mut source: Source,
    skb: Option<*mut __sk_buff>,
    rounds: u32,
) -> End {
    // The verifier wants every byte written before a copy of unknown length.
    let mut window = MaybeUninit::uninit();
    let window = packet::zero(&mut window);
    let (mut have, mut from) = match peek(&conn.http.h1.rx, source.seq, source.len) {
        Some(offset) => (load(&source, offset, window), source.seq.wrapping_add(offset)),
        None => (0, 0),
    };
    let mut round = 0;
    while round < rounds {
        lock(conn);
        let h1 = &mut conn.http.h1;
        if round == 0 && h1.rx.at == h1::at::LOST {
            h1.resume_requests(source.seq);
        }
        if have > 0 && h1.rx.next == from {
            conn.http.happened |= h1.read_request(window, have).happened;
        }
        let h1 = black_box(&mut conn.http.h1);
        let seek = h1.rx.seek(source.seq, source.len);
        conn.http.happened |= h1.after_request_seek();
        let next = h1.rx.next;
        let happened = happened(conn);
        unlock(conn);
        apply(conn, happened, 0);
        match seek {
            Seek::Gap => return End::Gap,
            Seek::Read(offset) => {
                from = next;
                have = load(&source, offset, window);
                if have == 0 {
                    return End::Budget;
                }
            }
            Seek::Done => {
                let Some(skb) = skb.filter(|_| conn.http.kept > 0) else { return End::Done };
                let Some(kept) = kept(skb, next) else { return End::Done };
                conn.http.kept -= 1;
                have = 0;
                // SAFETY: a live map value; a single word.
                source = Source { kept, seq: next, len: unsafe { (*kept).len }, ..source };
            }
        }
        round += 1;
    }
    End::Budget
}

/// Walks the responses in a segment.
#[inline(always)]
fn take_responses(conn: &mut Conn, skb: *mut __sk_buff, segment: &Segment) -> End {
    // The verifier wants every byte written before a copy of unknown length.
    let mut window = MaybeUninit::uninit();
    let window = packet::zero(&mut window);
    let Segment { seq, len, offset: begin, .. } = *segment;
    let (mut have, mut from) = match peek(&conn.http.h1.tx, seq, len) {
        Some(offset) => {
            let left = len.wrapping_sub(offset);
            (packet::load(skb, begin.wrapping_add(offset), left, window), seq.wrapping_add(offset))
        }
        None => (0, 0),
    };
    let mut round = 0;
    while round < ROUNDS {
        lock(conn);
        let h1 = &mut conn.http.h1;
        if have > 0 && h1.tx.next == from {
            conn.http.happened |= h1.read_response(window, have).happened;
        }
        let h1 = black_box(&mut conn.http.h1);
        let seek = h1.tx.seek(segment.seq, segment.len);
        conn.http.happened |= h1.after_response_seek();
        let (next, status) = (h1.tx.next, h1.tx.status);
        let mut happened = happened(conn);
        unlock(conn);
        if happened & h1::STRAY != 0 && missed(conn, skb) {
            happened = happened & !h1::STRAY | h1::MISSED;
        }
        apply(conn, happened, status);
        match seek {
            Seek::Gap => return End::Gap,
            Seek::Done => return End::Done,
            Seek::Read(offset) => {
                from = next;
                let left = segment.len.wrapping_sub(offset);
                have = packet::load(skb, segment.offset.wrapping_add(offset), left, window);
                if have == 0 {
                    return End::Budget;
                }
            }
        }
        round += 1;
    }
    End::Budget
}

/// Where reading most likely goes on, before the lock is taken: helpers may not be called with it held.
///
/// What it finds is checked once the lock is held.
#[inline(always)]
fn peek(side: &h1::Side, seq: u32, len: u32) -> Option<u32> {
    // SAFETY: words of a live map value. Volatile, as another CPU may write them.
    let (next, skip, at) = unsafe {
        let next = ptr::read_volatile(&raw const side.next);
        (next, ptr::read_volatile(&raw const side.skip), ptr::read_volatile(&raw const side.at))
    };
    let offset = next.wrapping_sub(seq);
    (offset < len && skip == 0 && at < h1::at::TUNNEL).then_some(offset)
}

/// Whether a response without a request answers one that we did not see: the socket has taken in more than we have.
#[inline(always)]
fn missed(conn: &mut Conn, skb: *mut __sk_buff) -> bool {
    let socket = socket(skb);
    if socket.is_null() {
        return false;
    }
    // SAFETY: a socket of the context, not null.
    let tcp = unsafe { bpf_tcp_sock(socket.cast()) };
    if tcp.is_null() {
        return false;
    }
    // SAFETY: not null; a single word.
    let ahead = unsafe { (*tcp).rcv_nxt }.wrapping_sub(conn.http.h1.rx.next) as i32;
    // A FIN takes one number of the sequence.
    let missed = ahead > 1;
    if missed {
        lose(conn, true);
    }
    missed
}

/// Runs the program anew: what it has read already is behind its next-sequence word. The kernel allows 33 such runs a
/// packet; then the boundaries are given up.
#[inline(always)]
fn again(ctx: &SkBuffContext, program: &ProgramArray, conn: &mut Conn, requests: bool) {
    // SAFETY: the program behind the array has this context's type.
    unsafe { program.tail_call(ctx, 0) };
    lose(conn, requests);
}

/// Gives up the boundaries of one direction.
#[inline(always)]
fn lose(conn: &mut Conn, requests: bool) {
    lock(conn);
    let h1 = &mut conn.http.h1;
    conn.http.happened |= if requests { h1.lose_requests() } else { h1.lose_responses() };
    let happened = happened(conn);
    unlock(conn);
    apply(conn, happened, 0);
}

/// Ends what is in flight: the server sends nothing more.
#[inline(always)]
fn end(conn: &mut Conn) {
    lock(conn);
    let h1 = &mut conn.http.h1;
    let status = h1.tx.status;
    conn.http.happened |= h1.close();
    let happened = happened(conn);
    unlock(conn);
    apply(conn, happened, status);
}

/// What has happened since the last call. To be called with the lock held.
#[inline(always)]
fn happened(conn: &mut Conn) -> Happened {
    // SAFETY: a word of a live map value. Volatile: what is read from memory is one unknown to the verifier, which
    // then follows one way on, instead of each that led here.
    unsafe {
        let happened = ptr::read_volatile(&raw const conn.http.happened);
        ptr::write_volatile(&raw mut conn.http.happened, 0);
        happened
    }
}

/// Turns what happened into counts.
#[inline(always)]
fn apply(conn: &mut Conn, happened: Happened, status: u16) {
    if happened == 0 {
        return;
    }
    let Some(pod) = POD_STATE.get_ptr_mut(conn.slot) else { return };
    let at = now();
    // SAFETY: takes nothing and always answers.
    let cpu = unsafe { bpf_get_smp_processor_id() };
    let index = cpu.wrapping_mul(abi::PODS_MAX).wrapping_add(conn.slot);
    let Some(row) = COUNTERS.get_ptr_mut(index) else { return };
    let started = happened & (h1::STARTED | h1::MISSED) != 0;
    let finished = happened & (h1::FINISHED | h1::MISSED) != 0;
    // SAFETY: live map values; single words.
    unsafe {
        add(&raw mut (*row).begin, 1);
        if finished {
            add(&raw mut (*row).finished, 1);
            add(&raw mut (*row).finished_sum_ns, at);
        }
        if started {
            add(&raw mut (*row).started, 1);
            add(&raw mut (*row).started_sum_ns, at);
        }
        add(&raw mut (*row).end, 1);
        if started != finished {
            add(&raw mut (*pod).in_flight, if started { 1 } else { LESS });
        }
        if finished {
            let began = if happened & h1::MISSED != 0 { at } else { conn.http.began_ns };
            // The request may have begun on another CPU, after the clock was read here: then it took no time, not all.
            answered(index, status, at.saturating_sub(began));
            (*pod).changed_ns = at;
        }
        if started {
            conn.http.began_ns = at;
            if conn.http.flags & abi::HTTP_FRESH != 0 {
                conn.http.flags &= !abi::HTTP_FRESH;
                add(&raw mut (*pod).fresh, LESS);
            }
            if (*pod).armed != 0 {
                (*pod).armed = 0;
                announce(abi::EVENT_BUSY, conn.slot, 0);
            }
        }
        if happened & (h1::DESYNC | h1::OPAQUE | h1::STRAY) != 0 {
            let word = match happened {
                _ if happened & h1::OPAQUE != 0 => &raw mut (*pod).opaque,
                _ if happened & h1::STRAY != 0 => &raw mut (*pod).stray,
                _ => &raw mut (*pod).desync,
            };
            add(word, 1);
        }
    }
}

/// Counts a response by class and time.
#[inline(always)]
fn answered(index: u32, status: u16, took_ns: u64) {
    let Some(row) = RESPONSES.get_ptr_mut(index) else { return };
    let class = match status {
        100..200 => 0,
        200..300 => 1,
        300..400 => 2,
        400..500 => 3,
        500..600 => 4,
        _ => abi::STATUS_CLASSES,
    };
    let mut bucket = 0;
    while bucket < abi::LATENCY_BUCKETS - 1 && took_ns > abi::LATENCY_BOUNDS_US[bucket] * 1_000 {
        bucket += 1;
    }
    // SAFETY: a live map value; both indices are inside their arrays.
    unsafe {
        // Behind the classes stands what could not be seen.
        add((&raw mut (*row).status).cast::<u64>().add(class), 1);
        add(&raw mut (*row).latency_sum_ns, took_ns);
        add((&raw mut (*row).latency).cast::<u64>().add(bucket), 1);
    }
}

/// Copies a window of a segment from `offset` in its payload. Returns how many bytes; 0: none.
#[inline(always)]
fn load(source: &Source, offset: u32, window: &mut Window) -> u32 {
    let left = source.len.wrapping_sub(offset);
    if source.kept.is_null() {
        return packet::load(source.skb, source.offset.wrapping_add(offset), left, window);
    }
    let offset = packet::bounded(offset, abi::KEPT_BYTES as u32) as usize;
    let left = if left > 0 { left.min((abi::KEPT_BYTES - offset) as u32) } else { 0 };
    // SAFETY: `bytes` is a window longer than `KEPT_BYTES`, and `offset` at most that.
    let from = unsafe { (&raw const (*source.kept).bytes).cast::<u8>().add(offset).cast::<u64>() };
    let mut index = 0;
    while index < h1::WINDOW / 8 {
        // SAFETY: as above.
        window[index] = unsafe { ptr::read_unaligned(from.add(index)) };
        index += 1;
    }
    if left > h1::WINDOW as u32 { h1::WINDOW as u32 } else { left }
}

/// Keeps a segment for later. Returns whether that worked.
#[inline(always)]
fn keep(skb: *mut __sk_buff, segment: &Segment) -> bool {
    let Some((remote, remote_port)) = packet::sender(skb) else { return false };
    let key = KeptKey { remote, remote_port, seq: segment.seq };
    let Some(blank) = BLANK.get(0) else { return false };
    if KEPT.insert(key, blank, 0).is_err() {
        return false;
    }
    let Some(kept) = KEPT.get_ptr_mut(key) else { return false };
    let len = packet::bounded(segment.len, abi::KEPT_BYTES as u32);
    if len == 0 {
        return false;
    }
    // SAFETY: a live map value with room for `KEPT_BYTES`, which `len` does not exceed.
    unsafe {
        let bytes = (&raw mut (*kept).bytes).cast::<c_void>();
        if bpf_skb_load_bytes(skb.cast(), segment.offset, bytes, len) != 0 {
            return false;
        }
        (*kept).len = segment.len;
    }
    true
}

/// The kept segment of the packet's sender that begins at `seq`.
#[inline(always)]
fn kept(skb: *mut __sk_buff, seq: u32) -> Option<*const Kept> {
    let (remote, remote_port) = packet::sender(skb)?;
    KEPT.get_ptr(KeptKey { remote, remote_port, seq })
}

#[inline(always)]
fn lock(conn: &mut Conn) {
    // SAFETY: a lock in a live map value, which the kernel knows by its type's name.
    unsafe { bpf_spin_lock((&raw mut conn.http.lock).cast()) };
}

#[inline(always)]
fn unlock(conn: &mut Conn) {
    // SAFETY: as in `lock`.
    unsafe { bpf_spin_unlock((&raw mut conn.http.lock).cast()) };
}

#[inline(always)]
fn socket(skb: *mut __sk_buff) -> *mut c_void {
    // SAFETY: a live context; the verifier turns the field into a socket pointer.
    unsafe { (*skb).__bindgen_anon_2.sk.cast() }
}

#[inline(always)]
pub fn remote_port(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: a live context. The field holds the port in network byte order in its upper half.
    u32::from_be(unsafe { ptr::read_volatile(&raw const (*ops).remote_port) })
}

/// Remote address in memory order, IPv4 as mapped.
#[inline(always)]
pub fn remote(ops: *mut bpf_sock_ops) -> [u32; 4] {
    // SAFETY: a live context; each word is read by itself and always, as the verifier wants.
    let (six, four, words) = unsafe {
        let six = ptr::read_volatile(&raw const (*ops).family) == AF_INET6;
        let four = ptr::read_volatile(&raw const (*ops).remote_ip4);
        let words = [
            ptr::read_volatile(&raw const (*ops).remote_ip6[0]),
            ptr::read_volatile(&raw const (*ops).remote_ip6[1]),
            ptr::read_volatile(&raw const (*ops).remote_ip6[2]),
            ptr::read_volatile(&raw const (*ops).remote_ip6[3]),
        ];
        (six, four, words)
    };
    // An IPv6 socket with an IPv4 peer has it mapped already, as packets' senders are noted.
    if six { words } else { [0, 0, flow::MAPPED, four] }
}
