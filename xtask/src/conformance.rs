//! Shell: upstream's conformance tests of the Gateway API, built once from Go modules, and run by the cluster tier.

use anyhow::Result;

use crate::{
    cluster,
    test::{self, TestArgs},
};

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
    test::run(&TestArgs::of_conformance_tests(args.yes))
}
