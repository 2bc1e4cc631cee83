//! Shell: `manifests/`: the file of each service's manifest, and its changes.
//!
//! A service that was applied has a file of its own, whose name follows from the service's. Users also write files by
//! hand, with several documents and under any name. Only if a service has no file of its own are all files read, once.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::ErrorKind,
    path::{Path, PathBuf},
};

use common::wire::NamespacedName;
use local::node::make_folder;
use serde_json::Value;

use crate::{
    command_error::CommandError,
    documents::{collect_manifest_files, object_name, parse_documents, replace_file},
};

/// Manifests folder, with an index that lasts for one command.
#[derive(Debug)]
pub(crate) struct ManifestFolder {
    folder: PathBuf,
    /// Files that name each service, in sorted order; built on first use.
    index: Option<BTreeMap<NamespacedName, Vec<PathBuf>>>,
    /// Number of files read, for tests.
    #[cfg(test)]
    reads: usize,
}

/// Location of a manifest: its file, all documents of that file, and the manifest's index among them.
#[derive(Debug)]
pub(crate) struct ManifestLocation {
    path: PathBuf,
    documents: Vec<Value>,
    index: usize,
}

impl ManifestFolder {
    /// Returns the manifests in `folder`, without reading any.
    pub(crate) fn new(folder: PathBuf) -> Self {
        Self {
            folder,
            index: None,
            #[cfg(test)]
            reads: 0,
        }
    }

    /// Finds the manifest of a service in any file.
    pub(crate) fn find(
        &mut self,
        name: &NamespacedName,
    ) -> Result<Option<ManifestLocation>, CommandError> {
        // The usual case reads one file, however many services there are.
        if let Some(location) = self.find_in_file(self.own_file_path(name), name) {
            return Ok(Some(location));
        }
        // A file may have lost the manifest since the index was built. The first one that has it wins, so that repeated
        // commands find the same one.
        let paths = self.index()?.get(name).cloned().unwrap_or_default();
        Ok(paths.into_iter().find_map(|path| self.find_in_file(path, name)))
    }

    /// Waits until no other command changes manifests. While the lock lives, no other does; `None` without the folder.
    /// Two commands that change one file at the same time could lose a change.
    pub(crate) fn lock(&self) -> Result<Option<File>, CommandError> {
        let folder = match File::open(&self.folder) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            folder => folder.map_err(CommandError::file_error("open folder", &self.folder))?,
        };
        folder.lock().map_err(CommandError::file_error("lock folder", &self.folder))?;
        Ok(Some(folder))
    }

    /// Names of all services that have a manifest, sorted.
    pub(crate) fn service_names(
        &mut self,
    ) -> Result<impl Iterator<Item = &NamespacedName>, CommandError> {
        Ok(self.index()?.keys())
    }

    /// Writes the manifest of a service in place of the one at `location`, or to a file of its own.
    pub(crate) fn write(
        &mut self,
        name: &NamespacedName,
        object: &Value,
        location: Option<ManifestLocation>,
    ) -> Result<(), CommandError> {
        let (path, documents) = match location {
            None => (self.own_file_path(name), vec![object.clone()]),
            Some(mut location) => {
                // The other documents of the file stay as the user wrote them.
                location.documents[location.index] = object.clone();
                (location.path, location.documents)
            }
        };
        make_folder(&self.folder).map_err(CommandError::file_error("make folder", &self.folder))?;
        replace_file(&path, &documents)
    }

    /// Removes a manifest; other documents of its file stay.
    pub(crate) fn remove(&mut self, mut location: ManifestLocation) -> Result<(), CommandError> {
        location.documents.remove(location.index);
        // An empty file would stay as a manifest that names nothing.
        if location.documents.is_empty() {
            return fs::remove_file(&location.path)
                .map_err(CommandError::file_error("remove", &location.path));
        }
        replace_file(&location.path, &location.documents)
    }

    /// Path of the file in which `apply` stores a service. An underscore cannot be in a name, so paths are unique.
    fn own_file_path(&self, name: &NamespacedName) -> PathBuf {
        self.folder.join(format!("{}_{}.yaml", name.namespace, name.name))
    }

    fn find_in_file(&mut self, path: PathBuf, name: &NamespacedName) -> Option<ManifestLocation> {
        let documents = self.read_documents(&path);
        let is_named = |it: &Value| object_name(it).as_ref() == Some(name);
        // The controller shows a document of another kind as a refused service of its name. So it is replaced or
        // removed in the place of a Service, unless the file has one.
        let service = documents.iter().position(|it| is_named(it) && it["kind"] == "Service");
        let index = service.or_else(|| documents.iter().position(is_named));
        index.map(|index| ManifestLocation { path, documents, index })
    }

    /// Reads the documents of a file. An unreadable file has none; the controller reports the error itself.
    fn read_documents(&mut self, path: &Path) -> Vec<Value> {
        let Ok(text) = fs::read_to_string(path) else { return Vec::new() };
        #[cfg(test)]
        {
            self.reads += 1;
        }
        parse_documents(&text).unwrap_or_default()
    }

    fn index(&mut self) -> Result<&BTreeMap<NamespacedName, Vec<PathBuf>>, CommandError> {
        if self.index.is_none() {
            let (mut paths, mut index) = (Vec::new(), BTreeMap::<_, Vec<_>>::new());
            collect_manifest_files(&self.folder, &mut paths)?;
            for path in paths {
                for name in self.read_documents(&path).iter().filter_map(object_name) {
                    index.entry(name).or_default().push(path.clone());
                }
            }
            self.index = Some(index);
        }
        Ok(self.index.get_or_insert_default())
    }
}

impl ManifestLocation {
    /// The manifest itself, without its file's other documents.
    pub(crate) fn manifest(&self) -> &Value {
        &self.documents[self.index]
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::store::tests::NodeStoreFixture;

    fn service(name: &str) -> Value {
        json!({"kind": "Service", "metadata": {"name": name, "namespace": "default"}})
    }

    fn name(name: &str) -> NamespacedName {
        NamespacedName::new("default", name)
    }

    #[test]
    fn a_manifest_is_found_wherever_it_is() {
        let (temp, store) = NodeStoreFixture::new("found");
        let folder = temp.path().join("manifests/team");
        fs::create_dir_all(&folder).unwrap();
        replace_file(&folder.join("both.yaml"), &[service("a"), service("b")]).unwrap();
        let mut manifests = store.manifests();
        let location = manifests.find(&name("b")).unwrap().unwrap();
        assert_eq!(location.manifest(), &service("b"));
        manifests.remove(location).unwrap();
        assert!(manifests.find(&name("b")).unwrap().is_none());
        let a = manifests.find(&name("a")).unwrap().unwrap();
        manifests.remove(a).unwrap();
        assert!(!folder.join("both.yaml").exists());
    }

    #[test]
    fn a_command_reads_each_foreign_file_once_whatever_the_number_of_services() {
        let (temp, store) = NodeStoreFixture::new("reads");
        let foreign = temp.path().join("manifests/by-hand.yaml");
        replace_file(&foreign, &[service("x"), service("y")]).unwrap();
        let mut manifests = store.manifests();
        let services: Vec<_> = (0..20).map(|index| format!("new-{index}")).collect();
        for service_name in &services {
            let location = manifests.find(&name(service_name)).unwrap();
            assert!(location.is_none());
            manifests.write(&name(service_name), &service(service_name), location).unwrap();
        }
        assert_eq!(manifests.reads, 1, "the folder, when the first was missing");
        for service in &services {
            assert!(manifests.find(&name(service)).unwrap().is_some());
        }
        assert_eq!(manifests.reads, 1 + services.len(), "each file of its own");
        let location = manifests.find(&name("y")).unwrap();
        manifests.write(&name("y"), &json!({"new": 1}), location).unwrap();
        assert_eq!(
            parse_documents(&fs::read_to_string(foreign).unwrap()).unwrap()[0],
            service("x"),
            "the other document of its file stays"
        );
    }
}
