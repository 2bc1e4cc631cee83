//! Pure: HTTP/1.1 as it is spoken to pods (RFC 9112): heads as bytes, and where a message ends.
//!
//! Bytes are the only bound: a head may have as many fields as fit. Whatever leaves a message's end in doubt is an error,
//! but for a length beside a coding, where the coding counts and the connection serves no other request (§6.3).

use bytes::{BufMut as _, Bytes, BytesMut};
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Version, header, request,
    uri::PathAndQuery,
};

pub mod chunked;

use chunked::Chunks;

/// Bytes a pod's head may have.
pub const MAX_HEAD: usize = 1 << 20;
/// A head of up to this size is looked at whenever more of it comes, so that nonsense is known at once; a longer one only
/// when its end is there.
const MAX_EAGER: usize = 8 << 10;
/// Fields a head is expected to have at most; there is room for more on a second try.
const USUAL_FIELDS: usize = 64;

/// A message that is not HTTP/1.1's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The first line's version.
    #[error("invalid HTTP version parsed")]
    Version,
    /// The first line's code.
    #[error("invalid HTTP status-code parsed")]
    Status,
    /// A field's name or value.
    #[error("invalid HTTP header parsed")]
    Field,
    /// Lengths that differ or are no numbers.
    #[error("invalid content-length parsed")]
    Length,
    /// A coding where none may be.
    #[error("unexpected transfer-encoding parsed")]
    Coding,
    /// Chunks that make no sense.
    #[error("invalid chunk parsed")]
    Chunk,
    /// More bytes than a head may have.
    #[error("message head is too large")]
    TooLarge,
}

/// What follows a request's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sends {
    /// Nothing.
    Nothing,
    /// So many bytes.
    Exactly(u64),
    /// Chunks.
    Chunks,
}

/// How the end of an answer's body is known.
#[derive(Debug)]
pub enum Ends {
    /// There is none.
    Empty,
    /// After so many more bytes.
    After(u64),
    /// By chunks.
    Chunks(Chunks),
    /// By the connection's end.
    AtClose,
}

/// An answer's head.
#[derive(Debug)]
pub struct Answer {
    /// Its code.
    pub status: StatusCode,
    /// Its own words for the code, where they are not the usual ones.
    pub reason: Option<Bytes>,
    /// Its fields.
    pub headers: HeaderMap,
    /// What follows it.
    pub ends: Ends,
    /// Whether the connection may serve another request afterwards.
    pub keeps: bool,
}

/// Writes a request's head, framed as its body is sent. `target` is what the client wrote where `http::Uri` cannot hold it.
pub fn write_request(
    head: &request::Parts,
    target: Option<&[u8]>,
    sends: Sends,
    out: &mut BytesMut,
) {
    out.reserve(256 + head.headers.len() * 48);
    out.put_slice(head.method.as_str().as_bytes());
    out.put_u8(b' ');
    let own = head.uri.path_and_query().map_or("/", PathAndQuery::as_str);
    out.put_slice(target.unwrap_or(own.as_bytes()));
    out.put_slice(b" HTTP/1.1\r\n");
    for (name, value) in &head.headers {
        if *name != header::CONTENT_LENGTH && *name != header::TRANSFER_ENCODING {
            write_field(name, value.as_bytes(), out);
        }
    }
    match sends {
        Sends::Exactly(length) => write_length(length, out),
        Sends::Chunks => write_codings(&head.headers, out),
        Sends::Nothing if has_meaning(head) => write_length(0, out),
        Sends::Nothing => {}
    }
    out.put_slice(b"\r\n");
}

/// Whether a request without a body says so (RFC 9110 §8.6): its method expects one, or its client did.
fn has_meaning(head: &request::Parts) -> bool {
    [Method::POST, Method::PUT, Method::PATCH].contains(&head.method)
        || head.headers.contains_key(header::CONTENT_LENGTH)
}

fn write_length(length: u64, out: &mut BytesMut) {
    write_field(&header::CONTENT_LENGTH, length.to_string().as_bytes(), out);
}

/// The codings that the body has besides the last, which is ours.
fn write_codings(headers: &HeaderMap, out: &mut BytesMut) {
    let all: Vec<&[u8]> =
        headers.get_all(header::TRANSFER_ENCODING).iter().map(HeaderValue::as_bytes).collect();
    let given = all.join(&b", "[..]);
    if is_chunked(headers) {
        write_field(&header::TRANSFER_ENCODING, &given, out);
    } else {
        write_field(&header::TRANSFER_ENCODING, b"chunked", out);
    }
}

fn write_field(name: &HeaderName, value: &[u8], out: &mut BytesMut) {
    out.put_slice(name.as_str().as_bytes());
    out.put_slice(b": ");
    out.put_slice(value);
    out.put_slice(b"\r\n");
}

/// Takes the head of an answer to `method` off the front of `from`, once it is whole. `seen` is how much of it was looked at
/// before.
pub fn read_answer(
    from: &mut BytesMut,
    seen: &mut usize,
    method: &Method,
) -> Result<Option<Answer>, Malformed> {
    if from.is_empty() || (from.len() > MAX_EAGER && !has_end(from, *seen)) {
        *seen = from.len();
        return if from.len() > MAX_HEAD { Err(Malformed::TooLarge) } else { Ok(None) };
    }
    let mut fields = USUAL_FIELDS;
    loop {
        let mut room = vec![httparse::EMPTY_HEADER; fields];
        let mut head = httparse::Response::new(&mut room);
        match head.parse(from) {
            // However much of it came at once.
            Ok(httparse::Status::Complete(length)) if length > MAX_HEAD => {
                return Err(Malformed::TooLarge);
            }
            Ok(httparse::Status::Complete(length)) => {
                let answer = answer(&head, method)?;
                bytes::Buf::advance(from, length);
                *seen = 0;
                return Ok(Some(answer));
            }
            Ok(httparse::Status::Partial) => {
                *seen = from.len();
                return if from.len() > MAX_HEAD { Err(Malformed::TooLarge) } else { Ok(None) };
            }
            Err(httparse::Error::TooManyHeaders) => fields *= 4,
            Err(error) => return Err(error.into()),
        }
    }
}

/// Whether an empty line is in what came after `seen`.
pub fn has_end(bytes: &[u8], seen: usize) -> bool {
    let from = &bytes[seen.saturating_sub(3)..];
    let is_end = |at: usize| matches!(&from[at..], [b'\n', b'\n', ..] | [b'\n', b'\r', b'\n', ..]);
    (0..from.len()).any(is_end)
}

fn answer(head: &httparse::Response<'_, '_>, method: &Method) -> Result<Answer, Malformed> {
    let code = head.code.ok_or(Malformed::Status)?;
    let status = StatusCode::from_u16(code).map_err(|_out_of_range| Malformed::Status)?;
    let is_old = head.version == Some(0);
    let mut headers = fields(&*head.headers)?;
    let lengths = length(&headers);
    let is_coded = headers.contains_key(header::TRANSFER_ENCODING);
    if is_coded && is_old {
        // Its sender cannot have meant it, or stands in another's place (§6.1).
        return Err(Malformed::Coding);
    }
    let has_body = *method != Method::HEAD
        && !status.is_informational()
        && status != StatusCode::NO_CONTENT
        && status != StatusCode::NOT_MODIFIED;
    let is_doubtful = is_coded && headers.contains_key(header::CONTENT_LENGTH);
    if is_coded {
        headers.remove(header::CONTENT_LENGTH);
    }
    let ends = match (has_body, is_coded) {
        (false, _) => Ends::Empty,
        (true, true) if is_chunked(&headers) => Ends::Chunks(Chunks::default()),
        (true, true) => Ends::AtClose,
        (true, false) => lengths?.map_or(Ends::AtClose, Ends::After),
    };
    let keeps = !is_doubtful
        && !matches!(ends, Ends::AtClose)
        && !mentions(&headers, "close")
        && (!is_old || mentions(&headers, "keep-alive"));
    let usual = status.canonical_reason().unwrap_or_default();
    let reason = head.reason.filter(|it| *it != usual);
    let reason = reason.map(|it| Bytes::copy_from_slice(it.as_bytes()));
    Ok(Answer { status, reason, headers, ends, keeps })
}

fn fields(from: &[httparse::Header<'_>]) -> Result<HeaderMap, Malformed> {
    let mut headers = HeaderMap::with_capacity(from.len());
    for field in from {
        let name =
            HeaderName::from_bytes(field.name.as_bytes()).map_err(|_bad| Malformed::Field)?;
        let value = HeaderValue::from_bytes(field.value).map_err(|_bad| Malformed::Field)?;
        headers.try_append(name, value).map_err(|_full| Malformed::TooLarge)?;
    }
    Ok(headers)
}

/// The length that a head states, however often it does.
fn length(headers: &HeaderMap) -> Result<Option<u64>, Malformed> {
    let mut length = None;
    for value in headers.get_all(header::CONTENT_LENGTH) {
        for one in value.as_bytes().split(|byte| *byte == b',') {
            let one = one.trim_ascii();
            let is_number = !one.is_empty() && one.iter().all(u8::is_ascii_digit);
            let one = str::from_utf8(one).ok().filter(|_| is_number);
            let one: u64 = one.and_then(|it| it.parse().ok()).ok_or(Malformed::Length)?;
            if length.is_some_and(|before| before != one) {
                return Err(Malformed::Length);
            }
            length = Some(one);
        }
    }
    Ok(length)
}

/// Whether the last of the codings is chunks.
fn is_chunked(headers: &HeaderMap) -> bool {
    let last = headers.get_all(header::TRANSFER_ENCODING).iter().next_back();
    let last = last.and_then(|it| it.as_bytes().rsplit(|byte| *byte == b',').next());
    last.is_some_and(|it| it.trim_ascii().eq_ignore_ascii_case(b"chunked"))
}

fn mentions(headers: &HeaderMap, token: &str) -> bool {
    let values = headers.get_all(header::CONNECTION).iter();
    let mut tokens = values.flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    tokens.any(|it| it.trim_ascii().eq_ignore_ascii_case(token.as_bytes()))
}

/// Writes the head of an answer before the final one.
pub fn write_early(status: StatusCode, headers: &HeaderMap) -> BytesMut {
    let mut out = BytesMut::new();
    out.put_slice(format!("{:?} {status}\r\n", Version::HTTP_11).as_bytes());
    for (name, value) in headers {
        write_field(name, value.as_bytes(), &mut out);
    }
    out.put_slice(b"\r\n");
    out
}

/// What always holds of an answer's bytes, behind one that says in pieces of which size they come: for tests and the fuzzer.
///
/// # Panics
///
/// When it does not hold.
pub fn check(bytes: &[u8]) {
    let Some((size, bytes)) = bytes.split_first() else { return };
    let whole = understood(bytes, bytes.len());
    assert_eq!(understood(bytes, usize::from(*size)), whole, "in pieces of {size}");
}

/// An answer's code, fields and whether it keeps the connection; what was read of chunks, and whether they are over. `None`
/// while its head is not whole, and when it makes no sense: that may be known before all of it was looked at.
type Understood = Option<(StatusCode, HeaderMap, bool, Vec<u8>, bool)>;

fn understood(bytes: &[u8], size: usize) -> Understood {
    let (mut from, mut seen) = (BytesMut::new(), 0);
    let mut pieces = bytes.chunks(size.max(1));
    let answer = loop {
        from.extend_from_slice(pieces.next()?);
        if let Some(answer) = read_answer(&mut from, &mut seen, &Method::GET).ok()? {
            break answer;
        }
    };
    let Ends::Chunks(mut chunks) = answer.ends else {
        return Some((answer.status, answer.headers, answer.keeps, Vec::new(), false));
    };
    let mut body = Vec::new();
    loop {
        match chunks.read(&mut from).ok()? {
            Some(chunked::Piece::Data(data)) => body.extend_from_slice(&data),
            Some(chunked::Piece::Trailers(_)) => {}
            Some(chunked::Piece::End) => break,
            None => match pieces.next() {
                Some(more) => from.extend_from_slice(more),
                None => break,
            },
        }
    }
    Some((answer.status, answer.headers, answer.keeps, body, chunks.is_over()))
}

impl From<httparse::Error> for Malformed {
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
