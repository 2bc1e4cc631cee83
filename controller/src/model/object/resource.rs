//! Pure: the kinds of objects that are read or written, with their names in the API.

use std::fmt;

/// A kind of object of the API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ResourceKind {
    /// `Service` of the group `serving.knative.dev`.
    KnativeService,
    /// `Configuration` of the group `serving.knative.dev`.
    Configuration,
    /// `Revision` of the group `serving.knative.dev`.
    Revision,
    /// `Route` of the group `serving.knative.dev`.
    Route,
    /// `DomainMapping` of the group `serving.knative.dev`.
    DomainMapping,
    /// `Deployment` of the group `apps`.
    Deployment,
    /// `StatefulSet` of the group `apps`.
    StatefulSet,
    /// `Pod` of the core group.
    Pod,
    /// `Service` of the core group, as opposed to Knative's.
    Service,
    /// `EndpointSlice` of the group `discovery.k8s.io`.
    EndpointSlice,
    /// `Node` of the core group.
    Node,
    /// `ConfigMap` of the core group.
    ConfigMap,
    /// `PodAutoscaler` of the group `autoscaling.internal.knative.dev`.
    PodAutoscaler,
    /// `ServerlessService` of the group `networking.internal.knative.dev`.
    ServerlessService,
    /// `Metric` of the group `autoscaling.internal.knative.dev`.
    Metric,
    /// `Image` of the group `caching.internal.knative.dev`.
    Image,
    /// `ClusterDomainClaim` of the group `networking.internal.knative.dev`.
    ClusterDomainClaim,
    /// `Namespace` of the core group.
    Namespace,
    /// `NetworkPolicy` of the group `networking.k8s.io`.
    NetworkPolicy,
    /// `HorizontalPodAutoscaler` of the group `autoscaling`.
    HorizontalPodAutoscaler,
    /// `Certificate` of the group `networking.internal.knative.dev`.
    RequestedCertificate,
    /// `Certificate` of the group `cert-manager.io`.
    IssuedCertificate,
    /// `Challenge` of the group `acme.cert-manager.io`.
    AcmeChallenge,
    /// `ReferenceGrant` of the group `gateway.networking.k8s.io`.
    ReferenceGrant,
    /// `GatewayClass` of the group `gateway.networking.k8s.io`.
    GatewayClass,
    /// `Gateway` of the group `gateway.networking.k8s.io`.
    Gateway,
    /// `HTTPRoute` of the group `gateway.networking.k8s.io`.
    HttpRoute,
    /// `GRPCRoute` of the group `gateway.networking.k8s.io`.
    GrpcRoute,
    /// `Ingress` of the group `networking.internal.knative.dev`.
    Ingress,
}

/// Names of a kind in the API.
struct ResourceNames {
    /// API group; empty for the core group.
    group: &'static str,
    version: &'static str,
    kind: &'static str,
    /// Lower-case plural, as in API paths.
    plural: &'static str,
}

const fn resource_names(
    group: &'static str,
    version: &'static str,
    kind: &'static str,
    plural: &'static str,
) -> ResourceNames {
    ResourceNames { group, version, kind, plural }
}

impl ResourceKind {
    /// All kinds, in the order of the enum.
    pub const ALL: [Self; 29] = [
        Self::KnativeService,
        Self::Configuration,
        Self::Revision,
        Self::Route,
        Self::DomainMapping,
        Self::Deployment,
        Self::StatefulSet,
        Self::Pod,
        Self::Service,
        Self::EndpointSlice,
        Self::Node,
        Self::ConfigMap,
        Self::PodAutoscaler,
        Self::ServerlessService,
        Self::Metric,
        Self::Image,
        Self::ClusterDomainClaim,
        Self::Namespace,
        Self::NetworkPolicy,
        Self::HorizontalPodAutoscaler,
        Self::RequestedCertificate,
        Self::IssuedCertificate,
        Self::AcmeChallenge,
        Self::ReferenceGrant,
        Self::GatewayClass,
        Self::Gateway,
        Self::HttpRoute,
        Self::GrpcRoute,
        Self::Ingress,
    ];

    /// Returns the names by which the API server knows the kind.
    const fn api_names(self) -> ResourceNames {
        const SERVING: &str = "serving.knative.dev";
        const NET: &str = "networking.internal.knative.dev";
        const SCALE: &str = "autoscaling.internal.knative.dev";
        const CACHE: &str = "caching.internal.knative.dev";
        const GATEWAY: &str = "gateway.networking.k8s.io";
        const HPA: &str = "HorizontalPodAutoscaler";
        match self {
            Self::KnativeService => resource_names(SERVING, "v1", "Service", "services"),
            Self::Configuration => resource_names(SERVING, "v1", "Configuration", "configurations"),
            Self::Revision => resource_names(SERVING, "v1", "Revision", "revisions"),
            Self::Route => resource_names(SERVING, "v1", "Route", "routes"),
            Self::DomainMapping => {
                resource_names(SERVING, "v1beta1", "DomainMapping", "domainmappings")
            }
            Self::Deployment => resource_names("apps", "v1", "Deployment", "deployments"),
            Self::StatefulSet => resource_names("apps", "v1", "StatefulSet", "statefulsets"),
            Self::Pod => resource_names("", "v1", "Pod", "pods"),
            Self::Service => resource_names("", "v1", "Service", "services"),
            Self::EndpointSlice => {
                resource_names("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices")
            }
            Self::Node => resource_names("", "v1", "Node", "nodes"),
            Self::ConfigMap => resource_names("", "v1", "ConfigMap", "configmaps"),
            Self::PodAutoscaler => {
                resource_names(SCALE, "v1alpha1", "PodAutoscaler", "podautoscalers")
            }
            Self::ServerlessService => {
                resource_names(NET, "v1alpha1", "ServerlessService", "serverlessservices")
            }
            Self::Metric => resource_names(SCALE, "v1alpha1", "Metric", "metrics"),
            Self::Image => resource_names(CACHE, "v1alpha1", "Image", "images"),
            Self::ClusterDomainClaim => {
                resource_names(NET, "v1alpha1", "ClusterDomainClaim", "clusterdomainclaims")
            }
            Self::Namespace => resource_names("", "v1", "Namespace", "namespaces"),
            Self::NetworkPolicy => {
                resource_names("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies")
            }
            Self::HorizontalPodAutoscaler => {
                resource_names("autoscaling", "v2", HPA, "horizontalpodautoscalers")
            }
            Self::RequestedCertificate => {
                resource_names(NET, "v1alpha1", "Certificate", "certificates")
            }
            Self::IssuedCertificate => {
                resource_names("cert-manager.io", "v1", "Certificate", "certificates")
            }
            Self::AcmeChallenge => {
                resource_names("acme.cert-manager.io", "v1", "Challenge", "challenges")
            }
            Self::ReferenceGrant => {
                resource_names(GATEWAY, "v1beta1", "ReferenceGrant", "referencegrants")
            }
            Self::GatewayClass => resource_names(GATEWAY, "v1", "GatewayClass", "gatewayclasses"),
            Self::Gateway => resource_names(GATEWAY, "v1", "Gateway", "gateways"),
            Self::HttpRoute => resource_names(GATEWAY, "v1", "HTTPRoute", "httproutes"),
            Self::GrpcRoute => resource_names(GATEWAY, "v1", "GRPCRoute", "grpcroutes"),
            Self::Ingress => resource_names(NET, "v1alpha1", "Ingress", "ingresses"),
        }
    }

    /// The API group; empty for the core group.
    pub const fn group(self) -> &'static str {
        self.api_names().group
    }

    /// API version within the group, such as `v1`.
    pub const fn version(self) -> &'static str {
        self.api_names().version
    }

    /// Kind as in objects, such as `Service`.
    pub const fn kind(self) -> &'static str {
        self.api_names().kind
    }

    /// Lower-case plural, as in API paths.
    pub const fn plural(self) -> &'static str {
        self.api_names().plural
    }

    /// Returns true if its objects are namespaced.
    pub const fn is_namespaced(self) -> bool {
        !matches!(
            self,
            Self::Node | Self::ClusterDomainClaim | Self::Namespace | Self::GatewayClass
        )
    }

    /// Returns true if its objects have a status subresource, which is written separately.
    pub const fn has_status(self) -> bool {
        !matches!(
            self,
            Self::ConfigMap | Self::EndpointSlice | Self::ClusterDomainClaim | Self::ReferenceGrant
        )
    }

    /// Returns true if the status of its objects has the field `observedGeneration`. Those of the Gateway API have it in
    /// each condition instead, and the API server refuses fields that a kind does not have.
    pub const fn has_status_generation(self) -> bool {
        !matches!(self, Self::GatewayClass | Self::Gateway | Self::HttpRoute | Self::GrpcRoute)
    }

    /// Group and version as in the field `apiVersion` of objects.
    pub fn api_version(self) -> String {
        match self.group() {
            "" => self.version().into(),
            group => format!("{group}/{}", self.version()),
        }
    }
}

impl fmt::Display for ResourceKind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.group() {
            "" => out.write_str(self.plural()),
            group => write!(out, "{}.{group}", self.plural()),
        }
    }
}
