//! Pure: the HorizontalPodAutoscaler of a Revision of the class `hpa.autoscaling.knative.dev` (knative/serving
//! `pkg/reconciler/autoscaling/hpa/resources/hpa.go`).

use serde_json::{Value, json};

use super::{Object, Owner, Resource, Revision, deployment, meta};
use crate::policy::{PREFIX, parse_duration};

/// What bounds it, and who owns it.
#[derive(Clone, Copy, Debug)]
pub struct Parts<'a> {
    /// The fewest pods; 0: as Kubernetes has it, which is one.
    pub min: u32,
    /// The most pods; 0: no limit.
    pub max: u32,
    /// Uid of the PodAutoscaler that it is made for.
    pub owner: &'a str,
}

/// What scales the Revision in the place of an autoscaler of ours.
pub fn autoscaler(revision: &Revision<'_>, parts: Parts<'_>) -> Object {
    let owner = Owner { resource: Resource::PodAutoscaler, name: revision.name, uid: parts.owner };
    let mut meta = meta::meta(revision, revision.name.into());
    meta.annotations = Some(meta::scaling_annotations(revision)).filter(|it| !it.is_empty());
    meta.owner_references = Some(vec![owner.reference()]);
    let bound = |pods: u32| i32::try_from(pods).unwrap_or(i32::MAX);
    let mut spec = json!({
        "scaleTargetRef": {
            "apiVersion": Resource::Deployment.api_version(),
            "kind": Resource::Deployment.kind(),
            "name": deployment::name(revision.name),
        },
        "maxReplicas": if parts.max == 0 { i32::MAX } else { bound(parts.max) },
    });
    if parts.min > 0 {
        spec["minReplicas"] = json!(bound(parts.min));
    }
    if let Some(metric) = metric(revision) {
        spec["metrics"] = json!([metric]);
    }
    if let Some(window) = annotation(revision, "window").and_then(parse_duration) {
        let window = json!({"stabilizationWindowSeconds": window.as_secs()});
        spec["behavior"] = json!({"scaleDown": window, "scaleUp": window});
    }
    Object::new(Resource::HorizontalPodAutoscaler, meta, json!({"spec": spec}))
}

fn annotation<'a>(revision: &Revision<'a>, name: &str) -> Option<&'a str> {
    revision.annotations.get(&format!("{PREFIX}{name}")).map(|it| it.trim())
}

/// What is measured. Without a target Kubernetes measures what it always does: 80 % of the CPU that is asked for.
fn metric(revision: &Revision<'_>) -> Option<Value> {
    let target: f64 = annotation(revision, "target")?.parse().ok()?;
    let whole = whole(target);
    Some(match annotation(revision, "metric").unwrap_or("cpu") {
        "cpu" => json!({"type": "Resource", "resource": {
            "name": "cpu",
            "target": {"type": "Utilization", "averageUtilization": self::whole(target.ceil())},
        }}),
        "memory" => json!({"type": "Resource", "resource": {
            "name": "memory",
            "target": {"type": "AverageValue", "averageValue": mebibytes(whole)},
        }}),
        name => json!({"type": "Pods", "pods": {
            "metric": {"name": name},
            "target": {"type": "AverageValue", "averageValue": thousands(whole)},
        }}),
    })
}

/// A number without what stands behind its point, as Go converts it; one that is too large is the largest.
fn whole(number: f64) -> i64 {
    number as i64
}

/// A quantity as Kubernetes writes it: the largest unit that leaves a whole number.
fn quantity(mut number: i64, step: i64, units: &[&str]) -> String {
    let mut unit = 0;
    while number != 0 && number % step == 0 && unit + 1 < units.len() {
        number /= step;
        unit += 1;
    }
    format!("{number}{}", units[unit])
}

fn mebibytes(number: i64) -> String {
    quantity(number, 1024, &["Mi", "Gi", "Ti", "Pi", "Ei"])
}

fn thousands(number: i64) -> String {
    quantity(number, 1000, &["", "k", "M", "G", "T", "P", "E"])
}
