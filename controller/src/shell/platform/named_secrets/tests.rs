use std::{
    net::{SocketAddr, TcpListener},
    path::Path,
    sync::{Mutex, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use common::{
    fixtures::certificates::{TestAuthority, TestCertificate},
    local_node::LocalNodeSpec,
    outbox::Outbox,
};
use http::{Request as HttpRequest, Response};
use kube::client::Body;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::*;
use crate::{
    decide::machine::ControllerStateMachine,
    model::{
        cluster_state::{CertificateState, ClusterState, ControllerSettings, PlatformKind},
        object::ResourceKind,
    },
    shell::{
        api::secret_schedule::READ_INTERVAL,
        config::{ControllerConfig, KubernetesConfig},
    },
};

/// Namespace of the components, and of the Secrets that `config-network` names.
const SYSTEM_NAMESPACE: &str = "knative-serving";

/// API server that gives one answer to all requests, and records these.
#[derive(Default)]
struct FakeSecretServer {
    answer: Mutex<(u16, Value)>,
    requests: Mutex<Vec<String>>,
}

impl FakeSecretServer {
    fn new(code: u16, body: Value) -> Arc<Self> {
        let server = Self::default();
        server.set_answer(code, body);
        Arc::new(server)
    }

    fn set_answer(&self, code: u16, body: Value) {
        *self.answer.lock().unwrap_or_else(PoisonError::into_inner) = (code, body);
    }

    fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn client(self: &Arc<Self>) -> Client {
        let server = Arc::clone(self);
        let service = tower::service_fn(move |request: HttpRequest<Body>| {
            let request = format!("{} {}", request.method(), request.uri().path());
            server.requests.lock().unwrap_or_else(PoisonError::into_inner).push(request);
            let answer = server.answer.lock().unwrap_or_else(PoisonError::into_inner).clone();
            async move {
                let (code, body) = answer;
                Response::builder().status(code).body(Body::from(body.to_string().into_bytes()))
            }
        });
        Client::new(service, "default")
    }
}

/// Returns a Secret with these keys.
fn secret(version: &str, keys: &[(&str, &str)]) -> Value {
    let bytes = |text: &str| json!(ByteString(text.as_bytes().to_vec()));
    let data = keys.iter().map(|(key, text)| ((*key).to_owned(), bytes(text)));
    let data: serde_json::Map<String, Value> = data.collect();
    let metadata = json!({"name": "own", "resourceVersion": version});
    json!({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})
}

fn certificate_secret(version: &str, certificate: &TestCertificate) -> Value {
    let (chain, key) = (certificate.chain_pem.as_str(), certificate.key_pem.as_str());
    secret(version, &[("tls.crt", chain), ("tls.key", key)])
}

/// Returns an error as the API server sends it.
fn status(code: u16, reason: &str, message: &str) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "code": code, "reason": reason, "message": message,
    })
}

/// Makes a runtime whose settings name the Secret `own`.
fn new_runtime() -> Arc<ControllerRuntime> {
    let settings = ControllerSettings {
        platform: PlatformKind::Kubernetes,
        system_namespace: SYSTEM_NAMESPACE.into(),
        ..ControllerSettings::default()
    };
    let cluster = ClusterState { settings: Arc::new(settings), ..ClusterState::default() };
    let machine = ControllerStateMachine::new(cluster, Outbox::new());
    let (node_spec, _) = watch::channel(LocalNodeSpec::default());
    let runtime = Arc::new(ControllerRuntime::new(machine, node_spec));
    name_secrets(&runtime, json!({"rouse.dev.certificates": "own"}));
    runtime
}

/// Applies `config-network` with these data.
fn name_secrets(runtime: &ControllerRuntime, data: Value) {
    runtime.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::ConfigMap,
        name: NamespacedName::new(SYSTEM_NAMESPACE, "config-network"),
        object: Some(Box::new(json!({"data": data}))),
    });
}

fn own_state(runtime: &ControllerRuntime) -> Option<CertificateState> {
    let name = NamespacedName::new(SYSTEM_NAMESPACE, "own");
    runtime.with_machine(|machine| machine.cluster().certificates.by_secret.get(&name).cloned())
}

/// Waits until the state of the Secret `own` is as expected.
async fn wait_until(
    runtime: &ControllerRuntime,
    is_expected: impl Fn(&CertificateState) -> bool,
) -> CertificateState {
    for _ in 0..10_000 {
        if let Some(state) = own_state(runtime).filter(&is_expected) {
            return state;
        }
        sleep(Duration::from_millis(10)).await;
    }
    panic!("the Secret did not become as expected: {:?}", own_state(runtime));
}

fn is_in_force_for(state: &CertificateState, host: &str) -> bool {
    state.in_force.as_ref().is_some_and(|it| it.facts.names.covers(host))
}

/// Starts the reader, and waits until it has read the Secret once.
async fn start_reader(api_server: &Arc<FakeSecretServer>, runtime: &Arc<ControllerRuntime>) {
    let first_read = OnceSignal::new();
    let (client, runtime) = (api_server.client(), Arc::clone(runtime));
    tokio::spawn(read_named_secrets(client, runtime, first_read.clone()));
    first_read.wait().await;
}

#[tokio::test(start_paused = true)]
async fn a_secret_is_read_by_name_and_parsed_only_when_it_changes() {
    let authority = TestAuthority::new();
    let (one, two) = (authority.issue(&["one.test"]), authority.issue(&["two.test"]));
    let api_server = FakeSecretServer::new(200, certificate_secret("1", &one));
    let runtime = new_runtime();
    let count = |result| runtime.metrics.secret_reads(result);
    start_reader(&api_server, &runtime).await;
    let state = own_state(&runtime).expect("it is named");
    assert!(matches!(state.last_read, SecretReadState::InForce), "{state:?}");
    assert!(is_in_force_for(&state, "one.test"));
    sleep(READ_INTERVAL * 10).await;
    assert_eq!(count(SecretReadResult::Usable), 1);
    assert!(count(SecretReadResult::Unchanged) >= 9, "it is read again");

    api_server.set_answer(200, certificate_secret("2", &two));
    wait_until(&runtime, |it| is_in_force_for(it, "two.test")).await;
    assert_eq!(count(SecretReadResult::Usable), 2);
    let paths: Vec<String> = api_server.requests();
    let path = format!("GET /api/v1/namespaces/{SYSTEM_NAMESPACE}/secrets/own");
    assert!(paths.iter().all(|it| *it == path), "{paths:?}");
}

#[tokio::test(start_paused = true)]
async fn a_secret_without_a_usable_certificate_keeps_the_one_before() {
    let own = TestAuthority::new().issue(&["own.test"]);
    let api_server = FakeSecretServer::new(200, certificate_secret("1", &own));
    let runtime = new_runtime();
    start_reader(&api_server, &runtime).await;
    let (chain, key) = (own.chain_pem.as_str(), own.key_pem.as_str());
    let faults: [(&[(&str, &str)], &str); 4] = [
        (&[("tls.key", key)], "it has no tls.crt"),
        (&[("tls.crt", chain), ("ca.crt", chain)], "it has no tls.key"),
        (&[("tls.crt", ""), ("tls.key", key)], "tls.crt holds no certificate in PEM"),
        (&[("tls.crt", chain), ("tls.key", "x")], "tls.key holds no private key in PEM"),
    ];
    for (version, (keys, fault)) in (2..).zip(faults) {
        api_server.set_answer(200, secret(&format!("{version}"), keys));
        let is_refused =
            |it: &CertificateState| it.last_read == SecretReadState::Refused(fault.to_owned());
        let state = wait_until(&runtime, is_refused).await;
        assert!(is_in_force_for(&state, "own.test"), "{fault}");
    }
    api_server.set_answer(404, status(404, "NotFound", "secrets \"own\" not found"));
    let is_absent = |it: &CertificateState| matches!(it.last_read, SecretReadState::Absent);
    let state = wait_until(&runtime, is_absent).await;
    assert!(is_in_force_for(&state, "own.test"));
    // The version of the last usable read: it counts all the same, since the machine does not have it in force.
    api_server.set_answer(200, certificate_secret("1", &own));
    wait_until(&runtime, |it| matches!(it.last_read, SecretReadState::InForce)).await;
}

#[tokio::test(start_paused = true)]
async fn secrets_are_counted_by_state_and_reads_by_result() {
    let own = TestAuthority::new().issue(&["own.test"]);
    let api_server = FakeSecretServer::new(200, certificate_secret("1", &own));
    let runtime = new_runtime();
    start_reader(&api_server, &runtime).await;
    let mut registry = Registry::default();
    runtime.metrics.register(&mut registry);
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).expect("text");
    for line in [
        "rouse_controller_certificates{state=\"in_force\"} 1",
        "rouse_controller_certificates{state=\"pending\"} 0",
        "rouse_controller_secret_reads_total{result=\"usable\"} 1",
    ] {
        assert!(text.lines().any(|it| it == line), "{line} is not in {text}");
    }
}

/// A certificate that its issuer's clock has made a moment too early would otherwise be refused for good.
#[tokio::test(start_paused = true)]
async fn a_certificate_that_was_refused_is_passed_again_with_the_same_version() {
    let authority = TestAuthority::new();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
    let now = i64::try_from(now).expect("a time of this century");
    let later = authority.issue_valid(&["own.test"], now + 3_600, now + 7_200);
    let held = certificate_secret("1", &authority.issue(&["own.test"]));
    let api_server = FakeSecretServer::new(200, held);
    let runtime = new_runtime();
    start_reader(&api_server, &runtime).await;
    api_server.set_answer(200, certificate_secret("2", &later));
    wait_until(&runtime, |it| matches!(it.last_read, SecretReadState::Refused(_))).await;
    let passed = runtime.metrics.secret_reads(SecretReadResult::Usable);
    sleep(READ_INTERVAL * 5).await;
    assert!(runtime.metrics.secret_reads(SecretReadResult::Usable) >= passed + 4);
}

/// The reader sees the last set only, which is the same as before.
#[tokio::test(start_paused = true)]
async fn a_name_that_leaves_and_comes_back_at_once_has_its_certificate() {
    let own = TestAuthority::new().issue(&["own.test"]);
    let api_server = FakeSecretServer::new(200, certificate_secret("1", &own));
    let runtime = new_runtime();
    start_reader(&api_server, &runtime).await;
    name_secrets(&runtime, json!({}));
    assert_eq!(own_state(&runtime), None);
    name_secrets(&runtime, json!({"rouse.dev.certificates": "own"}));
    let state = own_state(&runtime).expect("it is named");
    assert!(is_in_force_for(&state, "own.test"), "the machine remembers it: {state:?}");
    sleep(READ_INTERVAL * 2).await;
    assert_eq!(runtime.metrics.secret_reads(SecretReadResult::Usable), 1);
    // Another result in the meantime counts, and the reader does not know that the machine has it.
    name_secrets(&runtime, json!({}));
    let name = NamespacedName::new(SYSTEM_NAMESPACE, "own");
    runtime.step(ControllerEvent::SecretRead { name, read: SecretRead::Absent });
    name_secrets(&runtime, json!({"rouse.dev.certificates": "own"}));
    let state = own_state(&runtime).expect("it is named");
    assert!(matches!(state.last_read, SecretReadState::Absent), "{state:?}");
    wait_until(&runtime, |it| matches!(it.last_read, SecretReadState::InForce)).await;
}

#[tokio::test(start_paused = true)]
async fn a_secret_that_cannot_be_read_has_the_message_of_the_api_server() {
    let message = "secrets \"own\" is forbidden: User \"u\" cannot get resource \"secrets\"";
    let api_server = FakeSecretServer::new(403, status(403, "Forbidden", message));
    let runtime = new_runtime();
    start_reader(&api_server, &runtime).await;
    let state = own_state(&runtime).expect("it is named");
    assert_eq!(state.last_read, SecretReadState::Unreadable(message.to_owned()));
    // A proxy before the API server may send a page.
    let page = "<p>\n".repeat(10_000);
    api_server.set_answer(502, status(502, "", &page));
    let is_page = |it: &CertificateState| match &it.last_read {
        SecretReadState::Unreadable(text) => text.starts_with("<p> <p>") && text.len() <= 500,
        _ => false,
    };
    wait_until(&runtime, is_page).await;
}

#[tokio::test]
async fn a_response_that_is_no_secret_is_not_quoted() {
    let data = json!({"tls.key": ["bytes of the key"]});
    let body = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {}, "data": data});
    let api_server = FakeSecretServer::new(200, body);
    let name = NamespacedName::new("default", "own");
    let (_, response) = read_secret(api_server.client(), name).await;
    let text = "the response of the API server is not a Secret".to_owned();
    assert_eq!(response.err(), Some(SecretReadError::Unreadable(text)));
}

#[tokio::test]
async fn a_name_that_leads_to_another_namespace_is_not_requested() {
    let own = TestAuthority::new().issue(&["own.test"]);
    let api_server = FakeSecretServer::new(200, certificate_secret("1", &own));
    for name in ["../../kube-system/secrets/own", "..", "own?watch=true", "Own", ""] {
        let name = NamespacedName::new("default", name);
        let (_, response) = read_secret(api_server.client(), name).await;
        let fault = "its name is not made of DNS labels".to_owned();
        assert_eq!(response.err(), Some(SecretReadError::Faulty(fault)));
    }
    assert_eq!(api_server.requests(), [""; 0]);
    let (_, response) =
        read_secret(api_server.client(), NamespacedName::new("default", "own.v2")).await;
    assert!(response.is_ok());
}

/// Writes a kubeconfig for an API server at `address`, and returns options with it.
fn kubernetes_config(folder: &Path, address: SocketAddr) -> KubernetesConfig {
    let file = folder.join("kubeconfig");
    let kubeconfig = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": format!("http://{address}")}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "users": [{"name": "test", "user": {}}],
    });
    std::fs::write(&file, kubeconfig.to_string()).expect("a file");
    KubernetesConfig {
        kubeconfig: Some(file),
        system_namespace: SYSTEM_NAMESPACE.into(),
        pod: "one".into(),
        cluster_domain: "cluster.local".into(),
        webhook: None,
        webhook_url: None,
    }
}

async fn wait_for_connection(api_server: &TcpListener) {
    while api_server.accept().is_err() {
        sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_controller_without_tls_reads_no_secret() {
    let folder = tempfile::tempdir().expect("a folder");
    for (listen, reads_secrets) in [
        ("unix:/run/rouse/controller.sock", false),
        ("http://127.0.0.1:7100", false),
        ("https://127.0.0.1:7100", true),
    ] {
        let api_server = TcpListener::bind("127.0.0.1:0").expect("a free port");
        api_server.set_nonblocking(true).expect("a socket");
        let cluster =
            kubernetes_config(folder.path(), api_server.local_addr().expect("an address"));
        let config = ControllerConfig { listen: listen.into(), ..ControllerConfig::default() };
        let runtime = new_runtime();
        let platform =
            KubernetesPlatform::new(&cluster, Arc::clone(&runtime), config.serves_tls()).await;
        let platform = platform.expect("a client");
        let first_read = OnceSignal::new();
        let is_refused =
            |it: &CertificateState| it.last_read == SecretReadState::Unreadable(NO_TLS.to_owned());
        let has_asked = tokio::select! {
            () = platform.follow_named_secrets(first_read.clone()) => unreachable!("it never ends"),
            () = wait_for_connection(&api_server) => true,
            _ = wait_until(&runtime, is_refused) => false,
        };
        assert_eq!(has_asked, reads_secrets, "{listen}");
        // Streams do not wait for what never comes.
        assert_eq!(first_read.is_set(), !reads_secrets, "{listen}");
        let asks_later = api_server.accept().is_ok();
        assert!(!asks_later || reads_secrets, "{listen}");
    }
}

/// Maps a domain, whose clients show certificates of the authorities in the Secret `own` of the namespace `shop`.
fn name_client_ca(runtime: &ControllerRuntime) -> NamespacedName {
    let reference =
        json!({"apiVersion": "serving.knative.dev/v1", "kind": "Service", "name": "hello"});
    let annotations = json!({"rouse.dev/client-ca": "own"});
    let metadata = json!({"name": "www.shop.test", "namespace": "shop", "uid": "1", "annotations": annotations});
    runtime.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::DomainMapping,
        name: NamespacedName::new("shop", "www.shop.test"),
        object: Some(Box::new(json!({"metadata": metadata, "spec": {"ref": reference}}))),
    });
    NamespacedName::new("shop", "own")
}

#[tokio::test(start_paused = true)]
async fn only_the_authorities_of_a_secret_are_taken_for_clients() {
    let authority = TestAuthority::new();
    let own = authority.issue(&["own.test"]);
    let keys = [("tls.crt", own.chain_pem.as_str()), ("tls.key", own.key_pem.as_str())];
    let ca = authority.certificate_pem();
    let with_ca: Vec<(&str, &str)> = keys.into_iter().chain([("ca.crt", ca.as_str())]).collect();
    let api_server = FakeSecretServer::new(200, secret("1", &with_ca));
    let runtime = new_runtime();
    name_secrets(&runtime, json!({}));
    let name = name_client_ca(&runtime);
    let state = || {
        runtime.with_machine(|machine| machine.cluster().client_cas.by_secret.get(&name).cloned())
    };
    let first_read = OnceSignal::new();
    let (client, shared) = (api_server.client(), Arc::clone(&runtime));
    tokio::spawn(read_named_client_cas(client, shared, first_read.clone()));
    first_read.wait().await;
    let in_force = Some(Arc::new(authority.client_ca()));
    let first = state().expect("it is named");
    assert_eq!((&first.in_force, &first.last_read), (&in_force, &SecretReadState::InForce));
    let certificates =
        runtime.with_machine(|machine| machine.cluster().certificates.by_secret.len());
    assert_eq!(certificates, 0, "its certificate and key are not kept");
    sleep(READ_INTERVAL * 3).await;
    assert_eq!(runtime.metrics.secret_reads(SecretReadResult::Usable), 1);
    // Authorities that are missing or broken replace none.
    for (version, keys, fault) in [
        ("2", &keys[..], "it has no ca.crt"),
        ("3", &[("ca.crt", "x")][..], "ca.crt holds no certificate in PEM"),
    ] {
        api_server.set_answer(200, secret(version, keys));
        sleep(READ_INTERVAL * 2).await;
        let state = state().expect("it is named");
        let refused = SecretReadState::Refused(fault.to_owned());
        assert_eq!((state.in_force, state.last_read), (in_force.clone(), refused));
    }
    let path = "GET /api/v1/namespaces/shop/secrets/own";
    assert!(api_server.requests().iter().all(|it| it == path));
}
