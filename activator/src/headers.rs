//! Pure: what changes in a head on its way to a pod and back.

use std::net::IpAddr;

use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Uri, Version, header, request, uri::Authority,
    uri::PathAndQuery,
};

use crate::failure::Failure;

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
const HTTP2_SETTINGS: HeaderName = HeaderName::from_static("http2-settings");
/// Asks the platform, not the app (`networking/pkg/http/header/header.go`).
pub const K_NETWORK_PROBE: HeaderName = HeaderName::from_static("k-network-probe");
/// Goes with a probe.
pub const K_NETWORK_HASH: HeaderName = HeaderName::from_static("k-network-hash");

/// Headers by which Knative's parts talk to each other; an app never sees them.
const INTERNAL: [HeaderName; 8] = [
    HeaderName::from_static("knative-serving-revision"),
    HeaderName::from_static("knative-serving-namespace"),
    HeaderName::from_static("k-proxy-request"),
    HeaderName::from_static("k-original-host"),
    HeaderName::from_static("k-kubelet-probe"),
    HeaderName::from_static("k-passthrough-lb"),
    K_NETWORK_PROBE,
    K_NETWORK_HASH,
];

/// Meant for one hop only (RFC 9110 §7.6.1). `Transfer-Encoding` is rewritten by the HTTP library, which
/// needs to see it; `Trailer` has to reach the other end.
const HOP: [HeaderName; 6] = [
    header::CONNECTION,
    KEEP_ALIVE,
    PROXY_CONNECTION,
    header::PROXY_AUTHENTICATE,
    header::UPGRADE,
    HTTP2_SETTINGS,
];

/// Where a request came in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// From a workload of the cluster, on the service's own port.
    Inside,
    /// Through the gateway: what it says of its own way is not believed.
    Outside,
}

/// The host a request asks for: lower case, without port and final dot.
pub fn host(head: &request::Parts) -> Option<String> {
    let named = match head.uri.authority() {
        Some(authority) => authority.as_str(),
        None => head.headers.get(header::HOST)?.to_str().ok()?,
    };
    let bare = named.rsplit_once('@').map_or(named, |(_, host)| host);
    let end = if bare.starts_with('[') {
        bare.find(']')? + 1
    } else {
        bare.find(':').unwrap_or(bare.len())
    };
    let host = bare[..end].trim_end_matches('.');
    (!host.is_empty()).then(|| host.to_ascii_lowercase())
}

/// Refuses a request that does not say plainly which host it is for (RFC 9112 §3.2): two ends of a way that
/// choose differently among two hosts would not mean the same request. HTTP/1.0 may leave it out.
pub fn check_host(head: &request::Parts) -> Result<(), Failure> {
    let refused = |text: &str| Err(Failure::BadRequest(text.to_owned()));
    let mut named = head.headers.get_all(header::HOST).iter();
    match (named.next(), named.next()) {
        (None, _) if head.version >= Version::HTTP_11 => refused("missing required Host header"),
        (_, Some(_)) => refused("too many Host headers"),
        (Some(host), None) if !is_host(host.as_bytes()) => refused("malformed Host header"),
        _ if head.uri.authority().is_some_and(|it| !is_host(it.as_str().as_bytes())) => {
            refused("malformed host in the request's target")
        }
        _ => Ok(()),
    }
}

/// Whether this is `uri-host [":" port]` (RFC 3986 §3.2); like there, the host may be empty.
fn is_host(text: &[u8]) -> bool {
    let (host, port) = match text.iter().rposition(|&byte| byte == b':' || byte == b']') {
        Some(at) if text[at] == b':' => (&text[..at], &text[at + 1..]),
        Some(_) | None => (text, &[][..]),
    };
    let is_name = match host {
        [b'[', inner @ .., b']'] => is_literal(inner),
        name => is_reg_name(name),
    };
    is_name && port.iter().all(u8::is_ascii_digit)
}

/// Whether this may stand in brackets: an IPv6 address, with a zone or not.
fn is_literal(inner: &[u8]) -> bool {
    let text = std::str::from_utf8(inner).unwrap_or_default();
    let (address, zone) =
        text.split_once("%25").map_or((text, None), |(it, zone)| (it, Some(zone)));
    address.parse::<std::net::Ipv6Addr>().is_ok()
        && zone.is_none_or(|zone| !zone.is_empty() && is_reg_name(zone.as_bytes()))
}

fn is_reg_name(mut name: &[u8]) -> bool {
    loop {
        name = match name {
            [] => return true,
            [b'%', high, low, rest @ ..] if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() => {
                rest
            }
            [byte, rest @ ..]
                if byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=".contains(byte) =>
            {
                rest
            }
            _ => return false,
        };
    }
}

/// Turns a head as it arrived into one for a pod. Returns the protocol the client wants to switch to.
pub fn to_pod(
    head: &mut request::Parts,
    side: Side,
    client: IpAddr,
    service_host: impl FnOnce() -> String,
) -> Result<Option<HeaderValue>, Failure> {
    if head.method == Method::CONNECT {
        return Err(Failure::Connect);
    }
    settle_host(head, service_host)?;
    let upgrade = upgrade_of(&head.headers);
    let wants_trailers = mentions(&head.headers, header::TE, "trailers");
    strip_hop(&mut head.headers);
    head.headers.remove(header::TE);
    for name in &INTERNAL {
        head.headers.remove(name);
    }
    if wants_trailers {
        head.headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
    if let Some(protocol) = &upgrade {
        head.headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        head.headers.insert(header::UPGRADE, protocol.clone());
    }
    forwarded(&mut head.headers, side, client);
    head.version = Version::HTTP_11;
    Ok(upgrade)
}

/// Turns a pod's head into one for the client.
pub fn to_client(headers: &mut HeaderMap, switched: bool) {
    let upgrade = switched.then(|| headers.get(header::UPGRADE).cloned()).flatten();
    strip_hop(headers);
    if let Some(protocol) = upgrade {
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, protocol);
    }
}

/// Bytes a head takes while it waits, roughly: names, values and what the map adds to each.
pub fn weight(head: &request::Parts) -> usize {
    const PER_REQUEST: usize = 1024;
    const PER_HEADER: usize = 32;
    let line = head.uri.path_and_query().map_or(1, |it| it.as_str().len());
    let fields = head.headers.iter();
    let fields = fields.map(|(name, value)| name.as_str().len() + value.len() + PER_HEADER);
    PER_REQUEST + line + fields.sum::<usize>()
}

/// Leaves path and query in the URI, and the host in `Host`: an absolute URI wins (RFC 9112 §3.2.2).
fn settle_host(
    head: &mut request::Parts,
    service_host: impl FnOnce() -> String,
) -> Result<(), Failure> {
    let authority = head.uri.authority().map(Authority::as_str).map(HeaderValue::from_str);
    if let Some(named) = authority {
        let named = named.map_err(|error| Failure::BadRequest(format!("bad host: {error}")))?;
        head.headers.insert(header::HOST, named);
        let path = head.uri.path_and_query().cloned();
        head.uri = Uri::from(path.unwrap_or_else(|| PathAndQuery::from_static("/")));
    }
    if head.headers.contains_key(header::HOST) {
        return Ok(());
    }
    // HTTP/1.0 knows no Host, the request to the pod needs one.
    let own = HeaderValue::from_str(&service_host());
    let own = own.map_err(|error| Failure::BadRequest(format!("bad host: {error}")))?;
    head.headers.insert(header::HOST, own);
    Ok(())
}

fn strip_hop(headers: &mut HeaderMap) {
    if headers.contains_key(header::CONNECTION) {
        let named: Vec<HeaderName> = tokens(headers, header::CONNECTION)
            .filter_map(|token| token.parse().ok())
            // Never what frames or addresses the message, whatever the peer says.
            .filter(|name| {
                ![header::HOST, header::CONTENT_LENGTH, header::TRANSFER_ENCODING].contains(name)
            })
            .collect();
        for name in named {
            headers.remove(name);
        }
    }
    for name in &HOP {
        headers.remove(name);
    }
}

/// The protocol to switch to. HTTP/2 is not offered that way any more (RFC 9113 §3.1).
fn upgrade_of(headers: &HeaderMap) -> Option<HeaderValue> {
    let protocol = headers.get(header::UPGRADE)?;
    let asked = mentions(headers, header::CONNECTION, "upgrade");
    let http2 = protocol.as_bytes().eq_ignore_ascii_case(b"h2c");
    (asked && !http2).then(|| protocol.clone())
}

fn mentions(headers: &HeaderMap, name: HeaderName, token: &str) -> bool {
    tokens(headers, name).any(|it| it.eq_ignore_ascii_case(token))
}

fn tokens(headers: &HeaderMap, name: HeaderName) -> impl Iterator<Item = &str> {
    let values = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim)
}

/// Adds what the app may want to know of the client (Knative runtime contract; RFC 7239).
fn forwarded(headers: &mut HeaderMap, side: Side, client: IpAddr) {
    let way = match list(headers, &X_FORWARDED_FOR) {
        Some(before) => format!("{before}, {client}"),
        None => client.to_string(),
    };
    let outside = side == Side::Outside;
    if outside || !headers.contains_key(&X_FORWARDED_PROTO) {
        headers.insert(X_FORWARDED_PROTO, HeaderValue::from_static("http"));
    }
    if outside || !headers.contains_key(&X_FORWARDED_HOST) {
        let host = headers.get(header::HOST).cloned();
        host.map(|host| headers.insert(X_FORWARDED_HOST, host));
    }
    if !headers.contains_key(header::FORWARDED) {
        let (host, proto) = (list(headers, &X_FORWARDED_HOST), list(headers, &X_FORWARDED_PROTO));
        let text = rfc7239(&way, &host.unwrap_or_default(), &proto.unwrap_or_default());
        if let Ok(value) = HeaderValue::try_from(text) {
            headers.insert(header::FORWARDED, value);
        }
    }
    if let Ok(value) = HeaderValue::try_from(way) {
        headers.insert(X_FORWARDED_FOR, value);
    }
}

fn list(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    let all: Vec<&str> = headers.get_all(name).iter().filter_map(|it| it.to_str().ok()).collect();
    (!all.is_empty()).then(|| all.join(", "))
}

/// `for=<first>;host=<host>;proto=<proto>, for=<next>…`, as Knative's sidecar writes it.
fn rfc7239(way: &str, host: &str, proto: &str) -> String {
    let node = |hop: &str| match hop.parse::<std::net::Ipv6Addr>() {
        Ok(six) => format!("\"[{six}]\""),
        Err(_) => hop.to_owned(),
    };
    let quoted = if host.contains(':') { format!("\"{host}\"") } else { host.to_owned() };
    let mut hops = way.split(',').map(str::trim);
    let first = node(hops.next().unwrap_or_default());
    let mut text = format!("for={first};host={quoted};proto={proto}");
    for hop in hops {
        text.push_str(", for=");
        text.push_str(&node(hop));
    }
    text
}

#[cfg(test)]
mod tests;
