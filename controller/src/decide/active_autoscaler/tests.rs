//! Pure: tests of the election of the active autoscaler.

use common::wire::{ConnectionPath, RevisionActivity};
use proptest::prelude::*;

use super::*;

fn name(index: u8) -> NamespacedName {
    NamespacedName::new("default", format!("r{index}"))
}

fn decision(index: u8, requested_scale: u32) -> ScaleDecision {
    ScaleDecision {
        revision: name(index),
        requested_scale: Some(requested_scale),
        connection_path: ConnectionPath::Direct,
        activator_count: 0,
        activity: RevisionActivity::Active,
        stable_load: 0.0,
        panic_load: 0.0,
        target_load: 1.0,
        ready_pods: 0,
        is_panicking: false,
        excess_burst_capacity: 0.0,
        reason: String::new(),
        inputs: None,
        wake_origin: None,
    }
}

/// Returns the heartbeat of an autoscaler that has received usage for so many seconds, where a window is one minute.
fn heartbeat_after(seconds: u64) -> AutoscalerHeartbeat {
    AutoscalerHeartbeat {
        observed_ms: seconds * 1000,
        covers_all_windows: seconds >= 60,
        reporters: 3,
        ..AutoscalerHeartbeat::default()
    }
}

/// Returns the same heartbeat, in which the autoscaler `active` is called active.
fn heartbeat_naming(seconds: u64, active: &str) -> AutoscalerHeartbeat {
    AutoscalerHeartbeat { active_autoscaler: Some(active.to_owned()), ..heartbeat_after(seconds) }
}

/// Opens a stream with a heartbeat and one decision, and returns the events of the election.
fn open_stream(
    election: &mut AutoscalerElection,
    stream: u64,
    name: &str,
    heartbeat: AutoscalerHeartbeat,
    requested_scale: u32,
) -> Vec<ElectionEvent> {
    let mut events = election.begin_stream(stream, name);
    events.extend(election.handle_heartbeat(stream, heartbeat));
    events.extend(election.handle_decision(stream, decision(1, requested_scale)));
    events.extend(election.handle_synced(stream));
    events
}

fn ticks(election: &mut AutoscalerElection, count: u64) -> Vec<ElectionEvent> {
    (0..count).flat_map(|_| election.tick()).collect()
}

#[test]
fn every_replica_elects_the_same_autoscaler_in_any_order() {
    let (mut one, mut two) = (AutoscalerElection::default(), AutoscalerElection::default());
    open_stream(&mut one, 1, "a", heartbeat_after(5), 3);
    open_stream(&mut one, 2, "b", heartbeat_after(9), 7);
    open_stream(&mut two, 1, "b", heartbeat_after(9), 7);
    open_stream(&mut two, 2, "a", heartbeat_after(5), 3);
    assert_eq!((one.active_name(), two.active_name()), (Some("b"), Some("b")));
}

#[test]
fn clocks_of_hosts_do_not_influence_the_election() {
    let mut election = AutoscalerElection::default();
    let first = AutoscalerHeartbeat { since_ms: 2_000_000, ..heartbeat_naming(100, "b") };
    open_stream(&mut election, 1, "b", first, 10);
    // With a clock an hour behind, it calls itself the oldest; it has just started, and serves no pods yet.
    let second = AutoscalerHeartbeat { since_ms: 1, ..heartbeat_after(0) };
    let events = open_stream(&mut election, 2, "a", second, 1);
    assert_eq!((events, election.active_name()), (Vec::new(), Some("b")));
}

#[test]
fn an_autoscaler_stays_active_while_connected() {
    let mut election = AutoscalerElection::default();
    let all_of = |requested_scale| {
        vec![
            ElectionEvent::Begin,
            ElectionEvent::Decide(decision(1, requested_scale)),
            ElectionEvent::Synced,
        ]
    };
    assert_eq!(open_stream(&mut election, 1, "b", heartbeat_after(5), 3), all_of(3));
    election.handle_heartbeat(1, heartbeat_naming(5, "b"));
    assert_eq!(
        open_stream(&mut election, 2, "a", heartbeat_after(5), 7),
        [],
        "another one is active"
    );
    assert_eq!(election.handle_decision(2, decision(1, 9)), []);
    assert_eq!(
        election.handle_decision(1, decision(1, 4)),
        [ElectionEvent::Decide(decision(1, 4))]
    );
    // The change is immediate, with the decisions that were made meanwhile.
    assert_eq!(election.end_stream(1), all_of(9));
    assert_eq!(election.active_name(), Some("a"));
}

#[test]
fn the_autoscaler_with_the_longest_usage_takes_over() {
    let mut election = AutoscalerElection::default();
    open_stream(&mut election, 1, "a", heartbeat_after(50), 1);
    open_stream(&mut election, 2, "young", heartbeat_after(10), 2);
    open_stream(&mut election, 3, "old", heartbeat_after(30), 3);
    election.begin_stream(4, "not whole");
    election.handle_heartbeat(4, heartbeat_after(1000));
    election.end_stream(1);
    assert_eq!(election.active_name(), Some("old"));
    election.end_stream(3);
    assert_eq!(election.active_name(), Some("young"));
    assert_eq!(election.end_stream(2), [], "the last decisions stay in force");
    assert_eq!(election.active_name(), None);
    assert_eq!(election.handle_synced(4), [ElectionEvent::Begin, ElectionEvent::Synced]);
}

#[test]
fn a_silent_autoscaler_is_passed_over_although_its_stream_is_open() {
    let mut election = AutoscalerElection::default();
    open_stream(&mut election, 1, "a", heartbeat_naming(500, "a"), 1);
    open_stream(&mut election, 2, "b", heartbeat_naming(100, "a"), 2);
    for tick in 0..SILENT_TICKS {
        assert_eq!((tick, election.active_name()), (tick, Some("a")));
        election.handle_heartbeat(2, heartbeat_naming(100, "a"));
        election.tick();
    }
    assert_eq!(election.active_name(), Some("b"), "within {} ms", SILENT_TICKS * 100);
    // The last heartbeat may arrive just after a tick.
    let takeover = ELECTION_TICK * u32::try_from(SILENT_TICKS + 1).expect("few ticks");
    assert!(takeover <= Duration::from_secs(1), "{takeover:?}");
    // It is back, with a gap in its windows.
    election.handle_heartbeat(2, heartbeat_naming(101, "b"));
    election.handle_heartbeat(1, heartbeat_after(0));
    assert_eq!((ticks(&mut election, 1), election.active_name()), (Vec::new(), Some("b")));
}

#[test]
fn without_any_heartbeat_nothing_changes() {
    let mut election = AutoscalerElection::default();
    open_stream(&mut election, 1, "a", heartbeat_naming(500, "a"), 1);
    open_stream(&mut election, 2, "b", heartbeat_naming(500, "a"), 2);
    assert_eq!(
        (ticks(&mut election, 5 * SILENT_TICKS), election.active_name()),
        (Vec::new(), Some("a"))
    );
}

/// Two replicas of the controller receive the heartbeats in different order, a few ticks apart.
#[test]
fn the_order_of_messages_does_not_decide_between_silent_autoscalers() {
    let elected_after = |arrivals: [(u64, &str); 2]| {
        let mut election = AutoscalerElection::default();
        open_stream(&mut election, 3, "c", heartbeat_naming(500, "c"), 3);
        ticks(&mut election, 100);
        for (stream, name) in arrivals {
            ticks(&mut election, 2);
            election.handle_heartbeat(3, heartbeat_naming(500, "c"));
            open_stream(&mut election, stream, name, heartbeat_after(5), 1);
        }
        ticks(&mut election, SILENT_TICKS);
        assert_eq!(election.active_name(), Some("c"), "all are silent");
        election.end_stream(3);
        election.active_name().map(str::to_owned)
    };
    assert_eq!(elected_after([(1, "a"), (2, "b")]).as_deref(), Some("a"));
    assert_eq!(elected_after([(2, "b"), (1, "a")]).as_deref(), Some("a"));
}

/// After the stall both have empty windows. Only the name in their heartbeats keeps the choice, since no table changes.
#[test]
fn the_active_autoscaler_stays_after_all_have_stalled() {
    let mut election = AutoscalerElection::default();
    open_stream(&mut election, 1, "a", heartbeat_naming(500, "b"), 1);
    open_stream(&mut election, 2, "b", heartbeat_naming(500, "b"), 2);
    ticks(&mut election, 2 * SILENT_TICKS);
    for stream in [1, 2] {
        election.handle_heartbeat(stream, heartbeat_naming(0, "b"));
    }
    assert_eq!(election.active_name(), Some("b"));
}

#[test]
fn an_autoscaler_that_lost_agents_is_no_longer_active() {
    let short = || AutoscalerHeartbeat { reporters: 2, ..heartbeat_naming(500, "a") };
    let after = |seconds| {
        let mut election = AutoscalerElection::default();
        open_stream(&mut election, 1, "a", heartbeat_naming(500, "a"), 1);
        open_stream(&mut election, 2, "b", heartbeat_naming(seconds, "a"), 2);
        let mut chosen = Vec::new();
        for _ in 0..=FEWER_REPORTERS_TICKS {
            election.handle_heartbeat(1, short());
            election.handle_heartbeat(2, heartbeat_naming(seconds, "a"));
            election.tick();
            chosen.push(election.active_name().map(str::to_owned));
        }
        chosen
    };
    let full = after(60);
    assert_eq!(full.first().cloned().flatten().as_deref(), Some("a"), "an agent may restart");
    assert_eq!(full.last().cloned().flatten().as_deref(), Some("b"));
    assert!(after(10).iter().all(|it| it.as_deref() == Some("a")), "empty windows are no better");
}

/// Full windows win even if no live autoscaler calls itself active, and the other is the first by name.
#[test]
fn empty_windows_never_take_over_from_full_windows() {
    let mut election = AutoscalerElection::default();
    open_stream(&mut election, 1, "b", heartbeat_after(500), 1);
    open_stream(&mut election, 2, "a", heartbeat_after(0), 2);
    for _ in 0..=FEWER_REPORTERS_TICKS {
        election.handle_heartbeat(1, AutoscalerHeartbeat { reporters: 2, ..heartbeat_after(500) });
        election.handle_heartbeat(2, heartbeat_after(1));
        election.tick();
        assert_eq!(election.active_name(), Some("b"));
    }
}

#[test]
fn a_new_replica_waits_for_the_active_autoscaler() {
    let mut election = AutoscalerElection::default();
    open_stream(&mut election, 1, "a-new", heartbeat_naming(3, "old"), 1);
    assert_eq!(election.active_name(), None);
    open_stream(&mut election, 2, "old", heartbeat_naming(40, "old"), 2);
    assert_eq!(election.active_name(), Some("old"));
    // The autoscaler that is called active never comes.
    let mut election = AutoscalerElection::default();
    open_stream(&mut election, 1, "a-new", heartbeat_naming(3, "old"), 1);
    for _ in 0..STARTUP_WAIT_TICKS {
        election.handle_heartbeat(1, heartbeat_naming(3, "old"));
        election.tick();
    }
    assert_eq!(election.active_name(), Some("a-new"));
}

#[test]
fn an_autoscaler_of_an_earlier_release_is_active_until_another_has_full_windows() {
    let mut election = AutoscalerElection::default();
    election.begin_stream(1, "z-earlier");
    election.handle_synced(1);
    open_stream(&mut election, 2, "a", heartbeat_after(1), 2);
    ticks(&mut election, 1);
    assert_eq!(election.active_name(), Some("z-earlier"));
    election.handle_heartbeat(2, heartbeat_after(60));
    assert_eq!(election.active_name(), Some("a"));
}

#[test]
fn an_autoscaler_that_comes_back_is_not_ended_by_its_first_stream() {
    let mut election = AutoscalerElection::default();
    open_stream(&mut election, 1, "a", heartbeat_after(50), 1);
    let events = open_stream(&mut election, 2, "a", heartbeat_after(50), 2);
    assert_eq!(
        events,
        [ElectionEvent::Begin, ElectionEvent::Decide(decision(1, 2)), ElectionEvent::Synced]
    );
    assert_eq!((election.end_stream(1), election.active_name()), (Vec::new(), Some("a")));
}

proptest! {
    /// Whichever replicas come and go, a receiver of the events holds exactly the decisions of the active autoscaler.
    /// While there is none, it holds those of the last one.
    #[test]
    fn the_decisions_in_force_are_one_autoscalers_whole_set(
        ops in proptest::collection::vec((0u8..7, 0u64..3, 0u8..3, 0u32..4), 0..60),
    ) {
        let (mut election, mut in_force, mut unnamed) =
            (AutoscalerElection::default(), BTreeMap::new(), None::<BTreeSet<NamespacedName>>);
        for (kind, stream, index, requested_scale) in ops {
            let events = match kind {
                0 => election.begin_stream(stream, &format!("a{stream}")),
                1 => election.handle_synced(stream),
                2 => election.end_stream(stream),
                3 => election.withdraw_decision(stream, name(index)),
                4 => {
                    let seconds = u64::from(requested_scale) * 30;
                    election.handle_heartbeat(stream, heartbeat_after(seconds))
                }
                5 => election.tick(),
                _ => election.handle_decision(stream, decision(index, requested_scale)),
            };
            for event in events {
                match event {
                    ElectionEvent::Begin => unnamed = Some(in_force.keys().cloned().collect()),
                    ElectionEvent::Decide(it) => {
                        unnamed.iter_mut().for_each(|all| _ = all.remove(&it.revision));
                        in_force.insert(it.revision.clone(), it.requested_scale);
                    }
                    ElectionEvent::Withdraw(name) => drop(in_force.remove(&name)),
                    ElectionEvent::Synced => for name in unnamed.take().into_iter().flatten() {
                        in_force.remove(&name);
                    },
                }
            }
            let counts = election.active_stream.and_then(|stream| election.candidates.get(&stream));
            let Some(counts) = counts.filter(|it| it.is_synced) else { continue };
            let decided = counts.decisions.iter().map(|(name, it)| (name.clone(), it.requested_scale));
            prop_assert_eq!(&in_force, &decided.collect::<BTreeMap<_, _>>());
        }
    }
}

mod simulation;
