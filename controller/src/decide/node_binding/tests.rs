use common::{outbox::Outbox, wire::NamespacedName};

use super::*;
use crate::{
    decide::machine::{ControllerEvent, ControllerStateMachine},
    model::knative::key,
    model::{
        cluster_state::{NodeState, nodes::REJECTION_BACKOFF_MS},
        object::ResourceKind,
    },
    read::observe::{PodRejection, read_rejection},
};

const NOW: UnixMillis = UnixMillis(1_000_000);

fn node(images: &[&str]) -> Value {
    json!({
        "spec": {},
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}, {"type": "DiskPressure", "status": "False"}],
            "images": [{"names": images}],
        },
    })
}

fn cluster(nodes: &[(&str, Value)]) -> ClusterState {
    let mut cluster = ClusterState::default();
    let nodes =
        nodes.iter().map(|(name, object)| ((*name).to_owned(), NodeState::from_object(object)));
    cluster.nodes.states = nodes.collect();
    cluster
}

/// Affinity that prefers different nodes, zones, … for the pods of a Revision.
fn spread_affinity(topology_key: &str, revision: &str) -> Value {
    json!({"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{
        "weight": 100,
        "podAffinityTerm": {
            "topologyKey": topology_key,
            "labelSelector": {"matchLabels": {"serving.knative.dev/revision": revision}},
        },
    }]}})
}

fn pod() -> Value {
    json!({
        "metadata": {
            "namespace": "default", "labels": {"serving.knative.dev/revision": "hello-00001"},
        },
        "spec": {
            "schedulerName": "default-scheduler",
            "containers": [{"name": "user-container", "image": "app:v1", "resources": {}, "ports": [{"containerPort": 8080}]}],
            "volumes": [{"name": "token", "projected": {"sources": []}}],
            "tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists"}],
            "affinity": spread_affinity("kubernetes.io/hostname", "hello-00001"),
        },
    })
}

#[test]
fn binds_to_a_node_that_has_the_image() {
    let cluster = cluster(&[("a", node(&["other:v1"])), ("b", node(&["app@sha256:1", "app:v1"]))]);
    assert_eq!(choose_node(&cluster, &pod(), 7, NOW), Some("b"));
    let mut two = pod();
    two["spec"]["initContainers"] = json!([{"name": "first", "image": "missing:v1"}]);
    assert_eq!(choose_node(&cluster, &two, 7, NOW), None, "every image must be there");
}

#[test]
fn an_image_is_found_by_each_of_its_names() {
    let digest = "index.docker.io/library/nginx@sha256:1";
    for (listed, image, expected) in [
        ("docker.io/library/nginx@sha256:1", digest, Some("a")),
        ("nginx@sha256:1", digest, Some("a")),
        ("docker.io/library/nginx:latest", "nginx", Some("a")),
        ("docker.io/team/app:v1", "team/app:v1", Some("a")),
        ("ghcr.io/team/app@sha256:1", "ghcr.io/team/app:v1@sha256:1", Some("a")),
        ("localhost:5000/app:latest", "localhost:5000/app", Some("a")),
        ("ghcr.io/library/nginx@sha256:1", digest, None),
        ("docker.io/library/nginx:1.29", "nginx", None),
    ] {
        let cluster = cluster(&[("a", node(&[listed]))]);
        let mut pod = pod();
        pod["spec"]["containers"][0]["image"] = image.into();
        assert_eq!(choose_node(&cluster, &pod, 0, NOW), expected, "{listed} for {image}");
    }
}

#[test]
fn chance_spreads_among_equals() {
    let cluster = cluster(&[("a", node(&["app:v1"])), ("b", node(&["app:v1"]))]);
    let places: Vec<_> = (0..4).map(|chance| choose_node(&cluster, &pod(), chance, NOW)).collect();
    assert_eq!(places, [Some("a"), Some("b"), Some("a"), Some("b")]);
}

#[test]
fn leaves_constrained_pods_to_the_scheduler() {
    let cluster = cluster(&[("a", node(&["app:v1"]))]);
    let wishes = [
        ("/spec/nodeSelector", json!({"disk": "fast"})),
        ("/spec/nodeName", json!("b")),
        ("/spec/schedulerName", json!("mine")),
        ("/spec/topologySpreadConstraints", json!([{"maxSkew": 1}])),
        ("/spec/schedulingGates", json!([{"name": "wait"}])),
        ("/spec/runtimeClassName", json!("sandboxed")),
        ("/spec/affinity", json!({"nodeAffinity": {}})),
        ("/spec/affinity", spread_affinity("topology.kubernetes.io/zone", "hello-00001")),
        ("/spec/affinity", spread_affinity("kubernetes.io/hostname", "other-00001")),
        (
            "/spec/affinity",
            json!({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}}),
        ),
        ("/spec/containers/0/resources", json!({"requests": {"cpu": "1"}})),
        ("/spec/containers/0/ports", json!([{"containerPort": 1, "hostPort": 80}])),
        ("/spec/volumes", json!([{"name": "data", "persistentVolumeClaim": {"claimName": "x"}}])),
    ];
    assert_eq!(choose_node(&cluster, &pod(), 0, NOW), Some("a"));
    for (path, value) in wishes {
        let mut pod = pod();
        let (parent, field) = path.rsplit_once('/').unwrap();
        pod.pointer_mut(parent).unwrap()[field] = value.clone();
        assert_eq!(choose_node(&cluster, &pod, 0, NOW), None, "{path} {value}");
    }
}

#[test]
fn no_pod_is_bound_to_a_node_that_takes_none() {
    let closed = [
        ("/spec", json!({"unschedulable": true})),
        ("/spec", json!({"taints": [{"key": "gpu", "effect": "NoSchedule"}]})),
        ("/status/conditions", json!([{"type": "Ready", "status": "Unknown"}])),
        (
            "/status/conditions",
            json!([
                {"type": "Ready", "status": "True"}, {"type": "MemoryPressure", "status": "True"},
            ]),
        ),
    ];
    for (path, value) in closed {
        let mut object = node(&["app:v1"]);
        *object.pointer_mut(path).unwrap() = value.clone();
        assert_eq!(choose_node(&cluster(&[("a", object)]), &pod(), 0, NOW), None, "{value}");
    }
    let mut rather_not = node(&["app:v1"]);
    rather_not["spec"]["taints"] = json!([{"key": "x", "effect": "PreferNoSchedule"}]);
    assert_eq!(choose_node(&cluster(&[("a", rather_not)]), &pod(), 0, NOW), Some("a"));
}

#[test]
fn a_node_that_rejected_a_pod_is_avoided_for_a_minute() {
    let mut cluster = cluster(&[("a", node(&["app:v1"]))]);
    let failed =
        json!({"spec": {"nodeName": "a"}, "status": {"phase": "Failed", "reason": "OutOfpods"}});
    assert_eq!(read_rejection(&failed), Some(PodRejection { node: "a", at: None }));
    let running = json!({"spec": {"nodeName": "a"}, "status": {"phase": "Running"}});
    assert_eq!(read_rejection(&running), None);
    let mut evicted = failed;
    evicted["status"]["startTime"] = NOW.rfc3339().into();
    let evicted_at = NOW.plus_ms(60_000);
    evicted["status"]["conditions"] = json!([{"lastTransitionTime": evicted_at.rfc3339()}]);
    let whole_second = UnixMillis::parse(&evicted_at.rfc3339());
    assert_eq!(read_rejection(&evicted), Some(PodRejection { node: "a", at: whole_second }));
    cluster.nodes.record_rejection("a", NOW, NOW);
    let later = NOW.plus_ms(REJECTION_BACKOFF_MS - 1);
    assert_eq!(choose_node(&cluster, &pod(), 0, later), None);
    assert_eq!(choose_node(&cluster, &pod(), 0, NOW.plus_ms(REJECTION_BACKOFF_MS)), Some("a"));
    cluster.nodes.record_rejection("a", UnixMillis(0), NOW);
    assert_eq!(choose_node(&cluster, &pod(), 0, later), None, "an older rejection changes nothing");
}

/// Pods and nodes have a watch each, so any order of their events must give the same result.
#[test]
fn a_rejection_counts_whether_its_node_is_observed_before_or_after_the_pod() {
    let rejected_at = NOW.plus_ms(1_000);
    let rejected = json!({
        "metadata": {
            "namespace": "default", "name": "hello-1", "uid": "1",
            "labels": {key::REVISION: "hello-00001"},
        },
        "spec": {"nodeName": "a"},
        "status": {"phase": "Failed", "reason": "OutOfpods", "startTime": NOW.rfc3339()},
    });
    let observed = |resource: ResourceKind, name: &str, object: Value| {
        let (name, object) = (NamespacedName::new("default", name), Some(Box::new(object)));
        ControllerEvent::ObjectObserved { resource, name, object }
    };
    let pod_event = || observed(ResourceKind::Pod, "hello-1", rejected.clone());
    let node_event = || observed(ResourceKind::Node, "a", node(&["app:v1"]));
    for events in [
        vec![pod_event(), node_event()],
        vec![node_event(), pod_event()],
        vec![node_event(), pod_event(), node_event()],
    ] {
        let mut machine = ControllerStateMachine::new(ClusterState::default(), Outbox::new());
        for event in events {
            machine.step(rejected_at, event);
        }
        let cluster = machine.cluster();
        assert_eq!(choose_node(cluster, &pod(), 0, rejected_at), None);
        let later = rejected_at.plus_ms(REJECTION_BACKOFF_MS);
        assert_eq!(choose_node(cluster, &pod(), 0, later), Some("a"));
    }
}
