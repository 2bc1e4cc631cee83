//! Pure: certificates of clients: the rule of a host for them, and the authorities that must have issued them.

use std::{fmt, sync::Arc};

use super::NamespacedName;

/// Rule of a host for certificates of clients.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClientAuth {
    /// Secret of the authorities; `None`: it is named by no valid name, and the host accepts no client.
    pub ca: Option<NamespacedName>,
    /// True if clients without a certificate are accepted. A certificate that is shown must be valid all the same.
    pub is_optional: bool,
}

/// Authorities of client certificates under the name of their Secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientCaEntry {
    /// Namespace and name of the Secret.
    pub name: NamespacedName,
    /// Authorities in force; `None`: the controller has none, and a receiver keeps what it has under this name.
    pub material: Option<Arc<ClientCaMaterial>>,
}

/// Certificates of authorities, in DER. Receivers check that they can be used.
#[derive(Clone, PartialEq, Eq)]
pub struct ClientCaMaterial(pub Vec<Vec<u8>>);

impl fmt::Debug for ClientCaMaterial {
    /// Prints the number of certificates, because they have kilobytes.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_tuple("ClientCaMaterial").field(&self.0.len()).finish()
    }
}
