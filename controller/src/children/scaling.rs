//! Pure: the objects that show tools how a Revision scales: PodAutoscaler, ServerlessService.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{Object, Resource, Revision, deployment, meta};

/// Annotation with the metric that a Revision scales by. Only objects that scale the Revision carry it.
const METRIC: &str = "autoscaling.knative.dev/metric";

/// Reachability of a Revision by Routes, as in a PodAutoscaler's spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reachability {
    /// Not known yet: the field is empty.
    Unknown,
    /// At least one Route targets the Revision.
    Reachable,
    /// No Route targets the Revision.
    Unreachable,
}

/// Path of new connections to a Revision, as in a ServerlessService's spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Direct path: from the kernel to the pods.
    Serve,
    /// Activator path: by activators.
    Proxy,
}

fn protocol(revision: &Revision<'_>) -> &'static str {
    if revision.h2c() { "h2c" } else { "http1" }
}

fn target(revision: &Revision<'_>) -> Value {
    json!({
        "apiVersion": Resource::Deployment.api_version(),
        "kind": Resource::Deployment.kind(),
        "name": deployment::name(revision.name),
    })
}

/// Annotations of a Revision's ServerlessService and Services (knative/serving
/// `pkg/reconciler/autoscaling/resources/sks.go`).
pub(super) fn served_annotations(revision: &Revision<'_>) -> BTreeMap<String, String> {
    let mut annotations = meta::scaling_annotations(revision);
    annotations.remove(METRIC);
    annotations
}

fn named(revision: &Revision<'_>, resource: Resource, spec: &Value) -> Object {
    let mut meta = meta::meta(revision, revision.name.into());
    let annotations = match resource {
        Resource::ServerlessService => served_annotations(revision),
        _ => meta::scaling_annotations(revision),
    };
    meta.annotations = Some(annotations).filter(|it| !it.is_empty());
    Object::new(resource, meta, json!({ "spec": spec }))
}

/// Builds the PodAutoscaler of a Revision.
pub fn autoscaler(revision: &Revision<'_>, reachability: Reachability) -> Object {
    let reachability = match reachability {
        Reachability::Unknown => "",
        Reachability::Reachable => "Reachable",
        Reachability::Unreachable => "Unreachable",
    };
    let spec = json!({
        "containerConcurrency": revision.spec.container_concurrency.unwrap_or(0),
        "scaleTargetRef": target(revision),
        "reachability": reachability,
        "protocolType": protocol(revision),
    });
    named(revision, Resource::PodAutoscaler, &spec)
}

/// Builds the ServerlessService of a Revision; `activators` serve it, 0 meaning all of them.
pub fn serverless_service(revision: &Revision<'_>, mode: Mode, activators: i32) -> Object {
    let spec = json!({
        "mode": match mode {
            Mode::Serve => "Serve",
            Mode::Proxy => "Proxy",
        },
        "objectRef": target(revision),
        "protocolType": protocol(revision),
        "numActivators": activators,
    });
    named(revision, Resource::ServerlessService, &spec)
}
