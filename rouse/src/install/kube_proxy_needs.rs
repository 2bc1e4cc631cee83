//! Pure: Services and pods that need kube-proxy, because Rouse's agents do not serve them.

use std::{collections::BTreeMap, fmt, net::IpAddr};

use agent::routes::plan::served_protocol;
use common::service_routing::TransportProtocol;
use ipnet::IpNet;
use serde_json::Value;

use super::workloads::is_rouse_object;

/// Label by which a Service or namespace is served or not.
const CLUSTERIP_LABEL: &str = "rouse.dev/clusterip";
/// Label of the Services of Rouse's Routes, which the agents always serve.
const ROUTE_LABEL: &str = "serving.knative.dev/route";
/// Labels of Services that kube-proxy leaves alone.
const FOREIGN_PROXY_LABELS: [&str; 2] =
    ["service.kubernetes.io/service-proxy-name", "service.kubernetes.io/headless"];
/// Containers of a mesh's sidecar. Its proxy chooses route and identity by the ClusterIP.
const MESH_CONTAINERS: [&str; 2] = ["istio-proxy", "linkerd-proxy"];
/// Annotation that Istio's ambient mode puts on the pods whose connects it redirects.
const AMBIENT_ANNOTATION: &str = "ambient.istio.io/redirection";
/// Label of KubeVirt's pods.
const VIRTUAL_MACHINE_LABEL: &str = "kubevirt.io";
/// Parts of the handlers of sandboxed runtimes, whose sockets the node's kernel does not see.
const SANDBOX_HANDLERS: [&str; 4] = ["runsc", "gvisor", "kata", "firecracker"];
/// Number of objects that an error names.
const NAMED_MAX: usize = 30;

/// Objects of a cluster that decide whether it needs kube-proxy.
#[derive(Debug, Default)]
pub(crate) struct ClusterObjects {
    /// Services of all namespaces.
    pub(crate) services: Vec<Value>,
    /// Namespaces, for their labels.
    pub(crate) namespaces: Vec<Value>,
    /// Pods of all namespaces.
    pub(crate) pods: Vec<Value>,
    /// RuntimeClasses, for their handlers.
    pub(crate) runtime_classes: Vec<Value>,
}

/// An object that needs kube-proxy, and the reason with what to do.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct KubeProxyNeed {
    /// Kind, namespace and name.
    pub(crate) object: String,
    /// Reason, and what to do.
    pub(crate) reason: String,
}

impl fmt::Display for KubeProxyNeed {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}", self.object, self.reason)
    }
}

/// Error: the cluster needs kube-proxy.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "--without-kube-proxy is refused, and nothing is changed: without kube-proxy\n{}",
    format_needs(needs)
)]
pub(crate) struct KubeProxyNeededError {
    /// Objects that need it; never empty.
    pub(crate) needs: Vec<KubeProxyNeed>,
}

/// Formats the first of many needs, one in each line.
fn format_needs(needs: &[KubeProxyNeed]) -> String {
    let mut lines: Vec<String> =
        needs.iter().take(NAMED_MAX).map(|need| format!("  {need}")).collect();
    if needs.len() > NAMED_MAX {
        lines.push(format!("  and {} more", needs.len() - NAMED_MAX));
    }
    lines.join("\n")
}

/// Returns all objects that need kube-proxy. `installed` are the objects of the installation, whose Services replace
/// those of an earlier one. `ranges` are the ranges of ClusterIPs.
pub(crate) fn kube_proxy_needs(
    cluster: &ClusterObjects,
    installed: &[Value],
    ranges: &[IpNet],
) -> Vec<KubeProxyNeed> {
    let excluded = cluster.namespaces.iter().filter(|it| label(it, CLUSTERIP_LABEL) == "false");
    let excluded: Vec<&str> = excluded.map(|it| text(&it["metadata"]["name"])).collect();
    let others = cluster.services.iter().filter(|it| !is_rouse_object(it));
    // The Services to be installed count in place of those that are there, which they replace.
    let own = installed.iter().filter(|it| it["kind"] == "Service" && it["apiVersion"] == "v1");
    let services = others.chain(own).flat_map(|service| {
        let reasons = service_reasons(service, &excluded, ranges);
        reasons.into_iter().map(move |reason| need("Service", service, reason))
    });
    let handlers: BTreeMap<&str, &str> = cluster
        .runtime_classes
        .iter()
        .map(|class| (text(&class["metadata"]["name"]), text(&class["handler"])))
        .collect();
    let pods = cluster.pods.iter().filter_map(|pod| {
        let reason = pod_reason(pod, &handlers)?;
        Some(need("Pod", pod, reason))
    });
    let mut needs: Vec<KubeProxyNeed> = services.chain(pods).collect();
    needs.sort();
    needs
}

fn need(kind: &str, object: &Value, reason: String) -> KubeProxyNeed {
    let meta = &object["metadata"];
    let object = format!("{kind} {}/{}", text(&meta["namespace"]), text(&meta["name"]));
    KubeProxyNeed { object, reason }
}

/// Returns the reasons for which a Service needs kube-proxy, each with what to do.
fn service_reasons(service: &Value, excluded: &[&str], ranges: &[IpNet]) -> Vec<String> {
    let spec = &service["spec"];
    let labels = &service["metadata"]["labels"];
    let is_foreign = FOREIGN_PROXY_LABELS.iter().any(|key| !labels[*key].is_null());
    if is_foreign || text(&spec["type"]) == "ExternalName" {
        return Vec::new();
    }
    let mut reasons = Vec::new();
    let kind = text(&spec["type"]);
    if ["NodePort", "LoadBalancer"].contains(&kind) {
        reasons.push(format!("its type {kind} is not served: use type ClusterIP"));
    }
    if spec["externalIPs"].as_array().is_some_and(|it| !it.is_empty()) {
        reasons.push("its externalIPs are not served: remove them".to_owned());
    }
    // A headless Service has no ClusterIP, and its clients connect to endpoints.
    if text(&spec["clusterIP"]) == "None" {
        return reasons;
    }
    reasons.extend(protocol_reason(spec));
    let namespace = text(&service["metadata"]["namespace"]);
    let own_label = label(service, CLUSTERIP_LABEL);
    // The Service's own label counts more than its namespace's.
    let is_excluded =
        own_label == "false" || (own_label != "true" && excluded.contains(&namespace));
    if is_excluded && labels[ROUTE_LABEL].is_null() {
        let reason =
            format!("the label {CLUSTERIP_LABEL}: \"false\" leaves it to kube-proxy: remove it");
        reasons.push(reason);
    }
    let addresses = spec["clusterIPs"].as_array().into_iter().flatten();
    let mut addresses = addresses.filter_map(|it| text(it).parse::<IpAddr>().ok());
    let outside = addresses.find(|address| !ranges.iter().any(|range| range.contains(address)));
    reasons.extend(outside.map(|address| {
        format!("no range of ClusterIPs contains {address}: complete --service-cidr")
    }));
    reasons
}

/// Returns the reason if a port of a Service has a protocol that the agents do not serve.
fn protocol_reason(spec: &Value) -> Option<String> {
    let ports = spec["ports"].as_array()?;
    let protocols = ports.iter().map(|port| port["protocol"].as_str().unwrap_or("TCP"));
    let mut unserved: Vec<&str> = protocols.filter(|it| !is_served(it)).collect();
    unserved.sort_unstable();
    unserved.dedup();
    let protocols = Some(unserved.join(", ")).filter(|it| !it.is_empty())?;
    Some(format!("its {protocols} ports are not served: keep kube-proxy, or remove them"))
}

/// Returns true if the agents serve ports of this protocol.
fn is_served(protocol: &str) -> bool {
    let known = [
        ("TCP", TransportProtocol::Tcp),
        ("UDP", TransportProtocol::Udp),
        ("SCTP", TransportProtocol::Sctp),
    ];
    known.iter().any(|&(name, known)| name == protocol && served_protocol(known).is_some())
}

/// Returns the first reason for which a pod needs kube-proxy; `None`: it needs none.
fn pod_reason(pod: &Value, handlers: &BTreeMap<&str, &str>) -> Option<String> {
    // A pod that has ended makes no more connects.
    if ["Succeeded", "Failed"].contains(&text(&pod["status"]["phase"])) {
        return None;
    }
    let spec = &pod["spec"];
    if let Some(class) = spec["runtimeClassName"].as_str() {
        let handler = handlers.get(class).copied().unwrap_or(class);
        if SANDBOX_HANDLERS.iter().any(|part| handler.contains(part)) {
            return Some(format!(
                "the node's kernel does not see connects of its runtime class {class}: use another one"
            ));
        }
    }
    if label(pod, VIRTUAL_MACHINE_LABEL) == "virt-launcher" {
        return Some(
            "the node's kernel does not see connects of its virtual machine: remove it".to_owned(),
        );
    }
    if text(&pod["metadata"]["annotations"][AMBIENT_ANNOTATION]) == "enabled" {
        let reason = "its ambient mesh needs the ClusterIP itself: take the pod out of the mesh";
        return Some(reason.to_owned());
    }
    let containers = ["containers", "initContainers"].into_iter();
    let mut containers = containers.filter_map(|field| spec[field].as_array()).flatten();
    let sidecar = containers.find(|it| MESH_CONTAINERS.contains(&text(&it["name"])))?;
    let sidecar = text(&sidecar["name"]);
    Some(format!("its sidecar {sidecar} needs the ClusterIP itself: take it off the pod"))
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn label<'a>(object: &'a Value, key: &str) -> &'a str {
    text(&object["metadata"]["labels"][key])
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn service(spec: Value) -> Value {
        let mut service = json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": {"name": "a", "namespace": "n"},
            "spec": {
                "type": "ClusterIP", "clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1"],
                "ports": [{"port": 80, "protocol": "TCP"}],
            },
        });
        for (key, value) in spec.as_object().expect("fields") {
            service["spec"][key] = value.clone();
        }
        service
    }

    fn pod(spec: Value, phase: &str) -> Value {
        let metadata = json!({"name": "p", "namespace": "n"});
        json!({"metadata": metadata, "spec": spec, "status": {"phase": phase}})
    }

    fn needs(cluster: &ClusterObjects) -> Vec<String> {
        let ranges = ["10.96.0.0/12".parse().expect("a range")];
        let needs = kube_proxy_needs(cluster, &[], &ranges);
        needs.iter().map(ToString::to_string).collect()
    }

    /// Returns what the only need of a cluster with this Service says.
    fn reason_of(service: Value) -> Option<String> {
        let needs = needs(&ClusterObjects { services: vec![service], ..ClusterObjects::default() });
        assert!(needs.len() <= 1, "{needs:?}");
        needs.into_iter().next()
    }

    #[test]
    fn what_the_agents_do_not_serve_needs_kube_proxy() {
        let port = |protocol: &str| json!([{"port": 53}, {"port": 53, "protocol": protocol}]);
        for (spec, expected) in [
            (json!({"type": "NodePort"}), "its type NodePort is not served"),
            (json!({"type": "LoadBalancer"}), "its type LoadBalancer is not served"),
            (json!({"externalIPs": ["192.0.2.1"]}), "its externalIPs are not served"),
            (json!({"ports": port("SCTP")}), "its SCTP ports are not served"),
            (json!({"clusterIPs": ["10.112.0.1"]}), "no range of ClusterIPs contains 10.112.0.1"),
            (json!({"ports": port("QUIC")}), "its QUIC ports are not served"),
        ] {
            let reason = reason_of(service(spec)).expect(expected);
            assert!(reason.starts_with(&format!("Service n/a: {expected}")), "{reason}");
        }
        for spec in [
            json!({}),
            json!({"ports": port("UDP")}),
            json!({"type": "ExternalName", "clusterIPs": null}),
            json!({"clusterIP": "None", "clusterIPs": ["None"], "ports": port("SCTP")}),
        ] {
            assert_eq!(reason_of(service(spec)), None);
        }
    }

    /// Planner and installation follow one rule.
    #[test]
    fn a_protocol_needs_kube_proxy_if_the_agents_do_not_serve_it() {
        for (name, protocol) in [("UDP", TransportProtocol::Udp), ("SCTP", TransportProtocol::Sctp)]
        {
            let ports = json!([{"port": 53, "protocol": name}]);
            let reason = reason_of(service(json!({"ports": ports})));
            assert_eq!(reason.is_none(), served_protocol(protocol).is_some(), "{name}");
        }
    }

    #[test]
    fn labels_that_leave_a_service_to_kube_proxy_count() {
        let labelled = |value: Option<&str>| {
            let mut service = service(json!({}));
            service["metadata"]["labels"] = json!({CLUSTERIP_LABEL: value});
            service
        };
        let in_namespace = |service: Value, value: &str| {
            let labels = json!({CLUSTERIP_LABEL: value});
            let namespace = json!({"metadata": {"name": "n", "labels": labels}});
            let (services, namespaces) = (vec![service], vec![namespace]);
            needs(&ClusterObjects { services, namespaces, ..ClusterObjects::default() }).len()
        };
        assert!(reason_of(labelled(Some("false"))).expect("excluded").contains("remove it"));
        assert_eq!(in_namespace(labelled(None), "false"), 1);
        assert_eq!(in_namespace(labelled(Some("true")), "false"), 0, "its own label counts more");
        assert_eq!(in_namespace(labelled(None), "true"), 0);
        let mut routed = labelled(None);
        routed["metadata"]["labels"] = json!({ROUTE_LABEL: "hello"});
        assert_eq!(in_namespace(routed, "false"), 0, "the RouteTable has it");
        let mut foreign = service(json!({"type": "NodePort"}));
        foreign["metadata"]["labels"] = json!({"service.kubernetes.io/service-proxy-name": "x"});
        assert_eq!(reason_of(foreign), None, "kube-proxy leaves it alone");
    }

    #[test]
    fn sandboxed_and_meshed_pods_and_virtual_machines_need_kube_proxy_while_they_run() {
        let class = json!({"metadata": {"name": "safe"}, "handler": "kata-qemu"});
        let of = |spec: Value, phase: &str| {
            let (pods, runtime_classes) = (vec![pod(spec, phase)], vec![class.clone()]);
            needs(&ClusterObjects { pods, runtime_classes, ..ClusterObjects::default() })
        };
        let container = |name: &str| json!([{"name": "app"}, {"name": name}]);
        for (spec, expected) in [
            (json!({"runtimeClassName": "safe"}), "Pod n/p: the node's kernel does not see"),
            (json!({"runtimeClassName": "gvisor"}), "Pod n/p: the node's kernel does not see"),
            (json!({"containers": container("istio-proxy")}), "Pod n/p: its sidecar istio-proxy"),
            (json!({"initContainers": container("linkerd-proxy")}), "Pod n/p: its sidecar linkerd"),
        ] {
            let needs = of(spec.clone(), "Running");
            assert!(needs.len() == 1 && needs[0].starts_with(expected), "{needs:?}");
            assert_eq!(of(spec, "Succeeded"), [""; 0]);
        }
        for (field, key, value) in [
            ("annotations", AMBIENT_ANNOTATION, "enabled"),
            ("labels", VIRTUAL_MACHINE_LABEL, "virt-launcher"),
        ] {
            let mut pod = pod(json!({}), "Running");
            pod["metadata"][field] = json!({key: value});
            let cluster = ClusterObjects { pods: vec![pod], ..ClusterObjects::default() };
            assert_eq!(needs(&cluster).len(), 1, "{key}");
        }
        assert_eq!(of(json!({"runtimeClassName": "nvidia"}), "Running"), [""; 0]);
        assert_eq!(of(json!({"containers": container("app")}), "Running"), [""; 0]);
    }

    #[test]
    fn the_installations_own_services_count_as_they_will_be() {
        let gateway = |kind: &str| {
            let mut gateway = service(json!({"type": kind}));
            gateway["metadata"]["labels"] = json!({"app.kubernetes.io/part-of": "rouse"});
            gateway
        };
        let services = vec![gateway("LoadBalancer")];
        let cluster = ClusterObjects { services, ..ClusterObjects::default() };
        let ranges = ["10.96.0.0/12".parse().expect("a range")];
        assert_eq!(kube_proxy_needs(&cluster, &[gateway("ClusterIP")], &ranges), []);
        assert_eq!(kube_proxy_needs(&cluster, &[gateway("NodePort")], &ranges).len(), 1);
    }

    #[test]
    fn an_error_names_the_first_of_many() {
        let need = |number: usize| KubeProxyNeed {
            object: format!("Service n/{number}"),
            reason: "why".into(),
        };
        let error = KubeProxyNeededError { needs: (0..100).map(need).collect() }.to_string();
        assert!(error.contains("\n  Service n/29: why\n  and 70 more"), "{error}");
        let error = KubeProxyNeededError { needs: vec![need(1)] }.to_string();
        assert!(error.ends_with("without kube-proxy\n  Service n/1: why"), "{error}");
    }
}
