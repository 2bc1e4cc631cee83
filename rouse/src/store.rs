//! Shell: the folders of a node: `objects/`, which the controller writes, and, by [`Manifests`], `manifests/`.

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use common::wire::Name;
use controller::render::ObjectKind;
use k8s_openapi::serde::Deserialize as _;
use local::layout::Layout;
use serde_json::Value;

use crate::{failure::Failure, manifests::Manifests};

/// A node's folders.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    objects: PathBuf,
    manifests: PathBuf,
}

impl Store {
    /// The folders of a node.
    pub(crate) fn new(layout: &Layout) -> Self {
        Self { objects: layout.objects(), manifests: layout.manifests() }
    }

    /// One object as the controller last wrote it.
    pub(crate) fn object(&self, kind: ObjectKind, name: &Name) -> Result<Option<Value>, Failure> {
        let folder = self.objects.join(kind.plural()).join(&name.namespace);
        read_one(&folder.join(format!("{}.yaml", name.name)))
    }

    /// Objects of a kind in a namespace, or (`None`) in all, sorted by name.
    pub(crate) fn objects(
        &self,
        kind: ObjectKind,
        namespace: Option<&str>,
    ) -> Result<Vec<Value>, Failure> {
        let folder = self.objects.join(kind.plural());
        let folders = match namespace {
            Some(namespace) => vec![folder.join(namespace)],
            None => entries(&folder)?,
        };
        let mut out = Vec::new();
        for folder in folders {
            for path in entries(&folder)?.into_iter().filter(|path| is_manifest(path)) {
                out.extend(read_one(&path)?);
            }
        }
        Ok(out)
    }

    /// The manifests, to be looked at and changed.
    pub(crate) fn manifests(&self) -> Manifests {
        Manifests::new(self.manifests.clone())
    }
}

/// Every document of a YAML or JSON text; empty ones are left out.
pub(crate) fn documents(text: &str) -> Result<Vec<Value>, String> {
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

/// The name a document bears.
pub(crate) fn name_of(it: &Value) -> Option<Name> {
    let meta = it.get("metadata")?;
    let namespace = meta.get("namespace").and_then(Value::as_str).unwrap_or("default");
    Some(Name::new(namespace, meta.get("name")?.as_str()?))
}

/// Every manifest file in a folder, or below it where `recursive`.
pub(crate) fn manifests(folder: &Path, recursive: bool) -> Result<Vec<PathBuf>, Failure> {
    let mut out = Vec::new();
    if recursive {
        walk(folder, &mut out)?;
    } else {
        out = entries(folder)?;
        out.retain(|path| is_manifest(path) && path.is_file());
    }
    Ok(out)
}

/// Every manifest file below a folder.
pub(crate) fn walk(folder: &Path, into: &mut Vec<PathBuf>) -> Result<(), Failure> {
    for path in entries(folder)? {
        if path.is_dir() {
            walk(&path, into)?;
        } else if is_manifest(&path) {
            into.push(path);
        }
    }
    Ok(())
}

fn is_manifest(path: &Path) -> bool {
    let hidden = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
    let end = path.extension().and_then(|end| end.to_str());
    !hidden && matches!(end, Some("yaml" | "yml" | "json"))
}

/// What a folder holds, sorted; nothing where there is none.
fn entries(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let read = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        read => read.map_err(Failure::file("read folder", folder))?,
    };
    let mut out: Vec<PathBuf> = read.flatten().map(|entry| entry.path()).collect();
    out.sort();
    Ok(out)
}

fn read_one(path: &Path) -> Result<Option<Value>, Failure> {
    let text = match fs::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        read => read.map_err(Failure::file("read", path))?,
    };
    let bad = |error| Failure::file("understand", path)(std::io::Error::other(error));
    // The controller writes JSON, which is YAML too and is read many times faster as what it is.
    let json = serde_json::from_str(&text);
    json.or_else(|_| serde_norway::from_str(&text)).map(Some).map_err(bad)
}

/// Replaces a file at once: readers see the old documents or the new ones.
pub(crate) fn replace(path: &Path, documents: &[Value]) -> Result<(), Failure> {
    let bad = |error| Failure::file("write", path)(std::io::Error::other(error));
    let texts = documents.iter().map(serde_norway::to_string).collect::<Result<Vec<_>, _>>();
    let text = texts.map_err(bad)?.join("---\n");
    let draft = path.with_extension("new");
    fs::write(&draft, text).map_err(Failure::file("write", &draft))?;
    fs::rename(&draft, path).map_err(Failure::file("write", path))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A node's folders in a folder of the test's own, removed at the end.
    pub(crate) struct Temp(PathBuf);

    impl Temp {
        pub(crate) fn new(test: &str) -> (Self, Store) {
            let path =
                std::env::temp_dir().join(format!("rouse-cli-{test}-{}", std::process::id()));
            let store = Store { objects: path.join("objects"), manifests: path.join("manifests") };
            fs::create_dir_all(&store.manifests).unwrap();
            (Self(path), store)
        }

        pub(crate) fn path(&self) -> &Path {
            &self.0
        }

        pub(crate) fn put(&self, kind: ObjectKind, it: &Value) {
            let name = name_of(it).unwrap();
            let folder = self.0.join("objects").join(kind.plural()).join(&name.namespace);
            fs::create_dir_all(&folder).unwrap();
            replace(&folder.join(format!("{}.yaml", name.name)), std::slice::from_ref(it)).unwrap();
        }

        pub(crate) fn files(&self) -> Vec<String> {
            let all = entries(&self.0.join("manifests")).unwrap();
            all.iter()
                .map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
                .collect()
        }
    }

    impl Drop for Temp {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn lists_and_empty_documents_are_taken_apart() {
        let text = "---\n# nothing\n---\nkind: List\nitems: [{kind: A}, {kind: B}]\n---\nkind: C\n";
        let kinds: Vec<_> = documents(text).unwrap().iter().map(|it| it["kind"].clone()).collect();
        assert_eq!(kinds, ["A", "B", "C"]);
        assert!(documents("a: [").is_err());
    }
}
