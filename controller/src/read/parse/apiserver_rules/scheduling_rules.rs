//! Pure: rules of the API server for tolerations, affinity and topology spread of a pod (Kubernetes'
//! `pkg/apis/core/validation/validation.go`, 1.36).

use std::collections::BTreeSet;

use serde_json::Value;

use super::{field_rules::AFFINITY_TERM_PATHS, for_each_at, text, text_rules, texts};
use crate::model::problem::Problem;

/// Paths of the lists with requirements of a node's labels.
const NODE_EXPRESSION_PATHS: [&str; 2] = [
    "affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution[].preference.matchExpressions[]",
    "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[].matchExpressions[]",
];

/// Checks all rules of this file.
pub(super) fn check_scheduling_fields(pod: &Value, at: &str, problems: &mut Vec<Problem>) {
    for_each_at(pod, "tolerations[]", at, &mut |value, at| check_toleration(value, at, problems));
    check_affinity_and_spread(pod, at, problems);
    check_spread_repetition(pod, at, problems);
}

/// Checks the fields of a toleration against each other.
fn check_toleration(value: &Value, at: &str, problems: &mut Vec<Problem>) {
    // Without an operator it is `Equal`.
    let exists = text(value, "operator") == "Exists";
    for (fits, field, message) in [
        (
            exists || !text(value, "key").is_empty(),
            "operator",
            "operator must be Exists when `key` is empty",
        ),
        (
            !exists || text(value, "value").is_empty(),
            "operator",
            "value must be empty when `operator` is 'Exists'",
        ),
        (
            value["tolerationSeconds"].is_null() || text(value, "effect") == "NoExecute",
            "effect",
            "effect must be 'NoExecute' when `tolerationSeconds` is set",
        ),
    ] {
        if !fits {
            let problem = Problem::invalid(format!("{at}.{field}"), text(value, field));
            problems.push(problem.with_details(message));
        }
    }
}

/// Checks the requirements of nodes and pods, and the keys of labels that constraints compare.
fn check_affinity_and_spread(pod: &Value, at: &str, problems: &mut Vec<Problem>) {
    for path in NODE_EXPRESSION_PATHS {
        for_each_at(pod, path, at, &mut |value, at| check_expression(value, at, problems));
        let path = path.replace("matchExpressions", "matchFields");
        for_each_at(pod, &path, at, &mut |value, at| check_node_field(value, at, problems));
    }
    for term in AFFINITY_TERM_PATHS {
        for selector in ["labelSelector", "namespaceSelector"] {
            let path = format!("{term}.{selector}.matchExpressions[]");
            for_each_at(pod, &path, at, &mut |value, at| check_expression(value, at, problems));
        }
        for_each_at(pod, term, at, &mut |value, at| check_label_keys(value, at, problems));
    }
    let path = "topologySpreadConstraints[].labelSelector.matchExpressions[]";
    for_each_at(pod, path, at, &mut |value, at| check_expression(value, at, problems));
    for_each_at(pod, "topologySpreadConstraints[]", at, &mut |value, at| {
        check_label_keys(value, at, problems);
        // A constraint that only prefers could count no domain as missing.
        if !value["minDomains"].is_null() && text(value, "whenUnsatisfiable") != "DoNotSchedule" {
            let rule = "can only use minDomains if whenUnsatisfiable=DoNotSchedule";
            problems.push(Problem::disallowed(format!("{at}.minDomains")).with_details(rule));
        }
    });
}

/// Checks the number of values for the operator of a requirement.
pub(super) fn check_expression(expression: &Value, at: &str, problems: &mut Vec<Problem>) {
    for field in ["key", "operator"] {
        if expression.is_object() && expression[field].is_null() {
            problems.push(Problem::missing(format!("{at}.{field}")));
        }
    }
    let count = texts(&expression["values"]).count();
    let at = format!("{at}.values");
    match text(expression, "operator") {
        "In" | "NotIn" if count == 0 => {
            let rule = "must be specified when `operator` is 'In' or 'NotIn'";
            problems.push(Problem::missing(at).with_details(rule));
        }
        "Exists" | "DoesNotExist" if count > 0 => {
            let rule = "may not be specified when `operator` is 'Exists' or 'DoesNotExist'";
            problems.push(Problem::disallowed(at).with_details(rule));
        }
        "Gt" | "Lt" if count != 1 => {
            let rule = "must be specified single value when `operator` is 'Lt' or 'Gt'";
            problems.push(Problem::missing(at).with_details(rule));
        }
        _ => {}
    }
}

/// Checks a requirement of a node's field: only its name can be compared, with one value.
fn check_node_field(field: &Value, at: &str, problems: &mut Vec<Problem>) {
    if text(field, "key") != "metadata.name" {
        problems.push(Problem::invalid(format!("{at}.key"), text(field, "key")));
    }
    if !matches!(text(field, "operator"), "In" | "NotIn") {
        problems.push(Problem::invalid(format!("{at}.operator"), text(field, "operator")));
    }
    let values: Vec<&str> = texts(&field["values"]).collect();
    match values[..] {
        [name] if !text_rules::is_subdomain(name) => {
            problems.push(Problem::invalid(format!("{at}.values[0]"), name));
        }
        [_] => {}
        _ => problems
            .push(Problem::missing(format!("{at}.values")).with_details("must have one element")),
    }
}

/// Checks the keys of labels whose values are those of the pod itself.
fn check_label_keys(constraint: &Value, at: &str, problems: &mut Vec<Problem>) {
    let selector = &constraint["labelSelector"];
    let keys = |name: &str| texts(&constraint[name]).collect::<BTreeSet<_>>();
    let (matched, mismatched) = (keys("matchLabelKeys"), keys("mismatchLabelKeys"));
    for (name, keys) in [("matchLabelKeys", &matched), ("mismatchLabelKeys", &mismatched)] {
        if selector.is_null() && !keys.is_empty() {
            let rule = "must not be specified when labelSelector is not set";
            problems.push(Problem::disallowed(format!("{at}.{name}")).with_details(rule));
        }
    }
    let labels =
        selector["matchLabels"].as_object().into_iter().flatten().map(|(key, _)| key.as_str());
    let expressions = selector["matchExpressions"].as_array().into_iter().flatten();
    // Kubernetes adds these keys to the selector of each pod, and refuses the pod if one is there already.
    let selected: BTreeSet<&str> = labels.chain(expressions.map(|it| text(it, "key"))).collect();
    for (list, others) in [("labelSelector", &selected), ("mismatchLabelKeys", &mismatched)] {
        for key in matched.intersection(others) {
            let problem = Problem::invalid(format!("{at}.matchLabelKeys"), key);
            let rule = format!("exists in both matchLabelKeys and {list}");
            problems.push(problem.with_details(rule));
        }
    }
}

/// Reports constraints that have the same topology and the same effect.
fn check_spread_repetition(pod: &Value, at: &str, problems: &mut Vec<Problem>) {
    let mut seen = BTreeSet::new();
    let all = pod["topologySpreadConstraints"].as_array().into_iter().flatten();
    for (index, constraint) in all.enumerate() {
        let [key, effect] = ["topologyKey", "whenUnsatisfiable"].map(|it| text(constraint, it));
        if !seen.insert((key, effect)) {
            let path = format!("{at}.topologySpreadConstraints[{index}]");
            let message =
                format!("duplicate topologyKey {key:?} with whenUnsatisfiable {effect:?}");
            problems.push(Problem::new(path, message));
        }
    }
}
