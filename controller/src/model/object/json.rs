//! Pure: readers of fields of an object as JSON.

use common::wire::NamespacedName;
use serde_json::Value;

/// Iterates over the items of an array; over nothing if the value is no array.
pub(crate) fn array_items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// Returns a text; `None` if the value is no text or an empty one.
pub(crate) fn non_empty_text(value: &Value) -> Option<Box<str>> {
    value.as_str().filter(|text| !text.is_empty()).map(Into::into)
}

/// Returns an object's namespace and name.
pub fn object_name(object: &Value) -> NamespacedName {
    let field = |field: &str| object["metadata"][field].as_str().unwrap_or_default();
    NamespacedName::new(field("namespace"), field("name"))
}

/// Returns true if the object has a deletion timestamp.
pub(crate) fn is_terminating(object: &Value) -> bool {
    object["metadata"]["deletionTimestamp"].is_string()
}

/// Returns the value of one of the object's labels.
pub(crate) fn label<'a>(object: &'a Value, key: &str) -> Option<&'a str> {
    object["metadata"]["labels"][key].as_str()
}

/// Returns the value of one of the object's annotations.
pub(crate) fn annotation<'a>(object: &'a Value, key: &str) -> Option<&'a str> {
    object["metadata"]["annotations"][key].as_str()
}
