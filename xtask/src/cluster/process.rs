//! Shell: processes of the cluster, which outlive xtask and are identified by process id and start time.

use std::{
    ffi::OsString,
    fs::{self, File},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde::{Deserialize, Serialize};

use super::{plan::ClusterProcess, state::ClusterPaths};
use crate::sh;

/// Shell script that enters the cgroups named before `--`, then executes the program after it.
const ENTER_CGROUPS_SCRIPT: &str =
    r#"while [ "$1" != -- ]; do echo $$ > "$1" || exit 1; shift; done; shift; exec "$@""#;

/// Command line and environment of a process to start.
#[derive(Debug)]
pub(crate) struct ProcessLaunch {
    /// Paths of `cgroup.procs` files to enter before the start.
    pub(crate) cgroups: Vec<PathBuf>,
    pub(crate) argv: Vec<OsString>,
    pub(crate) stdin: Option<OwnedFd>,
    /// Directories of programs, searched before the `PATH`.
    pub(crate) path: Vec<PathBuf>,
}

/// Starts `process` in a session of its own, and records its id and start time.
pub(crate) fn start(
    paths: &ClusterPaths,
    process: ClusterProcess,
    launch: ProcessLaunch,
) -> Result<()> {
    let log = paths.log(process);
    let out = File::options()
        .create(true)
        .append(true)
        .open(&log)
        .with_context(|| format!("cannot write {}", log.display()))?;
    let mut command = Command::new("setsid");
    command
        .args(["sh", "-c", ENTER_CGROUPS_SCRIPT, "enter"])
        .args(&launch.cgroups)
        .arg("--")
        .args(&launch.argv);
    command.stdin(launch.stdin.map_or_else(Stdio::null, Stdio::from));
    command.stdout(out.try_clone()?).stderr(out).current_dir("/");
    // A clean environment: the user's proxy or kubeconfig variables must not reach the daemons.
    command.env_clear().env("PATH", search_path(&launch.path)?).env("HOME", "/root");
    let child = command.spawn().with_context(|| format!("cannot start {process}"))?;
    // `setsid` executes the shell and then the program, all with the same process id.
    let ProcessIdentity { pid, start_ticks } = ProcessIdentity::of(child.id())
        .with_context(|| format!("{process} ended at once: see {}", log.display()))?;
    fs::write(paths.pid_file(process), format!("{pid} {start_ticks}"))
        .with_context(|| format!("cannot note the process of {process}"))
}

fn search_path(first: &[PathBuf]) -> Result<OsString> {
    let system = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];
    let folders = first.iter().cloned().chain(system.map(PathBuf::from));
    std::env::join_paths(folders).context("a folder of programs has a colon in its name")
}

/// A process of this boot. The kernel reuses process ids, but not with the same start time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessIdentity {
    pub(crate) pid: u32,
    /// Start time in ticks since boot.
    start_ticks: u64,
}

impl ProcessIdentity {
    /// Returns the identity of the process `pid`; `None` if it does not run.
    pub(crate) fn of(pid: u32) -> Option<Self> {
        Some(Self { pid, start_ticks: start_time(pid)? })
    }

    /// Returns true if the process still runs.
    pub(crate) fn is_running(self) -> bool {
        Self::of(self.pid) == Some(self)
    }
}

/// Start time of a process in ticks since boot; `None` if it does not exist or is a zombie.
fn start_time(id: u32) -> Option<u64> {
    let fields = stat_fields(id)?;
    (fields.first()? != "Z").then_some(())?;
    fields.get(19)?.parse().ok()
}

/// Fields of `/proc/<id>/stat` after the name: state, parent, …
fn stat_fields(id: u32) -> Option<Vec<String>> {
    let text = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    let rest = text.rsplit_once(')')?.1;
    Some(rest.split_whitespace().map(str::to_owned).collect())
}

/// Process id of `process`; `None` if it does not run.
pub(crate) fn pid_of(paths: &ClusterPaths, process: ClusterProcess) -> Option<u32> {
    let text = fs::read_to_string(paths.pid_file(process)).ok()?;
    let (pid, start_ticks) = text.split_once(' ')?;
    let identity =
        ProcessIdentity { pid: pid.parse().ok()?, start_ticks: start_ticks.parse().ok()? };
    identity.is_running().then_some(identity.pid)
}

/// Returns true if the process is suspended (SIGSTOP).
pub(crate) fn is_stopped(id: u32) -> bool {
    stat_fields(id).is_some_and(|fields| fields.first().is_some_and(|state| state == "T"))
}

/// Sends `signal` to `process`. Fails if it does not run.
pub(crate) fn signal(paths: &ClusterPaths, process: ClusterProcess, signal: Signal) -> Result<()> {
    let Some(id) = pid_of(paths, process) else { bail!("{process} does not run") };
    let pid = Pid::from_raw(i32::try_from(id).context("a process id is small")?);
    kill(pid, signal).with_context(|| format!("cannot send {signal} to {process}"))
}

/// Ends `process` by SIGTERM, then SIGKILL, and waits until it is gone. Succeeds if it does not run.
pub(crate) fn terminate(paths: &ClusterPaths, process: ClusterProcess) -> Result<()> {
    if pid_of(paths, process).is_none() {
        return Ok(());
    }
    for (word, timeout) in [(Signal::SIGTERM, 5), (Signal::SIGKILL, 10)] {
        // A process that ends between the check and the signal is no error.
        let _gone = signal(paths, process, word);
        // A suspended process handles SIGTERM only after SIGCONT.
        let _gone = signal(paths, process, Signal::SIGCONT);
        let started = Instant::now();
        while started.elapsed() < Duration::from_secs(timeout) {
            if pid_of(paths, process).is_none() {
                return Ok(());
            }
            sh::sleep(Duration::from_millis(20));
        }
    }
    bail!("{process} does not end")
}

/// Last lines of a log, for error messages.
pub(crate) fn last_lines(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(12)..].join("\n")
}
