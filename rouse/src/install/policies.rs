//! Pure: network policies: the packets that may reach the components.
//!
//! Agents use the nodes' own networks, which no policy can name. So the three ports they report to accept connections
//! from anywhere, and mutual TLS decides. All ports that are not named are closed.

use serde_json::{Value, json};

use super::{
    objects::{merge_fields, namespaced_object},
    settings::InstallSettings,
    workloads::{
        CONTROLLER_PORT, GATEWAY_PORT, GATEWAY_TLS_PORT, INTERNAL_PORT, PEER_PORT, USAGE_PORT,
        WEBHOOK_PORT, admin_port,
    },
};

/// Label of namespaces whose pods may read metrics.
pub(crate) const MONITORING_LABEL: &str = "rouse.dev/monitoring";

/// One policy for each component that runs in the pod network.
pub(crate) fn all(settings: &InstallSettings) -> Vec<Value> {
    let tcp_port = |port: u16| json!({"port": port, "protocol": "TCP"});
    // Each service has a port of its own at the activators, from this range.
    let services = json!({"port": 20000, "endPort": 29999, "protocol": "TCP"});
    let mut activator_ports = vec![
        tcp_port(GATEWAY_PORT),
        tcp_port(GATEWAY_TLS_PORT),
        tcp_port(INTERNAL_PORT),
        services,
        tcp_port(PEER_PORT),
    ];
    activator_ports.extend(settings.gateway_ports.iter().map(|it| tcp_port(it.get())));
    vec![
        component_policy(
            "controller",
            json!([tcp_port(CONTROLLER_PORT), tcp_port(WEBHOOK_PORT)]),
            settings,
        ),
        component_policy("autoscaler", json!([tcp_port(USAGE_PORT)]), settings),
        component_policy("activator", activator_ports.into(), settings),
    ]
}

/// Policy of one component: its public ports, and its metrics.
fn component_policy(app: &str, public_ports: Value, settings: &InstallSettings) -> Value {
    let monitoring = json!({"namespaceSelector": {"matchLabels": {MONITORING_LABEL: "true"}}});
    let metrics =
        json!({"from": [monitoring], "ports": [{"port": admin_port(app), "protocol": "TCP"}]});
    let public = json!({"ports": public_ports});
    let spec = json!({
        "podSelector": {"matchLabels": {"app": app}},
        "policyTypes": ["Ingress"],
        "ingress": [public, metrics],
    });
    merge_fields(
        namespaced_object("networking.k8s.io/v1", "NetworkPolicy", app, app, settings),
        json!({"spec": spec}),
    )
}
