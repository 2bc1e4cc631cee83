//! WebSockets to pods of HTTP/2.

use super::*;

/// Creates a fixture whose pods speak HTTP/2.
async fn http2_fixture() -> ActivatorFixture {
    let mut fixture = ActivatorFixture::new().await;
    fixture.apply_change(|table| {
        table.revisions.get_mut(&revision()).unwrap().protocol = AppProtocol::H2c;
    });
    fixture
}

/// Pod that responds to each request of HTTP/2 with this status code. After 200 it sends everything back, and a last
/// word.
#[derive(Clone)]
struct WebSocketHttp2Pod {
    status: u16,
    /// True if it announces that it takes extended CONNECT.
    takes_connect: bool,
    heads: mpsc::Sender<request::Parts>,
}

impl WebSocketHttp2Pod {
    async fn serve(self, stream: TcpStream) {
        let mut builder = h2::server::Builder::new();
        if self.takes_connect {
            builder.enable_connect_protocol();
        }
        let Ok(mut connection) = builder.handshake::<_, Bytes>(stream).await else { return };
        while let Some(Ok((request, mut respond))) = connection.accept().await {
            let (head, mut receiving) = request.into_parts();
            self.heads.send(head).await.unwrap();
            let response = Response::builder().status(self.status);
            let response = response.header("sec-websocket-protocol", "chat").body(()).unwrap();
            let mut sending = respond.send_response(response, false).unwrap();
            let is_refusal = self.status != 200;
            tokio::spawn(async move {
                if is_refusal {
                    sending.send_data("nope".into(), true).ok();
                    return;
                }
                while let Some(Ok(data)) = receiving.data().await {
                    receiving.flow_control().release_capacity(data.len()).ok();
                    sending.send_data(data, false).ok();
                }
                sending.send_data("bye".into(), true).ok();
            });
        }
    }
}

/// Starts a pod of HTTP/2. Returns its address and the heads of its requests.
async fn start_http2_pod(
    status: u16,
    takes_connect: bool,
) -> (SocketAddr, mpsc::Receiver<request::Parts>) {
    let (heads, received) = mpsc::channel(8);
    let pod = WebSocketHttp2Pod { status, takes_connect, heads };
    (start_pod_with(move |stream, _| pod.clone().serve(stream)).await, received)
}

#[tokio::test]
async fn a_pod_of_http2_gets_an_extended_connect() {
    let mut fixture = http2_fixture().await;
    let (pod, mut heads) = start_http2_pod(200, true).await;
    fixture.add_ready_pod("p", pod);
    let client = WebSocketClient::connect(fixture.port).await;
    let (mut one, mut two) = (client.open().await, client.open().await);
    for (socket, text) in [(&mut one, "first"), (&mut two, "second")] {
        assert_eq!(socket.field("sec-websocket-protocol"), Some("chat"));
        socket.send(text);
        socket.expect(text).await;
    }
    let head = heads.recv().await.unwrap();
    assert_eq!(head.method, Method::CONNECT);
    assert_eq!(head.extensions.get::<Protocol>().unwrap().as_str(), "websocket");
    assert_eq!(head.uri, CHAT);
    assert_eq!(head.headers["sec-websocket-version"], "13");
    assert_eq!(head.headers["x-forwarded-for"], "127.0.0.1");
    for absent in ["sec-websocket-key", "upgrade", "connection", "host"] {
        assert!(!head.headers.contains_key(absent), "{absent}");
    }
    one.finish();
    assert_eq!(one.read_rest().await, "bye");
    two.sending.send_reset(Reason::CANCEL);
    assert_no_state_left(&fixture).await;
}

#[tokio::test]
async fn a_pod_of_http2_may_refuse_a_handshake() {
    let cases = [(403, 403, "nope"), (202, 502, "status 202 in place of 101")];
    for (status, expected, text) in cases {
        let mut fixture = http2_fixture().await;
        let (pod, _heads) = start_http2_pod(status, true).await;
        fixture.add_ready_pod("p", pod);
        let client = WebSocketClient::connect(fixture.port).await;
        let mut refused = client.start(&[]).await.response().await;
        assert_eq!(refused.head.status().as_u16(), expected);
        assert!(refused.read_rest().await.contains(text), "{text}");
        assert_no_state_left(&fixture).await;
    }
}

/// Starts a pod of HTTP/2 that opens WebSockets and takes no more of them than its window. Returns its address, the
/// number of bytes that it has taken, and a receiver of the ends of its connections.
async fn start_stalled_http2_pod() -> (SocketAddr, Arc<AtomicUsize>, mpsc::Receiver<()>) {
    let (ended_tx, ended) = mpsc::channel(8);
    let taken = Arc::<AtomicUsize>::default();
    let counter = Arc::clone(&taken);
    let pod = start_pod_with(move |stream, _| {
        let (ended_tx, counter) = (ended_tx.clone(), Arc::clone(&counter));
        async move {
            let mut builder = h2::server::Builder::new();
            builder.enable_connect_protocol();
            let mut connection = builder.handshake::<_, Bytes>(stream).await.unwrap();
            while let Some(Ok((request, mut respond))) = connection.accept().await {
                let sending = respond.send_response(Response::new(()), false).unwrap();
                let mut receiving = request.into_body();
                let counter = Arc::clone(&counter);
                tokio::spawn(async move {
                    let _kept_open = sending;
                    while let Some(Ok(data)) = receiving.data().await {
                        counter.fetch_add(data.len(), Ordering::SeqCst);
                    }
                });
            }
            ended_tx.send(()).await.ok();
        }
    })
    .await;
    (pod, taken, ended)
}

/// hyper would keep the stream until the pod takes what was sent before.
#[tokio::test]
async fn a_reset_of_the_client_reaches_a_pod_of_http2_that_takes_no_bytes() {
    let mut fixture = http2_fixture().await;
    let (pod, taken, mut ended) = start_stalled_http2_pod().await;
    fixture.add_ready_pod("p", pod);
    let client = WebSocketClient::connect(fixture.port).await;
    let mut socket = client.open().await;
    socket.send(&"x".repeat(192 * KIB));
    wait_until(|| taken.load(Ordering::SeqCst) == DEFAULT_WINDOW).await;
    // The activator keeps about 40 KiB on the way to the pod. The rest waits at the client's side.
    wait_until(|| fixture.activator.server.connections().request_bytes() >= 64 * KIB).await;
    socket.sending.send_reset(Reason::CANCEL);
    let end = tokio::time::timeout(LONG, ended.recv()).await;
    assert_eq!(end.expect("the pod's connection ends in time"), Some(()));
    assert_no_state_left(&fixture).await;
}

/// The kernel accepts connections for a pod that is still starting. Nothing else counts such a request.
#[tokio::test]
async fn a_handshake_counts_as_waiting_while_a_pod_is_late_with_its_settings() {
    let mut fixture = http2_fixture().await;
    let (prefaces_tx, mut prefaces) = mpsc::channel(1);
    let silent = start_pod_with(move |mut stream, _| {
        let prefaces_tx = prefaces_tx.clone();
        async move {
            stream.read_exact(&mut [0; 24]).await.unwrap();
            prefaces_tx.send(()).await.unwrap();
            std::future::pending::<()>().await;
        }
    })
    .await;
    fixture.add_ready_pod("p", silent);
    let client = WebSocketClient::connect(fixture.port).await;
    let clock = PausedClock::start_paused();
    let call = client.start(&[]).await;
    prefaces.recv().await.unwrap();
    assert_eq!(fixture.waiting_totals(), (0, 0), "it has got a pod at once");
    clock.advance(Duration::from_secs(2)).await;
    clock.until(|| fixture.waiting_totals() == (1, 0)).await;
    drop(call);
    clock.until(|| fixture.waiting_totals() == (1, 1)).await;
}

/// Counts of bytes are also dropped with the last body of a connection. Here another WebSocket stays open.
#[tokio::test]
async fn bytes_of_a_websocket_that_was_reset_are_no_longer_charged() {
    let mut fixture = http2_fixture().await;
    let (pod, taken, _ended) = start_stalled_http2_pod().await;
    fixture.add_ready_pod("p", pod);
    let client = WebSocketClient::connect(fixture.port).await;
    let (_other, mut socket) = (client.open().await, client.open().await);
    let piece = "x".repeat(KIB);
    for _ in 0..200 {
        socket.send(&piece);
    }
    let charged = || fixture.activator.server.connections().request_bytes();
    // The activator keeps about 40 KiB on the way to the pod. The rest waits at the client's side, in small frames.
    wait_until(|| taken.load(Ordering::SeqCst) == DEFAULT_WINDOW && charged() >= 80 * KIB).await;
    socket.sending.send_reset(Reason::CANCEL);
    wait_until(|| charged() == 0).await;
}

/// A client of HTTP/1.1 opens its WebSocket at such a pod in the same way.
#[tokio::test]
async fn a_pod_without_extended_connect_gets_the_handshake_of_http1() {
    for speaks_http2 in [true, false] {
        let mut fixture = http2_fixture().await;
        let (heads, mut http2_heads) = mpsc::channel(8);
        let http2 = WebSocketHttp2Pod { status: 200, takes_connect: false, heads };
        let pod = start_pod_with(move |mut stream, _| {
            let http2 = http2.clone();
            async move {
                let mut first = [0; 3];
                stream.peek(&mut first).await.unwrap();
                match first == *b"PRI" {
                    true if speaks_http2 => http2.serve(stream).await,
                    true => drop(stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await),
                    false => {
                        accept_websocket(&mut stream).await;
                        echo_until_end(stream).await;
                    }
                }
            }
        })
        .await;
        fixture.add_ready_pod("p", pod);
        let client = WebSocketClient::connect(fixture.port).await;
        let mut socket = client.open().await;
        socket.send("hello");
        socket.expect("hello").await;
        assert!(http2_heads.try_recv().is_err(), "no request in HTTP/2");
    }
}
