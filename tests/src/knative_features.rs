//! Features of Knative's `config-features` that are off unless operators enable them.
#![allow(clippy::print_stderr, reason = "a test's own output is where its reader looks")]

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use crate::installed_cluster::{RouseCluster, set_config_map};
use crate::test_cluster::TestCluster;

const CONFIG_MAP: &str = "config-features";

/// Features that are enabled until this value is dropped.
#[derive(Debug)]
pub struct EnabledFeatures<'a> {
    cluster: &'a TestCluster,
    names: &'static [&'static str],
}

/// Number of users of each feature: tests of one process run in parallel, and the last one disables it.
static USE_COUNTS: Mutex<BTreeMap<&'static str, usize>> = Mutex::new(BTreeMap::new());

impl<'a> EnabledFeatures<'a> {
    /// Enables the features for this test.
    pub fn enable(cluster: &'a TestCluster, names: &'static [&'static str]) -> Self {
        // Locked until they are set: otherwise another test could disable them in between.
        let mut counts = USE_COUNTS.lock().unwrap_or_else(PoisonError::into_inner);
        set_config_map(cluster, CONFIG_MAP, names, "\"enabled\"").expect("a good value is taken");
        names.iter().for_each(|name| *counts.entry(name).or_default() += 1);
        Self { cluster, names }
    }

    /// Applies a manifest that needs the features, again until it is accepted: controller replicas do not see a new
    /// setting at the same moment.
    pub fn apply(&self, rouse: &RouseCluster, namespace: &str, yaml: &str) {
        self.cluster.wait("the features to be in force", || {
            let applied = rouse.apply(namespace, yaml);
            applied.inspect_err(|error| eprintln!("{:?}: {error}", self.names)).ok()
        });
    }
}

impl Drop for EnabledFeatures<'_> {
    fn drop(&mut self) {
        let mut counts = USE_COUNTS.lock().unwrap_or_else(PoisonError::into_inner);
        for name in self.names {
            let count = counts.entry(name).or_default();
            *count = count.saturating_sub(1);
        }
        let unused: Vec<&str> = self.names.iter().copied().filter(|it| counts[it] == 0).collect();
        let _off = set_config_map(self.cluster, CONFIG_MAP, &unused, "null");
    }
}
