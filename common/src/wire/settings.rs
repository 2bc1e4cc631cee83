//! Pure: settings of operators for all services at once, as the RouteTable carries them.

use std::{fmt, net::IpAddr, num::NonZeroU16, time::Duration};

use ipnet::IpNet;

use super::{HstsPolicy, NamespacedName, TelemetrySettings, TlsSettings};
use crate::request_log::LogTemplate;

/// Settings of operators for all services at once. The table omits them while all have their defaults.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GlobalSettings {
    /// Request log of activators; `None`: requests are not logged.
    pub request_log: Option<RequestLogSettings>,
    /// Log level of each component.
    pub log_levels: LogLevels,
    /// Treatment of requests from outside by gateways.
    pub edge: EdgeSettings,
    /// Traces and request metrics of activators.
    pub telemetry: TelemetrySettings,
}

impl GlobalSettings {
    /// Returns the settings for the table: `None` while all have their defaults.
    pub fn if_not_default(&self) -> Option<Self> {
        (*self != Self::default()).then(|| self.clone())
    }
}

/// Log level of each component.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogLevels {
    /// Log level of controllers.
    pub controller: LogLevel,
    /// Log level of agents.
    pub agent: LogLevel,
    /// Log level of activators.
    pub activator: LogLevel,
    /// Log level of autoscalers.
    pub autoscaler: LogLevel,
}

/// Lowest severity that is logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogLevel {
    /// Details that only developers need.
    Debug,
    /// Every change of state.
    #[default]
    Info,
    /// Conditions that an operator should check.
    Warn,
    /// Operations that have failed.
    Error,
}

impl fmt::Display for LogLevel {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Debug => "debug",
            Self::Info => "info",
            Self::Warn => "warn",
            Self::Error => "error",
        })
    }
}

/// Request log of activators: one line for each finished request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestLogSettings {
    /// Template of the line.
    pub template: LogTemplate,
    /// True if probes that the platform answers are logged too.
    pub logs_probes: bool,
}

/// Treatment of requests from outside, and the protocols that requests may switch to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EdgeSettings {
    /// Networks of trusted proxies, whose headers about the client are kept. Empty: no proxy is trusted.
    pub trusted_proxies: Vec<IpNet>,
    /// True if each connection from a trusted proxy begins with a header of the PROXY protocol.
    pub requires_proxy_protocol: bool,
    /// Protocols besides `websocket` that a client may switch to, in lower case.
    pub allowed_upgrades: Vec<String>,
    /// True if header names with an underscore are passed on.
    pub allows_underscores: bool,
    /// Secrets with certificates of the installation. The first is the default, for hosts without another one.
    pub certificates: Vec<NamespacedName>,
    /// Port of https in redirects; `None`: the activator's own setting.
    pub https_port: Option<NonZeroU16>,
    /// `Strict-Transport-Security` of all hosts without one of their own; `None`: none is sent.
    pub hsts: Option<HstsPolicy>,
    /// Versions and ciphers of TLS with clients.
    pub tls: TlsSettings,
    /// True if the default certificate is presented to no client: one that names no host, or a host without a certificate,
    /// is refused.
    pub is_sni_strict: bool,
    /// Idle deadline: a connection of raw TCP from outside that passes no byte for so long is reset; `None`: never. Sent
    /// in whole milliseconds.
    pub tcp_idle_timeout: Option<Duration>,
    /// Networks of trusted ingresses of other controllers, whose headers choose a Revision at the gateway for workloads
    /// of the cluster. Empty: no ingress is trusted.
    pub trusted_ingresses: Vec<IpNet>,
}

impl EdgeSettings {
    /// Returns true if `peer` is a trusted proxy.
    pub fn is_trusted_proxy(&self, peer: IpAddr) -> bool {
        is_in_networks(&self.trusted_proxies, peer)
    }

    /// Returns true if `peer` is a trusted ingress.
    pub fn is_trusted_ingress(&self, peer: IpAddr) -> bool {
        is_in_networks(&self.trusted_ingresses, peer)
    }
}

/// Returns true if one of the networks contains the address.
fn is_in_networks(networks: &[IpNet], address: IpAddr) -> bool {
    let address = address.to_canonical();
    networks.iter().any(|net| net.contains(&address))
}

/// Parses a network from `ADDRESS/LENGTH`, or from one address alone. Bits beyond the length are ignored.
pub fn parse_network(text: &str) -> Option<IpNet> {
    let whole = || text.parse::<IpAddr>().ok().map(|it| IpNet::from(it.to_canonical()));
    text.parse::<IpNet>().ok().or_else(whole).map(|net| net.trunc())
}

/// Returns true if clients may be allowed to switch to a protocol of this name (RFC 9110, section 7.8). It consists of
/// lower-case letters, digits and `-._/+`, and is neither HTTP nor TLS. After a switch to HTTP, also inside TLS, headers
/// about the client would pass unchecked.
pub fn is_allowed_upgrade_name(name: &str) -> bool {
    let is_letter =
        |it: u8| it.is_ascii_lowercase() || it.is_ascii_digit() || b"-._/+".contains(&it);
    let is_http =
        ["h2c", "h2", "h3", "http", "tls"].iter().any(|it| name.split('/').next() == Some(it));
    // 64 bytes are a sanity limit for names from a ConfigMap.
    (1..=64).contains(&name.len()) && name.bytes().all(is_letter) && !is_http
}
