//! Pure: what an object gets where it says nothing (knative/serving `pkg/apis/serving/v1/*_defaults.go`,
//! knative.md §1.12).
//!
//! Works on documents, not on types: what it does not know it leaves as it stands, and what it does not set is not in
//! the patch. A field of a wrong type is left for the checks to refuse.

use k8s_openapi::{
    api::core::v1::{Container, ResourceRequirements},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use serde_json::{Map, Value, json};

use super::rules::Rules;
use crate::config_maps::SecureDefaults;

/// `revision-response-start-timeout-seconds` as shipped.
pub(crate) const RESPONSE_START: i64 = 300;

/// The port of containers that name none (knative/serving `pkg/networking/constants.go`).
const PORT: i64 = 8080;

type Object = Map<String, Value>;

/// Fills in a template: `parent` is the object around it.
///
/// `created` says that the object is new: what it runs already does not change because a default appeared.
pub(super) fn template(
    template: &mut Value,
    parent: &ObjectMeta,
    created: bool,
    rules: &Rules<'_>,
) {
    if let Some(spec) = template.get_mut("spec") {
        revision_spec(spec, parent, created, rules);
    }
}

/// Fills in what a Revision runs.
pub(super) fn revision_spec(
    spec: &mut Value,
    parent: &ObjectMeta,
    created: bool,
    rules: &Rules<'_>,
) {
    let Value::Object(spec) = spec else { return };
    limits(spec, rules);
    if created {
        service_account(spec, rules);
    }
    let writable = writable_volumes(spec);
    for (list, init) in [("initContainers", true), ("containers", false)] {
        let Some(Value::Array(all)) = spec.get_mut(list) else { continue };
        let (several, name) = match init {
            true => (all.len() > 1, rules.defaults.init_container_name(parent)),
            false => (all.len() > 1, rules.defaults.container_name(parent)),
        };
        for (index, container) in all.iter_mut().enumerate() {
            let Value::Object(container) = container else { continue };
            if text(container, "name").is_empty() {
                let name = if several { format!("{name}-{index}") } else { name.clone() };
                container.insert("name".into(), name.into());
            }
            fill(container, &writable, rules);
            if !init {
                probes(container, several);
            }
        }
    }
    security(spec, rules);
}

/// What a pod knows of others, and whether it may talk to the API server.
fn service_account(spec: &mut Object, rules: &Rules<'_>) {
    // Kubernetes' own default (true) would hand every service the addresses of all others.
    if let Some(links) = rules.defaults.enable_service_links {
        unset(spec, "enableServiceLinks", links);
    }
    if let Some(mount) = rules.defaults.automount_service_account_token
        && text(spec, "serviceAccountName").is_empty()
    {
        unset(spec, "automountServiceAccountToken", mount);
    }
}

fn limits(spec: &mut Object, rules: &Rules<'_>) {
    let defaults = rules.defaults;
    let timeout = match spec.get("timeoutSeconds") {
        None | Some(Value::Null) => 0,
        Some(value) => value.as_i64().unwrap_or(-1),
    };
    let timeout = if timeout == 0 { defaults.timeout_seconds } else { timeout };
    if timeout > 0 {
        set(spec, "timeoutSeconds", timeout);
    }
    unset(spec, "containerConcurrency", defaults.container_concurrency);
    // Only where it is strictly less, so that a timeout of 300 s or below stands alone.
    let start = defaults.response_start_timeout_seconds;
    if start > 0 && start < timeout {
        unset(spec, "responseStartTimeoutSeconds", start);
    }
    let idle = defaults.idle_timeout_seconds;
    if idle > 0 && idle < timeout {
        unset(spec, "idleTimeoutSeconds", idle);
    }
}

/// Names of volumes that pods may write to.
fn writable_volumes(spec: &Object) -> Vec<String> {
    let volumes = spec.get("volumes").and_then(Value::as_array);
    let writable = |volume: &&Value| {
        let kinds = ["emptyDir", "persistentVolumeClaim", "ephemeral"];
        kinds.iter().any(|kind| volume.get(kind).is_some_and(|it| !it.is_null()))
    };
    let all = volumes.into_iter().flatten().filter(writable);
    all.filter_map(|it| it.get("name")?.as_str().map(str::to_owned)).collect()
}

fn fill(container: &mut Object, writable: &[String], rules: &Rules<'_>) {
    resources(container, rules);
    let ports = container.get_mut("ports").and_then(Value::as_array_mut);
    for port in ports.into_iter().flatten().filter_map(Value::as_object_mut) {
        // Who only says what the port speaks means the one that `PORT` names.
        unset(port, "containerPort", PORT);
    }
    let mounts = container.get_mut("volumeMounts").and_then(Value::as_array_mut);
    for mount in mounts.into_iter().flatten().filter_map(Value::as_object_mut) {
        let name = text(mount, "name");
        if !writable.contains(&name) {
            set(mount, "readOnly", true);
        }
    }
}

fn resources(container: &mut Object, rules: &Rules<'_>) {
    let have = container.get("resources").filter(|it| !it.is_null());
    let read = have.map(|it| serde_json::from_value::<ResourceRequirements>(it.clone()));
    let Ok(before) = read.unwrap_or_else(|| Ok(ResourceRequirements::default())) else { return };
    let mut after = before.clone();
    rules.defaults.fill(&mut after);
    for (name, before, after) in
        [("requests", before.requests, after.requests), ("limits", before.limits, after.limits)]
    {
        let before = before.unwrap_or_default();
        for (key, quantity) in after.unwrap_or_default() {
            if !before.contains_key(&key)
                && let Some(resources) = object(container, "resources")
                && let Some(all) = object(resources, name)
            {
                all.insert(key, quantity.0.into());
            }
        }
    }
}

/// The serving container always has a readiness probe: one that asks nothing is a TCP probe.
fn probes(container: &mut Object, several: bool) {
    let ports = container.get("ports").and_then(Value::as_array);
    let serves = !several || ports.is_some_and(|ports| !ports.is_empty());
    if serves && let Some(probe) = object(container, "readinessProbe") {
        readiness(probe);
    }
    for name in ["livenessProbe", "startupProbe"] {
        if let Some(Value::Object(probe)) = container.get_mut(name) {
            grpc_service(probe);
        }
    }
}

fn readiness(probe: &mut Object) {
    let kinds = ["tcpSocket", "httpGet", "exec", "grpc"];
    if kinds.iter().all(|kind| probe.get(*kind).is_none_or(Value::is_null)) {
        probe.insert("tcpSocket".into(), json!({"port": 0}));
    }
    grpc_service(probe);
    zero(probe, "successThreshold", 1);
    unset(probe, "periodSeconds", 0);
    // Period 0 asks as fast as is sensible, and then nothing else may be said.
    if probe.get("periodSeconds").and_then(Value::as_i64) != Some(0) {
        zero(probe, "failureThreshold", 3);
        zero(probe, "timeoutSeconds", 1);
    }
}

fn grpc_service(probe: &mut Object) {
    if let Some(Value::Object(grpc)) = probe.get_mut("grpc") {
        unset(grpc, "service", "");
    }
}

/// `secure-pod-defaults`: a security context for those who wrote none.
fn security(spec: &mut Object, rules: &Rules<'_>) {
    let level = rules.features.secure_pod_defaults;
    if level == SecureDefaults::Disabled {
        return;
    }
    let pod = spec.get("securityContext").cloned().unwrap_or_default();
    let said = |name: &str| pod.get(name).is_some_and(|it| !it.is_null());
    let (seccomp, nonroot) = (said("seccompProfile"), said("runAsNonRoot"));
    for list in ["initContainers", "containers"] {
        let Some(Value::Array(all)) = spec.get_mut(list) else { continue };
        for container in all.iter_mut().filter_map(Value::as_object_mut) {
            let low = has_low_port(container);
            let Some(own) = object(container, "securityContext") else { continue };
            unset(own, "allowPrivilegeEscalation", false);
            if !seccomp {
                unset(own, "seccompProfile", json!({"type": "RuntimeDefault"}));
            }
            let drop = match low {
                true => json!({"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}),
                false => json!({"drop": ["ALL"]}),
            };
            unset(own, "capabilities", drop);
            if level == SecureDefaults::Enabled && !nonroot {
                unset(own, "runAsNonRoot", true);
            }
        }
    }
}

/// Whether it asks for a port that only root, or who may bind such ports, can listen on.
fn has_low_port(container: &Object) -> bool {
    let ports = container.get("ports").and_then(Value::as_array);
    let numbers = ports.into_iter().flatten().filter_map(|it| it.get("containerPort")?.as_i64());
    numbers.into_iter().any(|number| (1..1024).contains(&number))
}

/// Fills in who gets the requests. Only a Service knows a default for nobody.
pub(super) fn traffic(spec: &mut Object, is_service: bool) {
    let empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    let none = spec.get("traffic").is_none_or(|it| it.is_null() || empty(it));
    if none && is_service {
        let all = json!([{"latestRevision": true, "percent": 100}]);
        spec.insert("traffic".into(), all);
    }
    let targets = spec.get_mut("traffic").and_then(Value::as_array_mut);
    for target in targets.into_iter().flatten().filter_map(Value::as_object_mut) {
        let latest = text(target, "revisionName").is_empty();
        unset(target, "latestRevision", latest);
        unset(target, "percent", 0);
    }
}

/// Which container serves: the one with ports, or the only one.
pub(crate) fn serving_index(containers: &[Container]) -> usize {
    containers.iter().position(|it| it.ports.as_ref().is_some_and(|p| !p.is_empty())).unwrap_or(0)
}

/// The text of a field; empty where there is none.
pub(super) fn text(object: &Object, name: &str) -> String {
    object.get(name).and_then(Value::as_str).unwrap_or_default().to_owned()
}

/// The object in a field, made where nothing stands; none where something else does.
pub(super) fn object<'a>(parent: &'a mut Object, name: &str) -> Option<&'a mut Object> {
    let value = parent.entry(name).or_insert(Value::Null);
    if value.is_null() {
        *value = Value::Object(Map::new());
    }
    value.as_object_mut()
}

fn set(object: &mut Object, name: &str, value: impl Into<Value>) {
    object.insert(name.into(), value.into());
}

/// Sets what is not there.
fn unset(object: &mut Object, name: &str, value: impl Into<Value>) {
    if object.get(name).is_none_or(Value::is_null) {
        set(object, name, value);
    }
}

/// Sets what is not there or 0, which to Knative is the same.
fn zero(object: &mut Object, name: &str, value: i64) {
    if object.get(name).is_none_or(|it| it.is_null() || it.as_i64() == Some(0)) {
        set(object, name, value);
    }
}
