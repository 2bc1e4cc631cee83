//! Pure: conversion of untyped YAML to Kubernetes' types, with the path of every wrong type and unknown field.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::model::problem::Problem;

/// Parses `value` as a `T`. Errors go to `problems`; the result is then only a default.
pub(super) fn parse_typed<T: DeserializeOwned + Default>(
    value: Option<&Value>,
    path: &str,
    problems: &mut Vec<Problem>,
) -> T {
    let Some(value) = value.filter(|value| !value.is_null()) else { return T::default() };
    let mut track = serde_path_to_error::Track::new();
    let (read, unknown) = deserialize_tracked(value, &mut track);
    for field in unknown {
        problems.push(Problem::new(join_path(path, &field.to_string()), "unknown field"));
    }
    read.unwrap_or_else(|error| {
        // The path of the error as a whole is a dot.
        let at = match track.path().to_string().as_str() {
            "." => path.to_owned(),
            inner => join_path(path, inner),
        };
        problems.push(Problem::new(at, format!("wrong type: {error}")));
        T::default()
    })
}

/// Removes fields from `value` that a `T` does not have, and returns their paths.
pub(super) fn remove_unknown_fields<T: DeserializeOwned>(
    value: &mut Value,
    path: &str,
) -> Vec<String> {
    let (_, unknown) = deserialize_tracked::<T>(value, &mut serde_path_to_error::Track::new());
    unknown
        .iter()
        .filter(|field| field.remove_from(value))
        .map(|field| join_path(path, &field.to_string()))
        .collect()
}

fn deserialize_tracked<T: DeserializeOwned>(
    value: &Value,
    track: &mut serde_path_to_error::Track,
) -> (Result<T, serde_json::Error>, Vec<FieldPath>) {
    let mut unknown = Vec::new();
    let mut ignored = |at: serde_ignored::Path<'_>| unknown.push(FieldPath::from_ignored(&at));
    let tracked = serde_path_to_error::Deserializer::new(value, track);
    let read = T::deserialize(serde_ignored::Deserializer::new(tracked, &mut ignored));
    (read, unknown)
}

/// Path of a field in a document.
struct FieldPath(Vec<FieldPathStep>);

enum FieldPathStep {
    Key(String),
    Index(usize),
}

impl FieldPath {
    fn from_ignored(path: &serde_ignored::Path<'_>) -> Self {
        use serde_ignored::Path;
        let (parent, step) = match path {
            Path::Root => return Self(Vec::new()),
            Path::Seq { parent, index } => (parent, Some(FieldPathStep::Index(*index))),
            Path::Map { parent, key } => (parent, Some(FieldPathStep::Key(key.clone()))),
            // These wrap a value and add no step to its path.
            Path::Some { parent }
            | Path::NewtypeStruct { parent }
            | Path::NewtypeVariant { parent } => (parent, None),
        };
        let mut steps = Self::from_ignored(parent).0;
        steps.extend(step);
        Self(steps)
    }

    /// Removes the field. Returns false if there was none.
    fn remove_from(&self, value: &mut Value) -> bool {
        let Some((FieldPathStep::Key(last), steps)) = self.0.split_last() else { return false };
        let parent = steps.iter().try_fold(value, |value, step| match step {
            FieldPathStep::Key(key) => value.get_mut(key),
            FieldPathStep::Index(index) => value.get_mut(index),
        });
        parent.and_then(Value::as_object_mut).is_some_and(|parent| parent.remove(last).is_some())
    }
}

impl std::fmt::Display for FieldPath {
    /// Formats the path as users write it: `containers[0].imagge`.
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (index, step) in self.0.iter().enumerate() {
            match step {
                FieldPathStep::Key(key) if index == 0 => write!(out, "{key}")?,
                FieldPathStep::Key(key) => write!(out, ".{key}")?,
                FieldPathStep::Index(number) => write!(out, "[{number}]")?,
            }
        }
        Ok(())
    }
}

/// Reports keys of `object` that are not in `allowed`.
pub(super) fn check_known_fields(
    object: &Map<String, Value>,
    path: &str,
    allowed: &[&str],
    problems: &mut Vec<Problem>,
) {
    let strange = object.keys().filter(|key| !allowed.contains(&key.as_str()));
    problems.extend(strange.map(|key| Problem::new(join_path(path, key), "unknown field")));
}

fn join_path(path: &str, field: &str) -> String {
    match (path, field.as_bytes().first()) {
        ("", _) => field.to_owned(),
        (_, Some(b'[')) => format!("{path}{field}"),
        _ => format!("{path}.{field}"),
    }
}
