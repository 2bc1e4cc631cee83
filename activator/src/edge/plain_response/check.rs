//! Pure: comparison of plain responses with the same responses on the general path, for tests and the fuzzer.

use bytes::BytesMut;
use http::{HeaderMap, Method, StatusCode, Version, header};

use super::{PlainFraming, PlainResponse, ResponseStart, rewrite_plain_response};
use crate::{
    edge::headers,
    h1::{self, Http1ResponseHead, ResponseBodyFraming},
};

/// Checks that a client gets the same head of a plain response on both paths, and that both read the same body.
///
/// # Panics
///
/// When an invariant does not hold.
pub fn check(bytes: &[u8]) {
    let mut fast = BytesMut::new();
    let ResponseStart::Plain(plain) = rewrite_plain_response(bytes, &mut fast) else {
        assert!(fast.is_empty(), "nothing is written for another response");
        return;
    };
    let mut from = BytesMut::from(bytes);
    let parsed = h1::parse_response_head(&mut from, &mut 0, &Method::GET);
    let mut general = parsed.ok().flatten().expect("the general parser takes it, too");
    assert_eq!(plain.head_length, bytes.len() - from.len(), "both read the same head");
    assert_eq!(summary(&plain), general_summary(&general));
    headers::rewrite_response_head(&mut general.headers, general.status, Version::HTTP_11);
    // Without its last line, which is added later.
    fast.extend_from_slice(b"\r\n");
    let written = h1::parse_response_head(&mut fast, &mut 0, &Method::GET);
    let written = written.ok().flatten().expect("a valid head was written");
    assert_eq!(written.status, general.status);
    assert_eq!(written.reason, general.reason);
    assert_eq!(fields(&written.headers), fields(&general.headers));
    assert_eq!(plain.has_date, general.headers.contains_key(header::DATE));
}

/// Status, length of the body (`None`: chunks), and true if the connection may be used again.
fn summary(plain: &PlainResponse) -> (StatusCode, Option<u64>, bool) {
    let length = match plain.framing {
        PlainFraming::Length(length) => Some(length),
        PlainFraming::Chunked => None,
    };
    (plain.status, length, plain.is_reusable)
}

fn general_summary(head: &Http1ResponseHead) -> (StatusCode, Option<u64>, bool) {
    let length = match &head.framing {
        ResponseBodyFraming::Length(length) => Some(*length),
        ResponseBodyFraming::Chunked(_) => None,
        other => panic!("a plain response has a length or chunks: {other:?}"),
    };
    (head.status, length, head.is_reusable)
}

/// Fields, sorted by their names. Those of one name stay in their order.
fn fields(headers: &HeaderMap) -> Vec<(String, String)> {
    let texts = headers
        .iter()
        .map(|(name, value)| (name.to_string(), value.as_bytes().escape_ascii().to_string()));
    let mut all: Vec<_> = texts.collect();
    all.sort_by(|one, other| one.0.cmp(&other.0));
    all
}
