//! WebSockets over streams of HTTP/2 (RFC 8441), to pods of HTTP/1.1 and of HTTP/2.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use activator::budget::CLIENT_SEND_BUFFER;
use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use common::wire::AppProtocol;
use datapath::h2::{frame_flag, frame_kind};
use futures::future::join_all;
use h2::{
    Reason, RecvStream, SendStream,
    client::{ResponseFuture, SendRequest},
    ext::Protocol,
};
use http::{Method, Request, Response, StatusCode, request};
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::mpsc,
};

use crate::{
    faults::assert_no_state_left,
    h2c::{client_preface, frame, get},
    harness::{
        ActivatorFixture, LONG, OK, PausedClock, read_head, revision, start_pod, start_pod_with,
        wait_until,
    },
};

mod http2_pods;

const KIB: usize = 1 << 10;
/// Bytes that a pod of HTTP/2 gets before it asks for more (RFC 9113 §6.9.2).
const DEFAULT_WINDOW: usize = 65_535;
/// URL of the service's WebSocket.
const CHAT: &str = "http://hello.default.example.com/chat?x=1";

/// HTTP/2 connection of a client that opens WebSockets.
#[derive(Clone)]
pub(crate) struct WebSocketClient(SendRequest<Bytes>);

impl WebSocketClient {
    /// Connects, and waits until the server has announced that it takes extended CONNECT.
    pub(crate) async fn connect(port: u16) -> Self {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
        let (sender, connection) = h2::client::handshake(stream).await.unwrap();
        tokio::spawn(connection);
        wait_until(|| sender.is_extended_connect_protocol_enabled()).await;
        Self(sender)
    }

    /// Sends a request without a body, or the head of one whose stream goes on.
    async fn send(&self, request: request::Builder, is_whole: bool) -> WebSocketCall {
        let mut sender = self.0.clone().ready().await.unwrap();
        let (response, sending) = sender.send_request(request.body(()).unwrap(), is_whole).unwrap();
        WebSocketCall { response, sending }
    }

    /// Sends a handshake with these fields besides the usual ones.
    async fn start(&self, fields: &[(&str, &str)]) -> WebSocketCall {
        let request = Request::connect(CHAT)
            .extension(Protocol::from_static("websocket"))
            .header("sec-websocket-version", "13");
        let request = fields.iter().fold(request, |it, (name, value)| it.header(*name, *value));
        self.send(request, false).await
    }

    /// Opens a WebSocket, which must succeed.
    pub(crate) async fn open(&self) -> WebSocketStream {
        let socket = self.start(&[]).await.response().await;
        assert_eq!(socket.head.status(), StatusCode::OK);
        socket
    }

    /// Sends a GET, and returns the status code and body of its response.
    async fn get(&self) -> (u16, String) {
        let mut response = self.send(get("/"), true).await.response().await;
        (response.head.status().as_u16(), response.read_rest().await)
    }
}

/// Request whose response has not come.
struct WebSocketCall {
    response: ResponseFuture,
    sending: SendStream<Bytes>,
}

impl WebSocketCall {
    async fn response(self) -> WebSocketStream {
        let response = tokio::time::timeout(LONG, self.response).await.expect("responds in time");
        let (head, receiving) = response.unwrap().into_parts();
        let head = Response::from_parts(head, ());
        WebSocketStream { head, sending: self.sending, receiving }
    }
}

/// Stream of a client after the response.
pub(crate) struct WebSocketStream {
    head: Response<()>,
    sending: SendStream<Bytes>,
    receiving: RecvStream,
}

impl WebSocketStream {
    pub(crate) fn send(&mut self, text: &str) {
        self.sending.send_data(Bytes::from(text.to_owned()), false).unwrap();
    }

    pub(crate) fn finish(&mut self) {
        self.sending.send_data(Bytes::new(), true).unwrap();
    }

    fn field(&self, name: &str) -> Option<&str> {
        self.head.headers().get(name).map(|it| it.to_str().unwrap())
    }

    /// Next bytes of the server; `None` at their end, an error if the stream was reset.
    async fn next(&mut self) -> Option<Result<Bytes, Reason>> {
        loop {
            let next = tokio::time::timeout(LONG, self.receiving.data()).await.expect("in time")?;
            let data = match next {
                Ok(data) => data,
                Err(error) => return Some(Err(error.reason().unwrap())),
            };
            self.receiving.flow_control().release_capacity(data.len()).unwrap();
            if !data.is_empty() {
                return Some(Ok(data));
            }
        }
    }

    /// Reads as many bytes as `text` has, which must be these.
    async fn expect(&mut self, text: &str) {
        let mut all = String::new();
        while all.len() < text.len() {
            let data = self.next().await.expect("not the end").expect("no reset");
            all.push_str(str::from_utf8(&data).unwrap());
        }
        assert_eq!(all, text);
    }

    /// Reads until the end. A server that does not want the rest of the request may reset the stream then.
    pub(crate) async fn read_rest(&mut self) -> String {
        let mut all = String::new();
        loop {
            match self.next().await {
                Some(Ok(data)) => all.push_str(str::from_utf8(&data).unwrap()),
                None | Some(Err(Reason::NO_ERROR)) => return all,
                Some(Err(reason)) => panic!("reset: {reason}"),
            }
        }
    }
}

/// Response of a pod that accepts the handshake in `head`.
pub(crate) fn switch_response(head: &str, fields: &str) -> String {
    let key = head.lines().find_map(|line| line.strip_prefix("sec-websocket-key: ")).unwrap();
    let text = format!("{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11");
    let accept = STANDARD.encode(digest(&SHA1_FOR_LEGACY_USE_ONLY, text.as_bytes()));
    format!(
        "HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\
         sec-websocket-accept: {accept}\r\n{fields}\r\n"
    )
}

/// Reads a handshake and accepts it. Returns its head.
async fn accept_websocket(stream: &mut TcpStream) -> String {
    let head = read_head(stream).await;
    stream.write_all(switch_response(&head, "").as_bytes()).await.unwrap();
    head
}

/// Sends everything back, and a last word after the client's end.
async fn echo_until_end(mut stream: TcpStream) {
    let (mut from, mut to) = stream.split();
    tokio::io::copy(&mut from, &mut to).await.ok();
    to.write_all(b"bye").await.ok();
}

/// Starts a pod whose WebSockets send everything back, and that responds to other requests.
pub(crate) async fn start_echo_pod() -> SocketAddr {
    start_pod_with(|mut stream, _| async move {
        let mut head = read_head(&mut stream).await;
        while head.ends_with("\r\n\r\n") && !head.contains("upgrade: websocket") {
            stream.write_all(OK.as_bytes()).await.ok();
            head = read_head(&mut stream).await;
        }
        if head.ends_with("\r\n\r\n") {
            stream.write_all(switch_response(&head, "").as_bytes()).await.unwrap();
            echo_until_end(stream).await;
        }
    })
    .await
}

/// Creates a fixture whose Revision ends no request of a test by its timeout.
async fn patient_fixture() -> ActivatorFixture {
    let mut fixture = ActivatorFixture::new().await;
    fixture.apply_change(|table| {
        table.revisions.get_mut(&revision()).unwrap().timeout = 100 * LONG;
    });
    fixture
}

#[tokio::test]
async fn a_handshake_reaches_the_pod_as_one_of_http1() {
    let mut fixture = ActivatorFixture::new().await;
    let (heads_tx, mut heads) = mpsc::channel(1);
    let pod = start_pod_with(move |mut stream, _| {
        let heads_tx = heads_tx.clone();
        async move {
            let head = read_head(&mut stream).await;
            let fields = "sec-websocket-protocol: chat\r\nsec-websocket-extensions: permessage-deflate\r\nset-cookie: a=1\r\n";
            stream.write_all(switch_response(&head, fields).as_bytes()).await.unwrap();
            heads_tx.send(head).await.unwrap();
            echo_until_end(stream).await;
        }
    })
    .await;
    fixture.add_ready_pod("p", pod);
    let client = WebSocketClient::connect(fixture.port).await;
    let fields = [
        ("sec-websocket-protocol", "chat, superchat"),
        ("sec-websocket-extensions", "permessage-deflate"),
        ("sec-websocket-key", "of the client"),
        ("origin", "http://a.example"),
    ];
    let socket = client.start(&fields).await.response().await;
    assert_eq!(socket.head.status(), StatusCode::OK);
    assert_eq!(socket.field("sec-websocket-protocol"), Some("chat"));
    assert_eq!(socket.field("sec-websocket-extensions"), Some("permessage-deflate"));
    assert_eq!(socket.field("set-cookie"), Some("a=1"));
    for absent in ["connection", "upgrade", "sec-websocket-accept", "content-length"] {
        assert_eq!(socket.field(absent), None, "{absent}");
    }
    let head = heads.recv().await.unwrap();
    assert!(head.starts_with("GET /chat?x=1 HTTP/1.1\r\n"), "{head}");
    for line in [
        "host: hello.default.example.com",
        "connection: upgrade",
        "upgrade: websocket",
        "sec-websocket-version: 13",
        "sec-websocket-protocol: chat, superchat",
        "sec-websocket-extensions: permessage-deflate",
        "origin: http://a.example",
        "x-forwarded-for: 127.0.0.1",
        "x-forwarded-proto: http",
    ] {
        assert_eq!(head.lines().filter(|it| *it == line).count(), 1, "{line} in {head}");
    }
    // The key of the client has no meaning in HTTP/2, and the pod must prove that it has read the activator's.
    assert_eq!(head.matches("sec-websocket-key: ").count(), 1, "{head}");
    assert!(!head.contains("of the client") && !head.contains("content-length"), "{head}");
}

#[tokio::test]
async fn each_handshake_has_a_key_of_its_own() {
    let mut fixture = ActivatorFixture::new().await;
    let (heads_tx, mut heads) = mpsc::channel(2);
    let pod = start_pod_with(move |mut stream, _| {
        let heads_tx = heads_tx.clone();
        async move {
            heads_tx.send(accept_websocket(&mut stream).await).await.unwrap();
            echo_until_end(stream).await;
        }
    })
    .await;
    fixture.add_ready_pod("p", pod);
    let client = WebSocketClient::connect(fixture.port).await;
    let _sockets = [client.open().await, client.open().await];
    let mut keys = Vec::new();
    for _ in 0..2 {
        let head = heads.recv().await.unwrap();
        let key = head.lines().find(|it| it.starts_with("sec-websocket-key: ")).unwrap().to_owned();
        keys.push(key);
    }
    assert_ne!(keys[0], keys[1]);
}

#[tokio::test]
async fn bytes_pass_both_ways_and_either_end_may_end_first() {
    let mut fixture = ActivatorFixture::new().await;
    fixture.add_ready_pod("p", start_echo_pod().await);
    let client = WebSocketClient::connect(fixture.port).await;
    let mut socket = client.open().await;
    for text in ["one", "two"] {
        socket.send(text);
        socket.expect(text).await;
    }
    // The pod sends its last word only after the client's end has reached it.
    socket.finish();
    assert_eq!(socket.read_rest().await, "bye");
    assert_no_state_left(&fixture).await;

    let (rest_tx, mut rest) = mpsc::channel(1);
    let ends_first = start_pod_with(move |mut stream, _| {
        let rest_tx = rest_tx.clone();
        async move {
            accept_websocket(&mut stream).await;
            stream.write_all(b"last").await.unwrap();
            stream.shutdown().await.unwrap();
            let mut all = String::new();
            stream.read_to_string(&mut all).await.unwrap();
            rest_tx.send(all).await.unwrap();
        }
    })
    .await;
    fixture.apply_change(|table| table.pods.clear());
    fixture.add_ready_pod("q", ends_first);
    let mut socket = client.open().await;
    assert_eq!(socket.read_rest().await, "last");
    socket.send("late");
    socket.finish();
    assert_eq!(rest.recv().await.unwrap(), "late");
    assert_no_state_left(&fixture).await;
}

/// The pod does not react to the end of the client. Only a reset ends the request then.
#[tokio::test]
async fn a_reset_of_the_client_ends_the_connection_to_the_pod() {
    for reason in [Reason::CANCEL, Reason::NO_ERROR, Reason::INTERNAL_ERROR] {
        let mut fixture = patient_fixture().await;
        let (ended_tx, mut ended) = mpsc::channel(1);
        let pod = start_pod_with(move |mut stream, _| {
            let ended_tx = ended_tx.clone();
            async move {
                accept_websocket(&mut stream).await;
                let read = stream.read(&mut [0; 16]).await;
                ended_tx.send(read.unwrap_or_default()).await.unwrap();
                std::future::pending::<()>().await;
            }
        })
        .await;
        fixture.add_ready_pod("p", pod);
        let client = WebSocketClient::connect(fixture.port).await;
        let mut socket = client.open().await;
        socket.sending.send_reset(reason);
        assert_eq!(ended.recv().await.unwrap(), 0, "{reason}");
        assert_no_state_left(&fixture).await;
    }
}

#[tokio::test]
async fn a_client_that_is_gone_ends_the_connection_to_the_pod() {
    let mut fixture = patient_fixture().await;
    let silent = start_pod_with(|mut stream, _| async move {
        accept_websocket(&mut stream).await;
        std::future::pending::<()>().await;
    })
    .await;
    fixture.add_ready_pod("p", silent);
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, fixture.port)).await.unwrap();
    let (sender, connection) = h2::client::handshake(stream).await.unwrap();
    let driver = tokio::spawn(connection);
    wait_until(|| sender.is_extended_connect_protocol_enabled()).await;
    let _socket = WebSocketClient(sender).open().await;
    driver.abort();
    assert_no_state_left(&fixture).await;
}

#[tokio::test]
async fn a_reset_of_the_pod_resets_the_stream_and_no_other_one() {
    let mut fixture = ActivatorFixture::new().await;
    let pod = start_pod_with(|mut stream, _| async move {
        accept_websocket(&mut stream).await;
        let mut text = [0; 5];
        while stream.read_exact(&mut text).await.is_ok() {
            if text == *b"reset" {
                return stream.set_zero_linger().unwrap();
            }
            stream.write_all(&text).await.unwrap();
        }
    })
    .await;
    fixture.add_ready_pod("p", pod);
    let client = WebSocketClient::connect(fixture.port).await;
    let (mut one, mut two) = (client.open().await, client.open().await);
    one.send("reset");
    assert_eq!(one.next().await, Some(Err(Reason::CANCEL)));
    two.send("hello");
    two.expect("hello").await;
}

#[tokio::test]
async fn a_refused_handshake_gets_the_pods_response() {
    let mut fixture = ActivatorFixture::new().await;
    let refusal = "HTTP/1.1 403 Forbidden\r\ncontent-length: 4\r\nx-reason: origin\r\n\r\nnope";
    let pod = start_pod(refusal, Duration::ZERO).await;
    fixture.add_ready_pod("p", pod.address);
    let client = WebSocketClient::connect(fixture.port).await;
    for _ in 0..2 {
        let mut refused = client.start(&[]).await.response().await;
        assert_eq!(refused.head.status(), StatusCode::FORBIDDEN);
        assert_eq!(refused.field("x-reason"), Some("origin"));
        assert_eq!(refused.read_rest().await, "nope");
    }
    assert_eq!(client.get().await, (403, "nope".to_owned()));
    assert_eq!((pod.requests(), pod.connections()), (3, 1), "the pod's connection goes on");
}

/// Over HTTP/1.1 the client itself finds out that the handshake has failed. Over HTTP/2 it cannot.
#[tokio::test]
async fn a_response_that_opens_no_websocket_is_no_success() {
    let cases = [
        (OK, "status 200 in place of 101"),
        ("HTTP/1.1 204 No Content\r\n\r\n", "status 204 in place of 101"),
        (
            "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
            "Sec-WebSocket-Accept",
        ),
        (
            "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
             sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n",
            "Sec-WebSocket-Accept",
        ),
    ];
    for (response, reason) in cases {
        let mut fixture = ActivatorFixture::new().await;
        let pod = start_pod(response, Duration::ZERO).await;
        fixture.add_ready_pod("p", pod.address);
        let client = WebSocketClient::connect(fixture.port).await;
        let mut refused = client.start(&[]).await.response().await;
        assert_eq!(refused.head.status(), StatusCode::BAD_GATEWAY, "{response}");
        // A status of the pod would tell the client that the WebSocket is open.
        let text = refused.read_rest().await;
        assert!(text.contains(reason), "{text}");
        assert_no_state_left(&fixture).await;
    }
}

#[tokio::test]
async fn a_handshake_waits_for_a_pod() {
    let mut fixture = ActivatorFixture::new().await;
    let client = WebSocketClient::connect(fixture.port).await;
    let (one, reset) = (client.start(&[]).await, client.start(&[]).await);
    fixture.wait_for_queued(2).await;
    // A client that gives up leaves the queue.
    drop(reset);
    fixture.wait_for_queued(1).await;
    fixture.add_ready_pod("p", start_echo_pod().await);
    let mut socket = one.response().await;
    assert_eq!(socket.head.status(), StatusCode::OK);
    socket.send("hello");
    socket.expect("hello").await;
    assert_eq!(fixture.waiting_totals(), (2, 2));
}

#[tokio::test]
async fn a_handshake_is_sent_again_if_its_connection_closes_unseen() {
    let mut fixture = ActivatorFixture::new().await;
    let pod = start_pod_with(|mut stream, number| async move {
        if number == 0 {
            // It serves one request, and closes when the second one comes.
            read_head(&mut stream).await;
            stream.write_all(OK.as_bytes()).await.unwrap();
            read_head(&mut stream).await;
            return;
        }
        accept_websocket(&mut stream).await;
        echo_until_end(stream).await;
    })
    .await;
    fixture.add_ready_pod("p", pod);
    let client = WebSocketClient::connect(fixture.port).await;
    assert_eq!(client.get().await, (200, "hello".to_owned()));
    let mut socket = client.open().await;
    socket.send("again");
    socket.expect("again").await;
}

#[tokio::test]
async fn websockets_and_requests_share_a_connection() {
    let mut fixture = ActivatorFixture::new().await;
    fixture.add_ready_pod("p", start_echo_pod().await);
    let client = WebSocketClient::connect(fixture.port).await;
    let each = |number: usize| {
        let client = client.clone();
        async move {
            let mut socket = client.open().await;
            for round in 0..10 {
                let text = format!("message {round} of {number}");
                socket.send(&text);
                socket.expect(&text).await;
                assert_eq!(client.get().await, (200, "hello".to_owned()));
            }
            socket.finish();
            assert_eq!(socket.read_rest().await, "bye");
        }
    };
    join_all((0..10).map(each)).await;
    assert_eq!(fixture.metric("rouse_activator_client_connections"), 1.0);
    assert_no_state_left(&fixture).await;
}

#[tokio::test]
async fn a_websocket_counts_as_a_request_until_it_ends() {
    let mut fixture = ActivatorFixture::new().await;
    fixture.apply_change(|table| {
        table.revisions.get_mut(&revision()).unwrap().container_concurrency = 1;
    });
    fixture.add_ready_pod("p", start_echo_pod().await);
    let client = WebSocketClient::connect(fixture.port).await;
    let mut socket = client.open().await;
    let next = client.start(&[]).await;
    fixture.wait_for_queued(1).await;
    socket.send("still open");
    socket.expect("still open").await;
    socket.finish();
    assert_eq!(socket.read_rest().await, "bye");
    assert_eq!(next.response().await.head.status(), StatusCode::OK);
}

#[tokio::test]
async fn only_websocket_is_a_protocol_of_connect() {
    let mut fixture = ActivatorFixture::new().await;
    let pod = start_pod(OK, Duration::ZERO).await;
    fixture.add_ready_pod("p", pod.address);
    let client = WebSocketClient::connect(fixture.port).await;
    let plain = Request::connect("hello.default.example.com:80");
    let udp = Request::connect(CHAT).extension(Protocol::from_static("connect-udp"));
    for (request, status) in [(plain, 405), (udp, 501)] {
        let mut refused = client.send(request, false).await.response().await;
        assert_eq!(refused.head.status().as_u16(), status);
        assert!(refused.read_rest().await.starts_with("method CONNECT is "));
    }
    let spelled = Request::connect(CHAT).extension(Protocol::from_static("WebSocket"));
    let upgraded = client.send(spelled, false).await.response().await;
    assert_eq!(upgraded.head.status(), StatusCode::BAD_GATEWAY, "the pod responds with 200");
    assert_eq!(pod.requests(), 1);
}

/// A probe gets a successful response, which would open the WebSocket.
#[tokio::test]
async fn a_handshake_is_no_probe_of_the_platform() {
    let mut fixture = ActivatorFixture::new().await;
    fixture.add_ready_pod("p", start_echo_pod().await);
    let client = WebSocketClient::connect(fixture.port).await;
    let fields = [("k-network-probe", "probe"), ("user-agent", "kube-probe/1.30")];
    let mut socket = client.start(&fields).await.response().await;
    assert_eq!(socket.head.status(), StatusCode::OK);
    socket.send("hello");
    socket.expect("hello").await;
}

/// Reads frames until one resets a stream. Returns the stream and the reason.
async fn read_reset(stream: &mut TcpStream) -> (u32, Reason) {
    let read = async {
        loop {
            let mut head = [0; 9];
            stream.read_exact(&mut head).await.unwrap();
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
            let mut payload = vec![0; usize::try_from(length).unwrap()];
            stream.read_exact(&mut payload).await.unwrap();
            if head[3] == frame_kind::RST_STREAM {
                let id = u32::from_be_bytes(head[5..].try_into().unwrap());
                return (id, Reason::from(u32::from_be_bytes(payload.try_into().unwrap())));
            }
        }
    };
    tokio::time::timeout(LONG, read).await.expect("comes in time")
}

#[tokio::test]
async fn a_handshake_without_a_pseudo_header_is_malformed() {
    let mut fixture = ActivatorFixture::new().await;
    let pod = start_pod(OK, Duration::ZERO).await;
    fixture.add_ready_pod("p", pod.address);
    // Literal fields and indexed ones (RFC 7541 §6): :method CONNECT, :protocol websocket, :authority a.
    let method: &[u8] = b"\x02\x07CONNECT";
    let protocol: &[u8] = b"\x00\x09:protocol\x09websocket";
    let authority: &[u8] = b"\x01\x01a";
    // :scheme http, :path /, :method GET.
    let (scheme, path, get): (&[u8], &[u8], &[u8]) = (&[0x86], &[0x84], &[0x82]);
    let cases = [
        ("no :scheme", [method, protocol, authority, path]),
        ("no :path", [method, protocol, authority, scheme]),
        ("no CONNECT", [get, protocol, scheme, path]),
    ];
    for (what, fields) in cases {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, fixture.port)).await.unwrap();
        let block = fields.concat();
        let request = frame(frame_kind::HEADERS, frame_flag::END_HEADERS, 1, &block);
        stream.write_all(&[client_preface(), request].concat()).await.unwrap();
        assert_eq!(read_reset(&mut stream).await, (1, Reason::PROTOCOL_ERROR), "{what}");
    }
    assert_eq!(pod.requests(), 0);
}

#[tokio::test]
async fn a_websocket_without_a_first_byte_in_time_is_reset() {
    const BOUND: Duration = Duration::from_secs(10);
    let mut fixture = patient_fixture().await;
    fixture.apply_change(|table| {
        table.revisions.get_mut(&revision()).unwrap().response_start_timeout = Some(BOUND);
    });
    fixture.add_ready_pod("p", start_echo_pod().await);
    let client = WebSocketClient::connect(fixture.port).await;
    let clock = PausedClock::start_paused();
    let (mut silent, mut used) = (client.open().await, client.open().await);
    used.send("hello");
    used.expect("hello").await;
    clock.advance(BOUND * 2).await;
    assert_eq!(silent.next().await, Some(Err(Reason::CANCEL)));
    used.send("goes on");
    used.expect("goes on").await;
}

#[tokio::test]
async fn websockets_are_reset_when_the_activator_stops() {
    let mut fixture = patient_fixture().await;
    fixture.add_ready_pod("p", start_echo_pod().await);
    let client = WebSocketClient::connect(fixture.port).await;
    let mut socket = client.open().await;
    fixture.activator.forwarder.close_upgraded.cancel();
    assert_eq!(socket.next().await, Some(Err(Reason::CANCEL)));
    assert_no_state_left(&fixture).await;
}

/// Bytes of a WebSocket count while no pod takes them, and no longer.
#[tokio::test]
async fn bytes_of_websockets_are_charged_while_they_wait() {
    let mut fixture = patient_fixture().await;
    let client = WebSocketClient::connect(fixture.port).await;
    let connections = |fixture: &ActivatorFixture| {
        let connections = fixture.activator.server.connections();
        (connections.request_bytes(), connections.response_bytes())
    };
    let mut call = client.start(&[]).await;
    let text = "x".repeat(16 * KIB);
    call.sending.send_data(Bytes::from(text.clone()), false).unwrap();
    wait_until(|| connections(&fixture).0 >= text.len()).await;
    fixture.add_ready_pod("p", start_echo_pod().await);
    let mut socket = call.response().await;
    socket.expect(&text).await;
    for _ in 0..32 {
        socket.send(&text);
        socket.expect(&text).await;
    }
    wait_until(|| connections(&fixture) == (0, 0)).await;
}

#[tokio::test]
async fn a_client_that_does_not_read_is_charged_with_what_waits_for_it() {
    let mut fixture = patient_fixture().await;
    let floods = start_pod_with(|mut stream, _| async move {
        accept_websocket(&mut stream).await;
        while stream.write_all(&[b'x'; 16 * KIB]).await.is_ok() {}
    })
    .await;
    fixture.add_ready_pod("p", floods);
    let client = WebSocketClient::connect(fixture.port).await;
    let mut socket = client.open().await;
    let charged = || fixture.activator.server.connections().response_bytes();
    wait_until(|| charged() >= CLIENT_SEND_BUFFER).await;
    socket.sending.send_reset(Reason::CANCEL);
    wait_until(|| charged() == 0).await;
    assert_no_state_left(&fixture).await;
}

/// The pod sends nothing more, so no further write shows that the client takes nothing.
#[tokio::test]
async fn a_last_word_that_a_client_does_not_take_is_charged() {
    let mut fixture = patient_fixture().await;
    let pod = start_pod_with(|mut stream, _| async move {
        accept_websocket(&mut stream).await;
        stream.write_all(b"bye").await.unwrap();
    })
    .await;
    fixture.add_ready_pod("p", pod);
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, fixture.port)).await.unwrap();
    let mut builder = h2::client::Builder::new();
    // No stream may carry anything to the client.
    builder.initial_window_size(0);
    let (sender, connection) = builder.handshake::<_, Bytes>(stream).await.unwrap();
    tokio::spawn(connection);
    wait_until(|| sender.is_extended_connect_protocol_enabled()).await;
    let mut socket = WebSocketClient(sender).open().await;
    let charged = || fixture.activator.server.connections().response_bytes();
    wait_until(|| charged() >= CLIENT_SEND_BUFFER).await;
    socket.sending.send_reset(Reason::CANCEL);
    wait_until(|| charged() == 0).await;
    assert_no_state_left(&fixture).await;
}
