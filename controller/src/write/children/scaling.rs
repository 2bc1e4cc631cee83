//! Pure: the objects that show tools how a Revision scales: PodAutoscaler, ServerlessService.

use std::collections::BTreeMap;

use common::wire::AppProtocol;
use serde_json::{Value, json};

use super::{ChildObject, RevisionView, meta};
use crate::model::object::{ResourceKind, names};

/// Annotation with the metric that a Revision scales by. Only objects that scale the Revision carry it.
const METRIC: &str = "autoscaling.knative.dev/metric";

/// Reachability of a Revision by Routes, as in a PodAutoscaler's spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RevisionReachability {
    /// Not known yet: the field is empty.
    Unknown,
    /// At least one Route targets the Revision.
    Reachable,
    /// No Route targets the Revision.
    Unreachable,
}

/// Path of new connections to a Revision, as in a ServerlessService's spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerlessServiceMode {
    /// Direct path: from the kernel to the pods.
    Serve,
    /// Activator path: by activators.
    Proxy,
}

fn protocol_type(revision: &RevisionView<'_>) -> &'static str {
    match revision.protocol() {
        AppProtocol::Http1 => "http1",
        AppProtocol::H2c => "h2c",
        AppProtocol::Tcp => "tcp",
    }
}

fn scale_target_ref(revision: &RevisionView<'_>) -> Value {
    json!({
        "apiVersion": ResourceKind::Deployment.api_version(),
        "kind": ResourceKind::Deployment.kind(),
        "name": names::deployment_name(revision.name),
    })
}

/// Annotations of a Revision's ServerlessService and Services (knative/serving
/// `pkg/reconciler/autoscaling/resources/sks.go`).
pub(super) fn service_annotations(revision: &RevisionView<'_>) -> BTreeMap<String, String> {
    let mut annotations = meta::scaling_annotations(revision);
    annotations.remove(METRIC);
    annotations
}

fn scaling_object(
    revision: &RevisionView<'_>,
    resource: ResourceKind,
    spec: &Value,
) -> ChildObject {
    let mut meta = meta::child_meta(revision, revision.name.into());
    let annotations = match resource {
        ResourceKind::ServerlessService => service_annotations(revision),
        _ => meta::scaling_annotations(revision),
    };
    meta.annotations = Some(annotations).filter(|it| !it.is_empty());
    ChildObject::new(resource, meta, json!({ "spec": spec }))
}

/// Builds the PodAutoscaler of a Revision.
pub fn pod_autoscaler(
    revision: &RevisionView<'_>,
    reachability: RevisionReachability,
) -> ChildObject {
    let reachability = match reachability {
        RevisionReachability::Unknown => "",
        RevisionReachability::Reachable => "Reachable",
        RevisionReachability::Unreachable => "Unreachable",
    };
    let spec = json!({
        "containerConcurrency": revision.spec.container_concurrency.unwrap_or(0),
        "scaleTargetRef": scale_target_ref(revision),
        "reachability": reachability,
        "protocolType": protocol_type(revision),
    });
    scaling_object(revision, ResourceKind::PodAutoscaler, &spec)
}

/// Builds the ServerlessService of a Revision; `activators` serve it, 0 meaning all of them.
pub fn serverless_service(
    revision: &RevisionView<'_>,
    mode: ServerlessServiceMode,
    activators: i32,
) -> ChildObject {
    let spec = json!({
        "mode": match mode {
            ServerlessServiceMode::Serve => "Serve",
            ServerlessServiceMode::Proxy => "Proxy",
        },
        "objectRef": scale_target_ref(revision),
        "protocolType": protocol_type(revision),
        "numActivators": activators,
    });
    scaling_object(revision, ResourceKind::ServerlessService, &spec)
}
