//! Responses of broken and hostile pods, each of which hides a second response where it can.
#![allow(clippy::too_many_lines, reason = "tables of cases")]

/// Response that a pod hides behind its first one, or in its body.
pub(super) const HIDDEN_RESPONSE: &str =
    "HTTP/1.1 200 OK\r\nx-hidden: 1\r\ncontent-length: 6\r\n\r\nhidden";

/// All cases of responses: everything that a pod sends for one request.
pub(super) fn response_cases() -> Vec<String> {
    let hidden = HIDDEN_RESPONSE;
    let chunks = "5\r\nhello\r\n0\r\n\r\n";
    let mut cases = Vec::new();
    let status_lines = [
        "HTTP/1.1 200",
        "HTTP/1.1 200 ",
        "HTTP/1.1  200 OK",
        "HTTP/1.1 20 OK",
        "HTTP/1.1 2000 OK",
        "HTTP/1.1 099 x",
        "HTTP/1.1 600 x",
        "HTTP/1.1 999 x",
        "HTTP/1.1 000 x",
        "HTTP/1.1 -20 x",
        "HTTP/2.0 200 OK",
        "HTTP/1.2 200 OK",
        "HTTP/0.9 200 OK",
        "HTTP/1.0 200 OK",
        "http/1.1 200 OK",
        "ICY 200 OK",
        "HTTP 200 OK",
        "HTTP/1.1\t200 OK",
        " HTTP/1.1 200 OK",
        "HTTP/1.1 200 \0",
        "HTTP/1.1 200 \r",
        "HTTP/1.1 200 \u{e9}",
        "HTTP/1.1 200 OK\nx: y",
        "200 OK",
        "",
        "GET / HTTP/1.1",
        "HTTP/1.1 204 x",
        "HTTP/1.1 205 x",
        "HTTP/1.1 304 x",
        "HTTP/1.1 101 x",
        "HTTP/1.1 100 x",
        "HTTP/1.1 103 x",
        "HTTP/1.1 199 x",
    ];
    for line in status_lines {
        cases.push(format!("{line}\r\ncontent-length: 5\r\n\r\nhello{hidden}"));
        cases.push(format!("{line}\r\ntransfer-encoding: chunked\r\n\r\n{chunks}{hidden}"));
    }
    let lengths = [
        "5",
        "+5",
        "-5",
        "0x5",
        "5.0",
        "",
        " ",
        "005",
        "5 5",
        "5,",
        "5, 5",
        "5, 6",
        "5;",
        "\"5\"",
        "5\0",
        "18446744073709551615",
        "18446744073709551621",
        "5\r\ncontent-length: 5",
        "5\r\ncontent-length: 6",
        "6\r\ncontent-length: 5",
        "0",
        "0\r\ncontent-length: 5",
    ];
    for length in lengths {
        cases.push(format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\nhello{hidden}"));
    }
    let codings = [
        "chunked",
        "Chunked",
        "gzip, chunked",
        "chunked, gzip",
        "chunked, chunked",
        "xchunked",
        "identity",
        "",
        "\u{b}chunked",
        "chunked\r\ntransfer-encoding: chunked",
        "chunked\r\ntransfer-encoding: identity",
        "chunked\r\n , gzip",
        "\"chunked\"",
        "chunked;a",
    ];
    for coding in codings {
        for length in ["", "content-length: 5\r\n", "content-length: 3\r\n"] {
            let head = format!("HTTP/1.1 200 OK\r\n{length}transfer-encoding: {coding}\r\n\r\n");
            cases.push(format!("{head}{chunks}{hidden}"));
        }
        cases.push(format!(
            "HTTP/1.0 200 OK\r\ntransfer-encoding: {coding}\r\n\r\n{chunks}{hidden}"
        ));
    }
    let bodies = [
        "5\nhello\r\n0\r\n\r\n",
        "5\r\nhello\n0\r\n\r\n",
        "5\r\nhello0\r\n\r\n",
        "5\r\nhello\r\n0\n\n",
        "5\r\nhello\r\n0\r\n\n",
        "x\r\n",
        "-5\r\nhello\r\n0\r\n\r\n",
        "0x5\r\nhello\r\n0\r\n\r\n",
        "5;a\nb\r\nhello\r\n0\r\n\r\n",
        "5 \r\nhello\r\n0\r\n\r\n",
        "fffffffffffffffff\r\nhello",
        "10000000000000005\r\nhello\r\n0\r\n\r\n",
        "5\r\nhello\r\n0\r\nx : y\r\n\r\n",
        "5\r\nhello\r\n0\r\nx: y\n\n",
        "5\r\nhello\r\n0\r\ncontent-length: 7\r\n\r\n",
        "\r\n5\r\nhello\r\n0\r\n\r\n",
        "0\r\n\r\n",
        "5\r\nhel",
    ];
    for body in bodies {
        cases.push(format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{body}{hidden}"));
    }
    let lines = [
        "x : y",
        " x: y",
        "x: a\r\n b",
        "x",
        ": y",
        "x\0: y",
        "x: \0",
        "x: a\rb",
        "x(): y",
        "x: y\nz: y",
        "content-length : 5",
        "transfer-encoding : chunked",
        "x: a\r\n content-length: 5",
        "connection: close",
        "connection: content-length",
        "connection: transfer-encoding",
        "upgrade: h2c\r\nconnection: upgrade",
        "trailer: content-length",
        "keep-alive: timeout=0",
        "set-cookie: a\r\nset-cookie: b",
        "date: x\r\ndate: y",
        "location: a\rb",
    ];
    for line in lines {
        cases.push(format!("HTTP/1.1 200 OK\r\n{line}\r\ncontent-length: 5\r\n\r\nhello{hidden}"));
        cases.push(format!("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n{line}\r\n\r\nhello{hidden}"));
    }
    for interim in ["100 Continue", "102 Wait", "103 Early Hints", "199 x"] {
        let interim = format!("HTTP/1.1 {interim}\r\ncontent-length: 5\r\n\r\n");
        cases.push(format!("{interim}hello{hidden}"));
        cases.push(format!(
            "{}HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello{hidden}",
            interim.repeat(50)
        ));
    }
    for begin in [
        "",
        "\r\n",
        "\n",
        "\0",
        "\u{feff}",
        "hello",
        "HTTP/1.1 ",
        "HTTP/1.1 200 OK\r\n",
        "\u{15}\u{3}\u{3}\0\u{2}\u{2}\u{16}",
    ] {
        cases.push(format!("{begin}{hidden}"));
        cases.push(begin.to_owned());
    }
    cases.push(format!(
        "HTTP/1.1 200 OK\r\nx: {}\r\ncontent-length: 5\r\n\r\nhello{hidden}",
        "y".repeat(100_000)
    ));
    cases.push(format!(
        "HTTP/1.1 200 OK\r\nx: {}\r\ncontent-length: 5\r\n\r\nhello{hidden}",
        "y".repeat(2 << 20)
    ));
    cases.push(format!(
        "HTTP/1.1 200 OK\r\n{}content-length: 5\r\n\r\nhello{hidden}",
        "x: y\r\n".repeat(5_000)
    ));
    cases.push(format!("HTTP/1.1 200 OK\r\n\r\nhello{hidden}"));
    cases
}
