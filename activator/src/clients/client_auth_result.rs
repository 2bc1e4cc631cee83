//! Pure: result of a handshake that asked the client for its certificate.

use common::wire::ClientAuth;
use http::HeaderValue;

/// Result of a handshake whose host has a rule for certificates of clients.
#[derive(Debug)]
pub struct ClientAuthResult {
    /// Host that the handshake named, in lower case and without final dot.
    pub host: Box<str>,
    /// Rule that the client has met.
    pub client_auth: ClientAuth,
    /// Description of the client's certificate for pods; `None`: it has shown none, which the rule permits.
    pub certificate: Option<HeaderValue>,
}
