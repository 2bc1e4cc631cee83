//! Pure: what a client has shown in a handshake that asked for its certificate.

use common::wire::ClientAuth;
use http::HeaderValue;

/// Client of a connection of TLS whose host has a rule for certificates of clients.
#[derive(Debug)]
pub struct TlsClient {
    /// Rule that the client has met.
    pub client_auth: ClientAuth,
    /// Description of its certificate for pods; `None`: it has shown none, which the rule permits.
    pub certificate: Option<HeaderValue>,
}
