//! Shell: where services' own ports are listened on: by one listener for all of them where the kernel leads there, else by
//! one a port.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::net::{TcpListener, TcpSocket};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    gateway::{Door, Gateway},
    range::{Range, RangeError},
    server::Server,
};

/// Connections the kernel keeps for us until they are accepted; it cuts this to net.core.somaxconn.
const BACKLOG: u32 = 4_096;

/// The listeners that are open.
#[derive(Debug)]
pub struct Ports {
    server: Arc<Server>,
    gateway: Arc<Gateway>,
    addresses: Vec<IpAddr>,
    /// The kernel's map that leads all ports to one listener an address.
    map: Option<PathBuf>,
    stop: CancellationToken,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    /// Serves every port, those without a listener of their own.
    range: Option<Range>,
    /// Whether it was said that there is none.
    told: bool,
    listeners: BTreeMap<SocketAddr, CancellationToken>,
    failed: BTreeSet<SocketAddr>,
}

impl Ports {
    /// No port open yet; each will be opened on all of `addresses`, by way of `map` if that can be used.
    pub fn new(
        server: Arc<Server>,
        gateway: Arc<Gateway>,
        addresses: Vec<IpAddr>,
        map: Option<PathBuf>,
        stop: CancellationToken,
    ) -> Self {
        Self { server, gateway, addresses, map, stop, open: Mutex::default() }
    }

    /// Opens and closes listeners until exactly the table's ports are open. What cannot be opened is tried
    /// again with the next call.
    pub fn apply(&self) {
        if self.stop.is_cancelled() {
            return;
        }
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let want = match self.keep_range(&mut open) {
            true => BTreeSet::new(),
            false => self.wanted(&self.gateway.routes.ports()),
        };
        open.listeners.retain(|address, closed| {
            let keep = want.contains(address);
            if !keep {
                closed.cancel();
                info!(%address, "service port closed");
            }
            keep
        });
        open.failed.retain(|address| want.contains(address));
        for address in want {
            if !open.listeners.contains_key(&address) {
                self.open(&mut open, address);
            }
        }
        let count = |count| i64::try_from(count).unwrap_or(i64::MAX);
        self.gateway.metrics.ports.set(count(open.listeners.len()));
        self.gateway.metrics.ports_failed.set(count(open.failed.len()));
    }

    /// Tries again what could not be opened, and follows the map when an agent has made it anew.
    pub fn retry(&self) {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let stale = self.map.is_some() && !open.range.as_ref().is_some_and(Range::is_current);
        let again = stale || !open.failed.is_empty();
        drop(open);
        if again {
            self.apply();
        }
    }

    /// Whether one listener serves all ports now.
    fn keep_range(&self, open: &mut Open) -> bool {
        let Some(map) = &self.map else { return false };
        if open.range.as_ref().is_some_and(Range::is_current) {
            return true;
        }
        // The old one still serves those that had reached it.
        open.range = None;
        match self.open_range(map) {
            Ok(range) => {
                info!(map = %map.display(), "one listener serves all service ports");
                (open.range, open.told) = (Some(range), false);
            }
            Err(error) if !open.told => {
                // No warning: at start the agent may need a moment more than we do.
                open.told = true;
                info!(error = %common::link::chain(&error), "each service port has a listener of its own");
            }
            Err(_) => {}
        }
        open.range.is_some()
    }

    fn open_range(&self, map: &std::path::Path) -> Result<Range, RangeError> {
        let closed = self.stop.child_token();
        let (range, listeners) = Range::open(map, &self.addresses, closed.clone())?;
        for listener in listeners {
            tokio::spawn(Arc::clone(&self.server).accept(listener, None, closed.clone()));
        }
        Ok(range)
    }

    /// What keeps services from being reached, for `/readyz`.
    pub fn troubles(&self) -> Vec<String> {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.failed.iter().map(|address| format!("cannot listen on {address}")).collect()
    }

    fn wanted(&self, ports: &BTreeSet<u16>) -> BTreeSet<SocketAddr> {
        let both = |port: u16| self.addresses.iter().map(move |&ip| SocketAddr::new(ip, port));
        ports.iter().flat_map(|&port| both(port)).collect()
    }

    fn open(&self, open: &mut Open, address: SocketAddr) {
        match listen(address) {
            Ok(listener) => {
                let closed = self.stop.child_token();
                let door = Door::Port(address.port());
                let server = Arc::clone(&self.server);
                tokio::spawn(server.accept(listener, Some(door), closed.clone()));
                open.listeners.insert(address, closed);
                open.failed.remove(&address);
            }
            Err(error) => {
                if open.failed.insert(address) {
                    warn!(%address, %error, "cannot open service port");
                }
            }
        }
    }
}

/// Opens one listener.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}
