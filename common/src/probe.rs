//! Shell: one attempt of a probe over the network, made as the kubelet makes it.

use std::{
    io,
    net::SocketAddr,
    pin::pin,
    task::{Context, Poll},
    time::Duration,
};

use http_body_util::Empty;
use hyper::{Request, Uri, body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tonic::{
    client::Grpc,
    codegen::{BoxFuture, Service},
    transport::Endpoint,
};

use crate::wire::ProbeHandler;

mod unverified_tls;

/// User-Agent with the prefix of the kubelet's own, by which applications and Knative tell probes from requests
/// (knative/networking `pkg/http/header/consts.go`, `KubeProbeUAPrefix`).
const USER_AGENT: &str = "kube-probe/rouse";

/// Method of opening a connection to a pod: the agent and the local node each have their own.
pub trait ProbeConnector: Clone + Send + Sync + 'static {
    /// Opens a connection to `at`. `timeout` bounds the whole attempt.
    fn connect(
        &self,
        at: SocketAddr,
        timeout: Duration,
    ) -> impl Future<Output = io::Result<TcpStream>> + Send;
}

/// Makes one attempt, which fails after `timeout`. `Err` states the reason in a few words.
pub async fn run_probe(
    how: &ProbeHandler,
    address: SocketAddr,
    timeout: Duration,
    connector: &impl ProbeConnector,
) -> Result<(), String> {
    let target = ProbeTarget { address, timeout, connector: connector.clone() };
    let probe = async {
        match how {
            // Nothing to ask over the network: the agent learns of listeners from the eBPF programs.
            ProbeHandler::Listen => Ok(()),
            ProbeHandler::Tcp => target.connect().await.map(drop),
            ProbeHandler::Http { path, headers, host, https } => {
                let http_probe = HttpProbe { path, headers, host, target };
                if *https {
                    http_probe.send_over_tls().await
                } else {
                    http_probe.send_without_tls().await
                }
            }
            ProbeHandler::Grpc { service } => probe_grpc(target, service).await,
        }
    };
    match tokio::time::timeout(timeout, probe).await {
        Ok(result) => result,
        Err(_elapsed) => Err(format!("no response from {address} within {timeout:?}")),
    }
}

/// Address of the probed pod, time limit, and method of connecting.
#[derive(Clone, Debug)]
struct ProbeTarget<W> {
    address: SocketAddr,
    timeout: Duration,
    connector: W,
}

impl<W: ProbeConnector> ProbeTarget<W> {
    async fn connect(&self) -> Result<TcpStream, String> {
        let Self { address, timeout, connector } = self;
        let failed = |error: io::Error| format!("cannot connect to {address}: {error}");
        let stream = connector.connect(*address, *timeout).await.map_err(failed)?;
        // A probe leaves no TIME_WAIT behind, however often it is made.
        stream.set_zero_linger().map_err(failed)?;
        Ok(stream)
    }
}

/// Connector for the gRPC channel of a health check.
impl<W: ProbeConnector> Service<Uri> for ProbeTarget<W> {
    type Response = TokioIo<TcpStream>;
    type Error = String;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), String>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let target = self.clone();
        Box::pin(async move { target.connect().await.map(TokioIo::new) })
    }
}

struct HttpProbe<'a, W> {
    path: &'a str,
    headers: &'a [(String, String)],
    host: &'a str,
    target: ProbeTarget<W>,
}

impl<W: ProbeConnector> HttpProbe<'_, W> {
    async fn send_without_tls(&self) -> Result<(), String> {
        self.send_over(TokioIo::new(self.target.connect().await?)).await
    }

    async fn send_over_tls(&self) -> Result<(), String> {
        let stream = self.target.connect().await?;
        // The server name is the probe's host, or else the pod's address. A `Host` header does not change it.
        let host = if self.host.is_empty() {
            self.target.address.ip().to_string()
        } else {
            self.host.to_owned()
        };
        self.send_over(TokioIo::new(unverified_tls::connect_unverified(stream, host).await?)).await
    }

    async fn send_over<T>(&self, io: TokioIo<T>) -> Result<(), String>
    where
        TokioIo<T>: hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static,
    {
        let failed = |error: hyper::Error| format!("GET {} failed: {error}", self.path);
        let (mut sender, connection) = http1::handshake(io).await.map_err(failed)?;
        let mut exchange = pin!(sender.send_request(self.build_request()?));
        // `connection` moves the bytes and may end in the same poll in which the response is ready. So its end is no
        // failure: the exchange still has the response.
        let response = tokio::select! {
            response = &mut exchange => response,
            _ended = connection => exchange.await,
        };
        let response = response.map_err(failed)?;
        // Redirects count as success and are not followed.
        match response.status().as_u16() {
            200..=399 => Ok(()),
            status => Err(format!("GET {} answered {status}", self.path)),
        }
    }

    /// Builds the request of an HTTP probe. An error is the reason for which it cannot be sent.
    fn build_request(&self) -> Result<Request<Empty<Bytes>>, String> {
        let path = if self.path.starts_with('/') {
            self.path.to_owned()
        } else {
            format!("/{}", self.path)
        };
        let uri: Uri = path.parse().map_err(|_bad| format!("{path:?} is not a path"))?;
        let mut request = Request::get(uri);
        let names = |name: &str| self.headers.iter().any(|(key, _)| key.eq_ignore_ascii_case(name));
        if !names("host") {
            let host = if self.host.is_empty() {
                self.target.address.to_string()
            } else {
                self.host.to_owned()
            };
            request = request.header("host", host);
        }
        if !names("user-agent") {
            request = request.header("user-agent", USER_AGENT);
        }
        // The kubelet's own headers: any response will do, and the connection ends with it.
        request = request.header("accept", "*/*").header("connection", "close");
        for (name, value) in self.headers {
            request = request.header(name, value);
        }
        request.body(Empty::new()).map_err(|error| format!("headers make no request: {error}"))
    }
}

/// Request `grpc.health.v1.HealthCheckRequest` of the gRPC health protocol.
#[derive(Clone, PartialEq, prost::Message)]
struct HealthRequest {
    #[prost(string, tag = "1")]
    service: String,
}

/// Response `grpc.health.v1.HealthCheckResponse`; status 1 is SERVING.
#[derive(Clone, PartialEq, prost::Message)]
struct HealthResponse {
    #[prost(int32, tag = "1")]
    status: i32,
}

const SERVING: i32 = 1;

async fn probe_grpc(target: ProbeTarget<impl ProbeConnector>, service: &str) -> Result<(), String> {
    let (at, timeout) = (target.address, target.timeout);
    let failed = |error: &dyn std::error::Error| {
        format!("health check at {at} failed: {}", crate::link::error_chain(error))
    };
    let endpoint = Endpoint::from_shared(format!("http://{at}")).map_err(|error| failed(&error))?;
    let endpoint = endpoint.connect_timeout(timeout).user_agent(USER_AGENT);
    let endpoint = endpoint.map_err(|error| failed(&error))?;
    let channel = endpoint.connect_with_connector(target).await;
    // The call sets no deadline of its own: `run_probe` bounds the attempt as a whole.
    let mut client = Grpc::new(channel.map_err(|error| failed(&error))?);
    client.ready().await.map_err(|error| failed(&error))?;
    let codec = tonic_prost::ProstCodec::<HealthRequest, HealthResponse>::default();
    let path = http::uri::PathAndQuery::from_static("/grpc.health.v1.Health/Check");
    let request = tonic::Request::new(HealthRequest { service: service.to_owned() });
    let response = client.unary(request, path, codec).await;
    match response.map_err(|status| failed(&status))?.into_inner().status {
        SERVING => Ok(()),
        other => Err(format!("health check at {at} answered status {other}, not SERVING")),
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(5);

    /// Connects with an ordinary TCP connect.
    #[derive(Clone)]
    struct PlainConnectorFixture;

    impl ProbeConnector for PlainConnectorFixture {
        async fn connect(&self, at: SocketAddr, _: Duration) -> io::Result<TcpStream> {
            TcpStream::connect(at).await
        }
    }

    async fn run_plain_probe(at: SocketAddr, how: ProbeHandler) -> Result<(), String> {
        run_probe(&how, at, TIMEOUT, &PlainConnectorFixture).await
    }

    fn http(path: &str, headers: &[(&str, &str)]) -> ProbeHandler {
        let own = |&(name, value): &(&str, &str)| (name.to_owned(), value.to_owned());
        let headers = headers.iter().map(own).collect();
        ProbeHandler::Http { path: path.into(), headers, host: String::new(), https: false }
    }

    /// Serves one connection with `response` and returns the request head that it received.
    async fn serve_once(response: &'static str) -> (SocketAddr, tokio::task::JoinHandle<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let at = listener.local_addr().expect("bound");
        let request = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a probe");
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.expect("a head"));
            }
            stream.write_all(response.as_bytes()).await.expect("it reads");
            String::from_utf8(head).expect("text")
        });
        (at, request)
    }

    #[tokio::test]
    async fn an_http_probe_names_itself_and_its_host() {
        let (at, request) = serve_once("HTTP/1.1 204 No Content\r\n\r\n").await;
        let result =
            run_probe(&http("ready?deep=1", &[("x-a", "b")]), at, TIMEOUT, &PlainConnectorFixture)
                .await;
        assert_eq!(result, Ok(()));
        let request = request.await.expect("no panic");
        assert!(request.starts_with("GET /ready?deep=1 HTTP/1.1\r\n"), "{request}");
        let host = format!("host: {at}");
        for line in [host.as_str(), "user-agent: kube-probe/rouse", "x-a: b"] {
            assert!(request.contains(line), "{line} in {request}");
        }
    }

    #[tokio::test]
    async fn a_header_of_the_probe_replaces_our_own() {
        let (at, request) = serve_once("HTTP/1.1 302 Found\r\ncontent-length: 0\r\n\r\n").await;
        let own = [("Host", "hello.local"), ("User-Agent", "mine")];
        assert_eq!(run_probe(&http("/", &own), at, TIMEOUT, &PlainConnectorFixture).await, Ok(()));
        let request = request.await.expect("no panic");
        assert!(
            request.contains("host: hello.local\r\n") && request.contains("user-agent: mine\r\n")
        );
        assert_eq!(request.matches("host:").count(), 1, "{request}");
    }

    #[tokio::test]
    async fn an_answer_from_400_is_a_failure_in_words() {
        let (at, _asked) = serve_once("HTTP/1.1 503 Busy\r\nconnection: close\r\n\r\nno").await;
        let result = run_plain_probe(at, http("/ready", &[])).await;
        assert_eq!(result, Err("GET /ready answered 503".into()));
    }

    #[tokio::test]
    async fn a_tcp_probe_needs_a_listener() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let at = listener.local_addr().expect("bound");
        assert_eq!(run_plain_probe(at, ProbeHandler::Tcp).await, Ok(()));
        drop(listener);
        let failure = run_plain_probe(at, ProbeHandler::Tcp).await.expect_err("nobody listens");
        assert!(failure.starts_with(&format!("cannot connect to {at}")), "{failure}");
    }

    #[tokio::test]
    async fn silence_is_a_failure_after_the_timeout() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let at = listener.local_addr().expect("bound");
        let timeout = Duration::from_millis(20);
        assert_eq!(
            run_probe(&http("/", &[]), at, timeout, &PlainConnectorFixture).await,
            Err(format!("no response from {at} within 20ms"))
        );
    }

    /// A gRPC server without routes answers every call with UNIMPLEMENTED, which fails the probe.
    #[tokio::test]
    async fn a_grpc_probe_needs_the_health_service() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let at = listener.local_addr().expect("bound");
        let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
        let routes = tonic::service::Routes::default();
        let server = tonic::transport::Server::builder().add_routes(routes);
        tokio::spawn(server.serve_with_incoming(incoming));
        let how = ProbeHandler::Grpc { service: String::new() };
        let failed = run_plain_probe(at, how).await.expect_err("there is none");
        assert!(failed.starts_with(&format!("health check at {at} failed")), "{failed}");
    }

    /// Checks both statuses of `grpc.health.v1` (SERVING, NOT_SERVING) against a hand-written service.
    #[tokio::test]
    async fn a_grpc_probe_passes_when_the_service_serves() {
        use axum::{body::Body, http::HeaderMap, response::Response, routing::post};
        // A frame without compression: length 2, field 1, varint.
        let health = |status: u8| {
            post(move || async move {
                let mut trailers = HeaderMap::new();
                trailers.insert("grpc-status", "0".parse().expect("a value"));
                let frame = Bytes::from(vec![0, 0, 0, 0, 2, 8, status]);
                let body = http_body_util::BodyExt::with_trailers(
                    http_body_util::Full::new(frame),
                    std::future::ready(Some(Ok::<_, std::convert::Infallible>(trailers))),
                );
                Response::builder()
                    .header("content-type", "application/grpc")
                    .body(Body::new(body))
                    .expect("a response")
            })
        };
        for (status, want) in [(1, true), (2, false)] {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
            let at = listener.local_addr().expect("bound");
            let app = axum::Router::new().route("/grpc.health.v1.Health/Check", health(status));
            let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
            let server = tonic::transport::Server::builder().add_routes(app.into());
            tokio::spawn(server.serve_with_incoming(incoming));
            let how = ProbeHandler::Grpc { service: "main".into() };
            let result = run_plain_probe(at, how).await;
            assert_eq!(result.is_ok(), want, "{result:?}");
        }
    }
}
