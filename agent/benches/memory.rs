//! Cost of a sleeping service in the agent: memory, and time to plan it.
//!
//! Run by `cargo bench -p agent`: services arrive one by one, as a controller sends them. Prints one JSON row for each
//! result.

use std::{collections::BTreeMap, io::Write as _, net::IpAddr, time::Instant};

use agent::{kernel::map_op::KernelRoutes, routes::plan::RoutePlanner};
use common::{
    fixtures,
    wire::{ActivatorEntry, RouteChange},
};
use datapath::{
    abi::{FIRST_SERVICE, FrontendKey, QUARANTINE_NS},
    load_balancing::{RoutingMode, SvcInfo, SvcState},
};

fn main() -> std::io::Result<()> {
    let mut planner = RoutePlanner::resume(KernelRoutes::default(), 0);
    let mut out = std::io::stdout().lock();
    let empty = resident_bytes()?;
    let begin = Instant::now();
    let (mut done, mut now) = (0, 0);
    let activator = ActivatorEntry {
        node: "node".into(),
        ..fixtures::activator("activator", vec![[10, 244, 0, 1].into()])
    };
    apply_changes(&mut planner, vec![RouteChange::Activator(activator)], &mut now);
    for services in [1_000, 10_000] {
        for number in done..services {
            let (service, revision) = fixtures::sleeping_service(number);
            let changes = [RouteChange::Revision(revision), RouteChange::Service(service)];
            apply_changes(&mut planner, changes.into(), &mut now);
        }
        done = services;
        let bytes = (resident_bytes()? - empty) / u64::from(services);
        writeln!(
            out,
            r#"{{"case":"memory_per_service","subject":"agent","unit":"B","p50":{bytes},"n":{services}}}"#
        )?;
    }
    let each = begin.elapsed().as_secs_f64() * 1e6 / f64::from(done);
    writeln!(
        out,
        r#"{{"case":"take_in","subject":"agent","unit":"us","p50":{each:.1},"n":{done}}}"#
    )?;
    let kernel = kernel_routes(done);
    let begin = Instant::now();
    planner.restart(kernel, now);
    let again = planner.plan(now + QUARANTINE_NS, &BTreeMap::new());
    let ms = begin.elapsed().as_secs_f64() * 1e3;
    // Only the lists of activators are new to the kernel.
    let writes_no_service = again.is_ok_and(|plan| plan.ops.len() < usize::from(done));
    assert!(writes_no_service, "it fits, and the kernel has all services");
    writeln!(out, r#"{{"case":"resume","subject":"agent","unit":"ms","p50":{ms:.1},"n":{done}}}"#)
}

/// Returns the content of the kernel's maps with this many sleeping services.
fn kernel_routes(services: u16) -> KernelRoutes {
    let mut table = KernelRoutes::default();
    for number in 0..services {
        let info = SvcInfo {
            activators: 0,
            affinity_seconds: 0,
            port_be: (20_000 + number % 10_000).to_be(),
        };
        let state = SvcState { offset: 0, count: 0, generation: 1, mode: RoutingMode::Activator };
        let addresses = fixtures::sleeping_service_addresses(number);
        for (family, address) in addresses.into_iter().enumerate() {
            let service_id = FIRST_SERVICE + 2 * u32::from(number) + family as u32;
            let address = match address {
                IpAddr::V4(four) => four.to_ipv6_mapped().octets(),
                IpAddr::V6(six) => six.octets(),
            };
            let key = FrontendKey { address, port_be: 1u16.to_be(), protocol: 6, reserved: 0 };
            table.frontends.insert(key, service_id);
            table.services.insert(service_id, (state, info, Vec::new()));
        }
    }
    table.written.services = FIRST_SERVICE + 2 * u32::from(services);
    table
}

fn apply_changes(planner: &mut RoutePlanner, changes: Vec<RouteChange>, now: &mut u64) {
    changes.into_iter().for_each(|change| planner.apply_change(change));
    // A plan puts what it frees in quarantine for a second.
    *now += QUARANTINE_NS;
    let plan = planner.plan(*now, &BTreeMap::new());
    assert!(plan.is_ok_and(|plan| !plan.ops.is_empty()), "each change is something to write");
}

/// Returns the resident memory of this process in bytes.
fn resident_bytes() -> std::io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.map(|kib| kib * 1024).ok_or_else(|| std::io::Error::other("no VmRSS in /proc/self/status"))
}
