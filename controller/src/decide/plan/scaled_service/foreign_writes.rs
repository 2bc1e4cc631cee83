//! Pure: numbers of pods that other clients write into the workload of a scaled Service.
//!
//! A number above 0 that another client writes is the number of the user. It is kept for a stable window once its pods
//! are ready, so a workload that was asleep serves for that long. A tool that restores a manifest writes its number
//! again and again. With such a tool the workload would start and stop all the time, so it sleeps no more.

use crate::model::cluster_state::{ForeignWrites, KeptNumber, UnixMillis, WorkloadBinding};

/// Number of wakes without a request after which the workload sleeps no more.
const MAX_WAKES: usize = 3;
/// Time within which these wakes count, in milliseconds.
const WAKE_PERIOD_MS: u64 = 600_000;

/// Records the number that a workload has now; `previous` is the workload as observed before, if it was.
pub(crate) fn record_number(
    writes: &mut ForeignWrites,
    previous: Option<&WorkloadBinding>,
    present: &WorkloadBinding,
    now: UnixMillis,
) {
    // The number of a HorizontalPodAutoscaler follows from load, and is no user's.
    let is_of_user = |it: &WorkloadBinding| {
        let is_own = it.record.is_some_and(|record| record.scaled_to == it.replicas);
        !is_own && it.hpa_min_replicas.is_none() && it.replicas > 0
    };
    if !is_of_user(present) {
        // Soon after another client has written a number, the controller records it as its own. The number stays kept.
        let is_recorded =
            |number: u32| number == present.replicas && present.hpa_min_replicas.is_none();
        writes.kept = writes.kept.filter(|kept| is_recorded(kept.pods));
        return;
    }
    let previous = previous.filter(|it| it.uid == present.uid);
    // Without a record, the number that is found first may be of any time.
    if present.record.is_none() && previous.is_none() {
        return;
    }
    // A client that replaces the whole object removes the record with it.
    let slept = present.record.is_some_and(|it| it.scaled_to == 0)
        || previous.is_some_and(WorkloadBinding::is_put_to_sleep);
    // Observed again, for example because of another field.
    let previous = previous.filter(|it| is_of_user(it));
    if previous.is_some_and(|it| it.replicas == present.replicas) {
        return;
    }
    writes.kept = Some(KeptNumber::new(present.replicas, now));
    // A change of a number above 0 wakes nothing.
    if slept && previous.is_none() {
        writes.wakes.retain(|at| now < at.plus_ms(WAKE_PERIOD_MS));
        writes.wakes.push(now);
        writes.is_managed |= writes.wakes.len() >= MAX_WAKES;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{
        cluster_state::{CompactStringMap, WorkloadKey, WorkloadKind},
        object::ReplicaRecord,
    };
    use common::wire::NamespacedName;

    /// Returns a workload with this number of pods, to which the controller wrote `scaled_to` last.
    fn binding(replicas: u32, scaled_to: u32) -> WorkloadBinding {
        WorkloadBinding {
            key: WorkloadKey {
                name: NamespacedName::new("default", "web"),
                kind: WorkloadKind::Deployment,
            },
            uid: "u".into(),
            replicas,
            record: Some(ReplicaRecord { scaled_to, user_replicas: 3 }),
            user_replicas: 3,
            first_ordinal: 0,
            hpa_min_replicas: None,
            template_labels: CompactStringMap::default(),
            shape: "{}".into(),
            is_terminating: false,
        }
    }

    #[test]
    fn a_number_of_another_client_is_kept_from_its_first_observation() {
        let mut writes = ForeignWrites::default();
        record_number(&mut writes, None, &binding(3, 3), UnixMillis(1));
        assert_eq!(writes, ForeignWrites::default(), "the controller's own");
        record_number(&mut writes, Some(&binding(3, 3)), &binding(5, 3), UnixMillis(2));
        assert_eq!(writes.kept, Some(KeptNumber::new(5, UnixMillis(2))));
        record_number(&mut writes, Some(&binding(5, 3)), &binding(5, 3), UnixMillis(9));
        assert_eq!(writes.kept, Some(KeptNumber::new(5, UnixMillis(2))), "observed again");
        record_number(&mut writes, Some(&binding(5, 3)), &binding(5, 5), UnixMillis(10));
        assert_eq!(
            writes.kept,
            Some(KeptNumber::new(5, UnixMillis(2))),
            "the controller has recorded it"
        );
        record_number(&mut writes, Some(&binding(5, 3)), &binding(6, 3), UnixMillis(11));
        assert_eq!(
            (writes.kept, writes.wakes.len()),
            (Some(KeptNumber::new(6, UnixMillis(11))), 0)
        );
        record_number(&mut writes, Some(&binding(6, 3)), &binding(0, 3), UnixMillis(12));
        assert_eq!(writes.kept, None, "0 is no wish for pods");
        let hpa = WorkloadBinding { hpa_min_replicas: Some(1), ..binding(5, 3) };
        record_number(&mut writes, Some(&binding(3, 3)), &hpa, UnixMillis(13));
        assert_eq!(writes.kept, None, "a HorizontalPodAutoscaler wrote it");
        let mut writes = ForeignWrites { kept: Some(KeptNumber::new(5, UnixMillis(13))), ..writes };
        record_number(&mut writes, Some(&binding(5, 3)), &hpa, UnixMillis(14));
        assert_eq!(writes.kept, None, "a HorizontalPodAutoscaler scales it now");
    }

    #[test]
    fn before_the_first_write_of_the_controller_only_a_change_is_of_another_client() {
        let unrecorded = |replicas| WorkloadBinding { record: None, ..binding(replicas, 0) };
        let mut writes = ForeignWrites::default();
        record_number(&mut writes, None, &unrecorded(3), UnixMillis(1));
        record_number(&mut writes, Some(&unrecorded(3)), &unrecorded(3), UnixMillis(2));
        assert_eq!(writes.kept, None);
        record_number(&mut writes, Some(&unrecorded(3)), &unrecorded(5), UnixMillis(3));
        assert_eq!((writes.kept, writes.wakes.len()), (Some(KeptNumber::new(5, UnixMillis(3))), 0));
    }

    #[test]
    fn the_third_wake_within_ten_minutes_ends_the_sleep() {
        let mut writes = ForeignWrites::default();
        let wake = |writes: &mut ForeignWrites, at: u64| {
            record_number(writes, Some(&binding(0, 0)), &binding(3, 0), UnixMillis(at));
            record_number(writes, Some(&binding(3, 0)), &binding(4, 0), UnixMillis(at + 1));
            record_number(writes, Some(&binding(4, 0)), &binding(0, 0), UnixMillis(at + 2));
        };
        wake(&mut writes, 1);
        wake(&mut writes, 2);
        wake(&mut writes, WAKE_PERIOD_MS + 2);
        assert_eq!((writes.wakes.len(), writes.is_managed), (1, false), "the others are too old");
        wake(&mut writes, WAKE_PERIOD_MS + 3);
        assert!(!writes.is_managed);
        wake(&mut writes, WAKE_PERIOD_MS + 4);
        assert!(writes.is_managed);
    }

    /// The controller may observe the number of another client without the 0 that it replaced.
    #[test]
    fn a_wake_counts_although_the_sleep_before_was_not_observed() {
        let mut writes = ForeignWrites::default();
        record_number(&mut writes, None, &binding(3, 0), UnixMillis(1));
        assert_eq!(writes.wakes, [UnixMillis(1)], "after a restart");
        let mut writes = ForeignWrites::default();
        record_number(&mut writes, Some(&binding(3, 3)), &binding(3, 0), UnixMillis(1));
        assert_eq!(writes.wakes, [UnixMillis(1)]);
    }

    /// `kubectl replace` removes the record, and so do operators that write whole objects.
    #[test]
    fn a_wake_counts_although_it_removes_the_record() {
        let replaced = WorkloadBinding { record: None, ..binding(3, 0) };
        let mut writes = ForeignWrites::default();
        record_number(&mut writes, Some(&binding(0, 0)), &replaced, UnixMillis(1));
        assert_eq!((writes.kept, writes.wakes.len()), (Some(KeptNumber::new(3, UnixMillis(1))), 1));
        let mut writes = ForeignWrites::default();
        record_number(&mut writes, Some(&binding(0, 3)), &replaced, UnixMillis(1));
        assert_eq!(writes.wakes.len(), 0, "its user had stopped it");
    }
}
