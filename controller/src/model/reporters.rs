//! Pure: reports of agents and activators → what the controller waits for. There are three kinds of reports. By a drain
//! acknowledgement, a reporter no longer connects to a draining pod. By a routed service, the Route of the service may
//! be ready. By a passed-over pod, an activator sends no requests to a frozen pod.
//!
//! Every agent and activator reports to every replica of the controller, whichever of them serves its routes. For each
//! draining pod it acknowledges that none of its new connections goes there; the leader waits until all have done so.
//! Versions of the RouteTable play no part, since they compare within one stream only.
//!
//! After a start, silence is no acknowledgement. So an agent or activator that runs according to the API server, and
//! does not report here, is missing as well.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{Hash, Hasher as _},
};

use common::wire::{ClientComponent, NamespacedName};

/// Identifier of an agent or activator, from role and name. An agent has its node's name, an activator its pod's.
pub fn reporter_id(role: ClientComponent, name: &str) -> String {
    format!("{role:?}/{name}")
}

/// Agents and activators, with what each has reported: drain acknowledgements, the services that it routes, and the pods
/// that it passes over.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReporterStates {
    reporters: BTreeMap<String, ReporterState>,
    /// Agents and activators that run according to the API server, each with its pod.
    expected_reporters: BTreeMap<String, String>,
}

/// Reports of one agent or activator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ReporterState {
    /// Number of its newest stream of reports.
    stream: u64,
    acked_pods: BTreeSet<String>,
    /// Pods acknowledged on an earlier stream, and not yet on the newest one. `handle_synced` removes them.
    unconfirmed_pods: BTreeSet<String>,
    /// Services that it routes to a Revision, or those of an agent that await agents and to which it leads connects;
    /// `None`: it does not report them.
    routed_services: Option<RoutedServices>,
    /// Pods with a standby order to which it sends no new requests, because nothing shows that they were thawed.
    passed_over_pods: BTreeSet<String>,
    /// Passed-over pods that an earlier stream named, and the newest one has not yet. `handle_synced` removes them.
    unconfirmed_passed_over: BTreeSet<String>,
}

/// Services by the hashes of their names: an activator may have tens of thousands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct RoutedServices {
    name_hashes: BTreeSet<u64>,
    /// True once its newest stream has named all of them.
    is_complete: bool,
}

fn hash_name(name: &NamespacedName) -> u64 {
    let mut hasher = std::hash::DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish()
}

impl ReporterStates {
    /// Records a new stream of `reporter`, which sends its acknowledgements again. Returns false, and changes nothing,
    /// if a newer stream is open: two streams of one reporter may begin in either order.
    pub fn begin_stream(&mut self, reporter: &str, stream: u64) -> bool {
        let state = self.reporters.entry(reporter.to_owned()).or_default();
        if stream < state.stream {
            return false;
        }
        // Acknowledgements of the old stream stay until `handle_synced`: a reconnect must not delay a drain.
        state.stream = stream;
        state.unconfirmed_pods = state.acked_pods.clone();
        state.unconfirmed_passed_over = state.passed_over_pods.clone();
        state.routed_services = None;
        true
    }

    /// Records that `reporter` reports each service that it routes.
    pub fn begin_routed_services(&mut self, reporter: &str, stream: u64) {
        if let Some(state) = self.current_reporter(reporter, stream) {
            state.routed_services.get_or_insert_default();
        }
    }

    /// Records that `reporter` routes this service.
    pub fn add_routed_service(&mut self, reporter: &str, stream: u64, name: &NamespacedName) {
        if let Some(routed) = self.routed_services(reporter, stream) {
            routed.name_hashes.insert(hash_name(name));
        }
    }

    /// Records that `reporter` no longer routes this service, or no longer reports it.
    pub fn remove_routed_service(&mut self, reporter: &str, stream: u64, name: &NamespacedName) {
        if let Some(routed) = self.routed_services(reporter, stream) {
            routed.name_hashes.remove(&hash_name(name));
        }
    }

    /// Returns true if all of this role that report their services route this one. One of an earlier release, or one
    /// that has not named all yet, is not waited for.
    pub fn is_routed_by_all(&self, role: ClientComponent, name: &NamespacedName) -> bool {
        let hash = hash_name(name);
        self.complete_lists(role).all(|it| it.name_hashes.contains(&hash))
    }

    /// Returns true if any of this role has named all services that it routes.
    pub fn has_complete_list(&self, role: ClientComponent) -> bool {
        self.complete_lists(role).next().is_some()
    }

    /// Iterates over the services of each of this role that has named all of them.
    fn complete_lists(&self, role: ClientComponent) -> impl Iterator<Item = &RoutedServices> {
        let prefix = reporter_id(role, "");
        let of_role = self.reporters.iter().filter(move |(id, _)| id.starts_with(&prefix));
        of_role.filter_map(|(_, it)| it.routed_services.as_ref()).filter(|it| it.is_complete)
    }

    /// Records that `reporter` opens no connection to this draining pod.
    pub fn acknowledge(&mut self, reporter: &str, stream: u64, uid: &str) {
        if let Some(state) = self.current_reporter(reporter, stream) {
            state.unconfirmed_pods.remove(uid);
            state.acked_pods.insert(uid.to_owned());
        }
    }

    /// Records that `reporter` may open connections to the pod again.
    pub fn withdraw(&mut self, reporter: &str, stream: u64, uid: &str) {
        if let Some(state) = self.current_reporter(reporter, stream) {
            state.unconfirmed_pods.remove(uid);
            state.acked_pods.remove(uid);
        }
    }

    /// Records that `reporter` sends no new requests to this pod.
    pub fn pass_over(&mut self, reporter: &str, stream: u64, uid: &str) {
        if let Some(state) = self.current_reporter(reporter, stream) {
            state.unconfirmed_passed_over.remove(uid);
            state.passed_over_pods.insert(uid.to_owned());
        }
    }

    /// Records that `reporter` sends requests to the pod again.
    pub fn use_again(&mut self, reporter: &str, stream: u64, uid: &str) {
        if let Some(state) = self.current_reporter(reporter, stream) {
            state.unconfirmed_passed_over.remove(uid);
            state.passed_over_pods.remove(uid);
        }
    }

    /// Returns true if any reporter passes this pod over.
    pub fn is_passed_over(&self, uid: &str) -> bool {
        self.reporters.values().any(|it| it.passed_over_pods.contains(uid))
    }

    /// Returns all pods that some reporter passes over.
    pub fn passed_over_pods(&self) -> BTreeSet<String> {
        self.reporters.values().flat_map(|it| &it.passed_over_pods).cloned().collect()
    }

    /// Records that the stream of `reporter` has named everything.
    pub fn handle_synced(&mut self, reporter: &str, stream: u64) {
        if let Some(state) = self.current_reporter(reporter, stream) {
            if let Some(routed) = &mut state.routed_services {
                routed.is_complete = true;
            }
            // The stream has named all it acknowledges, so the rest of the earlier ones is outdated.
            let unnamed = std::mem::take(&mut state.unconfirmed_pods);
            state.acked_pods.retain(|uid| !unnamed.contains(uid));
            let unnamed = std::mem::take(&mut state.unconfirmed_passed_over);
            state.passed_over_pods.retain(|uid| !unnamed.contains(uid));
        }
    }

    /// Records the end of a stream. If `reporter` has opened a newer one meanwhile, nothing changes.
    pub fn end_stream(&mut self, reporter: &str, stream: u64) {
        if self.reporters.get(reporter).is_some_and(|it| it.stream == stream) {
            self.reporters.remove(reporter);
        }
    }

    /// Records that `reporter` runs in this pod, according to the API server.
    pub fn expect_reporter(&mut self, reporter: &str, pod: &str) {
        self.expected_reporters.insert(reporter.to_owned(), pod.to_owned());
    }

    /// Records that the pod is gone. Returns the agents and activators that ran in it.
    pub fn remove_reporter_pod(&mut self, pod: &str) -> Vec<String> {
        let lost = self.expected_reporters.extract_if(.., |_, runs| runs == pod);
        lost.map(|(reporter, _)| reporter).collect()
    }

    /// Returns true if `reporter` runs according to the API server.
    pub fn is_expected(&self, reporter: &str) -> bool {
        self.expected_reporters.contains_key(reporter)
    }

    /// Returns true if `reporter` has an open stream of reports.
    pub fn is_reporting(&self, reporter: &str) -> bool {
        self.reporters.contains_key(reporter)
    }

    /// Number of agents and activators that report.
    pub fn len(&self) -> usize {
        self.reporters.len()
    }

    /// Returns true if no agent or activator reports.
    pub fn is_empty(&self) -> bool {
        self.reporters.is_empty()
    }

    /// Removes all acknowledgements of a pod, which serves again or is gone.
    ///
    /// Without this, a pod that drains a second time could be stopped by acknowledgements of the first.
    pub fn forget_pod(&mut self, uid: &str) {
        for state in self.reporters.values_mut() {
            state.acked_pods.remove(uid);
            state.unconfirmed_pods.remove(uid);
        }
    }

    /// Agents and activators that have not acknowledged the pod's drain.
    pub fn missing_acks<'a>(&'a self, uid: &'a str) -> impl Iterator<Item = &'a str> {
        // One that runs without a stream may still send connections to the pod.
        let silent = self
            .expected_reporters
            .keys()
            .filter(|reporter| !self.reporters.contains_key(*reporter));
        let all = self
            .reporters
            .iter()
            .filter(|(_, it)| !it.acked_pods.contains(uid))
            .map(|(reporter, _)| reporter);
        all.chain(silent).map(String::as_str)
    }

    /// Returns true if all have acknowledged the pod's drain.
    pub fn is_acknowledged_by_all(&self, uid: &str) -> bool {
        self.missing_acks(uid).next().is_none()
    }

    /// Services that `reporter` reports as routed. `None` before `begin_routed_services`: these may be only some.
    fn routed_services(&mut self, reporter: &str, stream: u64) -> Option<&mut RoutedServices> {
        self.current_reporter(reporter, stream)?.routed_services.as_mut()
    }

    /// The reports of `reporter`, if `stream` is its newest: late items of an older stream have no effect.
    fn current_reporter(&mut self, reporter: &str, stream: u64) -> Option<&mut ReporterState> {
        self.reporters.get_mut(reporter).filter(|it| it.stream == stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missing(reporters: &ReporterStates) -> Vec<&str> {
        reporters.missing_acks("p").collect()
    }

    #[test]
    fn a_drain_is_acknowledged_once_all_reporters_acknowledge() {
        let mut all = ReporterStates::default();
        assert!(all.is_acknowledged_by_all("p"));
        all.begin_stream("agent/n1", 1);
        all.begin_stream("activator/a", 2);
        all.acknowledge("agent/n1", 1, "p");
        assert_eq!(missing(&all), ["activator/a"]);
        all.acknowledge("activator/a", 2, "p");
        assert!(all.is_acknowledged_by_all("p"));
        all.withdraw("agent/n1", 1, "p");
        assert_eq!(missing(&all), ["agent/n1"]);
        all.end_stream("agent/n1", 1);
        assert!(all.is_acknowledged_by_all("p"));
    }

    #[test]
    fn a_new_stream_keeps_only_the_acks_that_it_repeats() {
        let mut all = ReporterStates::default();
        all.begin_stream("a", 1);
        all.acknowledge("a", 1, "p");
        all.acknowledge("a", 1, "q");
        all.begin_stream("a", 2);
        // The old stream ends after the new one begins, and its last items may still arrive.
        all.withdraw("a", 1, "p");
        all.end_stream("a", 1);
        assert!(all.is_acknowledged_by_all("p"), "it has not said otherwise");
        all.acknowledge("a", 2, "p");
        all.handle_synced("a", 2);
        assert!(all.is_acknowledged_by_all("p"));
        assert!(!all.is_acknowledged_by_all("q"));
    }

    #[test]
    fn an_older_stream_that_begins_late_changes_nothing() {
        let mut all = ReporterStates::default();
        assert!(all.begin_stream("a", 2));
        all.acknowledge("a", 2, "p");
        assert!(!all.begin_stream("a", 1));
        all.withdraw("a", 1, "p");
        all.end_stream("a", 1);
        assert!(all.is_reporting("a"), "its newer stream is open");
        all.handle_synced("a", 2);
        assert!(all.is_acknowledged_by_all("p"));
    }

    #[test]
    fn a_running_reporter_without_a_stream_is_missing() {
        let mut all = ReporterStates::default();
        all.expect_reporter("agent/n1", "agent-x");
        assert_eq!(missing(&all), ["agent/n1"]);
        all.begin_stream("agent/n1", 1);
        all.acknowledge("agent/n1", 1, "p");
        assert!(all.is_acknowledged_by_all("p"));
        all.end_stream("agent/n1", 1);
        assert_eq!(missing(&all), ["agent/n1"], "its programs may still send");
        assert_eq!(
            (all.remove_reporter_pod("other"), all.remove_reporter_pod("agent-x")),
            (vec![], vec!["agent/n1".into()])
        );
        assert!(all.is_acknowledged_by_all("p"));
    }

    #[test]
    fn a_pod_is_passed_over_while_any_reporter_does_so_and_a_new_stream_repeats_it() {
        let mut all = ReporterStates::default();
        all.begin_stream("a", 1);
        all.begin_stream("b", 2);
        all.pass_over("a", 1, "p");
        all.pass_over("b", 2, "p");
        all.pass_over("b", 2, "q");
        all.use_again("a", 1, "p");
        assert_eq!(all.passed_over_pods(), ["p", "q"].map(String::from).into());
        // Until the new stream has named everything, nothing has changed.
        all.begin_stream("b", 3);
        all.use_again("b", 2, "p");
        all.pass_over("b", 3, "p");
        assert!(all.is_passed_over("p") && all.is_passed_over("q"));
        all.handle_synced("b", 3);
        assert!(all.is_passed_over("p") && !all.is_passed_over("q"));
        all.forget_pod("p");
        assert!(all.is_passed_over("p"), "that concerns drains");
        all.end_stream("b", 3);
        assert_eq!(all.passed_over_pods(), BTreeSet::new());
    }

    #[test]
    fn earlier_acks_do_not_count_once_a_pod_serves_again() {
        let mut all = ReporterStates::default();
        all.begin_stream("a", 1);
        all.acknowledge("a", 1, "p");
        all.forget_pod("p");
        assert_eq!(missing(&all), ["a"]);
        all.acknowledge("a", 1, "p");
        assert!(all.is_acknowledged_by_all("p"));
    }
}
