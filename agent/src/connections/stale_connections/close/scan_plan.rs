//! Shell: clients that a scan enters: all processes in the clients' cgroup, those that connect records name, or those
//! with known connections.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
};

use common::link::error_chain;
use tracing::warn;

use super::{
    super::recorded_clients::RecordGaps, ClientScanScope, DrainingAddress, StaleConnectionCloser,
    client_namespaces,
};
use crate::{
    kernel::{maps::client_sockets::ClientSocketRecords, netns_cookies::cookie_of_socket},
    lock::lock,
    net::sockdiag::{DiagConnection, SockDiag},
};

/// Connect records by which a scan finds clients.
#[derive(Clone, Debug)]
pub(super) struct ScanRecords {
    sockets: ClientSocketRecords,
    /// Cookie of the agent's own namespace, which is left out.
    own_namespace: u64,
}

impl ScanRecords {
    /// Returns the records for scans; `None` if the kernel does not tell user space the cookies of namespaces (before 5.14), by which
    /// records name them.
    pub(super) fn new(sockets: ClientSocketRecords) -> Option<Self> {
        let own_namespace = SockDiag::open().and_then(|diag| cookie_of_socket(diag.socket()));
        match own_namespace {
            Ok(own_namespace) => Some(Self { sockets, own_namespace: own_namespace? }),
            Err(error) => {
                warn!(%error, "cannot read the cookie of the agent's network namespace");
                None
            }
        }
    }

    /// Reads the gaps of the records.
    pub(super) fn read_gaps(&self) -> RecordGaps {
        RecordGaps {
            unlisted_connects: self.sockets.unlisted_connects(),
            has_other_versions: self.sockets.has_other_versions(),
        }
    }
}

/// Clients that one round scans.
pub(super) struct ScanPlan {
    /// Scope of the scan. It may be another one than was due.
    pub(super) scope: ClientScanScope,
    /// Clients that the scan enters.
    pub(super) targets: Vec<ClientScanTarget>,
    /// Namespaces that records name and that are not known: all clients are scanned to find them. Mostly none.
    pub(super) sought: BTreeSet<u64>,
    /// Processes whose namespace cannot be read. They may be of any client.
    pub(super) unknown: BTreeSet<u32>,
}

impl ScanPlan {
    /// Returns the scan of these namespaces, which are given with their processes.
    fn of_namespaces(namespaces: BTreeMap<u64, Vec<u32>>) -> Self {
        let target =
            |(cookie, pids)| ClientScanTarget { pids, netns_cookie: Some(cookie), known: None };
        Self {
            scope: ClientScanScope::RecordedClients,
            targets: namespaces.into_iter().map(target).collect(),
            sought: BTreeSet::new(),
            unknown: BTreeSet::new(),
        }
    }
}

/// Client that a round scans: its namespace, and the connections there.
pub(super) struct ClientScanTarget {
    /// Processes in the client's namespace.
    pub(super) pids: Vec<u32>,
    /// Cookie that the namespace has; `None`: any. A process id may be that of another process by now.
    pub(super) netns_cookie: Option<u64>,
    /// Connections to read again; `None`: all connections of the namespace are listed.
    pub(super) known: Option<Vec<DiagConnection>>,
}

impl ClientScanTarget {
    /// Returns the target of a list of all connections in the namespace of these processes.
    fn all_connections(pids: Vec<u32>) -> Self {
        Self { pids, netns_cookie: None, known: None }
    }
}

impl StaleConnectionCloser {
    /// Returns the clients that a scan enters.
    ///
    /// A scan of recorded clients becomes one of all clients if a record names a namespace that is not known.
    pub(super) fn plan_scan(
        &self,
        scope: ClientScanScope,
        draining: &BTreeMap<SocketAddr, DrainingAddress>,
    ) -> ScanPlan {
        match scope {
            ClientScanScope::AllClients => self.plan_full_scan(BTreeSet::new()),
            ClientScanScope::RecordedClients => self.plan_recorded_scan(draining),
            ClientScanScope::KnownConnections => self.plan_known_scan(),
        }
    }

    /// Returns the clients that records name and that are not known yet.
    fn plan_recorded_scan(&self, draining: &BTreeMap<SocketAddr, DrainingAddress>) -> ScanPlan {
        // Without records nothing is known of the clients that they would name.
        let Some(sought) = self.sought_namespaces(draining) else {
            return self.plan_full_scan(BTreeSet::new());
        };
        let selected = lock(&self.last_scan).namespaces.select(&sought);
        match selected {
            Some(namespaces) => ScanPlan::of_namespaces(namespaces),
            None => self.plan_full_scan(sought),
        }
    }

    /// Returns all clients, among which the `sought` namespaces may be.
    fn plan_full_scan(&self, sought: BTreeSet<u64>) -> ScanPlan {
        match client_namespaces(&self.cgroup) {
            Ok(all) => {
                self.log_unknown(&all.unknown);
                let pids = all.known.into_values();
                ScanPlan {
                    scope: ClientScanScope::AllClients,
                    targets: pids.map(ClientScanTarget::all_connections).collect(),
                    sought,
                    unknown: all.unknown.into_keys().collect(),
                }
            }
            // What is known stays closable without a list. Taken as an empty one, it would be forgotten.
            Err(error) => {
                warn!(%error, "cannot list the processes of clients");
                lock(&self.last_scan).has_missed_clients = true;
                self.plan_known_scan()
            }
        }
    }

    /// Returns the clients with connections to draining addresses that the last scan has found.
    fn plan_known_scan(&self) -> ScanPlan {
        let known = lock(&self.last_scan).connections.clone();
        let target =
            |(pids, known)| ClientScanTarget { pids, netns_cookie: None, known: Some(known) };
        ScanPlan {
            scope: ClientScanScope::KnownConnections,
            targets: known.into_iter().map(target).collect(),
            sought: BTreeSet::new(),
            unknown: BTreeSet::new(),
        }
    }

    /// Returns the namespaces of the connections to draining addresses that records name and that are not known yet.
    /// `None` if there are no records, or they cannot be read, which is logged.
    fn sought_namespaces(
        &self,
        draining: &BTreeMap<SocketAddr, DrainingAddress>,
    ) -> Option<BTreeSet<u64>> {
        let ScanRecords { sockets, own_namespace } = self.records.as_ref()?;
        let known = lock(&self.last_scan).known_cookies();
        let mut sought = BTreeSet::new();
        let read = sockets.with_other_sizes().for_each_connection(|it| {
            if draining.contains_key(&it.backend)
                && it.netns_cookie != *own_namespace
                && !known.contains(&it.socket_cookie)
            {
                sought.insert(it.netns_cookie);
            }
        });
        match read {
            Ok(()) => Some(sought),
            Err(error) => {
                warn!(error = %error_chain(&error), "cannot read the records of connections");
                None
            }
        }
    }
}
