//! Shell: keeps processes of xtask from building the same thing at once.

use std::{
    fs::{self, File},
    path::Path,
};

use anyhow::{Context as _, Result};

/// A lock that other processes wait for. It is released with this value, or with the process.
#[derive(Debug)]
pub(crate) struct Lock(
    #[expect(dead_code, reason = "it holds the lock as long as it is open")] File,
);

/// Waits until no other process holds the lock `file`, which is made where it is missing.
pub(crate) fn wait_for(file: &Path) -> Result<Lock> {
    let folder = file.parent().unwrap_or_else(|| Path::new("."));
    let lock = fs::create_dir_all(folder).and_then(|()| File::create(file));
    let lock = lock.with_context(|| format!("cannot make {}", file.display()))?;
    lock.lock().with_context(|| format!("cannot lock {}", file.display()))?;
    Ok(Lock(lock))
}
