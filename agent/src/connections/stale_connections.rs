//! Pure: choice of the stale connections to close, so that their clients connect again.
//!
//! Routing happens at connect, so a client that keeps a connection keeps its pod. When new connections no longer choose
//! an address (rollout, split, limit, sleep, drain), its idle connections are closed on the client's side. So the
//! client's pool notices before it uses them again. They close one after another (`stale_connections/close_pacing`). Busy
//! connections are left alone. The client's side cannot tell a response that pauses from one that has ended, so the pod
//! is asked (`stale_connections/pod_query`).

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    time::{Duration, Instant},
};

use common::wire::RoutingPhase;
use datapath::abi::ConnectionActivity;

use crate::net::sockdiag::{DiagConnection, TcpActivity};

pub(crate) mod close;
mod close_pacing;
mod idle_closes;
pub(crate) mod pod_query;
mod recorded_clients;
pub(crate) mod task;
mod watch;

/// Shortest time without a byte after which a connection counts as idle.
const IDLE_TIME: Duration = Duration::from_secs(1);
/// Time after which a connection that has never carried a byte counts as idle. Its client may have opened it for a
/// request, and wait for a processor. Most libraries try again only on connections that they have used before, so this
/// first request would fail. A pod waits for such connections.
const UNUSED_IDLE_TIME: Duration = Duration::from_secs(5);
/// Idle time if the pod is about to stop, or the address has drained for a while. A client that pauses only for moments
/// between long requests must move too. It counts only if the pod reports no message under way.
const SHORT_IDLE_TIME: Duration = Duration::from_millis(20);
/// Time for which a connection that its pod has reported as idle should stay so before it is closed. A client that is
/// about to write its next request gets ECONNABORTED from that write. Many libraries send again only after ECONNRESET,
/// although here no byte has left.
const REST_TIME: Duration = Duration::from_millis(10);
/// Time after the spread of closes in which a reported connection still gets its [`REST_TIME`]. One that never rests for
/// so long is then closed in any pause: the pod may be about to stop, and would reset it in the middle of a request.
const REST_PATIENCE: Duration = Duration::from_millis(500);
/// Precision of these times in the kernel: one tick at 100 ticks a second.
const KERNEL_TICK: Duration = Duration::from_millis(10);
/// Time over which closes are spread while the pod lives on.
const CLOSE_SPREAD: Duration = Duration::from_secs(5);
/// Time over which closes are spread if the pod is about to stop: the pod waits for idle connections no longer than
/// `OPEN_CONNECTION_DRAIN_TIME`.
const STOPPING_CLOSE_SPREAD: Duration = Duration::from_millis(500);
/// Time for which a draining address is watched; longer while it has a pod.
const DRAINING_WATCH_TIME: Duration = Duration::from_secs(15);
/// Period of list scans until [`EARLY_TIME`] after the newest address has begun to drain. A list scan is one of recorded
/// clients, or one of all clients while records do not suffice.
const EARLY_LIST_SCAN_PERIOD: Duration = Duration::from_millis(250);
/// Time in which connects that were under way when an address began to drain are established, most of them.
const EARLY_TIME: Duration = Duration::from_secs(2);
/// Period of list scans after [`EARLY_TIME`]. For each client that a scan enters, the kernel walks over all connections
/// of the machine.
const LIST_SCAN_PERIOD: Duration = Duration::from_secs(1);
/// Period of list scans if every draining address is late and its pod lives on. Only connections that were always in use
/// are left there.
///
/// While records suffice, it is also the period of scans of all clients after [`EARLY_TIME`]. These find connections
/// without a record, such as those that were opened to a pod's own address.
const LATE_LIST_SCAN_PERIOD: Duration = Duration::from_secs(10);
/// Period of the scan of known connections. The pause between two requests may be short. A scan that misses the pause
/// of a client with long requests waits for the whole next one.
const KNOWN_SCAN_PERIOD: Duration = Duration::from_millis(10);
/// Period of the scan of known connections while the pods of all these are [watched](watch). The scan only finds what no
/// event reports, such as connections that were idle before, or that speak HTTP/2.
const WATCHED_SCAN_PERIOD: Duration = Duration::from_millis(100);
/// Bound on the cost of each kind of scan: one part in this number of a processor's time.
const CPU_BUDGET_DIVISOR: u32 = 10;

/// Stale connections, by the draining addresses that they go to.
#[derive(Debug, Default)]
pub(crate) struct StaleConnections {
    draining: BTreeMap<SocketAddr, DrainingAddress>,
    /// Begin of the last scan of all clients; `None`: the next one is due now.
    full_scan_begun: Option<Instant>,
    /// Begin of the last list scan: one of recorded clients or of all.
    list_scan_begun: Option<Instant>,
    /// True if scans of recorded clients suffice, as the last ones have found.
    are_records_sufficient: bool,
    /// Time of the next scan of the known connections.
    next_known_scan: Option<Instant>,
    /// True while the pods of all known connections report those that become idle.
    are_pods_watched: bool,
}

/// Scope of one round of scans.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ClientScanScope {
    /// All clients of the node.
    AllClients,
    /// The clients with connections to draining addresses that records name, and that no scan has found yet.
    RecordedClients,
    /// The connections to draining addresses that the last round found.
    KnownConnections,
}

impl ClientScanScope {
    /// Returns the name of the scope in metrics.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::AllClients => "all",
            Self::RecordedClients => "recorded",
            Self::KnownConnections => "known",
        }
    }
}

/// Result and cost of the newest scans.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ClientScanStats {
    /// Number of connections to draining addresses.
    pub(crate) known_connections: usize,
    /// True if scans of recorded clients suffice. Then records name all connections that were led lately, and the last
    /// scan of all clients has reached each client.
    pub(crate) are_records_sufficient: bool,
    /// Processor time of a scan of all clients.
    pub(crate) full_scan_cpu: Duration,
    /// Processor time of a scan of recorded clients.
    pub(crate) recorded_scan_cpu: Duration,
    /// Processor time of a scan of the known connections.
    pub(crate) known_scan_cpu: Duration,
}

/// State of a draining address: new connections no longer choose it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DrainingAddress {
    since: Instant,
    /// Routing phase of the pod there; `None`: the table names no pod.
    phase: Option<RoutingPhase>,
}

impl DrainingAddress {
    /// Returns true if the pod lives on. Otherwise the pod is about to stop, or is gone.
    fn has_ready_pod(self) -> bool {
        self.phase == Some(RoutingPhase::Ready)
    }

    fn close_spread(self) -> Duration {
        if self.has_ready_pod() { CLOSE_SPREAD } else { STOPPING_CLOSE_SPREAD }
    }

    /// Returns the idle time that counts now. A connection that is not idle for long while the others move may never
    /// be: its requests would keep an unwanted pod.
    fn required_idle(self, now: Instant) -> Duration {
        let patient = self.has_ready_pod() && now.duration_since(self.since) <= CLOSE_SPREAD;
        if patient { IDLE_TIME } else { SHORT_IDLE_TIME }
    }

    /// Returns true if a connection is closed in the first pause of its client, however short.
    fn is_closed_in_short_pauses(self, now: Instant) -> bool {
        self.required_idle(now) == SHORT_IDLE_TIME
    }

    /// Returns the time from which the connection with this local port may be closed.
    ///
    /// Each has its own moment within the spread, so that a client does not reopen all of them at once.
    fn close_moment(self, local_port: u16) -> Instant {
        // Knuth's multiplicative constant scatters neighbouring ports.
        let scattered = u32::from(local_port).wrapping_mul(0x9E37_79B1) >> 16;
        self.since + self.close_spread() * scattered / (1 << 16)
    }

    /// Returns the time from which a connection may be closed that its pod reports as idle now.
    fn reported_close_moment(self, now: Instant, local_port: u16) -> Instant {
        let moment = self.close_moment(local_port);
        if self.awaits_rest(now) { moment.max(now + REST_TIME) } else { moment }
    }

    /// Returns true while a reported connection gets its [`REST_TIME`].
    fn awaits_rest(self, now: Instant) -> bool {
        now < self.since + self.close_spread() + REST_PATIENCE
    }

    /// Returns true if a pod that is about to stop waits for connections that are in use most of the time: most of the
    /// others have closed by now.
    fn waits_for_busy_clients(self, now: Instant) -> bool {
        !self.has_ready_pod() && !self.awaits_rest(now)
    }

    /// Returns true if the address has drained for longer than idle connections take to close.
    fn is_late(self, now: Instant) -> bool {
        now.duration_since(self.since) >= DRAINING_WATCH_TIME
    }
}

impl StaleConnections {
    /// Adds a draining address. Its pod lives on if it is ready, or else is about to stop.
    pub(crate) fn start_draining(
        &mut self,
        now: Instant,
        at: SocketAddr,
        phase: Option<RoutingPhase>,
    ) {
        self.draining.insert(at, DrainingAddress { since: now, phase });
        self.full_scan_begun = None;
    }

    /// Removes an address that new connections choose again.
    pub(crate) fn stop_draining(&mut self, at: SocketAddr) {
        self.draining.remove(&at);
    }

    /// Updates the phases of the pods at the draining addresses: one that lived on may be about to stop. Forgets
    /// addresses without a pod.
    pub(crate) fn update_phases(
        &mut self,
        now: Instant,
        phase_at: impl Fn(SocketAddr) -> Option<RoutingPhase>,
    ) {
        self.draining.retain(|&at, draining| {
            let phase = phase_at(at);
            // The wait begins again: a pod that is about to stop has a shorter spread, counted from now.
            if draining.has_ready_pod() && phase == Some(RoutingPhase::Draining) {
                draining.since = now;
                self.full_scan_begun = None;
            }
            draining.phase = phase;
            phase.is_some() || !draining.is_late(now)
        });
    }

    /// Returns true if an address has begun to drain lately, or its pod waits to stop.
    pub(crate) fn is_urgent(&self, now: Instant) -> bool {
        self.draining.values().any(|it| !it.has_ready_pod() || !it.is_late(now))
    }

    /// Returns the scope of the scan that is due, if any. A scope is due only while no scan of it is under way. The
    /// processor time of the last scans bounds their rate.
    ///
    /// While records suffice, scans of all clients are few. There is one when an address begins to drain, another one
    /// at the end of [`EARLY_TIME`], and rare ones later. They find connections without a record. In between, scans of
    /// recorded clients find connections that were being established.
    pub(crate) fn next_scan(
        &mut self,
        now: Instant,
        last_scans: ClientScanStats,
        is_under_way: impl Fn(ClientScanScope) -> bool,
    ) -> Option<ClientScanScope> {
        if self.draining.is_empty() {
            return None;
        }
        self.set_records_sufficient(last_scans.are_records_sufficient);
        // One at a time: a scan of all clients finds what one of recorded clients finds, too.
        let is_listing = is_under_way(ClientScanScope::AllClients)
            || is_under_way(ClientScanScope::RecordedClients);
        if !is_listing && let Some(scope) = self.due_list_scan(now, last_scans) {
            self.list_scan_begun = Some(now);
            if scope == ClientScanScope::AllClients {
                self.full_scan_begun = Some(now);
            }
            return Some(scope);
        }
        // Beside list scans: those take longer than the pauses between requests in which connections can be closed.
        let is_due = self.next_known_scan.is_none_or(|at| at <= now);
        if last_scans.known_connections == 0
            || !is_due
            || is_under_way(ClientScanScope::KnownConnections)
        {
            return None;
        }
        let pause = with_budget(self.known_scan_period(), last_scans.known_scan_cpu);
        self.next_known_scan = Some(now + pause);
        Some(ClientScanScope::KnownConnections)
    }

    /// Sets if scans of recorded clients suffice. Once they do not, a scan of all clients is due at once: they may have
    /// missed connections.
    fn set_records_sufficient(&mut self, are_sufficient: bool) {
        if self.are_records_sufficient && !are_sufficient {
            self.full_scan_begun = None;
        }
        self.are_records_sufficient = are_sufficient;
    }

    /// Returns the scope of the list scan that is due, if any.
    fn due_list_scan(&self, now: Instant, last_scans: ClientScanStats) -> Option<ClientScanScope> {
        let is_full_scan_due = self.full_scan_begun.is_none_or(|begun| {
            begun + with_budget(self.full_scan_pause(begun), last_scans.full_scan_cpu) <= now
        });
        if is_full_scan_due {
            return Some(ClientScanScope::AllClients);
        }
        let is_recorded_scan_due = self.list_scan_begun.is_none_or(|begun| {
            begun + with_budget(self.list_scan_period(begun), last_scans.recorded_scan_cpu) <= now
        });
        let is_due = self.are_records_sufficient && is_recorded_scan_due;
        is_due.then_some(ClientScanScope::RecordedClients)
    }

    /// Returns the period of the scan of known connections.
    pub(crate) fn known_scan_period(&self) -> Duration {
        if self.are_pods_watched { WATCHED_SCAN_PERIOD } else { KNOWN_SCAN_PERIOD }
    }

    /// Sets if the pods of all known connections report those that become idle. Once one does not, the next scan is due
    /// at once.
    pub(crate) fn set_pods_watched(&mut self, are_watched: bool) {
        if self.are_pods_watched && !are_watched {
            self.next_known_scan = None;
        }
        self.are_pods_watched = are_watched;
    }

    /// Returns the time from the begin of a scan of all clients, `begun`, to that of the next one.
    ///
    /// While records suffice, a scan follows at the end of [`EARLY_TIME`], and later ones are rare.
    fn full_scan_pause(&self, begun: Instant) -> Duration {
        if !self.are_records_sufficient {
            return self.list_scan_period(begun);
        }
        let early_end = self.draining.values().map(|it| it.since + EARLY_TIME).max();
        let until_end = early_end.map(|end| end.saturating_duration_since(begun));
        until_end.filter(|left| !left.is_zero()).unwrap_or(LATE_LIST_SCAN_PERIOD)
    }

    /// Returns the time from the begin of a list scan, `begun`, to that of the next one.
    fn list_scan_period(&self, begun: Instant) -> Duration {
        let is_early = |it: &DrainingAddress| begun.duration_since(it.since) < EARLY_TIME;
        if self.draining.values().any(is_early) {
            EARLY_LIST_SCAN_PERIOD
        } else if self.is_urgent(begun) {
            LIST_SCAN_PERIOD
        } else {
            LATE_LIST_SCAN_PERIOD
        }
    }

    /// Returns the draining addresses; there are none most of the time.
    pub(crate) fn draining(&self) -> &BTreeMap<SocketAddr, DrainingAddress> {
        &self.draining
    }
}

/// Returns the time from one scan to the next one: the period, but at least ten times the cost of the last scan.
fn with_budget(period: Duration, cpu_time: Duration) -> Duration {
    cpu_time.saturating_mul(CPU_BUDGET_DIVISOR).max(period)
}

/// Returns true if a client's connection is due to be closed.
pub(crate) fn is_due(
    now: Instant,
    draining: &BTreeMap<SocketAddr, DrainingAddress>,
    connection: &DiagConnection,
) -> bool {
    let Some(draining) = draining.get(&connection.canonical_peer()) else { return false };
    is_idle(connection.activity, draining.required_idle(now))
        && now >= draining.close_moment(connection.local.port())
}

/// Returns true if a connection that is due may be closed. `reported_activity` is the pod's report of its use, if the
/// pod gave one.
///
/// A pod that is too busy to respond, or out of the agent's reach, may be in the middle of a response that pauses.
/// Without a report such a connection stays open while the pod exists.
pub(crate) fn may_close(
    draining: &BTreeMap<SocketAddr, DrainingAddress>,
    connection: &DiagConnection,
    reported_activity: Option<ConnectionActivity>,
) -> bool {
    let is_pod_gone =
        || draining.get(&connection.canonical_peer()).is_some_and(|it| it.phase.is_none());
    match reported_activity {
        Some(ConnectionActivity::MessageInFlight) => false,
        Some(ConnectionActivity::Idle) => true,
        Some(ConnectionActivity::NoRequestInFlight) => is_idle(connection.activity, IDLE_TIME),
        None => is_pod_gone() && is_idle(connection.activity, IDLE_TIME),
    }
}

/// Returns true if a client's connection has had its response and then been idle for `long`, or has never had a
/// request.
///
/// A request that is still in flight may be older than that. Then the client sent last. If the previous response came
/// within the same tick, the acknowledgement of the request shows it, as it came later than any response.
fn is_idle(activity: TcpActivity, long: Duration) -> bool {
    // A new connection is about to carry its first request.
    let Some(received) = activity.since_received else {
        return !activity.has_sent && activity.since_sent >= UNUSED_IDLE_TIME;
    };
    let asked_since =
        activity.since_sent < received || activity.since_acknowledged + KERNEL_TICK < received;
    received >= long && !asked_since
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    fn draining_addresses(connections: &StaleConnections) -> Vec<(SocketAddr, Duration)> {
        connections.draining().iter().map(|(&at, draining)| (at, draining.close_spread())).collect()
    }

    #[test]
    fn an_address_is_watched_until_it_is_back_or_its_pod_long_gone() {
        let (now, ready) = (Instant::now(), Some(RoutingPhase::Ready));
        let mut connections = StaleConnections::default();
        connections.start_draining(now, at("10.0.0.1:80"), ready);
        connections.start_draining(now, at("10.0.0.2:80"), Some(RoutingPhase::Draining));
        connections.start_draining(now, at("10.0.0.3:80"), None);
        let want = [
            (at("10.0.0.1:80"), CLOSE_SPREAD),
            (at("10.0.0.2:80"), STOPPING_CLOSE_SPREAD),
            (at("10.0.0.3:80"), STOPPING_CLOSE_SPREAD),
        ];
        assert_eq!(draining_addresses(&connections), want);
        connections.stop_draining(at("10.0.0.1:80"));
        connections.update_phases(now + DRAINING_WATCH_TIME / 2, |_| None);
        assert_eq!(draining_addresses(&connections), want[1..]);
        let one_is_left = |it| (it == at("10.0.0.2:80")).then_some(RoutingPhase::Draining);
        connections.update_phases(now + DRAINING_WATCH_TIME, one_is_left);
        assert_eq!(
            draining_addresses(&connections),
            want[1..2],
            "its last response may take a while"
        );
        connections.update_phases(now + DRAINING_WATCH_TIME, |_| None);
        assert_eq!(draining_addresses(&connections), []);
    }

    #[test]
    fn a_reported_connection_rests_before_its_close_unless_it_never_does() {
        let since = Instant::now();
        for (phase, spread) in [
            (Some(RoutingPhase::Ready), CLOSE_SPREAD),
            (Some(RoutingPhase::Draining), STOPPING_CLOSE_SPREAD),
            (None, STOPPING_CLOSE_SPREAD),
        ] {
            let draining = DrainingAddress { since, phase };
            let moments: Vec<Instant> = (1..=64).map(|port| draining.close_moment(port)).collect();
            let reported =
                |now| (1..=64).map(move |port| draining.reported_close_moment(now, port));
            // Nothing is closed before the moment that a scan would wait for.
            let early: Vec<Instant> =
                moments.iter().map(|it| (*it).max(since + REST_TIME)).collect();
            assert!(reported(since).eq(early));
            let end = since + spread;
            assert!(reported(end).all(|it| it == end + REST_TIME), "its moment is over");
            assert!(reported(end + REST_PATIENCE).eq(moments), "it never rests");
            assert!(!draining.waits_for_busy_clients(end));
            let is_stopping = phase != Some(RoutingPhase::Ready);
            assert_eq!(draining.waits_for_busy_clients(end + REST_PATIENCE), is_stopping);
        }
    }

    #[test]
    fn all_clients_are_scanned_often_while_urgent_and_known_connections_more_often() {
        let (now, address) = (Instant::now(), at("10.0.0.1:80"));
        let mut connections = StaleConnections::default();
        let (none, some) = (
            ClientScanStats::default(),
            ClientScanStats { known_connections: 1, ..ClientScanStats::default() },
        );
        assert_eq!(connections.next_scan(now, some, |_| false), None, "no address drains");
        connections.start_draining(now, address, Some(RoutingPhase::Ready));
        assert_eq!(connections.next_scan(now, none, |_| false), Some(ClientScanScope::AllClients));
        assert_eq!(connections.next_scan(now, none, |_| false), None, "none is known");
        assert_eq!(
            connections.next_scan(now, some, |_| false),
            Some(ClientScanScope::KnownConnections),
            "right after a scan of all clients"
        );
        assert_eq!(connections.next_scan(now, some, |_| false), None, "just now");
        assert_eq!(
            connections.next_scan(now + KNOWN_SCAN_PERIOD, some, |_| false),
            Some(ClientScanScope::KnownConnections)
        );
        assert_eq!(
            connections.next_scan(now + EARLY_LIST_SCAN_PERIOD, some, |_| false),
            Some(ClientScanScope::AllClients)
        );
        connections.update_phases(now + DRAINING_WATCH_TIME, |_| Some(RoutingPhase::Draining));
        assert_eq!(draining_addresses(&connections), [(address, STOPPING_CLOSE_SPREAD)]);
        assert_eq!(
            connections.next_scan(now + EARLY_LIST_SCAN_PERIOD, none, |_| false),
            Some(ClientScanScope::AllClients),
            "it stops after all"
        );
    }

    /// Times of list scans, in ms since a test's begin.
    #[derive(Debug, Default, PartialEq, Eq)]
    struct ListScans {
        all: Vec<u64>,
        recorded: Vec<u64>,
    }

    /// Runs the schedule while addresses begin to drain at these times. Each scan ends at once. `are_sufficient` returns
    /// true for the times at which a scan finds records sufficient.
    fn list_scans(
        begins_ms: &[u64],
        end_ms: u64,
        are_sufficient: impl Fn(u64) -> bool,
        recorded_scan_cpu: Duration,
    ) -> ListScans {
        let (start, mut scans) = (Instant::now(), ListScans::default());
        let (mut connections, mut last_scans) =
            (StaleConnections::default(), ClientScanStats::default());
        for ms in (0..=end_ms).step_by(50) {
            let now = start + Duration::from_millis(ms);
            for (host, _) in (1_u8..).zip(begins_ms).filter(|(_, at)| **at == ms) {
                let address = SocketAddr::from(([10, 0, 0, host], 80));
                connections.start_draining(now, address, Some(RoutingPhase::Draining));
            }
            while let Some(scope) = connections.next_scan(now, last_scans, |_| false) {
                let are_records_sufficient = are_sufficient(ms);
                last_scans =
                    ClientScanStats { are_records_sufficient, recorded_scan_cpu, ..last_scans };
                match scope {
                    ClientScanScope::AllClients => scans.all.push(ms),
                    ClientScanScope::RecordedClients => scans.recorded.push(ms),
                    ClientScanScope::KnownConnections => panic!("none is known"),
                }
            }
        }
        scans
    }

    /// Returns the times from `from` to `to` in steps.
    fn every(from: u64, step: usize, to: u64) -> Vec<u64> {
        (from..=to).step_by(step).collect()
    }

    #[test]
    fn scans_of_all_clients_are_few_while_records_suffice() {
        let recorded = [every(250, 250, 1_750), every(3_000, 1_000, 11_000), vec![13_000]].concat();
        let expected = ListScans { all: vec![0, 2_000, 12_000], recorded };
        assert_eq!(list_scans(&[0], 13_500, |_| true, Duration::ZERO), expected);
    }

    #[test]
    fn without_sufficient_records_each_scan_is_one_of_all_clients() {
        let all = [every(0, 250, 2_000), every(3_000, 1_000, 13_000)].concat();
        let expected = ListScans { all, recorded: vec![] };
        assert_eq!(list_scans(&[0], 13_500, |_| false, Duration::ZERO), expected);
    }

    #[test]
    fn once_records_do_not_suffice_scans_of_all_clients_are_as_frequent_as_without_them() {
        // The scans at 4 s and at 7 s find that it has changed.
        let are_sufficient = |ms: u64| !(4_000..7_000).contains(&ms);
        let recorded = [every(250, 250, 1_750), every(3_000, 1_000, 4_000), vec![8_000]].concat();
        let all = vec![0, 2_000, 4_000, 5_000, 6_000, 7_000];
        let expected = ListScans { all, recorded };
        assert_eq!(list_scans(&[0], 8_500, are_sufficient, Duration::ZERO), expected);
    }

    #[test]
    fn all_clients_are_scanned_when_an_address_begins_to_drain_and_after_the_early_time() {
        let scans = list_scans(&[0, 500, 1_000, 4_000], 6_500, |_| true, Duration::ZERO);
        assert_eq!(scans.all, [0, 500, 1_000, 3_000, 4_000, 6_000]);
    }

    #[test]
    fn costly_records_are_read_rarely() {
        let scans = list_scans(&[0], 2_500, |_| true, EARLY_LIST_SCAN_PERIOD / 2);
        let expected = ListScans { all: vec![0, 2_000], recorded: vec![1_250] };
        assert_eq!(scans, expected);
    }

    #[test]
    fn of_the_scans_that_list_connections_one_runs_at_a_time() {
        let now = Instant::now();
        let mut connections = StaleConnections::default();
        connections.start_draining(now, at("10.0.0.1:80"), Some(RoutingPhase::Draining));
        let (all, recorded) = (ClientScanScope::AllClients, ClientScanScope::RecordedClients);
        let sufficient =
            ClientScanStats { are_records_sufficient: true, ..ClientScanStats::default() };
        let mut next_beside = |after, scope: Option<ClientScanScope>| {
            connections.next_scan(now + after, sufficient, |it| Some(it) == scope)
        };
        assert_eq!(next_beside(Duration::ZERO, Some(recorded)), None);
        assert_eq!(next_beside(Duration::ZERO, None), Some(all));
        assert_eq!(next_beside(EARLY_LIST_SCAN_PERIOD, Some(all)), None);
        assert_eq!(next_beside(EARLY_LIST_SCAN_PERIOD, None), Some(recorded));
        assert_eq!(next_beside(EARLY_TIME, Some(recorded)), None);
        assert_eq!(next_beside(EARLY_TIME, None), Some(all));
    }

    #[test]
    fn known_connections_are_scanned_while_a_scan_of_all_clients_is_under_way() {
        let now = Instant::now();
        let mut connections = StaleConnections::default();
        connections.start_draining(now, at("10.0.0.1:80"), Some(RoutingPhase::Draining));
        let some = ClientScanStats { known_connections: 1, ..ClientScanStats::default() };
        let mut next_beside = |scope| connections.next_scan(now, some, |it| it == scope);
        let (all, known) = (ClientScanScope::AllClients, ClientScanScope::KnownConnections);
        assert_eq!(next_beside(all), Some(known));
        assert_eq!(next_beside(known), Some(all), "it has waited meanwhile");
        assert_eq!(next_beside(known), None);
    }

    #[test]
    fn known_connections_are_scanned_rarely_while_their_pods_are_watched() {
        let now = Instant::now();
        let mut connections = StaleConnections::default();
        connections.start_draining(now, at("10.0.0.1:80"), Some(RoutingPhase::Draining));
        let some = ClientScanStats { known_connections: 1, ..ClientScanStats::default() };
        let is_busy = |scope: ClientScanScope| scope == ClientScanScope::AllClients;
        let known = Some(ClientScanScope::KnownConnections);
        connections.set_pods_watched(true);
        assert_eq!(connections.next_scan(now, some, is_busy), known);
        assert_eq!(connections.next_scan(now + KNOWN_SCAN_PERIOD, some, is_busy), None);
        assert_eq!(connections.next_scan(now + WATCHED_SCAN_PERIOD, some, is_busy), known);
        connections.set_pods_watched(false);
        assert_eq!(
            connections.next_scan(now + WATCHED_SCAN_PERIOD, some, is_busy),
            known,
            "at once"
        );
        assert_eq!(connections.next_scan(now + WATCHED_SCAN_PERIOD, some, is_busy), None);
    }

    #[test]
    fn only_an_address_whose_pod_stops_is_closed_in_short_pauses_at_first() {
        let now = Instant::now();
        let draining = |phase| DrainingAddress { since: now, phase };
        let is_closed = |phase, after| draining(phase).is_closed_in_short_pauses(now + after);
        let (ready, stops) = (Some(RoutingPhase::Ready), Some(RoutingPhase::Draining));
        assert!(is_closed(stops, Duration::ZERO) && is_closed(None, Duration::ZERO));
        assert!(!is_closed(ready, CLOSE_SPREAD));
        assert!(is_closed(ready, CLOSE_SPREAD * 2));
    }

    #[test]
    fn long_scans_are_rare_and_do_not_delay_the_others() {
        let now = Instant::now();
        let mut connections = StaleConnections::default();
        connections.start_draining(now, at("10.0.0.1:80"), Some(RoutingPhase::Draining));
        let (full_scan_cpu, known_scan_cpu) = (EARLY_LIST_SCAN_PERIOD, KNOWN_SCAN_PERIOD);
        let last_scans = ClientScanStats {
            known_connections: 1,
            full_scan_cpu,
            known_scan_cpu,
            ..ClientScanStats::default()
        };
        let mut scan_after = |after| connections.next_scan(now + after, last_scans, |_| false);
        assert_eq!(scan_after(Duration::ZERO), Some(ClientScanScope::AllClients));
        assert_eq!(scan_after(Duration::ZERO), Some(ClientScanScope::KnownConnections));
        assert_eq!(scan_after(KNOWN_SCAN_PERIOD * (CPU_BUDGET_DIVISOR - 1)), None);
        assert_eq!(
            scan_after(KNOWN_SCAN_PERIOD * CPU_BUDGET_DIVISOR),
            Some(ClientScanScope::KnownConnections)
        );
        assert_eq!(
            scan_after(EARLY_LIST_SCAN_PERIOD * (CPU_BUDGET_DIVISOR - 1)),
            Some(ClientScanScope::KnownConnections)
        );
        assert_eq!(
            scan_after(EARLY_LIST_SCAN_PERIOD * CPU_BUDGET_DIVISOR),
            Some(ClientScanScope::AllClients)
        );
    }

    #[test]
    fn only_idle_connections_to_draining_addresses_are_due_each_at_its_moment() {
        let now = Instant::now();
        let address = DrainingAddress { since: now, phase: Some(RoutingPhase::Ready) };
        let draining = BTreeMap::from([(at("10.0.0.1:80"), address)]);
        let connection = |port: u16, peer: &str, idle| {
            let local = SocketAddr::new([10, 0, 0, 9].into(), port);
            DiagConnection::listed(local, at(peer), answered(idle))
        };
        let due = |after: Duration, peer: &str, idle| {
            let ports = 1..=1_000u16;
            ports
                .filter(|&port| is_due(now + after, &draining, &connection(port, peer, idle)))
                .count()
        };
        assert_eq!(due(CLOSE_SPREAD, "10.0.0.1:80", IDLE_TIME), 1_000);
        assert_eq!(due(CLOSE_SPREAD, "[::ffff:10.0.0.1]:80", IDLE_TIME), 1_000);
        assert!((400..600).contains(&due(CLOSE_SPREAD / 2, "10.0.0.1:80", IDLE_TIME)));
        assert_eq!(due(CLOSE_SPREAD, "10.0.0.1:80", IDLE_TIME / 2), 0, "busy");
        assert_eq!(due(CLOSE_SPREAD, "10.0.0.1:81", IDLE_TIME), 0, "another pod");
        assert_eq!(
            due(CLOSE_SPREAD * 2, "10.0.0.1:80", SHORT_IDLE_TIME),
            1_000,
            "busy all the time"
        );
    }

    /// Returns the times of a connection whose response came `ago`, right after its request.
    fn answered(ago: Duration) -> TcpActivity {
        TcpActivity {
            since_sent: ago,
            has_sent: true,
            since_received: Some(ago),
            since_acknowledged: ago,
            ..TcpActivity::default()
        }
    }

    #[test]
    fn a_connection_is_closed_by_the_pods_answer_or_if_the_pod_is_gone() {
        let now = Instant::now();
        let (short, long) = (answered(SHORT_IDLE_TIME), answered(IDLE_TIME));
        let may = |phase, activity, reported_activity| {
            let draining =
                BTreeMap::from([(at("10.0.0.1:80"), DrainingAddress { since: now, phase })]);
            may_close(
                &draining,
                &DiagConnection::listed(at("10.0.0.9:1"), at("10.0.0.1:80"), activity),
                reported_activity,
            )
        };
        for phase in [Some(RoutingPhase::Ready), Some(RoutingPhase::Draining), None] {
            for activity in [short, long] {
                assert!(
                    may(phase, activity, Some(ConnectionActivity::Idle))
                        && !may(phase, activity, Some(ConnectionActivity::MessageInFlight))
                );
            }
            let frame = Some(ConnectionActivity::NoRequestInFlight);
            assert!(may(phase, long, frame) && !may(phase, short, frame));
            assert!(!may(phase, short, None));
            assert_eq!(may(phase, long, None), phase.is_none(), "a pod that does not answer");
        }
    }

    #[test]
    fn a_connection_with_a_request_in_flight_is_not_idle_however_long_it_takes() {
        let ms = Duration::from_millis;
        assert!(is_idle(answered(IDLE_TIME), IDLE_TIME));
        let slow = TcpActivity { since_sent: IDLE_TIME * 31, ..answered(IDLE_TIME) };
        assert!(is_idle(slow, IDLE_TIME), "answered after 30 s, a second ago");
        let first = TcpActivity { since_received: None, ..answered(IDLE_TIME * 30) };
        assert!(!is_idle(first, IDLE_TIME), "its first request has no answer yet");
        let unused = |ago| TcpActivity { has_sent: false, since_received: None, ..answered(ago) };
        assert!(is_idle(unused(UNUSED_IDLE_TIME), SHORT_IDLE_TIME), "no client has used it");
        assert!(
            !is_idle(unused(IDLE_TIME * 4), SHORT_IDLE_TIME),
            "it may have been opened for a request"
        );
        let next = TcpActivity {
            since_sent: IDLE_TIME * 2,
            since_acknowledged: IDLE_TIME * 2,
            ..answered(IDLE_TIME * 3)
        };
        assert!(!is_idle(next, IDLE_TIME), "its next request has no answer yet");
        let same_tick =
            TcpActivity { since_acknowledged: IDLE_TIME * 3 - ms(40), ..answered(IDLE_TIME * 3) };
        assert!(
            !is_idle(same_tick, IDLE_TIME),
            "it was sent as soon as the answer before had come"
        );
    }
}
