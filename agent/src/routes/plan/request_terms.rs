//! Pure: request terms of a Revision. The table stores only terms that differ from the defaults.

use std::time::Duration;

use common::wire::{self, NamespacedName};

/// Default timeout: Knative's `revision-timeout-seconds` (knative/serving `pkg/apis/config/defaults.go`).
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);

/// Request terms of one Revision: the timeout, and the owners that metrics name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RevisionRequestTerms {
    /// Longest time that a request may take (`timeoutSeconds`).
    pub timeout: Duration,
    /// Name of the owning Service; empty without one.
    pub service: Box<str>,
    /// Name of the owning Configuration.
    pub configuration: Box<str>,
}

impl RevisionRequestTerms {
    /// Returns the terms that nearly every Revision of this name has. Service and Configuration have one name, and the
    /// Revision's name appends a number to it.
    pub(super) fn default_for(revision: &NamespacedName) -> Self {
        let owner = revision.name.rsplit_once('-').map_or("", |(owner, _number)| owner);
        Self { timeout: DEFAULT_TIMEOUT, service: owner.into(), configuration: owner.into() }
    }

    /// Returns the terms that the RouteTable states.
    pub(super) fn from_route(entry: &wire::RevisionEntry) -> Self {
        let [service, configuration] =
            [&entry.service, &entry.configuration].map(|name| name.as_str().into());
        Self { timeout: entry.timeout, service, configuration }
    }
}
