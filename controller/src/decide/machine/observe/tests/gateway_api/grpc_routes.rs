//! GRPCRoutes: rules for the paths of calls, and hosts that routes of both kinds want.

use common::wire::AppProtocol;

use super::*;

const HTTP: ResourceKind = ResourceKind::HttpRoute;
const GRPC: ResourceKind = ResourceKind::GrpcRoute;

/// Applies a route for these hosts, which leads to the Service `plain`. Later routes are younger.
fn apply_hosts(api_server: &mut FakeApiServer, kind: ResourceKind, route: &str, hosts: &[&str]) {
    let spec = json!({
        "parentRefs": [{"name": "gateway"}], "hostnames": hosts,
        "rules": [{"backendRefs": plain_backend()}],
    });
    apply_at(api_server, kind, &name(route), spec);
}

/// Returns the reason of the condition `Accepted`.
fn accepted(api_server: &FakeApiServer, kind: ResourceKind, route: &str) -> String {
    reasons_of(api_server, kind, route).0
}

/// Returns the routes that have rules for a host, as kind and name.
fn owners(api_server: &FakeApiServer, key: &str) -> Vec<(bool, String)> {
    let entry = host(api_server, key).map(|it| it.rules).unwrap_or_default();
    entry.iter().map(|it| (it.is_grpc, it.route.name.to_string())).collect()
}

fn listener_facts(api_server: &FakeApiServer, at: usize) -> (Vec<String>, Option<u64>) {
    let status = &api_server.object(ResourceKind::Gateway, "gateway")["status"];
    let listener = &status["listeners"][at];
    let kinds = listener["supportedKinds"].as_array().expect("kinds").iter();
    let kinds = kinds.filter_map(|it| it["kind"].as_str()).map(str::to_owned);
    (kinds.collect(), listener["attachedRoutes"].as_u64())
}

#[test]
fn a_grpc_route_leads_calls_by_service_and_method_over_http2() {
    let mut api_server = start();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    apply_gateway(&mut api_server, json!([listener("http", None)]));
    let method = |service: &str, method: Option<&str>| match method {
        Some(method) => json!({"method": {"service": service, "method": method}}),
        None => json!({"method": {"service": service}}),
    };
    let rule = |matches: Value| json!({"matches": matches, "backendRefs": plain_backend()});
    let spec = json!({
        "parentRefs": [{"name": "gateway"}], "hostnames": ["calls.test"],
        // The most general rule is first, so that the order of the table is not that of the spec.
        "rules": [
            {"backendRefs": [{"name": "hello", "port": 80}]},
            rule(json!([method("a.Shop", None)])),
            rule(json!([method("a.Shop", Some("Buy"))])),
        ],
    });
    apply_at(&mut api_server, GRPC, &name("calls"), spec);
    let resolved = ("Accepted".to_owned(), "ResolvedRefs".to_owned());
    assert_eq!(reasons_of(&api_server, GRPC, "calls"), resolved);
    let entry = host(&api_server, "http://calls.test").expect("the host");
    let paths: Vec<_> = entry.rules.iter().map(|it| (it.is_grpc, it.path.prefix())).collect();
    assert_eq!(paths, [(true, "/a.Shop/Buy"), (true, "/a.Shop"), (true, "")]);
    let RouteBackend::Plain(plain) = &entry.rules[0].backends[0].target else {
        panic!("{entry:?}")
    };
    assert_eq!(plain.protocol, AppProtocol::H2c, "the Service states none");
    let kinds = vec!["HTTPRoute".to_owned(), "GRPCRoute".to_owned()];
    assert_eq!(listener_facts(&api_server, 0), (kinds, Some(1)));
    api_server.delete_as_user(GRPC, "calls");
    assert_eq!(host(&api_server, "http://calls.test"), None);
}

#[test]
fn of_two_kinds_of_routes_the_older_one_has_a_host() {
    let mut api_server = start();
    apply_gateway(&mut api_server, json!([listener("http", None)]));
    apply_hosts(&mut api_server, HTTP, "web", &["a.test"]);
    apply_hosts(&mut api_server, GRPC, "calls", &["b.test", "*.test"]);
    assert_eq!(accepted(&api_server, GRPC, "calls"), "HostnameConflict");
    let parents = &api_server.object(GRPC, "calls")["status"]["parents"];
    let message = parents[0]["conditions"][0]["message"].as_str().expect("a message");
    assert!(message.starts_with("HTTPRoute default/web is older"), "{message}");
    assert_eq!(owners(&api_server, "http://a.test"), [(false, "web".to_owned())]);
    assert_eq!(host(&api_server, "http://b.test"), None, "a route is rejected as a whole");
    assert_eq!(listener_facts(&api_server, 0).1, Some(1));
    // Another one without a host in common is accepted.
    apply_hosts(&mut api_server, GRPC, "other", &["c.test"]);
    assert_eq!(accepted(&api_server, GRPC, "other"), "Accepted");
    // The host is free once the older one has left it.
    apply_hosts(&mut api_server, HTTP, "web", &["a.example"]);
    assert_eq!(accepted(&api_server, GRPC, "calls"), "Accepted");
    assert_eq!(owners(&api_server, "http://*.test"), [(true, "calls".to_owned())]);
    // Its age is that of its creation, so that it has the host when it returns.
    apply_hosts(&mut api_server, HTTP, "web", &["a.test"]);
    assert_eq!(accepted(&api_server, HTTP, "web"), "Accepted");
    assert_eq!(accepted(&api_server, GRPC, "calls"), "HostnameConflict");
    api_server.delete_as_user(HTTP, "web");
    assert_eq!(accepted(&api_server, GRPC, "calls"), "Accepted");
    apply_hosts(&mut api_server, HTTP, "web", &["a.test"]);
    assert_eq!(accepted(&api_server, HTTP, "web"), "HostnameConflict", "it is younger now");
    let mut other = api_server.start_replica();
    // The Service is a user's, and none of the objects that the API server of the tests stores.
    other.step(api_server.now, plain_observed(Some("10.96.0.7")));
    assert_eq!(table(&other).gateway_hosts, api_server.table().gateway_hosts);
}

/// A route that is rejected keeps no third one from its hosts.
#[test]
fn a_rejected_route_leaves_its_other_hosts_to_younger_ones() {
    let mut api_server = start();
    apply_gateway(&mut api_server, json!([listener("http", None)]));
    apply_hosts(&mut api_server, HTTP, "first", &["a.test"]);
    apply_hosts(&mut api_server, GRPC, "second", &["a.test", "b.test"]);
    apply_hosts(&mut api_server, HTTP, "third", &["b.test"]);
    let states = |api_server: &FakeApiServer| {
        [(GRPC, "second"), (HTTP, "third")].map(|(kind, route)| accepted(api_server, kind, route))
    };
    assert_eq!(states(&api_server), ["HostnameConflict", "Accepted"]);
    api_server.delete_as_user(HTTP, "first");
    assert_eq!(states(&api_server), ["Accepted", "HostnameConflict"]);
    assert_eq!(owners(&api_server, "http://b.test"), [(true, "second".to_owned())]);
}

#[test]
fn a_route_that_is_rejected_at_one_listener_stays_at_the_others() {
    let mut api_server = start();
    let listeners = [listener("one", Some("*.a.test")), listener("two", Some("*.b.test"))];
    apply_gateway(&mut api_server, json!(listeners));
    apply_hosts(&mut api_server, HTTP, "web", &["x.a.test"]);
    apply_hosts(&mut api_server, GRPC, "calls", &["x.a.test", "x.b.test"]);
    assert_eq!(accepted(&api_server, GRPC, "calls"), "Accepted");
    assert_eq!(owners(&api_server, "http://x.a.test"), [(false, "web".to_owned())]);
    assert_eq!(owners(&api_server, "http://x.b.test"), [(true, "calls".to_owned())]);
    let attached = [0, 1].map(|at| listener_facts(&api_server, at).1);
    assert_eq!(attached, [Some(1), Some(1)]);
}

#[test]
fn of_routes_of_one_age_the_first_one_by_name_has_a_host() {
    let mut api_server = start();
    apply_gateway(&mut api_server, json!([listener("http", None)]));
    api_server.api_server_clock = Some(api_server.now);
    apply_hosts(&mut api_server, HTTP, "b", &["a.test"]);
    apply_hosts(&mut api_server, GRPC, "a", &["a.test"]);
    assert_eq!(accepted(&api_server, GRPC, "a"), "Accepted");
    assert_eq!(accepted(&api_server, HTTP, "b"), "HostnameConflict");
    assert_eq!(owners(&api_server, "http://a.test"), [(true, "a".to_owned())]);
}

#[test]
fn a_listener_takes_the_kinds_of_routes_that_it_names() {
    let mut api_server = start();
    let with_kinds = |kinds: &[&str]| {
        let mut listener = listener("http", None);
        let kinds: Vec<Value> = kinds.iter().map(|it| json!({"kind": it})).collect();
        listener["allowedRoutes"] = json!({"kinds": kinds});
        json!([listener])
    };
    apply_hosts(&mut api_server, HTTP, "web", &["a.test"]);
    apply_hosts(&mut api_server, GRPC, "calls", &["b.test"]);
    for (named, taken, http, grpc) in [
        (&["HTTPRoute"][..], &["HTTPRoute"][..], "Accepted", "NotAllowedByListeners"),
        (&["GRPCRoute", "TCPRoute"][..], &["GRPCRoute"][..], "NotAllowedByListeners", "Accepted"),
        (&[][..], &["HTTPRoute", "GRPCRoute"][..], "Accepted", "Accepted"),
    ] {
        apply_gateway(&mut api_server, with_kinds(named));
        let (kinds, attached) = listener_facts(&api_server, 0);
        assert_eq!(kinds, taken, "{named:?}");
        let found = [(HTTP, "web"), (GRPC, "calls")];
        let found = found.map(|(kind, route)| accepted(&api_server, kind, route));
        assert_eq!(found, [http, grpc], "{named:?}");
        let expected = found.iter().filter(|it| *it == "Accepted").count();
        assert_eq!(attached, Some(expected as u64), "{named:?}");
    }
}

#[test]
fn calls_cannot_go_to_ports_without_http2() {
    let mut api_server = start();
    apply_gateway(&mut api_server, json!([listener("http", None)]));
    let ports = json!([
        {"port": 80, "appProtocol": "http"}, {"port": 81, "appProtocol": "grpc"},
        {"port": 82, "appProtocol": "https"},
    ]);
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::Service,
        name: name("mixed"),
        object: Some(Box::new(json!({
            "metadata": {"name": "mixed", "namespace": NAMESPACE},
            "spec": {"clusterIP": "10.96.0.8", "ports": ports},
        }))),
    });
    for (kind, port, expected) in [
        (GRPC, 80, "UnsupportedProtocol"),
        (GRPC, 81, "ResolvedRefs"),
        (GRPC, 82, "UnsupportedProtocol"),
        (HTTP, 80, "ResolvedRefs"),
        (HTTP, 81, "ResolvedRefs"),
        (HTTP, 82, "UnsupportedProtocol"),
    ] {
        let backends = json!([{"name": "mixed", "port": port}]);
        let spec = json!({
            // A host for each kind: routes of both kinds would keep each other from one.
            "parentRefs": [{"name": "gateway"}], "hostnames": [format!("{kind}.test")],
            "rules": [{"backendRefs": backends}],
        });
        apply_at(&mut api_server, kind, &name("calls"), spec);
        assert_eq!(reasons_of(&api_server, kind, "calls").1, expected, "{kind} {port}");
    }
}

#[test]
fn a_grant_for_http_routes_is_none_for_grpc_routes() {
    let mut api_server = start();
    apply_gateway(&mut api_server, json!([listener("http", None)]));
    let foreign = NamespacedName::new("other", "plain");
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::Service,
        name: foreign,
        object: Some(Box::new(json!({
            "metadata": {"name": "plain", "namespace": "other"},
            "spec": {"clusterIP": "10.96.0.8", "ports": [{"port": PORT}]},
        }))),
    });
    let spec = json!({
        "parentRefs": [{"name": "gateway"}],
        "rules": [{"backendRefs": [{"name": "plain", "namespace": "other", "port": PORT}]}],
    });
    apply_at(&mut api_server, GRPC, &name("calls"), spec);
    for (kind, expected) in [("HTTPRoute", "RefNotPermitted"), ("GRPCRoute", "ResolvedRefs")] {
        let from =
            json!({"group": "gateway.networking.k8s.io", "kind": kind, "namespace": NAMESPACE});
        let grant = json!({"from": [from], "to": [{"group": "", "kind": "Service"}]});
        // Under one name, so that the second grant replaces the first.
        let grant_name = NamespacedName::new("other", "grant");
        apply_at(&mut api_server, ResourceKind::ReferenceGrant, &grant_name, grant);
        assert_eq!(reasons_of(&api_server, GRPC, "calls").1, expected, "{kind}");
    }
}
