//! A directory that pods on every node share: nodes of xtask's clusters see the host's files.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use crate::leftovers::FOLDER_PREFIX;

/// A directory that any user may write to, removed on drop.
#[derive(Debug)]
pub struct SharedFolder(PathBuf);

impl SharedFolder {
    /// Creates the directory. A killed run leaves it behind; the process id in the namespace's name identifies it
    /// later.
    pub fn new(namespace: &str) -> Self {
        let path = PathBuf::from(format!("/tmp/{FOLDER_PREFIX}{namespace}"));
        fs::create_dir_all(&path).expect("a folder");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).expect("our own");
        Self(path)
    }

    /// Path of the directory, on the host and on each node.
    pub fn path(&self) -> String {
        self.0.to_string_lossy().into_owned()
    }

    /// Writes an executable file to the directory.
    pub fn write_program(&self, name: &str, bytes: &[u8]) {
        let file = self.0.join(name);
        fs::write(&file, bytes).expect("our own folder");
        fs::set_permissions(file, fs::Permissions::from_mode(0o755)).expect("our own");
    }

    /// Contents of all files in the directory, one after the other.
    pub fn read_all(&self) -> String {
        let files = fs::read_dir(&self.0).expect("our own").flatten();
        files.filter_map(|file| fs::read_to_string(file.path()).ok()).collect()
    }

    /// Names of the files that have this line.
    pub fn files_with_line(&self, wanted: &str) -> Vec<String> {
        let files = fs::read_dir(&self.0).expect("our own").flatten();
        let has_line = |file: &fs::DirEntry| {
            let text = fs::read_to_string(file.path()).unwrap_or_default();
            text.lines().any(|line| line == wanted)
        };
        files.filter(has_line).map(|file| file.file_name().to_string_lossy().into_owned()).collect()
    }
}

impl Drop for SharedFolder {
    fn drop(&mut self) {
        let _gone = fs::remove_dir_all(&self.0);
    }
}
