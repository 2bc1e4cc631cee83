//! Shell: follows the controller's RouteTable and reports the version in force.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use common::{
    link::{Draining, Link, PodKey, Routed},
    outbox::Outbox,
    wire::PodItem,
};
use tracing::info;

use crate::{gateway::Gateway, ports::Ports};

/// Applies each change of the table, then says so.
pub async fn follow(
    link: &Link,
    reports: &Link,
    gateway: &Gateway,
    ports: &Ports,
    seen: &AtomicBool,
) {
    let outbox = Outbox::new();
    let (mut draining, mut routed) = (Draining::default(), Routed::default());
    let watch = link.watch_batches(|batch| {
        let version = batch.version;
        draining.follow(&batch);
        routed.follow(&batch);
        if gateway.apply(batch) {
            ports.apply();
        }
        gateway.metrics.routes_version.set(i64::try_from(version).unwrap_or(i64::MAX));
        outbox.set(PodKey::Applied, PodItem::Applied(version));
        draining.in_force(&outbox);
        routed.in_force(&outbox);
        if !seen.swap(true, Ordering::Relaxed) {
            let (services, pods) = gateway.routes.counts();
            info!(version, services, pods, "first routes in force");
        }
    });
    tokio::join!(watch, reports.report_pods(&outbox));
}

/// Whether routes were ever received.
pub type Seen = Arc<AtomicBool>;
