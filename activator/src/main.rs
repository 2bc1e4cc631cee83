//! Shell: the activator as a process of its own.

use activator::Config;
use anyhow::Context as _;
use clap::Parser as _;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_unset| EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let config = Config::parse();
    let shutdown = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate()).context("cannot watch for SIGTERM")?;
    let stop = shutdown.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
        stop.cancel();
    });
    // Spawned, as this thread would otherwise be one more that tasks are handed to and fro with.
    let end = tokio::spawn(activator::run(config, shutdown)).await.context("activator panicked")?;
    end.context("activator failed")
}
