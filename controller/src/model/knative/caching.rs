//! Pure: `caching.internal.knative.dev/v1alpha1` Image: images to have cached on nodes. Each container
//! of a Revision has one, named `<revision>-cache-<container>`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{KnativeCondition, KnativeObject};

/// API group and version of the kind.
pub const API_VERSION: &str = "caching.internal.knative.dev/v1alpha1";

/// An image that a Revision's pods will run.
pub type KnativeImage = KnativeObject<ImageSpec, ImageStatus>;

/// Desired image, with the credentials to pull it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ImageSpec {
    /// Image reference with its digest.
    pub image: String,
    /// Service account whose secrets may pull the image.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub service_account_name: String,
    /// Secrets of the same namespace that may pull the image.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub image_pull_secrets: Vec<SecretName>,
}

/// Reference to a Secret of the same namespace.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct SecretName {
    /// Name of the Secret.
    pub name: String,
}

/// Observed state of the image.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ImageStatus {
    /// Generation of the spec that this status describes.
    pub observed_generation: i64,
    /// The condition `Ready` only.
    pub conditions: Vec<KnativeCondition>,
}
