//! Pure: the Kubernetes Services of an installation: discovery between components, the webhook and the gateway.

use serde_json::{Value, json};

use super::{
    objects::{object, with},
    settings::{GatewayExposure, InstallSettings},
    workloads::{GATEWAY, INSIDE, STREAMS, USAGE, WEBHOOK, admin},
};

/// All Kubernetes Services of an installation.
pub(crate) fn all(settings: &InstallSettings) -> Vec<Value> {
    vec![
        headless("rouse-controller", "controller", STREAMS, settings),
        headless("rouse-autoscaler", "autoscaler", USAGE, settings),
        webhook(settings),
        inside(settings),
        gateway(settings),
    ]
}

fn service(name: &str, app: &str, spec: Value, settings: &InstallSettings) -> Value {
    let service = object("v1", "Service", name, app, settings);
    with(service, json!({"spec": with(json!({"selector": {"app": app}}), spec)}))
}

/// Headless Service that names each replica of a component. It includes replicas that are not ready, because no
/// component becomes ready before it has found the first controller.
fn headless(name: &str, app: &str, port: u16, settings: &InstallSettings) -> Value {
    let spec = json!({
        "clusterIP": "None",
        // One address per replica: two addresses would count as two replicas.
        "ipFamilyPolicy": "SingleStack",
        "publishNotReadyAddresses": true,
        "ports": [
            {"name": "grpc", "port": port, "protocol": "TCP", "targetPort": port},
            {"name": "metrics", "port": admin(app), "protocol": "TCP", "targetPort": "metrics"},
        ],
    });
    service(name, app, spec, settings)
}

fn webhook(settings: &InstallSettings) -> Value {
    let port =
        json!({"name": "https-webhook", "port": 443, "protocol": "TCP", "targetPort": WEBHOOK});
    service("webhook", "controller", json!({"type": "ClusterIP", "ports": [port]}), settings)
}

/// Service under Knative's name for the activators, for workloads that select a service by Host.
fn inside(settings: &InstallSettings) -> Value {
    let port = |name: &str, port: u16| json!({"name": name, "port": port, "protocol": "TCP", "targetPort": INSIDE});
    let ports = [port("http", 80), port("http2", 81)];
    service(
        "activator-service",
        "activator",
        json!({"type": "ClusterIP", "ports": ports}),
        settings,
    )
}

fn gateway(settings: &InstallSettings) -> Value {
    let port = json!({"name": "http", "port": 80, "protocol": "TCP", "targetPort": GATEWAY});
    let kind = match settings.gateway {
        GatewayExposure::Loadbalancer => "LoadBalancer",
        GatewayExposure::Nodeport => "NodePort",
        // The nodes' own port 80 is the way from outside; the Service serves clients in the cluster.
        GatewayExposure::Hostport => "ClusterIP",
    };
    let spec = json!({"type": kind, "ipFamilyPolicy": "PreferDualStack", "ports": [port]});
    service("rouse-gateway", "activator", spec, settings)
}
