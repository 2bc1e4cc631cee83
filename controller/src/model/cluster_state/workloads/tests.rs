use common::local_node::PodRunPhase;

use super::*;
use crate::model::cluster_state::UnixMillis;

fn name(name: &str) -> NamespacedName {
    NamespacedName::new("default", name)
}

fn key(kind: WorkloadKind, workload: &str) -> WorkloadKey {
    WorkloadKey { name: name(workload), kind }
}

fn deployment(workload: &str) -> WorkloadKey {
    key(WorkloadKind::Deployment, workload)
}

/// Makes labels of pairs `key=value`.
fn labels(pairs: &[&str]) -> CompactStringMap {
    let pairs = pairs.iter().filter_map(|it| it.split_once('='));
    let map: BTreeMap<String, String> = pairs.map(|(k, v)| (k.into(), v.into())).collect();
    CompactStringMap::from(&map)
}

fn workload(template_labels: &[&str]) -> WorkloadState {
    WorkloadState {
        version: WorkloadVersion { uid: "u1".into(), resource_version: "1".into() },
        replicas: 1,
        record: None,
        first_ordinal: 0,
        template_labels: labels(template_labels),
        shape: "{}".into(),
        uses_host_network: false,
        deletes_volumes: false,
        is_terminating: false,
    }
}

fn pod(pod_labels: &[&str], owner: Option<(&str, &str, &str)>) -> WorkloadPod {
    WorkloadPod {
        pod: RevisionPod::new("p1".into(), "web-1".into(), UnixMillis(1)),
        status: PodRunStatus {
            uid: "p1".into(),
            phase: PodRunPhase::Pending,
            addresses: Vec::new(),
            containers: Vec::new(),
            ready: false,
        },
        labels: labels(pod_labels),
        owner: owner.map(|(kind, name, uid)| PodOwner {
            kind: kind.into(),
            name: name.into(),
            uid: uid.into(),
        }),
        shape: "{}".into(),
    }
}

fn set_selector(all: &mut ObservedWorkloads, service: &str, pairs: &[&str]) {
    all.set_selector(&name(service), Some(&labels(pairs)));
}

/// Returns the names of the workloads and pods that a scaled Service selects.
fn selected(all: &ObservedWorkloads, service: &str) -> (Vec<String>, Vec<String>) {
    let service = name(service);
    let workloads = all.workloads_of(&service).map(|(key, _)| key.name.name.to_string());
    (workloads.collect(), all.pods_of(&service).map(|(pod, _)| pod.name.to_string()).collect())
}

fn texts(all: &[&str]) -> Vec<String> {
    all.iter().map(|it| (*it).to_owned()).collect()
}

#[test]
fn a_selector_finds_what_was_observed_before_and_after_it() {
    let mut all = ObservedWorkloads::default();
    all.set_workload(&deployment("early"), Some(workload(&["app=web", "tier=a"])));
    all.set_pod(&name("early-1"), Some(pod(&["app=web", "tier=a"], None)));
    let elsewhere = NamespacedName::new("other", "far");
    let far = WorkloadKey { name: elsewhere.clone(), kind: WorkloadKind::Deployment };
    all.set_workload(&far, Some(workload(&["app=web"])));
    all.set_pod(&elsewhere, Some(pod(&["app=web"], None)));
    set_selector(&mut all, "web", &["app=web"]);
    set_selector(&mut all, "tier", &["app=web", "tier=b"]);
    assert_eq!(selected(&all, "web"), (texts(&["early"]), texts(&["early-1"])));
    assert_eq!(selected(&all, "tier"), (Vec::new(), Vec::new()), "each pair must match");
    let late = Some(workload(&["app=web", "tier=b"]));
    let affected = all.set_workload(&key(WorkloadKind::StatefulSet, "late"), late);
    assert_eq!(affected, BTreeSet::from([name("tier"), name("web")]));
    let affected = all.set_pod(&name("late-0"), Some(pod(&["tier=b", "app=web"], None)));
    assert_eq!(affected, BTreeSet::from([name("tier"), name("web")]));
    assert_eq!(selected(&all, "tier"), (texts(&["late"]), texts(&["late-0"])));
    assert_eq!(selected(&all, "web").0, ["early", "late"]);
}

#[test]
fn changed_labels_selectors_and_deletions_are_followed() {
    let mut all = ObservedWorkloads::default();
    set_selector(&mut all, "web", &["app=web"]);
    all.set_workload(&deployment("web"), Some(workload(&["app=web"])));
    all.set_pod(&name("web-1"), Some(pod(&["app=web"], None)));
    let affected = all.set_workload(&deployment("web"), Some(workload(&["app=other"])));
    assert_eq!(affected, BTreeSet::from([name("web")]), "it has lost its workload");
    assert_eq!(selected(&all, "web").0, [""; 0]);
    let affected = all.set_pod(&name("web-1"), Some(pod(&["app=other"], None)));
    assert_eq!((affected, selected(&all, "web").1), (BTreeSet::from([name("web")]), Vec::new()));
    set_selector(&mut all, "web", &["app=other"]);
    assert_eq!(selected(&all, "web"), (texts(&["web"]), texts(&["web-1"])));
    assert_eq!(all.set_workload(&deployment("web"), None), BTreeSet::from([name("web")]));
    assert_eq!(all.set_pod(&name("web-1"), None), BTreeSet::from([name("web")]));
    assert_eq!(selected(&all, "web"), (Vec::new(), Vec::new()));
    all.set_workload(&deployment("web"), Some(workload(&["app=other"])));
    all.set_selector(&name("web"), None);
    assert_eq!(selected(&all, "web"), (Vec::new(), Vec::new()));
    assert_eq!(all.set_workload(&deployment("web"), None), BTreeSet::new());
}

#[test]
fn an_empty_selector_selects_nothing() {
    let mut all = ObservedWorkloads::default();
    all.set_workload(&deployment("web"), Some(workload(&["app=web"])));
    set_selector(&mut all, "web", &[]);
    assert_eq!(selected(&all, "web").0, [""; 0]);
}

#[test]
fn a_pod_belongs_to_a_workload_by_its_owner() {
    let web = workload(&["app=web"]);
    let hash = "pod-template-hash=5d4f";
    let of_set = |name: &str, uid: &str| pod(&[hash], Some(("ReplicaSet", name, uid)));
    assert!(of_set("web-5d4f", "r1").belongs_to(&deployment("web"), &web));
    assert!(!of_set("web-a-5d4f", "r1").belongs_to(&deployment("web"), &web), "another Deployment");
    assert!(!of_set("web5d4f", "r1").belongs_to(&deployment("web"), &web));
    assert!(!of_set("web-9", "r1").belongs_to(&deployment("web"), &web), "a ReplicaSet of a user");
    let bare = pod(&[], Some(("ReplicaSet", "web-5d4f", "r1")));
    assert!(!bare.belongs_to(&deployment("web"), &web), "no hash");
    let of_kind = |kind: &str, uid: &str| pod(&[], Some((kind, "web", uid)));
    let stateful = key(WorkloadKind::StatefulSet, "web");
    assert!(of_kind("StatefulSet", "u1").belongs_to(&stateful, &web));
    assert!(!of_kind("StatefulSet", "u0").belongs_to(&stateful, &web), "an earlier one");
    assert!(!of_kind("DaemonSet", "u1").belongs_to(&stateful, &web));
    assert!(!of_kind("StatefulSet", "u1").belongs_to(&deployment("web"), &web));
    assert!(!pod(&[], None).belongs_to(&stateful, &web));
}

#[test]
fn the_number_of_the_user_is_the_last_one_above_zero_of_another_client() {
    let number = |replicas: u32, record: Option<(u32, u32)>| {
        let record =
            record.map(|(scaled_to, user_replicas)| ReplicaRecord { scaled_to, user_replicas });
        let state = WorkloadState { replicas, record, ..workload(&[]) };
        (state.user_replicas(), state.is_own_number())
    };
    assert_eq!(number(3, None), (3, false));
    assert_eq!(number(0, None), (1, false), "asleep before its Service asked for it");
    assert_eq!(number(0, Some((0, 3))), (3, true), "asleep");
    assert_eq!(number(3, Some((3, 3))), (3, true), "awake");
    assert_eq!(number(2, Some((2, 5))), (5, true), "scaled by load");
    assert_eq!(number(4, Some((0, 3))), (4, false), "scaled by the user");
    assert_eq!(number(0, Some((3, 3))), (3, false), "stopped by the user");
}

#[test]
fn a_recorded_workload_without_a_service_is_abandoned() {
    let mut all = ObservedWorkloads::default();
    let record = Some(ReplicaRecord { scaled_to: 0, user_replicas: 2 });
    let slept = WorkloadState { record, ..workload(&["app=web"]) };
    all.set_workload(&deployment("web"), Some(slept));
    all.set_workload(&deployment("plain"), Some(workload(&["app=web"])));
    assert!(!all.is_abandoned(&deployment("web")), "its Service may not be known yet");
    all.are_listed = true;
    assert_eq!(all.abandoned().collect::<Vec<_>>(), [&deployment("web")]);
    all.set_held(&name("web"), Some(&deployment("web")));
    assert_eq!(all.holder(&deployment("web")), Some(&name("web")));
    assert_eq!(all.abandoned().count(), 0);
    all.set_held(&name("web"), Some(&deployment("other")));
    assert_eq!(all.abandoned().count(), 1, "another workload now");
    all.set_held(&name("other"), Some(&deployment("web")));
    all.set_held(&name("web"), None);
    assert_eq!((all.abandoned().count(), all.holder(&deployment("other"))), (0, None));
}

#[test]
fn an_autoscaler_concerns_the_service_that_holds_its_target() {
    let mut all = ObservedWorkloads::default();
    let hpa = |target: &str, min_replicas| {
        Some(UserAutoscaler { target: deployment(target), min_replicas })
    };
    assert_eq!(all.set_autoscaler(&name("hpa"), hpa("web", 2)), BTreeSet::new());
    all.set_held(&name("service"), Some(&deployment("web")));
    let service = || BTreeSet::from([name("service")]);
    assert_eq!(all.set_autoscaler(&name("hpa"), hpa("web", 3)), service());
    assert_eq!(all.autoscaler_of(&deployment("web")).map(|it| it.min_replicas), Some(3));
    assert_eq!(all.set_autoscaler(&name("hpa"), hpa("other", 3)), service(), "it has lost it");
    assert_eq!(all.autoscaler_of(&deployment("web")), None);
    assert_eq!(all.set_autoscaler(&name("hpa"), hpa("web", 3)), service());
    assert_eq!(all.set_autoscaler(&name("hpa"), None), service());
}

#[test]
fn equal_containers_share_one_text_and_unused_texts_are_forgotten() {
    let mut all = ObservedWorkloads::default();
    let with_shape = |shape: &str| WorkloadPod { shape: shape.into(), ..pod(&["app=web"], None) };
    all.set_pod(&name("a"), Some(with_shape("{1}")));
    all.set_pod(&name("b"), Some(with_shape("{1}")));
    let shape = |all: &ObservedWorkloads, pod: &str| {
        all.pod(&name(pod)).map(|it| Arc::clone(&it.shape)).expect("a pod")
    };
    assert!(Arc::ptr_eq(&shape(&all, "a"), &shape(&all, "b")));
    for number in 2..50 {
        all.set_pod(&name("a"), Some(with_shape(&format!("{{{number}}}"))));
    }
    assert!(all.shapes.len() <= 5, "{:?}", all.shapes);
    assert!(all.shapes.contains(&shape(&all, "b")), "it is still in use");
}
