//! Gateway ports: the first Service keeps a port, and the next one gets it when the first no longer asks for it.

use super::*;
use crate::model::cluster_state::name_registry::PORT_RECORD_NAME;

fn permit_ports(api_server: &mut FakeApiServer, ports: &str) {
    api_server.set_config_map("config-network", json!({"rouse.dev.gateway-ports": ports}));
}

/// Applies a Service of this protocol that asks for a gateway port, and lets its pods become ready.
fn apply(api_server: &mut FakeApiServer, object_name: &str, port: Option<&str>, protocol: &str) {
    let mut template = template(&format!("{object_name}:v1"), 1);
    template["metadata"]["annotations"][key::PROTOCOL] = json!(protocol);
    let resource = ResourceKind::KnativeService;
    let mut body = json!({
        "apiVersion": resource.api_version(), "kind": resource.kind(),
        "metadata": {"name": object_name, "namespace": NAMESPACE, "annotations": {}, "labels": {}},
        "spec": {"template": template},
    });
    if let Some(port) = port {
        body["metadata"]["annotations"][key::GATEWAY_PORT] = json!(port);
    }
    for event in api_server.apply(resource, &name(object_name), body) {
        api_server.step(event);
    }
    api_server.report_all_ready();
    api_server.now = api_server.now.plus_ms(2000);
}

fn apply_tcp(api_server: &mut FakeApiServer, object_name: &str, port: &str) {
    apply(api_server, object_name, Some(port), "tcp");
}

/// Returns the Services with a gateway port, after a check that a replica that starts now has the same Services. Its pods
/// differ, because no agent has reported to it.
fn port_owners(api_server: &FakeApiServer) -> Vec<String> {
    let (table, other) = (api_server.table(), table(&api_server.start_replica()));
    assert_eq!(table.services, other.services);
    let owners = table.services.iter().filter_map(|(name, entry)| {
        let port = entry.gateway_rules.as_ref()?.gateway_port?;
        Some(format!("{}:{port}", name.name))
    });
    owners.collect()
}

fn condition(api_server: &FakeApiServer, object_name: &str) -> String {
    api_server.condition(ResourceKind::Route, object_name, "GatewayPortReady")
}

fn event_reasons(api_server: &FakeApiServer) -> Vec<&str> {
    api_server.object_events.iter().map(|it| it.reason.as_str()).collect()
}

fn record_name() -> NamespacedName {
    NamespacedName::new("knative-serving", PORT_RECORD_NAME)
}

/// Returns the record of the owners of ports; `null` if there is none.
fn record(api_server: &FakeApiServer) -> Value {
    let record = api_server.objects.get(&(ResourceKind::ConfigMap, record_name()));
    record.map(|it| it["data"].clone()).unwrap_or_default()
}

/// Returns the entry of a Service's Route in the record.
fn entry(api_server: &FakeApiServer, object_name: &str) -> String {
    let uid = &api_server.object(ResourceKind::Route, object_name)["metadata"]["uid"];
    format!("{NAMESPACE}/{object_name} {}", uid.as_str().expect("a UID"))
}

const TAKEN: &str =
    "False GatewayPortTaken: Port 5432 is already in use by Route \"default/first\"";

#[test]
fn a_service_of_raw_tcp_gets_a_permitted_port() {
    let mut api_server = FakeApiServer::new();
    permit_ports(&mut api_server, "5432,6000-6100");
    apply_tcp(&mut api_server, "first", "5432");
    apply_tcp(&mut api_server, "second", "6050");
    assert_eq!(port_owners(&api_server), ["first:5432", "second:6050"]);
    assert_eq!(condition(&api_server, "first"), "True : ");
    let (first, second) = (entry(&api_server, "first"), entry(&api_server, "second"));
    assert_eq!(record(&api_server), json!({"5432": first, "6050": second}));
    apply(&mut api_server, "first", None, "tcp");
    assert_eq!(port_owners(&api_server), ["second:6050"]);
    assert_eq!(record(&api_server), json!({"6050": second}));
    assert_eq!(
        condition(&api_server, "first"),
        "True NotRequested: The Route asks for no gateway port."
    );
    assert_eq!(event_reasons(&api_server), [""; 0]);
}

#[test]
fn the_first_keeps_a_port_and_the_second_gets_it_later() {
    for deletes in [true, false] {
        let mut api_server = FakeApiServer::new();
        permit_ports(&mut api_server, "5432");
        apply_tcp(&mut api_server, "first", "5432");
        apply_tcp(&mut api_server, "second", "5432");
        assert_eq!(port_owners(&api_server), ["first:5432"]);
        assert_eq!(condition(&api_server, "second"), TAKEN);
        let ready = api_server.condition(ResourceKind::KnativeService, "second", "Ready");
        assert_eq!(ready, "True : ", "clients inside reach it");
        assert_eq!(event_reasons(&api_server), ["GatewayPortTaken"]);
        assert_eq!(api_server.object_events[0].name, name("second"));
        if deletes {
            api_server.delete_as_user(ResourceKind::KnativeService, "first");
        } else {
            apply(&mut api_server, "first", None, "tcp");
        }
        assert_eq!(port_owners(&api_server), ["second:5432"]);
        assert_eq!(condition(&api_server, "second"), "True : ");
    }
}

/// Without the record an older Service would take the port from the younger one that has it.
#[test]
fn an_older_service_that_asks_later_gets_no_port() {
    let mut api_server = FakeApiServer::new();
    permit_ports(&mut api_server, "5432");
    apply(&mut api_server, "older", None, "tcp");
    apply_tcp(&mut api_server, "first", "5432");
    apply_tcp(&mut api_server, "older", "5432");
    assert_eq!(port_owners(&api_server), ["first:5432"]);
    assert_eq!(condition(&api_server, "older"), TAKEN);
}

/// Returns the Services with a gateway port at the leader.
fn present_owners(api_server: &FakeApiServer) -> Vec<String> {
    let services = api_server.table().services;
    let owners = services.iter().filter_map(|(name, entry)| {
        Some(format!("{}:{}", name.name, entry.gateway_rules.as_ref()?.gateway_port?))
    });
    owners.collect()
}

/// Its claim may come while the record of the younger one is on its way.
#[test]
fn an_older_service_that_asks_before_the_record_is_observed_gets_no_port() {
    let mut api_server = FakeApiServer::new();
    permit_ports(&mut api_server, "5432,6000");
    apply_tcp(&mut api_server, "other", "6000");
    apply(&mut api_server, "older", None, "tcp");
    apply(&mut api_server, "first", None, "tcp");
    api_server.withhold(ResourceKind::ConfigMap, record_name());
    apply_tcp(&mut api_server, "first", "5432");
    assert_eq!(present_owners(&api_server), ["other:6000"], "no replica knows the record yet");
    assert_eq!(condition(&api_server, "first"), "Unknown : ");
    apply_tcp(&mut api_server, "older", "5432");
    assert_eq!(present_owners(&api_server), ["other:6000"]);
    let (first, other) = (entry(&api_server, "first"), entry(&api_server, "other"));
    assert_eq!(record(&api_server), json!({"5432": first, "6000": other}));
    assert!(api_server.conflicts > 0, "the leader has tried to record the older one");
    api_server.deliver();
    assert_eq!(port_owners(&api_server), ["first:5432", "other:6000"]);
    assert_eq!(record(&api_server), json!({"5432": first, "6000": other}));
    assert_eq!(condition(&api_server, "first"), "True : ");
    assert_eq!(condition(&api_server, "older"), TAKEN);
}

/// A leader that has just begun may not have observed the last write of the one before.
#[test]
fn a_new_leader_takes_no_port_from_the_owner_that_the_last_one_has_recorded() {
    let mut api_server = FakeApiServer::new();
    permit_ports(&mut api_server, "5432,6000");
    apply_tcp(&mut api_server, "other", "6000");
    apply(&mut api_server, "older", None, "tcp");
    api_server.withhold(ResourceKind::ConfigMap, record_name());
    apply_tcp(&mut api_server, "first", "5432");
    api_server.step(ControllerEvent::LeadershipChanged(false));
    apply_tcp(&mut api_server, "older", "5432");
    api_server.step(ControllerEvent::LeadershipChanged(true));
    assert_eq!(present_owners(&api_server), ["other:6000"]);
    api_server.deliver();
    assert_eq!(port_owners(&api_server), ["first:5432", "other:6000"]);
}

/// Users of a namespace may write its Services, and the status of its Routes.
#[test]
fn no_object_of_a_namespace_shows_who_came_first() {
    let mut api_server = FakeApiServer::new();
    permit_ports(&mut api_server, "5432");
    apply(&mut api_server, "older", None, "tcp");
    apply_tcp(&mut api_server, "first", "5432");
    let mut forged = api_server.object(ResourceKind::Service, "older").clone();
    forged["metadata"]["annotations"][key::OWNED_GATEWAY_PORT] = json!("5432");
    for event in api_server.apply(ResourceKind::Service, &name("older"), forged) {
        api_server.step(event);
    }
    apply_tcp(&mut api_server, "older", "5432");
    assert_eq!(port_owners(&api_server), ["first:5432"]);
    assert_eq!(condition(&api_server, "older"), TAKEN);
}

#[test]
fn a_service_that_is_made_again_waits_and_a_deleted_record_is_written_again() {
    let mut api_server = FakeApiServer::new();
    permit_ports(&mut api_server, "5432");
    apply_tcp(&mut api_server, "first", "5432");
    apply_tcp(&mut api_server, "second", "5432");
    api_server.delete_as_user(ResourceKind::KnativeService, "first");
    apply_tcp(&mut api_server, "first", "5432");
    assert_eq!(port_owners(&api_server), ["second:5432"], "the name alone is not recorded");
    for event in api_server.delete(ResourceKind::ConfigMap, &record_name()) {
        api_server.step(event);
    }
    assert_eq!(record(&api_server), json!({"5432": entry(&api_server, "second")}));
    assert_eq!(port_owners(&api_server), ["second:5432"]);
}

/// Controllers of earlier releases recorded owners on placeholders only.
#[test]
fn an_upgrade_takes_over_the_owners_that_placeholders_record() {
    let mut api_server = FakeApiServer::new();
    permit_ports(&mut api_server, "5432");
    apply(&mut api_server, "older", None, "tcp");
    apply_tcp(&mut api_server, "first", "5432");
    apply_tcp(&mut api_server, "older", "5432");
    let first = entry(&api_server, "first");
    api_server.objects.remove(&(ResourceKind::ConfigMap, record_name()));
    assert_eq!(port_owners(&api_server), ["first:5432"], "by the annotation alone");

    api_server.machine = machine().loading();
    api_server.other_replica = None;
    for event in observations(&api_server.objects, &[]) {
        api_server.step(event);
    }
    api_server.step(ControllerEvent::InitialListSynced);
    api_server.report_all_ready();
    api_server.step(ControllerEvent::LeadershipChanged(true));
    assert_eq!(record(&api_server), json!({"5432": first}));
    assert_eq!(port_owners(&api_server), ["first:5432"]);
    // Controllers that are not upgraded yet follow the annotation.
    let placeholder = api_server.object(ResourceKind::Service, "first");
    assert_eq!(placeholder["metadata"]["annotations"][key::OWNED_GATEWAY_PORT], "5432");
}

/// Users of a namespace may write the annotation, and wait until an operator deletes the record by mistake.
#[test]
fn a_deleted_record_changes_no_owner() {
    let mut api_server = FakeApiServer::new();
    permit_ports(&mut api_server, "5432");
    apply(&mut api_server, "older", None, "tcp");
    apply_tcp(&mut api_server, "first", "5432");
    apply_tcp(&mut api_server, "older", "5432");
    let first = entry(&api_server, "first");
    for event in api_server.delete(ResourceKind::ConfigMap, &record_name()) {
        api_server.step(event);
    }
    assert_eq!(record(&api_server), json!({"5432": first}));
    assert_eq!(port_owners(&api_server), ["first:5432"]);
    // An entry that an operator removes gives the port to the oldest.
    let metadata = json!({"name": PORT_RECORD_NAME, "namespace": "knative-serving"});
    let emptied = json!({"metadata": metadata, "data": {}});
    for event in api_server.apply(ResourceKind::ConfigMap, &record_name(), emptied) {
        api_server.step(event);
    }
    assert_eq!(port_owners(&api_server), ["older:5432"]);
    assert_eq!(record(&api_server), json!({"5432": entry(&api_server, "older")}));
}

/// Without the entry, an older service that asks for the port later would take it.
#[test]
fn an_entry_that_an_operator_removes_is_written_again_for_the_only_service() {
    let mut api_server = FakeApiServer::new();
    permit_ports(&mut api_server, "5432");
    apply(&mut api_server, "older", None, "tcp");
    apply_tcp(&mut api_server, "first", "5432");
    // The edited object keeps the annotation of the last apply.
    let mut edited = api_server.objects[&(ResourceKind::ConfigMap, record_name())].clone();
    edited["data"] = json!({});
    for event in api_server.apply(ResourceKind::ConfigMap, &record_name(), edited) {
        api_server.step(event);
    }
    assert_eq!(record(&api_server), json!({"5432": entry(&api_server, "first")}));
    apply_tcp(&mut api_server, "older", "5432");
    assert_eq!(port_owners(&api_server), ["first:5432"]);
}

#[test]
fn a_port_that_no_service_may_have_is_refused_with_the_reason() {
    let mut api_server = FakeApiServer::new();
    permit_ports(&mut api_server, "443,8000-30000");
    for (port, refusal) in [
        (
            "5432",
            "False GatewayPortNotPermitted: Port 5432 is not permitted: it is not in rouse.dev.gateway-ports in config-network",
        ),
        ("443", "False GatewayPortReserved: Port 443 is one of the activators' own ports"),
        ("8080", "False GatewayPortReserved: Port 8080 is one of the activators' own ports"),
        ("20017", "False GatewayPortReserved: Port 20017 is one of the activators' own ports"),
        ("0", "False InvalidGatewayPort: rouse.dev/port is \"0\": use a port, 1 to 65535"),
        // Permitted, if the sign were ignored.
        ("+9000", "False InvalidGatewayPort: rouse.dev/port is \"+9000\": use a port, 1 to 65535"),
    ] {
        apply_tcp(&mut api_server, "first", port);
        assert_eq!(condition(&api_server, "first"), refusal);
        assert_eq!(port_owners(&api_server), [""; 0]);
    }
    assert_eq!(api_server.object_events.len(), 6);
    assert!(record(&api_server).is_null());
    // The permission may come later.
    apply_tcp(&mut api_server, "first", "5432");
    permit_ports(&mut api_server, "5432");
    assert_eq!(port_owners(&api_server), ["first:5432"]);
    permit_ports(&mut api_server, "");
    assert_eq!(port_owners(&api_server), [""; 0], "a permission that ends closes the port");
}

#[test]
fn only_a_service_of_raw_tcp_that_is_public_has_a_port() {
    let mut api_server = FakeApiServer::new();
    permit_ports(&mut api_server, "5432");
    apply(&mut api_server, "first", Some("5432"), "http1");
    assert_eq!(port_owners(&api_server), [""; 0]);
    assert_eq!(
        condition(&api_server, "first"),
        "False NotRawTcp: Only raw TCP has a port outside: set rouse.dev/protocol: tcp on the template"
    );
    api_server.delete_as_user(ResourceKind::KnativeService, "first");
    apply_tcp(&mut api_server, "second", "5432");
    assert_eq!(port_owners(&api_server), ["second:5432"]);
    let mut body = api_server.object(ResourceKind::KnativeService, "second").clone();
    body["metadata"]["labels"][key::VISIBILITY] = json!("cluster-local");
    for event in api_server.apply(ResourceKind::KnativeService, &name("second"), body) {
        api_server.step(event);
    }
    assert_eq!(port_owners(&api_server), [""; 0]);
    assert_eq!(
        condition(&api_server, "second"),
        "False ClusterLocal: A service that is cluster-local has no port outside"
    );
}

/// A tag is reached at its own name inside the cluster.
#[test]
fn a_tag_has_no_port() {
    let mut api_server = FakeApiServer::new();
    permit_ports(&mut api_server, "5432");
    apply_tcp(&mut api_server, "first", "5432");
    let mut body = api_server.object(ResourceKind::KnativeService, "first").clone();
    body["spec"]["traffic"] = json!([{"latestRevision": true, "percent": 100, "tag": "now"}]);
    for event in api_server.apply(ResourceKind::KnativeService, &name("first"), body) {
        api_server.step(event);
    }
    assert!(api_server.table().services.contains_key(&name("now-first")));
    assert_eq!(port_owners(&api_server), ["first:5432"]);
}
