//! Pure: choice of the log lines about TCP connections that no pod took: one for each service and minute.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use common::wire::NamespacedName;

/// Time in which at most one line is logged about a service.
const LINE_PERIOD: Duration = Duration::from_secs(60);

/// Log lines of the last time, by service. Clients of a service that cannot wake may connect all the time.
#[derive(Debug, Default)]
pub(crate) struct TcpFailureLog {
    by_service: HashMap<NamespacedName, ServiceFailures>,
    /// Time at which services without a recent line were removed.
    pruned_at: Option<Instant>,
}

/// Failures of one service since its last line.
#[derive(Debug)]
struct ServiceFailures {
    logged_at: Instant,
    unlogged: u64,
}

impl TcpFailureLog {
    /// Registers a failure at `now`. Returns the number of failures that a line is to report, if one is due: this one,
    /// and those since the last line. A service without failures for two minutes begins again.
    pub(crate) fn record(&mut self, now: Instant, service: &NamespacedName) -> Option<u64> {
        self.prune(now);
        let Some(failures) = self.by_service.get_mut(service) else {
            let first = ServiceFailures { logged_at: now, unlogged: 0 };
            self.by_service.insert(service.clone(), first);
            return Some(1);
        };
        failures.unlogged += 1;
        if is_recent(now, failures.logged_at) {
            return None;
        }
        failures.logged_at = now;
        Some(std::mem::take(&mut failures.unlogged))
    }

    /// Removes services whose last line is two periods old, once in a period: each search goes through all of them.
    fn prune(&mut self, now: Instant) {
        if self.pruned_at.is_some_and(|at| is_recent(now, at)) {
            return;
        }
        self.pruned_at = Some(now);
        self.by_service.retain(|_, failures| is_recent(now, failures.logged_at + LINE_PERIOD));
    }
}

fn is_recent(now: Instant, at: Instant) -> bool {
    now.saturating_duration_since(at) < LINE_PERIOD
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_service_has_a_line_a_minute_with_the_number_of_its_failures() {
        let (start, mut log) = (Instant::now(), TcpFailureLog::default());
        let [one, two] = ["one", "two"].map(|name| NamespacedName::new("default", name));
        let mut record =
            |seconds, service| log.record(start + Duration::from_secs(seconds), service);
        assert_eq!([0, 1, 2, 59].map(|at| record(at, &one)), [Some(1), None, None, None]);
        assert_eq!(record(59, &two), Some(1));
        assert_eq!([60, 61, 119].map(|at| record(at, &one)), [Some(4), None, None]);
        assert_eq!(record(120, &two), Some(1));
        assert_eq!(record(120, &one), Some(3));
    }

    #[test]
    fn services_without_failures_are_forgotten() {
        let (start, mut log) = (Instant::now(), TcpFailureLog::default());
        for number in 0..10 {
            let name = NamespacedName::new("default", format!("s{number}"));
            assert_eq!(log.record(start, &name), Some(1));
        }
        let last = NamespacedName::new("default", "last");
        log.record(start + 2 * LINE_PERIOD, &last);
        assert_eq!(log.by_service.keys().collect::<Vec<_>>(), [&last]);
    }
}
