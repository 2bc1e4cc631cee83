//! Shell: totals of Revisions that outlive the agent, in two maps of its own that no program reads.
//!
//! The rows of pods belong to the eBPF programs, and outlive the agent anyway. One map holds each row's Revision, so
//! that rows of pods that end while no agent runs are not lost. The other map holds the sums of gone pods whose rows
//! are released.

use std::{collections::BTreeMap, os::fd::AsFd as _, path::Path};

use aya::maps::{HashMap, MapData};
use common::{
    abi,
    wire::{self, Name},
};

use super::{Error, hash, read, refused, unless_gone};
use crate::{
    sys,
    tallies::{Row, WORDS},
};

/// Hash map: netns cookie of a registered pod → its Revision.
const OWNERS: &str = "OWNERS";
/// Hash map: Revision → sum of its gone pods.
const LEFT: &str = "LEFT";
/// Highest number of Revisions with gone pods. The kernel allocates the memory of an entry when it is written.
const LEFT_MAX: u32 = 4_096;
/// Key `namespace/name`, padded with zeros: at most 63 bytes and 253 bytes.
type Text = [u8; 320];

/// The two maps. Only one agent at a time may write them.
#[derive(Debug)]
pub(crate) struct Ledger {
    owners: HashMap<MapData, u64, Text>,
    left: HashMap<MapData, Text, [u64; WORDS]>,
}

impl Ledger {
    /// Opens the maps beside those of the eBPF programs. Creates them if they are missing or have another shape.
    pub(crate) fn open(pins: &Path) -> Result<Self, Error> {
        let text = size_of::<Text>() as u32;
        let row = size_of::<[u64; WORDS]>() as u32;
        make(pins, OWNERS, [8, text, abi::PODS_MAX])?;
        make(pins, LEFT, [text, row, LEFT_MAX])?;
        Ok(Self { owners: hash(pins, OWNERS)?, left: hash(pins, LEFT)? })
    }

    /// Returns the last known Revision of each row, by netns cookie.
    pub(crate) fn owners(&self) -> Result<BTreeMap<u64, Name>, Error> {
        let mut found = BTreeMap::new();
        for entry in self.owners.iter() {
            let (cookie, text) = entry.map_err(|error| read(OWNERS, error))?;
            found.extend(name(&text).map(|name| (cookie, name)));
        }
        Ok(found)
    }

    /// Returns the sum of the gone pods of each Revision.
    pub(crate) fn left(&self) -> Result<BTreeMap<Name, Row>, Error> {
        let mut found = BTreeMap::new();
        for entry in self.left.iter() {
            let (text, words) = entry.map_err(|error| read(LEFT, error))?;
            found.extend(name(&text).map(|name| (name, Row::from_words(words))));
        }
        Ok(found)
    }

    /// Records the Revision of the pod with this namespace; `None`: the pod is gone.
    pub(crate) fn own(&mut self, cookie: u64, revision: Option<&Name>) -> Result<(), Error> {
        let done = match revision {
            Some(revision) => self.owners.insert(cookie, text(revision), 0),
            None => unless_gone(self.owners.remove(&cookie)),
        };
        done.map_err(|source| refused(OWNERS, cookie, source))
    }

    /// Writes the sum of the gone pods of a Revision; `None`: the Revision is gone.
    pub(crate) fn leave(&mut self, revision: &Name, left: Option<Row>) -> Result<(), Error> {
        let key = text(revision);
        let done = match left {
            Some(row) => self.left.insert(key, row.words(), 0),
            None => unless_gone(self.left.remove(&key)),
        };
        done.map_err(|source| refused(LEFT, revision, source))
    }
}

/// Pins a hash map of this shape (key, value, entries) under this name, if it is missing.
fn make(pins: &Path, name: &'static str, shape: [u32; 3]) -> Result<(), Error> {
    let share = |source| Error::Share { name, source };
    let pin = pins.join(name);
    let found = sys::open_pin(&pin).and_then(|map| sys::map_shape(map.as_fd())).ok();
    if found.is_some_and(|found| found[1..] == shape) {
        return Ok(());
    }
    // Another version of the agent may have used another shape, whose entries cannot be read as this one.
    if found.is_some() {
        std::fs::remove_file(&pin).map_err(share)?;
    }
    let [key, value, entries] = shape;
    let map = sys::map_hash(key, value, entries).map_err(share)?;
    sys::pin(map.as_fd(), &pin).map_err(share)
}

fn text(name: &Name) -> Text {
    let mut text = [0; size_of::<Text>()];
    let written = name.to_string();
    // Names of Kubernetes fit. Longer names are cut.
    text.iter_mut().zip(written.bytes()).for_each(|(to, byte)| *to = byte);
    text
}

fn name(text: &Text) -> Option<Name> {
    let text = str::from_utf8(text).ok()?.trim_end_matches('\0');
    text.parse().ok().filter(|name: &wire::Name| !name.name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back_as_they_were_written() {
        for written in
            ["default/hello-00001", "a/b", &format!("{}/{}", "n".repeat(63), "r".repeat(63))]
        {
            let name: Name = written.parse().expect("a name");
            assert_eq!(self::name(&text(&name)), Some(name));
        }
        assert_eq!(name(&[0; 320]), None);
        assert_eq!(name(&[0xFF; 320]), None);
    }
}
