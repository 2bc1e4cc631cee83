//! Pure: a Revision in the RouteTable: its settings and its pods.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    num::NonZeroU16,
    sync::Arc,
    time::Duration,
};

use common::{
    service_routing::{NodeTopology, SelectionRule, TopologyHints},
    wire::{self, AllowedSources, AppProtocol, PodPort, StandbyOrder},
};
use smol_str::SmolStr;

use crate::revisions::balance::PodRank;

/// Settings of a Revision in the RouteTable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RevisionRouteSettings {
    /// Hard limit of each pod (containerConcurrency); 0: no limit.
    pub concurrency_limit: u32,
    /// Protocol that its pods speak on their serving port.
    pub protocol: AppProtocol,
    /// Timeouts of its requests.
    pub timeouts: RequestTimeouts,
    /// Clients that may send requests, by the pods' NetworkPolicies; `None`: all clients.
    pub allowed_sources: Option<Arc<AllowedSources>>,
    /// Service and Configuration that own the Revision.
    pub owner_names: RevisionOwnerNames,
}

/// Owners of a Revision, for the request log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RevisionOwnerNames {
    /// Name of the Service; empty: a Configuration without a Service.
    pub service: SmolStr,
    /// Name of the Configuration that made the Revision.
    pub configuration: SmolStr,
}

impl RevisionRouteSettings {
    /// Extracts the settings from a Revision of the RouteTable.
    pub fn new(entry: &wire::RevisionEntry) -> Self {
        let timeouts = RequestTimeouts {
            total: entry.timeout,
            response_start: entry.response_start_timeout,
            between_frames: entry.idle_timeout,
        };
        let allowed_sources = entry.allowed_sources.clone();
        let concurrency_limit = entry.container_concurrency;
        let owner_names = RevisionOwnerNames {
            service: entry.service.clone(),
            configuration: entry.configuration.clone(),
        };
        Self { concurrency_limit, protocol: entry.protocol, timeouts, allowed_sources, owner_names }
    }
}

/// Timeouts of a Revision's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestTimeouts {
    /// Time for a whole request, including the time it waits (`timeoutSeconds`).
    pub total: Duration,
    /// Time until the response begins (`responseStartTimeoutSeconds`).
    pub response_start: Option<Duration>,
    /// Time between two pieces of the response (`idleTimeoutSeconds`).
    pub between_frames: Option<Duration>,
}

/// One pod of a Revision in the RouteTable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodTableEntry {
    /// Address and port of its container, once they are known.
    pub address: Option<SocketAddr>,
    /// True if the RouteTable lists the pod as ready.
    pub is_ready: bool,
    /// True if the RouteTable lists the pod as starting.
    pub is_starting: bool,
    /// True if the agent of its node reports the pod as ready, while the RouteTable still lists it as starting.
    pub is_early_ready: bool,
    /// Standby order: the pod is frozen while nothing uses it; `None`: it runs.
    pub standby: Option<StandbyOrder>,
    /// Name of the pod, without its namespace.
    pub name: SmolStr,
    /// Node that the pod runs on, and its zone; empty where they are not known.
    pub place: NodeTopology,
    /// Clients that should use the pod.
    pub hints: TopologyHints,
    /// Ports to which a scaled Service leads; empty for a pod of a Knative Revision.
    pub ports: Box<[PodPort]>,
}

/// Address at which a pod takes requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodServingAddress {
    /// Port of the scaled Service whose requests it takes; `None`: it takes all requests of its Knative Revision.
    pub service_port: Option<NonZeroU16>,
    /// IP address of the pod, and the port on which it listens.
    pub address: SocketAddr,
    /// Protocol that the pod speaks there.
    pub protocol: AppProtocol,
}

impl PodTableEntry {
    /// Returns true if the pod takes requests, with the Revision's hard limit; 0: it has none. With a limit, an
    /// early-ready pod takes none yet: activators grant slots only of pods that the table lists as ready.
    pub fn takes_requests(&self, limit: u32) -> bool {
        self.is_ready || (self.is_early_ready && limit == 0)
    }

    /// Addresses at which the pod takes requests: one for each port of a scaled Service that it has. A pod of a Knative
    /// Revision has one, for the Revision's `protocol`. None until the pod's network exists.
    pub fn serving_addresses(
        &self,
        protocol: AppProtocol,
    ) -> impl Iterator<Item = PodServingAddress> {
        self.address.into_iter().flat_map(move |address| {
            let own = PodServingAddress { service_port: None, address, protocol };
            let ports = self.ports.iter().map(move |it| PodServingAddress {
                service_port: Some(it.service_port),
                address: SocketAddr::new(address.ip(), it.port.get()),
                protocol: it.protocol,
            });
            self.ports.is_empty().then_some(own).into_iter().chain(ports)
        })
    }
}

/// Pods of one Revision in the RouteTable, by uid.
pub type PodTable = BTreeMap<String, PodTableEntry>;

/// Places of the activators in the cluster, by which hints of pods count.
#[derive(Clone, Debug, Default)]
pub struct ActivatorTopology {
    /// Node and zone of this activator.
    pub own_place: NodeTopology,
    /// Zones of all activators.
    pub zones: BTreeSet<SmolStr>,
}

/// Ranking of a Revision's pods for the requests of one activator, by their standby orders and their hints.
#[derive(Debug)]
pub struct PodRanking<'a> {
    /// True if a pod without a standby order takes requests, so that those with one stay frozen.
    prefers_running: bool,
    /// Rule by the hints of the ready pods that need not stay frozen.
    rule: SelectionRule,
    topology: &'a ActivatorTopology,
}

impl<'a> PodRanking<'a> {
    /// Derives the ranking from all pods of the Revision, with their hard limit.
    pub fn new(pods: &PodTable, limit: u32, topology: &'a ActivatorTopology) -> Self {
        let is_running = |pod: &PodTableEntry| pod.takes_requests(limit) && pod.standby.is_none();
        let prefers_running = pods.values().any(is_running);
        // Without the pods that stay frozen, or their hints might leave no pod to prefer.
        let ready = pods
            .values()
            .filter(move |pod| pod.is_ready && !(prefers_running && pod.standby.is_some()));
        let rule = SelectionRule::of_hints(ready.map(|pod| &pod.hints), &topology.own_place);
        Self { prefers_running, rule, topology }
    }

    /// Returns the rank of a pod of the Revision.
    pub fn rank(&self, pod: &PodTableEntry) -> PodRank {
        if self.prefers_running && pod.standby.is_some() {
            PodRank::Standby
        } else if pod.is_ready && self.prefers(&pod.hints) {
            PodRank::Preferred
        } else {
            // The hints of an early-ready pod are not known yet.
            PodRank::Usual
        }
    }

    /// Returns true if the activator prefers a ready pod with these hints.
    ///
    /// Where hints for zones count, some pods are for a zone without an activator. Each activator prefers them as well,
    /// or they would get hardly any request.
    fn prefers(&self, hints: &TopologyHints) -> bool {
        let is_for_all =
            self.rule == SelectionRule::SameZone && !self.topology.zones.contains(&hints.zone);
        self.rule != SelectionRule::Ready
            && (is_for_all || self.rule.selects(hints, &self.topology.own_place))
    }
}

#[cfg(test)]
mod tests {
    use common::fixtures;

    use super::*;

    /// Returns a ready pod with a hint for a zone; empty: it has none.
    fn ready_pod(zone: &str) -> PodTableEntry {
        PodTableEntry {
            address: None,
            is_ready: true,
            is_starting: false,
            is_early_ready: false,
            standby: None,
            name: "p".into(),
            place: NodeTopology::default(),
            hints: TopologyHints { zone: zone.into(), ..TopologyHints::default() },
            ports: Box::default(),
        }
    }

    /// Returns the rank of each pod for an activator in a zone.
    fn ranks<const N: usize>(
        pods: &[PodTableEntry; N],
        limit: u32,
        zone: &str,
        activator_zones: &[&str],
    ) -> [PodRank; N] {
        let named = pods.iter().enumerate().map(|(at, pod)| (at.to_string(), pod.clone()));
        let topology = ActivatorTopology {
            own_place: NodeTopology { name: "n1".into(), zone: zone.into() },
            zones: activator_zones.iter().map(|it| SmolStr::from(*it)).collect(),
        };
        let table: PodTable = named.collect();
        let ranking = PodRanking::new(&table, limit, &topology);
        pods.each_ref().map(|pod| ranking.rank(pod))
    }

    /// Returns the uids of the preferred ones of these pods, which are pairs of uid and hint for a zone.
    fn preferred<const N: usize>(
        pods: &[(&str, &str); N],
        zone: &str,
        activator_zones: &[&str],
    ) -> Vec<String> {
        let entries = pods.map(|(_, zone)| ready_pod(zone));
        let ranks = ranks(&entries, 0, zone, activator_zones);
        let ranked = pods.iter().zip(ranks);
        let preferred = ranked.filter(|(_, rank)| *rank == PodRank::Preferred);
        preferred.map(|((uid, _), _)| (*uid).to_owned()).collect()
    }

    #[test]
    fn a_pod_takes_requests_at_its_own_port_or_at_each_port_of_its_service() {
        use AppProtocol::{H2c, Http1, Tcp};
        let own = SocketAddr::from(([10, 0, 0, 1], 8080));
        let serving = |address: Option<SocketAddr>, ports: &[PodPort]| -> Vec<PodServingAddress> {
            let pod = PodTableEntry { address, ports: ports.into(), ..ready_pod("") };
            pod.serving_addresses(H2c).collect()
        };
        let at = |service_port, port, protocol| {
            let address = SocketAddr::new(own.ip(), port);
            PodServingAddress { service_port: NonZeroU16::new(service_port), address, protocol }
        };
        let ports = [fixtures::pod_port(80, 8080, Http1), fixtures::pod_port(5432, 5433, Tcp)];
        assert_eq!(serving(Some(own), &[]), [at(0, 8080, H2c)]);
        assert_eq!(serving(Some(own), &ports), [at(80, 8080, Http1), at(5432, 5433, Tcp)]);
        assert!(serving(None, &ports).is_empty() && serving(None, &[]).is_empty());
    }

    #[test]
    fn every_pod_is_preferred_by_some_activator() {
        let pods = [("one", "a"), ("two", "b"), ("three", "c")];
        assert_eq!(preferred(&pods, "a", &["a", "b", "c"]), ["one"]);
        assert_eq!(preferred(&pods, "a", &["a", "b"]), ["one", "three"]);
        assert_eq!(preferred(&pods, "b", &["a", "b"]), ["two", "three"]);
        assert_eq!(preferred(&pods, "a", &["a"]), ["one", "two", "three"]);
    }

    #[test]
    fn standby_pods_come_last_while_another_pod_takes_requests() {
        use PodRank::{Preferred, Standby, Usual};
        let standby = |zone: &str| PodTableEntry {
            standby: Some(fixtures::standby_order()),
            ..ready_pod(zone)
        };
        let in_zone = |pods: [PodTableEntry; 3], limit| ranks(&pods, limit, "a", &["a", "b"]);
        let starting = PodTableEntry { is_ready: false, ..ready_pod("") };
        let early = PodTableEntry { is_early_ready: true, ..starting.clone() };
        let orders = [standby("a"), standby("b")];
        let with = |third: &PodTableEntry| [orders[0].clone(), orders[1].clone(), third.clone()];
        for limit in [0, 1] {
            assert_eq!(in_zone(with(&starting), limit), [Preferred, Usual, Usual]);
            // The hints of a pod that stays frozen do not count.
            assert_eq!(in_zone(with(&ready_pod("a")), limit), [Standby, Standby, Preferred]);
            assert_eq!(in_zone(with(&ready_pod("")), limit), [Standby, Standby, Usual]);
        }
        assert_eq!(in_zone(with(&early), 0), [Standby, Standby, Usual]);
        assert_eq!(in_zone(with(&early), 1), [Preferred, Usual, Usual], "it has no slots yet");
    }

    #[test]
    fn without_hints_that_count_no_pod_is_preferred() {
        let partial = [("one", "a"), ("two", "")];
        assert_eq!(preferred(&partial, "a", &["a"]), [""; 0]);
        let elsewhere = [("one", "b"), ("two", "c")];
        assert_eq!(preferred(&elsewhere, "a", &["a", "b"]), [""; 0]);
    }
}
