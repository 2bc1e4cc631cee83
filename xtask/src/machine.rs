//! Shell: properties of this machine, for checks before a run and for the head of every report.

use std::{fs, path::PathBuf, process::Command};

use serde::{Deserialize, Serialize};

use crate::sh;

/// Machine and code version that figures belong to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct MachineInfo {
    /// Processor, number of cores and memory in one line.
    pub(crate) machine: String,
    /// Release of the running kernel.
    pub(crate) kernel: String,
    /// Commit of the working tree, with `+` if there are uncommitted changes.
    pub(crate) commit: String,
}

impl MachineInfo {
    /// Reads the properties from `/proc` and git.
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

/// Mount point of cgroup v2; on a machine with v1 and v2 it is not `/sys/fs/cgroup`.
pub(crate) fn cgroup2() -> Option<PathBuf> {
    let mounts = read("/proc/self/mountinfo");
    mounts.lines().find_map(|line| {
        let (fields, filesystem_fields) = line.split_once(" - ")?;
        // proc_pid_mountinfo(5): after ` - ` comes the type; field 5 before it is the mount point.
        (filesystem_fields.split(' ').next() == Some("cgroup2"))
            .then(|| fields.split(' ').nth(4).map(PathBuf::from))?
    })
}

/// Bounding set of this process' capabilities, as the kernel's bits.
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
    // Without git both outputs are empty, and so is the commit.
    let suffix = if git(&["status", "--porcelain"]).is_empty() { "" } else { "+" };
    git(&["rev-parse", "--short=12", "HEAD"]) + suffix
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim())
}
