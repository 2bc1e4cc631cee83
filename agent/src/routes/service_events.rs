//! Pure: Events on Services of the cluster that a node does not serve, and the bounds on their number.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use common::wire::NamespacedName;

/// Time in which at most one Event with the same reason is written on one Service.
const REPEAT_PERIOD: Duration = Duration::from_secs(60);
/// Number of Events that may follow each other at once.
const BURST: u32 = 10;
/// Time after which one more Event may follow. Each node writes Events of its own, and a full map concerns all nodes.
const REFILL_PERIOD: Duration = Duration::from_secs(6);
/// Shortest time between two log lines about Events that are left out.
const SUMMARY_PERIOD: Duration = Duration::from_secs(60);

/// Reason of an Event on a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ServiceEventReason {
    /// The Service does not fit into the kernel's maps.
    KernelMapFull,
    /// One of Rouse's services has the ClusterIP and port.
    ClusterIpTaken,
}

impl ServiceEventReason {
    /// Returns the reason as one CamelCase word.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::KernelMapFull => "KernelMapFull",
            Self::ClusterIpTaken => "ClusterIPTaken",
        }
    }
}

/// An Event to write on a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ServiceEvent {
    /// Name of the Service.
    pub(crate) service: NamespacedName,
    /// Reason of the Event.
    pub(crate) reason: ServiceEventReason,
    /// Explanation in one line, with what to do.
    pub(crate) message: String,
}

/// Bounds on the Events of one node: for each Service and reason, and for all together.
#[derive(Debug)]
pub(crate) struct ServiceEventLimiter {
    /// Times of the Events of the last [`REPEAT_PERIOD`]. The other bound keeps them few.
    admitted: HashMap<(NamespacedName, ServiceEventReason), Instant>,
    /// Number of Events that may be written now.
    tokens: u32,
    /// Time up to which `tokens` is counted.
    refilled_at: Option<Instant>,
    /// Number of Events that were left out and not logged yet.
    left_out: usize,
    /// Time of the last log line about them.
    summary_at: Option<Instant>,
}

impl Default for ServiceEventLimiter {
    fn default() -> Self {
        Self {
            admitted: HashMap::new(),
            tokens: BURST,
            refilled_at: None,
            left_out: 0,
            summary_at: None,
        }
    }
}

impl ServiceEventLimiter {
    /// Returns true if an Event may be written now. A repeated one is none; one beyond the rate counts as left out.
    pub(crate) fn admit(
        &mut self,
        now: Instant,
        service: &NamespacedName,
        reason: ServiceEventReason,
    ) -> bool {
        self.refill(now);
        // Entries that no longer matter go here, which bounds the memory by the rate and the period.
        self.admitted.retain(|_, at| now.saturating_duration_since(*at) < REPEAT_PERIOD);
        let key = (service.clone(), reason);
        if self.admitted.contains_key(&key) {
            return false;
        }
        if self.tokens == 0 {
            self.left_out += 1;
            return false;
        }
        self.tokens -= 1;
        self.admitted.insert(key, now);
        true
    }

    /// Counts an Event that was admitted and could not be written.
    pub(crate) fn count_left_out(&mut self) {
        self.left_out += 1;
    }

    /// Takes the number of Events left out since the last call that returned one, if a log line about them is due.
    pub(crate) fn take_left_out(&mut self, now: Instant) -> Option<usize> {
        let is_recent =
            self.summary_at.is_some_and(|at| now.saturating_duration_since(at) < SUMMARY_PERIOD);
        if self.left_out == 0 || is_recent {
            return None;
        }
        self.summary_at = Some(now);
        Some(std::mem::take(&mut self.left_out))
    }

    fn refill(&mut self, now: Instant) {
        let since = *self.refilled_at.get_or_insert(now);
        let elapsed = now.saturating_duration_since(since);
        let added = elapsed.as_secs() / REFILL_PERIOD.as_secs();
        if added >= u64::from(BURST) {
            (self.tokens, self.refilled_at) = (BURST, Some(now));
        } else {
            // The rest of the time counts for the next token.
            let added = added as u32;
            self.tokens = BURST.min(self.tokens + added);
            self.refilled_at = Some(since + REFILL_PERIOD * added);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        ServiceEventReason::{ClusterIpTaken, KernelMapFull},
        *,
    };

    fn name(number: usize) -> NamespacedName {
        NamespacedName::new("default", format!("s{number}"))
    }

    /// Returns the number of Events that are written if all of these Services are refused at once.
    fn admitted(
        limiter: &mut ServiceEventLimiter,
        now: Instant,
        services: std::ops::Range<usize>,
    ) -> usize {
        services.filter(|&number| limiter.admit(now, &name(number), KernelMapFull)).count()
    }

    #[test]
    fn of_thousands_at_once_ten_are_written_and_the_others_are_told_as_a_number() {
        let (mut limiter, now) = (ServiceEventLimiter::default(), Instant::now());
        assert_eq!(admitted(&mut limiter, now, 0..10_000), 10);
        assert_eq!(limiter.take_left_out(now), Some(9_990));
        assert_eq!(limiter.take_left_out(now), None, "they are logged already");
        assert_eq!(admitted(&mut limiter, now, 10_000..10_005), 0);
        let soon = now + Duration::from_secs(59);
        assert_eq!(limiter.take_left_out(soon), None, "one line a minute");
        assert_eq!(limiter.take_left_out(now + SUMMARY_PERIOD), Some(5));
    }

    #[test]
    fn in_the_long_run_ten_are_written_a_minute() {
        let (mut limiter, start) = (ServiceEventLimiter::default(), Instant::now());
        let times = (0..600).map(|second| start + Duration::from_secs(second));
        // Twenty Services are refused each second.
        let batches = times.zip((0..).step_by(20));
        let written: usize =
            batches.map(|(now, first)| admitted(&mut limiter, now, first..first + 20)).sum();
        assert_eq!(written, 10 + 599 / 6);
        let late = start + Duration::from_secs(100_000);
        assert_eq!(admitted(&mut limiter, late, 90_000..90_100), 10, "no more after a long pause");
    }

    #[test]
    fn one_service_and_reason_has_one_event_a_minute() {
        let (mut limiter, start) = (ServiceEventLimiter::default(), Instant::now());
        let service = name(1);
        let mut admit =
            |seconds, reason| limiter.admit(start + Duration::from_secs(seconds), &service, reason);
        assert!(admit(0, KernelMapFull));
        assert!(!admit(59, KernelMapFull));
        assert!(admit(59, ClusterIpTaken), "another reason");
        assert!(admit(60, KernelMapFull));
        assert_eq!(limiter.take_left_out(start), None, "a repeated one is not left out");
    }
}
