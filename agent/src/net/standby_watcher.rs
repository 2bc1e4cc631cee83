//! Shell: standby watches of the pods of other nodes, and the thaw queries of these pods' agents.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    mem,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Instant,
};

use common::{
    standby_watch::{StandbyWatch, StandbyWatchAction, StandbyWatchEvent},
    thaw_query,
    wire::PodEntry,
};
use tokio::sync::{
    Semaphore,
    mpsc::{self, Receiver, Sender},
};
use tracing::debug;

/// Most queries that run at once.
const QUERIES_MAX: usize = 256;
/// Capacity of the channel of results.
const RESULTS_MAX: usize = 1_024;

/// Pods of other nodes that have a standby order: their watches, and the queries under way.
///
/// After a call, take what has changed: [pods](Self::take_changed) that connects pass over or use again, and
/// [addresses](Self::take_due_addresses) to arm. The next connect to an armed address is passed in by
/// [`record_use`](Self::record_use).
#[derive(Debug)]
pub(crate) struct StandbyWatcher {
    /// True if agents answer thaw queries. Otherwise the agent of a pod gives no sign, and no pod is watched.
    agents_answer_queries: bool,
    pods: BTreeMap<String, RemoteStandbyPod>,
    uids_by_address: HashMap<SocketAddr, String>,
    /// Pods whose watches have a [next wake](StandbyWatch::next_wake).
    waking: BTreeSet<String>,
    passed_over: BTreeSet<String>,
    /// Pods that were passed over, or used again, since they were last taken.
    changed: Vec<String>,
    /// Addresses whose next connect sends an event: the event of their backend is armed in the kernel's map.
    armed: BTreeSet<SocketAddr>,
    /// Addresses that are not armed yet, and whose next connect is to send an event.
    due_addresses: Vec<SocketAddr>,
    results_tx: Sender<ThawQueryResult>,
    results_rx: Receiver<ThawQueryResult>,
    /// Bound on the queries that run at once.
    semaphore: Arc<Semaphore>,
}

/// Pod of another node with a standby order.
#[derive(Debug, Default)]
struct RemoteStandbyPod {
    watch: StandbyWatch,
    /// Addresses to which connects may be led, sorted.
    addresses: Vec<SocketAddr>,
}

/// Progress or end of a query: uid of the pod, and the event for its watch.
pub(crate) type ThawQueryResult = (String, StandbyWatchEvent);

impl StandbyWatcher {
    /// Creates the state without pods. If agents answer no thaw queries, it watches no pod that is added.
    pub(crate) fn new(agents_answer_queries: bool) -> Self {
        let (results_tx, results_rx) = mpsc::channel(RESULTS_MAX);
        Self {
            agents_answer_queries,
            pods: BTreeMap::new(),
            uids_by_address: HashMap::new(),
            waking: BTreeSet::new(),
            passed_over: BTreeSet::new(),
            changed: Vec::new(),
            armed: BTreeSet::new(),
            due_addresses: Vec::new(),
            results_tx,
            results_rx,
            semaphore: Arc::new(Semaphore::new(QUERIES_MAX)),
        }
    }

    /// Adds or updates a pod of another node. One without a standby order is removed.
    pub(crate) fn update_pod(&mut self, pod: &PodEntry) {
        let order = pod.standby.filter(|_| self.agents_answer_queries);
        let Some(order) = order else { return self.remove_pod(&pod.uid) };
        let addresses = addresses_of(pod);
        // What is known of another address proves nothing.
        if self.pods.get(&pod.uid).is_none_or(|it| it.addresses != addresses) {
            self.remove_pod(&pod.uid);
            let entry = |at: &SocketAddr| (*at, pod.uid.clone());
            self.uids_by_address.extend(addresses.iter().map(entry));
            let watched = RemoteStandbyPod { addresses, ..RemoteStandbyPod::default() };
            self.pods.insert(pod.uid.clone(), watched);
        }
        self.step(&pod.uid, StandbyWatchEvent::Ordered(Some(order.agent_timeout)));
    }

    /// Removes a pod that has no standby order any more, or is gone.
    pub(crate) fn remove_pod(&mut self, uid: &str) {
        let Some(pod) = self.pods.remove(uid) else { return };
        for at in pod.addresses {
            // Another pod may have the address by now.
            if self.uids_by_address.get(&at).is_some_and(|it| it == uid) {
                self.uids_by_address.remove(&at);
                self.armed.remove(&at);
            }
        }
        self.waking.remove(uid);
        if self.passed_over.remove(uid) {
            self.changed.push(uid.to_owned());
        }
    }

    /// Returns true while connects are to pass over this pod.
    pub(crate) fn is_passed_over(&self, uid: &str) -> bool {
        self.passed_over.contains(uid)
    }

    /// Returns the pods that connects are to pass over.
    pub(crate) fn passed_over(&self) -> &BTreeSet<String> {
        &self.passed_over
    }

    /// Takes the pods that were passed over, or used again, since the last call. One may occur twice.
    pub(crate) fn take_changed(&mut self) -> Vec<String> {
        mem::take(&mut self.changed)
    }

    /// Takes the addresses whose next connect is to send an event. Call [`record_armed`](Self::record_armed) for each
    /// one that is armed.
    pub(crate) fn take_due_addresses(&mut self) -> Vec<SocketAddr> {
        mem::take(&mut self.due_addresses)
    }

    /// Records that the next connect to this address sends an event.
    pub(crate) fn record_armed(&mut self, at: SocketAddr) {
        self.armed.insert(at);
    }

    /// Returns the addresses whose next connect sends an event.
    pub(crate) fn armed(&self) -> &BTreeSet<SocketAddr> {
        &self.armed
    }

    /// Records that connects are led to these addresses from now on. Their rows in the maps may be new, and then they
    /// are not armed.
    pub(crate) fn record_added(&mut self, addresses: &BTreeSet<SocketAddr>) {
        // In most clusters only some pods have orders.
        if self.pods.is_empty() {
            return;
        }
        for at in addresses {
            self.armed.remove(at);
            let uid = self.uids_by_address.get(at);
            if uid.and_then(|uid| self.pods.get(uid)).is_some_and(|it| it.watch.awaits_use()) {
                self.due_addresses.push(*at);
            }
        }
    }

    /// Records that a connect was led to this address.
    pub(crate) fn record_use(&mut self, at: SocketAddr) {
        self.armed.remove(&at);
        if let Some(uid) = self.uids_by_address.get(&at).cloned() {
            self.step(&uid, StandbyWatchEvent::Used);
        }
    }

    /// Returns the time of the next [`tick`](Self::tick).
    pub(crate) fn next_wake(&self) -> Option<Instant> {
        let waking = self.waking.iter().filter_map(|uid| self.pods.get(uid)?.watch.next_wake());
        waking.min()
    }

    /// Passes the time to each watch that has a next wake.
    pub(crate) fn tick(&mut self) {
        for uid in self.waking.clone() {
            self.step(&uid, StandbyWatchEvent::Tick);
        }
    }

    /// Waits for the progress or the end of a query. Nothing is lost when the future is dropped.
    pub(crate) async fn next_result(&mut self) -> Option<ThawQueryResult> {
        self.results_rx.recv().await
    }

    /// Records the progress or the end of a query.
    pub(crate) fn record_result(&mut self, (uid, event): ThawQueryResult) {
        self.step(&uid, event);
    }

    /// Passes an event to the watch of a pod, and carries out its actions.
    fn step(&mut self, uid: &str, event: StandbyWatchEvent) {
        let Some(pod) = self.pods.get_mut(uid) else { return };
        let actions = pod.watch.step(Instant::now(), event);
        // So a turn of the loop looks only at watches that wait for a time, and not at all pods.
        if pod.watch.next_wake().is_some() {
            self.waking.insert(uid.to_owned());
        } else {
            self.waking.remove(uid);
        }
        // A watch that waits for a sign needs no further event: another use would change nothing.
        if pod.watch.awaits_use() {
            let unarmed = pod.addresses.iter().filter(|at| !self.armed.contains(*at));
            self.due_addresses.extend(unarmed);
        }
        let address = pod.addresses.first().map(SocketAddr::ip);
        for action in actions {
            match action {
                StandbyWatchAction::Query(number) => {
                    // A pod without an address is never used.
                    address.into_iter().for_each(|ip| self.start_query(uid, ip, number));
                }
                StandbyWatchAction::PassOver => {
                    self.passed_over.insert(uid.to_owned());
                    self.changed.push(uid.to_owned());
                }
                StandbyWatchAction::UseAgain => {
                    self.passed_over.remove(uid);
                    self.changed.push(uid.to_owned());
                }
            }
        }
    }

    /// Starts a thaw query of a pod's agent. The result arrives in [`next_result`](Self::next_result).
    fn start_query(&self, uid: &str, pod: IpAddr, number: u64) {
        let (results, semaphore) = (self.results_tx.clone(), Arc::clone(&self.semaphore));
        let uid = uid.to_owned();
        tokio::spawn(async move {
            let permit = semaphore.acquire().await;
            let reached = (uid.clone(), StandbyWatchEvent::QueryReached(number));
            // If the channel is full, the end of the query states the same.
            let end = thaw_query::query_agent(pod, || drop(results.try_send(reached))).await;
            drop(permit);
            debug!(uid, %pod, ?end, "agent of a pod on standby asked");
            // A failed send means that the loop has ended, and the agent with it.
            let _ = results.send((uid, StandbyWatchEvent::QueryEnded(number, end))).await;
        });
    }
}

/// Returns the addresses of a pod to which connects may be led. A pod with a standby order has one port.
fn addresses_of(pod: &PodEntry) -> Vec<SocketAddr> {
    let other = pod.address.zip(pod.other_family_address);
    let other = other.map(|(at, ip)| SocketAddr::new(ip, at.port()));
    let mut all: Vec<SocketAddr> = [pod.address, other].into_iter().flatten().collect();
    all.sort_unstable();
    all
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use common::{
        fixtures,
        wire::{NamespacedName, RoutingPhase, StandbyOrder},
    };
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
        time::{sleep_until, timeout},
    };

    use super::*;

    const NONE: [SocketAddr; 0] = [];
    /// Limit of each wait.
    const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

    /// Returns a pod of another node with an order. It has an address of loopback for itself.
    fn pod(uid: &str, last: u8) -> PodEntry {
        let revision = NamespacedName::new("default", "hello-00001");
        let at = ([127, 80, 22, last], 8080).into();
        let agent_timeout = Duration::from_millis(20);
        PodEntry {
            node: "other".into(),
            standby: Some(StandbyOrder { agent_timeout, ..fixtures::standby_order() }),
            ..fixtures::pod_at(uid, &revision, RoutingPhase::Ready, at)
        }
    }

    /// Serves queries of a pod as its agent does.
    async fn serve(last: u8) {
        let at = SocketAddr::from(([127, 80, 22, last], thaw_query::POD_SERVER_PORT));
        let listener = TcpListener::bind(at).await.expect("a free port");
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let _read = stream.read(&mut [0; 1024]).await;
                let body = thaw_query::RUNNING;
                let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
                let _written = stream.write_all((head + body).as_bytes()).await;
            }
        });
    }

    /// Passes in results and time until `is_done` returns true.
    async fn run_until(watcher: &mut StandbyWatcher, is_done: impl Fn(&StandbyWatcher) -> bool) {
        let run = async {
            while !is_done(watcher) {
                let wake = watcher.next_wake().unwrap_or_else(|| Instant::now() + WAIT_TIMEOUT);
                tokio::select! {
                    Some(result) = watcher.next_result() => watcher.record_result(result),
                    () = sleep_until(wake.into()) => watcher.tick(),
                }
            }
        };
        timeout(WAIT_TIMEOUT, run).await.expect("it comes");
    }

    #[tokio::test]
    async fn a_pod_is_passed_over_while_no_agent_answers_for_it() {
        let mut watcher = StandbyWatcher::new(true);
        serve(1).await;
        for (uid, last) in [("answers", 1), ("silent", 2)] {
            let pod = pod(uid, last);
            watcher.update_pod(&pod);
            let at = pod.address.expect("it has one");
            assert_eq!(watcher.take_due_addresses(), [at]);
            watcher.record_armed(at);
            watcher.record_use(at);
            assert_eq!(watcher.take_due_addresses(), NONE, "one check at a time");
        }
        // On a busy machine the one that answers may be passed over for a moment, or its query may still be under way
        // when the silent one is passed over.
        let is_settled = |it: &StandbyWatcher| {
            let is_answered = it.pods.get("answers").is_some_and(|pod| pod.watch.awaits_use());
            is_answered && it.is_passed_over("silent")
        };
        run_until(&mut watcher, is_settled).await;
        assert!(watcher.take_changed().contains(&"silent".to_owned()));
        let answering = pod("answers", 1).address.expect("it has one");
        assert!(watcher.take_due_addresses().contains(&answering), "the next connect is checked");
        serve(2).await;
        run_until(&mut watcher, |it| it.passed_over().is_empty()).await;
        assert!(watcher.take_changed().contains(&"silent".to_owned()));
    }

    #[tokio::test]
    async fn a_pod_without_an_order_or_with_another_address_is_used_again() {
        let mut watcher = StandbyWatcher::new(true);
        let at = |pod: &PodEntry| pod.address.expect("it has one");
        let first = pod("a", 3);
        let running = PodEntry { standby: None, ..first.clone() };
        for next in [running, pod("a", 4)] {
            watcher.update_pod(&first);
            watcher.record_use(at(&first));
            run_until(&mut watcher, |it| it.is_passed_over("a")).await;
            watcher.take_changed();
            watcher.update_pod(&first);
            assert!(watcher.is_passed_over("a"), "a repeated order proves nothing");
            watcher.update_pod(&next);
            assert_eq!((watcher.is_passed_over("a"), watcher.next_wake()), (false, None));
            assert_eq!(watcher.take_changed(), ["a"]);
            watcher.record_use(at(&first));
            assert_eq!(watcher.next_wake(), None, "that is no address of it");
        }
        watcher.remove_pod("a");
        assert!(watcher.uids_by_address.is_empty() && watcher.armed().is_empty());
    }

    /// Port 8022 refuses each connection then, and connects of this node show no other sign of a pod that runs.
    #[tokio::test]
    async fn no_pod_is_watched_where_agents_answer_no_queries() {
        let mut watcher = StandbyWatcher::new(false);
        let pod = pod("a", 6);
        watcher.update_pod(&pod);
        watcher.record_use(pod.address.expect("it has one"));
        assert_eq!((watcher.take_due_addresses(), watcher.next_wake()), (vec![], None));
    }

    /// A backend that leaves all lists and comes back has a new row in the map.
    #[tokio::test]
    async fn an_address_that_connects_are_led_to_again_is_due_again() {
        let mut watcher = StandbyWatcher::new(true);
        let pod = pod("a", 5);
        let at = pod.address.expect("it has one");
        let added = BTreeSet::from([at]);
        let other = BTreeSet::from([SocketAddr::from(([10, 0, 0, 1], 80))]);
        watcher.record_added(&added);
        assert_eq!(watcher.take_due_addresses(), NONE, "not known yet");
        watcher.update_pod(&pod);
        assert_eq!(watcher.take_due_addresses(), [at]);
        watcher.record_armed(at);
        watcher.update_pod(&pod);
        watcher.record_added(&other);
        assert_eq!(watcher.take_due_addresses(), NONE);
        watcher.record_added(&added);
        assert_eq!((watcher.take_due_addresses(), watcher.armed().len()), (vec![at], 0));
    }
}
