//! Pure: gradual rollouts of a Route's targets that follow the latest Revision (`rollout.rs`).
//!
//! Only a Route's own traffic rolls out gradually: a tag moves to the latest Revision as soon as that is ready. Shares
//! count as in force one second after they were sent, since no silent component is waited for longer anywhere.

use std::time::Duration;

use common::wire::NamespacedName;

use super::PlanTimer;
use crate::{
    knative::key,
    policy::parse_duration,
    rollout::{self, Rollout, UnixNanos},
    world::{AppState, AssignedTraffic, ClusterState, PlatformKind, TrafficSpec, UnixMillis},
};

/// Time until the first share of a new Revision is in force everywhere, in milliseconds.
const IN_FORCE_MS: u64 = 1000;

/// Returns the traffic targets in force now, on the way to `assigned`, and the state of a rollout that lasts.
pub(super) fn roll(
    app: &AppState,
    name: &NamespacedName,
    assigned: Vec<AssignedTraffic>,
    world: &ClusterState,
    now: UnixMillis,
    timer: &mut PlanTimer,
) -> (Vec<AssignedTraffic>, Option<Box<Rollout>>) {
    let duration = duration(app, world);
    let Some(route) = app.route.as_ref().filter(|_| !duration.is_zero()) else {
        return (assigned, None);
    };
    if !world.leads {
        // Only the leader takes steps; its status shows their result.
        let held = if route.traffic.is_empty() { assigned } else { route.traffic.clone() };
        return (held, route.rollout.clone());
    }
    let state = route.rollout.as_deref().cloned().unwrap_or_else(|| at_rest(app, name, world));
    let pairs = || route.wanted.iter().zip(&assigned);
    let follows = pairs().filter(|(_, it)| it.latest && it.percent > 0);
    let mut wanted = Rollout::default();
    for (target, it) in follows {
        add(&mut wanted, configuration(target, name), &it.revision, it.percent);
    }
    // A rollout waits for its first 1 % while it has a start but no duration of a step yet.
    let begun = |it: &Rollout| {
        let waiting = it.configurations.iter().map(|it| &it.step_params);
        let waiting = waiting.filter(|it| it.step_duration == 0).map(|it| it.start_time);
        waiting.max().filter(|start| *start > 0).map(|start| stamp(start).plus_ms(IN_FORCE_MS))
    };
    let in_force = begun(&state).is_some_and(|at| at <= now);
    let event = rollout::RolloutInput { wanted, duration, in_force };
    let stepped = rollout::step(Some(state), nanos(now), event);
    let due = stepped.next.map(stamp).into_iter().chain(begun(&stepped.state));
    for at in due {
        timer.passed(at, now);
    }
    let traffic = divide(pairs(), name, &stepped.state);
    (traffic, (!stepped.state.is_done()).then(|| Box::new(stepped.state)))
}

fn duration(app: &AppState, world: &ClusterState) -> Duration {
    if world.settings.platform == PlatformKind::Local {
        return Duration::ZERO;
    }
    let asked = key::ROLLOUT_DURATION.iter().find_map(|key| app.route_annotation(key));
    asked.and_then(parse_duration).unwrap_or(world.settings.configs.network.rollout)
}

fn configuration<'a>(target: &'a TrafficSpec, name: &'a NamespacedName) -> &'a str {
    target.configuration.as_deref().unwrap_or(&name.name)
}

fn nanos(at: UnixMillis) -> UnixNanos {
    UnixNanos::try_from(at.0).unwrap_or(UnixNanos::MAX).saturating_mul(1_000_000)
}

fn stamp(at: UnixNanos) -> UnixMillis {
    // Rounded up, so that a timer never fires before its moment.
    UnixMillis(u64::try_from(at).unwrap_or_default().div_ceil(1_000_000))
}

/// Returns the state at rest from which a new rollout begins.
fn at_rest(app: &AppState, name: &NamespacedName, world: &ClusterState) -> Rollout {
    let mut state = Rollout::default();
    for it in app.traffic().iter().filter(|it| it.latest && it.percent > 0) {
        let own = app.revision(&it.revision).is_some();
        let other = || world.app_of(&NamespacedName::new(name.namespace.clone(), &*it.revision));
        let configuration = if own { Some(name.clone()) } else { other() };
        if let Some(configuration) = configuration {
            add(&mut state, &configuration.name, &it.revision, it.percent);
        }
    }
    state
}

/// Adds a target's share to its Configuration's: targets of one Configuration roll out together.
fn add(rollout: &mut Rollout, configuration: &str, revision: &str, percent: u8) {
    let percent = i32::from(percent);
    let mut all = rollout.configurations.iter_mut();
    match all.find(|it| it.configuration_name == configuration) {
        Some(have) => {
            have.percent += percent;
            have.revisions.iter_mut().take(1).for_each(|it| it.percent += percent);
        }
        None => rollout.add("", configuration, revision, percent),
    }
}

/// Divides the targets' shares as the rollout has them, each beginning with the newest Revision.
fn divide<'a>(
    pairs: impl Iterator<Item = (&'a TrafficSpec, &'a AssignedTraffic)>,
    name: &NamespacedName,
    state: &Rollout,
) -> Vec<AssignedTraffic> {
    // Several targets may share one entry: each takes its percents out of what is left.
    let (mut left, mut out) = (state.clone(), Vec::new());
    for (target, it) in pairs {
        let configuration = configuration(target, name);
        let mut all = left.configurations.iter_mut();
        let shares = all.find(|have| have.configuration_name == configuration);
        let Some(shares) = shares.filter(|_| it.latest && it.percent > 0) else {
            out.push(it.clone());
            continue;
        };
        let mut missing = i32::from(it.percent);
        for (place, share) in shares.revisions.iter_mut().rev().enumerate() {
            let taken = share.percent.min(missing);
            share.percent -= taken;
            missing -= taken;
            let percent = u8::try_from(taken).unwrap_or_default();
            // The newest Revision keeps the tag and its place even without a share, so that the target stays visible.
            let newest = place == 0;
            if newest || taken > 0 {
                out.push(AssignedTraffic {
                    tag: it.tag.clone().filter(|_| newest),
                    revision: share.revision_name.as_str().into(),
                    latest: newest,
                    percent,
                });
            }
        }
    }
    out
}
