//! Pure: rules of the Gateway API for the requests of one host, and the rule that a request gets.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
};

use common::{
    url_query::query_pairs,
    wire::{
        GatewayHostKey, HttpRule, NamespacedName, PathMatch, PathModifier, PathPrefix,
        RequestRedirect, RuleTimeouts, UrlRewrite, wildcard_suffix,
    },
};
use http::{HeaderMap, HeaderValue, Method, request};
use smol_str::SmolStr;

use crate::{
    edge::header_edits::HeaderEdits,
    request_error::ProxyRequestError,
    routes::{
        path_match::{HostPathError, UnclearPath, is_exact_path, longest_prefix},
        path_replacement::replace_path,
        service::RoutedService,
    },
};

/// Rules of one host, in the order of their precedence.
#[derive(Debug)]
pub(crate) struct GatewayHostRules {
    key: GatewayHostKey,
    /// Secrets whose certificates the host has for TLS. Without any, the certificate is chosen by names.
    certificates: Vec<NamespacedName>,
    /// Prefixes of all rules, each under its own text. Empty if each rule has all paths and keeps them, so that no path
    /// is unclear.
    prefixes: BTreeMap<SmolStr, SmolStr>,
    rules: Box<[Arc<GatewayRule>]>,
    /// Hosts of DomainMappings. A wildcard is kept as what its hosts end with, as `.example.com`.
    reserved_hosts: HashSet<Box<str>>,
}

/// One rule of a host, with its backends in the index.
#[derive(Debug)]
pub(crate) struct GatewayRule {
    /// Host of the rule, which may be a wildcard.
    pub(crate) host: SmolStr,
    /// Namespace and name of the route.
    pub(crate) route: NamespacedName,
    /// True if the route is a GRPCRoute.
    pub(crate) is_grpc: bool,
    /// Changes of the headers of requests.
    pub(crate) request_headers: HeaderEdits,
    /// Changes of the headers of responses.
    pub(crate) response_headers: HeaderEdits,
    /// Redirect that the activator responds with; `None`: a backend responds.
    pub(crate) redirect: Option<RequestRedirect>,
    /// Change of the URL of requests; `None`: backends receive it as it is.
    pub(crate) rewrite: Option<UrlRewrite>,
    /// Timeouts that the rule states for its requests.
    pub(crate) timeouts: RuleTimeouts,
    path: PathMatch,
    method: Option<String>,
    headers: Vec<(String, String)>,
    query: Vec<(String, String)>,
    backends: Box<[RoutedBackend]>,
}

/// Backend of a rule with its share.
#[derive(Debug)]
pub(crate) struct RoutedBackend {
    pub(crate) weight: u32,
    pub(crate) target: RoutedTarget,
    /// Changes of the headers of its requests, after those of the rule.
    pub(crate) request_headers: HeaderEdits,
    /// Changes of the headers of its responses, before those of the rule.
    pub(crate) response_headers: HeaderEdits,
}

/// Backend that was picked for one request, with the rule that has it.
#[derive(Debug)]
pub(crate) struct PickedBackend {
    pub(crate) rule: Arc<GatewayRule>,
    /// Position of the backend in the rule.
    position: usize,
}

/// Backend of a rule, as the index has it.
#[derive(Debug)]
pub(crate) enum RoutedTarget {
    /// Service of the RouteTable, which may come and go while the rule stays.
    Service(NamespacedName),
    /// Service of the cluster.
    Plain(Arc<RoutedService>),
    /// Reference that leads to no backend.
    Unresolved,
}

impl GatewayHostRules {
    /// Makes the rules of a host. DomainMappings have the hosts and wildcards `reserved_hosts`.
    pub(crate) fn new(
        key: GatewayHostKey,
        certificates: Vec<NamespacedName>,
        reserved_hosts: &[String],
        rules: Vec<GatewayRule>,
    ) -> Self {
        let all_paths = PathMatch::Prefix(PathPrefix::ALL);
        // A replaced `/` is a prefix too: by a `..` behind it, a server would leave the prefix that replaces it.
        let has_paths = rules.iter().any(|it| it.path != all_paths || it.replaces_prefix());
        let prefixes = rules.iter().filter(|_| has_paths).map(|it| SmolStr::from(it.path.prefix()));
        let prefixes = prefixes.map(|it| (it.clone(), it)).collect();
        let reserved_hosts = reserved_hosts.iter().map(|it| wildcard_suffix(it).unwrap_or(it));
        Self {
            key,
            certificates,
            prefixes,
            rules: rules.into_iter().map(Arc::new).collect(),
            reserved_hosts: reserved_hosts.map(Into::into).collect(),
        }
    }

    /// Transport and host of the rules.
    pub(crate) fn key(&self) -> &GatewayHostKey {
        &self.key
    }

    /// Secrets whose certificates the host has for TLS, in the order of their choice.
    pub(crate) fn certificates(&self) -> &[NamespacedName] {
        &self.certificates
    }

    /// Returns true if a DomainMapping has a host that the rules are for otherwise, in force or not.
    pub(crate) fn reserves(&self, host: &str) -> bool {
        let of_wildcard = || {
            let at = host.find('.')?;
            self.reserved_hosts.get(&host[at..])
        };
        // Without DomainMappings, requests need no look-up.
        !self.reserved_hosts.is_empty()
            && (self.reserved_hosts.contains(host) || of_wildcard().is_some())
    }

    /// Finds the rule of a request.
    pub(crate) fn find(&self, head: &request::Parts) -> Result<&Arc<GatewayRule>, HostPathError> {
        let longest = if self.prefixes.is_empty() {
            Some("")
        } else {
            let longest = longest_prefix(&self.prefixes, head.uri.path());
            longest.map_err(|UnclearPath| HostPathError::UnclearPath)?.map(SmolStr::as_str)
        };
        // The rules are in the order of their precedence, so that the first one that fits wins.
        let mut rules = self.rules.iter();
        rules.find(|it| it.fits(head, longest)).ok_or(HostPathError::NoRule)
    }
}

impl GatewayRule {
    /// Makes a rule with these backends in place of its own.
    pub(crate) fn new(host: SmolStr, rule: HttpRule, backends: Vec<RoutedBackend>) -> Self {
        Self {
            host,
            request_headers: HeaderEdits::new(&rule.request_headers),
            response_headers: HeaderEdits::new(&rule.response_headers),
            route: rule.route,
            is_grpc: rule.is_grpc,
            redirect: rule.redirect,
            rewrite: rule.rewrite,
            timeouts: rule.timeouts,
            path: rule.path,
            method: rule.method,
            headers: rule.headers,
            query: rule.query,
            backends: backends.into(),
        }
    }

    /// Kind of the route.
    pub(crate) fn route_kind(&self) -> &'static str {
        if self.is_grpc { "GRPCRoute" } else { "HTTPRoute" }
    }

    /// Failure of a request that has no backend.
    pub(crate) fn no_backend_error(&self) -> ProxyRequestError {
        let route = self.route.to_string();
        match self.is_grpc {
            true => ProxyRequestError::NoGrpcBackend(route),
            false => ProxyRequestError::NoBackend(route),
        }
    }

    /// Returns true if the prefix of its paths is replaced.
    fn replaces_prefix(&self) -> bool {
        let redirect = self.redirect.as_ref().and_then(|it| it.path.as_ref());
        let rewrite = self.rewrite.as_ref().and_then(|it| it.path.as_ref());
        redirect.into_iter().chain(rewrite).any(|it| matches!(it, PathModifier::Prefix(_)))
    }

    /// Returns path and query of a request, which begin with `/`, as backends receive them. `None`: unchanged.
    pub(crate) fn rewritten_target(&self, target: &[u8]) -> Option<Result<Vec<u8>, UnclearPath>> {
        let modifier = self.rewrite.as_ref()?.path.as_ref()?;
        Some(self.replace_path(target, modifier))
    }

    /// Returns path and query of a request, which begin with `/`, with another path.
    pub(crate) fn replace_path(
        &self,
        target: &[u8],
        modifier: &PathModifier,
    ) -> Result<Vec<u8>, UnclearPath> {
        let depth = match &self.path {
            PathMatch::Exact(_) => 0,
            PathMatch::Prefix(prefix) => prefix.depth(),
        };
        replace_path(target, modifier, depth)
    }

    /// Returns true if a request fits. `longest` is the longest prefix of the host's rules that its path has.
    fn fits(&self, head: &request::Parts, longest: Option<&str>) -> bool {
        fits_path(&self.path, head.uri.path(), longest)
            && self.method.as_deref().is_none_or(|method| method == method_of(head))
            && self.headers.iter().all(|(name, value)| has_header(&head.headers, name, value))
            && self.fits_query(head.uri.query().unwrap_or_default())
    }

    /// Returns true if the query has all parameters. Of several with one name, the first one counts.
    fn fits_query(&self, query: &str) -> bool {
        self.query.iter().all(|(name, value)| {
            let mut pairs = query_pairs(query);
            pairs.find(|(it, _)| it == name).is_some_and(|(_, it)| it == *value)
        })
    }

    /// Chooses a backend by the weights, and returns its position; `None`: there is none. `random` is uniform over u64.
    fn pick_position(&self, random: u64) -> Option<usize> {
        // Without backends, or if all weights are 0, the remainder by zero is `None`.
        let total: u64 = self.backends.iter().map(|it| u64::from(it.weight)).sum();
        let mut remainder = random.checked_rem(total)?;
        self.backends.iter().position(|backend| {
            match remainder.checked_sub(u64::from(backend.weight)) {
                Some(rest) => {
                    remainder = rest;
                    false
                }
                None => true,
            }
        })
    }
}

impl PickedBackend {
    /// Chooses a backend of a rule by the weights; `None`: there is none. `random` is uniform over u64.
    pub(crate) fn pick(rule: &Arc<GatewayRule>, random: u64) -> Option<Self> {
        let position = rule.pick_position(random)?;
        Some(Self { rule: Arc::clone(rule), position })
    }

    fn backend(&self) -> Option<&RoutedBackend> {
        self.rule.backends.get(self.position)
    }

    /// Backend, as the index has it.
    pub(crate) fn target(&self) -> &RoutedTarget {
        self.backend().map_or(&RoutedTarget::Unresolved, |it| &it.target)
    }

    /// Changes the headers of a request to the backend.
    pub(crate) fn change_request(&self, headers: &mut HeaderMap) {
        self.rule.request_headers.apply(headers);
        self.backend().into_iter().for_each(|it| it.request_headers.apply(headers));
    }

    /// Changes the headers of a response of the backend.
    pub(crate) fn change_response(&self, headers: &mut HeaderMap) {
        self.backend().into_iter().for_each(|it| it.response_headers.apply(headers));
        self.rule.response_headers.apply(headers);
    }
}

/// Returns true if a path fits. A shorter prefix fits as well, since the longest one begins with it.
fn fits_path(rule: &PathMatch, path: &str, longest: Option<&str>) -> bool {
    let Some(longest) = longest else { return false };
    match rule {
        PathMatch::Exact(exact) => longest == rule.prefix() && is_exact_path(path, exact),
        PathMatch::Prefix(prefix) => {
            let prefix = prefix.as_str();
            let rest = longest.strip_prefix(prefix);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        }
    }
}

/// Method by which a request is matched: a WebSocket over HTTP/2 is a GET, as over HTTP/1.1.
fn method_of(head: &request::Parts) -> &str {
    if head.method == Method::CONNECT { Method::GET.as_str() } else { head.method.as_str() }
}

/// Returns true if the header has this value. Several fields of one name are one list (RFC 9110 §5.3).
fn has_header(headers: &HeaderMap, name: &str, value: &str) -> bool {
    let all: Vec<&[u8]> = headers.get_all(name).iter().map(HeaderValue::as_bytes).collect();
    !all.is_empty() && all.join(&b","[..]) == value.as_bytes()
}

#[cfg(test)]
mod tests;
