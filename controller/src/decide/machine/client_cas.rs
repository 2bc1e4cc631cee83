//! Pure: Secrets with authorities of client certificates and the results of reading them → authorities in the
//! RouteTable, rules of domains, and conditions.

use std::collections::BTreeSet;

use common::wire::{NamespacedName, RouteChange, RouteKey};
use tracing::{info, warn};

use super::{ControllerStateMachine, RouteFingerprint, certificates::UNNAMED_MS};
use crate::{
    decide::plan::client_cas::{
        client_ca_entry, client_cas_of_mapping, named_client_cas, next_served_client_ca,
    },
    model::cluster_state::{
        ClientCaRead, ClientCaState, DomainMappingState, SecretReadState, UnixMillis,
    },
};

/// State of a Secret that is no longer named. It is kept for [`UNNAMED_MS`], and for the same reason.
#[derive(Debug)]
pub(super) struct UnnamedClientCa {
    state: ClientCaState,
    /// Moment at which the state counts no more.
    until: UnixMillis,
}

impl ControllerStateMachine {
    /// Handles the result of one read of a Secret with authorities.
    pub(super) fn handle_client_ca_read(
        &mut self,
        name: &NamespacedName,
        read: ClientCaRead,
        now: UnixMillis,
    ) {
        let Some(state) = self.cluster.client_cas.by_secret.get_mut(name) else {
            if let Some(unnamed) = self.unnamed_client_cas.get_mut(name) {
                unnamed.state.apply_read(read);
            }
            return;
        };
        let previous = state.clone();
        state.apply_read(read);
        if *state == previous {
            return;
        }
        log_state(name, state);
        self.update_client_ca_route(name);
        // Collected first: a mapping may have other authorities below.
        let names_it = |(mapping_name, mapping): &(&NamespacedName, &DomainMappingState)| {
            client_cas_of_mapping(&mapping_name.namespace, mapping).any(|it| it == *name)
        };
        let mappings = self.cluster.domains.mappings.iter().filter(names_it);
        let mut mappings: BTreeSet<NamespacedName> =
            mappings.map(|(name, _)| name.clone()).collect();
        let is_moved = |name: &NamespacedName| {
            self.cluster.domains.mappings.get(name).is_some_and(|mapping| {
                let next = next_served_client_ca(&self.cluster, &name.namespace, mapping);
                next != mapping.served_client_ca
            })
        };
        // To compare all names after each of many reads would take too long.
        if mappings.iter().any(is_moved) {
            mappings.extend(self.update_named_client_cas(now));
        }
        self.reconcile_mappings_and_targets(&mappings, now);
        self.effects.certificate_counts = Some(self.certificate_counts());
    }

    /// Updates the set of named Secrets, and passes it to the reader also if it is empty. All mappings are to be planned
    /// afterwards.
    pub(super) fn set_first_named_client_cas(&mut self, now: UnixMillis) {
        let _planned_later = self.update_named_client_cas(now);
        self.effects.named_client_cas = Some(self.present_client_cas());
    }

    /// Updates the set of Secrets with authorities, and the one of each domain. A new Secret has an entry in the
    /// RouteTable at once, so that activators keep its authorities when a controller starts.
    ///
    /// Returns the mappings that have another Secret now: these and their targets are to be planned.
    pub(super) fn update_named_client_cas(&mut self, now: UnixMillis) -> BTreeSet<NamespacedName> {
        if self.is_loading {
            return BTreeSet::new();
        }
        self.unnamed_client_cas.retain(|_, it| it.until > now);
        let previous = self.present_client_cas();
        // Before domains get other authorities, as a new Secret may have some already.
        for secret in named_client_cas(&self.cluster) {
            self.add_named_client_ca(secret);
        }
        let moved = self.update_served_client_cas();
        let named = named_client_cas(&self.cluster);
        for secret in self.present_client_cas().difference(&named) {
            self.remove_named_client_ca(secret, now);
        }
        if named != previous {
            self.effects.named_client_cas = Some(named);
            self.effects.certificate_counts = Some(self.certificate_counts());
        }
        moved
    }

    fn present_client_cas(&self) -> BTreeSet<NamespacedName> {
        self.cluster.client_cas.by_secret.keys().cloned().collect()
    }

    fn add_named_client_ca(&mut self, name: NamespacedName) {
        if self.cluster.client_cas.by_secret.contains_key(&name) {
            return;
        }
        let unnamed = self.unnamed_client_cas.remove(&name);
        let state = unnamed.map_or_else(ClientCaState::pending, |it| it.state);
        self.cluster.client_cas.by_secret.insert(name.clone(), state);
        self.update_client_ca_route(&name);
    }

    fn remove_named_client_ca(&mut self, name: &NamespacedName, now: UnixMillis) {
        let Some(state) = self.cluster.client_cas.by_secret.remove(name) else { return };
        info!(secret = %name, "client CA no longer named");
        let until = now.plus_ms(UNNAMED_MS);
        self.unnamed_client_cas.insert(name.clone(), UnnamedClientCa { state, until });
        self.routes.remove(&RouteKey::ClientCa(name.clone()));
    }

    /// Sets the Secret of each domain, by the authorities in force. Returns the mappings that have another one now.
    fn update_served_client_cas(&mut self) -> BTreeSet<NamespacedName> {
        let mut changed = Vec::new();
        for (name, mapping) in &self.cluster.domains.mappings {
            let served = next_served_client_ca(&self.cluster, &name.namespace, mapping);
            if served != mapping.served_client_ca {
                changed.push((name.clone(), served));
            }
        }
        // A second pass, since the first one reads the whole cluster state.
        for (name, served) in &changed {
            if let Some(mapping) = self.cluster.domains.mappings.get_mut(name) {
                mapping.served_client_ca.clone_from(served);
            }
        }
        changed.into_iter().map(|(name, _)| name).collect()
    }

    fn update_client_ca_route(&self, name: &NamespacedName) {
        if let Some(state) = self.cluster.client_cas.by_secret.get(name) {
            let change = RouteChange::ClientCa(client_ca_entry(name, state));
            let key = RouteKey::ClientCa(name.clone());
            self.routes.set(key, RouteFingerprint::of_change(&change));
        }
    }
}

/// Logs a state that has just begun.
fn log_state(name: &NamespacedName, state: &ClientCaState) {
    let reason = match &state.last_read {
        SecretReadState::Pending => return,
        SecretReadState::InForce => {
            let certificates = state.in_force.as_ref().map_or(0, |it| it.0.len());
            info!(secret = %name, certificates, "client CA in force");
            return;
        }
        SecretReadState::Absent => "it does not exist",
        SecretReadState::Refused(reason) | SecretReadState::Unreadable(reason) => reason.as_str(),
    };
    let kept = state.in_force.is_some();
    warn!(secret = %name, reason, kept, "client CA cannot be used");
}
