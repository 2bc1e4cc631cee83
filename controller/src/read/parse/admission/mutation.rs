//! Pure: mutation of objects at admission: defaults, removal of unknown fields, and records of the user.

use k8s_openapi::{api::core::v1::PodSpec, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use serde_json::{Map, Value};

use super::{AdmissionRequest, AdmittedKind, internal_kinds};
use crate::{
    model::knative::key,
    read::parse::{
        defaults, diff, revision_template,
        settings::RuleSettings,
        typed::{parse_typed, remove_unknown_fields},
    },
};

/// Returns the object with all defaults filled in, and the paths of unknown fields.
///
/// Unknown fields are those that a PodSpec does not have. They are removed, as the API server does with fields outside
/// a schema.
pub fn apply_defaults(request: &AdmissionRequest<'_>) -> (Value, Vec<String>) {
    let mut object = request.object.clone();
    let unknown = match request.kind.pod_spec_location() {
        Some((pointer, path)) => prune_pod(&mut object, pointer, path),
        None => Vec::new(),
    };
    let meta: ObjectMeta = parse_typed(object.get("metadata"), "", &mut Vec::new());
    let is_creation = request.old.is_none();
    match request.kind {
        AdmittedKind::Service | AdmittedKind::Configuration => {
            match request.old.filter(|_| keeps_revision_name(request)) {
                Some(old) => restore_template_defaults(&mut object, old, &meta, &request.settings),
                None => set_template_defaults(&mut object, &meta, is_creation, &request.settings),
            }
            if request.kind == AdmittedKind::Service {
                set_traffic_defaults(&mut object, request.kind);
            }
        }
        AdmittedKind::Route => set_traffic_defaults(&mut object, request.kind),
        // Revisions are immutable: defaults that appeared later must not reach an existing one.
        AdmittedKind::Revision if is_creation => {
            if let Some(spec) = object.get_mut("spec") {
                defaults::set_revision_spec_defaults(spec, &meta, is_creation, &request.settings);
            }
        }
        AdmittedKind::DomainMapping => {
            internal_kinds::set_reference_namespace_default(&mut object, &meta)
        }
        AdmittedKind::PodAutoscaler => internal_kinds::set_class_and_metric_defaults(&mut object),
        AdmittedKind::Revision
        | AdmittedKind::Metric
        | AdmittedKind::ServerlessService
        | AdmittedKind::ClusterDomainClaim => {}
    }
    record_user(&mut object, &meta, request);
    (object, unknown)
}

fn prune_pod(object: &mut Value, pointer: &str, path: &str) -> Vec<String> {
    let Some(Value::Object(spec)) = object.pointer_mut(pointer) else { return Vec::new() };
    // The fields that Knative adds to a PodSpec are unknown to that type: they are set aside while it is pruned.
    let revision_fields: Vec<_> = revision_template::REVISION_LIMIT_FIELDS
        .iter()
        .filter_map(|name| spec.remove_entry(*name))
        .collect();
    let mut pod = Value::Object(std::mem::take(spec));
    let unknown = remove_unknown_fields::<PodSpec>(&mut pod, path);
    if let Value::Object(pod) = pod {
        *spec = pod;
    }
    spec.extend(revision_fields);
    unknown
}

/// Returns true if the new template has the old one's explicit name. Such a template describes one Revision forever:
/// changed defaults of the installation must not force the user to choose another name.
fn keeps_revision_name(request: &AdmissionRequest<'_>) -> bool {
    let name = |object: &Value| {
        let name = object.pointer("/spec/template/metadata/name").and_then(Value::as_str);
        name.filter(|name| !name.is_empty()).map(str::to_owned)
    };
    let new = name(request.object);
    new.is_some() && new == request.old.and_then(name)
}

fn set_template_defaults(
    object: &mut Value,
    meta: &ObjectMeta,
    is_creation: bool,
    settings: &RuleSettings<'_>,
) {
    if let Some(template) = object.pointer_mut("/spec/template") {
        defaults::set_template_defaults(template, meta, is_creation, settings);
    }
}

/// Sets absent fields of a named template whose defaults are the same as when it was created. Knative leaves them
/// unset, and so refuses a manifest that is applied twice: `kubectl apply` replaces the list of containers by that of
/// the manifest. Any other absent field is a change, and is refused as one.
fn restore_template_defaults(
    object: &mut Value,
    old: &Value,
    meta: &ObjectMeta,
    settings: &RuleSettings<'_>,
) {
    const AT: &str = "/spec/template";
    let mut filled = object.clone();
    // All defaults of a new object, since the comparison is with the template as it was created.
    let is_creation = true;
    set_template_defaults(&mut filled, meta, is_creation, settings);
    if let (Some(new), Some(filled), Some(old)) =
        (object.pointer_mut(AT), filled.pointer(AT), old.pointer(AT))
    {
        copy_unchanged_defaults(new, filled, old);
    }
}

/// Copies values of `old` to `new` where `new` has none and `filled` has the same value.
fn copy_unchanged_defaults(new: &mut Value, filled: &Value, old: &Value) {
    match (new, filled, old) {
        (Value::Object(new), Value::Object(filled), Value::Object(old)) => {
            for (key, filled) in filled {
                match (new.get_mut(key), old.get(key)) {
                    (Some(new), Some(old)) => copy_unchanged_defaults(new, filled, old),
                    // A value that differs from the default was the user's, who has removed it now.
                    (None, Some(old)) if old == filled => {
                        new.insert(key.clone(), old.clone());
                    }
                    _ => {}
                }
            }
        }
        (Value::Array(new), Value::Array(filled), Value::Array(old)) => {
            let all = new.iter_mut().zip(filled).zip(old);
            all.for_each(|((new, filled), old)| copy_unchanged_defaults(new, filled, old));
        }
        _ => {}
    }
}

fn set_traffic_defaults(object: &mut Value, kind: AdmittedKind) {
    if let Some(Value::Object(spec)) = object.get_mut("spec") {
        defaults::set_traffic_defaults(spec, kind == AdmittedKind::Service);
    }
}

/// Records creator and last modifier in annotations. Child objects get none: their parent records both.
fn record_user(object: &mut Value, meta: &ObjectMeta, request: &AdmissionRequest<'_>) {
    let Some(user) = request.user else { return };
    let owned = meta.owner_references.as_ref().is_some_and(|all| !all.is_empty());
    let records_user = match request.kind {
        AdmittedKind::Service | AdmittedKind::DomainMapping => true,
        AdmittedKind::Configuration | AdmittedKind::Route => !owned,
        _ => false,
    };
    let spec = |object: &Value| object.get("spec").cloned().unwrap_or_default();
    // Only the spec counts: a change of labels or annotations is not recorded (Knative's `SetUserInfo`).
    let changed = request.old.is_none_or(|old| !diff::is_equivalent(&spec(old), &spec(object)));
    if !records_user || !changed {
        return;
    }
    let Some(annotations) = annotations_mut(object) else { return };
    if request.old.is_none() {
        annotations.insert(key::CREATOR.into(), user.into());
    }
    annotations.insert(key::LAST_MODIFIER.into(), user.into());
}

pub(super) fn annotations_mut(object: &mut Value) -> Option<&mut Map<String, Value>> {
    let metadata = defaults::object_field(object.as_object_mut()?, "metadata")?;
    defaults::object_field(metadata, "annotations")
}
