//! Shell: an event that happens at most once, for which any number of tasks can wait.

use tokio_util::sync::CancellationToken;

/// Event that happens at most once. Clones are the same event.
///
/// A [`CancellationToken`] asks a task to stop. This type announces a fact: everything is synced, a request is refused.
#[derive(Clone, Debug, Default)]
pub struct OnceSignal(CancellationToken);

impl OnceSignal {
    /// Creates a signal that is not set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the signal and wakes all tasks that wait for it.
    pub fn set(&self) {
        self.0.cancel();
    }

    /// Returns true once the signal is set.
    pub fn is_set(&self) -> bool {
        self.0.is_cancelled()
    }

    /// Waits until the signal is set.
    pub async fn wait(&self) {
        self.0.cancelled().await;
    }

    /// Waits until the signal is set, without a reference to it.
    pub async fn wait_owned(self) {
        self.0.cancelled_owned().await;
    }
}
