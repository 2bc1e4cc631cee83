//! Pure: rules of the Gateway API for the requests of one host from outside.

use std::{
    fmt,
    net::SocketAddr,
    num::{NonZeroU16, NonZeroU32},
    str::FromStr,
    time::Duration,
};

use smol_str::SmolStr;

use super::{AppProtocol, NamespacedName, PathModifier, PathPrefix, WireError, is_dns_subdomain};

/// Host that listens to all hosts without a more specific one.
const ANY_HOST: &str = "*";
/// Most bytes of the name of a host.
const MAX_HOST_BYTES: usize = 253;

/// Transport and host of a listener of Gateways, or a more specific host of a route.
///
/// Its text is a URL without a path, as `http://*.example.com`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GatewayHostKey {
    /// True for connections with TLS, false for those without.
    pub is_tls: bool,
    /// Host in lower case and without port. `*.example.com` is for hosts with one label or more in front, and `*` for all.
    pub host: SmolStr,
}

/// Rules of one host. A request to it that no rule fits gets 404, and is not for a less specific host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayHostEntry {
    /// Transport and host that the rules are for.
    pub key: GatewayHostKey,
    /// Rules in the order of their precedence: the first one that fits a request decides.
    pub rules: Vec<HttpRule>,
    /// Secrets whose certificates the host has for TLS. The client's keys and the names of the certificates decide among
    /// several. None: the certificate is chosen as that of other hosts.
    pub certificates: Vec<NamespacedName>,
    /// [Reserved hosts](crate::wire::RouteTable::reserved_hosts) at or below the host. Listed here only by a controller of
    /// an earlier release, or for an activator of one.
    pub reserved_hosts: Vec<String>,
}

/// One match of a rule of an HTTPRoute or GRPCRoute, with the treatment of the requests that fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpRule {
    /// Namespace and name of the route.
    pub route: NamespacedName,
    /// True if the route is a GRPCRoute. Without a backend, its requests get 503 instead of 500, since clients of gRPC
    /// read 503 as `UNAVAILABLE`.
    pub is_grpc: bool,
    /// Paths of the requests that fit.
    pub path: PathMatch,
    /// Method that fits; `None`: all methods.
    pub method: Option<String>,
    /// Headers that a request must have, as name in lower case and value.
    pub headers: Vec<(String, String)>,
    /// Parameters that the query of a request must have, as name and value.
    pub query: Vec<(String, String)>,
    /// Changes of the headers of requests.
    pub request_headers: HeaderChanges,
    /// Changes of the headers of responses.
    pub response_headers: HeaderChanges,
    /// Redirect that the gateway responds with; `None`: a backend responds.
    pub redirect: Option<RequestRedirect>,
    /// Change of the URL of requests; `None`: backends receive the client's.
    pub rewrite: Option<UrlRewrite>,
    /// Timeouts of the requests that fit.
    pub timeouts: RuleTimeouts,
    /// Backends with their shares. Without any, requests get 500.
    pub backends: Vec<WeightedBackend>,
}

/// Paths that fit a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathMatch {
    /// This path alone. Its characters are those of a [`PathPrefix`], and it may end with `/`.
    Exact(SmolStr),
    /// All paths with this prefix.
    Prefix(PathPrefix),
}

/// Changes of headers. They are set first, then added, then removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeaderChanges {
    /// Headers that replace all of their name, as name and value.
    pub set: Vec<(String, String)>,
    /// Headers that are added to those of their name, as name and value.
    pub add: Vec<(String, String)>,
    /// Names of headers that are removed.
    pub remove: Vec<String>,
}

/// Change of the URL of a request before a backend receives it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UrlRewrite {
    /// Host that replaces that of the request; `None`: it stays.
    pub host: Option<String>,
    /// Replacement of the path; `None`: it stays.
    pub path: Option<PathModifier>,
}

/// Timeouts of the requests that a rule fits, in whole milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RuleTimeouts {
    /// Time from the arrival of a request to the end of its response; `None`: the rule has no such limit.
    pub request: Option<Duration>,
    /// Time of each exchange with a backend, to the end of its response; `None`: the rule has no such limit.
    pub backend_request: Option<Duration>,
}

/// Redirect to another URL with the query of the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestRedirect {
    /// Scheme of the URL; `None`: that of the request.
    pub is_https: Option<bool>,
    /// Host of the URL; `None`: that of the request.
    pub host: Option<String>,
    /// Port of the URL; `None`: the port of `is_https` if that is set, else that of the listener.
    pub port: Option<NonZeroU16>,
    /// Replacement of the path; `None`: that of the request.
    pub path: Option<PathModifier>,
    /// Status code of the response, 3xx.
    pub status: u16,
}

/// Backend with its share of the requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightedBackend {
    /// Share relative to the sum of all weights of the rule.
    pub weight: NonZeroU32,
    /// Backend that gets the share.
    pub target: RouteBackend,
    /// Changes of the headers of its requests, after those of the rule.
    pub request_headers: HeaderChanges,
    /// Changes of the headers of its responses, before those of the rule.
    pub response_headers: HeaderChanges,
}

/// Backend of a route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RouteBackend {
    /// Service of the RouteTable: a Route of Knative or one of its tags, or a port of a scaled Service.
    Service(NamespacedName),
    /// Service of the cluster, at its ClusterIP.
    Plain(PlainBackend),
    /// Reference that leads to no backend. Requests get 500.
    Unresolved,
}

/// Port of a Service of the cluster. The node of the activator leads connections to its endpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlainBackend {
    /// Name of the port, as [`NamespacedName::with_port`] writes it.
    pub name: NamespacedName,
    /// ClusterIP and port of the Service.
    pub address: SocketAddr,
    /// Protocol of the endpoints.
    pub protocol: AppProtocol,
}

impl GatewayHostKey {
    /// Returns the keys that are to be looked up for a host, the most specific one first. A host that is longer than any
    /// name has only the key of all hosts. With a key for each of its dots, a long head would cost seconds.
    pub fn candidates(is_tls: bool, host: &str) -> impl Iterator<Item = Self> {
        let host = if host.len() <= MAX_HOST_BYTES { host } else { "" };
        let dots = host.match_indices('.').map(|(at, _)| at).filter(|at| *at > 0);
        let wildcards = dots.map(|at| SmolStr::from(format!("*{}", &host[at..])));
        let exact = (!host.is_empty()).then(|| SmolStr::from(host));
        let any = [SmolStr::new_static(ANY_HOST)];
        let hosts = exact.into_iter().chain(wildcards).chain(any);
        hosts.map(move |host| Self { is_tls, host })
    }

    /// Returns true if the host has no wildcard.
    pub fn is_exact(&self) -> bool {
        !self.host.starts_with('*')
    }
}

impl fmt::Display for GatewayHostKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}://{}", if self.is_tls { "https" } else { "http" }, self.host)
    }
}

impl FromStr for GatewayHostKey {
    type Err = WireError;

    fn from_str(text: &str) -> Result<Self, WireError> {
        let (is_tls, host) = match text.split_once("://") {
            Some(("https", host)) => (true, host),
            Some(("http", host)) => (false, host),
            _ => return Err(WireError::new("gateway_host.key", text, "must be a URL of http")),
        };
        if host != ANY_HOST && !is_dns_subdomain(host.strip_prefix("*.").unwrap_or(host)) {
            return Err(WireError::new("gateway_host.key", text, "must have a host or wildcard"));
        }
        Ok(Self { is_tls, host: host.into() })
    }
}

impl PathMatch {
    /// Parses a path that is to be the whole path of requests; `None`: it has characters that servers read differently.
    pub fn parse_exact(text: &str) -> Option<Self> {
        PathPrefix::parse(text).ok().map(|_| Self::Exact(text.into()))
    }

    /// Longest prefix that all paths that fit have.
    pub fn prefix(&self) -> &str {
        match self {
            // The text of `/` is empty, as that of the prefix of all paths.
            Self::Exact(path) => path.strip_suffix('/').unwrap_or(path),
            Self::Prefix(prefix) => prefix.as_str(),
        }
    }
}

impl HeaderChanges {
    /// Returns true without any change.
    pub fn is_empty(&self) -> bool {
        self.set.is_empty() && self.add.is_empty() && self.remove.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_looked_up_from_the_most_specific_key_on() {
        let keys = |host: &str| {
            let all = GatewayHostKey::candidates(false, host).map(|it| it.to_string());
            all.collect::<Vec<_>>()
        };
        let expected = ["http://a.b.test", "http://*.b.test", "http://*.test", "http://*"];
        assert_eq!(keys("a.b.test"), expected);
        assert_eq!(keys("a"), ["http://a", "http://*"]);
        assert_eq!(keys(""), ["http://*"]);
        assert_eq!(keys(".test"), ["http://.test", "http://*"]);
        assert_eq!(keys(&"a.".repeat(126)).len(), 128);
        assert_eq!(keys(&"a.".repeat(127)), ["http://*"], "no key has so long a host");
    }

    #[test]
    fn a_key_is_a_url_without_a_path() {
        for text in ["http://*", "https://*.example.com", "http://a.example.com", "https://a"] {
            let key: GatewayHostKey = text.parse().expect("a key");
            assert_eq!(key.to_string(), text);
            assert_eq!(key.is_exact(), !text.contains('*'));
        }
        for text in
            ["", "a.test", "ftp://a.test", "http://", "http://**", "http://A", "http://a:80"]
        {
            assert!(text.parse::<GatewayHostKey>().is_err(), "{text}");
        }
    }

    #[test]
    fn an_exact_path_keeps_its_last_slash_and_is_below_its_prefix() {
        for (text, prefix) in [("/a", "/a"), ("/a/", "/a"), ("/", "")] {
            let path = PathMatch::parse_exact(text).expect("a path");
            assert_eq!(path, PathMatch::Exact(text.into()));
            assert_eq!(path.prefix(), prefix);
        }
        for text in ["", "a", "/a//b", "/a;b", "/%61"] {
            assert_eq!(PathMatch::parse_exact(text), None, "{text}");
        }
    }
}
