//! Shell: first bytes of responses on a local node: of a frozen pod, of a cold start, and of a warm pod.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};

use super::{
    MAX_ROUNDS, NO_FIRST_POD, STANDBY, SUBJECTS, WAKES, WARM, first_byte_ms, manifests,
    request_args, wake_rows,
};
use crate::{
    bench::{
        node_context::{NodeBenchContext, get_objects, run_load, service_addresses},
        report::{BenchGoal, BenchRow},
        stats::RoundValues,
    },
    load::LoadRecord,
    local_node::LocalNode,
    sh,
};

/// Timeout for the pods of services on standby to be frozen, and for those of the others to be gone.
const SLEEP_TIMEOUT: Duration = Duration::from_secs(120);
/// Time between two checks of the pods.
const POLL_PERIOD: Duration = Duration::from_millis(500);

/// Measures all rounds on one node.
pub(super) fn run(context: &NodeBenchContext) -> Result<Vec<BenchRow>> {
    let node = context.start_node()?;
    for (prefix, count, annotations) in
        [("kept", WAKES, STANDBY), ("cold", WAKES, NO_FIRST_POD), ("warm", 1, WARM)]
    {
        let yaml = manifests(prefix, count, annotations);
        context.apply_manifests(&node, prefix, count, &yaml)?;
    }
    let (warm_pod, _) = service_addresses(&node, "warm0")?;
    let mut times = RoundValues::new();
    for round in 0..=context.rounds.min(MAX_ROUNDS) as usize {
        wait_until_asleep(&node)?;
        for index in 0..WAKES {
            // Each subject is the first one in a third of all cases, as the first request may find the machine idle.
            for offset in 0..SUBJECTS.len() {
                let subject = SUBJECTS[(offset + index + round) % SUBJECTS.len()];
                let record = send(context, &node, subject, index, warm_pod)?;
                let value = first_byte_ms(subject, &record)
                    .with_context(|| format!("{subject}, service {index}, round {round}"))?;
                // The first round finds cold caches.
                if round > 0 {
                    times.entry(subject).or_default().push(value);
                }
            }
        }
    }
    node.stop()?;
    Ok(wake_rows("wake_local", &times, BenchGoal::P50P99AtMost(0.8, 5.0)))
}

/// Sends one request to the service of a subject, or to the warm pod.
fn send(
    context: &NodeBenchContext,
    node: &LocalNode,
    subject: &str,
    index: usize,
    warm_pod: SocketAddr,
) -> Result<LoadRecord> {
    let host = match subject {
        "rouse" => format!("kept{index}.default.svc.cluster.local"),
        "cold" => format!("cold{index}.default.svc.cluster.local"),
        _ => "warm0.default.svc.cluster.local".to_owned(),
    };
    let address = match subject {
        "direct" => warm_pod.to_string(),
        _ => format!("{host}:80"),
    };
    let mut load = node.client_command(&context.client);
    load.args(request_args(&address, &host));
    run_load(&mut load)?.pop().context("the load generator printed no record")
}

/// Waits until the pod of each service on standby is frozen, and no other pod but the warm one is left.
fn wait_until_asleep(node: &LocalNode) -> Result<()> {
    let started = Instant::now();
    while started.elapsed() < SLEEP_TIMEOUT {
        if node.frozen_pods()?.len() == WAKES && get_objects(node, "pods")?.len() == WAKES + 1 {
            return Ok(());
        }
        sh::sleep(POLL_PERIOD);
    }
    let (frozen, all) = (node.frozen_pods()?.len(), get_objects(node, "pods")?.len());
    bail!("after {SLEEP_TIMEOUT:?} {frozen} of {all} pods are frozen, not {WAKES} of {}", WAKES + 1)
}
