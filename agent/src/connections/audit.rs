//! Pure: audit of a pod's gauges against its sockets: drift, and its correction.
//!
//! The eBPF programs add to and subtract from the gauges, so an error stays. Each socket stores what it counts for, so
//! all of them together give the right values. A list of them takes time, in which they change. One difference proves
//! nothing, so a scan lists the sockets twice and reads the gauges before, between and after. A gauge is judged only if
//! nothing changed meanwhile. Drift is a difference that `SCANS_TO_CONFIRM` scans in a row find.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

pub(crate) mod scan;

use crate::pod_gauge::{GAUGE_COUNT, GaugeReading, GaugeValues, PodGauge};

/// Pause between two scans of a pod.
const SCAN_PERIOD: Duration = Duration::from_secs(10);
/// Pause while all gauges of a pod are 0, as those of most pods are most of the time.
const IDLE_SCAN_PERIOD: Duration = Duration::from_secs(60);
/// Pause after a scan that found a difference.
const RESCAN_PAUSE: Duration = Duration::from_secs(1);
/// Number of scans in a row that must find the same difference.
const SCANS_TO_CONFIRM: u32 = 3;
/// Bound on the cost of scans of a pod: one part in this number of a processor's time.
const CPU_BUDGET_DIVISOR: u32 = 100;

/// Share of one socket in the gauges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SocketShare {
    /// Requests in flight on the socket.
    pub(crate) in_flight: u32,
    /// True if the socket has carried no request so far.
    pub(crate) is_fresh: bool,
    /// True if its protocol is opaque, so that its requests are an estimate.
    pub(crate) is_estimated: bool,
}

/// Sockets that count for a pod, by their cookies.
pub(crate) type CountedSockets = BTreeMap<u64, SocketShare>;

/// One scan of a pod: gauges and sockets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AuditScan {
    /// Readings before the first list, between the two, and after the second.
    pub(crate) readings: [GaugeReading; 3],
    /// The two lists of sockets.
    pub(crate) sockets: [CountedSockets; 2],
    /// Connections to counted ports that no gauge counts, by their cookies.
    pub(crate) uncounted: BTreeSet<u64>,
    /// Processor time of the scan.
    pub(crate) cpu_time: Duration,
}

impl AuditScan {
    /// Returns the difference of the sockets from each gauge; `None` if the sockets or the gauge changed.
    fn differences(&self) -> [Option<i64>; GAUGE_COUNT] {
        PodGauge::ALL.map(|gauge| {
            let index = gauge as usize;
            let [before, between, after] = self.readings;
            let is_unchanged = before.values[index] == between.values[index]
                && between.values[index] == after.values[index]
                // A request that began and ended between two readings leaves the gauge unchanged; only the totals show
                // it.
                && (gauge != PodGauge::InFlight
                    || before.totals == between.totals && between.totals == after.totals);
            let [first, second] = self.sockets.each_ref().map(|all| socket_shares(all, gauge));
            let counted: i64 = first.values().sum();
            (is_unchanged && first == second).then(|| counted - before.values[index])
        })
    }
}

/// Returns the sockets that count in a gauge, each with its share.
fn socket_shares(all: &CountedSockets, gauge: PodGauge) -> BTreeMap<u64, i64> {
    let counts = |it: &SocketShare| match gauge {
        PodGauge::Connections => 1,
        PodGauge::InFlight => i64::from(it.in_flight),
        PodGauge::Fresh => i64::from(it.is_fresh),
        PodGauge::Estimated => i64::from(it.is_estimated),
    };
    all.iter().map(|(&cookie, it)| (cookie, counts(it))).filter(|(_, it)| *it > 0).collect()
}

/// Result of the judgement of a scan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct AuditVerdict {
    /// Correction of the gauges; all 0 if there is no drift.
    pub(crate) correction: GaugeValues,
    /// True if no gauge changed during the scan, so that each could be judged.
    pub(crate) is_steady: bool,
}

/// Audit state of this node's pods. Times are CLOCK_MONOTONIC in ns.
#[derive(Debug, Default)]
pub(crate) struct GaugeAudit {
    pods: BTreeMap<String, PodAudit>,
}

#[derive(Debug, Default)]
struct PodAudit {
    /// True if all gauges of the pod are 0.
    is_idle: bool,
    /// End of the newest scan; before the first one, the time at which the pod was added.
    scanned_ns: u64,
    /// Time of the next scan at the earliest.
    next_scan_ns: u64,
    /// Difference that the last scans found, and the number of these scans, by gauge.
    suspects: [(i64, u32); GAUGE_COUNT],
    /// Uncounted connections of the newest scan, by their cookies.
    uncounted: BTreeSet<u64>,
    /// Number of uncounted connections that the previous scan found as well.
    still_uncounted: usize,
}

impl GaugeAudit {
    /// Sets the pods to audit, each with its present gauges.
    pub(crate) fn set_pods(&mut self, now_ns: u64, pods: &BTreeMap<String, GaugeValues>) {
        self.pods.retain(|uid, _| pods.contains_key(uid));
        for (uid, values) in pods {
            let is_idle = *values == GaugeValues::default();
            let new_audit = || PodAudit {
                scanned_ns: now_ns,
                next_scan_ns: now_ns + nanos(SCAN_PERIOD),
                ..PodAudit::default()
            };
            self.pods.entry(uid.clone()).or_insert_with(new_audit).is_idle = is_idle;
        }
    }

    /// Returns the pods to scan now. Pass each result to [`handle_scan`](Self::handle_scan) before the next call.
    pub(crate) fn due_pods(&self, now_ns: u64) -> Vec<String> {
        let due = self.pods.iter().filter(|(_, pod)| pod.is_due(now_ns));
        due.map(|(uid, _)| uid.clone()).collect()
    }

    /// Judges a scan of a pod; `None` if the scan failed.
    pub(crate) fn handle_scan(
        &mut self,
        now_ns: u64,
        uid: &str,
        scan: Option<&AuditScan>,
    ) -> AuditVerdict {
        let Some(pod) = self.pods.get_mut(uid) else { return AuditVerdict::default() };
        pod.scanned_ns = now_ns;
        // Set before the result is judged, so that a pod whose scans fail is not scanned more often than others.
        pod.next_scan_ns = now_ns + nanos(SCAN_PERIOD);
        // A failed scan ends the series: nothing is known of the time in between.
        let Some(scan) = scan else {
            pod.suspects = Default::default();
            return AuditVerdict::default();
        };
        // A connection may just have been opened at the first scan that finds it; at two in a row it is really
        // uncounted.
        pod.still_uncounted = scan.uncounted.intersection(&pod.uncounted).count();
        pod.uncounted.clone_from(&scan.uncounted);
        let differences = scan.differences();
        let mut verdict = AuditVerdict {
            is_steady: differences.iter().all(Option::is_some),
            ..AuditVerdict::default()
        };
        for (at, difference) in differences.into_iter().enumerate() {
            verdict.correction[at] =
                judge_difference(&mut pod.suspects[at], difference.unwrap_or_default());
        }
        let has_suspect = pod.suspects.iter().any(|(_, times)| *times > 0);
        // A suspect is scanned soon again. After a long scan the pause is longer, which bounds the share of CPU time.
        let pause = if has_suspect { RESCAN_PAUSE } else { SCAN_PERIOD };
        pod.next_scan_ns =
            now_ns + nanos(pause.max(scan.cpu_time.saturating_mul(CPU_BUDGET_DIVISOR)));
        verdict
    }

    /// Returns the number of connections to counted ports that no gauge counted in the last two scans. Their listener
    /// was opened outside the pods' cgroups, or before the pod was known. A probe has ended by the second scan.
    pub(crate) fn uncounted(&self) -> usize {
        self.pods.values().map(|pod| pod.still_uncounted).sum()
    }
}

impl PodAudit {
    fn is_due(&self, now_ns: u64) -> bool {
        let has_suspect = self.suspects.iter().any(|(_, times)| *times > 0);
        // An idle pod is scanned rarely, but a difference that was found there is checked again at the usual rate.
        let pause = if self.is_idle && !has_suspect { IDLE_SCAN_PERIOD } else { Duration::ZERO };
        self.next_scan_ns.max(self.scanned_ns + nanos(pause)) <= now_ns
    }
}

/// Records a difference, 0 if there is none or it could not be judged. Returns the correction.
fn judge_difference((suspect, times): &mut (i64, u32), difference: i64) -> i64 {
    match difference {
        0 => *times = 0,
        same if same == *suspect => *times += 1,
        // Another difference than the last one confirms neither: the count begins again.
        other => (*suspect, *times) = (other, 1),
    }
    if *times < SCANS_TO_CONFIRM {
        return 0;
    }
    *times = 0;
    difference
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
