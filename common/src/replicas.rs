//! Pure: the replicas of a part as another part knows them, and which of them to try next.
//!
//! A setting names the first ones; the RouteTable then tells of all of them. Names are looked up again and again,
//! but nothing depends on that once a table has been received.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::SocketAddr,
    path::PathBuf,
    str::FromStr,
    time::Duration,
};

/// The first wait after a failure; it doubles with each further one.
const FIRST_RETRY: Duration = Duration::from_millis(10);
/// The longest wait between two tries of one replica.
const LAST_RETRY: Duration = Duration::from_secs(1);

/// Where one replica takes streams.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Endpoint {
    /// A socket on the same machine; whoever may open the file is trusted.
    Unix(PathBuf),
    /// An address; `tls` says whether both sides prove who they are.
    Tcp {
        /// Where.
        address: SocketAddr,
        /// Whether over TLS.
        tls: bool,
    },
}

impl fmt::Display for Endpoint {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(out, "unix:{}", path.display()),
            Self::Tcp { address, tls: false } => write!(out, "http://{address}"),
            Self::Tcp { address, tls: true } => write!(out, "https://{address}"),
        }
    }
}

/// A setting that says where a part's replicas are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Setting {
    /// These, and those the RouteTable tells of.
    Fixed(BTreeSet<Endpoint>),
    /// Every address of this name (a headless Service's), and those the RouteTable tells of. Over TLS where the
    /// process has an identity.
    Dns {
        /// The name.
        name: String,
        /// The port at each address.
        port: u16,
    },
}

/// A setting that makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("endpoint {text:?}: {RULE}")]
pub struct BadEndpoint {
    text: String,
}

/// What would do.
pub const RULE: &str = "must be unix:/path, dns:NAME:PORT, or http://IP:PORT or https://IP:PORT, several joined by commas";

impl FromStr for Endpoint {
    type Err = BadEndpoint;

    fn from_str(text: &str) -> Result<Self, BadEndpoint> {
        let bad = || BadEndpoint { text: text.to_owned() };
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

impl FromStr for Setting {
    type Err = BadEndpoint;

    fn from_str(text: &str) -> Result<Self, BadEndpoint> {
        if let Some(rest) = text.strip_prefix("dns:") {
            let parsed = rest.rsplit_once(':').and_then(|(name, port)| {
                let port = port.parse().ok().filter(|port| *port > 0)?;
                let is_name = crate::wire::is_subdomain(name.trim_end_matches('.'));
                is_name.then(|| Self::Dns { name: name.to_owned(), port })
            });
            return parsed.ok_or_else(|| BadEndpoint { text: text.to_owned() });
        }
        let all: Result<BTreeSet<_>, _> = text.split(',').map(|it| it.trim().parse()).collect();
        all.map(Self::Fixed)
    }
}

impl Setting {
    /// Whether it can only be used by a process that has an identity.
    pub fn needs_identity(&self) -> bool {
        let over_tls = |it: &Endpoint| matches!(it, Endpoint::Tcp { tls: true, .. });
        matches!(self, Self::Fixed(all) if all.iter().any(over_tls))
    }
}

/// Every replica that some source names.
///
/// A look-up that fails changes nothing: the last answer stays. What two sources name is one replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    fixed: BTreeSet<Endpoint>,
    looked_up: BTreeSet<Endpoint>,
    told: BTreeSet<Endpoint>,
}

impl Known {
    /// What the setting alone names.
    pub fn new(setting: &Setting) -> Self {
        let fixed = match setting {
            Setting::Fixed(all) => all.clone(),
            Setting::Dns { .. } => BTreeSet::new(),
        };
        Self { fixed, looked_up: BTreeSet::new(), told: BTreeSet::new() }
    }

    /// A name's addresses are these now. None at all is no answer: there is always one replica, or nobody to ask.
    pub fn look_up(&mut self, addresses: impl IntoIterator<Item = Endpoint>) -> bool {
        let new: BTreeSet<_> = addresses.into_iter().collect();
        let differs = !new.is_empty() && new != self.looked_up;
        if differs {
            self.looked_up = new;
        }
        differs
    }

    /// The RouteTable names these now; none where it names none any more.
    pub fn tell(&mut self, addresses: impl IntoIterator<Item = Endpoint>) -> bool {
        let new: BTreeSet<_> = addresses.into_iter().collect();
        let differs = new != self.told;
        self.told = new;
        differs
    }

    /// All of them.
    pub fn all(&self) -> BTreeSet<Endpoint> {
        self.fixed.iter().chain(&self.looked_up).chain(&self.told).cloned().collect()
    }

    /// Whether some source names it.
    pub fn contains(&self, endpoint: &Endpoint) -> bool {
        [&self.fixed, &self.looked_up, &self.told].into_iter().any(|all| all.contains(endpoint))
    }
}

/// Which replica to try next, and when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// This one, now.
    Try(Endpoint),
    /// None before this time.
    Wait(Duration),
    /// None is known.
    Nobody,
}

/// How often each replica failed of late, so that none is asked too often and a healthy one is preferred.
#[derive(Clone, Debug, Default)]
pub struct Chooser {
    failed: BTreeMap<Endpoint, Failed>,
}

#[derive(Clone, Copy, Debug)]
struct Failed {
    times: u32,
    again_at: Duration,
}

impl Chooser {
    /// The next to try at `now`: of those that may be tried, one of those that failed least. `chance` picks among
    /// equals, so that those who lost the same replica do not all go to one.
    pub fn next(&self, now: Duration, known: &BTreeSet<Endpoint>, chance: u64) -> Next {
        let may = |it: &&Endpoint| self.failed.get(*it).is_none_or(|it| it.again_at <= now);
        let times = |it: &Endpoint| self.failed.get(it).map_or(0, |it| it.times);
        let least = known.iter().filter(may).map(times).min();
        let best: Vec<_> = known.iter().filter(may).filter(|it| Some(times(it)) == least).collect();
        if let Some(place) = usize::try_from(chance).unwrap_or(usize::MAX).checked_rem(best.len()) {
            return Next::Try(best[place].clone());
        }
        let soonest = known.iter().filter_map(|it| self.failed.get(it)).map(|it| it.again_at).min();
        soonest.map_or(Next::Nobody, Next::Wait)
    }

    /// A try failed, or a stream broke; `stood`: after everything had been said. Returns how long this one rests.
    ///
    /// The wait is between half and the whole of 10 ms, 20 ms, … 1 s; one that stood begins anew.
    pub fn failed(
        &mut self,
        now: Duration,
        endpoint: &Endpoint,
        stood: bool,
        chance: u64,
    ) -> Duration {
        let before = self.failed.get(endpoint).map_or(0, |it| it.times);
        let times = if stood { 1 } else { before.saturating_add(1) };
        let whole = FIRST_RETRY.saturating_mul(1 << (times - 1).min(10)).min(LAST_RETRY);
        let share = u32::try_from(chance % 1_024).unwrap_or_default();
        let wait = whole / 2 + (whole / 2) * share / 1_024;
        self.failed.insert(endpoint.clone(), Failed { times, again_at: now + wait });
        wait
    }

    /// A stream stands.
    pub fn stood(&mut self, endpoint: &Endpoint) {
        self.failed.remove(endpoint);
    }

    /// Forgets those that are not known any more.
    pub fn retain(&mut self, known: &BTreeSet<Endpoint>) {
        self.failed.retain(|endpoint, _| known.contains(endpoint));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(last: u8) -> Endpoint {
        Endpoint::Tcp { address: SocketAddr::from(([10, 0, 0, last], 7100)), tls: true }
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn settings_say_what_they_mean() {
        let parse = |text: &str| text.parse::<Setting>();
        assert_eq!(
            parse("unix:/run/c.sock"),
            Ok(Setting::Fixed([Endpoint::Unix("/run/c.sock".into())].into()))
        );
        assert_eq!(
            parse("https://10.0.0.1:7100, https://10.0.0.2:7100"),
            Ok(Setting::Fixed([at(1), at(2)].into()))
        );
        assert_eq!(
            parse("dns:rouse-controller.knative-serving.svc:7100"),
            Ok(Setting::Dns { name: "rouse-controller.knative-serving.svc".into(), port: 7100 })
        );
        let six: Endpoint = "http://[fd00::1]:7".parse().expect("an address");
        assert_eq!(six.to_string(), "http://[fd00::1]:7");
        for bad in [
            "",
            "unix:run",
            "http://name:1",
            "dns:x",
            "dns:x:0",
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
        let needs = |text: &str| text.parse::<Setting>().map(|it| it.needs_identity());
        assert_eq!(needs("https://10.0.0.1:1"), Ok(true));
        assert_eq!(needs("http://10.0.0.1:1"), Ok(false));
        assert_eq!(needs("dns:a:1"), Ok(false));
    }

    #[test]
    fn an_empty_answer_and_a_silent_table_lose_nobody() {
        let mut known = Known::new(&Setting::Dns { name: "a".into(), port: 1 });
        assert!(known.look_up([at(1), at(2)]));
        assert!(!known.look_up([]));
        assert_eq!(known.all(), [at(1), at(2)].into());
        assert!(known.tell([at(2), at(3)]));
        assert!(known.look_up([at(2)]));
        assert_eq!(known.all(), [at(2), at(3)].into());
        assert!(known.tell([]));
        assert_eq!(known.all(), [at(2)].into());
    }

    #[test]
    fn another_replica_is_preferred_at_once() {
        let (mut chooser, known) = (Chooser::default(), BTreeSet::from([at(1), at(2)]));
        chooser.failed(ms(0), &at(1), true, 0);
        for chance in 0..9 {
            assert_eq!(chooser.next(ms(0), &known, chance), Next::Try(at(2)));
        }
        chooser.failed(ms(0), &at(2), false, 0);
        assert_eq!(chooser.next(ms(0), &known, 0), Next::Wait(ms(5)));
        assert_eq!(chooser.next(ms(5), &[].into(), 0), Next::Nobody);
    }

    #[test]
    fn one_that_failed_less_is_tried_first() {
        let (mut chooser, known) = (Chooser::default(), BTreeSet::from([at(1), at(2)]));
        (0..3).for_each(|_| _ = chooser.failed(ms(0), &at(1), false, 0));
        chooser.failed(ms(0), &at(2), false, 0);
        assert_eq!(chooser.next(ms(60_000), &known, 7), Next::Try(at(2)));
        chooser.stood(&at(1));
        assert_eq!(chooser.next(ms(60_000), &known, 7), Next::Try(at(1)));
    }

    proptest! {
        /// The wait grows to a second, is never below half of its step, and begins anew after a stream that stood.
        #[test]
        fn waits_are_bounded(chances in proptest::collection::vec(any::<u64>(), 1..40)) {
            let mut chooser = Chooser::default();
            for (times, chance) in (0u32..).zip(chances) {
                let whole = ms((10u64 << times.min(10)).min(1_000));
                let wait = chooser.failed(ms(0), &at(1), false, chance);
                prop_assert!(wait >= whole / 2 && wait <= whole, "{:?} of {:?}", wait, whole);
            }
            let wait = chooser.failed(ms(0), &at(1), true, u64::MAX);
            prop_assert!(wait <= ms(10));
        }

        /// Whatever failed, somebody known is tried within a second.
        #[test]
        fn somebody_is_tried_within_a_second(
            failures in proptest::collection::vec((0u8..4, any::<bool>(), any::<u64>()), 0..60),
        ) {
            let (mut chooser, known) = (Chooser::default(), (0..4).map(at).collect::<BTreeSet<_>>());
            for (which, stood, chance) in failures {
                chooser.failed(ms(0), &at(which), stood, chance);
            }
            let tried = matches!(chooser.next(ms(1_000), &known, 3), Next::Try(_));
            prop_assert!(tried);
        }
    }
}
