//! Shell: the Usage service: every agent and activator reports on one stream of its own.

use std::sync::{Arc, atomic::Ordering};

use common::{
    link::{self, LinkError},
    wire::{
        UsageItem,
        raw::{
            self,
            usage_server::{Usage, UsageServer},
        },
    },
};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};
use tracing::{info, warn};

use crate::{controller::Brain, usage::Stream};

/// Serves the Usage service at `endpoint` until `shutdown`.
pub async fn serve(
    endpoint: &str,
    brain: Arc<Brain>,
    shutdown: CancellationToken,
) -> Result<(), LinkError> {
    let service = UsageServer::new(Reports { brain, shutdown: shutdown.clone() });
    link::serve(endpoint, link::server().add_service(service), shutdown).await
}

#[derive(Debug)]
struct Reports {
    brain: Arc<Brain>,
    shutdown: CancellationToken,
}

#[tonic::async_trait]
impl Usage for Reports {
    async fn report(
        &self,
        request: Request<Streaming<raw::UsageItem>>,
    ) -> Result<Response<raw::Empty>, Status> {
        let mut report = Report { brain: Arc::clone(&self.brain), stream: None };
        link::receive(request.into_inner(), &self.shutdown, |item| report.take(item)).await?;
        Ok(Response::new(raw::Empty {}))
    }
}

/// One stream of reports. Dropping it ends what its sender is known to have waiting.
struct Report {
    brain: Arc<Brain>,
    stream: Option<Stream>,
}

impl Report {
    fn take(&mut self, item: UsageItem) {
        self.brain.usage().fetch_add(1, Ordering::Relaxed);
        let Some(stream) = self.stream else {
            match item {
                UsageItem::Sender(who) => {
                    info!(role = ?who.role, name = who.name, "usage stream opened");
                    self.stream = Some(self.brain.tell(|fleet, now| fleet.open(now, who)));
                }
                UsageItem::Seen(_) | UsageItem::Gone(_) | UsageItem::Synced => {
                    warn!("usage refused: the stream has not named its sender");
                }
            }
            return;
        };
        match item {
            UsageItem::Sender(_) => warn!("usage stream names its sender twice"),
            UsageItem::Seen(seen) => self.brain.tell(|fleet, now| fleet.seen(now, stream, &seen)),
            UsageItem::Gone(key) => self.brain.tell(|fleet, now| fleet.gone(now, stream, &key)),
            UsageItem::Synced => {
                self.stream = Some(self.brain.tell(|fleet, _| fleet.synced(stream)));
            }
        }
    }
}

impl Drop for Report {
    fn drop(&mut self) {
        if let Some(stream) = self.stream {
            info!(sender = stream.sender, "usage stream ended");
            self.brain.tell(|fleet, now| fleet.close(now, stream));
        }
    }
}

#[cfg(test)]
mod tests;
