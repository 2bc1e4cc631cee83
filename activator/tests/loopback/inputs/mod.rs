//! Requests that servers and proxies read in different ways, and the responses that a client gets to them. The kernel
//! tier sends them, too, on the direct path.
#![allow(dead_code, reason = "the kernel tier asks each server in the version that it speaks")]

mod over_http2;

use std::collections::BTreeSet;

pub(crate) use over_http2::over_http2;

/// Response that a client gets, without the fields that each hop writes for itself.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ComparedResponse {
    pub(crate) status: String,
    pub(crate) fields: BTreeSet<String>,
    pub(crate) body: String,
}

/// Parses a response as it was read from its connection.
pub(crate) fn parse_response(response: &[u8]) -> ComparedResponse {
    let response = String::from_utf8_lossy(response).into_owned();
    let response = response.strip_prefix("HTTP/1.1 100 Continue\r\n\r\n").unwrap_or(&response);
    let (head, body) = response.split_once("\r\n\r\n").unwrap_or((response, ""));
    let mut lines = head.lines();
    let status = lines.next().and_then(|line| line.get(9..12)).unwrap_or_default().to_owned();
    let fields = compared_fields(lines.filter_map(|line| line.split_once(':')));
    ComparedResponse { status, fields, body: unchunked(body) }
}

/// Body whose chunks are joined, if it has any.
fn unchunked(body: &str) -> String {
    let joined = (|| {
        let (mut rest, mut joined) = (body, String::new());
        loop {
            let (size, behind) = rest.split_once("\r\n")?;
            let size = usize::from_str_radix(size, 16).ok()?;
            if size == 0 {
                return Some(joined);
            }
            joined.push_str(behind.get(..size)?);
            rest = behind.get(size + 2..)?;
        }
    })();
    joined.unwrap_or_else(|| body.to_owned())
}

/// Request: method, target, further header lines, and the number of body bytes that follow.
pub(crate) type Http1RequestCase = (&'static str, Vec<u8>, String, usize);

/// Requests for every server. Servers of the kernel tier return the body at `/echo`; those of the activator's tests
/// return the request's description at each target.
pub(crate) fn http1_cases() -> Vec<Http1RequestCase> {
    let plain = |method, target: &[u8]| (method, target.to_vec(), String::new(), 0);
    let sized = |method, target: &str, size: usize| {
        (method, target.as_bytes().to_vec(), format!("content-length: {size}\r\n"), size)
    };
    let mut inputs = vec![
        plain("GET", b"/hello"),
        plain("HEAD", b"/hello"),
        sized("POST", "/echo", 100_000),
        sized("GET", "/echo", 10),
        sized("DELETE", "/echo", 10),
        sized("PUT", "/early", 20 << 20),
        plain("GET", b"/many?n=99"),
        plain("GET", b"/many?n=101"),
        plain("GET", b"/many?n=150"),
    ];
    for target in ["/?q=\"x\"", "/?f={\"a\":1}", "/?q=<b>", "/a<b>", "/?q=a|b^c", "/a%zz"] {
        inputs.push(plain("GET", target.as_bytes()));
    }
    for target in [&b"/caf\xc3\xa9"[..], b"/caf\xe9", b"/a b", b"/\x01", b"/\0", b"/\x7f"] {
        inputs.push(plain("GET", target));
    }
    let expects = "expect: 100-continue\r\ncontent-length: 5\r\n".to_owned();
    inputs.push(("PUT", b"/echo".to_vec(), expects, 5));
    let lines: String = (0..120).map(|at| format!("x-line-{at}: v\r\n")).collect();
    inputs.push(("GET", b"/hello".to_vec(), lines, 0));
    inputs
}

/// Bytes of a request without its body.
pub(crate) fn encode_head((method, target, fields, _): &Http1RequestCase) -> Vec<u8> {
    let host = "host: hello.default.example.com\r\nconnection: close\r\n";
    let behind = format!(" HTTP/1.1\r\n{host}{fields}\r\n");
    [method.as_bytes(), b" ", target, behind.as_bytes()].concat()
}

/// Returns true for an input that no server may accept: it is refused on every path, whatever a pod does with it.
pub(crate) fn is_refused((_, target, ..): &Http1RequestCase) -> bool {
    target.iter().any(|byte| *byte == b' ' || byte.is_ascii_control())
}

/// HTTP/2 request: method, target, header fields and body.
pub(crate) type Http2RequestCase =
    (&'static str, &'static str, Vec<(String, String)>, RequestBodyCase);

/// Body of a request, by the way in which its length is stated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestBodyCase {
    Nothing,
    /// Body of this many bytes, with the length in the head.
    Sized(usize),
    /// Body of this many bytes, without the length in the head.
    Unsized(usize),
}

/// Requests over HTTP/2 for every server.
pub(crate) fn http2_cases() -> Vec<Http2RequestCase> {
    use RequestBodyCase::{Nothing, Sized, Unsized};
    let expects = || vec![("expect".to_owned(), "100-continue".to_owned())];
    let lines = (0..120).map(|at| (format!("x-line-{at}"), "v".to_owned())).collect();
    let plain = |method, target, sent| (method, target, Vec::new(), sent);
    let mut inputs = vec![
        plain("GET", "/hello", Nothing),
        plain("HEAD", "/hello", Nothing),
        plain("GET", "/echo", Unsized(10)),
        plain("HEAD", "/echo", Unsized(10)),
        plain("GET", "/echo", Sized(10)),
        plain("POST", "/echo", Sized(100_000)),
        plain("POST", "/echo", Unsized(100_000)),
        plain("DELETE", "/echo", Unsized(10)),
        plain("PUT", "/early", Sized(20 << 20)),
        plain("PUT", "/early", Unsized(20 << 20)),
        plain("GET", "/many?n=150", Nothing),
        ("PUT", "/echo", expects(), Sized(5)),
        ("PUT", "/reject", expects(), Sized(5)),
        ("GET", "/hello", lines, Nothing),
    ];
    for target in ["/?q=a|b^c", "/?f={a:1}", "/?q=%zz", "/?", "/a//b/../c;d=e"] {
        inputs.push(plain("GET", target, Nothing));
    }
    inputs
}

/// Bytes of such a request in HTTP/1.1, and the number of body bytes that follow.
pub(crate) fn encode_as_http1(
    (method, target, fields, sent): &Http2RequestCase,
) -> (Vec<u8>, usize) {
    let (length, chunk, rest) = match *sent {
        RequestBodyCase::Nothing => (String::new(), String::new(), 0),
        RequestBodyCase::Sized(size) => {
            (format!("content-length: {size}\r\n"), String::new(), size)
        }
        RequestBodyCase::Unsized(size) => {
            let chunk = format!("{size:x}\r\n{}\r\n0\r\n\r\n", "x".repeat(size));
            ("transfer-encoding: chunked\r\n".to_owned(), chunk, 0)
        }
    };
    let fields: String =
        fields.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let input = (*method, target.as_bytes().to_vec(), fields + &length, rest);
    ([encode_head(&input), chunk.into_bytes()].concat(), rest)
}

/// Fields of a head that are compared, with their values.
pub(crate) fn compared_fields<'a>(
    fields: impl Iterator<Item = (&'a str, &'a str)>,
) -> BTreeSet<String> {
    let own = ["date", "connection", "keep-alive", "content-length", "transfer-encoding"];
    let fields = fields.map(|(name, value)| (name.to_ascii_lowercase(), value.trim()));
    let compared = fields.filter(|(name, _)| !own.contains(&name.as_str()));
    compared.map(|(name, value)| format!("{name}: {value}")).collect()
}
