//! Pure: requested certificates and the objects of cert-manager → named Secrets, conditions, and parts to write.

use std::collections::BTreeSet;

use common::wire::NamespacedName;
use serde_json::Value;
use smol_str::SmolStr;
use tracing::{info, warn};

use super::ControllerStateMachine;
use crate::{
    decide::{
        part_keys,
        plan::requested_certificates::{
            is_enabled, namespace_certificate, owner_mapping, owner_route,
        },
    },
    model::cluster_state::{
        CertManagerPresence, ReadyStatus, RequestedCertificate, Uid, UnixMillis,
    },
    read::observe,
};

impl ControllerStateMachine {
    /// Handles a certificate of the group `networking.internal.knative.dev`; `None`: it was deleted.
    pub(super) fn observe_requested_certificate(
        &mut self,
        name: &NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        let next = object.map(observe::read_requested_certificate);
        let all = &mut self.cluster.requests.certificates;
        let previous = match next.clone() {
            Some(next) => all.insert(name.clone(), next),
            None => all.remove(name),
        };
        if self.is_loading {
            return;
        }
        // Even if nothing that is read has changed: the writer compares fields that the plans do not have.
        self.effects.changed_keys.extend(part_keys::request_keys(name));
        if previous == next {
            return;
        }
        log_readiness(name, previous.as_ref(), next.as_ref());
        let secret = |it: &Option<RequestedCertificate>| {
            it.as_ref().map(|it| (it.is_issued, it.is_terminating, it.secret.clone()))
        };
        // The Secret of a request counts as named only once it is issued, and no longer than the request lasts.
        let has_other_secret = secret(&previous) != secret(&next);
        let moved_mappings =
            if has_other_secret { self.update_named_secrets(now) } else { BTreeSet::new() };
        let is_shared = |it: &Option<RequestedCertificate>| {
            it.as_ref().is_some_and(|it| it.wildcard_domain.is_some())
        };
        self.follow_request(name, is_shared(&previous) || is_shared(&next), now);
        self.reconcile_mappings_and_targets(&moved_mappings, now);
    }

    /// Plans the owner of a requested certificate, or all Routes of its namespace if it is for all names there.
    fn follow_request(&mut self, name: &NamespacedName, is_shared: bool, now: UnixMillis) {
        if is_shared {
            let from = self.cluster.apps.range(NamespacedName::new(name.namespace.clone(), "")..);
            let apps = from.map(|(app, _)| app).take_while(|it| it.namespace == name.namespace);
            for app in apps.cloned().collect::<Vec<_>>() {
                self.follow_request_of_app(&app, now);
            }
        } else if let Some(app) = owner_route(&self.cluster, name) {
            self.follow_request_of_app(&app, now);
        } else if let Some((mapping, _)) = owner_mapping(&self.cluster, name) {
            let mapping = BTreeSet::from([mapping.clone()]);
            self.reconcile_mappings_and_targets(&mapping, now);
        }
    }

    /// Plans an app. Its URLs and its Ingress depend on certificates too, and they are not a part of its state.
    fn follow_request_of_app(&mut self, app: &NamespacedName, now: UnixMillis) {
        self.reconcile_app(app, now);
        self.effects.changed_keys.extend(part_keys::status_keys(app));
        self.check_ingress(app);
    }

    /// Plans the owners of requested certificates whose Secrets have another state now.
    pub(super) fn follow_requests_of_secrets(
        &mut self,
        secrets: &BTreeSet<NamespacedName>,
        now: UnixMillis,
    ) {
        if !is_enabled(&self.cluster) {
            return;
        }
        for secret in secrets {
            for (request, is_shared) in self.requests_of_secret(secret) {
                self.follow_request(&request, is_shared, now);
            }
        }
    }

    /// Returns the requested certificates of a Secret, and for each if it is for all names of its namespace. The
    /// controller's own have the name of their Secret, and only where there is none of this name all are compared.
    fn requests_of_secret(&self, secret: &NamespacedName) -> Vec<(NamespacedName, bool)> {
        let requests = &self.cluster.requests;
        let has_secret = |it: &RequestedCertificate| *it.secret == *secret.name;
        let entry = |name: &NamespacedName, it: &RequestedCertificate| {
            (name.clone(), it.wildcard_domain.is_some())
        };
        if let Some(own) = requests.certificates.get(secret).filter(|it| has_secret(it)) {
            return vec![entry(secret, own)];
        }
        let all = requests.of_namespace(&secret.namespace);
        all.filter(|(_, it)| has_secret(it)).map(|(name, it)| entry(name, it)).collect()
    }

    /// Handles a certificate of cert-manager; `None`: it was deleted.
    pub(super) fn observe_issued_certificate(
        &mut self,
        name: &NamespacedName,
        object: Option<&Value>,
    ) {
        let all = &mut self.cluster.requests.issued;
        match object.map(observe::read_issued_certificate) {
            Some(issued) => drop(all.insert(name.clone(), issued)),
            None => drop(all.remove(name)),
        }
        self.effects.changed_keys.extend(part_keys::request_keys(name));
    }

    /// Handles a challenge of cert-manager; `None`: it was deleted.
    pub(super) fn observe_challenge(
        &mut self,
        name: &NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        let all = &mut self.cluster.requests.challenges;
        let next = object.and_then(observe::read_http_challenge);
        let previous = match next.clone() {
            Some(next) => all.insert(name.clone(), next),
            None => all.remove(name),
        };
        if previous != next {
            let hosts = previous.into_iter().chain(next).map(|it| it.host).collect();
            self.follow_challenges(&name.namespace, &hosts, now);
        }
    }

    /// Handles a Service as the solver of a challenge. `None`: it was deleted.
    pub(super) fn observe_challenge_solver(
        &mut self,
        name: &NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        let all = &mut self.cluster.requests.solvers;
        let next = object.and_then(observe::read_challenge_solver);
        let previous = match next.clone() {
            Some(next) => all.insert(name.clone(), next),
            None => all.remove(name),
        };
        if previous == next {
            return;
        }
        let uids: BTreeSet<Uid> =
            previous.into_iter().chain(next).map(|it| it.challenge_uid).collect();
        let challenges = self.cluster.requests.challenges.values();
        // A solver names its challenge by the UID, and the hosts are known to the challenge only.
        let solved = challenges.filter(|it| uids.contains(&it.uid));
        let hosts = solved.map(|it| it.host.clone()).collect();
        self.follow_challenges(&name.namespace, &hosts, now);
    }

    /// Writes the challenges of these hosts into the statuses of their requests, and into the routes of their owners.
    fn follow_challenges(&mut self, namespace: &str, hosts: &BTreeSet<String>, now: UnixMillis) {
        if self.is_loading || hosts.is_empty() || !is_enabled(&self.cluster) {
            return;
        }
        // The second host of a long name's certificate is `k.` and the domain, which no request lists.
        let has_host = |it: &RequestedCertificate| {
            hosts.iter().any(|host| it.covers(host) || host.starts_with("k."))
        };
        let requests = self.cluster.requests.of_namespace(namespace);
        let concerned = requests.filter(|(_, it)| has_host(it));
        let concerned: Vec<(NamespacedName, bool)> =
            concerned.map(|(name, it)| (name.clone(), it.wildcard_domain.is_some())).collect();
        for (request, is_shared) in concerned {
            self.effects.changed_keys.extend(part_keys::request_keys(&request));
            self.follow_request(&request, is_shared, now);
        }
    }

    /// Handles a namespace, as far as its certificate depends on it. `None`: it was deleted.
    pub(super) fn observe_certificate_namespace(
        &mut self,
        name: &SmolStr,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        let before = namespace_certificate(&self.cluster, name);
        let all = &mut self.cluster.requests.namespaces;
        match object.map(observe::read_certificate_namespace) {
            Some(namespace) => drop(all.insert(name.clone(), namespace)),
            None => drop(all.remove(name)),
        }
        let after = namespace_certificate(&self.cluster, name);
        if self.is_loading || before == after {
            return;
        }
        // The certificate of before may have to be deleted.
        for wanted in before.into_iter().chain(after) {
            self.effects.changed_keys.extend(part_keys::request_keys(&wanted.name));
            self.follow_request(&wanted.name, true, now);
        }
    }

    /// Handles the answer to the question if the API server has the kinds of cert-manager.
    pub(super) fn handle_cert_manager_presence(&mut self, is_present: bool, now: UnixMillis) {
        use CertManagerPresence::{Missing, Present};
        let presence = if is_present { Present } else { Missing };
        if self.cluster.requests.cert_manager == presence {
            return;
        }
        self.cluster.requests.cert_manager = presence;
        match presence {
            Missing => warn!("cert-manager is not installed: no certificates can be requested"),
            Present | CertManagerPresence::Unknown => info!("cert-manager is installed"),
        }
        if self.is_loading {
            return;
        }
        // The presence is stated in conditions of each object that waits for a certificate.
        for name in self.cluster.apps.keys().cloned().collect::<Vec<_>>() {
            self.reconcile_app(&name, now);
        }
        self.reconcile_all_mappings(now);
        self.check_requests();
    }

    /// Passes the keys of all requested certificates to the writer, which checks them.
    pub(super) fn check_requests(&mut self) {
        if self.is_loading || !is_enabled(&self.cluster) {
            return;
        }
        let requests = &self.cluster.requests;
        let namespaces = requests.namespaces.keys();
        let of_namespaces =
            namespaces.filter_map(|it| namespace_certificate(&self.cluster, it)).map(|it| it.name);
        let names: BTreeSet<NamespacedName> =
            requests.certificates.keys().cloned().chain(of_namespaces).collect();
        let keys: Vec<_> = names.iter().flat_map(part_keys::request_keys).collect();
        self.effects.changed_keys.extend(keys);
    }
}

/// Logs that a requested certificate has become ready, or is not ready any more.
fn log_readiness(
    name: &NamespacedName,
    previous: Option<&RequestedCertificate>,
    next: Option<&RequestedCertificate>,
) {
    let is_ready = |it: Option<&RequestedCertificate>| {
        it.is_some_and(|it| it.readiness.status == ReadyStatus::True)
    };
    let (before, after) = (is_ready(previous), is_ready(next));
    if before != after {
        let reason = next.map(|it| &*it.readiness.reason).unwrap_or_default();
        info!(certificate = %name, ready = after, reason, "requested certificate changed");
    }
}
