//! Shell: connections to one pod.

use std::{
    collections::VecDeque,
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use futures::{StreamExt as _, stream::FuturesUnordered};
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use tokio::{net::TcpStream, sync::oneshot};
use tracing::{debug, info};

use crate::{
    admin::Metrics,
    balance::PodKey,
    dial::{Action, Dial, Event, FIRST_WAIT},
    pool::{Next, Pool},
};

/// Bytes a pod's head may have.
const MAX_POD_HEAD: usize = 1 << 20;
/// A pod that refused is tried again after 10 ms, then after twice as long each time, at most 1.28 s.
const FIRST_RETRY: Duration = Duration::from_millis(10);
const RETRY_DOUBLINGS: u32 = 7;

/// A connection over which one request at a time is sent.
#[derive(Debug)]
pub struct Connection {
    /// Where requests go in.
    pub sender: http1::SendRequest<Incoming>,
    used: Instant,
}

/// Why a dial brought no connection. Cheap to clone: everyone who waited for it is told.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct DialError(Arc<io::Error>);

type Answer = Result<Connection, DialError>;

/// What all pods share.
#[derive(Debug, Clone)]
pub struct PodSettings {
    /// Listen backlog assumed.
    pub backlog: u32,
    /// How long a connection is kept idle.
    pub max_idle: Duration,
    /// Where dials are counted.
    pub metrics: Metrics,
}

/// One pod and the connections to it.
#[derive(Debug)]
pub struct Pod {
    /// Its place in the balance.
    pub key: PodKey,
    /// Its uid, for the log.
    pub uid: String,
    settings: PodSettings,
    pool: Mutex<Pool<Connection, oneshot::Sender<Answer>>>,
    answered: AtomicBool,
    refusals: AtomicU32,
}

impl Pod {
    /// A pod nobody has talked to yet.
    pub fn new(key: PodKey, uid: String, settings: PodSettings) -> Self {
        let pool = Mutex::new(Pool::new(settings.backlog));
        let (answered, refusals) = (AtomicBool::new(false), AtomicU32::new(0));
        Self { key, uid, settings, pool, answered, refusals }
    }

    /// A connection to send one request over: an idle one, or the first that comes.
    pub async fn connect(self: &Arc<Self>) -> Answer {
        let answer = {
            let mut pool = self.pool();
            if let Some(idle) = pool.take(|it| self.is_usable(it)) {
                return Ok(idle);
            }
            let (whom, answer) = oneshot::channel();
            let dials = pool.want(whom);
            drop(pool);
            self.dial(dials);
            answer
        };
        let gone = |_| DialError(Arc::new(io::Error::other("dial was dropped")));
        answer.await.map_err(gone)?
    }

    /// Takes a connection back whose exchange has ended in order.
    pub fn give_back(self: &Arc<Self>, mut connection: Connection) {
        if connection.sender.is_closed() {
            return;
        }
        connection.used = Instant::now();
        if connection.sender.is_ready() {
            return self.free(connection, Pool::on_free);
        }
        let pod = Arc::clone(self);
        tokio::spawn(async move {
            if connection.sender.ready().await.is_ok() {
                pod.free(connection, Pool::on_free);
            }
        });
    }

    /// The pod has answered a request: its process accepts connections.
    pub fn note_answer(self: &Arc<Self>) {
        if !self.answered.swap(true, Ordering::Relaxed) {
            let dials = self.pool().on_answer();
            self.dial(dials);
        }
    }

    /// How long to leave the pod alone after one more refusal.
    pub fn note_refusal(&self) -> Duration {
        let before = self.refusals.fetch_add(1, Ordering::Relaxed);
        FIRST_RETRY * 2u32.pow(before.min(RETRY_DOUBLINGS))
    }

    /// Whether the pod takes requests; if not, no connection to it is kept idle, so that it may drain, and
    /// requests that still wait for one look elsewhere.
    pub fn set_open(&self, open: bool) {
        if open {
            return self.pool().open();
        }
        let wanting = self.pool().close();
        for whom in wanting {
            let _ = whom.send(Err(DialError(Arc::new(io::Error::other("pod is leaving")))));
        }
    }

    /// Ends connections that lay idle too long.
    pub fn prune(&self) {
        self.pool().prune(|it| self.is_usable(it));
    }

    fn is_usable(&self, connection: &Connection) -> bool {
        connection.sender.is_ready() && connection.used.elapsed() < self.settings.max_idle
    }

    fn pool(&self) -> MutexGuard<'_, Pool<Connection, oneshot::Sender<Answer>>> {
        // A pool is whole between any two of its own steps, so a panic elsewhere cannot have broken it.
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a free connection into the pool by `put`, handing it on while those who wanted one are gone.
    fn free(
        self: &Arc<Self>,
        connection: Connection,
        put: impl FnOnce(
            &mut Pool<Connection, oneshot::Sender<Answer>>,
            Connection,
        ) -> Next<Connection, oneshot::Sender<Answer>>,
    ) {
        let mut next = put(&mut self.pool(), connection);
        loop {
            self.dial(next.dial);
            let Some((whom, connection)) = next.hand else { return };
            let Err(Ok(unwanted)) = whom.send(Ok(connection)) else { return };
            next = self.pool().on_free(unwanted);
        }
    }

    fn dial(self: &Arc<Self>, count: u32) {
        for _ in 0..count {
            self.settings.metrics.dials.inc();
            tokio::spawn(Arc::clone(self).dial_once());
        }
    }

    async fn dial_once(self: Arc<Self>) {
        match self.open().await {
            Ok(connection) => {
                self.refusals.store(0, Ordering::Relaxed);
                self.free(connection, Pool::on_dialled);
                if !self.answered.load(Ordering::Relaxed) {
                    tokio::time::sleep(FIRST_WAIT).await;
                }
                let dials = self.pool().on_stood();
                self.dial(dials);
            }
            Err(error) => {
                self.settings.metrics.dial_failures.inc();
                let wanting: VecDeque<_> = self.pool().on_dial_failed();
                let told = wanting.len();
                info!(pod = %self.uid, address = %self.key.address, %error, told, "dial failed");
                let error = DialError(Arc::new(error));
                for whom in wanting {
                    let _ = whom.send(Err(error.clone()));
                }
            }
        }
    }

    async fn open(&self) -> io::Result<Connection> {
        let (stream, sockets) = dial(self.key.address).await?;
        if sockets > 1 {
            self.settings.metrics.dial_repeats.inc_by(u64::from(sockets - 1));
            info!(pod = %self.uid, address = %self.key.address, sockets, "dial repeated");
        }
        stream.set_nodelay(true)?;
        let builder = http1::Builder::new().max_buf_size(MAX_POD_HEAD).to_owned();
        let (sender, driver) =
            builder.handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
        let uid = self.uid.clone();
        tokio::spawn(async move {
            if let Err(error) = driver.with_upgrades().await {
                debug!(pod = %uid, %error, "connection to pod ended");
            }
        });
        Ok(Connection { sender, used: Instant::now() })
    }
}

/// Carries out one [`Dial`]. Returns the connection and how many sockets it took.
async fn dial(address: SocketAddr) -> io::Result<(TcpStream, u32)> {
    let (mut dial, mut open) = (Dial::default(), FuturesUnordered::new());
    let (mut event, mut won) = (Event::Unanswered, None);
    let mut last = io::Error::from(io::ErrorKind::TimedOut);
    let wait = tokio::time::sleep(Duration::ZERO);
    tokio::pin!(wait);
    loop {
        match dial.step(event) {
            Action::Open(next) => {
                open.push(TcpStream::connect(address));
                wait.as_mut().reset(tokio::time::Instant::now() + next);
            }
            Action::Wait => {}
            Action::Win => {
                return won.map(|it| (it, dial.sockets())).ok_or(last);
            }
            Action::GiveUp => return Err(last),
        }
        event = tokio::select! {
            biased;
            Some(answer) = open.next() => match answer {
                Ok(stream) => { won = Some(stream); Event::Connected }
                Err(error) => { last = error; refusal(&last) }
            },
            () = wait.as_mut() => Event::Unanswered,
        };
    }
}

fn refusal(error: &io::Error) -> Event {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => Event::Refused,
        _ => Event::Failed,
    }
}
