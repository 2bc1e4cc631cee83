//! Shell: pods that may stop, and `GET /wait-for-drain`, by which the kubelet waits before it stops a container.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex},
};

use axum::{
    extract::{ConnectInfo, State},
    http::StatusCode,
};
use tokio::sync::{Notify, watch};
use tracing::{info, warn};

use super::Asked;
use crate::{
    lock,
    pods::{Event, namespace},
};

/// Pods that may stop. Cheap to clone; all clones share the pods.
#[derive(Clone, Debug, Default)]
pub struct Drains(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    may_stop: Mutex<BTreeSet<String>>,
    changed: Notify,
    /// Number of preStop requests without a response yet.
    open: watch::Sender<usize>,
}

impl Drains {
    /// Releases a pod that has drained: its preStop requests get their response.
    pub fn release(&self, uid: &str) {
        self.with(|pods| pods.insert(uid.to_owned()));
        self.0.changed.notify_waiters();
    }

    /// Forgets a pod that is gone.
    pub fn forget(&self, uid: &str) {
        self.with(|pods| pods.remove(uid));
    }

    /// Waits until the pod may stop.
    async fn released(&self, uid: &str) {
        loop {
            let changed = self.0.changed.notified();
            tokio::pin!(changed);
            // From here on no release is missed, so the check below has no race.
            changed.as_mut().enable();
            if self.with(|pods| pods.contains(uid)) {
                return;
            }
            changed.await;
        }
    }

    /// Waits until every preStop request has its response.
    pub async fn all_answered(&self) {
        let mut open = self.0.open.subscribe();
        // The channel is never closed, as `self` holds its sender.
        let _none = open.wait_for(|open| *open == 0).await;
    }

    /// Counts one more waiting preStop request, until the returned value is dropped.
    fn asked(&self) -> Question {
        self.0.open.send_modify(|open| *open += 1);
        Question(self.clone())
    }

    fn with<T>(&self, act: impl FnOnce(&mut BTreeSet<String>) -> T) -> T {
        act(&mut lock(&self.0.may_stop))
    }
}

/// A preStop request without a response yet.
#[derive(Debug)]
struct Question(Drains);

impl Drop for Question {
    fn drop(&mut self) {
        self.0.0.open.send_modify(|open| *open -= 1);
    }
}

/// Responds once the pod may stop. Only the node itself may send this request, because it makes a pod drain.
pub(super) async fn wait(
    State(asked): State<Asked>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
) -> StatusCode {
    let Asked { uid, doors, stop, .. } = asked;
    if !is_of_this_node(peer.ip()) {
        warn!(uid, %peer, "somebody else than the kubelet asks to stop the pod: refused");
        return StatusCode::FORBIDDEN;
    }
    info!(uid, %peer, "the kubelet waits to stop the pod");
    // Counted before the event is sent: an agent that stops now waits for this response.
    let _open = doors.drains.asked();
    // A failed send means that the agent is stopping.
    let _ = doors.events.send(Event::Asked(uid.clone())).await;
    tokio::select! {
        () = doors.drains.released(&uid) => StatusCode::OK,
        // The pod is gone, or the agent stops.
        () = stop.cancelled() => StatusCode::SERVICE_UNAVAILABLE,
    }
}

/// Returns true if an address belongs to the namespace that the agent runs in, which is the node's.
fn is_of_this_node(ip: IpAddr) -> bool {
    let own = namespace::own_addresses().unwrap_or_default();
    own.contains(&ip.to_canonical())
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
