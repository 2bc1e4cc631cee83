//! Shell: index of the manifest files that were read, with their state then and the services they name.
//!
//! Ten thousand services have ten thousand files. `rouse apply` names a file after its service, so for those the path
//! is enough; only files that users wrote in another way cost more memory.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use common::wire::NamespacedName;

/// Time after a write within which a file may change again and keep its time stamp.
pub(super) const RACY_WINDOW: Duration = Duration::from_millis(20);

/// Hash of a file's inode, length and time of the last change, which differs from one state to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileStamp(u64);

impl FileStamp {
    /// Stamp of a state that a later one could share.
    pub(super) const RACY: Self = Self(0);
    /// Stamp of some state that no later one shares.
    #[cfg(test)]
    pub(super) const SETTLED: Self = Self(1);

    /// Stamp of the file's present state; `None`: there is no file.
    pub(super) fn of_file(path: &Path) -> Option<Self> {
        let meta = fs::metadata(path).ok()?;
        let (seconds, nanos) = (meta.ctime().cast_unsigned(), meta.ctime_nsec().cast_unsigned());
        let changed = Duration::from_secs(seconds) + Duration::from_nanos(nanos);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        if !is_settled(changed, now) {
            return Some(Self::RACY);
        }
        let parts = [meta.ino(), meta.size(), seconds, nanos];
        let mixed = parts.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, part| {
            (hash ^ part).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
        });
        Some(Self(mixed.max(1)))
    }
}

/// Returns true if a change from now on gets a new time stamp. It is also true for a time in the future, left by a
/// clock that was set back: otherwise every check would read the file until the clock gets there.
fn is_settled(changed: Duration, now: Duration) -> bool {
    now.abs_diff(changed) > RACY_WINDOW
}

/// Stamp of a file as it was read, and the names in it; none where its path implies them.
type IndexedFile = (FileStamp, Option<Box<[NamespacedName]>>);

/// The manifest files below a folder that were read.
#[derive(Debug)]
pub(super) struct ManifestIndex {
    folder: PathBuf,
    /// Files by path below the folder.
    files: BTreeMap<Box<Path>, IndexedFile>,
    /// Number of files that name a service, for names that a path does not imply.
    extra_names: BTreeMap<NamespacedName, u32>,
}

impl ManifestIndex {
    /// Creates an index of `folder`, with no file read.
    pub(super) fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), files: BTreeMap::new(), extra_names: BTreeMap::new() }
    }

    /// Returns true if the file has not changed since it was read.
    pub(super) fn is_up_to_date(&self, path: &Path) -> bool {
        let known_stamp = self.files.get(self.relative_path(path)).map(|(stamp, _)| *stamp);
        known_stamp.is_some_and(|stamp| {
            stamp != FileStamp::RACY && FileStamp::of_file(path) == Some(stamp)
        })
    }

    /// Paths of all files that were read.
    pub(super) fn paths(&self) -> impl Iterator<Item = PathBuf> {
        self.files.keys().map(|path| self.folder.join(path))
    }

    /// Returns true if any file names the service.
    pub(super) fn names_service(&self, name: &NamespacedName) -> bool {
        let default_file = self.files.get(Path::new(&default_file_name(name)));
        default_file.is_some_and(|(_, others)| others.is_none())
            || self.extra_names.contains_key(name)
    }

    /// Records the names in a file that was read.
    pub(super) fn insert(&mut self, path: &Path, stamp: FileStamp, names: Vec<NamespacedName>) {
        let below: Box<Path> = self.relative_path(path).into();
        let is_implied =
            matches!(names.as_slice(), [name] if Path::new(&default_file_name(name)) == &*below);
        // Most paths imply the one name in their file, which is then stored nowhere.
        if !is_implied {
            for name in &names {
                *self.extra_names.entry(name.clone()).or_default() += 1;
            }
        }
        self.files.insert(below, (stamp, (!is_implied).then(|| names.into())));
    }

    /// Removes a file, and returns the names it had.
    pub(super) fn remove(&mut self, path: &Path) -> Vec<NamespacedName> {
        let Some((below, (_, names))) = self.files.remove_entry(self.relative_path(path)) else {
            return Vec::new();
        };
        // The path implied the one name, so none was stored or counted.
        let Some(names) = names else { return name_from_path(&below).into_iter().collect() };
        for name in &names {
            if let Some(count) = self.extra_names.get_mut(name) {
                *count -= 1;
                if *count == 0 {
                    self.extra_names.remove(name);
                }
            }
        }
        names.into_vec()
    }

    fn relative_path<'a>(&self, path: &'a Path) -> &'a Path {
        path.strip_prefix(&self.folder).unwrap_or(path)
    }
}

/// File name that `rouse apply` gives a service. No name contains an underscore.
fn default_file_name(name: &NamespacedName) -> String {
    format!("{}_{}.yaml", name.namespace, name.name)
}

/// Name that a path implies: the reverse of [`default_file_name`].
fn name_from_path(below: &Path) -> Option<NamespacedName> {
    let (namespace, name) = below.to_str()?.strip_suffix(".yaml")?.split_once('_')?;
    Some(NamespacedName::new(namespace, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_names_the_service_of_its_path_or_the_recorded_ones() {
        let mut index = ManifestIndex::new(Path::new("/m"));
        let (a, b) = (NamespacedName::new("default", "a"), NamespacedName::new("team", "b"));
        let (default_file, other) = (Path::new("/m/default_a.yaml"), Path::new("/m/x/y.yaml"));
        index.insert(default_file, FileStamp(1), vec![a.clone()]);
        index.insert(other, FileStamp(1), vec![a.clone(), b.clone()]);
        assert_eq!(index.extra_names.len(), 2, "the path of the first says it");
        assert_eq!(index.paths().collect::<Vec<_>>(), [default_file, other]);
        assert_eq!(index.remove(default_file), std::slice::from_ref(&a));
        assert!(index.names_service(&a) && index.names_service(&b));
        assert_eq!(index.remove(other), [a.clone(), b.clone()]);
        assert!(
            !index.names_service(&a) && !index.names_service(&b) && index.extra_names.is_empty()
        );
    }

    #[test]
    fn a_file_is_settled_once_the_clock_is_somewhere_else() {
        let at = Duration::from_secs;
        assert!(!is_settled(at(90_000), at(90_000) + RACY_WINDOW));
        assert!(is_settled(at(90_000), at(90_001)));
        assert!(is_settled(at(90_000), at(3_600)), "set back by a day");
    }

    #[test]
    fn a_file_of_a_service_that_names_another_is_no_file_of_its_own() {
        let mut index = ManifestIndex::new(Path::new("/m"));
        let (a, b) = (NamespacedName::new("default", "a"), NamespacedName::new("default", "b"));
        index.insert(Path::new("/m/default_a.yaml"), FileStamp(1), vec![b.clone()]);
        assert!(index.names_service(&b) && !index.names_service(&a));
    }
}
