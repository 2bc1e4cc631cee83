//! Pure: settings of an installation, and the names that other tools rely on.

use std::{num::NonZeroU16, path::PathBuf};

use agent::{api_servers::ApiServerUrl, config::ClusterIpMode, map_sizes::MapSizeOverrides};
use ipnet::IpNet;

/// Label of all objects of an installation, by which upgrades and `rouse uninstall` find them.
pub(crate) const PART_OF_LABEL: (&str, &str) = ("app.kubernetes.io/part-of", "rouse");
/// Label of all objects of an installation with the application's name, by which admission finds `config-*`.
pub(crate) const NAME_LABEL: (&str, &str) = ("app.kubernetes.io/name", "rouse");
/// Default namespace, in which users of Knative and their tools look for `config-*`.
pub(crate) const NAMESPACE: &str = "knative-serving";

/// Way of requests from outside to the gateway.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum GatewayExposure {
    /// A load balancer of the cluster's provider
    #[default]
    Loadbalancer,
    /// A port of every node, chosen by the cluster
    Nodeport,
    /// Ports 80 and 443 of the nodes that run an activator
    Hostport,
}

/// Set of defaults for cold starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum InstallProfile {
    /// Same cold starts as on plain Kubernetes
    #[default]
    Standard,
    /// No account token in pods whose service names no account, which makes each start 0.3 s shorter; pods without
    /// requests and constraints are bound without the scheduler
    Fast,
}

/// Settings of one installation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InstallSettings {
    /// Namespace of the components.
    pub(crate) namespace: String,
    /// Image with all components.
    pub(crate) image: String,
    /// Way of requests from outside to the gateway.
    pub(crate) gateway: GatewayExposure,
    /// Set of defaults for cold starts.
    pub(crate) profile: InstallProfile,
    /// Domain of URLs from outside.
    pub(crate) domain: String,
    /// Domain of the cluster itself.
    pub(crate) cluster_domain: String,
    /// Networks of proxies before the gateway whose forwarding headers are trusted.
    pub(crate) trusted_proxies: Vec<IpNet>,
    /// True if these proxies begin each connection with a header of the PROXY protocol.
    pub(crate) proxy_protocol: bool,
    /// Gateway ports for services of raw TCP, besides 80 and 443.
    pub(crate) gateway_ports: Vec<NonZeroU16>,
    /// Services that the agents serve in kube-proxy's place, besides Rouse's own.
    pub(crate) clusterip: ClusterIpMode,
    /// Sizes of the eBPF maps that differ from those of that mode.
    pub(crate) map_sizes: MapSizeOverrides,
    /// API servers that the agents ask; none: they ask the API server's own Service.
    pub(crate) apiservers: Vec<ApiServerUrl>,
    /// Path of the kubelet's kubeconfig on the nodes, whose API server the agents ask too.
    pub(crate) kubelet_kubeconfig: Option<PathBuf>,
    /// True if the cluster does without kube-proxy.
    pub(crate) without_kube_proxy: bool,
    /// Ranges of ClusterIPs; none: those of the cluster's ServiceCIDR objects.
    pub(crate) service_cidr: Vec<IpNet>,
}

impl Default for InstallSettings {
    fn default() -> Self {
        Self {
            namespace: NAMESPACE.to_owned(),
            image: concat!("dev.local/rouse:v", env!("CARGO_PKG_VERSION")).to_owned(),
            gateway: GatewayExposure::default(),
            profile: InstallProfile::default(),
            domain: "example.com".to_owned(),
            cluster_domain: "cluster.local".to_owned(),
            trusted_proxies: Vec::new(),
            proxy_protocol: false,
            gateway_ports: Vec::new(),
            clusterip: ClusterIpMode::default(),
            map_sizes: MapSizeOverrides::default(),
            apiservers: Vec::new(),
            kubelet_kubeconfig: None,
            without_kube_proxy: false,
            service_cidr: Vec::new(),
        }
    }
}
