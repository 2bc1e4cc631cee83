use super::{
    StandbyAction::{Arm, Disarm, Freeze, ReadUsage, Report, Thaw},
    freeze_pause::PROBE_END_PAUSE,
    thaws::OTHER_PAUSE,
    *,
};

mod interleavings;

const SECOND: Duration = Duration::from_secs(1);
const QUIET_TIME: Duration = Duration::from_secs(60);
const PROBE_TIME: Duration = Duration::from_secs(3);
const NO_ACTION: [StandbyAction; 0] = [];

fn order() -> StandbyOrder {
    StandbyOrder {
        quiet_time: QUIET_TIME,
        probe_time: PROBE_TIME,
        reclaims_memory: false,
        agent_timeout: StandbyOrder::DEFAULT_AGENT_TIMEOUT,
    }
}

/// Returns the usage of a ready pod that nothing has used for a long time.
fn quiet() -> StandbyUsage {
    StandbyUsage { is_ready: true, idle: QUIET_TIME * 10, ..StandbyUsage::default() }
}

fn with_request() -> StandbyUsage {
    StandbyUsage { in_flight: 1, ..quiet() }
}

fn with_unused_connection() -> StandbyUsage {
    StandbyUsage { unused_connections: 1, ..quiet() }
}

fn with_probe() -> StandbyUsage {
    StandbyUsage { other_connections: 1, ..quiet() }
}

/// Returns one reading of each kind that shows use.
fn readings_in_use() -> [StandbyUsage; 5] {
    [
        StandbyUsage { is_ready: false, ..quiet() },
        with_request(),
        with_unused_connection(),
        StandbyUsage { has_sessions: true, ..quiet() },
        with_probe(),
    ]
}

/// One pod, and the time that the test moves.
#[derive(Clone, Debug)]
struct DrivenStandby {
    machine: StandbyMachine,
    now: Instant,
}

impl DrivenStandby {
    fn new() -> Self {
        Self { machine: StandbyMachine::new(), now: Instant::now() }
    }

    /// Returns a pod with an order, whose first reading is awaited.
    fn ordered() -> Self {
        let mut pod = Self::new();
        assert_eq!(pod.send(StandbyEvent::Ordered(Some(order()))), [ReadUsage, Report]);
        pod
    }

    fn armed() -> Self {
        let mut pod = Self::ordered();
        assert_eq!(pod.read(quiet()), [Arm, ReadUsage]);
        pod
    }

    fn freezing() -> Self {
        let mut pod = Self::armed();
        assert_eq!(pod.read(quiet()), [Freeze(1)]);
        pod
    }

    /// Returns a pod whose freeze has ended, and whose last check is awaited.
    fn checking() -> Self {
        let mut pod = Self::freezing();
        assert_eq!(pod.send(StandbyEvent::FreezeEnded(1, Ok(()))), [ReadUsage]);
        pod
    }

    /// Returns a pod that was frozen a second ago.
    fn frozen() -> Self {
        let mut pod = Self::checking();
        assert_eq!(pod.read(quiet()), [Report]);
        pod.now += SECOND;
        pod
    }

    fn send(&mut self, event: StandbyEvent) -> Vec<StandbyAction> {
        self.machine.step(self.now, event)
    }

    fn read(&mut self, usage: StandbyUsage) -> Vec<StandbyAction> {
        self.send(StandbyEvent::UsageRead(usage))
    }

    /// Moves the time to the next wake, and passes in the tick.
    fn tick(&mut self) -> Vec<StandbyAction> {
        let wake = self.machine.next_wake().expect("a wake is due");
        self.now = self.now.max(wake);
        self.send(StandbyEvent::Tick)
    }

    /// Passes in `usage`, by the time from now, until the pod is armed. Returns that time.
    fn time_until_armed(&mut self, usage: impl Fn(Duration) -> StandbyUsage) -> Duration {
        let start = self.now;
        for _ in 0..100 {
            assert_eq!(self.tick(), [ReadUsage]);
            if self.read(usage(self.now - start)).contains(&Arm) {
                return self.now - start;
            }
        }
        panic!("the pod is never armed: {self:?}");
    }

    fn failure(&self) -> String {
        self.machine.report(None).expect("the pod has an order").failure
    }

    fn is_reported_frozen(&self) -> bool {
        self.machine.report(None).expect("the pod has an order").is_frozen
    }
}

#[test]
fn a_quiet_pod_is_armed_and_read_again_and_frozen_and_checked() {
    let mut pod = DrivenStandby::new();
    assert_eq!(pod.machine.report(None), None, "no order is known");
    assert_eq!(pod.machine.next_wake(), None);
    assert_eq!(pod.read(quiet()), NO_ACTION);
    assert_eq!(pod.send(StandbyEvent::Ordered(Some(order()))), [ReadUsage, Report]);
    assert_eq!(pod.machine.report(None), Some(StandbyReport::default()));
    assert_eq!(pod.read(quiet()), [Arm, ReadUsage]);
    assert!(!pod.machine.is_frozen());
    assert_eq!(pod.read(quiet()), [Freeze(1)]);
    assert!(pod.machine.is_frozen());
    assert_eq!(pod.read(quiet()), NO_ACTION, "a reading during the freeze proves nothing");
    assert_eq!(pod.send(StandbyEvent::FreezeEnded(1, Ok(()))), [ReadUsage]);
    assert!(!pod.is_reported_frozen(), "the last check is missing");
    assert_eq!(pod.read(quiet()), [Report]);
    let report = StandbyReport { is_frozen: true, memory_bytes: Some(7), failure: String::new() };
    assert_eq!(pod.machine.report(Some(7)), Some(report));
    assert_eq!(pod.machine.take_thaw_cause(), None);
}

#[test]
fn a_pod_in_use_is_read_each_second_until_it_is_quiet() {
    for usage in readings_in_use() {
        let mut pod = DrivenStandby::ordered();
        assert_eq!(pod.read(usage), NO_ACTION, "{usage:?}");
        assert_eq!(pod.machine.next_wake(), Some(pod.now + SECOND), "{usage:?}");
        assert_eq!(pod.send(StandbyEvent::Tick), NO_ACTION, "{usage:?}: too early");
        assert_eq!(pod.tick(), [ReadUsage], "{usage:?}");
        assert_eq!(pod.tick(), [ReadUsage], "{usage:?}: the reading did not come");
        assert_eq!(pod.read(quiet()), [Arm, ReadUsage], "{usage:?}");
    }
}

#[test]
fn a_reading_that_shows_use_stops_the_freeze_in_each_phase() {
    for usage in readings_in_use() {
        let mut pod = DrivenStandby::armed();
        let actions = pod.read(usage);
        let is_thaw = |action: &StandbyAction| matches!(action, Thaw(_));
        assert!(!actions.iter().any(is_thaw), "{usage:?}: nothing is frozen: {actions:?}");
        assert_eq!(pod.machine.next_wake(), Some(pod.now + SECOND), "{usage:?}");
        for mut pod in
            [DrivenStandby::freezing(), DrivenStandby::checking(), DrivenStandby::frozen()]
        {
            let was_reported = pod.is_reported_frozen();
            let actions = pod.read(usage);
            assert!(is_thaw(&actions[0]), "{usage:?}: {actions:?}");
            assert_eq!(actions.contains(&Report), was_reported, "{usage:?}: {actions:?}");
            assert!(!pod.machine.is_frozen() && !pod.is_reported_frozen());
        }
    }
}

#[test]
fn a_packet_thaws_first_in_each_phase() {
    let packet = StandbyEvent::PacketSeen;
    assert_eq!(DrivenStandby::armed().send(packet.clone()), [ReadUsage], "nothing is frozen");
    let thaw = Thaw(ThawCause::Request);
    assert_eq!(DrivenStandby::freezing().send(packet.clone()), [thaw, ReadUsage]);
    assert_eq!(DrivenStandby::checking().send(packet.clone()), [thaw, ReadUsage]);
    assert_eq!(DrivenStandby::frozen().send(packet), [thaw, ReadUsage, Report]);
}

#[test]
fn a_packet_event_from_before_the_events_were_armed_has_no_effect() {
    assert_eq!(DrivenStandby::new().send(StandbyEvent::PacketSeen), NO_ACTION);
    let mut pod = DrivenStandby::ordered();
    assert_eq!(pod.send(StandbyEvent::PacketSeen), NO_ACTION);
    assert_eq!(pod.read(quiet()), [Arm, ReadUsage]);
}

#[test]
fn the_end_of_a_freeze_that_was_undone_has_no_effect() {
    for end in [Ok(()), Err("busy".to_owned())] {
        let mut pod = DrivenStandby::freezing();
        pod.send(StandbyEvent::PacketSeen);
        assert_eq!(pod.send(StandbyEvent::FreezeEnded(1, end.clone())), NO_ACTION);
        assert_eq!(pod.failure(), "");

        // The next freeze is under way when the end of the first one comes.
        let mut pod = DrivenStandby::freezing();
        pod.send(StandbyEvent::Ordered(None));
        pod.send(StandbyEvent::Ordered(Some(order())));
        pod.read(quiet());
        assert_eq!(pod.read(quiet()), [Freeze(2)]);
        assert_eq!(pod.send(StandbyEvent::FreezeEnded(1, end)), NO_ACTION);
        assert_eq!(pod.send(StandbyEvent::FreezeEnded(2, Ok(()))), [ReadUsage]);
    }
}

#[test]
fn a_probe_thaws_the_pod_until_a_moment_after_the_last_packet() {
    let mut pod = DrivenStandby::frozen();
    pod.send(StandbyEvent::PacketSeen);
    assert_eq!(pod.machine.take_thaw_cause(), None, "no reading has come");
    assert_eq!(pod.read(quiet()), NO_ACTION, "further probes must be seen");
    assert_eq!(pod.machine.take_thaw_cause(), Some(ThawCause::Probe));
    assert_eq!(pod.clone().time_until_armed(|_| quiet()), PROBE_END_PAUSE);

    pod.now += PROBE_END_PAUSE / 2;
    assert_eq!(pod.send(StandbyEvent::PacketSeen), NO_ACTION);
    assert_eq!(pod.time_until_armed(|_| quiet()), PROBE_END_PAUSE);
    assert_eq!(pod.machine.take_thaw_cause(), None, "the pod was thawed once");
    assert_eq!(pod.read(quiet()), [Freeze(2)]);
}

#[test]
fn a_probe_keeps_the_pod_awake_while_its_connection_is_open() {
    let mut pod = DrivenStandby::frozen();
    pod.send(StandbyEvent::PacketSeen);
    assert_eq!(pod.read(with_probe()), NO_ACTION);
    let takes = PROBE_TIME * 2;
    let usage = |passed: Duration| if passed < takes { with_probe() } else { quiet() };
    assert_eq!(pod.time_until_armed(usage), takes);
}

/// Each probe is answered at once, and the next one comes before the probe time of the last one is over.
#[test]
fn probes_that_may_take_longer_than_their_period_let_the_pod_freeze_between_two() {
    let period = PROBE_TIME / 2;
    let mut pod = DrivenStandby::frozen();
    for freeze in 2..5 {
        let probed_at = pod.now;
        pod.send(StandbyEvent::PacketSeen);
        assert_eq!(pod.read(quiet()), NO_ACTION);
        assert!(pod.time_until_armed(|_| quiet()) < period);
        assert_eq!(pod.read(quiet()), [Freeze(freeze)]);
        pod.send(StandbyEvent::FreezeEnded(freeze, Ok(())));
        assert_eq!(pod.read(quiet()), [Report]);
        pod.now = probed_at + period;
    }
}

#[test]
fn a_request_thaws_the_pod_for_the_quiet_time_after_its_end() {
    let request_time = SECOND * 5;
    let mut pod = DrivenStandby::frozen();
    pod.send(StandbyEvent::PacketSeen);
    assert_eq!(pod.read(with_request()), [Disarm]);
    assert_eq!(pod.machine.take_thaw_cause(), Some(ThawCause::Request));
    let usage = |passed: Duration| StandbyUsage {
        in_flight: u64::from(passed < request_time),
        idle: passed.saturating_sub(request_time),
        ..quiet()
    };
    assert_eq!(pod.time_until_armed(usage), request_time + QUIET_TIME);
}

#[test]
fn a_request_that_ended_before_the_reading_is_no_probe() {
    let just_ended = Duration::from_millis(1);
    let mut pod = DrivenStandby::frozen();
    pod.send(StandbyEvent::PacketSeen);
    assert_eq!(pod.read(StandbyUsage { idle: just_ended, ..quiet() }), [Disarm]);
    assert_eq!(pod.machine.take_thaw_cause(), Some(ThawCause::Request));
    let usage = |passed: Duration| StandbyUsage { idle: passed + just_ended, ..quiet() };
    assert_eq!(pod.time_until_armed(usage), QUIET_TIME);
}

#[test]
fn a_request_that_a_late_reading_hid_still_keeps_the_pod_awake() {
    let mut pod = DrivenStandby::frozen();
    pod.send(StandbyEvent::PacketSeen);
    pod.read(quiet());
    assert_eq!(pod.read(with_request()), [Disarm]);
    let usage = |passed: Duration| StandbyUsage { idle: passed, ..quiet() };
    assert_eq!(pod.time_until_armed(usage), QUIET_TIME);
}

#[test]
fn a_connection_of_the_node_is_a_request_or_a_probe_only_by_its_first_bytes() {
    let mut pod = DrivenStandby::frozen();
    pod.send(StandbyEvent::PacketSeen);
    assert_eq!(pod.read(with_unused_connection()), NO_ACTION);
    assert_eq!(pod.machine.take_thaw_cause(), None);
    for (usage, cause) in [(quiet(), ThawCause::Probe), (with_request(), ThawCause::Request)] {
        let mut pod = pod.clone();
        pod.read(usage);
        assert_eq!(pod.machine.take_thaw_cause(), Some(cause));
    }
}

#[test]
fn use_of_a_frozen_pod_is_found_without_an_event() {
    let mut pod = DrivenStandby::frozen();
    assert_eq!(pod.read(with_request()), [Thaw(ThawCause::Request), Disarm, Report]);
    assert_eq!(pod.machine.take_thaw_cause(), Some(ThawCause::Request));

    let mut pod = DrivenStandby::frozen();
    assert_eq!(pod.read(with_probe()), [Thaw(ThawCause::Probe), Report]);
    assert_eq!(pod.machine.take_thaw_cause(), Some(ThawCause::Probe));

    let mut pod = DrivenStandby::frozen();
    assert_eq!(pod.read(with_unused_connection()), [Thaw(ThawCause::Request), Report]);
    assert_eq!(pod.machine.take_thaw_cause(), None, "it has brought nothing yet");

    let mut pod = DrivenStandby::frozen();
    let with_session = StandbyUsage { has_sessions: true, ..quiet() };
    assert_eq!(pod.read(with_session), [Thaw(ThawCause::Other), Disarm, Report]);
    assert_eq!(pod.machine.take_thaw_cause(), Some(ThawCause::Other));
}

#[test]
fn an_unused_connection_delays_the_freeze_until_it_is_old() {
    let mut pod = DrivenStandby::ordered();
    assert_eq!(pod.read(with_unused_connection()), NO_ACTION);
    assert_eq!(pod.time_until_armed(|_| with_unused_connection()), PROBE_TIME);
    let two = StandbyUsage { unused_connections: 2, ..quiet() };
    pod.read(two);
    assert!(!pod.machine.is_frozen(), "the second one is new");

    let mut pod = DrivenStandby::ordered();
    let age = QUIET_TIME / 2;
    let usage = |passed: Duration| StandbyUsage { idle: age + passed, ..with_unused_connection() };
    assert_eq!(pod.read(usage(Duration::ZERO)), NO_ACTION);
    assert_eq!(pod.time_until_armed(usage), QUIET_TIME - age);
}

#[test]
fn a_new_order_freezes_the_pod_at_once() {
    let mut pod = DrivenStandby::frozen();
    pod.send(StandbyEvent::PacketSeen);
    pod.read(with_request());
    assert_eq!(pod.send(StandbyEvent::Ordered(None)), [Report]);
    assert_eq!(pod.machine.report(None), None);
    assert_eq!(pod.machine.next_wake(), None);
    assert_eq!(pod.send(StandbyEvent::Ordered(Some(order()))), [ReadUsage, Report]);
    let just_ended = StandbyUsage { idle: Duration::ZERO, ..quiet() };
    assert_eq!(pod.read(just_ended), [Arm, ReadUsage]);
}

#[test]
fn a_repeated_or_changed_order_is_not_a_new_one() {
    let changed = StandbyOrder { quiet_time: QUIET_TIME / 2, ..order() };
    for (again, quiet_time) in [(order(), QUIET_TIME), (changed, QUIET_TIME / 2)] {
        let mut pod = DrivenStandby::frozen();
        assert_eq!(pod.send(StandbyEvent::Ordered(Some(again))), NO_ACTION);
        assert!(pod.is_reported_frozen());
        pod.send(StandbyEvent::PacketSeen);
        pod.read(with_request());
        assert_eq!(pod.send(StandbyEvent::Ordered(Some(again))), NO_ACTION);
        let usage = |passed: Duration| StandbyUsage { idle: passed, ..quiet() };
        assert_eq!(pod.time_until_armed(usage), quiet_time);
    }
}

#[test]
fn a_withdrawn_order_thaws_the_pod_in_each_phase() {
    let thaw = Thaw(ThawCause::Other);
    let withdrawn = StandbyEvent::Ordered(None);
    assert_eq!(DrivenStandby::armed().send(withdrawn.clone()), [Disarm, Report]);
    for mut pod in [DrivenStandby::freezing(), DrivenStandby::checking(), DrivenStandby::frozen()] {
        assert_eq!(pod.send(withdrawn.clone()), [thaw, Disarm, Report]);
        assert_eq!(pod.machine.take_thaw_cause(), Some(ThawCause::Other));
        assert_eq!(pod.machine.report(None), None);
        assert_eq!(pod.read(quiet()), NO_ACTION);
        assert_eq!(pod.send(withdrawn.clone()), NO_ACTION);
    }
}

#[test]
fn a_thaw_by_a_packet_whose_order_is_withdrawn_counts_as_a_request() {
    let mut pod = DrivenStandby::frozen();
    pod.send(StandbyEvent::PacketSeen);
    assert_eq!(pod.send(StandbyEvent::Ordered(None)), [Disarm, Report]);
    assert_eq!(pod.machine.take_thaw_cause(), Some(ThawCause::Request));
    assert_eq!(pod.machine.take_thaw_cause(), None);
}

#[test]
fn a_change_of_processes_thaws_the_pod_for_ten_seconds() {
    let mut pod = DrivenStandby::frozen();
    let actions = pod.send(StandbyEvent::ProcessesChanged);
    assert_eq!(actions, [Thaw(ThawCause::Other), Disarm, Report]);
    // The end of the command changes them as well, and moves nothing.
    pod.now += SECOND * 4;
    assert_eq!(pod.send(StandbyEvent::ProcessesChanged), NO_ACTION);
    assert_eq!(pod.time_until_armed(|_| quiet()), OTHER_PAUSE - SECOND * 4);
}

#[test]
fn a_running_pod_may_change_its_processes() {
    let mut pod = DrivenStandby::ordered();
    assert_eq!(pod.send(StandbyEvent::ProcessesChanged), NO_ACTION);
    assert_eq!(pod.read(quiet()), [Arm, ReadUsage]);
}

#[test]
fn a_failed_freeze_is_reported_and_not_repeated_before_a_new_order() {
    for (reason, reported) in [("busy", "busy"), ("", UNKNOWN_FAILURE)] {
        let mut pod = DrivenStandby::freezing();
        let actions = pod.send(StandbyEvent::FreezeEnded(1, Err(reason.to_owned())));
        assert_eq!(actions, [Thaw(ThawCause::Other), Disarm, Report]);
        assert_eq!(pod.failure(), reported);
        assert_eq!(pod.machine.next_wake(), None);
        assert_eq!(pod.send(StandbyEvent::Ordered(Some(order()))), NO_ACTION);
        assert_eq!(pod.read(quiet()), NO_ACTION);
        assert_eq!(pod.send(StandbyEvent::Ordered(None)), [Report]);
        assert_eq!(pod.send(StandbyEvent::Ordered(Some(order()))), [ReadUsage, Report]);
        assert_eq!(pod.failure(), "");
        assert_eq!(pod.read(quiet()), [Arm, ReadUsage]);
    }
}

#[test]
fn a_freeze_that_hangs_is_a_failure() {
    let mut pod = DrivenStandby::freezing();
    pod.now += SECOND;
    assert_eq!(pod.send(StandbyEvent::Tick), NO_ACTION);
    assert_eq!(pod.tick(), [Thaw(ThawCause::Other), Disarm, Report]);
    assert_eq!(pod.failure(), "the pod was not frozen within 20s");
    assert_eq!(pod.send(StandbyEvent::FreezeEnded(1, Ok(()))), NO_ACTION);
    assert!(!pod.machine.is_frozen());
}

#[test]
fn a_frozen_pod_whose_usage_is_unknown_is_thawed() {
    let mut pod = DrivenStandby::checking();
    assert_eq!(pod.tick(), [Thaw(ThawCause::Other), Disarm]);
    assert_eq!(pod.machine.next_wake(), Some(pod.now + SECOND));

    let mut pod = DrivenStandby::frozen();
    assert_eq!(pod.tick(), [ReadUsage]);
    assert_eq!(pod.read(quiet()), NO_ACTION);
    assert_eq!(pod.tick(), [ReadUsage]);
    assert!(pod.is_reported_frozen());
    assert_eq!(pod.tick(), [Thaw(ThawCause::Other), Disarm, Report]);
}

#[test]
fn a_stop_thaws_the_pod_and_holds_until_it_is_withdrawn() {
    let mut pod = DrivenStandby::frozen();
    assert_eq!(pod.send(StandbyEvent::StopWithdrawn), NO_ACTION, "no stop was requested");
    let actions = pod.send(StandbyEvent::StopRequested);
    assert_eq!(actions, [Thaw(ThawCause::Kubelet), Disarm, Report]);
    assert_eq!(pod.machine.take_thaw_cause(), Some(ThawCause::Kubelet));
    assert_eq!(pod.send(StandbyEvent::StopRequested), NO_ACTION);
    assert_eq!(pod.machine.next_wake(), None);
    assert_eq!(pod.read(quiet()), NO_ACTION);
    assert_eq!(pod.send(StandbyEvent::Ordered(None)), [Report]);
    assert_eq!(pod.send(StandbyEvent::Ordered(Some(order()))), [Report]);
    assert_eq!(pod.send(StandbyEvent::StopWithdrawn), [ReadUsage]);
    assert_eq!(pod.read(quiet()), [Arm, ReadUsage]);
}

#[test]
fn a_stop_of_an_armed_pod_disarms_it() {
    assert_eq!(DrivenStandby::armed().send(StandbyEvent::StopRequested), [Disarm]);
    // A probe has thawed the pod, and its events are still armed.
    let mut pod = DrivenStandby::frozen();
    pod.send(StandbyEvent::PacketSeen);
    pod.read(quiet());
    assert_eq!(pod.send(StandbyEvent::StopRequested), [Disarm]);
}

#[test]
fn a_machine_that_is_shut_down_thaws_and_freezes_no_more() {
    let mut pod = DrivenStandby::frozen();
    assert_eq!(pod.machine.shut_down(), [Thaw(ThawCause::Other), Disarm, Report]);
    assert_eq!(pod.machine.shut_down(), NO_ACTION);
    assert_eq!(pod.machine.next_wake(), None);
    for event in [
        StandbyEvent::Tick,
        StandbyEvent::UsageRead(quiet()),
        StandbyEvent::Ordered(None),
        StandbyEvent::Ordered(Some(order())),
        StandbyEvent::UsageRead(quiet()),
    ] {
        assert_eq!(pod.send(event), NO_ACTION);
    }
    assert_eq!(DrivenStandby::ordered().machine.shut_down(), NO_ACTION);
    assert_eq!(DrivenStandby::armed().machine.shut_down(), [Disarm]);
}

#[test]
fn causes_have_the_names_of_the_metrics() {
    let causes = [ThawCause::Request, ThawCause::Probe, ThawCause::Kubelet, ThawCause::Other];
    assert_eq!(causes.map(ThawCause::name), ["request", "probe", "kubelet", "other"]);
}
