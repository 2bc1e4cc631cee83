//! Shell: reads of single pods from the API server, for the stop checks of the state machine.

use std::{sync::Arc, time::Duration};

use tokio::{sync::mpsc, task::JoinSet, time::timeout};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::{
    decide::machine::{ControllerEvent, PodRead, PodReadResult},
    model::object::ResourceKind,
    shell::{
        api::{client::object_api, watch_scope, watches::error_chain},
        runtime::ControllerRuntime,
    },
};

/// Maximum number of reads that wait. While a node is drained, each of its pods may have one.
pub(super) const WAITING_READS_MAX: usize = 1024;
/// Maximum number of reads under way.
const OPEN_READS_MAX: usize = 16;
/// Time limit of one read. The machine repeats a read sooner, and uses the answer to either.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

/// Reads the pods that arrive on `reads`, and steps the machine with each result, until `stop`. Reads under way are
/// dropped then.
pub(super) async fn read_pods(
    client: kube::Client,
    runtime: Arc<ControllerRuntime>,
    mut reads: mpsc::Receiver<PodRead>,
    stop: CancellationToken,
) {
    let mut open_reads = JoinSet::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            Some(_ended) = open_reads.join_next() => {}
            // Further reads wait in the channel, so that a crowd of stops does not flood the API server.
            read = reads.recv(), if open_reads.len() < OPEN_READS_MAX => {
                let Some(read) = read else { return };
                let (client, runtime) = (client.clone(), Arc::clone(&runtime));
                open_reads.spawn(async move {
                    let result = read_pod(&client, &read).await;
                    runtime.step(ControllerEvent::PodReadEnded { read, result });
                });
            }
        }
    }
}

/// Reads one pod. As the request names no version, the API server reads its storage, and no cache.
async fn read_pod(client: &kube::Client, read: &PodRead) -> PodReadResult {
    let api = object_api(client, ResourceKind::Pod, &read.name);
    let object = match timeout(READ_TIMEOUT, api.get_opt(&read.name.name)).await {
        Ok(Ok(Some(object))) => object,
        Ok(Ok(None)) => return PodReadResult::NotFound,
        Ok(Err(error)) => return read_failure(read, &error_chain(&error)),
        Err(_elapsed) => return read_failure(read, "no answer in time"),
    };
    match serde_json::to_value(object) {
        Ok(mut object) => {
            // Trimmed as the watch trims it, since the machine takes one for the other.
            watch_scope::prune_fields(ResourceKind::Pod, &mut object);
            PodReadResult::Found(Box::new(object))
        }
        Err(error) => read_failure(read, &error.to_string()),
    }
}

fn read_failure(read: &PodRead, error: &str) -> PodReadResult {
    warn!(pod = %read.name, uid = read.uid, error, "pod not read for its stop check");
    PodReadResult::Failed
}

#[cfg(test)]
mod tests {
    use common::{
        local_node::LocalNodeSpec,
        outbox::Outbox,
        wire::{
            ClientComponent, ComponentReplica, NamespacedName, PodEntry, PodObservation,
            RouteChange, RouteKey, RoutingPhase,
        },
    };
    use hyper::{Request, Response};
    use kube::{Client, client::Body};
    use serde_json::{Value, json};
    use tokio::{sync::watch, time::sleep};

    use super::*;
    use crate::{
        decide::machine::ControllerStateMachine,
        model::cluster_state::{ClusterState, ControllerSettings, PlatformKind},
    };

    const POD: &str = "hello-00001-deployment-a";
    const POD_UID: &str = "00000000-0000-4000-8000-000000000003";

    /// Returns a client of an API server that gives this answer to each request; `None`: it gives none.
    fn client_of(answer: Option<(u16, Value)>) -> Client {
        let service = tower::service_fn(move |_request: Request<Body>| {
            let answer = answer.clone();
            async move {
                let Some((status, body)) = answer else { return std::future::pending().await };
                Response::builder().status(status).body(Body::from(body.to_string().into_bytes()))
            }
        });
        Client::new(service, "default")
    }

    fn error_status(code: u16, reason: &str) -> Option<(u16, Value)> {
        let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": "no", "reason": reason, "code": code});
        Some((code, status))
    }

    fn labels() -> Value {
        json!({
            "serving.knative.dev/configuration": "hello",
            "serving.knative.dev/configurationGeneration": "1",
            "serving.knative.dev/revision": "hello-00001",
        })
    }

    fn pod() -> Value {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": POD, "namespace": "default", "uid": POD_UID, "labels": labels()},
            "spec": {"nodeName": "n1"},
            "status": {"phase": "Running", "podIP": "10.1.1.1"},
        })
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_tells_a_pod_that_is_there_from_one_that_is_not_and_from_none() {
        let name = NamespacedName::new("default", POD);
        let read = PodRead { name, uid: POD_UID.into(), check: 1 };
        let found = read_pod(&client_of(Some((200, pod()))), &read).await;
        let PodReadResult::Found(object) = found else { panic!("{found:?}") };
        assert_eq!((&object["metadata"], &object["spec"]), (&pod()["metadata"], &pod()["spec"]));
        let not_found = read_pod(&client_of(error_status(404, "NotFound")), &read).await;
        assert_eq!(not_found, PodReadResult::NotFound);
        for answer in [error_status(500, "InternalError"), error_status(403, "Forbidden"), None] {
            assert_eq!(read_pod(&client_of(answer), &read).await, PodReadResult::Failed);
        }
    }

    /// Starts a replica that knows a Revision with one pod, as one whose watches have become silent since.
    fn replica_with_a_pod() -> Arc<ControllerRuntime> {
        let platform = PlatformKind::Kubernetes;
        let settings = ControllerSettings { platform, ..ControllerSettings::default() };
        let settings = Arc::new(settings);
        let cluster = ClusterState { settings, is_leader: false, ..ClusterState::default() };
        let machine = ControllerStateMachine::new(cluster, Outbox::new());
        let node_spec = watch::channel(LocalNodeSpec::default()).0;
        let runtime = Arc::new(ControllerRuntime::new(machine, node_spec));
        let observe = |resource, name: &str, object: Value| {
            let name = NamespacedName::new("default", name);
            let object = Some(Box::new(object));
            runtime.step(ControllerEvent::ObjectObserved { resource, name, object });
        };
        let spec = json!({"containers": [{"name": "main", "image": "a"}]});
        let metadata = |name: &str, number: u32| {
            let uid = format!("00000000-0000-4000-8000-{number:012}");
            json!({"name": name, "namespace": "default", "uid": uid, "generation": 1})
        };
        let template = json!({"template": {"spec": spec}});
        let configuration = json!({"metadata": metadata("hello", 1), "spec": template});
        observe(ResourceKind::Configuration, "hello", configuration);
        let mut revision = json!({"metadata": metadata("hello-00001", 2), "spec": spec});
        revision["metadata"]["labels"] = labels();
        observe(ResourceKind::Revision, "hello-00001", revision);
        observe(ResourceKind::Pod, POD, pod());
        runtime
    }

    fn entry(runtime: &ControllerRuntime) -> Option<PodEntry> {
        let key = RouteKey::Pod(POD_UID.into());
        match runtime.with_machine(|machine| machine.route_message(&key)) {
            Some(RouteChange::Pod(pod)) => Some(*pod),
            _ => None,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_replica_whose_watch_is_silent_asks_before_a_container_may_restart() {
        let mut deleted = pod();
        deleted["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        let (starting, draining) = (RoutingPhase::Starting, RoutingPhase::Draining);
        for (answer, expected) in [
            (Some((200, pod())), Some((starting, true))),
            (Some((200, deleted)), Some((draining, false))),
            (error_status(404, "NotFound"), None),
        ] {
            let runtime = replica_with_a_pod();
            let (sender, reads) = mpsc::channel(WAITING_READS_MAX);
            runtime.set_pod_reader(sender);
            let stop = CancellationToken::new();
            let reader = read_pods(client_of(answer), Arc::clone(&runtime), reads, stop.clone());
            let reader = tokio::spawn(reader);
            let state = || entry(&runtime).map(|pod| (pod.phase, pod.container_restarts));
            assert_eq!(state(), Some((starting, false)));
            let reporter = ComponentReplica {
                role: ClientComponent::Agent,
                name: "n1".into(),
                node: "n1".into(),
            };
            let observation = PodObservation {
                uid: POD_UID.into(),
                address: None,
                other_family_address: None,
                listening: true,
                ready: false,
                drained: false,
                in_flight: 1,
                listening_since_ns: 1,
                not_ready_reason: String::new(),
                counts_all_ports: true,
                standby: None,
                awaits_stop: true,
            };
            runtime.step(ControllerEvent::PodReported { reporter, stream: 1, observation });
            let answered = async {
                while state() != expected {
                    sleep(Duration::from_millis(10)).await;
                }
            };
            timeout(Duration::from_secs(60), answered).await.expect("its answer has effect");
            stop.cancel();
            reader.await.expect("no panic");
        }
    }
}
