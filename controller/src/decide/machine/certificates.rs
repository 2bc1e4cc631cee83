//! Pure: named Secrets and the results of reading them → certificates in the RouteTable, conditions, and a timer.

use std::collections::BTreeSet;

use common::wire::{NamespacedName, RouteChange, RouteKey};
use smol_str::SmolStr;
use tracing::{info, warn};

use super::{CertificateCounts, ControllerStateMachine, RouteFingerprint};
use crate::{
    decide::plan::{
        certificates::{certificate_entry, named_secrets, next_served_secret, secrets_of_mapping},
        domain_mappings,
    },
    model::cluster_state::{
        CertificateState, ConditionType, DomainMappingState, SecretRead, SecretReadState,
        UnixMillis, rfc3339_of_seconds,
    },
};

/// Key of the timer for ends and beginnings of certificates. No app has a name without a namespace.
pub(super) const CERTIFICATE_TIMER_KEY: NamespacedName = NamespacedName {
    namespace: SmolStr::new_static(""),
    name: SmolStr::new_static("certificates"),
};

/// Milliseconds for which the state of a Secret is remembered that is no longer named.
///
/// The reader follows the latest set only, and reports an unchanged Secret once. A mapping may be replaced by one of
/// the same name. Then the reader may never see the set without the Secret, and would not report it again.
pub(super) const UNNAMED_MS: u64 = 60_000;

/// State of a Secret that is no longer named.
#[derive(Debug)]
pub(super) struct UnnamedCertificate {
    state: CertificateState,
    /// Moment at which the state is forgotten.
    until: UnixMillis,
}

impl ControllerStateMachine {
    /// Handles the result of one read of a Secret.
    pub(super) fn handle_secret_read(
        &mut self,
        name: &NamespacedName,
        read: SecretRead,
        now: UnixMillis,
    ) {
        let Some(state) = self.cluster.certificates.by_secret.get_mut(name) else {
            // A mapping that names the Secret again soon finds its certificate here.
            if let Some(unnamed) = self.unnamed_certificates.get_mut(name) {
                unnamed.state.apply_read(read, now.seconds());
            }
            return;
        };
        let previous = state.clone();
        state.apply_read(read, now.seconds());
        // Secrets are read again and again, and most reads find what is known.
        if *state == previous {
            return;
        }
        log_state(name, state);
        self.follow_certificates(&BTreeSet::from([name.clone()]), now);
    }

    /// Puts certificates in force whose time has come, and plans the conditions that time alone has changed.
    pub(super) fn handle_certificate_timer(&mut self, now: UnixMillis) {
        self.unnamed_certificates.retain(|_, it| it.until > now);
        let mut changed = BTreeSet::new();
        for (name, state) in &mut self.cluster.certificates.by_secret {
            let previous = state.clone();
            state.retry_postponed(now.seconds());
            if *state != previous {
                log_state(name, state);
                changed.insert(name.clone());
            }
        }
        let moved = self.update_named_secrets(now);
        let begun_or_ended = self.take_changed_validities(now);
        self.follow_certificates(&changed, now);
        self.follow_requests_of_secrets(&begun_or_ended, now);
        self.reconcile_mappings_and_targets(&moved, now);
        // Only validity is compared here: every other change of a condition has an event of its own.
        let is_outdated = |(name, mapping): &(&NamespacedName, &DomainMappingState)| {
            mapping.tls_secret.is_some()
                && domain_mappings::tls_status(&self.cluster, name, mapping, now)
                    != mapping.conditions.get(ConditionType::DomainCertificate)
        };
        let mappings = self.cluster.domains.mappings.iter().filter(is_outdated);
        for mapping in mappings.map(|(name, _)| name.clone()).collect::<Vec<_>>() {
            self.reconcile_mapping(&mapping, now);
        }
    }

    /// Returns the Secrets whose certificate in force has begun or ceased to be valid since the last call.
    fn take_changed_validities(&mut self, now: UnixMillis) -> BTreeSet<NamespacedName> {
        let since = std::mem::replace(&mut self.validities_checked_at, now);
        let has_changed = |state: &CertificateState| {
            let validity = state.in_force.as_ref().map(|it| it.facts.validity);
            let change = validity.and_then(|it| it.next_change_after(since.seconds()));
            change.is_some_and(|at_s| at_s <= now.seconds())
        };
        let all = self.cluster.certificates.by_secret.iter();
        all.filter(|(_, state)| has_changed(state)).map(|(name, _)| name.clone()).collect()
    }

    /// Sends the certificates of these Secrets, and plans the mappings that name them with the Routes of their targets.
    fn follow_certificates(&mut self, secrets: &BTreeSet<NamespacedName>, now: UnixMillis) {
        for secret in secrets {
            self.update_certificate_route(secret);
        }
        // Collected first: a mapping may have another certificate below.
        let names_any = |(name, mapping): &(&NamespacedName, &DomainMappingState)| {
            secrets_of_mapping(&name.namespace, mapping).any(|it| secrets.contains(&it))
        };
        let mappings = self.cluster.domains.mappings.iter().filter(names_any);
        let mut mappings: BTreeSet<NamespacedName> =
            mappings.map(|(name, _)| name.clone()).collect();
        let is_moved = |name: &NamespacedName| {
            self.cluster.domains.mappings.get(name).is_some_and(|mapping| {
                let next = next_served_secret(&self.cluster, &name.namespace, mapping, now);
                next != mapping.served_secret
            })
        };
        // At a start, ten thousand Secrets are read one by one, and nearly all belong to the mapping that names them.
        // To compare all names after each of them would take minutes.
        if mappings.iter().any(is_moved) {
            mappings.extend(self.update_named_secrets(now));
        }
        self.reconcile_mappings_and_targets(&mappings, now);
        self.follow_requests_of_secrets(secrets, now);
        self.follow_gateway_secrets(secrets, now);
        self.update_certificate_timer(now);
        self.effects.certificate_counts = Some(self.certificate_counts());
    }

    /// Plans the conditions of mappings and of the others with their hosts, which have the same certificates, and the
    /// Routes of their targets.
    pub(super) fn reconcile_mappings_and_targets(
        &mut self,
        mappings: &BTreeSet<NamespacedName>,
        now: UnixMillis,
    ) {
        let with_others = |name: &NamespacedName| match self.cluster.domains.mappings.get(name) {
            Some(mapping) => self.mappings_of_host(&name.namespace, &mapping.domain),
            None => vec![name.clone()],
        };
        let all: BTreeSet<NamespacedName> = mappings.iter().flat_map(with_others).collect();
        for mapping in &all {
            let target = self.cluster.domains.mappings.get(mapping).map(|it| it.target.clone());
            self.reconcile_route_owner(target, now);
            self.reconcile_mapping(mapping, now);
        }
    }

    /// Updates the set of named Secrets, and passes it to the reader also if it is empty. All mappings are to be planned
    /// afterwards.
    pub(super) fn set_first_named_secrets(&mut self, now: UnixMillis) {
        let _planned_later = self.update_named_secrets(now);
        self.effects.named_secrets = Some(self.present_secrets());
    }

    /// Updates the set of named Secrets, and the Secret that serves each domain. A new Secret has an entry in the
    /// RouteTable at once, so that activators keep its certificate when a controller starts.
    ///
    /// Returns the mappings that have another Secret now: these and their targets are to be planned.
    pub(super) fn update_named_secrets(&mut self, now: UnixMillis) -> BTreeSet<NamespacedName> {
        if self.is_loading {
            return BTreeSet::new();
        }
        let previous = self.present_secrets();
        // Before domains get other certificates, as a new Secret may have one already.
        for secret in named_secrets(&self.cluster) {
            self.add_named_secret(secret, now);
        }
        let moved = self.update_served_secrets(now);
        let named = named_secrets(&self.cluster);
        for secret in self.present_secrets().difference(&named) {
            self.remove_named_secret(secret, now);
        }
        if named != previous {
            self.effects.named_secrets = Some(named);
            self.update_certificate_timer(now);
            self.effects.certificate_counts = Some(self.certificate_counts());
        }
        moved
    }

    /// Returns the Secrets that have a state.
    fn present_secrets(&self) -> BTreeSet<NamespacedName> {
        self.cluster.certificates.by_secret.keys().cloned().collect()
    }

    fn add_named_secret(&mut self, name: NamespacedName, now: UnixMillis) {
        if self.cluster.certificates.by_secret.contains_key(&name) {
            return;
        }
        let unnamed = self.unnamed_certificates.remove(&name).filter(|it| it.until > now);
        let state = unnamed.map_or_else(CertificateState::pending, |it| it.state);
        self.cluster.certificates.by_secret.insert(name.clone(), state);
        self.update_certificate_route(&name);
    }

    fn remove_named_secret(&mut self, name: &NamespacedName, now: UnixMillis) {
        let Some(state) = self.cluster.certificates.by_secret.remove(name) else { return };
        info!(secret = %name, "certificate no longer named");
        let until = now.plus_ms(UNNAMED_MS);
        self.unnamed_certificates.insert(name.clone(), UnnamedCertificate { state, until });
        self.routes.remove(&RouteKey::Certificate(name.clone()));
    }

    /// Sets the Secret that serves each domain, by the certificates in force. Returns the mappings that have another one
    /// now.
    fn update_served_secrets(&mut self, now: UnixMillis) -> BTreeSet<NamespacedName> {
        let mut changed = Vec::new();
        for (name, mapping) in &self.cluster.domains.mappings {
            let served = next_served_secret(&self.cluster, &name.namespace, mapping, now);
            if served != mapping.served_secret {
                changed.push((name.clone(), served));
            }
        }
        // A second pass, since the first one reads the whole cluster state.
        for (name, served) in &changed {
            if let Some(mapping) = self.cluster.domains.mappings.get_mut(name) {
                mapping.served_secret.clone_from(served);
            }
        }
        changed.into_iter().map(|(name, _)| name).collect()
    }

    fn update_certificate_route(&self, name: &NamespacedName) {
        if let Some(state) = self.cluster.certificates.by_secret.get(name) {
            let change = RouteChange::Certificate(certificate_entry(name, state));
            let key = RouteKey::Certificate(name.clone());
            self.routes.set(key, RouteFingerprint::of_change(&change));
        }
    }

    fn update_certificate_timer(&mut self, now: UnixMillis) {
        let now_s = now.seconds();
        let states = self.cluster.certificates.by_secret.values();
        let changes = states.filter_map(|it| it.next_change_after(now_s));
        // A moment that is over would let the timer fire without end.
        let changes = changes.map(|at_s| UnixMillis::from_seconds(at_s.max(now_s + 1)));
        let ends = self.unnamed_certificates.values().map(|it| it.until);
        let next = changes.chain(ends).min();
        self.timers.set(&CERTIFICATE_TIMER_KEY, next);
    }

    /// Returns the number of named Secrets in each state: those with certificates, and those with authorities of
    /// client certificates.
    pub(super) fn certificate_counts(&self) -> CertificateCounts {
        let mut counts = CertificateCounts::default();
        let certificates = self.cluster.certificates.by_secret.values();
        let certificates = certificates.map(|it| (&it.last_read, it.in_force.is_some()));
        let client_cas = self.cluster.client_cas.by_secret.values();
        let client_cas = client_cas.map(|it| (&it.last_read, it.in_force.is_some()));
        for state in certificates.chain(client_cas) {
            let count = match state {
                (SecretReadState::InForce, _) => &mut counts.in_force,
                // An earlier certificate that stays in force, whatever the last read has found.
                (_, true) => &mut counts.kept,
                (SecretReadState::Pending, false) => &mut counts.pending,
                (SecretReadState::Refused(_), false) => &mut counts.unusable,
                (SecretReadState::Absent, false) => &mut counts.absent,
                (SecretReadState::Unreadable(_), false) => &mut counts.unreadable,
            };
            *count += 1;
        }
        counts
    }
}

/// Logs a state that has just begun. Nothing of the Secret but hosts and dates is logged.
fn log_state(name: &NamespacedName, state: &CertificateState) {
    let reason = match (&state.last_read, &state.in_force) {
        // Nothing has been decided about the Secret yet.
        (SecretReadState::Pending, _) | (SecretReadState::InForce, None) => return,
        (SecretReadState::InForce, Some(certificate)) => {
            let names = certificate.facts.names.summary();
            let not_after = rfc3339_of_seconds(certificate.facts.validity.not_after_s);
            info!(secret = %name, names, not_after, "certificate in force");
            return;
        }
        (SecretReadState::Absent, _) => "it does not exist",
        (SecretReadState::Refused(reason) | SecretReadState::Unreadable(reason), _) => {
            reason.as_str()
        }
    };
    let kept = state.in_force.is_some();
    warn!(secret = %name, reason, kept, "certificate cannot be used");
}
