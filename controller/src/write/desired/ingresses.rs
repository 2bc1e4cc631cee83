//! Pure: desired state of the Ingresses of Routes, which other controllers serve.

use std::collections::BTreeMap;

use common::wire::NamespacedName;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::json;

use crate::{
    decide::plan::ingresses::{ingress_spec, spec_hash, wanted_class},
    model::{
        cluster_state::{AppState, ClusterState, RouteState},
        knative::key,
        object::{DesiredState, ObjectPart, ObjectPartKey, ResourceKind},
    },
    write::children::{ChildObject, OwnerObject},
};

/// Returns the desired state of the Ingress of a Route. Its status is that of the controller which serves it.
pub(super) fn ingress_part(cluster: &ClusterState, key: &ObjectPartKey) -> DesiredState {
    // The kind may be missing, and before the list is complete another class may hold the name.
    if key.part != ObjectPart::Object || !cluster.ingresses.is_listed {
        return DesiredState::Unmanaged;
    }
    let app = cluster.apps.get(&key.name).filter(|app| cluster.is_maintained(&key.name, app));
    let Some(app) = app else { return DesiredState::Unmanaged };
    // Kubernetes deletes the Ingress with its Route.
    let route = app.route.as_ref().filter(|it| it.meta.exists() && !it.is_terminating);
    let Some(route) = route else { return DesiredState::Unmanaged };
    let Some(class) = wanted_class(app, cluster) else { return DesiredState::Absent };
    // The former controller must end what it has made. It skips objects of another class, so it would keep all of it
    // after a change of the annotation. Once the Ingress is gone, it is made again.
    let observed = cluster.ingresses.by_name.get(&key.name);
    if observed.is_some_and(|it| *it.class != *class) {
        return DesiredState::Absent;
    }
    let Some(spec) = ingress_spec(app, &key.name, cluster) else {
        // All names speak raw TCP, and no host leads to them. Before its first traffic, nothing is known of a Route.
        let is_tcp = !app.traffic().is_empty();
        return if is_tcp { DesiredState::Absent } else { DesiredState::Unmanaged };
    };
    let mut annotations = ingress_annotations(app, class);
    // A plan compares this hash with that of its own spec: until the apply, the Ingress is that of an earlier plan.
    annotations.insert(key::INGRESS_SPEC.into(), format!("{:016x}", spec_hash(&spec)));
    let meta = ingress_meta(app, route, &key.name, annotations);
    let object = ChildObject::new(ResourceKind::Ingress, meta, json!({"spec": spec}));
    DesiredState::Body(object.body)
}

/// Returns the metadata of an Ingress, with the labels of its Route and these annotations.
fn ingress_meta(
    app: &AppState,
    route: &RouteState,
    name: &NamespacedName,
    annotations: BTreeMap<String, String>,
) -> ObjectMeta {
    let mut labels = app.route_labels();
    labels.insert(key::ROUTE.into(), name.name.to_string());
    labels.insert(key::ROUTE_NAMESPACE.into(), name.namespace.to_string());
    if app.service.is_some() {
        labels.insert(key::SERVICE.into(), name.name.to_string());
    }
    let uid = route.meta.uid.to_string();
    let owner = OwnerObject { resource: ResourceKind::Route, name: &name.name, uid: &uid };
    ObjectMeta {
        name: Some(name.name.to_string()),
        namespace: Some(name.namespace.to_string()),
        labels: Some(labels),
        annotations: Some(annotations),
        owner_references: Some(vec![owner.to_owner_reference()]),
        ..ObjectMeta::default()
    }
}

/// Returns the annotations of a Route's Ingress. Those of Rouse are about the Route itself.
fn ingress_annotations(app: &AppState, class: &str) -> BTreeMap<String, String> {
    let mut all = app.route_annotations();
    let is_own = |key: &str| {
        key.starts_with("rouse.dev/")
            || key == "kubectl.kubernetes.io/last-applied-configuration"
            || key::INGRESS_CLASS.contains(&key)
    };
    all.retain(|key, _| !is_own(key));
    all.insert(key::CLASS_OF_INGRESS.into(), class.into());
    all
}
