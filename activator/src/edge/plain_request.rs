//! Pure: plain requests of HTTP/1.1: their heads, judged and rewritten as bytes, for the fast path.
//!
//! A request is plain if all readers agree about it, and if its way to a pod needs only the changes that are made here.
//! Everything else is unusual, and hyper reads it. What a pod gets of a plain request is the same on both ways, but for
//! the order of the fields.

use std::mem::MaybeUninit;

use bytes::{BufMut as _, BytesMut};
use common::{decimal::parse_digits, wire::EdgeSettings};
use http::{HeaderMap, HeaderName, HeaderValue, header};

use crate::{
    edge::{
        client_certificate::write_client_certificate,
        client_headers::{
            ForwardedRequestSender, is_client_claim_name, is_traceparent, write_client_headers,
        },
        headers::PLATFORM_PREFIXES,
        host::is_valid_host,
    },
    entrypoint::TrafficOrigin,
    h1,
};

mod check;

pub use check::check;

/// Maximum number of fields of a plain head. The sets of fields below have a bit for each.
const MAX_FIELDS: usize = 64;
/// Methods of plain requests, and true for those that are safe (RFC 9110 §9.2.1). The response to HEAD has the length of
/// a body that does not come, and CONNECT opens a tunnel.
const PLAIN_METHODS: [(&str, bool); 6] = [
    ("GET", true),
    ("POST", false),
    ("PUT", false),
    ("DELETE", false),
    ("PATCH", false),
    ("OPTIONS", true),
];
/// Methods that expect a body, so that a request without one states that (RFC 9110 §8.6).
const BODY_METHODS: [&str; 3] = ["POST", "PUT", "PATCH"];
/// Maximum number of bytes of a plain host: a name (RFC 1035 §2.3.4) with a final dot and a port. Connections keep it.
const MAX_HOST_BYTES: usize = 260;
/// Bytes of a plain target: those of RFC 3986 for path and query. `http::Uri` holds each of them as it is.
const TARGET_SYMBOLS: &[u8] = b"-._~!$&'()*+,;=:@/?%";
/// Start of the paths at which authorities ask for tokens.
const CHALLENGE_PREFIX: &str = "/.well-known/acme-challenge/";

/// Place for the fields of one head.
pub type FieldArray<'b> = [MaybeUninit<httparse::Header<'b>>; MAX_FIELDS];

/// Creates a place for the fields of one head.
pub fn field_array<'b>() -> FieldArray<'b> {
    [const { MaybeUninit::uninit() }; MAX_FIELDS]
}

/// Beginning of a client's bytes.
#[derive(Debug)]
pub enum RequestStart<'h, 'b> {
    /// The head may become plain, and is not complete.
    Incomplete,
    /// The bytes are for hyper.
    Unusual,
    /// The bytes begin with a plain request, whose body is complete.
    Plain(PlainRequest<'h, 'b>),
}

/// Plain request of a client, with its whole body behind the head.
#[derive(Debug)]
pub struct PlainRequest<'h, 'b> {
    method: &'b str,
    target: &'b str,
    fields: &'h [httparse::Header<'b>],
    /// Value of `Host`.
    pub host: &'b [u8],
    /// Number of bytes of the head.
    pub head_length: usize,
    /// Number of bytes of the body.
    pub body_length: usize,
    /// True if a repetition of the request changes nothing.
    pub is_safe: bool,
    /// Fields that the pod gets, as a set of their indexes.
    kept: u64,
    /// Fields that describe the client of a proxy, as a set of their indexes.
    claims: u64,
    has_length: bool,
    is_traced: bool,
}

/// Treatment of a field by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestFieldRole {
    /// The pod gets it, whatever its value is.
    Kept,
    /// It is for one hop only, and decides nothing.
    Dropped,
    /// It makes the request unusual.
    Unusual,
    /// It describes the client of a proxy.
    ClientClaim,
    Connection,
    ContentLength,
    ContentType,
    Cookie,
    Host,
    TraceParent,
    TraceState,
    UserAgent,
}

/// Names with a role of their own.
const ROLES: [(&str, RequestFieldRole); 17] = [
    ("connection", RequestFieldRole::Connection),
    ("content-length", RequestFieldRole::ContentLength),
    ("content-type", RequestFieldRole::ContentType),
    ("cookie", RequestFieldRole::Cookie),
    ("expect", RequestFieldRole::Unusual),
    ("host", RequestFieldRole::Host),
    ("http2-settings", RequestFieldRole::Unusual),
    ("keep-alive", RequestFieldRole::Dropped),
    ("proxy-authenticate", RequestFieldRole::Unusual),
    ("proxy-connection", RequestFieldRole::Unusual),
    ("te", RequestFieldRole::Unusual),
    ("traceparent", RequestFieldRole::TraceParent),
    ("tracestate", RequestFieldRole::TraceState),
    ("trailer", RequestFieldRole::Unusual),
    ("transfer-encoding", RequestFieldRole::Unusual),
    ("upgrade", RequestFieldRole::Unusual),
    ("user-agent", RequestFieldRole::UserAgent),
];

/// Reads the beginning of a client's bytes. Nothing is changed or removed.
pub fn read_request_start<'h, 'b>(
    bytes: &'b [u8],
    fields: &'h mut FieldArray<'b>,
) -> RequestStart<'h, 'b> {
    // An empty line before the request line is tolerated by some readers only.
    if bytes.first().is_some_and(|byte| b"\r\n".contains(byte)) {
        return RequestStart::Unusual;
    }
    let mut request = httparse::Request::new(&mut []);
    let head_length = match request.parse_with_uninit_headers(bytes, fields) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) => return RequestStart::Incomplete,
        Err(_malformed) => return RequestStart::Unusual,
    };
    let (Some(method), Some(target), Some(1)) = (request.method, request.path, request.version)
    else {
        return RequestStart::Unusual;
    };
    let fields: &'h [httparse::Header<'b>] = request.headers;
    let plain = judge_request(method, target, fields, head_length)
        .filter(|_| has_whole_line_ends(&bytes[..head_length]))
        .filter(|it| it.body_length <= bytes.len() - head_length);
    plain.map_or(RequestStart::Unusual, RequestStart::Plain)
}

/// Judges a complete head; `None`: it is not plain.
fn judge_request<'h, 'b>(
    method: &'b str,
    target: &'b str,
    fields: &'h [httparse::Header<'b>],
    head_length: usize,
) -> Option<PlainRequest<'h, 'b>> {
    let (_, is_safe) = *PLAIN_METHODS.iter().find(|(it, _)| *it == method)?;
    if !is_plain_target(target) {
        return None;
    }
    let (mut kept, mut claims, mut host, mut length) = (0, 0, None, None);
    let (mut is_traced, mut has_trace_state, mut has_cookie) = (false, false, false);
    for (at, field) in fields.iter().enumerate() {
        let bit = 1u64 << at;
        match field_role(field.name) {
            RequestFieldRole::Kept => {}
            RequestFieldRole::Dropped => continue,
            RequestFieldRole::Unusual => return None,
            RequestFieldRole::ClientClaim => {
                claims |= bit;
                continue;
            }
            // Any other option names a field to remove, or ends the connection.
            RequestFieldRole::Connection if field.value.eq_ignore_ascii_case(b"keep-alive") => {
                continue;
            }
            RequestFieldRole::Connection => return None,
            // Calls of gRPC-Web get failures in a form of their own.
            RequestFieldRole::ContentType if is_grpc(field.value) => return None,
            RequestFieldRole::ContentType => {}
            RequestFieldRole::ContentLength => set_once(&mut length, plain_length(field.value)?)?,
            // Several are joined for the pod.
            RequestFieldRole::Cookie if std::mem::replace(&mut has_cookie, true) => return None,
            RequestFieldRole::Cookie => {}
            RequestFieldRole::Host if !is_plain_host(field.value) => return None,
            RequestFieldRole::Host => set_once(&mut host, field.value)?,
            RequestFieldRole::TraceParent if is_traced || !is_traceparent(field.value) => {
                return None;
            }
            RequestFieldRole::TraceParent => is_traced = true,
            RequestFieldRole::TraceState => has_trace_state = true,
            // The platform's probes from inside get a response of the activator.
            RequestFieldRole::UserAgent if field.value.starts_with(b"kube-probe/") => return None,
            RequestFieldRole::UserAgent => {}
        }
        kept |= bit;
    }
    // Without a trace of its own the request begins one, and another trace's state is dropped.
    if has_trace_state && !is_traced {
        return None;
    }
    let (host, body_length, has_length) = (host?, length.unwrap_or(0), length.is_some());
    Some(PlainRequest {
        method,
        target,
        fields,
        host,
        head_length,
        body_length,
        is_safe,
        kept,
        claims,
        has_length,
        is_traced,
    })
}

fn field_role(name: &str) -> RequestFieldRole {
    if let Some((_, role)) = ROLES.iter().find(|(it, _)| it.eq_ignore_ascii_case(name)) {
        return *role;
    }
    // Servers that pass fields on as variables cannot tell `_` from `-`, so a policy decides about such names.
    if is_platform_name(name) || name.contains('_') {
        RequestFieldRole::Unusual
    } else if is_client_claim_name(name) {
        RequestFieldRole::ClientClaim
    } else {
        RequestFieldRole::Kept
    }
}

fn is_platform_name(name: &str) -> bool {
    let has_prefix = |prefix: &&str| {
        let start = name.as_bytes().get(..prefix.len());
        start.is_some_and(|it| it.eq_ignore_ascii_case(prefix.as_bytes()))
    };
    PLATFORM_PREFIXES.iter().any(has_prefix)
}

/// Returns true for a path with or without a query that `http::Uri` holds unchanged, and that no rule of the gateway is
/// for.
fn is_plain_target(target: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || TARGET_SYMBOLS.contains(&byte);
    target.starts_with('/') && target.bytes().all(is_plain) && !target.starts_with(CHALLENGE_PREFIX)
}

fn is_plain_host(value: &[u8]) -> bool {
    value.len() <= MAX_HOST_BYTES && is_valid_host(value)
}

/// Returns true for each content type of gRPC and gRPC-Web, and for others that begin as these do.
fn is_grpc(content_type: &[u8]) -> bool {
    const BEGIN: &[u8] = b"application/grpc";
    content_type.get(..BEGIN.len()).is_some_and(|it| it.eq_ignore_ascii_case(BEGIN))
}

/// Length in the one form that all readers understand: digits without a zero in front.
fn plain_length(value: &[u8]) -> Option<usize> {
    let text = str::from_utf8(value).ok()?;
    parse_digits(text).filter(|_| text == "0" || !text.starts_with('0'))
}

/// Sets a value; `None`: it was set before.
fn set_once<T>(to: &mut Option<T>, value: T) -> Option<()> {
    to.replace(value).is_none().then_some(())
}

/// Returns true if each line ends with CRLF. Some readers take LF alone for the end of a line.
fn has_whole_line_ends(head: &[u8]) -> bool {
    let mut before = 0;
    head.iter().all(|&byte| {
        let is_whole = byte != b'\n' || before == b'\r';
        before = byte;
        is_whole
    })
}

impl PlainRequest<'_, '_> {
    /// Returns true if the client's proxies describe it.
    pub fn has_client_claims(&self) -> bool {
        self.claims != 0
    }

    /// Fields by which the client's proxies describe it.
    pub fn client_claims(&self) -> impl Iterator<Item = &httparse::Header<'_>> {
        let claims = self.claims;
        self.fields
            .iter()
            .enumerate()
            .filter(move |(at, _)| claims >> at & 1 == 1)
            .map(|(_, it)| it)
    }

    /// Writes the head for a pod. `client_fields` are the fields of [`render_client_fields`] for this request, and
    /// `random` is uniform over u64.
    pub fn write_for_pod(&self, client_fields: &[u8], random: fn() -> u64, out: &mut BytesMut) {
        out.reserve(self.head_length + client_fields.len() + 128);
        out.put_slice(self.method.as_bytes());
        out.put_u8(b' ');
        out.put_slice(self.target.as_bytes());
        out.put_slice(b" HTTP/1.1\r\n");
        for (at, field) in self.fields.iter().enumerate() {
            if self.kept >> at & 1 == 1 {
                put_field(field, out);
            }
        }
        if !self.has_length && BODY_METHODS.contains(&self.method) {
            out.put_slice(b"content-length: 0\r\n");
        }
        out.put_slice(client_fields);
        if !self.is_traced {
            put_new_trace(random, out);
        }
        out.put_slice(b"\r\n");
    }
}

/// Writes a field with its name in small letters, as hyper does.
pub(crate) fn put_field(field: &httparse::Header<'_>, out: &mut BytesMut) {
    let at = out.len();
    out.put_slice(field.name.as_bytes());
    out[at..].make_ascii_lowercase();
    out.put_slice(b": ");
    out.put_slice(field.value);
    out.put_slice(b"\r\n");
}

/// Writes the context of a new trace, which is not sampled.
fn put_new_trace(random: fn() -> u64, out: &mut BytesMut) {
    // No number may be zero.
    let [high, low, parent] = [(); 3].map(|()| random().max(1));
    out.put_slice(b"traceparent: 00-");
    put_hex(high, out);
    put_hex(low, out);
    out.put_u8(b'-');
    put_hex(parent, out);
    out.put_slice(b"-00\r\n");
}

fn put_hex(number: u64, out: &mut BytesMut) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digits = number
        .to_be_bytes()
        .map(|byte| [DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]);
    out.put_slice(digits.as_flattened());
}

/// Writes the fields that describe the client of a request to the pod. `claims` are those of its proxies. `None`: one of
/// them is no valid field.
pub fn render_client_fields<'a>(
    host: &[u8],
    claims: impl Iterator<Item = &'a httparse::Header<'a>>,
    sender: ForwardedRequestSender,
    edge: &EdgeSettings,
) -> Option<BytesMut> {
    let mut headers = HeaderMap::new();
    headers.insert(header::HOST, HeaderValue::from_bytes(host).ok()?);
    for claim in claims {
        let name = HeaderName::from_bytes(claim.name.as_bytes()).ok()?;
        headers.append(name, HeaderValue::from_bytes(claim.value).ok()?);
    }
    // The same functions as for all other requests, so that a pod gets the same fields.
    write_client_headers(&mut headers, sender, edge);
    if sender.traffic_origin == TrafficOrigin::External {
        write_client_certificate(&mut headers, None);
    }
    headers.remove(header::HOST);
    let mut out = BytesMut::new();
    for (name, value) in &headers {
        h1::write_field(name, value.as_bytes(), &mut out);
    }
    Some(out)
}

#[cfg(test)]
mod tests;
