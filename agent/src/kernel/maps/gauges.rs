//! Shell: gauges of pods in the maps of this version's eBPF programs, for the audit. The previous version's programs
//! count other sockets, in maps of their own.

use std::{
    mem::offset_of,
    path::Path,
    sync::{
        Arc,
        atomic::Ordering::{Acquire, Relaxed},
    },
};

use datapath::abi::{self, maps};

use super::{
    COUNTER_WORDS, KernelMapError, STATE_WORDS, capacity, counter_rows::read_counters, map_words,
    row,
};
use crate::{
    kernel::sys::SharedWords,
    pod_gauge::{GaugeReading, GaugeValues, PodGauge},
};

/// Word of each gauge in a row of `POD_STATE`, in the order of `PodGauge::ALL`.
const GAUGE_WORDS: [usize; PodGauge::ALL.len()] = [
    offset_of!(abi::PodState, connections) / 8,
    offset_of!(abi::PodState, in_flight) / 8,
    offset_of!(abi::PodState, awaiting_first_request) / 8,
    offset_of!(abi::PodState, opaque_connections) / 8,
];

/// Gauges of all pods, in shared memory. Cheap to clone.
#[derive(Clone, Debug)]
pub struct PodGauges(Arc<GaugeRows>);

#[derive(Debug)]
struct GaugeRows {
    pod_state: SharedWords,
    counters: SharedWords,
    count: usize,
}

impl PodGauges {
    /// Opens the gauges that are pinned in `pins`.
    pub(super) fn open(pins: &Path) -> Result<Self, KernelMapError> {
        let count = capacity(pins, maps::COUNTERS)?;
        Ok(Self(Arc::new(GaugeRows {
            pod_state: map_words(pins, maps::POD_STATE, abi::PODS_MAX as usize * STATE_WORDS)?,
            counters: map_words(pins, maps::COUNTERS, count * COUNTER_WORDS)?,
            count,
        })))
    }

    /// Returns one pod's gauges, unclamped.
    pub fn values(&self, slot: u32) -> GaugeValues {
        let row = row(&self.0.pod_state, slot as usize, STATE_WORDS);
        GAUGE_WORDS.map(|place| row[place].load(Acquire) as i64)
    }

    /// Returns one pod's gauges and totals.
    pub fn read(&self, slot: u32) -> GaugeReading {
        let mut totals = [0u64; 2];
        // One row for each CPU, and user space's own behind them.
        for index in (slot as usize..self.0.count).step_by(abi::PODS_MAX as usize) {
            let row = read_counters(row(&self.0.counters, index, COUNTER_WORDS));
            totals[0] = totals[0].wrapping_add(row.started);
            totals[1] = totals[1].wrapping_add(row.finished);
        }
        GaugeReading { values: self.values(slot), totals }
    }

    /// Adds to one pod's gauges, as the eBPF programs do, so that their own additions meanwhile are kept.
    pub fn add(&self, slot: u32, by: GaugeValues) {
        let row = row(&self.0.pod_state, slot as usize, STATE_WORDS);
        for (place, by) in GAUGE_WORDS.into_iter().zip(by) {
            // Two's complement: the addition of a negative number subtracts.
            row[place].fetch_add(by as u64, Relaxed);
        }
    }
}
