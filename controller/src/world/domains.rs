//! Pure: domains of users, which map to services, and the namespaces that own them.

use common::wire::Name;

use super::{Conditions, Meta};

/// A DomainMapping; its name is the domain.
#[derive(Clone, Debug, PartialEq)]
pub struct Mapping {
    /// Metadata of the DomainMapping object.
    pub meta: Meta,
    /// Resource that the mapping refers to, as the API calls it: `services.serving.knative.dev`.
    pub kind: Box<str>,
    /// Name of the object that the mapping refers to.
    pub target: Name,
    /// Name of the Secret with the user's certificate.
    pub secret: Option<Box<str>>,
    /// Handling of external plain HTTP, where the object sets it.
    pub http: Option<Box<str>>,
    /// Conditions of the DomainMapping's status.
    pub conditions: Conditions,
    /// True once the DomainMapping is being deleted.
    pub leaving: bool,
}

/// A ClusterDomainClaim, which reserves a domain for one namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// Namespace that may use the domain.
    pub namespace: String,
}
