//! Pure: heads of responses on the fast path: plain ones are judged and rewritten as bytes, and all others are written
//! as hyper does.
//!
//! No head that is written here has its last line yet: [`finish_response_head`] adds what depends on the connection.

use std::mem::MaybeUninit;

use bytes::{BufMut as _, Bytes, BytesMut};
use common::decimal::parse_digits;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};

use crate::{
    edge::plain_request::put_field,
    h1::{self, Http1ResponseHead, ResponseBodyFraming, date::DATE_BYTES},
};

mod check;

pub use check::check;

/// Maximum number of bytes of a plain head.
const MAX_HEAD: usize = 8 << 10;
/// Maximum number of fields of a plain head.
const MAX_FIELDS: usize = 64;

/// Beginning of a pod's bytes.
#[derive(Debug, PartialEq, Eq)]
pub enum ResponseStart {
    /// The head may become plain, and is not complete.
    Incomplete,
    /// The head is for the general parser.
    Unusual,
    /// The head is plain, and was written for the client.
    Plain(PlainResponse),
}

/// Plain head of a final response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlainResponse {
    /// Number of bytes of the pod's head.
    pub head_length: usize,
    /// Status code of the response.
    pub status: StatusCode,
    /// End of the body.
    pub framing: PlainFraming,
    /// True if the connection may serve another request afterwards.
    pub is_reusable: bool,
    /// True if the pod has sent a date.
    pub has_date: bool,
}

/// End of the body of a plain response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlainFraming {
    /// The body has this many bytes.
    Length(u64),
    /// The body has chunks.
    Chunked,
}

/// Treatment of a field by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ResponseFieldRole {
    Dropped,
    Unusual,
    Connection,
    ContentLength,
    Date,
    TransferEncoding,
}

/// Names with a role of their own. The client gets all other fields.
const ROLES: [(&str, ResponseFieldRole); 10] = [
    ("connection", ResponseFieldRole::Connection),
    ("content-length", ResponseFieldRole::ContentLength),
    ("date", ResponseFieldRole::Date),
    ("http2-settings", ResponseFieldRole::Unusual),
    ("keep-alive", ResponseFieldRole::Dropped),
    ("proxy-authenticate", ResponseFieldRole::Unusual),
    ("proxy-connection", ResponseFieldRole::Unusual),
    ("trailer", ResponseFieldRole::Unusual),
    ("transfer-encoding", ResponseFieldRole::TransferEncoding),
    ("upgrade", ResponseFieldRole::Unusual),
];

/// Reads the beginning of a pod's bytes. The head of a plain response is appended to `out` as the client gets it.
pub fn rewrite_plain_response(from: &[u8], out: &mut BytesMut) -> ResponseStart {
    let before = out.len();
    let start = read_response_start(from, out);
    if !matches!(start, ResponseStart::Plain(_)) {
        out.truncate(before);
    }
    start
}

fn read_response_start(from: &[u8], out: &mut BytesMut) -> ResponseStart {
    let mut fields: [MaybeUninit<httparse::Header<'_>>; MAX_FIELDS] =
        [const { MaybeUninit::uninit() }; MAX_FIELDS];
    let mut head = httparse::Response::new(&mut []);
    let parser = httparse::ParserConfig::default();
    let head_length = match parser.parse_response_with_uninit_headers(&mut head, from, &mut fields)
    {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) if from.len() < MAX_HEAD => return ResponseStart::Incomplete,
        Ok(httparse::Status::Partial) | Err(_) => return ResponseStart::Unusual,
    };
    let (Some(1), Some(code)) = (head.version, head.code) else { return ResponseStart::Unusual };
    let status = StatusCode::from_u16(code).ok().filter(|it| has_plain_body(*it));
    let Some(status) = status.filter(|_| head_length <= MAX_HEAD) else {
        return ResponseStart::Unusual;
    };
    out.reserve(head_length + 128);
    out.put_slice(b"HTTP/1.1 ");
    out.put_slice(status.as_str().as_bytes());
    out.put_u8(b' ');
    out.put_slice(head.reason.unwrap_or_default().as_bytes());
    out.put_slice(b"\r\n");
    let rewritten = rewrite_fields(head.headers, out);
    rewritten.map_or(ResponseStart::Unusual, |(framing, is_reusable, has_date)| {
        ResponseStart::Plain(PlainResponse { head_length, status, framing, is_reusable, has_date })
    })
}

/// Returns true for a final response whose fields alone tell the end of its body.
fn has_plain_body(status: StatusCode) -> bool {
    !status.is_informational()
        && status != StatusCode::NO_CONTENT
        && status != StatusCode::NOT_MODIFIED
}

/// Writes the fields for the client. Returns the framing, and true if the connection may serve another request, and if
/// there is a date. `None`: the head is not plain.
fn rewrite_fields(
    fields: &[httparse::Header<'_>],
    out: &mut BytesMut,
) -> Option<(PlainFraming, bool, bool)> {
    let (mut framing, mut is_reusable, mut has_date) = (None, true, false);
    for field in fields {
        let role = ROLES.iter().find(|(it, _)| it.eq_ignore_ascii_case(field.name));
        let this_framing = match role.map(|(_, role)| *role) {
            None => None,
            Some(ResponseFieldRole::Dropped) => continue,
            Some(ResponseFieldRole::Unusual) => return None,
            Some(ResponseFieldRole::Connection)
                if field.value.eq_ignore_ascii_case(b"keep-alive") =>
            {
                continue;
            }
            Some(ResponseFieldRole::Connection) if field.value.eq_ignore_ascii_case(b"close") => {
                is_reusable = false;
                continue;
            }
            // Any other option names a field to remove.
            Some(ResponseFieldRole::Connection) => return None,
            Some(ResponseFieldRole::ContentLength) => {
                let length = str::from_utf8(field.value).ok().and_then(parse_digits)?;
                Some(PlainFraming::Length(length))
            }
            Some(ResponseFieldRole::Date) => {
                has_date = true;
                None
            }
            Some(ResponseFieldRole::TransferEncoding)
                if field.value.eq_ignore_ascii_case(b"chunked") =>
            {
                Some(PlainFraming::Chunked)
            }
            Some(ResponseFieldRole::TransferEncoding) => return None,
        };
        // Of two lengths or codings another recipient might choose the other one.
        if this_framing.is_some() && framing.is_some() {
            return None;
        }
        framing = framing.or(this_framing);
        put_field(field, out);
    }
    // Without either the body ends with the connection.
    framing.map(|framing| (framing, is_reusable, has_date))
}

/// Writes the head of a pod's response that is not plain, whose fields for one hop were removed. Its framing is the one
/// of the body that follows, in chunks if the length is not known. Returns true if it has a date.
pub fn write_pod_response(head: &Http1ResponseHead, out: &mut BytesMut) -> bool {
    let reason = head.reason.as_deref();
    put_status_line(head.status, reason, out);
    let has_body = !matches!(head.framing, ResponseBodyFraming::NoBody);
    put_fields_without_framing(&head.headers, has_body, out);
    match &head.framing {
        ResponseBodyFraming::NoBody => {}
        ResponseBodyFraming::Length(length) => {
            h1::write_field(&header::CONTENT_LENGTH, length.to_string().as_bytes(), out);
        }
        ResponseBodyFraming::Chunked(_) | ResponseBodyFraming::UntilClose => {
            let values = head.headers.get_all(header::TRANSFER_ENCODING).iter();
            let mut codings: Vec<&[u8]> = values.map(HeaderValue::as_bytes).collect();
            // Chunks are the last coding: those of the pod, or those by which its body passes on.
            if !matches!(head.framing, ResponseBodyFraming::Chunked(_)) {
                codings.push(b"chunked");
            }
            h1::write_field(&header::TRANSFER_ENCODING, &codings.join(&b", "[..]), out);
        }
    }
    head.headers.contains_key(header::DATE)
}

/// Writes the head of a response of the activator itself.
pub fn write_own_response(response: &Response<Bytes>, out: &mut BytesMut) {
    put_status_line(response.status(), None, out);
    put_fields_without_framing(response.headers(), true, out);
    let length = response.body().len().to_string();
    h1::write_field(&header::CONTENT_LENGTH, length.as_bytes(), out);
}

/// Writes the last lines of a head. `date` is for a response without one.
pub fn finish_response_head(date: Option<&[u8; DATE_BYTES]>, is_last: bool, out: &mut BytesMut) {
    if let Some(date) = date {
        out.put_slice(b"date: ");
        out.put_slice(date);
        out.put_slice(b"\r\n");
    }
    out.put_slice(if is_last { b"connection: close\r\n\r\n" } else { b"\r\n" });
}

fn put_status_line(status: StatusCode, reason: Option<&[u8]>, out: &mut BytesMut) {
    out.put_slice(b"HTTP/1.1 ");
    out.put_slice(status.as_str().as_bytes());
    out.put_u8(b' ');
    // hyper writes this for a code without a standard reason.
    let standard = || status.canonical_reason().unwrap_or("<none>").as_bytes();
    out.put_slice(reason.unwrap_or_else(standard));
    out.put_slice(b"\r\n");
}

/// Writes all fields but those that the connection or the framing decides.
fn put_fields_without_framing(headers: &HeaderMap, has_body: bool, out: &mut BytesMut) {
    let own = [header::CONTENT_LENGTH, header::TRANSFER_ENCODING, header::CONNECTION];
    // Without a body no trailers come.
    let is_written =
        |name: &HeaderName| !own.contains(name) && (has_body || *name != header::TRAILER);
    for (name, value) in headers.iter().filter(|(name, _)| is_written(name)) {
        h1::write_field(name, value.as_bytes(), out);
    }
}

#[cfg(test)]
mod tests;
