//! Fake agents: each has one stream of routes and one stream of reports.
//!
//! They share this machine with the controller. So nearly all of them only check if an item ends a batch; one decodes
//! the stream as real agents do, and counts the table's contents.

use std::sync::{
    Arc,
    atomic::{AtomicU64, AtomicUsize, Ordering},
};

use bytes::Buf as _;
use common::{
    link::{ComponentLink, PodReportKey},
    outbox::Outbox,
    wire::{
        AutoscalerHeartbeat, ClientComponent, ComponentReplica, NamespacedName, PodObservation,
        PodReportItem, RoutingPhase, ScaleDecision,
    },
};
use tokio_util::sync::CancellationToken;
use tonic::{Status, codec::DecodeBuf};

use super::{
    desired_cluster::{DesiredCluster, ReportedPod},
    route_items::{ItemPart, open_route_stream},
};

/// Counts of the agents' streams.
#[derive(Debug, Default)]
pub(super) struct AgentStreamCounts {
    /// Number of agents with a stream.
    pub(super) streams: AtomicUsize,
    /// Number of agents that have had a whole table.
    pub(super) complete_tables: AtomicUsize,
    /// Number of items in the agents' first tables.
    pub(super) items: AtomicU64,
    /// Number of bytes in the agents' first tables.
    pub(super) bytes: AtomicU64,
    /// Number of services in the decoded table.
    pub(super) services: AtomicUsize,
    /// Number of ready pods in the decoded table.
    pub(super) ready: AtomicUsize,
}

/// Starts all agents and an autoscaler; they connect until the controller answers.
pub(super) fn start_agents(
    cluster: &mut DesiredCluster,
    nodes: usize,
    endpoint: &str,
    stop: &CancellationToken,
) -> Arc<AgentStreamCounts> {
    let counts = Arc::new(AgentStreamCounts::default());
    for node in 0..nodes {
        let subscriber = agent(node);
        let pods: Vec<ReportedPod> =
            cluster.pods.iter().filter(|it| it.node == subscriber.node).cloned().collect();
        tokio::spawn(report_pods(endpoint.to_owned(), subscriber.clone(), pods, stop.clone()));
        // Agent 0 is the one that decodes its stream.
        if node > 0 {
            tokio::spawn(count_stream(endpoint.to_owned(), subscriber, Arc::clone(&counts)));
        }
    }
    tokio::spawn(decode_stream(
        ComponentLink::new(endpoint, agent(0), stop.clone()),
        Arc::clone(&counts),
    ));
    tokio::spawn(send_decisions(
        endpoint.to_owned(),
        std::mem::take(&mut cluster.decisions),
        stop.clone(),
    ));
    counts
}

fn agent(node: usize) -> ComponentReplica {
    let node = format!("node-{node}");
    ComponentReplica { role: ClientComponent::Agent, name: node.clone(), node }
}

async fn report_pods(
    endpoint: String,
    subscriber: ComponentReplica,
    pods: Vec<ReportedPod>,
    stop: CancellationToken,
) {
    let outbox = Outbox::new();
    for ReportedPod { uid, address, .. } in pods {
        let observation = PodObservation {
            uid: uid.clone(),
            address: format!("{address}:8080").parse().ok(),
            other_family_address: None,
            listening: true,
            ready: true,
            drained: false,
            in_flight: 0,
            listening_since_ns: 1,
            not_ready_reason: String::new(),
            counts_all_ports: true,
            standby: None,
            awaits_stop: false,
        };
        outbox.set(PodReportKey::Pod(uid), PodReportItem::Observed(observation));
    }
    ComponentLink::new(endpoint, subscriber, stop).report_pods(&outbox).await;
}

async fn send_decisions(endpoint: String, decisions: Vec<ScaleDecision>, stop: CancellationToken) {
    let outbox: Outbox<NamespacedName, ScaleDecision> = Outbox::new();
    decisions.into_iter().for_each(|it| outbox.set(it.revision.clone(), it));
    let subscriber = ComponentReplica {
        role: ClientComponent::Autoscaler,
        name: "autoscaler".into(),
        node: String::new(),
    };
    // The sender must live: the stream carries a heartbeat for as long as it does.
    let (_heart, heartbeats) = tokio::sync::watch::channel(AutoscalerHeartbeat::default());
    ComponentLink::new(endpoint, subscriber, stop).send_decisions(&outbox, &heartbeats).await;
}

async fn decode_stream(link: ComponentLink, counts: Arc<AgentStreamCounts>) {
    let mut first = true;
    link.watch_routes(|view, _| {
        let ready = view.table.pods.values().filter(|it| it.phase == RoutingPhase::Ready).count();
        counts.services.store(view.table.services.len(), Ordering::Relaxed);
        counts.ready.store(ready, Ordering::Relaxed);
        if std::mem::take(&mut first) {
            counts.streams.fetch_add(1, Ordering::Relaxed);
            counts.complete_tables.fetch_add(1, Ordering::Relaxed);
        }
    })
    .await;
}

async fn count_stream(
    endpoint: String,
    subscriber: ComponentReplica,
    counts: Arc<AgentStreamCounts>,
) {
    let mut items = open_route_stream::<Item>(&endpoint, &subscriber).await;
    counts.streams.fetch_add(1, Ordering::Relaxed);
    let (mut count, mut bytes, mut has_table) = (0, 0, false);
    while let Ok(Some(Item { size, is_synced })) = items.message().await {
        (count, bytes) = (count + 1, bytes + size);
        if is_synced && !std::mem::replace(&mut has_table, true) {
            counts.items.fetch_add(count, Ordering::Relaxed);
            counts.bytes.fetch_add(bytes, Ordering::Relaxed);
            counts.complete_tables.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Size of an item; `is_synced` is true if the item is `Synced`, which ends a batch.
#[derive(Clone, Copy, Debug)]
struct Item {
    size: u64,
    is_synced: bool,
}

impl ItemPart for Item {
    /// Reads the size of an item without decoding it.
    fn decode_item(from: &mut DecodeBuf<'_>) -> Result<Self, Status> {
        // `synced` is field 7 with an empty message; every other item is longer.
        let (size, chunk) = (from.remaining(), from.chunk());
        let is_synced = size < 16 && chunk.ends_with(&[7 << 3 | 2, 0]);
        from.advance(size);
        Ok(Self { size: size as u64, is_synced })
    }
}
