//! Life of one service: it wakes, scales out and in, is rolled out in steps, rolled back, and deleted.
#![allow(clippy::print_stdout, reason = "a test's own output is where its reader looks")]

use std::collections::{BTreeMap, BTreeSet};

use tests::client_pod::ClientPod;
use tests::installed_cluster::RouseCluster;
use tests::load_process::{LoadRequest, assert_none_lost};

/// Manifest of the service `story` with `newest` as its template's revision and these traffic targets.
fn service_manifest(newest: &str, traffic: &[(&str, u32, &str)]) -> String {
    let targets = traffic.iter().map(|(revision, percent, tag)| {
        let tag = if tag.is_empty() { String::new() } else { format!(", tag: {tag}") };
        format!("  - {{revisionName: story-{revision}, percent: {percent}{tag}}}\n")
    });
    format!(
        "apiVersion: serving.knative.dev/v1
kind: Service
metadata: {{name: story}}
spec:
  template:
    metadata:
      name: story-{newest}
      annotations:
        autoscaling.knative.dev/window: 6s
        autoscaling.knative.dev/target: \"5\"
        autoscaling.knative.dev/target-utilization-percentage: \"100\"
        autoscaling.knative.dev/max-scale: \"5\"
    spec:
      containers:
      - image: dev.local/hello:v1
        env: [{{name: VERSION, value: {newest}}}]
  traffic:
{}",
        targets.collect::<String>()
    )
}

/// Number of requests that each revision served, by the names of its pods.
fn requests_by_revision(requests: &[LoadRequest]) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for request in requests {
        let revision = request.pod.split("-deployment-").next().unwrap_or_default();
        *counts.entry(revision.to_owned()).or_default() += 1;
    }
    counts
}

/// Sends load while `work` runs, and returns its requests.
fn load_during(
    client: &ClientPod,
    address: &str,
    host: &str,
    stages: &str,
    work: impl FnOnce(),
) -> Vec<LoadRequest> {
    let args = ["--stages", stages, "--path", "/?sleep=50"];
    let load = client.start_load(address, host, &args);
    work();
    load.finish()
}

/// Number of pods of the service, without those that end: they belong to an earlier scale.
fn count_running(rouse: &RouseCluster, namespace: &str) -> usize {
    let pods = rouse.pods(namespace, "story");
    pods.iter().filter(|pod| pod["metadata"]["deletionTimestamp"].is_null()).count()
}

fn check_scaling(rouse: &RouseCluster, namespace: &str, address: &str) {
    let mut most = 0;
    let requests = load_during(rouse.client_on("node1"), address, "story", "20x12s", || {
        rouse.cluster.wait("the service to scale out", || {
            most = most.max(count_running(rouse, namespace));
            (most >= 4).then_some(())
        });
    });
    assert_none_lost(&requests, 100);
    let pods: BTreeSet<&str> = requests.iter().map(|request| request.pod.as_str()).collect();
    assert!(pods.len() >= 4, "20 at once, 5 a pod: {pods:?}");
    assert!(most <= 5, "max-scale is 5, and there were {most}");
    // One pod suffices for two clients; the others end without losing a request.
    let requests = load_during(rouse.client_on("node1"), address, "story", "2x16s", || {
        rouse.cluster.wait("the service to scale in", || {
            (count_running(rouse, namespace) == 1).then_some(())
        });
    });
    assert_none_lost(&requests, 50);
    rouse.wait_asleep(namespace, "story");
}

fn check_split(rouse: &RouseCluster, namespace: &str, address: &str) {
    let host = format!("story.{namespace}.example.com");
    let gateway = rouse.gateway();
    let paths = [(address, "story"), (gateway.as_str(), host.as_str())];
    for (address, host) in paths {
        let args = ["--stages", "4x60s", "--requests", "400"];
        let requests = rouse.client_on("node1").start_load(address, host, &args).finish();
        assert_none_lost(&requests, 400);
        let counts = requests_by_revision(&requests);
        println!("{host}: {counts:?}");
        // The expected number is 120; five standard deviations are 46.
        let new = counts.get("story-v2").copied().unwrap_or_default();
        assert!((74..=166).contains(&new), "{counts:?}");
    }
    for (tag, revision) in [("old", "story-v1"), ("new", "story-v2")] {
        let inside =
            rouse.client_on("node2").get(&rouse.service_url(namespace, &format!("{tag}-story")));
        let outside = rouse.get_through_gateway(&format!("{tag}-{host}"), "/", &[]);
        for response in [inside, outside] {
            assert!(response.pod().starts_with(revision), "{tag}: {response}");
        }
    }
}

/// Moves all traffic to `revision` under load: no request is lost, and in the end no other revision gets requests.
fn move_traffic(rouse: &RouseCluster, namespace: &str, address: &str, revision: &str) {
    let target = format!(r#"{{"revisionName":"{revision}","percent":100}}"#);
    let patch = format!(r#"{{"spec":{{"traffic":[{target}]}}}}"#);
    let args = ["patch", "ksvc", "story", "--type=merge", "--namespace", namespace, "--patch"];
    let requests = load_during(rouse.client_on("node2"), address, "story", "4x10s", || {
        rouse.cluster.kubectl(&[&args[..], &[&patch]].concat()).expect("admission accepts it");
        rouse.wait_ready(namespace, "ksvc", "story");
    });
    assert_none_lost(&requests, 50);
    let args = ["--stages", "4x30s", "--requests", "40"];
    let after = rouse.client_on("node2").start_load(address, "story", &args).finish();
    assert_none_lost(&after, 40);
    assert_eq!(requests_by_revision(&after), BTreeMap::from([(revision.to_owned(), 40)]));
}

#[test]
fn a_service_scales_rolls_out_and_back_and_goes_without_losing_a_request() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("story");
    let namespace = &namespace.name;
    rouse.apply_until_ready(namespace, &service_manifest("v1", &[("v1", 100, "")]));
    rouse.wait_asleep(namespace, "story");
    let address = rouse.service_address(namespace, "story");
    check_scaling(&rouse, namespace, &address);

    rouse.apply_until_ready(
        namespace,
        &service_manifest("v2", &[("v1", 70, "old"), ("v2", 30, "new")]),
    );
    check_split(&rouse, namespace, &address);
    move_traffic(&rouse, namespace, &address, "story-v2");
    move_traffic(&rouse, namespace, &address, "story-v1");

    rouse
        .delete(namespace, &service_manifest("v2", &[("v1", 100, "")]))
        .expect("it may be deleted");
    rouse.cluster.wait("all of the service to be gone", || {
        let kinds = "ksvc,configurations,revisions,routes,podautoscalers,sks,metrics.autoscaling.internal.knative.dev,\
                     images.caching.internal.knative.dev,deployments,replicasets,services,endpointslices,pods";
        let list = rouse.cluster.get(&[kinds, "--namespace", namespace]);
        list["items"].as_array().is_some_and(Vec::is_empty).then_some(())
    });
    let host = format!("story.{namespace}.example.com");
    assert_eq!(rouse.get_through_gateway(&host, "/", &[]).status, 404, "its name is unknown");
}
