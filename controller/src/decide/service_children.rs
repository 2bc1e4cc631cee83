//! Pure: Configuration and Route of a Service as they are applied, with their hash.
//!
//! The conditions of a Service say if an observed child object was made of the Service's present manifest. The hash of
//! the body decides that, so planning needs the body, too. Objects keep the hash in an annotation: a body that differs
//! in one byte would be written again in each cluster.

use std::collections::BTreeMap;

use common::wire::NamespacedName;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use serde::Serialize;
use serde_json::{Value, json};

use crate::model::{
    cluster_state::{ObjectMetaSummary, ServiceState, TrafficSpec},
    knative::{API_VERSION, TrafficTarget, key},
    object::{LocalObjectKind, hash::stable_json_hash},
};

/// Returns the Configuration or Route of a Service as it is applied, without status.
pub(crate) fn render_service_child(
    kind: LocalObjectKind,
    service: &ServiceState,
    name: &NamespacedName,
) -> Value {
    let ServiceState { meta: service_meta, manifest, .. } = service;
    let (labels, annotations) = child_metadata(kind, service, name);
    let spec = if kind == LocalObjectKind::Configuration {
        json!({"template": template_json(&manifest.template)})
    } else {
        let mut traffic = spec_traffic(&manifest.traffic);
        // A Route names the Configuration, since it has no Service to imply it (Knative's `resources.MakeRoute`).
        for target in traffic.iter_mut().filter(|it| it.revision_name.is_none()) {
            target.configuration_name = Some(name.name.to_string());
        }
        json!({"traffic": traffic})
    };
    let metadata = ObjectMeta {
        name: Some(name.name.to_string()),
        namespace: Some(name.namespace.to_string()),
        labels: Some(labels),
        annotations: Some(annotations).filter(|it| !it.is_empty()),
        owner_references: owner_references("Service", &name.name, service_meta),
        ..ObjectMeta::default()
    };
    let kind = if kind == LocalObjectKind::Configuration { "Configuration" } else { "Route" };
    json!({"apiVersion": API_VERSION, "kind": kind, "metadata": to_json_value(metadata), "spec": spec})
}

/// Returns the hash of the object that is applied for a Service.
pub(crate) fn applied_object_hash(
    kind: LocalObjectKind,
    service: &ServiceState,
    name: &NamespacedName,
) -> u64 {
    stable_json_hash(&render_service_child(kind, service, name))
}

/// Returns labels and annotations of the Configuration or Route of a Service.
pub(crate) fn child_metadata(
    kind: LocalObjectKind,
    service: &ServiceState,
    name: &NamespacedName,
) -> (BTreeMap<String, String>, BTreeMap<String, String>) {
    let ServiceState { meta, manifest, .. } = service;
    let mut labels = manifest.labels.to_btree_map();
    let mut annotations = manifest.annotations.to_btree_map();
    labels.insert(key::SERVICE.into(), name.name.to_string());
    if kind == LocalObjectKind::Configuration {
        labels.insert(key::SERVICE_UID.into(), meta.uid.to_string());
        // A rollout is the Route's: Knative leaves its annotations off the Configuration.
        annotations.retain(|name, _| !key::ROLLOUT_DURATION.contains(&name.as_str()));
        annotations.insert(key::ROUTES.into(), name.name.to_string());
    }
    (labels, annotations)
}

/// Returns traffic targets in the form of a spec.
pub(crate) fn spec_traffic(traffic: &[TrafficSpec]) -> Vec<TrafficTarget> {
    let target = |spec: &TrafficSpec| TrafficTarget {
        tag: spec.tag.as_deref().map(Into::into),
        revision_name: spec.revision_name.as_deref().map(Into::into),
        configuration_name: spec.configuration_name.as_deref().map(Into::into),
        latest_revision: Some(spec.revision_name.is_none()),
        percent: Some(spec.percent.into()),
        ..TrafficTarget::default()
    };
    traffic.iter().map(target).collect()
}

/// Returns a template as JSON; `null` if the text is no JSON.
pub(crate) fn template_json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_default()
}

/// Returns the owner references of a child object, in the type of `ObjectMeta`'s field. The only owner is an object of
/// the group `serving.knative.dev`, which controls the child (`controller: true`).
pub(crate) fn owner_references(
    kind: &str,
    name: &str,
    meta: &ObjectMetaSummary,
) -> Option<Vec<OwnerReference>> {
    Some(vec![OwnerReference {
        api_version: API_VERSION.into(),
        block_owner_deletion: Some(true),
        controller: Some(true),
        kind: kind.into(),
        name: name.into(),
        uid: meta.uid.to_string(),
    }])
}

/// Converts a type of the API to JSON.
pub(crate) fn to_json_value(value: impl Serialize) -> Value {
    serde_json::to_value(value).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::cluster_state::{CompactStringMap, ServiceManifest, Uid};

    #[test]
    fn hashes_of_applied_children_stay_the_same_across_releases() {
        let pairs = |all: &[(&str, &str)]| {
            let map = all.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
            CompactStringMap::from(&map)
        };
        let uid = Uid::parse("00000000-0000-4000-8000-000000000001").expect("a UID");
        let service = ServiceState {
            meta: ObjectMetaSummary { uid, ..ObjectMetaSummary::default() },
            manifest: ServiceManifest {
                labels: pairs(&[("team", "a")]),
                annotations: pairs(&[("note", "b"), (key::ROLLOUT_DURATION[0], "60")]),
                revision_name: None,
                template: r#"{"metadata":{},"spec":{"containers":[{"image":"hello"}]}}"#.into(),
                traffic: [TrafficSpec { percent: 100, ..TrafficSpec::default() }].into(),
            },
            ..ServiceState::default()
        };
        let name = NamespacedName::new("default", "hello");
        let hash = |kind| applied_object_hash(kind, &service, &name);
        // Computed by another implementation: clusters hold hashes of earlier releases.
        assert_eq!(hash(LocalObjectKind::Configuration), 0xccc3_71b6_304d_9631);
        assert_eq!(hash(LocalObjectKind::Route), 0xc3b4_b822_8baf_a9ef);
    }
}
