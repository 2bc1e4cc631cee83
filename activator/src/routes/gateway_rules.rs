//! Pure: rules of the Gateway API for the requests of one host, and the rule that a request gets.

use std::{collections::BTreeMap, sync::Arc};

use common::{
    url_query::query_pairs,
    wire::{GatewayHostKey, HttpRule, NamespacedName, PathMatch, PathPrefix, RequestRedirect},
};
use http::{HeaderMap, HeaderValue, Method, request};
use smol_str::SmolStr;

use crate::{
    edge::header_edits::HeaderEdits,
    routes::{
        path_match::{HostPathError, UnclearPath, is_exact_path, longest_prefix},
        service::RoutedService,
    },
};

/// Rules of one host, in the order of their precedence.
#[derive(Debug)]
pub(crate) struct GatewayHostRules {
    key: GatewayHostKey,
    /// Secret whose certificate the host has for TLS; `None`: the certificate is chosen by its names.
    certificate: Option<NamespacedName>,
    /// Prefixes of all rules, each under its own text. None if each rule has all paths, so that no path is unclear.
    prefixes: BTreeMap<SmolStr, SmolStr>,
    rules: Box<[Arc<GatewayRule>]>,
}

/// One rule of a host, with its backends in the index.
#[derive(Debug)]
pub(crate) struct GatewayRule {
    /// Host of the rule, which may be a wildcard.
    pub(crate) host: SmolStr,
    /// Namespace and name of the route.
    pub(crate) route: NamespacedName,
    /// Changes of the headers of requests.
    pub(crate) request_headers: HeaderEdits,
    /// Changes of the headers of responses.
    pub(crate) response_headers: HeaderEdits,
    /// Redirect that the activator responds with; `None`: a backend responds.
    pub(crate) redirect: Option<RequestRedirect>,
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
    /// Makes the rules of a host.
    pub(crate) fn new(
        key: GatewayHostKey,
        certificate: Option<NamespacedName>,
        rules: Vec<GatewayRule>,
    ) -> Self {
        let all_paths = PathMatch::Prefix(PathPrefix::ALL);
        let has_paths = rules.iter().any(|it| it.path != all_paths);
        let prefixes = rules.iter().filter(|_| has_paths).map(|it| SmolStr::from(it.path.prefix()));
        let prefixes = prefixes.map(|it| (it.clone(), it)).collect();
        Self { key, certificate, prefixes, rules: rules.into_iter().map(Arc::new).collect() }
    }

    /// Transport and host of the rules.
    pub(crate) fn key(&self) -> &GatewayHostKey {
        &self.key
    }

    /// Secret whose certificate the host has for TLS.
    pub(crate) fn certificate(&self) -> Option<&NamespacedName> {
        self.certificate.as_ref()
    }

    /// Finds the rule of a request.
    pub(crate) fn find(&self, head: &request::Parts) -> Result<&Arc<GatewayRule>, HostPathError> {
        let longest = if self.prefixes.is_empty() {
            Some("")
        } else {
            let longest = longest_prefix(&self.prefixes, head.uri.path());
            longest.map_err(|UnclearPath| HostPathError::UnclearPath)?.map(SmolStr::as_str)
        };
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
            redirect: rule.redirect,
            path: rule.path,
            method: rule.method,
            headers: rule.headers,
            query: rule.query,
            backends: backends.into(),
        }
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

    /// Chooses a backend by the weights; `None`: there is none. `random` is uniform over u64.
    pub(crate) fn pick_backend(&self, random: u64) -> Option<&RoutedTarget> {
        let total: u64 = self.backends.iter().map(|it| u64::from(it.weight)).sum();
        let mut remainder = random.checked_rem(total)?;
        for backend in &self.backends {
            match remainder.checked_sub(u64::from(backend.weight)) {
                Some(rest) => remainder = rest,
                None => return Some(&backend.target),
            }
        }
        None
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
