//! Pure: HTTP/1.1 with pods (RFC 9112): heads as bytes, and the message boundaries.
//!
//! Bytes are the only bound: a head may have as many fields as fit. A response whose end is ambiguous is an error, with
//! one exception. With both a length and a coding, the coding counts and the connection serves no other request (§6.3).

use bytes::{BufMut as _, Bytes, BytesMut};
use common::decimal::parse_digits;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Version, header, request,
    uri::PathAndQuery,
};

pub mod chunked;
pub mod date;

use chunked::ChunkedDecoder;

/// Maximum number of bytes of a pod's head.
pub const MAX_POD_HEAD: usize = 1 << 20;
/// Size up to which a head is parsed whenever more of it comes, so that invalid bytes are found at once. A longer head
/// is parsed only when its end is there.
const MAX_EAGER_PARSE: usize = 8 << 10;
/// Number of fields that a head is parsed with at first; a second parse allows more.
const INITIAL_FIELD_COUNT: usize = 64;

/// Error of a message that is not valid HTTP/1.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Http1ParseError {
    /// The status line has an invalid version.
    #[error("invalid HTTP version parsed")]
    Version,
    /// The status line has an invalid code.
    #[error("invalid HTTP status-code parsed")]
    Status,
    /// A field has an invalid name or value.
    #[error("invalid HTTP header parsed")]
    Field,
    /// Lengths that differ or are not numbers.
    #[error("invalid content-length parsed")]
    ContentLength,
    /// A transfer coding in a message that may not have one.
    #[error("unexpected transfer-encoding parsed")]
    TransferEncoding,
    /// Chunks whose framing is invalid.
    #[error("invalid chunk parsed")]
    Chunk,
    /// More bytes than a head may have.
    #[error("message head is too large")]
    TooLarge,
}

/// Framing of a request's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestBodyFraming {
    /// The request has no body.
    NoBody,
    /// A body of this many bytes follows.
    Length(u64),
    /// A body in chunks follows.
    Chunked,
}

/// End of a response's body.
#[derive(Debug)]
pub enum ResponseBodyFraming {
    /// The response has no body.
    NoBody,
    /// The body ends after this many more bytes.
    Length(u64),
    /// The body ends with its last chunk.
    Chunked(ChunkedDecoder),
    /// The body ends with the connection.
    UntilClose,
}

/// Head of a pod's response.
#[derive(Debug)]
pub struct Http1ResponseHead {
    /// Status code of the response.
    pub status: StatusCode,
    /// Reason phrase of the pod, if it is not the standard one for the code.
    pub reason: Option<Bytes>,
    /// Header fields, in order of arrival for each name.
    pub headers: HeaderMap,
    /// End of the body that follows.
    pub framing: ResponseBodyFraming,
    /// True if the connection may serve another request afterwards.
    pub is_reusable: bool,
}

/// Writes a request's head with the framing of its body. `target` is the client's target if `http::Uri` cannot hold it.
pub fn write_request(
    head: &request::Parts,
    target: Option<&[u8]>,
    framing: RequestBodyFraming,
    out: &mut BytesMut,
) {
    out.reserve(256 + head.headers.len() * 48);
    out.put_slice(head.method.as_str().as_bytes());
    out.put_u8(b' ');
    let path_and_query = head.uri.path_and_query().map_or("/", PathAndQuery::as_str);
    out.put_slice(target.unwrap_or(path_and_query.as_bytes()));
    out.put_slice(b" HTTP/1.1\r\n");
    // The framing headers are written below, by the framing that is really used.
    for (name, value) in &head.headers {
        if *name != header::CONTENT_LENGTH && *name != header::TRANSFER_ENCODING {
            write_field(name, value.as_bytes(), out);
        }
    }
    match framing {
        RequestBodyFraming::Length(length) => write_content_length(length, out),
        RequestBodyFraming::Chunked => write_transfer_encoding(&head.headers, out),
        RequestBodyFraming::NoBody if needs_content_length(head) => write_content_length(0, out),
        RequestBodyFraming::NoBody => {}
    }
    out.put_slice(b"\r\n");
}

/// Returns true if a request without a body states that (RFC 9110 §8.6): its method expects one, or its client did so.
fn needs_content_length(head: &request::Parts) -> bool {
    [Method::POST, Method::PUT, Method::PATCH].contains(&head.method)
        || head.headers.contains_key(header::CONTENT_LENGTH)
}

fn write_content_length(length: u64, out: &mut BytesMut) {
    write_field(&header::CONTENT_LENGTH, length.to_string().as_bytes(), out);
}

/// Writes the transfer codings of the body; the last one is the activator's own. Empty elements of the list are left
/// out, since some servers refuse them (RFC 9110 §5.6.1).
fn write_transfer_encoding(headers: &HeaderMap, out: &mut BytesMut) {
    let values = headers.get_all(header::TRANSFER_ENCODING).iter().map(HeaderValue::as_bytes);
    let elements = values.flat_map(|value| value.split(|byte| *byte == b','));
    let all: Vec<&[u8]> =
        elements.map(<[u8]>::trim_ascii).filter(|coding| !coding.is_empty()).collect();
    let codings = all.join(&b", "[..]);
    if is_chunked(headers) {
        write_field(&header::TRANSFER_ENCODING, &codings, out);
    } else {
        write_field(&header::TRANSFER_ENCODING, b"chunked", out);
    }
}

/// Writes one field.
pub(crate) fn write_field(name: &HeaderName, value: &[u8], out: &mut BytesMut) {
    out.put_slice(name.as_str().as_bytes());
    out.put_slice(b": ");
    out.put_slice(value);
    out.put_slice(b"\r\n");
}

/// Removes the head of a response to `method` from the front of `from`, once it is complete. `scanned` is the number of
/// bytes in which earlier calls found no end of the head.
pub fn parse_response_head(
    from: &mut BytesMut,
    scanned: &mut usize,
    method: &Method,
) -> Result<Option<Http1ResponseHead>, Http1ParseError> {
    if from.is_empty() || (from.len() > MAX_EAGER_PARSE && !has_blank_line(from, *scanned)) {
        *scanned = from.len();
        return if from.len() > MAX_POD_HEAD { Err(Http1ParseError::TooLarge) } else { Ok(None) };
    }
    // The number of fields is not bounded, so the array for them grows until all fit.
    let mut max_fields = INITIAL_FIELD_COUNT;
    loop {
        let mut fields = vec![httparse::EMPTY_HEADER; max_fields];
        let mut head = httparse::Response::new(&mut fields);
        match head.parse(from) {
            // A head may be too large although all of it came at once.
            Ok(httparse::Status::Complete(length)) if length > MAX_POD_HEAD => {
                return Err(Http1ParseError::TooLarge);
            }
            Ok(httparse::Status::Complete(length)) => {
                let response = build_response_head(&head, method)?;
                bytes::Buf::advance(from, length);
                *scanned = 0;
                return Ok(Some(response));
            }
            Ok(httparse::Status::Partial) => {
                *scanned = from.len();
                return if from.len() > MAX_POD_HEAD {
                    Err(Http1ParseError::TooLarge)
                } else {
                    Ok(None)
                };
            }
            Err(httparse::Error::TooManyHeaders) => max_fields *= 4,
            Err(error) => return Err(error.into()),
        }
    }
}

/// Returns true if an empty line ends in the bytes behind `scanned`.
pub fn has_blank_line(bytes: &[u8], scanned: usize) -> bool {
    let from = &bytes[scanned.saturating_sub(3)..];
    let is_end = |at: usize| matches!(&from[at..], [b'\n', b'\n', ..] | [b'\n', b'\r', b'\n', ..]);
    (0..from.len()).any(is_end)
}

fn build_response_head(
    head: &httparse::Response<'_, '_>,
    method: &Method,
) -> Result<Http1ResponseHead, Http1ParseError> {
    let code = head.code.ok_or(Http1ParseError::Status)?;
    let status = StatusCode::from_u16(code).map_err(|_out_of_range| Http1ParseError::Status)?;
    let is_http10 = head.version == Some(0);
    let mut headers = parse_fields(&*head.headers)?;
    let lengths = parse_content_length(&headers);
    let is_coded = headers.contains_key(header::TRANSFER_ENCODING);
    if is_coded && is_http10 {
        // The sender is faulty, or a message was smuggled in: HTTP/1.0 knows no coding (§6.1).
        return Err(Http1ParseError::TransferEncoding);
    }
    // These responses have no body, whatever their headers state (§6.3).
    let has_body = *method != Method::HEAD
        && !status.is_informational()
        && status != StatusCode::NO_CONTENT
        && status != StatusCode::NOT_MODIFIED;
    let has_length_and_coding = is_coded && headers.contains_key(header::CONTENT_LENGTH);
    if is_coded {
        headers.remove(header::CONTENT_LENGTH);
    }
    // Without a length or chunks the body ends with the connection, which then cannot be used again.
    let framing = match (has_body, is_coded) {
        (false, _) => ResponseBodyFraming::NoBody,
        (true, true) if is_chunked(&headers) => {
            ResponseBodyFraming::Chunked(ChunkedDecoder::default())
        }
        (true, true) => ResponseBodyFraming::UntilClose,
        (true, false) => {
            lengths?.map_or(ResponseBodyFraming::UntilClose, ResponseBodyFraming::Length)
        }
    };
    let is_reusable = !has_length_and_coding
        && !matches!(framing, ResponseBodyFraming::UntilClose)
        && !connection_has_token(&headers, "close")
        && (!is_http10 || connection_has_token(&headers, "keep-alive"));
    let standard = status.canonical_reason().unwrap_or_default();
    let reason = head.reason.filter(|it| *it != standard);
    let reason = reason.map(|it| Bytes::copy_from_slice(it.as_bytes()));
    Ok(Http1ResponseHead { status, reason, headers, framing, is_reusable })
}

fn parse_fields(from: &[httparse::Header<'_>]) -> Result<HeaderMap, Http1ParseError> {
    let full = |_more| Http1ParseError::TooLarge;
    let mut headers = HeaderMap::try_with_capacity(from.len()).map_err(full)?;
    for field in from {
        let name =
            HeaderName::from_bytes(field.name.as_bytes()).map_err(|_bad| Http1ParseError::Field)?;
        let value = HeaderValue::from_bytes(field.value).map_err(|_bad| Http1ParseError::Field)?;
        headers.try_append(name, value).map_err(full)?;
    }
    Ok(headers)
}

/// Length that a head states, once or repeatedly with the same value.
fn parse_content_length(headers: &HeaderMap) -> Result<Option<u64>, Http1ParseError> {
    let mut length = None;
    for value in headers.get_all(header::CONTENT_LENGTH) {
        // A repeated length is allowed only with the same value: recipients that choose differently would lose the
        // message boundary.
        for number in value.as_bytes().split(|byte| *byte == b',') {
            let number = str::from_utf8(number.trim_ascii()).ok().and_then(parse_digits);
            let number: u64 = number.ok_or(Http1ParseError::ContentLength)?;
            if length.is_some_and(|before| before != number) {
                return Err(Http1ParseError::ContentLength);
            }
            length = Some(number);
        }
    }
    Ok(length)
}

/// Returns true if the last transfer coding is chunked.
fn is_chunked(headers: &HeaderMap) -> bool {
    let last = headers.get_all(header::TRANSFER_ENCODING).iter().next_back();
    let last = last.and_then(|it| it.as_bytes().rsplit(|byte| *byte == b',').next());
    last.is_some_and(|it| it.trim_ascii().eq_ignore_ascii_case(b"chunked"))
}

fn connection_has_token(headers: &HeaderMap, token: &str) -> bool {
    let values = headers.get_all(header::CONNECTION).iter();
    let mut tokens = values.flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    tokens.any(|it| it.trim_ascii().eq_ignore_ascii_case(token.as_bytes()))
}

/// Writes the head of an interim response.
pub fn write_interim_head(status: StatusCode, headers: &HeaderMap) -> BytesMut {
    let mut out = BytesMut::new();
    out.put_slice(format!("{:?} {status}\r\n", Version::HTTP_11).as_bytes());
    for (name, value) in headers {
        write_field(name, value.as_bytes(), &mut out);
    }
    out.put_slice(b"\r\n");
    out
}

/// Checks invariants of the parser for tests and the fuzzer: the pieces in which bytes arrive change nothing. The first
/// byte is the size of the pieces, the others are a response.
///
/// # Panics
///
/// When an invariant does not hold.
pub fn check(bytes: &[u8]) {
    let Some((size, bytes)) = bytes.split_first() else { return };
    let whole = parse_in_pieces(bytes, bytes.len());
    assert_eq!(parse_in_pieces(bytes, usize::from(*size)), whole, "in pieces of {size}");
}

/// Result of parsing a response: code, fields, `is_reusable`, the data of its chunks, and true if these are complete.
/// `None` while the head is not complete, and for an invalid one, which may be found before all of it was read.
type ParsedHttp1Response = Option<(StatusCode, HeaderMap, bool, Vec<u8>, bool)>;

fn parse_in_pieces(bytes: &[u8], size: usize) -> ParsedHttp1Response {
    let (mut from, mut scanned) = (BytesMut::new(), 0);
    let mut pieces = bytes.chunks(size.max(1));
    let response = loop {
        from.extend_from_slice(pieces.next()?);
        if let Some(response) = parse_response_head(&mut from, &mut scanned, &Method::GET).ok()? {
            break response;
        }
    };
    let ResponseBodyFraming::Chunked(mut chunks) = response.framing else {
        return Some((response.status, response.headers, response.is_reusable, Vec::new(), false));
    };
    let mut body = Vec::new();
    loop {
        match chunks.next_piece(&mut from).ok()? {
            Some(chunked::ChunkedPiece::Data(data)) => body.extend_from_slice(&data),
            Some(chunked::ChunkedPiece::Trailers(_)) => {}
            Some(chunked::ChunkedPiece::End) => break,
            None => match pieces.next() {
                Some(more) => from.extend_from_slice(more),
                None => break,
            },
        }
    }
    Some((response.status, response.headers, response.is_reusable, body, chunks.is_finished()))
}

impl From<httparse::Error> for Http1ParseError {
    fn from(error: httparse::Error) -> Self {
        match error {
            httparse::Error::Status => Self::Status,
            httparse::Error::Version => Self::Version,
            httparse::Error::TooManyHeaders => Self::TooLarge,
            httparse::Error::HeaderName
            | httparse::Error::HeaderValue
            | httparse::Error::NewLine
            | httparse::Error::Token => Self::Field,
        }
    }
}

#[cfg(test)]
mod tests;
