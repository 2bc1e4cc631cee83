//! Pure: what an installation may be told, and the names that others rely on.

use ipnet::IpNet;

/// The label that all objects of an installation carry: what upgrades and `rouse uninstall` know them by.
pub(crate) const PART_OF: (&str, &str) = ("app.kubernetes.io/part-of", "rouse");
/// Where admission asks about `config-*` ConfigMaps: those with this label.
pub(crate) const NAME: (&str, &str) = ("app.kubernetes.io/name", "rouse");
/// Users of Knative and their tools look for `config-*` here.
pub(crate) const NAMESPACE: &str = "knative-serving";

/// How requests from outside reach the gateway.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Gateway {
    /// A load balancer of the cluster's provider
    #[default]
    Loadbalancer,
    /// A port of every node, chosen by the cluster
    Nodeport,
    /// Port 80 of the nodes that run an activator
    Hostport,
}

/// What kind of cold start services get.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Profile {
    /// As Kubernetes does it
    #[default]
    Standard,
    /// No account token in pods whose service names no account, which makes each start 0.3 s shorter
    Fast,
}

/// An installation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// Where the parts run.
    pub(crate) namespace: String,
    /// The image with all parts.
    pub(crate) image: String,
    /// How requests come in.
    pub(crate) gateway: Gateway,
    /// Kind of cold start.
    pub(crate) profile: Profile,
    /// Domain of URLs from outside.
    pub(crate) domain: String,
    /// The cluster's own domain.
    pub(crate) cluster_domain: String,
    /// Networks of proxies before the gateway whose word about a request's way counts.
    pub(crate) trusted_proxies: Vec<IpNet>,
    /// Whether these begin each connection with a header of the PROXY protocol.
    pub(crate) proxy_protocol: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            namespace: NAMESPACE.to_owned(),
            image: concat!("dev.local/rouse:v", env!("CARGO_PKG_VERSION")).to_owned(),
            gateway: Gateway::default(),
            profile: Profile::default(),
            domain: "example.com".to_owned(),
            cluster_domain: "cluster.local".to_owned(),
            trusted_proxies: Vec::new(),
            proxy_protocol: false,
        }
    }
}
