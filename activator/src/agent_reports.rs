//! Shell: reports of agents about ready pods, which come before the RouteTable that lists the pods as ready.
//!
//! Agents send them to the port for other activators. They send the same to the controller, and the table that follows
//! from it replaces them. Nothing depends on these streams but the time that requests wait.

use std::sync::Arc;

use common::{
    link, tls,
    wire::{
        ClientComponent, PodReportItem,
        raw::{self, pods_server::Pods},
    },
};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};
use tracing::{info, warn};

use crate::routes::{agent_reports::AgentStreamNumber, index::RouteIndex};

/// gRPC service for the reports of agents.
#[derive(Debug)]
pub struct AgentReportService {
    routes: Arc<RouteIndex>,
    /// Signal by which all streams end.
    stop: CancellationToken,
}

impl AgentReportService {
    /// Creates the service, whose streams run until `stop`.
    pub fn new(routes: Arc<RouteIndex>, stop: CancellationToken) -> Self {
        Self { routes, stop }
    }
}

#[tonic::async_trait]
impl Pods for AgentReportService {
    async fn report(
        &self,
        request: Request<Streaming<raw::PodItem>>,
    ) -> Result<Response<raw::Empty>, Status> {
        // The certificate must prove the sender's node: no agent may report the pods of another one.
        let peer = tls::request_peer(&request);
        let mut items = request.into_inner();
        let first = items.message().await?.map(PodReportItem::try_from);
        let Some(Ok(PodReportItem::Sender(sender))) = first else {
            return Err(Status::invalid_argument("the stream has not named its sender"));
        };
        if let Err(denied) = peer.check_role(&sender, "report pods", &[ClientComponent::Agent]) {
            warn!(%denied, "agent refused");
            return Err(tls::denied_status(&denied));
        }
        let stream = AgentReportStream::open(Arc::clone(&self.routes), sender.node);
        let ended = link::receive_items(items, &self.stop, |item| stream.handle_item(item)).await;
        ended.map(|()| Response::new(raw::Empty {}))
    }
}

/// Stream of one agent. Dropping it withdraws what it has reported.
struct AgentReportStream {
    routes: Arc<RouteIndex>,
    node: String,
    number: AgentStreamNumber,
}

impl AgentReportStream {
    fn open(routes: Arc<RouteIndex>, node: String) -> Self {
        info!(node, "stream of an agent's reports opened");
        let number = routes.begin_agent_stream(&node);
        Self { routes, node, number }
    }

    fn handle_item(&self, item: PodReportItem) {
        let (uid, ready_at) = match item {
            PodReportItem::Observed(seen) => (seen.uid, seen.address.filter(|_| seen.ready)),
            PodReportItem::Removed(uid) => (uid, None),
            // The controller alone uses the other items. A stream that begins has withdrawn everything, so nothing is
            // left to remove at `Synced`.
            PodReportItem::Sender(_)
            | PodReportItem::Applied(_)
            | PodReportItem::DrainAck(_)
            | PodReportItem::DrainAckRemoved(_)
            | PodReportItem::RoutedServicesAnnounced
            | PodReportItem::AwaitedServicesAnnounced
            | PodReportItem::RoutedService(_)
            | PodReportItem::RoutedServiceRemoved(_)
            | PodReportItem::PassedOver(_)
            | PodReportItem::PassedOverRemoved(_)
            | PodReportItem::Synced => return,
        };
        self.routes.apply_agent_report(&self.node, self.number, uid, ready_at);
    }
}

impl Drop for AgentReportStream {
    fn drop(&mut self) {
        info!(node = self.node, "stream of an agent's reports ended");
        self.routes.end_agent_stream(&self.node, self.number);
    }
}
