//! Shell: TLS settings of one certificate, with the random key of its tickets.

use std::sync::{Arc, LazyLock};

use rustls::{
    Error, ServerConfig,
    crypto::{CryptoProvider, ring},
    server::NoServerSessionStorage,
    sign::{CertifiedKey, SingleCertAndKey},
    version::{TLS12, TLS13},
};

/// Protocols by ALPN, the preferred one first. A client that offers none of them is refused by alert 120; one that
/// offers no ALPN at all speaks HTTP/1.1.
const ALPN_PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];
/// Number of tickets that a client of TLS 1.3 gets, each for one resumption.
const TLS13_TICKETS: usize = 2;

/// Cipher suites and key exchanges of all handshakes: those of ring, which have forward secrecy.
static PROVIDER: LazyLock<Arc<CryptoProvider>> =
    LazyLock::new(|| Arc::new(ring::default_provider()));

/// Returns the settings of handshakes that present this certificate.
///
/// Each call makes a key of its own for tickets. So no ticket of a former certificate resumes a session, and a client
/// always sees the certificate in force. Errors: the system gives no random bytes.
pub fn server_config(key: Arc<CertifiedKey>) -> Result<Arc<ServerConfig>, Error> {
    let config = ServerConfig::builder_with_provider(Arc::clone(&PROVIDER));
    let config = config.with_protocol_versions(&[&TLS13, &TLS12])?.with_no_client_auth();
    let mut config = config.with_cert_resolver(Arc::new(SingleCertAndKey::from(key)));
    config.alpn_protocols = Vec::from(ALPN_PROTOCOLS.map(<[u8]>::to_vec));
    // The state of a session is in the client's ticket, so that idle sessions take no memory here.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.ticketer = ring::Ticketer::new()?;
    config.send_tls13_tickets = TLS13_TICKETS;
    // Requests in early data could be replayed.
    config.max_early_data_size = 0;
    Ok(Arc::new(config))
}

#[cfg(test)]
mod tests {
    use common::{certificates::load, fixtures::certificates::TestAuthority};

    use super::*;

    fn test_key() -> Arc<CertifiedKey> {
        let certificate = TestAuthority::new().issue(&["a.example"]);
        load(&certificate.material()).unwrap().key
    }

    #[test]
    fn sessions_are_kept_in_tickets_only_and_have_no_early_data() {
        let config = server_config(test_key()).unwrap();
        assert_eq!(config.alpn_protocols, [b"h2".to_vec(), b"http/1.1".to_vec()]);
        assert!(!config.session_storage.can_cache());
        assert!(config.ticketer.enabled());
        assert_eq!((config.send_tls13_tickets, config.max_early_data_size), (2, 0));
        assert!(!config.ignore_client_order);
    }

    #[test]
    fn a_ticket_is_of_no_use_under_other_settings() {
        let key = test_key();
        let [one, other] = [(); 2].map(|()| server_config(Arc::clone(&key)).unwrap());
        let ticket = one.ticketer.encrypt(b"session").unwrap();
        assert_eq!(one.ticketer.decrypt(&ticket), Some(b"session".to_vec()));
        assert_eq!(other.ticketer.decrypt(&ticket), None);
    }
}
