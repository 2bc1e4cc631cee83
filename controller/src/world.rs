//! Pure: everything observed at one moment, small enough for ten thousand sleeping services.
//!
//! One [`App`] is a Service with all that was made of it: Configuration, Route, Revisions and their pods. A Service
//! depends on no other, so a change needs one app planned again and no more; a Route that stands by itself may name
//! others' Revisions, and [`World::referrers`] says which.

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

/// A moment, in milliseconds since 1970. The shell's clock never runs backwards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stamp(pub u64);

impl Stamp {
    /// This moment and `later` milliseconds.
    pub fn plus_ms(self, later: u64) -> Self {
        Self(self.0.saturating_add(later))
    }

    /// As Kubernetes writes times: RFC 3339, whole seconds.
    pub fn rfc3339(self) -> String {
        let seconds = i64::try_from(self.0 / 1000).unwrap_or_default();
        jiff::Timestamp::from_second(seconds).map(|time| time.to_string()).unwrap_or_default()
    }

    /// Reads what [`rfc3339`](Self::rfc3339) wrote.
    pub fn parse(text: &str) -> Option<Self> {
        let time: jiff::Timestamp = text.parse().ok()?;
        u64::try_from(time.as_millisecond()).ok().map(Self)
    }
}

/// A UUID, kept as a number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Uid(pub u128);

impl Uid {
    /// The UID that `parts` name under `seed`: the same parts give the same UID, other parts another one.
    pub fn derive(seed: u128, parts: &[&str]) -> Self {
        // FNV-1a, 128 bit. The seed is random for each start, so that UIDs are unique for ever.
        const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013B;
        let mut hash = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128 ^ seed;
        for byte in parts.iter().flat_map(|part| part.bytes().chain([0])) {
            hash = (hash ^ u128::from(byte)).wrapping_mul(PRIME);
        }
        hash ^= hash >> 61;
        hash = hash.wrapping_mul(PRIME) ^ (hash >> 67);
        // Version 4, variant 1: the bits every reader of UUIDs expects.
        hash &= !(0xf000 << 64 | 0xc000 << 48);
        Self(hash | 0x4000 << 64 | 0x8000 << 48)
    }

    /// Reads what `to_string` wrote.
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

/// Labels or annotations, sorted by key. A fifth of what a `BTreeMap` takes for the usual two or three.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pairs(Box<[(Box<str>, Box<str>)]>);

impl Pairs {
    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<&str> {
        let found = self.0.iter().find(|(have, _)| **have == *key);
        found.map(|(_, value)| &**value)
    }

    /// All pairs.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(key, value)| (&**key, &**value))
    }

    /// As Kubernetes keeps them.
    pub fn to_map(&self) -> BTreeMap<String, String> {
        self.iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
    }
}

impl From<&BTreeMap<String, String>> for Pairs {
    fn from(map: &BTreeMap<String, String>) -> Self {
        Self(map.iter().map(|(key, value)| (key.as_str().into(), value.as_str().into())).collect())
    }
}

/// What every object has beside its name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Meta {
    /// Unique for ever.
    pub uid: Uid,
    /// Grows with each change of the spec.
    pub generation: u32,
    /// When it was made.
    pub created: Stamp,
}

/// A checked manifest of a Service.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Manifest {
    /// Labels of the Service.
    pub labels: Pairs,
    /// Annotations of the Service.
    pub annotations: Pairs,
    /// The name the user gave the Revision.
    pub revision: Option<Box<str>>,
    /// The template with defaults, as JSON. Shared by Service, Configuration and newest Revision.
    pub template: Arc<str>,
    /// Traffic with defaults; percents add up to 100. Shared with the Route.
    pub traffic: Arc<[Traffic]>,
}

/// One traffic target as wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Also reachable as `<tag>-<route>`.
    pub tag: Option<Box<str>>,
    /// A Revision by name; `None`: the latest ready one of the Configuration.
    pub revision: Option<Box<str>>,
    /// The Configuration; `None`: the one of the route's own name.
    pub configuration: Option<Box<str>>,
    /// Share in percent.
    pub percent: u8,
}

/// Everything of one name in a namespace: a Service with what is made of it, or a Configuration or Route by itself.
///
/// An object with the UID 0 is wanted and not made yet.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct App {
    /// The Service.
    pub service: Option<Service>,
    /// The Configuration.
    pub configuration: Option<Configuration>,
    /// The Route.
    pub route: Option<Route>,
    /// Revisions, oldest first.
    pub revisions: Vec<Revision>,
    /// Conditions of Service, Configuration and Route.
    pub conditions: Conditions,
}

/// A Service.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Service {
    /// Its own.
    pub meta: Meta,
    /// What is in force.
    pub manifest: Manifest,
    /// Why the newest manifest is not in force.
    pub refused: Option<Box<str>>,
    /// It is told to go. On the local node it is gone for its user, and leaves once its pods have drained.
    pub leaving: bool,
}

/// Whose an object is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Owner {
    /// The Service of the same name; what that says of labels and annotations counts.
    #[default]
    Service,
    /// Nobody: its user made it.
    Nobody,
    /// Somebody else.
    Other,
}

/// A Configuration: the newest template, which makes Revisions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Configuration {
    /// Its own.
    pub meta: Meta,
    /// Whose it is.
    pub owner: Owner,
    /// The name the user gave the Revision of the template.
    pub revision: Option<Box<str>>,
    /// The template with defaults, as JSON.
    pub template: Arc<str>,
    /// Who changed it last, and so made the Revision of the template.
    pub modifier: Option<Box<str>>,
    /// Newest Revision that was ready.
    pub latest_ready: Option<Box<str>>,
    /// Hash of what it was made of, where that was for a Service of Kubernetes.
    pub applied: Option<u64>,
    /// It is told to go: nothing is made for it any more.
    pub leaving: bool,
}

/// A Route: which Revisions a name leads to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Route {
    /// Its own.
    pub meta: Meta,
    /// Whose it is.
    pub owner: Owner,
    /// Labels of one that no Service owns.
    pub labels: Pairs,
    /// Annotations of one that no Service owns.
    pub annotations: Pairs,
    /// Traffic as wanted, with defaults.
    pub wanted: Arc<[Traffic]>,
    /// What its names hold.
    pub allotted: Vec<Allotment>,
    /// Who gets the requests now.
    pub traffic: Vec<Assigned>,
    /// Where a gradual rollout stands, while one lasts.
    pub rollout: Option<Box<Rollout>>,
    /// Why one of its names cannot be had.
    pub blocked: Option<Box<Why>>,
    /// Hash of what it was made of, where that was for a Service of Kubernetes.
    pub applied: Option<u64>,
    /// It is told to go: nothing is made for it any more.
    pub leaving: bool,
}

impl Route {
    /// Its tags: those that are wanted, and those that still hold a name.
    pub fn tags(&self) -> impl Iterator<Item = &str> {
        let wanted = self.wanted.iter().filter_map(|it| it.tag.as_deref());
        wanted.chain(self.allotted.iter().filter_map(|it| it.tag.as_deref()))
    }
}

/// The numbers one name of a route holds for as long as it lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allotment {
    /// Which name; `None`: the route itself.
    pub tag: Option<Box<str>>,
    /// Its ClusterIPs.
    pub addresses: Addresses,
    /// Its port at the activators.
    pub port: u16,
}

/// What the Service of a name says of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placeholder {
    /// Its ClusterIPs, IPv4 first.
    pub addresses: Box<[IpAddr]>,
    /// Its port at the activators, once one is allotted.
    pub port: Option<u16>,
    /// Whether its label keeps it inside the cluster.
    pub hidden: bool,
    /// UID of the route that owns it; 0 where none does.
    pub owner: Uid,
    /// When it was made.
    pub created: Stamp,
}

/// Where the ClusterIPs of a name come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Addresses {
    /// Ours: their last 16 bits.
    Host(u16),
    /// The API server's; none yet when empty.
    Given(Box<[IpAddr]>),
}

/// One traffic target as it is in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assigned {
    /// Also reachable as `<tag>-<route>`.
    pub tag: Option<Box<str>>,
    /// The Revision.
    pub revision: Box<str>,
    /// Whether it follows the latest ready one.
    pub latest: bool,
    /// Share in percent.
    pub percent: u8,
}

/// Whether a route leads to a Revision (knative/serving `pkg/reconciler/labeler`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Routing {
    /// Not looked at yet.
    #[default]
    Pending,
    /// Some route names it.
    Active,
    /// None does.
    Reserve,
}

/// One Revision.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Revision {
    /// Its name.
    pub name: Box<str>,
    /// Its own UID; `generation` is the Configuration's that made it.
    pub meta: Meta,
    /// What it runs, as JSON.
    pub template: Arc<str>,
    /// Who made it: who had changed its Configuration last.
    pub creator: Option<Box<str>>,
    /// Whether a route leads to it, and since when.
    pub routing: (Routing, Stamp),
    /// Whether its initial scale was reached once.
    pub reached: bool,
    /// Since when that is waited for, by our own clock, which need not be that of whoever stamped the object; 0: not yet.
    pub met: Stamp,
    /// Why its pods do not become ready; kept until one does.
    pub failure: Option<Box<Why>>,
    /// Why Kubernetes makes no pods for it.
    pub blocked: Option<Box<Why>>,
    /// What the autoscaler decided last, if it has decided.
    pub decided: Option<Decided>,
    /// Pods wanted by the latest plan; those that ran as this replica began to lead, before its first.
    pub desired: u32,
    /// Pods ready at the latest plan.
    pub actual: u32,
    /// How many pods it ever had.
    pub made: u32,
    /// No new pod before this moment: the last one vanished at once.
    pub retry_at: Stamp,
    /// Digests by container, once known.
    pub digests: Box<[(Box<str>, Box<str>)]>,
    /// Its pods.
    pub pods: Vec<Pod>,
    /// Its conditions.
    pub conditions: Conditions,
    /// It is told to go: nothing is made for it any more, and its pods drain.
    pub leaving: bool,
    /// The object is gone, and pods are left that answer their last requests.
    pub gone: bool,
    /// No Configuration owns it: that was deleted with `--cascade=orphan`, and the Revision stays, serves and is scaled.
    pub is_orphan: bool,
}

impl Revision {
    /// Pods that serve, or will.
    pub fn serving(&self) -> u32 {
        let serving = self.pods.iter().filter(|pod| pod.stage == Stage::Serving).count();
        u32::try_from(serving).unwrap_or(u32::MAX)
    }

    /// Whether there are pods, none is ready, and a condition says why: as if no route led here, then, so that no least
    /// number keeps pods crashing for ever (knative/serving `pkg/reconciler/revision/resources/pa.go`).
    pub fn is_stuck(&self) -> bool {
        let failed = |kind| matches!(self.conditions.get(kind), Truth::False(_));
        let has_failed = failed(Kind::RevisionResources) || failed(Kind::RevisionHealthy);
        // As every replica sees it: how many are wanted only the leader knows.
        has_failed && self.actual == 0 && self.serving() > 0
    }
}

/// What is obeyed of a [`Decision`](common::wire::Decision).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decided {
    /// Pods wanted; `None`: what runs is kept.
    pub wanted: Option<u32>,
    /// Way of new connections.
    pub path: Path,
    /// What the revision is doing.
    pub activity: Activity,
}

/// One pod of a Revision.
#[derive(Clone, Debug, PartialEq)]
pub struct Pod {
    /// Unique for ever.
    pub uid: Box<str>,
    /// `<revision>-deployment-<5 characters>`.
    pub name: Box<str>,
    /// When it was ordered: on Kubernetes by the API server's clock, which may differ from ours.
    pub created: Stamp,
    /// When this controller met it, by its own clock; zero: not yet.
    pub met: Stamp,
    /// Whether it ever was ready.
    pub was_ready: bool,
    /// Since when it is ready without a break, and how often its containers had been restarted then.
    pub steady: Option<(Stamp, u32)>,
    /// Serves, drains or stops.
    pub stage: Stage,
    /// Where it served before this controller started, until its agent has spoken.
    pub remembered: Option<SocketAddr>,
    /// What Kubernetes says of it; `None` on the local node.
    pub placed: Option<Box<Placed>>,
}

impl Pod {
    /// Whether somebody else has ended it.
    pub fn is_deleted(&self) -> bool {
        self.placed.as_ref().is_some_and(|it| it.deleted)
    }
}

/// What Kubernetes says of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placed {
    /// The node it runs on; empty before it was scheduled.
    pub node: Box<str>,
    /// What the kubelet says of its readiness.
    pub kubelet: Kubelet,
    /// Somebody deleted it.
    pub deleted: bool,
    /// Since when it drains, as the leader has noted on it.
    pub draining: Option<Stamp>,
    /// Why no node takes it.
    pub unschedulable: Option<Why>,
}

/// What the kubelet says of a pod's readiness.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kubelet {
    /// Nothing yet, or not yet ready.
    #[default]
    Waits,
    /// It is ready.
    Ready,
    /// It was and is no longer.
    Lost,
}

/// What is to become of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// It serves, or will.
    Serving,
    /// It gets no new connections and waits for its last request to end.
    Draining {
        /// Since when.
        since: Stamp,
    },
    /// It was told to stop.
    Stopping {
        /// Since when.
        since: Stamp,
    },
}

/// Who makes objects and pods of what is planned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Platform {
    /// The controller itself, at once; a local node starts the pods.
    #[default]
    Local,
    /// The API server: what is planned is there once it is observed.
    Kubernetes,
}

/// What holds for all apps.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Who makes objects and pods.
    pub platform: Platform,
    /// The namespace of our own parts.
    pub namespace: String,
    /// Our own pod.
    pub pod: String,
    /// What operators chose for Deployments.
    pub children: children::Config,
    /// Domain of URLs from outside: `http://NAME.NAMESPACE.DOMAIN`.
    pub domain: String,
    /// Domain of names inside: `NAME.NAMESPACE.svc.CLUSTER_DOMAIN`.
    pub cluster_domain: String,
    /// Name of this node.
    pub node: String,
    /// Names this boot of the machine.
    pub boot: String,
    /// The ConfigMaps in force.
    pub configs: Configs,
    /// Knative's `config-autoscaler`.
    pub autoscaler: AutoscalerConfig,
    /// First 16 bits of IPv4 ClusterIPs; the last 16 are allotted.
    pub cluster_v4: [u8; 2],
    /// First 112 bits of IPv6 ClusterIPs; the last 16 are allotted.
    pub cluster_v6: [u16; 7],
    /// First and last port at the activators.
    pub activator_ports: (u16, u16),
    /// The activators.
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
    /// The ClusterIPs of a name, IPv4 first.
    pub fn addresses(&self, of: &Addresses) -> Vec<IpAddr> {
        let host = match of {
            Addresses::Host(host) => *host,
            Addresses::Given(addresses) => return addresses.to_vec(),
        };
        let ([a, b], [c, d]) = (self.cluster_v4, host.to_be_bytes());
        let [s, t, u, v, w, x, y] = self.cluster_v6;
        vec![IpAddr::from([a, b, c, d]), IpAddr::from([s, t, u, v, w, x, y, host])]
    }
}

/// Everything observed at one moment.
#[derive(Clone, Debug)]
pub struct World {
    /// What does not change.
    pub settings: Arc<Settings>,
    /// Random for each start; makes UIDs unique.
    pub seed: u128,
    /// Services with all that was made of them.
    ///
    /// Boxed, since there are many: half of a tree's slots are empty.
    pub apps: BTreeMap<Name, Box<App>>,
    /// What agents see of pods, by UID.
    pub seen: HashMap<String, PodSeen>,
    /// How pods fare on the local node, by UID.
    pub statuses: HashMap<String, PodStatus>,
    /// Agents and activators, by role and name, and which draining pods each has let go of.
    pub followers: Followers,
    /// Replicas of the parts that others open streams to.
    pub replicas: BTreeMap<Part, Replicas>,
    /// What the Revisions' templates say.
    pub templates: Templates,
    /// ClusterIP numbers in use.
    pub hosts: BTreeSet<u16>,
    /// Activator ports in use.
    pub ports: BTreeSet<u16>,
    /// Apps of which some name found no number free, and gets one when another gives its own back.
    pub short: BTreeSet<Name>,
    /// What stands on Services that are names of routes; by their names.
    pub placeholders: BTreeMap<Name, Placeholder>,
    /// Activators' pods, with their kubelets' word; [`World::standing`] counts.
    pub activators: BTreeMap<String, (Activator, Standing)>,
    /// Which of them slices lead to.
    pub slices: Slices,
    /// DomainMappings; each is called as its domain.
    pub mappings: BTreeMap<Name, Mapping>,
    /// Which of them lead to a name.
    pub mapped: BTreeMap<Name, BTreeSet<Name>>,
    /// Whose domains are, by domain.
    pub claims: BTreeMap<String, Claim>,
    /// Zones of nodes, where they have one.
    pub zones: BTreeMap<String, String>,
    /// Whose requests may wait.
    pub network_policies: NetworkPolicies,
    /// Namespaces that are told to go: nothing is written there any more.
    pub going: BTreeSet<SmolStr>,
    /// What must be known of each node.
    pub nodes: BTreeMap<String, bind::Node>,
    /// Whether what is planned is carried out. On Kubernetes one replica of the controller leads; the others only watch.
    pub leads: bool,
    /// Routes that name Revisions of another app, by that app.
    pub referrers: BTreeMap<Name, BTreeSet<Name>>,
    /// Which owner each name has.
    pub names: Names,
    /// Names of what belongs to an app that do not show it, since they were cut or chosen, each with that app.
    pub odd: BTreeSet<(Name, Name)>,
    /// What was decided of each Revision that is awake, and from what, in one line.
    pub decisions: BTreeMap<Name, Box<str>>,
    /// Pods that Deployments of Revisions which others scale are told to have.
    pub told: BTreeMap<Name, u32>,
    /// Uids of PodAutoscalers of the class that a HorizontalPodAutoscaler is made for.
    pub autoscalers: BTreeMap<Name, Box<str>>,
}

impl App {
    /// Whether it is on its way out.
    pub fn leaving(&self) -> bool {
        self.service.as_ref().is_some_and(|it| it.leaving)
    }

    /// Whether all that is below it goes with it. On Kubernetes each object is told to go by itself: below a Service that
    /// is deleted with `--cascade=orphan`, or that others' finalizers keep, everything stays and serves.
    pub fn ends(&self, platform: Platform) -> bool {
        platform == Platform::Local && self.leaving()
    }

    /// The Revision of the newest template, once it was made.
    pub fn latest_created(&self) -> Option<&Revision> {
        let configuration = self.configuration.as_ref()?;
        self.revisions.iter().filter(|it| !it.gone).find(|it| match &configuration.revision {
            Some(name) => it.name == *name,
            None => it.meta.generation == configuration.meta.generation,
        })
    }

    /// The newest Revision that was ready.
    pub fn latest_ready(&self) -> Option<&str> {
        self.configuration.as_ref()?.latest_ready.as_deref()
    }

    /// Who gets the requests now.
    pub fn traffic(&self) -> &[Assigned] {
        self.route.as_ref().map(|it| &*it.traffic).unwrap_or_default()
    }

    /// What the names of its route hold.
    pub fn allotted(&self) -> &[Allotment] {
        self.route.as_ref().map(|it| &*it.allotted).unwrap_or_default()
    }

    /// A label of its route, or of the Service that owns that.
    pub fn route_label(&self, key: &str) -> Option<&str> {
        self.of_route(|manifest| &manifest.labels, |route| &route.labels)?.get(key)
    }

    /// An annotation of its route, or of the Service that owns that.
    pub fn route_annotation(&self, key: &str) -> Option<&str> {
        self.of_route(|manifest| &manifest.annotations, |route| &route.annotations)?.get(key)
    }

    /// All labels of its route, or of the Service that owns that.
    pub fn route_labels(&self) -> BTreeMap<String, String> {
        let found = self.of_route(|manifest| &manifest.labels, |route| &route.labels);
        found.map(Pairs::to_map).unwrap_or_default()
    }

    /// All annotations of its route, or of the Service that owns that.
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
            Owner::Service => self.service.as_ref().map(|it| service(&it.manifest)),
            Owner::Nobody | Owner::Other => self.route.as_ref().map(own),
        }
    }

    /// A Revision by name.
    pub fn revision(&self, name: &str) -> Option<&Revision> {
        self.revisions.iter().find(|it| *it.name == *name)
    }

    /// All pods with the Revision each serves.
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
    /// Whether a node has left: Kubernetes calls it not ready, and its agent does not report.
    ///
    /// Kubernetes says so also of nodes whose kubelets could not reach the API server for a while, of all of them at once
    /// when that comes back. Their agents report meanwhile; a stream to a machine that is gone ends after ten seconds.
    pub fn is_away(&self, node: &str) -> bool {
        self.nodes.get(node).is_some_and(|it| !it.is_ready())
            && !self.followers.reports(&followers::named(Role::Agent, node))
    }

    /// Whether an activator may be sent requests.
    pub fn standing(&self, activator: &str) -> Option<(&Activator, Standing)> {
        let (it, standing) = self.activators.get(activator)?;
        let waits = *standing == Standing::Ready && self.is_away(&it.node);
        Some((it, if waits { Standing::Waits } else { *standing }))
    }

    /// A Revision by name, whichever app it belongs to.
    pub fn revision(&self, namespace: &str, name: &str) -> Option<&Revision> {
        let app = self.app_of(&Name::new(namespace, name))?;
        self.apps.get(&app)?.revision(name)
    }

    /// The app whose route has a name, as its own or for one of its tags.
    pub fn app_named(&self, name: &Name) -> Option<Name> {
        match &self.names.owner(name, &self.placeholders)?.by {
            names::Claimant::Route(app) => Some(app.clone()),
            names::Claimant::Mapping(_) => None,
        }
    }

    /// Apps of which something may have this name although it does not show.
    pub fn odd_apps(&self, name: &Name) -> impl Iterator<Item = &Name> {
        let from = self.odd.range((name.clone(), Name::new("", ""))..);
        from.take_while(move |(own, _)| own == name).map(|(_, app)| app)
    }

    /// The app a revision belongs to: its name begins with the app's, then `-`, unless that would be too long.
    pub fn app_of(&self, revision: &Name) -> Option<Name> {
        let has = |app: &Name| {
            self.apps.get(app).is_some_and(|app| app.revision(&revision.name).is_some())
        };
        let cuts = revision.name.rmatch_indices('-').map(|(at, _)| &revision.name[..at]);
        let mut apps = cuts.map(|app| Name::new(revision.namespace.clone(), app));
        apps.find(|it| has(it)).or_else(|| self.odd_apps(revision).find(|it| has(it)).cloned())
    }
}
