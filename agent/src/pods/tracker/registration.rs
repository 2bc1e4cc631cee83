//! Pure: failed registrations of pods in the kernel's maps, and their retries.

use std::time::{Duration, Instant};

use super::TrackedPod;
use crate::{incompatible::Incompatibility, pods::types::PodTrackerAction};

/// Period in which registration is tried again for a pod for which no pod slot was free. Also the first pause after a
/// write that failed; each further one doubles the pause.
const RETRY_PERIOD: Duration = Duration::from_secs(1);
/// Longest pause between two attempts.
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(30);

/// Cause of a failed registration.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum RegistrationFailure {
    /// No pod slot was free.
    NoFreePodSlot,
    /// The kernel refused the pod's entry in a map, with this error.
    NotWritten(String),
}

/// Next attempt to register a pod.
#[derive(Debug)]
pub(super) struct RegistrationRetry {
    at: Instant,
    /// Pause before the attempt.
    pause: Duration,
    /// Cause for which the last attempt failed.
    failure: RegistrationFailure,
}

impl RegistrationRetry {
    /// Returns the time of the attempt.
    pub(super) fn at(&self) -> Instant {
        self.at
    }
}

impl TrackedPod {
    /// Reports the failure, which holds until a later attempt succeeds.
    pub(super) fn handle_registration_failure(
        &mut self,
        now: Instant,
        failure: RegistrationFailure,
        out: &mut Vec<PodTrackerAction>,
    ) {
        let last_pause = self.registration_retry.as_ref().map(|last| last.pause);
        let pause = match failure {
            // A slot becomes free as soon as another pod ends. A failed write is likely to fail again, so its pauses
            // grow.
            RegistrationFailure::NoFreePodSlot => RETRY_PERIOD,
            RegistrationFailure::NotWritten(_) => {
                last_pause.map_or(RETRY_PERIOD, |last| (last * 2).min(RETRY_PAUSE_MAX))
            }
        };
        self.registration_retry = Some(RegistrationRetry { at: now + pause, pause, failure });
        self.report(now, out);
    }

    /// Tries the registration again once its pause is over.
    pub(super) fn retry_registration_if_due(
        &mut self,
        now: Instant,
        out: &mut Vec<PodTrackerAction>,
    ) {
        let Some(retry) = self.registration_retry.as_mut().filter(|retry| retry.at <= now) else {
            return;
        };
        retry.at = now + retry.pause;
        let facts = self.facts.clone();
        out.extend(facts.map(|facts| PodTrackerAction::Register(self.uid(), facts)));
    }

    /// Returns true if no pod slot was free for the pod.
    pub(super) fn has_no_slot(&self) -> bool {
        self.registration_failure() == Some(&RegistrationFailure::NoFreePodSlot)
    }

    /// Returns true if the kernel refused the pod's entry in a map.
    pub(super) fn is_unwritten(&self) -> bool {
        matches!(self.registration_failure(), Some(RegistrationFailure::NotWritten(_)))
    }

    /// Returns the reason for which the pod is not registered, if an attempt failed.
    pub(super) fn unregistered_reason(&self) -> Option<String> {
        self.registration_failure().map(|failure| match failure {
            RegistrationFailure::NoFreePodSlot => Incompatibility::NoFreePodSlot.to_string(),
            RegistrationFailure::NotWritten(error) => {
                format!("its node cannot register it in the kernel's maps: {error}")
            }
        })
    }

    fn registration_failure(&self) -> Option<&RegistrationFailure> {
        self.registration_retry.as_ref().map(|retry| &retry.failure)
    }
}
