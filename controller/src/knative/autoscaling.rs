//! Pure: `autoscaling.internal.knative.dev/v1alpha1`: what tools read of how a Revision scales (knative.md §1.8).

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Condition, Object};

/// Group and version.
pub const API_VERSION: &str = "autoscaling.internal.knative.dev/v1alpha1";

/// How one Revision scales.
pub type PodAutoscaler = Object<PodAutoscalerSpec, PodAutoscalerStatus>;
/// What of a Revision is measured.
pub type Metric = Object<MetricSpec, MetricStatus>;

/// What scales, and how it is reached.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PodAutoscalerSpec {
    /// Requests a pod may have at once; 0: no limit.
    pub container_concurrency: i64,
    /// Whose replicas are set.
    pub scale_target_ref: ObjectReference,
    /// Whether a Route leads to it: empty while nobody knows.
    #[serde(skip_serializing_if = "Reachability::is_unknown")]
    pub reachability: Reachability,
    /// What its pods speak: `http1` or `h2c`.
    pub protocol_type: String,
}

/// Whether a Route leads to a Revision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Reachability {
    /// Nobody knows yet.
    #[default]
    #[serde(rename = "")]
    Unknown,
    /// One does.
    Reachable,
    /// None does.
    Unreachable,
}

impl Reachability {
    fn is_unknown(&self) -> bool {
        *self == Self::Unknown
    }
}

/// Names an object of the same namespace.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ObjectReference {
    /// Group and version of the object.
    pub api_version: String,
    /// Kind of the object.
    pub kind: String,
    /// Name of the object.
    pub name: String,
}

/// How scaling fares.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PodAutoscalerStatus {
    /// Generation the rest speaks of.
    pub observed_generation: i64,
    /// `Ready`, `Active`, `ScaleTargetInitialized`, `SKSReady`.
    pub conditions: Vec<Condition>,
    /// `rouse.dev/decision`: why it has as many pods as it has; absent while nothing is decided.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Kubernetes Service of the Revision.
    pub service_name: String,
    /// Kubernetes Service that Knative scrapes; here the same pods, which nobody scrapes.
    pub metrics_service_name: String,
    /// Pods wanted; -1: not decided.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub desired_scale: Option<i32>,
    /// Pods there are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub actual_scale: Option<i32>,
}

/// Windows of averages, in nanoseconds as Go writes them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct MetricSpec {
    /// Window outside bursts.
    pub stable_window: i64,
    /// Window in bursts.
    pub panic_window: i64,
    /// Kubernetes Service to scrape; empty: nobody scrapes, the kernel counts.
    pub scrape_target: String,
}

/// How measuring fares.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct MetricStatus {
    /// Generation the rest speaks of.
    pub observed_generation: i64,
    /// `Ready`.
    pub conditions: Vec<Condition>,
}
