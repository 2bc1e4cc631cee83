//! Shell: what a connect through a service's address costs, with few and with many services.

use anyhow::Result;

use super::{
    interleave,
    report::{Goal, Row, rows},
    scene::{Scene, addresses},
};

/// Numbers of services, and the cases' names.
const CASES: [(usize, &str); 3] =
    [(1, "services_1"), (1_000, "services_1000"), (10_000, "services_10000")];
/// Connects a round.
const COUNT: usize = 2_000;

/// `bare`: the bare server's own address; `direct`: the pod's own, programs attached; `rouse`: the service's.
pub(super) fn run(scene: &Scene) -> Result<Vec<Row>> {
    let node = scene.node()?;
    let bare = scene.bare(&node)?;
    scene.apply(&node, "awake", 1, 1)?;
    let (pod, service) = addresses(&node, "awake0")?;
    let mut all = Vec::new();
    for (index, (services, case)) in CASES.into_iter().enumerate() {
        if services > 1 {
            scene.apply(&node, &format!("asleep{index}x"), services - before(index), 0)?;
        }
        let rounds = interleave(scene.rounds, &["bare", "direct", "rouse"], |subject| {
            let args = |addr| {
                ["connect", "--addr", addr, "--count", &COUNT.to_string()].map(str::to_owned)
            };
            let measured = match subject {
                "bare" => scene.measure_bare(&node, &args(&bare.address().to_string()))?,
                "direct" => scene.measure(&node, &args(&pod.to_string()))?,
                _ => scene.measure(&node, &args(&service.to_string()))?,
            };
            Ok(measured.p50_us)
        })?;
        all.extend(rows(case, "us", &rounds, Goal::RatioAtMost(1.05)));
    }
    drop(bare);
    node.stop()?;
    Ok(all)
}

/// Services that the cases before have applied.
fn before(index: usize) -> usize {
    CASES[index - 1].0
}
