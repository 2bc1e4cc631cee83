//! Decisions per second, and memory per sleeping Revision, without sockets.
//!
//! `cargo bench -p autoscaler`: 10,000 sleeping Revisions, one waiting request for each; each report causes one
//! decision. Prints one JSON row for each figure, as `cargo xtask bench` collects them.

use std::{
    collections::BTreeSet,
    io::Write as _,
    sync::Arc,
    time::{Duration, Instant},
};

use autoscaler::revisions::{DecisionUpdate, ScaledRevisions};
use common::{
    fixtures,
    wire::{
        ClientComponent, ComponentReplica, ConnectionPath, NamespacedName, RequestTotals,
        RevisionEntry, RouteTable, ScalePolicy, ServiceEntry, UsageKey, UsageSample,
    },
};

const SERVICES: usize = 10_000;

fn main() -> std::io::Result<()> {
    let table = route_table();
    let kib_before = resident_kib()?;
    let mut revisions = ScaledRevisions::new(Duration::from_secs(2));
    let second = Duration::from_secs(1);
    revisions.apply_routes(second, &table, &table.keys());
    revisions.evaluate_due(second);
    let sleeping_kib = resident_kib()?.saturating_sub(kib_before);

    let replica =
        ComponentReplica { role: ClientComponent::Activator, name: "a".into(), node: "n".into() };
    let stream = revisions.open_stream(second, replica);
    let stream = revisions.complete_batch(second, stream);
    let reports: Vec<UsageSample> = table.revisions.keys().map(waiting_request).collect();
    let mut each = Vec::with_capacity(SERVICES);
    let begin = Instant::now();
    for report in &reports {
        let start = Instant::now();
        revisions.apply_usage(2 * second, stream, report);
        let decided = revisions
            .evaluate_due(2 * second)
            .iter()
            .filter(|update| matches!(update, DecisionUpdate::Decided(_)))
            .count();
        assert_eq!(decided, 1, "each waiting request is one decision");
        each.push(start.elapsed());
    }
    let per_second = SERVICES as f64 / begin.elapsed().as_secs_f64();
    each.sort_unstable();
    let micros = |at: usize| each[at * (SERVICES - 1) / 100].as_secs_f64() * 1e6;
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        r#"{{"case":"wakes","subject":"rouse","unit":"per_s","p50":{per_second:.0},"n":{SERVICES}}}"#
    )?;
    let (p50, p90, p99) = (micros(50), micros(90), micros(99));
    writeln!(
        out,
        r#"{{"case":"report_to_decision","subject":"rouse","unit":"us","p50":{p50:.1},"p90":{p90:.1},"p99":{p99:.1},"n":{SERVICES}}}"#
    )?;
    let bytes = sleeping_kib * 1024 / SERVICES as u64;
    writeln!(
        out,
        r#"{{"case":"memory_per_revision","subject":"rouse","unit":"B","p50":{bytes},"n":{SERVICES}}}"#
    )
}

/// Returns an activator's report of one waiting request, which began at the moment of the reading.
fn waiting_request(revision: &NamespacedName) -> UsageSample {
    let key = UsageKey { revision: revision.clone(), pod: None };
    let totals = RequestTotals { started: 1, started_sum_ns: 7, ..RequestTotals::default() };
    UsageSample { key, read_at_ns: 7, totals, status: vec![], latency: vec![], client: None }
}

fn route_table() -> RouteTable {
    let mut table = RouteTable::default();
    for at in 0..SERVICES {
        let name = NamespacedName::new("default", format!("service-{at}-00001"));
        let service = NamespacedName::new("default", format!("service-{at}"));
        table.revisions.insert(name.clone(), revision(&name));
        let entry = ServiceEntry {
            connection_path: ConnectionPath::Activator,
            ..fixtures::service(&service, &name)
        };
        table.services.insert(service, entry);
    }
    assert_eq!(table.keys().into_iter().collect::<BTreeSet<_>>().len(), 2 * SERVICES);
    table
}

fn revision(name: &NamespacedName) -> RevisionEntry {
    let policy = Some(Arc::new(ScalePolicy::default()));
    RevisionEntry { policy, ..fixtures::revision(name, "service") }
}

/// Resident memory of this process in KiB, from `/proc/self/status`.
fn resident_kib() -> std::io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib =
        line.and_then(|rest| rest.split_whitespace().next()).and_then(|text| text.parse().ok());
    kib.ok_or_else(|| std::io::Error::other("no VmRSS in /proc/self/status"))
}
