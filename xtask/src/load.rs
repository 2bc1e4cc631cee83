//! Shell: a load generator; runs inside the node's client namespace and prints one JSON line a request.

mod stages;
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

use self::stages::Stages;
pub(crate) use self::worker::unix_us;

/// What to send, where to, and how much.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Where to connect to, by name or address; an IPv4 address of the name is preferred
    #[arg(long, value_name = "HOST:PORT", value_parser = resolve)]
    addr: SocketAddr,
    /// Host header
    #[arg(long)]
    host: String,
    /// Path and query
    #[arg(long, default_value = "/")]
    path: String,
    /// Connections (or, with --open, requests a second) and for how long: 4x3s,40x15s
    #[arg(long)]
    stages: Stages,
    /// Send at a fixed rate, whether or not earlier requests were answered
    #[arg(long)]
    open: bool,
    /// Share of requests that open a connection of their own, in percent
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u8).range(0..=100))]
    fresh_pct: u8,
    /// Stop after so many requests
    #[arg(long)]
    requests: Option<u64>,
    /// Give a request up after so many seconds
    #[arg(long, default_value_t = 60)]
    timeout_s: u64,
}

/// One request and what became of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// When it was sent (for a new connection: when the connect began), Unix time in µs.
    pub(crate) at_us: u64,
    /// Until the last byte of the answer, or until it was given up, in µs.
    pub(crate) took_us: u64,
    /// Until the first byte of the answer, in µs.
    pub(crate) first_byte_us: u64,
    /// HTTP status; 0 without an answer.
    pub(crate) status: u16,
    /// Whether it opened the connection it went over.
    pub(crate) fresh: bool,
    /// Which pod answered, in its own words.
    pub(crate) pod: String,
    /// Whether that pod saw this client's own address as its peer, and not the activator's.
    pub(crate) direct: bool,
    /// When that pod's `listen` returned, Unix time in µs.
    pub(crate) listening_us: u64,
    /// Why there was no answer.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) error: String,
}

impl Record {
    /// Whether the application answered.
    pub(crate) fn is_answered(&self) -> bool {
        (200..300).contains(&self.status) && self.error.is_empty()
    }
}

/// `xtask load`.
pub(crate) fn run(args: &Args) -> Result<()> {
    // Parsers ask what the processor can do. On a virtual machine the answer takes 50 µs, which are not the service's.
    #[cfg(target_arch = "x86_64")]
    let _ = std::is_x86_feature_detected!("avx2");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    LocalSet::new().block_on(&runtime, send_all(args))
}

async fn send_all(args: &Args) -> Result<()> {
    let started = Instant::now();
    let (records, mut printed) = mpsc::channel::<Record>(4096);
    let shared = Rc::new(worker::Shared::new(args, started));
    if args.open {
        tokio::task::spawn_local(worker::open(shared, records));
    } else {
        for index in 0..args.stages.most() {
            tokio::task::spawn_local(worker::closed(shared.clone(), index, records.clone()));
        }
        drop(records);
    }
    let mut out = std::io::stdout().lock();
    while let Some(record) = printed.recv().await {
        serde_json::to_writer(&mut out, &record).context("cannot write a result")?;
        out.write_all(b"\n")?;
        // Somebody watches live; but a line at a time would cost a system call each under load.
        if printed.is_empty() {
            out.flush()?;
        }
    }
    Ok(())
}

fn resolve(text: &str) -> Result<SocketAddr, String> {
    let found =
        text.to_socket_addrs().map_err(|error| format!("cannot resolve {text}: {error}"))?;
    let found: Vec<SocketAddr> = found.collect();
    let ipv4 = found.iter().find(|address| address.is_ipv4());
    ipv4.or_else(|| found.first()).copied().ok_or_else(|| format!("{text} has no address"))
}

impl Args {
    fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout_s)
    }
}
