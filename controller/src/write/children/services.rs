//! Pure: the core group's Services: two for each Revision, one for each name of a Route.

use std::{collections::BTreeMap, num::NonZeroU16, time::Duration};

use common::wire::AppProtocol;
use k8s_openapi::{
    api::core::v1::{ClientIPConfig, ServicePort, ServiceSpec, SessionAffinityConfig},
    apimachinery::pkg::{apis::meta::v1::ObjectMeta, util::intstr::IntOrString},
};
use serde_json::json;

use super::{ChildObject, OwnerObject, RevisionView, meta, scaling, slices::INTERNAL_PORT};
use crate::model::{
    knative::{
        key::{self, ACTIVATOR_PORT_ANNOTATION},
        networking::revision_service_port,
        user_container,
    },
    object::{
        ResourceKind,
        hash::APPLIED_ANNOTATION,
        names::{private_service_name, tagged_name},
    },
};

/// Label with `Public` or `Private`, for the two Services of a Revision (knative.dev/networking).
const SERVICE_TYPE: &str = "networking.internal.knative.dev/serviceType";
/// Label with the name of the ServerlessService that a Service belongs to.
const SERVERLESS_SERVICE: &str = "networking.internal.knative.dev/serverlessservice";
/// Port of a Route's names for HTTP.
const HTTP_PORT: i32 = 80;
/// Port of a Route's names for https inside the cluster.
const HTTPS_PORT: i32 = 443;
/// Name of that port. kube-proxy finds the port of the slices by it.
pub(super) const HTTPS_PORT_NAME: &str = "https";

/// Annotations of a Route that its Services do not inherit. With [`key::SCALE_TO_ZERO`] they would be scaled Services.
const UNINHERITED_ANNOTATIONS: [&str; 6] = [
    APPLIED_ANNOTATION,
    key::SCALE_TO_ZERO,
    ACTIVATOR_PORT_ANNOTATION,
    key::OWNED_GATEWAY_PORT,
    key::ALLOCATIONS,
    "kubectl.kubernetes.io/last-applied-configuration",
];

/// Builds the Service that selects the Revision's pods.
pub fn private_service(revision: &RevisionView<'_>) -> ChildObject {
    let containers = &revision.spec.pod.containers;
    let port =
        user_container::serving_port(containers.get(user_container::serving_index(containers)));
    let spec = ServiceSpec {
        selector: Some(meta::pod_selector(revision)),
        ports: Some(vec![service_port(revision.protocol(), port)]),
        ..ServiceSpec::default()
    };
    revision_service(revision, private_service_name(revision.name), "Private", spec)
}

/// Builds the Service that carries the Revision's name, without a selector. `kube-proxy` reads the port of its slices,
/// and net-kourier the target port of the Service. Behind an ingress, slices list activators only.
pub fn public_service(revision: &RevisionView<'_>) -> ChildObject {
    let spec = ServiceSpec {
        ports: Some(vec![service_port(revision.protocol(), INTERNAL_PORT.into())]),
        ..ServiceSpec::default()
    };
    revision_service(revision, revision.name.into(), "Public", spec)
}

fn revision_service(
    revision: &RevisionView<'_>,
    name: String,
    class: &str,
    spec: ServiceSpec,
) -> ChildObject {
    let mut meta = meta::child_meta(revision, name);
    // Both have the annotations of the ServerlessService (knative/serving
    // `pkg/reconciler/serverlessservice/resources/services.go`).
    meta.annotations = Some(scaling::service_annotations(revision)).filter(|it| !it.is_empty());
    let labels = meta.labels.get_or_insert_default();
    labels.insert(SERVICE_TYPE.into(), class.into());
    labels.insert(SERVERLESS_SERVICE.into(), revision.name.into());
    ChildObject::new(ResourceKind::Service, meta, json!({"spec": spec}))
}

fn service_port(protocol: AppProtocol, target: i32) -> ServicePort {
    let port = revision_service_port(protocol);
    ServicePort {
        name: Some(port_name(protocol).into()),
        app_protocol: app_protocol(protocol).map(Into::into),
        port,
        protocol: Some("TCP".into()),
        target_port: Some(IntOrString::Int(target)),
        ..ServicePort::default()
    }
}

/// Name of the port of a Revision's Services for a protocol.
pub(super) fn port_name(protocol: AppProtocol) -> &'static str {
    match protocol {
        AppProtocol::Http1 => "http",
        AppProtocol::H2c => "http2",
        AppProtocol::Tcp => "tcp",
    }
}

/// Value of a port's `appProtocol`, by which a mesh knows the protocol; `None`: HTTP/1.1, which the name shows.
pub(super) fn app_protocol(protocol: AppProtocol) -> Option<&'static str> {
    match protocol {
        AppProtocol::Http1 => None,
        AppProtocol::H2c => Some("kubernetes.io/h2c"),
        AppProtocol::Tcp => Some("tcp"),
    }
}

/// Placeholder of one name of a Route: the Route's own name, or that of a tag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlaceholderSpec<'a> {
    /// Namespace of the Route and of the placeholder.
    pub namespace: &'a str,
    /// Name of the Route.
    pub route: &'a str,
    /// UID of the Route, which owns the placeholder.
    pub route_uid: &'a str,
    /// Tag of the target, for the name `<tag>-<route>`; none for the Route's own name.
    pub tag: Option<&'a str>,
    /// Name of the Service that the Route came from; empty without one.
    pub service: &'a str,
    /// Labels of the Route object.
    pub route_labels: BTreeMap<String, String>,
    /// Annotations of the Route object.
    pub route_annotations: BTreeMap<String, String>,
    /// The name's own port number at the activators, once it is allocated.
    pub activator_port: Option<u16>,
    /// True if the name serves raw TCP.
    pub serves_tcp: bool,
    /// True if the name serves https inside the cluster.
    pub serves_local_tls: bool,
    /// Time for which a client keeps its pod, as a user has set it on the placeholder; `None`: no affinity.
    pub affinity: Option<Duration>,
    /// Gateway port that the Route owns, if the name is its own.
    pub gateway_port: Option<NonZeroU16>,
}

impl PlaceholderSpec<'_> {
    /// Name of the placeholder: `<route>` or `<tag>-<route>`.
    pub fn name(&self) -> String {
        tagged_name(self.tag, self.route)
    }

    /// Labels of the placeholder and its slices: the Route's (knative/serving
    /// `pkg/reconciler/route/resources/service.go`), without the label of visibility. On a placeholder that label
    /// belongs to the user, who hides one tag by it.
    pub fn labels(&self) -> BTreeMap<String, String> {
        let mut labels = self.route_labels.clone();
        labels.remove(key::VISIBILITY);
        labels.insert(key::ROUTE.into(), self.route.into());
        if !self.service.is_empty() {
            labels.insert(key::SERVICE.into(), self.service.into());
        }
        labels
    }

    /// Annotations of the placeholder: the Route's, the port of its name at the activators, and its gateway port.
    fn annotations(&self) -> BTreeMap<String, String> {
        let mut annotations = self.route_annotations.clone();
        // The annotations of `kubectl apply` and of Rouse's writer describe the Route object, not this one.
        annotations.retain(|key, _| !UNINHERITED_ANNOTATIONS.contains(&key.as_str()));
        let port = self.activator_port.map(|port| port.to_string());
        annotations.extend(port.map(|port| (ACTIVATOR_PORT_ANNOTATION.to_owned(), port)));
        let port = self.gateway_port.map(|port| port.to_string());
        annotations.extend(port.map(|port| (key::OWNED_GATEWAY_PORT.to_owned(), port)));
        annotations
    }

    /// Value of `appProtocol` of the name's port. The port's name stays the same whatever the protocol. `kube-proxy`
    /// finds the slices of a Service by it, and both objects never change at the same moment.
    pub(super) fn app_protocol(&self) -> Option<&'static str> {
        self.serves_tcp.then_some(AppProtocol::Tcp).and_then(app_protocol)
    }

    /// The Route as the owner of its children.
    pub fn owner(&self) -> OwnerObject<'_> {
        OwnerObject { resource: ResourceKind::Route, name: self.route, uid: self.route_uid }
    }
}

fn affinity_config(timeout: Duration) -> SessionAffinityConfig {
    let timeout_seconds = i32::try_from(timeout.as_secs()).ok();
    SessionAffinityConfig { client_ip: Some(ClientIPConfig { timeout_seconds }) }
}

/// Builds the placeholder, which gives a Route's name its ClusterIPs. It has no selector: its EndpointSlices name
/// activators, and the eBPF programs route around them.
pub fn placeholder_service(of: &PlaceholderSpec<'_>) -> ChildObject {
    let meta = ObjectMeta {
        name: Some(of.name()),
        namespace: Some(of.namespace.into()),
        labels: Some(of.labels()),
        annotations: Some(of.annotations()).filter(|it| !it.is_empty()),
        owner_references: Some(vec![of.owner().to_owner_reference()]),
        ..ObjectMeta::default()
    };
    let session_affinity = if of.affinity.is_some() { "ClientIP" } else { "None" };
    let spec = ServiceSpec {
        // Clients keep the address, and tags and Revisions change without it: so it is a plain ClusterIP.
        type_: Some("ClusterIP".into()),
        ip_family_policy: Some("PreferDualStack".into()),
        // Other values would have no effect, since the kernel bypasses the Service: they are corrected, not accepted.
        internal_traffic_policy: Some("Cluster".into()),
        session_affinity: Some(session_affinity.into()),
        session_affinity_config: of.affinity.map(affinity_config),
        ports: Some(placeholder_ports(of)),
        ..ServiceSpec::default()
    };
    ChildObject::new(ResourceKind::Service, meta, json!({"spec": spec}))
}

fn placeholder_ports(of: &PlaceholderSpec<'_>) -> Vec<ServicePort> {
    let http = ServicePort {
        name: Some("http".into()),
        app_protocol: of.app_protocol().map(Into::into),
        port: HTTP_PORT,
        protocol: Some("TCP".into()),
        target_port: Some(IntOrString::Int(HTTP_PORT)),
        ..ServicePort::default()
    };
    let https = of.serves_local_tls.then(|| ServicePort {
        name: Some(HTTPS_PORT_NAME.into()),
        port: HTTPS_PORT,
        protocol: Some("TCP".into()),
        target_port: Some(IntOrString::Int(HTTPS_PORT)),
        ..ServicePort::default()
    });
    [Some(http), https].into_iter().flatten().collect()
}
