//! Shell: the fast path: plain requests of one client connection of HTTP/1.1, without hyper.
//!
//! One task has the connection, its buffers and the exchange with the pod. A request stays in the buffer until a response
//! begins. Up to then it can go to the general path, with all bytes behind it. The general path keeps the connection
//! from there on.

use std::{future::poll_fn, sync::Arc, task::Poll, time::Duration};

use bytes::BytesMut;
use futures::{FutureExt as _, StreamExt as _, stream::FuturesUnordered};
use tokio::{io::AsyncWriteExt as _, time::Instant};
use tokio_util::sync::WaitForCancellationFuture;

use self::{connection_timer::ConnectionTimer, exchange::ExchangeEnd, response::CachedDate};
use super::ClientConnectionServer;
use crate::{
    clients::{client_info::ClientInfo, connections::ClientConnection, socket::ClientSocket},
    clock::random_u64,
    edge::plain_request::{
        PlainRequest, RequestStart, field_array, read_request_start, render_client_fields,
    },
    entrypoint::{Entrypoint, TrafficOrigin},
    requests::{
        fast_route::FastRoute,
        forwarder::{CancelledRequestGuard, RequestForwarder},
    },
};

mod connection_timer;
mod exchange;
mod response;

/// Bytes of a plain request with its body. The buffer of the connection has as many, and the kernel of a pod takes them
/// whatever its process does.
const MAX_REQUEST_BYTES: usize = 8 << 10;

/// Client connection on the fast path.
pub(super) struct FastPathConnection<'a> {
    forwarder: &'a RequestForwarder,
    client_connection: &'a Arc<ClientConnection>,
    socket: ClientSocket,
    entrypoint: Entrypoint,
    client: ClientInfo,
    /// Time for a head to arrive, and for the connection to be idle.
    head_timeout: Duration,
    buffers: FastPathBuffers,
    /// Bytes of an incomplete head that are charged to the connection.
    charged_head_bytes: usize,
    /// Route of the last request.
    route: Option<Arc<FastRoute>>,
    timer: ConnectionTimer,
    /// Set of the one future that resolves once the connection has to take no further request. The set polls it only
    /// once it is woken, since to poll the future itself takes locks that all connections share.
    stop_signal: FuturesUnordered<WaitForCancellationFuture<'a>>,
    date: CachedDate,
}

/// Result of the fast path for a connection.
#[derive(Debug)]
pub(super) enum FastPathEnd {
    /// The connection has ended.
    Closed,
    /// The general path serves the connection from here on. These bytes of its requests were read already.
    Handover(BytesMut),
}

/// Buffers of a connection, which an idle one does not have.
#[derive(Debug, Default)]
struct FastPathBuffers {
    /// Bytes of requests that were received.
    inbound: BytesMut,
    /// Head for the pod.
    request: BytesMut,
    /// Head for the client.
    response: BytesMut,
}

/// Reason for which a connection leaves the fast path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PathEnd {
    /// The general path serves what is in the buffer, and all that comes.
    Handover,
    /// Everything was sent, and the connection is closed in order.
    Close,
    /// The connection is dropped.
    Break,
}

/// Request that is complete in the buffer, and whose head for the pod is written.
#[derive(Debug)]
struct PreparedRequest {
    head_length: usize,
    body_length: usize,
    is_safe: bool,
    route: Arc<FastRoute>,
}

impl<'a> FastPathConnection<'a> {
    pub(super) fn new(
        server: &'a ClientConnectionServer,
        socket: ClientSocket,
        entrypoint: Entrypoint,
        client: ClientInfo,
        client_connection: &'a Arc<ClientConnection>,
    ) -> Self {
        let (forwarder, head_timeout) =
            (&*server.forwarder, server.connections.budget.head_timeout);
        let stop_signal = FuturesUnordered::new();
        stop_signal.push(forwarder.close_when_idle.cancelled());
        Self {
            forwarder,
            client_connection,
            socket,
            entrypoint,
            client,
            head_timeout,
            buffers: FastPathBuffers::default(),
            charged_head_bytes: 0,
            route: None,
            timer: ConnectionTimer::new(Instant::now() + head_timeout),
            stop_signal,
            date: CachedDate::default(),
        }
    }

    /// Serves plain requests, as long as there are no others.
    pub(super) async fn run(mut self) -> FastPathEnd {
        let end = loop {
            let request = match self.next_request().await {
                Ok(request) => request,
                Err(end) => break end,
            };
            // Boxed, so that a connection without a request holds no memory for one.
            if let Err(end) = Box::pin(self.serve_request(&request)).await {
                break end;
            }
        };
        self.charge_head(0);
        match end {
            PathEnd::Handover => return FastPathEnd::Handover(self.buffers.inbound),
            PathEnd::Close => {
                if !self.buffers.inbound.is_empty() {
                    // The client sends more. With unread bytes the close would be a reset, and the response be lost.
                    self.socket.mark_unread_body();
                }
                // The client may be gone, which ends the connection as well.
                let _ = self.socket.shutdown().await;
            }
            PathEnd::Break => {}
        }
        FastPathEnd::Closed
    }

    /// Waits for a request that is complete.
    async fn next_request(&mut self) -> Result<PreparedRequest, PathEnd> {
        let deadline = Instant::now() + self.head_timeout;
        loop {
            let prepared = self.prepare_request()?;
            let partial = if prepared.is_some() { 0 } else { self.buffers.inbound.len() };
            self.charge_head(partial);
            match prepared {
                Some(request) => return Ok(request),
                None => self.read_more(deadline).await?,
            }
        }
    }

    /// Reads the request at the front of the buffer, finds its route, and writes its head for the pod. `None`: more bytes
    /// have to come.
    fn prepare_request(&mut self) -> Result<Option<PreparedRequest>, PathEnd> {
        if !self.forwarder.is_fast_path_open() {
            return Err(PathEnd::Handover);
        }
        let mut fields = field_array();
        let inbound = &self.buffers.inbound;
        let request = match read_request_start(inbound, &mut fields) {
            RequestStart::Incomplete if inbound.len() < MAX_REQUEST_BYTES => return Ok(None),
            RequestStart::Incomplete | RequestStart::Unusual => return Err(PathEnd::Handover),
            RequestStart::Plain(request) => request,
        };
        // The general path decides which requests are refused, and closes a refused connection.
        let connection = self.client_connection;
        if connection.is_refused() || connection.connections().is_over_budget() {
            return Err(PathEnd::Handover);
        }
        let generation = self.forwarder.routes.generation();
        if self.route.as_ref().is_none_or(|it| !it.is_valid(generation, request.host)) {
            let (entrypoint, client) = (self.entrypoint, self.client);
            let found =
                self.forwarder.find_fast_route(request.host, entrypoint, client, connection);
            self.route = found.map(Arc::new);
        }
        let route = self.route.clone().ok_or(PathEnd::Handover)?;
        let own_fields = self.own_client_fields(&request)?;
        let client_fields = own_fields.as_deref().unwrap_or(&route.client_fields);
        let (head_length, body_length) = (request.head_length, request.body_length);
        let is_safe = request.is_safe;
        self.buffers.request.clear();
        request.write_for_pod(client_fields, random_u64, &mut self.buffers.request);
        Ok(Some(PreparedRequest { head_length, body_length, is_safe, route }))
    }

    /// Fields that describe the client to the pod, if they are of this request alone: proxies inside the cluster have
    /// described the client. What clients outside claim is dropped.
    fn own_client_fields(
        &self,
        request: &PlainRequest<'_, '_>,
    ) -> Result<Option<BytesMut>, PathEnd> {
        let is_inside = self.entrypoint.traffic_origin() == TrafficOrigin::Internal;
        if !is_inside || !request.has_client_claims() {
            return Ok(None);
        }
        let (sender, edge) =
            (self.client.request_sender(self.entrypoint), self.forwarder.edge_policy.current());
        let rendered = render_client_fields(request.host, request.client_claims(), sender, &edge);
        rendered.map(Some).ok_or(PathEnd::Handover)
    }

    /// Waits for more bytes of a request.
    async fn read_more(&mut self, deadline: Instant) -> Result<(), PathEnd> {
        let Self { socket, buffers, timer, stop_signal, .. } = self;
        let read = poll_fn(|cx| {
            let read = socket.poll_read_past_hyper(cx, &mut buffers.inbound, MAX_REQUEST_BYTES);
            let is_empty = buffers.inbound.is_empty();
            match read {
                Poll::Ready(Ok(0)) if is_empty => return Poll::Ready(Err(PathEnd::Close)),
                // The client has closed its half within a head, which hyper answers.
                Poll::Ready(Ok(0)) => return Poll::Ready(Err(PathEnd::Handover)),
                Poll::Ready(Ok(_)) => return Poll::Ready(Ok(())),
                Poll::Ready(Err(_gone)) => return Poll::Ready(Err(PathEnd::Break)),
                Poll::Pending => {}
            }
            if is_empty {
                *buffers = FastPathBuffers::default();
            }
            if stop_signal.poll_next_unpin(cx).is_ready() {
                let end = if is_empty { PathEnd::Close } else { PathEnd::Handover };
                return Poll::Ready(Err(end));
            }
            timer.poll_expired(cx, deadline).map(|()| Err(PathEnd::Break))
        });
        read.await
    }

    /// Serves one request: its exchange with a pod, and the response to the client.
    async fn serve_request(&mut self, request: &PreparedRequest) -> Result<(), PathEnd> {
        let request_guard = self.client_connection.start_request();
        let started = Instant::now();
        // Counts the request if the future is dropped, or if the client is gone.
        let mut cancelled = CancelledRequestGuard(Some(&self.forwarder.metrics));
        let exchanged = self.exchange_with_pod(request, started).await;
        if matches!(exchanged, Err(ExchangeEnd::ClientGone)) {
            return Err(PathEnd::Break);
        }
        cancelled.0 = None;
        match exchanged {
            Ok(exchange) => self.send_response(exchange, request, started, request_guard).await,
            Err(ExchangeEnd::Failed(failure)) => self.send_failure(request, &failure).await,
            Err(ExchangeEnd::Handover | ExchangeEnd::ClientGone) => Err(PathEnd::Handover),
        }
    }

    /// Returns true if the connection has to take no further request.
    fn is_stopping(&mut self) -> bool {
        self.stop_signal.next().now_or_never().is_some()
    }

    /// Changes the bytes of an incomplete head that are charged to the connection.
    fn charge_head(&mut self, bytes: usize) {
        let before = std::mem::replace(&mut self.charged_head_bytes, bytes);
        if before != bytes {
            self.client_connection.change_head_bytes(before, bytes);
        }
    }
}
