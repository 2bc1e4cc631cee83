//! Pure: rules of the API server for pods, beyond Knative's own.
//!
//! If only the Deployment were refused, a service would be admitted and never get a pod. One table of fields has a row
//! for each value: its path and its rule (Kubernetes' `pkg/apis/core/validation/validation.go`). An empty value equals
//! an absent one wherever Kubernetes has a default. `required_fields` has the fields that must be there, and
//! `combined_rules` the rules about several fields.

use serde_json::Value;

use super::metadata;
use crate::model::problem::Problem;

mod combined_rules;
mod required_fields;
mod text_rules;

use text_rules::{
    has_no_parent_step, is_address, is_any, is_config_key, is_divisor, is_driver_name, is_env_name,
    is_field_of_file, is_field_of_variable, is_file_path, is_header_name, is_inner_path, is_label,
    is_label_value, is_port_name, is_positive_quantity, is_qualified_name,
    is_resource_of_container, is_search_domain, is_standard_resource, is_subdomain, quantity_value,
};

/// Rule for the value of one field.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ValueRule {
    /// One of these words, or empty.
    OneOfOrEmpty(&'static [&'static str]),
    /// One of these words; an empty value is refused where the field is present.
    OneOf(&'static [&'static str]),
    /// One of these words in any case of letters, or empty; the controller writes it in Kubernetes' spelling.
    OneOfAnyCase(&'static [&'static str]),
    /// A number within these bounds, both included.
    Range(i64, i64),
    /// A list with at least one element.
    NonEmptyList,
    /// Text that the function accepts, or empty.
    TextOrEmpty(fn(&str) -> bool),
    /// Text that the function accepts; empty text is refused.
    Text(fn(&str) -> bool),
    /// Number or name of a port.
    Port,
    /// Quantities by name of the resource.
    Quantities,
    /// Labels: keys are qualified names, values are label values.
    Labels,
    /// An object whose fields have rules of their own.
    Fields(&'static [(&'static str, ValueRule)]),
}

use ValueRule::{
    Fields, Labels, NonEmptyList, OneOf, OneOfAnyCase, OneOfOrEmpty, Port, Quantities, Range, Text,
    TextOrEmpty,
};

const FILE_MODE: ValueRule = Range(0, 0o777);
const NON_NEGATIVE: ValueRule = Range(0, i32::MAX as i64);
const SECCOMP_PROFILES: ValueRule = OneOf(&["Localhost", "RuntimeDefault", "Unconfined"]);
const SCHEMES: &[&str] = &["HTTP", "HTTPS"];
const TAINT_EFFECTS: ValueRule = OneOfOrEmpty(&["NoExecute", "NoSchedule", "PreferNoSchedule"]);
const SELECTOR_OPERATORS: ValueRule = OneOf(&["DoesNotExist", "Exists", "In", "NotIn"]);
const NODE_OPERATORS: ValueRule = OneOf(&["DoesNotExist", "Exists", "Gt", "In", "Lt", "NotIn"]);
const NODE_INCLUSION_POLICIES: ValueRule = OneOf(&["Honor", "Ignore"]);
const WEIGHT: ValueRule = Range(1, 100);
const ACCESS_MODES: ValueRule =
    OneOf(&["ReadOnlyMany", "ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"]);

/// Largest number of bytes of an object's annotations, names included.
const MAX_ANNOTATION_BYTES: usize = 256 << 10;

/// Paths of the lists with a pod's terms of affinity to other pods.
const AFFINITY_TERM_PATHS: [&str; 4] = [
    "affinity.podAffinity.preferredDuringSchedulingIgnoredDuringExecution[].podAffinityTerm",
    "affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[]",
    "affinity.podAntiAffinity.preferredDuringSchedulingIgnoredDuringExecution[].podAffinityTerm",
    "affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution[]",
];

/// Rules for the fields of each such term.
const AFFINITY_TERM_RULES: &[(&str, ValueRule)] = &[
    ("labelSelector", LABEL_SELECTOR_RULES),
    ("matchLabelKeys[]", Text(is_qualified_name)),
    ("mismatchLabelKeys[]", Text(is_qualified_name)),
    ("namespaceSelector", LABEL_SELECTOR_RULES),
    ("namespaces[]", Text(is_label)),
    ("topologyKey", Text(is_qualified_name)),
];

/// Rules for the fields of a label selector.
const LABEL_SELECTOR_RULES: ValueRule = Fields(&[
    ("matchExpressions[].key", Text(is_qualified_name)),
    ("matchExpressions[].operator", SELECTOR_OPERATORS),
    ("matchExpressions[].values[]", TextOrEmpty(is_label_value)),
    ("matchLabels", Labels),
]);
const NODE_TERM: ValueRule = Fields(&[
    ("matchExpressions[].key", Text(is_qualified_name)),
    ("matchExpressions[].operator", NODE_OPERATORS),
]);
const VARIABLE_FIELD_REF: ValueRule =
    Fields(&[("apiVersion", OneOfOrEmpty(&["v1"])), ("fieldPath", Text(is_field_of_variable))]);
const FILE_FIELD_REF: ValueRule =
    Fields(&[("apiVersion", OneOfOrEmpty(&["v1"])), ("fieldPath", Text(is_field_of_file))]);
const VARIABLE_RESOURCE_REF: ValueRule =
    Fields(&[("divisor", Text(is_divisor)), ("resource", Text(is_resource_of_container))]);
const FILE_RESOURCE_REF: ValueRule = Fields(&[
    ("containerName", Text(is_any)),
    ("divisor", Text(is_divisor)),
    ("resource", Text(is_resource_of_container)),
]);

/// Rules for the fields of a pod.
pub(crate) const POD_RULES: &[(&str, ValueRule)] = &[
    (
        "affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution[].preference",
        NODE_TERM,
    ),
    ("affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution[].weight", WEIGHT),
    (
        "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[]",
        NODE_TERM,
    ),
    (
        "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[].matchExpressions[].values[]",
        TextOrEmpty(is_label_value),
    ),
    (
        "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms",
        NonEmptyList,
    ),
    ("affinity.podAffinity.preferredDuringSchedulingIgnoredDuringExecution[].weight", WEIGHT),
    ("affinity.podAntiAffinity.preferredDuringSchedulingIgnoredDuringExecution[].weight", WEIGHT),
    ("dnsConfig.nameservers[]", Text(is_address)),
    ("dnsConfig.options[].name", Text(is_any)),
    ("dnsConfig.searches[]", Text(is_search_domain)),
    ("dnsPolicy", OneOfOrEmpty(&["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"])),
    ("hostAliases[].hostnames[]", Text(is_subdomain)),
    ("hostAliases[].ip", Text(is_address)),
    ("nodeSelector", Labels),
    ("priorityClassName", TextOrEmpty(is_subdomain)),
    ("runtimeClassName", Text(is_subdomain)),
    ("securityContext.seccompProfile.type", SECCOMP_PROFILES),
    ("tolerations[].effect", TAINT_EFFECTS),
    ("tolerations[].key", TextOrEmpty(is_qualified_name)),
    ("tolerations[].operator", OneOfOrEmpty(&["Equal", "Exists"])),
    ("tolerations[].value", TextOrEmpty(is_label_value)),
    ("topologySpreadConstraints[].labelSelector", LABEL_SELECTOR_RULES),
    ("topologySpreadConstraints[].matchLabelKeys[]", Text(is_qualified_name)),
    ("topologySpreadConstraints[].maxSkew", Range(1, i32::MAX as i64)),
    ("topologySpreadConstraints[].minDomains", Range(1, i32::MAX as i64)),
    ("topologySpreadConstraints[].nodeAffinityPolicy", NODE_INCLUSION_POLICIES),
    ("topologySpreadConstraints[].nodeTaintsPolicy", NODE_INCLUSION_POLICIES),
    ("topologySpreadConstraints[].topologyKey", Text(is_qualified_name)),
    ("topologySpreadConstraints[].whenUnsatisfiable", OneOf(&["DoNotSchedule", "ScheduleAnyway"])),
    ("volumes[].configMap.defaultMode", FILE_MODE),
    ("volumes[].configMap.items[].key", TextOrEmpty(is_config_key)),
    ("volumes[].configMap.items[].mode", FILE_MODE),
    ("volumes[].configMap.items[].path", TextOrEmpty(is_file_path)),
    ("volumes[].configMap.name", Text(is_any)),
    ("volumes[].csi.driver", Text(is_driver_name)),
    ("volumes[].csi.nodePublishSecretRef.name", Text(is_subdomain)),
    ("volumes[].downwardAPI.defaultMode", FILE_MODE),
    ("volumes[].downwardAPI.items[].fieldRef", FILE_FIELD_REF),
    ("volumes[].downwardAPI.items[].mode", FILE_MODE),
    ("volumes[].downwardAPI.items[].path", Text(is_file_path)),
    ("volumes[].downwardAPI.items[].resourceFieldRef", FILE_RESOURCE_REF),
    ("volumes[].ephemeral.volumeClaimTemplate.metadata.labels", Labels),
    ("volumes[].ephemeral.volumeClaimTemplate.spec.accessModes[]", ACCESS_MODES),
    (
        "volumes[].ephemeral.volumeClaimTemplate.spec.resources.requests.storage",
        Text(is_positive_quantity),
    ),
    ("volumes[].ephemeral.volumeClaimTemplate.spec.selector", LABEL_SELECTOR_RULES),
    ("volumes[].ephemeral.volumeClaimTemplate.spec.storageClassName", TextOrEmpty(is_subdomain)),
    ("volumes[].ephemeral.volumeClaimTemplate.spec.volumeMode", OneOf(&["Block", "Filesystem"])),
    ("volumes[].hostPath.path", Text(has_no_parent_step)),
    (
        "volumes[].hostPath.type",
        OneOfOrEmpty(&[
            "BlockDevice",
            "CharDevice",
            "Directory",
            "DirectoryOrCreate",
            "File",
            "FileOrCreate",
            "Socket",
        ]),
    ),
    ("volumes[].image.pullPolicy", PULL_POLICIES),
    ("volumes[].image.reference", Text(is_any)),
    ("volumes[].persistentVolumeClaim.claimName", Text(is_subdomain)),
    ("volumes[].projected.defaultMode", FILE_MODE),
    ("volumes[].projected.sources[].configMap.items[].key", TextOrEmpty(is_config_key)),
    ("volumes[].projected.sources[].configMap.items[].mode", FILE_MODE),
    ("volumes[].projected.sources[].configMap.items[].path", TextOrEmpty(is_file_path)),
    ("volumes[].projected.sources[].downwardAPI.items[].fieldRef", FILE_FIELD_REF),
    ("volumes[].projected.sources[].downwardAPI.items[].mode", FILE_MODE),
    ("volumes[].projected.sources[].downwardAPI.items[].path", TextOrEmpty(is_file_path)),
    ("volumes[].projected.sources[].secret.items[].key", TextOrEmpty(is_config_key)),
    ("volumes[].projected.sources[].secret.items[].mode", FILE_MODE),
    ("volumes[].projected.sources[].secret.items[].path", TextOrEmpty(is_file_path)),
    ("volumes[].projected.sources[].serviceAccountToken.expirationSeconds", Range(600, 1 << 32)),
    ("volumes[].projected.sources[].serviceAccountToken.path", TextOrEmpty(is_file_path)),
    ("volumes[].secret.defaultMode", FILE_MODE),
    ("volumes[].secret.items[].key", TextOrEmpty(is_config_key)),
    ("volumes[].secret.items[].mode", FILE_MODE),
    ("volumes[].secret.items[].path", TextOrEmpty(is_file_path)),
    ("volumes[].secret.secretName", Text(is_any)),
];

const PULL_POLICIES: ValueRule = OneOfOrEmpty(&["Always", "IfNotPresent", "Never"]);

/// Rules for the fields of each container of a pod.
pub(crate) const CONTAINER_RULES: &[(&str, ValueRule)] = &[
    ("env[].name", TextOrEmpty(is_env_name)),
    ("env[].valueFrom.configMapKeyRef.key", Text(is_config_key)),
    ("env[].valueFrom.configMapKeyRef.name", Text(is_subdomain)),
    ("env[].valueFrom.fieldRef", VARIABLE_FIELD_REF),
    ("env[].valueFrom.resourceFieldRef", VARIABLE_RESOURCE_REF),
    ("env[].valueFrom.secretKeyRef.key", Text(is_config_key)),
    ("env[].valueFrom.secretKeyRef.name", Text(is_subdomain)),
    ("envFrom[].configMapRef.name", Text(is_subdomain)),
    ("envFrom[].prefix", TextOrEmpty(is_env_name)),
    ("envFrom[].secretRef.name", Text(is_subdomain)),
    ("imagePullPolicy", PULL_POLICIES),
    ("livenessProbe.exec.command", NonEmptyList),
    ("livenessProbe.failureThreshold", NON_NEGATIVE),
    ("livenessProbe.grpc.port", Port),
    ("livenessProbe.httpGet.httpHeaders[].name", Text(is_header_name)),
    ("livenessProbe.httpGet.port", Port),
    ("livenessProbe.httpGet.scheme", OneOfOrEmpty(SCHEMES)),
    ("livenessProbe.initialDelaySeconds", NON_NEGATIVE),
    ("livenessProbe.periodSeconds", NON_NEGATIVE),
    ("livenessProbe.successThreshold", Range(0, 1)),
    ("livenessProbe.tcpSocket.port", Port),
    ("livenessProbe.timeoutSeconds", NON_NEGATIVE),
    ("readinessProbe.exec.command", NonEmptyList),
    ("readinessProbe.grpc.port", Port),
    ("readinessProbe.httpGet.httpHeaders[].name", Text(is_header_name)),
    ("readinessProbe.httpGet.port", Port),
    // Knative's sidecar runs this probe and accepts any case of letters.
    ("readinessProbe.httpGet.scheme", OneOfAnyCase(SCHEMES)),
    ("readinessProbe.tcpSocket.port", Port),
    ("resources.limits", Quantities),
    ("resources.requests", Quantities),
    ("securityContext.seccompProfile.type", SECCOMP_PROFILES),
    ("startupProbe.exec.command", NonEmptyList),
    ("startupProbe.failureThreshold", NON_NEGATIVE),
    ("startupProbe.grpc.port", Port),
    ("startupProbe.httpGet.httpHeaders[].name", Text(is_header_name)),
    ("startupProbe.httpGet.port", Port),
    ("startupProbe.httpGet.scheme", OneOfOrEmpty(SCHEMES)),
    ("startupProbe.initialDelaySeconds", NON_NEGATIVE),
    ("startupProbe.periodSeconds", NON_NEGATIVE),
    ("startupProbe.successThreshold", Range(0, 1)),
    ("startupProbe.tcpSocket.port", Port),
    ("startupProbe.timeoutSeconds", NON_NEGATIVE),
    ("volumeMounts[].mountPath", TextOrEmpty(|it| !it.contains(':'))),
    ("volumeMounts[].mountPropagation", OneOf(&["Bidirectional", "HostToContainer", "None"])),
    ("volumeMounts[].subPath", TextOrEmpty(is_inner_path)),
];

/// Paths of a pod's lists of containers.
const CONTAINER_LISTS: [&str; 2] = ["containers[]", "initContainers[]"];

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

    /// A rule of text, with samples that it accepts and samples that it refuses.
    type TextRuleSamples = (fn(&str) -> bool, &'static [&'static str], &'static [&'static str]);

    /// Samples for the rules that are functions: accepted and refused texts.
    const TEXT_RULE_SAMPLES: &[TextRuleSamples] = &[
        (is_address, &["10.0.0.1", "::1"], &["10.0.0", "host", "::ffff:1.2.3.4"]),
        (is_subdomain, &["a", "a.b-c"], &["A", "a_b", "-a", "a..b"]),
        (is_qualified_name, &["a", "x.io/A_b"], &["/a", "a b", "-"]),
        (is_config_key, &["a", "a.b", ".a"], &["..", "..a", "a/b", "."]),
        (is_env_name, &["A", "a b", "1"], &["a=b", "a\n", "ä"]),
        (is_header_name, &["X-A"], &["X A", "X_A", "a:"]),
        (is_inner_path, &["a", "a/b", "..a"], &["/a", "../a", "a/.."]),
        (is_file_path, &["a", "a/b", "a/..b"], &["/a", "../a", "a/..", "..a"]),
        (is_driver_name, &["a.b", "A.b"], &["a_b", "a..b"]),
        (is_label, &["a", "a-1"], &["A", "a.b", "-a"]),
        (is_label_value, &["a", "A_b"], &["a/b", "a b", "-"]),
        (is_search_domain, &["a.b", "a.b.", ".", "_a.b"], &["A", "a b", "a..b"]),
        (
            is_field_of_variable,
            &["metadata.name", "status.podIPs", "metadata.labels['a/B']"],
            &["metadata", "METADATA.NAME", "metadata.labels", "metadata.labels[a]"],
        ),
        (
            is_field_of_file,
            &["metadata.name", "metadata.labels", "metadata.annotations['A/b']"],
            &["spec.nodeName", "status.podIP", "metadata.labels['A/b']", "metadata.labels['']"],
        ),
        (is_resource_of_container, &["limits.cpu", "requests.hugepages-2Mi"], &["cpu", "limits.x"]),
        (
            is_divisor,
            &["1", "1m", "1000m", "1E", "1Ei", "0", "0m"],
            &["2", "m", "1x", "-1", "1e3", "1024"],
        ),
        (is_positive_quantity, &["1Gi", "100"], &["0", "-1", "a"]),
        (has_no_parent_step, &["/a", "a..b"], &["../a", "/a/.."]),
        (is_port_name, &["http", "a-1"], &["a--b", "1", "-a", "abcdefghijklmnop"]),
    ];

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
    fn names_and_paths_are_checked_as_in_kubernetes() {
        for (fits, valid, invalid) in TEXT_RULE_SAMPLES {
            for text in *valid {
                assert!(fits(text), "{text:?}");
            }
            for text in *invalid {
                assert!(!fits(text), "{text:?}");
            }
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
