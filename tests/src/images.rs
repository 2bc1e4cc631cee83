//! Images that local nodes of tests run, as OCI layouts in a temporary directory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::leftovers::FOLDER_PREFIX;

/// Directory of the test images, removed with its last user.
#[derive(Debug)]
pub struct TestImages {
    folder: PathBuf,
}

impl std::ops::Deref for TestImages {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.folder
    }
}

impl Drop for TestImages {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Returns the directory of the test images, with `dev.local/app:v1`, a static program.
pub fn test_images() -> Arc<TestImages> {
    static SHARED_IMAGES: Mutex<Weak<TestImages>> = Mutex::new(Weak::new());
    let mut weak_images = SHARED_IMAGES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(images) = weak_images.upgrade() {
        return images;
    }
    let images = Arc::new(TestImages { folder: scratch_directory("images") });
    write_layout(&images.join("dev.local/app"), "v1", &[base_layer()]);
    *weak_images = Arc::downgrade(&images);
    images
}

/// Creates a new temporary directory of this process.
pub fn scratch_directory(name: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    let own_name = format!("{FOLDER_PREFIX}{name}-{}-{next}", std::process::id());
    let folder = std::env::temp_dir().join(own_name);
    fs::create_dir_all(&folder).expect("a folder");
    folder
}

/// Executable that test containers run, compiled once.
pub fn test_program() -> &'static [u8] {
    static PROGRAM: OnceLock<Vec<u8>> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let folder = scratch_directory("app");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/app.c");
        let program = folder.join("app");
        let mut command = Command::new("cc");
        let status =
            command.args(["-static", "-O1", "-w", "-o"]).arg(&program).arg(source).status();
        assert!(status.expect("a C compiler: apt-get install gcc").success());
        let bytes = fs::read(program).expect("a program");
        fs::remove_dir_all(folder).expect("our own folder");
        bytes
    })
}

/// One entry of a layer.
#[derive(Clone, Copy, Debug)]
pub enum LayerEntry<'a> {
    /// A file with this content; a whiteout is an empty file.
    File(&'a str, &'a [u8]),
    /// A directory at this path.
    Folder(&'a str),
    /// A symbolic link, and its target.
    Link(&'a str, &'a str),
    /// A hard link, and the path of an earlier file.
    HardLink(&'a str, &'a str),
    /// A named pipe at this path.
    Pipe(&'a str),
}

/// Builds a layer as a tar archive.
pub fn layer(entries: &[LayerEntry<'_>]) -> Vec<u8> {
    let mut layer = tar::Builder::new(Vec::new());
    for entry in entries {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o755);
        header.set_uid(0);
        header.set_gid(0);
        let result = match entry {
            LayerEntry::File(path, bytes) => {
                header.set_size(bytes.len() as u64);
                layer.append_data(&mut header, path, *bytes)
            }
            LayerEntry::Folder(path) => {
                header.set_entry_type(tar::EntryType::Directory);
                header.set_size(0);
                layer.append_data(&mut header, path, std::io::empty())
            }
            LayerEntry::Link(path, to) => {
                header.set_entry_type(tar::EntryType::Symlink);
                header.set_size(0);
                layer.append_link(&mut header, path, to)
            }
            LayerEntry::HardLink(path, to) => {
                header.set_entry_type(tar::EntryType::Link);
                header.set_size(0);
                layer.append_link(&mut header, path, to)
            }
            LayerEntry::Pipe(path) => {
                header.set_entry_type(tar::EntryType::Fifo);
                header.set_size(0);
                layer.append_data(&mut header, path, std::io::empty())
            }
        };
        result.expect("a layer");
    }
    layer.into_inner().expect("a layer")
}

/// Layer with the program `/app` and the file of users.
pub fn base_layer() -> Vec<u8> {
    layer(&[
        LayerEntry::File("app", test_program()),
        LayerEntry::File("etc/passwd", b"root:x:0:0::/:\nweb:x:7:8::/:\n"),
    ])
}

/// Writes an OCI layout of one image that runs `/app`.
pub fn write_layout(folder: &Path, tag: &str, layers: &[Vec<u8>]) {
    let blobs = folder.join("blobs/sha256");
    fs::create_dir_all(&blobs).expect("a folder");
    let put = |bytes: &[u8], kind: &str| {
        let hash =
            Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        fs::write(blobs.join(&hash), bytes).expect("a blob");
        json!({ "mediaType": kind, "digest": format!("sha256:{hash}"), "size": bytes.len() })
    };
    let describe_layer = |bytes: &Vec<u8>| put(bytes, "application/vnd.oci.image.layer.v1.tar");
    let layers: Vec<Value> = layers.iter().map(describe_layer).collect();
    let digests: Vec<&Value> = layers.iter().map(|layer| &layer["digest"]).collect();
    let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let config = json!({
        "architecture": architecture, "os": "linux",
        "config": { "Entrypoint": ["/app"], "Env": ["FROM_IMAGE=yes"] },
        "rootfs": { "type": "layers", "diff_ids": digests },
    });
    let config = put(config.to_string().as_bytes(), "application/vnd.oci.image.config.v1+json");
    let manifest = json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": config, "layers": layers,
    });
    let mut entry =
        put(manifest.to_string().as_bytes(), "application/vnd.oci.image.manifest.v1+json");
    entry["annotations"] = json!({ "org.opencontainers.image.ref.name": tag });
    let index = json!({ "schemaVersion": 2, "manifests": [entry] });
    fs::write(folder.join("index.json"), index.to_string()).expect("an index");
    fs::write(folder.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).expect("a layout");
}
