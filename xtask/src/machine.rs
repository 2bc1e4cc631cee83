//! Shell: what machine this is, for checks before a run and for the head of every figure.

use std::{fs, path::PathBuf, process::Command};

use serde::{Deserialize, Serialize};

use crate::sh;

/// What a figure must name to be worth anything.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Machine {
    /// Processor, cores and memory in one line.
    pub(crate) machine: String,
    /// Kernel release.
    pub(crate) kernel: String,
    /// Commit of the tree, with `+` when it has changes that are not committed.
    pub(crate) commit: String,
}

impl Machine {
    /// Reads `/proc` and asks git.
    pub(crate) fn read() -> Self {
        let cpuinfo = read("/proc/cpuinfo");
        let model = field(&cpuinfo, "model name").unwrap_or("unknown processor");
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let memory = field(&read("/proc/meminfo"), "MemTotal")
            .and_then(|text| text.split(' ').next()?.parse::<u64>().ok())
            .unwrap_or(0);
        Self {
            machine: format!("{model}, {cores} cores, {} GiB", memory.div_ceil(1 << 20)),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            commit: commit(),
        }
    }
}

/// Kernel release as (major, minor).
pub(crate) fn kernel() -> Option<(u32, u32)> {
    let release = read("/proc/sys/kernel/osrelease");
    let mut numbers = release.split(|letter: char| !letter.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Where cgroup v2 is mounted; on a hybrid machine that is not `/sys/fs/cgroup`.
pub(crate) fn cgroup2() -> Option<PathBuf> {
    let mounts = read("/proc/self/mountinfo");
    mounts.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        (right.split(' ').next() == Some("cgroup2"))
            .then(|| left.split(' ').nth(4).map(PathBuf::from))?
    })
}

/// Capabilities this process may have, as the kernel's bit set.
pub(crate) fn capabilities() -> u64 {
    let status = read("/proc/self/status");
    field(&status, "CapBnd").and_then(|hex| u64::from_str_radix(hex, 16).ok()).unwrap_or(0)
}

fn commit() -> String {
    let git = |args: &[&str]| {
        let mut command = Command::new("git");
        command
            .args(args)
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .stderr(std::process::Stdio::null());
        sh::capture(&mut command).unwrap_or_default().trim().to_owned()
    };
    let mark = if git(&["status", "--porcelain"]).is_empty() { "" } else { "+" };
    git(&["rev-parse", "--short=12", "HEAD"]) + mark
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim())
}
