//! Shell: one listener for the ports of all services, which the kernel's program `ports` leads to.
//!
//! The agent, which has the rights, attaches the program and pins its map of listeners; this part only puts its sockets
//! there. A socket that closes leaves the map by itself.

use std::{
    fs, io,
    net::{IpAddr, SocketAddr},
    os::{fd::AsRawFd as _, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
};

use aya::maps::{Map, MapData, MapError, SockHash};
use tokio::net::TcpListener;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::ports::listen;

/// One listener cannot serve all ports.
#[derive(Debug, thiserror::Error)]
pub enum RangeError {
    /// The map is not there, or not ours to use.
    #[error("cannot use the map of listeners {}", map.display())]
    Map {
        /// Where it is pinned.
        map: PathBuf,
        /// Why not.
        source: MapError,
    },
    /// No socket, or no pin.
    #[error("cannot open the listener of all service ports on {address}")]
    Listen {
        /// Where.
        address: IpAddr,
        /// Why not.
        source: io::Error,
    },
}

/// The listeners' stay in the map. Dropping it ends them.
#[derive(Debug)]
pub struct Range {
    map: PathBuf,
    inode: Option<u64>,
    _closed: DropGuard,
}

impl Range {
    /// Opens a listener on each of `addresses` and lets the kernel lead to it. `closed` is cancelled when the range is
    /// dropped.
    pub fn open(
        map: &Path,
        addresses: &[IpAddr],
        closed: CancellationToken,
    ) -> Result<(Self, Vec<TcpListener>), RangeError> {
        let failed = |source| RangeError::Map { map: map.to_owned(), source };
        let inode = inode(map);
        let data = Map::SockHash(MapData::from_pin(map).map_err(failed)?);
        let mut led = SockHash::<_, [u8; 16]>::try_from(data).map_err(failed)?;
        let mut listeners = Vec::new();
        for &address in addresses {
            // Its own port is any free one: clients never learn it.
            let listener = listen(SocketAddr::new(address, 0))
                .map_err(|source| RangeError::Listen { address, source })?;
            led.insert(key(address), listener.as_raw_fd(), 0).map_err(failed)?;
            listeners.push(listener);
        }
        let range = Self { map: map.to_owned(), inode, _closed: closed.drop_guard() };
        Ok((range, listeners))
    }

    /// Whether the map is still the one that is pinned: an agent may have made another one.
    pub fn is_current(&self) -> bool {
        inode(&self.map) == self.inode
    }
}

fn inode(map: &Path) -> Option<u64> {
    fs::metadata(map).ok().map(|found| found.ino())
}

/// An address as the program knows it: in memory order, IPv4 as mapped.
fn key(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(four) => four.to_ipv6_mapped().octets(),
        IpAddr::V6(six) => six.octets(),
    }
}
