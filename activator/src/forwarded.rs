//! Pure: what a pod is told of a request's way: `Forwarded`, `X-Forwarded-*`, `traceparent`.
//!
//! Knative's runtime contract asks for them (`runtime-contract.md`); its sidecar writes `Forwarded` where there is none
//! (`pkg/queue/forwarded_shim.go`). From outside only `X-Forwarded-For` is taken over, and our client's address is added
//! to it, as proxies do; host and protocol are what we saw ourselves, and `Forwarded` is written anew.

use std::net::IpAddr;

use http::{HeaderMap, HeaderName, HeaderValue, header};

use crate::headers::Side;

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Adds what the app may want to know of the client.
pub fn forwarded(headers: &mut HeaderMap, side: Side, client: IpAddr) {
    let way = match list(headers, &X_FORWARDED_FOR) {
        Some(before) => format!("{before}, {client}"),
        None => client.to_string(),
    };
    let outside = side == Side::Outside;
    if outside {
        headers.remove(header::FORWARDED);
    }
    if outside || !headers.contains_key(&X_FORWARDED_PROTO) {
        headers.insert(X_FORWARDED_PROTO, HeaderValue::from_static("http"));
    }
    if outside || !headers.contains_key(&X_FORWARDED_HOST) {
        let host = headers.get(header::HOST).cloned();
        host.map(|host| headers.insert(X_FORWARDED_HOST, host));
    }
    if !headers.contains_key(header::FORWARDED) {
        let (host, proto) = (list(headers, &X_FORWARDED_HOST), list(headers, &X_FORWARDED_PROTO));
        let text = rfc7239(&way, host.as_deref(), proto.as_deref());
        if let Ok(value) = HeaderValue::try_from(text) {
            headers.insert(header::FORWARDED, value);
        }
    }
    if let Ok(value) = HeaderValue::try_from(way) {
        headers.insert(X_FORWARDED_FOR, value);
    }
}

/// Begins a trace where the request does not belong to one yet (W3C Trace Context §3.2). One that makes sense passes
/// unchanged: we record nothing that could stand between. `chance` is uniform over u64.
pub fn traced(headers: &mut HeaderMap, mut chance: impl FnMut() -> u64) {
    let mut given = headers.get_all(&TRACEPARENT).iter();
    let is_traced = match (given.next(), given.next()) {
        (Some(one), None) => is_traceparent(one.as_bytes()),
        _ => false,
    };
    if is_traced {
        return;
    }
    headers.remove(&TRACESTATE);
    // No part of it may be all zero; not sampled: nobody has asked for it to be recorded.
    let mut number = || chance().max(1);
    let text = format!("00-{:016x}{:016x}-{:016x}-00", number(), number(), number());
    if let Ok(value) = HeaderValue::try_from(text) {
        headers.insert(TRACEPARENT, value);
    }
}

/// `version-trace-parent-flags` in lower-case hex; later versions may say more behind that.
fn is_traceparent(text: &[u8]) -> bool {
    let Some((known, more)) = text.split_at_checked(55) else { return false };
    let mut fields = known.split(|&byte| byte == b'-');
    let mut next = |length: usize| {
        let is_hex = |byte: &u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte);
        fields.next().filter(|field| field.len() == length && field.iter().all(is_hex))
    };
    let (Some(version), Some(trace), Some(parent), Some(_flags)) =
        (next(2), next(32), next(16), next(2))
    else {
        return false;
    };
    let is_zero = |field: &[u8]| field.iter().all(|&byte| byte == b'0');
    let ends =
        if version == b"00" { more.is_empty() } else { more.first().is_none_or(|&it| it == b'-') };
    version != b"ff" && ends && !is_zero(trace) && !is_zero(parent)
}

fn list(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    let all: Vec<&str> = headers.get_all(name).iter().filter_map(|it| it.to_str().ok()).collect();
    (!all.is_empty()).then(|| all.join(", "))
}

/// `for=<first>;host=<host>;proto=<proto>, for=<next>…`, as Knative's sidecar writes it.
fn rfc7239(way: &str, host: Option<&str>, proto: Option<&str>) -> String {
    let mut hops = way.split(',').map(str::trim).filter(|hop| !hop.is_empty());
    let mut text = format!("for={}", node(hops.next().unwrap_or("unknown")));
    for (name, value) in [("host", host), ("proto", proto)] {
        if let Some(value) = value.filter(|value| !value.is_empty()) {
            text.push_str(&format!(";{name}={}", quoted(value)));
        }
    }
    for hop in hops {
        text.push_str(", for=");
        text.push_str(&node(hop));
    }
    text
}

fn node(hop: &str) -> String {
    match hop.parse::<std::net::Ipv6Addr>() {
        Ok(six) => format!("\"[{six}]\""),
        Err(_) => quoted(hop),
    }
}

/// A token as it is, anything else as a quoted string (RFC 9110 §5.6): whoever wrote it cannot end the field early.
fn quoted(text: &str) -> String {
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    if !text.is_empty() && text.bytes().all(is_token) {
        return text.to_owned();
    }
    let mut out = String::from("\"");
    for letter in text.chars() {
        if matches!(letter, '"' | '\\') {
            out.push('\\');
        }
        out.push(letter);
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests;
