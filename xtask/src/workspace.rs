//! Shell: what `cargo metadata` says about this workspace.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use serde::Deserialize;

use crate::sh;

/// The workspace and its own packages.
#[derive(Debug, Deserialize)]
pub(crate) struct Workspace {
    /// Folder of the root `Cargo.toml`.
    #[serde(rename = "workspace_root")]
    pub(crate) root: PathBuf,
    /// Where cargo builds; xtask keeps its own files there too.
    #[serde(rename = "target_directory")]
    pub(crate) target: PathBuf,
    /// Our packages, not their dependencies.
    pub(crate) packages: Vec<Package>,
}

/// One of our packages.
#[derive(Debug, Deserialize)]
pub(crate) struct Package {
    pub(crate) name: String,
    manifest_path: PathBuf,
    pub(crate) dependencies: Vec<Dependency>,
}

/// A dependency as written in a `Cargo.toml`.
#[derive(Debug, Deserialize)]
pub(crate) struct Dependency {
    pub(crate) name: String,
    /// Folder of a dependency of our own; `None` for one from a registry.
    pub(crate) path: Option<PathBuf>,
}

impl Workspace {
    /// Asks cargo.
    pub(crate) fn load() -> Result<Self> {
        let text = sh::capture(
            sh::cargo()
                .args(["metadata", "--no-deps", "--format-version", "1"])
                .current_dir(root()),
        )?;
        serde_json::from_str(&text).context("cannot read what `cargo metadata` printed")
    }
}

/// A folder of the checkout at hand. `cargo run` names it anew each time; the one compiled in may be another
/// checkout's where both share a target folder.
fn root() -> PathBuf {
    let running = std::env::var_os("CARGO_MANIFEST_DIR");
    running.map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from)
}

impl Package {
    /// The package's folder.
    pub(crate) fn folder(&self) -> PathBuf {
        self.manifest_path.parent().map(PathBuf::from).unwrap_or_default()
    }
}
