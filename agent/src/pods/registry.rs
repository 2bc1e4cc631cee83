//! Pure: registry of the pods that the kernel's maps hold: their namespaces, their rows, and the pods to audit.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex},
};

use datapath::abi;

use crate::{
    lock::lock,
    pods::{pod_ports::PodPorts, pod_slots::PodSlots},
};

/// Pods of this node that are registered in the kernel's maps. The rows of unregistered namespaces are here too, until
/// the maps have forgotten these.
#[derive(Debug)]
pub(crate) struct PodRegistry {
    /// Registered pods by uid.
    pods: BTreeMap<String, RegisteredPod>,
    /// Uids of the registered pods, by namespace cookie.
    uids_by_cookie: HashMap<u64, String>,
    slots: PodSlots,
    counted: CountedPods,
}

/// One registered pod, by its namespace and its entry in the kernel's maps. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RegisteredPod {
    /// Cookie of the pod's namespace.
    pub(crate) cookie: u64,
    /// Row and serving port of the pod.
    pub(crate) entry: abi::PodValue,
    /// All ports of the pod that the maps know.
    pub(crate) ports: Arc<PodPorts>,
}

/// Registered pods, shared with the audit of their gauges. Cheap to clone; all clones share the pods.
#[derive(Clone, Debug, Default)]
pub(crate) struct CountedPods(Arc<Mutex<BTreeMap<String, RegisteredPod>>>);

impl PodRegistry {
    /// Starts without pods, and with the rows that the maps hold. Rows that the previous agent allocated stay with
    /// their namespaces: their counters continue.
    pub(crate) fn resume(slots_by_cookie: BTreeMap<u64, u32>) -> Self {
        Self {
            pods: BTreeMap::new(),
            uids_by_cookie: HashMap::new(),
            slots: PodSlots::new(slots_by_cookie),
            counted: CountedPods::default(),
        }
    }

    /// Returns the registered pod with this uid.
    pub(crate) fn get(&self, uid: &str) -> Option<RegisteredPod> {
        self.pods.get(uid).cloned()
    }

    /// Returns the uid of the registered pod in the namespace with this cookie.
    pub(crate) fn uid_by_cookie(&self, cookie: u64) -> Option<&str> {
        self.uids_by_cookie.get(&cookie).map(String::as_str)
    }

    /// Returns the uids of all registered pods.
    pub(crate) fn uids(&self) -> Vec<String> {
        self.pods.keys().cloned().collect()
    }

    /// Returns the number of registered pods.
    pub(crate) fn len(&self) -> usize {
        self.pods.len()
    }

    /// Returns the registered pods that the audit shares.
    pub(crate) fn counted_pods(&self) -> CountedPods {
        self.counted.clone()
    }

    /// Returns the namespace's row, and true if it is newly allocated; `None` if all rows are taken.
    pub(crate) fn allocate_slot(&mut self, cookie: u64) -> Option<(u32, bool)> {
        self.slots.allocate(cookie)
    }

    /// Adds a pod that the maps hold from now on.
    pub(crate) fn insert(&mut self, uid: &str, pod: RegisteredPod) {
        self.uids_by_cookie.insert(pod.cookie, uid.to_owned());
        self.pods.insert(uid.to_owned(), pod.clone());
        self.counted.add(uid, pod);
    }

    /// Removes a pod. Its namespace keeps the row until [`release_slot`](Self::release_slot).
    pub(crate) fn remove(&mut self, uid: &str) -> Option<RegisteredPod> {
        let pod = self.pods.remove(uid)?;
        self.uids_by_cookie.remove(&pod.cookie);
        self.counted.remove(uid);
        Some(pod)
    }

    /// Releases the row of a namespace that the maps no longer hold, and returns the row.
    pub(crate) fn release_slot(&mut self, cookie: u64) -> Option<u32> {
        self.slots.release(cookie)
    }

    /// Returns the cookies of the namespaces that have a row and no pod. A pod of one of the `found` namespaces may
    /// still await its registration.
    pub(crate) fn orphan_cookies(&self, found: &BTreeSet<u64>) -> Vec<u64> {
        let is_orphan =
            |cookie: &u64| !self.uids_by_cookie.contains_key(cookie) && !found.contains(cookie);
        self.slots.cookies().filter(is_orphan).collect()
    }
}

impl CountedPods {
    /// Returns all pods as they are now.
    pub(crate) fn all(&self) -> BTreeMap<String, RegisteredPod> {
        lock(&self.0).clone()
    }

    /// Runs `act` if the pod is still registered in this way, and returns true if it ran. A removal waits for the end
    /// of `act`, and only then is the row released.
    pub(crate) fn if_counted(&self, uid: &str, pod: &RegisteredPod, act: impl FnOnce()) -> bool {
        let registered = lock(&self.0);
        let is_counted = registered.get(uid) == Some(pod);
        if is_counted {
            act();
        }
        is_counted
    }

    fn add(&self, uid: &str, pod: RegisteredPod) {
        lock(&self.0).insert(uid.to_owned(), pod);
    }

    /// Removes a pod. After this no correction is added to its gauges, so its row may become another pod's.
    fn remove(&self, uid: &str) {
        lock(&self.0).remove(uid);
    }
}

#[cfg(test)]
impl RegisteredPod {
    /// Returns a pod of a Revision, with port 8080.
    pub(crate) fn for_test(cookie: u64, slot: u32) -> Self {
        let revision = common::wire::NamespacedName::new("default", "hello-00001");
        let phase = common::wire::RoutingPhase::Ready;
        let ports = PodPorts::of_pod(&common::fixtures::pod("a", &revision, phase), false);
        let entry = ports.registration(slot, false).entry();
        Self { cookie, entry, ports: ports.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(cookie: u64, slot: u32) -> RegisteredPod {
        RegisteredPod::for_test(cookie, slot)
    }

    #[test]
    fn a_registered_pod_is_found_by_uid_and_by_namespace_until_it_is_removed() {
        let mut registry = PodRegistry::resume(BTreeMap::new());
        assert_eq!(registry.allocate_slot(70), Some((1, true)));
        registry.insert("a", pod(70, 1));
        assert_eq!((registry.get("a"), registry.uid_by_cookie(70)), (Some(pod(70, 1)), Some("a")));
        assert_eq!((registry.uids(), registry.len()), (vec!["a".to_owned()], 1));
        assert_eq!(registry.remove("a"), Some(pod(70, 1)));
        assert_eq!((registry.get("a"), registry.uid_by_cookie(70)), (None, None));
        assert_eq!(registry.remove("a"), None);
    }

    #[test]
    fn namespaces_without_a_pod_keep_their_rows_until_they_are_released() {
        let mut registry = PodRegistry::resume(BTreeMap::from([(70, 1), (80, 2)]));
        registry.insert("a", pod(70, 1));
        let none_found = BTreeSet::new();
        assert_eq!(registry.orphan_cookies(&none_found), [80]);
        registry.remove("a");
        assert_eq!(registry.orphan_cookies(&none_found), [70, 80]);
        assert_eq!(registry.release_slot(80), Some(2));
        assert_eq!(registry.orphan_cookies(&none_found), [70]);
        assert_eq!(registry.allocate_slot(70), Some((1, false)), "its counters continue");
    }

    #[test]
    fn a_pod_that_awaits_its_registration_keeps_its_row() {
        let mut registry = PodRegistry::resume(BTreeMap::from([(70, 1)]));
        assert_eq!(registry.allocate_slot(80), Some((2, true)));
        assert_eq!(registry.orphan_cookies(&BTreeSet::from([80])), [70]);
        assert_eq!(registry.orphan_cookies(&BTreeSet::new()), [70, 80], "the pod is gone");
    }

    #[test]
    fn nothing_is_done_for_a_pod_that_is_gone_or_another() {
        let mut registry = PodRegistry::resume(BTreeMap::new());
        let counted = registry.counted_pods();
        registry.insert("a", pod(70, 1));
        assert_eq!(counted.all(), BTreeMap::from([("a".to_owned(), pod(70, 1))]));
        let mut times = 0;
        assert!(counted.if_counted("a", &pod(70, 1), || times += 1));
        assert!(!counted.if_counted("a", &pod(80, 1), || times += 1), "in a new namespace");
        registry.remove("a");
        assert!(!counted.if_counted("a", &pod(70, 1), || times += 1), "gone");
        assert_eq!(times, 1);
    }
}
