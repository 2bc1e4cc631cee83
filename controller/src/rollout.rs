//! Pure: a new Revision gets its share step by step (knative/serving `pkg/reconciler/route/traffic/rollout.go` at
//! 98e5ef9; `knative.md` §6.4).
//!
//! A rollout begins with 1 % for the new Revision. Once that is in force everywhere, the time it took is the least time
//! between two steps, and the rest of the wished duration is divided into as many equal steps as fit. Each step takes
//! from the newest of the older Revisions first. The state travels as JSON in an annotation, so another controller goes
//! on where this one stopped.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The annotation that keeps the state (`networking.RolloutAnnotationKey`).
pub const ANNOTATION: &str = "networking.internal.knative.dev/rollout";

/// A moment in nanoseconds since 1970, as the annotation has it.
pub type Nanos = i64;

/// One second in [`Nanos`].
const SECOND: f64 = 1e9;

/// Where every rollout of a Route stands. Sorted by tag, then by Configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rollout {
    /// One for each tag and Configuration that follows the latest Revision.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub configurations: Vec<Shares>,
}

/// How one target's share is divided among Revisions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Shares {
    /// The Configuration that the target follows.
    pub configuration_name: String,
    /// The target's tag; empty without one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub tag: String,
    /// The target's share of the whole Route, in percent.
    pub percent: i32,
    /// Who gets it, oldest first. One at rest; none where nothing is ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub revisions: Vec<Share>,
    /// The steps.
    #[serde(default)]
    pub step_params: Steps,
}

/// One Revision's share of the whole Route.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Share {
    /// The Revision.
    pub revision_name: String,
    /// Percent.
    pub percent: i32,
}

/// When steps are taken, and how large they are. All zero at rest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Steps {
    /// When the rollout began.
    #[serde(rename = "starttime", skip_serializing_if = "is_zero")]
    pub start_time: Nanos,
    /// When the next step is due.
    #[serde(skip_serializing_if = "is_zero")]
    pub next_step_time: Nanos,
    /// Nanoseconds between two steps; 0: not known yet.
    #[serde(skip_serializing_if = "is_zero")]
    pub step_duration: i64,
    /// Percent a step.
    #[serde(skip_serializing_if = "is_small_zero")]
    pub step_size: i32,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks by reference")]
fn is_zero(it: &i64) -> bool {
    *it == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks by reference")]
fn is_small_zero(it: &i32) -> bool {
    *it == 0
}

/// What a step is given.
#[derive(Clone, Debug)]
pub struct Event {
    /// What the Route's targets lead to at last: one Revision a target.
    pub wanted: Rollout,
    /// How long a rollout takes; zero: it is done at once.
    pub duration: Duration,
    /// Whether the shares of the state became the ones in force everywhere.
    pub in_force: bool,
}

/// What a step led to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stepped {
    /// The shares to put in force now, and the state to keep.
    pub state: Rollout,
    /// When to step again; `None`: time alone changes nothing.
    pub next: Option<Nanos>,
}

/// Takes the state a step further. Without a state there is nothing to roll from, and what is wanted counts at once.
pub fn step(state: Option<Rollout>, now: Nanos, event: Event) -> Stepped {
    let Event { wanted, duration, in_force } = event;
    let wanted = wanted.sorted();
    let seconds = duration.as_secs();
    let before = state.filter(|it| seconds > 0 && !it.configurations.is_empty());
    let Some(mut before) = before else { return Stepped { state: wanted, next: None } };
    if in_force {
        before.observe(now, seconds);
    }
    let goals = wanted.configurations.into_iter();
    let configurations = goals.filter_map(|goal| goal.follow(&mut before, now)).collect();
    let state = Rollout { configurations };
    let due = state.configurations.iter().map(|it| it.step_params.next_step_time);
    let next = due.filter(|due| *due > 0).min();
    Stepped { state, next }
}

impl Rollout {
    /// Reads the annotation. What cannot be a state is dropped, so that shares never fail to add up.
    pub fn parse(json: &str) -> Option<Self> {
        let read: Self = serde_json::from_str(json).ok()?;
        read.configurations.iter().all(Shares::is_valid).then(|| read.sorted())
    }

    /// Writes the annotation.
    pub fn to_json(&self) -> String {
        // Numbers and texts are all it has, so there is nothing that JSON could not say.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Whether every share is where it belongs.
    pub fn is_done(&self) -> bool {
        self.configurations.iter().all(|it| it.revisions.len() < 2)
    }

    /// Adds a target at rest: one Revision with all of its share.
    pub fn add(&mut self, tag: &str, configuration: &str, revision: &str, percent: i32) {
        self.configurations.push(Shares {
            configuration_name: configuration.to_owned(),
            tag: tag.to_owned(),
            percent,
            revisions: vec![Share { revision_name: revision.to_owned(), percent }],
            step_params: Steps::default(),
        });
    }

    /// How a target's share is divided now; `None`: it is not part of any rollout.
    pub fn shares(&self, tag: &str, configuration: &str) -> Option<&[Share]> {
        let is_it = |it: &&Shares| it.tag == tag && it.configuration_name == configuration;
        self.configurations.iter().find(is_it).map(|it| it.revisions.as_slice())
    }

    fn sorted(mut self) -> Self {
        let key = |it: &Shares| (it.tag.clone(), it.configuration_name.clone());
        self.configurations.sort_by_cached_key(key);
        self
    }

    /// Plans the steps of rollouts that were waiting for their first 1 % to be in force.
    fn observe(&mut self, now: Nanos, seconds: u64) {
        for it in &mut self.configurations {
            if it.step_params.step_duration == 0 && it.step_params.start_time > 0 {
                let took = now.saturating_sub(it.step_params.start_time);
                it.plan(now, (took as f64 / SECOND).ceil().max(1.0), seconds as f64);
            }
        }
    }
}

impl Shares {
    /// Knative's rules, and that no share is negative.
    fn is_valid(&self) -> bool {
        let total: i64 = self.revisions.iter().map(|it| i64::from(it.percent)).sum();
        (0..=100).contains(&self.percent)
            && (0..=self.percent).contains(&self.step_params.step_size)
            && self.step_params.step_duration >= 0
            && self.revisions.iter().all(|it| it.percent >= 0)
            && total == i64::from(self.percent)
    }

    /// Fixes size and time of the steps. `least` is the time that 1 % took, `seconds` the whole time wished.
    ///
    /// Example: 100 % in 4 steps goes 1, 26, 51, 76, 100.
    fn plan(&mut self, now: Nanos, least: f64, seconds: f64) {
        let left = (seconds - least).max(1.0);
        let percent = f64::from(self.percent - 1);
        let steps = (left / least).max(1.0).min(percent).max(1.0);
        let each = left / steps * SECOND;
        self.step_params.step_duration = each as i64;
        // Rounding down would make 1.9 % a step of 1 %, and the rollout twice as long.
        self.step_params.step_size = (percent / steps).round() as i32;
        self.step_params.next_step_time = now.saturating_add(each as i64);
    }

    /// This goal after what was before; `None`: it takes no part.
    fn follow(self, before: &mut Rollout, now: Nanos) -> Option<Self> {
        let have = &mut before.configurations;
        if !have.iter().any(|it| it.tag == self.tag) {
            // A new tag has nothing to roll from.
            return Some(self);
        }
        let is_it =
            |it: &Self| it.tag == self.tag && it.configuration_name == self.configuration_name;
        match (have.iter().position(is_it), self.percent) {
            (_, ..=0) => None,
            (None, _) | (Some(_), 1) => Some(self),
            (Some(at), _) => Some(self.advance(have.swap_remove(at), now)),
        }
    }

    /// This goal, rolled from `before`.
    fn advance(self, mut before: Self, now: Nanos) -> Self {
        before.adjust(self.percent);
        let latest = self.revisions.last().map(|it| it.revision_name.clone());
        let was = before.revisions.last().map(|it| it.revision_name.clone());
        match (latest, was) {
            (None, _) | (_, None) => self,
            (Some(latest), Some(was)) if latest == was => self.go_on(before, now),
            (Some(latest), Some(_)) => self.begin(before, latest, now),
        }
    }

    /// No new Revision: the next step, if one is under way and due.
    fn go_on(self, before: Self, now: Nanos) -> Self {
        if before.revisions.len() < 2 {
            return self;
        }
        let mut it = Self { revisions: before.revisions, step_params: before.step_params, ..self };
        // Knative leaves a step larger than a target that shrank, and then drops the state as one that cannot be.
        it.step_params.step_size = it.step_params.step_size.min(it.percent);
        // No step is planned further ahead than this, unless by a clock that was: it would stand still for as long.
        let latest = now.saturating_add(it.step_params.step_duration);
        it.step_params.next_step_time = it.step_params.next_step_time.min(latest);
        if it.step_params.step_size > 0 && now >= it.step_params.next_step_time {
            it.take_step(now);
        }
        it
    }

    /// A new Revision: 1 % for it, from the newest that has any.
    fn begin(self, before: Self, latest: String, now: Nanos) -> Self {
        let mut revisions = before.revisions;
        if let Some(newest) = revisions.iter_mut().rev().find(|it| it.percent > 0) {
            newest.percent -= 1;
        }
        // Where a Revision comes back in the midst of a rollout, its old share goes on as part of its new one.
        let again: i32 =
            revisions.iter().filter(|it| it.revision_name == latest).map(|it| it.percent).sum();
        revisions.retain(|it| it.percent > 0 && it.revision_name != latest);
        revisions.push(Share { revision_name: latest, percent: 1 + again });
        let step_params = Steps { start_time: now, ..Steps::default() };
        Self { revisions, step_params, ..self }
    }

    /// A target that grows gives to the newest Revision; one that shrinks takes from the oldest.
    fn adjust(&mut self, goal: i32) {
        let mut less = self.percent - goal;
        self.percent = goal;
        if less < 0
            && let Some(newest) = self.revisions.last_mut()
        {
            newest.percent -= less;
        }
        for it in &mut self.revisions {
            let taken = less.clamp(0, it.percent);
            it.percent -= taken;
            less -= taken;
        }
        self.revisions.retain(|it| it.percent > 0);
    }

    /// Moves one step's share to the newest Revision, from the newest of the others first.
    fn take_step(&mut self, now: Nanos) {
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
        if self.revisions.len() > 1 {
            self.step_params.next_step_time = now.saturating_add(self.step_params.step_duration);
        } else {
            self.step_params = Steps::default();
        }
    }
}

#[cfg(test)]
mod tests;
