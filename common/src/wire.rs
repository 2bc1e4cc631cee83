//! Pure: the messages between components, checked once on arrival.
//!
//! Each stream begins with every subject, each with its whole state, then `Synced`; subjects not named before `Synced`
//! are removed. Afterwards only changes travel, in batches that end with `Synced` again. A receiver acts only at
//! `Synced`, so it never acts on half a change. Versions compare within one stream; a new stream replaces everything. A
//! lost message costs time, never correctness.
//!
//! [`raw`] holds the protobuf messages; the types beside it are checked, and are the ones that components use.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use smol_str::SmolStr;

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

mod conversion;
mod settings;
mod slots;
mod sources;
mod usage;

pub use conversion::WireError;
pub use settings::{
    EdgeSettings, GlobalSettings, LogLevel, LogLevels, RequestLogSettings, is_allowed_upgrade_name,
    parse_network,
};
pub use slots::{SlotClaim, SlotClaimItem, SlotGrant, SlotGrantItem, SlotsByPod};
pub use sources::{AllowedSources, IpBlock};
pub use usage::{
    AutoscalerHeartbeat, RequestTotals, RevisionActivity, ScaleDecision, ScaleDecisionInputs,
    ScaleItem, UsageCoverage, UsageItem, UsageKey, UsageSample,
};

/// Namespace and name of a Kubernetes object, written as `namespace/name`.
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
            Some((namespace, name)) if is_dns_label(namespace) && is_dns_subdomain(name) => {
                Ok(Self::new(namespace, name))
            }
            _ => Err(WireError::new("name", text, "must be namespace/name")),
        }
    }
}

/// Returns true if `text` is a DNS-1123 label: 1 to 63 of `a-z`, `0-9` and inner `-`.
pub fn is_dns_label(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=63).contains(&text.len())
        && text.bytes().all(inner)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

/// Returns true if `text` is a DNS-1123 subdomain: labels joined by `.`, at most 253 bytes.
pub fn is_dns_subdomain(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_dns_label)
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

// --- RouteTable -----------------------------------------------------------------------------------------

/// Everything that the data plane follows, by subject. A receiver keeps it in a [`RouteView`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouteTable {
    /// Addressable names: Routes and their tags.
    pub services: BTreeMap<NamespacedName, ServiceEntry>,
    /// Revisions that some service names, or that still have pods.
    pub revisions: BTreeMap<NamespacedName, RevisionEntry>,
    /// Pods of Revisions, by uid.
    pub pods: BTreeMap<String, PodEntry>,
    /// Activators, by the name of the replica.
    pub activators: BTreeMap<String, ActivatorEntry>,
    /// Replicas of components that are found by the table; empty where each component has one replica.
    pub replicas: BTreeMap<ServerComponent, ServerReplicas>,
    /// Settings that hold for all services.
    pub settings: GlobalSettings,
}

/// One addressable name: a Route, or a tag of a Route (`<tag>-<route>`).
#[derive(Clone, Debug, PartialEq)]
pub struct ServiceEntry {
    /// Namespace and name of the addressable name.
    pub name: NamespacedName,
    /// ClusterIPs, at most one for each address family.
    pub addresses: Vec<IpAddr>,
    /// Port that clients connect to.
    pub port: NonZeroU16,
    /// Port reserved for this service at every activator.
    pub activator_port: NonZeroU16,
    /// Traffic targets; their percents add up to 100. Empty: no Revision to route to yet, answer 503.
    pub targets: Vec<RouteTarget>,
    /// Path of new connections while pods are ready.
    pub connection_path: ConnectionPath,
    /// Host names that reach the service through the gateway, lower case, without port.
    pub hosts: Vec<String>,
    /// Gateway rules beyond `hosts`. Few services have any, so the others pay for one word.
    pub gateway_rules: Option<Box<GatewayRules>>,
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
}

/// One DomainMapping, as the gateway sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappedDomain {
    /// Host of the DomainMapping, lower case, without port.
    pub host: String,
    /// Host that the pods receive; the client's host is then in `K-Original-Host`. `None`: the pods receive the
    /// client's host. An application behind Knative sees the same, since its sidecar restores the client's host.
    pub host_rewrite: Option<String>,
    /// True if the host answers http from outside with a redirect to https.
    pub redirects_to_https: bool,
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

/// Protocol that a Revision's pods speak on their serving port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AppProtocol {
    /// HTTP/1.1 (port name `http1` or none).
    Http1,
    /// HTTP/2 without TLS (port name `h2c`).
    H2c,
}

/// Scaling parameters of a Revision. Meaning, bounds and defaults: Knative `config-autoscaler` and
/// `autoscaling.knative.dev/*`.
#[derive(Clone, Debug, PartialEq)]
pub struct ScalePolicy {
    /// Metric that the autoscaler averages.
    pub metric: ScaleMetric,
    /// Highest load of one pod: concurrent requests, or requests per second. At least 0.01.
    pub target_total: f64,
    /// Share of `target_total` that the autoscaler aims at, 0 < u ≤ 1. Default 0.7.
    pub target_utilization: f64,
    /// Burst capacity to keep free; −1: always through the activator; 0 (shipped): never for lack of capacity.
    pub target_burst_capacity: f64,
    /// Concurrent requests that one activator is expected to handle. Default 100.
    pub activator_capacity: f64,
    /// Length of the stable window. Default 60 s, 6 s to 1 h.
    pub stable_window: Duration,
    /// Length of the panic window in percent of the stable one. Default 10.
    pub panic_window_percent: f64,
    /// Load that starts panic, in percent of the capacity of ready pods. Default 200.
    pub panic_threshold_percent: f64,
    /// Largest factor by which one decision may raise ready pods. Default 1000.
    pub max_scale_up_rate: f64,
    /// Largest divisor by which one decision may lower ready pods. Default 2.
    pub max_scale_down_rate: f64,
    /// Fewest pods while the Revision is reachable. Default 0.
    pub min_scale: u32,
    /// Most pods; 0: no limit.
    pub max_scale: u32,
    /// Pods that a new Revision starts with. Default 1.
    pub initial_scale: u32,
    /// Fewest pods while there is any load; 0 and 1: off.
    pub activation_scale: u32,
    /// Time for which a lower desired scale must hold before a decision follows. Default 0.
    pub scale_down_delay: Duration,
    /// True if zero pods are allowed. Default true.
    pub scale_to_zero: bool,
    /// Least time on the activator path before the last pod ends. Default 30 s.
    pub scale_to_zero_grace_period: Duration,
    /// Least time that the last pod stays after the load ended. Default 0.
    pub scale_to_zero_retention_period: Duration,
    /// Time after which a start that is not ready counts as failed. Default 600 s.
    pub progress_deadline: Duration,
    /// Weights of the seconds in a window's average.
    pub aggregation: WindowAggregation,
}

/// Pool of known policies, so that equal ones are stored once: ten thousand services use a handful.
#[derive(Clone, Debug, Default)]
pub struct ScalePolicyPool(Vec<Arc<ScalePolicy>>);

impl ScalePolicyPool {
    /// Number of policies to compare with; beyond them each policy is stored by itself.
    const CAPACITY: usize = 64;

    /// Returns the known policy equal to `policy`, or `policy` itself, which may become known.
    pub fn intern(&mut self, policy: Arc<ScalePolicy>) -> Arc<ScalePolicy> {
        if let Some(shared) = self.0.iter().find(|shared| **shared == policy) {
            return Arc::clone(shared);
        }
        // The pool itself holds one count of each: policies that no Revision uses are dropped first.
        if self.0.len() == Self::CAPACITY {
            self.0.retain(|shared| Arc::strong_count(shared) > 1);
        }
        if self.0.len() < Self::CAPACITY {
            self.0.push(Arc::clone(&policy));
        }
        policy
    }
}

impl Default for ScalePolicy {
    /// Returns Knative's `config-autoscaler` as shipped (`config/core/configmaps/autoscaler.yaml` at 98e5ef9), but for
    /// the burst capacity: 0 instead of 211, so that small services may use the direct path.
    fn default() -> Self {
        Self {
            metric: ScaleMetric::Concurrency,
            target_total: 100.0,
            target_utilization: 0.7,
            target_burst_capacity: 0.0,
            activator_capacity: 100.0,
            stable_window: Duration::from_secs(60),
            panic_window_percent: 10.0,
            panic_threshold_percent: 200.0,
            max_scale_up_rate: 1000.0,
            max_scale_down_rate: 2.0,
            min_scale: 0,
            max_scale: 0,
            initial_scale: 1,
            activation_scale: 0,
            scale_down_delay: Duration::ZERO,
            scale_to_zero: true,
            scale_to_zero_grace_period: Duration::from_secs(30),
            scale_to_zero_retention_period: Duration::ZERO,
            progress_deadline: Duration::from_secs(600),
            aggregation: WindowAggregation::Linear,
        }
    }
}

/// Metric that the autoscaler averages over its windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleMetric {
    /// Requests in flight at the same time.
    Concurrency,
    /// Requests that begin in each second.
    Rps,
}

/// Weights of the seconds in a window's average.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowAggregation {
    /// Equal weight for every second.
    Linear,
    /// Higher weight for newer seconds.
    WeightedExponential,
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
    /// Phase of the pod for routing.
    pub phase: RoutingPhase,
    /// Address and port that the pod serves on; `None` until its network exists.
    pub address: Option<SocketAddr>,
    /// Address of the other family, at the same port, if the pod has one and serves there too.
    pub other_family_address: Option<IpAddr>,
    /// True if the kubelet calls the pod ready: other nodes need not test if they reach it.
    pub kubelet_ready: bool,
    /// Serving port of the pod (`PORT`).
    pub port: NonZeroU16,
    /// Readiness probe that the agent on the pod's node runs.
    pub probe: ReadinessProbe,
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

/// One item of a RouteTable stream.
#[derive(Clone, Debug, PartialEq)]
pub struct RouteItem {
    /// Number that grows with each change within a stream; the receiver reports it back once it is in force.
    pub version: u64,
    /// Change that the item carries.
    pub change: RouteChange,
}

/// Change of one subject, or the end of a batch.
#[derive(Clone, Debug, PartialEq)]
pub enum RouteChange {
    /// Whole state of a service.
    Service(ServiceEntry),
    /// Whole state of a Revision.
    Revision(RevisionEntry),
    /// Whole state of a pod. Boxed: services and Revisions are many and smaller.
    Pod(Box<PodEntry>),
    /// Whole state of an activator.
    Activator(ActivatorEntry),
    /// All replicas of a component. Links apply them; the users of a link may ignore them.
    Replicas(ServerReplicas),
    /// Settings that hold for all services.
    Settings(GlobalSettings),
    /// Removal of the subject.
    Removed(RouteKey),
    /// End of a batch: the stream has sent everything up to this version.
    Synced,
}

/// Key of one subject of a RouteTable.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RouteKey {
    /// Service, by namespace and name.
    Service(NamespacedName),
    /// Revision, by namespace and name.
    Revision(NamespacedName),
    /// Pod, by its uid.
    Pod(String),
    /// Activator, by the replica's name.
    Activator(String),
    /// All replicas of a component.
    Replicas(ServerComponent),
    /// Settings that hold for all services.
    Settings,
}

impl RouteChange {
    /// Returns the key of the subject that changes; `None` for `Synced`.
    pub fn key(&self) -> Option<RouteKey> {
        match self {
            Self::Service(it) => Some(RouteKey::Service(it.name.clone())),
            Self::Revision(it) => Some(RouteKey::Revision(it.name.clone())),
            Self::Pod(it) => Some(RouteKey::Pod(it.uid.clone())),
            Self::Activator(it) => Some(RouteKey::Activator(it.name.clone())),
            Self::Replicas(it) => Some(RouteKey::Replicas(it.component)),
            Self::Settings(_) => Some(RouteKey::Settings),
            Self::Removed(key) => Some(key.clone()),
            Self::Synced => None,
        }
    }
}

impl RouteTable {
    /// Returns the whole states of all subjects.
    pub fn all_states(&self) -> impl Iterator<Item = RouteChange> {
        let services = self.services.values().cloned().map(RouteChange::Service);
        let revisions = self.revisions.values().cloned().map(RouteChange::Revision);
        let pods = self.pods.values().cloned().map(|it| RouteChange::Pod(it.into()));
        let activators = self.activators.values().cloned().map(RouteChange::Activator);
        let replicas = self.replicas.values().cloned().map(RouteChange::Replicas);
        let settings = self.settings.if_not_default().map(RouteChange::Settings);
        // Named subjects come before the services that name them, although a receiver acts only at `Synced`.
        let first = settings.into_iter().chain(replicas).chain(activators);
        first.chain(revisions).chain(pods).chain(services)
    }

    /// Returns the changes that turn `self` into `next`: states first, then removals.
    pub fn changes_to(&self, next: &Self) -> Vec<RouteChange> {
        let mut out = Vec::new();
        if self.settings != next.settings {
            out.extend(next.settings.if_not_default().map(RouteChange::Settings));
        }
        for_each_changed(&self.replicas, &next.replicas, |v| out.push(RouteChange::Replicas(v)));
        for_each_changed(&self.activators, &next.activators, |v| {
            out.push(RouteChange::Activator(v))
        });
        for_each_changed(&self.revisions, &next.revisions, |v| out.push(RouteChange::Revision(v)));
        for_each_changed(&self.pods, &next.pods, |v| out.push(RouteChange::Pod(v.into())));
        for_each_changed(&self.services, &next.services, |v| out.push(RouteChange::Service(v)));
        // Removals come last, so that no service names a subject that is already removed.
        let removed = self.keys().into_iter().filter(|key| !next.contains(key));
        out.extend(removed.map(RouteChange::Removed));
        out
    }

    /// Returns the keys of all subjects.
    pub fn keys(&self) -> BTreeSet<RouteKey> {
        let services = self.services.keys().cloned().map(RouteKey::Service);
        let revisions = self.revisions.keys().cloned().map(RouteKey::Revision);
        let pods = self.pods.keys().cloned().map(RouteKey::Pod);
        let activators = self.activators.keys().cloned().map(RouteKey::Activator);
        let replicas = self.replicas.keys().copied().map(RouteKey::Replicas);
        let settings = self.settings.if_not_default().map(|_| RouteKey::Settings);
        let all = services.chain(revisions).chain(pods).chain(activators).chain(replicas);
        all.chain(settings).collect()
    }

    fn contains(&self, key: &RouteKey) -> bool {
        match key {
            RouteKey::Service(name) => self.services.contains_key(name),
            RouteKey::Revision(name) => self.revisions.contains_key(name),
            RouteKey::Pod(uid) => self.pods.contains_key(uid),
            RouteKey::Activator(name) => self.activators.contains_key(name),
            RouteKey::Replicas(part) => self.replicas.contains_key(part),
            RouteKey::Settings => self.settings.if_not_default().is_some(),
        }
    }

    /// Applies one change and returns the key of its subject. `Synced` changes nothing.
    fn apply_change(&mut self, change: RouteChange) -> Option<RouteKey> {
        let key = change.key()?;
        match change {
            RouteChange::Service(it) => drop(self.services.insert(it.name.clone(), it)),
            RouteChange::Revision(it) => drop(self.revisions.insert(it.name.clone(), it)),
            RouteChange::Pod(it) => drop(self.pods.insert(it.uid.clone(), *it)),
            RouteChange::Activator(it) => drop(self.activators.insert(it.name.clone(), it)),
            RouteChange::Replicas(it) => drop(self.replicas.insert(it.component, it)),
            RouteChange::Settings(it) => self.settings = it,
            RouteChange::Removed(_) => self.remove(&key),
            RouteChange::Synced => {}
        }
        Some(key)
    }

    fn remove(&mut self, key: &RouteKey) {
        match key {
            RouteKey::Service(name) => drop(self.services.remove(name)),
            RouteKey::Revision(name) => drop(self.revisions.remove(name)),
            RouteKey::Pod(uid) => drop(self.pods.remove(uid)),
            RouteKey::Activator(name) => drop(self.activators.remove(name)),
            RouteKey::Replicas(part) => drop(self.replicas.remove(part)),
            RouteKey::Settings => self.settings = GlobalSettings::default(),
        }
    }
}

/// Calls `each` for every value of `next` that is new or differs in `now`.
fn for_each_changed<K: Ord, V: Clone + PartialEq>(
    now: &BTreeMap<K, V>,
    next: &BTreeMap<K, V>,
    each: impl FnMut(V),
) {
    let new = next.iter().filter(|(key, value)| now.get(key) != Some(value));
    new.map(|(_, value)| value.clone()).for_each(each);
}

/// Receiver's copy of the RouteTable, kept when a stream breaks.
///
/// Call [`begin_stream`](Self::begin_stream) when a stream opens and [`apply_item`](Self::apply_item) for each item.
/// The table is consistent, and may be acted on, only when `apply_item` has returned a set.
#[derive(Clone, Debug, Default)]
pub struct RouteView {
    /// Table as received so far; consistent after each `Synced`.
    pub table: RouteTable,
    /// Version in force; 0 before the first `Synced` of a stream.
    pub version: u64,
    not_yet_named: Option<BTreeSet<RouteKey>>,
    changed: BTreeSet<RouteKey>,
    policy_pool: ScalePolicyPool,
}

impl RouteView {
    /// Begins a new stream: every subject not named before its first `Synced` will be removed.
    pub fn begin_stream(&mut self) {
        self.not_yet_named = Some(self.table.keys());
        self.version = 0;
    }

    /// Returns true if the current stream has named every subject.
    pub fn is_synced(&self) -> bool {
        self.version > 0
    }

    /// Applies one item. At `Synced`, which ends each batch, returns the keys changed since the last one.
    pub fn apply_item(&mut self, mut item: RouteItem) -> Option<BTreeSet<RouteKey>> {
        // Policies arrive as separate copies: ten thousand Revisions then share a handful.
        if let RouteChange::Revision(entry) = &mut item.change {
            entry.policy = entry.policy.take().map(|policy| self.policy_pool.intern(policy));
        }
        let synced = matches!(item.change, RouteChange::Synced);
        if synced {
            // The first `Synced` of a stream: what the new stream did not name was removed while this end was away.
            for key in self.not_yet_named.take().into_iter().flatten() {
                self.table.remove(&key);
                self.changed.insert(key);
            }
            self.version = item.version;
        } else {
            let key = self.table.apply_change(item.change);
            if let (Some(unnamed), Some(key)) = (&mut self.not_yet_named, &key) {
                unnamed.remove(key);
            }
            self.changed.extend(key);
        }
        synced.then(|| std::mem::take(&mut self.changed))
    }
}

// --- PodReport ------------------------------------------------------------------------------------------

/// One item of a PodReport stream. The first names the sender.
#[derive(Clone, Debug, PartialEq)]
pub enum PodReportItem {
    /// Replica that sends the stream.
    Sender(ComponentReplica),
    /// State of one pod on the sender's node.
    Observed(PodObservation),
    /// The pod, named by its uid, is no longer on this node.
    Removed(String),
    /// This version of the RouteTable is in force at the sender. Only the replica that serves that table uses it.
    Applied(u64),
    /// Drain acknowledgement: the sender opens no new connection to this draining pod. Every replica uses it.
    DrainAck(String),
    /// The sender may open new connections to the pod again, or the pod is no longer in the table.
    DrainAckRemoved(String),
    /// The sender, an activator, will name each service that it routes to some Revision. Every replica uses it.
    RoutedServicesAnnounced,
    /// The sender routes requests for this service to some Revision. Every replica uses it.
    RoutedService(NamespacedName),
    /// The sender no longer routes requests for this service to a Revision.
    RoutedServiceRemoved(NamespacedName),
    /// The sender has named every pod.
    Synced,
}

/// State of one pod, as the agent on its node observes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodObservation {
    /// Uid of the pod.
    pub uid: String,
    /// Address and port that the pod serves on, read from its own network namespace.
    pub address: Option<SocketAddr>,
    /// Address of the other family, if the pod serves there too.
    pub other_family_address: Option<IpAddr>,
    /// True if a process listens on the serving port.
    pub listening: bool,
    /// True if a process listens and the readiness probe passes.
    pub ready: bool,
    /// True if for at least 1 s nothing is in flight and no connection awaits its first request.
    pub drained: bool,
    /// Requests in flight, as the eBPF programs count them.
    pub in_flight: u64,
    /// Time at which the pod began to listen, CLOCK_MONOTONIC of its node in ns; 0: it does not listen.
    pub listening_since_ns: u64,
    /// Reason for not being ready, for the user; empty when there is no error.
    pub not_ready_reason: String,
}

#[cfg(test)]
mod tests;
