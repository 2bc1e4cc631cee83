//! Shell: queries of registries for the digests of tags, with the logins of a keyring.

use std::{error::Error as StdError, fmt::Write as _, time::Duration};

use oci_client::{
    client::{Certificate, CertificateEncoding, ClientProtocol},
    errors::OciDistributionError,
};
use tracing::debug;

use crate::{
    credentials::{Keyring, RegistryLogin},
    image_reference::ImageTag,
    request_error::{is_forbidden, is_missing, requires_login},
    session::{RegistrySession, SessionOptions},
};

/// `User-Agent` of requests to registries.
const USER_AGENT: &str = concat!("rouse/", env!("CARGO_PKG_VERSION"));
/// Longest time for a connection to a registry; the whole query has a timeout of its own.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Error of a query: the registry returned no digest.
#[derive(Debug, thiserror::Error)]
pub enum RegistryQueryError {
    /// The query reached its timeout.
    #[error("registry {registry} sent no response within {limit:?}")]
    TimedOut {
        /// Host of the registry.
        registry: String,
        /// Timeout of the query.
        limit: Duration,
    },
    /// The registry, or the connection to it, returned an error.
    #[error("registry {registry}{hint}")]
    Failed {
        /// Host of the registry.
        registry: String,
        /// Advice for the user, from the kind of error.
        hint: &'static str,
        /// Error of the registry client.
        #[source]
        source: Box<OciDistributionError>,
    },
}

impl RegistryQueryError {
    /// The whole chain of errors on one line, for conditions.
    pub fn to_line(&self) -> String {
        let mut line = self.to_string();
        let mut cause = self.source();
        while let Some(it) = cause {
            let text = it.to_string();
            // Some errors repeat their cause in their own text.
            if !line.contains(&text) {
                // Writing to a `String` never fails.
                let _ = write!(line, ": {text}");
            }
            cause = it.source();
        }
        line
    }

    /// Returns true if other credentials might help.
    fn is_unauthorized(&self) -> bool {
        matches!(self, Self::Failed { source, .. } if is_refused(source))
    }

    /// Returns true if the registry sent no response, so that plain HTTP may help.
    fn is_transport_error(&self) -> bool {
        matches!(self, Self::Failed { source, .. }
            if matches!(**source, OciDistributionError::RequestError(ref it) if it.status().is_none()))
    }
}

/// Client of registries, with the root certificates that it trusts.
#[derive(Clone, Debug, Default)]
pub struct RegistryClient {
    roots: Vec<Certificate>,
}

impl RegistryClient {
    /// Creates a client that trusts the system's roots and those of these PEM texts.
    pub fn new(bundles: &[Vec<u8>]) -> Self {
        let texts = bundles.iter().map(|it| String::from_utf8_lossy(it).into_owned());
        let roots = texts.flat_map(|text| parse_certificates(&text)).collect();
        Self { roots }
    }

    /// Queries the digest that a tag has now; for an image of several platforms that of its index.
    pub async fn query_digest(
        &self,
        tag: &ImageTag,
        keyring: &Keyring,
        limit: Duration,
    ) -> Result<String, RegistryQueryError> {
        // One limit covers all logins and both protocols.
        let asked = tokio::time::timeout(limit, self.query_with_logins(tag, keyring)).await;
        let late =
            |_elapsed| RegistryQueryError::TimedOut { registry: tag.registry().to_owned(), limit };
        let digest = asked.map_err(late)??;
        Ok(tag.with_digest(&digest))
    }

    /// Tries each matching login until one is accepted; without a match it queries anonymously.
    async fn query_with_logins(
        &self,
        tag: &ImageTag,
        keyring: &Keyring,
    ) -> Result<String, RegistryQueryError> {
        let mut logins = keyring.matching_logins(tag.registry(), tag.repository()).into_iter();
        let mut login = logins.next();
        loop {
            // Only a refused login justifies the next one: other errors would repeat.
            match (self.query_with_login(tag, login.as_ref()).await, logins.next()) {
                (Err(refused), Some(next)) if refused.is_unauthorized() => login = Some(next),
                (said, _) => return said,
            }
        }
    }

    /// Queries by HTTPS. A registry that may use plain HTTP and has no HTTPS is queried again, as go-containerregistry
    /// does.
    async fn query_with_login(
        &self,
        tag: &ImageTag,
        login: Option<&RegistryLogin>,
    ) -> Result<String, RegistryQueryError> {
        match self.query_over(ClientProtocol::Https, tag, login).await {
            Err(failed) if failed.is_transport_error() && tag.allows_plain_http() => {
                debug!(registry = tag.registry(), "registry asked in plain HTTP");
                self.query_over(ClientProtocol::Http, tag, login).await
            }
            said => said,
        }
    }

    async fn query_over(
        &self,
        protocol: ClientProtocol,
        tag: &ImageTag,
        login: Option<&RegistryLogin>,
    ) -> Result<String, RegistryQueryError> {
        let refused = |source| query_error(tag, login.is_some(), source);
        let options = SessionOptions {
            protocol,
            roots: self.roots.clone(),
            connect_timeout: Some(CONNECT_TIMEOUT),
            // The whole query has a limit.
            read_timeout: None,
            user_agent: Some(USER_AGENT),
        };
        let session = RegistrySession::new(tag.reference(), login.cloned(), options);
        session.map_err(refused)?.fetch_digest().await.map_err(refused)
    }
}

/// Certificates of a PEM text, in which other text is ignored.
fn parse_certificates(text: &str) -> Vec<Certificate> {
    const END: &str = "-----END CERTIFICATE-----";
    let blocks = text.split_inclusive(END).filter(|it| it.ends_with(END));
    let one = |block: &str| Certificate {
        encoding: CertificateEncoding::Pem,
        data: block.trim_start().as_bytes().to_vec(),
    };
    blocks.map(one).collect()
}

/// Builds the error, with advice for the user.
fn query_error(
    tag: &ImageTag,
    logged_in: bool,
    source: OciDistributionError,
) -> RegistryQueryError {
    let hint = match (is_refused(&source), logged_in) {
        (true, true) => " refuses the credentials: check the pull secrets of the service account",
        (true, false) => " wants credentials: name a pull secret in the service account",
        (false, _) if is_missing(&source) => " does not have it: check its name and tag",
        (false, _) => " sent no response that can be used",
    };
    let registry = tag.registry().to_owned();
    RegistryQueryError::Failed { registry, hint, source: Box::new(source) }
}

/// Returns true if the registry refused the login, or the lack of one.
fn is_refused(error: &OciDistributionError) -> bool {
    requires_login(error) || is_forbidden(error)
}

#[cfg(test)]
mod tests;
