//! Shell: temporary files and folders of the image store.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::process::ProcessId;

/// Prefix of their names. No digest and no registry starts with a dot, so no complete file has it.
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
