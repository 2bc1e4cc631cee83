use proptest::prelude::*;

use super::*;

const UID: &str = "uid-1";
const S: u64 = 1_000_000_000;
const ONE: Counts = Counts { in_flight: 1, is_fresh: false, is_estimated: false };

/// Returns a scan of sockets that stand still, each with its requests in flight and its freshness.
fn still(levels: Levels, sockets: &[(u32, bool)]) -> Look {
    let reading = Reading { levels, totals: [7, 7] };
    let counts = |&(in_flight, is_fresh)| Counts { in_flight, is_fresh, is_estimated: false };
    let counts = sockets.iter().map(counts);
    let all: Sockets = (100..).zip(counts).collect();
    Look { readings: [reading; 3], sockets: [all.clone(), all], ..Look::default() }
}

/// Returns an audit of one pod with these gauges.
fn audit(levels: Levels) -> Audit {
    let mut audit = Audit::default();
    audit.follow(0, &BTreeMap::from([(UID.to_owned(), levels)]));
    audit
}

/// Scans whenever a scan is due, for this number of seconds. Returns the times of the scans, and the sum of all
/// corrections.
fn play(audit: &mut Audit, look: &Look, seconds: u64) -> (Vec<u64>, Levels) {
    let (mut looks, mut added) = (Vec::new(), Levels::default());
    for second in 0..=seconds {
        for uid in audit.due(second * S) {
            looks.push(second);
            let add = audit.looked(second * S, &uid, Some(look)).add;
            added.iter_mut().zip(add).for_each(|(all, it)| *all += it);
        }
    }
    (looks, added)
}

#[test]
fn gauges_that_say_what_the_sockets_say_are_left_alone() {
    let look = still([3, 2, 1, 0], &[(1, false), (1, false), (0, true)]);
    let mut audit = audit([3, 2, 1, 0]);
    assert_eq!(play(&mut audit, &look, 40), (vec![10, 20, 30, 40], [0; 4]));
}

#[test]
fn a_difference_is_put_right_once_three_looks_agree_on_it() {
    let look = still([5, -1, 0, 0], &[(1, false), (0, true)]);
    let mut audit = audit([5, -1, 0, 0]);
    assert_eq!(play(&mut audit, &look, 11), (vec![10, 11], [0; 4]));
    assert_eq!(play(&mut audit, &look, 12), (vec![12], [-3, 2, 1, 0]));
}

#[test]
fn a_difference_that_changes_or_goes_is_none() {
    let mut audit = audit([1, 0, 0, 0]);
    let looks = [
        [1, 0, 0, 0],
        [1, 0, 0, 0],
        [2, 0, 0, 0],
        [1, 0, 0, 0],
        [0, 0, 0, 0],
        [1, 0, 0, 0],
        [1, 0, 0, 0],
    ];
    for (second, levels) in (10..).zip(looks) {
        let verdict = audit.looked(second * S, UID, Some(&still(levels, &[])));
        assert_eq!(verdict, Verdict { add: [0; 4], stood: true }, "{levels:?}");
    }
    let verdict = audit.looked(20 * S, UID, Some(&still([1, 0, 0, 0], &[])));
    assert_eq!(verdict.add, [-1, 0, 0, 0]);
}

#[test]
fn what_moves_during_a_look_is_not_judged_and_the_rest_is() {
    let quiet = still([9, 9, 9, 8], &[(1, true)]);
    let mut moved: Vec<(Look, [Option<i64>; GAUGES])> = Vec::new();
    for at in 0..3 {
        // A gauge that differs before, between or after.
        for gauge in 0..4 {
            let mut look = quiet.clone();
            look.readings[at].levels[gauge] += 1;
            let mut want = [Some(-8); 4];
            want[gauge] = None;
            moved.push((look, want));
        }
        // A request that begins and ends.
        let mut look = quiet.clone();
        look.readings[at].totals = [8, 8];
        moved.push((look, [Some(-8), None, Some(-8), Some(-8)]));
    }
    // A connection in the place of another.
    let mut look = quiet.clone();
    look.sockets[1] = BTreeMap::from([(5, Counts { is_fresh: true, ..ONE })]);
    moved.push((look, [None, None, None, Some(-8)]));
    // A first request that arrives.
    let mut look = quiet.clone();
    look.sockets[1] = BTreeMap::from([(100, ONE)]);
    moved.push((look, [Some(-8), Some(-8), None, Some(-8)]));
    for (look, want) in moved {
        assert_eq!(look.differences(), want, "{look:?}");
    }
}

#[test]
fn a_pod_at_rest_is_looked_at_once_a_minute() {
    let look = still([0; 4], &[]);
    let mut audit = audit([0; 4]);
    assert_eq!(play(&mut audit, &look, 150), (vec![60, 120], [0; 4]));
    audit.follow(151 * S, &BTreeMap::from([(UID.to_owned(), [1, 0, 0, 0])]));
    assert_eq!(audit.due(151 * S), [UID], "it has woken");
    // Gauges of 0 may be wrong as well.
    let unseen = still([0; 4], &[(0, true)]);
    audit.follow(152 * S, &BTreeMap::from([(UID.to_owned(), [0; 4])]));
    assert_eq!(play(&mut audit, &unseen, 220).1, [1, 0, 1, 0]);
}

#[test]
fn looks_that_take_long_are_rare() {
    let took = Duration::from_millis(300);
    let look = Look { took, ..still([1, 0, 0, 0], &[(0, false)]) };
    let mut audit = audit([1, 0, 0, 0]);
    assert_eq!(play(&mut audit, &look, 70).0, [10, 40, 70]);
}

#[test]
fn a_look_that_fails_says_nothing_and_the_next_comes_in_time() {
    let look = still([1, 0, 0, 0], &[]);
    let mut audit = audit([1, 0, 0, 0]);
    audit.looked(10 * S, UID, Some(&look));
    audit.looked(11 * S, UID, Some(&look));
    assert_eq!(audit.looked(12 * S, UID, None), Verdict::default());
    assert_eq!(play(&mut audit, &look, 24), (vec![22, 23, 24], [-1, 0, 0, 0]));
    assert_eq!(audit.looked(30 * S, "another", Some(&look)), Verdict::default());
}

#[test]
fn connections_that_count_nowhere_are_told_when_they_stay() {
    let mut audit = audit([1, 0, 0, 0]);
    let look = |cookies: &[u64]| Look {
        uncounted: cookies.iter().copied().collect(),
        ..still([1, 0, 0, 0], &[(0, false)])
    };
    for (cookies, stay) in [(&[1, 2][..], 0), (&[2, 3], 1), (&[2, 3], 2), (&[], 0)] {
        audit.looked(10 * S, UID, Some(&look(cookies)));
        assert_eq!(audit.uncounted(), stay, "{cookies:?}");
    }
    audit.follow(20 * S, &BTreeMap::new());
    assert_eq!((audit.uncounted(), audit.due(1_000 * S)), (0, vec![]), "the pod has gone");
}

/// Change of the gauges and sockets of a simulated pod.
#[derive(Clone, Debug)]
enum Step {
    Open(u64),
    Close(u64),
    Ask(u64),
    Answer(u64),
    Look,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let cookie = || 0..4u64;
    let one = prop_oneof![
        cookie().prop_map(Step::Open),
        cookie().prop_map(Step::Close),
        cookie().prop_map(Step::Ask),
        cookie().prop_map(Step::Answer),
        Just(Step::Look),
        Just(Step::Look),
    ];
    prop::collection::vec(one, 0..200)
}

/// Simulated pod: its gauges and its sockets, which the eBPF programs change together but not at once.
#[derive(Default)]
struct Kernel {
    reading: Reading,
    sockets: Sockets,
}

impl Kernel {
    fn step(&mut self, step: &Step) {
        let Self { reading: Reading { levels, totals }, sockets } = self;
        match step {
            Step::Open(cookie) if !sockets.contains_key(cookie) => {
                let is_estimated = cookie % 2 == 1;
                let counts = Counts { in_flight: 0, is_fresh: true, is_estimated };
                sockets.insert(*cookie, counts);
                levels[3] += i64::from(is_estimated);
                levels[0] += 1;
                levels[2] += 1;
            }
            Step::Close(cookie) => {
                let Some(gone) = sockets.remove(cookie) else { return };
                levels[0] -= 1;
                levels[1] -= i64::from(gone.in_flight);
                totals[1] += u64::from(gone.in_flight);
                levels[2] -= i64::from(gone.is_fresh);
                levels[3] -= i64::from(gone.is_estimated);
            }
            Step::Ask(cookie) => {
                let Some(socket) = sockets.get_mut(cookie) else { return };
                levels[2] -= i64::from(std::mem::take(&mut socket.is_fresh));
                socket.in_flight += 1;
                levels[1] += 1;
                totals[0] += 1;
            }
            Step::Answer(cookie) => {
                let Some(socket) = sockets.get_mut(cookie).filter(|it| it.in_flight > 0) else {
                    return;
                };
                socket.in_flight -= 1;
                levels[1] -= 1;
                totals[1] += 1;
            }
            Step::Open(_) | Step::Look => {}
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
        let mut kernel = Kernel::default();
        let mut audit = audit([1, 0, 0, 0]);
        let (mut part, mut look, mut now_ns) = (0, Look::default(), 0);
        let mut drift = wrong;
        // At the end nothing changes any more.
        let rest = std::iter::repeat_n(&Step::Look, 40);
        for step in steps.iter().chain(rest) {
            kernel.step(step);
            if !matches!(step, Step::Look) {
                continue;
            }
            let mut reading = kernel.reading;
            reading.levels.iter_mut().zip(drift).for_each(|(level, by)| *level += by);
            match part {
                0 | 2 | 4 => look.readings[part / 2] = reading,
                _ => look.sockets[part / 2].clone_from(&kernel.sockets),
            }
            part = (part + 1) % 5;
            if part == 0 {
                now_ns += 20 * S;
                let add = audit.looked(now_ns, UID, Some(&look)).add;
                drift.iter_mut().zip(add).for_each(|(level, by)| *level += by);
                for (before, after) in wrong.iter().zip(drift) {
                    prop_assert!(after == 0 || after == *before, "{wrong:?} became {drift:?}");
                }
            }
        }
        prop_assert_eq!(drift, [0; 4]);
    }
}
