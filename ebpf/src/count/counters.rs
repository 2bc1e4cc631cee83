//! Counters and gauges of a pod.
//!
//! Counters have a row for each CPU and are changed under a connection's lock, which also keeps interrupts away. So
//! nothing else writes the row meanwhile, and plain adds suffice. Gauges are shared by all CPUs and need atomic adds.

use core::{hint::black_box, ptr};

use aya_ebpf::helpers::generated::bpf_get_smp_processor_id;
use datapath::{
    abi::{self, PodCounters, PodState, ResponseCounters, ServerSocket},
    h1::{self, Http1Events},
    h2, load_balancing,
};

use super::MINUS_ONE;
use crate::{
    maps::{COUNTERS, POD_STATE, RESPONSES, atomic_add, send_event},
    packet,
};

/// Rows of one pod that this CPU writes.
#[derive(Clone, Copy)]
pub(super) struct PodCounterRows {
    pod: *mut PodState,
    counters: *mut PodCounters,
    responses: *mut ResponseCounters,
    slot: u32,
}

/// Adds to a word of this CPU's row. Call with a connection's lock held.
#[inline(always)]
fn add_to_row(word: *mut u64, by: u64) {
    // SAFETY: every caller passes a word of a live map value, which only this CPU writes while the lock is held.
    // Volatile, so that words are written in this order.
    unsafe { ptr::write_volatile(word, ptr::read_volatile(word).wrapping_add(by)) };
}

impl PodCounterRows {
    /// Looks up the rows of the pod with this slot. Do not call with a lock held.
    #[inline(always)]
    pub(super) fn for_slot(slot: u32) -> Option<Self> {
        // SAFETY: the helper has no arguments and cannot fail.
        let cpu = unsafe { bpf_get_smp_processor_id() };
        let index = cpu.wrapping_mul(abi::PODS_MAX).wrapping_add(slot);
        Some(Self {
            pod: POD_STATE.get_ptr_mut(slot)?,
            counters: COUNTERS.get_ptr_mut(index)?,
            responses: RESPONSES.get_ptr_mut(index)?,
            slot,
        })
    }

    /// Counts events of HTTP/1, with the status of the response.
    ///
    /// Returns true if the requests in flight exceed the agent's threshold. The caller then calls
    /// [`send_growth_event`](Self::send_growth_event) without the lock.
    #[inline(always)]
    pub(super) fn count_http1(
        &self,
        conn: &mut ServerSocket,
        events: Http1Events,
        status: u16,
        now_ns: u64,
    ) -> bool {
        if events == 0 {
            return false;
        }
        // A missed request was seen only by its response: it begins and ends at once, and takes no time.
        let missed = events & h1::MISSED != 0;
        let started = missed || events & h1::STARTED != 0;
        let finished = missed || events & h1::FINISHED != 0;
        let aborted = events & h1::ABORTED != 0;
        if finished {
            // The request may have begun on another CPU after the clock was read here; the difference must not wrap.
            let took = if missed { 0 } else { now_ns.saturating_sub(conn.http.request_started_ns) };
            self.count_response(status_class(status), took);
        }
        // Before a request that begins with the same segment sets it again.
        if finished || aborted {
            conn.http.requests_in_flight = 0;
        }
        if aborted {
            // SAFETY: a live map value.
            add_to_row(unsafe { &raw mut (*self.responses).aborted }, 1);
        }
        self.add_requests(u64::from(started), u64::from(finished || aborted), now_ns);
        self.add_bytes(conn);
        // Pipelined requests wait in the server: one connection of HTTP/1 has at most one in flight.
        if started && !missed {
            conn.http.requests_in_flight = 1;
        }
        // SAFETY: a live map value; single words.
        unsafe {
            // Of the pod, not of the CPU: these are rare, so that an atomic addition costs little.
            if events & h1::STRAY != 0 {
                atomic_add(&raw mut (*self.pod).stray_responses, 1);
            }
            if events & h1::DESYNC != 0 {
                atomic_add(&raw mut (*self.pod).desynced_connections, 1);
            }
        }
        started && self.record_request_start(conn, now_ns)
    }

    /// Counts a change of HTTP/2; returns true in the cases in which [`count_http1`](Self::count_http1) does.
    #[inline(always)]
    pub(super) fn count_http2(
        &self,
        conn: &mut ServerSocket,
        change: &h2::StreamChange,
        now_ns: u64,
    ) -> bool {
        // Wrapping, since a checked addition brings a panic, which no eBPF program can have.
        let ended = change.answered.wrapping_add(change.aborted);
        if change.started == 0 && ended == 0 {
            return false;
        }
        // An aborted request has no status, and its time would be the client's patience.
        if change.answered > 0 {
            self.count_response(u32::from(change.status_class), change.duration_ns);
            // SAFETY: a live map value.
            unsafe {
                match change.grpc_outcome as u8 {
                    h2::grpc::OK => add_to_row(&raw mut (*self.responses).grpc_ok, 1),
                    h2::grpc::FAILED => add_to_row(&raw mut (*self.responses).grpc_failed, 1),
                    _ => {}
                }
            }
        }
        if change.aborted > 0 {
            // SAFETY: a live map value.
            add_to_row(unsafe { &raw mut (*self.responses).aborted }, u64::from(change.aborted));
        }
        self.add_requests(u64::from(change.started), u64::from(ended), now_ns);
        conn.http.requests_in_flight =
            conn.http.requests_in_flight.wrapping_add(change.started).wrapping_sub(ended);
        change.started > 0 && self.record_request_start(conn, now_ns)
    }

    /// Counts requests that ended without a complete response.
    #[inline(always)]
    pub(super) fn count_aborted(&self, conn: &mut ServerSocket, aborted: u32, now_ns: u64) {
        let change = h2::StreamChange { aborted, ..h2::StreamChange::default() };
        self.count_http2(conn, &change, now_ns);
    }

    /// Moves the end of a request that was already counted as ended to a later time.
    #[inline(always)]
    pub(super) fn extend_last_request(&self, by_ns: u64, now_ns: u64) {
        // Readers retry while `write_begin` and `write_end` differ, so that they never take half a change.
        // SAFETY: a live map value; single words.
        unsafe {
            add_to_row(&raw mut (*self.counters).write_begin, 1);
            add_to_row(&raw mut (*self.counters).finished_sum_ns, by_ns);
            add_to_row(&raw mut (*self.counters).write_end, 1);
            (*self.pod).last_activity_ns = now_ns;
        }
    }

    /// Adds the bytes since the last call, for a connection whose messages are read by HTTP/1 or estimated.
    #[inline(always)]
    pub(super) fn add_bytes(&self, conn: &mut ServerSocket) {
        let (received, sent) = (conn.http.h1.rx.next, conn.http.h1.tx.next);
        self.add_bytes_until(conn, received, sent);
    }

    /// Adds the bytes up to these sequence numbers only if their distance comes near to where it would wrap.
    #[inline(always)]
    pub(super) fn add_bytes_before_wrap(&self, conn: &mut ServerSocket, received: u32, sent: u32) {
        let received_bytes = received.wrapping_sub(conn.http.counted_rx_seq);
        let sent_bytes = sent.wrapping_sub(conn.http.counted_tx_seq);
        if (received_bytes | sent_bytes) >> 30 != 0 {
            self.add_bytes_until(conn, received, sent);
        }
    }

    /// Adds the bytes from the last call up to these sequence numbers.
    #[inline(always)]
    pub(super) fn add_bytes_until(&self, conn: &mut ServerSocket, received: u32, sent: u32) {
        // SAFETY: a live map value.
        unsafe {
            let received_bytes = received.wrapping_sub(conn.http.counted_rx_seq);
            add_to_row(&raw mut (*self.responses).received, u64::from(received_bytes));
            let sent_bytes = sent.wrapping_sub(conn.http.counted_tx_seq);
            add_to_row(&raw mut (*self.responses).sent, u64::from(sent_bytes));
        }
        conn.http.counted_rx_seq = received;
        conn.http.counted_tx_seq = sent;
    }

    /// Sends the event that more requests are in flight than the agent has reported. Do not call with a lock held.
    #[inline(always)]
    pub(super) fn send_growth_event(&self) {
        send_event(abi::EVENT_GROWTH, self.slot, 0);
    }

    /// Returns true if the agent asks for an event of each connection of the pod that becomes idle.
    #[inline(always)]
    pub(super) fn sends_idle_events(&self) -> bool {
        // SAFETY: a live map value; a single word. Volatile, since the agent changes it.
        unsafe { ptr::read_volatile(&raw const (*self.counters).idle_events) != 0 }
    }

    /// Adds to the numbers and time sums of requests that began and ended.
    #[inline(always)]
    fn add_requests(&self, started: u64, ended: u64, now_ns: u64) {
        // SAFETY: live map values; single words.
        unsafe {
            // Readers retry while `write_begin` and `write_end` differ, so that they never take half a change.
            add_to_row(&raw mut (*self.counters).write_begin, 1);
            if ended > 0 {
                add_to_row(&raw mut (*self.counters).finished, ended);
                add_to_row(&raw mut (*self.counters).finished_sum_ns, now_ns.wrapping_mul(ended));
                (*self.pod).last_activity_ns = now_ns;
            }
            if started > 0 {
                add_to_row(&raw mut (*self.counters).started, started);
                add_to_row(&raw mut (*self.counters).started_sum_ns, now_ns.wrapping_mul(started));
            }
            add_to_row(&raw mut (*self.counters).write_end, 1);
            if started != ended {
                atomic_add(&raw mut (*self.pod).in_flight, started.wrapping_sub(ended));
            }
        }
    }

    /// Records the begin of a request on this connection. Returns true if the agent's threshold is exceeded.
    #[inline(always)]
    fn record_request_start(&self, conn: &mut ServerSocket, now_ns: u64) -> bool {
        conn.http.request_started_ns = now_ns;
        // SAFETY: a live map value; single words.
        unsafe {
            if conn.http.flags & abi::HTTP_AWAITS_FIRST_REQUEST != 0 {
                conn.http.flags &= !abi::HTTP_AWAITS_FIRST_REQUEST;
                atomic_add(&raw mut (*self.pod).awaiting_first_request, MINUS_ONE);
            }
            let exceeds_threshold = load_balancing::should_raise_growth_event(
                (*self.pod).event_threshold,
                (*self.pod).in_flight,
            );
            // Cleared with the event: further requests need none until the agent sets it again.
            if exceeds_threshold {
                (*self.pod).event_threshold = 0;
            }
            exceeds_threshold
        }
    }

    /// Counts a complete response by class (0 if unseen) and time.
    ///
    /// Only the common case has a branch: the verifier would follow each class and bucket through all later code.
    #[inline(always)]
    fn count_response(&self, class: u32, took_ns: u64) {
        // Each nibble is an index: five classes, then `unknown_status`, which follows them in the row.
        let word = 0x432105 >> ((class & 7) * 4) & 7;
        let bucket =
            if took_ns <= abi::LATENCY_BOUNDS_US[0] * 1_000 { 0 } else { latency_bucket(took_ns) };
        // SAFETY: a live map value; both indices are inside it.
        unsafe {
            add_to_row((&raw mut (*self.responses).status).cast::<u64>().add(word as usize), 1);
            add_to_row(&raw mut (*self.responses).latency_sum_ns, took_ns);
            let bucket = packet::at_most(bucket, abi::LATENCY_BUCKETS as u32 - 1) as usize;
            add_to_row((&raw mut (*self.responses).latency).cast::<u64>().add(bucket), 1);
        }
    }
}

/// Returns the number of bucket bounds below a time.
#[inline(always)]
fn latency_bucket(took_ns: u64) -> u32 {
    let (mut bucket, mut index) = (0, 0);
    while index < abi::LATENCY_BOUNDS_US.len() {
        // The compiler recognizes a comparison in the highest bit, and would turn it into a branch.
        bucket += black_box((abi::LATENCY_BOUNDS_US[index] * 1_000).wrapping_sub(took_ns)) >> 63;
        index += 1;
    }
    bucket as u32
}

/// Returns the first digit of a status; 0 if it has no class.
#[inline(always)]
fn status_class(status: u16) -> u32 {
    match status {
        100..200 => 1,
        200..300 => 2,
        300..400 => 3,
        400..500 => 4,
        500..600 => 5,
        _ => 0,
    }
}
