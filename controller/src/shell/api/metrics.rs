//! Pure: metrics of the requests to the API server.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};

use super::write_outcome::WriteOutcome;
use crate::model::object::{ObjectPartKey, ResourceKind};

/// Labels of a count of writes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ApiWriteLabels {
    resource: String,
    part: &'static str,
    outcome: &'static str,
}

/// Label of a count of watch events or restarts.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ApiWatchLabels {
    resource: String,
}

/// Label of a number of queued keys.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct WriteQueueLabels {
    state: &'static str,
}

/// Counters, gauges and a histogram of watches, writes and the queue.
#[derive(Clone, Debug)]
pub struct ApiServerMetrics {
    writes: Family<ApiWriteLabels, Counter>,
    write_seconds: Histogram,
    watch_restarts: Family<ApiWatchLabels, Counter>,
    watch_events: Family<ApiWatchLabels, Counter>,
    queue_lengths: Family<WriteQueueLabels, Gauge>,
    is_leader: Gauge,
    lost_events: Counter,
}

impl Default for ApiServerMetrics {
    fn default() -> Self {
        // 1 ms to about 16 s.
        let bounds = (0..15).map(|power| 1e-3 * f64::from(1_u32 << power));
        Self {
            writes: Family::default(),
            write_seconds: Histogram::new(bounds),
            watch_restarts: Family::default(),
            watch_events: Family::default(),
            queue_lengths: Family::default(),
            is_leader: Gauge::default(),
            lost_events: Counter::default(),
        }
    }
}

impl ApiServerMetrics {
    /// Counts a finished write and its duration.
    pub fn record_write(
        &self,
        key: &ObjectPartKey,
        outcome: &WriteOutcome,
        took: std::time::Duration,
    ) {
        let part = match key.part {
            crate::model::object::ObjectPart::Scale => "scale",
            crate::model::object::ObjectPart::Object => "object",
            crate::model::object::ObjectPart::Status => "status",
            crate::model::object::ObjectPart::Resize => "resize",
        };
        let labels =
            ApiWriteLabels { resource: key.resource.to_string(), part, outcome: outcome.label() };
        self.writes.get_or_create(&labels).inc();
        self.write_seconds.observe(took.as_secs_f64());
    }

    /// Counts an event of a watch.
    pub fn count_watch_event(&self, resource: ResourceKind) {
        self.watch_events.get_or_create(&ApiWatchLabels { resource: resource.to_string() }).inc();
    }

    /// Counts a watch that broke and was begun again.
    pub fn count_watch_restart(&self, resource: ResourceKind) {
        self.watch_restarts.get_or_create(&ApiWatchLabels { resource: resource.to_string() }).inc();
    }

    /// Sets the numbers of keys that are ready, that wait for a time, and that are being written.
    pub fn set_queue_lengths(&self, (waiting, later, busy): (usize, usize, usize)) {
        for (state, count) in [("waiting", waiting), ("later", later), ("writing", busy)] {
            let count = i64::try_from(count).unwrap_or(i64::MAX);
            self.queue_lengths.get_or_create(&WriteQueueLabels { state }).set(count);
        }
    }

    /// Sets the gauge of leadership.
    pub fn set_leader(&self, is_leader: bool) {
        self.is_leader.set(is_leader.into());
    }

    /// Counts an Event that was dropped because the inbox was full.
    pub fn count_lost_event(&self) {
        self.lost_events.inc();
    }

    /// Registers all metrics under the prefix `rouse_controller_kube`.
    pub fn register(&self, registry: &mut Registry) {
        let registry = registry.sub_registry_with_prefix("rouse_controller_kube");
        registry.register("writes", "Writes to the API server", self.writes.clone());
        let help = "Time the API server took for a write";
        registry.register_with_unit("write", help, Unit::Seconds, self.write_seconds.clone());
        registry.register("watch_restarts", "Watches begun again", self.watch_restarts.clone());
        registry.register("watch_events", "Events of watches", self.watch_events.clone());
        registry.register("queue", "Objects to be written", self.queue_lengths.clone());
        registry.register("leader", "1 while this replica writes", self.is_leader.clone());
        registry.register(
            "events_lost",
            "Kubernetes Events dropped because their queue was full",
            self.lost_events.clone(),
        );
    }
}
