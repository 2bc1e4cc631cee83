//! Labels and annotations that child objects inherit, for each pair of kinds once, as in Knative.

use super::*;

/// Returns the labels or annotations of an object.
fn metadata_of(
    api_server: &FakeApiServer,
    resource: ResourceKind,
    name: &str,
    field: &str,
) -> BTreeMap<String, String> {
    let object = &api_server.object(resource, name)["metadata"][field];
    serde_json::from_value(object.clone()).unwrap_or_default()
}

/// Applies a Service with these labels and annotations, on itself and on its template.
fn apply(api_server: &mut FakeApiServer, own: &Value, inner: &Value, image: &str) {
    let mut template = template(image, 0);
    template["metadata"]["labels"] = inner["labels"].clone();
    for (key, value) in inner["annotations"].as_object().into_iter().flatten() {
        template["metadata"]["annotations"][key] = value.clone();
    }
    let traffic = json!([{"latestRevision": true, "percent": 100, "tag": "now"}]);
    let body = json!({
        "apiVersion": "serving.knative.dev/v1", "kind": "Service",
        "metadata": {
            "name": "hello", "namespace": NAMESPACE,
            "labels": own["labels"], "annotations": own["annotations"],
        },
        "spec": {"template": template, "traffic": traffic},
    });
    for event in api_server.apply(ResourceKind::KnativeService, &name("hello"), body) {
        api_server.step(event);
    }
}

fn objects_with(api_server: &FakeApiServer, field: &str, key: &str) -> Vec<String> {
    let all = api_server.objects.keys().filter(|(resource, it)| {
        it.namespace == NAMESPACE
            && *resource != ResourceKind::KnativeService
            && metadata_of(api_server, *resource, &it.name, field).contains_key(key)
    });
    all.map(|(resource, it)| format!("{}/{}", resource.kind(), it.name)).collect()
}

/// Returns labels and annotations for the template.
fn template_metadata() -> Value {
    json!({
        "labels": {"inner": "c"},
        "annotations": {"inner-note": "d", "autoscaling.knative.dev/metric": "rps", "autoscaling.knative.dev/window": "20s"},
    })
}

/// Returns a service that has some of each.
fn labelled() -> FakeApiServer {
    let mut api_server = FakeApiServer::new();
    let own = json!({
        "labels": {"team": "a", "networking.knative.dev/visibility": "cluster-local"},
        "annotations": {
            key::CREATOR: "maker", key::LAST_MODIFIER: "changer", "note": "b",
            (key::ROLLOUT_DURATION[0]): "10s",
        },
    });
    apply(&mut api_server, &own, &template_metadata(), "hello:v1");
    api_server
}

#[test]
fn each_pair_of_kinds_passes_on_what_knative_does() {
    let api_server = labelled();
    let rollout = key::ROLLOUT_DURATION[0];
    let of_service = ["Configuration/hello", "Route/hello", "Service/hello", "Service/now-hello"];
    let with_slices = |rest: &[&str]| -> BTreeSet<String> {
        rest.iter()
            .chain(&["EndpointSlice/hello", "EndpointSlice/now-hello"])
            .map(|it| (*it).to_owned())
            .collect()
    };
    let all = |it: &[&str]| -> BTreeSet<String> { it.iter().map(|it| (*it).to_owned()).collect() };
    let set = |api_server: &FakeApiServer, field: &str, key: &str| -> BTreeSet<String> {
        objects_with(api_server, field, key).into_iter().collect()
    };
    let (deployment, image) =
        ("Deployment/hello-00001-deployment", "Image/hello-00001-cache-user-container");
    let services = ["Service/hello-00001", "Service/hello-00001-private"];
    let scaled = ["PodAutoscaler/hello-00001", "ServerlessService/hello-00001"];
    let revision = "Revision/hello-00001";
    let slice = "EndpointSlice/hello-00001";
    let below = [&[revision, deployment, image, slice][..], &services, &scaled].concat();
    assert_eq!(set(&api_server, "labels", "team"), with_slices(&of_service));
    assert_eq!(
        set(&api_server, "labels", key::VISIBILITY),
        all(&of_service[..2]),
        "a Service's is its user's"
    );
    assert_eq!(set(&api_server, "annotations", "note"), all(&of_service));
    assert_eq!(set(&api_server, "annotations", key::LAST_MODIFIER), all(&of_service));
    assert_eq!(
        set(&api_server, "annotations", key::CREATOR),
        all(&[&of_service[..], &below].concat())
    );
    let of_revision =
        metadata_of(&api_server, ResourceKind::Revision, "hello-00001", "annotations");
    assert_eq!(of_revision[key::CREATOR], "changer");
    assert_eq!(set(&api_server, "annotations", rollout), all(&of_service[1..]));
    assert_eq!(set(&api_server, "labels", "inner"), all(&below));
    assert_eq!(set(&api_server, "annotations", "inner-note"), all(&below));
    let served = [&services[..], &["ServerlessService/hello-00001"]].concat();
    let window = [&[revision, "PodAutoscaler/hello-00001"][..], &served].concat();
    assert_eq!(set(&api_server, "annotations", "autoscaling.knative.dev/window"), all(&window));
    assert_eq!(
        set(&api_server, "annotations", "autoscaling.knative.dev/metric"),
        all(&[revision, "PodAutoscaler/hello-00001"])
    );
}

#[test]
fn inherited_metadata_follows_changes_and_removals() {
    let mut api_server = labelled();
    let other = json!({
        "labels": {"team": "z"},
        "annotations": {key::CREATOR: "maker", key::LAST_MODIFIER: "another", "note": "y"},
    });
    apply(&mut api_server, &other, &template_metadata(), "hello:v1");
    let labels = metadata_of(&api_server, ResourceKind::Service, "now-hello", "labels");
    let annotations = metadata_of(&api_server, ResourceKind::Service, "now-hello", "annotations");
    assert_eq!((labels["team"].as_str(), annotations["note"].as_str()), ("z", "y"));
    let of_revision =
        metadata_of(&api_server, ResourceKind::Revision, "hello-00001", "annotations");
    assert_eq!(of_revision[key::CREATOR], "changer");
    let none = json!({"annotations": {key::CREATOR: "maker", key::LAST_MODIFIER: "another"}});
    apply(&mut api_server, &none, &template_metadata(), "hello:v1");
    assert!(objects_with(&api_server, "labels", "team").is_empty());
    assert!(objects_with(&api_server, "annotations", "note").is_empty());
    assert_eq!(api_server.names(ResourceKind::Revision), [name("hello-00001")]);
}

/// The label on a Kubernetes Service is the user's, so it stays when the Knative Service becomes public.
#[test]
fn a_tag_that_is_hidden_by_itself_stays_so_when_its_service_becomes_public() {
    let hosts = |api_server: &FakeApiServer, own: &str| {
        api_server.table().services[&name(own)].hosts.clone()
    };
    let none = Vec::<String>::new();
    for (by_itself, of_tag) in
        [(true, none.clone()), (false, vec!["now-hello.default.localhost".to_owned()])]
    {
        let mut api_server = labelled();
        let own = (ResourceKind::Service, name("now-hello"));
        if by_itself {
            let mut object = api_server.objects[&own].clone();
            object["metadata"]["labels"][key::VISIBILITY] = json!("cluster-local");
            api_server.objects.insert(own.clone(), object.clone());
            api_server.step(ControllerEvent::ObjectObserved {
                resource: own.0,
                name: own.1.clone(),
                object: Some(Box::new(object)),
            });
        }
        assert_eq!(
            [hosts(&api_server, "hello"), hosts(&api_server, "now-hello")],
            [none.clone(), none.clone()]
        );
        let public = json!({"annotations": {key::CREATOR: "maker", key::LAST_MODIFIER: "changer"}});
        apply(&mut api_server, &public, &template_metadata(), "hello:v1");
        assert_eq!(hosts(&api_server, "hello"), ["hello.default.localhost"]);
        assert_eq!(hosts(&api_server, "now-hello"), of_tag);
        let labels = metadata_of(&api_server, own.0, "now-hello", "labels");
        assert_eq!(labels.contains_key(key::VISIBILITY), by_itself);
    }
}
