//! Pure: certificates of hosts, with their private keys, as the RouteTable carries them to activators.

use std::{fmt, sync::Arc};

use super::{NamespacedName, raw};

/// Certificate of hosts under its name. Only sent to activators, since it has a private key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateEntry {
    /// Namespace and name of the Secret; for the names of a service inside the cluster, the service with its port
    /// ([`local_certificate`](super::ServiceEntry::local_certificate)).
    pub name: NamespacedName,
    /// Certificate in force; `None`: the controller has none, and a receiver keeps what it has under this name.
    pub material: Option<Arc<CertificateMaterial>>,
}

/// Certificate chain with the private key of its first certificate.
#[derive(Clone, PartialEq, Eq)]
pub struct CertificateMaterial {
    /// Certificates in DER, that of the hosts first. Receivers check that they can be used.
    pub chain: Vec<Vec<u8>>,
    /// Private key of the first certificate.
    pub key: PrivateKeyBytes,
}

impl fmt::Debug for CertificateMaterial {
    /// Prints the number of certificates, because a chain has kilobytes.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("CertificateMaterial")
            .field("certificates", &self.chain.len())
            .field("key", &self.key)
            .finish()
    }
}

/// Private key in DER: PKCS#8, SEC1 or PKCS#1. Copies share their memory, which is not cleared when it is freed.
#[derive(Clone, PartialEq, Eq)]
pub struct PrivateKeyBytes(Arc<[u8]>);

impl PrivateKeyBytes {
    /// Builds a key from its DER, unchecked.
    pub fn new(der: Vec<u8>) -> Self {
        Self(der.into())
    }

    /// Returns the key in DER. Neither logs nor errors may show it.
    pub fn as_der(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for PrivateKeyBytes {
    /// Prints no byte of the key, nor its length.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("PrivateKeyBytes(..)")
    }
}

impl fmt::Debug for raw::Certificate {
    /// Prints the name and the number of certificates, and no byte of the key.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Certificate")
            .field("name", &self.name)
            .field("certificates", &self.chain.len())
            .finish_non_exhaustive()
    }
}
