//! Shell: the stream between two activators by which a holder claims slots of Revisions that the other one owns.

use futures::{Stream, StreamExt as _, stream};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::{ComponentLink, LinkError, StreamAttempt, serve, stream_error};
use crate::{
    once_signal::OnceSignal,
    outbox::{Outbox, OutboxCursor},
    replicas::ReplicaEndpoint,
    wire::{
        NamespacedName, SlotClaim, SlotClaimItem, SlotGrant, SlotGrantItem,
        raw::{self, slots_client::SlotsClient},
    },
};

/// Event of the stream to an owner.
#[derive(Clone, Debug, PartialEq)]
pub enum SlotStreamEvent {
    /// No process listens there: the owner has ended, or its version grants no slots.
    Refused,
    /// The stream is open: Revisions that the owner does not name before the first `Synced` have no grant.
    Opened,
    /// Grant or removal from the owner.
    Item(SlotGrantItem),
}

impl ComponentLink {
    /// Sends `claims` to an owner and passes its grants to `each`.
    ///
    /// It ends with shutdown. It also ends when `goodbye` is set and the message `Goodbye` was sent to the owner. Once
    /// `unlisted` is set, it opens no further stream and ends together with the present one.
    pub async fn claim_slots(
        &self,
        claims: &Outbox<NamespacedName, SlotClaim>,
        goodbye: &OnceSignal,
        unlisted: &OnceSignal,
        each: impl Fn(SlotStreamEvent),
    ) {
        let (each, finished) = (&each, &OnceSignal::new());
        let streams = self.keep_streams_to_all(|endpoint, attempt| async move {
            // `unlisted` may have been set between two streams: then none is opened any more.
            if unlisted.is_set() {
                finished.set();
            }
            if finished.is_set() {
                return std::future::pending().await;
            }
            let ended = self.run_slot_stream(&endpoint, &attempt, claims, goodbye, each).await;
            if unlisted.is_set() || (ended.is_ok() && goodbye.is_set()) {
                finished.set();
            }
            ended
        });
        tokio::select! {
            () = finished.wait() => {}
            () = streams => {}
        }
    }

    /// Runs one stream to an owner: claims go out, and grants come in as events, until the stream ends.
    async fn run_slot_stream(
        &self,
        endpoint: &ReplicaEndpoint,
        attempt: &StreamAttempt,
        claims: &Outbox<NamespacedName, SlotClaim>,
        goodbye: &OnceSignal,
        each: &impl Fn(SlotStreamEvent),
    ) -> Result<(), LinkError> {
        let broke = |status| stream_error(endpoint, status);
        let channel = self.resolver.dial(endpoint).await.inspect_err(|error| {
            if error.is_connection_refused() {
                each(SlotStreamEvent::Refused);
            }
        })?;
        let (cursor, synced) = (claims.subscribe(), SlotClaimItem::Synced);
        let claim_items = serve::item_stream(
            Vec::new(),
            cursor,
            SlotClaimItem::Claim,
            SlotClaimItem::Removed,
            synced,
            serve::UNLIMITED_SILENCE,
        );
        let sender = SlotClaimItem::Sender(self.local_replica.clone());
        let [sender, last_message] =
            [sender, SlotClaimItem::Goodbye].map(|it| stream::iter([raw::ClaimItem::from(it)]));
        // `Goodbye` follows the last claim on the same stream, so the owner takes back all slots in order. It may be
        // due before the stream is open: then no claim is sent, but the owner still requires the sender.
        let claim_items = claim_items.take_until(goodbye.clone().wait_owned());
        let items = sender.chain(claim_items).chain(last_message);
        let mut grants = SlotsClient::new(channel).hold(items).await.map_err(broke)?.into_inner();
        let _up = self.record_stream_opened(endpoint, "slots");
        attempt.record_open();
        each(SlotStreamEvent::Opened);
        while let Some(item) = grants.message().await.map_err(broke)? {
            if let Some(item) = serve::parse_item::<_, SlotGrantItem>(item) {
                each(SlotStreamEvent::Item(item));
            }
        }
        Ok(())
    }
}

/// Returns the stream of an owner to one holder from a cursor, until `ended`.
pub fn grant_stream(
    cursor: OutboxCursor<NamespacedName, SlotGrant>,
    ended: CancellationToken,
) -> impl Stream<Item = Result<raw::GrantItem, Status>> + Send + 'static {
    let (removed, synced) = (SlotGrantItem::Removed, SlotGrantItem::Synced);
    let items = serve::item_stream(
        Vec::new(),
        cursor,
        SlotGrantItem::Grant,
        removed,
        synced,
        serve::UNLIMITED_SILENCE,
    );
    items.map(Ok).take_until(ended.cancelled_owned())
}
