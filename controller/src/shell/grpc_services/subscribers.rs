//! Shell: streams of routes to subscribers, each limited to the subscriber's role.

use std::{pin::Pin, sync::Arc, vec};

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
    route_stream::{RouteStreamSource, encode_batch, encode_change},
};
use crate::{
    decide::machine::{ControllerStateMachine, RouteMessageBatch},
    shell::runtime::{
        ControllerRuntime,
        route_subscription::{RouteTableSubscription, RouteTableUpdate},
    },
};

#[tonic::async_trait]
impl RouteStreamSource for ControllerGrpc {
    type Items = Pin<Box<dyn Stream<Item = Bytes> + Send>>;

    async fn open_stream(&self, request: Request<raw::Subscriber>) -> Result<Self::Items, Status> {
        let peer = tls::request_peer(&request);
        let message = request.into_inner();
        let reads_reserved_hosts = message.reads_reserved_hosts;
        let subscriber = ComponentReplica::try_from(message);
        let subscriber =
            subscriber.map_err(|refused| Status::invalid_argument(refused.to_string()))?;
        peer.check_identity(&subscriber).map_err(|denied| denied_status(&denied))?;
        let guard = SubscriberGuard::new(self, subscriber);
        let broadcast = match guard.subscriber.role {
            ClientComponent::Activator => &self.activator_routes,
            ClientComponent::Agent | ClientComponent::Autoscaler => &self.delayed_routes,
        };
        let subscription = RouteTableSubscription::new(Arc::clone(broadcast));
        let updates = encoded_updates(subscription, guard.subscriber.clone(), reads_reserved_hosts);
        let pieces = updates.flat_map(move |update| {
            // The closure owns the guard: however the stream ends, dropping it counts one subscriber less.
            let _ = &guard;
            futures::stream::iter(update)
        });
        Ok(Box::pin(pieces.take_until(self.shutdown.clone().cancelled_owned())))
    }
}

/// The encoded pieces of an update, with the update that they come from: a shared snapshot lives until its last piece
/// is sent.
struct EncodedUpdate {
    pieces: vec::IntoIter<Bytes>,
    _update: RouteTableUpdate,
}

impl Iterator for EncodedUpdate {
    type Item = Bytes;

    fn next(&mut self) -> Option<Bytes> {
        self.pieces.next()
    }
}

/// Encoded updates of the RouteTable for one subscription. An activator that does not read reserved hosts gets lists of
/// them.
fn encoded_updates(
    subscription: RouteTableSubscription,
    subscriber: ComponentReplica,
    reads_reserved_hosts: bool,
) -> impl Stream<Item = EncodedUpdate> + Send {
    let ComponentReplica { role, node, .. } = subscriber;
    let needs_lists = role == ClientComponent::Activator && !reads_reserved_hosts;
    // An activator is in the table with its zone, and an autoscaler needs none.
    let node = Some(node).filter(|_| role == ClientComponent::Agent);
    futures::stream::unfold((subscription, node), move |(mut subscription, node)| async move {
        let update = subscription.next().await;
        let mut pieces = Vec::new();
        for batch in update.batches() {
            // Before the shared pieces, which end with `Synced`.
            let own = node.as_deref().and_then(|node| batch.node_change(node));
            pieces.extend(own.map(|change| encode_change(batch.version(), change.clone())));
            let encode = |routes: &RouteMessageBatch| {
                encode_batch(routes, batch.is_whole_table(), role, limit_to_role)
            };
            let shared = match needs_lists {
                false => batch.encoded_for(role, encode),
                true => batch.encoded_with_lists(|routes| {
                    let listed =
                        |machine: &ControllerStateMachine| machine.with_listed_hosts(routes);
                    encode(&subscription.runtime().with_machine(listed))
                }),
            };
            pieces.extend_from_slice(&shared);
        }
        let update = EncodedUpdate { pieces: pieces.into_iter(), _update: update };
        Some((update, (subscription, node)))
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
/// activators. Allowed sources, the request log, telemetry and certificates are for activators.
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
        // No batch of these roles has one. A private key must not leave by a mistake elsewhere.
        (
            ClientComponent::Agent | ClientComponent::Autoscaler,
            RouteChange::GatewayHost(_)
            | RouteChange::ReservedHost(_)
            | RouteChange::Certificate(_)
            | RouteChange::ClientCa(_),
        ) => None,
        (ClientComponent::Agent | ClientComponent::Autoscaler, RouteChange::Settings(it)) => {
            // Without the fields for activators they may equal the defaults, which are not sent at all.
            let wire::GlobalSettings { log_levels, .. } = it;
            wire::GlobalSettings { log_levels, ..wire::GlobalSettings::default() }
                .if_not_default()
                .map(RouteChange::Settings)
        }
        (
            ClientComponent::Agent | ClientComponent::Activator | ClientComponent::Autoscaler,
            change,
        ) => Some(change),
    }
}
