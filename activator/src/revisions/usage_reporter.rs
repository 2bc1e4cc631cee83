//! Shell: reports of requests that wait here, sent to the autoscaler.
//!
//! The start of a request's waiting is reported at once, all else once a second. Nothing is reported while nothing
//! changes.

use std::{
    collections::HashMap,
    fmt,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use common::{
    link::ComponentLink,
    outbox::Outbox,
    wire::{NamespacedName, RequestTotals, UsageKey, UsageSample},
};
use tokio::{sync::Notify, time::MissedTickBehavior};

/// Interval of the regular reports (Knative: every second).
const REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// Minimum time between two immediate reports, so that many requests share one.
const MIN_REPORT_GAP: Duration = Duration::from_millis(1);

/// Revision whose waiting requests are reported.
pub trait QueueUsageSource: fmt::Debug + Send + Sync {
    /// Name and namespace of the Revision.
    fn name(&self) -> &NamespacedName;

    /// Registers that the Revision is in the list of changed ones. Returns true if it was not in it before.
    fn mark_report_pending(&self) -> bool;

    /// Takes the Revision out of the list, then reads its totals, with the time in ns of
    /// [`now_ns`](crate::clock::now_ns).
    fn take_report(&self) -> (RequestTotals, u64);

    /// Address of the client whose request began to wait first; `None`: no request waits, or it is not known.
    fn first_client(&self) -> Option<IpAddr>;
}

/// Revisions whose usage is still to be reported.
#[derive(Debug, Default)]
pub struct QueueUsageReporter {
    changed_revisions: Mutex<HashMap<NamespacedName, Arc<dyn QueueUsageSource>>>,
    report_now: Notify,
    outbox: Outbox<UsageKey, UsageSample>,
}

impl QueueUsageReporter {
    /// Registers that a request has begun to wait, and reports it at once.
    pub fn report_waiting(&self, revision: &Arc<impl QueueUsageSource + 'static>) {
        self.mark_changed(revision);
        self.report_now.notify_one();
    }

    /// Registers a change of the Revision's totals.
    pub fn mark_changed(&self, revision: &Arc<impl QueueUsageSource + 'static>) {
        if revision.mark_report_pending() {
            let mut changed = self.changed_revisions.lock().unwrap_or_else(PoisonError::into_inner);
            changed.insert(revision.name().clone(), Arc::clone(revision) as _);
        }
    }

    /// Drops the reports of a Revision that does not exist any more.
    pub fn remove_revision(&self, revision: &NamespacedName) {
        self.changed_revisions.lock().unwrap_or_else(PoisonError::into_inner).remove(revision);
        self.outbox.remove(&usage_key(revision.clone()));
    }

    /// Sends reports over `link` until the link is shut down.
    pub async fn run(&self, link: &ComponentLink) {
        tokio::select! {
            () = self.collect_reports() => {}
            () = link.report_usage(&self.outbox) => {}
        }
    }

    async fn collect_reports(&self) {
        let mut tick = tokio::time::interval(REPORT_INTERVAL);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = self.report_now.notified() => {
                    self.publish_reports();
                    tokio::time::sleep(MIN_REPORT_GAP).await;
                }
                _ = tick.tick() => self.publish_reports(),
            }
        }
    }

    fn publish_reports(&self) {
        let changed = {
            let mut changed = self.changed_revisions.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::take(&mut *changed)
        };
        for revision in changed.into_values() {
            let (totals, read_at_ns) = revision.take_report();
            let key = usage_key(revision.name().clone());
            let (status, latency) = (Vec::new(), Vec::new());
            let client = revision.first_client();
            let sample = UsageSample { key, read_at_ns, totals, status, latency, client };
            self.outbox.set(sample.key.clone(), sample);
        }
    }
}

/// Key of the requests that wait at this activator, which belong to no pod.
fn usage_key(revision: NamespacedName) -> UsageKey {
    UsageKey { revision, pod: None }
}
