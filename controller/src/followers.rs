//! Pure: who must have let go of a pod before it may stop.
//!
//! Every agent and activator reports to every replica of the controller, whichever of them serves its routes. It says
//! of each draining pod that no new connection of its own goes there; the one that writes waits until all have
//! said so. Table versions play no part: they compare within one stream only. Whoever runs, by the API server, and does
//! not report here now, is missed as well: a controller that has just started must not take silence for consent.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{Hash, Hasher as _},
};

use common::wire::{Name, Role};

/// A follower by role and name. An agent is named after its node, an activator after its pod.
pub fn named(role: Role, name: &str) -> String {
    format!("{role:?}/{name}")
}

/// Agents and activators, and which pods each avoids.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Followers {
    all: BTreeMap<String, Follower>,
    /// Who runs, by the API server, with the pod in which it does.
    expected: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Follower {
    /// The newest stream of its reports.
    stream: u64,
    avoids: BTreeSet<String>,
    /// Avoided by what an earlier stream said, until this one has named everything.
    unnamed: BTreeSet<String>,
    /// Services that it leads to some revision; `None`: it does not say.
    routed: Option<Routed>,
}

/// Services by what hashes of their names are: an activator may have tens of thousands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Routed {
    all: BTreeSet<u64>,
    /// Whether it has named all of them on its newest stream.
    is_whole: bool,
}

fn hash(name: &Name) -> u64 {
    let mut hasher = std::hash::DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish()
}

impl Followers {
    /// `who` has begun to report on this stream; it will name again what it avoids.
    pub fn begin(&mut self, who: &str, stream: u64) {
        let follower = self.all.entry(who.to_owned()).or_default();
        follower.stream = stream;
        follower.unnamed = follower.avoids.clone();
        follower.routed = None;
    }

    /// It names each service that it leads to some revision.
    pub fn names_routed(&mut self, who: &str, stream: u64) {
        if let Some(follower) = self.current(who, stream) {
            follower.routed.get_or_insert_default();
        }
    }

    /// It leads this service to some revision, or does no more.
    pub fn routed(&mut self, who: &str, stream: u64, name: &Name, leads: bool) {
        if let Some(routed) = self.current(who, stream).and_then(|it| it.routed.as_mut()) {
            _ = if leads { routed.all.insert(hash(name)) } else { routed.all.remove(&hash(name)) };
        }
    }

    /// Whether every one that says so leads this service to some revision. One of an earlier release is not waited for, nor
    /// one that has yet to name all of them.
    pub fn all_route(&self, name: &Name) -> bool {
        let hash = hash(name);
        let mut say = self.all.values().filter_map(|it| it.routed.as_ref());
        say.all(|it| !it.is_whole || it.all.contains(&hash))
    }

    /// It opens no connection to this draining pod.
    pub fn avoids(&mut self, who: &str, stream: u64, uid: &str) {
        if let Some(follower) = self.current(who, stream) {
            follower.unnamed.remove(uid);
            follower.avoids.insert(uid.to_owned());
        }
    }

    /// It may open connections to the pod again.
    pub fn avoids_no_more(&mut self, who: &str, stream: u64, uid: &str) {
        if let Some(follower) = self.current(who, stream) {
            follower.unnamed.remove(uid);
            follower.avoids.remove(uid);
        }
    }

    /// It has named everything.
    pub fn synced(&mut self, who: &str, stream: u64) {
        if let Some(follower) = self.current(who, stream) {
            if let Some(routed) = &mut follower.routed {
                routed.is_whole = true;
            }
            let unnamed = std::mem::take(&mut follower.unnamed);
            follower.avoids.retain(|uid| !unnamed.contains(uid));
        }
    }

    /// The stream has ended. A follower that comes back on another is not forgotten by the end of the first.
    pub fn end(&mut self, who: &str, stream: u64) {
        if self.all.get(who).is_some_and(|it| it.stream == stream) {
            self.all.remove(who);
        }
    }

    /// The API server runs `who` in this pod.
    pub fn expect(&mut self, who: &str, pod: &str) {
        self.expected.insert(who.to_owned(), pod.to_owned());
    }

    /// That pod is gone. Returns who was expected of it.
    pub fn lose(&mut self, pod: &str) -> Vec<String> {
        let lost = self.expected.extract_if(.., |_, runs| runs == pod);
        lost.map(|(who, _)| who).collect()
    }

    /// Whether it reports.
    pub fn reports(&self, who: &str) -> bool {
        self.all.contains_key(who)
    }

    /// How many report.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Whether nobody reports.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// The pod was put back to work, or is gone: whatever was said of it speaks of the past.
    ///
    /// Without this, a pod that drains a second time could be stopped on word from the first.
    pub fn forget(&mut self, uid: &str) {
        for follower in self.all.values_mut() {
            follower.avoids.remove(uid);
            follower.unnamed.remove(uid);
        }
    }

    /// Who has not let go of the pod yet.
    pub fn missing<'a>(&'a self, uid: &'a str) -> impl Iterator<Item = &'a str> {
        let silent = self.expected.keys().filter(|who| !self.all.contains_key(*who));
        let all = self.all.iter().filter(|(_, it)| !it.avoids.contains(uid)).map(|(who, _)| who);
        all.chain(silent).map(String::as_str)
    }

    /// Whether all have let go of the pod.
    pub fn all_avoid(&self, uid: &str) -> bool {
        self.missing(uid).next().is_none()
    }

    fn current(&mut self, who: &str, stream: u64) -> Option<&mut Follower> {
        self.all.get_mut(who).filter(|it| it.stream == stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missing(followers: &Followers) -> Vec<&str> {
        followers.missing("p").collect()
    }

    #[test]
    fn a_pod_is_left_once_everybody_says_so() {
        let mut all = Followers::default();
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
        let mut all = Followers::default();
        all.begin("a", 1);
        all.avoids("a", 1, "p");
        all.avoids("a", 1, "q");
        all.begin("a", 2);
        // The old stream ends later than the new one begins, and may have left something on the way.
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
        let mut all = Followers::default();
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
        let mut all = Followers::default();
        all.begin("a", 1);
        all.avoids("a", 1, "p");
        all.forget("p");
        assert_eq!(missing(&all), ["a"]);
        all.avoids("a", 1, "p");
        assert!(all.all_avoid("p"));
    }
}
