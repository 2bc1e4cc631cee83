//! Pure: command lines of real clients.

/// One run of a client. `{url}` stands for the server's address, `{folder}` for the directory with
/// `server_fixture::REQUEST_BODIES`.
#[derive(Clone, Debug)]
pub(super) struct ClientCall {
    pub(super) words: Vec<String>,
    /// Number of requests that it sends; `None` if unknown.
    pub(super) request_count: Option<u64>,
    /// True if it runs until it is interrupted, and then breaks off requests in flight.
    pub(super) is_endless: bool,
    /// True if its exit status is ignored.
    pub(super) may_fail: bool,
    /// Number of its requests that end without a whole response.
    pub(super) cut: u64,
}

impl ClientCall {
    fn new(text: &str, sends: u64) -> Self {
        let words = text.split_whitespace().map(str::to_owned).collect();
        Self { words, request_count: Some(sends), is_endless: false, may_fail: false, cut: 0 }
    }

    fn endless(text: &str) -> Self {
        Self { request_count: None, is_endless: true, ..Self::new(text, 0) }
    }

    /// Marks a client that may send a request more than once.
    fn may_repeat(mut self) -> Self {
        self.request_count = None;
        self
    }

    /// Appends an argument that may contain spaces.
    fn arg(mut self, word: &str) -> Self {
        self.words.push(word.to_owned());
        self
    }

    fn may_fail(mut self) -> Self {
        self.may_fail = true;
        self
    }

    fn cut(mut self, count: u64) -> Self {
        self.cut = count;
        self
    }
}

/// A client and the protocol that it speaks.
#[derive(Clone, Debug)]
pub(super) struct ClientCase {
    pub(super) client: &'static str,
    pub(super) protocol: &'static str,
    /// Number of requests of `held_calls` that the server leaves open until the test creates the file `gate`.
    pub(super) held: u64,
    pub(super) held_calls: Vec<ClientCall>,
    /// Calls that follow after the held requests.
    pub(super) load_calls: Vec<ClientCall>,
}

/// Number of requests of every kind: five GETs, one HEAD and three POSTs, by curl here and in `requests.go`.
const MIXED_REQUESTS: u64 = 9;

/// Requests of every kind by one curl on one connection, and then one to the path `last`.
fn mixed_requests(common: &str, last: Option<&str>) -> ClientCall {
    let gets = ["hello", "chunks", "big", "empty", "hello"].map(|path| format!("{{url}}/{path}"));
    let post = "--next -sSf -o /dev/null {common} --data-binary";
    let mut rounds = vec![
        format!(
            "curl -sSf {common} {}",
            gets.iter().map(|url| format!("-o /dev/null {url} ")).collect::<String>()
        ),
        "--next -sSf -o /dev/null {common} --head {url}/hello".to_owned(),
        format!("{post} hello {{url}}/echo"),
        format!("{post} @{{folder}}/200k -H Transfer-Encoding:chunked {{url}}/echo"),
        // Large enough for curl to send Expect: 100-continue first, in protocols that have it.
        format!("{post} @{{folder}}/2m {{url}}/echo"),
    ];
    rounds.extend(last.map(|path| format!("--next -sSf -o /dev/null {{common}} {{url}}/{path}")));
    let sends = MIXED_REQUESTS + u64::from(last.is_some());
    ClientCall::new(&rounds.join(" ").replace("{common}", common), sends)
}

/// `count` requests at once, by one curl.
fn parallel_requests(common: &str, path: &str, count: u64) -> ClientCall {
    let urls = format!("-o /dev/null {{url}}/{path} ").repeat(count as usize);
    ClientCall::new(&format!("curl -sSf {common} -Z --parallel-max {count} {urls}"), count)
}

/// Request with a body that the server refuses before it has arrived.
fn refused_body(common: &str) -> ClientCall {
    // The server may close while curl still sends.
    ClientCall::new(
        &format!(
            "curl -s -o /dev/null {common} -H Expect: --data-binary @{{folder}}/2m {{url}}/early"
        ),
        1,
    )
    .may_fail()
}

impl ClientCase {
    /// Requests on one connection: all earlier ones have ended when the last one alone is in flight.
    pub(super) fn curl_keep_alive(held: u64) -> Self {
        let common = "--http1.1";
        Self {
            client: "curl",
            protocol: "HTTP/1.1 kept",
            held,
            held_calls: vec![
                mixed_requests(common, Some("wait")),
                parallel_requests(common, "wait", held - 1),
            ],
            load_calls: vec![
                mixed_requests(common, None),
                parallel_requests(common, "big", 20),
                refused_body(common),
                refused_body(common),
            ],
        }
    }

    /// Requests with `Connection: close`, which curl sends without obeying it. If a server does not repeat the
    /// header, the next request goes to a connection that is being closed, and then to another one.
    pub(super) fn curl_close(held: u64) -> Self {
        let common = "--http1.1 -H Connection:close";
        Self {
            client: "curl",
            protocol: "HTTP/1.1 close",
            held,
            held_calls: vec![parallel_requests(common, "wait", held)],
            load_calls: vec![
                mixed_requests(common, None).may_repeat(),
                parallel_requests(common, "big", 20).may_repeat(),
                refused_body(common),
                refused_body(common),
            ],
        }
    }

    /// One request a connection: Debian's curl 7.88 fails at the second request of HTTP/2 without TLS. It sends parts
    /// of a body twice if its socket accepts less at once; h2load and Go send the large bodies.
    fn curl_once(protocol: &'static str, flag: &str, big: &str, held: u64) -> Self {
        let curl =
            |args: &str| ClientCall::new(&format!("curl -sSf {flag} -o /dev/null {args}"), 1);
        let kinds = [
            "{url}/hello",
            "{url}/chunks",
            big,
            "{url}/empty",
            "--head {url}/hello",
            "--data-binary hello {url}/echo",
            "--data-binary @{folder}/50k {url}/echo",
        ];
        Self {
            client: "curl",
            protocol,
            held,
            held_calls: (0..held).map(|_| curl("{url}/wait")).collect(),
            load_calls: kinds
                .iter()
                .map(|args| curl(args))
                .chain([refused_body(flag), refused_body(flag)])
                .collect(),
        }
    }

    pub(super) fn curl_http2(held: u64) -> Self {
        Self::curl_once("h2c", "--http2-prior-knowledge", "{url}/big", held)
    }

    pub(super) fn curl_upgrade(held: u64) -> Self {
        // curl 7.88 cannot buffer a large response to the Upgrade that arrives at once.
        Self::curl_once("h2c by Upgrade", "--http2", "{url}/chunks", held)
    }

    /// Requests on one connection: all earlier ones have ended when the last ones alone are in flight.
    pub(super) fn go_http2(program: &str, held: u64) -> Self {
        let call = |path: &str| {
            let text = format!("{program} {{url}} /{path} {held}");
            ClientCall::new(&text, MIXED_REQUESTS + held)
        };
        Self {
            client: "Go net/http",
            protocol: "h2c",
            held,
            held_calls: vec![call("wait")],
            load_calls: vec![call("big")],
        }
    }

    /// Requests that get 103 Early Hints before the final response.
    pub(super) fn curl_hints() -> Self {
        let call = |path: &str| {
            ClientCall::new(
                &format!(
                    "curl -sSf --http1.1 -o /dev/null {{url}}/hints -o /dev/null {{url}}/{path}"
                ),
                2,
            )
        };
        Self {
            client: "curl",
            protocol: "HTTP/1.1 with 103",
            held: 1,
            held_calls: vec![call("wait")],
            load_calls: vec![call("hints")],
        }
    }

    pub(super) fn wrk(held: u64) -> Self {
        let call =
            |path: &str| ClientCall::endless(&format!("wrk -t1 -c{held} -d3600 {{url}}/{path}"));
        Self {
            client: "wrk",
            protocol: "HTTP/1.1 kept",
            held,
            held_calls: vec![call("wait")],
            load_calls: vec![call("chunks")],
        }
    }

    pub(super) fn h2load_http1(held: u64) -> Self {
        let hold = ClientCall::new(&format!("h2load --h1 -n{held} -c{held} {{url}}/wait"), held);
        let get = ClientCall::new(&format!("h2load --h1 -n2000 -c{held} {{url}}/hello"), 2000);
        let post = ClientCall::new(
            &format!("h2load --h1 -n400 -c{held} -d {{folder}}/200k {{url}}/echo"),
            400,
        );
        Self {
            client: "h2load",
            protocol: "HTTP/1.1 kept",
            held,
            held_calls: vec![hold],
            load_calls: vec![get, post],
        }
    }

    pub(super) fn h2load_http2(held: u64) -> Self {
        let hold = format!("h2load -n{held} -c2 -m{} {{url}}/wait", held / 2);
        let load = [
            ("h2load -n4000 -c4 -m32 {url}/hello", 4000),
            ("h2load -n400 -c4 -m8 -d {folder}/200k {url}/echo", 400),
            ("h2load -n8 -c2 -m4 -d {folder}/2m {url}/echo", 8),
            // A window of 16 KiB: responses pause in the middle until the client extends the window.
            ("h2load -n100 -c2 -m8 -w14 -W14 {url}/big", 100),
        ];
        Self {
            client: "h2load",
            protocol: "h2c",
            held,
            held_calls: vec![ClientCall::new(&hold, held)],
            load_calls: load.map(|(text, sends)| ClientCall::new(text, sends)).to_vec(),
        }
    }

    pub(super) fn nghttp_upgrade() -> Self {
        let call = |path: &str| ClientCall::new(&format!("nghttp -n -u {{url}}/{path}"), 1);
        Self {
            client: "nghttp",
            protocol: "h2c by Upgrade",
            held: 1,
            held_calls: vec![call("wait")],
            load_calls: vec![call("hello"), call("chunks"), call("empty")],
        }
    }

    /// Requests on one connection, of which the first requests the Upgrade.
    pub(super) fn nghttp_upgrade_keep_alive() -> Self {
        let call = |last: &str| {
            let urls = ["hello", "chunks", "empty", last].map(|path| format!("{{url}}/{path}"));
            ClientCall::new(&format!("nghttp -n -u {}", urls.join(" ")), 4)
        };
        Self {
            client: "nghttp",
            protocol: "h2c by Upgrade, kept",
            held: 1,
            held_calls: vec![call("wait")],
            load_calls: vec![call("big")],
        }
    }

    /// Requests at once, each of which requests the Upgrade on a connection of its own.
    pub(super) fn java_upgrade(client: String, held: u64) -> Self {
        let call = |path: &str| ClientCall::new(&format!("{client} {{url}}/{path} {held}"), held);
        Self {
            client: "Java HttpClient",
            protocol: "h2c by Upgrade",
            held,
            held_calls: vec![call("wait")],
            load_calls: vec![call("hello"), call("chunks")],
        }
    }

    /// WebSockets, each of which counts as one request until it closes.
    pub(super) fn websockets(client: &'static str, program: String) -> Self {
        let call = ClientCall::new(&format!("{program} {{ws}}/websocket 5"), 5);
        Self { client, protocol: "WebSocket", held: 5, held_calls: vec![call], load_calls: vec![] }
    }

    /// WebSockets over HTTP/2 (RFC 8441), on connections with ordinary requests, which are held open on one of them.
    /// A tunnel is one request until the server has ended its side, here after the client, or until either side
    /// breaks it off.
    pub(super) fn tunnels(ends: &[&str]) -> Self {
        let call =
            |args: &str, sends| ClientCall::new(&format!("node tunnels.mjs {{url}} {args}"), sends);
        let broken_off = |end: &&str| call(&format!("5 {end} /hello"), 6).cut(5);
        Self {
            client: "Node http2",
            protocol: "WebSocket over h2c",
            held: 8,
            held_calls: vec![call("5 end /hello", 6), call("1 end /hello /wait /wait", 4)],
            load_calls: ends.iter().map(broken_off).collect(),
        }
    }

    /// Tunnels at a server that ends no tunnel itself: each is cut with its connection.
    pub(super) fn tunnels_left_open() -> Self {
        let mut case = Self::tunnels(&[]);
        case.held_calls =
            case.held_calls.into_iter().zip([5, 1]).map(|(call, count)| call.cut(count)).collect();
        case
    }

    /// Calls of each gRPC kind, one after the other on connections of their own.
    pub(super) fn grpcurl(program: &str) -> Self {
        let call = |method: &str, text: &str| {
            let options =
                "-plaintext -connect-timeout 120 -import-path {servers} -proto echo.proto -d";
            ClientCall::new(&format!("{program} {options}"), 1)
                .arg(text)
                .arg("{address}")
                .arg(&format!("servers.Echo/{method}"))
        };
        let messages = |word: &str| format!(r#"{{"text":"hello"}} {{"text":"{word}"}}"#);
        let message = |word: &str| format!(r#"{{"text":"{word}"}}"#);
        let calls = |word: &str| {
            vec![
                call("Unary", &message(word)),
                call("ServerStream", &message(word)),
                call("ClientStream", &messages(word)),
                call("Bidi", &messages(word)),
            ]
        };
        let fails = calls("fail").into_iter().map(ClientCall::may_fail);
        Self {
            client: "grpcurl",
            protocol: "gRPC",
            held: 4,
            held_calls: calls("wait"),
            load_calls: calls("again").into_iter().chain(fails).collect(),
        }
    }

    /// Many unary calls on few connections.
    pub(super) fn h2load_grpc(held: u64) -> Self {
        let call = |sends: u64, connections: u64, streams: u64, body: &str| {
            let text = format!(
                "h2load -n{sends} -c{connections} -m{streams} -d {{folder}}/{body} -H te:trailers \
                 -H content-type:application/grpc {{url}}/servers.Echo/Unary"
            );
            ClientCall::new(&text, sends)
        };
        Self {
            client: "h2load",
            protocol: "gRPC unary",
            held,
            held_calls: vec![call(held, 2, held / 2, "grpc-wait")],
            load_calls: vec![call(2000, 4, 32, "grpc-hello"), call(200, 2, 8, "grpc-fail")],
        }
    }
}
