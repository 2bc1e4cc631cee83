//! Shell: listeners of the services' own ports: one for all ports if the eBPF program `ports` routes to it, otherwise
//! one for each port.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    entrypoint::Entrypoint,
    listeners::{
        client_server::ClientConnectionServer,
        port_listeners::PortListenerSet,
        port_range::{PortRangeError, PortRangeListener},
    },
    requests::forwarder::RequestForwarder,
};

/// Listeners that are open, and all that is needed to open others.
#[derive(Debug)]
pub struct ServicePortListeners {
    server: Arc<ClientConnectionServer>,
    forwarder: Arc<RequestForwarder>,
    addresses: Vec<IpAddr>,
    /// Pinned eBPF map by which all ports are routed to one listener for each address.
    listener_map: Option<PathBuf>,
    /// Cancelled once all listeners have to close.
    stop_listeners: CancellationToken,
    open_ports: Mutex<OpenServicePorts>,
}

#[derive(Debug, Default)]
struct OpenServicePorts {
    /// Listener of all ports; `None`: each port has a listener of its own.
    port_range: Option<PortRangeListener>,
    /// True once it was logged that there is no such listener.
    is_fallback_logged: bool,
    listeners: PortListenerSet,
}

impl ServicePortListeners {
    /// Creates the state without open ports. Each port is opened on all of `addresses`, through `listener_map` if it
    /// can be used.
    pub fn new(
        server: Arc<ClientConnectionServer>,
        forwarder: Arc<RequestForwarder>,
        addresses: Vec<IpAddr>,
        listener_map: Option<PathBuf>,
        stop_listeners: CancellationToken,
    ) -> Self {
        Self {
            server,
            forwarder,
            addresses,
            listener_map,
            stop_listeners,
            open_ports: Mutex::default(),
        }
    }

    /// Opens and closes listeners until exactly the ports of the RouteTable are open. The next call tries ports again
    /// that cannot be opened.
    pub fn apply_routes(&self) {
        // A listener that is opened now would be closed at once.
        if self.stop_listeners.is_cancelled() {
            return;
        }
        let mut open = self.open_ports.lock().unwrap_or_else(PoisonError::into_inner);
        // One listener for all ports makes those for single ports needless: they are closed below.
        let want = match self.ensure_port_range(&mut open) {
            true => BTreeSet::new(),
            false => self.desired_addresses(&self.forwarder.routes.ports()),
        };
        let changes = open.listeners.set(&want, |listener, address, handle| {
            let (server, stop) = (Arc::clone(&self.server), self.stop_listeners.clone());
            let entrypoint = Entrypoint::Service(address.port());
            tokio::spawn(server.run_port_listener(listener, entrypoint, handle, stop));
        });
        changes.closed.iter().for_each(|address| info!(%address, "service port closed"));
        for (address, error) in &changes.failed {
            warn!(%address, %error, "cannot open service port");
        }
        let count = |count| i64::try_from(count).unwrap_or(i64::MAX);
        self.forwarder.metrics.service_ports.set(count(open.listeners.open_count()));
        self.forwarder.metrics.service_ports_failed.set(count(open.listeners.failed().len()));
    }

    /// Tries failed ports again, and opens the listener again if an agent has replaced the map.
    pub fn retry_failed(&self) {
        let open = self.open_ports.lock().unwrap_or_else(PoisonError::into_inner);
        let stale = self.listener_map.is_some()
            && !open.port_range.as_ref().is_some_and(PortRangeListener::is_current);
        let again = stale || !open.listeners.failed().is_empty();
        drop(open);
        if again {
            self.apply_routes();
        }
    }

    /// Returns true if one listener serves all ports now. Opens it if necessary.
    fn ensure_port_range(&self, open: &mut OpenServicePorts) -> bool {
        let Some(map) = &self.listener_map else { return false };
        if open.port_range.as_ref().is_some_and(PortRangeListener::is_current) {
            return true;
        }
        // Connections that have reached the old one stay open.
        open.port_range = None;
        match self.open_port_range(map) {
            Ok(range) => {
                info!(map = %map.display(), "one listener serves all service ports");
                (open.port_range, open.is_fallback_logged) = (Some(range), false);
            }
            Err(error) if !open.is_fallback_logged => {
                // No warning, since the agent may start a moment later than the activator.
                open.is_fallback_logged = true;
                info!(error = %common::link::error_chain(&error), "each service port has a listener of its own");
            }
            Err(_) => {}
        }
        open.port_range.is_some()
    }

    fn open_port_range(&self, map: &std::path::Path) -> Result<PortRangeListener, PortRangeError> {
        let closed = self.stop_listeners.child_token();
        let (range, listeners) = PortRangeListener::open(map, &self.addresses, closed.clone())?;
        for listener in listeners {
            tokio::spawn(Arc::clone(&self.server).run_listener(listener, None, closed.clone()));
        }
        Ok(range)
    }

    /// Reasons for `/readyz` why services cannot be reached.
    pub fn not_ready_reasons(&self) -> Vec<String> {
        let open = self.open_ports.lock().unwrap_or_else(PoisonError::into_inner);
        let failed = open.listeners.failed().iter();
        failed.map(|address| format!("cannot listen on {address}")).collect()
    }

    fn desired_addresses(&self, ports: &BTreeSet<u16>) -> BTreeSet<SocketAddr> {
        let both = |port: u16| self.addresses.iter().map(move |&ip| SocketAddr::new(ip, port));
        ports.iter().flat_map(|&port| both(port)).collect()
    }
}
