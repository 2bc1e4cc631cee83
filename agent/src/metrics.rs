//! Shell: metrics of the agent, and the reasons for which it is not ready.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, atomic::AtomicU64},
};

use datapath::abi;
use prometheus_client::{
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};

use crate::{
    incompatible::ForeignProgramOwner,
    lock::lock,
    pod_gauge::PodGauge,
    service_facts::{FrontendMode, ServiceSource},
};

/// Not-ready reasons by subject. Cheap to clone; all clones share the reasons.
#[derive(Clone, Debug, Default)]
pub(crate) struct NotReadyReasons {
    lines: Arc<Mutex<BTreeMap<&'static str, String>>>,
}

impl NotReadyReasons {
    /// Sets the reason of `subject`, or removes it.
    pub(crate) fn set(&self, subject: &'static str, reason: Option<String>) {
        let mut lines = lock(&self.lines);
        match reason {
            Some(reason) => drop(lines.insert(subject, reason)),
            None => drop(lines.remove(subject)),
        }
    }

    /// Returns the reasons as lines of text, in the order of their subjects.
    pub(crate) fn lines(&self) -> Vec<String> {
        let lines = lock(&self.lines);
        lines.iter().map(|(subject, reason)| format!("{subject}: {reason}")).collect()
    }
}

/// Metrics of the agent. Names get their unit as a suffix, counters `_total`.
///
/// Six values only grow and are a `Gauge` all the same: `events_dropped`, `untracked`, `fallbacks`, `unanswered`,
/// `listeners_unseen` and `listeners_beyond`. Each is set to a counter of the kernel, which outlives the agent.
#[derive(Clone, Debug)]
pub(crate) struct AgentMetrics {
    /// Pods of this node by state.
    pods: Family<[(&'static str, &'static str); 1], Gauge>,
    /// Events read from the kernel's ring, by kind.
    events: Family<[(&'static str, &'static str); 1], Counter>,
    /// Events that found the kernel's ring full.
    pub(crate) events_dropped: Gauge,
    /// Time from listen(2) until the report is in the stream's outbox.
    pub(crate) listen_to_report: Histogram,
    /// Thaws of frozen pods by cause.
    thaws: Family<[(&'static str, &'static str); 1], Counter>,
    /// Time from a connection or request at a frozen pod until its processes run.
    pub(crate) thaw_time: Histogram,
    /// Frozen pods of other nodes that connects pass over.
    pub(crate) pods_passed_over: Gauge,
    /// Time to plan a RouteTable and write it to the maps.
    pub(crate) apply: Histogram,
    /// Failed writes of a RouteTable.
    pub(crate) apply_failures: Counter,
    /// Version of the RouteTable in force.
    pub(crate) version: Gauge<u64, AtomicU64>,
    /// Attempts of readiness probes by result.
    probes: Family<[(&'static str, &'static str); 1], Counter>,
    /// Redirected connects without a connect record: there was no memory for it, or they are subflows of Multipath
    /// TCP. Their requests are counted.
    pub(crate) untracked: Gauge,
    /// Connects that went to an activator, because no local pod had a listener, or the agent did not promise to thaw
    /// it.
    pub(crate) fallbacks: Gauge,
    /// Connects whose SYN got no response within a second.
    pub(crate) unanswered: Gauge,
    /// Listeners that did not fit in the full map `LISTEN`.
    pub(crate) listeners_unseen: Gauge,
    /// Listeners beyond the bound for one namespace, which are not followed.
    pub(crate) listeners_beyond: Gauge,
    /// Services that do not fit in the kernel's maps.
    pub(crate) services_refused: Gauge,
    /// Services of the cluster that do not fit in the kernel's maps.
    pub(crate) cluster_services_refused: Gauge,
    /// Stale connections that were closed.
    pub(crate) connections_closed: Counter,
    /// Stale connections that were closed because the pod's node reported the end of a response.
    pub(crate) connections_closed_by_report: Counter,
    /// Times that a stale connection was due but turned out to be in use.
    pub(crate) connections_spared: Counter,
    /// Pods that had no turn for the query before a close, counted in each round.
    pub(crate) pods_not_queried: Counter,
    /// Draining pods beyond the bound on watches.
    pub(crate) pods_unwatched: Gauge,
    /// Connected UDP sockets that were ended, because their endpoint had left its Service.
    pub(crate) udp_sockets_ended: Counter,
    /// TCP connections that were ended for the same reason.
    pub(crate) tcp_sockets_ended: Counter,
    /// Network namespaces that redirect connections, whose connects go on unchanged.
    pub(crate) meshed_namespaces: Gauge,
    /// Stale connections that are left.
    pub(crate) connections_stale: Gauge,
    /// Scans for stale connections, by scope.
    client_scans: Family<[(&'static str, &'static str); 1], Counter>,
    /// Network namespaces whose connections these scans have listed.
    client_walks: Family<[(&'static str, &'static str); 1], Counter>,
    /// 1 if stale connections are closed under their locks, else 0.
    pub(crate) closes_locked: Gauge,
    /// Connections that were closed because their request was overdue.
    pub(crate) overdue_closed: Counter,
    /// Scans of pods for overdue requests.
    pub(crate) deadline_scans: Counter,
    /// 1 if connections of overdue requests are closed at all, else 0.
    pub(crate) deadlines_enforced: Gauge,
    /// Audits of a pod's gauges by result.
    audit_scans: Family<[(&'static str, &'static str); 1], Counter>,
    /// Sum of the drift of gauges that was corrected.
    audit_drift: Family<[(&'static str, &'static str); 1], Counter>,
    /// Connections to serving ports that no gauge counts.
    pub(crate) uncounted: Gauge,
    /// Foreign programs that redirect connects, by owner.
    foreign_programs: Family<[(&'static str, &'static str); 1], Gauge>,
    /// Frontends in the maps by source and mode.
    frontends: Family<[(&'static str, &'static str); 2], Gauge>,
    /// Endpoints of the cluster's Services that are served, by state.
    endpoints: Family<[(&'static str, &'static str); 1], Gauge>,
    /// Time from an event of the cluster until the maps follow it.
    pub(crate) network_programming: Histogram,
    /// Entries of a map that cannot be had now.
    map_entries: Family<[(&'static str, &'static str); 1], Gauge>,
    /// Entries up to which a source may fill a map.
    map_limit: Family<[(&'static str, &'static str); 2], Gauge>,
}

/// Kinds of kernel events, with their names in the metric.
const EVENT_KINDS: [(u32, &str); 5] = [
    (abi::EVENT_LISTEN, "listen"),
    (abi::EVENT_LISTENER_CLOSED, "listener_closed"),
    (abi::EVENT_GROWTH, "growth"),
    (abi::EVENT_IDLE, "idle"),
    (abi::EVENT_STANDBY_CONNECT, "standby_connect"),
];
/// Name of events whose kind this agent does not know.
const UNKNOWN_EVENT_KIND: &str = "unknown";

/// States of endpoints, in the order in which the planner counts them.
const ENDPOINT_STATES: [&str; 3] = ["ready", "terminating", "not_ready"];

impl AgentMetrics {
    /// Makes new metrics, and the registry that exports them.
    pub(crate) fn new() -> (Self, Registry) {
        let seconds = |first| {
            let bounds = std::iter::successors(Some(first), |bound: &f64| Some(*bound * 2.0));
            Histogram::new(bounds.take(16).collect::<Vec<f64>>())
        };
        let metrics = Self {
            pods: Family::default(),
            events: Family::default(),
            events_dropped: Gauge::default(),
            listen_to_report: seconds(10e-6),
            thaws: Family::default(),
            thaw_time: seconds(10e-6),
            pods_passed_over: Gauge::default(),
            apply: seconds(10e-6),
            apply_failures: Counter::default(),
            version: Gauge::default(),
            probes: Family::default(),
            untracked: Gauge::default(),
            fallbacks: Gauge::default(),
            unanswered: Gauge::default(),
            listeners_unseen: Gauge::default(),
            listeners_beyond: Gauge::default(),
            services_refused: Gauge::default(),
            cluster_services_refused: Gauge::default(),
            connections_closed: Counter::default(),
            connections_closed_by_report: Counter::default(),
            connections_spared: Counter::default(),
            pods_not_queried: Counter::default(),
            pods_unwatched: Gauge::default(),
            udp_sockets_ended: Counter::default(),
            tcp_sockets_ended: Counter::default(),
            meshed_namespaces: Gauge::default(),
            connections_stale: Gauge::default(),
            client_scans: Family::default(),
            client_walks: Family::default(),
            closes_locked: Gauge::default(),
            overdue_closed: Counter::default(),
            deadline_scans: Counter::default(),
            deadlines_enforced: Gauge::default(),
            audit_scans: Family::default(),
            audit_drift: Family::default(),
            uncounted: Gauge::default(),
            foreign_programs: Family::default(),
            frontends: Family::default(),
            endpoints: Family::default(),
            network_programming: seconds(1e-3),
            map_entries: Family::default(),
            map_limit: Family::default(),
        };
        // Exported from the first moment: an alert on a counter needs its 0 before its first increment.
        PodGauge::ALL.into_iter().for_each(|gauge| metrics.add_drift(gauge, 0));
        EVENT_KINDS.into_iter().for_each(|(_, name)| metrics.add_events(name, 0));
        let mut registry = Registry::default();
        let own_registry = registry.sub_registry_with_prefix("rouse_agent");
        metrics.register(own_registry);
        metrics.register_standby(own_registry);
        (metrics, registry)
    }

    /// Registers all metrics but those of standby, with their help texts.
    fn register(&self, registry: &mut Registry) {
        // Metrics are compared with docs/operations.md and deploy/monitoring/ by `xtask tidy`.
        registry.register("pods", "Pods of this node by state", self.pods.clone());
        let help = "Events read from the kernel's ring, by kind";
        registry.register("events", help, self.events.clone());
        let help = "Events that found the kernel's ring full";
        registry.register("events_dropped", help, self.events_dropped.clone());
        let help = "Time from listen(2) to the report";
        registry.register_with_unit(
            "listen_to_report",
            help,
            Unit::Seconds,
            self.listen_to_report.clone(),
        );
        let help = "Time to plan and write a route table";
        registry.register_with_unit("apply", help, Unit::Seconds, self.apply.clone());
        let help = "Route tables that could not be written";
        registry.register("apply_failures", help, self.apply_failures.clone());
        registry.register("route_version", "Route table in force", self.version.clone());
        registry.register("probes", "Tries of readiness probes by result", self.probes.clone());
        let help = "Redirected connects without a record in the kernel; requests are counted";
        registry.register("connects_untracked", help, self.untracked.clone());
        let help = "Connects that went to the activator: no local listener, or no agent to thaw it";
        registry.register("connects_fallback", help, self.fallbacks.clone());
        let help = "Connects whose first packet was not answered within a second";
        registry.register("connects_unanswered", help, self.unanswered.clone());
        let help = "Listeners that did not fit in the kernel's map";
        registry.register("listeners_unseen", help, self.listeners_unseen.clone());
        let help = "Listeners beyond those of one network namespace that are followed";
        registry.register("listeners_beyond", help, self.listeners_beyond.clone());
        let help = "Services that do not fit in the kernel's maps";
        registry.register("services_refused", help, self.services_refused.clone());
        let help = "Services of the cluster that do not fit in the kernel's maps, and are left to kube-proxy";
        registry.register("cluster_services_refused", help, self.cluster_services_refused.clone());
        self.register_ends(registry);
        let help = "Connections ended because a request took longer than timeoutSeconds";
        registry.register("deadlines_ended", help, self.overdue_closed.clone());
        let help = "Scans of pods for requests that take longer than timeoutSeconds";
        registry.register("deadlines_looks", help, self.deadline_scans.clone());
        let help = "1 where the kernel permits to find and close such connections, 0 elsewhere";
        registry.register("deadlines_kept", help, self.deadlines_enforced.clone());
        let help = "Comparisons of a pod's gauges with its sockets, by result";
        registry.register("audit_looks", help, self.audit_scans.clone());
        let help = "By how much gauges had drifted from the pods' sockets and were put right";
        registry.register("audit_drift", help, self.audit_drift.clone());
        let help = "Connections to pods' serving ports that the eBPF programs do not count";
        registry.register("audit_uncounted_connections", help, self.uncounted.clone());
        let help = "Programs of others that redirect connects, by owner";
        registry.register("foreign_programs", help, self.foreign_programs.clone());
        self.register_routes(registry);
    }

    /// Registers what is counted of connections that the agent ends.
    fn register_ends(&self, registry: &mut Registry) {
        let help = "Stale connections closed, so that their clients connect again";
        registry.register("connections_ended", help, self.connections_closed.clone());
        let help = "Stale connections closed because the pod's node reported the end of a response";
        let closed_by_report = self.connections_closed_by_report.clone();
        registry.register("connections_ended_by_report", help, closed_by_report);
        let help = "Stale connections not closed, because they were in use again";
        registry.register("connections_spared", help, self.connections_spared.clone());
        let help =
            "Pods whose stale connections stay for a round, as too many queries are under way";
        registry.register("pods_not_queried", help, self.pods_not_queried.clone());
        let help = "Draining pods that are not watched, as too many are";
        registry.register("pods_unwatched", help, self.pods_unwatched.clone());
        let help = "UDP sockets ended, because their endpoint had left its Service";
        registry.register("udp_sockets_ended", help, self.udp_sockets_ended.clone());
        let help = "TCP connections ended, because their endpoint had left its Service";
        registry.register("tcp_sockets_ended", help, self.tcp_sockets_ended.clone());
        let help = "Network namespaces that redirect connections, whose connects go on unchanged";
        registry.register("meshed_namespaces", help, self.meshed_namespaces.clone());
        let help = "Stale connections that are still open";
        registry.register("connections_left", help, self.connections_stale.clone());
        let help = "Scans for stale connections, by the clients that they cover";
        registry.register("client_scans", help, self.client_scans.clone());
        let help = "Network namespaces whose connections such scans have listed";
        registry.register("client_walks", help, self.client_walks.clone());
        let help = "1 where stale connections are closed under their locks (Linux 6.5), else 0";
        registry.register("ends_locked", help, self.closes_locked.clone());
    }

    /// Registers the figures about pods with a standby order.
    fn register_standby(&self, registry: &mut Registry) {
        let help = "Thaws of frozen pods by cause";
        registry.register("thaws", help, self.thaws.clone());
        let help = "Time from a connection or request at a frozen pod until its processes run";
        registry.register_with_unit("thaw", help, Unit::Seconds, self.thaw_time.clone());
        let help = "Frozen pods of other nodes that connects pass over, as no agent thaws them";
        registry.register("pods_passed_over", help, self.pods_passed_over.clone());
    }

    /// Registers the figures about routes.
    fn register_routes(&self, registry: &mut Registry) {
        let help = "Frontends in the kernel's maps, by source and by treatment of their connects";
        registry.register("frontends", help, self.frontends.clone());
        let help = "Endpoints of the cluster's Services that are served, by state";
        registry.register("endpoints", help, self.endpoints.clone());
        let help = "Time from a change of endpoints until the kernel's maps follow it";
        let histogram = self.network_programming.clone();
        registry.register_with_unit("network_programming", help, Unit::Seconds, histogram);
        let help = "Entries of a kernel map that are in use or in quarantine";
        registry.register("map_entries", help, self.map_entries.clone());
        let help = "Entries up to which services of a source may fill a kernel map";
        registry.register("map_limit", help, self.map_limit.clone());
    }

    /// Counts one event of the kernel. `kind` is one of `abi::EVENT_*`.
    pub(crate) fn count_event(&self, kind: u32) {
        let named = EVENT_KINDS.into_iter().find(|(known, _)| *known == kind);
        self.add_events(named.map_or(UNKNOWN_EVENT_KIND, |(_, name)| name), 1);
    }

    /// Adds to the number of events whose kind has this name.
    fn add_events(&self, name: &'static str, count: u64) {
        self.events.get_or_create(&[("kind", name)]).inc_by(count);
    }

    /// Sets the number of frontends of a source in the maps, by mode.
    pub(crate) fn set_frontends(&self, source: ServiceSource, mode: FrontendMode, count: usize) {
        let labels = [("source", source.name()), ("mode", mode.name())];
        set_count(&self.frontends.get_or_create(&labels), count);
    }

    /// Sets the number of endpoints by state: ready, terminating and still serving, neither.
    pub(crate) fn set_endpoints(&self, counts: [usize; 3]) {
        for (state, count) in ENDPOINT_STATES.into_iter().zip(counts) {
            set_count(&self.endpoints.get_or_create(&[("state", state)]), count);
        }
    }

    /// Sets the number of entries of a map that cannot be had now, and the limits by source.
    pub(crate) fn set_map_use<const N: usize>(
        &self,
        map: &'static str,
        entries: usize,
        limits: [(&'static str, usize); N],
    ) {
        set_count(&self.map_entries.get_or_create(&[("map", map)]), entries);
        for (source, limit) in limits {
            set_count(&self.map_limit.get_or_create(&[("map", map), ("source", source)]), limit);
        }
    }

    /// Sets the number of pods in each of these states.
    pub(crate) fn set_pod_counts(&self, counts: impl IntoIterator<Item = (&'static str, usize)>) {
        for (state, count) in counts {
            self.pods
                .get_or_create(&[("state", state)])
                .set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }

    /// Sets the number of foreign programs by owner.
    pub(crate) fn set_foreign_programs(&self, counts: &BTreeMap<ForeignProgramOwner, usize>) {
        // Cleared first: an owner whose programs are gone must not stay in the metric.
        self.foreign_programs.clear();
        for (owner, count) in counts {
            let gauge = self.foreign_programs.get_or_create(&[("owner", owner.name())]);
            gauge.set(i64::try_from(*count).unwrap_or(i64::MAX));
        }
    }

    /// Counts one audit of a pod's gauges. `still`: no gauge changed during the scan; `moved`: one did, and only the
    /// others were compared; `failed`: the pod could not be scanned.
    pub(crate) fn count_audit(&self, result: &'static str) {
        self.audit_scans.get_or_create(&[("result", result)]).inc();
    }

    /// Adds the corrected drift of a gauge.
    pub(crate) fn add_drift(&self, gauge: PodGauge, by: u64) {
        self.audit_drift.get_or_create(&[("gauge", gauge.name())]).inc_by(by);
    }

    /// Adds to the number of thaws with this cause.
    pub(crate) fn add_thaws(&self, cause: &'static str, count: u64) {
        self.thaws.get_or_create(&[("cause", cause)]).inc_by(count);
    }

    /// Counts one scan for stale connections, and the network namespaces whose connections it has listed.
    pub(crate) fn count_client_scan(&self, scope: &'static str, walks: u64) {
        self.client_scans.get_or_create(&[("scope", scope)]).inc();
        self.client_walks.get_or_create(&[("scope", scope)]).inc_by(walks);
    }

    /// Counts one attempt of a probe.
    pub(crate) fn count_probe(&self, passed: bool) {
        let result = if passed { "passed" } else { "failed" };
        self.probes.get_or_create(&[("result", result)]).inc();
    }
}

fn set_count(gauge: &Gauge, count: usize) {
    gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
}

/// Returns the latency in seconds of a change whose event was at `triggered_ms`, and which came into force at `now_ms`.
/// `None` for an event before `started_ms`: what happened before this agent started tells nothing of its latency. Times
/// are in ms since the epoch; a clock that lags behind the control plane's gives 0.
pub(crate) fn programming_seconds(started_ms: i64, now_ms: i64, triggered_ms: i64) -> Option<f64> {
    // Milliseconds of a year fit into the mantissa.
    let seconds = now_ms.saturating_sub(triggered_ms).max(0) as f64 / 1e3;
    (triggered_ms > started_ms).then_some(seconds)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::tracker::PodStateCounts;

    #[test]
    fn latencies_count_from_the_start_and_are_never_negative() {
        assert_eq!(programming_seconds(1_000, 2_500, 2_000), Some(0.5));
        assert_eq!(programming_seconds(1_000, 2_000, 2_500), Some(0.0), "the clock lags behind");
        assert_eq!(programming_seconds(1_000, 2_500, 1_000), None, "before the start");
        assert_eq!(programming_seconds(0, i64::MIN, 1), Some(0.0));
    }

    #[test]
    fn metric_names_carry_units() {
        let (metrics, registry) = AgentMetrics::new();
        let counts =
            PodStateCounts { in_table: 3, listening: 2, ready: 1, ..PodStateCounts::default() };
        metrics.set_pod_counts(counts.by_state());
        metrics.count_probe(true);
        metrics.count_event(abi::EVENT_GROWTH);
        metrics.count_event(u32::MAX);
        metrics.count_client_scan("all", 3);
        metrics.add_thaws("request", 2);
        metrics.thaw_time.observe(0.001);
        metrics.set_foreign_programs(&BTreeMap::from([(ForeignProgramOwner::Cilium, 2)]));
        metrics.set_frontends(ServiceSource::Service, FrontendMode::Refuse, 3);
        metrics.set_endpoints([5, 1, 2]);
        metrics.set_map_use("SLOTS", 7, [("route", 100), ("service", 75)]);
        metrics.network_programming.observe(0.2);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).expect("it is text");
        for line in [
            "rouse_agent_pods{state=\"ready\"} 1",
            "rouse_agent_probes_total{result=\"passed\"} 1",
            "rouse_agent_events_total{kind=\"growth\"} 1",
            "rouse_agent_events_total{kind=\"listen\"} 0",
            "rouse_agent_events_total{kind=\"unknown\"} 1",
            "rouse_agent_client_scans_total{scope=\"all\"} 1",
            "rouse_agent_client_walks_total{scope=\"all\"} 3",
            "rouse_agent_thaws_total{cause=\"request\"} 2",
            "rouse_agent_thaw_seconds_count 1",
            "rouse_agent_listen_to_report_seconds_count 0",
            "rouse_agent_foreign_programs{owner=\"cilium\"} 2",
            "rouse_agent_frontends{source=\"service\",mode=\"refuse\"} 3",
            "rouse_agent_endpoints{state=\"not_ready\"} 2",
            "rouse_agent_map_entries{map=\"SLOTS\"} 7",
            "rouse_agent_map_limit{map=\"SLOTS\",source=\"service\"} 75",
            "rouse_agent_network_programming_seconds_count 1",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
    }
}
