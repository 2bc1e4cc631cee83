#![allow(clippy::unwrap_used, reason = "tests")]

use proptest::prelude::*;

use super::*;

fn kind(bytes: &[u8]) -> &'static str {
    let mut fields = field_array();
    match read_request_start(bytes, &mut fields) {
        RequestStart::Incomplete => "incomplete",
        RequestStart::Unusual => "unusual",
        RequestStart::Plain(_) => "plain",
    }
}

fn kind_with(fields: &str) -> &'static str {
    kind(format!("GET / HTTP/1.1\r\nhost: a\r\n{fields}\r\n").as_bytes())
}

#[test]
fn a_usual_request_is_plain() {
    for request in [
        "GET / HTTP/1.1\r\nHost: a.example.com:8080\r\n\r\n",
        "GET /a/b;c?d=%20&e='f' HTTP/1.1\r\nhost: a\r\nConnection: Keep-Alive\r\n\r\n",
        "OPTIONS /x HTTP/1.1\r\nhost: [fd00::1]\r\nuser-agent: curl/8\r\nAccept: */*\r\n\r\n",
        "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\n\r\nabcGET",
        "POST / HTTP/1.1\r\nhost: a\r\n\r\n",
        "DELETE / HTTP/1.1\r\nhost: a\r\ncookie: a=b\r\nx-forwarded-for: 10.0.0.1\r\n\r\n",
    ] {
        assert_eq!(kind(request.as_bytes()), "plain", "{request}");
        check(request.as_bytes());
    }
}

#[test]
fn a_head_that_is_not_complete_is_waited_for() {
    for request in ["", "G", "GET / HTTP/1.1\r\n", "GET / HTTP/1.1\r\nhost: a\r\n\r"] {
        assert_eq!(kind(request.as_bytes()), "incomplete", "{request}");
    }
}

#[test]
fn a_request_with_an_unusual_line_is_for_hyper() {
    for request in [
        "HEAD / HTTP/1.1\r\nhost: a\r\n\r\n",
        "CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n",
        "get / HTTP/1.1\r\nhost: a\r\n\r\n",
        "GET / HTTP/1.0\r\nhost: a\r\n\r\n",
        "GET http://a/ HTTP/1.1\r\nhost: a\r\n\r\n",
        "OPTIONS * HTTP/1.1\r\nhost: a\r\n\r\n",
        "GET /a#b HTTP/1.1\r\nhost: a\r\n\r\n",
        "GET /?q=\"x\" HTTP/1.1\r\nhost: a\r\n\r\n",
        "GET /.well-known/acme-challenge/x HTTP/1.1\r\nhost: a\r\n\r\n",
        "\r\nGET / HTTP/1.1\r\nhost: a\r\n\r\n",
        "GET / HTTP/1.1\nhost: a\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: a\n\r\n",
        "GET / HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: a b\r\n\r\n",
        "GET / HTTP/1.1\r\nhost : a\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: a\r\n b\r\n\r\n",
        "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\n\r\nab",
    ] {
        assert_eq!(kind(request.as_bytes()), "unusual", "{request}");
    }
}

#[test]
fn a_request_with_an_unusual_field_is_for_hyper() {
    for fields in [
        "connection: close\r\n",
        "connection: keep-alive, x-a\r\n",
        "connection: upgrade\r\nupgrade: websocket\r\n",
        "content-length: 0\r\ncontent-length: 0\r\n",
        "content-length: 00\r\n",
        "content-length: +0\r\n",
        "content-length: 0,0\r\n",
        "content-length:\r\n",
        "transfer-encoding: chunked\r\n",
        "Transfer-Encoding: identity\r\n",
        "te: trailers\r\n",
        "trailer: x\r\n",
        "expect: 100-continue\r\n",
        "cookie: a\r\ncookie: b\r\n",
        "user-agent: kube-probe/1.30\r\n",
        "K-Network-Probe: queue\r\n",
        "knative-serving-tag: blue\r\n",
        "x_forwarded_for: 10.0.0.1\r\n",
        "tracestate: a=b\r\n",
        "traceparent: 00-0-0-00\r\n",
        "proxy-connection: keep-alive\r\n",
        "http2-settings: x\r\n",
        "content-type: application/grpc-web+proto\r\n",
        "Content-Type: Application/gRPC-Web-Text\r\n",
    ] {
        assert_eq!(kind_with(fields), "unusual", "{fields}");
    }
    let host = "a".repeat(MAX_HOST_BYTES + 1);
    assert_eq!(kind(format!("GET / HTTP/1.1\r\nhost: {host}\r\n\r\n").as_bytes()), "unusual");
    let many: String = (0..MAX_FIELDS).map(|at| format!("x-{at}: v\r\n")).collect();
    assert_eq!(kind_with(&many), "unusual", "with Host there is one too many");
}

#[test]
fn the_head_for_a_pod_has_what_it_needs_and_nothing_else() {
    let bytes = b"POST /a HTTP/1.1\r\nHost: A\r\nKeep-Alive: timeout=5\r\nX-Real-IP: 1.2.3.4\r\n\
                  Connection: keep-alive\r\nX-Own: Value\r\n\r\n";
    let mut fields = field_array();
    let RequestStart::Plain(request) = read_request_start(bytes, &mut fields) else {
        panic!("it is plain")
    };
    let claims: Vec<&str> = request.client_claims().map(|it| it.name).collect();
    assert_eq!(claims, ["X-Real-IP"]);
    let mut out = BytesMut::new();
    request.write_for_pod(b"forwarded: for=b\r\n", || 255, &mut out);
    let trace = "traceparent: 00-00000000000000ff00000000000000ff-00000000000000ff-00";
    let expected = format!(
        "POST /a HTTP/1.1\r\nhost: A\r\nx-own: Value\r\ncontent-length: 0\r\n\
         forwarded: for=b\r\n{trace}\r\n\r\n"
    );
    assert_eq!(str::from_utf8(&out).unwrap(), expected);
}

#[test]
fn nothing_in_the_fuzzers_corpus_fails() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/h1_fast_path");
    let files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|it| it.unwrap().path()).collect();
    assert!(!files.is_empty());
    files.iter().for_each(|it| check(&std::fs::read(it).unwrap()));
}

/// Lines of heads that are plain or nearly so, in any order and with repetitions.
fn any_request() -> impl Strategy<Value = Vec<u8>> {
    let lines = prop::sample::select(vec![
        "Host: a",
        "host: b.example.com:80",
        "X-Forwarded-For: 10.1.2.3, x",
        "x-forwarded-proto: https",
        "x-forwarded-host: c",
        "Forwarded: for=1.2.3.4;proto=https",
        "forwarded: for=\"[::1]\"",
        "X-Forwarded-Client-Cert: Hash=1",
        "X-Real-IP: 10.0.0.1",
        "Accept: */*",
        "accept: text/html",
        "Cookie: a=b",
        "connection: keep-alive",
        "connection: close",
        "Keep-Alive: timeout=5",
        "content-length: 0",
        "content-length: 4",
        "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "tracestate: a=b",
        "x-obs: caf\u{e9}",
        "x-empty:",
        "x_under: 1",
        "te: trailers",
    ]);
    let lines = prop::collection::vec(lines, 0..9);
    let methods = prop::sample::select(vec!["GET", "POST", "PUT", "HEAD", "DELETE", "OPTIONS"]);
    (methods, "/[a-z%/?&=.]{0,12}", lines).prop_map(|(method, target, lines)| {
        let fields: String = lines.iter().map(|line| format!("{line}\r\n")).collect();
        format!("{method} {target} HTTP/1.1\r\nhost: z\r\n{fields}\r\nbody").into_bytes()
    })
}

proptest! {
    #[test]
    fn a_pod_gets_the_same_on_both_paths(request in any_request()) {
        check(&request);
    }

    #[test]
    fn no_bytes_break_the_reader(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        check(&bytes);
    }
}
