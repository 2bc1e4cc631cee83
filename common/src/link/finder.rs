//! Shell: where the replicas of one part are now: by setting, by name and by the RouteTable.

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use tokio::sync::{Mutex, Notify, watch};
use tonic::transport::Channel;
use tracing::{error, info, warn};

use super::{LinkError, chance, dial};
use crate::{
    replicas::{Endpoint, Known, Setting},
    tls::{Credentials, peer::Holder},
};

/// A name is looked up this often while nothing breaks.
const EVERY: Duration = Duration::from_secs(5);
/// Between two look-ups because something broke, or while there is no answer.
const GAP: Duration = Duration::from_millis(250);
/// A name server that does not answer is not waited for.
const PATIENCE: Duration = Duration::from_secs(3);

/// Looks names up.
#[tonic::async_trait]
pub trait Lookup: Send + Sync + std::fmt::Debug {
    /// Every address of `name`, with `port`.
    async fn lookup(&self, name: &str, port: u16) -> io::Result<Vec<SocketAddr>>;
}

/// Looks names up as this machine is configured to: A and AAAA.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemLookup;

#[tonic::async_trait]
impl Lookup for SystemLookup {
    async fn lookup(&self, name: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        Ok(tokio::net::lookup_host((name, port)).await?.collect())
    }
}

/// Finds the replicas of one part. Shared by all links to it.
#[derive(Debug)]
pub struct Finder {
    setting: Setting,
    known: watch::Sender<Known>,
    /// Whom the replicas must prove to be, and what is shown to them.
    identity: Option<(Holder, Arc<Credentials>)>,
    lookup: Arc<dyn Lookup>,
    /// Held by whoever looks names up for all.
    looking: Mutex<()>,
    again: Notify,
    /// The last failure, so that a lasting one is told once.
    trouble: RwLock<Option<String>>,
}

impl Finder {
    /// A finder for a setting's text, without TLS.
    pub fn of(text: &str) -> Arc<Self> {
        Self::new(setting(text), Arc::new(SystemLookup), None)
    }

    /// A finder for a setting's text; over TLS if there are credentials, to replicas that prove to be `holder`s.
    pub fn known_as(
        holder: Holder,
        text: &str,
        credentials: Option<&Arc<Credentials>>,
    ) -> Arc<Self> {
        let identity = credentials.map(|it| (holder, Arc::clone(it)));
        Self::new(setting(text), Arc::new(SystemLookup), identity)
    }

    /// A finder for a setting.
    pub fn new(
        setting: Setting,
        lookup: Arc<dyn Lookup>,
        identity: Option<(Holder, Arc<Credentials>)>,
    ) -> Arc<Self> {
        let known = watch::Sender::new(Known::new(&setting));
        Arc::new(Self {
            setting,
            known,
            identity,
            lookup,
            looking: Mutex::new(()),
            again: Notify::new(),
            trouble: RwLock::new(None),
        })
    }

    /// The replicas, and word of each change.
    pub(super) fn known(&self) -> watch::Receiver<Known> {
        self.known.subscribe()
    }

    pub(super) fn knows(&self, endpoint: &Endpoint) -> bool {
        self.known.borrow().contains(endpoint)
    }

    /// Why nobody can be found just now, for people.
    pub fn trouble(&self) -> Option<String> {
        self.trouble.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The RouteTable names these.
    pub(super) fn tell(&self, addresses: impl IntoIterator<Item = SocketAddr>) {
        let told: Vec<_> = addresses.into_iter().map(|address| self.endpoint(address)).collect();
        self.known.send_if_modified(|known| known.tell(told));
    }

    fn endpoint(&self, address: SocketAddr) -> Endpoint {
        Endpoint::Tcp { address, tls: self.is_tls() }
    }

    fn is_tls(&self) -> bool {
        match &self.setting {
            Setting::Fixed(_) => self.setting.needs_identity(),
            Setting::Dns { .. } => self.identity.is_some(),
        }
    }

    /// A stream broke: perhaps the name has other addresses by now.
    pub(super) fn look_again(&self) {
        self.again.notify_one();
    }

    /// Looks the name up again and again. Several may call it; one of them does the work.
    pub(crate) async fn keep_looking(&self) {
        let Setting::Dns { name, port } = &self.setting else {
            return std::future::pending().await;
        };
        let _alone = self.looking.lock().await;
        loop {
            let found = tokio::time::timeout(PATIENCE, self.lookup.lookup(name, *port)).await;
            let found = found.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
            let answered = self.answer(name, found);
            tokio::time::sleep(GAP).await;
            if answered {
                let _either = tokio::time::timeout(EVERY, self.again.notified()).await;
            }
        }
    }

    fn answer(&self, name: &str, found: io::Result<Vec<SocketAddr>>) -> bool {
        let trouble = match &found {
            Ok(all) if all.is_empty() => Some(format!("{name} has no address")),
            Ok(_) => None,
            Err(error) => Some(format!("cannot look up {name}: {error}")),
        };
        let answered = trouble.is_none();
        let mut before = self.trouble.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(trouble) = trouble.as_ref().filter(|_| *before != trouble) {
            warn!(trouble, "replicas not found; the last known stay");
        }
        *before = trouble;
        drop(before);
        let found = found.unwrap_or_default().into_iter().map(|address| self.endpoint(address));
        let found: Vec<_> = found.collect();
        let count = found.len();
        if self.known.send_if_modified(|known| known.look_up(found)) {
            info!(name, count, "replicas found");
        }
        answered
    }

    /// A connection to one replica.
    pub(super) async fn dial(&self, endpoint: &Endpoint) -> Result<Channel, LinkError> {
        let &Endpoint::Tcp { address, tls: true } = endpoint else {
            return dial::plain(endpoint).await;
        };
        let (holder, credentials) = self.identity(endpoint)?;
        credentials.ready().await;
        dial::secure(address, credentials, holder, true).await
    }

    /// A connection over TLS to some replica, without showing a certificate.
    pub async fn dial_nameless(&self) -> Result<Channel, LinkError> {
        self.dial_some(false).await
    }

    /// A connection over TLS to some replica, once there is a certificate to show.
    pub async fn dial_named(&self) -> Result<Channel, LinkError> {
        self.dial_some(true).await
    }

    async fn dial_some(&self, named: bool) -> Result<Channel, LinkError> {
        let mut known = self.known();
        // The sender is ours, so it cannot have gone.
        let all = known.wait_for(|it| !it.all().is_empty()).await.map(|it| it.all());
        let mut all: Vec<_> = all.unwrap_or_default().into_iter().collect();
        let first = usize::try_from(chance()).unwrap_or_default() % all.len().max(1);
        all.rotate_left(first);
        let mut failed = None;
        for endpoint in &all {
            let &Endpoint::Tcp { address, tls: true } = endpoint else { continue };
            let (holder, credentials) = self.identity(endpoint)?;
            if named {
                credentials.ready().await;
            }
            match dial::secure(address, credentials, holder, named).await {
                Ok(channel) => return Ok(channel),
                Err(error) => failed = Some(error),
            }
        }
        self.look_again();
        let setting = format!("{:?}", self.setting);
        Err(failed.unwrap_or(LinkError::Endpoint { endpoint: setting }))
    }

    fn identity(&self, endpoint: &Endpoint) -> Result<(Holder, &Arc<Credentials>), LinkError> {
        let none = || LinkError::NoIdentity { endpoint: endpoint.to_string() };
        self.identity.as_ref().map(|(holder, it)| (*holder, it)).ok_or_else(none)
    }
}

/// One that makes no sense finds nobody; configurations are checked before.
fn setting(text: &str) -> Setting {
    text.parse().unwrap_or_else(|bad| {
        error!(error = %bad, "no replica can be found");
        Setting::Fixed([].into())
    })
}
