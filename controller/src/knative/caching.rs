//! Pure: `caching.internal.knative.dev/v1alpha1` Image: which images should be at hand (knative.md §1.10).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Condition, Object};

/// Group and version.
pub const API_VERSION: &str = "caching.internal.knative.dev/v1alpha1";

/// An image that pods will want.
pub type Image = Object<ImageSpec, ImageStatus>;

/// Which image, and who may pull it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ImageSpec {
    /// The image with its digest.
    pub image: String,
    /// Account whose secrets may pull it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub service_account_name: String,
    /// Secrets that may pull it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub image_pull_secrets: Vec<SecretName>,
}

/// Names a Secret of the same namespace.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct SecretName {
    /// Its name.
    pub name: String,
}

/// How that fares.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ImageStatus {
    /// Generation the rest speaks of.
    pub observed_generation: i64,
    /// `Ready`.
    pub conditions: Vec<Condition>,
}
