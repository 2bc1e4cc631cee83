//! Pure: which kept connections must be ended so that their owners connect anew.
//!
//! Routing happens at connect, so a client that keeps a connection keeps its pod. When an address leaves the set
//! that new connections are led to (rollout, split, limit, sleep, drain), connections to it that lie idle are
//! ended on the client's side, so that its pool notices before it uses them again. Busy ones are left alone.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    time::{Duration, Instant},
};

use common::wire::{Path, PodPhase, RouteTable};

use crate::sockdiag::Connection;

pub(crate) mod end;

/// Shortest time without a byte after which a connection counts as idle (design: kept connections).
const IDLE: Duration = Duration::from_secs(1);
/// Over which time ends are spread while the pod lives on.
const SPREAD: Duration = Duration::from_secs(5);
/// The same when the pod is about to stop: it waits no longer for idle connections than [`STAYS`].
const SPREAD_STOPPING: Duration = Duration::from_millis(500);
/// How long a kept connection holds up a drained pod.
pub(crate) const STAYS: Duration = Duration::from_secs(2);
/// How long an address is watched after it left.
const WATCHED: Duration = Duration::from_secs(15);

/// Addresses that new connections are led to, and those that were until lately.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    direct: BTreeSet<SocketAddr>,
    leaving: BTreeMap<SocketAddr, Leaving>,
}

/// An address that new connections are not led to any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Leaving {
    since: Instant,
    spread: Duration,
}

impl Kept {
    /// Takes in the table that is in force.
    pub(crate) fn follow(&mut self, now: Instant, table: &RouteTable) {
        let direct = direct(table);
        for &at in self.direct.difference(&direct) {
            let stays = table
                .pods
                .values()
                .any(|pod| pod.address == Some(at) && pod.phase == PodPhase::Ready);
            let spread = if stays { SPREAD } else { SPREAD_STOPPING };
            self.leaving.insert(at, Leaving { since: now, spread });
        }
        self.leaving.retain(|at, leaving| {
            !direct.contains(at) && now.duration_since(leaving.since) < WATCHED
        });
        self.direct = direct;
    }

    /// What is being left; empty most of the time.
    pub(crate) fn leaving(&self) -> &BTreeMap<SocketAddr, Leaving> {
        &self.leaving
    }
}

/// Addresses of ready pods that some service leads new connections straight to.
fn direct(table: &RouteTable) -> BTreeSet<SocketAddr> {
    let services = table.services.values().filter(|service| service.path == Path::Direct);
    let revisions: BTreeSet<_> =
        services.flat_map(|service| &service.targets).map(|target| &target.revision).collect();
    let pods = table.pods.values().filter(|pod| pod.phase == PodPhase::Ready);
    pods.filter(|pod| revisions.contains(&pod.revision)).filter_map(|pod| pod.address).collect()
}

/// Whether a client's connection is to be ended now.
///
/// Each has its own moment within the spread, by its local port, so that a client does not open all of them anew
/// at once.
pub(crate) fn is_due(
    now: Instant,
    leaving: &BTreeMap<SocketAddr, Leaving>,
    connection: &Connection,
) -> bool {
    // A v4 peer of an IPv6 socket is listed as `::ffff:a.b.c.d`.
    let peer = SocketAddr::new(connection.peer.ip().to_canonical(), connection.peer.port());
    let Some(leaving) = leaving.get(&peer) else { return false };
    // Knuth's multiplicative constant scatters neighbouring ports.
    let scattered = u32::from(connection.local.port()).wrapping_mul(0x9E37_79B1) >> 16;
    let moment = leaving.spread * scattered / (1 << 16);
    connection.idle >= IDLE && now.duration_since(leaving.since) >= moment
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU16;

    use common::wire::{Name, Pod, Probe, ProbeHow, Service, Target};

    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    fn pod(uid: &str, address: &str, phase: PodPhase) -> Pod {
        Pod {
            uid: uid.into(),
            name: uid.into(),
            revision: Name::new("default", "hello-00001"),
            node: "n1".into(),
            zone: String::new(),
            phase,
            address: Some(at(address)),
            port: NonZeroU16::MIN,
            probe: Probe {
                how: ProbeHow::Listen,
                port: None,
                period: Duration::ZERO,
                timeout: Duration::ZERO,
                success_threshold: 1,
                failure_threshold: 1,
            },
        }
    }

    fn table(path: Path, pods: &[Pod]) -> RouteTable {
        let name = Name::new("default", "hello");
        let service = Service {
            name: name.clone(),
            addresses: Vec::new(),
            port: NonZeroU16::MIN,
            activator_port: NonZeroU16::MIN,
            targets: vec![Target { revision: Name::new("default", "hello-00001"), percent: 100 }],
            path,
            hosts: Vec::new(),
        };
        RouteTable {
            services: BTreeMap::from([(name, service)]),
            pods: pods.iter().map(|pod| (pod.uid.clone(), pod.clone())).collect(),
            ..RouteTable::default()
        }
    }

    fn leaving(kept: &Kept) -> Vec<(SocketAddr, Duration)> {
        kept.leaving().iter().map(|(&at, leaving)| (at, leaving.spread)).collect()
    }

    #[test]
    fn an_address_leaves_when_its_pod_drains_or_its_service_changes_path() {
        let now = Instant::now();
        let ready =
            [pod("a", "10.0.0.1:80", PodPhase::Ready), pod("b", "10.0.0.2:80", PodPhase::Ready)];
        let mut kept = Kept::default();
        kept.follow(now, &table(Path::Direct, &ready));
        assert_eq!(leaving(&kept), []);

        let draining = [ready[0].clone(), pod("b", "10.0.0.2:80", PodPhase::Draining)];
        kept.follow(now, &table(Path::Direct, &draining));
        assert_eq!(leaving(&kept), [(at("10.0.0.2:80"), SPREAD_STOPPING)]);

        kept.follow(now, &table(Path::Activator, &draining));
        let want = [(at("10.0.0.1:80"), SPREAD), (at("10.0.0.2:80"), SPREAD_STOPPING)];
        assert_eq!(leaving(&kept), want);

        kept.follow(now, &table(Path::Direct, &draining));
        assert_eq!(leaving(&kept), [(at("10.0.0.2:80"), SPREAD_STOPPING)], "one is back");
        kept.follow(now + WATCHED, &table(Path::Direct, &draining));
        assert_eq!(leaving(&kept), [], "the other is long gone");
    }

    #[test]
    fn only_idle_connections_to_what_leaves_are_ended_each_at_its_moment() {
        let now = Instant::now();
        let left = Leaving { since: now, spread: SPREAD };
        let leaving = BTreeMap::from([(at("10.0.0.1:80"), left)]);
        let connection = |port: u16, peer: &str, idle| {
            let local = SocketAddr::new([10, 0, 0, 9].into(), port);
            Connection::seen(local, at(peer), idle)
        };
        let due = |after: Duration, peer: &str, idle| {
            let ports = 1..=1_000u16;
            ports
                .filter(|&port| is_due(now + after, &leaving, &connection(port, peer, idle)))
                .count()
        };
        assert_eq!(due(SPREAD, "10.0.0.1:80", IDLE), 1_000);
        assert_eq!(due(SPREAD, "[::ffff:10.0.0.1]:80", IDLE), 1_000);
        assert!((400..600).contains(&due(SPREAD / 2, "10.0.0.1:80", IDLE)));
        assert_eq!(due(SPREAD, "10.0.0.1:80", IDLE / 2), 0, "busy");
        assert_eq!(due(SPREAD, "10.0.0.1:81", IDLE), 0, "another pod");
    }
}
