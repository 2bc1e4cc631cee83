//! Shell: `rouse describe`: prints all fields of an object for reading.

use serde_json::Value;

use crate::{
    args::DescribeArgs, command_error::CommandError, get, kinds, stdout, store::NodeStore,
};

/// Prints each object that the arguments name.
pub(crate) fn describe(store: &NodeStore, args: &DescribeArgs) -> Result<(), CommandError> {
    let namespace = args.scope.namespace.as_str();
    let mut texts = Vec::new();
    for target in kinds::parse_selections(&args.selections)? {
        match &target.name {
            Some(name) => {
                texts.push(describe_text(&get::get_object(store, target.kind, namespace, name)?))
            }
            None => {
                texts.extend(store.objects(target.kind, Some(namespace))?.iter().map(describe_text))
            }
        }
    }
    if texts.is_empty() {
        stdout::print_error(&format!("No resources found in {namespace} namespace."));
    }
    Ok(stdout::print_text(&texts.join("\n\n"))?)
}

/// Formats an object as kubectl does a kind it does not know: titles, indented by depth.
fn describe_text(object: &Value) -> String {
    let mut text = String::new();
    let meta = &object["metadata"];
    let empty = Value::Null;
    let head = [
        ("Name", &meta["name"]),
        ("Namespace", &meta["namespace"]),
        ("Labels", &meta["labels"]),
        ("Annotations", &meta["annotations"]),
        ("API Version", &object["apiVersion"]),
        ("Kind", &object["kind"]),
    ];
    for (title, value) in head {
        let pairs = value.as_object().into_iter().flatten();
        let pairs: Vec<String> =
            pairs.map(|(key, value)| format!("{key}: {}", plain_text(value))).collect();
        let value = match value {
            // Further pairs stand below the first one, as in kubectl.
            Value::Object(_) => pairs.join(&format!("\n{:14}", "")),
            Value::Null => String::new(),
            other => plain_text(other),
        };
        let value = if value.is_empty() { "<none>".to_owned() } else { value };
        text += &format!("{:14}{value}\n", format!("{title}:"));
    }
    for part in ["metadata", "spec", "status"] {
        let mut value = object.get(part).unwrap_or(&empty).clone();
        if let (Some(fields), "metadata") = (value.as_object_mut(), part) {
            // These four are in the head already.
            fields.retain(|key, _| {
                !["name", "namespace", "labels", "annotations"].contains(&key.as_str())
            });
        }
        write_field(&mut text, part, &value, 0);
    }
    text
}

fn write_field(text: &mut String, key: &str, value: &Value, depth: usize) {
    let (indent, title) = ("  ".repeat(depth), title_words(key));
    match value {
        Value::Null => {}
        // kubectl omits empty fields too.
        Value::Object(fields) if fields.is_empty() => {}
        Value::Object(fields) => {
            *text += &format!("{indent}{title}:\n");
            fields.iter().for_each(|(key, value)| write_field(text, key, value, depth + 1));
        }
        Value::Array(items) if items.is_empty() => {}
        Value::Array(items) => {
            *text += &format!("{indent}{title}:\n");
            items.iter().for_each(|item| write_item(text, item, depth + 1));
        }
        plain_value => *text += &format!("{indent}{title}:  {}\n", plain_text(plain_value)),
    }
}

fn write_item(text: &mut String, item: &Value, depth: usize) {
    match item.as_object() {
        Some(fields) => {
            // A line of its own separates two items of a list.
            *text += &format!("{}-\n", "  ".repeat(depth));
            fields.iter().for_each(|(key, value)| write_field(text, key, value, depth + 1));
        }
        None => *text += &format!("{}{}\n", "  ".repeat(depth), plain_text(item)),
    }
}

fn plain_text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Splits a camel-case key into words: `lastTransitionTime` → `Last Transition Time`.
fn title_words(key: &str) -> String {
    let mut title = String::new();
    for letter in key.chars() {
        if title.is_empty() {
            title.extend(letter.to_uppercase());
            continue;
        }
        if letter.is_uppercase() {
            title.push(' ');
        }
        title.push(letter);
    }
    title
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_object_is_described_by_titles() {
        let object = json!({
            "apiVersion": "serving.knative.dev/v1", "kind": "Service",
            "metadata": {"name": "hello", "namespace": "default", "labels": {"a": "b", "c": "d"}, "generation": 2},
            "spec": {"traffic": [{"percent": 100, "latestRevision": true}]},
            "status": {"url": "http://hello", "conditions": []},
        });
        let expected = "\
Name:         hello
Namespace:    default
Labels:       a: b
              c: d
Annotations:  <none>
API Version:  serving.knative.dev/v1
Kind:         Service
Metadata:
  Generation:  2
Spec:
  Traffic:
    -
      Latest Revision:  true
      Percent:  100
Status:
  Url:  http://hello
";
        assert_eq!(describe_text(&object), expected);
    }
}
