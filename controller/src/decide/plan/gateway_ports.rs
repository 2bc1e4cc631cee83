//! Pure: gateway ports of Routes: the port that a Route asks for, and the reason if it does not get it.
//!
//! The first Route keeps a port, and another one gets it when the first no longer asks for it. A ConfigMap of the system
//! namespace records the owners, so that an older Route that asks for a port later does not take it. A Route has its port
//! from the moment at which the record is observed, and so all replicas agree on the owner.

use std::{collections::BTreeMap, num::NonZeroU16};

use common::{decimal::parse_port, wire::NamespacedName};

use super::routes::{route_host, serves_tcp};
use crate::model::{
    cluster_state::{
        AppState, ClusterState, ConditionReason, ConditionStatus, ConditionType, Uid, UnixMillis,
        name_registry::NameClaimant,
    },
    config_maps::port_ranges::is_reserved_gateway_port,
    knative::key,
};

/// Returns the gateway port that a Route may claim, or the reason why it may claim none. `None`: it asks for none.
///
/// It depends on settings and on the Route's own metadata only, so that a claim does not come and go with Revisions.
pub(crate) fn claimable_port(
    app: &AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
) -> Option<Result<NonZeroU16, ConditionReason>> {
    // The Route's annotation alone: one of a Revision would move the port with each rollout.
    let text = app.route_annotation(key::GATEWAY_PORT)?;
    let refused =
        |reason: &'static str, message: String| Some(Err(ConditionReason::new(reason, message)));
    let Some(port) = parse_port(text) else {
        let message = format!("{} is {text:?}: use a port, 1 to 65535", key::GATEWAY_PORT);
        return refused("InvalidGatewayPort", message);
    };
    // Before the setting: permission cannot make a port usable on which the activators listen themselves.
    if is_reserved_gateway_port(port, cluster.settings.activator_port_range) {
        let message = format!("Port {port} is one of the activators' own ports");
        return refused("GatewayPortReserved", message);
    }
    // The message names the place where the operator can permit the port, which differs between installations.
    if !is_permitted(port, cluster) {
        let setting = match cluster.settings.opened_gateway_ports {
            Some(_) => "--gateway-ports of rouse up",
            None => "rouse.dev.gateway-ports in config-network",
        };
        let message = format!("Port {port} is not permitted: it is not in {setting}");
        return refused("GatewayPortNotPermitted", message);
    }
    // A private service has no name outside, and a port would be a way around that.
    if route_host(app, name, None, cluster).is_some_and(|it| it.is_private) {
        let message = "A service that is cluster-local has no port outside".to_owned();
        return refused("ClusterLocal", message);
    }
    Some(Ok(port))
}

fn is_permitted(port: NonZeroU16, cluster: &ClusterState) -> bool {
    let configured = &cluster.settings.config_maps.network.gateway_ports;
    cluster.settings.opened_gateway_ports.as_ref().unwrap_or(configured).contains(port)
}

/// Returns the gateway port that a Route owns. It keeps the port while none of its Revisions speaks raw TCP.
pub(crate) fn owned_port(
    app: &AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
) -> Option<NonZeroU16> {
    let port = claimable_port(app, name, cluster)?.ok()?;
    let owner = cluster.names.port_owner(port, cluster.settings.platform)?;
    (owner.claimant == NameClaimant::Route(name.clone())).then_some(port)
}

/// Returns the gateway port that the record should have as a Route's.
pub(crate) fn port_to_record(
    app: &AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
) -> Option<NonZeroU16> {
    let port = claimable_port(app, name, cluster)?.ok()?;
    let claim = cluster.names.port_claim_to_record(port)?;
    (claim.claimant == NameClaimant::Route(name.clone())).then_some(port)
}

/// Returns the Route that each gateway port is to be recorded for, with its UID. Ports of Routes that do not exist yet are
/// left out.
pub(crate) fn ports_to_record(
    cluster: &ClusterState,
) -> BTreeMap<NonZeroU16, (&NamespacedName, Uid)> {
    let all = cluster.apps.iter().filter_map(|(name, app)| {
        let port = port_to_record(app, name, cluster)?;
        // A Route that is not made yet has no UID.
        let route = app.route.as_ref().filter(|it| it.meta.exists())?;
        Some((port, (name, route.meta.uid)))
    });
    all.collect()
}

/// Sets the Route's condition about its gateway port. It is absent while the Route has never asked for one.
pub(super) fn update_condition(
    app: &mut AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
    now: UnixMillis,
) {
    let status = match claimable_port(app, name, cluster) {
        // A condition that was set once must not go on with an old state.
        None if !app.conditions.is_set(ConditionType::RouteGatewayPort) => return,
        None => {
            let reason =
                ConditionReason::new("NotRequested", "The Route asks for no gateway port.");
            ConditionStatus::True(Some(reason))
        }
        Some(Err(reason)) => ConditionStatus::False(reason),
        Some(Ok(port)) => port_status(port, app, name, cluster),
    };
    app.conditions.set(ConditionType::RouteGatewayPort, status, now);
}

/// Returns the status of a Route's wish for a gateway port.
fn port_status(
    port: NonZeroU16,
    app: &AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
) -> ConditionStatus {
    let Some(owner) = cluster.names.port_owner(port, cluster.settings.platform) else {
        // No claim is recorded yet.
        return ConditionStatus::Unknown(None);
    };
    if owner.claimant != NameClaimant::Route(name.clone()) {
        let message = format!("Port {port} is already in use by {}", owner.claimant);
        return ConditionStatus::False(ConditionReason::new("GatewayPortTaken", message));
    }
    if serves_tcp(app, name, None, cluster) {
        return ConditionStatus::True(None);
    }
    // The protocol is not known before there is a Revision.
    if app.traffic().is_empty() {
        return ConditionStatus::Unknown(None);
    }
    let message =
        format!("Only raw TCP has a port outside: set {}: tcp on the template", key::PROTOCOL);
    ConditionStatus::False(ConditionReason::new("NotRawTcp", message))
}
