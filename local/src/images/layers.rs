//! Shell: unpacks image layers onto one another, whiteouts included.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, BufReader, Read};
use std::path::{Component, Path, PathBuf};
use std::thread;

use nix::sched::{CloneFlags, unshare};
use sha2::{Digest as _, Sha256};
use tar::{Archive, Entry, EntryType};

/// Prefix of a whiteout: the file with the rest of the name is removed (OCI image spec, `layer.md`).
const WHITEOUT_PREFIX: &str = ".wh.";
/// Opaque whiteout: removes everything that lower layers put into its folder.
const OPAQUE_WHITEOUT: &str = ".wh..wh..opq";

/// Unpacks one layer over the content of `root` and checks the layer's digest.
///
/// It runs on a thread whose root directory is `root`, so that no path or link of the archive reaches outside.
pub(super) fn unpack_layer(layer: File, digest: &str, root: &Path) -> io::Result<()> {
    let work = || -> io::Result<()> {
        // Root directories belong to the process unless unshared: chroot must change this thread only.
        unshare(CloneFlags::CLONE_FS)?;
        nix::unistd::chroot(root)?;
        nix::unistd::chdir("/")?;
        let mut hashed = HashingReader { inner: layer, hash: Sha256::new() };
        apply_entries(decompress(&mut hashed)?)?;
        // The digest covers also the bytes that follow the end of the archive.
        io::copy(&mut hashed, &mut io::sink())?;
        let bytes = hashed.hash.finalize();
        let have = super::to_hex(&bytes);
        if digest.strip_prefix("sha256:").is_some_and(|want| want != have) {
            return Err(io::Error::other(format!(
                "layer {digest} is damaged: its digest is {have}"
            )));
        }
        Ok(())
    };
    let died = |_| Err(io::Error::other("unpacking panicked"));
    thread::scope(|scope| scope.spawn(work).join()).unwrap_or_else(died)
}

/// Reader that hashes the compressed bytes of a layer as they are read.
struct HashingReader {
    inner: File,
    hash: Sha256,
}

impl Read for HashingReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.inner.read(buffer)?;
        self.hash.update(&buffer[..length]);
        Ok(length)
    }
}

/// Detects the compression by its first bytes, since media types are not always right.
fn decompress<'a>(layer: &'a mut HashingReader) -> io::Result<Box<dyn Read + 'a>> {
    let mut reader = BufReader::with_capacity(1 << 16, layer);
    let head = io::BufRead::fill_buf(&mut reader)?;
    if head.starts_with(&[0x1f, 0x8b]) {
        return Ok(Box::new(flate2::bufread::MultiGzDecoder::new(reader)));
    }
    if head.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        return Ok(Box::new(zstd::stream::read::Decoder::with_buffer(reader)?));
    }
    Ok(Box::new(reader))
}

/// Applies the entries of an archive, in order, to the root directory.
fn apply_entries(layer: impl Read) -> io::Result<()> {
    let mut archive = Archive::new(layer);
    archive.set_preserve_permissions(true);
    archive.set_preserve_ownerships(true);
    archive.set_unpack_xattrs(true);
    archive.set_overwrite(true);
    // An opaque whiteout may come after files of its own layer in the same folder; those stay.
    let mut added = HashSet::new();
    for entry in archive.entries()? {
        let mut entry = entry?;
        let Some(path) = path_in_root(&entry.path()?) else { continue };
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name == OPAQUE_WHITEOUT {
            clear_lower_entries(path.parent().unwrap_or_else(|| Path::new("/")), &added)?;
        } else if let Some(gone) = name.strip_prefix(WHITEOUT_PREFIX) {
            remove_path(&path.with_file_name(gone))?;
        } else {
            write_entry(&mut entry, &path)?;
            added.insert(path);
        }
    }
    Ok(())
}

/// Returns the path as seen from the root; `None` for the root itself and for paths with `..`.
fn path_in_root(path: &Path) -> Option<PathBuf> {
    let mut clean = PathBuf::from("/");
    for part in path.components() {
        match part {
            Component::Normal(name) => clean.push(name),
            Component::ParentDir => return None,
            Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
        }
    }
    (clean != Path::new("/")).then_some(clean)
}

/// Writes one entry of an archive.
fn write_entry(entry: &mut Entry<'_, impl Read>, path: &Path) -> io::Result<()> {
    let kind = entry.header().entry_type();
    // Device nodes are useless in a container, whose /dev is the runtime's. A global header is no file.
    if matches!(kind, EntryType::Char | EntryType::Block | EntryType::XGlobalHeader) {
        return Ok(());
    }
    // An entry takes the place of what is there; only a folder that stays one keeps its content. tar itself replaces no
    // folder, and nothing by a hard link.
    if let Ok(there) = fs::symlink_metadata(path)
        && (!there.is_dir() || kind != EntryType::Directory)
    {
        remove_path(path)?;
    }
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    if kind == EntryType::Fifo {
        return Ok(nix::unistd::mkfifo(path, nix::sys::stat::Mode::from_bits_truncate(0o666))?);
    }
    entry.unpack_in("/").map(drop)
}

/// Removes what lower layers put into a folder, and keeps what this layer has added at any depth.
fn clear_lower_entries(folder: &Path, added: &HashSet<PathBuf>) -> io::Result<()> {
    let Ok(entries) = fs::read_dir(folder) else { return Ok(()) };
    for entry in entries.flatten() {
        let path = entry.path();
        if !added.iter().any(|one| one.starts_with(&path)) {
            remove_path(&path)?;
        } else if entry.file_type()?.is_dir() {
            clear_lower_entries(&path, added)?;
        }
    }
    Ok(())
}

/// Removes a file, link or folder tree; a missing one is no error.
fn remove_path(path: &Path) -> io::Result<()> {
    let removed = match fs::symlink_metadata(path) {
        Ok(there) if there.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
