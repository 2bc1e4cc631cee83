use common::wire::{TlsMinVersion, TlsSettings};
use http::Request;

use super::*;

const CLIENT: std::net::IpAddr = std::net::IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 9));

fn head(uri: &str, fields: &[(&str, &str)]) -> request::Parts {
    let builder = fields.iter().fold(Request::builder().uri(uri), |it, (k, v)| it.header(*k, *v));
    builder.body(()).expect("valid").into_parts().0
}

fn request_context(traffic_origin: TrafficOrigin) -> PodRequestContext<'static> {
    let (host_rewrite, tags, protocol) = (None, None, AppProtocol::Http1);
    let sender = ForwardedRequestSender {
        traffic_origin,
        address: CLIENT,
        proxied_client: crate::edge::client_headers::ProxiedClient::Direct,
        is_tls: false,
    };
    // Written out, because `Default` is no constant.
    static USUAL: EdgeSettings = EdgeSettings {
        trusted_proxies: Vec::new(),
        requires_proxy_protocol: false,
        allowed_upgrades: Vec::new(),
        allows_underscores: false,
        certificates: Vec::new(),
        https_port: None,
        hsts: None,
        tls: TlsSettings { min_version: TlsMinVersion::Tls12, ciphers: Vec::new() },
        is_sni_strict: false,
        tcp_idle_timeout: None,
        trusted_ingresses: Vec::new(),
    };
    PodRequestContext {
        sender,
        edge: &USUAL,
        host_rewrite,
        tags,
        protocol,
        client_certificate: None,
        random: || 7,
    }
}

fn rewritten_head(
    uri: &str,
    traffic_origin: TrafficOrigin,
    fields: &[(&str, &str)],
) -> (request::Parts, Option<HeaderValue>) {
    rewritten_by(uri, request_context(traffic_origin), fields)
}

fn rewritten_by(
    uri: &str,
    context: PodRequestContext<'_>,
    fields: &[(&str, &str)],
) -> (request::Parts, Option<HeaderValue>) {
    let mut head = head(uri, fields);
    let upgrade =
        rewrite_request_head(&mut head, context, || "hello.default.svc".into()).expect("fine");
    (head, upgrade)
}

fn field<'a>(head: &'a request::Parts, name: &str) -> Option<&'a str> {
    head.headers.get(name).map(|value| value.to_str().expect("text"))
}

#[test]
fn the_host_reaches_the_pod_unchanged() {
    let (head, _) =
        rewritten_head("/a?b=c", TrafficOrigin::External, &[("host", "Hello.Example:80")]);
    assert_eq!(
        (head.uri.to_string().as_str(), field(&head, "host")),
        ("/a?b=c", Some("Hello.Example:80"))
    );
}

#[test]
fn an_absolute_uri_wins_over_the_host_header() {
    let (head, _) = rewritten_head("http://real/a", TrafficOrigin::Internal, &[("host", "other")]);
    assert_eq!((head.uri.to_string().as_str(), field(&head, "host")), ("/a", Some("real")));
}

#[test]
fn a_host_is_required_from_1_1_on_and_supplied_for_1_0() {
    let new = head("/", &[]);
    let error = host::check_host(&new).expect_err("no host");
    assert_eq!(error.to_string(), "missing required Host header");
    let mut old = head("/", &[]);
    old.version = Version::HTTP_10;
    host::check_host(&old).expect("HTTP/1.0 knows no Host");
    rewrite_request_head(&mut old, request_context(TrafficOrigin::Internal), || {
        "hello.default.svc".into()
    })
    .expect("fine");
    assert_eq!((field(&old, "host"), old.version), (Some("hello.default.svc"), Version::HTTP_11));
}

#[test]
fn chunks_of_chunks_are_refused() {
    let check = |fields: &[(&str, &str)]| {
        let refused = check_transfer_codings(&head("/", fields).headers).err()?;
        let response = refused.response(None, |text| text);
        Some((response.status().as_u16(), response.headers().contains_key(header::CONNECTION)))
    };
    for codings in ["chunked, chunked", "Chunked,gzip , CHUNKED", "chunked,chunked,"] {
        assert_eq!(check(&[("transfer-encoding", codings)]), Some((400, true)), "{codings}");
    }
    let twice = ("transfer-encoding", "chunked");
    assert_eq!(check(&[twice, twice]), Some((400, true)));
    for codings in ["chunked", "gzip, chunked", ", chunked", "xchunked, chunked"] {
        assert_eq!(check(&[("transfer-encoding", codings)]), None, "{codings}");
    }
    assert_eq!(check(&[]), None);
}

#[test]
fn headers_of_one_hop_and_of_the_platform_end_here() {
    let (head, _) = rewritten_head(
        "/",
        TrafficOrigin::External,
        &[
            ("host", "a"),
            // `Host` stays although it is named here: the request would reach no service without it.
            ("connection", "close, X-Mine, host"),
            ("x-mine", "1"),
            ("keep-alive", "5"),
            ("te", "gzip, trailers"),
            ("knative-serving-revision", "r"),
            ("knative-serving-namespace", "n"),
            ("k-network-probe", "queue"),
            ("k-proxy-request", "activator"),
            ("k-to-come", "a future name"),
            ("knative-serving-to-come", "another"),
            ("knative-mine", "mine"),
        ],
    );
    let mut names: Vec<_> = head.headers.keys().map(HeaderName::as_str).collect();
    names.sort_unstable();
    let kept = ["forwarded", "host", "knative-mine", "te", "traceparent"];
    assert_eq!(
        names,
        [&kept[..], &["x-forwarded-for", "x-forwarded-host", "x-forwarded-proto"]].concat()
    );
    assert_eq!(field(&head, "te"), Some("trailers"));
}

#[test]
fn inside_only_what_the_platform_uses_itself_is_taken_away() {
    let fields = [("host", "a"), ("k-mine", "mine"), ("knative-serving-revision", "r")];
    let (head, _) = rewritten_head("/", TrafficOrigin::Internal, &fields);
    let values = ["k-mine", "knative-serving-revision"].map(|name| field(&head, name));
    assert_eq!(values, [Some("mine"), None]);
}

#[test]
fn a_pod_gets_the_chosen_tag_or_the_default_route() {
    let tag = TagRouting::ServeTag("blue".into());
    let choice = TagRouting::ChooseTag(vec![]);
    let tag_headers = |tags, requested: &[(&str, &str)]| {
        let context = PodRequestContext { tags, ..request_context(TrafficOrigin::External) };
        let (head, _) = rewritten_by("/", context, &[&[("host", "a")], requested].concat());
        let own = |name| field(&head, name).map(str::to_owned);
        (own("knative-serving-tag"), own("knative-serving-default-route"))
    };
    let requested = [("knative-serving-tag", "unknown"), ("knative-serving-default-route", "no")];
    let text = |it: &str| Some(it.to_owned());
    assert_eq!(tag_headers(None, &requested), (None, None));
    assert_eq!(tag_headers(Some(&tag), &requested), (text("blue"), None));
    assert_eq!(tag_headers(Some(&choice), &requested), (text("unknown"), text("true")));
    assert_eq!(tag_headers(Some(&choice), &[]), (None, text("true")));
}

#[test]
fn a_host_that_is_rewritten_is_kept_beside() {
    let context = PodRequestContext {
        host_rewrite: Some(HostRewrite::OfMapping("hello.default.svc")),
        ..request_context(TrafficOrigin::External)
    };
    let (head, _) =
        rewritten_by("/", context, &[("host", "shop.example"), ("k-original-host", "evil")]);
    let values = ["host", "k-original-host", "x-forwarded-host"].map(|name| field(&head, name));
    assert_eq!(values, [Some("hello.default.svc"), Some("shop.example"), Some("shop.example")]);
}

#[test]
fn a_host_that_a_rule_rewrites_is_kept_in_the_forwarded_one_only() {
    let context = PodRequestContext {
        host_rewrite: Some(HostRewrite::OfRule("one.example")),
        protocol: AppProtocol::H2c,
        ..request_context(TrafficOrigin::External)
    };
    let (head, _) =
        rewritten_by("/", context, &[("host", "shop.example"), ("k-original-host", "evil")]);
    assert_eq!(head.uri.to_string(), "http://one.example/");
    let values = ["k-original-host", "x-forwarded-host"].map(|name| field(&head, name));
    assert_eq!(values, [None, Some("shop.example")]);
}

#[test]
fn http2_names_host_and_scheme_in_its_target() {
    let context = PodRequestContext {
        protocol: AppProtocol::H2c,
        ..request_context(TrafficOrigin::Internal)
    };
    let (head, upgrade) =
        rewritten_by("/a?b", context, &[("host", "a:80"), ("connection", "close")]);
    assert_eq!((head.uri.to_string().as_str(), upgrade), ("http://a:80/a?b", None));
    assert_eq!((head.version, field(&head, "host")), (Version::HTTP_2, None));
    assert_eq!(field(&head, "connection"), None);
    let fields = [("host", "a"), ("connection", "upgrade"), ("upgrade", "websocket")];
    let (head, upgrade) = rewritten_by("/", context, &fields);
    assert_eq!((head.version, upgrade.is_some()), (Version::HTTP_11, true));
}

#[test]
fn cookies_that_http2_has_cut_are_joined() {
    let (head, _) = rewritten_head(
        "/",
        TrafficOrigin::Internal,
        &[("host", "a"), ("cookie", "a=1"), ("cookie", "b=2")],
    );
    assert_eq!(head.headers.get_all("cookie").iter().collect::<Vec<_>>(), ["a=1; b=2"]);
}

#[test]
fn the_https_location_has_the_same_path_and_no_port() {
    let head = head("/a?b=c", &[("host", "Shop.example:8080")]);
    assert_eq!(https_location(&head, 443).expect("a host"), "https://shop.example/a?b=c");
}

#[test]
fn the_https_location_names_a_port_other_than_443() {
    let named = head("/a?b=c", &[("host", "Shop.example:8080")]);
    assert_eq!(https_location(&named, 8443).expect("a host"), "https://shop.example:8443/a?b=c");
    let address = head("/", &[("host", "[fd00::1]:8080")]);
    assert_eq!(https_location(&address, 8443).expect("a host"), "https://[fd00::1]:8443/");
}

#[test]
fn options_of_the_whole_server_leads_to_the_root_over_https() {
    let head = head("*", &[("host", "shop.example")]);
    assert_eq!(https_location(&head, 443).expect("a host"), "https://shop.example/");
}

#[test]
fn an_upgrade_is_passed_on_but_not_to_http2() {
    let fields = [("host", "a"), ("connection", "Upgrade"), ("upgrade", "websocket")];
    let (head, upgrade) = rewritten_head("/", TrafficOrigin::Internal, &fields);
    assert_eq!(upgrade, Some(HeaderValue::from_static("websocket")));
    assert_eq!(
        (field(&head, "connection"), field(&head, "upgrade")),
        (Some("upgrade"), Some("websocket"))
    );
    let fields = [("host", "a"), ("connection", "Upgrade, HTTP2-Settings"), ("upgrade", "h2c")];
    let (head, upgrade) = rewritten_head("/", TrafficOrigin::Internal, &fields);
    assert_eq!((upgrade, field(&head, "upgrade")), (None, None));
    let (_, upgrade) =
        rewritten_head("/", TrafficOrigin::Internal, &[("host", "a"), ("upgrade", "websocket")]);
    assert_eq!(upgrade, None, "not named in Connection");
}

#[test]
fn only_listed_protocols_are_switched_to_and_only_one_is_asked_for() {
    let edge = EdgeSettings { allowed_upgrades: vec!["xmpp".into()], ..EdgeSettings::default() };
    let upgrade_for = |protocols: &[&str]| {
        let mut fields = vec![("host", "a"), ("connection", "upgrade")];
        fields.extend(protocols.iter().map(|it| ("upgrade", *it)));
        let (head, upgrade) = rewritten_by(
            "/",
            PodRequestContext { edge: &edge, ..request_context(TrafficOrigin::Internal) },
            &fields,
        );
        assert_eq!(field(&head, "upgrade").is_some(), upgrade.is_some(), "{protocols:?}");
        assert_eq!(field(&head, "connection").is_some(), upgrade.is_some(), "{protocols:?}");
        upgrade.is_some()
    };
    for one in ["websocket", "WebSocket", "xmpp", "XMPP", " websocket "] {
        assert!(upgrade_for(&[one]), "{one}");
    }
    // Lists count as refused too: a pod might choose the protocol that is not allowed.
    for other in [
        &["h2c"][..],
        &["H2C"],
        &["websocket, h2c"],
        &["h2c, websocket"],
        &["websocket,"],
        &["websocket", "h2c"],
        &["websocket", "websocket"],
        &["foo"],
        &["foo, h2c"],
        &["h2c/1"],
        &["TLS/1.0, HTTP/1.1"],
        &[""],
    ] {
        assert!(!upgrade_for(other), "{other:?}");
    }
}

#[test]
fn names_with_underscores_are_dropped_from_outside() {
    let forged =
        [("x_forwarded_for", "6.6.6.6"), ("K_Original_Host", "evil"), ("own_name", "mine")];
    let names = |head: &request::Parts| forged.map(|(name, _)| field(head, name).is_some());
    let fields = [&[("host", "a")][..], &forged].concat();
    assert_eq!(names(&rewritten_head("/", TrafficOrigin::External, &fields).0), [false; 3]);
    assert_eq!(names(&rewritten_head("/", TrafficOrigin::Internal, &fields).0), [true; 3]);
    let edge = EdgeSettings { allows_underscores: true, ..EdgeSettings::default() };
    let context = PodRequestContext { edge: &edge, ..request_context(TrafficOrigin::External) };
    assert_eq!(names(&rewritten_by("/", context, &fields).0), [true; 3], "where operators say so");
}

#[test]
fn a_response_loses_only_what_was_for_one_hop() {
    let mut headers =
        head("/", &[("connection", "upgrade"), ("upgrade", "websocket"), ("a", "b")]).headers;
    rewrite_response_head(&mut headers, StatusCode::SWITCHING_PROTOCOLS, Version::HTTP_11);
    assert_eq!(headers.len(), 3);
    headers.insert(header::TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    rewrite_response_head(&mut headers, StatusCode::OK, Version::HTTP_2);
    assert_eq!(headers.keys().collect::<Vec<_>>(), ["a"]);
}

#[test]
fn connect_is_refused() {
    let mut head = head("a:80", &[]);
    head.method = Method::CONNECT;
    let error =
        rewrite_request_head(&mut head, request_context(TrafficOrigin::Internal), String::new)
            .expect_err("refused");
    assert_eq!(error.status(), 405);
}

#[test]
fn tags_of_a_trusted_ingress_reach_the_pod_and_those_of_others_do_not() {
    let edge = EdgeSettings {
        trusted_ingresses: vec!["10.0.0.0/8".parse().expect("a network")],
        ..EdgeSettings::default()
    };
    let fields = [
        ("host", "a"),
        ("knative-serving-tag", "blue"),
        ("knative-serving-default-route", "true"),
        ("knative-serving-revision", "hello-1"),
    ];
    let tags = |address: [u8; 4], traffic_origin| {
        let mut context = request_context(traffic_origin);
        context.sender.address = address.into();
        let (head, _) = rewritten_by("/", PodRequestContext { edge: &edge, ..context }, &fields);
        assert_eq!(field(&head, "knative-serving-revision"), None);
        let names = ["knative-serving-tag", "knative-serving-default-route"];
        names.map(|name| field(&head, name).map(str::to_owned))
    };
    let both = [Some("blue".to_owned()), Some("true".to_owned())];
    assert_eq!(tags([10, 0, 0, 7], TrafficOrigin::Internal), both);
    assert_eq!(tags([11, 0, 0, 7], TrafficOrigin::Internal), [None, None]);
    assert_eq!(tags([10, 0, 0, 7], TrafficOrigin::External), [None, None]);
}
