//! Pure: key of a pod, by which the wait queue and the balancing know it.

use std::{net::SocketAddr, num::NonZeroU16};

/// Key of one pod, or of one port of it, for as long as it keeps its address.
///
/// A pod of a scaled Service has a key for each port of the Service. Keys are ordered by that port, so that those for
/// one port are neighbours, then by address, as in Knative.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodEndpointKey {
    /// Port of the scaled Service whose requests it takes; `None`: it takes all requests of its Knative Revision.
    pub service_port: Option<NonZeroU16>,
    /// Address and port at which the pod serves.
    pub address: SocketAddr,
    /// Number that distinguishes pods which had the same address one after the other.
    pub id: u64,
}
