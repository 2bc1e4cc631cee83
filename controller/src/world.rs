//! Pure: everything observed at one moment, small enough for ten thousand sleeping services.
//!
//! One [`App`] is a Service with all that the controller made of it: Configuration, Route, Revisions and their pods.
//! A Service depends on no other, so one change requires a new plan of one app only. A Route without a Service may name
//! Revisions of other apps; [`World::referrers`] lists these Routes.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use common::{
    abi::ACTIVATOR_PORTS,
    node::PodStatus,
    wire::{Activator, Activity, Name, Part, Path, PodSeen, Replicas, Role},
};
use k8s_openapi::jiff;
use smol_str::SmolStr;

use crate::{
    bind, children,
    config_maps::Configs,
    followers::{self, Followers},
    network_policies::NetworkPolicies,
    observe::Standing,
    plan::Templates,
    policy::AutoscalerConfig,
    rollout::Rollout,
};

mod conditions;
mod domains;
pub mod names;
mod slices;

pub use conditions::{Conditions, Kind, Truth, Why};
pub use domains::{Claim, Mapping};
pub use names::Names;
pub use slices::Slices;

/// A moment, in milliseconds since 1970. The clock that the shell passes never runs backwards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stamp(pub u64);

impl Stamp {
    /// Returns the moment `later` milliseconds after this one.
    pub fn plus_ms(self, later: u64) -> Self {
        Self(self.0.saturating_add(later))
    }

    /// Formats the moment as Kubernetes writes times: RFC 3339, whole seconds.
    pub fn rfc3339(self) -> String {
        let seconds = i64::try_from(self.0 / 1000).unwrap_or_default();
        jiff::Timestamp::from_second(seconds).map(|time| time.to_string()).unwrap_or_default()
    }

    /// Parses the text that [`rfc3339`](Self::rfc3339) writes; `None` for any other text.
    pub fn parse(text: &str) -> Option<Self> {
        let time: jiff::Timestamp = text.parse().ok()?;
        u64::try_from(time.as_millisecond()).ok().map(Self)
    }
}

/// A UUID, kept as a number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Uid(pub u128);

impl Uid {
    /// Derives a UID from `seed` and `parts`: equal parts give equal UIDs, different parts different ones.
    pub fn derive(seed: u128, parts: &[&str]) -> Self {
        // FNV-1a, 128 bit. The seed is random for each start, so that UIDs are unique forever.
        const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013B;
        // The offset basis of FNV-1a, in which the seed takes part.
        let mut hash = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128 ^ seed;
        // The zero byte separates parts: without it `["ab", "c"]` and `["a", "bc"]` would share a UID.
        for byte in parts.iter().flat_map(|part| part.bytes().chain([0])) {
            hash = (hash ^ u128::from(byte)).wrapping_mul(PRIME);
        }
        // FNV mixes the last bytes into the low bits only; this spreads them over the whole number.
        hash ^= hash >> 61;
        hash = hash.wrapping_mul(PRIME) ^ (hash >> 67);
        // Version 4, variant 1: the bits that every reader of UUIDs expects.
        hash &= !(0xf000 << 64 | 0xc000 << 48);
        Self(hash | 0x4000 << 64 | 0x8000 << 48)
    }

    /// Parses the text that `to_string` writes; `None` for any other text.
    pub fn parse(text: &str) -> Option<Self> {
        u128::from_str_radix(&text.replace('-', ""), 16).ok().map(Self)
    }
}

impl std::fmt::Display for Uid {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let hex = format!("{:032x}", self.0);
        let (a, b, c, d, e) = (&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]);
        write!(out, "{a}-{b}-{c}-{d}-{e}")
    }
}

/// Labels or annotations, sorted by key. For the usual two or three it takes a fifth of the memory of a `BTreeMap`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pairs(Box<[(Box<str>, Box<str>)]>);

impl Pairs {
    /// Returns the value of `key`, if it is set.
    pub fn get(&self, key: &str) -> Option<&str> {
        let found = self.0.iter().find(|(have, _)| **have == *key);
        found.map(|(_, value)| &**value)
    }

    /// Iterates over all pairs, in order of their keys.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(key, value)| (&**key, &**value))
    }

    /// Converts the pairs to the map that Kubernetes types hold.
    pub fn to_map(&self) -> BTreeMap<String, String> {
        self.iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
    }
}

impl From<&BTreeMap<String, String>> for Pairs {
    fn from(map: &BTreeMap<String, String>) -> Self {
        Self(map.iter().map(|(key, value)| (key.as_str().into(), value.as_str().into())).collect())
    }
}

/// Metadata that every object has beside its name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Meta {
    /// UID of the object, unique forever.
    pub uid: Uid,
    /// Number that grows with each change of the spec (`metadata.generation`).
    pub generation: u32,
    /// Creation time of the object (`metadata.creationTimestamp`).
    pub created: Stamp,
}

/// A checked manifest of a Service.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Manifest {
    /// Labels of the Service.
    pub labels: Pairs,
    /// Annotations of the Service.
    pub annotations: Pairs,
    /// Name for the Revision as the user chose it (`spec.template.metadata.name`).
    pub revision: Option<Box<str>>,
    /// Template with defaults, as JSON. Service, Configuration and newest Revision share the text.
    pub template: Arc<str>,
    /// Traffic targets with defaults; their percents add up to 100. The Route shares them.
    pub traffic: Arc<[Traffic]>,
}

/// One traffic target as the user wants it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Tag of the target, which is then also reachable as `<tag>-<route>`.
    pub tag: Option<Box<str>>,
    /// Name of a Revision; `None`: the latest ready one of the Configuration.
    pub revision: Option<Box<str>>,
    /// Name of the Configuration; `None`: the Configuration of the Route's own name.
    pub configuration: Option<Box<str>>,
    /// Share of the requests, in percent.
    pub percent: u8,
}

/// All objects of one name in a namespace: a Service with its child objects, or a Configuration or Route alone.
///
/// An object with the UID 0 is desired and does not exist yet.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct App {
    /// The Service, unless the Configuration or Route exists alone.
    pub service: Option<Service>,
    /// The Configuration, once there is one.
    pub configuration: Option<Configuration>,
    /// The Route, once there is one.
    pub route: Option<Route>,
    /// Revisions of the Configuration, oldest first.
    pub revisions: Vec<Revision>,
    /// Conditions of Service, Configuration and Route.
    pub conditions: Conditions,
}

/// A Service as the controller knows it: the manifest in force and the object's state.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Service {
    /// Metadata of the Service object.
    pub meta: Meta,
    /// The last manifest that passed all checks; it is in force.
    pub manifest: Manifest,
    /// The broken rules of the newest manifest, in one line; `None` while the newest manifest is in force.
    pub refused: Option<Box<str>>,
    /// True once the Service is being deleted. On the local node users no longer see it, and it ends when its pods have
    /// drained.
    pub leaving: bool,
}

/// Owner of a Configuration or Route: the controller in its owner references.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Owner {
    /// The Service of the same name; its manifest is the source of the object's labels and annotations.
    #[default]
    Service,
    /// No owner: a user created the object.
    Nobody,
    /// Another controller, or a Service of another name.
    Other,
}

/// A Configuration: the newest template, which makes Revisions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Configuration {
    /// Metadata of the Configuration object.
    pub meta: Meta,
    /// Owner of the Configuration: its Service, or none.
    pub owner: Owner,
    /// Name for the template's Revision as the user chose it.
    pub revision: Option<Box<str>>,
    /// Template with defaults, as JSON.
    pub template: Arc<str>,
    /// User that last changed the Configuration, and so created the Revision of its template.
    pub modifier: Option<Box<str>>,
    /// Name of the newest Revision that has ever been ready.
    pub latest_ready: Option<Box<str>>,
    /// Hash of the desired object last applied, where a Service of Kubernetes owns the Configuration.
    pub applied: Option<u64>,
    /// True once the Configuration is being deleted: the controller makes nothing for it any more.
    pub leaving: bool,
}

/// A Route: a name, and the Revisions that share its requests.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Route {
    /// Metadata of the Route object.
    pub meta: Meta,
    /// Owner of the Route: its Service, or none.
    pub owner: Owner,
    /// Labels of the Route, kept only where no Service owns it.
    pub labels: Pairs,
    /// Annotations of the Route, kept only where no Service owns it.
    pub annotations: Pairs,
    /// Traffic targets as wanted, with defaults.
    pub wanted: Arc<[Traffic]>,
    /// Allocations of the Route's own name and of its tags.
    pub allotted: Vec<Allotment>,
    /// Traffic targets in force: the Revisions that get the requests now.
    pub traffic: Vec<Assigned>,
    /// State of a gradual rollout, while one lasts.
    pub rollout: Option<Box<Rollout>>,
    /// Reason why one of the Route's names is not available to it.
    pub blocked: Option<Box<Why>>,
    /// Hash of the desired object last applied, where a Service of Kubernetes owns the Route.
    pub applied: Option<u64>,
    /// True once the Route is being deleted: the controller makes nothing for it any more.
    pub leaving: bool,
}

impl Route {
    /// Iterates over the Route's tags: wanted ones, and those that still hold an allocation.
    pub fn tags(&self) -> impl Iterator<Item = &str> {
        // A removed tag holds its name until its allocation is released.
        let wanted = self.wanted.iter().filter_map(|it| it.tag.as_deref());
        wanted.chain(self.allotted.iter().filter_map(|it| it.tag.as_deref()))
    }
}

/// Allocation of one name of a Route: the ClusterIPs and the port that it holds until it is deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allotment {
    /// Tag whose name holds the allocation; `None`: the Route's own name.
    pub tag: Option<Box<str>>,
    /// ClusterIPs of the name, or the number they are computed from.
    pub addresses: Addresses,
    /// Port at the activators that identifies the name.
    pub port: u16,
}

/// State of a placeholder, the Kubernetes Service that reserves a name of a Route.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placeholder {
    /// ClusterIPs of the placeholder, IPv4 first.
    pub addresses: Box<[IpAddr]>,
    /// Port of the name at the activators, once one is allocated.
    pub port: Option<u16>,
    /// True if the visibility label keeps the name inside the cluster.
    pub hidden: bool,
    /// UID of the Route that owns the placeholder; 0 where none does.
    pub owner: Uid,
    /// Creation time of the placeholder, by which the order of claims to its name is decided.
    pub created: Stamp,
}

/// Source of the ClusterIPs of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Addresses {
    /// Last 16 bits of ClusterIPs from the local node's range, allocated by this controller.
    Host(u16),
    /// ClusterIPs that the API server allocated; empty while there are none.
    Given(Box<[IpAddr]>),
}

/// One traffic target in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assigned {
    /// Tag of the target, which is then also reachable as `<tag>-<route>`.
    pub tag: Option<Box<str>>,
    /// Name of the Revision that gets the requests.
    pub revision: Box<str>,
    /// True if the target follows the latest ready Revision.
    pub latest: bool,
    /// Share of the requests, in percent.
    pub percent: u8,
}

/// Routing state of a Revision, `serving.knative.dev/routingState` (knative/serving `pkg/reconciler/labeler`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Routing {
    /// The controller has not compared the Revision with Routes yet.
    #[default]
    Pending,
    /// At least one Route names the Revision.
    Active,
    /// No Route names the Revision.
    Reserve,
}

/// A Revision as the controller knows it, with its pods.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Revision {
    /// Name of the Revision, without its namespace.
    pub name: Box<str>,
    /// Metadata with the Revision's own UID; `generation` is that of the Configuration when it made the Revision.
    pub meta: Meta,
    /// Template of the Revision, as JSON.
    pub template: Arc<str>,
    /// Creator of the Revision: the user that had changed its Configuration last.
    pub creator: Option<Box<str>>,
    /// Routing state, and the moment of its last change.
    pub routing: (Routing, Stamp),
    /// True once the Revision has reached its initial scale.
    pub reached: bool,
    /// Start of the wait for the initial scale, by this controller's clock, since the API server's may differ; 0: not
    /// yet.
    pub met: Stamp,
    /// Reason why the pods do not become ready; kept until one does.
    pub failure: Option<Box<Why>>,
    /// Reason why Kubernetes makes no pods for the Revision.
    pub blocked: Option<Box<Why>>,
    /// The scale decision in force, once there is one.
    pub decided: Option<Decided>,
    /// Pods wanted by the latest plan. Before a leader's first plan: the pods that ran when it became leader.
    pub desired: u32,
    /// Number of pods ready at the latest plan.
    pub actual: u32,
    /// Number of pods ever made for the Revision.
    pub made: u32,
    /// Earliest moment for another pod, after the last one vanished at once.
    pub retry_at: Stamp,
    /// Image digests by container name, once known.
    pub digests: Box<[(Box<str>, Box<str>)]>,
    /// Pods of the Revision, including those that drain.
    pub pods: Vec<Pod>,
    /// Conditions of the Revision's status.
    pub conditions: Conditions,
    /// True once the Revision is being deleted: the controller makes nothing for it any more, and its pods drain.
    pub leaving: bool,
    /// True once the object is deleted while pods still answer their last requests.
    pub gone: bool,
    /// True if no Configuration owns the Revision: a user deleted that with `--cascade=orphan`. The Revision still
    /// serves and scales.
    pub is_orphan: bool,
}

impl Revision {
    /// Counts the pods that serve, or will once they are ready.
    pub fn serving(&self) -> u32 {
        let serving = self.pods.iter().filter(|pod| pod.stage == Stage::Serving).count();
        u32::try_from(serving).unwrap_or(u32::MAX)
    }

    /// Returns true if there are pods, none is ready, and a condition has failed. The Revision then scales as if no
    /// Route named it, so that no minimum scale keeps pods crashing forever (knative/serving
    /// `pkg/reconciler/revision/resources/pa.go`).
    pub fn is_stuck(&self) -> bool {
        let failed = |kind| matches!(self.conditions.get(kind), Truth::False(_));
        let has_failed = failed(Kind::RevisionResources) || failed(Kind::RevisionHealthy);
        // Only facts that every replica has: the number of desired pods is known to the leader alone.
        has_failed && self.actual == 0 && self.serving() > 0
    }
}

/// The part of a [`Decision`](common::wire::Decision) that is in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decided {
    /// Pods requested; `None`: the present number is kept.
    pub wanted: Option<u32>,
    /// Path of new connections: direct, or by an activator.
    pub path: Path,
    /// Activity of the Revision, shown in its `Active` condition.
    pub activity: Activity,
}

/// One pod of a Revision.
#[derive(Clone, Debug, PartialEq)]
pub struct Pod {
    /// UID of the pod, unique forever.
    pub uid: Box<str>,
    /// Name of the pod, in the form `<revision>-deployment-<5 characters>`.
    pub name: Box<str>,
    /// Creation time of the pod. On Kubernetes it is by the API server's clock, which may differ from the controller's.
    pub created: Stamp,
    /// Moment at which this controller first observed the pod, by its own clock; zero: not yet.
    pub met: Stamp,
    /// True once the pod has been ready.
    pub was_ready: bool,
    /// Start of the current uninterrupted readiness, and the containers' restart count at that moment.
    pub steady: Option<(Stamp, u32)>,
    /// Stage of the pod: serving, draining or stopping.
    pub stage: Stage,
    /// Address at which the pod served before this controller started, until its agent reports.
    pub remembered: Option<SocketAddr>,
    /// State of the pod on Kubernetes; `None` on the local node.
    pub placed: Option<Box<Placed>>,
}

impl Pod {
    /// Returns true if the pod object has a deletion timestamp on Kubernetes.
    pub fn is_deleted(&self) -> bool {
        self.placed.as_ref().is_some_and(|it| it.deleted)
    }
}

/// State of a pod as Kubernetes reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placed {
    /// Node that the pod runs on; empty before it was scheduled.
    pub node: Box<str>,
    /// Readiness of the pod as the kubelet reports it.
    pub kubelet: Kubelet,
    /// True once the pod has a deletion timestamp.
    pub deleted: bool,
    /// Start of draining, as the leader noted it on the pod.
    pub draining: Option<Stamp>,
    /// Reason why the scheduler finds no node for the pod.
    pub unschedulable: Option<Why>,
}

/// Readiness of a pod as the kubelet reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kubelet {
    /// The kubelet has reported nothing yet, or the pod has not been ready yet.
    #[default]
    Waits,
    /// The pod is ready now.
    Ready,
    /// The pod was ready and is no longer.
    Lost,
}

/// Stage of a pod's life, from serving to stopping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The pod serves, or will once it is ready.
    Serving,
    /// The pod gets no new connections and waits for its last request to end.
    Draining {
        /// Moment at which draining began.
        since: Stamp,
    },
    /// The pod was ordered to stop.
    Stopping {
        /// Moment of the order to stop.
        since: Stamp,
    },
}

/// Platform that makes objects and pods from plans.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Platform {
    /// The controller itself, at once; a local node starts the pods.
    #[default]
    Local,
    /// The API server: a planned object exists once a watch reports it.
    Kubernetes,
}

/// Settings that hold for all apps.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Platform that makes objects and pods.
    pub platform: Platform,
    /// Namespace of Rouse's own components.
    pub namespace: String,
    /// Name of this controller's own pod.
    pub pod: String,
    /// Settings of Deployments, chosen by operators.
    pub children: children::Config,
    /// Domain of external URLs: `http://NAME.NAMESPACE.DOMAIN`.
    pub domain: String,
    /// Domain of cluster-local names: `NAME.NAMESPACE.svc.CLUSTER_DOMAIN`.
    pub cluster_domain: String,
    /// Name of the local node.
    pub node: String,
    /// Identifier of this boot of the machine.
    pub boot: String,
    /// Checked settings of the ConfigMaps in force.
    pub configs: Configs,
    /// Checked settings of Knative's `config-autoscaler`.
    pub autoscaler: AutoscalerConfig,
    /// First 16 bits of IPv4 ClusterIPs; the last 16 are allocated.
    pub cluster_v4: [u8; 2],
    /// First 112 bits of IPv6 ClusterIPs; the last 16 are allocated.
    pub cluster_v6: [u16; 7],
    /// First and last port for names at the activators.
    pub activator_ports: (u16, u16),
    /// Activators of the local node.
    pub activators: Vec<Activator>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            platform: Platform::Local,
            namespace: "knative-serving".into(),
            pod: String::new(),
            children: children::Config::default(),
            domain: "localhost".into(),
            cluster_domain: "cluster.local".into(),
            node: "rouse".into(),
            boot: String::new(),
            configs: Configs::default(),
            autoscaler: AutoscalerConfig::default(),
            cluster_v4: [10, 96],
            cluster_v6: [0xfd00, 0x10, 0x96, 0, 0, 0, 0],
            activator_ports: ACTIVATOR_PORTS.into(),
            activators: Vec::new(),
        }
    }
}

impl Settings {
    /// Returns the ClusterIPs of a name, IPv4 first.
    pub fn addresses(&self, of: &Addresses) -> Vec<IpAddr> {
        // Both families share the number, so one allocation reserves both addresses.
        let host = match of {
            Addresses::Host(host) => *host,
            Addresses::Given(addresses) => return addresses.to_vec(),
        };
        let ([a, b], [c, d]) = (self.cluster_v4, host.to_be_bytes());
        let [s, t, u, v, w, x, y] = self.cluster_v6;
        vec![IpAddr::from([a, b, c, d]), IpAddr::from([s, t, u, v, w, x, y, host])]
    }
}

/// Everything the controller has observed, as of one moment.
#[derive(Clone, Debug)]
pub struct World {
    /// Settings that hold for all apps; one change replaces them as a whole.
    pub settings: Arc<Settings>,
    /// Number drawn at random for each start, which makes UIDs unique.
    pub seed: u128,
    /// Apps by name: Services with all their child objects.
    ///
    /// Boxed, since there are many, and half of a tree's slots are empty.
    pub apps: BTreeMap<Name, Box<App>>,
    /// Latest reports of agents about pods, by UID.
    pub seen: HashMap<String, PodSeen>,
    /// Status of each pod of the local node, by UID.
    pub statuses: HashMap<String, PodStatus>,
    /// Drain acknowledgements of agents and activators, by role and name.
    pub followers: Followers,
    /// Replicas of the components that others open streams to.
    pub replicas: BTreeMap<Part, Replicas>,
    /// Facts read from the Revisions' templates.
    pub templates: Templates,
    /// Last 16 bits of ClusterIPs that are allocated.
    pub hosts: BTreeSet<u16>,
    /// Activator ports that are allocated.
    pub ports: BTreeSet<u16>,
    /// Apps with a name for which no number was free. They get one as soon as another app releases its own.
    pub short: BTreeSet<Name>,
    /// State of placeholders, by name: the Services that reserve names of Routes.
    pub placeholders: BTreeMap<Name, Placeholder>,
    /// Activators' pods by name, with their readiness as the kubelet reports it; readers use [`World::standing`].
    pub activators: BTreeMap<String, (Activator, Standing)>,
    /// Activators that EndpointSlices of Routes' names list.
    pub slices: Slices,
    /// DomainMappings by name, which is also their domain.
    pub mappings: BTreeMap<Name, Mapping>,
    /// DomainMappings by the name that they map their domain to.
    pub mapped: BTreeMap<Name, BTreeSet<Name>>,
    /// ClusterDomainClaims, by the domain that each reserves.
    pub claims: BTreeMap<String, Claim>,
    /// Zone of each node that has one, by node name.
    pub zones: BTreeMap<String, String>,
    /// Ingress policies, which decide the clients whose requests may wait.
    pub network_policies: NetworkPolicies,
    /// Namespaces that are being deleted: the controller writes nothing there any more.
    pub going: BTreeSet<SmolStr>,
    /// State of each node that decisions depend on, by name.
    pub nodes: BTreeMap<String, bind::Node>,
    /// True if this replica carries out its plans. On Kubernetes one replica is the leader; the others only watch.
    pub leads: bool,
    /// Routes that name Revisions of another app, by the name of that app.
    pub referrers: BTreeMap<Name, BTreeSet<Name>>,
    /// Owner of each name of Routes and DomainMappings.
    pub names: Names,
    /// Pairs of an object's name and its app, for names that do not begin with the app's since they were cut or chosen.
    pub odd: BTreeSet<(Name, Name)>,
    /// Last decision on each Revision that is awake, with the figures behind it, in one line.
    pub decisions: BTreeMap<Name, Box<str>>,
    /// Replicas set in Deployments of Revisions that Kubernetes scales, by Revision.
    pub told: BTreeMap<Name, u32>,
    /// UIDs of PodAutoscalers of the class that requires a HorizontalPodAutoscaler, by name.
    pub autoscalers: BTreeMap<Name, Box<str>>,
}

impl App {
    /// Returns true if the app's Service is being deleted.
    pub fn leaving(&self) -> bool {
        self.service.as_ref().is_some_and(|it| it.leaving)
    }

    /// Returns true if all child objects end with the Service. On Kubernetes each object is deleted on its own: below a
    /// Service that is deleted with `--cascade=orphan`, or that others' finalizers keep, everything stays and serves.
    pub fn ends(&self, platform: Platform) -> bool {
        // The local node has no `--cascade` and no finalizers.
        platform == Platform::Local && self.leaving()
    }

    /// Returns the Revision of the newest template, once it exists.
    pub fn latest_created(&self) -> Option<&Revision> {
        let configuration = self.configuration.as_ref()?;
        // A name identifies the template; without one the generation does, since each change makes a new Revision.
        self.revisions.iter().filter(|it| !it.gone).find(|it| match &configuration.revision {
            Some(name) => it.name == *name,
            None => it.meta.generation == configuration.meta.generation,
        })
    }

    /// Returns the name of the newest Revision that has ever been ready.
    pub fn latest_ready(&self) -> Option<&str> {
        self.configuration.as_ref()?.latest_ready.as_deref()
    }

    /// Returns the Route's traffic targets in force.
    pub fn traffic(&self) -> &[Assigned] {
        self.route.as_ref().map(|it| &*it.traffic).unwrap_or_default()
    }

    /// Returns the allocations of the Route's names.
    pub fn allotted(&self) -> &[Allotment] {
        self.route.as_ref().map(|it| &*it.allotted).unwrap_or_default()
    }

    /// Returns a label of the Route, or of the Service that owns it.
    pub fn route_label(&self, key: &str) -> Option<&str> {
        self.of_route(|manifest| &manifest.labels, |route| &route.labels)?.get(key)
    }

    /// Returns an annotation of the Route, or of the Service that owns it.
    pub fn route_annotation(&self, key: &str) -> Option<&str> {
        self.of_route(|manifest| &manifest.annotations, |route| &route.annotations)?.get(key)
    }

    /// Returns all labels of the Route, or of the Service that owns it.
    pub fn route_labels(&self) -> BTreeMap<String, String> {
        let found = self.of_route(|manifest| &manifest.labels, |route| &route.labels);
        found.map(Pairs::to_map).unwrap_or_default()
    }

    /// Returns all annotations of the Route, or of the Service that owns it.
    pub fn route_annotations(&self) -> BTreeMap<String, String> {
        let found = self.of_route(|manifest| &manifest.annotations, |route| &route.annotations);
        found.map(Pairs::to_map).unwrap_or_default()
    }

    fn of_route<'a>(
        &'a self,
        service: impl FnOnce(&'a Manifest) -> &'a Pairs,
        own: impl FnOnce(&'a Route) -> &'a Pairs,
    ) -> Option<&'a Pairs> {
        match self.route.as_ref()?.owner {
            // An owned Route keeps no copy of its own: ten thousand copies of the Service's pairs would cost memory.
            Owner::Service => self.service.as_ref().map(|it| service(&it.manifest)),
            Owner::Nobody | Owner::Other => self.route.as_ref().map(own),
        }
    }

    /// Returns the Revision of this name.
    pub fn revision(&self, name: &str) -> Option<&Revision> {
        self.revisions.iter().find(|it| *it.name == *name)
    }

    /// Iterates over all pods, each with the Revision it serves.
    pub fn pods(&self) -> impl Iterator<Item = (&Revision, &Pod)> {
        self.revisions.iter().flat_map(|it| it.pods.iter().map(move |pod| (it, pod)))
    }
}

impl Default for World {
    fn default() -> Self {
        Self {
            settings: Arc::default(),
            seed: 0,
            apps: BTreeMap::new(),
            seen: HashMap::new(),
            statuses: HashMap::new(),
            followers: Followers::default(),
            replicas: BTreeMap::new(),
            templates: Templates::default(),
            hosts: BTreeSet::new(),
            ports: BTreeSet::new(),
            short: BTreeSet::new(),
            placeholders: BTreeMap::new(),
            activators: BTreeMap::new(),
            slices: Slices::default(),
            mappings: BTreeMap::new(),
            mapped: BTreeMap::new(),
            claims: BTreeMap::new(),
            zones: BTreeMap::new(),
            network_policies: NetworkPolicies::default(),
            going: BTreeSet::new(),
            nodes: BTreeMap::new(),
            // The local node has one controller, which always leads; on Kubernetes the lease decides first.
            leads: true,
            referrers: BTreeMap::new(),
            names: Names::default(),
            odd: BTreeSet::new(),
            decisions: BTreeMap::new(),
            told: BTreeMap::new(),
            autoscalers: BTreeMap::new(),
        }
    }
}

impl World {
    /// Returns true if a node is gone: Kubernetes calls it not ready, and its agent does not report.
    ///
    /// Kubernetes also reports nodes as not ready whose kubelets could not reach the API server for a while, all at
    /// once when it comes back. Their agents report meanwhile. A stream to a machine that is gone ends after ten
    /// seconds.
    pub fn is_away(&self, node: &str) -> bool {
        self.nodes.get(node).is_some_and(|it| !it.is_ready())
            && !self.followers.reports(&followers::named(Role::Agent, node))
    }

    /// Returns an activator with its readiness, which waits while the activator's node is gone.
    pub fn standing(&self, activator: &str) -> Option<(&Activator, Standing)> {
        let (it, standing) = self.activators.get(activator)?;
        // Deletion is final, so it counts on a node that is gone, too.
        let waits = *standing == Standing::Ready && self.is_away(&it.node);
        Some((it, if waits { Standing::Waits } else { *standing }))
    }

    /// Returns a Revision by name, whichever app it belongs to.
    pub fn revision(&self, namespace: &str, name: &str) -> Option<&Revision> {
        let app = self.app_of(&Name::new(namespace, name))?;
        self.apps.get(&app)?.revision(name)
    }

    /// Returns the app whose Route has this name, as its own or for one of its tags.
    pub fn app_named(&self, name: &Name) -> Option<Name> {
        match &self.names.owner(name, &self.placeholders)?.by {
            names::Claimant::Route(app) => Some(app.clone()),
            names::Claimant::Mapping(_) => None,
        }
    }

    /// Iterates over apps that may own an object of this name although the name does not begin with theirs.
    pub fn odd_apps(&self, name: &Name) -> impl Iterator<Item = &Name> {
        // Pairs are sorted by the object's name, so all apps of one name are neighbours.
        let from = self.odd.range((name.clone(), Name::new("", ""))..);
        from.take_while(move |(own, _)| own == name).map(|(_, app)| app)
    }

    /// Returns the app of a Revision. The Revision's name begins with the app's and `-`, unless that would be too long.
    pub fn app_of(&self, revision: &Name) -> Option<Name> {
        let has = |app: &Name| {
            self.apps.get(app).is_some_and(|app| app.revision(&revision.name).is_some())
        };
        // Longest prefix first: an app's own name may contain `-`, too.
        let cuts = revision.name.rmatch_indices('-').map(|(at, _)| &revision.name[..at]);
        let mut apps = cuts.map(|app| Name::new(revision.namespace.clone(), app));
        apps.find(|it| has(it)).or_else(|| self.odd_apps(revision).find(|it| has(it)).cloned())
    }
}
