//! Pure: WebSocket handshakes of HTTP/2 (RFC 8441), and their form in HTTP/1.1 (RFC 6455 §4).
//!
//! In HTTP/2 the handshake is a CONNECT that names its protocol, an extended CONNECT. The setting of the server proves
//! that it knows WebSocket, so there is no key. A pod of HTTP/1.1 needs one. The activator makes it, and is the only one
//! that can check the pod's response to it.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode, Version, header, request};
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};

use crate::{
    edge::headers::{self, WEBSOCKET},
    request_error::ProxyRequestError,
};

/// Version of the protocol that RFC 6455 defines, the only one in use.
const WEBSOCKET_VERSION: &str = "13";
/// Text that a server appends to a client's key (RFC 6455 §1.3).
const ACCEPT_SUFFIX: &str = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

/// WebSocket handshake of a client of HTTP/2, whose request is in the form for a pod of HTTP/1.1.
#[derive(Debug)]
pub struct WebSocketHandshake {
    /// Value of `Sec-WebSocket-Accept` by which the pod proves that it has understood the handshake.
    expected_accept: String,
}

/// Error of a pod's response to a WebSocket handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WebSocketHandshakeError {
    /// The pod has not switched, although its response is successful. In HTTP/2 the same status would tell the client
    /// that the WebSocket is open.
    #[error("response to the WebSocket handshake has status {0} in place of 101")]
    NotSwitched(u16),
    /// The pod has switched, but not because of this handshake (RFC 6455 §4.1).
    #[error("Sec-WebSocket-Accept of the response does not fit the WebSocket handshake")]
    WrongAccept,
}

/// Refuses a CONNECT that opens no WebSocket. `protocol` is its `:protocol`, which only HTTP/2 has.
pub fn check_connect(method: &Method, protocol: Option<&str>) -> Result<(), ProxyRequestError> {
    match protocol {
        _ if *method != Method::CONNECT => Ok(()),
        None => Err(ProxyRequestError::ConnectMethod),
        Some(name) if name.eq_ignore_ascii_case(WEBSOCKET) => Ok(()),
        Some(_) => Err(ProxyRequestError::ConnectProtocol),
    }
}

impl WebSocketHandshake {
    /// Changes an extended CONNECT to the GET that HTTP/1.1 has in its place. `None`: the request is no CONNECT, and
    /// stays as it is. `random` is uniform over u64.
    pub fn from_connect(
        head: &mut request::Parts,
        mut random: impl FnMut() -> u64,
    ) -> Option<Self> {
        if head.method != Method::CONNECT {
            return None;
        }
        (head.method, head.version) = (Method::GET, Version::HTTP_11);
        let headers = &mut head.headers;
        // A handshake has no body, and no length that states so.
        headers.remove(header::CONTENT_LENGTH);
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static(WEBSOCKET));
        if !headers.contains_key(header::SEC_WEBSOCKET_VERSION) {
            let version = HeaderValue::from_static(WEBSOCKET_VERSION);
            headers.insert(header::SEC_WEBSOCKET_VERSION, version);
        }
        let key = STANDARD.encode([random(), random()].map(u64::to_be_bytes).as_flattened());
        let expected_accept = accept_for(&key);
        let key = HeaderValue::try_from(key).expect("base64 is visible ASCII");
        headers.insert(header::SEC_WEBSOCKET_KEY, key);
        Some(Self { expected_accept })
    }

    /// Checks the response of a pod of HTTP/1.1. A response that refuses the handshake is for the client.
    pub fn check_response(
        &self,
        status: StatusCode,
        headers: &HeaderMap,
    ) -> Result<(), WebSocketHandshakeError> {
        if status.is_success() {
            return Err(WebSocketHandshakeError::NotSwitched(status.as_u16()));
        }
        let fits = |it: &HeaderValue| it.as_bytes().trim_ascii() == self.expected_accept.as_bytes();
        let is_accepted = headers.get(header::SEC_WEBSOCKET_ACCEPT).is_some_and(fits);
        if status == StatusCode::SWITCHING_PROTOCOLS && !is_accepted {
            return Err(WebSocketHandshakeError::WrongAccept);
        }
        Ok(())
    }
}

/// Changes the GET of a handshake, as it is for a pod of HTTP/1.1, to the CONNECT for a pod of HTTP/2. The caller adds
/// the `:protocol`.
pub fn convert_to_connect(head: &mut request::Parts) {
    head.method = Method::CONNECT;
    for name in [header::CONNECTION, header::UPGRADE, header::SEC_WEBSOCKET_KEY] {
        head.headers.remove(name);
    }
    headers::convert_to_http2(head);
}

/// Changes a pod's 101 to the 200 of HTTP/2, after which the stream carries the bytes of the WebSocket.
pub fn convert_switch_response<B>(response: &mut Response<B>) {
    *response.status_mut() = StatusCode::OK;
    for name in [
        header::CONNECTION,
        header::UPGRADE,
        header::SEC_WEBSOCKET_ACCEPT,
        header::CONTENT_LENGTH,
        header::TRANSFER_ENCODING,
    ] {
        response.headers_mut().remove(name);
    }
}

/// Value of `Sec-WebSocket-Accept` for a key (RFC 6455 §4.2.2).
fn accept_for(key: &str) -> String {
    let text = format!("{key}{ACCEPT_SUFFIX}");
    STANDARD.encode(digest(&SHA1_FOR_LEGACY_USE_ONLY, text.as_bytes()))
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    /// Random numbers that make the key of RFC 6455 §1.3, `the sample nonce`.
    fn sample_random() -> impl FnMut() -> u64 {
        let mut numbers = [*b"the samp", *b"le nonce"].map(u64::from_be_bytes).into_iter();
        move || numbers.next().expect("a key has two numbers")
    }

    fn connect(fields: &[(&str, &str)]) -> request::Parts {
        let builder = Request::connect("https://a.example/chat?x=1").version(Version::HTTP_2);
        let builder = fields.iter().fold(builder, |it, (name, value)| it.header(*name, *value));
        builder.body(()).expect("valid").into_parts().0
    }

    fn handshake() -> WebSocketHandshake {
        WebSocketHandshake::from_connect(&mut connect(&[]), sample_random()).expect("a CONNECT")
    }

    fn accepted(value: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(header::SEC_WEBSOCKET_ACCEPT, HeaderValue::from_static(value))])
    }

    #[test]
    fn only_a_connect_that_opens_a_websocket_passes() {
        let check = |method: Method, protocol| {
            check_connect(&method, protocol).map_err(|failure| failure.status().as_u16())
        };
        assert_eq!(check(Method::GET, None), Ok(()));
        assert_eq!(check(Method::CONNECT, Some("websocket")), Ok(()));
        assert_eq!(check(Method::CONNECT, Some("WebSocket")), Ok(()));
        assert_eq!(check(Method::CONNECT, None), Err(405));
        assert_eq!(check(Method::CONNECT, Some("connect-udp")), Err(501));
        assert_eq!(check(Method::CONNECT, Some("")), Err(501));
    }

    #[test]
    fn a_connect_becomes_the_handshake_of_http1() {
        let fields = [
            ("sec-websocket-key", "of the client"),
            ("sec-websocket-protocol", "chat"),
            ("sec-websocket-extensions", "permessage-deflate"),
            ("content-length", "0"),
        ];
        let mut head = connect(&fields);
        WebSocketHandshake::from_connect(&mut head, sample_random()).expect("a CONNECT");
        assert_eq!((head.method, head.version), (Method::GET, Version::HTTP_11));
        assert_eq!(head.uri, "https://a.example/chat?x=1");
        let mut fields: Vec<_> = head
            .headers
            .iter()
            .map(|(name, value)| (name.as_str(), value.to_str().expect("text")))
            .collect();
        fields.sort_unstable();
        assert_eq!(
            fields,
            [
                ("connection", "upgrade"),
                ("sec-websocket-extensions", "permessage-deflate"),
                ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
                ("sec-websocket-protocol", "chat"),
                ("sec-websocket-version", "13"),
                ("upgrade", "websocket"),
            ]
        );
    }

    #[test]
    fn for_a_pod_of_http2_it_is_a_connect_again() {
        let mut head = connect(&[("sec-websocket-protocol", "chat")]);
        WebSocketHandshake::from_connect(&mut head, sample_random()).expect("a CONNECT");
        // The form that a prepared head has.
        head.uri = "/chat?x=1".parse().expect("valid");
        head.headers.insert(header::HOST, HeaderValue::from_static("a.example"));
        convert_to_connect(&mut head);
        assert_eq!((head.method, head.version), (Method::CONNECT, Version::HTTP_2));
        assert_eq!(head.uri, "http://a.example/chat?x=1");
        let mut names: Vec<_> = head.headers.keys().map(|name| name.as_str()).collect();
        names.sort_unstable();
        assert_eq!(names, ["sec-websocket-protocol", "sec-websocket-version"]);
    }

    #[test]
    fn the_version_of_the_client_stays() {
        let mut head = connect(&[("sec-websocket-version", "8")]);
        WebSocketHandshake::from_connect(&mut head, sample_random()).expect("a CONNECT");
        assert_eq!(head.headers[header::SEC_WEBSOCKET_VERSION], "8");
    }

    #[test]
    fn other_requests_stay_as_they_are() {
        let mut head = Request::get("/").body(()).expect("valid").into_parts().0;
        assert!(WebSocketHandshake::from_connect(&mut head, sample_random()).is_none());
        assert_eq!((head.method, head.headers.len()), (Method::GET, 0));
    }

    #[test]
    fn a_switch_has_to_fit_the_key() {
        let check = |headers| handshake().check_response(StatusCode::SWITCHING_PROTOCOLS, &headers);
        // The example of RFC 6455 §1.3.
        assert_eq!(check(accepted("s3pPLMBiTxaQ9kYGzzhZRbK+xOo=")), Ok(()));
        let wrong = Err(WebSocketHandshakeError::WrongAccept);
        assert_eq!(check(accepted("s3pPLMBiTxaQ9kYGzzhZRbK+xOp=")), wrong);
        assert_eq!(check(HeaderMap::new()), wrong);
    }

    #[test]
    fn a_refusal_passes_and_a_success_without_a_switch_does_not() {
        let check = |status: u16| {
            let status = StatusCode::from_u16(status).expect("a code");
            handshake().check_response(status, &HeaderMap::new())
        };
        for refusal in [301, 400, 401, 404, 426, 500, 503] {
            assert_eq!(check(refusal), Ok(()), "{refusal}");
        }
        for success in [200, 204, 299] {
            assert_eq!(check(success), Err(WebSocketHandshakeError::NotSwitched(success)));
        }
    }

    #[test]
    fn a_switch_becomes_a_success_of_http2() {
        let mut response = Response::builder()
            .status(101)
            .header("connection", "upgrade")
            .header("upgrade", "websocket")
            .header("sec-websocket-accept", "x")
            .header("content-length", "0")
            .header("sec-websocket-protocol", "chat")
            .header("set-cookie", "a=1")
            .body(())
            .expect("valid");
        convert_switch_response(&mut response);
        let mut names: Vec<_> = response.headers().keys().map(|name| name.as_str()).collect();
        names.sort_unstable();
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(names, ["sec-websocket-protocol", "set-cookie"]);
    }
}
