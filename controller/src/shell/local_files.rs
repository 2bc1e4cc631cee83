//! Shell: the two folders of the local node: `manifests/`, which users write, and `objects/`, which they read.

use std::{
    collections::BTreeSet,
    fs,
    io::{self, ErrorKind},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use common::wire::{NamespacedName, is_dns_label};
use notify::{EventKind, RecursiveMode, Watcher as _, event::AccessKind};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

mod manifest_index;
mod object_files;

use manifest_index::{FileStamp, ManifestIndex};
pub use object_files::write_objects_until_shutdown;
use object_files::{read_objects, write_object};

use crate::{
    decide::machine::ControllerEvent,
    model::object::LocalObjectKey,
    read::{
        parse::{self, ManifestDocument},
        restore,
    },
    shell::runtime::ControllerRuntime,
    write::desired,
};

/// Time for which changes are gathered before they are read or written.
const GATHER_TIME: Duration = Duration::from_millis(5);

/// Error of one of the two folders.
#[derive(Debug, thiserror::Error)]
pub enum LocalFilesError {
    /// The folder cannot be created or read.
    #[error("cannot use folder {path}")]
    Folder {
        /// Path of the folder, or of a file in it.
        path: PathBuf,
        /// Error of the file system.
        #[source]
        source: io::Error,
    },
    /// The folder cannot be watched.
    #[error("cannot watch folder {path}")]
    Watch {
        /// Path of the folder.
        path: PathBuf,
        /// Error of the watcher.
        #[source]
        source: notify::Error,
    },
}

/// The two folders, which lie in the node's state folder.
#[derive(Debug)]
pub struct LocalFiles {
    runtime: Arc<ControllerRuntime>,
    manifests: PathBuf,
    objects: PathBuf,
    /// Manifest files that were read, and the services they name.
    manifest_index: ManifestIndex,
    /// Number of manifest files read so far.
    files_read: u64,
}

impl LocalFiles {
    /// Opens the folders, restores the objects of the last run, then reads every manifest.
    pub fn open(state: &Path, shared: Arc<ControllerRuntime>) -> Result<Self, LocalFilesError> {
        let (manifests, objects) = (state.join("manifests"), state.join("objects"));
        for path in [&manifests, &objects] {
            fs::create_dir_all(path)
                .map_err(|source| LocalFilesError::Folder { path: path.clone(), source })?;
        }
        let manifest_index = ManifestIndex::new(&manifests);
        let mut files = Self { runtime: shared, manifests, objects, manifest_index, files_read: 0 };
        files.restore()?;
        Ok(files)
    }

    fn restore(&mut self) -> Result<(), LocalFilesError> {
        let mut read = read_objects(&self.objects)?;
        let boot_id = self.runtime.settings().boot_id.clone();
        let known: Vec<NamespacedName> = read.apps.keys().cloned().collect();
        // Objects come before manifests: a manifest applied to an unknown service would create a new one.
        for (name, objects) in std::mem::take(&mut read.apps) {
            self.runtime.step(ControllerEvent::AppRestored {
                name,
                app: Box::new(restore::restore_app(&objects, &boot_id)),
            });
        }
        self.changed_files().iter().for_each(|path| self.read_manifest_file(path));
        let removed = known.iter().filter(|name| !self.manifest_index.names_service(name));
        removed.for_each(|name| self.runtime.step(ControllerEvent::ManifestDeleted(name.clone())));
        self.runtime.release_node_spec();
        let services = self.runtime.with_machine(|machine| machine.cluster().apps.len());
        info!(services, objects = read.keys.len(), "objects read");
        // Objects on disk that belong to no service any more.
        self.remove_orphans(&read.keys);
        Ok(())
    }

    /// Paths of manifest files that have changed since they were read, and of those that were removed.
    fn changed_files(&self) -> BTreeSet<PathBuf> {
        let mut changed = BTreeSet::new();
        collect_yaml_files(&self.manifests, &mut changed);
        let removed =
            self.manifest_index.paths().filter(|path| !changed.contains(path)).collect::<Vec<_>>();
        changed.retain(|path| !self.manifest_index.is_up_to_date(path));
        changed.extend(removed);
        changed
    }

    /// Reads one manifest file, or records its removal.
    fn read_manifest_file(&mut self, path: &Path) {
        let settings = self.runtime.settings();
        self.files_read += 1;
        // The stamp is taken before the text: a write between the two makes the file count as changed.
        let stamp = FileStamp::of_file(path);
        let documents = match fs::read_to_string(path) {
            Ok(text) => parse::manifest_documents(&text, &settings.scale_policy),
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            Err(error) => vec![ManifestDocument::Refused {
                name: None,
                reason: format!("cannot be read: {error}"),
            }],
        };
        let old_names = self.manifest_index.remove(path);
        let mut named = Vec::new();
        // A file with one document is its service's own, so an error in it can be shown on that service.
        let is_only = documents.len() == 1;
        for document in documents {
            match document {
                ManifestDocument::Service { name, manifest } => {
                    named.push(name.clone());
                    self.runtime.step(ControllerEvent::ManifestApplied { name, manifest });
                }
                ManifestDocument::Refused { name, reason } => {
                    warn!(file = %path.display(), why = reason, "manifest refused");
                    let own_name = old_names.first().filter(|_| is_only).cloned();
                    if let Some(name) =
                        name.or(own_name).or_else(|| name_from_file(path).filter(|_| is_only))
                    {
                        named.push(name.clone());
                        self.runtime.step(ControllerEvent::ManifestRejected { name, reason });
                    }
                }
            }
        }
        let is_unnamed = |name: &NamespacedName| {
            !named.contains(name) && !self.manifest_index.names_service(name)
        };
        let gone: Vec<NamespacedName> = old_names.into_iter().filter(is_unnamed).collect();
        gone.into_iter().for_each(|name| self.runtime.step(ControllerEvent::ManifestDeleted(name)));
        if let Some(stamp) = stamp {
            self.manifest_index.insert(path, stamp, named);
        }
    }

    /// Removes the objects among `keys` that the cluster state no longer has.
    fn remove_orphans(&self, keys: &BTreeSet<LocalObjectKey>) {
        let orphan = |key: &&LocalObjectKey| {
            self.runtime
                .with_machine(|machine| desired::local_object(machine.cluster(), key).is_none())
        };
        for key in keys.iter().filter(orphan) {
            write_object(&self.objects, key, None);
        }
    }

    /// Watches `manifests/` until `shutdown`, and reads what changes.
    pub async fn watch_manifests(
        mut self,
        shutdown: CancellationToken,
    ) -> Result<(), LocalFilesError> {
        let failed = |source| LocalFilesError::Watch { path: self.manifests.clone(), source };
        let watched = WatchedFolder::open(&self.manifests).map_err(failed)?;
        // Files may have changed between the first reading and the first watch.
        let mut changes = FolderChanges { needs_rescan: true, ..FolderChanges::default() };
        loop {
            if changes.needs_rescan {
                changes.files.extend(self.changed_files());
            }
            for path in &changes.files {
                self.read_manifest_file(path);
                // Thousands of files may change at once; other tasks must run between them.
                tokio::task::yield_now().await;
            }
            tokio::select! {
                next = watched.next_changes() => changes = next,
                () = shutdown.cancelled() => return Ok(()),
            }
        }
    }
}

/// Collects every YAML or JSON file below `folder`.
fn collect_yaml_files(folder: &Path, into: &mut BTreeSet<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            collect_yaml_files(&path, into);
        } else if is_yaml_file(&path) {
            into.insert(path);
        }
    }
}

fn is_yaml_file(path: &Path) -> bool {
    let is_hidden = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
    let end = path.extension().and_then(|end| end.to_str());
    !is_hidden && matches!(end, Some("yaml" | "yml" | "json"))
}

/// Name for a manifest without one, from its file name.
fn name_from_file(path: &Path) -> Option<NamespacedName> {
    let stem = path.file_stem()?.to_str()?.to_ascii_lowercase();
    is_dns_label(&stem).then(|| NamespacedName::new("default", stem))
}

/// Changes below a watched folder.
#[derive(Debug, Default)]
struct FolderChanges {
    files: BTreeSet<PathBuf>,
    /// A folder was created or removed, or events were lost: everything must be compared.
    needs_rescan: bool,
}

/// A folder that is watched recursively.
#[derive(Debug)]
struct WatchedFolder {
    changes: Arc<(Mutex<FolderChanges>, Notify)>,
    _watcher: notify::RecommendedWatcher,
}

impl WatchedFolder {
    fn open(folder: &Path) -> notify::Result<Self> {
        let changes = Arc::new((Mutex::<FolderChanges>::default(), Notify::new()));
        let changes_in_callback = Arc::clone(&changes);
        let mut watcher = notify::recommended_watcher(move |event: notify::Result<_>| {
            let mut changes = changes_in_callback.0.lock().unwrap_or_else(PoisonError::into_inner);
            record_change(&mut changes, event);
            changes_in_callback.1.notify_one();
        })?;
        watcher.watch(folder, RecursiveMode::Recursive)?;
        Ok(Self { changes, _watcher: watcher })
    }

    /// Waits for changes. One command often touches several files, so they are gathered for a moment.
    async fn next_changes(&self) -> FolderChanges {
        loop {
            self.changes.1.notified().await;
            tokio::time::sleep(GATHER_TIME).await;
            let mut changes = self.changes.0.lock().unwrap_or_else(PoisonError::into_inner);
            let changes = std::mem::take(&mut *changes);
            if changes.needs_rescan || !changes.files.is_empty() {
                return changes;
            }
        }
    }
}

fn record_change(changes: &mut FolderChanges, event: notify::Result<notify::Event>) {
    let Ok(event) = event else {
        changes.needs_rescan = true;
        return;
    };
    changes.needs_rescan |= event.need_rescan();
    // A new file is read when its writer closes it: before, it may be incomplete.
    let reads_files = match event.kind {
        EventKind::Access(AccessKind::Close(_))
        | EventKind::Remove(_)
        | EventKind::Modify(notify::event::ModifyKind::Name(_)) => true,
        EventKind::Create(_) => false,
        EventKind::Access(_) | EventKind::Modify(_) | EventKind::Any | EventKind::Other => return,
    };
    for path in event.paths {
        if !is_yaml_file(&path) {
            // A path without an extension may be a folder. Files in it may have no events of their own: the watch of a
            // new folder may begin after they were written.
            changes.needs_rescan |= path.extension().is_none();
        } else if reads_files {
            changes.files.insert(path);
        }
    }
}

#[cfg(test)]
mod tests;
