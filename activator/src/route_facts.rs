//! Pure: facts about the routes in force at this activator, in the form of the pages `/debug/routes` and `/debug/trace`.
//!
//! The pages are JSON with the names of these fields in camel case. `rouse routes` and `rouse trace` read them. Neither
//! has a byte of a private key.

use std::{fmt, net::SocketAddr};

use serde::{Deserialize, Serialize};

/// Page `/debug/routes`: hosts in force, and what requests for them depend on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RoutesFacts {
    /// Activator that has responded.
    pub activator: ActivatorFacts,
    /// Text that each listed host contains; empty: all hosts.
    #[serde(default)]
    pub filter: String,
    /// Hosts, sorted by their names.
    pub hosts: Vec<HostRouteFacts>,
    /// Number of hosts that contain the text, also of those that are not listed.
    pub all_hosts: usize,
    /// True if not all of these hosts are listed.
    pub is_cut: bool,
    /// Revisions of the listed hosts, sorted by their names.
    pub revisions: Vec<RevisionFacts>,
    /// Certificates that the listed hosts get, sorted by their names.
    pub certificates: Vec<HostCertificateFacts>,
    /// Client connections that are open now.
    pub connections: ConnectionCounts,
    /// Policy for requests from outside.
    pub edge: EdgeFacts,
}

/// Activator that has responded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ActivatorFacts {
    /// Name of the activator: on Kubernetes its pod's.
    pub name: String,
    /// Node of the activator; empty until the RouteTable lists it.
    pub node: String,
    /// Zone of the node; empty if it is not known.
    pub zone: String,
    /// Version of the RouteTable in force; 0: none was received yet, so that no host is known.
    pub routes_version: u64,
}

impl fmt::Display for ActivatorFacts {
    /// Writes the name with node and zone, as far as they are known.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "activator {}", self.name)?;
        match (self.node.as_str(), self.zone.as_str()) {
            ("", _) => Ok(()),
            (node, "") => write!(out, " on node {node}"),
            (node, zone) => write!(out, " on node {node}, zone {zone}"),
        }
    }
}

/// Reason for which a host leads to its service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HostRule {
    /// The host is one of a Route, or of a tag whose Route has no tag header routing.
    Route,
    /// The host is that of a tag.
    Tag,
    /// The host is that of a DomainMapping.
    DomainMapping,
    /// The service has no host for requests from outside. The host is its name within the cluster.
    ClusterName,
    /// The service is a port of a scaled Service, which is reached at the Service's address only. The host is the name
    /// of the Service within the cluster, with the port.
    Port,
}

impl HostRule {
    /// Returns the name of the rule in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Route => "route",
            Self::Tag => "tag",
            Self::DomainMapping => "domain-mapping",
            Self::ClusterName => "cluster-name",
            Self::Port => "port",
        }
    }
}

/// One host, and the service to which it leads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HostRouteFacts {
    /// Host in lower case. With a path rule, the prefix of the paths follows: `a.example/v1`.
    pub host: String,
    /// Reason for which the host leads to the service.
    pub rule: HostRule,
    /// Service as `namespace/name`; for a port of a scaled Service `namespace/name:port`.
    pub service: String,
    /// Path of new connections inside the cluster while a pod is ready: `direct` or `activator`.
    pub path: String,
    /// Revisions that get the requests; empty: there is none yet, and requests get 503.
    pub targets: Vec<TargetShareFacts>,
    /// True if http from outside is redirected to https.
    #[serde(default)]
    pub redirects_to_https: bool,
    /// Host that the pods receive; `None`: that of the client.
    #[serde(default)]
    pub host_rewrite: Option<String>,
    /// Tags that the header `Knative-Serving-Tag` chooses from.
    #[serde(default)]
    pub tags: Vec<String>,
    /// Certificate that clients of the TLS gateway get for the host; `None`: no client gets one, or none is a client of
    /// the gateway.
    #[serde(default)]
    pub certificate: Option<CertificateChoiceFacts>,
    /// Secret that the DomainMapping names, as `namespace/name`. If it is not in force, the certificate is another one.
    #[serde(default)]
    pub named_secret: Option<String>,
}

/// Share of one Revision in the requests of a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TargetShareFacts {
    /// Revision that serves the share, as `namespace/name`.
    pub revision: String,
    /// Share of the requests in percent.
    pub percent: u8,
}

/// Certificate that a client gets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CertificateChoiceFacts {
    /// Name of the certificate, as in [`HostCertificateFacts::name`].
    pub name: String,
    /// Reason of the choice.
    pub rule: CertificateRule,
}

/// Reason for which a client gets a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CertificateRule {
    /// The DomainMapping of the host, or its listener, names the certificate's Secret.
    Mapping,
    /// A shared certificate names the host.
    ExactName,
    /// A shared certificate has a wildcard for the host.
    Wildcard,
    /// No shared certificate is for the host, so the client gets the first one.
    Default,
}

impl CertificateRule {
    /// Returns the name of the rule in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mapping => "mapping",
            Self::ExactName => "exact-name",
            Self::Wildcard => "wildcard",
            Self::Default => "default",
        }
    }
}

/// Certificate of hosts in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HostCertificateFacts {
    /// Secret as `namespace/name`, or path of the file.
    pub name: String,
    /// DNS names of the certificate. Of very many only the first ones are listed.
    pub hosts: Vec<String>,
    /// Number of all DNS names.
    pub all_hosts: usize,
    /// Last second of the validity, in seconds since 1970.
    pub not_after_s: i64,
    /// Last second of the validity, as in RFC 3339; empty: it is beyond the year 9999.
    pub not_after: String,
}

/// Revision at this activator.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RevisionFacts {
    /// Namespace and name as `namespace/name`; that of the Service if it is a scaled one.
    pub name: String,
    /// True if the RouteTable contains the Revision. Otherwise requests for it get 404.
    pub is_known: bool,
    /// Protocol of the pods' serving port: `http1`, `h2c` or `tcp`; `None`: the Revision is not known.
    #[serde(default)]
    pub protocol: Option<String>,
    /// Hard limit of requests at one pod; 0: no limit.
    pub concurrency_limit: u32,
    /// True if NetworkPolicies let only some clients of the cluster send requests.
    pub restricts_clients: bool,
    /// Number of requests that wait at this activator.
    pub waiting: usize,
    /// Number of requests that may wait at this activator; for a scaled Service, for each port.
    pub max_waiting: usize,
    /// Number of requests that this activator has in flight, also at pods that have left the RouteTable.
    pub in_flight: u64,
    /// Number of pods that take requests, paused ones included.
    pub ready_pods: usize,
    /// Number of all pods.
    pub all_pods: usize,
    /// Pods by uid, with a row for each port of a scaled Service. Of very many only the first ones are listed.
    pub pods: Vec<RoutedPodFacts>,
}

/// State of a pod for requests of this activator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RoutedPodState {
    /// The RouteTable lists the pod as ready.
    Ready,
    /// The agent of the pod's node has reported the pod as ready before the RouteTable.
    EarlyReady,
    /// The pod is ready and gets no requests for a moment, because a dial failed or was not answered.
    Paused,
    /// The pod starts or drains, or has left this address.
    NotReady,
}

impl RoutedPodState {
    /// Returns the name of the state in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::EarlyReady => "early-ready",
            Self::Paused => "paused",
            Self::NotReady => "not-ready",
        }
    }
}

/// Rank of a pod in the choice of this activator. Pods of a later rank get requests only if none before has capacity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RoutedPodRank {
    /// Hints prefer the pod.
    Preferred,
    /// Nothing distinguishes the pod.
    #[default]
    Usual,
    /// The pod has a standby order, and a pod without one takes requests.
    Standby,
}

/// Pod at this activator, or one port of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RoutedPodFacts {
    /// Unique identifier of the pod.
    pub uid: String,
    /// Name of the pod, without its namespace.
    pub name: String,
    /// Address and port at which the pod serves; `None`: it has none yet.
    #[serde(default)]
    pub address: Option<SocketAddr>,
    /// Port of the scaled Service; `None`: the pod is one of Knative.
    #[serde(default)]
    pub service_port: Option<u16>,
    /// Node of the pod; empty if it is not known.
    pub node: String,
    /// Zone of the node; empty if it is not known.
    pub zone: String,
    /// State of the pod for requests.
    pub state: RoutedPodState,
    /// Rank of the pod in the choice.
    pub rank: RoutedPodRank,
    /// Number of requests that this activator has sent to the pod and that have not ended. Those of other activators
    /// and of direct connections do not count.
    pub in_flight: u32,
    /// Number of further requests that this activator may send to the pod now; `None`: there is no hard limit.
    #[serde(default)]
    pub free_slots: Option<u32>,
    /// True if the pod is frozen while nothing uses it.
    #[serde(default)]
    pub has_standby_order: bool,
}

/// Numbers of open client connections by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConnectionCounts {
    /// Connections that have sent nothing yet, or whose handshake of TLS goes on.
    pub opening: usize,
    /// Connections of HTTP/1.1, and what has become of them after an upgrade.
    pub http1: usize,
    /// Connections of HTTP/2, whatever streams they carry.
    pub http2: usize,
    /// Connections of raw TCP.
    pub tcp: usize,
    /// Connections of HTTP/1.1 and HTTP/2 that have TLS.
    pub tls: usize,
}

/// Policy of operators for requests from outside.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EdgeFacts {
    /// Networks of trusted proxies.
    pub trusted_proxies: Vec<String>,
    /// True if each connection from a trusted proxy begins with a header of the PROXY protocol.
    pub requires_proxy_protocol: bool,
    /// Protocols besides `websocket` to which clients may switch.
    pub allowed_upgrades: Vec<String>,
    /// True if header names with an underscore are passed on.
    pub allows_underscores: bool,
    /// Port of https in redirects; `None`: 443.
    #[serde(default)]
    pub https_port: Option<u16>,
    /// Networks of trusted ingresses, whose headers choose a Revision.
    #[serde(default)]
    pub trusted_ingresses: Vec<String>,
}

/// Result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RequestOutcome {
    /// The request goes to a Revision, which the percents choose.
    Revision,
    /// The client is redirected.
    Redirect,
    /// The activator responds itself, because the request is a probe of the platform.
    Probe,
    /// The request is refused, with a status code or by a failed handshake.
    Refused,
}

/// Page `/debug/trace`: choice for one request at this activator. No request is made, and no service wakes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RequestTraceFacts {
    /// Activator that has responded.
    pub activator: ActivatorFacts,
    /// Host of the request, as given.
    pub host: String,
    /// Path of the request, with its query.
    pub path: String,
    /// Entrypoint of the request: `outside`, `inside`, or the number of a service's own port.
    pub entrypoint: String,
    /// True if the connection has TLS.
    pub is_tls: bool,
    /// Result of the request.
    pub outcome: RequestOutcome,
    /// Status code that the client gets from the activator; `None`: a pod responds, or the request waits for one.
    #[serde(default)]
    pub status: Option<u16>,
    /// Reason of the result, as a sentence without a full stop. For a refusal it is the text that the client gets.
    pub reason: String,
    /// Rules by which a service was searched, in their order. A match is the last one.
    pub rules: Vec<RuleFacts>,
    /// Service that serves the request, as `namespace/name`.
    #[serde(default)]
    pub service: Option<String>,
    /// Choice of a tag by the header `Knative-Serving-Tag`, as a sentence; `None`: the header has no meaning.
    #[serde(default)]
    pub tag: Option<String>,
    /// URL to which the client is redirected.
    #[serde(default)]
    pub location: Option<String>,
    /// Certificate for the host; `None`: the connection has no TLS, or no certificate is for the host.
    #[serde(default)]
    pub certificate: Option<CertificateChoiceFacts>,
    /// Revisions that may get the request, with the state of each.
    #[serde(default)]
    pub targets: Vec<TracedTargetFacts>,
    /// Further facts that the result depends on, each a sentence without a full stop.
    #[serde(default)]
    pub notes: Vec<String>,
}

/// Rule by which a service was searched.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RuleFacts {
    /// Rule as a phrase, such as `host shop.example`.
    pub rule: String,
    /// True if a service was found by it.
    pub is_match: bool,
}

/// Revision that may get a traced request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TracedTargetFacts {
    /// Share of the requests in percent.
    pub percent: u8,
    /// Status code that the client gets from the activator; `None`: a pod responds, or the request waits for one.
    #[serde(default)]
    pub status: Option<u16>,
    /// Result of the request at this Revision with its reason, as a sentence without a full stop.
    pub reason: String,
    /// Pod that would get the request now; `None`: it would wait, or be refused.
    #[serde(default)]
    pub pod: Option<RoutedPodFacts>,
    /// The Revision with its pods.
    pub revision: RevisionFacts,
}
