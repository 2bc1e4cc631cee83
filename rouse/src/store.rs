//! Shell: the folders of a node: `objects/`, written by the controller, and, by [`ManifestFolder`], `manifests/`.

use std::{
    collections::BTreeSet,
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use common::wire::NamespacedName;
use controller::render::KnativeObjectKind;
use k8s_openapi::serde::Deserialize as _;
use local::layout::NodeLayout;
use serde_json::Value;

use crate::{failure::CommandError, manifests::ManifestFolder};

/// Folders of one node.
#[derive(Clone, Debug)]
pub(crate) struct NodeStore {
    objects: PathBuf,
    manifests: PathBuf,
}

impl NodeStore {
    /// Returns the folders of the node with this layout.
    pub(crate) fn new(layout: &NodeLayout) -> Self {
        Self { objects: layout.objects(), manifests: layout.manifests() }
    }

    /// Reads one object as the controller last wrote it; a service not read by the controller yet is read from its
    /// manifest.
    pub(crate) fn object(
        &self,
        kind: KnativeObjectKind,
        name: &NamespacedName,
    ) -> Result<Option<Value>, CommandError> {
        let folder = self.objects.join(kind.plural()).join(&name.namespace);
        match read_one(&folder.join(format!("{}.yaml", name.name)))? {
            None if kind == KnativeObjectKind::Service => self.applied(name),
            found => Ok(found),
        }
    }

    /// Reads the manifest of a service, as an API server shows an object before a controller has seen it.
    fn applied(&self, name: &NamespacedName) -> Result<Option<Value>, CommandError> {
        Ok(self.manifests().find(name)?.map(|kept| kept.value().clone()))
    }

    /// Reads the objects of a kind in a namespace, or (`None`) in all namespaces, sorted by name.
    pub(crate) fn objects(
        &self,
        kind: KnativeObjectKind,
        namespace: Option<&str>,
    ) -> Result<Vec<Value>, CommandError> {
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
        if kind == KnativeObjectKind::Service {
            self.add_unread(namespace, &mut out)?;
        }
        Ok(out)
    }

    /// Adds services whose manifests the controller has not read yet, and sorts all by name.
    fn add_unread(
        &self,
        namespace: Option<&str>,
        out: &mut Vec<Value>,
    ) -> Result<(), CommandError> {
        let mut manifests = self.manifests();
        // The controller's object wins: it has the status, and the manifest may be newer for a moment only.
        let known: BTreeSet<NamespacedName> = out.iter().filter_map(name_of).collect();
        let wanted = |name: &NamespacedName| namespace.is_none_or(|it| *name.namespace == *it);
        let unread: Vec<NamespacedName> =
            manifests.names()?.filter(|it| wanted(it)).cloned().collect();
        for name in unread.into_iter().filter(|it| !known.contains(it)) {
            out.extend(manifests.find(&name)?.map(|kept| kept.value().clone()));
        }
        out.sort_by_key(name_of);
        Ok(())
    }

    /// Returns the manifests, for reading and changes.
    pub(crate) fn manifests(&self) -> ManifestFolder {
        ManifestFolder::new(self.manifests.clone())
    }
}

/// Parses all documents of a YAML or JSON text, without empty ones; a List becomes its items.
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

/// Name and namespace of a document; the default namespace if it names none.
pub(crate) fn name_of(it: &Value) -> Option<NamespacedName> {
    let meta = it.get("metadata")?;
    let namespace = meta.get("namespace").and_then(Value::as_str).unwrap_or("default");
    Some(NamespacedName::new(namespace, meta.get("name")?.as_str()?))
}

/// Paths of the manifest files in a folder, and below it if `recursive`.
pub(crate) fn manifests(folder: &Path, recursive: bool) -> Result<Vec<PathBuf>, CommandError> {
    let mut out = Vec::new();
    if recursive {
        walk(folder, &mut out)?;
    } else {
        out = entries(folder)?;
        out.retain(|path| is_manifest(path) && path.is_file());
    }
    Ok(out)
}

/// Collects the manifest files in a folder and in all folders below it.
pub(crate) fn walk(folder: &Path, into: &mut Vec<PathBuf>) -> Result<(), CommandError> {
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

/// Sorted entries of a folder; none if it does not exist.
fn entries(folder: &Path) -> Result<Vec<PathBuf>, CommandError> {
    let read = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        read => read.map_err(CommandError::file("read folder", folder))?,
    };
    let mut out: Vec<PathBuf> = read.flatten().map(|entry| entry.path()).collect();
    out.sort();
    Ok(out)
}

fn read_one(path: &Path) -> Result<Option<Value>, CommandError> {
    let text = match fs::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        read => read.map_err(CommandError::file("read", path))?,
    };
    let bad = |error| CommandError::file("understand", path)(std::io::Error::other(error));
    // The controller writes JSON, which is YAML too; the JSON parser is many times faster.
    let json = serde_json::from_str(&text);
    json.or_else(|_| serde_norway::from_str(&text)).map(Some).map_err(bad)
}

/// Replaces a file atomically: readers see either the old or the new documents.
pub(crate) fn replace(path: &Path, documents: &[Value]) -> Result<(), CommandError> {
    let bad = |error| CommandError::file("write", path)(std::io::Error::other(error));
    let texts = documents.iter().map(serde_norway::to_string).collect::<Result<Vec<_>, _>>();
    let text = texts.map_err(bad)?.join("---\n");
    // The extension keeps the draft out of `is_manifest`; the rename is atomic within one folder.
    let draft = path.with_extension("new");
    fs::write(&draft, text).map_err(CommandError::file("write", &draft))?;
    fs::rename(&draft, path).map_err(CommandError::file("write", path))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Folders of a node in a temporary folder, removed at the end of the test.
    pub(crate) struct NodeStoreFixture(PathBuf);

    impl NodeStoreFixture {
        pub(crate) fn new(test: &str) -> (Self, NodeStore) {
            let path =
                std::env::temp_dir().join(format!("rouse-cli-{test}-{}", std::process::id()));
            let store =
                NodeStore { objects: path.join("objects"), manifests: path.join("manifests") };
            fs::create_dir_all(&store.manifests).unwrap();
            (Self(path), store)
        }

        pub(crate) fn path(&self) -> &Path {
            &self.0
        }

        pub(crate) fn put(&self, kind: KnativeObjectKind, it: &Value) {
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

    impl Drop for NodeStoreFixture {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_service_that_was_just_applied_is_known() {
        let (_temp, store) = NodeStoreFixture::new("unread");
        let service = |name: &str| serde_json::json!({"kind": "Service", "metadata": {"name": name, "namespace": "default"}});
        let mut manifests = store.manifests();
        for name in ["b", "a"] {
            manifests.write(&NamespacedName::new("default", name), &service(name), None).unwrap();
        }
        let found =
            store.object(KnativeObjectKind::Service, &NamespacedName::new("default", "a")).unwrap();
        assert_eq!(found, Some(service("a")));
        assert_eq!(
            store.object(KnativeObjectKind::Route, &NamespacedName::new("default", "a")).unwrap(),
            None
        );
        let names = |namespace| -> Vec<Value> {
            let all = store.objects(KnativeObjectKind::Service, namespace).unwrap();
            all.iter().map(|it| it["metadata"]["name"].clone()).collect()
        };
        assert_eq!(names(None), ["a", "b"]);
        assert_eq!(names(Some("default")), ["a", "b"]);
        assert!(names(Some("other")).is_empty());
    }

    #[test]
    fn what_the_controller_wrote_comes_before_the_manifest() {
        let (temp, store) = NodeStoreFixture::new("written");
        let name = NamespacedName::new("default", "a");
        let it = serde_json::json!({"kind": "Service", "metadata": {"name": "a", "namespace": "default"}});
        store.manifests().write(&name, &it, None).unwrap();
        let mut known = it;
        known["status"] = serde_json::json!({"url": "http://a"});
        temp.put(KnativeObjectKind::Service, &known);
        assert_eq!(store.object(KnativeObjectKind::Service, &name).unwrap(), Some(known.clone()));
        assert_eq!(store.objects(KnativeObjectKind::Service, None).unwrap(), [known]);
    }

    #[test]
    fn lists_and_empty_documents_are_taken_apart() {
        let text = "---\n# nothing\n---\nkind: List\nitems: [{kind: A}, {kind: B}]\n---\nkind: C\n";
        let kinds: Vec<_> = documents(text).unwrap().iter().map(|it| it["kind"].clone()).collect();
        assert_eq!(kinds, ["A", "B", "C"]);
        assert!(documents("a: [").is_err());
    }
}
