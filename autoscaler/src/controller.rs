//! Shell: the controller's side: routes in, decisions out, and the clock.
//!
//! News is decided in the task that receives it, under one lock held for microseconds; nothing is queued
//! between a waiting request and the decision that wakes its revision.

use std::{
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use common::{
    link::{Link, RouteBatch},
    outbox::Outbox,
    wire::{Alive, Decision, Name, Part, Role, RouteChange, RouteItem, RouteKey, RouteView},
};
use tokio::{
    sync::{Notify, watch},
    time::{Instant, MissedTickBehavior},
};
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::{
    fleet::{Fleet, Step},
    heart::{BEAT, Heart},
};

/// All revisions, the clock they are evaluated by, and what is said of them.
#[derive(Debug)]
pub struct Brain {
    fleet: Mutex<Fleet>,
    outbox: Outbox<Name, Decision>,
    start: Instant,
    heart: Mutex<Heart>,
    alive: watch::Sender<Alive>,
    /// Told when something may be due earlier than the timer knows.
    sooner: Notify,
    decisions: AtomicU64,
    usage: AtomicU64,
}

impl Brain {
    /// No revisions; load is evaluated every `tick`. `since_ms`: now, in ms since 1970.
    pub fn new(tick: Duration, since_ms: u64) -> Self {
        let mut heart = Heart::new(Duration::ZERO, since_ms);
        let first = heart.beat(Duration::ZERO, Duration::MAX, 0);
        Self {
            fleet: Mutex::new(Fleet::new(tick)),
            outbox: Outbox::new(),
            start: Instant::now(),
            heart: Mutex::new(heart),
            alive: watch::Sender::new(first),
            sooner: Notify::new(),
            decisions: AtomicU64::new(0),
            usage: AtomicU64::new(0),
        }
    }

    /// Decisions, latest by revision.
    pub fn outbox(&self) -> &Outbox<Name, Decision> {
        &self.outbox
    }

    /// The latest heartbeat.
    pub fn alive(&self) -> watch::Receiver<Alive> {
        self.alive.subscribe()
    }

    /// Says that this autoscaler lives, again and again, until `shutdown`.
    pub async fn beat(&self, shutdown: &CancellationToken) {
        let mut beats = tokio::time::interval(BEAT);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while shutdown.run_until_cancelled(beats.tick()).await.is_some() {
            let (longest, reporters) = self.look(|fleet| {
                let all = fleet.revisions().map(|(_, it)| &it.policy);
                let longest = all.map(|it| it.stable_window + it.scale_down_delay).max();
                let reporters = fleet.online(Role::Agent) + fleet.online(Role::Activator);
                (longest.unwrap_or_default(), reporters)
            });
            let now = self.start.elapsed();
            self.alive.send_replace(self.heart().beat(now, longest, reporters));
        }
    }

    fn heart(&self) -> MutexGuard<'_, Heart> {
        self.heart.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Decisions sent since the start.
    pub fn decisions(&self) -> u64 {
        self.decisions.load(Ordering::Relaxed)
    }

    /// Usage items received since the start.
    pub fn usage(&self) -> &AtomicU64 {
        &self.usage
    }

    /// Looks at the revisions.
    pub fn look<T>(&self, look: impl FnOnce(&Fleet) -> T) -> T {
        look(&self.fleet.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Tells the revisions news, and sends what is decided thereupon.
    pub fn tell<T>(&self, news: impl FnOnce(&mut Fleet, Duration) -> T) -> T {
        // Every change leaves the fleet whole, so a panic elsewhere does not spoil it.
        let mut fleet = self.fleet.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.start.elapsed();
        let before = fleet.next_due();
        let answer = news(&mut fleet, now);
        let steps = fleet.run(now);
        steps.into_iter().for_each(|step| self.send(step));
        if fleet.next_due() < before || before.is_none() {
            self.sooner.notify_one();
        }
        answer
    }

    /// Sends one step, in order, since the fleet is locked.
    pub fn send(&self, step: Step) {
        match step {
            Step::Gone(name) => self.outbox.remove(&name),
            Step::Decided(it) => {
                self.decisions.fetch_add(1, Ordering::Relaxed);
                log(&it);
                self.outbox.set(it.revision.clone(), *it);
            }
        }
    }

    /// Evaluates revisions when they are due, until `shutdown`.
    pub async fn keep_time(&self, shutdown: &CancellationToken) {
        while !shutdown.is_cancelled() {
            let due = self.look(Fleet::next_due).map(|due| self.start + due);
            let timer = async {
                match due {
                    Some(due) => tokio::time::sleep_until(due).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = timer => self.tell(|_, _| ()),
                () = self.sooner.notified() => {}
                () = shutdown.cancelled() => {}
            }
        }
    }
}

/// Says in one line what is decided, and from what.
fn log(it: &Decision) {
    let inputs = it.inputs.as_ref();
    info!(
        revision = %it.revision, wanted = it.wanted, path = ?it.path, activity = ?it.activity,
        reason = it.reason, bound = inputs.map(|it| it.bound.as_str()),
        by_load = inputs.and_then(|it| it.by_load), in_flight = inputs.map(|it| it.in_flight),
        waiting = inputs.map(|it| it.waiting), stable = it.stable, panic = it.panic,
        stable_window_s = inputs.map(|it| it.stable_window.as_secs()),
        panic_window_s = inputs.map(|it| it.panic_window.as_secs()), target = it.target,
        ready = it.ready_pods, panicking = it.panicking, capacity = it.excess_burst_capacity,
        min_scale = inputs.map(|it| it.min_scale), max_scale = inputs.map(|it| it.max_scale),
        sight = inputs.map(|it| tracing::field::debug(it.sight)), "scale decided"
    );
}

/// Follows the RouteTable until the link is shut down.
pub async fn follow(link: &Link, brain: &Brain) {
    link.watch_batches(|RouteBatch { version, is_whole, changes }| {
        if let Some(RouteChange::Replicas(it)) = changes.get(&RouteKey::Replicas(Part::Autoscaler))
        {
            brain.heart().told(it.chosen.as_deref());
        }
        // The fleet keeps what it needs of each subject; the rest of the table is let go.
        let mut view = RouteView::default();
        let items = changes.into_values().chain([RouteChange::Synced]);
        let changed = items.map(|change| view.absorb(RouteItem { version, change })).last();
        let mut changed = changed.flatten().unwrap_or_default();
        brain.tell(|fleet, now| {
            if is_whole {
                // What a whole table does not name is gone.
                changed.extend(fleet.keys());
            }
            let gone = fleet.routes(now, &view.table, &changed);
            gone.into_iter().for_each(|step| brain.send(step));
        });
    })
    .await;
}
