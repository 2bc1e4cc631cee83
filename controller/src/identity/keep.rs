//! Shell: keeps the authorities in the cluster, and this controller's own certificate.
//!
//! All replicas sign with the same authorities, which they read from a Secret that nobody else may read; the one that
//! leads makes and replaces them. What everybody is to trust stands in a ConfigMap.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use common::{
    link::chain,
    tls::{Credentials, TlsError, peer::Identity},
};
use rustls::pki_types::{CertificateDer, pem::PemObject as _};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{
    rotation::{Authorities, LIFETIME, Step},
    sign::{self, SignError, Signer},
};

/// Between two looks at the Secret, before and after there is an authority.
const EVERY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

/// The cluster could not be asked.
pub type StoreError = Box<dyn std::error::Error + Send + Sync>;

/// Where authorities are kept.
#[tonic::async_trait]
pub trait Store: Send + Sync + std::fmt::Debug {
    /// The Secret's text with its version; none: there is no Secret.
    async fn load(&self) -> Result<Option<(String, String)>, StoreError>;
    /// Writes it if it is still of `version`, or, without one, if there is none. Whoever comes second gets an error.
    async fn save(&self, text: &str, version: Option<&str>) -> Result<(), StoreError>;
    /// Lets everybody read whom to trust.
    async fn publish(&self, bundle: &str) -> Result<(), StoreError>;
}

/// The authorities could not be looked after.
#[derive(Debug, thiserror::Error)]
pub enum KeepError {
    /// The cluster said no.
    #[error("cannot {what}")]
    Store {
        /// What was attempted.
        what: &'static str,
        /// Why not.
        #[source]
        source: StoreError,
    },
    /// Somebody wrote something else there.
    #[error("the Secret of authorities cannot be read: delete it, and a new one is made")]
    Text(#[source] serde_json::Error),
    /// There is none, and another replica is to make it.
    #[error("no authority yet: the leader makes it")]
    None,
    /// A certificate could not be made.
    #[error(transparent)]
    Sign(#[from] SignError),
    /// What was made cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
}

/// What signs just now, and whom everybody is to trust.
#[derive(Debug)]
pub struct Signing {
    /// The authority that signs.
    pub signer: Signer,
    /// All authorities.
    pub authorities: Vec<CertificateDer<'static>>,
}

/// Keeps authorities and the own certificate.
#[derive(Debug)]
pub struct Keeper {
    store: Arc<dyn Store>,
    own: Identity,
    credentials: Arc<Credentials>,
    signing: watch::Sender<Option<Arc<Signing>>>,
    state: tokio::sync::Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    adopted: Authorities,
    signer_s: u64,
    renew: Option<SystemTime>,
    published: String,
}

impl Keeper {
    /// A keeper for the controller that `own` names.
    pub fn new(store: Arc<dyn Store>, own: Identity) -> Arc<Self> {
        Arc::new(Self {
            store,
            own,
            credentials: Credentials::new(),
            signing: watch::Sender::new(None),
            state: tokio::sync::Mutex::default(),
        })
    }

    /// What this controller shows to others.
    pub fn credentials(&self) -> &Arc<Credentials> {
        &self.credentials
    }

    /// What signs just now; none before the first look at the Secret.
    pub fn signing(&self) -> Option<Arc<Signing>> {
        self.signing.borrow().clone()
    }

    /// Looks after everything until `shutdown`. `leads` says whether this replica may write.
    pub async fn keep(&self, leads: impl Fn() -> bool + Send, shutdown: CancellationToken) {
        let mut known = false;
        loop {
            match self.once(SystemTime::now(), leads()).await {
                Ok(()) => known = true,
                Err(KeepError::None) => known = false,
                Err(error) => warn!(error = %chain(&error), "authorities not looked after"),
            }
            let wait = if known { EVERY.1 } else { EVERY.0 };
            let waited = shutdown.run_until_cancelled(tokio::time::sleep(wait)).await;
            if waited.is_none() {
                return;
            }
        }
    }

    /// One look: what is to be made or dropped at `now`, and whether our own certificate is fresh.
    pub async fn once(&self, now: SystemTime, leads: bool) -> Result<(), KeepError> {
        let store = |what| move |source| KeepError::Store { what, source };
        let now_s = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let loaded = self.store.load().await.map_err(store("read the authorities"))?;
        let (mut all, version) = match &loaded {
            Some((text, version)) => {
                (serde_json::from_str(text).map_err(KeepError::Text)?, Some(version.as_str()))
            }
            None => (Authorities::default(), None),
        };
        let step = if leads { all.step(now_s) } else { Step::Keep };
        if step != Step::Keep {
            all = match step {
                Step::Make => all.with(sign::authority(now)?),
                Step::Drop => all.without_oldest(),
                Step::Keep => all,
            };
            let text = serde_json::to_string(&all).map_err(KeepError::Text)?;
            // Two that both believe to lead cannot both write: the second reads again.
            self.store.save(&text, version).await.map_err(store("write the authorities"))?;
            info!(?step, authorities = all.all().len(), "authorities changed");
        }
        let mut state = self.state.lock().await;
        self.adopt(&mut state, &all, now, now_s)?;
        let bundle = all.bundle();
        if leads && state.published != bundle {
            self.store.publish(&bundle).await.map_err(store("publish the authorities"))?;
            state.published = bundle;
        }
        Ok(())
    }

    fn adopt(
        &self,
        state: &mut State,
        all: &Authorities,
        now: SystemTime,
        now_s: u64,
    ) -> Result<(), KeepError> {
        let signs = all.signer(now_s).ok_or(KeepError::None)?;
        let changed = state.adopted != *all || state.signer_s != signs.made_s;
        if changed {
            let read = |text: &str| CertificateDer::from_pem_slice(text.as_bytes());
            let authorities = all.all().iter().map(|it| read(&it.certificate));
            let authorities: Result<Vec<_>, _> = authorities.collect();
            let authorities = authorities.map_err(SignError::Pem)?;
            self.credentials.trust(&authorities)?;
            let signing = Signing { signer: Signer::new(signs)?, authorities };
            self.signing.send_replace(Some(Arc::new(signing)));
            state.adopted = all.clone();
            state.signer_s = signs.made_s;
        }
        // A clock that was set back must not keep an old certificate in use.
        let fresh = state.renew.is_some_and(|at| now < at && at < now + LIFETIME);
        if changed || !fresh {
            let signing = self.signing().ok_or(KeepError::None)?;
            let own = signing.signer.own(&self.own, now)?;
            self.credentials.show(vec![own.certificate], own.key)?;
            state.renew = Some(now + LIFETIME / 2);
        }
        Ok(())
    }
}
