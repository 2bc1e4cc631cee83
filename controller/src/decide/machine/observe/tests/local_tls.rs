//! Https for the names of services inside the cluster: certificates that the controller signs, ports, URLs and
//! conditions.

use std::sync::Arc;

use common::{fixtures::TestAuthority, wire::CertificateMaterial};

use super::*;

/// Returns a model whose controllers can sign certificates for names inside the cluster.
fn start() -> FakeApiServer {
    let mut api_server = FakeApiServer::new();
    let other = api_server.other_replica.as_mut();
    for machine in std::iter::once(&mut api_server.machine).chain(other) {
        Arc::make_mut(&mut machine.cluster.settings).signs_local_certificates = true;
    }
    api_server
}

fn set_local_tls(api_server: &mut FakeApiServer, value: &str) {
    api_server.set_config_map("config-network", json!({"cluster-local-domain-tls": value}));
}

/// Returns a model with https inside the cluster, and the service `hello`.
fn start_enabled() -> FakeApiServer {
    let mut api_server = start();
    set_local_tls(&mut api_server, "Enabled");
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    api_server
}

/// Signs a certificate for the names of a service, as the signer of each replica does.
fn sign(api_server: &mut FakeApiServer, service: &str) -> Arc<CertificateMaterial> {
    let material = Arc::new(TestAuthority::new().issue(&["hello.default"]).material());
    let signed = Arc::clone(&material);
    let service = name(service);
    api_server.step(ControllerEvent::LocalCertificateSigned { service, material: signed });
    material
}

/// Returns the certificates that are wanted, with the numbers of their requests.
fn wanted(api_server: &FakeApiServer) -> Vec<(NamespacedName, u64)> {
    let all = api_server.machine.cluster.local_certificates.iter();
    all.map(|(service, state)| (service.clone(), state.request)).collect()
}

fn provisioned(api_server: &FakeApiServer) -> String {
    api_server.condition(ResourceKind::Route, "hello", "CertificateProvisioned")
}

fn address(api_server: &FakeApiServer) -> &Value {
    &api_server.object(ResourceKind::Route, "hello")["status"]["address"]["url"]
}

/// Returns the ports of a Service or of a slice.
fn ports(all: &Value) -> Vec<u64> {
    let all = all.as_array().into_iter().flatten();
    all.filter_map(|it| it["port"].as_u64()).collect()
}

fn certificate_name(service: &str) -> NamespacedName {
    format!("default/{service}:443").parse().expect("a name with a port")
}

#[test]
fn a_service_serves_https_once_its_certificate_is_signed() {
    let mut api_server = start_enabled();
    let table = api_server.table();
    assert!(table.services[&name("hello")].serves_local_tls);
    assert_eq!(table.certificates[&certificate_name("hello")].material, None);
    assert_eq!(wanted(&api_server), [(name("hello"), 1)]);
    let expected = "Unknown CertificateNotReady: Certificate hello-local is not ready.";
    assert_eq!(provisioned(&api_server), expected);
    let material = sign(&mut api_server, "hello");
    assert_eq!(
        api_server.table().certificates[&certificate_name("hello")].material,
        Some(material)
    );
    assert_eq!(provisioned(&api_server), "True : ");
    assert_eq!(address(&api_server), "https://hello.default.svc.cluster.local");
    // The public name has no certificate by this setting.
    let url = &api_server.object(ResourceKind::Route, "hello")["status"]["url"];
    assert_eq!(url, "http://hello.default.localhost");
    let service = api_server.object(ResourceKind::Service, "hello");
    assert_eq!(ports(&service["spec"]["ports"]), [80, 443]);
}

#[test]
fn a_renewed_certificate_replaces_the_one_before() {
    let mut api_server = start_enabled();
    let (first, second) = (sign(&mut api_server, "hello"), sign(&mut api_server, "hello"));
    assert!(first != second);
    let entry = api_server.table().certificates[&certificate_name("hello")].clone();
    assert_eq!(entry.material, Some(second));
}

#[test]
fn each_tag_has_a_certificate_of_its_own() {
    let mut api_server = start();
    set_local_tls(&mut api_server, "Enabled");
    let traffic = json!([{"latestRevision": true, "percent": 100, "tag": "blue"}]);
    api_server.apply_service("hello", "hello:v1", 0, traffic);
    assert_eq!(wanted(&api_server).len(), 2);
    sign(&mut api_server, "hello");
    let expected = "Unknown CertificateNotReady: Certificate blue-hello-local is not ready.";
    assert_eq!(provisioned(&api_server), expected);
    sign(&mut api_server, "blue-hello");
    assert_eq!(provisioned(&api_server), "True : ");
}

#[test]
fn a_tag_that_is_added_has_no_certificate_yet() {
    let mut api_server = start_enabled();
    sign(&mut api_server, "hello");
    assert_eq!(provisioned(&api_server), "True : ");
    let traffic = json!([{"latestRevision": true, "percent": 100, "tag": "blue"}]);
    api_server.apply_service("hello", "hello:v1", 0, traffic);
    let expected = "Unknown CertificateNotReady: Certificate blue-hello-local is not ready.";
    assert_eq!(provisioned(&api_server), expected);
    sign(&mut api_server, "blue-hello");
    assert_eq!(provisioned(&api_server), "True : ");
}

/// Activators keep the certificates that were signed before.
#[test]
fn a_controller_that_starts_leaves_routes_as_they_are_until_it_has_signed() {
    for is_signed in [true, false] {
        let mut api_server = start_enabled();
        if is_signed {
            sign(&mut api_server, "hello");
        }
        let mut started = machine().loading();
        Arc::make_mut(&mut started.cluster.settings).signs_local_certificates = true;
        let listed = observations(&api_server.objects, &[]);
        for event in listed.into_iter().chain([ControllerEvent::InitialListSynced]) {
            started.step(api_server.now, event);
        }
        let is_provisioned = |started: &ControllerStateMachine| {
            started.cluster.apps[&name("hello")].conditions.is_true(ConditionType::RouteCertificate)
        };
        assert_eq!(is_provisioned(&started), is_signed);
        // Also in a later plan of all apps.
        let data = json!({"cluster-local-domain-tls": "Enabled", "rollout-duration": "10"});
        let changed = ControllerEvent::ObjectObserved {
            resource: ResourceKind::ConfigMap,
            name: NamespacedName::new("knative-serving", "config-network"),
            object: Some(Box::new(json!({"data": data}))),
        };
        started.step(api_server.now, changed);
        assert_eq!(is_provisioned(&started), is_signed);
    }
}

#[test]
fn without_the_setting_nothing_of_https_is_left() {
    let mut api_server = start_enabled();
    sign(&mut api_server, "hello");
    set_local_tls(&mut api_server, "Disabled");
    let table = api_server.table();
    assert!(!table.services[&name("hello")].serves_local_tls);
    assert!(table.certificates.is_empty() && wanted(&api_server).is_empty());
    assert_eq!(provisioned(&api_server), "True TLSNotEnabled: external-domain-tls is not enabled");
    assert_eq!(address(&api_server), "http://hello.default.svc.cluster.local");
    let service = api_server.object(ResourceKind::Service, "hello");
    assert_eq!(ports(&service["spec"]["ports"]), [80]);
    // A certificate that was signed meanwhile has no effect.
    sign(&mut api_server, "hello");
    assert!(api_server.table().certificates.is_empty());
}

/// Ten thousand services may be created one by one.
#[test]
fn the_signer_gets_only_the_services_that_have_changed() {
    let mut api_server = start_enabled();
    assert_eq!(std::mem::take(&mut api_server.local_requests), [(name("hello"), Some(1))]);
    api_server.apply_service("other", "other:v1", 0, Value::Null);
    assert_eq!(std::mem::take(&mut api_server.local_requests), [(name("other"), Some(2))]);
    sign(&mut api_server, "hello");
    assert!(api_server.local_requests.is_empty(), "{:?}", api_server.local_requests);
    api_server.delete_as_user(ResourceKind::KnativeService, "other");
    assert_eq!(api_server.local_requests.last(), Some(&(name("other"), None)));
    assert_eq!(wanted(&api_server), [(name("hello"), 1)]);
}

/// The signer may never have seen the service gone, and signs by the number of the request.
#[test]
fn a_service_that_is_made_again_is_a_new_request() {
    let mut api_server = start_enabled();
    sign(&mut api_server, "hello");
    set_local_tls(&mut api_server, "Disabled");
    set_local_tls(&mut api_server, "Enabled");
    assert_eq!(wanted(&api_server), [(name("hello"), 2)]);
}

#[test]
fn a_controller_that_signs_nothing_says_that_the_setting_has_no_effect() {
    let mut api_server = FakeApiServer::new();
    set_local_tls(&mut api_server, "Enabled");
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    assert!(!api_server.table().services[&name("hello")].serves_local_tls);
    let expected = "True TLSNotEnabled: cluster-local-domain-tls has no effect here: ";
    assert!(provisioned(&api_server).starts_with(expected), "{}", provisioned(&api_server));
    assert_eq!(address(&api_server), "http://hello.default.svc.cluster.local");
}
