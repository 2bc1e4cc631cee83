//! Shell: requests this process's certificate from the controller, and the next one before it expires.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, pem::PemObject as _};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tracing::{info, warn};

use crate::{
    link::{LinkError, ReplicaResolver, error_chain},
    tls::{TlsCredentials, TlsError},
    wire::raw::{IssueRequest, identity_client::IdentityClient},
};

/// Timeout of one request to the controller.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after a first failed request; it doubles with each further failure.
const FIRST_RETRY_PAUSE: Duration = Duration::from_millis(100);
/// Longest pause between two requests.
const MAX_RETRY_PAUSE: Duration = Duration::from_secs(30);
/// Interval at which the file of authorities is read again.
const AUTHORITIES_INTERVAL: Duration = Duration::from_secs(30);

/// Files by which the platform identifies this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnrollmentFiles {
    /// Projected service-account token, audience `rouse`. The kubelet replaces it before it expires.
    pub token: PathBuf,
    /// Authorities of the controller in PEM: a mounted ConfigMap.
    pub authorities: PathBuf,
}

impl EnrollmentFiles {
    /// Returns `token` and `ca.pem` in one folder, as a projected volume holds them.
    pub fn in_folder(folder: &Path) -> Self {
        Self { token: folder.join("token"), authorities: folder.join("ca.pem") }
    }
}

/// Error of a certificate request.
#[derive(Debug, thiserror::Error)]
pub enum EnrollmentError {
    /// A file of the platform could not be read.
    #[error("cannot read {}", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Error of the read.
        #[source]
        source: std::io::Error,
    },
    /// The file of authorities contains no certificate.
    #[error("{} holds no certificate in PEM", path.display())]
    NoAuthority {
        /// Path of the file.
        path: PathBuf,
    },
    /// Making the key or the request failed.
    #[error("cannot make a key")]
    Key(#[from] rcgen::Error),
    /// The controller could not be reached.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The controller refused to sign.
    #[error("the controller signs nothing for us")]
    Refused(#[source] Box<Status>),
    /// The controller did not respond in time.
    #[error("the controller did not respond")]
    Timeout,
    /// The received certificate or authorities cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
}

/// Keeps `credentials` valid until `shutdown`.
pub async fn keep_enrolled(
    credentials: Arc<TlsCredentials>,
    controllers: Arc<ReplicaResolver>,
    files: EnrollmentFiles,
    shutdown: CancellationToken,
) {
    let mut task = EnrollmentTask {
        credentials,
        controllers,
        files,
        controller_authorities: Vec::new(),
        failures: 0,
    };
    let controllers = Arc::clone(&task.controllers);
    tokio::select! {
        () = task.run() => {}
        () = controllers.run_lookups() => {}
        () = shutdown.cancelled() => {}
    }
}

struct EnrollmentTask {
    credentials: Arc<TlsCredentials>,
    controllers: Arc<ReplicaResolver>,
    files: EnrollmentFiles,
    /// Authorities that the controller named with its latest signature.
    controller_authorities: Vec<CertificateDer<'static>>,
    failures: u32,
}

impl EnrollmentTask {
    async fn run(&mut self) {
        loop {
            let wait = match self.enroll_once().await {
                Ok(lifetime) => {
                    self.failures = 0;
                    renewal_delay(lifetime)
                }
                Err(error) => {
                    // Bounded before the shift, which would overflow after many failures.
                    let wait = FIRST_RETRY_PAUSE.saturating_mul(1 << self.failures.min(16));
                    let wait = wait.min(MAX_RETRY_PAUSE);
                    self.failures += 1;
                    warn!(error = %error_chain(&error), retry = ?wait, "no certificate");
                    wait
                }
            };
            self.wait(wait).await;
        }
    }

    /// Waits, and applies changes of the authorities meanwhile. Returns early when the clock was set: peers check the
    /// certificate by their clocks, and it may have expired by those.
    async fn wait(&self, wait: Duration) {
        let began = SystemTime::now();
        let mut left = wait;
        while !left.is_zero() {
            let step = left.min(AUTHORITIES_INTERVAL);
            sleep(step).await;
            left -= step;
            if let Err(error) = self.reload_authorities().await {
                warn!(error = %error_chain(&error), "authorities not read; the last known stay");
            }
            if is_wait_over(began, wait, SystemTime::now()) {
                return;
            }
        }
    }

    /// Trusts the authorities in the file and those that the controller named: during a rotation either may be ahead.
    async fn reload_authorities(&self) -> Result<(), EnrollmentError> {
        let path = &self.files.authorities;
        let text = read_file(path).await?;
        let read = CertificateDer::pem_slice_iter(text.as_bytes()).filter_map(Result::ok);
        let mut all: Vec<_> = read.map(CertificateDer::into_owned).collect();
        if all.is_empty() {
            return Err(EnrollmentError::NoAuthority { path: path.clone() });
        }
        all.extend(
            self.controller_authorities
                .iter()
                .filter(|it| !all.contains(it))
                .cloned()
                .collect::<Vec<_>>(),
        );
        Ok(self.credentials.set_authorities(&all)?)
    }

    /// Requests a certificate for a new key. Returns its lifetime.
    async fn enroll_once(&mut self) -> Result<Duration, EnrollmentError> {
        self.reload_authorities().await?;
        let token = read_file(&self.files.token).await?.trim().to_owned();
        let key = KeyPair::generate()?;
        // The controller uses the key alone: the identity comes from the token.
        let request = CertificateParams::default().serialize_request(&key)?;
        let request = IssueRequest { token, request: request.der().to_vec() };
        // Without a client certificate: the first request has none, and an expired one would be refused.
        let channel = self.controllers.dial_without_certificate().await?;
        let response =
            timeout(REQUEST_TIMEOUT, async { IdentityClient::new(channel).issue(request).await });
        let response = response.await.map_err(|_elapsed| EnrollmentError::Timeout)?;
        let response =
            response.map_err(|status| EnrollmentError::Refused(Box::new(status)))?.into_inner();
        // The new authorities are trusted before the certificate is presented: peers may have theirs from the new one
        // already.
        self.controller_authorities =
            response.authorities.into_iter().map(CertificateDer::from).collect();
        self.reload_authorities().await?;
        let chain = response.chain.into_iter().map(CertificateDer::from).collect();
        let key = PrivatePkcs8KeyDer::from(key.serialize_der());
        let identity = self.credentials.set_certificate(chain, key)?;
        let end = UNIX_EPOCH + Duration::from_millis(response.not_after_ms);
        let lifetime = end.duration_since(SystemTime::now()).unwrap_or_default();
        info!(%identity, ?lifetime, "certificate received");
        Ok(lifetime)
    }
}

/// Returns between four and six tenths of a lifetime, so that processes started together renew at different times.
fn renewal_delay(lifetime: Duration) -> Duration {
    let share = u32::try_from(crate::link::random_u64() % 201).unwrap_or_default();
    (lifetime * (400 + share) / 1_000).max(Duration::from_secs(1))
}

/// Returns true if a wait from `began` is over by the time of day, or if the time is before its begin.
fn is_wait_over(began: SystemTime, lasts: Duration, now: SystemTime) -> bool {
    now.duration_since(began).map_or(true, |passed| passed >= lasts)
}

async fn read_file(path: &Path) -> Result<String, EnrollmentError> {
    // Mounted files are local, but a read may still block on a busy disk.
    let read = tokio::task::spawn_blocking({
        let path = path.to_owned();
        move || std::fs::read_to_string(path)
    });
    let text = read.await.unwrap_or_else(|panicked| Err(std::io::Error::other(panicked)));
    text.map_err(|source| EnrollmentError::File { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_is_set_ends_a_wait() {
        let (began, lasts) = (UNIX_EPOCH + Duration::from_secs(1_000), Duration::from_secs(60));
        let at = |second| UNIX_EPOCH + Duration::from_secs(second);
        assert!(!is_wait_over(began, lasts, at(1_000)));
        assert!(!is_wait_over(began, lasts, at(1_059)));
        assert!(is_wait_over(began, lasts, at(1_060)), "passed, or the clock was set forward");
        assert!(is_wait_over(began, lasts, at(999)), "set back");
    }
}
