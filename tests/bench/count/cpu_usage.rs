//! Shell: the machine's own accounts of used processor time.

use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
};

use anyhow::{Context as _, Result};

/// Processor time used so far, in µs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CpuUsage {
    /// Time of the processes in one cgroup, and of the core's softirq thread, which may run packets of any process.
    pub(crate) own_us: f64,
    /// Busy time of the whole machine.
    pub(crate) machine_us: f64,
}

impl CpuUsage {
    pub(crate) fn read(cgroup: &Path, core: usize) -> Result<Self> {
        Ok(Self { own_us: cgroup_us(cgroup)? + softirq_us(core)?, machine_us: machine_us()? })
    }

    pub(crate) fn since(self, earlier: Self) -> Self {
        Self {
            own_us: self.own_us - earlier.own_us,
            machine_us: self.machine_us - earlier.machine_us,
        }
    }
}

pub(crate) fn core_count() -> Result<usize> {
    let stat = read("/proc/stat")?;
    Ok(stat.lines().filter(|line| line.starts_with("cpu")).count() - 1)
}

fn cgroup_us(cgroup: &Path) -> Result<f64> {
    let stat = fs::read_to_string(cgroup.join("cpu.stat")).context("cannot read cpu.stat")?;
    let us = stat.lines().find_map(|line| line.strip_prefix("usage_usec "));
    Ok(us.context("no usage in cpu.stat")?.parse()?)
}

/// Time of the core's softirq thread, which works on packets when an interrupt handler cannot keep up.
fn softirq_us(core: usize) -> Result<f64> {
    let thread_name = format!("ksoftirqd/{core}");
    for entry in fs::read_dir("/proc")?.flatten() {
        let folder = entry.path();
        if fs::read_to_string(folder.join("comm")).is_ok_and(|name| name.trim_end() == thread_name)
        {
            let schedstat = fs::read_to_string(folder.join("schedstat"))?;
            let ns = schedstat.split(' ').next().context("schedstat begins with it")?;
            return Ok(ns.parse::<f64>()? / 1e3);
        }
    }
    anyhow::bail!("there is no {thread_name}")
}

/// Busy time of the machine: all but idle (fields 4 and 5) and steal (8), which /proc/stat gives in ticks of 10 ms.
fn machine_us() -> Result<f64> {
    let stat = read("/proc/stat")?;
    let line = stat.lines().next().context("it begins with the whole machine")?;
    let ticks: Vec<f64> = line.split_whitespace().skip(1).flat_map(str::parse).collect();
    let busy_ticks = ticks.iter().enumerate().filter(|(index, _)| matches!(index, 0..=2 | 5 | 6));
    Ok(busy_ticks.map(|(_, ticks)| ticks).sum::<f64>() * 1e4)
}

fn read(path: &str) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {path}"))
}

/// Returns true if the machine counts processor cycles; many virtual machines do not.
pub(crate) fn has_cycles() -> bool {
    let output = perf_command().arg("true").stderr(Stdio::piped()).output();
    output.ok().and_then(|output| parse_cycles(&output.stderr)).is_some()
}

/// A running count of the whole machine's cycles, in user space and in the kernel.
#[derive(Debug)]
pub(crate) struct CycleCounter(Child);

impl CycleCounter {
    pub(crate) fn start() -> Result<Self> {
        Ok(Self(perf_command().stderr(Stdio::piped()).spawn().context("cannot start perf")?))
    }

    /// Ends the count and returns the number of cycles; `None` if the machine does not count them.
    pub(crate) fn stop(self) -> Option<f64> {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(self.0.id()).ok()?);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).ok()?;
        parse_cycles(&self.0.wait_with_output().ok()?.stderr)
    }
}

fn perf_command() -> Command {
    let mut perf = Command::new("perf");
    perf.args(["stat", "-x,", "-a", "-e", "cycles:u,cycles:k"]).env("LC_ALL", "C");
    perf.stdout(Stdio::null());
    perf
}

/// Sum of both counts in perf's output, whose lines begin with them.
fn parse_cycles(output: &[u8]) -> Option<f64> {
    let output = String::from_utf8_lossy(output);
    let counts = output.lines().filter_map(|line| line.split(',').next()?.parse().ok());
    let counts: Vec<f64> = counts.collect();
    (counts.len() == 2).then(|| counts.iter().sum())
}
