//! Shell: connection to the controller: routes in, decisions out, and the clock.
//!
//! The task that receives a report also decides on it, under one lock held for microseconds. No queue lies between a
//! waiting request and the decision that wakes its Revision.

use std::{
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use common::{
    link::{ComponentLink, RouteBatch},
    outbox::Outbox,
    wire::{
        AutoscalerHeartbeat, ClientComponent, NamespacedName, RouteChange, RouteItem, RouteKey,
        RouteView, ScaleDecision, ServerComponent,
    },
};
use tokio::{
    sync::{Notify, watch},
    time::{Instant, MissedTickBehavior},
};
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::{
    heartbeat::{HEARTBEAT_INTERVAL, HeartbeatState},
    revisions::{DecisionUpdate, ScaledRevisions},
};

/// All Revisions, the clock of their evaluation, and the outgoing decisions and heartbeats.
#[derive(Debug)]
pub struct ScaleEvaluator {
    revisions: Mutex<ScaledRevisions>,
    outbox: Outbox<NamespacedName, ScaleDecision>,
    started_at: Instant,
    heartbeat_state: Mutex<HeartbeatState>,
    latest_heartbeat: watch::Sender<AutoscalerHeartbeat>,
    /// Notified when an evaluation may be due earlier than the timer's deadline.
    due_earlier: Notify,
    decisions_sent: AtomicU64,
    usage_items: AtomicU64,
}

impl ScaleEvaluator {
    /// An empty state; load is evaluated every `tick`. `since_ms` is the current time in milliseconds since 1970.
    pub fn new(tick: Duration, since_ms: u64) -> Self {
        let mut heartbeat_state = HeartbeatState::new(Duration::ZERO, since_ms);
        let first = heartbeat_state.next_heartbeat(Duration::ZERO, Duration::ZERO, 0);
        Self {
            revisions: Mutex::new(ScaledRevisions::new(tick)),
            outbox: Outbox::new(),
            started_at: Instant::now(),
            heartbeat_state: Mutex::new(heartbeat_state),
            latest_heartbeat: watch::Sender::new(first),
            due_earlier: Notify::new(),
            decisions_sent: AtomicU64::new(0),
            usage_items: AtomicU64::new(0),
        }
    }

    /// Latest decision of each Revision, for the streams to the controllers.
    pub fn outbox(&self) -> &Outbox<NamespacedName, ScaleDecision> {
        &self.outbox
    }

    /// Receiver of the latest heartbeat.
    pub fn subscribe_heartbeats(&self) -> watch::Receiver<AutoscalerHeartbeat> {
        self.latest_heartbeat.subscribe()
    }

    /// Sends heartbeats every [`HEARTBEAT_INTERVAL`] until `shutdown`.
    pub async fn send_heartbeats(&self, shutdown: &CancellationToken) {
        let mut beats = tokio::time::interval(HEARTBEAT_INTERVAL);
        // After a stall, heartbeats continue at their interval: a burst of late ones would carry no information.
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while shutdown.run_until_cancelled(beats.tick()).await.is_some() {
            // Locked before the read: if the first table were recorded between the two, the heartbeat would claim full
            // windows by the lookback of no Revision.
            let mut heartbeat_state = self.lock_heartbeat_state();
            let (longest_lookback, reporters) = self.read(|revisions| {
                let reporters = revisions.online_senders(ClientComponent::Agent)
                    + revisions.online_senders(ClientComponent::Activator);
                (revisions.longest_lookback(), reporters)
            });
            let now = self.started_at.elapsed();
            let heartbeat = heartbeat_state.next_heartbeat(now, longest_lookback, reporters);
            self.latest_heartbeat.send_replace(heartbeat);
        }
    }

    fn lock_heartbeat_state(&self) -> MutexGuard<'_, HeartbeatState> {
        self.heartbeat_state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of decisions sent since the start.
    pub fn decisions_sent(&self) -> u64 {
        self.decisions_sent.load(Ordering::Relaxed)
    }

    /// Counter of usage items received since the start.
    pub fn usage_items(&self) -> &AtomicU64 {
        &self.usage_items
    }

    /// Runs `reader` with read access to all Revisions.
    pub fn read<T>(&self, reader: impl FnOnce(&ScaledRevisions) -> T) -> T {
        reader(&self.revisions.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Applies `change` to the Revisions, evaluates what is due, and sends the resulting decisions.
    pub fn update<T>(&self, change: impl FnOnce(&mut ScaledRevisions, Duration) -> T) -> T {
        // Every change leaves the Revisions consistent, so a lock poisoned by a panic elsewhere is safe to use.
        let mut revisions = self.revisions.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.started_at.elapsed();
        let previous_due = revisions.next_due();
        let result = change(&mut revisions, now);
        let updates = revisions.evaluate_due(now);
        updates.into_iter().for_each(|update| self.send_update(update));
        // The timer sleeps until the deadline that it has read, so it must be woken for an earlier one.
        if revisions.next_due() < previous_due || previous_due.is_none() {
            self.due_earlier.notify_one();
        }
        result
    }

    /// Sends one update to the outbox. The caller holds the lock of the Revisions, so updates stay in order.
    pub fn send_update(&self, update: DecisionUpdate) {
        match update {
            DecisionUpdate::Withdrawn(name) => self.outbox.remove(&name),
            DecisionUpdate::Decided(decision) => {
                self.decisions_sent.fetch_add(1, Ordering::Relaxed);
                log_decision(&decision);
                self.outbox.set(decision.revision.clone(), *decision);
            }
        }
    }

    /// Evaluates Revisions when they are due, until `shutdown`.
    pub async fn run_timer(&self, shutdown: &CancellationToken) {
        while !shutdown.is_cancelled() {
            let due = self.read(ScaledRevisions::next_due).map(|due| self.started_at + due);
            let timer = async {
                match due {
                    Some(due) => tokio::time::sleep_until(due).await,
                    None => std::future::pending().await,
                }
            };
            // `due_earlier` keeps a notification that comes between the read above and this wait.
            tokio::select! {
                () = timer => self.update(|_, _| ()),
                () = self.due_earlier.notified() => {}
                () = shutdown.cancelled() => {}
            }
        }
    }
}

/// Logs a decision and its inputs in one line.
fn log_decision(decision: &ScaleDecision) {
    let inputs = decision.inputs.as_ref();
    info!(
        revision = %decision.revision, wanted = decision.requested_scale,
        path = ?decision.connection_path, activity = ?decision.activity,
        reason = decision.reason, bound = inputs.map(|inputs| inputs.applied_bound.as_str()),
        by_load = inputs.and_then(|inputs| inputs.desired_by_load), in_flight = inputs.map(|inputs| inputs.in_flight),
        waiting = inputs.map(|inputs| inputs.waiting), stable = decision.stable_load, panic = decision.panic_load,
        stable_window_s = inputs.map(|inputs| inputs.stable_window.as_secs()),
        panic_window_s = inputs.map(|inputs| inputs.panic_window.as_secs()), target = decision.target_load,
        ready = decision.ready_pods, panicking = decision.is_panicking, capacity = decision.excess_burst_capacity,
        min_scale = inputs.map(|inputs| inputs.min_scale), max_scale = inputs.map(|inputs| inputs.max_scale),
        sight = inputs.map(|inputs| tracing::field::debug(inputs.coverage)), "scale decided"
    );
}

/// Applies the RouteTable's batches until the link is shut down.
pub async fn apply_route_batches(link: &ComponentLink, evaluator: &ScaleEvaluator) {
    link.watch_batches(|RouteBatch { version, is_snapshot, changes, .. }| {
        if let Some(RouteChange::Replicas(replicas)) =
            changes.get(&RouteKey::Replicas(ServerComponent::Autoscaler))
        {
            evaluator.lock_heartbeat_state().set_active(replicas.active.as_deref());
        }
        // `ScaledRevisions` copies what it needs of each subject; the rest of the table is dropped.
        let mut view = RouteView::default();
        let items = changes.into_values().chain([RouteChange::Synced]);
        let changed = items.map(|change| view.apply_item(RouteItem { version, change })).last();
        let mut changed = changed.flatten().unwrap_or_default();
        evaluator.update(|revisions, now| {
            if is_snapshot {
                // Subjects that a snapshot does not name are removed.
                changed.extend(revisions.stored_keys());
            }
            let updates = revisions.apply_routes(now, &view.table, &changed);
            updates.into_iter().for_each(|update| evaluator.send_update(update));
        });
        // After the update: the longest lookback is that of the Revisions of this table.
        evaluator.lock_heartbeat_state().record_table();
    })
    .await;
}
