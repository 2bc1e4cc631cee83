//! Shell: pods that are added and removed under a steady load, without a preStop sleep; beside them the same program
//! behind kube-proxy.

use std::{
    fs::{self, File},
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use super::{
    cluster_context::{BenchClientPod, BenchCluster, ClusterBenchContext},
    is_condition_true,
    plain_deployment::PlainDeployment,
    report::{BenchGoal, BenchRow, case_row},
    service_manifest,
};
use crate::{load::LoadRecord, sh};

/// Number of times that each subject scales from one pod to three and back.
pub(super) const SCALING_CYCLES: u32 = 6;
const NAME: &str = "scale-in";
/// Scaling with one pod for every 10 requests at once.
const SCALING: [(&str, &str); 5] = [
    ("min-scale", "1"),
    ("max-scale", "3"),
    ("target", "10"),
    ("target-utilization-percentage", "100"),
    ("window", "6s"),
];
/// Load of 200 requests a second, half of them on new connections, for longer than all scaling takes.
const STEADY_STAGES: &str = "200x180s";
/// Additional load that needs more than one pod.
const PULSE_ARGS: [&str; 4] = ["--stages", "25x10s", "--path", "/?sleep=100"];
/// Time without changes after each new number of pods.
const PAUSE_AFTER_SCALING: Duration = Duration::from_secs(3);

/// Scales Rouse, then its peer, out and in under load, and counts the lost requests of each.
pub(super) fn run(cluster_context: &ClusterBenchContext) -> Result<Vec<BenchRow>> {
    let cluster = cluster_context.create_cluster(2, "iptables")?;
    cluster.install("standard")?;
    let clients = cluster.create_client_pods()?;
    cluster.create_services(&service_manifest(NAME, &SCALING), &[NAME.to_owned()])?;
    let address = cluster.cluster_ip(NAME)?;
    let start = |address: &str, records: &str| {
        SteadyLoad::start(cluster_context, &cluster, &clients[0], address, records)
    };
    let mut rouse_load = start(&address, "scale-in-rouse")?;
    for _ in 0..SCALING_CYCLES {
        scale_out_and_in(&cluster, &clients[1], &address)?;
    }
    rouse_load.ensure_running()?;
    let mut rows = load_rows("rouse", rouse_load.finish()?, BenchGoal::AtMost(0.0)).to_vec();
    // The peer runs after Rouse, with the same load, so that both have the machine to themselves.
    let peer = PlainDeployment::new(&cluster, &clients[0], NAME, true)?;
    peer.measure_start(&cluster, &clients[0])?;
    let mut peer_load = start(peer.address(), "scale-in-kube-proxy")?;
    // Nothing scales the peer by load, so the bench sets its scale.
    for pods in [3, 1].repeat(SCALING_CYCLES as usize) {
        peer.scale(&cluster, pods)?;
        wait_for_pods(&cluster, peer.selector(), pods as usize)?;
    }
    peer_load.ensure_running()?;
    rows.extend(load_rows("kube-proxy-iptables", peer_load.finish()?, BenchGoal::None));
    Ok(rows)
}

fn load_rows(subject: &str, counts: LoadCounts, goal: BenchGoal) -> [BenchRow; 2] {
    let row = |case: &str, number: usize, goal| {
        case_row(case, subject, "requests", &[number as f64], goal)
    };
    [row("sent", counts.sent, BenchGoal::None), row("lost", counts.lost, goal)]
}

/// Adds load until there are three pods, and removes it until there is one.
fn scale_out_and_in(cluster: &BenchCluster, client: &BenchClientPod, address: &str) -> Result<()> {
    let selector = format!("serving.knative.dev/service={NAME}");
    let mut pulse = load_command(cluster, client, address, &PULSE_ARGS);
    let mut pulse = pulse.stdout(Stdio::null()).spawn().context("cannot start a load")?;
    wait_for_pods(cluster, selector.clone(), 3)?;
    if !pulse.wait()?.success() {
        bail!("a load that needs three pods failed");
    }
    wait_for_pods(cluster, selector, 1)
}

/// Waits for exactly `pods` pods, all ready, and for [`PAUSE_AFTER_SCALING`] after that.
pub(super) fn wait_for_pods(cluster: &BenchCluster, selector: String, pods: usize) -> Result<()> {
    cluster.wait(&format!("{pods} pods"), || {
        let list = cluster.list(&["pods", "--selector", &selector])?;
        let ready = |pod: &Value| is_condition_true(pod, "Ready");
        Ok((list.len() == pods && list.iter().all(ready)).then_some(()))
    })?;
    sh::sleep(PAUSE_AFTER_SCALING);
    Ok(())
}

fn load_command(
    cluster: &BenchCluster,
    client: &BenchClientPod,
    address: &str,
    extra_args: &[&str],
) -> Command {
    let address = format!("{address}:80");
    let args = ["load", "--addr", &address, "--host", NAME];
    cluster.pod_command(client, &[&args[..], extra_args].concat())
}

/// Numbers of requests of one load.
#[derive(Clone, Copy, Debug)]
pub(super) struct LoadCounts {
    pub(super) sent: usize,
    /// Requests without a response of the application.
    pub(super) lost: usize,
}

/// Steady load in which no request may be lost.
#[derive(Debug)]
pub(super) struct SteadyLoad {
    child: Child,
    records: PathBuf,
}

impl SteadyLoad {
    /// Starts the load on port 80 of an address. `records` names the file of its requests, without the extension.
    pub(super) fn start(
        cluster_context: &ClusterBenchContext,
        cluster: &BenchCluster,
        client: &BenchClientPod,
        address: &str,
        records: &str,
    ) -> Result<Self> {
        let records = cluster_context.folder.join(format!("{records}.jsonl"));
        let out = File::create(&records)
            .with_context(|| format!("cannot write {}", records.display()))?;
        let mut load =
            load_command(cluster, client, address, &["--open", "--stages", STEADY_STAGES]);
        let child = load.stdout(out).spawn().context("cannot start a load")?;
        Ok(Self { child, records })
    }

    /// Fails if the load has ended: changes of the last pods would have met no requests.
    pub(super) fn ensure_running(&mut self) -> Result<()> {
        if self.child.try_wait()?.is_some() {
            bail!("the load ended before the last pod did: {}", self.records.display());
        }
        Ok(())
    }

    /// Waits for the end of the load.
    pub(super) fn finish(mut self) -> Result<LoadCounts> {
        // The rest of the load runs with one pod.
        if !self.child.wait()?.success() {
            bail!("the load failed");
        }
        let text = fs::read_to_string(&self.records)?;
        let records: Vec<LoadRecord> =
            text.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
        let lost = records.iter().filter(|it| !it.is_answered()).count();
        Ok(LoadCounts { sent: records.len(), lost })
    }
}

impl Drop for SteadyLoad {
    fn drop(&mut self) {
        // The process has ended already, unless an error came first.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
