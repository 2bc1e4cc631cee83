//! Shell: connections to one pod.

use std::{
    collections::VecDeque,
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use common::wire::Protocol;
use futures::{StreamExt as _, stream::FuturesUnordered};
use smol_str::SmolStr;
use tokio::{net::TcpStream, sync::oneshot};
use tracing::info;

use crate::{
    admin::Metrics,
    balance::PodKey,
    connection::Connection,
    dial::{Action, Dial, Event, FIRST_WAIT},
    pool::{Next, Pool},
};

/// A pod that refused is tried again after 10 ms, then after twice as long each time, at most 1.28 s.
const FIRST_RETRY: Duration = Duration::from_millis(10);
const RETRY_DOUBLINGS: u32 = 7;

/// A pod that leaves a dial unanswered for this long may be gone with its node: TCP's own first wait.
const LATE: Duration = Duration::from_secs(1);

/// Why a dial brought no connection. Cheap to clone: everyone who waited for it is told.
#[derive(Clone, Debug, thiserror::Error)]
pub enum DialError {
    /// It has failed.
    #[error("{0}")]
    Failed(Arc<io::Error>),
    /// It goes on, and nobody has answered yet.
    #[error("no answer yet")]
    Late,
}

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
    pub uid: SmolStr,
    /// Its name, for the log of requests.
    pub name: SmolStr,
    protocol: Protocol,
    settings: PodSettings,
    pool: Mutex<Pool<Connection, oneshot::Sender<Answer>>>,
    answered: AtomicBool,
    refusals: AtomicU32,
}

/// What a pod is called.
#[derive(Clone, Debug)]
pub struct Named {
    /// Unique for ever.
    pub uid: SmolStr,
    /// Unique in its namespace.
    pub name: SmolStr,
}

impl Pod {
    /// A pod nobody has talked to yet, that speaks `protocol`.
    pub fn new(key: PodKey, named: Named, protocol: Protocol, settings: PodSettings) -> Self {
        let pool = Mutex::new(match protocol {
            Protocol::Http1 => Pool::new(settings.backlog),
            Protocol::H2c => Pool::shared(),
        });
        let (answered, refusals) = (AtomicBool::new(false), AtomicU32::new(0));
        let Named { uid, name } = named;
        Self { key, uid, name, protocol, settings, pool, answered, refusals }
    }

    /// A connection to send one request over: one that has room for it, or the first that comes. In HTTP/1.1 it is one
    /// of its own where the pod speaks HTTP/2: nobody else would use it.
    pub async fn connect(self: &Arc<Self>, protocol: Protocol) -> Answer {
        if protocol != self.protocol {
            self.settings.metrics.dials.inc();
            // Rare, and it would take room in everybody's wait.
            let opened = Box::pin(self.open(protocol)).await;
            return opened.map_err(DialError::from);
        }
        let answer = {
            let mut pool = self.pool();
            if let Some(idle) = pool.take() {
                return Ok(idle);
            }
            let (whom, answer) = oneshot::channel();
            let dials = pool.want(whom);
            drop(pool);
            self.dial(dials);
            answer
        };
        let gone = |_| DialError::from(io::Error::other("dial was dropped"));
        answer.await.map_err(gone)?
    }

    /// Takes a connection back whose exchange has ended in order.
    pub fn give_back(self: &Arc<Self>, connection: Connection) {
        // A shared one has never left the pool; one beside shared ones has no other user.
        if self.protocol == Protocol::Http1 && matches!(connection, Connection::Single(_)) {
            self.free(connection, Pool::on_free);
        }
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
        tell(wanting, &io::Error::other("pod is leaving").into());
    }

    /// Everyone who waits for a connection looks elsewhere.
    pub fn send_away(&self) {
        let wanting = self.pool().send_away();
        tell(wanting, &DialError::Late);
    }

    /// Ends connections that lay idle too long.
    pub fn prune(&self) {
        self.pool().prune(Connection::is_good);
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
            next = match whom.send(Ok(connection)) {
                Err(Ok(unwanted @ Connection::Single(_))) => self.pool().on_free(unwanted),
                _ if self.protocol == Protocol::H2c => self.pool().on_served(),
                _ => return,
            };
        }
    }

    fn dial(self: &Arc<Self>, count: u32) {
        for _ in 0..count {
            self.settings.metrics.dials.inc();
            tokio::spawn(Arc::clone(self).dial_once());
        }
    }

    async fn dial_once(self: Arc<Self>) {
        let opened = {
            let open = self.open(self.protocol);
            tokio::pin!(open);
            match tokio::time::timeout(LATE, open.as_mut()).await {
                Ok(opened) => opened,
                Err(_late) => {
                    let first = self.pool().on_late();
                    tell(first, &DialError::Late);
                    open.await
                }
            }
        };
        match opened {
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
                tell(wanting, &error.into());
            }
        }
    }

    async fn open(&self, protocol: Protocol) -> io::Result<Connection> {
        let (stream, sockets) = dial(self.key.address).await?;
        if sockets > 1 {
            self.settings.metrics.dial_repeats.inc_by(u64::from(sockets - 1));
            info!(pod = %self.uid, address = %self.key.address, sockets, "dial repeated");
        }
        Connection::open(stream, protocol, self.settings.max_idle).await
    }
}

impl From<io::Error> for DialError {
    fn from(error: io::Error) -> Self {
        Self::Failed(Arc::new(error))
    }
}

/// Tells those who wait for a connection why they get none. Whoever is gone needs no answer.
fn tell(wanting: impl IntoIterator<Item = oneshot::Sender<Answer>>, error: &DialError) {
    for whom in wanting {
        let _ = whom.send(Err(error.clone()));
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
