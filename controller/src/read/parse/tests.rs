use serde::Deserialize as _;

use super::*;

const HELLO: &str = r#"
apiVersion: serving.knative.dev/v1
kind: Service
metadata: {name: hello}
spec: {template: {spec: {containers: [{image: dev.local/hello:v1}]}}}
"#;

fn read_document(text: &str) -> ManifestDocument {
    let mut all = manifest_documents(text, &ScalePolicyConfig::default());
    assert_eq!(all.len(), 1);
    all.remove(0)
}

/// Returns the problems of a Service whose only container is `container`.
fn container_problems(container: &str) -> String {
    document_problems(&HELLO.replace("{image: dev.local/hello:v1}", container))
}

/// Returns the problems of a Service whose Revision spec is `spec`.
fn spec_problems(spec: &str) -> String {
    document_problems(&HELLO.replace("{containers: [{image: dev.local/hello:v1}]}", spec))
}

/// Returns the problems of a Service with these traffic targets.
fn traffic_problems(traffic: &str) -> String {
    let spec = format!("spec: {{traffic: {traffic}, template");
    document_problems(&HELLO.replace("spec: {template", &spec))
}

fn document_problems(text: &str) -> String {
    match read_document(text) {
        ManifestDocument::Service { .. } => "fine".into(),
        ManifestDocument::Refused { reason: problems, .. } => problems,
    }
}

fn check_table(table: &[(String, &str)]) {
    for (problems, expected) in table {
        assert_eq!(problems, expected);
    }
}

#[test]
fn a_small_service_gets_knatives_defaults() {
    let ManifestDocument::Service { name, manifest } = read_document(HELLO) else {
        panic!("refused")
    };
    assert_eq!(name, NamespacedName::new("default", "hello"));
    let template: Value = serde_json::from_str(&manifest.template).expect("JSON");
    // Values of knative/serving `pkg/apis/serving/v1/*_defaults.go` at 98e5ef9.
    let expected = serde_json::json!({
        "metadata": {},
        "spec": {
            "containerConcurrency": 0,
            "timeoutSeconds": 300,
            "enableServiceLinks": false,
            "containers": [{
                "name": "user-container",
                "image": "dev.local/hello:v1",
                "readinessProbe": {
                    "periodSeconds": 0,
                    "successThreshold": 1,
                    "tcpSocket": {"port": 0},
                },
            }],
        },
    });
    assert_eq!(template, expected);
    assert_eq!(*manifest.traffic, [TrafficSpec { percent: 100, ..TrafficSpec::default() }]);
}

/// Defaults that depend on other fields (knative/serving `pkg/apis/serving/v1/revision_defaults.go` at 98e5ef9).
#[test]
fn defaults_depend_on_each_other_as_in_knative() {
    let defaulted = |spec: &str| {
        let text = HELLO.replace("{containers: [{image: dev.local/hello:v1}]}", spec);
        let ManifestDocument::Service { manifest, .. } = read_document(&text) else {
            panic!("refused: {spec}")
        };
        let template: RevisionTemplate = serde_json::from_str(&manifest.template).expect("JSON");
        template.spec
    };
    let start = |spec: &str| defaulted(spec).response_start_timeout_seconds;
    assert_eq!(start("{timeoutSeconds: 300, containers: [{image: a}]}"), None);
    assert_eq!(start("{timeoutSeconds: 301, containers: [{image: a}]}"), Some(300));
    let zero = defaulted("{timeoutSeconds: 0, containers: [{image: a}]}");
    assert_eq!(zero.timeout_seconds, Some(300));
    let two = defaulted("{containers: [{image: a}, {image: b, ports: [{containerPort: 80}]}]}");
    let names: Vec<_> = two.pod.containers.iter().map(|it| it.name.as_str()).collect();
    assert_eq!(names, ["user-container-0", "user-container-1"]);
    assert!(two.pod.containers[0].readiness_probe.is_none());
    let slow = defaulted("{containers: [{image: a, readinessProbe: {periodSeconds: 2}}]}");
    let probe = slow.pod.containers[0].readiness_probe.clone().expect("a probe");
    assert_eq!((probe.failure_threshold, probe.timeout_seconds), (Some(3), Some(1)));
}

#[test]
fn unreadable_fields_are_refused_with_their_paths() {
    check_table(&[
        (
            container_problems("{image: a, imagge: b}"),
            "unknown field: spec.template.spec.containers[0].imagge",
        ),
        (
            document_problems(&HELLO.replace("kind: Service", "kind: Service\nspeck: 1")),
            "unknown field: speck",
        ),
        (
            container_problems("{image: a, ports: [{containerPort: http}]}"),
            "wrong type: invalid type: string \"http\", expected i32: spec.template.spec.containers[0].ports[0].containerPort",
        ),
        (
            document_problems(&HELLO.replace("{name: hello}", "{name: hello, labels: {a: 1}}")),
            "wrong type: invalid type: integer `1`, expected a string: metadata.labels.a",
        ),
        (
            document_problems(&HELLO.replace("{name: hello}", "{name: 1}")),
            "wrong type: invalid type: integer `1`, expected a string: metadata.name",
        ),
        (
            document_problems(&HELLO.replace("kind: Service", "kind: Deployment")),
            "invalid value: serving.knative.dev/v1/Deployment: kind (apply a serving.knative.dev/v1 Service; Configuration, Revision and Route follow from it)",
        ),
    ]);
    let broken = document_problems("a: [1");
    assert!(broken.starts_with("not readable as YAML: "), "{broken}");
}

/// Names of Services and Revisions (knative/serving `pkg/apis/serving/metadata_validation.go` at 98e5ef9).
#[test]
fn names_follow_knatives_rules() {
    let named = |name: &str| {
        let meta = format!("{{template: {{metadata: {{name: {name}}}, spec");
        document_problems(&HELLO.replace("{template: {spec", &meta))
    };
    check_table(&[
        (
            document_problems(&HELLO.replace("name: hello", "name: Hello")),
            "invalid value: Hello: metadata.name (use 1 to 57 of a-z, 0-9 and -, beginning with a letter)",
        ),
        (
            document_problems(&HELLO.replace("{name: hello}", "{}")),
            "missing field(s): metadata.name",
        ),
        (
            named("world-1"),
            "invalid value: \"world-1\" must have prefix \"hello-\": spec.template.metadata.name",
        ),
        (named("hello-1"), "fine"),
    ]);
}

/// Containers, ports, environment and mounts (knative/serving `pkg/apis/serving/k8s_validation.go` at 98e5ef9).
#[test]
fn containers_follow_knatives_rules() {
    check_table(&[
        (spec_problems("{containers: []}"), "missing field(s): spec.template.spec.containers"),
        (
            container_problems("{name: a}"),
            "missing field(s): spec.template.spec.containers[0].image",
        ),
        (
            container_problems("{image: 'Not an image'}"),
            "Failed to parse image reference: spec.template.spec.containers[0].image (image: \"Not an image\", error: could not parse reference: Not an image: the name must be lower-case letters, digits, '.', '_', '-' and '/')",
        ),
        (container_problems("{image: 'oci:/srv/hello'}"), "fine"),
        (container_problems("{image: 'localhost:5000/a/b:v1'}"), "fine"),
        (
            container_problems("{image: a, name: queue-proxy}"),
            "\"queue-proxy\" is a reserved container name: spec.template.spec.containers[0].name",
        ),
        (
            container_problems("{image: a, env: [{name: PORT, value: '1'}]}"),
            "\"PORT\" is a reserved environment variable: spec.template.spec.containers[0].env[0].name",
        ),
        (
            container_problems("{image: a, ports: [{containerPort: 8012}]}"),
            "invalid value: 8012 is a reserved port: spec.template.spec.containers[0].ports[0].containerPort (8012 is a reserved port, please use a different value)",
        ),
        // Zero equals an absent port: 8080.
        (container_problems("{image: a, ports: [{containerPort: 0}]}"), "fine"),
        (
            container_problems("{image: a, ports: [{containerPort: 65536}]}"),
            "expected 1 <= 65536 <= 65535: spec.template.spec.containers[0].ports[0].containerPort",
        ),
        (
            container_problems("{image: a, ports: [{containerPort: 80}, {containerPort: 81}]}"),
            "more than one container port is set: spec.template.spec.containers[*].ports (Only a single port is allowed across all containers)",
        ),
        (
            container_problems("{image: a, ports: [{containerPort: 80, name: grpc}]}"),
            "Port name grpc is not allowed: spec.template.spec.containers[0].ports[0] (Name must be empty, or one of: 'h2c', 'http1')",
        ),
        (
            spec_problems(
                "{containers: [{image: a, ports: [{containerPort: 80}]}, {image: b, ports: [{containerPort: 81}]}]}",
            ),
            "more than one container port is set: spec.template.spec.containers[*].ports (Only a single port is allowed across all containers)",
        ),
        (
            spec_problems("{containers: [{image: a}, {image: b}]}"),
            "missing field(s): spec.template.spec.containers[*].ports (give ports to the one container that serves)",
        ),
        (
            container_problems("{image: a, volumeMounts: [{name: v, mountPath: /data}]}"),
            "volumeMount has no matching volume: spec.template.spec.containers[0].volumeMounts[0].name",
        ),
        (
            spec_problems("{containers: [{image: a}], volumes: [{name: v, emptyDir: {}}]}"),
            "volume with name \"v\" not mounted: spec.template.spec.volumes[0].name",
        ),
    ]);
}

/// Fields outside the mask (knative/serving `pkg/apis/serving/fieldmask.go` at 98e5ef9).
#[test]
fn fields_outside_the_mask_must_not_be_set() {
    check_table(&[
        (
            spec_problems("{nodeName: n1, containers: [{image: a}]}"),
            "must not set the field(s): spec.template.spec.nodeName",
        ),
        (
            spec_problems("{terminationGracePeriodSeconds: 1, containers: [{image: a}]}"),
            "must not set the field(s): spec.template.spec.terminationGracePeriodSeconds",
        ),
        (
            container_problems("{image: a, lifecycle: {}}"),
            "must not set the field(s): spec.template.spec.containers[0].lifecycle",
        ),
        (
            spec_problems("{initContainers: [{image: a}], containers: [{image: a}]}"),
            "pod spec support for init-containers is off, but found 1 init containers: spec.template.spec.initContainers",
        ),
        (
            container_problems("{image: a, securityContext: {privileged: true}}"),
            "must not set the field(s): spec.template.spec.containers[0].securityContext.privileged",
        ),
    ]);
}

/// Probes (knative/serving `pkg/apis/serving/k8s_validation.go` at 98e5ef9).
#[test]
fn probes_follow_knatives_rules() {
    const AT: &str = "spec.template.spec.containers[0].readinessProbe";
    let probe = |probe: &str| container_problems(&format!("{{image: a, readinessProbe: {probe}}}"));
    check_table(&[
        (probe("{httpGet: {path: /}}"), "fine"),
        (
            probe("{httpGet: {port: 81}}"),
            &format!("invalid value: 81: {AT}.httpGet.port (Probe port must match container port)"),
        ),
        (
            probe("{httpGet: {}, tcpSocket: {}}"),
            &format!("expected exactly one, got both: {AT}.httpGet, {AT}.tcpSocket"),
        ),
        (
            probe("{periodSeconds: 0, failureThreshold: 2}"),
            &format!(
                "failureThreshold is disallowed when periodSeconds is zero: {AT}.failureThreshold"
            ),
        ),
        (
            probe("{periodSeconds: -1}"),
            &format!("expected 0 <= -1 <= 2147483647: {AT}.periodSeconds"),
        ),
        (
            probe("{successThreshold: -1}"),
            &format!("expected 1 <= -1 <= 2147483647: {AT}.successThreshold"),
        ),
        (probe("{successThreshold: 0}"), "fine"),
    ]);
}

/// Bounds of a Revision, and its annotations (knative/serving `pkg/apis/serving/v1/revision_validation.go` at 98e5ef9).
#[test]
fn limits_and_annotations_are_bounded() {
    let annotated = |pair: &str| {
        let meta = format!("{{template: {{metadata: {{annotations: {{{pair}}}}}, spec");
        document_problems(&HELLO.replace("{template: {spec", &meta))
    };
    check_table(&[
        (
            spec_problems("{timeoutSeconds: 601, containers: [{image: a}]}"),
            "expected 0 <= 601 <= 600: spec.template.spec.timeoutSeconds",
        ),
        (
            spec_problems("{containerConcurrency: 1001, containers: [{image: a}]}"),
            "expected 0 <= 1001 <= 1000: spec.template.spec.containerConcurrency",
        ),
        (
            document_problems(&HELLO.replace(
                "{name: hello}",
                "{name: hello, annotations: {autoscaling.knative.dev/min-scale: '1'}}",
            )),
            "invalid key name \"autoscaling.knative.dev/min-scale\": metadata.annotations (autoscaling annotations must be put under \"spec.template.metadata.annotations\" to work)",
        ),
        (
            annotated("serving.knative.dev/progress-deadline: 1500ms"),
            "progress-deadline=1500ms is not at second precision: spec.template.metadata.annotations.serving.knative.dev/progress-deadline",
        ),
        (
            annotated("rouse.dev/path: quick"),
            "invalid value: quick: spec.template.metadata.annotations.rouse.dev/path (use direct or activator)",
        ),
        (
            annotated("rouse.dev/traffic-distribution: near"),
            "invalid value: near: spec.template.metadata.annotations.rouse.dev/traffic-distribution (use PreferSameZone, PreferSameNode or PreferClose)",
        ),
        (
            annotated("rouse.dev/protocol: udp"),
            "invalid value: udp: spec.template.metadata.annotations.rouse.dev/protocol (use http1, h2c or tcp)",
        ),
        (
            annotated("rouse.dev/standby: '11'"),
            "expected 0 <= 11 <= 10: spec.template.metadata.annotations.rouse.dev/standby",
        ),
    ]);
}

#[test]
fn the_local_node_refuses_other_autoscaler_classes() {
    let class = |class: &str| {
        let annotation = format!("annotations: {{autoscaling.knative.dev/class: {class}}}");
        let template = format!("{{template: {{metadata: {{{annotation}}}, spec");
        document_problems(&HELLO.replace("{template: {spec", &template))
    };
    let refused = |class: &str| {
        format!(
            "invalid value: {class}: spec.template.metadata.annotations.autoscaling.knative.dev/class \
             (only kpa.autoscaling.knative.dev scales without Kubernetes)"
        )
    };
    assert_eq!(class(scale_policy::KPA_CLASS), "fine");
    for foreign in [scale_policy::HPA_CLASS, "sloth.example.com"] {
        assert_eq!(class(foreign), refused(foreign));
    }
}

#[test]
fn the_local_node_reports_unsupported_and_ignored_fields() {
    let at = "spec.template.spec.containers[0]";
    let refused = |field: &str| {
        format!(
            "must not set the field(s): {at}.{field} (the local node has no ConfigMaps and no Secrets)"
        )
    };
    check_table(&[
        (
            container_problems(
                "{image: a, env: [{name: A, valueFrom: {secretKeyRef: {name: s, key: k}}}]}",
            ),
            &refused("env[0].valueFrom"),
        ),
        (
            container_problems("{image: a, envFrom: [{configMapRef: {name: m, optional: true}}]}"),
            &refused("envFrom[0]"),
        ),
    ]);
    let warned = |container: &str| -> Vec<String> {
        let text = HELLO.replace("{image: dev.local/hello:v1}", container);
        let value = serde_norway::from_str(&text).expect("YAML");
        let all = service_warnings(&value, &ScalePolicyConfig::default());
        all.into_iter().map(|it| it.path.replace(&format!("{at}."), "")).collect()
    };
    let bounds = "{cpu: 1, memory: 1Mi, ephemeral-storage: 1Gi}";
    assert_eq!(
        warned(&format!("{{image: a, resources: {{limits: {bounds}, requests: {bounds}}}}}")),
        [
            "resources.limits.ephemeral-storage",
            "resources.requests.ephemeral-storage",
            "resources.requests.memory",
        ]
    );
    let container = "{image: a, terminationMessagePolicy: FallbackToLogsOnError}";
    assert_eq!(warned(container), [""; 0], "the local node does this in any case");
}

#[test]
fn traffic_follows_knatives_rules() {
    check_table(&[
        (traffic_problems("[{percent: 100}]"), "fine"),
        (
            traffic_problems("[{percent: 60}, {revisionName: hello-00001, percent: 60}]"),
            "Traffic targets sum to 120, want 100: spec.traffic",
        ),
        (
            traffic_problems("[{percent: 101}, {revisionName: hello-00001, percent: -1}]"),
            "expected 0 <= -1 <= 100: spec.traffic[1].percent; expected 0 <= 101 <= 100: spec.traffic[0].percent",
        ),
        (
            traffic_problems("[{percent: 100, tag: a}, {revisionName: hello-00001, tag: a}]"),
            "Multiple definitions for \"a\": spec.traffic[0].tag, spec.traffic[1].tag",
        ),
        (
            traffic_problems("[{percent: 100, tag: 1a}]"),
            "invalid value: not a DNS 1035 label: [a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is '[a-z]([-a-z0-9]*[a-z0-9])?')]: spec.traffic[0].tag",
        ),
        (
            traffic_problems("[{percent: 100, latestRevision: true, revisionName: hello-00001}]"),
            "may not set revisionName \"hello-00001\" when latestRevision is true: spec.traffic[0].latestRevision",
        ),
        (
            traffic_problems("[{percent: 100, url: 'http://a'}]"),
            "must not set the field(s): spec.traffic[0].url",
        ),
    ]);
}

#[test]
fn one_file_may_hold_several_documents_and_each_stands_alone() {
    let text = format!(
        "{HELLO}---\nkind: Nonsense\nmetadata: {{name: b}}\n---\n{}",
        HELLO.replace("hello}", "third}")
    );
    let all = manifest_documents(&text, &ScalePolicyConfig::default());
    let names: Vec<_> = all
        .iter()
        .map(|it| match it {
            ManifestDocument::Service { name, .. } => (name.name.clone(), true),
            ManifestDocument::Refused { name, .. } => (name.clone().expect("named").name, false),
        })
        .collect();
    assert_eq!(names, [("hello".into(), true), ("b".into(), false), ("third".into(), true)]);
}

/// Settings that became stricter do not affect Services that were admitted before: they stay in force.
#[test]
fn an_existing_service_is_read_whatever_the_settings_are_now() {
    let (defaults, features) = (RevisionDefaults::default(), Features::default());
    let autoscaler = ScalePolicyConfig::default();
    let settings = RuleSettings {
        platform: PlatformKind::Kubernetes,
        defaults: &defaults,
        features: &features,
        autoscaler: &autoscaler,
        cluster_domain: "cluster.local",
        trusts_ingresses: false,
    };
    let read = |spec: Value| {
        let metadata = serde_json::json!({"name": "a".repeat(63), "namespace": "n", "uid": "u"});
        observed_service(&serde_json::json!({"metadata": metadata, "spec": spec}), settings)
    };
    let spec = serde_json::json!({
        "template": {"metadata": {"creationTimestamp": null}, "spec": {
            "timeoutSeconds": 900,
            "nodeSelector": {"a": "b"},
            "containers": [{"image": "x", "volumeMounts": [{"name": "v", "mountPath": "/tmp"}]}],
            "volumes": [{"name": "v", "secret": {"secretName": "s"}}],
        }},
        "traffic": [{"latestRevision": true, "percent": 100}],
    });
    let (name, manifest) = read(spec).expect("readable");
    assert_eq!(name.name.len(), 63);
    let template: Value = serde_json::from_str(&manifest.template).expect("JSON");
    assert_eq!(template["spec"]["timeoutSeconds"], 900);
    assert_eq!(template["spec"]["containers"][0].get("readinessProbe"), None, "passed admission");
    let new_service =
        read(serde_json::json!({"template": {"spec": {"containers": [{"image": "x"}]}}}));
    let (_, manifest) = new_service.expect("readable");
    let template: Value = serde_json::from_str(&manifest.template).expect("JSON");
    assert_eq!(template["spec"]["timeoutSeconds"], 300, "it never passed admission");
    assert_eq!(*manifest.traffic, [TrafficSpec { percent: 100, ..TrafficSpec::default() }]);
    let broken = read(serde_json::json!({"template": {"spec": {"containers": [{"name": "x"}]}}}));
    let problem = problems_line(&broken.expect_err("no image"));
    assert_eq!(problem, "missing field(s): spec.template.spec.containers[0].image");
}

/// The parser cannot find the next document after a syntax error, so documents are separated before.
#[test]
fn a_document_that_is_not_yaml_hides_no_other_one() {
    let text = format!("{HELLO}---\na: [\n--- # third\n{}", HELLO.replace("hello}", "third}"));
    let all = manifest_documents(&text, &ScalePolicyConfig::default());
    let [first, bad, third] = all.as_slice() else { panic!("{all:?}") };
    assert!(matches!(first, ManifestDocument::Service { name, .. } if name.name == "hello"));
    assert!(matches!(third, ManifestDocument::Service { name, .. } if name.name == "third"));
    let ManifestDocument::Refused { name: None, reason } = bad else { panic!("{bad:?}") };
    let line = text.lines().position(|it| it == "--- # third").expect("a marker") + 1;
    assert!(reason.starts_with("not readable as YAML: "), "{reason}");
    assert!(reason.contains(&format!("line {line} ")), "a line of the file: {reason}");
}

#[test]
fn documents_are_separated_as_the_parser_separates_them() {
    let texts = [
        "",
        "---\n",
        "# only a comment\n",
        "a: 1\n---\nb: 2\n",
        "%YAML 1.1\n---\na: 1\n...\n%YAML 1.1\n# comment\n---\nb: 2\n",
        "--- {a: 1}\n---\n---\r\nb: |\n  ---\n  text\n---more: 1\n",
        "a: |\n ---\n b\nc: '--- x'\n---\td\n",
    ];
    for text in texts {
        let parsed = serde_norway::Deserializer::from_str(text);
        let expected: Vec<Value> = parsed
            .map(|it| Value::deserialize(it).expect(text))
            .filter(|it| !it.is_null())
            .collect();
        let config = ScalePolicyConfig::default();
        assert_eq!(manifest_documents(text, &config).len(), expected.len(), "{text}");
    }
}
