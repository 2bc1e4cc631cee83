//! Pure: rules of the API server that compare fields of a pod with each other (Kubernetes'
//! `pkg/apis/core/validation/validation.go`, 1.36).

use std::collections::BTreeSet;

use serde_json::Value;

use super::{
    field_rules::CONTAINER_LISTS,
    for_each_at,
    scheduling_rules::{self, check_expression},
    text, text_rules, texts,
};
use crate::model::problem::Problem;

/// Largest number of DNS servers of a pod.
const MAX_NAMESERVERS: usize = 3;
/// Largest number of search domains of a pod.
const MAX_SEARCHES: usize = 32;
/// Largest number of bytes of all search domains, with the spaces between them.
const MAX_SEARCH_BYTES: usize = 2048;
/// Objects from which a variable may take its value.
const ENV_SOURCES: [&str; 4] = ["configMapKeyRef", "fieldRef", "resourceFieldRef", "secretKeyRef"];

/// Checks all rules of this file.
pub(super) fn check_combined_fields(pod: &Value, at: &str, problems: &mut Vec<Problem>) {
    check_dns(pod, at, problems);
    if is_true(&pod["shareProcessNamespace"]) && is_true(&pod["hostPID"]) {
        let problem = Problem::invalid(format!("{at}.shareProcessNamespace"), true);
        problems.push(problem.with_details("cannot be set together with `hostPID`"));
    }
    for_each_at(pod, "securityContext.seccompProfile", at, &mut |value, at| {
        check_seccomp_profile(value, at, problems);
    });
    scheduling_rules::check_scheduling_fields(pod, at, problems);
    for_each_at(pod, "volumes[].projected", at, &mut |value, at| {
        check_projected_paths(value, at, problems);
    });
    let claim = "volumes[].ephemeral.volumeClaimTemplate";
    for_each_at(pod, claim, at, &mut |value, at| check_claim_template(value, at, problems));
    let item = "volumes[].projected.sources[].downwardAPI.items[].resourceFieldRef";
    for_each_at(pod, item, at, &mut |value, at| check_divisor(value, at, problems));
    for list in CONTAINER_LISTS {
        for_each_at(pod, list, at, &mut |value, at| check_container(value, at, problems));
    }
}

fn is_true(value: &Value) -> bool {
    value.as_bool() == Some(true)
}

/// Checks the DNS settings of a pod: servers for the policy `None`, and the bounds of the resolver.
fn check_dns(pod: &Value, at: &str, problems: &mut Vec<Problem>) {
    let config = &pod["dnsConfig"];
    let (servers, searches) = (texts(&config["nameservers"]), texts(&config["searches"]));
    let (servers, searches): (Vec<&str>, Vec<&str>) = (servers.collect(), searches.collect());
    let at = format!("{at}.dnsConfig");
    if text(pod, "dnsPolicy") == "None" && servers.is_empty() {
        let rule = "must provide at least one DNS nameserver when `dnsPolicy` is None";
        problems.push(Problem::missing(format!("{at}.nameservers")).with_details(rule));
    }
    if servers.len() > MAX_NAMESERVERS {
        let path = format!("{at}.nameservers");
        problems.push(Problem::new(
            path,
            format!("must not have more than {MAX_NAMESERVERS} nameservers"),
        ));
    }
    if searches.len() > MAX_SEARCHES {
        let path = format!("{at}.searches");
        problems.push(Problem::new(
            path,
            format!("must not have more than {MAX_SEARCHES} search paths"),
        ));
    // The resolver reads the list as one line.
    } else if searches.join(" ").len() > MAX_SEARCH_BYTES {
        let rule = format!(
            "must not have more than {MAX_SEARCH_BYTES} characters (including spaces) in the search list"
        );
        problems.push(Problem::new(format!("{at}.searches"), rule));
    }
}

fn check_seccomp_profile(profile: &Value, at: &str, problems: &mut Vec<Problem>) {
    let at = format!("{at}.localhostProfile");
    let path = &profile["localhostProfile"];
    // The path is that of a profile on the node, which the other types do not read.
    if text(profile, "type") != "Localhost" {
        if !path.is_null() {
            let rule = "can only be set when seccomp type is Localhost";
            problems.push(Problem::disallowed(at).with_details(rule));
        }
    } else if path.is_null() {
        let rule = "must be set when seccomp type is Localhost";
        problems.push(Problem::missing(at).with_details(rule));
    } else if let Some(path) = path.as_str().filter(|it| !text_rules::is_inner_path(it)) {
        problems.push(Problem::invalid(at, path));
    }
}

/// Reports files of one projected volume that have the same path.
fn check_projected_paths(projected: &Value, at: &str, problems: &mut Vec<Problem>) {
    let mut seen = BTreeSet::new();
    for source in ["configMap", "downwardAPI", "secret"] {
        for_each_at(projected, &format!("sources[].{source}.items[]"), at, &mut |item, at| {
            let path = text(item, "path");
            if !path.is_empty() && !seen.insert(path.to_owned()) {
                let problem = Problem::invalid(format!("{at}.path"), path);
                problems.push(problem.with_details("conflicting duplicate paths"));
            }
        });
    }
}

/// Checks the claim of an ephemeral volume.
fn check_claim_template(template: &Value, at: &str, problems: &mut Vec<Problem>) {
    for (name, _) in template["metadata"].as_object().into_iter().flatten() {
        if !matches!(name.as_str(), "labels" | "annotations" | "creationTimestamp") {
            problems.push(Problem::disallowed(format!("{at}.metadata.{name}")));
        }
    }
    let annotations = format!("{at}.metadata.annotations");
    super::check_annotations(&template["metadata"]["annotations"], &annotations, problems);
    let selected = "spec.selector.matchExpressions[]";
    for_each_at(template, selected, at, &mut |value, at| check_expression(value, at, problems));
    for_each_at(template, "spec.dataSource", at, &mut |value, at| {
        for field in ["kind", "name"] {
            if text(value, field).is_empty() {
                problems.push(Problem::missing(format!("{at}.{field}")));
            }
        }
        let is_claim = text(value, "kind") == "PersistentVolumeClaim";
        // The core group has no other kind that a volume can be filled from.
        if text(value, "apiGroup").is_empty() && !is_claim {
            let problem = Problem::invalid(format!("{at}.kind"), text(value, "kind"));
            let rule = "must be 'PersistentVolumeClaim' when referencing the default apiGroup";
            problems.push(problem.with_details(rule));
        }
    });
    let modes = &template["spec"]["accessModes"];
    if modes.as_array().is_some_and(Vec::is_empty) {
        problems.push(Problem::missing(format!("{at}.spec.accessModes")));
    }
    let modes: BTreeSet<&str> = texts(modes).collect();
    if modes.contains("ReadWriteOncePod") && modes.len() > 1 {
        let problem = Problem::disallowed(format!("{at}.spec.accessModes"));
        let rule = "may not use ReadWriteOncePod with other access modes";
        problems.push(problem.with_details(rule));
    }
}

/// Checks fields of a container that depend on each other.
fn check_container(container: &Value, at: &str, problems: &mut Vec<Problem>) {
    for_each_at(container, "env[]", at, &mut |value, at| check_variable(value, at, problems));
    for_each_at(container, "env[].valueFrom.resourceFieldRef", at, &mut |value, at| {
        check_divisor(value, at, problems);
    });
    for_each_at(container, "resources", at, &mut |value, at| {
        super::check_requests(value, at, problems);
        check_special_resources(value, at, problems);
    });
    let profile = "securityContext.seccompProfile";
    for_each_at(container, profile, at, &mut |value, at| {
        check_seccomp_profile(value, at, problems);
    });
    let context = &container["securityContext"];
    let is_admin = texts(&context["capabilities"]["add"]).any(|it| it == "CAP_SYS_ADMIN");
    if is_admin && context["allowPrivilegeEscalation"].as_bool() == Some(false) {
        let path = format!("{at}.securityContext.allowPrivilegeEscalation");
        let rule = "cannot be false when CAP_SYS_ADMIN is added";
        problems.push(Problem::invalid(path, false).with_details(rule));
    }
    for_each_at(container, "volumeMounts[].mountPropagation", at, &mut |value, at| {
        // No container of a service is privileged.
        if value == "Bidirectional" {
            let rule = "Bidirectional mount propagation is available only to privileged containers";
            problems.push(Problem::invalid(at, "Bidirectional").with_details(rule));
        }
    });
}

/// Checks that a variable has one source of its value.
fn check_variable(variable: &Value, at: &str, problems: &mut Vec<Problem>) {
    let from = &variable["valueFrom"];
    if !from.is_object() {
        return;
    }
    let at = format!("{at}.valueFrom");
    let (set, unset): (Vec<&str>, Vec<&str>) =
        ENV_SOURCES.into_iter().partition(|it| !from[*it].is_null());
    let paths = |names: &[&str]| -> String {
        names.iter().map(|it| format!("{at}.{it}")).collect::<Vec<_>>().join(", ")
    };
    // In the order of the API server's own checks: it reports only the first fault.
    if set.is_empty() {
        problems.push(Problem::none_set(paths(&unset)));
    } else if !text(variable, "value").is_empty() {
        let rule = "may not be specified when `value` is not empty";
        problems.push(Problem::disallowed(at).with_details(rule));
    } else if set.len() > 1 {
        problems.push(Problem::several_set(paths(&set)));
    }
}

/// Checks that the divisor of a container's resource is a unit of that resource.
fn check_divisor(reference: &Value, at: &str, problems: &mut Vec<Problem>) {
    let is_cpu = text(reference, "resource").ends_with(".cpu");
    let divisor = text(reference, "divisor");
    // The table of single fields refuses what is no unit of any resource.
    let fits = match text_rules::quantity_value(&divisor.into()) {
        Some(value) if is_cpu => value <= 1.0,
        Some(value) => value == 0.0 || value >= 1.0,
        None => true,
    };
    if !fits {
        problems.push(Problem::invalid(format!("{at}.divisor"), divisor));
    }
}

/// Checks resources of which a container gets whole units: huge pages, and extended resources such as GPUs.
fn check_special_resources(resources: &Value, at: &str, problems: &mut Vec<Problem>) {
    let is_huge = |name: &str| name.starts_with("hugepages-");
    let is_extended = |name: &str| name.contains('/') && !name.contains("kubernetes.io/");
    let (limits, requests) = (&resources["limits"], &resources["requests"]);
    let names = |value: &'_ Value| -> BTreeSet<String> {
        value.as_object().into_iter().flatten().map(|(name, _)| name.clone()).collect()
    };
    let all: BTreeSet<String> = &names(limits) | &names(requests);
    if all.iter().any(|it| is_huge(it)) && !all.contains("cpu") && !all.contains("memory") {
        problems.push(Problem::new(at, "HugePages require cpu or memory"));
    }
    for name in all.iter().filter(|it| is_huge(it) || is_extended(it)) {
        let [limit, request] = [limits, requests].map(|it| it.get(name.as_str()));
        let path = format!("{at}.requests.{name}");
        let [limit_value, request_value] =
            [limit, request].map(|it| it.and_then(text_rules::quantity_value));
        // A request above the limit is reported with those of other resources.
        if request_value.zip(limit_value).is_some_and(|(request, limit)| request < limit) {
            problems.push(Problem::new(path, format!("must be equal to {name} limit")));
        }
        if request.is_some() && limit.is_none() {
            let rule = "Limit must be set for non overcommitable resources";
            problems.push(Problem::missing(format!("{at}.limits.{name}")).with_details(rule));
        }
        if name.starts_with("requests.") {
            problems.push(Problem::invalid_key(format!("{at}.{name}"), name));
        }
        let unit = match name.strip_prefix("hugepages-") {
            Some(size) => text_rules::quantity_value(&size.into()).unwrap_or(f64::NAN),
            None => 1.0,
        };
        for (list, value) in [("limits", limit_value), ("requests", request_value)] {
            // A size that cannot be read has no multiple: the remainder is no number.
            if value.is_some_and(|it| (it % unit) != 0.0) {
                let path = format!("{at}.{list}.{name}");
                problems.push(Problem::new(path, format!("must be whole units of {name}")));
            }
        }
    }
}
