//! Names that must be cut: each child object is found again by its owner, at every length of the service's name.

use super::*;

/// Returns names of every length around the bounds of Image objects, Deployments, private Services, Revisions, tags and
/// slices of IPv6 addresses.
fn lengths() -> impl Iterator<Item = String> {
    (5..=63).filter(|it| *it == 5 || *it >= 28).map(|length| {
        // Dashes everywhere: each is a place where a name could be cut wrongly.
        let name: String = "a-b".chars().cycle().take(length - 1).collect();
        format!("{name}z")
    })
}

fn both_families() -> ControllerEvent {
    let object = json!({
        "metadata": {"name": "activator-2", "namespace": "knative-serving", "uid": "a2", "labels": {"app": "activator"}},
        "spec": {"nodeName": "n1"},
        "status": {
            "podIPs": [{"ip": "10.1.0.8"}, {"ip": "fd00:1::8"}],
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    });
    let own = NamespacedName::new("knative-serving", "activator-2");
    ControllerEvent::ObjectObserved(ResourceKind::Pod, own, Some(Box::new(object)))
}

fn tagged() -> Value {
    json!([{"latestRevision": true, "percent": 100, "tag": "now"}])
}

/// Returns the number of objects of each kind.
fn kinds(cluster: &FakeApiServer) -> BTreeMap<ResourceKind, usize> {
    let mut kinds = BTreeMap::new();
    let own = cluster.objects.keys().filter(|(_, it)| it.namespace == SPACE);
    own.for_each(|(resource, _)| *kinds.entry(*resource).or_default() += 1);
    kinds
}

fn with(service: &str, traffic: Value) -> FakeApiServer {
    let mut cluster = FakeApiServer::new();
    cluster.step(both_families());
    cluster.service(service, "hello:v1", 1, traffic);
    cluster.ready();
    cluster
}

#[test]
fn everything_is_made_and_stands_at_every_length_of_a_name() {
    let wanted = kinds(&with("hello", tagged()));
    for own in lengths() {
        let mut cluster = with(&own, tagged());
        assert_eq!(kinds(&cluster), wanted, "{} bytes", own.len());
        let ready = cluster.condition(ResourceKind::KnativeService, &own, "Ready");
        assert_eq!(ready, "True : ", "{} bytes", own.len());
        let owed = crate::write::desired::required_children(cluster.machine.world(), &name(&own));
        let owing = owed.iter().filter(|it| !it.keys.is_empty()).count();
        assert_eq!(owing, 2, "{} bytes: of a Revision and of a Route", own.len());
        for key in owed.iter().flat_map(|it| &it.keys) {
            let is_there = cluster.objects.contains_key(&(key.resource, key.name.clone()));
            assert!(is_there, "{} bytes: {key}", own.len());
        }
        // The writer checks each object again that changes.
        for (resource, name) in cluster.objects.keys().cloned().collect::<Vec<_>>() {
            let again =
                cluster.write(&ObjectPartKey::new(resource, ObjectPart::Object, name.clone()));
            assert_eq!(again, [], "{} bytes: {resource} {name}", own.len());
        }
        cluster.service(&own, "hello:v1", 1, json!([{"latestRevision": true, "percent": 100}]));
        let (of, now) = (|it| kinds(&cluster)[&it], |it| wanted[&it]);
        assert_eq!(
            of(ResourceKind::Service) + 1,
            now(ResourceKind::Service),
            "{} bytes",
            own.len()
        );
        let slices = of(ResourceKind::EndpointSlice);
        assert_eq!(slices + 2, now(ResourceKind::EndpointSlice), "{} bytes", own.len());
        cluster.remove(ResourceKind::KnativeService, &own);
        assert_eq!(kinds(&cluster), BTreeMap::new(), "{} bytes", own.len());
        assert!(cluster.machine.world().names.owner_exceptions.is_empty(), "{} bytes", own.len());
    }
}

#[test]
fn write_errors_are_reported_at_every_length_of_a_name() {
    for own in lengths() {
        let mut cluster = with(&own, tagged());
        let children = cluster.objects.keys().filter(|(resource, it)| {
            let told = [ResourceKind::Deployment, ResourceKind::Image, ResourceKind::Service];
            it.namespace == SPACE
                && (told.contains(resource) || *resource == ResourceKind::EndpointSlice)
        });
        for (resource, child) in children.cloned().collect::<Vec<_>>() {
            let key = ObjectPartKey::new(resource, ObjectPart::Object, child.clone());
            let trouble =
                crate::model::object::WriteError { reason: "Invalid", message: "no".into() };
            cluster.step(ControllerEvent::WriteErrorChanged(key.clone(), Some(trouble)));
            let app = &cluster.machine.world().apps[&name(&own)];
            let route = app.route.as_ref().expect("a route");
            let told = route.blocked_reason.is_some() || app.revisions[0].blocked_reason.is_some();
            assert!(told, "{} bytes: {resource} {child}", own.len());
            cluster.step(ControllerEvent::WriteErrorChanged(key, None));
            let app = &cluster.machine.world().apps[&name(&own)];
            let route = app.route.as_ref().expect("a route");
            let told = route.blocked_reason.is_some() || app.revisions[0].blocked_reason.is_some();
            assert!(!told, "{} bytes: {resource} {child}", own.len());
        }
    }
}

#[test]
fn a_pod_of_a_long_name_is_noted_as_draining() {
    for own in lengths() {
        let mut cluster = FakeApiServer::new();
        cluster.service(&own, "hello:v1", 0, Value::Null);
        let revision = cluster.names(ResourceKind::Revision).remove(0);
        cluster.decide(&revision.name, 1);
        cluster.ready();
        cluster.decide(&revision.name, 0);
        let pods = || {
            cluster
                .objects
                .iter()
                .filter(|((it, name), _)| *it == ResourceKind::Pod && name.namespace == SPACE)
        };
        let noted =
            pods().all(|(_, it)| it["metadata"]["annotations"]["rouse.dev/draining"].is_string());
        assert!(noted && pods().count() == 1, "{} bytes", own.len());
    }
}

#[test]
fn an_object_that_was_never_written_is_reported_by_its_owner() {
    let mut cluster = FakeApiServer::new();
    cluster.service("hello", "hello:v1", 1, Value::Null);
    let trouble =
        crate::model::object::WriteError { reason: "NotMade", message: "Deployment".into() };
    let app = name("hello");
    for (of, own, condition) in [
        (ResourceKind::Revision, "hello-00001", "ResourcesAvailable"),
        (ResourceKind::Route, "hello", "IngressReady"),
    ] {
        let missing =
            |trouble| ControllerEvent::ChildrenMissing(app.clone(), of, name(own), trouble);
        cluster.step(missing(Some(trouble.clone())));
        assert_eq!(cluster.condition(of, own, condition), "False NotMade: Deployment");
        cluster.step(missing(None));
        assert_ne!(cluster.condition(of, own, condition), "False NotMade: Deployment");
    }
}

/// Returns a service that Kubernetes scales, with a domain of its own and the claim that is made for the domain.
fn scaled_and_mapped(own: &str) -> FakeApiServer {
    let mut cluster = FakeApiServer::new();
    cluster.config("config-network", json!({"autocreate-cluster-domain-claims": "true"}));
    let mut template = template("hello:v1", 1);
    for (key, value) in
        [("class", crate::model::scale_policy::HPA_CLASS), ("metric", "cpu"), ("target", "70")]
    {
        template["metadata"]["annotations"][format!("autoscaling.knative.dev/{key}")] =
            json!(value);
    }
    cluster.user(ResourceKind::KnativeService, own, json!({"template": template}));
    cluster.ready();
    cluster.map(&domain(own), "Service", own);
    cluster
}

fn domain(own: &str) -> String {
    format!("{own}.shop.test")
}

#[test]
fn its_horizontal_autoscaler_and_its_domain_stand_at_every_length_of_a_name() {
    let wanted = kinds(&scaled_and_mapped("hello"));
    assert_eq!(wanted[&ResourceKind::HorizontalPodAutoscaler], 1);
    let claims = |cluster: &FakeApiServer| cluster.names(ResourceKind::ClusterDomainClaim);
    for own in lengths() {
        let (mut cluster, bytes) = (scaled_and_mapped(&own), own.len());
        assert_eq!(kinds(&cluster), wanted, "{bytes} bytes");
        assert_eq!(claims(&cluster), [NamespacedName::new("", domain(&own))], "{bytes} bytes");
        let ready = cluster.condition(ResourceKind::DomainMapping, &domain(&own), "Ready");
        assert_eq!(ready, "True : ", "{bytes} bytes");
        let told = cluster.table().services[&name(&own)].gateway_rules.clone().expect("an ingress");
        let hosts: Vec<String> = told.mapped_domains.into_iter().map(|it| it.host).collect();
        assert_eq!(hosts, [domain(&own)], "{bytes} bytes");
        // The writer checks each object again that changes.
        for (resource, name) in cluster.objects.keys().cloned().collect::<Vec<_>>() {
            let again =
                cluster.write(&ObjectPartKey::new(resource, ObjectPart::Object, name.clone()));
            assert_eq!(again, [], "{bytes} bytes: {resource} {name}");
        }
        // Kubernetes scales it, and the number of replicas is observed.
        let (at, object) = cluster
            .objects
            .iter()
            .find(|((resource, _), _)| *resource == ResourceKind::HorizontalPodAutoscaler)
            .map(|(at, object)| (at.clone(), object.clone()))
            .expect("one");
        let key = ObjectPartKey::new(at.0, ObjectPart::Object, at.1.clone());
        let trouble = crate::model::object::WriteError { reason: "Invalid", message: "no".into() };
        cluster.step(ControllerEvent::WriteErrorChanged(key.clone(), Some(trouble)));
        let blocked = |cluster: &FakeApiServer| {
            cluster.machine.world().apps[&name(&own)].revisions[0].blocked_reason.is_some()
        };
        assert!(blocked(&cluster), "{bytes} bytes: {}", at.1);
        cluster.step(ControllerEvent::WriteErrorChanged(key, None));
        assert!(!blocked(&cluster), "{bytes} bytes: {}", at.1);
        cluster.objects.remove(&at);
        cluster.step(ControllerEvent::ObjectObserved(at.0, at.1.clone(), None));
        cluster.write(&ObjectPartKey::new(at.0, ObjectPart::Object, at.1.clone()));
        let spec = |it: &Value| it["spec"].clone();
        assert_eq!(cluster.objects.get(&at).map(spec), Some(spec(&object)), "{bytes} bytes: again");
        cluster.remove(ResourceKind::DomainMapping, &domain(&own));
        assert_eq!(claims(&cluster), [], "{bytes} bytes");
        cluster.remove(ResourceKind::KnativeService, &own);
        assert_eq!(kinds(&cluster), BTreeMap::new(), "{bytes} bytes");
        assert!(cluster.machine.world().names.owner_exceptions.is_empty(), "{bytes} bytes");
    }
}
