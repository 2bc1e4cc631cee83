//! Shell: the Usage service, on which each agent and activator reports by one stream of its own.

use std::sync::{Arc, atomic::Ordering};

use common::{
    link::{self, LinkError, TlsAdmission},
    tls::{
        self,
        peer::{PeerDeniedError, TlsPeer},
    },
    wire::{
        ClientComponent, ComponentReplica, UsageItem, UsageKey,
        raw::{
            self,
            usage_server::{Usage, UsageServer},
        },
    },
};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};
use tracing::{info, warn};

use crate::{evaluator::ScaleEvaluator, usage::UsageStream};

/// Serves the Usage service at `endpoint` until `shutdown`. At `https://`, `tls_admission` decides which clients may
/// connect.
pub async fn serve(
    endpoint: &str,
    evaluator: Arc<ScaleEvaluator>,
    tls_admission: Option<&TlsAdmission>,
    shutdown: CancellationToken,
) -> Result<(), LinkError> {
    let service = UsageServer::new(UsageService { evaluator, shutdown: shutdown.clone() });
    link::serve_with_tls(
        endpoint,
        link::server_builder().add_service(service),
        tls_admission,
        shutdown,
    )
    .await
}

#[derive(Debug)]
struct UsageService {
    evaluator: Arc<ScaleEvaluator>,
    shutdown: CancellationToken,
}

#[tonic::async_trait]
impl Usage for UsageService {
    async fn report(
        &self,
        request: Request<Streaming<raw::UsageItem>>,
    ) -> Result<Response<raw::Empty>, Status> {
        let peer = tls::request_peer(&request);
        let mut report = UsageReportStream {
            evaluator: Arc::clone(&self.evaluator),
            peer,
            sender: None,
            stream: None,
        };
        // A token of this stream alone: a denied message ends this stream, not the others.
        let (stop, mut denied) = (self.shutdown.child_token(), None);
        let on_item = |item| {
            // Messages that arrived before the stream stops are ignored after the first denied one.
            if denied.is_none()
                && let Err(error) = report.handle_item(item)
            {
                denied = Some(error);
                stop.cancel();
            }
        };
        let outcome = link::receive_items(request.into_inner(), &stop, on_item).await;
        if let Some(denied) = denied {
            warn!(%denied, "usage refused");
            return Err(tls::denied_status(&denied));
        }
        outcome.map(|()| Response::new(raw::Empty {}))
    }
}

/// One stream of reports. Dropping it closes the stream; the last reported totals are kept until the sender returns.
struct UsageReportStream {
    evaluator: Arc<ScaleEvaluator>,
    peer: TlsPeer,
    sender: Option<ComponentReplica>,
    stream: Option<UsageStream>,
}

impl UsageReportStream {
    /// Handles one message. An error ends the stream: its sender has reported what it may not report.
    fn handle_item(&mut self, item: UsageItem) -> Result<(), PeerDeniedError> {
        self.evaluator.usage_items().fetch_add(1, Ordering::Relaxed);
        // The first message must name the sender; before it there is no stream to attribute usage to.
        let (Some(stream), Some(replica)) = (self.stream, &self.sender) else {
            return self.open_stream(item);
        };
        match item {
            UsageItem::Sender(_) => warn!("usage stream names its sender twice"),
            UsageItem::Sample(sample) => {
                self.check_key(replica, &sample.key)?;
                self.evaluator.update(|revisions, now| revisions.apply_usage(now, stream, &sample));
            }
            UsageItem::Removed(key) => {
                self.check_key(replica, &key)?;
                self.evaluator.update(|revisions, now| revisions.remove_usage(now, stream, &key));
            }
            UsageItem::Synced => {
                self.stream = Some(
                    self.evaluator.update(|revisions, now| revisions.complete_batch(now, stream)),
                );
            }
        }
        Ok(())
    }

    fn open_stream(&mut self, item: UsageItem) -> Result<(), PeerDeniedError> {
        match item {
            UsageItem::Sender(replica) => {
                self.peer.check_role(
                    &replica,
                    "report usage",
                    &[ClientComponent::Agent, ClientComponent::Activator],
                )?;
                info!(role = ?replica.role, name = replica.name, "usage stream opened");
                self.sender = Some(replica.clone());
                self.stream = Some(
                    self.evaluator.update(|revisions, now| revisions.open_stream(now, replica)),
                );
            }
            UsageItem::Sample(_) | UsageItem::Removed(_) | UsageItem::Synced => {
                // The samples before a sender's name belong to no sender whose silence could be noticed.
                warn!("usage refused: the stream has not named its sender");
            }
        }
        Ok(())
    }

    /// Checks that an agent reports only pods of its own node, and an activator only its own waiting requests.
    fn check_key(&self, replica: &ComponentReplica, key: &UsageKey) -> Result<(), PeerDeniedError> {
        self.peer.check_usage_key(replica, key)?;
        let (TlsPeer::Authenticated(identity), Some(uid)) = (&self.peer, &key.pod) else {
            return Ok(());
        };
        // A pod that the RouteTable does not name yet passes: usage and routes arrive on streams of their own.
        if self.evaluator.read(|revisions| revisions.is_on_other_node(uid, &identity.node)) {
            let claimed = format!("the node of pod {uid}");
            return Err(PeerDeniedError::IdentityMismatch { real: identity.to_string(), claimed });
        }
        Ok(())
    }
}

impl Drop for UsageReportStream {
    fn drop(&mut self) {
        if let Some(stream) = self.stream {
            info!(sender = stream.sender, "usage stream ended");
            self.evaluator.update(|revisions, now| revisions.close_stream(now, stream));
        }
    }
}

#[cfg(test)]
mod tests;
