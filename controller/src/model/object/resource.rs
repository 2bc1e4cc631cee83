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
}

/// Group (empty for the core group), version, kind, plural, and true if namespaced.
type ResourceNames = (&'static str, &'static str, &'static str, &'static str, bool);

impl ResourceKind {
    /// All kinds, in the order of the enum.
    pub const ALL: [Self; 19] = [
        Self::KnativeService,
        Self::Configuration,
        Self::Revision,
        Self::Route,
        Self::DomainMapping,
        Self::Deployment,
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
    ];

    const fn api_names(self) -> ResourceNames {
        const SERVING: &str = "serving.knative.dev";
        const NET: &str = "networking.internal.knative.dev";
        const SCALE: &str = "autoscaling.internal.knative.dev";
        const CACHE: &str = "caching.internal.knative.dev";
        match self {
            Self::KnativeService => (SERVING, "v1", "Service", "services", true),
            Self::Configuration => (SERVING, "v1", "Configuration", "configurations", true),
            Self::Revision => (SERVING, "v1", "Revision", "revisions", true),
            Self::Route => (SERVING, "v1", "Route", "routes", true),
            Self::DomainMapping => (SERVING, "v1beta1", "DomainMapping", "domainmappings", true),
            Self::Deployment => ("apps", "v1", "Deployment", "deployments", true),
            Self::Pod => ("", "v1", "Pod", "pods", true),
            Self::Service => ("", "v1", "Service", "services", true),
            Self::EndpointSlice => {
                ("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices", true)
            }
            Self::Node => ("", "v1", "Node", "nodes", false),
            Self::ConfigMap => ("", "v1", "ConfigMap", "configmaps", true),
            Self::PodAutoscaler => (SCALE, "v1alpha1", "PodAutoscaler", "podautoscalers", true),
            Self::ServerlessService => {
                (NET, "v1alpha1", "ServerlessService", "serverlessservices", true)
            }
            Self::Metric => (SCALE, "v1alpha1", "Metric", "metrics", true),
            Self::Image => (CACHE, "v1alpha1", "Image", "images", true),
            Self::ClusterDomainClaim => {
                (NET, "v1alpha1", "ClusterDomainClaim", "clusterdomainclaims", false)
            }
            Self::Namespace => ("", "v1", "Namespace", "namespaces", false),
            Self::NetworkPolicy => {
                ("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies", true)
            }
            Self::HorizontalPodAutoscaler => {
                ("autoscaling", "v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers", true)
            }
        }
    }

    /// The API group; empty for the core group.
    pub const fn group(self) -> &'static str {
        self.api_names().0
    }

    /// API version within the group, such as `v1`.
    pub const fn version(self) -> &'static str {
        self.api_names().1
    }

    /// Kind as in objects, such as `Service`.
    pub const fn kind(self) -> &'static str {
        self.api_names().2
    }

    /// Lower-case plural, as in API paths.
    pub const fn plural(self) -> &'static str {
        self.api_names().3
    }

    /// Returns true if its objects are namespaced.
    pub const fn is_namespaced(self) -> bool {
        self.api_names().4
    }

    /// Returns true if its objects have a status subresource, which is written separately.
    pub const fn has_status(self) -> bool {
        !matches!(self, Self::ConfigMap | Self::EndpointSlice | Self::ClusterDomainClaim)
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
