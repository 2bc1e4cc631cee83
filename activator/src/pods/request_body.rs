//! Shell: a request's body on its way to a pod.
//!
//! The beginning of the body is kept until it is known to have arrived, so that the request can be sent again over
//! another connection.

use std::{
    collections::VecDeque,
    fmt,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Instant, sleep};

use crate::{
    clients::{connections::ClientConnection, socket::ClientSocket},
    edge::client_headers::remove_client_claims,
};

/// Maximum number of bytes of a body that are kept for a second attempt.
const MAX_RESEND_BYTES: usize = 64 << 10;

/// Reference to the permit by which a request is at its pod. The body only keeps it: the wait queue, to which a permit
/// belongs, is no concern of a connection.
pub type PermitGuard = Arc<dyn fmt::Debug + Send + Sync>;

/// Body of a request to a pod.
#[derive(Debug)]
pub enum PodRequestBody {
    /// Request without a body.
    Empty,
    /// Body of the client, sent to the pod as it comes.
    Client(Box<ClientRequestBody>),
}

/// Body of a client's request, as it comes in.
#[derive(Debug)]
pub struct ClientRequestBody {
    body: Incoming,
    /// Pieces that are sent before the rest: they were sent already, over a connection that has broken.
    resend_queue: VecDeque<Bytes>,
    /// Pieces sent so far over the present connection; `None`: too many bytes to be kept.
    sent_pieces: Option<Vec<Bytes>>,
    /// True if the body has ended, by its regular end or by an error.
    is_ended: bool,
    /// Socket of the client connection, if the rest of the body has to be read from it.
    socket: Option<ClientSocket>,
    /// Permit at the pod, kept for as long as the body is on its way.
    permit: Option<PermitGuard>,
    /// Client connection that the body comes over.
    connection: Arc<ClientConnection>,
    idle_timer: Arc<BodyIdleTimer>,
}

/// Start of the time for which a client's body has been waited for; `None`: it is not waited for now.
#[derive(Debug, Default)]
pub struct BodyIdleTimer(Mutex<Option<Instant>>);

impl BodyIdleTimer {
    /// Waits until the client has sent nothing for the time `most`, while the pod waited for it.
    pub async fn wait_idle(&self, most: Duration) {
        loop {
            let waited = self.idle_since().map_or(Duration::ZERO, |since| since.elapsed());
            if waited >= most {
                return;
            }
            sleep(most - waited).await;
        }
    }

    fn idle_since(&self) -> Option<Instant> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_waiting(&self, is_waiting: bool) {
        let mut since = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *since = is_waiting.then(|| since.unwrap_or_else(Instant::now));
    }
}

impl PodRequestBody {
    /// Creates the body of a request that came by `socket`, over `client_connection`.
    pub fn new(
        body: Incoming,
        socket: Option<ClientSocket>,
        client_connection: &Arc<ClientConnection>,
    ) -> Self {
        if body.is_end_stream() {
            return Self::Empty;
        }
        client_connection.on_body_start();
        let (resend_queue, sent_pieces) = (VecDeque::new(), Some(Vec::new()));
        let (client_connection, idle_timer, permit, is_ended) =
            (Arc::clone(client_connection), Arc::default(), None, false);
        Self::Client(Box::new(ClientRequestBody {
            body,
            resend_queue,
            sent_pieces,
            is_ended,
            socket,
            permit,
            connection: client_connection,
            idle_timer,
        }))
    }

    /// Timer of the client's body; `None`: the request has no body to wait for.
    pub fn idle_timer(&self) -> Option<Arc<BodyIdleTimer>> {
        if let Self::Client(inbound) = self { Some(Arc::clone(&inbound.idle_timer)) } else { None }
    }

    /// Keeps `permit` until the body has ended.
    pub fn hold_permit(&mut self, permit: PermitGuard) {
        if let Self::Client(inbound) = self {
            inbound.permit = Some(permit);
        }
    }

    /// Releases the permit, if the body keeps one.
    pub fn release_permit(&mut self) {
        if let Self::Client(inbound) = self {
            inbound.permit = None;
        }
    }

    /// Body as it was before anything of it was sent; `None`: more was sent than is kept.
    pub fn into_unsent(self) -> Option<Self> {
        match self {
            Self::Empty => Some(Self::Empty),
            Self::Client(mut inbound) => {
                let pieces = inbound.sent_pieces.replace(Vec::new())?;
                pieces.into_iter().rev().for_each(|data| inbound.resend_queue.push_front(data));
                // No pod waits for the client until the request is sent again, which may take long.
                inbound.idle_timer.set_waiting(false);
                Some(Self::Client(inbound))
            }
        }
    }
}

impl ClientRequestBody {
    fn retain_for_resend(&mut self, frame: &Frame<Bytes>) {
        let kept_bytes = self.sent_pieces.iter().flatten().map(Bytes::len).sum::<usize>();
        match (frame.data_ref(), &mut self.sent_pieces) {
            (Some(data), Some(pieces)) if kept_bytes + data.len() <= MAX_RESEND_BYTES => {
                pieces.push(data.clone())
            }
            _ => self.sent_pieces = None,
        }
    }

    /// Polls the client's body. The bytes that it returns are not charged to the client connection any more.
    fn poll_body(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let mut next = Pin::new(&mut self.body).poll_frame(cx);
        if let Poll::Ready(Some(Ok(frame))) = &mut next {
            self.connection.remove_body_bytes(frame.data_ref().map_or(0, Bytes::len));
            frame.trailers_mut().into_iter().for_each(remove_client_claims);
        }
        next
    }

    fn is_end(&self) -> bool {
        self.resend_queue.is_empty() && (self.is_ended || self.body.is_end_stream())
    }
}

impl Body for PodRequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Self::Client(inbound) = self.get_mut() else { return Poll::Ready(None) };
        let next = match inbound.resend_queue.pop_front() {
            Some(data) => Some(Ok(Frame::data(data))),
            None => {
                let next = inbound.poll_body(cx);
                inbound.idle_timer.set_waiting(next.is_pending());
                ready!(next)
            }
        };
        match &next {
            Some(Ok(frame)) => inbound.retain_for_resend(frame),
            Some(Err(_)) | None => inbound.is_ended = true,
        }
        Poll::Ready(next)
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Empty => true,
            Self::Client(inbound) => inbound.is_end(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        let Self::Client(inbound) = self else { return SizeHint::with_exact(0) };
        let again = inbound.resend_queue.iter().map(Bytes::len).sum::<usize>() as u64;
        let exact = inbound.body.size_hint().exact();
        exact.map_or_else(SizeHint::default, |rest| SizeHint::with_exact(rest + again))
    }
}

impl Drop for ClientRequestBody {
    fn drop(&mut self) {
        // Closing the connection of a client that is still sending resets it, and the client would not see its
        // response.
        let is_read = self.is_ended || self.body.is_end_stream();
        if let Some(socket) = self.socket.take().filter(|_| !is_read) {
            socket.mark_unread_body();
        } else if !is_read {
            // Pieces that hyper has received are dropped with the body. They are read here, so that they are no
            // longer charged.
            let mut cx = Context::from_waker(Waker::noop());
            while let Poll::Ready(Some(Ok(_))) = self.poll_body(&mut cx) {}
        }
        self.connection.on_body_end();
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures::FutureExt as _;
    use http::{Request, Response};
    use http_body_util::Empty;
    use hyper::{server::conn::http1, service::service_fn};
    use hyper_util::rt::TokioIo;
    use prometheus_client::registry::Registry;
    use tokio::{
        io::{AsyncWriteExt as _, DuplexStream},
        sync::mpsc,
    };

    use super::*;
    use crate::{
        clients::connections::ClientConnections, config::ActivatorConfig, metrics::ActivatorMetrics,
    };

    const TIMEOUT: Duration = Duration::from_secs(60);

    /// Returns the body of a request of which the client has sent only the head, and the client's end.
    async fn receive_body() -> (PodRequestBody, DuplexStream) {
        let (mut client, server) = tokio::io::duplex(1024);
        let (bodies, mut received) = mpsc::channel(1);
        let service = service_fn(move |request: Request<Incoming>| {
            drop(bodies.try_send(request.into_body()));
            std::future::pending::<Result<Response<Empty<Bytes>>, Infallible>>()
        });
        tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(server), service));
        let head = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n\r\n";
        client.write_all(head).await.unwrap();
        let refusals = ActivatorMetrics::register(&mut Registry::default()).refusals;
        let budget = ActivatorConfig::defaults().budget(1024);
        let connection = Arc::new(ClientConnections::new(budget, refusals)).register().unwrap();
        (PodRequestBody::new(received.recv().await.unwrap(), None, &connection), client)
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_until_a_request_is_sent_again_is_no_pause_of_its_client() {
        let (mut body, _client) = receive_body().await;
        let idle_timer = body.idle_timer().unwrap();
        let mut cx = Context::from_waker(Waker::noop());
        assert!(Pin::new(&mut body).poll_frame(&mut cx).is_pending());
        let mut body = body.into_unsent().unwrap();
        tokio::time::advance(TIMEOUT).await;
        assert!(idle_timer.wait_idle(TIMEOUT).now_or_never().is_none(), "no pod waited for it");
        assert!(Pin::new(&mut body).poll_frame(&mut cx).is_pending());
        tokio::time::advance(TIMEOUT).await;
        assert!(idle_timer.wait_idle(TIMEOUT).now_or_never().is_some());
    }
}
