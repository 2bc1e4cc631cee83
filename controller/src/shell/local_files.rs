//! Shell: the two folders of the local node: `manifests/`, which users write, and `objects/`, which they read.

use std::{
    collections::BTreeSet,
    fs,
    io::{self, ErrorKind},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use common::wire::{NamespacedName, is_dns_label};
use notify::{EventKind, RecursiveMode, Watcher as _, event::AccessKind};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

mod incomplete_reads;
mod manifest_index;
mod object_files;

use incomplete_reads::{IncompleteRead, IncompleteReads};

use manifest_index::{FileStamp, ManifestIndex};
use object_files::read_objects;
pub use object_files::write_objects_until_shutdown;

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
    /// Files and folders that may name more services than those that were read.
    incomplete_reads: IncompleteReads,
    /// Services of an earlier run that no manifest names, but one that is not read completely may.
    unclaimed: BTreeSet<NamespacedName>,
    /// Number of manifest files read so far.
    files_read: u64,
}

impl LocalFiles {
    /// Opens the folders, restores the objects of the last run, then reads every manifest.
    pub fn open(
        state_folder: &Path,
        shared: Arc<ControllerRuntime>,
    ) -> Result<Self, LocalFilesError> {
        let (manifests, objects) = (state_folder.join("manifests"), state_folder.join("objects"));
        for path in [&manifests, &objects] {
            fs::create_dir_all(path)
                .map_err(|source| LocalFilesError::Folder { path: path.clone(), source })?;
        }
        let manifest_index = ManifestIndex::new(&manifests);
        let mut files = Self {
            runtime: shared,
            manifests,
            objects,
            manifest_index,
            incomplete_reads: IncompleteReads::default(),
            unclaimed: BTreeSet::new(),
            files_read: 0,
        };
        // Before any manifest is read, or each service would look like a new one.
        files.restore()?;
        Ok(files)
    }

    /// Restores the apps of the objects on disk, then reads all manifests, and removes what belongs to neither.
    fn restore(&mut self) -> Result<(), LocalFilesError> {
        let mut read = read_objects(&self.objects)?;
        let boot_id = self.runtime.settings().boot_id.clone();
        self.unclaimed = read.apps.keys().cloned().collect();
        // Objects come before manifests: a manifest applied to an unknown service would create a new one.
        for (name, objects) in std::mem::take(&mut read.apps) {
            self.runtime.step(ControllerEvent::AppRestored {
                name,
                app: Box::new(restore::restore_app(&objects, &boot_id)),
            });
        }
        self.changed_files().iter().for_each(|path| self.read_manifest_file(path));
        self.delete_unclaimed();
        if !self.unclaimed.is_empty() {
            let services = self.unclaimed.len();
            warn!(services, "services kept whose manifests may be in files that cannot be read");
        }
        self.runtime.release_node_spec();
        let services = self.runtime.with_machine(|machine| machine.cluster().apps.len());
        info!(services, objects = read.keys.len(), "objects read");
        // Objects on disk that belong to no service any more.
        self.remove_orphans(read.keys);
        Ok(())
    }

    /// Paths of manifest files that have changed since they were read, and of those that were removed.
    fn changed_files(&mut self) -> BTreeSet<PathBuf> {
        let mut found = FoundFiles::default();
        collect_yaml_files(&self.manifests, &mut found);
        self.incomplete_reads.set_folder_errors(found.errors);
        let mut changed = found.files;
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
        match fs::read(path) {
            Ok(text) => {
                let documents = parse::manifest_documents(&text, &settings.scale_policy);
                self.apply_documents(path, stamp.unwrap_or(FileStamp::RACY), documents);
            }
            Err(error) if is_absent(&error) => {
                self.incomplete_reads.remove(path);
                let names = self.manifest_index.remove(path);
                self.delete_unnamed(names);
            }
            Err(error) => self.record_read_error(path, &error),
        }
    }

    /// Applies the documents of a file. A service that it no longer names is deleted only if all documents are known.
    fn apply_documents(&mut self, path: &Path, stamp: FileStamp, documents: Vec<ManifestDocument>) {
        let mut missing = self.manifest_index.remove(path);
        let is_only = documents.len() == 1;
        let (mut named, mut unnamed_errors) = (Vec::new(), Vec::new());
        for (index, document) in documents.into_iter().enumerate() {
            match document {
                ManifestDocument::Service { name, manifest } => {
                    named.push(name.clone());
                    self.runtime.step(ControllerEvent::ManifestApplied { name, manifest });
                }
                ManifestDocument::Refused { name: Some(name), reason } => {
                    warn!(file = %path.display(), why = reason, "manifest refused");
                    named.push(name.clone());
                    self.runtime.step(ControllerEvent::ManifestRefused { name, reason });
                }
                ManifestDocument::Refused { name: None, reason } => {
                    let number = index + 1;
                    unnamed_errors
                        .push(format!("{reason} (document {number} of {})", path.display()));
                }
            }
        }
        missing.retain(|name| !named.contains(name));
        // A file that is being written may lack documents for a moment, and must delete no service.
        let is_unsettled =
            stamp == FileStamp::RACY && !(missing.is_empty() && self.unclaimed.is_empty());
        let incomplete = if !unnamed_errors.is_empty() {
            // A file with one document is its service's own, so an error in it can be shown on that service.
            if is_only && missing.is_empty() {
                missing.extend(name_from_file(path));
            }
            self.reject_unread(path, &missing, &unnamed_errors.join("; "));
            Some(IncompleteRead::UnnamedDocument)
        } else {
            is_unsettled.then_some(IncompleteRead::Unsettled)
        };
        if let Some(incomplete) = incomplete {
            self.incomplete_reads.insert(path, incomplete);
            named.append(&mut missing);
        } else {
            self.incomplete_reads.remove(path);
        }
        self.manifest_index.insert(path, stamp, named);
        self.delete_unnamed(missing);
    }

    /// Records that a file cannot be read at present. Its services stay as they are.
    fn record_read_error(&mut self, path: &Path, error: &io::Error) {
        let reason = format!("cannot be read: {error} ({})", path.display());
        // The file is tried again and again; only another error is news.
        if !self.incomplete_reads.insert(path, IncompleteRead::Error(reason.clone())) {
            return;
        }
        let mut names = self.manifest_index.remove(path);
        if names.is_empty() {
            names.extend(name_from_file(path));
        }
        self.reject_unread(path, &names, &reason);
        // The end of the error may leave the file's stamp as it is.
        self.manifest_index.insert(path, FileStamp::RACY, names);
    }

    /// Shows the error of a file on those services that it may name and no other file does.
    fn reject_unread(&self, path: &Path, names: &[NamespacedName], reason: &str) {
        warn!(file = %path.display(), why = reason, "manifest refused");
        for name in names.iter().filter(|name| !self.manifest_index.names_service(name)) {
            let (name, reason) = (name.clone(), reason.to_owned());
            self.runtime.step(ControllerEvent::ManifestRefused { name, reason });
        }
    }

    /// Deletes those of `names` that no file names.
    fn delete_unnamed(&self, names: Vec<NamespacedName>) {
        for name in names {
            if !self.manifest_index.names_service(&name) && !self.unclaimed.contains(&name) {
                self.runtime.step(ControllerEvent::ManifestDeleted(name));
            }
        }
    }

    /// Deletes services of an earlier run that no file names, once all files have been read.
    fn delete_unclaimed(&mut self) {
        self.unclaimed.retain(|name| !self.manifest_index.names_service(name));
        if self.incomplete_reads.is_empty() {
            let names = std::mem::take(&mut self.unclaimed);
            self.delete_unnamed(names.into_iter().collect());
        }
    }

    /// Removes the objects among `keys` that the cluster state no longer has.
    fn remove_orphans(&self, mut keys: BTreeSet<LocalObjectKey>) {
        keys.retain(|key| {
            self.runtime
                .with_machine(|machine| desired::local_object(machine.cluster(), key).is_none())
        });
        self.runtime.add_changed_objects(keys);
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
            self.delete_unclaimed();
            changes = tokio::select! {
                next = watched.next_changes() => next,
                () = sleep_if_some(self.incomplete_reads.retry_delay()) => FolderChanges::default(),
                () = shutdown.cancelled() => return Ok(()),
            };
            changes.files.extend(self.incomplete_reads.files_to_retry());
            changes.needs_rescan |= self.incomplete_reads.has_folder_errors();
        }
    }
}

async fn sleep_if_some(time: Option<Duration>) {
    match time {
        Some(time) => tokio::time::sleep(time).await,
        None => std::future::pending().await,
    }
}

/// Files below a folder, and what of it cannot be read.
#[derive(Debug, Default)]
struct FoundFiles {
    files: BTreeSet<PathBuf>,
    errors: Vec<(PathBuf, io::Error)>,
}

/// Collects every YAML or JSON file below `folder`.
fn collect_yaml_files(folder: &Path, into: &mut FoundFiles) {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if is_absent(&error) => return,
        Err(error) => return into.errors.push((folder.to_owned(), error)),
    };
    for entry in entries {
        let path = match entry {
            Ok(entry) => entry.path(),
            Err(error) => {
                into.errors.push((folder.to_owned(), error));
                continue;
            }
        };
        match fs::metadata(&path) {
            Ok(meta) if meta.is_dir() => collect_yaml_files(&path, into),
            _ if is_yaml_file(&path) => {
                into.files.insert(path);
            }
            // A file that is removed between the list and the look is no fault.
            Err(error) if !is_absent(&error) => into.errors.push((path, error)),
            _ => {}
        }
    }
}

/// Returns true if the error tells that there is no file at the path.
fn is_absent(error: &io::Error) -> bool {
    let kind = error.kind();
    matches!(kind, ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::IsADirectory)
}

fn is_yaml_file(path: &Path) -> bool {
    let is_hidden = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
    let end = path.extension().and_then(|end| end.to_str());
    !is_hidden && matches!(end, Some("yaml" | "yml" | "json"))
}

/// Name for a manifest without one, from its file name: that of `rouse apply`, or a name alone.
fn name_from_file(path: &Path) -> Option<NamespacedName> {
    let stem = path.file_stem()?.to_str()?.to_ascii_lowercase();
    let (namespace, name) = stem.split_once('_').unwrap_or(("default", &stem));
    (is_dns_label(namespace) && is_dns_label(name)).then(|| NamespacedName::new(namespace, name))
}

/// Changes below a watched folder.
#[derive(Debug, Default)]
struct FolderChanges {
    files: BTreeSet<PathBuf>,
    /// A folder was created or removed, or events were lost: everything must be compared.
    needs_rescan: bool,
}

impl FolderChanges {
    fn is_empty(&self) -> bool {
        !self.needs_rescan && self.files.is_empty()
    }
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
    /// If the call is dropped, the next one returns the changes.
    async fn next_changes(&self) -> FolderChanges {
        while self.lock_changes().is_empty() {
            self.changes.1.notified().await;
        }
        tokio::time::sleep(GATHER_TIME).await;
        std::mem::take(&mut *self.lock_changes())
    }

    fn lock_changes(&self) -> MutexGuard<'_, FolderChanges> {
        self.changes.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Records which files an event of the folder makes due. A lost event makes all of them due.
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
