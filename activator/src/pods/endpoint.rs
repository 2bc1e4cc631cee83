//! Shell: connections to one pod, or to one port of it.

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use common::wire::{AppProtocol, StandbyOrder};
use futures::{StreamExt as _, stream::FuturesUnordered};
use smol_str::SmolStr;
use tokio::{net::TcpStream, sync::oneshot};
use tracing::{debug, info};

use crate::{
    metrics::ActivatorMetrics,
    pods::{
        connection::PodConnection,
        connection_pool::{PodConnectionPool, PoolAction},
        dial::{DialAction, DialEvent, FIRST_RETRY_DELAY, PodDial},
        endpoint_key::PodEndpointKey,
        standby_watch::SharedStandbyWatch,
    },
};

/// Pause after the first failed dial to a pod. Each further failure doubles it, up to 1.28 s.
const FIRST_DIAL_FAILURE_PAUSE: Duration = Duration::from_millis(10);
/// Number of failed dials after which the pause stays the same.
const MAX_PAUSE_DOUBLINGS: u32 = 7;

/// Time after which a pod with an unanswered dial may be gone with its node: TCP's first retransmission timeout.
pub const LATE_DIAL_TIMEOUT: Duration = Duration::from_secs(1);

/// Error of a dial. Cheap to clone, since all requests that waited for the dial get it.
#[derive(Clone, Debug, thiserror::Error)]
pub enum PodDialError {
    /// The dial has failed.
    #[error("{0}")]
    Failed(Arc<io::Error>),
    /// The dial goes on, but the node has not sent a SYN-ACK or RST yet.
    #[error("no SYN-ACK yet")]
    Unanswered,
}

type PodConnectionResult = Result<PodConnection, PodDialError>;
/// Sender to a request that waits for a connection.
type PodConnectionWaiter = oneshot::Sender<PodConnectionResult>;

/// Settings that all pods share.
#[derive(Debug, Clone)]
pub struct PodConnectionSettings {
    /// Listen backlog that is assumed of a pod.
    pub listen_backlog: u32,
    /// Time for which a connection is kept idle.
    pub max_idle: Duration,
    /// Metrics, in which dials are counted.
    pub metrics: ActivatorMetrics,
}

/// One pod and the connections to it. A pod of a scaled Service has an endpoint for each port of the Service.
#[derive(Debug)]
pub struct PodEndpoint {
    /// Key of the pod in the queue and for balancing.
    pub key: PodEndpointKey,
    /// Uid of the pod, for logs and slots.
    pub uid: SmolStr,
    /// Name of the pod, for the request log.
    pub name: SmolStr,
    protocol: AppProtocol,
    settings: PodConnectionSettings,
    pool: Mutex<PodConnectionPool<PodConnection, PodConnectionWaiter>>,
    has_responded: AtomicBool,
    failed_dials: AtomicU32,
    /// Standby watch of the pod: checks that the pod was thawed for its requests while it has a standby order.
    pub standby_watch: Arc<SharedStandbyWatch>,
}

/// Uid and name of a pod.
#[derive(Clone, Debug)]
pub struct PodIdentity {
    /// Uid of the pod, never used for another one.
    pub uid: SmolStr,
    /// Name of the pod, unique in its namespace.
    pub name: SmolStr,
}

impl PodEndpoint {
    /// Creates a pod without connections that speaks `protocol`.
    pub fn new(
        key: PodEndpointKey,
        identity: PodIdentity,
        protocol: AppProtocol,
        settings: PodConnectionSettings,
    ) -> Self {
        let pool = Mutex::new(match protocol {
            AppProtocol::Http1 => PodConnectionPool::new(settings.listen_backlog),
            AppProtocol::H2c => PodConnectionPool::for_shared(),
            AppProtocol::Tcp => PodConnectionPool::for_single_use(settings.listen_backlog),
        });
        let (has_responded, failed_dials) = (AtomicBool::new(false), AtomicU32::new(0));
        let PodIdentity { uid, name } = identity;
        let standby_watch = Arc::default();
        Self {
            key,
            uid,
            name,
            protocol,
            settings,
            pool,
            has_responded,
            failed_dials,
            standby_watch,
        }
    }

    /// Protocol that the pod speaks at this address.
    pub fn protocol(&self) -> AppProtocol {
        self.protocol
    }

    /// Returns a connection for one request: one that can carry it, or the first that is opened or given back. For
    /// HTTP/1.1 to a pod that speaks HTTP/2 it is a new one, because no other request would use it. While a dial is
    /// late, `prefers_other` is called every second; once it returns true, the result is [`PodDialError::Unanswered`].
    pub async fn connect(
        self: &Arc<Self>,
        protocol: AppProtocol,
        prefers_other: impl Fn() -> bool,
    ) -> PodConnectionResult {
        if protocol != self.protocol {
            // Boxed, because it is rare and would enlarge the future of every waiting request.
            return Box::pin(self.dial_for_one(protocol, prefers_other)).await;
        }
        let mut has_waited = false;
        loop {
            let dialled = {
                let mut pool = self.lock_pool();
                if let Some(connection) = pool.take_usable() {
                    return Ok(connection);
                }
                let (waiter, dialled) = oneshot::channel();
                let dials =
                    if has_waited { pool.requeue_waiter(waiter) } else { pool.add_waiter(waiter) };
                drop(pool);
                self.start_dials(dials);
                dialled
            };
            let dropped = |_| PodDialError::from(io::Error::other("dial was dropped"));
            match dialled.await.map_err(dropped)? {
                // A pod that is passed over is no longer dialled, even if no other pod is open.
                Err(PodDialError::Unanswered)
                    if !self.standby_watch.is_passed_over() && !prefers_other() =>
                {
                    has_waited = true;
                }
                result => return result,
            }
        }
    }

    /// Returns a pooled connection that can carry a request now; `None`: one has to be opened or given back first.
    pub fn take_idle(&self) -> Option<PodConnection> {
        self.lock_pool().take_usable()
    }

    /// Gives a connection back whose exchange has ended gracefully.
    pub fn return_connection(self: &Arc<Self>, connection: PodConnection) {
        // A shared one has never left the pool; an HTTP/1.1 one to a pod with HTTP/2 has no other use.
        if self.protocol == AppProtocol::Http1 && matches!(connection, PodConnection::Http1(_)) {
            self.put_connection(connection, PodConnectionPool::on_idle_connection);
        }
    }

    /// Registers that the pod has sent a response, so that its process runs and accepts connections.
    pub fn on_response(self: &Arc<Self>) {
        self.standby_watch.record_answer();
        if !self.has_responded.swap(true, Ordering::Relaxed) {
            let dials = self.lock_pool().on_first_response();
            self.start_dials(dials);
        }
    }

    /// Registers a failed dial. Returns the time for which the pod gets no requests.
    pub fn record_failed_dial(&self) -> Duration {
        let before = self.failed_dials.fetch_add(1, Ordering::Relaxed);
        FIRST_DIAL_FAILURE_PAUSE * 2u32.pow(before.min(MAX_PAUSE_DOUBLINGS))
    }

    /// Registers if the pod is ready or early-ready, also while it is paused after a failed dial. A pod that is neither
    /// keeps no idle connection, so that it can drain, and requests that wait for one try another pod.
    pub fn set_ready(&self, is_ready: bool) {
        if is_ready {
            return self.lock_pool().on_ready();
        }
        let waiters = self.lock_pool().on_not_ready();
        fail_waiters(waiters, &io::Error::other("pod is leaving").into());
    }

    /// Registers the standby order of the pod; `None`: it has none. A pod with an order keeps no idle connection. A
    /// frozen process closes no connection in time. At its thaw it may close one, together with the request that has
    /// come over it.
    pub fn set_standby(&self, order: Option<StandbyOrder>) {
        self.lock_pool().set_standby(order.is_some());
        self.standby_watch.set_order(order.map(|order| order.agent_timeout));
    }

    /// Makes all requests that wait for a connection try another pod.
    pub fn redirect_waiters(&self) {
        let waiters = self.lock_pool().take_waiters();
        fail_waiters(waiters, &PodDialError::Unanswered);
    }

    /// Closes connections that were idle for too long.
    pub fn prune_idle(&self) {
        self.lock_pool().prune_idle(PodConnection::is_reusable);
    }

    fn lock_pool(&self) -> MutexGuard<'_, PodConnectionPool<PodConnection, PodConnectionWaiter>> {
        // A panic elsewhere cannot leave a pool inconsistent: each change under the lock completes.
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a free connection into the pool by `put`, and passes it on while the requests that waited for it are gone.
    fn put_connection(
        self: &Arc<Self>,
        connection: PodConnection,
        put: impl FnOnce(
            &mut PodConnectionPool<PodConnection, PodConnectionWaiter>,
            PodConnection,
        ) -> PoolAction<PodConnection, PodConnectionWaiter>,
    ) {
        let mut next = put(&mut self.lock_pool(), connection);
        // A request may be gone when its connection comes. The connection then goes to the next one that waits, in a
        // loop, so that none is lost.
        loop {
            self.start_dials(next.dials);
            let Some((waiter, connection)) = next.handoff else { return };
            next = match waiter.send(Ok(connection)) {
                Err(Ok(unwanted @ (PodConnection::Http1(_) | PodConnection::Tcp(_)))) => {
                    self.lock_pool().on_idle_connection(unwanted)
                }
                // One more use of the connection may be possible for the next request that waits.
                _ if self.protocol == AppProtocol::H2c => self.lock_pool().on_waiter_served(),
                _ => return,
            };
        }
    }

    fn start_dials(self: &Arc<Self>, count: u32) {
        for _ in 0..count {
            self.settings.metrics.dials.inc();
            tokio::spawn(Arc::clone(self).dial_once());
        }
    }

    /// Dials for the requests that wait.
    async fn dial_once(self: Arc<Self>) {
        // The first request that waits tries another pod, if there is one. A request that is gone cannot, so the next
        // one does.
        let notify_first = || loop {
            let first = self.lock_pool().on_late_dial();
            let Some(first) = first else {
                // A server of raw TCP would notice a connection that is closed unused.
                return self.protocol == AppProtocol::Tcp;
            };
            if first.send(Err(PodDialError::Unanswered)).is_ok() {
                return false;
            }
        };
        match self.dial(self.protocol, notify_first).await {
            Ok(connection) => {
                self.put_connection(connection, PodConnectionPool::on_connected);
                // Before the first response an accepted connection may still wait in the pod's accept queue. It counts
                // as a dial a moment longer, so that the queue does not overflow.
                if !self.has_responded.load(Ordering::Relaxed) {
                    tokio::time::sleep(FIRST_RETRY_DELAY).await;
                }
                let dials = self.lock_pool().on_grace_elapsed();
                self.start_dials(dials);
            }
            Err(error) => {
                let waiters = self.lock_pool().on_dial_failed();
                self.report_failed_dial(&error, waiters.len());
                fail_waiters(waiters, &error);
            }
        }
    }

    /// Dials for one request, which alone uses the connection.
    async fn dial_for_one(
        &self,
        protocol: AppProtocol,
        prefers_other: impl Fn() -> bool,
    ) -> PodConnectionResult {
        self.settings.metrics.dials.inc();
        let dialled = self.dial(protocol, prefers_other).await;
        if let Err(error) = &dialled {
            self.report_failed_dial(error, 1);
        }
        dialled
    }

    /// Dials the pod. A late dial goes on, since the pod may only be slow to accept. `gives_up` is called after each
    /// [`LATE_DIAL_TIMEOUT`], and ends the dial if it returns true.
    async fn dial(
        &self,
        protocol: AppProtocol,
        gives_up: impl Fn() -> bool,
    ) -> PodConnectionResult {
        let open = self.open_connection(protocol);
        tokio::pin!(open);
        let connection = loop {
            match tokio::time::timeout(LATE_DIAL_TIMEOUT, open.as_mut()).await {
                Ok(opened) => break opened?,
                Err(_late) if gives_up() => return Err(PodDialError::Unanswered),
                // Another pod may open later, so the question comes again.
                Err(_late) => {}
            }
        };
        // The pod accepts again: the pause after its next failed dial is the shortest one.
        self.failed_dials.store(0, Ordering::Relaxed);
        Ok(connection)
    }

    /// Counts and logs a failed dial. `failed_requests` is the number of requests that get its error. The first of
    /// several failed dials fails all of them. A line for each further dial would state nothing new.
    fn report_failed_dial(&self, error: &PodDialError, failed_requests: usize) {
        self.settings.metrics.dial_failures.inc();
        let address = self.key.address;
        match failed_requests {
            0 => debug!(pod = %self.uid, %address, %error, "dial failed"),
            _ => info!(pod = %self.uid, %address, %error, failed_requests, "dial failed"),
        }
    }

    async fn open_connection(&self, protocol: AppProtocol) -> io::Result<PodConnection> {
        let (stream, sockets) = run_dial(self.key.address, protocol).await?;
        if sockets > 1 {
            self.settings.metrics.dial_repeats.inc_by(u64::from(sockets - 1));
            info!(pod = %self.uid, address = %self.key.address, sockets, "dial repeated");
        }
        PodConnection::open(stream, protocol, self.settings.max_idle).await
    }
}

impl From<io::Error> for PodDialError {
    fn from(error: io::Error) -> Self {
        Self::Failed(Arc::new(error))
    }
}

/// Sends the error to the requests that wait for a connection. A request that is gone needs no message.
fn fail_waiters(waiters: impl IntoIterator<Item = PodConnectionWaiter>, error: &PodDialError) {
    for waiter in waiters {
        let _ = waiter.send(Err(error.clone()));
    }
}

/// Runs one [`PodDial`]. Returns the connection and the number of sockets opened for it.
async fn run_dial(address: SocketAddr, protocol: AppProtocol) -> io::Result<(TcpStream, u32)> {
    let mut dial = match protocol {
        AppProtocol::Http1 | AppProtocol::H2c => PodDial::default(),
        AppProtocol::Tcp => PodDial::with_one_socket(),
    };
    let mut open = FuturesUnordered::new();
    let (mut event, mut connected) = (DialEvent::TimerElapsed, None);
    let mut last_error = io::Error::from(io::ErrorKind::TimedOut);
    let wait = tokio::time::sleep(Duration::ZERO);
    tokio::pin!(wait);
    // The first socket that is connected ends the dial; dropping the future closes the others.
    loop {
        match dial.step(event) {
            DialAction::Open(next) => {
                open.push(TcpStream::connect(address));
                wait.as_mut().reset(tokio::time::Instant::now() + next);
            }
            DialAction::Wait => {}
            DialAction::UseSocket => {
                return connected.map(|it| (it, dial.attempts())).ok_or(last_error);
            }
            DialAction::GiveUp => return Err(last_error),
        }
        event = tokio::select! {
            biased;
            Some(result) = open.next() => match result {
                Ok(stream) => { connected = Some(stream); DialEvent::Connected }
                Err(error) => { last_error = error; dial_failure_event(&last_error) }
            },
            () = wait.as_mut() => DialEvent::TimerElapsed,
        };
    }
}

fn dial_failure_event(error: &io::Error) -> DialEvent {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => DialEvent::Refused,
        _ => DialEvent::Failed,
    }
}

#[cfg(test)]
mod tests;
