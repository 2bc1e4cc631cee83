//! Shell: the exchange of a plain request with a pod, up to the head of the response.

use std::{future::poll_fn, task::Poll, time::Duration};

use bytes::{Buf as _, BytesMut};
use common::{link::error_chain, wire::AppProtocol};
use http::{StatusCode, Version};
use tokio::time::{Instant, timeout};

use super::{FastPathConnection, PreparedRequest};
use crate::{
    clients::socket::ClientSocket,
    edge::{
        headers,
        plain_response::{PlainFraming, ResponseStart, rewrite_plain_response, write_pod_response},
    },
    h1::{self, Http1ResponseHead, ResponseBodyFraming, chunked::ChunkedDecoder},
    pods::{
        connection::PodConnection,
        exchange_error::PodError,
        http1_connection::{ByteRequest, Http1PodConnection},
    },
    request_error::ProxyRequestError,
    requests::{
        fast_route::FastRoute,
        forwarder::{MAX_CLOSED_CONNECTION_RETRIES, RequestForwarder},
        request_timer::first_deadline,
    },
    revisions::revision::PodPermit,
};

/// Time after which the general path waits for a dial. It watches the client meanwhile, and counts the request as
/// waiting. The dial itself goes on.
const MAX_DIAL_WAIT: Duration = Duration::from_millis(100);

/// Exchange with a pod whose response has begun.
pub(super) struct PodExchange {
    pub(super) permit: PodPermit,
    pub(super) pod: Box<Http1PodConnection>,
    pub(super) head: ReceivedHead,
}

/// Head of a final response, which is written for the client but for its last lines.
#[derive(Debug)]
pub(super) struct ReceivedHead {
    pub(super) status: StatusCode,
    pub(super) framing: ResponseBodyFraming,
    /// True if the pod's connection may serve another request afterwards.
    pub(super) is_reusable: bool,
    pub(super) has_date: bool,
}

/// Reason for which a request got no response of a pod.
#[derive(Debug)]
pub(super) enum ExchangeEnd {
    /// No pod has seen the request, and the general path serves it.
    Handover,
    /// The client has closed its connection.
    ClientGone,
    /// The client gets this error.
    Failed(ProxyRequestError),
}

/// Exchange that broke off before its response.
#[derive(Debug)]
struct BrokenExchange {
    reason: String,
    /// True if the request may be sent again.
    is_unseen: bool,
}

impl FastPathConnection<'_> {
    /// Sends a request to a pod, and waits for the head of the response. One that no pod has seen is sent again.
    pub(super) async fn exchange_with_pod(
        &mut self,
        request: &PreparedRequest,
        started: Instant,
    ) -> Result<PodExchange, ExchangeEnd> {
        let mut closed_connections = 0;
        loop {
            let connected = connect(self.forwarder, &request.route).await;
            let (permit, mut pod) = connected.ok_or(ExchangeEnd::Handover)?;
            let broken = match self.exchange(&mut pod, request, started).await? {
                Ok(head) => {
                    // The pod accepts connections now: more may be dialled at once.
                    permit.pod.on_response();
                    return Ok(PodExchange { permit, pod, head });
                }
                Err(broken) => broken,
            };
            if !broken.is_unseen || closed_connections == MAX_CLOSED_CONNECTION_RETRIES {
                let (address, reason) = (permit.pod.key.address, broken.reason);
                let failure = ProxyRequestError::ExchangeFailed { address, reason };
                return Err(ExchangeEnd::Failed(failure));
            }
            closed_connections += 1;
            self.forwarder.metrics.retries.inc();
        }
    }

    /// Runs one exchange, as long as its client is there and no timeout is over.
    async fn exchange(
        &mut self,
        pod: &mut Http1PodConnection,
        request: &PreparedRequest,
        started: Instant,
    ) -> Result<Result<ReceivedHead, BrokenExchange>, ExchangeEnd> {
        let Self { socket, buffers, timer, .. } = self;
        let socket = &*socket;
        buffers.response.clear();
        let body = &buffers.inbound[request.head_length..][..request.body_length];
        let sent = ByteRequest { head: &buffers.request, body, is_safe: request.is_safe };
        let exchange = receive_head(pod, sent, socket, &mut buffers.response);
        let client_gone = socket.wait_client_gone_past_hyper();
        tokio::pin!(exchange, client_gone);
        let deadline = first_deadline(request.route.timeouts, started);
        let end = poll_fn(|cx| {
            // A response that arrives together with the timeout, or with the end of the client's bytes, is in time.
            if let Poll::Ready(received) = exchange.as_mut().poll(cx) {
                return Poll::Ready(Ok(received));
            }
            if timer.poll_expired(cx, deadline).is_ready() {
                return Poll::Ready(Err(ExchangeEnd::Failed(ProxyRequestError::Timeout)));
            }
            client_gone.as_mut().poll(cx).map(|()| Err(ExchangeEnd::ClientGone))
        });
        end.await
    }
}

/// Returns a connection to a pod that has capacity now. `None`: the request has to wait, or the dial has failed.
async fn connect(
    forwarder: &RequestForwarder,
    route: &FastRoute,
) -> Option<(PodPermit, Box<Http1PodConnection>)> {
    let permit = route.revision.try_permit(route.service.service_port)?;
    if permit.pod.protocol() != AppProtocol::Http1 {
        return None;
    }
    let connection = match permit.pod.take_idle() {
        Some(connection) => connection,
        None => {
            let dial = permit.pod.connect(AppProtocol::Http1, || permit.report_unanswered_dial());
            let dialled = timeout(MAX_DIAL_WAIT, dial).await.ok()?;
            match dialled {
                Ok(connection) => connection,
                Err(_failed) => {
                    route.revision.on_dial_failed(permit);
                    forwarder.metrics.retries.inc();
                    return None;
                }
            }
        }
    };
    match connection {
        PodConnection::Http1(pod) => Some((permit, pod)),
        PodConnection::Http2(_) | PodConnection::Http2Stream(_) | PodConnection::Tcp(_) => None,
    }
}

/// Sends a request, and reads until the final response. Its head is written to `out`, and `client` gets interim
/// responses.
async fn receive_head(
    pod: &mut Http1PodConnection,
    request: ByteRequest<'_>,
    client: &ClientSocket,
    out: &mut BytesMut,
) -> Result<ReceivedHead, BrokenExchange> {
    let sent = pod.send_bytes(request).await;
    let mut may_repeat = sent.map_err(|error| BrokenExchange::new(&error, true))?;
    // Parsed as bytes, until that finds something unusual in a head.
    let mut is_unusual = false;
    loop {
        if !is_unusual && !pod.received().is_empty() {
            match rewrite_plain_response(pod.received(), out) {
                ResponseStart::Plain(plain) => {
                    pod.received().advance(plain.head_length);
                    let framing = match plain.framing {
                        PlainFraming::Length(length) => ResponseBodyFraming::Length(length),
                        PlainFraming::Chunked => {
                            ResponseBodyFraming::Chunked(ChunkedDecoder::default())
                        }
                    };
                    let (status, is_reusable) = (plain.status, plain.is_reusable);
                    let has_date = plain.has_date;
                    return Ok(ReceivedHead { status, framing, is_reusable, has_date });
                }
                ResponseStart::Incomplete => {}
                ResponseStart::Unusual => is_unusual = true,
            }
        }
        let parsed = if is_unusual { pod.parse_received_head() } else { Ok(None) };
        match parsed.map_err(|error| BrokenExchange::new(&PodError::from(error), false))? {
            Some(head) if head.status.is_informational() => {
                pass_interim_response(head, client)?;
                // Any byte of a response means that the pod has seen the request.
                (is_unusual, may_repeat) = (false, false);
            }
            Some(head) => return Ok(accept_head(head, out)),
            None => {
                let received = pod.receive().await;
                let is_unseen = may_repeat && pod.received().is_empty();
                received.map_err(|error| BrokenExchange::new(&error, is_unseen))?;
            }
        }
    }
}

/// Passes an interim response on. The whole request was sent, so that nothing waits for 100.
fn pass_interim_response(
    head: Http1ResponseHead,
    client: &ClientSocket,
) -> Result<(), BrokenExchange> {
    let Http1ResponseHead { status, headers: mut fields, .. } = head;
    match status {
        StatusCode::CONTINUE => {}
        StatusCode::SWITCHING_PROTOCOLS => {
            let reason = "pod switched protocols unasked".to_owned();
            return Err(BrokenExchange { reason, is_unseen: false });
        }
        _ => {
            headers::rewrite_response_head(&mut fields, status, Version::HTTP_11);
            client.send_interim(&h1::write_interim_head(status, &fields));
        }
    }
    Ok(())
}

/// Writes the head of a final response that is not plain.
fn accept_head(mut head: Http1ResponseHead, out: &mut BytesMut) -> ReceivedHead {
    headers::rewrite_response_head(&mut head.headers, head.status, Version::HTTP_11);
    let has_date = write_pod_response(&head, out);
    let Http1ResponseHead { status, framing, is_reusable, .. } = head;
    ReceivedHead { status, framing, is_reusable, has_date }
}

impl BrokenExchange {
    fn new(error: &PodError, is_unseen: bool) -> Self {
        Self { reason: error_chain(error), is_unseen }
    }
}
