//! Shell: images of containers: found in OCI layouts or pulled from registries, and unpacked once per digest.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use nix::fcntl::{OFlag, ResolveFlag};
use oci_spec::image::ImageConfiguration;
use thiserror::Error;
use tracing::info;

use crate::scoped_open::open_scoped;

mod layers;
mod oci_layout;
mod puller;
mod temporary_files;

pub use oci_layout::ImageLayoutError;
pub use puller::{ImagePullError, ImagePuller, credential_files};

/// An image ready to run.
#[derive(Clone, Debug)]
pub struct UnpackedImage {
    /// Digest of the image's manifest, `sha256:…`.
    pub digest: String,
    /// Configuration of the image: command, user, environment.
    pub config: Arc<ImageConfiguration>,
    /// Folder of the unpacked files, never written again.
    pub rootfs: PathBuf,
}

/// Longest file of an image that is read: names of users and groups need less.
const MAX_TEXT_BYTES: u64 = 1 << 20;

impl UnpackedImage {
    /// Returns the text of a file of the image, of which `path` is relative to the image's root. Empty if the image has
    /// no such regular file.
    ///
    /// Links are followed inside of the image: the host's root is not the image's, so an absolute link would lead to a
    /// file of the host.
    pub fn read_text(&self, path: &str) -> String {
        self.try_read_text(path).unwrap_or_default()
    }

    fn try_read_text(&self, path: &str) -> io::Result<String> {
        let root = File::open(&self.rootfs)?;
        // Not blocking, because the image may have a pipe of that name.
        let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK;
        let resolve = ResolveFlag::RESOLVE_IN_ROOT;
        let file = File::from(open_scoped(&root, Path::new(path), flags, resolve)?);
        if !file.metadata()?.is_file() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut bytes = Vec::new();
        file.take(MAX_TEXT_BYTES).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// Reason that an image cannot be made ready.
#[derive(Debug, Error)]
pub enum ImageError {
    /// No folder and no registry has an image of this name.
    #[error("image {image} not found{hint}")]
    NotFound {
        /// Image reference as the spec writes it.
        image: String,
        /// Places that were searched, and advice for the user.
        hint: String,
    },
    /// An OCI image layout is broken.
    #[error("cannot read image {image}")]
    Layout {
        /// Image reference as the spec writes it.
        image: String,
        /// Problem of the layout.
        #[source]
        source: ImageLayoutError,
    },
    /// A registry did not deliver the image.
    #[error("cannot pull image {image}{hint}")]
    Registry {
        /// Image reference as the spec writes it.
        image: String,
        /// Other places that were searched, and advice for the user.
        hint: String,
        /// Problem with the registry.
        #[source]
        source: ImagePullError,
    },
    /// A layer could not be unpacked.
    #[error("cannot unpack image {image}")]
    Unpack {
        /// Image reference as the spec writes it.
        image: String,
        /// Error while unpacking a layer.
        #[source]
        source: io::Error,
    },
    /// The image is not on this node, and `imagePullPolicy` is `Never`.
    #[error("image {0} is not on this node, and imagePullPolicy is Never")]
    NeverPull(String),
}

impl ImageError {
    /// Returns Kubernetes' reason for a container that waits for its image.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NeverPull(_) => "ErrImageNeverPull",
            Self::Registry { source: ImagePullError::Name { .. }, .. } => "InvalidImageName",
            _ => "ErrImagePull",
        }
    }
}

/// Policy that decides if a registry is asked for an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImagePullPolicy {
    /// Ask each time a container starts.
    Always,
    /// Ask only if the image is not in the store.
    IfNotPresent,
    /// Use only images of this node.
    Never,
}

impl ImagePullPolicy {
    /// Returns the policy of a container: as written, else Kubernetes' default (Always for `:latest` or no tag).
    pub fn from_spec(written: Option<&str>, image: &str) -> Self {
        // The tag follows the last slash: a colon before it belongs to the registry's port.
        let last = image.rsplit('/').next().unwrap_or(image);
        let floating = !image.contains('@') && (!last.contains(':') || last.ends_with(":latest"));
        match written {
            Some("Always") => Self::Always,
            Some("Never") => Self::Never,
            Some("IfNotPresent") => Self::IfNotPresent,
            _ if floating => Self::Always,
            _ => Self::IfNotPresent,
        }
    }
}

/// Source of all images of a node.
#[derive(Debug)]
pub struct ImageStore {
    store: PathBuf,
    layouts_folder: Option<PathBuf>,
    puller: ImagePuller,
    unpack_locks: Mutex<HashMap<String, Arc<Mutex<()>>>>,
    ready_images: Mutex<HashMap<String, UnpackedImage>>,
}

impl ImageStore {
    /// Opens the folder `store`. Layouts below `layouts_folder` are found by the names of their images.
    ///
    /// Incomplete files that crashed processes left in the store are removed.
    pub fn new(store: PathBuf, layouts_folder: Option<PathBuf>, puller: ImagePuller) -> Self {
        temporary_files::remove_leftovers(&store);
        Self {
            store,
            layouts_folder,
            puller,
            unpack_locks: Mutex::default(),
            ready_images: Mutex::default(),
        }
    }

    /// Finds an image, pulls it if the policy requires, and unpacks it. Blocks.
    pub fn get(&self, image: &str, policy: ImagePullPolicy) -> Result<UnpackedImage, ImageError> {
        let wrap = |source| ImageError::Layout { image: image.to_owned(), source };
        if let Some(rest) = image.strip_prefix("oci:") {
            let found = oci_layout::LayoutImage::from_path(rest).map_err(wrap)?;
            return self.unpack_once(image, &found);
        }
        // The folder comes before any registry and any policy: the user named it for this purpose.
        if let Some(folder) = &self.layouts_folder
            && let Some(found) =
                oci_layout::LayoutImage::find_by_name(folder, image).map_err(wrap)?
        {
            return self.unpack_once(image, &found);
        }
        let kept = self.puller.find_pulled(&self.store, image);
        match (policy, kept) {
            (ImagePullPolicy::IfNotPresent | ImagePullPolicy::Never, Some(found)) => {
                self.unpack_once(image, &found)
            }
            (ImagePullPolicy::Never, None) => Err(ImageError::NeverPull(image.to_owned())),
            (ImagePullPolicy::IfNotPresent | ImagePullPolicy::Always, _) => {
                let found = self
                    .puller
                    .pull(&self.store, image)
                    .map_err(|source| self.explain_error(image, source))?;
                self.unpack_once(image, &found)
            }
        }
    }

    /// Turns a registry's error into one with advice for the user.
    fn explain_error(&self, image: &str, source: ImagePullError) -> ImageError {
        let (image, folder) = (image.to_owned(), self.layouts_folder.as_deref());
        match &source {
            ImagePullError::NotFound { registry } => {
                let here = folder.map(|folder| format!(" nor below {}", folder.display()));
                let here = here.unwrap_or_default();
                let hint = format!(" in registry {registry}{here}: check its name and tag");
                ImageError::NotFound { image, hint }
            }
            ImagePullError::Request { .. } => {
                let hint = unreachable_hint(folder);
                ImageError::Registry { image, hint, source }
            }
            ImagePullError::Name { .. }
            | ImagePullError::Unauthorized { .. }
            | ImagePullError::Size { .. }
            | ImagePullError::Store { .. }
            | ImagePullError::Network(_) => {
                ImageError::Registry { image, hint: String::new(), source }
            }
        }
    }

    /// Unpacks an image, unless that was done before.
    fn unpack_once(
        &self,
        image: &str,
        found: &oci_layout::LayoutImage,
    ) -> Result<UnpackedImage, ImageError> {
        if let Some(known) = lock(&self.ready_images).get(&found.digest) {
            return Ok(known.clone());
        }
        let wrap = |source| ImageError::Layout { image: image.to_owned(), source };
        let manifest = found.manifest().map_err(wrap)?;
        let config = found.config(&manifest).map_err(wrap)?;
        let rootfs = self.store.join("rootfs").join(found.digest.replace(':', "-"));
        // Pods of one Revision start together: one of them unpacks, the others wait here.
        let gate = Arc::clone(lock(&self.unpack_locks).entry(found.digest.clone()).or_default());
        let alone = lock(&gate);
        if !rootfs.exists() {
            let unpacked = self.unpack(found, &manifest, &rootfs);
            unpacked.map_err(|source| ImageError::Unpack { image: image.to_owned(), source })?;
            info!(image, digest = found.digest, "image unpacked");
        }
        drop(alone);
        let ready =
            UnpackedImage { digest: found.digest.clone(), config: Arc::new(config), rootfs };
        lock(&self.ready_images).insert(found.digest.clone(), ready.clone());
        Ok(ready)
    }

    /// Unpacks all layers in order into one folder.
    fn unpack(
        &self,
        found: &oci_layout::LayoutImage,
        manifest: &oci_spec::image::ImageManifest,
        rootfs: &Path,
    ) -> io::Result<()> {
        let half = temporary_files::temporary_path(rootfs)?;
        fs::create_dir_all(&half)?;
        let unpack_layers = || {
            for layer in manifest.layers() {
                let digest = layer.digest().to_string();
                layers::unpack_layer(File::open(found.blob_path(&digest))?, &digest, &half)?;
            }
            // The final name appears only once the image is complete.
            fs::rename(&half, rootfs)
        };
        let unpacked = unpack_layers();
        if unpacked.is_err() {
            // The next attempt uses another name.
            let _ = fs::remove_dir_all(&half);
        }
        unpacked
    }
}

/// Formats bytes as lower-case hexadecimal digits.
fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Locks a mutex, poisoned or not: each guards a map or the unpacking of one image, which a panic leaves consistent.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Returns advice for a registry that cannot be asked: often the image was meant to be in the folder.
fn unreachable_hint(folder: Option<&Path>) -> String {
    let here = match folder {
        Some(folder) => format!("it is not below {} either", folder.display()),
        None => "no folder of images was named with --images".to_owned(),
    };
    format!(" ({here}; check its name and tag)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unreachable_registry_error_names_the_searched_folder() {
        let hint = unreachable_hint(Some(Path::new("/images")));
        assert_eq!(hint, " (it is not below /images either; check its name and tag)");
        assert!(unreachable_hint(None).contains("--images"));
    }

    #[test]
    fn links_of_an_image_lead_to_files_of_the_image() {
        let folder = std::env::temp_dir().join(format!("rouse-image-{}", std::process::id()));
        let rootfs = folder.join("rootfs");
        fs::create_dir_all(rootfs.join("etc")).unwrap();
        fs::create_dir_all(rootfs.join("usr/lib")).unwrap();
        fs::write(folder.join("outside"), "of the host").unwrap();
        fs::write(rootfs.join("usr/lib/passwd"), "of the image").unwrap();
        let outside = folder.join("outside");
        for (name, target) in [
            ("inside", Path::new("/usr/lib/passwd")),
            ("climbing", Path::new("../../../usr/lib/passwd")),
            ("absolute", outside.as_path()),
            ("relative", Path::new("../../outside")),
            ("loop", Path::new("/etc/loop")),
        ] {
            std::os::unix::fs::symlink(target, rootfs.join("etc").join(name)).unwrap();
        }
        let config = Arc::new(ImageConfiguration::default());
        let image = UnpackedImage { digest: String::new(), config, rootfs: rootfs.clone() };
        for name in ["inside", "climbing"] {
            assert_eq!(image.read_text(&format!("etc/{name}")), "of the image", "{name}");
        }
        for name in ["absolute", "relative", "loop", "missing", "../etc"] {
            assert_eq!(image.read_text(&format!("etc/{name}")), "", "{name}");
        }
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn what_a_crashed_process_left_is_removed_at_the_start() {
        let store = std::env::temp_dir().join(format!("rouse-images-{}", std::process::id()));
        let own = temporary_files::temporary_path(Path::new("")).unwrap();
        let own = own.display().to_string();
        let kept = [
            "blobs/sha256/00".to_owned(),
            "refs/h.io%2Fa%3Av1.half".to_owned(),
            "rootfs/sha256-00/a".to_owned(),
            format!("rootfs/{own}/a"),
        ];
        let left = [
            "blobs/sha256/.half-1-1-0",
            "blobs/sha256/00.half",
            "refs/.half-1-1-1",
            "rootfs/.half-1-1-2/a",
            "rootfs/sha256-00.half-1/a",
        ];
        let write = |file: &str| {
            let path = store.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "").unwrap();
        };
        kept.iter().map(String::as_str).chain(left).for_each(write);
        let host = Arc::new(File::open("/").unwrap().into());
        let _store = ImageStore::new(store.clone(), None, ImagePuller::new(host, Vec::new()));
        let is_there = |file: &&str| store.join(file).exists();
        let found: Vec<_> = kept.iter().map(String::as_str).filter(is_there).collect();
        assert_eq!(found, kept);
        assert_eq!(left.into_iter().filter(is_there).collect::<Vec<_>>(), [""; 0]);
        fs::remove_dir_all(&store).unwrap();
    }

    #[test]
    fn only_an_image_without_a_fixed_tag_or_digest_is_pulled_always_by_default() {
        for (written, image, policy) in [
            (None, "reg:5000/a", ImagePullPolicy::Always),
            (None, "reg:5000/a:latest", ImagePullPolicy::Always),
            (None, "reg:5000/a:v1", ImagePullPolicy::IfNotPresent),
            (None, "a@sha256:00", ImagePullPolicy::IfNotPresent),
            (Some("Never"), "a", ImagePullPolicy::Never),
            (Some("IfNotPresent"), "a", ImagePullPolicy::IfNotPresent),
        ] {
            assert_eq!(ImagePullPolicy::from_spec(written, image), policy, "{written:?} {image}");
        }
    }
}
