//! Pure: the application's own count of its requests, to which other counts are compared.

use std::{cell::Cell, rc::Rc};

/// Request counts of this process. All clones share the numbers.
#[derive(Clone, Debug, Default)]
pub(crate) struct HelloCounts(Rc<HelloCountsInner>);

#[derive(Debug, Default)]
struct HelloCountsInner {
    started: Cell<u64>,
    finished: Cell<u64>,
    max_in_flight: Cell<u64>,
    connections: Cell<u64>,
}

impl HelloCounts {
    /// Counts the begin of a request; dropping the guard counts its end, even on a reset connection.
    pub(crate) fn begin_request(&self) -> InFlightGuard {
        let inner = &self.0;
        inner.started.set(inner.started.get() + 1);
        inner.max_in_flight.set(inner.max_in_flight.get().max(self.in_flight()));
        InFlightGuard(self.clone())
    }

    /// Counts an accepted connection.
    pub(crate) fn record_connection(&self) {
        self.0.connections.set(self.0.connections.get() + 1);
    }

    /// Number of requests that began and have not ended.
    pub(crate) fn in_flight(&self) -> u64 {
        self.0.started.get() - self.0.finished.get()
    }

    /// Formats all numbers as a JSON object, which includes the request for them.
    pub(crate) fn to_json(&self, pod: &str) -> String {
        format!(
            r#"{{"pod":{pod:?},"started":{},"finished":{},"in_flight":{},"max_in_flight":{},"connections":{}}}"#,
            self.0.started.get(),
            self.0.finished.get(),
            self.in_flight(),
            self.0.max_in_flight.get(),
            self.0.connections.get(),
        )
    }
}

/// Guard of a request that has not ended.
#[derive(Debug)]
pub(crate) struct InFlightGuard(HelloCounts);

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        let finished = &self.0.0.finished;
        finished.set(finished.get() + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_at_once_stays_after_requests_ended() {
        let counts = HelloCounts::default();
        counts.record_connection();
        let first = counts.begin_request();
        let second = counts.begin_request();
        drop((first, second));
        let _third = counts.begin_request();
        assert_eq!(
            counts.to_json("p"),
            r#"{"pod":"p","started":3,"finished":2,"in_flight":1,"max_in_flight":2,"connections":1}"#
        );
    }
}
