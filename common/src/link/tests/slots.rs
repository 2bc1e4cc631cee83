//! Streams by which a holder claims slots, to an owner that remembers what it received.

use tonic::Streaming;

use super::*;
use crate::{
    once_signal::OnceSignal,
    wire::{
        SlotClaim, SlotClaimItem,
        raw::slots_server::{Slots, SlotsServer},
    },
};

/// Owner that passes on the items of each stream when the stream has ended, and grants nothing.
struct FakeSlotOwner(mpsc::Sender<Vec<SlotClaimItem>>);

#[tonic::async_trait]
impl Slots for FakeSlotOwner {
    type HoldStream = Pin<Box<dyn Stream<Item = Result<raw::GrantItem, Status>> + Send>>;

    async fn hold(
        &self,
        request: Request<Streaming<raw::ClaimItem>>,
    ) -> Result<Response<Self::HoldStream>, Status> {
        let mut all = Vec::new();
        receive_items(request.into_inner(), &CancellationToken::new(), |item| all.push(item))
            .await?;
        self.0.try_send(all).expect("room");
        Ok(Response::new(Box::pin(futures::stream::empty())))
    }
}

#[tokio::test]
async fn a_holder_names_itself_before_a_goodbye_that_was_due_before_the_stream() {
    let path = socket("goodbye");
    let endpoint = format!("unix:{}", path.display());
    let (send, mut received) = mpsc::channel(16);
    let (stop, server_endpoint) = (CancellationToken::new(), endpoint.clone());
    let (router, server_stop) =
        (Server::builder().add_service(SlotsServer::new(FakeSlotOwner(send))), stop.clone());
    tokio::spawn(async move { serve(&server_endpoint, router, server_stop).await });

    let role = ClientComponent::Activator;
    let holder = ComponentReplica { role, name: "a".into(), node: "n1".into() };
    let link = ComponentLink::new(endpoint, holder.clone(), stop.clone());
    let (claims, goodbye, unlisted) = (Outbox::new(), OnceSignal::new(), OnceSignal::new());
    claims.set(NamespacedName::new("default", "a-00001"), SlotClaim::default());
    goodbye.set();
    // The call returns because the owner has accepted the goodbye.
    link.claim_slots(&claims, &goodbye, &unlisted, drop).await;
    let items = received.recv().await;
    assert_eq!(items, Some(vec![SlotClaimItem::Sender(holder), SlotClaimItem::Goodbye]));
    stop.cancel();
    let _ = std::fs::remove_file(path);
}
