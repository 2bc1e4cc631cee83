//! Pure: specified traffic → Revisions with shares that add up (knative/serving `pkg/reconciler/route/traffic`).

use common::wire::NamespacedName;

use super::{PlanTimer, gradual_rollout};
use crate::model::cluster_state::{
    AppRevision, AppState, AssignedTraffic, ClusterState, ConditionReason, ConditionStatus,
    ConditionType, RevisionRouting, RouteState, RoutingState, TrafficSpec, UnixMillis,
};

/// Moves `latestReady` to the newest ready Revision. It moves back only to a Revision that the template names.
pub(super) fn update_latest_ready(app: &mut AppState) {
    let is_ready = |revision: &&AppRevision| {
        !revision.is_deleted && revision.conditions.is_true(ConditionType::RevisionReady)
    };
    let Some(configuration) = &app.configuration else { return };
    let created = app.latest_created().filter(is_ready);
    let from = configuration.latest_ready.as_ref().and_then(|name| app.revision(name));
    let from = from.map_or(0, |revision| revision.meta.generation);
    let to = configuration.meta.generation;
    let newest = || {
        // From the present one's generation to the Configuration's, so that it never moves backwards.
        let all = app.revisions.iter().filter(is_ready);
        let between = all.filter(|it| (from..=to).contains(&it.meta.generation));
        between.max_by_key(|it| it.meta.generation)
    };
    let newest = created.or_else(newest).map(|it| it.name.clone());
    if let (Some(newest), Some(configuration)) = (newest, &mut app.configuration) {
        configuration.latest_ready = Some(newest);
    }
}

/// Assigns traffic. If a target cannot be resolved, the old assignment stays in force.
pub(super) fn assign_traffic(
    app: &mut AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
    now: UnixMillis,
    timer: &mut PlanTimer,
) {
    let is_leaving = app.cascades_deletion(cluster.settings.platform);
    let Some(route) = &app.route else { return };
    let resolved =
        if is_leaving { Ok(Vec::new()) } else { resolve_targets(app, route, name, cluster) };
    let rolled = resolved
        .map(|assigned| gradual_rollout::apply_rollout(app, name, assigned, cluster, now, timer));
    let status = match (rolled, &mut app.route) {
        (Ok((mut assigned, rollout)), Some(route)) => {
            // Most Routes have one target, and there are many Routes: spare capacity would add up.
            assigned.shrink_to_fit();
            route.traffic = assigned;
            route.rollout = rollout;
            ConditionStatus::True(None)
        }
        (Ok(_), None) => return,
        (Err(status), _) => status,
    };
    if !is_leaving {
        app.conditions.set(ConditionType::RouteTraffic, status, now);
    }
}

/// Returns the Revision of each target, or the status of the first target that has none.
fn resolve_targets(
    app: &AppState,
    route: &RouteState,
    name: &NamespacedName,
    cluster: &ClusterState,
) -> Result<Vec<AssignedTraffic>, ConditionStatus> {
    let assigned = route.traffic_spec.iter().map(|target| {
        let revision = match &target.revision_name {
            None => {
                latest_ready_revision(target.configuration_name.as_deref(), app, name, cluster)?
            }
            Some(revision_name) => named_revision(revision_name, app, name, cluster)?,
        };
        Ok(AssignedTraffic {
            tag: target.tag.clone(),
            revision_name: revision,
            // Only a target that names no Revision follows new ones.
            is_latest: target.revision_name.is_none(),
            percent: target.percent,
        })
    });
    assigned.collect()
}

/// Returns the latest ready Revision of a Configuration, or the status for its lack. `None` is the app's own.
fn latest_ready_revision(
    configuration: Option<&str>,
    own_app: &AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
) -> Result<Box<str>, ConditionStatus> {
    let configuration = configuration.unwrap_or(&name.name);
    let other = NamespacedName::new(name.namespace.clone(), configuration);
    let app = if configuration == name.name {
        Some(own_app)
    } else {
        cluster.apps.get(&other).map(|it| &**it)
    };
    let waiting = || {
        let message =
            format!("Configuration {configuration:?} is waiting for a Revision to become ready.");
        ConditionStatus::Unknown(Some(ConditionReason::new("RevisionMissing", message)))
    };
    let Some(app) = app.filter(|it| it.configuration.is_some()) else {
        // The Service will make the Configuration: its Route may have been observed first.
        if own_app.service.is_some() && configuration == name.name {
            return Err(waiting());
        }
        let message = format!("Configuration {configuration:?} referenced in traffic not found.");
        return Err(ConditionStatus::False(ConditionReason::new("ConfigurationMissing", message)));
    };
    if let Some(latest) = app.latest_ready() {
        return Ok(latest.into());
    }
    Err(match app.conditions.get(ConditionType::ConfigurationReady) {
        ConditionStatus::False(_) => ConditionStatus::False(ConditionReason::new(
            "RevisionMissing",
            format!("Configuration {configuration:?} does not have any ready Revision."),
        )),
        ConditionStatus::True(_) | ConditionStatus::Unknown(_) => waiting(),
    })
}

/// Returns a Revision that a target names, or the status for which it cannot have traffic.
fn named_revision(
    revision_name: &str,
    app: &AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
) -> Result<Box<str>, ConditionStatus> {
    let missing =
        |message| ConditionStatus::False(ConditionReason::new("RevisionMissing", message));
    let is_there = |it: &&AppRevision| !it.is_deleted;
    let other = cluster.revision(&name.namespace, revision_name).filter(is_there);
    let revision = match (app.revision(revision_name).filter(is_there), other) {
        (Some(own_revision), _) => own_revision,
        (None, Some(_)) if app.service.is_some() => {
            // A Route of a Service may name Revisions of that Service only.
            let message = format!(
                "Revision {revision_name:?} referenced in traffic does not belong to Service {:?}.",
                name.name
            );
            return Err(ConditionStatus::False(ConditionReason::new("RevisionNotOwned", message)));
        }
        (None, Some(other)) => other,
        (None, None) => {
            return Err(missing(format!(
                "Revision {revision_name:?} referenced in traffic not found."
            )));
        }
    };
    // A Revision that had traffic keeps it: its pods may recover, and no other Revision was named.
    let had_traffic = app.traffic().iter().any(|it| *it.revision_name == *revision_name);
    match revision.conditions.get(ConditionType::RevisionReady) {
        ConditionStatus::True(_) => Ok(revision.name.clone()),
        ConditionStatus::Unknown(_) | ConditionStatus::False(_) if had_traffic => {
            Ok(revision.name.clone())
        }
        ConditionStatus::False(_) => {
            Err(missing(format!("Revision {revision_name:?} failed to become ready.")))
        }
        ConditionStatus::Unknown(_) => Err(ConditionStatus::Unknown(Some(ConditionReason::new(
            "RevisionMissing",
            format!("Revision {revision_name:?} is not yet ready."),
        )))),
    }
}

/// Sets the routing state of all Revisions: active if a Route names them, else in reserve (knative/serving
/// `pkg/reconciler/labeler`).
pub(super) fn update_routing_states(
    app: &mut AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
    now: UnixMillis,
) {
    let mut active = Vec::new();
    let created = app.latest_created().map(|it| it.name.clone());
    if let Some(route) = &app.route {
        active.extend(assigned_revisions(route));
        // While the app is deleted, only traffic in force keeps a Revision active.
        if !app.cascades_deletion(cluster.settings.platform) {
            active.extend(specified_revisions(route, name, name, created.as_deref()));
        }
    }
    for other in cluster.names.referring_apps.get(name).into_iter().flatten() {
        if let Some(route) = cluster.apps.get(other).and_then(|it| it.route.as_ref()) {
            active.extend(assigned_revisions(route));
            active.extend(specified_revisions(route, other, name, created.as_deref()));
        }
    }
    for revision in &mut app.revisions {
        let new_state = match (active.contains(&revision.name), revision.routing.state) {
            (true, _) => RoutingState::Active,
            // Without a Route nothing was ever decided about the Revision, and it counts as reachable.
            (false, RoutingState::Pending) if app.route.is_none() => RoutingState::Pending,
            (false, _) => RoutingState::Reserve,
        };
        if revision.routing.state != new_state {
            revision.routing = RevisionRouting { state: new_state, changed_at: now };
        }
    }
}

/// Returns the Revisions that have traffic of the Route now.
fn assigned_revisions(route: &RouteState) -> impl Iterator<Item = Box<str>> {
    route.traffic.iter().map(|it| it.revision_name.clone())
}

/// Returns the Revisions of the app `app_name` to which the spec of the Route `route_name` sends traffic. `created` is
/// the app's newest Revision.
fn specified_revisions(
    route: &RouteState,
    route_name: &NamespacedName,
    app_name: &NamespacedName,
    created: Option<&str>,
) -> Vec<Box<str>> {
    let revision = |target: &TrafficSpec| {
        let configuration = target.configuration_name.as_deref().unwrap_or(&route_name.name);
        match &target.revision_name {
            Some(name) => Some(name.clone()),
            // The newest Revision gets traffic as soon as it is ready, so it must not scale as one in reserve.
            None if configuration == app_name.name => created.map(Into::into),
            None => None,
        }
    };
    route.traffic_spec.iter().filter_map(revision).collect()
}

/// Adds up shares by Revision; targets without a share are left out. The sum is 100, or the result is empty.
pub(super) fn revision_shares(traffic: &[AssignedTraffic]) -> Vec<(&str, u8)> {
    let mut shares: Vec<(&str, u8)> = Vec::with_capacity(traffic.len());
    for target in traffic.iter().filter(|target| target.percent > 0) {
        match shares.iter_mut().find(|(revision, _)| *revision == &*target.revision_name) {
            Some((_, percent)) => *percent += target.percent,
            None => shares.push((&target.revision_name, target.percent)),
        }
    }
    shares
}
