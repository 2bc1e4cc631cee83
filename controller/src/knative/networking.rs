//! Pure: `networking.internal.knative.dev/v1alpha1`: what tools read of how a Revision is reached (knative.md §1.9).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Condition, Object, autoscaling::ObjectReference};

/// Group and version.
pub const API_VERSION: &str = "networking.internal.knative.dev/v1alpha1";

/// Where the connections to a Revision lead.
pub type ServerlessService = Object<ServerlessServiceSpec, ServerlessServiceStatus>;
/// Which namespace may use a domain; its own name is the domain.
pub type ClusterDomainClaim = Object<ClusterDomainClaimSpec, NoStatus>;

/// Where connections shall lead.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ServerlessServiceSpec {
    /// `Serve` as the kernel leads to pods, `Proxy` as it leads to activators.
    pub mode: Mode,
    /// Whose pods they are.
    pub object_ref: ObjectReference,
    /// What the pods speak: `http1` or `h2c`.
    pub protocol_type: String,
    /// Activators that serve it; 0: all.
    #[serde(skip_serializing_if = "is_zero")]
    pub num_activators: i32,
}

/// Where connections lead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Mode {
    /// To pods.
    Serve,
    /// To activators.
    #[default]
    Proxy,
}

fn is_zero(count: &i32) -> bool {
    *count == 0
}

/// How that fares.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ServerlessServiceStatus {
    /// Generation the rest speaks of.
    pub observed_generation: i64,
    /// `Ready`, `EndpointsPopulated`, `ActivatorEndpointsPopulated`.
    pub conditions: Vec<Condition>,
    /// Kubernetes Service with the Revision's name.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub service_name: String,
    /// Kubernetes Service that selects the pods.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub private_service_name: String,
}

/// Whose a domain is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ClusterDomainClaimSpec {
    /// The namespace that may use it.
    pub namespace: String,
}

/// A kind without a status.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NoStatus {}
