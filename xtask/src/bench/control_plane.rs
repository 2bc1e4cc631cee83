//! Shell: how many wakes a second are decided and written, with pods that are only recorded.

use anyhow::{Result, bail};

use super::{report::Row, scene::Scene};

/// Needs a node whose pods are only recorded.
pub(super) fn run(_: &Scene) -> Result<Vec<Row>> {
    bail!("not built yet: `rouse up` cannot run with pods that are only recorded")
}
