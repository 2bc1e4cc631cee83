//! Pure: facts → Knative's conditions (knative/serving `pkg/apis/serving/v1/*_lifecycle.go`).
//!
//! One thing differs: the conditions name a crashing container or a missing image at once. Knative waits for the
//! progress deadline, ten minutes by default, which helps no user.

use common::{
    node::{LocalContainerState, LocalPodPhase, LocalPodStatus},
    wire::{NamespacedName, RevisionActivity},
};

use super::{PlanTimer, RevisionPlanContext, host_name, routes::target_of, scale};
use crate::{
    children::tagged,
    kube::cache::hash,
    policy::AutoscalerClass,
    render::{self, KnativeObjectKind},
    world::{
        AppRevision, AppState, ClusterIpSource, ClusterState, ConditionReason, ConditionStatus,
        ConditionType, KubeletReadiness, ObjectOwner, PlatformKind, PodStage, RevisionPod,
        RouteNameAllocation, RoutingState, ServiceState, TrafficSpec, UnixMillis,
        names::NameClaimant,
    },
};

/// Time until activators that are waited for are checked again, in milliseconds.
const ROUTED_MS: u64 = 500;

/// Restarts after which requests no longer wait for a crashing container.
const HOPELESS_RESTARTS: u32 = 3;

/// Reason of a Revision with an image that cannot be found.
pub(crate) const CONTAINER_MISSING: &str = "ContainerMissing";

/// Reason of a Revision whose first pod takes longer than a start should.
const NOT_READY: &str = "ContainerNotReady";

/// Reason of a Revision that missed its initial scale within the progress deadline.
const LATE: &str = "ProgressDeadlineExceeded";

/// Returns true while image digests are not resolved yet: until then no pod of the Revision starts.
fn resolves(revision: &AppRevision, view: &RevisionPlanContext<'_>) -> bool {
    view.world.settings.platform == PlatformKind::Kubernetes && revision.digests.is_empty()
}

/// Updates a Revision by the state of its pods and sets its conditions.
pub(super) fn revision(
    revision: &mut AppRevision,
    view: &RevisionPlanContext<'_>,
    timer: &mut PlanTimer,
) {
    for pod in &mut revision.pods {
        if pod.met == UnixMillis::default() {
            pod.met = view.now;
        }
        pod.was_ready |= scale::is_ready(pod, view);
        scale::note_steady(pod, view);
    }
    if revision.met == UnixMillis::default() {
        revision.met = view.now;
    }
    let ready = scale::ready(revision, view);
    let proven = scale::proven(revision, view, timer);
    revision.actual = ready;
    let policy = &view.facts.policy;
    let least = if revision.routing.0 == RoutingState::Reserve { 0 } else { policy.min_scale };
    digests(revision, view);
    // The kernel reports readiness earlier than the kubelet: the minimum must also hold for readers of Kubernetes'
    // objects.
    let is_met = proven >= policy.initial_scale.max(least) && confirmed(revision, view) >= least;
    revision.reached |= !resolves(revision, view) && is_met;
    let failure = revision.pods.iter().find_map(|pod| failure(pod, view));
    // Only a proven pod clears the failure: a container that crashes again and again is ready in between.
    match failure {
        _ if proven > 0 => revision.failure = None,
        Some(why) => revision.failure = Some(Box::new(why)),
        None => {}
    }
    let slow = (ready == 0).then(|| slow_start(revision, view, timer)).flatten();
    let resources = resources(revision, slow.as_ref(), view, timer);
    let healthy = healthy(revision, slow, view);
    let conditions = &mut revision.conditions;
    conditions.set(ConditionType::RevisionResources, resources, view.now);
    conditions.set(ConditionType::RevisionHealthy, healthy, view.now);
    // The container's own failure explains more than the exceeded deadline, so its condition comes first.
    let whole =
        conditions.ready(&[ConditionType::RevisionHealthy, ConditionType::RevisionResources]);
    conditions.set(ConditionType::RevisionReady, whole, view.now);
    let active = match view.facts.class {
        AutoscalerClass::Kpa => active(revision, ready),
        // Such Revisions never scale to zero (knative/serving `pkg/reconciler/autoscaling/hpa/hpa.go`).
        AutoscalerClass::Hpa | AutoscalerClass::Foreign => ConditionStatus::True(None),
    };
    revision.conditions.set(ConditionType::RevisionActive, active, view.now);
    annotations(revision, view);
}

/// Sets the condition about annotations that are not in force. It is absent until some were refused once.
fn annotations(revision: &mut AppRevision, view: &RevisionPlanContext<'_>) {
    let truth = match &view.facts.dropped {
        Some(dropped) => {
            let message =
                format!("Not allowed by config-autoscaler, and without effect: {dropped}");
            ConditionStatus::False(ConditionReason::new("NotAllowed", message))
        }
        None if revision.conditions.has(ConditionType::RevisionAnnotations) => {
            ConditionStatus::True(None)
        }
        None => return,
    };
    revision.conditions.set(ConditionType::RevisionAnnotations, truth, view.now);
}

/// Counts the pods that are ready for readers of Kubernetes' objects, such as the Endpoints of `<revision>-private`:
/// the kernel reports readiness earlier than the kubelet.
fn confirmed(revision: &AppRevision, view: &RevisionPlanContext<'_>) -> u32 {
    if view.world.settings.platform == PlatformKind::Local {
        return u32::MAX;
    }
    let serving = revision.pods.iter().filter(|pod| pod.stage == PodStage::Serving);
    let placed = serving.filter_map(|pod| pod.placed.as_ref());
    let ready = placed.filter(|it| it.kubelet == KubeletReadiness::Ready && !it.deleted).count();
    u32::try_from(ready).unwrap_or(u32::MAX)
}

fn deploying() -> ConditionStatus {
    ConditionStatus::Unknown(Some(ConditionReason::new("Deploying", "")))
}

fn resources(
    revision: &AppRevision,
    slow: Option<&ConditionReason>,
    view: &RevisionPlanContext<'_>,
    timer: &mut PlanTimer,
) -> ConditionStatus {
    if revision.reached {
        return ConditionStatus::True(None);
    }
    if let Some(why) = &revision.blocked {
        return ConditionStatus::False((**why).clone());
    }
    if let Some(why) = unschedulable(revision, view) {
        return ConditionStatus::False(why);
    }
    let deadline = view.facts.policy.progress_deadline.as_millis().try_into().unwrap_or(u64::MAX);
    let late = timer.passed(revision.met.plus_ms(deadline), view.now);
    // A restarted controller does not begin the wait again.
    let was_late = said_late(revision).is_some();
    if late
        || was_late
        || revision.decided.is_some_and(|it| it.activity == RevisionActivity::TimedOut)
    {
        return ConditionStatus::False(given_up(revision, slow));
    }
    deploying()
}

/// Returns the scheduler's reason for a pod without a node. `always_schedulable` promises that the cluster grows for
/// such pods; then there is no reason to report.
fn unschedulable(
    revision: &AppRevision,
    view: &RevisionPlanContext<'_>,
) -> Option<ConditionReason> {
    let waits = view.world.settings.configs.deployment.always_schedulable;
    let placed = revision.pods.iter().filter_map(|pod| pod.placed.as_ref());
    placed.filter(|_| !waits).find_map(|it| it.unschedulable.clone())
}

/// Returns the reason of the present condition, if it is an exceeded deadline.
fn said_late(revision: &AppRevision) -> Option<ConditionReason> {
    match revision.conditions.get(ConditionType::RevisionResources) {
        ConditionStatus::False(why) if why.reason == LATE => Some(why),
        ConditionStatus::False(_) | ConditionStatus::Unknown(_) | ConditionStatus::True(_) => None,
    }
}

/// Returns the reason for a missed initial scale: Knative's message, and the cause of the delay where it is known.
fn given_up(revision: &AppRevision, slow: Option<&ConditionReason>) -> ConditionReason {
    const NEVER: &str = "Initial scale was never achieved";
    match revision.failure.as_deref().or(slow) {
        Some(why) => ConditionReason::new(LATE, format!("{NEVER}: {}", why.message)),
        // The pods may be gone by now, and with them the cause; the present condition may still hold it.
        None => said_late(revision).unwrap_or_else(|| ConditionReason::new(LATE, NEVER)),
    }
}

fn healthy(
    revision: &AppRevision,
    slow: Option<ConditionReason>,
    view: &RevisionPlanContext<'_>,
) -> ConditionStatus {
    if let Some(why) = &revision.failure {
        return ConditionStatus::False((**why).clone());
    }
    if resolves(revision, view) {
        return ConditionStatus::Unknown(Some(ConditionReason::new("ResolvingDigests", "")));
    }
    match slow {
        Some(why) => ConditionStatus::Unknown(Some(why)),
        None if revision.reached => ConditionStatus::True(None),
        None => deploying(),
    }
}

/// Returns the reason why none of a Revision's pods is ready, taken from the first pod that takes too long.
fn slow_start(
    revision: &AppRevision,
    view: &RevisionPlanContext<'_>,
    timer: &mut PlanTimer,
) -> Option<ConditionReason> {
    let said = revision.conditions.get(ConditionType::RevisionHealthy);
    // A restarted controller keeps a reason that its predecessor has reported.
    let is_said = matches!(said, ConditionStatus::Unknown(Some(why)) if why.reason == NOT_READY);
    let serving = revision.pods.iter().filter(|pod| pod.stage == PodStage::Serving);
    let mut slow = serving.filter(|it| is_said || timer.passed(scale::slow_at(it), view.now));
    slow.find_map(|pod| unready(pod, view))
}

/// Returns the reason why a slow pod is not ready.
fn unready(pod: &RevisionPod, view: &RevisionPlanContext<'_>) -> Option<ConditionReason> {
    let status = view.world.statuses.get(&*pod.uid);
    let seen = view.world.seen.get(&*pod.uid);
    // The agent's own reason is the most exact: it runs the probe.
    if let Some(trouble) = seen.map(|seen| &seen.trouble).filter(|trouble| !trouble.is_empty()) {
        return Some(ConditionReason::new(NOT_READY, trouble.clone()));
    }
    let runs = status.is_some_and(|it| it.phase == LocalPodPhase::Running);
    let listens = seen.is_some_and(|seen| seen.listening);
    let message = match (runs, listens) {
        (true, false) => format!(
            "The container runs but nothing listens on port {port}: let it listen on $PORT ({port}) or set containerPort to the port it uses",
            port = view.facts.port
        ),
        (true, true) => "The container listens but its readiness probe does not pass: check the probe's path and port, and the container's log".into(),
        (false, _) => waiting(status)?,
    };
    Some(ConditionReason::new(NOT_READY, message))
}

fn waiting(status: Option<&LocalPodStatus>) -> Option<String> {
    let waits = |state: &LocalContainerState| match state {
        LocalContainerState::Waiting { message, .. } if !message.is_empty() => {
            Some(message.clone())
        }
        LocalContainerState::Waiting { .. }
        | LocalContainerState::Running
        | LocalContainerState::Terminated { .. } => None,
    };
    status?.containers.iter().find_map(|container| waits(&container.state))
}

/// Returns the reason that keeps a container of the pod from running, if there is one.
fn failure(pod: &RevisionPod, view: &RevisionPlanContext<'_>) -> Option<ConditionReason> {
    let status = view.world.statuses.get(&*pod.uid).filter(|_| pod.stage == PodStage::Serving)?;
    status.containers.iter().find_map(|container| match &container.state {
        LocalContainerState::Running => None,
        LocalContainerState::Terminated { code, message, .. } => Some(exited(*code, message)),
        LocalContainerState::Waiting { last_exit: Some(code), message, .. } => {
            Some(exited(*code, message))
        }
        LocalContainerState::Waiting { reason, message, last_exit: None } => {
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

fn exited(code: i32, message: &str) -> ConditionReason {
    let message = match message.trim() {
        "" => "Container failed with: no message; see its log, and check command and args".into(),
        text => format!("Container failed with: {text}"),
    };
    ConditionReason::new(format!("ExitCode{code}"), message)
}

/// Returns true if requests should not wait for a Revision at present: no pod is ready, and each has crashed repeatedly
/// or cannot get its image. Requests then get 503 at once instead of 504 at their deadline. When the pods have been
/// scaled away, the next request tries again.
pub(super) fn is_hopeless(revision: &AppRevision, view: &RevisionPlanContext<'_>) -> bool {
    let mut serving = revision.pods.iter().filter(|it| it.stage == PodStage::Serving).peekable();
    if serving.peek().is_none() || scale::ready(revision, view) > 0 {
        return false;
    }
    serving.all(|pod| {
        let status = view.world.statuses.get(&*pod.uid);
        let containers = status.into_iter().flat_map(|status| &status.containers);
        containers.into_iter().any(|container| match &container.state {
            LocalContainerState::Waiting { reason, .. } => {
                let image = ["ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"];
                image.contains(&reason.as_str()) || container.restarts >= HOPELESS_RESTARTS
            }
            LocalContainerState::Running | LocalContainerState::Terminated { .. } => false,
        })
    })
}

fn active(revision: &AppRevision, ready: u32) -> ConditionStatus {
    let idle = || ConditionStatus::False(ConditionReason::NO_TRAFFIC);
    let queued = "Requests to the target are being buffered as resources are provisioned.";
    let queued = || ConditionStatus::Unknown(Some(ConditionReason::new("Queued", queued)));
    match revision.decided.map(|it| it.activity) {
        Some(RevisionActivity::Active) => ConditionStatus::True(None),
        Some(RevisionActivity::Activating) => queued(),
        Some(RevisionActivity::Inactive) => idle(),
        Some(RevisionActivity::TimedOut) => ConditionStatus::False(ConditionReason::new(
            "TimedOut",
            "The target could not be activated.",
        )),
        None if ready > 0 => ConditionStatus::True(None),
        None if revision.reached => idle(),
        None => deploying(),
    }
}

fn digests(revision: &mut AppRevision, view: &RevisionPlanContext<'_>) {
    if !revision.digests.is_empty() {
        return;
    }
    let statuses = revision.pods.iter().filter_map(|pod| view.world.statuses.get(&*pod.uid));
    // An image may be resolved for some containers only: digests count when all of a pod's are known.
    let known = |status: &LocalPodStatus| {
        let all = status.containers.iter();
        let digests = all.map(|it| {
            it.image_digest.as_ref().map(|digest| (it.name.as_str().into(), digest.as_str().into()))
        });
        digests.collect::<Option<Box<[_]>>>()
    };
    if let Some(found) = statuses.filter_map(known).find(|found| !found.is_empty()) {
        revision.digests = found;
    }
}

/// Sets the Configuration's condition: it is ready if its newest Revision is.
pub(super) fn configuration(app: &mut AppState, now: UnixMillis) {
    if app.configuration.is_none() {
        return;
    }
    let ready = app
        .latest_created()
        .map(|it| (it.name.clone(), it.conditions.get(ConditionType::RevisionReady)));
    let refused = app.service.as_ref().and_then(|it| it.refused.as_deref());
    let truth = match (ready, refused) {
        (_, Some(refused)) => {
            ConditionStatus::False(ConditionReason::new("InvalidManifest", refused.to_owned()))
        }
        (None, None) => ConditionStatus::Unknown(None),
        (Some((_, ConditionStatus::True(_))), None) => ConditionStatus::True(None),
        (Some((_, ConditionStatus::Unknown(why))), None) => ConditionStatus::Unknown(why),
        (Some((name, ConditionStatus::False(why))), None) => {
            let message = format!("Revision {name:?} failed with message: {}.", why.message);
            ConditionStatus::False(ConditionReason::new("RevisionFailed", message))
        }
    };
    app.conditions.set(ConditionType::ConfigurationReady, truth, now);
}

/// Sets the Route's conditions, except `AllTrafficAssigned`, which was set with its traffic. Only the leader allocates
/// numbers: on other replicas a name without them waits for it.
pub(super) fn route(
    app: &mut AppState,
    name: &NamespacedName,
    world: &ClusterState,
    now: UnixMillis,
    timer: &mut PlanTimer,
) {
    let not_owned = not_owned(app, name, world);
    let Some(route) = &app.route else { return };
    let allots = world.leads;
    let names = 1 + route.traffic.iter().filter(|it| it.tag.is_some()).count();
    let unaddressed = |it: &RouteNameAllocation| matches!(&it.addresses, ClusterIpSource::Given(none) if none.is_empty());
    let ingress = if let Some(why) = &route.blocked {
        ConditionStatus::False((**why).clone())
    } else if let Some(why) = not_owned {
        ConditionStatus::False(why)
    } else if route.traffic.is_empty()
        || route.allotted.iter().any(unaddressed)
        || (route.allotted.len() < names && !allots)
    {
        not_configured()
    } else if route.allotted.len() < names {
        let message = "No ClusterIP or activator port is left: delete a service or a tag";
        ConditionStatus::False(ConditionReason::new("NoAddressLeft", message))
    } else if route.rollout.is_some() {
        ConditionStatus::Unknown(Some(ConditionReason::new(
            "RolloutInProgress",
            "A gradual rollout of the latest revision(s) is in progress.",
        )))
    } else if !app.conditions.is_true(ConditionType::RouteIngress) && !is_routed(app, name, world) {
        // An activator's report triggers the next plan; the timer covers an activator that ends without one.
        let _ = timer.passed(now.plus_ms(ROUTED_MS), now);
        not_configured()
    } else {
        ConditionStatus::True(None)
    };
    app.conditions.set(ConditionType::RouteIngress, ingress, now);
    app.conditions.set(
        ConditionType::RouteCertificate,
        ConditionStatus::True(Some(ConditionReason::NO_TLS)),
        now,
    );
    let on =
        [ConditionType::RouteTraffic, ConditionType::RouteIngress, ConditionType::RouteCertificate];
    let ready = app.conditions.ready(&on);
    app.conditions.set(ConditionType::RouteReady, ready, now);
}

fn not_configured() -> ConditionStatus {
    let message = "Ingress has not yet been reconciled.";
    ConditionStatus::Unknown(Some(ConditionReason::new("IngressNotConfigured", message)))
}

/// Returns true if every activator routes requests for each of the Route's names to some Revision. A client may connect
/// to any activator as soon as the Route is ready, and activators may follow another replica than the leader.
fn is_routed(app: &AppState, name: &NamespacedName, world: &ClusterState) -> bool {
    let own = |it: &RouteNameAllocation| {
        NamespacedName::new(name.namespace.clone(), host_name(it, &name.name))
    };
    app.allotted().iter().all(|it| world.followers.all_route(&own(it)))
}

/// Returns the reason if one of the Route's names belongs to another owner.
fn not_owned(
    app: &AppState,
    name: &NamespacedName,
    world: &ClusterState,
) -> Option<ConditionReason> {
    let route = app.route.as_ref().filter(|_| !app.ends(world.settings.platform))?;
    let tags = route.wanted.iter().filter_map(|it| it.tag.as_deref()).map(Some);
    [None].into_iter().chain(tags).find_map(|tag| {
        let own = NamespacedName::new(name.namespace.clone(), tagged(tag, &name.name));
        let owner = world.names.owner(&own, &world.placeholders)?;
        if owner.by != NameClaimant::Route(name.clone()) {
            let what = format!("There is an existing placeholder Service {:?}", own.name);
            return Some(ConditionReason::new("NotOwned", format!("{what} that we do not own.")));
        }
        let host = target_of(app, name, tag, world).filter(|it| !it.is_local)?.host;
        // A host has no owner yet while the placeholder of its tag does not exist.
        let owner = world.names.host_owner(&host, &world.placeholders)?;
        let message = || format!("The host {host:?} is already in use by {}.", owner.by);
        (owner.to != own).then(|| ConditionReason::new("NotOwned", message()))
    })
}

/// Sets the Service's conditions from its Configuration and its Route.
pub(super) fn service(app: &mut AppState, name: &NamespacedName, now: UnixMillis) {
    let Some(service) = &app.service else { return };
    let foreign = |kind: &str, owner: Option<ObjectOwner>| {
        let message = format!("There is an existing {kind} {:?} that we do not own.", name.name);
        let foreign = matches!(owner, Some(ObjectOwner::Nobody | ObjectOwner::Other));
        foreign.then(|| ConditionStatus::False(ConditionReason::new("NotOwned", message)))
    };
    let refused = service.refused.as_deref();
    let refused = refused
        .map(|why| ConditionStatus::False(ConditionReason::new("InvalidManifest", why.to_owned())));
    // Child objects may be of an older Service: their conditions must not count as those of the new one.
    let configuration = foreign("Configuration", app.configuration.as_ref().map(|it| it.owner))
        .or(refused)
        .or_else(|| configuration_is_behind(app, service, name).then(|| behind("Configuration")))
        .unwrap_or_else(|| app.conditions.get(ConditionType::ConfigurationReady));
    let route = foreign("Route", app.route.as_ref().map(|it| it.owner))
        .or_else(|| route_is_behind(app, service, name).then(|| behind("Route")))
        .unwrap_or_else(|| app.conditions.get(ConditionType::RouteReady));
    let route = match route {
        ConditionStatus::True(_) if !is_migrated(app) => {
            ConditionStatus::Unknown(Some(ConditionReason::new(
                "TrafficNotMigrated",
                "Traffic is not yet migrated to the latest revision.",
            )))
        }
        route => route,
    };
    app.conditions.set(ConditionType::ServiceConfigurations, configuration, now);
    app.conditions.set(ConditionType::ServiceRoutes, route, now);
    let ready =
        app.conditions.ready(&[ConditionType::ServiceConfigurations, ConditionType::ServiceRoutes]);
    app.conditions.set(ConditionType::ServiceReady, ready, now);
}

/// Returns the status of a Service while a child object still reflects an older manifest.
fn behind(kind: &str) -> ConditionStatus {
    let why = format!("The {kind} is still working to reflect the latest desired specification.");
    ConditionStatus::Unknown(Some(ConditionReason::new("OutOfDate", why)))
}

/// Returns true if the observed Configuration was made of an older manifest of the Service.
///
/// The hash of the applied object decides. Another webhook may add to the template, and that causes no write.
fn configuration_is_behind(app: &AppState, service: &ServiceState, name: &NamespacedName) -> bool {
    let Some(seen) = app.configuration.as_ref() else { return false };
    seen.template != service.manifest.template
        && seen
            .applied
            .is_some_and(|it| it != made(KnativeObjectKind::Configuration, service, name))
}

/// Returns true if the observed Route was made of an older manifest of the Service.
fn route_is_behind(app: &AppState, service: &ServiceState, name: &NamespacedName) -> bool {
    let Some(seen) = app.route.as_ref() else { return false };
    let own = |it: &TrafficSpec| it.configuration.as_deref().is_none_or(|it| name.name == *it);
    let same = |(seen, asked): (&TrafficSpec, &TrafficSpec)| {
        (&seen.tag, &seen.revision, seen.percent) == (&asked.tag, &asked.revision, asked.percent)
            && own(seen)
    };
    let asked = &service.manifest.traffic;
    let is_same = seen.wanted.len() == asked.len() && seen.wanted.iter().zip(&**asked).all(same);
    !is_same && seen.applied.is_some_and(|it| it != made(KnativeObjectKind::Route, service, name))
}

/// Returns the hash of the object that is applied for a Service.
fn made(kind: KnativeObjectKind, service: &ServiceState, name: &NamespacedName) -> u64 {
    hash(&render::made_for_service(kind, service, name))
}

/// Returns true if all targets that follow the latest ready Revision have moved to it.
fn is_migrated(app: &AppState) -> bool {
    let latest = app.latest_ready();
    app.traffic().iter().filter(|it| it.latest).all(|it| Some(&*it.revision) == latest)
}
