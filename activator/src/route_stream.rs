//! Shell: the stream of the controller's RouteTable, and reports of the version in force.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use common::{
    link::{ComponentLink, DrainAckReporter, PodReportKey, RoutedServiceReporter},
    outbox::Outbox,
    wire::PodReportItem,
};
use tracing::info;

use crate::{
    listeners::{gateway_ports::GatewayPortListeners, service_ports::ServicePortListeners},
    requests::forwarder::RequestForwarder,
};

/// Applies each batch of the RouteTable, then reports its version as in force. `outbox` has all reports to the controllers.
pub async fn watch_routes(
    route_link: &ComponentLink,
    report_link: &ComponentLink,
    outbox: &Outbox<PodReportKey, PodReportItem>,
    forwarder: &RequestForwarder,
    ports: &ServicePortListeners,
    gateway_ports: &GatewayPortListeners,
    routes_received: &AtomicBool,
) {
    let (mut draining, mut routed) =
        (DrainAckReporter::default(), RoutedServiceReporter::default());
    let watch = route_link.watch_batches(|batch| {
        let version = batch.version;
        draining.record_batch(&batch);
        routed.record_batch(&batch);
        let ports_changed = forwarder.apply(batch);
        if ports_changed {
            ports.apply_routes();
            gateway_ports.apply_routes();
        }
        forwarder.metrics.routes_version.set(i64::try_from(version).unwrap_or(i64::MAX));
        // Drain acknowledgements go out only after the batch is in force: the controller stops pods because of them.
        outbox.set(PodReportKey::Applied, PodReportItem::Applied(version));
        draining.acknowledge(outbox);
        routed.report_services(outbox);
        if !routes_received.swap(true, Ordering::Relaxed) {
            let (services, pods) = forwarder.routes.service_and_pod_counts();
            info!(version, services, pods, "first routes in force");
        }
    });
    tokio::join!(watch, report_link.report_pods(outbox));
}

/// Flag that is true once routes were received.
pub type RoutesReceivedFlag = Arc<AtomicBool>;
