//! Shell: the pod's side of an upgraded connection: a whole connection over HTTP/1.1, one stream over HTTP/2.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_util::sync::DropGuard;

use crate::pods::{http1_connection::UpgradedPodStream, http2_connection::Http2PodStream};

/// Pod's side of a connection that leaves HTTP.
#[derive(Debug)]
pub enum UpgradedPod {
    /// Connection of HTTP/1.1, after a switch of protocols.
    Http1(UpgradedPodStream),
    /// Stream of HTTP/2, after an extended CONNECT.
    Http2(OnUpgrade, Http2PodStream),
}

/// Bytes of an upgraded connection at the pod's side.
#[derive(Debug)]
pub enum UpgradedPodIo {
    /// TCP connection of the client's own.
    Tcp(TcpStream),
    /// Stream of HTTP/2, with its use of the connection.
    Http2(TokioIo<Upgraded>, Http2PodStream),
}

impl UpgradedPod {
    /// Returns true if the pod has sent bytes together with its response head.
    pub fn has_buffered_bytes(&self) -> bool {
        match self {
            Self::Http1(stream) => !stream.buffered.is_empty(),
            Self::Http2(..) => false,
        }
    }

    /// Returns a guard that closes the pod's connection at once when it is dropped. `None`: the end of the pod's side
    /// closes it.
    pub fn cut_off_guard(&self) -> Option<DropGuard> {
        match self {
            Self::Http1(_) => None,
            Self::Http2(_, stream) => stream.cut_off_guard(),
        }
    }

    /// Leaves HTTP. Returns the bytes that the pod has sent already, and the rest of them.
    pub async fn complete(self) -> Result<(Bytes, UpgradedPodIo), hyper::Error> {
        match self {
            Self::Http1(it) => Ok((it.buffered, UpgradedPodIo::Tcp(it.stream))),
            Self::Http2(upgrade, stream) => {
                Ok((Bytes::new(), UpgradedPodIo::Http2(TokioIo::new(upgrade.await?), stream)))
            }
        }
    }
}

impl AsyncRead for UpgradedPodIo {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(io) => Pin::new(io).poll_read(cx, into),
            Self::Http2(io, _) => Pin::new(io).poll_read(cx, into),
        }
    }
}

impl AsyncWrite for UpgradedPodIo {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(io) => Pin::new(io).poll_write(cx, from),
            Self::Http2(io, _) => Pin::new(io).poll_write(cx, from),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(io) => Pin::new(io).poll_flush(cx),
            Self::Http2(io, _) => Pin::new(io).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(io) => Pin::new(io).poll_shutdown(cx),
            Self::Http2(io, _) => Pin::new(io).poll_shutdown(cx),
        }
    }
}
