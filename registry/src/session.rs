//! Shell: one registry, asked for one image by the `oci-client` crate.

use std::{fmt, time::Duration};

use oci_client::{
    Client, Reference,
    client::{Certificate, ClientConfig, ClientProtocol},
    errors::OciDistributionError,
    manifest::{OciDescriptor, OciImageManifest},
    secrets::RegistryAuth,
};

use crate::credentials::RegistryLogin;

/// Types of an image's manifest. That of an index is not among them.
const MANIFEST_TYPES: [&str; 2] = [
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
];

/// Settings of the connections of a session. The defaults are those of `oci-client`.
#[derive(Clone, Debug, Default)]
pub struct SessionOptions {
    /// HTTPS or plain HTTP. The local node uses plain HTTP at once for registries on its machine, as docker does. The
    /// controller uses it only after HTTPS has failed, as go-containerregistry does.
    pub protocol: ClientProtocol,
    /// Root certificates that are trusted in addition to the system's.
    pub roots: Vec<Certificate>,
    /// Longest time for a connection, or no limit.
    pub connect_timeout: Option<Duration>,
    /// Longest time without a byte of the response, or no limit.
    pub read_timeout: Option<Duration>,
    /// `User-Agent` of the requests, or that of `oci-client`.
    pub user_agent: Option<&'static str>,
}

impl SessionOptions {
    fn client_config(self) -> ClientConfig {
        let usual = ClientConfig::default();
        ClientConfig {
            protocol: self.protocol,
            extra_root_certificates: self.roots,
            connect_timeout: self.connect_timeout,
            read_timeout: self.read_timeout,
            user_agent: self.user_agent.unwrap_or(usual.user_agent),
            ..usual
        }
    }
}

/// Requests for one image with one login. The client below caches its login, so each login needs a session of its own.
pub struct RegistrySession {
    client: Client,
    reference: Reference,
    auth: RegistryAuth,
}

impl fmt::Debug for RegistrySession {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("RegistrySession")
            .field("reference", &self.reference)
            .field("auth", &self.auth)
            .finish_non_exhaustive()
    }
}

impl RegistrySession {
    /// Prepares requests for an image; sends none yet.
    pub fn new(
        reference: &Reference,
        login: Option<RegistryLogin>,
        options: SessionOptions,
    ) -> Result<Self, OciDistributionError> {
        // oci-client leaves the crypto provider to the program. If the process has one already, that one stays.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::try_from(options.client_config())?;
        let auth = match login {
            None => RegistryAuth::Anonymous,
            Some(RegistryLogin::Basic(user, password)) => RegistryAuth::Basic(user, password),
            Some(RegistryLogin::Bearer(token)) => RegistryAuth::Bearer(token),
        };
        Ok(Self { client, reference: reference.clone(), auth })
    }

    /// Queries the digest of the image; for an image of several platforms that of its index.
    pub async fn fetch_digest(&self) -> Result<String, OciDistributionError> {
        self.client.fetch_manifest_digest(&self.reference, &self.auth).await
    }

    /// Pulls the manifest for this machine's platform, and its digest.
    pub async fn pull_manifest(&self) -> Result<(OciImageManifest, String), OciDistributionError> {
        self.client.pull_image_manifest(&self.reference, &self.auth).await
    }

    /// Pulls a layer, or the image's configuration. Its content is checked against its digest.
    pub async fn pull_layer(&self, layer: &OciDescriptor) -> Result<Vec<u8>, OciDistributionError> {
        let mut bytes = Vec::new();
        self.client.pull_blob(&self.reference, layer, &mut bytes).await?;
        Ok(bytes)
    }

    /// Pulls the manifest with this digest as the registry stores it, because its digest covers these bytes.
    pub async fn pull_manifest_bytes(&self, digest: &str) -> Result<Vec<u8>, OciDistributionError> {
        let exact = self.reference.clone_with_digest(digest.to_owned());
        let pulled = self.client.pull_manifest_raw(&exact, &self.auth, &MANIFEST_TYPES).await;
        pulled.map(|(bytes, _)| bytes.to_vec())
    }
}
