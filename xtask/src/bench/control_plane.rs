//! Shell: how many wakes a second are decided and written, with pods that are only recorded.

use anyhow::{Context as _, Result};
use serde::Deserialize;

use super::{
    report::{Goal, Row, row},
    scene::Scene,
};
use crate::sh;

/// What `tests/bench/control_plane.rs` prints.
#[derive(Debug, Deserialize)]
struct Printed {
    /// Wakes a second, round by round.
    per_s: Vec<f64>,
}

/// The body imports controller and autoscaler, which xtask must not: it is a program of its own.
pub(super) fn run(_: &Scene) -> Result<Vec<Row>> {
    let text = sh::capture(
        sh::cargo()
            .args(["bench", "--quiet", "--package", "tests", "--bench", "control-plane"])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .env("RUST_LOG", "warn"),
    )?;
    let line = text.lines().last().context("the bench printed nothing")?;
    let printed: Printed =
        serde_json::from_str(line).with_context(|| format!("cannot read `{line}`"))?;
    let goal = Goal::AtLeast(1_000.0);
    Ok(vec![row("wakes_local", "rouse", "per_s", &printed.per_s, None, goal)])
}
