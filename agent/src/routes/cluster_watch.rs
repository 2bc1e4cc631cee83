//! Shell: watches of the cluster's Services, for a node that serves them in kube-proxy's place.
//!
//! The agent watches them itself: whatever stands in for kube-proxy may depend on nothing but the API server.

use std::{collections::BTreeSet, future::pending, time::Duration};

use common::{
    link::error_chain,
    service_routing::{ClusterIpService, ServiceDecodeError, ServiceSlice},
    wire::NamespacedName,
};
use futures::StreamExt as _;
use k8s_openapi::{
    api::{
        core::v1::{Namespace, Node, Service},
        discovery::v1::EndpointSlice,
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::{
    Api, Client,
    runtime::watcher::{Config, Event},
};
use tokio::sync::mpsc;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{info, warn};
use watches::{proves_recovery, watch_streamed};

use super::{
    event_writer::ServiceEvents,
    plan::{ClusterChange, ClusterIpLabel, ClusterResource, ObservedService, ObservedSlice},
};
use crate::config::ClusterIpMode;

/// Longest pause before a broken watch is begun again. kube-proxy's client waits as long: a cluster has many nodes.
const MAX_PAUSE: Duration = Duration::from_secs(30);
/// Longest time without a byte of the API server.
const READ_TIMEOUT: Duration = Duration::from_secs(90);
/// Longest time for a connection to the API server.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Number of observations that wait; when the channel is full, watches pause.
const CHANNEL_CAPACITY: usize = 1_024;
/// Number of observations that the loop takes at once.
const BATCH_MAX: usize = 256;
/// Label of a Service or namespace that this node serves, or does not.
const CLUSTERIP_LABEL: &str = "rouse.dev/clusterip";
/// Label of the Services of Rouse's Routes, which the RouteTable has.
const ROUTE_LABEL: &str = "serving.knative.dev/route";
/// Label of an EndpointSlice with the name of its Service.
const SERVICE_NAME_LABEL: &str = "kubernetes.io/service-name";
/// Label of a node with its zone.
const ZONE_LABEL: &str = "topology.kubernetes.io/zone";
/// Label selector of the objects that concern service proxies: kube-proxy's own.
const PROXIED_SELECTOR: &str =
    "!service.kubernetes.io/headless,!service.kubernetes.io/service-proxy-name";

/// Observations of the cluster that the agent has not taken yet.
#[derive(Debug, Default)]
pub(crate) struct ClusterInbox {
    /// `None` if no Services of the cluster are to be served.
    changes: Option<mpsc::Receiver<ClusterChange>>,
    batch: Vec<ClusterChange>,
}

impl ClusterInbox {
    /// Waits for observations. Nothing is lost when the future is dropped.
    pub(crate) async fn next(&mut self) -> Vec<ClusterChange> {
        let Some(changes) = &mut self.changes else { return pending().await };
        if changes.recv_many(&mut self.batch, BATCH_MAX).await == 0 {
            // The watches have ended, as at shutdown.
            self.changes = None;
            return pending().await;
        }
        std::mem::take(&mut self.batch)
    }
}

/// What the agent has of the API server, if it serves Services of the cluster.
#[derive(Default)]
pub(crate) struct ClusterConnection {
    /// Client; `None` if no Services of the cluster are to be served.
    pub(crate) client: Option<Client>,
    /// Observations of the cluster.
    pub(crate) inbox: ClusterInbox,
    /// Events on Services.
    pub(crate) events: ServiceEvents,
}

/// Error: the API server cannot be asked.
#[derive(Debug, thiserror::Error)]
pub enum ClusterWatchError {
    /// Neither a kubeconfig nor a pod's service account tells where the API server is.
    #[error("--clusterip needs the API server, and its address and credentials are not known")]
    Config(#[source] kube::config::InferConfigError),
    /// The client cannot be made.
    #[error("cannot make a client of the API server")]
    Client(#[source] kube::Error),
}

/// Starts the watches of `node`, and the task that writes Events, until `shutdown`. Without Services to serve, nothing.
pub(crate) async fn start(
    mode: ClusterIpMode,
    node: &str,
    tasks: &TaskTracker,
    shutdown: &CancellationToken,
) -> Result<ClusterConnection, ClusterWatchError> {
    if mode == ClusterIpMode::Off {
        return Ok(ClusterConnection::default());
    }
    let mut config = kube::Config::infer().await.map_err(ClusterWatchError::Config)?;
    // The API server sends a bookmark each minute. Without this, a watch of a host that has lost its power would be
    // noticed minutes later; the node's last known endpoints would be used meanwhile.
    config.read_timeout = Some(READ_TIMEOUT);
    config.reset_reader_on_write = true;
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    let client = Client::try_from(config).map_err(ClusterWatchError::Client)?;
    let events = ServiceEvents::start(client.clone(), node, tasks, shutdown);
    let (sender, changes) = mpsc::channel(CHANNEL_CAPACITY);
    let base = || Config::default().timeout(watch_seconds(node));
    let proxied = || base().labels(PROXIED_SELECTOR);
    let this_node = base().fields(&format!("metadata.name={node}"));
    let all = [
        tokio::spawn(watch::<Service>(client.clone(), proxied(), sender.clone())),
        tokio::spawn(watch::<EndpointSlice>(client.clone(), proxied(), sender.clone())),
        tokio::spawn(watch::<Namespace>(client.clone(), base(), sender.clone())),
        tokio::spawn(watch::<Node>(client.clone(), this_node, sender)),
    ];
    let shutdown = shutdown.clone();
    tasks.spawn(async move {
        shutdown.cancelled().await;
        all.iter().for_each(tokio::task::JoinHandle::abort);
    });
    let inbox = ClusterInbox { changes: Some(changes), batch: Vec::new() };
    Ok(ClusterConnection { client: Some(client), inbox, events })
}

/// Returns the length of one watch request in seconds, which differs from node to node: after a restart of the API
/// server all nodes begin at once, and should not all begin again at once.
fn watch_seconds(node: &str) -> u32 {
    let sum = node.bytes().fold(0_u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
    200 + sum % 90
}

/// Kind of object of which a watch makes observations.
trait Observed:
    kube::Resource<DynamicType = ()> + Clone + serde::de::DeserializeOwned + std::fmt::Debug + Send
{
    /// Kind in observations.
    const RESOURCE: ClusterResource;

    /// Returns the state of the object, and appends fields that are ignored.
    fn observe(&self, ignored: &mut Vec<ServiceDecodeError>) -> ClusterChange;

    /// Returns the observation that the object is gone.
    fn observe_deleted(&self) -> ClusterChange;
}

impl Observed for Service {
    const RESOURCE: ClusterResource = ClusterResource::Service;

    fn observe(&self, ignored: &mut Vec<ServiceDecodeError>) -> ClusterChange {
        let is_routed = label(&self.metadata, ROUTE_LABEL).is_some();
        let service = (!is_routed).then(|| ClusterIpService::from_kubernetes(self, ignored));
        let label = clusterip_label(&self.metadata);
        let observed = service.flatten().map(|service| ObservedService { service, label });
        ClusterChange::Service(object_name(&self.metadata), observed)
    }

    fn observe_deleted(&self) -> ClusterChange {
        ClusterChange::Service(object_name(&self.metadata), None)
    }
}

impl Observed for EndpointSlice {
    const RESOURCE: ClusterResource = ClusterResource::EndpointSlice;

    fn observe(&self, ignored: &mut Vec<ServiceDecodeError>) -> ClusterChange {
        let name = object_name(&self.metadata);
        let service = label(&self.metadata, SERVICE_NAME_LABEL).filter(|it| !it.is_empty());
        let observed = service.and_then(|service| {
            let slice = ServiceSlice::from_kubernetes(self, ignored)?;
            let service = NamespacedName::new(name.namespace.as_str(), service);
            Some(ObservedSlice { service, slice })
        });
        ClusterChange::Slice(name, observed)
    }

    fn observe_deleted(&self) -> ClusterChange {
        ClusterChange::Slice(object_name(&self.metadata), None)
    }
}

impl Observed for Namespace {
    const RESOURCE: ClusterResource = ClusterResource::Namespace;

    fn observe(&self, _ignored: &mut Vec<ServiceDecodeError>) -> ClusterChange {
        ClusterChange::Namespace(object_name(&self.metadata).name, clusterip_label(&self.metadata))
    }

    fn observe_deleted(&self) -> ClusterChange {
        ClusterChange::Namespace(object_name(&self.metadata).name, None)
    }
}

impl Observed for Node {
    const RESOURCE: ClusterResource = ClusterResource::Node;

    fn observe(&self, _ignored: &mut Vec<ServiceDecodeError>) -> ClusterChange {
        ClusterChange::Zone(label(&self.metadata, ZONE_LABEL).unwrap_or_default().into())
    }

    /// A node whose object is gone stays where it is, and keeps its pods for now.
    fn observe_deleted(&self) -> ClusterChange {
        self.observe(&mut Vec::new())
    }
}

/// Sends the observations of one kind until the receiver is gone.
async fn watch<K: Observed + 'static>(
    client: Client,
    config: Config,
    sender: mpsc::Sender<ClusterChange>,
) {
    let kind = K::RESOURCE.name();
    let mut events = std::pin::pin!(watch_streamed::<K>(Api::all(client), config, MAX_PAUSE));
    let mut is_broken = false;
    while let Some(event) = events.next().await {
        if is_broken && event.as_ref().is_ok_and(proves_recovery) {
            is_broken = false;
            info!(kind, "watch works again");
        }
        let change = match event {
            Ok(Event::Init) => ClusterChange::ListBegun(K::RESOURCE),
            Ok(Event::InitApply(object) | Event::Apply(object)) => observe(kind, &object),
            Ok(Event::Delete(object)) => object.observe_deleted(),
            Ok(Event::InitDone) => ClusterChange::ListCompleted(K::RESOURCE),
            Err(error) => {
                // One warning per outage: the watcher tries again many times.
                if !std::mem::replace(&mut is_broken, true) {
                    warn!(kind, error = %error_chain(&error), "watch broke and is begun again");
                }
                continue;
            }
        };
        if sender.send(change).await.is_err() {
            return;
        }
    }
}

/// Returns the state of an object, and logs fields that are ignored.
fn observe<K: Observed>(kind: &str, object: &K) -> ClusterChange {
    let mut ignored = Vec::new();
    let change = object.observe(&mut ignored);
    // An object has many endpoints, and a fault of one is often a fault of all.
    let ignored: BTreeSet<String> = ignored.iter().map(ToString::to_string).collect();
    if let Some(reason) = ignored.first() {
        let name = object_name(object.meta());
        warn!(kind, %name, reason, count = ignored.len(), "field of an object is ignored");
    }
    change
}

fn object_name(meta: &ObjectMeta) -> NamespacedName {
    let text = |value: &Option<String>| value.as_deref().unwrap_or_default().to_owned();
    NamespacedName::new(text(&meta.namespace), text(&meta.name))
}

fn label<'a>(meta: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    meta.labels.as_ref()?.get(key).map(String::as_str)
}

fn clusterip_label(meta: &ObjectMeta) -> ClusterIpLabel {
    label(meta, CLUSTERIP_LABEL)?.parse().ok()
}
