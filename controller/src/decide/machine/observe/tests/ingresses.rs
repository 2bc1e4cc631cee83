//! Routes whose public hosts another ingress fronts: their Ingresses and conditions, and changes of the class.
//!
//! Expected Ingresses: knative/serving `pkg/reconciler/route/resources/ingress.go` at 98e5ef9, with its tests.

use super::*;
use crate::model::config_maps::network::OWN_INGRESS_CLASS;

const KOURIER: &str = "kourier.ingress.networking.knative.dev";
const CONTOUR: &str = "contour.ingress.networking.knative.dev";
const HOST: &str = "hello.default.localhost";
const NOT_CONFIGURED: &str = "Unknown IngressNotConfigured: Ingress has not yet been reconciled.";

/// Returns a model that has listed the Ingresses and trusts one, with these further settings.
fn start(settings: &[(&str, &str)]) -> FakeApiServer {
    let mut api_server = FakeApiServer::new();
    api_server.step(ControllerEvent::IngressesListed);
    configure(&mut api_server, settings);
    api_server
}

/// Trusts an ingress, and makes these further settings.
fn configure(api_server: &mut FakeApiServer, settings: &[(&str, &str)]) {
    let mut data = json!({"rouse.dev.trusted-ingresses": "10.1.0.0/16"});
    for (key, value) in settings {
        data[*key] = (*value).into();
    }
    api_server.set_config_map("config-network", data);
}

/// Returns the service `hello`. With `null` as traffic, all requests go to the latest Revision.
fn service_body(class: &str, template: Value, traffic: Value) -> Value {
    let mut spec = json!({"template": template});
    if traffic.is_array() {
        spec["traffic"] = traffic;
    }
    json!({
        "apiVersion": "serving.knative.dev/v1", "kind": "Service",
        "metadata": {
            "name": "hello", "namespace": NAMESPACE,
            "annotations": {"networking.knative.dev/ingress-class": class, "example.com/a": "b"},
        },
        "spec": spec,
    })
}

fn apply(api_server: &mut FakeApiServer, body: Value) {
    for event in api_server.apply(ResourceKind::KnativeService, &name("hello"), body) {
        api_server.step(event);
    }
}

/// Applies the service with this class and image. An empty class is that of `config-network`.
fn apply_class(api_server: &mut FakeApiServer, class: &str, image: &str) {
    apply(api_server, service_body(class, template(image, 0), Value::Null));
}

fn observe(api_server: &mut FakeApiServer, resource: ResourceKind, at: &str, object: Value) {
    api_server.objects.insert((resource, name(at)), object.clone());
    let object = Some(Box::new(object));
    api_server.step(ControllerEvent::ObjectObserved { resource, name: name(at), object });
}

fn ready(status: &str) -> Value {
    json!([{"type": "Ready", "status": status, "reason": "R", "message": "m"}])
}

/// Sets the condition of the Ingress for its present generation, as its controller does.
fn report(api_server: &mut FakeApiServer, status: &str) {
    let mut object = api_server.object(ResourceKind::Ingress, "hello").clone();
    let generation = object["metadata"]["generation"].clone();
    object["status"] = json!({"observedGeneration": generation, "conditions": ready(status)});
    observe(api_server, ResourceKind::Ingress, "hello", object);
}

fn ingress_ready(api_server: &FakeApiServer) -> String {
    api_server.condition(ResourceKind::Route, "hello", "IngressReady")
}

/// Returns the hosts of `hello` that the gateway serves.
fn hosts(api_server: &FakeApiServer) -> Vec<String> {
    api_server.table().services[&name("hello")].hosts.clone()
}

/// Returns the class in force that another leader would find.
fn written_class(api_server: &FakeApiServer) -> &Value {
    let status = &api_server.object(ResourceKind::Route, "hello")["status"];
    &status["annotations"][key::CLASS_IN_FORCE]
}

fn split(revision: &str, percent: u32) -> Value {
    json!({
        "serviceName": revision, "serviceNamespace": NAMESPACE, "servicePort": 80, "percent": percent,
        "appendHeaders": {
            "Knative-Serving-Revision": revision, "Knative-Serving-Namespace": NAMESPACE,
        },
    })
}

/// Returns the rules of a name for clients inside the cluster and outside.
fn rules(service: &str, host: &str, paths: &Value) -> [Value; 2] {
    let local = ["default", "default.svc", "default.svc.cluster.local"];
    let local = local.map(|domain| format!("{service}.{domain}"));
    [
        json!({"hosts": local, "visibility": "ClusterLocal", "http": {"paths": paths}}),
        json!({"hosts": [host], "visibility": "ExternalIP", "http": {"paths": paths}}),
    ]
}

#[test]
fn an_ingress_of_another_class_is_as_knative_makes_it() {
    let mut api_server = start(&[]);
    apply_class(&mut api_server, KOURIER, "hello:v1");
    let made = api_server.object(ResourceKind::Ingress, "hello");
    let paths = json!([{"splits": [split("hello-00001", 100)]}]);
    let expected = json!({"httpOption": "Enabled", "rules": rules("hello", HOST, &paths)});
    assert_eq!(made["spec"], expected);
    let meta = &made["metadata"];
    let labels = json!({
        "serving.knative.dev/route": "hello", "serving.knative.dev/routeNamespace": NAMESPACE,
        "serving.knative.dev/service": "hello",
    });
    assert_eq!(meta["labels"], labels);
    let annotations = &meta["annotations"];
    assert_eq!(annotations["networking.knative.dev/ingress.class"], KOURIER);
    assert_eq!(annotations["networking.knative.dev/ingress-class"], Value::Null);
    assert_eq!(annotations["example.com/a"], "b");
    let owner = &meta["ownerReferences"][0];
    let uid = &api_server.object(ResourceKind::Route, "hello")["metadata"]["uid"];
    assert_eq!((&owner["kind"], &owner["uid"]), (&json!("Route"), uid));
}

#[test]
fn splits_and_tags_are_as_knative_makes_them_also_with_tag_headers() {
    let mut api_server = start(&[]);
    apply_class(&mut api_server, KOURIER, "hello:v1");
    let traffic = json!([
        {"revisionName": "hello-00001", "latestRevision": false, "percent": 90},
        {"latestRevision": true, "percent": 10, "tag": "next"},
    ]);
    apply(&mut api_server, service_body(KOURIER, template("hello:v2", 0), traffic));
    let shared = [split("hello-00001", 90), split("hello-00002", 10)];
    let tagged = [split("hello-00002", 100)];
    let expected = |own_paths: &Value, tag_paths: &Value| {
        let of_tag = rules("next-hello", "next-hello.default.localhost", tag_paths);
        Value::from([rules("hello", HOST, own_paths), of_tag].concat())
    };
    let (own, of_tag) = (json!([{"splits": shared}]), json!([{"splits": tagged}]));
    let made = &api_server.object(ResourceKind::Ingress, "hello")["spec"]["rules"];
    assert_eq!(*made, expected(&own, &of_tag));
    api_server.set_config_map("config-features", json!({"tag-header-based-routing": "enabled"}));
    // The path with a header comes first: controllers take the first path that fits.
    let own = json!([
        {"headers": {"Knative-Serving-Tag": {"exact": "next"}}, "splits": tagged},
        {"appendHeaders": {"Knative-Serving-Default-Route": "true"}, "splits": shared},
    ]);
    let of_tag = json!([{"appendHeaders": {"Knative-Serving-Tag": "next"}, "splits": tagged}]);
    let made = &api_server.object(ResourceKind::Ingress, "hello")["spec"]["rules"];
    assert_eq!(*made, expected(&own, &of_tag));
}

#[test]
fn an_ingress_follows_protocol_redirects_and_visibility() {
    let mut api_server = start(&[("http-protocol", "Redirected")]);
    let mut template = template("hello:v1", 0);
    let port = json!([{"containerPort": 8080, "name": "h2c", "protocol": "TCP"}]);
    template["spec"]["containers"][0]["ports"] = port;
    let mut body = service_body(KOURIER, template, Value::Null);
    apply(&mut api_server, body.clone());
    let spec = &api_server.object(ResourceKind::Ingress, "hello")["spec"];
    assert_eq!(spec["httpOption"], "Redirected");
    assert_eq!(spec["rules"][1]["http"]["paths"][0]["splits"][0]["servicePort"], 81);
    body["metadata"]["labels"] = json!({"networking.knative.dev/visibility": "cluster-local"});
    apply(&mut api_server, body);
    let rules = &api_server.object(ResourceKind::Ingress, "hello")["spec"]["rules"];
    let visibilities: Vec<&Value> =
        rules.as_array().into_iter().flatten().map(|it| &it["visibility"]).collect();
    assert_eq!(visibilities, ["ClusterLocal"]);
}

#[test]
fn an_ingress_has_the_certificate_of_its_host_and_the_paths_of_challenges() {
    let mut api_server = start(&[("external-domain-tls", "Enabled")]);
    let issuer = json!({"issuerRef": "kind: ClusterIssuer\nname: letsencrypt\n"});
    api_server.set_config_map("config-certmanager", issuer);
    api_server.step(ControllerEvent::CertManagerFound(true));
    apply_class(&mut api_server, KOURIER, "hello:v1");
    let challenge = json!({"type": "HTTP-01", "dnsName": HOST, "token": "t", "key": "t.hash"});
    api_server.apply_as_user(ResourceKind::AcmeChallenge, "order-1", challenge);
    let uid = &api_server.object(ResourceKind::AcmeChallenge, "order-1")["metadata"]["uid"];
    let solver = json!({
        "metadata": {
            "name": "solver", "namespace": NAMESPACE,
            "labels": {"acme.cert-manager.io/http01-solver": "true"},
            "ownerReferences": [{"controller": true, "uid": uid}],
        },
        "spec": {"clusterIPs": ["10.96.7.7"], "ports": [{"port": 8089}], "selector": {"a": "b"}},
    });
    for event in api_server.apply(ResourceKind::Service, &name("solver"), solver) {
        api_server.step(event);
    }
    let own = json!({"splits": [split("hello-00001", 100)]});
    let solved = json!({
        "path": "/.well-known/acme-challenge/t",
        "splits": [{
            "serviceName": "solver", "serviceNamespace": NAMESPACE, "servicePort": 8089,
            "percent": 100,
        }],
    });
    let spec = &api_server.object(ResourceKind::Ingress, "hello")["spec"];
    assert_eq!(spec["rules"][0]["http"]["paths"], json!([own]));
    assert_eq!(spec["rules"][1]["http"]["paths"], json!([solved, own]));
    assert_eq!(spec["tls"], Value::Null);
    let uid = &api_server.object(ResourceKind::Route, "hello")["metadata"]["uid"];
    let certificate = format!("route-{}", uid.as_str().expect("a UID"));
    // As cert-manager writes it: only then the Secret exists.
    let mut issued = api_server.object(ResourceKind::IssuedCertificate, &certificate).clone();
    issued["status"] = json!({"conditions": ready("True")});
    observe(&mut api_server, ResourceKind::IssuedCertificate, &certificate, issued);
    let tls = json!([
        {"hosts": [HOST], "secretName": certificate, "secretNamespace": NAMESPACE},
    ]);
    assert_eq!(api_server.object(ResourceKind::Ingress, "hello")["spec"]["tls"], tls);
}

#[test]
fn an_ingress_needs_another_class_a_trusted_ingress_and_the_kind() {
    let mut api_server = FakeApiServer::new();
    configure(&mut api_server, &[]);
    apply_class(&mut api_server, KOURIER, "hello:v1");
    assert!(api_server.names(ResourceKind::Ingress).is_empty(), "they are not listed");
    assert_eq!(ingress_ready(&api_server), NOT_CONFIGURED);
    api_server.step(ControllerEvent::IngressesListed);
    assert_eq!(api_server.names(ResourceKind::Ingress), [name("hello")]);
    assert_eq!((hosts(&api_server), written_class(&api_server)), (vec![], &json!(KOURIER)));
    api_server.set_config_map("config-network", json!({"ingress-class": KOURIER}));
    assert!(api_server.names(ResourceKind::Ingress).is_empty(), "none is trusted");
    assert_eq!((hosts(&api_server), written_class(&api_server)), (vec![HOST.into()], &Value::Null));
    configure(&mut api_server, &[("ingress-class", KOURIER)]);
    assert_eq!(api_server.names(ResourceKind::Ingress), [name("hello")]);
    apply_class(&mut api_server, OWN_INGRESS_CLASS, "hello:v1");
    assert!(api_server.names(ResourceKind::Ingress).is_empty(), "an annotation goes first");
    assert_eq!(hosts(&api_server), [HOST]);
}

#[test]
fn a_route_is_ready_once_its_ingress_has_handled_the_present_spec() {
    let mut api_server = start(&[]);
    apply_class(&mut api_server, KOURIER, "hello:v1");
    assert_eq!(ingress_ready(&api_server), NOT_CONFIGURED);
    for (status, expected) in
        [("Unknown", "Unknown R: m"), ("False", "False R: m"), ("True", "True : ")]
    {
        report(&mut api_server, status);
        assert_eq!(ingress_ready(&api_server), expected);
        assert_eq!(hosts(&api_server), [""; 0], "the gateway never serves a new Route");
    }
    assert_eq!(api_server.condition(ResourceKind::KnativeService, "hello", "Ready"), "True : ");
    apply_class(&mut api_server, KOURIER, "hello:v2");
    assert_eq!(ingress_ready(&api_server), NOT_CONFIGURED);
    report(&mut api_server, "True");
    assert_eq!(ingress_ready(&api_server), "True : ");
}

/// A client that waits for the Route would otherwise go on with the percentages and hosts from before.
#[test]
fn a_route_is_not_ready_while_its_ingress_has_an_earlier_spec() {
    let mut api_server = start(&[("ingress-class", KOURIER)]);
    apply_class(&mut api_server, "", "hello:v1");
    report(&mut api_server, "True");
    assert_eq!(ingress_ready(&api_server), "True : ");
    let data = json!({
        "rouse.dev.trusted-ingresses": "10.1.0.0/16", "ingress-class": KOURIER,
        "http-protocol": "Redirected",
    });
    // By the machine alone, so that the test sees the state before the writer acts.
    api_server.other_replica = None;
    let effects = api_server.machine.step(
        api_server.now,
        ControllerEvent::ObjectObserved {
            resource: ResourceKind::ConfigMap,
            name: NamespacedName::new("knative-serving", "config-network"),
            object: Some(Box::new(json!({"data": data}))),
        },
    );
    let option = &api_server.object(ResourceKind::Ingress, "hello")["spec"]["httpOption"];
    assert_eq!(option, "Enabled", "nothing is written yet");
    let app = &api_server.machine.cluster().apps[&name("hello")];
    assert!(!app.conditions.is_true(ConditionType::RouteIngress));
    for key in effects.changed_keys {
        for event in api_server.write(&key) {
            api_server.step(event);
        }
    }
    assert_eq!(ingress_ready(&api_server), NOT_CONFIGURED);
    report(&mut api_server, "True");
    assert_eq!(ingress_ready(&api_server), "True : ");
}

#[test]
fn each_change_of_the_class_leaves_a_host_with_the_ingress_that_serves_it() {
    let mut api_server = start(&[]);
    apply_class(&mut api_server, "", "hello:v1");
    assert_eq!(
        (hosts(&api_server), ingress_ready(&api_server)),
        (vec![HOST.into()], "True : ".into())
    );
    configure(&mut api_server, &[("ingress-class", KOURIER)]);
    assert_eq!(api_server.names(ResourceKind::Ingress), [name("hello")]);
    assert_eq!(
        (hosts(&api_server), ingress_ready(&api_server)),
        (vec![HOST.into()], "True : ".into())
    );
    report(&mut api_server, "True");
    assert_eq!((hosts(&api_server), written_class(&api_server)), (vec![], &json!(KOURIER)));
    // Neither a failure nor another replica opens the gateway again.
    report(&mut api_server, "False");
    let replica = api_server.start_replica();
    assert_eq!(differences(&table(&replica), &api_server.table()), [""; 0]);
    assert_eq!(hosts(&api_server), [""; 0]);
    // The gateway has the host before the Ingress goes.
    let own = json!({"data": {"rouse.dev.trusted-ingresses": "10.1.0.0/16"}});
    api_server.other_replica = None;
    let effects = api_server.machine.step(
        api_server.now,
        ControllerEvent::ObjectObserved {
            resource: ResourceKind::ConfigMap,
            name: NamespacedName::new("knative-serving", "config-network"),
            object: Some(Box::new(own)),
        },
    );
    assert_eq!(hosts(&api_server), [HOST]);
    assert_eq!(api_server.names(ResourceKind::Ingress), [name("hello")]);
    for key in effects.changed_keys {
        for event in api_server.write(&key) {
            api_server.step(event);
        }
    }
    assert!(api_server.names(ResourceKind::Ingress).is_empty());
    assert_eq!(
        (hosts(&api_server), ingress_ready(&api_server)),
        (vec![HOST.into()], "True : ".into())
    );
}

/// The controller of the former class skips an Ingress of another class, and would keep what it has made of it.
#[test]
fn a_third_class_gets_an_ingress_of_its_own() {
    let mut api_server = start(&[]);
    apply_class(&mut api_server, KOURIER, "hello:v1");
    report(&mut api_server, "True");
    let first = api_server.object(ResourceKind::Ingress, "hello")["metadata"]["uid"].clone();
    apply_class(&mut api_server, CONTOUR, "hello:v1");
    let meta = &api_server.object(ResourceKind::Ingress, "hello")["metadata"];
    assert_eq!(meta["annotations"]["networking.knative.dev/ingress.class"], CONTOUR);
    assert_ne!(meta["uid"], first);
    assert_eq!((hosts(&api_server), ingress_ready(&api_server)), (vec![], NOT_CONFIGURED.into()));
}

/// Returns the endpoints of the Service of `hello-00001`.
fn endpoints(api_server: &FakeApiServer) -> Vec<String> {
    let slice = api_server.object(ResourceKind::EndpointSlice, "hello-00001");
    let port = &slice["ports"][0]["port"];
    let all = slice["endpoints"].as_array().into_iter().flatten();
    let addresses = all.map(|it| it["addresses"][0].as_str().unwrap_or_default());
    addresses.map(|it| format!("{it}:{port}")).collect()
}

/// Pods do not know the headers that name a Revision, nor the probes of an ingress.
#[test]
fn behind_another_ingress_the_service_of_a_revision_leads_to_activators_only() {
    let mut api_server = start(&[]);
    apply_class(&mut api_server, "", "hello:v1");
    api_server.decide("hello-00001", 1);
    api_server.report_all_ready();
    let is_direct = |api_server: &FakeApiServer| {
        let all = endpoints(api_server);
        all.len() == 1 && all[0].ends_with(":8080")
    };
    assert!(is_direct(&api_server), "{:?}", endpoints(&api_server));
    configure(&mut api_server, &[("ingress-class", KOURIER)]);
    assert_eq!(endpoints(&api_server), ["10.1.0.9:8012"]);
    // Some controllers of ingresses read the port there.
    let service = api_server.object(ResourceKind::Service, "hello-00001");
    assert_eq!(service["spec"]["ports"][0]["targetPort"], 8012);
    configure(&mut api_server, &[]);
    assert!(is_direct(&api_server), "{:?}", endpoints(&api_server));
}

/// Returns the template of a Revision that speaks raw TCP.
fn tcp_template(image: &str, initial_scale: u32) -> Value {
    let mut template = template(image, initial_scale);
    template["metadata"]["annotations"][key::PROTOCOL] = json!("tcp");
    template
}

/// The other service keeps its own Route, which has the class of Rouse, and nothing else of it changes.
#[test]
fn a_revision_of_another_service_leads_to_activators_while_a_fronted_route_names_it() {
    let mut api_server = start(&[]);
    apply_class(&mut api_server, "", "hello:v1");
    api_server.apply_service("other", "other:v1", 0, Value::Null);
    let lead_to = |api_server: &mut FakeApiServer, revision: &str| {
        let body = json!({
            "apiVersion": "serving.knative.dev/v1", "kind": "Route",
            "metadata": {
                "name": "way", "namespace": NAMESPACE,
                "annotations": {"networking.knative.dev/ingress-class": KOURIER},
            },
            "spec": {"traffic": [{"revisionName": revision, "percent": 100}]},
        });
        for event in api_server.apply(ResourceKind::Route, &name("way"), body) {
            api_server.step(event);
        }
    };
    // First to another Revision: a Route that has an Ingress, but names none of this service, changes nothing here.
    lead_to(&mut api_server, "other-00001");
    api_server.decide("hello-00001", 1);
    api_server.report_all_ready();
    let direct = endpoints(&api_server);
    assert!(direct.len() == 1 && direct[0].ends_with(":8080"), "{direct:?}");
    assert_eq!(api_server.names(ResourceKind::Ingress), [name("way")]);
    lead_to(&mut api_server, "hello-00001");
    assert_eq!(endpoints(&api_server), ["10.1.0.9:8012"]);
}

/// No host leads to raw TCP, so no controller would ever report that an ingress is ready.
#[test]
fn a_route_of_raw_tcp_has_no_ingress_and_waits_for_none() {
    let mut api_server = start(&[("ingress-class", KOURIER)]);
    let tcp = |image: &str| service_body("", tcp_template(image, 0), Value::Null);
    apply(&mut api_server, tcp("hello:v1"));
    assert_eq!(ingress_ready(&api_server), "True : ");
    assert!(api_server.names(ResourceKind::Ingress).is_empty());
    apply_class(&mut api_server, "", "hello:v2");
    assert_eq!(ingress_ready(&api_server), NOT_CONFIGURED);
    report(&mut api_server, "True");
    assert_eq!(ingress_ready(&api_server), "True : ");
    apply(&mut api_server, tcp("hello:v3"));
    assert!(api_server.names(ResourceKind::Ingress).is_empty(), "its Revision has no traffic");
    assert_eq!(ingress_ready(&api_server), "True : ");
}

/// A new leader knows no decision yet, and without pods the slice of raw TCP would be deleted.
#[test]
fn the_service_of_a_revision_of_raw_tcp_keeps_its_pods_until_a_decision() {
    let mut api_server = start(&[]);
    apply(&mut api_server, service_body(KOURIER, tcp_template("hello:v1", 1), Value::Null));
    api_server.report_all_ready();
    let resource = ResourceKind::EndpointSlice;
    let slice = ObjectPartKey::new(resource, ObjectPart::Object, name("hello-00001"));
    let desired = desired_state(api_server.machine.cluster(), &slice);
    assert_eq!(desired, DesiredState::Unmanaged);
    api_server.decide("hello-00001", 1);
    let all = endpoints(&api_server);
    assert!(all.len() == 1 && all[0].ends_with(":8080"), "{all:?}");
}

/// An ingress sends requests to it until it has handled the new spec.
#[test]
fn a_revision_that_its_route_has_left_is_known_while_another_ingress_fronts_the_route() {
    let both = vec!["hello-00001", "hello-00002"];
    for (class, expected) in [("", vec!["hello-00002"]), (KOURIER, both)] {
        let mut api_server = start(&[]);
        for image in ["hello:v1", "hello:v2"] {
            apply_class(&mut api_server, class, image);
        }
        let known: Vec<String> =
            api_server.table().revisions.into_keys().map(|it| it.name.to_string()).collect();
        assert_eq!(known, expected, "{class}");
    }
}
