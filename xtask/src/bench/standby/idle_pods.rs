//! Shell: processor time and memory of a hundred frozen pods, and processor time of their agents.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};

use super::{BenchCluster, BenchGoal, BenchRow, STANDBY, case_row, create_services, wait_for_pods};
use crate::{
    bench::{footprint::cpu_ticks, process_memory::pss_mib},
    sh,
};

/// Number of frozen pods.
const PODS: usize = 100;
/// Number of services that are created at once.
const BATCH: usize = 25;
/// Time to wait after the last freeze, for the work that follows it to end.
const SETTLE_TIME: Duration = Duration::from_secs(20);
/// Time over which processor time is measured.
const CPU_SAMPLE_TIME: Duration = Duration::from_secs(30);

/// Measures all figures on a cluster without other pods of services.
pub(super) fn run(cluster: &BenchCluster) -> Result<Vec<BenchRow>> {
    for batch in 0..PODS / BATCH {
        create_services(cluster, &format!("idle{batch}-"), BATCH, STANDBY)?;
    }
    wait_for_pods(cluster, PODS, PODS)?;
    sh::sleep(SETTLE_TIME);
    let pods = cluster.frozen_pods();
    let processes = cluster.component_processes()?;
    let agents: Vec<u32> =
        processes.iter().filter(|(name, _)| name == "agent").map(|(_, id)| *id).collect();
    let read_agents = || agents.iter().map(|id| cpu_ticks(*id)).collect::<Result<Vec<f64>>>();
    // Only the difference counts: the pods have used processor time for their start.
    let (pods_before, agents_before) = (cpu_us(&pods)?, read_agents()?);
    sh::sleep(CPU_SAMPLE_TIME);
    let (pods_after, agents_after) = (cpu_us(&pods)?, read_agents()?);
    // A pod that was thawed for a moment would have used processor time for another reason.
    if cluster.frozen_pods().len() != PODS {
        bail!("not all pods stayed frozen while their processor time was measured");
    }
    let pods_percent = (pods_after - pods_before) / CPU_SAMPLE_TIME.as_micros() as f64 * 100.0;
    // A tick is 10 ms, so ticks for each second are percent of one processor.
    let agent_percent =
        |(after, before): (&f64, &f64)| (after - before) / CPU_SAMPLE_TIME.as_secs_f64();
    let agents: Vec<f64> = agents_after.iter().zip(&agents_before).map(agent_percent).collect();
    let memory = pods.iter().map(|pod| memory_mib(pod)).collect::<Result<Vec<f64>>>()?;
    Ok(vec![
        case_row("idle_100_pods_cpu", "rouse", "percent", &[pods_percent], BenchGoal::AtMost(0.0)),
        case_row("idle_100_agent_cpu", "rouse", "percent", &agents, BenchGoal::AtMost(0.5)),
        case_row("idle_100_memory_each", "rouse", "MiB", &memory, BenchGoal::None),
    ])
}

/// Processor time of all pods together so far, in µs.
fn cpu_us(pods: &[PathBuf]) -> Result<f64> {
    let usage = |pod: &PathBuf| {
        let file = pod.join("cpu.stat");
        let text =
            fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        usage_us(&text).with_context(|| format!("no usage in {}", file.display()))
    };
    pods.iter().map(usage).sum()
}

/// Processor time in the text of a `cpu.stat` file (cgroup-v2.rst), in µs.
fn usage_us(stat: &str) -> Option<f64> {
    stat.lines().find_map(|line| line.strip_prefix("usage_usec "))?.trim().parse().ok()
}

/// Memory of all processes of a pod, in MiB. Of a page that several processes share, each has an equal part.
fn memory_mib(pod: &Path) -> Result<f64> {
    // The cgroup's own figure is missing where the memory controller is one of cgroup v1.
    let containers = fs::read_dir(pod).with_context(|| format!("no {}", pod.display()))?;
    let lists = containers.flatten().map(|container| container.path().join("cgroup.procs"));
    let lists: String = lists.filter_map(|list| fs::read_to_string(list).ok()).collect();
    lists.lines().filter_map(|id| id.parse().ok()).map(pss_mib).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usage_is_read_from_its_own_line() {
        let stat = "usage_usec 2024\nuser_usec 1000\nsystem_usec 1024\n";
        assert_eq!(usage_us(stat), Some(2024.0));
        assert_eq!(usage_us("user_usec 1000\n"), None);
    }
}
