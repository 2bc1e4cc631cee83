//! Pure: the RouteTable for activators of an earlier release. They read no items of reserved hosts, but lists: in the
//! services with wildcards, and in the hosts of Gateways.
//!
//! Such activators run beside newer controllers during an upgrade, and announce nothing. Without the lists, a wildcard or
//! a listener of another namespace would get the requests of a host whose DomainMapping is not in force. As in the earlier
//! release, one reserved host that changes sends whole lists again, but to these activators only.

use std::collections::BTreeSet;

use common::wire::{GatewayHostKey, RouteChange, RouteKey};

use super::{ControllerStateMachine, RouteMessageBatch};
use crate::decide::plan;

impl ControllerStateMachine {
    /// Returns a batch with lists of reserved hosts in place of their items. It also has the services and hosts of
    /// Gateways whose lists these items change.
    ///
    /// The lists show the present state, which may be newer than the batch. Then a later batch has the same lists.
    pub fn with_listed_hosts(&self, batch: &RouteMessageBatch) -> RouteMessageBatch {
        let (mut changes, mut listing, mut present) =
            (Vec::new(), BTreeSet::new(), BTreeSet::new());
        for (key, change) in &batch.changes {
            if let RouteKey::ReservedHost(host) = key {
                listing.extend(self.listing_subjects(host));
                continue;
            }
            present.insert(key);
            changes.push((key.clone(), change.clone()));
        }
        listing.retain(|key| !present.contains(key));
        // A subject that does not exist needs no removal: the batch that removes it has that.
        let again = listing.into_iter().filter_map(|key| {
            let message = self.route_message(&key)?;
            Some((key, Some(message)))
        });
        changes.extend(again);
        changes.iter_mut().filter_map(|(_, it)| it.as_mut()).for_each(|it| self.list_hosts(it));
        RouteMessageBatch { version: batch.version, changes }
    }

    /// Returns the services and hosts of Gateways that list a host or wildcard while it is reserved.
    fn listing_subjects(&self, host: &str) -> BTreeSet<RouteKey> {
        let (domains, gateway_hosts) = (&self.cluster.domains, &self.cluster.gateway_api.hosts);
        let wildcard = host.find('.').map(|at| format!("*{}", &host[at..]));
        let covering = wildcard.and_then(|it| domains.mappings_by_host.get(it.as_str()));
        let covering = covering.into_iter().flatten().filter_map(|it| domains.mappings.get(it));
        let services = covering.map(|it| RouteKey::Service(it.target.clone()));
        let keys = |is_tls| GatewayHostKey::candidates(is_tls, host);
        let listeners = keys(false).chain(keys(true)).filter(|it| gateway_hosts.contains_key(it));
        services.chain(listeners.map(RouteKey::GatewayHost)).collect()
    }

    /// Sets the list of reserved hosts in a service or in a host of Gateways.
    fn list_hosts(&self, change: &mut RouteChange) {
        match change {
            RouteChange::Service(service) => {
                if let Some(rules) = &mut service.gateway_rules {
                    rules.reserved_hosts =
                        plan::domain_mappings::reserved_hosts(&self.cluster, &rules.mapped_domains);
                }
            }
            RouteChange::GatewayHost(entry) => {
                entry.reserved_hosts = plan::gateway_api::reserved_hosts(&self.cluster, &entry.key);
            }
            _ => {}
        }
    }
}
