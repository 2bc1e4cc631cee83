//! Pure: objects of the Gateway API, and Services as their backends. What Rouse does not support is named, not left out.

use std::{net::IpAddr, num::NonZeroU16};

use common::wire::{
    AppProtocol, HeaderChanges, NamespacedName, PathMatch, PathPrefix, RequestRedirect,
};
use http::{HeaderName, HeaderValue};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use serde::Deserialize as _;
use serde_json::Value;
use smol_str::SmolStr;

use crate::{
    model::{
        cluster_state::{
            AllowedNamespaces, BackendService, BackendSpec, GATEWAY_CONTROLLER, GATEWAY_GROUP,
            GatewayClassState, GatewayServiceAddress, GatewayState, HttpRouteState, ListenerSpec,
            ListenerTls, ParentReference, ReferenceGrant, RouteMatchSpec, RoutePlan, RouteRuleSpec,
            UnixMillis, WrittenCondition,
        },
        knative::key,
        object::json::{array_items, label, non_empty_text, object_name},
    },
    read::fields,
};

/// Headers that describe one hop or the message itself, or that name the host: no rule changes them.
const FIXED_HEADERS: [&str; 14] = [
    "connection",
    "content-length",
    "expect",
    "forwarded",
    "host",
    "http2-settings",
    "keep-alive",
    "proxy-authenticate",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "x-real-ip",
];
/// Prefixes of headers of the platform, and of those that describe the client.
const FIXED_PREFIXES: [&str; 3] = ["k-", "knative-serving-", "x-forwarded-"];

/// Most bytes of the texts of a route's rules, where each match has a copy of its rule's: the RouteTable has them so, for
/// each host of the route.
const MAX_RULE_BYTES: usize = 1 << 20;

/// Reads a GatewayClass; `None`: it chooses another controller.
pub fn read_gateway_class(object: &Value) -> Option<GatewayClassState> {
    (object["spec"]["controllerName"] == GATEWAY_CONTROLLER).then(|| GatewayClassState {
        meta: fields::read_meta(object),
        has_parameters: object["spec"]["parametersRef"].is_object(),
        written: read_written(&object["status"], ""),
        planned_since: UnixMillis::default(),
    })
}

/// Reads a Gateway.
pub fn read_gateway(object: &Value) -> GatewayState {
    let (name, spec) = (object_name(object), &object["spec"]);
    let mut written = read_written(&object["status"], "");
    for listener in array_items(&object["status"]["listeners"]) {
        written.extend(read_written(listener, listener["name"].as_str().unwrap_or_default()));
    }
    GatewayState {
        meta: fields::read_meta(object),
        class: text(&spec["gatewayClassName"]).into(),
        has_addresses: array_items(&spec["addresses"]).next().is_some(),
        listeners: array_items(&spec["listeners"])
            .map(|it| {
                let mut listener = read_listener(it, &name.namespace);
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

/// Reads an HTTPRoute. Nothing is planned for it yet.
pub fn read_http_route(object: &Value) -> HttpRouteState {
    let (name, spec) = (object_name(object), &object["spec"]);
    let is_own = |it: &&Value| it["controllerName"] == GATEWAY_CONTROLLER;
    let (own, foreign): (Vec<&Value>, Vec<&Value>) =
        array_items(&object["status"]["parents"]).partition(is_own);
    let written = own.iter().flat_map(|it| read_written(it, &it["parentRef"].to_string()));
    let parents = array_items(&spec["parentRefs"]);
    HttpRouteState {
        meta: fields::read_meta(object),
        parents: parents.map(|it| read_parent(it, &name.namespace)).collect(),
        hostnames: array_items(&spec["hostnames"]).filter_map(read_host).collect(),
        rules: read_rules(spec, &name.namespace).map_err(Into::into),
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

/// Reads the rules of a route. The error names the first value that is not supported.
fn read_rules(spec: &Value, namespace: &str) -> Result<Vec<RouteRuleSpec>, String> {
    let rules = array_items(&spec["rules"]).map(|rule| read_rule(rule, namespace));
    let rules = rules.collect::<Result<Vec<_>, _>>()?;
    let bytes: usize = rules.iter().map(copied_bytes).sum();
    if bytes > MAX_RULE_BYTES {
        return Err(format!(
            "the rules have {bytes} bytes with a copy for each match, and may have {MAX_RULE_BYTES}"
        ));
    }
    Ok(rules)
}

/// Returns the bytes of the texts of a rule with a copy of its changes and backends for each match.
fn copied_bytes(rule: &RouteRuleSpec) -> usize {
    let pairs = |all: &[(String, String)]| -> usize {
        all.iter().map(|(name, value)| name.len() + value.len()).sum()
    };
    let changes = |it: &HeaderChanges| -> usize {
        pairs(&it.set) + pairs(&it.add) + it.remove.iter().map(String::len).sum::<usize>()
    };
    let backends = rule.backends.iter().map(|it| it.name.namespace.len() + it.name.name.len());
    let shared =
        changes(&rule.request_headers) + changes(&rule.response_headers) + backends.sum::<usize>();
    let of_matches = rule.matches.iter().map(|it| shared + pairs(&it.headers) + pairs(&it.query));
    of_matches.sum()
}

fn read_rule(rule: &Value, namespace: &str) -> Result<RouteRuleSpec, String> {
    for field in ["retry", "sessionPersistence", "timeouts"] {
        if !rule[field].is_null() {
            return Err(format!("the field {field} of rules is not supported"));
        }
    }
    let matches = array_items(&rule["matches"]).map(read_match);
    let mut matches = matches.collect::<Result<Vec<_>, _>>()?;
    if matches.is_empty() {
        matches.push(read_match(&Value::Null)?);
    }
    let mut read = RouteRuleSpec {
        matches,
        request_headers: HeaderChanges::default(),
        response_headers: HeaderChanges::default(),
        redirect: None,
        backends: Vec::new(),
    };
    for filter in array_items(&rule["filters"]) {
        match text(&filter["type"]) {
            "RequestHeaderModifier" => {
                read.request_headers = read_header_changes(&filter["requestHeaderModifier"])?;
            }
            "ResponseHeaderModifier" => {
                read.response_headers = read_header_changes(&filter["responseHeaderModifier"])?;
            }
            "RequestRedirect" => read.redirect = Some(read_redirect(&filter["requestRedirect"])?),
            other => return Err(format!("filters of type {other} are not supported")),
        }
    }
    let backends = array_items(&rule["backendRefs"]).map(|it| read_backend(it, namespace));
    read.backends = backends.collect::<Result<_, _>>()?;
    Ok(read)
}

fn read_match(value: &Value) -> Result<RouteMatchSpec, String> {
    let path = value["path"]["value"].as_str().unwrap_or("/");
    let unclear = || format!("the path {path} is too long, or servers may read it differently");
    let path = match value["path"]["type"].as_str().unwrap_or("PathPrefix") {
        "Exact" => PathMatch::parse_exact(path).ok_or_else(unclear)?,
        "PathPrefix" => PathMatch::Prefix(PathPrefix::parse(path).map_err(|_fault| unclear())?),
        other => return Err(format!("paths of type {other} are not supported")),
    };
    let headers = read_exact_pairs(&value["headers"], "headers")?;
    let mut lower: Vec<(String, String)> = Vec::new();
    for (name, value) in headers {
        let name = name.to_ascii_lowercase();
        // Of several entries for one header, the first one counts.
        if !lower.iter().any(|(it, _)| *it == name) {
            lower.push((name, value));
        }
    }
    Ok(RouteMatchSpec {
        path,
        method: value["method"].as_str().map(str::to_owned),
        headers: lower,
        query: read_exact_pairs(&value["queryParams"], "queryParams")?,
    })
}

/// Reads pairs that a request must have exactly.
fn read_exact_pairs(list: &Value, field: &str) -> Result<Vec<(String, String)>, String> {
    let pair = |it: &Value| match it["type"].as_str() {
        None | Some("Exact") => Ok((text(&it["name"]).to_owned(), text(&it["value"]).to_owned())),
        Some(other) => Err(format!("{field} of type {other} are not supported")),
    };
    array_items(list).map(pair).collect()
}

fn read_header_changes(value: &Value) -> Result<HeaderChanges, String> {
    let name = |it: &Value| {
        let name = text(it).to_ascii_lowercase();
        let is_fixed = FIXED_HEADERS.contains(&name.as_str())
            || FIXED_PREFIXES.iter().any(|it| name.starts_with(it));
        if is_fixed {
            return Err(format!("rules cannot change the header {name}"));
        }
        match HeaderName::try_from(name.as_str()) {
            Ok(_) => Ok(name),
            Err(_invalid) => Err(format!("{name:?} is no name of a header")),
        }
    };
    let pairs = |field: &str| {
        let all = array_items(&value[field]);
        let pair = |it: &Value| -> Result<(String, String), String> {
            let (name, value) = (name(&it["name"])?, text(&it["value"]));
            match HeaderValue::try_from(value) {
                Ok(_) => Ok((name, value.to_owned())),
                Err(_invalid) => Err(format!("the header {name} cannot have the value {value:?}")),
            }
        };
        all.map(pair).collect::<Result<Vec<_>, String>>()
    };
    let remove = array_items(&value["remove"]).map(name);
    Ok(HeaderChanges {
        set: pairs("set")?,
        add: pairs("add")?,
        remove: remove.collect::<Result<_, _>>()?,
    })
}

fn read_redirect(value: &Value) -> Result<RequestRedirect, String> {
    if value["path"].is_object() {
        return Err("the field path of RequestRedirect is not supported".to_owned());
    }
    let status = value["statusCode"].as_u64().and_then(|it| u16::try_from(it).ok());
    Ok(RequestRedirect {
        is_https: match value["scheme"].as_str() {
            None => None,
            Some("http") => Some(false),
            Some("https") => Some(true),
            Some(other) => return Err(format!("the scheme {other} is not supported")),
        },
        host: non_empty_text(&value["hostname"]).map(Into::into),
        port: read_port(&value["port"]),
        path: None,
        status: status.filter(|it| (300..400).contains(it)).unwrap_or(302),
    })
}

fn read_backend(reference: &Value, own_namespace: &str) -> Result<BackendSpec, String> {
    if array_items(&reference["filters"]).next().is_some() {
        return Err("filters of backendRefs are not supported".to_owned());
    }
    let weight = reference["weight"].as_u64().unwrap_or(1);
    let namespace = reference["namespace"].as_str().unwrap_or(own_namespace);
    Ok(BackendSpec {
        // The API server accepts up to a million.
        weight: u32::try_from(weight).unwrap_or(u32::MAX),
        kind: full_kind(reference, "Service"),
        name: NamespacedName::new(namespace, text(&reference["name"])),
        port: read_port(&reference["port"]),
    })
}

/// Reads a ReferenceGrant.
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
            None | Some("http" | "kubernetes.io/ws" | "grpc-web") => Some(AppProtocol::Http1),
            Some("kubernetes.io/h2c" | "grpc") => Some(AppProtocol::H2c),
            Some(_) => None,
        };
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
    use serde_json::json;

    use super::*;

    fn fault(rule: Value) -> String {
        let object =
            json!({"metadata": {"name": "a", "namespace": "b"}, "spec": {"rules": [rule]}});
        read_http_route(&object).rules.expect_err("not supported").into()
    }

    #[test]
    fn what_is_not_supported_is_named() {
        let path = |kind: &str, value: &str| json!({"matches": [{"path": {"type": kind, "value": value}}]});
        let filter = |filter: Value| json!({"filters": [filter]});
        for (rule, expected) in [
            (path("RegularExpression", "/a"), "paths of type RegularExpression are not supported"),
            (
                path("Exact", "/a;b"),
                "the path /a;b is too long, or servers may read it differently",
            ),
            (filter(json!({"type": "URLRewrite"})), "filters of type URLRewrite are not supported"),
            (
                filter(json!({
                    "type": "RequestHeaderModifier",
                    "requestHeaderModifier": {"remove": ["X-Forwarded-For"]},
                })),
                "rules cannot change the header x-forwarded-for",
            ),
            (
                filter(json!({
                    "type": "ResponseHeaderModifier",
                    "responseHeaderModifier": {"add": [{"name": "a", "value": "1\nb: 2"}]},
                })),
                "the header a cannot have the value \"1\\nb: 2\"",
            ),
            (
                filter(json!({
                    "type": "RequestHeaderModifier",
                    "requestHeaderModifier": {"remove": ["a b"]},
                })),
                "\"a b\" is no name of a header",
            ),
            (
                filter(json!({"type": "RequestRedirect", "requestRedirect": {"path": {}}})),
                "the field path of RequestRedirect is not supported",
            ),
            (
                json!({"matches": [{"headers": [{"type": "RegularExpression", "name": "a"}]}]}),
                "headers of type RegularExpression are not supported",
            ),
            (
                json!({"timeouts": {"request": "1s"}}),
                "the field timeouts of rules is not supported",
            ),
            (
                json!({"backendRefs": [{"name": "a", "filters": [{}]}]}),
                "filters of backendRefs are not supported",
            ),
        ] {
            assert_eq!(fault(rule), expected);
        }
    }

    /// An object of 64 KiB would else be many MiB in the table of each activator.
    #[test]
    fn rules_are_bounded_with_their_copies() {
        let header = |at: usize| json!({"name": format!("h{at}"), "value": "v".repeat(4000)});
        let headers: Vec<Value> = (0..16).map(header).collect();
        let rule = |matches: usize| {
            let path = |at: usize| json!({"path": {"type": "Exact", "value": format!("/{at}")}});
            json!({
                "matches": (0..matches).map(path).collect::<Vec<Value>>(),
                "filters": [{
                    "type": "ResponseHeaderModifier", "responseHeaderModifier": {"set": headers},
                }],
            })
        };
        assert!(fault(rule(64)).starts_with("the rules have 4"), "{}", fault(rule(64)));
        let spec = json!({"rules": [rule(16)]});
        assert!(read_rules(&spec, "b").is_ok());
    }

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
    fn a_route_has_the_defaults_of_the_api() {
        let own = json!({"controllerName": GATEWAY_CONTROLLER, "parentRef": {"name": "g"}});
        let foreign = json!({"controllerName": "other/controller", "parentRef": {"name": "g"}});
        let route = read_http_route(&json!({
            "metadata": {"name": "a", "namespace": "b"},
            "spec": {
                "parentRefs": [{"name": "g"}, {"name": "s", "kind": "Service", "group": ""}],
                "hostnames": ["A.Example"],
                "rules": [{"backendRefs": [{"name": "c", "port": 80}]}],
            },
            "status": {"parents": [own, foreign.clone()]},
        }));
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
            (port(80), Some(AppProtocol::Http1)),
            (port(81), Some(AppProtocol::H2c)),
            (port(443), None),
        ];
        let address = Some(IpAddr::from([10, 96, 0, 7]));
        let expected = BackendService { address, ports: ports.into() };
        assert_eq!(service(json!({}), "10.96.0.7"), Some(expected));
        assert_eq!(service(json!({}), "None").and_then(|it| it.address), None);
        assert_eq!(service(json!({key::ROUTE: "a"}), "10.96.0.7"), None);
    }
}
