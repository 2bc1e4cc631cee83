//! Shell: listeners of gateway ports: each leads raw TCP from outside to one service.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
};

use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    entrypoint::Entrypoint, listeners::client_server::ClientConnectionServer,
    requests::forwarder::RequestForwarder, tcp_socket,
};

/// Listeners of the gateway ports that the RouteTable names, on each address of the gateway.
///
/// A port that cannot be opened is reported by a warning and a metric. It is tried again, and keeps nothing else from
/// being served.
#[derive(Debug)]
pub struct GatewayPortListeners {
    server: Arc<ClientConnectionServer>,
    forwarder: Arc<RequestForwarder>,
    /// Addresses of the gateway; none: this activator opens no gateway port.
    addresses: BTreeSet<IpAddr>,
    /// Cancelled once all listeners have to close.
    stop_listeners: CancellationToken,
    open_ports: Mutex<OpenGatewayPorts>,
}

#[derive(Debug, Default)]
struct OpenGatewayPorts {
    listeners: BTreeMap<SocketAddr, CancellationToken>,
    failed_addresses: BTreeSet<SocketAddr>,
}

impl GatewayPortListeners {
    /// Creates the state without open ports. Each port is opened on all of `addresses`.
    pub fn new(
        server: Arc<ClientConnectionServer>,
        forwarder: Arc<RequestForwarder>,
        addresses: BTreeSet<IpAddr>,
        stop_listeners: CancellationToken,
    ) -> Self {
        let open_ports = Mutex::default();
        Self { server, forwarder, addresses, stop_listeners, open_ports }
    }

    /// Opens and closes listeners until exactly the gateway ports of the RouteTable are open. Connections that have
    /// reached a closed one stay open.
    pub fn apply_routes(&self) {
        if self.stop_listeners.is_cancelled() {
            return;
        }
        let mut open = self.open_ports.lock().unwrap_or_else(PoisonError::into_inner);
        // Read under the lock, so that an older set of ports never follows a newer one.
        let ports = self.forwarder.routes.gateway_ports();
        let at_all = |port: u16| self.addresses.iter().map(move |&ip| SocketAddr::new(ip, port));
        let want: BTreeSet<SocketAddr> = ports.into_iter().flat_map(at_all).collect();
        open.listeners.retain(|address, closed| {
            let is_wanted = want.contains(address);
            if !is_wanted {
                closed.cancel();
                info!(%address, "gateway port closed");
            }
            is_wanted
        });
        open.failed_addresses.retain(|address| want.contains(address));
        for address in want {
            if !open.listeners.contains_key(&address) {
                self.open_port(&mut open, address);
            }
        }
        let count = |count| i64::try_from(count).unwrap_or(i64::MAX);
        self.forwarder.metrics.gateway_ports.set(count(open.listeners.len()));
        self.forwarder.metrics.gateway_ports_failed.set(count(open.failed_addresses.len()));
    }

    /// Tries ports again that could not be opened.
    pub fn retry_failed(&self) {
        let open = self.open_ports.lock().unwrap_or_else(PoisonError::into_inner);
        let has_failed = !open.failed_addresses.is_empty();
        drop(open);
        if has_failed {
            self.apply_routes();
        }
    }

    fn open_port(&self, open: &mut OpenGatewayPorts, address: SocketAddr) {
        match tcp_socket::bind_listener(address) {
            Ok(listener) => {
                let closed = self.stop_listeners.child_token();
                let entrypoint = Entrypoint::GatewayPort(address.port());
                let server = Arc::clone(&self.server);
                tokio::spawn(server.run_listener(listener, Some(entrypoint), closed.clone()));
                open.listeners.insert(address, closed);
                open.failed_addresses.remove(&address);
                info!(%address, "gateway port opened");
            }
            Err(error) => {
                if open.failed_addresses.insert(address) {
                    warn!(%address, %error, "cannot open gateway port: its service gets no connections here");
                }
            }
        }
    }
}
