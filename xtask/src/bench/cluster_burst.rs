//! Shell: cold starts of many services at once, beside as many Deployments that Kubernetes alone starts.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use super::{
    cluster_context::{BenchClientPod, BenchCluster, ClusterBenchContext},
    cold_start_stages::container_started_at,
    object_watch::ObjectWatch,
    plain_deployment,
    report::{BenchGoal, BenchRow, case_row},
    stats::{quantile, sorted},
};
use crate::{load::unix_us, measure::BurstTimes, sh};

/// Cases: number of services at once, number of rounds, and the name.
const CASES: [(usize, usize, &str); 3] =
    [(1, 15, "services_1"), (20, 3, "services_20"), (50, 3, "services_50")];
/// Highest ratio of Rouse's 99th percentile to the one of plain Deployments.
const MAX_P99_RATIO: f64 = 1.3;
/// Time in which an idle controller of the cluster regains the 30 requests that it may send at once.
const API_BUDGET_REFILL: Duration = Duration::from_secs(2);

/// Times of services that got a request at the same moment, in ms from the request.
struct ColdStartBurst {
    /// Time until the watch showed a pod, for each service.
    created: Vec<f64>,
    first_byte: Vec<f64>,
}

/// Measures all cases. `rouse`: from the request to its first byte, and until the pod exists. `kubernetes`: from the
/// patch until the container runs, which is the earliest moment for any response. Neither mounts a token.
pub(super) fn run(cluster_context: &ClusterBenchContext) -> Result<Vec<BenchRow>> {
    let cluster = cluster_context.create_cluster(2, "iptables")?;
    cluster.install("fast")?;
    let clients = cluster.create_client_pods()?;
    let max_count = CASES.iter().map(|(count, ..)| *count).max().unwrap_or(0);
    let names =
        |prefix: &str| (0..max_count).map(|index| format!("{prefix}{index}")).collect::<Vec<_>>();
    let (services, peers) = (names("burst"), names("plain"));
    cluster.create_sleeping_services(&services)?;
    cluster.create(
        &peers.iter().map(|name| plain_deployment::manifest(name, false)).collect::<String>(),
    )?;
    let addresses =
        services.iter().map(|name| cluster.cluster_ip(name)).collect::<Result<Vec<_>>>()?;
    let mut rows = Vec::new();
    for (count, rounds, case) in CASES {
        let (mut rouse_times, mut created, mut deployment_times) =
            (Vec::new(), Vec::new(), Vec::new());
        // Both subjects in each round, so that they meet the same state of the machine.
        for round in 0..=rounds {
            let client = &clients[round % clients.len()];
            let wake_times = wake_all(&cluster, client, &services[..count], &addresses[..count])?;
            wait_until_asleep(&cluster, "serving.knative.dev/service")?;
            let started = start_deployments(&cluster, &peers[..count])?;
            // Pods of one subject that still end would slow the starts of the other.
            wait_until_asleep(&cluster, "app")?;
            // The first round finds caches cold.
            if round > 0 {
                rouse_times.extend(wake_times.first_byte);
                created.extend(wake_times.created);
                deployment_times.extend(started);
            }
        }
        // The goal is relative: a burst is bound by the node, which differs between machines.
        let max_ms = quantile(&sorted(&deployment_times), 0.99) * MAX_P99_RATIO;
        rows.push(case_row(
            case,
            "rouse",
            "ms",
            &rouse_times,
            BenchGoal::P99AtMost(max_ms.round()),
        ));
        rows.push(case_row(case, "kubernetes", "ms", &deployment_times, BenchGoal::None));
        let case = format!("{case}_pod_created");
        rows.push(case_row(&case, "rouse", "ms", &created, BenchGoal::None));
    }
    Ok(rows)
}

/// Sends a request to each of the services at the same moment.
fn wake_all(
    cluster: &BenchCluster,
    client: &BenchClientPod,
    names: &[String],
    addresses: &[String],
) -> Result<ColdStartBurst> {
    let watched = ObjectWatch::watch_pods(cluster)?;
    let targets = names.iter().zip(addresses);
    let targets: Vec<String> = targets
        .map(|(name, address)| format!("{address}:80={name}.default.svc.cluster.local"))
        .collect();
    // All requests leave one client process, so that they start within a few milliseconds.
    let text = cluster.run_in_pod(client, &["measure", "burst", "--to", &targets.join(",")])?;
    let burst: BurstTimes = serde_json::from_str(text.trim()).context("a burst printed no JSON")?;
    if burst.lost > 0 {
        bail!("{} of {} requests got no response", burst.lost, names.len());
    }
    // The watch also has pods of earlier rounds: only those created after this burst count.
    let observations = watched.observations();
    let first = |name: &String| {
        let prefix = format!("{name}-00001-deployment-");
        let mut pods = observations
            .iter()
            .filter(|it| it.at_us >= burst.at_us && it.name.starts_with(&prefix));
        pods.next().map(|it| (it.at_us - burst.at_us) as f64 / 1e3)
    };
    Ok(ColdStartBurst { created: names.iter().filter_map(first).collect(), first_byte: burst.ms })
}

/// Scales all Deployments at the same moment. Returns the time until the container of each started, in ms.
fn start_deployments(cluster: &BenchCluster, names: &[String]) -> Result<Vec<f64>> {
    let watched = ObjectWatch::watch_pods(cluster)?;
    let patched_us = scale_deployments(cluster, names, 1)?;
    let is_of_deployment =
        |pod: &str| names.iter().any(|name| pod.starts_with(&format!("{name}-")));
    cluster.wait("the Deployments' pods to be ready", || {
        let observations = watched.observations();
        let mut ready: Vec<&str> = observations
            .iter()
            .filter(|it| it.is_ready && is_of_deployment(&it.name))
            .map(|it| &*it.name)
            .collect();
        // A watch reports each pod many times, so names are counted once.
        ready.sort_unstable();
        ready.dedup();
        Ok((ready.len() >= names.len()).then_some(()))
    })?;
    // containerd logs the start of a container in µs; a pod's status has seconds only.
    let logs =
        cluster.nodes().into_iter().map(|node| cluster.process_log(&format!("{node}-containerd")));
    let containerd = logs.collect::<Result<Vec<String>>>()?.concat();
    let observations = watched.observations();
    let recent = observations
        .iter()
        .filter(|it| it.is_ready && it.at_us > patched_us && is_of_deployment(&it.name));
    let mut pods: Vec<&str> = recent.map(|it| &*it.name).collect();
    pods.sort_unstable();
    pods.dedup();
    let times = pods.into_iter().filter_map(|pod| container_started_at(pod, &containerd));
    let times: Vec<f64> = times.map(|at| at.saturating_sub(patched_us) as f64 / 1e3).collect();
    scale_deployments(cluster, names, 0)?;
    Ok(times)
}

/// Patches the scale of all Deployments. Returns the Unix time of the first request in µs.
fn scale_deployments(cluster: &BenchCluster, names: &[String], replicas: u32) -> Result<u64> {
    let path = |name: &String| format!("/apis/apps/v1/namespaces/default/deployments/{name}/scale");
    let mut curl = cluster.api_command(&path(&names[0]));
    curl.args(names[1..].iter().map(|name| cluster.url(&path(name))));
    curl.args(["-X", "PATCH", "-H", "Content-Type: application/merge-patch+json"]);
    curl.args(["--data", &format!("{{\"spec\":{{\"replicas\":{replicas}}}}}")]);
    curl.args([
        "--parallel",
        "--parallel-max",
        "64",
        "--write-out",
        "\npretransfer %{time_pretransfer}\n",
    ]);
    // The time that curl takes to start and to connect does not belong to the patch.
    let started_us = unix_us();
    let text = sh::capture(&mut curl)?;
    let pretransfer_s = text.lines().filter_map(|line| line.strip_prefix("pretransfer "));
    let pretransfer_s =
        pretransfer_s.filter_map(|it| it.trim().parse::<f64>().ok()).fold(f64::MAX, f64::min);
    if pretransfer_s == f64::MAX {
        bail!("curl printed no times");
    }
    Ok(started_us + (pretransfer_s * 1e6) as u64)
}

/// Waits until no pod has the label and the cluster's own controllers have no writes left. They may send 30 requests
/// at once and 20 a second after that, so the next case would wait for remaining writes.
fn wait_until_asleep(cluster: &BenchCluster, label: &str) -> Result<()> {
    cluster.wait("all pods to be gone", || {
        Ok(cluster.list(&["pods", "--selector", label])?.is_empty().then_some(()))
    })?;
    cluster.wait("all Deployments to have no pods", || {
        let deployments = cluster.list(&["deployments.apps"])?;
        let is_idle = |object: &Value| {
            // A status counts only if the controller has seen the latest scale.
            let generation = &object["metadata"]["generation"];
            object["status"]["observedGeneration"] == *generation
                && object["status"]["replicas"].is_null()
        };
        Ok(deployments.iter().all(is_idle).then_some(()))
    })?;
    sh::sleep(API_BUDGET_REFILL);
    Ok(())
}
