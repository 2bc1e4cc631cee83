//! Shell: an event that happens at most once, for which any number of tasks can wait.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use tokio_util::sync::CancellationToken;

/// Event that happens at most once. Clones are the same event.
///
/// A [`CancellationToken`] asks a task to stop. This type announces a fact: everything is synced, a request is refused.
#[derive(Clone, Debug, Default)]
pub struct OnceSignal(Arc<SignalState>);

#[derive(Debug, Default)]
struct SignalState {
    /// Copy of the token's state, since each look at the token itself takes a lock that all threads share.
    is_set: AtomicBool,
    token: CancellationToken,
}

impl OnceSignal {
    /// Creates a signal that is not set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the signal and wakes all tasks that wait for it.
    pub fn set(&self) {
        self.0.is_set.store(true, Ordering::Release);
        self.0.token.cancel();
    }

    /// Returns true once the signal is set.
    pub fn is_set(&self) -> bool {
        self.0.is_set.load(Ordering::Acquire)
    }

    /// Waits until the signal is set.
    pub async fn wait(&self) {
        self.0.token.cancelled().await;
    }

    /// Waits until the signal is set, without a reference to it.
    pub async fn wait_owned(self) {
        self.0.token.cancelled().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_signal_is_set_for_all_clones_and_stays_set() {
        let signal = OnceSignal::new();
        let (clone, waiting) = (signal.clone(), signal.clone().wait_owned());
        assert!(!clone.is_set());
        signal.set();
        assert!(clone.is_set() && signal.is_set());
        waiting.await;
        clone.wait().await;
    }
}
