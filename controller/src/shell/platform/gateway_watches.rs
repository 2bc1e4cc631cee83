//! Shell: watches of the Gateway API; begun once the API server has its kinds.

use std::time::Duration;

use common::once_signal::OnceSignal;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::KubernetesPlatform;
use crate::shell::api::watch_scope::{GATEWAY_KINDS, gateway_scopes};

/// Time between two questions for the kinds while the API server has none. To watch kinds that are missing would mean a
/// request every few seconds for each, and a warning.
const PRESENCE_INTERVAL: Duration = Duration::from_secs(60);

impl KubernetesPlatform {
    /// Waits for the kinds of the Gateway API and follows their objects, without an end. Sets `listed` once all objects
    /// are listed, or at the first answer of the API server that it has no such kinds.
    pub(super) async fn watch_gateways(&self, listed: OnceSignal, shutdown: &CancellationToken) {
        while !self.has_kinds(&GATEWAY_KINDS).await {
            listed.set();
            sleep(PRESENCE_INTERVAL).await;
        }
        info!("the Gateway API is installed: its objects are followed");
        self.follow_scopes(gateway_scopes(), shutdown, || listed.set()).await;
        // The watches end with the replica, which the caller ends.
        std::future::pending().await
    }
}
