//! Shell: the folders of a node: `objects/`, written by the controller, and, by [`ManifestFolder`], `manifests/`.

use std::{collections::BTreeSet, path::PathBuf};

use common::wire::NamespacedName;
use controller::model::object::LocalObjectKind;
use local::layout::NodeLayout;
use serde_json::Value;

use crate::{
    command_error::CommandError,
    documents::{is_manifest, object_name, read_object, sorted_entries},
    manifests::ManifestFolder,
};

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
        kind: LocalObjectKind,
        name: &NamespacedName,
    ) -> Result<Option<Value>, CommandError> {
        let folder = self.objects.join(kind.plural()).join(&name.namespace);
        match read_object(&folder.join(format!("{}.yaml", name.name)))? {
            None if kind == LocalObjectKind::Service => self.read_manifest(name),
            object => Ok(object),
        }
    }

    /// Reads the manifest of a service, as an API server shows an object before a controller has seen it.
    fn read_manifest(&self, name: &NamespacedName) -> Result<Option<Value>, CommandError> {
        Ok(self.manifests().find(name)?.map(|stored| stored.manifest().clone()))
    }

    /// Reads the objects of a kind in a namespace, or (`None`) in all namespaces, sorted by namespace and name.
    pub(crate) fn objects(
        &self,
        kind: LocalObjectKind,
        namespace: Option<&str>,
    ) -> Result<Vec<Value>, CommandError> {
        let folder = self.objects.join(kind.plural());
        let folders = match namespace {
            Some(namespace) => vec![folder.join(namespace)],
            None => sorted_entries(&folder)?,
        };
        let mut out = Vec::new();
        for folder in folders {
            for path in sorted_entries(&folder)?.into_iter().filter(|path| is_manifest(path)) {
                out.extend(read_object(&path)?);
            }
        }
        if kind == LocalObjectKind::Service {
            self.add_unread_manifests(namespace, &mut out)?;
        }
        // The paths have another order: `hello-world.yaml` comes before `hello.yaml`.
        out.sort_by_cached_key(object_name);
        Ok(out)
    }

    /// Adds services whose manifests the controller has not read yet.
    fn add_unread_manifests(
        &self,
        namespace: Option<&str>,
        out: &mut Vec<Value>,
    ) -> Result<(), CommandError> {
        let mut manifests = self.manifests();
        // The controller's object wins: it has the status, and the manifest may be newer for a moment only.
        let known_names: BTreeSet<NamespacedName> = out.iter().filter_map(object_name).collect();
        let is_in_namespace =
            |name: &NamespacedName| namespace.is_none_or(|it| *name.namespace == *it);
        let unread: Vec<NamespacedName> =
            manifests.service_names()?.filter(|it| is_in_namespace(it)).cloned().collect();
        for name in unread.into_iter().filter(|it| !known_names.contains(it)) {
            out.extend(manifests.find(&name)?.map(|stored| stored.manifest().clone()));
        }
        Ok(())
    }

    /// Returns the manifests, for reading and changes.
    pub(crate) fn manifests(&self) -> ManifestFolder {
        ManifestFolder::new(self.manifests.clone())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::{fs, path::Path};

    use super::*;
    use crate::documents::{parse_documents, replace_file};

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

        pub(crate) fn put_object(&self, kind: LocalObjectKind, object: &Value) {
            let name = object_name(object).unwrap();
            let folder = self.0.join("objects").join(kind.plural()).join(&name.namespace);
            fs::create_dir_all(&folder).unwrap();
            replace_file(&folder.join(format!("{}.yaml", name.name)), std::slice::from_ref(object))
                .unwrap();
        }

        pub(crate) fn manifest_file_names(&self) -> Vec<String> {
            let entries = sorted_entries(&self.0.join("manifests")).unwrap();
            entries
                .iter()
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
        let object =
            store.object(LocalObjectKind::Service, &NamespacedName::new("default", "a")).unwrap();
        assert_eq!(object, Some(service("a")));
        assert_eq!(
            store.object(LocalObjectKind::Route, &NamespacedName::new("default", "a")).unwrap(),
            None
        );
        let names = |namespace| -> Vec<Value> {
            let services = store.objects(LocalObjectKind::Service, namespace).unwrap();
            services.iter().map(|it| it["metadata"]["name"].clone()).collect()
        };
        assert_eq!(names(None), ["a", "b"]);
        assert_eq!(names(Some("default")), ["a", "b"]);
        assert!(names(Some("other")).is_empty());
    }

    #[test]
    fn an_empty_object_file_is_no_object() {
        let (temp, store) = NodeStoreFixture::new("empty");
        let folder = temp.path().join("objects").join(LocalObjectKind::Service.plural());
        fs::create_dir_all(folder.join("default")).unwrap();
        fs::write(folder.join("default/a.yaml"), "").unwrap();
        let name = NamespacedName::new("default", "a");
        assert_eq!(store.object(LocalObjectKind::Service, &name).unwrap(), None);
        assert!(store.objects(LocalObjectKind::Service, None).unwrap().is_empty());
    }

    #[test]
    fn objects_of_each_kind_are_sorted_by_name() {
        let (temp, store) = NodeStoreFixture::new("sorted");
        for kind in LocalObjectKind::ALL {
            for name in ["hello-world", "hello"] {
                let metadata = serde_json::json!({"name": name, "namespace": "default"});
                temp.put_object(kind, &serde_json::json!({"metadata": metadata}));
            }
            let objects = store.objects(kind, None).unwrap();
            let names: Vec<Value> =
                objects.iter().map(|it| it["metadata"]["name"].clone()).collect();
            assert_eq!(names, ["hello", "hello-world"]);
        }
    }

    #[test]
    fn the_controller_s_object_comes_before_the_manifest() {
        let (temp, store) = NodeStoreFixture::new("written");
        let name = NamespacedName::new("default", "a");
        let object = serde_json::json!({"kind": "Service", "metadata": {"name": "a", "namespace": "default"}});
        store.manifests().write(&name, &object, None).unwrap();
        let mut known_object = object;
        known_object["status"] = serde_json::json!({"url": "http://a"});
        temp.put_object(LocalObjectKind::Service, &known_object);
        assert_eq!(
            store.object(LocalObjectKind::Service, &name).unwrap(),
            Some(known_object.clone())
        );
        assert_eq!(store.objects(LocalObjectKind::Service, None).unwrap(), [known_object]);
    }

    #[test]
    fn lists_and_empty_documents_are_taken_apart() {
        let text = "---\n# nothing\n---\nkind: List\nitems: [{kind: A}, {kind: B}]\n---\nkind: C\n";
        let kinds: Vec<_> =
            parse_documents(text).unwrap().iter().map(|it| it["kind"].clone()).collect();
        assert_eq!(kinds, ["A", "B", "C"]);
        assert!(parse_documents("a: [").is_err());
    }
}
