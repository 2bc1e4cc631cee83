//! Pure: choice of the sockets to end, so that their programs connect again.
//!
//! A connected socket keeps its endpoint, also when the endpoint is gone. Nothing on the network may report that: a
//! resolver would ask a dead server forever, and a client of TCP waits for its retransmissions to fail. A socket is
//! ended only if the eBPF programs led it to its present peer. UDP sockets that are not connected get another endpoint
//! with their next datagram.

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    time::{Duration, Instant},
};

use datapath::abi;

use crate::{
    kernel::led_socket::LedSocket,
    routes::plan::{DepartureSource, FrontendEndpoints},
};

mod scan;
pub(crate) mod task;

/// Number of rounds after a change. The first one may miss a socket whose connect had chosen its endpoint before the
/// change, and had not completed yet. It leaves connections of TCP to the second one.
const ROUNDS: u32 = 2;
/// Shortest time between two rounds: lists may change many times a second. Two such times, and the agent's sweeps in
/// between, are within the second in which sockets are to be ended.
const ROUND_PERIOD: Duration = Duration::from_millis(400);
/// Time after a list for which connections of TCP are not ended. An API server may answer it from a cache that is
/// behind etcd. Endpoints that are new since then follow as changes.
const LIST_LAG: Duration = Duration::from_secs(5);

/// Times of the rounds. They take place only after endpoints may have left.
#[derive(Debug)]
struct RoundSchedule {
    rounds_left: u32,
    next_round: Instant,
    /// Time before which no connection of TCP is ended.
    connections_from: Instant,
    /// True if a round is still to follow at that time, whatever `rounds_left` is.
    are_connections_due: bool,
}

impl RoundSchedule {
    /// Starts without a round.
    fn new(now: Instant) -> Self {
        Self { rounds_left: 0, next_round: now, connections_from: now, are_connections_due: false }
    }

    /// Requests rounds, as endpoints may have left.
    fn request(&mut self, now: Instant, source: DepartureSource) {
        self.rounds_left = ROUNDS;
        if source == DepartureSource::List {
            self.connections_from = now + LIST_LAG;
            self.are_connections_due = true;
        }
    }

    /// Requests one round, as the latest one has failed.
    fn request_retry(&mut self) {
        self.rounds_left = self.rounds_left.max(1);
    }

    /// Returns true if it is time for a round.
    fn is_due(&self, now: Instant) -> bool {
        let may_end_connections = self.are_connections_due && now >= self.connections_from;
        now >= self.next_round && (self.rounds_left > 0 || may_end_connections)
    }

    /// Begins a round. Returns true if it may end connections of TCP.
    fn begin(&mut self, now: Instant) -> bool {
        self.rounds_left = self.rounds_left.saturating_sub(1);
        self.next_round = now + ROUND_PERIOD;
        let may_end_connections = now >= self.connections_from;
        self.are_connections_due &= !may_end_connections;
        may_end_connections
    }
}

/// Endpoints of all frontends in the present round, and in the round before.
#[derive(Debug, Default)]
struct EndpointRounds {
    /// Endpoints in the present round.
    present: FrontendEndpoints,
    /// Endpoints in the round before, of the frontends whose endpoints have changed since. Without a round before there
    /// are none.
    before: FrontendEndpoints,
    /// True if the present round may end connections of TCP.
    may_end_connections: bool,
}

impl EndpointRounds {
    /// Begins the next round. `changes` are those since the present one.
    fn begin_next(&mut self, changes: FrontendEndpoints, may_end_connections: bool) {
        self.may_end_connections = may_end_connections;
        self.before.clear();
        for (key, now) in changes {
            let before = if now.is_empty() {
                self.present.remove(&key)
            } else {
                self.present.insert(key, now)
            };
            self.before.insert(key, before.unwrap_or_default());
        }
    }

    /// Returns true if the socket has an endpoint that has left its frontend.
    ///
    /// A connection of TCP may be in use, so its endpoint must be missing in two rounds: an endpoint that moves from
    /// one EndpointSlice to another one is in neither for a moment.
    fn has_left(&self, socket: &LedSocket) -> bool {
        // While two Services have one address, the endpoints of both count.
        let services = (socket.frontend, u32::MIN)..=(socket.frontend, u32::MAX);
        let present = self.present.range(services.clone());
        if !is_missing(present.clone().map(|(_, endpoints)| &**endpoints), &socket.endpoint) {
            return false;
        }
        if socket.frontend.protocol == abi::IPPROTO_UDP {
            return true;
        }
        if !self.may_end_connections {
            return false;
        }
        let unchanged = present.filter(|(key, _)| !self.before.contains_key(key));
        let before = self.before.range(services).chain(unchanged);
        is_missing(before.map(|(_, endpoints)| &**endpoints), &socket.endpoint)
    }

    /// Returns true if a socket with this peer is to be ended.
    fn is_stale(&self, socket: &LedSocket, peer: SocketAddr) -> bool {
        peer == socket.endpoint && self.has_left(socket)
    }
}

/// Returns true if an endpoint is none of those that its frontend has.
///
/// A frontend without endpoints ends no socket: it could only be refused another one. Neither does a frontend that this
/// node does not serve any more.
fn is_missing<'a>(
    mut services: impl Iterator<Item = &'a BTreeSet<SocketAddr>> + Clone,
    endpoint: &SocketAddr,
) -> bool {
    services.clone().any(|others| !others.is_empty())
        && !services.any(|others| others.contains(endpoint))
}

#[cfg(test)]
mod tests {
    use std::{net::Ipv4Addr, sync::Arc};

    use datapath::abi::FrontendKey;

    use super::*;

    const CLUSTER_IP: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 9);

    fn frontend(protocol: u8) -> FrontendKey {
        FrontendKey {
            address: CLUSTER_IP.to_ipv6_mapped().octets(),
            port_be: 53_u16.to_be(),
            protocol,
            reserved: 0,
        }
    }

    fn pod(number: u8) -> SocketAddr {
        SocketAddr::from(([10, 244, 0, number], 5353))
    }

    /// Returns a socket that asked the ClusterIP and was led to a pod.
    fn socket(protocol: u8, number: u8) -> LedSocket {
        LedSocket { frontend: frontend(protocol), endpoint: pod(number), netns_cookie: 1 }
    }

    /// Returns the change after which the frontends of a service have these endpoints.
    fn change(service: u32, pods: &[u8]) -> FrontendEndpoints {
        let pods: Arc<BTreeSet<SocketAddr>> = Arc::new(pods.iter().map(|it| pod(*it)).collect());
        let of_protocol = |protocol| ((frontend(protocol), service), Arc::clone(&pods));
        [abi::IPPROTO_TCP, abi::IPPROTO_UDP].map(of_protocol).into()
    }

    /// Returns the rounds with these endpoints: the previous one, if any, and the present one.
    fn rounds(previous: Option<&[u8]>, present: &[u8]) -> EndpointRounds {
        let mut rounds = EndpointRounds::default();
        for pods in previous.into_iter().chain([present]) {
            rounds.begin_next(change(1, pods), true);
        }
        rounds
    }

    #[test]
    fn a_udp_socket_is_stale_once_its_endpoint_has_left_and_others_are_there() {
        let is_stale =
            |present: &[u8]| rounds(None, present).is_stale(&socket(abi::IPPROTO_UDP, 1), pod(1));
        assert!(!is_stale(&[1, 2]));
        assert!(is_stale(&[2]));
        assert!(!is_stale(&[]), "no other would be given");
    }

    /// Returns true if a connection to pod 1 is stale in these rounds.
    fn is_stale_connection(previous: Option<&[u8]>, present: &[u8]) -> bool {
        rounds(previous, present).is_stale(&socket(abi::IPPROTO_TCP, 1), pod(1))
    }

    #[test]
    fn a_connection_is_stale_once_its_endpoint_was_missing_in_two_rounds() {
        assert!(is_stale_connection(Some(&[2]), &[2]));
        assert!(is_stale_connection(Some(&[3]), &[2]));
        assert!(!is_stale_connection(None, &[2]), "the first round of an agent");
        assert!(!is_stale_connection(Some(&[1]), &[2]), "it may come back");
        assert!(!is_stale_connection(Some(&[2]), &[1, 2]), "it has come back");
        assert!(!is_stale_connection(Some(&[]), &[2]) && !is_stale_connection(Some(&[2]), &[]));
    }

    /// Returns the times of the rounds in ms since the request, each with true if it may end connections.
    fn schedule(sources: &[(u64, DepartureSource)]) -> Vec<(u64, bool)> {
        let start = Instant::now();
        let (mut schedule, mut rounds) = (RoundSchedule::new(start), Vec::new());
        for ms in (0..=8_000).step_by(100) {
            let now = start + Duration::from_millis(ms);
            for (_, source) in sources.iter().filter(|(at, _)| *at == ms) {
                schedule.request(now, *source);
            }
            if schedule.is_due(now) {
                rounds.push((ms, schedule.begin(now)));
            }
        }
        rounds
    }

    #[test]
    fn two_rounds_follow_a_change_and_one_more_a_list_that_may_have_been_old() {
        use DepartureSource::{List, Watch};
        assert_eq!(schedule(&[]), []);
        assert_eq!(schedule(&[(0, Watch)]), [(0, true), (400, true)]);
        assert_eq!(schedule(&[(0, List)]), [(0, false), (400, false), (5_000, true)]);
        let both = [(0, false), (400, false), (800, false), (5_000, true)];
        assert_eq!(schedule(&[(0, List), (300, Watch)]), both);
        let late = [(0, false), (400, false), (4_900, false), (5_300, true)];
        assert_eq!(schedule(&[(0, List), (4_900, Watch)]), late);
    }

    #[test]
    fn a_failed_round_is_repeated_after_its_period_and_may_end_connections() {
        let start = Instant::now();
        let mut schedule = RoundSchedule::new(start);
        schedule.request_retry();
        schedule.begin(start);
        schedule.request_retry();
        assert!(!schedule.is_due(start + ROUND_PERIOD / 2));
        assert!(schedule.is_due(start + ROUND_PERIOD) && schedule.begin(start + ROUND_PERIOD));
        assert!(!schedule.is_due(start + ROUND_PERIOD * 2), "once");
    }

    #[test]
    fn a_round_without_changes_confirms_the_round_before() {
        let mut rounds = rounds(Some(&[1, 2]), &[2]);
        let connection = socket(abi::IPPROTO_TCP, 1);
        assert!(!rounds.has_left(&connection), "it may come back");
        rounds.begin_next(change(2, &[]), true);
        assert!(rounds.has_left(&connection));
        rounds.begin_next(FrontendEndpoints::new(), true);
        assert!(rounds.has_left(&connection), "also in later rounds");
        rounds.begin_next(FrontendEndpoints::new(), false);
        assert!(!rounds.has_left(&connection), "the list may be old");
        assert!(rounds.has_left(&socket(abi::IPPROTO_UDP, 1)));
        rounds.begin_next(change(2, &[1]), true);
        assert!(!rounds.has_left(&connection), "another Service with this address has it");
        rounds.begin_next(change(2, &[]), true);
        assert!(!rounds.has_left(&connection), "it was there in the round before");
    }

    #[test]
    fn a_socket_of_a_frontend_that_is_not_served_is_not_stale() {
        let none = EndpointRounds::default();
        for protocol in [abi::IPPROTO_TCP, abi::IPPROTO_UDP] {
            assert!(!none.is_stale(&socket(protocol, 1), pod(1)));
            assert!(!rounds(Some(&[2]), &[]).is_stale(&socket(protocol, 1), pod(1)));
        }
    }

    #[test]
    fn a_socket_with_another_peer_than_its_record_names_is_not_stale() {
        let other_port = SocketAddr::new(pod(1).ip(), 53);
        for protocol in [abi::IPPROTO_TCP, abi::IPPROTO_UDP] {
            let is_stale = |peer| rounds(Some(&[2]), &[2]).is_stale(&socket(protocol, 1), peer);
            assert!(is_stale(pod(1)));
            assert!(!is_stale(pod(3)) && !is_stale(other_port));
        }
    }
}
