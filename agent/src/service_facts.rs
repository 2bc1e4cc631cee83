//! Pure: facts about services on this node, in the form of the pages `/debug/services` and `/debug/trace`.
//!
//! The pages are JSON with the names of these fields in camel case. `rouse services` and `rouse trace` read them.

use std::{fmt, net::SocketAddr};

use common::url_query::decode_percent;
use serde::{Deserialize, Serialize};

/// Source of a frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ServiceSource {
    /// A service of Rouse, from the RouteTable: a Route, or a port of a scaled Service.
    Route,
    /// A Service of the cluster, from the API server.
    Service,
}

impl ServiceSource {
    /// All sources.
    pub const ALL: [Self; 2] = [Self::Route, Self::Service];

    /// Returns the name of the source in metrics and tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Route => "route",
            Self::Service => "service",
        }
    }
}

/// Treatment of connects to a frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FrontendMode {
    /// Sent to a pod, or to another endpoint of the Service.
    Pods,
    /// Sent to an activator.
    Activators,
    /// Refused by the kernel.
    Refuse,
    /// Left as the client made them.
    Pass,
    /// The service does not fit into the kernel's maps.
    NoRoom,
    /// The frontend is not in the kernel's maps yet.
    Waiting,
    /// Another service has the same address and port, and owns the frontend.
    Shadowed,
}

impl FrontendMode {
    /// Returns the name of the mode in metrics and tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pods => "pods",
            Self::Activators => "activators",
            Self::Refuse => "refuse",
            Self::Pass => "pass",
            Self::NoRoom => "no-room",
            Self::Waiting => "waiting",
            Self::Shadowed => "shadowed",
        }
    }
}

/// One address and port of a service on this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FrontendFacts {
    /// Namespace of the service.
    pub namespace: String,
    /// Name of the service. Each port of a scaled Service has the Service's name.
    pub name: String,
    /// Source of the service.
    pub source: ServiceSource,
    /// ClusterIP and port.
    pub address: SocketAddr,
    /// Transport protocol: `TCP` or `UDP`.
    pub protocol: String,
    /// Treatment of connects.
    pub mode: FrontendMode,
    /// Reason of a mode that is not the usual one.
    #[serde(default)]
    pub reason: Option<String>,
    /// Number of endpoints in the list in force; `None`: there is no list.
    pub listed: Option<usize>,
    /// Number of endpoints of the port that the agent knows, usable or not; `None`: it does not know.
    pub known: Option<usize>,
    /// Time for which a client keeps its endpoint after a connect, in seconds; 0: not at all.
    #[serde(default)]
    pub affinity_seconds: u32,
}

/// Page `/debug/services`: frontends of this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeServices {
    /// Node and mode of the agent.
    pub node: NodeFacts,
    /// Frontends by source and name of their service.
    pub services: Vec<FrontendFacts>,
}

/// State of the agent on which the routing of all services depends.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeFacts {
    /// Name of the node.
    pub name: String,
    /// Zone of the node; empty if its object has none or is not known.
    pub zone: String,
    /// Value of `--clusterip`.
    pub clusterip: String,
    /// Sources that are not known yet. Until they are, the maps stay as an earlier agent left them.
    #[serde(default)]
    pub unknown: Vec<String>,
}

/// Result of a connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TraceOutcome {
    /// The connect goes to one of the candidates.
    Endpoint,
    /// The connect goes to an activator.
    Activator,
    /// The kernel refuses the connect.
    Refused,
    /// The connect goes on unchanged.
    Unchanged,
}

/// Page `/debug/trace`: choice for one connect from this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TraceFacts {
    /// Node and mode of the agent.
    pub node: NodeFacts,
    /// Address and port of the connect.
    pub to: SocketAddr,
    /// Transport protocol: `TCP` or `UDP`.
    pub protocol: String,
    /// Result of the connect.
    pub outcome: TraceOutcome,
    /// Reason of the result, as a sentence without a full stop.
    pub reason: String,
    /// Frontend that the connect asks for; `None`: no service of this node has the address and port.
    #[serde(default)]
    pub frontend: Option<FrontendFacts>,
    /// Effect of the hints of a Service of the cluster, as a sentence; `None`: no ready endpoint has one, or the
    /// service is one of Rouse's, of which `reason` names the hints.
    #[serde(default)]
    pub hints: Option<String>,
    /// Known endpoints of the service, those of the list first.
    #[serde(default)]
    pub candidates: Vec<CandidateFacts>,
    /// Effect of kube-proxy's rules, as a sentence; `None`: the connect does not reach them.
    #[serde(default)]
    pub kube_proxy: Option<String>,
    /// Clients of this node to which the result does not apply, as their connects go on unchanged. Each is a sentence.
    #[serde(default)]
    pub exceptions: Vec<String>,
}

impl TraceFacts {
    /// Sets the clients to which the result does not apply: kernel threads, if they are left alone, and this number of
    /// meshed namespaces. If all connects go on unchanged, there are none.
    pub fn set_exceptions(&mut self, are_kernel_threads_left: bool, meshed_namespaces: u64) {
        self.exceptions.clear();
        if self.outcome == TraceOutcome::Unchanged {
            return;
        }
        if are_kernel_threads_left {
            let kernel_threads =
                "those of kernel threads, as for mounts, go on unchanged where the kernel has BTF";
            self.exceptions.push(kernel_threads.to_owned());
        }
        if meshed_namespaces > 0 {
            self.exceptions.push(format!(
                "those of network namespaces that redirect connections, as for a mesh, go on \
                 unchanged; the node has {meshed_namespaces}, and a trace does not tell if the \
                 client is in one"
            ));
        }
    }
}

/// State of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CandidateState {
    /// Ready for connections.
    Ready,
    /// Terminating, and still able to serve.
    Terminating,
    /// Neither ready nor able to serve.
    NotReady,
    /// An activator, which stands in for the pods.
    Activator,
    /// The list in force names it, and its state is not known.
    Unknown,
}

impl CandidateState {
    /// Returns the name of the state in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Terminating => "terminating",
            Self::NotReady => "not-ready",
            Self::Activator => "activator",
            Self::Unknown => "unknown",
        }
    }
}

/// Endpoint that a connect may go to, or that was excluded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CandidateFacts {
    /// Address and port of the endpoint.
    pub address: SocketAddr,
    /// State of the endpoint.
    pub state: CandidateState,
    /// Node of the endpoint; empty if it is not known.
    #[serde(default)]
    pub node: String,
    /// Zone of the endpoint; empty if it is not known.
    #[serde(default)]
    pub zone: String,
    /// Zones whose clients should use the endpoint.
    #[serde(default)]
    pub zone_hints: Vec<String>,
    /// Nodes whose clients should use the endpoint.
    #[serde(default)]
    pub node_hints: Vec<String>,
    /// True if the selection has chosen the endpoint.
    pub is_selected: bool,
    /// True if the list in force names the endpoint: a connect may go there.
    pub is_listed: bool,
    /// Reason of the decision about the endpoint.
    pub reason: String,
    /// State of the endpoint in the kernel's map; `None` if no list names it.
    #[serde(default)]
    pub usage: Option<BackendUsage>,
}

/// Use of a backend by the clients of this node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BackendUsage {
    /// Open connections of this node's clients.
    pub open_connections: u64,
    /// True if it left a connect unanswered within the last ten seconds, so that connects prefer others.
    pub is_unanswered: bool,
}

/// Transport protocols of frontends, by their numbers in IP headers.
const PROTOCOLS: [(u8, &str); 2] = [(6, "TCP"), (17, "UDP")];

/// Connect that a trace asks about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceTarget {
    /// Address and port of the connect.
    pub to: SocketAddr,
    /// Number of the transport protocol: 6 or 17.
    pub protocol: u8,
}

impl TraceTarget {
    /// Returns the name of the protocol.
    pub fn protocol_name(&self) -> &'static str {
        protocol_name(self.protocol)
    }
}

/// Returns the name of a transport protocol by its number.
pub fn protocol_name(number: u8) -> &'static str {
    PROTOCOLS.iter().find(|(it, _)| *it == number).map_or("unknown", |(_, name)| name)
}

/// Error: the page `/debug/trace` is not asked for an address and port.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{parameter} is {value:?}: it must be {expected}")]
pub struct TraceQueryError {
    parameter: &'static str,
    value: String,
    expected: &'static str,
}

impl TraceTarget {
    /// Reads the query of `/debug/trace`: `to=IP:PORT`, and `protocol=tcp` or `udp`, which may be missing.
    pub fn from_query(query: &str) -> Result<Self, TraceQueryError> {
        let parameter = |name: &str| {
            let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
            pairs.into_iter().find(|(key, _)| *key == name).map(|(_, value)| decode_percent(value))
        };
        let to = parameter("to").unwrap_or_default();
        let protocol = parameter("protocol").unwrap_or_else(|| "tcp".to_owned());
        let found = PROTOCOLS.iter().find(|(_, name)| name.eq_ignore_ascii_case(&protocol));
        Ok(Self {
            to: parse_target(&to)?,
            protocol: found.map(|(number, _)| *number).ok_or(TraceQueryError {
                parameter: "protocol",
                value: protocol,
                expected: "tcp or udp",
            })?,
        })
    }
}

impl fmt::Display for TraceTarget {
    /// Writes the query that [`from_query`](Self::from_query) reads.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let to = self.to.to_string().replace('[', "%5B").replace(']', "%5D");
        write!(out, "to={to}&protocol={}", self.protocol_name().to_ascii_lowercase())
    }
}

/// Parses the address and port of a trace. A port is never 0, and an IPv4 address may be a mapped one.
pub fn parse_target(text: &str) -> Result<SocketAddr, TraceQueryError> {
    let parsed = text.parse::<SocketAddr>().ok().filter(|to| to.port() != 0);
    let expected = "an IP address and port, such as 10.96.0.10:53 or [fd00::10]:53";
    let error = || TraceQueryError { parameter: "to", value: text.to_owned(), expected };
    parsed.map(|to| SocketAddr::new(to.ip().to_canonical(), to.port())).ok_or_else(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_names_the_clients_to_which_it_does_not_apply() {
        let exceptions = |outcome: &str, are_kernel_threads_left, meshed_namespaces| {
            let facts = format!(
                r#"{{"node": {{"name": "n1", "zone": "", "clusterip": "all"}}, "to": "10.96.0.9:80",
                    "protocol": "TCP", "outcome": "{outcome}", "reason": "no"}}"#
            );
            let mut facts: TraceFacts = serde_json::from_str(&facts).expect("the agent's form");
            facts.set_exceptions(are_kernel_threads_left, meshed_namespaces);
            facts.exceptions
        };
        assert_eq!(exceptions("endpoint", false, 0), [""; 0]);
        assert_eq!(exceptions("unchanged", true, 3), [""; 0], "they are no exceptions");
        let all = exceptions("refused", true, 3);
        assert_eq!(all.len(), 2, "{all:?}");
        assert!(all[0].contains("kernel threads") && all[1].contains("the node has 3"), "{all:?}");
        assert_eq!(exceptions("activator", false, 3), all[1..]);
        assert_eq!(exceptions("endpoint", true, 0), all[..1]);
    }

    #[test]
    fn a_query_names_address_port_and_protocol() {
        let target = |to: &str, protocol| TraceTarget { to: to.parse().unwrap(), protocol };
        for (query, expected) in [
            ("to=10.96.0.1:80", target("10.96.0.1:80", 6)),
            ("protocol=udp&to=10.96.0.10:53", target("10.96.0.10:53", 17)),
            ("to=%5bfd00::1%5D%3A80&protocol=TCP", target("[fd00::1]:80", 6)),
            ("to=[::ffff:10.96.0.1]:80", target("10.96.0.1:80", 6)),
        ] {
            assert_eq!(TraceTarget::from_query(query), Ok(expected), "{query}");
            let written = expected.to_string();
            assert_eq!(TraceTarget::from_query(&written), Ok(expected), "{written}");
        }
    }

    #[test]
    fn a_query_without_an_address_and_port_is_refused_with_the_form() {
        let bad =
            ["", "to=", "to=web:80", "to=10.96.0.1", "to=10.96.0.1:0", "to=None:80", "to=%+1"];
        for query in bad {
            let error = TraceTarget::from_query(query).expect_err(query).to_string();
            assert!(error.starts_with("to is ") && error.contains("10.96.0.10:53"), "{error}");
        }
        let error = TraceTarget::from_query("to=10.96.0.1:80&protocol=quic").unwrap_err();
        assert_eq!(error.to_string(), "protocol is \"quic\": it must be tcp or udp");
    }
}
