//! Pure: rules of pods (knative/serving `pkg/apis/serving/k8s_validation.go` at 98e5ef9).

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Container, PodSpec};
use serde_json::Value;

use super::{
    apiserver_rules, container, dns_names, field_mask, security, settings::RuleSettings, volume,
};
use crate::model::{cluster_state::PlatformKind, config_maps::Flag, problem::Problem};

/// Role of a container in its pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PodContainerRole {
    /// Container that gets the requests.
    Serving,
    /// Container that runs beside the serving one.
    Sidecar,
    /// Container that runs before all others.
    Init,
}

/// Checks a pod: `raw` as it was written, `pod` as it was parsed, `at` is its path in the object.
pub(super) fn check_pod(
    raw: &Value,
    pod: &PodSpec,
    at: &str,
    settings: &RuleSettings<'_>,
    problems: &mut Vec<Problem>,
) {
    field_mask::POD_MASK.check(raw, settings.features, at, problems);
    apiserver_rules::check_pod_fields(raw, at, problems);
    security::check_pod_context(pod, at, settings, problems);
    volume::check_volumes(pod, at, settings, problems);
    check_init_containers(pod, at, settings, problems);
    let port = find_serving_port(&pod.containers, &format!("{at}.containers[*].ports"), problems);
    let several = pod.containers.len() > 1;
    if pod.containers.is_empty() {
        problems.push(Problem::missing(format!("{at}.containers")));
    }
    if several && settings.features.multi_container != Flag::Enabled {
        let count = pod.containers.len();
        let message = format!("multi-container is off, but found {count} containers");
        problems.push(Problem::new(format!("{at}.containers"), message));
        // As in Knative, the containers of such a pod are not checked any further.
        return;
    }
    check_unique_names(&pod.containers, at, problems);
    for (index, one) in pod.containers.iter().enumerate() {
        let path = format!("{at}.containers[{index}]");
        let serves = !several || one.ports.as_ref().is_some_and(|ports| !ports.is_empty());
        let role = if serves { PodContainerRole::Serving } else { PodContainerRole::Sidecar };
        container::check_container(one, role, &port, &path, settings, problems);
        volume::check_mounts(pod, one, &path, settings.platform, problems);
    }
    if let Some(account) = pod.service_account_name.as_deref().filter(|name| !name.is_empty()) {
        for error in dns_names::subdomain_errors(account) {
            let problem = Problem::invalid(format!("{at}.serviceAccountName"), account);
            problems.push(problem.with_details(error));
        }
    }
}

/// The serving port: its number, and the name by which probes may refer to it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ServingPort {
    pub number: i32,
    pub name: String,
}

/// Returns the port that gets the requests, with Knative's defaults. More than one port is a problem.
fn find_serving_port(
    containers: &[Container],
    at: &str,
    problems: &mut Vec<Problem>,
) -> ServingPort {
    let all: Vec<_> = containers.iter().flat_map(|it| it.ports.iter().flatten()).collect();
    if all.is_empty() && containers.len() > 1 {
        let problem = Problem::missing(at);
        problems.push(problem.with_advice("give ports to the one container that serves"));
    }
    if all.len() > 1 {
        let problem = Problem::new(at, "more than one container port is set");
        problems.push(problem.with_details("Only a single port is allowed across all containers"));
    }
    // Knative gives an unnamed port this name.
    let named = |name: Option<&str>| match name {
        None | Some("") => "http".to_owned(),
        Some(name) => name.to_owned(),
    };
    let (number, name) =
        all.last().map_or((0, None), |port| (port.container_port, port.name.as_deref()));
    ServingPort { number: if number == 0 { 8080 } else { number }, name: named(name) }
}

/// Checks the init containers, if the feature for them is on.
fn check_init_containers(
    pod: &PodSpec,
    at: &str,
    settings: &RuleSettings<'_>,
    problems: &mut Vec<Problem>,
) {
    let init = pod.init_containers.as_deref().unwrap_or_default();
    if init.is_empty() {
        return;
    }
    let off = settings.features.podspec_init_containers != Flag::Enabled;
    if off || settings.platform == PlatformKind::Local {
        let count = init.len();
        let message = format!(
            "pod spec support for init-containers is off, but found {count} init containers"
        );
        problems.push(Problem::new(format!("{at}.initContainers"), message));
        return;
    }
    // Init containers share the names with the others.
    let mut taken: BTreeSet<&str> = pod.containers.iter().map(|it| it.name.as_str()).collect();
    // Init containers serve nothing, so no port matches.
    let no_port = ServingPort { number: 0, name: String::new() };
    for (index, one) in init.iter().enumerate() {
        let path = format!("{at}.initContainers[{index}]");
        if !taken.insert(&one.name) {
            let message = format!("duplicate container name {:?}", one.name);
            problems.push(Problem::new(format!("{path}.name"), message));
        }
        let role = PodContainerRole::Init;
        container::check_container(one, role, &no_port, &path, settings, problems);
        volume::check_mounts(pod, one, &path, settings.platform, problems);
    }
}

fn check_unique_names(containers: &[Container], at: &str, problems: &mut Vec<Problem>) {
    let mut seen = BTreeSet::new();
    for (index, container) in containers.iter().enumerate() {
        let (name, path) = (&container.name, format!("{at}.containers[{index}].name"));
        if !seen.insert(name) {
            problems.push(Problem::new(path, format!("duplicate container name {name:?}")));
        }
    }
}
