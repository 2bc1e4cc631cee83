//! Pure: defaults for fields that an object leaves out (knative/serving `pkg/apis/serving/v1/*_defaults.go`
//! at 98e5ef9).
//!
//! Works on documents, not on types: unknown fields stay as they are, and fields that are not set do not appear in the
//! patch. A field of a wrong type is left for validation to refuse.

use std::collections::BTreeSet;

use k8s_openapi::{
    api::core::v1::ResourceRequirements, apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use serde_json::{Map, Value, json};

use super::settings::RuleSettings;
use crate::model::{config_maps::SecureDefaults, object::names::child_name};

/// Shipped value of `revision-response-start-timeout-seconds`, in seconds.
pub(crate) const RESPONSE_START_TIMEOUT_S: i64 = 300;

/// Port of containers that declare none (knative/serving `pkg/networking/constants.go`).
const DEFAULT_PORT: i64 = 8080;

type JsonObject = Map<String, Value>;

/// Sets the defaults of a template; `parent` is the object around it.
///
/// `is_creation` is true for a new object. Defaults of later releases do not change a workload that runs already.
pub(super) fn set_template_defaults(
    template: &mut Value,
    parent: &ObjectMeta,
    is_creation: bool,
    settings: &RuleSettings<'_>,
) {
    if let Some(spec) = template.get_mut("spec") {
        set_revision_spec_defaults(spec, parent, is_creation, settings);
    }
}

/// Sets the defaults of a Revision's spec.
pub(super) fn set_revision_spec_defaults(
    spec: &mut Value,
    parent: &ObjectMeta,
    is_creation: bool,
    settings: &RuleSettings<'_>,
) {
    let Value::Object(spec) = spec else { return };
    set_limit_defaults(spec, settings);
    // An update keeps what the object has, so that a new default starts no Revision.
    if is_creation {
        set_link_and_token_defaults(spec, settings);
    }
    // Both are read before any default is set: a default name must avoid every name that the user chose.
    let (writable, taken) = (writable_volumes(spec), container_names(spec));
    for (list, is_init) in [("initContainers", true), ("containers", false)] {
        let Some(Value::Array(all)) = spec.get_mut(list) else { continue };
        let several = all.len() > 1;
        let name = match is_init {
            true => settings.defaults.init_container_name(parent),
            false => settings.defaults.container_name(parent),
        };
        name_containers(all, &name, &taken);
        for container in all.iter_mut().filter_map(Value::as_object_mut) {
            make_mounts_read_only(container, &writable);
            if !is_init {
                set_resource_defaults(container, settings);
                set_port_defaults(container);
                set_probe_defaults(container, several);
            }
        }
    }
    set_security_context_defaults(spec, settings);
}

/// Sets `enableServiceLinks` and `automountServiceAccountToken`.
fn set_link_and_token_defaults(spec: &mut JsonObject, settings: &RuleSettings<'_>) {
    // Kubernetes' own default (true) would give every service the addresses of all others.
    if let Some(links) = settings.defaults.enable_service_links {
        set_if_unset(spec, "enableServiceLinks", links);
    }
    if let Some(mount) = settings.defaults.automount_service_account_token
        && text_field(spec, "serviceAccountName").is_empty()
    {
        set_if_unset(spec, "automountServiceAccountToken", mount);
    }
}

fn set_limit_defaults(spec: &mut JsonObject, settings: &RuleSettings<'_>) {
    let defaults = settings.defaults;
    // A value of a wrong type must stay as it is, for validation to report: -1 blocks all defaults below.
    let timeout = match spec.get("timeoutSeconds") {
        None | Some(Value::Null) => 0,
        Some(value) => value.as_i64().unwrap_or(-1),
    };
    let timeout = if timeout == 0 { defaults.timeout_seconds } else { timeout };
    if timeout > 0 {
        set_field(spec, "timeoutSeconds", timeout);
    }
    set_if_unset(spec, "containerConcurrency", defaults.container_concurrency);
    // As in Knative, only a timeout below that of the whole request is set: a longer one would never be reached.
    let start = defaults.response_start_timeout_seconds;
    if start > 0 && start < timeout {
        set_if_unset(spec, "responseStartTimeoutSeconds", start);
    }
    let idle = defaults.idle_timeout_seconds;
    if idle > 0 && idle < timeout {
        set_if_unset(spec, "idleTimeoutSeconds", idle);
    }
}

/// Returns the names of volumes that pods may write to.
fn writable_volumes(spec: &JsonObject) -> Vec<String> {
    let volumes = spec.get("volumes").and_then(Value::as_array);
    let writable = |volume: &&Value| {
        let kinds = ["emptyDir", "persistentVolumeClaim", "ephemeral"];
        kinds.iter().any(|kind| volume.get(kind).is_some_and(|it| !it.is_null()))
    };
    let all = volumes.into_iter().flatten().filter(writable);
    all.filter_map(|it| it.get("name")?.as_str().map(str::to_owned)).collect()
}

/// Returns the names that users gave to containers.
fn container_names(spec: &JsonObject) -> BTreeSet<String> {
    let lists = ["containers", "initContainers"].map(|list| spec.get(list));
    let all = lists.into_iter().flatten().filter_map(Value::as_array).flatten();
    all.filter_map(Value::as_object).map(|it| text_field(it, "name")).collect()
}

/// Names containers without a name after `default`, with a number where that alone would not be unique.
fn name_containers(all: &mut [Value], default: &str, taken: &BTreeSet<String>) {
    let numbered = all.len() > 1 || taken.contains(default);
    let mut free_names = (0..).map(|number: usize| child_name(default, &format!("-{number}")));
    for container in all.iter_mut().filter_map(Value::as_object_mut) {
        if !text_field(container, "name").is_empty() {
            continue;
        }
        let name = match numbered {
            true => free_names.find(|it| !taken.contains(it)).unwrap_or_default(),
            false => default.to_owned(),
        };
        set_field(container, "name", name);
    }
}

fn set_port_defaults(container: &mut JsonObject) {
    let ports = container.get_mut("ports").and_then(Value::as_array_mut);
    for port in ports.into_iter().flatten().filter_map(Value::as_object_mut) {
        // A port without number that only names a protocol is the port in `DEFAULT_PORT`.
        set_if_zero(port, "containerPort", DEFAULT_PORT);
    }
}

/// Marks mounts of volumes that pods cannot write to as read-only.
fn make_mounts_read_only(container: &mut JsonObject, writable: &[String]) {
    let mounts = container.get_mut("volumeMounts").and_then(Value::as_array_mut);
    for mount in mounts.into_iter().flatten().filter_map(Value::as_object_mut) {
        let name = text_field(mount, "name");
        if !writable.contains(&name) {
            set_field(mount, "readOnly", true);
        }
    }
}

/// Sets the requests and limits of `config-defaults` where a container has none.
fn set_resource_defaults(container: &mut JsonObject, settings: &RuleSettings<'_>) {
    let current = container.get("resources").filter(|it| !it.is_null());
    let read = current.map(|it| serde_json::from_value::<ResourceRequirements>(it.clone()));
    // Values of a wrong type are left for validation; only added keys are written, so the user's notation stays.
    let Ok(old_resources) = read.unwrap_or_else(|| Ok(ResourceRequirements::default())) else {
        return;
    };
    let mut after = old_resources.clone();
    settings.defaults.set_resource_defaults(&mut after);
    for (name, old, after) in [
        ("requests", old_resources.requests, after.requests),
        ("limits", old_resources.limits, after.limits),
    ] {
        let old = old.unwrap_or_default();
        for (key, quantity) in after.unwrap_or_default() {
            if !old.contains_key(&key)
                && let Some(resources) = object_field(container, "resources")
                && let Some(all) = object_field(resources, name)
            {
                all.insert(key, quantity.0.into());
            }
        }
    }
}

/// Sets the defaults of probes. The serving container always has one: without a handler it is a TCP probe.
fn set_probe_defaults(container: &mut JsonObject, several: bool) {
    let ports = container.get("ports").and_then(Value::as_array);
    let serves = !several || ports.is_some_and(|ports| !ports.is_empty());
    if serves && let Some(probe) = object_field(container, "readinessProbe") {
        let kinds = ["tcpSocket", "httpGet", "exec", "grpc"];
        if kinds.iter().all(|kind| probe.get(*kind).is_none_or(Value::is_null)) {
            probe.insert("tcpSocket".into(), json!({"port": 0}));
        }
        set_if_unset(probe, "periodSeconds", 0);
    }
    // Other containers need no readiness probe; an existing one gets the same thresholds.
    if let Some(Value::Object(probe)) = container.get_mut("readinessProbe") {
        set_threshold_defaults(probe);
    }
    for name in ["readinessProbe", "livenessProbe", "startupProbe"] {
        if let Some(Value::Object(probe)) = container.get_mut(name) {
            set_grpc_service_default(probe);
        }
    }
}

fn set_threshold_defaults(probe: &mut JsonObject) {
    set_if_zero(probe, "successThreshold", 1);
    // `periodSeconds: 0` stands for probing as fast as is sensible, and excludes thresholds and timeouts of its own.
    let period = probe.get("periodSeconds").filter(|it| !it.is_null());
    if period.is_some_and(|it| it.as_i64() != Some(0)) {
        set_if_zero(probe, "failureThreshold", 3);
        set_if_zero(probe, "timeoutSeconds", 1);
    }
}

fn set_grpc_service_default(probe: &mut JsonObject) {
    if let Some(Value::Object(grpc)) = probe.get_mut("grpc") {
        set_if_unset(grpc, "service", "");
    }
}

/// Sets the defaults of security contexts by the setting `secure-pod-defaults`.
fn set_security_context_defaults(spec: &mut JsonObject, settings: &RuleSettings<'_>) {
    let level = settings.features.secure_pod_defaults;
    if level == SecureDefaults::Disabled {
        return;
    }
    let pod = spec.get("securityContext").cloned().unwrap_or_default();
    let is_set = |name: &str| pod.get(name).is_some_and(|it| !it.is_null());
    // What the user has set for the whole pod must not be overridden for a container.
    let (pod_has_seccomp, pod_sets_non_root) =
        (has_seccomp(pod.as_object()), is_set("runAsNonRoot"));
    for list in ["initContainers", "containers"] {
        let Some(Value::Array(all)) = spec.get_mut(list) else { continue };
        // Binding a port below 1024 needs a capability once the container no longer runs as root.
        for container in all.iter_mut().filter_map(Value::as_object_mut) {
            let has_low_port = has_low_port(container);
            let Some(container_context) = object_field(container, "securityContext") else {
                continue;
            };
            set_if_unset(container_context, "allowPrivilegeEscalation", false);
            if !pod_has_seccomp
                && !has_seccomp(Some(container_context))
                && let Some(profile) = object_field(container_context, "seccompProfile")
            {
                set_field(profile, "type", "RuntimeDefault");
            }
            let capabilities = match has_low_port {
                true => json!({"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}),
                false => json!({"drop": ["ALL"]}),
            };
            set_if_unset(container_context, "capabilities", capabilities);
            if level == SecureDefaults::Enabled && !pod_sets_non_root {
                set_if_unset(container_context, "runAsNonRoot", true);
            }
        }
    }
}

/// Returns true if a security context sets the allowed system calls.
fn has_seccomp(context: Option<&JsonObject>) -> bool {
    let profile = context.and_then(|it| it.get("seccompProfile")).and_then(Value::as_object);
    profile.is_some_and(|it| !text_field(it, "type").is_empty())
}

/// Returns true if the container declares a port below 1024, for which it needs `NET_BIND_SERVICE` or root.
fn has_low_port(container: &JsonObject) -> bool {
    let ports = container.get("ports").and_then(Value::as_array);
    let numbers = ports.into_iter().flatten().filter_map(|it| it.get("containerPort")?.as_i64());
    numbers.into_iter().any(|number| (1..1024).contains(&number))
}

/// Sets the defaults of traffic targets. Only a Service has a default for an empty list.
pub(super) fn set_traffic_defaults(spec: &mut JsonObject, is_service: bool) {
    let empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    let none = spec.get("traffic").is_none_or(|it| it.is_null() || empty(it));
    if none && is_service {
        let all = json!([{"latestRevision": true, "percent": 100}]);
        spec.insert("traffic".into(), all);
    }
    let targets = spec.get_mut("traffic").and_then(Value::as_array_mut);
    for target in targets.into_iter().flatten().filter_map(Value::as_object_mut) {
        let latest = text_field(target, "revisionName").is_empty();
        set_if_unset(target, "latestRevision", latest);
        set_if_unset(target, "percent", 0);
    }
}

/// Returns the text of a field; empty where there is none.
pub(super) fn text_field(object: &JsonObject, name: &str) -> String {
    object.get(name).and_then(Value::as_str).unwrap_or_default().to_owned()
}

/// Returns the object in a field, creating it if absent; `None` if the field has another type.
pub(super) fn object_field<'a>(
    parent: &'a mut JsonObject,
    name: &str,
) -> Option<&'a mut JsonObject> {
    let value = parent.entry(name).or_insert(Value::Null);
    if value.is_null() {
        *value = Value::Object(Map::new());
    }
    value.as_object_mut()
}

fn set_field(object: &mut JsonObject, name: &str, value: impl Into<Value>) {
    object.insert(name.into(), value.into());
}

/// Sets a field that is absent or `null`.
fn set_if_unset(object: &mut JsonObject, name: &str, value: impl Into<Value>) {
    if object.get(name).is_none_or(Value::is_null) {
        set_field(object, name, value);
    }
}

/// Sets a field that is absent, `null` or 0, which are the same to Knative.
fn set_if_zero(object: &mut JsonObject, name: &str, value: i64) {
    if object.get(name).is_none_or(|it| it.is_null() || it.as_i64() == Some(0)) {
        set_field(object, name, value);
    }
}
