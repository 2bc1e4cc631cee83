//! Pure: what a pod is told of a request's way: `Forwarded`, `X-Forwarded-*`, `traceparent`.
//!
//! Knative's runtime contract asks for them (`runtime-contract.md`); its sidecar writes `Forwarded` where there is none
//! (`pkg/queue/forwarded_shim.go`). What workloads of the cluster say is kept and added to, as in Knative. From outside
//! the word of a trusted proxy counts and is added to; everybody else's is dropped, and all is made from what we know.

use std::net::{IpAddr, SocketAddr};

use common::wire::Edge;
use http::{HeaderMap, HeaderName, HeaderValue, header};

use crate::{headers::Side, via};

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// What proxies say of a request's way and applications believe; most of it we never add ourselves.
const CLAIMS: [HeaderName; 9] = [
    header::FORWARDED,
    X_FORWARDED_HOST,
    HeaderName::from_static("x-forwarded-port"),
    HeaderName::from_static("x-forwarded-server"),
    HeaderName::from_static("x-forwarded-scheme"),
    HeaderName::from_static("x-forwarded-ssl"),
    HeaderName::from_static("x-real-ip"),
    HeaderName::from_static("x-url-scheme"),
    HeaderName::from_static("front-end-https"),
];

/// Who sent a request, as far as the connection tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sender {
    /// Where it came in.
    pub side: Side,
    /// The client's address, or the last proxy's.
    pub address: IpAddr,
    /// What the connection itself told.
    pub origin: Origin,
}

/// What the connection of a request told of its client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The client connected to us.
    Direct,
    /// A trusted proxy named the client in a PROXY header.
    Named {
        /// The client's connection to the proxy had TLS.
        is_secure: bool,
    },
    /// A trusted proxy passes on a client that it did not name.
    Unnamed,
}

impl Sender {
    /// Whether this sender's word about the way before it counts.
    fn is_trusted(self, edge: &Edge) -> bool {
        self.side == Side::Outside && self.origin != Origin::Unnamed && edge.trusts(self.address)
    }

    /// The protocol of the client's own connection, as far as the connection tells.
    fn proto(self) -> &'static str {
        let is_secure = matches!(self.origin, Origin::Named { is_secure: true });
        if is_secure { "https" } else { "http" }
    }
}

/// Whether a request from outside has come by https, at least as far as a trusted proxy.
pub fn is_secure(headers: &HeaderMap, sender: Sender, edge: &Edge) -> bool {
    let told = sender.is_trusted(edge).then(|| told_proto(headers)).flatten();
    matches!(told.unwrap_or_else(|| sender.proto()), "https" | "wss")
}

/// Adds what the app may want to know of the client.
pub fn forwarded(headers: &mut HeaderMap, sender: Sender, edge: &Edge) {
    let client = sender.address.to_string();
    match sender.side {
        Side::Inside => inside(headers, &client),
        Side::Outside if sender.is_trusted(edge) => proxied(headers, sender, edge),
        Side::Outside => {
            for name in CLAIMS {
                headers.remove(name);
            }
            let host = headers.get(header::HOST).cloned();
            write(headers, &[&client], host, HeaderValue::from_static(sender.proto()));
        }
    }
}

/// From a workload of the cluster: what it says is kept.
fn inside(headers: &mut HeaderMap, client: &str) {
    let before = list(headers, &X_FORWARDED_FOR).unwrap_or_default();
    let hops: Vec<&str> = via::split(&before).chain([client]).collect();
    let host = headers.get(&X_FORWARDED_HOST).or_else(|| headers.get(header::HOST)).cloned();
    let proto = headers.get(&X_FORWARDED_PROTO).cloned();
    write(headers, &hops, host, proto.unwrap_or(HeaderValue::from_static("http")));
}

/// From a trusted proxy: what it says counts, as far back as those it names are trusted as well.
fn proxied(headers: &mut HeaderMap, sender: Sender, edge: &Edge) {
    let client = sender.address.to_string();
    let told = list(headers, &header::FORWARDED).unwrap_or_default();
    let elements = via::elements(&told).unwrap_or_default();
    let elements = believed(&elements, |it| it.of.as_deref(), edge);
    let before = list(headers, &X_FORWARDED_FOR).unwrap_or_default();
    let way: Vec<&str> = match before.is_empty() {
        true => elements.iter().map(|it| it.of.as_deref().unwrap_or("unknown")).collect(),
        false => believed(&via::split(&before).collect::<Vec<_>>(), |it| Some(*it), edge).to_vec(),
    };
    let way: Vec<&str> = way.into_iter().chain([client.as_str()]).collect();
    let last = elements.last();
    let host = last_of(headers, &X_FORWARDED_HOST).or_else(|| last?.host.clone());
    let host = host.and_then(|host| HeaderValue::try_from(host).ok());
    let host = host.or_else(|| headers.get(header::HOST).cloned());
    let proto = told_proto(headers).unwrap_or_else(|| sender.proto());
    headers.remove(header::FORWARDED);
    if !elements.is_empty() {
        let before: Vec<&str> = elements.iter().map(|it| it.text).collect();
        let text = format!("{}, for={}", before.join(", "), via::node(&client));
        if let Ok(value) = HeaderValue::try_from(text) {
            headers.insert(header::FORWARDED, value);
        }
    }
    write(headers, &way, host, HeaderValue::from_static(proto));
}

/// The last of `hops`, each told by the one behind it: from the first on that a trusted one has told of.
fn believed<'a, T>(hops: &'a [T], of: impl Fn(&T) -> Option<&str>, edge: &Edge) -> &'a [T] {
    let is_trusted = |hop: &T| of(hop).and_then(address).is_some_and(|it| edge.trusts(it));
    let first = hops.iter().rposition(|hop| !is_trusted(hop)).unwrap_or(0);
    hops.get(first..).unwrap_or_default()
}

/// The protocol that a trusted proxy says the client used.
fn told_proto(headers: &HeaderMap) -> Option<&'static str> {
    let known = |text: &str| {
        ["https", "http", "wss", "ws"].into_iter().find(|it| it.eq_ignore_ascii_case(text.trim()))
    };
    if let Some(told) = last_of(headers, &X_FORWARDED_PROTO) {
        return known(&told);
    }
    let told = list(headers, &header::FORWARDED)?;
    known(via::elements(&told)?.last()?.proto.as_deref()?)
}

/// What the last who wrote a list has said.
fn last_of(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    let all = list(headers, name)?;
    via::split(&all).last().map(str::to_owned)
}

/// The address of a hop, which may have a port behind it.
fn address(hop: &str) -> Option<IpAddr> {
    let bare = hop.strip_prefix('[').and_then(|it| it.strip_suffix(']')).unwrap_or(hop);
    bare.parse().ok().or_else(|| hop.parse::<SocketAddr>().ok().map(|it| it.ip()))
}

/// Writes the way; `Forwarded` only where it is not there yet.
fn write(headers: &mut HeaderMap, way: &[&str], host: Option<HeaderValue>, proto: HeaderValue) {
    if !headers.contains_key(header::FORWARDED) {
        let text = |value: &HeaderValue| value.to_str().ok().map(str::to_owned);
        let host = host.as_ref().and_then(text);
        let text = via::rfc7239(way, host.as_deref(), text(&proto).as_deref());
        if let Ok(value) = HeaderValue::try_from(text) {
            headers.insert(header::FORWARDED, value);
        }
    }
    headers.insert(X_FORWARDED_PROTO, proto);
    host.map(|host| headers.insert(X_FORWARDED_HOST, host));
    if let Ok(value) = HeaderValue::try_from(way.join(", ")) {
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

#[cfg(test)]
mod tests;
