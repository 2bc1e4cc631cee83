//! Environment of a service's process in a running pod: Knative's runtime contract (knative/specs
//! `specs/serving/runtime-contract.md` at 22d54f8).

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tests::installed_cluster::RouseCluster;

const SERVICE: &str = "
apiVersion: v1
kind: Secret
metadata: {name: secret}
stringData: {key: value-of-key}
---
apiVersion: serving.knative.dev/v1
kind: Service
metadata: {name: contract}
spec:
  template:
    metadata:
      annotations: {autoscaling.knative.dev/min-scale: \"1\"}
    spec:
      timeoutSeconds: 42
      containers:
      - image: dev.local/hello:v1
        args: [first, second]
        workingDir: /work
        env: [{name: OWN, value: mine}, {name: HELLO_FILES, value: /secrets}]
        securityContext: {runAsUser: 4711}
        volumeMounts: [{name: secret, mountPath: /secrets}, {name: work, mountPath: /work}]
      volumes: [{name: secret, secret: {secretName: secret}}, {name: work, emptyDir: {}}]
";

/// Directory below `/proc` of a pod's process.
fn proc_directory(rouse: &RouseCluster, namespace: &str, pod: &str) -> PathBuf {
    let netns = rouse.cluster.netns_of(namespace, pod);
    netns.parent().and_then(Path::parent).expect("a process has a folder").to_owned()
}

fn only_pod(rouse: &RouseCluster, namespace: &str, service: &str) -> (String, Value) {
    let pods = rouse.pods(namespace, service);
    let [pod] = &pods[..] else { panic!("{} pods", pods.len()) };
    (pod["metadata"]["name"].as_str().expect("it has a name").to_owned(), pod.clone())
}

/// Options of the mount at the path `mount_point`, from a process' mountinfo.
fn mount_options(mounts: &str, mount_point: &str) -> String {
    let options = |line: &str| {
        let cells: Vec<&str> = line.split(' ').collect();
        (cells.get(4) == Some(&mount_point))
            .then(|| cells.get(5).copied().unwrap_or_default().to_owned())
    };
    mounts
        .lines()
        .find_map(options)
        .unwrap_or_else(|| panic!("nothing is mounted at {mount_point}"))
}

fn check_environment(rouse: &RouseCluster, url: &str, pod: &str) {
    let environment = rouse.client_on("node1").get(&format!("{url}/env")).body;
    for expected in [
        "PORT=8080",
        "K_SERVICE=contract",
        "K_CONFIGURATION=contract",
        "K_REVISION=contract-00001",
        "OWN=mine",
        "cwd=/work",
        &format!("HOSTNAME={pod}"),
    ] {
        assert!(
            environment.lines().any(|line| line == expected),
            "{expected} is missing in {environment}"
        );
    }
    assert!(environment.contains("\"first\", \"second\"]"), "its arguments: {environment}");
    // Service links are off, as in Knative: with many Services they cost time at each start.
    assert!(!environment.contains("CONTRACT_SERVICE_HOST="), "{environment}");
    assert_eq!(rouse.client_on("node1").get(&format!("{url}/files/key")).body, "value-of-key");
}

fn check_headers(rouse: &RouseCluster, namespace: &str) {
    let host = format!("contract.{namespace}.example.com");
    let headers =
        rouse.get_through_gateway(&host, "/headers", &["K-Revision: other", "X-Own: kept"]).body;
    assert!(headers.contains(&format!("host: {host}\n")), "{headers}");
    for name in
        ["forwarded: for=", "x-forwarded-for: ", "x-forwarded-proto: http\n", "x-own: kept\n"]
    {
        assert!(
            headers.lines().any(|line| (line.to_owned() + "\n").starts_with(name)),
            "{name}: {headers}"
        );
    }
    assert!(!headers.contains("k-revision: other"), "from the client: {headers}");
}

fn check_files(process: &Path, pod: &str) {
    let root = process.join("root");
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
    assert_eq!(read("etc/hostname").trim(), pod);
    assert!(read("etc/hosts").contains("localhost"));
    assert!(read("etc/resolv.conf").contains("svc.cluster.local"), "names of Services resolve");
    for device in ["null", "zero", "random", "urandom", "full", "tty", "stdin", "stdout", "stderr"]
    {
        assert!(root.join("dev").join(device).symlink_metadata().is_ok(), "/dev/{device}");
    }
    let input = fs::read_link(process.join("fd/0")).expect("it has an input");
    assert_eq!(input, Path::new("/dev/null"), "its input is at its end");
    let mounts = fs::read_to_string(process.join("mountinfo")).expect("it has mounts");
    assert!(mount_options(&mounts, "/proc/sys").starts_with("ro"), "sysctl may not be written");
    let cgroups = mounts.lines().filter(|line| line.contains(" - cgroup")).collect::<Vec<_>>();
    assert!(!cgroups.is_empty(), "limits can be read");
    for line in cgroups {
        assert!(line.split(' ').nth(5).is_some_and(|it| it.starts_with("ro")), "cgroups: {line}");
    }
    assert!(mount_options(&mounts, "/secrets").starts_with("ro"), "secrets may not be written");
    assert!(mount_options(&mounts, "/work").starts_with("rw"), "a folder of its own may");
    assert!(mounts.contains(" /dev/termination-log "), "the termination log is mounted");
    let status = fs::read_to_string(process.join("status")).expect("it has a status");
    assert!(status.contains("Uid:\t4711\t4711\t"), "{status}");
}

fn check_pod_object(pod: &Value) {
    let (spec, container) = (&pod["spec"], &pod["spec"]["containers"][0]);
    assert_eq!(spec["terminationGracePeriodSeconds"], 42, "a request may take so long");
    assert_eq!(spec["enableServiceLinks"], false);
    assert_eq!(spec["containers"].as_array().map(Vec::len), Some(1), "there is no sidecar");
    assert_eq!(container["name"], "user-container");
    assert_eq!(container["terminationMessagePolicy"], "FallbackToLogsOnError");
    assert_eq!(container["ports"][0]["name"], "user-port");
    assert_eq!(container["lifecycle"]["preStop"]["httpGet"]["path"], "/wait-for-drain");
    assert_eq!(container["lifecycle"]["preStop"]["httpGet"]["port"], 8022);
    assert!(container["tty"].is_null() && container["stdin"].is_null());
    for label in ["service", "configuration", "revision"] {
        let value = pod["metadata"]["labels"][format!("serving.knative.dev/{label}")].clone();
        assert!(value.as_str().is_some_and(|it| it.starts_with("contract")), "{label}: {value}");
    }
}

#[test]
fn a_process_finds_what_the_runtime_contract_promises() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("contract");
    let namespace = &namespace.name;
    rouse.apply_until_ready(namespace, SERVICE);
    let (name, pod) = only_pod(&rouse, namespace, "contract");
    check_environment(&rouse, &rouse.service_url(namespace, "contract"), &name);
    check_headers(&rouse, namespace);
    check_files(&proc_directory(&rouse, namespace, &name), &name);
    check_pod_object(&pod);
}

#[test]
fn an_application_that_listens_on_loopback_only_is_served() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("loopback");
    let service = "apiVersion: serving.knative.dev/v1
kind: Service
metadata: {name: shy}
spec:
  template:
    spec:
      containers: [{image: \"dev.local/hello:v1\", env: [{name: HELLO_LISTEN, value: loopback}]}]
";
    rouse.apply_until_ready(&namespace.name, service);
    for node in ["node1", "node2"] {
        rouse.client_on(node).get(&rouse.service_url(&namespace.name, "shy")).pod();
    }
}

#[test]
fn what_the_contract_leaves_to_the_platform_may_not_be_set() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("refused");
    let manifest = |pod: &str, container: &str| {
        format!(
            "apiVersion: serving.knative.dev/v1
kind: Service
metadata: {{name: refused}}
spec: {{template: {{spec: {{{pod}containers: [{{image: \"dev.local/hello:v1\"{container}}}]}}}}}}
"
        )
    };
    let hook = ", lifecycle: {preStop: {exec: {command: [sleep]}}}";
    let cases = [
        (manifest("hostIPC: true, ", ""), "spec.template.spec.hostIPC"),
        (manifest("hostNetwork: true, ", ""), "spec.template.spec.hostNetwork"),
        (manifest("nodeName: node1, ", ""), "spec.template.spec.nodeName"),
        (manifest("", hook), "spec.template.spec.containers[0].lifecycle"),
        (manifest("", ", tty: true"), "spec.template.spec.containers[0].tty"),
        (
            manifest("", ", env: [{name: PORT, value: \"1\"}]"),
            "\"PORT\" is a reserved environment variable",
        ),
        (manifest("", ", ports: [{containerPort: 8012}]"), "8012 is a reserved port"),
    ];
    for (yaml, reason) in cases {
        let error = rouse.apply(&namespace.name, &yaml).expect_err("it may not be set");
        assert!(error.contains(reason), "{reason}: {error}");
    }
}
