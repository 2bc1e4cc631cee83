//! The reader of named Secrets against a real API server, with a client that may only get Secrets.

use std::{sync::Arc, time::Duration};

use common::{
    fixtures::certificates::{TestAuthority, TestCertificate},
    local_node::LocalNodeSpec,
    once_signal::OnceSignal,
    outbox::Outbox,
    wire::NamespacedName,
};
use controller::{
    decide::machine::{ControllerEvent, ControllerStateMachine},
    model::{
        cluster_state::{
            CertificateState, ClusterState, ControllerSettings, PlatformKind, SecretReadState,
        },
        object::ResourceKind,
    },
    shell::{platform::named_secrets::read_named_secrets, runtime::ControllerRuntime},
};
use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::{
    Api, Client, Config,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams},
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::{Value, json};
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};

use super::{apply_raw, client, kubeconfig};

/// Returns a client with the rights of this user.
async fn client_of_user(user: &str) -> Client {
    let file = Kubeconfig::read_from(kubeconfig()).unwrap();
    let options = KubeConfigOptions::default();
    let mut config = Config::from_custom_kubeconfig(file, &options).await.unwrap();
    config.auth_info.impersonate = Some(user.to_owned());
    config.default_retry = false;
    Client::try_from(config).unwrap()
}

/// Namespace with a Secret that settings name, and a reader of it that may only get Secrets.
struct NamedSecretFixture {
    client: Client,
    namespace: String,
    runtime: Arc<ControllerRuntime>,
}

impl NamedSecretFixture {
    /// Makes the namespace, grants `get` on its Secrets, and starts a reader of the Secret `own`.
    async fn new() -> Self {
        let client = client().await;
        let namespace = format!("named-secrets-{}", std::process::id());
        let body =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}});
        apply_raw(&client, "Namespace", "namespaces", &body).await;
        let settings = ControllerSettings {
            platform: PlatformKind::Kubernetes,
            system_namespace: namespace.clone(),
            ..ControllerSettings::default()
        };
        let cluster = ClusterState { settings: Arc::new(settings), ..ClusterState::default() };
        let machine = ControllerStateMachine::new(cluster, Outbox::new());
        let (node_spec, _) = watch::channel(LocalNodeSpec::default());
        let runtime = Arc::new(ControllerRuntime::new(machine, node_spec));
        let fixture = Self { client, namespace, runtime };
        fixture.grant_get().await;
        fixture.name_secret("own");
        let first_read = OnceSignal::new();
        let (reader, runtime) = (fixture.reader().await, Arc::clone(&fixture.runtime));
        tokio::spawn(read_named_secrets(reader, runtime, first_read.clone()));
        timeout(Duration::from_secs(30), first_read.wait()).await.expect("a first read");
        fixture
    }

    /// Returns a client that may only get Secrets of the namespace.
    async fn reader(&self) -> Client {
        client_of_user(&format!("reader-of-{}", self.namespace)).await
    }

    async fn grant_get(&self) {
        let rule = json!({"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]});
        self.apply_rbac("Role", "roles", json!({"rules": [rule]})).await;
        let group = "rbac.authorization.k8s.io";
        let user = format!("reader-of-{}", self.namespace);
        let role = json!({"apiGroup": group, "kind": "Role", "name": "reader"});
        let subjects = json!([{"apiGroup": group, "kind": "User", "name": user}]);
        let body = json!({"roleRef": role, "subjects": subjects});
        self.apply_rbac("RoleBinding", "rolebindings", body).await;
        // The API server learns of the right a moment later.
        let secrets: Api<Secret> = Api::namespaced(self.reader().await, &self.namespace);
        while secrets.get_opt("none").await.is_err() {
            sleep(Duration::from_millis(50)).await;
        }
        let listed = secrets.list(&ListParams::default()).await;
        assert!(listed.is_err(), "the reader may list Secrets");
    }

    fn rbac_api(&self, kind: &str, plural: &str) -> Api<DynamicObject> {
        let kind = kube::api::ApiResource {
            group: "rbac.authorization.k8s.io".into(),
            version: "v1".into(),
            api_version: "rbac.authorization.k8s.io/v1".into(),
            kind: kind.into(),
            plural: plural.into(),
        };
        Api::namespaced_with(self.client.clone(), &self.namespace, &kind)
    }

    async fn apply_rbac(&self, kind: &str, plural: &str, mut body: Value) {
        body["apiVersion"] = json!("rbac.authorization.k8s.io/v1");
        body["kind"] = json!(kind);
        body["metadata"] = json!({"name": "reader"});
        let params = PatchParams::apply("test").force();
        self.rbac_api(kind, plural).patch("reader", &params, &Patch::Apply(&body)).await.unwrap();
    }

    fn name_secret(&self, name: &str) {
        let object = json!({"data": {"rouse.dev.certificates": name}});
        self.runtime.step(ControllerEvent::ObjectObserved {
            resource: ResourceKind::ConfigMap,
            name: NamespacedName::new(self.namespace.as_str(), "config-network"),
            object: Some(Box::new(object)),
        });
    }

    /// Writes the Secret `own` as a user would.
    async fn apply_secret(&self, chain: &str, key: &str) {
        let bytes = |text: &str| json!(ByteString(text.as_bytes().to_vec()));
        let data = json!({"tls.crt": bytes(chain), "tls.key": bytes(key)});
        let body = json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "own"}, "data": data,
        });
        let params = PatchParams::apply("test").force();
        self.secrets().patch("own", &params, &Patch::Apply(&body)).await.unwrap();
    }

    fn secrets(&self) -> Api<Secret> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn state(&self, name: &str) -> Option<CertificateState> {
        let name = NamespacedName::new(self.namespace.as_str(), name);
        let read = |machine: &ControllerStateMachine| {
            machine.cluster().certificates.by_secret.get(&name).cloned()
        };
        self.runtime.with_machine(read)
    }

    async fn wait_for_state(
        &self,
        name: &str,
        is_expected: impl Fn(&SecretReadState) -> bool,
    ) -> CertificateState {
        for _ in 0..600 {
            if let Some(state) = self.state(name).filter(|it| is_expected(&it.last_read)) {
                return state;
            }
            sleep(Duration::from_millis(50)).await;
        }
        panic!("the Secret {name} did not become as expected: {:?}", self.state(name));
    }

    /// Waits until a certificate for `host` is in force.
    async fn wait_until_in_force(&self, host: &str) {
        let has_host = |state: &CertificateState| {
            state.in_force.as_ref().is_some_and(|it| it.facts.names.covers(host))
        };
        for _ in 0..600 {
            if self.state("own").is_some_and(|it| has_host(&it)) {
                return;
            }
            sleep(Duration::from_millis(50)).await;
        }
        panic!("no certificate for {host} is in force: {:?}", self.state("own"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn named_secrets_are_read_by_get_alone() {
    let fixture = NamedSecretFixture::new().await;
    let is_absent = |it: &SecretReadState| matches!(it, SecretReadState::Absent);
    fixture.wait_for_state("own", is_absent).await;

    let authority = TestAuthority::new();
    let TestCertificate { chain_pem, key_pem, .. } = authority.issue(&["one.test"]);
    fixture.apply_secret(&chain_pem, &key_pem).await;
    fixture.wait_until_in_force("one.test").await;
    let TestCertificate { chain_pem, key_pem, .. } = authority.issue(&["two.test"]);
    fixture.apply_secret(&chain_pem, &key_pem).await;
    fixture.wait_until_in_force("two.test").await;

    fixture.apply_secret(&chain_pem, "no key").await;
    let fault = "tls.key holds no private key in PEM".to_owned();
    let is_refused = |it: &SecretReadState| *it == SecretReadState::Refused(fault.clone());
    let broken = fixture.wait_for_state("own", is_refused).await;
    fixture.secrets().delete("own", &DeleteParams::default()).await.unwrap();
    let deleted = fixture.wait_for_state("own", is_absent).await;
    for state in [broken, deleted] {
        let kept = state.in_force.expect("the certificate from before");
        assert!(kept.facts.names.covers("two.test"));
    }

    let bindings = fixture.rbac_api("RoleBinding", "rolebindings");
    bindings.delete("reader", &DeleteParams::default()).await.unwrap();
    // Another name: what was known of the first one is not replaced by an error.
    let secrets: Api<Secret> = Api::namespaced(fixture.reader().await, &fixture.namespace);
    while secrets.get_opt("other").await.is_ok() {
        sleep(Duration::from_millis(50)).await;
    }
    fixture.name_secret("other");
    let is_unreadable = |it: &SecretReadState| matches!(it, SecretReadState::Unreadable(_));
    let state = fixture.wait_for_state("other", is_unreadable).await;
    let SecretReadState::Unreadable(message) = state.last_read else { unreachable!("see above") };
    assert!(message.contains("cannot get resource \"secrets\""), "{message}");
}
