//! Shell: upstream's conformance tests of the Gateway API as a part of the cluster tier: names, and results.

use std::{fs, path::PathBuf};

use crate::workspace::CargoWorkspace;

/// Module of the cluster tier's test that runs them, as libtest writes its name.
pub(super) const TEST_MODULE: &str = "gateway_conformance::";
/// Variable that names their directory for this test.
pub(super) const FOLDER_VARIABLE: &str = "ROUSE_GATEWAY_CONFORMANCE";

/// Removes the results of an earlier run.
pub(super) fn remove_results(workspace: &CargoWorkspace) {
    let _absent = fs::remove_file(results_path(workspace));
}

/// Prints the results, if the tests ran.
pub(super) fn print_results(workspace: &CargoWorkspace) {
    if let Ok(text) = fs::read_to_string(results_path(workspace)) {
        println!("\n{text}");
    }
}

/// Path of the tables that `tests/cluster/gateway_conformance.rs` writes.
fn results_path(workspace: &CargoWorkspace) -> PathBuf {
    workspace.target.join("gateway-conformance.md")
}
