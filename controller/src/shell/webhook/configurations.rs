//! Pure: webhook configurations: the objects that the API server must submit, and the address that it calls.

use http::Uri;
use k8s_openapi::ByteString;
use serde_json::{Value, json};

use crate::model::knative::key;

/// Names of the webhooks as in Knative, since error messages show them.
pub(super) const DEFAULTING_WEBHOOK: &str = "webhook.serving.knative.dev";
pub(super) const VALIDATION_WEBHOOK: &str = "validation.webhook.serving.knative.dev";
pub(super) const CONFIG_WEBHOOK: &str = "config.webhook.serving.knative.dev";
/// Name of the webhook that places pods, which Knative does not have. Its name is that of earlier releases, which only
/// bound them.
const BINDING_WEBHOOK: &str = "binding.webhook.rouse.dev";
/// Path of this webhook. Replicas of earlier releases do not serve it: at their own path, `/binding`, they bind pods
/// whatever `bind-pods` says, and this webhook is also registered without that setting.
pub(super) const PLACEMENT_PATH: &str = "/pod-placement";

/// API group of ServerlessServices and ClusterDomainClaims.
const NETWORKING_GROUP: &str = "networking.internal.knative.dev";

/// Addresses and names of the webhook.
#[derive(Clone, Debug)]
pub struct WebhookAddress {
    /// Namespace of the installation, which holds Service and Secret.
    pub namespace: String,
    /// Name of the Service in front of the replicas' webhook ports, on port 443.
    pub service: String,
    /// Name of the Secret that holds the certificate.
    pub secret: String,
    /// Port at which this replica serves the webhook.
    pub port: u16,
    /// URL that the API server calls instead of the Service, such as `https://127.0.0.1:8443`. It is for an API server
    /// outside a cluster, beside the controller.
    pub url: Option<String>,
}

impl WebhookAddress {
    /// Returns the address in the installation of `namespace`, with Knative's names.
    pub fn new(namespace: &str, port: u16) -> Self {
        Self {
            namespace: namespace.into(),
            service: "webhook".into(),
            secret: "webhook-certs".into(),
            port,
            url: None,
        }
    }

    /// Returns the host names under which the API server may call.
    pub fn host_names(&self) -> Vec<String> {
        let (service, namespace) = (&self.service, &self.namespace);
        let mut names = vec![
            service.clone(),
            format!("{service}.{namespace}"),
            format!("{service}.{namespace}.svc"),
            format!("{service}.{namespace}.svc.cluster.local"),
        ];
        let url = self.url.as_deref().and_then(|url| url.parse::<Uri>().ok());
        // Certificates name an IPv6 address without the brackets of a URL.
        let host = url.as_ref().and_then(Uri::host).map(|host| host.trim_matches(['[', ']']));
        names.extend(host.map(str::to_owned));
        names
    }

    /// Returns the `clientConfig` by which the API server finds `path`.
    fn client_config(&self, path: &str, bundle: &Value) -> Value {
        match &self.url {
            Some(url) => json!({"caBundle": bundle, "url": format!("{url}{path}")}),
            None => json!({
                "caBundle": bundle,
                "service": {
                    "name": self.service,
                    "namespace": self.namespace,
                    "path": path,
                    "port": 443,
                },
            }),
        }
    }
}

/// Returns the registrations: the objects that the API server must submit to the webhook, and the webhook's address.
pub(super) fn webhook_configurations(
    address: &WebhookAddress,
    authority: &str,
    places_pods: bool,
) -> (Value, [Value; 2]) {
    let bundle =
        serde_json::to_value(ByteString(authority.as_bytes().to_vec())).unwrap_or_default();
    let hook = |name: &str, path: &str, rules: Value| {
        json!({
            "name": name,
            "admissionReviewVersions": ["v1"],
            "clientConfig": address.client_config(path, &bundle),
            "failurePolicy": "Fail",
            "matchPolicy": "Equivalent",
            "rules": rules,
            "sideEffects": "None",
            "timeoutSeconds": 10,
        })
    };
    let whole = |kind: &str, name: &str, hook: Value| {
        json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": kind,
            "metadata": {"name": name, "labels": {"app.kubernetes.io/part-of": "rouse"}},
            "webhooks": [hook],
        })
    };
    let mut defaulting = hook(DEFAULTING_WEBHOOK, "/defaulting", object_rules().into());
    // Additions of other webhooks, such as a volume, get their defaults, too.
    defaulting["reinvocationPolicy"] = "IfNeeded".into();
    // ClusterDomainClaims are validated only: they have no fields with defaults.
    let mut validated = object_rules();
    validated.push(claim_rule());
    let validation = hook(VALIDATION_WEBHOOK, "/resource-validation", validated.into());
    let mut config = hook(CONFIG_WEBHOOK, "/config-validation", config_map_rules());
    config["namespaceSelector"] =
        json!({"matchLabels": {"kubernetes.io/metadata.name": address.namespace}});
    // ConfigMaps of a former Knative installation are checked as well.
    let names = ["knative-serving", "rouse"];
    config["objectSelector"] = json!({
        "matchExpressions": [{"key": "app.kubernetes.io/name", "operator": "In", "values": names}],
    });
    let mut mutating = whole("MutatingWebhookConfiguration", DEFAULTING_WEBHOOK, defaulting);
    if places_pods && let Some(hooks) = mutating["webhooks"].as_array_mut() {
        hooks.push(make_optional(hook(BINDING_WEBHOOK, PLACEMENT_PATH, pod_rules())));
    }
    let validating = "ValidatingWebhookConfiguration";
    (
        mutating,
        [
            whole(validating, VALIDATION_WEBHOOK, validation),
            whole(validating, CONFIG_WEBHOOK, config),
        ],
    )
}

/// Makes the binding webhook optional: no write depends on it, since the scheduler finds a node as well.
fn make_optional(mut hook: Value) -> Value {
    hook["failurePolicy"] = "Ignore".into();
    hook["timeoutSeconds"] = 1.into();
    hook["objectSelector"] =
        json!({"matchExpressions": [{"key": key::REVISION_UID, "operator": "Exists"}]});
    hook
}

fn pod_rules() -> Value {
    json!([{
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "resources": ["pods"],
        "operations": ["CREATE"],
        "scope": "Namespaced",
    }])
}

/// Returns the rules for Rouse's namespaced kinds, without subresources: the controller writes statuses, and those
/// writes must not depend on a webhook.
fn object_rules() -> Vec<Value> {
    let serving = ["services", "configurations", "revisions", "routes"];
    let autoscaling = ["podautoscalers", "metrics"];
    vec![
        object_rule("serving.knative.dev", "v1", &serving, "Namespaced"),
        object_rule("serving.knative.dev", "v1beta1", &["domainmappings"], "Namespaced"),
        object_rule("autoscaling.internal.knative.dev", "v1alpha1", &autoscaling, "Namespaced"),
        object_rule(NETWORKING_GROUP, "v1alpha1", &["serverlessservices"], "Namespaced"),
    ]
}

fn claim_rule() -> Value {
    object_rule(NETWORKING_GROUP, "v1alpha1", &["clusterdomainclaims"], "Cluster")
}

fn object_rule(group: &str, version: &str, resources: &[&str], scope: &str) -> Value {
    json!({
        "apiGroups": [group],
        "apiVersions": [version],
        "resources": resources,
        "operations": ["CREATE", "UPDATE"],
        "scope": scope,
    })
}

fn config_map_rules() -> Value {
    json!([{
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "resources": ["configmaps"],
        "operations": ["CREATE", "UPDATE"],
        "scope": "Namespaced",
    }])
}
