//! Shell: policy for proxies before the gateway and for protocols to switch to, as it is now.

use std::sync::{Arc, PoisonError, RwLock};

use common::{
    link::RouteBatch,
    wire::{EdgeSettings, RouteChange, RouteKey},
};
use tracing::info;

/// Policy of operators for requests from outside: the settings at the start and those of the RouteTable, combined.
#[derive(Debug)]
pub struct EdgePolicy {
    /// Settings of the command line.
    own: EdgeSettings,
    /// Settings in force: those of the command line and of the RouteTable.
    now: RwLock<Arc<EdgeSettings>>,
}

impl EdgePolicy {
    /// Creates the policy from the settings of the command line.
    pub fn new(own: EdgeSettings) -> Self {
        Self { now: RwLock::new(Arc::new(own.clone())), own }
    }

    /// Policy for a request that arrives now.
    pub fn now(&self) -> Arc<EdgeSettings> {
        Arc::clone(&self.now.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Applies the settings of a batch of the RouteTable.
    pub fn follow(&self, batch: &RouteBatch) {
        // A snapshot without settings, or their removal, resets them; any other batch without them leaves them
        // unchanged.
        let told = match batch.changes.get(&RouteKey::Settings) {
            Some(RouteChange::Settings(it)) => it.edge.clone(),
            None if !batch.is_whole => return,
            Some(_) | None => EdgeSettings::default(),
        };
        let next = EdgeSettings {
            trusted_proxies: [&*self.own.trusted_proxies, &told.trusted_proxies].concat(),
            proxy_protocol: self.own.proxy_protocol || told.proxy_protocol,
            upgrades: [&*self.own.upgrades, &told.upgrades].concat(),
            underscores: self.own.underscores || told.underscores,
        };
        let mut now = self.now.write().unwrap_or_else(PoisonError::into_inner);
        if **now != next {
            let EdgeSettings { trusted_proxies, proxy_protocol, upgrades, underscores } = &next;
            info!(?trusted_proxies, proxy_protocol, ?upgrades, underscores, "edge set");
            *now = Arc::new(next);
        }
    }
}
