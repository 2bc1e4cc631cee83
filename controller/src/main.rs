//! Runs the controller alone: on Kubernetes, or without a node that would carry out its orders.

use std::io::Write as _;

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use common::node::Orders;
use controller::{Config, config::Cluster, local::Node};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{mpsc, watch},
};
use tokio_util::sync::CancellationToken;

#[derive(Debug, Parser)]
#[command(version, about)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// Where objects and pods are.
    #[arg(long, env = "ROUSE_PLATFORM", value_enum, default_value = "local")]
    platform: Platform,
    #[command(flatten)]
    config: Config,
    #[command(flatten)]
    cluster: Cluster,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Platform {
    /// In folders.
    Local,
    /// In a cluster.
    Kubernetes,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Prints the CustomResourceDefinitions, to be applied to Kubernetes.
    Crds,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    if let Some(Command::Crds) = args.command {
        let yaml = controller::crds::yaml().context("cannot write the CRDs")?;
        return std::io::stdout().write_all(yaml.as_bytes()).context("cannot write the CRDs");
    }
    let filter = tracing_subscriber::EnvFilter::try_from_default_env();
    let filter = filter.unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let shutdown = CancellationToken::new();
    let mut term = signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?;
    let stop = shutdown.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = term.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
        stop.cancel();
    });
    if args.platform == Platform::Kubernetes {
        let run = controller::run_on_kubernetes(args.config, args.cluster, shutdown);
        return run.await.context("controller failed");
    }
    let (_statuses, statuses) = mpsc::channel(1);
    let node = Node { orders: watch::channel(Orders::default()).0, statuses };
    controller::run(args.config, node, shutdown).await.context("controller failed")
}
