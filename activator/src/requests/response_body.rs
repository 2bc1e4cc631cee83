//! Shell: the body of a response, passed on from the pod to the client as it comes.
//!
//! A timeout after the response has begun ends it in Knative's way (`pkg/http/handler/timeout.go`). The status code
//! stays, the text of the failure is appended, and the response ends. A response with a stated length cannot end before
//! that length. It is cut off behind the text, or without the text if that would not fit.
//!
//! Beyond the deadline of a rule of the Gateway API, each response is cut off without a text. Clients would take a
//! graceful end for that of the whole response.
//!
//! A response to a call of gRPC ends with trailers in place of the text, since these state that it is not whole. Clients
//! would take the text for the head of a message.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tracing::warn;

use crate::{
    grpc::{GrpcProtocol, status_fields},
    pods::{connection::PodResponseBody, exchange_error::PodError},
    request_error::ProxyRequestError,
    requests::{request_observers::RequestObservers, request_timer::RequestTimer},
    revisions::revision::PodPermit,
};

/// Body of a response to a client.
#[derive(Debug)]
pub enum ClientResponseBody {
    /// Text of the activator itself; `None` once it is sent.
    Text(Option<Bytes>),
    /// Body of a pod's response.
    Pod(Box<ForwardedPodBody>),
    /// Body of either kind, for a request that is logged, traced or measured.
    Observed(Box<ObservedResponseBody>),
}

/// Body whose end completes what is recorded of its request.
#[derive(Debug)]
pub struct ObservedResponseBody {
    body: ClientResponseBody,
    observers: RequestObservers,
}

/// Error because of which a response that had begun was cut off.
#[derive(Debug, thiserror::Error)]
pub enum ResponseBodyError {
    /// The pod's response broke off.
    #[error("response of pod broke off")]
    Pod(#[source] PodError),
    /// A timeout of the Revision or of a rule is over.
    #[error("activator request timeout")]
    Timeout,
    /// The client is gone, so the response has no reader.
    #[error("client has gone")]
    Client,
}

/// Body of a pod's response, with the connection and the permit to be released at its end.
#[derive(Debug)]
pub struct ForwardedPodBody {
    body: PodResponseBody,
    timer: RequestTimer,
    permit: Option<Arc<PodPermit>>,
    /// True if its client reads a status of gRPC from trailers.
    has_grpc_trailers: bool,
    timeout_state: ResponseTimeoutState,
}

/// State of a response with regard to its timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ResponseTimeoutState {
    /// The timeout is not over.
    Open,
    /// The text, or the status of gRPC, was sent, and the response has ended gracefully.
    Ended,
    /// The text was sent, and has to reach the client before the connection is closed.
    TextSent,
    /// The next poll returns the error that closes the connection: the text was sent, or does not fit.
    Aborted,
}

impl ClientResponseBody {
    /// Creates a response body of the activator itself.
    pub fn from_text(text: impl Into<Bytes>) -> Self {
        Self::Text(Some(text.into()).filter(|text: &Bytes| !text.is_empty()))
    }

    /// Creates a response body from a pod's. Its connection and permit are released at its end. `protocol` is that of a
    /// call of gRPC.
    pub fn from_pod(
        body: PodResponseBody,
        mut timer: RequestTimer,
        permit: Arc<PodPermit>,
        protocol: Option<GrpcProtocol>,
    ) -> Self {
        timer.restart_idle_timeout();
        let mut pod_body = ForwardedPodBody {
            body,
            timer,
            permit: Some(permit),
            // gRPC-Web has its trailers in a message, which would have to begin where another one has ended.
            has_grpc_trailers: protocol == Some(GrpcProtocol::Native),
            timeout_state: ResponseTimeoutState::Open,
        };
        if pod_body.body.is_end() {
            pod_body.release_connection();
            return Self::Text(None);
        }
        Self::Pod(Box::new(pod_body))
    }

    /// Adds the observers of the request, which note its end once the body was passed on.
    pub fn with_observers(self, observers: RequestObservers) -> Self {
        Self::Observed(Box::new(ObservedResponseBody { body: self, observers }))
    }
}

impl ClientResponseBody {
    /// Maximum number of its bytes that may be buffered here before the client asks for them.
    pub fn max_buffered(&self) -> usize {
        match self {
            Self::Text(_) => 0,
            Self::Pod(pod_body) => {
                let upper = pod_body.body.size_hint().upper();
                let upper = upper.and_then(|it| usize::try_from(it).ok()).unwrap_or(usize::MAX);
                pod_body.body.max_buffered().min(upper)
            }
            Self::Observed(observed) => observed.body.max_buffered(),
        }
    }

    /// Passes on to the pod that the client has closed its sending half. Returns false if the pod cannot be notified.
    pub fn forward_fin(&mut self, cx: &mut Context<'_>) -> bool {
        match self {
            Self::Text(_) => false,
            Self::Pod(pod_body) => pod_body.body.forward_fin(cx),
            Self::Observed(observed) => observed.body.forward_fin(cx),
        }
    }
}

impl ObservedResponseBody {
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ResponseBodyError>>> {
        let next = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if let Some(Ok(frame)) = &next {
            self.observers.add_body_bytes(frame.data_ref().map_or(0, Bytes::len));
        }
        Poll::Ready(next)
    }
}

impl ForwardedPodBody {
    /// Ends an exchange that is complete: the connection may be used again.
    fn release_connection(&mut self) {
        let connection = self.body.take_reusable_connection();
        if let (Some(permit), Some(connection)) = (self.permit.take(), connection) {
            Arc::clone(&permit.pod).return_connection(connection);
        }
    }

    /// Ends an exchange that has failed: the connection is closed.
    fn close_connection(&mut self) {
        self.body = PodResponseBody::Ended;
        self.permit = None;
    }

    fn poll(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ResponseBodyError>>> {
        match self.timeout_state {
            ResponseTimeoutState::Open => {}
            ResponseTimeoutState::Ended => return Poll::Ready(None),
            // The task is polled once more, so that hyper writes the text before the error closes the connection.
            ResponseTimeoutState::TextSent => {
                self.timeout_state = ResponseTimeoutState::Aborted;
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            ResponseTimeoutState::Aborted => {
                return Poll::Ready(Some(Err(ResponseBodyError::Timeout)));
            }
        }
        let Poll::Ready(next) = self.body.poll_frame(cx) else {
            // The timer is polled only while the pod is silent: a frame that is there is passed on first.
            ready!(self.timer.poll_expired(cx));
            return Poll::Ready(Some(self.on_timeout()));
        };
        match &next {
            // The connection is free again with the last frame, before the client has read it.
            Some(Ok(_)) if self.body.is_end() => self.release_connection(),
            Some(Ok(_)) if self.timer.idle_timeout().is_some() => self.timer.restart_idle_timeout(),
            Some(Ok(_)) => {}
            Some(Err(_)) => self.close_connection(),
            None => self.release_connection(),
        }
        Poll::Ready(next.map(|frame| frame.map_err(ResponseBodyError::Pod)))
    }

    /// Ends the response because a timeout is over. Returns the status of gRPC or the text of the failure, if the stated
    /// length allows it.
    fn on_timeout(&mut self) -> Result<Frame<Bytes>, ResponseBodyError> {
        if let Some(permit) = &self.permit {
            warn!(pod = %permit.pod.uid, "response cut off: request timeout");
        }
        let text = ProxyRequestError::Timeout.to_string();
        let left = self.body.size_hint().exact();
        if self.has_grpc_trailers && left.is_none() {
            self.timeout_state = ResponseTimeoutState::Ended;
            self.close_connection();
            let code = ProxyRequestError::Timeout.grpc_code();
            return Ok(Frame::trailers(status_fields(code, &text)));
        }
        self.timeout_state = match left {
            // Without the text: clients would take a graceful end for that of the whole response.
            _ if self.timer.is_rule_deadline_over() => ResponseTimeoutState::Aborted,
            None => ResponseTimeoutState::Ended,
            Some(left) if left < text.len() as u64 => ResponseTimeoutState::Aborted,
            Some(_) => ResponseTimeoutState::TextSent,
        };
        self.close_connection();
        match self.timeout_state {
            ResponseTimeoutState::Open | ResponseTimeoutState::Aborted => {
                Err(ResponseBodyError::Timeout)
            }
            ResponseTimeoutState::Ended | ResponseTimeoutState::TextSent => {
                Ok(Frame::data(text.into()))
            }
        }
    }

    fn is_ended(&self) -> bool {
        match self.timeout_state {
            ResponseTimeoutState::Open => self.body.is_end(),
            ResponseTimeoutState::Ended => true,
            ResponseTimeoutState::TextSent | ResponseTimeoutState::Aborted => false,
        }
    }
}

impl Body for ClientResponseBody {
    type Data = Bytes;
    type Error = ResponseBodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ResponseBodyError>>> {
        match self.get_mut() {
            Self::Text(text) => Poll::Ready(text.take().map(|text| Ok(Frame::data(text)))),
            Self::Pod(pod_body) => pod_body.poll(cx),
            Self::Observed(observed) => observed.poll(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Text(text) => text.is_none(),
            Self::Pod(pod_body) => pod_body.is_ended(),
            Self::Observed(observed) => observed.body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Text(text) => SizeHint::with_exact(
                text.as_ref().map_or(0, |text| u64::try_from(text.len()).unwrap_or(u64::MAX)),
            ),
            Self::Pod(pod_body) => pod_body.body.size_hint(),
            Self::Observed(observed) => observed.body.size_hint(),
        }
    }
}
