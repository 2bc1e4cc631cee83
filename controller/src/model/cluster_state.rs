//! Pure: everything observed at one moment, small enough for ten thousand sleeping services.
//!
//! One [`AppState`] is a Service with all that the controller made of it: Configuration, Route, Revisions and their
//! pods. A Service depends on no other, so one change requires a new plan of one app only. A Route without a Service
//! may name Revisions of other apps; [`NameIndex::referring_apps`] lists these Routes.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    num::NonZeroU16,
    sync::Arc,
};

use common::{
    local_node::PodRunStatus,
    wire::{
        ActivatorEntry, ClientComponent, NamespacedName, PodObservation, ServerComponent,
        ServerReplicas,
    },
};
use smol_str::SmolStr;

use crate::model::{
    network_policies::NetworkPolicies,
    reporters::{self, ReporterStates},
    zone_shares::ZoneShares,
};

mod activator_slices;
mod app;
mod certificates;
mod client_cas;
pub mod conditions;
mod domain_mappings;
mod gateway_api;
mod ingresses;
mod local_certificates;
pub mod name_registry;
pub(crate) mod nodes;
mod pod_resize;
mod requested_certificates;
mod revision;
mod scaled_service;
mod settings;
mod templates;
mod topology;
mod values;
mod workloads;

pub use activator_slices::ActivatorSlices;
pub use app::{
    AppState, AssignedTraffic, ClusterIpSource, ConfigurationState, ObjectOwner, PlaceholderState,
    RouteNameAllocation, RouteState, ServiceManifest, ServiceState, ServiceWriteErrors,
    TrafficSpec,
};
pub use certificates::{
    CertificateInForce, CertificateState, ObservedCertificates, SecretRead, SecretReadState,
};
pub use client_cas::{ClientAuthSpec, ClientCaRead, ClientCaState, ObservedClientCas};
pub use conditions::{
    ConditionReason, ConditionSet, ConditionStatus, ConditionType, shorten_error,
};
pub use domain_mappings::{
    DomainAnnotationFault, DomainClaimState, DomainMappingState, DomainSpec, ObservedDomains,
};
pub use gateway_api::{
    AllowedNamespaces, BackendProtocol, BackendService, BackendSpec, GATEWAY_CONTROLLER,
    GATEWAY_GROUP, GATEWAY_SERVICE, GatewayClassState, GatewayRouteId, GatewayRouteKind,
    GatewayRouteState, GatewayServiceAddress, GatewayState, HostClaims, ListenerSpec, ListenerTls,
    ObservedGatewayApi, ParentPlan, ParentReference, PlannedCondition, ReferenceGrant, RouteClaims,
    RouteMatchSpec, RoutePlan, RouteRejections, RouteRuleSpec, WrittenCondition,
};
pub use ingresses::{IngressState, ObservedIngresses};
pub use local_certificates::LocalCertificateState;
pub use name_registry::NameRegistry;
pub use nodes::NodeState;
pub use pod_resize::{PendingResize, PodResize, ReducibleResources};
pub use requested_certificates::{
    CertManagerPresence, CertificateNamespace, CertificateReadiness, ChallengeSolver,
    IssuedCertificate, ObservedChallenge, ObservedRequests, ReadyStatus, RequestedCertificate,
    SolvedChallenge,
};
pub use revision::{
    AppRevision, CurrentDecision, KubePodStatus, KubeletReadiness, PodStage, RevisionPod,
    RevisionRouting, RevisionScaling, RoutingState, StandbyStop, SteadyReadiness,
};
pub use scaled_service::{
    ActivatorPort, ActivatorSliceState, AutoscalerRecord, ForeignWrites, KeptNumber, PodLayout,
    RefusalState, ScaledRefusal, ScaledServiceState, TargetPort, UserService, UserServicePort,
    WorkloadBinding,
};
pub use settings::{ControllerSettings, DeploymentSettings, PlatformKind};
pub use templates::{ParsedTemplate, TemplateCache};
pub use topology::{HintMode, HintedPod, RevisionTopology};
pub use values::{CompactStringMap, ObjectMetaSummary, Uid, UnixMillis, rfc3339_of_seconds};
pub use workloads::{
    ObservedWorkloads, PodOwner, UserAutoscaler, WorkloadKey, WorkloadKind, WorkloadPod,
    WorkloadState,
};

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
    /// Reports about pods, by pod UID.
    pub pods: ObservedPods,
    /// Replicas of the components that others open streams to.
    pub replicas: BTreeMap<ServerComponent, ServerReplicas>,
    /// Parsed templates of the Revisions.
    pub template_cache: TemplateCache,
    /// ClusterIPs of the local node and activator ports that are allocated to Routes' names.
    pub allocated: AllocatedNumbers,
    /// Owners of names: Routes, DomainMappings, and objects whose names do not show their app.
    pub names: NameIndex,
    /// Activators, and the slices that list them.
    pub activators: ObservedActivators,
    /// DomainMappings and ClusterDomainClaims of all namespaces.
    pub domains: ObservedDomains,
    /// Certificates of the Secrets that DomainMappings and `config-network` name.
    pub certificates: ObservedCertificates,
    /// Certificates that the platform requests, with the objects by which they are issued.
    pub requests: ObservedRequests,
    /// Authorities of client certificates of the Secrets that DomainMappings name.
    pub client_cas: ObservedClientCas,
    /// Objects of the Gateway API, with the Services that its routes may lead to.
    pub gateway_api: ObservedGatewayApi,
    /// Ingresses of Routes whose public hosts other ingresses front.
    pub ingresses: ObservedIngresses,
    /// Certificates for names inside the cluster, by the service that the names belong to.
    pub local_certificates: BTreeMap<NamespacedName, LocalCertificateState>,
    /// Nodes, as far as decisions depend on them.
    pub nodes: ObservedNodes,
    /// Ingress policies, which decide the clients whose requests may wait.
    pub network_policies: NetworkPolicies,
    /// Namespaces that are being deleted: the controller writes nothing there any more.
    pub terminating_namespaces: BTreeSet<SmolStr>,
    /// Numbers of pods on standby that namespaces have as a default, as their annotations state them.
    pub standby_defaults: BTreeMap<SmolStr, Box<str>>,
    /// True if this replica carries out its plans. On Kubernetes one replica is the leader; the others only watch.
    pub is_leader: bool,
    /// True while a controller that has just started plans all apps for the first time.
    pub is_starting: bool,
    /// Records of scale beside those in the Revisions.
    pub scaling: ScaleRecords,
    /// Workloads and pods of users, once a scaled Service exists.
    pub workloads: ObservedWorkloads,
}

/// ClusterIPs and activator ports that are allocated.
#[derive(Clone, Debug, Default)]
pub struct AllocatedNumbers {
    /// Last 16 bits of ClusterIPs that are allocated.
    pub cluster_ip_suffixes: BTreeSet<u16>,
    /// Activator ports that are allocated.
    pub ports: BTreeSet<u16>,
    /// Apps with a name for which no number was free, or not the one that its placeholder holds. They get theirs as
    /// soon as another app releases it.
    pub unallocated_apps: BTreeSet<NamespacedName>,
}

/// Activators as Kubernetes knows them.
#[derive(Clone, Debug, Default)]
pub struct ObservedActivators {
    /// Activators' pods by name, with their readiness as the kubelet reports it; readers use
    /// [`ClusterState::activator_readiness`].
    pub pods: BTreeMap<String, (ActivatorEntry, ActivatorReadiness)>,
    /// True if one of them is ready for requests. Without any, nothing would wake a workload.
    pub is_any_ready: bool,
    /// Activators that EndpointSlices of Routes' names list.
    pub slices: ActivatorSlices,
}

/// Readiness of an activator for requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivatorReadiness {
    /// The activator is not ready yet, or not at present.
    NotReady,
    /// The activator is ready for requests.
    Ready,
    /// The activator is being deleted and about to stop.
    Terminating,
}

/// Nodes, as far as decisions depend on them.
#[derive(Clone, Debug, Default)]
pub struct ObservedNodes {
    /// State of each node, by name.
    pub states: BTreeMap<String, NodeState>,
    /// Names of deleted nodes that were lost. Each counts as lost while pods of it exist.
    pub deleted: BTreeSet<String>,
    /// Zone of each node that has one, by node name.
    pub zones: BTreeMap<String, String>,
    /// Time of each node's last rejection of a pod, by node name. Pods and nodes have a watch each, so a rejection may
    /// be observed before its node.
    last_rejections: BTreeMap<String, UnixMillis>,
    /// Shares of the zones in the CPU of the nodes, by which services get hints for zones.
    pub zone_shares: ZoneShares,
}

impl ObservedNodes {
    /// Returns the shares of the zones by the present nodes.
    pub fn current_zone_shares(&self) -> ZoneShares {
        let zone = |name: &String| self.zones.get(name).map_or("", String::as_str);
        ZoneShares::of_nodes(self.states.iter().map(|(name, node)| node.zone_node(zone(name))))
    }
}

/// Names of objects, with the apps and mappings that they belong to.
#[derive(Clone, Debug, Default)]
pub struct NameIndex {
    /// Owner of each name of Routes and DomainMappings.
    pub registry: NameRegistry,
    /// State of placeholders, by name: the Services that reserve names of Routes.
    pub placeholders: BTreeMap<NamespacedName, PlaceholderState>,
    /// UIDs of the Routes that own gateway ports, as the leader has recorded them; `None`: no record is known. The last
    /// known one counts while it is deleted.
    pub port_record: Option<BTreeMap<NonZeroU16, Uid>>,
    /// `resourceVersion` of the record that was observed last; empty: none exists. Writes of the record require it.
    pub port_record_version: Box<str>,
    /// Pairs of an object's name and its app, for names that do not begin with the app's since they were cut or chosen.
    pub owner_exceptions: BTreeSet<(NamespacedName, NamespacedName)>,
    /// Routes that name Revisions of another app, by the name of that app.
    pub referring_apps: BTreeMap<NamespacedName, BTreeSet<NamespacedName>>,
    /// Routes that name a Revision that is not observed yet, by the name of the Revision.
    pub routes_of_unknown_revisions: BTreeMap<NamespacedName, BTreeSet<NamespacedName>>,
}

impl NameIndex {
    /// Returns the claim that owns a gateway port. On Kubernetes a claim counts only once it is recorded: another claim
    /// may come before the record of this one, and the record may be under way already.
    pub fn port_owner(
        &self,
        port: NonZeroU16,
        platform: PlatformKind,
    ) -> Option<&name_registry::NameClaim> {
        let claim = self.port_claim_to_record(port)?;
        let counts = match platform {
            // The local node has no record.
            PlatformKind::Local => true,
            PlatformKind::Kubernetes => self.is_port_recorded(port, claim),
        };
        counts.then_some(claim)
    }

    /// Returns the claim to a gateway port that the record should have: the one that it has, else the oldest one.
    pub fn port_claim_to_record(&self, port: NonZeroU16) -> Option<&name_registry::NameClaim> {
        let is_recorded = |claim: &name_registry::NameClaim| self.is_port_recorded(port, claim);
        self.registry.port_owner(port, is_recorded, &self.placeholders)
    }

    fn is_port_recorded(&self, port: NonZeroU16, claim: &name_registry::NameClaim) -> bool {
        match &self.port_record {
            Some(record) => record.get(&port) == Some(&claim.uid),
            // Controllers of earlier releases have recorded owners on their placeholders.
            None => self
                .placeholders
                .get(&claim.service)
                .is_some_and(|it| it.owner_uid == claim.uid && it.gateway_port == Some(port)),
        }
    }
}

/// Latest reports about pods, and the acknowledgements of their drains.
#[derive(Clone, Debug, Default)]
pub struct ObservedPods {
    /// Latest reports of agents about pods, by UID.
    pub reports: HashMap<String, PodObservation>,
    /// Status of each observed pod, by UID.
    pub statuses: HashMap<String, PodRunStatus>,
    /// Drain acknowledgements of agents and activators, by role and name.
    pub reporters: ReporterStates,
    /// Nodes whose agents have no stream of reports any more, each with the moment at which its last one ended.
    pub silent_agents: BTreeMap<String, UnixMillis>,
}

/// Scale of Revisions as others decide or explain it, by name.
#[derive(Clone, Debug, Default)]
pub struct ScaleRecords {
    /// Last decision on each Revision that is awake, with the figures behind it, in one line.
    pub explanations: BTreeMap<NamespacedName, Box<str>>,
    /// Zone from which each Revision that wakes was asked for a pod, until one is ready. Those asked from an unknown
    /// zone have none.
    pub wake_zones: BTreeMap<NamespacedName, SmolStr>,
    /// Replicas set in Deployments of Revisions that Kubernetes scales, by Revision.
    pub external_scales: BTreeMap<NamespacedName, u32>,
    /// UIDs of PodAutoscalers of the class that requires a HorizontalPodAutoscaler, by name.
    pub hpa_owner_uids: BTreeMap<NamespacedName, Box<str>>,
}

impl Default for ClusterState {
    fn default() -> Self {
        Self {
            settings: Arc::default(),
            uid_seed: 0,
            apps: BTreeMap::new(),
            pods: ObservedPods::default(),
            replicas: BTreeMap::new(),
            template_cache: TemplateCache::default(),
            allocated: AllocatedNumbers::default(),
            names: NameIndex::default(),
            activators: ObservedActivators::default(),
            domains: ObservedDomains::default(),
            certificates: ObservedCertificates::default(),
            requests: ObservedRequests::default(),
            client_cas: ObservedClientCas::default(),
            gateway_api: ObservedGatewayApi::default(),
            ingresses: ObservedIngresses::default(),
            local_certificates: BTreeMap::new(),
            nodes: ObservedNodes::default(),
            network_policies: NetworkPolicies::default(),
            terminating_namespaces: BTreeSet::new(),
            standby_defaults: BTreeMap::new(),
            // The local node has one controller, which always leads; on Kubernetes the lease decides first.
            is_leader: true,
            is_starting: false,
            scaling: ScaleRecords::default(),
            workloads: ObservedWorkloads::default(),
        }
    }
}

impl ClusterState {
    /// Returns true if a node is lost: Kubernetes calls it not ready, and its agent does not report.
    ///
    /// Kubernetes also reports nodes as not ready whose kubelets could not reach the API server for a while, all at
    /// once when it comes back. Their agents report meanwhile. A stream to a lost node ends after ten seconds.
    pub fn is_node_lost(&self, node: &str) -> bool {
        self.nodes.states.get(node).is_some_and(|it| !it.is_ready())
            && !self
                .pods
                .reporters
                .is_reporting(&reporters::reporter_id(ClientComponent::Agent, node))
    }

    /// Returns true if the controller makes and deletes objects for the app: not while its manifest is refused.
    pub(crate) fn is_maintained(&self, name: &NamespacedName, app: &AppState) -> bool {
        self.is_in_use(name, app)
            && app.service.as_ref().is_none_or(|it| it.manifest_error.is_none())
    }

    /// Returns true unless the app's objects are about to be deleted with their owner or their namespace.
    pub(crate) fn is_in_use(&self, name: &NamespacedName, app: &AppState) -> bool {
        let is_orphaned = |owner: Option<ObjectOwner>| {
            owner == Some(ObjectOwner::Service) && app.service.is_none()
        };
        let owners =
            [app.configuration.as_ref().map(|it| it.owner), app.route.as_ref().map(|it| it.owner)];
        let is_deleted =
            app.is_terminating() || self.terminating_namespaces.contains(&name.namespace);
        !is_deleted && !owners.into_iter().any(is_orphaned)
    }

    /// Returns an activator with its readiness. An activator on a lost node is not ready.
    pub fn activator_readiness(
        &self,
        activator: &str,
    ) -> Option<(&ActivatorEntry, ActivatorReadiness)> {
        let (it, readiness) = self.activators.pods.get(activator)?;
        // Deletion is final, so it counts on a lost node, too.
        let is_lost = *readiness == ActivatorReadiness::Ready && self.is_node_lost(&it.node);
        Some((it, if is_lost { ActivatorReadiness::NotReady } else { *readiness }))
    }

    /// Returns true if an activator is ready for requests.
    pub fn has_ready_activator(&self) -> bool {
        let mut all = self.activators.pods.keys().filter_map(|name| self.activator_readiness(name));
        all.any(|(_, readiness)| readiness == ActivatorReadiness::Ready)
    }

    /// Returns a Revision by name, whichever app it belongs to. It leaves out Revisions of scaled Services, which no
    /// Route can name.
    pub fn revision(&self, namespace: &str, name: &str) -> Option<&AppRevision> {
        let app = self.app_of_revision(&NamespacedName::new(namespace, name))?;
        self.apps.get(&app)?.revision(name).filter(|it| !it.is_scaled_service)
    }

    /// Returns the app whose Route has this name, as its own or for one of its tags.
    pub fn app_of_route_name(&self, name: &NamespacedName) -> Option<NamespacedName> {
        match &self.names.registry.service_owner(name, &self.names.placeholders)?.claimant {
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
        let from = self.names.owner_exceptions.range((name.clone(), NamespacedName::new("", ""))..);
        from.take_while(move |(object_name, _)| object_name == name).map(|(_, app)| app)
    }

    /// Returns the app of a service in the RouteTable, which is a name of a Route or a port of a scaled Service.
    pub fn app_of_service(&self, name: &NamespacedName) -> Option<NamespacedName> {
        match name.split_port() {
            Some((service, _)) => {
                self.apps.get(&service).is_some_and(|app| app.scaled.is_some()).then_some(service)
            }
            None => self.app_of_route_name(name),
        }
    }

    /// Returns the app of a Revision. The Revision's name begins with the app's and `-`, unless that would be too long.
    /// The Revision of a scaled Service has the app's own name.
    pub fn app_of_revision(&self, revision: &NamespacedName) -> Option<NamespacedName> {
        let has = |app: &NamespacedName| {
            self.apps.get(app).is_some_and(|app| app.revision(&revision.name).is_some())
        };
        // Longest prefix first: an app's own name may contain `-`, too.
        let cuts = revision.name.rmatch_indices('-').map(|(at, _)| &revision.name[..at]);
        let mut apps = cuts.map(|app| NamespacedName::new(revision.namespace.clone(), app));
        apps.find(|it| has(it))
            .or_else(|| has(revision).then(|| revision.clone()))
            .or_else(|| self.exceptional_owners(revision).find(|it| has(it)).cloned())
    }
}
