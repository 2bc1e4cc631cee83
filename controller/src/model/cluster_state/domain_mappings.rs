//! Pure: domains of users, which map to services, and the namespaces that own them.

use common::wire::{HstsPolicy, NamespacedName};

use super::{ClientAuthSpec, ConditionSet, ObjectMetaSummary};

/// A DomainMapping; its name is the domain.
#[derive(Clone, Debug, PartialEq)]
pub struct DomainMappingState {
    /// Metadata of the DomainMapping object.
    pub meta: ObjectMetaSummary,
    /// Resource that the mapping refers to, as the API calls it: `services.serving.knative.dev`.
    pub target_resource: Box<str>,
    /// Name of the object that the mapping refers to.
    pub target: NamespacedName,
    /// Name of the Secret with the user's certificate.
    pub tls_secret: Option<Box<str>>,
    /// Name of the Secret whose certificate the domain has: `tls_secret`, or the one before while that has a better one.
    pub served_secret: Option<Box<str>>,
    /// Demand of the annotations for certificates of clients; `None`: clients need none.
    pub client_auth: Option<ClientAuthSpec>,
    /// Name of the Secret whose authorities the domain has: the named one, or the one before while the named one has
    /// none. `None`: there is neither.
    pub served_client_ca: Option<Box<str>>,
    /// `Strict-Transport-Security` of the domain, where the object sets it.
    pub hsts: Option<HstsPolicy>,
    /// True if TLS of the domain is passed through to a service of raw TCP.
    pub passes_tls: bool,
    /// Handling of external plain HTTP, where the object sets it.
    pub http_protocol: Option<Box<str>>,
    /// Conditions of the DomainMapping's status.
    pub conditions: ConditionSet,
    /// True once the DomainMapping is being deleted.
    pub is_terminating: bool,
}

/// A ClusterDomainClaim, which reserves a domain for one namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DomainClaimState {
    /// Namespace that may use the domain.
    pub namespace: String,
}
