//! Shell: one listener for each service's own port.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
};

use tokio::net::{TcpListener, TcpSocket};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    gateway::{Door, Gateway},
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
    stop: CancellationToken,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    listeners: BTreeMap<SocketAddr, CancellationToken>,
    failed: BTreeSet<SocketAddr>,
}

impl Ports {
    /// No port open yet; each will be opened on all of `addresses`.
    pub fn new(
        server: Arc<Server>,
        gateway: Arc<Gateway>,
        addresses: Vec<IpAddr>,
        stop: CancellationToken,
    ) -> Self {
        Self { server, gateway, addresses, stop, open: Mutex::default() }
    }

    /// Opens and closes listeners until exactly the table's ports are open. What cannot be opened is tried
    /// again with the next call.
    pub fn apply(&self) {
        if self.stop.is_cancelled() {
            return;
        }
        let want = self.wanted(&self.gateway.routes.ports());
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
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

    /// Tries again what could not be opened.
    pub fn retry(&self) {
        let failed = !self.open.lock().unwrap_or_else(PoisonError::into_inner).failed.is_empty();
        if failed {
            self.apply();
        }
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
                tokio::spawn(Arc::clone(&self.server).accept(listener, door, closed.clone()));
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
