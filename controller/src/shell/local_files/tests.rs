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
        wake_origin: None,
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
        counts_all_ports: true,
        standby: None,
        awaits_stop: false,
    };
    ControllerEvent::PodReported { reporter: subscriber, stream: 1, observation }
}

#[tokio::test]
async fn objects_are_written_and_removed_with_their_manifest() {
    let temp = StateFolderFixture::new();
    let (shared, _node_spec) = new_runtime("b", 1);
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
async fn no_node_spec_is_sent_before_everything_is_restored() {
    let temp = StateFolderFixture::new();
    fs::write(temp.manifest(), HELLO).expect("written");
    let (first, _node_spec) = open_and_write(&temp, "b", 1).await;
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
    let (third, _node_spec) = open_and_write(&temp, "c", 3).await;
    assert!(third.with_machine(|machine| machine.cluster().apps.is_empty()));
    assert!(
        !temp.has("services/default/hello.yaml") && !temp.has("revisions/default/hello-00001.yaml")
    );
}

#[test]
fn an_empty_object_file_makes_no_service_without_a_name() {
    let temp = StateFolderFixture::new();
    let folder = temp.0.join("objects/services/default");
    fs::create_dir_all(&folder).expect("a folder");
    fs::write(folder.join("hello.yaml"), "").expect("written");
    let stored = read_objects(&temp.0.join("objects")).expect("readable folders");
    assert!(stored.apps.is_empty() && stored.keys.is_empty(), "{stored:?}");
}

#[tokio::test]
async fn a_file_without_a_name_is_refused_under_its_own() {
    let temp = StateFolderFixture::new();
    fs::write(temp.0.join("manifests/broken.yaml"), "a: [").expect("written");
    let (shared, _node_spec) = open_and_write(&temp, "b", 1).await;
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
    let (shared, _node_spec) = new_runtime("b", 1);
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
    let (shared, _node_spec) = new_runtime("b", 1);
    for at in 0..40 {
        let text = HELLO.replace("hello,", &format!("s-{at},"));
        fs::write(temp.0.join(format!("manifests/default_s-{at}.yaml")), text).expect("written");
    }
    drop(LocalFiles::open(&temp.0, Arc::clone(&shared)).expect("folders"));
    write_all_objects(&temp.0, &shared).await;
    let each = "service, configuration, route, revision and the two that tell how it scales";
    assert_eq!(shared.metrics.objects_written(), 6 * 40, "{each}");
}

/// A manifest file that holds the services a, b and c.
struct ThreeServicesFixture {
    temp: StateFolderFixture,
    path: PathBuf,
}

impl ThreeServicesFixture {
    fn new() -> Self {
        let temp = StateFolderFixture::new();
        let path = temp.0.join("manifests/three.yaml");
        fs::write(&path, Self::text()).expect("written");
        Self { temp, path }
    }

    fn text() -> String {
        ["a", "b", "c"].map(|name| HELLO.replace("hello,", &format!("{name},"))).join("---")
    }

    fn open(&self, seed: u128) -> (Arc<ControllerRuntime>, LocalFiles) {
        let (shared, _node_spec) = new_runtime("b", seed);
        let files = LocalFiles::open(&self.temp.0, Arc::clone(&shared)).expect("folders");
        (shared, files)
    }
}

/// Services that are not deleted, each with the error of its manifest.
fn service_errors(shared: &ControllerRuntime) -> Vec<(String, Option<String>)> {
    shared.with_machine(|machine| {
        let apps = machine.cluster().apps.iter().filter(|(_, app)| !app.is_terminating());
        apps.map(|(name, app)| {
            let error = app.service.as_ref().and_then(|it| it.manifest_error.as_deref());
            (name.name.to_string(), error.map(str::to_owned))
        })
        .collect()
    })
}

fn service_names(shared: &ControllerRuntime) -> String {
    service_errors(shared).into_iter().map(|(name, _)| name).collect::<Vec<_>>().join(" ")
}

#[tokio::test]
async fn a_document_that_is_not_yaml_deletes_no_service_and_hides_no_other_document() {
    let fixture = ThreeServicesFixture::new();
    let (shared, mut files) = fixture.open(1);
    let good = ThreeServicesFixture::text();
    for bad in [b"a: [\n".as_slice(), b"a: \xff\n", b"metadata: {name: 5}\n"] {
        let (_, rest) = good.split_once("---").expect("three documents");
        let rest = format!("---{}", rest.replace("hello:v1", "hello:v2"));
        fs::write(&fixture.path, [bad, rest.as_bytes()].concat()).expect("written");
        files.read_manifest_file(&fixture.path);
        let errors = service_errors(&shared);
        let [a, b, c] = errors.as_slice() else { panic!("{errors:?}") };
        let location = format!("(document 1 of {})", fixture.path.display());
        assert!(a.1.as_ref().is_some_and(|it| it.ends_with(&location)), "{a:?}");
        assert_eq!((&b.1, &c.1), (&None, &None));
        let template = |machine: &ControllerStateMachine| {
            let app = &machine.cluster().apps[&NamespacedName::new("default", "c")];
            app.service.as_ref().map(|it| it.manifest.template.to_string())
        };
        let template = shared.with_machine(template);
        assert!(template.is_some_and(|it| it.contains("hello:v2")), "the others take effect");
        fs::write(&fixture.path, &good).expect("written");
        files.read_manifest_file(&fixture.path);
        assert!(service_errors(&shared).iter().all(|(_, error)| error.is_none()));
    }
}

#[tokio::test]
async fn a_file_that_cannot_be_read_deletes_no_service() {
    let fixture = ThreeServicesFixture::new();
    let (shared, mut files) = fixture.open(1);
    // A link to itself cannot be read by any user.
    fs::remove_file(&fixture.path).expect("removed");
    std::os::unix::fs::symlink(&fixture.path, &fixture.path).expect("a link");
    files.read_manifest_file(&fixture.path);
    let errors = service_errors(&shared);
    assert_eq!(errors.len(), 3, "{errors:?}");
    let path = fixture.path.display().to_string();
    let is_named = |error: &str| error.starts_with("cannot be read") && error.contains(&path);
    assert!(errors.iter().all(|(_, it)| it.as_deref().is_some_and(is_named)), "{errors:?}");

    let shutdown = CancellationToken::new();
    let watching = tokio::spawn(files.watch_manifests(shutdown.clone()));
    // The link ends where the watch does not see it.
    let target = fixture.temp.0.join("target");
    std::os::unix::fs::symlink(&target, fixture.temp.0.join("link")).expect("a link");
    fs::rename(fixture.temp.0.join("link"), &fixture.path).expect("replaced");
    fs::write(&target, ThreeServicesFixture::text()).expect("written");
    wait_until(|| service_errors(&shared).iter().filter(|(_, it)| it.is_none()).count() == 3).await;
    fs::remove_file(&fixture.path).expect("removed");
    wait_until(|| service_names(&shared).is_empty()).await;
    shutdown.cancel();
    watching.await.expect("no panic").expect("watched");
}

#[tokio::test]
async fn a_restart_keeps_services_whose_manifests_cannot_be_read() {
    let fixture = ThreeServicesFixture::new();
    let (shared, files) = fixture.open(1);
    drop(files);
    write_all_objects(&fixture.temp.0, &shared).await;
    fs::write(&fixture.path, "a: [\n").expect("written");
    let (shared, mut files) = fixture.open(2);
    assert!(service_names(&shared).contains("a b c"), "{}", service_names(&shared));
    let only_b = HELLO.replace("hello,", "b,");
    let documents = parse::manifest_documents(&only_b, &shared.settings().scale_policy);
    files.apply_documents(&fixture.path, FileStamp::SETTLED, documents);
    files.delete_unclaimed();
    assert_eq!(service_names(&shared), "b", "what the file no longer names is known now");
}

#[tokio::test]
async fn a_half_written_file_deletes_no_service() {
    let fixture = ThreeServicesFixture::new();
    let (shared, mut files) = fixture.open(1);
    files.apply_documents(&fixture.path, FileStamp::RACY, Vec::new());
    assert_eq!(service_names(&shared), "a b c", "its writer may not have finished");
    assert!(files.incomplete_reads.files_to_retry().eq([fixture.path.clone()]));
    files.apply_documents(&fixture.path, FileStamp::SETTLED, Vec::new());
    assert_eq!(service_names(&shared), "");
    assert!(files.incomplete_reads.is_empty());
}

#[tokio::test(start_paused = true)]
async fn an_object_that_cannot_be_written_is_written_later() {
    let temp = StateFolderFixture::new();
    let (shared, _node_spec) = new_runtime("b", 1);
    fs::write(temp.manifest(), HELLO).expect("written");
    drop(LocalFiles::open(&temp.0, Arc::clone(&shared)).expect("folders"));
    let obstacle = temp.0.join("objects/services");
    fs::write(&obstacle, "no folder").expect("written");
    let shutdown = CancellationToken::new();
    let writing = tokio::spawn(write_objects_until_shutdown(
        Arc::clone(&shared),
        temp.0.clone(),
        shutdown.clone(),
    ));
    wait_until(|| shared.metrics.objects_written() >= 5).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(shared.metrics.objects_written(), 5, "all but the Service");
    fs::remove_file(&obstacle).expect("removed");
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(shared.metrics.objects_written(), 6);
    assert_eq!(temp.object("services/default/hello.yaml")["kind"], "Service");
    shutdown.cancel();
    writing.await.expect("no panic");
}
