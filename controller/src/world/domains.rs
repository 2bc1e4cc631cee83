//! Pure: domains of users that lead to services, and whose they are.

use common::wire::Name;

use super::{Conditions, Meta};

/// A DomainMapping; its own name is the domain.
#[derive(Clone, Debug, PartialEq)]
pub struct Mapping {
    /// Its own.
    pub meta: Meta,
    /// Kind of what it leads to, as the API calls it: `services.serving.knative.dev`.
    pub kind: Box<str>,
    /// What it leads to.
    pub target: Name,
    /// The Secret of the certificate that its user brings.
    pub secret: Option<Box<str>>,
    /// What plain HTTP from outside gets, where it says so.
    pub http: Option<Box<str>>,
    /// How it fares.
    pub conditions: Conditions,
    /// It is told to go.
    pub leaving: bool,
}

/// A ClusterDomainClaim: a domain is one namespace's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// Whose.
    pub namespace: String,
}
