//! Pure: certificate files as the last looks have found them, and the certificates that stay in force.
//!
//! Two files are never replaced at once, so a look may find a certificate beside a foreign key, or no file at all.
//! Therefore a fault and a missing pair count only if the next look finds them too. Whatever is at fault, the
//! certificate that was read before stays.

use std::{
    collections::BTreeMap,
    mem,
    path::{Path, PathBuf},
};

use common::wire::CertificateMaterial;

/// Number of looks in a row that must miss a pair, or the folder, until that counts.
const LOOKS_UNTIL_COUNTED: u32 = 2;

/// Certificate and key from files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileCertificate {
    /// File of the certificate.
    pub path: PathBuf,
    /// Certificate chain and key, checked.
    pub material: CertificateMaterial,
}

/// Two files that belong together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilePair {
    /// File of the certificate chain.
    pub certificate: PathBuf,
    /// File of the private key.
    pub key: PathBuf,
}

/// Place of one pair. The order is that of the choice between certificates.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FilePlace {
    /// The pair that the settings name.
    Given,
    /// Certificate file or subfolder within the folder.
    InFolder(PathBuf),
}

/// Mark of a file's content, which is another one after each change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContentMark {
    /// Device and inode, links followed.
    pub inode: (u64, u64),
    /// Length in bytes.
    pub size: u64,
    /// Time of the last write, in seconds and nanoseconds.
    pub modified: (i64, i64),
    /// Time of the last change of content, owner or mode, in seconds and nanoseconds.
    pub changed: (i64, i64),
}

/// State of one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileState {
    /// There is no such file.
    Missing,
    /// A file may exist, but its state cannot be read.
    Unknown,
    /// The file exists.
    Present(ContentMark),
}

/// Pair of files as one look has found it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PairLook {
    /// Paths of the files.
    pub pair: FilePair,
    /// State of the certificate file.
    pub certificate: FileState,
    /// State of the key file.
    pub key: FileState,
}

impl PairLook {
    /// Returns true if neither file is missing.
    pub fn is_complete(&self) -> bool {
        self.certificate != FileState::Missing && self.key != FileState::Missing
    }

    /// Returns true if both files are missing.
    pub fn is_absent(&self) -> bool {
        self.certificate == FileState::Missing && self.key == FileState::Missing
    }
}

/// Pairs of files that are watched, and their certificates.
///
/// Each look is one [`begin_look`](Self::begin_look), one [`record_read`](Self::record_read) or
/// [`record_fault`](Self::record_fault) for each pair that this returns, and one [`end_look`](Self::end_look).
#[derive(Debug)]
pub struct WatchedFiles {
    pairs: BTreeMap<FilePlace, WatchedPair>,
    /// Certificates in force at the start, by file. They stand in for pairs that the first looks cannot read.
    held_at_start: BTreeMap<PathBuf, CertificateMaterial>,
    /// True until a look has found the whole folder.
    is_new: bool,
    /// Number of looks that did not find all pairs of the certificates in force at the start.
    looks_without_start_pair: u32,
    /// Number of looks in a row that did not find the folder.
    looks_without_folder: u32,
    /// True if certificates have changed since the last [`end_look`](Self::end_look) that returned them.
    is_changed: bool,
}

#[derive(Debug)]
struct WatchedPair {
    /// Last look; `None` before the first.
    look: Option<PairLook>,
    fault: PairFault,
    /// Certificate that was read last without a fault.
    material: Option<CertificateMaterial>,
    /// Number of looks in a row that did not find the pair.
    looks_without: u32,
}

/// Fault of a pair at its last read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PairFault {
    /// The pair could be read.
    Absent,
    /// The last look was the first to find the fault.
    FoundOnce,
    /// The fault has counted.
    Counted,
}

impl WatchedFiles {
    /// Begins to watch, while these certificates are in force.
    pub fn new(held: Vec<FileCertificate>) -> Self {
        Self {
            pairs: BTreeMap::new(),
            held_at_start: held.into_iter().map(|it| (it.path, it.material)).collect(),
            is_new: true,
            looks_without_start_pair: 0,
            looks_without_folder: 0,
            is_changed: true,
        }
    }

    /// Takes all pairs that a look has found, and returns those to read. A pair is read again after each change, and
    /// for as long as it has a fault.
    ///
    /// `is_whole`: the look includes the folder. Otherwise pairs that it lacks are not missed. A folder's pair of which
    /// one file is missing counts as a pair only where a whole one was before: `ca.crt` often has no key.
    pub fn begin_look(
        &mut self,
        looks: Vec<(FilePlace, PairLook)>,
        is_whole: bool,
    ) -> Vec<(FilePlace, FilePair)> {
        // Counted for all first; each pair that the look has found sets its count back to 0.
        if is_whole {
            (self.is_new, self.looks_without_folder) = (false, 0);
            self.pairs.values_mut().for_each(|it| it.looks_without += 1);
        } else {
            self.looks_without_folder = self.looks_without_folder.saturating_add(1);
        }
        let mut to_read = Vec::new();
        for (place, look) in looks {
            // While a pair is replaced, one of its files may be missing for a moment. A held pair survives that.
            let is_pair = place == FilePlace::Given || look.is_complete();
            if !is_pair && !self.is_held(&place, &look.pair.certificate) {
                continue;
            }
            // The certificate in force at the start stands in until the pair was read without a fault.
            let held = self.held_at_start.get(&look.pair.certificate);
            let watched =
                self.pairs.entry(place.clone()).or_insert_with(|| WatchedPair::new(held.cloned()));
            if watched.take_look(&look) {
                to_read.push((place, look.pair));
            }
        }
        to_read
    }

    /// Stores a certificate that was read without a fault.
    pub fn record_read(&mut self, place: &FilePlace, material: CertificateMaterial) {
        let Some(watched) = self.pairs.get_mut(place) else { return };
        watched.fault = PairFault::Absent;
        if watched.material.as_ref() != Some(&material) {
            watched.material = Some(material);
            self.is_changed = true;
        }
    }

    /// Stores a fault of a read. Returns true if the fault counts now, and should be reported.
    pub fn record_fault(&mut self, place: &FilePlace) -> bool {
        let Some(watched) = self.pairs.get_mut(place) else { return false };
        let counts = watched.fault == PairFault::FoundOnce;
        watched.fault = match watched.fault {
            PairFault::Absent => PairFault::FoundOnce,
            PairFault::FoundOnce | PairFault::Counted => PairFault::Counted,
        };
        counts
    }

    /// Returns true if the folder is missing for the second look in a row, so that this should be reported.
    pub fn folder_fault_counts(&self) -> bool {
        self.looks_without_folder == LOOKS_UNTIL_COUNTED
    }

    /// Ends a look. Returns all certificates in the order of their choice if any has come, changed or gone.
    pub fn end_look(&mut self) -> Option<Vec<FileCertificate>> {
        if self.is_new {
            // The folder was not found yet, and its certificates of the start must stay.
            return None;
        }
        if self.lacks_start_pair() {
            // Its files may be just about to be replaced.
            self.looks_without_start_pair += 1;
            if self.looks_without_start_pair < LOOKS_UNTIL_COUNTED {
                return None;
            }
        }
        self.held_at_start.clear();
        let before = self.pairs.len();
        self.pairs.retain(|_, it| it.looks_without < LOOKS_UNTIL_COUNTED);
        self.is_changed |= self.pairs.len() < before;
        mem::take(&mut self.is_changed)
            .then(|| self.pairs.values().filter_map(WatchedPair::certificate).collect())
    }

    /// Returns true if a certificate of this place stays in force whatever its files are.
    pub fn keeps_certificate(&self, place: &FilePlace) -> bool {
        self.pairs.get(place).is_some_and(|it| it.material.is_some())
    }

    /// Returns true if no look has found the pair of a certificate in force at the start.
    fn lacks_start_pair(&self) -> bool {
        let looks = || self.pairs.values().filter_map(|it| it.look.as_ref());
        let is_found = |path: &PathBuf| looks().any(|it| it.pair.certificate == *path);
        !self.held_at_start.keys().all(is_found)
    }

    /// Returns true if the place has a pair already, or its certificate was in force at the start.
    fn is_held(&self, place: &FilePlace, certificate: &Path) -> bool {
        self.pairs.contains_key(place) || self.held_at_start.contains_key(certificate)
    }
}

impl WatchedPair {
    fn new(material: Option<CertificateMaterial>) -> Self {
        Self { look: None, fault: PairFault::Absent, material, looks_without: 0 }
    }

    /// Stores a look. Returns true if the pair has to be read.
    fn take_look(&mut self, look: &PairLook) -> bool {
        self.looks_without = 0;
        if self.look.as_ref() == Some(look) {
            return self.fault != PairFault::Absent;
        }
        // A fault of other content counts for itself, but not earlier than by two looks.
        if self.fault == PairFault::Counted {
            self.fault = PairFault::Absent;
        }
        self.look = Some(look.clone());
        true
    }

    fn certificate(&self) -> Option<FileCertificate> {
        let (look, material) = (self.look.as_ref()?, self.material.as_ref()?);
        Some(FileCertificate { path: look.pair.certificate.clone(), material: material.clone() })
    }
}

#[cfg(test)]
mod tests {
    use common::wire::PrivateKeyBytes;

    use super::*;

    fn material(number: u8) -> CertificateMaterial {
        CertificateMaterial { chain: vec![vec![number]], key: PrivateKeyBytes::new(vec![number]) }
    }

    /// State of a file whose content was written at `modified_s`.
    fn written_at(modified_s: i64) -> FileState {
        let time = (modified_s, 0);
        FileState::Present(ContentMark { inode: (1, 1), size: 1, modified: time, changed: time })
    }

    fn place() -> FilePlace {
        FilePlace::InFolder(PathBuf::from("/a.crt"))
    }

    /// Looks at one pair; returns true if it has to be read.
    fn look(watched: &mut WatchedFiles, certificate: FileState, key: FileState) -> bool {
        let pair = FilePair { certificate: PathBuf::from("/a.crt"), key: PathBuf::from("/a.key") };
        let looks = vec![(place(), PairLook { pair: pair.clone(), certificate, key })];
        let to_read = watched.begin_look(looks, true);
        assert!(to_read.is_empty() || to_read == [(place(), pair)]);
        !to_read.is_empty()
    }

    #[test]
    fn a_fault_counts_once_and_again_after_a_change() {
        let mut watched = WatchedFiles::new(Vec::new());
        for modified_s in [1, 2] {
            let counted = [(); 4].map(|()| {
                assert!(look(&mut watched, written_at(modified_s), written_at(1)), "at fault");
                let counts = watched.record_fault(&place());
                watched.end_look();
                counts
            });
            assert_eq!(counted, [false, true, false, false]);
        }
        assert!(look(&mut watched, written_at(2), written_at(1)));
        watched.record_read(&place(), material(1));
        assert_eq!(watched.end_look().map(|it| it.len()), Some(1));
        assert!(!look(&mut watched, written_at(2), written_at(1)), "nothing has changed");
        assert_eq!(watched.end_look(), None);
    }

    #[test]
    fn content_that_is_written_again_without_a_change_is_no_news() {
        let mut watched = WatchedFiles::new(Vec::new());
        for (modified_s, is_news) in [(1, true), (2, false)] {
            assert!(look(&mut watched, written_at(modified_s), written_at(1)));
            watched.record_read(&place(), material(1));
            assert_eq!(watched.end_look().is_some(), is_news);
        }
    }

    #[test]
    fn a_pair_of_the_start_that_one_look_misses_stays() {
        let held = FileCertificate { path: PathBuf::from("/a.crt"), material: material(1) };
        let mut watched = WatchedFiles::new(vec![held.clone()]);
        assert!(watched.begin_look(Vec::new(), true).is_empty());
        assert_eq!(watched.end_look(), None);
        assert!(look(&mut watched, written_at(1), written_at(1)));
        watched.record_read(&place(), material(1));
        assert_eq!(watched.end_look(), Some(vec![held.clone()]));
        let mut watched = WatchedFiles::new(vec![held]);
        let gone = [(); 2].map(|()| {
            watched.begin_look(Vec::new(), true);
            watched.end_look()
        });
        assert_eq!(gone, [None, Some(Vec::new())]);
    }

    #[test]
    fn half_a_pair_counts_only_where_a_whole_one_was() {
        let mut watched = WatchedFiles::new(Vec::new());
        assert!(!look(&mut watched, written_at(1), FileState::Missing));
        watched.end_look();
        assert!(look(&mut watched, written_at(1), FileState::Unknown), "a key may exist");
        watched.record_read(&place(), material(1));
        watched.end_look();
        assert!(look(&mut watched, written_at(1), FileState::Missing));
        assert!(!watched.record_fault(&place()));
        assert_eq!(watched.end_look(), None);
        assert!(watched.keeps_certificate(&place()));
    }
}
