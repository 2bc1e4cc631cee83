//! Pure: the kinds of objects that are read or written, with what the API calls them.

use std::fmt;

/// A kind of object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Resource {
    /// `serving.knative.dev` Service.
    KnativeService,
    /// `serving.knative.dev` Configuration.
    Configuration,
    /// `serving.knative.dev` Revision.
    Revision,
    /// `serving.knative.dev` Route.
    Route,
    /// `serving.knative.dev` DomainMapping.
    DomainMapping,
    /// Deployment.
    Deployment,
    /// Pod.
    Pod,
    /// Kubernetes' own Service.
    Service,
    /// EndpointSlice.
    EndpointSlice,
    /// Node.
    Node,
    /// ConfigMap.
    ConfigMap,
    /// PodAutoscaler.
    PodAutoscaler,
    /// ServerlessService.
    ServerlessService,
    /// Metric.
    Metric,
    /// Image.
    Image,
    /// ClusterDomainClaim.
    ClusterDomainClaim,
    /// Namespace.
    Namespace,
    /// NetworkPolicy.
    NetworkPolicy,
    /// HorizontalPodAutoscaler.
    HorizontalPodAutoscaler,
}

/// Group (empty for the oldest), version, kind, plural, whether it has a namespace.
type Names = (&'static str, &'static str, &'static str, &'static str, bool);

impl Resource {
    /// All of them.
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

    const fn names(self) -> Names {
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

    /// The API group; empty for Kubernetes' oldest.
    pub const fn group(self) -> &'static str {
        self.names().0
    }

    /// The version within the group.
    pub const fn version(self) -> &'static str {
        self.names().1
    }

    /// The kind.
    pub const fn kind(self) -> &'static str {
        self.names().2
    }

    /// The lower-case plural of API paths.
    pub const fn plural(self) -> &'static str {
        self.names().3
    }

    /// Whether its objects stand in namespaces.
    pub const fn namespaced(self) -> bool {
        self.names().4
    }

    /// Whether its status is written apart from the rest.
    pub const fn has_status(self) -> bool {
        !matches!(self, Self::ConfigMap | Self::EndpointSlice | Self::ClusterDomainClaim)
    }

    /// Group and version, as objects say it.
    pub fn api_version(self) -> String {
        match self.group() {
            "" => self.version().into(),
            group => format!("{group}/{}", self.version()),
        }
    }
}

impl fmt::Display for Resource {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.group() {
            "" => out.write_str(self.plural()),
            group => write!(out, "{}.{group}", self.plural()),
        }
    }
}
