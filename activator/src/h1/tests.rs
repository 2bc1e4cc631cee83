#![allow(clippy::unwrap_used, reason = "tests")]

use http::Request;
use proptest::prelude::*;

use super::{chunked::ChunkedPiece, *};

/// Reads a response head that comes in pieces of `size` bytes.
fn parse_head_in_pieces(
    bytes: &[u8],
    size: usize,
    method: &Method,
) -> Result<Option<Http1ResponseHead>, Http1ParseError> {
    let (mut from, mut scanned) = (BytesMut::new(), 0);
    for piece in bytes.chunks(size) {
        from.extend_from_slice(piece);
        if let Some(response) = parse_response_head(&mut from, &mut scanned, method)? {
            return Ok(Some(response));
        }
    }
    Ok(None)
}

fn framing_of(text: &str, method: &Method) -> String {
    let framings =
        [1, 3, 10_000].map(|size| match parse_head_in_pieces(text.as_bytes(), size, method) {
            Ok(Some(it)) => {
                let end = match it.framing {
                    ResponseBodyFraming::NoBody => "none".to_owned(),
                    ResponseBodyFraming::Length(length) => length.to_string(),
                    ResponseBodyFraming::Chunked(_) => "chunks".to_owned(),
                    ResponseBodyFraming::UntilClose => "close".to_owned(),
                };
                format!("{end}{}", if it.is_reusable { ", kept" } else { "" })
            }
            Ok(None) => "more".to_owned(),
            Err(error) => error.to_string(),
        });
    assert!(framings.iter().all(|it| *it == framings[0]), "{text} {framings:?}");
    framings[0].clone()
}

#[test]
fn a_responses_end_is_found_by_the_standard() {
    for (fields, end) in [
        ("Content-Length: 5\r\n", "5, kept"),
        ("Content-Length: 5\r\nContent-Length: 5\r\n", "5, kept"),
        ("Content-Length: 5, 5\r\n", "5, kept"),
        ("Content-Length: 5\r\nContent-Length: 6\r\n", "invalid content-length parsed"),
        ("Content-Length: +5\r\n", "invalid content-length parsed"),
        ("Content-Length: \r\n", "invalid content-length parsed"),
        ("Content-Length: 99999999999999999999\r\n", "invalid content-length parsed"),
        ("Transfer-Encoding: chunked\r\n", "chunks, kept"),
        ("Transfer-Encoding: gzip, Chunked\r\n", "chunks, kept"),
        ("Transfer-Encoding: gzip\r\n", "close"),
        // Both framings may be an attack, so that the connection is not used again (RFC 9112 §6.3).
        ("Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", "chunks"),
        ("Content-Length: x\r\nTransfer-Encoding: chunked\r\n", "chunks"),
        ("Connection: close\r\nContent-Length: 0\r\n", "0"),
        ("", "close"),
        ("bad name: x\r\n", "invalid HTTP header parsed"),
        ("x: \0\r\n", "invalid HTTP header parsed"),
    ] {
        assert_eq!(
            framing_of(&format!("HTTP/1.1 200 OK\r\n{fields}\r\n"), &Method::GET),
            end,
            "{fields}"
        );
    }
    for (text, method, end) in [
        ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", Method::HEAD, "none, kept"),
        ("HTTP/1.1 204 No\r\nContent-Length: 5\r\n\r\n", Method::GET, "none, kept"),
        ("HTTP/1.1 304 No\r\n\r\n", Method::GET, "none, kept"),
        ("HTTP/1.1 103 Early\r\n\r\n", Method::GET, "none, kept"),
        ("HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\n", Method::GET, "5"),
        (
            "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 5\r\n\r\n",
            Method::GET,
            "5, kept",
        ),
        (
            "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
            Method::GET,
            "unexpected transfer-encoding parsed",
        ),
        ("HTTP/1.1 x\r\n\r\n", Method::GET, "invalid HTTP status-code parsed"),
        ("SSH-2.0-x\r\n", Method::GET, "invalid HTTP version parsed"),
        ("HTTP/1.1 200 OK\r\n", Method::GET, "more"),
    ] {
        assert_eq!(framing_of(text, &method), end, "{text}");
    }
}

#[test]
fn a_head_may_have_as_many_fields_as_its_bytes_allow() {
    let fields = "x: y\r\n".repeat(20_000);
    let text = format!("HTTP/1.1 200 OK\r\n{fields}content-length: 0\r\n\r\n");
    let response = parse_head_in_pieces(text.as_bytes(), 5_000, &Method::GET).unwrap().unwrap();
    assert_eq!(response.headers.len(), 20_001);
    // A table of fields holds no more than about 24,000.
    let crowded = format!("HTTP/1.1 200 OK\r\n{}\r\n", "x: y\r\n".repeat(30_000));
    let error = parse_head_in_pieces(crowded.as_bytes(), crowded.len(), &Method::GET).unwrap_err();
    assert_eq!(error, Http1ParseError::TooLarge);
    let endless = format!("HTTP/1.1 200 OK\r\nx: {}", "y".repeat(MAX_POD_HEAD));
    assert_eq!(
        parse_head_in_pieces(endless.as_bytes(), 50_000, &Method::GET).unwrap_err(),
        Http1ParseError::TooLarge
    );
    let ended = endless + "\r\n\r\n";
    for size in [50_000, ended.len()] {
        let error = parse_head_in_pieces(ended.as_bytes(), size, &Method::GET).unwrap_err();
        assert_eq!(error, Http1ParseError::TooLarge, "in pieces of {size}");
    }
}

#[test]
fn fields_behind_a_body_are_bounded_however_they_come() {
    let bytes = [b"0\r\n", &b"x: y\r\n".repeat(20_000)[..], b"\r\n"].concat();
    for size in [1_000, bytes.len()] {
        assert_eq!(
            decode_chunks(&bytes, &[size]).unwrap_err(),
            Http1ParseError::TooLarge,
            "in pieces of {size}"
        );
    }
}

#[test]
fn nothing_in_the_fuzzers_corpus_fails() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/http1_responses");
    let files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|it| it.unwrap().path()).collect();
    assert!(!files.is_empty());
    files.iter().for_each(|it| check(&std::fs::read(it).unwrap()));
}

/// Text of the request that is written for a body with this framing.
fn write_request_text(request: &http::request::Builder, sends: RequestBodyFraming) -> String {
    let mut out = BytesMut::new();
    let (method, headers) = (request.method_ref().unwrap(), request.headers_ref().unwrap());
    let mut copy = Request::builder().method(method).uri(request.uri_ref().unwrap());
    copy.headers_mut().unwrap().clone_from(headers);
    let (head, ()) = copy.body(()).unwrap().into_parts();
    write_request(&head, None, sends, &mut out);
    String::from_utf8(out.to_vec()).unwrap()
}

#[test]
fn a_request_has_one_framing() {
    let get = Request::get("/?a").header("host", "a");
    assert_eq!(
        write_request_text(&get, RequestBodyFraming::NoBody),
        "GET /?a HTTP/1.1\r\nhost: a\r\n\r\n"
    );
    let chunked = "GET /?a HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n";
    assert_eq!(write_request_text(&get, RequestBodyFraming::Chunked), chunked);
    let post = Request::post("/").header("content-length", "5").header("content-length", "5");
    let sized = "POST / HTTP/1.1\r\ncontent-length: 5\r\n\r\n";
    assert_eq!(write_request_text(&post, RequestBodyFraming::Length(5)), sized);
    let empty = "POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n";
    assert_eq!(write_request_text(&Request::post("/"), RequestBodyFraming::NoBody), empty);
    let coded = Request::post("/").header("transfer-encoding", "gzip, chunked");
    let expected = "POST / HTTP/1.1\r\ntransfer-encoding: gzip, chunked\r\n\r\n";
    assert_eq!(write_request_text(&coded, RequestBodyFraming::Chunked), expected);
    let sparse = Request::post("/").header("transfer-encoding", "");
    let sparse = sparse.header("transfer-encoding", ",gzip ,, chunked");
    assert_eq!(write_request_text(&sparse, RequestBodyFraming::Chunked), expected);
}

/// Reads chunks that come in pieces of these sizes. Returns the body, its trailers, and the bytes behind it.
fn decode_chunks(
    bytes: &[u8],
    sizes: &[usize],
) -> Result<(Vec<u8>, usize, Vec<u8>), Http1ParseError> {
    let (mut chunks, mut from) = (ChunkedDecoder::default(), BytesMut::new());
    let (mut rest, mut sizes) = (bytes, sizes.iter().cycle());
    let (mut body, mut trailers) = (Vec::new(), 0);
    loop {
        match chunks.next_piece(&mut from)? {
            Some(ChunkedPiece::Data(data)) => body.extend_from_slice(&data),
            Some(ChunkedPiece::Trailers(fields)) => trailers = fields.len(),
            Some(ChunkedPiece::End) => return Ok((body, trailers, [&from[..], rest].concat())),
            None if rest.is_empty() => return Ok((body, trailers, b"more".to_vec())),
            None => {
                let count = (*sizes.next().unwrap_or(&1)).clamp(1, rest.len());
                from.extend_from_slice(&rest[..count]);
                rest = &rest[count..];
            }
        }
    }
}

#[test]
fn chunks_are_read_strictly() {
    let (body, trailers, behind) =
        decode_chunks(b"5\r\nhello\r\n1 ;a=\"b\"\r\n!\r\n0\r\nx: y\r\nz: w\r\n\r\nnext", &[1])
            .unwrap();
    assert_eq!((&body[..], trailers, &behind[..]), (&b"hello!"[..], 2, &b"next"[..]));
    for bad in [
        &b"\r\n"[..],
        b"x\r\n",
        b"-1\r\n",
        b"+5\r\nhello\r\n",
        b"0x5\r\nhello\r\n",
        // A lone LF ends a line for some recipients, which would find another end.
        b"5\nhello\r\n",
        b"5\r\nhello\n0\r\n\r\n",
        b"5\r\nhelloo",
        b"5 5\r\nhello",
        b"11111111111111111\r\n",
        b"5\r;a\r\n",
        b"0\r\nno field\r\n\r\n",
        b"0\r\n\n",
        b"0\r\nx: y\n\r\n",
        b"0\r\nx: y\r\n\n",
    ] {
        assert!(
            decode_chunks(bad, &[1]).is_err() && decode_chunks(bad, &[100]).is_err(),
            "{}",
            bad.escape_ascii()
        );
    }
    let long = [b"5;", &b"x".repeat(5_000)[..], b"\r\nhello\r\n"].concat();
    assert!(decode_chunks(&long, &[1_000]).is_err());
    let endless = b"1;xxxxxxxx\r\na\r\n".repeat(5_000);
    assert!(decode_chunks(&endless, &[1_000]).is_err(), "extensions are bounded in all");
}

proptest! {
    /// Chunks that were written are read back, however they are cut.
    #[test]
    fn what_is_written_in_chunks_is_read(
        parts in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..40), 0..8),
        sizes in proptest::collection::vec(1..30usize, 1..5),
    ) {
        let mut out = BytesMut::new();
        for part in &parts {
            chunked::write_chunk_size(part.len(), &mut out);
            out.extend_from_slice(part);
            out.extend_from_slice(chunked::CHUNK_END);
        }
        chunked::write_last_chunk(None, &mut out);
        out.extend_from_slice(b"next");
        let (body, trailers, behind) = decode_chunks(&out, &sizes).unwrap();
        prop_assert_eq!((body, trailers, behind), (parts.concat(), 0, b"next".to_vec()));
    }

    /// The same bytes have the same meaning, however they are cut; nothing panics.
    #[test]
    fn cuts_mean_nothing(
        bytes in proptest::collection::vec(prop_oneof![Just(b'\r'), Just(b'\n'), Just(b'0'), Just(b'2'), Just(b';'), any::<u8>()], 0..40),
        sizes in proptest::collection::vec(1..5usize, 1..5),
    ) {
        let (cut, whole) = (decode_chunks(&bytes, &sizes), decode_chunks(&bytes, &[1_000]));
        // An error may be found before all bytes ahead of it were read, but never instead of an end.
        prop_assert_eq!(cut.is_ok(), whole.is_ok());
        if let (Ok(cut), Ok(whole)) = (cut, whole) {
            prop_assert_eq!(cut, whole);
        }
    }
}
