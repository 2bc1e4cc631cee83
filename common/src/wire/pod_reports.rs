//! Pure: reports of agents and activators about pods.

use std::net::{IpAddr, SocketAddr};

use super::{ComponentReplica, NamespacedName, StandbyReport};

/// One item of a PodReport stream. The first names the sender.
#[derive(Clone, Debug, PartialEq)]
pub enum PodReportItem {
    /// Replica that sends the stream.
    Sender(ComponentReplica),
    /// State of one pod on the sender's node.
    Observed(PodObservation),
    /// The pod, named by its uid, is no longer on this node.
    Removed(String),
    /// This version of the RouteTable is in force at the sender. Only the replica that serves that table uses it.
    Applied(u64),
    /// Drain acknowledgement: the sender opens no new connection to this draining pod. Every replica uses it.
    DrainAck(String),
    /// The sender may open new connections to the pod again, or the pod is no longer in the table.
    DrainAckRemoved(String),
    /// The sender, an activator, will name each service that it routes to some Revision. Every replica uses it.
    RoutedServicesAnnounced,
    /// The sender, an agent, will name each service that awaits agents, once it leads connects to it as its table says.
    /// Every replica uses it.
    AwaitedServicesAnnounced,
    /// The sender routes requests for this service to some Revision, or leads connects to it. Every replica uses it.
    RoutedService(NamespacedName),
    /// The sender no longer routes requests for this service to a Revision, or the service awaits no agents any more.
    RoutedServiceRemoved(NamespacedName),
    /// The sender, an activator, passes over this pod with a standby order: nothing shows that the pod was thawed for
    /// the last requests. Every replica uses it.
    PassedOver(String),
    /// The sender sends requests to the pod again, or the pod has no standby order any more.
    PassedOverRemoved(String),
    /// The sender has named every pod.
    Synced,
}

/// State of one pod, as the agent on its node observes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodObservation {
    /// Uid of the pod.
    pub uid: String,
    /// Address and port that the pod serves on, read from its own network namespace.
    pub address: Option<SocketAddr>,
    /// Address of the other family, if the pod serves there too.
    pub other_family_address: Option<IpAddr>,
    /// True if a process listens on the serving port.
    pub listening: bool,
    /// True if a process listens and the readiness probe passes.
    pub ready: bool,
    /// True if for at least 1 s nothing is in flight and no connection awaits its first request.
    pub drained: bool,
    /// Requests in flight, as the eBPF programs count them.
    pub in_flight: u64,
    /// Time at which the pod began to listen, CLOCK_MONOTONIC of its node in ns; 0: it does not listen.
    pub listening_since_ns: u64,
    /// Reason for not being ready, for the user; empty when there is no error.
    pub not_ready_reason: String,
    /// True if the requests at all ports that the RouteTable names for the pod are counted. An agent of an earlier
    /// release counts those at the serving port only, and states nothing.
    pub counts_all_ports: bool,
    /// State of the pod under its standby order; `None`: the agent knows no order for it, so the pod runs.
    pub standby: Option<StandbyReport>,
    /// True from a preStop request of the kubelet until a container is known to run again. The pod ends, or the kubelet
    /// restarts a container: the agent cannot tell. An agent of an earlier release states nothing.
    pub awaits_stop: bool,
}
