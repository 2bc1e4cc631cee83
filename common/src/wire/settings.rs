//! Pure: what operators set for all services at once, as other parts are told.

use std::{fmt, net::IpAddr, string::String, vec::Vec};

use ipnet::IpNet;

use crate::request_log::Template;

/// What operators set for all services at once. The table says nothing of it while everything is as usual.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// How finished requests are logged; `None`: not at all.
    pub request_log: Option<RequestLog>,
    /// How much each part logs of itself.
    pub levels: Levels,
    /// What gateways make of requests from outside.
    pub edge: Edge,
}

impl Settings {
    /// What the table says of them: nothing while all is as usual.
    pub fn said(&self) -> Option<Self> {
        (*self != Self::default()).then(|| self.clone())
    }
}

/// How much each part logs of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Levels {
    /// Controllers.
    pub controller: Level,
    /// Agents.
    pub agent: Level,
    /// Activators.
    pub activator: Level,
    /// Autoscalers.
    pub autoscaler: Level,
}

/// How much is logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Level {
    /// What a developer wants.
    Debug,
    /// Every change of state.
    #[default]
    Info,
    /// What a person should look at.
    Warn,
    /// What failed.
    Error,
}

impl fmt::Display for Level {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Debug => "debug",
            Self::Info => "info",
            Self::Warn => "warn",
            Self::Error => "error",
        })
    }
}

/// How activators log finished requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestLog {
    /// The line of one.
    pub template: Template,
    /// Whether those that ask the platform are logged too.
    pub probes: bool,
}

/// What gateways make of requests from outside, and which protocols requests may switch to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Edge {
    /// Networks of proxies whose word about a request's way counts. Empty: no proxy's does.
    pub trusted_proxies: Vec<IpNet>,
    /// Whether each connection from these begins with a header of the PROXY protocol.
    pub proxy_protocol: bool,
    /// Protocols besides `websocket` that a client may switch to, in lower case.
    pub upgrades: Vec<String>,
    /// Whether header names with an underscore are passed on.
    pub underscores: bool,
}

impl Edge {
    /// Whether what this peer says of a request's way counts.
    pub fn trusts(&self, peer: IpAddr) -> bool {
        let peer = peer.to_canonical();
        self.trusted_proxies.iter().any(|net| net.contains(&peer))
    }
}

/// A network from `ADDRESS/LENGTH`, or from one address alone. Bits beyond the length count for nothing.
pub fn network(text: &str) -> Option<IpNet> {
    let whole = || text.parse::<IpAddr>().ok().map(|it| IpNet::from(it.to_canonical()));
    text.parse::<IpNet>().ok().or_else(whole).map(|net| net.trunc())
}

/// Whether clients may be allowed to switch to a protocol of this name: a token (RFC 9110, section 5.6.2) in lower case,
/// and not HTTP itself, behind whose switch headers would be the client's own word.
pub fn is_upgrade(name: &str) -> bool {
    let is_letter =
        |it: u8| it.is_ascii_lowercase() || it.is_ascii_digit() || b"-._/+".contains(&it);
    let is_http =
        ["h2c", "h2", "h3", "http", "tls"].iter().any(|it| name.split('/').next() == Some(it));
    (1..=64).contains(&name.len()) && name.bytes().all(is_letter) && !is_http
}
