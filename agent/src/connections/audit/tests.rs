use proptest::prelude::*;

use super::*;

// Gauges are in the order of `PodGauge::ALL`: connections, requests in flight, fresh and estimated connections.

const UID: &str = "uid-1";
const S: u64 = 1_000_000_000;
/// A socket with one request in flight.
const ONE: SocketShare = SocketShare { in_flight: 1, is_fresh: false, is_estimated: false };

/// Returns a scan during which nothing changes. Each socket has its requests in flight, and true if it is fresh.
fn steady_scan(values: GaugeValues, sockets: &[(u32, bool)]) -> AuditScan {
    let reading = GaugeReading { values, totals: [7, 7] };
    let share = |&(in_flight, is_fresh)| SocketShare { in_flight, is_fresh, is_estimated: false };
    let all: CountedSockets = (100..).zip(sockets.iter().map(share)).collect();
    AuditScan { readings: [reading; 3], sockets: [all.clone(), all], ..AuditScan::default() }
}

/// Returns an audit of one pod with these gauges.
fn audit(values: GaugeValues) -> GaugeAudit {
    let mut audit = GaugeAudit::default();
    audit.set_pods(0, &BTreeMap::from([(UID.to_owned(), values)]));
    audit
}

/// Scans whenever a scan is due, for this number of seconds. Returns the times of the scans, and the sum of all
/// corrections.
fn run_scans(audit: &mut GaugeAudit, scan: &AuditScan, seconds: u64) -> (Vec<u64>, GaugeValues) {
    let (mut scan_times, mut added) = (Vec::new(), GaugeValues::default());
    for second in 0..=seconds {
        for uid in audit.due_pods(second * S) {
            scan_times.push(second);
            let add = audit.handle_scan(second * S, &uid, Some(scan)).correction;
            added.iter_mut().zip(add).for_each(|(all, it)| *all += it);
        }
    }
    (scan_times, added)
}

#[test]
fn gauges_that_agree_with_the_sockets_are_left_alone() {
    let scan = steady_scan([3, 2, 1, 0], &[(1, false), (1, false), (0, true)]);
    let mut audit = audit([3, 2, 1, 0]);
    assert_eq!(run_scans(&mut audit, &scan, 40), (vec![10, 20, 30, 40], [0; 4]));
}

#[test]
fn a_difference_is_corrected_once_three_scans_agree_on_it() {
    let scan = steady_scan([5, -1, 0, 0], &[(1, false), (0, true)]);
    let mut audit = audit([5, -1, 0, 0]);
    assert_eq!(run_scans(&mut audit, &scan, 11), (vec![10, 11], [0; 4]));
    assert_eq!(run_scans(&mut audit, &scan, 12), (vec![12], [-3, 2, 1, 0]));
}

#[test]
fn a_difference_that_changes_or_goes_is_not_corrected() {
    let mut audit = audit([1, 0, 0, 0]);
    let readings = [
        [1, 0, 0, 0],
        [1, 0, 0, 0],
        [2, 0, 0, 0],
        [1, 0, 0, 0],
        [0, 0, 0, 0],
        [1, 0, 0, 0],
        [1, 0, 0, 0],
    ];
    for (second, values) in (10..).zip(readings) {
        let verdict = audit.handle_scan(second * S, UID, Some(&steady_scan(values, &[])));
        assert_eq!(verdict, AuditVerdict { correction: [0; 4], is_steady: true }, "{values:?}");
    }
    let verdict = audit.handle_scan(20 * S, UID, Some(&steady_scan([1, 0, 0, 0], &[])));
    assert_eq!(verdict.correction, [-1, 0, 0, 0]);
}

#[test]
fn a_gauge_that_moves_during_a_scan_is_not_judged_and_the_others_are() {
    let quiet = steady_scan([9, 9, 9, 8], &[(1, true)]);
    let mut moved: Vec<(AuditScan, [Option<i64>; GAUGE_COUNT])> = Vec::new();
    for at in 0..3 {
        // A gauge that differs before, between or after.
        for gauge in 0..4 {
            let mut scan = quiet.clone();
            scan.readings[at].values[gauge] += 1;
            let mut want = [Some(-8); 4];
            want[gauge] = None;
            moved.push((scan, want));
        }
        // A request that begins and ends.
        let mut scan = quiet.clone();
        scan.readings[at].totals = [8, 8];
        moved.push((scan, [Some(-8), None, Some(-8), Some(-8)]));
    }
    // A connection in the place of another.
    let mut scan = quiet.clone();
    scan.sockets[1] = BTreeMap::from([(5, SocketShare { is_fresh: true, ..ONE })]);
    moved.push((scan, [None, None, None, Some(-8)]));
    // A first request that arrives.
    let mut scan = quiet.clone();
    scan.sockets[1] = BTreeMap::from([(100, ONE)]);
    moved.push((scan, [Some(-8), Some(-8), None, Some(-8)]));
    for (scan, want) in moved {
        assert_eq!(scan.differences(), want, "{scan:?}");
    }
}

#[test]
fn an_idle_pod_is_scanned_once_a_minute() {
    let scan = steady_scan([0; 4], &[]);
    let mut audit = audit([0; 4]);
    assert_eq!(run_scans(&mut audit, &scan, 150), (vec![60, 120], [0; 4]));
    audit.set_pods(151 * S, &BTreeMap::from([(UID.to_owned(), [1, 0, 0, 0])]));
    assert_eq!(audit.due_pods(151 * S), [UID], "it has woken");
    // Gauges of 0 may be wrong as well.
    let unseen = steady_scan([0; 4], &[(0, true)]);
    audit.set_pods(152 * S, &BTreeMap::from([(UID.to_owned(), [0; 4])]));
    assert_eq!(run_scans(&mut audit, &unseen, 220).1, [1, 0, 1, 0]);
}

#[test]
fn long_scans_are_rare() {
    let cpu_time = Duration::from_millis(300);
    let scan = AuditScan { cpu_time, ..steady_scan([1, 0, 0, 0], &[(0, false)]) };
    let mut audit = audit([1, 0, 0, 0]);
    assert_eq!(run_scans(&mut audit, &scan, 70).0, [10, 40, 70]);
}

#[test]
fn a_failed_scan_proves_nothing_and_the_next_comes_in_time() {
    let scan = steady_scan([1, 0, 0, 0], &[]);
    let mut audit = audit([1, 0, 0, 0]);
    audit.handle_scan(10 * S, UID, Some(&scan));
    audit.handle_scan(11 * S, UID, Some(&scan));
    assert_eq!(audit.handle_scan(12 * S, UID, None), AuditVerdict::default());
    assert_eq!(run_scans(&mut audit, &scan, 24), (vec![22, 23, 24], [-1, 0, 0, 0]));
    assert_eq!(audit.handle_scan(30 * S, "another", Some(&scan)), AuditVerdict::default());
}

#[test]
fn uncounted_connections_are_reported_when_they_stay() {
    let mut audit = audit([1, 0, 0, 0]);
    let scan = |cookies: &[u64]| AuditScan {
        uncounted: cookies.iter().copied().collect(),
        ..steady_scan([1, 0, 0, 0], &[(0, false)])
    };
    for (cookies, stay) in [(&[1, 2][..], 0), (&[2, 3], 1), (&[2, 3], 2), (&[], 0)] {
        audit.handle_scan(10 * S, UID, Some(&scan(cookies)));
        assert_eq!(audit.uncounted(), stay, "{cookies:?}");
    }
    audit.set_pods(20 * S, &BTreeMap::new());
    assert_eq!((audit.uncounted(), audit.due_pods(1_000 * S)), (0, vec![]), "the pod has gone");
}

/// Change of the gauges and sockets of a simulated pod.
#[derive(Clone, Debug)]
enum SimSocketEvent {
    Open(u64),
    Close(u64),
    StartRequest(u64),
    EndRequest(u64),
    Scan,
}

fn steps() -> impl Strategy<Value = Vec<SimSocketEvent>> {
    let cookie = || 0..4u64;
    let one = prop_oneof![
        cookie().prop_map(SimSocketEvent::Open),
        cookie().prop_map(SimSocketEvent::Close),
        cookie().prop_map(SimSocketEvent::StartRequest),
        cookie().prop_map(SimSocketEvent::EndRequest),
        Just(SimSocketEvent::Scan),
        Just(SimSocketEvent::Scan),
    ];
    prop::collection::vec(one, 0..200)
}

/// Simulated pod: its gauges and its sockets, which the eBPF programs change together but not at once.
#[derive(Default)]
struct SimPodGauges {
    reading: GaugeReading,
    sockets: CountedSockets,
}

impl SimPodGauges {
    fn step(&mut self, step: &SimSocketEvent) {
        let Self { reading: GaugeReading { values, totals }, sockets } = self;
        match step {
            SimSocketEvent::Open(cookie) if !sockets.contains_key(cookie) => {
                let is_estimated = cookie % 2 == 1;
                let share = SocketShare { in_flight: 0, is_fresh: true, is_estimated };
                sockets.insert(*cookie, share);
                values[PodGauge::Estimated as usize] += i64::from(is_estimated);
                values[PodGauge::Connections as usize] += 1;
                values[PodGauge::Fresh as usize] += 1;
            }
            SimSocketEvent::Close(cookie) => {
                let Some(gone) = sockets.remove(cookie) else { return };
                values[PodGauge::Connections as usize] -= 1;
                values[PodGauge::InFlight as usize] -= i64::from(gone.in_flight);
                totals[1] += u64::from(gone.in_flight);
                values[PodGauge::Fresh as usize] -= i64::from(gone.is_fresh);
                values[PodGauge::Estimated as usize] -= i64::from(gone.is_estimated);
            }
            SimSocketEvent::StartRequest(cookie) => {
                let Some(socket) = sockets.get_mut(cookie) else { return };
                let was_fresh = std::mem::take(&mut socket.is_fresh);
                values[PodGauge::Fresh as usize] -= i64::from(was_fresh);
                socket.in_flight += 1;
                values[PodGauge::InFlight as usize] += 1;
                totals[0] += 1;
            }
            SimSocketEvent::EndRequest(cookie) => {
                let Some(socket) = sockets.get_mut(cookie).filter(|it| it.in_flight > 0) else {
                    return;
                };
                socket.in_flight -= 1;
                values[PodGauge::InFlight as usize] -= 1;
                totals[1] += 1;
            }
            SimSocketEvent::Open(_) | SimSocketEvent::Scan => {}
        }
    }
}

proptest! {
    /// Whatever happens between the five parts of a scan, right gauges are never found wrong by the same difference in
    /// several scans. Wrong gauges are right in the end.
    #[test]
    fn right_gauges_are_never_changed_and_wrong_ones_are_put_right(
        steps in steps(),
        wrong in prop::array::uniform4(-3i64..4),
    ) {
        let mut kernel = SimPodGauges::default();
        let mut audit = audit([1, 0, 0, 0]);
        let (mut part, mut scan, mut now_ns) = (0, AuditScan::default(), 0);
        let mut drift = wrong;
        // At the end nothing changes any more.
        let rest = std::iter::repeat_n(&SimSocketEvent::Scan, 40);
        for step in steps.iter().chain(rest) {
            kernel.step(step);
            if !matches!(step, SimSocketEvent::Scan) {
                continue;
            }
            let mut reading = kernel.reading;
            reading.values.iter_mut().zip(drift).for_each(|(level, by)| *level += by);
            match part {
                0 | 2 | 4 => scan.readings[part / 2] = reading,
                _ => scan.sockets[part / 2].clone_from(&kernel.sockets),
            }
            part = (part + 1) % 5;
            if part == 0 {
                now_ns += 20 * S;
                let add = audit.handle_scan(now_ns, UID, Some(&scan)).correction;
                drift.iter_mut().zip(add).for_each(|(level, by)| *level += by);
                for (before, after) in wrong.iter().zip(drift) {
                    prop_assert!(after == 0 || after == *before, "{wrong:?} became {drift:?}");
                }
            }
        }
        prop_assert_eq!(drift, [0; 4]);
    }
}
