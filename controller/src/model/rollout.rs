//! Pure: gradual rollout, in which a new Revision gets its share step by step (knative/serving
//! `pkg/reconciler/route/traffic/rollout.go` at 98e5ef9).
//!
//! A rollout begins with 1 % for the new Revision. Once that share is in force everywhere, the time this took is the
//! least time between two steps. The rest of the configured duration is divided into as many equal steps as fit. Each
//! step takes from the newest of the older Revisions first. The state travels as JSON in an annotation, so another
//! controller continues where this one stopped.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Annotation that keeps the state (`networking.RolloutAnnotationKey`).
pub const ROLLOUT_ANNOTATION: &str = "networking.internal.knative.dev/rollout";

/// A moment in nanoseconds since 1970, the unit of the annotation.
pub type UnixNanos = i64;

/// Length of one second in [`UnixNanos`].
const NANOS_PER_SECOND: f64 = 1e9;

/// State of all rollouts of a Route, sorted by tag, then by Configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rollout {
    /// One entry for each tag and Configuration that follows the latest Revision.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub configurations: Vec<ConfigurationRollout>,
}

/// Division of one target's share among Revisions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConfigurationRollout {
    /// Name of the Configuration that the target follows.
    pub configuration_name: String,
    /// Tag of the target; empty without one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub tag: String,
    /// Share of the target in the whole Route, in percent.
    pub percent: i32,
    /// Revisions that divide the share, oldest first. One at rest; none where nothing is ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub revisions: Vec<RevisionRollout>,
    /// Size and times of the steps.
    #[serde(default)]
    pub step_params: RolloutParams,
}

/// One Revision's share of the whole Route.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RevisionRollout {
    /// Name of the Revision that gets the share.
    pub revision_name: String,
    /// Share of the whole Route, in percent.
    pub percent: i32,
}

/// Size and times of a rollout's steps, all zero at rest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RolloutParams {
    /// Start of the rollout, at which the new Revision got its first 1 %.
    #[serde(rename = "starttime", skip_serializing_if = "is_zero")]
    pub start_time: UnixNanos,
    /// Moment from which the next step is due.
    #[serde(skip_serializing_if = "is_zero")]
    pub next_step_time: UnixNanos,
    /// Nanoseconds between two steps; 0: not known yet.
    #[serde(skip_serializing_if = "is_zero")]
    pub step_duration: i64,
    /// Percent that each step moves to the newest Revision.
    #[serde(skip_serializing_if = "is_zero_i32")]
    pub step_size: i32,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks by reference")]
fn is_zero(it: &i64) -> bool {
    *it == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks by reference")]
fn is_zero_i32(it: &i32) -> bool {
    *it == 0
}

/// Input of one step, beside the state and the time.
#[derive(Clone, Debug)]
pub struct RolloutInput {
    /// Final shares, from the Route's targets: one Revision for each target.
    pub goal: Rollout,
    /// Duration of a whole rollout; with zero the final shares are in force at once.
    pub duration: Duration,
    /// True once the shares of the state are in force everywhere.
    pub in_force: bool,
}

/// Result of a step: the new state, and the time of the next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RolloutStep {
    /// Shares to put in force now, which are also the state to keep.
    pub state: Rollout,
    /// Moment of the next step; `None`: time alone changes nothing.
    pub next_step_at: Option<UnixNanos>,
}

/// Takes the state one step further. Without a state there are no older shares, and the final ones are in force at
/// once.
pub fn step(state: Option<Rollout>, now: UnixNanos, input: RolloutInput) -> RolloutStep {
    let RolloutInput { goal, duration, in_force } = input;
    let goal = goal.into_sorted();
    let seconds = duration.as_secs();
    let previous = state.filter(|it| seconds > 0 && !it.configurations.is_empty());
    let Some(mut previous) = previous else {
        return RolloutStep { state: goal, next_step_at: None };
    };
    if in_force {
        previous.schedule_pending_steps(now, seconds);
    }
    let goals = goal.configurations.into_iter();
    // Goals take their state out of `previous`; entries left there belong to targets that the Route no longer has.
    let configurations =
        goals.filter_map(|goal| goal.advance_from_state(&mut previous, now)).collect();
    let state = Rollout { configurations };
    let due = state.configurations.iter().map(|it| it.step_params.next_step_time);
    let next = due.filter(|due| *due > 0).min();
    RolloutStep { state, next_step_at: next }
}

impl Rollout {
    /// Parses the annotation. An invalid state is dropped, so that shares always add up.
    pub fn parse(json: &str) -> Option<Self> {
        let read: Self = serde_json::from_str(json).ok()?;
        read.configurations.iter().all(ConfigurationRollout::is_valid).then(|| read.into_sorted())
    }

    /// Serializes the state for the annotation.
    pub fn to_json(&self) -> String {
        // The state holds only numbers and texts, so serialization cannot fail.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Returns true if every target has all of its share at one Revision.
    pub fn is_complete(&self) -> bool {
        self.configurations.iter().all(|it| it.revisions.len() < 2)
    }

    /// Adds a target at rest: one Revision with all of the target's share.
    pub fn add_settled_target(
        &mut self,
        tag: &str,
        configuration: &str,
        revision: &str,
        percent: i32,
    ) {
        self.configurations.push(ConfigurationRollout {
            configuration_name: configuration.to_owned(),
            tag: tag.to_owned(),
            percent,
            revisions: vec![RevisionRollout { revision_name: revision.to_owned(), percent }],
            step_params: RolloutParams::default(),
        });
    }

    /// Returns the division of a target's share; `None`: the target is not part of any rollout.
    pub fn revision_shares(&self, tag: &str, configuration: &str) -> Option<&[RevisionRollout]> {
        let is_it =
            |it: &&ConfigurationRollout| it.tag == tag && it.configuration_name == configuration;
        self.configurations.iter().find(is_it).map(|it| it.revisions.as_slice())
    }

    fn into_sorted(mut self) -> Self {
        let key = |it: &ConfigurationRollout| (it.tag.clone(), it.configuration_name.clone());
        self.configurations.sort_by_cached_key(key);
        self
    }

    /// Plans the steps of rollouts that were waiting for their first 1 % to be in force.
    fn schedule_pending_steps(&mut self, now: UnixNanos, seconds: u64) {
        for it in &mut self.configurations {
            if it.step_params.step_duration == 0 && it.step_params.start_time > 0 {
                let took = now.saturating_sub(it.step_params.start_time);
                it.compute_steps(
                    now,
                    (took as f64 / NANOS_PER_SECOND).ceil().max(1.0),
                    seconds as f64,
                );
            }
        }
    }
}

impl ConfigurationRollout {
    /// Returns true if the entry obeys Knative's rules and no share is negative.
    fn is_valid(&self) -> bool {
        let total: i64 = self.revisions.iter().map(|it| i64::from(it.percent)).sum();
        (0..=100).contains(&self.percent)
            && (0..=self.percent).contains(&self.step_params.step_size)
            && self.step_params.step_duration >= 0
            && self.revisions.iter().all(|it| it.percent >= 0)
            && total == i64::from(self.percent)
    }

    /// Computes size and time of the steps. `min_step` is the time that 1 % took, `seconds` the whole duration.
    ///
    /// Example: 100 % in 4 steps goes 1, 26, 51, 76, 100.
    fn compute_steps(&mut self, now: UnixNanos, min_step: f64, seconds: f64) {
        let left = (seconds - min_step).max(1.0);
        let percent = f64::from(self.percent - 1);
        let steps = (left / min_step).max(1.0).min(percent).max(1.0);
        let each = left / steps * NANOS_PER_SECOND;
        self.step_params.step_duration = each as i64;
        // Rounding down would turn 1.9 % into steps of 1 %, and the rollout would take twice as long.
        self.step_params.step_size = (percent / steps).round() as i32;
        self.step_params.next_step_time = now.saturating_add(each as i64);
    }

    /// Returns this goal's shares after `previous`; `None`: the target has no share.
    fn advance_from_state(self, previous: &mut Rollout, now: UnixNanos) -> Option<Self> {
        let configurations = &mut previous.configurations;
        if !configurations.iter().any(|it| it.tag == self.tag) {
            // A new tag has no older shares to start from.
            return Some(self);
        }
        let is_it =
            |it: &Self| it.tag == self.tag && it.configuration_name == self.configuration_name;
        match (configurations.iter().position(is_it), self.percent) {
            (_, ..=0) => None,
            // A share of 1 % cannot be divided.
            (None, _) | (Some(_), 1) => Some(self),
            (Some(at), _) => Some(self.advance_target(configurations.swap_remove(at), now)),
        }
    }

    /// Returns this goal's shares, continued from `previous`.
    fn advance_target(self, mut previous: Self, now: UnixNanos) -> Self {
        previous.fit_to_percent(self.percent);
        let latest = self.revisions.last().map(|it| it.revision_name.clone());
        let was = previous.revisions.last().map(|it| it.revision_name.clone());
        match (latest, was) {
            (None, _) | (_, None) => self,
            (Some(latest), Some(was)) if latest == was => self.continue_rollout(previous, now),
            (Some(latest), Some(_)) => self.begin_rollout(previous, latest, now),
        }
    }

    /// Continues without a new Revision: takes the next step, if a rollout is under way and the step is due.
    fn continue_rollout(self, previous: Self, now: UnixNanos) -> Self {
        if previous.revisions.len() < 2 {
            return self;
        }
        let mut it =
            Self { revisions: previous.revisions, step_params: previous.step_params, ..self };
        // Knative leaves a step larger than a target that shrank, and then drops the state as invalid.
        it.step_params.step_size = it.step_params.step_size.min(it.percent);
        // A clock that ran ahead may have planned a step too far in the future; no step is later than one duration from
        // now.
        let latest_time = now.saturating_add(it.step_params.step_duration);
        it.step_params.next_step_time = it.step_params.next_step_time.min(latest_time);
        if it.step_params.step_size > 0 && now >= it.step_params.next_step_time {
            it.take_step(now);
        }
        it
    }

    /// Begins a rollout: moves 1 % to the new Revision from the newest one that has a share.
    fn begin_rollout(self, previous: Self, latest: String, now: UnixNanos) -> Self {
        let mut revisions = previous.revisions;
        if let Some(newest) = revisions.iter_mut().rev().find(|it| it.percent > 0) {
            newest.percent -= 1;
        }
        // A Revision may come back during a rollout: its old share then becomes part of its new one.
        let old_percent: i32 =
            revisions.iter().filter(|it| it.revision_name == latest).map(|it| it.percent).sum();
        revisions.retain(|it| it.percent > 0 && it.revision_name != latest);
        revisions.push(RevisionRollout { revision_name: latest, percent: 1 + old_percent });
        let step_params = RolloutParams { start_time: now, ..RolloutParams::default() };
        Self { revisions, step_params, ..self }
    }

    /// Fits the shares to a changed target: growth goes to the newest Revision, shrinking takes from the oldest.
    fn fit_to_percent(&mut self, goal: i32) {
        let mut excess = self.percent - goal;
        self.percent = goal;
        if excess < 0
            && let Some(newest) = self.revisions.last_mut()
        {
            newest.percent -= excess;
        }
        // An excess below zero takes nothing.
        for it in &mut self.revisions {
            let taken = excess.clamp(0, it.percent);
            it.percent -= taken;
            excess -= taken;
        }
        self.revisions.retain(|it| it.percent > 0);
    }

    /// Moves one step's share to the newest Revision, from the newest of the others first.
    fn take_step(&mut self, now: UnixNanos) {
        let Some(mut newest) = self.revisions.pop() else { return };
        let mut left = self.step_params.step_size;
        while left > 0
            && let Some(donor) = self.revisions.last_mut()
        {
            let taken = left.min(donor.percent);
            donor.percent -= taken;
            newest.percent += taken;
            left -= taken;
            if donor.percent == 0 {
                self.revisions.pop();
            }
        }
        self.revisions.push(newest);
        // A single Revision left means the rollout is over: zero steps mark a state at rest.
        if self.revisions.len() > 1 {
            self.step_params.next_step_time = now.saturating_add(self.step_params.step_duration);
        } else {
            self.step_params = RolloutParams::default();
        }
    }
}

#[cfg(test)]
mod tests;
