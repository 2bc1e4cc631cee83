//! Pure: routes of this node: the RouteTable and the cluster's Services as the planner has them, and the extent to
//! which the maps follow them.
//!
//! Pass in batches, local pods and the results of writes. While [`is_dirty`](NodeRoutes::is_dirty), write the next
//! [`plan`](NodeRoutes::plan) into the maps.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Instant,
};

use common::{
    link::{DrainAckReporter, PodReportKey, RouteBatch, RoutedServiceReporter},
    outbox::Outbox,
    wire::{NamespacedName, PodReportItem, RouteChange},
};

use crate::{
    config::ClusterIpMode,
    kernel::map_op::{KernelPodIds, KernelRoutes},
    routes::{
        bootstrap::BootstrapServices,
        plan::{
            ClusterChange, ClusterResource, DepartureSource, FrontendEndpoints, MapCapacityError,
            MapPlan, PlannerFigures, PlannerTable, RoutePlanner,
        },
    },
};

/// RouteTable of this node, and its way into the kernel's maps.
#[derive(Debug)]
pub(crate) struct NodeRoutes {
    planner: RoutePlanner,
    /// Version of the RouteTable that the planner has.
    version: u64,
    /// Time of the first RouteTable; `None`: nothing is known yet.
    first_table_at: Option<Instant>,
    /// Draining pods of that RouteTable, and the acknowledgements that the controller has of them.
    draining: DrainAckReporter,
    /// Services of that RouteTable whose Routes wait for agents, and the reports that the controller has of them.
    awaited: RoutedServiceReporter,
    /// Registered pods as the planner last got them.
    planned_pods: BTreeMap<String, KernelPodIds>,
    /// Services that do not fit the kernel's maps.
    refused_services: BTreeMap<NamespacedName, MapCapacityError>,
    /// True if a write failed midway, so that the planner has to read the maps again.
    are_maps_inconsistent: bool,
    /// True if the maps may differ from the table and the local pods.
    is_dirty: bool,
    /// True if the figures have changed since they were last taken.
    are_figures_due: bool,
}

impl NodeRoutes {
    /// Starts with the kernel's present routes, without a table and without Services of the cluster. `now_ns` is
    /// CLOCK_MONOTONIC, as in every call.
    pub(crate) fn resume(
        kernel: KernelRoutes,
        mode: ClusterIpMode,
        node: &str,
        now_ns: u64,
    ) -> Self {
        let mut planner = RoutePlanner::resume(kernel, now_ns);
        planner.set_route_table_known(false);
        planner.serve_cluster_services(mode, node);
        Self {
            // Frontends of an earlier mode may have to be removed.
            is_dirty: planner.has_due_work(),
            planner,
            version: 0,
            first_table_at: None,
            draining: DrainAckReporter::default(),
            awaited: RoutedServiceReporter::of_awaited_services(),
            planned_pods: BTreeMap::new(),
            refused_services: BTreeMap::new(),
            are_maps_inconsistent: false,
            are_figures_due: true,
        }
    }

    /// Returns the planner, for facts about it.
    pub(crate) fn planner(&self) -> &RoutePlanner {
        &self.planner
    }

    /// Returns figures about all services, if a plan or an observation may have changed them since the last call.
    pub(crate) fn take_figures(&mut self) -> Option<PlannerFigures> {
        std::mem::take(&mut self.are_figures_due).then(|| self.planner.figures())
    }

    /// Takes the times of the events behind changes of EndpointSlices that are in force now, in ms since the epoch.
    /// Call it after a successful write.
    pub(crate) fn take_programmed(&mut self) -> Vec<i64> {
        self.planner.take_programmed()
    }

    /// Returns true if a change waits for its write, or a write failed. What does not fit does not count, not even if
    /// it stops a whole plan: a restart would not help.
    pub(crate) fn has_unwritten_changes(&self) -> bool {
        self.is_dirty || self.are_maps_inconsistent
    }

    /// Returns the table as the planner has it.
    pub(crate) fn table(&self) -> &PlannerTable {
        self.planner.table()
    }

    /// Returns the version of the newest complete batch.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// Returns the time of the first RouteTable.
    pub(crate) fn first_table_at(&self) -> Option<Instant> {
        self.first_table_at
    }

    /// Records what is to be reported of a batch once it is in force, before its changes are applied.
    pub(crate) fn record_batch(&mut self, batch: &RouteBatch) {
        self.draining.record_batch(batch);
        self.awaited.record_batch(batch);
    }

    /// Adds the removals that a snapshot implies: it names what exists, and subjects that it leaves out are gone.
    pub(crate) fn add_removals(&self, batch: &mut RouteBatch) {
        if batch.is_snapshot {
            let removed = self.planner.table().missing_from(&batch.changes);
            batch
                .changes
                .extend(removed.into_iter().map(|key| (key.clone(), RouteChange::Removed(key))));
        }
    }

    /// Applies one change of a batch to the table.
    pub(crate) fn apply_change(&mut self, change: RouteChange) {
        self.planner.apply_change(change);
    }

    /// Applies observations of the cluster's Services.
    pub(crate) fn apply_cluster_changes(
        &mut self,
        changes: impl IntoIterator<Item = ClusterChange>,
    ) {
        let were_known = self.are_sources_known();
        self.planner.apply_cluster_changes(changes);
        // The last first list may change no entry. A plan is written all the same: its success shows that the maps have
        // all frontends.
        let are_newly_known = !were_known && self.are_sources_known();
        self.is_dirty |= are_newly_known || self.planner.has_due_changes();
        // That list also makes the figures known.
        self.are_figures_due = true;
    }

    /// Sets the addresses of the node itself: servers of this node have them, not Services of the cluster.
    pub(crate) fn set_node_addresses(&mut self, addresses: BTreeSet<IpAddr>) {
        self.planner.set_node_addresses(addresses);
        self.is_dirty |= self.planner.has_due_changes();
    }

    /// Serves the API server's own Service like any other. `addresses` are those at which the agent reaches API servers
    /// without the Service.
    pub(crate) fn serve_api_server(&mut self, addresses: BTreeSet<IpAddr>) {
        self.planner.serve_api_server(addresses);
    }

    /// Returns the facts for the bootstrap file, if they may have changed since the last call.
    pub(crate) fn take_bootstrap_services(&mut self) -> Option<BootstrapServices> {
        self.planner.take_bootstrap_services()
    }

    /// Returns the number of Services of the cluster that do not fit.
    pub(crate) fn refused_cluster_services(&self) -> usize {
        self.planner.refused_cluster_services()
    }

    /// Takes the changes of the endpoints of the cluster's Services that are served.
    pub(crate) fn take_changed_endpoints(&mut self) -> FrontendEndpoints {
        self.planner.take_changed_endpoints()
    }

    /// Returns a source if endpoints may have left since the last call, or were not known. Call it after the writes of
    /// a plan.
    pub(crate) fn take_departures(&mut self) -> Option<DepartureSource> {
        self.planner.take_departures()
    }

    /// Returns true if all frontends of this node are known.
    pub(crate) fn are_sources_known(&self) -> bool {
        self.planner.are_sources_known()
    }

    /// Returns the not-ready reason while Services of the cluster are to be served and not known.
    pub(crate) fn unknown_services_reason(&self) -> Option<String> {
        let missing = self.planner.table().missing_cluster_kinds();
        let names: Vec<&str> = missing.into_iter().map(ClusterResource::name).collect();
        let reason = || format!("no list yet from the API server of {}", names.join(", "));
        (!names.is_empty()).then(reason)
    }

    /// Ends a batch: the table is complete in this version.
    pub(crate) fn finish_batch(&mut self, now: Instant, version: u64) {
        self.version = version;
        self.first_table_at.get_or_insert(now);
        self.planner.set_route_table_known(true);
        self.is_dirty = true;
    }

    /// Excludes a pod from connects, or includes it again, even if the RouteTable lists it as ready.
    pub(crate) fn set_excluded(&mut self, uid: &str, is_excluded: bool) {
        self.planner.set_excluded(uid, is_excluded);
        // A Service of the cluster that does not fit is tried again at sweeps, and not after each probe of a pod.
        self.is_dirty |= self.planner.has_due_changes();
    }

    /// Sets the kernel's identifiers of a pod of this node; `None`: the pod is not registered.
    pub(crate) fn set_local_pod(&mut self, uid: &str, local: Option<KernelPodIds>) {
        if self.planned_pods.get(uid) == local.as_ref() {
            return;
        }
        match local {
            Some(local) => drop(self.planned_pods.insert(uid.to_owned(), local)),
            None => drop(self.planned_pods.remove(uid)),
        }
        self.planner.mark_pod_changed(uid);
        self.is_dirty = true;
    }

    /// Returns true if a plan is to be written.
    pub(crate) fn is_dirty(&self) -> bool {
        self.is_dirty
    }

    /// Marks the table as written, before the write. If that fails, [`retry_unfinished`](Self::retry_unfinished) undoes
    /// it.
    pub(crate) fn clear_dirty(&mut self) {
        self.is_dirty = false;
    }

    /// Asks for another write if the last one failed or was partial.
    pub(crate) fn retry_unfinished(&mut self) {
        self.planner.retry_unfit();
        self.is_dirty |= self.are_maps_inconsistent || self.planner.has_due_work();
    }

    /// Returns true if the planner needs the maps' present content before the next plan.
    pub(crate) fn needs_restart(&self) -> bool {
        self.are_maps_inconsistent
    }

    /// Restarts the planner from the maps' present content, after a write failed midway.
    pub(crate) fn restart(&mut self, kernel: KernelRoutes, now_ns: u64) {
        self.planner.restart(kernel, now_ns);
        self.are_maps_inconsistent = false;
    }

    /// Returns the plan that puts the table in force with the local pods.
    pub(crate) fn plan(&mut self, now_ns: u64) -> Result<MapPlan, MapCapacityError> {
        self.are_figures_due = true;
        self.planner.plan(now_ns, &self.planned_pods)
    }

    /// Records that a plan was written in part only. The planner assumes that its plan is in force, so it has to read
    /// the maps again.
    pub(crate) fn mark_write_failed(&mut self) {
        self.are_maps_inconsistent = true;
    }

    /// Reports that all batches so far are in force: acknowledges their draining pods, and names their services that
    /// await agents.
    ///
    /// A service that does not fit is named too: for as long as the maps are full, its connects go on unchanged.
    pub(crate) fn report_in_force(&mut self, reports: &Outbox<PodReportKey, PodReportItem>) {
        self.draining.acknowledge(reports);
        self.awaited.report_services(reports);
    }

    /// Records the services that the last plan refused. Returns true if they are others than before.
    pub(crate) fn record_refused(
        &mut self,
        refused: BTreeMap<NamespacedName, MapCapacityError>,
    ) -> bool {
        let is_changed = self.refused_services.keys().ne(refused.keys());
        self.refused_services = refused;
        is_changed
    }

    /// Returns the services that the last plan refused, each with the reason.
    pub(crate) fn refused(&self) -> &BTreeMap<NamespacedName, MapCapacityError> {
        &self.refused_services
    }

    /// Returns the not-ready reason for the refused services; `None` without any.
    pub(crate) fn refused_reason(&self) -> Option<String> {
        let (service, error) = self.refused_services.iter().next()?;
        let more = match self.refused_services.len() - 1 {
            0 => String::new(),
            more => format!(" (and {more} more)"),
        };
        Some(format!(
            "connects to {service}{more} go through the activators, \
             or unchanged if the address has no frontend: {error}"
        ))
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU16;

    use common::{
        fixtures,
        service_routing::{ClusterIpPort, ClusterIpService, TransportProtocol},
        wire::{RouteKey, RoutingPhase, ServiceEntry},
    };

    use super::*;
    use crate::{map_sizes::MapSizes, routes::plan::ObservedService};

    /// Returns a snapshot of one activator.
    fn snapshot(version: u64, name: &str) -> RouteBatch {
        let entry = fixtures::activator(name, vec![[10, 0, 0, 1].into()]);
        let change = (RouteKey::Activator(name.into()), RouteChange::Activator(entry));
        let changes = [change].into();
        RouteBatch { version, is_snapshot: true, changes, ..RouteBatch::default() }
    }

    fn routes() -> NodeRoutes {
        NodeRoutes::resume(KernelRoutes::default(), ClusterIpMode::Off, "here", 0)
    }

    #[test]
    fn a_snapshot_removes_what_it_does_not_name() {
        let mut routes = routes();
        for change in snapshot(1, "a").changes.into_values() {
            routes.apply_change(change);
        }
        let mut next = snapshot(2, "b");
        routes.add_removals(&mut next);
        let removed = RouteKey::Activator("a".into());
        assert_eq!(next.changes.get(&removed), Some(&RouteChange::Removed(removed.clone())));
        let mut part = RouteBatch { is_snapshot: false, ..snapshot(2, "b") };
        routes.add_removals(&mut part);
        assert_eq!(part.changes.len(), 1, "a later batch names only what changed");
    }

    #[test]
    fn a_finished_batch_is_to_be_written_once() {
        let (mut routes, now) = (routes(), Instant::now());
        assert_eq!((routes.is_dirty(), routes.first_table_at()), (false, None));
        routes.finish_batch(now, 7);
        routes.finish_batch(now + std::time::Duration::from_secs(1), 8);
        assert_eq!((routes.version(), routes.first_table_at()), (8, Some(now)));
        assert!(routes.is_dirty());
        routes.clear_dirty();
        routes.plan(0).expect("an empty table fits");
        routes.retry_unfinished();
        assert!(!routes.is_dirty(), "all of it was written");
    }

    #[test]
    fn a_service_that_awaits_agents_is_named_once_its_batch_is_in_force() {
        let mut routes = routes();
        let reports: Outbox<PodReportKey, PodReportItem> = Outbox::new();
        let name = NamespacedName::new("default", "a");
        let service = ServiceEntry { awaits_agents: true, ..fixtures::service(&name, &name) };
        let change = (RouteKey::Service(name.clone()), RouteChange::Service(service));
        let changes = [change].into();
        let batch = RouteBatch { version: 1, is_snapshot: true, changes, ..RouteBatch::default() };
        routes.record_batch(&batch);
        let key = PodReportKey::RoutedService(name.clone());
        assert_eq!(reports.get(&key), None);
        routes.report_in_force(&reports);
        assert_eq!(reports.get(&key), Some(PodReportItem::RoutedService(name)));
    }

    #[test]
    fn a_failed_write_is_tried_again_from_what_the_maps_hold() {
        let mut routes = routes();
        routes.clear_dirty();
        routes.mark_write_failed();
        routes.retry_unfinished();
        assert_eq!((routes.is_dirty(), routes.needs_restart()), (true, true));
        routes.restart(KernelRoutes::default(), 0);
        assert!(!routes.needs_restart());
    }

    #[test]
    fn only_a_changed_local_pod_asks_for_a_plan() {
        let mut routes = routes();
        let ids = KernelPodIds { cookie: 7, slot: 1, ..KernelPodIds::default() };
        let unseen = KernelPodIds { unseen_ports: [80].into(), ..ids.clone() };
        routes.set_local_pod("a", None);
        assert!(!routes.is_dirty(), "not known before either");
        for local in [Some(ids), Some(unseen), None] {
            routes.set_local_pod("a", local.clone());
            assert!(routes.is_dirty(), "{local:?}");
            routes.clear_dirty();
            routes.set_local_pod("a", local.clone());
            assert!(!routes.is_dirty(), "{local:?} as before");
        }
    }

    #[test]
    fn only_a_changed_exclusion_asks_for_a_plan() {
        let mut routes = routes();
        let name = NamespacedName::new("default", "a");
        routes.apply_change(RouteChange::Service(fixtures::service(&name, &name)));
        let address = ([10, 244, 0, 1], 80).into();
        let pod = fixtures::pod_at("p", &name, RoutingPhase::Ready, address);
        routes.apply_change(RouteChange::Pod(pod.into()));
        routes.plan(0).expect("all of it fits");
        for is_excluded in [true, false] {
            routes.set_excluded("p", is_excluded);
            assert!(routes.is_dirty(), "{is_excluded}");
            routes.clear_dirty();
            routes.plan(0).expect("all of it fits");
            routes.set_excluded("p", is_excluded);
            assert!(!routes.is_dirty(), "{is_excluded} as before");
        }
    }

    /// Returns the observations of a cluster with one Service.
    fn one_cluster_service() -> Vec<ClusterChange> {
        let port = ClusterIpPort {
            name: "http".into(),
            protocol: TransportProtocol::Tcp,
            port: NonZeroU16::MIN,
        };
        let service = ClusterIpService {
            cluster_ips: vec![[10, 96, 0, 1].into()],
            ports: vec![port],
            ..ClusterIpService::default()
        };
        let observed = ObservedService { service, label: None, is_dns: false };
        let service = ClusterChange::Service(NamespacedName::new("default", "a"), Some(observed));
        let begun = ClusterResource::ALL.map(ClusterChange::ListBegun);
        let completed = ClusterResource::ALL.map(ClusterChange::ListCompleted);
        begun.into_iter().chain([service]).chain(completed).collect()
    }

    #[test]
    fn a_service_of_the_cluster_without_room_asks_for_plans_at_sweeps_only() {
        // All service ids are reserved ones.
        let sizes = MapSizes { frontends: 2, ..MapSizes::default() };
        let kernel = KernelRoutes { sizes, ..KernelRoutes::default() };
        let mut routes = NodeRoutes::resume(kernel, ClusterIpMode::All, "here", 0);
        routes.apply_cluster_changes(one_cluster_service());
        routes.clear_dirty();
        let plan = routes.plan(0).expect("the activators need no room");
        assert_eq!(plan.newly_refused.len(), 1);
        routes.set_excluded("p", true);
        assert!(!routes.is_dirty(), "no list has the pod");
        routes.retry_unfinished();
        assert!(routes.is_dirty());
    }

    #[test]
    fn the_last_first_list_asks_for_a_plan_even_if_it_is_empty() {
        let kernel = KernelRoutes::default();
        let mut routes = NodeRoutes::resume(kernel, ClusterIpMode::Labelled, "here", 0);
        routes.finish_batch(Instant::now(), 1);
        routes.clear_dirty();
        routes.plan(0).expect("an empty table fits");
        let begun = ClusterResource::ALL.map(ClusterChange::ListBegun);
        let [last, others @ ..] = ClusterResource::ALL.map(ClusterChange::ListCompleted);
        routes.apply_cluster_changes(begun.clone().into_iter().chain(others));
        assert_eq!((routes.is_dirty(), routes.are_sources_known()), (false, false));
        routes.apply_cluster_changes([last.clone()]);
        assert_eq!((routes.is_dirty(), routes.are_sources_known()), (true, true));
        routes.clear_dirty();
        routes.plan(0).expect("an empty table fits");
        let [first, ..] = begun;
        routes.apply_cluster_changes([first, last]);
        assert!(!routes.is_dirty(), "a later list that changes nothing");
    }

    #[test]
    fn refused_services_are_reported_when_they_change() {
        let mut routes = routes();
        let error = MapCapacityError { map: "SLOTS", size: 9, wanted: 2, free: 1, quarantined: 0 };
        let name = |name| NamespacedName::new("default", name);
        assert!(!routes.record_refused(BTreeMap::new()), "none as before");
        let two = BTreeMap::from([(name("a"), error), (name("b"), error)]);
        assert!(routes.record_refused(two.clone()));
        assert!(!routes.record_refused(two), "the same two");
        let reason = routes.refused_reason().expect("two are refused");
        assert!(reason.starts_with("connects to default/a (and 1 more) go through"), "{reason}");
        assert!(reason.contains("or unchanged if the address has no frontend: map"), "{reason}");
        assert!(reason.contains("raise list-entries in --map-sizes (now 9)"), "{reason}");
        assert!(routes.record_refused(BTreeMap::new()));
        assert_eq!(routes.refused_reason(), None);
    }
}
