//! Pure: plans against a model of the kernel that reads after every map operation.

mod capacity;
mod cluster;
mod earlier_lists;
mod facts;
mod hints;
mod in_place;
mod plan_writer;
mod scaled_services;
mod standby;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
    time::Duration,
};

use common::{
    fixtures,
    wire::{
        ActivatorEntry, AppProtocol, ConnectionPath, NamespacedName, NodeEntry, PodEntry,
        RevisionEntry, RouteTable, RouteTarget, RoutingPhase, ServiceEntry,
    },
};
use datapath::{
    abi,
    load_balancing::{RoutingMode, SvcInfo, SvcState},
};
use proptest::prelude::*;

use self::plan_writer::PlanWriter;
use super::{draft::QUARANTINE_WAIT_NS, pool::MapShare, switch::needs_order, *};
use crate::kernel::map_op::{KernelRoutes, MapOp, WrittenBounds, to_v6_octets};

/// The maps, and the lists that a connect finds in them.
#[derive(Clone, Default)]
struct FakeKernelMaps {
    frontends: BTreeMap<FrontendKey, u32>,
    states: BTreeMap<u32, SvcState>,
    infos: BTreeMap<u32, SvcInfo>,
    list_entries: BTreeMap<u32, u32>,
    backends: BTreeMap<u32, BackendTarget>,
}

/// Result of a connect to one address: its mode, every backend it may pick, its port at the activators.
type SimConnectResult = (RoutingMode, Vec<BackendTarget>, u16);

impl FakeKernelMaps {
    fn write(&mut self, op: &MapOp) {
        match op {
            MapOp::Backend { id, backend } => drop(self.backends.insert(*id, *backend)),
            MapOp::ListEntries { offset, backends } => {
                self.list_entries.extend((*offset..).zip(backends.iter().copied()));
            }
            MapOp::Info { service_id, info } => drop(self.infos.insert(*service_id, *info)),
            MapOp::State { service_id, state } => drop(self.states.insert(*service_id, *state)),
            MapOp::Frontend { key, service_id } => drop(self.frontends.insert(*key, *service_id)),
            MapOp::RemoveFrontend { key } => drop(self.frontends.remove(key)),
        }
    }

    fn list(&self, state: &SvcState) -> Vec<BackendTarget> {
        self.ids(state).iter().map(|id| self.backends[id]).collect()
    }

    fn find(&self, key: &FrontendKey) -> Option<SimConnectResult> {
        let service_id = self.frontends.get(key)?;
        let state = &self.states[service_id];
        Some((state.mode, self.list(state), self.infos[service_id].port_be))
    }

    fn all(&self) -> BTreeMap<FrontendKey, SimConnectResult> {
        self.frontends.keys().map(|key| (*key, self.find(key).unwrap())).collect()
    }

    /// Returns the words that a connect may read now, each with its service id and the list behind it.
    fn in_force(&self) -> Vec<(u32, SvcState, Vec<BackendTarget>)> {
        let service_ids = self.frontends.values().chain(&[abi::ACTIVATORS_V4, abi::ACTIVATORS_V6]);
        let states = service_ids.filter_map(|id| self.states.get(id).map(|state| (*id, *state)));
        states.map(|(id, state)| (id, state, self.list(&state))).collect()
    }

    /// Returns the backend numbers in a list.
    fn ids(&self, state: &SvcState) -> Vec<u32> {
        (state.offset..state.offset + state.count).map(|at| self.list_entries[&at]).collect()
    }

    fn table(&self) -> KernelRoutes {
        let none = SvcState::unpack(0);
        let mut table =
            KernelRoutes { frontends: self.frontends.clone(), ..KernelRoutes::default() };
        let lists = [abi::ACTIVATORS_V4, abi::ACTIVATORS_V6];
        for &service_id in self.frontends.values().chain(&lists) {
            let state = *self.states.get(&service_id).unwrap_or(&none);
            let info = *self.infos.get(&service_id).unwrap_or(&SvcInfo::unpack(0));
            let ids = self.ids(&state);
            table.backends.extend(ids.iter().map(|id| (*id, self.backends[id])));
            table.services.insert(service_id, (state, info, ids));
        }
        let end = |last: Option<&u32>| last.map_or(0, |last| last + 1);
        table.written = WrittenBounds {
            backends: end(self.backends.keys().last()),
            list_entries: end(self.list_entries.keys().last()),
            services: end(self.states.keys().last()),
        };
        table
    }
}

fn name(number: u8) -> NamespacedName {
    NamespacedName::new("default", format!("s{number}"))
}

fn service(number: u8, connection_path: ConnectionPath) -> ServiceEntry {
    ServiceEntry {
        addresses: vec![
            IpAddr::from([10, 96, 0, number]),
            IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, u16::from(number)]),
        ],
        port: NonZeroU16::new(80).unwrap(),
        activator_port: NonZeroU16::new(20_000 + u16::from(number)).unwrap(),
        connection_path,
        ..fixtures::service(&name(number), &name(number))
    }
}

fn pod(number: u8, revision: u8, phase: RoutingPhase) -> PodEntry {
    let address = SocketAddr::from(([10, 244, 0, number], 8080));
    PodEntry {
        name: format!("pod{number}"),
        node: "here".into(),
        ..fixtures::pod_at(&format!("uid{number}"), &name(revision), phase, address)
    }
}

fn activator(number: u8) -> ActivatorEntry {
    let addresses = vec![IpAddr::from([10, 244, 1, number])];
    ActivatorEntry { node: "here".into(), ..fixtures::activator(&format!("a{number}"), addresses) }
}

fn table(
    services: &[ServiceEntry],
    pods: &[PodEntry],
    activators: &[ActivatorEntry],
) -> RouteTable {
    RouteTable {
        services: services.iter().map(|it| (it.name.clone(), it.clone())).collect(),
        revisions: BTreeMap::new(),
        pods: pods.iter().map(|it| (it.uid.clone(), it.clone())).collect(),
        activators: activators.iter().map(|it| (it.name.clone(), it.clone())).collect(),
        ..RouteTable::default()
    }
}

fn key(address: [u8; 4]) -> FrontendKey {
    let address = std::net::Ipv4Addr::from(address).to_ipv6_mapped().octets();
    FrontendKey { address, port_be: 80u16.to_be(), protocol: 6, reserved: 0 }
}

fn target(number: u8) -> BackendTarget {
    let address = std::net::Ipv4Addr::from([10, 244, 0, number]).to_ipv6_mapped().octets();
    BackendTarget { address, cookie: 0, slot: 0, port_be: 8080u16.to_be() }
}

/// A planner and the kernel it writes to, with the current time.
struct PlannerFixture {
    planner: RoutePlanner,
    /// RouteTable that the planner was given.
    table: RouteTable,
    kernel: FakeKernelMaps,
    now: u64,
}

impl PlannerFixture {
    fn new() -> Self {
        Self {
            planner: RoutePlanner::resume(KernelRoutes::default(), 0),
            table: RouteTable::default(),
            kernel: FakeKernelMaps::default(),
            now: abi::QUARANTINE_NS,
        }
    }

    fn set_table(&mut self, table: &RouteTable) {
        self.table
            .changes_to(table)
            .into_iter()
            .for_each(|change| self.planner.apply_change(change));
        self.table = table.clone();
    }

    fn plan(&mut self, table: &RouteTable) -> Vec<MapOp> {
        self.set_table(table);
        self.plan_and_write(&BTreeMap::new()).ops
    }

    fn plan_and_write(&mut self, locals: &BTreeMap<String, KernelPodIds>) -> MapPlan {
        let plan = self.planner.plan(self.now, locals).unwrap();
        plan.ops.iter().for_each(|op| self.kernel.write(op));
        plan
    }
}

/// Returns a planner that has the whole table and continues from the kernel's maps.
fn resumed(kernel: &FakeKernelMaps, table: &RouteTable, now: u64) -> RoutePlanner {
    let mut planner = RoutePlanner::resume(kernel.table(), now);
    planner.serve_cluster_services(ClusterIpMode::Off, "here");
    table.all_states().for_each(|state| planner.apply_change(state));
    planner
}

#[test]
fn a_service_without_pods_goes_to_its_port_at_the_activators() {
    let mut fixture = PlannerFixture::new();
    fixture.plan(&table(&[service(1, ConnectionPath::Direct)], &[], &[activator(1)]));
    let found = fixture.kernel.find(&key([10, 96, 0, 1]));
    assert_eq!(found, Some((RoutingMode::Activator, vec![], 20_001u16.to_be())));
    let activators = fixture.kernel.list(&fixture.kernel.states[&abi::ACTIVATORS_V4]);
    assert_eq!(activators.len(), 1);
}

#[test]
fn a_ready_pod_takes_the_service_by_one_store() {
    let mut fixture = PlannerFixture::new();
    let asleep = table(&[service(1, ConnectionPath::Direct)], &[], &[activator(1)]);
    fixture.plan(&asleep);
    let mut one = service(1, ConnectionPath::Direct);
    one.addresses.truncate(1);
    fixture.plan(&table(&[one.clone()], &[], &[activator(1)]));
    let ops = fixture.plan(&table(&[one], &[pod(7, 1, RoutingPhase::Ready)], &[activator(1)]));
    let stores = ops.iter().filter(|op| matches!(op, MapOp::State { .. })).count();
    assert_eq!((stores, ops.len()), (1, 3), "{ops:?}");
    assert_eq!(
        fixture.kernel.find(&key([10, 96, 0, 1])),
        Some((RoutingMode::PickBackend, vec![target(7)], 20_001u16.to_be()))
    );
}

#[test]
fn an_ipv6_client_reaches_an_ipv4_pod_by_its_mapped_address() {
    let mut fixture = PlannerFixture::new();
    fixture.plan(&table(
        &[service(1, ConnectionPath::Direct)],
        &[pod(7, 1, RoutingPhase::Ready)],
        &[],
    ));
    let ipv6_key = FrontendKey { address: to_v6_octets(ipv6_address(1)), ..key([0; 4]) };
    assert_eq!(fixture.kernel.find(&ipv6_key).unwrap().1, vec![target(7)]);
}

/// An IPv6-only socket fails with ENETUNREACH at a mapped address.
#[test]
fn an_ipv6_client_reaches_an_ipv4_pod_by_an_activator_that_has_an_ipv6_address() {
    let mut fixture = PlannerFixture::new();
    let both = ActivatorEntry {
        addresses: vec![IpAddr::from([10, 244, 1, 1]), ipv6_address(9)],
        ..activator(1)
    };
    let pods = [pod(5, 1, RoutingPhase::Ready)];
    fixture.plan(&table(&[service(1, ConnectionPath::Direct)], &pods, &[both]));
    let ipv6_key = FrontendKey { address: to_v6_octets(ipv6_address(1)), ..key([0; 4]) };
    let (mode, list, _) = fixture.kernel.find(&ipv6_key).unwrap();
    assert_eq!((mode, list), (RoutingMode::Activator, vec![]));
    let info = fixture.kernel.infos[&fixture.kernel.frontends[&ipv6_key]];
    assert_eq!(info.activators, abi::ACTIVATORS_V6);
    assert_eq!(fixture.kernel.find(&key([10, 96, 0, 1])).unwrap().1, vec![target(5)]);
}

fn ipv6_address(last: u16) -> IpAddr {
    IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, last])
}

#[test]
fn pods_that_start_or_drain_get_no_connects() {
    let mut fixture = PlannerFixture::new();
    let pods = [
        pod(1, 1, RoutingPhase::Starting),
        pod(2, 1, RoutingPhase::Draining),
        pod(3, 1, RoutingPhase::Ready),
    ];
    fixture.plan(&table(&[service(1, ConnectionPath::Direct)], &pods, &[]));
    assert_eq!(fixture.kernel.find(&key([10, 96, 0, 1])).unwrap().1, vec![target(3)]);
}

#[test]
fn a_split_and_the_activator_path_go_to_the_activators() {
    let mut fixture = PlannerFixture::new();
    let mut split = service(1, ConnectionPath::Direct);
    split.targets = vec![
        RouteTarget { revision: name(1), percent: 50 },
        RouteTarget { revision: name(2), percent: 50 },
    ];
    let pods = [pod(1, 1, RoutingPhase::Ready), pod(2, 2, RoutingPhase::Ready)];
    fixture.plan(&table(&[split, service(2, ConnectionPath::Activator)], &pods, &[activator(1)]));
    assert_eq!(fixture.kernel.find(&key([10, 96, 0, 1])).unwrap().0, RoutingMode::Activator);
    assert_eq!(fixture.kernel.find(&key([10, 96, 0, 2])).unwrap().0, RoutingMode::Activator);
}

/// Pods speak no TLS, so a ready pod takes connects to the service's own port only.
#[test]
fn https_inside_the_cluster_goes_to_the_activators_whatever_the_path() {
    let mut fixture = PlannerFixture::new();
    let pods = [pod(7, 1, RoutingPhase::Ready)];
    let with_tls = ServiceEntry { serves_local_tls: true, ..service(1, ConnectionPath::Direct) };
    let wanted = table(&[with_tls], &pods, &[activator(1)]);
    fixture.plan(&wanted);
    let own = key([10, 96, 0, 1]);
    let tls = FrontendKey { port_be: 443u16.to_be(), ..own };
    let to_pod = (RoutingMode::PickBackend, vec![target(7)], 20_001u16.to_be());
    let to_activators = (RoutingMode::Activator, vec![], 20_001u16.to_be());
    assert_eq!(fixture.kernel.find(&own), Some(to_pod.clone()));
    assert_eq!(fixture.kernel.find(&tls), Some(to_activators));
    assert_eq!(fixture.kernel.all().len(), 4, "two ports of two addresses");
    let led_to_pod = fixture.planner.table().frontends_of_pod("uid7");
    assert!(led_to_pod.contains(&own) && !led_to_pod.contains(&tls), "{led_to_pod:?}");
    let mut other = resumed(&fixture.kernel, &wanted, fixture.now);
    assert_eq!(other.plan(fixture.now, &BTreeMap::new()), Ok(MapPlan::default()));
    fixture.plan(&table(&[service(1, ConnectionPath::Direct)], &pods, &[activator(1)]));
    assert_eq!((fixture.kernel.find(&own), fixture.kernel.find(&tls)), (Some(to_pod), None));
}

#[test]
fn a_pod_of_this_node_carries_its_cookie_and_slot() {
    let mut fixture = PlannerFixture::new();
    let wanted =
        table(&[service(1, ConnectionPath::Direct)], &[pod(7, 1, RoutingPhase::Ready)], &[]);
    let ids = KernelPodIds { cookie: 99, slot: 3, ..KernelPodIds::default() };
    let locals = BTreeMap::from([("uid7".to_owned(), ids)]);
    fixture.set_table(&wanted);
    let before = fixture.plan_and_write(&BTreeMap::new());
    assert_eq!(fixture.kernel.find(&key([10, 96, 0, 1])).unwrap().1, vec![target(7)]);
    fixture.planner.mark_pod_changed("uid7");
    let after = fixture.plan_and_write(&locals);
    let backend = BackendTarget { cookie: 99, slot: 3, ..target(7) };
    assert_eq!(fixture.kernel.find(&key([10, 96, 0, 1])).unwrap().1, vec![backend]);
    let pod = SocketAddr::from(([10, 244, 0, 7], 8080));
    assert_eq!((before.added_pods, before.removed_pods), (BTreeSet::from([pod]), BTreeSet::new()));
    assert_eq!(after.removed_pods, BTreeSet::new(), "it is the same pod");
}

#[test]
fn a_second_plan_without_a_change_is_empty() {
    let mut fixture = PlannerFixture::new();
    let wanted = table(
        &[service(1, ConnectionPath::Direct)],
        &[pod(7, 1, RoutingPhase::Ready)],
        &[activator(1)],
    );
    fixture.plan(&wanted);
    assert_eq!(fixture.plan(&wanted), []);
    let mut other = resumed(&fixture.kernel, &wanted, fixture.now);
    assert_eq!(other.plan(fixture.now, &BTreeMap::new()), Ok(MapPlan::default()));
    fixture.planner.restart(fixture.kernel.table(), fixture.now);
    assert_eq!(fixture.plan_and_write(&BTreeMap::new()), MapPlan::default());
}

#[test]
fn an_address_that_moves_to_another_service_is_never_without_one() {
    let mut fixture = PlannerFixture::new();
    fixture.plan(&table(&[service(1, ConnectionPath::Direct)], &[], &[activator(1)]));
    let mut successor = service(2, ConnectionPath::Direct);
    successor.addresses = service(1, ConnectionPath::Direct).addresses;
    let ops = fixture.plan(&table(&[successor], &[], &[activator(1)]));
    assert!(!ops.iter().any(|op| matches!(op, MapOp::RemoveFrontend { .. })), "{ops:?}");
    assert_eq!(fixture.kernel.find(&key([10, 96, 0, 1])).unwrap().2, 20_002u16.to_be());
}

#[test]
fn an_address_that_two_services_name_goes_to_the_second_when_the_first_is_removed() {
    let mut fixture = PlannerFixture::new();
    let (first, mut second) =
        (service(1, ConnectionPath::Direct), service(2, ConnectionPath::Direct));
    second.addresses.clone_from(&first.addresses);
    let both = table(&[first, second.clone()], &[], &[]);
    fixture.plan(&both);
    let port = |fixture: &PlannerFixture| fixture.kernel.find(&key([10, 96, 0, 1])).unwrap().2;
    assert_eq!(port(&fixture), 20_001u16.to_be());
    let ops = fixture.plan(&table(&[second], &[], &[]));
    assert_eq!(port(&fixture), 20_002u16.to_be());
    assert!(!ops.iter().any(|op| matches!(op, MapOp::RemoveFrontend { .. })), "{ops:?}");
    assert_eq!(fixture.plan(&table(&[], &[], &[])).len(), 2, "both frontends are removed");
}

#[test]
fn a_pod_leaves_when_it_drains_or_its_service_changes_path() {
    let mut fixture = PlannerFixture::new();
    let at = |number: u8| BTreeSet::from([SocketAddr::from(([10, 244, 0, number], 8080))]);
    let (one, two) = (pod(1, 1, RoutingPhase::Ready), pod(2, 1, RoutingPhase::Ready));
    fixture.plan(&table(&[service(1, ConnectionPath::Direct)], &[one.clone(), two], &[]));
    let drains = pod(2, 1, RoutingPhase::Draining);
    let mut moved = |path, pods: &[PodEntry]| {
        fixture.set_table(&table(&[service(1, path)], pods, &[]));
        let plan = fixture.plan_and_write(&BTreeMap::new());
        (plan.added_pods, plan.removed_pods)
    };
    let pods = [one, drains];
    assert_eq!(moved(ConnectionPath::Direct, &pods), (BTreeSet::new(), at(2)));
    assert_eq!(moved(ConnectionPath::Activator, &pods), (BTreeSet::new(), at(1)));
    assert_eq!(moved(ConnectionPath::Direct, &pods), (at(1), BTreeSet::new()));
    let phases = fixture.planner.table().pod_phases(|_| true);
    let phase = |number| at(number).first().and_then(|at| phases.get(at).copied());
    let want = (Some(RoutingPhase::Ready), Some(RoutingPhase::Draining), None);
    assert_eq!((phase(1), phase(2), phase(3)), want);
}

/// A Revision of the Service `hello` with the default timeout.
fn hello_revision(name: &NamespacedName) -> RevisionEntry {
    RevisionEntry { timeout: Duration::from_secs(300), ..fixtures::revision(name, "hello") }
}

#[test]
fn request_terms_are_known_before_there_are_pods_and_stored_only_where_not_default() {
    let mut fixture = PlannerFixture::new();
    let names =
        ["hello-00001", "hello-00002", "green"].map(|name| NamespacedName::new("default", name));
    let [first, second, green] = names.each_ref().map(hello_revision);
    let short_timeout = RevisionEntry { timeout: Duration::from_secs(7), ..second };
    let mut full = RouteTable::default();
    full.revisions.extend([first, short_timeout, green].map(|it| (it.name.clone(), it)));
    fixture.plan(&full);
    let table = fixture.planner.table();
    let terms = names.clone().map(|name| table.request_terms(&name));
    let want = |timeout| RevisionRequestTerms {
        timeout: Duration::from_secs(timeout),
        service: "hello".into(),
        configuration: "hello".into(),
    };
    assert_eq!(terms, [want(300), want(7), want(300)]);
    let stored = names[1..].iter().rev().cloned().map(RouteKey::Revision);
    assert_eq!(table.missing_from(&Default::default()), stored.collect::<Vec<_>>());
    fixture.plan(&RouteTable::default());
    assert_eq!(fixture.planner.table().missing_from(&Default::default()), []);
}

#[test]
fn nothing_is_stored_of_removed_subjects() {
    let mut fixture = PlannerFixture::new();
    let h2c = RevisionEntry { protocol: AppProtocol::H2c, ..hello_revision(&name(1)) };
    let mut full = table(
        &[service(1, ConnectionPath::Direct)],
        &[pod(7, 1, RoutingPhase::Ready)],
        &[activator(1)],
    );
    full.revisions.insert(name(1), h2c);
    fixture.plan(&full);
    assert!(fixture.planner.table().is_h2c(&name(1)));
    let removed = fixture.planner.table().missing_from(&Default::default());
    assert_eq!(removed.len(), 4);
    removed.into_iter().for_each(|key| fixture.planner.apply_change(RouteChange::Removed(key)));
    fixture.plan_and_write(&BTreeMap::new());
    assert_eq!(fixture.kernel.all(), BTreeMap::new());
    assert_eq!(fixture.planner.table().missing_from(&Default::default()), []);
}

#[test]
fn work_is_proportional_to_the_change() {
    let mut fixture = PlannerFixture::new();
    let services: Vec<ServiceEntry> =
        (1..=200).map(|number| service(number, ConnectionPath::Direct)).collect();
    let before = table(&services, &[pod(1, 1, RoutingPhase::Ready)], &[activator(1)]);
    fixture.plan(&before);
    let after = table(
        &services,
        &[pod(1, 1, RoutingPhase::Ready), pod(2, 9, RoutingPhase::Ready)],
        &[activator(1)],
    );
    let ops = fixture.plan(&after);
    // One backend, and for each family one extent and one store.
    assert_eq!(ops.len(), 5, "{ops:?}");
}

/// Zones of the simulation; empty: none.
const ZONES: [&str; 3] = ["", "a", "b"];

/// Number of the service of the simulation that is a port of a scaled Service, with affinity.
const SIM_SCALED_SERVICE: u8 = 3;

/// One change of the simulation. Services, Revisions and pods have numbers.
#[derive(Clone, Debug)]
enum SimRouteChange {
    /// A service is set, with the direct path (true) or the path through the activators, and with one address or two.
    Service(u8, bool, usize),
    /// A service is removed.
    NoService(u8),
    /// A pod of a Revision is set, with a phase by its index.
    Pod(u8, u8, u8),
    /// A pod is removed.
    NoPod(u8),
    /// A pod has a hint for a zone by its index in [`ZONES`], if there is the pod.
    Hint(u8, u8),
    /// A pod has a standby order (true), or no longer, if there is the pod.
    Standby(u8, bool),
    /// The node has a zone by its index.
    Zone(u8),
    /// There are this many activators.
    Activators(u8),
    /// A pod is registered on this node (true), or no longer.
    Local(u8, bool),
    /// This many milliseconds pass.
    Wait(u16),
    /// Another agent starts, and reads the maps.
    Restart,
    /// The agent ends while it writes the next plan, after this share of the stores in 256ths.
    Crash(u8),
}

fn route_changes() -> impl Strategy<Value = Vec<SimRouteChange>> {
    let turn = prop_oneof![
        3 => (1u8..4, any::<bool>(), 1usize..3)
            .prop_map(|(s, direct, addresses)| SimRouteChange::Service(s, direct, addresses)),
        1 => (1u8..4).prop_map(SimRouteChange::NoService),
        6 => (1u8..7, 1u8..4, 0u8..3).prop_map(|(p, s, phase)| SimRouteChange::Pod(p, s, phase)),
        2 => (1u8..7).prop_map(SimRouteChange::NoPod),
        4 => (1u8..7, 0u8..3).prop_map(|(p, zone)| SimRouteChange::Hint(p, zone)),
        4 => (1u8..7, any::<bool>()).prop_map(|(p, order)| SimRouteChange::Standby(p, order)),
        2 => (0u8..3).prop_map(SimRouteChange::Zone),
        1 => (0u8..3).prop_map(SimRouteChange::Activators),
        1 => (1u8..7, any::<bool>()).prop_map(|(p, known)| SimRouteChange::Local(p, known)),
        2 => (0u16..1500).prop_map(SimRouteChange::Wait),
        1 => Just(SimRouteChange::Restart),
        1 => any::<u8>().prop_map(SimRouteChange::Crash),
    ];
    prop::collection::vec(turn, 1..40)
}

/// The simulation after some changes: table, registered pods and time.
struct RouteSim {
    table: RouteTable,
    locals: BTreeMap<String, KernelPodIds>,
    now: u64,
}

/// Returns a service of the simulation with some of its addresses. One of them is a scaled Service with affinity.
fn sim_service(number: u8, direct: bool, addresses: usize) -> ServiceEntry {
    let path = if direct { ConnectionPath::Direct } else { ConnectionPath::Activator };
    let mut it = service(number, path);
    it.addresses.truncate(addresses);
    if number == SIM_SCALED_SERVICE {
        (it.uses_pod_ports, it.affinity) = (true, Some(Duration::from_secs(60)));
    }
    it
}

/// Returns a pod of the simulation. Each third pod has no port for the scaled Service.
fn sim_pod(number: u8, revision: u8, phase: RoutingPhase) -> PodEntry {
    let mut it = pod(number, revision, phase);
    if revision == SIM_SCALED_SERVICE && !number.is_multiple_of(3) {
        let port = 9000 + u16::from(number % 2);
        it.ports = vec![fixtures::pod_port(80, port, AppProtocol::Http1)];
    }
    it
}

impl RouteSim {
    fn new() -> Self {
        Self { table: table(&[], &[], &[]), locals: BTreeMap::new(), now: abi::QUARANTINE_NS }
    }

    /// Makes a change and passes it to the planner.
    fn apply(&mut self, turn: &SimRouteChange, planner: &mut RoutePlanner) {
        let before = self.table.clone();
        let touched = self.change(turn);
        before.changes_to(&self.table).into_iter().for_each(|change| planner.apply_change(change));
        touched.iter().for_each(|uid| planner.mark_pod_changed(uid));
    }

    /// Makes a change. Returns the uid of the pod whose registration has changed.
    fn change(&mut self, turn: &SimRouteChange) -> Option<String> {
        let phases = [RoutingPhase::Starting, RoutingPhase::Ready, RoutingPhase::Draining];
        let uid = |number: &u8| format!("uid{number}");
        match turn {
            SimRouteChange::Service(number, direct, addresses) => {
                let it = sim_service(*number, *direct, *addresses);
                self.table.services.insert(name(*number), it);
                None
            }
            SimRouteChange::NoService(number) => {
                self.table.services.remove(&name(*number));
                None
            }
            SimRouteChange::Pod(number, revision, phase) => {
                let it = sim_pod(*number, *revision, phases[usize::from(*phase)]);
                self.table.pods.insert(uid(number), it);
                None
            }
            SimRouteChange::NoPod(number) => {
                self.table.pods.remove(&uid(number));
                None
            }
            SimRouteChange::Hint(number, zone) => {
                let zone = ZONES[usize::from(*zone)];
                self.change_pod(&uid(number), |it| it.hints.zone = zone.into());
                None
            }
            SimRouteChange::Standby(number, has_order) => {
                let standby = has_order.then(fixtures::standby_order);
                self.change_pod(&uid(number), |it| it.standby = standby);
                None
            }
            SimRouteChange::Zone(zone) => {
                let zone = ZONES[usize::from(*zone)];
                let node = NodeEntry { name: "here".into(), zone: zone.into() };
                self.table.nodes.remove("here");
                self.table.nodes.extend((!zone.is_empty()).then(|| ("here".into(), node)));
                None
            }
            SimRouteChange::Activators(count) => {
                self.table.activators =
                    (0..*count).map(|number| (format!("a{number}"), activator(number))).collect();
                None
            }
            SimRouteChange::Local(number, true) => {
                let (cookie, slot) = (100 + u64::from(*number), u32::from(*number));
                let local = KernelPodIds { cookie, slot, ..KernelPodIds::default() };
                self.locals.insert(uid(number), local);
                Some(uid(number))
            }
            SimRouteChange::Local(number, false) => {
                self.locals.remove(&uid(number));
                Some(uid(number))
            }
            SimRouteChange::Wait(ms) => {
                self.now += u64::from(*ms) * 1_000_000;
                None
            }
            SimRouteChange::Restart | SimRouteChange::Crash(_) => None,
        }
    }

    /// Changes a pod of the table, if there is the pod.
    fn change_pod(&mut self, uid: &str, change: impl FnOnce(&mut PodEntry)) {
        if let Some(pod) = self.table.pods.get_mut(uid) {
            change(pod);
        }
    }
}

proptest! {
    /// After every store of every plan a connect finds backends of the old list or the new one, and all that are in
    /// both. So does one that read the word of the service id up to a second ago.
    #[test]
    fn a_connect_finds_backends_of_the_old_list_or_the_new_one(turns in route_changes()) {
        let mut sim = RouteSim::new();
        let mut writer = PlanWriter::default();
        let mut planner = resumed(&writer.kernel, &sim.table, 0);
        let mut crash = None;
        for turn in &turns {
            sim.apply(turn, &mut planner);
            match turn {
                SimRouteChange::Restart => planner = resumed(&writer.kernel, &sim.table, sim.now),
                SimRouteChange::Crash(share) => {
                    crash = Some(*share);
                    continue;
                }
                _ => {}
            }
            if let Some(share) = crash.take() {
                writer.write_part(&mut planner, &sim, share)?;
                // A failed write and the end of the agent leave the same maps.
                match share % 2 {
                    0 => planner.restart(writer.kernel.table(), sim.now),
                    _ => planner = resumed(&writer.kernel, &sim.table, sim.now),
                }
            }
            writer.write_plan(&mut planner, &sim)?;
            // The table is in force: a planner that compares everything has nothing to do.
            let mut fresh = resumed(&writer.kernel, &sim.table, sim.now);
            let rest = fresh.plan(sim.now + abi::QUARANTINE_NS, &sim.locals);
            prop_assert_eq!(rest, Ok(MapPlan::default()));
        }
    }
}

#[test]
fn a_pod_of_both_families_serves_each_clients_own() {
    let six: std::net::Ipv6Addr = "fd00:244::5".parse().unwrap();
    let both =
        PodEntry { other_family_address: Some(six.into()), ..pod(5, 1, RoutingPhase::Ready) };
    let mut fixture = PlannerFixture::new();
    fixture.plan(&table(&[service(1, ConnectionPath::Direct)], &[both], &[activator(1)]));
    let ip: std::net::Ipv6Addr = "fd00::1".parse().unwrap();
    let ipv6_key = FrontendKey { address: ip.octets(), ..key([0; 4]) };
    let own = BackendTarget { address: six.octets(), ..target(5) };
    assert_eq!(fixture.kernel.find(&key([10, 96, 0, 1])).unwrap().1, vec![target(5)]);
    assert_eq!(fixture.kernel.find(&ipv6_key).unwrap().1, vec![own]);
    let at = SocketAddr::from((six, 8080));
    let phases = fixture.planner.table().pod_phases(|it| *it == at);
    assert_eq!(phases, [(at, RoutingPhase::Ready)].into(), "its open connections stay");
}

#[test]
fn an_excluded_pod_gets_no_connects_until_the_exclusion_ends() {
    let mut fixture = PlannerFixture::new();
    let pods = [pod(5, 1, RoutingPhase::Ready), pod(6, 1, RoutingPhase::Ready)];
    let wanted = table(&[service(1, ConnectionPath::Direct)], &pods, &[]);
    let list = |fixture: &PlannerFixture| fixture.kernel.find(&key([10, 96, 0, 1])).unwrap().1;
    fixture.planner.set_excluded("uid5", true);
    fixture.plan(&wanted);
    assert_eq!(list(&fixture), vec![target(6)]);
    fixture.planner.set_excluded("uid5", false);
    fixture.plan(&wanted);
    assert_eq!(list(&fixture), vec![target(5), target(6)]);
    assert!(!fixture.planner.has_due_work());
}
