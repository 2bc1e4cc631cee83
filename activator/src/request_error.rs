//! Pure: errors for which a request gets no response from a pod, and the responses that clients get instead.
//!
//! Where Knative has the same error, code and text are Knative's (`pkg/activator/handler`,
//! `pkg/http/handler/timeout.go`), so that clients and dashboards made for it continue to work.

use http::{HeaderValue, Response, StatusCode, header};
use tonic::Code;

use crate::grpc::{self, GrpcProtocol};

/// Error for which a request gets no response from a pod.
#[derive(Debug, thiserror::Error)]
pub enum ProxyRequestError {
    /// No service has this host, or the port's service is gone.
    #[error("no service for {0:?}")]
    UnknownService(String),
    /// The service has no Revision to route to yet.
    #[error("service {0} has no Revision to serve it yet")]
    NoRevision(String),
    /// The rule of the Gateway API that the request gets leads to no backend.
    #[error("no backend of route {0} can serve it")]
    NoBackend(String),
    /// The rule of a GRPCRoute that the request gets leads to no backend.
    #[error("no backend of route {0} can serve it")]
    NoGrpcBackend(String),
    /// The service names a Revision that the RouteTable does not contain.
    #[error("Error getting active endpoint: revision {0:?} not found")]
    UnknownRevision(String),
    /// The service takes raw TCP at its own port, so that no request of HTTP can be routed to it.
    #[error("service {0} takes raw TCP connections, not HTTP requests")]
    RawTcpService(String),
    /// A NetworkPolicy denies the client access to the service's pods, so it may not wait for one either.
    #[error("a NetworkPolicy of the service lets no requests of {0} in")]
    ForbiddenByNetworkPolicy(std::net::IpAddr),
    /// The connection was opened for a host with another rule for certificates of clients (RFC 9110, section 15.5.20).
    #[error("this connection was opened for a host with another client policy")]
    MisdirectedRequest,
    /// The host requires a certificate of the client, which a proxy before the gateway cannot pass on.
    #[error("this host requires a client certificate, on a TLS connection to the gateway itself")]
    ClientCertificateRequired,
    /// The wait queue of the Revision is full.
    #[error("pending request queue full")]
    QueueFull,
    /// Clients hold more bytes than allowed, and this client's connection holds most of them.
    #[error("too many bytes of requests are held")]
    TooManyRequestBytes,
    /// The client has sent nothing of its body for too long, while a pod waited for it.
    #[error("request body timeout")]
    BodyIdleTimeout,
    /// `timeoutSeconds`, or another timeout of the Revision, is over.
    #[error("activator request timeout")]
    Timeout,
    /// No connection to a pod could be opened.
    #[error("cannot connect to pod at {address}: {reason}")]
    DialFailed {
        /// Address of the pod tried last.
        address: std::net::SocketAddr,
        /// Error text of the operating system.
        reason: String,
    },
    /// The exchange with the pod broke off after it had begun.
    #[error("pod at {address}: {reason}")]
    ExchangeFailed {
        /// Address and port of the pod.
        address: std::net::SocketAddr,
        /// Error of the connection or of the pod's response.
        reason: String,
    },
    /// The request is invalid, for the reason given.
    #[error("{0}")]
    BadRequest(String),
    /// The chunks of the body are chunked again, which no sender may do (RFC 9112 §6.1).
    #[error("transfer coding chunked is applied more than once")]
    RepeatedChunking,
    /// The method is CONNECT, which cannot be forwarded.
    #[error("method CONNECT is not allowed")]
    ConnectMethod,
    /// The method is CONNECT, for another protocol than WebSocket (RFC 8441).
    #[error("method CONNECT is possible for websocket only")]
    ConnectProtocol,
}

impl ProxyRequestError {
    /// Status code that the client gets.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::UnknownService(_) | Self::UnknownRevision(_) => StatusCode::NOT_FOUND,
            // Clients of gRPC read it as `UNAVAILABLE`.
            Self::NoRevision(_)
            | Self::NoGrpcBackend(_)
            | Self::QueueFull
            | Self::TooManyRequestBytes => StatusCode::SERVICE_UNAVAILABLE,
            Self::NoBackend(_) => StatusCode::INTERNAL_SERVER_ERROR,
            Self::BodyIdleTimeout => StatusCode::REQUEST_TIMEOUT,
            Self::ForbiddenByNetworkPolicy(_) | Self::ClientCertificateRequired => {
                StatusCode::FORBIDDEN
            }
            Self::MisdirectedRequest => StatusCode::MISDIRECTED_REQUEST,
            Self::Timeout => StatusCode::GATEWAY_TIMEOUT,
            Self::RawTcpService(_) | Self::DialFailed { .. } | Self::ExchangeFailed { .. } => {
                StatusCode::BAD_GATEWAY
            }
            Self::BadRequest(_) | Self::RepeatedChunking => StatusCode::BAD_REQUEST,
            Self::ConnectMethod => StatusCode::METHOD_NOT_ALLOWED,
            Self::ConnectProtocol => StatusCode::NOT_IMPLEMENTED,
        }
    }

    /// Code that clients of gRPC get.
    pub fn grpc_code(&self) -> Code {
        // gRPC's table has UNAVAILABLE for 504, after which clients may send a call again. The time of this call is
        // over, and a pod may have executed it.
        if matches!(self, Self::Timeout) {
            return Code::DeadlineExceeded;
        }
        grpc::code_of_status(self.status())
    }

    /// Whole response for the client, with the error's text as its body. A call of gRPC gets a trailers-only response
    /// instead, if `protocol` is that of one.
    pub fn response<B>(
        &self,
        protocol: Option<GrpcProtocol>,
        body: impl FnOnce(String) -> B,
    ) -> Response<B> {
        let mut response = match protocol.filter(|it| self.has_grpc_form(*it)) {
            Some(protocol) => protocol.trailers_only_response(
                self.grpc_code(),
                &self.to_string(),
                body(String::new()),
            ),
            None => self.text_response(body),
        };
        let headers = response.headers_mut();
        // These errors pass by themselves, so a client is asked to retry a second later.
        if matches!(self, Self::QueueFull | Self::NoRevision(_) | Self::TooManyRequestBytes) {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        // The rest of the request's body may be unread, or its end is ambiguous: the connection cannot carry another
        // request.
        let has_lost_boundary = matches!(
            self,
            Self::TooManyRequestBytes | Self::BodyIdleTimeout | Self::RepeatedChunking
        );
        if has_lost_boundary {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }

    /// Returns true if calls by this protocol get the error as a status of gRPC.
    fn has_grpc_form(&self, protocol: GrpcProtocol) -> bool {
        // gRPC-Web is spoken by browsers, which open another connection for a request only if they see the code 421.
        protocol == GrpcProtocol::Native || !matches!(self, Self::MisdirectedRequest)
    }

    fn text_response<B>(&self, body: impl FnOnce(String) -> B) -> Response<B> {
        let mut response = Response::new(body(self.to_string()));
        *response.status_mut() = self.status();
        let content_type = HeaderValue::from_static("text/plain; charset=utf-8");
        response.headers_mut().insert(header::CONTENT_TYPE, content_type);
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn responses_are_knatives() {
        let address = std::net::SocketAddr::from(([10, 0, 0, 1], 80));
        let reason = "refused".to_owned();
        let response =
            |failure: ProxyRequestError| (failure.status().as_u16(), failure.to_string());
        assert_eq!(
            response(ProxyRequestError::QueueFull),
            (503, "pending request queue full".into())
        );
        assert_eq!(response(ProxyRequestError::Timeout), (504, "activator request timeout".into()));
        assert_eq!(response(ProxyRequestError::UnknownRevision("a/b".into())).0, 404);
        assert_eq!(response(ProxyRequestError::NoRevision("a/b".into())).0, 503);
        assert_eq!(response(ProxyRequestError::NoBackend("a/b".into())).0, 500);
        assert_eq!(response(ProxyRequestError::NoGrpcBackend("a/b".into())).0, 503);
        assert_eq!(
            response(ProxyRequestError::DialFailed { address, reason }),
            (502, "cannot connect to pod at 10.0.0.1:80: refused".into())
        );
    }

    #[test]
    fn a_full_queue_sends_retry_after() {
        let response = ProxyRequestError::QueueFull.response(None, |text| text);
        assert_eq!(response.headers()[header::RETRY_AFTER], "1");
    }

    /// Returns status, code of gRPC, and body of the response to a call.
    fn response_to_call(
        failure: &ProxyRequestError,
        protocol: Option<GrpcProtocol>,
    ) -> (u16, Option<String>, String) {
        let response = failure.response(protocol, |text| text);
        let code = response.headers().get("grpc-status");
        let code = code.map(|it| it.to_str().expect("digits").to_owned());
        (response.status().as_u16(), code, response.into_body())
    }

    #[test]
    fn calls_of_grpc_get_a_code_without_a_body() {
        let address = std::net::SocketAddr::from(([10, 0, 0, 1], 80));
        let reason = || "refused".to_owned();
        for (failure, code) in [
            (ProxyRequestError::UnknownService("a".into()), "12"),
            (ProxyRequestError::UnknownRevision("a/b".into()), "12"),
            (ProxyRequestError::NoRevision("a/b".into()), "14"),
            (ProxyRequestError::NoBackend("a/b".into()), "2"),
            (ProxyRequestError::NoGrpcBackend("a/b".into()), "14"),
            (ProxyRequestError::RawTcpService("a/b".into()), "14"),
            (ProxyRequestError::ForbiddenByNetworkPolicy(address.ip()), "7"),
            (ProxyRequestError::MisdirectedRequest, "2"),
            (ProxyRequestError::ClientCertificateRequired, "7"),
            (ProxyRequestError::QueueFull, "14"),
            (ProxyRequestError::TooManyRequestBytes, "14"),
            (ProxyRequestError::BodyIdleTimeout, "2"),
            (ProxyRequestError::Timeout, "4"),
            (ProxyRequestError::DialFailed { address, reason: reason() }, "14"),
            (ProxyRequestError::ExchangeFailed { address, reason: reason() }, "14"),
            (ProxyRequestError::BadRequest("bad host".into()), "13"),
            (ProxyRequestError::RepeatedChunking, "13"),
        ] {
            let call = response_to_call(&failure, Some(GrpcProtocol::Native));
            assert_eq!(call, (200, Some(code.to_owned()), String::new()), "{failure}");
            let other = response_to_call(&failure, None);
            let expected = (failure.status().as_u16(), None, failure.to_string());
            assert_eq!(other, expected, "{failure}");
        }
    }

    #[test]
    fn browsers_see_that_a_call_of_grpc_web_was_misdirected() {
        let web = Some(GrpcProtocol::Web);
        let response = response_to_call(&ProxyRequestError::MisdirectedRequest, web);
        assert_eq!((response.0, response.1), (421, None));
        let response = response_to_call(&ProxyRequestError::QueueFull, web);
        assert_eq!((response.0, response.1.as_deref()), (200, Some("14")));
    }

    #[test]
    fn a_response_to_a_call_keeps_its_orders_to_the_client() {
        let protocol = Some(GrpcProtocol::Native);
        let response = ProxyRequestError::TooManyRequestBytes.response(protocol, |text| text);
        assert_eq!(response.headers()[header::RETRY_AFTER], "1");
        assert_eq!(response.headers()[header::CONNECTION], "close");
        assert_eq!(response.headers()[header::CONTENT_TYPE], "application/grpc");
    }
}
