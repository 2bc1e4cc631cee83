//! Pure: certificates for the names of services inside the cluster, which the controller itself signs.

use std::sync::Arc;

use common::wire::CertificateMaterial;

/// Certificate for the names of one service inside the cluster, which is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalCertificateState {
    /// Number of the request for it. A service that is made again has another one, so its certificate is signed again.
    pub request: u64,
    /// Certificate that was signed last; `None`: none was signed yet.
    pub material: Option<Arc<CertificateMaterial>>,
    /// True if the service was there when this controller started. Activators may have a certificate that a controller
    /// has signed before.
    pub is_from_start: bool,
    /// Reason for which no certificate can be signed, once that lasts; `None`: none is known. The certificate in
    /// `material` has expired then.
    pub failure: Option<Box<str>>,
}
