//! Pure: objects that an earlier version installed and this one does not have any more.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{configs, objects::kind_and_name};

/// Kinds that are never removed, because users' objects would be deleted with them.
const NEVER_REMOVED_KINDS: [&str; 2] = ["Namespace", "CustomResourceDefinition"];

/// API version and kind of all objects that are checked; true if the kind is cluster-scoped.
pub(super) fn checked_kinds(objects: &[Value]) -> BTreeSet<(&str, &str, bool)> {
    let kinds = objects.iter().filter_map(|it| {
        let kind = it["kind"].as_str()?;
        let everywhere = it["metadata"]["namespace"].is_null();
        (!NEVER_REMOVED_KINDS.contains(&kind)).then_some((
            it["apiVersion"].as_str()?,
            kind,
            everywhere,
        ))
    });
    kinds.collect()
}

/// Objects of `there` that `manager` applied and that are not in `wanted`. ConfigMaps of the operator stay. So do
/// objects of other managers, whatever their labels.
pub(super) fn obsolete_objects<'a>(
    there: &'a [Value],
    wanted: &[Value],
    manager: &str,
) -> Vec<&'a Value> {
    let wanted: BTreeSet<String> = wanted.iter().map(kind_and_name).collect();
    let ours = |it: &Value| {
        let managers = it["metadata"]["managedFields"].as_array();
        managers.is_some_and(|all| all.iter().any(|entry| entry["manager"] == manager))
    };
    let gone = |it: &&Value| {
        ours(it) && !wanted.contains(&kind_and_name(it)) && !configs::is_operator_owned(it)
    };
    there.iter().filter(gone).collect()
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
    fn only_what_we_applied_and_want_no_more_goes() {
        let wanted = [object("Service", "a", "us")];
        let there = ["a", "old"].map(|it| object("Service", it, "us"));
        let others = [object("Service", "theirs", "helm"), object("ConfigMap", "config-gc", "us")];
        assert_eq!(obsolete_objects(&there, &wanted, "us"), [&there[1]]);
        assert_eq!(obsolete_objects(&others, &wanted, "us"), [] as [&Value; 0]);
    }

    #[test]
    fn what_users_objects_hang_on_is_not_even_looked_at() {
        let mut role = object("ClusterRole", "r", "us");
        role["metadata"]["namespace"] = Value::Null;
        let all = [object("Namespace", "s", "us"), object("Service", "a", "us"), role];
        assert_eq!(
            checked_kinds(&all),
            [("v1", "ClusterRole", true), ("v1", "Service", false)].into()
        );
    }
}
