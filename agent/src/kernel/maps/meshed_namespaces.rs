//! Shell: entries of the map `MESHED_NETNS`: network namespaces whose connects and datagrams go on unchanged.

use std::{collections::BTreeSet, path::Path, sync::atomic::Ordering::Release};

use aya::maps::{HashMap, MapData};
use datapath::abi::{self, maps};

use super::{KernelMapError, ignore_missing, map_words, open_hash_map, read_error, write_error};
use crate::kernel::sys::SharedWords;

/// Entries of meshed namespaces, by their cookies. Only one task may write them.
#[derive(Debug)]
pub struct MeshedNamespaceEntries {
    entries: HashMap<MapData, u64, u32>,
    control: SharedWords,
}

impl MeshedNamespaceEntries {
    /// Opens the map that is pinned in `pins`.
    pub(super) fn open(pins: &Path) -> Result<Self, KernelMapError> {
        let entries = open_hash_map(pins, maps::MESHED_NETNS)?;
        let control = map_words(pins, maps::CONTROL, abi::CONTROL_WORDS as usize)?;
        Ok(Self { entries, control })
    }

    /// Returns the cookies of the entries.
    pub(crate) fn cookies(&self) -> Result<BTreeSet<u64>, KernelMapError> {
        let keys = self.entries.keys();
        keys.map(|key| key.map_err(|source| read_error(maps::MESHED_NETNS, source))).collect()
    }

    /// Makes these cookies the entries. After an error, such as that of a full map, some are missing.
    pub fn set(&mut self, cookies: &BTreeSet<u64>) -> Result<(), KernelMapError> {
        let known = self.cookies()?;
        for gone in known.difference(cookies) {
            let done = ignore_missing(self.entries.remove(gone));
            done.map_err(|source| write_error(maps::MESHED_NETNS, gone, source))?;
        }
        // The programs look for entries only while this is not 0. It says how many there should be.
        let count = &self.control.words()[abi::CONTROL_MESHED_NETNS as usize];
        count.store(cookies.len() as u64, Release);
        for new in cookies.difference(&known) {
            let done = self.entries.insert(new, 1, 0);
            done.map_err(|source| write_error(maps::MESHED_NETNS, new, source))?;
        }
        Ok(())
    }
}
