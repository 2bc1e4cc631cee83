//! Pure: an installation as a list of objects, in the order in which they can be created.

use agent::config::ClusterIpMode;
use controller::write::crds;
use serde_json::{Value, json};

use super::{
    configs, flow_schemas, policies, rbac, services,
    settings::{InstallSettings, NAME_LABEL, PART_OF_LABEL},
    workloads,
};

/// All objects of an installation.
pub(crate) fn all(settings: &InstallSettings) -> Vec<Value> {
    let mut objects = vec![namespace_object(settings)];
    objects.extend(crds::all_definitions());
    objects.extend(configs::all(settings));
    objects.extend(rbac::all(settings));
    objects.extend(flow_schemas::all(settings));
    objects.extend(services::all(settings));
    objects.extend(policies::all(settings));
    objects.extend(workloads::all(settings));
    objects
}

/// All objects that an installation may have, whatever its settings. A removal does not know the settings.
pub(crate) fn all_possible(settings: &InstallSettings) -> Vec<Value> {
    all(&InstallSettings { clusterip: ClusterIpMode::All, ..settings.clone() })
}

/// Labels of every object of an installation; `component` is empty for objects of the whole installation.
pub(crate) fn labels(component: &str) -> Value {
    let mut labels = json!({PART_OF_LABEL.0: PART_OF_LABEL.1, NAME_LABEL.0: NAME_LABEL.1});
    if !component.is_empty() {
        labels["app.kubernetes.io/component"] = component.into();
    }
    labels
}

/// An object in the installation's namespace with only its metadata.
pub(crate) fn namespaced_object(
    api: &str,
    kind: &str,
    name: &str,
    component: &str,
    settings: &InstallSettings,
) -> Value {
    json!({
        "apiVersion": api,
        "kind": kind,
        "metadata": {"name": name, "namespace": settings.namespace, "labels": labels(component)},
    })
}

/// A cluster-scoped object with only its metadata.
pub(crate) fn cluster_object(api: &str, kind: &str, name: &str) -> Value {
    json!({"apiVersion": api, "kind": kind, "metadata": {"name": name, "labels": labels("")}})
}

/// Adds the fields of `extra` to an object.
pub(crate) fn merge_fields(mut object: Value, extra: Value) -> Value {
    if let (Value::Object(fields), Value::Object(extra)) = (&mut object, extra) {
        fields.extend(extra);
    }
    object
}

fn namespace_object(settings: &InstallSettings) -> Value {
    let mut namespace = cluster_object("v1", "Namespace", &settings.namespace);
    // The agent uses the host's network and enters pods' namespaces; the other components meet `restricted`.
    for mode in ["enforce", "audit", "warn"] {
        namespace["metadata"]["labels"][format!("pod-security.kubernetes.io/{mode}")] =
            "privileged".into();
    }
    namespace
}

/// Kind and name of an object in the form `Deployment/controller`, for messages.
pub(crate) fn kind_and_name(object: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    format!("{}/{}", text(&object["kind"]), text(&object["metadata"]["name"]))
}

/// Formats objects as a stream of YAML documents.
pub(crate) fn to_yaml(objects: &[Value]) -> Result<String, serde_norway::Error> {
    // A separator before each document, so that files can be concatenated.
    let documents: Result<Vec<_>, _> = objects.iter().map(serde_norway::to_string).collect();
    Ok(documents?.iter().map(|document| format!("---\n{document}")).collect())
}
