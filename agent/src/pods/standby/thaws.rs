//! Pure: thaws of one pod, for packets and for other reasons, with their causes.

use std::{
    mem,
    time::{Duration, Instant},
};

use common::wire::StandbyOrder;

use super::{
    READ_PERIOD, StandbyAction, StandbyMachine, StandbyPhase, StandbyUsage, ThawCause,
    freeze_pause::{FreezePause, PacketKind},
};

/// Time for which a pod runs after a thaw for another reason than a packet. A user who runs a command in the pod may
/// run the next one.
pub(super) const OTHER_PAUSE: Duration = Duration::from_secs(10);

impl StandbyMachine {
    /// Thaws a pod that is frozen or about to be, because a reading shows use of it.
    pub(super) fn thaw_for_use(
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
            self.apply_packet_kind(kind, out);
        } else {
            // A session, or a pod that is no longer ready.
            self.thaw_without_packet(now, ThawCause::Other, out);
        }
    }

    /// Thaws the pod for a packet, if it is frozen. The kernel's events stay armed.
    pub(super) fn thaw_for_packet(
        &mut self,
        now: Instant,
        kind: PacketKind,
        out: &mut Vec<StandbyAction>,
    ) {
        if self.is_frozen() {
            self.has_unknown_thaw = true;
            out.push(StandbyAction::Thaw(match kind {
                // A packet of unknown kind may be a request, so the pod must be counted as woken until it is known for
                // a probe.
                PacketKind::Unknown | PacketKind::Request => ThawCause::Request,
                PacketKind::Probe => ThawCause::Probe,
            }));
        }
        self.phase = StandbyPhase::Running;
        self.pause = Some(FreezePause::Packet { seen_at: now, kind });
        self.wake_at = Some(now + READ_PERIOD);
    }

    /// Thaws the pod for another reason than a packet, if it is frozen. It runs for a while even if it stays quiet.
    pub(super) fn thaw_without_packet(
        &mut self,
        now: Instant,
        cause: ThawCause,
        out: &mut Vec<StandbyAction>,
    ) {
        // Without armed events there was no freeze, so there is none to delay.
        if self.armed_since.is_some() {
            self.pause = Some(FreezePause::Until(now + OTHER_PAUSE));
        }
        self.thaw(cause, out);
        self.wake_at = self.may_freeze().then(|| now + READ_PERIOD);
    }

    /// Thaws the pod if it is frozen, and disarms the kernel's events.
    pub(super) fn thaw(&mut self, cause: ThawCause, out: &mut Vec<StandbyAction>) {
        // No reading will tell more about an earlier thaw by a packet, and it may have been a request.
        self.set_unknown_cause(ThawCause::Request);
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

    /// Sets the cause of the thaw by the kind of its packet.
    pub(super) fn apply_packet_kind(&mut self, kind: PacketKind, out: &mut Vec<StandbyAction>) {
        match kind {
            PacketKind::Unknown => {}
            // The events stay armed: a further probe moves the end of the pause.
            PacketKind::Probe => self.set_unknown_cause(ThawCause::Probe),
            // From now on the counts show use, and events would tell nothing more.
            PacketKind::Request => {
                self.set_unknown_cause(ThawCause::Request);
                self.disarm(out);
            }
        }
    }

    /// Sets the cause of a thaw by a packet, if it is not known yet.
    fn set_unknown_cause(&mut self, cause: ThawCause) {
        if mem::take(&mut self.has_unknown_thaw) {
            self.known_cause = Some(cause);
        }
    }
}
