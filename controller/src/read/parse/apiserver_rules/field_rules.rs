//! Pure: tables of the API server's rules for single fields of a pod.
//!
//! A table has a row for each value: its path and its rule (Kubernetes' `pkg/apis/core/validation/validation.go`). An
//! empty value equals an absent one wherever Kubernetes has a default.

use super::text_rules::{
    has_no_parent_step, is_address, is_any, is_config_key, is_divisor, is_driver_name, is_env_name,
    is_field_of_file, is_field_of_variable, is_file_path, is_header_name, is_inner_path, is_label,
    is_label_value, is_positive_quantity, is_qualified_name, is_resource_of_container,
    is_search_domain, is_subdomain,
};

/// Rule for the value of one field.
#[derive(Clone, Copy, Debug)]
pub(super) enum ValueRule {
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

/// Paths of the lists with a pod's terms of affinity to other pods.
pub(super) const AFFINITY_TERM_PATHS: [&str; 4] = [
    "affinity.podAffinity.preferredDuringSchedulingIgnoredDuringExecution[].podAffinityTerm",
    "affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[]",
    "affinity.podAntiAffinity.preferredDuringSchedulingIgnoredDuringExecution[].podAffinityTerm",
    "affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution[]",
];

/// Rules for the fields of each such term.
pub(super) const AFFINITY_TERM_RULES: &[(&str, ValueRule)] = &[
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
pub(super) const POD_RULES: &[(&str, ValueRule)] = &[
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
pub(super) const CONTAINER_RULES: &[(&str, ValueRule)] = &[
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
pub(super) const CONTAINER_LISTS: [&str; 2] = ["containers[]", "initContainers[]"];
