//! Shell: writes one program as an OCI image layout; the same program gives the same bytes.

use std::{
    fs,
    io::{self, Write as _},
    path::Path,
    str::FromStr as _,
};

use anyhow::{Context as _, Result};
use flate2::{Compression, GzBuilder};
use oci_spec::image::{
    Arch, ConfigBuilder, Descriptor, ImageConfigurationBuilder, ImageIndexBuilder,
    ImageManifestBuilder, MediaType, OciLayoutBuilder, Os, RootFsBuilder, SCHEMA_VERSION,
    Sha256Digest,
};
use sha2::{Digest as _, Sha256};

/// User the program runs as: nobody's, by the number distroless images made customary.
const USER: &str = "65532";

/// One static program that becomes an image.
#[derive(Debug)]
pub(crate) struct Image<'a> {
    /// Full name with tag, as manifests write it.
    pub(crate) name: &'a str,
    /// Name of the program in the image's root folder.
    pub(crate) program: &'a str,
    /// The program itself.
    pub(crate) bytes: &'a [u8],
}

/// Writes `image` to `folder` in place of what was there; returns the manifest's digest.
pub(crate) fn write(image: &Image<'_>, folder: &Path) -> Result<String> {
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    fs::create_dir_all(folder.join("blobs/sha256"))?;
    let tar = layer(image)?;
    let diff_id = format!("sha256:{}", sha256(&tar));
    // Level 9 with no name and no time: gzip's header would make each build differ.
    let mut zip = GzBuilder::new().mtime(0).write(Vec::new(), Compression::best());
    zip.write_all(&tar)?;
    let layer = blob(folder, MediaType::ImageLayerGzip, &zip.finish()?)?;

    let arch = platform();
    let config = ConfigBuilder::default()
        .user(USER)
        .env(vec!["PATH=/".to_owned()])
        .working_dir("/")
        .entrypoint(vec![format!("/{}", image.program)])
        .build()?;
    let root = RootFsBuilder::default().typ("layers").diff_ids(vec![diff_id]).build()?;
    let configuration = ImageConfigurationBuilder::default()
        .architecture(arch)
        .os(Os::Linux)
        .config(config)
        .rootfs(root)
        .history(Vec::new())
        .build()?;
    let config = blob(folder, MediaType::ImageConfig, configuration.to_string()?.as_bytes())?;
    let manifest = ImageManifestBuilder::default()
        .schema_version(SCHEMA_VERSION)
        .media_type(MediaType::ImageManifest)
        .config(config)
        .layers(vec![layer])
        .build()?;
    let mut manifest = blob(folder, MediaType::ImageManifest, manifest.to_string()?.as_bytes())?;
    let digest = manifest.digest().to_string();
    // One annotation only: their map has no order, and the same image must give the same file.
    let name = ("org.opencontainers.image.ref.name".to_owned(), image.name.to_owned());
    manifest.set_annotations(Some([name].into()));
    ImageIndexBuilder::default()
        .schema_version(SCHEMA_VERSION)
        .media_type(MediaType::ImageIndex)
        .manifests(vec![manifest])
        .build()?
        .to_file(folder.join("index.json"))?;
    // Last: a folder without this file is no layout yet.
    OciLayoutBuilder::default()
        .image_layout_version("1.0.0")
        .build()?
        .to_file(folder.join("oci-layout"))?;
    Ok(digest)
}

/// The only layer: the program, `/tmp`, and the names of the users.
fn layer(image: &Image<'_>) -> io::Result<Vec<u8>> {
    let passwd = "root:x:0:0:root:/:/\nnonroot:x:65532:65532:nonroot:/:/\n";
    let group = "root:x:0:\nnonroot:x:65532:\n";
    let mut tar = tar::Builder::new(Vec::new());
    folder(&mut tar, "etc/", 0o755)?;
    file(&mut tar, "etc/group", 0o644, group.as_bytes())?;
    file(&mut tar, "etc/passwd", 0o644, passwd.as_bytes())?;
    file(&mut tar, image.program, 0o755, image.bytes)?;
    folder(&mut tar, "tmp/", 0o1777)?;
    tar.into_inner()
}

fn folder(tar: &mut tar::Builder<Vec<u8>>, path: &str, mode: u32) -> io::Result<()> {
    let mut header = header(mode, 0);
    header.set_entry_type(tar::EntryType::Directory);
    tar.append_data(&mut header, path, io::empty())
}

fn file(tar: &mut tar::Builder<Vec<u8>>, path: &str, mode: u32, bytes: &[u8]) -> io::Result<()> {
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

fn blob(folder: &Path, media_type: MediaType, bytes: &[u8]) -> Result<Descriptor> {
    let digest = sha256(bytes);
    fs::write(folder.join("blobs/sha256").join(&digest), bytes)?;
    let digest = Sha256Digest::from_str(&digest).context("a SHA-256 digest is well formed")?;
    Ok(Descriptor::new(media_type, bytes.len() as u64, digest))
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// This machine's architecture in the image specification's words (Go's).
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
        let image = Image { name: "dev.local/x:v1", program: "x", bytes: b"program" };
        let digest = write(&image, folder).unwrap();
        let index = fs::read_to_string(folder.join("index.json")).unwrap();
        (digest, index)
    }

    #[test]
    fn the_same_program_gives_the_same_image() {
        let base = std::env::temp_dir().join(format!("rouse-layout-{}", std::process::id()));
        let (first, index) = written(&base.join("a"));
        let (second, again) = written(&base.join("b"));
        fs::remove_dir_all(&base).unwrap();
        assert_eq!((first, &index), (second, &again));
        assert!(index.contains(r#""org.opencontainers.image.ref.name":"dev.local/x:v1""#));
    }
}
