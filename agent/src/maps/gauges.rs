//! Shell: the kernel half's gauges of pods, for whoever compares them with the sockets. Only those of this version's programs:
//! what the version before still counts, it counts by sockets of its own.

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

/// Where each gauge stands in a row of `POD_STATE`, in the order of `Gauge::ALL`.
const PLACES: [usize; Gauge::ALL.len()] = [
    offset_of!(abi::PodState, connections) / 8,
    offset_of!(abi::PodState, in_flight) / 8,
    offset_of!(abi::PodState, fresh) / 8,
    offset_of!(abi::PodState, opaque) / 8,
];

/// The gauges. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Gauges(Arc<Rows>);

#[derive(Debug)]
struct Rows {
    pod_state: Words,
    counters: Words,
    count: usize,
}

impl Gauges {
    /// Opens those pinned in `pins`.
    pub(super) fn open(pins: &Path) -> Result<Self, Error> {
        let count = capacity(pins, maps::COUNTERS)?;
        Ok(Self(Arc::new(Rows {
            pod_state: words(pins, maps::POD_STATE, abi::PODS_MAX as usize * STATE_WORDS)?,
            counters: words(pins, maps::COUNTERS, count * COUNTER_WORDS)?,
            count,
        })))
    }

    /// One pod's gauges, as they stand there.
    pub fn levels(&self, slot: u32) -> Levels {
        let row = row(&self.0.pod_state, slot as usize, STATE_WORDS);
        PLACES.map(|place| row[place].load(Acquire) as i64)
    }

    /// One pod's gauges and totals.
    pub fn read(&self, slot: u32) -> Reading {
        let mut totals = [0u64; 2];
        for index in (slot as usize..self.0.count).step_by(abi::PODS_MAX as usize) {
            let row = settled(row(&self.0.counters, index, COUNTER_WORDS));
            totals[0] = totals[0].wrapping_add(row.started);
            totals[1] = totals[1].wrapping_add(row.finished);
        }
        Reading { levels: self.levels(slot), totals }
    }

    /// Adds to one pod's gauges, as the kernel half does: whatever it adds meanwhile stays.
    pub fn add(&self, slot: u32, by: Levels) {
        let row = row(&self.0.pod_state, slot as usize, STATE_WORDS);
        for (place, by) in PLACES.into_iter().zip(by) {
            row[place].fetch_add(by as u64, Relaxed);
        }
    }
}
