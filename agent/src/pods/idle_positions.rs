//! Pure: positions at which connections of watched pods have become idle.
//!
//! A position stays true for as long as the connection stands there. So nothing is lost if it is read late, and a
//! watcher that has missed some asks for all that came after the last one that it knows.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv6Addr, SocketAddr},
    ops::Bound::{Excluded, Unbounded},
    time::{Duration, Instant},
};

use datapath::abi::IdleEvent;

use crate::kernel::locked_close::IdlePosition;

/// Time after the newest query for which a pod stays watched. Queries follow each other within a second.
const WATCH_TIME: Duration = Duration::from_secs(5);
/// Most connections of one pod whose positions are kept. Older ones are forgotten: a client that still stands at one is
/// found by a scan.
const POSITIONS_MAX: usize = 8_192;
/// Most positions in one response.
pub(crate) const UPDATE_POSITIONS_MAX: usize = 500;

/// Connection of a pod: the client's address, and the pod's port.
pub(crate) type ClientPodPort = (SocketAddr, u16);

/// Positions of the connections of all watched pods of this node, by the pods' netns cookies.
#[derive(Debug, Default)]
pub(crate) struct IdlePositions(BTreeMap<u64, IdlePod>);

/// Positions of one pod's connections.
#[derive(Debug)]
struct IdlePod {
    /// Time until which it is watched.
    until: Instant,
    /// Number of the newest event. Numbers begin at 1.
    newest: u64,
    /// Newest position of each connection, by the number of its event. Each event wakes all queries for the pod, and
    /// they read only what has come since.
    positions: BTreeMap<u64, (ClientPodPort, IdlePosition)>,
    /// Number of the newest event of each connection.
    numbers: BTreeMap<ClientPodPort, u64>,
}

impl IdlePod {
    fn new(until: Instant) -> Self {
        Self { until, newest: 0, positions: BTreeMap::new(), numbers: BTreeMap::new() }
    }

    /// Stores the newest position of a connection in place of the one before.
    fn insert(&mut self, connection: ClientPodPort, position: IdlePosition) {
        self.newest += 1;
        if let Some(before) = self.numbers.insert(connection, self.newest) {
            self.positions.remove(&before);
        }
        self.positions.insert(self.newest, (connection, position));
        if self.positions.len() > POSITIONS_MAX
            && let Some((_, (oldest, _))) = self.positions.pop_first()
        {
            self.numbers.remove(&oldest);
        }
    }
}

/// Positions that came after a given event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct IdleUpdates {
    /// Number of the event up to which these are all.
    pub(crate) newest: u64,
    /// Positions, the oldest first.
    pub(crate) positions: Vec<(ClientPodPort, IdlePosition)>,
}

impl IdlePositions {
    /// Begins to watch a pod, or goes on with it.
    pub(crate) fn watch(&mut self, now: Instant, cookie: u64) {
        let until = now + WATCH_TIME;
        let pod = self.0.entry(cookie).or_insert_with(|| IdlePod::new(until));
        pod.until = pod.until.max(until);
    }

    /// Records the position of an event. Returns the pod's cookie if the pod is watched.
    pub(crate) fn record(&mut self, event: &IdleEvent) -> Option<u64> {
        let pod = self.0.get_mut(&event.netns_cookie)?;
        let connection = connection_of(event)?;
        let position = IdlePosition { client_seq: event.client_seq, pod_seq: event.pod_seq };
        pod.insert(connection, position);
        Some(event.netns_cookie)
    }

    /// Returns the positions of these clients' connections that came after the event with the number `after`.
    ///
    /// An agent that has started since then counts from the begin. So a number that it has not reached stands for 0.
    pub(crate) fn updates(
        &self,
        cookie: u64,
        after: u64,
        clients: &BTreeSet<SocketAddr>,
    ) -> IdleUpdates {
        let Some(pod) = self.0.get(&cookie) else { return IdleUpdates::default() };
        let after = if after > pod.newest { 0 } else { after };
        let later = pod.positions.range((Excluded(after), Unbounded));
        let mut asked = later.filter(|(_, ((client, _), _))| clients.contains(client));
        let mut newest = pod.newest;
        let mut positions = Vec::new();
        for (number, update) in asked.by_ref().take(UPDATE_POSITIONS_MAX) {
            positions.push(*update);
            newest = *number;
        }
        // If these are all, the numbers up to the newest event are done.
        let is_cut = asked.next().is_some();
        IdleUpdates { newest: if is_cut { newest } else { pod.newest }, positions }
    }

    /// Forgets the pods that are no longer watched. Returns their cookies.
    pub(crate) fn remove_unwatched(&mut self, now: Instant) -> Vec<u64> {
        let ended = self.0.iter().filter(|(_, pod)| pod.until <= now);
        let ended: Vec<u64> = ended.map(|(cookie, _)| *cookie).collect();
        self.0.retain(|_, pod| pod.until > now);
        ended
    }
}

/// Returns the connection of an event; `None` if a port is none.
fn connection_of(event: &IdleEvent) -> Option<ClientPodPort> {
    let mut octets = [0; 16];
    for (bytes, word) in octets.chunks_exact_mut(4).zip(event.client) {
        bytes.copy_from_slice(&word.to_ne_bytes());
    }
    let address = IpAddr::V6(Ipv6Addr::from(octets)).to_canonical();
    let client = SocketAddr::new(address, event.client_port.try_into().ok()?);
    Some((client, event.pod_port.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the event of a connection from this port of a client at 10.0.0.9 to port 80 of pod 7.
    fn event(port: u16, client_seq: u32) -> IdleEvent {
        let ipv4 = u32::from_ne_bytes([10, 0, 0, 9]);
        let mapped = u32::from_ne_bytes([0, 0, 0xFF, 0xFF]);
        IdleEvent {
            netns_cookie: 7,
            client: [0, 0, mapped, ipv4],
            client_port: port.into(),
            pod_port: 80,
            client_seq,
            pod_seq: 1,
            ..IdleEvent::default()
        }
    }

    fn client(port: u16) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, 9], port))
    }

    fn position(port: u16, client_seq: u32) -> (ClientPodPort, IdlePosition) {
        ((client(port), 80), IdlePosition { client_seq, pod_seq: 1 })
    }

    #[test]
    fn the_newest_position_of_each_asked_connection_is_returned_once() {
        let (now, both) = (Instant::now(), BTreeSet::from([client(1), client(2)]));
        let mut positions = IdlePositions::default();
        assert_eq!(positions.record(&event(1, 10)), None, "no query has come");
        positions.watch(now, 7);
        for (port, seq) in [(1, 11), (2, 21), (1, 12), (3, 31)] {
            assert_eq!(positions.record(&event(port, seq)), Some(7));
        }
        let updates = positions.updates(7, 0, &both);
        let expected = vec![position(2, 21), position(1, 12)];
        assert_eq!(updates, IdleUpdates { newest: 4, positions: expected });
        assert_eq!(positions.updates(7, 2, &both).positions, [position(1, 12)]);
        assert_eq!(positions.updates(7, 4, &both).positions, []);
        assert_eq!(positions.updates(7, 5, &both).positions.len(), 2, "another agent's number");
        assert_eq!(positions.updates(7, 0, &BTreeSet::new()).positions, [], "a foreign client");
        assert_eq!(positions.updates(8, 0, &both), IdleUpdates::default(), "another pod");
    }

    #[test]
    fn a_long_list_is_returned_in_parts_without_a_gap() {
        let mut positions = IdlePositions::default();
        positions.watch(Instant::now(), 7);
        let ports = 1..=2 * UPDATE_POSITIONS_MAX as u16;
        let clients = ports.clone().map(client).collect();
        ports.clone().for_each(|port| _ = positions.record(&event(port, 0)));
        let first = positions.updates(7, 0, &clients);
        let second = positions.updates(7, first.newest, &clients);
        let all = [first.positions, second.positions].concat();
        assert_eq!(all, ports.map(|port| position(port, 0)).collect::<Vec<_>>());
        assert_eq!(positions.updates(7, second.newest, &clients).positions, []);
    }

    #[test]
    fn only_the_newest_positions_are_kept() {
        let mut positions = IdlePositions::default();
        positions.watch(Instant::now(), 7);
        let ports = 1..=3 * POSITIONS_MAX as u16;
        ports.for_each(|port| _ = positions.record(&event(port, 0)));
        assert_eq!(positions.0[&7].positions.len(), POSITIONS_MAX);
        let newest = 3 * POSITIONS_MAX as u16;
        let oldest = newest - POSITIONS_MAX as u16 + 1;
        let kept = |port| positions.updates(7, 0, &[client(port)].into()).positions;
        assert_eq!(kept(newest), [position(newest, 0)]);
        assert_eq!(kept(oldest), [position(oldest, 0)]);
        assert_eq!(kept(oldest - 1), []);
    }

    #[test]
    fn a_connection_takes_one_place_however_many_events_it_sends() {
        let mut positions = IdlePositions::default();
        positions.watch(Instant::now(), 7);
        positions.record(&event(1, 0));
        (0..2 * POSITIONS_MAX as u32).for_each(|seq| _ = positions.record(&event(2, seq)));
        let pod = &positions.0[&7];
        assert_eq!((pod.positions.len(), pod.numbers.len()), (2, 2));
        let other = positions.updates(7, 0, &[client(1)].into());
        assert_eq!(other.positions, [position(1, 0)], "a busy connection displaces no other");
        assert_eq!(positions.updates(7, u64::MAX, &[client(1)].into()), other);
    }

    #[test]
    fn a_pod_is_watched_until_its_queries_have_ended() {
        let now = Instant::now();
        let mut positions = IdlePositions::default();
        positions.watch(now, 7);
        positions.watch(now, 8);
        positions.watch(now + WATCH_TIME / 2, 8);
        assert!(positions.remove_unwatched(now + WATCH_TIME / 2).is_empty());
        assert_eq!(positions.remove_unwatched(now + WATCH_TIME), [7]);
        assert_eq!(positions.record(&event(1, 1)), None);
        assert_eq!(positions.remove_unwatched(now + WATCH_TIME * 2), [8]);
    }
}
