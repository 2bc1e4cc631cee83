//! Pure: a Revision at one moment, and the facts about its pods that pages show.

use std::num::NonZeroU16;

use common::wire::{AppProtocol, NamespacedName};
use smol_str::SmolStr;

use crate::{
    pods::endpoint_key::PodEndpointKey,
    revisions::{
        balance::PodRank,
        route_settings::{PodTable, PodTableEntry, RevisionRouteSettings},
        wait_queue::{PodQueueState, QueuedPod},
    },
    route_facts::{RevisionFacts, RoutedPodFacts, RoutedPodRank, RoutedPodState},
};

/// Most pods of one Revision that a page shows.
pub const MAX_SHOWN_PODS: usize = 100;

/// Revision at one moment, without the pods that only the table knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RevisionSnapshot {
    /// Settings in the RouteTable; `None`: the table does not contain the Revision.
    pub settings: Option<RevisionRouteSettings>,
    /// Number of requests that wait, for all ports.
    pub waiting: usize,
    /// Number of requests that may wait for one port.
    pub max_waiting: usize,
    /// Number of requests in flight, also at pods that the table does not contain any more.
    pub in_flight: u64,
    /// Pods of the wait queue. One that has left the table may be missing.
    pub pods: Vec<SnapshotPod>,
    /// Pod that would get the next request for the port of the snapshot; `None`: it would wait.
    pub next: Option<PodEndpointKey>,
    /// True if a further small request for the port of the snapshot may wait.
    pub has_room: bool,
}

/// Pod of a wait queue with its uid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotPod {
    /// Uid of the pod.
    pub uid: SmolStr,
    /// Load and state of the pod.
    pub queued: QueuedPod,
}

impl RevisionSnapshot {
    /// Returns the facts about the Revision, with the pods of the table. At most `max_pods` of them are listed.
    pub fn facts(&self, name: &NamespacedName, table: &PodTable, max_pods: usize) -> RevisionFacts {
        let limit = self.limit();
        let ready = table.values().filter(|pod| pod.takes_requests(limit)).count();
        let pods = table.iter().flat_map(|(uid, pod)| self.pod_facts(uid, pod));
        let settings = self.settings.as_ref();
        RevisionFacts {
            name: name.to_string(),
            is_known: settings.is_some(),
            protocol: settings.map(|it| protocol_name(it.protocol).to_owned()),
            concurrency_limit: limit,
            restricts_clients: settings.is_some_and(|it| it.allowed_sources.is_some()),
            waiting: self.waiting,
            max_waiting: self.max_waiting,
            in_flight: self.in_flight,
            ready_pods: ready,
            all_pods: table.len(),
            pods: pods.take(max_pods).collect(),
        }
    }

    /// Returns the facts about the pod that would get the next request for the port of the snapshot.
    pub fn next_pod_facts(&self, table: &PodTable) -> Option<RoutedPodFacts> {
        let next = self.pods.iter().find(|it| Some(it.queued.load.key) == self.next)?;
        let facts = self.pod_facts(&next.uid, table.get(next.uid.as_str())?);
        let port = next.queued.load.key.service_port.map(NonZeroU16::get);
        facts.into_iter().find(|it| it.service_port == port)
    }

    /// Number of pods in a state that have the port of a scaled Service, or serve a Knative Revision.
    pub fn count_pods(&self, service_port: Option<NonZeroU16>, state: PodQueueState) -> usize {
        let is_counted = |it: &&SnapshotPod| {
            it.queued.load.key.service_port == service_port && it.queued.state == state
        };
        self.pods.iter().filter(is_counted).count()
    }

    /// Hard limit of each pod; 0: no limit.
    pub fn limit(&self) -> u32 {
        self.settings.as_ref().map_or(0, |it| it.concurrency_limit)
    }

    /// Returns the facts about one pod: one row for each address at which it serves, or one without an address.
    fn pod_facts(&self, uid: &str, pod: &PodTableEntry) -> Vec<RoutedPodFacts> {
        let queued = self.pods.iter().filter(|it| it.uid == uid);
        let mut rows: Vec<RoutedPodFacts> =
            queued.map(|it| self.row(uid, pod, Some(it.queued))).collect();
        if rows.is_empty() {
            rows.push(self.row(uid, pod, None));
        }
        rows
    }

    /// Returns the facts about one pod: its entry in the table, and its part of the queue if it has one.
    fn row(&self, uid: &str, pod: &PodTableEntry, queued: Option<QueuedPod>) -> RoutedPodFacts {
        let takes_requests = pod.takes_requests(self.limit());
        let state = match (queued.map(|it| it.state), pod.is_ready, takes_requests) {
            (Some(PodQueueState::Paused), _, _) => RoutedPodState::Paused,
            // The last requests of an address that the pod has left: it may be ready at another one.
            (Some(PodQueueState::Closed), _, _) | (_, false, false) => RoutedPodState::NotReady,
            (Some(PodQueueState::Open) | None, true, _) => RoutedPodState::Ready,
            (Some(PodQueueState::Open) | None, false, true) => RoutedPodState::EarlyReady,
        };
        let load = queued.map(|it| it.load);
        let rank = load.map(|it| it.rank).unwrap_or_default();
        RoutedPodFacts {
            uid: uid.to_owned(),
            name: pod.name.to_string(),
            address: load.map(|it| it.key.address).or(pod.address),
            service_port: load.and_then(|it| it.key.service_port).map(NonZeroU16::get),
            node: pod.place.name.to_string(),
            zone: pod.place.zone.to_string(),
            state,
            rank: match rank {
                PodRank::Preferred => RoutedPodRank::Preferred,
                PodRank::Usual => RoutedPodRank::Usual,
                PodRank::Standby => RoutedPodRank::Standby,
            },
            in_flight: load.map_or(0, |it| it.in_flight),
            free_slots: load.filter(|_| self.limit() > 0).map(|it| it.free_slots),
            has_standby_order: pod.standby.is_some(),
        }
    }
}

fn protocol_name(protocol: AppProtocol) -> &'static str {
    match protocol {
        AppProtocol::Http1 => "http1",
        AppProtocol::H2c => "h2c",
        AppProtocol::Tcp => "tcp",
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use common::service_routing::{NodeTopology, TopologyHints};

    use super::*;
    use crate::revisions::balance::PodLoad;

    fn table_pod(last: u8, is_ready: bool) -> PodTableEntry {
        PodTableEntry {
            address: Some(SocketAddr::from(([10, 0, 0, last], 8080))),
            is_ready,
            is_starting: !is_ready,
            is_early_ready: false,
            standby: None,
            name: format!("pod-{last}").into(),
            place: NodeTopology { name: "n1".into(), zone: "a".into() },
            hints: TopologyHints::default(),
            ports: Box::default(),
        }
    }

    fn queued_pod(last: u8, in_flight: u32, state: PodQueueState) -> SnapshotPod {
        let address = SocketAddr::from(([10, 0, 0, last], 8080));
        let key = PodEndpointKey { service_port: None, address, id: u64::from(last) };
        let load = PodLoad { key, in_flight, free_slots: 0, rank: PodRank::Usual };
        SnapshotPod { uid: last.to_string().into(), queued: QueuedPod { load, state } }
    }

    fn snapshot(pods: Vec<SnapshotPod>) -> RevisionSnapshot {
        let in_flight = pods.iter().map(|it| u64::from(it.queued.load.in_flight)).sum();
        RevisionSnapshot {
            settings: None,
            waiting: 0,
            max_waiting: 10,
            in_flight,
            pods,
            next: None,
            has_room: true,
        }
    }

    #[test]
    fn a_pod_has_its_place_from_the_table_and_its_load_from_the_queue() {
        let table = PodTable::from([
            ("1".to_owned(), table_pod(1, true)),
            ("2".to_owned(), table_pod(2, true)),
            ("3".to_owned(), PodTableEntry { address: None, ..table_pod(3, false) }),
        ]);
        let mut snapshot = snapshot(vec![
            queued_pod(1, 4, PodQueueState::Open),
            queued_pod(2, 1, PodQueueState::Paused),
        ]);
        snapshot.next = Some(snapshot.pods[0].queued.load.key);
        let name = NamespacedName::new("default", "hello-1");
        let facts = snapshot.facts(&name, &table, MAX_SHOWN_PODS);
        assert_eq!((facts.name.as_str(), facts.is_known), ("default/hello-1", false));
        assert_eq!((facts.ready_pods, facts.all_pods, facts.in_flight), (2, 3, 5));
        let states: Vec<_> = facts.pods.iter().map(|it| (it.state, it.in_flight)).collect();
        let expected = [
            (RoutedPodState::Ready, 4),
            (RoutedPodState::Paused, 1),
            (RoutedPodState::NotReady, 0),
        ];
        assert_eq!(states, expected);
        assert_eq!((facts.pods[0].node.as_str(), facts.pods[0].zone.as_str()), ("n1", "a"));
        assert_eq!(facts.pods[2].address, None);
        assert_eq!(snapshot.next_pod_facts(&table).as_ref(), Some(&facts.pods[0]));
        assert_eq!(snapshot.count_pods(None, PodQueueState::Paused), 1);
    }

    #[test]
    fn an_address_that_a_pod_has_left_is_not_ready() {
        let table = PodTable::from([("1".to_owned(), table_pod(1, true))]);
        let mut left = queued_pod(9, 2, PodQueueState::Closed);
        left.uid = "1".into();
        let snapshot = snapshot(vec![queued_pod(1, 0, PodQueueState::Open), left]);
        let facts = snapshot.facts(&NamespacedName::EMPTY, &table, MAX_SHOWN_PODS);
        let states: Vec<_> = facts.pods.iter().map(|it| (it.state, it.in_flight)).collect();
        assert_eq!(states, [(RoutedPodState::Ready, 0), (RoutedPodState::NotReady, 2)]);
    }

    #[test]
    fn the_number_of_pods_is_exact_also_if_not_all_are_listed() {
        let table: PodTable = (0..9).map(|it| (it.to_string(), table_pod(it, true))).collect();
        let facts = snapshot(Vec::new()).facts(&NamespacedName::EMPTY, &table, 4);
        assert_eq!((facts.pods.len(), facts.ready_pods, facts.all_pods), (4, 9, 9));
    }

    #[test]
    fn a_pod_of_a_scaled_service_has_a_row_for_each_port() {
        let mut pods = [80, 443].map(|port| {
            let mut pod = queued_pod(1, u32::from(port), PodQueueState::Open);
            pod.queued.load.key.service_port = NonZeroU16::new(port);
            pod
        });
        pods[1].queued.load.key.address.set_port(8443);
        let table = PodTable::from([("1".to_owned(), table_pod(1, true))]);
        let mut snapshot = snapshot(pods.to_vec());
        snapshot.next = Some(pods[1].queued.load.key);
        let facts = snapshot.facts(&NamespacedName::EMPTY, &table, MAX_SHOWN_PODS);
        let ports: Vec<_> = facts.pods.iter().map(|it| (it.service_port, it.in_flight)).collect();
        assert_eq!(ports, [(Some(80), 80), (Some(443), 443)]);
        assert_eq!(snapshot.next_pod_facts(&table).as_ref(), Some(&facts.pods[1]));
    }
}
