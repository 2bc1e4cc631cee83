//! Every manifest in `examples/` does what its comments describe. Those of scaled Services are tested in
//! [`example_servers`](super::scaled_services::example_servers), with the servers that they name.

use std::fs;

use tests::installed_cluster::RouseCluster;
use tests::knative_features::EnabledFeatures;

use super::scaled_services::example_servers;

/// Examples with requests to their services: file, service, path, and a part of the response's body.
const EXPECTED_RESPONSES: [(&str, &str, &str, &str); 13] = [
    ("concurrency", "concurrency", "/", "Hello from concurrency-00001-deployment-"),
    ("config", "config", "/env", "GREETING=Good evening\n"),
    ("config", "config", "/env", "PASSWORD=not-a-real-one\n"),
    ("config", "config", "/files/motto", "Wake on demand"),
    ("containers", "containers", "/files/greeting", "prepared"),
    ("domain", "named", "/", "Hello from named-00001-deployment-"),
    ("h2c", "h2c", "/protocol", "HTTP/2.0"),
    ("hello", "hello", "/", "Hello from hello-00001-deployment-"),
    ("private", "private", "/", "Hello from private-00001-deployment-"),
    ("probes", "probes", "/ready", "ready"),
    ("scale", "scale", "/", "Hello from scale-00001-deployment-"),
    ("split", "split", "/", "Hello from split-"),
    ("standby", "standby", "/", "Hello from standby-00001-deployment-"),
];

/// Examples whose services keep a pod without requests.
const KEEP_A_POD: [&str; 2] = ["scale", "standby"];

/// Examples of Knative Services in the order of their names, changed to the namespace `namespace`.
fn examples(namespace: &str) -> Vec<(String, String)> {
    // Tests run in the directory of their package.
    let folder = fs::read_dir("../examples").expect("the examples are there");
    let files = folder.map(|entry| entry.expect("a folder can be read").path());
    let yaml = files.filter(|file| file.extension().is_some_and(|it| it == "yaml"));
    let read = |file: std::path::PathBuf| {
        let text = fs::read_to_string(&file).expect("an example can be read");
        let name = file.file_stem().expect("a file has a name").to_string_lossy().into_owned();
        let text = text.replace("namespace: default", &format!("namespace: {namespace}"));
        (name, text)
    };
    let is_knative =
        |(name, _): &(String, String)| !example_servers::NAMES.contains(&name.as_str());
    let mut examples: Vec<_> = yaml.map(read).filter(is_knative).collect();
    examples.sort();
    examples
}

/// Waits until one pod of a Revision is frozen.
fn wait_frozen(rouse: &RouseCluster, namespace: &str, revision: &str) {
    rouse.cluster.wait(&format!("a pod of {revision} to be frozen"), || {
        let autoscaler = rouse.cluster.get(&["podautoscaler", "--namespace", namespace, revision]);
        (autoscaler["status"]["standbyScale"] == 1).then_some(())
    });
}

/// Applies all examples. `split-2` changes the service of `split`, so it is applied once that one is Ready.
fn apply_all(rouse: &RouseCluster, namespace: &str, manifests: &[(String, String)]) {
    for (name, yaml) in manifests {
        if name.starts_with("split-2") {
            rouse.wait_ready(namespace, "ksvc", "split");
        }
        rouse.cluster.wait(&format!("{name} to be accepted"), || {
            match rouse.apply(namespace, yaml) {
                Ok(()) => Some(()),
                // A setting takes effect soon, but not on all replicas at the same moment.
                Err(error) if error.contains("support for init-containers is off") => None,
                Err(error) => panic!("{name}: {error}"),
            }
        });
    }
}

#[test]
fn every_example_answers_from_zero_and_leaves_nothing_behind() {
    let rouse = RouseCluster::shared();
    let features = EnabledFeatures::enable(&rouse.cluster, &["kubernetes.podspec-init-containers"]);
    let namespace = rouse.namespace("examples");
    let name = &namespace.name;
    let manifests = examples(name);
    for (file, _) in &manifests {
        let is_known = EXPECTED_RESPONSES.iter().any(|(name, ..)| file.starts_with(name));
        assert!(is_known, "no test knows the response of {file}.yaml");
    }
    apply_all(&rouse, name, &manifests);
    let mut services: Vec<&str> =
        EXPECTED_RESPONSES.iter().map(|(_, service, ..)| *service).collect();
    services.dedup();
    for service in &services {
        rouse.wait_ready(name, "ksvc", service);
    }
    for service in services.iter().filter(|service| !KEEP_A_POD.contains(*service)) {
        rouse.wait_asleep(name, service);
    }
    assert_eq!(rouse.pods(name, "scale").len(), 1, "min-scale holds one pod");
    wait_frozen(&rouse, name, "standby-00001");
    for (file, service, path, expected) in EXPECTED_RESPONSES {
        let response = rouse.client_on("node1").get(&(rouse.service_url(name, service) + path));
        assert!(response.status == 200 && response.body.contains(expected), "{file}: {response}");
    }
    check_hosts(&rouse, name);
    check_hard_limit(&rouse, name);

    for (file, yaml) in manifests.iter().filter(|(file, _)| !file.starts_with("split-2")) {
        rouse.delete(name, yaml).unwrap_or_else(|error| panic!("{file}: {error}"));
    }
    drop(features);
    rouse.cluster.wait("everything of the examples to be gone", || {
        let kinds = "configurations,revisions,routes,podautoscalers,deployments,services,endpointslices,pods";
        let list = rouse.cluster.get(&[kinds, "--namespace", name]);
        list["items"].as_array().is_some_and(Vec::is_empty).then_some(())
    });
}

/// Checks the hosts of the examples, from outside of the cluster.
fn check_hosts(rouse: &RouseCluster, namespace: &str) {
    let response = rouse.get_through_gateway("hello.example.org", "/", &[]);
    assert!(response.pod().starts_with("named-00001-deployment-"), "{response}");
    for (host, expected) in [("current-split", "split-blue"), ("candidate-split", "split-green")] {
        let response =
            rouse.get_through_gateway(&format!("{host}.{namespace}.example.com"), "/", &[]);
        assert!(response.pod().starts_with(expected), "{response}");
    }
    let response = rouse.get_through_gateway(&format!("private.{namespace}.example.com"), "/", &[]);
    assert_eq!(response.status, 404, "{response}");
    let service = rouse.cluster.get(&["ksvc", "--namespace", namespace, "private"]);
    let url = format!("http://private.{namespace}.svc.cluster.local");
    assert_eq!(service["status"]["url"], url);
}

/// Sends 40 requests, six at a time, to at most three pods, which take one request at a time each.
fn check_hard_limit(rouse: &RouseCluster, namespace: &str) {
    let address = rouse.service_address(namespace, "concurrency");
    let args = ["--stages", "6x60s", "--requests", "40", "--path", "/?sleep=300"];
    let requests = rouse.client_on("node2").start_load(&address, "concurrency", &args).finish();
    tests::load_process::assert_none_lost(&requests, 40);
    // Some of the pods have ended by now, or end while they are queried.
    let counts = rouse.pods(namespace, "concurrency").into_iter().filter_map(|pod| {
        let ip = pod["status"]["podIP"].as_str()?.to_owned();
        let counts = rouse.client_on("node1").get(&format!("http://{ip}:8080/counts"));
        (counts.status == 200).then_some(counts)
    });
    for counts in counts {
        assert!(counts.body.contains("\"max_in_flight\":1,"), "{counts}");
    }
    let mut pods: Vec<&str> = requests.iter().map(|request| request.pod.as_str()).collect();
    pods.sort_unstable();
    pods.dedup();
    assert!((2..=3).contains(&pods.len()), "{pods:?}");
}
