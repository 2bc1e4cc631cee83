//! Shell: watches of users' workloads, with their autoscalers and pods; as they may be many, begun once a scaled Service
//! exists.

use std::collections::BTreeSet;

use common::once_signal::OnceSignal;
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::KubernetesPlatform;
use crate::{
    decide::machine::ControllerEvent,
    shell::api::{
        watch_scope::{WatchScope, workload_scopes},
        watches::{WatchUpdate, start_watches},
    },
};

impl KubernetesPlatform {
    /// Follows the workloads of users from the time when the machine needs them, and without an end. Sets `listed` once
    /// the machine knows all of them.
    pub(super) async fn watch_workloads(&self, listed: OnceSignal, shutdown: &CancellationToken) {
        let mut need = self.runtime.workload_watch_need();
        // It cannot fail: the runtime holds the sender.
        let _ = need.wait_for(|it| *it).await;
        info!("a scaled Service exists: the workloads and pods of users are followed");
        let scopes = workload_scopes(&self.system_namespace);
        let mut unlisted: BTreeSet<String> = scopes.iter().map(WatchScope::label).collect();
        let mut updates = start_watches(&self.client, scopes, &self.metrics, shutdown);
        while let Some(update) = updates.recv().await {
            let completed = match &update {
                WatchUpdate::ListCompleted(scope) => Some(scope.label()),
                WatchUpdate::ListBegun(_)
                | WatchUpdate::Object { .. }
                | WatchUpdate::Deleted { .. } => None,
            };
            self.apply_watch_update(update);
            let was_unlisted = completed.is_some_and(|it| unlisted.remove(&it));
            if was_unlisted && unlisted.is_empty() {
                self.runtime.step(ControllerEvent::WorkloadsListed);
                listed.set();
            }
        }
        // The watches end with the replica, which the caller ends.
        std::future::pending().await
    }
}
