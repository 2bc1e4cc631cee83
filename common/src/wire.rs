//! Pure: the four messages between the parts, checked once on arrival.
//!
//! Each stream begins with every subject, each with its whole state, then `Synced`; subjects not named before
//! `Synced` are gone. Afterwards only changes travel, in batches that end with `Synced` again: a receiver acts
//! only there, so it never sees half a change. Versions compare within one stream; a new stream replaces
//! everything. Losing a message costs time, never correctness.
//!
//! [`raw`] is the protobuf as it travels; the types beside it have been checked and are what the parts use.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
    str::FromStr,
    string::ToString as _,
    sync::Arc,
    time::Duration,
};

use smol_str::SmolStr;

/// The protobuf messages and gRPC services, generated from `proto/rouse.proto`.
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

mod check;
mod settings;
mod slots;
mod sources;
mod usage;

pub use check::Refused;
pub use settings::{Edge, Level, Levels, RequestLog, Settings, is_upgrade, network};
pub use slots::{Claim, ClaimItem, Grant, GrantItem, Held};
pub use sources::{Block, Sources};
pub use usage::{
    Activity, Alive, Decision, Inputs, ScaleItem, Sight, Totals, UsageItem, UsageKey, UsageSeen,
};

/// `namespace/name` of an object.
///
/// Up to 23 bytes of either need no memory beside it, and a copy of a longer one shares it: a sleeping service has a dozen
/// copies of its names over all parts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name {
    /// Its namespace.
    pub namespace: SmolStr,
    /// Its name within the namespace.
    pub name: SmolStr,
}

impl Name {
    /// Called like no object.
    pub const EMPTY: Self =
        Self { namespace: SmolStr::new_static(""), name: SmolStr::new_static("") };

    /// A name from its two parts.
    pub fn new(namespace: impl Into<SmolStr>, name: impl Into<SmolStr>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.namespace, self.name)
    }
}

impl FromStr for Name {
    type Err = Refused;

    fn from_str(text: &str) -> Result<Self, Refused> {
        match text.split_once('/') {
            Some((namespace, name)) if is_label(namespace) && is_subdomain(name) => {
                Ok(Self::new(namespace, name))
            }
            _ => Err(Refused::new("name", text, "must be namespace/name")),
        }
    }
}

/// Whether `text` is a DNS-1123 label: 1 to 63 of `a-z`, `0-9` and inner `-`.
pub fn is_label(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=63).contains(&text.len())
        && text.bytes().all(inner)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

/// Whether `text` is a DNS-1123 subdomain: labels joined by `.`, at most 253 bytes.
pub fn is_subdomain(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_label)
}

/// Which part opened a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subscriber {
    /// What it is.
    pub role: Role,
    /// Its name, unique within the role.
    pub name: String,
    /// The node it runs on; empty where that does not matter.
    pub node: String,
}

/// What a subscriber is. The controller sends each role what it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Writes a node's kernel maps.
    Agent,
    /// Holds and forwards requests.
    Activator,
    /// Decides scale.
    Autoscaler,
}

// --- RouteTable -----------------------------------------------------------------------------------------

/// Everything the data plane follows, by subject. A receiver keeps it in a [`RouteView`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouteTable {
    /// Addressable names: routes and their tags.
    pub services: BTreeMap<Name, Service>,
    /// Revisions that some service names, or that still have pods.
    pub revisions: BTreeMap<Name, Revision>,
    /// Pods by uid.
    pub pods: BTreeMap<String, Pod>,
    /// Activators by name.
    pub activators: BTreeMap<String, Activator>,
    /// Replicas of parts that are found by the table. None where there is one of each.
    pub replicas: BTreeMap<Part, Replicas>,
    /// What holds for all services.
    pub settings: Settings,
}

/// One addressable name: a route, or a tag of one (`<tag>-<route>`).
#[derive(Clone, Debug, PartialEq)]
pub struct Service {
    /// Namespace and name.
    pub name: Name,
    /// ClusterIPs, at most one a family.
    pub addresses: Vec<IpAddr>,
    /// Port clients connect to.
    pub port: NonZeroU16,
    /// This service's own port at every activator.
    pub activator_port: NonZeroU16,
    /// Revisions and their shares; the percents add up to 100. Empty: nothing to route to yet, answer 503.
    pub targets: Vec<Target>,
    /// Whether new connections may go straight to pods.
    pub path: Path,
    /// Host names that reach it through the gateway, lower case, without port.
    pub hosts: Vec<String>,
    /// What a gateway does for it beyond `hosts`; few services have any, so the rest pay for one word.
    pub ingress: Option<Box<Ingress>>,
}

/// What a gateway does for a service beyond leading its hosts to it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ingress {
    /// Whether `hosts` answer http from outside with a redirection to https (`http-protocol: Redirected`).
    pub redirects: bool,
    /// Further hosts that reach it from outside: DomainMappings.
    pub domains: Vec<Domain>,
    /// Tag header routing (Knative's feature `tag-header-based-routing`); `None`: off. A header needs somebody who
    /// reads it, so such a service has [`Path::Activator`].
    pub tags: Option<TagRouting>,
}

/// One DomainMapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Domain {
    /// The host, lower case, without port.
    pub host: String,
    /// The host its pods are asked for; the client's then stands in `K-Original-Host`. `None`: as the client asked,
    /// which is what an app sees in the end where Knative's sidecar restores it.
    pub rewrite: Option<String>,
    /// Whether it answers http from outside with a redirection to https.
    pub redirects: bool,
}

/// What the header `Knative-Serving-Tag` does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TagRouting {
    /// The service is a route: the header chooses one of these, and whatever it does not name is default traffic.
    Choice(Vec<Tag>),
    /// The service is this tag of such a route; its pods are told so.
    Tag(String),
}

/// One tag of a route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tag {
    /// As it stands in the header.
    pub name: String,
    /// The tag's own service, which has its targets.
    pub service: Name,
}

/// One revision's share of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The revision.
    pub revision: Name,
    /// Its share in percent, 1 to 100.
    pub percent: u8,
}

/// Way of a new connection when pods are ready. Without a ready pod it always leads to the activator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// Straight to a pod.
    Direct,
    /// Through the activator.
    Activator,
}

/// What a pod of a revision promises, and what its requests may do.
#[derive(Clone, Debug, PartialEq)]
pub struct Revision {
    /// Namespace and name.
    pub name: Name,
    /// Owning Service's name; empty without one (`K_SERVICE`).
    pub service: SmolStr,
    /// Owning Configuration's name.
    pub configuration: SmolStr,
    /// Requests a pod may have at once; 0: no limit.
    pub container_concurrency: u32,
    /// Bound of a whole request (`timeoutSeconds`).
    pub timeout: Duration,
    /// Bound until the first response byte (`responseStartTimeoutSeconds`).
    pub response_start_timeout: Option<Duration>,
    /// Bound between response bytes (`idleTimeoutSeconds`).
    pub idle_timeout: Option<Duration>,
    /// What its pods speak.
    pub protocol: Protocol,
    /// How it scales; only sent to autoscalers. Most revisions share one, see [`Policies`].
    pub policy: Option<Arc<ScalePolicy>>,
    /// Whether a route leads to it; else it may shrink in one step and minimum scale does not hold.
    pub reachable: bool,
    /// Whether its initial scale was reached once.
    pub initial_scale_reached: bool,
    /// Who may ask its pods; `None`: everybody. Only sent to activators.
    pub sources: Option<Arc<Sources>>,
}

/// What a revision's pods speak on their serving port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1 (port name `http1` or none).
    Http1,
    /// HTTP/2 without TLS (port name `h2c`).
    H2c,
}

/// How a revision scales. Meaning, bounds and defaults: Knative `config-autoscaler` and `autoscaling.knative.dev/*`.
#[derive(Clone, Debug, PartialEq)]
pub struct ScalePolicy {
    /// What is averaged.
    pub metric: Metric,
    /// Load one pod can carry at most: requests at once, or requests a second. At least 0.01.
    pub total: f64,
    /// Share of `total` aimed at, 0 < u ≤ 1. Default 0.7.
    pub utilization: f64,
    /// Burst capacity to keep free; −1: always through the activator; 0 (shipped): never for lack of it.
    pub target_burst_capacity: f64,
    /// Requests at once one activator is trusted with. Default 100.
    pub activator_capacity: f64,
    /// Stable window. Default 60 s, 6 s to 1 h.
    pub stable_window: Duration,
    /// Panic window in percent of the stable one. Default 10.
    pub panic_window_percent: f64,
    /// Load, in percent of what ready pods carry, that starts panic. Default 200.
    pub panic_threshold_percent: f64,
    /// Most a decision may multiply ready pods by. Default 1000.
    pub max_scale_up_rate: f64,
    /// Most a decision may divide ready pods by. Default 2.
    pub max_scale_down_rate: f64,
    /// Fewest pods while reachable. Default 0.
    pub min_scale: u32,
    /// Most pods; 0: no limit.
    pub max_scale: u32,
    /// Pods a new revision starts with. Default 1.
    pub initial_scale: u32,
    /// Fewest pods while there is any load; 0 and 1: off.
    pub activation_scale: u32,
    /// How long a lower wish must hold before it counts. Default 0.
    pub scale_down_delay: Duration,
    /// Whether zero pods are allowed at all. Default true.
    pub scale_to_zero: bool,
    /// Least time on the activator path before the last pod goes. Default 30 s.
    pub grace: Duration,
    /// Least time the last pod stays after the load ended. Default 0.
    pub retention: Duration,
    /// How long a start may take before it is given up. Default 600 s.
    pub progress_deadline: Duration,
    /// How a window is averaged.
    pub aggregation: Aggregation,
}

/// Policies that are known, so that equal ones are kept once: ten thousand services use a handful.
#[derive(Clone, Debug, Default)]
pub struct Policies(Vec<Arc<ScalePolicy>>);

impl Policies {
    /// So many are compared with; beyond them each stands by itself.
    const KNOWN: usize = 64;

    /// The known policy equal to this one.
    pub fn share(&mut self, policy: Arc<ScalePolicy>) -> Arc<ScalePolicy> {
        if let Some(known) = self.0.iter().find(|known| **known == policy) {
            return Arc::clone(known);
        }
        if self.0.len() == Self::KNOWN {
            self.0.retain(|known| Arc::strong_count(known) > 1);
        }
        if self.0.len() < Self::KNOWN {
            self.0.push(Arc::clone(&policy));
        }
        policy
    }
}

impl Default for ScalePolicy {
    /// Knative's `config-autoscaler` as shipped (`config/core/configmaps/autoscaler.yaml` at 98e5ef9), but for the
    /// burst capacity: 0 instead of 211, so that small services may go direct.
    fn default() -> Self {
        Self {
            metric: Metric::Concurrency,
            total: 100.0,
            utilization: 0.7,
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
            grace: Duration::from_secs(30),
            retention: Duration::ZERO,
            progress_deadline: Duration::from_secs(600),
            aggregation: Aggregation::Linear,
        }
    }
}

/// What the autoscaler averages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// Requests at once.
    Concurrency,
    /// Requests a second.
    Rps,
}

/// How a window is averaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aggregation {
    /// Every second weighs the same.
    Linear,
    /// Newer seconds weigh more.
    WeightedExponential,
}

/// One pod of a revision.
#[derive(Clone, Debug, PartialEq)]
pub struct Pod {
    /// Unique for ever.
    pub uid: String,
    /// Name within the namespace.
    pub name: String,
    /// The revision it serves.
    pub revision: Name,
    /// The node it runs on.
    pub node: String,
    /// That node's zone; empty when unknown.
    pub zone: String,
    /// Where it stands for routing.
    pub phase: PodPhase,
    /// Where it serves; unknown until its network exists.
    pub address: Option<SocketAddr>,
    /// Its address of the other family, where it has one and serves there too, at the same port.
    pub also: Option<IpAddr>,
    /// Whether the kubelet calls it ready: other nodes need not try whether they reach it.
    pub confirmed: bool,
    /// Its serving port (`PORT`).
    pub port: NonZeroU16,
    /// How the agent on its node tells that it is ready.
    pub probe: Probe,
}

/// Where a pod stands for routing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodPhase {
    /// Not ready yet.
    Starting,
    /// Takes requests.
    Ready,
    /// Takes no new requests and leaves once it has none.
    Draining,
}

/// How a pod's readiness is told. Times are Kubernetes' probe fields.
#[derive(Clone, Debug, PartialEq)]
pub struct Probe {
    /// What is asked.
    pub how: ProbeHow,
    /// Where; `None`: the serving port.
    pub port: Option<NonZeroU16>,
    /// Between two tries; zero: as fast as sensible (Knative's aggressive probe).
    pub period: Duration,
    /// Bound of one try; zero: 1 s.
    pub timeout: Duration,
    /// Successes in a row that make it ready, at least 1.
    pub success_threshold: u32,
    /// Failures in a row that make it unready again, at least 1.
    pub failure_threshold: u32,
}

impl Probe {
    /// Ready when its process listens: what holds where nothing is said.
    pub fn listens() -> Self {
        Self {
            how: ProbeHow::Listen,
            port: None,
            period: Duration::ZERO,
            timeout: Duration::ZERO,
            success_threshold: 1,
            failure_threshold: 1,
        }
    }
}

/// What a readiness probe asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProbeHow {
    /// Nothing: it is ready when its process listens. The default TCP probe is this.
    Listen,
    /// A TCP connect.
    Tcp,
    /// An HTTP GET answered 200 to 399.
    Http {
        /// Path and query.
        path: String,
        /// Extra headers.
        headers: Vec<(String, String)>,
        /// Host to ask for; empty: the pod's address.
        host: String,
        /// Over TLS, without checking the certificate.
        https: bool,
    },
    /// `grpc.health.v1.Health/Check` answered SERVING.
    Grpc {
        /// The service asked about; empty: the server as a whole.
        service: String,
    },
}

/// One activator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Activator {
    /// Unique name.
    pub name: String,
    /// The node it runs on.
    pub node: String,
    /// That node's zone; empty when unknown.
    pub zone: String,
    /// Where it listens on every service's activator port, at most one a family.
    pub addresses: Vec<IpAddr>,
}

/// A part that other parts open streams to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// Serves routes, takes reports and decisions.
    Controller,
    /// Takes usage.
    Autoscaler,
}

/// Every replica of a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replicas {
    /// The part.
    pub part: Part,
    /// Where each takes streams.
    pub members: Vec<Replica>,
    /// Name of the one that counts; `None`: none yet. Of autoscalers: the one whose decisions are carried out.
    pub chosen: Option<String>,
}

/// One replica of a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replica {
    /// Its name, as in [`Subscriber`].
    pub name: String,
    /// Where it takes streams.
    pub address: SocketAddr,
}

/// One step of a RouteTable stream.
#[derive(Clone, Debug, PartialEq)]
pub struct RouteItem {
    /// Grows with each change within a stream; reported back once it is in force.
    pub version: u64,
    /// What changed.
    pub change: RouteChange,
}

/// What one step of a RouteTable stream says.
#[derive(Clone, Debug, PartialEq)]
pub enum RouteChange {
    /// A service's whole state.
    Service(Service),
    /// A revision's whole state.
    Revision(Revision),
    /// A pod's whole state. Boxed: services and revisions are many and smaller.
    Pod(Box<Pod>),
    /// An activator's whole state.
    Activator(Activator),
    /// A part's replicas. Links follow them; their users need not.
    Replicas(Replicas),
    /// What holds for all services.
    Settings(Settings),
    /// The subject is no more.
    Gone(RouteKey),
    /// The end of a batch: everything up to this version has been said.
    Synced,
}

/// Names one subject of a RouteTable.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RouteKey {
    /// A service.
    Service(Name),
    /// A revision.
    Revision(Name),
    /// A pod, by uid.
    Pod(String),
    /// An activator, by name.
    Activator(String),
    /// The replicas of a part.
    Replicas(Part),
    /// What holds for all services.
    Settings,
}

impl RouteChange {
    /// The subject it concerns; `None` for `Synced`.
    pub fn key(&self) -> Option<RouteKey> {
        match self {
            Self::Service(it) => Some(RouteKey::Service(it.name.clone())),
            Self::Revision(it) => Some(RouteKey::Revision(it.name.clone())),
            Self::Pod(it) => Some(RouteKey::Pod(it.uid.clone())),
            Self::Activator(it) => Some(RouteKey::Activator(it.name.clone())),
            Self::Replicas(it) => Some(RouteKey::Replicas(it.part)),
            Self::Settings(_) => Some(RouteKey::Settings),
            Self::Gone(key) => Some(key.clone()),
            Self::Synced => None,
        }
    }
}

impl RouteTable {
    /// Whole states of all subjects.
    pub fn states(&self) -> impl Iterator<Item = RouteChange> {
        let services = self.services.values().cloned().map(RouteChange::Service);
        let revisions = self.revisions.values().cloned().map(RouteChange::Revision);
        let pods = self.pods.values().cloned().map(|it| RouteChange::Pod(it.into()));
        let activators = self.activators.values().cloned().map(RouteChange::Activator);
        let replicas = self.replicas.values().cloned().map(RouteChange::Replicas);
        let settings = self.settings.said().map(RouteChange::Settings);
        let first = settings.into_iter().chain(replicas).chain(activators);
        first.chain(revisions).chain(pods).chain(services)
    }

    /// The steps that turn `self` into `next`: states first, then ends.
    pub fn changes(&self, next: &Self) -> Vec<RouteChange> {
        let mut out = Vec::new();
        if self.settings != next.settings {
            out.extend(next.settings.said().map(RouteChange::Settings));
        }
        changed(&self.replicas, &next.replicas, |v| out.push(RouteChange::Replicas(v)));
        changed(&self.activators, &next.activators, |v| out.push(RouteChange::Activator(v)));
        changed(&self.revisions, &next.revisions, |v| out.push(RouteChange::Revision(v)));
        changed(&self.pods, &next.pods, |v| out.push(RouteChange::Pod(v.into())));
        changed(&self.services, &next.services, |v| out.push(RouteChange::Service(v)));
        let gone = self.keys().into_iter().filter(|key| !next.contains(key));
        out.extend(gone.map(RouteChange::Gone));
        out
    }

    /// Every subject's key.
    pub fn keys(&self) -> BTreeSet<RouteKey> {
        let services = self.services.keys().cloned().map(RouteKey::Service);
        let revisions = self.revisions.keys().cloned().map(RouteKey::Revision);
        let pods = self.pods.keys().cloned().map(RouteKey::Pod);
        let activators = self.activators.keys().cloned().map(RouteKey::Activator);
        let replicas = self.replicas.keys().copied().map(RouteKey::Replicas);
        let settings = self.settings.said().map(|_| RouteKey::Settings);
        let named = services.chain(revisions).chain(pods).chain(activators).chain(replicas);
        named.chain(settings).collect()
    }

    fn contains(&self, key: &RouteKey) -> bool {
        match key {
            RouteKey::Service(name) => self.services.contains_key(name),
            RouteKey::Revision(name) => self.revisions.contains_key(name),
            RouteKey::Pod(uid) => self.pods.contains_key(uid),
            RouteKey::Activator(name) => self.activators.contains_key(name),
            RouteKey::Replicas(part) => self.replicas.contains_key(part),
            RouteKey::Settings => self.settings.said().is_some(),
        }
    }

    /// Takes in one change and says whose it was. `Synced` changes nothing.
    fn set(&mut self, change: RouteChange) -> Option<RouteKey> {
        let key = change.key()?;
        match change {
            RouteChange::Service(it) => drop(self.services.insert(it.name.clone(), it)),
            RouteChange::Revision(it) => drop(self.revisions.insert(it.name.clone(), it)),
            RouteChange::Pod(it) => drop(self.pods.insert(it.uid.clone(), *it)),
            RouteChange::Activator(it) => drop(self.activators.insert(it.name.clone(), it)),
            RouteChange::Replicas(it) => drop(self.replicas.insert(it.part, it)),
            RouteChange::Settings(it) => self.settings = it,
            RouteChange::Gone(_) => self.remove(&key),
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
            RouteKey::Settings => self.settings = Settings::default(),
        }
    }
}

/// Calls `each` for every value of `next` that `now` lacks or has otherwise.
fn changed<K: Ord, V: Clone + PartialEq>(
    now: &BTreeMap<K, V>,
    next: &BTreeMap<K, V>,
    each: impl FnMut(V),
) {
    let new = next.iter().filter(|(key, value)| now.get(key) != Some(value));
    new.map(|(_, value)| value.clone()).for_each(each);
}

/// A receiver's copy of the RouteTable, kept over broken streams.
///
/// Call [`restart`](Self::restart) when a stream opens and [`absorb`](Self::absorb) for each item. The table is
/// whole, and may be acted on, only when `absorb` has returned something.
#[derive(Clone, Debug, Default)]
pub struct RouteView {
    /// The table.
    pub table: RouteTable,
    /// Version in force; 0 before the first `Synced` of a stream.
    pub version: u64,
    unnamed: Option<BTreeSet<RouteKey>>,
    changed: BTreeSet<RouteKey>,
    policies: Policies,
}

impl RouteView {
    /// A new stream has opened: everything not named before its first `Synced` will go.
    pub fn restart(&mut self) {
        self.unnamed = Some(self.table.keys());
        self.version = 0;
    }

    /// Whether the current stream has named every subject.
    pub fn is_synced(&self) -> bool {
        self.version > 0
    }

    /// Takes in one item. At `Synced`, which ends each batch, returns the subjects touched since the last one.
    pub fn absorb(&mut self, mut item: RouteItem) -> Option<BTreeSet<RouteKey>> {
        if let RouteChange::Revision(it) = &mut item.change {
            it.policy = it.policy.take().map(|policy| self.policies.share(policy));
        }
        let synced = matches!(item.change, RouteChange::Synced);
        if synced {
            for key in self.unnamed.take().into_iter().flatten() {
                self.table.remove(&key);
                self.changed.insert(key);
            }
            self.version = item.version;
        } else {
            let key = self.table.set(item.change);
            if let (Some(unnamed), Some(key)) = (&mut self.unnamed, &key) {
                unnamed.remove(key);
            }
            self.changed.extend(key);
        }
        synced.then(|| std::mem::take(&mut self.changed))
    }
}

// --- PodReport ------------------------------------------------------------------------------------------

/// One step of a PodReport stream. The first names the sender.
#[derive(Clone, Debug, PartialEq)]
pub enum PodItem {
    /// Who reports.
    Sender(Subscriber),
    /// What is seen of a pod.
    Seen(PodSeen),
    /// The pod is not on this node any more.
    Gone(String),
    /// This version of the RouteTable is in force at the sender. Speaks to the replica that serves it.
    Applied(u64),
    /// No new connection of the sender's goes to this draining pod. Speaks to every replica.
    Avoided(String),
    /// New connections may go to it again, or it is in the table no more.
    AvoidedNoMore(String),
    /// The sender, an activator, names each service that it leads to some revision. Speaks to every replica.
    NamesRouted,
    /// It leads requests for this service to some revision. Speaks to every replica.
    Routed(Name),
    /// It does so no more.
    RoutedNoMore(Name),
    /// Every pod has been named.
    Synced,
}

/// What an agent sees of one pod on its node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodSeen {
    /// The pod.
    pub uid: String,
    /// Where it serves, read from its own network namespace.
    pub address: Option<SocketAddr>,
    /// Its address of the other family, where it serves too.
    pub also: Option<IpAddr>,
    /// Whether a process listens on the serving port.
    pub listening: bool,
    /// Whether it listens and its probe passes.
    pub ready: bool,
    /// Whether nothing is in flight and no connection awaits its first request, for 1 s by now.
    pub drained: bool,
    /// Requests in flight, by the kernel's count.
    pub in_flight: u64,
    /// When it began to listen, CLOCK_MONOTONIC of its node in ns; 0: not listening.
    pub listening_since_ns: u64,
    /// Why it is not ready, for people; empty when nothing is wrong.
    pub trouble: String,
}

#[cfg(test)]
mod tests;
