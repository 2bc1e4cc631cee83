//! Pure: fingerprints of sent subjects; the messages themselves are planned again when a stream needs them.
//!
//! A stored message of each subject would be the third and largest copy of what the cluster state holds.

use std::{
    collections::{HashMap, HashSet},
    hash::{DefaultHasher, Hasher as _},
};

use common::{
    outbox::{OutboxBatch, OutboxCursor},
    wire::{NamespacedName, RouteChange, RouteItem, RouteKey, raw},
};
use prost::Message as _;

use super::ControllerStateMachine;
use crate::decide::plan;

/// Fingerprint of the last message sent about a subject. Two different messages have the same fingerprint with
/// probability 2^-64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteFingerprint(u64);

impl RouteFingerprint {
    /// Returns the fingerprint of the encoded message.
    pub fn of_change(change: &RouteChange) -> Self {
        let item = raw::RouteItem::from(RouteItem { version: 0, change: change.clone() });
        let mut hash = DefaultHasher::new();
        hash.write(&item.encode_to_vec());
        Self(hash.finish())
    }
}

/// Next batch of the RouteTable for one stream.
pub type RouteMessageBatch = OutboxBatch<RouteKey, RouteChange>;

impl ControllerStateMachine {
    /// Returns the messages for the subjects of `batch`, and of all that `cursor` has beyond it.
    ///
    /// The messages show the present state. So a change that came together with them must not be left for the next
    /// batch.
    pub fn route_messages(
        &self,
        batch: OutboxBatch<RouteKey, RouteFingerprint>,
        cursor: &mut OutboxCursor<RouteKey, RouteFingerprint>,
    ) -> RouteMessageBatch {
        let OutboxBatch { mut version, mut changes } = batch;
        if let Some(more) = cursor.try_next() {
            let newer: HashSet<&RouteKey> = more.changes.iter().map(|(key, _)| key).collect();
            // The subjects of the later batch are in it with the same message.
            changes.retain(|(key, _)| !newer.contains(key));
            version = more.version;
            changes.extend(more.changes);
        }
        let (mut last, mut out) = (None, Vec::with_capacity(changes.len()));
        for (key, fingerprint) in changes {
            let message = fingerprint.and_then(|_| self.cached_route_message(&key, &mut last));
            out.push((key, message));
        }
        OutboxBatch { version, changes: out }
    }

    /// Returns the message of one subject as it is now.
    pub fn route_message(&self, key: &RouteKey) -> Option<RouteChange> {
        self.cached_route_message(key, &mut None)
    }

    /// Returns the message of one subject. `last` caches the subjects of the app of the last call, since the subjects
    /// of one app follow each other.
    fn cached_route_message(
        &self,
        key: &RouteKey,
        last: &mut Option<(NamespacedName, HashMap<RouteKey, RouteChange>)>,
    ) -> Option<RouteChange> {
        let app = match key {
            RouteKey::Service(name) => self.cluster.app_of_service(name)?,
            RouteKey::Revision(name) => self.cluster.app_of_revision(name)?,
            RouteKey::Pod(uid) => self.pod_index.apps.get(uid)?.clone(),
            RouteKey::Replicas(component) => {
                return self.cluster.replicas.get(component).cloned().map(RouteChange::Replicas);
            }
            RouteKey::Node(name) => return self.node_entry(name).map(RouteChange::Node),
            RouteKey::Certificate(name) => {
                if let Some((service, _port)) = name.split_port() {
                    let state = self.cluster.local_certificates.get(&service)?;
                    let entry = plan::local_tls::certificate_entry(&service, state);
                    return Some(RouteChange::Certificate(entry));
                }
                let state = self.cluster.certificates.by_secret.get(name)?;
                return Some(RouteChange::Certificate(plan::certificates::certificate_entry(
                    name, state,
                )));
            }
            RouteKey::ClientCa(name) => {
                let state = self.cluster.client_cas.by_secret.get(name)?;
                return Some(RouteChange::ClientCa(plan::client_cas::client_ca_entry(name, state)));
            }
            RouteKey::GatewayHost(key) => {
                return plan::gateway_api::host_entry(&self.cluster, key)
                    .map(RouteChange::GatewayHost);
            }
            RouteKey::ReservedHost(host) => {
                let is_reserved = self.cluster.domains.is_reserved_host(host);
                return is_reserved.then(|| RouteChange::ReservedHost(host.clone()));
            }
            RouteKey::Settings => {
                return self.cluster.settings.route_settings().map(RouteChange::Settings);
            }
            RouteKey::Activator(name) => {
                let mut fixed = self.cluster.settings.fixed_activators.iter();
                let observed =
                    self.cluster.activators.pods.get(name).map(|(activator, _)| activator);
                let activator = fixed.find(|it| it.name == *name).or(observed);
                return activator.cloned().map(RouteChange::Activator);
            }
        };
        // All subjects of an app are made together, which costs as much as one of them.
        if last.as_ref().is_none_or(|(name, _)| *name != app) {
            let subjects = plan::route_subjects(&self.cluster, &app);
            let named = subjects.into_iter().filter_map(|it| Some((it.key()?, it)));
            *last = Some((app, named.collect()));
        }
        let (_, subjects) = last.as_ref()?;
        subjects.get(key).cloned()
    }
}
