//! Pure: warnings about settings of a Service that the local node ignores: it is one machine without an API server.

use k8s_openapi::{
    api::core::v1::{Container, PodSpec, Volume},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};

use crate::model::{knative::key, problem::Problem};

const AT: &str = "spec.template.spec";
const NO_ACCOUNTS: &str = "no pod is given a token of an API server";

/// Warns of settings that have no effect on the local node although they have one on Kubernetes.
pub(super) fn warn_ignored_settings(meta: &ObjectMeta, pod: &PodSpec, warnings: &mut Vec<Problem>) {
    let mut warn_no_effect = |at: &str, field: &str, reason: &str| {
        warnings.push(Problem::new(at, format!("{field} has no effect: {reason}")));
    };
    // Errors would keep a manifest of a cluster from the local node, so these are warnings.
    let annotations = meta.annotations.iter().flat_map(|it| it.keys());
    for name in annotations.filter(|it| key::ROLLOUT_DURATION.contains(&it.as_str())) {
        warn_no_effect(&format!("metadata.annotations.{name}"), name, "all traffic moves at once");
    }
    for (field, is_set, reason) in [
        (
            "automountServiceAccountToken",
            pod.automount_service_account_token.is_some(),
            NO_ACCOUNTS,
        ),
        ("serviceAccountName", pod.service_account_name.is_some(), NO_ACCOUNTS),
        (
            "enableServiceLinks",
            pod.enable_service_links.is_some(),
            "no pod is given variables that name services",
        ),
        (
            "imagePullSecrets",
            pod.image_pull_secrets.is_some(),
            "images are pulled with the logins of docker and podman",
        ),
    ] {
        if is_set {
            warn_no_effect(&format!("{AT}.{field}"), field, reason);
        }
    }
    for (index, it) in pod.volumes.iter().flatten().enumerate() {
        warn_volume(it, &format!("{AT}.volumes[{index}]"), &mut warn_no_effect);
    }
    for (index, it) in pod.containers.iter().enumerate() {
        warn_container(it, &format!("{AT}.containers[{index}]"), &mut warn_no_effect);
    }
}

fn warn_volume(volume: &Volume, at: &str, warn_no_effect: &mut impl FnMut(&str, &str, &str)) {
    let Some(dir) = &volume.empty_dir else { return };
    let medium = dir.medium.as_deref().is_some_and(|it| !it.is_empty());
    for (field, is_set) in [("medium", medium), ("sizeLimit", dir.size_limit.is_some())] {
        if is_set {
            let reason = "a volume is a folder on the disk, without a bound of its own";
            let path = format!("{at}.emptyDir.{field}");
            warn_no_effect(&path, &format!("volumes[].emptyDir.{field}"), reason);
        }
    }
}

/// Warns of settings of a container that have no effect on the local node.
fn warn_container(
    container: &Container,
    at: &str,
    warn_no_effect: &mut impl FnMut(&str, &str, &str),
) {
    let mut warn =
        |field: &str, reason: &str| warn_no_effect(&format!("{at}.{field}"), field, reason);
    if container.security_context.as_ref().is_some_and(|context| context.seccomp_profile.is_some())
    {
        warn("securityContext.seccompProfile", "no system call is filtered");
    }
    if container.termination_message_policy.as_deref() == Some("File") {
        warn("terminationMessagePolicy", "the end of the log is shown where there is no message");
    }
    let resources = container.resources.clone().unwrap_or_default();
    for name in resources.limits.iter().flat_map(|limits| limits.keys()) {
        if !matches!(name.as_str(), "cpu" | "memory") {
            warn(&format!("resources.limits.{name}"), "only cpu and memory are bounded");
        }
    }
    let requested = resources.requests.iter().flat_map(|requests| requests.keys());
    for name in requested.filter(|name| *name != "cpu") {
        warn(&format!("resources.requests.{name}"), "there is no other node to choose");
    }
}
