//! Shell: streams of routes to subscribers, each limited to the subscriber's role.

use std::{pin::Pin, sync::Arc, time::Duration};

use bytes::Bytes;
use common::{
    tls,
    wire::{self, ClientComponent, ComponentReplica, RevisionEntry, RouteChange, raw},
};
use futures::{Stream, StreamExt as _};
use tonic::{Request, Status};
use tracing::info;

use super::{
    ControllerGrpc, denied_status,
    route_stream::{RouteStreamSource, encode_batch, encode_node},
};
use crate::shell::runtime::{
    ControllerRuntime,
    route_subscription::{EncodedPieces, RouteTableSubscription, RouteTableUpdate},
};

/// Delay of route updates to agents and autoscalers, compared with activators.
///
/// Requests may wait for an update at an activator, and nothing waits elsewhere: until an agent routes connects to a
/// new pod, they go by the activator. On a small node the same processors bring the first request to its pod meanwhile.
const ROUTE_UPDATE_DELAY: Duration = Duration::from_millis(1);

#[tonic::async_trait]
impl RouteStreamSource for ControllerGrpc {
    type Items = Pin<Box<dyn Stream<Item = Bytes> + Send>>;

    async fn open_stream(&self, request: Request<raw::Subscriber>) -> Result<Self::Items, Status> {
        let peer = tls::request_peer(&request);
        let subscriber = ComponentReplica::try_from(request.into_inner());
        let subscriber =
            subscriber.map_err(|refused| Status::invalid_argument(refused.to_string()))?;
        peer.check_identity(&subscriber).map_err(|denied| denied_status(&denied))?;
        let guard = SubscriberGuard::new(self, subscriber);
        let batches = route_batches(
            RouteTableSubscription::new(Arc::clone(&self.shared)),
            guard.subscriber.clone(),
        );
        let pieces = batches.flat_map(move |batch| {
            // The closure owns the guard: however the stream ends, dropping it counts one subscriber less.
            let _ = &guard;
            let count = batch.pieces.len();
            let piece = move |at: usize| {
                // The borrow moves in the whole batch, `_update` included: a shared snapshot lives until its last piece
                // is sent.
                let batch = &batch;
                batch.pieces[at].clone()
            };
            futures::stream::iter((0..count).map(piece))
        });
        Ok(Box::pin(pieces.take_until(self.shutdown.clone().cancelled_owned())))
    }
}

/// The encoded pieces of a batch, with the update that they come from, so that other streams can share it meanwhile.
struct EncodedBatch {
    pieces: EncodedPieces,
    _update: RouteTableUpdate,
}

/// Encoded batches of the RouteTable for one subscription.
fn route_batches(
    subscription: RouteTableSubscription,
    subscriber: ComponentReplica,
) -> impl Stream<Item = EncodedBatch> + Send {
    let ComponentReplica { role, node, .. } = subscriber;
    // An activator is in the table with its zone, and an autoscaler needs none.
    let node = Some(node).filter(|_| role == ClientComponent::Agent);
    futures::stream::unfold((subscription, node), move |(mut subscription, node)| async move {
        let update = subscription.next().await;
        let pieces = match &update {
            RouteTableUpdate::Snapshot(snapshot) => {
                let shared = snapshot
                    .encoded_for(role, |routes| encode_batch(routes, role, None, limit_to_role));
                // Before the shared pieces, which end with `Synced`.
                match node.as_deref().and_then(|node| encode_node(&update, node)) {
                    Some(own) => [own].into_iter().chain(shared.iter().cloned()).collect(),
                    None => shared,
                }
            }
            RouteTableUpdate::Changes(routes) => {
                encode_batch(routes, role, node.as_deref(), limit_to_role)
            }
        };
        if role != ClientComponent::Activator {
            tokio::time::sleep(ROUTE_UPDATE_DELAY).await;
        }
        Some((EncodedBatch { pieces, _update: update }, (subscription, node)))
    })
}

/// Registration of a subscriber to the routes; dropping it ends the registration.
#[derive(Debug)]
struct SubscriberGuard {
    shared: Arc<ControllerRuntime>,
    subscriber: ComponentReplica,
}

impl SubscriberGuard {
    fn new(grpc: &ControllerGrpc, subscriber: ComponentReplica) -> Self {
        info!(role = ?subscriber.role, name = subscriber.name, "routes followed");
        grpc.shared.metrics.add_subscribers(1);
        Self { shared: Arc::clone(&grpc.shared), subscriber }
    }
}

impl Drop for SubscriberGuard {
    fn drop(&mut self) {
        info!(role = ?self.subscriber.role, name = self.subscriber.name, "routes no longer followed");
        self.shared.metrics.add_subscribers(-1);
    }
}

/// Limits a change to what a role needs: scale policies are for autoscalers, names and addresses for agents and
/// activators. Allowed sources and the request log are for activators.
pub(super) fn limit_to_role(change: RouteChange, role: ClientComponent) -> Option<RouteChange> {
    match (role, change) {
        (ClientComponent::Agent, RouteChange::Revision(it)) => {
            Some(RouteChange::Revision(RevisionEntry { policy: None, allowed_sources: None, ..it }))
        }
        (ClientComponent::Activator, RouteChange::Revision(it)) => {
            Some(RouteChange::Revision(RevisionEntry { policy: None, ..it }))
        }
        (ClientComponent::Autoscaler, RouteChange::Revision(it)) => {
            Some(RouteChange::Revision(RevisionEntry { allowed_sources: None, ..it }))
        }
        (ClientComponent::Autoscaler, RouteChange::Service(_)) => None,
        (ClientComponent::Agent | ClientComponent::Autoscaler, RouteChange::Settings(it)) => {
            // Without `request_log` and `edge` they may equal the defaults, which are not sent at all.
            wire::GlobalSettings { request_log: None, edge: wire::EdgeSettings::default(), ..it }
                .if_not_default()
                .map(RouteChange::Settings)
        }
        (
            ClientComponent::Agent | ClientComponent::Activator | ClientComponent::Autoscaler,
            change,
        ) => Some(change),
    }
}
