//! Fields of a pod in `docs/fields.md`: the local node reads each accepted field, or a warning says that it does not.
//!
//! The controller's use of these fields is tested in `controller/src/decide/machine/observe/tests/fields/local_node.rs`.

use std::{collections::BTreeMap, path::Path};

use common::outbox::Outbox;
use controller::{
    decide::machine::{ControllerEvent, ControllerStateMachine},
    model::cluster_state::{ClusterState, UnixMillis},
};
use local::{
    bundle::{self, BundleContext},
    images::ImagePullPolicy,
};

use super::*;

const FIELDS_PAGE: &str = include_str!("../../../../docs/fields.md");

/// Fields that the start of a container does not read. They are in the RouteTable, or belong to probes, which
/// `local/src/kubelet/probe_spec.rs` tests.
const READ_ELSEWHERE: [&str; 8] = [
    "containerConcurrency",
    "timeoutSeconds",
    "responseStartTimeoutSeconds",
    "idleTimeoutSeconds",
    "livenessProbe",
    "readinessProbe",
    "startupProbe",
    "ports[].name",
];
/// Fields with only one accepted value, which is also the default.
const SINGLE_VALUE_FIELDS: [&str; 2] = ["securityContext.privileged", "ports[].protocol"];

struct PodFieldCase {
    object: String,
    field: String,
    value: Value,
    /// Text of the page on the local node's use of the field.
    effect: String,
}

fn quoted(cell: &str) -> Option<&str> {
    cell.strip_prefix('`')?.strip_suffix('`')
}

fn tables() -> impl Iterator<Item = Vec<&'static str>> {
    let inner = |line: &'static str| line.strip_prefix("| ")?.strip_suffix(" |");
    let of_a_pod = |cells: &Vec<&str>| matches!(cells[0], "spec" | "container");
    FIELDS_PAGE.lines().filter_map(inner).map(|it| it.split(" | ").collect()).filter(of_a_pod)
}

/// Rows of the page about pods; their effect on the local node is in a table of its own.
fn rows() -> Vec<PodFieldCase> {
    let mut section_rows = BTreeMap::new();
    for cells in tables().filter(|it| it.len() == 3) {
        let fields = cells[1].split(", ").filter_map(quoted);
        section_rows.extend(fields.map(|field| ((cells[0], field), cells[2])));
    }
    let row = |on: &str, field: &str, value: &str, effect: &str| PodFieldCase {
        object: on.into(),
        field: field.into(),
        value: serde_json::from_str(value).unwrap(),
        effect: section_rows.get(&(on, field)).copied().unwrap_or(effect).into(),
    };
    let mut rows = Vec::new();
    for cells in tables().filter(|it| it.len() == 4) {
        let Some(value) = quoted(cells[2]) else { continue };
        let fields = cells[1].split(", ").filter_map(quoted);
        rows.extend(fields.map(|field| row(cells[0], field, value, cells[3])));
    }
    rows
}

/// A service whose pod has the row's field with `value`.
fn service(row: &PodFieldCase, value: Option<Value>) -> Value {
    let mut container = json!({"image": "hello:v1", "command": ["serve"]});
    let mut spec = json!({});
    if row.field.starts_with("volumes[]") {
        container["volumeMounts"] = json!([{"name": "v", "mountPath": "/v", "readOnly": true}]);
    } else if row.field.starts_with("volumeMounts[]") {
        spec["volumes"] = json!([{"name": "v", "emptyDir": {}}]);
    }
    let field = row.field.split(['.', '[']).next().unwrap();
    if let Some(value) = value {
        let parent = if row.object == "container" { &mut container } else { &mut spec };
        parent[field] = value;
    }
    if spec.get("containers").is_none() {
        spec["containers"] = json!([container]);
    }
    json!({
        "apiVersion": controller::model::knative::API_VERSION, "kind": "Service",
        "metadata": {"name": "hello", "namespace": "default"},
        "spec": {"template": {"spec": spec}},
    })
}

/// Returns the object that contains a row's field, and the field's name in it.
fn parent_of_field<'a>(value: &'a mut Value, field: &str) -> Option<(&'a mut Value, String)> {
    let (path, name) = field.rsplit_once('.')?;
    let steps = path.split('.').enumerate();
    let parent = steps.fold(value, |parent, (depth, name)| {
        let parent = if depth == 0 { parent } else { &mut parent[name.trim_end_matches("[]")] };
        if name.ends_with("[]") { &mut parent[0] } else { parent }
    });
    Some((parent, name.trim_end_matches("[]").to_owned()))
}

/// Variants of the row's value: without its field, and with that field alone. `None` if the field is the whole value.
fn variants(row: &PodFieldCase) -> Option<(Value, Value)> {
    let (mut without, mut alone) = (row.value.clone(), row.value.clone());
    let (parent, name) = parent_of_field(&mut without, &row.field)?;
    parent.as_object_mut().unwrap().remove(&name);
    let (parent, field_name) = parent_of_field(&mut alone, &row.field)?;
    parent.as_object_mut().unwrap().retain(|name, _| *name == field_name);
    Some((without, alone))
}

/// A runtime spec with its capabilities sorted.
fn with_sorted_capabilities(mut spec: Value) -> Value {
    for set in spec["process"]["capabilities"].as_object_mut().unwrap().values_mut() {
        set.as_array_mut().unwrap().sort_by_key(ToString::to_string);
    }
    spec
}

/// Formats the node's start of the containers of a service's pod; an error is the reason for its refusal.
fn start_output(service: &Value) -> Result<String, String> {
    let read = parse::service_manifest(service, &ScalePolicyConfig::default());
    let (name, manifest) = read.map_err(|problems| problem::problems_line(&problems))?;
    let mut machine = ControllerStateMachine::new(
        ClusterState { uid_seed: 1, ..ClusterState::default() },
        Outbox::new(),
    );
    let mut pod_specs = machine
        .step(UnixMillis(1_000_000), ControllerEvent::ManifestApplied { name, manifest })
        .pods_to_start;
    let pod_spec = pod_specs.remove(0);
    let context = BundleContext {
        node: "n",
        uid: &pod_spec.uid,
        pod: &pod_spec.name,
        namespace: "default",
        labels: &pod_spec.labels,
        addresses: &[],
        network: Path::new("/network"),
        rootfs: Path::new("/rootfs"),
        etc: Path::new("/etc"),
        termination_log: Path::new("/log"),
        cgroup: Path::new("/cgroup"),
        volumes: &BTreeMap::from([("v".to_owned(), "/volume".into())]),
        sub_paths: Path::new("/sub-paths"),
        passwd: "",
        group: "",
    };
    let start = |manifest: &_| {
        let spec = bundle::build_spec(&pod_spec.spec, manifest, None, &context)
            .map(|container| with_sorted_capabilities(serde_json::to_value(container).unwrap()));
        format!("{:?} {:?}", spec, bundle::parse_limits(manifest))
    };
    let containers = pod_spec.spec.containers.iter().map(|container| {
        let image = container.image.as_deref().unwrap_or_default();
        let policy = ImagePullPolicy::from_spec(container.image_pull_policy.as_deref(), image);
        format!("{} {image} {policy:?} {}", container.name, start(container))
    });
    Ok(containers.collect())
}

/// Returns true if the row's field changes the start of a pod, beside the other fields of its value or alone.
fn is_read(row: &PodFieldCase) -> bool {
    let with_field = start_output(&service(row, Some(row.value.clone())));
    let base = || start_output(&service(row, None));
    match variants(row) {
        None => with_field != base(),
        Some((without, alone)) => {
            let with_field_only = start_output(&service(row, Some(alone)));
            with_field != start_output(&service(row, Some(without))) || with_field_only != base()
        }
    }
}

#[test]
fn the_node_reads_every_field_of_a_pod_that_is_accepted_without_a_warning() {
    let rows = rows();
    assert!(rows.len() > 100, "the page could not be read: {}", rows.len());
    let is_ours = |case: &&PodFieldCase| {
        let elsewhere = READ_ELSEWHERE.iter().any(|prefix| case.field.starts_with(prefix));
        !elsewhere && !SINGLE_VALUE_FIELDS.contains(&&*case.field)
    };
    let features_are_off = |case: &&PodFieldCase| !case.effect.starts_with("works with `");
    let works = rows.iter().filter(|it| it.effect.starts_with("works"));
    let tried: Vec<&PodFieldCase> = works.filter(features_are_off).filter(is_ours).collect();
    let idle =
        tried.iter().filter(|it| !is_read(it)).map(|it| format!("{} {}", it.object, it.field));
    assert_eq!(idle.collect::<Vec<_>>(), [""; 0], "nothing on the node reads them");
    assert!(tried.len() > 20, "{} rows", tried.len());
}

/// Warnings must be true, or users would remove fields that they need.
#[test]
fn the_node_reads_no_field_that_it_warns_of() {
    let rows = rows();
    let warned: Vec<&PodFieldCase> =
        rows.iter().filter(|it| it.effect.starts_with("warned:")).collect();
    let read =
        warned.iter().filter(|it| is_read(it)).map(|it| format!("{} {}", it.object, it.field));
    assert_eq!(read.collect::<Vec<_>>(), [""; 0]);
    assert!(warned.len() > 5, "{} rows", warned.len());
    for row in warned {
        let object = service(row, Some(row.value.clone()));
        let warned = warnings(&NamespacedName::new("default", "hello"), &object).join("\n");
        let word = format!("{} has no effect", row.field);
        assert!(warned.contains(&word), "{} {}: {warned:?}", row.object, row.field);
    }
}
