//! Shell: the client's side of an upgraded connection: its whole connection over HTTP/1.1, one stream over HTTP/2.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::{
    budget::{CLIENT_SEND_BUFFER, CLIENT_STREAM_WINDOW},
    clients::connections::{ClientConnection, RequestBodyGuard, ResponseBytesGuard},
    requests::stream_tasks::StreamSender,
};

/// Number of bytes that are relayed at once (`tokio::io::copy_bidirectional`).
const RELAY_PIECE_BYTES: usize = 8 << 10;
/// Maximum number of bytes for a client of HTTP/2 that takes none: the buffer of h2, a piece that waits for it, two in
/// hyper's channel, and one that is being written.
const MAX_UNSENT_BYTES: usize = CLIENT_SEND_BUFFER + 4 * RELAY_PIECE_BYTES;

/// Client's side of a connection that is about to leave HTTP.
#[derive(Debug)]
pub struct UpgradedClient {
    /// Handle that resolves once hyper has sent the response.
    pub upgrade: OnUpgrade,
    /// Stream of HTTP/2 that carries the bytes; `None`: they have the whole connection.
    pub stream: Option<Arc<UpgradedStream>>,
}

/// Stream of a client's HTTP/2 connection that carries another protocol.
#[derive(Debug)]
pub struct UpgradedStream {
    sender: Arc<StreamSender>,
    connection: Arc<ClientConnection>,
    /// Guard of the bytes that the client sends: they count as those of a body.
    _body: RequestBodyGuard,
}

impl UpgradedStream {
    /// Returns the stream whose request the present task serves; `None`: the task serves no stream.
    pub fn of_current_task(
        client_connection: &Arc<ClientConnection>,
        body: RequestBodyGuard,
    ) -> Option<Self> {
        let sender = StreamSender::of_current_stream()?;
        Some(Self { sender, connection: Arc::clone(client_connection), _body: body })
    }

    /// Waits until the stream cannot go on: the client has reset it, or the client's requests are refused.
    pub async fn wait_given_up(&self) {
        let _refusal_guard = self.connection.subscribe_refusal();
        tokio::select! {
            () = self.sender.wait_reset() => {}
            () = self.connection.wait_refused() => {}
        }
    }

    /// Resets the stream of `client`, so that the client does not take what it got for the end of the bytes.
    pub async fn reset(&self, client: UpgradedClientIo) {
        self.sender.reset().await;
        drop(client);
    }
}

/// Bytes of an upgraded connection at the client's side.
#[derive(Debug)]
pub struct UpgradedClientIo {
    io: TokioIo<Upgraded>,
    stream: Option<Arc<UpgradedStream>>,
    /// Guard of the bytes that wait while the client of a stream takes none.
    unsent: Option<ResponseBytesGuard>,
}

impl UpgradedClient {
    /// Waits until the client's side has left HTTP.
    pub async fn complete(self) -> Result<UpgradedClientIo, hyper::Error> {
        let io = TokioIo::new(self.upgrade.await?);
        Ok(UpgradedClientIo { io, stream: self.stream, unsent: None })
    }
}

impl UpgradedClientIo {
    /// Charges the bytes that may wait for the client of a stream, if `is_waiting`: the client does not take them.
    fn charge_unsent(&mut self, is_waiting: bool) {
        if !is_waiting {
            self.unsent = None;
        } else if self.unsent.is_none() {
            let charge =
                |it: &Arc<UpgradedStream>| it.connection.charge_response_bytes(MAX_UNSENT_BYTES);
            self.unsent = self.stream.as_ref().map(charge);
        }
    }
}

impl AsyncRead for UpgradedClientIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        let read = Pin::new(&mut self.io).poll_read(cx, into);
        let count = into.filled().len() - before;
        if let Some(stream) = self.stream.as_ref().filter(|_| count > 0) {
            stream.connection.remove_body_bytes(count);
        }
        read
    }
}

impl AsyncWrite for UpgradedClientIo {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(cx, from);
        self.charge_unsent(written.is_pending());
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.io).poll_flush(cx);
        self.charge_unsent(flushed.is_pending());
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(stream) = &self.stream {
            stream.sender.mark_finished();
        }
        let ended = Pin::new(&mut self.io).poll_shutdown(cx);
        self.charge_unsent(ended.is_pending());
        ended
    }
}

impl Drop for UpgradedClientIo {
    fn drop(&mut self) {
        if self.stream.is_none() {
            return;
        }
        // Bytes that hyper has received are dropped with the stream. They are read here, so that they are no longer
        // charged. Each read lets the client send more, so at most a window of them is read. A read returns one frame,
        // however small.
        let mut cx = Context::from_waker(Waker::noop());
        let mut unwanted = [0; RELAY_PIECE_BYTES];
        let mut left = CLIENT_STREAM_WINDOW as usize;
        while left > 0 {
            let mut into = ReadBuf::new(&mut unwanted);
            let read = Pin::new(&mut *self).poll_read(&mut cx, &mut into);
            let count = into.filled().len();
            if !matches!(read, Poll::Ready(Ok(()))) || count == 0 {
                return;
            }
            left = left.saturating_sub(count);
        }
    }
}
