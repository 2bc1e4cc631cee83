//! Pure: pause in which a quiet pod is not frozen, and the kind of the packet that began it.

use std::time::{Duration, Instant};

use common::wire::StandbyOrder;

use super::{StandbyAction, StandbyMachine, StandbyUsage};

/// Time for which a pod runs after a probe whose connection has closed. The application may still have to accept it,
/// and each connection that it has not accepted takes a place in its listener's backlog.
pub(super) const PROBE_END_PAUSE: Duration = Duration::from_millis(500);

/// Pause in which a pod is not frozen although it is quiet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FreezePause {
    /// A packet came, last at `seen_at`. The length of the pause is one of the order's times.
    Packet { seen_at: Instant, kind: PacketKind },
    /// The pod was thawed for another reason, and runs until this time.
    Until(Instant),
}

/// Kind of the packet that thawed a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PacketKind {
    /// A connection that has brought nothing yet, or a packet after which no reading came.
    Unknown,
    /// Nothing that counts. A later reading may show a request all the same.
    Probe,
    /// A request, or a connection that counts.
    Request,
}

/// Age of a pod's unused connections, as readings show it. A connection that may be a probe's does not count as
/// activity, so the idle time says nothing about it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct NewConnections {
    /// Number of unused connections in the last reading.
    count: u64,
    /// Time at which a reading last showed more of them than the reading before.
    grown_at: Option<Instant>,
}

impl NewConnections {
    /// Records the number of unused connections in a reading.
    pub(super) fn observe(&mut self, now: Instant, count: u64) {
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

impl StandbyMachine {
    /// Returns true if a connection may still bring its first request. One that has brought none for the quiet time
    /// belongs to a pool of a client.
    pub(super) fn awaits_request(
        &self,
        now: Instant,
        order: StandbyOrder,
        usage: StandbyUsage,
    ) -> bool {
        usage.unused_connections > 0
            && (usage.idle < order.quiet_time || self.new_connections.is_new(now, order.probe_time))
    }

    /// Returns the kind of the packets since the kernel's events were armed, by a reading after them.
    pub(super) fn packet_kind(
        &self,
        now: Instant,
        order: StandbyOrder,
        usage: StandbyUsage,
    ) -> PacketKind {
        let is_since_armed = |since: Instant| usage.idle < now.saturating_duration_since(since);
        // Activity since the arming also shows a request that has ended before the reading.
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
    pub(super) fn update_packet_kind(
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
        self.apply_packet_kind(kind, out);
    }

    /// Returns the time for which the running pod is not frozen although it may be quiet.
    pub(super) fn remaining_pause(
        &self,
        now: Instant,
        order: StandbyOrder,
        usage: StandbyUsage,
    ) -> Duration {
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
                    // The application may still answer it, for as long as the kubelet waits.
                    PacketKind::Unknown | PacketKind::Probe => {
                        order.probe_time.saturating_sub(since_packet)
                    }
                    // The later of the packet and the last activity counts.
                    PacketKind::Request => {
                        order.quiet_time.saturating_sub(since_packet.min(usage.idle))
                    }
                }
            }
        }
    }
}
