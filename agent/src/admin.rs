//! Shell: health and metrics pages of the agent.

use common::admin::AdminState;
use prometheus_client::registry::Registry;

use crate::{
    metrics::{AgentMetrics, NotReadyReasons},
    usage::{
        revision_metrics::RevisionTotalsCollector, revision_totals_store::SharedRevisionTotals,
    },
};

/// Makes the agent's metrics, and the registry that exports them and the totals of Revisions.
pub(crate) fn metrics_registry(revisions: SharedRevisionTotals) -> (AgentMetrics, Registry) {
    let (metrics, mut registry) = AgentMetrics::new();
    registry.register_collector(Box::new(RevisionTotalsCollector(revisions)));
    (metrics, registry)
}

/// Returns the content of the admin pages.
pub(crate) fn pages(registry: Registry, not_ready: NotReadyReasons) -> AdminState {
    AdminState { registry, not_ready_reasons: Box::new(move || not_ready.lines()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_not_ready_reason_shows_until_it_is_removed() {
        let not_ready = NotReadyReasons::default();
        let admin = pages(Registry::default(), not_ready.clone());
        not_ready.set("kernel", Some("connect was not redirected".into()));
        assert_eq!((admin.not_ready_reasons)(), ["kernel: connect was not redirected"]);
        not_ready.set("kernel", None);
        assert!((admin.not_ready_reasons)().is_empty());
    }
}
