//! Shell: channels to the local node: node specs out, pod statuses in.

use std::sync::Arc;

use common::local_node::{LocalNodeSpec, PodRunStatus};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::{decide::machine::ControllerEvent, shell::runtime::ControllerRuntime};

/// The controller's ends of the channels to the local node.
#[derive(Debug)]
pub struct LocalNodeChannels {
    /// Every pod that should run, and every DNS name with its addresses.
    pub node_spec: watch::Sender<LocalNodeSpec>,
    /// Statuses of the pods, as the node reports them.
    pub statuses: mpsc::Receiver<PodRunStatus>,
}

/// Passes pod statuses to the state machine until `shutdown`.
pub async fn forward_pod_statuses(
    runtime: Arc<ControllerRuntime>,
    mut statuses: mpsc::Receiver<PodRunStatus>,
    shutdown: CancellationToken,
) {
    loop {
        tokio::select! {
            status = statuses.recv() => match status {
                Some(status) => runtime.step(ControllerEvent::PodRunStatus(status)),
                // The node has ended; its last statuses hold until the controller ends too.
                None => return,
            },
            () = shutdown.cancelled() => return,
        }
    }
}
