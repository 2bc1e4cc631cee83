//! Pure: template → Revision, Revision → its pods' spec and probe, and garbage collection of old Revisions.

use std::{collections::BTreeMap, num::NonZeroU16, sync::Arc, time::Duration};

use common::{
    local_node::LocalPodSpec,
    wire::{self, NamespacedName, ProbeHandler, ReadinessProbe},
};
use k8s_openapi::{
    api::core::v1::{ContainerPort, EnvVar, PodSpec, Probe as UserProbe},
    apimachinery::pkg::util::intstr::IntOrString,
};

use crate::{
    decide::retention::{self, GcCandidate},
    model::{
        cluster_state::{
            AppRevision, AppState, ClusterState, ObjectMetaSummary, ParsedTemplate, PlatformKind,
            PodStage, RevisionPod, RevisionRouting, RoutingState, Uid, UnixMillis,
        },
        config_maps::GcConfig,
        knative::{RevisionTemplate, key, user_container::resolve_probe_ports},
        object::names::child_name,
        scale_policy::AutoscalerClass,
    },
};

impl ParsedTemplate {
    /// Returns true if only the kubelet knows that a pod is ready. It runs `exec` and startup probes, and the readiness
    /// probes of other containers than the serving one, which Knative's sidecar runs, too (`multi-container-probing`).
    pub fn needs_kubelet_probes(&self) -> bool {
        let pod = &self.raw.spec.pod;
        let is_exec = |it: &UserProbe| it.exec.is_some();
        let mut inits = pod.init_containers.iter().flatten();
        let has_init_probes =
            inits.any(|it| it.startup_probe.is_some() || it.readiness_probe.is_some());
        has_init_probes
            || pod.containers.iter().enumerate().any(|(index, container)| {
                let readiness = container.readiness_probe.as_ref();
                container.startup_probe.is_some()
                    || readiness.is_some_and(|it| index != self.serving_index || is_exec(it))
            })
    }

    /// Returns the readiness probe that the agent runs.
    pub fn agent_probe(&self) -> ReadinessProbe {
        let container = self.raw.spec.pod.containers.get(self.serving_index);
        let probe = container.and_then(|it| it.readiness_probe.as_ref());
        let listen = UserProbe::default();
        convert_probe(probe.unwrap_or(&listen), self.port)
    }

    fn positive_seconds(value: Option<i64>) -> Option<Duration> {
        let seconds = value.and_then(|it| u64::try_from(it).ok()).filter(|it| *it > 0);
        seconds.map(Duration::from_secs)
    }

    /// Returns the Revision as a subject of the RouteTable.
    pub fn to_wire(&self, app: &NamespacedName, revision: &AppRevision) -> wire::RevisionEntry {
        let spec = &self.raw.spec;
        wire::RevisionEntry {
            name: NamespacedName::new(app.namespace.clone(), &*revision.name),
            service: app.name.clone(),
            configuration: app.name.clone(),
            container_concurrency: self.container_concurrency,
            timeout: self.timeout,
            response_start_timeout: Self::positive_seconds(spec.response_start_timeout_seconds),
            idle_timeout: Self::positive_seconds(spec.idle_timeout_seconds),
            protocol: self.protocol,
            // A Revision of another class has no policy, so Rouse's autoscaler does not scale it.
            policy: (self.class == AutoscalerClass::Kpa).then(|| Arc::clone(&self.policy)),
            reachable: revision.routing.state != RoutingState::Reserve && !revision.is_stuck(),
            initial_scale_reached: revision.scaling.initial_scale_reached,
            allowed_sources: None,
        }
    }

    /// Returns the spec of one pod for the local node, which runs it.
    pub fn local_pod_spec(
        &self,
        app: &NamespacedName,
        revision: &AppRevision,
        pod: &RevisionPod,
    ) -> LocalPodSpec {
        LocalPodSpec {
            uid: pod.uid.to_string(),
            name: pod.name.to_string(),
            revision: NamespacedName::new(app.namespace.clone(), &*revision.name),
            spec: self.pod_spec(app, revision),
            labels: self.pod_labels(app, revision),
            kubelet_probes: self.needs_kubelet_probes(),
        }
    }

    /// Returns the labels of the Revision's pods.
    pub fn pod_labels(
        &self,
        app: &NamespacedName,
        revision: &AppRevision,
    ) -> BTreeMap<String, String> {
        let mut labels = self.raw.metadata.labels.clone().unwrap_or_default();
        labels.entry("app".into()).or_insert_with(|| revision.name.to_string());
        for (name, value) in [
            (key::SERVICE, app.name.to_string()),
            (key::CONFIGURATION, app.name.to_string()),
            (key::CONFIGURATION_GENERATION, revision.meta.generation.to_string()),
            (key::REVISION, revision.name.to_string()),
            (key::REVISION_UID, revision.meta.uid.to_string()),
        ] {
            // Over those of the template: a user must not be able to give pods to another Revision.
            labels.insert(name.into(), value);
        }
        labels
    }

    /// Returns the spec of a pod, with Knative's additions (`pkg/reconciler/revision/resources/deploy.go`).
    fn pod_spec(&self, app: &NamespacedName, revision: &AppRevision) -> PodSpec {
        let mut pod = self.raw.spec.pod.clone();
        // A pod's last requests may take as long as any request may.
        pod.termination_grace_period_seconds = i64::try_from(self.timeout.as_secs()).ok();
        let env = |name: &str, value: &str| EnvVar {
            name: name.into(),
            value: Some(value.into()),
            ..EnvVar::default()
        };
        for (index, container) in pod.containers.iter_mut().enumerate() {
            let all = container.env.get_or_insert_default();
            if index == self.serving_index {
                all.push(env("PORT", &self.port.to_string()));
            }
            all.push(env("K_REVISION", &revision.name));
            all.push(env("K_CONFIGURATION", &app.name));
            all.push(env("K_SERVICE", &app.name));
            // As in Knative: the end of the log explains a crash to users who cannot read logs.
            let policy = container.termination_message_policy.take();
            container.termination_message_policy =
                policy.or_else(|| Some("FallbackToLogsOnError".into()));
            if index == self.serving_index {
                resolve_probe_ports(container, self.port.get().into());
                container.ports = Some(vec![ContainerPort {
                    name: Some("user-port".into()),
                    container_port: self.port.get().into(),
                    protocol: Some("TCP".into()),
                    ..ContainerPort::default()
                }]);
            }
        }
        pod
    }
}

/// Returns the number of a probe's port, also if written as text; `None` for a name, which means the serving port.
fn port_number(port: &IntOrString) -> Option<NonZeroU16> {
    match port {
        IntOrString::Int(port) => u16::try_from(*port).ok().and_then(NonZeroU16::new),
        // As the kubelet parses it (kubernetes `pkg/kubelet/prober`, `extractPort`).
        IntOrString::String(text) => text.parse().ok(),
    }
}

/// Returns the port number of a TCP probe, if it has one.
fn tcp_port(probe: &UserProbe) -> Option<NonZeroU16> {
    probe.tcp_socket.as_ref().and_then(|tcp| port_number(&tcp.port))
}

/// Converts a user's readiness probe into the one that agents run.
fn convert_probe(probe: &UserProbe, serving_port: NonZeroU16) -> ReadinessProbe {
    // Knative's aggressive probing: `periodSeconds` is 0, and the first failure counts.
    let is_aggressive = probe.period_seconds.unwrap_or(0) == 0;
    let number = |value: Option<i32>| value.and_then(|it| u32::try_from(it).ok()).unwrap_or(0);
    let (handler, port) = if let Some(http) = &probe.http_get {
        let headers = http.http_headers.iter().flatten();
        let handler = ProbeHandler::Http {
            path: http.path.clone().unwrap_or_else(|| "/".into()),
            headers: headers.map(|it| (it.name.clone(), it.value.clone())).collect(),
            host: http.host.clone().unwrap_or_default(),
            https: http.scheme.as_deref().is_some_and(|it| it.eq_ignore_ascii_case("HTTPS")),
        };
        (handler, port_number(&http.port))
    } else if let Some(grpc) = &probe.grpc {
        let handler = ProbeHandler::Grpc { service: grpc.service.clone().unwrap_or_default() };
        (handler, u16::try_from(grpc.port).ok().and_then(NonZeroU16::new))
    } else if let Some(port) = tcp_port(probe).filter(|it| *it != serving_port) {
        // The kernel's listen events are about the serving port; another container's port needs a real connect.
        (ProbeHandler::Tcp, Some(port))
    } else {
        // The kernel reports a listener at once: a TCP connect could only find it later. An exec probe is run by the
        // node; for the agent the listener counts.
        (ProbeHandler::Listen, None)
    };
    ReadinessProbe {
        handler,
        port,
        period: Duration::from_secs(number(probe.period_seconds).into()),
        timeout: Duration::from_secs(number(probe.timeout_seconds).into()),
        success_threshold: number(probe.success_threshold).max(1),
        failure_threshold: if is_aggressive { 1 } else { number(probe.failure_threshold).max(1) },
    }
}

/// Creates the Revision of the newest template if it is missing.
pub(crate) fn ensure_latest_revision(
    app: &mut AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
    now: UnixMillis,
) {
    let Some(configuration) = &app.configuration else { return };
    let generation = configuration.meta.generation;
    let is_ending =
        configuration.is_terminating || cluster.terminating_namespaces.contains(&name.namespace);
    // A Configuration that is being deleted gets no Revision, which would only be deleted again.
    if app.is_terminating() || is_ending || generation == 0 || app.latest_created().is_some() {
        return;
    }
    let generated_name = || child_name(&name.name, &format!("-{generation:05}")).into_boxed_str();
    let revision = configuration.revision_name.clone().unwrap_or_else(generated_name);
    let configuration_uid = configuration.meta.uid.to_string();
    let uid = match cluster.settings.platform {
        PlatformKind::Local => {
            Uid::derive(cluster.uid_seed, &[&configuration_uid, &revision, &generation.to_string()])
        }
        PlatformKind::Kubernetes => Uid::default(),
    };
    let template = Arc::clone(&configuration.template);
    let creator = configuration.last_modifier.clone();
    let mut revision = AppRevision {
        meta: ObjectMetaSummary { uid, generation, created: now },
        template,
        creator,
        routing: RevisionRouting { state: RoutingState::Pending, changed_at: now },
        name: revision,
        ..AppRevision::default()
    };
    // A deleted Revision of this name may still have pods that answer their last requests: the new one takes them over.
    if let Some(at) = app.revisions.iter().position(|it| it.is_deleted && it.name == revision.name)
    {
        let old = app.revisions.remove(at);
        (revision.pods, revision.scaling.decision) = (old.pods, old.scaling.decision);
    }
    // Most services have one Revision, and there are many services: `push` alone would allocate space for three more.
    app.revisions.reserve_exact(1);
    app.revisions.push(revision);
}

/// Result of one garbage collection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct GarbageCollection {
    /// True if a Revision was collected whose pods have to drain.
    pub(super) has_draining_pods: bool,
    /// Moment of the next check, if nothing happens before; `None`: time alone changes nothing.
    pub(super) next_check: Option<UnixMillis>,
}

/// Marks old Revisions that no Route names as deleted, by the rules of `config-gc`, and lets their pods drain.
pub(super) fn collect_garbage(
    app: &mut AppState,
    config: &GcConfig,
    now: UnixMillis,
) -> GarbageCollection {
    // `select_collectable` would select none: this is the case of nearly all apps, which then need no list.
    if usize::try_from(config.min_non_active).is_ok_and(|min| app.revisions.len() <= min) {
        return GarbageCollection::default();
    }
    let newest = app.latest_created().map(|it| &*it.name);
    let ready = app.latest_ready();
    let all: Vec<_> = app.revisions.iter().map(|it| gc_candidate(it, newest, ready)).collect();
    let selection = retention::select_collectable(&all, config, now);
    let next_check = selection.next_check;
    let delete: Vec<Box<str>> = selection.delete.into_iter().map(Into::into).collect();
    let mut has_draining_pods = false;
    for revision in app.revisions.iter_mut().filter(|it| delete.contains(&it.name)) {
        revision.is_deleted = true;
        has_draining_pods |= !revision.pods.is_empty();
        // Whatever scales the Revision: its pods get no new connection and finish their last requests.
        for pod in revision.pods.iter_mut().filter(|it| it.stage == PodStage::Serving) {
            pod.stage = match pod.may_have_requests {
                true => PodStage::Draining { since: now },
                false => PodStage::Stopping { since: now },
            };
        }
    }
    GarbageCollection { has_draining_pods, next_check }
}

/// Returns what decides about one Revision. `newest` is the Configuration's newest Revision, and `ready` its latest
/// ready one.
fn gc_candidate<'a>(
    revision: &'a AppRevision,
    newest: Option<&str>,
    ready: Option<&str>,
) -> GcCandidate<'a> {
    GcCandidate {
        name: &revision.name,
        created: revision.meta.created,
        routing: revision.routing.state,
        last_active: revision.routing.changed_at.max(revision.meta.created),
        // The next plan would make the newest one again, and so without end. Others than those in reserve stay anyway,
        // so their templates are not parsed.
        is_gc_exempt: revision.is_deleted
            || newest == Some(&*revision.name)
            || (revision.routing.state == RoutingState::Reserve && has_no_gc_annotation(revision)),
        is_latest_ready: ready == Some(&*revision.name),
    }
}

fn has_no_gc_annotation(revision: &AppRevision) -> bool {
    let template: RevisionTemplate = serde_json::from_str(&revision.template).unwrap_or_default();
    let annotations = template.metadata.annotations.unwrap_or_default();
    annotations.get(key::NO_GC).is_some_and(|value| value.eq_ignore_ascii_case("true"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const SERVING: NonZeroU16 = NonZeroU16::new(8080).expect("not zero");

    fn probe(value: Value) -> ReadinessProbe {
        convert_probe(&serde_json::from_value(value).expect("a probe"), SERVING)
    }

    #[test]
    fn a_tcp_probe_asks_the_port_that_it_names() {
        let probed_port = |port: Value| probe(json!({"tcpSocket": {"port": port}}));
        let other = probed_port(json!(8081));
        assert_eq!((other.handler, other.port), (ProbeHandler::Tcp, NonZeroU16::new(8081)));
        assert_eq!(probed_port(json!("8081")).port, NonZeroU16::new(8081));
        // The kernel reports listeners on the serving port at once.
        for serving in [json!(0), json!(8080), json!("8080"), json!("http1")] {
            let probed_port = probed_port(serving);
            assert_eq!((probed_port.handler, probed_port.port), (ProbeHandler::Listen, None));
        }
    }
}
