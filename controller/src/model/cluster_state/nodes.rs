//! Pure: state of a node, as far as the binding of pods to it depends on it.

use serde_json::Value;

use super::UnixMillis;
use crate::model::object::{hash::stable_json_hash, json::array_items};

/// Time after a rejection during which a node gets no bound pods, in ms.
pub(crate) const REJECTION_BACKOFF_MS: u64 = 60_000;

/// State of a node, as far as the binding of pods to it depends on it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeState {
    /// True if the node's condition `Ready` is `True`.
    is_ready: bool,
    /// True if the node is ready and not cordoned, and neither a taint nor a condition keeps new pods away.
    is_schedulable: bool,
    /// Hashes of the names of the images on the node, sorted.
    image_hashes: Box<[u64]>,
    /// Time of the node's last rejection of a pod.
    last_rejection: Option<UnixMillis>,
}

impl NodeState {
    /// Reads a Node object; `previous` is the earlier state, whose last rejection is kept.
    pub fn from_object(object: &Value, previous: Option<&Self>) -> Self {
        let status = &object["status"];
        let has_condition = |kind: &str| {
            array_items(&status["conditions"])
                .any(|it| it["type"] == kind && it["status"] == "True")
        };
        let blocking_conditions =
            ["MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable"];
        let is_closed = object["spec"]["unschedulable"] == true
            // `PreferNoSchedule` is only a preference; every other effect keeps pods without tolerations away.
            || array_items(&object["spec"]["taints"]).any(|it| it["effect"] != "PreferNoSchedule");
        let names = array_items(&status["images"]).flat_map(|it| array_items(&it["names"]));
        let mut images: Vec<u64> = names.map(stable_json_hash).collect();
        images.sort_unstable();
        let is_ready = has_condition("Ready");
        Self {
            is_ready,
            is_schedulable: is_ready
                && !is_closed
                && !blocking_conditions.into_iter().any(has_condition),
            image_hashes: images.into(),
            last_rejection: previous.and_then(|it| it.last_rejection),
        }
    }

    /// Returns true if Kubernetes reports the node ready.
    pub fn is_ready(&self) -> bool {
        self.is_ready
    }

    /// Records that the node has rejected a pod at this time. A later rejection on record stays.
    pub fn record_rejection(&mut self, at: UnixMillis) {
        self.last_rejection = self.last_rejection.max(Some(at));
    }

    /// Returns true if a pod with these image hashes may be bound to the node at `now`.
    pub(crate) fn accepts_pod(&self, images: &[u64], now: UnixMillis) -> bool {
        let is_backing_off =
            self.last_rejection.is_some_and(|at| now < at.plus_ms(REJECTION_BACKOFF_MS));
        self.is_schedulable
            && !is_backing_off
            && images.iter().all(|it| self.image_hashes.binary_search(it).is_ok())
    }
}
