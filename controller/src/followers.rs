//! Pure: drain acknowledgements, by which agents and activators state that they no longer connect to a draining pod.
//!
//! Every agent and activator reports to every replica of the controller, whichever of them serves its routes. For each
//! draining pod it acknowledges that none of its new connections goes there; the leader waits until all have done so.
//! Versions of the RouteTable play no part, since they compare within one stream only. An agent or activator that runs
//! according to the API server, and does not report here, is missing as well: after a start, silence is no
//! acknowledgement.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{Hash, Hasher as _},
};

use common::wire::{ComponentRole, NamespacedName};

/// Identifier of an agent or activator, from role and name. An agent has its node's name, an activator its pod's.
pub fn named(role: ComponentRole, name: &str) -> String {
    format!("{role:?}/{name}")
}

/// Agents and activators, with the draining pods that each has acknowledged.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DrainAcks {
    all: BTreeMap<String, ReporterAcks>,
    /// Agents and activators that run according to the API server, each with its pod.
    expected: BTreeMap<String, String>,
}

/// Reports of one agent or activator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ReporterAcks {
    /// Number of its newest stream of reports.
    stream: u64,
    avoids: BTreeSet<String>,
    /// Pods acknowledged on an earlier stream, and not yet on the newest one. `synced` removes them.
    unnamed: BTreeSet<String>,
    /// Services that it routes to a Revision; `None`: it does not report them.
    routed: Option<RoutedServices>,
}

/// Services by the hashes of their names: an activator may have tens of thousands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct RoutedServices {
    all: BTreeSet<u64>,
    /// True once its newest stream has named all of them.
    is_whole: bool,
}

fn hash(name: &NamespacedName) -> u64 {
    let mut hasher = std::hash::DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish()
}

impl DrainAcks {
    /// Records a new stream of `who`, which sends its acknowledgements again.
    pub fn begin(&mut self, who: &str, stream: u64) {
        let follower = self.all.entry(who.to_owned()).or_default();
        // Acknowledgements of the old stream stay until `synced`: a reconnect must not delay a drain.
        follower.stream = stream;
        follower.unnamed = follower.avoids.clone();
        follower.routed = None;
    }

    /// Records that `who` reports each service that it routes to a Revision.
    pub fn names_routed(&mut self, who: &str, stream: u64) {
        if let Some(follower) = self.current(who, stream) {
            follower.routed.get_or_insert_default();
        }
    }

    /// Records that `who` routes this service to a Revision, or with `leads` false that it no longer does.
    pub fn routed(&mut self, who: &str, stream: u64, name: &NamespacedName, leads: bool) {
        // Without `names_routed` before it, a report of services is of no known extent.
        if let Some(routed) = self.current(who, stream).and_then(|it| it.routed.as_mut()) {
            _ = if leads { routed.all.insert(hash(name)) } else { routed.all.remove(&hash(name)) };
        }
    }

    /// Returns true if all that report their services route this one to a Revision. One of an earlier release, or one
    /// that has not named all yet, is not waited for.
    pub fn all_route(&self, name: &NamespacedName) -> bool {
        let hash = hash(name);
        let mut say = self.all.values().filter_map(|it| it.routed.as_ref());
        say.all(|it| !it.is_whole || it.all.contains(&hash))
    }

    /// Records that `who` opens no connection to this draining pod.
    pub fn avoids(&mut self, who: &str, stream: u64, uid: &str) {
        if let Some(follower) = self.current(who, stream) {
            follower.unnamed.remove(uid);
            follower.avoids.insert(uid.to_owned());
        }
    }

    /// Records that `who` may open connections to the pod again.
    pub fn avoids_no_more(&mut self, who: &str, stream: u64, uid: &str) {
        if let Some(follower) = self.current(who, stream) {
            follower.unnamed.remove(uid);
            follower.avoids.remove(uid);
        }
    }

    /// Records that the stream of `who` has named everything.
    pub fn synced(&mut self, who: &str, stream: u64) {
        if let Some(follower) = self.current(who, stream) {
            if let Some(routed) = &mut follower.routed {
                routed.is_whole = true;
            }
            // The stream has named all it acknowledges, so the rest of the earlier ones is outdated.
            let unnamed = std::mem::take(&mut follower.unnamed);
            follower.avoids.retain(|uid| !unnamed.contains(uid));
        }
    }

    /// Records the end of a stream. If `who` has opened a newer one meanwhile, nothing changes.
    pub fn end(&mut self, who: &str, stream: u64) {
        if self.all.get(who).is_some_and(|it| it.stream == stream) {
            self.all.remove(who);
        }
    }

    /// Records that `who` runs in this pod, according to the API server.
    pub fn expect(&mut self, who: &str, pod: &str) {
        self.expected.insert(who.to_owned(), pod.to_owned());
    }

    /// Records that the pod is gone. Returns the agents and activators that ran in it.
    pub fn lose(&mut self, pod: &str) -> Vec<String> {
        let lost = self.expected.extract_if(.., |_, runs| runs == pod);
        lost.map(|(who, _)| who).collect()
    }

    /// Returns true if `who` has an open stream of reports.
    pub fn reports(&self, who: &str) -> bool {
        self.all.contains_key(who)
    }

    /// Number of agents and activators that report.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Returns true if no agent or activator reports.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Removes all acknowledgements of a pod, which serves again or is gone.
    ///
    /// Without this, a pod that drains a second time could be stopped by acknowledgements of the first.
    pub fn forget(&mut self, uid: &str) {
        for follower in self.all.values_mut() {
            follower.avoids.remove(uid);
            follower.unnamed.remove(uid);
        }
    }

    /// Agents and activators that have not acknowledged the pod's drain.
    pub fn missing<'a>(&'a self, uid: &'a str) -> impl Iterator<Item = &'a str> {
        // One that runs without a stream may still send connections to the pod.
        let silent = self.expected.keys().filter(|who| !self.all.contains_key(*who));
        let all = self.all.iter().filter(|(_, it)| !it.avoids.contains(uid)).map(|(who, _)| who);
        all.chain(silent).map(String::as_str)
    }

    /// Returns true if all have acknowledged the pod's drain.
    pub fn all_avoid(&self, uid: &str) -> bool {
        self.missing(uid).next().is_none()
    }

    /// The reports of `who`, if `stream` is its newest: late items of an older stream have no effect.
    fn current(&mut self, who: &str, stream: u64) -> Option<&mut ReporterAcks> {
        self.all.get_mut(who).filter(|it| it.stream == stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missing(followers: &DrainAcks) -> Vec<&str> {
        followers.missing("p").collect()
    }

    #[test]
    fn a_pod_is_left_once_everybody_says_so() {
        let mut all = DrainAcks::default();
        assert!(all.all_avoid("p"));
        all.begin("agent/n1", 1);
        all.begin("activator/a", 2);
        all.avoids("agent/n1", 1, "p");
        assert_eq!(missing(&all), ["activator/a"]);
        all.avoids("activator/a", 2, "p");
        assert!(all.all_avoid("p"));
        all.avoids_no_more("agent/n1", 1, "p");
        assert_eq!(missing(&all), ["agent/n1"]);
        all.end("agent/n1", 1);
        assert!(all.all_avoid("p"));
    }

    #[test]
    fn a_new_stream_keeps_what_it_names_and_nothing_else() {
        let mut all = DrainAcks::default();
        all.begin("a", 1);
        all.avoids("a", 1, "p");
        all.avoids("a", 1, "q");
        all.begin("a", 2);
        // The old stream ends after the new one begins, and its last items may still arrive.
        all.avoids_no_more("a", 1, "p");
        all.end("a", 1);
        assert!(all.all_avoid("p"), "it has not said otherwise");
        all.avoids("a", 2, "p");
        all.synced("a", 2);
        assert!(all.all_avoid("p"));
        assert!(!all.all_avoid("q"));
    }

    #[test]
    fn who_runs_and_does_not_report_is_missed() {
        let mut all = DrainAcks::default();
        all.expect("agent/n1", "agent-x");
        assert_eq!(missing(&all), ["agent/n1"]);
        all.begin("agent/n1", 1);
        all.avoids("agent/n1", 1, "p");
        assert!(all.all_avoid("p"));
        all.end("agent/n1", 1);
        assert_eq!(missing(&all), ["agent/n1"], "its programs may still send");
        assert_eq!((all.lose("other"), all.lose("agent-x")), (vec![], vec!["agent/n1".into()]));
        assert!(all.all_avoid("p"));
    }

    #[test]
    fn word_from_before_a_pod_worked_again_does_not_count() {
        let mut all = DrainAcks::default();
        all.begin("a", 1);
        all.avoids("a", 1, "p");
        all.forget("p");
        assert_eq!(missing(&all), ["a"]);
        all.avoids("a", 1, "p");
        assert!(all.all_avoid("p"));
    }
}
