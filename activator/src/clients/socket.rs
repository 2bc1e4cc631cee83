//! Shell: a client's socket: writes of hyper, interim responses, and detection of a client that is gone.
//!
//! A client that has closed only its sending half still reads its response, one that has closed wholly never will. Both
//! have sent the same FIN. A byte sent to them distinguishes them: the first sends an ACK, the second a reset. Every
//! response begins with the same byte. So that byte is sent ahead, and hyper's own one is left out later: the client
//! reads one complete response.

use std::{
    future::{pending, poll_fn},
    io::{self, IoSlice},
    os::fd::{AsFd as _, AsRawFd as _},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use bytes::{Buf as _, Bytes, BytesMut};
use futures::FutureExt as _;
use http::Uri;
use nix::sys::socket::{self, MsgFlags};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, Interest, ReadBuf},
    net::TcpStream,
    time::Sleep,
};
use tokio_util::io::poll_read_buf;

use crate::{
    clients::{
        client_stream::AcceptedStream, connections::ClientConnection,
        http2_frames::Http2FrameInspector, request_targets::RequestTargetInspector,
    },
    edge::proxy_protocol::{self, ProxyHeader, ProxyHeaderStep},
};

mod receive;

/// First byte of every response, final or interim: `HTTP/1.…`.
const FIRST_RESPONSE_BYTE: &[u8] = b"H";
/// While bytes are unread, a FIN behind them is watched for only in requests that last longer than this, since it takes
/// a file descriptor.
const FIN_WATCH_DELAY: Duration = Duration::from_millis(100);
/// Bytes of interim responses that may wait for a client to read them.
const MAX_INTERIM_BYTES: usize = 64 << 10;
/// Time without new bytes after which unread bytes of a client are drained no longer. The client got its response
/// before it had sent its whole request. nginx's `lingering_timeout` is 5 s.
const UNREAD_DRAIN_IDLE_TIMEOUT: Duration = Duration::from_secs(2);
/// Total time for which they are drained. nginx's `lingering_time` is 30 s.
const UNREAD_DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
/// Number of bytes that are drained at once.
const UNREAD_DRAIN_PIECE: usize = 64 << 10;

/// First bytes of a client that speaks HTTP/2 without an upgrade (RFC 9113 §3.4).
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Socket of a client. Clones are the same socket: hyper has one, and the code that watches it another. One task uses
/// all of them, so the lock is never contended.
#[derive(Clone, Debug)]
pub struct ClientSocket(Arc<Mutex<ClientSocketInner>>);

/// Reads the header by which a proxy names its client, and not a byte more.
pub async fn read_proxy_header(stream: &mut TcpStream) -> io::Result<ProxyHeader> {
    let mut bytes = Vec::new();
    loop {
        let more = match proxy_protocol::parse_header(&bytes).map_err(io::Error::other)? {
            ProxyHeaderStep::Done(header) => return Ok(header),
            ProxyHeaderStep::Read(more) => more,
        };
        let from = bytes.len();
        bytes.resize(from + more, 0);
        stream.read_exact(&mut bytes[from..]).await?;
    }
}

/// Reads and drops what a client still sends, in pieces of `piece` bytes. Ends with the client's stream, or after a
/// bounded time.
pub(crate) async fn drain_bytes(
    piece: usize,
    mut poll_read: impl FnMut(&mut Context<'_>, &mut ReadBuf<'_>) -> Poll<io::Result<()>>,
) {
    let read = async {
        let mut unwanted = vec![0; piece];
        loop {
            let mut into = ReadBuf::new(&mut unwanted);
            let next_read = poll_fn(|cx| poll_read(cx, &mut into));
            match tokio::time::timeout(UNREAD_DRAIN_IDLE_TIMEOUT, next_read).await {
                Ok(Ok(())) if !into.filled().is_empty() => {}
                _ => return,
            }
        }
    };
    let _ = tokio::time::timeout(UNREAD_DRAIN_TIMEOUT, read).await;
}

/// Error of a client that has closed its connection completely.
#[derive(Debug, thiserror::Error)]
#[error("client has gone")]
pub struct ClientGoneError;

#[derive(Debug)]
struct ClientSocketInner {
    stream: AcceptedStream,
    /// True if hyper has flushed everything since the request came.
    is_flushed: bool,
    /// True if the first byte of the response was sent ahead.
    is_first_byte_sent: bool,
    /// Task that waits for `is_flushed`.
    flush_waker: Option<Waker>,
    /// Complete interim responses, which are sent between writes of hyper.
    interim: BytesMut,
    /// Inspector of received HTTP/1.1 requests.
    targets: RequestTargetInspector,
    /// True if a body was given up that the client may still be sending.
    has_unread_body: bool,
    /// Client connection that the bytes are charged to.
    connection: Arc<ClientConnection>,
    /// Inspector of received frames, over HTTP/2.
    frames: Option<Http2FrameInspector>,
    /// Bytes of an incomplete head that are charged.
    partial_head_bytes: usize,
    /// Size of hyper's buffer for received bytes.
    buffer_size: usize,
    /// Timer that runs while nothing is read because too many bytes are held.
    read_pause: Option<Pin<Box<Sleep>>>,
    /// Number of such pauses, one after the other.
    read_pauses: u32,
}

/// Target of a request as it was received, if `http::Uri` cannot hold it.
#[derive(Clone, Debug)]
pub struct RawRequestTarget(pub Bytes);

impl ClientSocket {
    /// Wraps the stream of a client, whose bytes are charged to `client_connection`.
    pub fn new(
        stream: impl Into<AcceptedStream>,
        client_connection: Arc<ClientConnection>,
    ) -> Self {
        let stream = stream.into();
        let (interim, flush_waker) = (BytesMut::new(), None);
        let (is_flushed, is_first_byte_sent, has_unread_body) = (false, false, false);
        let targets = RequestTargetInspector::disabled(0);
        let (frames, partial_head_bytes, buffer_size, read_pause, read_pauses) =
            (None, 0, 0, None, 0);
        Self(Arc::new(Mutex::new(ClientSocketInner {
            stream,
            is_flushed,
            is_first_byte_sent,
            flush_waker,
            interim,
            targets,
            has_unread_body,
            connection: client_connection,
            frames,
            partial_head_bytes,
            buffer_size,
            read_pause,
            read_pauses,
        })))
    }

    /// Waits for the client's first bytes. Returns true if the client speaks HTTP/2: over TLS by ALPN, otherwise by
    /// these bytes.
    pub async fn detect_http2(&self) -> io::Result<bool> {
        let negotiated = self.lock().stream.negotiated_http2();
        let Some(is_http2) = negotiated else { return self.peek_http2_preface().await };
        poll_fn(|cx| self.lock().stream.poll_read_ready(cx)).await?;
        Ok(is_http2)
    }

    /// Waits for the first bytes of a client without TLS. Returns true if they are those of HTTP/2. Nothing is read.
    pub async fn peek_http2_preface(&self) -> io::Result<bool> {
        loop {
            poll_fn(|cx| self.poll_read_ready(cx)).await?;
            match self.try_peek_http2_preface() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return result,
            }
        }
    }

    /// Looks at the client's first bytes. Fails with `WouldBlock` while these are only a part of the preface.
    fn try_peek_http2_preface(&self) -> io::Result<bool> {
        // Before the peek: if the client has closed its half already, no further byte comes after the peeked ones.
        let is_half_closed = self.is_half_closed();
        let inner = self.lock();
        let stream = inner.stream.tcp();
        // Readiness is cleared if this would block, so that the next peek waits for more bytes. What becomes ready
        // during the peek stays ready.
        stream.try_io(Interest::READABLE, || {
            let mut bytes = [0; HTTP2_PREFACE.len()];
            // Peeked bytes stay in the kernel: hyper reads the preface itself.
            let length = socket::recv(stream.as_raw_fd(), &mut bytes, MsgFlags::MSG_PEEK)?;
            match &bytes[..length] {
                HTTP2_PREFACE => Ok(true),
                [] => Ok(false),
                part if is_half_closed || !HTTP2_PREFACE.starts_with(part) => Ok(false),
                _ => Err(io::ErrorKind::WouldBlock.into()),
            }
        })
    }

    /// Registers that hyper reads the client's HTTP/1.1 from here on, and that its heads have at most `max_head` bytes.
    /// `unread` has bytes of requests that were read already.
    pub fn enable_target_inspection(&self, max_head: usize, unread: BytesMut) {
        let mut targets = RequestTargetInspector::new(max_head);
        *targets.unread() = unread;
        self.lock().targets = targets;
    }

    /// Reads bytes that hyper does not get, up to about `most` of them in `into`. A result of 0 is the end of the client's
    /// bytes.
    pub(crate) fn poll_read_past_hyper(
        &self,
        cx: &mut Context<'_>,
        into: &mut BytesMut,
        most: usize,
    ) -> Poll<io::Result<usize>> {
        let mut inner = self.lock();
        // The buffer is allocated only once something has come, so that an idle connection has none.
        ready!(inner.stream.poll_read_ready(cx))?;
        into.reserve(most.saturating_sub(into.len()));
        poll_read_buf(Pin::new(&mut inner.stream), cx, into)
    }

    /// Registers that the client speaks HTTP/2.
    pub fn enable_frame_inspection(&self) {
        self.lock().frames = Some(Http2FrameInspector::after_preface(HTTP2_PREFACE.len()));
    }

    /// Sends GOAWAY with a reason to an HTTP/2 client in place of h2 (RFC 9113 §6.8), as the last bytes, if that is
    /// possible at once.
    pub fn send_goaway(&self, reason: h2::Reason) {
        const FRAME: [u8; 9] = [0, 0, 8, 7, 0, 0, 0, 0, 0];
        // The last stream id is the highest possible: no stream is declared as unprocessed.
        let last = (u32::MAX >> 1).to_be_bytes();
        let frame = [&FRAME[..], &last, &u32::from(reason).to_be_bytes()].concat();
        let mut inner = self.lock();
        if inner.stream.try_write(&frame).is_ok() {
            // A client of TLS would take an end without it for an error, and not report the reason.
            let _ = inner.stream.try_close_notify();
        }
    }

    /// Target of the request that has come as `uri`, if the client wrote it in another form.
    pub fn raw_target(&self, uri: &Uri) -> Option<RawRequestTarget> {
        self.lock().targets.take_original(uri.path_and_query()?.as_str()).map(RawRequestTarget)
    }

    /// Waits until the client has closed its connection completely. The caller runs it from the arrival of a request
    /// until its response begins.
    pub async fn wait_client_gone(&self) {
        self.wait_client_gone_after(false).await;
    }

    /// Waits until the client has closed its connection completely, as [`wait_client_gone`](Self::wait_client_gone) does,
    /// while hyper has nothing to write.
    pub(crate) async fn wait_client_gone_past_hyper(&self) {
        self.wait_client_gone_after(true).await;
    }

    async fn wait_client_gone_after(&self, is_flushed: bool) {
        self.lock().is_flushed = is_flushed;
        // Needs no system call while nothing comes, which is the usual case.
        let _ = poll_fn(|cx| self.poll_read_ready(cx)).await;
        Box::pin(self.wait_close_confirmed()).await;
    }

    /// Waits until the client has closed its connection completely, after its socket has become readable.
    async fn wait_close_confirmed(&self) {
        // Unread bytes may hide a FIN behind them. Most requests end before that is worth a descriptor.
        if !self.is_half_closed() {
            tokio::time::sleep(FIN_WATCH_DELAY).await;
        }
        let Ok(watch) = self.clone_stream() else { return pending().await };
        let _ = watch.ready(Interest::PRIORITY | Interest::ERROR).await;
        // The byte that is sent ahead provokes the reset of a client that has closed completely.
        if poll_fn(|cx| self.poll_send_first_byte(cx)).await.is_ok() {
            let _ = watch.ready(Interest::ERROR).await;
        }
    }

    /// Sends an interim response. It is dropped if the client leaves too many of them unread.
    pub fn send_interim(&self, response: &[u8]) {
        let mut inner = self.lock();
        if inner.interim.len() + response.len() > MAX_INTERIM_BYTES {
            return;
        }
        // The byte that was sent ahead is the first one of this response too.
        let is_ahead = std::mem::take(&mut inner.is_first_byte_sent);
        inner.interim.extend_from_slice(if is_ahead {
            &response[FIRST_RESPONSE_BYTE.len()..]
        } else {
            response
        });
        // While hyper is writing, the interim response waits: it must not come within another response.
        if inner.is_flushed {
            inner.try_write_interim();
        }
    }

    /// Registers that a body of this connection was given up.
    pub fn mark_unread_body(&self) {
        self.lock().has_unread_body = true;
    }

    /// Reads the rest of a client that got its response before it had sent everything. If the connection just ended,
    /// the kernel would reset it, and the client might never see the response (RFC 9112 §9.6).
    pub async fn drain_unread(&self) {
        if !self.lock().has_unread_body {
            return;
        }
        let poll_read = |cx: &mut Context<'_>, into: &mut ReadBuf<'_>| {
            self.lock().stream.poll_read_tcp(cx, into)
        };
        drain_bytes(UNREAD_DRAIN_PIECE, poll_read).await;
    }

    /// Waits until the client has closed its sending half, or the whole connection, behind bytes that nothing reads now.
    pub(crate) async fn wait_hidden_fin(&self) {
        // Most responses end before the watch is worth a descriptor.
        tokio::time::sleep(FIN_WATCH_DELAY).await;
        let Ok(watch) = self.clone_stream() else { return pending().await };
        let _ = watch.ready(Interest::PRIORITY | Interest::ERROR).await;
    }

    /// Waits until the client's kernel has sent a reset.
    pub(crate) async fn wait_reset(&self) {
        let Ok(watch) = self.clone_stream() else { return pending().await };
        let _ = watch.ready(Interest::ERROR).await;
    }

    /// Registers the task for the next bytes or the end of the client's TCP stream.
    pub(crate) fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.lock().stream.tcp().poll_read_ready(cx)
    }

    /// Second handle of the stream: the readiness of the first stays "closed" from the FIN on and cannot report the
    /// reset.
    fn clone_stream(&self) -> io::Result<TcpStream> {
        let copy = self.lock().stream.tcp().as_fd().try_clone_to_owned()?;
        TcpStream::from_std(copy.into())
    }

    /// Returns true if the client has closed its sending half, or the whole connection.
    pub(crate) fn is_half_closed(&self) -> bool {
        // The kernel reports a close together with urgent data, which no client sends here.
        self.lock().stream.tcp().ready(Interest::PRIORITY).now_or_never().is_some()
    }

    /// Returns true if the client's kernel has sent a reset.
    pub(crate) fn is_reset(&self) -> bool {
        self.lock().stream.tcp().ready(Interest::ERROR).now_or_never().is_some()
    }

    /// Sends the first byte of the response, once no byte of another response can come after it.
    fn poll_send_first_byte(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut inner = self.lock();
        // A byte between hyper's writes would corrupt a response that is being sent.
        if !inner.is_flushed {
            inner.flush_waker = Some(cx.waker().clone());
            return Poll::Pending;
        }
        if inner.is_first_byte_sent {
            return Poll::Ready(Ok(()));
        }
        // What is left of an interim response goes first. If it cannot, it fills the send buffer as below.
        inner.try_write_interim();
        if !inner.interim.is_empty() {
            return Poll::Ready(Ok(()));
        }
        match inner.stream.try_write(FIRST_RESPONSE_BYTE) {
            Ok(sent) => inner.is_first_byte_sent = sent == FIRST_RESPONSE_BYTE.len(),
            // Bytes already fill the send buffer, and provoke the same reaction of the client's kernel.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Poll::Ready(Err(error)),
        }
        Poll::Ready(Ok(()))
    }

    fn lock(&self) -> MutexGuard<'_, ClientSocketInner> {
        // A panic cannot leave a socket inconsistent: every change under the lock completes.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsyncRead for ClientSocket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.lock().poll_read(cx, into)
    }
}

impl AsyncWrite for ClientSocket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        let mut inner = self.lock();
        ready!(inner.poll_write_interim(cx))?;
        inner.is_flushed = false;
        match from {
            // The first byte of the response was sent ahead.
            [_sent, rest @ ..] if inner.is_first_byte_sent => inner.poll_write_rest(cx, rest),
            _ => Pin::new(&mut inner.stream).poll_write(cx, from),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut inner = self.lock();
        ready!(inner.poll_write_interim(cx))?;
        inner.is_flushed = false;
        match from.iter().find(|slice| !slice.is_empty()).map(|slice| &**slice) {
            Some([_sent, rest @ ..]) if inner.is_first_byte_sent => inner.poll_write_rest(cx, rest),
            _ => Pin::new(&mut inner.stream).poll_write_vectored(cx, from),
        }
    }

    fn is_write_vectored(&self) -> bool {
        self.lock().stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut inner = self.lock();
        ready!(inner.poll_write_interim(cx))?;
        ready!(Pin::new(&mut inner.stream).poll_flush(cx))?;
        inner.is_flushed = true;
        inner.flush_waker.take().into_iter().for_each(Waker::wake);
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.lock().stream).poll_shutdown(cx)
    }
}

impl ClientSocketInner {
    /// Writes interim responses as far as possible at once. The rest is written before hyper's next bytes.
    fn try_write_interim(&mut self) {
        while !self.interim.is_empty() {
            let Ok(sent) = self.stream.try_write(&self.interim) else { return };
            self.interim.advance(sent);
        }
    }

    fn poll_write_interim(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.interim.is_empty() {
            let sent = ready!(Pin::new(&mut self.stream).poll_write(cx, &self.interim))?;
            self.interim.advance(sent);
        }
        Poll::Ready(Ok(()))
    }

    /// Writes the bytes behind the one that was sent ahead, and counts that one as written.
    fn poll_write_rest(&mut self, cx: &mut Context<'_>, rest: &[u8]) -> Poll<io::Result<usize>> {
        let sent = match rest {
            [] => 0,
            rest => ready!(Pin::new(&mut self.stream).poll_write(cx, rest))?,
        };
        self.is_first_byte_sent = false;
        Poll::Ready(Ok(sent + FIRST_RESPONSE_BYTE.len()))
    }
}

#[cfg(test)]
mod tests;
