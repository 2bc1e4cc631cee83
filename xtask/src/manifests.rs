//! Shell: `cargo xtask manifests`: writes `deploy/` and `docs/rbac.md` again from what `rouse install` applies.
//!
//! A test of the package `rouse` fails if they are out of date.

use anyhow::Result;

use crate::{sh, workspace::CargoWorkspace};

/// Runs `cargo xtask manifests`, by calling `rouse install --write`.
pub(crate) fn run() -> Result<()> {
    let workspace = CargoWorkspace::load()?;
    let mut rouse = sh::cargo();
    rouse.args(["run", "--quiet", "--package", "rouse", "--", "install", "--write"]);
    sh::run(rouse.arg(&workspace.root).current_dir(&workspace.root))
}
