//! Pure: metrics of the controller's own work.

use std::time::Duration;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};

use crate::decide::machine::ControllerEffects;

/// Label of a number of named Secrets.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct CertificateLabels {
    state: &'static str,
}

/// Label of a count of reads of named Secrets.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct SecretReadLabels {
    result: &'static str,
}

/// Result of one read of a named Secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SecretReadResult {
    /// The Secret has a certificate that can be used.
    Usable,
    /// The Secret is the same as at the last usable read.
    Unchanged,
    /// The Secret does not exist.
    Absent,
    /// The Secret has no certificate that can be used.
    Faulty,
    /// The API server has not returned the Secret.
    Unreadable,
}

impl SecretReadResult {
    fn label(self) -> &'static str {
        match self {
            Self::Usable => "usable",
            Self::Unchanged => "unchanged",
            Self::Absent => "absent",
            Self::Faulty => "faulty",
            Self::Unreadable => "unreadable",
        }
    }
}

/// Counters, gauges and histograms of the controller's own work, under the prefix `rouse_controller`.
#[derive(Clone, Debug)]
pub struct ControllerMetrics {
    step_seconds: Histogram,
    pods_started: Counter,
    pods_stopped: Counter,
    objects_written: Counter,
    reports_refused: Counter,
    subscribers: Gauge,
    certificates: Family<CertificateLabels, Gauge>,
    secret_reads: Family<SecretReadLabels, Counter>,
}

impl Default for ControllerMetrics {
    fn default() -> Self {
        // 10 µs to about 0.3 s.
        let bounds = (0..16).map(|power| 1e-5 * f64::from(1_u32 << power));
        Self {
            step_seconds: Histogram::new(bounds),
            pods_started: Counter::default(),
            pods_stopped: Counter::default(),
            objects_written: Counter::default(),
            reports_refused: Counter::default(),
            subscribers: Gauge::default(),
            certificates: Family::default(),
            secret_reads: Family::default(),
        }
    }
}

impl ControllerMetrics {
    /// Records one event: the duration of its step, and the pods that it started and stopped.
    pub fn record_step(&self, effects: &ControllerEffects, took: Duration) {
        self.step_seconds.observe(took.as_secs_f64());
        self.pods_started.inc_by(effects.pods_to_start.len().try_into().unwrap_or(u64::MAX));
        self.pods_stopped.inc_by(effects.pods_to_stop.len().try_into().unwrap_or(u64::MAX));
        self.reports_refused.inc_by(effects.refused_reports);
    }

    /// Counts one object that `rouse up` has written to its folder or removed from there. The writes to the API server
    /// have metrics of their own.
    pub fn count_object_write(&self) {
        self.objects_written.inc();
    }

    /// Number of objects written to the folder or removed from there so far.
    pub fn objects_written(&self) -> u64 {
        self.objects_written.get()
    }

    /// Adds `more` to the number of streams that follow the routes: 1 when one begins, -1 when it ends.
    pub fn add_subscribers(&self, more: i64) {
        self.subscribers.inc_by(more);
    }

    /// Sets the numbers of named Secrets by their state, if a step has changed them.
    pub fn set_certificates(&self, effects: &ControllerEffects) {
        let Some(counts) = &effects.certificate_counts else { return };
        for (state, count) in [
            ("pending", counts.pending),
            ("in_force", counts.in_force),
            ("kept", counts.kept),
            ("unusable", counts.unusable),
            ("absent", counts.absent),
            ("unreadable", counts.unreadable),
        ] {
            let count = i64::try_from(count).unwrap_or(i64::MAX);
            self.certificates.get_or_create(&CertificateLabels { state }).set(count);
        }
    }

    /// Counts one read of a named Secret.
    pub fn count_secret_read(&self, result: SecretReadResult) {
        let labels = SecretReadLabels { result: result.label() };
        self.secret_reads.get_or_create(&labels).inc();
    }

    /// Number of reads of named Secrets with this result so far.
    pub fn secret_reads(&self, result: SecretReadResult) -> u64 {
        self.secret_reads.get_or_create(&SecretReadLabels { result: result.label() }).get()
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        let registry = registry.sub_registry_with_prefix("rouse_controller");
        let help = "Time from an event to its orders and routes";
        registry.register_with_unit("step", help, Unit::Seconds, self.step_seconds.clone());
        registry.register("pods_started", "Pods ordered", self.pods_started.clone());
        registry.register("pods_stopped", "Pods told to stop", self.pods_stopped.clone());
        registry.register(
            "objects_written",
            "Objects written to disk",
            self.objects_written.clone(),
        );
        let help = "Reports of pods that run on another node than their reporter";
        registry.register("reports_refused", help, self.reports_refused.clone());
        registry.register(
            "subscribers",
            "Streams that follow the routes",
            self.subscribers.clone(),
        );
        let help = "Secrets that DomainMappings and config-network name, by the state of their certificate";
        registry.register("certificates", help, self.certificates.clone());
        let help = "Reads of named Secrets";
        registry.register("secret_reads", help, self.secret_reads.clone());
    }
}
