//! Shell: runs the local tier in a process of its own while the cluster tier runs: both wait more than they compute.

use std::{
    fs::{self, File},
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Instant,
};

use anyhow::{Context as _, Result};

use super::{Args, Outcome, Row, Tally, Tier};
use crate::workspace::Workspace;

/// A tier that runs in another process.
#[derive(Debug)]
pub(super) struct Beside {
    tier: Tier,
    child: Child,
    log: PathBuf,
    started: Instant,
}

impl Beside {
    /// Starts `tier` with the same names and repeats.
    ///
    /// What the tier is built from must be built before, as two processes of Cargo wait for each other.
    pub(super) fn start(tier: Tier, args: &Args, workspace: &Workspace) -> Result<Self> {
        let log = workspace.target.join(format!("{}-tier.log", tier.name()));
        let file = File::create(&log).with_context(|| format!("cannot make {}", log.display()))?;
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["test", "--tier", tier.name()]).args(args.yes.then_some("--yes"));
        if !args.names.is_empty() {
            command.args(["--repeat", &args.repeat.to_string(), "--"]).args(&args.names);
        }
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let child = command.spawn().context("cannot start xtask once more")?;
        println!("runs beside the cluster tier; its output is in {}", log.display());
        Ok(Self { tier, child, log, started: Instant::now() })
    }

    /// Waits for the end of the tier, shows all that it printed, and returns its row of the table.
    pub(super) fn finish(mut self) -> Result<Row> {
        let status = self.child.wait()?;
        let seconds = self.started.elapsed().as_secs_f64();
        let output = fs::read_to_string(&self.log)
            .with_context(|| format!("cannot read {}", self.log.display()))?;
        println!("\n== {} (ran beside cluster) ==", self.tier.name());
        println!("{output}");
        let outcome = outcome(&output, status.success());
        Ok(Row { tier: self.tier, outcome, seconds })
    }
}

/// What the other process printed, as this process would have counted it.
fn outcome(output: &str, ok: bool) -> Outcome {
    let mut tally = Tally::default();
    output.lines().for_each(|line| tally.absorb(line));
    if !ok && tally.failed == 0 {
        let why = output.lines().rev().find(|line| line.contains("cannot run: "));
        let why = why.and_then(|line| line.split_once("cannot run: ")).map(|(_, why)| why);
        return Outcome::CannotRun(why.unwrap_or("its process failed, see above").to_owned());
    }
    Outcome::Ran { tally, ok, left_out: String::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_fails_without_a_failed_test_could_not_run() {
        let output =
            "local    FAILED      0.1 s  cannot run: no crun is here\ntotal: 0 passed, 0 failed";
        assert_eq!(outcome(output, false), Outcome::CannotRun("no crun is here".to_owned()));
        let killed = Outcome::CannotRun("its process failed, see above".to_owned());
        assert_eq!(outcome("test result: ok. 3 passed; 0 failed; 0 ignored", false), killed);
    }

    #[test]
    fn tests_of_the_other_process_are_counted_once() {
        let output =
            "test result: FAILED. 3 passed; 1 failed; 0 ignored\ntotal: 3 passed, 1 failed";
        let Outcome::Ran { tally, ok: false, .. } = outcome(output, false) else {
            panic!("it ran and failed");
        };
        assert_eq!((tally.passed, tally.failed), (3, 1));
    }
}
