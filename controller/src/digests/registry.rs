//! Shell: registries, asked by the `oci-client` crate for one digest at a time.

use std::{error::Error as StdError, fmt::Write as _, time::Duration};

use oci_client::{
    Client,
    client::{Certificate, CertificateEncoding, ClientConfig, ClientProtocol},
    errors::OciDistributionError,
    secrets::RegistryAuth,
};
use tracing::debug;

use super::{
    credentials::{Keyring, Login},
    reference::Tag,
};

/// What registries see as `User-Agent`.
const AGENT: &str = concat!("rouse/", env!("CARGO_PKG_VERSION"));
/// A registry that takes no connection for so long is not there; the whole question has a time limit of its own.
const CONNECT: Duration = Duration::from_secs(5);

/// Why a registry gave no digest.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// It took too long.
    #[error("registry {registry} gave no answer within {limit:?}")]
    Late {
        /// Which registry.
        registry: String,
        /// How long it had.
        limit: Duration,
    },
    /// It did not say what the tag leads to.
    #[error("registry {registry}{hint}")]
    Refused {
        /// Which registry.
        registry: String,
        /// What to do about it.
        hint: &'static str,
        /// What it said.
        #[source]
        source: Box<OciDistributionError>,
    },
}

impl RegistryError {
    /// The whole chain on one line, as conditions show it.
    pub fn line(&self) -> String {
        let mut line = self.to_string();
        let mut cause = self.source();
        while let Some(it) = cause {
            let text = it.to_string();
            // Some errors repeat their cause in their own text.
            if !line.contains(&text) {
                // Writing to a String cannot fail.
                let _ = write!(line, ": {text}");
            }
            cause = it.source();
        }
        line
    }

    fn is_login(&self) -> bool {
        matches!(self, Self::Refused { source, .. } if wants_login(source))
    }

    /// Whether nothing was said at all, so that another way of asking may help.
    fn is_transport(&self) -> bool {
        matches!(self, Self::Refused { source, .. }
            if matches!(**source, OciDistributionError::RequestError(ref it) if it.status().is_none()))
    }
}

/// How registries are asked.
#[derive(Clone, Debug, Default)]
pub struct Registries {
    roots: Vec<Certificate>,
}

impl Registries {
    /// Trusts the system's roots and those of these PEM texts.
    pub fn new(bundles: &[Vec<u8>]) -> Self {
        // That library leaves the choice to us. Whoever started the process may have chosen one already, and then that one counts.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let texts = bundles.iter().map(|it| String::from_utf8_lossy(it).into_owned());
        let roots = texts.flat_map(|text| certificates(&text)).collect();
        Self { roots }
    }

    /// The digest that a tag leads to now: of the index where it is one of several platforms.
    pub async fn digest(
        &self,
        tag: &Tag,
        keyring: &Keyring,
        limit: Duration,
    ) -> Result<String, RegistryError> {
        let asked = tokio::time::timeout(limit, self.ask(tag, keyring)).await;
        let late = |_elapsed| RegistryError::Late { registry: tag.registry().to_owned(), limit };
        let digest = asked.map_err(late)??;
        Ok(tag.with_digest(&digest))
    }

    /// With each login that fits until one is taken; without any where none fits.
    async fn ask(&self, tag: &Tag, keyring: &Keyring) -> Result<String, RegistryError> {
        let mut logins = keyring.logins(tag).into_iter();
        let mut login = logins.next();
        loop {
            match (self.ask_as(tag, login.as_ref()).await, logins.next()) {
                (Err(refused), Some(next)) if refused.is_login() => login = Some(next),
                (said, _) => return said,
            }
        }
    }

    /// By HTTPS; a registry nearby that does not speak it is asked in plain HTTP, as go-containerregistry does.
    async fn ask_as(&self, tag: &Tag, login: Option<&Login>) -> Result<String, RegistryError> {
        match self.ask_by(ClientProtocol::Https, tag, login).await {
            Err(failed) if failed.is_transport() && tag.may_be_plain() => {
                debug!(registry = tag.registry(), "registry asked in plain HTTP");
                self.ask_by(ClientProtocol::Http, tag, login).await
            }
            said => said,
        }
    }

    async fn ask_by(
        &self,
        protocol: ClientProtocol,
        tag: &Tag,
        login: Option<&Login>,
    ) -> Result<String, RegistryError> {
        let refused = |source| refused(tag, login.is_some(), source);
        // A client keeps what it once logged in with, so each login has a client of its own.
        let config = ClientConfig {
            protocol,
            extra_root_certificates: self.roots.clone(),
            connect_timeout: Some(CONNECT),
            user_agent: AGENT,
            ..ClientConfig::default()
        };
        let client = Client::try_from(config).map_err(refused)?;
        let auth = match login {
            None => RegistryAuth::Anonymous,
            Some(Login::Basic(user, password)) => {
                RegistryAuth::Basic(user.clone(), password.clone())
            }
            Some(Login::Bearer(token)) => RegistryAuth::Bearer(token.clone()),
        };
        client.fetch_manifest_digest(tag.reference(), &auth).await.map_err(refused)
    }
}

/// The certificates of a PEM text.
fn certificates(text: &str) -> Vec<Certificate> {
    const END: &str = "-----END CERTIFICATE-----";
    let blocks = text.split_inclusive(END).filter(|it| it.ends_with(END));
    let one = |block: &str| Certificate {
        encoding: CertificateEncoding::Pem,
        data: block.trim_start().as_bytes().to_vec(),
    };
    blocks.map(one).collect()
}

fn refused(tag: &Tag, logged_in: bool, source: OciDistributionError) -> RegistryError {
    let hint = match (wants_login(&source), logged_in) {
        (true, true) => " refuses the credentials: check the pull secrets of the service account",
        (true, false) => " wants credentials: name a pull secret in the service account",
        (false, _) if is_missing(&source) => " does not have it: check its name and tag",
        (false, _) => " gave no answer that can be used",
    };
    let registry = tag.registry().to_owned();
    RegistryError::Refused { registry, hint, source: Box::new(source) }
}

fn codes(error: &OciDistributionError) -> Vec<String> {
    match error {
        OciDistributionError::RegistryError { envelope, .. } => {
            envelope.errors.iter().map(|it| format!("{:?}", it.code)).collect()
        }
        _ => Vec::new(),
    }
}

fn wants_login(error: &OciDistributionError) -> bool {
    let refused = |it: &String| matches!(it.as_str(), "Unauthorized" | "Denied");
    matches!(
        error,
        OciDistributionError::UnauthorizedError { .. }
            | OciDistributionError::AuthenticationFailure(_)
            | OciDistributionError::ServerError { code: 401 | 403, .. }
    ) || codes(error).iter().any(refused)
}

fn is_missing(error: &OciDistributionError) -> bool {
    let missing =
        |it: &String| matches!(it.as_str(), "ManifestUnknown" | "NameUnknown" | "NotFound");
    matches!(
        error,
        OciDistributionError::ImageManifestNotFoundError(_)
            | OciDistributionError::ServerError { code: 404, .. }
    ) || codes(error).iter().any(missing)
}

#[cfg(test)]
#[path = "registry/tests.rs"]
mod tests;
