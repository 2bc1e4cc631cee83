//! Shell: cold starts on a real cluster, split into steps, in the profiles `fast` and `standard`. The peer is the same
//! program as a Deployment behind kube-proxy.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::{
    cluster_context::{BenchClientPod, BenchCluster, ClusterBenchContext, SYSTEM_NAMESPACE},
    cold_start_stages::{ClusterColdStart, ColdStartStage, ColdStartTraces},
    object_watch::ObjectWatch,
    plain_deployment::PlainDeployment,
    report::{BenchGoal, BenchRow, case_row},
    stats::median,
};
use crate::{load::LoadRecord, sh};

/// Number of measured cold starts in a profile, each of a service of its own.
const WAKES: usize = 60;
/// Cold starts before them that are dropped: the first one opens the connection to the API server, with cold caches.
const WARM_UP: usize = 2;

/// Consecutive steps from one stage to the next: case name, start, end. A start of `None` is the request. The last,
/// `start`, is the sum of those after `decide`.
const STEPS: [(&str, Option<ColdStartStage>, ColdStartStage); 9] = [
    ("decide", None, ColdStartStage::Decided),
    ("patch", Some(ColdStartStage::Decided), ColdStartStage::Patched),
    ("pod_created", Some(ColdStartStage::Patched), ColdStartStage::Created),
    ("pod_bound", Some(ColdStartStage::Created), ColdStartStage::Bound),
    ("sandbox_asked", Some(ColdStartStage::Bound), ColdStartStage::SandboxRequested),
    ("sandbox_ready", Some(ColdStartStage::SandboxRequested), ColdStartStage::SandboxReady),
    ("container_started", Some(ColdStartStage::SandboxReady), ColdStartStage::Started),
    ("listening", Some(ColdStartStage::Started), ColdStartStage::Listening),
    ("start", Some(ColdStartStage::Decided), ColdStartStage::Listening),
];

/// One profile of an installation, with the case names of its rows.
#[derive(Clone, Copy, Debug)]
struct BenchProfile {
    name: &'static str,
    /// Suffix of its case names.
    case_suffix: &'static str,
    /// True if pods of the peer mount a service account token.
    mounts_token: bool,
}

const STANDARD: BenchProfile =
    BenchProfile { name: "standard", case_suffix: "", mounts_token: true };
const FAST: BenchProfile = BenchProfile { name: "fast", case_suffix: "_fast", mounts_token: false };
/// Settings in which `standard` differs from `fast`: ConfigMap, key, value.
const STANDARD_SETTINGS: [(&str, &str, &str); 2] = [
    ("config-defaults", "automount-service-account-token", "true"),
    ("config-deployment", "bind-pods", "false"),
];
/// Time after which a changed ConfigMap is in force in every replica.
const SETTING_EFFECTIVE_AFTER: Duration = Duration::from_secs(20);

/// Measures cold starts with the fast and the standard settings, and those of the peer in both proxy modes.
pub(super) fn run(cluster_context: &ClusterBenchContext) -> Result<Vec<BenchRow>> {
    let mut rows = Vec::new();
    {
        let cluster = cluster_context.create_cluster(2, "iptables")?;
        cluster.install("fast")?;
        let clients = cluster.create_client_pods()?;
        rows.extend(measure_profile(&cluster, &clients, FAST, cluster_context)?);
        // A value in a ConfigMap belongs to the operator: an installation with another profile would keep it.
        for (map, key, value) in STANDARD_SETTINGS {
            let patch = format!("{{\"data\":{{\"{key}\":\"{value}\"}}}}");
            cluster.kubectl(&[
                "patch",
                "configmap",
                "-n",
                SYSTEM_NAMESPACE,
                map,
                "--patch",
                &patch,
            ])?;
        }
        // No status shows that every replica has read the ConfigMap.
        sh::sleep(SETTING_EFFECTIVE_AFTER);
        rows.extend(measure_profile(&cluster, &clients, STANDARD, cluster_context)?);
    }
    // A cluster has one proxy mode: the other mode needs another cluster, and there only the peer is measured.
    let cluster = cluster_context.create_cluster(2, "nftables")?;
    let clients = cluster.create_client_pods()?;
    for profile in [FAST, STANDARD] {
        let peer = PlainDeployment::new(&cluster, &clients[0], "plain", profile.mounts_token)?;
        let times = (0..cluster_context.rounds).map(|round| {
            let time = peer.measure_start(&cluster, &clients[round as usize % clients.len()])?;
            peer.scale_to_zero(&cluster)?;
            Ok(time)
        });
        let times: Vec<f64> = times.collect::<Result<_>>()?;
        let case = format!("total{}", profile.case_suffix);
        rows.push(case_row(&case, "kube-proxy-nftables", "ms", &times, BenchGoal::None));
    }
    Ok(rows)
}

/// Measures cold starts of Rouse and, between them, of the peer behind kube-proxy in iptables mode.
fn measure_profile(
    cluster: &BenchCluster,
    clients: &[BenchClientPod],
    profile: BenchProfile,
    cluster_context: &ClusterBenchContext,
) -> Result<Vec<BenchRow>> {
    let names: Vec<String> =
        (0..WAKES + WARM_UP).map(|index| format!("{}-{index}", profile.name)).collect();
    cluster.create_sleeping_services(&names)?;
    let peer = PlainDeployment::new(
        cluster,
        &clients[0],
        &format!("peer-{}", profile.name),
        profile.mounts_token,
    )?;
    // Begins before the first request, or the first pods would be missing.
    let watched = ObjectWatch::watch_pods(cluster)?;
    let (mut records, mut peer_times) = (Vec::new(), Vec::new());
    // Starts of the peer are spread over the whole run, so that both meet the same state of the machine.
    let every = (WAKES / cluster_context.rounds as usize).max(1);
    for (index, name) in names.iter().enumerate() {
        let client = &clients[index % clients.len()];
        records.push((client.node.clone(), wake_service(cluster, client, name)?));
        if index % every == 0 && peer_times.len() < cluster_context.rounds as usize {
            peer_times.push(peer.measure_start(cluster, client)?);
            peer.scale_to_zero(cluster)?;
        }
    }
    // Logs are read once, after all cold starts: reading them would disturb the measurement.
    let (autoscaler, controller) =
        (cluster.component_log("autoscaler")?, cluster.component_log("controller")?);
    let logs =
        cluster.nodes().into_iter().map(|node| cluster.process_log(&format!("{node}-containerd")));
    let containerd = logs.collect::<Result<Vec<String>>>()?.concat();
    let pods = watched.observations();
    let traces = ColdStartTraces {
        pods: &pods,
        autoscaler: &autoscaler,
        controller: &controller,
        containerd: &containerd,
    };
    let cold_starts = records
        .iter()
        .skip(WARM_UP)
        .map(|(node, it)| (node.as_str(), ClusterColdStart::from_record(it, &traces)));
    let cold_starts: Vec<(&str, ClusterColdStart)> = cold_starts.collect();
    cluster_context.write_result(
        &format!("cluster-wake{}.txt", profile.case_suffix),
        &format_cold_starts(&cold_starts),
    )?;
    Ok(profile_rows(&cold_starts, &peer_times, profile))
}

/// Sends one request to a sleeping service.
pub(super) fn wake_service(
    cluster: &BenchCluster,
    client: &BenchClientPod,
    name: &str,
) -> Result<LoadRecord> {
    let address = format!("{}:80", cluster.cluster_ip(name)?);
    let host = format!("{name}.default.svc.cluster.local");
    let load =
        ["load", "--addr", &address, "--host", &host, "--stages", "1x60s", "--requests", "1"];
    let text = cluster.run_in_pod(client, &load)?;
    let record: LoadRecord = serde_json::from_str(text.trim())
        .with_context(|| format!("{name}: cannot read `{}`", text.trim()))?;
    // A lost request has no time that could be compared.
    if !record.is_answered() {
        bail!("{name} got no response from a pod: status {} {}", record.status, record.error);
    }
    Ok(record)
}

/// Rows of one profile, from the cold starts, each with the node of its client. Totals are compared with their own time
/// until `listen`, and with the peer.
fn profile_rows(
    cold_starts: &[(&str, ClusterColdStart)],
    peer_times: &[f64],
    profile: BenchProfile,
) -> Vec<BenchRow> {
    let case = |name: &str| format!("{name}{}", profile.case_suffix);
    let values = |value: &dyn Fn(&ClusterColdStart) -> Option<f64>| -> Vec<f64> {
        cold_starts.iter().filter_map(|(_, cold_start)| value(cold_start)).collect()
    };
    let mut rows: Vec<BenchRow> = STEPS
        .iter()
        .map(|(name, from, to)| {
            let values = values(&|cold_start| match from {
                Some(from) => cold_start.ms_between(*from, *to),
                None => cold_start.ms_until(*to),
            });
            case_row(&case(name), "rouse", "ms", &values, BenchGoal::None)
        })
        // A step that no log records has no row.
        .filter(|row| row.n > 0)
        .collect();
    rows.extend(first_byte_rows(cold_starts, profile));
    // A pod cannot respond before it listens, so only what comes behind this moment is Rouse's own time.
    let until = values(&|cold_start| cold_start.ms_until(ColdStartStage::Listening));
    // The goal of the total: 10 % above the time until `listen`, and at most a quarter of the peer's.
    let max_ms = median(&until).value * 1.1;
    let max_ms = max_ms.min(median(peer_times).value / 4.0);
    let goal = BenchGoal::AtMost((max_ms * 10.0).round() / 10.0);
    rows.push(case_row(&case("until_listening"), "rouse", "ms", &until, BenchGoal::None));
    // Shows that requests do not wait for the kubelet's readiness report: that one arrives after the response.
    let ready = values(&ClusterColdStart::first_byte_to_ready);
    rows.push(case_row(&case("first_byte_to_ready"), "rouse", "ms", &ready, BenchGoal::None));
    rows.push(case_row(
        &case("total"),
        "rouse",
        "ms",
        &values(&|cold_start| Some(cold_start.total())),
        goal,
    ));
    let subject = "kube-proxy-iptables";
    rows.push(case_row(&case("total"), subject, "ms", peer_times, BenchGoal::None));
    rows
}

/// Rows of the times from `listen` to the first byte, for pods on the client's node and on the other one. A cold start
/// whose node the watch has not shown belongs to neither.
fn first_byte_rows(
    cold_starts: &[(&str, ClusterColdStart)],
    profile: BenchProfile,
) -> [BenchRow; 2] {
    let unknown = cold_starts.iter().filter(|(_, it)| it.node.is_empty()).count();
    if unknown > 0 {
        println!("cluster-wake: {unknown} cold starts without an observed node are left out");
    }
    let times = |is_same_node: bool| -> Vec<f64> {
        let chosen = cold_starts.iter().filter(|(client_node, it)| {
            !it.node.is_empty() && (*client_node == it.node) == is_same_node
        });
        chosen.filter_map(|(_, it)| it.listen_to_first_byte()).collect()
    };
    let row = |name: &str, is_same_node, goal| {
        let case = format!("{name}{}", profile.case_suffix);
        case_row(&case, "rouse", "ms", &times(is_same_node), goal)
    };
    // Between two nodes the response also crosses the cluster's bridge, so the goal is higher.
    [
        row("listen_to_first_byte", true, BenchGoal::P50P99AtMost(1.0, 5.0)),
        row("listen_to_first_byte_other_node", false, BenchGoal::AtMost(2.0)),
    ]
}

/// Formats all cold starts, one a line, slowest last, to look for outliers.
fn format_cold_starts(cold_starts: &[(&str, ClusterColdStart)]) -> String {
    let mut cold_starts: Vec<&(&str, ClusterColdStart)> = cold_starts.iter().collect();
    cold_starts.sort_by(|(_, one), (_, other)| one.total().total_cmp(&other.total()));
    let line = |(client_node, cold_start): &&(&str, ClusterColdStart)| {
        let reached = cold_start.stage_times.keys().map(|stage| {
            format!(" {stage:?} {:.1}", cold_start.ms_until(*stage).unwrap_or(f64::NAN))
        });
        let reached: String = reached.collect();
        format!("{client_node} -> {}: {:.1} ms;{reached}\n", cold_start.node, cold_start.total())
    };
    cold_starts.iter().map(line).collect()
}
