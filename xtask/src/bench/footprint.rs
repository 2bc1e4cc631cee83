//! Shell: resources that an installation and its sleeping services use on one node: memory and CPU of each daemon,
//! objects, bytes in etcd, and bytes sent to watches.

use std::{collections::BTreeMap, fs, time::Duration};

use anyhow::{Context as _, Result};

use super::{
    cluster_context::{BenchCluster, ClusterBenchContext},
    process_memory::pss_mib,
    report::{BenchGoal, BenchRow, case_row},
};
use crate::sh;

/// Numbers of services at which the resources are measured, with the names of the cases.
const CASES: [(usize, &str); 3] =
    [(0, "services_0"), (100, "services_100"), (1_000, "services_1000")];
/// Number of services created at once; each is ready before the API server gets the next batch.
const BATCH: usize = 100;
/// Time over which CPU is measured.
const CPU_SAMPLE_TIME: Duration = Duration::from_secs(30);
/// Time to settle after the last change.
const SETTLE_TIME: Duration = Duration::from_secs(20);
/// Kinds of the objects that exist for a service.
const KINDS: [&str; 11] = [
    "services.serving.knative.dev",
    "configurations.serving.knative.dev",
    "routes.serving.knative.dev",
    "revisions.serving.knative.dev",
    "podautoscalers.autoscaling.internal.knative.dev",
    "serverlessservices.networking.internal.knative.dev",
    "images.caching.internal.knative.dev",
    "deployments.apps",
    "replicasets.apps",
    "services",
    "endpointslices.discovery.k8s.io",
];

/// Figures of the cluster as a whole.
#[derive(Clone, Copy, Debug, Default)]
struct ClusterFootprint {
    objects: f64,
    etcd_kib: f64,
    watch_kib: f64,
}

pub(super) fn run(cluster_context: &ClusterBenchContext) -> Result<Vec<BenchRow>> {
    let cluster = cluster_context.create_cluster(1, "iptables")?;
    cluster.install("standard")?;
    let (mut rows, mut before, mut count_before) = (Vec::new(), None::<ClusterFootprint>, 0);
    for (count, case) in CASES {
        let names: Vec<String> =
            (count_before..count).map(|index| format!("foot{index}")).collect();
        for batch in names.chunks(BATCH) {
            cluster.create_sleeping_services(batch)?;
        }
        // Statuses and slices are still written for a while after a service is ready.
        sh::sleep(SETTLE_TIME);
        rows.extend(daemon_rows(&cluster, case)?);
        let now = read_footprint(&cluster)?;
        if let Some(before) = before {
            rows.extend(per_service_rows(case, count - count_before, before, now));
        }
        (before, count_before) = (Some(now), count);
    }
    Ok(rows)
}

/// Increase for each service that was added since `before`.
fn per_service_rows(
    case: &str,
    services: usize,
    before: ClusterFootprint,
    now: ClusterFootprint,
) -> [BenchRow; 3] {
    let row = |name: &str, unit: &str, value: f64, goal| {
        case_row(&format!("{case}_{name}"), "rouse", unit, &[value / services as f64], goal)
    };
    [
        row("objects_each", "objects", now.objects - before.objects, BenchGoal::AtMost(15.0)),
        row("etcd_each", "KiB", now.etcd_kib - before.etcd_kib, BenchGoal::None),
        row("watch_each", "KiB", now.watch_kib - before.watch_kib, BenchGoal::None),
    ]
}

/// Memory and CPU of each daemon, and memory of all daemons together.
fn daemon_rows(cluster: &BenchCluster, case: &str) -> Result<Vec<BenchRow>> {
    let processes = cluster.component_processes()?;
    let memory = sum_by_component(&processes, pss_mib);
    let before = sum_by_component(&processes, cpu_ticks);
    sh::sleep(CPU_SAMPLE_TIME);
    let after = sum_by_component(&processes, cpu_ticks);
    let maps = cluster.maps_mib()?;
    let mut rows: Vec<BenchRow> = memory
        .iter()
        .map(|(component, mib)| case_row(case, component, "MiB", &[*mib], BenchGoal::None))
        .collect();
    rows.push(case_row(case, "kernel maps", "MiB", &[maps], BenchGoal::None));
    let total = memory.values().sum::<f64>() + maps;
    // The goal is stated for one hundred services; the other cases show the growth.
    let goal = if case == "services_100" { BenchGoal::AtMost(100.0) } else { BenchGoal::None };
    rows.push(case_row(case, "rouse", "MiB", &[total], goal));
    let cpu = format!("{case}_cpu");
    for (component, ticks) in &after {
        // A tick is 10 ms: so many a second are so many percent of one processor.
        let used_ticks = ticks - before.get(component).copied().unwrap_or(0.0);
        let percent = used_ticks / CPU_SAMPLE_TIME.as_secs_f64();
        rows.push(case_row(&cpu, component, "percent", &[percent], BenchGoal::None));
    }
    Ok(rows)
}

fn sum_by_component(
    processes: &[(String, u32)],
    read: fn(u32) -> Result<f64>,
) -> BTreeMap<&str, f64> {
    let mut sums = BTreeMap::new();
    for (component, id) in processes {
        *sums.entry(component.as_str()).or_default() += read(*id).unwrap_or(0.0);
    }
    sums
}

/// User and system time of a process so far, in ticks.
pub(super) fn cpu_ticks(id: u32) -> Result<f64> {
    let file = format!("/proc/{id}/stat");
    let text = fs::read_to_string(&file).with_context(|| format!("cannot read {file}"))?;
    // The name in parentheses may hold blanks, so fields are counted after it: utime and stime are 14 and 15 of
    // proc(5).
    let (_, rest) = text.rsplit_once(") ").context("no name")?;
    let fields: Vec<f64> = rest.split(' ').map(|it| it.trim().parse().unwrap_or(0.0)).collect();
    Ok(fields.get(11).unwrap_or(&0.0) + fields.get(12).unwrap_or(&0.0))
}

fn read_footprint(cluster: &BenchCluster) -> Result<ClusterFootprint> {
    let objects = cluster.kubectl(&[
        "get",
        &KINDS.join(","),
        "--namespace",
        "default",
        "--no-headers",
        "--output",
        "name",
    ])?;
    // etcd listens on the control plane's loopback only.
    let etcd = cluster.run_inside(&["curl", "--silent", "http://127.0.0.1:2379/metrics"])?;
    let server = cluster.kubectl(&["get", "--raw", "/metrics"])?;
    Ok(ClusterFootprint {
        objects: objects.lines().filter(|line| !line.is_empty()).count() as f64,
        etcd_kib: sum_metric(&etcd, "etcd_mvcc_db_total_size_in_use_in_bytes") / 1024.0,
        watch_kib: sum_metric(&server, "apiserver_watch_events_sizes_sum") / 1024.0,
    })
}

/// Sum of a metric over all its label sets.
fn sum_metric(text: &str, name: &str) -> f64 {
    let lines = text
        .lines()
        .filter(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' '])));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_is_summed_over_its_labels_and_told_from_longer_names() {
        let text = "# HELP a b\na{x=\"1\"} 2\na{x=\"2\"} 3.5\na_sum 100\na 1\n";
        assert_eq!(sum_metric(text, "a"), 6.5);
        assert_eq!(sum_metric(text, "missing"), 0.0);
    }
}
