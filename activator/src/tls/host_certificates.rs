//! Shell: certificates in force, as handshakes look them up.

use std::{
    collections::BTreeMap,
    fmt, mem,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
    time::{SystemTime, UNIX_EPOCH},
};

use common::{
    certificates::{CertificateFault, LoadedCertificate, load},
    link::RouteBatch,
    wire::{
        CertificateMaterial, EdgeSettings, LOCAL_TLS_PORT, NamespacedName, RouteChange, RouteKey,
        TlsSettings,
    },
};
use k8s_openapi::jiff::Timestamp;
use rustls::server::ClientHello;
use tracing::{Level, debug, info, warn};

use super::{
    certificate_choice::CertificateCandidates,
    certificate_snapshot::{CertificateSnapshot, PresentedCertificate},
    held_certificate::{HeldCertificate, UsableCertificate},
    server_config::{HandshakeProtocols, server_config},
    watched_files::FileCertificate,
};
use crate::metrics::TlsMetrics;

/// Certificates of hosts in force: those of the RouteTable, by the name of their Secret, and those of files.
///
/// Handshakes look certificates up; the stream of routes and the watch of files change them. A change loads keys before
/// it takes the lock that handshakes take. Open connections keep the certificate of their handshake.
pub struct HostCertificates {
    held: RwLock<HeldCertificates>,
    metrics: TlsMetrics,
}

#[derive(Default)]
struct HeldCertificates {
    by_secret: BTreeMap<NamespacedName, HeldCertificate>,
    /// Certificates of files, in the order of their choice.
    files: Vec<(PathBuf, HeldCertificate)>,
    /// Secrets of the installation, which serve all hosts. They may be without a certificate.
    shared_secrets: Vec<NamespacedName>,
    /// Certificates in force that serve all hosts: of these Secrets, then of the files.
    shared: Vec<Arc<UsableCertificate>>,
    /// Settings of operators for versions and ciphers, and what follows from them.
    tls: TlsSettings,
    protocols: HandshakeProtocols,
    /// True if no client gets the default certificate.
    is_sni_strict: bool,
    /// Next time, in seconds since 1970, at which a certificate that waits may come in force.
    next_promotion_s: Option<i64>,
}

/// Error of a certificate that handshakes cannot present.
#[derive(Debug, thiserror::Error)]
enum UnusableCertificateError {
    #[error(transparent)]
    Fault(#[from] CertificateFault),
    #[error("TLS cannot be set up with it: {0}")]
    Settings(#[from] rustls::Error),
}

/// Certificate that was received and loaded, or its fault.
type LoadResult = Result<Arc<UsableCertificate>, UnusableCertificateError>;

impl HostCertificates {
    /// Begins without a certificate.
    pub fn new(metrics: TlsMetrics) -> Self {
        Self { held: RwLock::default(), metrics }
    }

    /// Chooses the certificate of a handshake, as [`CertificateCandidates::choose`] does. `None`: no certificate is for
    /// the client, which gets the alert `unrecognized_name` (112).
    ///
    /// `own` are the Secrets that the rules of `host` name. `host` is what the client asks for, in lower case and
    /// without final dot. `is_usable` returns true for certificates whose keys the client accepts.
    pub fn choose_certificate(
        &self,
        own: &[NamespacedName],
        host: Option<&str>,
        is_usable: impl Fn(&UsableCertificate) -> bool,
    ) -> Option<Arc<UsableCertificate>> {
        self.choose_at(own, host, is_usable, unix_seconds())
    }

    /// Returns the certificate in force under a name. `None`: there is none, and no other one takes its place.
    pub fn find(&self, name: &NamespacedName) -> Option<Arc<UsableCertificate>> {
        self.promote_due(unix_seconds());
        self.read().by_secret.get(name).map(|it| Arc::clone(it.in_force()))
    }

    /// Sets the versions and ciphers of handshakes that begin from now on, and if clients may get the default
    /// certificate. Equal settings change nothing.
    pub fn set_tls(&self, EdgeSettings { tls, is_sni_strict, .. }: &EdgeSettings) {
        // Compared under the lock for reading, because each batch of the RouteTable comes here and few change anything.
        let (is_changed, has_other_protocols) = {
            let held = self.read();
            (held.is_sni_strict != *is_sni_strict, held.tls != *tls)
        };
        if !is_changed && !has_other_protocols {
            return;
        }
        let mut held = self.write();
        held.is_sni_strict = *is_sni_strict;
        if has_other_protocols {
            held.tls.clone_from(tls);
            held.protocols = HandshakeProtocols::new(tls);
            held.refresh(unix_seconds(), &self.metrics);
        }
    }

    /// Applies the certificates and settings of a batch of the RouteTable, except removals. Returns the names to
    /// [`remove`](Self::remove) once no host of the table needs them. A batch without either costs next to nothing.
    ///
    /// A certificate that cannot be used, or an entry without one, leaves the one before in force. So does a
    /// certificate that is not valid now, while the one before is. Only a removal, or a snapshot without the entry,
    /// ends it.
    pub fn apply_batch(&self, batch: &RouteBatch) -> Vec<NamespacedName> {
        self.apply_batch_at(batch, unix_seconds())
    }

    /// Removes certificates. Hosts that still name them are served like those that name none.
    pub fn remove(&self, names: &[NamespacedName]) {
        if names.is_empty() {
            return;
        }
        let mut held = self.write();
        names.iter().for_each(|name| held.remove_secret(name));
        held.refresh(unix_seconds(), &self.metrics);
    }

    /// Replaces the certificates of files, which are in the order of their choice. One that cannot be used leaves the
    /// one before of its file in force.
    pub fn set_files(&self, files: Vec<FileCertificate>) {
        self.set_files_at(files, unix_seconds());
    }

    /// Returns the newest certificates of files, in the order of their choice.
    pub fn files(&self) -> Vec<FileCertificate> {
        let held = self.read();
        let newest = |(path, it): &(PathBuf, HeldCertificate)| FileCertificate {
            path: path.clone(),
            material: (*it.newest().material).clone(),
        };
        held.files.iter().map(newest).collect()
    }

    /// Returns the certificates in force without their keys, for pages. One that may come in force now is left out until
    /// a handshake puts it in force.
    pub fn snapshot(&self) -> CertificateSnapshot {
        let held = self.read();
        let secrets = held.by_secret.iter();
        let secrets: Vec<(NamespacedName, Arc<UsableCertificate>)> =
            secrets.map(|(name, it)| (name.clone(), Arc::clone(it.in_force()))).collect();
        let shared: Vec<(String, Arc<UsableCertificate>)> =
            held.shared_sources().map(|(name, it)| (name, Arc::clone(it.in_force()))).collect();
        let is_sni_strict = held.is_sni_strict;
        // Names are copied without the lock, which handshakes take.
        drop(held);
        let secrets = secrets.into_iter().map(|(name, it)| {
            let certificate = without_key(name.to_string(), &it);
            (name, certificate)
        });
        let shared = shared.into_iter().map(|(name, it)| without_key(name, &it));
        CertificateSnapshot::new(secrets, shared, is_sni_strict)
    }

    fn choose_at(
        &self,
        own: &[NamespacedName],
        host: Option<&str>,
        is_usable: impl Fn(&UsableCertificate) -> bool,
        now_s: i64,
    ) -> Option<Arc<UsableCertificate>> {
        self.promote_due(now_s);
        let held = self.read();
        let own = own.iter().filter_map(|name| held.by_secret.get(name));
        let own = own.map(HeldCertificate::in_force).collect();
        let is_sni_strict = held.is_sni_strict;
        let candidates = CertificateCandidates { own, shared: &held.shared, is_sni_strict };
        candidates.choose(host, |it| is_usable(it)).cloned()
    }

    /// Applies the certificates and settings of a batch, and returns the names to remove. Other batches end at once,
    /// without the lock.
    fn apply_batch_at(&self, batch: &RouteBatch, now_s: i64) -> Vec<NamespacedName> {
        let settings = batch.changes.get(&RouteKey::Settings);
        let certificates = certificate_changes(batch);
        if certificates.is_empty() && settings.is_none() && !batch.is_snapshot {
            return Vec::new();
        }
        // Keys are parsed without the lock, which every handshake takes.
        let loaded = self.load_entries(&certificates);
        let mut held = self.write();
        for (name, loaded) in loaded {
            held.offer_to_secret(name, loaded, now_s);
        }
        // Among changes only a removal ends a certificate. An entry without material means: not known yet.
        let is_removed = |change: &RouteChange| matches!(change, RouteChange::Removed(_));
        let removed = certificates.into_iter().filter(|(_, change)| is_removed(change));
        let mut removed: Vec<NamespacedName> = removed.map(|(name, _)| name.clone()).collect();
        // A snapshot replaces the whole table, so that what it does not name was removed while no stream was open.
        if batch.is_snapshot {
            removed.extend(held.unnamed_secrets(batch));
        }
        match settings {
            Some(RouteChange::Settings(it)) => {
                held.shared_secrets.clone_from(&it.edge.certificates);
            }
            None if !batch.is_snapshot => {}
            // A snapshot without settings, or their removal, resets them, as in the edge policy.
            Some(_) | None => held.shared_secrets.clear(),
        }
        held.refresh(now_s, &self.metrics);
        removed
    }

    fn set_files_at(&self, files: Vec<FileCertificate>, now_s: i64) {
        let load = |FileCertificate { path, material }| {
            let (held, protocols) = {
                let held = self.read();
                (held.file(&path).cloned(), held.protocols.clone())
            };
            let loaded = load_if_new(held.as_ref(), Arc::new(material), protocols);
            (path, loaded)
        };
        let files = files.into_iter().map(load).collect();
        let mut held = self.write();
        held.replace_files(files, now_s);
        held.refresh(now_s, &self.metrics);
    }

    /// Loads the keys of entries whose certificate differs from the newest one.
    fn load_entries(
        &self,
        changes: &[(&NamespacedName, &RouteChange)],
    ) -> Vec<(NamespacedName, LoadResult)> {
        let load_entry = |&(name, change): &(&NamespacedName, &RouteChange)| {
            let RouteChange::Certificate(entry) = change else { return None };
            // Without material, the controller does not know the certificate yet, and the one before stays.
            let material = Arc::clone(entry.material.as_ref()?);
            let (held, protocols) = {
                let held = self.read();
                (held.by_secret.get(name).cloned(), held.protocols.clone())
            };
            let loaded = load_if_new(held.as_ref(), material, protocols)?;
            Some((name.clone(), loaded))
        };
        changes.iter().filter_map(load_entry).collect()
    }

    /// Puts certificates in force that wait, and whose time has come.
    fn promote_due(&self, now_s: i64) {
        // A statement of its own: the lock for reading must be free before the one for writing is taken.
        let is_due = self.read().is_promotion_due(now_s);
        if !is_due {
            return;
        }
        let mut held = self.write();
        if !held.is_promotion_due(now_s) {
            // Another handshake has done so meanwhile.
            return;
        }
        for (name, it) in &mut held.by_secret {
            if it.promote(now_s) {
                log_in_force(CertificateSource::Secret(name), it);
            }
        }
        for (path, it) in &mut held.files {
            if it.promote(now_s) {
                log_in_force(CertificateSource::File(path), it);
            }
        }
        held.refresh(now_s, &self.metrics);
    }

    fn read(&self) -> RwLockReadGuard<'_, HeldCertificates> {
        self.held.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, HeldCertificates> {
        self.held.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl UsableCertificate {
    /// Makes the settings of handshakes for a certificate that was loaded. Errors: as for [`server_config`].
    pub fn new(
        material: Arc<CertificateMaterial>,
        LoadedCertificate { key, facts }: LoadedCertificate,
        protocols: HandshakeProtocols,
    ) -> Result<Self, rustls::Error> {
        let config = server_config(Arc::clone(&key), &protocols)?;
        Ok(Self { material, facts, key, protocols, config })
    }

    /// Returns true if the client accepts signatures of the key, with the versions and ciphers of the settings.
    pub fn is_usable_for(&self, client: &ClientHello<'_>) -> bool {
        self.protocols.accept_key(&*self.key.key, client)
    }

    /// Makes new settings of handshakes, with other versions and ciphers. Errors: as for [`server_config`].
    pub fn with_protocols(&self, protocols: HandshakeProtocols) -> Result<Self, rustls::Error> {
        let loaded = LoadedCertificate { key: Arc::clone(&self.key), facts: self.facts.clone() };
        Self::new(Arc::clone(&self.material), loaded, protocols)
    }
}

impl fmt::Debug for HostCertificates {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let held = self.read();
        let files: Vec<&Path> = held.files.iter().map(|(path, _)| path.as_path()).collect();
        out.debug_struct("HostCertificates")
            .field("secrets", &held.by_secret.keys().collect::<Vec<_>>())
            .field("files", &files)
            .finish_non_exhaustive()
    }
}

impl HeldCertificates {
    fn file(&self, path: &Path) -> Option<&HeldCertificate> {
        self.files.iter().find(|(it, _)| it == path).map(|(_, it)| it)
    }

    fn is_promotion_due(&self, now_s: i64) -> bool {
        self.next_promotion_s.is_some_and(|at| at <= now_s)
    }

    fn offer_to_secret(&mut self, name: NamespacedName, loaded: LoadResult, now_s: i64) {
        let before = self.by_secret.remove(&name);
        if let Some(after) = offer_loaded(before, loaded, CertificateSource::Secret(&name), now_s) {
            self.by_secret.insert(name, after);
        }
    }

    fn remove_secret(&mut self, name: &NamespacedName) {
        if self.by_secret.remove(name).is_some() {
            log_removed(CertificateSource::Secret(name));
        }
    }

    fn unnamed_secrets(&self, snapshot: &RouteBatch) -> Vec<NamespacedName> {
        let is_named = |name: &NamespacedName| {
            snapshot.changes.contains_key(&RouteKey::Certificate(name.clone()))
        };
        self.by_secret.keys().filter(|name| !is_named(name)).cloned().collect()
    }

    /// Replaces all files; a file without a loaded certificate has not changed.
    fn replace_files(&mut self, files: Vec<(PathBuf, Option<LoadResult>)>, now_s: i64) {
        let mut after = Vec::with_capacity(files.len());
        for (path, loaded) in files {
            let mut held = self.file(&path).cloned();
            if let Some(loaded) = loaded {
                held = offer_loaded(held, loaded, CertificateSource::File(&path), now_s);
            }
            after.extend(held.map(|it| (path, it)));
        }
        // Files that the new list lacks are gone, with their certificates.
        for (path, _) in mem::replace(&mut self.files, after) {
            if self.file(&path).is_none() {
                log_removed(CertificateSource::File(&path));
            }
        }
    }

    /// Makes the settings of certificates again whose versions and ciphers are not the present ones. Those that were
    /// loaded while these changed are among them.
    fn update_protocols(&mut self) {
        let protocols = &self.protocols;
        let replacement = |it: &UsableCertificate| {
            if it.protocols.is_same(protocols) {
                return None;
            }
            let next = it.with_protocols(protocols.clone());
            // Only random bytes can be missing: the settings have a cipher for their versions.
            let next = next.inspect_err(|fault| warn!(%fault, "settings of TLS cannot be applied"));
            next.ok().map(Arc::new)
        };
        let held = self.by_secret.values_mut();
        for held in held.chain(self.files.iter_mut().map(|(_, it)| it)) {
            held.replace_each(replacement);
        }
    }

    /// Certificates that serve all hosts, in the order of their choice, with the names of their Secrets and files.
    fn shared_sources(&self) -> impl Iterator<Item = (String, &HeldCertificate)> {
        let secrets = self.shared_secrets.iter();
        let secrets =
            secrets.filter_map(move |name| Some((name.to_string(), self.by_secret.get(name)?)));
        let files = self.files.iter().map(|(path, it)| (path.display().to_string(), it));
        secrets.chain(files)
    }

    /// Computes what follows from the certificates in force.
    fn refresh(&mut self, now_s: i64, metrics: &TlsMetrics) {
        self.update_protocols();
        self.shared = self.shared_sources().map(|(_, it)| Arc::clone(it.in_force())).collect();
        let all = || self.by_secret.values().chain(self.files.iter().map(|(_, it)| it));
        let ends = all().map(|it| it.in_force().facts.validity.not_after_s);
        metrics.set_certificates(all().count(), ends.min());
        self.next_promotion_s = all().filter_map(|it| it.next_promotion_s(now_s)).min();
    }
}

/// Returns names and validity of a certificate, with the name of its Secret or file.
fn without_key(name: String, certificate: &UsableCertificate) -> PresentedCertificate {
    PresentedCertificate { name, facts: certificate.facts.clone() }
}

/// Changes of certificates in a batch, by the names of their Secrets.
fn certificate_changes(batch: &RouteBatch) -> Vec<(&NamespacedName, &RouteChange)> {
    // Keys of certificates come behind all others, of which there may be very many.
    let first = RouteKey::Certificate(NamespacedName::EMPTY);
    let certificates = batch.changes.range(first..).filter_map(|(key, change)| {
        let RouteKey::Certificate(name) = key else { return None };
        Some((name, change))
    });
    certificates.collect()
}

/// Loads a certificate that was received. `None`: it is the newest one of its Secret or file already.
fn load_if_new(
    held: Option<&HeldCertificate>,
    material: Arc<CertificateMaterial>,
    protocols: HandshakeProtocols,
) -> Option<LoadResult> {
    let is_new = held.is_none_or(|it| it.newest().material != material);
    is_new.then(|| load_usable(material, protocols))
}

fn load_usable(material: Arc<CertificateMaterial>, protocols: HandshakeProtocols) -> LoadResult {
    let loaded = load(&material)?;
    Ok(Arc::new(UsableCertificate::new(material, loaded, protocols)?))
}

/// Source of a certificate, as log lines name it.
#[derive(Clone, Copy, Debug)]
enum CertificateSource<'a> {
    /// Secret, or name inside the cluster, whose entry the RouteTable has.
    Secret(&'a NamespacedName),
    File(&'a Path),
}

impl CertificateSource<'_> {
    /// Returns the level of the lines about its changes. A controller that starts signs the certificates of names inside
    /// the cluster again, and there may be ten thousand.
    fn log_level(self) -> Level {
        let port = match self {
            Self::Secret(name) => name.split_port().map(|(_, port)| port),
            Self::File(_) => None,
        };
        if port == Some(LOCAL_TLS_PORT) { Level::DEBUG } else { Level::INFO }
    }
}

impl fmt::Display for CertificateSource<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Secret(name) => write!(out, "{name}"),
            Self::File(path) => write!(out, "{}", path.display()),
        }
    }
}

/// Offers a loaded certificate to its source, and returns the certificate that this has then.
fn offer_loaded(
    held: Option<HeldCertificate>,
    loaded: LoadResult,
    source: CertificateSource<'_>,
    now_s: i64,
) -> Option<HeldCertificate> {
    match (loaded, held) {
        // The one before stays: an old certificate serves clients, and a broken one would end all handshakes.
        (Err(fault), held) => {
            let kept = held.is_some();
            warn!(certificate = %source, %fault, kept, "certificate cannot be used");
            held
        }
        // Without one before there is nothing to prefer, so it is used even if it is not valid now.
        (Ok(first), None) => {
            let held = HeldCertificate::new(first);
            log_in_force(source, &held);
            Some(held)
        }
        // It waits if it is not valid yet and the one before is: clients would refuse it.
        (Ok(next), Some(mut held)) => {
            if held.offer(next, now_s) {
                log_in_force(source, &held);
            } else {
                let fault = "it is not valid now, and the one before is";
                warn!(certificate = %source, fault, kept = true, "certificate cannot be used");
            }
            Some(held)
        }
    }
}

fn log_in_force(source: CertificateSource<'_>, held: &HeldCertificate) {
    let facts = &held.in_force().facts;
    let not_after = Timestamp::from_second(facts.validity.not_after_s);
    let not_after = not_after.map(|it| it.to_string()).unwrap_or_default();
    let names = facts.names.summary();
    if source.log_level() == Level::DEBUG {
        debug!(certificate = %source, %names, %not_after, "certificate in force");
    } else {
        info!(certificate = %source, %names, %not_after, "certificate in force");
    }
}

fn log_removed(source: CertificateSource<'_>) {
    if source.log_level() == Level::DEBUG {
        debug!(certificate = %source, "certificate removed");
    } else {
        info!(certificate = %source, "certificate removed");
    }
}

/// Reads the system's clock. Certificates are dated by it, so it counts also after it was set.
fn unix_seconds() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
