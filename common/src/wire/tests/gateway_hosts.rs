//! Pure: rules of the Gateway API on the wire, and how an earlier release reads them.

use std::num::NonZeroU32;

use super::*;

/// Returns a rule of an HTTPRoute that redirects, with each kind of backend.
fn rule() -> HttpRule {
    let pair = |name: &str, value: &str| vec![(name.to_owned(), value.to_owned())];
    let backend = |weight: u32, target| WeightedBackend {
        weight: NonZeroU32::new(weight).expect("not zero"),
        ..fixtures::backend(target)
    };
    let plain = PlainBackend {
        name: name("default/db:8080"),
        address: ([10, 96, 0, 7], 8080).into(),
        protocol: AppProtocol::H2c,
    };
    HttpRule {
        method: Some("GET".into()),
        headers: pair("version", "2"),
        query: pair("q", "1"),
        request_headers: HeaderChanges {
            set: pair("a", "1"),
            add: pair("b", "2"),
            remove: vec!["c".into()],
        },
        response_headers: HeaderChanges { remove: vec!["d".into()], ..HeaderChanges::default() },
        redirect: Some(RequestRedirect {
            is_https: Some(true),
            host: Some("b.example".into()),
            port: NonZeroU16::new(8443),
            path: None,
            status: 301,
        }),
        backends: vec![
            backend(1, RouteBackend::Service(name("default/hello"))),
            backend(7, RouteBackend::Plain(plain)),
            // The greatest weight that the API server accepts.
            backend(1_000_000, RouteBackend::Unresolved),
        ],
        ..fixtures::http_rule(PathMatch::parse_exact("/a/").expect("a path"))
    }
}

/// Returns a rule of a GRPCRoute that changes paths and limits times, and the headers of one backend.
fn changed_rule() -> HttpRule {
    let changes = |name: &str| HeaderChanges { remove: vec![name.into()], ..Default::default() };
    let mut rule = rule();
    let path = PathModifier::parse_full_path("/c/").expect("a path");
    rule.redirect = rule.redirect.map(|it| RequestRedirect { path: Some(path), ..it });
    let host = Some("c.example".to_owned());
    rule.rewrite = Some(UrlRewrite { host, path: PathModifier::parse_prefix("") });
    rule.backends[0].request_headers = changes("e");
    rule.backends[1].response_headers = changes("f");
    rule.timeouts = RuleTimeouts {
        request: Some(Duration::from_secs(10)),
        backend_request: Some(Duration::from_millis(1)),
    };
    HttpRule { is_grpc: true, ..rule }
}

fn entry(key: &str) -> GatewayHostEntry {
    let prefix = PathMatch::Prefix(PathPrefix::parse("/b").expect("a prefix"));
    let empty = fixtures::http_rule(PathMatch::Prefix(PathPrefix::ALL));
    let rules = vec![rule(), HttpRule { path: prefix, ..rule() }, changed_rule(), empty];
    GatewayHostEntry {
        certificates: ["default/shop.tls", "default/shop-rsa", "other/shop"].map(name).into(),
        reserved_hosts: vec!["*.a.example.com".into(), "b.example.com".into()],
        ..fixtures::gateway_host(key, rules)
    }
}

#[test]
fn rules_arrive_as_they_were_sent() {
    let sent = entry("https://*.example.com");
    assert_eq!(GatewayHostEntry::try_from(raw::GatewayHost::from(sent.clone())), Ok(sent));
    let without = GatewayHostEntry { certificates: Vec::new(), ..entry("https://a.example") };
    assert_eq!(GatewayHostEntry::try_from(raw::GatewayHost::from(without.clone())), Ok(without));
}

#[test]
fn an_earlier_release_finds_the_first_certificate() {
    let mut message = raw::GatewayHost::from(entry("https://a.example"));
    assert_eq!(message.certificate, "default/shop.tls");
    assert_eq!(message.more_certificates, ["default/shop-rsa", "other/shop"]);
    message.more_certificates[1] = "shop".into();
    let refused = GatewayHostEntry::try_from(message).expect_err("no name of a Secret").to_string();
    assert!(refused.contains("gateway_host.certificate"), "{refused}");
}

/// The API server checks the whole length of a route's name only. A host whose rules were refused would have no rules.
#[test]
fn a_route_may_have_a_name_that_is_no_host() {
    for route in ["a".repeat(253), format!("{}.v2", "shop-".repeat(20) + "eu")] {
        let mut sent = entry("http://a.example");
        sent.rules[0].route = NamespacedName::new("default", route);
        assert_eq!(GatewayHostEntry::try_from(raw::GatewayHost::from(sent.clone())), Ok(sent));
    }
    for route in ["default/shop:80", "default/", "shop", "a/b/c"] {
        let mut message = raw::GatewayHost::from(entry("http://a.example"));
        message.rules[0].route = route.into();
        assert!(GatewayHostEntry::try_from(message).is_err(), "{route}");
    }
}

/// An earlier release would redirect to the path of the request, perhaps without an end. Or it would send a request to
/// a backend with a path that is not for it. Without redirect and backends it responds with 500.
#[test]
fn an_earlier_release_finds_no_redirect_and_no_backends_where_paths_change() {
    let sent = raw::HttpRule::from(changed_rule());
    assert_eq!((sent.redirect, sent.backends), (None, Vec::new()));
    let (_, rewritten) = (sent.path_redirect.expect("it is sent"), sent.rewrite.expect("it too"));
    assert_eq!(rewritten.backends.len(), 3);
    let plain = raw::HttpRule::from(rule());
    assert_eq!((plain.path_redirect, plain.rewrite), (None, None));
    assert_eq!(plain.backends.len(), 3);
}

/// An earlier release would leave a header in the request that the backend must not get, or ask a backend in place of the
/// redirect.
#[test]
fn an_earlier_release_finds_no_backends_whose_headers_it_would_not_change() {
    let changed = HttpRule { redirect: None, rewrite: None, ..changed_rule() };
    let mut redirected = HttpRule { backends: rule().backends, rewrite: None, ..changed_rule() };
    for rule in [&changed, &redirected] {
        let sent = raw::HttpRule::from(rule.clone());
        assert_eq!((&sent.redirect, sent.backends.len()), (&None, 0));
        assert_eq!(sent.rewrite.as_ref().map(|it| it.backends.len()), Some(3));
        assert_eq!(HttpRule::try_from(sent).expect("it is understood"), *rule);
    }
    redirected.backends.clear();
    assert_eq!(raw::HttpRule::from(redirected).rewrite, None, "there are none to hide");
}

/// A rule of which a part is not understood would serve requests that it is not for.
#[test]
fn a_host_with_a_rule_that_is_not_understood_is_refused_as_a_whole() {
    let refused = |change: &dyn Fn(&mut raw::HttpRule)| {
        let mut message = raw::GatewayHost::from(entry("http://a.example"));
        change(&mut message.rules[0]);
        GatewayHostEntry::try_from(message).expect_err("refused").to_string()
    };
    let both = refused(&|it| it.path_prefix = "/b".into());
    assert_eq!(both, "field rule.exact_path is \"/a/\": must be empty beside a path prefix");
    let unclear = refused(&|it| it.exact_path = "/a//".into());
    assert_eq!(unclear, "field rule.exact_path is \"/a//\": must be a clear path");
    assert!(refused(&|it| it.backends[0].weight = 0).contains("backend.weight"));
    assert!(refused(&|it| it.backends[0].target = None).contains("backend.target"));
    assert!(refused(&|it| it.redirect.as_mut().expect("one").status = 200).contains("status"));
    let modifier = |text: &str| {
        let replacement = raw::path_modifier::Replacement::FullPath(text.into());
        Some(raw::PathModifier { replacement: Some(replacement) })
    };
    let path = refused(&|it| it.redirect.as_mut().expect("one").path = modifier("a"));
    assert!(path.ends_with("must be the path of a URL"), "{path}");
    let twice = refused(&|it| it.path_redirect = it.redirect.clone());
    assert!(twice.contains("must be the only redirect"), "{twice}");
    let apart = refused(&|it| it.rewrite = Some(raw::Rewrite::default()));
    assert!(apart.contains("must be in the rewrite"), "{apart}");
}

#[test]
fn a_reserved_host_comes_and_goes_with_the_table() {
    let without = RouteTable::default();
    let mut table = without.clone();
    table.reserved_hosts.insert("*.a.example".to_owned());
    let change = RouteChange::ReservedHost("*.a.example".to_owned());
    let removal = RouteChange::Removed(RouteKey::ReservedHost("*.a.example".to_owned()));
    assert_eq!(table.all_states().collect::<Vec<_>>(), std::slice::from_ref(&change));
    assert_eq!(without.changes_to(&table), std::slice::from_ref(&change));
    assert_eq!(table.changes_to(&without), std::slice::from_ref(&removal));
    let mut view = RouteView::default();
    for (sent, expected) in [(change, &table), (removal, &without)] {
        let message = raw::RouteItem::from(item(1, sent));
        view.apply_item(RouteItem::try_from(message).expect("it is understood"));
        assert_eq!(view.table, *expected);
    }
    let nameless = item(1, RouteChange::ReservedHost(String::new()));
    let error = RouteItem::try_from(raw::RouteItem::from(nameless)).expect_err("no host");
    let expected = "field route_item.reserved_host is \"\": must not be empty";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn a_host_comes_and_goes_with_the_table() {
    let entry = entry("http://a.example");
    let gateway_hosts = [(entry.key.clone(), entry.clone())].into();
    let without = RouteTable::default();
    let table = RouteTable { gateway_hosts, ..without.clone() };
    let change = RouteChange::GatewayHost(entry.clone());
    let removal = RouteChange::Removed(RouteKey::GatewayHost(entry.key));
    assert_eq!(table.all_states().collect::<Vec<_>>(), std::slice::from_ref(&change));
    assert_eq!(without.changes_to(&table), std::slice::from_ref(&change));
    assert_eq!(table.changes_to(&without), std::slice::from_ref(&removal));
    let mut view = RouteView::default();
    for (sent, expected) in [(change, &table), (removal, &without)] {
        let message = raw::RouteItem::from(item(1, sent));
        view.apply_item(RouteItem::try_from(message).expect("it is understood"));
        assert_eq!(view.table, *expected);
    }
}
