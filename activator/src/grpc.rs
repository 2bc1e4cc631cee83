//! Pure: gRPC, as far as the activator speaks it itself: recognition of its requests, and its statuses in place of
//! HTTP's.
//!
//! Clients of gRPC read the outcome of a call from `grpc-status`. Of a response without it they only guess, each in
//! its own way. So a call that gets no response from a pod gets a *trailers-only* response: HTTP's 200 with
//! `grpc-status` and `grpc-message` in the head, and no body. Envoy does the same (`Utility::sendLocalReply`).

use http::{HeaderMap, HeaderValue, Method, Response, StatusCode, Version, header};
use tonic::{Code, Status};

/// Maximum number of bytes of a message before percent-encoding, which makes three bytes of one at most. Clients in
/// Java accept no head of more than 8 KiB by default.
const MAX_MESSAGE_BYTES: usize = 1024;

/// Protocol of a call of gRPC, which determines the form of a response that the activator makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrpcProtocol {
    /// gRPC over HTTP/2.
    Native,
    /// gRPC-Web with messages in bytes.
    Web,
    /// gRPC-Web with messages in base64.
    WebText,
}

impl GrpcProtocol {
    /// Returns the protocol of a request; `None`: it is no call of gRPC. Only a POST is one, and native gRPC needs
    /// HTTP/2.
    pub fn of_request(method: &Method, version: Version, headers: &HeaderMap) -> Option<Self> {
        if *method != Method::POST {
            return None;
        }
        let protocol = Self::of_content_type(headers)?;
        (protocol != Self::Native || version == Version::HTTP_2).then_some(protocol)
    }

    /// Returns the protocol that the content type names, with or without an encoding of messages (`+proto`).
    pub fn of_content_type(headers: &HeaderMap) -> Option<Self> {
        let value = headers.get(header::CONTENT_TYPE)?.as_bytes();
        [Self::Native, Self::Web, Self::WebText].into_iter().find(|it| {
            let name = it.content_type().as_bytes();
            let begin = value.get(..name.len()).unwrap_or_default();
            let next = value.get(name.len());
            begin.eq_ignore_ascii_case(name) && matches!(next, None | Some(b'+' | b';' | b' '))
        })
    }

    /// Returns the content type of responses without messages.
    fn content_type(self) -> &'static str {
        match self {
            Self::Native => "application/grpc",
            Self::Web => "application/grpc-web",
            Self::WebText => "application/grpc-web-text",
        }
    }

    /// Returns the response that has a status in its head. `body` has to be empty.
    pub fn trailers_only_response<B>(self, code: Code, message: &str, body: B) -> Response<B> {
        let mut response = Response::new(body);
        *response.headers_mut() = status_fields(code, message);
        let content_type = HeaderValue::from_static(self.content_type());
        response.headers_mut().insert(header::CONTENT_TYPE, content_type);
        response
    }
}

/// Returns the fields of a status: `grpc-status`, and `grpc-message` in percent-encoding. A long message is cut.
pub fn status_fields(code: Code, message: &str) -> HeaderMap {
    let message = &message[..message.floor_char_boundary(MAX_MESSAGE_BYTES)];
    let mut fields = HeaderMap::new();
    let added = Status::new(code, message).add_header(&mut fields);
    added.expect("percent-encoding leaves only bytes that a field may have");
    fields
}

/// Returns the code that stands for a status of HTTP, by gRPC's own table (`doc/http-grpc-status-mapping.md`).
pub fn code_of_status(status: StatusCode) -> Code {
    match status {
        StatusCode::BAD_REQUEST => Code::Internal,
        StatusCode::UNAUTHORIZED => Code::Unauthenticated,
        StatusCode::FORBIDDEN => Code::PermissionDenied,
        StatusCode::NOT_FOUND => Code::Unimplemented,
        StatusCode::TOO_MANY_REQUESTS
        | StatusCode::BAD_GATEWAY
        | StatusCode::SERVICE_UNAVAILABLE
        | StatusCode::GATEWAY_TIMEOUT => Code::Unavailable,
        _ => Code::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn protocol(method: &Method, version: Version, content_type: &str) -> Option<GrpcProtocol> {
        let value = HeaderValue::from_str(content_type).expect("a value");
        let headers = HeaderMap::from_iter([(header::CONTENT_TYPE, value)]);
        GrpcProtocol::of_request(method, version, &headers)
    }

    #[test]
    fn a_call_is_recognized_by_its_content_type() {
        let native = Some(GrpcProtocol::Native);
        let (web, web_text) = (Some(GrpcProtocol::Web), Some(GrpcProtocol::WebText));
        // The protocol over HTTP/2, and over HTTP/1.1.
        for (content_type, over_http2, over_http1) in [
            ("application/grpc", native, None),
            ("application/grpc+proto", native, None),
            ("application/grpc;charset=utf-8", native, None),
            ("Application/GRPC", native, None),
            ("application/grpc-web", web, web),
            ("application/grpc-web+proto", web, web),
            ("application/grpc-web-text", web_text, web_text),
            ("application/grpc-web-text+proto", web_text, web_text),
            ("application/grpc-websockets", None, None),
            ("application/grpcs", None, None),
            ("application/json", None, None),
            ("text/application/grpc", None, None),
            ("", None, None),
        ] {
            let over = |version| protocol(&Method::POST, version, content_type);
            let found = [over(Version::HTTP_2), over(Version::HTTP_11)];
            assert_eq!(found, [over_http2, over_http1], "{content_type}");
        }
    }

    /// The response 200 to a CONNECT would open a tunnel.
    #[test]
    fn only_a_post_is_a_call() {
        for method in [Method::GET, Method::HEAD, Method::OPTIONS, Method::CONNECT] {
            assert_eq!(protocol(&method, Version::HTTP_2, "application/grpc"), None, "{method}");
        }
        let headers = HeaderMap::new();
        assert_eq!(GrpcProtocol::of_request(&Method::POST, Version::HTTP_2, &headers), None);
    }

    #[test]
    fn codes_are_those_of_grpcs_table() {
        for (status, code) in [
            (400, 13),
            (401, 16),
            (403, 7),
            (404, 12),
            (405, 2),
            (408, 2),
            (413, 2),
            (421, 2),
            (429, 14),
            (431, 2),
            (500, 2),
            (501, 2),
            (502, 14),
            (503, 14),
            (504, 14),
        ] {
            let found = code_of_status(StatusCode::from_u16(status).expect("a code"));
            assert_eq!(i32::from(found), code, "{status}");
        }
    }

    #[test]
    fn a_status_is_in_the_head_and_the_body_is_empty() {
        for (protocol, content_type) in [
            (GrpcProtocol::Native, "application/grpc"),
            (GrpcProtocol::Web, "application/grpc-web"),
            (GrpcProtocol::WebText, "application/grpc-web-text"),
        ] {
            let response = protocol.trailers_only_response(Code::Unavailable, "full: ü\n100%", "");
            assert_eq!((response.status(), *response.body()), (StatusCode::OK, ""));
            let headers = response.headers();
            assert_eq!(headers[header::CONTENT_TYPE], content_type);
            assert_eq!(headers["grpc-status"], "14");
            assert_eq!(headers["grpc-message"], "full:%20%C3%BC%0A100%25");
            assert_eq!(headers.len(), 3);
        }
    }

    #[test]
    fn a_long_message_is_cut_between_characters() {
        let message = format!("{}ü{}", "x".repeat(MAX_MESSAGE_BYTES - 1), "y".repeat(100_000));
        let fields = status_fields(Code::Unimplemented, &message);
        assert_eq!(fields["grpc-message"], "x".repeat(MAX_MESSAGE_BYTES - 1));
    }
}
