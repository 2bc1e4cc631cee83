//! Shell: the stream between two activators, by which one holds slots of revisions that the other one owns.

use futures::{Stream, StreamExt as _, stream};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::{Link, LinkError, broke, serve};
use crate::{
    outbox::{Cursor, Outbox},
    replicas::Endpoint,
    wire::{
        Claim, ClaimItem, Grant, GrantItem, Name,
        raw::{self, slots_client::SlotsClient},
    },
};

/// What comes of a stream to an owner.
#[derive(Clone, Debug, PartialEq)]
pub enum Heard {
    /// No process listens there: the owner has ended, or is of a version that hands out no slots.
    Refused,
    /// It has been opened: what is not named before the first `Synced` is gone.
    Opened,
    /// The owner says this.
    Item(GrantItem),
}

impl Link {
    /// Tells an owner of `claims`, and `each` what it grants, until shutdown, until `bye` has been said to it, or until the
    /// first end of a stream after `last`.
    pub async fn hold(
        &self,
        claims: &Outbox<Name, Claim>,
        bye: &CancellationToken,
        last: &CancellationToken,
        each: impl Fn(Heard),
    ) {
        let (each, over) = (&each, &CancellationToken::new());
        let streams = self.to_all(|endpoint| async move {
            if last.is_cancelled() {
                over.cancel();
            }
            let ended = self.hold_one(&endpoint, claims, bye, each).await;
            if last.is_cancelled() || (ended.is_ok() && bye.is_cancelled()) {
                over.cancel();
            }
            ended
        });
        tokio::select! {
            biased;
            () = over.cancelled() => {}
            () = streams => {}
        }
    }

    async fn hold_one(
        &self,
        endpoint: &Endpoint,
        claims: &Outbox<Name, Claim>,
        bye: &CancellationToken,
        each: &impl Fn(Heard),
    ) -> Result<(), LinkError> {
        let broke = |status| broke(endpoint, status);
        let channel = self.to.dial(endpoint).await.inspect_err(|error| {
            if error.is_refused() {
                each(Heard::Refused);
            }
        })?;
        let first = vec![ClaimItem::Sender(self.who.clone())];
        let (cursor, synced) = (claims.subscribe(), ClaimItem::Synced);
        let items = serve::outgoing(first, cursor, ClaimItem::Claim, ClaimItem::Gone, synced, None);
        let goodbye = stream::once(async { raw::ClaimItem::from(ClaimItem::Bye) });
        let items = items.take_until(bye.clone().cancelled_owned()).chain(goodbye);
        let mut grants = SlotsClient::new(channel).hold(items).await.map_err(broke)?.into_inner();
        let _up = self.opened(endpoint, "slots");
        each(Heard::Opened);
        while let Some(item) = grants.message().await.map_err(broke)? {
            if let Some(item) = serve::accept::<_, GrantItem>(item) {
                each(Heard::Item(item));
            }
        }
        Ok(())
    }
}

/// What an owner says to one holder, from the box that keeps its states, until `ended`.
pub fn grant_stream(
    cursor: Cursor<Name, Grant>,
    ended: CancellationToken,
) -> impl Stream<Item = Result<raw::GrantItem, Status>> + Send + 'static {
    let (gone, synced) = (GrantItem::Gone, GrantItem::Synced);
    let items = serve::outgoing(Vec::new(), cursor, GrantItem::Grant, gone, synced, None);
    items.map(Ok).take_until(ended.cancelled_owned())
}
