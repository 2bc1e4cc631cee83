//! Shell: builds of the programs that demo, benches and root tests start, with the eBPF programs embedded.

use std::path::PathBuf;

use anyhow::Result;

use crate::{build_ebpf, sh, workspace::CargoWorkspace};

/// Cargo's profile of a build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BuildProfile {
    Debug,
    Release,
}

/// Builds `rouse` with the eBPF programs embedded, and returns the path of the executable.
pub(crate) fn build_rouse(workspace: &CargoWorkspace, profile: BuildProfile) -> Result<PathBuf> {
    let object = build_ebpf::build_object(workspace)?;
    let mut build = sh::cargo();
    build.args(["build", "--package", "rouse"]).env(build_ebpf::OBJECT_VARIABLE, object);
    build.current_dir(&workspace.root);
    let folder = match profile {
        BuildProfile::Debug => "debug",
        BuildProfile::Release => {
            build.arg("--release");
            "release"
        }
    };
    sh::run(&mut build)?;
    Ok(workspace.target.join(folder).join("rouse"))
}

/// Builds an optimised xtask, whose measuring client costs little, and returns the path of the executable.
pub(crate) fn build_client(workspace: &CargoWorkspace) -> Result<PathBuf> {
    sh::run(
        sh::cargo().args(["build", "--release", "--package", "xtask"]).current_dir(&workspace.root),
    )?;
    Ok(workspace.target.join("release/xtask"))
}
