//! Pure: comparison of plain requests with the same requests on the general path, for tests and the fuzzer.

use bytes::BytesMut;
use common::wire::{AppProtocol, EdgeSettings};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Version, request};

use super::{RequestStart, field_array, read_request_start, render_client_fields};
use crate::{
    edge::{
        client_headers::{ForwardedRequestSender, ProxiedClient},
        headers::{self, PodRequestContext},
        host, platform_probe,
    },
    entrypoint::TrafficOrigin,
    h1::{self, RequestBodyFraming},
};

/// Number in place of random ones, so that both paths begin the same trace.
fn fixed_number() -> u64 {
    0x0123_4567_89ab_cdef
}

/// Checks that a pod gets the same head of a plain request on both paths, and that a part of the head is not judged.
///
/// # Panics
///
/// When an invariant does not hold.
pub fn check(bytes: &[u8]) {
    let mut fields = field_array();
    let RequestStart::Plain(request) = read_request_start(bytes, &mut fields) else { return };
    assert!(request.head_length + request.body_length <= bytes.len(), "the request is complete");
    for cut in [request.head_length / 2, request.head_length - 1] {
        let mut fields = field_array();
        let start = read_request_start(&bytes[..cut], &mut fields);
        assert!(matches!(start, RequestStart::Incomplete), "{cut} bytes: {start:?}");
    }
    let edge = EdgeSettings::default();
    for traffic_origin in [TrafficOrigin::Internal, TrafficOrigin::External] {
        let sender = ForwardedRequestSender {
            traffic_origin,
            address: [192, 0, 2, 7].into(),
            proxied_client: ProxiedClient::Direct,
            is_tls: traffic_origin == TrafficOrigin::External,
        };
        let client_fields =
            render_client_fields(request.host, request.client_claims(), sender, &edge);
        let client_fields = client_fields.expect("each claim is a valid field");
        let mut fast = BytesMut::new();
        request.write_for_pod(&client_fields, fixed_number, &mut fast);
        let general = general_head(bytes, request.body_length, sender, &edge);
        assert_eq!(sorted_lines(&fast), sorted_lines(&general), "{traffic_origin:?}");
    }
}

/// Head that a pod gets on the general path.
fn general_head(
    bytes: &[u8],
    body_length: usize,
    sender: ForwardedRequestSender,
    edge: &EdgeSettings,
) -> BytesMut {
    let mut head = parse_general(bytes);
    host::check_host(&head).expect("the host is clear");
    headers::check_transfer_codings(&head.headers).expect("there is no coding");
    assert_eq!(platform_probe::parse_probe(&head), None, "it is no probe");
    let context = PodRequestContext {
        sender,
        edge,
        host_rewrite: None,
        tags: None,
        protocol: AppProtocol::Http1,
        client_certificate: None,
        random: fixed_number,
    };
    let upgrade =
        headers::rewrite_request_head(&mut head, context, || unreachable!("Host is there"));
    assert!(matches!(upgrade, Ok(None)), "no upgrade is asked for: {upgrade:?}");
    let framing = match body_length {
        0 => RequestBodyFraming::NoBody,
        length => RequestBodyFraming::Length(length as u64),
    };
    let mut out = BytesMut::new();
    h1::write_request(&head, None, framing, &mut out);
    out
}

/// Parses a head as hyper does.
fn parse_general(bytes: &[u8]) -> request::Parts {
    let mut fields = [httparse::EMPTY_HEADER; 64];
    let mut parsed = httparse::Request::new(&mut fields);
    assert!(parsed.parse(bytes).is_ok_and(|it| it.is_complete()), "the head is valid");
    let (mut head, ()) = Request::new(()).into_parts();
    let method = parsed.method.unwrap_or_default().as_bytes();
    head.method = Method::from_bytes(method).expect("a method");
    head.uri = parsed.path.unwrap_or_default().parse().expect("a target");
    let target = head.uri.path_and_query().map(|it| it.as_str());
    assert_eq!(target, parsed.path, "the target is held as it is");
    head.version = Version::HTTP_11;
    head.headers = HeaderMap::new();
    for field in &*parsed.headers {
        let name = HeaderName::from_bytes(field.name.as_bytes()).expect("a name");
        head.headers.append(name, HeaderValue::from_bytes(field.value).expect("a value"));
    }
    head
}

/// Lines of a head, without regard to the order of the fields.
fn sorted_lines(head: &[u8]) -> Vec<String> {
    let text = head.escape_ascii().to_string();
    let mut lines: Vec<String> = text.split("\\r\\n").map(str::to_owned).collect();
    lines[1..].sort_unstable();
    lines
}
