//! Shell: upstream's conformance tests of the Gateway API, built once from Go modules, and run by the cluster tier.

use std::{fs, path::PathBuf};

use anyhow::Result;

use crate::{
    cluster,
    test::{self, TestArgs},
    workspace::CargoWorkspace,
};

/// Module of the cluster tier's test that runs them, as libtest writes its name.
pub(crate) const TEST_MODULE: &str = "gateway_conformance::";
/// Variable that names their directory for this test.
pub(crate) const FOLDER_VARIABLE: &str = "ROUSE_GATEWAY_CONFORMANCE";

/// Arguments of the command `cargo xtask conformance`.
#[derive(Debug, clap::Args)]
pub(crate) struct ConformanceArgs {
    /// Install packages that the tests need without asking
    #[arg(long)]
    yes: bool,
}

/// Runs `cargo xtask conformance`: builds the tests if they are missing, runs them on a cluster of their own, and
/// prints their results.
pub(crate) fn run(args: &ConformanceArgs) -> Result<()> {
    cluster::build_gateway_conformance()?;
    test::run(&TestArgs::of_cluster_tests(TEST_MODULE, args.yes))
}

/// Removes the results of an earlier run.
pub(crate) fn remove_results(workspace: &CargoWorkspace) {
    let _absent = fs::remove_file(results_path(workspace));
}

/// Prints the results, if the tests ran.
pub(crate) fn print_results(workspace: &CargoWorkspace) {
    if let Ok(text) = fs::read_to_string(results_path(workspace)) {
        println!("\n{text}");
    }
}

/// Path of the tables that `tests/cluster/gateway_conformance.rs` writes.
fn results_path(workspace: &CargoWorkspace) -> PathBuf {
    workspace.target.join("gateway-conformance.md")
}
