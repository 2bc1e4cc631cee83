//! Pure: state of a Revision and of its pods.

use std::{net::SocketAddr, sync::Arc};

use common::{
    service_routing::TopologyHints,
    wire::{ConnectionPath, RevisionActivity},
};

use super::{
    conditions::{ConditionReason, ConditionSet, ConditionStatus, ConditionType},
    pod_resize::{PendingResize, PodResize},
    scaled_service::PodLayout,
    topology::RevisionTopology,
    values::{ObjectMetaSummary, UnixMillis},
};
use crate::model::object::REQUESTS_NOT_RESTORED;

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
    /// Routing state of the Revision, with the moment of its last change.
    pub routing: RevisionRouting,
    /// Scaling of the Revision: what was decided, and what the plans made of it.
    pub scaling: RevisionScaling,
    /// Reason why the pods do not become ready; kept until one does.
    pub failure: Option<Box<ConditionReason>>,
    /// Reason why Kubernetes makes no pods for the Revision.
    pub blocked_reason: Option<Box<ConditionReason>>,
    /// Image digests by container name, once known.
    pub digests: Box<[(Box<str>, Box<str>)]>,
    /// Pods of the Revision, including those that drain.
    pub pods: Vec<RevisionPod>,
    /// Hints of the ready pods; `None` without one, or if the service asks for no hints.
    pub topology: Option<Box<RevisionTopology>>,
    /// Conditions of the Revision's status.
    pub conditions: ConditionSet,
    /// True once the Revision is being deleted: the controller makes nothing for it any more, and its pods drain.
    pub is_terminating: bool,
    /// True once the object is deleted while pods still answer their last requests.
    pub is_deleted: bool,
    /// True if no Configuration owns the Revision: a user deleted that with `--cascade=orphan`. The Revision still
    /// serves and scales.
    pub is_orphan: bool,
    /// True if the Revision stands for the workload of a scaled Service, whose name it has. No object of the API is
    /// this Revision, and none is made for it.
    pub is_scaled_service: bool,
}

/// Scaling of one Revision.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RevisionScaling {
    /// True once the Revision has reached its initial scale.
    pub initial_scale_reached: bool,
    /// Start of the wait for the initial scale, by this controller's clock, since the API server's may differ; 0: not
    /// yet.
    pub first_planned_at: UnixMillis,
    /// The scale decision in force, once there is one.
    pub decision: Option<CurrentDecision>,
    /// Requested scale of the latest plan. Before a leader's first plan: the pods that ran when it became leader.
    pub requested_scale: u32,
    /// Number of pods of the requested scale that stand by: those beyond the pods that load needs.
    pub standby_scale: u32,
    /// Reason for which no pod stands by until the Revision wakes; `None`: the policy alone decides.
    pub standby_stop: Option<Box<StandbyStop>>,
    /// Number of pods ready at the latest plan.
    pub actual_scale: u32,
    /// Number of pods ever made for the Revision.
    pub pods_created: u32,
    /// True while the Deployment reports that Kubernetes refuses its pods. Every replica observes this cause of
    /// [`AppRevision::blocked_reason`]; the others are the leader's own.
    pub has_replica_failure: bool,
    /// True if the latest plan found a failure of the Revision that every replica can observe.
    pub is_failing: bool,
    /// True if the Revision object's status reports an exceeded progress deadline.
    pub is_deadline_reported: bool,
    /// Earliest moment for another pod, after the last one vanished at once.
    pub retry_at: UnixMillis,
}

/// Stop of standby for one Revision, from a failure or the end of a pod's time until the next wake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StandbyStop {
    /// Reason for users.
    pub reason: ConditionReason,
    /// True once the Revision has needed no pod since. Its next need of one is a wake, and ends the stop.
    pub has_slept: bool,
}

impl StandbyStop {
    /// Reason of a Revision with a pod that its agent could not freeze.
    pub const FREEZE_FAILED: &str = "FreezeFailed";
    /// Reason of a Revision with a pod that was frozen for as long as `rouse.dev/standby-ttl` allows.
    pub const TIME_OVER: &str = "StandbyTimeOver";

    /// Returns the stop that an earlier leader has reported in a Revision's conditions.
    ///
    /// It is over as soon as the Revision needs a pod: at worst one more freeze fails.
    pub fn from_conditions(conditions: &ConditionSet) -> Option<Box<Self>> {
        let ConditionStatus::False(reason) = conditions.get(ConditionType::RevisionStandby) else {
            return None;
        };
        let stops = [Self::FREEZE_FAILED, Self::TIME_OVER, REQUESTS_NOT_RESTORED];
        let is_stop = stops.contains(&&*reason.reason);
        is_stop.then(|| Box::new(Self { reason, has_slept: true }))
    }
}

impl AppRevision {
    /// Counts the pods that serve, or will once they are ready.
    pub fn serving_pods(&self) -> u32 {
        let serving = self.pods.iter().filter(|pod| pod.stage == PodStage::Serving).count();
        u32::try_from(serving).unwrap_or(u32::MAX)
    }

    /// Counts the pods that have a standby order.
    pub fn ordered_pods(&self) -> u32 {
        let ordered = self.pods.iter().filter(|pod| pod.has_standby_order()).count();
        u32::try_from(ordered).unwrap_or(u32::MAX)
    }

    /// Counts the pods that are frozen, as far as users see it: the short thaw for a probe does not count.
    pub fn frozen_pods(&self) -> u32 {
        let frozen = self.pods.iter().filter(|pod| pod.is_frozen).count();
        u32::try_from(frozen).unwrap_or(u32::MAX)
    }

    /// Returns the hints of the pod with this name.
    pub fn topology_hints(&self, pod: &str) -> TopologyHints {
        let hinted = self.topology.as_ref().and_then(|topology| {
            let at = topology.pods.binary_search_by(|it| (*it.name).cmp(pod)).ok()?;
            Some(topology.pods[at].hints.clone())
        });
        hinted.unwrap_or_default()
    }

    /// Returns true if there are pods, none is ready, and the Revision has failed. It then scales as if no Route named
    /// it, so that no minimum scale keeps pods crashing forever (knative/serving
    /// `pkg/reconciler/revision/resources/pa.go`).
    pub fn is_stuck(&self) -> bool {
        // Only values that every replica has. The requested scale and the errors of writes are known to the leader
        // alone, so with them the RouteTables of the replicas would differ.
        self.scaling.is_failing && self.scaling.actual_scale == 0 && self.serving_pods() > 0
    }
}

/// Routing state of a Revision, with the moment of its last change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RevisionRouting {
    /// Present state.
    pub state: RoutingState,
    /// Moment at which the state changed last.
    pub changed_at: UnixMillis,
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

/// The part of a [`ScaleDecision`](common::wire::ScaleDecision) that is in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CurrentDecision {
    /// Requested scale; `None`: the present number of pods is kept.
    pub requested_scale: Option<u32>,
    /// Path of new connections: direct, or through an activator.
    pub path: ConnectionPath,
    /// Activity of the Revision, shown in its `Active` condition.
    pub activity: RevisionActivity,
    /// True if requests were in flight or waiting within the window of the decision.
    pub has_load: bool,
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
    /// True once requests may have been sent to the pod: it has been ready, or the RouteTable has stated that it awaits
    /// the report of its agent.
    pub may_have_requests: bool,
    /// The current uninterrupted readiness, and the one before.
    pub steady_readiness: SteadyReadiness,
    /// Stage of the pod: serving, draining or stopping.
    pub stage: PodStage,
    /// Moment of the standby order, by which the agent freezes the pod while nothing uses it; `None`: the pod runs.
    pub standby_since: Option<UnixMillis>,
    /// True if the agent has frozen the pod by its order and no request has thawed it since. The answer to a probe of
    /// the kubelet, for which the pod thaws for a moment, does not change it, nor does a restart of the agent.
    pub is_frozen: bool,
    /// Requests that the pod should have, once it was frozen; `None`: it keeps those that it has. Only the leader's are
    /// in use.
    pub resize: Option<Box<PodResize>>,
    /// True while the pod may be frozen and its agent, which alone would thaw it, does not report.
    pub is_unreachable: bool,
    /// True if the API server does not delete the pod, asked after its kubelet had asked to stop a container. So the
    /// container restarts. Each replica has its own answer, for as long as the agent reports the kubelet's request.
    pub restarts_container: bool,
    /// Address at which the pod served before this controller started, until its agent reports.
    pub restored_address: Option<SocketAddr>,
    /// State of the pod on Kubernetes; `None` on the local node.
    pub kube_status: Option<Box<KubePodStatus>>,
    /// Containers of the pod as a template, with their ports; `None`: they are those of the Revision.
    pub layout: Option<Arc<PodLayout>>,
}

/// Readiness of a pod that no restart of a container has interrupted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SteadyReadiness {
    /// Moment at which it began; `None`: the pod is not ready.
    pub since: Option<UnixMillis>,
    /// Sum of the containers' restart counts at that moment.
    pub restarts: u32,
    /// Length of the pod's last readiness that ended, in milliseconds; 0: none has ended.
    pub previous_ms: u64,
}

impl RevisionPod {
    /// Returns a pod that serves from now on and has not been ready, and of which Kubernetes has reported nothing.
    pub fn new(uid: Box<str>, name: Box<str>, created: UnixMillis) -> Self {
        Self {
            uid,
            name,
            created,
            first_seen_at: UnixMillis::default(),
            was_ready: false,
            may_have_requests: false,
            steady_readiness: SteadyReadiness::default(),
            stage: PodStage::Serving,
            standby_since: None,
            is_frozen: false,
            resize: None,
            is_unreachable: false,
            restarts_container: false,
            restored_address: None,
            kube_status: None,
            layout: None,
        }
    }

    /// Returns true if the agent of the pod's node is to freeze the pod. One that drains must end its last requests.
    pub fn has_standby_order(&self) -> bool {
        self.stage == PodStage::Serving && self.standby_since.is_some()
    }

    /// Returns true if the pod may get a standby order. A node that could not restore the requests of a pod once might
    /// refuse them after the next wake, too.
    pub fn may_stand_by(&self) -> bool {
        let is_restored = self.resize.as_ref().is_none_or(|it| it.restoration_refusal.is_none());
        is_restored && !self.is_debugged()
    }

    /// Returns true if a user debugs the pod by an ephemeral container, which would be frozen with the pod.
    pub fn is_debugged(&self) -> bool {
        self.kube_status.as_ref().is_some_and(|it| it.has_debug_container)
    }

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
    /// True if readiness also depends on conditions of other controllers. A template has none; a webhook may add some.
    pub has_readiness_gates: bool,
    /// True once the pod has a deletion timestamp.
    pub is_terminating: bool,
    /// True while the pod is about to end by an eviction, a preemption or the kubelet itself, deleted or not.
    pub is_disrupted: bool,
    /// Start of draining, as the leader noted it on the pod.
    pub draining_since: Option<UnixMillis>,
    /// Moment of the standby order, as the leader noted it on the pod.
    pub standby_since: Option<UnixMillis>,
    /// True while the pod has the note of its original requests: its requests are reduced, or being restored.
    pub has_reduced_requests: bool,
    /// Resize that the kubelet has not allocated.
    pub pending_resize: Option<Box<PendingResize>>,
    /// True while an ephemeral container, as of `kubectl debug`, runs or is about to.
    pub has_debug_container: bool,
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
