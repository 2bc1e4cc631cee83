//! Pure: rules of the API server for pods, beyond Knative's own.
//!
//! If only the Deployment were refused, a service would be admitted and never get a pod. The tables of `field_rules`
//! have a row for each value: its path and its rule. `required_fields` has the fields that must be there,
//! `combined_rules` and `scheduling_rules` the rules about several fields.

use serde_json::Value;

use super::metadata;
use crate::model::problem::Problem;

mod combined_rules;
mod field_rules;
mod required_fields;
mod scheduling_rules;
mod text_rules;

use field_rules::{
    AFFINITY_TERM_PATHS, AFFINITY_TERM_RULES, CONTAINER_LISTS, CONTAINER_RULES, POD_RULES,
    ValueRule::{
        self, Fields, Labels, NonEmptyList, OneOf, OneOfAnyCase, OneOfOrEmpty, Port, Quantities,
        Range, Text, TextOrEmpty,
    },
};
use text_rules::{
    is_label_value, is_port_name, is_qualified_name, is_standard_resource, quantity_value,
};

/// Largest number of bytes of an object's annotations, names included.
const MAX_ANNOTATION_BYTES: usize = 256 << 10;

/// Checks a pod, as it was written, with `at` as its path in the object.
pub(super) fn check_pod_fields(pod: &Value, at: &str, problems: &mut Vec<Problem>) {
    check_fields(pod, at, problems);
    required_fields::check_required_fields(pod, at, problems);
    combined_rules::check_combined_fields(pod, at, problems);
}

/// Checks the labels and annotations of a template, which the Revision and its pods get.
pub(super) fn check_template_metadata(metadata: &Value, at: &str, problems: &mut Vec<Problem>) {
    check_labels(&metadata["labels"], &format!("{at}.labels"), problems);
    check_annotations(&metadata["annotations"], &format!("{at}.annotations"), problems);
}

fn check_annotations(annotations: &Value, at: &str, problems: &mut Vec<Problem>) {
    let mut size = 0;
    for (name, value) in annotations.as_object().into_iter().flatten() {
        size += name.len() + value.as_str().map_or(0, str::len);
        // The domain may have capitals here.
        if !is_qualified_name(&name.to_ascii_lowercase()) {
            problems.push(Problem::invalid_key(format!("{at}.{name}"), name));
        }
    }
    if size > MAX_ANNOTATION_BYTES {
        let message = format!("must have at most {MAX_ANNOTATION_BYTES} bytes in all");
        problems.push(Problem::new(at, message));
    }
}

/// Checks each field on its own.
fn check_fields(pod: &Value, at: &str, problems: &mut Vec<Problem>) {
    let mut check_each = |path: &str, rule: ValueRule| {
        for_each_at(pod, path, at, &mut |value, at| check_value(rule, value, at, problems));
    };
    POD_RULES.iter().for_each(|(path, rule)| check_each(path, *rule));
    for (lists, fields) in
        [(&AFFINITY_TERM_PATHS[..], AFFINITY_TERM_RULES), (&CONTAINER_LISTS[..], CONTAINER_RULES)]
    {
        for list in lists {
            fields.iter().for_each(|(path, rule)| check_each(&format!("{list}.{path}"), *rule));
        }
    }
}

/// Returns the text of a field; empty where there is none.
fn text<'a>(value: &'a Value, name: &str) -> &'a str {
    value[name].as_str().unwrap_or_default()
}

/// Iterates over the texts of a list, without elements of other types.
fn texts(value: &Value) -> impl Iterator<Item = &str> {
    value.as_array().into_iter().flatten().filter_map(Value::as_str)
}

/// Calls `visit` with every value at a path, and with the full path of that value.
fn for_each_at(value: &Value, path: &str, at: &str, visit: &mut dyn FnMut(&Value, &str)) {
    let (step, rest) = path.split_once('.').map_or((path, None), |(step, rest)| (step, Some(rest)));
    let (name, is_list) = step.strip_suffix("[]").map_or((step, false), |name| (name, true));
    // An absent field breaks no rule of its own: only a present one can be empty or wrong.
    let Some(inner) = value.get(name).filter(|it| !it.is_null()) else { return };
    let at = format!("{at}.{name}");
    let mut descend = |value: &Value, at: &str| match rest {
        // A `null` in a list has a wrong type, which typed parsing reports.
        None if value.is_null() => {}
        Some(rest) => for_each_at(value, rest, at, visit),
        None => visit(value, at),
    };
    match inner.as_array().filter(|_| is_list) {
        Some(all) => {
            all.iter().enumerate().for_each(|(index, it)| descend(it, &format!("{at}[{index}]")));
        }
        // Not a list although it should be: typed parsing reports it.
        None if is_list => {}
        None => descend(inner, &at),
    }
}

/// Checks one value by a rule, and reports it at the path `at`.
fn check_value(rule: ValueRule, value: &Value, at: &str, problems: &mut Vec<Problem>) {
    let text = value.as_str().unwrap_or_default();
    let fits = match rule {
        // A value of another type has no text, and passes as empty: typed parsing reports it.
        OneOfOrEmpty(words) => text.is_empty() || words.contains(&text),
        OneOfAnyCase(words) => {
            text.is_empty() || words.iter().any(|it| it.eq_ignore_ascii_case(text))
        }
        Range(low, high) => {
            if let Some(number) = value.as_i64().filter(|it| !(low..=high).contains(it)) {
                problems.push(Problem::out_of_bounds(at, low, number, high));
            }
            return;
        }
        NonEmptyList => value.as_array().is_none_or(|all| !all.is_empty()),
        TextOrEmpty(fits) => text.is_empty() || fits(text),
        Text(_) | OneOf(_) if text.is_empty() => {
            problems.push(Problem::missing(at));
            return;
        }
        OneOf(words) => words.contains(&text),
        Text(fits) => fits(text),
        Port => match value.as_i64() {
            // Port 0 stands for the serving port.
            Some(number) => (0..=65535).contains(&number),
            None => text.is_empty() || is_port_name(text),
        },
        Quantities => return check_quantities(value, at, problems),
        Labels => return check_labels(value, at, problems),
        Fields(fields) => {
            for (path, rule) in fields {
                for_each_at(value, path, at, &mut |value, at| {
                    check_value(*rule, value, at, problems)
                });
            }
            return;
        }
    };
    if !fits {
        // Without the quotes that JSON would add.
        let shown = if value.is_string() { text.to_owned() } else { value.to_string() };
        problems.push(Problem::invalid(at, shown));
    }
}

fn check_quantities(value: &Value, at: &str, problems: &mut Vec<Problem>) {
    for (name, amount) in value.as_object().into_iter().flatten() {
        // Extended resources have a domain in their name, such as `nvidia.com/gpu`.
        let is_known =
            is_standard_resource(name) || (name.contains('/') && is_qualified_name(name));
        // Quantities may be written as numbers, too: `cpu: 1`.
        let text = amount.as_str().map_or_else(|| amount.to_string(), str::to_owned);
        if !is_known {
            problems.push(Problem::invalid_key(format!("{at}.{name}"), name));
        } else if text.starts_with('-') || !metadata::is_quantity(&text) {
            problems.push(Problem::invalid(format!("{at}.{name}"), text));
        }
    }
}

fn check_labels(value: &Value, at: &str, problems: &mut Vec<Problem>) {
    for (name, value) in value.as_object().into_iter().flatten() {
        let text = value.as_str().unwrap_or_default();
        if !is_qualified_name(name) {
            problems.push(Problem::invalid_key(format!("{at}.{name}"), name));
        } else if !text.is_empty() && !is_label_value(text) {
            problems.push(Problem::invalid(format!("{at}.{name}"), text));
        }
    }
}

/// Checks that no request exceeds the limit of the same resource.
fn check_requests(resources: &Value, at: &str, problems: &mut Vec<Problem>) {
    let limits = &resources["limits"];
    for (name, request) in resources["requests"].as_object().into_iter().flatten() {
        // An unreadable quantity is reported on its own, and compares with nothing.
        let [request_value, limit_value] =
            [Some(request), limits.get(name)].map(|it| it.and_then(quantity_value));
        if let (Some(request_value), Some(limit_value)) = (request_value, limit_value)
            && request_value > limit_value
        {
            let limit = limits[name].as_str().map_or_else(|| limits[name].to_string(), Into::into);
            let shown = request.as_str().map_or_else(|| request.to_string(), Into::into);
            let problem = Problem::invalid(format!("{at}.requests.{name}"), shown);
            problems
                .push(problem.with_details(format!(
                    "must be less than or equal to {name} limit of {limit}"
                )));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::read::parse::field_mask::{self, FieldMask, FieldRule};

    /// Makes a document with `value` at a path.
    fn document_with(path: &str, value: &Value) -> Value {
        let (step, rest) = path.split_once('.').map_or((path, None), |(a, b)| (a, Some(b)));
        let inner = rest.map_or_else(|| value.clone(), |rest| document_with(rest, value));
        match step.strip_suffix("[]") {
            Some(name) => json!({ name: [inner] }),
            None => json!({ step: inner }),
        }
    }

    /// Returns values that a rule accepts, and values that it refuses.
    fn samples(rule: ValueRule) -> (Vec<Value>, Vec<Value>) {
        match rule {
            OneOfOrEmpty(words) => {
                let valid = words.iter().chain(&[""]).map(|it| json!(it)).collect();
                let small = words.iter().map(|it| it.to_ascii_lowercase());
                let small = small.filter(|it| !words.contains(&it.as_str())).map(Value::from);
                (valid, small.chain([json!("x"), json!(" ")]).collect())
            }
            OneOf(words) => {
                let small = words.iter().map(|it| json!(it.to_ascii_lowercase()));
                let valid = words.iter().map(|it| json!(it)).collect();
                (valid, small.chain([json!("x"), json!("")]).collect())
            }
            // The rows of the inner table are tested on their own.
            Fields(_) => (vec![json!({})], vec![]),
            OneOfAnyCase(words) => {
                let small = words.iter().map(|it| json!(it.to_ascii_lowercase()));
                (
                    words.iter().chain(&[""]).map(|it| json!(it)).chain(small).collect(),
                    vec![json!("ftp")],
                )
            }
            Range(low, high) => {
                (vec![json!(low), json!(high)], vec![json!(low - 1), json!(high + 1)])
            }
            NonEmptyList => (vec![json!(["a"])], vec![json!([])]),
            TextOrEmpty(_) => (vec![json!("")], vec![]),
            Text(_) => (vec![], vec![json!("")]),
            Port => {
                let valid = [json!(0), json!(1), json!(65535), json!("http"), json!("")];
                let invalid =
                    [json!(-1), json!(65536), json!("a--b"), json!("HTTP"), json!("-"), json!("1")];
                (valid.into(), invalid.into())
            }
            Labels => {
                let valid = [json!({"a": "b", "x.io/a": ""}), json!({})];
                let invalid = [json!({"a b": "c"}), json!({"a": "b c"}), json!({"a": "b/c"})];
                (valid.into(), invalid.into())
            }
            Quantities => {
                let valid = [json!({"cpu": 1, "memory": "1Gi", "example.com/gpu": "1"}), json!({})];
                let invalid = [
                    json!({"cpu": "-1"}),
                    json!({"cpu": "x"}),
                    json!({"gpu": 1}),
                    json!({"memory": "1 Gi"}),
                ];
                (valid.into(), invalid.into())
            }
        }
    }

    fn all_rules() -> Vec<(String, ValueRule)> {
        let pod = POD_RULES.iter().map(|(path, rule)| ((*path).to_owned(), *rule));
        let terms = AFFINITY_TERM_PATHS.iter().flat_map(|term| {
            AFFINITY_TERM_RULES.iter().map(move |(path, rule)| (format!("{term}.{path}"), *rule))
        });
        let inner = CONTAINER_LISTS.iter().flat_map(|list| {
            CONTAINER_RULES.iter().map(move |(path, rule)| (format!("{list}.{path}"), *rule))
        });
        let rows = |(path, rule): (String, ValueRule)| match rule {
            Fields(fields) => fields
                .iter()
                .map(|(inner, rule)| (format!("{path}.{inner}"), *rule))
                .collect::<Vec<_>>(),
            _ => vec![(path, rule)],
        };
        pod.chain(terms).chain(inner).flat_map(rows).collect()
    }

    fn field_problems(pod: &Value) -> Vec<Problem> {
        let mut problems = Vec::new();
        check_fields(pod, "spec", &mut problems);
        problems
    }

    #[test]
    fn fields_of_a_toleration_fit_each_other() {
        for (toleration, fits) in [
            (json!({"key": "a", "value": "b"}), true),
            (json!({"operator": "Exists"}), true),
            (json!({"effect": "NoExecute"}), false),
            (json!({"key": "a", "operator": "Exists", "value": "b"}), false),
            (json!({"key": "a", "tolerationSeconds": 1}), false),
            (json!({"key": "a", "tolerationSeconds": 1, "effect": "NoExecute"}), true),
        ] {
            let mut problems = Vec::new();
            check_pod_fields(&json!({"tolerations": [toleration]}), "spec", &mut problems);
            assert_eq!(problems.is_empty(), fits, "{toleration}");
        }
    }

    #[test]
    fn each_field_accepts_what_kubernetes_accepts_and_refuses_the_rest_by_path() {
        for (path, rule) in all_rules() {
            let (valid, invalid) = samples(rule);
            for value in valid {
                assert_eq!(field_problems(&document_with(&path, &value)), [], "{path}: {value}");
            }
            for value in invalid {
                let at = format!("spec.{}", path.replace("[]", "[0]"));
                let problems = field_problems(&document_with(&path, &value));
                let is_reported = problems.len() == 1 && problems[0].path.starts_with(&at);
                assert!(is_reported, "{path}: {value}: {problems:?}");
            }
            // Typed parsing refuses wrong types, and `null` equals an absent field.
            assert_eq!(field_problems(&document_with(&path, &Value::Null)), [], "{path}");
        }
    }

    #[test]
    fn requests_do_not_exceed_limits() {
        for (request, limit, fits) in [
            ("1", "1000m", true),
            ("1Gi", "1G", false),
            ("1G", "1Gi", true),
            ("1e3", "1k", true),
            ("2e3", "1k", false),
            ("100m", "0.1", true),
            ("101m", "0.1", false),
        ] {
            let resources = json!({"requests": {"cpu": request}, "limits": {"cpu": limit}});
            let mut problems = Vec::new();
            check_pod_fields(
                &json!({"containers": [{"resources": resources}]}),
                "spec",
                &mut problems,
            );
            assert_eq!(problems.is_empty(), fits, "{request} of {limit}");
        }
    }

    /// Fields that accept any value, by their last names: text that is read only in the container, values with a rule
    /// elsewhere, and booleans.
    const FIELDS_WITHOUT_RULE: &[&str] = &[
        "allowPrivilegeEscalation",
        "args",
        "automountServiceAccountToken",
        "command",
        "containerPort",
        "enableServiceLinks",
        "fsGroup",
        "hostIPC",
        "hostNetwork",
        "hostPID",
        "image",
        "imagePullSecrets",
        "mountPath",
        "name",
        "optional",
        "privileged",
        "protocol",
        "readOnly",
        "readOnlyRootFilesystem",
        "runAsGroup",
        "runAsNonRoot",
        "runAsUser",
        "schedulerName",
        "serviceAccountName",
        "shareProcessNamespace",
        "supplementalGroups",
        "terminationMessagePath",
        "terminationMessagePolicy",
        "value",
        "workingDir",
        "add",
        "drop",
        "emptyDir",
        "ephemeral",
        "downwardAPI",
        "fieldRef",
        "resourceFieldRef",
    ];

    fn mask_leaves(mask: &FieldMask, path: &str, out: &mut Vec<String>) {
        for (name, field) in mask.0 {
            let path = if path.is_empty() { (*name).to_owned() } else { format!("{path}.{name}") };
            match field {
                FieldRule::In(mask) | FieldRule::IfIn(_, mask) => mask_leaves(mask, &path, out),
                FieldRule::Any | FieldRule::If(_) => out.push(path),
            }
        }
    }

    #[test]
    fn every_field_that_users_may_write_has_a_rule_or_takes_anything() {
        let mut fields = Vec::new();
        mask_leaves(&field_mask::POD_MASK, "", &mut fields);
        let ruled: Vec<String> =
            all_rules().iter().map(|(path, _)| path.replace("[]", "")).collect();
        for field in fields {
            let last = field.rsplit('.').next().unwrap_or_default();
            // A field may be an object of Kubernetes with rules for its own fields.
            let has_rule =
                ruled.iter().any(|it| *it == field || it.starts_with(&format!("{field}.")));
            // Knative's rules cover the numbers of a readiness probe.
            let is_knatives =
                field.contains("readinessProbe") || field.starts_with("initContainers.");
            assert!(has_rule || FIELDS_WITHOUT_RULE.contains(&last) || is_knatives, "{field}");
        }
    }
}
