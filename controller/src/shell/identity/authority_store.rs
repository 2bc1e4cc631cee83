//! Shell: keeps the authorities in the cluster, and this controller's own certificate.
//!
//! All replicas sign with the same authorities, which they read from a Secret of their own; the leader creates and
//! replaces them. A ConfigMap holds the certificates that all components trust.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use common::{
    link::error_chain,
    tls::{TlsCredentials, TlsError, peer::CertificateIdentity},
};
use rustls::pki_types::{CertificateDer, pem::PemObject as _};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{
    rotation::{
        CERTIFICATE_LIFETIME, COMPONENT_SCHEDULE, CertificateAuthorities, RotationSchedule,
        RotationStep,
    },
    signing::{self, CertificateSigner, SignError},
};

/// Interval between two reads of the Secret while there is no authority.
const FIRST_REFRESH_INTERVAL: Duration = Duration::from_millis(500);
/// Interval between two reads of the Secret once there is an authority.
const REFRESH_INTERVAL: Duration = Duration::from_secs(30);

/// Error of a request to the cluster.
pub type AuthorityStoreError = Box<dyn std::error::Error + Send + Sync>;

/// Storage of the authorities in the cluster.
#[tonic::async_trait]
pub trait AuthorityStore: Send + Sync + std::fmt::Debug {
    /// Reads the Secret's text and version; `None`: there is no Secret.
    async fn load(&self) -> Result<Option<(String, String)>, AuthorityStoreError>;
    /// Writes the Secret if it still has `version`, or, without one, if it does not exist. Otherwise it returns an
    /// error.
    async fn save(&self, text: &str, version: Option<&str>) -> Result<(), AuthorityStoreError>;
    /// Writes the certificates of all authorities where every component can read them.
    async fn publish(&self, bundle: &str) -> Result<(), AuthorityStoreError>;
}

/// Error of one round over the authorities.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// A request to the cluster failed.
    #[error("cannot {what}")]
    Store {
        /// Attempted action, for the message.
        what: &'static str,
        /// Error of the request.
        #[source]
        source: AuthorityStoreError,
    },
    /// The Secret has other content than authorities.
    #[error("the Secret of authorities cannot be read: delete it, and a new one is made")]
    InvalidSecret(#[source] serde_json::Error),
    /// There is no authority, and another replica must create it.
    #[error("no authority yet: the leader makes it")]
    NoAuthority,
    /// A certificate could not be created.
    #[error(transparent)]
    Sign(#[from] SignError),
    /// A new certificate could not be put into use.
    #[error(transparent)]
    Tls(#[from] TlsError),
}

/// The authority that signs now, and all that components must trust.
#[derive(Debug)]
pub struct SigningAuthority {
    /// Signer of the active authority.
    pub signer: CertificateSigner,
    /// Certificates of all authorities, the oldest first.
    pub authorities: Vec<CertificateDer<'static>>,
}

/// Manager of the authorities and of the controller's own certificate.
#[derive(Debug)]
pub struct AuthorityManager {
    store: Arc<dyn AuthorityStore>,
    own_identity: CertificateIdentity,
    credentials: Arc<TlsCredentials>,
    signing: watch::Sender<Option<Arc<SigningAuthority>>>,
    state: tokio::sync::Mutex<AuthorityManagerState>,
}

/// State in use, compared with the Secret in each round.
#[derive(Debug, Default)]
struct AuthorityManagerState {
    authorities_in_use: CertificateAuthorities,
    signer_created_s: u64,
    /// Time to replace the own certificate; `None`: the authority that signs has not issued one yet.
    renew_at: Option<SystemTime>,
}

impl AuthorityManagerState {
    /// Records authorities in use. The own certificate is due from then on until the new signer has issued one, so that
    /// a failure is tried again in the next round.
    fn set_authorities(&mut self, all: CertificateAuthorities, signer_created_s: u64) {
        *self = Self { authorities_in_use: all, signer_created_s, renew_at: None };
    }

    /// Returns true if the own certificate is to be replaced.
    fn is_renewal_due(&self, now: SystemTime) -> bool {
        // The second comparison holds after the clock was set back: an old certificate must not stay in use.
        self.renew_at.is_none_or(|at| at <= now || now + CERTIFICATE_LIFETIME <= at)
    }
}

impl AuthorityManager {
    /// Creates a manager for the controller with the identity `identity`.
    pub fn new(store: Arc<dyn AuthorityStore>, identity: CertificateIdentity) -> Arc<Self> {
        Arc::new(Self {
            store,
            own_identity: identity,
            credentials: TlsCredentials::new(),
            signing: watch::Sender::new(None),
            state: tokio::sync::Mutex::default(),
        })
    }

    /// Credentials that this controller presents to others.
    pub fn credentials(&self) -> &Arc<TlsCredentials> {
        &self.credentials
    }

    /// The authorities in use; none before the first read of the Secret.
    pub fn signing(&self) -> Option<Arc<SigningAuthority>> {
        self.signing.borrow().clone()
    }

    /// Runs a round at every interval until `shutdown`. `is_leader` returns true if this replica may write.
    pub async fn run(&self, is_leader: impl Fn() -> bool + Send, shutdown: CancellationToken) {
        let mut is_loaded = false;
        loop {
            match self.refresh(SystemTime::now(), is_leader()).await {
                Ok(()) => is_loaded = true,
                // Other errors are often brief, so they leave the interval as it is.
                Err(AuthorityError::NoAuthority) => is_loaded = false,
                Err(error) => warn!(error = %error_chain(&error), "authorities not refreshed"),
            }
            let wait = if is_loaded { REFRESH_INTERVAL } else { FIRST_REFRESH_INTERVAL };
            let waited = shutdown.run_until_cancelled(tokio::time::sleep(wait)).await;
            if waited.is_none() {
                return;
            }
        }
    }

    /// Runs one round at `now`: creates or drops an authority if one is due, and renews this controller's certificate.
    pub async fn refresh(&self, now: SystemTime, is_leader: bool) -> Result<(), AuthorityError> {
        let now_s = unix_seconds(now);
        let all = refresh_stored(&*self.store, &COMPONENT_SCHEDULE, now, is_leader).await?;
        let mut state = self.state.lock().await;
        self.apply_authorities(&mut state, &all, now, now_s)?;
        // In each round, because the ConfigMap may have been deleted, or written last by a former leader.
        if is_leader {
            publish_stored(&*self.store, &all).await?;
        }
        Ok(())
    }

    /// Puts the authorities of the Secret into use, and renews this controller's certificate when it is due.
    fn apply_authorities(
        &self,
        state: &mut AuthorityManagerState,
        all: &CertificateAuthorities,
        now: SystemTime,
        now_s: u64,
    ) -> Result<(), AuthorityError> {
        // The newest authority may not sign yet: components must trust it before they meet its certificates.
        let authority = all.signing_authority(&COMPONENT_SCHEDULE, now_s);
        let authority = authority.ok_or(AuthorityError::NoAuthority)?;
        // The signer is compared too: time alone makes a trusted authority the one that signs.
        let changed =
            state.authorities_in_use != *all || state.signer_created_s != authority.made_s;
        if changed {
            let read = |text: &str| CertificateDer::from_pem_slice(text.as_bytes());
            let authorities = all.all().iter().map(|it| read(&it.certificate));
            let authorities: Result<Vec<_>, _> = authorities.collect();
            let authorities = authorities.map_err(SignError::Pem)?;
            // Trust comes before the new signer: from then on certificates of it may arrive.
            self.credentials.set_authorities(&authorities)?;
            let signer = CertificateSigner::new(authority)?;
            let signing = SigningAuthority { signer, authorities };
            self.signing.send_replace(Some(Arc::new(signing)));
            // Only at the end, so that a failure above is tried again in the next round.
            // The own certificate is due at once: the old authority is trusted for one more overlap only.
            state.set_authorities(all.clone(), authority.made_s);
        }
        if state.is_renewal_due(now) {
            let signing = self.signing().ok_or(AuthorityError::NoAuthority)?;
            let own_certificate = signing.signer.issue_own(&self.own_identity, now)?;
            self.credentials
                .set_certificate(vec![own_certificate.certificate], own_certificate.key)?;
            // At half of the lifetime, which leaves the other half for rounds that fail.
            state.renew_at = Some(now + CERTIFICATE_LIFETIME / 2);
        }
        Ok(())
    }
}

/// Reads the authorities, and creates or drops one if that is due at `now` and this replica leads.
pub(super) async fn refresh_stored(
    store: &dyn AuthorityStore,
    schedule: &RotationSchedule,
    now: SystemTime,
    is_leader: bool,
) -> Result<CertificateAuthorities, AuthorityError> {
    // The version goes along with the text: the write below is refused if another replica has written meanwhile.
    let loaded = store.load().await.map_err(store_error("read the authorities"))?;
    let (all, version) = match &loaded {
        Some((text, version)) => (
            serde_json::from_str(text).map_err(AuthorityError::InvalidSecret)?,
            Some(version.as_str()),
        ),
        None => (CertificateAuthorities::default(), None),
    };
    // Only the leader makes changes; the other replicas read them in their next round.
    let step =
        if is_leader { all.due_step(schedule, unix_seconds(now)) } else { RotationStep::None };
    let next = match step {
        RotationStep::None => return Ok(all),
        RotationStep::Create => all.with_authority(signing::create_authority(schedule, now)?),
        RotationStep::RemoveOldest => all.without_oldest(),
    };
    let text = serde_json::to_string(&next).map_err(AuthorityError::InvalidSecret)?;
    // Of two replicas that both believe to lead, the second gets a conflict here, and reads again.
    store.save(&text, version).await.map_err(store_error("write the authorities"))?;
    info!(
        ?step,
        kind = schedule.common_name,
        authorities = next.all().len(),
        "authorities changed"
    );
    Ok(next)
}

/// Writes the certificates of all authorities where those who trust them read them.
pub(super) async fn publish_stored(
    store: &dyn AuthorityStore,
    all: &CertificateAuthorities,
) -> Result<(), AuthorityError> {
    store.publish(&all.pem_bundle()).await.map_err(store_error("publish the authorities"))
}

fn store_error(what: &'static str) -> impl FnOnce(AuthorityStoreError) -> AuthorityError {
    move |source| AuthorityError::Store { what, source }
}

/// Seconds since 1970.
pub(super) fn unix_seconds(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without it, a failure to issue the first certificate would leave that of the old signer for half of its lifetime.
    #[test]
    fn after_a_change_of_authorities_a_certificate_is_due_until_one_is_issued() {
        let now = SystemTime::now();
        let mut state = AuthorityManagerState::default();
        assert!(state.is_renewal_due(now), "none was issued yet");
        state.renew_at = Some(now + CERTIFICATE_LIFETIME / 2);
        assert!(!state.is_renewal_due(now));
        state.set_authorities(CertificateAuthorities::default(), 1);
        assert!(state.is_renewal_due(now));
        state.renew_at = Some(now + CERTIFICATE_LIFETIME / 2);
        assert!(!state.is_renewal_due(now));
        assert!(state.is_renewal_due(now - CERTIFICATE_LIFETIME), "the clock was set back");
        assert!(state.is_renewal_due(now + CERTIFICATE_LIFETIME));
    }
}
