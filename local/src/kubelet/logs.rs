//! Shell: output of containers: log files of bounded size, and messages about exits.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use tracing::{info, warn};

use crate::container_log::{self, MAX_LOG_BYTES};
use crate::layout::NodeLayout;

/// Folders of pods that are gone, kept for reading; the oldest beyond this number are removed.
const MAX_KEPT_FOLDERS: usize = 100;
/// Bytes of a log or message that go into a status, as in Kubernetes.
const MAX_MESSAGE_BYTES: u64 = 2048;

/// Rotates logs that have grown too long.
pub(super) fn rotate_logs(layout: &NodeLayout) {
    for folder in entries(&layout.logs()) {
        for log in entries(&folder) {
            let long = fs::metadata(&log).is_ok_and(|meta| meta.len() > MAX_LOG_BYTES);
            if !long || log.extension().is_none_or(|extension| extension != "log") {
                continue;
            }
            match container_log::rotate(&log) {
                Ok(true) => info!(log = %log.display(), "log rotated"),
                // The next check tries again.
                Ok(false) => {}
                Err(error) => warn!(log = %log.display(), %error, "log not rotated"),
            }
        }
    }
}

/// Removes the oldest log folders, except those of pods that are `alive`.
pub(super) fn prune_folders(layout: &NodeLayout, alive: &BTreeSet<PathBuf>) {
    let mut folders: Vec<(SystemTime, PathBuf)> = entries(&layout.logs())
        .into_iter()
        .filter_map(|folder| Some((fs::metadata(&folder).ok()?.modified().ok()?, folder)))
        .collect();
    folders.retain(|(_, folder)| !alive.contains(folder));
    folders.sort();
    let surplus = folders.len().saturating_sub(MAX_KEPT_FOLDERS);
    for (_, folder) in folders.into_iter().take(surplus) {
        let _ = fs::remove_dir_all(folder);
    }
}

/// Returns a container's message about its end: its termination message, else the last lines of its log.
pub(super) fn exit_message(layout: &NodeLayout, uid: &str, container: &str) -> String {
    let bundle = layout.bundle(uid, container);
    let message = read_tail(&bundle.join("termination-log"), 0);
    if !message.trim().is_empty() {
        return message;
    }
    let begin = fs::read_to_string(bundle.join("log-begin")).ok();
    let begin = begin.and_then(|text| text.trim().parse().ok()).unwrap_or(0);
    let Ok(log) = fs::read_link(bundle.join("log")) else { return String::new() };
    read_tail(&log, container_log::offset_of(&log, begin))
}

/// Returns the end of a file, from `begin` at the earliest.
fn read_tail(path: &Path, begin: u64) -> String {
    let read = || -> std::io::Result<String> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        // Shorter than before: another file is in its place.
        let begin = if begin > length { 0 } else { begin };
        file.seek(SeekFrom::Start(begin.max(length.saturating_sub(MAX_MESSAGE_BYTES))))?;
        let mut bytes = Vec::new();
        file.take(MAX_MESSAGE_BYTES).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    read().unwrap_or_default()
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries =
        fs::read_dir(folder).map(|entries| entries.flatten().map(|entry| entry.path()).collect());
    entries.unwrap_or_default()
}
