//! Pure: desired state of EndpointSlices.

use common::{
    service_routing::TopologyHints,
    wire::{AppProtocol, NamespacedName},
};

use super::{LiveRevision, is_superfluous_placeholder, scaled, with_placeholder};
use crate::{
    decide::{
        part_keys::{find_owner_revision, find_slice_route},
        plan,
        topology_hints::HintRules,
    },
    model::{
        cluster_state::{
            ActivatorReadiness, AppRevision, ClusterState, HintMode, ParsedTemplate, RevisionPod,
            RoutingState,
        },
        object::{DesiredState, ObjectPartKey, names},
        scale_policy::AutoscalerClass,
    },
    write::children::{scaling, slices},
};

/// Number of activators in a name's slice (knative/serving `kpa.go`: never fewer than two).
const ACTIVATORS_PER_SLICE: usize = 2;

/// Returns the slice that the key names: of a Route's name, of a scaled Service, or of a Revision's own Service.
pub(super) fn slice_part(cluster: &ClusterState, key: &ObjectPartKey) -> DesiredState {
    // Empty, and so no Service's name, unless the key names an IPv6 slice.
    let ipv6_service = NamespacedName::new(
        key.name.namespace.as_str(),
        key.name.name.strip_suffix(names::V6_SUFFIX).unwrap_or_default(),
    );
    let route = find_slice_route(cluster, &key.name);
    let activators = slice_activators(cluster);
    let Some((owner, allocation)) = route else {
        return scaled::slice_part(cluster, key, &activators, ACTIVATORS_PER_SLICE)
            .unwrap_or_else(|| revision_slice(cluster, key, &ipv6_service, &activators));
    };
    let mode = cluster.apps.get(&owner).map_or(HintMode::Off, |app| app.route_hint_mode());
    let rules = HintRules { mode, shares: &cluster.nodes.zone_shares };
    let all = with_placeholder(cluster, &owner, allocation, |spec| {
        slices::route_name_slices(&spec, &activators, ACTIVATORS_PER_SLICE, rules)
    });
    let Some(all) = all else { return DesiredState::Unmanaged };
    let slice = all.into_iter().find(|it| it.name == key.name.name);
    slice.map_or(DesiredState::Absent, |it| DesiredState::Body(it.body))
}

/// Returns the activators that slices may list. One that is being deleted takes requests only if a slice already lists
/// it. An activator of a removed installation has the same labels, but follows no controller and starts no Revision.
fn slice_activators(cluster: &ClusterState) -> Vec<slices::SliceEndpoint> {
    let activators =
        cluster.activators.pods.keys().filter_map(|name| cluster.activator_readiness(name));
    let activators = activators.filter(|(activator, readiness)| {
        *readiness != ActivatorReadiness::Terminating
            || cluster.activators.slices.lists_activator(&activator.name)
    });
    let activators = activators.map(|(activator, readiness)| slices::SliceEndpoint {
        pod: activator.name.clone(),
        namespace: cluster.settings.system_namespace.clone(),
        node: activator.node.clone(),
        zone: activator.zone.clone(),
        addresses: activator.addresses.clone(),
        ready: readiness == ActivatorReadiness::Ready,
        terminating: readiness == ActivatorReadiness::Terminating,
        hints: TopologyHints::default(),
    });
    activators.collect()
}

/// Returns the slice of a Revision's own Service; `ipv6_service` is the Service's name if the key names an IPv6 slice.
fn revision_slice(
    cluster: &ClusterState,
    key: &ObjectPartKey,
    ipv6_service: &NamespacedName,
    activators: &[slices::SliceEndpoint],
) -> DesiredState {
    let has_ipv6_slice =
        |it: &AppRevision| names::slice_name(&it.name, names::V6_SUFFIX) == key.name.name;
    let owner_revision = find_owner_revision(cluster, &key.name, |it| {
        !it.is_scaled_service && (*it.name == *key.name.name || has_ipv6_slice(it))
    });
    let owner_revision = owner_revision.or_else(|| {
        find_owner_revision(cluster, ipv6_service, |it| {
            !it.is_scaled_service && *it.name == *ipv6_service.name
        })
    });
    let Some((owner, revision)) = owner_revision else {
        let is_ipv6 = !ipv6_service.name.is_empty();
        return ownerless_slice(cluster, if is_ipv6 { ipv6_service } else { &key.name });
    };
    let Some(live) = LiveRevision::if_maintained(cluster, &owner, revision) else {
        return DesiredState::Unmanaged;
    };
    let template = ParsedTemplate::of_revision(revision, cluster);
    // An ingress of another controller names the Revision by a header that only activators read. None names one of raw
    // TCP.
    let is_fronted = template.protocol != AppProtocol::Tcp
        && plan::ingresses::is_fronted(live.app, &owner, cluster);
    // As with the ServerlessService: the autoscaler decides, and a new leader does not know its decision yet.
    if !is_fronted
        && live.class() == AutoscalerClass::Kpa
        && revision.scaling.actual_scale > 0
        && revision.scaling.decision.is_none()
    {
        return DesiredState::Unmanaged;
    }
    // Activators know nothing of a sleeping Revision that no Route names, so they could not serve it.
    if !is_fronted && revision.routing.state == RoutingState::Reserve && revision.pods.is_empty() {
        return DesiredState::Absent;
    }
    let serves =
        !is_fronted && live.mode_and_activators().0 == scaling::ServerlessServiceMode::Serve;
    let pods = revision.pods.iter().filter(|_| serves);
    let endpoint = |pod: &RevisionPod| pod_endpoint(cluster, &owner, revision, pod);
    let mut pods: Vec<_> = pods.filter_map(endpoint).collect();
    // Each replica observes the pods in another order, and all replicas must write the same slice.
    pods.sort_by(|a, b| a.pod.cmp(&b.pod));
    let mode = plan::hint_mode(live.app, &template);
    let rules = HintRules { mode, shares: &cluster.nodes.zone_shares };
    let (port, count) = (template.port.get(), ACTIVATORS_PER_SLICE);
    let all =
        live.with_view(|it| slices::revision_slices(it, &pods, port, activators, count, rules));
    let slice = all.into_iter().find(|it| it.name == key.name.name);
    slice.map_or(DesiredState::Absent, |it| DesiredState::Body(it.body))
}

/// Returns the desired state of a slice of the Service with this name, of which neither Route nor Revision is known.
fn ownerless_slice(cluster: &ClusterState, service: &NamespacedName) -> DesiredState {
    let is_placeholder = cluster.names.placeholders.contains_key(service);
    // Each kind has a watch of its own. Until the Route is observed, its name needs the slice: connects would fail.
    if is_placeholder && !is_superfluous_placeholder(cluster, service) {
        return DesiredState::Unmanaged;
    }
    DesiredState::Absent
}

/// Returns a serving pod as an endpoint of a slice.
fn pod_endpoint(
    cluster: &ClusterState,
    owner: &NamespacedName,
    revision: &AppRevision,
    pod: &RevisionPod,
) -> Option<slices::SliceEndpoint> {
    let (address, other_family_ip) = plan::serving_addresses(cluster, owner, &pod.uid)?;
    let node = pod.kube_status.as_ref().map(|it| it.node.to_string()).unwrap_or_default();
    Some(slices::SliceEndpoint {
        pod: pod.name.to_string(),
        namespace: owner.namespace.to_string(),
        zone: cluster.nodes.zones.get(&node).cloned().unwrap_or_default(),
        node,
        addresses: address.map(|it| it.ip()).into_iter().chain(other_family_ip).collect(),
        ready: true,
        terminating: false,
        hints: revision.topology_hints(&pod.name),
    })
}
