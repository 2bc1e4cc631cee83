//! Shell: one pod that the finder searches: waits between its searches, and its pod server.

use std::{
    mem,
    time::{Duration, Instant},
};

use nix::sys::inotify::WatchDescriptor;
use tracing::warn;

use crate::{
    kernel::freezer::CgroupState,
    pods::{
        namespace::NetworkNamespace,
        pod_server::{PodServer, PodServers},
        types::NamespaceFacts,
    },
};

/// First wait for a process that has not entered its pod's namespace yet; doubled up to [`SEARCH_WAIT_MAX`].
pub(super) const SEARCH_WAIT_MIN: Duration = Duration::from_micros(500);
/// Longest wait for such a process.
pub(super) const SEARCH_WAIT_MAX: Duration = Duration::from_millis(50);
/// Number of searches, each after a wait, that find a pod's processes in the node's namespace only. A runtime moves
/// them to their own namespace within milliseconds; so many searches take about two seconds.
pub(super) const HOST_NAMESPACE_SEARCHES_MAX: u32 = 40;
/// Wait before another search where inotify reports the change, or where a change is unlikely. Also the period in which
/// the root of the pods' cgroups is checked.
pub(super) const SLOW_SEARCH_WAIT: Duration = Duration::from_secs(1);

/// Rule by which the pod server of a pod is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PodServerRule {
    /// Opened once the pod is found, and tried again after a failure: no process of the pod has the server's port.
    Reserved,
    /// Opened by a command alone, and not tried again: a process of the pod may have the port, and needs it more.
    OnCommand,
}

/// A pod that the finder searches: the times of its searches, and its pod server.
pub(super) struct SearchedPod {
    /// Rule by which its pod server is opened.
    server_rule: PodServerRule,
    /// True if the newest search found the namespace and an address in it.
    pub(super) is_found: bool,
    /// Open pod server in the pod's namespace.
    pub(super) pod_server: Option<PodServer>,
    /// True if the newest attempt to open the pod server failed. Only the first of successive failures is logged.
    has_server_error: bool,
    /// Watch of its `cgroup.events`.
    pub(super) watch: Option<WatchDescriptor>,
    /// Content of that file when it changed last.
    pub(super) cgroup_state: CgroupState,
    /// Time of the next search; `None`: no search is planned.
    pub(super) next_search: Option<Instant>,
    /// Wait before the next search while the processes move.
    pub(super) backoff: Duration,
    /// Number of successive searches, each after a wait, that found the processes in the node's namespace only.
    pub(super) host_namespace_searches: u32,
}

impl SearchedPod {
    /// Starts with a pod that is not found yet.
    pub(super) fn new(server_rule: PodServerRule) -> Self {
        Self {
            server_rule,
            is_found: false,
            pod_server: None,
            has_server_error: false,
            watch: None,
            cgroup_state: CgroupState::default(),
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
            // A namespace without addresses is searched again: its network is still being set up.
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

    /// Plans another search of a found pod whose pod server did not open: its port may become free.
    pub(super) fn plan_server_retry(&mut self, now: Instant) {
        let is_retried = self.server_rule == PodServerRule::Reserved;
        if is_retried && self.pod_server.is_none() && self.next_search.is_none() {
            self.next_search = Some(now + SLOW_SEARCH_WAIT);
        }
    }

    /// Returns true if a search is planned for this time or an earlier one.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.next_search.is_some_and(|at| at <= now)
    }

    /// Opens the pod server of a pod that was found in this namespace, if its rule is to open it then. A server in an
    /// earlier namespace of the pod is closed.
    pub(super) fn update_pod_server(
        &mut self,
        servers: &PodServers,
        uid: &str,
        cookie: u64,
        namespace: &NetworkNamespace,
    ) {
        match self.server_rule {
            PodServerRule::Reserved => self.open_pod_server(servers, uid, cookie, namespace),
            PodServerRule::OnCommand => {
                self.pod_server = self.pod_server.take().filter(|server| server.cookie == cookie);
            }
        }
    }

    /// Opens the pod server in the pod's namespace, if it is not open in the namespace with this `cookie` yet.
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
        let result = servers.open(uid, cookie, namespace);
        let had_error = mem::replace(&mut self.has_server_error, result.is_err());
        self.pod_server = match result {
            Ok(server) => Some(server),
            Err(error) => {
                // Each search tries again, so only the first of several errors in a row is logged.
                if !had_error {
                    let error = common::link::error_chain(&error);
                    warn!(
                        uid,
                        error,
                        "no server in the pod's namespace: preStop hooks and in-use requests get no response"
                    );
                }
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
    /// The namespace cannot be opened or read yet: not mounted, or its process has just ended. Searched again soon.
    NotReady,
    /// All processes are in the node's namespace: they move soon, or never.
    HostNamespace,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_that_stays_in_the_nodes_namespace_is_searched_less_often() {
        let mut wanted = SearchedPod::new(PodServerRule::Reserved);
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

    #[test]
    fn a_found_pod_without_a_pod_server_is_searched_again_after_the_slow_wait() {
        let mut wanted = SearchedPod::new(PodServerRule::Reserved);
        let address = std::net::Ipv4Addr::new(10, 0, 0, 1).into();
        let facts = NamespaceFacts { cookie: 7, addresses: vec![address], incompatibility: None };
        let now = Instant::now();
        assert_eq!(wanted.next_wait(Ok(&facts), false), None);
        assert!(!wanted.is_due(now + SLOW_SEARCH_WAIT), "no search is planned");
        wanted.plan_server_retry(now);
        assert!(!wanted.is_due(now));
        assert!(wanted.is_due(now + SLOW_SEARCH_WAIT));
        let mut foreign = SearchedPod::new(PodServerRule::OnCommand);
        foreign.plan_server_retry(now);
        assert!(!foreign.is_due(now + SLOW_SEARCH_WAIT), "its own process may have the port");
    }

    #[test]
    fn an_earlier_search_is_not_delayed_by_the_retry_of_the_pod_server() {
        let mut wanted = SearchedPod::new(PodServerRule::Reserved);
        let now = Instant::now();
        wanted.next_search = Some(now);
        wanted.plan_server_retry(now);
        assert_eq!(wanted.next_search, Some(now));
    }
}
