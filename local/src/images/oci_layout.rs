//! Shell: OCI image layouts: folders with `index.json` and `blobs/`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use oci_spec::image::{Descriptor, ImageConfiguration, ImageIndex, ImageManifest, Os};
use serde::de::DeserializeOwned;
use sha2::{Digest as _, Sha256};
use thiserror::Error;

/// Annotation that names an image within a layout.
const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// containerd's annotation with an image's whole name.
const FULL_NAME: &str = "io.containerd.image.name";
/// Depth of the search for layouts below the images folder: `registry/path/name:tag`.
const MAX_DEPTH: usize = 4;

/// Problem of an OCI image layout.
#[derive(Debug, Error)]
pub enum ImageLayoutError {
    /// A file is missing or cannot be read.
    #[error("cannot read {path}: is it an OCI image layout?")]
    Read {
        /// File that cannot be read.
        path: PathBuf,
        /// Error of the read.
        #[source]
        source: io::Error,
    },
    /// A file is not the JSON document that its place requires.
    #[error("cannot understand {path}")]
    Parse {
        /// File that does not parse.
        path: PathBuf,
        /// Error of the JSON parser.
        #[source]
        source: serde_json::Error,
    },
    /// A blob's content does not have the digest in its name.
    #[error("{path} is damaged: its digest is sha256:{have}; make the layout again")]
    Digest {
        /// File with the wrong content.
        path: PathBuf,
        /// Digest of its content, in hexadecimal digits.
        have: String,
    },
    /// No image has the tag, or several images match and no tag was given.
    #[error("layout {path} has {have}; name one of them as oci:{path}:TAG")]
    Tag {
        /// Folder of the layout.
        path: PathBuf,
        /// Number and tags of its images.
        have: String,
    },
    /// An index has no image for this machine.
    #[error("no image for linux/{arch} in {path}")]
    Platform {
        /// Folder of the layout.
        path: PathBuf,
        /// Architecture of this machine, as OCI names it.
        arch: &'static str,
    },
}

/// One image in a layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LayoutImage {
    /// Folder of the layout.
    pub(super) layout: PathBuf,
    /// Digest of the manifest, `sha256:…`.
    pub(super) digest: String,
}

impl LayoutImage {
    /// Finds the image of `PATH` or `PATH:TAG`.
    pub(super) fn from_path(text: &str) -> Result<Self, ImageLayoutError> {
        // A folder name may hold a colon itself, so the whole text is tried first.
        let whole = Path::new(text);
        if whole.join("index.json").exists() {
            return Self::pick_by_tag(whole, None);
        }
        match text.rsplit_once(':') {
            Some((path, tag)) if !tag.contains('/') => {
                Self::pick_by_tag(Path::new(path), Some(tag))
            }
            _ => Self::pick_by_tag(whole, None),
        }
    }

    /// Finds the image called `name` in the first layout below `folder` that has it, in the order of their paths. A
    /// damaged layout is an error only if no other one has the image.
    pub(super) fn find_by_name(
        folder: &Path,
        name: &str,
    ) -> Result<Option<Self>, ImageLayoutError> {
        let wanted = with_tag(name);
        let mut layouts = Vec::new();
        collect_layouts(folder, MAX_DEPTH, &mut layouts);
        // The order of a folder's entries is the file system's, and two layouts may have images of one name.
        layouts.sort();
        let mut damaged = None;
        for layout in layouts {
            let index: ImageIndex = match read_json(&layout.join("index.json")) {
                Ok(index) => index,
                Err(error) => {
                    // Another process may be writing this layout.
                    damaged = damaged.or(Some(error));
                    continue;
                }
            };
            let layout_name =
                layout.strip_prefix(folder).unwrap_or(&layout).to_string_lossy().into_owned();
            for entry in index.manifests() {
                let digest = entry.digest().to_string();
                let names = entry_names(entry, &layout_name);
                if names
                    .iter()
                    .any(|one| with_tag(one) == wanted || format!("{one}@{digest}") == name)
                {
                    return Self::from_descriptor(&layout, entry).map(Some);
                }
            }
        }
        damaged.map_or(Ok(None), Err)
    }

    /// Picks the only image of a layout, or the only one with this tag.
    fn pick_by_tag(layout: &Path, tag: Option<&str>) -> Result<Self, ImageLayoutError> {
        let index: ImageIndex = read_json(&layout.join("index.json"))?;
        let fits =
            |entry: &&Descriptor| tag.is_none_or(|tag| annotation(entry, REF_NAME) == Some(tag));
        let fitting: Vec<_> = index.manifests().iter().filter(fits).collect();
        if let [entry] = fitting[..] {
            return Self::from_descriptor(layout, entry);
        }
        let names: Vec<_> =
            index.manifests().iter().filter_map(|entry| annotation(entry, REF_NAME)).collect();
        let have = format!("{} images ({})", index.manifests().len(), names.join(", "));
        Err(ImageLayoutError::Tag { path: layout.to_owned(), have })
    }

    /// Returns the image of an entry; for an index within the index, the image for this machine.
    fn from_descriptor(layout: &Path, entry: &Descriptor) -> Result<Self, ImageLayoutError> {
        let digest = entry.digest().to_string();
        let found = Self { layout: layout.to_owned(), digest };
        if !entry.media_type().to_string().contains("index")
            && !entry.media_type().to_string().contains("manifest.list")
        {
            return Ok(found);
        }
        let arch = architecture();
        let index: ImageIndex = found.read_blob(&found.digest)?;
        // An entry without a platform fits, since tools for one platform write none.
        let fits = |one: &&Descriptor| {
            one.platform().as_ref().is_none_or(|platform| {
                *platform.os() == Os::Linux && platform.architecture().to_string() == arch
            })
        };
        let missing = || ImageLayoutError::Platform { path: layout.to_owned(), arch };
        let inner = index.manifests().iter().find(fits).ok_or_else(missing)?;
        Ok(Self { digest: inner.digest().to_string(), ..found })
    }

    /// Returns the path of a blob.
    pub(super) fn blob_path(&self, digest: &str) -> PathBuf {
        self.layout.join("blobs").join(digest.replacen(':', "/", 1))
    }

    pub(super) fn manifest(&self) -> Result<ImageManifest, ImageLayoutError> {
        self.read_blob(&self.digest)
    }

    pub(super) fn config(
        &self,
        manifest: &ImageManifest,
    ) -> Result<ImageConfiguration, ImageLayoutError> {
        self.read_blob(manifest.config().digest().as_ref())
    }

    /// Returns true if the manifest is there and intact, and the other blobs have the sizes that it names.
    pub(super) fn is_complete(&self) -> bool {
        let Ok(manifest) = self.manifest() else { return false };
        let mut blobs = std::iter::once(manifest.config()).chain(manifest.layers());
        blobs.all(|blob| {
            let path = self.blob_path(blob.digest().as_ref());
            fs::metadata(path).is_ok_and(|file| file.len() == blob.size())
        })
    }

    /// Reads a blob as JSON and checks its digest.
    fn read_blob<T: DeserializeOwned>(&self, digest: &str) -> Result<T, ImageLayoutError> {
        let path = self.blob_path(digest);
        let bytes = read_bytes(&path)?;
        let have = super::to_hex(&Sha256::digest(&bytes));
        if digest.strip_prefix("sha256:").is_some_and(|want| want != have) {
            return Err(ImageLayoutError::Digest { path, have });
        }
        parse_json(&path, &bytes)
    }
}

/// Returns this machine's architecture as OCI names it (Go's `GOARCH`).
pub(super) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, ImageLayoutError> {
    parse_json(path, &read_bytes(path)?)
}

fn read_bytes(path: &Path) -> Result<Vec<u8>, ImageLayoutError> {
    fs::read(path).map_err(|source| ImageLayoutError::Read { path: path.to_owned(), source })
}

fn parse_json<T: DeserializeOwned>(path: &Path, bytes: &[u8]) -> Result<T, ImageLayoutError> {
    let wrong = |source| ImageLayoutError::Parse { path: path.to_owned(), source };
    serde_json::from_slice(bytes).map_err(wrong)
}

/// Returns an annotation of an index entry.
fn annotation<'a>(entry: &'a Descriptor, key: &str) -> Option<&'a str> {
    entry.annotations().as_ref()?.get(key).map(String::as_str)
}

/// Returns every name by which an entry of a layout may be called. `layout_name` is the layout's path below the images
/// folder.
fn entry_names(entry: &Descriptor, layout_name: &str) -> Vec<String> {
    let mut names = vec![layout_name.to_owned()];
    names.extend(annotation(entry, FULL_NAME).map(str::to_owned));
    if let Some(name) = annotation(entry, REF_NAME) {
        names.push(name.to_owned());
        names.push(format!("{layout_name}:{name}"));
    }
    names
}

/// Returns a name with its tag spelled out: `:latest` where none is written.
fn with_tag(name: &str) -> String {
    let last = name.rsplit('/').next().unwrap_or(name);
    let tagged = last.contains(':') || last.contains('@');
    if tagged { name.to_owned() } else { format!("{name}:latest") }
}

/// Collects the layouts at and below `folder`, in no order.
fn collect_layouts(folder: &Path, depth: usize, layouts: &mut Vec<PathBuf>) {
    if folder.join("index.json").exists() {
        layouts.push(folder.to_owned());
        return;
    }
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        if depth > 0 && entry.path().is_dir() {
            collect_layouts(&entry.path(), depth - 1, layouts);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_first_path_wins_and_a_damaged_layout_hides_no_other() {
        let folder = std::env::temp_dir().join(format!("rouse-oci-names-{}", std::process::id()));
        let write_index = |layout: &str, text: &str| {
            fs::create_dir_all(folder.join(layout)).unwrap();
            fs::write(folder.join(layout).join("index.json"), text).unwrap();
        };
        // Created in another order than that of the paths, so that no file system lists the first path first by chance.
        for digit in ["7", "1", "9", "0", "4", "2"] {
            let digest = format!("sha256:{}", digit.repeat(64));
            let index = json!({ "schemaVersion": 2, "manifests": [{
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "digest": digest, "size": 2, "annotations": { REF_NAME: "h.io/a:v1" },
            }]});
            write_index(&format!("layout-{digit}"), &index.to_string());
        }
        let find = |name| LayoutImage::find_by_name(&folder, name);
        let layout_of = |name| find(name).unwrap().map(|found| found.layout);
        assert_eq!(layout_of("h.io/a:v1"), Some(folder.join("layout-0")));
        write_index("damaged", "{");
        assert_eq!(layout_of("h.io/a:v1"), Some(folder.join("layout-0")));
        let error = find("h.io/b:v1").unwrap_err().to_string();
        assert!(error.contains("damaged/index.json"), "{error}");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn an_image_for_another_operating_system_is_not_picked() {
        let layout = std::env::temp_dir().join(format!("rouse-oci-layout-{}", std::process::id()));
        let blobs = layout.join("blobs/sha256");
        fs::create_dir_all(&blobs).unwrap();
        let [windows, linux] = ["a", "b"].map(|digit| format!("sha256:{}", digit.repeat(64)));
        let entry = |os: &str, digest: &str| {
            json!({
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "digest": digest, "size": 2,
                "platform": {"os": os, "architecture": architecture()},
            })
        };
        let inner = json!({
            "schemaVersion": 2, "manifests": [entry("windows", &windows), entry("linux", &linux)],
        });
        let bytes = inner.to_string().into_bytes();
        let digest = crate::images::to_hex(&Sha256::digest(&bytes));
        fs::write(blobs.join(&digest), &bytes).unwrap();
        let outer = json!({"schemaVersion": 2, "manifests": [{
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "digest": format!("sha256:{digest}"), "size": bytes.len(),
        }]});
        fs::write(layout.join("index.json"), outer.to_string()).unwrap();
        let found = LayoutImage::from_path(layout.to_str().unwrap()).unwrap();
        assert_eq!(found, LayoutImage { layout: layout.clone(), digest: linux });
        fs::remove_dir_all(&layout).unwrap();
    }
}
