//! Shell: standby watch of one pod, shared by the tasks of its requests.
//!
//! Any task may pass in events of the pod. One task at a time performs the actions that follow from them.

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

/// Standby watch of one pod behind a lock, with the actions that a task is to perform.
#[derive(Debug, Default)]
pub struct SharedStandbyWatch {
    /// True while the pod has a standby order. Requests to other pods need no lock.
    has_order: AtomicBool,
    state: Mutex<SharedWatchState>,
    /// Notifies the task that performs the actions.
    changed: Notify,
}

#[derive(Debug, Default)]
struct SharedWatchState {
    watch: StandbyWatch,
    /// Actions that no task has taken yet.
    actions: VecDeque<StandbyWatchAction>,
    /// True while a task performs the actions.
    has_task: bool,
}

impl SharedStandbyWatch {
    /// Sets the timeout of the pod's standby order; `None`: the pod has none, or is gone.
    pub fn set_order(&self, timeout: Option<Duration>) {
        let had_order = self.has_order.swap(timeout.is_some(), Ordering::Relaxed);
        // Nearly no pod ever has an order.
        if had_order || timeout.is_some() {
            self.handle_event(StandbyWatchEvent::Ordered(timeout));
        }
    }

    /// Records that a request is sent to the pod. Returns true if the caller must start a task that performs the
    /// [actions](Self::next_action).
    pub fn start_use(&self) -> bool {
        if !self.has_order.load(Ordering::Relaxed) {
            return false;
        }
        self.handle_event(StandbyWatchEvent::Used);
        let mut state = self.lock();
        // Decided under the lock under which `next_action` ends a task, so that there is never none and never two.
        let needs_task = state.watch.is_active() && !state.has_task;
        state.has_task |= needs_task;
        needs_task
    }

    /// Returns true while requests should go elsewhere.
    pub fn is_passed_over(&self) -> bool {
        self.has_order.load(Ordering::Relaxed) && self.lock().watch.is_passed_over()
    }

    /// Records that bytes of the pod have come.
    pub fn record_answer(&self) {
        if self.has_order.load(Ordering::Relaxed) {
            self.handle_event(StandbyWatchEvent::Answered);
        }
    }

    /// Starts a thaw query of the agent of the pod at this address, in a task of its own.
    pub fn start_query(self: &Arc<Self>, pod: IpAddr, number: u64) {
        let watch = Arc::clone(self);
        tokio::spawn(async move {
            let on_reached = || watch.handle_event(StandbyWatchEvent::QueryReached(number));
            let end = thaw_query::query_agent(pod, on_reached).await;
            debug!(%pod, ?end, "agent of a pod on standby asked");
            watch.handle_event(StandbyWatchEvent::QueryEnded(number, end));
        });
    }

    /// Waits for the next action; `None`: nothing is awaited any more, and the task of the actions ends.
    pub async fn next_action(&self) -> Option<StandbyWatchAction> {
        loop {
            let wake = {
                let mut state = self.lock();
                state.step(StandbyWatchEvent::Tick);
                if let Some(action) = state.actions.pop_front() {
                    return Some(action);
                }
                if !state.watch.is_active() {
                    state.has_task = false;
                    return None;
                }
                state.watch.next_wake()
            };
            // An event that came after the lock was released has left its notification.
            match wake {
                Some(at) => tokio::select! {
                    () = self.changed.notified() => {}
                    () = sleep_until(at.into()) => {}
                },
                None => self.changed.notified().await,
            }
        }
    }

    /// Passes an event to the watch, and wakes the task of the actions.
    fn handle_event(&self, event: StandbyWatchEvent) {
        self.lock().step(event);
        self.changed.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, SharedWatchState> {
        // A panic elsewhere cannot leave a watch inconsistent: each step under the lock completes.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SharedWatchState {
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
        let watch = Arc::new(SharedStandbyWatch::default());
        assert!(!watch.start_use(), "it has no order");
        watch.set_order(Some(TIMEOUT));
        assert!(watch.start_use());
        assert!(!watch.start_use(), "it has a task");
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
        let watch = Arc::new(SharedStandbyWatch::default());
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
