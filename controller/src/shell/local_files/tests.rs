use std::sync::atomic::{AtomicU32, Ordering};

use common::{
    local_node::LocalNodeSpec,
    outbox::Outbox,
    wire::{
        ClientComponent, ComponentReplica, ConnectionPath, PodObservation, RevisionActivity,
        ScaleDecision,
    },
};
use serde_json::Value;
use tokio::sync::watch;

use super::*;
use crate::{
    decide::machine::ControllerStateMachine,
    model::cluster_state::{AppState, ClusterState, ControllerSettings},
};

const HELLO: &str = r#"
apiVersion: serving.knative.dev/v1
kind: Service
metadata: {name: hello, labels: {team: a}}
spec:
  traffic: [{percent: 100, tag: now}]
  template:
    metadata: {annotations: {autoscaling.knative.dev/initial-scale: "0"}}
    spec: {containers: [{image: "hello:v1"}]}
"#;

struct StateFolderFixture(PathBuf);

impl StateFolderFixture {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("rouse-controller-{}-{next}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(path.join("manifests/default")).expect("a folder");
        Self(path)
    }

    fn manifest(&self) -> PathBuf {
        self.0.join("manifests/default/hello.yaml")
    }

    fn object(&self, path: &str) -> Value {
        let text = fs::read_to_string(self.0.join("objects").join(path)).unwrap_or_default();
        serde_norway::from_str(&text).expect("YAML")
    }

    fn has(&self, path: &str) -> bool {
        self.0.join("objects").join(path).exists()
    }
}

impl Drop for StateFolderFixture {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn new_runtime(
    boot_id: &str,
    seed: u128,
) -> (Arc<ControllerRuntime>, watch::Receiver<LocalNodeSpec>) {
    let settings = ControllerSettings { boot_id: boot_id.into(), ..ControllerSettings::default() };
    let cluster =
        ClusterState { settings: Arc::new(settings), uid_seed: seed, ..ClusterState::default() };
    let (node_spec, node_spec_rx) = watch::channel(LocalNodeSpec::default());
    (
        Arc::new(ControllerRuntime::new(
            ControllerStateMachine::new(cluster, Outbox::new()),
            node_spec,
        )),
        node_spec_rx,
    )
}

async fn wait_until(mut holds: impl FnMut() -> bool) {
    let wait = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), wait).await.expect("in time");
}

fn decide_one_pod(shared: &ControllerRuntime) {
    shared.step(ControllerEvent::DecisionReceived(ScaleDecision {
        revision: NamespacedName::new("default", "hello-00001"),
        requested_scale: Some(1),
        connection_path: ConnectionPath::Direct,
        activator_count: 0,
        activity: RevisionActivity::Active,
        stable_load: 0.0,
        panic_load: 0.0,
        target_load: 1.0,
        ready_pods: 0,
        is_panicking: false,
        excess_burst_capacity: 0.0,
        reason: String::new(),
        inputs: None,
    }));
}

fn ready_pod_report(uid: &str) -> ControllerEvent {
    let subscriber =
        ComponentReplica { role: ClientComponent::Agent, name: "n".into(), node: "n".into() };
    let observation = PodObservation {
        uid: uid.into(),
        address: Some(([10, 244, 0, 9], 8080).into()),
        other_family_address: None,
        listening: true,
        ready: true,
        drained: false,
        in_flight: 0,
        listening_since_ns: 1,
        not_ready_reason: String::new(),
    };
    ControllerEvent::PodReported { reporter: subscriber, stream: 1, observation }
}

#[tokio::test]
async fn objects_are_written_and_removed_with_their_manifest() {
    let temp = StateFolderFixture::new();
    let (shared, _orders) = new_runtime("b", 1);
    let shutdown = CancellationToken::new();
    let files = LocalFiles::open(&temp.0, Arc::clone(&shared)).expect("folders");
    let watching = tokio::spawn(files.watch_manifests(shutdown.clone()));
    let writing = tokio::spawn(write_objects_until_shutdown(
        Arc::clone(&shared),
        temp.0.clone(),
        shutdown.clone(),
    ));

    fs::write(temp.manifest(), HELLO).expect("written");
    wait_until(|| {
        temp.has("services/default/hello.yaml") && temp.has("revisions/default/hello-00001.yaml")
    })
    .await;
    let service = temp.object("services/default/hello.yaml");
    assert_eq!(service["status"]["url"], "http://hello.default.localhost");
    assert_eq!(service["status"]["address"]["url"], "http://hello.default.svc.cluster.local");
    assert_eq!(service["status"]["traffic"][0]["url"], "http://now-hello.default.localhost");
    let conditions = service["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let types: Vec<_> =
        conditions.iter().map(|it| (it["type"].clone(), it["status"].clone())).collect();
    let expected =
        ["ConfigurationsReady", "Ready", "RoutesReady"].map(|it| (it.into(), "True".into()));
    assert_eq!(types, expected);
    let scaling = ["podautoscalers", "serverlessservices"];
    let scaling = scaling.map(|it| format!("{it}/default/hello-00001.yaml"));
    wait_until(|| scaling.iter().all(|path| temp.has(path))).await;
    let [autoscaler, serverless] = scaling.each_ref().map(|path| temp.object(path));
    assert_eq!(autoscaler["kind"], "PodAutoscaler");
    assert_eq!(autoscaler["status"]["actualScale"], 0);
    assert_eq!(autoscaler["status"]["serviceName"], "hello-00001");
    assert_eq!(serverless["spec"]["mode"], "Proxy", "it sleeps");
    assert!(serverless["metadata"]["creationTimestamp"].is_string(), "{serverless}");

    fs::write(temp.manifest(), HELLO.replace("containers", "containerz")).expect("written");
    let message = |temp: &StateFolderFixture| {
        temp.object("services/default/hello.yaml")["status"]["conditions"][1]["message"].clone()
    };
    wait_until(|| {
        message(&temp)
            .as_str()
            .is_some_and(|it| it.contains("unknown field: spec.template.spec.containerz"))
    })
    .await;

    fs::remove_file(temp.manifest()).expect("removed");
    wait_until(|| {
        let kinds =
            ["services", "configurations", "routes"].map(|it| format!("{it}/default/hello.yaml"));
        let of_revision = ["revisions/default/hello-00001.yaml".to_owned()];
        let all = kinds.iter().chain(&scaling).chain(&of_revision);
        all.into_iter().all(|path| !temp.has(path))
    })
    .await;
    shutdown.cancel();
    watching.await.expect("no panic").expect("watched");
    writing.await.expect("no panic");
}

/// Opens the folders as a new run does, and returns the state after everything was written.
async fn open_and_write(
    temp: &StateFolderFixture,
    boot_id: &str,
    seed: u128,
) -> (Arc<ControllerRuntime>, watch::Receiver<LocalNodeSpec>) {
    let (shared, node_spec) = new_runtime(boot_id, seed);
    drop(LocalFiles::open(&temp.0, Arc::clone(&shared)).expect("folders"));
    write_all_objects(&temp.0, &shared).await;
    (shared, node_spec)
}

async fn write_all_objects(temp: &Path, shared: &Arc<ControllerRuntime>) {
    let ended = CancellationToken::new();
    ended.cancel();
    write_objects_until_shutdown(Arc::clone(shared), temp.to_owned(), ended).await;
}

#[tokio::test]
async fn a_restart_goes_on_with_the_same_objects_and_pods() {
    let temp = StateFolderFixture::new();
    fs::write(temp.manifest(), HELLO).expect("written");
    let (first, node_spec) = open_and_write(&temp, "b", 1).await;
    decide_one_pod(&first);
    let uid = node_spec.borrow().pods.keys().next().cloned().expect("a pod");
    first.step(ready_pod_report(&uid));
    write_all_objects(&temp.0, &first).await;
    let name = NamespacedName::new("default", "hello");
    let old_app = first.with_machine(|machine| machine.cluster().apps[&name].clone());

    let (second, node_spec) = open_and_write(&temp, "b", 2).await;
    let after = second.with_machine(|machine| machine.cluster().apps[&name].clone());
    let identity =
        |app: &AppState| app.service.as_ref().map(|it| (it.meta.uid, it.manifest.clone()));
    assert_eq!(identity(&after), identity(&old_app));
    assert_eq!(after.allocations(), old_app.allocations());
    assert_eq!(after.revisions[0].meta.uid, old_app.revisions[0].meta.uid);
    assert_eq!(after.revisions[0].template, old_app.revisions[0].template);
    assert_eq!(after.revisions.len(), 1);
    assert_eq!(node_spec.borrow().pods.keys().collect::<Vec<_>>(), [&uid]);
    let pod = second
        .with_machine(|machine| machine.route_message(&common::wire::RouteKey::Pod(uid.clone())));
    let Some(common::wire::RouteChange::Pod(pod)) = pod else { panic!("no pod") };
    assert_eq!(pod.phase, common::wire::RoutingPhase::Ready, "until its agent reports");
}

#[tokio::test]
async fn no_order_is_sent_before_everything_is_restored() {
    let temp = StateFolderFixture::new();
    fs::write(temp.manifest(), HELLO).expect("written");
    let (first, _orders) = open_and_write(&temp, "b", 1).await;
    decide_one_pod(&first);
    let name = NamespacedName::new("default", "hello");
    let app = first.with_machine(|machine| machine.cluster().apps[&name].clone());

    let (second, node_spec) = new_runtime("b", 2);
    second.step(ControllerEvent::AppRestored { name, app });
    assert!(!node_spec.has_changed().expect("a sender"), "pods not read back yet would be stopped");
    second.release_node_spec();
    assert!(node_spec.has_changed().expect("a sender"));
    assert_eq!(node_spec.borrow().pods.len(), 1);
}

#[tokio::test]
async fn pods_of_another_boot_and_objects_without_manifest_are_forgotten() {
    let temp = StateFolderFixture::new();
    fs::write(temp.manifest(), HELLO).expect("written");
    let (first, node_spec) = open_and_write(&temp, "b", 1).await;
    decide_one_pod(&first);
    assert_eq!(node_spec.borrow().pods.len(), 1);
    write_all_objects(&temp.0, &first).await;

    let (_second, node_spec) = open_and_write(&temp, "c", 2).await;
    assert_eq!(node_spec.borrow().pods.len(), 0);
    let pods = fs::read_dir(temp.0.join("objects/pods/default")).map_or(0, Iterator::count);
    assert_eq!(pods, 0);

    fs::remove_file(temp.manifest()).expect("removed");
    let (third, _orders) = open_and_write(&temp, "c", 3).await;
    assert!(third.with_machine(|machine| machine.cluster().apps.is_empty()));
    assert!(
        !temp.has("services/default/hello.yaml") && !temp.has("revisions/default/hello-00001.yaml")
    );
}

#[tokio::test]
async fn a_file_without_a_name_is_refused_under_its_own() {
    let temp = StateFolderFixture::new();
    fs::write(temp.0.join("manifests/broken.yaml"), "a: [").expect("written");
    let (shared, _orders) = open_and_write(&temp, "b", 1).await;
    let name = NamespacedName::new("default", "broken");
    let refused = shared.with_machine(|machine| {
        machine.cluster().apps[&name].service.clone().and_then(|it| it.manifest_error)
    });
    assert!(refused.is_some_and(|reason| reason.starts_with("not readable as YAML")));
    assert!(temp.has("services/default/broken.yaml"));
}

#[tokio::test]
async fn a_rescan_reads_only_files_that_changed() {
    let temp = StateFolderFixture::new();
    let file = |at: usize| temp.0.join(format!("manifests/default_s-{at}.yaml"));
    for at in 0..20 {
        fs::write(file(at), HELLO.replace("hello,", &format!("s-{at},"))).expect("written");
    }
    tokio::time::sleep(manifest_index::RACY_WINDOW * 2).await;
    let (shared, _orders) = new_runtime("b", 1);
    let mut files = LocalFiles::open(&temp.0, Arc::clone(&shared)).expect("folders");
    assert_eq!((files.files_read, files.changed_files()), (20, BTreeSet::new()));
    fs::remove_file(file(3)).expect("removed");
    fs::write(file(7), HELLO.replace("hello,", "s-7,").replace("v1", "v2")).expect("written");
    fs::write(file(99), HELLO.replace("hello,", "s-99,")).expect("written");
    let changed = files.changed_files();
    assert_eq!(changed, [file(3), file(7), file(99)].into());
    changed.iter().for_each(|path| files.read_manifest_file(path));
    let apps = |machine: &ControllerStateMachine| machine.cluster().apps.len();
    assert_eq!((files.files_read, shared.with_machine(apps)), (23, 20));
}

#[tokio::test]
async fn each_object_of_an_applied_service_is_written_once() {
    let temp = StateFolderFixture::new();
    let (shared, _orders) = new_runtime("b", 1);
    for at in 0..40 {
        let text = HELLO.replace("hello,", &format!("s-{at},"));
        fs::write(temp.0.join(format!("manifests/default_s-{at}.yaml")), text).expect("written");
    }
    drop(LocalFiles::open(&temp.0, Arc::clone(&shared)).expect("folders"));
    write_all_objects(&temp.0, &shared).await;
    let each = "service, configuration, route, revision and the two that tell how it scales";
    assert_eq!(shared.metrics.objects_written(), 6 * 40, "{each}");
}
