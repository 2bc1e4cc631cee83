//! Pure: `serving.knative.dev/v1beta1` DomainMapping: a further host name of a service
//! (knative/serving `pkg/apis/serving/v1beta1` at 98e5ef9).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{AddressableUrl, KnativeCondition, KnativeObject};

/// API group and version of the kind.
pub const API_VERSION: &str = "serving.knative.dev/v1beta1";

/// A host name that is routed to a service; the object's name is the host name.
pub type DomainMapping = KnativeObject<DomainMappingSpec, DomainMappingStatus>;

/// Desired state of a DomainMapping.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct DomainMappingSpec {
    /// Target of the host name: an addressable object in the same namespace.
    pub r#ref: MappingTargetRef,
    /// Certificate of the host name, if the user provides one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<SecretTls>,
}

/// Reference to an object by kind and name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct MappingTargetRef {
    /// Group and version of the object.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub api_version: String,
    /// Kind of the object.
    pub kind: String,
    /// Name of the object.
    pub name: String,
    /// Namespace of the object; the DomainMapping's own if empty.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub namespace: String,
}

/// Reference to a certificate that the user provides.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct SecretTls {
    /// Name of the Secret that holds the certificate.
    pub secret_name: String,
}

/// Observed state of a DomainMapping.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct DomainMappingStatus {
    /// Generation of the spec that this status describes.
    pub observed_generation: i64,
    /// Condition `Ready` and the conditions that it depends on.
    pub conditions: Vec<KnativeCondition>,
    /// URL of the host name.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub url: String,
    /// Address with the same URL, in the form that Addressable objects have.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<AddressableUrl>,
}
