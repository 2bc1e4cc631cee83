//! Pure: gradual rollouts of a Route's targets that follow the latest Revision (`model/rollout.rs`).
//!
//! Only a Route's own traffic rolls out gradually: a tag moves to the latest Revision as soon as that is ready. Shares
//! count as in force one second after they were sent, since no silent component is waited for longer anywhere.

use std::time::Duration;

use common::wire::NamespacedName;

use super::PlanTimer;
use crate::model::{
    cluster_state::{
        AppState, AssignedTraffic, ClusterState, PlatformKind, TrafficSpec, UnixMillis,
    },
    go_values::parse_unsigned_duration,
    knative::key,
    rollout::{self, Rollout, UnixNanos},
};

/// Time until the first share of a new Revision is in force everywhere, in milliseconds.
const IN_FORCE_MS: u64 = 1000;

/// Returns the traffic targets in force now, on the way to `assigned`, and the state of a rollout that lasts.
pub(super) fn apply_rollout(
    app: &AppState,
    name: &NamespacedName,
    assigned: Vec<AssignedTraffic>,
    cluster: &ClusterState,
    now: UnixMillis,
    timer: &mut PlanTimer,
) -> (Vec<AssignedTraffic>, Option<Box<Rollout>>) {
    let duration = rollout_duration(app, cluster);
    let Some(route) = app.route.as_ref().filter(|_| !duration.is_zero()) else {
        return (assigned, None);
    };
    if !cluster.is_leader {
        // Only the leader takes steps; its status shows their result.
        let current = if route.traffic.is_empty() { assigned } else { route.traffic.clone() };
        return (current, route.rollout.clone());
    }
    let state =
        route.rollout.as_deref().cloned().unwrap_or_else(|| settled_rollout(app, name, cluster));
    let pairs = || route.traffic_spec.iter().zip(&assigned);
    let following_latest = pairs().filter(|(_, it)| it.is_latest && it.percent > 0);
    let mut desired = Rollout::default();
    for (target, it) in following_latest {
        add_share(&mut desired, target_configuration(target, name), &it.revision_name, it.percent);
    }
    // A rollout waits for its first 1 % while it has a start but no duration of a step yet.
    let in_force_at = |rollout: &Rollout| {
        let waiting = rollout.configurations.iter().map(|it| &it.step_params);
        let waiting = waiting.filter(|it| it.step_duration == 0).map(|it| it.start_time);
        waiting
            .max()
            .filter(|start| *start > 0)
            .map(|start| to_unix_millis(start).plus_ms(IN_FORCE_MS))
    };
    let in_force = in_force_at(&state).is_some_and(|at| at <= now);
    let input = rollout::RolloutInput { goal: desired, duration, in_force };
    let stepped = rollout::step(Some(state), to_unix_nanos(now), input);
    let next_step_at = stepped.next_step_at.map(to_unix_millis);
    for at in next_step_at.into_iter().chain(in_force_at(&stepped.state)) {
        timer.is_due_or_schedule(at, now);
    }
    let traffic = divide_traffic(pairs(), name, &stepped.state);
    (traffic, (!stepped.state.is_complete()).then(|| Box::new(stepped.state)))
}

fn rollout_duration(app: &AppState, cluster: &ClusterState) -> Duration {
    if cluster.settings.platform == PlatformKind::Local {
        return Duration::ZERO;
    }
    let annotation = key::ROLLOUT_DURATION.iter().find_map(|key| app.route_annotation(key));
    annotation
        .and_then(parse_unsigned_duration)
        .unwrap_or(cluster.settings.config_maps.network.rollout_duration)
}

fn target_configuration<'a>(target: &'a TrafficSpec, name: &'a NamespacedName) -> &'a str {
    target.configuration_name.as_deref().unwrap_or(&name.name)
}

fn to_unix_nanos(at: UnixMillis) -> UnixNanos {
    UnixNanos::try_from(at.0).unwrap_or(UnixNanos::MAX).saturating_mul(1_000_000)
}

fn to_unix_millis(at: UnixNanos) -> UnixMillis {
    // Rounded up, so that a timer never fires before its moment.
    UnixMillis(u64::try_from(at).unwrap_or_default().div_ceil(1_000_000))
}

/// Returns the state at rest from which a new rollout begins.
fn settled_rollout(app: &AppState, name: &NamespacedName, cluster: &ClusterState) -> Rollout {
    let mut state = Rollout::default();
    for it in app.traffic().iter().filter(|it| it.is_latest && it.percent > 0) {
        // A Route without a Service may lead to Configurations of other apps.
        let is_own_revision = app.revision(&it.revision_name).is_some();
        let other = || {
            cluster
                .app_of_revision(&NamespacedName::new(name.namespace.clone(), &*it.revision_name))
        };
        let configuration = if is_own_revision { Some(name.clone()) } else { other() };
        if let Some(configuration) = configuration {
            add_share(&mut state, &configuration.name, &it.revision_name, it.percent);
        }
    }
    state
}

/// Adds a target's share to its Configuration's: targets of one Configuration roll out together.
fn add_share(rollout: &mut Rollout, configuration: &str, revision: &str, percent: u8) {
    let percent = i32::from(percent);
    let mut all = rollout.configurations.iter_mut();
    match all.find(|it| it.configuration_name == configuration) {
        Some(existing) => {
            existing.percent += percent;
            existing.revisions.iter_mut().take(1).for_each(|it| it.percent += percent);
        }
        // Only a Route's own traffic rolls out, so no entry has a tag.
        None => rollout.add_settled_target("", configuration, revision, percent),
    }
}

/// Divides the targets' shares as the rollout has them, each beginning with the newest Revision.
fn divide_traffic<'a>(
    pairs: impl Iterator<Item = (&'a TrafficSpec, &'a AssignedTraffic)>,
    name: &NamespacedName,
    state: &Rollout,
) -> Vec<AssignedTraffic> {
    // Several targets may share one entry: each takes its percents out of what is left.
    let (mut left, mut out) = (state.clone(), Vec::new());
    for (target, it) in pairs {
        let configuration = target_configuration(target, name);
        let mut all = left.configurations.iter_mut();
        let shares = all.find(|entry| entry.configuration_name == configuration);
        let Some(shares) = shares.filter(|_| it.is_latest && it.percent > 0) else {
            out.push(it.clone());
            continue;
        };
        let mut missing = i32::from(it.percent);
        for (index, share) in shares.revisions.iter_mut().rev().enumerate() {
            let taken = share.percent.min(missing);
            share.percent -= taken;
            missing -= taken;
            let percent = u8::try_from(taken).unwrap_or_default();
            // The newest Revision keeps the tag and its place even without a share, so that the target stays visible.
            let newest = index == 0;
            if newest || taken > 0 {
                out.push(AssignedTraffic {
                    tag: it.tag.clone().filter(|_| newest),
                    revision_name: share.revision_name.as_str().into(),
                    is_latest: newest,
                    percent,
                });
            }
        }
    }
    out
}
