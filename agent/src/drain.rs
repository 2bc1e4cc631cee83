//! Shell: answers `GET :8022/wait-for-drain`, which the kubelet asks of a pod's own address before it stops a container.
//!
//! The socket is opened inside the pod's network namespace and belongs to the agent: the pod's processes see a port in
//! use and nothing else. Knative keeps the port from users (knative/serving `pkg/networking/constants.go`). Without an
//! agent nobody listens, so that the kubelet is refused at once and stops the pod as ever.

use std::{
    collections::BTreeSet,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
    os::fd::{AsRawFd as _, OwnedFd},
    sync::{Arc, Mutex, PoisonError},
};

use axum::{
    Router,
    extract::{ConnectInfo, State},
    http::StatusCode,
    routing::get,
};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, SockaddrIn6, bind, listen, setsockopt, socket,
    sockopt::{Ipv6V6Only, ReuseAddr},
};
use tokio::sync::{Notify, mpsc::Sender, watch};
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::{info, warn};

use crate::pods::{
    Event,
    namespace::{self, Namespace},
};

/// Where the kubelet asks. Reserved by Knative, so that no user's container has it.
pub const PORT: u16 = 8022;
/// Every container of a pod asks once.
const BACKLOG: i32 = 16;

/// Pods that may stop. Cheap to clone; all clones are the same.
#[derive(Clone, Debug, Default)]
pub struct Drains(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    may_stop: Mutex<BTreeSet<String>>,
    changed: Notify,
    /// Questions without an answer yet.
    open: watch::Sender<usize>,
}

impl Drains {
    /// The pod has nothing left to do: who waits for it goes on.
    pub fn release(&self, uid: &str) {
        self.with(|pods| pods.insert(uid.to_owned()));
        self.0.changed.notify_waiters();
    }

    /// The pod is no more.
    pub fn forget(&self, uid: &str) {
        self.with(|pods| pods.remove(uid));
    }

    /// Waits until the pod may stop.
    async fn released(&self, uid: &str) {
        loop {
            let changed = self.0.changed.notified();
            tokio::pin!(changed);
            // From here on no release goes by unseen.
            changed.as_mut().enable();
            if self.with(|pods| pods.contains(uid)) {
                return;
            }
            changed.await;
        }
    }

    /// Waits until nobody waits for an answer.
    pub async fn all_answered(&self) {
        let mut open = self.0.open.subscribe();
        // It is never closed: the sender is this.
        let _none = open.wait_for(|open| *open == 0).await;
    }

    /// One more waits, until what this gives is dropped.
    fn asked(&self) -> Question {
        self.0.open.send_modify(|open| *open += 1);
        Question(self.clone())
    }

    fn with<T>(&self, act: impl FnOnce(&mut BTreeSet<String>) -> T) -> T {
        act(&mut self.0.may_stop.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A question of the kubelet's that has no answer yet.
#[derive(Debug)]
struct Question(Drains);

impl Drop for Question {
    fn drop(&mut self) {
        self.0.0.open.send_modify(|open| *open -= 1);
    }
}

/// What every door needs.
#[derive(Clone, Debug)]
pub struct Doors {
    /// Where the answers come from.
    pub drains: Drains,
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
        let listener = of.within("preStop port 8022", opened)?;
        let stop = CancellationToken::new();
        let asked = Asked { uid: uid.to_owned(), doors: self.clone(), stop: stop.clone() };
        tokio::spawn(async move {
            let uid = asked.uid.clone();
            if let Err(error) = serve(listener, asked).await {
                warn!(uid, %error, "cannot answer the kubelet before the pod stops");
            }
        });
        Ok(Door { cookie, _stop: stop.drop_guard() })
    }
}

#[derive(Clone, Debug)]
struct Asked {
    uid: String,
    doors: Doors,
    stop: CancellationToken,
}

async fn serve(listener: TcpListener, asked: Asked) -> io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let stop = asked.stop.clone().cancelled_owned();
    let pages = Router::new().route("/wait-for-drain", get(wait)).with_state(asked);
    let pages = pages.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener, pages).with_graceful_shutdown(stop).await
}

/// Answers once the pod may stop. Only the node itself may ask: to be asked makes a pod leave.
async fn wait(
    State(asked): State<Asked>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
) -> StatusCode {
    let Asked { uid, doors, stop } = asked;
    if !is_of_this_node(peer.ip()) {
        warn!(uid, %peer, "somebody else than the kubelet asks to stop the pod: refused");
        return StatusCode::FORBIDDEN;
    }
    info!(uid, %peer, "the kubelet waits to stop the pod");
    let _open = doors.drains.asked();
    // Nobody listens any more: the agent is stopping.
    let _ = doors.events.send(Event::Asked(uid.clone())).await;
    tokio::select! {
        () = doors.drains.released(&uid) => StatusCode::OK,
        // The pod or the agent has gone.
        () = stop.cancelled() => StatusCode::SERVICE_UNAVAILABLE,
    }
}

/// Whether an address is one of the namespace that the agent runs in, which is the node's.
fn is_of_this_node(ip: IpAddr) -> bool {
    let own = namespace::own_addresses().unwrap_or_default();
    own.contains(&ip.to_canonical())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn whoever_waits_goes_on_when_the_pod_may_stop() {
        let drains = Drains::default();
        let waiting = tokio::spawn({
            let drains = drains.clone();
            async move { drains.released("a").await }
        });
        tokio::task::yield_now().await;
        drains.release("b");
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished(), "another pod's");
        drains.release("a");
        waiting.await.expect("released");
        drains.released("a").await;
        drains.forget("a");
        assert!(!drains.with(|pods| pods.contains("a")));
    }

    #[tokio::test]
    async fn an_agent_that_is_to_end_waits_for_the_last_answer() {
        let drains = Drains::default();
        drains.all_answered().await;
        let questions = [drains.asked(), drains.asked()];
        let waiting = tokio::spawn({
            let drains = drains.clone();
            async move { drains.all_answered().await }
        });
        let mut left = questions.into_iter();
        drop(left.next());
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished(), "one still waits");
        drop(left.next());
        waiting.await.expect("all have their answer");
    }

    #[test]
    fn only_the_nodes_own_addresses_are_the_kubelets() {
        assert!(!is_of_this_node([192, 0, 2, 7].into()));
        for own in namespace::own_addresses().expect("netlink") {
            assert!(is_of_this_node(own), "{own}");
        }
    }
}
