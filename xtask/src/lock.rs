//! Shell: file locks that keep processes of xtask from building the same files at once.

use std::{
    fs::{self, File},
    path::Path,
};

use anyhow::{Context as _, Result};

/// An exclusive lock. It is released when this value is dropped, or when the process ends.
#[derive(Debug)]
pub(crate) struct Lock(
    #[expect(dead_code, reason = "it holds the lock as long as it is open")] File,
);

/// Waits until no other process holds the lock `file`, which is created if missing.
pub(crate) fn wait_for(file: &Path) -> Result<Lock> {
    let folder = file.parent().unwrap_or_else(|| Path::new("."));
    let lock = fs::create_dir_all(folder).and_then(|()| File::create(file));
    let lock = lock.with_context(|| format!("cannot make {}", file.display()))?;
    lock.lock().with_context(|| format!("cannot lock {}", file.display()))?;
    Ok(Lock(lock))
}
