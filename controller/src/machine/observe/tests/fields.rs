//! The tables of `docs/fields.md`, row by row: what is accepted has effect, or a warning says that it has none.

use super::*;
use crate::{
    config_maps::{Defaults, Features, read},
    crds,
    parse::{
        Platform as Where, Rules,
        admit::{Kind, Question, Verdict, default, validate},
    },
    policy::AutoscalerConfig,
};

const PAGE: &str = include_str!("../../../../../docs/fields.md");

#[derive(Debug)]
struct Row {
    on: String,
    field: String,
    value: Value,
    effect: String,
}

/// What stands between backticks.
fn quoted(cell: &str) -> Option<&str> {
    cell.trim().strip_prefix('`')?.strip_suffix('`')
}

fn rows() -> Vec<Row> {
    let row = |line: &str| {
        let cells: Vec<&str> = line.strip_prefix("| ")?.strip_suffix(" |")?.split(" | ").collect();
        let [on, field, value, effect] = cells[..] else { return None };
        Some(Row {
            on: on.into(),
            field: quoted(field)?.into(),
            value: serde_json::from_str(quoted(value)?).expect("a value in JSON"),
            effect: effect.into(),
        })
    };
    PAGE.lines().filter_map(row).collect()
}

fn service() -> Value {
    json!({
        "apiVersion": "serving.knative.dev/v1", "kind": "Service",
        "metadata": {"name": "hello", "namespace": SPACE, "annotations": {}, "labels": {}},
        "spec": {
            "template": {
                "metadata": {"annotations": {}, "labels": {}},
                "spec": {"containers": [{"image": "hello:v1"}]},
            },
        },
    })
}

/// A Service with what a row says.
fn with(row: &Row) -> Value {
    let mut it = service();
    let at = match row.on.as_str() {
        "annotation" => "/metadata/annotations",
        "label" => "/metadata/labels",
        "template annotation" => "/spec/template/metadata/annotations",
        "template label" => "/spec/template/metadata/labels",
        "spec" => "/spec/template/spec",
        "container" => "/spec/template/spec/containers/0",
        "traffic" => {
            it["spec"]["traffic"] = json!([{"percent": 100}]);
            "/spec/traffic/0"
        }
        other => panic!("no such place: {other}"),
    };
    it.pointer_mut(at).expect("it is there")[row.field.as_str()] = row.value.clone();
    it
}

/// What admission says of it, and makes of it.
fn admit(object: &Value, feature: Option<&str>) -> (Value, Verdict) {
    let keys = feature.map(|key| (key.to_owned(), "enabled".to_owned()));
    let features: Features = read(&keys.into_iter().collect()).expect("a feature").value;
    let (defaults, autoscaler) = (Defaults::default(), AutoscalerConfig::default());
    let rules = Rules {
        platform: Where::Kubernetes,
        defaults: &defaults,
        features: &features,
        autoscaler: &autoscaler,
        cluster_domain: "cluster.local",
    };
    let ask = Question { kind: Kind::Service, object, old: None, user: None, rules };
    let (filled, unknown) = default(&ask);
    assert_eq!(unknown, [""; 0]);
    let verdict = validate(&Question { object: &filled, ..ask });
    (filled, verdict)
}

/// All that is made of a Service and said of it to others, but for what is copied there and does nothing.
fn outcome(object: &Value) -> String {
    let mut cluster = Cluster::new();
    cluster.follower = None;
    for event in cluster.apply(Resource::KnativeService, &name("hello"), object.clone()) {
        cluster.step(event);
    }
    cluster.ready();
    let mut deployment = cluster.object(Resource::Deployment, "hello-00001-deployment").clone();
    let labels = deployment.pointer_mut("/spec/template/metadata/labels").expect("labels");
    labels.as_object_mut().expect("a map").retain(|key, _| !key.to_lowercase().ends_with("uid"));
    deployment["spec"]["selector"].take();
    let table = cluster.table();
    let services = table.services.values().map(|it| {
        format!("{} {:?} {:?} {:?} {:?}", it.name, it.targets, it.path, it.hosts, it.ingress)
    });
    let services: Vec<String> = services.collect();
    let pods: Vec<String> =
        table.pods.values().map(|it| format!("{:?} {}", it.probe, it.port)).collect();
    let revisions: Vec<_> = table.revisions.values().collect();
    format!("{}\n{services:?}\n{revisions:?}\n{pods:?}", deployment["spec"])
}

fn try_row(row: &Row) {
    let said = format!("{} {}", row.on, row.field);
    let (word, rest) = row.effect.split_once([' ', ':']).unwrap_or((&row.effect, ""));
    if word == "see" {
        let test = rest.split('`').nth(1).expect("a test");
        return assert!(is_test(test), "{said}: there is no test {test}");
    }
    let object = with(row);
    let feature = rest.strip_prefix("with `").and_then(|it| it.split('`').next());
    let (filled, verdict) = admit(&object, feature);
    let says = |it: &str| it.contains("has no effect") && it.contains(&row.field);
    let warned = verdict.warnings.iter().any(|it| says(&it.to_string()));
    let refused = !verdict.problems.is_empty();
    assert_eq!(refused, word == "refused", "{said}: {:?}", verdict.problems);
    assert_eq!(warned, word == "warned", "{said}: {:?}", verdict.warnings);
    match word {
        "works" => {
            if feature.is_some() {
                let (_, without) = admit(&object, None);
                assert!(!without.problems.is_empty(), "{said} without its feature");
            }
            assert_ne!(outcome(&filled), outcome(&admit(&service(), None).0), "{said}");
        }
        "refused" | "warned" => {}
        other => panic!("{said}: what does {other:?} mean?"),
    }
}

/// Whether a test of this name stands in our own sources.
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
    assert!(rows.len() > 80, "the page could not be read: {}", rows.len());
    rows.iter().for_each(try_row);
}

/// A field that comes to the schema has to come to the page.
#[test]
fn the_page_has_every_field_of_a_service() {
    let all = crds::all();
    let service = all.iter().find(|it| it["spec"]["names"]["kind"] == "Service").expect("one");
    let spec = &service["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];
    let template = &spec["properties"]["template"]["properties"]["spec"];
    let rows = rows();
    for (on, schema) in [
        ("spec", template),
        ("container", &template["properties"]["containers"]["items"]),
        ("traffic", &spec["properties"]["traffic"]["items"]),
    ] {
        for field in schema["properties"].as_object().expect("fields").keys() {
            assert!(rows.iter().any(|it| it.on == on && it.field == *field), "{on} {field}");
        }
    }
}

#[test]
fn a_domain_says_that_its_certificate_is_not_used() {
    let mut cluster = Cluster::new();
    let at = "www.shop.test";
    let to = json!({"apiVersion": "serving.knative.dev/v1", "kind": "Service", "name": "hello"});
    let spec = json!({"ref": to, "tls": {"secretName": "own"}});
    cluster.user(Resource::DomainMapping, at, spec);
    assert_eq!(
        cluster.condition(Resource::DomainMapping, at, "CertificateProvisioned"),
        "False CertificateNotReady: The gateway serves no TLS: Secret \"own\" is not used"
    );
}
