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
/// Bytes of a termination message that go into a status (kubernetes `pkg/kubelet/container/runtime.go`,
/// `MaxContainerTerminationMessageLength`).
const MAX_MESSAGE_BYTES: u64 = 4096;
/// Bytes of a log that go into a status in place of a message (`MaxContainerTerminationMessageLogLength` there).
const MAX_LOG_TAIL_BYTES: u64 = 2048;

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

/// Returns the message about the end of a bundle's container: its termination message, else the last lines of its log.
pub(super) fn exit_message(bundle: &Path) -> String {
    let message = read_tail(&bundle.join("termination-log"), 0, MAX_MESSAGE_BYTES);
    if !message.trim().is_empty() {
        return message;
    }
    let begin = fs::read_to_string(bundle.join("log-begin")).ok();
    let begin = begin.and_then(|text| text.trim().parse().ok()).unwrap_or(0);
    let Ok(log) = fs::read_link(bundle.join("log")) else { return String::new() };
    read_tail(&log, container_log::offset_of(&log, begin), MAX_LOG_TAIL_BYTES)
}

/// Returns the last `max_bytes` of a file, from `begin` at the earliest.
fn read_tail(path: &Path, begin: u64, max_bytes: u64) -> String {
    let read = || -> std::io::Result<String> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        // Shorter than before: another file is in its place.
        let begin = if begin > length { 0 } else { begin };
        file.seek(SeekFrom::Start(begin.max(length.saturating_sub(max_bytes))))?;
        let mut bytes = Vec::new();
        file.take(max_bytes).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    read().unwrap_or_default()
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries =
        fs::read_dir(folder).map(|entries| entries.flatten().map(|entry| entry.path()).collect());
    entries.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_and_the_end_of_a_log_have_the_lengths_of_kubernetes() {
        let bundle = std::env::temp_dir().join(format!("rouse-message-{}", std::process::id()));
        fs::create_dir_all(&bundle).unwrap();
        let log = bundle.join("web.log");
        fs::write(&log, "l".repeat(5_000)).unwrap();
        std::os::unix::fs::symlink(&log, bundle.join("log")).unwrap();
        fs::write(bundle.join("termination-log"), "m".repeat(5_000)).unwrap();
        assert_eq!(exit_message(&bundle), "m".repeat(4_096));
        fs::write(bundle.join("termination-log"), "").unwrap();
        assert_eq!(exit_message(&bundle), "l".repeat(2_048));
        fs::write(bundle.join("log-begin"), "4990").unwrap();
        assert_eq!(exit_message(&bundle), "l".repeat(10), "only of this run");
        fs::remove_dir_all(&bundle).unwrap();
    }
}
