//! Pure: `networking.internal.knative.dev/v1alpha1`: a Revision's routing, for tools that read it
//! (knative/networking `pkg/apis/networking/v1alpha1` at 17b28c6).

use std::collections::BTreeMap;

use common::wire::AppProtocol;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{KnativeCondition, KnativeObject, autoscaling::NamespacedObjectRef};

/// API group and version of the kinds here.
pub const API_VERSION: &str = "networking.internal.knative.dev/v1alpha1";

/// Returns the port of a Revision's Services for the protocol of its pods (`ServicePort` in `pkg/apis/networking`).
pub const fn revision_service_port(protocol: AppProtocol) -> i32 {
    match protocol {
        AppProtocol::Http1 | AppProtocol::Tcp => 80,
        AppProtocol::H2c => 81,
    }
}

/// Path of the connections to a Revision: direct or through activators.
pub type ServerlessService = KnativeObject<ServerlessServiceSpec, ServerlessServiceStatus>;
/// Reservation of a domain for one namespace; the object's name is the domain.
pub type ClusterDomainClaim = KnativeObject<ClusterDomainClaimSpec, EmptyStatus>;

/// Desired path of the connections.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ServerlessServiceSpec {
    /// `Serve` if the eBPF programs route to pods, `Proxy` if they route to activators.
    pub mode: KnativeServerlessMode,
    /// Deployment whose pods serve the Revision.
    pub object_ref: NamespacedObjectRef,
    /// Protocol of the pods: `http1`, `h2c` or `tcp`.
    pub protocol_type: String,
    /// Number of activators that serve the Revision; 0: all.
    #[serde(skip_serializing_if = "is_zero")]
    pub num_activators: i32,
}

/// Path of new connections to a Revision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum KnativeServerlessMode {
    /// Connections are routed to pods (direct path).
    Serve,
    /// Connections are routed to activators (activator path).
    #[default]
    Proxy,
}

fn is_zero(count: &i32) -> bool {
    *count == 0
}

/// Observed state of the path.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ServerlessServiceStatus {
    /// Generation of the spec that this status describes.
    pub observed_generation: i64,
    /// Conditions `Ready`, `EndpointsPopulated` and `ActivatorEndpointsPopulated`.
    pub conditions: Vec<KnativeCondition>,
    /// Name of the Kubernetes Service, which is the Revision's name.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub service_name: String,
    /// Name of the Kubernetes Service that selects the pods.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub private_service_name: String,
}

/// Desired owner of a domain.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ClusterDomainClaimSpec {
    /// Namespace that may use the domain.
    pub namespace: String,
}

/// Desired certificate of hosts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct CertificateSpec {
    /// Hosts of the certificate; `*.` begins one for all hosts below a domain.
    pub dns_names: Vec<String>,
    /// Domain below which the hosts are.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub domain: String,
    /// Name of the Secret that gets the certificate.
    pub secret_name: String,
}

/// Observed state of a certificate.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct CertificateStatus {
    /// Generation of the spec that this status describes.
    pub observed_generation: i64,
    /// The condition `Ready` only.
    pub conditions: Vec<KnativeCondition>,
    /// End of the certificate in the Secret, RFC 3339.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub not_after: String,
    /// Challenges by which an authority checks the hosts.
    #[serde(rename = "http01Challenges", skip_serializing_if = "Vec::is_empty")]
    pub http_challenges: Vec<CertificateChallenge>,
}

/// HTTP-01 challenge of an authority, with the Service that answers it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct CertificateChallenge {
    /// URL that the authority requests.
    pub url: String,
    /// Name of the Service that answers.
    pub service_name: String,
    /// Namespace of that Service.
    pub service_namespace: String,
    /// Port of that Service.
    pub service_port: i32,
}

/// Desired hosts of an ingress, with the Services behind them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct KnativeIngressSpec {
    /// Treatment of plain HTTP from outside: `Enabled` or `Redirected`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub http_option: String,
    /// Rules, each for some of the hosts.
    pub rules: Vec<IngressHostRule>,
    /// Certificates, each for some of the hosts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tls: Vec<IngressTls>,
}

/// Rule for some hosts of an ingress.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct IngressHostRule {
    /// Hosts of the rule.
    pub hosts: Vec<String>,
    /// Clients that can use the hosts.
    pub visibility: IngressVisibility,
    /// Paths of the hosts.
    pub http: IngressHttpRule,
}

/// Clients that can use a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum IngressVisibility {
    /// Clients outside the cluster too.
    #[default]
    ExternalIP,
    /// Clients inside the cluster only.
    ClusterLocal,
}

/// Paths of the hosts of one rule.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct IngressHttpRule {
    /// Paths, of which the first one that fits has a request.
    pub paths: Vec<IngressPath>,
}

/// Path of hosts, with the Services that share its requests.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct IngressPath {
    /// Prefix of the path; empty: all paths.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub path: String,
    /// Host for the Services; empty: that of the request.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub rewrite_host: String,
    /// Headers that a request must have.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, IngressHeaderMatch>,
    /// Services that share the requests.
    pub splits: Vec<IngressSplit>,
    /// Headers that are set in each request.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub append_headers: BTreeMap<String, String>,
}

/// Value that a header must have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct IngressHeaderMatch {
    /// Value of the header.
    pub exact: String,
}

/// Service that gets a share of the requests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct IngressSplit {
    /// Name of the Service.
    pub service_name: String,
    /// Namespace of the Service.
    pub service_namespace: String,
    /// Port of the Service.
    pub service_port: IntOrString,
    /// Share of the requests in percent.
    #[serde(default)]
    pub percent: i64,
    /// Headers that are set in each request for the Service.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub append_headers: BTreeMap<String, String>,
}

/// Certificate of hosts of an ingress.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct IngressTls {
    /// Hosts of the certificate.
    pub hosts: Vec<String>,
    /// Name of the Secret with the certificate.
    pub secret_name: String,
    /// Namespace of the Secret.
    pub secret_namespace: String,
}

/// Observed state of an ingress, as its controller writes it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct KnativeIngressStatus {
    /// Generation of the spec that this status describes.
    pub observed_generation: i64,
    /// Conditions `Ready`, `NetworkConfigured` and `LoadBalancerReady`.
    pub conditions: Vec<KnativeCondition>,
    /// Facts that the controller of the ingress keeps.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Addresses for clients outside the cluster.
    pub public_load_balancer: Option<IngressLoadBalancer>,
    /// Addresses for clients inside the cluster.
    pub private_load_balancer: Option<IngressLoadBalancer>,
}

/// Addresses of an ingress.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct IngressLoadBalancer {
    /// Addresses, each of which leads to the ingress.
    pub ingress: Vec<IngressAddress>,
}

/// Address of an ingress.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct IngressAddress {
    /// IP address of the load balancer.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub ip: String,
    /// Host name outside the cluster.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub domain: String,
    /// Host name inside the cluster.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub domain_internal: String,
    /// True if only a mesh leads to it.
    pub mesh_only: bool,
}

/// Status of a kind that has none.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EmptyStatus {}
