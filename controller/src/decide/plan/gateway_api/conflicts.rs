//! Pure: HTTPRoutes and GRPCRoutes with hosts in common at one listener, of which the older one is accepted.

use std::collections::BTreeMap;

use common::wire::GatewayHostKey;

use crate::model::cluster_state::{
    GatewayRouteId, GatewayRouteKind, ObservedGatewayApi, UnixMillis,
};

/// Listeners at which a route is rejected, each with the older route that has one of its hosts.
pub(super) type RouteRejections = BTreeMap<GatewayHostKey, GatewayRouteId>;

/// Returns the listeners at which each of these routes is rejected; a route without any is left out. The routes must be
/// all that [`HostClaims::update`](crate::model::cluster_state::HostClaims::update) has returned for a change.
pub(super) fn reject_routes<'a>(
    gateway_api: &ObservedGatewayApi,
    ids: impl Iterator<Item = &'a GatewayRouteId>,
) -> BTreeMap<GatewayRouteId, RouteRejections> {
    let mut order: Vec<&GatewayRouteId> = ids.collect();
    order.sort_by_cached_key(|id| seniority(gateway_api, id));
    let mut all: BTreeMap<GatewayRouteId, RouteRejections> = BTreeMap::new();
    // A route that is rejected itself keeps no other one from its hosts.
    for id in order {
        let own_seniority = seniority(gateway_api, id);
        let is_rejected = |rival: &GatewayRouteId, listener: &GatewayHostKey| {
            all.get(rival).is_some_and(|it| it.contains_key(listener))
        };
        let at_listeners = gateway_api.claims.of_route(id).filter_map(|(listener, hosts)| {
            let rivals = gateway_api.claims.rivals_at(id.kind, listener, hosts);
            let accepted = rivals.into_iter().filter(|it| !is_rejected(it, listener));
            let older = accepted.filter(|it| seniority(gateway_api, it) < own_seniority);
            let oldest = older.min_by_key(|it| seniority(gateway_api, it))?;
            Some((listener.clone(), oldest.clone()))
        });
        let rejections: RouteRejections = at_listeners.collect();
        if !rejections.is_empty() {
            all.insert(id.clone(), rejections);
        }
    }
    all
}

/// Returns the place of a route by its age, the oldest first: by its creation, else by `namespace/name`, else an HTTPRoute
/// first.
fn seniority(
    gateway_api: &ObservedGatewayApi,
    id: &GatewayRouteId,
) -> (Option<UnixMillis>, String, GatewayRouteKind) {
    let created = gateway_api.routes.get(id).map(|it| it.meta.created);
    (created, id.name.to_string(), id.kind)
}
