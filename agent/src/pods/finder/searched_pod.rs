//! Shell: one pod that the finder searches: waits between its searches, and its pod server.

use std::time::{Duration, Instant};

use nix::sys::inotify::WatchDescriptor;
use tracing::warn;

use crate::pods::{
    namespace::NetworkNamespace,
    pod_server::{PodServer, PodServers},
    types::NamespaceFacts,
};

/// First wait for a process that has not entered its pod's namespace yet; doubled up to [`SEARCH_WAIT_MAX`].
pub(super) const SEARCH_WAIT_MIN: Duration = Duration::from_micros(500);
/// Longest wait for such a process.
pub(super) const SEARCH_WAIT_MAX: Duration = Duration::from_millis(50);
/// Number of searches, each after a wait, that find a pod's processes in the node's namespace only. A runtime moves
/// them to their own namespace within milliseconds; so many searches take about two seconds.
pub(super) const HOST_NAMESPACE_SEARCHES_MAX: u32 = 40;
/// Wait before another search where inotify should report the change anyway.
pub(super) const SLOW_SEARCH_WAIT: Duration = Duration::from_secs(1);

/// A pod that the finder searches: the times of its searches, and its pod server.
pub(super) struct SearchedPod {
    /// True if the newest search found the namespace and an address in it.
    pub(super) is_found: bool,
    /// Open pod server in the pod's namespace.
    pub(super) pod_server: Option<PodServer>,
    /// Watch of its `cgroup.events`.
    pub(super) watch: Option<WatchDescriptor>,
    /// Time of the next search; `None`: no search is planned.
    pub(super) next_search: Option<Instant>,
    /// Wait before the next search while the processes move.
    pub(super) backoff: Duration,
    /// Number of successive searches, each after a wait, that found the processes in the node's namespace only.
    pub(super) host_namespace_searches: u32,
}

impl SearchedPod {
    /// Starts with a pod that is not found yet.
    pub(super) fn new() -> Self {
        Self {
            is_found: false,
            pod_server: None,
            watch: None,
            next_search: None,
            backoff: SEARCH_WAIT_MIN,
            host_namespace_searches: 0,
        }
    }

    /// Returns the wait before another search, after one with this result; `None` if the pod is found. `waited` is true
    /// if a planned wait came before that search.
    pub(super) fn next_wait(
        &mut self,
        result: Result<&NamespaceFacts, MissingNamespace>,
        waited: bool,
    ) -> Option<Duration> {
        self.host_namespace_searches = match result {
            Err(MissingNamespace::HostNamespace) => {
                self.host_namespace_searches + u32::from(waited)
            }
            _ => 0,
        };
        match result {
            // A namespace without addresses is found again later: its network is still being set up.
            Ok(facts) if !facts.addresses.is_empty() => None,
            Err(MissingNamespace::HostNamespace)
                if self.host_namespace_searches >= HOST_NAMESPACE_SEARCHES_MAX =>
            {
                Some(SLOW_SEARCH_WAIT)
            }
            Ok(_) | Err(MissingNamespace::NotReady | MissingNamespace::HostNamespace) => {
                Some(self.backoff)
            }
            Err(MissingNamespace::NoProcess) => Some(SLOW_SEARCH_WAIT),
        }
    }

    /// Opens the pod server in the pod's namespace, if it is not open yet.
    pub(super) fn open_pod_server(
        &mut self,
        servers: &PodServers,
        uid: &str,
        cookie: u64,
        namespace: &NetworkNamespace,
    ) {
        if self.pod_server.as_ref().is_some_and(|server| server.cookie == cookie) {
            return;
        }
        self.pod_server = match servers.open(uid, cookie, namespace) {
            Ok(server) => Some(server),
            Err(error) => {
                let error = common::link::error_chain(&error);
                warn!(
                    uid,
                    error,
                    "no server in the pod's namespace: preStop hooks and in-use requests get no response"
                );
                None
            }
        };
    }
}

/// Reason for which a pod's namespace is not known yet.
#[derive(Clone, Copy)]
pub(super) enum MissingNamespace {
    /// The pod has no directory or no process; inotify reports a change.
    NoProcess,
    /// The processes have not moved yet, or the namespace has no address: searched again soon.
    NotReady,
    /// All processes are in the node's namespace: they move soon, or never.
    HostNamespace,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_that_stays_in_the_nodes_namespace_is_searched_less_often() {
        let mut wanted = SearchedPod::new();
        let host = Err(MissingNamespace::HostNamespace);
        let early = (1..HOST_NAMESPACE_SEARCHES_MAX)
            .map(|_| wanted.next_wait(host, true))
            .collect::<Vec<_>>();
        assert!(early.iter().all(|wait| *wait == Some(SEARCH_WAIT_MIN)));
        assert_eq!(wanted.next_wait(host, false), Some(SEARCH_WAIT_MIN), "no wait came before");
        assert_eq!(wanted.next_wait(host, true), Some(SLOW_SEARCH_WAIT));
        assert_eq!(wanted.next_wait(Err(MissingNamespace::NotReady), true), Some(SEARCH_WAIT_MIN));
        assert_eq!(wanted.host_namespace_searches, 0);
    }
}
