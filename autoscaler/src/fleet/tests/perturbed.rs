//! What reports lose never takes a pod away: one series of load, told in time and told with harm.

use common::wire::Aggregation;
use proptest::{collection::vec, prelude::*};

use super::*;

/// Ready pods; every second one is on the other node.
const READY: usize = 6;
const AGENTS: [&str; 2] = ["a", "b"];
/// The sender of what waits, after the agents.
const ACTIVATOR: usize = 2;
/// Quiet seconds before any harm, in which a fresh decider comes to know all that it may depend on.
const CALM: usize = 40;

/// Requests in flight at each pod, and those that wait.
type Levels = [u64; READY + 1];

/// What happens to a sender's reports.
#[derive(Clone, Copy, Debug)]
enum Harm {
    /// They come together when it is over.
    Late,
    /// They never come.
    Lost,
    /// Each comes twice, and then the one before it again.
    Repeated,
    /// The stream ends; another one follows when it is over. From the first second on: it never came before.
    Gone,
}

#[derive(Clone, Copy, Debug)]
struct Harmed {
    sender: usize,
    harm: Harm,
    from: usize,
    long: usize,
}

/// All that befalls the reports of one run.
#[derive(Clone, Debug, Default)]
struct Harms {
    all: Vec<Harmed>,
    /// When another decider, that knows nothing, takes over.
    renewed: Option<usize>,
    /// How far the senders' clocks are ahead.
    clocks_ns: [u64; 3],
}

struct World<'a> {
    now: Duration,
    fleet: Fleet,
    table: RouteTable,
    name: Name,
    harms: &'a Harms,
    streams: [Option<Stream>; 3],
    totals: [Totals; READY + 1],
    told: [Vec<UsageSeen>; 3],
    queued: [Vec<UsageSeen>; 3],
    /// What the controller does: the last decision that says a number.
    pods: u32,
}

impl<'a> World<'a> {
    fn new(policy: ScalePolicy, harms: &'a Harms) -> Self {
        let name = Name::new("default", "hello-00001");
        let mut table = RouteTable::default();
        let known = RouteRevision { initial_scale_reached: true, ..revision(&name, policy) };
        table.revisions.insert(name.clone(), known);
        for at in 0..READY {
            let node = AGENTS[at % 2].into();
            let new = RoutePod { node, ..pod(&uid(at), &name, PodPhase::Ready) };
            table.pods.insert(uid(at), new);
        }
        let line = common::wire::Activator {
            name: "line".into(),
            node: String::new(),
            zone: String::new(),
            addresses: Vec::new(),
        };
        table.activators.insert(line.name.clone(), line);
        let mut world = Self {
            now: Duration::from_secs(10),
            fleet: Fleet::new(TICK),
            table,
            name,
            harms,
            streams: [None; 3],
            totals: [Totals::default(); READY + 1],
            told: Default::default(),
            queued: Default::default(),
            pods: u32::try_from(READY).unwrap(),
        };
        world.fleet.routes(world.now, &world.table, &world.table.keys());
        world
    }

    fn harm(&self, sender: usize, second: usize) -> Option<Harm> {
        let mut all = self.harms.all.iter().filter(|it| it.sender == sender);
        all.find(|it| (it.from..it.from + it.long).contains(&second)).map(|it| it.harm)
    }

    fn ns(&self, sender: usize) -> u64 {
        u64::try_from(self.now.as_nanos()).unwrap() + self.harms.clocks_ns[sender]
    }

    /// Carries out what is decided: new pods start and never become ready, and none is taken away.
    fn obey(&mut self) {
        for step in self.fleet.run(self.now) {
            let Step::Decided(it) = step else { continue };
            self.pods = it.wanted.unwrap_or(self.pods);
        }
        let missing = usize::try_from(self.pods).unwrap().saturating_sub(self.table.pods.len());
        let new: BTreeSet<RouteKey> = (0..missing)
            .map(|_| {
                let uid = format!("new-{:04}", self.table.pods.len());
                let new = pod(&uid, &self.name, PodPhase::Starting);
                self.table.pods.insert(uid.clone(), RoutePod { node: "a".into(), ..new });
                RouteKey::Pod(uid)
            })
            .collect();
        if !new.is_empty() {
            self.fleet.routes(self.now, &self.table, &new);
            self.obey();
        }
    }

    /// Requests begin and end until so many are there.
    fn reach(&mut self, levels: &Levels) {
        for (at, &level) in levels.iter().enumerate() {
            let at_ns = self.ns(sender_of(at));
            let totals = &mut self.totals[at];
            while totals.in_flight() < level {
                totals.start(at_ns);
            }
            while totals.in_flight() > level {
                totals.finish(at_ns);
            }
        }
    }

    /// What a sender has to say.
    fn items(&self, sender: usize) -> Vec<UsageSeen> {
        let own = (0..=READY).filter(|&at| sender_of(at) == sender);
        own.map(|at| UsageSeen {
            key: UsageKey { revision: self.name.clone(), pod: (at < READY).then(|| uid(at)) },
            at_ns: self.ns(sender),
            totals: self.totals[at],
            status: Vec::new(),
            latency: Vec::new(),
        })
        .collect()
    }

    fn say(&mut self, sender: usize, items: &[UsageSeen]) {
        let stream = self.streams[sender].expect("a stream that stands");
        for seen in items {
            self.fleet.seen(self.now, stream, seen);
            self.obey();
        }
        self.streams[sender] = Some(self.fleet.synced(self.now, stream));
        self.obey();
    }

    fn open(&mut self, sender: usize) {
        let role = if sender == ACTIVATOR { Role::Activator } else { Role::Agent };
        let name = ["a", "b", "line"][sender].to_owned();
        let who = Subscriber { role, node: name.clone(), name };
        self.streams[sender] = Some(self.fleet.open(self.now, who));
    }

    fn report(&mut self, sender: usize, second: usize) {
        let items = self.items(sender);
        let same = |(old, new): (&UsageSeen, &UsageSeen)| old.totals == new.totals;
        let told = &self.told[sender];
        let is_old = told.len() == items.len() && told.iter().zip(&items).all(same);
        // An activator says nothing but that there is no news.
        let news = if sender == ACTIVATOR && is_old { Vec::new() } else { items.clone() };
        match self.harm(sender, second) {
            Some(Harm::Gone) => {
                let stream = self.streams[sender].take();
                stream.into_iter().for_each(|it| self.fleet.close(self.now, it));
                self.obey();
                return;
            }
            Some(Harm::Late) if self.streams[sender].is_some() => {
                self.queued[sender].extend(news);
                self.told[sender] = items;
                return;
            }
            Some(Harm::Lost) if self.streams[sender].is_some() => return,
            Some(Harm::Repeated) if self.streams[sender].is_some() => {
                // A stream keeps its order: what is late comes first, and what was never said is not said again.
                let before = std::mem::replace(&mut self.told[sender], items);
                let all = [std::mem::take(&mut self.queued[sender]), news].concat();
                self.say(sender, &all);
                self.say(sender, &all);
                if !all.is_empty() {
                    self.say(sender, &before);
                }
                return;
            }
            Some(_) | None => {}
        }
        let mut all = std::mem::take(&mut self.queued[sender]);
        if self.streams[sender].is_none() {
            self.open(sender);
            all.clone_from(&items);
        } else {
            all.extend(news);
        }
        self.told[sender] = items;
        self.say(sender, &all);
    }

    fn renew(&mut self) {
        self.fleet = Fleet::new(TICK);
        self.streams = [None; 3];
        self.queued = Default::default();
        self.fleet.routes(self.now, &self.table, &self.table.keys());
    }
}

fn uid(at: usize) -> String {
    format!("pod-{at}")
}

fn sender_of(at: usize) -> usize {
    if at < READY { at % 2 } else { ACTIVATOR }
}

/// Pods that are to run after each quarter of a second.
fn run(policy: &ScalePolicy, series: &[Levels], harms: &Harms) -> Vec<u32> {
    let mut world = World::new(policy.clone(), harms);
    let mut pods = Vec::new();
    for (second, levels) in series.iter().enumerate() {
        for quarter in 0..4u32 {
            world.now = Duration::from_secs(10 + second as u64) + 250 * quarter * MS;
            match quarter {
                0 if world.harms.renewed == Some(second) => world.renew(),
                1 => world.reach(levels),
                2 => (0..=ACTIVATOR).for_each(|sender| world.report(sender, second)),
                _ => {}
            }
            world.obey();
            pods.push(world.pods);
        }
    }
    pods
}

fn small() -> ScalePolicy {
    // As few pods as load asks for in one step, whatever is ready here.
    ScalePolicy { total: 10.0, max_scale_down_rate: 1000.0, ..short() }
}

/// Load that stays for so many seconds.
fn held(long: usize, level: u64) -> Vec<Levels> {
    vec![[level, level, level, level, level, level, 0]; long]
}

fn harmed(sender: usize, harm: Harm, from: usize, long: usize) -> Harms {
    Harms { all: vec![Harmed { sender, harm, from, long }], ..Harms::default() }
}

/// The least that was to run from this second on.
fn least(pods: &[u32], from: usize) -> u32 {
    *pods[4 * from..].iter().min().expect("some seconds")
}

#[test]
fn quiet_that_is_known_lowers() {
    let series = [held(20, 10), held(40, 0)].concat();
    let pods = run(&small(), &series, &Harms::default());
    assert_eq!((pods[4 * 20], pods.last()), (9, Some(&0)), "60 at 7 a pod");
}

/// Reports that stall while most requests end: those that are left keep their pods, and the service is never at zero.
#[test]
fn a_report_that_comes_late_is_spread_over_the_time_that_it_tells_of() {
    for harm in [Harm::Late, Harm::Lost] {
        let series = [held(20, 100), held(70, 10)].concat();
        let late = |sender| Harmed { sender, harm, from: 20, long: 9 };
        let harms = Harms { all: vec![late(0), late(1)], ..Harms::default() };
        let pods = run(&small(), &series, &harms);
        assert_eq!((least(&pods, 20), pods.last()), (9, Some(&9)), "{harm:?}: 60 at 7 a pod");
    }
}

/// The growth that a stall hides is no more than it was.
#[test]
fn a_stall_does_not_multiply_what_began_in_it() {
    let series = [held(30, 0), held(30, 10)].concat();
    let late = |sender| Harmed { sender, harm: Harm::Lost, from: 30, long: 9 };
    let harms = Harms { all: vec![late(0), late(1)], ..Harms::default() };
    let pods = run(&small(), &series, &harms);
    assert_eq!(pods.iter().skip(4 * 30).max(), Some(&9), "60 at 7 a pod");
}

#[test]
fn pods_of_an_agent_that_is_gone_are_kept() {
    // All load is at the other node, and there it ends or goes on.
    let one = [0, 100, 0, 100, 0, 100, 0];
    for after in [held(60, 0), vec![one; 60]] {
        let series = [vec![one; 30], after].concat();
        let pods = run(&small(), &series, &harmed(1, Harm::Gone, 30, 60));
        assert_eq!(least(&pods, 30), 43, "300 at 7 a pod");
    }
    let all = |sender| Harmed { sender, harm: Harm::Gone, from: 40, long: 80 };
    let harms = Harms { all: vec![all(0), all(1)], ..Harms::default() };
    // The last that was told was quiet, but the averages still fell.
    let series = [held(39, 10), held(81, 0)].concat();
    let pods = run(&small(), &series, &harms);
    assert_eq!((pods[4 * 40], least(&pods, 40)), (8, 8), "nothing is known of the load");
}

#[test]
fn an_agent_that_never_came_is_no_quiet_node() {
    let series = vec![[0, 100, 0, 100, 0, 100, 0]; 60];
    let pods = run(&small(), &series, &harmed(1, Harm::Gone, 0, 60));
    assert_eq!(least(&pods, 0), 6, "what there is stays");
    let pods = run(&small(), &held(60, 0), &harmed(1, Harm::Gone, 0, 30));
    assert_eq!((least(&pods[..4 * 30], 0), pods.last()), (6, Some(&0)), "quiet, once it came");
}

#[test]
fn what_waits_at_an_activator_that_is_gone_keeps_its_pods() {
    let waits = [0, 0, 0, 0, 0, 0, 70];
    let series = [vec![waits; 30], held(8, 0)].concat();
    let pods = run(&small(), &series, &harmed(ACTIVATOR, Harm::Gone, 30, 8));
    assert_eq!(least(&pods, 30), 10, "70 at 7 a pod");
}

/// It names all that waits with it once, and then says nothing for some seconds.
#[test]
fn an_activator_that_falls_silent_after_its_first_words_is_missed() {
    let one_waits = [0, 0, 0, 0, 0, 0, 1];
    let series = [held(CALM + 11, 0), vec![one_waits], held(20, 0)].concat();
    let never = Harmed { sender: ACTIVATOR, harm: Harm::Gone, from: 0, long: CALM - 1 };
    let silent = Harmed { sender: ACTIVATOR, harm: Harm::Late, from: CALM, long: 16 };
    let harms = Harms { all: vec![never, silent], ..Harms::default() };
    let told = run(&small(), &series, &Harms::default());
    let harmed = run(&small(), &series, &harms);
    let ends = 4 * (CALM + 16);
    assert_eq!((told[ends], harmed[ends]), (1, 6), "nothing is known of what waits");
}

/// Ten pods' worth of load, halved at a tick, and four times as much before the next one.
#[test]
fn a_burst_between_two_ticks_lowers_nothing() {
    let series = [held(20, 10), held(21, 3), held(4, 60), held(4, 3)].concat();
    let pods = run(&small(), &series, &Harms::default());
    let at = 4 * 41 + 2;
    assert_eq!((pods[at - 1], pods[at]), (3, 52), "as soon as it is told: 360 at 7 a pod");
    assert_eq!(falls(&pods).find(|it| it % 8 != 0), None, "only at a tick");
}

/// When fewer pods were decided.
fn falls(pods: &[u32]) -> impl Iterator<Item = usize> {
    (1..pods.len()).filter(|&at| pods[at] < pods[at - 1])
}

fn harms() -> impl Strategy<Value = Harms> {
    let kind =
        prop_oneof![Just(Harm::Late), Just(Harm::Lost), Just(Harm::Repeated), Just(Harm::Gone)];
    let later = (0..=ACTIVATOR, kind, CALM..CALM + 48, 1usize..20)
        .prop_map(|(sender, harm, from, long)| Harmed { sender, harm, from, long });
    let never = (0..=ACTIVATOR, 1usize..60).prop_map(|(sender, long)| Harmed {
        sender,
        harm: Harm::Gone,
        from: 0,
        long,
    });
    let all = vec(prop_oneof![4 => later, 1 => never], 0..4);
    // Another decider begins at a tick, so that both runs can be compared there.
    let renewed = proptest::option::of((CALM / 2..CALM / 2 + 24).prop_map(|half| 2 * half));
    (all, renewed, any::<[u32; 3]>()).prop_map(|(all, renewed, clocks)| Harms {
        all,
        renewed,
        clocks_ns: clocks.map(|it| u64::from(it) * 1_000_000),
    })
}

fn series() -> impl Strategy<Value = Vec<Levels>> {
    let level = prop_oneof![3 => Just(0u64), 3 => 1u64..20, 1 => 20u64..60];
    let levels = vec(level, READY + 1).prop_map(|it| <Levels>::try_from(it).expect("so many"));
    let segments = vec((levels, 1usize..12), 6..14);
    segments.prop_map(|all| {
        let each = |(levels, long)| vec![levels; long];
        let load = all.into_iter().flat_map(each);
        let calm = [[0; READY + 1]; CALM].into_iter();
        calm.chain(load).chain([[0; READY + 1]; 20]).collect()
    })
}

fn policies() -> impl Strategy<Value = ScalePolicy> {
    let aggregation =
        prop_oneof![Just(Aggregation::Linear), Just(Aggregation::WeightedExponential)];
    (aggregation, 6u64..12, 10.0f64..60.0, 0u64..6, 0u64..6).prop_map(
        |(aggregation, stable, panic_window_percent, delay, retention)| ScalePolicy {
            aggregation,
            stable_window: Duration::from_secs(stable),
            panic_window_percent,
            scale_down_delay: Duration::from_secs(delay),
            retention: Duration::from_secs(retention),
            ..small()
        },
    )
}

proptest! {
    /// Whatever befalls the reports, nothing is lowered below what the same load asks for when all of it is told in time;
    /// and nothing is lowered but at a tick.
    #[test]
    fn scale_falls_only_on_knowledge(policy in policies(), series in series(), harms in harms()) {
        let told = run(&policy, &series, &Harms::default());
        let harmed = run(&policy, &series, &harms);
        for at in falls(&harmed) {
            prop_assert!(harmed[at] >= told[at], "{} of {} at {}", harmed[at], told[at], at);
            prop_assert_eq!(at % 8, 0, "lowered between two ticks");
        }
        prop_assert!(falls(&told).all(|at| at % 8 == 0));
    }

    /// Nothing is decided to zero while anything is in flight or waits that was ever told of.
    #[test]
    fn what_is_in_flight_is_never_decided_to_zero(series in series(), harms in harms()) {
        let pods = run(&small(), &series, &harms);
        for at in falls(&pods).filter(|&at| pods[at] == 0) {
            // At a tick the last report is of half a second before.
            prop_assert_eq!(series[at / 4 - 1], [0; READY + 1], "at {}", at);
        }
    }
}
