//! Names that two objects claim: the first keeps its name. The second reports that, and gets it when the first is
//! deleted.

use common::wire::ServiceEntry;

use super::*;

const NOT_OWNED: &str =
    "False NotOwned: There is an existing placeholder Service \"v2-web\" that we do not own.";

/// Applies a service that may have the tag `v2`, and so the name `v2-web`.
fn web(cluster: &mut FakeApiServer, tagged: bool) {
    let mut traffic = vec![json!({"latestRevision": true, "percent": 100})];
    traffic.extend(tagged.then(|| json!({"latestRevision": true, "percent": 0, "tag": "v2"})));
    cluster.service("web", "web:v1", 0, json!(traffic));
    cluster.now = cluster.now.plus_ms(2000);
}

/// Applies a service that has the name `v2-web` itself.
fn own(cluster: &mut FakeApiServer) {
    cluster.service("v2-web", "own:v1", 0, Value::Null);
    cluster.now = cluster.now.plus_ms(2000);
}

/// Returns the table's service of a name, after a check that a replica that starts now has the same table.
fn told(cluster: &FakeApiServer, own: &NamespacedName) -> Option<ServiceEntry> {
    let (table, other) = (cluster.table(), table(&cluster.other()));
    assert_eq!(differences(&table, &other), [""; 0]);
    table.services.get(own).cloned()
}

/// Returns the Revisions to which a name is routed.
fn leads(cluster: &FakeApiServer, own: &str) -> String {
    let told = told(cluster, &name(own)).expect("a service");
    told.targets.iter().map(|it| it.revision.name.to_string()).collect()
}

fn ready(cluster: &FakeApiServer, own: &str) -> String {
    cluster.condition(ResourceKind::KnativeService, own, "Ready")
}

#[test]
fn a_tag_keeps_its_name_when_a_service_of_that_name_comes() {
    let mut cluster = FakeApiServer::new();
    web(&mut cluster, true);
    let before = told(&cluster, &name("v2-web"));
    own(&mut cluster);
    assert_eq!(cluster.condition(ResourceKind::Route, "v2-web", "IngressReady"), NOT_OWNED);
    assert_eq!(
        (ready(&cluster, "web"), ready(&cluster, "v2-web")),
        ("True : ".into(), NOT_OWNED.into())
    );
    assert_eq!(leads(&cluster, "v2-web"), "web-00001");
    assert_eq!(told(&cluster, &name("v2-web")), before);
    cluster.remove(ResourceKind::KnativeService, "v2-web");
    assert_eq!(told(&cluster, &name("v2-web")), before, "the end of the other one changes nothing");
    assert_eq!(ready(&cluster, "web"), "True : ");
    own(&mut cluster);
    cluster.remove(ResourceKind::KnativeService, "web");
    assert_eq!(
        (leads(&cluster, "v2-web"), ready(&cluster, "v2-web")),
        ("v2-web-00001".into(), "True : ".into())
    );
}

#[test]
fn a_service_keeps_its_name_when_a_tag_of_that_name_comes() {
    // The Route with the tag is the older one in the second case.
    for web_is_older in [false, true] {
        let mut cluster = FakeApiServer::new();
        if web_is_older {
            web(&mut cluster, false);
        }
        own(&mut cluster);
        let before = told(&cluster, &name("v2-web"));
        web(&mut cluster, true);
        assert_eq!(
            (ready(&cluster, "web"), ready(&cluster, "v2-web")),
            (NOT_OWNED.into(), "True : ".into())
        );
        assert_eq!(leads(&cluster, "v2-web"), "v2-web-00001");
        assert_eq!(leads(&cluster, "web"), "web-00001", "its other names are served");
        assert_eq!(told(&cluster, &name("v2-web")), before);
        cluster.remove(ResourceKind::KnativeService, "web");
        assert_eq!(told(&cluster, &name("v2-web")), before);
        web(&mut cluster, true);
        cluster.remove(ResourceKind::KnativeService, "v2-web");
        assert_eq!(
            (leads(&cluster, "v2-web"), ready(&cluster, "web")),
            ("web-00001".into(), "True : ".into())
        );
    }
}

fn in_team(
    cluster: &mut FakeApiServer,
    resource: ResourceKind,
    space: &str,
    own: &str,
    spec: Value,
) {
    let body = json!({
        "apiVersion": resource.api_version(), "kind": resource.kind(),
        "metadata": {"name": own, "namespace": space}, "spec": spec,
    });
    for event in cluster.apply(resource, &NamespacedName::new(space, own), body) {
        cluster.step(event);
    }
}

fn leave_team(cluster: &mut FakeApiServer, resource: ResourceKind, space: &str, own: &str) {
    for event in cluster.delete(resource, &NamespacedName::new(space, own)) {
        cluster.step(event);
    }
}

fn shop(cluster: &mut FakeApiServer, space: &str) {
    let spec = json!({"template": template("shop:v1", 0)});
    in_team(cluster, ResourceKind::KnativeService, space, "shop", spec);
}

fn shop_map(cluster: &mut FakeApiServer, space: &str, at: &str) {
    let to = json!({"apiVersion": "serving.knative.dev/v1", "kind": "Service", "name": "shop"});
    in_team(cluster, ResourceKind::DomainMapping, space, at, json!({"ref": to}));
}

fn condition(
    cluster: &FakeApiServer,
    resource: ResourceKind,
    own: &NamespacedName,
    which: &str,
) -> String {
    let all = cluster.objects[&(resource, own.clone())]["status"]["conditions"].clone();
    let all = all.as_array().cloned().unwrap_or_default();
    let it = all.into_iter().find(|it| it["type"] == which).unwrap_or_default();
    let word = |field: &str| it[field].as_str().unwrap_or_default().to_owned();
    format!("{} {}: {}", word("status"), word("reason"), word("message"))
}

/// Returns every external host of a team's shop.
fn hosts(cluster: &FakeApiServer, space: &str) -> Vec<String> {
    let Some(it) = told(cluster, &NamespacedName::new(space, "shop")) else { return Vec::new() };
    let domains = it.gateway_rules.into_iter().flat_map(|it| it.mapped_domains).map(|it| it.host);
    it.hosts.into_iter().chain(domains).collect()
}

#[test]
fn a_host_stays_with_the_route_that_had_it_first() {
    // In the second case the objects are of the same second, and the UID decides.
    for apart_ms in [2000, 0] {
        let mut cluster = FakeApiServer::new();
        cluster.config("config-network", json!({"domain-template": "{{.Name}}.{{.Domain}}"}));
        let (a, b) = (NamespacedName::new("team-a", "shop"), NamespacedName::new("team-b", "shop"));
        shop(&mut cluster, "team-a");
        cluster.now = cluster.now.plus_ms(apart_ms);
        shop(&mut cluster, "team-b");
        let is = |cluster: &FakeApiServer, of: &NamespacedName| {
            condition(cluster, ResourceKind::Route, of, "Ready")
        };
        assert_eq!(
            (is(&cluster, &a), hosts(&cluster, "team-a")),
            ("True : ".into(), vec!["shop.localhost".into()])
        );
        let why = "False NotOwned: The host \"shop.localhost\" is already in use by Route \"team-a/shop\".";
        assert_eq!((is(&cluster, &b), hosts(&cluster, "team-b")), (why.into(), vec![]));
        assert!(!told(&cluster, &b).expect("inside the cluster it is there").targets.is_empty());
        leave_team(&mut cluster, ResourceKind::KnativeService, "team-a", "shop");
        assert_eq!(
            (is(&cluster, &b), hosts(&cluster, "team-b")),
            ("True : ".into(), vec!["shop.localhost".into()])
        );
        cluster.now = cluster.now.plus_ms(apart_ms);
        shop(&mut cluster, "team-a");
        assert_eq!((hosts(&cluster, "team-a"), hosts(&cluster, "team-b").len()), (vec![], 1));
        leave_team(&mut cluster, ResourceKind::KnativeService, "team-a", "shop");
        assert_eq!((is(&cluster, &b), hosts(&cluster, "team-b").len()), ("True : ".into(), 1));
    }
}

#[test]
fn a_mapping_does_not_take_the_host_of_another_service() {
    let at = "shop.team-a.localhost";
    let (a, of_b) = (NamespacedName::new("team-a", "shop"), NamespacedName::new("team-b", at));
    let mut cluster = FakeApiServer::new();
    cluster.config("config-network", json!({"autocreate-cluster-domain-claims": "true"}));
    shop(&mut cluster, "team-a");
    shop(&mut cluster, "team-b");
    cluster.now = cluster.now.plus_ms(2000);
    let before = told(&cluster, &a);
    shop_map(&mut cluster, "team-b", at);
    assert_eq!(
        condition(&cluster, ResourceKind::DomainMapping, &of_b, "Ready"),
        "False DomainAlreadyClaimed: The domain name is already in use by Route \"team-a/shop\""
    );
    assert_eq!(
        (told(&cluster, &a), hosts(&cluster, "team-b")),
        (before.clone(), vec!["shop.team-b.localhost".into()])
    );
    leave_team(&mut cluster, ResourceKind::DomainMapping, "team-b", at);
    assert_eq!(told(&cluster, &a), before, "its end changes nothing");
    shop_map(&mut cluster, "team-b", at);
    leave_team(&mut cluster, ResourceKind::KnativeService, "team-a", "shop");
    assert_eq!(condition(&cluster, ResourceKind::DomainMapping, &of_b, "Ready"), "True : ");
    assert_eq!(hosts(&cluster, "team-b"), ["shop.team-b.localhost", at]);
    // Now the mapping is the older one.
    cluster.now = cluster.now.plus_ms(2000);
    shop(&mut cluster, "team-a");
    assert_eq!(
        condition(&cluster, ResourceKind::Route, &a, "Ready"),
        "False NotOwned: The host \"shop.team-a.localhost\" is already in use by DomainMapping \
         \"team-b/shop.team-a.localhost\"."
    );
    assert_eq!((hosts(&cluster, "team-a"), hosts(&cluster, "team-b").len()), (vec![], 2));
    leave_team(&mut cluster, ResourceKind::DomainMapping, "team-b", at);
    assert_eq!(
        (condition(&cluster, ResourceKind::Route, &a, "Ready"), hosts(&cluster, "team-a")),
        ("True : ".into(), vec![at.into()])
    );
}

#[test]
fn a_mapping_that_bears_the_host_of_what_it_leads_to_is_no_rival() {
    let at = "shop.team-a.localhost";
    let mut cluster = FakeApiServer::new();
    cluster.config("config-network", json!({"autocreate-cluster-domain-claims": "true"}));
    for route_first in [true, false] {
        if route_first {
            shop(&mut cluster, "team-a");
        }
        cluster.now = cluster.now.plus_ms(2000);
        shop_map(&mut cluster, "team-a", at);
        cluster.now = cluster.now.plus_ms(2000);
        shop(&mut cluster, "team-a");
        let is = |resource, own| {
            condition(&cluster, resource, &NamespacedName::new("team-a", own), "Ready")
        };
        assert_eq!(
            (is(ResourceKind::Route, "shop"), is(ResourceKind::DomainMapping, at)),
            ("True : ".into(), "True : ".into())
        );
        assert_eq!(hosts(&cluster, "team-a"), [at]);
        leave_team(&mut cluster, ResourceKind::KnativeService, "team-a", "shop");
        leave_team(&mut cluster, ResourceKind::DomainMapping, "team-a", at);
    }
}
