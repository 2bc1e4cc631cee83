//! The tables of `docs/fields.md`, row by row: an accepted field has an effect, or a warning states that it has none.

use std::sync::LazyLock;

use super::*;
use crate::{
    model::{
        cluster_state::PlatformKind,
        config_maps::{Features, RevisionDefaults, read},
        problem::Problem,
        scale_policy::{self, ScalePolicyConfig},
    },
    read::parse::{
        RuleSettings,
        admission::{AdmissionRequest, AdmittedKind, ValidationResult, apply_defaults, validate},
        field_mask, known_keys,
    },
};

mod config_map_keys;
mod local_node;
mod other_objects;

const PAGE: &str = include_str!("../../../../../../docs/fields.md");

#[derive(Clone, Debug)]
struct FieldRow {
    on: String,
    field: String,
    value: Value,
    effect: String,
}

/// Returns the text between backticks.
fn quoted(cell: &str) -> Option<&str> {
    cell.trim().strip_prefix('`')?.strip_suffix('`')
}

fn rows() -> Vec<FieldRow> {
    PAGE.lines().flat_map(rows_of).collect()
}

/// Returns the cells of one line of a table.
fn cells(line: &str) -> Vec<&str> {
    let inner = line.strip_prefix("| ").and_then(|it| it.strip_suffix(" |"));
    inner.map(|it| it.split(" | ").collect()).unwrap_or_default()
}

/// Returns the rows of one line: one for each field that it names.
fn rows_of(line: &str) -> Vec<FieldRow> {
    let cells = cells(line);
    let [on, fields, value, effect] = cells[..] else { return Vec::new() };
    let Some(value) = quoted(value) else { return Vec::new() };
    let row = |field: &str| FieldRow {
        on: on.into(),
        field: quoted(field).unwrap_or_else(|| panic!("{field} of {on} is not quoted")).into(),
        value: serde_json::from_str(value)
            .unwrap_or_else(|error| panic!("{value} of {on}: {error}")),
        effect: effect.into(),
    };
    fields.split(", ").flat_map(|it| expand_group(row(it))).collect()
}

fn service() -> Value {
    json!({
        "apiVersion": "serving.knative.dev/v1", "kind": "Service",
        "metadata": {"name": "hello", "namespace": NAMESPACE, "annotations": {}, "labels": {}},
        "spec": {
            "template": {
                "metadata": {"annotations": {}, "labels": {}},
                "spec": {"containers": [{"image": "hello:v1"}]},
            },
        },
    })
}

/// Expands a row about a group of annotations into one row for each of them.
fn expand_group(row: FieldRow) -> Vec<FieldRow> {
    let Some(group) = row.field.strip_suffix('*') else { return vec![row] };
    let names = known_keys::KNOWN_ANNOTATIONS
        .iter()
        .flat_map(|it| it.names)
        .filter(|it| it.starts_with(group));
    names.map(|name| FieldRow { field: (*name).into(), ..row.clone() }).collect()
}

/// Returns an object with the field of a row set; `None` if the row is about something else.
fn object_with_field(row: &FieldRow) -> Option<(AdmittedKind, Value)> {
    let (mut at, kind) = place(&row.on)?;
    let mut object = other_objects::base(kind);
    match row.on.as_str() {
        "traffic" => object["spec"]["traffic"] = json!([{"percent": 100}]),
        "annotation beside class hpa" => {
            let annotations = json!({"autoscaling.knative.dev/class": scale_policy::HPA_CLASS,
                "autoscaling.knative.dev/metric": "cpu", "autoscaling.knative.dev/target": "70"});
            object["spec"]["template"]["metadata"]["annotations"] = annotations;
        }
        _ => {}
    }
    let field = row.field.split(['.', '[']).next().filter(|_| is_of_a_pod(row));
    at.push('/');
    at.push_str(&field.unwrap_or(&row.field).replace('/', "~1"));
    let (parent, own) = at.rsplit_once('/').expect("a place in it");
    object.pointer_mut(parent).expect("it is there")[own.replace("~1", "/")] = row.value.clone();
    add_counterpart(&mut object, row);
    Some((kind, object))
}

/// Adds the counterpart of a row's field: volumes and mounts need each other.
fn add_counterpart(object: &mut Value, row: &FieldRow) {
    let Some(spec) = object.pointer_mut("/spec/template/spec") else { return };
    if row.field.starts_with("volumes[]") {
        let mount = json!([{"name": "v", "mountPath": "/v", "readOnly": true}]);
        spec["containers"][0]["volumeMounts"] = mount;
    } else if row.field.starts_with("volumeMounts[]") {
        spec["volumes"] = json!([{"name": "v", "emptyDir": {}}]);
    }
}

fn is_of_a_pod(row: &FieldRow) -> bool {
    matches!(row.on.as_str(), "spec" | "container")
}

/// Returns the JSON pointer of a row's place, and the kind of the object that contains it.
fn place(on: &str) -> Option<(String, AdmittedKind)> {
    const TEMPLATE: &str = "/spec/template";
    let own = |at: &str| Some((at.to_owned(), AdmittedKind::Service));
    let inner = |at: &str| Some((format!("{TEMPLATE}{at}"), AdmittedKind::Service));
    match on {
        "annotation" => return own("/metadata/annotations"),
        "label" => return own("/metadata/labels"),
        "template annotation" | "annotation beside class hpa" => {
            return inner("/metadata/annotations");
        }
        "template label" => return inner("/metadata/labels"),
        "template metadata" => return inner("/metadata"),
        "spec" => return inner("/spec"),
        "container" => return inner("/spec/containers/0"),
        "traffic" => return own("/spec/traffic/0"),
        _ => {}
    }
    let (what, kind) = on.split_once(" of a ")?;
    let kind = match kind {
        "Configuration" => AdmittedKind::Configuration,
        "Route" => AdmittedKind::Route,
        "DomainMapping" => AdmittedKind::DomainMapping,
        "Revision" => AdmittedKind::Revision,
        _ => return None,
    };
    matches!(what, "annotation" | "label").then(|| (format!("/metadata/{what}s"), kind))
}

/// Runs admission on an object; returns the defaulted object and the verdict.
fn admit(kind: AdmittedKind, object: &Value, feature: Option<&str>) -> (Value, ValidationResult) {
    let keys = feature.map(|key| (key.to_owned(), "enabled".to_owned()));
    let features: Features = read(&keys.into_iter().collect()).expect("a feature").value;
    let (defaults, autoscaler) = (RevisionDefaults::default(), ScalePolicyConfig::default());
    let settings = RuleSettings {
        platform: PlatformKind::Kubernetes,
        defaults: &defaults,
        features: &features,
        autoscaler: &autoscaler,
        cluster_domain: "cluster.local",
        trusts_ingresses: false,
    };
    let ask = AdmissionRequest { kind, object, old: None, user: None, settings };
    let (filled, unknown) = apply_defaults(&ask);
    assert_eq!(unknown, [""; 0]);
    let result = validate(&AdmissionRequest { object: &filled, ..ask });
    (filled, result)
}

/// Returns everything that follows from an object, but for fields that are only copied without an effect.
fn outcome(kind: AdmittedKind, object: &Value) -> String {
    if kind != AdmittedKind::Service {
        return observable_state(&other_objects::apply_without_service(kind, object));
    }
    let mut api_server = FakeApiServer::new();
    api_server.other_replica = None;
    for event in api_server.apply(ResourceKind::KnativeService, &name("hello"), object.clone()) {
        api_server.step(event);
    }
    api_server.report_all_ready();
    observable_state(&api_server)
}

/// Returns the specs that are written and the routes that are sent, as text.
fn observable_state(api_server: &FakeApiServer) -> String {
    let specs = api_server.objects.iter().filter_map(|((resource, name), it)| match resource {
        ResourceKind::Deployment => Some(format!("{name} {}", comparable_spec(it))),
        ResourceKind::HorizontalPodAutoscaler => Some(format!("{name} {}", it["spec"])),
        _ => None,
    });
    let specs: Vec<String> = specs.collect();
    let table = api_server.table();
    let services = table.services.values().map(|it| {
        format!(
            "{} {:?} {:?} {:?} {:?}",
            it.name, it.targets, it.connection_path, it.hosts, it.gateway_rules
        )
    });
    let services: Vec<String> = services.collect();
    let pods: Vec<String> =
        table.pods.values().map(|it| format!("{:?} {}", it.probe, it.port)).collect();
    let revisions: Vec<_> = table.revisions.values().collect();
    format!("{specs:?}\n{services:?}\n{revisions:?}\n{pods:?}")
}

/// Returns a Deployment's spec without the fields that differ from test to test.
fn comparable_spec(deployment: &Value) -> Value {
    let mut spec = deployment["spec"].clone();
    let labels = spec.pointer_mut("/template/metadata/labels").expect("labels");
    labels.as_object_mut().expect("a map").retain(|key, _| !key.to_lowercase().ends_with("uid"));
    spec["selector"].take();
    spec
}

/// Returns the value at the end of a path such as `env[].valueFrom.secretKeyRef`.
fn follow<'a>(mut value: &'a Value, path: &str) -> &'a Value {
    for name in path.split('.') {
        value = &value[name.trim_end_matches("[]")];
        if name.ends_with("[]") {
            // Entries that the platform adds come after the user's.
            value = &value[0];
        }
    }
    value
}

/// Returns true if the pod has the row's field as it was written.
fn pod_has(row: &FieldRow, filled: &Value) -> bool {
    let mut api_server = FakeApiServer::new();
    api_server.other_replica = None;
    for event in api_server.apply(ResourceKind::KnativeService, &name("hello"), filled.clone()) {
        api_server.step(event);
    }
    let pod = &api_server.object(ResourceKind::Deployment, "hello-00001-deployment")["spec"]["template"]
        ["spec"];
    let of = |spec: &Value| {
        let at = if row.on == "container" { &spec["containers"][0] } else { spec };
        follow(at, &row.field).clone()
    };
    let expected = of(&filled["spec"]["template"]["spec"]);
    assert!(!expected.is_null(), "{} {}: its value does not hold it", row.on, row.field);
    expected == of(pod)
}

/// Returns true if the row's field makes any difference.
fn works(row: &FieldRow, kind: AdmittedKind, filled: &Value) -> bool {
    if is_of_a_pod(row) && row.field.contains('.') && pod_has(row, filled) {
        return true;
    }
    static BEFORE: LazyLock<String> = LazyLock::new(|| {
        outcome(AdmittedKind::Service, &admit(AdmittedKind::Service, &service(), None).0)
    });
    let after = outcome(kind, filled);
    match kind {
        AdmittedKind::Service => after != *BEFORE,
        _ => after != outcome(kind, &admit(kind, &other_objects::base(kind), None).0),
    }
}

/// Splits the description of an effect into its first word, such as `works`, and the rest.
fn word(effect: &str) -> (&str, &str) {
    effect.split_once([' ', ':', ';', ',', '.']).unwrap_or((effect, ""))
}

/// Returns true if a warning states that the row's field has no effect.
fn is_warned(row: &FieldRow, warnings: &[Problem]) -> bool {
    let is_warning = |it: &str| it.contains("has no effect") && it.contains(&row.field);
    warnings.iter().any(|it| is_warning(&it.to_string()))
}

/// Returns the rows that fail, so that a failed test shows all of them and not only the first.
fn failing_rows(
    rows: &[FieldRow],
    tries: impl Fn(&FieldRow) + std::panic::RefUnwindSafe,
) -> Vec<&FieldRow> {
    let fails = |row: &&FieldRow| std::panic::catch_unwind(|| tries(row)).is_err();
    rows.iter().filter(fails).collect()
}

fn try_row(row: &FieldRow) {
    let context = format!("{} {}", row.on, row.field);
    let (word, rest) = word(&row.effect);
    if word == "see" {
        let test = rest.split('`').nth(1).expect("a test");
        return assert!(is_test(test), "{context}: there is no test {test}");
    }
    if row.on.starts_with("config-") {
        return config_map_keys::try_row(row, word, rest);
    }
    let Some((kind, object)) = object_with_field(row) else { return other_objects::try_made(row) };
    let feature = rest.strip_prefix("with `").and_then(|it| it.split('`').next());
    let (filled, result) = admit(kind, &object, feature);
    let warned = is_warned(row, &result.warnings);
    let refused = !result.problems.is_empty();
    assert_eq!(refused, word == "refused", "{context}: {:?}", result.problems);
    assert_eq!(warned, word == "warned", "{context}: {:?}", result.warnings);
    match word {
        "works" => {
            if feature.is_some() {
                let (_, without) = admit(kind, &object, None);
                assert!(!without.problems.is_empty(), "{context} without its feature");
            }
            assert!(works(row, kind, &filled), "{context} changes nothing");
        }
        "refused" | "warned" | "written" => {}
        other => panic!("{context}: what does {other:?} mean?"),
    }
}

/// Returns true if a test of this name exists in this crate's sources.
fn is_test(name: &str) -> bool {
    let looks = format!("fn {name}(");
    let own = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut folders = vec![own.join("src"), own.join("tests")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("our sources").flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if std::fs::read_to_string(&path).is_ok_and(|text| text.contains(&looks)) {
                return true;
            }
        }
    }
    false
}

#[test]
fn each_field_does_what_the_page_says() {
    let rows = rows();
    assert!(rows.len() > 500, "the page could not be read: {}", rows.len());
    let wrong = failing_rows(&rows, try_row);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// A field that is added to the schema must be added to the page.
#[test]
fn the_page_has_every_field_of_a_service() {
    let spec = other_objects::spec_of("Service");
    let template = &spec["properties"]["template"]["properties"]["spec"];
    let rows = rows();
    for (on, schema) in [
        ("spec", template),
        ("container", &template["properties"]["containers"]["items"]),
        ("traffic", &spec["properties"]["traffic"]["items"]),
        ("template metadata", &spec["properties"]["template"]["properties"]["metadata"]),
    ] {
        for field in schema["properties"].as_object().expect("fields").keys() {
            assert!(rows.iter().any(|it| it.on == on && it.field == *field), "{on} {field}");
        }
    }
}

/// Fields of the objects inside a pod, one level after the other.
#[test]
fn the_page_has_every_field_that_a_pod_may_have() {
    let mut missing = Vec::new();
    let rows = rows();
    let mut ends = |on: &str, path: &str| {
        let plain = |it: &str| it.replace("[]", "");
        let is = |it: &FieldRow| it.on == on && plain(&it.field) == path;
        if !rows.iter().any(is) {
            missing.push(format!("{on} {path}"));
        }
    };
    ends_of(&field_mask::POD_MASK, "", &mut ends);
    assert_eq!(missing, [""; 0]);
}

/// Calls `visit` for each field of a pod that has no fields of its own, below a container or the spec itself.
fn ends_of(mask: &field_mask::FieldMask, path: &str, visit: &mut impl FnMut(&str, &str)) {
    for (name, field) in mask.0 {
        let path = if path.is_empty() { (*name).to_owned() } else { format!("{path}.{name}") };
        match field {
            // Init containers have the fields of containers.
            field_mask::FieldRule::In(_) if *name == "initContainers" => {}
            field_mask::FieldRule::In(inner) | field_mask::FieldRule::IfIn(_, inner) => {
                ends_of(inner, &path, visit)
            }
            field_mask::FieldRule::Any | field_mask::FieldRule::If(_) => {
                match path.strip_prefix("containers.") {
                    Some(own) => visit("container", own),
                    None => visit("spec", &path),
                }
            }
        }
    }
}

/// Every label and annotation that has a meaning anywhere, in every place where it may be written.
#[test]
fn the_page_has_every_key_wherever_it_stands() {
    let rows = rows();
    let places = ["annotation", "template annotation", "annotation of a Configuration"];
    let more =
        ["annotation of a Route", "annotation of a DomainMapping", "annotation of a Revision"];
    for on in places.into_iter().chain(more) {
        for (table, on) in [
            (&known_keys::KNOWN_ANNOTATIONS[..], on.to_owned()),
            (&known_keys::KNOWN_LABELS[..], on.replace("annotation", "label")),
        ] {
            for key in table.iter().flat_map(|it| it.names) {
                assert!(rows.iter().any(|it| it.on == on && it.field == *key), "{on} {key}");
            }
        }
    }
    let scales = known_keys::KNOWN_ANNOTATIONS.iter().flat_map(|it| it.names);
    for key in scales
        .filter(|it| it.starts_with(scale_policy::AUTOSCALING_PREFIX) && !it.ends_with("/class"))
    {
        let on = "annotation beside class hpa";
        assert!(rows.iter().any(|it| it.on == on && it.field == *key), "{on} {key}");
    }
}

/// As in Knative, the URL depends on the spec alone, and not on the content of the Secret.
#[test]
fn the_url_of_a_domain_with_tls_is_https() {
    let urls = |tls: Value, scheme: &str| {
        let mut api_server = FakeApiServer::new();
        api_server.set_config_map("config-network", json!({"default-external-scheme": scheme}));
        let (domain, kind) = ("www.shop.test", "Service");
        let to = json!({"apiVersion": "serving.knative.dev/v1", "kind": kind, "name": "hello"});
        let spec = json!({"ref": to, "tls": tls});
        api_server.apply_as_user(ResourceKind::DomainMapping, domain, spec);
        let status = &api_server.object(ResourceKind::DomainMapping, domain)["status"];
        [&status["url"], &status["address"]["url"]].map(|it| it.as_str().map(str::to_owned))
    };
    let expected = |url: &str| [Some(url.to_owned()), Some(url.to_owned())];
    let tls = || json!({"secretName": "own"});
    assert_eq!(urls(tls(), "http"), expected("https://www.shop.test"));
    assert_eq!(urls(tls(), "https"), expected("https://www.shop.test"));
    assert_eq!(urls(Value::Null, "http"), expected("http://www.shop.test"));
    assert_eq!(urls(Value::Null, "https"), expected("https://www.shop.test"));
}
