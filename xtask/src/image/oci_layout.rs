//! Shell: one program as an OCI image layout; the same program gives the same bytes.

use std::{
    fs,
    io::{self, Write as _},
    path::Path,
    str::FromStr as _,
};

use anyhow::{Context as _, Result};
use flate2::{Compression, GzBuilder};
use oci_spec::image::{
    Arch, ConfigBuilder, Descriptor, ImageConfigurationBuilder, ImageIndex, ImageIndexBuilder,
    ImageManifest, ImageManifestBuilder, MediaType, OciLayoutBuilder, Os, RootFsBuilder,
    SCHEMA_VERSION, Sha256Digest,
};
use sha2::{Digest as _, Sha256};

/// Key of the annotation with an image's name.
const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// User id of the program: the unprivileged user that distroless images have made customary.
const USER: &str = "65532";

/// One program that becomes an image.
#[derive(Debug)]
pub(crate) struct ProgramImage<'a> {
    /// Full name with tag, as manifests write it.
    pub(crate) name: &'a str,
    /// File name of the program in the image's root directory.
    pub(crate) program: &'a str,
    /// Content of the executable file.
    pub(crate) bytes: &'a [u8],
    /// Shared libraries of a program that is not static: path in the image without the leading slash, and content.
    pub(crate) libraries: &'a [(String, Vec<u8>)],
}

/// Writes `image` to `folder` in place of the previous content. Returns the manifest's digest.
///
/// A directory that already holds the image is not touched: compression takes long, and other processes may read
/// there.
pub(crate) fn write(image: &ProgramImage<'_>, folder: &Path) -> Result<String> {
    let tar = layer(image)?;
    let configuration = configuration(image, &tar)?;
    if let Some(digest) = existing_digest(image, &configuration, folder) {
        return Ok(digest);
    }
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    fs::create_dir_all(folder.join("blobs/sha256"))?;
    // Neither name nor time: in gzip's header they would make each build differ.
    // Only images that are shipped are worth the time that small ones take.
    let compression =
        if image.libraries.is_empty() { Compression::best() } else { Compression::fast() };
    let mut zip = GzBuilder::new().mtime(0).write(Vec::new(), compression);
    zip.write_all(&tar)?;
    let layer = write_blob(folder, MediaType::ImageLayerGzip, &zip.finish()?)?;
    let config = write_blob(folder, MediaType::ImageConfig, configuration.as_bytes())?;
    let manifest = ImageManifestBuilder::default()
        .schema_version(SCHEMA_VERSION)
        .media_type(MediaType::ImageManifest)
        .config(config)
        .layers(vec![layer])
        .build()?;
    let mut manifest =
        write_blob(folder, MediaType::ImageManifest, manifest.to_string()?.as_bytes())?;
    let digest = manifest.digest().to_string();
    // One annotation only: the map has no order, and the same image must give the same file.
    manifest.set_annotations(Some([(REF_NAME.to_owned(), image.name.to_owned())].into()));
    ImageIndexBuilder::default()
        .schema_version(SCHEMA_VERSION)
        .media_type(MediaType::ImageIndex)
        .manifests(vec![manifest])
        .build()?
        .to_file(folder.join("index.json"))?;
    // Written last: a directory without this file is no complete layout.
    OciLayoutBuilder::default()
        .image_layout_version("1.0.0")
        .build()?
        .to_file(folder.join("oci-layout"))?;
    Ok(digest)
}

/// Configuration of the image: entrypoint, user, and digest of the layer.
fn configuration(image: &ProgramImage<'_>, tar: &[u8]) -> Result<String> {
    let config = ConfigBuilder::default()
        .user(USER)
        .env(vec!["PATH=/".to_owned()])
        .working_dir("/")
        .entrypoint(vec![format!("/{}", image.program)])
        .build()?;
    // The digest of the uncompressed layer, as the image specification requires.
    let diff_id = format!("sha256:{}", sha256(tar));
    let root = RootFsBuilder::default().typ("layers").diff_ids(vec![diff_id]).build()?;
    let configuration = ImageConfigurationBuilder::default()
        .architecture(platform())
        .os(Os::Linux)
        .config(config)
        .rootfs(root)
        .history(Vec::new())
        .build()?;
    Ok(configuration.to_string()?)
}

/// Digest of the manifest, if `folder` already holds the whole image.
fn existing_digest(image: &ProgramImage<'_>, configuration: &str, folder: &Path) -> Option<String> {
    let index = ImageIndex::from_file(folder.join("index.json")).ok()?;
    let listed = index.manifests().first()?;
    let has_name = listed.annotations().as_ref()?.get(REF_NAME)? == image.name;
    let blob_path = |it: &Descriptor| folder.join("blobs/sha256").join(it.digest().digest());
    // Sizes instead of digests of the layers: hashing them would take as long as writing.
    let manifest = ImageManifest::from_file(blob_path(listed)).ok()?;
    let has_layer = manifest
        .layers()
        .iter()
        .all(|it| fs::metadata(blob_path(it)).is_ok_and(|metadata| metadata.len() == it.size()));
    let is_same =
        fs::read_to_string(blob_path(manifest.config())).is_ok_and(|it| it == configuration);
    // This file is written last, so it proves that all others are complete.
    let is_whole = folder.join("oci-layout").exists();
    (has_name && has_layer && is_same && is_whole).then(|| listed.digest().to_string())
}

/// Content of the only layer: the program with its libraries, `/tmp`, and the users' names.
fn layer(image: &ProgramImage<'_>) -> io::Result<Vec<u8>> {
    let passwd = "root:x:0:0:root:/:/\nnonroot:x:65532:65532:nonroot:/:/\n";
    let group = "root:x:0:\nnonroot:x:65532:\n";
    let mut tar = tar::Builder::new(Vec::new());
    append_directory(&mut tar, "etc/", 0o755)?;
    append_file(&mut tar, "etc/group", 0o644, group.as_bytes())?;
    append_file(&mut tar, "etc/passwd", 0o644, passwd.as_bytes())?;
    append_file(&mut tar, image.program, 0o755, image.bytes)?;
    for (path, bytes) in image.libraries {
        // Runtimes create missing folders when they unpack the layer.
        append_file(&mut tar, path, 0o755, bytes)?;
    }
    append_directory(&mut tar, "tmp/", 0o1777)?;
    tar.into_inner()
}

fn append_directory(tar: &mut tar::Builder<Vec<u8>>, path: &str, mode: u32) -> io::Result<()> {
    let mut header = header(mode, 0);
    header.set_entry_type(tar::EntryType::Directory);
    tar.append_data(&mut header, path, io::empty())
}

fn append_file(
    tar: &mut tar::Builder<Vec<u8>>,
    path: &str,
    mode: u32,
    bytes: &[u8],
) -> io::Result<()> {
    tar.append_data(&mut header(mode, bytes.len() as u64), path, bytes)
}

fn header(mode: u32, size: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_mode(mode);
    header.set_size(size);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header
}

fn write_blob(folder: &Path, media_type: MediaType, bytes: &[u8]) -> Result<Descriptor> {
    let digest = sha256(bytes);
    fs::write(folder.join("blobs/sha256").join(&digest), bytes)?;
    let digest = Sha256Digest::from_str(&digest).context("a SHA-256 digest is well formed")?;
    Ok(Descriptor::new(media_type, bytes.len() as u64, digest))
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Architecture of this machine, by the name in the image specification (Go's).
fn platform() -> Arch {
    match std::env::consts::ARCH {
        "x86_64" => Arch::Amd64,
        "aarch64" => Arch::ARM64,
        other => Arch::Other(other.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(folder: &Path) -> (String, String) {
        written_of(b"program", folder)
    }

    fn written_of(bytes: &[u8], folder: &Path) -> (String, String) {
        let image = ProgramImage { name: "dev.local/x:v1", program: "x", bytes, libraries: &[] };
        let digest = write(&image, folder).unwrap();
        let index = fs::read_to_string(folder.join("index.json")).unwrap();
        (digest, index)
    }

    #[test]
    fn the_same_program_gives_the_same_image() {
        let base = std::env::temp_dir().join(format!("rouse-layout-{}", std::process::id()));
        let (first, index) = written(&base.join("a"));
        let (second, repeated) = written(&base.join("b"));
        fs::remove_dir_all(&base).unwrap();
        assert_eq!((first, &index), (second, &repeated));
        assert!(index.contains(r#""org.opencontainers.image.ref.name":"dev.local/x:v1""#));
    }

    #[test]
    fn a_complete_image_is_kept_and_another_or_incomplete_one_is_replaced() {
        let folder = std::env::temp_dir().join(format!("rouse-layouts-{}", std::process::id()));
        let (first, _) = written(&folder);
        let marker = folder.join("mark");
        fs::write(&marker, "").unwrap();
        assert_eq!(written(&folder).0, first);
        assert!(marker.exists(), "nothing is written");
        assert_ne!(written_of(b"another", &folder).0, first);
        assert_eq!(written(&folder).0, first);
        for missing in ["oci-layout", "blobs"] {
            let at = folder.join(missing);
            if at.is_dir() {
                fs::remove_dir_all(&at).unwrap()
            } else {
                fs::remove_file(&at).unwrap()
            }
            assert_eq!(written(&folder).0, first, "without {missing}");
            assert!(at.exists());
        }
        fs::remove_dir_all(&folder).unwrap();
    }
}
