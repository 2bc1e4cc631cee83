//! Pure: the messages between components, checked once on arrival.
//!
//! Each stream begins with every subject, each with its whole state, then `Synced`; subjects not named before `Synced`
//! are removed. Afterwards only changes travel, in batches that end with `Synced` again. A receiver acts only at
//! `Synced`, so it never acts on half a change. Versions compare within one stream; a new stream states everything again.
//! A lost message costs time, never correctness.
//!
//! [`raw`] holds the protobuf messages; the types beside it are checked, and are the ones that components use.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use smol_str::SmolStr;

use crate::service_routing::TopologyHints;

/// Protobuf messages and gRPC services, generated from `proto/rouse.proto`.
#[allow(
    missing_docs,
    missing_debug_implementations,
    unreachable_pub,
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::too_many_lines,
    reason = "generated; the checked types document the fields"
)]
pub mod raw {
    tonic::include_proto!("rouse.v1");
}

mod certificates;
mod client_auth;
mod conversion;
mod gateway_hosts;
mod hsts;
mod path_modifier;
mod path_rules;
mod pod_reports;
mod route_table;
mod scale_policy;
mod settings;
mod slots;
mod sources;
mod standby;
mod telemetry;
mod tls_settings;
mod usage;

pub use certificates::{CertificateEntry, CertificateMaterial, PrivateKeyBytes};
pub use client_auth::{ClientAuth, ClientCaEntry, ClientCaMaterial};
pub use conversion::WireError;
pub use gateway_hosts::{
    GatewayHostEntry, GatewayHostKey, HeaderChanges, HttpRule, PathMatch, PlainBackend,
    RequestRedirect, RouteBackend, RuleTimeouts, UrlRewrite, WeightedBackend,
};
pub use hsts::{HstsFault, HstsPolicy};
pub use path_modifier::PathModifier;
pub use path_rules::{PathPrefix, PathPrefixFault, PathRule, wildcard_suffix};
pub use pod_reports::{PodObservation, PodReportItem};
pub use route_table::{RouteChange, RouteItem, RouteKey, RouteTable, RouteView};
pub use scale_policy::{ScaleMetric, ScalePolicy, ScalePolicyPool, WindowAggregation};
pub use settings::{
    EdgeSettings, GlobalSettings, LogLevel, LogLevels, RequestLogSettings, is_allowed_upgrade_name,
    parse_network,
};
pub use slots::{SlotClaim, SlotClaimItem, SlotGrant, SlotGrantItem, SlotsByPod};
pub use sources::{AllowedSources, IpBlock};
pub use standby::{StandbyOrder, StandbyReport};
pub use telemetry::{
    EndpointFault, OtlpCollector, OtlpProtocol, RequestMetricsSettings, SamplingRate,
    TelemetrySettings, TraceSettings,
};
pub use tls_settings::{TlsCipher, TlsFault, TlsMinVersion, TlsSettings};
pub use usage::{
    AutoscalerHeartbeat, RequestTotals, RevisionActivity, ScaleDecision, ScaleDecisionInputs,
    ScaleItem, UsageCoverage, UsageItem, UsageKey, UsageSample, WakeOrigin,
};

/// Namespace and name of a Kubernetes object, written as `namespace/name`.
///
/// The entry for a port of a scaled Service has the name `namespace/service:port`, which no object has.
///
/// Up to 23 bytes of either are stored in place, and a copy of a longer one shares its memory. A sleeping service has a
/// dozen copies of its names over all components.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamespacedName {
    /// Namespace of the object, a DNS label.
    pub namespace: SmolStr,
    /// Name within the namespace, a DNS subdomain.
    pub name: SmolStr,
}

impl NamespacedName {
    /// Name that no object has: both parts are empty.
    pub const EMPTY: Self =
        Self { namespace: SmolStr::new_static(""), name: SmolStr::new_static("") };

    /// Builds a name from namespace and name, unchecked.
    pub fn new(namespace: impl Into<SmolStr>, name: impl Into<SmolStr>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }

    /// Builds the name of the entry for a port of the scaled Service with this name.
    pub fn with_port(&self, port: NonZeroU16) -> Self {
        Self::new(self.namespace.clone(), format!("{}:{port}", self.name))
    }

    /// Splits the name of an entry for a port into the Service's name and the port. `None`: this name has no port.
    pub fn split_port(&self) -> Option<(Self, NonZeroU16)> {
        let (service, port) = self.name.split_once(':')?;
        Some((Self::new(self.namespace.clone(), service), parse_port_suffix(port)?))
    }
}

impl fmt::Display for NamespacedName {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.namespace, self.name)
    }
}

impl FromStr for NamespacedName {
    type Err = WireError;

    fn from_str(text: &str) -> Result<Self, WireError> {
        match text.split_once('/') {
            Some((namespace, name)) if is_dns_label(namespace) && is_entry_name(name) => {
                Ok(Self::new(namespace, name))
            }
            _ => {
                let rule = "must be namespace/name or namespace/service:port";
                Err(WireError::new("name", text, rule))
            }
        }
    }
}

/// Returns true for the name of an object, and for that of a Service with a port.
fn is_entry_name(name: &str) -> bool {
    match name.split_once(':') {
        // The name of a Kubernetes Service is a label.
        Some((service, port)) => is_dns_label(service) && parse_port_suffix(port).is_some(),
        None => is_dns_subdomain(name),
    }
}

/// Parses a port as [`NamespacedName::with_port`] writes it. One port has one name, so signs and leading zeros are
/// refused.
fn parse_port_suffix(digits: &str) -> Option<NonZeroU16> {
    digits.parse::<NonZeroU16>().ok().filter(|port| port.to_string() == digits)
}

/// Returns true if `text` is a DNS-1123 label: 1 to 63 of `a-z`, `0-9` and inner `-`.
pub fn is_dns_label(text: &str) -> bool {
    text.len() <= 63 && has_label_form(text)
}

/// Returns true if `text` is a DNS-1123 label of any length.
fn has_label_form(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    !text.is_empty() && text.bytes().all(inner) && !text.starts_with('-') && !text.ends_with('-')
}

/// Returns true if `text` is a DNS-1123 subdomain: labels joined by `.`, at most 253 bytes.
pub fn is_dns_subdomain(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_dns_label)
}

/// Returns true if `text` may be the name of a Secret. The API server accepts DNS subdomains whose labels may be longer
/// than 63 bytes.
pub fn is_secret_name(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(has_label_form)
}

/// Replica of a component that opened a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComponentReplica {
    /// Component that the replica belongs to.
    pub role: ClientComponent,
    /// Name of the replica, unique within the role.
    pub name: String,
    /// Node that the replica runs on; empty where that does not matter.
    pub node: String,
}

/// Component that opens streams to others. The controller sends each of them only what it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ClientComponent {
    /// Writes the eBPF maps of one node.
    Agent,
    /// Queues and forwards requests.
    Activator,
    /// Decides the scale of Revisions.
    Autoscaler,
}

// --- Entries of the RouteTable --------------------------------------------------------------------------

/// One addressable name: a Route, a tag of a Route (`<tag>-<route>`), or a port of a scaled Service
/// (`<service>:<port>`).
#[derive(Clone, Debug, PartialEq)]
pub struct ServiceEntry {
    /// Namespace and name of the addressable name.
    pub name: NamespacedName,
    /// ClusterIPs, at most one for each address family.
    pub addresses: Vec<IpAddr>,
    /// True while the Route waits for agents: each reports the service once it leads connects to it as the table says.
    pub awaits_agents: bool,
    /// Port that clients connect to.
    pub port: NonZeroU16,
    /// Port reserved for this service at every activator.
    pub activator_port: NonZeroU16,
    /// Traffic targets; their percents add up to 100. Empty: no Revision to route to yet, answer 503. A port of a
    /// scaled Service has one target at most.
    pub targets: Vec<RouteTarget>,
    /// Path of new connections while pods are ready.
    pub connection_path: ConnectionPath,
    /// Host names that reach the service through the gateway, lower case, without port.
    pub hosts: Vec<String>,
    /// Gateway rules beyond `hosts`. Few services have any, so the others pay for one word.
    pub gateway_rules: Option<Box<GatewayRules>>,
    /// Protocol of the port; `None`: that of the target Revision.
    pub protocol: Option<AppProtocol>,
    /// True for a port of a scaled Service: each pod has its own port for it, in [`PodEntry::ports`].
    pub uses_pod_ports: bool,
    /// Time for which a client keeps its pod after its last connect; `None`: no affinity. Sent in whole milliseconds.
    pub affinity: Option<Duration>,
    /// True if activators serve https at [`LOCAL_TLS_PORT`] of the addresses, with the certificate of
    /// [`local_certificate`](Self::local_certificate). Connects to that port always go to activators.
    pub serves_local_tls: bool,
}

/// Port at which the names of a service inside the cluster serve https.
pub const LOCAL_TLS_PORT: NonZeroU16 = NonZeroU16::new(443).expect("not zero");

impl ServiceEntry {
    /// Returns the name of the certificate for the names inside the cluster; `None`: they serve no https. It has a
    /// port, so it is never the name of a Secret.
    pub fn local_certificate(&self) -> Option<NamespacedName> {
        self.serves_local_tls.then(|| self.name.with_port(LOCAL_TLS_PORT))
    }
}

/// Gateway rules of a service beyond routing its hosts to it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GatewayRules {
    /// True if `hosts` answer http from outside with a redirect to https (`http-protocol: Redirected`).
    pub redirects_to_https: bool,
    /// Further hosts that reach the service from outside, from DomainMappings.
    pub mapped_domains: Vec<MappedDomain>,
    /// Tag header routing (Knative's feature `tag-header-based-routing`); `None`: off. Only an activator can read the
    /// header, so such a service has [`ConnectionPath::Activator`].
    pub tag_routing: Option<TagRouting>,
    /// Challenges of authorities for the hosts, which are responded to from outside, before any redirect.
    pub challenges: Vec<HttpChallenge>,
    /// [Reserved hosts](RouteTable::reserved_hosts) below the service's own wildcards, each once. Listed here only by a
    /// controller of an earlier release, or for an activator of one.
    pub reserved_hosts: Vec<String>,
    /// Gateway port: each connection to this port of the gateway is raw TCP for the service. No other service of the
    /// table has it. `None`: the service has none.
    pub gateway_port: Option<NonZeroU16>,
}

/// HTTP-01 challenge, by which an authority checks a host before it issues a certificate (RFC 8555, section 8.3).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpChallenge {
    /// Host that the authority asks, lower case, without port.
    pub host: String,
    /// Token: the last segment of the path that the authority asks for.
    pub token: String,
    /// Body of the response: the token and the hash of the account's public key.
    pub response: String,
}

/// One DomainMapping, as the gateway sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappedDomain {
    /// Host of the DomainMapping, lower case, without port. With a path rule it may have a wildcard, as `*.example.com`.
    pub host: String,
    /// Host that the pods receive; the client's host is then in `K-Original-Host`. `None`: the pods receive the
    /// client's host. An application behind Knative sees the same, since its sidecar restores the client's host.
    pub host_rewrite: Option<String>,
    /// True if the host answers http from outside with a redirect to https.
    pub redirects_to_https: bool,
    /// Secret whose certificate the host has; `None`: the certificate is chosen by its names.
    pub certificate: Option<NamespacedName>,
    /// Rule for certificates of clients; `None`: clients are asked for none.
    pub client_auth: Option<ClientAuth>,
    /// `Strict-Transport-Security` of the host; `None`: that of [`EdgeSettings`].
    pub hsts: Option<HstsPolicy>,
    /// Paths that the mapping serves. `None`: it has the host for itself, and the host has no wildcard.
    pub path_rule: Option<PathRule>,
    /// Protocol of the host's clients. With raw TCP the path rule is that of all paths, or `None`.
    pub protocol: DomainProtocol,
}

/// Protocol of the clients of a host, as the gateway treats it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DomainProtocol {
    /// Clients send requests of HTTP.
    #[default]
    Http,
    /// Each connection is raw TCP within TLS, which the gateway ends.
    TcpOverTls,
    /// Each connection is raw TCP that brings TLS of its own. The gateway reads the name of the ClientHello only.
    TlsPassthrough,
}

/// Role of a service for the header `Knative-Serving-Tag`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TagRouting {
    /// The service is a Route: the header chooses one of these tags; any other value means default traffic.
    ChooseTag(Vec<RouteTag>),
    /// The service is this tag of such a Route; its pods receive the tag in the header.
    ServeTag(String),
}

/// One tag of a Route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteTag {
    /// Value of the header that chooses the tag.
    pub name: String,
    /// Service of the tag, which has the tag's traffic targets.
    pub service: NamespacedName,
}

/// Share of one Revision in a service's traffic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteTarget {
    /// Revision that receives the share.
    pub revision: NamespacedName,
    /// Share of the requests in percent, 1 to 100.
    pub percent: u8,
}

/// Path of a new connection when pods are ready. Without a ready pod it always goes to the activator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionPath {
    /// From the eBPF programs to a pod.
    Direct,
    /// Through an activator, which forwards each request.
    Activator,
}

/// Properties of a Revision's pods, and limits of their requests.
#[derive(Clone, Debug, PartialEq)]
pub struct RevisionEntry {
    /// Namespace and name of the Revision.
    pub name: NamespacedName,
    /// Name of the owning Service, as in `K_SERVICE`; empty without one.
    pub service: SmolStr,
    /// Name of the owning Configuration.
    pub configuration: SmolStr,
    /// Hard limit: requests that a pod may have at once; 0: no limit.
    pub container_concurrency: u32,
    /// Limit of a whole request (`timeoutSeconds`).
    pub timeout: Duration,
    /// Limit until the first response byte (`responseStartTimeoutSeconds`).
    pub response_start_timeout: Option<Duration>,
    /// Limit between two response bytes (`idleTimeoutSeconds`).
    pub idle_timeout: Option<Duration>,
    /// Protocol of the pods' serving port.
    pub protocol: AppProtocol,
    /// Scale policy; only sent to autoscalers. Most Revisions share one, see [`ScalePolicyPool`].
    pub policy: Option<Arc<ScalePolicy>>,
    /// True if a Route sends traffic to the Revision. Otherwise it may shrink in one step and minimum scale does not
    /// hold.
    pub reachable: bool,
    /// True if the Revision has reached its initial scale once.
    pub initial_scale_reached: bool,
    /// Clients that may send requests to the pods; `None`: all. Only sent to activators.
    pub allowed_sources: Option<Arc<AllowedSources>>,
}

/// Protocol that pods speak on a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AppProtocol {
    /// HTTP/1.1 (port name `http1` or none).
    Http1,
    /// HTTP/2 without TLS (port name `h2c`).
    H2c,
    /// Bytes of any protocol: a connection is one request.
    Tcp,
}

/// Port of a pod to which a port of a scaled Service leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodPort {
    /// Port of the Service, as clients connect to it.
    pub service_port: NonZeroU16,
    /// Port on which the pod listens.
    pub port: NonZeroU16,
    /// Protocol that the pod speaks on it.
    pub protocol: AppProtocol,
}

/// Pod of a Revision, as the data plane sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct PodEntry {
    /// Unique identifier, never reused.
    pub uid: String,
    /// Name of the pod within the Revision's namespace.
    pub name: String,
    /// Revision that the pod serves.
    pub revision: NamespacedName,
    /// Node that the pod runs on.
    pub node: String,
    /// Zone of that node; empty when unknown.
    pub zone: String,
    /// Clients that should use the pod, while each ready pod of its Revision has such hints.
    pub hints: TopologyHints,
    /// Phase of the pod for routing.
    pub phase: RoutingPhase,
    /// Address and port that the pod serves on; `None` until its network exists.
    pub address: Option<SocketAddr>,
    /// Address of the other family, at the same port, if the pod has one and serves there too.
    pub other_family_address: Option<IpAddr>,
    /// True if the kubelet calls the pod ready: other nodes need not test if they reach it.
    pub kubelet_ready: bool,
    /// True if the pod is starting, and becomes ready once the agent of its node reports it as ready at `address`.
    /// Activators with streams of that agent need not wait for the table then.
    pub awaits_report: bool,
    /// Serving port of the pod (`PORT`). For a pod of a scaled Service, the port that its probe asks, else that of the
    /// first port of the Service.
    pub port: NonZeroU16,
    /// Readiness probe that the agent on the pod's node runs.
    pub probe: ReadinessProbe,
    /// Ports to which a scaled Service leads, sorted by `service_port`; empty for pods of Knative Revisions.
    pub ports: Vec<PodPort>,
    /// True if a bind to loopback stays as it is: the pod is not one that Rouse made.
    pub keeps_binds: bool,
    /// Standby order: the pod is frozen while nothing uses it; `None`: the pod runs. A draining pod has none.
    pub standby: Option<StandbyOrder>,
    /// True if the kubelet restarts a container and does not end the pod, as a stop check after the report with
    /// [`PodObservation::awaits_stop`] has shown. False: not known. Of no effect on a draining pod.
    pub container_restarts: bool,
}

impl PodEntry {
    /// Returns the pod's port for a service; `None`: the pod has none for it.
    pub fn port_for(&self, service: &ServiceEntry) -> Option<NonZeroU16> {
        if !service.uses_pod_ports {
            return Some(self.port);
        }
        let own = self.ports.iter().find(|it| it.service_port == service.port);
        own.map(|it| it.port)
    }
}

/// Phase of a pod for routing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoutingPhase {
    /// Not ready yet: receives no requests.
    Starting,
    /// Ready: may receive new requests.
    Ready,
    /// Draining: receives no new requests and ends after its last one.
    Draining,
}

/// Readiness probe of a pod. The times are Kubernetes' probe fields.
#[derive(Clone, Debug, PartialEq)]
pub struct ReadinessProbe {
    /// Handler: the request that an attempt makes.
    pub handler: ProbeHandler,
    /// Port to probe; `None`: the serving port.
    pub port: Option<NonZeroU16>,
    /// Time between two attempts; zero: as fast as sensible (Knative's aggressive probe).
    pub period: Duration,
    /// Limit of one attempt; zero: 1 s.
    pub timeout: Duration,
    /// Consecutive successes that make the pod ready, at least 1.
    pub success_threshold: u32,
    /// Consecutive failures that make the pod unready again, at least 1.
    pub failure_threshold: u32,
}

impl ReadinessProbe {
    /// Returns the default probe: the pod is ready when its process listens.
    pub fn listener_probe() -> Self {
        Self {
            handler: ProbeHandler::Listen,
            port: None,
            period: Duration::ZERO,
            timeout: Duration::ZERO,
            success_threshold: 1,
            failure_threshold: 1,
        }
    }
}

/// Handler of a readiness probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProbeHandler {
    /// No request: the pod is ready when its process listens. The default TCP probe maps to this.
    Listen,
    /// TCP connect that must succeed.
    Tcp,
    /// HTTP GET that must be answered with 200 to 399.
    Http {
        /// Path and query of the request.
        path: String,
        /// Extra headers, as name and value.
        headers: Vec<(String, String)>,
        /// Host of the request; empty: the pod's address.
        host: String,
        /// True for TLS, whose certificate is not checked.
        https: bool,
    },
    /// Call of `grpc.health.v1.Health/Check` that must be answered with SERVING.
    Grpc {
        /// Service named in the call; empty: the server as a whole.
        service: String,
    },
}

/// Activator that connects and requests can be sent to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActivatorEntry {
    /// Unique name of the replica.
    pub name: String,
    /// Node that the activator runs on.
    pub node: String,
    /// Zone of that node; empty when unknown.
    pub zone: String,
    /// Addresses at which it listens on every service's activator port, at most one for each family.
    pub addresses: Vec<IpAddr>,
    /// True if agents of all nodes report ready pods to it, false if only those of its own node do.
    pub gets_all_reports: bool,
}

/// Node with a zone. Only sent to the agent of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeEntry {
    /// Name of the node.
    pub name: String,
    /// Zone of the node, not empty.
    pub zone: SmolStr,
}

/// Component that others open streams to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ServerComponent {
    /// Serves routes, and receives pod reports and scale decisions.
    Controller,
    /// Receives usage reports of agents and activators.
    Autoscaler,
}

/// Every replica of one component.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerReplicas {
    /// Component that the replicas belong to.
    pub component: ServerComponent,
    /// Replicas with the addresses that accept streams.
    pub members: Vec<ServerReplica>,
    /// Name of the active replica; `None`: none yet. Controllers obey the decisions of the active autoscaler.
    pub active: Option<String>,
}

/// One replica of a component.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerReplica {
    /// Name of the replica, as in [`ComponentReplica`].
    pub name: String,
    /// Address at which the replica accepts streams.
    pub address: SocketAddr,
}

#[cfg(test)]
mod tests;
