//! Pure: `config-features`: which parts of a PodSpec users may write, and which behaviours are on.
//!
//! Keys and defaults: knative/serving `pkg/apis/config/features.go` at 98e5ef9.

use super::{ConfigMap, keys::Keys};

/// How far a feature is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flag {
    /// On.
    Enabled,
    /// Users may ask for it.
    Allowed,
    /// Off.
    Disabled,
}

impl Flag {
    /// Whether users may use the field behind it.
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

/// `secure-pod-defaults`: what a security context gets where the user wrote nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SecureDefaults {
    /// Nothing.
    Disabled,
    /// No more privileges, the runtime's seccomp profile, no capabilities; root stays possible.
    AllowRootBounded,
    /// The same, and not as root.
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
        /// `config-features`, checked.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct Features {
            $($(#[$doc])* #[doc = concat!("`", $key, "`.")] pub $field: Flag,)*
            /// `secure-pod-defaults`.
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

        impl ConfigMap for Features {
            const NAME: &'static str = "config-features";

            fn read(keys: &mut Keys<'_>) -> Self {
                let mut it = Self::default();
                $(flag(keys, $key, &mut it.$field, Flag::parse);)*
                flag(keys, "secure-pod-defaults", &mut it.secure_pod_defaults, SecureDefaults::parse);
                removed(keys);
                idle(keys);
                it
            }
        }
    };
}

features! {
    /// Several containers in a pod.
    multi_container, "multi-container", Enabled;
    /// Probes on all of them.
    multi_container_probing, "multi-container-probing", Disabled;
    /// Choosing a tag by header.
    tag_header_based_routing, "tag-header-based-routing", Disabled;
    /// `securityContext.capabilities.add`.
    containerspec_addcapabilities, "kubernetes.containerspec-addcapabilities", Disabled;
    /// `affinity`.
    podspec_affinity, "kubernetes.podspec-affinity", Disabled;
    /// `topologySpreadConstraints`.
    podspec_topologyspreadconstraints, "kubernetes.podspec-topologyspreadconstraints", Disabled;
    /// `hostAliases`.
    podspec_hostaliases, "kubernetes.podspec-hostaliases", Disabled;
    /// `nodeSelector`.
    podspec_nodeselector, "kubernetes.podspec-nodeselector", Disabled;
    /// `tolerations`.
    podspec_tolerations, "kubernetes.podspec-tolerations", Disabled;
    /// `env[].valueFrom.fieldRef`.
    podspec_fieldref, "kubernetes.podspec-fieldref", Disabled;
    /// `runtimeClassName`.
    podspec_runtimeclassname, "kubernetes.podspec-runtimeclassname", Disabled;
    /// `dnsPolicy`.
    podspec_dnspolicy, "kubernetes.podspec-dnspolicy", Disabled;
    /// `dnsConfig`.
    podspec_dnsconfig, "kubernetes.podspec-dnsconfig", Disabled;
    /// `securityContext` of the pod.
    podspec_securitycontext, "kubernetes.podspec-securitycontext", Disabled;
    /// `shareProcessNamespace`.
    podspec_shareprocessnamespace, "kubernetes.podspec-shareprocessnamespace", Disabled;
    /// `hostIPC`.
    podspec_hostipc, "kubernetes.podspec-hostipc", Disabled;
    /// `hostPID`.
    podspec_hostpid, "kubernetes.podspec-hostpid", Disabled;
    /// `hostNetwork`.
    podspec_hostnetwork, "kubernetes.podspec-hostnetwork", Disabled;
    /// `priorityClassName`.
    podspec_priorityclassname, "kubernetes.podspec-priorityclassname", Disabled;
    /// `schedulerName`.
    podspec_schedulername, "kubernetes.podspec-schedulername", Disabled;
    /// `initContainers`.
    podspec_init_containers, "kubernetes.podspec-init-containers", Disabled;
    /// Volumes of type `persistentVolumeClaim`.
    podspec_persistent_volume_claim, "kubernetes.podspec-persistent-volume-claim", Disabled;
    /// Writing to them.
    podspec_persistent_volume_write, "kubernetes.podspec-persistent-volume-write", Disabled;
    /// Volumes of type `emptyDir`.
    podspec_volumes_emptydir, "kubernetes.podspec-volumes-emptydir", Enabled;
    /// Volumes of type `hostPath`.
    podspec_volumes_hostpath, "kubernetes.podspec-volumes-hostpath", Disabled;
    /// Volumes of type `csi`.
    podspec_volumes_csi, "kubernetes.podspec-volumes-csi", Disabled;
    /// Volumes of type `ephemeral`.
    podspec_volumes_ephemeral, "kubernetes.podspec-volumes-ephemeral", Disabled;
    /// Volumes of type `image`.
    podspec_volumes_image, "kubernetes.podspec-volumes-image", Disabled;
    /// `volumeMounts[].mountPropagation`.
    podspec_volumes_mount_propagation, "kubernetes.podspec-volumes-mount-propagation", Disabled;
}

/// Reads one flag. What cannot be read keeps the default, as in Knative, but is told.
fn flag<T: Copy>(keys: &mut Keys<'_>, key: &'static str, to: &mut T, parse: fn(&str) -> Option<T>) {
    let Some(text) = keys.get(key) else { return };
    match parse(text) {
        Some(value) => *to = value,
        None => keys.warn(format!("{key} = {text:?} is no value of it; its default holds")),
    }
}

/// Flags of older releases.
fn removed(keys: &mut Keys<'_>) {
    keys.without_effect(&[
        ("kubernetes.podspec-dryrun", "ask for it with ?dryRun=All"),
        ("responsive-revision-gc", "it is always on: see config-gc"),
        ("concurrency-state-endpoint", "containers are not frozen here"),
    ]);
}

/// Flags for what there is not here.
fn idle(keys: &mut Keys<'_>) {
    for (key, why) in [
        ("autodetect-http2", "name the port of a pod that speaks HTTP/2 \"h2c\""),
        ("queueproxy.mount-podinfo", "there is no sidecar"),
        ("queueproxy.resource-defaults", "there is no sidecar"),
    ] {
        keys.idle(key, &["disabled"], why);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config_maps::{Read, read};

    fn map(pairs: &[(&str, &str)]) -> Result<Read<Features>, Vec<crate::parse::Problem>> {
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
        let want = Features {
            podspec_affinity: Flag::Enabled,
            podspec_fieldref: Flag::Allowed,
            multi_container: Flag::Disabled,
            secure_pod_defaults: SecureDefaults::AllowRootBounded,
            ..Features::default()
        };
        assert_eq!(read, Ok(Read { value: want, warnings: vec![] }));
    }

    #[test]
    fn a_typo_keeps_the_default_and_is_told() {
        let read =
            map(&[("multi-container", "enabeld"), ("kubernetes.podspec-affinities", "enabled")]);
        let warnings = vec![
            r#"multi-container = "enabeld" is no value of it; its default holds"#.to_owned(),
            r#"key "kubernetes.podspec-affinities" is unknown and has no effect"#.to_owned(),
        ];
        assert_eq!(read, Ok(Read { value: Features::default(), warnings }));
    }

    #[test]
    fn only_an_enabled_or_allowed_feature_permits() {
        assert!(Flag::Enabled.permits() && Flag::Allowed.permits() && !Flag::Disabled.permits());
    }
}
