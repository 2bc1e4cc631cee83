//! Shell: records of this node's client sockets whose connects or datagrams were redirected.
//!
//! Records are rows of `CLIENTS`, copies of records in socket storage, and entries of `UDP_SOCKETS`.

use std::{
    array,
    collections::{BTreeMap, BTreeSet, HashSet},
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::Ordering::{AcqRel, Acquire},
    },
};

use aya::maps::{HashMap, MapData, MapError};
use common::link::error_chain;
use datapath::abi::{self, CONNECT_RECORD_WORDS, ConnectRecord, FrontendKey, UdpSocket, maps};
use tracing::warn;

use super::{KernelMapError, capacity, map_words, open_hash_map, read_error, row};
use crate::kernel::{
    led_socket::LedSocket, recorded_connection::RecordedConnection, sys::SharedWords,
};

/// Flag of a write that adds an entry only.
const BPF_NOEXIST: u64 = 1;
/// Flag of a write that replaces an entry only.
const BPF_EXIST: u64 = 2;

/// Records of client sockets. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct ClientSocketRecords {
    /// Maps of the programs in force.
    own: Arc<ClientSocketMaps>,
    /// Folder of their pins.
    pins: PathBuf,
    /// Maps of the same version with other sizes, from before the sizes of maps were changed.
    others: Vec<Arc<ClientSocketMaps>>,
}

/// Maps with the records of one set of programs.
#[derive(Debug)]
struct ClientSocketMaps {
    /// Rows of TCP sockets.
    rows: SharedWords,
    row_count: usize,
    /// Copies of records of TCP sockets without a row, by the sockets' cookies.
    copies: HashMap<MapData, u64, ConnectRecord>,
    /// UDP sockets by their cookies.
    udp_sockets: HashMap<MapData, u64, UdpSocket>,
    /// Words of the map `CONTROL`.
    control: SharedWords,
}

impl ClientSocketRecords {
    /// Opens the maps that are pinned in `pins`.
    pub(super) fn open(pins: &Path) -> Result<Self, KernelMapError> {
        let own = Arc::new(ClientSocketMaps::open(pins)?);
        Ok(Self { own, pins: pins.to_owned(), others: Vec::new() })
    }

    /// Returns these records, and those of open sockets from before the sizes of maps were last changed. Such pins
    /// come and go while an agent runs.
    pub(crate) fn with_other_sizes(&self) -> Self {
        let folders = self.pins.parent().and_then(|bpffs| fs::read_dir(bpffs).ok());
        let folders = folders.into_iter().flatten().flatten().map(|entry| entry.path());
        let others = folders.filter(|it| *it != self.pins && has_same_version(it, &self.pins));
        // Pins without the maps have been removed since, or have no open sockets.
        let opened = others.filter_map(|it| ClientSocketMaps::open(&it).ok());
        Self { others: opened.map(Arc::new).collect(), ..self.clone() }
    }

    /// Passes each led socket to `each`. A record that changes meanwhile may be a mixture, or be missed: look the
    /// socket up again before any decision.
    pub(crate) fn for_each(&self, mut each: impl FnMut(LedSocket)) -> Result<(), KernelMapError> {
        for set in self.all() {
            (0..set.row_count).filter_map(|index| set.led_row(index)).for_each(&mut each);
            for entry in set.copies.iter() {
                let (_, record) = entry.map_err(|e| read_error(maps::OVERFLOW_COPIES, e))?;
                LedSocket::of_record(&record).into_iter().for_each(&mut each);
            }
            for entry in set.udp_sockets.iter() {
                let (_, socket) = entry.map_err(|e| read_error(maps::UDP_SOCKETS, e))?;
                LedSocket::of_udp_socket(&socket).into_iter().for_each(&mut each);
            }
        }
        Ok(())
    }

    /// Passes each recorded connection of TCP to `each`, also those to Rouse's pods and activators. A record that
    /// changes meanwhile may be a mixture of two, or be missed.
    pub(crate) fn for_each_connection(
        &self,
        mut each: impl FnMut(RecordedConnection),
    ) -> Result<(), KernelMapError> {
        for set in self.all() {
            let rows = (0..set.row_count).map(|index| set.row(index));
            rows.filter_map(|row| RecordedConnection::of_record(&row)).for_each(&mut each);
            for entry in set.copies.iter() {
                let (_, record) = entry.map_err(|e| read_error(maps::OVERFLOW_COPIES, e))?;
                RecordedConnection::of_record(&record).into_iter().for_each(&mut each);
            }
        }
        Ok(())
    }

    /// Returns the number of redirected connects of TCP of which no record can be read, for want of memory. While the
    /// maps stay the same, the number only grows.
    pub(crate) fn unlisted_connects(&self) -> u64 {
        self.own.control.words()[abi::CONTROL_UNLISTED as usize].load(Acquire)
    }

    /// Returns true if the node may have pins of another version, whose records cannot be read.
    pub(crate) fn has_other_versions(&self) -> bool {
        let Some(Ok(mut entries)) = self.pins.parent().map(fs::read_dir) else { return true };
        entries.any(|entry| match entry {
            Ok(entry) => is_of_other_version(&entry.path(), &self.pins),
            Err(_unread) => true,
        })
    }

    /// Returns those of the frontends `wanted` that the rows of TCP sockets name. A row keeps the record of its last
    /// socket after that has closed, until another socket takes the row.
    ///
    /// Sockets without a row are missing; [`KernelMaps`](super::KernelMaps) knows if there may be some. So is a record
    /// that changes meanwhile.
    pub(crate) fn connected_frontends(
        &self,
        wanted: &HashSet<FrontendKey>,
    ) -> HashSet<FrontendKey> {
        let frontend = |index| {
            let ConnectRecord { original_address, original_port_be, .. } = self.own.row(index);
            FrontendKey {
                address: original_address,
                port_be: original_port_be,
                protocol: abi::IPPROTO_TCP,
                reserved: 0,
            }
        };
        (0..self.own.row_count).map(frontend).filter(|it| wanted.contains(it)).collect()
    }

    /// Returns the record of a TCP socket, if its connect was led to an endpoint. It does not change while the socket
    /// is connected.
    pub(crate) fn find_tcp(&self, cookie: u64) -> Result<Option<LedSocket>, KernelMapError> {
        // That of the programs in force comes first, as it is newer.
        for set in self.all() {
            let record = set.row(cookie as usize % set.row_count);
            if record.socket_cookie == cookie {
                return Ok(LedSocket::of_record(&record));
            }
            if let Some(record) = find_in(&set.copies, maps::OVERFLOW_COPIES, cookie)? {
                return Ok(LedSocket::of_record(&record));
            }
        }
        Ok(None)
    }

    /// Returns the record of a UDP socket, if a connect of it was led to an endpoint.
    pub(crate) fn find_udp(&self, cookie: u64) -> Result<Option<LedSocket>, KernelMapError> {
        for set in self.all() {
            if let Some(socket) = find_in(&set.udp_sockets, maps::UDP_SOCKETS, cookie)? {
                return Ok(LedSocket::of_udp_socket(&socket));
            }
        }
        Ok(None)
    }

    fn all(&self) -> impl Iterator<Item = &ClientSocketMaps> {
        [&self.own].into_iter().chain(&self.others).map(|set| &**set)
    }
}

impl ClientSocketMaps {
    fn open(pins: &Path) -> Result<Self, KernelMapError> {
        let row_count = capacity(pins, maps::CLIENTS)?;
        Ok(Self {
            rows: map_words(pins, maps::CLIENTS, row_count * CONNECT_RECORD_WORDS)?,
            row_count,
            copies: open_hash_map(pins, maps::OVERFLOW_COPIES)?,
            udp_sockets: open_hash_map(pins, maps::UDP_SOCKETS)?,
            control: map_words(pins, maps::CONTROL, abi::CONTROL_WORDS as usize)?,
        })
    }

    /// Returns the socket that has a row, if it was led to an endpoint.
    fn led_row(&self, index: usize) -> Option<LedSocket> {
        let record = self.row(index);
        (record.socket_cookie != 0).then(|| LedSocket::of_record(&record)).flatten()
    }

    fn row(&self, index: usize) -> ConnectRecord {
        let words = row(&self.rows, index, CONNECT_RECORD_WORDS);
        ConnectRecord::from_words(array::from_fn(|word| words[word].load(Acquire)))
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
            let entry = find_in(&self.old, maps::UDP_SOCKETS, cookie)?;
            // Without a connect an entry leads no datagram.
            let Some(socket) = entry.filter(|it| it.original_port_be != 0) else { continue };
            match self.copied.insert(cookie, socket) {
                None => self.add(cookie, &socket)?,
                Some(before) if before == socket => {}
                // An entry that is not the copy any more is one of the new programs, and newer.
                Some(before) => {
                    if find_in(&self.own, maps::UDP_SOCKETS, cookie)? == Some(before) {
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
        let is_removed = is_added
            && find_in(&self.old, maps::UDP_SOCKETS, cookie)?.is_none()
            && self.own.remove(&cookie).is_ok();
        if !is_added || is_removed {
            count.fetch_sub(1, AcqRel);
        }
        Ok(())
    }
}

/// Returns true if two folders of pins are of the same version. Their names are `v7`, or `v7-` and the sizes of maps.
fn has_same_version(one: &Path, other: &Path) -> bool {
    version_name(one).is_some_and(|it| version_name(other) == Some(it))
}

/// Returns true if a folder has the name of pins, and of those of another version than `own`.
fn is_of_other_version(folder: &Path, own: &Path) -> bool {
    let number = version_name(folder).and_then(|name| name.strip_prefix('v'));
    let is_version = number.is_some_and(|number| number.parse::<u32>().is_ok());
    is_version && !has_same_version(folder, own)
}

/// Returns the part of a folder's name that names the version of its pins.
fn version_name(pins: &Path) -> Option<&str> {
    let name = pins.file_name()?.to_str()?;
    Some(name.split_once('-').map_or(name, |(version, _)| version))
}

fn find_in<V: aya::Pod + PartialEq>(
    map: &HashMap<MapData, u64, V>,
    name: &'static str,
    cookie: u64,
) -> Result<Option<V>, KernelMapError> {
    // The memory of an entry that is removed or replaced is used again at once (since 6.1). So one read may return a
    // mixture of two entries.
    let mut before = read(map, name, cookie)?;
    loop {
        let entry = read(map, name, cookie)?;
        if entry == before {
            return Ok(entry);
        }
        before = entry;
    }
}

fn read<V: aya::Pod>(
    map: &HashMap<MapData, u64, V>,
    name: &'static str,
    cookie: u64,
) -> Result<Option<V>, KernelMapError> {
    match map.get(&cookie, 0) {
        Ok(entry) => Ok(Some(entry)),
        Err(MapError::KeyNotFound) => Ok(None),
        Err(source) => Err(read_error(name, source)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_one_version_with_other_sizes_are_known_by_their_names() {
        let is_same = |name: &str| has_same_version(Path::new(name), Path::new("/b/v7"));
        assert!(["/b/v7-300-300", "/b/v7-outlived-1", "/b/v7"].into_iter().all(is_same));
        assert!(["/b/v6", "/b/v70", "/b/v8-300-300", "/"].into_iter().all(|it| !is_same(it)));
    }

    #[test]
    fn folders_of_another_version_are_known_by_their_names_and_others_are_none() {
        let is_other = |name: &str| is_of_other_version(Path::new(name), Path::new("/b/v7-300"));
        assert!(["/b/v6", "/b/v70", "/b/v8-300", "/b/v6-outlived-1"].into_iter().all(is_other));
        let others = ["/b/v7", "/b/v7-outlived-1", "/b/links", "/b/v", "/b/vx-1", "/b/7", "/"];
        assert!(others.into_iter().all(|it| !is_other(it)));
    }
}
