//! Pure: senders of usage and their streams: which of them report, and which are silent.

use std::{collections::BTreeSet, time::Duration};

use common::wire::{ClientComponent, ComponentReplica, NamespacedName};

use super::ScaledRevisions;
use crate::{
    revision::LoadKnowledge,
    usage::{MAX_REPORT_GAP, REPORT_OVERDUE_AFTER, RevisionLoad, UsageStream},
};

/// Time for which requests that waited at a lost activator still count as waiting; longer than a reconnect takes.
pub(super) const LOST_ACTIVATOR_RETENTION: Duration = Duration::from_secs(10);

/// Agent or activator that reports usage, and its latest stream.
#[derive(Debug)]
pub(super) struct UsageSender {
    replica: ComponentReplica,
    stream: UsageStream,
    is_online: bool,
    /// Time of the sender's last message, or of its stream's end. A sender sends every second, even without changes.
    last_heard_at: Duration,
    /// End of the last silence in which some second was not reported; `None`: this stream had none.
    silence_ended_at: Option<Duration>,
}

impl ScaledRevisions {
    /// Opens a stream of `replica`, which ends an older stream of the same sender. Agents of one node succeed each
    /// other and read the counters of the same kernel, so they are one sender.
    pub fn open_stream(&mut self, now: Duration, replica: ComponentReplica) -> UsageStream {
        self.forget_lost_agents(now);
        let is_agent = replica.role == ClientComponent::Agent;
        let is_same_sender = |(_, sender): &(&u32, &UsageSender)| {
            let is_of_node =
                is_agent && !replica.node.is_empty() && sender.replica.node == replica.node;
            sender.replica.role == replica.role
                && (sender.replica.name == replica.name || is_of_node)
        };
        let last_stream =
            self.senders.iter().find(is_same_sender).map(|(&id, sender)| (id, sender.stream));
        let stream = match last_stream {
            Some((sender, stream)) => {
                self.close_stream(now, stream);
                // The same sender keeps its totals, as the base of differences over the reconnect.
                UsageStream { sender, number: stream.number + 1, synced: false }
            }
            None => {
                self.next_sender += 1;
                UsageStream { sender: self.next_sender, number: 0, synced: false }
            }
        };
        if is_agent {
            self.agent_by_node.retain(|_, sender| *sender != stream.sender);
            self.agent_by_node.insert(replica.node.clone(), stream.sender);
        }
        let (is_online, last_heard_at, silence_ended_at) = (true, now, None);
        let sender = UsageSender { replica, stream, is_online, last_heard_at, silence_ended_at };
        self.senders.insert(stream.sender, sender);
        stream
    }

    /// Closes a stream. Its reported totals are kept for the sender's return; unreported load is not taken as zero.
    pub fn close_stream(&mut self, now: Duration, stream: UsageStream) {
        let Some(sender) = self.open_sender(stream) else { return };
        let is_current = sender.is_current(now);
        (sender.is_online, sender.last_heard_at) = (false, now);
        // The next stream does not tell what this one left out.
        if !is_current {
            self.mark_missed_load(stream.sender);
        }
        self.for_each_load(|load| load.mark_sender_offline(now, stream.sender));
    }

    /// Removes agents without a stream whose node has no pods any more.
    fn forget_lost_agents(&mut self, now: Duration) {
        let is_lost = |sender: &UsageSender| {
            !sender.is_online && sender.replica.role == ClientComponent::Agent
        };
        if !self.senders.values().any(is_lost) {
            return;
        }
        let nodes: BTreeSet<&str> = self.pods.values().map(|pod| pod.node.as_str()).collect();
        let is_forgotten =
            |sender: &UsageSender| is_lost(sender) && !nodes.contains(sender.replica.node.as_str());
        let forgotten =
            self.senders.iter().filter(|(_, sender)| is_forgotten(sender)).map(|(&id, _)| id);
        self.forget_senders(now, forgotten.collect());
    }

    /// Removes activators that the RouteTable no longer names and that have had no stream for so long that no request
    /// still waits at them.
    pub(super) fn forget_lost_activators(&mut self, now: Duration) {
        let is_forgotten = |sender: &UsageSender| {
            let is_away = !sender.is_online && sender.replica.role == ClientComponent::Activator;
            is_away
                && now >= sender.last_heard_at + LOST_ACTIVATOR_RETENTION
                && !self.activators.contains(&sender.replica.name)
        };
        let forgotten =
            self.senders.iter().filter(|(_, sender)| is_forgotten(sender)).map(|(&id, _)| id);
        self.forget_senders(now, forgotten.collect());
    }

    fn forget_senders(&mut self, now: Duration, forgotten: BTreeSet<u32>) {
        if forgotten.is_empty() {
            return;
        }
        self.senders.retain(|sender, _| !forgotten.contains(sender));
        self.agent_by_node.retain(|_, sender| !forgotten.contains(sender));
        self.for_each_load(|load| {
            forgotten.iter().for_each(|&sender| load.forget_sender(now, sender))
        });
    }

    /// Completes a batch of the stream. After its first batch, subjects it did not name are removed. An empty batch
    /// reports that nothing has changed.
    pub fn complete_batch(&mut self, now: Duration, stream: UsageStream) -> UsageStream {
        if self.record_message(now, stream).is_some()
            && let Some(sender) = self.open_sender(stream)
            && !std::mem::replace(&mut sender.stream.synced, true)
        {
            self.for_each_load(|load| load.complete_snapshot(now, stream));
        }
        UsageStream { synced: true, ..stream }
    }

    /// Records that the sender has sent a message now; `None`: the stream is not its latest. After a silence longer
    /// than [`MAX_REPORT_GAP`], some second was never reported. Returns true while that silence has just ended.
    pub(super) fn record_message(&mut self, now: Duration, stream: UsageStream) -> Option<bool> {
        let sender = self.open_sender(stream)?;
        if sender.stream.synced && now > sender.last_heard_at + MAX_REPORT_GAP {
            sender.silence_ended_at = Some(now);
        }
        sender.last_heard_at = now;
        Some(sender.is_settling(now))
    }

    /// Marks load as missed where the silent sender may have held requests: for an activator in every Revision, for an
    /// agent in those with pods on its node. One stalled node must not hold up the Revisions of other nodes.
    fn mark_missed_load(&mut self, sender: u32) {
        let Some(replica) = self.senders.get(&sender).map(|it| &it.replica) else { return };
        if replica.role == ClientComponent::Activator {
            // Also where the agent has reported pods that the RouteTable no longer lists.
            return self.for_each_load(RevisionLoad::mark_gap);
        }
        let revisions = self.pods.values().filter(|pod| pod.node == replica.node);
        let revisions: BTreeSet<NamespacedName> =
            revisions.map(|pod| pod.revision.clone()).collect();
        self.mark_gaps(revisions);
        self.for_each_load(|load| {
            if load.has_reports_from(sender) {
                load.mark_gap();
            }
        });
    }

    /// Returns the sender if `stream` is its latest one and is open.
    fn open_sender(&mut self, stream: UsageStream) -> Option<&mut UsageSender> {
        let sender = self.senders.get_mut(&stream.sender)?;
        (sender.is_online && sender.stream.number == stream.number).then_some(sender)
    }

    /// Number of senders of `role` with an open stream.
    pub fn online_senders(&self, role: ClientComponent) -> usize {
        self.senders.values().filter(|it| it.is_online && it.replica.role == role).count()
    }

    /// Returns what is known of the requests that wait: complete if every activator currently reports them.
    pub(super) fn wait_queue_knowledge(&self, now: Duration) -> LoadKnowledge {
        let of_role = |sender: &&UsageSender| sender.replica.role == ClientComponent::Activator;
        // An activator without a stream may hold requests too, so the RouteTable tells which ones there are.
        let mut unreported = self.activators.clone();
        let (mut are_synced, mut are_current) = (true, true);
        for sender in self.senders.values().filter(of_role) {
            unreported.remove(&sender.replica.name);
            are_synced &= sender.is_synced();
            are_current &= sender.is_current(now);
        }
        match (are_synced && unreported.is_empty(), are_current) {
            (true, true) => LoadKnowledge::Complete,
            (true, false) => LoadKnowledge::Late,
            (false, _) => LoadKnowledge::Partial,
        }
    }
}

impl UsageSender {
    /// Name of the agent or activator.
    pub(super) fn name(&self) -> &str {
        &self.replica.name
    }

    /// Returns true if the stream is open and has completed its snapshot.
    fn is_synced(&self) -> bool {
        self.is_online && self.stream.synced
    }

    /// Returns true if the stream is synced, is not silent, and has not been silent a moment ago.
    pub(super) fn is_current(&self, now: Duration) -> bool {
        self.is_synced()
            && now < self.last_heard_at + REPORT_OVERDUE_AFTER
            && !self.is_settling(now)
    }

    /// Returns true if the stream has been silent, and reports may still show what happened meanwhile. Its first
    /// message may be an empty one, which was sent before those reports.
    fn is_settling(&self, now: Duration) -> bool {
        self.silence_ended_at.is_some_and(|at| now < at + REPORT_OVERDUE_AFTER)
    }
}
