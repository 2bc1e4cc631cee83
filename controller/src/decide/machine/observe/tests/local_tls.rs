//! Https for the names of services inside the cluster: certificates that the controller signs, ports, URLs and
//! conditions.

use std::sync::Arc;

use common::{fixtures::TestAuthority, wire::CertificateMaterial};

use super::*;
use crate::model::cluster_state::ConditionReason;

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

/// Returns the machine of a replica that can sign certificates, starts now, and has observed all objects.
fn start_signing_replica(api_server: &FakeApiServer) -> ControllerStateMachine {
    let mut started = machine().loading();
    Arc::make_mut(&mut started.cluster.settings).signs_local_certificates = true;
    let listed = observations(&api_server.objects, &[]);
    for event in listed.into_iter().chain([ControllerEvent::InitialListSynced]) {
        started.step(api_server.now, event);
    }
    started
}

fn signed(service: &str, material: &Arc<CertificateMaterial>) -> ControllerEvent {
    let material = Arc::clone(material);
    ControllerEvent::LocalCertificateSigned { service: name(service), material }
}

/// Signs a certificate for the names of a service, as the signer of each replica does.
fn sign(api_server: &mut FakeApiServer, service: &str) -> Arc<CertificateMaterial> {
    let material = Arc::new(TestAuthority::new().issue(&["hello.default"]).material());
    api_server.step(signed(service, &material));
    material
}

/// Returns the event of a signer that can sign nothing for `hello`, nor for a service that is gone.
fn signing_failed() -> ControllerEvent {
    let services = BTreeSet::from([name("gone"), name("hello")]);
    ControllerEvent::LocalSigningFailed { services, reason: "forbidden".to_owned() }
}

/// Returns the certificates that are wanted, with the numbers of their requests.
fn wanted(api_server: &FakeApiServer) -> Vec<(NamespacedName, u64)> {
    let all = api_server.machine.cluster.local_certificates.iter();
    all.map(|(service, state)| (service.clone(), state.request)).collect()
}

fn provisioned(api_server: &FakeApiServer) -> String {
    api_server.condition(ResourceKind::Route, "hello", "CertificateProvisioned")
}

/// Returns the status of the Route `hello` as a replica has it.
fn provisioned_at(replica: &ControllerStateMachine) -> ConditionStatus {
    replica.cluster.apps[&name("hello")].conditions.get(ConditionType::RouteCertificate)
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
        let mut started = start_signing_replica(&api_server);
        let is_provisioned = |started: &ControllerStateMachine| {
            provisioned_at(started) == ConditionStatus::True(None)
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

/// Both kinds of names share one condition.
#[test]
fn a_public_name_over_http_does_not_make_a_route_unready_at_a_start() {
    let mut api_server = start();
    let settings = json!({"cluster-local-domain-tls": "Enabled", "external-domain-tls": "Enabled"});
    api_server.set_config_map("config-network", settings);
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    sign(&mut api_server, "hello");
    assert!(provisioned(&api_server).starts_with("True HTTPDowngrade: "));
    let started = start_signing_replica(&api_server);
    assert!(matches!(provisioned_at(&started), ConditionStatus::True(Some(_))));
}

#[test]
fn a_controller_that_starts_and_cannot_sign_says_so_and_takes_nothing_away() {
    let mut api_server = start_enabled();
    let material = sign(&mut api_server, "hello");
    let mut started = start_signing_replica(&api_server);
    started.step(api_server.now, signing_failed());
    let message = "Certificate hello-local cannot be signed: forbidden. Activators keep a \
                   certificate that was signed before.";
    let expected = ConditionReason::new("CertificateNotReady", message);
    assert_eq!(provisioned_at(&started), ConditionStatus::Unknown(Some(expected)));
    // An entry without material takes none from an activator.
    assert_eq!(table(&started).certificates[&certificate_name("hello")].material, None);
    started.step(api_server.now, signed("hello", &material));
    assert_eq!(provisioned_at(&started), ConditionStatus::True(None));
}

#[test]
fn a_certificate_that_expires_while_nothing_can_be_signed_is_reported() {
    let mut api_server = start_enabled();
    let material = sign(&mut api_server, "hello");
    api_server.step(signing_failed());
    let expected = "False CertificateProvisionFailed: Certificate hello-local has expired, and \
                    cannot be signed again: forbidden.";
    assert_eq!(provisioned(&api_server), expected);
    let table = api_server.table();
    assert_eq!(table.certificates[&certificate_name("hello")].material, Some(material));
    sign(&mut api_server, "hello");
    assert_eq!(provisioned(&api_server), "True : ");
}

#[test]
fn a_new_service_whose_certificate_cannot_be_signed_says_why() {
    let mut api_server = start_enabled();
    api_server.step(signing_failed());
    let expected =
        "Unknown CertificateNotReady: Certificate hello-local cannot be signed: forbidden.";
    assert_eq!(provisioned(&api_server), expected);
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
