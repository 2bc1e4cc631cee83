//! Names that must be cut: the owner of each child object is found, at every length of the service's name.

use super::*;
use crate::model::object::WriteError;

/// Returns names of every length around the bounds of Image objects, Deployments, private Services, Revisions, tags and
/// slices of IPv6 addresses.
fn names_of_all_lengths() -> impl Iterator<Item = String> {
    (5..=63).filter(|it| *it == 5 || *it >= 28).map(|length| {
        // Dashes everywhere: each is a place where a name could be cut wrongly.
        let name: String = "a-b".chars().cycle().take(length - 1).collect();
        format!("{name}z")
    })
}

/// Second activator, with addresses of both families, so that each name gets a slice of IPv6 addresses.
fn dual_stack_activator() -> ControllerEvent {
    let object = json!({
        "metadata": {"name": "activator-2", "namespace": "knative-serving", "uid": "a2", "labels": {"app": "activator"}},
        "spec": {"nodeName": "n1"},
        "status": {
            "podIPs": [{"ip": "10.1.0.8"}, {"ip": "fd00:1::8"}],
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    });
    let activator_name = NamespacedName::new("knative-serving", "activator-2");
    ControllerEvent::ObjectObserved {
        resource: ResourceKind::Pod,
        name: activator_name,
        object: Some(Box::new(object)),
    }
}

fn tagged_traffic() -> Value {
    json!([{"latestRevision": true, "percent": 100, "tag": "now"}])
}

/// Returns the number of objects of each kind.
fn object_counts(api_server: &FakeApiServer) -> BTreeMap<ResourceKind, usize> {
    let mut counts = BTreeMap::new();
    let own_objects = api_server.objects.keys().filter(|(_, it)| it.namespace == NAMESPACE);
    own_objects.for_each(|(resource, _)| *counts.entry(*resource).or_default() += 1);
    counts
}

fn api_server_with_service(service: &str, traffic: Value) -> FakeApiServer {
    let mut api_server = FakeApiServer::new();
    api_server.step(dual_stack_activator());
    api_server.apply_service(service, "hello:v1", 1, traffic);
    api_server.report_all_ready();
    api_server
}

#[test]
fn services_with_names_of_every_length_get_all_objects() {
    let expected = object_counts(&api_server_with_service("hello", tagged_traffic()));
    for service_name in names_of_all_lengths() {
        let mut api_server = api_server_with_service(&service_name, tagged_traffic());
        assert_eq!(object_counts(&api_server), expected, "{} bytes", service_name.len());
        let ready = api_server.condition(ResourceKind::KnativeService, &service_name, "Ready");
        assert_eq!(ready, "True : ", "{} bytes", service_name.len());
        let required_children = crate::write::desired::required_children(
            api_server.machine.cluster(),
            &name(&service_name),
        );
        let owners_with_children =
            required_children.iter().filter(|it| !it.keys.is_empty()).count();
        assert_eq!(
            owners_with_children,
            2,
            "{} bytes: of a Revision and of a Route",
            service_name.len()
        );
        for key in required_children.iter().flat_map(|it| &it.keys) {
            let is_there = api_server.objects.contains_key(&(key.resource, key.name.clone()));
            assert!(is_there, "{} bytes: {key}", service_name.len());
        }
        // A second look at each object writes nothing.
        for (resource, name) in api_server.objects.keys().cloned().collect::<Vec<_>>() {
            let again =
                api_server.write(&ObjectPartKey::new(resource, ObjectPart::Object, name.clone()));
            assert_eq!(again, [], "{} bytes: {resource} {name}", service_name.len());
        }
        api_server.apply_service(
            &service_name,
            "hello:v1",
            1,
            json!([{"latestRevision": true, "percent": 100}]),
        );
        let (count, expected_count) = (|it| object_counts(&api_server)[&it], |it| expected[&it]);
        assert_eq!(
            count(ResourceKind::Service) + 1,
            expected_count(ResourceKind::Service),
            "{} bytes",
            service_name.len()
        );
        let slices = count(ResourceKind::EndpointSlice);
        assert_eq!(
            slices + 2,
            expected_count(ResourceKind::EndpointSlice),
            "{} bytes",
            service_name.len()
        );
        api_server.delete_as_user(ResourceKind::KnativeService, &service_name);
        assert_eq!(object_counts(&api_server), BTreeMap::new(), "{} bytes", service_name.len());
        assert!(
            api_server.machine.cluster().names.owner_exceptions.is_empty(),
            "{} bytes",
            service_name.len()
        );
    }
}

#[test]
fn write_errors_are_reported_for_names_of_every_length() {
    for service_name in names_of_all_lengths() {
        let mut api_server = api_server_with_service(&service_name, tagged_traffic());
        let children = api_server.objects.keys().filter(|(resource, it)| {
            let resources = [
                ResourceKind::Deployment,
                ResourceKind::Image,
                ResourceKind::Service,
                ResourceKind::EndpointSlice,
            ];
            it.namespace == NAMESPACE && resources.contains(resource)
        });
        for (resource, child) in children.cloned().collect::<Vec<_>>() {
            let key = ObjectPartKey::new(resource, ObjectPart::Object, child.clone());
            let error = WriteError { reason: "Invalid", message: "no".into() };
            api_server
                .step(ControllerEvent::WriteErrorChanged { key: key.clone(), error: Some(error) });
            let app = &api_server.machine.cluster().apps[&name(&service_name)];
            let route = app.route.as_ref().expect("a route");
            let is_blocked =
                route.blocked_reason.is_some() || app.revisions[0].blocked_reason.is_some();
            assert!(is_blocked, "{} bytes: {resource} {child}", service_name.len());
            api_server.step(ControllerEvent::WriteErrorChanged { key, error: None });
            let app = &api_server.machine.cluster().apps[&name(&service_name)];
            let route = app.route.as_ref().expect("a route");
            let is_blocked =
                route.blocked_reason.is_some() || app.revisions[0].blocked_reason.is_some();
            assert!(!is_blocked, "{} bytes: {resource} {child}", service_name.len());
        }
    }
}

#[test]
fn pods_with_names_of_every_length_are_annotated_as_draining() {
    for service_name in names_of_all_lengths() {
        let mut api_server = FakeApiServer::new();
        api_server.apply_service(&service_name, "hello:v1", 0, Value::Null);
        let revision = api_server.names(ResourceKind::Revision).remove(0);
        api_server.decide(&revision.name, 1);
        api_server.report_all_ready();
        api_server.decide(&revision.name, 0);
        let pods = || {
            api_server
                .objects
                .iter()
                .filter(|((it, name), _)| *it == ResourceKind::Pod && name.namespace == NAMESPACE)
        };
        let are_annotated =
            pods().all(|(_, it)| it["metadata"]["annotations"]["rouse.dev/draining"].is_string());
        assert!(are_annotated && pods().count() == 1, "{} bytes", service_name.len());
    }
}

#[test]
fn an_object_that_was_never_written_is_reported_by_its_owner() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 1, Value::Null);
    let error = WriteError { reason: "ChildrenMissing", message: "Deployment".into() };
    let app = name("hello");
    for (resource, object_name, condition) in [
        (ResourceKind::Revision, "hello-00001", "ResourcesAvailable"),
        (ResourceKind::Route, "hello", "IngressReady"),
    ] {
        let missing = |error| ControllerEvent::ChildrenMissing {
            app: app.clone(),
            owner_resource: resource,
            owner: name(object_name),
            error,
        };
        api_server.step(missing(Some(error.clone())));
        assert_eq!(
            api_server.condition(resource, object_name, condition),
            "False ChildrenMissing: Deployment"
        );
        api_server.step(missing(None));
        assert_ne!(
            api_server.condition(resource, object_name, condition),
            "False ChildrenMissing: Deployment"
        );
    }
}

/// Returns a service that Kubernetes scales, with a domain of its own and the claim that is made for the domain.
fn scaled_and_mapped(name: &str) -> FakeApiServer {
    let mut api_server = FakeApiServer::new();
    api_server
        .set_config_map("config-network", json!({"autocreate-cluster-domain-claims": "true"}));
    let mut template = template("hello:v1", 1);
    for (key, value) in
        [("class", crate::model::scale_policy::HPA_CLASS), ("metric", "cpu"), ("target", "70")]
    {
        template["metadata"]["annotations"][format!("autoscaling.knative.dev/{key}")] =
            json!(value);
    }
    api_server.apply_as_user(ResourceKind::KnativeService, name, json!({"template": template}));
    api_server.report_all_ready();
    api_server.map_domain(&domain(name), "Service", name);
    api_server
}

fn domain(name: &str) -> String {
    format!("{name}.shop.test")
}

#[test]
fn autoscalers_and_domains_work_for_names_of_every_length() {
    let expected = object_counts(&scaled_and_mapped("hello"));
    assert_eq!(expected[&ResourceKind::HorizontalPodAutoscaler], 1);
    let claims = |api_server: &FakeApiServer| api_server.names(ResourceKind::ClusterDomainClaim);
    for service_name in names_of_all_lengths() {
        let (mut api_server, bytes) = (scaled_and_mapped(&service_name), service_name.len());
        assert_eq!(object_counts(&api_server), expected, "{bytes} bytes");
        let domain_name = domain(&service_name);
        let expected_claim = NamespacedName::new("", domain_name.as_str());
        assert_eq!(claims(&api_server), [expected_claim], "{bytes} bytes");
        let ready = api_server.condition(ResourceKind::DomainMapping, &domain_name, "Ready");
        assert_eq!(ready, "True : ", "{bytes} bytes");
        let rules = api_server.table().services[&name(&service_name)].gateway_rules.clone();
        let rules = rules.expect("gateway rules");
        let hosts: Vec<String> = rules.mapped_domains.into_iter().map(|it| it.host).collect();
        assert_eq!(hosts, [domain_name.as_str()], "{bytes} bytes");
        // A second look at each object writes nothing.
        for (resource, name) in api_server.objects.keys().cloned().collect::<Vec<_>>() {
            let again =
                api_server.write(&ObjectPartKey::new(resource, ObjectPart::Object, name.clone()));
            assert_eq!(again, [], "{bytes} bytes: {resource} {name}");
        }
        // Its write error blocks the Revision. After a deletion it is written again.
        let (object_key, object) = api_server
            .objects
            .iter()
            .find(|((resource, _), _)| *resource == ResourceKind::HorizontalPodAutoscaler)
            .map(|(object_key, object)| (object_key.clone(), object.clone()))
            .expect("one");
        let key = ObjectPartKey::new(object_key.0, ObjectPart::Object, object_key.1.clone());
        let error = Some(WriteError { reason: "Invalid", message: "no".into() });
        api_server.step(ControllerEvent::WriteErrorChanged { key: key.clone(), error });
        let blocked = |api_server: &FakeApiServer| {
            api_server.machine.cluster().apps[&name(&service_name)].revisions[0]
                .blocked_reason
                .is_some()
        };
        assert!(blocked(&api_server), "{bytes} bytes: {}", object_key.1);
        api_server.step(ControllerEvent::WriteErrorChanged { key, error: None });
        assert!(!blocked(&api_server), "{bytes} bytes: {}", object_key.1);
        api_server.objects.remove(&object_key);
        api_server.step(ControllerEvent::ObjectObserved {
            resource: object_key.0,
            name: object_key.1.clone(),
            object: None,
        });
        api_server.write(&ObjectPartKey::new(
            object_key.0,
            ObjectPart::Object,
            object_key.1.clone(),
        ));
        let spec = |it: &Value| it["spec"].clone();
        assert_eq!(
            api_server.objects.get(&object_key).map(spec),
            Some(spec(&object)),
            "{bytes} bytes: again"
        );
        api_server.delete_as_user(ResourceKind::DomainMapping, &domain_name);
        assert_eq!(claims(&api_server), [], "{bytes} bytes");
        api_server.delete_as_user(ResourceKind::KnativeService, &service_name);
        assert_eq!(object_counts(&api_server), BTreeMap::new(), "{bytes} bytes");
        assert!(api_server.machine.cluster().names.owner_exceptions.is_empty(), "{bytes} bytes");
    }
}

#[test]
fn a_tag_that_is_renamed_while_a_replica_starts_leaves_no_name_behind() {
    let service_name = names_of_all_lengths().last().expect("the longest name");
    let api_server = api_server_with_service(&service_name, tagged_traffic());
    let mut renamed = api_server.objects.clone();
    let routes = renamed.iter_mut().filter(|((resource, _), _)| *resource == ResourceKind::Route);
    for (_, route) in routes {
        *route = serde_json::from_str(&route.to_string().replace("\"now\"", "\"new\"")).unwrap();
    }
    let owner_exceptions = |lists: &[&_]| {
        let mut other = machine().loading();
        for event in lists.iter().flat_map(|objects| observations(objects, &[])) {
            other.step(api_server.now, event);
        }
        other.step(api_server.now, ControllerEvent::InitialListSynced);
        other.cluster().names.owner_exceptions.clone()
    };
    let expected = owner_exceptions(&[&renamed]);
    assert!(expected.iter().any(|(name, _)| name.name.starts_with("new-")), "{expected:?}");
    assert_eq!(owner_exceptions(&[&api_server.objects, &renamed]), expected);
}
