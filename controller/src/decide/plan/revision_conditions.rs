//! Pure: states of a Revision's pods → its conditions (knative/serving `pkg/apis/serving/v1/revision_lifecycle.go`).
//!
//! One thing differs: the conditions name a crashing container or a missing image at once. Knative waits for the
//! progress deadline, ten minutes by default, which helps no user.

use common::{
    local_node::{ContainerRunState, PodRunPhase, PodRunStatus},
    wire::RevisionActivity,
};

use super::{PlanTimer, RevisionPlanContext, readiness, standby};
use crate::model::{
    cluster_state::{
        AppRevision, ConditionReason, ConditionStatus, ConditionType, KubeletReadiness,
        PlatformKind, PodStage, RevisionPod, RoutingState, UnixMillis,
    },
    scale_policy::AutoscalerClass,
};

/// Restarts after which requests no longer wait for a crashing container.
const FAIL_FAST_RESTARTS: u32 = 3;

/// Reason of a Revision with an image that cannot be found.
pub(crate) const CONTAINER_MISSING: &str = "ContainerMissing";

/// Reason of a Revision whose first pod takes longer than a start should.
const CONTAINER_NOT_READY: &str = "ContainerNotReady";

/// Reason of a Revision that missed its initial scale within the progress deadline.
const DEADLINE_EXCEEDED: &str = "ProgressDeadlineExceeded";

/// Reason of `Active` for a Revision whose pods did not start in time.
const TIMED_OUT: &str = "TimedOut";

/// Returns true for the reasons of a condition `Active` that is false.
pub(crate) fn is_inactive_reason(reason: &ConditionReason) -> bool {
    [&*ConditionReason::NO_TRAFFIC.reason, TIMED_OUT].contains(&&*reason.reason)
}

/// Returns true while image digests are not resolved yet: until then no pod of the Revision starts.
fn is_resolving_digests(revision: &AppRevision, context: &RevisionPlanContext<'_>) -> bool {
    context.cluster.settings.platform == PlatformKind::Kubernetes && revision.digests.is_empty()
}

/// Updates a Revision by the state of its pods and sets its conditions.
pub(super) fn update_revision(
    revision: &mut AppRevision,
    context: &RevisionPlanContext<'_>,
    timer: &mut PlanTimer,
) {
    for pod in &mut revision.pods {
        if pod.first_seen_at == UnixMillis::default() {
            pod.first_seen_at = context.now;
        }
        standby::update_pod(pod, context, timer);
        pod.was_ready |= readiness::is_pod_ready(pod, context);
        // Activators may act on a report that the controller gets late, when nothing is awaited any more.
        pod.may_have_requests |= pod.was_ready || readiness::awaits_report(pod, context);
        readiness::update_steady_readiness(pod, context);
    }
    if revision.scaling.first_planned_at == UnixMillis::default() {
        revision.scaling.first_planned_at = context.now;
    }
    let ready = readiness::count_ready_pods(revision, context);
    let proven = readiness::count_proven_pods(revision, context, timer);
    revision.scaling.actual_scale = ready;
    let policy = &context.template.policy;
    let min_scale =
        if revision.routing.state == RoutingState::Reserve { 0 } else { policy.min_scale };
    adopt_pod_digests(revision, context);
    // The kernel reports readiness earlier than the kubelet: the minimum must also hold for readers of Kubernetes'
    // objects.
    let is_met = proven >= policy.initial_scale.max(min_scale)
        && count_kubelet_ready_pods(revision, context) >= min_scale;
    revision.scaling.initial_scale_reached |= !is_resolving_digests(revision, context) && is_met;
    let failure = revision.pods.iter().find_map(|pod| pod_failure_reason(pod, context));
    // Only a proven pod clears the failure: a container that crashes again and again is ready in between.
    match failure {
        _ if proven > 0 => revision.failure = None,
        Some(reason) => revision.failure = Some(Box::new(reason)),
        None => {}
    }
    let slow = (ready == 0).then(|| slow_start_reason(revision, context, timer)).flatten();
    let unavailable = unavailable_reason(revision, slow.as_ref(), context, timer);
    let is_unavailable = is_observed_unavailable(revision, unavailable.as_ref(), context);
    let scaling = &mut revision.scaling;
    let is_refused = scaling.has_replica_failure && !scaling.initial_scale_reached;
    scaling.is_failing = revision.failure.is_some() || is_refused || is_unavailable;
    let resources = resources_status(revision, unavailable);
    let healthy = health_status(revision, slow, context);
    let conditions = &mut revision.conditions;
    conditions.set(ConditionType::RevisionResources, resources, context.now);
    conditions.set(ConditionType::RevisionHealthy, healthy, context.now);
    // The container's own failure explains more than the exceeded deadline, so its condition comes first.
    let status =
        conditions.summarize(&[ConditionType::RevisionHealthy, ConditionType::RevisionResources]);
    conditions.set(ConditionType::RevisionReady, status, context.now);
    let active = match context.template.class {
        AutoscalerClass::Kpa => active_status(revision, context),
        // Such Revisions never scale to zero (knative/serving `pkg/reconciler/autoscaling/hpa/hpa.go`).
        AutoscalerClass::Hpa | AutoscalerClass::Foreign => ConditionStatus::True(None),
    };
    revision.conditions.set(ConditionType::RevisionActive, active, context.now);
    update_annotations_condition(revision, context);
    standby::update_condition(revision, context);
}

/// Sets the condition about annotations that are not in force. It is absent until some were refused once.
fn update_annotations_condition(revision: &mut AppRevision, context: &RevisionPlanContext<'_>) {
    let status = match &context.template.ignored_annotations {
        // Admission does not check the annotations of Services, so these may have any error.
        Some(dropped) if revision.is_scaled_service => {
            let message = format!("Without effect: {dropped}");
            ConditionStatus::False(ConditionReason::new("WithoutEffect", message))
        }
        Some(dropped) => {
            let message =
                format!("Not allowed by config-autoscaler, and without effect: {dropped}");
            ConditionStatus::False(ConditionReason::new("NotAllowed", message))
        }
        None if revision.conditions.is_set(ConditionType::RevisionAnnotations) => {
            ConditionStatus::True(None)
        }
        None => return,
    };
    revision.conditions.set(ConditionType::RevisionAnnotations, status, context.now);
}

/// Counts the pods that are ready for readers of Kubernetes' objects, such as the Endpoints of `<revision>-private`:
/// the kernel reports readiness earlier than the kubelet.
fn count_kubelet_ready_pods(revision: &AppRevision, context: &RevisionPlanContext<'_>) -> u32 {
    // The local node has no such readers.
    if context.cluster.settings.platform == PlatformKind::Local {
        return u32::MAX;
    }
    let serving = revision.pods.iter().filter(|pod| pod.stage == PodStage::Serving);
    let statuses = serving.filter_map(|pod| pod.kube_status.as_ref());
    let ready = statuses
        .filter(|it| it.kubelet_readiness == KubeletReadiness::Ready && !it.is_terminating)
        .count();
    u32::try_from(ready).unwrap_or(u32::MAX)
}

fn deploying_status() -> ConditionStatus {
    ConditionStatus::Unknown(Some(ConditionReason::new("Deploying", "")))
}

/// Returns the reason why a Revision misses its initial scale, without the errors of writes. The deadline is by this
/// controller's clock.
fn unavailable_reason(
    revision: &AppRevision,
    slow: Option<&ConditionReason>,
    context: &RevisionPlanContext<'_>,
    timer: &mut PlanTimer,
) -> Option<ConditionReason> {
    if revision.scaling.initial_scale_reached {
        return None;
    }
    if let Some(reason) = unschedulable_reason(revision, context) {
        return Some(reason);
    }
    let deadline = context.template.policy.progress_deadline.as_millis();
    let deadline = deadline.try_into().unwrap_or(u64::MAX);
    let is_overdue =
        timer.is_due_or_schedule(revision.scaling.first_planned_at.plus_ms(deadline), context.now);
    // A restarted controller does not begin the wait again.
    let was_late = reported_deadline_reason(revision).is_some();
    (is_overdue || was_late || has_timed_out(revision))
        .then(|| deadline_exceeded_reason(revision, slow))
}

fn has_timed_out(revision: &AppRevision) -> bool {
    revision.scaling.decision.is_some_and(|it| it.activity == RevisionActivity::TimedOut)
}

/// Returns true if a Revision misses its initial scale for a reason that every replica can observe. `unavailable` is
/// the reason by this controller's clock.
fn is_observed_unavailable(
    revision: &AppRevision,
    unavailable: Option<&ConditionReason>,
    context: &RevisionPlanContext<'_>,
) -> bool {
    match context.cluster.settings.platform {
        // A local node has one controller.
        PlatformKind::Local => unavailable.is_some(),
        // Each replica plans the Revision first at a time of its own. The leader's clock decides, and every replica,
        // the leader too, reads the result from the status.
        PlatformKind::Kubernetes => {
            !revision.scaling.initial_scale_reached
                && (revision.scaling.is_deadline_reported
                    || has_timed_out(revision)
                    || unschedulable_reason(revision, context).is_some())
        }
    }
}

/// Returns the status of `ResourcesAvailable`; `unavailable` is the reason of [`unavailable_reason`].
fn resources_status(
    revision: &AppRevision,
    unavailable: Option<ConditionReason>,
) -> ConditionStatus {
    if revision.scaling.initial_scale_reached {
        return ConditionStatus::True(None);
    }
    let blocked = revision.blocked_reason.as_deref().cloned();
    blocked.or(unavailable).map_or_else(deploying_status, ConditionStatus::False)
}

/// Returns the scheduler's reason for a pod without a node. `always_schedulable` promises that the cluster grows for
/// such pods; then there is no reason to report.
fn unschedulable_reason(
    revision: &AppRevision,
    context: &RevisionPlanContext<'_>,
) -> Option<ConditionReason> {
    let always_schedulable = context.cluster.settings.config_maps.deployment.always_schedulable;
    let statuses = revision.pods.iter().filter_map(|pod| pod.kube_status.as_ref());
    statuses.filter(|_| !always_schedulable).find_map(|it| it.unschedulable.clone())
}

/// Returns the reason of the present condition, if it is an exceeded deadline.
pub(crate) fn reported_deadline_reason(revision: &AppRevision) -> Option<ConditionReason> {
    match revision.conditions.get(ConditionType::RevisionResources) {
        ConditionStatus::False(reason) if reason.reason == DEADLINE_EXCEEDED => Some(reason),
        ConditionStatus::False(_) | ConditionStatus::Unknown(_) | ConditionStatus::True(_) => None,
    }
}

/// Returns the reason for a missed initial scale: Knative's message, and the cause of the delay where it is known.
fn deadline_exceeded_reason(
    revision: &AppRevision,
    slow: Option<&ConditionReason>,
) -> ConditionReason {
    const NEVER: &str = "Initial scale was never achieved";
    match revision.failure.as_deref().or(slow) {
        Some(reason) => {
            ConditionReason::new(DEADLINE_EXCEEDED, format!("{NEVER}: {}", reason.message))
        }
        // The pods may be gone by now, and with them the cause; the present condition may still hold it.
        None => reported_deadline_reason(revision)
            .unwrap_or_else(|| ConditionReason::new(DEADLINE_EXCEEDED, NEVER)),
    }
}

fn health_status(
    revision: &AppRevision,
    slow: Option<ConditionReason>,
    context: &RevisionPlanContext<'_>,
) -> ConditionStatus {
    if let Some(reason) = &revision.failure {
        return ConditionStatus::False((**reason).clone());
    }
    if is_resolving_digests(revision, context) {
        return ConditionStatus::Unknown(Some(ConditionReason::new("ResolvingDigests", "")));
    }
    // A reason for a slow start explains the wait, but does not fail it.
    match slow {
        Some(reason) => ConditionStatus::Unknown(Some(reason)),
        None if revision.scaling.initial_scale_reached => ConditionStatus::True(None),
        None => deploying_status(),
    }
}

/// Returns the reason why none of a Revision's pods is ready, taken from the first pod that takes too long.
fn slow_start_reason(
    revision: &AppRevision,
    context: &RevisionPlanContext<'_>,
    timer: &mut PlanTimer,
) -> Option<ConditionReason> {
    let health = revision.conditions.get(ConditionType::RevisionHealthy);
    // A restarted controller keeps a reason that its predecessor has reported.
    let is_reported = matches!(health, ConditionStatus::Unknown(Some(reason)) if reason.reason == CONTAINER_NOT_READY);
    // A pod that its silent agent may have frozen has started, and no probe of it has failed.
    let is_starting = |pod: &&RevisionPod| pod.stage == PodStage::Serving && !pod.is_unreachable;
    let mut slow = revision.pods.iter().filter(is_starting).filter(|it| {
        is_reported || timer.is_due_or_schedule(readiness::slow_start_at(it), context.now)
    });
    slow.find_map(|pod| not_ready_reason(pod, context))
}

/// Returns the reason why a slow pod is not ready.
fn not_ready_reason(
    pod: &RevisionPod,
    context: &RevisionPlanContext<'_>,
) -> Option<ConditionReason> {
    let status = context.cluster.pods.statuses.get(&*pod.uid);
    let report = context.cluster.pods.reports.get(&*pod.uid);
    // The agent's own reason is the most exact: it runs the probe.
    if let Some(reason) =
        report.map(|report| &report.not_ready_reason).filter(|reason| !reason.is_empty())
    {
        return Some(ConditionReason::new(CONTAINER_NOT_READY, reason.clone()));
    }
    let runs = status.is_some_and(|it| it.phase == PodRunPhase::Running);
    let listens = report.is_some_and(|report| report.listening);
    let message = match (runs, listens) {
        (true, false) => no_listener_message(pod, context),
        (true, true) => "The container listens but its readiness probe does not pass: check the probe's path and port, and the container's log".into(),
        (false, _) => waiting_message(status)?,
    };
    Some(ConditionReason::new(CONTAINER_NOT_READY, message))
}

fn no_listener_message(pod: &RevisionPod, context: &RevisionPlanContext<'_>) -> String {
    // Containers of a user's own workload get no variable `PORT`.
    if let Some(template) = context.own_template(pod) {
        let port = template.port;
        return format!(
            "The container runs but nothing listens on port {port}: the Service, or the readiness probe, names it"
        );
    }
    format!(
        "The container runs but nothing listens on port {port}: let it listen on $PORT ({port}) or set containerPort to the port it uses",
        port = context.template.port
    )
}

fn waiting_message(status: Option<&PodRunStatus>) -> Option<String> {
    let waits = |state: &ContainerRunState| match state {
        ContainerRunState::Waiting { message, .. } if !message.is_empty() => Some(message.clone()),
        ContainerRunState::Waiting { .. }
        | ContainerRunState::Running
        | ContainerRunState::Terminated { .. } => None,
    };
    status?.containers.iter().find_map(|container| waits(&container.state))
}

/// Returns the reason that keeps a container of the pod from running, if there is one.
fn pod_failure_reason(
    pod: &RevisionPod,
    context: &RevisionPlanContext<'_>,
) -> Option<ConditionReason> {
    let status =
        context.cluster.pods.statuses.get(&*pod.uid).filter(|_| pod.stage == PodStage::Serving)?;
    status.containers.iter().find_map(|container| match &container.state {
        ContainerRunState::Running => None,
        ContainerRunState::Terminated { code, message, .. } => {
            Some(exit_code_reason(*code, message))
        }
        ContainerRunState::Waiting { last_exit: Some(code), message, .. } => {
            Some(exit_code_reason(*code, message))
        }
        ContainerRunState::Waiting { reason, message, last_exit: None } => {
            // Every container waits with these reasons while it starts.
            let harmless = matches!(reason.as_str(), "" | "ContainerCreating" | "PodInitializing");
            let say = || match message.as_str() {
                "" => format!("Container {} waits: {reason}", container.name),
                message => message.to_owned(),
            };
            (!harmless).then(|| ConditionReason::new(reason.clone(), say()))
        }
    })
}

fn exit_code_reason(code: i32, message: &str) -> ConditionReason {
    let message = match message.trim() {
        "" => "Container failed with: no message; see its log, and check command and args".into(),
        text => format!("Container failed with: {text}"),
    };
    ConditionReason::new(format!("ExitCode{code}"), message)
}

/// Returns true if requests should not wait for a Revision at present: no pod is ready, and each has crashed repeatedly
/// or cannot get its image. Requests then get 503 at once instead of 504 at their deadline. When the pods have been
/// scaled away, the next request tries again.
pub(super) fn should_fail_fast(revision: &AppRevision, context: &RevisionPlanContext<'_>) -> bool {
    let mut serving = revision.pods.iter().filter(|it| it.stage == PodStage::Serving).peekable();
    if serving.peek().is_none() || readiness::count_ready_pods(revision, context) > 0 {
        return false;
    }
    serving.all(|pod| {
        let status = context.cluster.pods.statuses.get(&*pod.uid);
        let containers = status.into_iter().flat_map(|status| &status.containers);
        containers.into_iter().any(|container| match &container.state {
            ContainerRunState::Waiting { reason, .. } => {
                let image_reasons = ["ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"];
                image_reasons.contains(&reason.as_str()) || container.restarts >= FAIL_FAST_RESTARTS
            }
            ContainerRunState::Running | ContainerRunState::Terminated { .. } => false,
        })
    })
}

fn active_status(revision: &AppRevision, context: &RevisionPlanContext<'_>) -> ConditionStatus {
    let idle = || ConditionStatus::False(ConditionReason::NO_TRAFFIC);
    let queued = "Requests to the target are being buffered as resources are provisioned.";
    let queued = || ConditionStatus::Unknown(Some(ConditionReason::new("Queued", queued)));
    match revision.scaling.decision.map(|it| it.activity) {
        Some(RevisionActivity::Active) => ConditionStatus::True(None),
        Some(RevisionActivity::Activating) => queued(),
        Some(RevisionActivity::Inactive) => idle(),
        Some(RevisionActivity::TimedOut) => ConditionStatus::False(ConditionReason::new(
            TIMED_OUT,
            "The target could not be activated.",
        )),
        // Pods that stand by are those of a Revision without load.
        None if standby::count_running_ready_pods(revision, context) > 0 => {
            ConditionStatus::True(None)
        }
        None if revision.scaling.initial_scale_reached => idle(),
        None => deploying_status(),
    }
}

/// Takes the digests of the images that run, if the Revision has none. On Kubernetes, digests are resolved before a pod
/// starts.
fn adopt_pod_digests(revision: &mut AppRevision, context: &RevisionPlanContext<'_>) {
    if !revision.digests.is_empty() {
        return;
    }
    let statuses =
        revision.pods.iter().filter_map(|pod| context.cluster.pods.statuses.get(&*pod.uid));
    // An image may be resolved for some containers only: digests count when all of a pod's are known.
    let digests_of = |status: &PodRunStatus| {
        let all = status.containers.iter();
        let digests = all.map(|container| {
            container
                .image_digest
                .as_ref()
                .map(|digest| (container.name.as_str().into(), digest.as_str().into()))
        });
        digests.collect::<Option<Box<[_]>>>()
    };
    if let Some(digests) = statuses.filter_map(digests_of).find(|digests| !digests.is_empty()) {
        revision.digests = digests;
    }
}
