//! Defaults, removal of unknown fields, and records of the user.

use serde_json::json;

use super::*;
use crate::model::{config_maps::SecureDefaults, knative::key};

/// Each default of a template (knative/serving `pkg/apis/serving/v1/revision_defaults.go` at 98e5ef9).
#[test]
fn defaults_are_knatives() {
    let (filled, _) = apply_defaults(&create_request(
        AdmittedKind::Service,
        &template("{timeoutSeconds: 301, containers: [{image: a}]}"),
        &FEATURES,
    ));
    let expected = json!({
        "template": {"spec": {
            "containerConcurrency": 0,
            "timeoutSeconds": 301,
            "responseStartTimeoutSeconds": 300,
            "enableServiceLinks": false,
            "containers": [{
                "image": "a",
                "name": "user-container",
                "readinessProbe": {"periodSeconds": 0, "successThreshold": 1, "tcpSocket": {"port": 0}},
            }],
        }},
        "traffic": [{"latestRevision": true, "percent": 100}],
    });
    assert_eq!(filled["spec"], expected);
}

/// Defaults with the feature `secure-pod-defaults` (knative/serving `pkg/apis/serving/v1/revision_defaults.go` at
/// 98e5ef9).
#[test]
fn secure_defaults_fill_unset_fields() {
    let object = container("{image: a, ports: [{containerPort: 80}]}");
    let context_with = |secure_pod_defaults| {
        let features = Features { secure_pod_defaults, ..Features::default() };
        let (filled, _) =
            apply_defaults(&create_request(AdmittedKind::Service, &object, &features));
        assert_eq!(problems_with(AdmittedKind::Service, &filled, &features), "");
        filled["spec"]["template"]["spec"]["containers"][0]["securityContext"].clone()
    };
    assert_eq!(context_with(SecureDefaults::Disabled), Value::Null);
    let bounded = json!({
        "allowPrivilegeEscalation": false,
        "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    });
    assert_eq!(context_with(SecureDefaults::AllowRootBounded), bounded);
    let mut enabled = bounded;
    enabled["runAsNonRoot"] = true.into();
    assert_eq!(context_with(SecureDefaults::Enabled), enabled);
}

#[test]
fn unknown_pod_fields_are_removed_and_reported() {
    let object = template(
        "{speed: 1, timeoutSeconds: 5, containers: [{image: a, imagge: b, ports: [{containerPort: 80, colour: red}]}]}",
    );
    let (filled, mut unknown) =
        apply_defaults(&create_request(AdmittedKind::Service, &object, &FEATURES));
    unknown.sort();
    let at = "spec.template.spec";
    let expected = [
        format!("{at}.containers[0].imagge"),
        format!("{at}.containers[0].ports[0].colour"),
        format!("{at}.speed"),
    ];
    assert_eq!(unknown, expected);
    assert_eq!(filled["spec"]["template"]["spec"]["timeoutSeconds"], 5);
    assert_eq!(problems(AdmittedKind::Service, &object), "");
}

/// A new default of the operator must not require a new name of the Revision.
#[test]
fn a_named_template_gets_no_later_default() {
    let old = yaml(
        "{metadata: {name: a}, spec: {template: {metadata: {name: a-1}, spec: {timeoutSeconds: 7, containers: [{image: x}]}}}}",
    );
    let request = AdmissionRequest {
        old: Some(&old),
        ..create_request(AdmittedKind::Service, &old, &FEATURES)
    };
    let (new, _) = apply_defaults(&request);
    assert_eq!(new["spec"]["template"], old["spec"]["template"]);
    assert_eq!(new["spec"]["traffic"][0]["percent"], 100);
}

#[test]
fn a_named_template_may_be_applied_again_as_it_was_written() {
    let written = yaml(
        "{metadata: {name: a}, spec: {template: {metadata: {name: a-1}, spec: {containers: [{image: x, ports: [{containerPort: 7}]}]}}}}",
    );
    let (filled, _) = apply_defaults(&create_request(AdmittedKind::Service, &written, &FEATURES));
    let reapply = |old: &Value, new: &Value| {
        let request = AdmissionRequest {
            old: Some(old),
            ..create_request(AdmittedKind::Service, new, &FEATURES)
        };
        update_problems(AdmittedKind::Service, old, &apply_defaults(&request).0)
    };
    assert_eq!(reapply(&filled, &written), "");
    let prefix = "Saw the following changes without a name change (-old +new): spec.template.metadata.name\n";
    let mut other = written.clone();
    other["spec"]["template"]["spec"]["containers"][0]["image"] = json!("y");
    let expected = format!("{prefix}spec.containers[0].image:\n\t-: \"x\"\n\t+: \"y\"\n");
    assert_eq!(reapply(&filled, &other), expected, "only the change itself is reported");
    let mut longer = written.clone();
    longer["spec"]["template"]["spec"]["timeoutSeconds"] = json!(77);
    let (longer, _) = apply_defaults(&create_request(AdmittedKind::Service, &longer, &FEATURES));
    let expected = format!("{prefix}spec.timeoutSeconds:\n\t-: 77\n\t+: <unset>\n");
    assert_eq!(reapply(&longer, &written), expected, "a removed field is a change, too");
}

/// Annotations with creator and last modifier: the first never changes, the second changes only with the spec.
#[test]
fn creators_are_recorded_and_not_rewritten() {
    let object = container("{image: a}");
    let apply_as = |user, old, object| {
        apply_defaults(&AdmissionRequest {
            user: Some(user),
            old,
            ..create_request(AdmittedKind::Service, object, &FEATURES)
        })
        .0
    };
    let filled = apply_as("ann", None, &object);
    let recorded_users = |object: &Value| {
        let all = &object["metadata"]["annotations"];
        (all[key::CREATOR].clone(), all[key::LAST_MODIFIER].clone())
    };
    assert_eq!(recorded_users(&filled), (json!("ann"), json!("ann")));
    let reapplied = apply_as("bob", Some(&filled), &filled);
    assert_eq!(
        recorded_users(&reapplied),
        (json!("ann"), json!("ann")),
        "nothing of the spec changed"
    );
    let mut changed = filled.clone();
    changed["spec"]["template"]["spec"]["containers"][0]["image"] = "b".into();
    let changed = apply_as("bob", Some(&filled), &changed);
    assert_eq!(recorded_users(&changed), (json!("ann"), json!("bob")));
    // A user who may write the object could otherwise name another one.
    let mut forged = filled.clone();
    forged["metadata"]["annotations"][key::CREATOR] = "eve".into();
    let expected =
        "annotation value is immutable: metadata.annotations.serving.knative.dev/creator";
    assert_eq!(update_problems(AdmittedKind::Service, &filled, &forged), expected);
    let mut forged = filled.clone();
    forged["metadata"]["annotations"][key::LAST_MODIFIER] = "eve".into();
    let expected = "invalid value: eve: metadata.annotations.serving.knative.dev/lastModifier";
    assert_eq!(update_problems(AdmittedKind::Service, &filled, &forged), expected);
    let owned = yaml(
        "{metadata: {name: a, ownerReferences: [{apiVersion: v, kind: Service, name: a, uid: u}]}, spec: {traffic: [{configurationName: a, percent: 100}]}}",
    );
    // The Service that owns the Route records both.
    let child = apply_defaults(&AdmissionRequest {
        user: Some("ann"),
        ..create_request(AdmittedKind::Route, &owned, &FEATURES)
    })
    .0;
    assert_eq!(child["metadata"]["annotations"], Value::Null);
}

/// The spec of a Revision, a pointer into it, and the value expected there after defaulting.
type DefaultedField = (String, String, Value);

/// Spec with one container that has these fields.
fn one(fields: &str) -> String {
    format!("{{containers: [{{image: a, {fields}}}]}}")
}

/// Spec with two containers that have these fields.
fn two(one: &str, other: &str) -> String {
    format!("{{containers: [{{image: a, {one}}}, {{image: b, {other}}}]}}")
}

/// Pointer to a field of the first container.
fn first(field: &str) -> String {
    format!("containers/0/{field}")
}

/// Defaults of the fields beside the containers.
fn pod_defaults() -> Vec<DefaultedField> {
    let pod = |spec: &str| format!("{{containers: [{{image: a}}], {spec}}}");
    let mut table = Vec::new();
    for (text, timeout, start) in [
        ("", 300, Value::Null),
        ("timeoutSeconds: null", 300, Value::Null),
        ("timeoutSeconds: 0", 300, Value::Null),
        ("timeoutSeconds: 300", 300, Value::Null),
        ("timeoutSeconds: 301", 301, json!(300)),
        ("timeoutSeconds: 301, responseStartTimeoutSeconds: 0", 301, json!(0)),
        ("timeoutSeconds: 301, responseStartTimeoutSeconds: null", 301, json!(300)),
    ] {
        table.push((pod(text), "timeoutSeconds".into(), json!(timeout)));
        // Only beside a longer timeout: the default must not exceed it.
        table.push((pod(text), "responseStartTimeoutSeconds".into(), start));
        table.push((pod(text), "idleTimeoutSeconds".into(), Value::Null));
    }
    for (text, expected) in [
        ("", 0),
        ("containerConcurrency: null", 0),
        ("containerConcurrency: 0", 0),
        ("containerConcurrency: 7", 7),
    ] {
        table.push((pod(text), "containerConcurrency".into(), json!(expected)));
    }
    for (text, expected) in
        [("", false), ("enableServiceLinks: null", false), ("enableServiceLinks: true", true)]
    {
        table.push((pod(text), "enableServiceLinks".into(), json!(expected)));
    }
    table
}

fn container_defaults() -> Vec<DefaultedField> {
    let mut table = Vec::new();
    for text in ["", "name: ''", "name: null"] {
        table.push((one(text), first("name"), json!("user-container")));
    }
    table.extend([
        (two("name: x", ""), "containers/1/name".into(), json!("user-container-0")),
        (two("", ""), "containers/1/name".into(), json!("user-container-1")),
        (two("name: user-container-0", ""), "containers/1/name".into(), json!("user-container-1")),
    ]);
    let number = |port: &str| (one(&format!("ports: [{port}]")), first("ports/0/containerPort"));
    for (port, expected) in [
        ("{name: h2c}", 8080),
        ("{name: h2c, containerPort: 0}", 8080),
        ("{name: h2c, containerPort: null}", 8080),
        ("{}", 8080),
        ("{containerPort: 81}", 81),
    ] {
        let (spec, at) = number(port);
        table.push((spec, at, json!(expected)));
    }
    table.push((one("ports: []"), first("ports"), json!([])));
    table
}

fn probe_defaults() -> Vec<DefaultedField> {
    let mut table = Vec::new();
    for probe in
        ["", "readinessProbe: null", "readinessProbe: {}", "readinessProbe: {tcpSocket: null}"]
    {
        table.push((one(probe), first("readinessProbe/tcpSocket"), json!({"port": 0})));
        table.push((one(probe), first("readinessProbe/successThreshold"), json!(1)));
        table.push((one(probe), first("readinessProbe/failureThreshold"), Value::Null));
    }
    let get = |rest: &str| one(&format!("readinessProbe: {{httpGet: {{path: /}}, {rest}}}"));
    for (rest, failures, timeout) in [
        ("", Value::Null, Value::Null),
        // Period 0 is Knative's own probing, which takes no threshold and no timeout.
        ("periodSeconds: 0", Value::Null, Value::Null),
        ("periodSeconds: null", Value::Null, Value::Null),
        ("periodSeconds: 3", json!(3), json!(1)),
        ("periodSeconds: 3, failureThreshold: 0, timeoutSeconds: 0", json!(3), json!(1)),
        ("periodSeconds: 3, failureThreshold: 5, timeoutSeconds: 2", json!(5), json!(2)),
    ] {
        table.push((get(rest), first("readinessProbe/failureThreshold"), failures));
        table.push((get(rest), first("readinessProbe/timeoutSeconds"), timeout));
        table.push((get(rest), first("readinessProbe/successThreshold"), json!(1)));
    }
    let beside = |probe: &str| two("ports: [{containerPort: 80}]", probe);
    table.extend([
        (beside(""), "containers/1/readinessProbe".into(), Value::Null),
        (
            beside("readinessProbe: {httpGet: {port: 81}, periodSeconds: 2}"),
            "containers/1/readinessProbe/failureThreshold".into(),
            json!(3),
        ),
        (
            beside("readinessProbe: {grpc: {port: 81}}"),
            "containers/1/readinessProbe/grpc/service".into(),
            json!(""),
        ),
    ]);
    for probe in ["livenessProbe", "readinessProbe", "startupProbe"] {
        let text = one(&format!("{probe}: {{grpc: {{port: 0}}}}"));
        table.push((text, first(&format!("{probe}/grpc/service")), json!("")));
    }
    table
}

/// Defaults of knative/serving `pkg/apis/serving/v1/revision_defaults.go`: values after defaulting of fields that were
/// absent, `null`, zero or empty.
#[test]
fn defaults_of_what_is_absent_null_zero_or_empty_are_knatives() {
    let table = [pod_defaults(), container_defaults(), probe_defaults()];
    for (spec, at, expected) in table.into_iter().flatten() {
        let (filled, _) =
            apply_defaults(&create_request(AdmittedKind::Service, &template(&spec), &FEATURES));
        let at = format!("/spec/template/spec/{at}");
        assert_eq!(filled.pointer(&at).unwrap_or(&Value::Null), &expected, "{spec}: {at}");
    }
}

#[test]
fn defaults_of_traffic_are_knatives() {
    for traffic in ["", "traffic: null", "traffic: []"] {
        let object =
            service(&format!("{{template: {{spec: {{containers: [{{image: a}}]}}}}, {traffic}}}"));
        let (filled, _) =
            apply_defaults(&create_request(AdmittedKind::Service, &object, &FEATURES));
        assert_eq!(filled["spec"]["traffic"], json!([{"latestRevision": true, "percent": 100}]));
    }
    for (target, expected) in [
        ("{}", json!({"latestRevision": true, "percent": 0})),
        ("{revisionName: ''}", json!({"revisionName": "", "latestRevision": true, "percent": 0})),
        (
            "{revisionName: a-1, percent: null}",
            json!({"revisionName": "a-1", "latestRevision": false, "percent": 0}),
        ),
    ] {
        let object = service(&format!(
            "{{template: {{spec: {{containers: [{{image: a}}]}}}}, traffic: [{target}]}}"
        ));
        let (filled, _) =
            apply_defaults(&create_request(AdmittedKind::Service, &object, &FEATURES));
        assert_eq!(filled["spec"]["traffic"][0], expected, "{target}");
    }
}
