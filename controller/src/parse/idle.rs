//! Pure: labels and annotations of Knative's groups and of Rouse's: places where each has an effect, and warnings for
//! all other places.
//!
//! knative/serving `pkg/apis/serving/register.go`, `pkg/apis/autoscaling/register.go`, knative/networking
//! `pkg/apis/networking/register.go`; knative.md §1.1. Keys of other groups are their users' own.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::Value;

use super::Problem;
use crate::{
    knative::key,
    kube::cache::APPLIED,
    policy::{self, AutoscalerClass},
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
    pub at: &'static [MetadataPlace],
    /// Explanation in the warning for all other places.
    pub why: &'static str,
}

const fn known(
    names: &'static [&'static str],
    at: &'static [MetadataPlace],
    why: &'static str,
) -> KnownKey {
    KnownKey { names, at, why }
}

/// Groups in which only the keys listed here have a meaning.
const GROUPS: [&str; 8] = [
    "serving.knative.dev",
    policy::GROUP,
    "networking.knative.dev",
    "features.knative.dev",
    "queue.sidecar.serving.knative.dev",
    "networking.internal.knative.dev",
    "autoscaling.internal.knative.dev",
    "rouse.dev",
];

const NETWORKING: &str = "networking.knative.dev/";
const ROUTED: &[MetadataPlace] = &[Service, Route];
const RUN: &[MetadataPlace] = &[Template, Revision];
/// Places of keys that the platform itself writes.
const WRITTEN: &[MetadataPlace] = &[Configuration, Route, Revision];
const SIGNED: &[MetadataPlace] = &[Service, Configuration, Route, DomainMapping, Revision];
const NOWHERE: &[MetadataPlace] = &[];

const ON_ROUTE: &str = "it belongs on a Service or a Route, under \"metadata\"";
const ON_TEMPLATE: &str = "it belongs on a template, under \"spec.template.metadata\"";
const NO_TLS: &str = "services are served without TLS";
const NO_SIDECAR: &str = "pods have no sidecar here";
const OURS: &str = "the platform writes it";

pub(crate) static ANNOTATIONS: [KnownKey; 40] = [
    known(&key::ROLLOUT_DURATION, ROUTED, ON_ROUTE),
    known(&key::HTTP_PROTOCOL, &[Service, Route, DomainMapping], ON_ROUTE),
    known(&[key::PATH], &[Service, Route, Template, Revision], ON_ROUTE),
    known(&key::PROGRESS_DEADLINE, RUN, ON_TEMPLATE),
    known(&[key::NO_GC], RUN, ON_TEMPLATE),
    known(&key::INGRESS_CLASS, NOWHERE, "one gateway serves every class"),
    known(&key::CERTIFICATE_CLASS, NOWHERE, NO_TLS),
    known(&key::DISABLE_EXTERNAL_DOMAIN_TLS, NOWHERE, NO_TLS),
    known(
        &["features.knative.dev/http-full-duplex"],
        NOWHERE,
        "requests and responses always flow at the same time",
    ),
    known(&["features.knative.dev/queueproxy-podinfo"], NOWHERE, NO_SIDECAR),
    known(&[key::LAST_PINNED], NOWHERE, "nothing reads it any more"),
    known(&[key::CREATOR], SIGNED, OURS),
    known(&[key::LAST_MODIFIER], SIGNED, OURS),
    known(&[key::ROUTES], WRITTEN, OURS),
    known(&[key::ROUTING_STATE_MODIFIED], WRITTEN, OURS),
    known(&[key::ALLOTTED], WRITTEN, OURS),
    known(&[key::REACHED], WRITTEN, OURS),
    known(&[APPLIED], WRITTEN, OURS),
    sidecar(&[
        "queue.sidecar.serving.knative.dev/resource-percentage",
        "queue.sidecar.serving.knative.dev/resourcePercentage",
    ]),
    sidecar(&[
        "queue.sidecar.serving.knative.dev/cpu-resource-request",
        "queue.sidecar.serving.knative.dev/cpuResourceRequest",
    ]),
    sidecar(&[
        "queue.sidecar.serving.knative.dev/cpu-resource-limit",
        "queue.sidecar.serving.knative.dev/cpuResourceLimit",
    ]),
    sidecar(&[
        "queue.sidecar.serving.knative.dev/memory-resource-request",
        "queue.sidecar.serving.knative.dev/memoryResourceRequest",
    ]),
    sidecar(&[
        "queue.sidecar.serving.knative.dev/memory-resource-limit",
        "queue.sidecar.serving.knative.dev/memoryResourceLimit",
    ]),
    sidecar(&[
        "queue.sidecar.serving.knative.dev/ephemeral-storage-resource-request",
        "queue.sidecar.serving.knative.dev/ephemeralStorageResourceRequest",
    ]),
    sidecar(&[
        "queue.sidecar.serving.knative.dev/ephemeral-storage-resource-limit",
        "queue.sidecar.serving.knative.dev/ephemeralStorageResourceLimit",
    ]),
    scales(&["autoscaling.knative.dev/class"]),
    scales(&["autoscaling.knative.dev/metric"]),
    scales(&["autoscaling.knative.dev/target"]),
    scales(&["autoscaling.knative.dev/window"]),
    scales(&["autoscaling.knative.dev/min-scale", "autoscaling.knative.dev/minScale"]),
    scales(&["autoscaling.knative.dev/max-scale", "autoscaling.knative.dev/maxScale"]),
    scales(&["autoscaling.knative.dev/initial-scale", "autoscaling.knative.dev/initialScale"]),
    scales(&[
        "autoscaling.knative.dev/activation-scale",
        "autoscaling.knative.dev/activationScale",
    ]),
    scales(&[
        "autoscaling.knative.dev/target-utilization-percentage",
        "autoscaling.knative.dev/targetUtilizationPercentage",
    ]),
    scales(&[
        "autoscaling.knative.dev/target-burst-capacity",
        "autoscaling.knative.dev/targetBurstCapacity",
    ]),
    scales(&[
        "autoscaling.knative.dev/panic-window-percentage",
        "autoscaling.knative.dev/panicWindowPercentage",
    ]),
    scales(&[
        "autoscaling.knative.dev/panic-threshold-percentage",
        "autoscaling.knative.dev/panicThresholdPercentage",
    ]),
    scales(&["autoscaling.knative.dev/scale-down-delay", "autoscaling.knative.dev/scaleDownDelay"]),
    scales(&[
        "autoscaling.knative.dev/scale-to-zero-pod-retention-period",
        "autoscaling.knative.dev/scaleToZeroPodRetentionPeriod",
    ]),
    scales(&[
        "autoscaling.knative.dev/metric-aggregation-algorithm",
        "autoscaling.knative.dev/metricAggregationAlgorithm",
    ]),
];

pub(crate) static LABELS: [KnownKey; 13] = [
    known(&[key::VISIBILITY], ROUTED, ON_ROUTE),
    known(
        &["serving.knative.dev/visibility"],
        NOWHERE,
        "use networking.knative.dev/visibility to hide a name",
    ),
    known(&[key::SERVICE], WRITTEN, OURS),
    known(&[key::SERVICE_UID], WRITTEN, OURS),
    known(&[key::CONFIGURATION], WRITTEN, OURS),
    known(&[key::CONFIGURATION_UID], WRITTEN, OURS),
    known(&[key::CONFIGURATION_GENERATION], WRITTEN, OURS),
    known(&[key::REVISION], WRITTEN, OURS),
    known(&[key::REVISION_UID], WRITTEN, OURS),
    known(&[key::ROUTE], WRITTEN, OURS),
    known(&[key::ROUTE_NAMESPACE], WRITTEN, OURS),
    known(&[key::ROUTING_STATE], WRITTEN, OURS),
    known(&[key::DEPLOYMENT_HASH], WRITTEN, OURS),
];

const fn sidecar(names: &'static [&'static str]) -> KnownKey {
    known(names, NOWHERE, NO_SIDECAR)
}

const fn scales(names: &'static [&'static str]) -> KnownKey {
    known(names, RUN, ON_TEMPLATE)
}

/// Keys that a HorizontalPodAutoscaler is made from; the others concern Knative's autoscaler class only.
const OF_HPA: [&str; 7] =
    ["class", "metric", "target", "window", "min-scale", "max-scale", "initial-scale"];

/// Warns of labels and annotations without effect at a place, and of retired spellings.
pub(super) fn warn(meta: &ObjectMeta, place: MetadataPlace, at: &str, warnings: &mut Vec<Problem>) {
    let none = BTreeMap::new();
    let annotations = meta.annotations.as_ref().unwrap_or(&none);
    let labels = meta.labels.as_ref().unwrap_or(&none);
    let class = AutoscalerClass::of(annotations);
    for (kind, all, table) in
        [("annotations", annotations, &ANNOTATIONS[..]), ("labels", labels, &LABELS)]
    {
        // Validation refuses these on a template, so a warning besides would be noise.
        let refused =
            |name: &str| place == Template && kind == "annotations" && name.starts_with(NETWORKING);
        for (name, value) in all.iter().filter(|(name, _)| !refused(name)) {
            if let Some(message) = said(name, value, place, class, table) {
                warnings.push(Problem::new(format!("{at}.{kind}.{name}"), message));
            }
        }
    }
}

fn said(
    name: &str,
    value: &str,
    place: MetadataPlace,
    class: AutoscalerClass,
    table: &[KnownKey],
) -> Option<String> {
    let group = name.split_once('/').map(|(group, _)| group).filter(|it| GROUPS.contains(it))?;
    let has_none = |why: &str| Some(format!("{name} has no effect: {why}"));
    let scales = group == policy::GROUP;
    // Validation refuses these at such places, so a warning besides would be noise.
    if scales && (ROUTED.contains(&place) || place == Configuration) {
        return None;
    }
    // Foreign autoscalers may read keys that are unknown here.
    if scales && RUN.contains(&place) && class == AutoscalerClass::Foreign {
        return None;
    }
    let Some(known) = table.iter().find(|it| it.names.contains(&name)) else {
        return has_none("nothing reads it");
    };
    let newest = known.names.first()?;
    if !known.at.contains(&place) {
        return has_none(known.why);
    }
    let word = newest.rsplit('/').next().unwrap_or_default();
    if scales && class == AutoscalerClass::Hpa && !OF_HPA.contains(&word) {
        return has_none("a HorizontalPodAutoscaler knows no such bound");
    }
    if name == key::VISIBILITY && !matches!(value, "" | "cluster-local") {
        return has_none("only cluster-local hides a name");
    }
    (name != *newest).then(|| format!("{name} is an older spelling, use {newest}"))
}

/// Warns of metadata fields of a template that its Revision does not get.
pub(super) fn warn_template(metadata: Option<&Value>, at: &str, warnings: &mut Vec<Problem>) {
    for (field, value) in metadata.and_then(Value::as_object).into_iter().flatten() {
        let read = ["name", "labels", "annotations"].contains(&field.as_str());
        if !read && !value.is_null() {
            let message =
                format!("{field} has no effect: a Revision gets name, labels and annotations");
            warnings.push(Problem::new(format!("{at}.{field}"), message));
        }
    }
}
