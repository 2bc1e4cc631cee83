//! Agents of the bench: each has one stream of routes. One more agent also reports the pods.
//!
//! They share this machine with the controller, so they decode of each item only what the bench needs.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use common::{
    link::{ComponentLink, PodReportKey, RouteBatch},
    outbox::Outbox,
    wire::{
        ClientComponent, ComponentReplica, PodObservation, PodReportItem, RouteChange,
        RoutingPhase, raw,
    },
};
use prost::Message as _;
use tokio_util::sync::CancellationToken;
use tonic::{Status, codec::DecodeBuf};

use super::route_items::{ItemPart, open_route_stream};

/// Name and node of the agent that reports the pods: the local node of a controller without other settings.
const REPORTER_NODE: &str = "rouse";

/// Progress of all agents and wakes.
#[derive(Debug)]
pub(super) struct WakeRecords {
    agents: usize,
    wakes: Vec<WakeRecord>,
    /// Number of agents, the reporting one included, that have had a whole table.
    pub(super) complete_tables: AtomicUsize,
    /// Number of wakes that every agent knows of.
    pub(super) completed_wakes: AtomicUsize,
    /// Number of streams that have ended.
    pub(super) ended_streams: AtomicUsize,
}

#[derive(Debug, Default)]
struct WakeRecord {
    reported_at: OnceLock<Instant>,
    /// Number of agents that have the pod as ready.
    agents: AtomicUsize,
    completed_at: OnceLock<Instant>,
}

impl WakeRecords {
    pub(super) fn new(agents: usize, wakes: usize) -> Self {
        Self {
            agents,
            wakes: std::iter::repeat_with(WakeRecord::default).take(wakes).collect(),
            complete_tables: AtomicUsize::new(0),
            completed_wakes: AtomicUsize::new(0),
            ended_streams: AtomicUsize::new(0),
        }
    }

    /// Records that one more agent has the pod of this wake as ready.
    fn record_ready(&self, wake: usize) {
        let record = &self.wakes[wake];
        if record.agents.fetch_add(1, Ordering::Relaxed) + 1 == self.agents
            && record.completed_at.set(Instant::now()).is_ok()
        {
            self.completed_wakes.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the times from a report until the last agent has it, in milliseconds, of the complete wakes.
    pub(super) fn latencies_ms(&self) -> Vec<f64> {
        let latency = |it: &WakeRecord| {
            let took = it.completed_at.get()?.duration_since(*it.reported_at.get()?);
            Some(took.as_secs_f64() * 1000.0)
        };
        self.wakes.iter().filter_map(latency).collect()
    }
}

/// Starts all agents; they connect until the controller answers.
pub(super) fn start_agents(endpoint: &str, records: &Arc<WakeRecords>) {
    tokio::spawn(report_pods(endpoint.to_owned(), Arc::clone(records)));
    for node in 0..records.agents {
        let subscriber = agent(&format!("node-{node}"));
        tokio::spawn(follow_routes(endpoint.to_owned(), subscriber, Arc::clone(records)));
    }
}

fn agent(node: &str) -> ComponentReplica {
    ComponentReplica { role: ClientComponent::Agent, name: node.into(), node: node.into() }
}

/// Returns the number of a wake from the name of its Revision, `…/sleeper-N-00001`.
fn wake_number(revision: &str) -> Option<usize> {
    let (_, name) = revision.split_once("sleeper-")?;
    name.split('-').next()?.parse().ok()
}

/// Reports each starting pod as ready at once.
async fn report_pods(endpoint: String, records: Arc<WakeRecords>) {
    let link = ComponentLink::new(endpoint, agent(REPORTER_NODE), CancellationToken::new());
    let reports = Outbox::new();
    let mut has_table = false;
    let watching = link.watch_batches(|RouteBatch { changes, .. }| {
        for change in changes.into_values() {
            let RouteChange::Pod(pod) = change else { continue };
            let Some(wake) = wake_number(&pod.revision.name) else { continue };
            let Some(record) = records.wakes.get(wake) else { continue };
            let is_new = pod.phase == RoutingPhase::Starting;
            if is_new && record.reported_at.set(Instant::now()).is_ok() {
                let observation = ready_observation(&pod.uid, wake);
                reports.set(PodReportKey::Pod(pod.uid.clone()), observation);
            }
        }
        if !std::mem::replace(&mut has_table, true) {
            records.complete_tables.fetch_add(1, Ordering::Relaxed);
        }
    });
    tokio::join!(link.report_pods(&reports), watching);
}

fn ready_observation(uid: &str, wake: usize) -> PodReportItem {
    let [high, low] = u16::try_from(wake % 0x1_0000).expect("below 2^16").to_be_bytes();
    PodReportItem::Observed(PodObservation {
        uid: uid.into(),
        address: Some(([10, 244, high, low], 8080).into()),
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
    })
}

async fn follow_routes(endpoint: String, subscriber: ComponentReplica, records: Arc<WakeRecords>) {
    let mut items = open_route_stream::<RoutedItem>(&endpoint, &subscriber).await;
    let (mut has_table, mut has_pod) = (false, vec![false; records.wakes.len()]);
    while let Ok(Some(RoutedItem { pod, synced })) = items.message().await {
        if synced.is_some() && !std::mem::replace(&mut has_table, true) {
            records.complete_tables.fetch_add(1, Ordering::Relaxed);
        }
        let Some(pod) = pod.filter(|it| it.phase == raw::PodPhase::Ready as i32) else { continue };
        let wake = wake_number(&pod.revision).filter(|it| has_pod.get(*it) == Some(&false));
        if let Some(wake) = wake {
            has_pod[wake] = true;
            records.record_ready(wake);
        }
    }
    records.ended_streams.fetch_add(1, Ordering::Relaxed);
}

/// The fields of a RouteItem that the bench reads; the decoder skips all others.
#[derive(Clone, PartialEq, prost::Message)]
struct RoutedItem {
    #[prost(message, optional, tag = "4")]
    pod: Option<RoutedPod>,
    #[prost(message, optional, tag = "7")]
    synced: Option<raw::Empty>,
}

/// The fields of a Pod that the bench reads.
#[derive(Clone, PartialEq, prost::Message)]
struct RoutedPod {
    #[prost(string, tag = "3")]
    revision: String,
    #[prost(int32, tag = "6")]
    phase: i32,
}

impl ItemPart for RoutedItem {
    fn decode_item(from: &mut DecodeBuf<'_>) -> Result<Self, Status> {
        Self::decode(from).map_err(|error| Status::internal(error.to_string()))
    }
}
