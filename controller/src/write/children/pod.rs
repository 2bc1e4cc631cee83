//! Pure: the pod spec of a Revision: the user's template with the platform's additions.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{
        Affinity, Container, ContainerPort, EnvVar, HTTPGetAction, Lifecycle, LifecycleHandler,
        PodAffinityTerm, PodAntiAffinity, PodSpec, WeightedPodAffinityTerm,
    },
    apimachinery::pkg::{apis::meta::v1::LabelSelector, util::intstr::IntOrString},
};

use super::{RevisionView, meta};
use crate::model::{
    cluster_state::DeploymentSettings,
    config_maps::deployment::best_selector_match,
    knative::{
        key,
        user_container::{
            self, ReplacedPorts, USER_PORT_NAME, resolve_probe_ports, serving_port, set_probe_port,
        },
    },
    standby_policy::parse_pods,
};

/// Port of the pod server, where a node's agent answers once a pod may stop (knative/serving
/// `networking.QueueAdminPort`).
pub const DRAIN_PORT: i32 = 8022;
/// Path of the preStop request (knative/serving `queue.RequestQueueDrainPath`).
pub const DRAIN_PATH: &str = "/wait-for-drain";
/// Default of `timeoutSeconds`, in seconds.
const DEFAULT_TIMEOUT_SECONDS: i64 = 300;
/// Period of a readiness probe that has none, on a template that asks for standby, in seconds: Kubernetes' default. Each
/// probe thaws a frozen pod for half a second, so a pod that is probed each second would run for half of the time.
const STANDBY_PROBE_PERIOD_SECONDS: i32 = 10;

/// Builds the pod spec of a Revision.
pub fn pod_spec(revision: &RevisionView<'_>, config: &DeploymentSettings) -> PodSpec {
    let mut pod = revision.spec.pod.clone();
    let timeout = revision.spec.timeout_seconds.filter(|it| *it > 0);
    // A request may take `timeoutSeconds`, and a pod must be able to finish its last one.
    pod.termination_grace_period_seconds = Some(timeout.unwrap_or(DEFAULT_TIMEOUT_SECONDS));
    pod.enable_service_links = pod.enable_service_links.or(config.enable_service_links);
    if pod.service_account_name.as_deref().unwrap_or_default().is_empty() {
        let token = pod.automount_service_account_token;
        pod.automount_service_account_token = token.or(config.automount_service_account_token);
    }
    if config.spread_over_nodes && pod.affinity.is_none() {
        pod.affinity = Some(spread_affinity(revision.name));
    }
    if pod.runtime_class_name.is_none() {
        let classes = config.runtime_classes.iter().map(|(name, it)| (name.as_str(), it));
        let class = best_selector_match(classes, &meta::child_labels(revision));
        pod.runtime_class_name = class.map(str::to_owned);
    }
    // On the node's network the port would be the node's, and would not identify the pod.
    let drains = config.wait_for_drain && pod.host_network != Some(true);
    let serving_index = user_container::serving_index(&pod.containers);
    let port = serving_port(pod.containers.get(serving_index));
    let least_probe_period = least_probe_period(revision);
    for (index, container) in pod.containers.iter_mut().enumerate() {
        complete_user_container(container, revision);
        let serving_port = (index == serving_index).then_some(port);
        set_ports_and_probes(container, serving_port, config);
        set_readiness_period(container, least_probe_period);
        container.lifecycle = drains.then(pre_stop_hook);
    }
    for container in pod.init_containers.iter_mut().flatten() {
        complete_user_container(container, revision);
    }
    pod
}

/// Adds the platform's settings to a container of the user.
fn complete_user_container(container: &mut Container, revision: &RevisionView<'_>) {
    let env = container.env.get_or_insert_default();
    env.push(env_var("K_REVISION", revision.name));
    env.push(env_var("K_CONFIGURATION", revision.configuration));
    env.push(env_var("K_SERVICE", revision.service));
    // Knative drops both fields: a serverless container has no terminal.
    container.stdin = None;
    container.tty = None;
    container.termination_message_policy.get_or_insert_with(|| "FallbackToLogsOnError".into());
    if let Some(image) = revision.resolved_image(&container.name) {
        container.image = Some(image.into());
    }
}

fn env_var(name: &str, value: &str) -> EnvVar {
    EnvVar { name: name.into(), value: Some(value.into()), ..EnvVar::default() }
}

/// Sets ports, and the ports of probes. `serving_port` is `None` for a sidecar.
fn set_ports_and_probes(
    container: &mut Container,
    serving_port: Option<i32>,
    config: &DeploymentSettings,
) {
    container.ports = serving_port.map(|port| {
        vec![ContainerPort {
            name: Some(USER_PORT_NAME.into()),
            container_port: port,
            protocol: Some("TCP".into()),
            ..ContainerPort::default()
        }]
    });
    if let Some(port) = serving_port {
        let env = container.env.get_or_insert_default();
        env.push(env_var("PORT", &port.to_string()));
        if let Some(probe) = container.liveness_probe.as_mut().filter(|_| !config.probe_any_port) {
            // As in Knative, a liveness probe checks the serving port, whatever port it names.
            set_probe_port(probe, port, ReplacedPorts::All);
        }
        resolve_probe_ports(container, port);
    }
    if let Some(probe) = &mut container.readiness_probe {
        // Knative's sidecar accepts the scheme in any case, Kubernetes in upper case only.
        let scheme = probe.http_get.as_mut().and_then(|it| it.scheme.as_mut());
        scheme.into_iter().for_each(|it| it.make_ascii_uppercase());
    }
}

/// Returns the period of the kubelet's readiness probes if the template leaves it to the platform, in seconds.
///
/// Only the template counts. With a default of the namespace or of the installation, a change of the default would
/// replace all running pods.
fn least_probe_period(revision: &RevisionView<'_>) -> i32 {
    let pods = revision.annotations.get(key::STANDBY).map(|text| parse_pods(text.trim()));
    if pods.is_some_and(|it| it.is_ok_and(|pods| pods > 0)) {
        STANDBY_PROBE_PERIOD_SECONDS
    } else {
        1
    }
}

/// Sets the period of a readiness probe that has a period of 0, by which Knative means "as fast as sensible". The agent
/// probes every few milliseconds, a kubelet at most once a second.
fn set_readiness_period(container: &mut Container, least_seconds: i32) {
    let probe = container.readiness_probe.as_mut();
    let period = probe.and_then(|it| it.period_seconds.as_mut());
    period.into_iter().filter(|it| **it <= 0).for_each(|it| *it = least_seconds);
}

/// preStop hook that waits until nothing is in flight. It has no host: the kubelet then connects to the pod's own
/// address, where the agent's pod server listens in the pod's namespace. Without an agent nothing listens there, and
/// the pod stops without delay.
fn pre_stop_hook() -> Lifecycle {
    let get = HTTPGetAction {
        path: Some(DRAIN_PATH.into()),
        port: IntOrString::Int(DRAIN_PORT),
        ..HTTPGetAction::default()
    };
    let hook = LifecycleHandler { http_get: Some(get), ..LifecycleHandler::default() };
    Lifecycle { pre_stop: Some(hook), ..Lifecycle::default() }
}

/// Affinity that prefers nodes without a pod of this Revision.
fn spread_affinity(revision: &str) -> Affinity {
    let pods = BTreeMap::from([(key::REVISION.into(), revision.into())]);
    let term = WeightedPodAffinityTerm {
        weight: 100,
        pod_affinity_term: PodAffinityTerm {
            topology_key: "kubernetes.io/hostname".into(),
            label_selector: Some(LabelSelector {
                match_labels: Some(pods),
                ..LabelSelector::default()
            }),
            ..PodAffinityTerm::default()
        },
    };
    Affinity {
        pod_anti_affinity: Some(PodAntiAffinity {
            // Only preferred: a cluster with few nodes must still run all pods.
            preferred_during_scheduling_ignored_during_execution: Some(vec![term]),
            ..PodAntiAffinity::default()
        }),
        ..Affinity::default()
    }
}
