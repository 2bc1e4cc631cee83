//! Shell: one listener for the ports of all services, to which the eBPF program `ports` routes.
//!
//! The agent has the rights to attach the program, and pins its map of listeners. The activator only puts its sockets
//! there. A socket that is closed disappears from the map.

use std::{
    fs, io,
    net::{IpAddr, SocketAddr},
    os::{fd::AsRawFd as _, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
};

use aya::maps::{Map, MapData, MapError, SockHash};
use tokio::net::TcpListener;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::tcp_socket;

/// Error because of which one listener cannot serve all ports.
#[derive(Debug, thiserror::Error)]
pub enum PortRangeError {
    /// The map is missing, or may not be used.
    #[error("cannot use the map of listeners {}", map.display())]
    Map {
        /// Path of its pin in bpffs.
        map: PathBuf,
        /// Error of the map operation.
        source: MapError,
    },
    /// The listener could not be opened.
    #[error("cannot open the listener of all service ports on {address}")]
    Listen {
        /// IP address of the listener.
        address: IpAddr,
        /// Error of the operating system.
        source: io::Error,
    },
}

/// Listeners in the map. Dropping it closes them.
#[derive(Debug)]
pub struct PortRangeListener {
    map_path: PathBuf,
    inode: Option<u64>,
    _closed: DropGuard,
}

impl PortRangeListener {
    /// Opens a listener on each of `addresses` and puts it into the map. `closed` is cancelled when the range is
    /// dropped.
    pub fn open(
        map: &Path,
        addresses: &[IpAddr],
        closed: CancellationToken,
    ) -> Result<(Self, Vec<TcpListener>), PortRangeError> {
        let failed = |source| PortRangeError::Map { map: map.to_owned(), source };
        // The inode is read before the map is opened: if the map is replaced in between, `is_current` finds that out.
        let inode = inode(map);
        let data = Map::SockHash(MapData::from_pin(map).map_err(failed)?);
        let mut socket_map = SockHash::<_, [u8; 16]>::try_from(data).map_err(failed)?;
        let mut listeners = Vec::new();
        for &address in addresses {
            // Any free port will do: clients connect to the services' ports, and the program selects the socket.
            let listener = tcp_socket::bind_listener(SocketAddr::new(address, 0))
                .map_err(|source| PortRangeError::Listen { address, source })?;
            socket_map.insert(map_key(address), listener.as_raw_fd(), 0).map_err(failed)?;
            listeners.push(listener);
        }
        let range = Self { map_path: map.to_owned(), inode, _closed: closed.drop_guard() };
        Ok((range, listeners))
    }

    /// Returns true if the map is still the one that is pinned: an agent may have replaced it.
    pub fn is_current(&self) -> bool {
        inode(&self.map_path) == self.inode
    }
}

fn inode(map: &Path) -> Option<u64> {
    fs::metadata(map).ok().map(|metadata| metadata.ino())
}

/// Key of an address in the map: 16 bytes in network order, IPv4 as IPv4-mapped IPv6.
fn map_key(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(four) => four.to_ipv6_mapped().octets(),
        IpAddr::V6(six) => six.octets(),
    }
}
