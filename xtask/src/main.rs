//! `cargo xtask …`: builds, tests, measurements and demonstrations of Rouse. `cargo xtask help` lists the commands.
//!
//! One file per command. No part of it is shipped, and it imports no component of Rouse: xtask runs the built
//! programs from outside, as a user would.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "xtask talks to people on a terminal"
)]
#![forbid(unsafe_code)]

mod bench;
mod build;
mod build_ebpf;
mod chart;
mod ci;
mod cluster;
mod cold_start;
mod conformance;
mod demo;
mod frozen_pods;
mod fuzz;
mod image;
mod kernels;
mod load;
mod local_node;
mod lock;
mod machine;
mod manifests;
mod measure;
mod monitoring;
mod servers;
mod setup;
mod sh;
mod test;
mod tidy;
mod toolchain;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Build, test, measure and demonstrate Rouse.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct XtaskCli {
    #[command(subcommand)]
    command: XtaskCommand,
}

#[derive(Debug, Subcommand)]
enum XtaskCommand {
    /// Demonstrate Rouse on this machine: wake, scale out, direct path, sleep, standby
    Demo(demo::DemoArgs),
    /// Check kernel, cgroups and capabilities; install what is missing
    Setup(setup::SetupArgs),
    /// Build the eBPF programs and print the path of the object
    BuildEbpf,
    /// Run the tests: pure, shell, kernel, local, cluster
    Test(test::TestArgs),
    /// Build the servers and clients whose requests the kernel tier counts
    Servers,
    /// Load the eBPF programs into each supported kernel, and run the kernel tier there, in virtual machines
    Kernels(kernels::KernelsArgs),
    /// Run a real Kubernetes cluster on this machine, in namespaces of its own
    Cluster(cluster::ClusterArgs),
    /// Write the container images of Rouse and of the examples as OCI layouts
    Image(image::ImageArgs),
    /// Write deploy/ and docs/rbac.md again from what `rouse install` applies
    Manifests,
    /// Check the code against the layout rules of ARCHITECTURE.md
    Tidy,
    /// Check Prometheus' rules, their tests and Grafana's dashboard with promtool
    Monitoring,
    /// Check with Helm that the chart makes what `rouse install` applies
    Chart,
    /// Run upstream's conformance tests of the Gateway API on a cluster, and print their results
    Conformance(conformance::ConformanceArgs),
    /// Search for input that the HTTP/1.1 and HTTP/2 parsers read differently from other implementations
    Fuzz(fuzz::FuzzArgs),
    /// Measure Rouse side by side with controls, and write BENCHMARKS.md
    Bench(bench::BenchArgs),
    /// Measure connects or requests from the calling namespace; used by bench inside the node
    #[command(hide = true)]
    Measure(measure::MeasureArgs),
    /// Send requests and print one JSON line each; used by demo and bench inside the node
    #[command(hide = true)]
    Load(load::LoadArgs),
    /// Run the checks that a change must pass: format, lints, docs, tests, tidy, licences
    Ci(ci::CiArgs),
}

fn main() -> ExitCode {
    let outcome = match XtaskCli::parse().command {
        XtaskCommand::Demo(args) => demo::run(&args),
        XtaskCommand::Setup(args) => setup::run(&args),
        XtaskCommand::BuildEbpf => build_ebpf::run(),
        XtaskCommand::Test(args) => test::run(&args),
        XtaskCommand::Servers => servers::run(),
        XtaskCommand::Kernels(args) => kernels::run(&args),
        XtaskCommand::Cluster(args) => cluster::run(&args),
        XtaskCommand::Image(args) => image::run(&args),
        XtaskCommand::Manifests => manifests::run(),
        XtaskCommand::Tidy => tidy::run(),
        XtaskCommand::Monitoring => monitoring::run(),
        XtaskCommand::Chart => chart::run(),
        XtaskCommand::Conformance(args) => conformance::run(&args),
        XtaskCommand::Fuzz(args) => fuzz::run(&args),
        XtaskCommand::Bench(args) => bench::run(&args),
        XtaskCommand::Measure(args) => measure::run(&args),
        XtaskCommand::Load(args) => load::run(&args),
        XtaskCommand::Ci(args) => ci::run(&args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // With the whole chain of causes, in one line.
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
