//! Pure: targets that follow the latest Revision change over to a new one step by step (`rollout.rs`).
//!
//! Only a route's own traffic does: a tag leads to the latest Revision as soon as that is ready. What is told counts as
//! in force after a second, since nobody who is silent for longer is waited for anywhere.

use std::time::Duration;

use common::wire::Name;

use super::Timer;
use crate::{
    knative::key,
    policy::parse_duration,
    rollout::{self, Nanos, Rollout},
    world::{App, Assigned, Platform, Stamp, Traffic, World},
};

/// Until the first share of a new Revision is in force everywhere.
const IN_FORCE_MS: u64 = 1000;

/// Who gets the requests now, on the way to `assigned`, and where a rollout stands if one lasts.
pub(super) fn roll(
    app: &App,
    name: &Name,
    assigned: Vec<Assigned>,
    world: &World,
    now: Stamp,
    timer: &mut Timer,
) -> (Vec<Assigned>, Option<Box<Rollout>>) {
    let duration = duration(app, world);
    let Some(route) = app.route.as_ref().filter(|_| !duration.is_zero()) else {
        return (assigned, None);
    };
    if !world.leads {
        // The leader takes the steps, and its status says which.
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
    let begun = |it: &Rollout| {
        let waiting = it.configurations.iter().map(|it| &it.step_params);
        let waiting = waiting.filter(|it| it.step_duration == 0).map(|it| it.start_time);
        waiting.max().filter(|start| *start > 0).map(|start| stamp(start).plus_ms(IN_FORCE_MS))
    };
    let in_force = begun(&state).is_some_and(|at| at <= now);
    let event = rollout::Event { wanted, duration, in_force };
    let stepped = rollout::step(Some(state), nanos(now), event);
    let due = stepped.next.map(stamp).into_iter().chain(begun(&stepped.state));
    for at in due {
        timer.passed(at, now);
    }
    let traffic = divide(pairs(), name, &stepped.state);
    (traffic, (!stepped.state.is_done()).then(|| Box::new(stepped.state)))
}

fn duration(app: &App, world: &World) -> Duration {
    if world.settings.platform == Platform::Local {
        return Duration::ZERO;
    }
    let asked = key::ROLLOUT_DURATION.iter().find_map(|key| app.route_annotation(key));
    asked.and_then(parse_duration).unwrap_or(world.settings.configs.network.rollout)
}

fn configuration<'a>(target: &'a Traffic, name: &'a Name) -> &'a str {
    target.configuration.as_deref().unwrap_or(&name.name)
}

fn nanos(at: Stamp) -> Nanos {
    Nanos::try_from(at.0).unwrap_or(Nanos::MAX).saturating_mul(1_000_000)
}

fn stamp(at: Nanos) -> Stamp {
    // Up, so that a timer never comes before what it is for.
    Stamp(u64::try_from(at).unwrap_or_default().div_ceil(1_000_000))
}

/// What there is to roll from where no rollout was under way.
fn at_rest(app: &App, name: &Name, world: &World) -> Rollout {
    let mut state = Rollout::default();
    for it in app.traffic().iter().filter(|it| it.latest && it.percent > 0) {
        let own = app.revision(&it.revision).is_some();
        let other = || world.app_of(&Name::new(name.namespace.clone(), &*it.revision));
        let configuration = if own { Some(name.clone()) } else { other() };
        if let Some(configuration) = configuration {
            add(&mut state, &configuration.name, &it.revision, it.percent);
        }
    }
    state
}

/// Targets of one Configuration roll together.
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

/// The targets with their shares divided as the rollout has them, each from the newest Revision on.
fn divide<'a>(
    pairs: impl Iterator<Item = (&'a Traffic, &'a Assigned)>,
    name: &Name,
    state: &Rollout,
) -> Vec<Assigned> {
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
            let newest = place == 0;
            if newest || taken > 0 {
                out.push(Assigned {
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
