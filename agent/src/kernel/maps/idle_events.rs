//! Shell: flags by which the eBPF programs send events of a pod's connections that become idle.

use std::{mem::offset_of, path::Path, sync::atomic::Ordering::Relaxed};

use aya::maps::{HashMap, MapData, MapError};
use datapath::abi::{self, maps};

use super::{COUNTER_WORDS, KernelMapError, capacity, map_words, open_hash_map, read_error, row};
use crate::kernel::sys::SharedWords;

/// Flags of all pods, in shared memory.
#[derive(Debug)]
pub struct IdleEventFlags {
    pods: HashMap<MapData, u64, abi::PodValue>,
    counters: SharedWords,
    /// Number of rows in `counters`.
    count: usize,
}

impl IdleEventFlags {
    /// Opens the flags that are pinned in `pins`, and clears them: an earlier agent may have left some set.
    pub(super) fn open(pins: &Path) -> Result<Self, KernelMapError> {
        let count = capacity(pins, maps::COUNTERS)?;
        let flags = Self {
            pods: open_hash_map(pins, maps::PODS)?,
            counters: map_words(pins, maps::COUNTERS, count * COUNTER_WORDS)?,
            count,
        };
        for pod in flags.pods.iter() {
            let (_, pod) = pod.map_err(|source| read_error(maps::PODS, source))?;
            flags.write(pod.slot, false);
        }
        Ok(flags)
    }

    /// Lets connections of the pod in the namespace with this cookie send events, or ends that. Returns false if no pod
    /// is registered there.
    ///
    /// If the pod is removed meanwhile, its row may keep the flag until it is cleared for another pod.
    pub fn set(&self, cookie: u64, are_sent: bool) -> Result<bool, KernelMapError> {
        match self.pods.get(&cookie, 0) {
            Ok(pod) => {
                self.write(pod.slot, are_sent);
                Ok(true)
            }
            Err(MapError::KeyNotFound) => Ok(false),
            Err(source) => Err(read_error(maps::PODS, source)),
        }
    }

    /// Writes the flag into the pod's row of each CPU. No program writes this word.
    fn write(&self, slot: u32, are_sent: bool) {
        const FLAG: usize = offset_of!(abi::PodCounters, idle_events) / 8;
        for index in (slot as usize..self.count).step_by(abi::PODS_MAX as usize) {
            row(&self.counters, index, COUNTER_WORDS)[FLAG].store(are_sent.into(), Relaxed);
        }
    }
}
