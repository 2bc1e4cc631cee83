//! Shell: cold starts on a real cluster, split into steps, with and without the account's token; beside them the same
//! program as a Deployment behind kube-proxy.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::{
    peer::PlainDeployment,
    report::{BenchGoal, BenchRow, row},
    site::{BenchClientPod, BenchCluster, ClusterBenchContext, SYSTEM},
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
    ("sandbox_asked", Some(ColdStartStage::Bound), ColdStartStage::SandboxAsked),
    ("sandbox_ready", Some(ColdStartStage::SandboxAsked), ColdStartStage::SandboxReady),
    ("container_started", Some(ColdStartStage::SandboxReady), ColdStartStage::Started),
    ("listening", Some(ColdStartStage::Started), ColdStartStage::Listening),
    ("start", Some(ColdStartStage::Decided), ColdStartStage::Listening),
];

/// One profile of an installation, with the case names of its rows.
#[derive(Clone, Copy, Debug)]
struct BenchProfile {
    name: &'static str,
    /// Suffix of its case names.
    end: &'static str,
    /// True if pods of the peer mount a service account token.
    token: bool,
}

const STANDARD: BenchProfile = BenchProfile { name: "standard", end: "", token: true };
const FAST: BenchProfile = BenchProfile { name: "fast", end: "_fast", token: false };
/// Settings in which `standard` differs from `fast`: ConfigMap, key, value.
const SLOW: [(&str, &str, &str); 2] = [
    ("config-defaults", "automount-service-account-token", "true"),
    ("config-deployment", "bind-pods", "false"),
];
/// Time after which a changed ConfigMap is in force in every replica.
const FOLLOWED: Duration = Duration::from_secs(20);

pub(super) fn run(clusters: &ClusterBenchContext) -> Result<Vec<BenchRow>> {
    let mut rows = Vec::new();
    {
        let site = clusters.site(2, "iptables")?;
        site.install("fast")?;
        let places = site.places()?;
        rows.extend(beside(&site, &places, FAST, clusters)?);
        // A value in a ConfigMap belongs to the operator: an installation with another profile would keep it.
        for (map, key, value) in SLOW {
            let patch = format!("{{\"data\":{{\"{key}\":\"{value}\"}}}}");
            site.kubectl(&["patch", "configmap", "-n", SYSTEM, map, "--patch", &patch])?;
        }
        sh::pause(FOLLOWED);
        rows.extend(beside(&site, &places, STANDARD, clusters)?);
    }
    // A cluster has one proxy mode: the other mode needs another cluster, and there only the peer is measured.
    let site = clusters.site(2, "nftables")?;
    let places = site.places()?;
    for profile in [FAST, STANDARD] {
        let peer = PlainDeployment::new(&site, &places[0], "plain", profile.token)?;
        let times = (0..clusters.rounds).map(|round| {
            let time = peer.wake(&site, &places[round as usize % places.len()])?;
            peer.sleep(&site)?;
            Ok(time)
        });
        let times: Vec<f64> = times.collect::<Result<_>>()?;
        let case = format!("total{}", profile.end);
        rows.push(row(&case, "kube-proxy-nftables", "ms", &times, None, BenchGoal::None));
    }
    Ok(rows)
}

/// Cold starts of Rouse and, between them, of the peer behind kube-proxy in iptables mode.
fn beside(
    site: &BenchCluster,
    places: &[BenchClientPod],
    profile: BenchProfile,
    clusters: &ClusterBenchContext,
) -> Result<Vec<BenchRow>> {
    let names: Vec<String> =
        (0..WAKES + WARM_UP).map(|index| format!("{}-{index}", profile.name)).collect();
    site.sleepers(&names)?;
    let peer =
        PlainDeployment::new(site, &places[0], &format!("peer-{}", profile.name), profile.token)?;
    let watched = ObjectWatch::pods(site)?;
    let (mut records, mut peers) = (Vec::new(), Vec::new());
    // Peers are spread over the whole run, so that both meet the same state of the machine.
    let every = (WAKES / clusters.rounds as usize).max(1);
    for (index, name) in names.iter().enumerate() {
        let place = &places[index % places.len()];
        records.push((place.node.clone(), wake(site, place, name)?));
        if index % every == 0 && peers.len() < clusters.rounds as usize {
            peers.push(peer.wake(site, place)?);
            peer.sleep(site)?;
        }
    }
    // Logs are read once, after all cold starts: reading them would disturb the measurement.
    let (autoscaler, controller) = (site.part_log("autoscaler")?, site.part_log("controller")?);
    let logs = site.nodes().into_iter().map(|node| site.log(&format!("{node}-containerd")));
    let containerd = logs.collect::<Result<Vec<String>>>()?.concat();
    let pods = watched.seen();
    let traces = ColdStartTraces {
        pods: &pods,
        autoscaler: &autoscaler,
        controller: &controller,
        containerd: &containerd,
    };
    let wakes = records
        .iter()
        .skip(WARM_UP)
        .map(|(from, it)| (from.as_str(), ClusterColdStart::of(it, &traces)));
    let wakes: Vec<(&str, ClusterColdStart)> = wakes.collect();
    clusters.keep(&format!("cluster-wake{}.txt", profile.end), &told(&wakes))?;
    Ok(judged(&wakes, &peers, profile))
}

/// Sends one request to a sleeping service.
fn wake(site: &BenchCluster, place: &BenchClientPod, name: &str) -> Result<LoadRecord> {
    let address = format!("{}:80", site.address(name)?);
    let host = format!("{name}.default.svc.cluster.local");
    let load =
        ["load", "--addr", &address, "--host", &host, "--stages", "1x60s", "--requests", "1"];
    let text = site.ask(place, &load)?;
    let record: LoadRecord = serde_json::from_str(text.trim())
        .with_context(|| format!("{name}: cannot read `{}`", text.trim()))?;
    if !record.is_answered() {
        bail!("{name} was not answered: status {} {}", record.status, record.error);
    }
    Ok(record)
}

/// Rows of one profile. Totals are compared with their own time until `listen`, and with the peer.
fn judged(
    wakes: &[(&str, ClusterColdStart)],
    peers: &[f64],
    profile: BenchProfile,
) -> Vec<BenchRow> {
    let case = |name: &str| format!("{name}{}", profile.end);
    let of = |value: &dyn Fn(&ClusterColdStart) -> Option<f64>| -> Vec<f64> {
        wakes.iter().filter_map(|(_, wake)| value(wake)).collect()
    };
    let mut rows: Vec<BenchRow> = STEPS
        .iter()
        .map(|(name, from, to)| {
            let values = of(&|wake| match from {
                Some(from) => wake.between(*from, *to),
                None => wake.until(*to),
            });
            row(&case(name), "rouse", "ms", &values, None, BenchGoal::None)
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
    rows.push(row(&case("listen_to_first_byte"), "rouse", "ms", &near(true), None, one));
    let other = case("listen_to_first_byte_other_node");
    rows.push(row(&other, "rouse", "ms", &near(false), None, two));
    let until = of(&|wake| wake.until(ColdStartStage::Listening));
    // The goal of the total: 10 % above the time until `listen`, and at most a quarter of the peer's.
    let most = median(&until).value * 1.1;
    let most = BenchGoal::AtMost((most.min(median(peers).value / 4.0) * 10.0).round() / 10.0);
    rows.push(row(&case("until_listening"), "rouse", "ms", &until, None, BenchGoal::None));
    // Shows that requests do not wait for the kubelet's readiness report: that one arrives after the response.
    let ready = of(&ClusterColdStart::first_byte_to_ready);
    rows.push(row(&case("first_byte_to_ready"), "rouse", "ms", &ready, None, BenchGoal::None));
    rows.push(row(&case("total"), "rouse", "ms", &of(&|wake| Some(wake.total())), None, most));
    rows.push(row(&case("total"), "kube-proxy-iptables", "ms", peers, None, BenchGoal::None));
    rows
}

/// All cold starts as text, one a line, slowest last, to look for outliers.
fn told(wakes: &[(&str, ClusterColdStart)]) -> String {
    let mut wakes: Vec<&(&str, ClusterColdStart)> = wakes.iter().collect();
    wakes.sort_by(|(_, one), (_, other)| one.total().total_cmp(&other.total()));
    let line = |(from, wake): &&(&str, ClusterColdStart)| {
        let reached = wake
            .reached
            .keys()
            .map(|stage| format!(" {stage:?} {:.1}", wake.until(*stage).unwrap_or(f64::NAN)));
        let reached: String = reached.collect();
        format!("{from} -> {}: {:.1} ms;{reached}\n", wake.node, wake.total())
    };
    wakes.iter().map(line).collect()
}
