use proptest::prelude::*;

use super::*;

/// Reads `bytes` in pieces of these sizes, as hyper does. Returns its bytes, and the targets that were changed.
fn read(bytes: &[u8], sizes: &[usize]) -> (Vec<u8>, Vec<(String, Bytes)>) {
    let (mut targets, mut read) = (RequestTargetInspector::new(1 << 16), Vec::new());
    let (mut rest, mut sizes) = (bytes, sizes.iter().cycle());
    loop {
        match targets.next_action() {
            InspectorAction::TakeReady => read.extend_from_slice(&targets.ready().split()),
            // The end of the input is passed on once, before or behind a request.
            _ if rest.is_empty() => match targets.position {
                RequestPosition::Passthrough => break,
                _ => targets.on_eof(),
            },
            InspectorAction::PassThrough(most) => {
                let most = usize::try_from(most).unwrap_or(usize::MAX);
                let some = (*sizes.next().unwrap_or(&1)).max(1).min(most).min(rest.len());
                read.extend_from_slice(&rest[..some]);
                targets.on_passed(some);
                rest = &rest[some..];
            }
            InspectorAction::ReadToParse => {
                let some = (*sizes.next().unwrap_or(&1)).max(1).min(rest.len());
                targets.unread().extend_from_slice(&rest[..some]);
                rest = &rest[some..];
            }
        }
    }
    (read, targets.rewritten.into_iter().map(|it| (it.encoded, it.original)).collect())
}

#[test]
fn a_target_the_library_refuses_is_percent_encoded_and_stored() {
    for (came, written) in [
        (&b"/?q=\"x\""[..], "/?q=%22x%22"),
        (b"/?f={\"a\":1}", "/?f=%7B%22a%22:1%7D"),
        (b"/a<b>", "/a%3Cb%3E"),
        (b"/?q=a|b^c<", "/?q=a%7Cb%5Ec%3C"),
        (b"/caf\xe9", "/caf%E9"),
        (b"/a#b", "/a%23b"),
    ] {
        let one = [b"GET ", came, b" HTTP/1.1\r\nHost: a\r\n\r\n"].concat();
        let wanted = format!("GET {written} HTTP/1.1\r\nHost: a\r\n\r\n");
        for sizes in [&[1][..], &[7], &[1000]] {
            let (bytes, changed) = read(&one.repeat(2), sizes);
            assert_eq!(String::from_utf8_lossy(&bytes), wanted.repeat(2));
            assert_eq!(changed.len(), 2);
            assert_eq!(changed[0], (written.to_owned(), Bytes::copy_from_slice(came)));
        }
    }
}

/// The target `*` means the server itself (RFC 9112 §3.2.4), and so does one without a path. Requests behind it are
/// inspected like any others.
#[test]
fn a_target_that_is_the_whole_server_ends_no_inspection() {
    let request = |target: &str| format!("GET {target} HTTP/1.1\r\nhost: a\r\n\r\n");
    for server in ["*", "http://a", "http://a:80"] {
        let server = request(server).replace("GET", "OPTIONS");
        for sizes in [&[1][..], &[1000]] {
            let (bytes, changed) = read((server.clone() + &request("/?\"")).as_bytes(), sizes);
            assert_eq!(String::from_utf8_lossy(&bytes), server.clone() + &request("/?%22"));
            assert_eq!(changed, [("/?%22".to_owned(), Bytes::from_static(b"/?\""))]);
        }
    }
}

#[test]
fn what_no_server_may_take_and_what_is_no_request_passes_as_it_is() {
    for bytes in [
        &b"GET /a b HTTP/1.1\r\nhost: a\r\n\r\n"[..],
        b"GET /\x01\"< HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /\x7f HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /\0\" HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /\t\" HTTP/1.1\r\nhost: a\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"nonsense\r\n\r\n",
        b"GET /\"",
        b"GET /\"\" HTTP/1.1\r\nhost : a\r\n\r\n",
        b"GET /\"\" HTTP/9.9\r\nhost: a\r\n\r\n",
    ] {
        assert_eq!(read(bytes, &[3]), (bytes.to_vec(), Vec::new()));
    }
}

#[test]
fn what_looks_like_a_request_inside_a_body_is_not_touched() {
    let inner = "GET /<> HTTP/1.1\r\nhost: a\r\n\r\n";
    let length = inner.len();
    let sized = format!("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: {length}\r\n\r\n{inner}");
    let chunks = format!(
        "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n{length:x};x\r\n{inner}\r\n0\r\na: b\r\n\r\n"
    );
    let both =
        "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n";
    for before in [&sized, &chunks] {
        for sizes in [&[1][..], &[5, 3], &[10_000]] {
            let (bytes, changed) = read(format!("{before}{inner}").as_bytes(), sizes);
            assert_eq!(bytes, format!("{before}{}", inner.replace("<>", "%3C%3E")).as_bytes());
            assert_eq!(changed.len(), 1, "the request behind it is");
        }
    }
    let doubtful = format!("{both}{inner}");
    assert_eq!(read(doubtful.as_bytes(), &[9]).0, doubtful.as_bytes(), "hyper decides");
}

/// To hyper a line of trailers ends with CRLF, and it would take the request behind LF alone for a part of them.
#[test]
fn malformed_chunks_are_marked_and_what_follows_is_not_touched() {
    let head = "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n";
    let next = "GET /<> HTTP/1.1\r\nhost: a\r\n\r\n";
    for (valid, malformed) in [
        ("0\r\n", "\n"),
        ("0\r\n", "a: b\n\n"),
        ("0\r\n", "a: b\r\n\n"),
        ("", "5\nhello"),
        ("5\r\nhello", "\n0\r\n\r\n"),
    ] {
        let bytes = format!("{head}{valid}{malformed}{next}");
        let marked = format!("{head}{valid}\r\r{malformed}{next}");
        for sizes in [&[1][..], &[5, 3], &[10_000]] {
            assert_eq!(read(bytes.as_bytes(), sizes), (marked.clone().into_bytes(), Vec::new()));
        }
    }
}

#[test]
fn nothing_in_the_fuzzers_corpus_fails() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/request_targets");
    let files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|it| it.unwrap().path()).collect();
    assert!(!files.is_empty());
    files.iter().for_each(|it| check(&std::fs::read(it).unwrap()));
}

/// Strategy of bytes that look like requests.
fn requests() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        Just("GET / HTTP/1.1\r\n"),
        Just("POST /\"a\" HTTP/1.1\r\n"),
        Just("POST /<> HTTP/1.0\r\n"),
        Just("host: a\r\n"),
        Just("content-length: 9\r\n"),
        Just("content-length: 40\r\n"),
        Just("transfer-encoding: chunked\r\n"),
        Just("\r\n"),
        Just("\r\n\r\n"),
        Just("5\r\nhello\r\n"),
        Just("5;\"x\r\nhello\r\n"),
        Just("0\r\n\r\n"),
        Just("\n"),
        Just("x"),
    ];
    proptest::collection::vec(piece, 0..20).prop_map(|all| all.concat().into_bytes())
}

proptest! {
    /// hyper reads the same bytes, however they are cut, and all of them except for changed targets.
    #[test]
    fn the_library_reads_all_that_came(
        bytes in requests(),
        sizes in proptest::collection::vec(1..50usize, 1..8),
    ) {
        let (read, changed) = read(&bytes, &sizes);
        let (at_once, _) = super::tests::read(&bytes, &[usize::MAX >> 1]);
        prop_assert_eq!(&read, &at_once);
        let mut rest = &read[..];
        for (written, came) in changed {
            // Put back in order, the targets give what came.
            let at = rest.windows(written.len()).position(|it| it == written.as_bytes());
            let at = at.expect("a changed target is there");
            prop_assert!(came.len() <= written.len());
            rest = &rest[at + written.len()..];
        }
        let strip = |bytes: &[u8]| bytes.iter().filter(|it| !b"\r\n".contains(it)).count();
        let grown = strip(&read).checked_sub(strip(&bytes));
        prop_assert!(grown.is_some_and(|it| it % 2 == 0), "each changed byte takes two more");
    }
}
