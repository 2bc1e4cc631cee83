//! Shell: a hyper server with HTTP/1.1 and HTTP/2 with prior knowledge on one port, and WebSockets by tungstenite.

use std::convert::Infallible;

use anyhow::Result;
use futures::{SinkExt as _, StreamExt as _, stream};
use http_body_util::{BodyExt, Empty, Full, StreamBody, combinators::BoxBody};
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Frame, Incoming},
    header::{CONNECTION, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, UPGRADE},
    service::service_fn,
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use tokio::net::TcpListener;
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{handshake::derive_accept_key, protocol::Role},
};

use crate::request_record::{self, RecordedRequest};

type ServerBody = BoxBody<Bytes, Infallible>;

pub(crate) async fn serve(listener: TcpListener) -> Result<()> {
    loop {
        let (stream, _) = listener.accept().await?;
        tokio::spawn(async move {
            stream.set_nodelay(true)?;
            let server = auto::Builder::new(TokioExecutor::new());
            let io = TokioIo::new(stream);
            // A request begins when the service is called, even if its future is dropped before its end.
            let service = service_fn(|request| respond(request, RecordedRequest::begin()));
            server.serve_connection_with_upgrades(io, service).await
        });
    }
}

async fn respond(
    request: Request<Incoming>,
    recorded: RecordedRequest,
) -> Result<Response<ServerBody>, hyper::Error> {
    let body = match request.uri().path() {
        // Over HTTP/2, hyper leaves HEAD to the application.
        _ if request.method() == Method::HEAD => Empty::new().boxed(),
        "/hello" => full_body("hello\n"),
        "/empty" => return Ok(status_response(StatusCode::NO_CONTENT)),
        "/chunks" => chunked_body(),
        "/big" => full_body(vec![b'x'; 1 << 20]),
        "/echo" => full_body(request.into_body().collect().await?.to_bytes()),
        "/early" => return Ok(status_response(StatusCode::PAYLOAD_TOO_LARGE)),
        "/wait" => {
            request_record::wait_for_gate().await;
            full_body("waited\n")
        }
        "/websocket" => return Ok(echo_websocket(request, recorded)),
        _ => {
            // A proxy that still sends the body when the server closes may see the close before the response, and
            // respond itself.
            request.into_body().collect().await?;
            return Ok(status_response(StatusCode::NOT_FOUND));
        }
    };
    Ok(Response::new(body))
}

fn full_body(bytes: impl Into<Bytes>) -> ServerBody {
    Full::new(bytes.into()).boxed()
}

fn status_response(status: StatusCode) -> Response<ServerBody> {
    let mut response = Response::new(Empty::new().boxed());
    *response.status_mut() = status;
    response
}

/// A body of unknown length, which is sent in chunks.
fn chunked_body() -> ServerBody {
    let chunk = |_| async {
        tokio::task::yield_now().await;
        Ok(Frame::data(Bytes::from_static(b"some words\n")))
    };
    BodyExt::boxed(StreamBody::new(stream::iter(0..5).then(chunk)))
}

/// Echoes messages of a WebSocket until the client closes it, which ends the request.
fn echo_websocket(
    mut request: Request<Incoming>,
    recorded: RecordedRequest,
) -> Response<ServerBody> {
    let Some(key) = request.headers().get(SEC_WEBSOCKET_KEY) else {
        return status_response(StatusCode::BAD_REQUEST);
    };
    let accept = derive_accept_key(key.as_bytes());
    let upgrade = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        let _until_closed = recorded;
        let Ok(stream) = upgrade.await else { return };
        let mut socket =
            WebSocketStream::from_raw_socket(TokioIo::new(stream), Role::Server, None).await;
        while let Some(Ok(message)) = socket.next().await {
            // tungstenite sends the close frame's response when the application reads on.
            if message.is_text() && socket.send(message).await.is_err() {
                return;
            }
        }
    });
    let mut response = status_response(StatusCode::SWITCHING_PROTOCOLS);
    let headers = response.headers_mut();
    headers.insert(UPGRADE, "websocket".parse().expect("a word"));
    headers.insert(CONNECTION, "Upgrade".parse().expect("a word"));
    headers.insert(SEC_WEBSOCKET_ACCEPT, accept.parse().expect("base64"));
    response
}
