//! Memory that one sleeping service costs the autoscaler, counted by the allocator.
//!
//! `cargo bench -p autoscaler --bench memory`: the autoscaler receives Revisions in one batch, as the controller sends
//! them. Counted is all that it keeps of them and of its decisions. Prints one JSON row for each number of services.

use std::{alloc::System, io::Write as _, sync::Arc, time::Duration};

use autoscaler::evaluator::ScaleEvaluator;
use common::{
    fixtures,
    wire::{NamespacedName, RevisionEntry, RouteTable, ScalePolicy},
};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static HEAP: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

fn main() -> std::io::Result<()> {
    for services in [1_000, 10_000] {
        let empty = live_bytes();
        // The same constructor as in `run`; outside a runtime none of its timers starts.
        let evaluator = ScaleEvaluator::new(Duration::from_secs(2), 0);
        add_services(&evaluator, services);
        let bytes = (live_bytes() - empty) / services;
        let (known, awake) = evaluator.read(|revisions| {
            (
                revisions.revisions().count(),
                revisions.revisions().filter(|(_, it)| it.is_awake()).count(),
            )
        });
        assert_eq!((known, awake), (services, 0), "all are known, and asleep");
        writeln!(
            std::io::stdout(),
            r#"{{"case":"memory_per_service","subject":"autoscaler","unit":"B","p50":{bytes},"n":{services}}}"#
        )?;
    }
    Ok(())
}

fn add_services(evaluator: &ScaleEvaluator, services: usize) {
    let table = route_table(services);
    evaluator.update(|revisions, now| {
        let updates = revisions.apply_routes(now, &table, &table.keys());
        assert_eq!(updates.len(), 0);
    });
}

/// Bytes allocated and not yet freed.
fn live_bytes() -> usize {
    let stats = HEAP.stats();
    stats.bytes_allocated - stats.bytes_deallocated
}

fn route_table(services: usize) -> RouteTable {
    let mut table = RouteTable::default();
    for at in 0..services {
        let service = NamespacedName::new("default", format!("sleeper-{at}"));
        let name = NamespacedName::new("default", format!("sleeper-{at}-00001"));
        table.revisions.insert(name.clone(), revision(&name, &service.name));
        table.services.insert(service.clone(), fixtures::service(&service, &name));
    }
    table
}

fn revision(name: &NamespacedName, service: &str) -> RevisionEntry {
    let policy = Some(Arc::new(ScalePolicy::default()));
    RevisionEntry { policy, ..fixtures::revision(name, service) }
}
