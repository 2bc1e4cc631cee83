//! Pure: addresses and listeners of a pod, and the reasons for which it does not serve.

use std::{
    collections::BTreeSet,
    iter, mem,
    net::{IpAddr, SocketAddr},
    time::Instant,
};

use datapath::abi;

use super::TrackedPod;
use crate::{
    incompatible::Incompatibility,
    pods::{
        pod_ports::other_ports,
        types::{NamespaceListener, PodTrackerAction},
    },
};

/// Listeners of a pod at its ports besides the one that tells its readiness, as the kernel's maps have them.
#[derive(Debug, Default)]
pub(super) struct PortListeners {
    /// Ports with a reachable listener that the eBPF programs saw open.
    open: BTreeSet<u16>,
    /// Ports whose last such listener has closed since the newest inspection, which may still show it.
    pub(super) closed: BTreeSet<u16>,
}

impl TrackedPod {
    /// Returns the serving address: an address of the pod's own namespace, in its listener's family if that is known.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        let addresses = &self.facts.as_ref()?.addresses;
        let serves = self.served_families();
        let wanted = |ip: &&IpAddr| serves & family_bit(**ip) != 0;
        let ip = addresses.iter().find(wanted).or_else(|| addresses.first())?;
        Some(SocketAddr::new(*ip, self.pod.port.get()))
    }

    /// Returns the pod's address of the other family, if it serves that family too.
    pub(super) fn other_family_address(&self) -> Option<IpAddr> {
        let others = self.served_families() & !family_bit(self.address()?.ip());
        let addresses = &self.facts.as_ref()?.addresses;
        addresses.iter().find(|ip| others & family_bit(**ip) != 0).copied()
    }

    /// Returns the families of clients that the pod serves, as `SERVES_*` bits; 0: not known.
    fn served_families(&self) -> u32 {
        if self.kernel_state.listeners > 0 {
            return self.kernel_state.served_families;
        }
        self.listeners_at(self.pod.port.get()).fold(0, |all, it| all | listener_families(it))
    }

    /// Returns true if the pod serves the family of its first address, which clients use. Also true while the families
    /// are not known.
    ///
    /// Knative has no such check: its sidecar probes the application at 127.0.0.1 and calls it ready by that alone.
    pub(super) fn serves_clients(&self) -> bool {
        let first = self.facts.as_ref().and_then(|facts| facts.addresses.first());
        self.served_families() == 0
            || first.is_none_or(|ip| self.served_families() & family_bit(*ip) != 0)
    }

    /// Returns the listeners on a port that other hosts can reach, by the newest inspection.
    fn listeners_at(&self, port: u16) -> impl Iterator<Item = &NamespaceListener> {
        let all = self.listeners().iter();
        all.filter(move |it| it.at.port() == port && !is_loopback(it.at.ip()))
    }

    /// Returns the ports with a listener by the newest inspection, but none that the eBPF programs saw open: it opened
    /// before them.
    pub(super) fn unseen_ports(&self) -> impl Iterator<Item = u16> {
        let serving = self.pod.port.get();
        let is_serving_unseen = self.kernel_state.listeners == 0;
        let PortListeners { open, closed } = &self.port_listeners;
        let others = other_ports(&self.pod).into_iter();
        let others = others.filter(move |port| !open.contains(port) && !closed.contains(port));
        let all = iter::once(serving).filter(move |_| is_serving_unseen).chain(others);
        all.filter(move |port| self.listeners_at(*port).next().is_some())
    }

    /// Makes a change of what is known of the listeners. If connects must check other listeners afterwards, the
    /// backends of a pod with several ports are to be planned again; those of other pods follow their reports.
    pub(super) fn track_unseen_ports(
        &mut self,
        out: &mut Vec<PodTrackerAction>,
        change: impl FnOnce(&mut Self),
    ) {
        let before: BTreeSet<u16> = self.unseen_ports().collect();
        change(self);
        let after: BTreeSet<u16> = self.unseen_ports().collect();
        if before != after && !self.pod.ports.is_empty() {
            out.push(PodTrackerAction::ReplanBackends(self.uid()));
        }
    }

    /// Handles a reading of the maps for the ports besides the one that tells the readiness.
    pub(super) fn handle_open_ports(
        &mut self,
        now: Instant,
        ports: BTreeSet<u16>,
        out: &mut Vec<PodTrackerAction>,
    ) {
        let mut has_closed = false;
        self.track_unseen_ports(out, |pod| {
            let listeners = &mut pod.port_listeners;
            listeners.closed.retain(|port| !ports.contains(port));
            let before = mem::replace(&mut listeners.open, ports);
            let closed: Vec<u16> = before.difference(&listeners.open).copied().collect();
            has_closed = !closed.is_empty();
            listeners.closed.extend(closed);
        });
        // Only an inspection after the close shows if the port has other listeners.
        if has_closed && self.is_registered {
            self.request_inspection(now, out);
        }
    }

    fn listeners(&self) -> &[NamespaceListener] {
        self.sockets.as_ref().map_or(&[], |sockets| &sockets.listeners)
    }

    pub(super) fn is_listening(&self) -> bool {
        self.kernel_state.listeners > 0 || self.listeners_at(self.pod.port.get()).next().is_some()
    }

    /// Returns the reason for which the pod is not ready, for its users; empty: there is none.
    pub(super) fn not_ready_reason(&self) -> String {
        let in_namespace =
            self.facts.as_ref().map_or(self.namespace_missing, |facts| facts.incompatibility);
        let redirects = self.sockets.as_ref().is_some_and(|sockets| sockets.has_redirection);
        let not_counted = in_namespace
            .map(|it| it.to_string())
            .or_else(|| self.unregistered_reason())
            .or_else(|| redirects.then(|| Incompatibility::Redirected.to_string()));
        // These reasons come first: no listener makes a pod ready that cannot be counted.
        if let Some(reason) = not_counted {
            return reason;
        }
        if !self.is_listening() {
            return self.not_listening_reason();
        }
        if !self.serves_clients() {
            return self.wrong_family_reason();
        }
        match self.readiness.last_failure() {
            "" => String::new(),
            failure => format!("readiness probe failed: {failure}"),
        }
    }

    /// Returns the reason for which a pod that listens for one address family does not serve.
    fn wrong_family_reason(&self) -> String {
        let port = self.pod.port;
        let (have, want, any) = match self.served_families() & abi::SERVES_V4 {
            0 => ("IPv6", "IPv4", "0.0.0.0, or on :: without IPV6_V6ONLY"),
            _ => ("IPv4", "IPv6", "::"),
        };
        format!("port {port} is open for {have} only, and clients come by {want}: listen on {any}")
    }

    /// Returns the reason for which a pod without a reachable listener does not serve. Empty while nothing is known: no
    /// inspection has ended, and the kernel has seen no listener on a loopback address.
    fn not_listening_reason(&self) -> String {
        let port = self.pod.port;
        let seen_on_loopback = self.kernel_state.loopback_listeners > 0;
        if self.sockets.is_none() && !seen_on_loopback {
            return String::new();
        }
        if seen_on_loopback || self.listeners().iter().any(|it| it.at.port() == port.get()) {
            return format!("port {port} is open on a loopback address only: listen on 0.0.0.0");
        }
        let elsewhere: Vec<String> = self.listeners().iter().map(|it| it.at.to_string()).collect();
        // Rouse sets the variable in its own pods only.
        let advice = match self.pod.keeps_binds {
            true => "correct the targetPort of the Service, or the port of the readiness probe",
            false => "listen on the port in $PORT",
        };
        match elsewhere.join(", ") {
            at if at.is_empty() => format!("nothing listens on port {port} yet"),
            at => format!("nothing listens on port {port}, but on {at}: {advice}"),
        }
    }
}

fn is_loopback(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}

/// Returns the `SERVES_*` bit of an address's own family.
fn family_bit(ip: IpAddr) -> u32 {
    if ip.is_ipv4() { abi::SERVES_V4 } else { abi::SERVES_V6 }
}

/// Returns the families of clients that reach a listener. The wildcard `::` serves both, unless it is IPv6-only.
fn listener_families(listener: &NamespaceListener) -> u32 {
    match listener.at.ip().to_canonical() {
        IpAddr::V6(ip) if ip.is_unspecified() && !listener.v6_only => {
            abi::SERVES_V4 | abi::SERVES_V6
        }
        ip => family_bit(ip),
    }
}
