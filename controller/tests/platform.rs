//! The controller as a whole against a real API server, with pods played by the test.
//!
//! Run by the cluster tier like `apiserver/`, and not at the same time: here every object in the API server is the
//! controller's.

use std::{
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    time::Duration,
};

use common::wire::NamespacedName;
use controller::{
    ControllerConfig,
    model::object::ResourceKind,
    run_on_kubernetes,
    shell::{
        api::client::{connect, object_api},
        config::KubernetesConfig,
    },
};
use kube::{
    Client,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task::JoinHandle,
    time::sleep,
};
use tokio_util::sync::CancellationToken;

/// Objects of a Service with one Revision in its namespace, without those that Kubernetes adds.
const OBJECTS: [(ResourceKind, &str); 12] = [
    (ResourceKind::KnativeService, "hello"),
    (ResourceKind::Configuration, "hello"),
    (ResourceKind::Route, "hello"),
    (ResourceKind::Revision, "hello-00001"),
    (ResourceKind::Deployment, "hello-00001-deployment"),
    (ResourceKind::PodAutoscaler, "hello-00001"),
    (ResourceKind::ServerlessService, "hello-00001"),
    (ResourceKind::Image, "hello-00001-cache-user-container"),
    (ResourceKind::Service, "hello"),
    (ResourceKind::Service, "hello-00001"),
    (ResourceKind::Service, "hello-00001-private"),
    (ResourceKind::EndpointSlice, "hello"),
];

fn kubeconfig() -> PathBuf {
    std::env::var_os("ROUSE_TEST_APISERVER")
        .expect("ROUSE_TEST_APISERVER names no kubeconfig: run `cargo xtask test --tier cluster`")
        .into()
}

struct PlatformFixture {
    client: Client,
    namespace: String,
    system_namespace: String,
}

struct RunningReplica {
    admin: SocketAddr,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl RunningReplica {
    /// Waits until the replica has observed all objects, which is when it reports to be ready.
    async fn wait_until_ready(&self) {
        for _ in 0..600 {
            if self
                .get_page("/readyz")
                .await
                .is_ok_and(|response| response.starts_with("HTTP/1.1 200"))
            {
                return;
            }
            sleep(Duration::from_millis(50)).await;
        }
        panic!("it did not become ready: {:?}", self.get_page("/readyz").await);
    }

    /// Returns the number of times the replica has observed a ConfigMap.
    async fn config_maps_observed(&self) -> u64 {
        const COUNT: &str = "rouse_controller_kube_watch_events_total{resource=\"configmaps\"} ";
        let metrics = self.get_page("/metrics").await.unwrap();
        let count = metrics.lines().find_map(|it| it.strip_prefix(COUNT));
        count.map_or(0, |it| it.parse().unwrap())
    }

    async fn get_page(&self, path: &str) -> std::io::Result<String> {
        let mut stream = TcpStream::connect(self.admin).await?;
        let ask = format!("GET {path} HTTP/1.1\r\nhost: admin\r\nconnection: close\r\n\r\n");
        stream.write_all(ask.as_bytes()).await?;
        let mut response = String::new();
        stream.read_to_string(&mut response).await?;
        Ok(response)
    }

    async fn shut_down(self) {
        self.stop.cancel();
        self.task.await.unwrap();
    }
}

impl PlatformFixture {
    async fn new() -> Self {
        let client = connect(Some(&kubeconfig())).await.unwrap();
        let number = std::process::id();
        let fixture = Self {
            client,
            namespace: format!("platform-{number}"),
            system_namespace: format!("system-{number}"),
        };
        for name in [&fixture.namespace, &fixture.system_namespace] {
            let body = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
            fixture.apply_raw("", "v1", "Namespace", "namespaces", &body).await;
        }
        fixture.apply_crds().await;
        fixture
    }

    async fn apply_raw(&self, group: &str, version: &str, kind: &str, plural: &str, body: &Value) {
        let kind = kube::api::ApiResource {
            group: group.into(),
            version: version.into(),
            api_version: body["apiVersion"].as_str().unwrap().into(),
            kind: kind.into(),
            plural: plural.into(),
        };
        let api: kube::Api<DynamicObject> = kube::Api::all_with(self.client.clone(), &kind);
        let name = body["metadata"]["name"].as_str().unwrap();
        api.patch(name, &PatchParams::apply("test").force(), &Patch::Apply(body)).await.unwrap();
    }

    async fn apply_crds(&self) {
        for crd in controller::write::crds::all_definitions() {
            let (kind, plural) = ("CustomResourceDefinition", "customresourcedefinitions");
            self.apply_raw("apiextensions.k8s.io", "v1", kind, plural, &crd).await;
        }
        for resource in
            ResourceKind::ALL.into_iter().filter(|it| it.group().ends_with("knative.dev"))
        {
            let api = object_api(&self.client, resource, &NamespacedName::new("default", ""));
            while api.list(&ListParams::default().limit(1)).await.is_err() {
                sleep(Duration::from_millis(100)).await;
            }
        }
    }

    fn start_replica(&self, pod: &str) -> RunningReplica {
        let free = TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr());
        let admin = free.expect("a free port");
        let listen = std::env::temp_dir().join(format!("{}-{pod}.sock", self.system_namespace));
        let config = ControllerConfig {
            listen: format!("unix:{}", listen.display()),
            admin,
            domain: "example.com".into(),
            ..ControllerConfig::default()
        };
        let cluster = KubernetesConfig {
            kubeconfig: Some(kubeconfig()),
            system_namespace: self.system_namespace.clone(),
            pod: pod.into(),
            cluster_domain: "cluster.local".into(),
            webhook: None,
            webhook_url: None,
        };
        let stop = CancellationToken::new();
        let run = run_on_kubernetes(config, cluster, stop.clone());
        RunningReplica { admin, stop, task: tokio::spawn(async { run.await.unwrap() }) }
    }

    async fn apply(&self, resource: ResourceKind, name: &NamespacedName, mut body: Value) {
        body["apiVersion"] = json!(resource.api_version());
        body["kind"] = json!(resource.kind());
        body["metadata"]["name"] = json!(name.name.as_str());
        body["metadata"]["namespace"] = json!(name.namespace.as_str());
        let params = PatchParams::apply("test").force();
        let api = object_api(&self.client, resource, name);
        api.patch(&name.name, &params, &Patch::Apply(&body)).await.unwrap();
    }

    fn name(&self, name: &str) -> NamespacedName {
        NamespacedName::new(self.namespace.as_str(), name)
    }

    async fn get(&self, resource: ResourceKind, name: &str) -> Option<Value> {
        let object =
            object_api(&self.client, resource, &self.name(name)).get_opt(name).await.unwrap();
        object.map(|it| serde_json::to_value(it).unwrap())
    }

    async fn wait_until(
        &self,
        resource: ResourceKind,
        name: &str,
        is_expected: impl Fn(&Value) -> bool,
    ) -> Value {
        for _ in 0..600 {
            match self.get(resource, name).await {
                Some(object) if is_expected(&object) => return object,
                Some(_) | None => sleep(Duration::from_millis(50)).await,
            }
        }
        panic!("{resource} {name} did not become as wanted: {:?}", self.get(resource, name).await);
    }

    /// Plays a kubelet: creates a pod that runs and is ready.
    async fn run_pod(&self, name: &NamespacedName, address: &str, labels: Value) {
        let spec = json!({
            "nodeName": "node", "automountServiceAccountToken": false,
            "containers": [{"name": "user-container", "image": "any"}],
        });
        let account =
            json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}});
        let kind = kube::api::ApiResource {
            group: String::new(),
            version: "v1".into(),
            api_version: "v1".into(),
            kind: "ServiceAccount".into(),
            plural: "serviceaccounts".into(),
        };
        let accounts: kube::Api<DynamicObject> =
            kube::Api::namespaced_with(self.client.clone(), &name.namespace, &kind);
        let params = PatchParams::apply("test").force();
        accounts.patch("default", &params, &Patch::Apply(&account)).await.unwrap();
        self.apply(ResourceKind::Pod, name, json!({"metadata": {"labels": labels}, "spec": spec}))
            .await;
        let status = json!({"status": {
            "phase": "Running", "podIP": address, "podIPs": [{"ip": address}],
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [{
                "name": "user-container", "image": "any", "imageID": "", "ready": true, "restartCount": 0,
                "state": {"running": {}},
            }],
        }});
        let api = object_api(&self.client, ResourceKind::Pod, name);
        let merge = Patch::Merge(&status);
        api.patch_status(&name.name, &PatchParams::default(), &merge).await.unwrap();
    }

    /// Returns the replicas that recorded Events with this reason, one entry per Event.
    async fn event_reporters(&self, reason: &str) -> Vec<String> {
        let kind = kube::api::ApiResource {
            group: "events.k8s.io".into(),
            version: "v1".into(),
            api_version: "events.k8s.io/v1".into(),
            kind: "Event".into(),
            plural: "events".into(),
        };
        let mut reporters = Vec::new();
        for namespace in [&self.system_namespace, &self.namespace] {
            let api: kube::Api<DynamicObject> =
                kube::Api::namespaced_with(self.client.clone(), namespace, &kind);
            let all = api.list(&ListParams::default()).await.unwrap();
            let matching = all.into_iter().filter(|it| it.data["reason"] == reason);
            reporters.extend(
                matching.map(|it| it.data["reportingInstance"].as_str().unwrap().to_owned()),
            );
        }
        reporters
    }

    async fn wait_for_event(&self, reason: &str, reporter: &str) {
        for _ in 0..600 {
            if self.event_reporters(reason).await.iter().any(|it| it == reporter) {
                return;
            }
            sleep(Duration::from_millis(50)).await;
        }
        panic!("{reporter} records no Event {reason}: {:?}", self.event_reporters(reason).await);
    }

    async fn service_objects(&self) -> Vec<Value> {
        let mut all = Vec::new();
        for (resource, object_name) in OBJECTS {
            all.push(self.wait_until(resource, object_name, |_| true).await);
        }
        all
    }

    /// Asserts that none of the objects was written since.
    async fn assert_untouched(&self, previous: &[Value]) {
        for (previous, now) in previous.iter().zip(self.service_objects().await) {
            let version = |it: &Value| it["metadata"]["resourceVersion"].clone();
            assert_eq!(version(&now), version(previous), "written: {now:#}\nbefore: {previous:#}");
        }
    }
}

fn is_ready(object: &Value) -> bool {
    let conditions = object["status"]["conditions"].as_array();
    conditions.into_iter().flatten().any(|it| it["type"] == "Ready" && it["status"] == "True")
}

async fn deploy_hello(fixture: &PlatformFixture) {
    let template = json!({"spec": {"containers": [{"image": "dev.local/hello"}]}});
    let body = json!({"spec": {"template": template}});
    fixture.apply(ResourceKind::KnativeService, &fixture.name("hello"), body).await;
    let revision = fixture.wait_until(ResourceKind::Revision, "hello-00001", |_| true).await;
    let deployment =
        fixture.wait_until(ResourceKind::Deployment, "hello-00001-deployment", |_| true).await;
    assert_eq!(deployment["spec"]["replicas"], 1);
    let labels = deployment["spec"]["template"]["metadata"]["labels"].clone();
    assert_eq!(labels["serving.knative.dev/revisionUID"], revision["metadata"]["uid"]);
    fixture.run_pod(&fixture.name("hello-00001-deployment-a-b"), "10.0.1.1", labels).await;
    for number in 1..=3 {
        let name =
            NamespacedName::new(fixture.system_namespace.as_str(), format!("activator-{number}"));
        fixture.run_pod(&name, &format!("10.0.0.{number}"), json!({"app": "activator"})).await;
    }
}

/// Waits until both replicas have observed a bad value and its correction.
async fn write_and_revert_invalid_config(fixture: &PlatformFixture, follower: &RunningReplica) {
    let observed = follower.config_maps_observed().await;
    let config_name = NamespacedName::new(fixture.system_namespace.as_str(), "config-autoscaler");
    fixture
        .apply(ResourceKind::ConfigMap, &config_name, json!({"data": {"stable-window": "3s"}}))
        .await;
    fixture.wait_for_event("ConfigRefused", "first").await;
    // A replica records the Events of another leader's time once it is the leader, if they still hold.
    fixture.apply(ResourceKind::ConfigMap, &config_name, json!({"data": {}})).await;
    for _ in 0..600 {
        if follower.config_maps_observed().await >= observed + 2 {
            return;
        }
        sleep(Duration::from_millis(50)).await;
    }
    panic!("the follower has not observed both");
}

/// Moves traffic, and waits until the old Revision's pod is annotated as draining, for the other replicas.
async fn check_old_pods_are_annotated(fixture: &PlatformFixture) {
    let deployment =
        fixture.wait_until(ResourceKind::Deployment, "hello-00002-deployment", |_| true).await;
    let labels = deployment["spec"]["template"]["metadata"]["labels"].clone();
    fixture.run_pod(&fixture.name("hello-00002-deployment-a-b"), "10.0.1.2", labels).await;
    fixture
        .wait_until(ResourceKind::KnativeService, "hello", |it| {
            it["status"]["traffic"][0]["revisionName"] == "hello-00002"
        })
        .await;
    let is_annotated = |it: &Value| it["metadata"]["annotations"]["rouse.dev/draining"].is_string();
    let pod =
        fixture.wait_until(ResourceKind::Pod, "hello-00001-deployment-a-b", is_annotated).await;
    assert_eq!(pod["spec"]["containers"][0]["image"], "any", "only the annotation is ours");
    let other = fixture.wait_until(ResourceKind::Pod, "hello-00002-deployment-a-b", |_| true).await;
    assert!(!is_annotated(&other));
}

/// Checks that a domain's claim is created for its mapping, and deleted with it.
async fn check_domain_claims(fixture: &PlatformFixture) {
    let network = NamespacedName::new(fixture.system_namespace.as_str(), "config-network");
    let data = json!({"data": {"autocreate-cluster-domain-claims": "true"}});
    fixture.apply(ResourceKind::ConfigMap, &network, data).await;
    let domain = format!("www.{}.test", fixture.namespace);
    let target =
        json!({"apiVersion": "serving.knative.dev/v1", "kind": "Service", "name": "hello"});
    let body = json!({"spec": {"ref": target}});
    fixture.apply(ResourceKind::DomainMapping, &fixture.name(&domain), body).await;
    let mapping = fixture.wait_until(ResourceKind::DomainMapping, &domain, is_ready).await;
    assert_eq!(mapping["status"]["url"], format!("http://{domain}"));
    let claims =
        object_api(&fixture.client, ResourceKind::ClusterDomainClaim, &NamespacedName::new("", ""));
    let claim = claims.get_opt(&domain).await.unwrap().expect("a claim");
    assert_eq!(claim.data["spec"]["namespace"], json!(fixture.namespace));
    let mappings = object_api(&fixture.client, ResourceKind::DomainMapping, &fixture.name(""));
    mappings.delete(&domain, &DeleteParams::default()).await.unwrap();
    for _ in 0..200 {
        if claims.get_opt(&domain).await.unwrap().is_none() {
            return;
        }
        sleep(Duration::from_millis(50)).await;
    }
    panic!("the claim of {domain} stays");
}

/// A single test, since the steps depend on each other and each needs the whole API server.
#[tokio::test(flavor = "multi_thread")]
async fn a_service_lives_through_a_restart_and_a_change_of_leaders() {
    // A failed test shows the logs of the replicas.
    tracing_subscriber::fmt().with_ansi(false).with_writer(std::io::stderr).init();
    let fixture = PlatformFixture::new().await;
    let first = fixture.start_replica("first");
    deploy_hello(&fixture).await;
    let service = fixture.wait_until(ResourceKind::KnativeService, "hello", is_ready).await;
    assert_eq!(service["status"]["url"], format!("http://hello.{}.example.com", fixture.namespace));
    assert_eq!(service["status"]["traffic"][0]["revisionName"], "hello-00001");
    let slice = fixture.wait_until(ResourceKind::EndpointSlice, "hello", |it| {
        it["endpoints"].as_array().is_some_and(|it| it.len() == 2)
    });
    let slice = slice.await;
    let placeholder = fixture.wait_until(ResourceKind::Service, "hello", |_| true).await;
    let port = placeholder["metadata"]["annotations"]["rouse.dev/activator-port"].as_str().unwrap();
    assert_eq!(slice["ports"][0]["port"].to_string(), port);

    // A child object that a user deletes is created again.
    let api = object_api(&fixture.client, ResourceKind::Service, &fixture.name("hello"));
    api.delete("hello", &DeleteParams::default()).await.unwrap();
    let uid = placeholder["metadata"]["uid"].clone();
    let recreated =
        fixture.wait_until(ResourceKind::Service, "hello", |it| it["metadata"]["uid"] != uid).await;
    let kept_port = &recreated["metadata"]["annotations"]["rouse.dev/activator-port"];
    assert_eq!(kept_port, port, "its port at the activators stays");

    // A second replica waits, acquires the Lease, and has nothing to write.
    let second = fixture.start_replica("second");
    second.wait_until_ready().await;
    write_and_revert_invalid_config(&fixture, &second).await;
    let before = fixture.service_objects().await;
    first.shut_down().await;
    // It writes everything for existing objects before it creates anything for a new Service.
    let image =
        |image: &str| json!({"spec": {"template": {"spec": {"containers": [{"image": image}]}}}});
    fixture
        .apply(ResourceKind::KnativeService, &fixture.name("later"), image("dev.local/one"))
        .await;
    fixture.wait_until(ResourceKind::Deployment, "later-00001-deployment", |_| true).await;
    fixture.assert_untouched(&before).await;
    // A replica records its Events in order: one about the bad value would exist by now.
    fixture.wait_for_event("Created", "second").await;
    assert_eq!(fixture.event_reporters("ConfigRefused").await, ["first"]);

    // The second replica is the leader: a new template makes a second Revision.
    fixture
        .apply(ResourceKind::KnativeService, &fixture.name("hello"), image("dev.local/two"))
        .await;
    fixture.wait_until(ResourceKind::Revision, "hello-00002", |_| true).await;
    let still = fixture.wait_until(ResourceKind::KnativeService, "hello", |it| {
        it["status"]["latestCreatedRevisionName"] == "hello-00002"
    });
    assert_eq!(still.await["status"]["traffic"][0]["revisionName"], "hello-00001");
    check_old_pods_are_annotated(&fixture).await;
    check_domain_claims(&fixture).await;
    second.shut_down().await;
}
