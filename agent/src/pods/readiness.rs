//! Pure: readiness of one pod: its listener first, then its own readiness probe.
//!
//! The first attempt follows the listener at once. While attempts fail, the wait between two is a quarter of the time
//! spent so far, from [`ATTEMPT_WAIT_MIN`] up to the probe's period. So an application that needs 20 ms is found within
//! 5 ms, and one that needs 20 s is not probed ten thousand times. A ready pod is probed once a period.

use std::time::{Duration, Instant};

use common::wire::{ProbeHandler, ReadinessProbe};

/// Shortest wait between a failed attempt and the next.
pub const ATTEMPT_WAIT_MIN: Duration = Duration::from_millis(2);

/// Longest wait between attempts if the probe has no period. Knative's queue-proxy uses the same value (knative/serving
/// `pkg/queue/readiness/probe.go`, `aggressiveProbe` polls every 25 ms).
pub const AGGRESSIVE_WAIT: Duration = Duration::from_millis(25);

/// Timeout of one attempt if the probe has none: Kubernetes' `timeoutSeconds: 1`.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(1);

/// State machine of one pod's readiness.
///
/// Pass every event to [`step`](Self::step) and make the attempt that it returns. Call it with [`ReadinessEvent::Tick`]
/// no later than [`next_wake`](Self::next_wake).
#[derive(Debug)]
pub struct ReadinessMachine {
    probe: ReadinessProbe,
    listening: bool,
    ready: bool,
    /// Number of successive results of one kind.
    streak: ResultStreak,
    phase: ReadinessPhase,
    /// Number of the newest attempt; results of older ones are void.
    seq: u64,
    last_failure: String,
}

#[derive(Debug, Default)]
struct ResultStreak {
    passes: u32,
    failures: u32,
}

#[derive(Debug, PartialEq)]
enum ReadinessPhase {
    /// No attempt is due: the port has no listener, or the listener alone decides.
    Idle,
    /// An attempt runs since `started`; the pod is unready since `since`.
    Probing { started: Instant, since: Instant },
    /// The next attempt is due at `until`.
    Waiting { until: Instant, since: Instant },
}

/// Event that concerns a pod's readiness.
#[derive(Clone, Debug, PartialEq)]
pub enum ReadinessEvent {
    /// The serving port has a listener (true) or none.
    Listening(bool),
    /// The attempt with the number `seq` ended.
    AttemptEnded {
        /// Number of the attempt, from [`ReadinessAttempt`].
        seq: u64,
        /// Result; a failure as text, for the pod's report.
        result: Result<(), String>,
    },
    /// Time has passed; carries no other fact.
    Tick,
}

/// One attempt to make now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadinessAttempt {
    /// Number of the attempt, repeated in its result.
    pub seq: u64,
    /// Timeout of the attempt.
    pub timeout: Duration,
}

impl ReadinessMachine {
    /// Starts with the readiness of a pod without a listener.
    pub fn new(probe: ReadinessProbe) -> Self {
        Self {
            probe,
            listening: false,
            ready: false,
            streak: ResultStreak::default(),
            phase: ReadinessPhase::Idle,
            seq: 0,
            last_failure: String::new(),
        }
    }

    /// Starts again with another probe, as for a pod without a listener. Results of attempts until now are void.
    pub fn restart(&mut self, probe: ReadinessProbe) {
        *self = Self { seq: self.seq, ..Self::new(probe) };
    }

    /// Returns the probe that decides on readiness.
    pub fn probe(&self) -> &ReadinessProbe {
        &self.probe
    }

    /// Returns true if the pod may get requests.
    pub fn is_ready(&self) -> bool {
        self.ready
    }

    /// Returns the failure of the newest attempt; empty after a success and before the first.
    pub fn last_failure(&self) -> &str {
        &self.last_failure
    }

    /// Returns the time for the next `step` with [`ReadinessEvent::Tick`].
    pub fn next_wake(&self) -> Option<Instant> {
        match self.phase {
            ReadinessPhase::Waiting { until, .. } => Some(until),
            ReadinessPhase::Idle | ReadinessPhase::Probing { .. } => None,
        }
    }

    /// Handles one event. Returns the attempt to make now, if any.
    pub fn step(&mut self, now: Instant, event: ReadinessEvent) -> Option<ReadinessAttempt> {
        match event {
            ReadinessEvent::Listening(listening) if listening == self.listening => None,
            ReadinessEvent::Listening(true) => self.handle_opened(now),
            ReadinessEvent::Listening(false) => self.handle_closed(),
            ReadinessEvent::AttemptEnded { seq, result } => self.handle_result(now, seq, result),
            ReadinessEvent::Tick => self.handle_tick(now),
        }
    }

    /// Handles the opening of the first listener: starts the first attempt at once.
    fn handle_opened(&mut self, now: Instant) -> Option<ReadinessAttempt> {
        self.listening = true;
        if self.probe.handler == ProbeHandler::Listen {
            self.ready = true;
            return None;
        }
        Some(self.start_attempt(now, now))
    }

    /// Handles the close of the last listener: the pod is not ready, and results count from zero.
    fn handle_closed(&mut self) -> Option<ReadinessAttempt> {
        self.listening = false;
        self.ready = false;
        self.streak = ResultStreak::default();
        self.phase = ReadinessPhase::Idle;
        self.last_failure.clear();
        None
    }

    fn start_attempt(&mut self, now: Instant, since: Instant) -> ReadinessAttempt {
        self.seq += 1;
        self.phase = ReadinessPhase::Probing { started: now, since };
        let timeout = self.probe.timeout;
        ReadinessAttempt {
            seq: self.seq,
            timeout: if timeout.is_zero() { DEFAULT_TIMEOUT } else { timeout },
        }
    }

    fn handle_tick(&mut self, now: Instant) -> Option<ReadinessAttempt> {
        match self.phase {
            ReadinessPhase::Waiting { until, since } if until <= now => {
                Some(self.start_attempt(now, since))
            }
            ReadinessPhase::Waiting { .. }
            | ReadinessPhase::Idle
            | ReadinessPhase::Probing { .. } => None,
        }
    }

    fn handle_result(
        &mut self,
        now: Instant,
        seq: u64,
        result: Result<(), String>,
    ) -> Option<ReadinessAttempt> {
        // A result of an attempt from before the listener closed proves nothing of the present listener.
        let ReadinessPhase::Probing { started, since } = self.phase else { return None };
        if seq != self.seq {
            return None;
        }
        let was_ready = self.ready;
        self.record_result(result);
        // A pod that has just turned unready is probed as often as a new one.
        let since = if was_ready && !self.ready { now } else { since };
        self.phase = match self.next_attempt_at(now, started, since) {
            Some(until) => ReadinessPhase::Waiting { until, since },
            None => ReadinessPhase::Idle,
        };
        None
    }

    fn record_result(&mut self, result: Result<(), String>) {
        // As in the kubelet, only results in a row count. Between the two thresholds the pod stays what it was.
        match result {
            Ok(()) => {
                self.streak =
                    ResultStreak { passes: self.streak.passes.saturating_add(1), failures: 0 };
                self.ready |= self.streak.passes >= self.probe.success_threshold;
                self.last_failure.clear();
            }
            Err(failure) => {
                self.streak =
                    ResultStreak { passes: 0, failures: self.streak.failures.saturating_add(1) };
                self.ready &= self.streak.failures < self.probe.failure_threshold;
                self.last_failure = failure;
            }
        }
    }

    /// Returns the time of the next attempt; `None` for a ready pod whose probe has no period.
    fn next_attempt_at(&self, now: Instant, started: Instant, since: Instant) -> Option<Instant> {
        let period = self.probe.period;
        if self.ready {
            // Counted from the attempt's start, so that a slow answer does not stretch the period.
            return (!period.is_zero()).then(|| now.max(started + period));
        }
        let longest = if period.is_zero() { AGGRESSIVE_WAIT } else { period.max(ATTEMPT_WAIT_MIN) };
        Some(now + (now.duration_since(since) / 4).clamp(ATTEMPT_WAIT_MIN, longest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn probe(handler: ProbeHandler) -> ReadinessProbe {
        ReadinessProbe {
            handler,
            port: None,
            period: Duration::from_secs(10),
            timeout: Duration::ZERO,
            success_threshold: 1,
            failure_threshold: 3,
        }
    }

    fn passed(seq: u64) -> ReadinessEvent {
        ReadinessEvent::AttemptEnded { seq, result: Ok(()) }
    }

    fn failed(seq: u64) -> ReadinessEvent {
        ReadinessEvent::AttemptEnded { seq, result: Err("refused".into()) }
    }

    /// Lets every attempt fail until `end`, and returns the times of the attempts, in ms after `start`.
    fn fail_until(machine: &mut ReadinessMachine, start: Instant, end: Duration) -> Vec<u128> {
        let mut now = start;
        let mut tried = machine.step(now, ReadinessEvent::Listening(true));
        let mut at = Vec::new();
        while now < start + end {
            let attempt = tried.expect("a try is due");
            at.push((now - start).as_millis());
            machine.step(now, failed(attempt.seq));
            now = machine.next_wake().expect("another try follows a failure");
            tried = machine.step(now, ReadinessEvent::Tick);
        }
        at
    }

    #[test]
    fn a_listener_alone_makes_a_pod_ready_without_a_probe() {
        let now = Instant::now();
        let mut machine = ReadinessMachine::new(probe(ProbeHandler::Listen));
        assert_eq!(machine.step(now, ReadinessEvent::Listening(true)), None);
        assert!(machine.is_ready());
        assert_eq!(machine.next_wake(), None);
        machine.step(now, ReadinessEvent::Listening(false));
        assert!(!machine.is_ready());
    }

    #[test]
    fn the_first_attempt_follows_the_listener_at_once() {
        let now = Instant::now();
        let mut machine = ReadinessMachine::new(probe(ProbeHandler::Tcp));
        assert_eq!(machine.step(now, ReadinessEvent::Tick), None, "no listener is open yet");
        let first = machine.step(now, ReadinessEvent::Listening(true));
        assert_eq!(first, Some(ReadinessAttempt { seq: 1, timeout: Duration::from_secs(1) }));
        assert_eq!(
            machine.step(now, ReadinessEvent::Listening(true)),
            None,
            "a second listener is no news"
        );
        machine.step(now, passed(1));
        assert!(machine.is_ready());
    }

    #[test]
    fn waits_grow_with_the_time_spent_up_to_the_period() {
        let start = Instant::now();
        let mut machine =
            ReadinessMachine::new(ReadinessProbe { period: 100 * MS, ..probe(ProbeHandler::Tcp) });
        let at = fail_until(&mut machine, start, Duration::from_secs(2));
        assert_eq!(at[..5], [0, 2, 4, 6, 8], "a few milliseconds at first");
        let waits: Vec<_> = at.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(waits.is_sorted(), "{waits:?}");
        assert_eq!(waits.last(), Some(&100), "then the period");
    }

    #[test]
    fn without_a_period_it_is_probed_every_25_ms_until_it_is_ready_and_never_after() {
        let start = Instant::now();
        let mut machine = ReadinessMachine::new(ReadinessProbe {
            period: Duration::ZERO,
            ..probe(ProbeHandler::Tcp)
        });
        let at = fail_until(&mut machine, start, Duration::from_secs(1));
        let longest = at.windows(2).map(|pair| pair[1] - pair[0]).max();
        assert_eq!(longest, Some(25));
        machine.step(start + Duration::from_secs(2), passed(machine.seq));
        assert!(machine.is_ready());
        assert_eq!(machine.next_wake(), None);
    }

    #[test]
    fn both_thresholds_count_results_in_a_row() {
        let now = Instant::now();
        let shape = ReadinessProbe {
            success_threshold: 2,
            failure_threshold: 2,
            ..probe(ProbeHandler::Tcp)
        };
        let mut machine = ReadinessMachine::new(shape);
        machine.step(now, ReadinessEvent::Listening(true));
        let mut at = now;
        let mut states = Vec::new();
        for pass in [true, false, true, true, false, true, false, false] {
            let event = if pass { passed(machine.seq) } else { failed(machine.seq) };
            machine.step(at, event);
            states.push(machine.is_ready());
            at = machine.next_wake().expect("a period is set");
            machine.step(at, ReadinessEvent::Tick);
        }
        assert_eq!(states, [false, false, false, true, true, true, true, false]);
    }

    #[test]
    fn a_ready_pod_is_probed_again_each_period_after_the_attempt_began() {
        let now = Instant::now();
        let mut machine = ReadinessMachine::new(probe(ProbeHandler::Tcp));
        machine.step(now, ReadinessEvent::Listening(true));
        machine.step(now + 300 * MS, passed(1));
        assert_eq!(machine.next_wake(), Some(now + Duration::from_secs(10)));
    }

    #[test]
    fn a_pod_that_turned_unready_is_probed_often_again() {
        let now = Instant::now();
        let mut machine = ReadinessMachine::new(ReadinessProbe {
            failure_threshold: 1,
            ..probe(ProbeHandler::Tcp)
        });
        machine.step(now, ReadinessEvent::Listening(true));
        machine.step(now, passed(1));
        let later = now + Duration::from_secs(10);
        machine.step(later, ReadinessEvent::Tick);
        machine.step(later, failed(2));
        assert!(!machine.is_ready());
        assert_eq!(machine.last_failure(), "refused");
        assert_eq!(machine.next_wake(), Some(later + ATTEMPT_WAIT_MIN));
    }

    #[test]
    fn a_result_from_before_the_listener_closed_counts_for_nothing() {
        let now = Instant::now();
        let mut machine = ReadinessMachine::new(probe(ProbeHandler::Tcp));
        machine.step(now, ReadinessEvent::Listening(true));
        machine.step(now, ReadinessEvent::Listening(false));
        machine.step(now, passed(1));
        assert!(!machine.is_ready());
        machine.step(now, ReadinessEvent::Listening(true));
        machine.step(now, passed(1));
        assert!(!machine.is_ready(), "the try belongs to the listener that closed");
        machine.step(now, passed(2));
        assert!(machine.is_ready());
    }
}
