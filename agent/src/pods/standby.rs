//! Pure: standby of one pod, which is frozen while it has an order and nothing uses it.
//!
//! Three readings of the pod's usage surround a freeze. After the first one, the kernel's events are armed. The second
//! one shows use that began before the events. The third one follows the freeze, and shows use whose event was lost.
//! A packet event, or a reading that shows use, thaws the pod at any moment. One that comes late thaws it without need.

mod events;
mod freeze_pause;
pub(crate) mod thaw_promise;
mod thaws;

use std::{
    mem,
    time::{Duration, Instant},
};

use common::wire::{StandbyOrder, StandbyReport};

pub use self::events::{StandbyAction, StandbyEvent, StandbyUsage, ThawCause};
use self::freeze_pause::{FreezePause, NewConnections, PacketKind};

/// Period in which a running pod with an order is read.
const READ_PERIOD: Duration = Duration::from_secs(1);

/// Longest time without a reading of a frozen pod, and longest wait for a requested one. It is twice the period of the
/// readings that the shell makes without a request, so one is requested only if those are missing.
const FROZEN_READ_TIMEOUT: Duration = Duration::from_secs(2);

/// Longest wait for the end of a freeze. The shell gives up a second before (`FREEZE_TIMEOUT` in `kernel/freezer.rs`),
/// and states a better reason.
const FREEZE_END_TIMEOUT: Duration = Duration::from_secs(20);

/// Failure of a freeze for which the shell gives no reason. An empty text in the report would mean that no freeze
/// failed.
const UNKNOWN_FAILURE: &str = "the pod cannot be frozen, for an unknown reason";

/// State machine of one pod's standby.
///
/// Pass every event to [`step`](Self::step), and perform the actions that it returns in their order. Call it with
/// [`StandbyEvent::Tick`] no later than [`next_wake`](Self::next_wake).
#[derive(Clone, Debug, Default)]
pub struct StandbyMachine {
    /// Order in force; `None`: the pod runs.
    order: Option<StandbyOrder>,
    /// True from a stop request until it is withdrawn.
    is_stopping: bool,
    /// True once the agent stops.
    is_shut_down: bool,
    /// Reason for which the pod could not be frozen. It holds until the order is withdrawn.
    failure: Option<String>,
    /// Phase of the pod between running and frozen.
    phase: StandbyPhase,
    /// Time at which the kernel's events were armed; `None`: they are not. After a thaw by a packet they stay armed
    /// until a reading shows a request, because a further probe moves the end of the pause.
    armed_since: Option<Instant>,
    /// Reason and time for which the running pod is not frozen although it is quiet.
    pause: Option<FreezePause>,
    /// Age of the connections that have not carried a request yet.
    new_connections: NewConnections,
    /// Number of the newest freeze; results of older ones are void.
    freeze_number: u64,
    /// True if a packet has thawed the pod, and no reading has shown yet if it was a request.
    has_unknown_thaw: bool,
    /// Cause of the newest thaw, until it is taken.
    known_cause: Option<ThawCause>,
    /// Time at which a tick has an effect, which depends on the phase.
    wake_at: Option<Instant>,
}

/// Phase of a pod between running and frozen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum StandbyPhase {
    /// The pod runs. At the wake time, if there is one, its usage is read.
    #[default]
    Running,
    /// The kernel's events are armed, and a reading after that is awaited. At the wake time it is requested again.
    Armed,
    /// The newest freeze is under way. At the wake time it has failed.
    Freezing,
    /// The pod is frozen, and the last check is awaited. At the wake time its usage counts as unknown.
    Checking,
    /// The pod is frozen, and nothing has used it. At the wake time its usage is read.
    Frozen,
    /// The pod is frozen as before, and a reading is awaited. At the wake time its usage counts as unknown.
    Rechecking,
}

impl StandbyMachine {
    /// Starts with a running pod without an order: an agent thaws every pod at its start.
    pub fn new() -> Self {
        Self::default()
    }

    /// Handles one event. Returns the actions to perform, a thaw first.
    pub fn step(&mut self, now: Instant, event: StandbyEvent) -> Vec<StandbyAction> {
        let mut out = Vec::new();
        // The pod was thawed for the time without an agent, and no later event may freeze it.
        if self.is_shut_down {
            return out;
        }
        let before = self.report(None);
        match event {
            StandbyEvent::Ordered(order) => self.handle_order(now, order, &mut out),
            StandbyEvent::UsageRead(usage) => self.handle_usage(now, usage, &mut out),
            StandbyEvent::PacketSeen => self.handle_packet(now, &mut out),
            StandbyEvent::ProcessesChanged => self.handle_processes_changed(now, &mut out),
            StandbyEvent::StopRequested => self.handle_stop(now, &mut out),
            StandbyEvent::StopWithdrawn => self.handle_stop_withdrawn(now, &mut out),
            StandbyEvent::FreezeEnded(number, result) => {
                self.handle_freeze_end(now, number, result, &mut out);
            }
            StandbyEvent::Tick => self.handle_tick(now, &mut out),
        }
        self.report_change(before, &mut out);
        out
    }

    /// Returns the time for the next [`step`](Self::step) with [`StandbyEvent::Tick`].
    pub fn next_wake(&self) -> Option<Instant> {
        self.wake_at
    }

    /// Returns true if the pod is frozen or being frozen.
    pub fn is_frozen(&self) -> bool {
        match self.phase {
            StandbyPhase::Running | StandbyPhase::Armed => false,
            StandbyPhase::Freezing
            | StandbyPhase::Checking
            | StandbyPhase::Frozen
            | StandbyPhase::Rechecking => true,
        }
    }

    /// Returns the report about the pod, with the memory that it holds; `None` without an order. A pod counts as frozen
    /// only after the last check.
    pub fn report(&self, memory_bytes: Option<u64>) -> Option<StandbyReport> {
        self.order?;
        let is_frozen = matches!(self.phase, StandbyPhase::Frozen | StandbyPhase::Rechecking);
        let failure = self.failure.clone().unwrap_or_default();
        Some(StandbyReport { is_frozen, memory_bytes, failure })
    }

    /// Returns the cause of each thaw once, as soon as it is known. Call it after each step. If a packet has thawed the
    /// pod, only the next reading shows a probe or a request. Without such a reading it counts as a request.
    pub fn take_thaw_cause(&mut self) -> Option<ThawCause> {
        self.known_cause.take()
    }

    /// Stops the standby for good: the agent stops. Later events have no effect.
    pub fn shut_down(&mut self) -> Vec<StandbyAction> {
        let mut out = Vec::new();
        let before = self.report(None);
        self.is_shut_down = true;
        self.thaw(ThawCause::Other, &mut out);
        self.report_change(before, &mut out);
        out
    }

    fn report_change(&self, before: Option<StandbyReport>, out: &mut Vec<StandbyAction>) {
        if self.report(None) != before {
            out.push(StandbyAction::Report);
        }
    }

    fn handle_order(
        &mut self,
        now: Instant,
        order: Option<StandbyOrder>,
        out: &mut Vec<StandbyAction>,
    ) {
        let was_ordered = mem::replace(&mut self.order, order).is_some();
        if order.is_none() {
            self.failure = None;
            self.thaw_without_packet(now, ThawCause::Other, out);
            // The next order is a new decision, so a pause that began under this one does not delay it.
            self.pause = None;
        } else if !was_ordered {
            self.start_readings(now, out);
        }
    }

    /// Handles a reading of what uses the pod. Only readings after the arming lead to a freeze.
    fn handle_usage(&mut self, now: Instant, usage: StandbyUsage, out: &mut Vec<StandbyAction>) {
        self.new_connections.observe(now, usage.unused_connections);
        let Some(order) = self.order.filter(|_| self.may_freeze()) else { return };
        self.update_packet_kind(now, order, usage, out);
        let is_quiet = self.is_quiet(now, order, usage);
        match self.phase {
            StandbyPhase::Running => self.arm_if_due(now, order, usage, out),
            // Use that sent no event began before the arming, or its event was lost.
            StandbyPhase::Armed
            | StandbyPhase::Freezing
            | StandbyPhase::Checking
            | StandbyPhase::Frozen
            | StandbyPhase::Rechecking
                if !is_quiet =>
            {
                self.thaw_for_use(now, order, usage, out);
            }
            // Quiet after the arming: from here on each use of the pod sends an event.
            StandbyPhase::Armed => self.start_freeze(now, out),
            // Processes may run until the freeze has ended, so this reading proves nothing.
            StandbyPhase::Freezing => {}
            StandbyPhase::Checking | StandbyPhase::Frozen | StandbyPhase::Rechecking => {
                self.phase = StandbyPhase::Frozen;
                self.wake_at = Some(now + FROZEN_READ_TIMEOUT);
            }
        }
    }

    fn handle_packet(&mut self, now: Instant, out: &mut Vec<StandbyAction>) {
        // An event that was on its way when the events were disarmed.
        if self.armed_since.is_none() {
            return;
        }
        // The pod was thawed for an earlier packet, so another one only moves the end of the pause.
        if self.phase == StandbyPhase::Running {
            if let Some(FreezePause::Packet { seen_at, .. }) = &mut self.pause {
                *seen_at = now;
            }
            return;
        }
        self.thaw_for_packet(now, PacketKind::Unknown, out);
        self.read_usage(now, out);
    }

    fn handle_processes_changed(&mut self, now: Instant, out: &mut Vec<StandbyAction>) {
        if self.phase != StandbyPhase::Running {
            self.thaw_without_packet(now, ThawCause::Other, out);
        }
    }

    fn handle_stop(&mut self, now: Instant, out: &mut Vec<StandbyAction>) {
        self.is_stopping = true;
        self.thaw_without_packet(now, ThawCause::Kubelet, out);
    }

    fn handle_stop_withdrawn(&mut self, now: Instant, out: &mut Vec<StandbyAction>) {
        if mem::take(&mut self.is_stopping) {
            self.start_readings(now, out);
        }
    }

    fn handle_freeze_end(
        &mut self,
        now: Instant,
        number: u64,
        result: Result<(), String>,
        out: &mut Vec<StandbyAction>,
    ) {
        // A packet may have undone this freeze, and another freeze may be under way by now.
        if self.phase != StandbyPhase::Freezing || number != self.freeze_number {
            return;
        }
        match result {
            // Processes may have run until now, so only a later reading shows all use whose event was lost.
            Ok(()) => {
                self.phase = StandbyPhase::Checking;
                self.wake_at = Some(now + FROZEN_READ_TIMEOUT);
                out.push(StandbyAction::ReadUsage);
            }
            Err(reason) => self.record_failure(now, reason, out),
        }
    }

    fn handle_tick(&mut self, now: Instant, out: &mut Vec<StandbyAction>) {
        if self.wake_at.is_none_or(|at| now < at) {
            return;
        }
        match self.phase {
            // The last reading failed, or it is time for the next one.
            StandbyPhase::Running | StandbyPhase::Armed => self.read_usage(now, out),
            StandbyPhase::Freezing => {
                let reason = format!("the pod was not frozen within {FREEZE_END_TIMEOUT:?}");
                self.record_failure(now, reason, out);
            }
            StandbyPhase::Frozen => {
                self.phase = StandbyPhase::Rechecking;
                self.wake_at = Some(now + FROZEN_READ_TIMEOUT);
                out.push(StandbyAction::ReadUsage);
            }
            // Unknown usage is no proof that nothing waits.
            StandbyPhase::Checking | StandbyPhase::Rechecking => {
                self.thaw_without_packet(now, ThawCause::Other, out);
            }
        }
    }

    /// Returns true if the pod may be frozen once it is quiet.
    fn may_freeze(&self) -> bool {
        self.order.is_some() && self.failure.is_none() && !self.is_stopping && !self.is_shut_down
    }

    /// Requests the first reading since the pod may be frozen.
    fn start_readings(&mut self, now: Instant, out: &mut Vec<StandbyAction>) {
        if self.may_freeze() {
            self.read_usage(now, out);
        }
    }

    /// Requests a reading of a pod that is not frozen. It is requested again if it does not come.
    fn read_usage(&mut self, now: Instant, out: &mut Vec<StandbyAction>) {
        self.wake_at = Some(now + READ_PERIOD);
        out.push(StandbyAction::ReadUsage);
    }

    /// Returns true if nothing uses the pod.
    fn is_quiet(&self, now: Instant, order: StandbyOrder, usage: StandbyUsage) -> bool {
        usage.is_ready
            && usage.in_flight == 0
            && usage.other_connections == 0
            && !usage.has_sessions
            && !self.awaits_request(now, order, usage)
    }

    /// Arms the kernel's events if the running pod is quiet and no pause holds. Otherwise sets the time of the next
    /// reading.
    fn arm_if_due(
        &mut self,
        now: Instant,
        order: StandbyOrder,
        usage: StandbyUsage,
        out: &mut Vec<StandbyAction>,
    ) {
        let pause = self.remaining_pause(now, order, usage);
        // A pause ends at a known time, and use at a time that only a reading shows.
        if !pause.is_zero() || !self.is_quiet(now, order, usage) {
            let wait = if pause.is_zero() { READ_PERIOD } else { pause.min(READ_PERIOD) };
            self.wake_at = Some(now + wait);
            return;
        }
        self.pause = None;
        // If the events are armed since an earlier packet, activity since then still counts.
        self.armed_since.get_or_insert(now);
        self.phase = StandbyPhase::Armed;
        out.push(StandbyAction::Arm);
        self.read_usage(now, out);
    }

    fn start_freeze(&mut self, now: Instant, out: &mut Vec<StandbyAction>) {
        self.freeze_number += 1;
        self.phase = StandbyPhase::Freezing;
        self.wake_at = Some(now + FREEZE_END_TIMEOUT);
        out.push(StandbyAction::Freeze(self.freeze_number));
    }

    /// Records a failure, and thaws what was frozen of the pod. The controller ends a pod with a failure.
    fn record_failure(&mut self, now: Instant, reason: String, out: &mut Vec<StandbyAction>) {
        self.failure = Some(if reason.is_empty() { UNKNOWN_FAILURE.to_owned() } else { reason });
        self.thaw_without_packet(now, ThawCause::Other, out);
    }
}

#[cfg(test)]
mod tests;
