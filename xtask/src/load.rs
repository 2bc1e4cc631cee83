//! Shell: a load generator, which runs in the node's client namespace and prints one JSON line a request.

mod load_stages;
mod worker;

use std::{
    io::Write as _,
    net::{SocketAddr, ToSocketAddrs as _},
    rc::Rc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use tokio::{sync::mpsc, task::LocalSet};

use self::load_stages::LoadStages;
pub(crate) use self::worker::unix_us;

/// Requests to send: destination, number and rate.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct LoadArgs {
    /// Host name or address, and port, to connect to; an IPv4 address of the name is preferred
    #[arg(long, value_name = "HOST:PORT", value_parser = resolve)]
    addr: SocketAddr,
    /// Value of the Host header
    #[arg(long)]
    host: String,
    /// Path and query of the requests
    #[arg(long, default_value = "/")]
    path: String,
    /// Connections (or, with --open, requests a second), each for a time: 4x3s,40x15s
    #[arg(long)]
    stages: LoadStages,
    /// Send at a fixed rate, also while earlier requests wait for their responses
    #[arg(long)]
    open: bool,
    /// Share of requests that open a connection of their own, in percent
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u8).range(0..=100))]
    fresh_pct: u8,
    /// Stop after so many requests
    #[arg(long)]
    requests: Option<u64>,
    /// Give up on a request after so many seconds
    #[arg(long, default_value_t = 60)]
    timeout_s: u64,
}

/// One request and its result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct LoadRecord {
    /// Time of sending (on a new connection: begin of the connect), Unix time in µs.
    pub(crate) at_us: u64,
    /// Time until the last byte of the response, or until the request was given up, in µs.
    pub(crate) took_us: u64,
    /// Time until the first byte of the response, in µs.
    pub(crate) first_byte_us: u64,
    /// HTTP status; 0 without a response.
    pub(crate) status: u16,
    /// True if the request opened its connection.
    pub(crate) fresh: bool,
    /// Name of the pod that responded, from its response header.
    pub(crate) pod: String,
    /// True if the pod saw this client's address as its peer, and not the activator's.
    pub(crate) direct: bool,
    /// Time at which the pod's `listen` returned, Unix time in µs.
    pub(crate) listening_us: u64,
    /// Reason that there is no response; empty if there is one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) error: String,
}

impl LoadRecord {
    /// Returns true if the application responded with success.
    pub(crate) fn is_answered(&self) -> bool {
        (200..300).contains(&self.status) && self.error.is_empty()
    }
}

/// Runs the hidden command `xtask load`.
pub(crate) fn run(args: &LoadArgs) -> Result<()> {
    // Parsers query the processor's features. On a virtual machine a first query takes 50 µs, which would count as
    // the service's time.
    #[cfg(target_arch = "x86_64")]
    let _ = std::is_x86_feature_detected!("avx2");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    LocalSet::new().block_on(&runtime, send_all(args))
}

/// Starts the workers, and writes their records to stdout until the last worker ends.
async fn send_all(args: &LoadArgs) -> Result<()> {
    let started = Instant::now();
    let (records_tx, mut records_rx) = mpsc::channel::<LoadRecord>(4096);
    let state = Rc::new(worker::LoadWorkerState::new(args, started));
    if args.open {
        tokio::task::spawn_local(worker::run_open_loop(state, records_tx));
    } else {
        for index in 0..args.stages.max_level() {
            tokio::task::spawn_local(worker::run_closed_loop(
                state.clone(),
                index,
                records_tx.clone(),
            ));
        }
        // Only the workers hold senders now, so the loop below ends with the last of them.
        drop(records_tx);
    }
    let mut out = std::io::stdout().lock();
    while let Some(record) = records_rx.recv().await {
        serde_json::to_writer(&mut out, &record).context("cannot write a result")?;
        out.write_all(b"\n")?;
        // Demo and benches read the records live, but under load a flush a line would cost a system call each.
        if records_rx.is_empty() {
            out.flush()?;
        }
    }
    Ok(())
}

fn resolve(text: &str) -> Result<SocketAddr, String> {
    let addresses =
        text.to_socket_addrs().map_err(|error| format!("cannot resolve {text}: {error}"))?;
    let addresses: Vec<SocketAddr> = addresses.collect();
    let ipv4 = addresses.iter().find(|address| address.is_ipv4());
    ipv4.or_else(|| addresses.first()).copied().ok_or_else(|| format!("{text} has no address"))
}

impl LoadArgs {
    fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout_s)
    }
}
