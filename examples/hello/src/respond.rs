//! Shell: handles one request and builds its response.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::{
    HeaderMap, Request, Response, StatusCode,
    body::{Body as HttpBody, Frame, Incoming, SizeHint},
    header::{CONNECTION, CONTENT_TYPE, HeaderName, HeaderValue, UPGRADE},
};
use hyper_util::rt::TokioIo;

use crate::{
    app::{HelloApp, sleep},
    config::HelloConfig,
    request_counts::InFlightGuard,
    requested_response::{HelloPage, RequestedResponse},
};

/// Body of any type; the server has one thread, so it need not be `Send`.
type HelloBody = Pin<Box<dyn HttpBody<Data = Bytes, Error = hyper::Error>>>;

/// Piece of a generated body, 1 KiB long.
const CHUNK: &[u8] = &[b'.'; 1024];

/// Responds to one request from `peer`; an error ends the connection without a response.
pub(crate) async fn respond(
    request: Request<Incoming>,
    peer: SocketAddr,
    app: Rc<HelloApp>,
) -> io::Result<Response<HelloBody>> {
    let guard = app.counts.begin_request();
    let requested = match RequestedResponse::parse(request.uri().path(), request.uri().query()) {
        Ok(requested) => requested,
        Err(reason) => {
            return Ok(text_response(StatusCode::BAD_REQUEST, format!("{reason}\n"), guard));
        }
    };
    // Before the sleep: a test counts a request as arrived even if the process is killed meanwhile.
    requested.id.map_or(Ok(()), |id| app.ids.append(id))?;
    sleep(requested.sleep).await;
    if let Some(code) = requested.exit {
        println!("hello: a request asked for exit code {code}");
        std::process::exit(code.into());
    }
    if requested.abort {
        return Err(io::Error::other("the request asked for an abort"));
    }
    let mut response = match (requested.chunks, requested.bytes) {
        (Some(chunks), _) => guarded_response(GeneratedBody::in_chunks(chunks), guard),
        (None, Some(bytes)) => guarded_response(GeneratedBody::with_length(bytes), guard),
        (None, None) => page_response(request, &requested, peer, &app, guard),
    };
    // A page's own error or 101 must not be overwritten by the query's status.
    if response.status() == StatusCode::OK {
        *response.status_mut() = StatusCode::from_u16(requested.status).unwrap_or(StatusCode::OK);
    }
    add_identity_headers(response.headers_mut(), peer, &app);
    if requested.close {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    Ok(response)
}

/// Adds headers that name the pod and its peer; load generators recognise the direct path by them.
fn add_identity_headers(headers: &mut HeaderMap, peer: SocketAddr, app: &HelloApp) {
    let mut put = |name: &'static str, value: String| {
        if let Ok(value) = HeaderValue::try_from(value) {
            headers.insert(name, value);
        }
    };
    put("x-pod", app.config.pod.clone());
    // A dual-stack socket shows IPv4 peers as mapped IPv6 addresses, which no client would recognise.
    put("x-peer", peer.ip().to_canonical().to_string());
    put("x-started-us", app.started_us.to_string());
    put("x-listening-us", app.listening_us.to_string());
}

/// Returns the response that the parameters of the request ask for.
fn page_response(
    request: Request<Incoming>,
    requested: &RequestedResponse,
    peer: SocketAddr,
    app: &HelloApp,
    guard: InFlightGuard,
) -> Response<HelloBody> {
    match requested.page {
        HelloPage::Hello => {
            let peer = peer.ip().to_canonical();
            text_response(
                StatusCode::OK,
                format!("Hello from {} to {peer}\n", app.config.pod),
                guard,
            )
        }
        HelloPage::Counts => {
            text_response(StatusCode::OK, app.counts.to_json(&app.config.pod) + "\n", guard)
        }
        HelloPage::Headers => text_response(StatusCode::OK, list_headers(request.headers()), guard),
        HelloPage::Env => text_response(StatusCode::OK, list_environment(), guard),
        HelloPage::Protocol => {
            text_response(StatusCode::OK, format!("{:?}\n", request.version()), guard)
        }
        HelloPage::Files => match read_file(&app.config, request.uri().path()) {
            Ok(content) => text_response(StatusCode::OK, content, guard),
            Err(reason) => text_response(StatusCode::NOT_FOUND, reason, guard),
        },
        // Without a value (`never`) the pod stays unready.
        HelloPage::Ready => match app.config.ready_after {
            Some(wait) if app.started.elapsed() >= wait => {
                text_response(StatusCode::OK, "ready\n".into(), guard)
            }
            _ => text_response(StatusCode::SERVICE_UNAVAILABLE, "not ready yet\n".into(), guard),
        },
        HelloPage::Echo => guarded_response(request.into_body(), guard),
        HelloPage::Upgrade => upgrade_response(request, guard),
        HelloPage::Health => health_response(guard),
    }
}

/// gRPC response to `grpc.health.v1.Health/Check`: one message, whose field 1 is `SERVING` (1), and status 0.
fn health_response(guard: InFlightGuard) -> Response<HelloBody> {
    // gRPC framing: a flag byte (uncompressed), the length in four bytes, and the protobuf message.
    let message = Bytes::from_static(&[0, 0, 0, 0, 2, 0x08, 1]);
    let end = (HeaderName::from_static("grpc-status"), HeaderValue::from_static("0"));
    let trailers = std::future::ready(Some(Ok(HeaderMap::from_iter([end]))));
    let body = Full::new(message).map_err(|never| match never {}).with_trailers(trailers);
    let mut response = guarded_response(body, guard);
    let grpc = HeaderValue::from_static("application/grpc");
    response.headers_mut().insert(CONTENT_TYPE, grpc);
    response
}

/// Reads a file of the folder `HELLO_FILES`, for tests of volumes; refuses paths outside the folder.
fn read_file(config: &HelloConfig, path: &str) -> Result<String, String> {
    let folder = config.files.as_ref().ok_or("HELLO_FILES names no folder\n")?;
    let name = path.trim_start_matches("/files/");
    // No separators and no `..`: the name cannot leave the folder.
    if name.starts_with('.') || name.contains('/') {
        return Err(format!("{name}: must be the name of a file\n"));
    }
    let file = folder.join(name);
    std::fs::read_to_string(&file).map_err(|error| format!("{}: {error}\n", file.display()))
}

/// Switches to the requested protocol with a 101, and echoes all bytes until the client ends.
fn upgrade_response(request: Request<Incoming>, guard: InFlightGuard) -> Response<HelloBody> {
    let Some(protocol) = request.headers().get(UPGRADE).cloned() else {
        return text_response(
            StatusCode::UPGRADE_REQUIRED,
            "ask with an Upgrade header\n".into(),
            guard,
        );
    };
    tokio::task::spawn_local(async move {
        // The request counts as in flight as long as the upgraded connection lasts.
        let _guard = guard;
        let Ok(upgraded) = hyper::upgrade::on(request).await else { return };
        let (mut reader, mut writer) = tokio::io::split(TokioIo::new(upgraded));
        let _ = tokio::io::copy(&mut reader, &mut writer).await;
        let _ = tokio::io::AsyncWriteExt::shutdown(&mut writer).await;
    });
    let mut response = Response::new(full_body(""));
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    response.headers_mut().insert(UPGRADE, protocol);
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("upgrade"));
    response
}

fn list_headers(headers: &HeaderMap) -> String {
    let line = |(name, value): (&HeaderName, &HeaderValue)| {
        format!("{name}: {}\n", String::from_utf8_lossy(value.as_bytes()))
    };
    headers.iter().map(line).collect()
}

/// Arguments, working directory and environment of this process, for tests of the runtime contract.
fn list_environment() -> String {
    let mut lines = vec![format!("args={:?}", std::env::args().collect::<Vec<_>>())];
    lines.push(format!("cwd={}", std::env::current_dir().unwrap_or_default().display()));
    lines.extend(std::env::vars().map(|(name, value)| format!("{name}={value}")));
    lines.join("\n") + "\n"
}

fn text_response(status: StatusCode, body: String, guard: InFlightGuard) -> Response<HelloBody> {
    let mut response = guarded_response(full_body(body), guard);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    response
}

fn full_body(body: impl Into<Bytes>) -> HelloBody {
    Box::pin(Full::new(body.into()).map_err(|never| match never {}))
}

/// Response whose request counts as in flight until the body's last byte has left the application.
fn guarded_response<B>(body: B, guard: InFlightGuard) -> Response<HelloBody>
where
    B: HttpBody<Data = Bytes, Error = hyper::Error> + Unpin + 'static,
{
    Response::new(Box::pin(GuardedBody { body, _guard: guard }))
}

/// Body that keeps its request's guard until it is dropped.
#[derive(Debug)]
struct GuardedBody<B> {
    body: B,
    _guard: InFlightGuard,
}

impl<B: HttpBody + Unpin> HttpBody for GuardedBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Generated body of `bytes_left` bytes, with an announced length or in chunks with a trailer.
#[derive(Debug)]
struct GeneratedBody {
    bytes_left: u64,
    has_length: bool,
    trailer: bool,
}

impl GeneratedBody {
    fn with_length(bytes_left: u64) -> Self {
        Self { bytes_left, has_length: true, trailer: false }
    }

    fn in_chunks(chunks: u64) -> Self {
        Self { bytes_left: chunks * CHUNK.len() as u64, has_length: false, trailer: true }
    }
}

impl HttpBody for GeneratedBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        if self.bytes_left > 0 {
            let size = self.bytes_left.min(CHUNK.len() as u64);
            self.bytes_left -= size;
            let piece = Bytes::from_static(CHUNK).slice(..size as usize);
            return Poll::Ready(Some(Ok(Frame::data(piece))));
        }
        if std::mem::take(&mut self.trailer) {
            let end = (HeaderName::from_static("x-end"), HeaderValue::from_static("yes"));
            return Poll::Ready(Some(Ok(Frame::trailers(HeaderMap::from_iter([end])))));
        }
        Poll::Ready(None)
    }

    fn size_hint(&self) -> SizeHint {
        if self.has_length { SizeHint::with_exact(self.bytes_left) } else { SizeHint::default() }
    }
}
