//! Pure: request targets that `http::Uri` cannot hold, made acceptable to hyper, which accepts no others.
//!
//! Careless clients send `?q="x"` and bytes beyond ASCII, and servers accept them. Such a target is percent-encoded
//! before `hyper` reads it, and its original bytes are kept for the pod. Nothing else is changed, and hyper still
//! judges every message. If the end of a message is ambiguous, everything behind it passes unchanged. Only chunks that
//! are malformed get a mark in front of them, so that hyper refuses them, too: it accepts trailers that end with LF
//! alone, and reads on into the next request.

use std::collections::VecDeque;

use bytes::{Buf as _, Bytes, BytesMut};
use common::decimal::parse_digits;
use http::{HeaderName, header, uri::PathAndQuery};

use crate::h1::{
    self,
    chunked::{ChunkedDecoder, ChunkedPiece},
};

/// Bytes that hyper refuses wherever a line of chunks begins or their data ends.
const MALFORMED_CHUNK_MARK: &[u8] = b"\r\r";

/// Requests of one connection, as they come in.
#[derive(Debug)]
pub struct RequestTargetInspector {
    position: RequestPosition,
    /// Maximum number of bytes of a head.
    max_head: usize,
    /// Number of bytes at the front of `unread` in which no end of a head was found.
    scanned_bytes: usize,
    /// Bytes that were received and not parsed yet.
    unread: BytesMut,
    /// Bytes that are ready for hyper.
    ready: BytesMut,
    /// Rewritten targets whose requests hyper has not returned yet, in the order of the requests.
    rewritten: VecDeque<RewrittenTarget>,
}

#[derive(Debug)]
enum RequestPosition {
    Head,
    Body(u64),
    Chunked(ChunkedDecoder),
    /// All further bytes pass unchanged.
    Passthrough,
}

#[derive(Debug)]
struct RewrittenTarget {
    encoded: String,
    original: Bytes,
}

/// Action that yields the next bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InspectorAction {
    /// Read at most this many bytes, which need not be parsed.
    PassThrough(u64),
    /// Read some bytes into [`unread`](RequestTargetInspector::unread).
    ReadToParse,
    /// Take the bytes out of [`ready`](RequestTargetInspector::ready).
    TakeReady,
}

impl RequestTargetInspector {
    /// Inspects requests from the first one on, whose heads have at most `max_head` bytes.
    pub fn new(max_head: usize) -> Self {
        Self { position: RequestPosition::Head, ..Self::disabled(max_head) }
    }

    /// Inspects nothing: all bytes pass unchanged.
    pub fn disabled(max_head: usize) -> Self {
        let (unread, ready, rewritten) = (BytesMut::new(), BytesMut::new(), VecDeque::new());
        Self {
            position: RequestPosition::Passthrough,
            max_head,
            scanned_bytes: 0,
            unread,
            ready,
            rewritten,
        }
    }

    /// Action by which the caller gets the next bytes.
    pub fn next_action(&mut self) -> InspectorAction {
        while self.ready.is_empty() && self.step() {}
        if matches!(self.position, RequestPosition::Head)
            && self.ready.is_empty()
            && self.unread.is_empty()
        {
            // Between requests a connection keeps no buffers, since one that was large once would stay large.
            (self.unread, self.ready) = (BytesMut::new(), BytesMut::new());
        }
        match self.position {
            _ if !self.ready.is_empty() => InspectorAction::TakeReady,
            RequestPosition::Passthrough => InspectorAction::PassThrough(u64::MAX),
            RequestPosition::Body(left) => InspectorAction::PassThrough(left),
            RequestPosition::Head | RequestPosition::Chunked(_) => InspectorAction::ReadToParse,
        }
    }

    /// Returns true within a body in chunks.
    pub fn is_in_chunks(&self) -> bool {
        matches!(self.position, RequestPosition::Chunked(_))
    }

    /// Buffer that received bytes are read into.
    pub fn unread(&mut self) -> &mut BytesMut {
        &mut self.unread
    }

    /// Buffer that bytes for hyper are taken from.
    pub fn ready(&mut self) -> &mut BytesMut {
        &mut self.ready
    }

    /// Registers bytes that passed without being parsed.
    pub fn on_passed(&mut self, count: usize) {
        if let RequestPosition::Body(left) = &mut self.position {
            *left = left.saturating_sub(count as u64);
        }
    }

    /// Registers the end of the connection.
    pub fn on_eof(&mut self) {
        self.stop_inspecting();
    }

    /// Target as the client wrote it, if hyper's `uri` was made from it. The caller runs it for each request.
    pub fn take_original(&mut self, uri: &str) -> Option<Bytes> {
        let is_next = self.rewritten.front().is_some_and(|it| it.encoded == uri);
        if is_next { self.rewritten.pop_front().map(|it| it.original) } else { None }
    }

    /// Makes bytes ready, or finds the next part of a message. Returns true if anything has changed.
    fn step(&mut self) -> bool {
        match &mut self.position {
            RequestPosition::Body(0) => self.position = RequestPosition::Head,
            _ if self.unread.is_empty() => return false,
            RequestPosition::Head => return self.parse_head(),
            RequestPosition::Body(left) => {
                let count = usize::try_from(*left).unwrap_or(usize::MAX).min(self.unread.len());
                *left -= count as u64;
                self.ready.unsplit(self.unread.split_to(count));
            }
            RequestPosition::Chunked(_) => return self.parse_chunks(),
            RequestPosition::Passthrough => self.stop_inspecting(),
        }
        true
    }

    fn stop_inspecting(&mut self) {
        self.position = RequestPosition::Passthrough;
        let rest = self.unread.split();
        self.ready.extend_from_slice(&rest);
    }

    fn parse_chunks(&mut self) -> bool {
        let RequestPosition::Chunked(chunks) = &mut self.position else { return false };
        let before = self.unread.len();
        // Valid chunks pass unchanged. Reading them only finds the end of the body, since the next head follows it.
        self.ready.extend_from_slice(&self.unread);
        loop {
            match chunks.next_piece(&mut self.unread) {
                Ok(Some(ChunkedPiece::Data(_))) => {}
                Ok(Some(ChunkedPiece::Trailers(_) | ChunkedPiece::End)) => {
                    self.position = RequestPosition::Head;
                    break;
                }
                Ok(None) => break,
                Err(_malformed) => {
                    // The reader stops where a line begins or data ends, and hyper has come as far.
                    self.ready.truncate(self.ready.len() - self.unread.len());
                    self.ready.extend_from_slice(MALFORMED_CHUNK_MARK);
                    self.stop_inspecting();
                    return true;
                }
            }
        }
        // Bytes that the reader has not consumed stay in `unread`: they belong to the next head, or are incomplete.
        self.ready.truncate(self.ready.len() - self.unread.len());
        self.unread.len() < before
    }

    fn parse_head(&mut self) -> bool {
        while self.unread.starts_with(b"\r\n") {
            self.unread.advance(2);
        }
        if !may_be_request(&self.unread) {
            self.stop_inspecting();
            return true;
        }
        if !h1::has_blank_line(&self.unread, self.scanned_bytes) {
            self.scanned_bytes = self.unread.len();
            // A head beyond its bound passes, so that hyper refuses it with the right code.
            if self.unread.len() > self.max_head {
                self.stop_inspecting();
            }
            return self.unread.is_empty() && !self.ready.is_empty();
        }
        self.scanned_bytes = 0;
        match self.rewrite_head() {
            Some(at) => self.position = at,
            None => self.stop_inspecting(),
        }
        true
    }

    /// Makes a head ready. `None`: hyper has to see it unchanged.
    fn rewrite_head(&mut self) -> Option<RequestPosition> {
        let (begin, end) = target_range(&self.unread)?;
        let original = self.unread.get(begin..end)?;
        // The usual case: the target is valid, and the head passes without a copy. The whole server may have no path.
        let is_valid = original.is_empty() || PathAndQuery::try_from(original).is_ok();
        if is_valid && !original.contains(&b'#') {
            let (length, at) = parse_framing(&self.unread)?;
            self.ready.unsplit(self.unread.split_to(length));
            return Some(at);
        }
        let (encoded, original) = (percent_encode(original), Bytes::copy_from_slice(original));
        let mut head = BytesMut::with_capacity(self.unread.len() + encoded.len());
        head.extend_from_slice(&self.unread[..begin]);
        head.extend_from_slice(encoded.as_bytes());
        head.extend_from_slice(&self.unread[end..]);
        // The framing is read from the changed head, whose length differs from the received one.
        let (length, at) = parse_framing(&head)?;
        self.rewritten.push_back(RewrittenTarget { encoded, original });
        let rest = head.len() - length;
        self.unread.advance(self.unread.len() - rest);
        self.ready.extend_from_slice(&head[..length]);
        Some(at)
    }
}

/// Returns true if the bytes may begin a request: a method, and a space behind it.
fn may_be_request(bytes: &[u8]) -> bool {
    let method = bytes.split(|byte| *byte == b' ').next().unwrap_or_default();
    let is_usual = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_".contains(byte);
    let is_method = !method.is_empty() && method.len() <= 32 && method.iter().all(is_usual);
    is_method || bytes.is_empty() || bytes == b"\r"
}

/// Range of path and query in a request line, if the line is one that a server may accept.
fn target_range(head: &[u8]) -> Option<(usize, usize)> {
    let request_line = head.split(|byte| *byte == b'\n').next()?.strip_suffix(b"\r")?;
    let mut words = request_line.split(|byte| *byte == b' ');
    let (method, target, version) = (words.next()?, words.next()?, words.next()?);
    let is_usual = words.next().is_none() && matches!(version, b"HTTP/1.1" | b"HTTP/1.0");
    // No server accepts control characters.
    if !is_usual || target.iter().any(u8::is_ascii_control) {
        return None;
    }
    let (begin, end) = (method.len() + 1, method.len() + 1 + target.len());
    let scheme = target.windows(3).position(|it| it == b"://");
    let authority = match target.first()? {
        b'/' => 0,
        b'*' if target.len() == 1 => 0,
        _ => {
            let host = scheme? + 3;
            let path = target[host..].iter().position(|byte| b"/?#".contains(byte));
            path.map_or(target.len(), |path| host + path)
        }
    };
    Some((begin + authority, end))
}

/// Target in percent-encoding, with all characters that `http::Uri` refuses.
fn percent_encode(target: &[u8]) -> String {
    let mut written = String::with_capacity(target.len() + 32);
    for &byte in target {
        let is_plain = byte.is_ascii_graphic() && !b"\"<>{}|\\^`#".contains(&byte);
        if is_plain {
            written.push(char::from(byte));
        } else {
            written.push('%');
            written.extend(
                [byte >> 4, byte & 15].map(|it| char::from(b"0123456789ABCDEF"[usize::from(it)])),
            );
        }
    }
    written
}

/// Length of a head, and the part of the message behind it. `None`: the head is invalid or ambiguous.
fn parse_framing(bytes: &[u8]) -> Option<(usize, RequestPosition)> {
    // The number of fields is bounded by the head's bytes only, so the array for them grows until all fit.
    let mut fields = 64;
    loop {
        let mut fields_array = vec![httparse::EMPTY_HEADER; fields];
        let mut head = httparse::Request::new(&mut fields_array);
        match head.parse(bytes) {
            Ok(httparse::Status::Complete(length)) => return Some((length, body_position(&head)?)),
            Ok(httparse::Status::Partial) => return None,
            Err(httparse::Error::TooManyHeaders) => fields *= 4,
            Err(_malformed) => return None,
        }
    }
}

fn body_position(head: &httparse::Request<'_, '_>) -> Option<RequestPosition> {
    let fields: &[httparse::Header<'_>] = head.headers;
    // After these the bytes may not be requests at all.
    if head.method? == "CONNECT" || fields_named(fields, &header::UPGRADE).next().is_some() {
        return Some(RequestPosition::Passthrough);
    }
    let mut lengths = fields_named(fields, &header::CONTENT_LENGTH);
    let mut codings = fields_named(fields, &header::TRANSFER_ENCODING);
    let (length, coding) = (lengths.next(), codings.next());
    // Of two lengths or codings another recipient might choose the other one: hyper decides.
    if lengths.next().is_some() || codings.next().is_some() {
        return Some(RequestPosition::Passthrough);
    }
    match (length, coding) {
        (None, None) => Some(RequestPosition::Head),
        (Some(length), None) => {
            let length = str::from_utf8(length.value).ok().and_then(parse_digits);
            Some(length.map_or(RequestPosition::Passthrough, RequestPosition::Body))
        }
        (None, Some(coding))
            if coding.value.eq_ignore_ascii_case(b"chunked") && head.version == Some(1) =>
        {
            Some(RequestPosition::Chunked(ChunkedDecoder::default()))
        }
        _ => Some(RequestPosition::Passthrough),
    }
}

fn fields_named<'a, 'b>(
    fields: &'a [httparse::Header<'b>],
    name: &'a HeaderName,
) -> impl Iterator<Item = &'a httparse::Header<'b>> {
    fields.iter().filter(move |it| it.name.eq_ignore_ascii_case(name.as_str()))
}

/// Checks invariants of the inspector for tests and the fuzzer: the pieces in which bytes arrive change nothing, and no
/// byte is lost but line ends before a request. The first byte is the size of the pieces, the others are requests.
///
/// # Panics
///
/// When an invariant does not hold.
pub fn check(bytes: &[u8]) {
    let Some((size, bytes)) = bytes.split_first() else { return };
    // A head beyond its bound is inspected no more, and its end may come before that is noticed.
    if bytes.len() > CHECKED_HEAD {
        return;
    }
    let whole = pass_in_pieces(bytes, CHECKED_HEAD);
    assert_eq!(pass_in_pieces(bytes, usize::from(*size)), whole, "in pieces of {size}");
    let count_text = |bytes: &[u8]| bytes.iter().filter(|byte| !b"\r\n".contains(byte)).count();
    assert!(count_text(&whole) >= count_text(bytes), "bytes are lost");
}

/// Bound of a head in [`check`].
const CHECKED_HEAD: usize = 1 << 16;

/// Bytes that hyper gets if they arrive in pieces of `size` bytes.
fn pass_in_pieces(mut rest: &[u8], size: usize) -> Vec<u8> {
    let (mut inspector, mut passed) = (RequestTargetInspector::new(CHECKED_HEAD), Vec::new());
    loop {
        let piece = rest.len().min(size.max(1));
        match inspector.next_action() {
            InspectorAction::TakeReady => passed.extend_from_slice(&inspector.ready().split()),
            _ if rest.is_empty() => match inspector.position {
                RequestPosition::Passthrough => return passed,
                RequestPosition::Head | RequestPosition::Body(_) | RequestPosition::Chunked(_) => {
                    inspector.on_eof();
                }
            },
            InspectorAction::PassThrough(most) => {
                let piece = piece.min(usize::try_from(most).unwrap_or(usize::MAX));
                passed.extend_from_slice(&rest[..piece]);
                inspector.on_passed(piece);
                rest = &rest[piece..];
            }
            InspectorAction::ReadToParse => {
                inspector.unread().extend_from_slice(&rest[..piece]);
                rest = &rest[piece..];
            }
        }
    }
}

#[cfg(test)]
mod tests;
