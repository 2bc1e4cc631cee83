//! Shell: watch of one draining pod: its agent reports connections that become idle, and they are closed at once.
//!
//! A client with long requests may pause for a few milliseconds between two. A scan would have to fall into the pause.
//! The pod's agent knows the end of each response, and the sequence numbers at which it ended. The connection is closed
//! if the client's socket still stands at them, under the socket's lock. So a request that was written meanwhile spares
//! the connection, and the report needs no list before it.

use std::{
    collections::{BTreeMap, BTreeSet},
    future::pending,
    net::SocketAddr,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use tokio::{
    task::JoinHandle,
    time::{sleep, sleep_until},
};
use tracing::debug;

use super::{
    DrainingAddress, close::StaleConnectionCloser, idle_closes::IdleCloses, pod_query::query_idle,
};
use crate::{
    kernel::locked_close::PositionOutcome,
    metrics::AgentMetrics,
    pods::{idle_positions::IdleUpdates, pod_server::idle},
};

/// Time for which a query waits. Connections that a scan has found meanwhile are named in the next one.
const QUERY_WAIT: Duration = Duration::from_millis(250);
/// Pause between two queries, in which further events gather. It also bounds what a pod can cost that responds at once.
const QUERY_PAUSE: Duration = Duration::from_millis(1);
/// Time from the begin of a watch that has ended to the begin of the next one. Agents of earlier versions do not know
/// the query, and connections are scanned often meanwhile.
const RESTART_PAUSE: Duration = Duration::from_secs(1);

/// Watches of the draining pods of which this node's clients have connections.
#[derive(Debug)]
pub(super) struct PodWatches {
    watches: BTreeMap<SocketAddr, PodWatch>,
    closer: StaleConnectionCloser,
    metrics: AgentMetrics,
}

/// Task that watches one pod. It ends when this is dropped.
#[derive(Debug)]
struct PodWatch {
    task: JoinHandle<()>,
    begun: Instant,
    draining: DrainingAddress,
    /// True once the pod's agent has responded.
    is_established: Arc<AtomicBool>,
}

impl Drop for PodWatch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl PodWatches {
    /// Starts without a watch.
    pub(super) fn new(closer: StaleConnectionCloser, metrics: AgentMetrics) -> Self {
        Self { watches: BTreeMap::new(), closer, metrics }
    }

    /// Ends the watches of addresses that have changed or no longer drain, and begins those of pods with known
    /// connections. Returns true if each of these pods is watched.
    ///
    /// Without a locked close none is watched: a position cannot be compared without the lock.
    pub(super) fn update(
        &mut self,
        now: Instant,
        draining: &BTreeMap<SocketAddr, DrainingAddress>,
    ) -> bool {
        let is_ended = |watch: &PodWatch| watch.task.is_finished();
        self.watches.retain(|at, watch| {
            let is_recent = now < watch.begun + RESTART_PAUSE;
            draining.get(at) == Some(&watch.draining) && (!is_ended(watch) || is_recent)
        });
        if draining.is_empty() || !self.closer.can_close_locked() {
            return false;
        }
        let pods = self.closer.known_pods();
        let mut are_all_watched = !pods.is_empty();
        for pod in pods {
            let Some(&address) = draining.get(&pod) else { continue };
            if !address.is_closed_in_short_pauses(now) {
                are_all_watched = false;
                continue;
            }
            let is_missing = !self.watches.contains_key(&pod);
            if is_missing {
                let watch = self.start(now, pod, address);
                self.watches.insert(pod, watch);
            }
            are_all_watched &= self
                .watches
                .get(&pod)
                .is_some_and(|it| it.is_established.load(Relaxed) && !is_ended(it));
        }
        are_all_watched
    }

    fn start(&self, now: Instant, pod: SocketAddr, draining: DrainingAddress) -> PodWatch {
        let is_established = Arc::new(AtomicBool::new(false));
        let (closer, metrics) = (self.closer.clone(), self.metrics.clone());
        let round =
            WatchRound { pod, draining, closer, metrics, is_established: is_established.clone() };
        let task = tokio::spawn(round.run());
        PodWatch { task, begun: now, draining, is_established }
    }
}

/// State of a watch's task.
struct WatchRound {
    pod: SocketAddr,
    draining: DrainingAddress,
    closer: StaleConnectionCloser,
    metrics: AgentMetrics,
    is_established: Arc<AtomicBool>,
}

impl WatchRound {
    /// Runs until no connection to the pod is known, or its agent does not respond.
    async fn run(self) {
        let (mut closes, mut named) = (IdleCloses::default(), BTreeSet::new());
        // The first response comes at once, and shows that the pod's agent knows the query.
        let (mut after, mut wait) = (0, Duration::ZERO);
        loop {
            let mut clients = self.closer.known_clients(self.pod);
            if clients.is_empty() {
                return;
            }
            // The others follow once some of these have closed. Until then scans find them.
            clients.truncate(idle::QUERY_ADDRESSES_MAX);
            // The last event may be newer than that of a client that was not named. A repeated position costs an attempt.
            if clients.iter().any(|client| !named.contains(client)) {
                named = clients.iter().copied().collect();
                after = 0;
            }
            let query = query_idle(self.pod, after, wait, &clients);
            match self.close_until(&mut closes, query).await {
                Ok(updates) => {
                    self.is_established.store(true, Relaxed);
                    (after, wait) = (updates.newest, QUERY_WAIT);
                    self.plan_closes(&mut closes, updates);
                    self.close_until(&mut closes, sleep(QUERY_PAUSE)).await;
                }
                Err(error) => {
                    debug!(pod = %self.pod, %error, "a pod is not watched");
                    return;
                }
            }
        }
    }

    /// Plans the closes of connections to this pod. The pod may have reported connections to its other ports as well.
    fn plan_closes(&self, closes: &mut IdleCloses, updates: IdleUpdates) {
        for ((client, port), position) in updates.positions {
            if port == self.pod.port() {
                let moment = self.draining.close_moment(client.port());
                closes.add(moment, (client, self.pod), position);
            }
        }
    }

    /// Returns the result of a query. Meanwhile it closes what is due.
    async fn close_until<T>(&self, closes: &mut IdleCloses, query: impl Future<Output = T>) -> T {
        let mut query = pin!(query);
        loop {
            let wake = closes.next_wake();
            let next_attempt = async {
                match wake {
                    Some(at) => sleep_until(at.into()).await,
                    None => pending().await,
                }
            };
            tokio::select! {
                // A response that is ready must not keep a close from its moment.
                biased;
                () = next_attempt => self.close_due(closes).await,
                result = &mut query => return result,
            }
        }
    }

    /// Attempts the closes that are due.
    async fn close_due(&self, closes: &mut IdleCloses) {
        let due = closes.due(Instant::now());
        let begun = Instant::now();
        let outcomes = self.closer.clone().close_at_positions(due.clone()).await;
        let closed = outcomes.values().filter(|it| **it == PositionOutcome::Closed).count() as u64;
        self.metrics.connections_closed.inc_by(closed);
        debug!(pod = %self.pod, tried = due.len(), ended = closed, "idle connections closed");
        closes.record(Instant::now(), begun.elapsed(), &due, &outcomes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn without_known_connections_or_a_locked_close_no_pod_is_watched() {
        let closer = StaleConnectionCloser::new("/nonexistent".into(), None);
        let mut watches = PodWatches::new(closer, AgentMetrics::new().0);
        assert!(!watches.update(Instant::now(), &BTreeMap::new()));
        assert!(watches.watches.is_empty());
    }
}
