//! Pure: why a request could not be answered by a pod, and what the client is told.
//!
//! Codes and texts are Knative's (`reference` table in knative/serving `pkg/activator/handler`,
//! `pkg/http/handler/timeout.go`), so that clients and dashboards made for it go on working.

use http::{HeaderValue, Response, StatusCode, header};

/// Why a request could not be answered by a pod.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// No service has this host, or the port's service is gone.
    #[error("no service for {0:?}")]
    UnknownService(String),
    /// The service names no revision yet.
    #[error("service {0} has no revision to serve it yet")]
    NoTarget(String),
    /// The service names a revision that the table lacks.
    #[error("Error getting active endpoint: revision {0:?} not found")]
    UnknownRevision(String),
    /// A NetworkPolicy keeps the client from the service's pods, so it may not wait for one either.
    #[error("a NetworkPolicy of the service lets no requests of {0} in")]
    Forbidden(std::net::IpAddr),
    /// The line is full.
    #[error("pending request queue full")]
    QueueFull,
    /// Clients hold more bytes than there is room for, and this one's connection most of them.
    #[error("too many bytes of requests are held")]
    TooManyBytes,
    /// The client has sent nothing of its body for too long, while a pod waited for it.
    #[error("request body timeout")]
    BodyIdle,
    /// `timeoutSeconds`, or another bound of the revision, is over.
    #[error("activator request timeout")]
    Timeout,
    /// No connection to a pod came about.
    #[error("cannot connect to pod at {address}: {reason}")]
    Dial {
        /// The pod tried last.
        address: std::net::SocketAddr,
        /// The system's words.
        reason: String,
    },
    /// The exchange with the pod broke after it had begun.
    #[error("pod at {address}: {reason}")]
    Broken {
        /// The pod.
        address: std::net::SocketAddr,
        /// What broke.
        reason: String,
    },
    /// The request makes no sense.
    #[error("{0}")]
    BadRequest(String),
    /// A method that cannot be forwarded.
    #[error("method CONNECT is not allowed")]
    Connect,
}

impl Failure {
    /// The code the client gets.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::UnknownService(_) | Self::UnknownRevision(_) => StatusCode::NOT_FOUND,
            Self::NoTarget(_) | Self::QueueFull | Self::TooManyBytes => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Self::BodyIdle => StatusCode::REQUEST_TIMEOUT,
            Self::Forbidden(_) => StatusCode::FORBIDDEN,
            Self::Timeout => StatusCode::GATEWAY_TIMEOUT,
            Self::Dial { .. } | Self::Broken { .. } => StatusCode::BAD_GATEWAY,
            Self::BadRequest(_) => StatusCode::BAD_REQUEST,
            Self::Connect => StatusCode::METHOD_NOT_ALLOWED,
        }
    }

    /// The whole answer.
    pub fn response<B>(&self, body: impl FnOnce(String) -> B) -> Response<B> {
        let mut response = Response::new(body(self.to_string()));
        *response.status_mut() = self.status();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
        if matches!(self, Self::QueueFull | Self::NoTarget(_) | Self::TooManyBytes) {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if matches!(self, Self::TooManyBytes | Self::BodyIdle) {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_knatives() {
        let address = std::net::SocketAddr::from(([10, 0, 0, 1], 80));
        let reason = "refused".to_owned();
        let told = |failure: Failure| (failure.status().as_u16(), failure.to_string());
        assert_eq!(told(Failure::QueueFull), (503, "pending request queue full".into()));
        assert_eq!(told(Failure::Timeout), (504, "activator request timeout".into()));
        assert_eq!(told(Failure::UnknownRevision("a/b".into())).0, 404);
        assert_eq!(told(Failure::NoTarget("a/b".into())).0, 503);
        assert_eq!(
            told(Failure::Dial { address, reason }),
            (502, "cannot connect to pod at 10.0.0.1:80: refused".into())
        );
    }

    #[test]
    fn a_full_line_says_when_to_come_back() {
        let response = Failure::QueueFull.response(|text| text);
        assert_eq!(response.headers()[header::RETRY_AFTER], "1");
    }
}
