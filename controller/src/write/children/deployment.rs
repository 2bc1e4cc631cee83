//! Pure: the Deployment of a Revision (knative/serving `pkg/reconciler/revision/resources/deploy.go`), without
//! Knative's sidecar.

use k8s_openapi::{
    api::{
        apps::v1::{DeploymentSpec, DeploymentStrategy, RollingUpdateDeployment},
        core::v1::PodTemplateSpec,
    },
    apimachinery::pkg::{
        apis::meta::v1::{LabelSelector, ObjectMeta},
        util::intstr::IntOrString,
    },
};
use serde_json::json;

use super::{ChildObject, RevisionView, meta, pod};
use crate::model::{
    cluster_state::DeploymentSettings,
    go_values::parse_unsigned_duration,
    knative::{key, user_container},
    object::{ResourceKind, names::deployment_name},
};

/// Annotation that names the default container of `kubectl logs` and `kubectl exec`.
const DEFAULT_CONTAINER: &str = "kubectl.kubernetes.io/default-container";

/// Builds the Deployment. `replicas` is used only when the Deployment is created.
pub fn deployment(
    revision: &RevisionView<'_>,
    config: &DeploymentSettings,
    replicas: i32,
) -> ChildObject {
    let spec = DeploymentSpec {
        replicas: Some(replicas),
        selector: LabelSelector {
            match_labels: Some(meta::pod_selector(revision)),
            ..LabelSelector::default()
        },
        progress_deadline_seconds: Some(progress_deadline(revision, config)),
        // A Revision is immutable, so there is nothing to roll back to.
        revision_history_limit: Some(0),
        strategy: Some(DeploymentStrategy {
            type_: Some("RollingUpdate".into()),
            rolling_update: Some(RollingUpdateDeployment {
                // A changed template must never leave fewer pods than were decided.
                max_unavailable: Some(IntOrString::Int(0)),
                ..RollingUpdateDeployment::default()
            }),
        }),
        template: pod_template(revision, config),
        ..DeploymentSpec::default()
    };
    let meta = meta::child_meta(revision, deployment_name(revision.name));
    ChildObject::new(ResourceKind::Deployment, meta, json!({"spec": spec}))
}

/// Deadline of the Deployment in seconds: the Revision's annotation, or else the operator's setting.
fn progress_deadline(revision: &RevisionView<'_>, config: &DeploymentSettings) -> i32 {
    let annotation = key::PROGRESS_DEADLINE.iter().find_map(|name| revision.annotations.get(*name));
    let seconds = annotation.and_then(|text| parse_unsigned_duration(text)).map(|it| it.as_secs());
    let seconds = seconds.and_then(|it| i32::try_from(it).ok()).filter(|it| *it > 0);
    seconds.unwrap_or(config.progress_deadline_seconds)
}

fn pod_template(revision: &RevisionView<'_>, config: &DeploymentSettings) -> PodTemplateSpec {
    let containers = &revision.spec.pod.containers;
    let mut annotations = meta::child_annotations(revision);
    if let Some(serving) = containers.get(user_container::serving_index(containers)) {
        annotations.insert(DEFAULT_CONTAINER.into(), serving.name.clone());
    }
    PodTemplateSpec {
        metadata: Some(ObjectMeta {
            labels: Some(meta::child_labels(revision)),
            annotations: Some(annotations),
            ..ObjectMeta::default()
        }),
        spec: Some(pod::pod_spec(revision, config)),
    }
}
