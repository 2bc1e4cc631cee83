//! Shell: many services woken at once; beside them as many Deployments that the cluster starts by itself.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use super::{
    peer,
    report::{Goal, Row, row},
    site::{Clusters, Place, Site},
    stages::started_of,
    stats::{quantile, sorted},
    watched::Watched,
};
use crate::{load::unix_us, measure::Burst, sh};

/// How many at once, and how often.
const CASES: [(usize, usize, &str); 3] =
    [(1, 15, "services_1"), (20, 3, "services_20"), (50, 3, "services_50")];
/// What a wake may take of the cluster's own time, in the 99th percentile.
const SHARE: f64 = 1.3;
/// In this time a controller of the cluster that has nothing to do regains the 30 requests it may make at once.
const REFILL: Duration = Duration::from_secs(2);

/// What became of services that were asked at once, in ms from the request.
struct Woken {
    /// Until the watch showed a pod of each.
    created: Vec<f64>,
    first_byte: Vec<f64>,
}

/// `rouse`: from the request to its first byte, and until its pod is there; `kubernetes`: from the patch until the container runs, which is as
/// early as anything could answer. Both without the account's token.
pub(super) fn run(clusters: &Clusters) -> Result<Vec<Row>> {
    let site = clusters.site(2, "iptables")?;
    site.install("fast")?;
    let places = site.places()?;
    let most = CASES.iter().map(|(count, ..)| *count).max().unwrap_or(0);
    let names =
        |prefix: &str| (0..most).map(|index| format!("{prefix}{index}")).collect::<Vec<_>>();
    let (services, peers) = (names("burst"), names("plain"));
    site.sleepers(&services)?;
    site.create(&peers.iter().map(|name| peer::manifest(name, false)).collect::<String>())?;
    let addresses = services.iter().map(|name| site.address(name)).collect::<Result<Vec<_>>>()?;
    let mut rows = Vec::new();
    for (count, rounds, case) in CASES {
        let (mut ours, mut created, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..=rounds {
            let place = &places[round % places.len()];
            let woken = wake(&site, place, &services[..count], &addresses[..count])?;
            asleep(&site, "serving.knative.dev/service")?;
            let started = start(&site, &peers[..count])?;
            asleep(&site, "app")?;
            // The first round finds caches cold.
            if round > 0 {
                ours.extend(woken.first_byte);
                created.extend(woken.created);
                theirs.extend(started);
            }
        }
        let most = quantile(&sorted(&theirs), 0.99) * SHARE;
        rows.push(row(case, "rouse", "ms", &ours, None, Goal::P99AtMost(most.round())));
        rows.push(row(case, "kubernetes", "ms", &theirs, None, Goal::None));
        let case = format!("{case}_pod_created");
        rows.push(row(&case, "rouse", "ms", &created, None, Goal::None));
    }
    Ok(rows)
}

/// Asks all services at the same moment.
fn wake(site: &Site, place: &Place, names: &[String], addresses: &[String]) -> Result<Woken> {
    let watched = Watched::pods(site)?;
    let to = names.iter().zip(addresses);
    let to: Vec<String> = to
        .map(|(name, address)| format!("{address}:80={name}.default.svc.cluster.local"))
        .collect();
    let text = site.ask(place, &["measure", "burst", "--to", &to.join(",")])?;
    let burst: Burst = serde_json::from_str(text.trim()).context("a burst printed no JSON")?;
    if burst.lost > 0 {
        bail!("{} of {} requests were not answered", burst.lost, names.len());
    }
    let seen = watched.seen();
    let first = |name: &String| {
        let begins = format!("{name}-00001-deployment-");
        let mut its =
            seen.iter().filter(|it| it.at_us >= burst.at_us && it.pod.starts_with(&begins));
        its.next().map(|it| (it.at_us - burst.at_us) as f64 / 1e3)
    };
    Ok(Woken { created: names.iter().filter_map(first).collect(), first_byte: burst.ms })
}

/// Scales all Deployments at the same moment; how long until the container of each was started.
fn start(site: &Site, names: &[String]) -> Result<Vec<f64>> {
    let watched = Watched::pods(site)?;
    let patched_us = scale(site, names, 1)?;
    let begins = |pod: &str| names.iter().any(|name| pod.starts_with(&format!("{name}-")));
    site.wait("the Deployments' pods to be ready", || {
        let seen = watched.seen();
        let mut ready: Vec<&str> =
            seen.iter().filter(|it| it.is_ready && begins(&it.pod)).map(|it| &*it.pod).collect();
        ready.sort_unstable();
        ready.dedup();
        Ok((ready.len() >= names.len()).then_some(()))
    })?;
    let logs = site.nodes().into_iter().map(|node| site.log(&format!("{node}-containerd")));
    let containerd = logs.collect::<Result<Vec<String>>>()?.concat();
    let seen = watched.seen();
    let recent = seen.iter().filter(|it| it.is_ready && it.at_us > patched_us && begins(&it.pod));
    let mut pods: Vec<&str> = recent.map(|it| &*it.pod).collect();
    pods.sort_unstable();
    pods.dedup();
    let times = pods.into_iter().filter_map(|pod| started_of(pod, &containerd));
    let times: Vec<f64> = times.map(|at| at.saturating_sub(patched_us) as f64 / 1e3).collect();
    scale(site, names, 0)?;
    Ok(times)
}

/// Patches all at once, and says when the first had been asked for.
fn scale(site: &Site, names: &[String], replicas: u32) -> Result<u64> {
    let path = |name: &String| format!("/apis/apps/v1/namespaces/default/deployments/{name}/scale");
    let mut curl = site.api(&path(&names[0]));
    curl.args(names[1..].iter().map(|name| site.url(&path(name))));
    curl.args(["-X", "PATCH", "-H", "Content-Type: application/merge-patch+json"]);
    curl.args(["--data", &format!("{{\"spec\":{{\"replicas\":{replicas}}}}}")]);
    curl.args([
        "--parallel",
        "--parallel-max",
        "64",
        "--write-out",
        "\npretransfer %{time_pretransfer}\n",
    ]);
    let begun = unix_us();
    let text = sh::capture(&mut curl)?;
    let before = text.lines().filter_map(|line| line.strip_prefix("pretransfer "));
    let before = before.filter_map(|word| word.trim().parse::<f64>().ok()).fold(f64::MAX, f64::min);
    if before == f64::MAX {
        bail!("curl said nothing of its times");
    }
    Ok(begun + (before * 1e6) as u64)
}

/// Waits until no pod has the label, and until the cluster's own controllers have nothing left to write: they may write
/// 30 times at once and 20 times a second after, and who comes next would wait for that.
fn asleep(site: &Site, label: &str) -> Result<()> {
    site.wait("all pods to be gone", || {
        Ok(site.list(&["pods", "--selector", label])?.is_empty().then_some(()))
    })?;
    site.wait("all Deployments to say that they have none", || {
        let all = site.list(&["deployments.apps"])?;
        let rests = |it: &Value| {
            let generation = &it["metadata"]["generation"];
            it["status"]["observedGeneration"] == *generation && it["status"]["replicas"].is_null()
        };
        Ok(all.iter().all(rests).then_some(()))
    })?;
    sh::pause(REFILL);
    Ok(())
}
