//! Requests in flight, from the packets of pods' connections.
//!
//! [`common::h1`] tells message boundaries from segments in any order; this file brings it the segments and turns what
//! it says into counts. A segment is judged by our own next-sequence words, since the socket's own may stand still
//! while its program holds it. Heads and chunk sizes are copied in windows; bodies are not read.
//!
//! Data that comes before its connection is established, or behind a gap that matters, waits in `KEPT` under its
//! sender and sequence number, until `opened` or the segment before it calls for it.

use core::{ffi::c_void, ptr};

use aya_ebpf::{
    EbpfContext as _,
    bindings::{__sk_buff, bpf_sock_ops, bpf_spin_lock},
    helpers::generated::{bpf_get_smp_processor_id, bpf_skb_load_bytes, bpf_spin_lock, bpf_spin_unlock},
    programs::SkBuffContext,
};
use common::{
    abi::{self, Conn, Http},
    h1::{self, Happened, Seek, Window},
};

use crate::{
    maps::{BLANK, CONNS, COUNTERS, KEPT, POD_STATE, RESPONSES, add, announce, now},
    packet::{self, Segment},
};

/// Verdict: let the packet pass.
const PASS: i32 = 1;
/// Windows read of one packet in one run of a program.
const ROUNDS: u32 = 8;
