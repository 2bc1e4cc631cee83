//! Shell: files of YAML or JSON documents in the folders of a node.

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use common::wire::NamespacedName;
use k8s_openapi::serde::Deserialize as _;
use serde_json::Value;

use crate::command_error::CommandError;

/// Parses all documents of a YAML or JSON text, without empty ones; a List becomes its items.
pub(crate) fn parse_documents(text: &str) -> Result<Vec<Value>, String> {
    let mut out = Vec::new();
    for document in serde_norway::Deserializer::from_str(text) {
        match Value::deserialize(document).map_err(|error| error.to_string())? {
            Value::Null => {}
            Value::Object(mut list) if list.get("kind").is_some_and(|kind| kind == "List") => {
                let items = list.remove("items");
                out.extend(items.and_then(|items| items.as_array().cloned()).unwrap_or_default());
            }
            value => out.push(value),
        }
    }
    Ok(out)
}

/// Name and namespace of a document; the default namespace if it names none.
pub(crate) fn object_name(object: &Value) -> Option<NamespacedName> {
    let meta = object.get("metadata")?;
    let namespace = meta.get("namespace").and_then(Value::as_str).unwrap_or("default");
    Some(NamespacedName::new(namespace, meta.get("name")?.as_str()?))
}

/// Paths of the manifest files in a folder, and below it if `recursive`.
pub(crate) fn manifest_files(folder: &Path, recursive: bool) -> Result<Vec<PathBuf>, CommandError> {
    let mut out = Vec::new();
    if recursive {
        collect_manifest_files(folder, &mut out)?;
    } else {
        out = sorted_entries(folder)?;
        out.retain(|path| is_manifest(path) && path.is_file());
    }
    Ok(out)
}

/// Collects the manifest files in a folder and in all folders below it.
pub(crate) fn collect_manifest_files(
    folder: &Path,
    into: &mut Vec<PathBuf>,
) -> Result<(), CommandError> {
    for path in sorted_entries(folder)? {
        if path.is_dir() {
            collect_manifest_files(&path, into)?;
        } else if is_manifest(&path) {
            into.push(path);
        }
    }
    Ok(())
}

pub(crate) fn is_manifest(path: &Path) -> bool {
    let hidden = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
    let end = path.extension().and_then(|end| end.to_str());
    !hidden && matches!(end, Some("yaml" | "yml" | "json"))
}

/// Sorted entries of a folder; none if it does not exist.
pub(crate) fn sorted_entries(folder: &Path) -> Result<Vec<PathBuf>, CommandError> {
    let read = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        read => read.map_err(CommandError::file_error("read folder", folder))?,
    };
    let mut out: Vec<PathBuf> = read.flatten().map(|entry| entry.path()).collect();
    out.sort();
    Ok(out)
}

/// Reads an object; `None` if there is no file, or if it is empty, as a loss of power can leave it.
pub(crate) fn read_object(path: &Path) -> Result<Option<Value>, CommandError> {
    let text = match fs::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        read => read.map_err(CommandError::file_error("read", path))?,
    };
    let to_error =
        |error| CommandError::file_error("understand", path)(std::io::Error::other(error));
    // The controller writes JSON, which is YAML too; the JSON parser is many times faster.
    let json = serde_json::from_str(&text);
    let object: Value = json.or_else(|_| serde_norway::from_str(&text)).map_err(to_error)?;
    Ok(Some(object).filter(Value::is_object))
}

/// Replaces a file atomically: readers see either the old or the new documents.
pub(crate) fn replace_file(path: &Path, documents: &[Value]) -> Result<(), CommandError> {
    let to_error = |error| CommandError::file_error("write", path)(std::io::Error::other(error));
    let texts = documents.iter().map(serde_norway::to_string).collect::<Result<Vec<_>, _>>();
    let text = texts.map_err(to_error)?.join("---\n");
    // The extension keeps the draft out of `is_manifest`; the rename is atomic within one folder. Another process that
    // writes the same file has a draft of its own.
    let draft = path.with_extension(format!("new-{}", std::process::id()));
    let replaced = fs::write(&draft, text).and_then(|()| fs::rename(&draft, path));
    if replaced.is_err() {
        // On a full disk a part of the draft would stay.
        let _ = fs::remove_file(&draft);
    }
    replaced.map_err(CommandError::file_error("write", path))
}
