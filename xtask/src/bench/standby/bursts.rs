//! Shell: requests to many sleeping services at the same moment, on a cluster.

use anyhow::{Context as _, Result, bail};

use super::{
    BenchClientPod, BenchCluster, BenchGoal, BenchRow, NO_FIRST_POD, RoundValues, STANDBY,
    create_services, wait_for_pods, wake_rows,
};
use crate::measure::BurstTimes;

/// Number of services that are woken at once.
const SERVICES: usize = 50;
/// Maximum number of measured rounds, after a first one that finds cold caches and is not measured.
const MAX_BURSTS: u32 = 3;

/// Measures the wakes of frozen pods, and of as many services without pods.
pub(super) fn run(
    cluster: &BenchCluster,
    clients: &[BenchClientPod],
    rounds: u32,
) -> Result<Vec<BenchRow>> {
    let kept = create_services(cluster, "burst-kept", SERVICES, STANDBY)?;
    let cold = create_services(cluster, "burst-cold", SERVICES, NO_FIRST_POD)?;
    let subjects = [("rouse", targets(cluster, &kept)?), ("cold", targets(cluster, &cold)?)];
    let mut times = RoundValues::new();
    for round in 0..=rounds.min(MAX_BURSTS) as usize {
        for (subject, targets) in &subjects {
            // The pods of the burst before are frozen or gone by then.
            wait_for_pods(cluster, SERVICES, SERVICES)?;
            let measured = wake_all(cluster, &clients[round % clients.len()], targets)
                .with_context(|| (*subject).to_owned())?;
            if round > 0 {
                times.entry(*subject).or_default().extend(measured);
            }
        }
    }
    Ok(wake_rows("burst_50", &times, BenchGoal::P99AtMost(100.0)))
}

/// Returns the addresses of services as `xtask measure burst` takes them.
pub(super) fn targets(cluster: &BenchCluster, names: &[String]) -> Result<String> {
    let target = |name: &String| Ok(format!("{}:80={name}", cluster.cluster_ip(name)?));
    Ok(names.iter().map(target).collect::<Result<Vec<String>>>()?.join(","))
}

/// Sends a request to each target at the same moment. Returns the times until their first bytes, in ms.
pub(super) fn wake_all(
    cluster: &BenchCluster,
    client: &BenchClientPod,
    targets: &str,
) -> Result<Vec<f64>> {
    let text = cluster.run_in_pod(client, &["measure", "burst", "--to", targets])?;
    let burst: BurstTimes = serde_json::from_str(text.trim()).context("a burst printed no JSON")?;
    if burst.lost > 0 {
        bail!("{} of {} requests got no response", burst.lost, burst.ms.len());
    }
    Ok(burst.ms)
}
