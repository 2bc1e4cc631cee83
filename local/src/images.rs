//! Shell: images: found in OCI layouts or pulled from registries, unpacked once per digest.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use oci_spec::image::ImageConfiguration;
use thiserror::Error;
use tracing::info;

mod credentials;
mod layers;
mod layout;
mod registry;

pub use layout::LayoutError;
pub use registry::{Puller, RegistryError, credential_files};

/// An image ready to run.
#[derive(Clone, Debug)]
pub struct Image {
    /// Digest of its manifest (`sha256:…`).
    pub digest: String,
    /// What to run, and how.
    pub config: Arc<ImageConfiguration>,
    /// Its files, read-only.
    pub rootfs: PathBuf,
}

/// Why an image cannot run.
#[derive(Debug, Error)]
pub enum ImageError {
    /// Nothing has this name.
    #[error("image {image} not found{hint}")]
    NotFound {
        /// The image as written.
        image: String,
        /// Where was looked, and what to do.
        hint: String,
    },
    /// A layout is broken.
    #[error("cannot read image {image}")]
    Layout {
        /// The image as written.
        image: String,
        /// Why.
        #[source]
        source: LayoutError,
    },
    /// A registry gave nothing.
    #[error("cannot pull image {image}{hint}")]
    Registry {
        /// The image as written.
        image: String,
        /// Where else was looked, and what to do.
        hint: String,
        /// Why.
        #[source]
        source: RegistryError,
    },
    /// A layer could not be unpacked.
    #[error("cannot unpack image {image}")]
    Unpack {
        /// The image as written.
        image: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// `imagePullPolicy: Never` and nothing is there.
    #[error("image {0} is not on this node, and imagePullPolicy is Never")]
    NeverPull(String),
}

impl ImageError {
    /// Kubernetes' reason for a container that waits for its image.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NeverPull(_) => "ErrImageNeverPull",
            Self::Registry { source: RegistryError::Name { .. }, .. } => "InvalidImageName",
            _ => "ErrImagePull",
        }
    }
}

/// When a registry is asked although the image is here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PullPolicy {
    /// Each time a container starts.
    Always,
    /// Only when the image is missing.
    IfNotPresent,
    /// Never.
    Never,
}

impl PullPolicy {
    /// The policy of a container: as written, else Kubernetes' default (Always for `:latest` or no tag).
    pub fn of(written: Option<&str>, image: &str) -> Self {
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

/// All images of a node.
#[derive(Debug)]
pub struct Images {
    store: PathBuf,
    folder: Option<PathBuf>,
    puller: Puller,
    unpacking: Mutex<HashMap<String, Arc<Mutex<()>>>>,
    configs: Mutex<HashMap<String, Image>>,
}

impl Images {
    /// Images kept in `store`; those of the layouts below `folder` go by their names.
    pub fn new(store: PathBuf, folder: Option<PathBuf>, puller: Puller) -> Self {
        Self { store, folder, puller, unpacking: Mutex::default(), configs: Mutex::default() }
    }

    /// Finds, pulls if need be, and unpacks an image. Blocks.
    pub fn get(&self, image: &str, policy: PullPolicy) -> Result<Image, ImageError> {
        let wrap = |source| ImageError::Layout { image: image.to_owned(), source };
        if let Some(rest) = image.strip_prefix("oci:") {
            let found = layout::Found::direct(rest).map_err(wrap)?;
            return self.ready(image, &found);
        }
        if let Some(folder) = &self.folder
            && let Some(found) = layout::Found::named(folder, image).map_err(wrap)?
        {
            return self.ready(image, &found);
        }
        let kept = self.puller.kept(&self.store, image);
        match (policy, kept) {
            (PullPolicy::IfNotPresent | PullPolicy::Never, Some(found)) => {
                self.ready(image, &found)
            }
            (PullPolicy::Never, None) => Err(ImageError::NeverPull(image.to_owned())),
            (PullPolicy::IfNotPresent | PullPolicy::Always, _) => {
                let found = self
                    .puller
                    .pull(&self.store, image)
                    .map_err(|source| self.refused(image, source))?;
                self.ready(image, &found)
            }
        }
    }

    /// A registry's refusal, as the user should read it.
    fn refused(&self, image: &str, source: RegistryError) -> ImageError {
        let (image, folder) = (image.to_owned(), self.folder.as_deref());
        match &source {
            RegistryError::NotFound { registry } => {
                let here = folder.map(|folder| format!(" nor below {}", folder.display()));
                let here = here.unwrap_or_default();
                let hint = format!(" in registry {registry}{here}: check its name and tag");
                ImageError::NotFound { image, hint }
            }
            RegistryError::Request { .. } => {
                let hint = unreachable_hint(folder);
                ImageError::Registry { image, hint, source }
            }
            RegistryError::Name { .. }
            | RegistryError::Unauthorized { .. }
            | RegistryError::Store { .. }
            | RegistryError::Network(_) => {
                ImageError::Registry { image, hint: String::new(), source }
            }
        }
    }

    /// Unpacks a found image unless that was done before.
    fn ready(&self, image: &str, found: &layout::Found) -> Result<Image, ImageError> {
        if let Some(known) = lock(&self.configs).get(&found.digest) {
            return Ok(known.clone());
        }
        let wrap = |source| ImageError::Layout { image: image.to_owned(), source };
        let manifest = found.manifest().map_err(wrap)?;
        let config = found.config(&manifest).map_err(wrap)?;
        let rootfs = self.store.join("rootfs").join(found.digest.replace(':', "-"));
        let gate = Arc::clone(lock(&self.unpacking).entry(found.digest.clone()).or_default());
        let alone = lock(&gate);
        if !rootfs.exists() {
            let unpacked = self.unpack(found, &manifest, &rootfs);
            unpacked.map_err(|source| ImageError::Unpack { image: image.to_owned(), source })?;
            info!(image, digest = found.digest, "image unpacked");
        }
        drop(alone);
        let ready = Image { digest: found.digest.clone(), config: Arc::new(config), rootfs };
        lock(&self.configs).insert(found.digest.clone(), ready.clone());
        Ok(ready)
    }

    fn unpack(
        &self,
        found: &layout::Found,
        manifest: &oci_spec::image::ImageManifest,
        rootfs: &Path,
    ) -> io::Result<()> {
        let half = rootfs.with_extension(format!("half-{}", std::process::id()));
        let _ = fs::remove_dir_all(&half);
        fs::create_dir_all(&half)?;
        for layer in manifest.layers() {
            let digest = layer.digest().to_string();
            layers::unpack(File::open(found.blob(&digest))?, &digest, &half)?;
        }
        // Only a complete image ever has its final name.
        fs::rename(&half, rootfs)
    }
}

/// A digest as text.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// These locks only guard maps and a file's making; a panic elsewhere leaves them whole.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// What to do when a registry cannot be asked: often the image was meant to lie in the folder.
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
    fn an_unreachable_registry_is_told_with_the_folder_that_was_looked_through() {
        let hint = unreachable_hint(Some(Path::new("/images")));
        assert_eq!(hint, " (it is not below /images either; check its name and tag)");
        assert!(unreachable_hint(None).contains("--images"));
    }

    #[test]
    fn an_image_without_a_tag_is_asked_for_each_time() {
        for (written, image, policy) in [
            (None, "reg:5000/a", PullPolicy::Always),
            (None, "reg:5000/a:latest", PullPolicy::Always),
            (None, "reg:5000/a:v1", PullPolicy::IfNotPresent),
            (None, "a@sha256:00", PullPolicy::IfNotPresent),
            (Some("Never"), "a", PullPolicy::Never),
            (Some("IfNotPresent"), "a", PullPolicy::IfNotPresent),
        ] {
            assert_eq!(PullPolicy::of(written, image), policy, "{written:?} {image}");
        }
    }
}
