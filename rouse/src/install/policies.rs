//! Pure: which packets may reach the parts.
//!
//! Agents are on the nodes' own networks, which no policy can name; so the two ports they report to take connections from
//! anywhere, and mutual TLS decides. Everything that is not named is closed.

use serde_json::{Value, json};

use super::{
    objects::{object, with},
    settings::Settings,
    workloads::{GATEWAY, INSIDE, PEERS, STREAMS, USAGE, WEBHOOK, admin},
};

/// Namespaces with this label may read metrics.
pub(crate) const MONITORING: &str = "rouse.dev/monitoring";

/// One policy a part.
pub(crate) fn all(settings: &Settings) -> Vec<Value> {
    let open = |port: u16| json!({"port": port, "protocol": "TCP"});
    // Each service has a port of its own at the activators.
    let services = json!({"port": 20000, "endPort": 29999, "protocol": "TCP"});
    let mut all = vec![
        policy("controller", json!([open(STREAMS), open(WEBHOOK)]), settings),
        policy("autoscaler", json!([open(USAGE)]), settings),
        policy("activator", json!([open(GATEWAY), open(INSIDE), services]), settings),
    ];
    // Activators are pods: of them alone a policy can say that they may meet.
    let peers = json!([{"podSelector": {"matchLabels": {"app": "activator"}}}]);
    if let Some(Value::Array(ingress)) = all[2].pointer_mut("/spec/ingress") {
        ingress.push(json!({"from": peers, "ports": [open(PEERS)]}));
    }
    all
}

fn policy(app: &str, open: Value, settings: &Settings) -> Value {
    let monitoring = json!({"namespaceSelector": {"matchLabels": {MONITORING: "true"}}});
    let metrics = json!({"from": [monitoring], "ports": [{"port": admin(app), "protocol": "TCP"}]});
    let spec = json!({
        "podSelector": {"matchLabels": {"app": app}},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": open}, metrics],
    });
    with(object("networking.k8s.io/v1", "NetworkPolicy", app, app, settings), json!({"spec": spec}))
}
