//! Pure: headers by which a pod learns the client and the proxies of a request: `Forwarded`, `X-Forwarded-*`,
//! `traceparent`.
//!
//! Knative's runtime contract asks for them (`runtime-contract.md`); its sidecar writes `Forwarded` if there is none
//! (`pkg/queue/forwarded_shim.go`). Headers of workloads of the cluster are kept and extended, as in Knative. From
//! outside, headers of a trusted proxy are kept and extended. Those of other clients are dropped, and all headers are
//! written from what the activator knows.

use std::net::{IpAddr, SocketAddr};

use common::wire::EdgeSettings;
use http::{HeaderMap, HeaderName, HeaderValue, header};

use crate::{edge::forwarded_header, entrypoint::TrafficOrigin};

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Headers by which proxies describe the client and applications trust them, besides those that begin with
/// [`FORWARDED_PREFIX`]. The activator writes only the first of them.
const CLIENT_CLAIM_HEADERS: [HeaderName; 12] = [
    header::FORWARDED,
    HeaderName::from_static("forwarded-for"),
    HeaderName::from_static("x-forwarded"),
    HeaderName::from_static("x-original-forwarded-for"),
    HeaderName::from_static("x-real-ip"),
    HeaderName::from_static("x-client-ip"),
    HeaderName::from_static("x-cluster-client-ip"),
    HeaderName::from_static("client-ip"),
    HeaderName::from_static("true-client-ip"),
    HeaderName::from_static("cf-connecting-ip"),
    HeaderName::from_static("x-url-scheme"),
    HeaderName::from_static("front-end-https"),
];
/// Prefix of the other headers by which proxies describe the client.
const FORWARDED_PREFIX: &str = "x-forwarded-";

/// Sender of a request, as far as its connection identifies it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForwardedRequestSender {
    /// Origin of the connection: the cluster, or outside.
    pub traffic_origin: TrafficOrigin,
    /// Address of the client, or of the last proxy.
    pub address: IpAddr,
    /// Information of the connection itself about its client.
    pub proxied_client: ProxiedClient,
    /// True if the connection has TLS.
    pub is_tls: bool,
}

/// Information of a connection about the client behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxiedClient {
    /// The peer of the connection is the client.
    Direct,
    /// A trusted proxy named the client in a PROXY header.
    Named {
        /// True if the client's connection to the proxy had TLS.
        is_secure: bool,
    },
    /// The PROXY header of a trusted proxy names no client. The address is that of the proxy, but any client may have
    /// sent the request, so its headers about the client are not used.
    Unnamed,
}

impl ForwardedRequestSender {
    /// Returns true if the sender is a trusted proxy, so that its headers about the client are used.
    fn is_trusted_proxy(self, edge: &EdgeSettings) -> bool {
        self.traffic_origin == TrafficOrigin::External
            && self.proxied_client != ProxiedClient::Unnamed
            && edge.is_trusted_proxy(self.address)
    }

    /// Protocol of the client's own connection, as far as the connection reveals it.
    fn scheme(self) -> &'static str {
        let is_named_secure =
            matches!(self.proxied_client, ProxiedClient::Named { is_secure: true });
        if self.is_tls || is_named_secure { "https" } else { "http" }
    }
}

/// Returns true if a request from outside has come by https, at least as far as a trusted proxy.
pub fn is_https(headers: &HeaderMap, sender: ForwardedRequestSender, edge: &EdgeSettings) -> bool {
    let reported = sender.is_trusted_proxy(edge).then(|| reported_scheme(headers)).flatten();
    matches!(reported.unwrap_or_else(|| sender.scheme()), "https" | "wss")
}

/// Writes the headers that describe the client.
pub fn write_client_headers(
    headers: &mut HeaderMap,
    sender: ForwardedRequestSender,
    edge: &EdgeSettings,
) {
    let client = sender.address.to_string();
    match sender.traffic_origin {
        TrafficOrigin::Internal => write_for_internal(headers, &client, sender.scheme()),
        TrafficOrigin::External if sender.is_trusted_proxy(edge) => {
            write_for_trusted_proxy(headers, sender, edge)
        }
        TrafficOrigin::External => {
            // Everything that a client can forge is removed, including headers that the activator never writes itself.
            let claims: Vec<HeaderName> =
                headers.keys().filter(|name| is_client_claim(name)).cloned().collect();
            for name in claims {
                headers.remove(name);
            }
            let host = headers.get(header::HOST).cloned();
            write_forwarded_headers(
                headers,
                &[&client],
                host,
                HeaderValue::from_static(sender.scheme()),
            );
        }
    }
}

/// Returns true if the header describes the client of a proxy.
fn is_client_claim(name: &HeaderName) -> bool {
    name.as_str().starts_with(FORWARDED_PREFIX) || CLIENT_CLAIM_HEADERS.contains(name)
}

/// Returns true if a field of this name, in any case of letters, describes the client of a proxy.
pub(crate) fn is_client_claim_name(name: &str) -> bool {
    let start = name.as_bytes().get(..FORWARDED_PREFIX.len());
    start.is_some_and(|it| it.eq_ignore_ascii_case(FORWARDED_PREFIX.as_bytes()))
        || CLIENT_CLAIM_HEADERS.iter().any(|it| it.as_str().eq_ignore_ascii_case(name))
}

/// Returns true if applications may take a field of this name for a description of the client. Servers that pass headers
/// on as variables cannot tell `_` from `-`.
pub fn describes_client(name: &HeaderName) -> bool {
    let dashed = name.as_str().replace('_', "-");
    HeaderName::from_bytes(dashed.as_bytes()).is_ok_and(|it| is_client_claim(&it))
}

/// Removes the trailer fields that describe the client: any client could write them, and only the head of a request has
/// those of the activator.
pub fn remove_client_claims(trailers: &mut HeaderMap) {
    let claims: Vec<HeaderName> =
        trailers.keys().filter(|it| describes_client(it)).cloned().collect();
    for name in claims {
        trailers.remove(name);
    }
}

/// Headers for a request from a workload of the cluster: those that are there are kept and extended.
fn write_for_internal(headers: &mut HeaderMap, client: &str, scheme: &'static str) {
    let before = join_header(headers, &X_FORWARDED_FOR).unwrap_or_default();
    let hops: Vec<&str> = forwarded_header::split_list(&before).chain([client]).collect();
    let host = headers.get(&X_FORWARDED_HOST).or_else(|| headers.get(header::HOST)).cloned();
    let proto = headers.get(&X_FORWARDED_PROTO).cloned();
    write_forwarded_headers(
        headers,
        &hops,
        host,
        proto.unwrap_or_else(|| HeaderValue::from_static(scheme)),
    );
}

/// Headers for a request from a trusted proxy: its headers are used back to the last hop that is no trusted proxy.
fn write_for_trusted_proxy(
    headers: &mut HeaderMap,
    sender: ForwardedRequestSender,
    edge: &EdgeSettings,
) {
    let client = sender.address.to_string();
    let forwarded = reported_forwarded(headers).unwrap_or_default();
    let elements = forwarded_header::parse_elements(&forwarded).unwrap_or_default();
    let elements = trusted_hops(&elements, |it| it.forwarded_for.as_deref(), edge);
    let x_forwarded_for = join_header(headers, &X_FORWARDED_FOR).unwrap_or_default();
    let hops: Vec<&str> = match x_forwarded_for.is_empty() {
        true => {
            elements.iter().map(|it| it.forwarded_for.as_deref().unwrap_or("unknown")).collect()
        }
        false => trusted_hops(
            &forwarded_header::split_list(&x_forwarded_for).collect::<Vec<_>>(),
            |it| Some(*it),
            edge,
        )
        .to_vec(),
    };
    let hops: Vec<&str> = hops.into_iter().chain([client.as_str()]).collect();
    let last = elements.last();
    let host = last_list_entry(headers, &X_FORWARDED_HOST).or_else(|| last?.host.clone());
    let host = host.and_then(|host| HeaderValue::try_from(host).ok());
    let host = host.or_else(|| headers.get(header::HOST).cloned());
    let proto = reported_scheme(headers).unwrap_or_else(|| sender.scheme());
    // The part of `Forwarded` that is not reliable is dropped, and the proxy itself becomes its last hop.
    headers.remove(header::FORWARDED);
    if !elements.is_empty() {
        let before: Vec<&str> = elements.iter().map(|it| it.text).collect();
        let text = format!("{}, for={}", before.join(", "), forwarded_header::format_node(&client));
        if let Ok(value) = HeaderValue::try_from(text) {
            headers.insert(header::FORWARDED, value);
        }
    }
    write_forwarded_headers(headers, &hops, host, HeaderValue::from_static(proto));
}

/// Returns the last part of `hops`, which trusted proxies reported. Each proxy reports the hop before it, so the result
/// begins with the last hop that is no trusted proxy. `address_of` returns the address of a hop as it was written.
fn trusted_hops<'a, T>(
    hops: &'a [T],
    address_of: impl Fn(&T) -> Option<&str>,
    edge: &EdgeSettings,
) -> &'a [T] {
    let is_trusted = |hop: &T| {
        address_of(hop).and_then(parse_hop_address).is_some_and(|it| edge.is_trusted_proxy(it))
    };
    let first = hops.iter().rposition(|hop| !is_trusted(hop)).unwrap_or(0);
    hops.get(first..).unwrap_or_default()
}

/// Protocol that the client used, as a trusted proxy reports it.
fn reported_scheme(headers: &HeaderMap) -> Option<&'static str> {
    let scheme = |text: &str| {
        ["https", "http", "wss", "ws"].into_iter().find(|it| it.eq_ignore_ascii_case(text.trim()))
    };
    if let Some(reported) = last_list_entry(headers, &X_FORWARDED_PROTO) {
        return scheme(&reported);
    }
    let reported = reported_forwarded(headers)?;
    scheme(forwarded_header::parse_elements(&reported)?.last()?.proto.as_deref()?)
}

/// `Forwarded` of a trusted proxy. A proxy that writes `X-Forwarded-For` may pass on its client's own `Forwarded`, so
/// there is none beside it.
fn reported_forwarded(headers: &HeaderMap) -> Option<String> {
    let is_alone = join_header(headers, &X_FORWARDED_FOR).is_none_or(|it| it.is_empty());
    join_header(headers, &header::FORWARDED).filter(|_| is_alone)
}

/// Last entry of a list header: the one of the proxy nearest to the activator.
fn last_list_entry(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    let all = join_header(headers, name)?;
    forwarded_header::split_list(&all).last().map(str::to_owned)
}

/// IP address of a hop, which may have a port behind it.
fn parse_hop_address(hop: &str) -> Option<IpAddr> {
    let bare = hop.strip_prefix('[').and_then(|it| it.strip_suffix(']')).unwrap_or(hop);
    bare.parse().ok().or_else(|| hop.parse::<SocketAddr>().ok().map(|it| it.ip()))
}

/// Writes the hops, the host and the protocol; `Forwarded` only if there is none.
fn write_forwarded_headers(
    headers: &mut HeaderMap,
    hops: &[&str],
    host: Option<HeaderValue>,
    proto: HeaderValue,
) {
    if !headers.contains_key(header::FORWARDED) {
        let text = |value: &HeaderValue| value.to_str().ok().map(str::to_owned);
        let host = host.as_ref().and_then(text);
        let text =
            forwarded_header::format_forwarded(hops, host.as_deref(), text(&proto).as_deref());
        if let Ok(value) = HeaderValue::try_from(text) {
            headers.insert(header::FORWARDED, value);
        }
    }
    headers.insert(X_FORWARDED_PROTO, proto);
    host.map(|host| headers.insert(X_FORWARDED_HOST, host));
    if let Ok(value) = HeaderValue::try_from(hops.join(", ")) {
        headers.insert(X_FORWARDED_FOR, value);
    }
}

/// Begins a trace if the request does not belong to one yet (W3C Trace Context §3.2). A valid one passes unchanged,
/// and a request with a recorded span gets that span's id later. `random` is uniform over u64.
pub fn ensure_trace_context(headers: &mut HeaderMap, mut random: impl FnMut() -> u64) {
    let mut values = headers.get_all(&TRACEPARENT).iter();
    let is_traced = match (values.next(), values.next()) {
        (Some(only), None) => is_traceparent(only.as_bytes()),
        _ => false,
    };
    if is_traced {
        return;
    }
    headers.remove(&TRACESTATE);
    // No number may be zero. The flags state that the trace is not sampled, because no component has asked for that.
    let mut number = || random().max(1);
    let text = format!("00-{:016x}{:016x}-{:016x}-00", number(), number(), number());
    if let Ok(value) = HeaderValue::try_from(text) {
        headers.insert(TRACEPARENT, value);
    }
}

/// Returns true for `version-trace-parent-flags` in lower-case hex; later versions may have more fields behind these.
pub(crate) fn is_traceparent(text: &[u8]) -> bool {
    // Version 00 has exactly 55 bytes; any later version begins with the same four fields.
    let Some((version_00, more)) = text.split_at_checked(55) else { return false };
    let mut fields = version_00.split(|&byte| byte == b'-');
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

/// Joins all values of a header; `None` if it is absent.
///
/// Bytes beyond ASCII become `?`. Such a value is not left out: a proxy appends to what its client wrote, so a client
/// could make its proxy's entry disappear.
fn join_header(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    let readable = |value: &HeaderValue| -> String {
        let is_plain = |byte: u8| byte == b'\t' || (b' '..=b'~').contains(&byte);
        let bytes = value.as_bytes().iter();
        bytes.map(|&byte| if is_plain(byte) { char::from(byte) } else { '?' }).collect()
    };
    let all: Vec<String> = headers.get_all(name).iter().map(readable).collect();
    (!all.is_empty()).then(|| all.join(", "))
}

#[cfg(test)]
mod tests;
