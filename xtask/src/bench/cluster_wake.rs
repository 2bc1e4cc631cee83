//! Shell: cold starts on a real cluster, split into steps, with and without the account's token; beside them the same
//! program as a Deployment behind kube-proxy.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::{
    peer::PlainDeployment,
    report::{BenchGoal, BenchRow, case_row},
    site::{BenchClientPod, BenchCluster, ClusterBenchContext, SYSTEM_NAMESPACE},
    stages::{ClusterColdStart, ColdStartStage, ColdStartTraces},
    stats::median,
    watched::ObjectWatch,
};
use crate::{load::LoadRecord, sh};

/// Number of sleeping services in a profile. Each gets one cold start.
const WAKES: usize = 60;
/// Cold starts that are dropped: the first one opens the connection to the API server, and finds caches cold.
const WARM_UP: usize = 2;

/// Consecutive steps: case name, start, end. A start of `None` is the request.
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

pub(super) fn run(clusters: &ClusterBenchContext) -> Result<Vec<BenchRow>> {
    let mut rows = Vec::new();
    {
        let site = clusters.create_cluster(2, "iptables")?;
        site.install("fast")?;
        let places = site.create_client_pods()?;
        rows.extend(measure_profile(&site, &places, FAST, clusters)?);
        // A value in a ConfigMap belongs to the operator: an installation with another profile would keep it.
        for (map, key, value) in STANDARD_SETTINGS {
            let patch = format!("{{\"data\":{{\"{key}\":\"{value}\"}}}}");
            site.kubectl(&["patch", "configmap", "-n", SYSTEM_NAMESPACE, map, "--patch", &patch])?;
        }
        sh::sleep(SETTING_EFFECTIVE_AFTER);
        rows.extend(measure_profile(&site, &places, STANDARD, clusters)?);
    }
    // A cluster has one proxy mode: the other mode needs another cluster, and there only the peer is measured.
    let site = clusters.create_cluster(2, "nftables")?;
    let places = site.create_client_pods()?;
    for profile in [FAST, STANDARD] {
        let peer = PlainDeployment::new(&site, &places[0], "plain", profile.mounts_token)?;
        let times = (0..clusters.rounds).map(|round| {
            let time = peer.measure_start(&site, &places[round as usize % places.len()])?;
            peer.scale_to_zero(&site)?;
            Ok(time)
        });
        let times: Vec<f64> = times.collect::<Result<_>>()?;
        let case = format!("total{}", profile.case_suffix);
        rows.push(case_row(&case, "kube-proxy-nftables", "ms", &times, None, BenchGoal::None));
    }
    Ok(rows)
}

/// Cold starts of Rouse and, between them, of the peer behind kube-proxy in iptables mode.
fn measure_profile(
    site: &BenchCluster,
    places: &[BenchClientPod],
    profile: BenchProfile,
    clusters: &ClusterBenchContext,
) -> Result<Vec<BenchRow>> {
    let names: Vec<String> =
        (0..WAKES + WARM_UP).map(|index| format!("{}-{index}", profile.name)).collect();
    site.create_sleeping_services(&names)?;
    let peer = PlainDeployment::new(
        site,
        &places[0],
        &format!("peer-{}", profile.name),
        profile.mounts_token,
    )?;
    let watched = ObjectWatch::watch_pods(site)?;
    let (mut records, mut peers) = (Vec::new(), Vec::new());
    // Peers are spread over the whole run, so that both meet the same state of the machine.
    let every = (WAKES / clusters.rounds as usize).max(1);
    for (index, name) in names.iter().enumerate() {
        let place = &places[index % places.len()];
        records.push((place.node.clone(), wake_service(site, place, name)?));
        if index % every == 0 && peers.len() < clusters.rounds as usize {
            peers.push(peer.measure_start(site, place)?);
            peer.scale_to_zero(site)?;
        }
    }
    // Logs are read once, after all cold starts: reading them would disturb the measurement.
    let (autoscaler, controller) =
        (site.component_log("autoscaler")?, site.component_log("controller")?);
    let logs = site.nodes().into_iter().map(|node| site.process_log(&format!("{node}-containerd")));
    let containerd = logs.collect::<Result<Vec<String>>>()?.concat();
    let pods = watched.observations();
    let traces = ColdStartTraces {
        pods: &pods,
        autoscaler: &autoscaler,
        controller: &controller,
        containerd: &containerd,
    };
    let wakes = records
        .iter()
        .skip(WARM_UP)
        .map(|(from, it)| (from.as_str(), ClusterColdStart::from_record(it, &traces)));
    let wakes: Vec<(&str, ClusterColdStart)> = wakes.collect();
    clusters.write_result(
        &format!("cluster-wake{}.txt", profile.case_suffix),
        &format_cold_starts(&wakes),
    )?;
    Ok(profile_rows(&wakes, &peers, profile))
}

/// Sends one request to a sleeping service.
fn wake_service(site: &BenchCluster, place: &BenchClientPod, name: &str) -> Result<LoadRecord> {
    let address = format!("{}:80", site.cluster_ip(name)?);
    let host = format!("{name}.default.svc.cluster.local");
    let load =
        ["load", "--addr", &address, "--host", &host, "--stages", "1x60s", "--requests", "1"];
    let text = site.run_in_pod(place, &load)?;
    let record: LoadRecord = serde_json::from_str(text.trim())
        .with_context(|| format!("{name}: cannot read `{}`", text.trim()))?;
    if !record.is_answered() {
        bail!("{name} was not answered: status {} {}", record.status, record.error);
    }
    Ok(record)
}

/// Rows of one profile. Totals are compared with their own time until `listen`, and with the peer.
fn profile_rows(
    wakes: &[(&str, ClusterColdStart)],
    peers: &[f64],
    profile: BenchProfile,
) -> Vec<BenchRow> {
    let case = |name: &str| format!("{name}{}", profile.case_suffix);
    let of = |value: &dyn Fn(&ClusterColdStart) -> Option<f64>| -> Vec<f64> {
        wakes.iter().filter_map(|(_, wake)| value(wake)).collect()
    };
    let mut rows: Vec<BenchRow> = STEPS
        .iter()
        .map(|(name, from, to)| {
            let values = of(&|wake| match from {
                Some(from) => wake.ms_between(*from, *to),
                None => wake.ms_until(*to),
            });
            case_row(&case(name), "rouse", "ms", &values, None, BenchGoal::None)
        })
        // A step that no log records has no row.
        .filter(|row| row.n > 0)
        .collect();
    // Between two nodes the response also crosses the cluster's bridge, so the goal is higher.
    let near = |is_near: bool| -> Vec<f64> {
        let some = wakes.iter().filter(|(from, wake)| (*from == wake.node) == is_near);
        some.filter_map(|(_, wake)| wake.listen_to_first_byte()).collect()
    };
    let (one, two) = (BenchGoal::P50P99AtMost(1.0, 5.0), BenchGoal::AtMost(2.0));
    rows.push(case_row(&case("listen_to_first_byte"), "rouse", "ms", &near(true), None, one));
    let other = case("listen_to_first_byte_other_node");
    rows.push(case_row(&other, "rouse", "ms", &near(false), None, two));
    let until = of(&|wake| wake.ms_until(ColdStartStage::Listening));
    // The goal of the total: 10 % above the time until `listen`, and at most a quarter of the peer's.
    let most = median(&until).value * 1.1;
    let most = BenchGoal::AtMost((most.min(median(peers).value / 4.0) * 10.0).round() / 10.0);
    rows.push(case_row(&case("until_listening"), "rouse", "ms", &until, None, BenchGoal::None));
    // Shows that requests do not wait for the kubelet's readiness report: that one arrives after the response.
    let ready = of(&ClusterColdStart::first_byte_to_ready);
    rows.push(case_row(&case("first_byte_to_ready"), "rouse", "ms", &ready, None, BenchGoal::None));
    rows.push(case_row(&case("total"), "rouse", "ms", &of(&|wake| Some(wake.total())), None, most));
    rows.push(case_row(&case("total"), "kube-proxy-iptables", "ms", peers, None, BenchGoal::None));
    rows
}

/// All cold starts as text, one a line, slowest last, to look for outliers.
fn format_cold_starts(wakes: &[(&str, ClusterColdStart)]) -> String {
    let mut wakes: Vec<&(&str, ClusterColdStart)> = wakes.iter().collect();
    wakes.sort_by(|(_, one), (_, other)| one.total().total_cmp(&other.total()));
    let line = |(from, wake): &&(&str, ClusterColdStart)| {
        let reached = wake
            .stage_times
            .keys()
            .map(|stage| format!(" {stage:?} {:.1}", wake.ms_until(*stage).unwrap_or(f64::NAN)));
        let reached: String = reached.collect();
        format!("{from} -> {}: {:.1} ms;{reached}\n", wake.node, wake.total())
    };
    wakes.iter().map(line).collect()
}
