//! Pure: what holds for the requests of a revision. Nothing is kept of the usual.

use std::time::Duration;

use common::wire::{self, Name};

/// Knative's `revision-timeout-seconds` (knative/serving `pkg/apis/config/defaults.go`).
const USUAL_TIMEOUT: Duration = Duration::from_secs(300);

/// What holds for the requests of one revision, and whose it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    /// The longest that a request may take (`timeoutSeconds`).
    pub timeout: Duration,
    /// The owning Service's name; empty without one.
    pub service: Box<str>,
    /// The owning Configuration's name.
    pub configuration: Box<str>,
}

impl Terms {
    /// Those of nearly every revision of this name: Service and Configuration are called alike, and it is called after
    /// them with a number behind.
    pub(super) fn usual(revision: &Name) -> Self {
        let owner = revision.name.rsplit_once('-').map_or("", |(owner, _number)| owner);
        Self { timeout: USUAL_TIMEOUT, service: owner.into(), configuration: owner.into() }
    }

    /// As they are told.
    pub(super) fn of(told: &wire::Revision) -> Self {
        let [service, configuration] =
            [&told.service, &told.configuration].map(|name| name.as_str().into());
        Self { timeout: told.timeout, service, configuration }
    }
}
