//! Pure: `config-features`: PodSpec fields that users may set, and optional behaviours.
//!
//! Keys and defaults: knative/serving `pkg/apis/config/features.go` at 98e5ef9.

use super::{ConfigMapSettings, keys::ConfigMapReader};

/// State of a feature flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flag {
    /// The feature is on for all.
    Enabled,
    /// The feature is off, but users may ask for it.
    Allowed,
    /// The feature is off, and asking for it is refused.
    Disabled,
}

impl Flag {
    /// Returns true if users may set the field behind the feature.
    pub fn permits(self) -> bool {
        match self {
            Self::Enabled | Self::Allowed => true,
            Self::Disabled => false,
        }
    }

    fn parse(text: &str) -> Option<Self> {
        match text.to_ascii_lowercase().as_str() {
            "enabled" => Some(Self::Enabled),
            "allowed" => Some(Self::Allowed),
            "disabled" => Some(Self::Disabled),
            _ => None,
        }
    }
}

/// `secure-pod-defaults`: defaults of security contexts, for fields that the user left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SecureDefaults {
    /// Leaves security contexts unchanged.
    Disabled,
    /// Forbids privilege escalation, sets the runtime's seccomp profile, drops capabilities; root stays possible.
    AllowRootBounded,
    /// Sets the values of [`Self::AllowRootBounded`], and forbids root.
    Enabled,
}

impl SecureDefaults {
    fn parse(text: &str) -> Option<Self> {
        match text.to_ascii_lowercase().as_str() {
            "disabled" => Some(Self::Disabled),
            "allowrootbounded" => Some(Self::AllowRootBounded),
            "enabled" => Some(Self::Enabled),
            _ => None,
        }
    }
}

/// Declares the flags once: field, key, default.
macro_rules! features {
    ($($(#[$doc:meta])* $field:ident, $key:literal, $default:ident;)*) => {
        /// `config-features`, one flag for each key.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct Features {
            $($(#[$doc])* #[doc = concat!("`", $key, "`.")] pub $field: Flag,)*
            /// `secure-pod-defaults`: defaults of security contexts.
            pub secure_pod_defaults: SecureDefaults,
        }

        impl Default for Features {
            fn default() -> Self {
                Self {
                    $($field: Flag::$default,)*
                    secure_pod_defaults: SecureDefaults::Disabled,
                }
            }
        }

        impl ConfigMapSettings for Features {
            const NAME: &'static str = "config-features";

            fn read(keys: &mut ConfigMapReader<'_>) -> Self {
                let mut it = Self::default();
                $(read_flag(keys, $key, &mut it.$field, Flag::parse);)*
                let secure = &mut it.secure_pod_defaults;
                read_flag(keys, "secure-pod-defaults", secure, SecureDefaults::parse);
                accept_older_flags(keys);
                accept_missing_features(keys);
                it
            }
        }
    };
}

features! {
    /// Several containers in a pod:
    multi_container, "multi-container", Enabled;
    /// Probes on all containers of a pod:
    multi_container_probing, "multi-container-probing", Disabled;
    /// Choice of a tag by a request header:
    tag_header_based_routing, "tag-header-based-routing", Disabled;
    /// Permits `securityContext.capabilities.add` of containers:
    containerspec_addcapabilities, "kubernetes.containerspec-addcapabilities", Disabled;
    /// Permits `affinity` of pods:
    podspec_affinity, "kubernetes.podspec-affinity", Disabled;
    /// Permits `topologySpreadConstraints` of pods:
    podspec_topologyspreadconstraints, "kubernetes.podspec-topologyspreadconstraints", Disabled;
    /// Permits `hostAliases` of pods:
    podspec_hostaliases, "kubernetes.podspec-hostaliases", Disabled;
    /// Permits `nodeSelector` of pods:
    podspec_nodeselector, "kubernetes.podspec-nodeselector", Disabled;
    /// Permits `tolerations` of pods:
    podspec_tolerations, "kubernetes.podspec-tolerations", Disabled;
    /// Permits `env[].valueFrom.fieldRef` of containers:
    podspec_fieldref, "kubernetes.podspec-fieldref", Disabled;
    /// Permits `runtimeClassName` of pods:
    podspec_runtimeclassname, "kubernetes.podspec-runtimeclassname", Disabled;
    /// Permits `dnsPolicy` of pods:
    podspec_dnspolicy, "kubernetes.podspec-dnspolicy", Disabled;
    /// Permits `dnsConfig` of pods:
    podspec_dnsconfig, "kubernetes.podspec-dnsconfig", Disabled;
    /// Permits `securityContext` of pods:
    podspec_securitycontext, "kubernetes.podspec-securitycontext", Disabled;
    /// Permits `shareProcessNamespace` of pods:
    podspec_shareprocessnamespace, "kubernetes.podspec-shareprocessnamespace", Disabled;
    /// Permits `hostIPC` of pods:
    podspec_hostipc, "kubernetes.podspec-hostipc", Disabled;
    /// Permits `hostPID` of pods:
    podspec_hostpid, "kubernetes.podspec-hostpid", Disabled;
    /// Permits `hostNetwork` of pods:
    podspec_hostnetwork, "kubernetes.podspec-hostnetwork", Disabled;
    /// Permits `priorityClassName` of pods:
    podspec_priorityclassname, "kubernetes.podspec-priorityclassname", Disabled;
    /// Permits `schedulerName` of pods:
    podspec_schedulername, "kubernetes.podspec-schedulername", Disabled;
    /// Permits `initContainers` of pods:
    podspec_init_containers, "kubernetes.podspec-init-containers", Disabled;
    /// Permits volumes of type `persistentVolumeClaim`:
    podspec_persistent_volume_claim, "kubernetes.podspec-persistent-volume-claim", Disabled;
    /// Permits writing to persistent volumes:
    podspec_persistent_volume_write, "kubernetes.podspec-persistent-volume-write", Disabled;
    /// Permits volumes of type `emptyDir`:
    podspec_volumes_emptydir, "kubernetes.podspec-volumes-emptydir", Enabled;
    /// Permits volumes of type `hostPath`:
    podspec_volumes_hostpath, "kubernetes.podspec-volumes-hostpath", Disabled;
    /// Permits volumes of type `csi`:
    podspec_volumes_csi, "kubernetes.podspec-volumes-csi", Disabled;
    /// Permits volumes of type `ephemeral`:
    podspec_volumes_ephemeral, "kubernetes.podspec-volumes-ephemeral", Disabled;
    /// Permits volumes of type `image`:
    podspec_volumes_image, "kubernetes.podspec-volumes-image", Disabled;
    /// Permits `volumeMounts[].mountPropagation` of containers:
    podspec_volumes_mount_propagation, "kubernetes.podspec-volumes-mount-propagation", Disabled;
}

/// Reads one flag. An invalid value keeps the default, as in Knative, but adds a warning.
fn read_flag<T: Copy>(
    keys: &mut ConfigMapReader<'_>,
    key: &'static str,
    target: &mut T,
    parse: fn(&str) -> Option<T>,
) {
    let Some(text) = keys.get(key) else { return };
    match parse(text) {
        Some(value) => *target = value,
        None => keys.add_warning(format!("{key} = {text:?} is no value of it; its default holds")),
    }
}

/// Accepts flags of older releases, which have no effect.
fn accept_older_flags(keys: &mut ConfigMapReader<'_>) {
    keys.accept_without_effect(&[
        ("kubernetes.podspec-dryrun", "ask for it with ?dryRun=All"),
        ("responsive-revision-gc", "it is always on: see config-gc"),
        ("concurrency-state-endpoint", "pods are frozen by rouse.dev/standby"),
    ]);
}

/// Accepts flags of features that do not exist here.
fn accept_missing_features(keys: &mut ConfigMapReader<'_>) {
    for (key, reason) in [
        ("autodetect-http2", "name the port of a pod that speaks HTTP/2 \"h2c\""),
        ("queueproxy.mount-podinfo", "there is no sidecar"),
        ("queueproxy.resource-defaults", "there is no sidecar"),
    ] {
        keys.warn_unless_usual(key, &["disabled"], reason);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config_maps::{ParsedConfigMap, read};

    fn map(
        pairs: &[(&str, &str)],
    ) -> Result<ParsedConfigMap<Features>, Vec<crate::model::problem::Problem>> {
        read(&pairs.iter().map(|&(key, text)| (key.into(), text.into())).collect())
    }

    #[test]
    fn flags_are_read_whatever_their_case() {
        let read = map(&[
            ("kubernetes.podspec-affinity", "ENABLED"),
            ("kubernetes.podspec-fieldref", "allowed"),
            ("multi-container", "Disabled"),
            ("secure-pod-defaults", "allowRootBounded"),
            ("_example", "tag-header-based-routing: enabled"),
        ]);
        let expected = Features {
            podspec_affinity: Flag::Enabled,
            podspec_fieldref: Flag::Allowed,
            multi_container: Flag::Disabled,
            secure_pod_defaults: SecureDefaults::AllowRootBounded,
            ..Features::default()
        };
        assert_eq!(read, Ok(ParsedConfigMap { value: expected, warnings: vec![] }));
    }

    #[test]
    fn a_typo_keeps_the_default_with_a_warning() {
        let read =
            map(&[("multi-container", "enabeld"), ("kubernetes.podspec-affinities", "enabled")]);
        let warnings = vec![
            r#"multi-container = "enabeld" is no value of it; its default holds"#.to_owned(),
            r#"key "kubernetes.podspec-affinities" is unknown and has no effect"#.to_owned(),
        ];
        assert_eq!(read, Ok(ParsedConfigMap { value: Features::default(), warnings }));
    }

    #[test]
    fn only_an_enabled_or_allowed_feature_permits() {
        assert!(Flag::Enabled.permits() && Flag::Allowed.permits() && !Flag::Disabled.permits());
    }
}
