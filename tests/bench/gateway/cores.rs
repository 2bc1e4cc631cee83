//! Shell: the two cores of the bench, and the time that each was busy.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};

/// Length of a tick in `/proc/stat`, in seconds (`USER_HZ`).
const TICK_S: f64 = 0.01;

/// Cores of the bench: one for the proxies, one for all else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BenchCores {
    /// Core of the clients, the pods and the bench itself.
    pub(crate) client: usize,
    /// Core of the proxies, with nothing else of the bench.
    pub(crate) proxy: usize,
}

/// Busy time of both cores, in seconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CoreTimes {
    pub(crate) client_s: f64,
    pub(crate) proxy_s: f64,
}

impl BenchCores {
    /// Chooses the cores. The default of the proxies' is the last one; the clients get another one.
    pub(crate) fn choose(proxy: Option<usize>) -> Result<Self> {
        let stat = read_stat()?;
        let count = stat.lines().filter(|line| line.starts_with("cpu")).count().saturating_sub(1);
        ensure!(count >= 2, "the bench needs two cores: one for a proxy, one for its clients");
        let proxy = proxy.unwrap_or(count - 1);
        ensure!(proxy < count, "there is no core {proxy}");
        Ok(Self { client: usize::from(proxy == 0), proxy })
    }

    /// Binds this process, and all that it starts from now on, to the core of the clients.
    pub(crate) fn bind_to_client_core(self) -> Result<()> {
        let mut cores = CpuSet::new();
        cores.set(self.client).context("the core's number is too high")?;
        sched_setaffinity(Pid::from_raw(0), &cores).context("cannot bind the bench to a core")
    }

    /// Busy time of both cores since the machine started.
    pub(crate) fn times(self) -> Result<CoreTimes> {
        let stat = read_stat()?;
        let client_s = busy_s(&stat, self.client)?;
        Ok(CoreTimes { client_s, proxy_s: busy_s(&stat, self.proxy)? })
    }
}

impl CoreTimes {
    pub(crate) fn since(self, earlier: Self) -> Self {
        Self { client_s: self.client_s - earlier.client_s, proxy_s: self.proxy_s - earlier.proxy_s }
    }
}

/// Busy time of one core: all but idle (fields 4 and 5) and steal (8).
fn busy_s(stat: &str, core: usize) -> Result<f64> {
    let name = format!("cpu{core} ");
    let line = stat.lines().find_map(|line| line.strip_prefix(&name));
    let line = line.with_context(|| format!("/proc/stat has no core {core}"))?;
    let ticks: Vec<f64> = line.split_whitespace().flat_map(str::parse).collect();
    ensure!(ticks.len() >= 7, "/proc/stat has too few fields");
    let busy = ticks.iter().enumerate().filter(|(index, _)| matches!(index, 0..=2 | 5 | 6));
    Ok(busy.map(|(_, ticks)| ticks).sum::<f64>() * TICK_S)
}

fn read_stat() -> Result<String> {
    fs::read_to_string("/proc/stat").context("cannot read /proc/stat")
}
