//! Shell: memory and CPU of ten thousand sleeping services.

use std::{fs, time::Duration};

use anyhow::{Context as _, Result};

use super::{
    node_context::NodeBenchContext,
    process_memory::map_bytes,
    report::{BenchGoal, BenchRow, case_row},
};
use crate::sh;

const SERVICES: usize = 10_000;
/// Time over which CPU is measured.
const CPU_SAMPLE_TIME: Duration = Duration::from_secs(30);
/// Time to settle after applying the services.
const SETTLE_TIME: Duration = Duration::from_secs(10);

/// Measures memory of all daemons and maps together, for each service: the growth of the node, plus all maps, which
/// get their whole memory at the start.
pub(super) fn run(context: &NodeBenchContext) -> Result<Vec<BenchRow>> {
    let node = context.start_node()?;
    sh::sleep(SETTLE_TIME);
    let empty = resident_kib(node.pid())?;
    context.apply(&node, "idle", SERVICES, 0)?;
    sh::sleep(SETTLE_TIME);
    // Maps have fixed sizes and are not part of the resident size, so they are added apart.
    let resident_with_services = resident_kib(node.pid())?;
    let maps = map_bytes(node.pid())?.values().sum::<f64>() / 1024.0;
    let before = cpu_ticks(node.pid())?;
    sh::sleep(CPU_SAMPLE_TIME);
    let ticks = cpu_ticks(node.pid())? - before;
    node.stop()?;
    println!(
        "idle: resident {empty} KiB empty, {resident_with_services} KiB full; maps {maps} KiB"
    );
    let a_service = (resident_with_services - empty + maps) / SERVICES as f64;
    let percent = ticks / CPU_SAMPLE_TIME.as_secs_f64();
    Ok(vec![
        case_row("memory_per_service", "rouse", "KiB", &[a_service], BenchGoal::AtMost(5.0)),
        case_row("cpu", "rouse", "percent", &[percent], BenchGoal::AtMost(1.0)),
    ])
}

fn resident_kib(pid: u32) -> Result<f64> {
    let status = read_proc_file(pid, "status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    number.context("no VmRSS in /proc")
}

/// User and system time in ticks of 10 ms: one tick a second is one percent of a processor.
fn cpu_ticks(pid: u32) -> Result<f64> {
    let stat = read_proc_file(pid, "stat")?;
    // The name in parentheses may hold blanks, so fields are counted after it: utime and stime are 14 and 15 of
    // proc(5).
    let (_, rest) = stat.rsplit_once(") ").context("no name in /proc/PID/stat")?;
    let fields: Vec<f64> =
        rest.split(' ').map(|field| field.trim().parse().unwrap_or(0.0)).collect();
    Ok(fields.get(11).unwrap_or(&0.0) + fields.get(12).unwrap_or(&0.0))
}

fn read_proc_file(pid: u32, file: &str) -> Result<String> {
    fs::read_to_string(format!("/proc/{pid}/{file}"))
        .with_context(|| format!("cannot read /proc/{pid}/{file}"))
}
