//! Pure: an app → the desired state of its objects in the API server, one part of one object at a time.
//!
//! Only Rouse's part is desired state. A Service belongs to its user, so only its status is. A Configuration, Route or
//! Revision is desired if a parent object requires it; its status always is.

use std::time::Duration;

use common::wire::NamespacedName;
use serde_json::Value;

use crate::{
    decide::{
        part_keys::{find_owner_revision, find_route_name, has_child_named, owner_revision_of},
        plan, service_children,
    },
    model::{
        cluster_state::{ClusterState, ObjectOwner, RouteNameAllocation},
        object::{
            DesiredState, LocalObjectKey, LocalObjectKind, ObjectPart, ObjectPartKey, ResourceKind,
        },
    },
    write::{children::services, render},
};

mod autoscaling_status;
mod domain_mappings;
mod endpoint_slices;
mod gateway_api;
mod ingresses;
mod pod_annotations;
mod pod_requests;
mod port_record;
mod requested_certificates;
mod required_children;
mod revision_children;
mod scaled;

pub use gateway_api::SUPPORTED_FEATURES_FIELD;
pub use required_children::{RequiredChildren, required_children};
use revision_children::LiveRevision;

/// Returns the desired state of the object part with this key.
pub fn desired_state(cluster: &ClusterState, key: &ObjectPartKey) -> DesiredState {
    // The API server refuses new objects in a namespace that ends, and deletes those in it.
    if cluster.terminating_namespaces.contains(&key.name.namespace) {
        return DesiredState::Unmanaged;
    }
    match key.resource {
        ResourceKind::KnativeService => knative_part(cluster, key, LocalObjectKind::Service),
        ResourceKind::Configuration => knative_part(cluster, key, LocalObjectKind::Configuration),
        ResourceKind::Route => knative_part(cluster, key, LocalObjectKind::Route),
        ResourceKind::Revision => revision_part(cluster, key),
        ResourceKind::Deployment | ResourceKind::StatefulSet => workload_part(cluster, key),
        ResourceKind::PodAutoscaler => autoscaler_part(cluster, key),
        ResourceKind::ServerlessService
        | ResourceKind::HorizontalPodAutoscaler
        | ResourceKind::Metric
        | ResourceKind::Image => revision_children::child_part(cluster, key),
        ResourceKind::Service => service_part(cluster, key),
        ResourceKind::EndpointSlice => endpoint_slices::slice_part(cluster, key),
        ResourceKind::Pod if key.part == ObjectPart::Resize => {
            pod_requests::desired_requests(cluster, key)
        }
        ResourceKind::Pod => pod_annotations::pod_annotations(cluster, key),
        ResourceKind::DomainMapping => domain_mappings::mapping_status(cluster, key),
        ResourceKind::ClusterDomainClaim => domain_mappings::desired_claim(cluster, &key.name.name),
        ResourceKind::RequestedCertificate | ResourceKind::IssuedCertificate => {
            requested_certificates::certificate_part(cluster, key)
        }
        ResourceKind::GatewayClass
        | ResourceKind::Gateway
        | ResourceKind::HttpRoute
        | ResourceKind::GrpcRoute => gateway_api::gateway_status(cluster, key),
        ResourceKind::Ingress => ingresses::ingress_part(cluster, key),
        ResourceKind::ConfigMap => port_record::record_part(cluster, key),
        ResourceKind::Node
        | ResourceKind::Namespace
        | ResourceKind::NetworkPolicy
        | ResourceKind::AcmeChallenge
        | ResourceKind::ReferenceGrant => DesiredState::Unmanaged,
    }
}

/// Returns the desired state of a Deployment or StatefulSet. Of a user's own, that is its number of pods at most.
fn workload_part(cluster: &ClusterState, key: &ObjectPartKey) -> DesiredState {
    let is_scale = key.part == ObjectPart::Scale;
    let of_user = is_scale.then(|| scaled::workload_scale(cluster, key)).flatten();
    of_user.unwrap_or_else(|| revision_children::child_part(cluster, key))
}

/// Returns the desired state of a PodAutoscaler: of a Revision, or of a scaled Service.
fn autoscaler_part(cluster: &ClusterState, key: &ObjectPartKey) -> DesiredState {
    let app = cluster.apps.get(&key.name);
    let Some((app, scaled)) = app.and_then(|app| Some((app, app.scaled.as_deref()?))) else {
        return revision_children::child_part(cluster, key);
    };
    match owner_revision_of(cluster, key) {
        None => scaled::autoscaler_part(cluster, key, app, scaled),
        // A Revision has the name: its PodAutoscaler takes the place of the other one.
        Some(_) if scaled.autoscaler.is_some() => {
            scaled::superfluous_autoscaler(cluster, key, scaled)
        }
        Some(_) => revision_children::child_part(cluster, key),
    }
}

/// Returns an object in the form for tools on a node without an API server; `None` if there is none.
pub fn local_object(cluster: &ClusterState, key: &LocalObjectKey) -> Option<Value> {
    let resource = match key.kind {
        LocalObjectKind::PodAutoscaler => ResourceKind::PodAutoscaler,
        LocalObjectKind::ServerlessService => ResourceKind::ServerlessService,
        LocalObjectKind::Service
        | LocalObjectKind::Configuration
        | LocalObjectKind::Revision
        | LocalObjectKind::Route
        | LocalObjectKind::Pod => return render::render_object(cluster, key),
    };
    let part = |part| match desired_state(
        cluster,
        &ObjectPartKey::new(resource, part, key.name.clone()),
    ) {
        DesiredState::Body(body) => Some(body),
        DesiredState::Unmanaged
        | DesiredState::Absent
        | DesiredState::Scale { .. }
        | DesiredState::Replicas { .. }
        | DesiredState::GivenBack { .. }
        | DesiredState::Requests { .. } => None,
    };
    let mut object = part(ObjectPart::Object)?;
    object["status"] = part(ObjectPart::Status).unwrap_or_default();
    // It exists as long as its Revision. Without an API server nothing else sets a creation time.
    let (_, revision) = find_owner_revision(cluster, &key.name, |it| *it.name == *key.name.name)?;
    object["metadata"]["creationTimestamp"] = revision.meta.created.rfc3339().into();
    Some(object)
}

/// Returns the desired state of a Service, Configuration or Route. On Kubernetes too, it is rendered by its
/// [`LocalObjectKey`].
fn knative_part(
    cluster: &ClusterState,
    key: &ObjectPartKey,
    kind: LocalObjectKind,
) -> DesiredState {
    let Some(app) = cluster.apps.get(&key.name) else { return DesiredState::Unmanaged };
    let (exists, owner) = match kind {
        LocalObjectKind::Configuration => app
            .configuration
            .as_ref()
            .map_or((false, ObjectOwner::Service), |it| (it.meta.exists(), it.owner)),
        LocalObjectKind::Route => app
            .route
            .as_ref()
            .map_or((false, ObjectOwner::Service), |it| (it.meta.exists(), it.owner)),
        LocalObjectKind::Service
        | LocalObjectKind::Revision
        | LocalObjectKind::Pod
        | LocalObjectKind::PodAutoscaler
        | LocalObjectKind::ServerlessService => (app.service.is_some(), ObjectOwner::Unowned),
    };
    match key.part {
        ObjectPart::Scale | ObjectPart::Resize => DesiredState::Unmanaged,
        ObjectPart::Status if exists => {
            let object =
                render::render_object(cluster, &LocalObjectKey { kind, name: key.name.clone() });
            object.map_or(DesiredState::Unmanaged, |mut object| {
                DesiredState::Body(without_nulls(object["status"].take()))
            })
        }
        ObjectPart::Status => DesiredState::Unmanaged,
        // An object of another owner stays as it is, even under the name that the Service's own would have.
        ObjectPart::Object => {
            let is_owned = owner == ObjectOwner::Service
                && app.service.is_some()
                && cluster.is_maintained(&key.name, app);
            match (is_owned, &app.service) {
                (true, Some(service)) => DesiredState::Body(
                    service_children::render_service_child(kind, service, &key.name),
                ),
                _ => DesiredState::Unmanaged,
            }
        }
    }
}

/// Returns the desired state of a part of a Knative Revision.
fn revision_part(cluster: &ClusterState, key: &ObjectPartKey) -> DesiredState {
    let Some(owner) = cluster.app_of_revision(&key.name) else { return DesiredState::Absent };
    let Some(app) = cluster.apps.get(&owner) else { return DesiredState::Unmanaged };
    if !cluster.is_maintained(&owner, app)
        || app.configuration.as_ref().is_none_or(|it| it.is_terminating)
    {
        return DesiredState::Unmanaged;
    }
    // Absent from the cluster state means collected: `Absent` deletes it in the API server, too.
    let revision = app.revision(&key.name.name).filter(|it| !it.is_deleted);
    let Some(revision) = revision else { return DesiredState::Absent };
    let Some(mut object) = render::render_object(
        cluster,
        &LocalObjectKey { kind: LocalObjectKind::Revision, name: key.name.clone() },
    ) else {
        return DesiredState::Unmanaged;
    };
    match key.part {
        ObjectPart::Scale | ObjectPart::Resize => DesiredState::Unmanaged,
        ObjectPart::Status if !revision.meta.exists() => DesiredState::Unmanaged,
        ObjectPart::Status => DesiredState::Body(without_nulls(object["status"].take())),
        ObjectPart::Object => DesiredState::Body(without_server_fields(object)),
    }
}

/// Returns an object as it is applied: without fields that the API server sets.
pub(crate) fn without_server_fields(mut object: Value) -> Value {
    if let Value::Object(fields) = &mut object {
        fields.remove("status");
    }
    if let Some(Value::Object(meta)) = object.get_mut("metadata") {
        for given in ["uid", "generation", "creationTimestamp", "resourceVersion"] {
            meta.remove(given);
        }
    }
    object
}

fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let kept = fields.into_iter().filter(|(_, value)| !value.is_null());
            kept.map(|(name, value)| (name, without_nulls(value))).collect()
        }
        Value::Array(all) => all.into_iter().map(without_nulls).collect(),
        other => other,
    }
}

/// Returns the desired state of a Kubernetes Service: a Route's placeholder, or one of a Revision's two.
fn service_part(cluster: &ClusterState, key: &ObjectPartKey) -> DesiredState {
    if key.part != ObjectPart::Object {
        return DesiredState::Unmanaged;
    }
    // A Route may hold a name that a Revision's Service would have, too: the Route comes first.
    if let Some((owner, allocation)) = find_route_name(cluster, &key.name) {
        let placeholder = with_placeholder(cluster, &owner, allocation, |spec| {
            services::placeholder_service(&spec).body
        });
        return placeholder.map_or(DesiredState::Unmanaged, DesiredState::Body);
    }
    let Some((owner, revision)) =
        find_owner_revision(cluster, &key.name, |it| has_child_named(cluster, key, it))
    else {
        return match is_superfluous_placeholder(cluster, &key.name) {
            true => DesiredState::Absent,
            false => DesiredState::Unmanaged,
        };
    };
    let Some(live) = LiveRevision::if_maintained(cluster, &owner, revision) else {
        return DesiredState::Unmanaged;
    };
    DesiredState::Body(live.with_view(|view| match *revision.name == *key.name.name {
        true => services::public_service(view).body,
        false => services::private_service(view).body,
    }))
}

/// Returns true if a Service reserves a name that its Route no longer has. The Route must be known. One that is not
/// observed yet may have the name, and Kubernetes deletes the Service with a Route that is gone.
fn is_superfluous_placeholder(cluster: &ClusterState, name: &NamespacedName) -> bool {
    let Some(placeholder) = cluster.names.placeholders.get(name) else { return false };
    let from = cluster.apps.range(NamespacedName::new(name.namespace.clone(), "")..);
    let mut apps = from.take_while(|(app, _)| app.namespace == name.namespace);
    apps.any(|(_, app)| {
        let route = app.route.as_ref().filter(|it| it.meta.exists());
        route.is_some_and(|it| it.meta.uid == placeholder.owner_uid)
    })
}

fn placeholder_affinity(
    cluster: &ClusterState,
    owner: &NamespacedName,
    allocation: &RouteNameAllocation,
) -> Option<Duration> {
    let name = plan::placeholder_name(allocation, &owner.name);
    let name = NamespacedName::new(owner.namespace.clone(), name);
    cluster.names.placeholders.get(&name)?.affinity
}

/// Calls `make` with the view of a Route's name that its objects are made from, if the Route exists.
fn with_placeholder<T>(
    cluster: &ClusterState,
    owner: &NamespacedName,
    allocation: &RouteNameAllocation,
    make: impl FnOnce(services::PlaceholderSpec<'_>) -> T,
) -> Option<T> {
    // Objects of a name that the Route does not own are another Route's.
    let app = cluster.apps.get(owner).filter(|app| cluster.is_maintained(owner, app))?;
    let route = app.route.as_ref().filter(|it| it.meta.exists() && !it.is_terminating)?;
    // The spec borrows the text of the uid, so it is passed to `make` and not returned.
    let uid = route.meta.uid.to_string();
    Some(make(services::PlaceholderSpec {
        namespace: &owner.namespace,
        route: &owner.name,
        route_uid: &uid,
        tag: allocation.tag.as_deref(),
        service: if app.service.is_some() { &owner.name } else { "" },
        route_labels: app.route_labels(),
        route_annotations: app.route_annotations(),
        activator_port: Some(allocation.activator_port),
        serves_tcp: plan::serves_tcp(app, owner, allocation.tag.as_deref(), cluster),
        serves_local_tls: plan::local_tls::serves_local_tls(
            app,
            owner,
            allocation.tag.as_deref(),
            cluster,
        ),
        affinity: placeholder_affinity(cluster, owner, allocation),
        gateway_port: match allocation.tag {
            // Also before the record: a controller that may not write one counts this annotation instead.
            None => plan::gateway_ports::port_to_record(app, owner, cluster),
            Some(_) => None,
        },
    }))
}
