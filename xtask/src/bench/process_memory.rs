//! Shell: memory of one process, as the kernel accounts it.

use std::{collections::BTreeMap, fs};

use anyhow::{Context as _, Result};

/// Proportional set size of a process, in MiB: a page shared by n processes counts 1/n.
pub(super) fn pss_mib(id: u32) -> Result<f64> {
    let file = format!("/proc/{id}/smaps_rollup");
    let text = fs::read_to_string(&file).with_context(|| format!("cannot read {file}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:"));
    let kib: Option<f64> = line.and_then(|it| it.split_whitespace().next()?.parse().ok());
    Ok(kib.context("no Pss")? / 1024.0)
}

/// Largest resident set of a process so far, in MiB; NaN if the process is gone.
pub(super) fn peak_rss_mib(pid: u32) -> f64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|it| it.split_whitespace().next()?.parse::<f64>().ok());
    kib.map_or(f64::NAN, |kib| kib / 1024.0)
}

/// Memory of the eBPF maps that a process holds open, in bytes by the map's id.
pub(super) fn map_bytes(pid: u32) -> Result<BTreeMap<u64, f64>> {
    let mut maps = BTreeMap::new();
    // `memlock` in fdinfo is the kernel's own account of a map's memory.
    for entry in fs::read_dir(format!("/proc/{pid}/fdinfo"))? {
        let text = fs::read_to_string(entry?.path()).unwrap_or_default();
        let field = |name: &str| -> Option<f64> {
            text.lines().find_map(|line| line.strip_prefix(name))?.trim().parse().ok()
        };
        if let (Some(id), Some(bytes)) = (field("map_id:"), field("memlock:")) {
            maps.insert(id as u64, bytes);
        }
    }
    Ok(maps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_a_process_that_is_gone_is_not_zero() {
        assert!(peak_rss_mib(std::process::id()) > 0.0);
        assert!(peak_rss_mib(u32::MAX).is_nan());
    }
}
