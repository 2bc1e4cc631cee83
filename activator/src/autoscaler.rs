//! Shell: tells the autoscaler how many requests wait here, and of pods those that no kernel can count.
//!
//! A new waiting request is reported at once; everything else once a second. While nothing changes nothing
//! is said.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, atomic::Ordering},
    time::Duration,
};

use common::{
    link::Link,
    outbox::Outbox,
    wire::{Name, UsageKey, UsageSeen},
};
use tokio::{sync::Notify, time::MissedTickBehavior};

use crate::revision::Revision;

/// The rest is reported this often (Knative: every second).
const PERIOD: Duration = Duration::from_secs(1);
/// Between two reports at once, so that a flood of requests is told in groups.
const GAP: Duration = Duration::from_millis(1);

/// Which revisions have something to report.
#[derive(Debug, Default)]
pub struct Usage {
    changed: Mutex<HashMap<Name, Arc<Revision>>>,
    urgent: Notify,
    outbox: Outbox<UsageKey, UsageSeen>,
}

impl Usage {
    /// A request has begun to wait.
    pub fn waiting(&self, revision: &Arc<Revision>) {
        self.changed(revision);
        self.urgent.notify_one();
    }

    /// The revision's totals have changed.
    pub fn changed(&self, revision: &Arc<Revision>) {
        if revision.enter_report() {
            let mut changed = self.changed.lock().unwrap_or_else(PoisonError::into_inner);
            changed.insert(revision.name.clone(), Arc::clone(revision));
        }
    }

    /// The revision is no more.
    pub fn gone(&self, revision: &Name) {
        self.changed.lock().unwrap_or_else(PoisonError::into_inner).remove(revision);
        self.outbox.remove(&key(revision.clone()));
    }

    /// Reports over `link` until it is shut down.
    pub async fn report(&self, link: &Link) {
        tokio::select! {
            () = self.collect() => {}
            () = link.report_usage(&self.outbox) => {}
        }
    }

    async fn collect(&self) {
        let mut tick = tokio::time::interval(PERIOD);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = self.urgent.notified() => {
                    self.tell();
                    tokio::time::sleep(GAP).await;
                }
                _ = tick.tick() => self.tell(),
            }
        }
    }

    fn tell(&self) {
        let changed = {
            let mut changed = self.changed.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::take(&mut *changed)
        };
        for revision in changed.into_values() {
            // Cleared before the totals are read: a change after that enters the list anew.
            revision.in_report.store(false, Ordering::Release);
            let (totals, at_ns) = revision.totals();
            let key = key(revision.name.clone());
            let (status, latency) = (Vec::new(), Vec::new());
            self.outbox.set(key.clone(), UsageSeen { key, at_ns, totals, status, latency });
        }
    }
}

/// An activator counts what waits with it, which is no pod's.
fn key(revision: Name) -> UsageKey {
    UsageKey { revision, pod: None }
}
