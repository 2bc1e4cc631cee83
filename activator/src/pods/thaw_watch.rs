//! Shell: check of one pod with a standby order: its agent has thawed it for the requests that were sent to it.
//!
//! Events of the pod may come from any task, and one task at a time performs the actions that follow from them.

use std::{
    collections::VecDeque,
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use common::{
    standby_watch::{StandbyWatch, StandbyWatchAction, StandbyWatchEvent},
    thaw_query,
};
use tokio::{sync::Notify, time::sleep_until};
use tracing::debug;

/// Watch of one pod.
#[derive(Debug, Default)]
pub struct ThawWatch {
    /// True while the pod has a standby order. Requests to other pods need no lock.
    has_order: AtomicBool,
    state: Mutex<ThawWatchState>,
    /// Notifies the follower of a change.
    changed: Notify,
}

#[derive(Debug, Default)]
struct ThawWatchState {
    watch: StandbyWatch,
    /// Actions that the follower has not taken yet.
    actions: VecDeque<StandbyWatchAction>,
    /// True while a task takes the actions.
    is_followed: bool,
}

impl ThawWatch {
    /// Sets the timeout of the pod's standby order; `None`: the pod has none, or is gone.
    pub fn set_order(&self, timeout: Option<Duration>) {
        let had_order = self.has_order.swap(timeout.is_some(), Ordering::Relaxed);
        // Nearly no pod ever has an order.
        if had_order || timeout.is_some() {
            self.pass(StandbyWatchEvent::Ordered(timeout));
        }
    }

    /// Records that a request is sent to the pod. Returns true if the caller must let a task
    /// [take the actions](Self::next_action).
    pub fn start_use(&self) -> bool {
        if !self.has_order.load(Ordering::Relaxed) {
            return false;
        }
        self.pass(StandbyWatchEvent::Used);
        let mut state = self.lock();
        let needs_follower = state.watch.is_active() && !state.is_followed;
        state.is_followed |= needs_follower;
        needs_follower
    }

    /// Returns true while requests should go elsewhere.
    pub fn is_passed_over(&self) -> bool {
        self.has_order.load(Ordering::Relaxed) && self.lock().watch.is_passed_over()
    }

    /// Records that bytes of the pod have come.
    pub fn record_answer(&self) {
        if self.has_order.load(Ordering::Relaxed) {
            self.pass(StandbyWatchEvent::Answered);
        }
    }

    /// Asks the agent of the pod at this address if the pod runs, in a task of its own.
    pub fn start_query(self: &Arc<Self>, pod: IpAddr, number: u64) {
        let watch = Arc::clone(self);
        tokio::spawn(async move {
            let on_reached = || watch.pass(StandbyWatchEvent::QueryReached(number));
            let end = thaw_query::query_agent(pod, on_reached).await;
            debug!(%pod, ?end, "agent of a pod on standby asked");
            watch.pass(StandbyWatchEvent::QueryEnded(number, end));
        });
    }

    /// Waits for the next action. `None`: nothing is awaited any more, and the task that follows ends.
    pub async fn next_action(&self) -> Option<StandbyWatchAction> {
        loop {
            let wake = {
                let mut state = self.lock();
                state.step(StandbyWatchEvent::Tick);
                if let Some(action) = state.actions.pop_front() {
                    return Some(action);
                }
                if !state.watch.is_active() {
                    state.is_followed = false;
                    return None;
                }
                state.watch.next_wake()
            };
            // A change since then has left its notification.
            match wake {
                Some(at) => tokio::select! {
                    () = self.changed.notified() => {}
                    () = sleep_until(at.into()) => {}
                },
                None => self.changed.notified().await,
            }
        }
    }

    fn pass(&self, event: StandbyWatchEvent) {
        self.lock().step(event);
        self.changed.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, ThawWatchState> {
        // A panic elsewhere cannot leave a watch inconsistent: each step under the lock completes.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ThawWatchState {
    fn step(&mut self, event: StandbyWatchEvent) {
        self.actions.extend(self.watch.step(Instant::now(), event));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_millis(20);

    #[tokio::test]
    async fn a_pod_is_followed_by_one_task_until_nothing_is_awaited() {
        let watch = Arc::new(ThawWatch::default());
        assert!(!watch.start_use(), "it has no order");
        watch.set_order(Some(TIMEOUT));
        assert!(watch.start_use());
        assert!(!watch.start_use(), "it is followed");
        let mut passed_over = 0;
        while let Some(action) = watch.next_action().await {
            match action {
                // No agent serves there.
                StandbyWatchAction::Query(number) => {
                    watch.start_query([127, 80, 21, 1].into(), number);
                }
                StandbyWatchAction::PassOver => {
                    passed_over += 1;
                    watch.record_answer();
                }
                StandbyWatchAction::UseAgain => assert_eq!(passed_over, 1),
            }
        }
        assert_eq!(passed_over, 1);
        // A use while the pod is known to run is checked later.
        assert!(watch.start_use());
        watch.set_order(None);
        assert_eq!(watch.next_action().await, None);
        assert!(!watch.start_use());
    }

    /// The action of a pod that leaves the table must not be lost, or its requests would be withheld for good.
    #[tokio::test]
    async fn a_pod_that_loses_its_order_while_it_is_passed_over_is_used_again() {
        let watch = Arc::new(ThawWatch::default());
        watch.set_order(Some(TIMEOUT));
        assert!(watch.start_use());
        let mut actions = Vec::new();
        while let Some(action) = watch.next_action().await {
            match action {
                // No agent serves there. Only the end of a query shows that, so a pod is not passed over before.
                StandbyWatchAction::Query(number) => {
                    watch.start_query([127, 80, 21, 3].into(), number);
                    continue;
                }
                StandbyWatchAction::PassOver => watch.set_order(None),
                StandbyWatchAction::UseAgain => {}
            }
            actions.push(action);
        }
        assert_eq!(actions, [StandbyWatchAction::PassOver, StandbyWatchAction::UseAgain]);
    }
}
