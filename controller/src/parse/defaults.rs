//! Pure: what an object gets where it says nothing (knative/serving `pkg/apis/serving/v1/*_defaults.go`,
//! knative.md §1.12).
//!
//! Works on documents, not on types: what it does not know it leaves as it stands, and what it does not set is not in
//! the patch. A field of a wrong type is left for the checks to refuse.

use std::collections::BTreeSet;

use k8s_openapi::{
    api::core::v1::{Container, ResourceRequirements},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use serde_json::{Map, Value, json};

use super::rules::Rules;
use crate::{children::child_name, config_maps::SecureDefaults};

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
    let (writable, taken) = (writable_volumes(spec), names(spec));
    for (list, init) in [("initContainers", true), ("containers", false)] {
        let Some(Value::Array(all)) = spec.get_mut(list) else { continue };
        let several = all.len() > 1;
        let name = match init {
            true => rules.defaults.init_container_name(parent),
            false => rules.defaults.container_name(parent),
        };
        name_containers(all, &name, &taken);
        for container in all.iter_mut().filter_map(Value::as_object_mut) {
            mounts(container, &writable);
            if !init {
                resources(container, rules);
                ports(container);
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

/// Names that users gave to containers.
fn names(spec: &Object) -> BTreeSet<String> {
    let lists = ["containers", "initContainers"].map(|list| spec.get(list));
    let all = lists.into_iter().flatten().filter_map(Value::as_array).flatten();
    all.filter_map(Value::as_object).map(|it| text(it, "name")).collect()
}

/// Names those that have none after `default`, with a number where that is not enough to tell them apart.
fn name_containers(all: &mut [Value], default: &str, taken: &BTreeSet<String>) {
    let numbered = all.len() > 1 || taken.contains(default);
    let mut fresh = (0..).map(|number: usize| child_name(default, &format!("-{number}")));
    for container in all.iter_mut().filter_map(Value::as_object_mut) {
        if !text(container, "name").is_empty() {
            continue;
        }
        let name = match numbered {
            true => fresh.find(|it| !taken.contains(it)).unwrap_or_default(),
            false => default.to_owned(),
        };
        set(container, "name", name);
    }
}

fn ports(container: &mut Object) {
    let ports = container.get_mut("ports").and_then(Value::as_array_mut);
    for port in ports.into_iter().flatten().filter_map(Value::as_object_mut) {
        // Who only says what the port speaks means the one that `PORT` names.
        zero(port, "containerPort", PORT);
    }
}

/// What pods cannot write to is mounted so.
fn mounts(container: &mut Object, writable: &[String]) {
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
        let kinds = ["tcpSocket", "httpGet", "exec", "grpc"];
        if kinds.iter().all(|kind| probe.get(*kind).is_none_or(Value::is_null)) {
            probe.insert("tcpSocket".into(), json!({"port": 0}));
        }
        unset(probe, "periodSeconds", 0);
    }
    // Another container need not have one; what it has gets the same numbers.
    if let Some(Value::Object(probe)) = container.get_mut("readinessProbe") {
        numbers(probe);
    }
    for name in ["readinessProbe", "livenessProbe", "startupProbe"] {
        if let Some(Value::Object(probe)) = container.get_mut(name) {
            grpc_service(probe);
        }
    }
}

fn numbers(probe: &mut Object) {
    zero(probe, "successThreshold", 1);
    // Period 0 asks as fast as is sensible, and then nothing else may be said.
    let period = probe.get("periodSeconds").filter(|it| !it.is_null());
    if period.is_some_and(|it| it.as_i64() != Some(0)) {
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
    let (seccomp, nonroot) = (has_seccomp(pod.as_object()), said("runAsNonRoot"));
    for list in ["initContainers", "containers"] {
        let Some(Value::Array(all)) = spec.get_mut(list) else { continue };
        for container in all.iter_mut().filter_map(Value::as_object_mut) {
            let low = has_low_port(container);
            let Some(own) = object(container, "securityContext") else { continue };
            unset(own, "allowPrivilegeEscalation", false);
            if !seccomp
                && !has_seccomp(Some(own))
                && let Some(profile) = object(own, "seccompProfile")
            {
                set(profile, "type", "RuntimeDefault");
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

/// Whether a security context says which system calls are allowed.
fn has_seccomp(context: Option<&Object>) -> bool {
    let profile = context.and_then(|it| it.get("seccompProfile")).and_then(Value::as_object);
    profile.is_some_and(|it| !text(it, "type").is_empty())
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
