//! Pure: facts about the planner's frontends: the state of each, and figures about all.

mod trace;

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv6Addr, SocketAddr},
};

use common::wire::NamespacedName;
use datapath::{
    abi::{self, FrontendKey},
    load_balancing::RoutingMode,
};

use super::{
    BackendList, BackendListKey, RoutePlanner, UnfitService, cluster_services::facts::TriggerFate,
    pool::MapShare, service_number::ServiceNumber,
};
use crate::{
    kernel::map_op::BackendTarget,
    service_facts::{FrontendFacts, FrontendMode, NodeFacts, ServiceSource, protocol_name},
};

/// Position in the order of all services, by source and name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceCursor {
    source: ServiceSource,
    /// Name of the last service before the position; empty at the begin of a source.
    name: String,
}

impl ServiceCursor {
    /// Position before the first service.
    pub const START: Self = Self { source: ServiceSource::Route, name: String::new() };
}

/// Use of one map of the eBPF programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapUse {
    /// Name of the map.
    pub map: &'static str,
    /// Number of entries that cannot be had now. Those in quarantine count.
    pub entries: usize,
    /// Number of entries up to which services of the RouteTable may fill the map.
    pub limit: usize,
    /// The same for Services of the cluster; `None`: the node serves none.
    pub cluster_limit: Option<usize>,
}

/// Figures about all services of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannerFigures {
    /// Number of frontends in the maps by source and mode. Each pair of a source and a mode of a list is there.
    pub frontends: BTreeMap<(ServiceSource, FrontendMode), usize>,
    /// Number of endpoints of the cluster's Services that are served: ready, terminating and still serving, neither.
    /// `None`: not all Services are known yet.
    pub endpoints: Option<[usize; 3]>,
    /// Use of the maps of routes.
    pub maps: Vec<MapUse>,
}

/// Modes of lists in the maps.
const LIST_MODES: [FrontendMode; 4] =
    [FrontendMode::Pods, FrontendMode::Activators, FrontendMode::Refuse, FrontendMode::Pass];

impl RoutePlanner {
    /// Returns the numbers of the backends that are activators.
    pub(crate) fn activator_backends(&self) -> impl Iterator<Item = u32> {
        let keys = [abi::ACTIVATORS_V4, abi::ACTIVATORS_V6].map(BackendListKey::Activators);
        let lists = keys.into_iter().filter_map(|key| self.lists.get(&key));
        lists.flat_map(|list| list.backends.iter().copied())
    }

    /// Returns the number of the backend at this address of a pod of another node; `None`: no list names it.
    pub(crate) fn remote_pod_backend(&self, at: SocketAddr) -> Option<u32> {
        self.backends.number(&BackendTarget::of_pod(at, None))
    }

    /// Returns the address of the pod that is the backend with this number; `None`: it is an activator, or unused.
    pub(crate) fn backend_pod_address(&self, backend: u32) -> Option<SocketAddr> {
        self.backends.get(backend)?.pod_address()
    }

    /// Returns state and mode of the agent, on which all services depend.
    pub fn node_facts(&self) -> NodeFacts {
        let mut facts = self.table.cluster.node_facts();
        if !self.is_route_table_known {
            facts.unknown.insert(0, "RouteTable".to_owned());
        }
        facts
    }

    /// Returns the frontends of the next `limit` services at most, and the position behind them; `None` at the end.
    pub fn facts_after(
        &self,
        cursor: &ServiceCursor,
        limit: usize,
    ) -> (Vec<FrontendFacts>, Option<ServiceCursor>) {
        let numbers = self.table.numbers_after(cursor.source, &cursor.name, limit);
        let facts = numbers.iter().flat_map(|&number| self.service_facts(number)).collect();
        // Fewer services than the limit are the last ones of their source.
        let last = numbers.last().filter(|_| numbers.len() == limit);
        let last = last.and_then(|&number| self.table.service_name(number));
        let next = match last {
            Some(name) => Some(ServiceCursor { source: cursor.source, name: name.to_string() }),
            None if cursor.source == ServiceSource::Route => {
                Some(ServiceCursor { source: ServiceSource::Service, name: String::new() })
            }
            None => None,
        };
        (facts, next)
    }

    fn service_facts(&self, number: ServiceNumber) -> Vec<FrontendFacts> {
        let frontends = self.table.known_endpoints(number).into_iter();
        frontends.filter_map(|(key, known)| self.frontend_facts(number, &key, known)).collect()
    }

    /// Returns the facts about a frontend that a service wants; `None` if the service does not exist.
    fn frontend_facts(
        &self,
        number: ServiceNumber,
        key: &FrontendKey,
        known: Option<usize>,
    ) -> Option<FrontendFacts> {
        let name = self.table.shown_name(number)?;
        let list = self.lists.get(&BackendListKey::Frontend(*key));
        let unfit = self.unfit_services.get(&number);
        let (mode, reason) = self.mode_of(number, list, unfit);
        // The list of a shadowed frontend belongs to another service.
        let own_list = list.filter(|_| mode != FrontendMode::Shadowed);
        Some(FrontendFacts {
            namespace: name.namespace.to_string(),
            name: name.name.to_string(),
            source: number.source(),
            address: address_of(key),
            protocol: protocol_name(key.protocol).to_owned(),
            mode,
            reason,
            listed: own_list.map(|list| list.backends.len()),
            known,
            affinity_seconds: own_list.map_or(0, affinity_in_force),
        })
    }

    /// Returns the mode of a frontend for the service that wants it, and the reason of an unusual one.
    fn mode_of(
        &self,
        number: ServiceNumber,
        list: Option<&BackendList>,
        unfit: Option<&UnfitService>,
    ) -> (FrontendMode, Option<String>) {
        let owner = list.and_then(|list| list.owner).filter(|it| *it != number);
        if let Some(owner) = owner {
            let reason = if self.table.is_same_service(owner, number) {
                "the Service scales to zero, so Rouse leads its connects by the RouteTable"
                    .to_owned()
            } else {
                let owner = self.table.shown_name(owner).unwrap_or(NamespacedName::EMPTY);
                format!("the frontend belongs to {owner}")
            };
            return (FrontendMode::Shadowed, Some(reason));
        }
        let unfit_reason = unfit.map(|it| it.error.to_string());
        let is_refused = unfit.is_some_and(|it| it.is_refused);
        match list {
            _ if is_refused => (FrontendMode::NoRoom, unfit_reason),
            None => (FrontendMode::Waiting, unfit_reason),
            // The list in force is older than the service's newest state, which waits for room.
            Some(list) => (list_mode(list.state.mode), unfit_reason),
        }
    }

    /// Returns figures about all services.
    pub fn figures(&self) -> PlannerFigures {
        let pairs = ServiceSource::ALL.into_iter();
        let pairs = pairs.flat_map(|source| LIST_MODES.map(|mode| ((source, mode), 0)));
        let mut frontends: BTreeMap<_, usize> = pairs.collect();
        for (key, list) in &self.lists {
            if matches!(key, BackendListKey::Frontend(_)) {
                let key = (list.source, list_mode(list.state.mode));
                *frontends.entry(key).or_default() += 1;
            }
        }
        let cluster = &self.table.cluster;
        let endpoints = cluster.is_known().then(|| cluster.endpoint_counts());
        PlannerFigures { frontends, endpoints, maps: self.map_use() }
    }

    /// Returns the use of the maps of routes.
    fn map_use(&self) -> Vec<MapUse> {
        let are_cluster_services_served = self.table.cluster.is_enabled();
        let entry = |map, (entries, size): (usize, usize)| {
            let cluster_limit = MapShare::of(ServiceSource::Service).available(size, size);
            let cluster_limit = are_cluster_services_served.then_some(cluster_limit);
            MapUse { map, entries, limit: size, cluster_limit }
        };
        // The lists of activators have no frontend, and those of the self-test have no list.
        let is_frontend = |key: &&BackendListKey| matches!(key, BackendListKey::Frontend(_));
        let frontends =
            self.lists.keys().filter(is_frontend).count() + abi::SELF_TEST_FRONTENDS as usize;
        vec![
            entry(abi::maps::FRONTENDS, (frontends, self.sizes.frontends as usize)),
            entry(abi::maps::SVC_STATE, self.service_id_pool.usage()),
            entry(abi::maps::BACKENDS, self.backends.pool.usage()),
            entry(abi::maps::SLOTS, self.list_entry_pool.usage()),
        ]
    }

    /// Takes the times of the events behind changes of EndpointSlices that are in force now, in ms since the epoch.
    /// Call it after a plan was written.
    pub fn take_programmed(&mut self) -> Vec<i64> {
        let unfit = &self.unfit_services;
        self.table.cluster.take_triggers(|number| {
            match unfit.get(&ServiceNumber::Cluster(number)) {
                None => TriggerFate::InForce,
                Some(service) if service.is_refused => TriggerFate::Refused,
                Some(_) => TriggerFate::Waiting,
            }
        })
    }
}

fn list_mode(mode: RoutingMode) -> FrontendMode {
    match mode {
        RoutingMode::Pass => FrontendMode::Pass,
        RoutingMode::PickBackend | RoutingMode::PickWithAffinity | RoutingMode::PickRandom => {
            FrontendMode::Pods
        }
        RoutingMode::Activator => FrontendMode::Activators,
        RoutingMode::Refuse | RoutingMode::SelfTest => FrontendMode::Refuse,
    }
}

/// Returns the time for which a client keeps its endpoint by a list, in seconds; 0: not at all, as at activators.
fn affinity_in_force(list: &BackendList) -> u32 {
    match list.state.mode {
        RoutingMode::Activator => 0,
        _ => list.info.affinity_seconds,
    }
}

/// Returns address and port of a frontend.
fn address_of(key: &FrontendKey) -> SocketAddr {
    SocketAddr::new(ip_of(key.address), u16::from_be(key.port_be))
}

/// Returns an address from its form in the maps.
fn ip_of(octets: [u8; 16]) -> IpAddr {
    Ipv6Addr::from(octets).to_canonical()
}
