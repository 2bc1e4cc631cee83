//! Pure: all Revisions: their routes, pods and reported load, due evaluations, and the decisions.
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
    NamespacedName, RouteKey, RouteTable, RoutingPhase, ScaleDecision, ScalePolicyPool, UsageKey,
    UsageSample,
};

use self::senders::UsageSender;
use crate::{
    revision::{LoadKnowledge, PodPhaseCounts, ScaledRevision},
    usage::{RevisionLoad, UsageStream},
};

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

#[derive(Debug)]
struct AutoscalerPod {
    revision: NamespacedName,
    node: String,
    phase: RoutingPhase,
    has_address: bool,
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

    /// Applies the changes of one RouteTable batch. Returns a [`DecisionUpdate::Withdrawn`] for each removed Revision.
    pub fn apply_routes(
        &mut self,
        now: Duration,
        table: &RouteTable,
        changed: &BTreeSet<RouteKey>,
    ) -> Vec<DecisionUpdate> {
        let mut updates = Vec::new();
        self.mark_load_unknown_before(now, table, changed);
        // Pods refer to Revisions, so Revisions come first, whatever the order of keys.
        for key in changed {
            if let RouteKey::Revision(name) = key {
                updates.extend(self.update_revision(now, table, name));
            }
        }
        for key in changed {
            match key {
                RouteKey::Pod(uid) => self.update_pod(now, table, uid),
                RouteKey::Activator(name) if table.activators.contains_key(name) => {
                    self.activators.insert(name.clone());
                }
                RouteKey::Activator(name) => drop(self.activators.remove(name)),
                RouteKey::Service(_)
                | RouteKey::Revision(_)
                | RouteKey::Node(_)
                | RouteKey::Replicas(_)
                | RouteKey::Settings => {}
            }
        }
        updates
    }

    /// Marks load that is unknown at this moment and whose pods or activators change. Once they have gone, the next
    /// tick would take their load for known.
    fn mark_load_unknown_before(
        &mut self,
        now: Duration,
        table: &RouteTable,
        changed: &BTreeSet<RouteKey>,
    ) {
        let queue_knowledge = self.wait_queue_knowledge(now);
        let (mut names, mut activator_leaves) = (BTreeSet::new(), false);
        for key in changed {
            match key {
                RouteKey::Pod(uid) => names.extend(self.pods.get(uid).map(|pod| &pod.revision)),
                RouteKey::Activator(name) => {
                    activator_leaves |= !table.activators.contains_key(name);
                }
                _ => {}
            }
        }
        let unknown = |name: &&NamespacedName| {
            self.load_knowledge(now, name, queue_knowledge) != LoadKnowledge::Complete
        };
        let unknown: Vec<NamespacedName> = names.into_iter().filter(unknown).cloned().collect();
        self.mark_gaps(unknown);
        if activator_leaves && queue_knowledge != LoadKnowledge::Complete {
            self.for_each_load(RevisionLoad::mark_gap);
        }
    }

    /// Keys of all subjects of the RouteTable that are stored here.
    pub fn stored_keys(&self) -> BTreeSet<RouteKey> {
        let revisions = self.revisions.keys().cloned().map(RouteKey::Revision);
        let pods = self.pods.keys().cloned().map(RouteKey::Pod);
        let activators = self.activators.iter().cloned().map(RouteKey::Activator);
        revisions.chain(pods).chain(activators).collect()
    }

    fn update_revision(
        &mut self,
        now: Duration,
        table: &RouteTable,
        name: &NamespacedName,
    ) -> Option<DecisionUpdate> {
        let entry =
            table.revisions.get(name).and_then(|entry| Some((entry, entry.policy.clone()?)));
        let entry = entry.map(|(entry, policy)| (entry, self.policies.intern(policy)));
        let Some((entry, policy)) = entry else {
            self.unschedule(name);
            let removed = self.revisions.remove(name)?;
            // The Revision may return, and its senders will not repeat what they have already reported.
            self.store_unlisted_load(name, removed.load);
            return Some(DecisionUpdate::Withdrawn(name.clone()));
        };
        match self.revisions.get_mut(name) {
            Some(revision) => {
                let (reachable, reached) = (entry.reachable, entry.initial_scale_reached);
                if revision.policy != policy {
                    revision.set_policy(now, policy);
                } else if (revision.is_reachable, revision.initial_scale_reached)
                    == (reachable, reached)
                {
                    return None;
                }
                (revision.is_reachable, revision.initial_scale_reached) = (reachable, reached);
            }
            None => {
                let mut revision = ScaledRevision::new(entry, policy);
                revision.pods = self.count_pods(name);
                revision.load = self.unlisted_loads.remove(name).unwrap_or_default();
                self.revisions.insert(name.clone(), Box::new(revision));
            }
        }
        self.schedule(name, now);
        None
    }

    /// Stores the load of a Revision that is not in the RouteTable, unless it is empty.
    fn store_unlisted_load(&mut self, name: &NamespacedName, mut load: RevisionLoad) {
        load.sleep();
        if !load.is_empty() {
            self.unlisted_loads.insert(name.clone(), load);
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

    fn count_pods(&self, revision: &NamespacedName) -> PodPhaseCounts {
        let mut counts = PodPhaseCounts::default();
        self.pods_of_revision(revision).for_each(|(_, pod)| *pod.phase_count(&mut counts) += 1);
        counts
    }

    fn pods_of_revision(
        &self,
        revision: &NamespacedName,
    ) -> impl Iterator<Item = (&String, &AutoscalerPod)> {
        let uids = self.pods_by_revision.get(revision).into_iter().flatten();
        uids.filter_map(|uid| self.pods.get_key_value(uid))
    }

    fn insert_pod(&mut self, uid: &str, pod: AutoscalerPod) {
        self.pods_by_revision.entry(pod.revision.clone()).or_default().insert(uid.to_owned());
        self.pods.insert(uid.to_owned(), pod);
    }

    fn remove_pod(&mut self, uid: &str) -> Option<AutoscalerPod> {
        let pod = self.pods.remove(uid)?;
        if let Some(uids) = self.pods_by_revision.get_mut(&pod.revision) {
            uids.remove(uid);
            if uids.is_empty() {
                self.pods_by_revision.remove(&pod.revision);
            }
        }
        Some(pod)
    }

    fn update_pod(&mut self, now: Duration, table: &RouteTable, uid: &str) {
        let new = table.pods.get(uid).map(|entry| AutoscalerPod {
            revision: entry.revision.clone(),
            node: entry.node.clone(),
            phase: entry.phase,
            has_address: entry.address.is_some(),
        });
        if let Some(old) = self.remove_pod(uid) {
            if let Some(revision) = self.revisions.get_mut(&old.revision) {
                *old.phase_count(&mut revision.pods) -= 1;
                self.schedule(&old.revision, now);
            }
            if let Some(load) = self.load_mut(&old.revision) {
                // Counted out even if it returns below: its phase or its Revision may differ.
                load.set_pod_counted(now, uid, false);
            }
        }
        if let Some(new) = new {
            // Usage of the pod may have been reported before the pod itself.
            if let Some(load) = self.load_mut(&new.revision) {
                load.set_pod_counted(now, uid, new.is_counted());
            }
            if let Some(revision) = self.revisions.get_mut(&new.revision) {
                *new.phase_count(&mut revision.pods) += 1;
                self.schedule(&new.revision, now);
            }
            self.insert_pod(uid, new);
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
        // Woken before the totals are added, so that the window exists to record them.
        if is_counted && revision.load.has_new_load(stream, sample) {
            revision.wake(now);
        }
        revision.load.apply_report(now, stream, is_counted, sample);
        if revision.is_awake() && revision.is_urgent(now) {
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
    /// completely under three conditions: each ready pod is on a node whose agent reports, each reported pod is still
    /// reported, and each activator reports its waiting requests. Other pods get no requests.
    fn load_knowledge(
        &self,
        now: Duration,
        name: &NamespacedName,
        queue_knowledge: LoadKnowledge,
    ) -> LoadKnowledge {
        let Some(revision) = self.revisions.get(name) else { return LoadKnowledge::Missing };
        let (mut ready, mut reported) = (0, 0);
        for (uid, pod) in
            self.pods_of_revision(name).filter(|(_, pod)| pod.phase == RoutingPhase::Ready)
        {
            let agent = self.agent_by_node.get(&pod.node).and_then(|it| self.senders.get(it));
            let is_reported =
                agent.is_some_and(|it| it.is_current(now)) || revision.load.is_pod_reported(uid);
            (ready, reported) = (ready + 1, reported + u32::from(is_reported));
        }
        if ready > 0 && reported == 0 {
            LoadKnowledge::Missing
        } else if reported < ready || !revision.load.is_online() {
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

impl AutoscalerPod {
    fn is_counted(&self) -> bool {
        self.phase != RoutingPhase::Draining
    }

    fn phase_count<'a>(&self, counts: &'a mut PodPhaseCounts) -> &'a mut u32 {
        match self.phase {
            RoutingPhase::Starting if self.has_address => &mut counts.starting,
            RoutingPhase::Starting => &mut counts.pending,
            RoutingPhase::Ready => &mut counts.ready,
            RoutingPhase::Draining => &mut counts.draining,
        }
    }
}

#[cfg(test)]
mod tests;
