//! Pure: statuses of GatewayClasses, Gateways and routes.

use serde_json::{Value, json};

use crate::{
    decide::plan::gateway_api::{attached_routes, plan_class, plan_gateway},
    model::{
        cluster_state::{
            ClusterState, GATEWAY_CONTROLLER, GATEWAY_GROUP, GatewayRouteId, GatewayRouteKind,
            GatewayRouteState, GatewayServiceAddress, GatewayState, PlannedCondition, UnixMillis,
            WrittenCondition,
        },
        object::{DesiredState, ObjectPart, ObjectPartKey, ResourceKind},
    },
};

mod features;

use features::SUPPORTED_FEATURES;

/// Field of a GatewayClass's status with the features that Rouse has. GatewayClasses of earlier releases of the Gateway API
/// have none, or one of another type.
pub const SUPPORTED_FEATURES_FIELD: &str = "supportedFeatures";

/// Facts about an object on which each of its conditions depends.
#[derive(Clone, Copy)]
struct ConditionContext<'a> {
    generation: u32,
    written: &'a [WrittenCondition],
    since: UnixMillis,
}

/// Returns the status of an object of the Gateway API; the object itself belongs to its user.
pub(super) fn gateway_status(cluster: &ClusterState, key: &ObjectPartKey) -> DesiredState {
    if key.part != ObjectPart::Status {
        return DesiredState::Unmanaged;
    }
    let gateway_api = &cluster.gateway_api;
    let status = match key.resource {
        ResourceKind::GatewayClass => class_status(cluster, key),
        ResourceKind::Gateway => {
            let gateway = gateway_api.gateways.get(&key.name).filter(|it| gateway_api.is_own(it));
            gateway.map(|it| render_gateway(cluster, key, it))
        }
        other => GatewayRouteKind::of_resource(other).and_then(|kind| {
            let id = GatewayRouteId { kind, name: key.name.clone() };
            gateway_api.routes.get(&id).and_then(render_route)
        }),
    };
    status.map_or(DesiredState::Unmanaged, DesiredState::Body)
}

fn class_status(cluster: &ClusterState, key: &ObjectPartKey) -> Option<Value> {
    let class = cluster.gateway_api.classes.get(&key.name.name)?;
    let context = ConditionContext {
        generation: class.meta.generation,
        written: &class.written,
        since: class.planned_since,
    };
    let features = SUPPORTED_FEATURES.map(|name| json!({"name": name}));
    Some(json!({
        "conditions": context.render("", &[plan_class(class)]),
        SUPPORTED_FEATURES_FIELD: features,
    }))
}

/// Renders the status of a Gateway: its addresses, its conditions, and its listeners.
fn render_gateway(cluster: &ClusterState, key: &ObjectPartKey, gateway: &GatewayState) -> Value {
    let plan = plan_gateway(cluster, &key.name, gateway);
    let context = ConditionContext {
        generation: gateway.meta.generation,
        written: &gateway.written,
        since: gateway.planned_since,
    };
    let listeners = gateway.listeners.iter().zip(&plan.listeners).map(|(listener, plan)| {
        let kinds = plan.kinds.iter().map(|it| json!({"group": GATEWAY_GROUP, "kind": it.name()}));
        json!({
            "name": listener.name,
            "supportedKinds": kinds.collect::<Vec<Value>>(),
            "attachedRoutes": attached_routes(cluster, &key.name, &listener.name),
            "conditions": context.render(&listener.name, &plan.conditions),
        })
    });
    let [accepted, _] = &plan.conditions;
    // A Gateway that is not accepted must not attract clients.
    let addresses = cluster.gateway_api.addresses.iter().filter(|_| accepted.is_true);
    json!({
        "addresses": addresses.map(render_address).collect::<Vec<Value>>(),
        "conditions": context.render("", &plan.conditions),
        "listeners": listeners.collect::<Vec<Value>>(),
    })
}

fn render_address(address: &GatewayServiceAddress) -> Value {
    let kind = if address.is_hostname { "Hostname" } else { "IPAddress" };
    json!({"type": kind, "value": address.value})
}

/// Returns the status of a route with the entries of other controllers; `None`: it has none of Rouse and gets none.
fn render_route(route: &GatewayRouteState) -> Option<Value> {
    if route.plan.parents.is_empty() && !route.has_own_parents {
        return None;
    }
    let context = ConditionContext {
        generation: route.meta.generation,
        written: &route.written,
        since: route.plan.since,
    };
    let own = route.plan.parents.iter().map(|parent| {
        json!({
            "parentRef": parent.reference,
            "controllerName": GATEWAY_CONTROLLER,
            "conditions": context.render(&parent.reference.to_string(), &parent.conditions),
        })
    });
    // The list is one value for the API server: what is left out is removed.
    let all: Vec<Value> = route.foreign_parents.iter().cloned().chain(own).collect();
    Some(json!({"parents": all}))
}

impl ConditionContext<'_> {
    /// Renders the conditions of a part of the object. One that has not changed keeps its time.
    fn render(self, part: &str, conditions: &[PlannedCondition]) -> Vec<Value> {
        let condition = |it: &PlannedCondition| {
            let mut written = self.written.iter().filter(|written| written.part == part);
            let same =
                written.find(|written| *written.kind == *it.kind && written.is_true == it.is_true);
            let since = same.map(|it| it.since.to_string()).filter(|it| !it.is_empty());
            json!({
                "type": it.kind,
                "status": if it.is_true { "True" } else { "False" },
                "reason": it.reason,
                "message": it.message,
                "lastTransitionTime": since.unwrap_or_else(|| self.since.rfc3339()),
                "observedGeneration": self.generation,
            })
        };
        conditions.iter().map(condition).collect()
    }
}
