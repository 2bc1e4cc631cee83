//! The rows of objects other than Services: objects that a user may write, and objects that Rouse makes.

use k8s_openapi::api::core::v1::ServiceSpec;

use super::*;
use crate::{model::object::names, write::crds};

const DOMAIN: &str = "www.shop.test";

/// Returns a minimal object of a kind that a user may write.
pub(super) fn base(kind: AdmittedKind) -> Value {
    let code = || service()["spec"]["template"].clone();
    let (version, own, spec) = match kind {
        AdmittedKind::Service => return service(),
        AdmittedKind::Configuration => ("v1", "hello", json!({"template": code()})),
        AdmittedKind::Route => {
            ("v1", "way", json!({"traffic": [{"configurationName": "hello", "percent": 100}]}))
        }
        AdmittedKind::Revision => ("v1", "hello-00001", code()["spec"].clone()),
        AdmittedKind::DomainMapping => {
            let to =
                json!({"apiVersion": "serving.knative.dev/v1", "kind": "Route", "name": "way"});
            ("v1beta1", DOMAIN, json!({"ref": to}))
        }
        other => panic!("{other:?} is made, not written"),
    };
    json!({
        "apiVersion": format!("serving.knative.dev/{version}"), "kind": format!("{kind:?}"),
        "metadata": {"name": own, "namespace": NAMESPACE, "annotations": {}, "labels": {}},
        "spec": spec,
    })
}

/// Applies this object, and minimal objects of the other kinds among Configuration, Route and DomainMapping. The
/// annotations of a Revision go to the one that was made from the Configuration.
pub(super) fn apply_without_service(kind: AdmittedKind, object: &Value) -> FakeApiServer {
    let mut api_server = FakeApiServer::new();
    api_server.other_replica = None;
    api_server.claim_domain(DOMAIN, NAMESPACE);
    for (which, resource) in [
        (AdmittedKind::Configuration, ResourceKind::Configuration),
        (AdmittedKind::Route, ResourceKind::Route),
        (AdmittedKind::DomainMapping, ResourceKind::DomainMapping),
    ] {
        let own = if which == kind { object.clone() } else { admit(which, &base(which), None).0 };
        let at = name(own["metadata"]["name"].as_str().expect("a name"));
        for event in api_server.apply(resource, &at, own) {
            api_server.step(event);
        }
    }
    api_server.report_all_ready();
    if kind == AdmittedKind::Revision {
        annotate(&mut api_server, &object["metadata"]["annotations"]);
    }
    api_server
}

fn annotate(api_server: &mut FakeApiServer, annotations: &Value) {
    let key = (ResourceKind::Revision, name("hello-00001"));
    let mut object = api_server.objects[&key].clone();
    for (key, value) in annotations.as_object().into_iter().flatten() {
        object["metadata"]["annotations"][key] = value.clone();
    }
    api_server.objects.insert(key.clone(), object.clone());
    api_server.step(ControllerEvent::ObjectObserved {
        resource: key.0,
        name: key.1,
        object: Some(Box::new(object)),
    });
}

/// Checks a row of an object that Rouse makes: a field that Rouse sets is restored after a change.
pub(super) fn try_made(row: &FieldRow) {
    let context = format!("{} {}", row.on, row.field);
    let spec = made_spec(&row.on).unwrap_or_else(|| panic!("no such place: {}", row.on));
    let is_set = !follow(&spec, &row.field).is_null();
    let word = row.effect.split(':').next();
    assert!(matches!(word, Some("put right" | "kept")), "{context}: what does {word:?} mean?");
    assert_eq!(is_set, word == Some("put right"), "{context}: {spec}");
}

/// Returns the spec of an object that Rouse makes, as it is applied. `shell/api/object_cache.rs` and, on an API server,
/// `controller/tests/apiserver/main.rs` show that the writer restores it after another client's change.
fn made_spec(on: &str) -> Option<Value> {
    let mut object = service();
    let spec = &mut object["spec"]["template"]["spec"];
    spec["serviceAccountName"] = "own".into();
    spec["imagePullSecrets"] = json!([{"name": "pull"}]);
    let mut api_server = FakeApiServer::new();
    for event in api_server.apply(ResourceKind::KnativeService, &name("hello"), object) {
        api_server.step(event);
    }
    let (resource, own) = match on {
        "PodAutoscaler" => (ResourceKind::PodAutoscaler, "hello-00001".to_owned()),
        "ServerlessService" => (ResourceKind::ServerlessService, "hello-00001".to_owned()),
        "Image" => (ResourceKind::Image, "hello-00001-cache-user-container".to_owned()),
        "Service of a name" => (ResourceKind::Service, "hello".to_owned()),
        "Service `<revision>`" => (ResourceKind::Service, "hello-00001".to_owned()),
        "Service `<revision>-private`" => {
            (ResourceKind::Service, names::private_service_name("hello-00001"))
        }
        _ => return None,
    };
    let mut spec = api_server.object(resource, &own)["spec"].clone();
    // The API server allocates ClusterIPs, in the model too.
    spec.as_object_mut().expect("a spec").remove("clusterIPs");
    Some(spec)
}

/// Returns the schema of a kind's spec.
pub(super) fn spec_of(kind: &str) -> Value {
    let all = crds::all_definitions();
    let crd = all.iter().find(|it| it["spec"]["names"]["kind"] == kind).expect("such a kind");
    let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    schema["properties"]["spec"].clone()
}

/// Collects the paths of a schema's fields that have no fields of their own.
fn collect_leaf_paths(schema: &Value, path: &str, into: &mut Vec<String>) {
    let inner = schema["properties"].as_object();
    for (name, field) in inner.into_iter().flatten() {
        let at = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        match field["items"].is_object() {
            true => collect_leaf_paths(&field["items"], &format!("{at}[]"), into),
            false => collect_leaf_paths(field, &at, into),
        }
    }
    if inner.is_none_or(serde_json::Map::is_empty) {
        into.push(path.to_owned());
    }
}

#[test]
fn the_page_has_every_field_of_the_other_kinds() {
    let rows = rows();
    for kind in [
        "DomainMapping",
        "PodAutoscaler",
        "Metric",
        "ServerlessService",
        "ClusterDomainClaim",
        "Certificate",
        "Ingress",
        "Image",
    ] {
        let mut fields = Vec::new();
        collect_leaf_paths(&spec_of(kind), "", &mut fields);
        for field in fields {
            assert!(rows.iter().any(|it| it.on == kind && it.field == field), "{kind} {field}");
        }
    }
}

/// The page's rows about a Service's template and traffic also apply to Configurations and Routes.
#[test]
fn the_other_kinds_have_no_field_that_a_service_has_not() {
    let fields = |schema: &Value, at: &str| {
        let mut all = Vec::new();
        collect_leaf_paths(schema.pointer(at).expect("a schema"), "", &mut all);
        all
    };
    let service = spec_of("Service");
    let template = "/properties/template";
    let pod = "/properties/template/properties/spec";
    assert_eq!(fields(&spec_of("Configuration"), template), fields(&service, template));
    assert_eq!(fields(&spec_of("Revision"), ""), fields(&service, pod));
    let traffic = "/properties/traffic/items";
    assert_eq!(fields(&spec_of("Route"), traffic), fields(&service, traffic));
    let all: Vec<String> = crds::all_definitions()
        .iter()
        .map(|it| it["spec"]["names"]["kind"].as_str().expect("a kind").to_owned())
        .collect();
    assert_eq!(all.len(), 12, "a kind has come that no test of the page knows: {all:?}");
}

#[test]
fn the_page_has_every_field_of_the_services_of_kubernetes() {
    let schema = schemars::schema_for!(ServiceSpec);
    let fields = schema.get("properties").and_then(Value::as_object).expect("fields");
    let rows = rows();
    for on in ["Service of a name", "Service `<revision>`", "Service `<revision>-private`"] {
        for field in fields.keys() {
            assert!(rows.iter().any(|it| it.on == on && it.field == *field), "{on} {field}");
        }
    }
}

#[test]
fn a_rollout_may_be_asked_for_by_its_older_name() {
    let shares = |on: AdmittedKind| {
        let mut api_server = FakeApiServer::new();
        let mut write = |kind: AdmittedKind, resource: ResourceKind, image: &str| {
            let mut it = base(kind);
            if let Some(field) = it.pointer_mut("/spec/template/spec/containers/0/image") {
                *field = image.into();
            }
            if kind == on {
                it["metadata"]["annotations"]["serving.knative.dev/rolloutDuration"] =
                    "100s".into();
            }
            let at = name(it["metadata"]["name"].as_str().expect("a name"));
            for event in api_server.apply(resource, &at, admit(kind, &it, None).0) {
                api_server.step(event);
            }
            api_server.report_all_ready();
        };
        let (code, resource, way) = match on {
            AdmittedKind::Service => (AdmittedKind::Service, ResourceKind::KnativeService, "hello"),
            _ => (AdmittedKind::Configuration, ResourceKind::Configuration, "way"),
        };
        write(code, resource, "hello:v1");
        if on != AdmittedKind::Service {
            write(AdmittedKind::Route, ResourceKind::Route, "");
        }
        write(code, resource, "hello:v2");
        api_server.table().services[&name(way)].targets.len()
    };
    assert_eq!((shares(AdmittedKind::Service), shares(AdmittedKind::Route)), (2, 2));
    assert_eq!(shares(AdmittedKind::Configuration), 1, "where it has no effect");
}
