use std::sync::LazyLock;

use super::*;
use crate::model::{
    config_maps::{Features, Flag, RevisionDefaults},
    problem,
    scale_policy::ScalePolicyConfig,
};

mod deployable_pods;
mod mutation;
mod properties;

static DEFAULTS: LazyLock<RevisionDefaults> = LazyLock::new(RevisionDefaults::default);
static FEATURES: LazyLock<Features> = LazyLock::new(Features::default);
static AUTOSCALER: LazyLock<ScalePolicyConfig> = LazyLock::new(ScalePolicyConfig::default);

fn settings(features: &Features) -> RuleSettings<'_> {
    RuleSettings {
        platform: PlatformKind::Kubernetes,
        defaults: &DEFAULTS,
        features,
        autoscaler: &AUTOSCALER,
        cluster_domain: "cluster.local",
        trusts_ingresses: false,
    }
}

fn yaml(text: &str) -> Value {
    serde_norway::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// Makes a Service whose spec is `spec`.
fn service(spec: &str) -> Value {
    yaml(&format!(
        "{{apiVersion: serving.knative.dev/v1, kind: Service, metadata: {{name: a, namespace: n}}, spec: {spec}}}"
    ))
}

/// Makes a Service whose template has the spec `spec`.
fn template(spec: &str) -> Value {
    service(&format!("{{template: {{spec: {spec}}}}}"))
}

/// Makes a Service whose only container is `container`.
fn container(container: &str) -> Value {
    template(&format!("{{containers: [{container}]}}"))
}

fn create_request<'a>(
    kind: AdmittedKind,
    object: &'a Value,
    features: &'a Features,
) -> AdmissionRequest<'a> {
    AdmissionRequest { kind, object, old: None, user: None, settings: settings(features) }
}

/// Returns the problems of an object that is created: its defaults are set, then it is validated.
fn problems_with(kind: AdmittedKind, object: &Value, features: &Features) -> String {
    let (object, _) = apply_defaults(&create_request(kind, object, features));
    problem::knative_message(&validate(&create_request(kind, &object, features)).problems)
}

fn problems(kind: AdmittedKind, object: &Value) -> String {
    problems_with(kind, object, &FEATURES)
}

/// Returns the problems of a change from `old` to `new`.
fn update_problems(kind: AdmittedKind, old: &Value, new: &Value) -> String {
    let (old, _) = apply_defaults(&create_request(kind, old, &FEATURES));
    let request =
        |object| AdmissionRequest { old: Some(&old), ..create_request(kind, object, &FEATURES) };
    let (new, _) = apply_defaults(&request(new));
    problem::knative_message(&validate(&request(&new)).problems)
}

fn check_table(kind: AdmittedKind, table: &[(Value, &str)]) {
    for (object, expected) in table {
        assert_eq!(problems(kind, object), *expected, "{object}");
    }
}

const AT: &str = "spec.template.spec.containers[0]";

#[test]
fn valid_services_are_admitted() {
    check_table(
        AdmittedKind::Service,
        &[
            (container("{image: a}"), ""),
            (container("{image: a, resources: {limits: {cpu: 1}}, securityContext: {}}"), ""),
            (
                service(
                    "{template: {metadata: {creationTimestamp: null, name: a-1}, spec: {containers: [{image: a}]}}}",
                ),
                "",
            ),
            (
                template(
                    "{containers: [{image: a, volumeMounts: [{name: v, mountPath: /v}]}], volumes: [{name: v, secret: {secretName: s}}]}",
                ),
                "",
            ),
            (container("{image: a, ports: [{name: h2c}]}"), ""),
        ],
    );
}

/// Names, and owners of Configurations and Routes (knative/serving `pkg/apis/serving/metadata_validation.go` at
/// 98e5ef9).
#[test]
fn names_are_judged_in_knatives_words() {
    const LABEL: &str = "[a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is '[a-z]([-a-z0-9]*[a-z0-9])?')]";
    let named = |meta: &str| {
        yaml(&format!(
            "{{metadata: {meta}, spec: {{template: {{spec: {{containers: [{{image: a}}]}}}}}}}}"
        ))
    };
    let problems_of = |meta: &str, parent: &str| {
        yaml(&format!(
            "{{metadata: {parent}, spec: {{template: {{metadata: {meta}, spec: {{containers: [{{image: a}}]}}}}}}}}"
        ))
    };
    let label = |at: &str| format!("not a DNS 1035 label: {LABEL}: {at}");
    let prefix = format!("not a DNS 1035 label prefix: {LABEL}: metadata.generateName");
    let bad_own = format!("invalid value: {}", label("spec.template.metadata.name"));
    check_table(
        AdmittedKind::Service,
        &[
            (named("{name: A}"), &label("metadata.name")),
            (named("{generateName: 1-}"), &prefix),
            (named("{}"), "name or generateName is required: metadata.name"),
            (named("{generateName: a-}"), ""),
            (
                problems_of("{name: b-1}", "{name: a}"),
                "invalid value: \"b-1\" must have prefix \"a-\": spec.template.metadata.name",
            ),
            (problems_of("{name: a-1}", "{name: a}"), ""),
            (
                problems_of("{name: a-1}", "{generateName: a-}"),
                "must not set the field(s): spec.template.metadata.name",
            ),
            (problems_of("{name: a_1}", "{name: a}"), &bad_own),
        ],
    );
    let long = format!("{{name: {}}}", "a".repeat(64));
    let expected = "not a DNS 1035 label: [must be no more than 63 characters]: metadata.name";
    assert_eq!(problems(AdmittedKind::Service, &named(&long)), expected);
    let fits = format!("{{name: {}}}", "a".repeat(63));
    assert_eq!(problems(AdmittedKind::Service, &named(&fits)), "");
}

/// Containers, ports and environment (knative/serving `pkg/apis/serving/k8s_validation.go` at 98e5ef9).
#[test]
fn containers_are_judged_in_knatives_words() {
    let at = |rest: &str| format!("{AT}{rest}");
    for (text, expected) in [
        ("{name: a}", format!("missing field(s): {AT}.image")),
        ("{image: a, name: queue-proxy}", format!("\"queue-proxy\" is a reserved container name: {AT}.name")),
        ("{image: a, env: [{name: K_SERVICE, value: x}]}", format!("\"K_SERVICE\" is a reserved environment variable: {AT}.env[0].name")),
        ("{image: a, env: [{value: x}]}", format!("missing field(s): {AT}.env[0].name")),
        ("{image: a, env: [{name: N, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]}", format!("must not set the field(s): {AT}.env[0].valueFrom.fieldRef")),
        ("{image: a, envFrom: [{prefix: x}]}", format!("expected exactly one, got neither: {AT}.envFrom[0].configMapRef, {AT}.envFrom[0].secretRef")),
        ("{image: a, envFrom: [{configMapRef: {name: x}, secretRef: {name: y}}]}", format!("expected exactly one, got both: {AT}.envFrom[0].configMapRef, {AT}.envFrom[0].secretRef")),
        ("{image: a, ports: [{containerPort: 9090}]}", format!("invalid value: 9090 is a reserved port: {AT}.ports[0].containerPort\n9090 is a reserved port, please use a different value")),
        ("{image: a, ports: [{containerPort: 65536}]}", format!("expected 1 <= 65536 <= 65535: {AT}.ports[0].containerPort")),
        ("{image: a, ports: [{containerPort: 80, name: x}]}", format!("Port name x is not allowed: {AT}.ports[0]\nName must be empty, or one of: 'h2c', 'http1'")),
        ("{image: a, ports: [{containerPort: 80, protocol: UDP}]}", format!("invalid value: UDP: {AT}.ports[0].protocol")),
        ("{image: a, ports: [{containerPort: 80, hostPort: 80}]}", format!("must not set the field(s): {AT}.ports[0].hostPort")),
        ("{image: a, ports: [{containerPort: 80}, {containerPort: 81}]}", "more than one container port is set: spec.template.spec.containers[*].ports\nOnly a single port is allowed across all containers".into()),
        ("{image: a, lifecycle: {preStop: {exec: {command: [a]}}}}", format!("must not set the field(s): {AT}.lifecycle")),
        ("{image: a, stdin: true, tty: true}", format!("must not set the field(s): {AT}.stdin, {AT}.tty")),
        ("{image: a, terminationMessagePolicy: Never}", format!("invalid value: Never: {AT}.terminationMessagePolicy")),
        ("{image: a, securityContext: {privileged: true}}", format!("must not set the field(s): {AT}.securityContext.privileged")),
        ("{image: a, securityContext: {privileged: false}}", String::new()),
        ("{image: a, securityContext: {runAsUser: -1}}", format!("expected 0 <= -1 <= 2147483647: {AT}.securityContext.runAsUser")),
        ("{image: a, securityContext: {capabilities: {add: [X]}}}", format!("must not set the field(s): {AT}.securityContext.capabilities.add")),
        ("{image: a, volumeMounts: [{name: v, mountPath: /v}]}", format!("volumeMount has no matching volume: {AT}.volumeMounts[0].name")),
    ] {
        assert_eq!(problems(AdmittedKind::Service, &container(text)), expected, "{text}");
    }
    let image = problems(AdmittedKind::Service, &container("{image: 'A b'}"));
    let expected = format!(
        "Failed to parse image reference: {}\nimage: \"A b\", error: could not parse reference: A b",
        at(".image")
    );
    assert!(image.starts_with(&expected), "{image}");
}

/// Pods with several containers (knative/serving `pkg/apis/serving/k8s_validation.go` at 98e5ef9).
#[test]
fn several_containers_are_judged_in_knatives_words() {
    let features = Features { multi_container: Flag::Disabled, ..Features::default() };
    let two = template("{containers: [{image: a, ports: [{containerPort: 80}]}, {image: b}]}");
    assert_eq!(problems(AdmittedKind::Service, &two), "");
    let off = "multi-container is off, but found 2 containers: spec.template.spec.containers";
    assert_eq!(problems_with(AdmittedKind::Service, &two, &features), off);
    let probe = |port: &str| {
        template(&format!(
            "{{containers: [{{image: a, ports: [{{containerPort: 80}}]}}, {{image: b, livenessProbe: {{tcpSocket: {port}}}}}]}}"
        ))
    };
    let at = "spec.template.spec.containers[1].livenessProbe";
    let disallowed = format!("must not set the field(s): {at}");
    assert_eq!(problems(AdmittedKind::Service, &probe("{port: 81}")), disallowed);
    let features = Features { multi_container_probing: Flag::Enabled, ..Features::default() };
    assert_eq!(problems_with(AdmittedKind::Service, &probe("{port: 81}"), &features), "");
    let unnamed = format!("invalid value: 0: {at}.tcpSocket.port\nProbe port must be specified");
    assert_eq!(problems_with(AdmittedKind::Service, &probe("{port: 0}"), &features), unnamed);
    check_table(
        AdmittedKind::Service,
        &[
            (
                template("{containers: [{image: a}, {image: b}]}"),
                "missing field(s): spec.template.spec.containers[*].ports",
            ),
            (template("{containers: []}"), "missing field(s): spec.template.spec.containers"),
            (template("{}"), "missing field(s): spec.template.spec.containers"),
            (
                template(
                    "{containers: [{image: a, name: x, ports: [{containerPort: 80}]}, {image: b, name: x}]}",
                ),
                "duplicate container name \"x\": spec.template.spec.containers[1].name",
            ),
        ],
    );
}

/// Init containers (knative/serving `pkg/apis/serving/k8s_validation.go` at 98e5ef9).
#[test]
fn init_containers_are_judged_in_knatives_words() {
    let with =
        |init: &str| template(&format!("{{initContainers: [{init}], containers: [{{image: a}}]}}"));
    let off = "pod spec support for init-containers is off, but found 1 init containers: spec.template.spec.initContainers";
    assert_eq!(problems(AdmittedKind::Service, &with("{image: b}")), off);
    let features = Features { podspec_init_containers: Flag::Enabled, ..Features::default() };
    let problems_of = |init: &str| problems_with(AdmittedKind::Service, &with(init), &features);
    assert_eq!(problems_of("{image: b}"), "");
    let at = "spec.template.spec.initContainers[0]";
    let not = |field: &str| format!("field not allowed in an init container: {at}.{field}");
    assert_eq!(problems_of("{image: b, ports: [{containerPort: 80}]}"), not("ports"));
    assert_eq!(
        problems_of("{image: b, readinessProbe: {tcpSocket: {port: 1}}}"),
        not("readinessProbe")
    );
    assert_eq!(
        problems_of("{image: b, startupProbe: {tcpSocket: {port: 1}}}"),
        not("startupProbe")
    );
    assert_eq!(
        problems_of("{image: b, livenessProbe: {tcpSocket: {port: 1}}}"),
        not("livenessProbe")
    );
    assert_eq!(problems_of("{image: b, env: [{name: PORT, value: '1'}]}"), "");
}

/// Probes (knative/serving `pkg/apis/serving/k8s_validation.go` at 98e5ef9).
#[test]
fn probes_are_judged_in_knatives_words() {
    let at = format!("{AT}.readinessProbe");
    for (text, expected) in [
        ("{httpGet: {path: /, port: http}}", String::new()),
        ("{httpGet: {path: /}, periodSeconds: 3}", String::new()),
        ("{grpc: {port: 8080}}", String::new()),
        (
            "{httpGet: {port: 81}}",
            format!("invalid value: 81: {at}.httpGet.port\nProbe port must match container port"),
        ),
        (
            "{tcpSocket: {port: x}}",
            format!("invalid value: x: {at}.tcpSocket.port\nProbe port must match container port"),
        ),
        (
            "{httpGet: {}, exec: {command: [a]}}",
            format!("expected exactly one, got both: {at}.exec, {at}.httpGet"),
        ),
        (
            "{periodSeconds: 0, failureThreshold: 1}",
            format!(
                "failureThreshold is disallowed when periodSeconds is zero: {at}.failureThreshold"
            ),
        ),
        (
            "{periodSeconds: 0, timeoutSeconds: 1}",
            format!("timeoutSeconds is disallowed when periodSeconds is zero: {at}.timeoutSeconds"),
        ),
        ("{periodSeconds: -1}", format!("expected 0 <= -1 <= 2147483647: {at}.periodSeconds")),
        (
            "{successThreshold: -1}",
            format!("expected 1 <= -1 <= 2147483647: {at}.successThreshold"),
        ),
        (
            "{terminationGracePeriodSeconds: 1}",
            format!("must not set the field(s): {at}.terminationGracePeriodSeconds"),
        ),
    ] {
        let object = container(&format!("{{image: a, readinessProbe: {text}}}"));
        assert_eq!(problems(AdmittedKind::Service, &object), expected, "{text}");
    }
    let none = container("{image: a, livenessProbe: {periodSeconds: 1}}");
    let at = format!("{AT}.livenessProbe");
    let expected = format!(
        "expected exactly one, got neither: {at}.exec, {at}.grpc, {at}.httpGet, {at}.tcpSocket"
    );
    assert_eq!(problems(AdmittedKind::Service, &none), expected);
}

const MOUNT: &str = "spec.template.spec.containers[0].volumeMounts[0]";
const VOLUME: &str = "spec.template.spec.volumes[0]";

/// Makes a Service whose container mounts the volume `v` at `path`.
fn mounted(volumes: &str, path: &str) -> Value {
    template(&format!(
        "{{containers: [{{image: a, volumeMounts: [{{name: v, mountPath: '{path}'}}]}}], volumes: [{volumes}]}}"
    ))
}

/// Mounts of volumes (knative/serving `pkg/apis/serving/k8s_validation.go` at 98e5ef9).
#[test]
fn mounts_are_judged_in_knatives_words() {
    let reserved = |path: &str| format!("mountPath {path:?} is a reserved path: {MOUNT}.mountPath");
    for (path, expected) in [
        ("/data/", String::new()),
        ("/", reserved("/")),
        ("/dev/../dev/log", reserved("/dev/log")),
        ("data", format!("invalid value: data: {MOUNT}.mountPath")),
        ("", format!("missing field(s): {MOUNT}.mountPath")),
    ] {
        let object = mounted("{name: v, emptyDir: {}}", path);
        assert_eq!(problems(AdmittedKind::Service, &object), expected, "{path}");
    }
    let twice = template(
        "{containers: [{image: a, volumeMounts: [{name: v, mountPath: /v}, {name: v, mountPath: /v/}]}], volumes: [{name: v, emptyDir: {}}]}",
    );
    let expected = format!("invalid value: \"/v/\" must be unique: {AT}.volumeMounts[1].mountPath");
    assert_eq!(problems(AdmittedKind::Service, &twice), expected);
    let secret = mounted("{name: v, secret: {secretName: s}}", "/v");
    let (mut written, _) =
        apply_defaults(&create_request(AdmittedKind::Service, &secret, &FEATURES));
    let mount = &mut written["spec"]["template"]["spec"]["containers"][0]["volumeMounts"][0];
    mount["readOnly"] = false.into();
    let result = validate(&create_request(AdmittedKind::Service, &written, &FEATURES));
    let expected =
        format!("volume mount should be readOnly for this type of volume: {MOUNT}.readOnly");
    assert_eq!(problem::knative_message(&result.problems), expected);
}

/// Kinds of volumes, with their features off and on (knative/serving `pkg/apis/serving/k8s_validation.go` at 98e5ef9).
#[test]
fn kinds_of_volumes_are_judged_in_knatives_words() {
    let none = format!(
        "expected exactly one, got neither: {VOLUME}.configMap, {VOLUME}.emptyDir, {VOLUME}.projected, {VOLUME}.secret"
    );
    let off = |kind: &str, field: &str| {
        format!(
            "{kind} volume support is disabled, but found {kind} volume v: {VOLUME}\nmust not set the field(s): {VOLUME}.{field}"
        )
    };
    let claim = format!(
        "Persistent volume claim support is disabled, but found persistent volume claim c: {VOLUME}\nPersistent volume write support is disabled, but found persistent volume claim c that is not read-only: {VOLUME}\nmust not set the field(s): {VOLUME}.persistentVolumeClaim"
    );
    for (volume, expected) in [
        ("configMap: {name: c}", String::new()),
        ("secret: {secretName: s}", String::new()),
        ("projected: {sources: [{secret: {name: s}}]}", String::new()),
        (
            "emptyDir: {}, secret: {secretName: s}",
            format!("expected exactly one, got both: {VOLUME}.emptyDir, {VOLUME}.secret"),
        ),
        ("hostPath: {path: /}", off("HostPath", "hostPath")),
        ("csi: {driver: d}", off("CSI", "csi")),
        ("persistentVolumeClaim: {claimName: c}", claim),
        ("nfs: {path: /, server: s}", format!("{none}\nmust not set the field(s): {VOLUME}.nfs")),
    ] {
        let object = mounted(&format!("{{name: v, {volume}}}"), "/v");
        assert_eq!(problems(AdmittedKind::Service, &object), expected, "{volume}");
    }
    assert_eq!(problems(AdmittedKind::Service, &mounted("{name: v}", "/v")), none);
}

/// Contents of volumes (knative/serving `pkg/apis/serving/k8s_validation.go` at 98e5ef9).
#[test]
fn contents_of_volumes_are_judged_in_knatives_words() {
    let source = format!("{VOLUME}.projected.sources[0]");
    let second = "spec.template.spec.volumes[1].name";
    for (volumes, expected) in [
        (
            "{name: v, emptyDir: {medium: Disk}}",
            format!("invalid value: Disk: {VOLUME}.emptyDir.medium"),
        ),
        (
            "{name: v, emptyDir: {sizeLimit: -1}}",
            format!("invalid value: -1: {VOLUME}.emptyDir.sizeLimit"),
        ),
        (
            "{name: v, projected: {sources: [{}]}}",
            format!(
                "expected exactly one, got neither: {source}.configMap, {source}.downwardAPI, {source}.secret, {source}.serviceAccountToken"
            ),
        ),
        (
            "{name: v, secret: {secretName: s, items: [{key: a}]}}",
            format!("missing field(s): {VOLUME}.secret.items[0].path"),
        ),
        (
            "{name: v, emptyDir: {}}, {name: w, emptyDir: {}}",
            format!("volume with name \"w\" not mounted: {second}"),
        ),
        (
            "{name: v, emptyDir: {}}, {name: v, emptyDir: {}}",
            format!("duplicate volume name \"v\": {second}"),
        ),
    ] {
        assert_eq!(problems(AdmittedKind::Service, &mounted(volumes, "/v")), expected, "{volumes}");
    }
}

/// Each field behind a feature, with the feature off and on (knative/serving `pkg/apis/serving/fieldmask.go` at
/// 98e5ef9).
#[test]
fn fields_behind_features_follow_them() {
    type Turn = fn(&mut Features);
    let table: [(&str, &str, Turn); 14] = [
        ("affinity", "{}", |it| it.podspec_affinity = Flag::Enabled),
        (
            "topologySpreadConstraints",
            "[{maxSkew: 1, topologyKey: a, whenUnsatisfiable: DoNotSchedule}]",
            |it| {
                it.podspec_topologyspreadconstraints = Flag::Enabled;
            },
        ),
        ("hostAliases", "[{ip: 1.2.3.4}]", |it| it.podspec_hostaliases = Flag::Allowed),
        ("nodeSelector", "{a: b}", |it| it.podspec_nodeselector = Flag::Allowed),
        ("tolerations", "[{key: a}]", |it| it.podspec_tolerations = Flag::Enabled),
        ("runtimeClassName", "a", |it| it.podspec_runtimeclassname = Flag::Enabled),
        ("securityContext", "{runAsUser: 1}", |it| it.podspec_securitycontext = Flag::Enabled),
        ("shareProcessNamespace", "true", |it| it.podspec_shareprocessnamespace = Flag::Enabled),
        ("priorityClassName", "a", |it| it.podspec_priorityclassname = Flag::Enabled),
        ("schedulerName", "a", |it| it.podspec_schedulername = Flag::Enabled),
        ("dnsPolicy", "Default", |it| it.podspec_dnspolicy = Flag::Enabled),
        ("dnsConfig", "{}", |it| it.podspec_dnsconfig = Flag::Enabled),
        ("hostIPC", "true", |it| it.podspec_hostipc = Flag::Enabled),
        ("hostNetwork", "true", |it| it.podspec_hostnetwork = Flag::Enabled),
    ];
    for (field, value, switch) in table {
        let object = template(&format!("{{{field}: {value}, containers: [{{image: a}}]}}"));
        let off = problems(AdmittedKind::Service, &object);
        let expected = format!("must not set the field(s): spec.template.spec.{field}");
        assert!(off.contains(&expected), "{field}: {off}");
        let mut features = Features::default();
        switch(&mut features);
        assert_eq!(problems_with(AdmittedKind::Service, &object, &features), "", "{field}");
    }
    for zero in [
        "hostNetwork: false",
        "hostPID: false",
        "hostIPC: false",
        "dnsPolicy: ''",
        "schedulerName: ''",
    ] {
        let object = template(&format!("{{{zero}, containers: [{{image: a, stdin: false}}]}}"));
        assert_eq!(problems(AdmittedKind::Service, &object), "", "{zero}");
    }
    for field in ["nodeName", "restartPolicy", "terminationGracePeriodSeconds", "subdomain"] {
        let value = if field.ends_with("Seconds") { "1" } else { "a" };
        let object = template(&format!("{{{field}: {value}, containers: [{{image: a}}]}}"));
        let expected = format!("must not set the field(s): spec.template.spec.{field}");
        assert_eq!(problems(AdmittedKind::Service, &object), expected);
    }
}

/// Bounds, traffic and annotations (knative/serving `pkg/apis/serving/v1/*_validation.go` at 98e5ef9).
#[test]
fn limits_traffic_and_annotations_are_judged_in_knatives_words() {
    let traffic = |targets: &str| {
        service(&format!(
            "{{template: {{spec: {{containers: [{{image: a}}]}}}}, traffic: {targets}}}"
        ))
    };
    let annotated = |key: &str, value: &str| {
        service(&format!(
            "{{template: {{metadata: {{annotations: {{{key}: '{value}'}}}}, spec: {{containers: [{{image: a}}]}}}}}}"
        ))
    };
    let at = "spec.template.metadata.annotations";
    let scale = format!("{at}.autoscaling.knative.dev");
    let side = "queue.sidecar.serving.knative.dev";
    for (object, expected) in [
        (template("{timeoutSeconds: 601, containers: [{image: a}]}"), "expected 0 <= 601 <= 600: spec.template.spec.timeoutSeconds".to_owned()),
        (template("{timeoutSeconds: -1, containers: [{image: a}]}"), "expected 0 <= -1 <= 600: spec.template.spec.timeoutSeconds".into()),
        (template("{containerConcurrency: 1001, containers: [{image: a}]}"), "expected 0 <= 1001 <= 1000: spec.template.spec.containerConcurrency".into()),
        (template("{serviceAccountName: A_b, containers: [{image: a}]}"), "invalid value: A_b: spec.template.spec.serviceAccountName\na lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')".into()),
        (traffic("[{percent: 60}, {revisionName: a-1, percent: 60}]"), "Traffic targets sum to 120, want 100: spec.traffic".into()),
        (traffic("[{percent: 100, tag: x}, {revisionName: a-1, tag: x}]"), "Multiple definitions for \"x\": spec.traffic[0].tag, spec.traffic[1].tag".into()),
        (traffic("[{percent: 100, configurationName: b}]"), "must not set the field(s): spec.traffic[0].configurationName".into()),
        (traffic("[{percent: 100, url: 'http://x'}]"), "must not set the field(s): spec.traffic[0].url".into()),
        (traffic("[{percent: 100, latestRevision: false}]"), "may not set revisionName \"\" when latestRevision is false: spec.traffic[0].latestRevision".into()),
        (annotated("autoscaling.knative.dev/min-scale", "x"), format!("invalid value: x: {scale}/min-scale")),
        (annotated("autoscaling.knative.dev/initial-scale", "-1"), format!("invalid value: -1: {scale}/initial-scale must be greater than 0")),
        (annotated("serving.knative.dev/progress-deadline", "0s"), format!("progress-deadline=0s must be positive: {at}.serving.knative.dev/progress-deadline")),
        (annotated("serving.knative.dev/progress-deadline", ""), String::new()),
        (annotated("autoscaling.knative.dev/metric-aggregation-algorithm", ""), String::new()),
        (annotated("serving.knative.dev/progressDeadline", "1s1ms"), format!("progress-deadline=1s1ms is not at second precision: {at}.serving.knative.dev/progressDeadline")),
        (annotated(&format!("{side}/resource-percentage"), "101"), format!("expected 0.1 <= 101 <= 100: {at}.[{side}/resource-percentage]")),
        (annotated(&format!("{side}/cpu-resource-request"), "x"), format!("invalid value: x: {at}.[{side}/cpu-resource-request]")),
        (annotated(&format!("{side}/cpu-resource-request"), "100m"), String::new()),
        (annotated("networking.knative.dev/x", "y"), format!("invalid key name \"networking.knative.dev/x\": {at}")),
    ] {
        assert_eq!(problems(AdmittedKind::Service, &object), expected, "{object}");
    }
    let misplaced = yaml(
        "{metadata: {name: a, annotations: {autoscaling.knative.dev/max-scale: '1', serving.knative.dev/rollout-duration: 1.5s}}, spec: {template: {spec: {containers: [{image: a}]}}}}",
    );
    let expected = "invalid key name \"autoscaling.knative.dev/max-scale\": metadata.annotations\nautoscaling annotations must be put under \"spec.template.metadata.annotations\" to work\nrollout-duration=1.5s is not at second precision: metadata.annotations.serving.knative.dev/rollout-duration";
    assert_eq!(problems(AdmittedKind::Service, &misplaced), expected);
}

/// A Route without a Service gets no default target: it must name the targets of its requests.
#[test]
fn routes_name_their_targets() {
    let route =
        |targets: &str| yaml(&format!("{{metadata: {{name: r}}, spec: {{traffic: {targets}}}}}"));
    check_table(
        AdmittedKind::Route,
        &[
            (route("[{configurationName: c, percent: 100}]"), ""),
            (route("[]"), "Traffic targets sum to 0, want 100: spec.traffic"),
            (
                route("[{percent: 100}]"),
                "expected exactly one, got neither: spec.traffic[0].configurationName, spec.traffic[0].revisionName",
            ),
            (
                route("[{percent: 100, configurationName: c, revisionName: r}]"),
                "expected exactly one, got both: spec.traffic[0].configurationName, spec.traffic[0].revisionName",
            ),
            (
                yaml(
                    "{metadata: {name: r, labels: {serving.knative.dev/service: s}}, spec: {traffic: [{configurationName: c, percent: 100}]}}",
                ),
                "missing field(s): metadata.labels.serving.knative.dev/service",
            ),
            (yaml("{metadata: {name: r}}"), "missing field(s): spec"),
        ],
    );
    let key = problems(AdmittedKind::Route, &route("[{percent: 100, revisionName: 'a b'}]"));
    assert!(
        key.starts_with("invalid key name \"a b\": spec.traffic[0].revisionName\nname part must"),
        "{key}"
    );
}

/// The spec of a Revision is immutable (knative/serving `pkg/apis/serving/v1/revision_validation.go` at 98e5ef9).
#[test]
fn a_revision_never_changes() {
    let revision = |image: &str| {
        yaml(&format!("{{metadata: {{name: a-1}}, spec: {{containers: [{{image: {image}}}]}}}}"))
    };
    assert_eq!(problems(AdmittedKind::Revision, &revision("x")), "");
    assert_eq!(
        update_problems(
            AdmittedKind::Revision,
            &revision("x"),
            &apply_defaults(&create_request(AdmittedKind::Revision, &revision("x"), &FEATURES)).0
        ),
        ""
    );
    let changed = update_problems(
        AdmittedKind::Revision,
        &apply_defaults(&create_request(AdmittedKind::Revision, &revision("x"), &FEATURES)).0,
        &{
            let mut new =
                apply_defaults(&create_request(AdmittedKind::Revision, &revision("x"), &FEATURES))
                    .0;
            new["spec"]["containers"][0]["image"] = "y".into();
            new
        },
    );
    let expected = "Immutable fields changed (-old +new): spec\ncontainers[0].image:\n\t-: \"x\"\n\t+: \"y\"\n";
    assert_eq!(changed, expected);
    let problem = problems(
        AdmittedKind::Revision,
        &yaml("{metadata: {name: a-1}, spec: {containers: [{image: a, stdin: true}]}}"),
    );
    assert_eq!(problem, "must not set the field(s): spec.containers[0].stdin");
}

/// A template that names its Revision changes only together with that name
/// (knative/serving `pkg/apis/serving/v1/revision_validation.go` at 98e5ef9).
#[test]
fn a_named_template_changes_only_with_its_name() {
    let named = |name: &str, image: &str| {
        yaml(&format!(
            "{{metadata: {{name: a}}, spec: {{template: {{metadata: {{name: {name}}}, spec: {{containers: [{{image: {image}}}]}}}}}}}}"
        ))
    };
    let (old, _) =
        apply_defaults(&create_request(AdmittedKind::Service, &named("a-1", "x"), &FEATURES));
    let mut new = old.clone();
    new["spec"]["template"]["spec"]["containers"][0]["image"] = "y".into();
    let expected = "Saw the following changes without a name change (-old +new): spec.template.metadata.name\nspec.containers[0].image:\n\t-: \"x\"\n\t+: \"y\"\n";
    assert_eq!(update_problems(AdmittedKind::Service, &old, &new), expected);
    new["spec"]["template"]["metadata"]["name"] = "a-2".into();
    assert_eq!(update_problems(AdmittedKind::Service, &old, &new), "");
    assert_eq!(update_problems(AdmittedKind::Service, &old, &old), "");
}

/// Names and references of DomainMappings (knative/serving `pkg/apis/serving/v1beta1` at 98e5ef9).
#[test]
#[allow(clippy::too_many_lines, reason = "a table")]
fn domain_mappings_are_judged_in_knatives_words() {
    let mapping = |name: &str, spec: &str| {
        yaml(&format!("{{metadata: {{name: {name}, namespace: n}}, spec: {spec}}}"))
    };
    let valid = "{ref: {apiVersion: serving.knative.dev/v1, kind: Service, name: s}}";
    let (filled, _) = apply_defaults(&create_request(
        AdmittedKind::DomainMapping,
        &mapping("a.example.com", valid),
        &FEATURES,
    ));
    assert_eq!(filled["spec"]["ref"]["namespace"], "n");
    check_table(
        AdmittedKind::DomainMapping,
        &[
            (mapping("a.example.com", valid), ""),
            (
                mapping("a.example.com", "{ref: {kind: Service, name: s}}"),
                "missing field(s): spec.ref.apiVersion",
            ),
            (mapping("a.example.com", "{}"), "missing field(s): spec.ref"),
            (
                mapping("a.example.com", "{tls: {secretName: shop.tls}}"),
                "missing field(s): spec.ref",
            ),
            (
                mapping("a.example.com", "{tls: {}}"),
                "missing field(s): spec.ref, spec.tls.secretName",
            ),
            (
                mapping("a.example.com", &valid.replace("}}", "}, tls: {secretName: a_b}}")),
                "invalid value: a_b: spec.tls.secretName",
            ),
            (mapping("a.example.com", &valid.replace("}}", "}, tls: null}")), ""),
            // The API server bounds the whole name of a Secret, and not its labels.
            (
                mapping(
                    "a.example.com",
                    &valid.replace("}}", &format!("}}, tls: {{secretName: {}}}}}", "s".repeat(64))),
                ),
                "",
            ),
            (
                mapping("a", valid),
                "invalid name \"a\": name: Invalid value: \"a\": should be a domain with at least two segments separated by dots: metadata.name",
            ),
            (
                mapping("s.n.svc.cluster.local", valid),
                "invalid name \"s.n.svc.cluster.local\": must not be a subdomain of cluster local domain \"cluster.local\": metadata.name",
            ),
            (
                mapping(
                    "a.example.com",
                    "{ref: {apiVersion: v, kind: Service, name: s, namespace: m}}",
                ),
                "mismatched namespaces: spec.ref.namespace\nparent namespace: \"n\" does not match ref: \"m\"",
            ),
            (
                yaml(&format!(
                    "{{metadata: {{name: a.b, namespace: n, generateName: a}}, spec: {valid}}}"
                )),
                "must not set the field(s): metadata.generateName",
            ),
        ],
    );
}

/// Rouse's own annotations of DomainMappings.
#[test]
fn policies_of_a_domain_are_refused_with_their_fault() {
    let mapping = |annotations: &str| {
        let spec =
            "{ref: {apiVersion: serving.knative.dev/v1, kind: Service, name: s, namespace: n}}";
        let metadata = format!("{{name: a.example.com, namespace: n, annotations: {annotations}}}");
        yaml(&format!("{{metadata: {metadata}, spec: {spec}}}"))
    };
    check_table(
        AdmittedKind::DomainMapping,
        &[
            (mapping("{rouse.dev/client-ca: clients}"), ""),
            (mapping("{rouse.dev/client-ca: clients, rouse.dev/client-auth: optional}"), ""),
            (mapping("{rouse.dev/client-ca: clients, rouse.dev/client-auth: require}"), ""),
            (mapping("{rouse.dev/hsts: max-age=31536000; includeSubDomains}"), ""),
            (mapping("{rouse.dev/tls: passthrough}"), ""),
            (
                mapping("{rouse.dev/tls: terminate}"),
                "invalid value: terminate: metadata.annotations.rouse.dev/tls\nuse passthrough",
            ),
            (
                mapping("{rouse.dev/tls: passthrough, rouse.dev/client-ca: clients}"),
                "invalid value: clients: metadata.annotations.rouse.dev/client-ca\nTLS is passed through, so the server has to ask",
            ),
            (
                mapping("{rouse.dev/tls: passthrough, rouse.dev/path-prefix: /a}"),
                "invalid value: /a: metadata.annotations.rouse.dev/path-prefix\nTLS is passed through, so the gateway reads no paths",
            ),
            (mapping("{rouse.dev/tls: passthrough, rouse.dev/path-prefix: /}"), ""),
            (
                mapping("{rouse.dev/client-ca: other/clients}"),
                "invalid value: other/clients: metadata.annotations.rouse.dev/client-ca\nit must be the name of a Secret",
            ),
            (
                mapping("{rouse.dev/client-ca: clients, rouse.dev/client-auth: maybe}"),
                "invalid value: maybe: metadata.annotations.rouse.dev/client-auth\nuse require or optional",
            ),
            (
                mapping("{rouse.dev/client-auth: require}"),
                "missing field(s): metadata.annotations.rouse.dev/client-ca",
            ),
            (
                mapping("{rouse.dev/hsts: includeSubDomains}"),
                "invalid value: includeSubDomains: metadata.annotations.rouse.dev/hsts\nmax-age is missing",
            ),
            (mapping("{networking.knative.dev/disable-external-domain-tls: 'true'}"), ""),
            (
                mapping("{networking.knative.dev/disable-external-domain-tls: 'yes'}"),
                "invalid value: yes: metadata.annotations.networking.knative.dev/disable-external-domain-tls",
            ),
        ],
    );
}

/// Rouse's own annotations for the host and the paths of DomainMappings.
#[test]
fn hosts_and_paths_of_a_domain_are_refused_with_their_fault() {
    let mapping = |name: &str, annotations: &str| {
        let spec =
            "{ref: {apiVersion: serving.knative.dev/v1, kind: Service, name: s, namespace: n}}";
        let metadata = format!("{{name: {name}, namespace: n, annotations: {annotations}}}");
        yaml(&format!("{{metadata: {metadata}, spec: {spec}}}"))
    };
    let host = "metadata.annotations.rouse.dev/host";
    let host_rule =
        "it must be a host of two labels or more in lower case, or such a host behind *.";
    let wildcard_of_all = format!("invalid value: *.com: {host}\n{host_rule}");
    let not_local = format!(
        "invalid name \"default.svc.cluster.local\": must not be a subdomain of cluster local domain \"cluster.local\": {host}"
    );
    check_table(
        AdmittedKind::DomainMapping,
        &[
            (mapping("a.example.com", "{rouse.dev/path-prefix: /a/b}"), ""),
            (mapping("a-b", "{rouse.dev/host: a.example.com, rouse.dev/path-prefix: /}"), ""),
            (mapping("all", "{rouse.dev/host: '*.example.com'}"), ""),
            (mapping("a.b", "{rouse.dev/path-prefix: /a, rouse.dev/strip-prefix: 'true'}"), ""),
            (mapping("a", "{rouse.dev/host: '*.com'}"), wildcard_of_all.as_str()),
            (mapping("a", "{rouse.dev/host: '*.default.svc.cluster.local'}"), not_local.as_str()),
            (
                mapping("a.b", "{rouse.dev/path-prefix: a}"),
                "invalid value: a: metadata.annotations.rouse.dev/path-prefix\nit must begin with /",
            ),
            (
                mapping("a.b", "{rouse.dev/strip-prefix: 'true'}"),
                "invalid value: true: metadata.annotations.rouse.dev/strip-prefix\nit needs rouse.dev/path-prefix with a prefix other than /",
            ),
            (
                mapping("a.b", "{rouse.dev/path-prefix: /a, rouse.dev/strip-prefix: 'yes'}"),
                "invalid value: yes: metadata.annotations.rouse.dev/strip-prefix\nuse true or false",
            ),
        ],
    );
}

/// Objects of Knative's internal groups (knative/serving `pkg/apis/autoscaling/v1alpha1` at 98e5ef9, knative/networking
/// `pkg/apis/networking/v1alpha1` at 17b28c6).
#[test]
fn internal_kinds_get_defaults_and_are_judged() {
    let pa = |spec: &str| yaml(&format!("{{metadata: {{name: a-1}}, spec: {spec}}}"));
    let valid = "{scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: a-1-deployment}, protocolType: http1}";
    let (filled, _) =
        apply_defaults(&create_request(AdmittedKind::PodAutoscaler, &pa(valid), &FEATURES));
    let annotations = &filled["metadata"]["annotations"];
    assert_eq!(annotations["autoscaling.knative.dev/class"], "kpa.autoscaling.knative.dev");
    assert_eq!(annotations["autoscaling.knative.dev/metric"], "concurrency");
    check_table(
        AdmittedKind::PodAutoscaler,
        &[
            (pa(valid), ""),
            (pa("{}"), "missing field(s): spec"),
            (
                pa(
                    "{containerConcurrency: -1, scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: a, uid: u}}",
                ),
                "expected 0 <= -1 <= 1000: spec.containerConcurrency\nmust not set the field(s): spec.scaleTargetRef.uid",
            ),
        ],
    );
    let sks = |spec: &str| yaml(&format!("{{metadata: {{name: a-1}}, spec: {spec}}}"));
    check_table(
        AdmittedKind::ServerlessService,
        &[
            (
                sks(
                    "{mode: Serve, protocolType: h2c, objectRef: {apiVersion: apps/v1, kind: Deployment, name: a}}",
                ),
                "",
            ),
            (
                sks("{mode: Both, objectRef: {kind: 'a b', name: A, apiVersion: v1}}"),
                "invalid value: Both: spec.mode\ninvalid value: a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?'): spec.objectRef.name\ninvalid value: a valid C identifier must start with alphabetic character or '_', followed by a string of alphanumeric characters or '_' (e.g. 'my_name',  or 'MY_NAME',  or 'MyName', regex used for validation is '[A-Za-z_][A-Za-z0-9_]*'): spec.objectRef.kind\nmissing field(s): spec.protocolType",
            ),
        ],
    );
    check_table(
        AdmittedKind::ClusterDomainClaim,
        &[(yaml("{metadata: {name: a.b}, spec: {}}"), "missing field(s): spec.namespace")],
    );
}

/// Warnings about insecure defaults, and retired spellings that are still read.
#[test]
fn insecure_defaults_and_older_spellings_get_warnings() {
    let object = yaml(
        "{metadata: {name: a, annotations: {serving.knative.dev/rolloutDuration: 10s}}, spec: {template: {metadata: {annotations: {autoscaling.knative.dev/minScale: '1'}}, spec: {containers: [{image: a, securityContext: {runAsNonRoot: true, allowPrivilegeEscalation: false, seccompProfile: {type: RuntimeDefault}}}]}}}}",
    );
    let result = validate(&create_request(
        AdmittedKind::Service,
        &apply_defaults(&create_request(AdmittedKind::Service, &object, &FEATURES)).0,
        &FEATURES,
    ));
    assert_eq!(result.problems, []);
    let expected = "Kubernetes default value is insecure, Knative may default this to secure in a future release: spec.template.spec.containers[0].securityContext.capabilities\nautoscaling.knative.dev/minScale is an older spelling, use autoscaling.knative.dev/min-scale: spec.template.metadata.annotations.autoscaling.knative.dev/minScale\nserving.knative.dev/rolloutDuration is an older spelling, use serving.knative.dev/rollout-duration: metadata.annotations.serving.knative.dev/rolloutDuration";
    assert_eq!(problem::knative_message(&result.warnings), expected);
}

/// Rouse's own annotation for the gateway port of a Service or Route.
#[test]
fn a_gateway_port_is_a_port() {
    let with_port = |port: &str| {
        yaml(&format!(
            "{{metadata: {{name: a, namespace: n, annotations: {{rouse.dev/port: '{port}'}}}}, spec: {{template: {{metadata: {{annotations: {{rouse.dev/protocol: tcp}}}}, spec: {{containers: [{{image: a}}]}}}}}}}}"
        ))
    };
    for port in ["1", "5432", "65535"] {
        assert_eq!(problems_with(AdmittedKind::Service, &with_port(port), &FEATURES), "");
    }
    for port in ["0", "65536", "-1", "+5432", "db", "", "5432 "] {
        let expected = format!(
            "invalid value: {port}: metadata.annotations.rouse.dev/port\nuse a port, 1 to 65535"
        );
        let problems = problems_with(AdmittedKind::Service, &with_port(port), &FEATURES);
        assert_eq!(problems, expected);
    }
}

#[test]
fn settings_of_the_gateway_beside_passthrough_get_warnings() {
    let warnings = |annotations: &str| {
        let reference =
            "{apiVersion: serving.knative.dev/v1, kind: Service, name: s, namespace: n}";
        let object = yaml(&format!(
            "{{metadata: {{name: a.example.com, namespace: n, annotations: {{networking.knative.dev/http-protocol: redirected, rouse.dev/hsts: max-age=1{annotations}}}}}, spec: {{tls: {{secretName: s}}, ref: {reference}}}}}"
        ));
        let result = validate(&create_request(AdmittedKind::DomainMapping, &object, &FEATURES));
        assert_eq!(result.problems, []);
        let without_effect = result.warnings.into_iter().filter(|it| it.message.contains("effect"));
        without_effect.map(|it| it.path).collect::<Vec<_>>()
    };
    let expected = [
        "metadata.annotations.networking.knative.dev/http-protocol",
        "metadata.annotations.rouse.dev/hsts",
        "spec.tls",
    ];
    assert_eq!(warnings(", rouse.dev/tls: passthrough"), expected);
    assert_eq!(warnings(""), [""; 0]);
}

#[test]
fn settings_of_http_beside_raw_tcp_get_warnings() {
    let warnings = |protocol: &str| {
        let object = yaml(&format!(
            "{{metadata: {{name: a, annotations: {{networking.knative.dev/http-protocol: redirected}}}}, spec: {{template: {{metadata: {{annotations: {{rouse.dev/protocol: {protocol}}}}}, spec: {{idleTimeoutSeconds: 7, containers: [{{image: a}}]}}}}}}}}"
        ));
        let request = create_request(AdmittedKind::Service, &object, &FEATURES);
        let (filled, _) = apply_defaults(&request);
        let result = validate(&create_request(AdmittedKind::Service, &filled, &FEATURES));
        assert_eq!(result.problems, []);
        let without_effect = result.warnings.into_iter().filter(|it| it.message.contains("effect"));
        without_effect.map(|it| it.path).collect::<Vec<_>>()
    };
    let expected = [
        "metadata.annotations.networking.knative.dev/http-protocol",
        "spec.template.spec.idleTimeoutSeconds",
    ];
    assert_eq!(warnings("tcp"), expected);
    assert_eq!(warnings("h2c"), [""; 0]);
}

#[test]
fn standby_is_checked_and_warned_of_as_other_settings_of_a_template() {
    let result = |annotations: &str, probe: &str| {
        let object = yaml(&format!(
            "{{metadata: {{name: a}}, spec: {{template: {{metadata: {{annotations: {{{annotations}}}}}, spec: {{containers: [{{image: a, livenessProbe: {probe}}}]}}}}}}}}"
        ));
        let request = create_request(AdmittedKind::Service, &object, &FEATURES);
        let (filled, _) = apply_defaults(&request);
        let result = validate(&create_request(AdmittedKind::Service, &filled, &FEATURES));
        let warnings = result.warnings.into_iter().filter(|it| it.path.contains("standby"));
        let warnings: Vec<Problem> = warnings.collect();
        (problem::knative_message(&result.problems), problem::knative_message(&warnings))
    };
    let at = "spec.template.metadata.annotations.rouse.dev/standby";
    let (tcp, exec) = ("{tcpSocket: {port: 8080}}", "{exec: {command: [a]}}");
    assert_eq!(result("rouse.dev/standby: '1'", tcp), (String::new(), String::new()));
    let refused = format!("invalid value: swap: {at}-memory\nuse keep or reclaim");
    assert_eq!(result("rouse.dev/standby-memory: swap", tcp), (refused, String::new()));
    let warned = format!(
        "rouse.dev/standby has no effect: a probe runs a command, which the kubelet could not run in a frozen pod: {at}"
    );
    assert_eq!(result("rouse.dev/standby: '1'", exec), (String::new(), warned));
}

/// Kinds that the controller writes may also be written by users, without any effect.
#[test]
fn kinds_that_only_the_controller_writes_get_a_warning() {
    let warnings_of = |kind: AdmittedKind, owners: &str, old: bool| {
        let meta = format!("{{name: a, namespace: n, ownerReferences: {owners}}}");
        let object = yaml(&format!("{{metadata: {meta}, spec: {{}}}}"));
        let old = old.then_some(&object);
        let result =
            validate(&AdmissionRequest { old, ..create_request(kind, &object, &FEATURES) });
        result.warnings.iter().any(|it| it.message.contains("has no effect"))
    };
    let owned = "[{apiVersion: v1, kind: Revision, name: a, uid: u, controller: true}]";
    for kind in [AdmittedKind::PodAutoscaler, AdmittedKind::ServerlessService] {
        assert!(
            warnings_of(kind, "[]", false) && warnings_of(kind, "[]", true),
            "{kind:?} without a Revision"
        );
        assert!(warnings_of(kind, owned, true), "{kind:?} that is changed");
        assert!(!warnings_of(kind, owned, false), "{kind:?} as the controller makes it");
    }
    assert!(warnings_of(AdmittedKind::Metric, owned, false));
    assert!(!warnings_of(AdmittedKind::ClusterDomainClaim, "[]", false), "an administrator's own");
}

#[test]
fn the_class_of_another_ingress_has_an_effect_once_an_ingress_is_trusted() {
    let object = |class: &str| {
        let annotations = format!("{{networking.knative.dev/ingress-class: {class}}}");
        let meta = format!("{{name: a, namespace: n, annotations: {annotations}}}");
        let traffic = "[{configurationName: a, percent: 100}]";
        yaml(&format!("{{metadata: {meta}, spec: {{traffic: {traffic}}}}}"))
    };
    let warnings = |class: &str, trusts_ingresses: bool| {
        let (object, mut settings) = (object(class), settings(&FEATURES));
        settings.trusts_ingresses = trusts_ingresses;
        let request = create_request(AdmittedKind::Route, &object, &FEATURES);
        validate(&AdmissionRequest { settings, ..request }).warnings.len()
    };
    let own = "rouse.ingress.networking.knative.dev";
    assert_eq!([warnings("x.test", false), warnings(own, false)], [1, 0]);
    assert_eq!([warnings("x.test", true), warnings(own, true)], [0, 0]);
}
