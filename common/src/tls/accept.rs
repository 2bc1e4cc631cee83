//! Shell: accepted TLS connections, each with its peer's identity, and limits on those without one.

use std::{
    collections::{BTreeSet, HashMap},
    io,
    net::{IpAddr, SocketAddr},
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use futures::{Stream, stream};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{mpsc, watch},
    time::{Instant, Sleep, sleep, timeout},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Connected;
use tracing::{debug, warn};

use super::{TlsCredentials, parse_identity, peer::TlsPeer, server_config};

/// Limits on handshakes and on connections without a certificate.
#[derive(Clone, Copy, Debug)]
pub struct AcceptLimits {
    /// Timeout of a handshake.
    pub handshake_timeout: Duration,
    /// Lifetime of a connection without a certificate.
    pub anonymous_lifetime: Duration,
    /// Most connections without a certificate, from all addresses, handshakes included.
    pub max_anonymous: usize,
    /// Most connections without a certificate from one address, handshakes included.
    pub max_anonymous_per_address: usize,
}

impl Default for AcceptLimits {
    fn default() -> Self {
        Self {
            handshake_timeout: Duration::from_secs(5),
            anonymous_lifetime: Duration::from_secs(30),
            max_anonymous: 1_024,
            max_anonymous_per_address: 32,
        }
    }
}

/// Addresses of known peers, which the limit on all addresses does not stop: many others together must not keep them
/// out. The limit on one address counts for them, too.
pub type KnownAddresses = watch::Receiver<BTreeSet<IpAddr>>;

/// Most connections that have finished the handshake and wait to be served.
const MAX_PENDING: usize = 64;
/// Pause after a failed accept: most likely there are too many open files.
const ACCEPT_RETRY: Duration = Duration::from_millis(50);
/// Least time between two warnings of failed handshakes: a port scan must not flood the log.
const FAILURE_LOG_INTERVAL: Duration = Duration::from_secs(1);

/// Accepts connections until `shutdown`. `allows_anonymous`: also from clients that have no certificate yet.
pub fn accept_connections(
    listener: TcpListener,
    credentials: &Arc<TlsCredentials>,
    allows_anonymous: bool,
    limits: AcceptLimits,
    known_addresses: Option<KnownAddresses>,
    shutdown: CancellationToken,
) -> impl Stream<Item = io::Result<TlsServerConnection>> + Send + 'static {
    let acceptor = TlsAcceptor::from(Arc::new(server_config(credentials, allows_anonymous)));
    let (send, receive) = mpsc::channel(MAX_PENDING);
    let credentials = Arc::clone(credentials);
    tokio::spawn(shutdown.run_until_cancelled_owned(async move {
        // Before there is a certificate every handshake would fail, so clients wait in the listen queue.
        credentials.wait_for_certificate().await;
        TlsAcceptLoop {
            acceptor,
            limits,
            known_addresses,
            anonymous: AnonymousConnections::default(),
            failure_log: Arc::default(),
            accepted: send,
        }
        .run(listener)
        .await;
    }));
    let next = async |mut receive: mpsc::Receiver<TlsServerConnection>| {
        let connection = receive.recv().await?;
        Some((Ok(connection), receive))
    };
    stream::unfold(receive, next)
}

struct TlsAcceptLoop {
    acceptor: TlsAcceptor,
    limits: AcceptLimits,
    known_addresses: Option<KnownAddresses>,
    anonymous: AnonymousConnections,
    failure_log: Arc<Mutex<FailureLogThrottle>>,
    accepted: mpsc::Sender<TlsServerConnection>,
}

impl TlsAcceptLoop {
    /// Accepts sockets, and makes their handshakes in tasks of their own. It never ends.
    async fn run(self, listener: TcpListener) {
        loop {
            let (socket, from) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    warn!(%error, "cannot accept");
                    // accept(2) would fail again at once, and the loop would use a whole CPU.
                    sleep(ACCEPT_RETRY).await;
                    continue;
                }
            };
            // Dropped before the handshake, whose cryptography is what a flood of connections would cost.
            let is_known = self.is_known(from.ip());
            let permit = self.anonymous.try_acquire(from.ip(), is_known, &self.limits);
            let Some(permit) = permit else {
                debug!(%from, "too many connections without a certificate: connection dropped");
                continue;
            };
            // In a task of its own: a slow handshake must not delay the next accept.
            let (acceptor, limits, send) =
                (self.acceptor.clone(), self.limits, self.accepted.clone());
            let failure_log = Arc::clone(&self.failure_log);
            tokio::spawn(async move {
                match timeout(
                    limits.handshake_timeout,
                    handshake(acceptor, socket, from, permit, limits),
                )
                .await
                {
                    Ok(Ok(connection)) => drop(send.send(connection).await),
                    Ok(Err(error)) => {
                        log_failure(&failure_log, from, Some(&error), "handshake refused");
                    }
                    Err(_elapsed) => {
                        log_failure(&failure_log, from, None, "handshake took too long")
                    }
                }
            });
        }
    }

    fn is_known(&self, from: IpAddr) -> bool {
        // A socket of IPv6 may accept connections of IPv4.
        let from = from.to_canonical();
        self.known_addresses.as_ref().is_some_and(|known| known.borrow().contains(&from))
    }
}

/// Logs a failed handshake: as a warning, or at the level `debug` if there was a warning a moment ago.
fn log_failure(
    log: &Mutex<FailureLogThrottle>,
    from: SocketAddr,
    error: Option<&io::Error>,
    message: &str,
) {
    let error = error.map(tracing::field::display);
    let unlogged =
        log.lock().unwrap_or_else(PoisonError::into_inner).record_failure(Instant::now());
    match unlogged {
        Some(0) => warn!(%from, error, "{message}"),
        Some(unlogged) => warn!(%from, error, unlogged, "{message}"),
        None => debug!(%from, error, "{message}"),
    }
}

/// Throttle of the warnings of failed handshakes, with the number of failures that had none.
#[derive(Debug, Default)]
struct FailureLogThrottle {
    last_logged_at: Option<Instant>,
    unlogged: u64,
}

impl FailureLogThrottle {
    /// Counts a failure at `now`. Returns the number of failures without a warning before it, if it is to have one.
    fn record_failure(&mut self, now: Instant) -> Option<u64> {
        if self.last_logged_at.is_some_and(|at| now < at + FAILURE_LOG_INTERVAL) {
            self.unlogged += 1;
            return None;
        }
        self.last_logged_at = Some(now);
        Some(std::mem::take(&mut self.unlogged))
    }
}

async fn handshake(
    acceptor: TlsAcceptor,
    socket: TcpStream,
    from: SocketAddr,
    permit: AnonymousPermit,
    limits: AcceptLimits,
) -> io::Result<TlsServerConnection> {
    socket.set_nodelay(true)?;
    let stream = acceptor.accept(socket).await?;
    let (_, session) = stream.get_ref();
    let shown = session.peer_certificates().and_then(<[_]>::first);
    let identity = shown.map(parse_identity).transpose().map_err(io::Error::other)?;
    // A known peer returns its place at once; the limits hold for the others only.
    let (peer, anonymous_limit) = match identity {
        Some(identity) => (TlsPeer::Authenticated(Arc::new(identity)), None),
        None => (TlsPeer::Anonymous, Some((Box::pin(sleep(limits.anonymous_lifetime)), permit))),
    };
    debug!(%from, ?peer, "connection accepted");
    Ok(TlsServerConnection { stream: Box::new(stream), peer, anonymous_limit })
}

/// Number of connections without a certificate, by address.
#[derive(Clone, Debug, Default)]
struct AnonymousConnections(Arc<Mutex<HashMap<IpAddr, usize>>>);

/// Place of one connection without a certificate, taken as long as the value lives.
#[derive(Debug)]
struct AnonymousPermit(AnonymousConnections, IpAddr);

impl AnonymousConnections {
    fn try_acquire(
        &self,
        from: IpAddr,
        is_known: bool,
        limits: &AcceptLimits,
    ) -> Option<AnonymousPermit> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let total: usize = all.values().sum();
        let count = all.get(&from).copied().unwrap_or_default();
        // Known addresses pass the total bound, which strangers could keep full. The bound for each address stays.
        let is_full = total >= limits.max_anonymous && !is_known;
        if is_full || count >= limits.max_anonymous_per_address {
            return None;
        }
        all.insert(from, count + 1);
        Some(AnonymousPermit(self.clone(), from))
    }
}

impl Drop for AnonymousPermit {
    fn drop(&mut self) {
        let mut all = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = all.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.1);
            }
        }
    }
}

/// Connection that has finished its handshake. Without a certificate it has a time limit (`anonymous_limit`).
#[derive(Debug)]
pub struct TlsServerConnection {
    stream: Box<TlsStream<TcpStream>>,
    peer: TlsPeer,
    anonymous_limit: Option<(Pin<Box<Sleep>>, AnonymousPermit)>,
}

impl Connected for TlsServerConnection {
    type ConnectInfo = TlsPeer;

    fn connect_info(&self) -> TlsPeer {
        self.peer.clone()
    }
}

impl AsyncRead for TlsServerConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // Checked in reads alone, since an HTTP/2 server always has one pending.
        if let Some((end, _)) = &mut self.anonymous_limit
            && end.as_mut().poll(context).is_ready()
        {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for TlsServerConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_addresses_together_do_not_keep_a_known_one_out() {
        let limits = AcceptLimits {
            max_anonymous: 3,
            max_anonymous_per_address: 2,
            ..AcceptLimits::default()
        };
        let connections = AnonymousConnections::default();
        let acquire = |last: u8, is_known| {
            connections.try_acquire(IpAddr::from([10, 0, 0, last]), is_known, &limits)
        };
        let others = [1, 2, 3].map(|last| acquire(last, false));
        assert!(others.iter().all(Option::is_some) && acquire(4, false).is_none());
        let known = [acquire(4, true), acquire(4, true)];
        assert!(known.iter().all(Option::is_some));
        assert!(acquire(4, true).is_none(), "the limit on one address counts");
        drop(others);
        assert!(acquire(1, false).is_some());
    }

    #[test]
    fn a_port_scan_is_one_warning_a_second_with_a_count() {
        let (mut throttle, begin) = (FailureLogThrottle::default(), Instant::now());
        let warnings: Vec<_> = (0..50)
            .filter_map(|index| throttle.record_failure(begin + Duration::from_millis(index * 50)))
            .collect();
        assert_eq!(warnings, [0, 19, 19]);
        assert_eq!(throttle.unlogged, 9, "for the next warning");
    }
}
