//! Pure: changes of a head on its way to a pod and back.

use std::num::NonZeroU16;

use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, Uri, Version, header, request,
    uri::{Authority, PathAndQuery, Scheme},
};

use common::wire::{AppProtocol, EdgeSettings, HstsPolicy, NamespacedName, TagRouting};

use crate::{
    budget::REQUEST_OVERHEAD_BYTES,
    edge::{
        client_certificate::write_client_certificate,
        client_headers::{ForwardedRequestSender, ensure_trace_context, write_client_headers},
        host,
        platform_probe::{K_KUBELET_PROBE, K_NETWORK_HASH, K_NETWORK_PROBE},
    },
    entrypoint::TrafficOrigin,
    request_error::ProxyRequestError,
};

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
const HTTP2_SETTINGS: HeaderName = HeaderName::from_static("http2-settings");
const K_ORIGINAL_HOST: HeaderName = HeaderName::from_static("k-original-host");
/// Header by which a client requests a tag of a route, and by which the pod learns the chosen one
/// (`networking/pkg/http/header/header.go`).
pub const TAG_HEADER: HeaderName = HeaderName::from_static("knative-serving-tag");
const DEFAULT_ROUTE_HEADER: HeaderName = HeaderName::from_static("knative-serving-default-route");
/// Headers by which an ingress of another controller names the Revision that it has chosen (knative/serving
/// `pkg/activator/activator.go`).
const REVISION_HEADER: HeaderName = HeaderName::from_static("knative-serving-revision");
const REVISION_NAMESPACE_HEADER: HeaderName = HeaderName::from_static("knative-serving-namespace");

/// Headers between components of Knative. What a client writes there never reaches the app. Exceptions are a tag that
/// the Route does not have (see [`write_tag_headers`]), and tags from a trusted ingress.
const KNATIVE_INTERNAL_HEADERS: [HeaderName; 10] = [
    REVISION_HEADER,
    REVISION_NAMESPACE_HEADER,
    TAG_HEADER,
    DEFAULT_ROUTE_HEADER,
    HeaderName::from_static("k-proxy-request"),
    K_ORIGINAL_HOST,
    K_KUBELET_PROBE,
    HeaderName::from_static("k-passthrough-lb"),
    K_NETWORK_PROBE,
    K_NETWORK_HASH,
];
/// Prefixes of the platform's header names, also of future ones. Headers from outside with such names are dropped.
pub(crate) const PLATFORM_PREFIXES: [&str; 2] = ["k-", "knative-serving-"];

/// Protocol to which every client may switch (RFC 6455).
pub const WEBSOCKET: &str = "websocket";

/// Port that a URL of https means if it names none (RFC 9110 §4.2.2).
pub const HTTPS_PORT: u16 = 443;

/// Port that a URL of http means if it names none (RFC 9110 §4.2.1).
const HTTP_PORT: u16 = 80;

/// Headers for one hop only (RFC 9110 §7.6.1). `Transfer-Encoding` stays, because the writer of the next message needs
/// to see it and writes its own. `Trailer` has to reach the other end.
const HOP_BY_HOP_HEADERS: [HeaderName; 6] = [
    header::CONNECTION,
    KEEP_ALIVE,
    PROXY_CONNECTION,
    header::PROXY_AUTHENTICATE,
    header::UPGRADE,
    HTTP2_SETTINGS,
];

/// Information of the RouteTable and of the connection about a request, in addition to the request itself.
#[derive(Clone, Copy, Debug)]
pub struct PodRequestContext<'a> {
    /// Sender of the request, and its origin.
    pub sender: ForwardedRequestSender,
    /// Policy of operators for proxies and upgrades.
    pub edge: &'a EdgeSettings,
    /// Host for the pod's request, if it is not the client's.
    pub host_rewrite: Option<HostRewrite<'a>>,
    /// Tags of the route, or the tag that was chosen.
    pub tags: Option<&'a TagRouting>,
    /// HTTP version that its pod speaks.
    pub protocol: AppProtocol,
    /// Description of the certificate that the client has shown; `None`: it was asked for none, or has none.
    pub client_certificate: Option<&'a HeaderValue>,
    /// Source of random numbers, uniform over u64, for the id of a new trace.
    pub random: fn() -> u64,
}

/// Host of a pod's request in place of the client's.
#[derive(Clone, Copy, Debug)]
pub enum HostRewrite<'a> {
    /// Host of a DomainMapping. The pod finds the client's in `K-Original-Host`, as in Knative.
    OfMapping(&'a str),
    /// Host of a rule of the Gateway API. The pod finds the client's in `X-Forwarded-Host`.
    OfRule(&'a str),
}

/// Refuses a request whose chunks are chunked again (RFC 9112 §6.1). Recipients that decode them once and twice would
/// disagree about the body, and those that decode them twice would lose its end.
pub fn check_transfer_codings(headers: &HeaderMap) -> Result<(), ProxyRequestError> {
    let codings = header_tokens(headers, header::TRANSFER_ENCODING);
    match codings.filter(|it| it.eq_ignore_ascii_case("chunked")).count() {
        0 | 1 => Ok(()),
        _ => Err(ProxyRequestError::RepeatedChunking),
    }
}

/// Changes a head from the form that arrived to the one for a pod. Returns the protocol that the client wants to switch
/// to, which is possible over HTTP/1.1 only: the pod's request is in HTTP/1.1 then.
pub fn rewrite_request_head(
    head: &mut request::Parts,
    context: PodRequestContext<'_>,
    service_host: impl FnOnce() -> String,
) -> Result<Option<HeaderValue>, ProxyRequestError> {
    if head.method == Method::CONNECT {
        return Err(ProxyRequestError::ConnectMethod);
    }
    normalize_host(head, service_host)?;
    // Everything that the hop's headers decide is read before they are removed.
    let may_switch = head.version == Version::HTTP_11;
    let upgrade = may_switch.then(|| allowed_upgrade(&head.headers, context.edge)).flatten();
    let wants_trailers = has_header_token(&head.headers, header::TE, "trailers");
    let tag = head.headers.get(TAG_HEADER).cloned();
    let ingress_tags = read_ingress_tags(&head.headers, &context);
    strip_hop_by_hop(&mut head.headers);
    head.headers.remove(header::TE);
    strip_platform_headers(&mut head.headers, context.sender.traffic_origin, context.edge);
    if wants_trailers {
        head.headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
    // The upgrade is written again for the next hop, since it was removed with the other headers for one hop.
    if let Some(protocol) = &upgrade {
        head.headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        head.headers.insert(header::UPGRADE, protocol.clone());
    }
    // After the platform's headers were removed: from here on these names have the activator's values only, or those of
    // a trusted ingress.
    for (name, value) in ingress_tags {
        head.headers.insert(name, value);
    }
    write_tag_headers(&mut head.headers, tag, context.tags)?;
    write_client_headers(&mut head.headers, context.sender, context.edge);
    if context.sender.traffic_origin == TrafficOrigin::External {
        write_client_certificate(&mut head.headers, context.client_certificate);
    }
    ensure_trace_context(&mut head.headers, context.random);
    rewrite_host(&mut head.headers, context.host_rewrite)?;
    match context.protocol {
        AppProtocol::H2c if upgrade.is_none() => convert_to_http2(head),
        AppProtocol::H2c | AppProtocol::Http1 | AppProtocol::Tcp => {
            join_cookies(&mut head.headers);
            head.version = Version::HTTP_11;
        }
    }
    Ok(upgrade)
}

/// Location of the redirect by `http-protocol: Redirected`: the same URL over https, and `/` for `OPTIONS *`, which has
/// no path. The port is left out if it is that of https, 443.
pub fn https_location(head: &request::Parts, https_port: u16) -> Option<HeaderValue> {
    let host = host::request_host(head)?;
    let path = request_target(head);
    let port = if https_port == HTTPS_PORT { String::new() } else { format!(":{https_port}") };
    HeaderValue::try_from(format!("https://{host}{port}{path}")).ok()
}

/// Path and query of a request; `/` for `OPTIONS *`, which has no path.
pub fn request_target(head: &request::Parts) -> &str {
    let path = head.uri.path_and_query().filter(|it| it.path().starts_with('/'));
    path.map_or("/", PathAndQuery::as_str)
}

/// Location of a redirect by a rule of the Gateway API: this path and query at another origin. `None` for host means that
/// of the request. The port is left out if it is the one that the scheme means.
pub fn redirect_location(
    head: &request::Parts,
    is_https: bool,
    host: Option<&str>,
    port: Option<NonZeroU16>,
    path: &str,
) -> Option<HeaderValue> {
    let own_host = || host::request_host(head);
    let host = host.map(str::to_owned).or_else(own_host)?;
    let (scheme, usual_port) = if is_https { ("https", HTTPS_PORT) } else { ("http", HTTP_PORT) };
    let port = port.filter(|it| it.get() != usual_port).map(|it| format!(":{it}"));
    HeaderValue::try_from(format!("{scheme}://{host}{}{path}", port.unwrap_or_default())).ok()
}

/// Adds `Strict-Transport-Security` to a response over TLS, unless the pod has sent one: browsers use the first only.
pub fn add_hsts(headers: &mut HeaderMap, policy: &HstsPolicy) {
    if !headers.contains_key(header::STRICT_TRANSPORT_SECURITY)
        && let Ok(value) = HeaderValue::try_from(policy.as_str())
    {
        headers.insert(header::STRICT_TRANSPORT_SECURITY, value);
    }
}

/// Changes a pod's head to the one for the client, whose HTTP version is `version`.
pub fn rewrite_response_head(headers: &mut HeaderMap, status: StatusCode, version: Version) {
    let switched = status == StatusCode::SWITCHING_PROTOCOLS;
    let upgrade = switched.then(|| headers.get(header::UPGRADE).cloned()).flatten();
    strip_hop_by_hop(headers);
    if version == Version::HTTP_2 {
        headers.remove(header::TRANSFER_ENCODING);
    }
    if let Some(protocol) = upgrade {
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, protocol);
    }
}

/// Approximate number of bytes of a head while it waits: names, values and the map's overhead for each. A map that has
/// just grown takes twice as much, which [`memory_mib`](crate::budget::memory_mib) accounts for.
pub fn estimate_head_bytes<B>(request: &Request<B>) -> usize {
    // A bucket of `http::HeaderMap` whose name and value are elsewhere, 104 bytes, and its entry in the index.
    const PER_HEADER: usize = 112;
    let line = request.uri().path_and_query().map_or(1, |it| it.as_str().len());
    let fields = request.headers().iter();
    let fields = fields.map(|(name, value)| name.as_str().len() + value.len() + PER_HEADER);
    REQUEST_OVERHEAD_BYTES + line + fields.sum::<usize>()
}

/// Leaves path and query in the URI, and puts the host into `Host`: an absolute URI takes precedence (RFC 9112 §3.2.2).
fn normalize_host(
    head: &mut request::Parts,
    service_host: impl FnOnce() -> String,
) -> Result<(), ProxyRequestError> {
    let authority = head.uri.authority().map(Authority::as_str).map(HeaderValue::from_str);
    if let Some(host) = authority {
        let host =
            host.map_err(|error| ProxyRequestError::BadRequest(format!("bad host: {error}")))?;
        head.headers.insert(header::HOST, host);
        let path = head.uri.path_and_query().cloned();
        head.uri = Uri::from(path.unwrap_or_else(|| PathAndQuery::from_static("/")));
    }
    if head.headers.contains_key(header::HOST) {
        return Ok(());
    }
    // HTTP/1.0 has no Host, but the request to the pod needs one.
    head.headers.insert(header::HOST, header_value("host", &service_host())?);
    Ok(())
}

fn strip_hop_by_hop(headers: &mut HeaderMap) {
    if headers.contains_key(header::CONNECTION) {
        let listed: Vec<HeaderName> = header_tokens(headers, header::CONNECTION)
            .filter_map(|token| token.parse().ok())
            // Headers that frame or address the message stay, whatever the peer lists.
            .filter(|name| {
                ![header::HOST, header::CONTENT_LENGTH, header::TRANSFER_ENCODING].contains(name)
            })
            .collect();
        for name in listed {
            headers.remove(name);
        }
    }
    for name in &HOP_BY_HOP_HEADERS {
        headers.remove(name);
    }
}

/// Protocol to switch to: a single one, and one of those that are allowed. HTTP/2 is no longer offered that way (RFC
/// 9113 §3.1), and after a switch to it a client could send heads that no component checks.
fn allowed_upgrade(headers: &HeaderMap, edge: &EdgeSettings) -> Option<HeaderValue> {
    let mut protocols = headers.get_all(header::UPGRADE).iter();
    let (protocol, None) = (protocols.next()?, protocols.next()) else { return None };
    let name = protocol.to_str().ok()?.trim();
    let allowed = edge.allowed_upgrades.iter().map(String::as_str).chain([WEBSOCKET]);
    let is_listed = allowed.into_iter().any(|it| it.eq_ignore_ascii_case(name));
    let is_requested = has_header_token(headers, header::CONNECTION, "upgrade");
    (is_requested && is_listed).then(|| protocol.clone())
}

fn has_header_token(headers: &HeaderMap, name: HeaderName, token: &str) -> bool {
    header_tokens(headers, name).any(|it| it.eq_ignore_ascii_case(token))
}

fn header_tokens(headers: &HeaderMap, name: HeaderName) -> impl Iterator<Item = &str> {
    let values = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim)
}

fn strip_platform_headers(headers: &mut HeaderMap, origin: TrafficOrigin, edge: &EdgeSettings) {
    for name in &KNATIVE_INTERNAL_HEADERS {
        headers.remove(name);
    }
    if origin == TrafficOrigin::Internal {
        return;
    }
    // Servers that pass headers on as variables (CGI, WSGI) cannot tell `X_Real_IP` from `X-Real-IP`.
    let is_alias = |name: &str| !edge.allows_underscores && name.contains('_');
    let is_platform_header = |name: &&HeaderName| {
        PLATFORM_PREFIXES.iter().any(|it| name.as_str().starts_with(it)) || is_alias(name.as_str())
    };
    let platform_headers: Vec<HeaderName> =
        headers.keys().filter(is_platform_header).cloned().collect();
    for name in platform_headers {
        headers.remove(name);
    }
}

/// Returns the Revision that the headers of a request name; `None`: one of the two headers is missing or repeated. They
/// count only in a request of a trusted ingress, which the caller checks.
pub(crate) fn read_chosen_revision(headers: &HeaderMap) -> Option<NamespacedName> {
    let only = |name: &HeaderName| {
        let mut values = headers.get_all(name).iter();
        let (value, None) = (values.next()?, values.next()) else { return None };
        value.to_str().ok().filter(|text| !text.is_empty())
    };
    Some(NamespacedName::new(only(&REVISION_NAMESPACE_HEADER)?, only(&REVISION_HEADER)?))
}

/// Returns the headers about tags if a trusted ingress has written them. It has chosen among the Route's tags itself.
fn read_ingress_tags(
    headers: &HeaderMap,
    context: &PodRequestContext<'_>,
) -> Vec<(HeaderName, HeaderValue)> {
    let sender = context.sender;
    let is_from_ingress = context.tags.is_none()
        && sender.traffic_origin == TrafficOrigin::Internal
        && context.edge.is_trusted_ingress(sender.address);
    if !is_from_ingress {
        return Vec::new();
    }
    let names = [TAG_HEADER, DEFAULT_ROUTE_HEADER].into_iter();
    names.filter_map(|name| headers.get(&name).cloned().map(|value| (name, value))).collect()
}

/// Writes the chosen tag, or that none was chosen (Knative's metric label `kn.route.tag` depends on these headers). A
/// requested tag that the Route does not have reaches the pod beside the mark of the default route, as in Knative.
fn write_tag_headers(
    headers: &mut HeaderMap,
    requested_tag: Option<HeaderValue>,
    tags: Option<&TagRouting>,
) -> Result<(), ProxyRequestError> {
    match tags {
        None => {}
        Some(TagRouting::ServeTag(tag)) => {
            headers.insert(TAG_HEADER, header_value("tag", tag)?);
        }
        Some(TagRouting::ChooseTag(_)) => {
            headers.insert(DEFAULT_ROUTE_HEADER, HeaderValue::from_static("true"));
            requested_tag.map(|requested_tag| headers.insert(TAG_HEADER, requested_tag));
        }
    }
    Ok(())
}

fn rewrite_host(
    headers: &mut HeaderMap,
    rewrite: Option<HostRewrite<'_>>,
) -> Result<(), ProxyRequestError> {
    let (host, keeps_original) = match rewrite {
        None => return Ok(()),
        Some(HostRewrite::OfMapping(host)) => (host, true),
        Some(HostRewrite::OfRule(host)) => (host, false),
    };
    let original = headers.insert(header::HOST, header_value("host", host)?);
    if let Some(original) = original.filter(|_| keeps_original) {
        headers.insert(K_ORIGINAL_HOST, original);
    }
    Ok(())
}

fn header_value(header: &str, text: &str) -> Result<HeaderValue, ProxyRequestError> {
    let refused = |error| ProxyRequestError::BadRequest(format!("bad {header}: {error}"));
    HeaderValue::from_str(text).map_err(refused)
}

/// Changes the head to HTTP/2, which has host and scheme in the target, and no hops (RFC 9113 §8.3.1).
pub fn convert_to_http2(head: &mut request::Parts) {
    head.version = Version::HTTP_2;
    let host = head.headers.get(header::HOST).map(HeaderValue::as_bytes);
    let Some(authority) = host.and_then(|host| Authority::try_from(host).ok()) else {
        // The host is no valid authority. h2 sends a request of HTTP/1.1 with its `Host`, and without `:authority`.
        head.version = Version::HTTP_11;
        return;
    };
    let mut uri = std::mem::take(&mut head.uri).into_parts();
    (uri.scheme, uri.authority) = (Some(Scheme::HTTP), Some(authority));
    uri.path_and_query.get_or_insert_with(|| PathAndQuery::from_static("/"));
    head.uri = Uri::from_parts(uri).expect("scheme, authority and path are all there");
    head.headers.remove(header::HOST);
}

/// Joins cookies into one field: HTTP/2 may split them, HTTP/1.1 may not (RFC 9113 §8.2.3).
fn join_cookies(headers: &mut HeaderMap) {
    if headers.get_all(header::COOKIE).iter().nth(1).is_none() {
        return;
    }
    let all: Vec<&[u8]> =
        headers.get_all(header::COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if let Ok(joined) = HeaderValue::from_bytes(&all.join(&b"; "[..])) {
        headers.insert(header::COOKIE, joined);
    }
}

#[cfg(test)]
mod tests;
