//! Shell: rows of a pod's counters in the maps, which the eBPF programs write meanwhile.

use std::{
    mem::offset_of,
    sync::atomic::{
        AtomicU64,
        Ordering::{Acquire, Relaxed},
        fence,
    },
};

use common::wire::RequestTotals;
use datapath::abi;

use super::{COUNTER_WORDS, RESPONSE_WORDS, STATE_WORDS, row};
use crate::kernel::sys::SharedWords;

/// Counters of each pod in the kernel, by row.
#[derive(Debug)]
pub(super) struct CounterRows {
    pub(super) pod_state: SharedWords,
    pub(super) counters: SharedWords,
    pub(super) responses: SharedWords,
    /// Rows of one pod: one for each possible CPU, and after them one for user space.
    pub(super) rows_per_pod: usize,
}

impl CounterRows {
    /// Returns one pod's running totals over all CPUs.
    pub(super) fn totals(&self, slot: u32) -> RequestTotals {
        let mut sum = RequestTotals::default();
        for cpu in 0..self.rows_per_pod {
            let index = cpu * abi::PODS_MAX as usize + slot as usize;
            let counters = read_counters(row(&self.counters, index, COUNTER_WORDS));
            sum.started = sum.started.wrapping_add(counters.started);
            sum.finished = sum.finished.wrapping_add(counters.finished);
            sum.started_sum_ns = sum.started_sum_ns.wrapping_add(counters.started_sum_ns);
            sum.finished_sum_ns = sum.finished_sum_ns.wrapping_add(counters.finished_sum_ns);
        }
        sum
    }

    /// Returns one pod's responses over all CPUs.
    pub(super) fn responses(&self, slot: u32) -> abi::ResponseCounters {
        let mut sum = [0_u64; RESPONSE_WORDS];
        for cpu in 0..self.rows_per_pod {
            let index = cpu * abi::PODS_MAX as usize + slot as usize;
            // Read word by word: each only grows, so that no word of the sum is more than a moment old.
            let words = row(&self.responses, index, RESPONSE_WORDS);
            sum.iter_mut().zip(words).for_each(|(total, word)| {
                *total = total.wrapping_add(word.load(Relaxed));
            });
        }
        abi::ResponseCounters::from_words(sum)
    }

    /// Returns one pod's state, with gauges clamped at 0.
    pub(super) fn pod_state(&self, slot: u32) -> abi::PodState {
        let row = row(&self.pod_state, slot as usize, STATE_WORDS);
        let load = |at: usize| row[at / 8].load(Acquire);
        let gauge = |at: usize| datapath::load_balancing::clamp_gauge(load(at));
        abi::PodState {
            in_flight: gauge(offset_of!(abi::PodState, in_flight)),
            event_threshold: load(offset_of!(abi::PodState, event_threshold)),
            connections: gauge(offset_of!(abi::PodState, connections)),
            awaiting_first_request: gauge(offset_of!(abi::PodState, awaiting_first_request)),
            last_activity_ns: load(offset_of!(abi::PodState, last_activity_ns)),
            desynced_connections: load(offset_of!(abi::PodState, desynced_connections)),
            opaque_connections: gauge(offset_of!(abi::PodState, opaque_connections)),
            stray_responses: load(offset_of!(abi::PodState, stray_responses)),
        }
    }

    /// Adds all totals of a row of `other` rows to the row `slot`. Gauges are not added.
    pub(super) fn add_totals(&self, slot: u32, other: &Self, other_slot: u32) {
        let (totals, responses) = (other.totals(other_slot), other.responses(other_slot));
        // In user space's own copy, which no CPU writes: the programs' additions to these rows are not atomic.
        let index = (self.rows_per_pod - 1) * abi::PODS_MAX as usize + slot as usize;
        let counters = row(&self.counters, index, COUNTER_WORDS);
        let add = |at: usize, by: u64| counters[at / 8].fetch_add(by, Relaxed);
        add(offset_of!(abi::PodCounters, write_begin), 1);
        add(offset_of!(abi::PodCounters, started), totals.started);
        add(offset_of!(abi::PodCounters, finished), totals.finished);
        add(offset_of!(abi::PodCounters, started_sum_ns), totals.started_sum_ns);
        add(offset_of!(abi::PodCounters, finished_sum_ns), totals.finished_sum_ns);
        add(offset_of!(abi::PodCounters, write_end), 1);
        let words = row(&self.responses, index, RESPONSE_WORDS);
        responses.words().into_iter().zip(words).for_each(|(by, word)| {
            word.fetch_add(by, Relaxed);
        });
        self.add_state_totals(slot, &other.pod_state(other_slot));
    }

    /// Adds the totals of a pod's state, whose row all CPUs share and the programs add to atomically.
    fn add_state_totals(&self, slot: u32, other: &abi::PodState) {
        let state = row(&self.pod_state, slot as usize, STATE_WORDS);
        let word = |at: usize| &state[at / 8];
        word(offset_of!(abi::PodState, desynced_connections))
            .fetch_add(other.desynced_connections, Relaxed);
        word(offset_of!(abi::PodState, stray_responses)).fetch_add(other.stray_responses, Relaxed);
        // Not a total, but lost with the other row just the same: the pod would look idle since long ago.
        word(offset_of!(abi::PodState, last_activity_ns))
            .fetch_max(other.last_activity_ns, Relaxed);
    }
}

/// Reads a row of counters when no program is writing it: `write_begin` and `write_end` are equal, and `write_end` was
/// read first.
///
/// A program holds a row for nanoseconds on a CPU that is running, so a few attempts are enough. After 1,000 attempts
/// the words are returned as they are.
pub(super) fn read_counters(row: &[AtomicU64]) -> abi::PodCounters {
    let load = |at: usize| row[at / 8].load(Relaxed);
    let mut tries = 0;
    loop {
        // The reverse of the writer's order, as in a seqlock: `end` first, the data, then `begin`.
        let end = row[offset_of!(abi::PodCounters, write_end) / 8].load(Acquire);
        let counters = abi::PodCounters {
            write_begin: load(offset_of!(abi::PodCounters, write_begin)),
            started: load(offset_of!(abi::PodCounters, started)),
            finished: load(offset_of!(abi::PodCounters, finished)),
            started_sum_ns: load(offset_of!(abi::PodCounters, started_sum_ns)),
            finished_sum_ns: load(offset_of!(abi::PodCounters, finished_sum_ns)),
            idle_events: 0,
            reserved: 0,
            write_end: end,
        };
        fence(Acquire);
        let begin = row[offset_of!(abi::PodCounters, write_begin) / 8].load(Relaxed);
        tries += 1;
        if begin == end || tries == 1_000 {
            return counters;
        }
        std::hint::spin_loop();
    }
}

#[cfg(test)]
impl CounterRows {
    /// Returns rows of one CPU and of user space, all zero, in memory that no program knows.
    pub(super) fn in_memory() -> Self {
        use nix::{
            sys::memfd::{MFdFlags, memfd_create},
            unistd::ftruncate,
        };
        let words = |count: usize| {
            let memory = memfd_create("rows", MFdFlags::MFD_CLOEXEC).expect("memory");
            ftruncate(&memory, count as i64 * 8).expect("room");
            SharedWords::map(std::os::fd::AsFd::as_fd(&memory), count).expect("mapped")
        };
        let (pods, rows_per_pod) = (abi::PODS_MAX as usize, 2);
        Self {
            pod_state: words(pods * STATE_WORDS),
            counters: words(rows_per_pod * pods * COUNTER_WORDS),
            responses: words(rows_per_pod * pods * RESPONSE_WORDS),
            rows_per_pod,
        }
    }

    /// Writes a pod's state, and `count` into each of its totals, as a program on the first CPU does.
    pub(super) fn write(&self, slot: u32, state: [u64; STATE_WORDS], count: u64) {
        let store =
            |words: &[AtomicU64], value| words.iter().for_each(|it| it.store(value, Relaxed));
        let words = row(&self.pod_state, slot as usize, STATE_WORDS);
        words.iter().zip(state).for_each(|(word, value)| word.store(value, Relaxed));
        store(row(&self.counters, slot as usize, COUNTER_WORDS), count);
        store(row(&self.responses, slot as usize, RESPONSE_WORDS), count);
    }

    /// Returns the words of a pod's state.
    pub(super) fn state_words(&self, slot: u32) -> [u64; STATE_WORDS] {
        let words = row(&self.pod_state, slot as usize, STATE_WORDS);
        std::array::from_fn(|at| words[at].load(Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_total_of_a_row_is_added_to_another_row_and_no_gauge_is() {
        let (new, old) = (CounterRows::in_memory(), CounterRows::in_memory());
        // In flight, threshold, connections, awaiting; latest activity; desynced; opaque; stray.
        old.write(9, [1, 2, 3, 4, 50, 6, 7, 8], 10);
        new.write(5, [1, 2, 3, 4, 40, 1, 7, 1], 1);
        new.add_totals(5, &old, 9);
        assert_eq!(new.state_words(5), [1, 2, 3, 4, 50, 7, 7, 9]);
        let totals = new.totals(5);
        assert_eq!((totals.started, totals.finished), (11, 11));
        assert_eq!((totals.started_sum_ns, totals.finished_sum_ns), (11, 11));
        assert_eq!(new.responses(5).words(), [11; RESPONSE_WORDS]);
    }
}
