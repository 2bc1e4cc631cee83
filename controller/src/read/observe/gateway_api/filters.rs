//! Pure: filters of rules and of their backends.

use common::wire::{HeaderChanges, PathModifier, RequestRedirect, UrlRewrite};
use http::{HeaderName, HeaderValue};
use serde_json::Value;

use super::{read_port, text};
use crate::model::object::json::{array_items, non_empty_text};

/// Filters that rules of HTTPRoutes may have.
pub(super) const HTTP_FILTERS: [&str; 4] =
    ["RequestHeaderModifier", "ResponseHeaderModifier", "RequestRedirect", "URLRewrite"];
/// Filters that rules of GRPCRoutes and all backends may have.
pub(super) const HEADER_FILTERS: [&str; 2] = ["RequestHeaderModifier", "ResponseHeaderModifier"];

/// Headers that describe one hop or the message itself, or that name the host: no rule changes them.
const FIXED_HEADERS: [&str; 14] = [
    "connection",
    "content-length",
    "expect",
    "forwarded",
    "host",
    "http2-settings",
    "keep-alive",
    "proxy-authenticate",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "x-real-ip",
];
/// Prefixes of headers of the platform, and of those that describe the client.
const FIXED_PREFIXES: [&str; 3] = ["k-", "knative-serving-", "x-forwarded-"];

/// Status codes that a redirect may have.
const REDIRECT_STATUSES: [u16; 5] = [301, 302, 303, 307, 308];
/// Status code of a redirect that states none.
const USUAL_REDIRECT: u16 = 302;

/// Filters of a rule or of a backend.
#[derive(Debug, Default)]
pub(super) struct RuleFilters {
    /// Changes of the headers of requests.
    pub(super) request_headers: HeaderChanges,
    /// Changes of the headers of responses.
    pub(super) response_headers: HeaderChanges,
    /// Redirect; `None`: a backend responds.
    pub(super) redirect: Option<RequestRedirect>,
    /// Change of the URL of requests; `None`: there is none.
    pub(super) rewrite: Option<UrlRewrite>,
}

impl RuleFilters {
    /// Returns true if the prefix by which a rule matches paths is replaced.
    pub(super) fn replaces_prefix(&self) -> bool {
        let redirect = self.redirect.as_ref().and_then(|it| it.path.as_ref());
        let rewrite = self.rewrite.as_ref().and_then(|it| it.path.as_ref());
        let mut modifiers = redirect.into_iter().chain(rewrite);
        modifiers.any(|it| matches!(it, PathModifier::Prefix(_)))
    }
}

/// Reads filters, which may have these types. The error names the first value that is not supported.
pub(super) fn read_filters(list: &Value, supported: &[&str]) -> Result<RuleFilters, String> {
    let mut read = RuleFilters::default();
    for filter in array_items(list) {
        let kind = text(&filter["type"]);
        match kind {
            // HTTPRoutes and GRPCRoutes have different types of filters.
            _ if !supported.contains(&kind) => {
                return Err(format!("filters of type {kind} are not supported"));
            }
            "RequestHeaderModifier" => {
                read.request_headers = read_header_changes(&filter["requestHeaderModifier"])?;
            }
            "ResponseHeaderModifier" => {
                read.response_headers = read_header_changes(&filter["responseHeaderModifier"])?;
            }
            "RequestRedirect" => read.redirect = Some(read_redirect(&filter["requestRedirect"])?),
            "URLRewrite" => read.rewrite = Some(read_rewrite(&filter["urlRewrite"])?),
            other => return Err(format!("filters of type {other} are not supported")),
        }
    }
    if read.redirect.is_some() && read.rewrite.is_some() {
        return Err("a rule cannot have RequestRedirect and URLRewrite".to_owned());
    }
    Ok(read)
}

/// Reads changes of headers. Refuses headers that rules cannot change.
fn read_header_changes(value: &Value) -> Result<HeaderChanges, String> {
    // Checked here, since the activator would have to leave out a change that it cannot make.
    let name = |it: &Value| {
        let name = text(it).to_ascii_lowercase();
        let is_fixed = FIXED_HEADERS.contains(&name.as_str())
            || FIXED_PREFIXES.iter().any(|it| name.starts_with(it));
        if is_fixed {
            return Err(format!("rules cannot change the header {name}"));
        }
        match HeaderName::try_from(name.as_str()) {
            Ok(_) => Ok(name),
            Err(_invalid) => Err(format!("{name:?} is no name of a header")),
        }
    };
    let pairs = |field: &str| {
        let all = array_items(&value[field]);
        let pair = |it: &Value| -> Result<(String, String), String> {
            let (name, value) = (name(&it["name"])?, text(&it["value"]));
            match HeaderValue::try_from(value) {
                Ok(_) => Ok((name, value.to_owned())),
                Err(_invalid) => Err(format!("the header {name} cannot have the value {value:?}")),
            }
        };
        all.map(pair).collect::<Result<Vec<_>, String>>()
    };
    let remove = array_items(&value["remove"]).map(name);
    Ok(HeaderChanges {
        set: pairs("set")?,
        add: pairs("add")?,
        remove: remove.collect::<Result<_, _>>()?,
    })
}

fn read_redirect(value: &Value) -> Result<RequestRedirect, String> {
    Ok(RequestRedirect {
        is_https: match value["scheme"].as_str() {
            None => None,
            Some("http") => Some(false),
            Some("https") => Some(true),
            Some(other) => return Err(format!("the scheme {other} is not supported")),
        },
        host: non_empty_text(&value["hostname"]).map(Into::into),
        port: read_port(&value["port"]),
        path: read_path_modifier(&value["path"])?,
        status: read_redirect_status(&value["statusCode"])?,
    })
}

fn read_redirect_status(value: &Value) -> Result<u16, String> {
    if value.is_null() {
        return Ok(USUAL_REDIRECT);
    }
    let status = value.as_u64().and_then(|it| u16::try_from(it).ok());
    let supported = status.filter(|it| REDIRECT_STATUSES.contains(it));
    supported.ok_or_else(|| format!("redirects with the status code {value} are not supported"))
}

fn read_rewrite(value: &Value) -> Result<UrlRewrite, String> {
    Ok(UrlRewrite {
        host: non_empty_text(&value["hostname"]).map(Into::into),
        path: read_path_modifier(&value["path"])?,
    })
}

/// Reads the replacement of a path; `None`: there is none.
fn read_path_modifier(value: &Value) -> Result<Option<PathModifier>, String> {
    if value.is_null() {
        return Ok(None);
    }
    let (replacement, parsed) = match text(&value["type"]) {
        "ReplaceFullPath" => {
            let replacement = text(&value["replaceFullPath"]);
            (replacement, PathModifier::parse_full_path(replacement))
        }
        "ReplacePrefixMatch" => {
            let replacement = text(&value["replacePrefixMatch"]);
            (replacement, PathModifier::parse_prefix(replacement))
        }
        other => return Err(format!("replacements of paths of type {other} are not supported")),
    };
    parsed.map(Some).ok_or_else(|| format!("{replacement:?} cannot replace a path"))
}
