//! Pure: files and folders whose services are not all known, and the time to read them again.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use tracing::warn;

use super::manifest_index::RACY_WINDOW;

/// Time after which a file or folder is tried again: the end of an error may cause no event.
const RETRY_TIME: Duration = Duration::from_secs(1);
/// Time after which a file that has just changed is read again.
const SETTLE_TIME: Duration = RACY_WINDOW.saturating_mul(2);

/// Reason for which not all services of a file or folder are known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum IncompleteRead {
    /// The file cannot be read.
    Error(String),
    /// The folder, or an entry of it, cannot be read.
    FolderError(String),
    /// A document of the file has no name that can be read.
    UnnamedDocument,
    /// The file has changed a moment ago, so its writer may not have finished.
    Unsettled,
}

/// Files and folders whose services are not all known.
#[derive(Debug, Default)]
pub(super) struct IncompleteReads(BTreeMap<PathBuf, IncompleteRead>);

impl IncompleteReads {
    /// Returns true if all services of all files are known.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Records a file. Returns true if it was not recorded for this reason before.
    pub(super) fn insert(&mut self, path: &Path, reason: IncompleteRead) -> bool {
        self.0.insert(path.to_owned(), reason.clone()) != Some(reason)
    }

    /// Records that a file is known, or that it is gone.
    pub(super) fn remove(&mut self, path: &Path) {
        self.0.remove(path);
    }

    /// Replaces the folders that cannot be read.
    pub(super) fn set_folder_errors(&mut self, errors: Vec<(PathBuf, io::Error)>) {
        let is_folder = |reason: &IncompleteRead| matches!(reason, IncompleteRead::FolderError(_));
        let old: BTreeMap<PathBuf, IncompleteRead> =
            self.0.extract_if(.., |_, reason| is_folder(reason)).collect();
        for (path, error) in errors {
            let reason = IncompleteRead::FolderError(error.to_string());
            if old.get(&path) != Some(&reason) {
                warn!(path = %path.display(), %error, "folder not readable");
            }
            self.0.insert(path, reason);
        }
    }

    /// Returns true if a folder cannot be read, so that a rescan is due.
    pub(super) fn has_folder_errors(&self) -> bool {
        self.0.values().any(|reason| matches!(reason, IncompleteRead::FolderError(_)))
    }

    /// Returns the files that may be readable by now, without an event about them.
    pub(super) fn files_to_retry(&self) -> impl Iterator<Item = PathBuf> {
        let is_due = |reason: &IncompleteRead| {
            matches!(reason, IncompleteRead::Error(_) | IncompleteRead::Unsettled)
        };
        self.0.iter().filter(move |(_, reason)| is_due(reason)).map(|(path, _)| path.clone())
    }

    /// Returns the time until files or folders are tried again; `None`: they wait for an event.
    pub(super) fn retry_delay(&self) -> Option<Duration> {
        let delay = |reason: &IncompleteRead| match reason {
            IncompleteRead::Error(_) | IncompleteRead::FolderError(_) => Some(RETRY_TIME),
            IncompleteRead::Unsettled => Some(SETTLE_TIME),
            IncompleteRead::UnnamedDocument => None,
        };
        self.0.values().filter_map(delay).min()
    }
}
