//! Shell: `GET /running`, the thaw query: agents of clients' nodes and activators learn that a pod with a standby order
//! runs.
//!
//! The agent's loop gives the answer, because it performs the thaws: a response shows that the loop does not hang. The
//! connection of the query thaws a frozen pod, as each connection does.

use axum::{
    extract::State,
    http::StatusCode,
    response::{IntoResponse as _, Response},
};
use common::thaw_query::{FROZEN, RUNNING};
use tokio::sync::oneshot;

use super::PodServerState;

/// Capacity of the channel of queries to the agent's loop. A sender whose query is refused asks again.
pub(crate) const QUERIES_MAX: usize = 256;

/// Thaw query on its way from the pod server to the agent's loop.
#[derive(Debug)]
pub struct ThawQuery {
    /// Uid of the pod.
    pub uid: String,
    /// Sender of the answer: true if the pod runs.
    pub reply: oneshot::Sender<bool>,
}

/// Responds to a thaw query once the loop has answered it.
pub(super) async fn handle_running(State(state): State<PodServerState>) -> Response {
    let (reply, answer) = oneshot::channel();
    let query = ThawQuery { uid: state.uid, reply };
    if state.servers.thaw_queries.try_send(query).is_err() {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    }
    match answer.await {
        Ok(true) => RUNNING.into_response(),
        Ok(false) => FROZEN.into_response(),
        Err(_loop_has_ended) => StatusCode::SERVICE_UNAVAILABLE.into_response(),
    }
}
