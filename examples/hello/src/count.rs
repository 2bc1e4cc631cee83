//! Pure: the application's own count of its requests, the truth that other counts are compared with.

use std::{cell::Cell, rc::Rc};

/// Requests as this process saw them. Cheap to clone; all clones share the numbers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counts(Rc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    started: Cell<u64>,
    finished: Cell<u64>,
    most: Cell<u64>,
    connections: Cell<u64>,
}

impl Counts {
    /// One request began; it ends when the returned guard is dropped, also on a reset connection.
    pub(crate) fn begin(&self) -> InFlight {
        let inner = &self.0;
        inner.started.set(inner.started.get() + 1);
        inner.most.set(inner.most.get().max(self.in_flight()));
        InFlight(self.clone())
    }

    /// One connection was accepted.
    pub(crate) fn connected(&self) {
        self.0.connections.set(self.0.connections.get() + 1);
    }

    /// Requests that began and did not end yet.
    pub(crate) fn in_flight(&self) -> u64 {
        self.0.started.get() - self.0.finished.get()
    }

    /// All numbers as one JSON object. The request that asks is counted too.
    pub(crate) fn to_json(&self, pod: &str) -> String {
        format!(
            r#"{{"pod":{pod:?},"started":{},"finished":{},"in_flight":{},"max_in_flight":{},"connections":{}}}"#,
            self.0.started.get(),
            self.0.finished.get(),
            self.in_flight(),
            self.0.most.get(),
            self.0.connections.get(),
        )
    }
}

/// A request that has not ended.
#[derive(Debug)]
pub(crate) struct InFlight(Counts);

impl Drop for InFlight {
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
        let counts = Counts::default();
        counts.connected();
        let first = counts.begin();
        let second = counts.begin();
        drop((first, second));
        let _third = counts.begin();
        assert_eq!(
            counts.to_json("p"),
            r#"{"pod":"p","started":3,"finished":2,"in_flight":1,"max_in_flight":2,"connections":1}"#
        );
    }
}
