//! Shell: probes the pods of other nodes by connects, each in a task of its own.

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use common::wire::PodEntry;
use tokio::{
    net::TcpStream,
    sync::{
        Semaphore,
        mpsc::{self, Receiver, Sender},
    },
    time::timeout,
};
use tracing::debug;

use crate::net::reachability::{PodReachability, ReachabilityProbe};

/// Number of pods of other nodes that are probed at once.
const PROBES_MAX: usize = 64;
/// Timeout of one probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
/// Capacity of the channel of results.
const RESULTS_MAX: usize = 1_024;

/// Pods of other nodes: their reachability, and the probes under way.
#[derive(Debug)]
pub(crate) struct RemotePodProber {
    pods: PodReachability,
    results_tx: Sender<RemoteProbeResult>,
    results_rx: Receiver<RemoteProbeResult>,
    /// Bound on the probes that run at once.
    semaphore: Arc<Semaphore>,
}

/// A probe that has ended, and true if it reached the pod.
pub(crate) type RemoteProbeResult = (ReachabilityProbe, bool);

impl RemotePodProber {
    /// Starts with the addresses that an earlier agent reached.
    pub(crate) fn new(known_addresses: BTreeSet<SocketAddr>) -> Self {
        let (results_tx, results_rx) = mpsc::channel(RESULTS_MAX);
        Self {
            pods: PodReachability::new(known_addresses),
            results_tx,
            results_rx,
            semaphore: Arc::new(Semaphore::new(PROBES_MAX)),
        }
    }

    /// Adds or updates a pod of another node. Check then if [some pods](Self::pods_to_check) have clients.
    pub(crate) fn update_pod(&mut self, pod: &PodEntry) {
        self.pods.update_pod(Instant::now(), pod);
    }

    /// Removes a pod that the table does not name any more.
    pub(crate) fn remove_pod(&mut self, uid: &str) {
        self.pods.remove_pod(uid);
    }

    /// Forgets the addresses of the earlier agent, once the pods of the first table are known.
    pub(crate) fn forget_known_addresses(&mut self) {
        self.pods.forget_known_addresses();
    }

    /// Returns true if connects may not go to this pod yet.
    pub(crate) fn is_unreached(&self, uid: &str) -> bool {
        self.pods.is_unreached(uid)
    }

    /// Returns the uids of all pods for which no client of this node is known, if a check for clients is due.
    pub(crate) fn pods_to_check(&self) -> Vec<String> {
        self.pods.pods_to_check(Instant::now())
    }

    /// Records if clients of this node have connected to services of a pod, and starts its first probe if they have.
    pub(crate) fn record_check(&mut self, uid: &str, has_clients: bool) {
        let probe = self.pods.record_check(Instant::now(), uid, has_clients);
        probe.into_iter().for_each(|it| self.start_probe(it));
    }

    /// Ends a check for clients that began at this time.
    pub(crate) fn finish_check(&mut self, begun: Instant) {
        let now = Instant::now();
        self.pods.finish_check(now, now.duration_since(begun));
    }

    /// Returns the time at which [`start_due_probes`](Self::start_due_probes) or [`pods_to_check`](Self::pods_to_check)
    /// has something next.
    pub(crate) fn next_wake(&self) -> Option<Instant> {
        self.pods.next_wake()
    }

    /// Starts the probes that are due now.
    pub(crate) fn start_due_probes(&mut self) {
        self.pods.take_due_probes(Instant::now()).into_iter().for_each(|it| self.start_probe(it));
    }

    /// Probes a pod by a connect. The result arrives in [`next_result`](Self::next_result).
    fn start_probe(&self, probe: ReachabilityProbe) {
        let (results, semaphore) = (self.results_tx.clone(), Arc::clone(&self.semaphore));
        tokio::spawn(async move {
            let permit = semaphore.acquire().await;
            let stream = timeout(PROBE_TIMEOUT, TcpStream::connect(probe.at)).await;
            // Zero linger resets the connection, so that it leaves no TIME_WAIT behind.
            let reached = matches!(&stream, Ok(Ok(stream)) if stream.set_zero_linger().is_ok());
            drop((stream, permit));
            // A failed send means that the loop has ended, and the agent with it.
            let _ = results.send((probe, reached)).await;
        });
    }

    /// Waits for the end of a probe. Nothing is lost when the future is dropped.
    pub(crate) async fn next_result(&mut self) -> Option<RemoteProbeResult> {
        self.results_rx.recv().await
    }

    /// Records the result of a probe.
    pub(crate) fn record_result(&mut self, (probe, reached): &RemoteProbeResult) {
        self.pods.record_result(Instant::now(), probe, *reached);
        debug!(uid = probe.uid, at = %probe.at, reached, "pod of another node probed");
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use common::{
        fixtures,
        wire::{NamespacedName, RoutingPhase},
    };

    use super::*;

    fn pod(uid: &str, address: SocketAddr) -> PodEntry {
        let revision = NamespacedName::new("default", "hello-00001");
        PodEntry {
            node: "other".into(),
            ..fixtures::pod_at(uid, &revision, RoutingPhase::Ready, address)
        }
    }

    #[tokio::test]
    async fn a_pod_is_reached_by_one_connect_and_a_closed_port_is_tried_again() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let open = listener.local_addr().expect("bound");
        let closed = SocketAddr::from(([127, 99, 99, 99], 1));
        let mut prober = RemotePodProber::new(BTreeSet::new());
        for (uid, at) in [("open", open), ("closed", closed)] {
            prober.update_pod(&pod(uid, at));
            assert!(prober.is_unreached(uid));
        }
        let uids = prober.pods_to_check();
        assert_eq!(uids, ["closed", "open"]);
        uids.iter().for_each(|uid| prober.record_check(uid, true));
        for _ in 0..2 {
            let result = prober.next_result().await.expect("a result");
            assert_eq!(result.1, result.0.uid == "open");
            prober.record_result(&result);
        }
        assert_eq!((prober.is_unreached("open"), prober.is_unreached("closed")), (false, true));
        assert!(prober.next_wake().is_some(), "the closed port is tried again");
    }
}
