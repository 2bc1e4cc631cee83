//! Shell: a request at a pod: the wait for capacity there, the exchange, and the pod's response on its way to the
//! client.
//!
//! Interim responses of a pod are passed on over HTTP/1.1, below `hyper`, whose server cannot send them. `hyper` sends
//! 100 itself, once the pod's own 100 has released the body.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use common::wire::AppProtocol;
use http::{HeaderMap, Request, Response, StatusCode, Version};
use hyper::{ext::Protocol, upgrade::OnUpgrade};
use tokio::{
    net::TcpStream,
    time::{Instant, sleep_until},
};

use super::{MAX_CLOSED_CONNECTION_RETRIES, RequestForwarder};
use crate::{
    budget::ClientBound,
    clients::{connections::ClientConnection, socket::ClientSocket},
    clock::now_ns,
    edge::{headers, websocket},
    grpc::GrpcProtocol,
    h1,
    pods::{
        connection::{PodConnection, PodResponseBody},
        endpoint::{LATE_DIAL_TIMEOUT, PodDialError},
        exchange_error::{ExchangeError, PodSendError},
        http1_connection::InterimResponseSink,
        request_body::{BodyIdleTimer, PodRequestBody},
    },
    request_error::ProxyRequestError,
    requests::{
        pending_request::PendingRequest,
        request_observers::RequestObservers,
        request_timer::RequestTimer,
        response_body::ClientResponseBody,
        upgraded_client::{UpgradedClient, UpgradedStream},
        upgraded_connection::relay_upgraded_connection,
    },
    revisions::revision::{PodPermit, QueueEntry},
};

/// Number of failed dials of one request after which its client gets an error. If the Revision has one ready pod and
/// that one refuses them all, the pauses between them take at least 3.8 s.
const MAX_DIAL_ATTEMPTS: u32 = 10;

/// Response of a pod, with the permit of its request.
#[derive(Debug)]
pub(super) struct PodResponse {
    pub(super) response: Response<PodResponseBody>,
    pub(super) permit: Arc<PodPermit>,
    /// Time at which a rule wants the response to be complete; `None`: only the whole request has a limit.
    pub(super) deadline: Option<Instant>,
}

impl RequestForwarder {
    /// Waits for capacity at a pod, sends the request there and waits for the head of its response.
    pub(super) async fn forward_to_pod(
        &self,
        pending: &mut PendingRequest,
        observers: &mut RequestObservers,
    ) -> Result<PodResponse, ProxyRequestError> {
        let client = Arc::clone(&pending.connection);
        let service_port = pending.service.service_port;
        let queue_entry = pending.revision.queue_entry(service_port, pending.charged_bytes());
        let mut queue_entry = queue_entry.with_client(pending.client.address);
        let (mut failed_dials, mut closed_connections) = (0, 0);
        loop {
            // The bytes of a refused connection do not count any more. So its request ends at once, whatever it waits
            // for, and takes no capacity of a pod.
            let connected = tokio::select! {
                biased;
                () = client.wait_refused() => Err(ProxyRequestError::TooManyRequestBytes),
                connected = self.connect(pending, &mut queue_entry, &mut failed_dials, observers) => connected,
            };
            let (permit, connection) = connected?;
            observers.end_wait(queue_entry.take_wait_cause());
            let address = permit.pod.key.address;
            // From here on the eBPF programs count the request at the pod: it must not count as waiting as well.
            queue_entry.finish_waiting();
            let mut request = pending.take_prepared();
            observers.start_attempt(address, &permit.pod.name, request.headers_mut());
            let permit = Arc::new(permit);
            // A response may end before the request's body does. The body keeps the permit, since it still occupies the
            // pod.
            request.body_mut().hold_permit(Arc::clone(&permit) as _);
            // Clients of gRPC may pause their bodies for any time: a call has two directions at once.
            let is_grpc = || GrpcProtocol::of_content_type(request.headers()).is_some();
            let idle_timer = request.body().idle_timer().map(|it| (it, is_grpc()));
            // A client that stalls in its body occupies a pod's capacity. So the wait for the response is bounded by
            // the body's progress.
            let socket = pending.socket.as_ref();
            let deadline = pending.exchange_deadline();
            let result = send_to_pod(connection, request, socket, pending.websocket.is_some());
            let result = match (idle_timer, deadline) {
                (None, None) => result.await,
                (idle_timer, deadline) => tokio::select! {
                    biased;
                    result = result => result,
                    failure = wait_exchange_failure(&client, idle_timer.as_ref(), deadline) => {
                        return Err(failure);
                    }
                },
            };
            let error = match result {
                Ok(response) => {
                    observers.on_response(response.status());
                    // The pod accepts connections now: more may be dialled at once.
                    permit.pod.on_response();
                    return Ok(PodResponse { response, permit, deadline });
                }
                Err(error) => error,
            };
            observers.fail_attempt(&error.cause.to_string());
            // A pod may have closed an idle connection at the same moment. The request is charged and queued again,
            // with its place.
            match error.resendable {
                Some(request_again) if closed_connections < MAX_CLOSED_CONNECTION_RETRIES => {
                    pending.put_back(request_again)
                }
                _ => return Err(exchange_error(address, &error.cause)),
            }
            closed_connections += 1;
            self.metrics.retries.inc();
        }
    }

    /// Waits for capacity at a pod and for a connection to it. After a failed dial it waits again, until too many have
    /// failed.
    async fn connect(
        &self,
        pending: &mut PendingRequest,
        queue_entry: &mut QueueEntry,
        failed_dials: &mut u32,
        observers: &mut RequestObservers,
    ) -> Result<(PodPermit, PodConnection), ProxyRequestError> {
        observers.start_wait(&pending.connection);
        loop {
            let permit = queue_entry.acquire_permit().await?;
            let dialled_ns = observers.is_traced().then(now_ns);
            // Only with a permit: waiting heads are charged by their size, and this adds headers.
            pending.prepare(&self.edge_policy.current())?;
            let connected = if pending.websocket.is_some() {
                // Boxed, because it is rare and would enlarge the future of every waiting request.
                Box::pin(connect_for_websocket(&permit, queue_entry)).await
            } else {
                connect_to_pod(&permit, pending.settings.protocol, queue_entry).await
            };
            let error = match connected {
                Ok(connection) => return Ok((permit, connection)),
                Err(error) => error,
            };
            *failed_dials += 1;
            let address = permit.pod.key.address;
            if let Some(since_ns) = dialled_ns {
                observers.record_failed_dial(address, since_ns, &error.to_string());
            }
            // The pod is avoided for a pause. The queue entry keeps its place, so the request does not fall behind
            // others.
            pending.revision.on_dial_failed(permit);
            if *failed_dials == MAX_DIAL_ATTEMPTS {
                return Err(ProxyRequestError::DialFailed { address, reason: error.to_string() });
            }
            self.metrics.retries.inc();
        }
    }

    /// Makes a pod's response the one for the client. After a switch of protocols the upgraded connection gets a task.
    pub(super) fn relay_response(
        &self,
        pod_response: PodResponse,
        pending: &mut PendingRequest,
        timer: RequestTimer,
        observers: &mut RequestObservers,
    ) -> Result<Response<ClientResponseBody>, ProxyRequestError> {
        let PodResponse { mut response, permit, .. } = pod_response;
        let address = permit.pod.key.address;
        let failed = |reason: String| ProxyRequestError::ExchangeFailed { address, reason };
        let status = response.status();
        // Set by hyper if the pod speaks HTTP/2 and has opened the WebSocket.
        let opened = response.extensions_mut().remove::<OnUpgrade>();
        if let Some(handshake) = pending.websocket.as_ref().filter(|_| opened.is_none()) {
            let checked = handshake.check_response(status, response.headers());
            checked.map_err(|error| failed(error.to_string()))?;
        }
        headers::rewrite_response_head(response.headers_mut(), status, pending.client_version);
        if pending.is_https
            && let Some(policy) = pending.hsts(&self.edge_policy.current())
        {
            headers::add_hsts(response.headers_mut(), policy);
        }
        if let Some(picked) = &pending.service_match.picked_backend {
            picked.change_response(response.headers_mut());
        }
        if status != StatusCode::SWITCHING_PROTOCOLS && opened.is_none() {
            let protocol = pending.grpc_protocol;
            return Ok(
                response.map(|body| ClientResponseBody::from_pod(body, timer, permit, protocol))
            );
        }
        // Both ends leave HTTP at the same time. A 101 that the client has not asked for has no counterpart, and is an
        // error.
        let body = std::mem::replace(response.body_mut(), PodResponseBody::Ended);
        let pod = body.into_upgraded(opened);
        let Some((upgrade, pod)) = pending.upgrade.take().zip(pod) else {
            return Err(failed("pod switched protocols unasked".to_owned()));
        };
        let body = pending.websocket_body.take();
        let stream = body.and_then(|it| UpgradedStream::of_current_task(&pending.connection, it));
        let client = UpgradedClient { upgrade, stream: stream.map(Arc::new) };
        if pending.websocket.is_some() {
            websocket::convert_switch_response(&mut response);
        }
        // Such a request lasts for as long as its upgraded connection.
        let mut observers = std::mem::take(observers);
        observers.set_status(StatusCode::SWITCHING_PROTOCOLS);
        let relay =
            relay_upgraded_connection(client, pod, permit, timer, self.close_upgraded.clone());
        let request_guard = pending.connection.start_request();
        self.tasks.spawn(async move {
            request_guard.connection().cut_off.run_until_cancelled(relay).await;
            drop((observers, request_guard));
        });
        Ok(response.map(|_empty| ClientResponseBody::from_text("")))
    }
}

/// Waits for a connection to the permit's pod. While the pod leaves the dial unanswered, another pod is better, if one
/// is open.
pub(super) async fn connect_to_pod(
    permit: &PodPermit,
    protocol: AppProtocol,
    queue_entry: &mut QueueEntry,
) -> Result<PodConnection, PodDialError> {
    let connect = permit.pod.connect(protocol, || permit.report_unanswered_dial());
    tokio::pin!(connect);
    match tokio::time::timeout(LATE_DIAL_TIMEOUT, connect.as_mut()).await {
        Ok(connected) => connected,
        Err(_late) => {
            queue_entry.start_waiting();
            connect.await
        }
    }
}

/// Waits for a connection for a WebSocket handshake. It is one of HTTP/2 if the pod takes extended CONNECT. Otherwise it
/// is one of HTTP/1.1, as for clients of that version: servers of HTTP/2 without TLS commonly speak both.
async fn connect_for_websocket(
    permit: &PodPermit,
    queue_entry: &mut QueueEntry,
) -> Result<PodConnection, PodDialError> {
    if permit.pod.protocol() == AppProtocol::H2c {
        let connection = connect_to_pod(permit, AppProtocol::Tcp, queue_entry).await?;
        if let Some(stream) = connection.into_raw_tcp()
            && let Some(connection) = await_settings(stream, queue_entry).await
        {
            return Ok(connection);
        }
    }
    connect_to_pod(permit, AppProtocol::Http1, queue_entry).await
}

/// Opens HTTP/2 for a WebSocket, which waits for the pod's settings. The kernel accepts a connection long before a pod
/// that is still starting does, and the eBPF programs count no request on it yet. So a late pod counts as one whose dial
/// is late.
async fn await_settings(stream: TcpStream, queue_entry: &mut QueueEntry) -> Option<PodConnection> {
    let open = PodConnection::open_for_websocket(stream);
    tokio::pin!(open);
    match tokio::time::timeout(LATE_DIAL_TIMEOUT, open.as_mut()).await {
        Ok(opened) => opened,
        Err(_late) => {
            queue_entry.start_waiting();
            open.await
        }
    }
}

/// Sends a request and waits for the head of the response. `socket` gets interim responses.
async fn send_to_pod(
    connection: PodConnection,
    request: Request<PodRequestBody>,
    socket: Option<&ClientSocket>,
    is_websocket: bool,
) -> Result<Response<PodResponseBody>, PodSendError> {
    if is_websocket && connection.is_http2() {
        // Boxed, because it is rare and would enlarge the future of every request.
        return Box::pin(send_extended_connect(connection, request)).await;
    }
    connection.send(request, &mut ClientInterimSink(socket)).await
}

/// Sends a WebSocket handshake to a pod of HTTP/2. If it can be sent again, it comes back in the form for HTTP/1.1,
/// since the next pod may need that.
async fn send_extended_connect(
    connection: PodConnection,
    request: Request<PodRequestBody>,
) -> Result<Response<PodResponseBody>, PodSendError> {
    let (mut head, body) = request.into_parts();
    let http1_head = head.clone();
    websocket::convert_to_connect(&mut head);
    head.extensions.insert(Protocol::from_static(headers::WEBSOCKET));
    let sent = connection.send(Request::from_parts(head, body), &mut ClientInterimSink(None)).await;
    sent.map_err(|PodSendError { resendable, cause }| {
        let resendable = resendable.map(|it| Request::from_parts(http1_head, it.into_body()));
        PodSendError { resendable, cause }
    })
}

/// Waits until an exchange has to be given up. Reasons are a client that stalls in its body, too many bytes that are
/// held, and `deadline`. `idle_timer` is that of the body, and true for a call of gRPC.
async fn wait_exchange_failure(
    connection: &Arc<ClientConnection>,
    idle_timer: Option<&(Arc<BodyIdleTimer>, bool)>,
    deadline: Option<Instant>,
) -> ProxyRequestError {
    let (connections, _guard) = (connection.connections(), connection.subscribe_refusal());
    tokio::select! {
        () = connection.wait_refused() => ProxyRequestError::TooManyRequestBytes,
        () = wait_idle_body(idle_timer, connections.budget.body_idle_timeout) => {
            connections.count_refusal(ClientBound::BodyIdleTimeout);
            ProxyRequestError::BodyIdleTimeout
        }
        () = wait_deadline(deadline) => ProxyRequestError::Timeout,
    }
}

/// Waits until the client of a body has sent nothing for the time `most`. For gRPC, and without a body, it never ends.
async fn wait_idle_body(idle_timer: Option<&(Arc<BodyIdleTimer>, bool)>, most: Duration) {
    match idle_timer {
        Some((idle_timer, false)) => idle_timer.wait_idle(most).await,
        Some((_, true)) | None => std::future::pending().await,
    }
}

/// Waits for a deadline, without an end if there is none.
async fn wait_deadline(deadline: Option<Instant>) {
    match deadline {
        // Boxed, because it is rare and would enlarge the future of every request.
        Some(deadline) => Box::pin(sleep_until(deadline)).await,
        None => std::future::pending().await,
    }
}

/// Failure for the client. An error of the client (its body broke off or was invalid) is not attributed to the pod.
fn exchange_error(address: SocketAddr, cause: &ExchangeError) -> ProxyRequestError {
    let reason = common::link::error_chain(cause);
    match cause {
        ExchangeError::Client(_) => ProxyRequestError::BadRequest(reason),
        ExchangeError::Pod(_) => ProxyRequestError::ExchangeFailed { address, reason },
    }
}

/// Sink that passes a pod's interim responses on to the client.
struct ClientInterimSink<'a>(Option<&'a ClientSocket>);

impl InterimResponseSink for ClientInterimSink<'_> {
    fn on_interim_response(&mut self, status: StatusCode, fields: &HeaderMap) {
        let Some(socket) = self.0 else { return };
        let mut fields = fields.clone();
        headers::rewrite_response_head(&mut fields, status, Version::HTTP_11);
        socket.send_interim(&h1::write_interim_head(status, &fields));
    }
}
