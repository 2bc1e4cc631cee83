//! Pure: objects that an earlier version installed and this one does not have any more.
//!
//! Only kinds that this version installs are searched. No version so far has dropped a kind. One that does has to name
//! it in [`checked_kinds`], or its objects stay.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{configs, objects::kind_and_name};

/// Kinds that are never removed, because users' objects would be deleted with them.
const NEVER_REMOVED_KINDS: [&str; 2] = ["Namespace", "CustomResourceDefinition"];

/// API version and kind of all objects that are checked; true if the kind is cluster-scoped.
pub(super) fn checked_kinds(objects: &[Value]) -> BTreeSet<(&str, &str, bool)> {
    let kinds = objects.iter().filter_map(|object| {
        let kind = object["kind"].as_str()?;
        let is_cluster_scoped = object["metadata"]["namespace"].is_null();
        (!NEVER_REMOVED_KINDS.contains(&kind)).then_some((
            object["apiVersion"].as_str()?,
            kind,
            is_cluster_scoped,
        ))
    });
    kinds.collect()
}

/// Objects of `existing` that `manager` applied and that are not in `desired`. ConfigMaps of the operator stay. So do
/// objects of other managers, whatever their labels.
pub(super) fn obsolete_objects<'a>(
    existing: &'a [Value],
    desired: &[Value],
    manager: &str,
) -> Vec<&'a Value> {
    let desired: BTreeSet<String> = desired.iter().map(kind_and_name).collect();
    let is_managed = |object: &Value| {
        let managers = object["metadata"]["managedFields"].as_array();
        managers.is_some_and(|all| all.iter().any(|entry| entry["manager"] == manager))
    };
    let is_obsolete = |object: &&Value| {
        is_managed(object)
            && !desired.contains(&kind_and_name(object))
            && !configs::is_operator_owned(object)
    };
    existing.iter().filter(is_obsolete).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(kind: &str, name: &str, manager: &str) -> Value {
        json!({
            "apiVersion": "v1", "kind": kind,
            "metadata": {"name": name, "namespace": "s", "managedFields": [{"manager": manager}]},
        })
    }

    #[test]
    fn only_objects_that_rouse_applied_and_no_longer_has_are_obsolete() {
        let desired = [object("Service", "a", "us")];
        let existing = ["a", "old"].map(|it| object("Service", it, "us"));
        let others = [object("Service", "theirs", "helm"), object("ConfigMap", "config-gc", "us")];
        assert_eq!(obsolete_objects(&existing, &desired, "us"), [&existing[1]]);
        assert_eq!(obsolete_objects(&others, &desired, "us"), [] as [&Value; 0]);
    }

    #[test]
    fn namespaces_and_crds_are_never_checked() {
        let mut role = object("ClusterRole", "r", "us");
        role["metadata"]["namespace"] = Value::Null;
        let objects = [object("Namespace", "s", "us"), object("Service", "a", "us"), role];
        assert_eq!(
            checked_kinds(&objects),
            [("v1", "ClusterRole", true), ("v1", "Service", false)].into()
        );
    }
}
