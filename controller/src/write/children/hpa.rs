//! Pure: the HorizontalPodAutoscaler of a Revision of the class `hpa.autoscaling.knative.dev` (knative/serving
//! `pkg/reconciler/autoscaling/hpa/resources/hpa.go`).

use serde_json::{Value, json};

use super::{ChildObject, OwnerObject, RevisionView, meta};
use crate::model::{
    go_values::parse_unsigned_duration,
    object::{ResourceKind, names},
    scale_policy::AUTOSCALING_PREFIX,
};

/// Bounds of a HorizontalPodAutoscaler, and its owner.
#[derive(Clone, Copy, Debug)]
pub struct HpaParameters<'a> {
    /// Least number of pods; 0 leaves the field unset, for which Kubernetes takes one.
    pub min: u32,
    /// Greatest number of pods; 0: no limit.
    pub max: u32,
    /// UID of the PodAutoscaler that owns the HorizontalPodAutoscaler.
    pub owner_uid: &'a str,
}

/// Builds the HorizontalPodAutoscaler, which scales the Revision instead of Rouse's autoscaler.
pub fn horizontal_pod_autoscaler(
    revision: &RevisionView<'_>,
    parameters: HpaParameters<'_>,
) -> ChildObject {
    // As in Knative, the PodAutoscaler is the owner and not the Revision.
    let owner = OwnerObject {
        resource: ResourceKind::PodAutoscaler,
        name: revision.name,
        uid: parameters.owner_uid,
    };
    let mut meta = meta::child_meta(revision, revision.name.into());
    meta.annotations = Some(meta::scaling_annotations(revision)).filter(|it| !it.is_empty());
    meta.owner_references = Some(vec![owner.to_owner_reference()]);
    let bound = |pods: u32| i32::try_from(pods).unwrap_or(i32::MAX);
    let mut spec = json!({
        "scaleTargetRef": {
            "apiVersion": ResourceKind::Deployment.api_version(),
            "kind": ResourceKind::Deployment.kind(),
            "name": names::deployment_name(revision.name),
        },
        // The API requires `maxReplicas`, so no limit is the largest number.
        "maxReplicas": if parameters.max == 0 { i32::MAX } else { bound(parameters.max) },
    });
    if parameters.min > 0 {
        spec["minReplicas"] = json!(bound(parameters.min));
    }
    if let Some(metric) = metric_spec(revision) {
        spec["metrics"] = json!([metric]);
    }
    // Kubernetes has no averaging window; both stabilization windows come nearest to Knative's.
    if let Some(window) =
        autoscaling_annotation(revision, "window").and_then(parse_unsigned_duration)
    {
        let window = json!({"stabilizationWindowSeconds": window.as_secs()});
        spec["behavior"] = json!({"scaleDown": window, "scaleUp": window});
    }
    ChildObject::new(ResourceKind::HorizontalPodAutoscaler, meta, json!({"spec": spec}))
}

/// Text of the autoscaling annotation with this name, without its prefix.
fn autoscaling_annotation<'a>(revision: &RevisionView<'a>, name: &str) -> Option<&'a str> {
    revision.annotations.get(&format!("{AUTOSCALING_PREFIX}{name}")).map(|it| it.trim())
}

/// Metric with its target value. Without a target, Kubernetes uses its default: 80 % of the requested CPU.
fn metric_spec(revision: &RevisionView<'_>) -> Option<Value> {
    let target: f64 = autoscaling_annotation(revision, "target")?.parse().ok()?;
    let average_value = truncate_to_i64(target);
    Some(match autoscaling_annotation(revision, "metric").unwrap_or("cpu") {
        // Knative rounds only the utilization up; the other targets lose their decimals.
        "cpu" => json!({"type": "Resource", "resource": {
            "name": "cpu",
            "target": {"type": "Utilization", "averageUtilization": truncate_to_i64(target.ceil())},
        }}),
        "memory" => json!({"type": "Resource", "resource": {
            "name": "memory",
            "target": {"type": "AverageValue", "averageValue": mebibytes(average_value)},
        }}),
        name => json!({"type": "Pods", "pods": {
            "metric": {"name": name},
            "target": {"type": "AverageValue", "averageValue": thousands(average_value)},
        }}),
    })
}

/// Truncates a number to an integer, as Go converts it; one that is too large becomes the largest.
fn truncate_to_i64(number: f64) -> i64 {
    number as i64
}

/// Formats a quantity as Kubernetes does: with the largest unit that leaves a whole number.
fn format_quantity(mut number: i64, step: i64, units: &[&str]) -> String {
    let mut unit = 0;
    while number != 0 && number % step == 0 && unit + 1 < units.len() {
        number /= step;
        unit += 1;
    }
    format!("{number}{}", units[unit])
}

fn mebibytes(number: i64) -> String {
    format_quantity(number, 1024, &["Mi", "Gi", "Ti", "Pi", "Ei"])
}

fn thousands(number: i64) -> String {
    format_quantity(number, 1000, &["", "k", "M", "G", "T", "P", "E"])
}
