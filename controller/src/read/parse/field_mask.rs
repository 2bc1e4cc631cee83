//! Pure: fields of a pod that users may write (knative/serving `pkg/apis/serving/fieldmask.go` at 98e5ef9).
//!
//! One table for both uses: webhooks refuse fields outside it, and the schemas of the CRDs are cut to it.

use serde_json::Value;

use crate::model::{
    config_maps::{Features, Flag, SecureDefaults},
    problem::Problem,
};

/// Fields of one object that users may write.
#[derive(Debug)]
pub(crate) struct FieldMask(pub &'static [(&'static str, FieldRule)]);

/// Rule for one field that a mask lists.
#[derive(Clone, Copy, Debug)]
pub(crate) enum FieldRule {
    /// Allowed with any value that Kubernetes allows there.
    Any,
    /// An object, or a list of objects, with a mask of its own.
    In(&'static FieldMask),
    /// Allowed only with a feature; then with any value that Kubernetes allows there.
    If(Feature),
    /// Allowed only with a feature; then an object with a mask of its own.
    IfIn(Feature, &'static FieldMask),
}

/// A feature: its key of `config-features`, and its lookup in the settings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Feature {
    pub key: &'static str,
    on: fn(&Features) -> bool,
}

macro_rules! feature {
    ($key:literal, $field:ident) => {
        Feature { key: $key, on: |features| features.$field != Flag::Disabled }
    };
}

use FieldRule::{Any, If, IfIn, In};

/// Mask of a PodSpec. Fields in no table, such as `nodeName` and `restartPolicy`, belong to the platform.
pub(crate) static POD_MASK: FieldMask = FieldMask(&[
    ("affinity", If(feature!("kubernetes.podspec-affinity", podspec_affinity))),
    ("automountServiceAccountToken", Any),
    ("containers", In(&CONTAINER_MASK)),
    ("dnsConfig", If(feature!("kubernetes.podspec-dnsconfig", podspec_dnsconfig))),
    ("dnsPolicy", If(feature!("kubernetes.podspec-dnspolicy", podspec_dnspolicy))),
    ("enableServiceLinks", Any),
    ("hostAliases", If(feature!("kubernetes.podspec-hostaliases", podspec_hostaliases))),
    ("hostIPC", If(feature!("kubernetes.podspec-hostipc", podspec_hostipc))),
    ("hostNetwork", If(feature!("kubernetes.podspec-hostnetwork", podspec_hostnetwork))),
    ("hostPID", If(feature!("kubernetes.podspec-hostpid", podspec_hostpid))),
    ("imagePullSecrets", Any),
    // Refused elsewhere, with a more helpful message than "must not set".
    ("initContainers", In(&CONTAINER_MASK)),
    ("nodeSelector", If(feature!("kubernetes.podspec-nodeselector", podspec_nodeselector))),
    (
        "priorityClassName",
        If(feature!("kubernetes.podspec-priorityclassname", podspec_priorityclassname)),
    ),
    (
        "runtimeClassName",
        If(feature!("kubernetes.podspec-runtimeclassname", podspec_runtimeclassname)),
    ),
    ("schedulerName", If(feature!("kubernetes.podspec-schedulername", podspec_schedulername))),
    ("securityContext", IfIn(POD_SECURITY_FEATURE, &POD_SECURITY)),
    ("serviceAccountName", Any),
    (
        "shareProcessNamespace",
        If(feature!("kubernetes.podspec-shareprocessnamespace", podspec_shareprocessnamespace)),
    ),
    ("tolerations", If(feature!("kubernetes.podspec-tolerations", podspec_tolerations))),
    (
        "topologySpreadConstraints",
        If(feature!(
            "kubernetes.podspec-topologyspreadconstraints",
            podspec_topologyspreadconstraints
        )),
    ),
    ("volumes", In(&VOLUME)),
]);

const POD_SECURITY_FEATURE: Feature = Feature {
    key: "kubernetes.podspec-securitycontext",
    on: |features| {
        features.podspec_securitycontext != Flag::Disabled
            || features.secure_pod_defaults != SecureDefaults::Disabled
    },
};

static POD_SECURITY: FieldMask = FieldMask(&[
    ("fsGroup", Any),
    ("runAsGroup", Any),
    ("runAsNonRoot", Any),
    ("runAsUser", Any),
    ("seccompProfile", Any),
    ("supplementalGroups", Any),
]);

static CONTAINER_MASK: FieldMask = FieldMask(&[
    ("args", Any),
    ("command", Any),
    ("env", In(&ENV)),
    ("envFrom", In(&ENV_FROM)),
    ("image", Any),
    ("imagePullPolicy", Any),
    ("livenessProbe", In(&PROBE)),
    ("name", Any),
    ("ports", In(&PORT)),
    ("readinessProbe", In(&PROBE)),
    ("resources", In(&FieldMask(&[("limits", Any), ("requests", Any)]))),
    ("securityContext", In(&SECURITY)),
    ("startupProbe", In(&PROBE)),
    ("terminationMessagePath", Any),
    ("terminationMessagePolicy", Any),
    ("volumeMounts", In(&MOUNT)),
    ("workingDir", Any),
]);

static ENV: FieldMask = FieldMask(&[("name", Any), ("value", Any), ("valueFrom", In(&ENV_SOURCE))]);

const FIELD_REF: Feature = feature!("kubernetes.podspec-fieldref", podspec_fieldref);

static ENV_SOURCE: FieldMask = FieldMask(&[
    ("configMapKeyRef", In(&KEY_SELECTOR)),
    ("fieldRef", If(FIELD_REF)),
    ("resourceFieldRef", If(FIELD_REF)),
    ("secretKeyRef", In(&KEY_SELECTOR)),
]);

static KEY_SELECTOR: FieldMask = FieldMask(&[("key", Any), ("name", Any), ("optional", Any)]);

static ENV_FROM: FieldMask =
    FieldMask(&[("configMapRef", In(&REFERENCE)), ("prefix", Any), ("secretRef", In(&REFERENCE))]);

static REFERENCE: FieldMask = FieldMask(&[("name", Any), ("optional", Any)]);

static PORT: FieldMask = FieldMask(&[("containerPort", Any), ("name", Any), ("protocol", Any)]);

static PROBE: FieldMask = FieldMask(&[
    ("exec", Any),
    ("failureThreshold", Any),
    ("grpc", Any),
    ("httpGet", Any),
    ("initialDelaySeconds", Any),
    ("periodSeconds", Any),
    ("successThreshold", Any),
    ("tcpSocket", Any),
    ("timeoutSeconds", Any),
]);

static SECURITY: FieldMask = FieldMask(&[
    ("allowPrivilegeEscalation", Any),
    // Restricted further by `security.rs`.
    ("capabilities", In(&FieldMask(&[("add", Any), ("drop", Any)]))),
    // Restricted further by `security.rs`: only `false` is allowed.
    ("privileged", Any),
    ("readOnlyRootFilesystem", Any),
    ("runAsGroup", Any),
    ("runAsNonRoot", Any),
    ("runAsUser", Any),
    ("seccompProfile", Any),
]);

static MOUNT: FieldMask = FieldMask(&[
    ("mountPath", Any),
    (
        "mountPropagation",
        If(feature!(
            "kubernetes.podspec-volumes-mount-propagation",
            podspec_volumes_mount_propagation
        )),
    ),
    ("name", Any),
    ("readOnly", Any),
    ("subPath", Any),
]);

static VOLUME: FieldMask = FieldMask(&[
    ("configMap", Any),
    ("csi", If(feature!("kubernetes.podspec-volumes-csi", podspec_volumes_csi))),
    ("emptyDir", If(feature!("kubernetes.podspec-volumes-emptydir", podspec_volumes_emptydir))),
    ("ephemeral", If(feature!("kubernetes.podspec-volumes-ephemeral", podspec_volumes_ephemeral))),
    ("hostPath", If(feature!("kubernetes.podspec-volumes-hostpath", podspec_volumes_hostpath))),
    ("image", If(feature!("kubernetes.podspec-volumes-image", podspec_volumes_image))),
    ("name", Any),
    (
        "persistentVolumeClaim",
        If(feature!("kubernetes.podspec-persistent-volume-claim", podspec_persistent_volume_claim)),
    ),
    ("projected", In(&FieldMask(&[("defaultMode", Any), ("sources", In(&PROJECTION))]))),
    ("secret", Any),
]);

static PROJECTION: FieldMask = FieldMask(&[
    ("configMap", Any),
    ("downwardAPI", Any),
    ("secret", Any),
    ("serviceAccountToken", Any),
]);

/// Fields whose zero value is absence for Knative and for Kubernetes, such as `hostNetwork: false`.
const ZERO_IS_ABSENCE: [&str; 14] = [
    "dnsPolicy",
    "hostIP",
    "hostIPC",
    "hostNetwork",
    "hostPID",
    "hostPort",
    "hostname",
    "nodeName",
    "priorityClassName",
    "schedulerName",
    "stdin",
    "stdinOnce",
    "subdomain",
    "tty",
];

fn is_zero(name: &str, value: &Value) -> bool {
    ZERO_IS_ABSENCE.contains(&name)
        && (*value == false || value.as_i64() == Some(0) || value.as_str() == Some(""))
}

impl FieldMask {
    pub(crate) fn rule_of(&self, name: &str) -> Option<FieldRule> {
        self.0.iter().find(|(field_name, _)| *field_name == name).map(|(_, field)| *field)
    }

    /// Reports the fields of `value` that users may not write.
    pub(super) fn check(
        &self,
        value: &Value,
        features: &Features,
        path: &str,
        problems: &mut Vec<Problem>,
    ) {
        for (name, inner) in value.as_object().into_iter().flatten() {
            // `null` equals an absent field, and Go's types write absent fields so.
            if inner.is_null() || is_zero(name, inner) {
                continue;
            }
            let at = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
            match self.rule_of(name) {
                Some(field) => field.check(inner, features, &at, problems),
                None => problems.push(Problem::disallowed(at)),
            }
        }
    }
}

impl FieldRule {
    /// Checks the value of one field, or each element of it if the value is a list.
    fn check(self, value: &Value, features: &Features, path: &str, problems: &mut Vec<Problem>) {
        let mask = match self {
            // The value has rules of its own elsewhere, or none.
            Any => return,
            In(mask) => mask,
            // Knative's message does not name the feature: it is the same as for a field in no table.
            If(feature) | IfIn(feature, _) if !(feature.on)(features) => {
                problems.push(Problem::disallowed(path));
                return;
            }
            If(_) => return,
            IfIn(_, mask) => mask,
        };
        match value.as_array() {
            None => mask.check(value, features, path, problems),
            // A list of objects has one mask for every element.
            Some(all) => {
                for (index, one) in all.iter().enumerate() {
                    mask.check(one, features, &format!("{path}[{index}]"), problems);
                }
            }
        }
    }
}
