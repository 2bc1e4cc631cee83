//! Shell: the task that renews the agent's promise to the kernel, beside the loop.

use std::{
    future::pending,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{sync::watch, time::sleep};
use tokio_util::sync::CancellationToken;

use crate::{
    agent::Agent,
    clock::monotonic_ns,
    kernel::maps::{KernelMapError, thaw_promise::ThawPromise},
    pods::standby::thaw_promise::{promise_until_ns, renewal_period},
};

/// Facts of the agent's loop on which the promise depends.
#[derive(Debug)]
pub(super) struct PromiseFacts {
    /// Time of the loop's last turn, CLOCK_MONOTONIC in ns.
    loop_turn_ns: Arc<AtomicU64>,
    /// Longest timeout of the orders of armed pods; `None`: the promise has no end, as no pod is armed, or nothing else
    /// could take its connects.
    timeout: watch::Sender<Option<Duration>>,
}

impl PromiseFacts {
    /// Starts with a turn now, and without an armed pod.
    pub(super) fn new() -> Self {
        let loop_turn_ns = Arc::new(AtomicU64::new(monotonic_ns()));
        Self { loop_turn_ns, timeout: watch::Sender::new(None) }
    }

    /// Records that the loop has begun another turn.
    pub(super) fn record_turn(&self) {
        self.loop_turn_ns.store(monotonic_ns(), Ordering::Relaxed);
    }

    /// Sets the longest timeout of the orders of armed pods; `None`: the promise has no end.
    pub(super) fn set_timeout(&self, timeout: Option<Duration>) {
        self.timeout.send_if_modified(|current| std::mem::replace(current, timeout) != timeout);
    }
}

/// Task that renews the promise to thaw frozen pods.
#[derive(Debug)]
pub(crate) struct ThawPromiseTask {
    promise: ThawPromise,
    loop_turn_ns: Arc<AtomicU64>,
    timeout: watch::Receiver<Option<Duration>>,
}

impl Agent {
    /// Returns the task that renews the promise to thaw frozen pods. It runs beside the loop.
    pub(crate) fn thaw_promise_task(&self) -> Result<ThawPromiseTask, KernelMapError> {
        let PromiseFacts { loop_turn_ns, timeout } = &self.standby.promise_facts;
        Ok(ThawPromiseTask {
            promise: self.handles.maps.thaw_promise()?,
            loop_turn_ns: Arc::clone(loop_turn_ns),
            timeout: timeout.subscribe(),
        })
    }
}

impl ThawPromiseTask {
    /// Renews the promise until `shutdown`. Then it has no end: the agent thaws its pods before it ends.
    pub(crate) async fn run(mut self, shutdown: CancellationToken) {
        loop {
            // Again after a change of the timeout: the earlier end may be later than the new timeout allows.
            let period = self.renew();
            let renewal = async {
                match period {
                    Some(period) => sleep(period).await,
                    None => pending().await,
                }
            };
            tokio::select! {
                () = shutdown.cancelled() => break,
                changed = self.timeout.changed() => if changed.is_err() { break },
                () = renewal => {}
            }
        }
        self.promise.set(0);
    }

    /// Renews the promise if it has an end. Returns the time until the next renewal; `None`: there is none.
    fn renew(&mut self) -> Option<Duration> {
        let Some(timeout) = *self.timeout.borrow_and_update() else {
            self.promise.set(0);
            return None;
        };
        let loop_turn_ns = self.loop_turn_ns.load(Ordering::Relaxed);
        // If the loop hangs, the word stays as it is, so that the last promise ends at its time.
        if let Some(until_ns) = promise_until_ns(monotonic_ns(), loop_turn_ns, timeout) {
            self.promise.set(until_ns);
        }
        Some(renewal_period(timeout))
    }
}
