//! Shell: entries of the map `UDP_SOCKETS`: UDP sockets of this node of which a connect or a datagram was redirected.

use std::{path::Path, sync::Arc};

use aya::maps::{HashMap, MapData, MapError};
use datapath::abi::{UdpSocket, maps};

use super::{KernelMapError, open_hash_map, read_error};

/// Entries of UDP sockets by the sockets' cookies. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct UdpSocketEntries(Arc<HashMap<MapData, u64, UdpSocket>>);

impl UdpSocketEntries {
    /// Opens the map that is pinned in `pins`.
    pub(super) fn open(pins: &Path) -> Result<Self, KernelMapError> {
        open_hash_map(pins, maps::UDP_SOCKETS).map(|map| Self(Arc::new(map)))
    }

    /// Returns true if no socket has an entry.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.keys().next().is_none()
    }

    /// Returns the entry of a socket, if it has any.
    pub(crate) fn find(&self, cookie: u64) -> Result<Option<UdpSocket>, KernelMapError> {
        // The memory of an entry that is removed or replaced is used again at once (since 6.1), so one read may return
        // a mixture of two entries.
        let mut before = self.read(cookie)?;
        loop {
            let entry = self.read(cookie)?;
            if entry == before {
                return Ok(entry);
            }
            before = entry;
        }
    }

    fn read(&self, cookie: u64) -> Result<Option<UdpSocket>, KernelMapError> {
        match self.0.get(&cookie, 0) {
            Ok(entry) => Ok(Some(entry)),
            Err(MapError::KeyNotFound) => Ok(None),
            Err(source) => Err(read_error(maps::UDP_SOCKETS, source)),
        }
    }
}
