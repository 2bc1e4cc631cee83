//! Shell: one connection to a pod, in HTTP/1.1, HTTP/2 or raw TCP, and the exchanges over it.

use std::{
    io,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use common::wire::AppProtocol;
use http::{Request, Response};
use http_body::{Body as _, Frame, SizeHint};
use hyper::{body::Incoming, upgrade::OnUpgrade};
use tokio::net::TcpStream;

use crate::{
    pods::{
        connection_pool::{PoolReservation, PoolableConnection},
        exchange_error::{PodError, PodSendError},
        http1_connection::{
            Http1PodConnection, Http1ResponseBody, InterimResponseSink, READ_CHUNK_BYTES,
        },
        http2_connection::{
            Http2PodConnection, Http2PodStream, MAX_POD_STREAMS, POD_STREAM_WINDOW,
        },
        request_body::PodRequestBody,
        upgraded_pod::UpgradedPod,
    },
    tcp_socket,
};

/// Connection of a request: one of its own, or one use of a shared one.
#[derive(Debug)]
pub enum PodConnection {
    /// HTTP/1.1 connection, which carries one request at a time.
    Http1(Box<Http1PodConnection>),
    /// HTTP/2 connection, as it is kept in the pool.
    Http2(Http2PodConnection),
    /// One stream of an HTTP/2 connection, as a request uses it.
    Http2Stream(Http2PodStream),
    /// Connection that carries the bytes of one client, whatever their protocol is.
    Tcp(TcpStream),
}

/// Body of a pod's response, with the connection that it comes over.
#[derive(Debug)]
pub enum PodResponseBody {
    /// Body of a response over HTTP/1.1.
    Http1(Box<Http1ResponseBody>),
    /// Body of a response over HTTP/2, with the stream's use of the connection.
    Http2(Incoming, Http2PodStream),
    /// Body that is complete, or was given up.
    Ended,
}

impl PodResponseBody {
    /// Maximum number of its bytes that may be buffered here before the client asks for them.
    pub fn max_buffered(&self) -> usize {
        match self {
            Self::Http1(_) => READ_CHUNK_BYTES,
            Self::Http2(..) => POD_STREAM_WINDOW as usize,
            Self::Ended => 0,
        }
    }
}

impl PodConnection {
    /// Opens HTTP or raw TCP over a connected socket.
    pub async fn open(
        stream: TcpStream,
        protocol: AppProtocol,
        max_idle: Duration,
    ) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        tcp_socket::keep_alive(&stream)?;
        match protocol {
            AppProtocol::Http1 => {
                Ok(Self::Http1(Box::new(Http1PodConnection::new(stream, max_idle))))
            }
            AppProtocol::H2c => Ok(Self::Http2(Http2PodConnection::open(stream, max_idle).await?)),
            AppProtocol::Tcp => {
                tcp_socket::keep_urgent_inline(&stream)?;
                Ok(Self::Tcp(stream))
            }
        }
    }

    /// Opens an HTTP/2 connection for one WebSocket. `None`: the pod does not take extended CONNECT (RFC 8441 §3), or
    /// speaks no HTTP/2.
    pub async fn open_for_websocket(stream: TcpStream) -> Option<Self> {
        Http2PodConnection::open_for_websocket(stream).await.map(Self::Http2)
    }

    /// Sends a request and waits for the head of its final response. Dropping the future ends the exchange.
    pub async fn send(
        self,
        request: Request<PodRequestBody>,
        interim_sink: &mut (dyn InterimResponseSink + Send),
    ) -> Result<Response<PodResponseBody>, PodSendError> {
        match self {
            Self::Http1(single) => {
                let response = single.send(request, interim_sink).await?;
                Ok(response.map(|body| PodResponseBody::Http1(Box::new(body))))
            }
            Self::Http2(shared) => send_over_http2(Http2PodStream::start(shared), request).await,
            Self::Http2Stream(stream) => send_over_http2(stream, request).await,
            Self::Tcp(_) => {
                let cause = PodError::Io(io::Error::other("no HTTP over raw TCP"));
                Err(PodSendError { resendable: None, cause: cause.into() })
            }
        }
    }

    /// Returns true if it can carry another request and has not been idle for too long.
    pub fn is_reusable(&self) -> bool {
        match self {
            Self::Http1(single) => single.is_reusable(),
            Self::Http2(shared) => shared.is_reusable(),
            Self::Http2Stream(_) | Self::Tcp(_) => false,
        }
    }

    /// Returns true if it speaks HTTP/2.
    pub fn is_http2(&self) -> bool {
        matches!(self, Self::Http2(_) | Self::Http2Stream(_))
    }

    /// Returns the TCP connection itself. `None`: it speaks HTTP.
    pub fn into_raw_tcp(self) -> Option<TcpStream> {
        if let Self::Tcp(stream) = self { Some(stream) } else { None }
    }
}

impl PodResponseBody {
    /// Polls for the next frame of the body.
    pub fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, PodError>>> {
        match self {
            Self::Http1(body) => body.poll_frame(cx),
            Self::Http2(body, _) => {
                let next = std::pin::Pin::new(body).poll_frame(cx);
                next.map(|next| next.map(|frame| frame.map_err(PodError::Http2)))
            }
            Self::Ended => Poll::Ready(None),
        }
    }

    /// Returns true if the whole body was read.
    pub fn is_end(&self) -> bool {
        match self {
            Self::Http1(body) => body.is_end(),
            Self::Http2(body, _) => body.is_end_stream(),
            Self::Ended => true,
        }
    }

    /// Size of the rest of the body, as far as it is known.
    pub fn size_hint(&self) -> SizeHint {
        match self {
            Self::Http1(body) => body.size_hint(),
            Self::Http2(body, _) => body.size_hint(),
            Self::Ended => SizeHint::with_exact(0),
        }
    }

    /// Passes on that the client has closed its sending half. Returns false if the pod cannot be notified.
    pub fn forward_fin(&mut self, cx: &mut Context<'_>) -> bool {
        if let Self::Http1(body) = self { body.forward_fin(cx) } else { false }
    }

    /// Ends the exchange. Returns its connection, if it is the request's own and may serve another request.
    pub fn take_reusable_connection(&mut self) -> Option<PodConnection> {
        match std::mem::replace(self, Self::Ended) {
            Self::Http1(body) => body.into_reusable().map(|it| PodConnection::Http1(Box::new(it))),
            Self::Http2(..) | Self::Ended => None,
        }
    }

    /// Leaves HTTP after a switch of protocols, or after an extended CONNECT, whose response has `upgrade`. `None`: the
    /// response allows neither.
    pub fn into_upgraded(self, upgrade: Option<OnUpgrade>) -> Option<UpgradedPod> {
        match (self, upgrade) {
            (Self::Http1(body), None) => body.into_upgraded().map(UpgradedPod::Http1),
            (Self::Http2(_, stream), Some(upgrade)) => Some(UpgradedPod::Http2(upgrade, stream)),
            (Self::Http1(_), Some(_)) | (Self::Http2(..), None) | (Self::Ended, _) => None,
        }
    }
}

impl PoolableConnection for PodConnection {
    fn reserve(&self) -> PoolReservation<Self> {
        match self {
            it if !it.is_reusable() => PoolReservation::Unusable,
            Self::Http1(_) => PoolReservation::Exclusive,
            Self::Http2(it) if it.active_streams() >= MAX_POD_STREAMS => PoolReservation::Busy,
            // Streams begin under the pool's lock. Only their ends may come between, and these only free streams.
            Self::Http2(it) => {
                PoolReservation::Shared(Self::Http2Stream(Http2PodStream::start(it.clone())))
            }
            Self::Http2Stream(_) | Self::Tcp(_) => PoolReservation::Unusable,
        }
    }
}

async fn send_over_http2(
    stream: Http2PodStream,
    request: Request<PodRequestBody>,
) -> Result<Response<PodResponseBody>, PodSendError> {
    let response = stream.send(request).await?;
    Ok(response.map(|(body, stream)| PodResponseBody::Http2(body, stream)))
}
