//! Shell: the TCP connection of a client below TLS, with a bound on what TLS holds of it.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};

use crate::budget::MAX_UNDECRYPTED_BYTES;

/// Error of a client that has sent too many bytes without one that can be decrypted.
#[derive(Debug, thiserror::Error)]
#[error("client has sent too many bytes of TLS without any data")]
struct TooManyUndecryptedBytesError;

/// TCP connection of a client of TLS. Reads fail once too much has come from which nothing was decrypted: rustls would
/// hold 64 KiB of one handshake message for each connection.
#[derive(Debug)]
pub struct BoundedTcp {
    tcp: TcpStream,
    /// Bytes that have come since the last decrypted ones.
    undecrypted: usize,
}

impl BoundedTcp {
    /// Wraps a connection on which a handshake comes next.
    pub fn new(tcp: TcpStream) -> Self {
        Self { tcp, undecrypted: 0 }
    }

    /// Connection itself.
    pub fn tcp(&self) -> &TcpStream {
        &self.tcp
    }

    /// Connection itself, for reads that do not count.
    pub fn tcp_mut(&mut self) -> &mut TcpStream {
        &mut self.tcp
    }

    /// Registers that bytes were decrypted, or that the handshake is complete.
    pub fn mark_decrypted(&mut self) {
        self.undecrypted = 0;
    }
}

impl AsyncRead for BoundedTcp {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = into.filled().len();
        ready!(Pin::new(&mut this.tcp).poll_read(cx, into))?;
        this.undecrypted += into.filled().len() - before;
        Poll::Ready(if this.undecrypted > MAX_UNDECRYPTED_BYTES {
            // The kind is that of errors of rustls about what the client has sent.
            Err(io::Error::new(io::ErrorKind::InvalidData, TooManyUndecryptedBytesError))
        } else {
            Ok(())
        })
    }
}

impl AsyncWrite for BoundedTcp {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().tcp).poll_write(cx, from)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().tcp).poll_write_vectored(cx, from)
    }

    fn is_write_vectored(&self) -> bool {
        self.tcp.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().tcp).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().tcp).poll_shutdown(cx)
    }
}
