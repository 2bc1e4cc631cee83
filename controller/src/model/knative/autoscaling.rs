//! Pure: `autoscaling.internal.knative.dev/v1alpha1`: a Revision's scaling, for tools that read it
//! (knative/serving `pkg/apis/autoscaling/v1alpha1` at 98e5ef9).

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{KnativeCondition, KnativeObject};

/// API group and version of both kinds here.
pub const API_VERSION: &str = "autoscaling.internal.knative.dev/v1alpha1";

/// Scaling of one Revision: its bounds, desired and actual pods.
pub type PodAutoscaler = KnativeObject<PodAutoscalerSpec, PodAutoscalerStatus>;
/// Averaging windows of one Revision's load.
pub type KnativeMetric = KnativeObject<MetricSpec, MetricStatus>;

/// Desired scaling: the scale target and its protocol.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PodAutoscalerSpec {
    /// Maximum number of concurrent requests per pod (hard limit); 0: no limit.
    pub container_concurrency: i64,
    /// Deployment whose replicas are set.
    pub scale_target_ref: NamespacedObjectRef,
    /// Reachability of the Revision by Routes; empty while unknown.
    #[serde(skip_serializing_if = "KnativeReachability::is_unknown")]
    pub reachability: KnativeReachability,
    /// Protocol of the pods: `http1`, `h2c` or `tcp`.
    pub protocol_type: String,
}

/// Reachability of a Revision: whether any Route names it as a target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum KnativeReachability {
    /// Unknown, since the Routes have not been evaluated yet.
    #[default]
    #[serde(rename = "")]
    Unknown,
    /// At least one Route names the Revision.
    Reachable,
    /// No Route names the Revision.
    Unreachable,
}

impl KnativeReachability {
    fn is_unknown(&self) -> bool {
        *self == Self::Unknown
    }
}

/// Reference to an object of the same namespace.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct NamespacedObjectRef {
    /// Group and version of the object.
    pub api_version: String,
    /// Kind of the object.
    pub kind: String,
    /// Name of the object.
    pub name: String,
}

/// Observed scaling of a Revision.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PodAutoscalerStatus {
    /// Generation of the spec that this status describes.
    pub observed_generation: i64,
    /// Conditions `Ready`, `Active`, `ScaleTargetInitialized` and `SKSReady`.
    pub conditions: Vec<KnativeCondition>,
    /// `rouse.dev/decision`: reason for the present number of pods; absent until the first scale decision.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Name of the Revision's Kubernetes Service.
    pub service_name: String,
    /// Name of the Kubernetes Service that Knative scrapes; it selects the same pods here, and nothing scrapes it.
    pub metrics_service_name: String,
    /// Number of requested pods; -1: not decided.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub desired_scale: Option<i32>,
    /// Number of pods that exist.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub actual_scale: Option<i32>,
    /// Number of pods that are frozen until the next request; absent if none was ever to be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub standby_scale: Option<i32>,
}

/// Averaging windows, in nanoseconds as Go writes durations.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct MetricSpec {
    /// Length of the stable window in nanoseconds.
    pub stable_window: i64,
    /// Length of the panic window in nanoseconds.
    pub panic_window: i64,
    /// Kubernetes Service to scrape; empty, since nothing is scraped and the eBPF programs count.
    pub scrape_target: String,
}

/// Observed state of the measurement.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct MetricStatus {
    /// Generation of the spec that this status describes.
    pub observed_generation: i64,
    /// The condition `Ready` only.
    pub conditions: Vec<KnativeCondition>,
}
