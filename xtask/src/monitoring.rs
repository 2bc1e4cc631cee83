//! Shell: checks of the Prometheus rules, their tests, and the dashboard's queries, by Prometheus' own tool.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use crate::{
    cluster, sh,
    tidy::{GRAFANA_DASHBOARD, PROMETHEUS_RULES},
    workspace::CargoWorkspace,
};

/// Tests of the rules, with made-up figures.
const RULE_TESTS: &str = "deploy/monitoring/rules_test.yaml";

/// Runs `cargo xtask monitoring`: rules, their tests, and the dashboard's queries.
pub(crate) fn run() -> Result<()> {
    let workspace = CargoWorkspace::load()?;
    let promtool = cluster::promtool()?;
    let tool =
        |args: &[&str]| sh::run(Command::new(&promtool).args(args).current_dir(&workspace.root));
    tool(&["check", "rules", "--lint=all", "--lint-fatal", PROMETHEUS_RULES])?;
    tool(&["test", "rules", RULE_TESTS])?;
    // promtool reads no dashboards, so each query is checked as the expression of a rule.
    let queries = read_queries(&workspace.root.join(GRAFANA_DASHBOARD))?;
    for DashboardQuery { panel, expression } in &queries {
        check_expression(&promtool, expression)
            .with_context(|| format!("{GRAFANA_DASHBOARD}: panel {panel:?}"))?;
    }
    println!(
        "monitoring: rules, their tests and {} queries of the dashboard are sound",
        queries.len()
    );
    Ok(())
}

/// Query of one line of a panel.
#[derive(Debug, PartialEq, Eq)]
struct DashboardQuery {
    panel: String,
    expression: String,
}

fn read_queries(dashboard: &Path) -> Result<Vec<DashboardQuery>> {
    let unreadable = || format!("cannot read {}", dashboard.display());
    let text = fs::read_to_string(dashboard).with_context(unreadable)?;
    let queries = panel_queries(&serde_json::from_str(&text).with_context(unreadable)?);
    if queries.is_empty() {
        bail!("{} has no queries", dashboard.display());
    }
    Ok(queries)
}

fn panel_queries(dashboard: &Value) -> Vec<DashboardQuery> {
    let list = |object: &Value, field: &str| object[field].as_array().cloned().unwrap_or_default();
    let targets = list(dashboard, "panels").into_iter().flat_map(|panel| {
        // Rows of the dashboard have no targets, so they add no queries.
        let title = panel["title"].as_str().unwrap_or_default().to_owned();
        let targets = list(&panel, "targets").into_iter();
        targets.map(move |target| DashboardQuery {
            panel: title.clone(),
            expression: target["expr"].as_str().unwrap_or_default().to_owned(),
        })
    });
    targets.collect()
}

/// Checks one expression as a rule. Grafana's variables are within strings only, so promtool can parse it unchanged.
fn check_expression(promtool: &Path, expression: &str) -> Result<()> {
    let rule =
        json!({"groups": [{"name": "query", "rules": [{"record": "query", "expr": expression}]}]});
    let mut child = Command::new(promtool)
        .args(["check", "rules", "--lint=none"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .context("cannot start promtool")?;
    // JSON is YAML. Dropping the pipe closes it, which ends promtool's input.
    let stdin = child.stdin.take().context("the child's input was piped")?;
    serde_json::to_writer(stdin, &rule).context("cannot write to promtool")?;
    if !child.wait()?.success() {
        bail!("promtool refuses {expression:?}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_query_of_every_line_of_every_panel_is_read() {
        let dashboard = json!({"panels": [
            {"type": "row", "title": "R", "panels": []},
            {"title": "P", "targets": [{"expr": "up"}, {"expr": "sum(up)"}]},
        ]});
        let query =
            |expression: &str| DashboardQuery { panel: "P".into(), expression: expression.into() };
        assert_eq!(panel_queries(&dashboard), [query("up"), query("sum(up)")]);
    }
}
