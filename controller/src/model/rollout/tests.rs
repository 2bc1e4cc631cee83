use proptest::prelude::*;

use super::*;

/// One second.
const S: UnixNanos = 1_000_000_000;

fn settled(targets: &[(&str, &str, &str, i32)]) -> Rollout {
    let mut all = Rollout::default();
    for &(tag, configuration, revision, percent) in targets {
        all.add_settled_target(tag, configuration, revision, percent);
    }
    all
}

fn input(goal: Rollout, seconds: u64, in_force: bool) -> RolloutInput {
    RolloutInput { goal, duration: Duration::from_secs(seconds), in_force }
}

fn shares_of(state: &Rollout) -> Vec<(&str, i32)> {
    let all = state.configurations.iter().flat_map(|it| &it.revisions);
    all.map(|it| (it.revision_name.as_str(), it.percent)).collect()
}

/// Rolls from `a` to `b` over `seconds`, where the first 1 % takes `first` seconds. Returns the share of `b` after each
/// step.
fn roll(percent: i32, seconds: u64, first: UnixNanos) -> Vec<i32> {
    let goal = |revision| settled(&[("", "cfg", revision, percent)]);
    let start = 100 * S;
    let mut done = step(Some(goal("a")), start, input(goal("b"), seconds, false));
    let mut now = start + first * S;
    let mut shares = vec![shares_of(&done.state).last().unwrap().1];
    done = step(Some(done.state), now, input(goal("b"), seconds, true));
    while !done.state.is_complete() {
        now = done.next_step_at.unwrap();
        done = step(Some(done.state), now, input(goal("b"), seconds, false));
        shares.push(shares_of(&done.state).last().unwrap().1);
    }
    assert_eq!((done.next_step_at, &done.state), (None, &goal("b")));
    shares
}

#[test]
fn shares_move_in_equal_steps() {
    assert_eq!(roll(100, 5, 1), [1, 26, 51, 76, 100]);
    assert_eq!(roll(100, 120, 50), [1, 72, 100]);
    assert_eq!(roll(100, 10, 60), [1, 100]);
    assert_eq!(roll(50, 6, 1), [1, 11, 21, 31, 41, 50]);
    assert_eq!(roll(2, 600, 1), [1, 2]);
    assert_eq!(roll(100, 3600, 1), (1..=100).collect::<Vec<_>>());
}

#[test]
fn a_step_planned_by_a_clock_that_was_ahead_waits_no_longer_than_any() {
    let goal = |revision| settled(&[("", "cfg", revision, 100)]);
    let (ahead, now) = (100_000 * S, 10_000 * S);
    let started = step(Some(goal("a")), ahead, input(goal("b"), 5, false));
    let planned = step(Some(started.state), ahead + S, input(goal("b"), 5, true));
    let after = step(Some(planned.state), now, input(goal("b"), 5, false));
    assert_eq!(shares_of(&after.state), [("a", 99), ("b", 1)]);
    assert_eq!(after.next_step_at, Some(now + S));
    let later = step(Some(after.state), now + S, input(goal("b"), 5, false));
    assert_eq!(shares_of(&later.state), [("a", 74), ("b", 26)]);
}

#[test]
fn without_a_state_or_a_duration_everything_moves_at_once() {
    let (a, b) = (settled(&[("", "cfg", "a", 100)]), settled(&[("", "cfg", "b", 100)]));
    let at_once = RolloutStep { state: b.clone(), next_step_at: None };
    assert_eq!(step(None, S, input(b.clone(), 60, true)), at_once);
    assert_eq!(step(Some(Rollout::default()), S, input(b.clone(), 60, true)), at_once);
    assert_eq!(step(Some(a), S, input(b, 0, true)), at_once);
}

#[test]
fn the_first_percent_waits_until_it_is_in_force() {
    let (a, b) = (settled(&[("", "cfg", "a", 100)]), settled(&[("", "cfg", "b", 100)]));
    let started = step(Some(a), 10 * S, input(b.clone(), 60, false));
    assert_eq!(shares_of(&started.state), [("a", 99), ("b", 1)]);
    assert_eq!(started.next_step_at, None);
    let still = step(Some(started.state.clone()), 30 * S, input(b.clone(), 60, false));
    assert_eq!(still, started);
    let planned = step(Some(started.state), 12 * S, input(b, 60, true));
    let expected = RolloutParams {
        start_time: 10 * S,
        next_step_time: 12 * S + 2 * S,
        step_duration: 2 * S,
        step_size: 3,
    };
    assert_eq!(planned.next_step_at, Some(expected.next_step_time));
    assert_eq!(planned.state.configurations[0].step_params, expected);
    assert_eq!(shares_of(&planned.state), [("a", 99), ("b", 1)]);
}

#[test]
fn a_third_revision_begins_a_new_rollout_and_takes_from_the_newest_first() {
    let goal = |revision| settled(&[("", "cfg", revision, 100)]);
    let mut state = goal("a");
    state.configurations[0].revisions = vec![
        RevisionRollout { revision_name: "a".into(), percent: 70 },
        RevisionRollout { revision_name: "b".into(), percent: 30 },
    ];
    state.configurations[0].step_params =
        RolloutParams { start_time: S, next_step_time: 9 * S, step_duration: S, step_size: 10 };
    let started = step(Some(state), 5 * S, input(goal("c"), 6, false));
    assert_eq!(shares_of(&started.state), [("a", 70), ("b", 29), ("c", 1)]);
    let new_params = RolloutParams { start_time: 5 * S, ..RolloutParams::default() };
    assert_eq!(started.state.configurations[0].step_params, new_params);
    let planned = step(Some(started.state), 6 * S, input(goal("c"), 6, true));
    let next = step(Some(planned.state), 7 * S, input(goal("c"), 6, false));
    assert_eq!(shares_of(&next.state), [("a", 70), ("b", 9), ("c", 21)]);
    let next = step(Some(next.state), 8 * S, input(goal("c"), 6, false));
    assert_eq!(shares_of(&next.state), [("a", 59), ("c", 41)]);
}

#[test]
fn a_target_that_grows_gives_to_the_newest_and_one_that_shrinks_takes_from_the_oldest() {
    let state = || {
        let mut state = settled(&[("", "cfg", "b", 60)]);
        state.configurations[0].revisions = vec![
            RevisionRollout { revision_name: "a".into(), percent: 40 },
            RevisionRollout { revision_name: "b".into(), percent: 20 },
        ];
        state.configurations[0].step_params =
            RolloutParams { start_time: S, next_step_time: 9 * S, step_duration: S, step_size: 10 };
        state
    };
    let moved = |percent, now| {
        let goal = settled(&[("", "cfg", "b", percent)]);
        step(Some(state()), now, input(goal, 60, false)).state
    };
    assert_eq!(shares_of(&moved(80, 2 * S)), [("a", 40), ("b", 40)]);
    assert_eq!(shares_of(&moved(30, 2 * S)), [("a", 10), ("b", 20)]);
    assert_eq!(shares_of(&moved(15, 2 * S)), [("b", 15)]);
    // Revision `a` has 5 % left, and a step of 10 % takes all of them.
    assert_eq!(shares_of(&moved(25, 9 * S)), [("b", 25)]);
}

#[test]
fn each_tag_and_configuration_has_a_rollout_of_its_own() {
    let previous = settled(&[("", "one", "a", 50), ("", "two", "x", 50), ("t", "one", "a", 100)]);
    let goal = settled(&[
        ("", "one", "b", 50),
        ("", "two", "x", 50),
        ("t", "one", "b", 100),
        ("new", "one", "b", 100),
    ]);
    let started = step(Some(previous), S, input(goal, 60, false)).state;
    let shares = |tag, configuration| {
        let shares = started.revision_shares(tag, configuration).unwrap();
        shares.iter().map(|it| (it.revision_name.as_str(), it.percent)).collect::<Vec<_>>()
    };
    assert_eq!(shares("", "one"), [("a", 49), ("b", 1)]);
    assert_eq!(shares("", "two"), [("x", 50)]);
    assert_eq!(shares("t", "one"), [("a", 99), ("b", 1)]);
    assert_eq!(shares("new", "one"), [("b", 100)]);
    assert_eq!(started.revision_shares("none", "one"), None);
}

#[test]
fn one_percent_and_nothing_are_not_rolled() {
    let previous = settled(&[("", "one", "a", 1), ("", "two", "x", 99)]);
    let goal = settled(&[("", "one", "b", 1), ("", "two", "x", 99)]);
    assert_eq!(step(Some(previous), S, input(goal.clone(), 60, false)).state, goal);
    let tagged = settled(&[("", "two", "x", 100), ("", "one", "b", 0)]);
    let rolled = step(Some(goal), S, input(tagged, 60, false)).state;
    assert_eq!(rolled, settled(&[("", "two", "x", 100)]));
}

#[test]
fn the_annotation_is_knatives_and_what_does_not_add_up_is_dropped() {
    let json = r#"{"configurations":[{"configurationName":"cfg","tag":"t","percent":100,"revisions":[{"revisionName":"a","percent":99},{"revisionName":"b","percent":1}],"stepParams":{"starttime":5,"nextStepTime":7,"stepDuration":2,"stepSize":25}}]}"#;
    let read = Rollout::parse(json).unwrap();
    assert_eq!(read.to_json(), json);
    let rest = settled(&[("", "cfg", "a", 100)]);
    let json = r#"{"configurations":[{"configurationName":"cfg","percent":100,"revisions":[{"revisionName":"a","percent":100}],"stepParams":{}}]}"#;
    assert_eq!(rest.to_json(), json);
    for (from, to) in
        [("\"percent\":100,", "\"percent\":101,"), ("\"percent\":99", "\"percent\":98")]
    {
        assert_eq!(Rollout::parse(&read.to_json().replace(from, to)), None, "{from} {to}");
    }
    assert_eq!(Rollout::parse(&read.to_json().replace("25", "101")), None);
    assert_eq!(Rollout::parse(&read.to_json().replace("99", "-99")), None);
    assert_eq!(Rollout::parse("{"), None);
    assert_eq!(Rollout::parse("{}"), Some(Rollout::default()));
}

proptest! {
    /// Shares add up to the target's after any order of events, and no Revision keeps a share of zero. The newest only
    /// gains while it stays the newest of an unchanged target. Without further events every rollout ends.
    #[test]
    fn shares_always_add_up_and_every_rollout_ends(
        events in prop::collection::vec(
            (0..5_u8, 2..=100_i32, 0..200_i64, any::<bool>(), any::<bool>()), 1..40),
        seconds in 1..1000_u64,
    ) {
        let (mut revision, mut percent, mut now) = (0_u8, 100, S);
        let goal =
            |revision: u8, percent| settled(&[("", "cfg", &format!("r{revision}"), percent)]);
        let mut state = goal(revision, percent);
        for (new, share, later, resize, in_force) in events {
            let last_step = (revision, percent, shares_of(&state).last().map_or(0, |it| it.1));
            revision = if new > 2 { new } else { revision };
            percent = if resize { share } else { percent };
            now += later * S;
            let done = step(Some(state), now, input(goal(revision, percent), seconds, in_force));
            state = Rollout::parse(&done.state.to_json()).unwrap();
            prop_assert_eq!(&state, &done.state);
            let shares = shares_of(&state);
            prop_assert_eq!(shares.iter().map(|it| it.1).sum::<i32>(), percent);
            prop_assert!(shares.iter().all(|it| it.1 > 0), "{:?}", shares);
            let (name, newest) = *shares.last().unwrap();
            prop_assert_eq!(name, format!("r{revision}"));
            if (revision, percent) == (last_step.0, last_step.1) {
                prop_assert!(newest >= last_step.2, "{:?}", shares);
            }
        }
        for _ in 0..110 {
            now += i64::try_from(seconds).unwrap() * S;
            let done = step(Some(state), now, input(goal(revision, percent), seconds, true));
            state = done.state;
        }
        prop_assert_eq!(state, goal(revision, percent));
    }
}
