//! Pure: state of a scaled Service: a Kubernetes Service of a user whose workload sleeps without requests.

use std::{borrow::Cow, net::IpAddr, num::NonZeroU16, sync::Arc, time::Duration};

use common::wire::{AppProtocol, NamespacedName, PodPort};

use super::{
    CompactStringMap, ConditionReason, ConditionSet, ObjectMetaSummary, UnixMillis,
    workloads::{WorkloadKey, WorkloadKind},
};
use crate::model::object::ReplicaRecord;

/// A scaled Service, with its workload and all that the controller made for it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScaledServiceState {
    /// The Service as the API server holds it; `None` once it is deleted.
    pub service: Option<UserService>,
    /// PodAutoscaler of the Service, once it exists.
    pub autoscaler: Option<AutoscalerRecord>,
    /// Workload that the Service scales, or that is being released. The app has a Revision exactly while there is one.
    pub binding: Option<WorkloadBinding>,
    /// Reason for which the Service scales no workload.
    pub refusal: Option<RefusalState>,
    /// Ports that are allocated at the activators, in the order of the Service's ports.
    pub ports: Vec<ActivatorPort>,
    /// Numbers of pods that other clients have written.
    pub foreign_writes: ForeignWrites,
    /// Start of the release of the workload, while requests may still wait for its pods.
    pub released_at: Option<UnixMillis>,
    /// EndpointSlices that lead to activators.
    pub slices: ActivatorSliceState,
    /// Conditions of the Revision as an earlier leader has written them, until there is a Revision.
    pub restored_conditions: ConditionSet,
}

impl ScaledServiceState {
    /// Returns the Service if its user wants the workload to sleep.
    pub fn wanted_service(&self) -> Option<&UserService> {
        self.service.as_ref().filter(|it| it.wants_sleep && !it.is_terminating)
    }

    /// Returns the workload that the Service scales; `None` while it is being released, or without one.
    pub fn scaled_workload(&self) -> Option<&WorkloadBinding> {
        self.binding.as_ref().filter(|_| self.released_at.is_none())
    }

    /// Returns the port at the activators for a port of the Service.
    pub fn activator_port(&self, service_port: NonZeroU16) -> Option<NonZeroU16> {
        let port = self.ports.iter().find(|it| it.service_port == service_port);
        port.map(|it| it.activator_port)
    }

    /// Returns true if nothing is left: neither the wish of a user, nor a workload, nor a PodAutoscaler.
    pub fn is_over(&self) -> bool {
        self.wanted_service().is_none() && self.binding.is_none() && self.autoscaler.is_none()
    }
}

/// A Kubernetes Service of a user, as far as its workload is scaled by it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct UserService {
    /// Metadata of the Service.
    pub meta: ObjectMetaSummary,
    /// True if the Service asks for scale to zero.
    pub wants_sleep: bool,
    /// Annotations of Rouse, of autoscaling and about hints.
    pub annotations: CompactStringMap,
    /// Labels that the pods of the Service have.
    pub selector: CompactStringMap,
    /// ClusterIPs of the Service, IPv4 first.
    pub cluster_ips: Box<[IpAddr]>,
    /// TCP ports, in the order of the spec.
    pub ports: Box<[UserServicePort]>,
    /// Ports of other protocols, in the form `53/UDP`. They wake nothing.
    pub other_ports: Box<[Box<str>]>,
    /// Time for which a client keeps its pod; `None`: no affinity.
    pub affinity: Option<Duration>,
    /// Preference for near pods, as the field `trafficDistribution` states it.
    pub traffic_distribution: Option<Box<str>>,
    /// True if each node answers connections from outside only with endpoints of its own.
    pub is_external_traffic_local: bool,
    /// Reason for which such a Service cannot scale any workload.
    pub refusal: Option<ScaledRefusal>,
    /// True once the Service is being deleted.
    pub is_terminating: bool,
}

/// One TCP port of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UserServicePort {
    /// Name of the port; empty if the only port has none.
    pub name: Box<str>,
    /// Port that clients connect to.
    pub port: NonZeroU16,
    /// Protocol of the connections.
    pub protocol: AppProtocol,
    /// Port of the pods that it leads to.
    pub target: TargetPort,
}

/// Port of a pod, as a Service names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetPort {
    /// Number of the port.
    Number(NonZeroU16),
    /// Name of a container's port, which may have another number in each pod.
    Name(Box<str>),
}

/// Reason for which a Service scales no workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScaledRefusal {
    /// An annotation has a value that is not known.
    InvalidAnnotation(Box<str>),
    /// The name belongs to objects of Knative, which this text names.
    NameTaken(Box<str>),
    /// The Service has no ClusterIP.
    Headless,
    /// The Service is an alias of a name.
    ExternalName,
    /// The Service has no selector.
    NoSelector,
    /// Nodes may use their own endpoints only.
    LocalTrafficPolicy,
    /// The Service has no TCP port.
    NoTcpPort,
    /// The selector matches no workload.
    NoWorkload,
    /// The selector matches pods of several owners, which this text names.
    SeveralWorkloads(Box<str>),
    /// The pods of the workload share the network of their node.
    HostNetwork(WorkloadKey),
    /// The volumes of the workload would be deleted whenever it falls asleep.
    VolumesDeleted(WorkloadKey),
    /// An older Service scales the workload.
    WorkloadTaken { workload: WorkloadKey, service: NamespacedName },
}

impl ScaledRefusal {
    /// Returns reason and message of the condition that reports the refusal.
    pub fn to_condition_reason(&self) -> ConditionReason {
        ConditionReason::new(self.reason(), self.message())
    }

    /// Returns true if the refusal is often over in a moment, since objects are applied one after the other.
    pub fn is_often_brief(&self) -> bool {
        matches!(self, Self::NoWorkload | Self::SeveralWorkloads(_) | Self::WorkloadTaken { .. })
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::InvalidAnnotation(_) => "InvalidAnnotation",
            Self::NameTaken(_) => "NameTaken",
            Self::Headless => "Headless",
            Self::ExternalName => "ExternalName",
            Self::NoSelector => "NoSelector",
            Self::LocalTrafficPolicy => "InternalTrafficPolicyLocal",
            Self::NoTcpPort => "NoTcpPort",
            Self::NoWorkload => "NoWorkload",
            Self::SeveralWorkloads(_) => "SeveralWorkloads",
            Self::HostNetwork(_) => "HostNetwork",
            Self::VolumesDeleted(_) => "VolumesDeleted",
            Self::WorkloadTaken { .. } => "WorkloadTaken",
        }
    }

    /// Returns the message of the condition, for the owner of the Service.
    fn message(&self) -> Cow<'static, str> {
        match self {
            Self::InvalidAnnotation(message) => message.to_string().into(),
            Self::NameTaken(owner) => {
                format!("The name belongs to {owner}: give the Service another one").into()
            }
            Self::Headless => {
                "A headless Service has no address at which connections can be held".into()
            }
            Self::ExternalName => "A Service of type ExternalName has no pods".into(),
            Self::NoSelector => "The Service has no selector, so its workload is not known".into(),
            Self::LocalTrafficPolicy => {
                "With internalTrafficPolicy Local, nodes without a pod refuse connections".into()
            }
            Self::NoTcpPort => {
                "Only TCP connections wake a workload, and the Service has no TCP port".into()
            }
            Self::NoWorkload => {
                "No Deployment or StatefulSet of the namespace has the labels of the selector"
                    .into()
            }
            Self::SeveralWorkloads(owners) => {
                format!("The selector matches pods of several owners: {owners}").into()
            }
            Self::HostNetwork(workload) => {
                format!("The pods of {workload} share the network of their node").into()
            }
            Self::VolumesDeleted(workload) => format!(
                "Kubernetes would delete the volumes of {workload}: set whenScaled of its \
                 persistentVolumeClaimRetentionPolicy to Retain"
            )
            .into(),
            Self::WorkloadTaken { workload, service } => {
                format!("{workload} is scaled by the older Service {:?}", service.name).into()
            }
        }
    }
}

/// A refusal, and the moment since which it holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusalState {
    /// Reason of the refusal.
    pub refusal: ScaledRefusal,
    /// Moment from which the Service has been refused without a break.
    pub since: UnixMillis,
}

/// Workload that a Service scales, as the plan depends on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkloadBinding {
    /// Kind and name of the workload.
    pub key: WorkloadKey,
    /// UID of the workload.
    pub uid: Box<str>,
    /// Number of pods that the workload requests now.
    pub replicas: u32,
    /// Record of the controller's last write of this number.
    pub record: Option<ReplicaRecord>,
    /// Number of pods that the user wants while the workload is awake, at least 1.
    pub user_replicas: u32,
    /// Number of the first pod of a StatefulSet.
    pub first_ordinal: u32,
    /// Lower bound of the HorizontalPodAutoscaler that scales the workload while it is awake; `None`: there is none.
    pub hpa_min_replicas: Option<u32>,
    /// Labels of the workload's new pods.
    pub template_labels: CompactStringMap,
    /// Containers of the workload's new pods.
    pub shape: Arc<str>,
    /// True once the workload is being deleted.
    pub is_terminating: bool,
}

impl WorkloadBinding {
    /// Returns the number of pods to which the workload wakes up.
    pub fn wake_replicas(&self) -> u32 {
        self.hpa_min_replicas.unwrap_or(self.user_replicas)
    }

    /// Returns true if another client has written the present number since the controller's last write.
    pub fn is_foreign_number(&self) -> bool {
        self.record.is_some_and(|it| it.scaled_to != self.replicas)
    }

    /// Returns true if the present number is a wish of the user that the record does not show yet.
    pub fn lacks_record(&self) -> bool {
        self.is_foreign_number() && self.replicas > 0 && self.hpa_min_replicas.is_none()
    }

    /// Returns true if the controller has put the workload to sleep.
    pub fn is_put_to_sleep(&self) -> bool {
        self.replicas == 0 && !self.is_foreign_number() && self.record.is_some()
    }

    /// Returns the ordinal of a pod of a StatefulSet, counted from its first pod. `None`: the pod has none.
    pub fn pod_index(&self, pod: &str) -> Option<u32> {
        if self.key.kind != WorkloadKind::StatefulSet {
            return None;
        }
        let ordinal: u32 =
            pod.strip_prefix(&*self.key.name.name)?.strip_prefix('-')?.parse().ok()?;
        ordinal.checked_sub(self.first_ordinal)
    }
}

/// Numbers of pods that other clients have written, and the moments at which the controller observed them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ForeignWrites {
    /// Number that another client wrote last, while it is kept.
    pub kept: Option<KeptNumber>,
    /// Moments at which other clients woke the sleeping workload, since the last request.
    pub wakes: Vec<UnixMillis>,
    /// True if a tool keeps writing the number, so that the workload sleeps no more.
    pub is_managed: bool,
}

/// Number of pods that another client wrote. It is kept for a stable window from the moment at which so many pods were
/// ready. Otherwise pods that start slowly would stop before they serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptNumber {
    /// Number of pods, above 0.
    pub pods: u32,
    /// Moment at which the controller observed the number.
    pub observed_at: UnixMillis,
    /// Moment at which so many pods were ready first; `None`: not yet.
    pub ready_at: Option<UnixMillis>,
}

impl KeptNumber {
    /// Returns a number that was observed now.
    pub fn new(pods: u32, observed_at: UnixMillis) -> Self {
        Self { pods, observed_at, ready_at: None }
    }
}

/// PodAutoscaler of a scaled Service, as the API server holds it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AutoscalerRecord {
    /// UID of the object that controls it: of the workload, or of the Service without one.
    pub owner_uid: Option<Box<str>>,
    /// Ports at the activators, by its annotation.
    pub ports: Vec<ActivatorPort>,
    /// True once it is being deleted.
    pub is_terminating: bool,
}

/// Port of a Service, with its own port at the activators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActivatorPort {
    /// Port that clients connect to.
    pub service_port: NonZeroU16,
    /// Port at the activators that identifies it.
    pub activator_port: NonZeroU16,
}

/// State of the EndpointSlices by which kube-proxy leads connections to activators.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ActivatorSliceState {
    /// True if there should be such slices, since kube-proxy may have no pod.
    pub are_wanted: bool,
    /// Moment since which the kubelet has reported a serving pod as ready; `None`: there is none.
    pub pod_ready_since: Option<UnixMillis>,
}

/// Containers of one pod of a scaled Service, as its routes depend on them. Pods of one workload may differ.
#[derive(Clone, Debug, PartialEq)]
pub struct PodLayout {
    /// Template of a Revision with these containers, as JSON.
    pub template: Arc<str>,
    /// Ports of the pod to which the Service leads, sorted by the port of the Service.
    pub ports: Box<[PodPort]>,
}
