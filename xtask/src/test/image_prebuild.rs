//! Shell: build of images for the cluster tier in parallel with the build of test programs.

use std::{
    fs::File,
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use anyhow::{Context as _, Result};

use crate::workspace::CargoWorkspace;

/// A build in progress. Other builds of the same images wait for its end.
#[derive(Debug)]
pub(super) struct ImagePrebuild {
    child: Child,
    log: PathBuf,
}

impl ImagePrebuild {
    /// Starts the build in another process.
    pub(super) fn start(workspace: &CargoWorkspace) -> Result<Self> {
        let log = workspace.target.join("cluster-build.log");
        let file = File::create(&log).with_context(|| format!("cannot make {}", log.display()))?;
        let mut command = Command::new(std::env::current_exe()?);
        // The image of Rouse holds a program that is still being built.
        command.args(["cluster", "build", "--image", "hello"]);
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let child = command.spawn().context("cannot start xtask again")?;
        Ok(Self { child, log })
    }

    /// Waits for the end of the build. A failure is ignored here: the tier builds again and reports it.
    pub(super) fn finish(mut self) -> Result<()> {
        let status = self.child.wait()?;
        println!("images were built in advance ({status}), see {}", self.log.display());
        Ok(())
    }
}
