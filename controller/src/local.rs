//! Shell: channels to the local node: orders out, pod statuses in.

use std::sync::Arc;

use common::node::{Orders, PodStatus};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::{machine::Event, shared::Shared};

/// The controller's ends of the channels to the local node.
#[derive(Debug)]
pub struct Node {
    /// Orders: every pod that should run, and every name with its addresses.
    pub orders: watch::Sender<Orders>,
    /// Statuses of the pods, as the node reports them.
    pub statuses: mpsc::Receiver<PodStatus>,
}

/// Passes pod statuses to the machine until `shutdown`.
pub async fn follow(
    shared: Arc<Shared>,
    mut statuses: mpsc::Receiver<PodStatus>,
    shutdown: CancellationToken,
) {
    loop {
        tokio::select! {
            status = statuses.recv() => match status {
                Some(status) => shared.step(Event::Status(status)),
                // The node has ended; its last statuses hold until the controller ends too.
                None => return,
            },
            () = shutdown.cancelled() => return,
        }
    }
}
