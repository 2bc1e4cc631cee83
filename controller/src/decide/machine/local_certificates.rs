//! Pure: services whose names inside the cluster serve https → certificates to sign, those in the RouteTable, and
//! conditions.

use std::{collections::BTreeSet, sync::Arc};

use common::wire::{CertificateMaterial, LOCAL_TLS_PORT, NamespacedName, RouteChange, RouteKey};

use super::{ControllerStateMachine, RouteFingerprint};
use crate::{
    decide::plan::local_tls,
    model::cluster_state::{LocalCertificateState, UnixMillis},
};

impl ControllerStateMachine {
    /// Follows the change of a service in the RouteTable: requests its certificate, or drops it.
    pub(super) fn follow_local_tls(&mut self, service: &NamespacedName, serves_local_tls: bool) {
        let all = &mut self.cluster.local_certificates;
        if all.contains_key(service) == serves_local_tls {
            return;
        }
        if serves_local_tls {
            // The number tells an answer to this request from one to an earlier request of the same service.
            self.local_requests += 1;
            let state = LocalCertificateState {
                request: self.local_requests,
                material: None,
                is_from_start: self.cluster.is_starting,
                failure: None,
            };
            all.insert(service.clone(), state);
            self.update_local_certificate_route(service);
        } else {
            all.remove(service);
            self.routes.remove(&RouteKey::Certificate(service.with_port(LOCAL_TLS_PORT)));
        }
        self.changed_local_certificates.insert(service.clone());
    }

    /// Handles a certificate that was signed. One that nothing wants any more is dropped.
    pub(super) fn handle_local_certificate(
        &mut self,
        service: &NamespacedName,
        material: Arc<CertificateMaterial>,
        now: UnixMillis,
    ) {
        let Some(state) = self.cluster.local_certificates.get_mut(service) else { return };
        let is_first = state.material.replace(material).is_none();
        let had_failed = state.failure.take().is_some();
        self.update_local_certificate_route(service);
        // A renewal changes no condition.
        if (is_first || had_failed)
            && let Some(app) = self.cluster.app_of_service(service)
        {
            self.reconcile_app(&app, now);
        }
    }

    /// Handles a lasting failure to sign certificates. Activators keep those that they have.
    pub(super) fn handle_local_signing_failure(
        &mut self,
        services: &BTreeSet<NamespacedName>,
        reason: &str,
        now: UnixMillis,
    ) {
        for service in services {
            let Some(state) = self.cluster.local_certificates.get_mut(service) else { continue };
            // The signer repeats a failure in each of its rounds.
            if state.failure.as_deref() == Some(reason) {
                continue;
            }
            state.failure = Some(reason.into());
            if let Some(app) = self.cluster.app_of_service(service) {
                self.reconcile_app(&app, now);
            }
        }
    }

    /// Tells the signer which wanted certificates this step has added or dropped. It gets no whole list, which may have
    /// ten thousand entries.
    pub(super) fn pass_local_certificates(&mut self) {
        let all = &self.cluster.local_certificates;
        let request = |service: NamespacedName| {
            let request = all.get(&service).map(|it| it.request);
            (service, request)
        };
        let changed = std::mem::take(&mut self.changed_local_certificates);
        self.effects.local_certificates.extend(changed.into_iter().map(request));
    }

    fn update_local_certificate_route(&self, service: &NamespacedName) {
        if let Some(state) = self.cluster.local_certificates.get(service) {
            let entry = local_tls::certificate_entry(service, state);
            let key = RouteKey::Certificate(entry.name.clone());
            self.routes.set(key, RouteFingerprint::of_change(&RouteChange::Certificate(entry)));
        }
    }
}
