//! Names that two objects claim: the first keeps its name. The second reports that, and gets it when the first is
//! deleted.

use common::wire::ServiceEntry;

use super::*;

const NOT_OWNED: &str =
    "False NotOwned: There is an existing placeholder Service \"v2-web\" that we do not own.";

/// Applies a service `web`, which has the name `<tag>-web` for each of its tags.
fn apply_web_with_tags(api_server: &mut FakeApiServer, tags: &[&str]) {
    let mut traffic = vec![json!({"latestRevision": true, "percent": 100})];
    traffic.extend(tags.iter().map(|it| json!({"latestRevision": true, "percent": 0, "tag": it})));
    api_server.apply_service("web", "web:v1", 0, json!(traffic));
    api_server.now = api_server.now.plus_ms(2000);
}

/// Applies a service that has the name `v2-web` itself.
fn apply_v2_web(api_server: &mut FakeApiServer) {
    api_server.apply_service("v2-web", "own:v1", 0, Value::Null);
    api_server.now = api_server.now.plus_ms(2000);
}

/// Returns the table's service of a name, after a check that a replica that starts now has the same table.
fn service_in_tables(api_server: &FakeApiServer, name: &NamespacedName) -> Option<ServiceEntry> {
    let (table, other) = (api_server.table(), table(&api_server.start_replica()));
    assert_eq!(differences(&table, &other), [""; 0]);
    table.services.get(name).cloned()
}

/// Returns the Revisions to which a name is routed.
fn target_revisions(api_server: &FakeApiServer, object_name: &str) -> String {
    let service = service_in_tables(api_server, &name(object_name)).expect("a service");
    service.targets.iter().map(|it| it.revision.name.to_string()).collect()
}

fn ready(api_server: &FakeApiServer, name: &str) -> String {
    api_server.condition(ResourceKind::KnativeService, name, "Ready")
}

#[test]
fn a_tag_keeps_its_name_when_a_service_of_that_name_comes() {
    let mut api_server = FakeApiServer::new();
    apply_web_with_tags(&mut api_server, &["v2"]);
    let before = service_in_tables(&api_server, &name("v2-web"));
    apply_v2_web(&mut api_server);
    assert_eq!(api_server.condition(ResourceKind::Route, "v2-web", "IngressReady"), NOT_OWNED);
    assert_eq!(
        (ready(&api_server, "web"), ready(&api_server, "v2-web")),
        ("True : ".into(), NOT_OWNED.into())
    );
    assert_eq!(target_revisions(&api_server, "v2-web"), "web-00001");
    assert_eq!(service_in_tables(&api_server, &name("v2-web")), before);
    api_server.delete_as_user(ResourceKind::KnativeService, "v2-web");
    assert_eq!(
        service_in_tables(&api_server, &name("v2-web")),
        before,
        "the end of the other one changes nothing"
    );
    assert_eq!(ready(&api_server, "web"), "True : ");
    apply_v2_web(&mut api_server);
    api_server.delete_as_user(ResourceKind::KnativeService, "web");
    assert_eq!(
        (target_revisions(&api_server, "v2-web"), ready(&api_server, "v2-web")),
        ("v2-web-00001".into(), "True : ".into())
    );
}

#[test]
fn a_service_keeps_its_name_when_a_tag_of_that_name_comes() {
    // The Route with the tag is the older one in the second case.
    for web_is_older in [false, true] {
        let mut api_server = FakeApiServer::new();
        if web_is_older {
            apply_web_with_tags(&mut api_server, &[]);
        }
        apply_v2_web(&mut api_server);
        let before = service_in_tables(&api_server, &name("v2-web"));
        apply_web_with_tags(&mut api_server, &["v2"]);
        assert_eq!(
            (ready(&api_server, "web"), ready(&api_server, "v2-web")),
            (NOT_OWNED.into(), "True : ".into())
        );
        assert_eq!(target_revisions(&api_server, "v2-web"), "v2-web-00001");
        assert_eq!(target_revisions(&api_server, "web"), "web-00001", "its other names are served");
        assert_eq!(service_in_tables(&api_server, &name("v2-web")), before);
        api_server.delete_as_user(ResourceKind::KnativeService, "web");
        assert_eq!(service_in_tables(&api_server, &name("v2-web")), before);
        apply_web_with_tags(&mut api_server, &["v2"]);
        api_server.delete_as_user(ResourceKind::KnativeService, "v2-web");
        assert_eq!(
            (target_revisions(&api_server, "v2-web"), ready(&api_server, "web")),
            ("web-00001".into(), "True : ".into())
        );
    }
}

fn apply_in_namespace(
    api_server: &mut FakeApiServer,
    resource: ResourceKind,
    namespace: &str,
    name: &str,
    spec: Value,
) {
    let body = json!({
        "apiVersion": resource.api_version(), "kind": resource.kind(),
        "metadata": {"name": name, "namespace": namespace}, "spec": spec,
    });
    for event in api_server.apply(resource, &NamespacedName::new(namespace, name), body) {
        api_server.step(event);
    }
}

fn delete_in_namespace(
    api_server: &mut FakeApiServer,
    resource: ResourceKind,
    namespace: &str,
    name: &str,
) {
    for event in api_server.delete(resource, &NamespacedName::new(namespace, name)) {
        api_server.step(event);
    }
}

fn apply_shop(api_server: &mut FakeApiServer, namespace: &str) {
    let spec = json!({"template": template("shop:v1", 0)});
    apply_in_namespace(api_server, ResourceKind::KnativeService, namespace, "shop", spec);
}

fn map_domain_to_shop(api_server: &mut FakeApiServer, namespace: &str, domain: &str) {
    let target = json!({"apiVersion": "serving.knative.dev/v1", "kind": "Service", "name": "shop"});
    let spec = json!({"ref": target});
    apply_in_namespace(api_server, ResourceKind::DomainMapping, namespace, domain, spec);
}

fn condition(
    api_server: &FakeApiServer,
    resource: ResourceKind,
    name: &NamespacedName,
    condition_type: &str,
) -> String {
    let all = api_server.objects[&(resource, name.clone())]["status"]["conditions"].clone();
    let all = all.as_array().cloned().unwrap_or_default();
    let it = all.into_iter().find(|it| it["type"] == condition_type).unwrap_or_default();
    let word = |field: &str| it[field].as_str().unwrap_or_default().to_owned();
    format!("{} {}: {}", word("status"), word("reason"), word("message"))
}

/// Returns every external host of a team's shop.
fn hosts(api_server: &FakeApiServer, namespace: &str) -> Vec<String> {
    let Some(it) = service_in_tables(api_server, &NamespacedName::new(namespace, "shop")) else {
        return Vec::new();
    };
    let domains = it.gateway_rules.into_iter().flat_map(|it| it.mapped_domains).map(|it| it.host);
    it.hosts.into_iter().chain(domains).collect()
}

#[test]
fn a_host_stays_with_the_route_that_had_it_first() {
    // In the second case the objects are of the same second, and the UID decides.
    for apart_ms in [2000, 0] {
        let mut api_server = FakeApiServer::new();
        api_server
            .set_config_map("config-network", json!({"domain-template": "{{.Name}}.{{.Domain}}"}));
        let (a, b) = (NamespacedName::new("team-a", "shop"), NamespacedName::new("team-b", "shop"));
        apply_shop(&mut api_server, "team-a");
        api_server.now = api_server.now.plus_ms(apart_ms);
        apply_shop(&mut api_server, "team-b");
        let ready = |api_server: &FakeApiServer, route_name: &NamespacedName| {
            condition(api_server, ResourceKind::Route, route_name, "Ready")
        };
        assert_eq!(
            (ready(&api_server, &a), hosts(&api_server, "team-a")),
            ("True : ".into(), vec!["shop.localhost".into()])
        );
        let not_owned = "False NotOwned: The host \"shop.localhost\" is already in use by Route \"team-a/shop\".";
        assert_eq!(
            (ready(&api_server, &b), hosts(&api_server, "team-b")),
            (not_owned.into(), vec![])
        );
        let service_of_b = service_in_tables(&api_server, &b).expect("a service in the cluster");
        assert!(!service_of_b.targets.is_empty());
        delete_in_namespace(&mut api_server, ResourceKind::KnativeService, "team-a", "shop");
        assert_eq!(
            (ready(&api_server, &b), hosts(&api_server, "team-b")),
            ("True : ".into(), vec!["shop.localhost".into()])
        );
        api_server.now = api_server.now.plus_ms(apart_ms);
        apply_shop(&mut api_server, "team-a");
        assert_eq!((hosts(&api_server, "team-a"), hosts(&api_server, "team-b").len()), (vec![], 1));
        delete_in_namespace(&mut api_server, ResourceKind::KnativeService, "team-a", "shop");
        assert_eq!(
            (ready(&api_server, &b), hosts(&api_server, "team-b").len()),
            ("True : ".into(), 1)
        );
    }
}

#[test]
fn a_mapping_does_not_take_the_host_of_another_service() {
    let domain = "shop.team-a.localhost";
    let (a, of_b) = (NamespacedName::new("team-a", "shop"), NamespacedName::new("team-b", domain));
    let mut api_server = FakeApiServer::new();
    api_server
        .set_config_map("config-network", json!({"autocreate-cluster-domain-claims": "true"}));
    apply_shop(&mut api_server, "team-a");
    apply_shop(&mut api_server, "team-b");
    api_server.now = api_server.now.plus_ms(2000);
    let before = service_in_tables(&api_server, &a);
    map_domain_to_shop(&mut api_server, "team-b", domain);
    assert_eq!(
        condition(&api_server, ResourceKind::DomainMapping, &of_b, "Ready"),
        "False DomainAlreadyClaimed: The domain name is already in use by Route \"team-a/shop\""
    );
    assert_eq!(
        (service_in_tables(&api_server, &a), hosts(&api_server, "team-b")),
        (before.clone(), vec!["shop.team-b.localhost".into()])
    );
    delete_in_namespace(&mut api_server, ResourceKind::DomainMapping, "team-b", domain);
    assert_eq!(service_in_tables(&api_server, &a), before, "its end changes nothing");
    map_domain_to_shop(&mut api_server, "team-b", domain);
    delete_in_namespace(&mut api_server, ResourceKind::KnativeService, "team-a", "shop");
    assert_eq!(condition(&api_server, ResourceKind::DomainMapping, &of_b, "Ready"), "True : ");
    assert_eq!(hosts(&api_server, "team-b"), ["shop.team-b.localhost", domain]);
    // Now the mapping is the older one.
    api_server.now = api_server.now.plus_ms(2000);
    apply_shop(&mut api_server, "team-a");
    assert_eq!(
        condition(&api_server, ResourceKind::Route, &a, "Ready"),
        "False NotOwned: The host \"shop.team-a.localhost\" is already in use by DomainMapping \
         \"team-b/shop.team-a.localhost\"."
    );
    assert_eq!((hosts(&api_server, "team-a"), hosts(&api_server, "team-b").len()), (vec![], 2));
    delete_in_namespace(&mut api_server, ResourceKind::DomainMapping, "team-b", domain);
    assert_eq!(
        (condition(&api_server, ResourceKind::Route, &a, "Ready"), hosts(&api_server, "team-a")),
        ("True : ".into(), vec![domain.into()])
    );
}

#[test]
fn a_mapping_to_the_route_that_has_its_host_is_ready() {
    let domain = "shop.team-a.localhost";
    let mut api_server = FakeApiServer::new();
    api_server
        .set_config_map("config-network", json!({"autocreate-cluster-domain-claims": "true"}));
    for route_first in [true, false] {
        if route_first {
            apply_shop(&mut api_server, "team-a");
        }
        api_server.now = api_server.now.plus_ms(2000);
        map_domain_to_shop(&mut api_server, "team-a", domain);
        api_server.now = api_server.now.plus_ms(2000);
        apply_shop(&mut api_server, "team-a");
        let ready = |resource, object_name| {
            condition(&api_server, resource, &NamespacedName::new("team-a", object_name), "Ready")
        };
        assert_eq!(
            (ready(ResourceKind::Route, "shop"), ready(ResourceKind::DomainMapping, domain)),
            ("True : ".into(), "True : ".into())
        );
        assert_eq!(hosts(&api_server, "team-a"), [domain]);
        delete_in_namespace(&mut api_server, ResourceKind::KnativeService, "team-a", "shop");
        delete_in_namespace(&mut api_server, ResourceKind::DomainMapping, "team-a", domain);
    }
}
