//! Shell: what is said of proxies before the gateway and of protocols to switch to, as it is now.

use std::sync::{Arc, PoisonError, RwLock};

use common::{
    link::RouteBatch,
    wire::{Edge, RouteChange, RouteKey},
};
use tracing::info;

/// What operators say at a node's start and in the table, together.
#[derive(Debug)]
pub struct Edges {
    own: Edge,
    now: RwLock<Arc<Edge>>,
}

impl Edges {
    /// What was said at the start.
    pub fn new(own: Edge) -> Self {
        Self { now: RwLock::new(Arc::new(own.clone())), own }
    }

    /// What holds for a request that comes now.
    pub fn now(&self) -> Arc<Edge> {
        Arc::clone(&self.now.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Takes over what a change of the table says.
    pub fn follow(&self, batch: &RouteBatch) {
        let told = match batch.changes.get(&RouteKey::Settings) {
            Some(RouteChange::Settings(it)) => it.edge.clone(),
            None if !batch.is_whole => return,
            Some(_) | None => Edge::default(),
        };
        let next = Edge {
            trusted_proxies: [&*self.own.trusted_proxies, &told.trusted_proxies].concat(),
            proxy_protocol: self.own.proxy_protocol || told.proxy_protocol,
            upgrades: [&*self.own.upgrades, &told.upgrades].concat(),
            underscores: self.own.underscores || told.underscores,
        };
        let mut now = self.now.write().unwrap_or_else(PoisonError::into_inner);
        if **now != next {
            let Edge { trusted_proxies, proxy_protocol, upgrades, underscores } = &next;
            info!(?trusted_proxies, proxy_protocol, ?upgrades, underscores, "edge set");
            *now = Arc::new(next);
        }
    }
}
