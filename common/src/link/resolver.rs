//! Shell: replica resolver: addresses of one component's replicas by setting, by DNS name and by the RouteTable.

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use tokio::sync::{Mutex, Notify, watch};
use tonic::transport::Channel;
use tracing::{error, info, warn};

use super::{LinkError, dial, random_u64};
use crate::{
    component::Component,
    replicas::{EndpointSetting, KnownReplicas, ReplicaEndpoint},
    tls::TlsCredentials,
};

/// Interval of lookups while no stream breaks.
const LOOKUP_INTERVAL: Duration = Duration::from_secs(5);
/// Least time between two lookups after a broken stream, or while lookups fail.
const MIN_LOOKUP_GAP: Duration = Duration::from_millis(250);
/// Timeout of one lookup.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(3);

/// Resolver of DNS names, which tests replace.
#[tonic::async_trait]
pub trait DnsResolver: Send + Sync + std::fmt::Debug {
    /// Returns every address of `name`, with `port`.
    async fn lookup(&self, name: &str, port: u16) -> io::Result<Vec<SocketAddr>>;
}

/// Resolver as configured on this machine: A and AAAA records.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemDnsResolver;

#[tonic::async_trait]
impl DnsResolver for SystemDnsResolver {
    async fn lookup(&self, name: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        Ok(tokio::net::lookup_host((name, port)).await?.collect())
    }
}

/// Replica resolver of one component, shared by all links to it.
#[derive(Debug)]
pub struct ReplicaResolver {
    setting: EndpointSetting,
    known: watch::Sender<KnownReplicas>,
    /// Component that the replicas must prove, and the certificate to present to them.
    identity: Option<(Component, Arc<TlsCredentials>)>,
    dns: Arc<dyn DnsResolver>,
    /// Held by the one task that looks names up for all links.
    lookup_lock: Mutex<()>,
    lookup_requested: Notify,
    /// Latest lookup error, so that a lasting one is logged once.
    lookup_error: RwLock<Option<String>>,
}

impl ReplicaResolver {
    /// Returns a resolver for a setting's text, without TLS.
    pub fn from_setting(text: &str) -> Arc<Self> {
        Self::new(parse_setting(text), Arc::new(SystemDnsResolver), None)
    }

    /// Returns a resolver for a setting's text. It uses TLS if there are credentials, to replicas whose certificate
    /// proves `component`.
    pub fn with_credentials(
        component: Component,
        text: &str,
        credentials: Option<&Arc<TlsCredentials>>,
    ) -> Arc<Self> {
        let identity = credentials.map(|it| (component, Arc::clone(it)));
        Self::new(parse_setting(text), Arc::new(SystemDnsResolver), identity)
    }

    /// Returns a resolver for the replicas that the RouteTable lists, which no setting names. It uses TLS if there are
    /// credentials, to replicas whose certificate proves `component`.
    pub fn of_listed(component: Component, credentials: Option<&Arc<TlsCredentials>>) -> Arc<Self> {
        let identity = credentials.map(|it| (component, Arc::clone(it)));
        Self::new(EndpointSetting::Fixed([].into()), Arc::new(SystemDnsResolver), identity)
    }

    /// Returns a resolver for a parsed setting.
    pub fn new(
        setting: EndpointSetting,
        dns: Arc<dyn DnsResolver>,
        identity: Option<(Component, Arc<TlsCredentials>)>,
    ) -> Arc<Self> {
        let known = watch::Sender::new(KnownReplicas::new(&setting));
        Arc::new(Self {
            setting,
            known,
            identity,
            dns,
            lookup_lock: Mutex::new(()),
            lookup_requested: Notify::new(),
            lookup_error: RwLock::new(None),
        })
    }

    /// Returns a receiver of the known replicas, which is notified of each change.
    pub fn subscribe_known(&self) -> watch::Receiver<KnownReplicas> {
        self.known.subscribe()
    }

    pub(super) fn is_known(&self, endpoint: &ReplicaEndpoint) -> bool {
        self.known.borrow().contains(endpoint)
    }

    /// Returns the error of the latest lookup, for users; `None` if none has failed, or the latest succeeded.
    pub fn lookup_error(&self) -> Option<String> {
        self.lookup_error.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces the replicas that the RouteTable lists.
    pub fn set_listed(&self, addresses: impl IntoIterator<Item = SocketAddr>) {
        let endpoints: Vec<_> =
            addresses.into_iter().map(|address| self.endpoint_at(address)).collect();
        self.known.send_if_modified(|known| known.set_listed(endpoints));
    }

    /// Sets the replicas that an earlier process knew. They are tried until DNS or the RouteTable names others. A
    /// setting with fixed addresses needs none, and ignores them.
    pub fn set_remembered(&self, addresses: impl IntoIterator<Item = SocketAddr>) {
        if matches!(self.setting, EndpointSetting::Fixed(_)) {
            return;
        }
        let endpoints = addresses.into_iter().map(|address| self.endpoint_at(address));
        self.known.send_if_modified(|known| known.set_remembered(endpoints));
    }

    fn endpoint_at(&self, address: SocketAddr) -> ReplicaEndpoint {
        ReplicaEndpoint::Tcp { address, tls: self.uses_tls() }
    }

    fn uses_tls(&self) -> bool {
        match &self.setting {
            EndpointSetting::Fixed(all) if !all.is_empty() => self.setting.needs_identity(),
            // Without an address that shows it, the identity decides.
            EndpointSetting::Fixed(_) | EndpointSetting::Dns { .. } => self.identity.is_some(),
        }
    }

    /// Requests a lookup after a broken stream: the name may have other addresses by now.
    pub(super) fn request_lookup(&self) {
        self.lookup_requested.notify_one();
    }

    /// Repeats lookups of the name. Several links may call it; one of them does the work.
    pub(crate) async fn run_lookups(&self) {
        let EndpointSetting::Dns { name, port } = &self.setting else {
            return std::future::pending().await;
        };
        // The others wait here, and one of them takes over when the link that holds the lock ends.
        let _alone = self.lookup_lock.lock().await;
        loop {
            let result = tokio::time::timeout(LOOKUP_TIMEOUT, self.dns.lookup(name, *port)).await;
            let result = result.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
            let has_answer = self.apply_lookup(name, result);
            // At least this pause separates lookups, however many streams break at once.
            tokio::time::sleep(MIN_LOOKUP_GAP).await;
            if has_answer {
                let _either =
                    tokio::time::timeout(LOOKUP_INTERVAL, self.lookup_requested.notified()).await;
            }
        }
    }

    /// Applies the result of a lookup. Returns true if the name has an address.
    fn apply_lookup(&self, name: &str, result: io::Result<Vec<SocketAddr>>) -> bool {
        let failure = match &result {
            Ok(all) if all.is_empty() => Some(format!("{name} has no address")),
            Ok(_) => None,
            Err(error) => Some(format!("cannot look up {name}: {error}")),
        };
        let has_answer = failure.is_none();
        // Never held across an await, so a blocking lock is safe here.
        let mut before = self.lookup_error.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(new_failure) = failure.as_ref().filter(|_| *before != failure) {
            warn!(trouble = new_failure, "replicas not found; the last known stay");
        }
        *before = failure;
        drop(before);
        // After an error the list is empty, which `set_resolved` ignores: the last known replicas stay.
        let result =
            result.unwrap_or_default().into_iter().map(|address| self.endpoint_at(address));
        let result: Vec<_> = result.collect();
        let count = result.len();
        if self.known.send_if_modified(|known| known.set_resolved(result)) {
            info!(name, count, "replicas found");
        }
        has_answer
    }

    /// Opens a connection to one replica.
    pub(super) async fn dial(&self, endpoint: &ReplicaEndpoint) -> Result<Channel, LinkError> {
        let &ReplicaEndpoint::Tcp { address, tls: true } = endpoint else {
            return dial::dial_plain(endpoint).await;
        };
        let (component, credentials) = self.require_identity(endpoint)?;
        credentials.wait_for_certificate().await;
        let with_certificate = true;
        dial::dial_tls(address, credentials, component, with_certificate).await
    }

    /// Opens a TLS connection to some replica, without a client certificate.
    pub async fn dial_without_certificate(&self) -> Result<Channel, LinkError> {
        self.dial_any(false).await
    }

    /// Opens a TLS connection to some replica, as soon as there is a certificate to present.
    pub async fn dial_with_certificate(&self) -> Result<Channel, LinkError> {
        self.dial_any(true).await
    }

    /// Connects to the first replica that accepts, in an order that begins at random. Waits until any replica is known.
    async fn dial_any(&self, with_certificate: bool) -> Result<Channel, LinkError> {
        let mut known = self.subscribe_known();
        // The sender belongs to `self`, so it cannot have been dropped.
        let all = known.wait_for(|it| !it.all().is_empty()).await.map(|it| it.all());
        let mut all: Vec<_> = all.unwrap_or_default().into_iter().collect();
        // A random first replica spreads components that start at the same time.
        let first = usize::try_from(random_u64()).unwrap_or_default() % all.len().max(1);
        all.rotate_left(first);
        let mut failed = None;
        for endpoint in &all {
            // A certificate is requested over TLS only: the request carries a token.
            let &ReplicaEndpoint::Tcp { address, tls: true } = endpoint else { continue };
            let (component, credentials) = self.require_identity(endpoint)?;
            if with_certificate {
                credentials.wait_for_certificate().await;
            }
            match dial::dial_tls(address, credentials, component, with_certificate).await {
                Ok(channel) => return Ok(channel),
                Err(error) => failed = Some(error),
            }
        }
        self.request_lookup();
        let no_tls = || LinkError::NoTlsReplica { setting: self.setting.to_string() };
        Err(failed.unwrap_or_else(no_tls))
    }

    fn require_identity(
        &self,
        endpoint: &ReplicaEndpoint,
    ) -> Result<(Component, &Arc<TlsCredentials>), LinkError> {
        let none = || LinkError::NoIdentity { endpoint: endpoint.to_string() };
        self.identity.as_ref().map(|(component, it)| (*component, it)).ok_or_else(none)
    }
}

/// Parses a setting. An invalid one, which configurations have checked before, yields no replicas.
fn parse_setting(text: &str) -> EndpointSetting {
    text.parse().unwrap_or_else(|bad| {
        error!(error = %bad, "no replica can be found");
        EndpointSetting::Fixed([].into())
    })
}
