//! Pure: key of a pod, by which the wait queue and the balancing know it.

use std::net::SocketAddr;

/// Key of one pod for as long as it keeps its address. Keys are ordered by address, as in Knative.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodEndpointKey {
    /// Address and port at which the pod serves.
    pub address: SocketAddr,
    /// Number that distinguishes pods which had the same address one after the other.
    pub id: u64,
}
