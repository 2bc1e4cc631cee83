//! Pure: an AdmissionReview's request and its response (`admission.k8s.io/v1`).

use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    decide::pod_placement::PodPlacement,
    model::{
        cluster_state::PlatformKind,
        config_maps::{self, Configs, Features, RevisionDefaults},
        problem::{self, Problem},
        scale_policy::ScalePolicyConfig,
    },
    read::parse::{
        RuleSettings,
        admission::{self, AdmissionRequest, AdmittedKind},
    },
};

/// Webhook that a review is for; each has a path of its own at the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdmissionHook {
    /// Path `/defaulting`: fill in defaults.
    Defaulting,
    /// Path `/resource-validation`: check an object.
    Validation,
    /// Path `/config-validation`: check a ConfigMap.
    Config,
}

/// Settings that admission depends on.
#[derive(Clone, Debug, PartialEq)]
pub struct AdmissionSettings {
    /// Checked settings of `config-defaults`.
    pub defaults: std::sync::Arc<RevisionDefaults>,
    /// Checked settings of `config-features`.
    pub features: std::sync::Arc<Features>,
    /// Checked settings of `config-autoscaler`.
    pub autoscaler: std::sync::Arc<ScalePolicyConfig>,
    /// Domain of cluster-local names, such as `cluster.local`.
    pub cluster_domain: String,
    /// True if an ingress of another controller is trusted (`config-network`).
    pub trusts_ingresses: bool,
    /// True if pods are bound to a node as they are created (`config-deployment`).
    pub bind_pods: bool,
    /// True if first pods may prefer a zone, which depends on the nodes too.
    pub prefers_wake_zone: bool,
}

impl Default for AdmissionSettings {
    fn default() -> Self {
        Self {
            defaults: Default::default(),
            features: Default::default(),
            autoscaler: Default::default(),
            cluster_domain: "cluster.local".into(),
            trusts_ingresses: false,
            bind_pods: false,
            prefers_wake_zone: false,
        }
    }
}

impl AdmissionSettings {
    /// Returns the settings of the ConfigMaps in force, for a cluster of one zone.
    pub fn from_configs(configs: &Configs, cluster_domain: &str) -> Self {
        Self {
            defaults: configs.defaults.clone(),
            features: configs.features.clone(),
            autoscaler: configs.autoscaler.clone(),
            cluster_domain: cluster_domain.into(),
            trusts_ingresses: configs.network.trusts_ingresses(),
            bind_pods: configs.deployment.bind_pods,
            prefers_wake_zone: false,
        }
    }

    /// Returns true if the API server should submit new pods to the webhook, which places them.
    pub fn places_pods(&self) -> bool {
        self.bind_pods || self.prefers_wake_zone
    }

    /// Returns the platform and settings that the rules of admission depend on.
    pub fn rule_settings(&self) -> RuleSettings<'_> {
        RuleSettings {
            platform: PlatformKind::Kubernetes,
            defaults: &self.defaults,
            features: &self.features,
            autoscaler: &self.autoscaler,
            cluster_domain: &self.cluster_domain,
            trusts_ingresses: self.trusts_ingresses,
        }
    }
}

/// Error of a request body that is no review.
#[derive(Debug, thiserror::Error)]
pub enum ReviewDecodeError {
    /// The body is not an AdmissionReview.
    #[error("could not decode body: {0}")]
    Decode(#[from] serde_json::Error),
    /// The AdmissionReview has no request.
    #[error("the AdmissionReview has no request")]
    Empty,
}

#[derive(Deserialize)]
struct AdmissionReviewBody {
    request: Option<ReviewRequest>,
}

/// Fields of a request that admission depends on.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ReviewRequest {
    uid: String,
    kind: GroupKind,
    sub_resource: Option<String>,
    operation: String,
    user_info: ReviewUser,
    object: Option<Value>,
    old_object: Option<Value>,
    options: Option<ReviewOptions>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct GroupKind {
    group: String,
    kind: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ReviewUser {
    username: String,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ReviewOptions {
    field_validation: Option<String>,
}

/// Decision about a request, before it is encoded.
#[derive(Debug, Default, PartialEq)]
struct AdmissionDecision {
    /// Reason for refusing; `None` admits the object.
    refusal: Option<String>,
    warnings: Vec<String>,
    patch: Option<Vec<u8>>,
}

/// Returns the response to the review in `body`.
pub fn respond_to_review(
    hook: AdmissionHook,
    body: &[u8],
    settings: &AdmissionSettings,
) -> Result<Vec<u8>, ReviewDecodeError> {
    let review: AdmissionReviewBody = serde_json::from_slice(body)?;
    let request = review.request.ok_or(ReviewDecodeError::Empty)?;
    let decision = evaluate_request(hook, &request, settings)?;
    encode_response(&request, decision)
}

/// Review about a new pod.
pub(super) struct BindingReview(ReviewRequest);

impl BindingReview {
    /// Decodes the review in `body`.
    pub(super) fn decode(body: &[u8]) -> Result<Self, ReviewDecodeError> {
        let review: AdmissionReviewBody = serde_json::from_slice(body)?;
        review.request.map(Self).ok_or(ReviewDecodeError::Empty)
    }

    /// Pod that is about to be stored; `None`: the review is about no new pod.
    pub(super) fn pod(&self) -> Option<&Value> {
        self.0.object.as_ref().filter(|_| self.0.operation == "CREATE")
    }

    /// Returns the response. It gives the pod the placement that `place` returns, if any.
    pub(super) fn respond(
        &self,
        place: impl FnOnce(&Value, u64) -> Option<PodPlacement>,
    ) -> Result<Vec<u8>, ReviewDecodeError> {
        // The request's UID is random, so its hash serves as the random number that selects among equal nodes.
        let chance = crate::model::object::hash::stable_json_hash(&json!(self.0.uid));
        let patch = self.pod().and_then(|pod| place(pod, chance)).map(|placement| {
            let (path, value) = match placement {
                PodPlacement::Node(node) => ("/spec/nodeName", node.into()),
                // `add` replaces an affinity that the pod has.
                PodPlacement::Affinity(affinity) => ("/spec/affinity", affinity),
            };
            json!([{"op": "add", "path": path, "value": value}]).to_string().into_bytes()
        });
        encode_response(&self.0, AdmissionDecision { patch, ..AdmissionDecision::default() })
    }
}

/// Encodes a decision as the API server expects it.
fn encode_response(
    request: &ReviewRequest,
    decision: AdmissionDecision,
) -> Result<Vec<u8>, ReviewDecodeError> {
    // The API server accepts a response only with the UID of its request.
    let mut response = json!({"uid": request.uid, "allowed": decision.refusal.is_none()});
    if let Some(message) = decision.refusal {
        response["status"] = json!({
            "status": "Failure",
            "message": message,
            "reason": "BadRequest",
            "code": 400,
        });
    }
    if !decision.warnings.is_empty() {
        response["warnings"] = decision.warnings.into();
    }
    if let Some(patch) = decision.patch {
        response["patchType"] = "JSONPatch".into();
        response["patch"] = serde_json::to_value(ByteString(patch))?;
    }
    let review = json!({
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "response": response,
    });
    Ok(serde_json::to_vec(&review)?)
}

/// Decides about one request. Statuses and objects in deletion are allowed without a check.
fn evaluate_request(
    hook: AdmissionHook,
    request: &ReviewRequest,
    settings: &AdmissionSettings,
) -> Result<AdmissionDecision, ReviewDecodeError> {
    // The controller writes statuses, and an object that is being deleted is not checked any more.
    let sub = request.sub_resource.as_deref().unwrap_or_default();
    let is_checked = matches!(request.operation.as_str(), "CREATE" | "UPDATE") && sub.is_empty();
    let Some(object) = request.object.as_ref().filter(|it| is_checked && !it.is_null()) else {
        return Ok(AdmissionDecision::default());
    };
    // A ConfigMap is no kind of Knative's, so it is handled before the kind is looked up.
    if hook == AdmissionHook::Config {
        return Ok(check_config_map(object));
    }
    let Some(kind) = AdmittedKind::from_group_kind(&request.kind.group, &request.kind.kind) else {
        let message = format!("unhandled kind: {}/{}", request.kind.group, request.kind.kind);
        return Ok(AdmissionDecision { refusal: Some(message), ..AdmissionDecision::default() });
    };
    let deleted = object.pointer("/metadata/deletionTimestamp").is_some_and(|it| !it.is_null());
    if deleted {
        // The removal of its finalizer must succeed even if it breaks newer rules.
        return Ok(AdmissionDecision::default());
    }
    let old = request.old_object.as_ref().filter(|it| !it.is_null());
    let user = Some(request.user_info.username.as_str()).filter(|name| !name.is_empty());
    let settings = settings.rule_settings();
    let admission_request = AdmissionRequest { kind, object, old, user, settings };
    match hook {
        AdmissionHook::Defaulting => default_object(&admission_request, request),
        AdmissionHook::Validation | AdmissionHook::Config => {
            Ok(validate_object(&admission_request))
        }
    }
}

/// Returns the patch that fills in defaults. The client's `fieldValidation` decides about unknown fields.
fn default_object(
    admission_request: &AdmissionRequest<'_>,
    request: &ReviewRequest,
) -> Result<AdmissionDecision, ReviewDecodeError> {
    let (object, unknown) = admission::apply_defaults(admission_request);
    let unknown: Vec<String> =
        unknown.iter().map(|field| format!("unknown field {field:?}")).collect();
    let field_validation =
        request.options.as_ref().and_then(|options| options.field_validation.as_deref());
    let warnings = match field_validation {
        // The text is the API server's own for strict decoding of built-in kinds.
        Some("Strict") if !unknown.is_empty() => {
            let refusal = format!("strict decoding error: {}", unknown.join(", "));
            return Ok(AdmissionDecision {
                refusal: Some(refusal),
                ..AdmissionDecision::default()
            });
        }
        Some("Ignore") => Vec::new(),
        // `Warn` is Kubernetes' default.
        _ => unknown,
    };
    let patch = json_patch::diff(admission_request.object, &object);
    let patch = (!patch.is_empty()).then(|| serde_json::to_vec(&patch)).transpose()?;
    Ok(AdmissionDecision { refusal: None, warnings, patch })
}

fn validate_object(request: &AdmissionRequest<'_>) -> AdmissionDecision {
    let result = admission::validate(request);
    let refusal = refusal_message(&result.problems);
    // A refused object needs no warnings: they would hide the error.
    let warnings = if refusal.is_some() { Vec::new() } else { format_warnings(&result.warnings) };
    AdmissionDecision { refusal, warnings, patch: None }
}

fn refusal_message(problems: &[Problem]) -> Option<String> {
    let message = || format!("validation failed: {}", problem::knative_message(problems));
    (!problems.is_empty()).then(message)
}

/// Formats warnings: equal messages share a line, and none contains a line break, since warnings are HTTP headers.
fn format_warnings(all: &[Problem]) -> Vec<String> {
    let mut messages: Vec<&str> = all.iter().map(|it| it.message.as_str()).collect();
    messages.sort_unstable();
    messages.dedup();
    let of = |message: &str| {
        let equal_problems: Vec<Problem> =
            all.iter().filter(|it| it.message == message).cloned().collect();
        problem::knative_message(&equal_problems).replace('\n', "; ")
    };
    messages.into_iter().map(of).collect()
}

fn check_config_map(object: &Value) -> AdmissionDecision {
    let map = |pointer: &str| -> BTreeMap<String, String> {
        let value = object.pointer(pointer).cloned().unwrap_or_default();
        serde_json::from_value(value).unwrap_or_default()
    };
    let name = object.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default();
    match config_maps::admit(name, &map("/metadata/annotations"), &map("/data")) {
        Ok(warnings) => AdmissionDecision { warnings, ..AdmissionDecision::default() },
        Err(problems) => {
            let lines: Vec<String> = problems.iter().map(ToString::to_string).collect();
            let message = format!("validation failed: {}", lines.join("\n"));
            AdmissionDecision { refusal: Some(message), ..AdmissionDecision::default() }
        }
    }
}

#[cfg(test)]
mod tests;
