//! Shell: the cluster tier: brings a Kubernetes up where none is, and takes down only what it brought up.

use std::{ffi::OsStr, path::Path, process::Command};

use anyhow::{Result, bail};

use super::{Args, Outcome, privileged};
use crate::{
    cluster,
    setup::{self, Purpose},
    sh,
    workspace::Workspace,
};

/// The cluster that `cargo xtask cluster up` makes where no name is given.
const NAME: &str = "rouse";

/// Runs the tests against `--kubeconfig`, or against a cluster of xtask's.
pub(super) fn run(args: &Args, workspace: &Workspace) -> Result<Outcome> {
    setup::prepare(&[Purpose::Build, Purpose::Kernel, Purpose::Cluster], args.yes)?;
    if let Some(file) = &args.kubeconfig {
        return existing(file, args, workspace);
    }
    let xtask = std::env::current_exe()?;
    let was_there = cluster::exists(NAME)?;
    let mut up = Command::new(&xtask);
    up.args(["cluster", "--name", NAME, "up", "--image", "hello"]);
    if !was_there {
        up.args(["--nodes", "2"]);
    }
    if args.yes {
        up.arg("--yes");
    }
    let vars = [("ROUSE_CLUSTER", OsStr::new(NAME)), ("ROUSE_XTASK", xtask.as_os_str())];
    let outcome =
        sh::run(&mut up).and_then(|()| privileged("cluster", args, workspace, &vars, &[]));
    if !was_there {
        sh::run(Command::new(&xtask).args(["cluster", "--name", NAME, "down"]))?;
    }
    outcome
}

/// Faults and traces are xtask's own clusters' matter, so their tests are left out and named.
fn existing(file: &Path, args: &Args, workspace: &Workspace) -> Result<Outcome> {
    if !file.is_file() {
        bail!("--kubeconfig names {}, which is no file", file.display());
    }
    println!(
        "left out: `ours` (faults, traces) and `kn`, because {} leads to a cluster that xtask did not make",
        file.display()
    );
    let file = file.canonicalize()?;
    let vars = [("ROUSE_KUBECONFIG", file.as_os_str())];
    privileged("cluster", args, workspace, &vars, &["--skip", "ours::", "--skip", "kn::"])
}
