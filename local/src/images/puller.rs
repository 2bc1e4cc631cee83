//! Shell: pulls images from registries into the store, in the host's network.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use registry::image_reference::is_loopback;
use registry::request_error::{is_missing, requires_login};
use registry::{
    ClientProtocol, Keyring, OciDistributionError, Reference, RegistryLogin, RegistrySession,
    SessionOptions,
};
use thiserror::Error;
use tracing::{info, warn};

use super::oci_layout::LayoutImage;
use super::temporary_files::temporary_path;
use crate::net::{self, NetError};

/// Longest time for a connection to a registry.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest time without a byte from a registry. A pod is removed only once its pulls have ended.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// Reason that a registry delivered no image.
#[derive(Debug, Error)]
pub enum ImagePullError {
    /// The reference does not parse as an image name.
    #[error("{name:?} is not an image name: use REGISTRY/NAME:TAG or oci:PATH")]
    Name {
        /// Image reference as the spec writes it.
        name: String,
        /// Error of the parser.
        #[source]
        source: registry::ParseError,
    },
    /// The registry has no such image.
    #[error("registry {registry} does not have it")]
    NotFound {
        /// Host and port of the registry.
        registry: String,
    },
    /// The registry requires other credentials.
    #[error(
        "registry {registry} refuses: log in with `docker login {registry}` or `skopeo login {registry}`"
    )]
    Unauthorized {
        /// Host and port of the registry.
        registry: String,
        /// Response of the registry.
        #[source]
        source: Box<OciDistributionError>,
    },
    /// The registry could not be asked, or its response is unusable.
    #[error("registry {registry} gave no answer that can be used")]
    Request {
        /// Host and port of the registry.
        registry: String,
        /// Error of the request.
        #[source]
        source: Box<OciDistributionError>,
    },
    /// A blob has another size than the manifest names, so it could not be told from one that was cut.
    #[error(
        "registry {registry} has {digest} with {actual} bytes instead of {named}: push it again"
    )]
    Size {
        /// Host and port of the registry.
        registry: String,
        /// Digest of the blob.
        digest: String,
        /// Number of bytes that the registry has sent.
        actual: usize,
        /// Number of bytes that the manifest names.
        named: i64,
    },
    /// The image store could not be written.
    #[error("cannot write {path}")]
    Store {
        /// File in the store.
        path: PathBuf,
        /// Error of the write.
        #[source]
        source: io::Error,
    },
    /// The pulling thread could not enter the host's network namespace.
    #[error("cannot reach the host's network")]
    Network(#[source] NetError),
}

/// Pulls images, each on a thread in the host's network namespace.
#[derive(Clone, Debug)]
pub struct ImagePuller {
    host_network: Arc<OwnedFd>,
    credentials: Vec<PathBuf>,
    /// Longest time without a byte from a registry.
    read_timeout: Duration,
}

impl ImagePuller {
    /// Returns a puller for the network namespace `host_network`. Of the credential files the first one that knows a
    /// registry is used.
    pub fn new(host_network: Arc<OwnedFd>, credentials: Vec<PathBuf>) -> Self {
        Self { host_network, credentials, read_timeout: READ_TIMEOUT }
    }

    /// Returns the image that was pulled before under this name. After a loss of power its files may be empty; then it
    /// counts as not pulled.
    pub(super) fn find_pulled(&self, store: &Path, image: &str) -> Option<LayoutImage> {
        let reference: Reference = image.parse().ok()?;
        let recorded = || fs::read_to_string(reference_file(store, &reference)).ok();
        let digests = reference.digest().map(str::to_owned).into_iter();
        let mut images = digests
            .chain(std::iter::once_with(recorded).flatten())
            .map(|digest| LayoutImage { layout: store.to_owned(), digest });
        images.find(LayoutImage::is_complete)
    }

    /// Pulls an image into the store. Blobs that are there already are not fetched again.
    pub(super) fn pull(&self, store: &Path, image: &str) -> Result<LayoutImage, ImagePullError> {
        let parse = |source| ImagePullError::Name { name: image.to_owned(), source };
        let reference: Reference = image.parse().map_err(parse)?;
        let work = || -> Result<LayoutImage, ImagePullError> {
            // The HTTP client resolves names on threads that this one starts, so they are in the host's network too.
            net::enter_namespace(self.host_network.as_fd()).map_err(ImagePullError::Network)?;
            let runtime = net::thread_runtime().map_err(ImagePullError::Network)?;
            runtime.block_on(self.fetch(store, &reference))
        };
        thread::scope(|scope| scope.spawn(work).join())
            .unwrap_or(Err(ImagePullError::Network(NetError::Ended)))
    }

    /// Fetches blobs and manifest of an image; must run in the host's network.
    async fn fetch(
        &self,
        store: &Path,
        reference: &Reference,
    ) -> Result<LayoutImage, ImagePullError> {
        let registry = reference.resolve_registry().to_owned();
        let protocol =
            if is_loopback(&registry) { ClientProtocol::Http } else { ClientProtocol::Https };
        let options = SessionOptions {
            protocol,
            connect_timeout: Some(CONNECT_TIMEOUT),
            read_timeout: Some(self.read_timeout),
            ..SessionOptions::default()
        };
        let classify = |source| classify_error(&registry, source);
        let login = self.find_login(reference);
        let session = RegistrySession::new(reference, login, options).map_err(classify)?;
        let (manifest, digest) = session.pull_manifest().await.map_err(classify)?;
        // Blobs first: an image whose manifest is in the store is complete.
        for layer in std::iter::once(&manifest.config).chain(&manifest.layers) {
            let path = blob_path(store, &layer.digest);
            // A blob of another size was cut by a loss of power.
            if fs::metadata(&path).is_ok_and(|blob| i64::try_from(blob.len()) == Ok(layer.size)) {
                continue;
            }
            let bytes = session.pull_layer(layer).await.map_err(classify)?;
            check_size(&registry, &layer.digest, layer.size, &bytes)?;
            write_atomically(&path, &bytes)?;
        }
        // The manifest is stored as the registry has it, because its digest covers these bytes. The request names the
        // digest: the tag may have moved since.
        let raw = session.pull_manifest_bytes(&digest).await.map_err(classify)?;
        write_atomically(&blob_path(store, &digest), &raw)?;
        record_digest(store, reference, &digest)?;
        info!(image = reference.whole(), digest, "image pulled");
        Ok(LayoutImage { layout: store.to_owned(), digest })
    }

    /// Finds the login for a repository in the first file that has one.
    fn find_login(&self, reference: &Reference) -> Option<RegistryLogin> {
        self.credentials.iter().find_map(|path| {
            let keyring = Keyring::from_login_file(&fs::read(path).ok()?);
            // The pull goes on without it, and a registry that refuses it would not name the cause. The text of the
            // error could contain a password.
            let keyring = keyring.inspect_err(|error| {
                let (line, column) = (error.line(), error.column());
                warn!(path = %path.display(), line, column, "login file not understood");
            });
            let keyring = keyring.ok()?;
            let logins = keyring.matching_logins(reference.registry(), reference.repository());
            logins.into_iter().next()
        })
    }
}

/// Returns the files that `docker login` and `skopeo login` write, in the order in which skopeo reads them.
pub fn credential_files(environment: &BTreeMap<String, String>) -> Vec<PathBuf> {
    let of = |key: &str, rest: &str| environment.get(key).map(|value| Path::new(value).join(rest));
    let named = environment.get("REGISTRY_AUTH_FILE").map(PathBuf::from);
    [
        named,
        of("XDG_RUNTIME_DIR", "containers/auth.json"),
        Some(PathBuf::from("/run/containers/0/auth.json")),
        of("XDG_CONFIG_HOME", "containers/auth.json"),
        of("HOME", ".config/containers/auth.json"),
        of("DOCKER_CONFIG", "config.json"),
        of("HOME", ".docker/config.json"),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Classifies a failed request.
fn classify_error(registry: &str, source: OciDistributionError) -> ImagePullError {
    let (registry, source) = (registry.to_owned(), Box::new(source));
    if is_missing(&source) {
        ImagePullError::NotFound { registry }
    } else if requires_login(&source) {
        ImagePullError::Unauthorized { registry, source }
    } else {
        ImagePullError::Request { registry, source }
    }
}

/// Returns an error unless a blob has the size that the manifest names.
fn check_size(
    registry: &str,
    digest: &str,
    named: i64,
    bytes: &[u8],
) -> Result<(), ImagePullError> {
    if i64::try_from(bytes.len()) == Ok(named) {
        return Ok(());
    }
    let (registry, digest) = (registry.to_owned(), digest.to_owned());
    Err(ImagePullError::Size { registry, digest, actual: bytes.len(), named })
}

/// Path of a blob in the store: `blobs/sha256/…`.
fn blob_path(store: &Path, digest: &str) -> PathBuf {
    store.join("blobs").join(digest.replacen(':', "/", 1))
}

/// Records the digest of the manifest that was pulled for a reference, unless the reference itself names it.
///
/// A reference may name a tag instead, or the index of an image of several platforms.
fn record_digest(store: &Path, reference: &Reference, digest: &str) -> Result<(), ImagePullError> {
    if reference.digest() == Some(digest) {
        return Ok(());
    }
    write_atomically(&reference_file(store, reference), digest.as_bytes())
}

/// Path of the file that holds the digest for a reference. Its name is percent-encoded, so that no two references
/// share a file.
fn reference_file(store: &Path, reference: &Reference) -> PathBuf {
    let mut name = String::new();
    for letter in reference.whole().chars() {
        match letter {
            '/' => name.push_str("%2F"),
            ':' => name.push_str("%3A"),
            '%' => name.push_str("%25"),
            other => name.push(other),
        }
    }
    store.join("refs").join(name)
}

/// Writes a file of the store atomically, also if other pods write the same one.
fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), ImagePullError> {
    let store = |source| ImagePullError::Store { path: path.to_owned(), source };
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(store)?;
    }
    let half = temporary_path(path).map_err(store)?;
    let written = fs::write(&half, bytes).and_then(|()| fs::rename(&half, path));
    if written.is_err() {
        // A full disk would otherwise get one more such file at each attempt.
        let _ = fs::remove_file(&half);
    }
    written.map_err(store)
}

#[cfg(test)]
mod tests {
    use sha2::{Digest as _, Sha256};

    use super::*;

    #[test]
    fn pods_that_pull_the_same_blob_all_get_it_whole() {
        let store = tests_folder("blob");
        let path = blob_path(&store, "sha256:00");
        let bytes = vec![7; 1 << 20];
        for _ in 0..20 {
            let pull = || {
                write_atomically(&path, &bytes).map_err(|error| format!("{error:?}"))?;
                Ok::<_, String>(fs::read(&path).is_ok_and(|found| found == bytes))
            };
            let results: Vec<_> = thread::scope(|scope| {
                let pulls: Vec<_> = (0..8).map(|_| scope.spawn(pull)).collect();
                pulls.into_iter().map(|pull| pull.join().unwrap()).collect()
            });
            assert_eq!(results, vec![Ok(true); 8]);
        }
        fs::remove_dir_all(&store).unwrap();
    }

    #[test]
    fn a_blob_of_another_size_than_its_manifest_names_is_refused() {
        check_size("h.io", "sha256:00", 2, b"{}").unwrap();
        for named in [-1, 1, 3] {
            let error = check_size("h.io", "sha256:00", named, b"{}").unwrap_err().to_string();
            assert!(error.contains(&format!("2 bytes instead of {named}")), "{error}");
        }
    }

    #[test]
    fn images_with_similar_names_have_files_of_their_own() {
        let names = ["h.io/a/b_c:d", "h.io/a/b:c_d", "h.io/a_b:c_d", "h.io/a/b/c:d"];
        let files: std::collections::BTreeSet<_> = names
            .iter()
            .map(|name| reference_file(Path::new("/store"), &name.parse().unwrap()))
            .collect();
        assert_eq!(files.len(), names.len(), "{files:?}");
    }

    #[test]
    fn an_image_that_is_named_by_the_digest_of_its_index_is_found_again() {
        let store = tests_folder("index");
        let host_network = OwnedFd::from(fs::File::open("/").unwrap());
        let puller = ImagePuller::new(Arc::new(host_network), Vec::new());
        let text = manifest_text();
        let manifest = format!("sha256:{}", crate::images::to_hex(&Sha256::digest(&text)));
        let image = format!("h.io/app@sha256:{}", "a".repeat(64));
        assert_eq!(puller.find_pulled(&store, &image), None);
        record_digest(&store, &image.parse().unwrap(), &manifest).unwrap();
        assert_eq!(puller.find_pulled(&store, &image), None, "its manifest is not there");
        write_atomically(&blob_path(&store, &manifest), text.as_bytes()).unwrap();
        let blobs = BLOB_DIGITS.map(|digit| blob_path(&store, &blob_digest(digit)));
        for blob in &blobs {
            assert_eq!(puller.find_pulled(&store, &image), None, "without {}", blob.display());
            write_atomically(blob, b"{}").unwrap();
        }
        let expected = LayoutImage { layout: store.clone(), digest: manifest.clone() };
        assert_eq!(puller.find_pulled(&store, &image).as_ref(), Some(&expected));
        // As a loss of power can leave them.
        let manifest_file = blob_path(&store, &manifest);
        let reference = reference_file(&store, &image.parse().unwrap());
        for file in blobs.iter().chain([&manifest_file, &reference]) {
            let whole = fs::read(file).unwrap();
            fs::write(file, "").unwrap();
            assert_eq!(puller.find_pulled(&store, &image), None, "{}", file.display());
            fs::write(file, whole).unwrap();
            assert_eq!(puller.find_pulled(&store, &image).as_ref(), Some(&expected));
        }
        fs::remove_dir_all(&store).unwrap();
    }

    /// Digits of the digests of the configuration and the layer in [`manifest_text`].
    const BLOB_DIGITS: [&str; 2] = ["b", "c"];

    fn blob_digest(digit: &str) -> String {
        format!("sha256:{}", digit.repeat(64))
    }

    /// Manifest of an image with one layer. Each blob has two bytes.
    fn manifest_text() -> String {
        let [config, layer] = BLOB_DIGITS.map(blob_digest);
        let config = serde_json::json!({
            "mediaType": "application/vnd.oci.image.config.v1+json", "digest": config, "size": 2,
        });
        let layer = serde_json::json!({
            "mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": layer, "size": 2,
        });
        serde_json::json!({ "schemaVersion": 2, "config": config, "layers": [layer] }).to_string()
    }

    #[tokio::test]
    async fn a_registry_that_sends_nothing_ends_the_pull() {
        // The kernel accepts the connection.
        let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let host_network = Arc::new(OwnedFd::from(fs::File::open("/").unwrap()));
        let puller = ImagePuller {
            read_timeout: Duration::from_millis(20),
            ..ImagePuller::new(host_network, Vec::new())
        };
        let image = format!("{}/a:v1", silent.local_addr().unwrap());
        let error = puller.fetch(Path::new("/none"), &image.parse().unwrap()).await.unwrap_err();
        assert!(matches!(error, ImagePullError::Request { .. }), "{error:?}");
    }

    fn tests_folder(test: &str) -> PathBuf {
        std::env::temp_dir().join(format!("rouse-puller-{test}-{}", std::process::id()))
    }
}
