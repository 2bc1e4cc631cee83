//! Shell: watch of one draining pod: its agent reports connections that become idle, and they are closed once they have
//! rested for a moment.
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
/// Most pods that are watched at a time. Each watch has a task and a connection. Of the other pods, scans find the
/// connections that become idle, and stay frequent.
const WATCHES_MAX: usize = 256;

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
    /// True while the pod's agent responds to queries that name all clients of known connections.
    covers_all_clients: Arc<AtomicBool>,
}

impl PodWatch {
    fn is_ended(&self) -> bool {
        self.task.is_finished()
    }
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
    /// connections. Returns true if each of these pods is watched for all its known connections.
    ///
    /// Without a locked close none is watched: a position cannot be compared without the lock.
    pub(super) fn update(
        &mut self,
        now: Instant,
        draining: &BTreeMap<SocketAddr, DrainingAddress>,
    ) -> bool {
        self.watches.retain(|at, watch| {
            // A watch that has just ended stays for a moment: without the pause, each update would start it again.
            let is_recent = now < watch.begun + RESTART_PAUSE;
            // Begin and phase set the moments of closes, so changed ones need a new watch.
            draining.get(at) == Some(&watch.draining) && (!watch.is_ended() || is_recent)
        });
        if draining.is_empty() || !self.closer.can_close_locked() {
            self.metrics.pods_unwatched.set(0);
            return false;
        }
        self.watch_pods(now, draining, self.closer.known_pods())
    }

    /// Begins the watches of these pods that are missing, up to [`WATCHES_MAX`]. Returns true if each pod is watched for all
    /// its known connections.
    fn watch_pods(
        &mut self,
        now: Instant,
        draining: &BTreeMap<SocketAddr, DrainingAddress>,
        pods: BTreeSet<SocketAddr>,
    ) -> bool {
        let mut unwatched = 0;
        // Without known pods there is nothing that a watch could find, so scans stay as they are.
        let mut are_all_watched = !pods.is_empty();
        for pod in pods {
            let Some(&address) = draining.get(&pod) else { continue };
            // Before this phase connections close only after a long pause, which a scan finds as well.
            if !address.is_closed_in_short_pauses(now) {
                are_all_watched = false;
                continue;
            }
            let is_missing = !self.watches.contains_key(&pod);
            if is_missing && self.watches.len() >= WATCHES_MAX {
                unwatched += 1;
                are_all_watched = false;
                continue;
            }
            if is_missing {
                let watch = self.start(now, pod, address);
                self.watches.insert(pod, watch);
            }
            // A watch without its first response may be at an old agent, which does not know the query.
            are_all_watched &= self
                .watches
                .get(&pod)
                .is_some_and(|it| it.covers_all_clients.load(Relaxed) && !it.is_ended());
        }
        self.metrics.pods_unwatched.set(unwatched);
        are_all_watched
    }

    fn start(&self, now: Instant, pod: SocketAddr, draining: DrainingAddress) -> PodWatch {
        let covers_all_clients = Arc::new(AtomicBool::new(false));
        let round = WatchRound {
            pod,
            draining,
            closer: self.closer.clone(),
            metrics: self.metrics.clone(),
            covers_all_clients: Arc::clone(&covers_all_clients),
        };
        let task = tokio::spawn(round.run());
        PodWatch { task, begun: now, draining, covers_all_clients }
    }
}

/// Clients that the newest query of a watch names.
#[derive(Debug, Default)]
struct NamedClients {
    clients: BTreeSet<SocketAddr>,
    /// True if the query names all clients of known connections.
    are_all: bool,
}

impl NamedClients {
    /// Cuts the known clients to those that the next query names. Returns true if the last query has not named one of
    /// these.
    fn name(&mut self, known: &mut Vec<SocketAddr>) -> bool {
        self.are_all = known.len() <= idle::QUERY_ADDRESSES_MAX;
        known.truncate(idle::QUERY_ADDRESSES_MAX);
        let clients: BTreeSet<_> = known.iter().copied().collect();
        let has_new = !clients.is_subset(&self.clients);
        self.clients = clients;
        has_new
    }
}

/// State of a watch's task.
struct WatchRound {
    pod: SocketAddr,
    draining: DrainingAddress,
    closer: StaleConnectionCloser,
    metrics: AgentMetrics,
    covers_all_clients: Arc<AtomicBool>,
}

impl WatchRound {
    /// Runs until no connection to the pod is known, or its agent does not respond.
    async fn run(self) {
        let (mut closes, mut named) = (IdleCloses::default(), NamedClients::default());
        // The first response comes at once, and shows that the pod's agent knows the query.
        let (mut after, mut wait) = (0, Duration::ZERO);
        loop {
            let mut clients = self.closer.known_clients(self.pod);
            if clients.is_empty() {
                return;
            }
            // The last event may be newer than that of a client that was not named. A repeated position costs an attempt.
            if named.name(&mut clients) {
                after = 0;
            }
            let query = query_idle(self.pod, after, wait, &clients);
            match self.close_until(&mut closes, query).await {
                Ok(updates) => {
                    // Clients that are not named follow once others have closed, which may never be. So scans for
                    // them stay frequent.
                    self.covers_all_clients.store(named.are_all, Relaxed);
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
        let now = Instant::now();
        for ((client, port), position) in updates.positions {
            if port == self.pod.port() {
                // From now on, if its moment is over: closes that have waited for their turn come before it.
                let moment = self.draining.reported_close_moment(now, client.port()).max(now);
                closes.add(moment, (client, self.pod), position);
            }
        }
    }

    /// Returns the result of a query. Meanwhile it closes what is due. The query goes on during that: walks over the
    /// sockets of many clients take longer than its timeout.
    async fn close_until<T>(&self, closes: &mut IdleCloses, query: impl Future<Output = T>) -> T {
        let mut query = pin!(query);
        loop {
            let wake = closes.next_wake();
            // Without a close to wait for, this branch never ends, and the query alone wakes the task.
            let next_attempt = async {
                match wake {
                    Some(at) => sleep_until(at.into()).await,
                    None => pending().await,
                }
            };
            tokio::select! {
                // A response that is ready must not keep a close from its moment.
                biased;
                () = next_attempt => {}
                result = &mut query => return result,
            }
            let mut closing = pin!(self.close_due(closes));
            // A completed query must not be polled again, and its result must not be lost while the close goes on.
            let mut early_result = None;
            loop {
                tokio::select! {
                    () = &mut closing => break,
                    result = &mut query, if early_result.is_none() => early_result = Some(result),
                }
            }
            if let Some(result) = early_result {
                return result;
            }
        }
    }

    /// Attempts the closes that are due, as many of each client as its pace allows.
    async fn close_due(&self, closes: &mut IdleCloses) {
        let begun = Instant::now();
        let (due, are_busy) = (closes.due(begun), self.draining.waits_for_busy_clients(begun));
        let attempts = self.closer.clone().close_at_positions(due, are_busy).await;
        let outcomes = attempts.outcomes.values();
        let closed = outcomes.filter(|it| **it == PositionOutcome::Closed).count() as u64;
        self.metrics.connections_closed.inc_by(closed);
        self.metrics.connections_closed_by_report.inc_by(closed);
        let tried = attempts.tried.len();
        debug!(pod = %self.pod, tried, ended = closed, "idle connections closed");
        closes.record(Instant::now(), begun.elapsed(), &attempts);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::locked_close::IdlePosition;

    #[tokio::test]
    async fn without_known_connections_or_a_locked_close_no_pod_is_watched() {
        let closer = StaleConnectionCloser::new("/nonexistent".into(), None);
        let mut watches = PodWatches::new(closer, AgentMetrics::new().0);
        assert!(!watches.update(Instant::now(), &BTreeMap::new()));
        assert!(watches.watches.is_empty());
    }

    #[tokio::test]
    async fn pods_beyond_the_bound_on_watches_are_not_watched() {
        let (now, metrics) = (Instant::now(), AgentMetrics::new().0);
        let closer = StaleConnectionCloser::new("/nonexistent".into(), None);
        let mut watches = PodWatches::new(closer, metrics.clone());
        let ports = 1..=WATCHES_MAX as u16 + 3;
        let pods: BTreeSet<SocketAddr> = ports.map(|port| ([10, 0, 0, 1], port).into()).collect();
        let address = DrainingAddress { since: now, phase: None };
        let draining = pods.iter().map(|&pod| (pod, address)).collect();
        assert!(!watches.watch_pods(now, &draining, pods));
        assert_eq!((watches.watches.len(), metrics.pods_unwatched.get()), (WATCHES_MAX, 3));
        assert!(!watches.update(now, &BTreeMap::new()));
        assert_eq!((watches.watches.len(), metrics.pods_unwatched.get()), (0, 0));
    }

    #[test]
    fn a_query_goes_on_while_connections_are_closed() {
        const PATIENCE: Duration = Duration::from_secs(30);
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_time().max_blocking_threads(1).build().expect("a runtime");
        runtime.block_on(async {
            // The only thread for closes is not free before the query has come to its end.
            let (free, is_free) = std::sync::mpsc::channel::<()>();
            let thread = tokio::task::spawn_blocking(move || is_free.recv());
            let (client, pod) = (([10, 0, 0, 9], 1).into(), ([10, 0, 0, 1], 80).into());
            let round = WatchRound {
                pod,
                draining: DrainingAddress { since: Instant::now(), phase: None },
                closer: StaleConnectionCloser::new("/nonexistent".into(), None),
                metrics: AgentMetrics::new().0,
                covers_all_clients: Arc::default(),
            };
            let mut closes = IdleCloses::default();
            closes.add(Instant::now(), (client, pod), IdlePosition { client_seq: 1, pod_seq: 1 });
            let query = async move {
                // Long enough for the attempt to begin.
                sleep(Duration::from_millis(100)).await;
                free.send(()).expect("the thread waits");
                "response"
            };
            let result = tokio::time::timeout(PATIENCE, round.close_until(&mut closes, query));
            assert_eq!(result.await.expect("the query must not wait for the close"), "response");
            assert_eq!(closes.next_wake(), None, "the attempt was made");
            thread.await.expect("no panic").expect("the query has sent");
        });
    }

    #[test]
    fn a_query_tells_if_it_names_a_client_that_the_one_before_did_not_and_if_it_names_all() {
        let clients = |ports: std::ops::RangeInclusive<u16>| -> Vec<SocketAddr> {
            ports.map(|port| ([10, 0, 0, 9], port).into()).collect()
        };
        let most = idle::QUERY_ADDRESSES_MAX as u16;
        let mut named = NamedClients::default();
        assert!(named.name(&mut clients(1..=most)) && named.are_all);
        assert!(!named.name(&mut clients(1..=most)) && named.are_all, "the same");
        assert!(!named.name(&mut clients(2..=most)), "one has closed");
        assert!(named.name(&mut clients(1..=most)), "events of the first one were passed over");
        let mut known = clients(1..=most + 1);
        assert!(!named.name(&mut known) && !named.are_all, "the last one does not fit");
        assert_eq!(known, clients(1..=most));
    }
}
