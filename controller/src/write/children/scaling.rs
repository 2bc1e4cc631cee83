//! Pure: the objects that show tools how a Revision or scaled Service scales: PodAutoscaler, ServerlessService.

use std::collections::BTreeMap;

use common::wire::AppProtocol;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};

use super::{ChildObject, OwnerObject, RevisionView, meta};
use crate::model::{
    cluster_state::ActivatorPort,
    knative::key,
    object::{ResourceKind, names},
    scale_policy::{AUTOSCALING_PREFIX, KPA_CLASS},
};

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

fn protocol_type(protocol: AppProtocol) -> &'static str {
    match protocol {
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
        "protocolType": protocol_type(revision.protocol()),
    });
    scaling_object(revision, ResourceKind::PodAutoscaler, &spec)
}

/// PodAutoscaler of a scaled Service.
#[derive(Clone, Copy, Debug)]
pub struct ScaledAutoscalerSpec<'a> {
    /// Namespace of the Service.
    pub namespace: &'a str,
    /// Name of the Service, and so of the PodAutoscaler.
    pub service: &'a str,
    /// Workload that it scales; the Service itself while it scales none.
    pub owner: OwnerObject<'a>,
    /// Ports at the activators that are allocated to the Service.
    pub ports: &'a [ActivatorPort],
    /// True if all ports of the Service carry bytes of any protocol.
    pub is_tcp: bool,
    /// Value of `containerConcurrency`.
    pub container_concurrency: i64,
}

/// Builds the PodAutoscaler of a scaled Service. It records what a controller that starts must know.
pub fn scaled_pod_autoscaler(of: &ScaledAutoscalerSpec<'_>) -> ChildObject {
    let port = |it: &ActivatorPort| format!("{}={}", it.service_port, it.activator_port);
    let ports: Vec<String> = of.ports.iter().map(port).collect();
    let class = (format!("{AUTOSCALING_PREFIX}class"), KPA_CLASS.to_owned());
    let mut annotations = BTreeMap::from([class]);
    // The record of the allocated ports: a restart must not move connections that wait to other ports.
    if !ports.is_empty() {
        annotations.insert(key::ACTIVATOR_PORTS.into(), ports.join(","));
    }
    let meta = ObjectMeta {
        name: Some(of.service.into()),
        namespace: Some(of.namespace.into()),
        labels: Some(BTreeMap::from([(key::SCALED_SERVICE.into(), of.service.into())])),
        annotations: Some(annotations),
        owner_references: Some(vec![of.owner.to_weak_owner_reference()]),
        ..ObjectMeta::default()
    };
    let spec = json!({
        "containerConcurrency": of.container_concurrency,
        "scaleTargetRef": {
            "apiVersion": of.owner.resource.api_version(),
            "kind": of.owner.resource.kind(),
            "name": of.owner.name,
        },
        "reachability": "Reachable",
        "protocolType": protocol_type(if of.is_tcp { AppProtocol::Tcp } else { AppProtocol::Http1 }),
    });
    ChildObject::new(ResourceKind::PodAutoscaler, meta, json!({ "spec": spec }))
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
        "protocolType": protocol_type(revision.protocol()),
        "numActivators": activators,
    });
    scaling_object(revision, ResourceKind::ServerlessService, &spec)
}
