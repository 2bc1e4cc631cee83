//! Pure: all Revisions: their reported load, due evaluations, and the decisions.
//!
//! A Revision that is asleep has no timer and is in no list; it costs only its entry here until a report of it arrives.
//!
//! Usage and routes arrive on streams of their own, so a request may be reported before its Revision is known. Reports
//! are kept by Revision until then: a sender reports a state once, and again only when it changes.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use common::wire::{
    NamespacedName, RoutingPhase, ScaleDecision, ScalePolicyPool, UsageKey, UsageSample,
};

use self::{routes::AutoscalerPod, senders::UsageSender};
use crate::{
    revision::{LoadKnowledge, ScaledRevision},
    usage::{RevisionLoad, UsageStream},
};

mod routes;
mod senders;

/// Every Revision of the RouteTable, with its reported load.
#[derive(Debug)]
pub struct ScaledRevisions {
    tick: Duration,
    /// Revisions of the RouteTable, boxed because there are many and half of a B-tree's slots are empty.
    revisions: BTreeMap<NamespacedName, Box<ScaledRevision>>,
    /// Reported load of Revisions that are not in the RouteTable.
    unlisted_loads: BTreeMap<NamespacedName, RevisionLoad>,
    policies: ScalePolicyPool,
    pods: BTreeMap<String, AutoscalerPod>,
    /// UIDs of the pods of each Revision that has any.
    pods_by_revision: BTreeMap<NamespacedName, BTreeSet<String>>,
    /// Senders by the number that their streams carry. A sender that will not return is removed.
    senders: BTreeMap<u32, UsageSender>,
    next_sender: u32,
    /// Number of the sender that is the agent of each node.
    agent_by_node: BTreeMap<String, u32>,
    /// Activators named in the RouteTable: each may hold requests, even before its first report.
    activators: BTreeSet<String>,
    /// Next evaluation of each Revision that has one, by its time.
    due: BTreeSet<(Duration, NamespacedName)>,
    /// Time of each entry of `due`, by its Revision.
    due_at: BTreeMap<NamespacedName, Duration>,
    /// Number of evaluations since the start.
    pub evaluations: u64,
}

/// Output for the controller, about one Revision.
#[derive(Clone, Debug, PartialEq)]
pub enum DecisionUpdate {
    /// New decision on a Revision.
    Decided(Box<ScaleDecision>),
    /// Withdrawal of a Revision's decision: it is asleep or no longer in the RouteTable.
    Withdrawn(NamespacedName),
}

impl ScaledRevisions {
    /// No Revisions yet. `tick` is the time between two evaluations of a Revision that is awake.
    pub fn new(tick: Duration) -> Self {
        Self {
            tick,
            revisions: BTreeMap::new(),
            unlisted_loads: BTreeMap::new(),
            policies: ScalePolicyPool::default(),
            pods: BTreeMap::new(),
            pods_by_revision: BTreeMap::new(),
            senders: BTreeMap::new(),
            next_sender: 0,
            agent_by_node: BTreeMap::new(),
            activators: BTreeSet::new(),
            due: BTreeSet::new(),
            due_at: BTreeMap::new(),
            evaluations: 0,
        }
    }

    /// Returns the load of a Revision, whether or not the Revision is in the RouteTable.
    fn load_mut(&mut self, name: &NamespacedName) -> Option<&mut RevisionLoad> {
        match self.revisions.get_mut(name) {
            Some(revision) => Some(&mut revision.load),
            None => self.unlisted_loads.get_mut(name),
        }
    }

    /// Applies `change` to every load, including those of Revisions not in the RouteTable.
    fn for_each_load(&mut self, change: impl Fn(&mut RevisionLoad)) {
        self.revisions.values_mut().for_each(|it| change(&mut it.load));
        self.unlisted_loads.retain(|_, load| {
            change(load);
            load.sleep();
            !load.is_empty()
        });
    }

    /// Marks a gap in the load of each of these Revisions.
    fn mark_gaps(&mut self, names: impl IntoIterator<Item = NamespacedName>) {
        for name in names {
            self.load_mut(&name).into_iter().for_each(RevisionLoad::mark_gap);
        }
    }

    /// Returns true if the pod is known to run on another node.
    pub fn is_on_other_node(&self, uid: &str, node: &str) -> bool {
        self.pods.get(uid).is_some_and(|pod| pod.node != node)
    }

    /// Applies the totals of one subject, and schedules an evaluation if they are urgent.
    pub fn apply_usage(&mut self, now: Duration, stream: UsageStream, sample: &UsageSample) {
        let Some(is_settling) = self.record_message(now, stream) else { return };
        let pod = sample.key.pod.as_deref().and_then(|uid| self.pods.get(uid));
        let is_counted = pod.map(AutoscalerPod::is_counted);
        let name = &sample.key.revision;
        let Some(revision) = self.revisions.get_mut(name) else {
            let load = self.unlisted_loads.entry(name.clone()).or_default();
            let is_counted = is_counted.unwrap_or_else(|| load.counts_unnamed(stream, sample));
            return load.apply_report(now, stream, is_counted, sample);
        };
        let is_counted = is_counted.unwrap_or_else(|| revision.load.counts_unnamed(stream, sample));
        if is_settling && is_counted && revision.load.is_changed_by(stream, sample) {
            revision.load.mark_gap();
        }
        let was_awake = revision.is_awake();
        // Woken before the totals are added, so that the window exists to record them.
        if is_counted && revision.load.has_new_load(stream, sample) {
            revision.wake(now);
        }
        revision.load.apply_report(now, stream, is_counted, sample);
        if let Some(sender) = self.senders.get(&stream.sender) {
            revision.record_wake_origin(sender.name(), sample);
        }
        // A pod on standby serves a request without a decision. It may be over by the time of the report.
        let is_woken_pod = !was_awake && revision.pods.standby > 0;
        if revision.is_awake() && (is_woken_pod || revision.is_urgent(now)) {
            revision.mark_urgent(now);
            self.schedule(name, now);
        }
    }

    /// Removes a subject that its sender no longer reports.
    pub fn remove_usage(&mut self, now: Duration, stream: UsageStream, key: &UsageKey) {
        let Some(is_settling) = self.record_message(now, stream) else { return };
        let Some(load) = self.load_mut(&key.revision) else { return };
        if is_settling {
            load.mark_gap();
        }
        load.remove_source(now, stream.sender, key.pod.as_deref());
        if load.is_empty() {
            self.unlisted_loads.remove(&key.revision);
        }
    }

    /// Evaluates every Revision that is due, and returns the decisions that changed.
    pub fn evaluate_due(&mut self, now: Duration) -> Vec<DecisionUpdate> {
        let mut updates = Vec::new();
        if self.next_due().is_none_or(|at| at > now) {
            return updates;
        }
        self.forget_lost_activators(now);
        // Computed once for all due Revisions: it does not depend on the Revision.
        let queue_knowledge = self.wait_queue_knowledge(now);
        while let Some((_, name)) = self.due.first().filter(|(at, _)| *at <= now).cloned() {
            self.unschedule(&name);
            let knowledge = self.load_knowledge(now, &name, queue_knowledge);
            let Some(revision) = self.revisions.get_mut(&name) else { continue };
            self.evaluations += 1;
            // The schedule entry was removed above; only the step's outcome puts it back.
            let outcome = revision.step(now, self.tick, knowledge, &name);
            updates.extend(
                outcome.decision.map(|decision| DecisionUpdate::Decided(Box::new(decision))),
            );
            updates.extend(outcome.is_withdrawn.then(|| DecisionUpdate::Withdrawn(name.clone())));
            if let Some(at) = outcome.next_step_at {
                self.schedule(&name, at);
            }
        }
        updates
    }

    /// Time of the next due evaluation; `None` if all Revisions are asleep.
    pub fn next_due(&self) -> Option<Duration> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Returns the longest time on which a decision for any Revision may depend.
    pub fn longest_lookback(&self) -> Duration {
        self.revisions.values().map(|it| it.lookback(self.tick)).max().unwrap_or_default()
    }

    /// All Revisions of the RouteTable, for metrics.
    pub fn revisions(&self) -> impl Iterator<Item = (&NamespacedName, &ScaledRevision)> {
        self.revisions.iter().map(|(name, it)| (name, &**it))
    }

    /// Computes what is known of a Revision's load; `queue_knowledge` is about requests that wait. Load is known
    /// completely under three conditions: each pod that may get requests is on a node whose agent reports, each
    /// reported pod is still reported, and each activator reports its waiting requests. A pod on standby may get
    /// requests too.
    fn load_knowledge(
        &self,
        now: Duration,
        name: &NamespacedName,
        queue_knowledge: LoadKnowledge,
    ) -> LoadKnowledge {
        let Some(revision) = self.revisions.get(name) else { return LoadKnowledge::Missing };
        let (mut ready, mut reported, mut all_reported) = (0, 0, true);
        for (uid, pod) in self.pods_of_revision(name).filter(|(_, pod)| pod.may_get_requests()) {
            let agent = self.agent_by_node.get(&pod.node).and_then(|it| self.senders.get(it));
            let is_reported =
                agent.is_some_and(|it| it.is_current(now)) || revision.load.is_pod_reported(uid);
            all_reported &= is_reported;
            // Other pods may get requests too, but the load is missing only if no ready pod is reported.
            if pod.phase == RoutingPhase::Ready {
                (ready, reported) = (ready + 1, reported + u32::from(is_reported));
            }
        }
        if ready > 0 && reported == 0 {
            LoadKnowledge::Missing
        } else if !all_reported || !revision.load.is_online() {
            LoadKnowledge::Partial
        } else if queue_knowledge == LoadKnowledge::Complete && !revision.load.is_current(now) {
            LoadKnowledge::Late
        } else {
            queue_knowledge
        }
    }

    /// Schedules an evaluation of the Revision no later than `at`.
    fn schedule(&mut self, name: &NamespacedName, at: Duration) {
        match self.due_at.get(name) {
            Some(&earlier) if earlier <= at => return,
            Some(_) => self.unschedule(name),
            None => {}
        }
        self.due.insert((at, name.clone()));
        self.due_at.insert(name.clone(), at);
    }

    fn unschedule(&mut self, name: &NamespacedName) {
        if let Some(at) = self.due_at.remove(name) {
            self.due.remove(&(at, name.clone()));
        }
    }
}

#[cfg(test)]
mod tests;
