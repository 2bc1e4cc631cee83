//! Shell: cold starts a second that are decided and written: with pods that are only recorded, and acknowledged by a
//! real API server with its etcd.

use std::{
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;

use super::{
    cluster_context::{BenchCluster, ClusterBenchContext, SYSTEM_NAMESPACE},
    object_watch::ObjectWatch,
    report::{BenchGoal, BenchRow, case_row},
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

pub(super) fn run(cluster_context: &ClusterBenchContext) -> Result<Vec<BenchRow>> {
    let mut rows = measure_with_api_server(cluster_context)?;
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
    let output: ControlPlaneBenchOutput =
        serde_json::from_str(line).with_context(|| format!("cannot read `{line}`"))?;
    Ok(case_row("wakes_local", "rouse", "per_s", &output.per_s, BenchGoal::AtLeast(1_000.0)))
}

/// Runs activator, autoscaler and controller as shipped, beside an API server without nodes. Requests arrive at the
/// gateway; a cold start is complete when the API server's watch shows the Deployment with one replica.
fn measure_with_api_server(cluster_context: &ClusterBenchContext) -> Result<Vec<BenchRow>> {
    let cluster = cluster_context.create_cluster(0, "iptables")?;
    cluster.apply_install()?;
    let _components = start_components(&cluster)?;
    let names: Vec<String> = (0..WAKES * ROUNDS).map(|index| format!("row{index}")).collect();
    cluster.create_sleeping_services(&names)?;
    let watched = ObjectWatch::watch_deployments(&cluster)?;
    let (mut rates, mut times) = (Vec::new(), Vec::new());
    for (round, names) in names.chunks(WAKES).enumerate() {
        // Writes of the wakes before this round are complete by then.
        sh::sleep(Duration::from_secs(8));
        let acknowledged = wake_all(&cluster, &watched, names)?;
        if round > 0 {
            // The rate counts until the last Deployment: a mean would hide a queue.
            let last = acknowledged.iter().copied().fold(0.0, f64::max);
            rates.push(names.len() as f64 * 1e3 / last);
            times.extend(acknowledged);
        }
    }
    let goal = BenchGoal::AtLeast(500.0);
    Ok(vec![
        case_row("wakes_apiserver", "rouse", "per_s", &rates, goal),
        case_row("request_to_acknowledged", "rouse", "ms", &times, BenchGoal::None),
    ])
}

/// Sends all requests at once. Returns the time until each Deployment was scaled, in ms.
fn wake_all(cluster: &BenchCluster, watched: &ObjectWatch, names: &[String]) -> Result<Vec<f64>> {
    let address =
        names.iter().map(|name| format!("{CONTROL_PLANE_ADDRESS}:8080={name}.default.example.com"));
    let to: Vec<String> = address.collect();
    let asked_us = unix_us();
    // No pod ever responds: the requests wait until this client is killed.
    let mut client = cluster.start_client(&["measure", "burst", "--to", &to.join(",")])?;
    let scaled = cluster.wait("all Deployments to be scaled", || {
        let observations = watched.observations();
        let time_of = |name: &String| {
            let deployment = format!("{name}-00001-deployment");
            observations.iter().find(|it| it.name == deployment && it.is_ready).map(|it| it.at_us)
        };
        Ok(names.iter().map(time_of).collect::<Option<Vec<u64>>>())
    });
    client.kill().and_then(|()| client.wait().map(drop)).context("cannot end the client")?;
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

/// Starts controller, autoscaler, and activator as processes, and checks that none of them ends at once.
fn start_components(cluster: &BenchCluster) -> Result<ComponentProcesses> {
    create_activator_pod(cluster)?;
    let (controller, autoscaler) = ("http://127.0.0.1:7100", "http://127.0.0.1:7110");
    let outside = format!("{CONTROL_PLANE_ADDRESS}:8080");
    let component = |args: &[&str], vars: &[(&str, &str)]| -> Result<Child> {
        let mut command: Command = cluster.rouse_command(args);
        command.envs(vars.iter().copied()).env("RUST_LOG", "warn").stdin(Stdio::null());
        command.spawn().context("cannot start a component")
    };
    let kubeconfig = cluster.kubeconfig();
    let mut processes = ComponentProcesses(Vec::new());
    // The later ones connect to the earlier ones.
    processes.0.push(component(
        &["controller", "--kubeconfig", kubeconfig, "--webhook-url", "https://127.0.0.1:8443"],
        &[("ROUSE_CONTROLLER_LISTEN", controller), ("POD_NAME", "controller")],
    )?);
    processes.0.push(component(
        &["autoscaler"],
        &[("ROUSE_USAGE", autoscaler), ("ROUSE_CONTROLLER", controller)],
    )?);
    processes.0.push(component(
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
    if processes.0.iter_mut().any(|child| child.try_wait().ok().flatten().is_some()) {
        bail!("a component ended at once");
    }
    Ok(processes)
}

/// Creates the activator's pod object. The controller knows activators by their pods, and no Route is ready without
/// one.
fn create_activator_pod(cluster: &BenchCluster) -> Result<()> {
    cluster.create(
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
    cluster.kubectl(&[&patch[..], &[&status]].concat()).map(drop)
}
