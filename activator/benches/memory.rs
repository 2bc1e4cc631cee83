//! Cost of a sleeping service at the activator: memory, and time to apply its routes.
//!
//! `cargo bench -p activator`: services arrive one by one, as a controller sends them. The benchmark prints one JSON
//! row for each figure.

use std::{
    io::Write as _,
    net::IpAddr,
    num::NonZeroU16,
    time::{Duration, Instant},
};

use activator::{ActivatorConfig, ActivatorInstance};
use common::{
    link::RouteBatch,
    wire::{
        AppProtocol, ConnectionPath, NamespacedName, RevisionEntry, RouteChange, RouteTarget,
        ServiceEntry,
    },
};
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
            apply_changes(&activator, sleeping_service_changes(number));
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
    let other_ports =
        activator.gateway.routes.apply(RouteBatch { changes, ..RouteBatch::default() });
    assert!(other_ports, "each service brings its port");
}

/// RouteTable entries of a sleeping service and of its revision, as the controller sends them.
fn sleeping_service_changes(number: u16) -> Vec<RouteChange> {
    let [high, low] = number.to_be_bytes();
    let (name, revision) = names(number);
    let service = ServiceEntry {
        name: name.clone(),
        addresses: vec![
            IpAddr::from([10, 96, high, low]),
            IpAddr::from([0xfd00, 0x10, 0x96, 0, 0, 0, 0, number]),
        ],
        port: NonZeroU16::MIN,
        activator_port: NonZeroU16::MIN.saturating_add(20_000 + number % 10_000),
        targets: vec![RouteTarget { revision: revision.clone(), percent: 100 }],
        connection_path: ConnectionPath::Direct,
        hosts: vec![format!("{}.{}.127.0.0.1.sslip.io", name.name, name.namespace)],
        gateway_rules: None,
    };
    let revision = RevisionEntry {
        name: revision,
        service: name.name.clone(),
        configuration: name.name,
        container_concurrency: 0,
        timeout: Duration::from_secs(300),
        response_start_timeout: None,
        idle_timeout: None,
        protocol: AppProtocol::Http1,
        policy: None,
        reachable: true,
        initial_scale_reached: true,
        allowed_sources: None,
    };
    vec![RouteChange::Revision(revision), RouteChange::Service(service)]
}

/// Names of a service and of its revision, as long as those of real users.
fn names(number: u16) -> (NamespacedName, NamespacedName) {
    let namespace = format!("team-{:03}-production", number % 100);
    let service = format!("orders-checkout-worker-{number}");
    let revision = NamespacedName::new(namespace.as_str(), format!("{service}-00001"));
    (NamespacedName::new(namespace, service), revision)
}

/// Resident memory of this process, in bytes.
fn resident_bytes() -> std::io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.map(|kib| kib * 1024).ok_or_else(|| std::io::Error::other("no VmRSS in /proc/self/status"))
}
