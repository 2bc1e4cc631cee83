//! Pure: simulation of autoscalers and controllers on hosts of their own, which freeze, restart and lose agents.

use super::*;

/// Moments, of one tick each, after which windows are full.
const WINDOW: u64 = 60;
/// Upper bound of the length of a fault, in moments.
const FAULT_MAX: u64 = 40;
/// Moments without new faults, after which all replicas must agree: the last faults end, then windows become full.
const CALM: u64 = FAULT_MAX + WINDOW + 40;

#[derive(Clone, Debug)]
enum SimHostFault {
    Nothing,
    Freeze { autoscaler: usize, moments: u64 },
    LoseReporters { autoscaler: usize, moments: u64 },
    Restart { autoscaler: usize },
    FreezeController { controller: usize, moments: u64 },
    RestartController { controller: usize },
}

fn fault() -> impl Strategy<Value = SimHostFault> {
    let (one, moments) = (0usize..3, 1..FAULT_MAX);
    prop_oneof![
        12 => Just(SimHostFault::Nothing),
        2 => (one.clone(), moments.clone())
            .prop_map(|(autoscaler, moments)| SimHostFault::Freeze { autoscaler, moments }),
        1 => (one.clone(), moments.clone())
            .prop_map(|(autoscaler, moments)| SimHostFault::LoseReporters { autoscaler, moments }),
        2 => one.clone().prop_map(|autoscaler| SimHostFault::Restart { autoscaler }),
        1 => (one.clone(), moments)
            .prop_map(|(controller, moments)| SimHostFault::FreezeController { controller, moments }),
        1 => one.prop_map(|controller| SimHostFault::RestartController { controller }),
    ]
}

struct SimElectionAutoscaler {
    name: String,
    /// Time of its host's clock, which the election must not use.
    wall_ms: u64,
    /// Index of the controller that sends its RouteTable.
    follows: usize,
    receives_usage_since: u64,
    started: u64,
    frozen_since: u64,
    frozen_until: u64,
    /// Last moment at which it was frozen.
    was_frozen_at: u64,
    /// Begin and end of the last time in which it lacks reporters.
    few_reporters: (u64, u64),
    /// Last active autoscaler that its RouteTable named.
    active: Option<String>,
}

struct SimElectionController {
    election: AutoscalerElection,
    frozen_until: u64,
    /// Moment since which it has run without a pause.
    runs_since: u64,
    /// Number and name of its stream, by autoscaler.
    streams: BTreeMap<usize, (u64, String)>,
    messages: Vec<(u64, usize, String, AutoscalerHeartbeat)>,
}

struct SimElectionHosts {
    now: u64,
    autoscalers: Vec<SimElectionAutoscaler>,
    controllers: Vec<SimElectionController>,
    restarts: u64,
    streams: u64,
}

impl SimElectionHosts {
    fn new(clocks: &[u64]) -> Self {
        let mut hosts = Self {
            now: 0,
            autoscalers: Vec::new(),
            controllers: (0..3).map(|_| SimElectionController::new(0)).collect(),
            restarts: 0,
            streams: 0,
        };
        for wall_ms in clocks {
            let new = hosts.start_autoscaler(*wall_ms);
            hosts.autoscalers.push(new);
        }
        hosts
    }

    fn start_autoscaler(&mut self, wall_ms: u64) -> SimElectionAutoscaler {
        self.restarts += 1;
        // Later ones come first by name, so that the name alone would prefer a new one with empty windows.
        let name = format!("a{:03}", 999 - self.restarts);
        let follows = usize::try_from(self.restarts % 3).expect("below 3");
        let now = self.now;
        SimElectionAutoscaler {
            name,
            wall_ms,
            follows,
            receives_usage_since: now,
            started: now,
            frozen_since: 0,
            frozen_until: 0,
            was_frozen_at: 0,
            few_reporters: (0, 0),
            active: None,
        }
    }

    fn apply_fault(&mut self, fault: &SimHostFault) {
        let now = self.now;
        match *fault {
            SimHostFault::Nothing => {}
            SimHostFault::Freeze { autoscaler, moments } => {
                let it = &mut self.autoscalers[autoscaler];
                if now >= it.frozen_until {
                    it.frozen_since = now;
                }
                it.frozen_until = it.frozen_until.max(now + moments);
            }
            SimHostFault::LoseReporters { autoscaler, moments } => {
                self.autoscalers[autoscaler].few_reporters = (now, now + moments);
            }
            SimHostFault::Restart { autoscaler } => {
                let new = self.start_autoscaler(self.autoscalers[autoscaler].wall_ms);
                self.autoscalers[autoscaler] = new;
            }
            SimHostFault::FreezeController { controller, moments } => {
                self.controllers[controller].frozen_until = now + moments;
            }
            SimHostFault::RestartController { controller } => {
                self.controllers[controller] = SimElectionController::new(now);
            }
        }
    }

    /// Simulates one moment: tables are read, heartbeats sent and received.
    fn advance_tick(&mut self) {
        let now = self.now;
        for (at, it) in self.autoscalers.iter_mut().enumerate() {
            if now < it.frozen_until {
                it.was_frozen_at = now;
                continue;
            }
            // Windows survive a pause of less than a second.
            if it.was_frozen_at + 1 == now && now - it.frozen_since > 10 {
                it.receives_usage_since = now;
            }
            let table = &self.controllers[it.follows];
            if now >= table.frozen_until
                && let Some(chosen) = table.election.active_name()
            {
                it.active = Some(chosen.to_owned());
            }
            if now % 2 == u64::try_from(at % 2).expect("0 or 1") {
                let heartbeat = it.heartbeat(now);
                for (to, controller) in self.controllers.iter_mut().enumerate() {
                    let delay_ticks = (now + u64::try_from(at + to).expect("small")) % 2;
                    controller.messages.push((
                        now + delay_ticks,
                        at,
                        it.name.clone(),
                        heartbeat.clone(),
                    ));
                }
            }
        }
        for controller in &mut self.controllers {
            controller.advance_tick(now, &mut self.streams);
        }
        self.now += 1;
    }
}

impl SimElectionAutoscaler {
    fn heartbeat(&self, now: u64) -> AutoscalerHeartbeat {
        let received_for = now - self.receives_usage_since;
        AutoscalerHeartbeat {
            since_ms: self.wall_ms,
            observed_ms: received_for * 100,
            covers_all_windows: received_for >= WINDOW,
            reporters: if now < self.few_reporters.1 { 1 } else { 4 },
            active_autoscaler: self.active.clone(),
        }
    }

    /// Returns true if it has run, and sent heartbeats, for this long.
    fn has_run_for(&self, now: u64, moments: u64) -> bool {
        now >= self.frozen_until && now >= self.started.max(self.was_frozen_at) + moments
    }
}

impl SimElectionController {
    fn new(now: u64) -> Self {
        Self {
            election: AutoscalerElection::default(),
            frozen_until: 0,
            runs_since: now,
            streams: BTreeMap::new(),
            messages: Vec::new(),
        }
    }

    fn advance_tick(&mut self, now: u64, streams: &mut u64) {
        if now < self.frozen_until {
            self.runs_since = now + 1;
            return;
        }
        let messages = std::mem::take(&mut self.messages);
        for (at, from, name, heartbeat) in messages {
            if at > now {
                self.messages.push((at, from, name, heartbeat));
                continue;
            }
            let stream_name =
                self.streams.get(&from).filter(|(_, stream_name)| *stream_name == name);
            if let Some((stream, _)) = stream_name {
                self.election.handle_heartbeat(*stream, heartbeat);
                continue;
            }
            *streams += 1;
            if let Some((old, _)) = self.streams.insert(from, (*streams, name.clone())) {
                self.election.end_stream(old);
            }
            self.election.begin_stream(*streams, &name);
            self.election.handle_heartbeat(*streams, heartbeat);
            self.election.handle_synced(*streams);
        }
        self.election.tick();
    }

    fn chosen(&self) -> Option<String> {
        self.election.active_name().map(str::to_owned)
    }
}

/// Checks one controller at one moment, given its choice of the moment before. Each number of moments exceeds that of
/// the election by a few, in which messages arrive.
fn check(
    hosts: &SimElectionHosts,
    controller: &SimElectionController,
    previous: Option<&str>,
) -> Result<(), TestCaseError> {
    let now = hosts.now - 1;
    if now < controller.runs_since + 20 {
        return Ok(());
    }
    let autoscaler = |name: &str| hosts.autoscalers.iter().find(|it| it.name == name);
    let chosen = controller.election.active_name();
    let others = || hosts.autoscalers.iter().filter(|it| Some(it.name.as_str()) != chosen);
    if let (Some(old), Some(new)) = (previous.and_then(autoscaler), chosen.and_then(autoscaler))
        && old.name != new.name
        && old.has_run_for(now, 15)
    {
        let (is_full, is_older) = (
            now >= new.receives_usage_since + WINDOW,
            new.receives_usage_since <= old.receives_usage_since + 2 * DELAY_TOLERANCE_TICKS,
        );
        prop_assert!(is_full || is_older, "{} took over from {} at {now}", new.name, old.name);
    }
    if let Some(it) = chosen.and_then(autoscaler) {
        let frozen_for = if now < it.frozen_until { now - it.frozen_since } else { 0 };
        let another = others().any(|it| it.has_run_for(now, 20));
        prop_assert!(frozen_for < 10 || !another, "{} is frozen at {now}", it.name);
        let few_reporters_for = if now < it.few_reporters.1 { now - it.few_reporters.0 } else { 0 };
        let better = others().any(|it| {
            let knows =
                now >= it.receives_usage_since + WINDOW + 20 && now >= it.few_reporters.1 + 20;
            knows && it.has_run_for(now, 20)
        });
        prop_assert!(few_reporters_for < 16 || !better, "{} lacks reporters at {now}", it.name);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever freezes, restarts or loses agents, with any clocks: emptier windows never take over from a live
    /// autoscaler. One that lacks reporters or is frozen does not stay active, and replicas reach the same choice.
    #[test]
    fn replicas_agree_on_an_autoscaler_with_full_windows(
        clocks in proptest::collection::vec(0u64..4_000_000_000_000, 3),
        faults in proptest::collection::vec(fault(), 0..300),
    ) {
        let mut hosts = SimElectionHosts::new(&clocks);
        let calm = std::iter::repeat_n(&SimHostFault::Nothing, usize::try_from(CALM).expect("small"));
        for fault in faults.iter().chain(calm) {
            hosts.apply_fault(fault);
            let before: Vec<_> = hosts.controllers.iter().map(SimElectionController::chosen).collect();
            hosts.advance_tick();
            for (controller, before) in hosts.controllers.iter().zip(&before) {
                check(&hosts, controller, before.as_deref())?;
            }
        }
        let chosen: BTreeSet<_> = hosts.controllers.iter().map(SimElectionController::chosen).collect();
        prop_assert_eq!(chosen.len(), 1, "replicas differ: {:?}", chosen);
        prop_assert!(chosen.iter().all(Option::is_some));
    }
}
