//! A Revision's own Service: the targets of its slice, and the mode of its ServerlessService.

use super::*;

/// Returns the mode of the ServerlessService, and the addresses of the slice with their port.
fn way(cluster: &FakeApiServer, revision: &str) -> (String, Vec<String>) {
    let mode = cluster.object(ResourceKind::ServerlessService, revision)["spec"]["mode"].clone();
    let Some(slice) = cluster.objects.get(&(ResourceKind::EndpointSlice, name(revision))) else {
        return (mode.as_str().unwrap_or_default().into(), Vec::new());
    };
    let service = cluster.object(ResourceKind::Service, revision);
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
fn proxied() -> (String, Vec<String>) {
    ("Proxy".into(), vec!["10.1.0.9:8012".into()])
}

#[test]
fn the_service_of_a_revision_leads_to_its_pods_or_to_activators() {
    let mut cluster = FakeApiServer::new();
    cluster.service("hello", "hello:v1", 0, Value::Null);
    assert_eq!(way(&cluster, "hello-00001"), proxied(), "asleep");
    cluster.decide("hello-00001", 2);
    assert_eq!(way(&cluster, "hello-00001"), proxied(), "no pod is ready yet");
    cluster.ready();
    let (mode, addresses) = way(&cluster, "hello-00001");
    let pods = cluster.names(ResourceKind::Pod).into_iter().filter(|it| it.namespace == SPACE);
    let of =
        |it: NamespacedName| cluster.objects[&(ResourceKind::Pod, it)]["status"]["podIP"].clone();
    let mut wanted: Vec<_> = pods.map(of).collect();
    wanted.sort_by_key(ToString::to_string);
    let mut wanted: Vec<String> =
        wanted.iter().map(|it| format!("{}:8080", it.as_str().unwrap_or_default())).collect();
    wanted.sort();
    let mut addresses = addresses;
    addresses.sort();
    assert_eq!((mode.as_str(), addresses), ("Serve", wanted));
    cluster.decide("hello-00001", 0);
    cluster.now = cluster.now.plus_ms(1_000_000);
    cluster.step(ControllerEvent::Tick);
    assert_eq!(way(&cluster, "hello-00001"), proxied(), "asleep again");
}

#[test]
fn it_leads_to_activators_wherever_requests_go_by_them() {
    let limited = |template: &mut Value| template["spec"]["containerConcurrency"] = json!(1);
    let asked = |template: &mut Value| {
        template["metadata"]["annotations"]["rouse.dev/path"] = json!("activator");
    };
    let timed = |template: &mut Value| template["spec"]["idleTimeoutSeconds"] = json!(7);
    let h2c = |template: &mut Value| {
        let port = json!([{"containerPort": 8080, "name": "h2c", "protocol": "TCP"}]);
        template["spec"]["containers"][0]["ports"] = port;
    };
    let kinds: [(&str, ObjectMutation); 4] =
        [("limit", limited), ("path", asked), ("timeout", timed), ("h2c", h2c)];
    for (why, change) in kinds {
        let mut cluster = FakeApiServer::new();
        let mut template = template("hello:v1", 1);
        change(&mut template);
        cluster.user(ResourceKind::KnativeService, "hello", json!({"template": template}));
        cluster.ready();
        cluster.decide("hello-00001", 1);
        assert_eq!(
            cluster.table().services[&name("hello")].connection_path,
            ConnectionPath::Activator,
            "{why}"
        );
        assert_eq!(way(&cluster, "hello-00001"), proxied(), "{why}");
    }
}

#[test]
fn it_follows_a_split_and_its_end() {
    let mut cluster = FakeApiServer::new();
    cluster.service("hello", "hello:v1", 1, Value::Null);
    cluster.ready();
    cluster.decide("hello-00001", 1);
    assert_eq!(way(&cluster, "hello-00001").0, "Serve");
    let half = json!([
        {"revisionName": "hello-00001", "latestRevision": false, "percent": 50},
        {"latestRevision": true, "percent": 50},
    ]);
    cluster.service("hello", "hello:v2", 1, half);
    cluster.ready();
    cluster.decide("hello-00002", 1);
    assert_eq!(way(&cluster, "hello-00001"), proxied());
    assert_eq!(way(&cluster, "hello-00002"), proxied());
    cluster.service("hello", "hello:v2", 1, json!([{"latestRevision": true, "percent": 100}]));
    assert_eq!(way(&cluster, "hello-00002").0, "Serve");
    // A Revision without a Route serves for as long as it has pods.
    cluster.decide("hello-00001", 0);
    cluster.now = cluster.now.plus_ms(1_000_000);
    cluster.step(ControllerEvent::Tick);
    assert_eq!(way(&cluster, "hello-00001"), ("Proxy".into(), vec![]));
}

#[test]
fn it_follows_the_activators() {
    let mut cluster = FakeApiServer::new();
    cluster.service("hello", "hello:v1", 0, Value::Null);
    cluster.step(activator("activator-2", false));
    cluster.step(activator("activator-1", true));
    let slice = cluster.object(ResourceKind::EndpointSlice, "hello-00001");
    assert_eq!(slice["endpoints"][0]["targetRef"]["name"], "activator-2");
    assert_eq!(slice["endpoints"].as_array().map(Vec::len), Some(1));
}
