//! Search of all interleavings of clients, process, kernel, controller and machine up to a depth.
//!
//! The reference is simple: a packet waits until a process that is not frozen answers it. Events, readings and ends of
//! freezes are delivered late, and events may be lost. States that differ only in their history are searched once.

use std::collections::HashSet;

use super::*;

/// Number of steps from each start. The shortest way to two freezes, with the end of the first one last, has as many.
const DEPTH: usize = 7;

/// Order with short times, so that few different times occur.
const SHORT_ORDER: StandbyOrder = StandbyOrder {
    quiet_time: Duration::from_secs(3),
    probe_time: Duration::from_secs(2),
    reclaims_memory: false,
    agent_timeout: StandbyOrder::DEFAULT_AGENT_TIMEOUT,
};

/// Longest time that matters to the machine. Longer ones are the same state.
const LONGEST_TIME: Duration = Duration::from_secs(12);

/// One step of the world around the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StandbyStep {
    SendRequest,
    SendProbe,
    AnswerRequest,
    AnswerProbe,
    DeliverPacketEvent,
    LosePacketEvent,
    TakeReading,
    DeliverReading,
    EndFreeze,
    FailFreeze,
    Order,
    Withdraw,
    Stop,
    WithdrawStop,
    ChangeProcesses,
    Tick,
}

/// Clients, process, kernel, shell and controller of one pod.
#[derive(Clone, Debug)]
struct StandbyWorld {
    machine: StandbyMachine,
    now: Instant,
    path: Vec<StandbyStep>,
    /// State of the kernel.
    is_armed: bool,
    is_frozen: bool,
    requests: u64,
    probes: u64,
    last_activity: Instant,
    /// Events and results on their way, the oldest first.
    packet_events: u32,
    freezes: Vec<u64>,
    readings: Vec<StandbyUsage>,
    is_reading_requested: bool,
    has_lost_event: bool,
    /// State of the controller.
    is_ordered: bool,
    is_stopping: bool,
    /// Thaws performed, less the causes taken.
    open_causes: u32,
}

impl StandbyWorld {
    fn new(now: Instant) -> Self {
        Self {
            machine: StandbyMachine::new(),
            now,
            path: Vec::new(),
            is_armed: false,
            is_frozen: false,
            requests: 0,
            probes: 0,
            last_activity: now,
            packet_events: 0,
            freezes: Vec::new(),
            readings: Vec::new(),
            is_reading_requested: false,
            has_lost_event: false,
            is_ordered: false,
            is_stopping: false,
            open_causes: 0,
        }
    }

    /// Returns the worlds from which the search starts: a new pod, a pod whose freeze is under way, and a frozen one.
    /// Each of them has been idle for long.
    fn starts() -> Vec<Self> {
        let begun = Instant::now();
        let new = Self { now: begun + LONGEST_TIME, ..Self::new(begun) };
        let after = |world: &Self, steps: &[StandbyStep]| {
            let mut world = world.clone();
            steps.iter().for_each(|step| world.perform(*step));
            world
        };
        let freezing = [
            StandbyStep::Order,
            StandbyStep::TakeReading,
            StandbyStep::DeliverReading,
            StandbyStep::TakeReading,
            StandbyStep::DeliverReading,
        ];
        let frozen =
            [StandbyStep::EndFreeze, StandbyStep::TakeReading, StandbyStep::DeliverReading];
        let freezing = after(&new, &freezing);
        let frozen = after(&freezing, &frozen);
        assert_eq!((freezing.freezes.len(), frozen.is_reported_frozen()), (1, true));
        vec![new, freezing, frozen]
    }

    /// Returns the steps that are possible now.
    fn possible_steps(&self) -> Vec<StandbyStep> {
        let runs = self.is_running();
        let conditions = [
            (StandbyStep::SendRequest, self.requests == 0),
            (StandbyStep::SendProbe, self.probes == 0),
            (StandbyStep::AnswerRequest, runs && self.requests > 0),
            (StandbyStep::AnswerProbe, runs && self.probes > 0),
            (StandbyStep::DeliverPacketEvent, self.packet_events > 0),
            (StandbyStep::LosePacketEvent, self.packet_events > 0),
            // The shell may take readings that were not requested.
            (StandbyStep::TakeReading, self.readings.len() < 2),
            (StandbyStep::DeliverReading, !self.readings.is_empty()),
            (StandbyStep::EndFreeze, !self.freezes.is_empty()),
            (StandbyStep::FailFreeze, !self.freezes.is_empty()),
            (StandbyStep::Order, !self.is_ordered),
            (StandbyStep::Withdraw, self.is_ordered),
            (StandbyStep::Stop, !self.is_stopping),
            (StandbyStep::WithdrawStop, self.is_stopping),
            (StandbyStep::ChangeProcesses, true),
            (StandbyStep::Tick, self.machine.next_wake().is_some()),
        ];
        conditions.into_iter().filter(|(_, is_possible)| *is_possible).map(|it| it.0).collect()
    }

    fn perform(&mut self, step: StandbyStep) {
        // Each failed assertion names the steps that lead to it.
        self.path.push(step);
        match step {
            StandbyStep::SendRequest => {
                self.requests += 1;
                self.packet_events += u32::from(self.is_armed);
            }
            StandbyStep::SendProbe => {
                self.probes += 1;
                self.packet_events += u32::from(self.is_armed);
            }
            StandbyStep::AnswerRequest => {
                self.requests -= 1;
                self.last_activity = self.now;
            }
            StandbyStep::AnswerProbe => self.probes -= 1,
            StandbyStep::DeliverPacketEvent => self.deliver_packet_event(),
            StandbyStep::LosePacketEvent => {
                self.packet_events -= 1;
                self.has_lost_event = true;
            }
            StandbyStep::TakeReading => self.take_reading(),
            StandbyStep::DeliverReading => {
                // The oldest first: readings of one pod never overtake each other.
                let usage = self.readings.remove(0);
                self.send(StandbyEvent::UsageRead(usage));
            }
            StandbyStep::EndFreeze => self.end_freeze(Ok(())),
            StandbyStep::FailFreeze => self.end_freeze(Err("busy".to_owned())),
            StandbyStep::Order => {
                self.is_ordered = true;
                self.send(StandbyEvent::Ordered(Some(SHORT_ORDER)));
            }
            StandbyStep::Withdraw => {
                self.is_ordered = false;
                self.send(StandbyEvent::Ordered(None));
            }
            StandbyStep::Stop => {
                self.is_stopping = true;
                self.send(StandbyEvent::StopRequested);
            }
            StandbyStep::WithdrawStop => {
                self.is_stopping = false;
                self.send(StandbyEvent::StopWithdrawn);
            }
            StandbyStep::ChangeProcesses => {
                self.send(StandbyEvent::ProcessesChanged);
            }
            StandbyStep::Tick => {
                self.now = self.machine.next_wake().expect("a wake is due");
                self.send(StandbyEvent::Tick);
            }
        }
    }

    /// Delivers a packet event: a frozen pod is thawed before anything else happens.
    fn deliver_packet_event(&mut self) {
        self.packet_events -= 1;
        let was_frozen = self.is_frozen;
        let actions = self.send(StandbyEvent::PacketSeen);
        let is_first = matches!(actions.first(), Some(Thaw(_)));
        assert_eq!(is_first, was_frozen, "{actions:?} after {:?}", self.path);
    }

    fn take_reading(&mut self) {
        self.is_reading_requested = false;
        self.readings.push(StandbyUsage {
            is_ready: true,
            in_flight: self.requests,
            other_connections: self.probes,
            idle: self.now - self.last_activity,
            ..StandbyUsage::default()
        });
    }

    /// Ends the oldest freeze. That of a freeze that was undone has no effect.
    fn end_freeze(&mut self, result: Result<(), String>) {
        let number = self.freezes.remove(0);
        let is_in_force = self.is_frozen && number == self.machine.freeze_number;
        let actions = self.send(StandbyEvent::FreezeEnded(number, result));
        assert!(is_in_force || actions.is_empty(), "{actions:?} after {:?}", self.path);
    }

    /// Passes an event in, and performs the actions as the shell does.
    fn send(&mut self, event: StandbyEvent) -> Vec<StandbyAction> {
        let actions = self.machine.step(self.now, event);
        for action in &actions {
            match action {
                Arm => self.is_armed = true,
                Disarm => self.is_armed = false,
                ReadUsage => self.is_reading_requested = true,
                Freeze(number) => {
                    let may_freeze = self.is_ordered && !self.is_stopping && self.is_armed;
                    assert!(may_freeze, "a freeze after {:?}", self.path);
                    assert!(!self.is_frozen, "a second freeze after {:?}", self.path);
                    // The order counts at once, and the processes stop only at the end of the freeze.
                    self.is_frozen = true;
                    self.freezes.push(*number);
                }
                Thaw(_) => {
                    assert!(self.is_frozen, "a thaw of a running pod after {:?}", self.path);
                    self.is_frozen = false;
                    self.open_causes += 1;
                }
                Report => {}
            }
        }
        self.open_causes -= u32::from(self.machine.take_thaw_cause().is_some());
        assert_eq!(self.open_causes > 0, self.machine.has_unknown_thaw, "{:?}", self.path);
        assert_eq!(self.machine.is_frozen(), self.is_frozen, "{:?}", self.path);
        assert!(!self.is_reported_frozen() || !self.is_running(), "{:?}", self.path);
        actions
    }

    /// Returns true if the process runs. It may do so until its freeze has ended.
    fn is_running(&self) -> bool {
        !self.is_frozen || self.freezes.contains(&self.machine.freeze_number)
    }

    fn is_reported_frozen(&self) -> bool {
        self.machine.report(None).is_some_and(|report| report.is_frozen)
    }

    fn has_failed(&self) -> bool {
        self.machine.report(None).is_some_and(|report| !report.failure.is_empty())
    }

    /// Delivers everything that is on its way, while clients and process do nothing.
    fn deliver_all(&mut self) {
        for _ in 0..50 {
            let step = if self.packet_events > 0 {
                StandbyStep::DeliverPacketEvent
            } else if !self.freezes.is_empty() {
                StandbyStep::EndFreeze
            } else if !self.readings.is_empty() {
                StandbyStep::DeliverReading
            } else if self.is_reading_requested {
                StandbyStep::TakeReading
            } else {
                return;
            };
            self.perform(step);
        }
        panic!("the machine never rests after {:?}", self.path);
    }

    fn tick_and_deliver(&mut self) {
        if self.machine.next_wake().is_some() {
            self.perform(StandbyStep::Tick);
            self.deliver_all();
        }
    }

    fn assert_no_packet_waits_frozen(&self) {
        let is_waiting = self.requests + self.probes > 0;
        assert!(!(self.is_frozen && is_waiting), "a packet waits after {:?}", self.path);
    }

    /// Lets the world end: everything is delivered, then time passes, then clients are answered.
    fn check_end(mut self) {
        self.deliver_all();
        if !self.has_lost_event {
            self.assert_no_packet_waits_frozen();
        }
        // A lost event costs one reading.
        self.tick_and_deliver();
        self.tick_and_deliver();
        self.assert_no_packet_waits_frozen();
        if !self.is_ordered || self.is_stopping || self.has_failed() {
            let is_at_rest = !self.is_frozen && !self.is_armed;
            assert!(is_at_rest && self.machine.next_wake().is_none(), "{:?}", self.path);
            return;
        }
        (self.requests, self.probes) = (0, 0);
        self.last_activity = self.now;
        let mut ticks = 0;
        while !self.is_reported_frozen() {
            assert!(ticks < 24, "a quiet pod is never frozen after {:?}", self.path);
            self.tick_and_deliver();
            ticks += 1;
        }
    }

    /// Returns a key that is equal for worlds with the same future. Times count from now.
    fn key(&self) -> Vec<u128> {
        let past = |at: Instant| self.now.saturating_duration_since(at).min(LONGEST_TIME);
        let age = |at: Option<Instant>| at.map_or(0, |it| 1 + past(it).as_millis());
        let wait = |at: Option<Instant>| {
            at.map_or(0, |it| 1 + it.saturating_duration_since(self.now).as_millis())
        };
        let machine = &self.machine;
        let (pause_kind, pause_time) = match machine.pause {
            None => (0, 0),
            Some(FreezePause::Until(until)) => (1, wait(Some(until))),
            Some(FreezePause::Packet { seen_at, kind }) => (2 + kind as u128, age(Some(seen_at))),
        };
        let flags = [
            self.is_armed,
            self.is_frozen,
            self.is_reading_requested,
            self.has_lost_event,
            self.is_ordered,
            self.is_stopping,
            machine.is_stopping,
            machine.failure.is_some(),
            machine.order.is_some(),
            machine.has_unknown_thaw,
        ];
        let mut key = vec![
            machine.phase as u128,
            pause_kind,
            pause_time,
            age(machine.armed_since),
            wait(machine.wake_at),
            age(Some(self.last_activity)),
            u128::from(self.requests),
            u128::from(self.probes),
            u128::from(self.packet_events),
        ];
        key.extend(flags.map(u128::from));
        // Lists of different lengths must not look alike.
        key.push(self.freezes.len() as u128);
        key.extend(self.freezes.iter().map(|it| u128::from(machine.freeze_number - it)));
        for usage in &self.readings {
            let idle = usage.idle.min(LONGEST_TIME).as_millis();
            let [requests, probes] = [usage.in_flight, usage.other_connections].map(u128::from);
            key.extend([requests, probes, idle]);
        }
        key
    }
}

/// Figures that show what a search has reached.
#[derive(Clone, Copy, Debug, Default)]
struct SearchFigures {
    frozen: usize,
    thawed_by_packet: usize,
    failed: usize,
    with_late_end: usize,
}

impl SearchFigures {
    fn count(&mut self, world: &StandbyWorld) {
        let is_late = |number: &u64| !world.is_frozen || *number != world.machine.freeze_number;
        self.frozen += usize::from(world.is_reported_frozen());
        self.thawed_by_packet += usize::from(world.machine.has_unknown_thaw);
        self.failed += usize::from(world.has_failed());
        self.with_late_end += usize::from(world.freezes.iter().any(is_late));
    }
}

#[test]
fn no_packet_waits_in_a_frozen_pod_in_any_interleaving() {
    let mut level = StandbyWorld::starts();
    let mut seen: HashSet<Vec<u128>> = level.iter().map(StandbyWorld::key).collect();
    let mut figures = SearchFigures::default();
    for _ in 0..DEPTH {
        let mut next = Vec::new();
        for world in &level {
            for step in world.possible_steps() {
                let mut after = world.clone();
                after.perform(step);
                if seen.insert(after.key()) {
                    figures.count(&after);
                    after.clone().check_end();
                    next.push(after);
                }
            }
        }
        level = next;
    }
    let SearchFigures { frozen, thawed_by_packet, failed, with_late_end } = figures;
    let smallest = frozen.min(thawed_by_packet).min(failed).min(with_late_end);
    assert!(smallest > 100, "the search reaches every kind of state: {figures:?}");
}
