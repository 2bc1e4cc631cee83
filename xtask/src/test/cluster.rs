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
    let mut left_out = Vec::new();
    if !cluster::has_kn()? {
        left_out.push(("kn::", "no kn is on the PATH and none could be built"));
    }
    let vars = [("ROUSE_CLUSTER", OsStr::new(NAME)), ("ROUSE_XTASK", xtask.as_os_str())];
    let outcome = sh::run(&mut up).and_then(|()| tests(args, workspace, &vars, &left_out));
    if !was_there {
        sh::run(Command::new(&xtask).args(["cluster", "--name", NAME, "down"]))?;
    }
    outcome
}

/// Runs all tests but those of the modules named in `left_out`, each with its reason.
fn tests(
    args: &Args,
    workspace: &Workspace,
    vars: &[(&str, &OsStr)],
    left_out: &[(&str, &str)],
) -> Result<Outcome> {
    let words: Vec<&str> = left_out.iter().flat_map(|(module, _)| ["--skip", module]).collect();
    let mut outcome = privileged("cluster", args, workspace, vars, &words)?;
    if let Outcome::Ran { left_out: said, .. } = &mut outcome {
        for (module, why) in left_out {
            said.push_str(&format!("; left out {module} ({why})"));
        }
    }
    Ok(outcome)
}

/// Faults and traces are xtask's own clusters' matter.
fn existing(file: &Path, args: &Args, workspace: &Workspace) -> Result<Outcome> {
    if !file.is_file() {
        bail!("--kubeconfig names {}, which is no file", file.display());
    }
    let file = file.canonicalize()?;
    let vars = [("ROUSE_KUBECONFIG", file.as_os_str())];
    let why = "xtask did not make this cluster";
    tests(
        args,
        workspace,
        &vars,
        &[("ours::", why), ("kn::", why), ("paths::", "its nodes cannot be entered")],
    )
}
