//! Shell: pods that may stop, and `GET /wait-for-drain`, by which the kubelet waits before it stops a container.

use std::{
    collections::BTreeSet,
    io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    extract::{ConnectInfo, State},
    http::StatusCode,
};
use tokio::{
    sync::{Notify, watch},
    time::sleep,
};
use tracing::{info, warn};

use super::PodServerState;
use crate::{
    lock::lock,
    pods::{namespace, types::PodTrackerEvent},
};

/// Pause before the node's addresses are read again after a failure.
const ADDRESS_RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Pods that may stop. Cheap to clone; all clones share the pods.
#[derive(Clone, Debug, Default)]
pub struct PreStopHooks(Arc<PreStopHooksInner>);

#[derive(Debug, Default)]
struct PreStopHooksInner {
    released: Mutex<BTreeSet<String>>,
    changed: Notify,
    /// Number of preStop requests without a response yet.
    open_requests: watch::Sender<usize>,
}

impl PreStopHooks {
    /// Releases a pod that has drained: its preStop requests get their response.
    pub fn release(&self, uid: &str) {
        self.with_released(|pods| pods.insert(uid.to_owned()));
        self.0.changed.notify_waiters();
    }

    /// Forgets a pod that is gone.
    pub fn forget(&self, uid: &str) {
        self.with_released(|pods| pods.remove(uid));
    }

    /// Waits until the pod may stop.
    async fn wait_until_released(&self, uid: &str) {
        loop {
            let changed = self.0.changed.notified();
            tokio::pin!(changed);
            // From here on no release is missed, so the check below has no race.
            changed.as_mut().enable();
            if self.with_released(|pods| pods.contains(uid)) {
                return;
            }
            changed.await;
        }
    }

    /// Waits until every preStop request has its response.
    pub async fn wait_until_none_open(&self) {
        let mut open = self.0.open_requests.subscribe();
        // The channel is never closed, as `self` holds its sender.
        let _none = open.wait_for(|open| *open == 0).await;
    }

    /// Counts one more waiting preStop request, until the returned value is dropped.
    fn track_request(&self) -> OpenPreStopHook {
        self.0.open_requests.send_modify(|open| *open += 1);
        OpenPreStopHook(self.clone())
    }

    fn with_released<T>(&self, act: impl FnOnce(&mut BTreeSet<String>) -> T) -> T {
        act(&mut lock(&self.0.released))
    }
}

/// A preStop request without a response yet.
#[derive(Debug)]
struct OpenPreStopHook(PreStopHooks);

impl Drop for OpenPreStopHook {
    fn drop(&mut self) {
        self.0.0.open_requests.send_modify(|open| *open -= 1);
    }
}

/// Responds once the pod may stop. Only the node itself may send this request, because it makes a pod drain.
pub(super) async fn handle_wait_for_drain(
    State(state): State<PodServerState>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
) -> StatusCode {
    let PodServerState { uid, servers, stop, .. } = state;
    let is_from_node = tokio::select! {
        is_from_node = is_node_address(peer.ip(), namespace::own_addresses) => is_from_node,
        () = stop.cancelled() => return StatusCode::SERVICE_UNAVAILABLE,
    };
    if !is_from_node {
        warn!(uid, %peer, "a client other than the kubelet asks to stop the pod: refused");
        return StatusCode::FORBIDDEN;
    }
    info!(uid, %peer, "the kubelet waits to stop the pod");
    // Counted before the event is sent: an agent that stops now waits for this response.
    let _open = servers.prestop_hooks.track_request();
    // A failed send means that the agent is stopping.
    let _ = servers.events.send(PodTrackerEvent::PreStopRequested(uid.clone())).await;
    tokio::select! {
        () = servers.prestop_hooks.wait_until_released(&uid) => StatusCode::OK,
        // The pod is gone, or the agent stops.
        () = stop.cancelled() => StatusCode::SERVICE_UNAVAILABLE,
    }
}

/// Returns true if an address belongs to the namespace that the agent runs in, which is the node's. `read_own` reads
/// the addresses there.
///
/// While they cannot be read, the request waits: the kubelet stops the container after any response, also a refusal.
async fn is_node_address(
    ip: IpAddr,
    mut read_own: impl FnMut() -> io::Result<Vec<IpAddr>>,
) -> bool {
    loop {
        match read_own() {
            Ok(own) => return own.contains(&ip.to_canonical()),
            Err(error) => warn!(%error, "cannot read the node's own addresses"),
        }
        sleep(ADDRESS_RETRY_PAUSE).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_waiting_request_gets_its_response_once_the_pod_may_stop() {
        let hooks = PreStopHooks::default();
        let waiting = tokio::spawn({
            let hooks = hooks.clone();
            async move { hooks.wait_until_released("a").await }
        });
        tokio::task::yield_now().await;
        hooks.release("b");
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished(), "another pod's");
        hooks.release("a");
        waiting.await.expect("released");
        hooks.wait_until_released("a").await;
        hooks.forget("a");
        assert!(!hooks.with_released(|pods| pods.contains("a")));
    }

    #[tokio::test]
    async fn a_stopping_agent_waits_for_the_last_response() {
        let hooks = PreStopHooks::default();
        hooks.wait_until_none_open().await;
        let requests = [hooks.track_request(), hooks.track_request()];
        let waiting = tokio::spawn({
            let hooks = hooks.clone();
            async move { hooks.wait_until_none_open().await }
        });
        let mut left = requests.into_iter();
        drop(left.next());
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished(), "one still waits");
        drop(left.next());
        waiting.await.expect("all have their response");
    }

    #[tokio::test]
    async fn only_the_nodes_own_addresses_are_the_kubelets() {
        assert!(!is_node_address([192, 0, 2, 7].into(), namespace::own_addresses).await);
        for own in namespace::own_addresses().expect("netlink") {
            assert!(is_node_address(own, namespace::own_addresses).await, "{own}");
        }
    }

    #[tokio::test]
    async fn the_kubelet_is_not_refused_while_the_nodes_addresses_are_unknown() {
        let kubelet = IpAddr::from([10, 0, 0, 1]);
        let mut reads = 0;
        let read_own = || {
            reads += 1;
            if reads < 3 { Err(io::Error::other("no file descriptor")) } else { Ok(vec![kubelet]) }
        };
        assert!(is_node_address(kubelet, read_own).await);
        assert_eq!(reads, 3);
    }
}
