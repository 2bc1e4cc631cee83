use std::{net::IpAddr, sync::LazyLock};

use common::service_routing::TopologyHints;
use serde_json::{Value, json};

use super::{
    scaling::{RevisionReachability, ServerlessServiceMode},
    services::PlaceholderSpec,
    slices::SliceEndpoint,
    *,
};
use crate::{
    decide::topology_hints::HintRules,
    model::{
        cluster_state::{DeploymentSettings, HintMode},
        zone_shares::{ZoneNode, ZoneShares},
    },
};

/// A Revision with owned fields, made from the template that a user writes.
struct ChildrenFixture {
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
    spec: RevisionSpec,
    digests: Vec<(Box<str>, Box<str>)>,
}

impl ChildrenFixture {
    fn new(spec: Value) -> Self {
        let labels = [
            ("serving.knative.dev/configuration", "hello"),
            ("serving.knative.dev/configurationGeneration", "1"),
            ("serving.knative.dev/configurationUID", "c-uid"),
            ("serving.knative.dev/service", "hello"),
            ("serving.knative.dev/routingState", "active"),
            ("team", "blue"),
        ];
        let annotations = [
            ("autoscaling.knative.dev/min-scale", "2"),
            ("serving.knative.dev/routes", "hello"),
            ("serving.knative.dev/routingStateModified", "2026-01-01T00:00:00Z"),
            ("serving.knative.dev/creator", "me"),
        ];
        let owned = |all: &[(&str, &str)]| {
            all.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        Self {
            labels: owned(&labels),
            annotations: owned(&annotations),
            spec: serde_json::from_value(spec).unwrap(),
            digests: Vec::new(),
        }
    }

    fn plain() -> Self {
        let probe = json!({"tcpSocket": {"port": 0}, "periodSeconds": 0, "successThreshold": 1});
        let container =
            json!({"name": "user-container", "image": "dev.local/hello", "readinessProbe": probe});
        Self::new(json!({"timeoutSeconds": 60, "containers": [container]}))
    }

    fn revision(&self) -> RevisionView<'_> {
        RevisionView {
            namespace: "default",
            name: "hello-00001",
            uid: "r-uid",
            service: "hello",
            configuration: "hello",
            labels: &self.labels,
            annotations: &self.annotations,
            spec: &self.spec,
            digests: &self.digests,
        }
    }

    fn deployment(&self, config: &DeploymentSettings) -> Value {
        deployment::deployment(&self.revision(), config, 1).body
    }
}

fn at<'a>(body: &'a Value, path: &str) -> &'a Value {
    body.pointer(path).unwrap_or(&Value::Null)
}

fn pod(deployment: &Value) -> &Value {
    at(deployment, "/spec/template/spec")
}

const ROUTE: PlaceholderSpec<'static> = PlaceholderSpec {
    namespace: "default",
    route: "hello",
    route_uid: "t-uid",
    tag: None,
    service: "hello",
    route_labels: BTreeMap::new(),
    route_annotations: BTreeMap::new(),
    activator_port: Some(20_007),
    serves_tcp: false,
    serves_local_tls: false,
    affinity: None,
    gateway_port: None,
};

static NO_SHARES: LazyLock<ZoneShares> = LazyLock::new(ZoneShares::default);

/// Rules by which no endpoint has a hint.
fn no_hints() -> HintRules<'static> {
    HintRules { mode: HintMode::Off, shares: &NO_SHARES }
}

fn activator(number: u8, addresses: &[&str]) -> SliceEndpoint {
    SliceEndpoint {
        pod: format!("activator-{number}"),
        namespace: "knative-serving".into(),
        node: format!("node-{number}"),
        zone: String::new(),
        addresses: addresses.iter().map(|it| it.parse::<IpAddr>().unwrap()).collect(),
        ready: true,
        terminating: false,
        hints: TopologyHints::default(),
    }
}

fn addresses(slice: &ChildObject) -> Vec<&str> {
    let endpoints = at(&slice.body, "/endpoints").as_array().unwrap();
    endpoints.iter().filter_map(|it| at(it, "/addresses/0").as_str()).collect()
}

fn spread_affinity() -> Value {
    json!({"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{
        "weight": 100,
        "podAffinityTerm": {
            "topologyKey": "kubernetes.io/hostname",
            "labelSelector": {"matchLabels": {"serving.knative.dev/revision": "hello-00001"}},
        },
    }]}})
}

#[test]
fn a_plain_revision_becomes_this_deployment() {
    let labels = json!({
        "app": "hello-00001",
        "serving.knative.dev/configuration": "hello",
        "serving.knative.dev/configurationGeneration": "1",
        "serving.knative.dev/configurationUID": "c-uid",
        "serving.knative.dev/revision": "hello-00001",
        "serving.knative.dev/revisionUID": "r-uid",
        "serving.knative.dev/service": "hello",
        "team": "blue",
    });
    let owner = json!([{
        "apiVersion": "serving.knative.dev/v1", "kind": "Revision", "name": "hello-00001", "uid": "r-uid",
        "controller": true, "blockOwnerDeletion": true,
    }]);
    let container = json!({
        "name": "user-container",
        "image": "dev.local/hello",
        "env": [
            {"name": "K_REVISION", "value": "hello-00001"},
            {"name": "K_CONFIGURATION", "value": "hello"},
            {"name": "K_SERVICE", "value": "hello"},
            {"name": "PORT", "value": "8080"},
        ],
        "ports": [{"name": "user-port", "containerPort": 8080, "protocol": "TCP"}],
        "readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1, "successThreshold": 1},
        "lifecycle": {"preStop": {"httpGet": {"path": "/wait-for-drain", "port": 8022}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    });
    let expected = json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": "hello-00001-deployment", "namespace": "default", "labels": labels,
            "annotations": {"serving.knative.dev/creator": "me"}, "ownerReferences": owner,
        },
        "spec": {
            "replicas": 1,
            "progressDeadlineSeconds": 600,
            "revisionHistoryLimit": 0,
            "selector": {"matchLabels": {"serving.knative.dev/revisionUID": "r-uid"}},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0}},
            "template": {
                "metadata": {
                    "labels": labels,
                    "annotations": {
                        "serving.knative.dev/creator": "me",
                        "kubectl.kubernetes.io/default-container": "user-container",
                    },
                },
                "spec": {
                    "affinity": spread_affinity(), "containers": [container],
                    "enableServiceLinks": false, "terminationGracePeriodSeconds": 60,
                },
            },
        },
    });
    assert_eq!(ChildrenFixture::plain().deployment(&DeploymentSettings::default()), expected);
}

/// A pod that is probed each second would be thawed as often.
#[test]
fn a_readiness_probe_without_a_period_leaves_a_pod_on_standby_frozen() {
    let period = |standby: Option<&str>, seconds: i32| {
        let probe = json!({"tcpSocket": {"port": 0}, "periodSeconds": seconds});
        let container = json!({"name": "user-container", "image": "a", "readinessProbe": probe});
        let mut fixture = ChildrenFixture::new(json!({"containers": [container]}));
        let annotation = standby.map(|pods| ("rouse.dev/standby".to_owned(), pods.to_owned()));
        fixture.annotations.extend(annotation);
        let body = fixture.deployment(&DeploymentSettings::default());
        at(pod(&body), "/containers/0/readinessProbe/periodSeconds").as_i64()
    };
    assert_eq!([period(None, 0), period(Some("0"), 0), period(Some("many"), 0)], [Some(1); 3]);
    assert_eq!(period(Some(" 1 "), 0), Some(10));
    assert_eq!([period(None, 3), period(Some("1"), 3)], [Some(3); 2], "the user's own");
}

#[test]
fn only_the_container_with_ports_serves() {
    let probe = |port: i32| json!({"httpGet": {"path": "/ok", "port": port}});
    let fixture = ChildrenFixture::new(json!({
        "initContainers": [{"name": "first", "image": "init"}],
        "containers": [
            {"name": "side", "image": "side", "readinessProbe": {"exec": {"command": ["true"]}, "periodSeconds": 7}},
            {
                "name": "main", "image": "main", "tty": true, "ports": [{"name": "h2c", "containerPort": 9000}],
                "env": [{"name": "A", "value": "b"}], "terminationMessagePolicy": "File",
                "readinessProbe": {"grpc": {"port": 0, "service": ""}},
                "livenessProbe": probe(1234), "startupProbe": probe(1234),
            },
        ],
    }));
    let body = fixture.deployment(&DeploymentSettings::default());
    let names = |path: &str| -> Vec<&str> {
        let env = at(pod(&body), path).as_array().unwrap();
        env.iter().filter_map(|it| it["name"].as_str()).collect()
    };
    let service_variables = ["K_REVISION", "K_CONFIGURATION", "K_SERVICE"];
    assert_eq!(names("/initContainers/0/env"), service_variables);
    assert_eq!(names("/containers/0/env"), service_variables);
    assert_eq!(
        names("/containers/1/env"),
        ["A", service_variables[0], service_variables[1], service_variables[2], "PORT"]
    );
    let (side, main) = (&pod(&body)["containers"][0], &pod(&body)["containers"][1]);
    assert_eq!(side["ports"], Value::Null);
    assert_eq!(side["readinessProbe"], json!({"exec": {"command": ["true"]}, "periodSeconds": 7}));
    let ports = json!([{"name": "user-port", "containerPort": 9000, "protocol": "TCP"}]);
    assert_eq!((&main["ports"], &main["tty"]), (&ports, &Value::Null));
    assert_eq!(main["terminationMessagePolicy"], "File");
    assert_eq!(at(main, "/readinessProbe/grpc/port"), 9000);
    assert_eq!(at(main, "/livenessProbe/httpGet/port"), 9000, "the serving port");
    assert_eq!(at(main, "/startupProbe/httpGet/port"), 1234, "its own port");
    assert_eq!(at(pod(&body), "/initContainers/0/lifecycle"), &Value::Null);
    let default = at(&body, "/spec/template/metadata/annotations");
    assert_eq!(default["kubectl.kubernetes.io/default-container"], "main");
    assert_eq!(at(pod(&body), "/terminationGracePeriodSeconds"), 300);
}

#[test]
fn probes_that_name_the_serving_port_get_its_number() {
    // Knative treats the name "http" as a port without a name. In both cases the pod's port has another name.
    for (name, port_name) in [(json!({"name": "http1"}), "http1"), (json!({}), "http")] {
        let mut port = name;
        port["containerPort"] = json!(9000);
        let http = json!({"httpGet": {"path": "/", "port": port_name}});
        let fixture = ChildrenFixture::new(json!({"containers": [{
            "name": "main", "image": "main", "ports": [port], "startupProbe": http,
            "readinessProbe": {"tcpSocket": {"port": port_name}}, "livenessProbe": http,
        }]}));
        // With multi-container-probing a liveness probe may name any port.
        let config = DeploymentSettings { probe_any_port: true, ..DeploymentSettings::default() };
        let body = fixture.deployment(&config);
        let main = at(pod(&body), "/containers/0");
        assert_eq!(at(main, "/startupProbe/httpGet/port"), 9000);
        assert_eq!(at(main, "/readinessProbe/tcpSocket/port"), 9000);
        assert_eq!(at(main, "/livenessProbe/httpGet/port"), 9000);
    }
}

/// Knative's sidecar accepts schemes in any case, and the API server refuses lower case in the pod.
#[test]
fn the_scheme_of_a_readiness_probe_is_written_in_upper_case() {
    for (written, scheme) in [("http", "HTTP"), ("Https", "HTTPS"), ("HTTP", "HTTP")] {
        let probe = json!({"httpGet": {"path": "/", "port": 9000, "scheme": written}});
        let sidecar = json!({"name": "beside", "image": "beside", "readinessProbe": probe});
        let fixture = ChildrenFixture::new(json!({"containers": [
            {"name": "main", "image": "main", "ports": [{"containerPort": 9000}], "readinessProbe": probe},
            sidecar,
        ]}));
        let body = fixture.deployment(&DeploymentSettings::default());
        for container in at(pod(&body), "/containers").as_array().expect("containers") {
            assert_eq!(at(container, "/readinessProbe/httpGet/scheme"), scheme, "{written}");
        }
    }
}

#[test]
fn images_are_replaced_once_their_digest_is_known() {
    let mut fixture = ChildrenFixture::plain();
    fixture.digests = vec![("user-container".into(), "dev.local/hello@sha256:aa".into())];
    let body = fixture.deployment(&DeploymentSettings::default());
    assert_eq!(at(pod(&body), "/containers/0/image"), "dev.local/hello@sha256:aa");
    let images = images::image_objects(&fixture.revision());
    assert_eq!(images[0].name, "hello-00001-cache-user-container");
    assert_eq!(at(&images[0].body, "/spec/image"), "dev.local/hello@sha256:aa");
    // A skipped registry yields a tag instead of a digest.
    fixture.digests = vec![("user-container".into(), "".into())];
    let body = fixture.deployment(&DeploymentSettings::default());
    assert_eq!(at(pod(&body), "/containers/0/image"), "dev.local/hello");
}

#[test]
fn operators_choose_token_affinity_links_class_and_deadline() {
    let class = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect()
    };
    let config = DeploymentSettings {
        progress_deadline_seconds: 30,
        spread_over_nodes: false,
        runtime_classes: [
            ("any".to_owned(), class(&[])),
            ("blue".to_owned(), class(&[("team", "blue")])),
            ("azure".to_owned(), class(&[("team", "blue")])),
            ("red".to_owned(), class(&[("team", "red"), ("a", "b")])),
        ]
        .into(),
        enable_service_links: None,
        automount_service_account_token: Some(false),
        wait_for_drain: false,
        ..DeploymentSettings::default()
    };
    let mut fixture = ChildrenFixture::plain();
    let body = fixture.deployment(&config);
    let spec = pod(&body);
    assert_eq!(at(&body, "/spec/progressDeadlineSeconds"), 30);
    assert_eq!(spec["automountServiceAccountToken"], false);
    assert_eq!(spec["runtimeClassName"], "azure");
    for missing in ["affinity", "enableServiceLinks"] {
        assert_eq!(spec[missing], Value::Null, "{missing}");
    }
    assert_eq!(at(spec, "/containers/0/lifecycle"), &Value::Null);

    fixture.spec.pod.service_account_name = Some("robot".into());
    fixture.spec.pod.runtime_class_name = Some("own".into());
    fixture.annotations.insert("serving.knative.dev/progress-deadline".into(), "90s".into());
    let body = fixture.deployment(&config);
    let spec = pod(&body);
    assert_eq!(
        spec["automountServiceAccountToken"],
        Value::Null,
        "the default applies only to pods without an account"
    );
    assert_eq!(spec["runtimeClassName"], "own");
    assert_eq!(at(&body, "/spec/progressDeadlineSeconds"), 90);
}

#[test]
fn a_pod_on_its_nodes_network_has_no_pre_stop_hook() {
    let mut fixture = ChildrenFixture::plain();
    fixture.spec.pod.host_network = Some(true);
    let body = fixture.deployment(&DeploymentSettings::default());
    assert_eq!(at(pod(&body), "/containers/0/lifecycle"), &Value::Null);
}

#[test]
fn a_revision_has_two_services() {
    let fixture = ChildrenFixture::plain();
    let private = services::private_service(&fixture.revision());
    assert_eq!(private.name, "hello-00001-private");
    let selector = json!({"serving.knative.dev/revisionUID": "r-uid"});
    assert_eq!(at(&private.body, "/spec/selector"), &selector);
    let port = json!([{"name": "http", "port": 80, "protocol": "TCP", "targetPort": 8080}]);
    assert_eq!(at(&private.body, "/spec/ports"), &port);
    let public = services::public_service(&fixture.revision());
    assert_eq!(
        (public.name.as_str(), &public.body["spec"]["selector"]),
        ("hello-00001", &Value::Null)
    );
    let class = "/metadata/labels/networking.internal.knative.dev~1serviceType";
    assert_eq!(
        (at(&private.body, class), at(&public.body, class)),
        (&json!("Private"), &json!("Public"))
    );
}

#[test]
fn objects_of_a_revision_name_the_protocol_that_its_template_names() {
    let objects = |protocol: &str| {
        let mut fixture = ChildrenFixture::plain();
        fixture.annotations.insert("rouse.dev/protocol".into(), protocol.into());
        let revision = fixture.revision();
        let port = services::private_service(&revision).body["spec"]["ports"][0].take();
        let pa = scaling::pod_autoscaler(&revision, RevisionReachability::Reachable);
        let asleep = [activator(1, &["10.0.0.1"])];
        let slices = slices::revision_slices(&revision, &[], 8080, &asleep, 2, no_hints()).len();
        let port = json!([port["name"], port["appProtocol"], port["port"]]);
        (port, pa.body["spec"]["protocolType"].clone(), slices)
    };
    assert_eq!(objects("http1"), (json!(["http", null, 80]), json!("http1"), 1));
    assert_eq!(objects("h2c"), (json!(["http2", "kubernetes.io/h2c", 81]), json!("h2c"), 1));
    // Activators could not know the Revision of a connection without a host.
    assert_eq!(objects("tcp"), (json!(["tcp", "tcp", 80]), json!("tcp"), 0));
}

/// A Revision scales to zero by itself. Its Service would compete with it for its Deployment.
#[test]
fn no_child_of_a_revision_is_a_scaled_service() {
    let mut fixture = ChildrenFixture::plain();
    fixture.annotations.insert("rouse.dev/scale-to-zero".into(), "true".into());
    let revision = fixture.revision();
    for child in [services::private_service(&revision), services::public_service(&revision)] {
        let annotations = &child.body["metadata"]["annotations"];
        assert!(annotations["rouse.dev/scale-to-zero"].is_null(), "{annotations}");
    }
}

#[test]
fn a_name_that_serves_raw_tcp_tells_meshes_so() {
    let name = PlaceholderSpec { serves_tcp: true, ..ROUTE };
    let service = services::placeholder_service(&name);
    let slices = slices::route_name_slices(&name, &[activator(1, &["10.0.0.1"])], 0, no_hints());
    for (object, ports) in [(&service, "/spec/ports/0"), (&slices[0], "/ports/0")] {
        let port = at(&object.body, ports);
        // A name that changed with the protocol would separate the Service from its slices for a moment.
        assert_eq!((&port["name"], &port["appProtocol"]), (&json!("http"), &json!("tcp")));
    }
}

/// kube-proxy joins the ports of a Service and of its slices by their names. Activators tell both by the first byte.
#[test]
fn https_inside_the_cluster_leads_to_the_same_port_of_the_activators() {
    let name = PlaceholderSpec { serves_local_tls: true, ..ROUTE };
    let service = services::placeholder_service(&name);
    let slices = slices::route_name_slices(&name, &[activator(1, &["10.0.0.1"])], 0, no_hints());
    let ports = |object: &Value, path: &str| -> Vec<(String, u64)> {
        let all = at(object, path).as_array().cloned().unwrap_or_default();
        let port = |it: &Value| {
            let name = it["name"].as_str().unwrap_or_default().to_owned();
            (name, it["port"].as_u64().unwrap_or_default())
        };
        all.iter().map(port).collect()
    };
    let named = |http, https| [("http".to_owned(), http), ("https".to_owned(), https)];
    assert_eq!(ports(&service.body, "/spec/ports"), named(80, 443));
    assert_eq!(ports(&slices[0].body, "/ports"), named(20_007, 20_007));
}

#[test]
fn tools_see_how_a_revision_scales() {
    let fixture = ChildrenFixture::plain();
    let revision = fixture.revision();
    let target =
        json!({"apiVersion": "apps/v1", "kind": "Deployment", "name": "hello-00001-deployment"});
    let pa = scaling::pod_autoscaler(&revision, RevisionReachability::Reachable);
    let spec = json!({
        "containerConcurrency": 0, "scaleTargetRef": target, "reachability": "Reachable", "protocolType": "http1",
    });
    assert_eq!(pa.body["spec"], spec);
    assert_eq!(pa.body["metadata"]["annotations"]["autoscaling.knative.dev/min-scale"], "2");
    let sks = scaling::serverless_service(&revision, ServerlessServiceMode::Proxy, 2);
    let spec =
        json!({"mode": "Proxy", "objectRef": target, "protocolType": "http1", "numActivators": 2});
    assert_eq!(sks.body["spec"], spec);
}

#[test]
fn a_service_with_one_revision_costs_fifteen_objects_or_seventeen_with_two_families() {
    let fixture = ChildrenFixture::plain();
    let revision = fixture.revision();
    let mut of_revision = vec![
        deployment::deployment(&revision, &DeploymentSettings::default(), 0),
        services::private_service(&revision),
        services::public_service(&revision),
        scaling::pod_autoscaler(&revision, RevisionReachability::Reachable),
        scaling::serverless_service(&revision, ServerlessServiceMode::Proxy, 2),
    ];
    of_revision.extend(images::image_objects(&revision));
    let of_route = |names: &[&str]| {
        1 + slices::route_name_slices(&ROUTE, &[activator(1, names)], 2, no_hints()).len()
    };
    let own_slices = |names: &[&str]| {
        let activators = [activator(1, names)];
        slices::revision_slices(&revision, &[], 8080, &activators, 2, no_hints()).len()
    };
    // Service, Configuration, Route, Revision; Kubernetes' own ReplicaSet and EndpointSlice.
    let (knative, kubernetes) = (4, 2);
    let all = |names: &[&str]| {
        knative + kubernetes + of_revision.len() + own_slices(names) + of_route(names)
    };
    assert_eq!((all(&["10.0.0.1"]), all(&["10.0.0.1", "fd00::1"])), (15, 17));
}

#[test]
fn a_routes_name_gets_a_service_without_selector() {
    let map = |all: &[(&str, &str)]| {
        all.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    };
    let tagged = PlaceholderSpec {
        tag: Some("blue"),
        route_labels: map(&[
            ("team", "a"),
            ("networking.knative.dev/visibility", "cluster-local"),
            ("serving.knative.dev/route", "forged"),
        ]),
        route_annotations: map(&[
            ("serving.knative.dev/creator", "somebody"),
            ("rouse.dev/activator-port", "1"),
            ("rouse.dev/applied", "0"),
            ("rouse.dev/scale-to-zero", "true"),
            ("kubectl.kubernetes.io/last-applied-configuration", "{}"),
        ]),
        ..ROUTE
    };
    let service = services::placeholder_service(&tagged);
    assert_eq!(service.name, "blue-hello");
    let meta = json!({
        "name": "blue-hello", "namespace": "default",
        "labels": {
            "serving.knative.dev/route": "hello", "serving.knative.dev/service": "hello",
            "team": "a",
        },
        "annotations": {"rouse.dev/activator-port": "20007", "serving.knative.dev/creator": "somebody"},
        "ownerReferences": [{
            "apiVersion": "serving.knative.dev/v1", "kind": "Route", "name": "hello", "uid": "t-uid",
            "controller": true, "blockOwnerDeletion": true,
        }],
    });
    assert_eq!(service.body["metadata"], meta);
    let spec = json!({
        "type": "ClusterIP", "ipFamilyPolicy": "PreferDualStack",
        "internalTrafficPolicy": "Cluster", "sessionAffinity": "None",
        "ports": [{"name": "http", "port": 80, "protocol": "TCP", "targetPort": 80}],
    });
    assert_eq!(service.body["spec"], spec);
}

#[test]
fn slices_name_activators_by_family_with_the_services_own_port() {
    let both = [activator(1, &["10.0.0.1", "fd00::1"]), activator(2, &["10.0.0.2"])];
    let slices = slices::route_name_slices(&ROUTE, &both, 0, no_hints());
    let [four, six] = slices.as_slice() else { panic!("{slices:?}") };
    assert_eq!((four.name.as_str(), six.name.as_str()), ("hello", "hello.v6"));
    assert_eq!(addresses(four), ["10.0.0.1", "10.0.0.2"]);
    assert_eq!((addresses(six), &six.body["addressType"]), (vec!["fd00::1"], &json!("IPv6")));
    assert_eq!(four.body["ports"], json!([{"name": "http", "port": 20007, "protocol": "TCP"}]));
    let labels = &four.body["metadata"]["labels"];
    assert_eq!(labels["endpointslice.kubernetes.io/managed-by"], "rouse.dev");
    assert_eq!(labels["kubernetes.io/service-name"], "hello");
    let endpoint = json!({
        "addresses": ["10.0.0.1"], "nodeName": "node-1",
        "conditions": {"ready": true, "serving": true, "terminating": false},
        "targetRef": {"kind": "Pod", "namespace": "knative-serving", "name": "activator-1"},
    });
    assert_eq!(four.body["endpoints"][0], endpoint);

    let only_four = slices::route_name_slices(&ROUTE, &both[1..], 0, no_hints());
    assert_eq!(only_four.len(), 1, "no slice of a family without addresses");
}

/// Returns the hints of the endpoints of a slice; `null` without any.
fn hints(slice: &ChildObject) -> Vec<&Value> {
    let endpoints = at(&slice.body, "/endpoints").as_array().unwrap();
    endpoints.iter().map(|it| &it["hints"]).collect()
}

#[test]
fn activators_in_a_slice_have_hints_for_zones_while_all_are_ready() {
    let mut all = [1, 2].map(|it| activator(it, &[&format!("10.0.0.{it}")]));
    all[0].zone = "a".into();
    all[1].zone = "b".into();
    let node = |zone| ZoneNode { zone, cpu_milli: 4000, is_ready: true, is_control_plane: false };
    let shares = ZoneShares::of_nodes([node("a"), node("b")]);
    let zone = |name: &str| json!({"forZones": [{"name": name}]});
    for mode in [HintMode::Proportional, HintMode::SameZone, HintMode::SameNode] {
        let rules = HintRules { mode, shares: &shares };
        let slices = slices::route_name_slices(&ROUTE, &all, 2, rules);
        assert_eq!(hints(&slices[0]), [&zone("a"), &zone("b")], "{mode:?}");
        let unready = [1, 2].map(|it| SliceEndpoint { ready: false, ..all[it - 1].clone() });
        let slices = slices::route_name_slices(&ROUTE, &unready, 2, rules);
        assert_eq!(hints(&slices[0]), [&Value::Null, &Value::Null], "{mode:?}");
    }
    let one_zone = ZoneShares::of_nodes([node("a")]);
    let rules = HintRules { mode: HintMode::Proportional, shares: &one_zone };
    let slices = slices::route_name_slices(&ROUTE, &all, 2, rules);
    assert_eq!(hints(&slices[0]), [&Value::Null, &Value::Null]);
}

/// A name whose activators all lacked a family would be unreachable in it.
#[test]
fn each_family_has_activators_if_any_activator_has_it() {
    let mut all: Vec<_> = (1..=4).map(|it| activator(it, &[&format!("10.0.0.{it}")])).collect();
    all.push(activator(5, &["fd00::5"]));
    let names: Vec<String> = (0..20).map(|number| format!("s-{number}")).collect();
    for name in &names {
        let of = PlaceholderSpec { route: name, ..ROUTE };
        let slices = slices::route_name_slices(&of, &all, 2, no_hints());
        let [four, six] = slices.as_slice() else { panic!("{name}: {slices:?}") };
        assert_eq!((addresses(four).len(), addresses(six)), (2, vec!["fd00::5"]), "{name}");
    }
    let fixture = ChildrenFixture::plain();
    let revision = fixture.revision();
    let slices = slices::revision_slices(&revision, &[], 8080, &all[3..], 1, no_hints());
    let [four, six] = slices.as_slice() else { panic!("{slices:?}") };
    assert_eq!((addresses(four), addresses(six)), (vec!["10.0.0.4"], vec!["fd00::5"]));
}

/// The cluster chooses the family of a Revision's own Service. kube-proxy ignores the slices of other families.
#[test]
fn the_service_of_a_revision_has_endpoints_in_every_family() {
    let fixture = ChildrenFixture::plain();
    let activators = [activator(1, &["10.0.0.1", "fd00::1"])];
    let pod = |number: u8, addresses: &[&str]| SliceEndpoint {
        pod: format!("pod-{number}"),
        namespace: "default".into(),
        ..activator(number, addresses)
    };
    let listed = |pods: &[SliceEndpoint]| -> Vec<String> {
        let revision = fixture.revision();
        let all = slices::revision_slices(&revision, pods, 8080, &activators, 2, no_hints());
        let line = |it: &ChildObject| {
            let (family, port) = (&it.body["addressType"], &it.body["ports"][0]["port"]);
            let label = &it.body["metadata"]["labels"]["kubernetes.io/service-name"];
            assert_eq!(label, "hello-00001");
            let family = family.as_str().unwrap_or_default();
            format!("{} {family} {} {port}", it.name, addresses(it).join(","))
        };
        all.iter().map(line).collect()
    };
    let both = [pod(2, &["10.1.0.2", "fd01::2"]), pod(3, &["fd01::3"])];
    let expected = ["hello-00001 IPv4 10.1.0.2 8080", "hello-00001.v6 IPv6 fd01::2,fd01::3 8080"];
    assert_eq!(listed(&both), expected);
    // Pods that listen on 0.0.0.0 only are reached through activators in the other family.
    let only_four = [pod(2, &["10.1.0.2"])];
    let expected = ["hello-00001 IPv4 10.1.0.2 8080", "hello-00001.v6 IPv6 fd00::1 8012"];
    assert_eq!(listed(&only_four), expected);
}

#[test]
fn slices_wait_for_a_port_and_pass_over_activators_that_leave_or_are_not_ready() {
    let without_port = PlaceholderSpec { activator_port: None, ..ROUTE };
    let mut all = [1, 2, 3].map(|it| activator(it, &[&format!("10.0.0.{it}")]));
    assert_eq!(slices::route_name_slices(&without_port, &all, 0, no_hints()), []);
    all[0].terminating = true;
    all[1].ready = false;
    let slices = slices::route_name_slices(&ROUTE, &all, 2, no_hints());
    assert_eq!(addresses(&slices[0]), ["10.0.0.3"]);
    all[2].ready = false;
    let slices = slices::route_name_slices(&ROUTE, &all, 2, no_hints());
    assert_eq!(
        addresses(&slices[0]),
        ["10.0.0.2", "10.0.0.3"],
        "rather one that may respond than none"
    );
}

fn hpa_body(pairs: &[(&str, &str)], min: u32, max: u32) -> Value {
    let named = |(name, value): &(&str, &str)| {
        (format!("autoscaling.knative.dev/{name}"), (*value).to_owned())
    };
    let annotations = pairs.iter().map(named).collect();
    let fixture = ChildrenFixture { annotations, ..ChildrenFixture::plain() };
    hpa::horizontal_pod_autoscaler(
        &fixture.revision(),
        hpa::HpaParameters { min, max, owner_uid: "pa-uid" },
    )
    .body
}

/// Expected values are those of knative/serving `pkg/reconciler/autoscaling/hpa/resources/hpa_test.go`.
#[test]
fn the_hpa_has_the_values_that_knative_would_set() {
    let object = hpa_body(&[("class", "hpa.autoscaling.knative.dev")], 0, 0);
    assert_eq!(object["apiVersion"], "autoscaling/v2");
    assert_eq!(object["kind"], "HorizontalPodAutoscaler");
    let owner = &object["metadata"]["ownerReferences"][0];
    assert_eq!(
        (&owner["kind"], &owner["name"], &owner["uid"], &owner["controller"]),
        (&json!("PodAutoscaler"), &object["metadata"]["name"], &json!("pa-uid"), &json!(true))
    );
    assert_eq!(object["spec"]["scaleTargetRef"]["kind"], "Deployment");
    let bare = |spec: &Value| (spec["minReplicas"].clone(), spec["maxReplicas"].clone());
    assert_eq!(bare(&object["spec"]), (Value::Null, json!(i32::MAX)));
    assert_eq!(object["spec"].get("metrics"), None, "Kubernetes has a default of its own");
    let spec = hpa_body(&[("target", "50.5"), ("metric", "cpu"), ("window", "1m30s")], 2, 5);
    let spec = &spec["spec"];
    assert_eq!(bare(spec), (json!(2), json!(5)));
    let cpu = json!([{"type": "Resource", "resource": {
        "name": "cpu", "target": {"type": "Utilization", "averageUtilization": 51},
    }}]);
    assert_eq!(spec["metrics"], cpu);
    let window = json!({"stabilizationWindowSeconds": 90});
    assert_eq!(spec["behavior"], json!({"scaleDown": window, "scaleUp": window}));
}

#[test]
fn targets_of_memory_and_custom_metrics_are_quantities() {
    let target_of = |metric: &str, target: &str| {
        hpa_body(&[("metric", metric), ("target", target)], 0, 0)["spec"]["metrics"][0].clone()
    };
    for (target, quantity) in
        [("200", "200Mi"), ("1024", "1Gi"), ("1536", "1536Mi"), ("1.9", "1Mi")]
    {
        let memory = json!({"type": "Resource", "resource": {
            "name": "memory", "target": {"type": "AverageValue", "averageValue": quantity},
        }});
        assert_eq!(target_of("memory", target), memory);
    }
    for (target, quantity) in [("5", "5"), ("2000", "2k"), ("1500", "1500")] {
        let pods = json!({"type": "Pods", "pods": {
            "metric": {"name": "queue_length"},
            "target": {"type": "AverageValue", "averageValue": quantity},
        }});
        assert_eq!(target_of("queue_length", target), pods);
    }
}
