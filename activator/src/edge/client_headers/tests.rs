use proptest::prelude::*;

use super::*;

const CLIENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 9));

fn headers_for(traffic_origin: TrafficOrigin, fields: &[(&str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in fields {
        headers.append(
            name.parse::<HeaderName>().expect("a name"),
            HeaderValue::from_str(value).expect("a value"),
        );
    }
    let sender = ForwardedRequestSender {
        traffic_origin,
        address: CLIENT,
        proxied_client: ProxiedClient::Direct,
        is_tls: false,
    };
    write_client_headers(&mut headers, sender, &EdgeSettings::default());
    headers
}

/// Headers for the pod of a request from outside, and true if the request has come by https. All of 10.0.0.0/8 is
/// trusted.
fn proxied_headers(proxied_client: ProxiedClient, fields: &[(&str, &str)]) -> (HeaderMap, bool) {
    let sender = ForwardedRequestSender {
        traffic_origin: TrafficOrigin::External,
        address: CLIENT,
        proxied_client,
        is_tls: false,
    };
    headers_from(sender, fields)
}

/// Headers for the pod of a request by this sender, and true if the request has come by https.
fn headers_from(sender: ForwardedRequestSender, fields: &[(&str, &str)]) -> (HeaderMap, bool) {
    let mut headers = HeaderMap::new();
    for (name, value) in fields {
        let name = name.parse::<HeaderName>().expect("a name");
        headers.append(name, HeaderValue::from_str(value).expect("a value"));
    }
    let trusted_proxies = vec!["10.0.0.0/8".parse().expect("a network")];
    let edge = EdgeSettings { trusted_proxies, ..EdgeSettings::default() };
    let is_secure = is_https(&headers, sender, &edge);
    write_client_headers(&mut headers, sender, &edge);
    (headers, is_secure)
}

/// Values of the headers for the hops, the protocol and the host, and of `Forwarded`.
fn client_headers(headers: &HeaderMap) -> [&str; 4] {
    ["x-forwarded-for", "x-forwarded-proto", "x-forwarded-host", "forwarded"]
        .map(|name| field(headers, name).unwrap_or_default())
}

fn field<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).map(|value| value.to_str().expect("text"))
}

#[test]
fn the_app_learns_the_client() {
    let headers = headers_for(TrafficOrigin::Internal, &[("host", "a:80")]);
    assert_eq!(field(&headers, "forwarded"), Some("for=10.0.0.9;host=\"a:80\";proto=http"));
    assert_eq!(field(&headers, "x-forwarded-for"), Some("10.0.0.9"));
    assert_eq!(field(&headers, "x-forwarded-host"), Some("a:80"));
    let headers =
        headers_for(TrafficOrigin::Internal, &[("host", "a"), ("x-forwarded-proto", "https")]);
    assert_eq!(field(&headers, "forwarded"), Some("for=10.0.0.9;host=a;proto=https"));
    let headers = headers_for(TrafficOrigin::Internal, &[("host", "a"), ("forwarded", "for=x")]);
    assert_eq!(field(&headers, "forwarded"), Some("for=x"));
}

/// A proxy of the client may have ended the TLS before, so what it states is kept.
#[test]
fn the_app_learns_that_a_client_inside_the_cluster_used_tls() {
    let forwarded = |stated: Option<&'static str>| {
        let mut headers = HeaderMap::new();
        headers.extend(stated.map(|it| (X_FORWARDED_PROTO, HeaderValue::from_static(it))));
        let sender = ForwardedRequestSender {
            traffic_origin: TrafficOrigin::Internal,
            address: CLIENT,
            proxied_client: ProxiedClient::Direct,
            is_tls: true,
        };
        write_client_headers(&mut headers, sender, &EdgeSettings::default());
        field(&headers, "x-forwarded-proto").map(str::to_owned)
    };
    assert_eq!(forwarded(None).as_deref(), Some("https"));
    assert_eq!(forwarded(Some("http")).as_deref(), Some("http"));
}

#[test]
fn headers_of_an_external_client_are_replaced() {
    let headers = headers_for(
        TrafficOrigin::External,
        &[
            ("host", "a"),
            ("x-forwarded-for", "fd00::7"),
            ("x-forwarded-proto", "https"),
            ("x-forwarded-host", "evil"),
            ("forwarded", "for=evil;proto=https"),
            ("x-real-ip", "6.6.6.6"),
        ],
    );
    assert_eq!(
        client_headers(&headers),
        ["10.0.0.9", "http", "a", "for=10.0.0.9;host=a;proto=http"]
    );
    assert_eq!(field(&headers, "x-real-ip"), None);
}

/// Libraries read the client's address from any of these.
#[test]
fn an_external_client_describes_itself_by_no_header() {
    let forged = [
        "cf-connecting-ip",
        "client-ip",
        "forwarded-for",
        "front-end-https",
        "true-client-ip",
        "x-client-ip",
        "x-cluster-client-ip",
        "x-forwarded",
        "x-forwarded-by",
        "x-forwarded-port",
        "x-forwarded-prefix",
        "x-forwarded-user",
        "x-original-forwarded-for",
        "x-real-ip",
        "x-url-scheme",
    ];
    let fields = forged.map(|name| (name, "6.6.6.6"));
    // Names that only begin alike, and values that are such names, stay.
    let own = [("host", "a"), ("x-forward", "1"), ("user-agent", "x-real-ip")];
    let headers = headers_for(TrafficOrigin::External, &[&fields[..], &own].concat());
    for name in forged {
        assert_eq!(field(&headers, name), None, "{name}");
    }
    let kept = own.map(|(name, _)| field(&headers, name));
    assert_eq!(kept, [Some("a"), Some("1"), Some("x-real-ip")]);
    let (headers, _) = proxied_headers(ProxiedClient::Direct, &fields);
    for name in forged {
        assert_eq!(field(&headers, name), Some("6.6.6.6"), "{name} of a trusted proxy");
    }
}

/// The proxy writes `X-Forwarded-For` and passes on whatever else its client sends.
#[test]
fn forwarded_beside_the_hops_of_a_trusted_proxy_may_be_its_clients() {
    let fields = [
        ("host", "a"),
        ("x-forwarded-for", "192.0.2.1"),
        ("forwarded", "for=192.0.2.1;host=evil;proto=https"),
    ];
    let (headers, is_secure) = proxied_headers(ProxiedClient::Direct, &fields);
    let written = "for=192.0.2.1;host=a;proto=http, for=10.0.0.9";
    assert_eq!(client_headers(&headers), ["192.0.2.1, 10.0.0.9", "http", "a", written]);
    assert!(!is_secure);
}

/// The proxy appends to the value that its client wrote, as nginx does.
#[test]
fn bytes_beyond_ascii_hide_no_entry_of_a_trusted_proxy() {
    let fields = [
        ("host", "a"),
        ("x-forwarded-for", "\u{e9}, 192.0.2.1"),
        ("x-forwarded-proto", "\u{e9}, http"),
        ("forwarded", "for=6.6.6.6;host=evil;proto=https"),
    ];
    let (headers, is_secure) = proxied_headers(ProxiedClient::Direct, &fields);
    let written = "for=192.0.2.1;host=a;proto=http, for=10.0.0.9";
    assert_eq!(client_headers(&headers), ["192.0.2.1, 10.0.0.9", "http", "a", written]);
    assert!(!is_secure);
}

#[test]
fn headers_of_a_trusted_proxy_are_kept_and_extended() {
    let (headers, is_secure) = proxied_headers(
        ProxiedClient::Direct,
        &[
            ("host", "a"),
            ("x-forwarded-for", "192.0.2.1"),
            ("x-forwarded-proto", "HTTPS"),
            ("x-forwarded-host", "shop.example"),
            ("x-real-ip", "192.0.2.1"),
        ],
    );
    let forwarded = "for=192.0.2.1;host=shop.example;proto=https, for=10.0.0.9";
    assert_eq!(
        client_headers(&headers),
        ["192.0.2.1, 10.0.0.9", "https", "shop.example", forwarded]
    );
    assert_eq!((field(&headers, "x-real-ip"), is_secure), (Some("192.0.2.1"), true));
    let (headers, is_secure) = proxied_headers(ProxiedClient::Direct, &[("host", "a")]);
    assert_eq!(
        client_headers(&headers),
        ["10.0.0.9", "http", "a", "for=10.0.0.9;host=a;proto=http"]
    );
    assert!(!is_secure);
}

#[test]
fn a_trusted_proxy_may_send_only_the_header_forwarded() {
    let given = "for=\"[2001:db8::1]:7\";proto=http, for=192.0.2.1;host=shop.example;proto=https";
    let (headers, is_secure) =
        proxied_headers(ProxiedClient::Direct, &[("host", "a"), ("forwarded", given)]);
    let written = "for=192.0.2.1;host=shop.example;proto=https, for=10.0.0.9";
    assert_eq!(client_headers(&headers), ["192.0.2.1, 10.0.0.9", "https", "shop.example", written]);
    assert!(is_secure, "{headers:?}");
    let (headers, is_secure) =
        proxied_headers(ProxiedClient::Direct, &[("host", "a"), ("forwarded", "for=\"192.0.2.1")]);
    assert_eq!(
        client_headers(&headers),
        ["10.0.0.9", "http", "a", "for=10.0.0.9;host=a;proto=http"]
    );
    assert!(!is_secure, "an incomplete field is ignored");
}

#[test]
fn a_trusted_proxy_passes_on_what_a_client_claims_only_as_far_as_trust_goes() {
    for (given, kept) in [
        ("6.6.6.6, 192.0.2.1", "192.0.2.1, 10.0.0.9"),
        ("6.6.6.6, 192.0.2.1, 10.7.0.1", "192.0.2.1, 10.7.0.1, 10.0.0.9"),
        ("192.0.2.1, 10.7.0.1:8080,, [10.0.0.3]", "192.0.2.1, 10.7.0.1:8080, [10.0.0.3], 10.0.0.9"),
        ("10.6.6.6, evil, 10.7.0.1", "evil, 10.7.0.1, 10.0.0.9"),
        ("10.7.0.2, 10.7.0.1", "10.7.0.2, 10.7.0.1, 10.0.0.9"),
    ] {
        let (headers, _) =
            proxied_headers(ProxiedClient::Direct, &[("host", "a"), ("x-forwarded-for", given)]);
        assert_eq!(field(&headers, "x-forwarded-for"), Some(kept), "{given}");
    }
    let protos = [("x-forwarded-proto", "https"), ("x-forwarded-proto", "http")];
    assert!(!proxied_headers(ProxiedClient::Direct, &protos).1, "the last value is the proxy's");
}

#[test]
fn a_proxy_header_names_the_client_and_its_protocol() {
    let (headers, is_secure) =
        proxied_headers(ProxiedClient::Named { is_secure: true }, &[("host", "a")]);
    assert_eq!(
        client_headers(&headers),
        ["10.0.0.9", "https", "a", "for=10.0.0.9;host=a;proto=https"]
    );
    assert!(is_secure);
}

#[test]
fn tls_at_the_gateway_is_https_unless_a_trusted_proxy_reports_another_scheme() {
    let foreign = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
    for (address, reported, scheme) in
        [(foreign, "http", "https"), (CLIENT, "http", "http"), (CLIENT, "", "https")]
    {
        let sender = ForwardedRequestSender {
            traffic_origin: TrafficOrigin::External,
            address,
            proxied_client: ProxiedClient::Direct,
            is_tls: true,
        };
        let all = [("host", "a"), ("x-forwarded-proto", reported)];
        let fields = if reported.is_empty() { &all[..1] } else { &all[..] };
        let (headers, is_secure) = headers_from(sender, fields);
        let proto = field(&headers, "x-forwarded-proto");
        assert_eq!((proto, is_secure), (Some(scheme), scheme == "https"), "{address} {reported}");
        let forwarded = format!("for={address};host=a;proto={scheme}");
        assert_eq!(field(&headers, "forwarded"), Some(forwarded.as_str()), "{address} {reported}");
    }
}

#[test]
fn headers_are_replaced_if_a_proxy_header_does_not_name_the_client() {
    let forged = [("host", "a"), ("x-forwarded-for", "6.6.6.6"), ("x-forwarded-proto", "https")];
    let (headers, is_secure) = proxied_headers(ProxiedClient::Unnamed, &forged);
    assert_eq!(
        client_headers(&headers),
        ["10.0.0.9", "http", "a", "for=10.0.0.9;host=a;proto=http"]
    );
    assert!(!is_secure);
}

#[test]
fn an_address_cannot_add_parameters_to_forwarded() {
    let headers = headers_for(
        TrafficOrigin::Internal,
        &[("host", "a"), ("x-forwarded-for", "x;proto=\"https")],
    );
    let forwarded_for = "for=\"x;proto=\\\"https\";host=a;proto=http, for=10.0.0.9";
    assert_eq!(field(&headers, "forwarded"), Some(forwarded_for));
}

#[test]
fn a_trace_begins_here_unless_it_has_begun() {
    let trace = |given: &[&str]| {
        let mut headers = HeaderMap::new();
        for it in given {
            headers.append(TRACEPARENT, HeaderValue::from_str(it).expect("a value"));
        }
        headers.insert(TRACESTATE, HeaderValue::from_static("a=b"));
        ensure_trace_context(&mut headers, || 7);
        let all = headers.get_all(TRACEPARENT).iter().map(|it| it.to_str().expect("text"));
        (all.collect::<Vec<_>>().join(" "), headers.contains_key(TRACESTATE))
    };
    let given = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    assert_eq!(trace(&[given]), (given.to_owned(), true));
    // A later version may have further fields, which no reader may refuse (W3C Trace Context, section 3.2.4).
    let later = "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more";
    assert_eq!(trace(&[later]), (later.to_owned(), true));
    let begun = ("00-00000000000000070000000000000007-0000000000000007-00".to_owned(), false);
    for bad in [
        &[][..],
        &[given, given],
        &["00-00000000000000000000000000000000-00f067aa0ba902b7-01"],
        &["00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01"],
        &["00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01"],
        &["ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"],
        &["00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more"],
        &["00"],
    ] {
        assert_eq!(trace(bad), begun, "{bad:?}");
    }
}

/// Parses `Forwarded` by its grammar (RFC 7239, section 4) and returns each element's pairs.
fn parse(text: &str) -> Option<Vec<Vec<(String, String)>>> {
    let (mut rest, mut elements) = (text, vec![vec![]]);
    loop {
        let at = rest.find('=')?;
        let name = &rest[..at];
        let (value, after) = value(&rest[at + 1..])?;
        elements.last_mut()?.push((name.to_owned(), value));
        if after.is_empty() {
            return Some(elements);
        }
        rest = match after.strip_prefix(';') {
            Some(next) => next,
            None => {
                elements.push(vec![]);
                after.strip_prefix(", ")?
            }
        };
    }
}

fn value(text: &str) -> Option<(String, &str)> {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find([';', ',']).unwrap_or(text.len());
        let is_token =
            |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
        let token = &text[..end];
        let is_value = !token.is_empty() && token.bytes().all(is_token);
        return is_value.then(|| (token.to_owned(), &text[end..]));
    };
    let (mut out, mut letters) = (String::new(), quoted.char_indices());
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' => return Some((out, &quoted[at + 1..])),
            '\\' => out.push(letters.next()?.1),
            other => out.push(other),
        }
    }
    None
}

fn x_forwarded_proto(headers: &HeaderMap) -> &str {
    client_headers(headers)[1]
}

proptest! {
    /// For any headers of a trusted proxy, `Forwarded` keeps its grammar and ends with that proxy.
    #[test]
    fn forwarded_keeps_its_grammar_by_a_trusted_proxy(
        given in proptest::option::of("[ -~]{0,40}"),
        element in proptest::option::of("(for=[a-z0-9.]{1,9}(;proto=https)?(, )?){1,3}"),
        forwarded_for in proptest::option::of("[ -~]{0,40}"),
        proto in proptest::option::of("[ -~]{1,10}"),
    ) {
        let mut fields = vec![("host", "a")];
        fields.extend(given.as_deref().map(|it| ("forwarded", it)));
        fields.extend(element.as_deref().map(|it| ("forwarded", it)));
        fields.extend(forwarded_for.as_deref().map(|it| ("x-forwarded-for", it)));
        fields.extend(proto.as_deref().map(|it| ("x-forwarded-proto", it)));
        let (headers, _) = proxied_headers(ProxiedClient::Direct, &fields);
        let text = field(&headers, "forwarded").expect("always written");
        let elements = crate::edge::forwarded_header::parse_elements(text);
        prop_assert!(elements.is_some(), "{}", text);
        let last = elements.unwrap_or_default().pop().and_then(|it| it.forwarded_for);
        prop_assert_eq!(last.as_deref(), Some("10.0.0.9"));
        let known = ["http", "https", "ws", "wss"].contains(&x_forwarded_proto(&headers));
        prop_assert!(known, "{:?}", headers);
    }

    /// For any headers of an external client, `Forwarded` has the real address, host and protocol. An internal client's
    /// `X-Forwarded-For` and `X-Forwarded-Proto` are kept: `Forwarded` is well-formed and ends with the real address.
    #[test]
    fn forwarded_keeps_its_grammar(
        forwarded in proptest::option::of("[ -~]{0,40}"),
        forwarded_host in proptest::option::of("[ -~]{1,20}"),
        forwarded_for in proptest::option::of("[ -~]{0,40}"),
        host in "[a-z0-9.:-]{1,20}",
        proto in proptest::option::of("[ -~]{1,10}"),
        outside: bool,
    ) {
        let side = if outside { TrafficOrigin::External } else { TrafficOrigin::Internal };
        let mut fields = vec![("host", host.as_str())];
        if outside {
            fields.extend(forwarded.as_deref().map(|forwarded| ("forwarded", forwarded)));
            fields.extend(forwarded_host.as_deref().map(|forwarded_host| ("x-forwarded-host", forwarded_host)));
        }
        fields.extend(forwarded_for.as_deref().map(|forwarded_for| ("x-forwarded-for", forwarded_for)));
        fields.extend(proto.as_deref().map(|proto| ("x-forwarded-proto", proto)));
        let headers = headers_for(side, &fields);
        let text = field(&headers, "forwarded").expect("always written");
        let elements = parse(text);
        prop_assert!(elements.is_some(), "{}", text);
        let elements = elements.unwrap_or_default();
        let last = elements.last().and_then(|it| it.first()).cloned();
        prop_assert_eq!(last, Some(("for".to_owned(), "10.0.0.9".to_owned())));
        let parameter = |name: &str| {
            elements[0].iter().find(|(it, _)| it == name).map(|(_, value)| value.clone())
        };
        prop_assert_eq!(parameter("host"), Some(host.clone()));
        if outside {
            prop_assert_eq!(parameter("proto"), Some("http".to_owned()));
        }
        let added = field(&headers, "x-forwarded-for").is_some_and(|forwarded_for| forwarded_for.ends_with("10.0.0.9"));
        prop_assert!(added);
    }

    /// A trace that begins here is valid for the next components.
    #[test]
    fn a_begun_trace_is_valid(numbers: [u64; 3]) {
        let mut headers = HeaderMap::new();
        let mut numbers = numbers.into_iter();
        ensure_trace_context(&mut headers, || numbers.next().unwrap_or(0));
        prop_assert!(is_traceparent(headers[TRACEPARENT].as_bytes()));
    }
}

#[test]
fn trailers_describe_no_client() {
    let mut trailers = HeaderMap::new();
    for name in ["x-sum", "x-forwarded-client-cert", "x_forwarded_for", "forwarded", "x-real-ip"] {
        trailers.insert(HeaderName::from_static(name), HeaderValue::from_static("1"));
    }
    remove_client_claims(&mut trailers);
    let left: Vec<&str> = trailers.keys().map(HeaderName::as_str).collect();
    assert_eq!(left, ["x-sum"]);
}
