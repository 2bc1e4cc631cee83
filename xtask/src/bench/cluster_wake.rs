//! Shell: from a request to a sleeping service on a real cluster until its first byte, split into its steps, with and
//! without the account's token; beside it the same program as a Deployment behind kube-proxy.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::{
    peer::Peer,
    report::{Goal, Row, row},
    site::{Clusters, Place, SYSTEM, Site},
    stages::{Stage, Traces, Wake},
    stats::median,
    watched::Watched,
};
use crate::{load::Record, sh};

/// Sleeping services, each woken once, with the token and without it.
const WAKES: usize = 60;
/// One that is thrown away: the first has no connection to the API server open yet, and caches are cold.
const WARM_UP: usize = 2;

/// Cases that follow one another: name, from, to. `None` is the request.
const STEPS: [(&str, Option<Stage>, Stage); 9] = [
    ("decide", None, Stage::Decided),
    ("patch", Some(Stage::Decided), Stage::Patched),
    ("pod_created", Some(Stage::Patched), Stage::Created),
    ("pod_bound", Some(Stage::Created), Stage::Bound),
    ("sandbox_asked", Some(Stage::Bound), Stage::SandboxAsked),
    ("sandbox_ready", Some(Stage::SandboxAsked), Stage::SandboxReady),
    ("container_started", Some(Stage::SandboxReady), Stage::Started),
    ("listening", Some(Stage::Started), Stage::Listening),
    ("start", Some(Stage::Decided), Stage::Listening),
];

/// One profile of the installation.
#[derive(Clone, Copy, Debug)]
struct Profile {
    name: &'static str,
    /// Ends the names of its cases.
    end: &'static str,
    /// Whether pods of the peer get a token.
    token: bool,
}

const STANDARD: Profile = Profile { name: "standard", end: "", token: true };
const FAST: Profile = Profile { name: "fast", end: "_fast", token: false };
/// What the profile `fast` sets, as `standard` has it.
const SLOW: [(&str, &str, &str); 2] = [
    ("config-defaults", "automount-service-account-token", "true"),
    ("config-deployment", "bind-pods", "false"),
];
/// Settings are in force everywhere by then.
const FOLLOWED: Duration = Duration::from_secs(20);

pub(super) fn run(clusters: &Clusters) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    {
        let site = clusters.site(2, "iptables")?;
        site.install("fast")?;
        let places = site.places()?;
        rows.extend(beside(&site, &places, FAST, clusters)?);
        // What stands in a ConfigMap is the operator's: another profile would leave it.
        for (map, key, value) in SLOW {
            let patch = format!("{{\"data\":{{\"{key}\":\"{value}\"}}}}");
            site.kubectl(&["patch", "configmap", "-n", SYSTEM, map, "--patch", &patch])?;
        }
        sh::pause(FOLLOWED);
        rows.extend(beside(&site, &places, STANDARD, clusters)?);
    }
    let site = clusters.site(2, "nftables")?;
    let places = site.places()?;
    for profile in [FAST, STANDARD] {
        let peer = Peer::new(&site, &places[0], "plain", profile.token)?;
        let times = (0..clusters.rounds).map(|round| {
            let time = peer.wake(&site, &places[round as usize % places.len()])?;
            peer.sleep(&site)?;
            Ok(time)
        });
        let times: Vec<f64> = times.collect::<Result<_>>()?;
        let case = format!("total{}", profile.end);
        rows.push(row(&case, "kube-proxy-nftables", "ms", &times, None, Goal::None));
    }
    Ok(rows)
}

/// Wakes of ours and, in between, of the peer behind kube-proxy's iptables.
fn beside(
    site: &Site,
    places: &[Place],
    profile: Profile,
    clusters: &Clusters,
) -> Result<Vec<Row>> {
    let names: Vec<String> =
        (0..WAKES + WARM_UP).map(|index| format!("{}-{index}", profile.name)).collect();
    site.sleepers(&names)?;
    let peer = Peer::new(site, &places[0], &format!("peer-{}", profile.name), profile.token)?;
    let watched = Watched::pods(site)?;
    let (mut records, mut peers) = (Vec::new(), Vec::new());
    let every = (WAKES / clusters.rounds as usize).max(1);
    for (index, name) in names.iter().enumerate() {
        let place = &places[index % places.len()];
        records.push((place.node.clone(), wake(site, place, name)?));
        if index % every == 0 && peers.len() < clusters.rounds as usize {
            peers.push(peer.wake(site, place)?);
            peer.sleep(site)?;
        }
    }
    let (autoscaler, controller) = (site.part_log("autoscaler")?, site.part_log("controller")?);
    let logs = site.nodes().into_iter().map(|node| site.log(&format!("{node}-containerd")));
    let containerd = logs.collect::<Result<Vec<String>>>()?.concat();
    let pods = watched.seen();
    let traces = Traces {
        pods: &pods,
        autoscaler: &autoscaler,
        controller: &controller,
        containerd: &containerd,
    };
    let wakes =
        records.iter().skip(WARM_UP).map(|(from, it)| (from.as_str(), Wake::of(it, &traces)));
    let wakes: Vec<(&str, Wake)> = wakes.collect();
    clusters.keep(&format!("cluster-wake{}.txt", profile.end), &told(&wakes))?;
    Ok(judged(&wakes, &peers, profile))
}

/// One request to a service that sleeps.
fn wake(site: &Site, place: &Place, name: &str) -> Result<Record> {
    let address = format!("{}:80", site.address(name)?);
    let host = format!("{name}.default.svc.cluster.local");
    let load =
        ["load", "--addr", &address, "--host", &host, "--stages", "1x60s", "--requests", "1"];
    let text = site.ask(place, &load)?;
    let record: Record = serde_json::from_str(text.trim())
        .with_context(|| format!("{name}: cannot read `{}`", text.trim()))?;
    if !record.is_answered() {
        bail!("{name} was not answered: status {} {}", record.status, record.error);
    }
    Ok(record)
}

/// The rows of one profile. Wholes are judged against their own part until `listen`, and against the peer.
fn judged(wakes: &[(&str, Wake)], peers: &[f64], profile: Profile) -> Vec<Row> {
    let case = |name: &str| format!("{name}{}", profile.end);
    let of = |value: &dyn Fn(&Wake) -> Option<f64>| -> Vec<f64> {
        wakes.iter().filter_map(|(_, wake)| value(wake)).collect()
    };
    let mut rows: Vec<Row> = STEPS
        .iter()
        .map(|(name, from, to)| {
            let values = of(&|wake| match from {
                Some(from) => wake.between(*from, *to),
                None => wake.until(*to),
            });
            row(&case(name), "rouse", "ms", &values, None, Goal::None)
        })
        // A step of which no log speaks is left out.
        .filter(|row| row.n > 0)
        .collect();
    let near = |is_near: bool| -> Vec<f64> {
        let some = wakes.iter().filter(|(from, wake)| (*from == wake.node) == is_near);
        some.filter_map(|(_, wake)| wake.listen_to_first_byte()).collect()
    };
    let (one, two) = (Goal::P50P99AtMost(1.0, 5.0), Goal::AtMost(2.0));
    rows.push(row(&case("listen_to_first_byte"), "rouse", "ms", &near(true), None, one));
    let other = case("listen_to_first_byte_other_node");
    rows.push(row(&other, "rouse", "ms", &near(false), None, two));
    let until = of(&|wake| wake.until(Stage::Listening));
    let most = median(&until).value * 1.1;
    let most = Goal::AtMost((most.min(median(peers).value / 4.0) * 10.0).round() / 10.0);
    rows.push(row(&case("until_listening"), "rouse", "ms", &until, None, Goal::None));
    // Whatever waits for the kubelet's word would not be answered before it.
    let ready = of(&Wake::first_byte_to_ready);
    rows.push(row(&case("first_byte_to_ready"), "rouse", "ms", &ready, None, Goal::None));
    rows.push(row(&case("total"), "rouse", "ms", &of(&|wake| Some(wake.total())), None, most));
    rows.push(row(&case("total"), "kube-proxy-iptables", "ms", peers, None, Goal::None));
    rows
}

/// Every wake on a line, slowest last, for whoever looks for outliers.
fn told(wakes: &[(&str, Wake)]) -> String {
    let mut wakes: Vec<&(&str, Wake)> = wakes.iter().collect();
    wakes.sort_by(|(_, one), (_, other)| one.total().total_cmp(&other.total()));
    let line = |(from, wake): &&(&str, Wake)| {
        let reached = wake
            .reached
            .keys()
            .map(|stage| format!(" {stage:?} {:.1}", wake.until(*stage).unwrap_or(f64::NAN)));
        let reached: String = reached.collect();
        format!("{from} -> {}: {:.1} ms;{reached}\n", wake.node, wake.total())
    };
    wakes.iter().map(line).collect()
}
