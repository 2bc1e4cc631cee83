//! Shell: the body of a response that watches its client, so that a silent response finds out that its client is gone.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::time::Sleep;

use crate::{
    clients::socket::ClientSocket,
    requests::response_body::{ClientResponseBody, ResponseBodyError},
};

/// Time for which a response is silent before the client's FIN is passed on to the pod. A response that began before
/// the FIN goes on.
const FIN_FORWARD_DELAY: Duration = Duration::from_secs(5);

/// Body of a response that watches its client: a silent response would never find out that its client is gone.
#[derive(Debug)]
pub struct ClientWatchedBody {
    body: ClientResponseBody,
    socket: ClientSocket,
    /// True if the client had closed its sending half before and is still there: it waits for the whole response.
    is_client_half_closed: bool,
    /// Future of a FIN behind bytes that nothing reads while the response lasts.
    hidden_fin: Option<ClientSocketFuture>,
    /// True once that future has resolved.
    has_hidden_fin: bool,
    /// Timer that runs since the client's FIN, while the response is silent.
    silence_timer: Option<Pin<Box<Sleep>>>,
    /// Future of a reset, once the pod knows of the FIN.
    reset: Option<ClientSocketFuture>,
}

/// Future that resolves once the client's kernel has sent a FIN or a reset.
struct ClientSocketFuture(Pin<Box<dyn Future<Output = ()> + Send>>);

impl fmt::Debug for ClientSocketFuture {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("ClientSocketFuture")
    }
}

impl ClientWatchedBody {
    /// Wraps the body of a response to the client at `socket`.
    pub fn new(body: ClientResponseBody, socket: ClientSocket) -> Self {
        // A client that was half-closed before the response, and did not reset when asked, does read it.
        let is_client_half_closed = !body.is_end_stream() && socket.is_half_closed();
        Self {
            body,
            socket,
            is_client_half_closed,
            hidden_fin: None,
            has_hidden_fin: false,
            silence_timer: None,
            reset: None,
        }
    }

    /// Resolves when the client has closed its half, the response was silent for a while, and the pod cannot get the
    /// FIN. Over HTTP/1.1 the FIN is passed on, as if there were no activator. The kernel then finds out whether the
    /// client is still there.
    fn poll_client_gone(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(ClientSocketFuture(reset)) = &mut self.reset {
            return reset.as_mut().poll(cx);
        }
        if self.is_client_half_closed {
            return Poll::Pending;
        }
        ready!(self.poll_half_closed(cx));
        if self.socket.is_reset() {
            return Poll::Ready(());
        }
        let silence = || Box::pin(tokio::time::sleep(FIN_FORWARD_DELAY));
        ready!(self.silence_timer.get_or_insert_with(silence).as_mut().poll(cx));
        // A pod that cannot be notified would go on for a client that may be gone, so the response ends.
        if !self.body.forward_fin(cx) {
            return Poll::Ready(());
        }
        let socket = self.socket.clone();
        let reset = self
            .reset
            .insert(ClientSocketFuture(Box::pin(async move { socket.wait_reset().await })));
        reset.0.as_mut().poll(cx)
    }

    /// Resolves once the client has closed its sending half.
    fn poll_half_closed(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        // Only registers the waker; an error shows as a closed half.
        let _ = ready!(self.socket.poll_read_ready(cx));
        if self.has_hidden_fin || self.socket.is_half_closed() {
            return Poll::Ready(());
        }
        // Unread bytes keep the socket readable, so that it announces no FIN behind them. Clients of TLS send such bytes
        // before their FIN: `close_notify`.
        let socket = &self.socket;
        let fin = self.hidden_fin.get_or_insert_with(|| {
            let socket = socket.clone();
            ClientSocketFuture(Box::pin(async move { socket.wait_hidden_fin().await }))
        });
        ready!(fin.0.as_mut().poll(cx));
        (self.hidden_fin, self.has_hidden_fin) = (None, true);
        Poll::Ready(())
    }
}

impl Body for ClientWatchedBody {
    type Data = Bytes;
    type Error = ResponseBodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ResponseBodyError>>> {
        if let Poll::Ready(next) = Pin::new(&mut self.body).poll_frame(cx) {
            self.silence_timer = None;
            return Poll::Ready(next);
        }
        ready!(self.poll_client_gone(cx));
        Poll::Ready(Some(Err(ResponseBodyError::Client)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
