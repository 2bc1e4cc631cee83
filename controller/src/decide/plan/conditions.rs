//! Pure: cluster state → Knative's conditions of Configuration, Route and Service (knative/serving
//! `pkg/apis/serving/v1/*_lifecycle.go`).

use common::wire::{ClientComponent, NamespacedName};

use super::{PlanTimer, host_certificates, ingresses, placeholder_name, routes::route_host};
use crate::{
    decide::service_children::applied_object_hash,
    model::{
        cluster_state::{
            AppState, ClusterIpSource, ClusterState, ConditionReason, ConditionStatus,
            ConditionType, ObjectOwner, RouteNameAllocation, ServiceState, TrafficSpec, UnixMillis,
            name_registry::NameClaimant,
        },
        object::{LocalObjectKind, names::tagged_name},
    },
};

/// Time until activators and agents that are waited for are checked again, in milliseconds.
const ROUTED_RECHECK_MS: u64 = 500;
/// Time for which a Route waits for agents, in milliseconds; by the whole second, as conditions have their times.
///
/// A node whose agent has a fault must not keep all Routes from being ready: there, kube-proxy's rules serve them.
const AGENTS_WAIT_MS: u64 = 5_000;

/// Sets the Configuration's condition: it is ready if its newest Revision is.
pub(super) fn update_configuration(app: &mut AppState, now: UnixMillis) {
    if app.configuration.is_none() {
        return;
    }
    let ready = app
        .latest_created()
        .map(|it| (it.name.clone(), it.conditions.get(ConditionType::RevisionReady)));
    let refused = app.service.as_ref().and_then(|it| it.manifest_error.as_deref());
    let status = match (ready, refused) {
        // A refused template comes first: no Revision will be made of it.
        (_, Some(refused)) => {
            ConditionStatus::False(ConditionReason::new("InvalidManifest", refused.to_owned()))
        }
        (None, None) => ConditionStatus::Unknown(None),
        (Some((_, ConditionStatus::True(_))), None) => ConditionStatus::True(None),
        (Some((_, ConditionStatus::Unknown(reason))), None) => ConditionStatus::Unknown(reason),
        (Some((name, ConditionStatus::False(reason))), None) => {
            let message = format!("Revision {name:?} failed with message: {}.", reason.message);
            ConditionStatus::False(ConditionReason::new("RevisionFailed", message))
        }
    };
    app.conditions.set(ConditionType::ConfigurationReady, status, now);
}

/// Sets the Route's conditions, except `AllTrafficAssigned`, which was set with its traffic. Only the leader makes
/// allocations: on other replicas a name without one waits for it.
pub(super) fn update_route(
    app: &mut AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
    now: UnixMillis,
    timer: &mut PlanTimer,
) {
    let not_owned = not_owned_reason(app, name, cluster);
    let Some(route) = &app.route else { return };
    // The Route's own name, and one for each tag.
    let name_count = 1 + route.traffic.iter().filter(|it| it.tag.is_some()).count();
    let has_no_address = |it: &RouteNameAllocation| match &it.cluster_ips {
        ClusterIpSource::ApiServer(addresses) => addresses.is_empty(),
        ClusterIpSource::LocalRange(_) => false,
    };
    let ingress = if let Some(reason) = &route.blocked_reason {
        ConditionStatus::False((**reason).clone())
    } else if let Some(reason) = not_owned {
        ConditionStatus::False(reason)
    } else if route.traffic.is_empty()
        || route.allocations.iter().any(has_no_address)
        || (route.allocations.len() < name_count && !cluster.is_leader)
    {
        ingress_not_configured()
    } else if route.allocations.len() < name_count {
        let message = "No ClusterIP or activator port is left: delete a service or a tag";
        ConditionStatus::False(ConditionReason::new("NoAddressLeft", message))
    } else if route.rollout.is_some() {
        ConditionStatus::Unknown(Some(ConditionReason::new(
            "RolloutInProgress",
            "A gradual rollout of the latest revision(s) is in progress.",
        )))
    } else if let Some(status) = ingresses::unready_ingress(app, name, cluster) {
        status
    // Once agents have had the addresses, the condition needs no further report of them.
    } else if app.conditions.is_true(ConditionType::RouteIngress) {
        ConditionStatus::True(None)
    } else {
        routed_status(app, name, cluster, now, timer)
    };
    app.conditions.set(ConditionType::RouteIngress, ingress, now);
    let previous = app.conditions.get(ConditionType::RouteCertificate);
    let certificate = host_certificates::route_status(app, name, cluster, &previous, now);
    app.conditions.set(ConditionType::RouteCertificate, certificate, now);
    let dependents =
        [ConditionType::RouteTraffic, ConditionType::RouteIngress, ConditionType::RouteCertificate];
    let ready = app.conditions.summarize(&dependents);
    app.conditions.set(ConditionType::RouteReady, ready, now);
}

/// Returns the status of a Route that is not served yet.
pub(super) fn ingress_not_configured() -> ConditionStatus {
    let message = "Ingress has not yet been reconciled.";
    ConditionStatus::Unknown(Some(ConditionReason::new("IngressNotConfigured", message)))
}

/// Returns the status of a Route for which only agents are waited for.
fn agents_awaited() -> ConditionStatus {
    let message = "Some nodes do not lead connections to its ClusterIPs yet.";
    ConditionStatus::Unknown(Some(ConditionReason::new("IngressNotConfigured", message)))
}

/// Returns the status of a Route that lacks nothing, except that activators and agents may not follow it yet.
///
/// A client may connect as soon as the Route is ready. Its connect must not go on unchanged. Without a rule of
/// kube-proxy it would get no response, and neither would the kernel's repetitions of it once there is a rule.
fn routed_status(
    app: &AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
    now: UnixMillis,
    timer: &mut PlanTimer,
) -> ConditionStatus {
    let status = if !is_routed(ClientComponent::Activator, app, name, cluster) {
        ingress_not_configured()
    } else if !is_routed(ClientComponent::Agent, app, name, cluster)
        && !is_wait_for_agents_over(app, now)
    {
        agents_awaited()
    } else {
        return ConditionStatus::True(None);
    };
    // The last report triggers the next plan; the timer covers a reporter that ends without one.
    let _ = timer.is_due_or_schedule(now.plus_ms(ROUTED_RECHECK_MS), now);
    status
}

/// Returns true if every activator routes requests for each of the Route's names to some Revision, or every agent leads
/// connects to them. Each may follow another replica than the leader. True also while none reports: without activators,
/// or with ones of an earlier release, the Route could never become ready.
fn is_routed(
    role: ClientComponent,
    app: &AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
) -> bool {
    let service_name = |allocation: &RouteNameAllocation| {
        NamespacedName::new(name.namespace.clone(), placeholder_name(allocation, &name.name))
    };
    let reporters = &cluster.pods.reporters;
    app.allocations().iter().all(|it| reporters.is_routed_by_all(role, &service_name(it)))
}

/// Returns true if the Route has waited for agents for long enough.
fn is_wait_for_agents_over(app: &AppState, now: UnixMillis) -> bool {
    let mut conditions = app.conditions.iter();
    let since = conditions.find_map(|(condition_type, since, status)| {
        let is_waiting =
            condition_type == ConditionType::RouteIngress && status == agents_awaited();
        is_waiting.then_some(since)
    });
    // A former leader's clock may have been ahead.
    since.is_some_and(|since| since > now || since.plus_ms(AGENTS_WAIT_MS) <= now)
}

/// Returns the reason if one of the Route's names belongs to another owner.
fn not_owned_reason(
    app: &AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
) -> Option<ConditionReason> {
    let route = app.route.as_ref().filter(|_| !app.cascades_deletion(cluster.settings.platform))?;
    let tags = route.traffic_spec.iter().filter_map(|it| it.tag.as_deref()).map(Some);
    [None].into_iter().chain(tags).find_map(|tag| {
        let placeholder = NamespacedName::new(name.namespace.clone(), tagged_name(tag, &name.name));
        let owner =
            cluster.names.registry.service_owner(&placeholder, &cluster.names.placeholders)?;
        if owner.claimant != NameClaimant::Route(name.clone()) {
            let what = format!("There is an existing placeholder Service {:?}", placeholder.name);
            return Some(ConditionReason::new("NotOwned", format!("{what} that we do not own.")));
        }
        let host = route_host(app, name, tag, cluster).filter(|it| !it.is_private)?.host;
        // No claim to the host is recorded yet.
        let owner = cluster.names.registry.host_owner(&host, &cluster.names.placeholders)?;
        let message = || format!("The host {host:?} is already in use by {}.", owner.claimant);
        let is_partial =
            matches!(&owner.claimant, NameClaimant::Mapping(it) if has_path_rule(it, cluster));
        let is_owned = owner.service == placeholder && !is_partial;
        (!is_owned).then(|| ConditionReason::new("NotOwned", message()))
    })
}

/// Returns true if a DomainMapping has a path rule, and so perhaps not all paths of its host.
fn has_path_rule(mapping: &NamespacedName, cluster: &ClusterState) -> bool {
    let domains = &cluster.domains;
    let state = domains.mappings.get(mapping);
    state.is_some_and(|it| domains.path_rule(&mapping.namespace, &it.domain).is_some())
}

/// Sets the Service's conditions from its Configuration and its Route.
pub(super) fn update_service(app: &mut AppState, name: &NamespacedName, now: UnixMillis) {
    let Some(service) = &app.service else { return };
    let not_owned_status = |kind: &str, owner: Option<ObjectOwner>| {
        let message = format!("There is an existing {kind} {:?} that we do not own.", name.name);
        let is_foreign = matches!(owner, Some(ObjectOwner::Unowned | ObjectOwner::Other));
        is_foreign.then(|| ConditionStatus::False(ConditionReason::new("NotOwned", message)))
    };
    let write_error =
        |reason: Option<&ConditionReason>| reason.map(|it| ConditionStatus::False(it.clone()));
    let refused = service.manifest_error.as_deref();
    let refused = refused.map(|reason| {
        ConditionStatus::False(ConditionReason::new("InvalidManifest", reason.to_owned()))
    });
    // A child object may have another owner, or still reflect an older manifest: its conditions do not count then.
    let configuration =
        not_owned_status("Configuration", app.configuration.as_ref().map(|it| it.owner))
            .or(refused)
            .or_else(|| write_error(service.write_errors.configuration.as_deref()))
            .or_else(|| {
                is_configuration_behind(app, service, name)
                    .then(|| out_of_date_status("Configuration"))
            })
            .unwrap_or_else(|| app.conditions.get(ConditionType::ConfigurationReady));
    let route = not_owned_status("Route", app.route.as_ref().map(|it| it.owner))
        .or_else(|| write_error(service.write_errors.route.as_deref()))
        .or_else(|| is_route_behind(app, service, name).then(|| out_of_date_status("Route")))
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
    let ready = app
        .conditions
        .summarize(&[ConditionType::ServiceConfigurations, ConditionType::ServiceRoutes]);
    app.conditions.set(ConditionType::ServiceReady, ready, now);
}

/// Returns the status of a Service while a child object still reflects an older manifest.
fn out_of_date_status(kind: &str) -> ConditionStatus {
    let message =
        format!("The {kind} is still working to reflect the latest desired specification.");
    ConditionStatus::Unknown(Some(ConditionReason::new("OutOfDate", message)))
}

/// Returns true if the observed Configuration was made of an older manifest of the Service.
///
/// The hash of the applied object decides. Another webhook may add to the template, and that causes no write.
fn is_configuration_behind(app: &AppState, service: &ServiceState, name: &NamespacedName) -> bool {
    let Some(observed) = app.configuration.as_ref() else { return false };
    observed.template != service.manifest.template
        && observed.applied_hash.is_some_and(|hash| {
            hash != applied_object_hash(LocalObjectKind::Configuration, service, name)
        })
}

/// Returns true if the observed Route was made of an older manifest of the Service.
fn is_route_behind(app: &AppState, service: &ServiceState, name: &NamespacedName) -> bool {
    let Some(route) = app.route.as_ref() else { return false };
    let names_own_configuration =
        |it: &TrafficSpec| it.configuration_name.as_deref().is_none_or(|it| name.name == *it);
    let is_same_target = |(current, desired): (&TrafficSpec, &TrafficSpec)| {
        (&current.tag, &current.revision_name, current.percent)
            == (&desired.tag, &desired.revision_name, desired.percent)
            && names_own_configuration(current)
    };
    let desired = &service.manifest.traffic;
    let is_same = route.traffic_spec.len() == desired.len()
        && route.traffic_spec.iter().zip(&**desired).all(is_same_target);
    // A difference alone may be a user's own change of the Route. The hash tells if the Service was applied since.
    !is_same
        && route
            .applied_hash
            .is_some_and(|it| it != applied_object_hash(LocalObjectKind::Route, service, name))
}

/// Returns true if all targets that follow the latest ready Revision have moved to it.
fn is_migrated(app: &AppState) -> bool {
    let latest = app.latest_ready();
    app.traffic().iter().filter(|it| it.is_latest).all(|it| Some(&*it.revision_name) == latest)
}
