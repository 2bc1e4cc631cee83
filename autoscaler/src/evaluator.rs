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
        AutoscalerHeartbeat, ComponentRole, NamespacedName, RouteChange, RouteItem, RouteKey,
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
    heartbeat: Mutex<HeartbeatState>,
    heartbeats: watch::Sender<AutoscalerHeartbeat>,
    /// Notified when an evaluation may be due earlier than the timer's deadline.
    due_earlier: Notify,
    decisions_sent: AtomicU64,
    usage_items: AtomicU64,
}

impl ScaleEvaluator {
    /// An empty state; load is evaluated every `tick`. `since_ms` is the current time in milliseconds since 1970.
    pub fn new(tick: Duration, since_ms: u64) -> Self {
        let mut heart = HeartbeatState::new(Duration::ZERO, since_ms);
        let first = heart.next_heartbeat(Duration::ZERO, Duration::MAX, 0);
        Self {
            revisions: Mutex::new(ScaledRevisions::new(tick)),
            outbox: Outbox::new(),
            started_at: Instant::now(),
            heartbeat: Mutex::new(heart),
            heartbeats: watch::Sender::new(first),
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
        self.heartbeats.subscribe()
    }

    /// Sends heartbeats every [`HEARTBEAT_INTERVAL`] until `shutdown`.
    pub async fn send_heartbeats(&self, shutdown: &CancellationToken) {
        let mut beats = tokio::time::interval(HEARTBEAT_INTERVAL);
        // After a stall, heartbeats continue at their interval: a burst of late ones would carry no information.
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while shutdown.run_until_cancelled(beats.tick()).await.is_some() {
            let (longest, reporters) = self.read(|fleet| {
                let all = fleet.revisions().map(|(_, it)| &it.policy);
                let longest = all.map(|it| it.stable_window + it.scale_down_delay).max();
                let reporters = fleet.online_senders(ComponentRole::Agent)
                    + fleet.online_senders(ComponentRole::Activator);
                (longest.unwrap_or_default(), reporters)
            });
            let now = self.started_at.elapsed();
            self.heartbeats
                .send_replace(self.lock_heartbeat().next_heartbeat(now, longest, reporters));
        }
    }

    fn lock_heartbeat(&self) -> MutexGuard<'_, HeartbeatState> {
        self.heartbeat.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of decisions sent since the start.
    pub fn decisions_sent(&self) -> u64 {
        self.decisions_sent.load(Ordering::Relaxed)
    }

    /// Counter of usage items received since the start.
    pub fn usage_items(&self) -> &AtomicU64 {
        &self.usage_items
    }

    /// Runs `look` with read access to the fleet.
    pub fn read<T>(&self, look: impl FnOnce(&ScaledRevisions) -> T) -> T {
        look(&self.revisions.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Applies `news` to the fleet, evaluates what is due, and sends the resulting decisions.
    pub fn update<T>(&self, news: impl FnOnce(&mut ScaledRevisions, Duration) -> T) -> T {
        // Every change leaves the fleet consistent, so a lock poisoned by a panic elsewhere is safe to use.
        let mut fleet = self.revisions.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.started_at.elapsed();
        let before = fleet.next_due();
        let answer = news(&mut fleet, now);
        let steps = fleet.evaluate_due(now);
        steps.into_iter().for_each(|step| self.send_update(step));
        // The timer sleeps until the deadline that it has read, so it must be woken for an earlier one.
        if fleet.next_due() < before || before.is_none() {
            self.due_earlier.notify_one();
        }
        answer
    }

    /// Sends one step to the outbox. The caller holds the fleet's lock, so steps stay in order.
    pub fn send_update(&self, step: DecisionUpdate) {
        match step {
            DecisionUpdate::Withdrawn(name) => self.outbox.remove(&name),
            DecisionUpdate::Decided(it) => {
                self.decisions_sent.fetch_add(1, Ordering::Relaxed);
                log_decision(&it);
                self.outbox.set(it.revision.clone(), *it);
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
            tokio::select! {
                () = timer => self.update(|_, _| ()),
                () = self.due_earlier.notified() => {}
                () = shutdown.cancelled() => {}
            }
        }
    }
}

/// Logs a decision and its inputs in one line.
fn log_decision(it: &ScaleDecision) {
    let inputs = it.inputs.as_ref();
    info!(
        revision = %it.revision, wanted = it.desired_scale, path = ?it.connection_path, activity = ?it.activity,
        reason = it.reason, bound = inputs.map(|it| it.applied_bound.as_str()),
        by_load = inputs.and_then(|it| it.desired_by_load), in_flight = inputs.map(|it| it.in_flight),
        waiting = inputs.map(|it| it.waiting), stable = it.stable_load, panic = it.panic_load,
        stable_window_s = inputs.map(|it| it.stable_window.as_secs()),
        panic_window_s = inputs.map(|it| it.panic_window.as_secs()), target = it.target_load,
        ready = it.ready_pods, panicking = it.is_panicking, capacity = it.excess_burst_capacity,
        min_scale = inputs.map(|it| it.min_scale), max_scale = inputs.map(|it| it.max_scale),
        sight = inputs.map(|it| tracing::field::debug(it.coverage)), "scale decided"
    );
}

/// Applies the RouteTable's batches until the link is shut down.
pub async fn apply_route_batches(link: &ComponentLink, brain: &ScaleEvaluator) {
    link.watch_batches(|RouteBatch { version, is_whole, changes }| {
        if let Some(RouteChange::Replicas(it)) =
            changes.get(&RouteKey::Replicas(ServerComponent::Autoscaler))
        {
            brain.lock_heartbeat().set_active(it.active.as_deref());
        }
        // The fleet copies what it needs of each subject; the rest of the table is dropped.
        let mut view = RouteView::default();
        let items = changes.into_values().chain([RouteChange::Synced]);
        let changed = items.map(|change| view.apply_item(RouteItem { version, change })).last();
        let mut changed = changed.flatten().unwrap_or_default();
        brain.update(|fleet, now| {
            if is_whole {
                // Subjects that a snapshot does not name are removed.
                changed.extend(fleet.stored_keys());
            }
            let gone = fleet.apply_routes(now, &view.table, &changed);
            gone.into_iter().for_each(|step| brain.send_update(step));
        });
    })
    .await;
}
