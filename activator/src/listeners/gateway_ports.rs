//! Shell: listeners of gateway ports: each leads raw TCP from outside to one service.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
};

use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    entrypoint::Entrypoint,
    listeners::{client_server::ClientConnectionServer, port_listeners::PortListenerSet},
    requests::forwarder::RequestForwarder,
};

/// Listeners of the gateway ports that the RouteTable names, on each address of the gateway.
///
/// A port that cannot be opened is reported by a warning and a metric. It is tried again, and keeps nothing else from
/// being served.
#[derive(Debug)]
pub struct GatewayPortListeners {
    server: Arc<ClientConnectionServer>,
    forwarder: Arc<RequestForwarder>,
    /// Addresses of the gateway. Without any, this activator opens no gateway port.
    addresses: BTreeSet<IpAddr>,
    /// Cancelled once all listeners have to close.
    stop_listeners: CancellationToken,
    listeners: Mutex<PortListenerSet>,
}

impl GatewayPortListeners {
    /// Creates the state without open ports. Each port is opened on all of `addresses`.
    pub fn new(
        server: Arc<ClientConnectionServer>,
        forwarder: Arc<RequestForwarder>,
        addresses: BTreeSet<IpAddr>,
        stop_listeners: CancellationToken,
    ) -> Self {
        let listeners = Mutex::default();
        Self { server, forwarder, addresses, stop_listeners, listeners }
    }

    /// Opens and closes listeners until exactly the gateway ports of the RouteTable are open. Connections that have
    /// reached a closed one stay open.
    pub fn apply_routes(&self) {
        // A listener that is opened now would be closed at once.
        if self.stop_listeners.is_cancelled() {
            return;
        }
        let mut listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        // Read under the lock, so that an older set of ports never follows a newer one.
        let ports = self.forwarder.routes.gateway_ports();
        let at_all = |port: u16| self.addresses.iter().map(move |&ip| SocketAddr::new(ip, port));
        let want: BTreeSet<SocketAddr> = ports.into_iter().flat_map(at_all).collect();
        let changes = listeners.set(&want, |listener, address, handle| {
            let (server, stop) = (Arc::clone(&self.server), self.stop_listeners.clone());
            let entrypoint = Entrypoint::GatewayPort(address.port());
            tokio::spawn(server.run_port_listener(listener, entrypoint, handle, stop));
        });
        changes.closed.iter().for_each(|address| info!(%address, "gateway port closed"));
        changes.opened.iter().for_each(|address| info!(%address, "gateway port opened"));
        for (address, error) in &changes.failed {
            warn!(%address, %error, "cannot open gateway port: its service gets no connections here");
        }
        let count = |count| i64::try_from(count).unwrap_or(i64::MAX);
        self.forwarder.metrics.gateway_ports.set(count(listeners.open_count()));
        self.forwarder.metrics.gateway_ports_failed.set(count(listeners.failed().len()));
    }

    /// Tries ports again that could not be opened.
    pub fn retry_failed(&self) {
        let listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        let has_failed = !listeners.failed().is_empty();
        drop(listeners);
        if has_failed {
            self.apply_routes();
        }
    }
}
