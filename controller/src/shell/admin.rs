//! Shell: metrics and readiness of the controller.

use std::{sync::Arc, time::Duration};

use prometheus_client::{
    metrics::{counter::Counter, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};

use crate::{
    machine::{ControllerEffects, ControllerStateMachine},
    runtime::ControllerRuntime,
    world::{ConditionType, PodStage},
};

/// Counters, gauges and histograms of the controller's own work, under the prefix `rouse_controller`.
#[derive(Clone, Debug)]
pub struct ControllerMetrics {
    step_seconds: Histogram,
    pods_started: Counter,
    pods_stopped: Counter,
    objects_written: Counter,
    reports_refused: Counter,
    subscribers: Gauge,
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

    /// Counts one object that was written or removed.
    pub fn count_object_write(&self) {
        self.objects_written.inc();
    }

    /// Number of objects written or removed so far.
    pub fn objects_written(&self) -> u64 {
        self.objects_written.get()
    }

    /// Adds `more` to the number of streams that follow the routes: 1 when one begins, -1 when it ends.
    pub fn add_subscribers(&self, more: i64) {
        self.subscribers.inc_by(more);
    }

    fn register(&self, registry: &mut Registry) {
        let own = registry.sub_registry_with_prefix("rouse_controller");
        let help = "Time from an event to its orders and routes";
        own.register_with_unit("step", help, Unit::Seconds, self.step_seconds.clone());
        own.register("pods_started", "Pods ordered", self.pods_started.clone());
        own.register("pods_stopped", "Pods told to stop", self.pods_stopped.clone());
        own.register("objects_written", "Objects written to disk", self.objects_written.clone());
        let help = "Reports of pods that run on another node than their reporter";
        own.register("reports_refused", help, self.reports_refused.clone());
        own.register("subscribers", "Streams that follow the routes", self.subscribers.clone());
    }
}

/// Registry and readiness checks of the controller.
pub fn admin_state(shared: &Arc<ControllerRuntime>) -> common::admin::AdminState {
    let mut registry = Registry::default();
    shared.metrics.register(&mut registry);
    registry.register_collector(Box::new(ObjectCountCollector(Arc::clone(shared))));
    // The controller serves routes as soon as its endpoint is open, so it never has a not-ready reason.
    common::admin::AdminState { registry, not_ready_reasons: Box::new(Vec::new) }
}

/// Collector that counts the world's objects at each scrape.
#[derive(Debug)]
struct ObjectCountCollector(Arc<ControllerRuntime>);

impl prometheus_client::collector::Collector for ObjectCountCollector {
    fn encode(
        &self,
        mut encoder: prometheus_client::encoding::DescriptorEncoder<'_>,
    ) -> Result<(), std::fmt::Error> {
        use prometheus_client::{encoding::EncodeMetric as _, metrics::gauge::ConstGauge};
        // The values are computed before anything is encoded: the machine's lock is held only for the count.
        let counts = self.0.with_machine(count_objects);
        for (name, help, value) in counts {
            let gauge = ConstGauge::new(value);
            let kind = gauge.metric_type();
            gauge.encode(encoder.encode_descriptor(name, help, None, kind)?)?;
        }
        Ok(())
    }
}

fn count_objects(machine: &ControllerStateMachine) -> [(&'static str, &'static str, i64); 5] {
    let (mut services, mut ready) = (0, 0);
    let (mut serving, mut draining, mut stopping) = (0, 0, 0);
    for app in machine.world().apps.values() {
        // Configurations and Routes of their own are apps too, but have no Service condition.
        if app.service.is_some() {
            services += 1;
            ready += i64::from(app.conditions.is_true(ConditionType::ServiceReady));
        }
        for (_, pod) in app.pods() {
            match pod.stage {
                PodStage::Serving => serving += 1,
                PodStage::Draining { .. } => draining += 1,
                PodStage::Stopping { .. } => stopping += 1,
            }
        }
    }
    [
        ("rouse_controller_services", "Services", services),
        ("rouse_controller_services_ready", "Services that are ready", ready),
        ("rouse_controller_pods_serving", "Pods that serve or start", serving),
        ("rouse_controller_pods_draining", "Pods that wait for their last request", draining),
        ("rouse_controller_pods_stopping", "Pods told to stop", stopping),
    ]
}
