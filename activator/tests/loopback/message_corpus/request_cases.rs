//! Streams of HTTP/1 requests that readers may understand differently: the rules of RFC 9112, broken one at a time, and
//! published techniques of request smuggling.
#![allow(clippy::too_many_lines, reason = "tables of cases")]

/// Stream of requests of one client.
#[derive(Clone, Debug)]
pub(super) struct RequestCase {
    /// Name of the case, for messages of a failed test.
    pub(super) name: String,
    /// Bytes that the client sends.
    pub(super) bytes: Vec<u8>,
    /// True if each request is usual, so that a pod has to get it.
    pub(super) is_usual: bool,
}

/// Request that begins no other case. Each stream ends with it: a reader that has lost a boundary reads it differently.
pub(super) const LAST_REQUEST: &str = "GET /last HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
/// Chunked body of five bytes.
const HELLO_CHUNKS: &str = "5\r\nhello\r\n0\r\n\r\n";
/// Request that a smuggler hides in the body of another one.
const HIDDEN: &str = "GET /hidden HTTP/1.1\r\nhost: a\r\nx: ";

/// All cases of requests.
pub(super) fn request_cases() -> Vec<RequestCase> {
    let mut corpus = RequestCorpus::default();
    corpus.add_usual_requests();
    corpus.add_content_lengths();
    corpus.add_transfer_codings();
    corpus.add_header_lines();
    corpus.add_line_ends();
    corpus.add_request_lines();
    corpus.add_targets();
    corpus.add_chunk_sizes();
    corpus.add_chunk_ends();
    corpus.add_trailers();
    corpus.add_hosts();
    corpus.add_switches();
    corpus.add_pipelines();
    corpus.add_sizes();
    corpus.add_truncated_requests();
    corpus.0
}

/// Cases so far.
#[derive(Default)]
struct RequestCorpus(Vec<RequestCase>);

impl RequestCorpus {
    fn add(&mut self, name: String, bytes: impl AsRef<[u8]>) {
        self.0.push(RequestCase { name, bytes: bytes.as_ref().to_vec(), is_usual: false });
    }

    fn add_usual(&mut self, name: String, bytes: &str) {
        self.0.push(RequestCase { name, bytes: bytes.as_bytes().to_vec(), is_usual: true });
    }

    /// Adds a POST with these header lines, and with these bytes behind its head.
    fn add_post(&mut self, name: String, lines: &str, behind: &str) {
        self.add(name, format!("POST /x HTTP/1.1\r\nhost: a\r\n{lines}\r\n{behind}"));
    }

    fn add_usual_requests(&mut self) {
        let methods = [
            "GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "PROPFIND", "M-SEARCH",
            "FOO",
        ];
        let bodies = [
            ("", ""),
            ("content-length: 0\r\n", ""),
            ("content-length: 5\r\n", "hello"),
            ("Transfer-Encoding: chunked\r\n", HELLO_CHUNKS),
            (
                "transfer-encoding:\tCHUNKED \r\n",
                "1\r\nh\r\n0000a;x=\"y\"\r\n0123456789\r\n0\r\n\r\n",
            ),
        ];
        for method in methods {
            for (line, body) in bodies {
                let head = format!("{method} /x HTTP/1.1\r\nhost: a\r\n{line}\r\n");
                self.add_usual(format!("usual {method} {line:?}"), &format!("{head}{body}"));
            }
        }
        for lines in
            ["x:\r\n", "x: \t a \t \r\n", "x: a: b\r\n", "X-Y_Z.0: a\r\n", "te: trailers\r\n"]
        {
            let head = format!("GET /x HTTP/1.1\r\nhost: a\r\n{lines}\r\n");
            self.add_usual(format!("usual line {lines:?}"), &head);
        }
        let old = "POST /x HTTP/1.0\r\nconnection: keep-alive\r\ncontent-length: 5\r\n\r\nhello";
        self.add_usual("usual HTTP/1.0".to_owned(), old);
        self.add_usual(
            "usual blank line before".to_owned(),
            "\r\n\r\nGET /x HTTP/1.1\r\nhost: a\r\n\r\n",
        );
    }

    fn add_content_lengths(&mut self) {
        let values = [
            "5",
            "+5",
            "-5",
            "0x5",
            "5.0",
            "5e0",
            "",
            " ",
            "05",
            "005",
            "00000000000000000000000005",
            "5 5",
            "5,",
            ",5",
            "5, 5",
            "5,5",
            "5, 6",
            "6, 5",
            "5;",
            "5;a",
            "\"5\"",
            "5\0",
            "\u{b}5",
            "5\u{c}",
            "5\t",
            "\u{ff15}",
            "five",
            "4294967301",
            "9223372036854775808",
            "18446744073709551615",
            "18446744073709551621",
            "99999999999999999999999",
            "1_0",
            "NaN",
        ];
        for value in values {
            let line = format!("Content-Length: {value}\r\n");
            self.add_post(format!("length {value:?}"), &line, "hello");
        }
        for (first, second) in [
            ("5", "5"),
            ("5", "6"),
            ("6", "5"),
            ("0", "5"),
            ("5", "0"),
            ("5", ""),
            ("", "5"),
            ("5", "+5"),
            ("5", "05"),
            ("5", "x"),
        ] {
            let lines = format!("Content-Length: {first}\r\nx: y\r\ncontent-length: {second}\r\n");
            self.add_post(format!("lengths {first:?} {second:?}"), &lines, "hello");
            let length = HIDDEN.len();
            let lines = lines.replace(": 6\r", &format!(": {length}\r"));
            self.add_post(format!("lengths {first:?} {second:?}, hidden"), &lines, HIDDEN);
        }
        for name in [
            "Content_Length",
            "Content-Length-",
            "Content Length",
            "Content\u{ad}-Length",
            "\u{feff}Content-Length",
        ] {
            let line = format!("{name}: 5\r\n");
            self.add_post(format!("length named {name:?}"), &line, "");
            self.add_post(format!("length named {name:?}, with a body"), &line, "hello");
        }
    }

    fn add_transfer_codings(&mut self) {
        let values = [
            "chunked",
            "Chunked",
            "cHuNkEd",
            " chunked",
            "\tchunked",
            "chunked\t",
            "chunked,",
            ",chunked",
            "chunked ,",
            "gzip, chunked",
            "gzip,chunked",
            "gzip ,, chunked",
            "identity, chunked",
            "chunked, identity",
            "chunked, gzip",
            "chunked, chunked",
            "chunked,chunked",
            "xchunked",
            "chunkedx",
            "x chunked",
            "chunked x",
            "chunke",
            "identity",
            "gzip",
            "",
            "\"chunked\"",
            "'chunked'",
            "chunked;q=1",
            "chunked; a=b",
            "\u{b}chunked",
            "\u{c}chunked",
            "chunked\0",
            "\0chunked",
            "chun\u{212a}ed",
            "\u{e9}, chunked",
            "chunked\u{a0}",
            "[chunked]",
            "cow",
        ];
        for value in values {
            let line = format!("Transfer-Encoding: {value}\r\n");
            self.add_post(format!("coding {value:?}"), &line, HELLO_CHUNKS);
            // CL.TE and TE.CL: one reader ends the body by the length, another one by the last chunk.
            let before = format!("Content-Length: 3\r\n{line}");
            self.add_post(format!("coding {value:?} behind a length"), &before, HELLO_CHUNKS);
            let hidden = format!("0\r\n\r\n{HIDDEN}");
            let after = format!("{line}Content-Length: {}\r\n", hidden.len());
            self.add_post(format!("coding {value:?} before a length"), &after, &hidden);
        }
        let twice = [
            ("chunked", "chunked"),
            ("chunked", "identity"),
            ("identity", "chunked"),
            ("gzip", "chunked"),
            ("chunked", "gzip"),
            ("", "chunked"),
            ("chunked", ""),
            ("chunked", "x"),
            ("x", "chunked"),
        ];
        for (first, second) in twice {
            let lines = format!("Transfer-Encoding: {first}\r\nTransfer-encoding: {second}\r\n");
            self.add_post(format!("codings {first:?} {second:?}"), &lines, HELLO_CHUNKS);
        }
        for name in [
            "Transfer_Encoding",
            "Transfer-Encoding ",
            "Transfer-Encoding\t",
            " Transfer-Encoding",
            "Transfer-Encoding\u{b}",
            "Transfer Encoding",
            "Transfer-Encoding\0",
            "X-Transfer-Encoding",
            "Transfer-Encodings",
        ] {
            let lines = format!("Content-Length: 3\r\n{name}: chunked\r\n");
            self.add_post(format!("coding named {name:?}"), &lines, "abc");
        }
        let old = format!(
            "POST /x HTTP/1.0\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n{HELLO_CHUNKS}"
        );
        self.add("coding in HTTP/1.0".to_owned(), &old);
        let kept =
            old.replace("\r\n\r\n5", "\r\nconnection: keep-alive\r\ncontent-length: 3\r\n\r\n5");
        self.add("coding and length in HTTP/1.0".to_owned(), kept);
        for option in ["transfer-encoding", "content-length", "host"] {
            let lines = format!("connection: {option}\r\ntransfer-encoding: chunked\r\n");
            self.add_post(format!("coding with the option {option}"), &lines, HELLO_CHUNKS);
            let lines = format!("connection: {option}\r\ncontent-length: 5\r\n");
            self.add_post(format!("length with the option {option}"), &lines, "hello");
        }
    }

    fn add_header_lines(&mut self) {
        let lines = [
            "x : a",
            "x\t: a",
            " x: a",
            "\tx: a",
            " folded",
            "x: a\r\n b",
            "x: a\r\n\tb",
            "x: a\r\n ",
            "x:\r\n a",
            "x",
            "x a",
            ": a",
            ":",
            "x\0: a",
            "x: a\0b",
            "x: a\rb",
            "x: a\r",
            "\rx: a",
            "x\r: a",
            "x: \u{7f}",
            "x: \u{1}",
            "x: \u{b}",
            "x: \u{e9}",
            "\u{e9}: a",
            "x(): a",
            "x;: a",
            "x/y: a",
            "x@y: a",
            "\"x\": a",
            "x,y: a",
            "{x}: a",
            "x=y: a",
            "x: a\n b",
            "x: a\n",
            "x: a\r\r\n y: b",
        ];
        for line in lines {
            // The lines behind it frame the message, if they are read as lines.
            let framed = format!("{line}\r\nContent-Length: 5\r\n");
            self.add_post(format!("line {line:?}"), &framed, "hello");
            let framed = format!("Transfer-Encoding: chunked\r\n{line}\r\n");
            self.add_post(format!("line {line:?} behind a coding"), &framed, HELLO_CHUNKS);
        }
        let folds = [
            "Content-Length:\r\n 5",
            "Content-Length: 5\r\n 0",
            "x: y\r\n Content-Length: 5",
            "Transfer-Encoding:\r\n chunked",
            "Transfer-Encoding: gzip,\r\n chunked",
            "Transfer-Encoding: chunked\r\n , gzip",
            "Transfer-Encoding: chun\r\n ked",
            "x: y\r\n\tTransfer-Encoding: chunked",
            "Connection: close\r\n , x",
            "Connection:\r\n close",
        ];
        for fold in folds {
            self.add_post(format!("fold {fold:?}"), &format!("{fold}\r\n"), HELLO_CHUNKS);
        }
    }

    fn add_line_ends(&mut self) {
        let parts = ["POST /x HTTP/1.1", "host: a", "x: y", "content-length: 5", ""];
        for end in [
            "\n", "\r", "\r\r\n", "\n\r", "\r\n\r", " \r\n", "\0\r\n", "\u{85}", "\u{2028}",
            "\\r\\n",
        ] {
            for (at, part) in parts.iter().enumerate() {
                let ends = |index: usize| if index == at { end } else { "\r\n" };
                let lines = parts.iter().enumerate();
                let head: String =
                    lines.map(|(index, it)| format!("{it}{}", ends(index))).collect();
                self.add(format!("end {end:?} of {part:?}"), format!("{head}hello"));
            }
        }
        let all = parts.map(|part| format!("{part}\n")).concat();
        self.add("end \"\\n\" of all lines".to_owned(), format!("{all}hello"));
        for before in [
            "\n",
            "\r",
            "\n\n",
            "\r\n\n",
            " ",
            "\t",
            "\0",
            "\r\n ",
            "\u{feff}",
            "hello",
            "0\r\n\r\n",
        ] {
            self.add(
                format!("{before:?} before"),
                format!("{before}GET /x HTTP/1.1\r\nhost: a\r\n\r\n"),
            );
        }
    }

    fn add_request_lines(&mut self) {
        let lines = [
            "GET  /x HTTP/1.1",
            "GET /x  HTTP/1.1",
            "GET\t/x HTTP/1.1",
            "GET /x\tHTTP/1.1",
            " GET /x HTTP/1.1",
            "GET /x HTTP/1.1 ",
            "GET /x HTTP/1.1\t",
            "GET /x",
            "GET /x ",
            "GET",
            "GET HTTP/1.1",
            "GET  HTTP/1.1",
            "/x HTTP/1.1",
            "GET /x HTTP/1.1 x",
            "GET /x y HTTP/1.1",
            "GET\u{b}/x HTTP/1.1",
            "GET\r/x HTTP/1.1",
            "GET\0/x HTTP/1.1",
            "G\0T /x HTTP/1.1",
            "get /x HTTP/1.1",
            "Get /x HTTP/1.1",
            "G/T /x HTTP/1.1",
            "G(T /x HTTP/1.1",
            "\"GET\" /x HTTP/1.1",
            "G\u{c9}T /x HTTP/1.1",
            "GET: /x HTTP/1.1",
            "HTTP/1.1 200 OK",
            "GET /x HTTP/1.2",
            "GET /x HTTP/1.9",
            "GET /x HTTP/2.0",
            "GET /x HTTP/2",
            "GET /x HTTP/3.0",
            "GET /x HTTP/0.9",
            "GET /x HTTP/1",
            "GET /x HTTP/1.",
            "GET /x HTTP/.1",
            "GET /x HTTP/1.10",
            "GET /x HTTP/01.1",
            "GET /x HTTP/1.1.1",
            "GET /x HTTP/-1.1",
            "GET /x HTTP/1,1",
            "GET /x HTTP /1.1",
            "GET /x HTTP/ 1.1",
            "GET /x http/1.1",
            "GET /x Http/1.1",
            "GET /x HTTPS/1.1",
            "GET /x ICY/1.1",
            "GET /x HTTP/1.\u{661}",
            "GET /x XTTP/1.1",
            "GET /x HTTP",
            "GET /x 1.1",
        ];
        // Methods that begin with no letter are left out: the reference reads none.
        for line in lines {
            let head = format!("{line}\r\nhost: a\r\ncontent-length: 5\r\n\r\nhello");
            self.add(format!("request line {line:?}"), head);
        }
        let method = "A".repeat(4_000);
        self.add(
            "request line with a long method".to_owned(),
            format!("{method} /x HTTP/1.1\r\nhost: a\r\n\r\n"),
        );
    }

    fn add_targets(&mut self) {
        let targets: &[&[u8]] = &[
            b"/",
            b"//",
            b"//x",
            b"/x//y/../z",
            b"/%",
            b"/%0d%0a",
            b"/%00",
            b"/?",
            b"/??",
            b"/?x=http://b/",
            b"http://a/x",
            b"http://b/x",
            b"HTTP://b/x",
            b"https://b/x",
            b"http://b:80/x",
            b"http://b:x/x",
            b"http:///x",
            b"http://",
            b"http:/x",
            b"ftp://b/x",
            b"x",
            b"*",
            b"b:443",
            b"x?y",
            b"?x",
            b"/caf\xc3\xa9",
            b"/caf\xe9",
            b"/\x01",
            b"/\0",
            b"/\x7f",
            b"/x\r",
            b"/x\x0by",
            b"/\"<>{}|^`",
        ];
        for &target in targets {
            let bytes = [&b"GET "[..], target, b" HTTP/1.1\r\nhost: a\r\n\r\n"].concat();
            self.add(format!("target {}", target.escape_ascii()), bytes);
            let bytes = [
                &b"OPTIONS "[..],
                target,
                b" HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nhello",
            ]
            .concat();
            self.add(format!("target {} with a body", target.escape_ascii()), bytes);
        }
    }

    fn add_chunked(&mut self, name: String, body: &str) {
        self.add_post(name, "Transfer-Encoding: chunked\r\n", body);
    }

    fn add_chunk_sizes(&mut self) {
        let lines = [
            "05",
            "0000000000000005",
            "00000000000000000000005",
            "5;a",
            "5;a=b",
            "5;a=\"b;c\"",
            "5;a=\"\\\"\"",
            "5 ;a=b",
            "5; a",
            "5;",
            "5;;",
            "5 ",
            "5\t",
            "5 \t ",
            " 5",
            "\t5",
            "0x5",
            "0X5",
            "+5",
            "-5",
            "5.0",
            "5h",
            "5g",
            "g5",
            "",
            ";",
            ";a",
            "5,5",
            "5, 5",
            "5 5",
            "5\0",
            "\x005",
            "5\u{b}",
            "5_",
            "5;\0",
            "5;\u{e9}",
            "5;a\rb",
            "5\r",
            "5\r;a",
            "5;a\n",
            "\n5",
            "fffffffffffffff0",
            "fffffffffffffffff",
            "10000000000000005",
            "8000000000000000",
            "7fffffffffffffff",
            "100000005",
            "\u{661}",
        ];
        for line in lines {
            self.add_chunked(
                format!("size line {line:?}"),
                &format!("{line}\r\nhello\r\n0\r\n\r\n"),
            );
        }
        for last in [
            "00",
            "000000000000000000",
            "0;a",
            "0 ",
            "0 ;a",
            "-0",
            "0x0",
            "",
            " 0",
            "0\0",
            "0;a\rb",
        ] {
            self.add_chunked(
                format!("last size line {last:?}"),
                &format!("5\r\nhello\r\n{last}\r\n\r\n"),
            );
        }
        let extension = "x".repeat(3_000);
        self.add_chunked(
            "long extension".to_owned(),
            &format!("5;{extension}\r\nhello\r\n0\r\n\r\n"),
        );
        let chunks = format!("1;{extension}\r\nh\r\n").repeat(10);
        self.add_chunked("many extensions".to_owned(), &format!("{chunks}0\r\n\r\n"));
    }

    fn add_chunk_ends(&mut self) {
        for end in [
            "\n", "\r", "", "\r\r\n", " \r\n", "x\r\n", "\n\r", "\r\n\r\n", "\0\r\n", "xx", "\r\nx",
        ] {
            self.add_chunked(format!("data end {end:?}"), &format!("5\r\nhello{end}0\r\n\r\n"));
        }
        for end in ["\n", "\r", "\r\r\n", "\n\r\n", ";\n", ";a\n", " \n", ";\r", "\0"] {
            self.add_chunked(format!("size end {end:?}"), &format!("5{end}hello\r\n0\r\n\r\n"));
            self.add_chunked(
                format!("last size end {end:?}"),
                &format!("5\r\nhello\r\n0{end}\r\n"),
            );
        }
        // TERM.EXT and EXT.TERM: a reader that ends a size line at LF alone reads a second request.
        let size = HIDDEN.len();
        self.add_chunked(
            "request in an extension".to_owned(),
            &format!("2;\nxx\r\n{size:x}\r\n0\r\n\r\n{HIDDEN}\r\n0\r\n\r\n"),
        );
        self.add_chunked(
            "request behind a short chunk".to_owned(),
            &format!("5\r\nhel\r\n0\r\n\r\n{HIDDEN}\r\n\r\n"),
        );
        self.add_chunked(
            "request in a chunk".to_owned(),
            &format!("{size:x}\r\n{HIDDEN}\r\n0\r\n\r\n"),
        );
    }

    fn add_trailers(&mut self) {
        let trailers = [
            "x: a\r\n\r\n",
            "x: a\r\ny: b\r\n\r\n",
            "x:a\r\n\r\n",
            "x : a\r\n\r\n",
            "x\r\n\r\n",
            ": a\r\n\r\n",
            "x: a\n\r\n",
            "x: a\r\n\n",
            "\n",
            "x: a\n\n",
            "x: a\rb\r\n\r\n",
            "x: a\r\n b\r\n\r\n",
            " x: a\r\n\r\n",
            "x: \0\r\n\r\n",
            "\0: a\r\n\r\n",
            "\r\r\n",
            "content-length: 7\r\n\r\n",
            "transfer-encoding: chunked\r\n\r\n",
            "host: b\r\n\r\n",
            "connection: close\r\n\r\n",
            "trailer: x\r\n\r\n",
            "GET /hidden HTTP/1.1\r\n\r\n",
        ];
        for trailer in trailers {
            self.add_chunked(
                format!("trailers {trailer:?}"),
                &format!("5\r\nhello\r\n0\r\n{trailer}"),
            );
            let announced = "Trailer: x, host, content-length, transfer-encoding\r\nTransfer-Encoding: chunked\r\n";
            self.add_post(
                format!("announced trailers {trailer:?}"),
                announced,
                &format!("0\r\n{trailer}"),
            );
        }
    }

    fn add_hosts(&mut self) {
        let lines = [
            "",
            "host:\r\n",
            "host: a\r\nhost: a\r\n",
            "host: a\r\nhost: b\r\n",
            "host: a, b\r\n",
            "host: a b\r\n",
            "host: a/b\r\n",
            "host: a@b\r\n",
            "host: a:b\r\n",
            "host: a:80\r\n",
            "host: [::1]\r\n",
            "host: [\r\n",
            "host: \u{e9}\r\n",
            "host: a\r\n b\r\n",
            "host : a\r\n",
            " host: a\r\n",
            "x: y\r\n host: b\r\nhost: a\r\n",
            "host: a\0b\r\n",
            "host: a#b\r\n",
            "host: http://a\r\n",
        ];
        for version in ["1.1", "1.0"] {
            for host in lines {
                let head = format!("GET /x HTTP/{version}\r\n{host}connection: keep-alive\r\n\r\n");
                self.add(format!("hosts {host:?} in {version}"), head);
            }
        }
        for target in ["http://b/x", "http://b:81/x", "http://c@b/x", "http://b /x"] {
            self.add(
                format!("hosts of {target:?}"),
                format!("GET {target} HTTP/1.1\r\nhost: a\r\n\r\n"),
            );
            self.add(format!("host of {target:?} alone"), format!("GET {target} HTTP/1.1\r\n\r\n"));
        }
    }

    fn add_switches(&mut self) {
        let settings = "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n";
        let lines = [
            format!("Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n{settings}"),
            format!("Upgrade: h2c\r\n{settings}"),
            "Connection: Upgrade\r\nUpgrade: h2c\r\n".to_owned(),
            "Connection: Upgrade\r\nUpgrade: TLS/1.0\r\n".to_owned(),
            "Connection: Upgrade\r\nUpgrade: foo\r\n".to_owned(),
            "Connection: Upgrade\r\nUpgrade: foo, websocket\r\n".to_owned(),
            "Connection: Upgrade\r\nUpgrade:\r\n".to_owned(),
            "Connection: Upgrade\r\n".to_owned(),
        ];
        for line in lines {
            for body in [
                "",
                "content-length: 5\r\n\r\nhello",
                "transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
            ] {
                let rest = if body.is_empty() { "\r\n" } else { body };
                self.add(
                    format!("switch {line:?} {body:?}"),
                    format!("GET /x HTTP/1.1\r\nhost: a\r\n{line}{rest}"),
                );
            }
        }
        for target in ["a:443", "/x", "a", "http://a/", ":443", "*"] {
            for (lines, behind) in [
                ("", ""),
                ("content-length: 5\r\n", "hello"),
                ("transfer-encoding: chunked\r\n", HELLO_CHUNKS),
                ("", HIDDEN),
            ] {
                let head = format!("CONNECT {target} HTTP/1.1\r\nhost: a\r\n{lines}\r\n{behind}");
                self.add(format!("CONNECT {target:?} {lines:?} {behind:?}"), head);
            }
        }
        for value in
            ["100-continue", "100-Continue", "200-ok", "", "100-continue, x", "x100-continue"]
        {
            for (lines, body) in [
                ("", ""),
                ("Content-Length: 5\r\n", "hello"),
                ("Transfer-Encoding: chunked\r\n", HELLO_CHUNKS),
            ] {
                self.add_post(
                    format!("Expect {value:?} {lines:?}"),
                    &format!("Expect: {value}\r\n{lines}"),
                    body,
                );
            }
        }
        let old =
            "POST /x HTTP/1.0\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\nhello";
        self.add("Expect in HTTP/1.0".to_owned(), old);
    }

    fn add_pipelines(&mut self) {
        let get = "GET /x HTTP/1.1\r\nhost: a\r\n\r\n";
        let post = "POST /y HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nhello";
        self.add_usual("pipeline of three".to_owned(), &format!("{get}{post}{get}"));
        self.add_usual("pipeline of twenty".to_owned(), &get.repeat(20));
        self.add_usual(
            "pipeline with blank lines".to_owned(),
            &format!("{get}\r\n{post}\r\n\r\n{get}"),
        );
        let broken = [
            "GET / HTTP/9.9\r\nhost: a\r\n\r\n",
            "nonsense\r\n\r\n",
            "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: x\r\n\r\n",
            "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nx\r\n",
            "GET / HTTP/1.1\r\nhost : a\r\n\r\n",
            "\0",
            "\u{16}\u{3}\u{1}\u{2}\0\r\n",
            "PUT / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: identity\r\n\r\n",
            "SSH-2.0-x\r\n",
            "EHLO a\r\n",
        ];
        for broken in broken {
            self.add(format!("pipeline begins with {broken:?}"), format!("{broken}{get}{post}"));
            self.add(format!("pipeline goes on with {broken:?}"), format!("{get}{broken}{post}"));
        }
        for close in [
            "close",
            "Close",
            "x, close",
            "close, keep-alive",
            "keep-alive, close",
            "closed",
            "\"close\"",
        ] {
            let head = format!("GET /x HTTP/1.1\r\nhost: a\r\nconnection: {close}\r\n\r\n{get}");
            self.add(format!("pipeline with Connection {close:?}"), head);
        }
        for keep in ["keep-alive", "Keep-Alive", "", "x"] {
            let head = format!("GET /x HTTP/1.0\r\nhost: a\r\nconnection: {keep}\r\n\r\n{get}");
            self.add(format!("pipeline of HTTP/1.0 with Connection {keep:?}"), head);
        }
    }

    fn add_sizes(&mut self) {
        let get = |lines: &str| format!("GET /x HTTP/1.1\r\nhost: a\r\n{lines}\r\n");
        for size in [8_000, 70_000] {
            let long = "y".repeat(size);
            self.add(format!("value of {size} bytes"), get(&format!("x: {long}\r\n")));
            self.add(format!("name of {size} bytes"), get(&format!("{long}: x\r\n")));
            self.add(format!("target of {size} bytes"), get("").replace("/x", &format!("/{long}")));
        }
        for count in [100, 1_000, 20_000] {
            self.add(format!("{count} lines"), get(&"x: y\r\n".repeat(count)));
            self.add(format!("{count} blank lines before"), "\r\n".repeat(count) + &get(""));
        }
    }

    fn add_truncated_requests(&mut self) {
        let chunked = format!(
            "POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n{HELLO_CHUNKS}"
        );
        let sized = "POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 500\r\n\r\nhello".to_owned();
        for whole in [chunked, sized] {
            for end in (1..whole.len()).step_by(7) {
                self.add(format!("truncated at {end}: {whole:?}"), &whole[..end]);
            }
        }
    }
}
