//! A Revision's own Service: the targets of its slice, and the mode of its ServerlessService.

use super::*;

/// Returns the mode of the ServerlessService, and the addresses of the slice with their port.
fn mode_and_endpoints(api_server: &FakeApiServer, revision: &str) -> (String, Vec<String>) {
    let mode = api_server.object(ResourceKind::ServerlessService, revision)["spec"]["mode"].clone();
    let Some(slice) = api_server.objects.get(&(ResourceKind::EndpointSlice, name(revision))) else {
        return (mode.as_str().unwrap_or_default().into(), Vec::new());
    };
    let service = api_server.object(ResourceKind::Service, revision);
    assert_eq!(slice["ports"][0]["name"], service["spec"]["ports"][0]["name"]);
    let meta = &slice["metadata"];
    assert_eq!(meta["labels"]["kubernetes.io/service-name"], revision);
    assert_eq!(meta["ownerReferences"][0]["kind"], "Revision");
    let port = &slice["ports"][0]["port"];
    let of = |it: &Value| format!("{}:{port}", it["addresses"][0].as_str().unwrap_or_default());
    let all = slice["endpoints"].as_array().expect("a list").iter().map(of);
    (mode.as_str().unwrap_or_default().into(), all.collect())
}

/// A change of the usual template.
type ObjectMutation = fn(&mut Value);

/// Returns mode and address for the activator path; activators find the Revision by the request's host.
fn activator_endpoints() -> (String, Vec<String>) {
    ("Proxy".into(), vec!["10.1.0.9:8012".into()])
}

#[test]
fn the_service_of_a_revision_leads_to_its_pods_or_to_activators() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    assert_eq!(mode_and_endpoints(&api_server, "hello-00001"), activator_endpoints(), "asleep");
    api_server.decide("hello-00001", 2);
    assert_eq!(
        mode_and_endpoints(&api_server, "hello-00001"),
        activator_endpoints(),
        "no pod is ready yet"
    );
    api_server.report_all_ready();
    let (mode, addresses) = mode_and_endpoints(&api_server, "hello-00001");
    let pods =
        api_server.names(ResourceKind::Pod).into_iter().filter(|it| it.namespace == NAMESPACE);
    let of = |it: NamespacedName| {
        api_server.objects[&(ResourceKind::Pod, it)]["status"]["podIP"].clone()
    };
    let mut expected: Vec<_> = pods.map(of).collect();
    expected.sort_by_key(ToString::to_string);
    let mut expected: Vec<String> =
        expected.iter().map(|it| format!("{}:8080", it.as_str().unwrap_or_default())).collect();
    expected.sort();
    let mut addresses = addresses;
    addresses.sort();
    assert_eq!((mode.as_str(), addresses), ("Serve", expected));
    api_server.decide("hello-00001", 0);
    api_server.now = api_server.now.plus_ms(1_000_000);
    api_server.step(ControllerEvent::Tick);
    assert_eq!(
        mode_and_endpoints(&api_server, "hello-00001"),
        activator_endpoints(),
        "asleep again"
    );
}

#[test]
fn the_service_of_a_revision_on_the_activator_path_leads_to_activators() {
    let with_limit = |template: &mut Value| template["spec"]["containerConcurrency"] = json!(1);
    let with_path = |template: &mut Value| {
        template["metadata"]["annotations"]["rouse.dev/path"] = json!("activator");
    };
    let with_timeout = |template: &mut Value| template["spec"]["idleTimeoutSeconds"] = json!(7);
    let with_h2c = |template: &mut Value| {
        let port = json!([{"containerPort": 8080, "name": "h2c", "protocol": "TCP"}]);
        template["spec"]["containers"][0]["ports"] = port;
    };
    let kinds: [(&str, ObjectMutation); 4] =
        [("limit", with_limit), ("path", with_path), ("timeout", with_timeout), ("h2c", with_h2c)];
    for (case, change) in kinds {
        let mut api_server = FakeApiServer::new();
        let mut template = template("hello:v1", 1);
        change(&mut template);
        api_server.apply_as_user(
            ResourceKind::KnativeService,
            "hello",
            json!({"template": template}),
        );
        api_server.report_all_ready();
        api_server.decide("hello-00001", 1);
        assert_eq!(
            api_server.table().services[&name("hello")].connection_path,
            ConnectionPath::Activator,
            "{case}"
        );
        assert_eq!(mode_and_endpoints(&api_server, "hello-00001"), activator_endpoints(), "{case}");
    }
}

#[test]
fn the_service_of_a_revision_follows_a_split_and_its_end() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 1, Value::Null);
    api_server.report_all_ready();
    api_server.decide("hello-00001", 1);
    assert_eq!(mode_and_endpoints(&api_server, "hello-00001").0, "Serve");
    let half = json!([
        {"revisionName": "hello-00001", "latestRevision": false, "percent": 50},
        {"latestRevision": true, "percent": 50},
    ]);
    api_server.apply_service("hello", "hello:v2", 1, half);
    api_server.report_all_ready();
    api_server.decide("hello-00002", 1);
    assert_eq!(mode_and_endpoints(&api_server, "hello-00001"), activator_endpoints());
    assert_eq!(mode_and_endpoints(&api_server, "hello-00002"), activator_endpoints());
    api_server.apply_service(
        "hello",
        "hello:v2",
        1,
        json!([{"latestRevision": true, "percent": 100}]),
    );
    assert_eq!(mode_and_endpoints(&api_server, "hello-00002").0, "Serve");
    // A Revision without a Route serves for as long as it has pods.
    api_server.decide("hello-00001", 0);
    api_server.now = api_server.now.plus_ms(1_000_000);
    api_server.step(ControllerEvent::Tick);
    assert_eq!(mode_and_endpoints(&api_server, "hello-00001"), ("Proxy".into(), vec![]));
}

#[test]
fn the_slice_of_a_revision_follows_the_activators() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    api_server.step(activator("activator-2", false));
    api_server.step(activator("activator-1", true));
    let slice = api_server.object(ResourceKind::EndpointSlice, "hello-00001");
    assert_eq!(slice["endpoints"][0]["targetRef"]["name"], "activator-2");
    assert_eq!(slice["endpoints"].as_array().map(Vec::len), Some(1));
}
