//! Shell: the workspace as `cargo metadata` describes it.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use serde::Deserialize;

use crate::sh;

/// The workspace and its own packages.
#[derive(Debug, Deserialize)]
pub(crate) struct CargoWorkspace {
    /// Directory of the root `Cargo.toml`.
    #[serde(rename = "workspace_root")]
    pub(crate) root: PathBuf,
    /// Target directory of cargo, which also holds xtask's own files.
    #[serde(rename = "target_directory")]
    pub(crate) target: PathBuf,
    /// Packages of the workspace, without their dependencies.
    pub(crate) packages: Vec<CargoPackage>,
}

/// One package of the workspace.
#[derive(Debug, Deserialize)]
pub(crate) struct CargoPackage {
    pub(crate) name: String,
    manifest_path: PathBuf,
    pub(crate) dependencies: Vec<CargoDependency>,
}

/// A dependency as written in a `Cargo.toml`.
#[derive(Debug, Deserialize)]
pub(crate) struct CargoDependency {
    pub(crate) name: String,
    /// Directory of a path dependency; `None` for one from a registry.
    pub(crate) path: Option<PathBuf>,
}

impl CargoWorkspace {
    /// Loads the workspace from `cargo metadata`.
    pub(crate) fn load() -> Result<Self> {
        let text = sh::capture(
            sh::cargo()
                .args(["metadata", "--no-deps", "--format-version", "1"])
                .current_dir(checkout_directory()),
        )?;
        serde_json::from_str(&text).context("cannot read what `cargo metadata` printed")
    }
}

/// A directory of the present checkout. `cargo run` sets the variable each time; the compiled-in path may belong to
/// another checkout that shares the target directory.
fn checkout_directory() -> PathBuf {
    let running = std::env::var_os("CARGO_MANIFEST_DIR");
    running.map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from)
}

impl CargoPackage {
    /// Directory of the package, which holds its `Cargo.toml`.
    pub(crate) fn folder(&self) -> PathBuf {
        self.manifest_path.parent().map(PathBuf::from).unwrap_or_default()
    }
}
