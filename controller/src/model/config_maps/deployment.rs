//! Pure: `config-deployment`: digests, deadlines, and settings of Revision pods.
//!
//! Keys, defaults, bounds and messages: knative/serving `pkg/deployment/config.go` at 98e5ef9. Keys of Knative's
//! sidecar are accepted and have no effect, since there is none. Knative appends its reasons to the message about an
//! invalid runtime class, and refuses invalid label selectors as well; Rouse does neither.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use common::wire::is_dns_subdomain;
use serde::Deserialize;

use super::{ConfigMapSettings, keys::ConfigMapReader};
use crate::model::go_values::GoDuration;

/// Preference of a Revision's pods for nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DefaultAffinityType {
    /// No preference: the scheduler decides.
    None,
    /// Prefers nodes without a pod of the same Revision (`prefer-spread-revision-over-nodes`).
    Spread,
}

/// `config-deployment`, checked against its bounds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeploymentConfig {
    /// `registries-skipping-tag-resolving`: registries whose tags are not resolved. Default kind.local, ko.local,
    /// dev.local.
    pub skipped_registries: BTreeSet<String>,
    /// `digest-resolution-timeout` of one image. Default 10 s, above 0.
    pub digest_timeout: Duration,
    /// `progress-deadline` of Deployments. Default 600 s, whole seconds above 0.
    pub progress_deadline: Duration,
    /// `default-affinity-type` of pods. Default spread.
    pub affinity: DefaultAffinityType,
    /// `pod-is-always-schedulable`: true if a pod without a node is no failure. Default false.
    pub always_schedulable: bool,
    /// `bind-pods`, Rouse's own: true if pods without constraints are bound to a node with their image, without the
    /// scheduler. Default false.
    pub bind_pods: bool,
    /// `wake-zone-preference`, Rouse's own: true if the first pod of a Revision prefers the zone that it was asked for
    /// from. Default true.
    pub prefers_wake_zone: bool,
    runtime_classes: BTreeMap<String, RuntimeClassSelector>,
}

/// Selector of the Revisions that get a runtime class.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
struct RuntimeClassSelector {
    selector: BTreeMap<String, String>,
}

impl Default for DeploymentConfig {
    fn default() -> Self {
        let skipped = ["kind.local", "ko.local", "dev.local"];
        Self {
            skipped_registries: skipped.into_iter().map(str::to_owned).collect(),
            digest_timeout: Duration::from_secs(10),
            progress_deadline: Duration::from_secs(600),
            affinity: DefaultAffinityType::Spread,
            always_schedulable: false,
            bind_pods: false,
            prefers_wake_zone: true,
            runtime_classes: BTreeMap::new(),
        }
    }
}

impl DeploymentConfig {
    /// Runtime classes by name, with the labels that a Revision must have for each.
    pub fn runtime_classes(&self) -> BTreeMap<String, BTreeMap<String, String>> {
        let all = self.runtime_classes.iter();
        all.map(|(name, it)| (name.clone(), it.selector.clone())).collect()
    }
}

/// Name whose selector matches with the most labels; among equals the first by name.
pub(crate) fn best_selector_match<'a>(
    all: impl Iterator<Item = (&'a str, &'a BTreeMap<String, String>)>,
    labels: &BTreeMap<String, String>,
) -> Option<&'a str> {
    let matches = |choice: &(&str, &BTreeMap<String, String>)| {
        choice.1.iter().all(|(label, value)| labels.get(label) == Some(value))
    };
    let matching = all.filter(matches);
    // `max_by` returns the last of equal elements, so names compare in reverse.
    let best = matching.max_by(|a, b| a.1.len().cmp(&b.1.len()).then_with(|| b.0.cmp(a.0)));
    // `config-domain` may have an empty key, which only draws a warning.
    best.map(|(name, _)| name).filter(|name| !name.is_empty())
}

impl ConfigMapSettings for DeploymentConfig {
    const NAME: &'static str = "config-deployment";

    fn read(keys: &mut ConfigMapReader<'_>) -> Self {
        keys.accept_renamed(&[
            ("progressDeadline", "progress-deadline"),
            ("digestResolutionTimeout", "digest-resolution-timeout"),
            ("registriesSkippingTagResolving", "registries-skipping-tag-resolving"),
        ]);
        accept_sidecar_keys(keys);
        let mut it = Self::default();
        keys.read_names("registries-skipping-tag-resolving", &mut it.skipped_registries);
        keys.read_bool("pod-is-always-schedulable", &mut it.always_schedulable);
        keys.read_bool("bind-pods", &mut it.bind_pods);
        keys.read_bool("wake-zone-preference", &mut it.prefers_wake_zone);
        it.progress_deadline =
            read_positive_duration(keys, "progress-deadline", it.progress_deadline);
        // Kubernetes counts the deadline of a Deployment in whole seconds.
        if it.progress_deadline.subsec_nanos() != 0 {
            let was = GoDuration::from(it.progress_deadline);
            keys.add_error(format!(
                "progress-deadline must be rounded to a whole second, was: {was}"
            ));
        }
        it.digest_timeout =
            read_positive_duration(keys, "digest-resolution-timeout", it.digest_timeout);
        it.affinity = read_affinity(keys);
        it.runtime_classes = read_runtime_classes(keys);
        it
    }
}

/// Accepts the keys of Knative's sidecar, of this and older releases.
fn accept_sidecar_keys(keys: &mut ConfigMapReader<'_>) {
    const WHY: &str = "there is no sidecar";
    for key in [
        "queue-sidecar-image",
        "queue-sidecar-cpu-request",
        "queue-sidecar-cpu-limit",
        "queue-sidecar-memory-request",
        "queue-sidecar-memory-limit",
        "queue-sidecar-ephemeral-storage-request",
        "queue-sidecar-ephemeral-storage-limit",
        "queue-sidecar-token-audiences",
        "queue-sidecar-tokens",
        "queue-sidecar-rootca",
        "queue-sidecar-tls-min-version",
        "queue-sidecar-tls-max-version",
        "queue-sidecar-tls-cipher-suites",
        "queue-sidecar-tls-curve-preferences",
        // Names of older releases:
        "queueSidecarImage",
        "queueSidecarCPURequest",
        "queueSidecarCPULimit",
        "queueSidecarMemoryRequest",
        "queueSidecarMemoryLimit",
        "queueSidecarEphemeralStorageRequest",
        "queueSidecarEphemeralStorageLimit",
    ] {
        keys.accept_without_effect(&[(key, WHY)]);
    }
    for key in ["concurrency-state-endpoint", "concurrencyStateEndpoint"] {
        keys.accept_without_effect(&[(key, "pods are frozen by rouse.dev/standby")]);
    }
}

fn read_positive_duration(
    keys: &mut ConfigMapReader<'_>,
    key: &'static str,
    default: Duration,
) -> Duration {
    let mut span = GoDuration::from(default);
    keys.read_duration(key, &mut span);
    if span.0 <= 0 {
        keys.add_error(format!("{key} cannot be a non-positive duration, was {span}"));
    }
    span.to_duration()
}

fn read_affinity(keys: &mut ConfigMapReader<'_>) -> DefaultAffinityType {
    let key = "default-affinity-type";
    match keys.get(key) {
        None | Some("prefer-spread-revision-over-nodes") => DefaultAffinityType::Spread,
        Some("none") => DefaultAffinityType::None,
        Some(other) => {
            keys.add_error(format!("unsupported {key} value: {other:?}"));
            // The returned value is dropped with the refused ConfigMap.
            DefaultAffinityType::Spread
        }
    }
}

fn read_runtime_classes(keys: &mut ConfigMapReader<'_>) -> BTreeMap<String, RuntimeClassSelector> {
    let key = "runtime-class-name";
    let text = keys.get(key).unwrap_or_default();
    // An empty text sets no classes, but is no YAML mapping either.
    if text.trim().is_empty() {
        return BTreeMap::new();
    }
    let classes: BTreeMap<String, Option<RuntimeClassSelector>> = match serde_norway::from_str(text)
    {
        Ok(classes) => classes,
        Err(error) => {
            keys.add_error(format!("{key} cannot be parsed, please check the format: {error}"));
            return BTreeMap::new();
        }
    };
    // The API server would refuse a pod with such a class, and every Revision would fail.
    for class in classes.keys().filter(|class| !is_dns_subdomain(class)) {
        keys.add_error(format!("{key} {class} selector not valid DNSSubdomain"));
    }
    classes.into_iter().map(|(class, it)| (class, it.unwrap_or_default())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{
        config_maps::{ParsedConfigMap, read},
        problem::problems_line,
    };

    fn map(pairs: &[(&str, &str)]) -> Result<ParsedConfigMap<DeploymentConfig>, String> {
        let data = pairs.iter().map(|&(key, text)| (key.into(), text.into())).collect();
        read::<DeploymentConfig>(&data).map_err(|it| problems_line(&it))
    }

    #[test]
    fn every_key_is_followed() {
        assert_eq!(map(&[]).map(|it| it.value), Ok(DeploymentConfig::default()));
        let expected = DeploymentConfig {
            skipped_registries: ["a.b".to_owned(), "c".to_owned()].into(),
            digest_timeout: Duration::from_millis(60),
            progress_deadline: Duration::from_secs(444),
            affinity: DefaultAffinityType::None,
            always_schedulable: true,
            bind_pods: true,
            prefers_wake_zone: false,
            runtime_classes: BTreeMap::new(),
        };
        let read = map(&[
            ("registries-skipping-tag-resolving", "a.b, c"),
            ("digest-resolution-timeout", "60ms"),
            ("progress-deadline", "444s"),
            ("default-affinity-type", "none"),
            ("pod-is-always-schedulable", "true"),
            ("bind-pods", "true"),
            ("wake-zone-preference", "false"),
        ]);
        assert_eq!(read, Ok(ParsedConfigMap { value: expected, warnings: vec![] }));
    }

    #[test]
    fn sidecar_keys_are_accepted_with_a_warning() {
        let read = map(&[("queue-sidecar-image", "x"), ("queueSidecarCPURequest", "25m")]).unwrap();
        assert_eq!(read.value, DeploymentConfig::default());
        let expected = [
            "key \"queue-sidecar-image\" has no effect: there is no sidecar",
            "key \"queueSidecarCPURequest\" has no effect: there is no sidecar",
        ];
        assert_eq!(read.warnings, expected);
    }

    #[test]
    fn the_runtime_class_with_the_most_labels_wins() {
        let classes = "gvisor: {}\nkata:\n  selector:\n    some: \"value\"\nabc:\n";
        let read = map(&[("runtime-class-name", classes)]).unwrap().value.runtime_classes();
        let class_for = |pairs: &[(&str, &str)]| {
            let labels = pairs.iter().map(|&(a, b)| (a.to_owned(), b.to_owned())).collect();
            best_selector_match(read.iter().map(|(name, it)| (name.as_str(), it)), &labels)
        };
        assert_eq!(class_for(&[]), Some("abc"));
        assert_eq!(class_for(&[("some", "value")]), Some("kata"));
        assert_eq!(DeploymentConfig::default().runtime_classes(), BTreeMap::new());
    }

    #[test]
    fn refused_values_have_the_expected_messages() {
        for (pair, expected) in [
            (
                ("progress-deadline", "-1s"),
                "progress-deadline cannot be a non-positive duration, was -1s",
            ),
            (
                ("progress-deadline", "1500ms"),
                "progress-deadline must be rounded to a whole second, was: 1.5s",
            ),
            (
                ("digest-resolution-timeout", "0s"),
                "digest-resolution-timeout cannot be a non-positive duration, was 0s",
            ),
            (
                ("default-affinity-type", "coconut"),
                "unsupported default-affinity-type value: \"coconut\"",
            ),
            (
                ("runtime-class-name", "???: {}"),
                "runtime-class-name ??? selector not valid DNSSubdomain",
            ),
        ] {
            assert_eq!(map(&[pair]), Err(expected.to_owned()), "{pair:?}");
        }
        let malformed = map(&[("runtime-class-name", "a: [")]).unwrap_err();
        let expected_start = "runtime-class-name cannot be parsed, please check the format: ";
        assert!(malformed.starts_with(expected_start));
    }
}
