//! Number of cold starts that controller and autoscaler decide and write in a second, with pods that are only
//! recorded.
//!
//! Both run as shipped, on their own threads and over unix sockets. This program replaces the activator, which
//! reports waiting requests, and the node, which gets the orders to start pods. It prints one JSON line: cold starts
//! a second, round by round. A round ends when a pod has been ordered for each of its revisions.
#![allow(clippy::print_stdout, reason = "xtask reads the figures from standard output")]

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use common::{
    link::ComponentLink,
    local_node::LocalNodeSpec,
    outbox::Outbox,
    wire::{
        ClientComponent, ComponentReplica, NamespacedName, RequestTotals, UsageKey, UsageSample,
    },
};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::timeout,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Number of rounds, one more than counted: the first one warms up.
const ROUNDS: usize = 16;
/// Number of revisions woken at once in each round.
const WAKES: usize = 250;
/// Timeout of every wait, which only an error reaches.
const WAIT_TIMEOUT: Duration = Duration::from_secs(120);

#[tokio::main]
async fn main() -> Result<()> {
    let folder = std::env::temp_dir().join(format!("rouse-control-plane-{}", std::process::id()));
    let (shutdown, tasks) = (CancellationToken::new(), TaskTracker::new());
    let measured = timeout(WAIT_TIMEOUT * 2, measure(&folder, &shutdown, &tasks)).await;
    // Cleaned up in any case: the controller writes to the directory until it has ended.
    shutdown.cancel();
    tasks.close();
    let _ = timeout(WAIT_TIMEOUT, tasks.wait()).await;
    let _ = fs::remove_dir_all(&folder);
    let rounds = measured.context("the whole took too long")??;
    println!("{}", serde_json::json!({ "per_s": rounds, "n": WAKES }));
    Ok(())
}

async fn measure(
    folder: &Path,
    shutdown: &CancellationToken,
    tasks: &TaskTracker,
) -> Result<Vec<f64>> {
    write_manifests(&folder.join("manifests"))?;
    let (node_spec, mut node_specs) = watch::channel(LocalNodeSpec::default());
    let (_statuses, statuses) = mpsc::channel(1);
    let node = controller::shell::local_node::LocalNodeChannels { node_spec, statuses };
    let routes = endpoint(folder, "controller.sock");
    let usage = endpoint(folder, "autoscaler.sock");
    tasks.spawn(controller::run(controller_config(folder, &routes), node, shutdown.clone()));
    tasks.spawn(autoscaler::run(autoscaler_config(&routes, &usage), shutdown.clone()));

    let activator = ComponentReplica {
        role: ClientComponent::Activator,
        name: "bench".into(),
        node: "bench".into(),
    };
    let revisions =
        revisions(ComponentLink::new(&routes, activator.clone(), shutdown.clone())).await?;
    let outbox = Outbox::new();
    let (link, report) =
        (Arc::new(ComponentLink::new(&usage, activator, shutdown.clone())), outbox.clone());
    tokio::spawn(async move { link.report_usage(&report).await });

    let clock = Instant::now();
    let mut rates = Vec::new();
    for (round, revisions) in revisions.chunks(WAKES).enumerate() {
        let (started, expected) = (Instant::now(), (round + 1) * WAKES);
        for revision in revisions {
            outbox.set(usage_key(revision), waiting_request_report(revision, clock));
        }
        let all_ordered = node_specs.wait_for(|spec| spec.pods.len() >= expected);
        timeout(WAIT_TIMEOUT, all_ordered)
            .await
            .with_context(|| format!("round {round} got stuck"))??;
        rates.push(WAKES as f64 / started.elapsed().as_secs_f64());
    }
    Ok(rates.split_off(1))
}

/// Waits until all revisions are in the RouteTable, and returns their names.
async fn revisions(link: ComponentLink) -> Result<Vec<NamespacedName>> {
    let (found_tx, complete) = oneshot::channel();
    let mut found_tx = Some(found_tx);
    tokio::spawn(async move {
        link.watch_routes(|view, _| {
            if view.table.revisions.len() == ROUNDS * WAKES
                && let Some(found_tx) = found_tx.take()
            {
                // The receiver is gone only when the bench has given up.
                let _ = found_tx.send(view.table.revisions.keys().cloned().collect());
            }
        })
        .await;
    });
    match timeout(WAIT_TIMEOUT, complete).await {
        Ok(revisions) => Ok(revisions?),
        Err(_) => bail!("the controller did not route {} revisions", ROUNDS * WAKES),
    }
}

fn usage_key(revision: &NamespacedName) -> UsageKey {
    UsageKey { revision: revision.clone(), pod: None }
}

/// Usage report of one request that has been waiting since now.
fn waiting_request_report(revision: &NamespacedName, clock: Instant) -> UsageSample {
    let read_at_ns = u64::try_from(clock.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let mut totals = RequestTotals::default();
    totals.record_start(read_at_ns);
    UsageSample {
        key: usage_key(revision),
        read_at_ns,
        totals,
        status: Vec::new(),
        latency: Vec::new(),
        client: None,
    }
}

fn write_manifests(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    for index in 0..ROUNDS * WAKES {
        let file: PathBuf = folder.join(format!("sleeper-{index}.yaml"));
        fs::write(&file, manifest(index))
            .with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(())
}

fn manifest(index: usize) -> String {
    format!(
        "apiVersion: serving.knative.dev/v1
kind: Service
metadata: {{ name: sleeper-{index}, namespace: default }}
spec:
  template:
    metadata: {{ annotations: {{ autoscaling.knative.dev/initial-scale: \"0\" }} }}
    spec: {{ containers: [{{ image: \"dev.local/hello:v1\" }}] }}
"
    )
}

fn endpoint(folder: &Path, socket: &str) -> String {
    format!("unix:{}", folder.join(socket).display())
}

fn controller_config(folder: &Path, listen: &str) -> controller::ControllerConfig {
    controller::ControllerConfig {
        node: "bench".into(),
        state: folder.to_owned(),
        listen: listen.to_owned(),
        admin: ([127, 0, 0, 1], 0).into(),
        ..controller::ControllerConfig::default()
    }
}

fn autoscaler_config(controller: &str, usage: &str) -> autoscaler::config::AutoscalerConfig {
    autoscaler::config::AutoscalerConfig {
        usage: usage.to_owned(),
        controller: controller.to_owned(),
        admin: ([127, 0, 0, 1], 0).into(),
        name: "bench".into(),
        tick_ms: 2_000,
        identity: None,
    }
}
