use http::Request;

use super::*;

const CLIENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 9));

fn head(uri: &str, fields: &[(&str, &str)]) -> request::Parts {
    let builder = fields.iter().fold(Request::builder().uri(uri), |it, (k, v)| it.header(*k, *v));
    builder.body(()).expect("valid").into_parts().0
}

fn sent(uri: &str, side: Side, fields: &[(&str, &str)]) -> (request::Parts, Option<HeaderValue>) {
    let mut head = head(uri, fields);
    let upgrade = to_pod(&mut head, side, CLIENT, || "hello.default.svc".into()).expect("fine");
    (head, upgrade)
}

fn field<'a>(head: &'a request::Parts, name: &str) -> Option<&'a str> {
    head.headers.get(name).map(|value| value.to_str().expect("text"))
}

#[test]
fn a_host_is_compared_without_port_case_and_final_dot() {
    let named = |uri, host| super::host(&head(uri, &[("host", host)]));
    assert_eq!(
        named("/", "Hello.Default.Example.COM:8080"),
        Some("hello.default.example.com".into())
    );
    assert_eq!(named("/", "a.b."), Some("a.b".into()));
    assert_eq!(named("/", "[fd00::1]:80"), Some("[fd00::1]".into()));
    assert_eq!(named("http://real:9/x", "other"), Some("real".into()));
    assert_eq!(named("/", ""), None);
    assert_eq!(super::host(&head("/", &[])), None);
}

#[test]
fn the_host_reaches_the_pod_unchanged() {
    let (head, _) = sent("/a?b=c", Side::Outside, &[("host", "Hello.Example:80")]);
    assert_eq!(
        (head.uri.to_string().as_str(), field(&head, "host")),
        ("/a?b=c", Some("Hello.Example:80"))
    );
}

#[test]
fn an_absolute_uri_wins_over_the_host_header() {
    let (head, _) = sent("http://real/a", Side::Inside, &[("host", "other")]);
    assert_eq!((head.uri.to_string().as_str(), field(&head, "host")), ("/a", Some("real")));
}

#[test]
fn a_host_is_required_from_1_1_on_and_supplied_for_1_0() {
    let new = head("/", &[]);
    let refused = check_host(&new).expect_err("no host");
    assert_eq!(refused.to_string(), "missing required Host header");
    let mut old = head("/", &[]);
    old.version = Version::HTTP_10;
    check_host(&old).expect("HTTP/1.0 knows no Host");
    to_pod(&mut old, Side::Inside, CLIENT, || "hello.default.svc".into()).expect("fine");
    assert_eq!((field(&old, "host"), old.version), (Some("hello.default.svc"), Version::HTTP_11));
}

#[test]
fn headers_of_one_hop_and_of_the_platform_end_here() {
    let (head, _) = sent(
        "/",
        Side::Outside,
        &[
            ("host", "a"),
            ("connection", "close, X-Mine, host"),
            ("x-mine", "1"),
            ("keep-alive", "5"),
            ("te", "gzip, trailers"),
            ("knative-serving-revision", "r"),
            ("knative-serving-namespace", "n"),
            ("k-network-probe", "queue"),
            ("k-proxy-request", "activator"),
            ("k-mine", "stays"),
        ],
    );
    let mut names: Vec<_> = head.headers.keys().map(HeaderName::as_str).collect();
    names.sort_unstable();
    let kept = ["forwarded", "host", "k-mine", "te"];
    assert_eq!(
        names,
        [&kept[..], &["x-forwarded-for", "x-forwarded-host", "x-forwarded-proto"]].concat()
    );
    assert_eq!(field(&head, "te"), Some("trailers"));
}

#[test]
fn an_upgrade_is_passed_on_but_not_to_http2() {
    let fields = [("host", "a"), ("connection", "Upgrade"), ("upgrade", "websocket")];
    let (head, upgrade) = sent("/", Side::Inside, &fields);
    assert_eq!(upgrade, Some(HeaderValue::from_static("websocket")));
    assert_eq!(
        (field(&head, "connection"), field(&head, "upgrade")),
        (Some("upgrade"), Some("websocket"))
    );
    let fields = [("host", "a"), ("connection", "Upgrade, HTTP2-Settings"), ("upgrade", "h2c")];
    let (head, upgrade) = sent("/", Side::Inside, &fields);
    assert_eq!((upgrade, field(&head, "upgrade")), (None, None));
    let (_, upgrade) = sent("/", Side::Inside, &[("host", "a"), ("upgrade", "websocket")]);
    assert_eq!(upgrade, None, "not named in Connection");
}

#[test]
fn the_app_learns_who_asked() {
    let (head, _) = sent("/", Side::Inside, &[("host", "a:80")]);
    assert_eq!(field(&head, "forwarded"), Some("for=10.0.0.9;host=\"a:80\";proto=http"));
    assert_eq!(field(&head, "x-forwarded-for"), Some("10.0.0.9"));
    let (head, _) = sent(
        "/",
        Side::Outside,
        &[
            ("host", "a"),
            ("x-forwarded-for", "fd00::7"),
            ("x-forwarded-proto", "https"),
            ("x-forwarded-host", "evil"),
        ],
    );
    assert_eq!(
        field(&head, "forwarded"),
        Some("for=\"[fd00::7]\";host=a;proto=http, for=10.0.0.9")
    );
    let (head, _) = sent("/", Side::Inside, &[("host", "a"), ("x-forwarded-proto", "https")]);
    assert_eq!(field(&head, "x-forwarded-proto"), Some("https"));
    let (head, _) = sent("/", Side::Inside, &[("host", "a"), ("forwarded", "for=x")]);
    assert_eq!(field(&head, "forwarded"), Some("for=x"));
}

#[test]
fn an_answer_loses_only_what_was_for_one_hop() {
    let mut headers =
        head("/", &[("connection", "upgrade"), ("upgrade", "websocket"), ("a", "b")]).headers;
    to_client(&mut headers, true);
    assert_eq!(headers.len(), 3);
    to_client(&mut headers, false);
    assert_eq!(headers.keys().collect::<Vec<_>>(), ["a"]);
}

#[test]
fn connect_is_refused() {
    let mut head = head("a:80", &[]);
    head.method = Method::CONNECT;
    let refused = to_pod(&mut head, Side::Inside, CLIENT, String::new).expect_err("refused");
    assert_eq!(refused.status(), 405);
}

#[test]
fn a_host_is_a_name_or_an_address_with_or_without_a_port() {
    for good in [
        "",
        "a",
        "Hello.default.example.com.",
        "a:80",
        "a:",
        "under_score",
        "10.96.0.7:8080",
        "[fd00::1]",
        "[fd00::1]:80",
        "[fe80::1%25eth0]:80",
        "caf%C3%A9.example",
    ] {
        assert!(is_host(good.as_bytes()), "{good}");
    }
    for bad in [
        "a b",
        "a/b",
        "user@a",
        "a:b",
        "a:80:80",
        "fd00::1",
        "[fd00::1",
        "fd00::1]",
        "[fd00::1]x",
        "[a]",
        "[fe80::1%25]",
        "100%",
        "%zz",
        "a?b",
        "a#b",
        "a\\b",
        "<a>",
        "caf\u{e9}",
        "a\t",
    ] {
        assert!(!is_host(bad.as_bytes()), "{bad}");
    }
}

#[test]
fn one_host_is_named_once() {
    let told = |uri, hosts: &[(&str, &str)]| {
        check_host(&head(uri, hosts)).map_err(|failure| failure.to_string())
    };
    assert_eq!(told("/", &[("host", "a")]), Ok(()));
    assert_eq!(told("http://a:80/", &[("host", "b")]), Ok(()));
    let twice = Err("too many Host headers".to_owned());
    assert_eq!(told("/", &[("host", "a"), ("host", "a")]), twice);
    assert_eq!(told("/", &[("host", "a b")]), Err("malformed Host header".to_owned()));
    let target = Err("malformed host in the request's target".to_owned());
    assert_eq!(told("http://user@a/", &[("host", "a")]), target);
}
