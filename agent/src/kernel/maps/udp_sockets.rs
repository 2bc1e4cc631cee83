//! Shell: entries of the map `UDP_SOCKETS`: UDP sockets of this node of which a connect or a datagram was redirected.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering::AcqRel},
};

use aya::maps::{HashMap, MapData, MapError};
use common::link::error_chain;
use datapath::abi::{self, UdpSocket, maps};
use tracing::warn;

use super::{KernelMapError, map_words, open_hash_map, read_error};
use crate::kernel::sys::SharedWords;

/// Flag of a write that adds an entry only.
const BPF_NOEXIST: u64 = 1;
/// Flag of a write that replaces an entry only.
const BPF_EXIST: u64 = 2;

/// Entries of UDP sockets by the sockets' cookies. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct UdpSocketEntries {
    /// Map of the programs in force.
    own: Arc<HashMap<MapData, u64, UdpSocket>>,
    /// Folder of that map's pin.
    pins: PathBuf,
    /// Maps of the same version with other sizes, from before the sizes of maps were changed.
    others: Vec<Arc<HashMap<MapData, u64, UdpSocket>>>,
}

impl UdpSocketEntries {
    /// Opens the map that is pinned in `pins`.
    pub(super) fn open(pins: &Path) -> Result<Self, KernelMapError> {
        let own = Arc::new(open_hash_map(pins, maps::UDP_SOCKETS)?);
        Ok(Self { own, pins: pins.to_owned(), others: Vec::new() })
    }

    /// Returns these entries, and those of open sockets from before the sizes of maps were last changed. Such pins
    /// come and go while an agent runs.
    pub(crate) fn with_other_sizes(&self) -> Self {
        let folders = self.pins.parent().and_then(|bpffs| fs::read_dir(bpffs).ok());
        let folders = folders.into_iter().flatten().flatten().map(|entry| entry.path());
        let others = folders.filter(|it| *it != self.pins && has_same_version(it, &self.pins));
        // Pins without the map have been removed since, or have no open sockets.
        let opened = others.filter_map(|it| open_hash_map(&it, maps::UDP_SOCKETS).ok());
        Self { others: opened.map(Arc::new).collect(), ..self.clone() }
    }

    /// Returns true if no socket has an entry.
    pub(crate) fn is_empty(&self) -> bool {
        self.all().all(|map| map.keys().next().is_none())
    }

    /// Returns the entry of a socket, if it has any. That of the programs in force comes first, as it is newer.
    pub(crate) fn find(&self, cookie: u64) -> Result<Option<UdpSocket>, KernelMapError> {
        for map in self.all() {
            if let Some(entry) = find_in(map, cookie)? {
                return Ok(Some(entry));
            }
        }
        Ok(None)
    }

    fn all(&self) -> impl Iterator<Item = &HashMap<MapData, u64, UdpSocket>> {
        [&self.own].into_iter().chain(&self.others).map(|map| &**map)
    }
}

/// Copy of the entries of connected UDP sockets into maps of other sizes, for the programs that take over.
///
/// A datagram that names its socket's service is led to the socket's endpoint by the entry. The programs of both maps
/// see a socket close, so each removes its own entry.
#[derive(Debug)]
pub(crate) struct UdpSocketCopy {
    old: HashMap<MapData, u64, UdpSocket>,
    own: HashMap<MapData, u64, UdpSocket>,
    /// Words of the map `CONTROL` beside `own`.
    control: SharedWords,
    /// Entries of `old` as they were copied.
    copied: BTreeMap<u64, UdpSocket>,
}

impl UdpSocketCopy {
    /// Opens the maps that are pinned in `old` and `own`. `None` if they are of different versions. `None` also if they
    /// cannot be opened, which is logged.
    pub(crate) fn open(old: &Path, own: &Path) -> Option<Self> {
        if !has_same_version(old, own) {
            return None;
        }
        let opened = Self::try_open(old, own);
        let opened = opened.inspect_err(|error| {
            warn!(error = %error_chain(error), "cannot open the entries of UDP sockets");
        });
        opened.ok()
    }

    fn try_open(old: &Path, own: &Path) -> Result<Self, KernelMapError> {
        Ok(Self {
            old: open_hash_map(old, maps::UDP_SOCKETS)?,
            own: open_hash_map(own, maps::UDP_SOCKETS)?,
            control: map_words(own, maps::CONTROL, abi::CONTROL_WORDS as usize)?,
            copied: BTreeMap::new(),
        })
    }

    /// Copies the entries that are new or have changed since the last call. A failure is logged: sockets without a copy
    /// only have to send without naming their service.
    pub(crate) fn copy_changed(&mut self) {
        if let Err(error) = self.try_copy_changed() {
            warn!(error = %error_chain(&error), "cannot copy the entries of UDP sockets");
        }
    }

    fn try_copy_changed(&mut self) -> Result<(), KernelMapError> {
        let cookies: BTreeSet<u64> = self.old.keys().filter_map(Result::ok).collect();
        for cookie in cookies {
            let entry = find_in(&self.old, cookie)?;
            // Without a connect an entry leads no datagram.
            let Some(socket) = entry.filter(|it| it.original_port_be != 0) else { continue };
            match self.copied.insert(cookie, socket) {
                None => self.add(cookie, &socket)?,
                Some(before) if before == socket => {}
                // An entry that is not the copy any more is one of the new programs, and newer.
                Some(before) => {
                    if find_in(&self.own, cookie)? == Some(before) {
                        let _closed_meanwhile = self.own.insert(cookie, socket, BPF_EXIST);
                    }
                }
            }
        }
        Ok(())
    }

    /// Adds the copy of an entry, unless the new programs have one of the socket.
    fn add(&mut self, cookie: u64, socket: &UdpSocket) -> Result<(), KernelMapError> {
        let count = &self.control.words()[abi::CONTROL_UDP_SOCKETS as usize];
        // Counted first: while the count is 0, the programs look for no entry, also when a socket closes.
        count.fetch_add(1, AcqRel);
        let is_added = self.own.insert(cookie, socket, BPF_NOEXIST).is_ok();
        // If the socket has closed before the insertion, no program removes the copy.
        let is_removed =
            is_added && find_in(&self.old, cookie)?.is_none() && self.own.remove(&cookie).is_ok();
        if !is_added || is_removed {
            count.fetch_sub(1, AcqRel);
        }
        Ok(())
    }
}

/// Returns true if two folders of pins are of the same version. Their names are `v6`, or `v6-` and the sizes of maps.
fn has_same_version(one: &Path, other: &Path) -> bool {
    let version = |pins: &Path| {
        let name = pins.file_name()?.to_str()?;
        Some(name.split_once('-').map_or(name, |(version, _)| version).to_owned())
    };
    version(one).is_some_and(|it| version(other) == Some(it))
}

fn find_in(
    map: &HashMap<MapData, u64, UdpSocket>,
    cookie: u64,
) -> Result<Option<UdpSocket>, KernelMapError> {
    // The memory of an entry that is removed or replaced is used again at once (since 6.1), so one read may return
    // a mixture of two entries.
    let mut before = read(map, cookie)?;
    loop {
        let entry = read(map, cookie)?;
        if entry == before {
            return Ok(entry);
        }
        before = entry;
    }
}

fn read(
    map: &HashMap<MapData, u64, UdpSocket>,
    cookie: u64,
) -> Result<Option<UdpSocket>, KernelMapError> {
    match map.get(&cookie, 0) {
        Ok(entry) => Ok(Some(entry)),
        Err(MapError::KeyNotFound) => Ok(None),
        Err(source) => Err(read_error(maps::UDP_SOCKETS, source)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_one_version_with_other_sizes_are_known_by_their_names() {
        let is_same = |name: &str| has_same_version(Path::new(name), Path::new("/b/v6"));
        assert!(["/b/v6-300-300", "/b/v6-outlived-1", "/b/v6"].into_iter().all(is_same));
        assert!(["/b/v5", "/b/v60", "/b/v7-300-300", "/"].into_iter().all(|it| !is_same(it)));
    }
}
