//! Shell: locks that keep processes of xtask from building the same thing at once.

use std::{
    fs::{self, File},
    path::Path,
};

use anyhow::{Context as _, Result};

/// Waits until no other process holds the lock `file`, which is created if missing. The lock is released when the
/// result is dropped, or with the process.
pub(crate) fn acquire(file: &Path) -> Result<File> {
    let folder = file.parent().unwrap_or_else(|| Path::new("."));
    let lock = fs::create_dir_all(folder).and_then(|()| File::create(file));
    let lock = lock.with_context(|| format!("cannot make {}", file.display()))?;
    lock.lock().with_context(|| format!("cannot lock {}", file.display()))?;
    Ok(lock)
}
