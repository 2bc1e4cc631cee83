//! Pure: labels, annotations and owners of a Revision's child objects.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::RevisionView;
use crate::model::{knative::key, scale_policy::AUTOSCALING_PREFIX};

/// Labels of a Revision that its children do not inherit, since they change while it runs.
const UNINHERITED_LABELS: [&str; 2] = [key::ROUTING_STATE, key::ROUTE];
/// Annotations of a Revision that its children do not inherit: most change while it runs. With [`key::SCALE_TO_ZERO`]
/// the Services of the Revision would be scaled Services.
const UNINHERITED_ANNOTATIONS: [&str; 7] = [
    key::SCALE_TO_ZERO,
    "serving.knative.dev/lastPinned",
    key::NO_GC,
    key::ROUTING_STATE_MODIFIED,
    key::ROUTES,
    key::INITIAL_SCALE_REACHED,
    "kubectl.kubernetes.io/last-applied-configuration",
];
/// Label that groups pods in dashboards without knowledge of Knative.
const APP_LABEL: &str = "app";

/// Labels of every child object of a Revision (`pkg/reconciler/revision/resources/meta.go`).
pub fn child_labels(revision: &RevisionView<'_>) -> BTreeMap<String, String> {
    let mut labels = revision.labels.clone();
    labels.retain(|key, _| !UNINHERITED_LABELS.contains(&key.as_str()));
    labels.entry(APP_LABEL.into()).or_insert_with(|| revision.name.into());
    labels.insert(key::REVISION.into(), revision.name.into());
    labels.insert(key::REVISION_UID.into(), revision.uid.into());
    labels.insert(key::CONFIGURATION.into(), revision.configuration.into());
    if !revision.service.is_empty() {
        labels.insert(key::SERVICE.into(), revision.service.into());
    }
    labels
}

/// Annotations of a Revision's children, without those of autoscaling: only objects that describe scale carry them.
pub fn child_annotations(revision: &RevisionView<'_>) -> BTreeMap<String, String> {
    let mut annotations = scaling_annotations(revision);
    annotations.retain(|key, _| !key.starts_with(AUTOSCALING_PREFIX));
    annotations
}

/// Annotations of the children that describe scale, those of autoscaling included.
pub fn scaling_annotations(revision: &RevisionView<'_>) -> BTreeMap<String, String> {
    let mut annotations = revision.annotations.clone();
    annotations.retain(|key, _| !UNINHERITED_ANNOTATIONS.contains(&key.as_str()));
    annotations
}

/// Label selector that matches exactly the Revision's pods.
pub fn pod_selector(revision: &RevisionView<'_>) -> BTreeMap<String, String> {
    BTreeMap::from([(key::REVISION_UID.into(), revision.uid.into())])
}

/// Metadata of a Revision's child with this name.
pub fn child_meta(revision: &RevisionView<'_>, name: String) -> ObjectMeta {
    ObjectMeta {
        name: Some(name),
        namespace: Some(revision.namespace.into()),
        labels: Some(child_labels(revision)),
        annotations: Some(child_annotations(revision)).filter(|it| !it.is_empty()),
        owner_references: Some(vec![revision.owner().to_owner_reference()]),
        ..ObjectMeta::default()
    }
}
