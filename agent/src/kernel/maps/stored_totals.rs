//! Shell: totals of Revisions that outlive the agent, in two maps of its own that no program reads.
//!
//! The rows of pods belong to the eBPF programs, and outlive the agent anyway. One map holds each row's Revision, so
//! that rows of pods that end while no agent runs are not lost. The other map holds the sums of gone pods whose rows
//! are released.

use std::{collections::BTreeMap, os::fd::AsFd as _, path::Path};

use aya::maps::{HashMap, MapData};
use common::wire::NamespacedName;
use datapath::abi;

use super::{KernelMapError, ignore_missing, open_hash_map, pin_error, read_error, write_error};
use crate::kernel::{
    sys,
    totals_row::{TotalsRow, WORDS},
};

/// Hash map: netns cookie of a registered pod → its Revision.
const OWNERS: &str = "OWNERS";
/// Hash map: Revision → sum of its gone pods.
const GONE_TOTALS: &str = "LEFT";
/// Highest number of Revisions with gone pods. The kernel allocates the memory of an entry when it is written.
const GONE_TOTALS_MAX: u32 = 4_096;
/// Key `namespace/name`, padded with zeros: at most 63 bytes and 253 bytes.
type RevisionKeyBytes = [u8; 320];

/// The two maps. Only one agent at a time may write them.
#[derive(Debug)]
pub(crate) struct StoredTotals {
    owners: HashMap<MapData, u64, RevisionKeyBytes>,
    gone_totals: HashMap<MapData, RevisionKeyBytes, [u64; WORDS]>,
}

impl StoredTotals {
    /// Opens the maps beside those of the eBPF programs. Creates them if they are missing or have another shape.
    pub(crate) fn open(pins: &Path) -> Result<Self, KernelMapError> {
        let text = size_of::<RevisionKeyBytes>() as u32;
        let row = size_of::<[u64; WORDS]>() as u32;
        ensure_hash_map(pins, OWNERS, [8, text, abi::PODS_MAX])?;
        ensure_hash_map(pins, GONE_TOTALS, [text, row, GONE_TOTALS_MAX])?;
        Ok(Self {
            owners: open_hash_map(pins, OWNERS)?,
            gone_totals: open_hash_map(pins, GONE_TOTALS)?,
        })
    }

    /// Returns the last known Revision of each row, by netns cookie.
    pub(crate) fn owners(&self) -> Result<BTreeMap<u64, NamespacedName>, KernelMapError> {
        let mut owners = BTreeMap::new();
        for entry in self.owners.iter() {
            let (cookie, text) = entry.map_err(|error| read_error(OWNERS, error))?;
            owners.extend(decode_name(&text).map(|name| (cookie, name)));
        }
        Ok(owners)
    }

    /// Returns the sum of the gone pods of each Revision.
    pub(crate) fn gone_totals(
        &self,
    ) -> Result<BTreeMap<NamespacedName, TotalsRow>, KernelMapError> {
        let mut totals = BTreeMap::new();
        for entry in self.gone_totals.iter() {
            let (text, words) = entry.map_err(|error| read_error(GONE_TOTALS, error))?;
            totals.extend(decode_name(&text).map(|name| (name, TotalsRow::from_words(words))));
        }
        Ok(totals)
    }

    /// Records the Revision of the pod with this namespace; `None`: the pod is gone.
    pub(crate) fn set_owner(
        &mut self,
        cookie: u64,
        revision: Option<&NamespacedName>,
    ) -> Result<(), KernelMapError> {
        let done = match revision {
            Some(revision) => self.owners.insert(cookie, encode_name(revision), 0),
            None => ignore_missing(self.owners.remove(&cookie)),
        };
        done.map_err(|source| write_error(OWNERS, cookie, source))
    }

    /// Writes the sum of the gone pods of a Revision; `None`: the Revision is gone.
    pub(crate) fn set_gone_total(
        &mut self,
        revision: &NamespacedName,
        total: Option<TotalsRow>,
    ) -> Result<(), KernelMapError> {
        let key = encode_name(revision);
        let done = match total {
            Some(row) => self.gone_totals.insert(key, row.words(), 0),
            None => ignore_missing(self.gone_totals.remove(&key)),
        };
        done.map_err(|source| write_error(GONE_TOTALS, revision, source))
    }
}

/// Pins a hash map of this shape (key, value, entries) under this name, if it is missing.
fn ensure_hash_map(pins: &Path, name: &'static str, shape: [u32; 3]) -> Result<(), KernelMapError> {
    let pin = pins.join(name);
    let create_error = |source| pin_error("create", &pin, source);
    let pinned_shape = sys::open_pin(&pin).and_then(|map| sys::map_shape(map.as_fd())).ok();
    if pinned_shape.is_some_and(|pinned_shape| pinned_shape[1..] == shape) {
        return Ok(());
    }
    // Another version of the agent may have used another shape, whose entries cannot be read as this one.
    if pinned_shape.is_some() {
        std::fs::remove_file(&pin).map_err(|source| pin_error("remove", &pin, source))?;
    }
    let [key, value, entries] = shape;
    let map = sys::create_hash_map(key, value, entries).map_err(create_error)?;
    sys::pin(map.as_fd(), &pin).map_err(create_error)
}

fn encode_name(name: &NamespacedName) -> RevisionKeyBytes {
    let mut text = [0; size_of::<RevisionKeyBytes>()];
    let written = name.to_string();
    // Names of Kubernetes fit. Longer names are cut.
    text.iter_mut().zip(written.bytes()).for_each(|(to, byte)| *to = byte);
    text
}

fn decode_name(text: &RevisionKeyBytes) -> Option<NamespacedName> {
    let text = str::from_utf8(text).ok()?.trim_end_matches('\0');
    text.parse().ok().filter(|name: &NamespacedName| !name.name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back_as_they_were_written() {
        for written in
            ["default/hello-00001", "a/b", &format!("{}/{}", "n".repeat(63), "r".repeat(63))]
        {
            let name: NamespacedName = written.parse().expect("a name");
            assert_eq!(decode_name(&encode_name(&name)), Some(name));
        }
        assert_eq!(decode_name(&[0; 320]), None);
        assert_eq!(decode_name(&[0xFF; 320]), None);
    }
}
