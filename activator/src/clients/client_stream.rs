//! Shell: bytes of a client, by TCP alone or by TLS.
//!
//! HTTP frames its messages itself, so the end of TCP is the end of the bytes, also without `close_notify` (RFC 9112
//! §9.8).

use std::{
    io::{self, IoSlice, Write as _},
    pin::Pin,
    task::{Context, Poll, ready},
};

use rustls::ServerConnection;
use tokio::{
    io::{AsyncBufRead as _, AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::server::TlsStream;

use crate::clients::bounded_tcp::BoundedTcp;

/// Name of HTTP/2 over TLS in ALPN (RFC 9113 §3.2).
const ALPN_HTTP2: &[u8] = b"h2";

/// Stream of a client's bytes: what it sends and receives within TLS, or over TCP alone.
#[derive(Debug)]
pub enum AcceptedStream {
    /// Connection of TCP alone.
    Plain(TcpStream),
    /// Connection of TLS whose handshake is complete.
    Tls(Box<TlsStream<BoundedTcp>>),
}

impl From<TcpStream> for AcceptedStream {
    fn from(stream: TcpStream) -> Self {
        Self::Plain(stream)
    }
}

impl From<TlsStream<BoundedTcp>> for AcceptedStream {
    fn from(mut tls: TlsStream<BoundedTcp>) -> Self {
        tls.get_mut().0.mark_decrypted();
        Self::Tls(Box::new(tls))
    }
}

impl AcceptedStream {
    /// TCP connection below, whose readiness shows the client's FIN and reset.
    pub fn tcp(&self) -> &TcpStream {
        match self {
            Self::Plain(tcp) => tcp,
            Self::Tls(tls) => tls.get_ref().0.tcp(),
        }
    }

    /// Returns true if the bytes are encrypted.
    pub fn is_tls(&self) -> bool {
        match self {
            Self::Plain(_) => false,
            Self::Tls(_) => true,
        }
    }

    /// Returns true if ALPN has chosen HTTP/2. `None`: the stream is plain, and only its first bytes show the version.
    pub fn negotiated_http2(&self) -> Option<bool> {
        match self {
            Self::Plain(_) => None,
            Self::Tls(tls) => Some(tls.get_ref().1.alpn_protocol() == Some(ALPN_HTTP2)),
        }
    }

    /// Waits until a read returns bytes, the end, or an error. Returns that error.
    pub(crate) fn poll_read_ready(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Plain(tcp) => tcp.poll_read_ready(cx),
            Self::Tls(tls) => poll_decrypted(tls, cx).map_ok(|_decrypted| ()),
        }
    }

    /// Writes as many bytes as possible at once, and touches no waker: that of hyper stays. Over TLS, bytes that count
    /// as written may still be encrypted here. They go out with the next write or flush.
    ///
    /// Fails with `WouldBlock` if no byte can be written.
    pub fn try_write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let tls = match self {
            Self::Plain(tcp) => return tcp.try_write(bytes),
            Self::Tls(tls) => tls,
        };
        let (transport, session) = tls.get_mut();
        let tcp = transport.tcp();
        // Before as well: the encrypted bytes are bounded, and may leave no room for these.
        try_send_encrypted(tcp, session)?;
        let written = session.writer().write(bytes)?;
        try_send_encrypted(tcp, session)?;
        if written == 0 && !bytes.is_empty() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(written)
    }

    /// Announces the end of the bytes by `close_notify` to a client of TLS, if that is possible at once. Nothing can be
    /// written behind it.
    pub(crate) fn try_close_notify(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(_) => Ok(()),
            Self::Tls(tls) => {
                let (transport, session) = tls.get_mut();
                session.send_close_notify();
                try_send_encrypted(transport.tcp(), session)
            }
        }
    }

    /// Reads bytes of raw TCP. Unlike those of HTTP they do not tell where they end, so over TLS an end without
    /// `close_notify` is the error `UnexpectedEof`.
    pub(crate) fn poll_read_whole(
        &mut self,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self {
            Self::Plain(tcp) => Pin::new(tcp).poll_read(cx, into),
            Self::Tls(tls) => poll_read_to_close_notify(tls, cx, into),
        }
    }

    /// Reads bytes as they have come by TCP, to drop them: those of TLS are still encrypted.
    pub fn poll_read_tcp(
        &mut self,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let tcp = match self {
            Self::Plain(tcp) => tcp,
            Self::Tls(tls) => tls.get_mut().0.tcp_mut(),
        };
        Pin::new(tcp).poll_read(cx, into)
    }
}

impl AsyncRead for AcceptedStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_read(cx, into),
            Self::Tls(tls) => poll_read_decrypted(tls, cx, into),
        }
    }
}

impl AsyncWrite for AcceptedStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_write(cx, from),
            Self::Tls(tls) => Pin::new(tls).poll_write(cx, from),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_write_vectored(cx, from),
            Self::Tls(tls) => Pin::new(tls).poll_write_vectored(cx, from),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(tcp) => tcp.is_write_vectored(),
            Self::Tls(tls) => tls.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_flush(cx),
            Self::Tls(tls) => Pin::new(tls).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_shutdown(cx),
            Self::Tls(tls) => Pin::new(tls).poll_shutdown(cx),
        }
    }
}

/// Reads what the client has sent within TLS: at least a part of one record, and all that is decrypted already.
fn poll_read_decrypted(
    tls: &mut TlsStream<BoundedTcp>,
    cx: &mut Context<'_>,
    into: &mut ReadBuf<'_>,
) -> Poll<io::Result<()>> {
    // `TlsStream` itself would read on until nothing more comes, and keep an error of that for a later read. No
    // readiness announces that one.
    loop {
        let decrypted = ready!(poll_decrypted(tls, cx))?;
        let count = decrypted.len().min(into.remaining());
        into.put_slice(&decrypted[..count]);
        if count == 0 {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut *tls).consume(count);
        tls.get_mut().0.mark_decrypted();
        // Further bytes are taken only if that needs no read of TCP, so that the loop never waits with some of them.
        if into.remaining() == 0 || tls.get_ref().1.wants_read() {
            return Poll::Ready(Ok(()));
        }
    }
}

/// Reads what the client has sent within TLS, at most one record. An end without `close_notify` is an error.
fn poll_read_to_close_notify(
    tls: &mut TlsStream<BoundedTcp>,
    cx: &mut Context<'_>,
    into: &mut ReadBuf<'_>,
) -> Poll<io::Result<()>> {
    let decrypted = ready!(Pin::new(&mut *tls).poll_fill_buf(cx))?;
    let count = decrypted.len().min(into.remaining());
    into.put_slice(&decrypted[..count]);
    if count > 0 {
        Pin::new(&mut *tls).consume(count);
        tls.get_mut().0.mark_decrypted();
    }
    Poll::Ready(Ok(()))
}

/// Decrypted bytes that are not consumed; empty at the end of the client's bytes.
fn poll_decrypted<'a>(
    tls: &'a mut TlsStream<BoundedTcp>,
    cx: &mut Context<'_>,
) -> Poll<io::Result<&'a [u8]>> {
    Poll::Ready(match ready!(Pin::new(tls).poll_fill_buf(cx)) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(&[]),
        read => read,
    })
}

/// Sends encrypted bytes as far as possible at once.
fn try_send_encrypted(tcp: &TcpStream, session: &mut ServerConnection) -> io::Result<()> {
    while session.wants_write() {
        match session.write_tls(&mut TryWriter(tcp)) {
            Ok(1..) => {}
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Writer that writes at once or not at all.
struct TryWriter<'a>(&'a TcpStream);

impl io::Write for TryWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.try_write(bytes)
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.try_write_vectored(slices)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
