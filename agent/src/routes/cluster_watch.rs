//! Shell: watches of the cluster's Services, for a node that serves them in kube-proxy's place.
//!
//! The agent watches them itself: whatever stands in for kube-proxy may depend on nothing but the API server.

use std::{collections::BTreeSet, future::pending, net::SocketAddr, time::Duration};

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
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    runtime::watcher::{Config, Event},
};
use tokio::sync::mpsc;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{info, warn};
use watches::{OutageChange, WatchOutage, watch_streamed};

use super::{
    api_client::ApiServerClient,
    plan::{ClusterChange, ClusterIpLabel, ClusterResource, ObservedService, ObservedSlice},
};
use crate::{
    api_servers::ApiServerRotation,
    config::{AgentConfig, ClusterIpMode},
    health::{ProxyHealth, TO_BE_DELETED_TAINT},
};

/// Longest pause before a broken watch is begun again. kube-proxy's client waits as long: a cluster has many nodes.
const MAX_PAUSE: Duration = Duration::from_secs(30);
/// Number of observations that wait; when the channel is full, watches pause.
const CHANNEL_CAPACITY: usize = 1_024;
/// Number of observations that the loop takes at once.
const BATCH_MAX: usize = 256;
/// Label of a Service or namespace that this node serves, or does not.
const CLUSTERIP_LABEL: &str = "rouse.dev/clusterip";
/// Label of the Services of Rouse's Routes, which the RouteTable has.
const ROUTE_LABEL: &str = "serving.knative.dev/route";
/// Label and value of the Services of the cluster's DNS, whatever their names.
const DNS_LABEL: (&str, &str) = ("k8s-app", "kube-dns");
/// Namespace of these Services. Users may set the label in theirs, and must not fill the bootstrap file by that.
const DNS_NAMESPACE: &str = "kube-system";
/// Label of an EndpointSlice with the name of its Service.
const SERVICE_NAME_LABEL: &str = "kubernetes.io/service-name";
/// Annotation of an EndpointSlice with the time of the event that caused its last change.
const TRIGGER_TIME_ANNOTATION: &str = "endpoints.kubernetes.io/last-change-trigger-time";
/// Label of a node with its zone.
const ZONE_LABEL: &str = "topology.kubernetes.io/zone";
/// Reason of a node whose object does not exist.
const NODE_GONE: &str = "its object is gone";
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
    /// Returns true if observations wait.
    pub(crate) fn has_waiting(&self) -> bool {
        self.changes.as_ref().is_some_and(|changes| !changes.is_empty())
    }

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

/// Makes the client of the API servers: the given ones, the learnt ones that an earlier agent remembered, and those that
/// [`ApiServerClient::set_learnt`] names later. Returns `None` without Services to serve.
pub(crate) async fn make_client(
    settings: &AgentConfig,
    learnt: &BTreeSet<SocketAddr>,
) -> Result<Option<ApiServerClient>, ClusterWatchError> {
    if settings.clusterip == ClusterIpMode::Off {
        return Ok(None);
    }
    let mut config = kube::Config::infer().await.map_err(ClusterWatchError::Config)?;
    watches::bound_silence(&mut config);
    // Each node begins with another server, which spreads the watches of all nodes.
    let offset = node_number(&settings.node) as usize;
    let mut rotation = ApiServerRotation::new(&settings.apiservers, offset);
    rotation.set_learnt(learnt);
    let client = ApiServerClient::new(config, rotation).map_err(ClusterWatchError::Client)?;
    Ok(Some(client))
}

/// Starts the watches of `node` at the API servers, which run until `shutdown`. Without a client, none. `health` learns
/// from them if the node is about to be deleted.
pub(crate) fn start(
    api_servers: Option<&ApiServerClient>,
    node: &str,
    health: &ProxyHealth,
    tasks: &TaskTracker,
    shutdown: &CancellationToken,
) -> ClusterInbox {
    let Some(client) = api_servers.map(ApiServerClient::client) else {
        return ClusterInbox::default();
    };
    let (sender, changes) = mpsc::channel(CHANNEL_CAPACITY);
    let base = || Config::default().timeout(watch_seconds(node));
    let proxied = || base().labels(PROXIED_SELECTOR);
    let this_node = base().fields(&format!("metadata.name={node}"));
    let sink = ObservationSink { sender, health: health.clone() };
    let all = [
        tokio::spawn(watch::<Service>(client.clone(), proxied(), sink.clone())),
        tokio::spawn(watch::<EndpointSlice>(client.clone(), proxied(), sink.clone())),
        tokio::spawn(watch::<Namespace>(client.clone(), base(), sink.clone())),
        tokio::spawn(watch::<Node>(client, this_node, sink)),
    ];
    let shutdown = shutdown.clone();
    tasks.spawn(async move {
        // An abort loses nothing: the watches only read, and the maps keep what was observed.
        shutdown.cancelled().await;
        all.iter().for_each(tokio::task::JoinHandle::abort);
    });
    ClusterInbox { changes: Some(changes), batch: Vec::new() }
}

/// Returns the length of one watch request in seconds, which differs from node to node: after a restart of the API
/// server all nodes begin at once, and should not all begin again at once.
fn watch_seconds(node: &str) -> u32 {
    200 + node_number(node) % 90
}

/// Returns a number that differs from node to node, and is the same after each start.
fn node_number(node: &str) -> u32 {
    node.bytes().fold(0_u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()))
}

/// Receivers of what watches observe.
#[derive(Clone, Debug)]
struct ObservationSink {
    sender: mpsc::Sender<ClusterChange>,
    health: ProxyHealth,
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

    /// Records what the object shows about the health of this node. `is_deleted`: the object is gone.
    fn observe_health(&self, _is_deleted: bool, _health: &ProxyHealth) {}

    /// Records what a list without objects shows about the health of this node.
    fn observe_empty_list(_health: &ProxyHealth) {}
}

impl Observed for Service {
    const RESOURCE: ClusterResource = ClusterResource::Service;

    fn observe(&self, ignored: &mut Vec<ServiceDecodeError>) -> ClusterChange {
        let is_routed = label(&self.metadata, ROUTE_LABEL).is_some();
        let service = (!is_routed).then(|| ClusterIpService::from_kubernetes(self, ignored));
        let label = clusterip_label(&self.metadata);
        let (dns_key, dns_value) = DNS_LABEL;
        let is_dns = self.metadata.namespace.as_deref() == Some(DNS_NAMESPACE)
            && self::label(&self.metadata, dns_key) == Some(dns_value);
        let observed = service.flatten().map(|service| ObservedService { service, label, is_dns });
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
            Some(ObservedSlice { service, slice, triggered_ms: triggered_ms(&self.metadata) })
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

    fn observe_health(&self, is_deleted: bool, health: &ProxyHealth) {
        health.set_deletion_reason(deletion_reason(self, is_deleted));
    }

    /// The object may go while the watch is broken: then no event tells it.
    fn observe_empty_list(health: &ProxyHealth) {
        health.set_deletion_reason(Some(NODE_GONE));
    }
}

/// Returns the reason for which a node is about to be deleted; `None`: it is not, as far as its object shows.
fn deletion_reason(node: &Node, is_deleted: bool) -> Option<&'static str> {
    let mut taints = node.spec.iter().flat_map(|it| it.taints.iter().flatten());
    if is_deleted {
        Some(NODE_GONE)
    } else if node.metadata.deletion_timestamp.is_some() {
        Some("its object is being deleted")
    } else if taints.any(|it| it.key == TO_BE_DELETED_TAINT) {
        Some("it has the taint ToBeDeletedByClusterAutoscaler")
    } else {
        None
    }
}

/// Returns the time of the event that caused the last change of an EndpointSlice, in ms since the epoch. `None` if it
/// is not stated, or not in a form that Kubernetes writes.
fn triggered_ms(meta: &ObjectMeta) -> Option<i64> {
    let stated = meta.annotations.as_ref()?.get(TRIGGER_TIME_ANNOTATION)?;
    Some(stated.parse::<Timestamp>().ok()?.as_millisecond())
}

/// Sends the observations of one kind until the receiver is gone.
async fn watch<K: Observed + 'static>(client: Client, config: Config, sink: ObservationSink) {
    let kind = K::RESOURCE.name();
    let mut events = std::pin::pin!(watch_streamed::<K>(Api::all(client), config, MAX_PAUSE));
    let (mut outage, mut is_list_empty) = (WatchOutage::default(), true);
    while let Some(event) = events.next().await {
        let outage_change = outage.record(&event);
        if outage_change == Some(OutageChange::Ended) {
            info!(kind, "watch works again");
        }
        let change = match event {
            Ok(Event::Init) => {
                is_list_empty = true;
                ClusterChange::ListBegun(K::RESOURCE)
            }
            Ok(Event::InitApply(object) | Event::Apply(object)) => {
                is_list_empty = false;
                object.observe_health(false, &sink.health);
                observe(kind, &object)
            }
            Ok(Event::Delete(object)) => {
                object.observe_health(true, &sink.health);
                object.observe_deleted()
            }
            Ok(Event::InitDone) => {
                // No event tells that the only object of a kind was deleted while the watch was broken.
                if is_list_empty {
                    K::observe_empty_list(&sink.health);
                }
                ClusterChange::ListCompleted(K::RESOURCE)
            }
            Err(error) => {
                if outage_change == Some(OutageChange::Began) {
                    warn!(kind, error = %error_chain(&error), "watch broke and is begun again");
                }
                // The stream of events begins the watch again by itself, after a pause.
                continue;
            }
        };
        if sink.sender.send(change).await.is_err() {
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

#[cfg(test)]
mod tests {
    use k8s_openapi::serde_json::{Value, from_value, json};

    use super::*;

    #[test]
    fn a_node_that_is_about_to_be_deleted_gives_the_reason() {
        let reason = |node: Value| deletion_reason(&from_value(node).expect("a Node"), false);
        let taint = |key: &str| json!({"key": key, "effect": "NoSchedule"});
        let tainted = |key: &str| json!({"spec": {"taints": [taint(key)]}});
        assert_eq!(reason(json!({})), None);
        assert_eq!(reason(tainted("node.kubernetes.io/unschedulable")), None);
        let of_taint = reason(tainted(TO_BE_DELETED_TAINT)).expect("a reason");
        assert!(of_taint.contains(TO_BE_DELETED_TAINT), "{of_taint}");
        let deleting = json!({"metadata": {"deletionTimestamp": "2026-11-29T07:00:00Z"}});
        assert_eq!(reason(deleting), Some("its object is being deleted"));
        assert_eq!(deletion_reason(&Node::default(), true), Some("its object is gone"));
    }

    #[test]
    fn only_the_namespace_of_the_system_has_the_dns_of_the_cluster() {
        let is_dns = |namespace: &str, app: &str| {
            let object = json!({
                "metadata": {"name": "a", "namespace": namespace, "labels": {"k8s-app": app}},
                "spec": {"clusterIP": "10.96.0.9", "clusterIPs": ["10.96.0.9"]},
            });
            let service: Service = from_value(object).expect("a Service");
            match service.observe(&mut Vec::new()) {
                ClusterChange::Service(_, observed) => observed.expect("a ClusterIP").is_dns,
                other => panic!("{other:?}"),
            }
        };
        assert!(is_dns("kube-system", "kube-dns"));
        assert!(!is_dns("kube-system", "web"));
        assert!(!is_dns("shop", "kube-dns"));
    }

    #[test]
    fn the_trigger_time_of_a_slice_is_read_and_a_bad_one_ignored() {
        let time = |value: &str| {
            let annotations = [(TRIGGER_TIME_ANNOTATION.to_owned(), value.to_owned())];
            let annotations = Some(annotations.into());
            triggered_ms(&ObjectMeta { annotations, ..ObjectMeta::default() })
        };
        assert_eq!(time("1970-01-01T00:00:01Z"), Some(1_000));
        assert_eq!(time("1970-01-01T00:00:01.234567891Z"), Some(1_234));
        assert_eq!(time("1970-01-01T01:00:00+01:00"), Some(0));
        assert_eq!(time("yesterday"), None);
        assert_eq!(triggered_ms(&ObjectMeta::default()), None);
    }
}
