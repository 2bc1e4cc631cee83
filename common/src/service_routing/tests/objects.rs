//! Pure: tests of the conversion from Kubernetes objects, as the API server sends them.

use k8s_openapi::api::{core::v1::Service, discovery::v1::EndpointSlice};
use serde_json::{Value, json};

use super::super::*;

/// Replaces fields of `object` by those of `fields`.
fn with_fields(mut object: Value, fields: &Value) -> Value {
    for (key, value) in fields.as_object().expect("fields") {
        object[key] = value.clone();
    }
    object
}

/// Reads a Service whose spec has these fields besides those of a usual one. Returns the texts of all errors too.
fn read_service(spec: &Value, labels: &Value) -> (Option<ClusterIpService>, Vec<String>) {
    let usual = json!({"type": "ClusterIP", "clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1"],
                       "ports": [{"port": 80, "protocol": "TCP", "targetPort": 8080}]});
    let meta = json!({"name": "hello", "namespace": "default", "labels": labels});
    let object = json!({"metadata": meta, "spec": with_fields(usual, spec)});
    let service: Service = serde_json::from_value(object).expect("a Service");
    let mut errors = Vec::new();
    let routed = ClusterIpService::from_kubernetes(&service, &mut errors);
    (routed, errors.iter().map(ToString::to_string).collect())
}

/// Reads an EndpointSlice that has these fields besides those of a usual one. Returns the texts of all errors too.
fn read_slice(fields: &Value) -> (Option<ServiceSlice>, Vec<String>) {
    let usual = json!({
        "metadata": {"name": "hello-1", "namespace": "default"},
        "addressType": "IPv4",
        "ports": [{"name": "", "port": 8080, "protocol": "TCP"}],
        "endpoints": [],
    });
    let slice: EndpointSlice =
        serde_json::from_value(with_fields(usual, fields)).expect("an EndpointSlice");
    let mut errors = Vec::new();
    let routed = ServiceSlice::from_kubernetes(&slice, &mut errors);
    (routed, errors.iter().map(ToString::to_string).collect())
}

#[test]
fn services_that_kube_proxy_skips_are_ignored() {
    let ignored = [
        (json!({"clusterIP": "None", "clusterIPs": ["None"]}), json!({})),
        (json!({"clusterIP": "", "clusterIPs": null}), json!({})),
        (json!({"type": "ExternalName", "externalName": "example.com"}), json!({})),
        (json!({}), json!({"service.kubernetes.io/service-proxy-name": ""})),
        (json!({}), json!({"service.kubernetes.io/headless": ""})),
    ];
    for (spec, labels) in ignored {
        assert_eq!(read_service(&spec, &labels), (None, vec![]), "{spec} {labels}");
    }
    for kind in ["ClusterIP", "NodePort", "LoadBalancer"] {
        assert!(read_service(&json!({"type": kind}), &json!({})).0.is_some(), "{kind}");
    }
}

#[test]
fn both_addresses_of_a_dual_stack_service_are_read() {
    let addresses = |spec| {
        let (service, errors) = read_service(&spec, &json!({}));
        assert_eq!(errors, [""; 0]);
        let all = service.expect("routed").cluster_ips;
        all.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let both = json!({"clusterIPs": ["10.96.0.1", "fd00::1"]});
    assert_eq!(addresses(both), ["10.96.0.1", "fd00::1"]);
    // An API server before dual stack.
    assert_eq!(addresses(json!({"clusterIPs": null})), ["10.96.0.1"]);
}

#[test]
fn affinity_has_the_stated_timeout_or_three_hours() {
    let timeout = |spec| read_service(&spec, &json!({})).0.expect("routed").affinity_timeout;
    assert_eq!(timeout(json!({"sessionAffinity": "None"})), None);
    let default = timeout(json!({"sessionAffinity": "ClientIP"}));
    assert_eq!(default, Some(Duration::from_secs(10_800)));
    let stated = json!({"sessionAffinity": "ClientIP",
                        "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 60}}});
    assert_eq!(timeout(stated), Some(Duration::from_secs(60)));
}

#[test]
fn a_bad_port_is_ignored_alone_and_named() {
    let ports = json!([{"port": 0, "name": "a"}, {"port": 80, "name": "b"},
                       {"port": 81, "name": "c", "protocol": "QUIC"}]);
    let (service, errors) = read_service(&json!({"ports": ports}), &json!({}));
    let names: Vec<_> = service.expect("routed").ports.iter().map(|it| it.name.clone()).collect();
    assert_eq!(names, ["b"]);
    assert_eq!(
        errors,
        [
            "spec.ports[].port is \"0\" and is ignored: it must be a number from 1 to 65535",
            "spec.ports[].protocol is \"QUIC\" and is ignored: it must be TCP, UDP or SCTP",
        ]
    );
}

#[test]
fn a_bad_address_is_ignored_alone_and_named() {
    let endpoints = json!([{"addresses": ["10.0.0.1"]}, {"addresses": ["10.0.0.300"]},
                           {"addresses": []}, {"addresses": ["010.000.0.2"]},
                           {"addresses": ["10..0.3"]}]);
    let (slice, errors) = read_slice(&json!({"endpoints": endpoints}));
    let slice = slice.expect("routed");
    let texts: Vec<_> = slice.endpoints.iter().map(|it| it.address.to_string()).collect();
    assert_eq!(texts, ["10.0.0.1", "10.0.0.2"]);
    assert_eq!(errors.len(), 2, "{errors:?}");
    assert!(errors[0].contains("10.0.0.300"), "{errors:?}");
}

/// The API server refuses such slices, and a proxy must not depend on that.
#[test]
fn an_address_of_another_family_than_its_slice_is_ignored_alone_and_named() {
    let addresses = ["10.0.0.1", "fd00::1", "::ffff:10.0.0.2"];
    let endpoints: Vec<_> = addresses.iter().map(|it| json!({"addresses": [it]})).collect();
    let read = |family: &str| {
        let (slice, errors) = read_slice(&json!({"addressType": family, "endpoints": endpoints}));
        let endpoints = slice.expect("routed").endpoints;
        (endpoints.iter().map(|it| it.address.to_string()).collect::<Vec<_>>(), errors)
    };
    let error = |address: &str, family: &str| {
        format!(
            "endpoints[].addresses[0] is {address:?} and is ignored: it must be an {family} \
             address, as addressType says"
        )
    };
    // A mapped address is one of IPv4.
    let four = ["10.0.0.1", "10.0.0.2"].map(str::to_owned).to_vec();
    assert_eq!(read("IPv4"), (four, vec![error("fd00::1", "IPv4")]));
    let errors = ["10.0.0.1", "::ffff:10.0.0.2"].map(|it| error(it, "IPv6")).to_vec();
    assert_eq!(read("IPv6"), (vec!["fd00::1".to_owned()], errors));
}

#[test]
fn an_endpoint_is_ready_and_serving_unless_it_states_otherwise() {
    let endpoints = json!([
        {"addresses": ["10.0.0.1"]},
        {"addresses": ["10.0.0.2"], "conditions": {"ready": false}},
        {"addresses": ["10.0.0.3"], "nodeName": "n1", "zone": "b",
         "conditions": {"ready": false, "serving": false, "terminating": true},
         "hints": {"forZones": [{"name": "a"}], "forNodes": [{"name": "n1"}, {"name": "n2"}]}},
    ]);
    let (slice, _) = read_slice(&json!({"endpoints": endpoints}));
    let slice = slice.expect("routed");
    let [first, second, third] = &*slice.endpoints else { panic!("three endpoints") };
    assert!(first.is_ready && first.is_serving && !first.is_terminating && first.node.is_empty());
    assert!(!second.is_ready && second.is_serving);
    assert!(!third.is_ready && !third.is_serving && third.is_terminating);
    assert_eq!((third.node.as_str(), &*third.zone_hints), ("n1", &["a".into()][..]));
    assert_eq!((third.node_hints.len(), third.zone.as_str()), (2, "b"));
}

#[test]
fn slices_that_a_proxy_cannot_use_are_ignored() {
    assert_eq!(read_slice(&json!({"addressType": "FQDN"})), (None, vec![]));
    let labels = json!({"name": "x", "labels": {"service.kubernetes.io/headless": ""}});
    assert_eq!(read_slice(&json!({"metadata": labels})), (None, vec![]));
}

#[test]
fn ports_of_a_slice_without_name_or_number_are_ignored() {
    let ports =
        json!([{"port": 1}, {"name": "a"}, {"name": "b", "port": 0}, {"name": "c", "port": 9}]);
    let (slice, errors) = read_slice(&json!({"ports": ports}));
    assert_eq!((slice.expect("routed").ports.len(), errors), (1, vec![]));
}
