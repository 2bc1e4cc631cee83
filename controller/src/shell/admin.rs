//! Shell: metrics and readiness of the controller.

use std::sync::Arc;

use prometheus_client::registry::Registry;

use crate::{
    decide::machine::ControllerStateMachine,
    model::cluster_state::{ConditionType, PodStage},
    shell::runtime::ControllerRuntime,
};

/// Registry and readiness checks of the controller.
pub fn admin_state(shared: &Arc<ControllerRuntime>) -> common::admin::AdminState {
    let mut registry = Registry::default();
    shared.metrics.register(&mut registry);
    registry.register_collector(Box::new(ObjectCountCollector(Arc::clone(shared))));
    // The controller serves routes as soon as its endpoint is open, so it never has a not-ready reason.
    common::admin::AdminState::always_healthy(registry, Box::new(Vec::new))
}

/// Collector that counts the cluster state's objects at each scrape.
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

/// Returns the gauges of Services and pods: name, help text, and number.
fn count_objects(machine: &ControllerStateMachine) -> [(&'static str, &'static str, i64); 5] {
    let (mut services, mut ready) = (0, 0);
    let (mut serving, mut draining, mut stopping) = (0, 0, 0);
    for app in machine.cluster().apps.values() {
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
