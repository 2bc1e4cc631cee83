//! Pure: replicas of a component as another component knows them, and the choice of the next one to try.
//!
//! A setting names the first replicas; the RouteTable then lists all of them. Names are resolved repeatedly, but
//! nothing depends on that once a table has been received.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::SocketAddr,
    path::PathBuf,
    str::FromStr,
    time::Duration,
};

use crate::decimal::parse_port;

/// First wait after a failure; it doubles with each further failure.
const FIRST_RETRY_WAIT: Duration = Duration::from_millis(10);
/// Longest wait between two tries of the same replica.
const MAX_RETRY_WAIT: Duration = Duration::from_secs(1);

/// Address at which one replica accepts streams.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ReplicaEndpoint {
    /// Unix socket on the same machine; any process that may open the file is trusted.
    Unix(PathBuf),
    /// TCP address; `tls` states if both sides authenticate.
    Tcp {
        /// IP address and port of the replica.
        address: SocketAddr,
        /// True if the stream uses mutual TLS.
        tls: bool,
    },
}

impl fmt::Display for ReplicaEndpoint {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(out, "unix:{}", path.display()),
            Self::Tcp { address, tls: false } => write!(out, "http://{address}"),
            Self::Tcp { address, tls: true } => write!(out, "https://{address}"),
        }
    }
}

/// Setting that locates the replicas of a component.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndpointSetting {
    /// Replicas that the setting names, in addition to those that the RouteTable lists.
    Fixed(BTreeSet<ReplicaEndpoint>),
    /// Every address of a name (a headless Service), in addition to those that the RouteTable lists. Uses TLS if the
    /// process has an identity.
    Dns {
        /// DNS name to resolve, absolute or by the search list.
        name: String,
        /// TCP port at each address.
        port: u16,
    },
}

impl fmt::Display for EndpointSetting {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(all) => {
                let all: Vec<String> = all.iter().map(ToString::to_string).collect();
                out.write_str(&all.join(","))
            }
            Self::Dns { name, port } => write!(out, "dns:{name}:{port}"),
        }
    }
}

/// Error of a setting that matches none of the accepted forms.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("endpoint {text:?}: {ENDPOINT_RULE}")]
pub struct EndpointError {
    text: String,
}

/// Accepted forms of a setting, for error messages.
pub const ENDPOINT_RULE: &str = "must be unix:/path, dns:NAME:PORT, or http://IP:PORT or https://IP:PORT, several joined by commas";

impl FromStr for ReplicaEndpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let bad = || EndpointError { text: text.to_owned() };
        if let Some(path) = text.strip_prefix("unix:") {
            return if path.starts_with('/') { Ok(Self::Unix(path.into())) } else { Err(bad()) };
        }
        let (rest, tls) = match (text.strip_prefix("http://"), text.strip_prefix("https://")) {
            (Some(rest), _) => (rest, false),
            (None, Some(rest)) => (rest, true),
            (None, None) => return Err(bad()),
        };
        let address = rest.trim_end_matches('/').parse().map_err(|_not_one| bad())?;
        Ok(Self::Tcp { address, tls })
    }
}

impl FromStr for EndpointSetting {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        if let Some(rest) = text.strip_prefix("dns:") {
            let parsed = rest.rsplit_once(':').and_then(|(name, port)| {
                let port = parse_port(port)?.get();
                // An absolute name ends with a dot, which is no part of its last label.
                let is_name = crate::wire::is_dns_subdomain(name.trim_end_matches('.'));
                is_name.then(|| Self::Dns { name: name.to_owned(), port })
            });
            return parsed.ok_or_else(|| EndpointError { text: text.to_owned() });
        }
        let all: Result<BTreeSet<_>, _> = text.split(',').map(|it| it.trim().parse()).collect();
        all.map(Self::Fixed)
    }
}

impl EndpointSetting {
    /// Returns true if only a process with an identity can use the setting.
    pub fn needs_identity(&self) -> bool {
        let over_tls = |it: &ReplicaEndpoint| matches!(it, ReplicaEndpoint::Tcp { tls: true, .. });
        matches!(self, Self::Fixed(all) if all.iter().any(over_tls))
    }
}

/// Union of the replicas that the setting, DNS and the RouteTable name.
///
/// A lookup that fails changes nothing: the last result stays. A replica that two sources name counts once. While no
/// source names any, remembered replicas count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KnownReplicas {
    fixed: BTreeSet<ReplicaEndpoint>,
    /// Addresses from DNS.
    resolved: BTreeSet<ReplicaEndpoint>,
    /// Replicas from the RouteTable.
    listed: BTreeSet<ReplicaEndpoint>,
    /// Replicas that an earlier process knew.
    remembered: BTreeSet<ReplicaEndpoint>,
}

impl KnownReplicas {
    /// Returns the replicas that the setting alone names.
    pub fn new(setting: &EndpointSetting) -> Self {
        let fixed = match setting {
            EndpointSetting::Fixed(all) => all.clone(),
            EndpointSetting::Dns { .. } => BTreeSet::new(),
        };
        Self { fixed, ..Self::default() }
    }

    /// Replaces the addresses of the name. Returns true if they changed. An empty result is ignored: an outdated
    /// address is better than none.
    pub fn set_resolved(&mut self, addresses: impl IntoIterator<Item = ReplicaEndpoint>) -> bool {
        let new: BTreeSet<_> = addresses.into_iter().collect();
        let differs = !new.is_empty() && new != self.resolved;
        if differs {
            self.resolved = new;
        }
        differs
    }

    /// Replaces the replicas that the RouteTable lists, possibly by none. Returns true if they changed.
    pub fn set_listed(&mut self, addresses: impl IntoIterator<Item = ReplicaEndpoint>) -> bool {
        let new: BTreeSet<_> = addresses.into_iter().collect();
        let differs = new != self.listed;
        self.listed = new;
        differs
    }

    /// Replaces the replicas that an earlier process knew. Returns true if they changed.
    pub fn set_remembered(&mut self, endpoints: impl IntoIterator<Item = ReplicaEndpoint>) -> bool {
        let new: BTreeSet<_> = endpoints.into_iter().collect();
        let differs = new != self.remembered;
        self.remembered = new;
        differs
    }

    /// Returns every known replica, each one once.
    pub fn all(&self) -> BTreeSet<ReplicaEndpoint> {
        self.sources().into_iter().flatten().cloned().collect()
    }

    /// Returns true if `endpoint` is a known replica.
    pub fn contains(&self, endpoint: &ReplicaEndpoint) -> bool {
        self.sources().into_iter().any(|all| all.contains(endpoint))
    }

    /// Returns the sources that count. Remembered addresses may belong to other pods by now, so any source is better.
    fn sources(&self) -> [&BTreeSet<ReplicaEndpoint>; 3] {
        let named = [&self.fixed, &self.resolved, &self.listed];
        match named.iter().all(|all| all.is_empty()) {
            true => [&self.remembered; 3],
            false => named,
        }
    }
}

/// Decision on the next replica to try and the time of that try.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NextReplica {
    /// Try this replica now.
    Try(ReplicaEndpoint),
    /// All replicas wait; the first may be tried at this time.
    WaitUntil(Duration),
    /// No source names a replica.
    NoneKnown,
}

/// Recent failures of each replica, so that none is tried too often and a healthy one is preferred. All times count
/// from one moment that the caller has fixed.
#[derive(Clone, Debug, Default)]
pub struct ReplicaSelector {
    failures: BTreeMap<ReplicaEndpoint, ReplicaFailures>,
}

#[derive(Clone, Copy, Debug)]
struct ReplicaFailures {
    count: u32,
    retry_at: Duration,
}

impl ReplicaSelector {
    /// Chooses the replica to try at `now`: of those that may be tried, one with the fewest failures. `random` is a
    /// random number that picks among equals, so that clients of a lost replica spread over the others.
    pub fn next(
        &self,
        now: Duration,
        known: &BTreeSet<ReplicaEndpoint>,
        random: u64,
    ) -> NextReplica {
        let may =
            |it: &&ReplicaEndpoint| self.failures.get(*it).is_none_or(|it| it.retry_at <= now);
        let times = |it: &ReplicaEndpoint| self.failures.get(it).map_or(0, |it| it.count);
        let least = known.iter().filter(may).map(times).min();
        let best: Vec<_> = known.iter().filter(may).filter(|it| Some(times(it)) == least).collect();
        // The remainder fails for an empty `best` only: then every known replica is waiting, or none is known.
        if let Some(index) = usize::try_from(random).unwrap_or(usize::MAX).checked_rem(best.len()) {
            return NextReplica::Try(best[index].clone());
        }
        let soonest =
            known.iter().filter_map(|it| self.failures.get(it)).map(|it| it.retry_at).min();
        soonest.map_or(NextReplica::NoneKnown, NextReplica::WaitUntil)
    }

    /// Records that a try failed or a stream broke; `was_established` is true if the stream had been open for long
    /// enough to count as established; the time of the dial does not count. Returns the wait.
    ///
    /// The wait lies between half and the whole of 10 ms, 20 ms, … 1 s. After an established stream it starts again at
    /// 10 ms.
    pub fn record_failure(
        &mut self,
        now: Duration,
        endpoint: &ReplicaEndpoint,
        was_established: bool,
        random: u64,
    ) -> Duration {
        let before = self.failures.get(endpoint).map_or(0, |it| it.count);
        let count = if was_established { 1 } else { before.saturating_add(1) };
        // 10 ms · 2¹⁰ is beyond the longest wait, so the shift needs no larger exponent.
        let whole = FIRST_RETRY_WAIT.saturating_mul(1 << (count - 1).min(10)).min(MAX_RETRY_WAIT);
        // Jitter of up to half of the wait, so that clients of a replica that restarts do not all return at once.
        let share = u32::try_from(random % 1_024).unwrap_or_default();
        let wait = whole / 2 + (whole / 2) * share / 1_024;
        self.failures.insert(endpoint.clone(), ReplicaFailures { count, retry_at: now + wait });
        wait
    }

    /// Drops the failures of replicas that no source names any more.
    pub fn retain(&mut self, known: &BTreeSet<ReplicaEndpoint>) {
        self.failures.retain(|endpoint, _| known.contains(endpoint));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(last: u8) -> ReplicaEndpoint {
        ReplicaEndpoint::Tcp { address: SocketAddr::from(([10, 0, 0, last], 7100)), tls: true }
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn settings_are_parsed() {
        let parse = |text: &str| text.parse::<EndpointSetting>();
        assert_eq!(
            parse("unix:/run/c.sock"),
            Ok(EndpointSetting::Fixed([ReplicaEndpoint::Unix("/run/c.sock".into())].into()))
        );
        assert_eq!(
            parse("https://10.0.0.1:7100, https://10.0.0.2:7100"),
            Ok(EndpointSetting::Fixed([at(1), at(2)].into()))
        );
        assert_eq!(
            parse("dns:rouse-controller.knative-serving.svc:7100"),
            Ok(EndpointSetting::Dns {
                name: "rouse-controller.knative-serving.svc".into(),
                port: 7100
            })
        );
        let six: ReplicaEndpoint = "http://[fd00::1]:7".parse().expect("an address");
        assert_eq!(six.to_string(), "http://[fd00::1]:7");
        for bad in [
            "",
            "unix:run",
            "http://name:1",
            "dns:x",
            "dns:x:0",
            "dns:x:+7100",
            "dns:X Y:1",
            "tcp:1",
            "http://10.0.0.1:1,",
        ] {
            let refused = parse(bad).expect_err(bad).to_string();
            assert!(
                refused
                    .starts_with(&format!("endpoint {:?}", bad.rsplit(',').next().unwrap_or(bad))),
                "{refused}"
            );
        }
    }

    #[test]
    fn only_fixed_https_needs_an_identity() {
        let needs = |text: &str| text.parse::<EndpointSetting>().map(|it| it.needs_identity());
        assert_eq!(needs("https://10.0.0.1:1"), Ok(true));
        assert_eq!(needs("http://10.0.0.1:1"), Ok(false));
        assert_eq!(needs("dns:a:1"), Ok(false));
    }

    #[test]
    fn an_empty_lookup_and_an_empty_table_lose_no_replica() {
        let mut known = KnownReplicas::new(&EndpointSetting::Dns { name: "a".into(), port: 1 });
        assert!(known.set_resolved([at(1), at(2)]));
        assert!(!known.set_resolved([]));
        assert_eq!(known.all(), [at(1), at(2)].into());
        assert!(known.set_listed([at(2), at(3)]));
        assert!(known.set_resolved([at(2)]));
        assert_eq!(known.all(), [at(2), at(3)].into());
        assert!(known.set_listed([]));
        assert_eq!(known.all(), [at(2)].into());
    }

    #[test]
    fn remembered_replicas_count_until_a_source_names_one() {
        let setting = EndpointSetting::Dns { name: "a".into(), port: 1 };
        let sources: [fn(&mut KnownReplicas) -> bool; 2] =
            [|known| known.set_resolved([at(2)]), |known| known.set_listed([at(2)])];
        for name_another in sources {
            let mut known = KnownReplicas::new(&setting);
            assert!(known.set_remembered([at(1)]));
            assert!(!known.set_remembered([at(1)]), "the same one");
            known.set_resolved([]);
            known.set_listed([]);
            assert_eq!((known.all(), known.contains(&at(1))), ([at(1)].into(), true));
            assert!(name_another(&mut known));
            assert_eq!((known.all(), known.contains(&at(1))), ([at(2)].into(), false));
            known.set_listed([]);
            assert!(!known.all().is_empty(), "some replica is always known");
        }
    }

    #[test]
    fn another_replica_is_preferred_at_once() {
        let (mut selector, known) = (ReplicaSelector::default(), BTreeSet::from([at(1), at(2)]));
        selector.record_failure(ms(0), &at(1), true, 0);
        for random in 0..9 {
            assert_eq!(selector.next(ms(0), &known, random), NextReplica::Try(at(2)));
        }
        selector.record_failure(ms(0), &at(2), false, 0);
        assert_eq!(selector.next(ms(0), &known, 0), NextReplica::WaitUntil(ms(5)));
        assert_eq!(selector.next(ms(5), &[].into(), 0), NextReplica::NoneKnown);
    }

    #[test]
    fn one_that_failed_less_is_tried_first() {
        let (mut selector, known) = (ReplicaSelector::default(), BTreeSet::from([at(1), at(2)]));
        (0..3).for_each(|_| _ = selector.record_failure(ms(0), &at(1), false, 0));
        selector.record_failure(ms(0), &at(2), false, 0);
        assert_eq!(selector.next(ms(60_000), &known, 7), NextReplica::Try(at(2)));
    }

    proptest! {
        /// The wait grows to a second, is never below half of its step, and starts again after an established stream.
        #[test]
        fn waits_are_bounded(randoms in proptest::collection::vec(any::<u64>(), 1..40)) {
            let mut selector = ReplicaSelector::default();
            for (times, random) in (0u32..).zip(randoms) {
                let whole = ms((10u64 << times.min(10)).min(1_000));
                let wait = selector.record_failure(ms(0), &at(1), false, random);
                prop_assert!(wait >= whole / 2 && wait <= whole, "{:?} of {:?}", wait, whole);
            }
            let wait = selector.record_failure(ms(0), &at(1), true, u64::MAX);
            prop_assert!(wait <= ms(10));
        }

        /// After any failures, some known replica is tried within a second.
        #[test]
        fn some_replica_is_tried_within_a_second(
            failures in proptest::collection::vec((0u8..4, any::<bool>(), any::<u64>()), 0..60),
        ) {
            let (mut selector, known) = (ReplicaSelector::default(), (0..4).map(at).collect::<BTreeSet<_>>());
            for (replica, was_established, random) in failures {
                selector.record_failure(ms(0), &at(replica), was_established, random);
            }
            let tried = matches!(selector.next(ms(1_000), &known, 3), NextReplica::Try(_));
            prop_assert!(tried);
        }
    }
}
