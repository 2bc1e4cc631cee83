//! Pure: standby of one pod, which is frozen while it has an order and nothing uses it.
//!
//! Three readings of the pod's usage surround a freeze. After the first one, the kernel's events are armed. The second
//! one shows use that began before the events. The third one follows the freeze, and shows use whose event was lost.
//! A packet event, or a reading that shows use, thaws the pod at any moment. One that comes late thaws it without need.

use std::{
    mem,
    time::{Duration, Instant},
};

use common::wire::{StandbyOrder, StandbyReport};

/// Period in which a running pod with an order is read.
const READ_PERIOD: Duration = Duration::from_secs(1);

/// Longest time without a reading of a frozen pod, and longest wait for one. It is twice the period in which the shell
/// reads each pod by itself, so a reading is requested only if those are missing.
const FROZEN_READ_TIMEOUT: Duration = Duration::from_secs(2);

/// Longest time that a freeze may take. The kernel needs milliseconds, unless a process cannot be stopped. On a busy node
/// each process must get a processor before it stops.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(20);

/// Time for which a pod runs after a probe whose connection has closed. The application may still have to accept it,
/// and each connection that it has not accepted takes a place in its listener's backlog.
const PROBE_END_PAUSE: Duration = Duration::from_millis(500);

/// Time for which a pod runs after a thaw for another reason than a packet. A user who runs a command in the pod may
/// run the next one.
const OTHER_PAUSE: Duration = Duration::from_secs(10);

/// Failure of a freeze for which the shell gives no reason. An empty text in the report would mean that none failed.
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
    phase: StandbyPhase,
    /// Time at which the kernel's events were armed; `None`: they are not. After a thaw by a packet they stay armed
    /// until a reading shows a request, because a further probe moves the end of the pause.
    armed_since: Option<Instant>,
    /// Reason and time for which the running pod is not frozen although it is quiet.
    pause: Option<FreezePause>,
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

/// Event that concerns one pod's standby.
#[derive(Clone, Debug, PartialEq)]
pub enum StandbyEvent {
    /// The RouteTable has this order for the pod; `None`: the pod runs. A repeated order changes nothing.
    Ordered(Option<StandbyOrder>),
    /// The maps and the pod's processes were read. Each [`StandbyAction::ReadUsage`] is followed by a reading that
    /// began after it. Others may come at any time.
    UsageRead(StandbyUsage),
    /// The kernel saw a new connection or a request while its events were armed.
    PacketSeen,
    /// The pod's processes changed, or its cgroup was frozen or thawed by another program. Without effect while the pod
    /// runs: its own processes may start others, and a program that has frozen it may have a reason.
    ProcessesChanged,
    /// The pod is to stop: a preStop request, a drain, or its removal from the RouteTable.
    StopRequested,
    /// The container was restarted: an earlier [`StandbyEvent::StopRequested`] no longer holds.
    StopWithdrawn,
    /// The freeze with this number ended; a failure as text, for the pod's report. Without effect if the pod was thawed
    /// meanwhile.
    FreezeEnded(u64, Result<(), String>),
    /// Time has passed; carries no other fact.
    Tick,
}

/// Usage of one pod at one moment. Each reading is complete, because a field that was left out would look like no use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StandbyUsage {
    /// True if the pod's readiness has passed, and the kernel's maps hold the pod.
    pub is_ready: bool,
    /// Requests in flight in the pod.
    pub in_flight: u64,
    /// Counted connections that have not carried a request yet. One of the node itself may turn out to be a probe's.
    pub unused_connections: u64,
    /// Time since a request ended, or a counted connection was established that is not suspected to be a probe's.
    pub idle: Duration,
    /// True if the pod has processes besides the containers' own, as of `kubectl exec`.
    pub has_sessions: bool,
    /// Open connections of the pod's namespace that do not count, as of probes and `kubectl port-forward`.
    pub other_connections: u64,
}

/// Action that the shell is to perform now, in the order of the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StandbyAction {
    /// Let the kernel send an event for each new connection and the next request. A repetition is allowed.
    Arm,
    /// Let the kernel send events as for a running pod.
    Disarm,
    /// Read the pod's usage, and pass it in.
    ReadUsage,
    /// Begin to freeze the pod's cgroup. The order is written to the cgroup before the next action is performed, so
    /// that a thaw cannot be overtaken. Its end is passed in with this number.
    Freeze(u64),
    /// Thaw the pod's cgroup. This undoes a freeze under way. Its cause is as known now; see
    /// [`StandbyMachine::take_thaw_cause`].
    Thaw(ThawCause),
    /// Report [`StandbyMachine::report`], which has changed.
    Report,
}

/// Cause of a thaw.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ThawCause {
    /// A request, or a counted connection that may bring one.
    Request,
    /// A connection that does not count, as of a probe.
    Probe,
    /// A stop of the pod, as the kubelet's preStop request.
    Kubelet,
    /// A withdrawn order, a change of the pod's processes, a failed freeze, unknown usage, or the stop of the agent.
    Other,
}

impl ThawCause {
    /// Returns the cause's name in metrics and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::Probe => "probe",
            Self::Kubelet => "kubelet",
            Self::Other => "other",
        }
    }
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

/// Pause in which a pod is not frozen although it is quiet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FreezePause {
    /// A packet came, last at `seen_at`. The length of the pause is one of the order's times.
    Packet { seen_at: Instant, kind: PacketKind },
    /// The pod was thawed for another reason, and runs until this time.
    Until(Instant),
}

/// Kind of the packet that thawed a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PacketKind {
    /// A connection that has brought nothing yet, or a packet after which no reading came.
    Unknown,
    /// Nothing that counts. A later reading may show a request all the same.
    Probe,
    /// A request, or a connection that counts.
    Request,
}

impl StandbyMachine {
    /// Starts with a running pod without an order: an agent thaws every pod at its start.
    pub fn new() -> Self {
        Self::default()
    }

    /// Handles one event. Returns the actions to perform, a thaw first.
    pub fn step(&mut self, now: Instant, event: StandbyEvent) -> Vec<StandbyAction> {
        let mut out = Vec::new();
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
            self.release(now, ThawCause::Other, out);
            // The next order is a new decision, so no pause of this one holds for it.
            self.pause = None;
        } else if !was_ordered {
            self.begin_reading(now, out);
        }
    }

    fn handle_usage(&mut self, now: Instant, usage: StandbyUsage, out: &mut Vec<StandbyAction>) {
        self.new_connections.observe(now, usage.unused_connections);
        let Some(order) = self.order.filter(|_| self.may_freeze()) else { return };
        self.update_packet_kind(now, order, usage, out);
        let is_quiet = self.is_quiet(now, order, usage);
        match self.phase {
            StandbyPhase::Running => self.arm_if_due(now, order, usage, out),
            StandbyPhase::Armed
            | StandbyPhase::Freezing
            | StandbyPhase::Checking
            | StandbyPhase::Frozen
            | StandbyPhase::Rechecking
                if !is_quiet =>
            {
                self.handle_use(now, order, usage, out);
            }
            StandbyPhase::Armed => self.start_freeze(now, out),
            // A reading from before the end of the freeze proves nothing.
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
            self.release(now, ThawCause::Other, out);
        }
    }

    fn handle_stop(&mut self, now: Instant, out: &mut Vec<StandbyAction>) {
        self.is_stopping = true;
        self.release(now, ThawCause::Kubelet, out);
    }

    fn handle_stop_withdrawn(&mut self, now: Instant, out: &mut Vec<StandbyAction>) {
        if mem::take(&mut self.is_stopping) {
            self.begin_reading(now, out);
        }
    }

    fn handle_freeze_end(
        &mut self,
        now: Instant,
        number: u64,
        result: Result<(), String>,
        out: &mut Vec<StandbyAction>,
    ) {
        if self.phase != StandbyPhase::Freezing || number != self.freeze_number {
            return;
        }
        match result {
            Ok(()) => {
                self.phase = StandbyPhase::Checking;
                self.wake_at = Some(now + FROZEN_READ_TIMEOUT);
                out.push(StandbyAction::ReadUsage);
            }
            Err(reason) => self.fail(now, reason, out),
        }
    }

    fn handle_tick(&mut self, now: Instant, out: &mut Vec<StandbyAction>) {
        if self.wake_at.is_none_or(|at| now < at) {
            return;
        }
        match self.phase {
            StandbyPhase::Running | StandbyPhase::Armed => self.read_usage(now, out),
            StandbyPhase::Freezing => {
                let reason = format!("the pod was not frozen within {FREEZE_TIMEOUT:?}");
                self.fail(now, reason, out);
            }
            StandbyPhase::Frozen => {
                self.phase = StandbyPhase::Rechecking;
                self.wake_at = Some(now + FROZEN_READ_TIMEOUT);
                out.push(StandbyAction::ReadUsage);
            }
            // Unknown usage is no proof that nothing waits.
            StandbyPhase::Checking | StandbyPhase::Rechecking => {
                self.release(now, ThawCause::Other, out);
            }
        }
    }

    /// Returns true if the pod may be frozen once it is quiet.
    fn may_freeze(&self) -> bool {
        self.order.is_some() && self.failure.is_none() && !self.is_stopping && !self.is_shut_down
    }

    fn begin_reading(&mut self, now: Instant, out: &mut Vec<StandbyAction>) {
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

    /// Returns true if a connection may still bring its first request. One that has brought none for the quiet time
    /// belongs to a pool of a client.
    fn awaits_request(&self, now: Instant, order: StandbyOrder, usage: StandbyUsage) -> bool {
        usage.unused_connections > 0
            && (usage.idle < order.quiet_time || self.new_connections.is_new(now, order.probe_time))
    }

    /// Returns the kind of the packets since the kernel's events were armed, by a reading after them.
    fn packet_kind(&self, now: Instant, order: StandbyOrder, usage: StandbyUsage) -> PacketKind {
        let is_since_armed = |since: Instant| usage.idle < now.saturating_duration_since(since);
        if usage.in_flight > 0 || self.armed_since.is_some_and(is_since_armed) {
            PacketKind::Request
        } else if self.awaits_request(now, order, usage) {
            // A connection from the node itself may be a probe's, until its first bytes have come.
            PacketKind::Unknown
        } else {
            PacketKind::Probe
        }
    }

    /// Updates the kind of the packet that thawed the pod. A request is never taken back for a probe.
    fn update_packet_kind(
        &mut self,
        now: Instant,
        order: StandbyOrder,
        usage: StandbyUsage,
        out: &mut Vec<StandbyAction>,
    ) {
        let Some(FreezePause::Packet { seen_at, kind }) = self.pause else { return };
        if kind == PacketKind::Request {
            return;
        }
        let kind = self.packet_kind(now, order, usage);
        self.pause = Some(FreezePause::Packet { seen_at, kind });
        self.settle_packet(kind, out);
    }

    /// Settles the cause of the thaw by the packet's kind. Events are of use only until a request has come.
    fn settle_packet(&mut self, kind: PacketKind, out: &mut Vec<StandbyAction>) {
        match kind {
            PacketKind::Unknown => {}
            PacketKind::Probe => self.settle_cause(ThawCause::Probe),
            PacketKind::Request => {
                self.settle_cause(ThawCause::Request);
                self.disarm(out);
            }
        }
    }

    fn settle_cause(&mut self, cause: ThawCause) {
        if mem::take(&mut self.has_unknown_thaw) {
            self.known_cause = Some(cause);
        }
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
        if !pause.is_zero() || !self.is_quiet(now, order, usage) {
            let wait = if pause.is_zero() { READ_PERIOD } else { pause.min(READ_PERIOD) };
            self.wake_at = Some(now + wait);
            return;
        }
        self.pause = None;
        // If they are armed already, activity since then still counts.
        self.armed_since.get_or_insert(now);
        self.phase = StandbyPhase::Armed;
        out.push(StandbyAction::Arm);
        self.read_usage(now, out);
    }

    /// Returns the time for which the running pod is not frozen although it may be quiet.
    fn remaining_pause(&self, now: Instant, order: StandbyOrder, usage: StandbyUsage) -> Duration {
        match self.pause {
            None => Duration::ZERO,
            Some(FreezePause::Until(until)) => until.saturating_duration_since(now),
            Some(FreezePause::Packet { seen_at, kind }) => {
                let since_packet = now.saturating_duration_since(seen_at);
                match kind {
                    // Its connection has closed. Probes that may take longer than their period would otherwise keep
                    // the pod awake for good.
                    PacketKind::Probe if usage.other_connections == 0 => {
                        order.probe_time.min(PROBE_END_PAUSE).saturating_sub(since_packet)
                    }
                    PacketKind::Unknown | PacketKind::Probe => {
                        order.probe_time.saturating_sub(since_packet)
                    }
                    PacketKind::Request => {
                        order.quiet_time.saturating_sub(since_packet.min(usage.idle))
                    }
                }
            }
        }
    }

    fn start_freeze(&mut self, now: Instant, out: &mut Vec<StandbyAction>) {
        self.freeze_number += 1;
        self.phase = StandbyPhase::Freezing;
        self.wake_at = Some(now + FREEZE_TIMEOUT);
        out.push(StandbyAction::Freeze(self.freeze_number));
    }

    /// Handles a reading that shows use of a pod that is frozen or about to be. An event about a packet may have been
    /// lost.
    fn handle_use(
        &mut self,
        now: Instant,
        order: StandbyOrder,
        usage: StandbyUsage,
        out: &mut Vec<StandbyAction>,
    ) {
        let is_packet = usage.in_flight > 0
            || usage.other_connections > 0
            || self.awaits_request(now, order, usage);
        if is_packet {
            let kind = self.packet_kind(now, order, usage);
            self.thaw_for_packet(now, kind, out);
            self.settle_packet(kind, out);
        } else {
            self.release(now, ThawCause::Other, out);
        }
    }

    /// Thaws the pod for a packet. The kernel's events stay armed.
    fn thaw_for_packet(&mut self, now: Instant, kind: PacketKind, out: &mut Vec<StandbyAction>) {
        if self.is_frozen() {
            self.has_unknown_thaw = true;
            out.push(StandbyAction::Thaw(match kind {
                PacketKind::Unknown | PacketKind::Request => ThawCause::Request,
                PacketKind::Probe => ThawCause::Probe,
            }));
        }
        self.phase = StandbyPhase::Running;
        self.pause = Some(FreezePause::Packet { seen_at: now, kind });
        self.wake_at = Some(now + READ_PERIOD);
    }

    /// Records a failure, which the controller answers by ending the pod, and thaws what was frozen of it.
    fn fail(&mut self, now: Instant, reason: String, out: &mut Vec<StandbyAction>) {
        self.failure = Some(if reason.is_empty() { UNKNOWN_FAILURE.to_owned() } else { reason });
        self.release(now, ThawCause::Other, out);
    }

    /// Thaws the pod for another reason than a packet. It runs for a while even if it stays quiet.
    fn release(&mut self, now: Instant, cause: ThawCause, out: &mut Vec<StandbyAction>) {
        if self.armed_since.is_some() {
            self.pause = Some(FreezePause::Until(now + OTHER_PAUSE));
        }
        self.thaw(cause, out);
        self.wake_at = self.may_freeze().then(|| now + READ_PERIOD);
    }

    /// Thaws the pod if it is frozen, and disarms the kernel's events.
    fn thaw(&mut self, cause: ThawCause, out: &mut Vec<StandbyAction>) {
        // No reading will tell more about an earlier thaw by a packet.
        self.settle_cause(ThawCause::Request);
        if self.is_frozen() {
            self.known_cause = Some(cause);
            out.push(StandbyAction::Thaw(cause));
        }
        self.disarm(out);
        self.phase = StandbyPhase::Running;
        self.wake_at = None;
    }

    fn disarm(&mut self, out: &mut Vec<StandbyAction>) {
        if self.armed_since.take().is_some() {
            out.push(StandbyAction::Disarm);
        }
    }
}

/// Age of a pod's unused connections, as readings show it. A connection that may be a probe's does not count as
/// activity, so the idle time says nothing about it.
#[derive(Clone, Copy, Debug, Default)]
struct NewConnections {
    count: u64,
    /// Time at which a reading last showed more of them than the reading before.
    grown_at: Option<Instant>,
}

impl NewConnections {
    fn observe(&mut self, now: Instant, count: u64) {
        if count > self.count {
            self.grown_at = Some(now);
        }
        self.count = count;
    }

    /// Returns true if a connection is younger than `age`, as far as readings show.
    fn is_new(&self, now: Instant, age: Duration) -> bool {
        self.count > 0 && self.grown_at.is_some_and(|at| now.saturating_duration_since(at) < age)
    }
}

#[cfg(test)]
mod tests;
