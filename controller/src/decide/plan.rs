//! Pure: the cluster state → plans: objects, pods, routes, and the time of the next plan.
//!
//! Each app is planned alone, from what was observed about it; planning is idempotent.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use common::wire::{NamespacedName, RouteChange};

use crate::model::cluster_state::{
    AppRevision, AppState, ClusterState, ParsedTemplate, PodStage, RevisionPod, UnixMillis,
};

pub mod certificates;
pub mod client_cas;
mod conditions;
pub mod domain_mappings;
mod drain;
pub mod gateway_api;
pub(crate) mod gateway_ports;
mod gradual_rollout;
pub mod host_certificates;
pub mod ingresses;
pub mod local_tls;
mod pod_resizes;
mod readiness;
pub mod requested_certificates;
pub mod revision;
mod revision_conditions;
mod routes;
mod scale;
pub(crate) mod scaled_service;
mod standby;
mod topology;
mod traffic;

pub(crate) use revision_conditions::{
    CONTAINER_MISSING, is_inactive_reason, reported_deadline_reason,
};
pub(crate) use routes::{is_direct_path, placeholder_name, route_host, serves_tcp};
pub(crate) use topology::hint_mode;

/// Plan of one app: its desired state, its routes, and the time of the next plan.
#[derive(Clone, Debug, PartialEq)]
pub struct AppPlan {
    /// The app with its objects, statuses and pods; `None` once nothing is left of it.
    pub app: Option<AppState>,
    /// Subjects of the app in the RouteTable: Revisions, then pods, then services, so that targets come before the
    /// services that name them.
    pub routes: Vec<RouteChange>,
    /// Earliest moment at which time alone changes the plan.
    pub timer: Option<UnixMillis>,
}

/// Upper limit of passes. A plan settles in two, rarely three; a mistake here must not stop the controller.
const MAX_PASSES: usize = 6;

/// Plans one app, as of `now`.
pub fn plan_app(cluster: &ClusterState, name: &NamespacedName, now: UnixMillis) -> AppPlan {
    let Some(app_state) = cluster.apps.get(name) else {
        return AppPlan { app: None, routes: Vec::new(), timer: None };
    };
    let mut app = AppState::clone(app_state);
    if app.is_scaled_service_only() {
        return scaled_service::plan_app(app, name, cluster, now);
    }
    revision::ensure_latest_revision(&mut app, name, cluster, now);
    let mut templates = parsed_templates(&app, cluster);
    let mut timer = run_passes(&mut app, name, &templates, cluster, now);
    // Only the leader deletes. Another replica that forgot a Revision would not know it as the next leader. A Revision
    // that the writer may not delete would stay without its pods.
    let is_kept = app.configuration.as_ref().is_some_and(|it| !it.is_terminating);
    if cluster.is_leader && is_kept && cluster.is_maintained(name, &app) {
        let config = &cluster.settings.config_maps.gc;
        let collection = revision::collect_garbage(&mut app, config, now);
        // The drain of a collected Revision's pods begins in this plan, with its timers.
        if collection.has_draining_pods {
            timer = run_passes(&mut app, name, &templates, cluster, now);
        }
        if let Some(next) = collection.next_check {
            timer.is_due_or_schedule(next, now);
        }
    }
    app.revisions.retain(|it| !it.is_deleted || !it.pods.is_empty());
    scaled_service::plan_refused(&mut app, now, &mut timer);
    let has_no_object =
        !app.has_knative_object() && !app.has_lone_revision() && app.scaled.is_none();
    // On Kubernetes the API server reports the end of a Service; finalizers may keep it for long.
    let is_deleted = has_no_object || app.cascades_deletion(cluster.settings.platform);
    let ended = is_deleted && app.revisions.iter().all(|it| it.pods.is_empty());
    if ended {
        return AppPlan { app: None, routes: Vec::new(), timer: timer.0 };
    }
    // The routes come last: no later plan would remove a Revision that the app no longer has from the RouteTable.
    if templates.len() != app.revisions.len() {
        templates = parsed_templates(&app, cluster);
    }
    // By the readiness that the routes show.
    topology::update_hints(&mut app, name, &templates, cluster);
    let routes = routes::route_subjects(&app, name, &templates, cluster);
    AppPlan { app: Some(app), routes, timer: timer.0 }
}

/// Takes all steps until nothing changes any more, since a step may depend on decisions of a later one.
fn run_passes(
    app: &mut AppState,
    name: &NamespacedName,
    templates: &[Arc<ParsedTemplate>],
    cluster: &ClusterState,
    now: UnixMillis,
) -> PlanTimer {
    let mut timer = PlanTimer::default();
    for _ in 0..MAX_PASSES {
        let previous = app.clone();
        timer = PlanTimer::default();
        run_pass(app, name, templates, cluster, now, &mut timer);
        if *app == previous {
            break;
        }
    }
    timer
}

/// Returns the template of each Revision, in the order of the Revisions.
fn parsed_templates(app: &AppState, cluster: &ClusterState) -> Vec<Arc<ParsedTemplate>> {
    app.revisions.iter().map(|it| ParsedTemplate::of_revision(it, cluster)).collect()
}

/// Returns the subjects of the RouteTable for an app that is already as planned.
pub fn route_subjects(cluster: &ClusterState, name: &NamespacedName) -> Vec<RouteChange> {
    let Some(app) = cluster.apps.get(name) else { return Vec::new() };
    if app.is_scaled_service_only() {
        return scaled_service::route_subjects(app, name, cluster);
    }
    routes::route_subjects(app, name, &parsed_templates(app, cluster), cluster)
}

/// Returns the addresses of a pod that serves and is ready. `None`: it does not serve, and the plan depends on more of
/// its state.
///
/// While this result stays the same, reports of an agent about the pod change nothing in the plan.
pub(crate) fn serving_addresses(
    cluster: &ClusterState,
    name: &NamespacedName,
    uid: &str,
) -> Option<ServingAddresses> {
    let (revision, pod) = cluster.apps.get(name)?.pods().find(|(_, pod)| *pod.uid == *uid)?;
    let template = ParsedTemplate::of_revision(revision, cluster);
    let context = RevisionPlanContext::without_time(cluster, &name.namespace, &template);
    // A pod that becomes ready for the first time changes conditions, so its report needs a plan.
    let is_serving =
        pod.stage == PodStage::Serving && pod.was_ready && readiness::is_pod_ready(pod, &context);
    is_serving.then(|| routes::pod_addresses(pod, &context))
}

/// Returns true if the last report of a pod's agent changes what is planned about the pod's standby. Reports change the
/// memory of frozen pods all the time, and plans depend on it only where it changes much.
pub(crate) fn needs_standby_plan(cluster: &ClusterState, name: &NamespacedName, uid: &str) -> bool {
    let mut pods = cluster.apps.get(name).into_iter().flat_map(|app| app.pods());
    pods.find(|(_, pod)| *pod.uid == *uid).is_some_and(|(revision, pod)| {
        let template = ParsedTemplate::of_revision(revision, cluster);
        let context = RevisionPlanContext::without_time(cluster, &name.namespace, &template);
        standby::needs_plan(pod, revision, &context) || pod_resizes::needs_plan(pod, &context)
    })
}

/// Address of a pod with its port, and its address of the other IP family.
pub(crate) type ServingAddresses = (Option<SocketAddr>, Option<IpAddr>);

/// Takes every step once: conditions of Revisions and Configuration, then traffic, then numbers of pods, then
/// conditions of Route and Service.
fn run_pass(
    app: &mut AppState,
    name: &NamespacedName,
    templates: &[Arc<ParsedTemplate>],
    cluster: &ClusterState,
    now: UnixMillis,
    timer: &mut PlanTimer,
) {
    for (revision, template) in app.revisions.iter_mut().zip(templates) {
        let context = RevisionPlanContext { cluster, namespace: &name.namespace, template, now };
        scale::remove_ended_pods(revision, &context, timer);
        revision_conditions::update_revision(revision, &context, timer);
    }
    traffic::update_latest_ready(app);
    conditions::update_configuration(app, now);
    // Before its first traffic: from then on the gateway would serve the Route.
    ingresses::update_ingress_class(app, name, cluster);
    traffic::assign_traffic(app, name, cluster, now, timer);
    traffic::update_routing_states(app, name, cluster, now);
    // Only the leader decides about pods; other replicas keep the stages that it has noted on them.
    let is_app_leaving = app.cascades_deletion(cluster.settings.platform);
    for (revision, template) in
        app.revisions.iter_mut().zip(templates).filter(|_| cluster.is_leader)
    {
        let context = RevisionPlanContext { cluster, namespace: &name.namespace, template, now };
        let is_leaving = is_app_leaving || revision.is_terminating || revision.is_deleted;
        scale::scale_pods(revision, is_leaving, &context, timer);
        drain::stop_drained_pods(revision, &context, timer);
        pod_resizes::update_resizes(revision, &context);
    }
    conditions::update_route(app, name, cluster, now, timer);
    if app.route.is_some() {
        gateway_ports::update_condition(app, name, cluster, now);
    }
    conditions::update_service(app, name, now);
}

/// Inputs of the steps for one Revision.
struct RevisionPlanContext<'a> {
    cluster: &'a ClusterState,
    namespace: &'a str,
    template: &'a ParsedTemplate,
    now: UnixMillis,
}

impl<'a> RevisionPlanContext<'a> {
    /// Returns the inputs of a step whose result does not depend on the time, such as routes.
    fn without_time(
        cluster: &'a ClusterState,
        namespace: &'a str,
        template: &'a ParsedTemplate,
    ) -> Self {
        Self { cluster, namespace, template, now: UnixMillis::default() }
    }

    /// Returns the zone of a pod's node; empty when unknown.
    fn zone(&self, pod: &RevisionPod) -> String {
        let zone = pod.kube_status.as_ref().and_then(|it| self.cluster.nodes.zones.get(&*it.node));
        zone.cloned().unwrap_or_default()
    }

    /// Returns the node of a pod; empty before Kubernetes has scheduled it.
    fn node<'b>(&'b self, pod: &'b RevisionPod) -> &'b str {
        match &pod.kube_status {
            Some(status) => &status.node,
            None => &self.cluster.settings.node_name,
        }
    }

    /// Returns the template of a pod whose containers may differ from those of its Revision's other pods.
    fn own_template(&self, pod: &RevisionPod) -> Option<Arc<ParsedTemplate>> {
        pod.layout.as_ref().map(|it| ParsedTemplate::of_layout(it, self.cluster))
    }

    /// Returns the number of requests in flight in a pod, as its agent reported it last; 0 without a report.
    fn requests_in_flight(&self, pod: &RevisionPod) -> u64 {
        self.cluster.pods.reports.get(&*pod.uid).map_or(0, |report| report.in_flight)
    }

    fn revision_key(&self, revision: &AppRevision) -> NamespacedName {
        NamespacedName::new(self.namespace, &*revision.name)
    }
}

/// Earliest moment at which time alone changes the plan.
#[derive(Debug, Default)]
struct PlanTimer(Option<UnixMillis>);

impl PlanTimer {
    /// Requests another plan at `at`, unless that has passed. Returns true if it has.
    fn is_due_or_schedule(&mut self, at: UnixMillis, now: UnixMillis) -> bool {
        if at > now {
            self.0 = Some(self.0.map_or(at, |earliest| earliest.min(at)));
        }
        at <= now
    }
}

#[cfg(test)]
mod tests;
