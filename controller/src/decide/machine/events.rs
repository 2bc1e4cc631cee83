//! Pure: input and output of the state machine.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use common::{
    local_node::{LocalPodSpec, PodRunStatus},
    wire::{
        CertificateMaterial, ComponentReplica, NamespacedName, PodObservation, ScaleDecision,
        ServerComponent,
    },
};
use serde_json::Value;

use super::{ConfigMapEventRecord, DigestResolution, PodRead, PodReadResult};
use crate::model::{
    cluster_state::{AppState, ClientCaRead, SecretRead, ServiceManifest},
    network_policies::PolicyClientPod,
    object::{LocalObjectKey, ObjectPartKey, ResourceKind, WriteError},
};

/// Input of the machine: an observation, a decision, a report or a passed timer.
#[derive(Clone, Debug, PartialEq)]
pub enum ControllerEvent {
    /// A user applied a manifest on the local platform.
    ManifestApplied { name: NamespacedName, manifest: ServiceManifest },
    /// A manifest cannot be used, for this reason.
    ManifestRefused { name: NamespacedName, reason: String },
    /// A manifest was deleted.
    ManifestDeleted(NamespacedName),
    /// An app was restored from disk.
    AppRestored { name: NamespacedName, app: Box<AppState> },
    /// The active autoscaler sent a scale decision.
    DecisionReceived(ScaleDecision),
    /// The active autoscaler has forgotten a Revision.
    DecisionWithdrawn(NamespacedName),
    /// An autoscaler's stream of decisions begins.
    DecisionStreamBegin,
    /// The autoscaler's stream has named every Revision.
    DecisionStreamSynced,
    /// The report of an agent or activator begins, on the stream of this number.
    ReportStreamBegin { reporter: ComponentReplica, stream: u64 },
    /// An agent or activator reports the state of a pod.
    PodReported { reporter: ComponentReplica, stream: u64, observation: PodObservation },
    /// An agent or activator no longer sees a pod.
    PodReportWithdrawn { reporter: ComponentReplica, stream: u64, pod_uid: String },
    /// The reporter opens no more connections to this draining pod: a drain acknowledgement.
    DrainAcked { reporter: ComponentReplica, stream: u64, pod_uid: String },
    /// The reporter withdraws its drain acknowledgement of the pod.
    DrainAckWithdrawn { reporter: ComponentReplica, stream: u64, pod_uid: String },
    /// The activator's stream names each service that the activator routes to some Revision. That of an agent names
    /// each service that awaits agents, once the agent leads connects to it.
    RoutedServicesBegin { reporter: ComponentReplica, stream: u64 },
    /// The activator routes requests for this service to some Revision, or the agent leads connects to it.
    ServiceRouted { reporter: ComponentReplica, stream: u64, service: NamespacedName },
    /// The activator no longer routes requests for this service to any Revision, or the service awaits no agents in the
    /// agent's table.
    ServiceNoLongerRouted { reporter: ComponentReplica, stream: u64, service: NamespacedName },
    /// The activator sends no new requests to this pod with a standby order: nothing shows that the pod was thawed.
    PodPassedOver { reporter: ComponentReplica, stream: u64, pod_uid: String },
    /// The activator sends requests to the pod again.
    PodUsedAgain { reporter: ComponentReplica, stream: u64, pod_uid: String },
    /// The reporter's stream has named every pod.
    ReportStreamSynced { reporter: ComponentReplica, stream: u64 },
    /// The reporter's stream of this number has ended.
    ReportStreamEnd { reporter: ComponentReplica, stream: u64 },
    /// The images of a Revision are resolved to digests, or cannot be resolved.
    DigestsResolved { revision: NamespacedName, resolution: DigestResolution },
    /// The active replica of a component: the leading controller, or the active autoscaler; `None`: none.
    ActiveReplicaChanged { component: ServerComponent, replica: Option<String> },
    /// The local node reports the state of a pod.
    PodRunStatus(PodRunStatus),
    /// An object as the API server holds it; `None`: it was deleted.
    ObjectObserved { resource: ResourceKind, name: NamespacedName, object: Option<Box<Value>> },
    /// A read of a pod has ended, with this result.
    PodReadEnded { read: PodRead, result: PodReadResult },
    /// A pod that NetworkPolicies may admit; `None`: it was deleted.
    ClientPodObserved { name: NamespacedName, pod: Option<PolicyClientPod> },
    /// All pods that NetworkPolicies may admit have been observed.
    ClientPodsListed,
    /// All Deployments, StatefulSets, HorizontalPodAutoscalers and pods of users that existed when they were first
    /// listed have been observed, after [`ControllerEffects::needs_workload_watch`].
    WorkloadsListed,
    /// A write error of an object; `None`: its last write succeeded.
    WriteErrorChanged { key: ObjectPartKey, error: Option<WriteError> },
    /// Child objects of an app's object do not exist; `None`: all exist.
    ChildrenMissing {
        app: NamespacedName,
        owner_resource: ResourceKind,
        owner: NamespacedName,
        error: Option<WriteError>,
    },
    /// All objects that existed at the start have been observed.
    InitialListSynced,
    /// A named Secret was read, or could not be read. Later results of a Secret come later.
    SecretRead { name: NamespacedName, read: SecretRead },
    /// A named Secret was read for its authorities of client certificates. Later results of a Secret come later.
    ClientCaRead { name: NamespacedName, read: ClientCaRead },
    /// A certificate for the names of a service inside the cluster was signed.
    LocalCertificateSigned { service: NamespacedName, material: Arc<CertificateMaterial> },
    /// No certificate can be signed for these services, for this reason, and that lasts. This replica has signed none for
    /// them that is still valid. It ends for each of them with the next certificate.
    LocalSigningFailed { services: BTreeSet<NamespacedName>, reason: String },
    /// True if the API server has the kinds of cert-manager, false if it has none of them.
    CertManagerFound(bool),
    /// All Ingresses that existed when they were first listed have been observed.
    IngressesListed,
    /// True if this replica has become the leader, false if it is no longer.
    LeadershipChanged(bool),
    /// Time has passed, and timers may be due.
    Tick,
}

/// Effects of a step on the local node, the disk, the writer and the event recorder.
#[derive(Debug, Default)]
pub struct ControllerEffects {
    /// Pods that the local node should start.
    pub pods_to_start: Vec<LocalPodSpec>,
    /// UIDs of pods that the local node should stop.
    pub pods_to_stop: Vec<String>,
    /// Names with their addresses, for the local node's DNS; no addresses: the name is deleted.
    pub dns_names: Vec<(NamespacedName, Vec<IpAddr>)>,
    /// Objects to write to disk or delete from it, on the local platform.
    pub changed_objects: Vec<LocalObjectKey>,
    /// Parts of objects that may have to be written, on Kubernetes.
    pub changed_keys: Vec<ObjectPartKey>,
    /// Apps whose planned objects should exist soon, so that a check is scheduled.
    pub apps_to_check: Vec<NamespacedName>,
    /// Events to record on ConfigMaps.
    pub config_map_events: Vec<ConfigMapEventRecord>,
    /// Revisions whose digests are to be resolved, or are no longer needed.
    pub revisions_to_resolve: Vec<NamespacedName>,
    /// Pods to read from the API server now.
    pub pods_to_read: Vec<PodRead>,
    /// Events to record on other objects: Services of users, and Revisions.
    pub object_events: Vec<ObjectEventRecord>,
    /// True if the Deployments, StatefulSets, HorizontalPodAutoscalers and pods of users must be watched: a scaled
    /// Service exists, or something of one. Once true, it is true in all later effects.
    pub needs_workload_watch: bool,
    /// True if requested certificates must be watched, since `external-domain-tls` is enabled.
    pub needs_request_watch: bool,
    /// Secrets whose certificates are to be read, all of them. `None`: the set has not changed.
    pub named_secrets: Option<BTreeSet<NamespacedName>>,
    /// Secrets whose authorities of client certificates are to be read, all of them. `None`: the set has not changed.
    pub named_client_cas: Option<BTreeSet<NamespacedName>>,
    /// Services whose names inside the cluster have begun to need a certificate, each with the number of its request.
    /// `None`: the service needs none any more.
    pub local_certificates: BTreeMap<NamespacedName, Option<u64>>,
    /// Number of named Secrets in each state. `None`: no state has changed.
    pub certificate_counts: Option<CertificateCounts>,
    /// Number of reports that were refused, since the pod runs on another node than the reporter.
    pub refused_reports: u64,
}

/// Number of named Secrets in each state. A Secret that is named for its certificate and for authorities counts twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CertificateCounts {
    /// Secrets that were not read yet.
    pub pending: usize,
    /// Secrets whose certificate is in force.
    pub in_force: usize,
    /// Secrets that cannot be used now, while an earlier certificate of theirs is in force.
    pub kept: usize,
    /// Secrets whose content cannot be used, without an earlier certificate.
    pub unusable: usize,
    /// Secrets that do not exist, without an earlier certificate.
    pub absent: usize,
    /// Secrets that the API server has never returned, but for an error.
    pub unreadable: usize,
}

/// Event to record on an object of the API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectEventRecord {
    /// Kind of the object.
    pub resource: ResourceKind,
    /// Namespace and name of the object.
    pub name: NamespacedName,
    /// UID of the object.
    pub uid: String,
    /// True for type `Warning`, false for `Normal`.
    pub is_warning: bool,
    /// Reason in one CamelCase word.
    pub reason: String,
    /// Explanation in one line.
    pub message: String,
}
