//! Failed registrations and their retries.

use super::*;

/// Returns a pod that was named and found, and the action that registers it.
fn found(now: Instant) -> (PodTracker, PodTrackerAction) {
    let mut pods = PodTracker::new(UPGRADED_DRAIN_TIME);
    pods.step(now, PodTrackerEvent::RouteUpdated(Box::new(pod("a", ProbeHandler::Listen))));
    let register = PodTrackerAction::Register("a".into(), facts());
    let actions = pods.step(now, PodTrackerEvent::NamespaceFound("a".into(), facts()));
    assert!(actions.contains(&register));
    (pods, register)
}

#[test]
fn a_pod_without_a_slot_reports_it_and_is_registered_again() {
    let now = Instant::now();
    let (mut pods, register) = found(now);
    let observed = reports(pods.step(now, PodTrackerEvent::NoFreePodSlot("a".into())));
    assert_eq!(
        (observed[0].ready, &*observed[0].not_ready_reason),
        (false, &*Incompatibility::NoFreePodSlot.to_string())
    );
    assert_eq!(pods.counts().without_slot, 1);
    let next = pods.next_wake().expect("it tries again");
    assert!(next > now && pods.step(next, PodTrackerEvent::Tick).contains(&register));
    assert!(!pods.step(next, PodTrackerEvent::Tick).contains(&register), "once for each pause");
    pods.step(next, PodTrackerEvent::Registered("a".into()));
    let observed = reports(read_kernel_state(&mut pods, next, listening_state(1)));
    assert_eq!(
        (observed[0].ready, &*observed[0].not_ready_reason, pods.counts().without_slot),
        (true, "", 0)
    );
}

#[test]
fn a_pod_that_the_maps_refuse_is_registered_again_after_growing_pauses() {
    let (mut now, error) = (Instant::now(), "cannot write to map PODS");
    let (mut pods, register) = found(now);
    let failed = || PodTrackerEvent::RegistrationFailed("a".into(), error.into());
    let reason = format!("its node cannot register it in the kernel's maps: {error}");
    let observed = reports(pods.step(now, failed()));
    assert_eq!((observed[0].ready, &observed[0].not_ready_reason), (false, &reason));
    let mut pauses = Vec::new();
    for _ in 0..7 {
        let at = pods.next_wake().expect("it tries again");
        assert!(pods.step(at, PodTrackerEvent::Tick).contains(&register));
        assert!(!pods.step(at, PodTrackerEvent::Tick).contains(&register), "once for each pause");
        pauses.push(at.duration_since(now).as_secs());
        now = at;
        assert_eq!(reports(pods.step(now, failed())), [], "reported already");
    }
    assert_eq!(pauses, [1, 2, 4, 8, 16, 30, 30]);
    let counts = pods.counts();
    assert_eq!((counts.without_slot, counts.unwritten), (0, 1));
    assert!(counts.not_ready_reason().is_some_and(|reason| reason.starts_with("1 not written")));
    pods.step(now, PodTrackerEvent::Registered("a".into()));
    let observed = reports(read_kernel_state(&mut pods, now, listening_state(1)));
    assert_eq!((observed[0].ready, &*observed[0].not_ready_reason), (true, ""));
    assert_eq!((pods.counts().unwritten, pods.counts().not_ready_reason()), (0, None));
}

#[test]
fn the_namespace_of_a_pod_that_awaits_its_registration_belongs_to_the_pod() {
    let now = Instant::now();
    let (mut pods, _) = found(now);
    pods.step(now, PodTrackerEvent::RegistrationFailed("a".into(), "full".into()));
    assert_eq!(pods.namespace_cookies(), BTreeSet::from([7]));
    pods.step(now, PodTrackerEvent::RouteRemoved("a".into()));
    assert_eq!(pods.namespace_cookies(), BTreeSet::new());
}
