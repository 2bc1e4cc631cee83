//! Shell: entries of the map `POD_PORTS`: ports of pods that count besides the serving port.

use std::{collections::BTreeMap, path::Path};

use aya::maps::{HashMap, MapData, MapError};
use datapath::abi::{ListenKey, PodPortValue, maps};

use super::{KernelMapError, ignore_missing, open_hash_map, write_error};

/// Entries of `POD_PORTS`. Only one process at a time may write.
#[derive(Debug)]
pub(super) struct PodPortEntries(HashMap<MapData, ListenKey, PodPortValue>);

impl PodPortEntries {
    /// Opens the map that is pinned in `pins`.
    pub(super) fn open(pins: &Path) -> Result<Self, KernelMapError> {
        open_hash_map(pins, maps::POD_PORTS).map(Self)
    }

    /// Writes the entries of a namespace. Its other entries stay. If not all fit, none is added, so that they take no room
    /// of other pods.
    pub(super) fn write(
        &mut self,
        netns_cookie: u64,
        ports: &BTreeMap<u16, PodPortValue>,
    ) -> Result<(), KernelMapError> {
        let mut added = Vec::new();
        for (&port, value) in ports {
            let key = ListenKey { netns_cookie, port: port.into(), reserved: 0 };
            let is_new = matches!(self.0.get(&key, 0), Err(MapError::KeyNotFound));
            if let Err(source) = self.0.insert(key, value, 0) {
                // An entry whose removal fails belongs to no registered port, so it only takes room.
                for key in added {
                    let _counts_for_no_pod = self.0.remove(&key);
                }
                return Err(write_error(maps::POD_PORTS, key, source));
            }
            if is_new {
                added.push(key);
            }
        }
        Ok(())
    }

    /// Removes all entries of a namespace but those of the ports in `keep`.
    pub(super) fn remove_others(
        &mut self,
        netns_cookie: u64,
        keep: &BTreeMap<u16, PodPortValue>,
    ) -> Result<(), KernelMapError> {
        let is_kept = |port: u32| u16::try_from(port).is_ok_and(|port| keep.contains_key(&port));
        let is_stale = |key: &ListenKey| key.netns_cookie == netns_cookie && !is_kept(key.port);
        // Collected first: removing keys while iterating over a hash map can restart the iteration.
        let stale: Vec<_> = self.0.keys().filter_map(Result::ok).filter(is_stale).collect();
        for key in stale {
            let done = ignore_missing(self.0.remove(&key));
            done.map_err(|source| write_error(maps::POD_PORTS, key, source))?;
        }
        Ok(())
    }
}
