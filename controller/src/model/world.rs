//! Pure: everything observed at one moment, small enough for ten thousand sleeping services.
//!
//! One [`AppState`] is a Service with all that the controller made of it: Configuration, Route, Revisions and their
//! pods. A Service depends on no other, so one change requires a new plan of one app only. A Route without a Service
//! may name Revisions of other apps; [`ClusterState::referring_apps`] lists these Routes.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use common::{
    local_node::LocalPodStatus,
    wire::{
        ActivatorEntry, ComponentRole, ConnectionPath, NamespacedName, PodObservation,
        RevisionActivity, ServerComponent, ServerReplicas,
    },
};
use datapath::abi::ACTIVATOR_PORTS;
use k8s_openapi::jiff;
use smol_str::SmolStr;

use crate::{
    children,
    config_maps::Configs,
    drain_acks::{self, DrainAcks},
    network_policies::NetworkPolicies,
    node_binding,
    observe::ActivatorReadiness,
    plan::TemplateCache,
    rollout::Rollout,
    scale_policy::ScalePolicyConfig,
};

mod activator_slices;
mod conditions;
mod domain_mappings;
pub mod name_registry;

pub use activator_slices::ActivatorSlices;
pub use conditions::{ConditionReason, ConditionSet, ConditionStatus, ConditionType};
pub use domain_mappings::{DomainClaimState, DomainMappingState};
pub use name_registry::NameRegistry;

/// A moment, in milliseconds since 1970. The clock that the shell passes never runs backwards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct UnixMillis(pub u64);

impl UnixMillis {
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
pub struct CompactStringMap(Box<[(Box<str>, Box<str>)]>);

impl CompactStringMap {
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
    pub fn to_btree_map(&self) -> BTreeMap<String, String> {
        self.iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
    }
}

impl From<&BTreeMap<String, String>> for CompactStringMap {
    fn from(map: &BTreeMap<String, String>) -> Self {
        Self(map.iter().map(|(key, value)| (key.as_str().into(), value.as_str().into())).collect())
    }
}

/// Metadata that every object has beside its name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ObjectMetaSummary {
    /// UID of the object, unique forever.
    pub uid: Uid,
    /// Number that grows with each change of the spec (`metadata.generation`).
    pub generation: u32,
    /// Creation time of the object (`metadata.creationTimestamp`).
    pub created: UnixMillis,
}

/// A checked manifest of a Service.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServiceManifest {
    /// Labels of the Service.
    pub labels: CompactStringMap,
    /// Annotations of the Service.
    pub annotations: CompactStringMap,
    /// Name for the Revision as the user chose it (`spec.template.metadata.name`).
    pub revision_name: Option<Box<str>>,
    /// Template with defaults, as JSON. Service, Configuration and newest Revision share the text.
    pub template: Arc<str>,
    /// Traffic targets with defaults; their percents add up to 100. The Route shares them.
    pub traffic: Arc<[TrafficSpec]>,
}

/// One traffic target as the user wants it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrafficSpec {
    /// Tag of the target, which is then also reachable as `<tag>-<route>`.
    pub tag: Option<Box<str>>,
    /// Name of a Revision; `None`: the latest ready one of the Configuration.
    pub revision_name: Option<Box<str>>,
    /// Name of the Configuration; `None`: the Configuration of the Route's own name.
    pub configuration_name: Option<Box<str>>,
    /// Share of the requests, in percent.
    pub percent: u8,
}

/// All objects of one name in a namespace: a Service with its child objects, or a Configuration or Route alone.
///
/// An object with the UID 0 is desired and does not exist yet.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AppState {
    /// The Service, unless the Configuration or Route exists alone.
    pub service: Option<ServiceState>,
    /// The Configuration, once there is one.
    pub configuration: Option<ConfigurationState>,
    /// The Route, once there is one.
    pub route: Option<RouteState>,
    /// Revisions of the Configuration, oldest first.
    pub revisions: Vec<AppRevision>,
    /// Conditions of Service, Configuration and Route.
    pub conditions: ConditionSet,
}

/// A Service as the controller knows it: the manifest in force and the object's state.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServiceState {
    /// Metadata of the Service object.
    pub meta: ObjectMetaSummary,
    /// The last manifest that passed all checks; it is in force.
    pub manifest: ServiceManifest,
    /// The broken rules of the newest manifest, in one line; `None` while the newest manifest is in force.
    pub manifest_error: Option<Box<str>>,
    /// True once the Service is being deleted. On the local node users no longer see it, and it ends when its pods have
    /// drained.
    pub is_terminating: bool,
}

/// Owner of a Configuration or Route: the controller in its owner references.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ObjectOwner {
    /// The Service of the same name; its manifest is the source of the object's labels and annotations.
    #[default]
    Service,
    /// No owner: a user created the object.
    Unowned,
    /// Another controller, or a Service of another name.
    Other,
}

/// A Configuration: the newest template, which makes Revisions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ConfigurationState {
    /// Metadata of the Configuration object.
    pub meta: ObjectMetaSummary,
    /// Owner of the Configuration: its Service, or none.
    pub owner: ObjectOwner,
    /// Name for the template's Revision as the user chose it.
    pub revision_name: Option<Box<str>>,
    /// Template with defaults, as JSON.
    pub template: Arc<str>,
    /// User that last changed the Configuration, and so created the Revision of its template.
    pub last_modifier: Option<Box<str>>,
    /// Name of the newest Revision that has ever been ready.
    pub latest_ready: Option<Box<str>>,
    /// Hash of the desired object last applied, where a Service of Kubernetes owns the Configuration.
    pub applied_hash: Option<u64>,
    /// True once the Configuration is being deleted: the controller makes nothing for it any more.
    pub is_terminating: bool,
}

/// A Route: a name, and the Revisions that share its requests.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouteState {
    /// Metadata of the Route object.
    pub meta: ObjectMetaSummary,
    /// Owner of the Route: its Service, or none.
    pub owner: ObjectOwner,
    /// Labels of the Route, kept only where no Service owns it.
    pub labels: CompactStringMap,
    /// Annotations of the Route, kept only where no Service owns it.
    pub annotations: CompactStringMap,
    /// Traffic targets as wanted, with defaults.
    pub traffic_spec: Arc<[TrafficSpec]>,
    /// Allocations of the Route's own name and of its tags.
    pub allocations: Vec<RouteNameAllocation>,
    /// Traffic targets in force: the Revisions that get the requests now.
    pub traffic: Vec<AssignedTraffic>,
    /// State of a gradual rollout, while one lasts.
    pub rollout: Option<Box<Rollout>>,
    /// Reason why one of the Route's names is not available to it.
    pub blocked_reason: Option<Box<ConditionReason>>,
    /// Hash of the desired object last applied, where a Service of Kubernetes owns the Route.
    pub applied_hash: Option<u64>,
    /// True once the Route is being deleted: the controller makes nothing for it any more.
    pub is_terminating: bool,
}

impl RouteState {
    /// Iterates over the Route's tags: wanted ones, and those that still hold an allocation.
    pub fn tags(&self) -> impl Iterator<Item = &str> {
        // A removed tag holds its name until its allocation is released.
        let wanted = self.traffic_spec.iter().filter_map(|it| it.tag.as_deref());
        wanted.chain(self.allocations.iter().filter_map(|it| it.tag.as_deref()))
    }
}

/// Allocation of one name of a Route: the ClusterIPs and the port that it holds until it is deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteNameAllocation {
    /// Tag whose name holds the allocation; `None`: the Route's own name.
    pub tag: Option<Box<str>>,
    /// ClusterIPs of the name, or the number they are computed from.
    pub cluster_ips: ClusterIpSource,
    /// Port at the activators that identifies the name.
    pub activator_port: u16,
}

/// State of a placeholder, the Kubernetes Service that reserves a name of a Route.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlaceholderState {
    /// ClusterIPs of the placeholder, IPv4 first.
    pub cluster_ips: Box<[IpAddr]>,
    /// Port of the name at the activators, once one is allocated.
    pub activator_port: Option<u16>,
    /// True if the visibility label keeps the name inside the cluster.
    pub is_cluster_local: bool,
    /// UID of the Route that owns the placeholder; 0 where none does.
    pub owner_uid: Uid,
    /// Creation time of the placeholder, by which the order of claims to its name is decided.
    pub created: UnixMillis,
}

/// Source of the ClusterIPs of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClusterIpSource {
    /// Last 16 bits of ClusterIPs from the local node's range, allocated by this controller.
    LocalRange(u16),
    /// ClusterIPs that the API server allocated; empty while there are none.
    ApiServer(Box<[IpAddr]>),
}

/// One traffic target in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AssignedTraffic {
    /// Tag of the target, which is then also reachable as `<tag>-<route>`.
    pub tag: Option<Box<str>>,
    /// Name of the Revision that gets the requests.
    pub revision_name: Box<str>,
    /// True if the target follows the latest ready Revision.
    pub is_latest: bool,
    /// Share of the requests, in percent.
    pub percent: u8,
}

/// Routing state of a Revision, `serving.knative.dev/routingState` (knative/serving `pkg/reconciler/labeler`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RoutingState {
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
pub struct AppRevision {
    /// Name of the Revision, without its namespace.
    pub name: Box<str>,
    /// Metadata with the Revision's own UID; `generation` is that of the Configuration when it made the Revision.
    pub meta: ObjectMetaSummary,
    /// Template of the Revision, as JSON.
    pub template: Arc<str>,
    /// Creator of the Revision: the user that had changed its Configuration last.
    pub creator: Option<Box<str>>,
    /// Routing state, and the moment of its last change.
    pub routing_state: (RoutingState, UnixMillis),
    /// True once the Revision has reached its initial scale.
    pub initial_scale_reached: bool,
    /// Start of the wait for the initial scale, by this controller's clock, since the API server's may differ; 0: not
    /// yet.
    pub first_planned_at: UnixMillis,
    /// Reason why the pods do not become ready; kept until one does.
    pub failure: Option<Box<ConditionReason>>,
    /// Reason why Kubernetes makes no pods for the Revision.
    pub blocked_reason: Option<Box<ConditionReason>>,
    /// The scale decision in force, once there is one.
    pub decision: Option<CurrentDecision>,
    /// Pods wanted by the latest plan. Before a leader's first plan: the pods that ran when it became leader.
    pub desired_scale: u32,
    /// Number of pods ready at the latest plan.
    pub actual_scale: u32,
    /// Number of pods ever made for the Revision.
    pub pods_created: u32,
    /// Earliest moment for another pod, after the last one vanished at once.
    pub retry_at: UnixMillis,
    /// Image digests by container name, once known.
    pub digests: Box<[(Box<str>, Box<str>)]>,
    /// Pods of the Revision, including those that drain.
    pub pods: Vec<RevisionPod>,
    /// Conditions of the Revision's status.
    pub conditions: ConditionSet,
    /// True once the Revision is being deleted: the controller makes nothing for it any more, and its pods drain.
    pub is_terminating: bool,
    /// True once the object is deleted while pods still answer their last requests.
    pub is_deleted: bool,
    /// True if no Configuration owns the Revision: a user deleted that with `--cascade=orphan`. The Revision still
    /// serves and scales.
    pub is_orphan: bool,
}

impl AppRevision {
    /// Counts the pods that serve, or will once they are ready.
    pub fn serving_pods(&self) -> u32 {
        let serving = self.pods.iter().filter(|pod| pod.stage == PodStage::Serving).count();
        u32::try_from(serving).unwrap_or(u32::MAX)
    }

    /// Returns true if there are pods, none is ready, and a condition has failed. The Revision then scales as if no
    /// Route named it, so that no minimum scale keeps pods crashing forever (knative/serving
    /// `pkg/reconciler/revision/resources/pa.go`).
    pub fn is_stuck(&self) -> bool {
        let failed = |kind| matches!(self.conditions.get(kind), ConditionStatus::False(_));
        let has_failed =
            failed(ConditionType::RevisionResources) || failed(ConditionType::RevisionHealthy);
        // Only facts that every replica has: the number of desired pods is known to the leader alone.
        has_failed && self.actual_scale == 0 && self.serving_pods() > 0
    }
}

/// The part of a [`Decision`](common::wire::ScaleDecision) that is in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CurrentDecision {
    /// Pods requested; `None`: the present number is kept.
    pub desired_scale: Option<u32>,
    /// Path of new connections: direct, or by an activator.
    pub path: ConnectionPath,
    /// Activity of the Revision, shown in its `Active` condition.
    pub activity: RevisionActivity,
}

/// One pod of a Revision.
#[derive(Clone, Debug, PartialEq)]
pub struct RevisionPod {
    /// UID of the pod, unique forever.
    pub uid: Box<str>,
    /// Name of the pod, in the form `<revision>-deployment-<5 characters>`.
    pub name: Box<str>,
    /// Creation time of the pod. On Kubernetes it is by the API server's clock, which may differ from the controller's.
    pub created: UnixMillis,
    /// Moment at which this controller first observed the pod, by its own clock; zero: not yet.
    pub first_seen_at: UnixMillis,
    /// True once the pod has been ready.
    pub was_ready: bool,
    /// Start of the current uninterrupted readiness, and the containers' restart count at that moment.
    pub steady_since: Option<(UnixMillis, u32)>,
    /// Stage of the pod: serving, draining or stopping.
    pub stage: PodStage,
    /// Address at which the pod served before this controller started, until its agent reports.
    pub restored_address: Option<SocketAddr>,
    /// State of the pod on Kubernetes; `None` on the local node.
    pub kube_status: Option<Box<KubePodStatus>>,
}

impl RevisionPod {
    /// Returns true if the pod object has a deletion timestamp on Kubernetes.
    pub fn is_terminating(&self) -> bool {
        self.kube_status.as_ref().is_some_and(|it| it.is_terminating)
    }
}

/// State of a pod as Kubernetes reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KubePodStatus {
    /// Node that the pod runs on; empty before it was scheduled.
    pub node: Box<str>,
    /// Readiness of the pod as the kubelet reports it.
    pub kubelet_readiness: KubeletReadiness,
    /// True once the pod has a deletion timestamp.
    pub is_terminating: bool,
    /// Start of draining, as the leader noted it on the pod.
    pub draining_since: Option<UnixMillis>,
    /// Reason why the scheduler finds no node for the pod.
    pub unschedulable: Option<ConditionReason>,
}

/// Readiness of a pod as the kubelet reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KubeletReadiness {
    /// The kubelet has reported nothing yet, or the pod has not been ready yet.
    #[default]
    NotYetReady,
    /// The pod is ready now.
    Ready,
    /// The pod was ready and is no longer.
    NoLongerReady,
}

/// Stage of a pod's life, from serving to stopping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodStage {
    /// The pod serves, or will once it is ready.
    Serving,
    /// The pod gets no new connections and waits for its last request to end.
    Draining {
        /// Moment at which draining began.
        since: UnixMillis,
    },
    /// The pod was ordered to stop.
    Stopping {
        /// Moment of the order to stop.
        since: UnixMillis,
    },
}

/// Platform that makes objects and pods from plans.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PlatformKind {
    /// The controller itself, at once; a local node starts the pods.
    #[default]
    Local,
    /// The API server: a planned object exists once a watch reports it.
    Kubernetes,
}

/// Settings that hold for all apps.
#[derive(Clone, Debug, PartialEq)]
pub struct ControllerSettings {
    /// Platform that makes objects and pods.
    pub platform: PlatformKind,
    /// Namespace of Rouse's own components.
    pub system_namespace: String,
    /// Name of this controller's own pod.
    pub own_pod_name: String,
    /// Settings of Deployments, chosen by operators.
    pub deployment: children::DeploymentSettings,
    /// Domain of external URLs: `http://NAME.NAMESPACE.DOMAIN`.
    pub external_domain: String,
    /// Domain of cluster-local names: `NAME.NAMESPACE.svc.CLUSTER_DOMAIN`.
    pub cluster_domain: String,
    /// Name of the local node.
    pub node_name: String,
    /// Identifier of this boot of the machine.
    pub boot_id: String,
    /// Checked settings of the ConfigMaps in force.
    pub config_maps: Configs,
    /// Checked settings of Knative's `config-autoscaler`.
    pub scale_policy: ScalePolicyConfig,
    /// First 16 bits of IPv4 ClusterIPs; the last 16 are allocated.
    pub cluster_ip_prefix_v4: [u8; 2],
    /// First 112 bits of IPv6 ClusterIPs; the last 16 are allocated.
    pub cluster_ip_prefix_v6: [u16; 7],
    /// First and last port for names at the activators.
    pub activator_port_range: (u16, u16),
    /// Activators of the local node.
    pub fixed_activators: Vec<ActivatorEntry>,
}

impl Default for ControllerSettings {
    fn default() -> Self {
        Self {
            platform: PlatformKind::Local,
            system_namespace: "knative-serving".into(),
            own_pod_name: String::new(),
            deployment: children::DeploymentSettings::default(),
            external_domain: "localhost".into(),
            cluster_domain: "cluster.local".into(),
            node_name: "rouse".into(),
            boot_id: String::new(),
            config_maps: Configs::default(),
            scale_policy: ScalePolicyConfig::default(),
            cluster_ip_prefix_v4: [10, 96],
            cluster_ip_prefix_v6: [0xfd00, 0x10, 0x96, 0, 0, 0, 0],
            activator_port_range: ACTIVATOR_PORTS.into(),
            fixed_activators: Vec::new(),
        }
    }
}

impl ControllerSettings {
    /// Returns the ClusterIPs of a name, IPv4 first.
    pub fn cluster_ips(&self, of: &ClusterIpSource) -> Vec<IpAddr> {
        // Both families share the number, so one allocation reserves both addresses.
        let host = match of {
            ClusterIpSource::LocalRange(host) => *host,
            ClusterIpSource::ApiServer(addresses) => return addresses.to_vec(),
        };
        let ([a, b], [c, d]) = (self.cluster_ip_prefix_v4, host.to_be_bytes());
        let [s, t, u, v, w, x, y] = self.cluster_ip_prefix_v6;
        vec![IpAddr::from([a, b, c, d]), IpAddr::from([s, t, u, v, w, x, y, host])]
    }
}

/// Everything the controller has observed, as of one moment.
#[derive(Clone, Debug)]
pub struct ClusterState {
    /// Settings that hold for all apps; one change replaces them as a whole.
    pub settings: Arc<ControllerSettings>,
    /// Number drawn at random for each start, which makes UIDs unique.
    pub uid_seed: u128,
    /// Apps by name: Services with all their child objects.
    ///
    /// Boxed, since there are many, and half of a tree's slots are empty.
    pub apps: BTreeMap<NamespacedName, Box<AppState>>,
    /// Latest reports of agents about pods, by UID.
    pub pod_reports: HashMap<String, PodObservation>,
    /// Status of each pod of the local node, by UID.
    pub pod_statuses: HashMap<String, LocalPodStatus>,
    /// Drain acknowledgements of agents and activators, by role and name.
    pub drain_acks: DrainAcks,
    /// Replicas of the components that others open streams to.
    pub replicas: BTreeMap<ServerComponent, ServerReplicas>,
    /// Facts read from the Revisions' templates.
    pub template_cache: TemplateCache,
    /// Last 16 bits of ClusterIPs that are allocated.
    pub allocated_hosts: BTreeSet<u16>,
    /// Activator ports that are allocated.
    pub allocated_ports: BTreeSet<u16>,
    /// Apps with a name for which no number was free. They get one as soon as another app releases its own.
    pub unallocated_apps: BTreeSet<NamespacedName>,
    /// State of placeholders, by name: the Services that reserve names of Routes.
    pub placeholders: BTreeMap<NamespacedName, PlaceholderState>,
    /// Activators' pods by name, with their readiness as the kubelet reports it; readers use
    /// [`ClusterState::activator_readiness`].
    pub activators: BTreeMap<String, (ActivatorEntry, ActivatorReadiness)>,
    /// Activators that EndpointSlices of Routes' names list.
    pub activator_slices: ActivatorSlices,
    /// DomainMappings by name, which is also their domain.
    pub domain_mappings: BTreeMap<NamespacedName, DomainMappingState>,
    /// DomainMappings by the name that they map their domain to.
    pub mappings_by_target: BTreeMap<NamespacedName, BTreeSet<NamespacedName>>,
    /// ClusterDomainClaims, by the domain that each reserves.
    pub domain_claims: BTreeMap<String, DomainClaimState>,
    /// Zone of each node that has one, by node name.
    pub node_zones: BTreeMap<String, String>,
    /// Ingress policies, which decide the clients whose requests may wait.
    pub network_policies: NetworkPolicies,
    /// Namespaces that are being deleted: the controller writes nothing there any more.
    pub terminating_namespaces: BTreeSet<SmolStr>,
    /// State of each node that decisions depend on, by name.
    pub nodes: BTreeMap<String, node_binding::NodeState>,
    /// True if this replica carries out its plans. On Kubernetes one replica is the leader; the others only watch.
    pub is_leader: bool,
    /// Routes that name Revisions of another app, by the name of that app.
    pub referring_apps: BTreeMap<NamespacedName, BTreeSet<NamespacedName>>,
    /// Owner of each name of Routes and DomainMappings.
    pub name_registry: NameRegistry,
    /// Pairs of an object's name and its app, for names that do not begin with the app's since they were cut or chosen.
    pub owner_exceptions: BTreeSet<(NamespacedName, NamespacedName)>,
    /// Last decision on each Revision that is awake, with the figures behind it, in one line.
    pub decision_explanations: BTreeMap<NamespacedName, Box<str>>,
    /// Replicas set in Deployments of Revisions that Kubernetes scales, by Revision.
    pub external_scales: BTreeMap<NamespacedName, u32>,
    /// UIDs of PodAutoscalers of the class that requires a HorizontalPodAutoscaler, by name.
    pub hpa_owner_uids: BTreeMap<NamespacedName, Box<str>>,
}

impl AppState {
    /// Returns true if the app's Service is being deleted.
    pub fn is_terminating(&self) -> bool {
        self.service.as_ref().is_some_and(|it| it.is_terminating)
    }

    /// Returns true if all child objects end with the Service. On Kubernetes each object is deleted on its own: below a
    /// Service that is deleted with `--cascade=orphan`, or that others' finalizers keep, everything stays and serves.
    pub fn cascades_deletion(&self, platform: PlatformKind) -> bool {
        // The local node has no `--cascade` and no finalizers.
        platform == PlatformKind::Local && self.is_terminating()
    }

    /// Returns the Revision of the newest template, once it exists.
    pub fn latest_created(&self) -> Option<&AppRevision> {
        let configuration = self.configuration.as_ref()?;
        // A name identifies the template; without one the generation does, since each change makes a new Revision.
        self.revisions.iter().filter(|it| !it.is_deleted).find(|it| {
            match &configuration.revision_name {
                Some(name) => it.name == *name,
                None => it.meta.generation == configuration.meta.generation,
            }
        })
    }

    /// Returns the name of the newest Revision that has ever been ready.
    pub fn latest_ready(&self) -> Option<&str> {
        self.configuration.as_ref()?.latest_ready.as_deref()
    }

    /// Returns the Route's traffic targets in force.
    pub fn traffic(&self) -> &[AssignedTraffic] {
        self.route.as_ref().map(|it| &*it.traffic).unwrap_or_default()
    }

    /// Returns the allocations of the Route's names.
    pub fn allocations(&self) -> &[RouteNameAllocation] {
        self.route.as_ref().map(|it| &*it.allocations).unwrap_or_default()
    }

    /// Returns a label of the Route, or of the Service that owns it.
    pub fn route_label(&self, key: &str) -> Option<&str> {
        self.route_metadata(|manifest| &manifest.labels, |route| &route.labels)?.get(key)
    }

    /// Returns an annotation of the Route, or of the Service that owns it.
    pub fn route_annotation(&self, key: &str) -> Option<&str> {
        self.route_metadata(|manifest| &manifest.annotations, |route| &route.annotations)?.get(key)
    }

    /// Returns all labels of the Route, or of the Service that owns it.
    pub fn route_labels(&self) -> BTreeMap<String, String> {
        let found = self.route_metadata(|manifest| &manifest.labels, |route| &route.labels);
        found.map(CompactStringMap::to_btree_map).unwrap_or_default()
    }

    /// Returns all annotations of the Route, or of the Service that owns it.
    pub fn route_annotations(&self) -> BTreeMap<String, String> {
        let found =
            self.route_metadata(|manifest| &manifest.annotations, |route| &route.annotations);
        found.map(CompactStringMap::to_btree_map).unwrap_or_default()
    }

    fn route_metadata<'a>(
        &'a self,
        service: impl FnOnce(&'a ServiceManifest) -> &'a CompactStringMap,
        own: impl FnOnce(&'a RouteState) -> &'a CompactStringMap,
    ) -> Option<&'a CompactStringMap> {
        match self.route.as_ref()?.owner {
            // An owned Route keeps no copy of its own: ten thousand copies of the Service's pairs would cost memory.
            ObjectOwner::Service => self.service.as_ref().map(|it| service(&it.manifest)),
            ObjectOwner::Unowned | ObjectOwner::Other => self.route.as_ref().map(own),
        }
    }

    /// Returns the Revision of this name.
    pub fn revision(&self, name: &str) -> Option<&AppRevision> {
        self.revisions.iter().find(|it| *it.name == *name)
    }

    /// Iterates over all pods, each with the Revision it serves.
    pub fn pods(&self) -> impl Iterator<Item = (&AppRevision, &RevisionPod)> {
        self.revisions.iter().flat_map(|it| it.pods.iter().map(move |pod| (it, pod)))
    }
}

impl Default for ClusterState {
    fn default() -> Self {
        Self {
            settings: Arc::default(),
            uid_seed: 0,
            apps: BTreeMap::new(),
            pod_reports: HashMap::new(),
            pod_statuses: HashMap::new(),
            drain_acks: DrainAcks::default(),
            replicas: BTreeMap::new(),
            template_cache: TemplateCache::default(),
            allocated_hosts: BTreeSet::new(),
            allocated_ports: BTreeSet::new(),
            unallocated_apps: BTreeSet::new(),
            placeholders: BTreeMap::new(),
            activators: BTreeMap::new(),
            activator_slices: ActivatorSlices::default(),
            domain_mappings: BTreeMap::new(),
            mappings_by_target: BTreeMap::new(),
            domain_claims: BTreeMap::new(),
            node_zones: BTreeMap::new(),
            network_policies: NetworkPolicies::default(),
            terminating_namespaces: BTreeSet::new(),
            nodes: BTreeMap::new(),
            // The local node has one controller, which always leads; on Kubernetes the lease decides first.
            is_leader: true,
            referring_apps: BTreeMap::new(),
            name_registry: NameRegistry::default(),
            owner_exceptions: BTreeSet::new(),
            decision_explanations: BTreeMap::new(),
            external_scales: BTreeMap::new(),
            hpa_owner_uids: BTreeMap::new(),
        }
    }
}

impl ClusterState {
    /// Returns true if a node is gone: Kubernetes calls it not ready, and its agent does not report.
    ///
    /// Kubernetes also reports nodes as not ready whose kubelets could not reach the API server for a while, all at
    /// once when it comes back. Their agents report meanwhile. A stream to a machine that is gone ends after ten
    /// seconds.
    pub fn is_node_lost(&self, node: &str) -> bool {
        self.nodes.get(node).is_some_and(|it| !it.is_ready())
            && !self.drain_acks.is_reporting(&drain_acks::reporter_id(ComponentRole::Agent, node))
    }

    /// Returns an activator with its readiness, which waits while the activator's node is gone.
    pub fn activator_readiness(
        &self,
        activator: &str,
    ) -> Option<(&ActivatorEntry, ActivatorReadiness)> {
        let (it, standing) = self.activators.get(activator)?;
        // Deletion is final, so it counts on a node that is gone, too.
        let waits = *standing == ActivatorReadiness::Ready && self.is_node_lost(&it.node);
        Some((it, if waits { ActivatorReadiness::NotReady } else { *standing }))
    }

    /// Returns a Revision by name, whichever app it belongs to.
    pub fn revision(&self, namespace: &str, name: &str) -> Option<&AppRevision> {
        let app = self.app_of_revision(&NamespacedName::new(namespace, name))?;
        self.apps.get(&app)?.revision(name)
    }

    /// Returns the app whose Route has this name, as its own or for one of its tags.
    pub fn app_of_route_name(&self, name: &NamespacedName) -> Option<NamespacedName> {
        match &self.name_registry.service_owner(name, &self.placeholders)?.claimant {
            name_registry::NameClaimant::Route(app) => Some(app.clone()),
            name_registry::NameClaimant::Mapping(_) => None,
        }
    }

    /// Iterates over apps that may own an object of this name although the name does not begin with theirs.
    pub fn exceptional_owners(
        &self,
        name: &NamespacedName,
    ) -> impl Iterator<Item = &NamespacedName> {
        // Pairs are sorted by the object's name, so all apps of one name are neighbours.
        let from = self.owner_exceptions.range((name.clone(), NamespacedName::new("", ""))..);
        from.take_while(move |(own, _)| own == name).map(|(_, app)| app)
    }

    /// Returns the app of a Revision. The Revision's name begins with the app's and `-`, unless that would be too long.
    pub fn app_of_revision(&self, revision: &NamespacedName) -> Option<NamespacedName> {
        let has = |app: &NamespacedName| {
            self.apps.get(app).is_some_and(|app| app.revision(&revision.name).is_some())
        };
        // Longest prefix first: an app's own name may contain `-`, too.
        let cuts = revision.name.rmatch_indices('-').map(|(at, _)| &revision.name[..at]);
        let mut apps = cuts.map(|app| NamespacedName::new(revision.namespace.clone(), app));
        apps.find(|it| has(it))
            .or_else(|| self.exceptional_owners(revision).find(|it| has(it)).cloned())
    }
}
