//! Shell: a service of the RouteTable, as requests find it.

use std::{borrow::Cow, num::NonZeroU16, sync::Arc, time::Instant};

use common::wire::{
    AppProtocol, ConnectionPath, DomainProtocol, GatewayRules, HttpChallenge, LOCAL_TLS_PORT,
    MappedDomain, NamespacedName, PathRule, TagRouting,
};
use smol_str::SmolStr;

use crate::revisions::revision::ActivatorRevision;

/// Service of the RouteTable, as requests use it.
#[derive(Debug)]
pub struct RoutedService {
    /// Namespace and name of the service.
    pub name: NamespacedName,
    /// Revisions with their shares of traffic. Empty: there is nothing to route to yet.
    pub targets: Box<[TrafficShare]>,
    /// Path of new connections inside the cluster: directly to pods, or by activators.
    pub path: ConnectionPath,
    /// Time since which the service has its present path.
    pub path_since: Instant,
    /// Protocol of the port; `None`: that of the Revision.
    pub protocol: Option<AppProtocol>,
    /// Port of the scaled Service that it is: each pod has its own port for it. `None`: it is one of Knative, whose
    /// requests go to the pods' serving port.
    pub service_port: Option<NonZeroU16>,
    /// True if connections to its port may begin with TLS, for names inside the cluster.
    pub serves_local_tls: bool,
    pub(crate) port: u16,
    pub(crate) hosts: Box<[Box<str>]>,
    pub(crate) gateway_rules: Option<Box<GatewayRules>>,
}

impl RoutedService {
    /// Returns true if a connection to its port is one request of raw TCP. Without a protocol of its own, all of its
    /// Revisions in the table must speak raw TCP. `None`: the table contains none of its Revisions. A service with
    /// https inside the cluster is never one of raw TCP.
    pub fn takes_raw_tcp(&self) -> Option<bool> {
        let is_tcp = |protocol: AppProtocol| protocol == AppProtocol::Tcp;
        if let Some(protocol) = self.protocol {
            return Some(is_tcp(protocol));
        }
        let mut known = self.targets.iter().filter_map(|it| it.revision.protocol());
        let Some(first) = known.next() else { return self.serves_local_tls.then_some(false) };
        Some(is_tcp(first) && known.all(is_tcp))
    }

    /// Gateway port, whose connections are raw TCP for the service. `None`: it has none.
    pub fn gateway_port(&self) -> Option<u16> {
        self.gateway_rules.as_ref()?.gateway_port.map(NonZeroU16::get)
    }

    /// Ports that are open for the service.
    pub(crate) fn open_ports(&self) -> OpenPorts {
        OpenPorts { activator_port: self.port, gateway_port: self.gateway_port() }
    }

    /// Name of the certificate for its names inside the cluster; `None`: they serve no https.
    pub fn local_certificate(&self) -> Option<NamespacedName> {
        self.serves_local_tls.then(|| self.name.with_port(LOCAL_TLS_PORT))
    }

    /// Name of the Kubernetes Service, without the port of a scaled one.
    pub fn kubernetes_name(&self) -> SmolStr {
        self.name.split_port().map_or_else(|| self.name.name.clone(), |(service, _)| service.name)
    }

    /// Meaning of tags for the service's requests: a choice of tags, or the tag that it is itself.
    pub fn tags(&self) -> Option<&TagRouting> {
        self.gateway_rules.as_ref()?.tag_routing.as_ref()
    }

    pub(crate) fn domains(&self) -> &[MappedDomain] {
        self.gateway_rules.as_ref().map_or(&[], |it| &it.mapped_domains)
    }

    /// Number of hosts whose TLS is passed through to the service.
    pub(crate) fn passthrough_hosts(&self) -> usize {
        let is_passed = |it: &&MappedDomain| it.protocol == DomainProtocol::TlsPassthrough;
        self.domains().iter().filter(is_passed).count()
    }

    pub(crate) fn challenges(&self) -> &[HttpChallenge] {
        self.gateway_rules.as_ref().map_or(&[], |it| &it.challenges)
    }

    /// Hosts that no wildcard covers, of whatever service: those that the service lists.
    pub(crate) fn reserved_hosts(&self) -> &[String] {
        self.gateway_rules.as_ref().map_or(&[], |it| &it.reserved_hosts)
    }

    /// Path rule of host number `at`, as [`nth_host`](Self::nth_host) counts them.
    pub(crate) fn nth_path_rule(&self, at: usize) -> Option<&PathRule> {
        self.domains().get(at.checked_sub(self.hosts.len())?)?.path_rule.as_ref()
    }

    /// Host number `at` in lists of hosts: one with a path rule is followed by its prefix.
    pub(crate) fn nth_listed_host(&self, at: usize) -> Option<Cow<'_, str>> {
        let host = self.nth_host(at)?;
        Some(match self.nth_path_rule(at) {
            Some(rule) => format!("{host}{}", rule.prefix).into(),
            None => host.into(),
        })
    }

    /// Host number `at` among all that reach it from outside: its own, then those of its DomainMappings.
    pub(crate) fn nth_host(&self, at: usize) -> Option<&str> {
        let own = self.hosts.get(at).map(AsRef::as_ref);
        own.or_else(|| Some(self.domains().get(at - self.hosts.len())?.host.as_str()))
    }
}

/// Ports that are open for a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpenPorts {
    /// Own port of the service at the activators.
    pub(crate) activator_port: u16,
    /// Gateway port of the service.
    pub(crate) gateway_port: Option<u16>,
}

/// Protocol of the connections to a port of the activator.
#[derive(Clone, Debug)]
pub enum PortProtocol {
    /// Connections bring requests of HTTP.
    Http,
    /// Each connection is one request of raw TCP for this service.
    RawTcp(Arc<RoutedService>),
    /// The RouteTable does not name the protocol: the service of the port is missing, or all of its Revisions are.
    Unknown,
}

/// Share of one Revision in the traffic of a service.
#[derive(Debug)]
pub struct TrafficShare {
    /// Revision, which may be missing in the RouteTable.
    pub revision: Arc<ActivatorRevision>,
    /// Share of the requests in percent.
    pub percent: u8,
}
