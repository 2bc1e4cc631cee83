//! Shell: counts the upgraded connections of draining pods.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
    time::Instant,
};

use common::link::error_chain;
use tokio::{
    sync::{Semaphore, mpsc::Sender},
    task::spawn_blocking,
};
use tracing::debug;

use crate::{
    kernel::maps::connection_storage::ConnectionStorage,
    lock::lock,
    net::sockdiag::SockDiag,
    pods::{
        finder::{FinderCommand, request_namespace},
        types::PodTrackerEvent,
    },
};

/// Counts that run at a time. Each one has a thread, and its pod sets how many sockets it lists.
const COUNTS_AT_ONCE: usize = 4;

/// Counts of the upgraded connections of draining pods, one of each pod at a time.
#[derive(Debug)]
pub(crate) struct UpgradedCounts {
    finder: Sender<FinderCommand>,
    conns: ConnectionStorage,
    /// Channel of the results, like those of probes.
    events: Sender<PodTrackerEvent>,
    tasks: PodTasks,
}

impl UpgradedCounts {
    /// Makes counts that send their results to `events`.
    pub(crate) fn new(
        finder: Sender<FinderCommand>,
        conns: ConnectionStorage,
        events: Sender<PodTrackerEvent>,
    ) -> Self {
        Self { finder, conns, events, tasks: PodTasks::new(COUNTS_AT_ONCE) }
    }

    /// Counts the upgraded connections in a pod's namespace, in a task of its own. Has no effect while the last count of the
    /// pod is under way.
    pub(crate) fn start(&self, uid: String, cookie: u64) {
        let (finder, conns, events) =
            (self.finder.clone(), self.conns.clone(), self.events.clone());
        self.tasks.start(uid.clone(), count_upgraded(uid, cookie, finder, conns, events));
    }
}

/// Counts the upgraded connections of a pod in its namespace. The count comes as an event; a failed one does not.
async fn count_upgraded(
    uid: String,
    cookie: u64,
    finder: Sender<FinderCommand>,
    conns: ConnectionStorage,
    events: Sender<PodTrackerEvent>,
) {
    let Some(namespace) = request_namespace(&finder, &uid, cookie).await else { return };
    // Taken before the scan: a request that ends during the scan makes the pod's idle time shorter than the count's
    // age, which voids the count.
    let counted_at = Instant::now();
    let job = move || {
        namespace.run_inside("list connections", || conns.count_upgraded(&SockDiag::open()?))
    };
    match spawn_blocking(job).await {
        // A failed send means that the loop has ended: its result has no receiver any more.
        Ok(Ok(count)) => {
            drop(events.send(PodTrackerEvent::UpgradedCounted(uid, count, counted_at)).await)
        }
        Ok(Err(error)) => {
            debug!(uid, error = %error_chain(&error), "cannot count connections of a pod that leaves");
        }
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

/// Tasks for pods: one for each pod, and some at a time.
#[derive(Debug)]
struct PodTasks {
    turns: Arc<Semaphore>,
    /// Pods whose task waits or runs.
    busy: Arc<Mutex<BTreeSet<String>>>,
}

/// Mark of a pod whose task waits or runs. It ends when this is dropped.
struct BusyPod {
    uid: String,
    busy: Arc<Mutex<BTreeSet<String>>>,
}

impl Drop for BusyPod {
    fn drop(&mut self) {
        lock(&self.busy).remove(&self.uid);
    }
}

impl PodTasks {
    /// Makes tasks of which `at_once` run at a time.
    fn new(at_once: usize) -> Self {
        Self { turns: Arc::new(Semaphore::new(at_once)), busy: Arc::default() }
    }

    /// Starts a task for a pod, unless the last one is still under way.
    fn start(&self, uid: String, job: impl Future<Output = ()> + Send + 'static) {
        if !lock(&self.busy).insert(uid.clone()) {
            return;
        }
        let (turns, mark) =
            (Arc::clone(&self.turns), BusyPod { uid, busy: Arc::clone(&self.busy) });
        tokio::spawn(async move {
            if let Ok(_turn) = turns.acquire().await {
                job.await;
            }
            drop(mark);
        });
    }
}

#[cfg(test)]
mod tests {
    use tokio::{sync::mpsc, task::yield_now};

    use super::*;

    /// Returns the pods whose tasks have begun since the last call.
    async fn begun(begins: &mut mpsc::Receiver<&'static str>) -> Vec<&'static str> {
        // Each task runs as far as it can between two polls of this one.
        yield_now().await;
        std::iter::from_fn(|| begins.try_recv().ok()).collect()
    }

    #[tokio::test]
    async fn each_pod_has_one_task_and_some_run_at_a_time() {
        let tasks = PodTasks::new(2);
        let (begin, mut begins) = mpsc::channel(16);
        let end = Arc::new(Semaphore::new(0));
        let start = |uid: &'static str| {
            let (begin, end) = (begin.clone(), Arc::clone(&end));
            tasks.start(uid.to_owned(), async move {
                begin.send(uid).await.expect("the test receives");
                end.acquire().await.expect("it is never closed").forget();
            });
        };
        ["a", "a", "b", "c", "c"].into_iter().for_each(start);
        assert_eq!(begun(&mut begins).await, ["a", "b"]);
        end.add_permits(1);
        while lock(&tasks.busy).contains("a") {
            yield_now().await;
        }
        ["a", "b"].into_iter().for_each(start);
        assert_eq!(begun(&mut begins).await, ["c"], "the task of b is still under way");
        end.add_permits(3);
        while !lock(&tasks.busy).is_empty() {
            yield_now().await;
        }
        assert_eq!(begun(&mut begins).await, ["a"]);
    }
}
