//! Pure: objects of the Gateway API, and Services as their backends. What Rouse does not support is named, not left out.

use std::{net::IpAddr, num::NonZeroU16};

use common::wire::{AppProtocol, NamespacedName};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use serde::Deserialize as _;
use serde_json::Value;
use smol_str::SmolStr;

use crate::{
    model::{
        cluster_state::{
            AllowedNamespaces, BackendProtocol, BackendService, GATEWAY_CONTROLLER, GATEWAY_GROUP,
            GatewayClassState, GatewayRouteKind, GatewayRouteState, GatewayServiceAddress,
            GatewayState, ListenerSpec, ListenerTls, ParentReference, ReferenceGrant, RoutePlan,
            UnixMillis, WrittenCondition,
        },
        knative::key,
        object::json::{array_items, label, non_empty_text, object_name},
    },
    read::fields,
};

mod filters;
mod grpc_rules;
mod rules;

use grpc_rules::read_grpc_rules;
use rules::read_http_rules;

/// Reads a GatewayClass; `None`: it chooses another controller.
pub fn read_gateway_class(object: &Value) -> Option<GatewayClassState> {
    (object["spec"]["controllerName"] == GATEWAY_CONTROLLER).then(|| GatewayClassState {
        meta: fields::read_meta(object),
        has_parameters: object["spec"]["parametersRef"].is_object(),
        written: read_written(&object["status"], ""),
        planned_since: UnixMillis::default(),
    })
}

/// Reads a Gateway of any class, which is planned later.
pub fn read_gateway(object: &Value) -> GatewayState {
    let (name, spec) = (object_name(object), &object["spec"]);
    let mut written = read_written(&object["status"], "");
    for listener in array_items(&object["status"]["listeners"]) {
        written.extend(read_written(listener, listener["name"].as_str().unwrap_or_default()));
    }
    GatewayState {
        meta: fields::read_meta(object),
        class: text(&spec["gatewayClassName"]).into(),
        has_parameters: spec["infrastructure"]["parametersRef"].is_object(),
        has_addresses: array_items(&spec["addresses"]).any(is_own_address),
        listeners: array_items(&spec["listeners"])
            .map(|it| {
                let mut listener = read_listener(it, &name.namespace);
                // Newer versions of the API state at the Gateway what older ones state at the listener.
                let is_asked =
                    asks_for_client_certificates(&spec["tls"]["frontend"], listener.port);
                if let Some(tls) = listener.tls.as_mut().filter(|_| is_asked) {
                    tls.validates_clients = true;
                }
                listener
            })
            .collect(),
        written,
        planned_since: UnixMillis::default(),
    }
}

/// Returns true if an address of a Gateway is one that the gateway may not have. Without a value, any address of the usual
/// types is meant.
fn is_own_address(address: &Value) -> bool {
    let has_usual_type =
        address["type"].as_str().is_none_or(|it| ["IPAddress", "Hostname"].contains(&it));
    non_empty_text(&address["value"]).is_some() || !has_usual_type
}

/// Returns true if a Gateway asks for certificates of clients at a port, by the settings of the port or else by the
/// default. From 1.4 on, the Gateway has these settings, and no listener.
fn asks_for_client_certificates(frontend: &Value, port: u16) -> bool {
    let of_port = array_items(&frontend["perPort"]).find(|it| it["port"] == port);
    let settings = of_port.map_or(&frontend["default"], |it| &it["tls"]);
    !settings["validation"].is_null()
}

fn read_listener(listener: &Value, namespace: &str) -> ListenerSpec {
    let (allowed, tls) = (&listener["allowedRoutes"], &listener["tls"]);
    let kind = |it: &Value| -> (Box<str>, Box<str>) {
        (group(it, GATEWAY_GROUP).into(), text(&it["kind"]).into())
    };
    ListenerSpec {
        name: text(&listener["name"]).into(),
        hostname: read_host(&listener["hostname"]),
        port: read_port(&listener["port"]).map_or(0, NonZeroU16::get),
        protocol: text(&listener["protocol"]).into(),
        tls: tls.is_object().then(|| read_listener_tls(tls, namespace)),
        namespaces: read_allowed_namespaces(&allowed["namespaces"]),
        kinds: array_items(&allowed["kinds"]).map(kind).collect(),
    }
}

fn read_listener_tls(tls: &Value, own_namespace: &str) -> ListenerTls {
    let certificate = |it: &Value| {
        let namespace = it["namespace"].as_str().unwrap_or(own_namespace);
        (full_kind(it, "Secret"), NamespacedName::new(namespace, text(&it["name"])))
    };
    ListenerTls {
        is_terminated: tls["mode"].as_str().is_none_or(|it| it == "Terminate"),
        validates_clients: !tls["frontendValidation"].is_null(),
        certificates: array_items(&tls["certificateRefs"]).map(certificate).collect(),
    }
}

/// Reads the namespaces whose routes may attach. A form that is not known admits none.
fn read_allowed_namespaces(value: &Value) -> AllowedNamespaces {
    match value["from"].as_str() {
        None | Some("Same") => AllowedNamespaces::Same,
        Some("All") => AllowedNamespaces::All,
        Some("Selector") => {
            let selector = LabelSelector::deserialize(&value["selector"]).ok();
            AllowedNamespaces::Selected(selector.and_then(|it| it.try_into().ok()))
        }
        Some(_) => AllowedNamespaces::Selected(None),
    }
}

/// Reads a route. Nothing is planned for it yet.
pub fn read_gateway_route(kind: GatewayRouteKind, object: &Value) -> GatewayRouteState {
    let (name, spec) = (object_name(object), &object["spec"]);
    let is_own = |it: &&Value| it["controllerName"] == GATEWAY_CONTROLLER;
    // A status has a list for all controllers, and a write must keep the entries of the others.
    let (own, foreign): (Vec<&Value>, Vec<&Value>) =
        array_items(&object["status"]["parents"]).partition(is_own);
    let written = own.iter().flat_map(|it| read_written(it, &it["parentRef"].to_string()));
    let parents = array_items(&spec["parentRefs"]);
    let rules = match kind {
        GatewayRouteKind::Http => read_http_rules(spec, &name.namespace),
        GatewayRouteKind::Grpc => read_grpc_rules(spec, &name.namespace),
    };
    GatewayRouteState {
        meta: fields::read_meta(object),
        parents: parents.map(|it| read_parent(it, &name.namespace)).collect(),
        hostnames: array_items(&spec["hostnames"]).filter_map(read_host).collect(),
        rules: rules.map_err(Into::into),
        written: written.collect(),
        has_own_parents: !own.is_empty(),
        foreign_parents: foreign.into_iter().cloned().collect(),
        plan: RoutePlan::default(),
    }
}

fn read_parent(reference: &Value, own_namespace: &str) -> ParentReference {
    let is_gateway = group(reference, GATEWAY_GROUP) == GATEWAY_GROUP
        && reference["kind"].as_str().is_none_or(|it| it == "Gateway");
    let namespace = reference["namespace"].as_str().unwrap_or(own_namespace);
    let name = NamespacedName::new(namespace, text(&reference["name"]));
    ParentReference {
        gateway: is_gateway.then_some(name),
        section: non_empty_text(&reference["sectionName"]),
        port: read_port(&reference["port"]).map(NonZeroU16::get),
        reference: reference.clone(),
    }
}

/// Reads a ReferenceGrant, whose groups and kinds are kept as text.
pub fn read_reference_grant(object: &Value) -> ReferenceGrant {
    let field = |it: &Value, field: &str| -> Box<str> { text(&it[field]).into() };
    let from = |it: &Value| (field(it, "group"), field(it, "kind"), field(it, "namespace"));
    let to = |it: &Value| (field(it, "group"), field(it, "kind"), non_empty_text(&it["name"]));
    ReferenceGrant {
        from: array_items(&object["spec"]["from"]).map(from).collect(),
        to: array_items(&object["spec"]["to"]).map(to).collect(),
    }
}

/// Reads a Service as a backend of routes; `None` for those that the controller has made for Routes and Revisions.
pub fn read_backend_service(object: &Value) -> Option<BackendService> {
    if [key::ROUTE, key::REVISION_UID].iter().any(|it| label(object, it).is_some()) {
        return None;
    }
    let port = |it: &Value| {
        let is_tcp = it["protocol"].as_str().is_none_or(|it| it == "TCP");
        let protocol = match it["appProtocol"].as_str() {
            None => BackendProtocol::Unstated,
            Some("http" | "kubernetes.io/ws" | "grpc-web") => {
                BackendProtocol::Stated(AppProtocol::Http1)
            }
            Some("kubernetes.io/h2c" | "grpc") => BackendProtocol::Stated(AppProtocol::H2c),
            Some(_) => BackendProtocol::Unknown,
        };
        // Routes lead HTTP, so ports of other protocols are as if they were not there.
        read_port(&it["port"]).filter(|_| is_tcp).map(|it| (it, protocol))
    };
    Some(BackendService {
        address: object["spec"]["clusterIP"].as_str().and_then(|it| it.parse().ok()),
        ports: array_items(&object["spec"]["ports"]).filter_map(port).collect(),
    })
}

/// Reads the addresses of the gateway's Service: those of its load balancer, else its ClusterIPs.
pub fn read_gateway_addresses(object: &Value) -> Vec<GatewayServiceAddress> {
    let ingress = array_items(&object["status"]["loadBalancer"]["ingress"]);
    let of_balancer = ingress.filter_map(|it| {
        let (ip, host) = (non_empty_text(&it["ip"]), non_empty_text(&it["hostname"]));
        let is_hostname = ip.is_none();
        Some(GatewayServiceAddress { is_hostname, value: ip.or(host)? })
    });
    let of_balancer: Vec<GatewayServiceAddress> = of_balancer.collect();
    // Clients outside of the cluster can use only these.
    if !of_balancer.is_empty() {
        return of_balancer;
    }
    let own = array_items(&object["spec"]["clusterIPs"]).filter_map(Value::as_str);
    let own = own.filter(|it| it.parse::<IpAddr>().is_ok());
    own.map(|it| GatewayServiceAddress { is_hostname: false, value: it.into() }).collect()
}

/// Reads the conditions of a status, or of a part of it.
fn read_written(status: &Value, part: &str) -> Vec<WrittenCondition> {
    let condition = |it: &Value| WrittenCondition {
        part: part.to_owned(),
        kind: text(&it["type"]).into(),
        is_true: it["status"] == "True",
        since: text(&it["lastTransitionTime"]).into(),
    };
    // A condition that is neither true nor false has no time that a planned one could keep.
    let known = array_items(&status["conditions"]).filter(|it| it["status"] != "Unknown");
    known.map(condition).collect()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Returns the kind of a reference, `usual` if it names none, with its group unless that is the core group.
fn full_kind(reference: &Value, usual: &str) -> Box<str> {
    let (group, kind) = (group(reference, ""), reference["kind"].as_str().unwrap_or(usual));
    if group.is_empty() { kind.into() } else { format!("{kind}.{group}").into() }
}

/// Returns the group of a reference; `usual` if it names none.
fn group<'a>(reference: &'a Value, usual: &'a str) -> &'a str {
    reference["group"].as_str().unwrap_or(usual)
}

fn read_host(value: &Value) -> Option<SmolStr> {
    non_empty_text(value).map(|it| it.to_ascii_lowercase().into())
}

fn read_port(value: &Value) -> Option<NonZeroU16> {
    value.as_u64().and_then(|it| u16::try_from(it).ok()).and_then(NonZeroU16::new)
}

#[cfg(test)]
mod tests {
    use common::wire::{HeaderChanges, PathMatch, PathPrefix};
    use serde_json::json;

    use super::*;
    use crate::model::cluster_state::BackendSpec;

    /// Clients without a certificate would else be served at a listener that is to refuse them.
    #[test]
    fn certificates_of_clients_are_asked_for_by_a_listener_or_its_gateway() {
        let ca = json!({"caCertificateRefs": [{"name": "ca", "kind": "ConfigMap", "group": ""}]});
        let of_default = json!({"default": {"validation": ca}});
        let of_port = |port: u16| {
            let settings = json!({"validation": ca});
            json!({"default": {}, "perPort": [{"port": port, "tls": settings}]})
        };
        let without = json!({"default": {"validation": ca}, "perPort": [{"port": 443, "tls": {}}]});
        for (own, frontend, expected) in [
            (Value::Null, Value::Null, false),
            (ca.clone(), Value::Null, true),
            (Value::Null, of_default, true),
            (Value::Null, of_port(443), true),
            (Value::Null, of_port(8443), false),
            (Value::Null, without, false),
        ] {
            let gateway = read_gateway(&json!({
                "metadata": {"name": "a", "namespace": "b"},
                "spec": {
                    "tls": {"frontend": frontend},
                    "listeners": [
                        {"port": 443, "protocol": "HTTPS", "tls": {"frontendValidation": own}},
                        {"port": 80, "protocol": "HTTP"},
                    ],
                },
            }));
            let tls: Vec<_> = gateway.listeners.iter().map(|it| it.tls.as_ref()).collect();
            assert_eq!(tls[0].map(|it| it.validates_clients), Some(expected), "{frontend}");
            assert_eq!(tls[1], None);
        }
    }

    #[test]
    fn a_gateway_may_ask_for_any_address_and_for_no_parameters() {
        for (spec, expected) in [
            (json!({}), (false, false)),
            (json!({"addresses": [{}, {"type": "IPAddress"}]}), (false, false)),
            (json!({"addresses": [{"value": "192.0.2.1"}]}), (true, false)),
            (json!({"addresses": [{"type": "example.test/pool"}]}), (true, false)),
            (json!({"infrastructure": {"labels": {"a": "b"}}}), (false, false)),
            (json!({"infrastructure": {"parametersRef": {"name": "a"}}}), (false, true)),
        ] {
            let gateway = read_gateway(&json!({"metadata": {"name": "a"}, "spec": spec}));
            assert_eq!((gateway.has_addresses, gateway.has_parameters), expected, "{spec}");
        }
    }

    #[test]
    fn a_route_has_the_defaults_of_the_api() {
        let own = json!({"controllerName": GATEWAY_CONTROLLER, "parentRef": {"name": "g"}});
        let foreign = json!({"controllerName": "other/controller", "parentRef": {"name": "g"}});
        let object = json!({
            "metadata": {"name": "a", "namespace": "b"},
            "spec": {
                "parentRefs": [{"name": "g"}, {"name": "s", "kind": "Service", "group": ""}],
                "hostnames": ["A.Example"],
                "rules": [{"backendRefs": [{"name": "c", "port": 80}]}],
            },
            "status": {"parents": [own, foreign.clone()]},
        });
        let route = read_gateway_route(GatewayRouteKind::Http, &object);
        let gateways: Vec<_> = route.parents.iter().map(|it| it.gateway.clone()).collect();
        assert_eq!(gateways, [Some(NamespacedName::new("b", "g")), None]);
        assert_eq!(route.hostnames, ["a.example"]);
        let rules = route.rules.expect("they are supported");
        assert_eq!(rules[0].matches[0].path, PathMatch::Prefix(PathPrefix::ALL));
        let expected = BackendSpec {
            weight: 1,
            kind: "Service".into(),
            name: NamespacedName::new("b", "c"),
            port: NonZeroU16::new(80),
            request_headers: HeaderChanges::default(),
            response_headers: HeaderChanges::default(),
        };
        assert_eq!(rules[0].backends, [expected]);
        assert_eq!((route.foreign_parents, route.has_own_parents), (vec![foreign], true));
    }

    #[test]
    fn a_service_is_read_with_the_protocols_of_its_tcp_ports() {
        let service = |labels: Value, address: &str| {
            read_backend_service(&json!({
                "metadata": {"labels": labels},
                "spec": {"clusterIP": address, "ports": [
                    {"port": 80}, {"port": 53, "protocol": "UDP"},
                    {"port": 81, "appProtocol": "kubernetes.io/h2c"},
                    {"port": 443, "appProtocol": "https"},
                ]},
            }))
        };
        let port = |port| NonZeroU16::new(port).expect("not zero");
        let ports = [
            (port(80), BackendProtocol::Unstated),
            (port(81), BackendProtocol::Stated(AppProtocol::H2c)),
            (port(443), BackendProtocol::Unknown),
        ];
        let address = Some(IpAddr::from([10, 96, 0, 7]));
        let expected = BackendService { address, ports: ports.into() };
        assert_eq!(service(json!({}), "10.96.0.7"), Some(expected));
        assert_eq!(service(json!({}), "None").and_then(|it| it.address), None);
        assert_eq!(service(json!({key::ROUTE: "a"}), "10.96.0.7"), None);
    }
}
