//! Pure: Knative's objects as users and tools see them: `serving.knative.dev` here, the others in the modules.
//!
//! These are the types at the border: manifests are read into them and objects are written from them. Inside,
//! [`world`](crate::world) keeps the same facts in far less memory.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::PodSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Group and version of every object here.
pub const API_VERSION: &str = "serving.knative.dev/v1";

pub mod autoscaling;
pub mod caching;
pub mod domain;
pub mod key;
pub mod networking;

/// One object: what every kind has, around its own `spec` and `status`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Object<S, T> {
    /// Group and version.
    pub api_version: String,
    /// Kind.
    pub kind: String,
    /// Name, labels and so on.
    pub metadata: ObjectMeta,
    /// What is wanted.
    pub spec: S,
    /// What is.
    pub status: Option<T>,
}

/// A service: a Configuration and a Route under one name.
pub type Service = Object<ServiceSpec, ServiceStatus>;
/// The newest template, which makes Revisions.
pub type Configuration = Object<ConfigurationSpec, ConfigurationStatus>;
/// One immutable version of code and configuration.
pub type Revision = Object<RevisionSpec, RevisionStatus>;
/// Which Revisions a name leads to.
pub type Route = Object<RouteSpec, RouteStatus>;

/// What is wanted of a service.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ServiceSpec {
    /// What to run.
    pub template: RevisionTemplate,
    /// Who gets the requests.
    pub traffic: Vec<TrafficTarget>,
}

/// What is wanted of a configuration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ConfigurationSpec {
    /// What to run.
    pub template: RevisionTemplate,
}

/// What a Revision will be made of.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct RevisionTemplate {
    /// Labels and annotations of the Revision; a name where the user brings one.
    #[schemars(with = "TemplateMetadata")]
    pub metadata: ObjectMeta,
    /// What to run.
    pub spec: RevisionSpec,
}

/// What of its metadata a template may say; the schema's view of it.
#[derive(JsonSchema)]
#[allow(dead_code, reason = "only its schema is used")]
struct TemplateMetadata {
    /// Annotations of the Revision.
    annotations: Option<std::collections::BTreeMap<String, String>>,
    /// Has no effect.
    finalizers: Option<Vec<String>>,
    /// Labels of the Revision and its pods.
    labels: Option<std::collections::BTreeMap<String, String>>,
    /// Name of the Revision, where the user brings one: it begins with the Configuration's and a dash.
    name: Option<String>,
    /// Has no effect.
    namespace: Option<String>,
}

/// What a Revision runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct RevisionSpec {
    /// Requests a pod may have at once; 0: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container_concurrency: Option<i64>,
    /// Bound of a whole request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<i64>,
    /// Bound until the first byte of the response.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response_start_timeout_seconds: Option<i64>,
    /// Bound between two bytes of the response.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_timeout_seconds: Option<i64>,
    /// The pod.
    #[serde(flatten)]
    pub pod: PodSpec,
}

/// What is wanted of a route.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct RouteSpec {
    /// Who gets the requests.
    pub traffic: Vec<TrafficTarget>,
}

/// One share of the requests, and one name of its own if it has a tag.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct TrafficTarget {
    /// Also reachable as `<tag>-<route>`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// A Revision by name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision_name: Option<String>,
    /// A Configuration by name: its latest ready Revision.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub configuration_name: Option<String>,
    /// Whether it follows the latest ready Revision.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latest_revision: Option<bool>,
    /// Share in percent, 0 to 100.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub percent: Option<i64>,
    /// Where the tag is reachable; status only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
}

/// One condition of an object.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Condition {
    /// Which.
    pub r#type: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// `Info` for one that does not make an object unready.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub severity: String,
    /// When it changed last, RFC 3339.
    pub last_transition_time: String,
    /// One word for machines.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// One line for people.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// Where an object is reachable inside.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Address {
    /// URL.
    pub url: String,
}

/// How a service fares.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ServiceStatus {
    /// Generation the rest speaks of.
    pub observed_generation: i64,
    /// `Ready` and what it depends on.
    pub conditions: Vec<Condition>,
    /// Newest Revision.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub latest_created_revision_name: String,
    /// Newest Revision that was ready.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub latest_ready_revision_name: String,
    /// Where it is reachable from outside.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub url: String,
    /// Where it is reachable inside.
    pub address: Option<Address>,
    /// Who gets the requests now.
    pub traffic: Vec<TrafficTarget>,
}

/// How a configuration fares.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ConfigurationStatus {
    /// Generation the rest speaks of.
    pub observed_generation: i64,
    /// `Ready`.
    pub conditions: Vec<Condition>,
    /// Newest Revision.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub latest_created_revision_name: String,
    /// Newest Revision that was ready.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub latest_ready_revision_name: String,
}

/// How a revision fares.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct RevisionStatus {
    /// Generation the rest speaks of.
    pub observed_generation: i64,
    /// `Ready` and what it depends on, and `Active`.
    pub conditions: Vec<Condition>,
    /// `rouse.dev/decision`: why it has as many pods as it has; absent while nothing is decided.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Where its logs can be read.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub log_url: String,
    /// Images by container.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub container_statuses: Vec<ContainerDigest>,
    /// Images by init container.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub init_container_statuses: Vec<ContainerDigest>,
    /// Ready pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub actual_replicas: Option<i32>,
    /// Wanted pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub desired_replicas: Option<i32>,
}

/// Which image a container runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ContainerDigest {
    /// Container.
    pub name: String,
    /// Image with its digest.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub image_digest: String,
}

/// How a route fares.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct RouteStatus {
    /// Generation the rest speaks of.
    pub observed_generation: i64,
    /// `Ready` and what it depends on.
    pub conditions: Vec<Condition>,
    /// Where it is reachable from outside.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub url: String,
    /// Where it is reachable inside.
    pub address: Option<Address>,
    /// Who gets the requests now.
    pub traffic: Vec<TrafficTarget>,
    /// Where a gradual rollout stands.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}
