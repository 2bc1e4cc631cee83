//! Shell: the local node at the other end of two channels.

use std::sync::Arc;

use common::node::{Orders, PodStatus};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::{machine::Event, shared::Shared};

/// The controller's ends of the channels to the local node.
#[derive(Debug)]
pub struct Node {
    /// Every pod that should exist, and every name.
    pub orders: watch::Sender<Orders>,
    /// How pods fare.
    pub statuses: mpsc::Receiver<PodStatus>,
}

/// Takes in how pods fare until `shutdown`.
pub async fn follow(
    shared: Arc<Shared>,
    mut statuses: mpsc::Receiver<PodStatus>,
    shutdown: CancellationToken,
) {
    loop {
        tokio::select! {
            status = statuses.recv() => match status {
                Some(status) => shared.step(Event::Status(status)),
                // The node has ended; what it last said stays true until the controller ends too.
                None => return,
            },
            () = shutdown.cancelled() => return,
        }
    }
}
