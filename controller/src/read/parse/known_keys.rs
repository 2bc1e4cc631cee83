//! Pure: labels and annotations of Knative's groups and of Rouse's: places where each has an effect, and warnings for
//! all other places.
//!
//! Sources: knative/serving `pkg/apis/{serving,autoscaling}/register.go` at 98e5ef9, knative/networking
//! `pkg/apis/networking/register.go` at 17b28c6. Keys of other groups are their users' own.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::Value;

use super::settings::RuleSettings;
use crate::model::{
    cluster_state::PlatformKind,
    config_maps::network::OWN_INGRESS_CLASS,
    knative::key,
    object::hash::APPLIED_ANNOTATION,
    problem::Problem,
    scale_policy::{self, AutoscalerClass},
};

/// Object, or part of one, that has labels and annotations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MetadataPlace {
    /// Metadata of a Knative Service.
    Service,
    /// Metadata of a Configuration.
    Configuration,
    /// Metadata of a Route.
    Route,
    /// Metadata of a DomainMapping.
    DomainMapping,
    /// Metadata of a Revision.
    Revision,
    /// Metadata in a Revision's template.
    Template,
}

use MetadataPlace::{Configuration, DomainMapping, Revision, Route, Service, Template};

/// One known label or annotation, and the places where it has an effect.
#[derive(Debug)]
pub(crate) struct KnownKey {
    /// Spellings of the key: the present one first, then retired ones that are still read.
    pub names: &'static [&'static str],
    /// Places where the key has an effect.
    pub places: &'static [MetadataPlace],
    /// Explanation in the warning for all other places.
    pub warning_elsewhere: &'static str,
}

const fn known_key(
    names: &'static [&'static str],
    places: &'static [MetadataPlace],
    warning_elsewhere: &'static str,
) -> KnownKey {
    KnownKey { names, places, warning_elsewhere }
}

/// Groups in which only the keys listed here have a meaning.
const KNOWN_GROUPS: [&str; 8] = [
    "serving.knative.dev",
    scale_policy::AUTOSCALING_GROUP,
    "networking.knative.dev",
    "features.knative.dev",
    "queue.sidecar.serving.knative.dev",
    "networking.internal.knative.dev",
    "autoscaling.internal.knative.dev",
    "rouse.dev",
];

const NETWORKING: &str = "networking.knative.dev/";
const ROUTE_PLACES: &[MetadataPlace] = &[Service, Route];
/// Places of keys that concern the pods behind a name: a Route's annotation counts before a Revision's.
const PATH_PLACES: &[MetadataPlace] = &[Service, Route, Template, Revision];
const REVISION_PLACES: &[MetadataPlace] = &[Template, Revision];
/// Places of keys that the platform itself writes.
const PLATFORM_PLACES: &[MetadataPlace] = &[Configuration, Route, Revision];
const CREATOR_PLACES: &[MetadataPlace] = &[Service, Configuration, Route, DomainMapping, Revision];
/// Places of keys that have no effect anywhere: the warning states why.
const NOWHERE: &[MetadataPlace] = &[];

const ON_ROUTE: &str = "it belongs on a Service or a Route, under \"metadata\"";
const ON_DOMAIN_MAPPING: &str = "it belongs on a DomainMapping, under \"metadata\"";
const ON_TEMPLATE: &str = "it belongs on a template, under \"spec.template.metadata\"";
const NO_SIDECAR: &str = "pods have no sidecar here";
const WRITTEN_BY_PLATFORM: &str = "the platform writes it";

pub(crate) static KNOWN_ANNOTATIONS: [KnownKey; 53] = [
    known_key(&key::ROLLOUT_DURATION, ROUTE_PLACES, ON_ROUTE),
    known_key(&key::HTTP_PROTOCOL, &[Service, Route, DomainMapping], ON_ROUTE),
    known_key(&[key::CLIENT_CA], &[DomainMapping], ON_DOMAIN_MAPPING),
    known_key(&[key::CLIENT_AUTH], &[DomainMapping], ON_DOMAIN_MAPPING),
    known_key(&[key::HSTS], &[DomainMapping], ON_DOMAIN_MAPPING),
    known_key(&[key::TLS], &[DomainMapping], ON_DOMAIN_MAPPING),
    known_key(&[key::HOST], &[DomainMapping], ON_DOMAIN_MAPPING),
    known_key(&[key::PATH_PREFIX], &[DomainMapping], ON_DOMAIN_MAPPING),
    known_key(&[key::STRIP_PREFIX], &[DomainMapping], ON_DOMAIN_MAPPING),
    known_key(&[key::PATH], PATH_PLACES, ON_ROUTE),
    known_key(&[key::GATEWAY_PORT], ROUTE_PLACES, ON_ROUTE),
    known_key(&[key::TRAFFIC_DISTRIBUTION], PATH_PLACES, ON_ROUTE),
    known_key(&[key::PROTOCOL], REVISION_PLACES, ON_TEMPLATE),
    known_key(&[key::STANDBY], REVISION_PLACES, ON_TEMPLATE),
    known_key(&[key::STANDBY_MEMORY], REVISION_PLACES, ON_TEMPLATE),
    known_key(&[key::STANDBY_TTL], REVISION_PLACES, ON_TEMPLATE),
    known_key(&key::PROGRESS_DEADLINE, REVISION_PLACES, ON_TEMPLATE),
    known_key(&[key::NO_GC], REVISION_PLACES, ON_TEMPLATE),
    known_key(&key::INGRESS_CLASS, ROUTE_PLACES, ON_ROUTE),
    known_key(&key::CERTIFICATE_CLASS, &[Service, Route, DomainMapping], ON_ROUTE),
    known_key(&key::DISABLE_EXTERNAL_DOMAIN_TLS, &[Service, Route, DomainMapping], ON_ROUTE),
    known_key(
        &["features.knative.dev/http-full-duplex"],
        NOWHERE,
        "requests and responses always flow at the same time",
    ),
    known_key(&["features.knative.dev/queueproxy-podinfo"], NOWHERE, NO_SIDECAR),
    known_key(&[key::LAST_PINNED], NOWHERE, "nothing reads it any more"),
    known_key(&[key::CREATOR], CREATOR_PLACES, WRITTEN_BY_PLATFORM),
    known_key(&[key::LAST_MODIFIER], CREATOR_PLACES, WRITTEN_BY_PLATFORM),
    known_key(&[key::ROUTES], PLATFORM_PLACES, WRITTEN_BY_PLATFORM),
    known_key(&[key::ROUTING_STATE_MODIFIED], PLATFORM_PLACES, WRITTEN_BY_PLATFORM),
    known_key(&[key::ALLOCATIONS], PLATFORM_PLACES, WRITTEN_BY_PLATFORM),
    known_key(&[key::INITIAL_SCALE_REACHED], PLATFORM_PLACES, WRITTEN_BY_PLATFORM),
    known_key(&[APPLIED_ANNOTATION], PLATFORM_PLACES, WRITTEN_BY_PLATFORM),
    sidecar_key(&[
        "queue.sidecar.serving.knative.dev/resource-percentage",
        "queue.sidecar.serving.knative.dev/resourcePercentage",
    ]),
    sidecar_key(&[
        "queue.sidecar.serving.knative.dev/cpu-resource-request",
        "queue.sidecar.serving.knative.dev/cpuResourceRequest",
    ]),
    sidecar_key(&[
        "queue.sidecar.serving.knative.dev/cpu-resource-limit",
        "queue.sidecar.serving.knative.dev/cpuResourceLimit",
    ]),
    sidecar_key(&[
        "queue.sidecar.serving.knative.dev/memory-resource-request",
        "queue.sidecar.serving.knative.dev/memoryResourceRequest",
    ]),
    sidecar_key(&[
        "queue.sidecar.serving.knative.dev/memory-resource-limit",
        "queue.sidecar.serving.knative.dev/memoryResourceLimit",
    ]),
    sidecar_key(&[
        "queue.sidecar.serving.knative.dev/ephemeral-storage-resource-request",
        "queue.sidecar.serving.knative.dev/ephemeralStorageResourceRequest",
    ]),
    sidecar_key(&[
        "queue.sidecar.serving.knative.dev/ephemeral-storage-resource-limit",
        "queue.sidecar.serving.knative.dev/ephemeralStorageResourceLimit",
    ]),
    autoscaling_key(&["autoscaling.knative.dev/class"]),
    autoscaling_key(&["autoscaling.knative.dev/metric"]),
    autoscaling_key(&["autoscaling.knative.dev/target"]),
    autoscaling_key(&["autoscaling.knative.dev/window"]),
    autoscaling_key(&["autoscaling.knative.dev/min-scale", "autoscaling.knative.dev/minScale"]),
    autoscaling_key(&["autoscaling.knative.dev/max-scale", "autoscaling.knative.dev/maxScale"]),
    autoscaling_key(&[
        "autoscaling.knative.dev/initial-scale",
        "autoscaling.knative.dev/initialScale",
    ]),
    autoscaling_key(&[
        "autoscaling.knative.dev/activation-scale",
        "autoscaling.knative.dev/activationScale",
    ]),
    autoscaling_key(&[
        "autoscaling.knative.dev/target-utilization-percentage",
        "autoscaling.knative.dev/targetUtilizationPercentage",
    ]),
    autoscaling_key(&[
        "autoscaling.knative.dev/target-burst-capacity",
        "autoscaling.knative.dev/targetBurstCapacity",
    ]),
    autoscaling_key(&[
        "autoscaling.knative.dev/panic-window-percentage",
        "autoscaling.knative.dev/panicWindowPercentage",
    ]),
    autoscaling_key(&[
        "autoscaling.knative.dev/panic-threshold-percentage",
        "autoscaling.knative.dev/panicThresholdPercentage",
    ]),
    autoscaling_key(&[
        "autoscaling.knative.dev/scale-down-delay",
        "autoscaling.knative.dev/scaleDownDelay",
    ]),
    autoscaling_key(&[
        "autoscaling.knative.dev/scale-to-zero-pod-retention-period",
        "autoscaling.knative.dev/scaleToZeroPodRetentionPeriod",
    ]),
    autoscaling_key(&[
        "autoscaling.knative.dev/metric-aggregation-algorithm",
        "autoscaling.knative.dev/metricAggregationAlgorithm",
    ]),
];

pub(crate) static KNOWN_LABELS: [KnownKey; 13] = [
    known_key(&[key::VISIBILITY], ROUTE_PLACES, ON_ROUTE),
    known_key(
        &["serving.knative.dev/visibility"],
        NOWHERE,
        "use networking.knative.dev/visibility to hide a name",
    ),
    known_key(&[key::SERVICE], PLATFORM_PLACES, WRITTEN_BY_PLATFORM),
    known_key(&[key::SERVICE_UID], PLATFORM_PLACES, WRITTEN_BY_PLATFORM),
    known_key(&[key::CONFIGURATION], PLATFORM_PLACES, WRITTEN_BY_PLATFORM),
    known_key(&[key::CONFIGURATION_UID], PLATFORM_PLACES, WRITTEN_BY_PLATFORM),
    known_key(&[key::CONFIGURATION_GENERATION], PLATFORM_PLACES, WRITTEN_BY_PLATFORM),
    known_key(&[key::REVISION], PLATFORM_PLACES, WRITTEN_BY_PLATFORM),
    known_key(&[key::REVISION_UID], PLATFORM_PLACES, WRITTEN_BY_PLATFORM),
    known_key(&[key::ROUTE], PLATFORM_PLACES, WRITTEN_BY_PLATFORM),
    known_key(&[key::ROUTE_NAMESPACE], PLATFORM_PLACES, WRITTEN_BY_PLATFORM),
    known_key(&[key::ROUTING_STATE], PLATFORM_PLACES, WRITTEN_BY_PLATFORM),
    known_key(&[key::DEPLOYMENT_HASH], PLATFORM_PLACES, WRITTEN_BY_PLATFORM),
];

const fn sidecar_key(names: &'static [&'static str]) -> KnownKey {
    known_key(names, NOWHERE, NO_SIDECAR)
}

const fn autoscaling_key(names: &'static [&'static str]) -> KnownKey {
    known_key(names, REVISION_PLACES, ON_TEMPLATE)
}

/// Keys that a HorizontalPodAutoscaler is made from; the others concern Knative's autoscaler class only.
const HPA_KEYS: [&str; 7] =
    ["class", "metric", "target", "window", "min-scale", "max-scale", "initial-scale"];

/// Warns of labels and annotations without effect at a place, and of retired spellings.
pub(super) fn warn_unused_keys(
    meta: &ObjectMeta,
    place: MetadataPlace,
    at: &str,
    warnings: &mut Vec<Problem>,
) {
    let none = BTreeMap::new();
    let annotations = meta.annotations.as_ref().unwrap_or(&none);
    let labels = meta.labels.as_ref().unwrap_or(&none);
    let class = AutoscalerClass::from_annotations(annotations);
    for (kind, all, table) in
        [("annotations", annotations, &KNOWN_ANNOTATIONS[..]), ("labels", labels, &KNOWN_LABELS)]
    {
        // Validation refuses these on a template, so a warning besides would be noise.
        let refused =
            |name: &str| place == Template && kind == "annotations" && name.starts_with(NETWORKING);
        for (name, value) in all.iter().filter(|(name, _)| !refused(name)) {
            if let Some(message) = key_warning(name, value, place, class, table) {
                warnings.push(Problem::new(format!("{at}.{kind}.{name}"), message));
            }
        }
    }
}

/// Returns the warning for a key of one of Knative's groups; `None`: it has its usual effect, or is no such key.
fn key_warning(
    name: &str,
    value: &str,
    place: MetadataPlace,
    class: AutoscalerClass,
    table: &[KnownKey],
) -> Option<String> {
    let group =
        name.split_once('/').map(|(group, _)| group).filter(|it| KNOWN_GROUPS.contains(it))?;
    let no_effect = |why: &str| Some(format!("{name} has no effect: {why}"));
    let is_autoscaling_key = group == scale_policy::AUTOSCALING_GROUP;
    // Validation refuses these at such places, so a warning besides would be noise.
    if is_autoscaling_key && (ROUTE_PLACES.contains(&place) || place == Configuration) {
        return None;
    }
    // Foreign autoscalers may read keys that are unknown here.
    if is_autoscaling_key && REVISION_PLACES.contains(&place) && class == AutoscalerClass::Foreign {
        return None;
    }
    let Some(known_key) = table.iter().find(|it| it.names.contains(&name)) else {
        return no_effect("nothing reads it");
    };
    let newest = known_key.names.first()?;
    if !known_key.places.contains(&place) {
        return no_effect(known_key.warning_elsewhere);
    }
    let short_name = newest.rsplit('/').next().unwrap_or_default();
    if is_autoscaling_key && class == AutoscalerClass::Hpa && !HPA_KEYS.contains(&short_name) {
        return no_effect("a HorizontalPodAutoscaler has no such setting");
    }
    let is_count = matches!(short_name, "min-scale" | "initial-scale");
    if is_autoscaling_key && class == AutoscalerClass::Hpa && is_count && value == "0" {
        return no_effect("a HorizontalPodAutoscaler keeps at least one pod");
    }
    if name == key::VISIBILITY && !matches!(value, "" | "cluster-local") {
        return no_effect("only cluster-local hides a name");
    }
    (name != *newest).then(|| format!("{name} is an older spelling, use {newest}"))
}

/// Warns of the class of another ingress on a Service or Route while no other ingress is trusted.
pub(super) fn warn_ingress_class(
    meta: &ObjectMeta,
    place: MetadataPlace,
    settings: &RuleSettings<'_>,
    warnings: &mut Vec<Problem>,
) {
    if settings.trusts_ingresses || !ROUTE_PLACES.contains(&place) {
        return;
    }
    let reason = match settings.platform {
        PlatformKind::Local => "the local node has no other ingress",
        PlatformKind::Kubernetes => {
            "rouse.dev.trusted-ingresses of config-network is empty, so the gateway serves all Routes"
        }
    };
    for (name, class) in meta.annotations.iter().flatten() {
        let is_class = key::INGRESS_CLASS.contains(&name.as_str());
        if is_class && !["", OWN_INGRESS_CLASS].contains(&class.as_str()) {
            let message = format!("{name} has no effect: {reason}");
            warnings.push(Problem::new(format!("metadata.annotations.{name}"), message));
        }
    }
}

/// Warns of metadata fields of a template that its Revision does not get.
pub(super) fn warn_template_metadata(
    metadata: Option<&Value>,
    at: &str,
    warnings: &mut Vec<Problem>,
) {
    for (field, value) in metadata.and_then(Value::as_object).into_iter().flatten() {
        let read = ["name", "labels", "annotations"].contains(&field.as_str());
        if !read && !value.is_null() {
            let message =
                format!("{field} has no effect: a Revision gets name, labels and annotations");
            warnings.push(Problem::new(format!("{at}.{field}"), message));
        }
    }
}
