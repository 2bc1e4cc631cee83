//! Shell: the agent's own port in each pod's network namespace.
//!
//! | asked for | by | answer |
//! |---|---|---|
//! | `GET /wait-for-drain` | the kubelet, before it stops a container | once the pod may stop: [`drain`] |
//! | `POST /in-use` | agents of nodes with clients, before they end kept connections | which of those are in use: [`in_use`] |
//!
//! The socket is opened inside the pod's network namespace and belongs to the agent: the pod's processes see a port in
//! use and nothing else. Knative keeps the port from users (knative/serving `pkg/networking/constants.go`). Without an
//! agent nobody listens, so that the kubelet is refused at once and stops the pod as ever.

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
    os::fd::{AsRawFd as _, OwnedFd},
};

use axum::{
    Router,
    routing::{get, post},
};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, SockaddrIn6, bind, listen, setsockopt, socket,
    sockopt::{Ipv6V6Only, ReuseAddr},
};
use tokio::sync::mpsc::Sender;
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::warn;

use self::{drain::Drains, in_use::Books};
use crate::{
    maps::conns::Conns,
    pods::{
        Event,
        namespace::{self, Namespace},
    },
    sockdiag::SockDiag,
};

pub mod drain;
pub mod in_use;

/// Where it is asked. Reserved by Knative, so that no user's container has it.
pub const PORT: u16 = 8022;
/// Every container of a pod asks once, and every node with clients now and then.
const BACKLOG: i32 = 64;

/// What every door needs.
#[derive(Clone, Debug)]
pub struct Doors {
    /// Which pods may stop.
    pub drains: Drains,
    /// What is known of pods' connections.
    pub conns: Conns,
    /// Where questions go.
    pub events: Sender<Event>,
}

/// An open port in a pod's namespace. Closes when dropped; a namespace lives as long as a socket in it.
#[derive(Debug)]
pub struct Door {
    /// Cookie of the namespace it is in.
    pub cookie: u64,
    _stop: DropGuard,
}

impl Doors {
    /// Opens one in a pod's namespace. To be called in a runtime.
    pub fn open(&self, uid: &str, cookie: u64, of: &Namespace) -> Result<Door, namespace::Error> {
        let (listener, diag) = of.within("port 8022", || Ok((opened()?, SockDiag::open()?)))?;
        let stop = CancellationToken::new();
        let books = Books::new(diag, self.conns.clone());
        let asked = Asked { uid: uid.to_owned(), doors: self.clone(), books, stop: stop.clone() };
        tokio::spawn(async move {
            let uid = asked.uid.clone();
            if let Err(error) = serve(listener, asked).await {
                warn!(uid, %error, "cannot answer in the pod's namespace");
            }
        });
        Ok(Door { cookie, _stop: stop.drop_guard() })
    }
}

#[derive(Clone, Debug)]
struct Asked {
    uid: String,
    doors: Doors,
    books: Books,
    stop: CancellationToken,
}

async fn serve(listener: TcpListener, asked: Asked) -> io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let stop = asked.stop.clone().cancelled_owned();
    let pages = Router::new()
        .route("/wait-for-drain", get(drain::wait))
        .route(in_use::PATH, post(in_use::answer))
        .with_state(asked);
    let pages = pages.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener, pages).with_graceful_shutdown(stop).await
}

/// A listener for both families in the calling thread's namespace.
fn opened() -> io::Result<TcpListener> {
    let listener = match six() {
        // Kernels that were booted without IPv6.
        Err(nix::Error::EAFNOSUPPORT) => TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT))?,
        other => TcpListener::from(other?),
    };
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn six() -> nix::Result<OwnedFd> {
    let socket = socket(AddressFamily::Inet6, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    // As the standard library does: a door that was closed a moment ago opens again.
    setsockopt(&socket, ReuseAddr, &true)?;
    setsockopt(&socket, Ipv6V6Only, &false)?;
    let at = std::net::SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, PORT, 0, 0);
    bind(socket.as_raw_fd(), &SockaddrIn6::from(at))?;
    listen(&socket, Backlog::new(BACKLOG)?)?;
    Ok(socket)
}
