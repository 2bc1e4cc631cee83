//! Pure: Knative's objects as users and tools see them: `serving.knative.dev` here, other API groups in the modules.
//!
//! The controller reads manifests into these types and writes objects from them. Internally,
//! [`ClusterState`](crate::model::cluster_state::ClusterState) keeps the same content in far less memory.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::PodSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// API group and version of every object in this file.
pub const API_VERSION: &str = "serving.knative.dev/v1";

pub mod autoscaling;
pub mod caching;
pub mod domain_mapping;
pub mod key;
pub mod networking;
pub mod user_container;

/// An object of any Knative kind: the fields that all kinds share, around a `spec` and a `status`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KnativeObject<S, T> {
    /// API group and version of the kind, such as `serving.knative.dev/v1`.
    pub api_version: String,
    /// Kind of the object, such as `Service`.
    pub kind: String,
    /// Name, namespace, labels, annotations and the other metadata of Kubernetes.
    pub metadata: ObjectMeta,
    /// Desired state, as the user wrote it.
    pub spec: S,
    /// Observed state, which only the controller writes; `None` until the first write.
    pub status: Option<T>,
}

/// A Service: a Configuration and a Route under one name.
pub type KnativeService = KnativeObject<ServiceSpec, ServiceStatus>;
/// A Configuration: the current template, from which Revisions are made.
pub type KnativeConfiguration = KnativeObject<ConfigurationSpec, ConfigurationStatus>;
/// A Revision: one immutable version of code and configuration.
pub type KnativeRevision = KnativeObject<RevisionSpec, RevisionStatus>;
/// A Route: the Revisions that serve a name, and their shares of the requests.
pub type KnativeRoute = KnativeObject<RouteSpec, RouteStatus>;

/// Desired state of a Service.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ServiceSpec {
    /// Template of the Service's Revisions.
    pub template: RevisionTemplate,
    /// Traffic targets with their shares of the requests; empty: the latest ready Revision gets all.
    pub traffic: Vec<TrafficTarget>,
}

/// Desired state of a Configuration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ConfigurationSpec {
    /// Template of the Configuration's Revisions.
    pub template: RevisionTemplate,
}

/// Template from which a Revision is made.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct RevisionTemplate {
    /// Labels and annotations of the Revision, and its name if the user sets one.
    #[schemars(with = "TemplateMetadata")]
    pub metadata: ObjectMeta,
    /// Containers and limits of the Revision.
    pub spec: RevisionSpec,
}

/// Metadata fields that a template accepts, for the schema only.
#[derive(JsonSchema)]
#[allow(dead_code, reason = "only its schema is used")]
struct TemplateMetadata {
    /// Annotations of the Revision.
    annotations: Option<std::collections::BTreeMap<String, String>>,
    /// Finalizers have no effect.
    finalizers: Option<Vec<String>>,
    /// Labels of the Revision and its pods.
    labels: Option<std::collections::BTreeMap<String, String>>,
    /// Name of the Revision, if the user sets one: it begins with the Configuration's name and a dash.
    name: Option<String>,
    /// The namespace has no effect.
    namespace: Option<String>,
}

/// Desired state of a Revision: its pod and the limits of its requests.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct RevisionSpec {
    /// Maximum number of concurrent requests per pod (hard limit); 0: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container_concurrency: Option<i64>,
    /// Timeout of a whole request, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<i64>,
    /// Timeout until the first byte of the response, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response_start_timeout_seconds: Option<i64>,
    /// Timeout between two bytes of the response, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_timeout_seconds: Option<i64>,
    /// The pod that each replica of the Revision runs.
    #[serde(flatten)]
    pub pod: PodSpec,
}

/// Desired state of a Route.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct RouteSpec {
    /// Traffic targets with their shares of the requests.
    pub traffic: Vec<TrafficTarget>,
}

/// One traffic target: a share of the requests, and a host name of its own if it has a tag.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct TrafficTarget {
    /// Tag, which makes the target also reachable as `<tag>-<route>`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// Name of a Revision, if the target is fixed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision_name: Option<String>,
    /// Name of a Configuration, whose latest ready Revision is the target.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub configuration_name: Option<String>,
    /// True if the target follows the latest ready Revision.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latest_revision: Option<bool>,
    /// Share of the requests in percent, 0 to 100.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub percent: Option<i64>,
    /// URL of the tag; status only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
}

/// One condition of an object.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct KnativeCondition {
    /// Type of the condition, such as `Ready`.
    pub r#type: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// `Info` for one that does not make an object unready.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub severity: String,
    /// Time of the last change of the status, RFC 3339.
    pub last_transition_time: String,
    /// Reason in one CamelCase word, for programs.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Explanation in one line, for users.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// Address of an object inside the cluster.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct AddressableUrl {
    /// URL inside the cluster.
    pub url: String,
}

/// Observed state of a Service.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ServiceStatus {
    /// Generation of the spec that this status describes.
    pub observed_generation: i64,
    /// Condition `Ready` and the conditions that it depends on.
    pub conditions: Vec<KnativeCondition>,
    /// Name of the newest Revision.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub latest_created_revision_name: String,
    /// Name of the newest Revision that became ready.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub latest_ready_revision_name: String,
    /// URL from outside the cluster.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub url: String,
    /// URL from inside the cluster.
    pub address: Option<AddressableUrl>,
    /// Active traffic targets with their shares.
    pub traffic: Vec<TrafficTarget>,
}

/// Observed state of a Configuration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ConfigurationStatus {
    /// Generation of the spec that this status describes.
    pub observed_generation: i64,
    /// The condition `Ready` only.
    pub conditions: Vec<KnativeCondition>,
    /// Name of the newest Revision.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub latest_created_revision_name: String,
    /// Name of the newest Revision that became ready.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub latest_ready_revision_name: String,
}

/// Observed state of a Revision.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct RevisionStatus {
    /// Generation of the spec that this status describes.
    pub observed_generation: i64,
    /// Condition `Ready` with the conditions that it depends on, and `Active`.
    pub conditions: Vec<KnativeCondition>,
    /// `rouse.dev/decision`: reason for the present number of pods; absent until the first scale decision.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// URL of the Revision's logs.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub log_url: String,
    /// Resolved images of the containers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub container_statuses: Vec<ContainerDigest>,
    /// Resolved images of the init containers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub init_container_statuses: Vec<ContainerDigest>,
    /// Number of ready pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub actual_replicas: Option<i32>,
    /// Number of requested pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub desired_replicas: Option<i32>,
}

/// Image of one container, as resolved to a digest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ContainerDigest {
    /// Name of the container.
    pub name: String,
    /// Image reference with its digest.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub image_digest: String,
}

/// Observed state of a Route.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct RouteStatus {
    /// Generation of the spec that this status describes.
    pub observed_generation: i64,
    /// Condition `Ready` and the conditions that it depends on.
    pub conditions: Vec<KnativeCondition>,
    /// URL from outside the cluster.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub url: String,
    /// URL from inside the cluster.
    pub address: Option<AddressableUrl>,
    /// Active traffic targets with their shares.
    pub traffic: Vec<TrafficTarget>,
    /// Progress of a gradual rollout, and the class of another ingress that fronts the hosts; each absent without one.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}
