//! Shell: certificate files, read at the start and again after each change.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, ErrorKind, Read as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use common::{
    certificates::{self, CertificateFault, MAX_CHAIN_BYTES, MAX_KEY_BYTES, parse_pem},
    link::error_chain,
    wire::CertificateMaterial,
};
use tokio::{
    task::spawn_blocking,
    time::{MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;
use tracing::warn;

pub use super::watched_files::FileCertificate;
use super::{
    host_certificates::HostCertificates,
    watched_files::{ContentMark, FilePair, FilePlace, FileState, PairLook, WatchedFiles},
};

/// Time between two looks at the files.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// Extension of certificate files in the folder itself. The key has the same name with [`KEY_EXTENSION`].
const CERTIFICATE_EXTENSION: &str = "crt";
/// Extension of key files in the folder itself.
const KEY_EXTENSION: &str = "key";
/// File names in subfolders, the first pair goes before the second: those of Secrets in volumes, and of certbot.
const SUBFOLDER_PAIRS: [(&str, &str); 2] =
    [("tls.crt", "tls.key"), ("fullchain.pem", "privkey.pem")];

/// Error of certificate files that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CertificateFileError {
    /// A file or folder could not be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Path of the file or folder.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// Certificate and key are not usable.
    #[error("{} and {} cannot be used: {fault}", certificate.display(), key.display())]
    Unusable {
        /// File of the certificate.
        certificate: PathBuf,
        /// File of the key.
        key: PathBuf,
        /// Rule that they break.
        fault: CertificateFault,
    },
}

/// Certificate files that the settings name.
#[derive(Clone, Debug, Default)]
pub struct CertificateFiles {
    /// Files of the certificate and of its key.
    pub pair: Option<(PathBuf, PathBuf)>,
    /// Folder of such pairs: `NAME.crt` with `NAME.key`, and in each subfolder `tls.crt` with `tls.key`, else
    /// `fullchain.pem` with `privkey.pem`. Names that begin with a dot are left out.
    pub folder: Option<PathBuf>,
}

impl CertificateFiles {
    /// Returns true if the settings name no files.
    pub fn is_empty(&self) -> bool {
        self.pair.is_none() && self.folder.is_none()
    }

    /// Reads all certificates: the pair, then those of the folder by path. Fails if the pair cannot be used or the
    /// folder cannot be read. A broken pair in the folder is left out with a warning.
    pub fn read(&self) -> Result<Vec<FileCertificate>, CertificateFileError> {
        let mut all = Vec::new();
        if let Some(pair) = self.given_pair() {
            all.push(read_pair(&pair)?);
        }
        let Some(folder) = &self.folder else { return Ok(all) };
        let pairs = look_at_folder(folder)?.into_iter().map(|(_, look)| look);
        let pairs: Vec<PairLook> = pairs.filter(PairLook::is_complete).collect();
        if pairs.is_empty() {
            warn!(folder = %folder.display(), "folder has no certificates");
        }
        for PairLook { pair, .. } in pairs {
            match read_pair(&pair) {
                Ok(certificate) => all.push(certificate),
                // One broken file must not keep the certificates of other hosts from being served.
                Err(error) => warn_of_fault(&pair.certificate, &error, false),
            }
        }
        Ok(all)
    }

    /// Looks at the files every second until `stop`, and gives `certificates` what has changed.
    ///
    /// Call it after [`read`](Self::read) and [`HostCertificates::set_files`]. A change that comes with `stop` may be
    /// lost.
    pub async fn watch(self, certificates: Arc<HostCertificates>, stop: CancellationToken) {
        let mut watched = WatchedFiles::new(certificates.files());
        let files = Arc::new(self);
        let mut looks = interval(LOOK_INTERVAL);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = looks.tick() => {}
            }
            let (files, certificates) = (Arc::clone(&files), Arc::clone(&certificates));
            let look = spawn_blocking(move || {
                if let Some(changed) = files.look(&mut watched) {
                    certificates.set_files(changed);
                }
                watched
            });
            // Fails only if the runtime ends, or after a panic, which is in the log.
            let Ok(after) = look.await else { return };
            watched = after;
        }
    }

    /// Looks at all files once, and reads those that changed. Returns all certificates if any came, changed or went.
    fn look(&self, watched: &mut WatchedFiles) -> Option<Vec<FileCertificate>> {
        let given = self.given_pair().map(|pair| (FilePlace::Given, look_at_pair(pair)));
        let mut looks = Vec::from_iter(given);
        let mut folder_fault = None;
        if let Some(folder) = &self.folder {
            match look_at_folder(folder) {
                Ok(more) => looks.extend(more),
                Err(error) => folder_fault = Some((folder, error)),
            }
        }
        let to_read = watched.begin_look(looks, folder_fault.is_none());
        if let Some((folder, error)) = folder_fault.filter(|_| watched.folder_fault_counts()) {
            warn_of_fault(folder, &error, true);
        }
        for (place, pair) in to_read {
            match read_pair(&pair) {
                Ok(read) => watched.record_read(&place, read.material),
                // A fault is logged when it is first found, and not at each look.
                Err(error) if watched.record_fault(&place) => {
                    warn_of_fault(&pair.certificate, &error, watched.keeps_certificate(&place));
                }
                Err(_) => {}
            }
        }
        watched.end_look()
    }

    fn given_pair(&self) -> Option<FilePair> {
        let (certificate, key) = self.pair.clone()?;
        Some(FilePair { certificate, key })
    }
}

fn warn_of_fault(path: &Path, error: &CertificateFileError, kept: bool) {
    let (certificate, fault) = (path.display(), error_chain(error));
    warn!(%certificate, %fault, kept, "certificate cannot be used");
}

/// Reads and checks a certificate and its key.
fn read_pair(pair: &FilePair) -> Result<FileCertificate, CertificateFileError> {
    let chain = read_file(&pair.certificate, MAX_CHAIN_BYTES)?;
    let key = read_file(&pair.key, MAX_KEY_BYTES)?;
    let material = check_pair(&chain, &key).map_err(|fault| CertificateFileError::Unusable {
        certificate: pair.certificate.clone(),
        key: pair.key.clone(),
        fault,
    })?;
    Ok(FileCertificate { path: pair.certificate.clone(), material })
}

fn check_pair(chain: &[u8], key: &[u8]) -> Result<CertificateMaterial, CertificateFault> {
    let material = parse_pem(chain, key)?;
    certificates::load(&material)?;
    Ok(material)
}

/// Reads a file, but at most one byte more than it may have, which is then a fault of its content.
fn read_file(path: &Path, max_bytes: usize) -> Result<Vec<u8>, CertificateFileError> {
    let failed = |source| CertificateFileError::Read { path: path.to_owned(), source };
    if !fs::metadata(path).map_err(failed)?.is_file() {
        // A read of a pipe could wait without end.
        return Err(failed(io::Error::new(ErrorKind::InvalidInput, "it is not a regular file")));
    }
    let mut content = Vec::new();
    let file = File::open(path).map_err(failed)?;
    file.take(max_bytes as u64 + 1).read_to_end(&mut content).map_err(failed)?;
    Ok(content)
}

/// Finds the pairs of a folder, sorted by path. Pairs of which one file is missing are among them.
fn look_at_folder(folder: &Path) -> Result<Vec<(FilePlace, PairLook)>, CertificateFileError> {
    let failed = |source| CertificateFileError::Read { path: folder.to_owned(), source };
    let mut looks = BTreeMap::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        // A volume with a Secret has hidden folders with the files of its versions.
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let path = entry.path();
        if path.is_dir() {
            looks.extend(look_at_subfolder(&path).map(|look| (path, look)));
        } else if path
            .extension()
            .is_some_and(|it| it == CERTIFICATE_EXTENSION || it == KEY_EXTENSION)
        {
            let certificate = path.with_extension(CERTIFICATE_EXTENSION);
            let key = path.with_extension(KEY_EXTENSION);
            looks.insert(certificate.clone(), look_at_pair(FilePair { certificate, key }));
        }
    }
    Ok(looks.into_iter().map(|(place, look)| (FilePlace::InFolder(place), look)).collect())
}

/// Finds the pair of a subfolder: the first complete one, else one of which a file is missing.
fn look_at_subfolder(folder: &Path) -> Option<PairLook> {
    let looks = SUBFOLDER_PAIRS.map(|(certificate, key)| {
        look_at_pair(FilePair { certificate: folder.join(certificate), key: folder.join(key) })
    });
    let complete = looks.iter().find(|it| it.is_complete());
    complete.or_else(|| looks.iter().find(|it| !it.is_absent())).cloned()
}

fn look_at_pair(pair: FilePair) -> PairLook {
    let (certificate, key) = (file_state(&pair.certificate), file_state(&pair.key));
    PairLook { pair, certificate, key }
}

fn file_state(path: &Path) -> FileState {
    match fs::metadata(path) {
        Ok(it) => FileState::Present(ContentMark {
            inode: (it.dev(), it.ino()),
            size: it.size(),
            modified: (it.mtime(), it.mtime_nsec()),
            changed: (it.ctime(), it.ctime_nsec()),
        }),
        Err(error) => match error.kind() {
            ErrorKind::NotFound | ErrorKind::NotADirectory => FileState::Missing,
            _ => FileState::Unknown,
        },
    }
}

#[cfg(test)]
mod tests;
