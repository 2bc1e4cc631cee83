//! Shell: the Usage service, on which each agent and activator reports by one stream of its own.

use std::sync::{Arc, atomic::Ordering};

use common::{
    link::{self, LinkError, TlsAdmission},
    tls::{
        self,
        peer::{PeerDeniedError, TlsPeer},
    },
    wire::{
        ComponentReplica, ComponentRole, UsageItem, UsageKey,
        raw::{
            self,
            usage_server::{Usage, UsageServer},
        },
    },
};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};
use tracing::{info, warn};

use crate::{controller::ScaleEvaluator, usage::UsageStream};

/// Serves the Usage service at `endpoint` until `shutdown`. At `https://`, `door` decides which clients may connect.
pub async fn serve(
    endpoint: &str,
    brain: Arc<ScaleEvaluator>,
    door: Option<&TlsAdmission>,
    shutdown: CancellationToken,
) -> Result<(), LinkError> {
    let service = UsageServer::new(UsageService { brain, shutdown: shutdown.clone() });
    link::serve_to(endpoint, link::server().add_service(service), door, shutdown).await
}

#[derive(Debug)]
struct UsageService {
    brain: Arc<ScaleEvaluator>,
    shutdown: CancellationToken,
}

#[tonic::async_trait]
impl Usage for UsageService {
    async fn report(
        &self,
        request: Request<Streaming<raw::UsageItem>>,
    ) -> Result<Response<raw::Empty>, Status> {
        let peer = tls::peer(&request);
        let mut report =
            UsageReportStream { brain: Arc::clone(&self.brain), peer, who: None, stream: None };
        // A token of this stream alone: a denied message ends this stream, not the others.
        let (stop, mut denied) = (self.shutdown.child_token(), None);
        let each = |item| {
            // Messages that arrived before the stream stops are ignored after the first denied one.
            if denied.is_none()
                && let Err(why) = report.take(item)
            {
                denied = Some(why);
                stop.cancel();
            }
        };
        let ended = link::receive(request.into_inner(), &stop, each).await;
        if let Some(denied) = denied {
            warn!(%denied, "usage refused");
            return Err(tls::status(&denied));
        }
        ended.map(|()| Response::new(raw::Empty {}))
    }
}

/// One stream of reports. Dropping it closes the stream; the last reported totals are kept until the sender returns.
struct UsageReportStream {
    brain: Arc<ScaleEvaluator>,
    peer: TlsPeer,
    who: Option<ComponentReplica>,
    stream: Option<UsageStream>,
}

impl UsageReportStream {
    fn take(&mut self, item: UsageItem) -> Result<(), PeerDeniedError> {
        self.brain.usage().fetch_add(1, Ordering::Relaxed);
        // The first message must name the sender; before it there is no stream to attribute usage to.
        let (Some(stream), Some(who)) = (self.stream, &self.who) else {
            return self.open(item);
        };
        match item {
            UsageItem::Sender(_) => warn!("usage stream names its sender twice"),
            UsageItem::Seen(seen) => {
                self.check(who, &seen.key)?;
                self.brain.tell(|fleet, now| fleet.seen(now, stream, &seen));
            }
            UsageItem::Gone(key) => {
                self.check(who, &key)?;
                self.brain.tell(|fleet, now| fleet.gone(now, stream, &key));
            }
            UsageItem::Synced => {
                self.stream = Some(self.brain.tell(|fleet, now| fleet.synced(now, stream)));
            }
        }
        Ok(())
    }

    fn open(&mut self, item: UsageItem) -> Result<(), PeerDeniedError> {
        match item {
            UsageItem::Sender(who) => {
                self.peer.may(
                    &who,
                    "report usage",
                    &[ComponentRole::Agent, ComponentRole::Activator],
                )?;
                info!(role = ?who.role, name = who.name, "usage stream opened");
                self.who = Some(who.clone());
                self.stream = Some(self.brain.tell(|fleet, now| fleet.open(now, who)));
            }
            UsageItem::Seen(_) | UsageItem::Gone(_) | UsageItem::Synced => {
                warn!("usage refused: the stream has not named its sender");
            }
        }
        Ok(())
    }

    /// Checks that an agent reports only pods of its own node, and an activator only its own waiting requests.
    fn check(&self, who: &ComponentReplica, key: &UsageKey) -> Result<(), PeerDeniedError> {
        self.peer.may_count(who, key)?;
        let (TlsPeer::Known(identity), Some(uid)) = (&self.peer, &key.pod) else { return Ok(()) };
        // A pod that the RouteTable does not name yet passes: usage and routes arrive on streams of their own.
        if self.brain.look(|fleet| fleet.is_elsewhere(uid, &identity.node)) {
            let claimed = format!("the node of pod {uid}");
            return Err(PeerDeniedError::Other { real: identity.to_string(), claimed });
        }
        Ok(())
    }
}

impl Drop for UsageReportStream {
    fn drop(&mut self) {
        if let Some(stream) = self.stream {
            info!(sender = stream.sender, "usage stream ended");
            self.brain.tell(|fleet, now| fleet.close(now, stream));
        }
    }
}

#[cfg(test)]
mod tests;
