//! Pure: the Services of an installation: how parts find each other, how the API server finds the webhook, how requests
//! come in.

use serde_json::{Value, json};

use super::{
    objects::{object, with},
    settings::{Gateway, Settings},
    workloads::{GATEWAY, INSIDE, STREAMS, USAGE, WEBHOOK, admin},
};

/// All of them.
pub(crate) fn all(settings: &Settings) -> Vec<Value> {
    vec![
        headless("rouse-controller", "controller", STREAMS, settings),
        headless("rouse-autoscaler", "autoscaler", USAGE, settings),
        webhook(settings),
        inside(settings),
        gateway(settings),
    ]
}

fn service(name: &str, app: &str, spec: Value, settings: &Settings) -> Value {
    let service = object("v1", "Service", name, app, settings);
    with(service, json!({"spec": with(json!({"selector": {"app": app}}), spec)}))
}

/// Names the replicas of a part one by one. Those that are not ready too: the first must be found before anybody is.
fn headless(name: &str, app: &str, port: u16, settings: &Settings) -> Value {
    let spec = json!({
        "clusterIP": "None",
        // One address a replica: by two it would be taken for two.
        "ipFamilyPolicy": "SingleStack",
        "publishNotReadyAddresses": true,
        "ports": [
            {"name": "grpc", "port": port, "protocol": "TCP", "targetPort": port},
            {"name": "metrics", "port": admin(app), "protocol": "TCP", "targetPort": "metrics"},
        ],
    });
    service(name, app, spec, settings)
}

fn webhook(settings: &Settings) -> Value {
    let port =
        json!({"name": "https-webhook", "port": 443, "protocol": "TCP", "targetPort": WEBHOOK});
    service("webhook", "controller", json!({"type": "ClusterIP", "ports": [port]}), settings)
}

/// What Knative calls the activators, for workloads that name a service by Host.
fn inside(settings: &Settings) -> Value {
    let port = |name: &str, port: u16| json!({"name": name, "port": port, "protocol": "TCP", "targetPort": INSIDE});
    let ports = [port("http", 80), port("http2", 81)];
    service(
        "activator-service",
        "activator",
        json!({"type": "ClusterIP", "ports": ports}),
        settings,
    )
}

fn gateway(settings: &Settings) -> Value {
    let port = json!({"name": "http", "port": 80, "protocol": "TCP", "targetPort": GATEWAY});
    let kind = match settings.gateway {
        Gateway::Loadbalancer => "LoadBalancer",
        Gateway::Nodeport => "NodePort",
        // Nodes' own ports lead in; the Service is for inside.
        Gateway::Hostport => "ClusterIP",
    };
    let spec = json!({"type": kind, "ipFamilyPolicy": "PreferDualStack", "ports": [port]});
    service("rouse-gateway", "activator", spec, settings)
}
