//! Gateways and routes: statuses with the reasons of the specification, and the rules of hosts in the RouteTable.

use std::sync::Arc;

use common::{
    certificates::load,
    fixtures::TestAuthority,
    wire::{GatewayHostEntry, GatewayHostKey, PathMatch, RouteBackend},
};

use super::*;
use crate::model::cluster_state::SecretRead;

mod grpc_routes;
mod listed_hosts;

const PORT: u16 = 8080;

/// Returns a model with the class `rouse`, the Service `plain`, and an address of the gateway.
fn start() -> FakeApiServer {
    let mut api_server = FakeApiServer::new();
    apply_at(
        &mut api_server,
        ResourceKind::GatewayClass,
        &NamespacedName::new("", "rouse"),
        json!({"controllerName": "rouse.dev/gateway"}),
    );
    let balancer = json!({"spec": {"clusterIPs": ["10.96.0.9"]}, "status": {
        "loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]},
    }});
    let gateway = NamespacedName::new("knative-serving", "rouse-gateway");
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::Service,
        name: gateway,
        object: Some(Box::new(balancer)),
    });
    observe_plain(&mut api_server, Some("10.96.0.7"));
    api_server
}

/// Observes the Service `plain` with this ClusterIP; `None`: it is deleted.
fn observe_plain(api_server: &mut FakeApiServer, address: Option<&str>) {
    api_server.step(plain_observed(address));
}

/// Returns the event of the Service `plain` with this ClusterIP; `None`: it is deleted.
fn plain_observed(address: Option<&str>) -> ControllerEvent {
    let object = address.map(|address| {
        Box::new(json!({
            "metadata": {"name": "plain", "namespace": NAMESPACE},
            "spec": {"clusterIP": address, "ports": [{"port": PORT}]},
        }))
    });
    ControllerEvent::ObjectObserved { resource: ResourceKind::Service, name: name("plain"), object }
}

fn apply_at(
    api_server: &mut FakeApiServer,
    resource: ResourceKind,
    name: &NamespacedName,
    spec: Value,
) {
    let body = json!({
        "apiVersion": resource.api_version(), "kind": resource.kind(),
        "metadata": {"name": name.name.as_str(), "namespace": name.namespace.as_str()},
        "spec": spec,
    });
    for event in api_server.apply(resource, name, body) {
        api_server.step(event);
    }
    // Later objects are younger.
    api_server.now = api_server.now.plus_ms(2000);
}

fn listener(name: &str, hostname: Option<&str>) -> Value {
    let mut listener = json!({"name": name, "port": 80, "protocol": "HTTP"});
    if let Some(hostname) = hostname {
        listener["hostname"] = hostname.into();
    }
    listener
}

fn apply_gateway(api_server: &mut FakeApiServer, listeners: Value) {
    let spec = json!({"gatewayClassName": "rouse", "listeners": listeners});
    apply_at(api_server, ResourceKind::Gateway, &name("gateway"), spec);
}

fn route(backends: Value, paths: &[&str]) -> Value {
    let path = |it: &&str| json!({"path": {"type": "PathPrefix", "value": it}});
    let matches: Vec<Value> = paths.iter().map(path).collect();
    json!({
        "parentRefs": [{"name": "gateway"}],
        "rules": [{"matches": matches, "backendRefs": backends}],
    })
}

fn plain_backend() -> Value {
    json!([{"name": "plain", "port": PORT}])
}

fn apply_route(api_server: &mut FakeApiServer, route_name: &str, spec: Value) {
    apply_at(api_server, ResourceKind::HttpRoute, &name(route_name), spec);
}

/// Returns the conditions of the only parent of Rouse of an HTTPRoute, each as its reason.
fn reasons(api_server: &FakeApiServer, route_name: &str) -> (String, String) {
    reasons_of(api_server, ResourceKind::HttpRoute, route_name)
}

fn reasons_of(
    api_server: &FakeApiServer,
    resource: ResourceKind,
    route_name: &str,
) -> (String, String) {
    let parents = &api_server.object(resource, route_name)["status"]["parents"];
    let parents = parents.as_array().expect("a status");
    let own = parents.iter().find(|it| it["controllerName"] == "rouse.dev/gateway");
    let conditions = &own.expect("an own entry")["conditions"];
    let reason = |at: usize, kind: &str| {
        assert_eq!(conditions[at]["type"], kind);
        conditions[at]["reason"].as_str().expect("a reason").to_owned()
    };
    (reason(0, "Accepted"), reason(1, "ResolvedRefs"))
}

fn host(api_server: &FakeApiServer, key: &str) -> Option<GatewayHostEntry> {
    let key: GatewayHostKey = key.parse().expect("a key");
    api_server.table().gateway_hosts.get(&key).cloned()
}

fn targets(entry: &GatewayHostEntry) -> Vec<RouteBackend> {
    entry.rules.iter().flat_map(|it| &it.backends).map(|it| it.target.clone()).collect()
}

#[test]
fn a_route_leads_from_a_host_to_a_service_of_the_cluster_and_to_one_of_knative() {
    let mut api_server = start();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    apply_gateway(&mut api_server, json!([listener("http", Some("*.example.test"))]));
    let key = "http://*.example.test";
    assert_eq!(host(&api_server, key).expect("the listener's host").rules, []);
    let backends = json!([
        {"name": "plain", "port": PORT, "weight": 3}, {"name": "hello", "port": 80},
        {"name": "plain", "port": PORT, "weight": 0},
    ]);
    apply_route(&mut api_server, "shop", route(backends, &["/a"]));
    let entry = host(&api_server, key).expect("the host");
    let found = targets(&entry);
    let [RouteBackend::Plain(plain), RouteBackend::Service(service)] = &found[..] else {
        panic!("{entry:?}")
    };
    assert_eq!((plain.address, &plain.name), (([10, 96, 0, 7], PORT).into(), &name("plain:8080")));
    assert_eq!(service, &name("hello"));
    assert_eq!(entry.rules[0].backends[0].weight.get(), 3);
    assert_eq!(reasons(&api_server, "shop"), ("Accepted".into(), "ResolvedRefs".into()));
    api_server.delete_as_user(ResourceKind::HttpRoute, "shop");
    assert_eq!(host(&api_server, key).expect("the listener's host").rules, []);
    api_server.delete_as_user(ResourceKind::Gateway, "gateway");
    assert_eq!(host(&api_server, key), None);
}

#[test]
fn a_gateway_states_its_addresses_its_listeners_and_their_routes() {
    let mut api_server = start();
    let unsupported = json!({"name": "tcp", "port": 80, "protocol": "TCP", "hostname": "t.test"});
    let other_port = json!({"name": "port", "port": 8080, "protocol": "HTTP"});
    let kinds = json!([{"kind": "TCPRoute"}]);
    let wrong_kind = json!({
        "name": "kind", "port": 80, "protocol": "HTTP", "hostname": "k.test",
        "allowedRoutes": {"kinds": kinds},
    });
    let twice = [listener("one", Some("a.test")), listener("two", Some("a.test"))];
    let [one, two] = twice;
    // One listener can be served, so that the Gateway is accepted in spite of the others.
    let http = listener("http", None);
    apply_gateway(&mut api_server, json!([http, unsupported, other_port, wrong_kind, one, two]));
    apply_route(&mut api_server, "shop", route(plain_backend(), &["/"]));
    let status = &api_server.object(ResourceKind::Gateway, "gateway")["status"];
    assert_eq!(status["addresses"], json!([{"type": "IPAddress", "value": "192.0.2.1"}]));
    let gateway = |kind: &str| api_server.condition(ResourceKind::Gateway, "gateway", kind);
    assert!(gateway("Accepted").starts_with("True ListenersNotValid"));
    assert!(gateway("Programmed").starts_with("True Programmed"));
    let facts = |at: usize| {
        let listener = &status["listeners"][at];
        let reasons = listener["conditions"].as_array().expect("conditions").iter();
        let reasons: Vec<&str> = reasons.filter_map(|it| it["reason"].as_str()).collect();
        (listener["attachedRoutes"].as_u64(), reasons.join(" "))
    };
    let expected = [
        (Some(1), "Accepted NoConflicts ResolvedRefs Programmed"),
        (Some(0), "UnsupportedProtocol NoConflicts ResolvedRefs Invalid"),
        (Some(0), "PortUnavailable NoConflicts ResolvedRefs Invalid"),
        (Some(0), "Accepted NoConflicts InvalidRouteKinds Invalid"),
        (Some(0), "Accepted HostnameConflict ResolvedRefs Invalid"),
        (Some(0), "Accepted HostnameConflict ResolvedRefs Invalid"),
    ];
    for (at, (routes, reasons)) in expected.into_iter().enumerate() {
        assert_eq!(facts(at), (routes, reasons.to_owned()), "listener {at}");
    }
    let class = NamespacedName::new("", "rouse");
    let class = &api_server.objects[&(ResourceKind::GatewayClass, class)]["status"];
    assert_eq!(class["conditions"][0]["reason"], "Accepted");
    assert_eq!(class["observedGeneration"], Value::Null, "the kind has no such field");
    let features = class["supportedFeatures"].as_array().expect("features");
    assert!(features.contains(&json!({"name": "GRPCRoute"})), "{features:?}");
}

#[test]
fn a_parent_states_the_reason_for_which_a_route_is_not_attached() {
    let mut api_server = start();
    let foreign = json!({
        "name": "labelled", "port": 80, "protocol": "HTTP", "hostname": "l.test",
        "allowedRoutes": {"namespaces": {
            "from": "Selector", "selector": {"matchLabels": {"team": "a"}},
        }},
    });
    apply_gateway(&mut api_server, json!([listener("http", Some("a.test")), foreign]));
    let with = |field: &str, value: Value| {
        let mut spec = route(plain_backend(), &["/"]);
        spec["parentRefs"][0][field] = value;
        spec
    };
    let mut other_host = route(plain_backend(), &["/"]);
    other_host["hostnames"] = json!(["b.test"]);
    let mut mirror = route(plain_backend(), &["/"]);
    mirror["rules"][0]["filters"] = json!([{"type": "RequestMirror"}]);
    for (spec, expected) in [
        (with("sectionName", "http".into()), "Accepted"),
        (with("sectionName", "none".into()), "NoMatchingParent"),
        (with("port", 81.into()), "NoMatchingParent"),
        (with("sectionName", "labelled".into()), "NotAllowedByListeners"),
        (other_host, "NoMatchingListenerHostname"),
        (mirror, "UnsupportedValue"),
    ] {
        apply_route(&mut api_server, "shop", spec.clone());
        assert_eq!(reasons(&api_server, "shop").0, expected, "{spec}");
        let rules = host(&api_server, "http://a.test").expect("the listener's host").rules.len();
        assert_eq!(rules, usize::from(expected == "Accepted"), "{spec}");
    }
    // The namespace gets the label.
    let labels = json!({"metadata": {"name": NAMESPACE, "uid": "7", "labels": {"team": "a"}}});
    apply_route(&mut api_server, "shop", with("sectionName", "labelled".into()));
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::Namespace,
        name: NamespacedName::new("", NAMESPACE),
        object: Some(Box::new(labels)),
    });
    assert_eq!(reasons(&api_server, "shop").0, "Accepted");
    // A Gateway of another controller is none of Rouse's.
    apply_route(&mut api_server, "other", with("name", "unknown".into()));
    let other = api_server.object(ResourceKind::HttpRoute, "other");
    assert_eq!(other["status"], Value::Null);
}

/// The route would be accepted, and get no request.
#[test]
fn a_route_is_not_accepted_if_more_specific_listeners_have_all_its_hosts() {
    let mut api_server = start();
    let at_http = |hostnames: Value| {
        let mut spec = route(plain_backend(), &["/"]);
        spec["parentRefs"][0]["sectionName"] = "http".into();
        spec["hostnames"] = hostnames;
        spec
    };
    let listeners = json!([listener("http", None), listener("below", Some("*.a.test"))]);
    apply_gateway(&mut api_server, listeners);
    apply_route(&mut api_server, "shop", at_http(json!(["x.a.test"])));
    assert_eq!(reasons(&api_server, "shop").0, "NoMatchingListenerHostname");
    assert_eq!(host(&api_server, "http://x.a.test"), None);
    apply_route(&mut api_server, "shop", at_http(json!(["x.a.test", "b.test"])));
    assert_eq!(reasons(&api_server, "shop").0, "Accepted");
    assert_eq!(host(&api_server, "http://x.a.test"), None);
    assert_eq!(host(&api_server, "http://b.test").expect("the route's host").rules.len(), 1);
    // The host is free once the other listener is gone.
    apply_route(&mut api_server, "shop", at_http(json!(["x.a.test"])));
    apply_gateway(&mut api_server, json!([listener("http", None)]));
    assert_eq!(reasons(&api_server, "shop").0, "Accepted");
    assert_eq!(host(&api_server, "http://x.a.test").expect("the route's host").rules.len(), 1);
}

#[test]
fn a_backend_that_cannot_be_resolved_keeps_its_share() {
    let mut api_server = start();
    apply_gateway(&mut api_server, json!([listener("http", None)]));
    for (backend, expected) in [
        (json!({"name": "missing", "port": 80}), "BackendNotFound"),
        (json!({"name": "plain", "port": 81}), "BackendNotFound"),
        (json!({"name": "plain"}), "BackendNotFound"),
        (json!({"name": "plain", "kind": "Other", "group": "x.test"}), "InvalidKind"),
        (json!({"name": "plain", "port": PORT, "namespace": "other"}), "RefNotPermitted"),
    ] {
        apply_route(&mut api_server, "shop", route(json!([backend]), &["/"]));
        assert_eq!(reasons(&api_server, "shop"), ("Accepted".into(), expected.into()));
        let entry = host(&api_server, "http://*").expect("the host");
        // Without its share, the requests that are to fail would go to the other backends.
        assert_eq!(targets(&entry), [RouteBackend::Unresolved], "{backend}");
    }
    apply_route(&mut api_server, "shop", route(plain_backend(), &["/"]));
    let is_plain = |api_server: &FakeApiServer| {
        let entry = host(api_server, "http://*").expect("the host");
        matches!(targets(&entry)[..], [RouteBackend::Plain(_)])
    };
    assert!(is_plain(&api_server));
    observe_plain(&mut api_server, None);
    assert!(!is_plain(&api_server), "the Service is gone");
    observe_plain(&mut api_server, Some("10.96.0.8"));
    assert!(is_plain(&api_server));
    assert_eq!(reasons(&api_server, "shop").1, "ResolvedRefs");
}

/// Requests of such a Route would find the same rule again, without an end.
#[test]
fn no_route_leads_to_the_gateway_itself() {
    let mut api_server = start();
    apply_gateway(&mut api_server, json!([listener("http", None)]));
    let from =
        json!({"group": "gateway.networking.k8s.io", "kind": "HTTPRoute", "namespace": NAMESPACE});
    let grant = json!({"from": [from], "to": [{"group": "", "kind": "Service"}]});
    let grant_name = NamespacedName::new("knative-serving", "grant");
    apply_at(&mut api_server, ResourceKind::ReferenceGrant, &grant_name, grant);
    let backend = json!([{"name": "rouse-gateway", "namespace": "knative-serving", "port": 80}]);
    apply_route(&mut api_server, "shop", route(backend, &["/"]));
    assert_eq!(reasons(&api_server, "shop").1, "RefNotPermitted");
    let parents = &api_server.object(ResourceKind::HttpRoute, "shop")["status"]["parents"];
    let message = parents[0]["conditions"][1]["message"].as_str().expect("a message");
    assert!(message.contains("is the gateway"), "{message}");
    let entry = host(&api_server, "http://*").expect("the host");
    assert_eq!(targets(&entry), [RouteBackend::Unresolved]);
}

/// Two routes of one host: their matches are ordered over both.
#[test]
fn matches_of_all_routes_of_a_host_have_one_order() {
    let mut api_server = start();
    apply_gateway(&mut api_server, json!([listener("http", None)]));
    let rule = |matched: Value| json!({"matches": [matched], "backendRefs": plain_backend()});
    let path = |kind: &str, value: &str| json!({"path": {"type": kind, "value": value}});
    let with_method = json!({"method": "GET", "path": {"type": "PathPrefix", "value": "/a"}});
    let with_header = json!({
        "path": {"type": "PathPrefix", "value": "/a"}, "headers": [{"name": "V", "value": "1"}],
    });
    let spec = |rules: Vec<Value>| json!({"parentRefs": [{"name": "gateway"}], "rules": rules});
    // The older route has the later name, so that age and name would give different orders.
    let older = vec![rule(path("PathPrefix", "/a")), rule(with_header), rule(path("Exact", "/"))];
    apply_route(&mut api_server, "z", spec(older));
    let younger =
        vec![rule(path("PathPrefix", "/a")), rule(path("PathPrefix", "/a/b")), rule(with_method)];
    apply_route(&mut api_server, "a", spec(younger));
    let entry = host(&api_server, "http://*").expect("the host");
    let order: Vec<String> = entry
        .rules
        .iter()
        .map(|it| {
            let path = match &it.path {
                PathMatch::Exact(path) => format!("={path}"),
                PathMatch::Prefix(prefix) => prefix.to_string(),
            };
            let method = it.method.as_deref().unwrap_or_default();
            format!("{} {path} {method}{}", it.route.name, it.headers.len())
        })
        .collect();
    let expected = ["z =/ 0", "a /a/b 0", "a /a GET0", "z /a 1", "z /a 0", "a /a 0"];
    assert_eq!(order, expected);
}

#[test]
fn entries_of_other_controllers_stay_and_conditions_keep_their_times() {
    let mut api_server = start();
    apply_gateway(&mut api_server, json!([listener("http", None)]));
    apply_route(&mut api_server, "shop", route(plain_backend(), &["/"]));
    let at = (ResourceKind::HttpRoute, name("shop"));
    let foreign = json!({"controllerName": "x.test/c", "parentRef": {"name": "g"}});
    let mut object = api_server.objects[&at].clone();
    let own = object["status"]["parents"][0].clone();
    // The foreign entry comes first, so that a write by position would replace it.
    object["status"]["parents"] = json!([foreign, own]);
    api_server.objects.insert(at.clone(), object.clone());
    let (resource, route_name) = at;
    let object = Some(Box::new(object));
    api_server.step(ControllerEvent::ObjectObserved { resource, name: route_name, object });
    let time = |api_server: &FakeApiServer, at: usize| {
        let status = &api_server.object(ResourceKind::HttpRoute, "shop")["status"];
        status["parents"][1]["conditions"][at]["lastTransitionTime"].clone()
    };
    let before = (time(&api_server, 0), time(&api_server, 1));
    // The Service goes, which changes one of the two conditions.
    api_server.now = api_server.now.plus_ms(60_000);
    observe_plain(&mut api_server, None);
    assert_eq!(reasons(&api_server, "shop").1, "BackendNotFound");
    let parents = &api_server.object(ResourceKind::HttpRoute, "shop")["status"]["parents"];
    assert_eq!(parents[0], foreign);
    let after = (time(&api_server, 0), time(&api_server, 1));
    assert!(after.0 == before.0 && after.1 != before.1, "{before:?} {after:?}");
}

/// Requests must not go to routes of another namespace because a mapping waits for its service.
#[test]
fn a_host_of_a_domain_mapping_is_reserved_whether_the_mapping_is_in_force_or_not() {
    let mut api_server = start();
    let (exact, any) = ("http://www.shop.test", "http://*");
    let listeners = [listener("exact", Some("www.shop.test")), listener("any", None)];
    apply_gateway(&mut api_server, json!(listeners));
    let entries = [exact, any].map(|key| host(&api_server, key).expect("the listener's host"));
    let assert_reserved = |api_server: &FakeApiServer, expected: &[&str]| {
        let table = api_server.table();
        assert_eq!(table.reserved_hosts.iter().collect::<Vec<_>>(), expected);
        let other = super::table(&api_server.start_replica());
        assert_eq!(other.gateway_hosts, table.gateway_hosts);
        assert_eq!(other.reserved_hosts, table.reserved_hosts);
        let present = [exact, any].map(|key| host(api_server, key).expect("it stays"));
        assert_eq!(present, entries, "no rules are sent again");
    };
    assert_reserved(&api_server, &[]);
    api_server.claim_domain("www.shop.test", NAMESPACE);
    api_server.map_service_domain("www.shop.test", "shop", json!({}));
    assert_reserved(&api_server, &["www.shop.test"]);
    let is_in_force = |api_server: &FakeApiServer| {
        let services = api_server.table().services;
        let rules = services.get(&name("shop")).and_then(|it| it.gateway_rules.clone());
        rules.is_some_and(|it| it.mapped_domains.iter().any(|it| it.host == "www.shop.test"))
    };
    assert!(!is_in_force(&api_server), "there is no service yet");
    api_server.apply_service("shop", "hello:v1", 0, Value::Null);
    assert!(is_in_force(&api_server));
    assert_reserved(&api_server, &["www.shop.test"]);
    api_server.map_service_domain("all", "shop", json!({"rouse.dev/host": "*.shop.test"}));
    assert_reserved(&api_server, &["www.shop.test"]);
    api_server.claim_domain("shop.test", NAMESPACE);
    assert_reserved(&api_server, &["*.shop.test", "www.shop.test"]);
    // A mapping without the claim has no host.
    api_server.claim_domain("www.shop.test", "other");
    assert_reserved(&api_server, &["*.shop.test"]);
    api_server.delete_as_user(ResourceKind::DomainMapping, "all");
    assert_reserved(&api_server, &[]);
}

/// A replica that starts sends the same hosts, and nothing before all objects are known.
#[test]
fn a_replica_that_starts_has_the_same_hosts() {
    let mut api_server = start();
    apply_gateway(&mut api_server, json!([listener("http", Some("a.test"))]));
    apply_route(&mut api_server, "shop", route(json!([{"name": "missing", "port": 80}]), &["/"]));
    let other = api_server.start_replica();
    assert_eq!(table(&other).gateway_hosts, api_server.table().gateway_hosts);
    assert_eq!(api_server.table().gateway_hosts.len(), 1);
}

#[test]
fn hosts_and_statuses_end_with_the_last_class_and_return_with_it() {
    let mut api_server = start();
    apply_gateway(&mut api_server, json!([listener("http", Some("a.test"))]));
    apply_route(&mut api_server, "shop", route(plain_backend(), &["/"]));
    let class = NamespacedName::new("", "rouse");
    for event in api_server.delete(ResourceKind::GatewayClass, &class) {
        api_server.step(event);
    }
    assert_eq!(host(&api_server, "http://a.test"), None);
    let status = &api_server.object(ResourceKind::HttpRoute, "shop")["status"];
    assert!(status["parents"].as_array().is_none_or(Vec::is_empty), "{status}");
    // Meanwhile the Service is deleted, which nothing depends on now.
    observe_plain(&mut api_server, None);
    assert_eq!(host(&api_server, "http://a.test"), None);
    let spec = json!({"controllerName": "rouse.dev/gateway"});
    apply_at(&mut api_server, ResourceKind::GatewayClass, &class, spec);
    let entry = host(&api_server, "http://a.test").expect("the listener's host");
    assert_eq!(targets(&entry), [RouteBackend::Unresolved]);
    observe_plain(&mut api_server, Some("10.96.0.7"));
    let entry = host(&api_server, "http://a.test").expect("the listener's host");
    assert!(matches!(targets(&entry)[..], [RouteBackend::Plain(_)]), "{entry:?}");
}

fn https_listener(hostname: Option<&str>, certificates: &[Value]) -> Value {
    let mut listener = listener("https", hostname);
    listener["port"] = 443.into();
    listener["protocol"] = "HTTPS".into();
    listener["tls"] = json!({"certificateRefs": certificates});
    listener
}

/// Certificate of a Secret that the controller has read.
fn usable_secret(hosts: &[&str]) -> SecretRead {
    let material = TestAuthority::new().issue_valid(hosts, 0, 2_000_000).material();
    let facts = load(&material).expect("it is usable").facts;
    SecretRead::Usable { material: Arc::new(material), facts }
}

/// Returns the reason of a condition of the first listener.
fn listener_reason(api_server: &FakeApiServer, kind: &str) -> String {
    let status = &api_server.object(ResourceKind::Gateway, "gateway")["status"];
    let conditions = status["listeners"][0]["conditions"].as_array().expect("conditions");
    let condition = conditions.iter().find(|it| it["type"] == kind).expect("the condition");
    condition["reason"].as_str().expect("a reason").to_owned()
}

#[test]
fn a_listener_with_tls_has_the_certificate_of_its_secret() {
    let mut api_server = start();
    let certificate = json!({"name": "tls"});
    let listeners =
        json!([https_listener(Some("*.a.test"), &[certificate]), listener("http", None)]);
    apply_gateway(&mut api_server, listeners);
    let mut spec = route(plain_backend(), &["/"]);
    spec["hostnames"] = json!(["x.a.test"]);
    apply_route(&mut api_server, "shop", spec);
    assert_eq!(api_server.named_secrets, BTreeSet::from([name("tls")]));
    let entry = host(&api_server, "https://x.a.test").expect("the route's host");
    assert_eq!((entry.certificates, entry.rules.len()), (vec![name("tls")], 1));
    let entry = host(&api_server, "http://x.a.test").expect("the route's host");
    assert_eq!((entry.certificates, entry.rules.len()), (vec![], 1));
    let entry = host(&api_server, "https://*.a.test").expect("the listener's host");
    assert_eq!((entry.certificates, entry.rules.len()), (vec![name("tls")], 0));
    // The Secret was named, and has not been read yet.
    assert_eq!(listener_reason(&api_server, "ResolvedRefs"), "InvalidCertificateRef");
    api_server.read_secret(&name("tls"), usable_secret(&["*.a.test"]));
    assert_eq!(listener_reason(&api_server, "ResolvedRefs"), "ResolvedRefs");
    assert_eq!(listener_reason(&api_server, "Programmed"), "Programmed");
    api_server.read_secret(&name("tls"), SecretRead::Absent);
    assert_eq!(listener_reason(&api_server, "ResolvedRefs"), "InvalidCertificateRef");
    api_server.delete_as_user(ResourceKind::Gateway, "gateway");
    assert_eq!(api_server.named_secrets, BTreeSet::new());
}

/// As for clients of two kinds of keys, or for hosts of two certificates.
#[test]
fn a_listener_has_all_certificates_that_it_may_name() {
    let mut api_server = start();
    let names = ["ecdsa", "rsa", "ecdsa"].map(|name| json!({"name": name}));
    apply_gateway(&mut api_server, json!([https_listener(None, &names)]));
    let both = [name("ecdsa"), name("rsa")];
    assert_eq!(api_server.named_secrets, BTreeSet::from(both.clone()));
    let certificates = |api_server: &FakeApiServer| {
        host(api_server, "https://*").expect("the listener's host").certificates
    };
    assert_eq!(certificates(&api_server), both);
    api_server.read_secret(&name("ecdsa"), usable_secret(&["*.a.test"]));
    assert_eq!(listener_reason(&api_server, "ResolvedRefs"), "InvalidCertificateRef", "one of two");
    api_server.read_secret(&name("rsa"), usable_secret(&["*.a.test"]));
    assert_eq!(listener_reason(&api_server, "ResolvedRefs"), "ResolvedRefs");
    assert_eq!(listener_reason(&api_server, "Programmed"), "Programmed");
    // One that it may not name leaves the others in force, and is stated.
    let foreign = json!({"name": "tls", "namespace": "certificates"});
    let names = [names[0].clone(), foreign, json!({"name": "rsa", "kind": "ConfigMap"})];
    apply_gateway(&mut api_server, json!([https_listener(None, &names)]));
    assert_eq!(certificates(&api_server), both[..1]);
    assert_eq!(listener_reason(&api_server, "ResolvedRefs"), "RefNotPermitted");
    assert_eq!(listener_reason(&api_server, "Accepted"), "Accepted");
    apply_gateway(&mut api_server, json!([https_listener(None, &[])]));
    assert_eq!(listener_reason(&api_server, "ResolvedRefs"), "InvalidCertificateRef");
    assert_eq!(host(&api_server, "https://*"), None);
}

#[test]
fn a_certificate_of_another_namespace_needs_a_grant() {
    let mut api_server = start();
    let certificate = json!({"name": "tls", "namespace": "certificates"});
    apply_gateway(&mut api_server, json!([https_listener(None, &[certificate])]));
    assert_eq!(listener_reason(&api_server, "ResolvedRefs"), "RefNotPermitted");
    assert_eq!(api_server.named_secrets, BTreeSet::new(), "it is not even read");
    assert_eq!(host(&api_server, "https://*"), None);
    let grant = json!({
        "from": [{"group": "gateway.networking.k8s.io", "kind": "Gateway", "namespace": NAMESPACE}],
        "to": [{"group": "", "kind": "Secret"}],
    });
    let grant_name = NamespacedName::new("certificates", "grant");
    apply_at(&mut api_server, ResourceKind::ReferenceGrant, &grant_name, grant);
    let secret = NamespacedName::new("certificates", "tls");
    assert_eq!(api_server.named_secrets, BTreeSet::from([secret.clone()]));
    let entry = host(&api_server, "https://*").expect("the listener's host");
    assert_eq!(entry.certificates, [secret]);
    for event in api_server.delete(ResourceKind::ReferenceGrant, &grant_name) {
        api_server.step(event);
    }
    assert_eq!((api_server.named_secrets.len(), host(&api_server, "https://*")), (0, None));
}

#[test]
fn a_condition_that_ends_with_a_grant_has_the_time_of_its_end() {
    let mut api_server = start();
    let certificate = json!({"name": "tls", "namespace": "certificates"});
    let from =
        json!({"group": "gateway.networking.k8s.io", "kind": "Gateway", "namespace": NAMESPACE});
    let grant = json!({"from": [from], "to": [{"group": "", "kind": "Secret"}]});
    let grant_name = NamespacedName::new("certificates", "grant");
    apply_at(&mut api_server, ResourceKind::ReferenceGrant, &grant_name, grant);
    apply_gateway(&mut api_server, json!([https_listener(None, &[certificate])]));
    let secret = NamespacedName::new("certificates", "tls");
    api_server.read_secret(&secret, usable_secret(&["*.a.test"]));
    assert_eq!(listener_reason(&api_server, "ResolvedRefs"), "ResolvedRefs");
    let time = |api_server: &FakeApiServer| {
        let status = &api_server.object(ResourceKind::Gateway, "gateway")["status"];
        let conditions = status["listeners"][0]["conditions"].as_array().expect("conditions");
        let condition = conditions.iter().find(|it| it["type"] == "ResolvedRefs");
        condition.expect("the condition")["lastTransitionTime"].clone()
    };
    let met_since = time(&api_server);
    // Nothing of the Gateway itself changes: its listener depends on the grant alone.
    api_server.now = api_server.now.plus_ms(60_000);
    for event in api_server.delete(ResourceKind::ReferenceGrant, &grant_name) {
        api_server.step(event);
    }
    assert_eq!(listener_reason(&api_server, "ResolvedRefs"), "RefNotPermitted");
    assert_ne!(time(&api_server), met_since);
}
