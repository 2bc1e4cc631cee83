#![allow(clippy::unwrap_used, reason = "tests")]

use http::{Method, Version};
use proptest::prelude::*;

use super::*;
use crate::edge::headers;

/// Returns the code, the framing and `is_reusable` of a plain response, and the head for the client.
fn rewritten(text: &str) -> Option<(u16, PlainFraming, bool, String)> {
    let mut out = BytesMut::new();
    let ResponseStart::Plain(plain) = rewrite_plain_response(text.as_bytes(), &mut out) else {
        return None;
    };
    let head = String::from_utf8_lossy(&out).into_owned();
    Some((plain.status.as_u16(), plain.framing, plain.is_reusable, head))
}

#[test]
fn a_plain_response_is_rewritten_as_bytes() {
    let text = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: keep-alive\r\nKeep-Alive: timeout=5\r\n\
                X-Own: V\r\n\r\nhello";
    let head = "HTTP/1.1 200 OK\r\ncontent-length: 5\r\nx-own: V\r\n".to_owned();
    assert_eq!(rewritten(text), Some((200, PlainFraming::Length(5), true, head)));
    let text = "HTTP/1.1 404 Nope\r\ntransfer-encoding: Chunked\r\nconnection: Close\r\n\r\n";
    let head = "HTTP/1.1 404 Nope\r\ntransfer-encoding: Chunked\r\n".to_owned();
    assert_eq!(rewritten(text), Some((404, PlainFraming::Chunked, false, head)));
    check(text.as_bytes());
}

#[test]
fn any_other_response_is_for_the_general_parser() {
    for text in [
        "HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n",
        "HTTP/1.1 100 Continue\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n",
        "HTTP/1.1 204 No Content\r\n\r\n",
        "HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n",
        "HTTP/1.1 200 OK\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 5\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: +5\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: x-a\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntrailer: x\r\n\r\n",
        "nonsense\r\n\r\n",
    ] {
        let mut out = BytesMut::new();
        assert_eq!(
            rewrite_plain_response(text.as_bytes(), &mut out),
            ResponseStart::Unusual,
            "{text}"
        );
        assert!(out.is_empty(), "{text}");
    }
    let part = "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n";
    let start = rewrite_plain_response(part.as_bytes(), &mut BytesMut::new());
    assert_eq!(start, ResponseStart::Incomplete);
}

/// Returns the head of a pod's response as it is written by its parsed form.
fn written(text: &str) -> String {
    let mut from = BytesMut::from(text);
    let parsed = h1::parse_response_head(&mut from, &mut 0, &Method::GET);
    let mut head = parsed.expect("valid").expect("complete");
    headers::rewrite_response_head(&mut head.headers, head.status, Version::HTTP_11);
    let mut out = BytesMut::new();
    let has_date = write_pod_response(&head, &mut out);
    finish_response_head((!has_date).then_some(b"Thu, 01 Jan 1970 00:00:00 GMT"), true, &mut out);
    String::from_utf8_lossy(&out).into_owned()
}

#[test]
fn a_response_that_is_not_plain_is_written_as_hyper_does() {
    let end = "date: Thu, 01 Jan 1970 00:00:00 GMT\r\nconnection: close\r\n\r\n";
    for (text, lines) in [
        ("HTTP/1.0 200 Fine\r\nx: y\r\n\r\n", "200 Fine\r\nx: y\r\ntransfer-encoding: chunked\r\n"),
        ("HTTP/1.1 204 No Content\r\ntrailer: x\r\n\r\n", "204 No Content\r\n"),
        ("HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n", "304 Not Modified\r\n"),
        ("HTTP/1.1 200 OK\r\ncontent-length: 5, 5\r\n\r\n", "200 OK\r\ncontent-length: 5\r\n"),
        (
            "HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
            "200 OK\r\ntransfer-encoding: gzip, chunked\r\n",
        ),
        (
            "HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n",
            "200 OK\r\ntransfer-encoding: gzip, chunked\r\n",
        ),
    ] {
        assert_eq!(written(text), format!("HTTP/1.1 {lines}{end}"), "{text}");
    }
    let dated = "HTTP/1.1 200 OK\r\ncontent-length: 5, 5\r\nDate: x\r\n\r\n";
    let lines = "date: x\r\ncontent-length: 5\r\nconnection: close\r\n\r\n";
    assert_eq!(written(dated), format!("HTTP/1.1 200 OK\r\n{lines}"));
}

#[test]
fn nothing_in_the_fuzzers_corpus_fails() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/h1_fast_path");
    let files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|it| it.unwrap().path()).collect();
    assert!(!files.is_empty());
    files.iter().for_each(|it| check(&std::fs::read(it).unwrap()));
}

/// Responses that are plain or nearly so.
fn any_response() -> impl Strategy<Value = String> {
    let lines = prop::sample::select(vec![
        "Content-Length: 5",
        "content-length: 7",
        "Transfer-Encoding: chunked",
        "transfer-encoding: gzip",
        "Connection: close",
        "connection: Keep-Alive",
        "connection: x-own",
        "keep-alive: timeout=1",
        "X-Own: v",
        "x-own: caf\u{e9}",
        "Date: Thu, 01 Jan 1970 00:00:00 GMT",
        "set-cookie: a=b",
        "set-cookie: c=d",
        "te: x",
    ]);
    let lines = prop::collection::vec(lines, 0..8);
    let firsts = prop::sample::select(vec!["200 OK", "200 Fine", "404 ", "500", "204 x", "103 x"]);
    (firsts, lines).prop_map(|(first, lines)| {
        let fields: String = lines.iter().map(|line| format!("{line}\r\n")).collect();
        format!("HTTP/1.1 {first}\r\n{fields}\r\nhello")
    })
}

proptest! {
    #[test]
    fn a_client_gets_the_same_on_both_paths(response in any_response()) {
        check(response.as_bytes());
    }
}
