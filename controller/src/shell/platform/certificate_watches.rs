//! Shell: watches of requested certificates and of cert-manager's objects; begun once certificates are requested, and
//! those of cert-manager once the API server has its kinds.

use std::{collections::BTreeSet, time::Duration};

use common::once_signal::OnceSignal;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::KubernetesPlatform;
use crate::{
    decide::machine::ControllerEvent,
    model::object::ResourceKind,
    shell::api::{
        watch_scope::{WatchScope, cert_manager_scopes, request_scopes},
        watches::{WatchUpdate, error_chain, start_watches},
    },
};

/// Time between two questions for cert-manager's kinds while the API server has none. To watch kinds that are missing
/// would mean a request every few seconds for each, and a warning.
const PRESENCE_INTERVAL: Duration = Duration::from_secs(30);
/// Time after which a failed question is asked again.
const PRESENCE_RETRY: Duration = Duration::from_secs(5);

impl KubernetesPlatform {
    /// Follows requested certificates from the time when the machine needs them, and without an end. Sets `listed` once
    /// the machine knows all of them, and those of cert-manager or that there is no cert-manager.
    pub(super) async fn watch_certificates(
        &self,
        listed: OnceSignal,
        shutdown: &CancellationToken,
    ) {
        let mut need = self.runtime.request_watch_need();
        // It cannot fail: the runtime holds the sender.
        let _ = need.wait_for(|it| *it).await;
        info!("certificates are requested: their objects are followed");
        let (requests_listed, issued_known) = (OnceSignal::new(), OnceSignal::new());
        let requests = self.follow_scopes(request_scopes(), shutdown, || requests_listed.set());
        let issued = self.follow_cert_manager(&issued_known, shutdown);
        let all_known = async {
            requests_listed.wait().await;
            issued_known.wait().await;
            listed.set();
        };
        tokio::join!(requests, issued, all_known);
        // The watches end with the replica, which the caller ends.
        std::future::pending().await
    }

    /// Waits for cert-manager's kinds, and follows their objects. Sets `known` at the first answer of the API server, or
    /// when all objects are listed.
    async fn follow_cert_manager(&self, known: &OnceSignal, shutdown: &CancellationToken) {
        let kinds = [ResourceKind::IssuedCertificate, ResourceKind::AcmeChallenge];
        while !self.has_kinds(&kinds).await {
            self.runtime.step(ControllerEvent::CertManagerFound(false));
            known.set();
            sleep(PRESENCE_INTERVAL).await;
        }
        // Not before the lists are complete: without its objects, each certificate would seem to be lost.
        let found = || {
            self.runtime.step(ControllerEvent::CertManagerFound(true));
            known.set();
        };
        self.follow_scopes(cert_manager_scopes(), shutdown, found).await;
    }

    /// Returns true if the API server has all of these kinds. Asks again while it cannot tell.
    pub(super) async fn has_kinds(&self, wanted: &[ResourceKind]) -> bool {
        for resource in wanted {
            let version = resource.api_version();
            let kinds = loop {
                match self.client.list_api_group_resources(&version).await {
                    Ok(list) => break list.resources,
                    // Without the right to ask, the objects cannot be followed either.
                    Err(kube::Error::Api(status)) if matches!(status.code, 403 | 404) => {
                        return false;
                    }
                    Err(error) => {
                        warn!(error = %error_chain(&error), version, "cannot ask for kinds");
                        sleep(PRESENCE_RETRY).await;
                    }
                }
            };
            if !kinds.iter().any(|it| it.name == resource.plural()) {
                return false;
            }
        }
        true
    }

    /// Follows the objects of these scopes. Calls `on_listed` once all first lists are complete.
    pub(super) async fn follow_scopes(
        &self,
        scopes: Vec<WatchScope>,
        shutdown: &CancellationToken,
        on_listed: impl Fn(),
    ) {
        let mut unlisted: BTreeSet<String> = scopes.iter().map(WatchScope::label).collect();
        let mut updates = start_watches(&self.client, scopes, &self.metrics, shutdown);
        while let Some(update) = updates.recv().await {
            let completed = match &update {
                WatchUpdate::ListCompleted(scope) => Some(scope.label()),
                WatchUpdate::ListBegun(_)
                | WatchUpdate::Object { .. }
                | WatchUpdate::Deleted { .. } => None,
            };
            // Applied before the list counts as complete, so that `on_listed` finds all objects.
            self.apply_watch_update(update);
            let was_unlisted = completed.is_some_and(|it| unlisted.remove(&it));
            if was_unlisted && unlisted.is_empty() {
                on_listed();
            }
        }
    }
}
