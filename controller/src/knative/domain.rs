//! Pure: `serving.knative.dev/v1beta1` DomainMapping: one more name for a service (knative.md §1.7).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Address, Condition, Object};

/// Group and version.
pub const API_VERSION: &str = "serving.knative.dev/v1beta1";

/// A domain name that leads to a service; its own name is the domain.
pub type DomainMapping = Object<DomainMappingSpec, DomainMappingStatus>;

/// What is wanted of a domain.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct DomainMappingSpec {
    /// Where it leads: something addressable in the same namespace.
    pub r#ref: Reference,
    /// The certificate, where the user brings one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<SecretTls>,
}

/// Names an object.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Reference {
    /// Group and version of the object.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub api_version: String,
    /// Kind of the object.
    pub kind: String,
    /// Name of the object.
    pub name: String,
    /// Namespace of the object; the DomainMapping's own where none is said.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub namespace: String,
}

/// A certificate that the user brings.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct SecretTls {
    /// Name of the Secret that holds it.
    pub secret_name: String,
}

/// How a domain fares.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct DomainMappingStatus {
    /// Generation the rest speaks of.
    pub observed_generation: i64,
    /// `Ready` and what it depends on.
    pub conditions: Vec<Condition>,
    /// Where it is reachable.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub url: String,
    /// The same, as others look it up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<Address>,
}
