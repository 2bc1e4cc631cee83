//! Shell: cold starts a second that are decided and written: with pods that are only recorded, and acknowledged by a
//! real API server with its etcd.

use std::{
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;

use super::{
    report::{BenchGoal, BenchRow, case_row},
    site::{BenchCluster, ClusterBenchContext, SYSTEM_NAMESPACE},
    watched::ObjectWatch,
};
use crate::{load::unix_us, sh};

/// Number of services woken at once in a round; of rounds, the first is dropped.
const WAKES: usize = 150;
const ROUNDS: usize = 4;
/// Address of the control plane, on which the activator listens.
const CONTROL_PLANE_ADDRESS: &str = "10.89.0.1";

/// Output of `tests/bench/control_plane.rs`, as JSON.
#[derive(Debug, Deserialize)]
struct ControlPlaneBenchOutput {
    /// Cold starts a second, one value for each round.
    per_s: Vec<f64>,
}

pub(super) fn run(clusters: &ClusterBenchContext) -> Result<Vec<BenchRow>> {
    let mut rows = measure_with_api_server(clusters)?;
    rows.insert(0, measure_without_api_server()?);
    Ok(rows)
}

/// Runs the bench without an API server. It imports controller and autoscaler, which xtask must not, so it is a
/// program of its own.
fn measure_without_api_server() -> Result<BenchRow> {
    let text = sh::capture(
        sh::cargo()
            .args(["bench", "--quiet", "--package", "tests", "--bench", "control-plane"])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .env("RUST_LOG", "warn"),
    )?;
    let line = text.lines().last().context("the bench printed nothing")?;
    let printed: ControlPlaneBenchOutput =
        serde_json::from_str(line).with_context(|| format!("cannot read `{line}`"))?;
    Ok(case_row("wakes_local", "rouse", "per_s", &printed.per_s, None, BenchGoal::AtLeast(1_000.0)))
}

/// Runs activator, autoscaler and controller as shipped, beside an API server without nodes. Requests arrive at the
/// gateway; a cold start is complete when the API server's watch shows the Deployment with one replica.
fn measure_with_api_server(clusters: &ClusterBenchContext) -> Result<Vec<BenchRow>> {
    let site = clusters.create_cluster(0, "iptables")?;
    site.apply_install()?;
    let _parts = start_components(&site)?;
    let all: Vec<String> = (0..WAKES * ROUNDS).map(|index| format!("row{index}")).collect();
    site.create_sleeping_services(&all)?;
    let watched = ObjectWatch::watch_deployments(&site)?;
    let (mut rates, mut times) = (Vec::new(), Vec::new());
    for (round, names) in all.chunks(WAKES).enumerate() {
        // Writes of the wakes before this round are complete by then.
        sh::sleep(Duration::from_secs(8));
        let acknowledged = wake_all(&site, &watched, names)?;
        if round > 0 {
            // The rate counts until the last Deployment: a mean would hide a queue.
            let last = acknowledged.iter().copied().fold(0.0, f64::max);
            rates.push(names.len() as f64 * 1e3 / last);
            times.extend(acknowledged);
        }
    }
    let goal = BenchGoal::AtLeast(500.0);
    Ok(vec![
        case_row("wakes_apiserver", "rouse", "per_s", &rates, None, goal),
        case_row("request_to_acknowledged", "rouse", "ms", &times, None, BenchGoal::None),
    ])
}

/// Sends all requests at once. Returns the time until each Deployment was scaled, in ms.
fn wake_all(site: &BenchCluster, watched: &ObjectWatch, names: &[String]) -> Result<Vec<f64>> {
    let to =
        names.iter().map(|name| format!("{CONTROL_PLANE_ADDRESS}:8080={name}.default.example.com"));
    let to: Vec<String> = to.collect();
    let asked_us = unix_us();
    // No pod ever answers: the requests wait until this client is killed.
    let mut asking = site.start_client(&["measure", "burst", "--to", &to.join(",")])?;
    let scaled = site.wait("all Deployments to be scaled", || {
        let seen = watched.observations();
        let at = |name: &String| {
            let deployment = format!("{name}-00001-deployment");
            seen.iter().find(|it| it.pod == deployment && it.is_ready).map(|it| it.at_us)
        };
        Ok(names.iter().map(at).collect::<Option<Vec<u64>>>())
    });
    asking.kill().and_then(|()| asking.wait().map(drop)).context("cannot end the client")?;
    Ok(scaled?.into_iter().map(|at| at.saturating_sub(asked_us) as f64 / 1e3).collect())
}

/// Processes of the components, killed on drop.
struct ComponentProcesses(Vec<Child>);

impl Drop for ComponentProcesses {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // A process may have ended by itself; the bench has failed then.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn start_components(site: &BenchCluster) -> Result<ComponentProcesses> {
    create_activator_pod(site)?;
    let (controller, autoscaler) = ("http://127.0.0.1:7100", "http://127.0.0.1:7110");
    let outside = format!("{CONTROL_PLANE_ADDRESS}:8080");
    let part = |words: &[&str], vars: &[(&str, &str)]| -> Result<Child> {
        let mut command: Command = site.rouse_command(words);
        command.envs(vars.iter().copied()).env("RUST_LOG", "warn").stdin(Stdio::null());
        command.spawn().context("cannot start a part")
    };
    let kubeconfig = site.kubeconfig();
    let mut parts = ComponentProcesses(Vec::new());
    // The later ones connect to the earlier ones.
    parts.0.push(part(
        &["controller", "--kubeconfig", kubeconfig, "--webhook-url", "https://127.0.0.1:8443"],
        &[("ROUSE_CONTROLLER_LISTEN", controller), ("POD_NAME", "controller")],
    )?);
    parts.0.push(part(
        &["autoscaler"],
        &[("ROUSE_USAGE", autoscaler), ("ROUSE_CONTROLLER", controller)],
    )?);
    parts.0.push(part(
        &["activator"],
        &[
            ("ROUSE_CONTROLLER", controller),
            ("ROUSE_AUTOSCALER", autoscaler),
            ("ROUSE_ACTIVATOR_NAME", "activator"),
            ("ROUSE_ACTIVATOR_LISTEN", CONTROL_PLANE_ADDRESS),
            ("ROUSE_ACTIVATOR_OUTSIDE", &outside),
        ],
    )?);
    // A component with wrong arguments or an address in use ends within this time.
    sh::sleep(Duration::from_secs(5));
    if parts.0.iter_mut().any(|child| child.try_wait().ok().flatten().is_some()) {
        bail!("a part ended at once");
    }
    Ok(parts)
}

/// Creates the activator's pod object. The controller knows activators by their pods, and no Route is ready without
/// one.
fn create_activator_pod(site: &BenchCluster) -> Result<()> {
    site.create(
        "apiVersion: v1
kind: Pod
metadata: { name: activator, namespace: knative-serving, labels: { app: activator } }
spec:
  nodeName: hub
  serviceAccountName: activator
  automountServiceAccountToken: false
  containers: [{ name: activator, image: \"dev.local/rouse:v1\" }]
",
    )?;
    // There is no kubelet, so the bench reports the pod as ready itself.
    let status = format!(
        r#"{{"status":{{"phase":"Running","podIP":"{CONTROL_PLANE_ADDRESS}","podIPs":[{{"ip":"{CONTROL_PLANE_ADDRESS}"}}],
        "conditions":[{{"type":"Ready","status":"True"}}]}}}}"#
    );
    let patch =
        ["patch", "pod", "activator", "-n", SYSTEM_NAMESPACE, "--subresource=status", "--patch"];
    site.kubectl(&[&patch[..], &[&status]].concat()).map(drop)
}
