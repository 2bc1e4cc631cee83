//! Programs of this machine's packages in pods: the nodes of xtask's clusters see the host's files.

use std::fs;
use std::path::{Path, PathBuf};

use crate::shared_folder::SharedFolder;

/// Directories with the programs and their libraries. A machine need not have all of them.
const SYSTEM_FOLDERS: [&str; 5] = ["/bin", "/etc", "/lib", "/lib64", "/usr"];

/// Directories of the host that a pod mounts: those of the programs at their own paths, and the files of a test at
/// `/tests`.
#[derive(Clone, Debug)]
pub struct HostPrograms {
    /// Name of each volume, which is also its path in the pod without the slash, and its directory on the host.
    folders: Vec<(&'static str, String)>,
}

impl HostPrograms {
    /// Finds the directories of the programs; `files` is the directory that pods see as `/tests`.
    pub fn with_files(files: &SharedFolder) -> Self {
        let system = SYSTEM_FOLDERS.into_iter().filter(|path| Path::new(path).is_dir());
        let mut folders: Vec<(&'static str, String)> =
            system.map(|path| (path.trim_start_matches('/'), path.to_owned())).collect();
        folders.push(("tests", files.path()));
        Self { folders }
    }

    /// Items of a container's `volumeMounts`, each in YAML's flow style.
    pub fn mounts(&self) -> Vec<String> {
        let folders = self.folders.iter();
        folders.map(|(name, _)| format!("{{name: {name}, mountPath: /{name}}}")).collect()
    }

    /// Items of a pod's `volumes`, each in YAML's flow style.
    pub fn volumes(&self) -> Vec<String> {
        let folders = self.folders.iter();
        folders
            .map(|(name, path)| {
                format!("{{name: {name}, hostPath: {{path: {path}, type: Directory}}}}")
            })
            .collect()
    }
}

/// Returns the directory of the programs of the newest PostgreSQL of this machine; panics without one.
pub fn postgres_programs() -> PathBuf {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let folders = versions.map(|version| version.path().join("bin"));
    let newest = folders.filter(|folder| folder.join("initdb").exists()).max();
    newest.expect("PostgreSQL is installed: apt-get install postgresql")
}
