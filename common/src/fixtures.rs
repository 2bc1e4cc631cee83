//! Pure: RouteTable entries for tests and benchmarks, behind the feature `fixtures`.
//!
//! The functions take what differs in most tests, and set each other field to a neutral value. A test states further
//! values that it depends on: `PodEntry { node: "n1".into(), ..fixtures::pod("a", &revision, RoutingPhase::Ready) }`.

use std::{
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
    time::Duration,
};

use crate::{
    service_routing::TopologyHints,
    wire::{
        ActivatorEntry, AppProtocol, ConnectionPath, NamespacedName, PodEntry, PodPort,
        ReadinessProbe, RevisionEntry, RouteTarget, RoutingPhase, ServiceEntry, StandbyOrder,
    },
};

pub mod certificates;
pub mod gateway;
pub mod ports;

pub use certificates::{TestAuthority, TestCertificate};
pub use gateway::{backend, gateway_host, http_rule, mapped_domain, ruled_domain};

/// Port of each service but the [sleeping ones](sleeping_service).
const SERVICE_PORT: NonZeroU16 = NonZeroU16::new(80).expect("not zero");
/// Port of each service at the activators, and the first such port of the [sleeping ones](sleeping_service).
const ACTIVATOR_PORT: NonZeroU16 = NonZeroU16::new(20_000).expect("not zero");
/// Serving port of every pod.
const POD_PORT: NonZeroU16 = NonZeroU16::new(8080).expect("not zero");

/// Returns a service on the direct path with all its traffic at one Revision, without addresses and hosts. Its Route
/// waits for no agent.
pub fn service(name: &NamespacedName, revision: &NamespacedName) -> ServiceEntry {
    ServiceEntry {
        name: name.clone(),
        addresses: Vec::new(),
        awaits_agents: false,
        port: SERVICE_PORT,
        activator_port: ACTIVATOR_PORT,
        targets: vec![RouteTarget { revision: revision.clone(), percent: 100 }],
        connection_path: ConnectionPath::Direct,
        hosts: Vec::new(),
        gateway_rules: None,
        protocol: None,
        uses_pod_ports: false,
        affinity: None,
        serves_local_tls: false,
    }
}

/// Returns the entry for a port of a scaled Service on the direct path, without addresses. Its target is the Revision
/// with the Service's name.
///
/// # Panics
///
/// If the port is 0.
pub fn scaled_port(
    service_name: &NamespacedName,
    port: u16,
    protocol: AppProtocol,
) -> ServiceEntry {
    let port = NonZeroU16::new(port).expect("a service has a port");
    ServiceEntry {
        port,
        protocol: Some(protocol),
        uses_pod_ports: true,
        ..service(&service_name.with_port(port), service_name)
    }
}

/// Returns a Revision of the Service `service` with Knative's default timeouts, which has traffic and has reached its
/// initial scale. It has no scale policy.
pub fn revision(name: &NamespacedName, service: &str) -> RevisionEntry {
    RevisionEntry {
        name: name.clone(),
        service: service.into(),
        configuration: service.into(),
        container_concurrency: 0,
        timeout: Duration::from_secs(300),
        response_start_timeout: None,
        idle_timeout: None,
        protocol: AppProtocol::Http1,
        policy: None,
        reachable: true,
        initial_scale_reached: true,
        allowed_sources: None,
    }
}

/// Returns a pod that is named after its uid, without node and address. It is ready when its process listens.
pub fn pod(uid: &str, revision: &NamespacedName, phase: RoutingPhase) -> PodEntry {
    PodEntry {
        uid: uid.into(),
        name: uid.into(),
        revision: revision.clone(),
        node: String::new(),
        zone: String::new(),
        hints: TopologyHints::default(),
        phase,
        address: None,
        other_family_address: None,
        kubelet_ready: false,
        awaits_report: false,
        port: POD_PORT,
        probe: ReadinessProbe::listener_probe(),
        ports: Vec::new(),
        keeps_binds: false,
        standby: None,
        container_restarts: false,
    }
}

/// Returns a standby order that keeps the pod's memory.
pub fn standby_order() -> StandbyOrder {
    StandbyOrder {
        quiet_time: Duration::from_secs(60),
        probe_time: Duration::from_secs(1),
        reclaims_memory: false,
        agent_timeout: StandbyOrder::DEFAULT_AGENT_TIMEOUT,
    }
}

/// Returns the port of a pod for a port of a scaled Service.
///
/// # Panics
///
/// If one of the ports is 0.
pub fn pod_port(service_port: u16, port: u16, protocol: AppProtocol) -> PodPort {
    let [service_port, port] =
        [service_port, port].map(|it| NonZeroU16::new(it).expect("not zero"));
    PodPort { service_port, port, protocol }
}

/// Returns a pod that serves at `address`; the rest is as in [`pod`].
///
/// # Panics
///
/// If the port of the address is 0.
pub fn pod_at(
    uid: &str,
    revision: &NamespacedName,
    phase: RoutingPhase,
    address: SocketAddr,
) -> PodEntry {
    let port = NonZeroU16::new(address.port()).expect("a pod serves on a port");
    PodEntry { address: Some(address), port, ..pod(uid, revision, phase) }
}

/// Returns an activator without a node, which gets no reports of agents.
pub fn activator(name: &str, addresses: Vec<IpAddr>) -> ActivatorEntry {
    ActivatorEntry {
        name: name.into(),
        node: String::new(),
        zone: String::new(),
        addresses,
        gets_all_reports: false,
    }
}

/// Returns one of up to 65,536 sleeping services and its Revision, with names of the length of real users' names. Its
/// port is 1; from 10,000 services on, several share a port at the activators.
pub fn sleeping_service(number: u16) -> (ServiceEntry, RevisionEntry) {
    let namespace = format!("team-{:03}-production", number % 100);
    let service_name = format!("orders-checkout-worker-{number}");
    let revision_name = NamespacedName::new(namespace.as_str(), format!("{service_name}-00001"));
    let name = NamespacedName::new(namespace, service_name);
    let service = ServiceEntry {
        addresses: sleeping_service_addresses(number).into(),
        port: NonZeroU16::MIN,
        activator_port: ACTIVATOR_PORT.saturating_add(number % 10_000),
        hosts: vec![format!("{}.{}.127.0.0.1.sslip.io", name.name, name.namespace)],
        ..service(&name, &revision_name)
    };
    // The Revision shares the memory of the Service's name.
    let revision = RevisionEntry {
        service: name.name.clone(),
        configuration: name.name,
        ..revision(&revision_name, "")
    };
    (service, revision)
}

/// Returns the ClusterIPs of [`sleeping_service`].
pub fn sleeping_service_addresses(number: u16) -> [IpAddr; 2] {
    let [high, low] = number.to_be_bytes();
    [[10, 96, high, low].into(), [0xfd00, 0x10, 0x96, 0, 0, 0, 0, number].into()]
}
