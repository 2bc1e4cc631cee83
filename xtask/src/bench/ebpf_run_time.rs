//! Shell: run time of the loaded eBPF programs, from the kernel's own statistics.

use std::fs;

use anyhow::{Context as _, Result};
use aya::programs::loaded_programs;

/// Switch of the kernel's run time statistics. Timing itself costs, so it is 0 while anything else is measured.
const BPF_STATS: &str = "/proc/sys/kernel/bpf_stats_enabled";

/// Names of the programs that run within system calls of clients.
const CLIENT_PROGRAMS: [&str; 5] =
    ["connect4", "connect6", "getpeername4", "getpeername6", "release"];

/// Run time of programs since they were loaded, in µs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct ProgramRunTime {
    /// Run time of the programs in [`CLIENT_PROGRAMS`], in µs.
    pub(super) connect_us: f64,
    /// Run time of all programs, in µs.
    pub(super) all_us: f64,
}

/// Runs `measure` with the statistics on. Returns its result and the run time of programs meanwhile.
pub(super) fn measure_run_time<T>(
    measure: impl FnOnce() -> Result<T>,
) -> Result<(T, ProgramRunTime)> {
    set_stats_enabled("1")?;
    // A closure, so that the statistics are switched off after an error as well.
    let outcome = (|| {
        let before = ProgramRunTime::read()?;
        let measured = measure()?;
        anyhow::Ok((measured, ProgramRunTime::read()?.since(before)))
    })();
    set_stats_enabled("0")?;
    outcome
}

fn set_stats_enabled(to: &str) -> Result<()> {
    fs::write(BPF_STATS, to).context("cannot switch the kernel's program statistics")
}

impl ProgramRunTime {
    fn read() -> Result<Self> {
        let mut run_time = Self::default();
        for program in loaded_programs() {
            let program = program.context("cannot list the kernel's programs")?;
            let us = program.run_time().as_nanos() as f64 / 1e3;
            run_time.all_us += us;
            if program.name_as_str().is_some_and(|name| CLIENT_PROGRAMS.contains(&name)) {
                run_time.connect_us += us;
            }
        }
        Ok(run_time)
    }

    fn since(self, before: Self) -> Self {
        Self {
            connect_us: self.connect_us - before.connect_us,
            all_us: self.all_us - before.all_us,
        }
    }
}
