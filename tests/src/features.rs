//! Features of Knative's `config-features` that are off unless operators allow them.
#![allow(clippy::print_stderr, reason = "a test's own output is where its reader looks")]

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use crate::cluster::Cluster;
use crate::installed::{Installed, configure};

const MAP: &str = "config-features";

/// Features that are on for as long as this lives.
#[derive(Debug)]
pub struct Features<'a> {
    cluster: &'a Cluster,
    names: &'static [&'static str],
}

/// How many hold each feature: tests of one process run side by side, and the last one turns it off.
static HELD: Mutex<BTreeMap<&'static str, usize>> = Mutex::new(BTreeMap::new());

impl<'a> Features<'a> {
    /// Turns them on.
    pub fn on(cluster: &'a Cluster, names: &'static [&'static str]) -> Self {
        // Held until they are set: one that turns them off meanwhile would have the last word.
        let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
        configure(cluster, MAP, names, "\"enabled\"").expect("a good value is taken");
        names.iter().for_each(|name| *held.entry(name).or_default() += 1);
        Self { cluster, names }
    }

    /// Applies a manifest that needs them. Each replica of the controller follows a setting at once, but not all of them in
    /// the same moment.
    pub fn apply(&self, rouse: &Installed, namespace: &str, yaml: &str) {
        self.cluster.wait("the features to be in force", || {
            let applied = rouse.apply(namespace, yaml);
            applied.inspect_err(|said| eprintln!("{:?}: {said}", self.names)).ok()
        });
    }
}

impl Drop for Features<'_> {
    fn drop(&mut self) {
        let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
        for name in self.names {
            let count = held.entry(name).or_default();
            *count = count.saturating_sub(1);
        }
        let free: Vec<&str> = self.names.iter().copied().filter(|it| held[it] == 0).collect();
        let _off = configure(self.cluster, MAP, &free, "null");
    }
}
