//! The rows of the page on the local node, with the exceptions that the page lists for it.

use common::{local_node::LocalPodSpec, outbox::Outbox, wire::RouteTable};

use super::*;
use crate::{
    model::{
        cluster_state::ClusterState,
        object::{LocalObjectKey, LocalObjectKind},
    },
    read::parse,
    write::desired,
};

const SECTION: &str = "\n## On the local node\n";

/// Returns the rows of the page's section on the local node; fields of one group are together.
fn exceptions() -> Vec<Vec<FieldRow>> {
    let (_, section) = PAGE.split_once(SECTION).expect("the section");
    let section = section.split("\n## ").next().unwrap_or_default();
    section.lines().flat_map(exceptions_of).collect()
}

fn exceptions_of(line: &str) -> Vec<Vec<FieldRow>> {
    let cells = cells(line);
    let [on, fields, effect] = cells[..] else { return Vec::new() };
    let row = |field: &str| FieldRow {
        on: on.into(),
        field: field.into(),
        value: Value::Null,
        effect: effect.into(),
    };
    fields.split(", ").filter_map(quoted).map(|it| expand_group(row(it))).collect()
}

/// Returns the effect of a row on the local node, where features are off.
fn effect<'a>(row: &'a FieldRow, exceptions: &'a [Vec<FieldRow>]) -> &'a str {
    let own = exceptions.iter().flatten().find(|it| it.on == row.on && it.field == row.field);
    let usual = if row.effect.starts_with("works with `") { "refused" } else { &*row.effect };
    own.map_or(usual, |it| &*it.effect)
}

/// Returns the machine of a local node after a service was applied, and the pods that the node is to start.
fn applied(object: &Value) -> (ControllerStateMachine, Vec<LocalPodSpec>) {
    let read = parse::service_manifest(object, &ScalePolicyConfig::default());
    let (name, manifest) = read.expect("a service that is accepted");
    let mut machine = ControllerStateMachine::new(
        ClusterState { uid_seed: 1, ..ClusterState::default() },
        Outbox::new(),
    );
    let effects =
        machine.step(UnixMillis(1_000_000), ControllerEvent::ManifestApplied { name, manifest });
    (machine, effects.pods_to_start)
}

/// Returns everything that node, table and autoscaler get for a service with ready pods, and the time of its next plan.
fn outcome(object: &Value) -> String {
    let (mut machine, pods) = applied(object);
    let agent =
        ComponentReplica { role: ClientComponent::Agent, name: "n1".into(), node: "n1".into() };
    for pod in &pods {
        let observation = PodObservation { uid: pod.uid.clone(), ..ready_observation() };
        machine.step(
            UnixMillis(1_000_100),
            ControllerEvent::PodReported { reporter: agent.clone(), stream: 1, observation },
        );
    }
    let RouteTable { services, revisions, .. } = table(&machine);
    format!("{pods:?}\n{services:?}\n{revisions:?}\n{:?}", machine.next_timer())
}

/// Returns true if the node's pod has the row's field as it was written.
fn local_pod_has(row: &FieldRow, object: &Value) -> bool {
    let (_, pods) = applied(object);
    let pod = serde_json::to_value(&pods.first().expect("a pod").spec).expect("JSON");
    let of = |spec: &Value| {
        let at = if row.on == "container" { &spec["containers"][0] } else { spec };
        follow(at, &row.field).clone()
    };
    of(&object["spec"]["template"]["spec"]) == of(&pod)
}

/// Returns true if the row's field makes any difference.
fn works(row: &FieldRow, object: &Value) -> bool {
    static BEFORE: LazyLock<String> = LazyLock::new(|| outcome(&service()));
    (is_of_a_pod(row) && row.field.contains('.') && local_pod_has(row, object))
        || outcome(object) != *BEFORE
}

/// Returns true if the Revision has the row's annotations.
fn is_kept(row: &FieldRow, object: &Value) -> bool {
    let (machine, _) = applied(object);
    let key = LocalObjectKey { kind: LocalObjectKind::Revision, name: name("hello-00001") };
    let revision = desired::local_object(machine.cluster(), &key).expect("a Revision");
    let annotations = &revision["metadata"]["annotations"];
    let is_in_revision = |(key, value): (&String, &Value)| annotations[key] == *value;
    match row.value.as_object() {
        Some(pairs) => pairs.iter().all(is_in_revision),
        None => is_in_revision((&row.field, &row.value)),
    }
}

fn try_locally(row: &FieldRow, exceptions: &[Vec<FieldRow>]) {
    let Some((kind, object)) = object_with_field(row) else { return };
    let config = ScalePolicyConfig::default();
    let read = parse::service_manifest(&object, &config);
    if kind != AdmittedKind::Service {
        return assert!(read.is_err(), "only Services are applied there");
    }
    let context = format!("{} {}", row.on, row.field);
    let (word, _) = word(effect(row, exceptions));
    assert_eq!(read.is_err(), word == "refused", "{context}: {:?}", read.err());
    if read.is_ok() {
        let warnings = parse::service_warnings(&object, &config);
        assert_eq!(is_warned(row, &warnings), word == "warned", "{context}: {warnings:?}");
    }
    match word {
        "works" => assert!(works(row, &object), "{context} changes nothing"),
        "kept" => assert!(is_kept(row, &object) && !works(row, &object), "{context}"),
        "refused" | "warned" | "written" | "see" => {}
        other => panic!("{context}: what does {other:?} mean?"),
    }
}

#[test]
fn each_field_does_on_the_local_node_what_the_page_says() {
    let (rows, exceptions) = (rows(), exceptions());
    let wrong = failing_rows(&rows, |row| try_locally(row, &exceptions));
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// A row that matches the usual effect, or whose field has left the page, would hide the next mistake.
#[test]
fn the_page_names_only_what_differs_on_the_local_node() {
    let rows = rows();
    let exceptions = exceptions();
    assert!(exceptions.len() > 20, "the section could not be read: {}", exceptions.len());
    for group in &exceptions {
        let differs = |it: &FieldRow| {
            let mut matching = rows.iter().filter(|row| row.on == it.on && row.field == it.field);
            matching.any(|row| word(effect(row, &[])).0 != word(&it.effect).0)
        };
        assert!(group.iter().any(differs), "{group:?}");
    }
}
