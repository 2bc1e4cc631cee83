//! Cost of a sleeping service at the activator: memory, and time to apply its routes.
//!
//! `cargo bench -p activator`: services arrive one by one, as a controller sends them. The benchmark prints one JSON
//! row for each figure.

use std::{io::Write as _, time::Instant};

use activator::{ActivatorConfig, ActivatorInstance};
use common::{fixtures, link::RouteBatch, wire::RouteChange};
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;

fn main() -> std::io::Result<()> {
    let mut registry = Registry::default();
    let activator = ActivatorInstance::new(
        &ActivatorConfig::defaults(),
        &mut registry,
        &CancellationToken::new(),
    );
    let mut out = std::io::stdout().lock();
    let empty = resident_bytes()?;
    let begin = Instant::now();
    let mut done = 0;
    for services in [1_000, 10_000] {
        for number in done..services {
            let (service, revision) = fixtures::sleeping_service(number);
            let changes = [RouteChange::Revision(revision), RouteChange::Service(service)];
            apply_changes(&activator, changes.into());
        }
        done = services;
        let bytes = (resident_bytes()? - empty) / u64::from(services);
        writeln!(
            out,
            r#"{{"case":"memory_per_service","subject":"activator","unit":"B","p50":{bytes},"n":{services}}}"#
        )?;
    }
    let each = begin.elapsed().as_secs_f64() * 1e6 / f64::from(done);
    writeln!(
        out,
        r#"{{"case":"take_in","subject":"activator","unit":"us","p50":{each:.1},"n":{done}}}"#
    )
}

fn apply_changes(activator: &ActivatorInstance, changes: Vec<RouteChange>) {
    let changes = changes.into_iter().filter_map(|change| Some((change.key()?, change))).collect();
    let ports_changed =
        activator.forwarder.routes.apply(RouteBatch { changes, ..RouteBatch::default() });
    assert!(ports_changed, "each service brings its port");
}

/// Resident memory of this process, in bytes.
fn resident_bytes() -> std::io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.map(|kib| kib * 1024).ok_or_else(|| std::io::Error::other("no VmRSS in /proc/self/status"))
}
