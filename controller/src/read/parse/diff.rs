//! Pure: differences of two documents, as text for users.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

/// Number of differences shown; users find further ones in the documents.
const MAX_DIFFERENCES: usize = 16;
/// Fields whose presence has a meaning even if their object is empty.
const MEANINGFUL: [&str; 4] = ["emptyDir", "ephemeral", "tcpSocket", "exec"];

/// Describes the changes between `old` and `new`; `None` if both mean the same.
///
/// `null`, an empty list and an empty object have the meaning of an absent field, as in Go's types.
pub(super) fn describe_changes(old: &Value, new: &Value) -> Option<String> {
    let (old, new) = (normalize(old), normalize(new));
    let mut lines = Vec::new();
    compare_values(&old, &new, "", &mut lines);
    let more = lines.len().saturating_sub(MAX_DIFFERENCES);
    lines.truncate(MAX_DIFFERENCES);
    if more > 0 {
        lines.push(format!("and {more} more\n"));
    }
    (!lines.is_empty()).then(|| lines.concat())
}

/// Returns true if both documents mean the same.
pub(super) fn is_equivalent(old: &Value, new: &Value) -> bool {
    normalize(old) == normalize(new)
}

/// Returns a value without its empty parts, which mean the same as absent ones.
fn normalize(value: &Value) -> Value {
    match value {
        Value::Object(all) => {
            let mut out = Map::new();
            for (name, value) in all {
                let value = normalize(value);
                let empty = match &value {
                    Value::Null => true,
                    Value::Array(all) => all.is_empty(),
                    // Some objects mean something by their presence, as `emptyDir: {}`.
                    Value::Object(all) => all.is_empty() && !MEANINGFUL.contains(&name.as_str()),
                    Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
                };
                if !empty {
                    out.insert(name.clone(), value);
                }
            }
            Value::Object(out)
        }
        Value::Array(all) => Value::Array(all.iter().map(normalize).collect()),
        other => other.clone(),
    }
}

/// Collects the differences of two values, each with its path.
fn compare_values(old: &Value, new: &Value, path: &str, lines: &mut Vec<String>) {
    match (old, new) {
        _ if old == new => {}
        (Value::Object(old), Value::Object(new)) => {
            // The fields of both: one that came or went is a difference, too.
            let names: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
            for name in names {
                let at = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                let get = |all: &Map<String, Value>| all.get(name).cloned().unwrap_or_default();
                compare_values(&get(old), &get(new), &at, lines);
            }
        }
        (Value::Array(old), Value::Array(new)) => {
            for index in 0..old.len().max(new.len()) {
                let get = |all: &[Value]| all.get(index).cloned().unwrap_or_default();
                compare_values(&get(old), &get(new), &format!("{path}[{index}]"), lines);
            }
        }
        _ => {
            let text = |value: &Value| match value {
                Value::Null => "<unset>".to_owned(),
                other => other.to_string(),
            };
            lines.push(format!("{path}:\n\t-: {}\n\t+: {}\n", text(old), text(new)));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_changes_of_meaning_are_described() {
        let old = json!({"a": {"b": [1, 2], "c": null}, "volumes": [{"emptyDir": {}}], "x": {}});
        let equal = json!({"a": {"b": [1, 2]}, "volumes": [{"emptyDir": {}}], "y": []});
        assert_eq!(describe_changes(&old, &equal), None);
        let new = json!({"a": {"b": [1, 3]}, "volumes": [{}]});
        let expected = "a.b[1]:\n\t-: 2\n\t+: 3\nvolumes[0].emptyDir:\n\t-: {}\n\t+: <unset>\n";
        assert_eq!(describe_changes(&old, &new).as_deref(), Some(expected));
    }
}
