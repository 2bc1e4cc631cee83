//! Pure: rules of security contexts, and warnings about insecure defaults (knative/serving
//! `pkg/apis/serving/k8s_validation.go` at 98e5ef9).

use k8s_openapi::api::core::v1::{Container, PodSecurityContext, PodSpec, SecurityContext};

use super::settings::RuleSettings;
use crate::model::{
    config_maps::{Flag, SecureDefaults},
    problem::Problem,
};

/// Highest ID of users and groups.
const MAX_ID: i64 = i32::MAX as i64;

/// Checks the security context of a pod.
pub(super) fn check_pod_context(
    pod: &PodSpec,
    at: &str,
    settings: &RuleSettings<'_>,
    problems: &mut Vec<Problem>,
) {
    let Some(context) = &pod.security_context else { return };
    let at = format!("{at}.securityContext");
    check_id("runAsUser", context.run_as_user, &at, problems);
    check_id("runAsGroup", context.run_as_group, &at, problems);
    check_id("fsGroup", context.fs_group, &at, problems);
    for (index, group) in context.supplemental_groups.iter().flatten().enumerate() {
        check_id(&format!("supplementalGroups[{index}]"), Some(*group), &at, problems);
    }
    if settings.features.podspec_securitycontext == Flag::Disabled {
        restrict_without_feature(context, &at, problems);
    }
}

/// Restricts the context without the feature: users may only opt out of the values that `secure-pod-defaults` sets.
fn restrict_without_feature(context: &PodSecurityContext, at: &str, problems: &mut Vec<Problem>) {
    let seccomp = context.seccomp_profile.as_ref().map(|it| it.type_.as_str());
    let fields = [
        ("fsGroup", context.fs_group.is_some()),
        ("runAsGroup", context.run_as_group.is_some()),
        ("runAsNonRoot", context.run_as_non_root == Some(true)),
        ("runAsUser", context.run_as_user.is_some()),
        (
            "seccompProfile",
            seccomp.is_some_and(|it| !matches!(it, "RuntimeDefault" | "Unconfined")),
        ),
        ("supplementalGroups", context.supplemental_groups.is_some()),
    ];
    for (name, _) in fields.iter().filter(|(_, set)| *set) {
        problems.push(Problem::disallowed(format!("{at}.{name}")));
    }
}

/// Checks the security context of a container.
pub(super) fn check_container_context(
    container: &Container,
    at: &str,
    settings: &RuleSettings<'_>,
    problems: &mut Vec<Problem>,
) {
    let Some(context) = &container.security_context else { return };
    let at = format!("{at}.securityContext");
    if context.privileged == Some(true) {
        problems.push(Problem::disallowed(format!("{at}.privileged")));
    }
    let add = context.capabilities.as_ref().and_then(|it| it.add.as_ref());
    if let Some(add) = add {
        let secure = settings.features.secure_pod_defaults != SecureDefaults::Disabled;
        // `secure-pod-defaults` itself adds this capability for low ports, so it must pass.
        let bind = secure && add.as_slice() == ["NET_BIND_SERVICE"];
        if settings.features.containerspec_addcapabilities == Flag::Disabled && !bind {
            problems.push(Problem::disallowed(format!("{at}.capabilities.add")));
        }
    }
    check_id("runAsUser", context.run_as_user, &at, problems);
    check_id("runAsGroup", context.run_as_group, &at, problems);
}

fn check_id(name: &str, value: Option<i64>, at: &str, problems: &mut Vec<Problem>) {
    if let Some(value) = value.filter(|value| !(0..=MAX_ID).contains(value)) {
        problems.push(Problem::out_of_bounds(format!("{at}.{name}"), 0, value, MAX_ID));
    }
}

/// Warns of settings that are left to Kubernetes' own insecure defaults.
pub(super) fn warn_insecure_defaults(pod: &PodSpec, at: &str, warnings: &mut Vec<Problem>) {
    let lists = [
        ("containers", pod.containers.as_slice()),
        ("initContainers", pod.init_containers.as_deref().unwrap_or_default()),
    ];
    let pod_context = pod.security_context.clone().unwrap_or_default();
    for (list, containers) in lists {
        for (index, container) in containers.iter().enumerate() {
            let at = format!("{at}.{list}[{index}].securityContext");
            let context = container.security_context.clone().unwrap_or_default();
            warn_insecure_context(&pod_context, &context, &at, warnings);
        }
    }
}

/// Warns of settings whose defaults in Kubernetes are not safe, with Knative's texts.
fn warn_insecure_context(
    pod: &PodSecurityContext,
    context: &SecurityContext,
    at: &str,
    warnings: &mut Vec<Problem>,
) {
    let mut insecure = |name: &str| {
        let message = "Kubernetes default value is insecure, Knative may default this to secure in a future release";
        warnings.push(Problem::new(format!("{at}.{name}"), message));
    };
    if pod.run_as_non_root.is_none() && context.run_as_non_root.is_none() {
        insecure("runAsNonRoot");
    }
    if context.allow_privilege_escalation.is_none() {
        insecure("allowPrivilegeEscalation");
    }
    let profiles = [pod.seccomp_profile.as_ref(), context.seccomp_profile.as_ref()];
    if profiles.iter().all(Option::is_none) {
        insecure("seccompProfile");
    } else if profiles.iter().flatten().all(|it| it.type_.is_empty()) {
        insecure("seccompProfile.type");
    }
    match context.capabilities.as_ref().map(|it| it.drop.as_deref()) {
        None => insecure("capabilities"),
        Some(None) => insecure("capabilities.drop"),
        // Kubernetes knows only the spelling `ALL`, and would drop nothing.
        Some(Some([first, ..])) if first == "all" => {
            let problem = Problem::invalid(format!("{at}.capabilities.drop"), "all");
            warnings.push(problem.with_details("Must be spelled as 'ALL'"));
        }
        Some(Some(_)) => {}
    }
}
