//! Pure: rules of GRPCRoutes, read as rules for the paths of calls, which are `/SERVICE/METHOD`.

use common::wire::{PathMatch, PathPrefix};
use serde_json::Value;

use super::{
    filters::{HEADER_FILTERS, read_filters},
    rules::{
        build_rule, collect_rules, parse_exact_path, parse_path_prefix, read_headers, refuse_fields,
    },
    text,
};
use crate::model::{
    cluster_state::{RouteMatchSpec, RouteRuleSpec},
    object::json::array_items,
};

/// Reads the rules of a GRPCRoute.
pub(super) fn read_grpc_rules(spec: &Value, namespace: &str) -> Result<Vec<RouteRuleSpec>, String> {
    collect_rules(array_items(&spec["rules"]).map(|rule| read_grpc_rule(rule, namespace)))
}

fn read_grpc_rule(rule: &Value, namespace: &str) -> Result<RouteRuleSpec, String> {
    refuse_fields(rule, &["sessionPersistence"])?;
    let matches = array_items(&rule["matches"]).map(read_grpc_match);
    let mut matches = matches.collect::<Result<Vec<_>, _>>()?;
    if matches.is_empty() {
        matches.push(read_grpc_match(&Value::Null)?);
    }
    let filters = read_filters(&rule["filters"], &HEADER_FILTERS)?;
    build_rule(rule, namespace, matches, filters)
}

fn read_grpc_match(value: &Value) -> Result<RouteMatchSpec, String> {
    Ok(RouteMatchSpec {
        path: read_method(&value["method"])?,
        method: None,
        headers: read_headers(&value["headers"])?,
        query: Vec::new(),
    })
}

/// Reads the paths of calls of a service and a method.
fn read_method(value: &Value) -> Result<PathMatch, String> {
    if value.is_null() {
        return Ok(PathMatch::Prefix(PathPrefix::ALL));
    }
    if let Some(other) = value["type"].as_str().filter(|it| *it != "Exact") {
        return Err(format!("methods of type {other} are not supported"));
    }
    match (text(&value["service"]), text(&value["method"])) {
        ("", _) => Err("methods without a service are not supported".to_owned()),
        (service, "") => parse_path_prefix(&format!("/{service}")),
        (service, method) => parse_exact_path(&format!("/{service}/{method}")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(rule: Value) -> Result<RouteRuleSpec, String> {
        let rules = read_grpc_rules(&json!({"rules": [rule]}), "b")?;
        Ok(rules.into_iter().next().expect("one rule"))
    }

    #[test]
    fn a_method_is_the_path_of_its_calls() {
        let exact = |path: &str| PathMatch::parse_exact(path).expect("a path");
        let prefix = |path: &str| PathMatch::Prefix(PathPrefix::parse(path).expect("a prefix"));
        for (matched, expected) in [
            (json!({}), prefix("/")),
            (json!({"method": {"service": "a.v1.Shop_2"}}), prefix("/a.v1.Shop_2")),
            (json!({"method": {"service": "a.Shop", "method": "Buy"}}), exact("/a.Shop/Buy")),
            (
                json!({"method": {"type": "Exact", "service": ".Shop", "method": "Buy"}}),
                exact("/.Shop/Buy"),
            ),
        ] {
            let rule = read(json!({"matches": [matched]})).expect("it is supported");
            assert_eq!(rule.matches[0].path, expected, "{matched}");
            assert_eq!((&rule.matches[0].method, rule.matches[0].query.len()), (&None, 0));
        }
        assert_eq!(read(json!({})).expect("all calls").matches[0].path, prefix("/"));
    }

    #[test]
    fn headers_and_their_changes_are_those_of_http() {
        let changes = json!({"add": [{"name": "A", "value": "1"}]});
        let rule = read(json!({
            "matches": [{"headers": [{"name": "Version", "value": "2"}]}],
            "filters": [{"type": "ResponseHeaderModifier", "responseHeaderModifier": changes}],
        }));
        let rule = rule.expect("it is supported");
        assert_eq!(rule.matches[0].headers, [("version".to_owned(), "2".to_owned())]);
        assert_eq!(rule.response_headers.add, [("a".to_owned(), "1".to_owned())]);
    }

    #[test]
    fn what_is_not_supported_is_named() {
        let method = |method: Value| json!({"matches": [{"method": method}]});
        let long = "a".repeat(256);
        let too_long = format!("the path /{long} is too long, or servers may read it differently");
        for (rule, expected) in [
            (
                method(json!({"type": "RegularExpression", "service": "a"})),
                "methods of type RegularExpression are not supported",
            ),
            (method(json!({"method": "Buy"})), "methods without a service are not supported"),
            (method(json!({"service": long})), too_long.as_str()),
            (
                json!({"matches": [{"headers": [{"type": "RegularExpression", "name": "a"}]}]}),
                "headers of type RegularExpression are not supported",
            ),
            (
                json!({"filters": [{"type": "RequestMirror"}]}),
                "filters of type RequestMirror are not supported",
            ),
            (
                json!({"filters": [{"type": "URLRewrite"}]}),
                "filters of type URLRewrite are not supported",
            ),
            (
                json!({"sessionPersistence": {}}),
                "the field sessionPersistence of rules is not supported",
            ),
        ] {
            assert_eq!(read(rule).expect_err("not supported"), expected);
        }
    }
}
