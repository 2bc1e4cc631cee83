//! Pure: the Kubernetes Services of an installation: discovery between components, the webhook and the gateway.

use serde_json::{Value, json};

use super::{
    objects::{merge_fields, namespaced_object},
    settings::{GatewayExposure, InstallSettings},
    workloads::{
        CONTROLLER_PORT, GATEWAY_PORT, GATEWAY_TLS_PORT, INTERNAL_PORT, USAGE_PORT, WEBHOOK_PORT,
        admin_port, gateway_port_name,
    },
};

/// All Kubernetes Services of an installation.
pub(crate) fn all(settings: &InstallSettings) -> Vec<Value> {
    vec![
        headless_service("rouse-controller", "controller", CONTROLLER_PORT, settings),
        headless_service("rouse-autoscaler", "autoscaler", USAGE_PORT, settings),
        webhook_service(settings),
        internal_service(settings),
        gateway_service(settings),
    ]
}

fn service_object(name: &str, app: &str, spec: Value, settings: &InstallSettings) -> Value {
    let service = namespaced_object("v1", "Service", name, app, settings);
    merge_fields(service, json!({"spec": merge_fields(json!({"selector": {"app": app}}), spec)}))
}

/// Headless Service that names each replica of a component. It includes replicas that are not ready, because no
/// component becomes ready before it has found the first controller.
fn headless_service(name: &str, app: &str, port: u16, settings: &InstallSettings) -> Value {
    let spec = json!({
        "clusterIP": "None",
        // One address per replica: two addresses would count as two replicas.
        "ipFamilyPolicy": "SingleStack",
        "publishNotReadyAddresses": true,
        "ports": [
            {"name": "grpc", "port": port, "protocol": "TCP", "targetPort": port},
            {"name": "metrics", "port": admin_port(app), "protocol": "TCP", "targetPort": "metrics"},
        ],
    });
    service_object(name, app, spec, settings)
}

fn webhook_service(settings: &InstallSettings) -> Value {
    let port = json!({"name": "https-webhook", "port": 443, "protocol": "TCP", "targetPort": WEBHOOK_PORT});
    service_object("webhook", "controller", json!({"type": "ClusterIP", "ports": [port]}), settings)
}

/// Service under Knative's name for the activators, for workloads that select a service by Host.
fn internal_service(settings: &InstallSettings) -> Value {
    let port = |name: &str, port: u16| json!({"name": name, "port": port, "protocol": "TCP", "targetPort": INTERNAL_PORT});
    let ports = [port("http", 80), port("http2", 81)];
    service_object(
        "activator-service",
        "activator",
        json!({"type": "ClusterIP", "ports": ports}),
        settings,
    )
}

fn gateway_service(settings: &InstallSettings) -> Value {
    let port = |name: &str, port: u16, target: u16| json!({"name": name, "port": port, "protocol": "TCP", "targetPort": target});
    // Port 443 is open without a certificate too: a client then gets an alert of TLS.
    let mut ports = vec![port("http", 80, GATEWAY_PORT), port("https", 443, GATEWAY_TLS_PORT)];
    let tcp_ports = settings.gateway_ports.iter().map(|it| it.get());
    ports.extend(tcp_ports.map(|number| port(&gateway_port_name(number), number, number)));
    let kind = match settings.gateway {
        GatewayExposure::Loadbalancer => "LoadBalancer",
        GatewayExposure::Nodeport => "NodePort",
        // The nodes' own ports 80 and 443 are the way from outside; the Service serves clients in the cluster.
        GatewayExposure::Hostport => "ClusterIP",
    };
    let spec = json!({"type": kind, "ipFamilyPolicy": "PreferDualStack", "ports": ports});
    service_object("rouse-gateway", "activator", spec, settings)
}
