//! DomainMappings that share a host by their paths, and hosts with wildcards.

use common::wire::PathRule;

use super::*;
use crate::model::cluster_state::ClientCaRead;

const HOST: &str = "www.shop.test";

/// Returns a model with the services `shop` and `api`, and a claim of the host.
fn start() -> FakeApiServer {
    let mut api_server = FakeApiServer::new();
    for service in ["shop", "api"] {
        api_server.apply_service(service, "v1", 0, Value::Null);
    }
    api_server.claim_domain(HOST, NAMESPACE);
    api_server.now = api_server.now.plus_ms(2000);
    api_server
}

/// Returns the hosts of a service with the prefixes of their path rules, after a check that a replica that starts now
/// has the same table.
fn rules(api_server: &FakeApiServer, service: &str) -> Vec<String> {
    let other = table(&api_server.start_replica());
    assert_eq!(differences(&api_server.table(), &other), [""; 0]);
    rules_now(api_server, service)
}

/// Returns the hosts of a service with the prefixes of their path rules.
fn rules_now(api_server: &FakeApiServer, service: &str) -> Vec<String> {
    let rules =
        api_server.table().services[&name(service)].gateway_rules.clone().unwrap_or_default();
    let text = |it: common::wire::MappedDomain| match it.path_rule {
        Some(PathRule { prefix, strips_prefix: false }) => format!("{}{prefix}", it.host),
        Some(PathRule { prefix, strips_prefix: true }) => format!("{} without {prefix}", it.host),
        None => it.host,
    };
    rules.mapped_domains.into_iter().map(text).collect()
}

fn condition(api_server: &FakeApiServer, mapping: &str, condition_type: &str) -> String {
    api_server.condition(ResourceKind::DomainMapping, mapping, condition_type)
}

fn ready(api_server: &FakeApiServer, mapping: &str) -> String {
    condition(api_server, mapping, "Ready")
}

fn of_host(prefix: &str) -> Value {
    json!({"rouse.dev/host": HOST, "rouse.dev/path-prefix": prefix})
}

#[test]
fn mappings_share_a_host_by_their_paths() {
    let mut api_server = start();
    api_server.map_service_domain(HOST, "shop", json!({}));
    assert_eq!(rules(&api_server, "shop"), [HOST], "it has the host for itself");
    api_server.map_service_domain("shop-api", "api", of_host("/api/"));
    assert_eq!(ready(&api_server, "shop-api"), "True : ");
    assert_eq!(rules(&api_server, "shop"), ["www.shop.test/"], "no earlier activator serves it");
    assert_eq!(rules(&api_server, "api"), ["www.shop.test/api"]);
    let url = &api_server.object(ResourceKind::DomainMapping, "shop-api")["status"]["url"];
    assert_eq!(*url, "http://www.shop.test/api");
    let mut stripped = of_host("/api");
    stripped["rouse.dev/strip-prefix"] = "true".into();
    api_server.map_service_domain("shop-api", "api", stripped);
    assert_eq!(rules(&api_server, "api"), ["www.shop.test without /api"]);
    api_server.delete_as_user(ResourceKind::DomainMapping, "shop-api");
    assert_eq!(rules(&api_server, "shop"), [HOST], "it has the host for itself again");
    assert_eq!(rules(&api_server, "api"), [""; 0]);
}

#[test]
fn the_first_mapping_keeps_its_prefix_until_it_goes() {
    let mut api_server = start();
    api_server.map_service_domain("first", "shop", of_host("/a"));
    api_server.map_service_domain("second", "api", of_host("/a/"));
    let refusal = format!(
        "False DomainAlreadyClaimed: The path prefix /a of www.shop.test is already in use by \
         DomainMapping \"{NAMESPACE}/first\""
    );
    assert_eq!(
        (ready(&api_server, "first"), ready(&api_server, "second")),
        ("True : ".to_owned(), refusal)
    );
    assert_eq!(rules(&api_server, "shop"), ["www.shop.test/a"]);
    assert_eq!(rules(&api_server, "api"), [""; 0]);
    api_server.delete_as_user(ResourceKind::DomainMapping, "first");
    assert_eq!(ready(&api_server, "second"), "True : ");
    assert_eq!(rules(&api_server, "api"), ["www.shop.test/a"]);
    // A mapping that moves to another prefix makes room as well.
    api_server.map_service_domain("third", "shop", of_host("/a"));
    api_server.map_service_domain("second", "api", of_host("/b"));
    assert_eq!(rules(&api_server, "shop"), ["www.shop.test/a"]);
    assert_eq!(rules(&api_server, "api"), ["www.shop.test/b"]);
}

#[test]
fn a_wildcard_needs_the_claim_of_the_domain_above() {
    let mut api_server = start();
    let wildcard = json!({"rouse.dev/host": "*.shop.test"});
    api_server.map_service_domain("all-shops", "shop", wildcard);
    assert_eq!(
        condition(&api_server, "all-shops", "DomainClaimed"),
        "False DomainClaimFailed: no ClusterDomainClaim found for domain \"shop.test\""
    );
    assert_eq!(rules(&api_server, "shop"), [""; 0]);
    api_server.claim_domain("shop.test", NAMESPACE);
    assert_eq!(ready(&api_server, "all-shops"), "True : ");
    assert_eq!(rules(&api_server, "shop"), ["*.shop.test/"]);
    api_server.map_service_domain(HOST, "api", json!({}));
    assert_eq!(rules(&api_server, "api"), [HOST], "the exact host is another one");
}

/// Other services of the table stay as they are, however many hosts there are.
#[test]
fn hosts_of_mappings_are_reserved_one_by_one_also_if_they_serve_nothing() {
    let mut api_server = start();
    api_server.claim_domain("shop.test", NAMESPACE);
    api_server.map_service_domain("all-shops", "shop", json!({"rouse.dev/host": "*.shop.test"}));
    let before = api_server.table().services;
    let reserved = |api_server: &FakeApiServer| {
        let table = api_server.table();
        assert_eq!(table.services, before);
        assert_eq!(super::table(&api_server.start_replica()).reserved_hosts, table.reserved_hosts);
        table.reserved_hosts.into_iter().collect::<Vec<String>>()
    };
    assert_eq!(rules(&api_server, "shop"), ["*.shop.test/"]);
    assert_eq!(reserved(&api_server), ["*.shop.test"]);
    api_server.map_service_domain(HOST, "missing", json!({}));
    assert_eq!(reserved(&api_server), ["*.shop.test", HOST]);
    api_server.map_service_domain("eu.shop.test", "missing", json!({}));
    api_server.map_service_domain("a.b.shop.test", "missing", json!({}));
    let text = "their namespace may not use the others";
    assert_eq!(reserved(&api_server), ["*.shop.test", HOST], "{text}");
    api_server.claim_domain("eu.shop.test", NAMESPACE);
    api_server.claim_domain("a.b.shop.test", NAMESPACE);
    let others = ["*.shop.test", "a.b.shop.test", "eu.shop.test"];
    assert_eq!(reserved(&api_server), [&others[..], &[HOST]].concat());
    api_server.delete_as_user(ResourceKind::DomainMapping, HOST);
    assert_eq!(reserved(&api_server), others);
}

#[test]
fn a_route_keeps_the_paths_of_its_host() {
    let mut api_server = start();
    let own_host = api_server.table().services[&name("shop")].hosts[0].clone();
    api_server.claim_domain(&own_host, NAMESPACE);
    let annotations = json!({"rouse.dev/host": own_host, "rouse.dev/path-prefix": "/a"});
    let refusal = format!(
        "False DomainAlreadyClaimed: The domain name is already in use by Route \"{NAMESPACE}/shop\""
    );
    for service in ["api", "shop"] {
        api_server.map_service_domain("part", service, annotations.clone());
        assert_eq!(ready(&api_server, "part"), refusal);
        assert_eq!(rules(&api_server, service), [""; 0]);
    }
    assert_eq!(api_server.table().services[&name("shop")].hosts, [own_host]);
}

#[test]
fn all_paths_of_a_host_have_the_same_demand_for_certificates() {
    let mut api_server = start();
    api_server.map_service_domain(HOST, "shop", json!({}));
    let guarded = |ca: &str| {
        let mut annotations = of_host("/api");
        annotations["rouse.dev/client-ca"] = ca.into();
        annotations
    };
    api_server.map_service_domain("shop-api", "api", guarded("clients"));
    let material = std::sync::Arc::new(common::wire::ClientCaMaterial(vec![vec![1]]));
    api_server.read_client_ca(&name("clients"), ClientCaRead::Usable(material));
    let client_auth = |api_server: &FakeApiServer, service: &str| {
        let rules = api_server.table().services[&name(service)].gateway_rules.clone();
        rules.unwrap_or_default().mapped_domains.into_iter().next().map(|it| it.client_auth)
    };
    let of_api = client_auth(&api_server, "api");
    assert!(matches!(&of_api, Some(Some(it)) if it.ca == Some(name("clients"))), "{of_api:?}");
    assert_eq!(client_auth(&api_server, "shop"), of_api, "a handshake names no path");
    // Another demand cannot be met, so the mapping serves nothing.
    let mut other = guarded("others");
    other["rouse.dev/path-prefix"] = "/other".into();
    api_server.map_service_domain("other", "shop", other);
    let message = condition(&api_server, "other", "CertificateProvisioned");
    assert!(message.starts_with("False HostTLSConflict: "), "{message}");
    let lead = format!("DomainMapping \"{NAMESPACE}/shop-api\"");
    assert!(message.contains(&lead), "{message}");
    // A new replica has not read the Secret yet, and would have another table.
    assert_eq!(rules_now(&api_server, "shop"), ["www.shop.test/"]);
    api_server.delete_as_user(ResourceKind::DomainMapping, "other");
    api_server.delete_as_user(ResourceKind::DomainMapping, "shop-api");
    assert_eq!(client_auth(&api_server, "shop"), Some(None));
}

#[test]
fn all_paths_of_a_host_have_the_certificate_of_the_oldest_mapping_with_one() {
    let mut api_server = start();
    api_server.map_service_domain(HOST, "shop", json!({}));
    let map_with_tls = |api_server: &mut FakeApiServer, mapping: &str, secret: &str| {
        let prefix = format!("/{secret}");
        let reference =
            json!({"apiVersion": "serving.knative.dev/v1", "kind": "Service", "name": "api"});
        let body = json!({
            "apiVersion": "serving.knative.dev/v1beta1", "kind": "DomainMapping",
            "metadata": {"name": mapping, "namespace": NAMESPACE, "annotations": of_host(&prefix)},
            "spec": {"ref": reference, "tls": {"secretName": secret}},
        });
        for event in api_server.apply(ResourceKind::DomainMapping, &name(mapping), body) {
            api_server.step(event);
        }
        api_server.now = api_server.now.plus_ms(2000);
    };
    map_with_tls(&mut api_server, "one", "first");
    map_with_tls(&mut api_server, "two", "second");
    let certificates = |api_server: &FakeApiServer, service: &str| -> Vec<_> {
        let rules = api_server.table().services[&name(service)].gateway_rules.clone();
        rules.unwrap_or_default().mapped_domains.into_iter().map(|it| it.certificate).collect()
    };
    let first = Some(name("first"));
    assert_eq!(certificates(&api_server, "shop"), std::slice::from_ref(&first));
    assert_eq!(certificates(&api_server, "api"), [first.clone(), first]);
    let url = &api_server.object(ResourceKind::DomainMapping, HOST)["status"]["url"];
    assert_eq!(*url, "https://www.shop.test", "its host has a certificate");
    let message = condition(&api_server, "two", "CertificateProvisioned");
    assert!(message.starts_with("False HostTLSConflict: spec.tls differs"), "{message}");
    api_server.delete_as_user(ResourceKind::DomainMapping, "one");
    assert_eq!(certificates(&api_server, "shop"), [Some(name("second"))]);
}

#[test]
fn annotations_that_cannot_be_followed_serve_nothing() {
    let mut api_server = start();
    api_server.map_service_domain(HOST, "shop", json!({"rouse.dev/path-prefix": "/a;b"}));
    let message = condition(&api_server, HOST, "DomainClaimed");
    let expected = "False DomainClaimFailed: rouse.dev/path-prefix is \"/a;b\": ";
    assert!(message.starts_with(expected), "{message}");
    assert_eq!(rules(&api_server, "shop"), [""; 0]);
}
