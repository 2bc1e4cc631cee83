//! Shell: errors of exchanges with pods.

use std::io;

use http::Request;

use crate::{h1::Http1ParseError, pods::request_body::PodRequestBody};

/// Error of a request that got no response.
#[derive(Debug)]
pub struct PodSendError {
    /// Request to send again, if the pod has received nothing of it, has refused to process it, or may process it
    /// twice.
    pub resendable: Option<Request<PodRequestBody>>,
    /// Error of the exchange, with the side that caused it.
    pub cause: ExchangeError,
}

/// Error of an exchange, by the side that caused it.
#[derive(Debug, thiserror::Error)]
pub enum ExchangeError {
    /// The client's body broke off or was invalid.
    #[error(transparent)]
    Client(hyper::Error),
    /// The pod or the connection to it failed.
    #[error(transparent)]
    Pod(#[from] PodError),
}

/// Error of a pod in an exchange.
#[derive(Debug, thiserror::Error)]
pub enum PodError {
    /// The pod closed the connection before the response was complete.
    #[error("connection closed before message completed")]
    Closed,
    /// The connection to the pod failed.
    #[error("connection error: {0}")]
    Io(io::Error),
    /// The pod does not speak valid HTTP/1.1.
    #[error(transparent)]
    Malformed(#[from] Http1ParseError),
    /// The pod does not speak valid HTTP/2, or the HTTP/2 connection failed.
    #[error(transparent)]
    Http2(hyper::Error),
}
