//! Shell: tiers that run in processes of their own beside the others, because they often wait.

use std::{
    convert::Infallible,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::mpsc::{Receiver, Sender},
    thread::{self, JoinHandle},
    time::Instant,
};

use anyhow::{Context as _, Result, anyhow};

use super::{
    TestArgs, TestCounts, TestTier, TierOutcome, TierRow, build::TestProgram, lane_cgroup,
};
use crate::workspace::CargoWorkspace;

/// Thread that runs a tier in another process.
#[derive(Debug)]
pub(super) struct TierLane {
    tier: TestTier,
    thread: JoinHandle<FinishedTier>,
}

/// A tier whose process has ended.
#[derive(Debug)]
struct FinishedTier {
    tier: TestTier,
    log: PathBuf,
    /// True if every test passed; an error if the process could not run.
    has_passed: Result<bool>,
    seconds: f64,
}

/// Kept by a lane until its end. The clusters start once no lane keeps one any more.
pub(super) type RunningLane = Sender<Infallible>;

impl TierLane {
    /// Starts `tier` with the options of `args`, except for the choice of tiers. It runs the programs `built`, once the
    /// lanes `others` have ended. `running` is dropped once the tier's process has ended.
    pub(super) fn start(
        tier: TestTier,
        others: Option<Receiver<Infallible>>,
        running: Option<RunningLane>,
        args: &TestArgs,
        workspace: &CargoWorkspace,
        built: &[TestProgram],
    ) -> Result<Self> {
        let list = workspace.target.join(format!("{}-programs.json", tier.name()));
        fs::write(&list, serde_json::to_vec(built)?)
            .with_context(|| format!("cannot write {}", list.display()))?;
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["test", "--tier", tier.name()]).args(args.yes.then_some("--yes"));
        command.arg("--built").arg(&list);
        command.args(args.long.then_some("--long"));
        if let Some(file) = &args.kubeconfig {
            command.arg("--kubeconfig").arg(file);
        }
        // `--repeat` is valid only together with names.
        if !args.names.is_empty() {
            command.args(["--repeat", &args.repeat.to_string(), "--"]).args(&args.names);
        }
        let log = workspace.target.join(format!("{}-tier.log", tier.name()));
        println!("{} runs beside the others: see {}", tier.name(), log.display());
        let run = move || {
            let _disconnected = others.map(|others| others.recv());
            // Without permission to create cgroups, the kernel shares the processors by its own groups.
            let _may_lack_permission = lane_cgroup::create(Some(tier));
            let started = Instant::now();
            let has_passed = run_process(&mut command, &log);
            lane_cgroup::remove(Some(tier));
            drop(running);
            FinishedTier { tier, log, has_passed, seconds: started.elapsed().as_secs_f64() }
        };
        Ok(Self { tier, thread: thread::spawn(run) })
    }

    /// Waits for the end of the tier, prints its output, and returns its row of the table.
    pub(super) fn finish(self) -> TierRow {
        let finished = self.thread.join();
        let finished = finished.map_err(|_panicked| anyhow!("the thread of a tier has panicked"));
        let row = finished.and_then(FinishedTier::print);
        row.unwrap_or_else(|error| TierRow::cannot_run(self.tier, &error))
    }
}

/// Runs a process to its end, and writes all its output to `log`. Returns true if it succeeded.
fn run_process(command: &mut Command, log: &Path) -> Result<bool> {
    let file = File::create(log).with_context(|| format!("cannot make {}", log.display()))?;
    command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
    Ok(command.status().context("cannot start xtask again")?.success())
}

impl FinishedTier {
    fn print(self) -> Result<TierRow> {
        let Self { tier, log, has_passed, seconds } = self;
        let has_passed = has_passed?;
        let output = fs::read(&log).with_context(|| format!("cannot read {}", log.display()))?;
        // Programs of tests may print bytes that are no text.
        let output = String::from_utf8_lossy(&output);
        println!("\n== {} (ran beside others) ==\n{output}", tier.name());
        Ok(TierRow { tier, outcome: parse_outcome(tier, &output, has_passed), seconds })
    }
}

/// Parses the output of the other process.
fn parse_outcome(tier: TestTier, output: &str, has_passed: bool) -> TierOutcome {
    let mut counts = TestCounts::default();
    output.lines().for_each(|line| counts.parse_line(line));
    // The row of the other process' table, which also has the note on skipped tests.
    let row = output.lines().rev().find(|line| line.split_whitespace().next() == Some(tier.name()));
    let row = row.unwrap_or_default();
    // A process that failed without a failed test could not run the tests.
    if !has_passed && counts.failed == 0 {
        let reason = row.split_once("cannot run: ").map(|(_, reason)| reason);
        return TierOutcome::CannotRun(
            reason.unwrap_or("its process failed, see above").to_owned(),
        );
    }
    let skipped_note = row.split_once(';').map(|(_, note)| format!(";{note}"));
    TierOutcome::Ran { counts, has_passed, skipped_note: skipped_note.unwrap_or_default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_fails_without_a_failed_test_could_not_run() {
        let output =
            "local    FAILED      0.1 s  cannot run: crun is missing\ntotal: 0 passed, 0 failed";
        let reason = TierOutcome::CannotRun("crun is missing".to_owned());
        assert_eq!(parse_outcome(TestTier::Local, output, false), reason);
        let killed = TierOutcome::CannotRun("its process failed, see above".to_owned());
        let output = "test result: ok. 3 passed; 0 failed; 0 ignored";
        assert_eq!(parse_outcome(TestTier::Local, output, false), killed);
    }

    #[test]
    fn output_that_is_no_text_does_not_hide_the_result() {
        let name = format!("rouse-xtask-tier-{}.log", std::process::id());
        let log = std::env::temp_dir().join(name);
        fs::write(&log, b"\xff\ntest result: ok. 3 passed; 0 failed; 0 ignored\n").unwrap();
        let (tier, has_passed) = (TestTier::Local, Ok(true));
        let finished = FinishedTier { tier, log: log.clone(), has_passed, seconds: 1.0 };
        let row = finished.print().unwrap();
        let TierOutcome::Ran { counts, has_passed: true, .. } = &row.outcome else {
            panic!("it ran: {row:?}");
        };
        assert_eq!(counts.passed, 3);
        fs::remove_file(log).unwrap();
    }

    #[test]
    fn a_lane_that_fails_is_a_row_and_does_not_end_the_others() {
        let tier = TestTier::Kernel;
        let row = TierLane { tier, thread: thread::spawn(|| panic!("on purpose")) }.finish();
        assert_eq!(row.tier, tier);
        assert!(matches!(row.outcome, TierOutcome::CannotRun(_)), "{row:?}");
    }

    #[test]
    fn tests_of_the_other_process_are_counted_once() {
        let output =
            "test result: FAILED. 3 passed; 1 failed; 0 ignored\ntotal: 3 passed, 1 failed";
        let TierOutcome::Ran { counts, has_passed: false, .. } =
            parse_outcome(TestTier::Local, output, false)
        else {
            panic!("it ran and failed");
        };
        assert_eq!((counts.passed, counts.failed), (3, 1));
    }

    #[test]
    fn tests_that_the_other_process_skipped_are_reported() {
        let output = "test result: ok. 3 passed; 0 failed; 2 ignored\n\n\
            cluster  passed     9.1 s  3 passed, 0 failed; skipped kn:: (no kn); skipped 2 that take minutes\n\n\
            total: 3 passed, 0 failed";
        let TierOutcome::Ran { counts, has_passed: true, skipped_note } =
            parse_outcome(TestTier::Cluster, output, true)
        else {
            panic!("it ran and passed");
        };
        assert_eq!(counts.passed, 3);
        assert_eq!(skipped_note, "; skipped kn:: (no kn); skipped 2 that take minutes");
    }
}
