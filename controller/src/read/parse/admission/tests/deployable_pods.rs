//! Pods that Kubernetes accepts or refuses. If admission took one that Kubernetes refuses, the service would be
//! admitted and never get a pod.
//!
//! Each line of `pod_changes.jsonl` is a change of `full_pod.json`, and whether Kubernetes 1.36.3 then refused the
//! Deployment: its own defaults, then `ValidateDeployment` of `pkg/apis/apps/validation`. A change is a list of steps,
//! `["remove", pointer]` or `["set", pointer, value]`. Changes that Knative's own rules refuse are listed only if
//! Kubernetes refuses them, too.

use serde_json::json;

use super::*;

const FULL_POD: &str = include_str!("../../../../../tests/full_pod.json");
const POD_CHANGES: &str = include_str!("pod_changes.jsonl");

fn all_features() -> Features {
    Features {
        podspec_affinity: Flag::Enabled,
        podspec_dnsconfig: Flag::Enabled,
        podspec_dnspolicy: Flag::Enabled,
        podspec_fieldref: Flag::Enabled,
        podspec_hostaliases: Flag::Enabled,
        podspec_hostipc: Flag::Enabled,
        podspec_hostnetwork: Flag::Enabled,
        podspec_hostpid: Flag::Enabled,
        podspec_init_containers: Flag::Enabled,
        podspec_nodeselector: Flag::Enabled,
        podspec_persistent_volume_claim: Flag::Enabled,
        podspec_priorityclassname: Flag::Enabled,
        podspec_runtimeclassname: Flag::Enabled,
        podspec_schedulername: Flag::Enabled,
        podspec_securitycontext: Flag::Enabled,
        podspec_shareprocessnamespace: Flag::Enabled,
        podspec_tolerations: Flag::Enabled,
        podspec_topologyspreadconstraints: Flag::Enabled,
        podspec_volumes_csi: Flag::Enabled,
        podspec_volumes_emptydir: Flag::Enabled,
        podspec_volumes_ephemeral: Flag::Enabled,
        podspec_volumes_hostpath: Flag::Enabled,
        podspec_volumes_mount_propagation: Flag::Enabled,
        containerspec_addcapabilities: Flag::Enabled,
        multi_container: Flag::Enabled,
        multi_container_probing: Flag::Enabled,
        ..Features::default()
    }
}

/// Carries out one step of a change.
fn carry_out(pod: &mut Value, step: &Value) {
    let pointer = step[1].as_str().expect("a pointer");
    let (parent, last) = pointer.rsplit_once('/').expect("a path");
    let last = last.replace("~1", "/").replace("~0", "~");
    let parent = pod.pointer_mut(parent).unwrap_or_else(|| panic!("{pointer}"));
    match (parent, step[0].as_str(), last.parse::<usize>()) {
        (Value::Object(fields), Some("remove"), _) => drop(fields.remove(&last)),
        (Value::Object(fields), Some("set"), _) => drop(fields.insert(last, step[2].clone())),
        (Value::Array(all), Some("remove"), Ok(at)) => drop(all.remove(at)),
        (Value::Array(all), Some("set"), Ok(at)) if at == all.len() => all.push(step[2].clone()),
        (Value::Array(all), Some("set"), Ok(at)) => all[at] = step[2].clone(),
        _ => panic!("{step}"),
    }
}

/// Returns the changes whose verdict by Kubernetes is `is_refused`, each with admission's own problems.
fn changes_with_problems(is_refused: bool) -> Vec<(String, String)> {
    let full: Value = serde_json::from_str(FULL_POD).expect("JSON");
    let features = all_features();
    let lines = POD_CHANGES.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    lines
        .filter(|line| line["refused"] == is_refused)
        .map(|line| {
            let mut pod = full.clone();
            let steps = line["steps"].as_array().expect("steps");
            steps.iter().for_each(|step| carry_out(&mut pod, step));
            let object = json!({"metadata": {"name": "a", "namespace": "n"}, "spec": {"template": {"spec": pod}}});
            (line["steps"].to_string(), problems_with(AdmittedKind::Service, &object, &features))
        })
        .collect()
}

#[test]
fn what_kubernetes_refuses_in_a_pod_is_refused_at_admission() {
    let changes = changes_with_problems(true);
    assert!(changes.len() > 300, "{}", changes.len());
    let admitted: Vec<String> =
        changes.into_iter().filter(|(_, it)| it.is_empty()).map(|(steps, _)| steps).collect();
    assert!(admitted.is_empty(), "admitted:\n{}", admitted.join("\n"));
}

#[test]
fn what_kubernetes_accepts_in_a_pod_is_admitted() {
    let changes = changes_with_problems(false);
    assert!(changes.len() > 300, "{}", changes.len());
    let refused: Vec<String> = changes
        .into_iter()
        .filter(|(_, it)| !it.is_empty())
        .map(|(steps, problems)| format!("{steps}: {problems}"))
        .collect();
    assert!(refused.is_empty(), "refused:\n{}", refused.join("\n"));
}

#[test]
fn labels_and_annotations_of_a_template_are_those_of_a_pod() {
    let object = |metadata: &str| {
        service(&format!(
            "{{template: {{metadata: {metadata}, spec: {{containers: [{{image: a}}]}}}}}}"
        ))
    };
    let at = "spec.template.metadata";
    check_table(
        AdmittedKind::Service,
        &[
            (object("{labels: {a: '', x.io/A_b: C.d}, annotations: {X.io/a: any text}}"), ""),
            (object("{labels: {a b: c}}"), &format!("invalid key name \"a b\": {at}.labels.a b")),
            (object("{labels: {a: b/c}}"), &format!("invalid value: b/c: {at}.labels.a")),
            (
                object("{annotations: {a b: c}}"),
                &format!("invalid key name \"a b\": {at}.annotations.a b"),
            ),
        ],
    );
    let large = format!("{{annotations: {{a: {}}}}}", "x".repeat(262_145));
    let message = format!("must have at most 262144 bytes in all: {at}.annotations");
    assert_eq!(problems(AdmittedKind::Service, &object(&large)), message);
}
