//! The files of `controller/src/shell/api/` against a real API server.
//!
//! Run by the cluster tier, which starts etcd and an API server of their own and names its kubeconfig in
//! `ROUSE_TEST_APISERVER`. Without one these tests fail.

use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use common::wire::NamespacedName;
use controller::{
    decide::machine::PullAccount,
    model::{
        cluster_state::DeploymentSettings,
        object::{
            DesiredState, FIELD_MANAGER, ObjectPart, ObjectPartKey, PodRequests, ResourceKind,
            SCALE_FIELD_MANAGER, WorkloadVersion, WriteError,
        },
    },
    shell::{
        api::{
            DesiredStateSource,
            client::{connect, object_api},
            leader_election::{LeaderElector, Leadership},
            lease_state::LeaseTiming,
            metrics::ApiServerMetrics,
            pull_secrets::ClusterPullSecrets,
            watch_scope::{watch_scopes, workload_scopes},
            watches::{WatchUpdate, start_watches},
            write_queue::WriteLimits,
            writer::ObjectWriter,
        },
        image_digests::resolver::PullSecretSource as _,
    },
    write::{
        children::{
            ChildObject, RevisionView, deployment,
            services::{self, PlaceholderSpec},
        },
        desired::RequiredChildren,
    },
};
use kube::{
    Client,
    api::{DeleteParams, DynamicObject, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

mod named_secrets;

fn kubeconfig() -> PathBuf {
    std::env::var_os("ROUSE_TEST_APISERVER")
        .expect("ROUSE_TEST_APISERVER names no kubeconfig: run `cargo xtask test --tier cluster`")
        .into()
}

async fn client() -> Client {
    connect(Some(&kubeconfig())).await.unwrap()
}

/// Source with the desired states that a test sets, and a record of its calls.
#[derive(Default)]
struct RecordingSource {
    desired_states: Mutex<HashMap<ObjectPartKey, DesiredState>>,
    write_errors: Mutex<Vec<(ObjectPartKey, WriteError)>>,
    created: Mutex<Vec<ObjectPartKey>>,
}

impl DesiredStateSource for RecordingSource {
    fn leadership_changed(&self, _is_leader: bool) {}

    fn desired_state(&self, key: &ObjectPartKey) -> DesiredState {
        self.desired_states.lock().unwrap().get(key).cloned().unwrap_or(DesiredState::Unmanaged)
    }

    fn object_created(&self, key: &ObjectPartKey, _body: &Value) {
        self.created.lock().unwrap().push(key.clone());
    }

    fn write_result(&self, key: &ObjectPartKey, error: Option<WriteError>) {
        if let Some(error) = error {
            self.write_errors.lock().unwrap().push((key.clone(), error));
        }
    }

    fn required_children(&self, _app: &NamespacedName) -> Vec<RequiredChildren> {
        Vec::new()
    }

    fn children_missing(
        &self,
        _app: &NamespacedName,
        _required_children: &RequiredChildren,
        _missing: &[ObjectPartKey],
    ) {
    }

    fn written_repeatedly(&self, _key: &ObjectPartKey, _body: &Value, _writes: u32) {}
}

/// A namespace of its own, a writer with its watches, and the Revision that owns the written objects.
struct ApiServerFixture {
    client: Client,
    namespace: String,
    source: Arc<RecordingSource>,
    writer: Arc<ObjectWriter>,
    revision_uid: String,
    stop: CancellationToken,
}

impl Drop for ApiServerFixture {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Passes an update of a watch to the writer.
fn apply_watch_update(writer: &ObjectWriter, update: WatchUpdate) {
    match update {
        WatchUpdate::ListBegun(scope) => writer.begin_list(&scope),
        WatchUpdate::ListCompleted(scope) => {
            let missing = writer.end_list(&scope);
            missing.iter().for_each(|name| writer.handle_deleted(scope.resource, name));
        }
        WatchUpdate::Object { resource, name, observed, .. } => {
            writer.handle_observed(resource, &name, observed)
        }
        WatchUpdate::Deleted { resource, name, .. } => writer.handle_deleted(resource, &name),
    }
}

impl ApiServerFixture {
    async fn new(namespace: &str) -> Self {
        let client = client().await;
        apply_crds(&client).await;
        let namespace = format!("{namespace}-{}", std::process::id());
        let body =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}});
        apply_raw(&client, "Namespace", "namespaces", &body).await;
        let stop = CancellationToken::new();
        let metrics = Arc::new(ApiServerMetrics::default());
        let recording = Arc::new(RecordingSource::default());
        let writer = Arc::new(ObjectWriter::new(
            client.clone(),
            WriteLimits::default(),
            Arc::clone(&metrics),
        ));
        let system = "knative-serving";
        let scopes = [watch_scopes(system), workload_scopes(system)].concat();
        let mut updates = start_watches(&client, scopes, &metrics, &stop);
        let observing_writer = Arc::clone(&writer);
        tokio::spawn(async move {
            while let Some(update) = updates.recv().await {
                apply_watch_update(&observing_writer, update);
            }
        });
        let source: Arc<dyn DesiredStateSource> = recording.clone();
        tokio::spawn(Arc::clone(&writer).run(source, Leadership::permanent(), stop.clone()));
        let revision_uid = String::new();
        let mut fixture = Self { client, namespace, source: recording, writer, revision_uid, stop };
        let spec = json!({"spec": {"containers": [{"name": "user-container", "image": "any"}]}});
        let revision = fixture.create_object(ResourceKind::Revision, "hello-00001", spec).await;
        fixture.revision_uid = revision.metadata.uid.unwrap();
        fixture
    }

    fn name(&self, name: &str) -> NamespacedName {
        NamespacedName::new(self.namespace.as_str(), name)
    }

    fn key(&self, resource: ResourceKind, part: ObjectPart, name: &str) -> ObjectPartKey {
        ObjectPartKey::new(resource, part, self.name(name))
    }

    /// Creates an object as a user would.
    async fn create_object(
        &self,
        resource: ResourceKind,
        name: &str,
        mut body: Value,
    ) -> DynamicObject {
        body["apiVersion"] = json!(resource.api_version());
        body["kind"] = json!(resource.kind());
        body["metadata"] = json!({"name": name, "namespace": self.namespace});
        let object: DynamicObject = serde_json::from_value(body).unwrap();
        let api = object_api(&self.client, resource, &self.name(name));
        api.create(&PostParams::default(), &object).await.unwrap()
    }

    /// Changes an object as a user would.
    async fn patch_object(&self, resource: ResourceKind, name: &str, patch: &Value) {
        let api = object_api(&self.client, resource, &self.name(name));
        api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    }

    async fn get(&self, resource: ResourceKind, name: &str) -> Option<Value> {
        let object =
            object_api(&self.client, resource, &self.name(name)).get_opt(name).await.unwrap();
        object.map(|it| serde_json::to_value(it).unwrap())
    }

    fn set_desired(&self, key: &ObjectPartKey, desired: DesiredState) {
        self.source.desired_states.lock().unwrap().insert(key.clone(), desired);
        self.writer.add([key.clone()]);
    }

    /// Waits until the object satisfies `is_expected`.
    async fn wait_until(
        &self,
        resource: ResourceKind,
        name: &str,
        is_expected: impl Fn(Option<&Value>) -> bool,
    ) -> Option<Value> {
        for _ in 0..600 {
            let object = self.get(resource, name).await;
            if is_expected(object.as_ref()) {
                return object;
            }
            sleep(Duration::from_millis(50)).await;
        }
        panic!("{resource} {name} did not become as wanted: {:?}", self.get(resource, name).await);
    }

    fn deployment(&self, image: &str) -> ChildObject {
        let (labels, annotations) = (BTreeMap::new(), BTreeMap::new());
        let spec = json!({"containers": [{"name": "user-container", "image": image}]});
        let spec = serde_json::from_value(spec).unwrap();
        let revision = RevisionView {
            namespace: &self.namespace,
            name: "hello-00001",
            uid: &self.revision_uid,
            service: "hello",
            configuration: "hello",
            labels: &labels,
            annotations: &annotations,
            spec: &spec,
            digests: &[],
        };
        deployment::deployment(&revision, &DeploymentSettings::default(), 1)
    }

    fn placeholder(&self) -> ChildObject {
        services::placeholder_service(&PlaceholderSpec {
            namespace: &self.namespace,
            route: "hello",
            route_uid: &self.revision_uid,
            tag: None,
            service: "hello",
            route_labels: BTreeMap::new(),
            route_annotations: BTreeMap::new(),
            activator_port: Some(20_000),
            serves_tcp: false,
            serves_local_tls: false,
            affinity: None,
            gateway_port: None,
        })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn registries_are_queried_with_the_secrets_of_pod_and_account() {
    let fixture = ApiServerFixture::new("secrets").await;
    let make = |kind: &'static str, plural: &'static str, mut body: Value| {
        body["apiVersion"] = json!("v1");
        body["kind"] = json!(kind);
        let kind = kube::api::ApiResource {
            group: String::new(),
            version: "v1".into(),
            api_version: "v1".into(),
            kind: kind.into(),
            plural: plural.into(),
        };
        let api: kube::Api<DynamicObject> =
            kube::Api::namespaced_with(fixture.client.clone(), &fixture.namespace, &kind);
        let object: DynamicObject = serde_json::from_value(body).unwrap();
        async move { api.create(&PostParams::default(), &object).await.unwrap() }
    };
    for name in ["of-account", "of-pod"] {
        let data = json!({".dockerconfigjson": "{\"auths\": {}}"});
        let body = json!({
            "metadata": {"name": name}, "type": "kubernetes.io/dockerconfigjson", "stringData": data,
        });
        make("Secret", "secrets", body).await;
    }
    let named = json!([{"name": "of-account"}, {"name": "of-pod"}, {"name": "lost"}]);
    let body = json!({"metadata": {"name": "puller"}, "imagePullSecrets": named});
    make("ServiceAccount", "serviceaccounts", body).await;
    let account = PullAccount {
        namespace: fixture.namespace.clone(),
        service_account: "puller".into(),
        pull_secrets: vec!["of-pod".into()],
    };
    let secrets = ClusterPullSecrets::new(fixture.client.clone());
    let pull_secrets = secrets.pull_secrets(&account).await.unwrap();
    let names: Vec<&str> = pull_secrets.iter().map(|it| it.name.as_str()).collect();
    assert_eq!(names, ["of-pod", "of-account"], "the pod's come first");
    assert_eq!(pull_secrets[0].data[".dockerconfigjson"], b"{\"auths\": {}}");
    let nobody = PullAccount { service_account: "nobody".into(), ..account };
    assert_eq!(secrets.pull_secrets(&nobody).await.unwrap().len(), 1);
}

/// Applies a cluster-wide object of any kind.
async fn apply_raw(client: &Client, kind: &str, plural: &str, body: &Value) {
    let api_version = body["apiVersion"].as_str().unwrap();
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    let kind = kube::api::ApiResource {
        group: group.into(),
        version: version.into(),
        api_version: api_version.into(),
        kind: kind.into(),
        plural: plural.into(),
    };
    let api: kube::Api<DynamicObject> = kube::Api::all_with(client.clone(), &kind);
    let name = body["metadata"]["name"].as_str().unwrap();
    let params = PatchParams::apply("test").force();
    api.patch(name, &params, &Patch::Apply(body)).await.unwrap();
}

async fn apply_crds(client: &Client) {
    for crd in controller::write::crds::all_definitions() {
        apply_raw(client, "CustomResourceDefinition", "customresourcedefinitions", &crd).await;
    }
    let kinds = ResourceKind::ALL.into_iter().filter(|it| it.group().ends_with("knative.dev"));
    for resource in kinds {
        let api = object_api(client, resource, &NamespacedName::new("default", ""));
        while api.list(&kube::api::ListParams::default().limit(1)).await.is_err() {
            sleep(Duration::from_millis(100)).await;
        }
    }
}

#[tokio::test]
async fn a_deployment_is_applied_once_and_keeps_its_replicas() {
    let fixture = ApiServerFixture::new("deployment").await;
    let object_name = "hello-00001-deployment";
    let key = fixture.key(ResourceKind::Deployment, ObjectPart::Object, object_name);
    fixture.set_desired(&key, DesiredState::Body(fixture.deployment("dev.local/a").body));
    let created =
        fixture.wait_until(ResourceKind::Deployment, object_name, |it| it.is_some()).await.unwrap();
    assert_eq!(created["spec"]["replicas"], 1);
    assert_eq!(created["metadata"]["managedFields"][0]["manager"], FIELD_MANAGER);

    fixture.set_desired(
        &fixture.key(ResourceKind::Deployment, ObjectPart::Scale, object_name),
        DesiredState::Scale {
            min_replicas: 3,
            max_replicas: 3,
            pods_to_remove: vec![fixture.name("no-such-pod")],
        },
    );
    let scaled = fixture.wait_until(ResourceKind::Deployment, object_name, |it| {
        it.unwrap()["spec"]["replicas"] == 3
    });
    let scaled = scaled.await.unwrap();

    fixture.writer.add([key.clone()]);
    fixture.set_desired(&key, DesiredState::Body(fixture.deployment("dev.local/b").body));
    let image = "/spec/template/spec/containers/0/image";
    let changed = fixture.wait_until(ResourceKind::Deployment, object_name, |it| {
        it.unwrap().pointer(image) == Some(&json!("dev.local/b"))
    });
    let changed = changed.await.unwrap();
    assert_eq!(changed["spec"]["replicas"], 3, "an apply does not scale");
    assert_ne!(scaled["metadata"]["generation"], changed["metadata"]["generation"]);

    // No difference, so no write, however often the key is added.
    for _ in 0..5 {
        fixture.writer.add([key.clone()]);
    }
    // One more object through the same queue proves that the earlier keys were examined.
    let placeholder = fixture.key(ResourceKind::Service, ObjectPart::Object, "hello");
    fixture.set_desired(&placeholder, DesiredState::Body(fixture.placeholder().body));
    fixture.wait_until(ResourceKind::Service, "hello", |it| it.is_some()).await;
    assert_eq!(fixture.source.created.lock().unwrap().iter().filter(|it| **it == key).count(), 1);
    let unchanged = fixture.get(ResourceKind::Deployment, object_name).await.unwrap();
    assert_eq!(unchanged["metadata"]["resourceVersion"], changed["metadata"]["resourceVersion"]);
}

/// A scale from zero may be decided while the Deployment is being created, and is decided once.
#[tokio::test]
async fn a_scale_decided_before_the_deployment_exists_is_written_after_its_creation() {
    let fixture = ApiServerFixture::new("early-scale").await;
    let object_name = "hello-00001-deployment";
    let scale = fixture.key(ResourceKind::Deployment, ObjectPart::Scale, object_name);
    fixture.set_desired(
        &scale,
        DesiredState::Scale { min_replicas: 3, max_replicas: 3, pods_to_remove: Vec::new() },
    );
    while fixture.writer.queue_lengths() != (0, 0, 0) {
        sleep(Duration::from_millis(20)).await;
    }
    let key = fixture.key(ResourceKind::Deployment, ObjectPart::Object, object_name);
    fixture.set_desired(&key, DesiredState::Body(fixture.deployment("dev.local/a").body));
    let scaled = |it: Option<&Value>| it.is_some_and(|it| it["spec"]["replicas"] == 3);
    fixture.wait_until(ResourceKind::Deployment, object_name, scaled).await;
    // No other client decides the number of pods.
    let api = object_api(&fixture.client, ResourceKind::Deployment, &fixture.name(object_name));
    let other = json!({"spec": {"replicas": 7}});
    api.patch(object_name, &PatchParams::default(), &Patch::Merge(&other)).await.unwrap();
    fixture.wait_until(ResourceKind::Deployment, object_name, scaled).await;
}

#[tokio::test]
async fn a_service_of_another_owner_is_reported_and_left_alone_until_it_is_deleted() {
    let fixture = ApiServerFixture::new("foreign").await;
    let spec = json!({"spec": {"ports": [{"port": 5432}]}});
    fixture.create_object(ResourceKind::Service, "hello", spec).await;
    let key = fixture.key(ResourceKind::Service, ObjectPart::Object, "hello");
    fixture.set_desired(&key, DesiredState::Body(fixture.placeholder().body));
    let reported = async {
        loop {
            let write_error = fixture.source.write_errors.lock().unwrap().first().cloned();
            if let Some(write_error) = write_error {
                return write_error;
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    let (about, error) = timeout(Duration::from_secs(30), reported).await.unwrap();
    assert_eq!((about, error.reason), (key, "NotOwned"));
    let service = fixture.get(ResourceKind::Service, "hello").await.unwrap();
    assert_eq!(service.pointer("/spec/ports/0/port"), Some(&json!(5432)));

    let api = object_api(&fixture.client, ResourceKind::Service, &fixture.name("hello"));
    api.delete("hello", &DeleteParams::default()).await.unwrap();
    let service = fixture.wait_until(ResourceKind::Service, "hello", |it| {
        it.is_some_and(|it| it.pointer("/spec/ports/0/port") == Some(&json!(80)))
    });
    let service = service.await.unwrap();
    assert!(service.pointer("/spec/clusterIP").is_some_and(Value::is_string), "{service}");
}

#[tokio::test]
async fn deleted_objects_are_recreated_and_undesired_ones_deleted() {
    let fixture = ApiServerFixture::new("delete").await;
    let key = fixture.key(ResourceKind::Service, ObjectPart::Object, "hello");
    fixture.set_desired(&key, DesiredState::Body(fixture.placeholder().body));
    let api = object_api(&fixture.client, ResourceKind::Service, &fixture.name("hello"));
    let mut uid = Value::Null;
    // At once, so that the watch may report the deletion before the writer has the response to the creation.
    for _ in 0..20 {
        let other = |it: Option<&Value>| it.is_some_and(|it| it["metadata"]["uid"] != uid);
        let recreated = fixture.wait_until(ResourceKind::Service, "hello", other).await.unwrap();
        uid = recreated["metadata"]["uid"].clone();
        api.delete("hello", &DeleteParams::default()).await.unwrap();
    }
    fixture
        .wait_until(ResourceKind::Service, "hello", |it| {
            it.is_some_and(|it| it["metadata"]["uid"] != uid)
        })
        .await;
    fixture.set_desired(&key, DesiredState::Absent);
    fixture.wait_until(ResourceKind::Service, "hello", |it| it.is_none()).await;

    // An object that the controller never applied is not deleted.
    fixture
        .create_object(ResourceKind::Service, "other", json!({"spec": {"ports": [{"port": 1}]}}))
        .await;
    let other = fixture.key(ResourceKind::Service, ObjectPart::Object, "other");
    fixture.set_desired(&other, DesiredState::Absent);
    fixture.set_desired(&key, DesiredState::Body(fixture.placeholder().body));
    fixture.wait_until(ResourceKind::Service, "hello", |it| it.is_some()).await;
    assert!(fixture.get(ResourceKind::Service, "other").await.is_some());
}

#[tokio::test]
async fn changes_by_others_are_reverted_and_their_added_fields_stay() {
    let fixture = ApiServerFixture::new("touch").await;
    let service = fixture.key(ResourceKind::Service, ObjectPart::Object, "hello");
    fixture.set_desired(&service, DesiredState::Body(fixture.placeholder().body));
    let created =
        fixture.wait_until(ResourceKind::Service, "hello", |it| it.is_some()).await.unwrap();
    let ports = created["spec"]["ports"].clone();
    let name = "hello-00001-deployment";
    let deployment = fixture.key(ResourceKind::Deployment, ObjectPart::Object, name);
    fixture.set_desired(
        &deployment,
        DesiredState::Body(fixture.deployment("example.com/hello:1").body),
    );
    fixture.wait_until(ResourceKind::Deployment, name, |it| it.is_some()).await;
    let image = |it: &Value| it.pointer("/spec/template/spec/containers/0/image").cloned();

    // Several rounds, to find a writer that wrongly believes to have restored it already.
    for round in 1..4 {
        let other = json!([{"name": "http", "port": 1000 + round, "protocol": "TCP"}]);
        fixture
            .patch_object(ResourceKind::Service, "hello", &json!({"spec": {"ports": other}}))
            .await;
        let is_reverted = |it: Option<&Value>| it.is_some_and(|it| it["spec"]["ports"] == ports);
        fixture.wait_until(ResourceKind::Service, "hello", is_reverted).await;

        fixture
            .patch_object(ResourceKind::Deployment, name, &json!({"spec": {"replicas": round}}))
            .await;
        let containers = json!([{"name": "user-container", "image": "example.com/other"}]);
        let spec =
            json!({"minReadySeconds": round, "template": {"spec": {"containers": containers}}});
        fixture.patch_object(ResourceKind::Deployment, name, &json!({"spec": spec})).await;
        let is_reverted = |it: Option<&Value>| {
            it.is_some_and(|it| {
                image(it) == Some(json!("example.com/hello:1"))
                    && it["spec"]["replicas"] == round
                    && it["spec"]["minReadySeconds"] == round
                    && image_field_managers(it) == ["rouse"]
            })
        };
        fixture.wait_until(ResourceKind::Deployment, name, is_reverted).await;
    }

    // A field that is no longer desired is removed, as if no other client had ever changed it.
    let mut other = fixture.placeholder().body;
    other["spec"]["ports"][0]["port"] = json!(90);
    fixture.set_desired(&service, DesiredState::Body(other));
    let is_reverted = |it: Option<&Value>| {
        it.is_some_and(|it| {
            it["spec"]["ports"][0]["port"] == 90 && it["spec"]["ports"][1].is_null()
        })
    };
    fixture.wait_until(ResourceKind::Service, "hello", is_reverted).await;
}

/// Returns the field managers that own the image in an object.
fn image_field_managers(object: &Value) -> Vec<&str> {
    let all = object["metadata"]["managedFields"].as_array().into_iter().flatten();
    let container =
        "/fieldsV1/f:spec/f:template/f:spec/f:containers/k:{\"name\":\"user-container\"}/f:image";
    let owns = |it: &&Value| it.pointer(container).is_some();
    all.filter(owns).filter_map(|it| it["manager"].as_str()).collect()
}

/// Applies by two managers, as `kubectl apply --server-side` makes them: a list holds the entries of both.
#[tokio::test]
async fn two_managers_each_have_entries_of_one_list() {
    let fixture = ApiServerFixture::new("merge").await;
    let api = object_api(&fixture.client, ResourceKind::KnativeService, &fixture.name("ssa"));
    let container = json!({"image": "dev.local/hello:v1", "env": [{"name": "A", "value": "1"}]});
    let mounted = |volume: &str| json!({"name": volume, "secret": {"secretName": volume}});
    let user = json!({
        "imagePullSecrets": [{"name": "from-user"}], "volumes": [mounted("user")],
        "containers": [container], "nodeSelector": {"disk": "fast"},
    });
    let platform = json!({
        "imagePullSecrets": [{"name": "from-platform"}], "volumes": [mounted("platform")],
    });
    let mut last = json!(null);
    for (manager, spec) in [("user", &user), ("platform", &platform), ("user", &user)] {
        let body = json!({
            "apiVersion": "serving.knative.dev/v1", "kind": "Service",
            "metadata": {"name": "ssa", "namespace": fixture.namespace},
            "spec": {"template": {"spec": spec}},
        });
        let params = PatchParams::apply(manager);
        let patched = api.patch("ssa", &params, &Patch::Apply(&body)).await.unwrap();
        last = serde_json::to_value(patched).unwrap()["spec"]["template"]["spec"].clone();
    }
    let names = |list: &str| -> Vec<String> {
        let all = last[list].as_array().unwrap().iter();
        let mut names: Vec<String> = all.map(|it| it["name"].as_str().unwrap().into()).collect();
        names.sort();
        names
    };
    assert_eq!(names("imagePullSecrets"), ["from-platform", "from-user"]);
    assert_eq!(names("volumes"), ["platform", "user"]);
    assert_eq!(last["containers"][0]["env"][0]["value"], "1");
}

#[tokio::test]
async fn a_status_is_written_apart_from_the_rest() {
    let fixture = ApiServerFixture::new("status").await;
    let key = fixture.key(ResourceKind::Revision, ObjectPart::Status, "hello-00001");
    // The watch must have reported the Revision before its status can be compared.
    while fixture.writer.observed(ResourceKind::Revision, &fixture.name("hello-00001")).is_none() {
        sleep(Duration::from_millis(20)).await;
    }
    let status =
        json!({"observedGeneration": 1, "conditions": [{"type": "Ready", "status": "True"}]});
    fixture.set_desired(&key, DesiredState::Body(status.clone()));
    let is_expected = |it: Option<&Value>| it.is_some_and(|it| it["status"] == status);
    fixture.wait_until(ResourceKind::Revision, "hello-00001", is_expected).await;
    // A change by another client is undone.
    let other = json!({"status": {"conditions": []}});
    let api = object_api(&fixture.client, ResourceKind::Revision, &fixture.name("hello-00001"));
    let params = PatchParams::default();
    api.patch_status("hello-00001", &params, &Patch::Merge(&other)).await.unwrap();
    fixture.wait_until(ResourceKind::Revision, "hello-00001", is_expected).await;
}

#[tokio::test]
async fn nothing_is_retried_in_a_terminating_namespace() {
    let fixture = ApiServerFixture::new("leaving").await;
    let kind = kube::api::ApiResource {
        group: String::new(),
        version: "v1".into(),
        api_version: "v1".into(),
        kind: "Namespace".into(),
        plural: "namespaces".into(),
    };
    let api: kube::Api<DynamicObject> = kube::Api::all_with(fixture.client.clone(), &kind);
    // This API server has no controller that ends a namespace, so the namespace stays as terminating.
    api.delete(&fixture.namespace, &DeleteParams::default()).await.unwrap();
    let key = fixture.key(ResourceKind::Service, ObjectPart::Object, "hello");
    fixture.set_desired(&key, DesiredState::Body(fixture.placeholder().body));
    let settled = async {
        while fixture.writer.queue_lengths() != (0, 0, 0) {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(Duration::from_secs(30), settled).await.expect("it is still being tried");
    assert!(fixture.get(ResourceKind::Service, "hello").await.is_none());
    assert!(fixture.source.write_errors.lock().unwrap().is_empty());
}

/// Returns the version of a workload as the API server holds it.
fn version_of(workload: &Value) -> WorkloadVersion {
    let text = |field: &str| workload["metadata"][field].as_str().unwrap().into();
    WorkloadVersion { uid: text("uid"), resource_version: text("resourceVersion") }
}

/// A number of a user that the controller has not observed stays, and nothing of the controller is left in the end.
#[tokio::test(flavor = "multi_thread")]
async fn the_replicas_of_a_users_deployment_are_written_and_given_back() {
    let fixture = ApiServerFixture::new("replicas").await;
    let (resource, labels) = (ResourceKind::Deployment, json!({"app": "web"}));
    let spec = json!({
        "replicas": 3, "selector": {"matchLabels": labels},
        "template": {
            "metadata": {"labels": labels},
            "spec": {"containers": [{"name": "web", "image": "any"}]},
        },
    });
    let body = json!({"spec": spec});
    let created = fixture.create_object(resource, "web", body).await;
    let created = serde_json::to_value(created).unwrap();
    let key = fixture.key(resource, ObjectPart::Scale, "web");
    let sleeping = |workload: &Value| DesiredState::Replicas {
        version: version_of(workload),
        replicas: 0,
        recorded: 3,
        pods_to_remove: Vec::new(),
    };
    fixture.patch_object(resource, "web", &json!({"spec": {"replicas": 5}})).await;
    // Number in the spec, and the record of it.
    let numbers = |object: &Value| {
        let record = ["rouse.dev/scaled-to", "rouse.dev/replicas"]
            .map(|key| object["metadata"]["annotations"][key].clone());
        (object["spec"]["replicas"].clone(), record)
    };
    let conflict = async || {
        while fixture.writer.observed(resource, &key.name).is_none_or(|it| it.replicas != Some(5)) {
            sleep(Duration::from_millis(50)).await;
        }
        // The decision follows from a version before that, so each attempt fails and waits for the next.
        fixture.set_desired(&key, sleeping(&created));
        while fixture.writer.queue_lengths().1 == 0 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(Duration::from_secs(30), conflict()).await.expect("a conflict");
    let changed = fixture.get(resource, "web").await.unwrap();
    assert_eq!(numbers(&changed), (json!(5), [Value::Null, Value::Null]));

    let is_asleep = |object: Option<&Value>| object.is_some_and(|it| it["spec"]["replicas"] == 0);
    fixture.set_desired(&key, sleeping(&changed));
    let asleep = fixture.wait_until(resource, "web", is_asleep).await.unwrap();
    assert_eq!(numbers(&asleep), (json!(0), [json!("0"), json!("3")]));
    let given_back = DesiredState::GivenBack { version: version_of(&asleep), replicas: Some(3) };
    fixture.set_desired(&key, given_back);
    let is_free = |object: Option<&Value>| {
        object.is_some_and(|it| numbers(it) == (json!(3), [Value::Null, Value::Null]))
    };
    let free = fixture.wait_until(resource, "web", is_free).await.unwrap();
    let managers = free["metadata"]["managedFields"].as_array().unwrap();
    assert!(managers.iter().all(|it| it["manager"] != SCALE_FIELD_MANAGER), "{managers:?}");
}

/// Only the requests change, and nothing of the controller is left in the end.
#[tokio::test(flavor = "multi_thread")]
async fn the_requests_of_a_pod_are_reduced_and_restored() {
    let fixture = ApiServerFixture::new("resize").await;
    let kind = kube::api::ApiResource {
        group: String::new(),
        version: "v1".into(),
        api_version: "v1".into(),
        kind: "ServiceAccount".into(),
        plural: "serviceaccounts".into(),
    };
    let accounts: kube::Api<DynamicObject> =
        kube::Api::namespaced_with(fixture.client.clone(), &fixture.namespace, &kind);
    let account =
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}});
    let params = PatchParams::apply("test").force();
    accounts.patch("default", &params, &Patch::Apply(&account)).await.unwrap();
    let resources =
        json!({"requests": {"cpu": "500m", "memory": "256Mi"}, "limits": {"memory": "512Mi"}});
    let container = json!({"name": "user-container", "image": "any", "resources": resources});
    let spec = json!({"automountServiceAccountToken": false, "containers": [container]});
    let (resource, name) = (ResourceKind::Pod, "web-1");
    let created = fixture.create_object(resource, name, json!({"spec": spec})).await;
    let created = serde_json::to_value(created).unwrap();
    let uid: Box<str> = created["metadata"]["uid"].as_str().unwrap().into();
    let key = fixture.key(resource, ObjectPart::Resize, name);
    let set_requests = |requests: PodRequests| {
        fixture.set_desired(&key, DesiredState::Requests { uid: uid.clone(), requests });
    };
    let note = |pod: &Value| pod["metadata"]["annotations"]["rouse.dev/original-requests"].clone();

    set_requests(PodRequests::Reduced { memory_mib: Some(20) });
    let reduced =
        json!({"requests": {"cpu": "1m", "memory": "20Mi"}, "limits": {"memory": "512Mi"}});
    let is_reduced = |pod: Option<&Value>| {
        pod.is_some_and(|it| it["spec"]["containers"][0]["resources"] == reduced)
    };
    let frozen = fixture.wait_until(resource, name, is_reduced).await.unwrap();
    let original = json!({"user-container": {"cpu": "500m", "memory": "256Mi"}});
    assert_eq!(note(&frozen), json!(original.to_string()));

    set_requests(PodRequests::Original);
    let has_no_note = |pod: Option<&Value>| pod.is_some_and(|it| note(it).is_null());
    let thawed = fixture.wait_until(resource, name, has_no_note).await.unwrap();
    assert_eq!(thawed["spec"], created["spec"]);
    assert!(fixture.source.write_errors.lock().unwrap().is_empty());
}

#[tokio::test]
async fn watches_report_all_objects_and_then_changes() {
    let fixture = ApiServerFixture::new("watch").await;
    fixture.create_object(ResourceKind::Route, "first", json!({"spec": {}})).await;
    let stop = CancellationToken::new();
    let scopes = watch_scopes("knative-serving");
    let mut updates = start_watches(&fixture.client, scopes, &Arc::default(), &stop);
    let is_own = |update: &WatchUpdate| match update {
        WatchUpdate::Object { resource: ResourceKind::Route, name, .. }
        | WatchUpdate::Deleted { resource: ResourceKind::Route, name, .. } => {
            name.namespace == fixture.namespace
        }
        WatchUpdate::ListBegun(scope) | WatchUpdate::ListCompleted(scope) => {
            scope.resource == ResourceKind::Route
        }
        WatchUpdate::Object { .. } | WatchUpdate::Deleted { .. } => false,
    };
    let mut next = async || loop {
        let update = timeout(Duration::from_secs(30), updates.recv()).await.unwrap().unwrap();
        if is_own(&update) {
            return match update {
                WatchUpdate::ListBegun(_) => "begin".to_owned(),
                WatchUpdate::ListCompleted(_) => "synced".to_owned(),
                WatchUpdate::Object { name, .. } => format!("is {}", name.name),
                WatchUpdate::Deleted { name, .. } => format!("no {}", name.name),
            };
        }
    };
    assert_eq!([next().await, next().await, next().await], ["begin", "is first", "synced"]);
    fixture.create_object(ResourceKind::Route, "second", json!({"spec": {}})).await;
    assert_eq!(next().await, "is second");
    let api = object_api(&fixture.client, ResourceKind::Route, &fixture.name("first"));
    api.delete("first", &DeleteParams::default()).await.unwrap();
    assert_eq!(next().await, "no first");
    stop.cancel();
}

#[tokio::test]
async fn one_replica_leads_and_releases_the_lease_when_it_stops() {
    let client = client().await;
    let namespace = format!("lease-{}", std::process::id());
    let body = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}});
    apply_raw(&client, "Namespace", "namespaces", &body).await;
    let (lease_duration, renew_deadline) = (Duration::from_secs(10), Duration::from_secs(8));
    let times =
        LeaseTiming { lease_duration, renew_deadline, retry_period: Duration::from_millis(100) };
    let start = |me: &str| {
        let stop = CancellationToken::new();
        let elector = LeaderElector::new(client.clone(), &namespace, me, times);
        let leadership = elector.leadership();
        (leadership, tokio::spawn(elector.run(stop.clone())), stop)
    };
    let (mut one, first, stop) = start("one");
    while !one.may_write() {
        timeout(Duration::from_secs(30), one.changed()).await.expect("no replica leads");
    }
    let (mut two, _second, _stop) = start("two");
    // The other elector tries as often as this one renews, and must not succeed.
    for _ in 0..5 {
        one.changed().await;
        assert!(one.may_write() && !two.may_write());
    }
    stop.cancel();
    first.await.unwrap();
    assert!(!one.may_write());
    while !two.may_write() {
        timeout(Duration::from_secs(30), two.changed()).await.expect("the Lease was not released");
    }
}
