//! Pure: rules of HTTPRoutes, and the parts that all rules have. The error of a route names the first value that Rouse
//! does not support.

use common::wire::{
    HeaderChanges, NamespacedName, PathMatch, PathModifier, PathPrefix, RuleTimeouts,
};
use serde_json::Value;

use super::{
    filters::{HEADER_FILTERS, HTTP_FILTERS, RuleFilters, read_filters},
    full_kind, read_port, text,
};
use crate::model::{
    cluster_state::{BackendSpec, RouteMatchSpec, RouteRuleSpec},
    go_values::parse_duration,
    object::json::array_items,
};

/// One millisecond in nanoseconds.
const NANOS_PER_MS: i64 = 1_000_000;

/// Most bytes of the texts of a route's rules, with a copy of the rule's texts for each match. The RouteTable has these
/// copies, once for each host of the route.
const MAX_RULE_BYTES: usize = 1 << 20;

/// Reads the rules of an HTTPRoute.
pub(super) fn read_http_rules(spec: &Value, namespace: &str) -> Result<Vec<RouteRuleSpec>, String> {
    collect_rules(array_items(&spec["rules"]).map(|rule| read_http_rule(rule, namespace)))
}

/// Collects rules, of which the first error counts. Fails if their texts are too long.
pub(super) fn collect_rules(
    rules: impl Iterator<Item = Result<RouteRuleSpec, String>>,
) -> Result<Vec<RouteRuleSpec>, String> {
    let rules = rules.collect::<Result<Vec<_>, _>>()?;
    let bytes: usize = rules.iter().map(copied_bytes).sum();
    if bytes > MAX_RULE_BYTES {
        return Err(format!(
            "the rules have {bytes} bytes with a copy for each match, and may have {MAX_RULE_BYTES}"
        ));
    }
    Ok(rules)
}

/// Returns the bytes of the texts of a rule with a copy of its changes and backends for each match.
fn copied_bytes(rule: &RouteRuleSpec) -> usize {
    let of_backend = |it: &BackendSpec| {
        let changes = changes_bytes(&it.request_headers) + changes_bytes(&it.response_headers);
        it.name.namespace.len() + it.name.name.len() + changes
    };
    let url_bytes = |host: &Option<String>, path: &Option<PathModifier>| {
        host.as_ref().map_or(0, String::len) + path.as_ref().map_or(0, |it| it.as_str().len())
    };
    let redirect = rule.redirect.as_ref().map_or(0, |it| url_bytes(&it.host, &it.path));
    let rewrite = rule.rewrite.as_ref().map_or(0, |it| url_bytes(&it.host, &it.path));
    let changes = changes_bytes(&rule.request_headers) + changes_bytes(&rule.response_headers);
    let backends: usize = rule.backends.iter().map(of_backend).sum();
    // Each match becomes a rule of its own in the RouteTable, with a copy of all this.
    let shared = redirect + rewrite + changes + backends;
    let matches = rule.matches.iter();
    matches.map(|it| shared + pairs_bytes(&it.headers) + pairs_bytes(&it.query)).sum()
}

fn changes_bytes(changes: &HeaderChanges) -> usize {
    let removed: usize = changes.remove.iter().map(String::len).sum();
    pairs_bytes(&changes.set) + pairs_bytes(&changes.add) + removed
}

fn pairs_bytes(pairs: &[(String, String)]) -> usize {
    pairs.iter().map(|(name, value)| name.len() + value.len()).sum()
}

fn read_http_rule(rule: &Value, namespace: &str) -> Result<RouteRuleSpec, String> {
    refuse_fields(rule, &["retry", "sessionPersistence"])?;
    let matches = array_items(&rule["matches"]).map(read_http_match);
    let mut matches = matches.collect::<Result<Vec<_>, _>>()?;
    if matches.is_empty() {
        matches.push(read_http_match(&Value::Null)?);
    }
    let filters = read_filters(&rule["filters"], &HTTP_FILTERS)?;
    let is_prefix = |it: &RouteMatchSpec| matches!(it.path, PathMatch::Prefix(_));
    if filters.replaces_prefix() && !matches.iter().all(is_prefix) {
        return Err("replacePrefixMatch needs matches of type PathPrefix".to_owned());
    }
    build_rule(rule, namespace, matches, filters)
}

/// Refuses a rule that has one of these fields.
pub(super) fn refuse_fields(rule: &Value, fields: &[&str]) -> Result<(), String> {
    match fields.iter().find(|field| !rule[**field].is_null()) {
        Some(field) => Err(format!("the field {field} of rules is not supported")),
        None => Ok(()),
    }
}

/// Makes a rule of its matches, its filters and the backends of the object.
pub(super) fn build_rule(
    rule: &Value,
    namespace: &str,
    matches: Vec<RouteMatchSpec>,
    filters: RuleFilters,
) -> Result<RouteRuleSpec, String> {
    let backends = array_items(&rule["backendRefs"]).map(|it| read_backend(it, namespace));
    Ok(RouteRuleSpec {
        matches,
        request_headers: filters.request_headers,
        response_headers: filters.response_headers,
        redirect: filters.redirect,
        rewrite: filters.rewrite,
        timeouts: read_timeouts(&rule["timeouts"])?,
        backends: backends.collect::<Result<_, _>>()?,
    })
}

/// Reads the timeouts of a rule. One of 0 is none.
fn read_timeouts(value: &Value) -> Result<RuleTimeouts, String> {
    let timeout = |field: &str| -> Result<_, String> {
        let Some(text) = value[field].as_str() else { return Ok(None) };
        let parsed = parse_duration(text).ok();
        // The RouteTable has whole milliseconds, and less than one would be none.
        let whole = parsed.filter(|it| it.0 >= 0 && it.0 % NANOS_PER_MS == 0);
        let whole = whole.ok_or_else(|| format!("{text:?} is no value of the timeout {field}"))?;
        Ok(Some(whole.to_duration()).filter(|it| !it.is_zero()))
    };
    Ok(RuleTimeouts { request: timeout("request")?, backend_request: timeout("backendRequest")? })
}

fn read_http_match(value: &Value) -> Result<RouteMatchSpec, String> {
    let path = value["path"]["value"].as_str().unwrap_or("/");
    let path = match value["path"]["type"].as_str().unwrap_or("PathPrefix") {
        "Exact" => parse_exact_path(path)?,
        "PathPrefix" => parse_path_prefix(path)?,
        other => return Err(format!("paths of type {other} are not supported")),
    };
    Ok(RouteMatchSpec {
        path,
        method: value["method"].as_str().map(str::to_owned),
        headers: read_headers(&value["headers"])?,
        query: read_exact_pairs(&value["queryParams"], "queryParams", str::to_owned)?,
    })
}

/// Parses a path that is to be the whole path of requests.
pub(super) fn parse_exact_path(path: &str) -> Result<PathMatch, String> {
    PathMatch::parse_exact(path).ok_or_else(|| unclear_path_error(path))
}

/// Parses a prefix of the paths of requests.
pub(super) fn parse_path_prefix(path: &str) -> Result<PathMatch, String> {
    PathPrefix::parse(path).map(PathMatch::Prefix).map_err(|_fault| unclear_path_error(path))
}

fn unclear_path_error(path: &str) -> String {
    format!("the path {path} is too long, or servers may read it differently")
}

/// Reads headers that a request must have, with their names in lower case.
pub(super) fn read_headers(list: &Value) -> Result<Vec<(String, String)>, String> {
    read_exact_pairs(list, "headers", str::to_ascii_lowercase)
}

/// Reads pairs that a request must have exactly. Of several entries with one name, the first one counts.
fn read_exact_pairs(
    list: &Value,
    field: &str,
    normalize: impl Fn(&str) -> String,
) -> Result<Vec<(String, String)>, String> {
    let mut pairs: Vec<(String, String)> = Vec::new();
    for entry in array_items(list) {
        if let Some(other) = entry["type"].as_str().filter(|it| *it != "Exact") {
            return Err(format!("{field} of type {other} are not supported"));
        }
        let name = normalize(text(&entry["name"]));
        if !pairs.iter().any(|(known, _)| *known == name) {
            pairs.push((name, text(&entry["value"]).to_owned()));
        }
    }
    Ok(pairs)
}

fn read_backend(reference: &Value, own_namespace: &str) -> Result<BackendSpec, String> {
    let filters = read_filters(&reference["filters"], &HEADER_FILTERS);
    let filters = filters.map_err(|error| format!("{error} in backendRefs"))?;
    let weight = reference["weight"].as_u64().unwrap_or(1);
    let namespace = reference["namespace"].as_str().unwrap_or(own_namespace);
    Ok(BackendSpec {
        // The API server accepts up to a million.
        weight: u32::try_from(weight).unwrap_or(u32::MAX),
        kind: full_kind(reference, "Service"),
        name: NamespacedName::new(namespace, text(&reference["name"])),
        port: read_port(&reference["port"]),
        request_headers: filters.request_headers,
        response_headers: filters.response_headers,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use common::wire::UrlRewrite;
    use serde_json::json;

    use super::*;

    fn read(rule: Value) -> Result<RouteRuleSpec, String> {
        let rules = read_http_rules(&json!({"rules": [rule]}), "b")?;
        Ok(rules.into_iter().next().expect("one rule"))
    }

    fn fault(rule: Value) -> String {
        read(rule).expect_err("not supported")
    }

    #[test]
    fn what_is_not_supported_is_named() {
        let path = |kind: &str, value: &str| json!({"matches": [{"path": {"type": kind, "value": value}}]});
        for (rule, expected) in [
            (path("RegularExpression", "/a"), "paths of type RegularExpression are not supported"),
            (
                path("Exact", "/a;b"),
                "the path /a;b is too long, or servers may read it differently",
            ),
            (
                json!({"matches": [{"headers": [{"type": "RegularExpression", "name": "a"}]}]}),
                "headers of type RegularExpression are not supported",
            ),
            (json!({"retry": {"attempts": 1}}), "the field retry of rules is not supported"),
            (json!({"timeouts": {"request": "1us"}}), "\"1us\" is no value of the timeout request"),
            (
                json!({"timeouts": {"backendRequest": "-1s"}}),
                "\"-1s\" is no value of the timeout backendRequest",
            ),
            (
                json!({"backendRefs": [{"name": "a", "filters": [{"type": "RequestRedirect"}]}]}),
                "filters of type RequestRedirect are not supported in backendRefs",
            ),
        ] {
            assert_eq!(fault(rule), expected);
        }
    }

    #[test]
    fn a_filter_that_is_not_supported_is_named() {
        let of_kind = |kind: &str, field: &str, value: Value| json!({"type": kind, field: value});
        let request = |value| of_kind("RequestHeaderModifier", "requestHeaderModifier", value);
        let response = |value| of_kind("ResponseHeaderModifier", "responseHeaderModifier", value);
        let redirect = |value| of_kind("RequestRedirect", "requestRedirect", value);
        for (filter, expected) in [
            (json!({"type": "RequestMirror"}), "filters of type RequestMirror are not supported"),
            (
                request(json!({"remove": ["X-Forwarded-For"]})),
                "rules cannot change the header x-forwarded-for",
            ),
            (
                response(json!({"add": [{"name": "a", "value": "1\nb: 2"}]})),
                "the header a cannot have the value \"1\\nb: 2\"",
            ),
            (request(json!({"remove": ["a b"]})), "\"a b\" is no name of a header"),
            (
                redirect(json!({"statusCode": 304})),
                "redirects with the status code 304 are not supported",
            ),
            (redirect(json!({"scheme": "ftp"})), "the scheme ftp is not supported"),
            (rewrite("ReplaceFullPath", "/a?b"), "\"/a?b\" cannot replace a path"),
            (rewrite("ReplacePrefixMatch", "a"), "\"a\" cannot replace a path"),
            (rewrite("Regex", "a"), "replacements of paths of type Regex are not supported"),
        ] {
            assert_eq!(fault(json!({"filters": [filter]})), expected);
        }
    }

    /// Returns a filter that replaces paths in this way.
    fn rewrite(kind: &str, value: &str) -> Value {
        let path = json!({"type": kind, "replaceFullPath": value, "replacePrefixMatch": value});
        json!({"type": "URLRewrite", "urlRewrite": {"path": path}})
    }

    #[test]
    fn filters_must_fit_each_other_and_the_matches() {
        let redirect = json!({"type": "RequestRedirect", "requestRedirect": {}});
        let both = json!({"filters": [rewrite("ReplaceFullPath", "/a"), redirect]});
        assert_eq!(fault(both), "a rule cannot have RequestRedirect and URLRewrite");
        let with_exact_path = |kind: &str| {
            let path = json!({"type": "Exact", "value": "/a"});
            json!({"matches": [{"path": path}], "filters": [rewrite(kind, "/b")]})
        };
        let expected = "replacePrefixMatch needs matches of type PathPrefix";
        assert_eq!(fault(with_exact_path("ReplacePrefixMatch")), expected);
        assert!(read(with_exact_path("ReplaceFullPath")).is_ok());
    }

    /// An object of 64 KiB would else be many MiB in the table of each activator.
    #[test]
    fn rules_are_bounded_with_their_copies() {
        let header = |at: usize| json!({"name": format!("h{at}"), "value": "v".repeat(4000)});
        let headers: Vec<Value> = (0..16).map(header).collect();
        let rule = |matches: usize| {
            let path = |at: usize| json!({"path": {"type": "Exact", "value": format!("/{at}")}});
            json!({
                "matches": (0..matches).map(path).collect::<Vec<Value>>(),
                "filters": [{
                    "type": "ResponseHeaderModifier", "responseHeaderModifier": {"set": headers},
                }],
            })
        };
        assert!(fault(rule(64)).starts_with("the rules have 4"), "{}", fault(rule(64)));
        let spec = json!({"rules": [rule(16)]});
        assert!(read_http_rules(&spec, "b").is_ok());
    }

    #[test]
    fn paths_are_replaced_as_a_whole_or_by_their_prefix() {
        let filter = |kind: &str, field: &str, path: Value| {
            let value = json!({"hostname": "b.test", "path": path});
            json!({"filters": [{"type": kind, field: value}]})
        };
        let full = json!({"type": "ReplaceFullPath", "replaceFullPath": "/a/"});
        let rule = read(filter("URLRewrite", "urlRewrite", full)).expect("it is supported");
        let path = PathModifier::parse_full_path("/a/");
        assert_eq!(rule.rewrite, Some(UrlRewrite { host: Some("b.test".into()), path }));
        let prefix = json!({"type": "ReplacePrefixMatch", "replacePrefixMatch": "/a/"});
        let rule = read(filter("RequestRedirect", "requestRedirect", prefix));
        let redirect = rule.expect("it is supported").redirect.expect("a redirect");
        assert_eq!((redirect.path, redirect.status), (PathModifier::parse_prefix("/a"), 302));
    }

    #[test]
    fn of_several_headers_or_parameters_of_one_name_the_first_one_counts() {
        let pair = |name: &str, value: &str| json!({"name": name, "value": value});
        let matched = json!({
            "headers": [pair("A", "1"), pair("a", "2")],
            "queryParams": [pair("b", "1"), pair("b", "2"), pair("B", "3")],
        });
        let rule = read(json!({"matches": [matched]})).expect("it is supported");
        let own = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(rule.matches[0].headers, [own("a", "1")]);
        assert_eq!(rule.matches[0].query, [own("b", "1"), own("B", "3")]);
    }

    #[test]
    fn a_timeout_of_zero_is_none() {
        for (request, backend_request, expected) in [
            ("10s", "500ms", (Some(10_000), Some(500))),
            ("1h2m3s4ms", "0s", (Some(3_723_004), None)),
            ("0ms", "1ms", (None, Some(1))),
        ] {
            let timeouts = json!({"request": request, "backendRequest": backend_request});
            let read = read(json!({"timeouts": timeouts})).expect("it is supported").timeouts;
            let ms = |it: Option<Duration>| it.map(|it| it.as_millis());
            assert_eq!((ms(read.request), ms(read.backend_request)), expected, "{timeouts}");
        }
        let none = read(json!({})).expect("it is supported").timeouts;
        assert_eq!(none, RuleTimeouts::default());
    }

    #[test]
    fn a_backend_has_header_changes_of_its_own() {
        let changes = json!({"set": [{"name": "Backend", "value": "a"}]});
        let filter = json!({"type": "RequestHeaderModifier", "requestHeaderModifier": changes});
        let backends = json!([{"name": "a", "filters": [filter]}, {"name": "b"}]);
        let rule = read(json!({"backendRefs": backends})).expect("it is supported");
        let set: Vec<_> = rule.backends.iter().map(|it| it.request_headers.set.len()).collect();
        assert_eq!((set, rule.request_headers.is_empty()), (vec![1, 0], true));
    }
}
