//! Shell: the stream of the controller's RouteTable, and reports of the version in force.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use common::{
    link::{ComponentLink, DrainAckReporter, PodReportKey, RouteBatchInbox, RoutedServiceReporter},
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
    let inbox = RouteBatchInbox::default();
    let watch = route_link.watch_batches(|batch| inbox.merge_batch(batch));
    let applier = RouteApplier { outbox, forwarder, ports, gateway_ports, routes_received };
    tokio::select! {
        // The stream first: a batch is then applied in the turn in which it has come.
        biased;
        _ended = async { tokio::join!(watch, report_link.report_pods(outbox)) } => {}
        () = applier.apply_batches(&inbox) => {}
    }
}

/// Receivers of the routes at an activator.
struct RouteApplier<'a> {
    outbox: &'a Outbox<PodReportKey, PodReportItem>,
    forwarder: &'a RequestForwarder,
    ports: &'a ServicePortListeners,
    gateway_ports: &'a GatewayPortListeners,
    routes_received: &'a AtomicBool,
}

impl RouteApplier<'_> {
    /// Applies the batches of the inbox, without an end.
    async fn apply_batches(&self, inbox: &RouteBatchInbox) {
        let (mut draining, mut routed) =
            (DrainAckReporter::default(), RoutedServiceReporter::default());
        loop {
            let batch = inbox.next().await;
            let version = batch.version;
            draining.record_batch(&batch);
            routed.record_batch(&batch);
            if self.forwarder.apply_in_slices(batch).await {
                self.ports.apply_routes();
                self.gateway_ports.apply_routes();
            }
            let in_force = i64::try_from(version).unwrap_or(i64::MAX);
            self.forwarder.metrics.routes_version.set(in_force);
            // Drain acknowledgements go out only after the batch is in force: the controller stops pods because of them.
            self.outbox.set(PodReportKey::Applied, PodReportItem::Applied(version));
            draining.acknowledge(self.outbox);
            routed.report_services(self.outbox);
            if !self.routes_received.swap(true, Ordering::Relaxed) {
                let (services, pods) = self.forwarder.routes.service_and_pod_counts();
                info!(version, services, pods, "first routes in force");
            }
        }
    }
}

/// Flag that is true once routes were received.
pub type RoutesReceivedFlag = Arc<AtomicBool>;
