//! Pure: from untyped YAML to Kubernetes' types, with the path of every wrong type and unknown field.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::Problem;

/// Reads `value` as a `T`. What is wrong goes to `problems`, and then the result is only a stand-in.
pub(super) fn typed<T: DeserializeOwned + Default>(
    value: Option<&Value>,
    path: &str,
    problems: &mut Vec<Problem>,
) -> T {
    let Some(value) = value.filter(|value| !value.is_null()) else { return T::default() };
    let (mut track, mut unknown) = (serde_path_to_error::Track::new(), Vec::new());
    let mut ignored = |at: serde_ignored::Path<'_>| unknown.push(dotted(&at.to_string()));
    let tracked = serde_path_to_error::Deserializer::new(value, &mut track);
    let read = T::deserialize(serde_ignored::Deserializer::new(tracked, &mut ignored));
    for field in unknown {
        problems.push(Problem::new(join(path, &field), "unknown field"));
    }
    read.unwrap_or_else(|error| {
        let at = match track.path().to_string().as_str() {
            "." => path.to_owned(),
            inner => join(path, inner),
        };
        problems.push(Problem::new(at, format!("wrong type: {error}")));
        T::default()
    })
}

/// Says which keys of `object` are not in `allowed`.
pub(super) fn keys(
    object: &Map<String, Value>,
    path: &str,
    allowed: &[&str],
    problems: &mut Vec<Problem>,
) {
    let strange = object.keys().filter(|key| !allowed.contains(&key.as_str()));
    problems.extend(strange.map(|key| Problem::new(join(path, key), "unknown field")));
}

fn join(path: &str, field: &str) -> String {
    match (path, field.as_bytes().first()) {
        ("", _) => field.to_owned(),
        (_, Some(b'[')) => format!("{path}{field}"),
        _ => format!("{path}.{field}"),
    }
}

/// `containers.0.?.imagge` as people write it: `containers[0].imagge`.
fn dotted(path: &str) -> String {
    let parts = path.split('.').filter(|part| *part != "?");
    parts.fold(String::new(), |out, part| match part.parse::<usize>() {
        Ok(index) => format!("{out}[{index}]"),
        Err(_) => join(&out, part),
    })
}
