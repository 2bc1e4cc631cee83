//! Shell: the word of `CONTROL` by which connects know until when this node's agent thaws frozen pods.

use std::{path::Path, sync::atomic::Ordering::Release};

use datapath::abi::{self, maps};

use super::{KernelMapError, map_words};
use crate::kernel::sys::SharedWords;

/// Promise of the agent to thaw the frozen pods of its node. Only one task may change it.
#[derive(Debug)]
pub struct ThawPromise {
    control: SharedWords,
}

impl ThawPromise {
    /// Opens the map that is pinned in `pins`.
    pub(super) fn open(pins: &Path) -> Result<Self, KernelMapError> {
        let control = map_words(pins, maps::CONTROL, abi::CONTROL_WORDS as usize)?;
        Ok(Self { control })
    }

    /// Sets the end of the promise, CLOCK_MONOTONIC in ns; 0: it has none.
    pub fn set(&self, until_ns: u64) {
        self.control.words()[abi::CONTROL_THAWS_UNTIL as usize].store(until_ns, Release);
    }
}
