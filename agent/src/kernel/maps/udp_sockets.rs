//! Shell: entries of the map `UDP_SOCKETS`: UDP sockets of this node of which a connect or a datagram was redirected.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use aya::maps::{HashMap, MapData, MapError};
use datapath::abi::{UdpSocket, maps};

use super::{KernelMapError, open_hash_map, read_error};

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
