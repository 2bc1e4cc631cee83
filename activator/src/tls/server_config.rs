//! Shell: TLS settings of one certificate, with the random key of its tickets.

use std::sync::Arc;

use common::wire::{TlsCipher, TlsMinVersion, TlsSettings};
use rustls::{
    ConfigBuilder, Error, RootCertStore, ServerConfig, SupportedCipherSuite,
    SupportedProtocolVersion, WantsVerifier,
    crypto::{CryptoProvider, ring},
    server::{ClientHello, NoServerSessionStorage, WebPkiClientVerifier},
    sign::{CertifiedKey, SigningKey, SingleCertAndKey},
    version::{TLS12, TLS13},
};

/// Protocols by ALPN, the preferred one first. A client that offers none of them is refused by alert 120; one that
/// offers no ALPN at all speaks HTTP/1.1.
const ALPN_PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];
/// Number of tickets that a client of TLS 1.3 gets, each for one resumption.
const TLS13_TICKETS: usize = 2;
/// Versions of handshakes, the preferred one first.
static VERSIONS: [&SupportedProtocolVersion; 2] = [&TLS13, &TLS12];

/// Versions, cipher suites and key exchanges of handshakes. All suites are of ring, and have forward secrecy.
#[derive(Clone, Debug)]
pub struct HandshakeProtocols {
    provider: Arc<CryptoProvider>,
    versions: &'static [&'static SupportedProtocolVersion],
}

impl HandshakeProtocols {
    /// Protocols that the settings of operators accept.
    pub fn new(settings: &TlsSettings) -> Self {
        let mut provider = ring::default_provider();
        provider.cipher_suites.retain(|suite| {
            let number = u16::from(suite.suite());
            // A suite that has no name in settings is accepted where these name none.
            let cipher = TlsCipher::ALL.into_iter().find(|it| it.number() == number);
            cipher.map_or(settings.ciphers.is_empty(), |it| settings.accepts(it))
        });
        let versions = match settings.min_version {
            TlsMinVersion::Tls12 => &VERSIONS[..],
            TlsMinVersion::Tls13 => &VERSIONS[..1],
        };
        Self { provider: Arc::new(provider), versions }
    }

    /// Returns true if both are one value or copies of it.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.provider, &other.provider)
    }

    /// Returns true if the client can verify signatures of this key: it accepts one of the key's signature schemes, and
    /// offers a suite for that kind of key. Suites of TLS 1.3 are for each kind.
    ///
    /// The suites count, because many clients of TLS 1.2 accept signatures that none of their suites has.
    pub fn accept_key(&self, key: &dyn SigningKey, client: &ClientHello<'_>) -> bool {
        let is_usable = |suite: &SupportedCipherSuite| {
            client.cipher_suites().contains(&suite.suite())
                && suite.usable_for_signature_algorithm(key.algorithm())
        };
        key.choose_scheme(client.signature_schemes()).is_some()
            && self.provider.cipher_suites.iter().any(is_usable)
    }

    fn builder(&self) -> Result<ConfigBuilder<ServerConfig, WantsVerifier>, Error> {
        let builder = ServerConfig::builder_with_provider(Arc::clone(&self.provider));
        builder.with_protocol_versions(self.versions)
    }
}

impl Default for HandshakeProtocols {
    fn default() -> Self {
        Self::new(&TlsSettings::default())
    }
}

/// Returns the settings of handshakes that present this certificate, and ask clients for none.
///
/// Each call makes a key of its own for tickets. So no ticket of a former certificate resumes a session, and a client
/// always sees the certificate in force. Errors: the system gives no random bytes, or no cipher suite is left.
pub fn server_config(
    key: Arc<CertifiedKey>,
    protocols: &HandshakeProtocols,
) -> Result<Arc<ServerConfig>, Error> {
    let config = protocols.builder()?.with_no_client_auth();
    let mut config = config.with_cert_resolver(Arc::new(SingleCertAndKey::from(key)));
    set_common(&mut config);
    config.ticketer = ring::Ticketer::new()?;
    config.send_tls13_tickets = TLS13_TICKETS;
    Ok(Arc::new(config))
}

/// Returns the settings of handshakes that present this certificate, and ask clients for one of the authorities
/// `roots`. `is_optional`: clients may have none.
///
/// There are no tickets: a resumed session would not show whether the client's certificate is still valid.
pub fn client_auth_config(
    key: Arc<CertifiedKey>,
    protocols: &HandshakeProtocols,
    roots: &Arc<RootCertStore>,
    is_optional: bool,
) -> Result<Arc<ServerConfig>, Error> {
    let provider = Arc::clone(&protocols.provider);
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(roots), provider);
    let verifier = if is_optional { verifier.allow_unauthenticated() } else { verifier };
    let verifier = verifier.build().map_err(|error| Error::General(error.to_string()))?;
    let config = protocols.builder()?.with_client_cert_verifier(verifier);
    let mut config = config.with_cert_resolver(Arc::new(SingleCertAndKey::from(key)));
    set_common(&mut config);
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

fn set_common(config: &mut ServerConfig) {
    config.alpn_protocols = Vec::from(ALPN_PROTOCOLS.map(<[u8]>::to_vec));
    // The state of a session is in the client's ticket, so that idle sessions take no memory here.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    // Requests in early data could be replayed.
    config.max_early_data_size = 0;
}

#[cfg(test)]
mod tests {
    use common::{
        certificates::{load, load_client_ca},
        fixtures::certificates::TestAuthority,
    };

    use super::*;

    fn test_key() -> Arc<CertifiedKey> {
        let certificate = TestAuthority::new().issue(&["a.example"]);
        load(&certificate.material()).unwrap().key
    }

    fn config(key: Arc<CertifiedKey>) -> Arc<ServerConfig> {
        server_config(key, &HandshakeProtocols::default()).unwrap()
    }

    #[test]
    fn sessions_are_kept_in_tickets_only_and_have_no_early_data() {
        let config = config(test_key());
        assert_eq!(config.alpn_protocols, [b"h2".to_vec(), b"http/1.1".to_vec()]);
        assert!(!config.session_storage.can_cache());
        assert!(config.ticketer.enabled());
        assert_eq!((config.send_tls13_tickets, config.max_early_data_size), (2, 0));
        assert!(!config.ignore_client_order);
    }

    #[test]
    fn a_ticket_is_of_no_use_under_other_settings() {
        let key = test_key();
        let [one, other] = [(); 2].map(|()| config(Arc::clone(&key)));
        let ticket = one.ticketer.encrypt(b"session").unwrap();
        assert_eq!(one.ticketer.decrypt(&ticket), Some(b"session".to_vec()));
        assert_eq!(other.ticketer.decrypt(&ticket), None);
    }

    #[test]
    fn sessions_with_certificates_of_clients_are_not_resumed() {
        let roots = Arc::new(load_client_ca(&TestAuthority::new().client_ca()).unwrap());
        for is_optional in [false, true] {
            let protocols = HandshakeProtocols::default();
            let config = client_auth_config(test_key(), &protocols, &roots, is_optional).unwrap();
            assert!(!config.ticketer.enabled() && !config.session_storage.can_cache());
            assert_eq!((config.send_tls13_tickets, config.max_early_data_size), (0, 0));
            assert_eq!(config.alpn_protocols, [b"h2".to_vec(), b"http/1.1".to_vec()]);
        }
    }

    /// Each suite of the provider must have a name in settings, so that operators can leave it out.
    #[test]
    fn each_cipher_of_settings_is_one_suite() {
        let all = HandshakeProtocols::default().provider.cipher_suites.len();
        assert_eq!(all, TlsCipher::ALL.len());
        for cipher in TlsCipher::ALL {
            let settings = TlsSettings { ciphers: vec![cipher], ..TlsSettings::default() };
            let protocols = HandshakeProtocols::new(&settings);
            let suites = protocols.provider.cipher_suites.iter();
            let numbers: Vec<u16> = suites.map(|it| u16::from(it.suite())).collect();
            assert_eq!(numbers, [cipher.number()], "{}", cipher.name());
        }
    }
}
