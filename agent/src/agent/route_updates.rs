//! Shell: the part of the loop that receives the RouteTable and writes plans into the kernel's maps.

use std::{collections::BTreeMap, time::Instant};

use common::{
    link::{PodReportKey, RouteBatch, error_chain},
    wire::{NamespacedName, PodReportItem, RouteChange, RouteKey},
};
use tracing::{debug, error, info, warn};

use super::{Agent, ClusterStart};
use crate::{
    clock::monotonic_ns,
    config::ClusterIpMode,
    kernel::{
        map_op::KernelRoutes,
        maps::{KernelMapError, KernelMaps},
        takeover_stage::ProgramTakeoverStage,
    },
    pods::types::PodTrackerEvent,
    routes::{
        plan::{MapCapacityError, MapPlan, OutrankedService, bootstrap_ops, copy_ops},
        service_events::ServiceEventReason,
    },
};

/// Number of Services of the cluster that one plan logs by name.
const SERVICES_LOGGED_MAX: usize = 5;
/// Section of the documentation about full maps, for Events.
const MAP_SIZES_DOCS: &str = "docs/operations.md#sizes-of-the-maps";

/// Progress of one plan.
struct MapPlanProgress {
    /// Number of map operations.
    writes: usize,
    /// True if lists of the previous table are still in force.
    is_partial: bool,
}

/// Fills the maps with what an earlier agent has left elsewhere. Returns the routes in force, and true if these are all
/// lists of the maps that connects follow until now.
pub(super) fn start_routes(
    maps: &mut KernelMaps,
    cluster: &ClusterStart,
    earlier: Option<&KernelRoutes>,
) -> Result<(KernelRoutes, bool), KernelMapError> {
    let has_earlier_lists = copy_earlier_lists(maps, earlier)?;
    Ok((fill_empty_maps(maps, cluster)?, has_earlier_lists))
}

/// Gives the maps all lists of the maps that connects follow, which have other sizes. Returns false if there are none.
/// It also does so if they do not fit: then connects follow the earlier maps until all sources are known.
///
/// What a copy that has ended midway has left here is replaced.
fn copy_earlier_lists(
    maps: &mut KernelMaps,
    earlier: Option<&KernelRoutes>,
) -> Result<bool, KernelMapError> {
    let Some(earlier) = earlier else { return Ok(false) };
    match copy_ops(maps.read_routes()?, earlier, monotonic_ns()) {
        Ok(ops) => {
            maps.apply(&ops)?;
            info!(frontends = earlier.frontends.len(), "lists of the earlier maps copied");
            Ok(true)
        }
        Err(error) => {
            warn!(%error, "the lists of the earlier maps do not fit and stay in force");
            Ok(false)
        }
    }
}

/// Fills maps without frontends with the lists of the bootstrap file, as after a reboot. Returns the routes in force.
/// Frontends that an earlier agent left are newer than the file.
fn fill_empty_maps(
    maps: &mut KernelMaps,
    cluster: &ClusterStart,
) -> Result<KernelRoutes, KernelMapError> {
    let kernel = resume_routes(maps)?;
    let has_lists = cluster.mode != ClusterIpMode::Off && !cluster.frontends.is_empty();
    if !has_lists || !kernel.frontends.is_empty() {
        return Ok(kernel);
    }
    let own = cluster.api_server_addresses.as_ref();
    match bootstrap_ops(kernel, &cluster.frontends, own, monotonic_ns()) {
        Ok(ops) => {
            maps.apply(&ops)?;
            info!(writes = ops.len(), "maps filled from the bootstrap file");
        }
        // The agent starts all the same: the maps are filled once the sources are known.
        Err(error) => warn!(%error, "the lists of the bootstrap file do not fit"),
    }
    maps.read_routes()
}

/// Reads the routes in force, and gives each list another generation. The last write may have ended between an entry of
/// a list and its word. Connects that have read a replaced entry then choose again.
fn resume_routes(maps: &mut KernelMaps) -> Result<KernelRoutes, KernelMapError> {
    let mut kernel = maps.read_routes()?;
    maps.apply(&kernel.raise_generations())?;
    Ok(kernel)
}

impl Agent {
    /// Handles a batch of the RouteTable.
    pub(super) fn apply_batch(&mut self, mut batch: RouteBatch) {
        self.routes.record_batch(&batch);
        let revisions = self.handles.revision_totals.changed_revisions(&batch);
        self.routes.add_removals(&mut batch);
        let is_revision = |change: &RouteChange| matches!(change, RouteChange::Revision(_));
        let has_revisions = batch.changes.values().any(is_revision);
        let mut events = Vec::new();
        if batch.begins_stream {
            let is_changed = |uid: &str| batch.changes.contains_key(&RouteKey::Pod(uid.to_owned()));
            events = self.pods.begin_table(is_changed);
        }
        for (key, change) in batch.changes {
            match (key, &change) {
                (RouteKey::Pod(uid), RouteChange::Pod(pod)) if pod.node == self.node => {
                    // An earlier table may have placed it on another node.
                    self.standby_watcher.remove_pod(&uid);
                    events.push(PodTrackerEvent::RouteUpdated(pod.clone()));
                }
                (RouteKey::Pod(uid), RouteChange::Pod(pod)) => {
                    self.handle_remote_pod(pod);
                    // Dropped as a pod of this node too: an earlier table may have placed it here.
                    events.push(PodTrackerEvent::RouteRemoved(uid));
                }
                (RouteKey::Pod(uid), _) => {
                    self.remote_pods.remove_pod(&uid);
                    self.standby_watcher.remove_pod(&uid);
                    self.update_exclusion(&uid);
                    events.push(PodTrackerEvent::RouteRemoved(uid));
                }
                _ => {}
            }
            self.handles.activator_reports.apply_change(&change);
            self.routes.apply_change(change);
        }
        let table = self.routes.table();
        self.handles.revision_totals.apply_changes(revisions, |name| table.request_terms(name));
        self.remote_pods.forget_known_addresses();
        // The planner has the whole batch before any event is handled: events read the table.
        events.into_iter().for_each(|event| self.handle_event(event));
        // The protocol of a Revision tells how the connections of its pods count.
        if has_revisions {
            self.update_registrations();
        }
        self.routes.finish_batch(Instant::now(), batch.version);
        self.probe_remote_pods();
    }

    /// Writes the difference between the maps and the known sources, and reports the version in force.
    pub(super) fn apply_routes(&mut self) {
        // Before the write: after a failure the planner keeps its changes, and `housekeep` requests another write.
        self.routes.clear_dirty();
        let begun = Instant::now();
        let written = self.write_plan();
        if written.is_ok()
            && let Some(source) = self.routes.take_departures()
        {
            self.stale_sockets.request_rounds(Instant::now(), source);
        }
        match written {
            // Lists of the previous table are still in force, so this version is not reported yet.
            Ok(MapPlanProgress { is_partial: true, .. }) => {}
            Ok(MapPlanProgress { writes, .. }) => {
                // Draining pods and stale connections are scanned now, not a second later.
                self.next_sweep = begun;
                let version = self.routes.version();
                debug!(version, writes, took = ?begun.elapsed(), "routes applied");
                self.handles.metrics.apply.observe(begun.elapsed().as_secs_f64());
                self.handles.not_ready.set("maps", None);
                self.report_applied(version);
            }
            Err(failure) => {
                error!(error = failure, version = self.routes.version(), "cannot apply routes");
                self.handles.metrics.apply_failures.inc();
                self.handles.not_ready.set("maps", Some(failure));
            }
        }
    }

    /// Reports the version of the RouteTable that is in force, if there is one.
    fn report_applied(&mut self, version: u64) {
        if self.routes.first_table_at().is_some() {
            self.handles.metrics.version.set(version);
            self.handles.reports.set(PodReportKey::Applied, PodReportItem::Applied(version));
            self.routes.report_in_force(&self.handles.reports);
        }
        // Programs that follow tables in which frontends are missing must not replace programs that have them. In copied
        // tables none is missing, and only these follow what is known from now on.
        if self.has_earlier_lists || self.routes.are_sources_known() {
            self.advance_stage(ProgramTakeoverStage::TablesFilled);
        }
    }

    /// Plans and writes the changes. Returns the progress, or the reason for which the next sweep tries again.
    fn write_plan(&mut self) -> Result<MapPlanProgress, String> {
        if self.routes.needs_restart() {
            let kernel = resume_routes(&mut self.handles.maps);
            let kernel = kernel.map_err(|error| error_chain(&error))?;
            self.routes.restart(kernel, monotonic_ns());
        }
        let plan = self.routes.plan(monotonic_ns()).map_err(|error| error.to_string())?;
        // Before the writes: a pod that becomes a target again must not lose connections that these writes bring.
        self.stale_connections.update_addresses(&plan, self.routes.table());
        if let Err(error) = self.handles.maps.apply(&plan.ops) {
            self.routes.mark_write_failed();
            return Err(error_chain(&error));
        }
        self.observe_programming();
        self.standby_watcher.record_added(&plan.added_pods);
        let MapPlan { ops, refused, newly_refused, newly_outranked, is_partial, .. } = plan;
        self.report_refused(refused);
        self.report_refused_cluster_services(&newly_refused);
        self.report_outranked_services(&newly_outranked);
        Ok(MapPlanProgress { writes: ops.len(), is_partial })
    }

    /// Reports Services of the cluster that do not fit. The agent is ready all the same: kube-proxy serves them.
    fn report_refused_cluster_services(
        &mut self,
        newly_refused: &[(NamespacedName, MapCapacityError)],
    ) {
        let count = self.routes.refused_cluster_services();
        self.handles.metrics.cluster_services_refused.set(count as i64);
        // A full map refuses thousands at once, and the first ones tell which map.
        for (service, reason) in newly_refused.iter().take(SERVICES_LOGGED_MAX) {
            warn!(%service, error = %reason, count, "service does not fit and is left to kube-proxy");
        }
        let node = &self.node;
        for (service, reason) in newly_refused {
            self.handles.service_events.record(
                service,
                ServiceEventReason::KernelMapFull,
                &format_args!(
                    "node {node} does not serve the Service: {reason}; see {MAP_SIZES_DOCS}"
                ),
            );
        }
        self.handles.service_events.log_left_out();
    }

    /// Reports Services of the cluster that are not served at an address of one of Rouse's services.
    fn report_outranked_services(&mut self, newly_outranked: &[OutrankedService]) {
        for outranked in newly_outranked.iter().take(SERVICES_LOGGED_MAX) {
            let OutrankedService { service, address, owner } = outranked;
            warn!(%service, %address, %owner, "address of a service belongs to one of Rouse's");
        }
        let node = &self.node;
        for outranked in newly_outranked {
            self.handles.service_events.record(
                &outranked.service,
                ServiceEventReason::ClusterIpTaken,
                &format_args!("node {node} does not serve the Service: {outranked}"),
            );
        }
    }

    /// Reports the services that do not fit the maps. They are planned again at each sweep.
    fn report_refused(&mut self, refused: BTreeMap<NamespacedName, MapCapacityError>) {
        self.handles.metrics.services_refused.set(i64::try_from(refused.len()).unwrap_or(i64::MAX));
        // Logged and shown only when the set changes, as each sweep repeats it.
        if self.routes.record_refused(refused) {
            for (service, reason) in self.routes.refused() {
                warn!(
                    %service,
                    error = %reason,
                    "service does not fit: its connects go through the activators, \
                     or unchanged if the address has no frontend"
                );
            }
            self.handles.not_ready.set("services", self.routes.refused_reason());
        }
    }
}
