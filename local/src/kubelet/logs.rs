//! Shell: containers' output: bounded files, and last words.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use tracing::{info, warn};

use crate::layout::Layout;

/// A log beyond this size becomes `….log.1`, and a new one begins. The kubelet's `containerLogMaxSize`.
const MOST_BYTES: u64 = 10 << 20;
/// Folders of pods that are gone are kept for reading until there are more than this.
const MOST_PODS: usize = 100;
/// Bytes of a log or message that go into a status, as in Kubernetes.
const WORDS: u64 = 2048;

/// Turns over logs that grew too long.
///
/// The container writes to the file itself, so that its output survives this process; it appends, so cutting the file
/// is safe. Lines written between copy and cut are lost.
pub(super) fn bound(layout: &Layout) {
    for folder in entries(&layout.logs()) {
        for log in entries(&folder) {
            let long = fs::metadata(&log).is_ok_and(|meta| meta.len() > MOST_BYTES);
            if !long || log.extension().is_none_or(|extension| extension != "log") {
                continue;
            }
            match turn(&log) {
                Ok(()) => info!(log = %log.display(), "log turned over"),
                Err(error) => warn!(log = %log.display(), %error, "log not turned over"),
            }
        }
    }
}

/// Keeps the newest part of a log beside it and begins it anew.
fn turn(log: &Path) -> std::io::Result<()> {
    let mut file = OpenOptions::new().read(true).write(true).open(log)?;
    // Who writes much may have written many times the bound since the last look.
    let begin = file.metadata()?.len().saturating_sub(MOST_BYTES);
    file.seek(SeekFrom::Start(begin))?;
    let mut kept = File::create(log.with_extension("log.1"))?;
    let copied = std::io::copy(&mut Read::by_ref(&mut file).take(MOST_BYTES), &mut kept);
    // Also when there is no room for a copy: the log alone must not grow for ever.
    file.set_len(0)?;
    copied.map(drop)
}

/// Removes the oldest logs, but none in the folders of pods that are `alive`.
pub(super) fn prune(layout: &Layout, alive: &BTreeSet<PathBuf>) {
    let mut folders: Vec<(SystemTime, PathBuf)> = entries(&layout.logs())
        .into_iter()
        .filter_map(|folder| Some((fs::metadata(&folder).ok()?.modified().ok()?, folder)))
        .collect();
    folders.retain(|(_, folder)| !alive.contains(folder));
    folders.sort();
    let surplus = folders.len().saturating_sub(MOST_PODS);
    for (_, folder) in folders.into_iter().take(surplus) {
        let _ = fs::remove_dir_all(folder);
    }
}

/// What a container said at its end: its termination message, else the last lines of its log.
pub(super) fn last_words(layout: &Layout, uid: &str, container: &str) -> String {
    let bundle = layout.bundle(uid, container);
    let message = tail(&bundle.join("termination-log"), 0);
    if !message.trim().is_empty() {
        return message;
    }
    let begin = fs::read_to_string(bundle.join("log-begin")).ok();
    let begin = begin.and_then(|text| text.trim().parse().ok()).unwrap_or(0);
    fs::read_link(bundle.join("log")).map(|log| tail(&log, begin)).unwrap_or_default()
}

/// The end of a file, from `begin` at the earliest.
fn tail(path: &Path, begin: u64) -> String {
    let read = || -> std::io::Result<String> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        // Turned over since: what was written before is elsewhere.
        let begin = if begin > length { 0 } else { begin };
        file.seek(SeekFrom::Start(begin.max(length.saturating_sub(WORDS))))?;
        let mut bytes = Vec::new();
        file.take(WORDS).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    read().unwrap_or_default()
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries =
        fs::read_dir(folder).map(|entries| entries.flatten().map(|entry| entry.path()).collect());
    entries.unwrap_or_default()
}
