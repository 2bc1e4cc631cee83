//! Shell: builds what the cluster tier needs while the tiers before it wait, which is what they do most of the time.

use std::{
    fs::File,
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use anyhow::{Context as _, Result};

use super::Args;
use crate::{
    setup::{self, Purpose},
    workspace::Workspace,
};

/// A build on its way.
#[derive(Debug)]
pub(super) struct Ahead {
    child: Child,
    log: PathBuf,
}

impl Ahead {
    /// Begins to build. Its processes give way to those of tests, and yet get on beside them: the cluster waits for them.
    pub(super) fn start(args: &Args, workspace: &Workspace) -> Result<Self> {
        // What is missing is installed before, by one process and where it can ask.
        setup::prepare(&[Purpose::Build, Purpose::Kernel, Purpose::Cluster], args.yes)?;
        let log = workspace.target.join("cluster-build.log");
        let file = File::create(&log).with_context(|| format!("cannot make {}", log.display()))?;
        let mut command = Command::new("nice");
        command.args(["-n", "5"]).arg(std::env::current_exe()?);
        // The tier local makes the other image itself.
        command.args(["cluster", "build", "--image", "rouse"]);
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let child = command.spawn().context("cannot start nice")?;
        Ok(Self { child, log })
    }

    /// Waits for its end. What failed fails once more, and says so, when the tier builds it itself.
    pub(super) fn finish(mut self) -> Result<()> {
        let status = self.child.wait()?;
        println!("images were built ahead ({status}), see {}", self.log.display());
        Ok(())
    }
}
