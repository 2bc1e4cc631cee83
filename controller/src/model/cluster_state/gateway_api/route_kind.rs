//! Pure: the kinds of routes of the Gateway API, and the names of routes.

use std::fmt;

use common::wire::{AppProtocol, NamespacedName};

use crate::model::object::ResourceKind;

/// Kind of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum GatewayRouteKind {
    /// HTTPRoute, for all requests.
    Http,
    /// GRPCRoute, for calls of gRPC.
    Grpc,
}

/// Kind and name of a route.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GatewayRouteId {
    /// Kind of the route.
    pub kind: GatewayRouteKind,
    /// Namespace and name of the route.
    pub name: NamespacedName,
}

impl GatewayRouteKind {
    /// Both kinds, in the order in which statuses name them.
    pub const ALL: [Self; 2] = [Self::Http, Self::Grpc];

    /// Returns the kind of a route; `None`: the objects of this kind are no routes.
    pub fn of_resource(resource: ResourceKind) -> Option<Self> {
        Self::ALL.into_iter().find(|it| it.resource() == resource)
    }

    /// Kind of the objects.
    pub const fn resource(self) -> ResourceKind {
        match self {
            Self::Http => ResourceKind::HttpRoute,
            Self::Grpc => ResourceKind::GrpcRoute,
        }
    }

    /// Kind as in objects, such as `HTTPRoute`.
    pub const fn name(self) -> &'static str {
        self.resource().kind()
    }

    /// Other kind, whose routes must not have a host in common with those of this one.
    pub const fn other(self) -> Self {
        match self {
            Self::Http => Self::Grpc,
            Self::Grpc => Self::Http,
        }
    }

    /// Usual protocol of the backends of routes.
    pub const fn usual_protocol(self) -> AppProtocol {
        match self {
            Self::Http => AppProtocol::Http1,
            Self::Grpc => AppProtocol::H2c,
        }
    }
}

impl fmt::Display for GatewayRouteId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} {}", self.kind.name(), self.name)
    }
}
