//! Shell: `cargo xtask manifests`: writes `deploy/` and `docs/rbac.md` anew from what `rouse install` applies.
//!
//! That they are up to date is held by a test of `rouse`.

use anyhow::Result;

use crate::{sh, workspace::Workspace};

/// Runs it.
pub(crate) fn run() -> Result<()> {
    let workspace = Workspace::load()?;
    let mut rouse = sh::cargo();
    rouse.args(["run", "--quiet", "--package", "rouse", "--", "install", "--write"]);
    sh::run(rouse.arg(&workspace.root).current_dir(&workspace.root))
}
