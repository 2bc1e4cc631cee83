//! Shell: the part of the loop that answers the pages of facts, and sets the metrics of routes.

use std::time::Instant;

use datapath::abi;

use super::Agent;
use crate::{
    admin::{FactsQuery, ServicesChunk},
    clock::{monotonic_ns, unix_ms},
    metrics::programming_seconds,
    routes::plan::MapUse,
    service_facts::{BackendUsage, ServiceSource},
    standby_page::NodeStandby,
};

/// Number of services in one part of a page: the loop has other work too.
const CHUNK_SERVICES: usize = 128;

impl Agent {
    /// Answers a question of a page. A page that no longer waits is ignored.
    pub(super) fn answer_query(&self, query: FactsQuery) {
        let planner = self.routes.planner();
        match query {
            FactsQuery::Services(cursor, reply) => {
                let (services, next) = planner.facts_after(&cursor, CHUNK_SERVICES);
                let _ = reply.send(ServicesChunk { node: planner.node_facts(), services, next });
            }
            FactsQuery::Trace(target, reply) => {
                let (maps, now_ns) = (&self.handles.maps, monotonic_ns());
                let usage = |backend| BackendUsage {
                    open_connections: maps.open_connections(backend),
                    is_unanswered: maps.is_unanswered(backend, now_ns),
                };
                let mut facts = planner.trace(&target, usage);
                // The planner does not know these: the kernel's maps hold them.
                facts.set_exceptions(
                    maps.control_word(abi::CONTROL_KERNEL_THREADS_LEFT) != 0,
                    maps.control_word(abi::CONTROL_MESHED_NETNS),
                );
                let _ = reply.send(facts);
            }
            FactsQuery::Standby(reply) => {
                let pods = self.standby.reports();
                let pods = pods.filter_map(|(uid, report)| Some((self.pods.get(uid)?, report)));
                let _ = reply.send(NodeStandby::new(planner.node_facts(), pods));
            }
        }
    }

    /// Records for the health checks if changes wait, and if some came into force.
    pub(super) fn record_progress(&self, has_waiting_changes: bool, has_applied: bool) {
        let has_pending = has_waiting_changes || self.routes.has_unwritten_changes();
        self.handles.health.record_progress(Instant::now(), has_pending, has_applied);
    }

    /// Observes the latency of the changes of endpoints that a plan has put in force.
    pub(super) fn observe_programming(&mut self) {
        let now_ms = unix_ms();
        for triggered_ms in self.routes.take_programmed() {
            let seconds = programming_seconds(self.started_ms, now_ms, triggered_ms);
            seconds.into_iter().for_each(|it| self.handles.metrics.network_programming.observe(it));
        }
    }

    /// Sets the metrics of routes, if a plan may have changed them.
    pub(super) fn update_route_metrics(&mut self) {
        let metrics = &self.handles.metrics;
        // Row 0 means no pod.
        let pods_limit = [("any", abi::PODS_MAX as usize - 1)];
        metrics.set_map_use(abi::maps::PODS, self.registry.len(), pods_limit);
        let Some(figures) = self.routes.take_figures() else { return };
        for ((source, mode), count) in figures.frontends {
            metrics.set_frontends(source, mode, count);
        }
        figures.endpoints.into_iter().for_each(|counts| metrics.set_endpoints(counts));
        for MapUse { map, entries, limit, cluster_limit } in figures.maps {
            metrics.set_map_use(map, entries, [(ServiceSource::Route.name(), limit)]);
            if let Some(limit) = cluster_limit {
                metrics.set_map_use(map, entries, [(ServiceSource::Service.name(), limit)]);
            }
        }
    }
}
