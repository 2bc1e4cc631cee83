//! Shell: temporary files and folders of the image store, and removal of those that crashed processes left.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use tracing::{info, warn};

use crate::process::ProcessId;

/// Prefix of temporary names. No digest and no registry starts with a dot, so no complete file has it.
const PREFIX: &str = ".half-";

/// Returns a path in the folder of `path`, for its content until that is complete.
///
/// Pods may make the same file at the same time, so each call returns another path.
pub(super) fn temporary_path(path: &Path) -> io::Result<PathBuf> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let process = ProcessId::current().ok_or_else(|| io::Error::other("/proc is not mounted"))?;
    let (ProcessId { pid, start_ticks }, number) =
        (process, NUMBER.fetch_add(1, Ordering::Relaxed));
    Ok(path.with_file_name(format!("{PREFIX}{pid}-{start_ticks}-{number}")))
}

/// Removes from a store what processes left that have ended.
pub(super) fn remove_leftovers(store: &Path) {
    // Not the old names here: the name of an image may look like one.
    remove_matching(&store.join("refs"), is_leftover);
    let is_any_leftover = |name: &str| is_leftover(name) || is_old_leftover(name);
    remove_matching(&store.join("rootfs"), is_any_leftover);
    for folder in fs::read_dir(store.join("blobs")).into_iter().flatten().flatten() {
        remove_matching(&folder.path(), is_any_leftover);
    }
}

/// Removes the files and folders directly in `folder` whose names match.
fn remove_matching(folder: &Path, matches: impl Fn(&str) -> bool) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if !matches(&entry.file_name().to_string_lossy()) {
            continue;
        }
        let path = entry.path();
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let removed = if is_folder { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        match removed {
            Ok(()) => info!(path = %path.display(), "incomplete image file removed"),
            Err(error) => warn!(path = %path.display(), %error, "left behind"),
        }
    }
}

/// Returns true for the name of a temporary file or folder whose process has ended.
fn is_leftover(name: &str) -> bool {
    let process = || {
        let mut numbers = name.strip_prefix(PREFIX)?.split('-');
        let (pid, start_ticks) = (numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?);
        Some(ProcessId { pid, start_ticks })
    };
    process().is_some_and(|process| !process.is_alive())
}

/// Returns true for a temporary name of an earlier version, `DIGEST.half` or `DIGEST.half-PID`. No digest has a dot.
fn is_old_leftover(name: &str) -> bool {
    name.split_once('.')
        .is_some_and(|(digest, rest)| !digest.is_empty() && rest.starts_with("half"))
}
