//! Shell: gauges of pods in the eBPF programs' maps, for the audit. Only those of this version's programs are here: the
//! previous version counts sockets of its own.

use std::{
    mem::offset_of,
    path::Path,
    sync::{
        Arc,
        atomic::Ordering::{Acquire, Relaxed},
    },
};

use common::abi::{self, maps};

use super::{COUNTER_WORDS, Error, STATE_WORDS, capacity, row, settled, words};
use crate::{
    audit::{Gauge, Levels, Reading},
    sys::Words,
};

/// Word of each gauge in a row of `POD_STATE`, in the order of `Gauge::ALL`.
const PLACES: [usize; Gauge::ALL.len()] = [
    offset_of!(abi::PodState, connections) / 8,
    offset_of!(abi::PodState, in_flight) / 8,
    offset_of!(abi::PodState, fresh) / 8,
    offset_of!(abi::PodState, opaque) / 8,
];

/// Gauges of all pods, in shared memory. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Gauges(Arc<Rows>);

#[derive(Debug)]
struct Rows {
    pod_state: Words,
    counters: Words,
    count: usize,
}

impl Gauges {
    /// Opens the gauges that are pinned in `pins`.
    pub(super) fn open(pins: &Path) -> Result<Self, Error> {
        let count = capacity(pins, maps::COUNTERS)?;
        Ok(Self(Arc::new(Rows {
            pod_state: words(pins, maps::POD_STATE, abi::PODS_MAX as usize * STATE_WORDS)?,
            counters: words(pins, maps::COUNTERS, count * COUNTER_WORDS)?,
            count,
        })))
    }

    /// Returns one pod's gauges, unclamped.
    pub fn levels(&self, slot: u32) -> Levels {
        let row = row(&self.0.pod_state, slot as usize, STATE_WORDS);
        PLACES.map(|place| row[place].load(Acquire) as i64)
    }

    /// Returns one pod's gauges and totals.
    pub fn read(&self, slot: u32) -> Reading {
        let mut totals = [0u64; 2];
        // One row for each CPU, and user space's own behind them.
        for index in (slot as usize..self.0.count).step_by(abi::PODS_MAX as usize) {
            let row = settled(row(&self.0.counters, index, COUNTER_WORDS));
            totals[0] = totals[0].wrapping_add(row.started);
            totals[1] = totals[1].wrapping_add(row.finished);
        }
        Reading { levels: self.levels(slot), totals }
    }

    /// Adds to one pod's gauges, as the eBPF programs do, so that their own additions meanwhile are kept.
    pub fn add(&self, slot: u32, by: Levels) {
        let row = row(&self.0.pod_state, slot as usize, STATE_WORDS);
        for (place, by) in PLACES.into_iter().zip(by) {
            // Two's complement: the addition of a negative number subtracts.
            row[place].fetch_add(by as u64, Relaxed);
        }
    }
}
