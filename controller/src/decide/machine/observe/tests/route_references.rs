//! Routes that name Revisions of other apps, whichever of both is observed first.

use super::*;

fn apply_route(api_server: &mut FakeApiServer, revision: &str) {
    let traffic = json!({"traffic": [{"revisionName": revision, "percent": 100}]});
    api_server.apply_as_user(ResourceKind::Route, "way", traffic);
}

#[test]
fn a_route_finds_a_revision_that_is_observed_after_it() {
    let mut api_server = FakeApiServer::new();
    apply_route(&mut api_server, "hello-00001");
    assert_eq!(api_server.table().services[&name("way")].targets, []);
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    api_server.apply_service("hello", "hello:v2", 0, Value::Null);
    let targets = &api_server.table().services[&name("way")].targets;
    assert_eq!(targets[0].revision, name("hello-00001"));
    let labels = &api_server.object(ResourceKind::Revision, "hello-00001")["metadata"]["labels"];
    assert_eq!(labels[key::ROUTING_STATE], "active", "it must not scale or go as one in reserve");
    let waiting = |api_server: &FakeApiServer| {
        api_server.machine.cluster().names.routes_of_unknown_revisions.len()
    };
    assert_eq!(waiting(&api_server), 0);
    apply_route(&mut api_server, "other-00001");
    assert_eq!(waiting(&api_server), 1);
    api_server.delete_as_user(ResourceKind::Route, "way");
    assert_eq!(waiting(&api_server), 0);
}
