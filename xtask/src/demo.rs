//! Shell: a demonstration on this machine: asleep, woken, scaled out, direct path, asleep again, on standby.

mod chart;
mod demo_runner;
mod observations;
mod terminal;

use std::{
    fs,
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};

use self::observations::{DemoFigures, DemoRun};
use crate::{
    build::{self, BuildProfile},
    image,
    local_node::LocalNode,
    setup::{self, SetupPurpose},
    workspace::CargoWorkspace,
};

/// Arguments of the command `cargo xtask demo`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct DemoArgs {
    /// Install what is missing without asking
    #[arg(long)]
    yes: bool,
    /// Write the figures to FILE as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Leave the node running and print what to type
    #[arg(long)]
    keep: bool,
    /// Address on which the gateway listens for requests from outside the node
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:8080")]
    gateway: SocketAddr,
    /// Build without optimisation: sooner, but the times are not representative
    #[arg(long)]
    dev: bool,
    /// Show the program FILE instead of building one
    #[arg(long, value_name = "FILE")]
    rouse: Option<PathBuf>,
}

/// Runs `cargo xtask demo`: builds, runs the demonstration, and checks its figures.
pub(crate) fn run(args: &DemoArgs) -> Result<()> {
    let workspace = CargoWorkspace::load()?;
    setup::prepare(&[SetupPurpose::Build, SetupPurpose::Kernel, SetupPurpose::Node], args.yes)?;
    check_gateway(args.gateway)?;
    let rouse = match &args.rouse {
        Some(rouse) => rouse.clone(),
        None if args.dev => build::build_rouse(&workspace, BuildProfile::Debug)?,
        // The image's program: its build shares work with the sample's, and the tests may have built it already.
        None => image::build_static(&workspace, "rouse")?,
    };
    let images = workspace.target.join("images");
    image::write_layouts(&workspace, &["hello"], &images)?;

    let folder = workspace.target.join("demo");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let node = LocalNode::start(
        "demo",
        &rouse,
        &images,
        args.gateway,
        &folder.join("rouse.log"),
        args.keep,
    )?;
    let run = demo_runner::run(&node, &workspace.root.join("examples/hello.yaml"));
    // The log is read before the node stops, because stopping adds lines to it.
    let log = node.log();
    let run = match run {
        Ok(run) => run,
        Err(error) => {
            node.stop()?;
            return Err(error.context(format!("the node's log is {}", node.log_file().display())));
        }
    };
    if args.keep {
        node.leave_running(args.gateway);
    } else {
        node.stop()?;
    }
    report_results(&run, &log, args.json.as_deref(), &folder)
}

fn check_gateway(gateway: SocketAddr) -> Result<()> {
    TcpListener::bind(gateway).map(drop).with_context(|| {
        format!("the gateway's address {gateway} is taken; choose another with --gateway")
    })
}

/// Prints the table, and writes chart and figures. Fails if a goal was missed.
fn report_results(run: &DemoRun, log: &str, json: Option<&Path>, folder: &Path) -> Result<()> {
    let figures = DemoFigures::from_run(run, log);
    println!("\n{figures}");
    let svg = folder.join("demo.svg");
    fs::write(&svg, chart::svg(run)).with_context(|| format!("cannot write {}", svg.display()))?;
    println!("chart: {}", svg.display());
    if let Some(file) = json {
        let text = serde_json::to_string_pretty(&figures)? + "\n";
        fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))?;
        println!("figures: {}", file.display());
    }
    // Chart and figures are written before the check, because they explain a failure.
    let failures = figures.failures();
    if !failures.is_empty() {
        bail!("the demonstration failed: {}", failures.join("; "));
    }
    println!("The demonstration reached all its goals.");
    Ok(())
}
