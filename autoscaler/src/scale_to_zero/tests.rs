use proptest::prelude::*;

use super::*;
use crate::usage::tests::policy;

/// Revision with a ready pod.
const UP: ScaleToZeroInput =
    ScaleToZeroInput { ready: 1, is_reachable: true, initial_scale_reached: true };
/// Revision without a ready pod that has had its initial scale.
const DOWN: ScaleToZeroInput = ScaleToZeroInput { ready: 0, ..UP };
/// Revision without a ready pod that has not reached its initial scale.
const NEW: ScaleToZeroInput = ScaleToZeroInput { initial_scale_reached: false, ..DOWN };

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// A run of one state machine; each step returns pods, activity and the bound.
struct ScaleToZeroFixture {
    policy: ScalePolicy,
    scale_to_zero: ScaleToZero,
}

impl ScaleToZeroFixture {
    fn new(policy: ScalePolicy, input: ScaleToZeroInput) -> Self {
        let pods = input.ready;
        Self { scale_to_zero: ScaleToZero::new(at(0), &policy, input, pods), policy }
    }

    fn step_full(
        &mut self,
        now: u64,
        input: ScaleToZeroInput,
        desired_pods: Option<u32>,
    ) -> RequestedScale {
        self.scale_to_zero.step(at(now), &self.policy, input, desired_pods, 0.0, None)
    }

    fn step(
        &mut self,
        now: u64,
        input: ScaleToZeroInput,
        desired_pods: Option<u32>,
    ) -> (Option<u32>, RevisionActivity, Option<ScaleBound>) {
        let requested = self.step_full(now, input, desired_pods);
        (requested.pods, requested.activity, requested.bound)
    }
}

/// As in Knative, a Revision is active for a stable window, then inactive and off the direct path, then at zero.
#[test]
fn the_last_pod_goes_after_a_stable_window() {
    let mut run = ScaleToZeroFixture::new(policy(), UP);
    let early = run.step_full(50, UP, Some(0));
    assert_eq!((early.pods, early.next_step_at), (Some(1), Some(at(60))));
    assert_eq!((early.path, early.bound), (ConnectionPath::Direct, Some(ScaleBound::StableWindow)));
    let quiet = run.step_full(60, UP, Some(0));
    assert_eq!(
        (quiet.pods, quiet.path, quiet.activity),
        (Some(1), ConnectionPath::Activator, RevisionActivity::Inactive)
    );
    assert_eq!(quiet.next_step_at, Some(at(60)), "zero follows at once");
    let asleep = run.step_full(60, UP, Some(0));
    assert_eq!(
        (asleep.pods, asleep.bound, asleep.next_step_at),
        (Some(0), Some(ScaleBound::NoLoad), None)
    );
}

/// A turn to inactive that unknown load has held ends the stable window as the turn itself would.
#[test]
fn load_after_a_held_turn_begins_a_stable_window() {
    let mut run = ScaleToZeroFixture::new(policy(), UP);
    let scale_down_minimum = Some((3, ScaleBound::LoadUnknown));
    let held = run.scale_to_zero.step(at(70), &run.policy, UP, Some(0), 0.0, scale_down_minimum);
    assert_eq!(
        (held.activity, held.bound),
        (RevisionActivity::Active, scale_down_minimum.map(|(_, bound)| bound))
    );
    assert_eq!(run.step(72, UP, Some(1)), (Some(1), RevisionActivity::Active, None));
    let quiet = run.step_full(131, UP, Some(0));
    assert_eq!((quiet.bound, quiet.next_step_at), (Some(ScaleBound::StableWindow), Some(at(132))));
    assert_eq!(run.step(132, UP, Some(0)).1, RevisionActivity::Inactive);
}

#[test]
fn the_last_pod_is_retained_while_reachable() {
    let policy = ScalePolicy { scale_to_zero_retention_period: at(100), ..policy() };
    let mut run = ScaleToZeroFixture::new(policy.clone(), UP);
    run.step(60, UP, Some(0));
    let kept = run.step_full(159, UP, Some(0));
    assert_eq!(
        (kept.pods, kept.bound, kept.next_step_at),
        (None, Some(ScaleBound::Retention), Some(at(160)))
    );
    assert_eq!(run.step(160, UP, Some(0)).0, Some(0));
    let unreachable = ScaleToZeroInput { is_reachable: false, ..UP };
    let mut run = ScaleToZeroFixture::new(policy, unreachable);
    run.step(60, unreachable, Some(0));
    assert_eq!(run.step(61, unreachable, Some(0)).0, Some(0), "an unreachable one needs no pod");
}

#[test]
fn a_request_on_the_way_down_turns_it_back_up() {
    let mut run = ScaleToZeroFixture::new(policy(), UP);
    run.step(60, UP, Some(0));
    let back = run.step_full(61, UP, Some(1));
    assert_eq!(
        (back.pods, back.path, back.activity),
        (Some(1), ConnectionPath::Direct, RevisionActivity::Active)
    );
    assert_eq!(
        run.step(100, UP, Some(0)).2,
        Some(ScaleBound::StableWindow),
        "the window begins again"
    );
}

/// As in Knative, a Revision that is activating without load goes to zero only after the progress deadline and 30 s.
#[test]
fn a_start_that_never_succeeds_times_out() {
    let mut run = ScaleToZeroFixture::new(policy(), NEW);
    assert_eq!(
        run.step(1, NEW, None),
        (Some(1), RevisionActivity::Activating, Some(ScaleBound::Starting))
    );
    let waiting = run.step_full(629, NEW, Some(0));
    assert_eq!((waiting.pods, waiting.next_step_at), (Some(1), Some(at(630))));
    assert_eq!(
        run.step(630, NEW, Some(0)),
        (Some(0), RevisionActivity::TimedOut, Some(ScaleBound::TimedOut))
    );
    assert_eq!(run.step(632, NEW, Some(0)).1, RevisionActivity::TimedOut);
    assert_eq!(
        run.step(700, NEW, Some(1)).1,
        RevisionActivity::Activating,
        "a request tries again"
    );
}

#[test]
fn a_start_whose_client_left_is_still_awaited() {
    let mut run = ScaleToZeroFixture::new(policy(), DOWN);
    assert_eq!(run.step(1, DOWN, Some(1)), (Some(1), RevisionActivity::Activating, None));
    assert_eq!(
        run.step(70, DOWN, Some(0)),
        (Some(1), RevisionActivity::Activating, Some(ScaleBound::Starting))
    );
    assert_eq!(run.step(71, UP, Some(0)).1, RevisionActivity::Active);
    assert_eq!(run.step(72, UP, Some(0)).2, Some(ScaleBound::StableWindow));
}

/// As in Knative, threshold = max(min, initial) until reached, then max(min, 1).
#[test]
fn the_initial_scale_is_a_minimum_until_it_is_reached() {
    let policy = ScalePolicy { initial_scale: 3, ..policy() };
    let mut run = ScaleToZeroFixture::new(policy.clone(), NEW);
    assert_eq!(
        run.step(1, NEW, Some(0)),
        (Some(3), RevisionActivity::Activating, Some(ScaleBound::InitialScale))
    );
    let two = ScaleToZeroInput { ready: 2, ..NEW };
    assert_eq!(run.step(2, two, Some(0)).1, RevisionActivity::Activating);
    let three = ScaleToZeroInput { ready: 3, ..NEW };
    assert_eq!(
        run.step(3, three, Some(0)),
        (Some(3), RevisionActivity::Active, Some(ScaleBound::InitialScale))
    );
    let reached = ScaleToZeroInput { initial_scale_reached: true, ..three };
    assert_eq!(run.step(4, reached, Some(1)), (Some(1), RevisionActivity::Active, None));
    let unreachable = ScaleToZeroInput { is_reachable: false, ..NEW };
    assert_eq!(
        ScaleToZeroFixture::new(policy, unreachable).step(1, unreachable, Some(1)).0,
        Some(1),
        "not when unreachable"
    );
}

#[test]
fn an_initial_scale_of_zero_sleeps_at_once_and_wakes() {
    let mut run = ScaleToZeroFixture::new(ScalePolicy { initial_scale: 0, ..policy() }, NEW);
    assert_eq!(
        run.step(0, NEW, Some(0)),
        (Some(0), RevisionActivity::Inactive, Some(ScaleBound::NoLoad))
    );
    assert_eq!(run.step(1, NEW, Some(1)), (Some(1), RevisionActivity::Activating, None));
    assert_eq!(
        run.step(2, ScaleToZeroInput { ready: 1, ..NEW }, Some(1)).1,
        RevisionActivity::Active
    );
}

#[test]
fn bounds_hold_while_reachable() {
    let policy = ScalePolicy { min_scale: 2, max_scale: 4, ..policy() };
    let mut run = ScaleToZeroFixture::new(policy, UP);
    let ready = ScaleToZeroInput { ready: 2, ..UP };
    assert_eq!(
        run.step(1, UP, Some(0)),
        (Some(2), RevisionActivity::Activating, Some(ScaleBound::MinScale))
    );
    assert_eq!(
        run.step(2, ready, Some(9)),
        (Some(4), RevisionActivity::Active, Some(ScaleBound::MaxScale))
    );
    assert_eq!(run.step(3, ready, Some(3)), (Some(3), RevisionActivity::Active, None));
    let unreachable = ScaleToZeroInput { is_reachable: false, ..ready };
    assert_eq!(run.step(70, unreachable, Some(0)).1, RevisionActivity::Inactive);
}

/// The installation's minimum is above the maximum of a Revision's annotation: the minimum wins for any load.
#[test]
fn the_least_number_wins_over_the_most() {
    for desired_pods in [Some(0), Some(1), Some(3), Some(9), None] {
        let policy = ScalePolicy { min_scale: 5, max_scale: 2, ..policy() };
        let mut run = ScaleToZeroFixture::new(policy, NEW);
        assert_eq!(run.step(1, NEW, desired_pods).0, Some(5), "{desired_pods:?}");
        let ready = ScaleToZeroInput { ready: 5, ..UP };
        assert_eq!(run.step(2, ready, desired_pods).0, Some(5), "{desired_pods:?}");
    }
}

#[test]
fn without_scale_to_zero_one_pod_stays() {
    let mut run = ScaleToZeroFixture::new(ScalePolicy { scale_to_zero: false, ..policy() }, UP);
    assert_eq!(
        run.step(900, UP, Some(0)),
        (Some(1), RevisionActivity::Active, Some(ScaleBound::NoScaleToZero))
    );
}

#[test]
fn unknown_load_keeps_what_there_is() {
    let mut run = ScaleToZeroFixture::new(policy(), UP);
    assert_eq!(run.step(1, UP, None), (None, RevisionActivity::Active, None));
    run.step(2, UP, Some(4));
    assert_eq!(run.step(3, UP, None).0, Some(4));
    let mut asleep = ScaleToZeroFixture::new(policy(), DOWN);
    let requested = asleep.step_full(1, DOWN, None);
    assert_eq!((requested.pods, requested.path), (None, ConnectionPath::Activator));
}

/// Bounds do not depend on load: changed bounds apply to the last requested scale.
#[test]
fn bounds_that_change_while_load_is_unknown_are_followed() {
    let mut run = ScaleToZeroFixture::new(policy(), UP);
    let six = ScaleToZeroInput { ready: 6, ..UP };
    assert_eq!(run.step(1, six, Some(4)).0, Some(4));
    run.policy.min_scale = 6;
    assert_eq!(
        run.step(2, six, None),
        (Some(6), RevisionActivity::Active, Some(ScaleBound::MinScale))
    );
    assert_eq!(run.step(3, six, None), (Some(6), RevisionActivity::Active, None));
    (run.policy.min_scale, run.policy.max_scale) = (0, 3);
    assert_eq!(
        run.step(4, six, None),
        (Some(3), RevisionActivity::Active, Some(ScaleBound::MaxScale))
    );
}

/// Connections go direct only if the requested scale is above zero and the excess burst capacity is not negative.
/// Knative calls these modes Serve and Proxy.
#[test]
fn the_path_follows_burst_capacity_and_sleep() {
    let mut run = ScaleToZeroFixture::new(policy(), UP);
    let mut path = |desired_pods, capacity| {
        run.scale_to_zero.step(at(1), &run.policy, UP, desired_pods, capacity, None).path
    };
    assert_eq!(path(Some(2), 0.0), ConnectionPath::Direct);
    assert_eq!(path(Some(2), -1.0), ConnectionPath::Activator);
    assert_eq!(path(None, 89.0), ConnectionPath::Direct);
    assert_eq!(path(None, -1.0), ConnectionPath::Activator);
}

prop_compose! {
    fn inputs()(ready in 0u32..6, is_reachable: bool, initial_scale_reached: bool) -> ScaleToZeroInput {
        ScaleToZeroInput { ready, is_reachable, initial_scale_reached }
    }
}

proptest! {
    /// The requested scale stays within the present bounds, whatever happens.
    #[test]
    fn decided_pods_stay_within_bounds(
        min_scale in 0u32..8, max_scale in 0u32..8, initial in 0u32..4,
        steps in proptest::collection::vec((inputs(), proptest::option::of(0u32..20), 1u64..100), 1..40),
    ) {
        let policy = ScalePolicy { min_scale, max_scale, initial_scale: initial, ..policy() };
        let mut run = ScaleToZeroFixture::new(policy, steps[0].0);
        let mut now = 0;
        for (input, desired_pods, elapsed) in steps {
            now += elapsed;
            let requested = run.step_full(now, input, desired_pods);
            let pods = requested.pods.unwrap_or(min_scale);
            // The initial scale is reached once, and the minimum always, whatever the maximum.
            prop_assert!(max_scale == 0 || pods <= max_scale.max(min_scale).max(initial));
            prop_assert!(!(input.is_reachable && desired_pods.is_some_and(|pods| pods > 0)) || pods >= min_scale);
            prop_assert!(
                requested.path == ConnectionPath::Activator || requested.activity != RevisionActivity::Inactive
            );
        }
    }

    /// Steps repeated at the same moment with the same input reach a fixed point.
    #[test]
    fn repeated_steps_reach_a_fixed_point(
        input in inputs(), desired_pods in proptest::option::of(0u32..9), now in 0u64..900
    ) {
        let mut run = ScaleToZeroFixture::new(policy(), input);
        run.step_full(now, input, desired_pods);
        run.step_full(now, input, desired_pods);
        let settled = run.step_full(now, input, desired_pods);
        prop_assert_eq!(run.step_full(now, input, desired_pods), settled);
    }
}
