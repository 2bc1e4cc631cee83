//! Pure: conversion of the rules of the Gateway API.

use std::num::NonZeroU32;

use super::{certificates::parse_secret_name, *};

impl TryFrom<raw::GatewayHost> for GatewayHostEntry {
    type Error = WireError;
    fn try_from(message: raw::GatewayHost) -> WireResult<Self> {
        let rules = message.rules.into_iter().map(HttpRule::try_from);
        // Empty stands for "chosen as that of other hosts".
        let first = Some(message.certificate).filter(|name| !name.is_empty());
        let certificates = first.iter().chain(&message.more_certificates);
        let certificates =
            certificates.map(|name| parse_secret_name("gateway_host.certificate", name));
        Ok(Self {
            key: message.key.parse()?,
            rules: rules.collect::<WireResult<_>>()?,
            certificates: certificates.collect::<WireResult<_>>()?,
            reserved_hosts: message.reserved_hosts,
        })
    }
}

impl From<GatewayHostEntry> for raw::GatewayHost {
    fn from(value: GatewayHostEntry) -> Self {
        let rules = value.rules.into_iter().map(Into::into).collect();
        let mut names = value.certificates.iter().map(ToString::to_string);
        let certificate = names.next().unwrap_or_default();
        let more_certificates = names.collect();
        let (key, reserved_hosts) = (value.key.to_string(), value.reserved_hosts);
        Self { key, rules, certificate, more_certificates, reserved_hosts }
    }
}

impl TryFrom<raw::HttpRule> for HttpRule {
    type Error = WireError;
    fn try_from(message: raw::HttpRule) -> WireResult<Self> {
        let redirect = parse_redirect(message.redirect, message.path_redirect)?;
        let (rewrite, backends) = parse_rewrite(message.rewrite, message.backends)?;
        let backends = backends.into_iter().map(WeightedBackend::try_from);
        Ok(Self {
            route: parse_route_name(&message.route)?,
            is_grpc: message.is_grpc,
            path: parse_path_match(&message.exact_path, &message.path_prefix)?,
            // Empty stands for all methods.
            method: Some(message.method).filter(|it| !it.is_empty()),
            headers: pairs_from_raw(message.headers),
            query: pairs_from_raw(message.query),
            request_headers: message.request_headers.map(Into::into).unwrap_or_default(),
            response_headers: message.response_headers.map(Into::into).unwrap_or_default(),
            redirect,
            rewrite,
            timeouts: RuleTimeouts {
                request: parse_optional_ms(message.request_timeout_ms),
                backend_request: parse_optional_ms(message.backend_timeout_ms),
            },
            backends: backends.collect::<WireResult<_>>()?,
        })
    }
}

impl From<HttpRule> for raw::HttpRule {
    fn from(value: HttpRule) -> Self {
        let (exact_path, path_prefix) = match value.path {
            PathMatch::Exact(path) => (path.to_string(), String::new()),
            PathMatch::Prefix(prefix) => (String::new(), prefix.as_str().to_owned()),
        };
        let has_path = value.redirect.as_ref().is_some_and(|it| it.path.is_some());
        let redirect: Option<raw::Redirect> = value.redirect.map(Into::into);
        let (redirect, path_redirect) = if has_path { (None, redirect) } else { (redirect, None) };
        let has_changes = |it: &WeightedBackend| {
            !it.request_headers.is_empty() || !it.response_headers.is_empty()
        };
        // An earlier release does not find a redirect to a path, and would choose one of the backends instead. It would
        // also leave out the changes of a backend's headers.
        let hides_backends = has_path || value.backends.iter().any(has_changes);
        let backends = value.backends.into_iter().map(Into::into).collect();
        let (rewrite, backends) = rewrite_to_raw(value.rewrite, backends, hides_backends);
        Self {
            route: value.route.to_string(),
            exact_path,
            path_prefix,
            method: value.method.unwrap_or_default(),
            headers: pairs_to_raw(value.headers),
            query: pairs_to_raw(value.query),
            request_headers: changes_to_raw(value.request_headers),
            response_headers: changes_to_raw(value.response_headers),
            redirect,
            backends,
            rewrite,
            path_redirect,
            is_grpc: value.is_grpc,
            request_timeout_ms: value.timeouts.request.map_or(0, to_ms),
            backend_timeout_ms: value.timeouts.backend_request.map_or(0, to_ms),
        }
    }
}

/// Parses the redirect of a rule. One with a path is in `path_redirect`, which earlier releases do not know.
fn parse_redirect(
    redirect: Option<raw::Redirect>,
    path_redirect: Option<raw::Redirect>,
) -> WireResult<Option<RequestRedirect>> {
    if redirect.is_some() && path_redirect.is_some() {
        return Err(WireError::new("rule.path_redirect", "", "must be the only redirect"));
    }
    redirect.or(path_redirect).map(RequestRedirect::try_from).transpose()
}

/// Returns the rewrite of a rule for the wire, and the backends beside it. If there is a rewrite, it has the backends.
/// With `hides_backends` there always is one, so that earlier releases, which do not know rewrites, find no backends.
fn rewrite_to_raw(
    rewrite: Option<UrlRewrite>,
    backends: Vec<raw::Backend>,
    hides_backends: bool,
) -> (Option<raw::Rewrite>, Vec<raw::Backend>) {
    if rewrite.is_none() && (backends.is_empty() || !hides_backends) {
        return (None, backends);
    }
    let (host, path) = rewrite.map_or((None, None), |it| (it.host, it.path));
    let (host, path) = (host.unwrap_or_default(), path.map(Into::into));
    (Some(raw::Rewrite { host, path, backends }), Vec::new())
}

/// Parses the rewrite of a rule, and returns the backends of the rule, which are in the rewrite if there is one. A
/// rewrite without host and path changes nothing, and only has the backends.
fn parse_rewrite(
    rewrite: Option<raw::Rewrite>,
    backends: Vec<raw::Backend>,
) -> WireResult<(Option<UrlRewrite>, Vec<raw::Backend>)> {
    let Some(rewrite) = rewrite else { return Ok((None, backends)) };
    // Earlier releases know no rewrite. They find no backend at the rule, and refuse its requests instead of sending
    // them on unchanged.
    if !backends.is_empty() {
        let rule = "must be in the rewrite";
        return Err(WireError::new("rule.backends", backends.len(), rule));
    }
    let parsed = UrlRewrite {
        host: Some(rewrite.host).filter(|it| !it.is_empty()),
        path: rewrite.path.map(PathModifier::try_from).transpose()?,
    };
    let is_change = parsed.host.is_some() || parsed.path.is_some();
    Ok((is_change.then_some(parsed), rewrite.backends))
}

/// Parses the name of a route. As with Secrets, the API server lets a label of it be longer than those of DNS.
fn parse_route_name(text: &str) -> WireResult<NamespacedName> {
    parse_secret_name("rule.route", text)
}

/// Parses the paths of a rule. Both texts are empty for all paths.
fn parse_path_match(exact: &str, prefix: &str) -> WireResult<PathMatch> {
    match (exact, prefix) {
        ("", "") => Ok(PathMatch::Prefix(PathPrefix::ALL)),
        ("", prefix) => {
            let parsed = PathPrefix::parse(prefix).map(PathMatch::Prefix);
            parsed.map_err(|_fault| {
                WireError::new("rule.path_prefix", prefix, "must be a path prefix")
            })
        }
        (exact, "") => PathMatch::parse_exact(exact)
            .ok_or_else(|| WireError::new("rule.exact_path", exact, "must be a clear path")),
        (exact, _) => {
            Err(WireError::new("rule.exact_path", exact, "must be empty beside a path prefix"))
        }
    }
}

fn pairs_from_raw(all: Vec<raw::Header>) -> Vec<(String, String)> {
    all.into_iter().map(|it| (it.name, it.value)).collect()
}

fn pairs_to_raw(all: Vec<(String, String)>) -> Vec<raw::Header> {
    all.into_iter().map(|(name, value)| raw::Header { name, value }).collect()
}

/// Returns changes of headers for the wire; `None`: there are none.
fn changes_to_raw(changes: HeaderChanges) -> Option<raw::HeaderChanges> {
    (!changes.is_empty()).then(|| changes.into())
}

impl From<raw::HeaderChanges> for HeaderChanges {
    fn from(message: raw::HeaderChanges) -> Self {
        let (set, add) = (pairs_from_raw(message.set), pairs_from_raw(message.add));
        Self { set, add, remove: message.remove }
    }
}

impl From<HeaderChanges> for raw::HeaderChanges {
    fn from(value: HeaderChanges) -> Self {
        let (set, add) = (pairs_to_raw(value.set), pairs_to_raw(value.add));
        Self { set, add, remove: value.remove }
    }
}

impl TryFrom<raw::Redirect> for RequestRedirect {
    type Error = WireError;
    fn try_from(message: raw::Redirect) -> WireResult<Self> {
        let is_https = match message.scheme.as_str() {
            "" => None,
            "http" => Some(false),
            "https" => Some(true),
            other => return Err(WireError::new("redirect.scheme", other, "must be http or https")),
        };
        let status = u16::try_from(message.status).ok().filter(|it| (300..400).contains(it));
        let rule = "must be a status of redirects";
        Ok(Self {
            is_https,
            host: Some(message.host).filter(|it| !it.is_empty()),
            port: match message.port {
                0 => None,
                port => Some(parse_port("redirect.port", port)?),
            },
            path: message.path.map(PathModifier::try_from).transpose()?,
            status: status
                .ok_or_else(|| WireError::new("redirect.status", message.status, rule))?,
        })
    }
}

impl From<RequestRedirect> for raw::Redirect {
    fn from(value: RequestRedirect) -> Self {
        let scheme = match value.is_https {
            None => "",
            Some(false) => "http",
            Some(true) => "https",
        };
        Self {
            scheme: scheme.to_owned(),
            host: value.host.unwrap_or_default(),
            port: value.port.map_or(0, |it| it.get().into()),
            status: value.status.into(),
            path: value.path.map(Into::into),
        }
    }
}

impl TryFrom<raw::PathModifier> for PathModifier {
    type Error = WireError;
    fn try_from(message: raw::PathModifier) -> WireResult<Self> {
        use raw::path_modifier::Replacement;
        let (text, parsed) = match require("path_modifier.replacement", message.replacement)? {
            Replacement::FullPath(text) => {
                let parsed = Self::parse_full_path(&text);
                (text, parsed)
            }
            Replacement::Prefix(text) => {
                let parsed = Self::parse_prefix(&text);
                (text, parsed)
            }
        };
        let rule = "must be the path of a URL";
        parsed.ok_or_else(|| WireError::new("path_modifier.replacement", text, rule))
    }
}

impl From<PathModifier> for raw::PathModifier {
    fn from(value: PathModifier) -> Self {
        use raw::path_modifier::Replacement;
        let replacement = match value {
            PathModifier::FullPath(text) => Replacement::FullPath(text.into()),
            PathModifier::Prefix(text) => Replacement::Prefix(text.into()),
        };
        Self { replacement: Some(replacement) }
    }
}

impl TryFrom<raw::Backend> for WeightedBackend {
    type Error = WireError;
    fn try_from(message: raw::Backend) -> WireResult<Self> {
        use raw::backend::Target;
        let weight = NonZeroU32::new(message.weight);
        let weight =
            weight.ok_or_else(|| WireError::new("backend.weight", 0, "must be above 0"))?;
        let request_headers = message.request_headers.map(Into::into).unwrap_or_default();
        let response_headers = message.response_headers.map(Into::into).unwrap_or_default();
        let target = match require("backend.target", message.target)? {
            Target::Service(name) => RouteBackend::Service(name.parse()?),
            Target::Plain(plain) => RouteBackend::Plain(plain.try_into()?),
            Target::Unresolved(_) => RouteBackend::Unresolved,
        };
        Ok(Self { weight, target, request_headers, response_headers })
    }
}

impl From<WeightedBackend> for raw::Backend {
    fn from(value: WeightedBackend) -> Self {
        use raw::backend::Target;
        let target = match value.target {
            RouteBackend::Service(name) => Target::Service(name.to_string()),
            RouteBackend::Plain(plain) => Target::Plain(plain.into()),
            RouteBackend::Unresolved => Target::Unresolved(raw::Empty {}),
        };
        Self {
            weight: value.weight.get(),
            target: Some(target),
            request_headers: changes_to_raw(value.request_headers),
            response_headers: changes_to_raw(value.response_headers),
        }
    }
}

impl TryFrom<raw::PlainBackend> for PlainBackend {
    type Error = WireError;
    fn try_from(message: raw::PlainBackend) -> WireResult<Self> {
        let name: NamespacedName = message.name.parse()?;
        if name.split_port().is_none() {
            return Err(WireError::new("plain.name", name, "must have a port"));
        }
        let address = parse_socket_address("plain.address", &message.address, message.port)?;
        Ok(Self {
            name,
            address: require("plain.address", address)?,
            protocol: parse_protocol("plain.protocol", message.protocol)?,
        })
    }
}

impl From<PlainBackend> for raw::PlainBackend {
    fn from(value: PlainBackend) -> Self {
        Self {
            name: value.name.to_string(),
            address: address_octets(value.address.ip()),
            port: value.address.port().into(),
            protocol: raw_protocol(value.protocol),
        }
    }
}
