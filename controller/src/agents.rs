//! Shell: serves routes to agents, activators and autoscalers, and takes in what they report and decide.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use common::{
    link::{self, LinkError},
    outbox::Cursor,
    wire::{
        PodItem, Revision, Role, RouteChange, RouteKey, ScaleItem, Subscriber,
        raw::{
            self,
            pods_server::{Pods, PodsServer},
            routes_server::{Routes, RoutesServer},
            scale_server::{Scale, ScaleServer},
        },
    },
};
use futures::{Stream, StreamExt as _, stream};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming, transport::Server};
use tracing::info;

use crate::{
    machine::{self, Event, Said},
    shared::Shared,
};

/// How much later than activators everybody else hears of a change.
///
/// Requests may wait for it there. Nothing waits elsewhere: until an agent has sent connects straight to a new pod, they go
/// by the activator. On a small node it is the same processors that bring the first request to its pod meanwhile.
const AFTER_ACTIVATORS: Duration = Duration::from_millis(1);

/// Serves all three at `endpoint` until `shutdown`.
pub async fn serve(
    shared: Arc<Shared>,
    endpoint: &str,
    shutdown: CancellationToken,
) -> Result<(), LinkError> {
    let border =
        Border { shared, streams: Arc::new(AtomicU64::new(1)), shutdown: shutdown.clone() };
    let router = Server::builder()
        .add_service(RoutesServer::new(border.clone()))
        .add_service(PodsServer::new(border.clone()))
        .add_service(ScaleServer::new(border));
    link::serve(endpoint, router, shutdown).await
}

#[derive(Clone, Debug)]
struct Border {
    shared: Arc<Shared>,
    streams: Arc<AtomicU64>,
    shutdown: CancellationToken,
}

type Items = Pin<Box<dyn Stream<Item = Result<raw::RouteItem, Status>> + Send>>;

#[tonic::async_trait]
impl Routes for Border {
    type WatchStream = Items;

    async fn watch(&self, request: Request<raw::Subscriber>) -> Result<Response<Items>, Status> {
        let who = Subscriber::try_from(request.into_inner());
        let who = who.map_err(|refused| Status::invalid_argument(refused.to_string()))?;
        let follower = Follower::new(self, who);
        let role = follower.who.role;
        let cursor = self.shared.routes().subscribe();
        let batches = batches(Arc::clone(&self.shared), cursor, role);
        let items =
            link::route_items(batches, self.shutdown.clone(), move |change| shape(change, role));
        // The stream owns the follower: when it is dropped, for whatever reason, nobody follows any more.
        let items = items.map(move |item| {
            let _ = &follower;
            item
        });
        Ok(Response::new(Box::pin(items)))
    }
}

/// The RouteTable's batches for one follower.
fn batches(
    shared: Arc<Shared>,
    cursor: Cursor<RouteKey, Said>,
    role: Role,
) -> impl Stream<Item = machine::Routes> + Send {
    stream::unfold((shared, cursor), move |(shared, mut cursor)| async move {
        let batch = shared.next_routes(&mut cursor).await;
        if role != Role::Activator {
            tokio::time::sleep(AFTER_ACTIVATORS).await;
        }
        Some((batch, (shared, cursor)))
    })
}

/// Somebody who follows the routes, for as long as the value lives.
#[derive(Debug)]
struct Follower {
    shared: Arc<Shared>,
    who: Subscriber,
    stream: u64,
}

impl Follower {
    fn new(border: &Border, who: Subscriber) -> Self {
        let stream = border.streams.fetch_add(1, Ordering::Relaxed);
        info!(role = ?who.role, name = who.name, "routes followed");
        border.shared.step(Event::Follow(who.clone(), stream));
        border.shared.metrics.follows(1);
        Self { shared: Arc::clone(&border.shared), who, stream }
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        info!(role = ?self.who.role, name = self.who.name, "routes no longer followed");
        self.shared.step(Event::Unfollow(self.who.clone(), self.stream));
        self.shared.metrics.follows(-1);
    }
}

/// The change as a role sees it: policies are for autoscalers, names and addresses for everybody else.
fn shape(change: RouteChange, role: Role) -> Option<RouteChange> {
    match (role, change) {
        (Role::Agent | Role::Activator, RouteChange::Revision(it)) => {
            Some(RouteChange::Revision(Revision { policy: None, ..it }))
        }
        (Role::Autoscaler, RouteChange::Service(_)) => None,
        (Role::Agent | Role::Activator | Role::Autoscaler, change) => Some(change),
    }
}

#[tonic::async_trait]
impl Pods for Border {
    async fn report(
        &self,
        request: Request<Streaming<raw::PodItem>>,
    ) -> Result<Response<raw::Empty>, Status> {
        let mut from: Option<Subscriber> = None;
        let each = |item: PodItem| {
            if let PodItem::Sender(who) = item {
                from = Some(who.clone());
                return self.shared.step(Event::ReportBegin(who));
            }
            let Some(who) = from.clone() else { return };
            self.shared.step(match item {
                PodItem::Seen(seen) => Event::Seen(who, seen),
                PodItem::Gone(uid) => Event::Unseen(who, uid),
                PodItem::Applied(version) => Event::Applied(who, version),
                PodItem::Synced => Event::ReportSynced(who),
                PodItem::Sender(_) => return,
            });
        };
        link::receive(request.into_inner(), &self.shutdown, each).await?;
        Ok(Response::new(raw::Empty {}))
    }
}

#[tonic::async_trait]
impl Scale for Border {
    async fn decide(
        &self,
        request: Request<Streaming<raw::ScaleItem>>,
    ) -> Result<Response<raw::Empty>, Status> {
        let each = |item: ScaleItem| {
            self.shared.step(match item {
                ScaleItem::Sender(_) => Event::DecisionsBegin,
                ScaleItem::Decision(decision) => Event::Decide(decision),
                ScaleItem::Gone(revision) => Event::Undecide(revision),
                ScaleItem::Synced => Event::DecisionsSynced,
            });
        };
        link::receive(request.into_inner(), &self.shutdown, each).await?;
        Ok(Response::new(raw::Empty {}))
    }
}

#[cfg(test)]
mod tests;
