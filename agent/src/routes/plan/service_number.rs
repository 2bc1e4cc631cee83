//! Pure: numbers of services, of both sources.

use crate::service_facts::ServiceSource;

/// Number of a service in its source. If services of both sources want a frontend, that of the RouteTable gets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum ServiceNumber {
    /// Service of the RouteTable.
    Routed(u32),
    /// Service of the cluster.
    Cluster(u32),
}

impl ServiceNumber {
    /// Lowest number.
    pub(super) const MIN: Self = Self::Routed(0);
    /// Highest number.
    pub(super) const MAX: Self = Self::Cluster(u32::MAX);

    /// Returns the source of the service.
    pub(super) fn source(self) -> ServiceSource {
        match self {
            Self::Routed(_) => ServiceSource::Route,
            Self::Cluster(_) => ServiceSource::Service,
        }
    }

    /// Returns true if the service is one of the RouteTable.
    pub(super) fn is_routed(self) -> bool {
        self.source() == ServiceSource::Route
    }

    /// Returns true if the service takes a frontend from `owner`.
    pub(super) fn outranks(self, owner: Self) -> bool {
        self.is_routed() && !owner.is_routed()
    }
}
