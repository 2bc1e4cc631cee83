//! Shell: pod server: the agent's own port in each pod's network namespace.
//!
//! | request | sent by | response |
//! |---|---|---|
//! | `GET /wait-for-drain` | the kubelet, before it stops a container | once the pod may stop: [`prestop`] |
//! | `POST /in-use` | agents of nodes with clients, before they close stale connections | the use of each: [`in_use`] |
//! | `POST /idle` | agents of nodes with clients of a pod that drains | once a connection has become idle: [`idle`] |
//! | `GET /running` | agents and activators that have sent something to a frozen pod | the state of the pod, running or frozen: [`running`] |
//!
//! The socket is opened inside the pod's network namespace and belongs to the agent: the pod's processes see a port in
//! use and nothing else. Knative reserves the port (knative/serving `pkg/networking/constants.go`). Without an agent
//! the port is closed, so the kubelet's request is refused at once and the pod is stopped as usual.
//!
//! In a pod of a scaled Service the port is not reserved. There the server opens only once the pod is ready, so that
//! the pod's processes have their ports. If one of them has this port, the pod has no server.

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, TcpListener},
    os::fd::{AsRawFd as _, OwnedFd},
    sync::Arc,
    time::Duration,
};

use axum::{
    Router,
    extract::DefaultBodyLimit,
    routing::{get, post},
};
use common::{
    http_server::{self, HttpServerBounds},
    thaw_query,
};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, SockaddrIn6, bind, listen, setsockopt, socket,
    sockopt::{Ipv6V6Only, ReuseAddr},
};
use tokio::sync::{Semaphore, mpsc::Sender};
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::warn;

use self::{in_use::InUseLookup, prestop::PreStopHooks, running::ThawQuery};
use crate::{
    kernel::maps::connection_storage::ConnectionStorage,
    net::sockdiag::SockDiag,
    pods::{
        idle_connections::IdleConnections,
        namespace::{self, NetworkNamespace, POD_SERVER_PORT},
        types::PodTrackerEvent,
    },
};

pub mod idle;
pub mod in_use;
pub mod prestop;
pub mod running;

/// Accept backlog: every container of a pod sends one request, and every node with clients sends some.
const BACKLOG: i32 = 64;

/// Bounds for the clients of one pod server. Any client that reaches the pod may connect, and file descriptors of the
/// agent serve the whole node. No client keeps a connection for a later request. The kubelet must always be served: a
/// preStop request that waits behind other clients keeps its pod until the end of its grace period.
const BOUNDS: HttpServerBounds = HttpServerBounds {
    max_connections: 256,
    head_timeout: Duration::from_secs(10),
    ..HttpServerBounds::DEFAULT
};

/// State that all pod servers share.
#[derive(Clone, Debug)]
pub struct PodServers {
    /// Pods that may stop, and preStop requests.
    pub prestop_hooks: PreStopHooks,
    /// The eBPF programs' storage of pods' connections.
    pub conns: ConnectionStorage,
    /// Connections that the eBPF programs report as idle.
    pub idle: IdleConnections,
    /// Channel of thaw queries to the agent's loop.
    pub thaw_queries: Sender<ThawQuery>,
    /// Channel of events to the agent's loop.
    pub events: Sender<PodTrackerEvent>,
}

/// Open pod server in a pod's namespace. It closes when dropped, as a namespace lives as long as a socket in it.
#[derive(Debug)]
pub struct PodServer {
    /// Cookie of the server's namespace.
    pub cookie: u64,
    _stop: DropGuard,
}

impl PodServers {
    /// Opens a pod server in a pod's namespace. Must be called in a runtime.
    pub fn open(
        &self,
        uid: &str,
        cookie: u64,
        namespace: &NetworkNamespace,
    ) -> Result<PodServer, namespace::NamespaceError> {
        // Both sockets stay in the pod's namespace; only their creation has to run inside it.
        let open_sockets = || Ok((open_listener()?, SockDiag::open()?));
        let (listener, diag) =
            namespace.run_inside("open a listener on port 8022", open_sockets)?;
        let stop = CancellationToken::new();
        let in_use_lookup = InUseLookup::new(diag, self.conns.clone());
        let state = PodServerState {
            uid: uid.to_owned(),
            servers: self.clone(),
            cookie,
            in_use_lookup,
            idle_queries: Arc::new(Semaphore::new(idle::QUERIES_MAX)),
            stop: stop.clone(),
        };
        tokio::spawn(async move {
            let uid = state.uid.clone();
            if let Err(error) = serve(listener, state).await {
                warn!(uid, %error, "cannot serve in the pod's namespace");
            }
        });
        Ok(PodServer { cookie, _stop: stop.drop_guard() })
    }
}

#[derive(Clone, Debug)]
struct PodServerState {
    uid: String,
    servers: PodServers,
    /// Cookie of the pod's namespace.
    cookie: u64,
    in_use_lookup: InUseLookup,
    /// Permits for queries that wait until a connection is idle.
    idle_queries: Arc<Semaphore>,
    stop: CancellationToken,
}

async fn serve(listener: TcpListener, state: PodServerState) -> io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let stop = state.stop.clone();
    let pages = Router::new()
        .route("/wait-for-drain", get(prestop::handle_wait_for_drain))
        .route(thaw_query::PATH, get(running::handle_running))
        .route(in_use::PATH, post(in_use::handle_in_use))
        .route(idle::PATH, post(idle::handle_idle));
    let pages = limit_bodies(pages).with_state(state);
    http_server::serve(listener, pages, BOUNDS, stop).await;
    Ok(())
}

/// Limits the bodies of requests to the longest query. Any client that reaches the pod may send one, and each is in the
/// agent's memory while it waits for its response.
fn limit_bodies<S: Clone + Send + Sync + 'static>(pages: Router<S>) -> Router<S> {
    pages.layer(DefaultBodyLimit::max(in_use::BODY_BYTES_MAX))
}

/// Returns a listener for both families in the calling thread's namespace.
fn open_listener() -> io::Result<TcpListener> {
    let listener = match open_ipv6_socket() {
        // The kernel was booted without IPv6.
        Err(nix::Error::EAFNOSUPPORT) => {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, POD_SERVER_PORT))?
        }
        other => TcpListener::from(other?),
    };
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn open_ipv6_socket() -> nix::Result<OwnedFd> {
    let socket = socket(AddressFamily::Inet6, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    // As Rust's standard library does: a port that was closed a moment ago can be opened again.
    setsockopt(&socket, ReuseAddr, &true)?;
    setsockopt(&socket, Ipv6V6Only, &false)?;
    let at = std::net::SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, POD_SERVER_PORT, 0, 0);
    bind(socket.as_raw_fd(), &SockaddrIn6::from(at))?;
    listen(&socket, Backlog::new(BACKLOG)?)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use axum::{
        body::Body,
        http::{Request, StatusCode},
    };
    use tower::ServiceExt as _;

    use super::*;

    #[tokio::test]
    async fn a_body_beyond_the_longest_query_is_refused() {
        let page = |body: String| async move { body.len().to_string() };
        let pages: Router = limit_bodies(Router::new().route("/", post(page)));
        let send = async |bytes: usize| {
            let request = Request::post("/").body(Body::from(vec![b'1'; bytes]));
            let response = pages.clone().oneshot(request.expect("a request")).await;
            response.expect("a response").status()
        };
        assert_eq!(send(in_use::BODY_BYTES_MAX).await, StatusCode::OK);
        assert_eq!(send(in_use::BODY_BYTES_MAX + 1).await, StatusCode::PAYLOAD_TOO_LARGE);
    }
}
