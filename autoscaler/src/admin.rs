//! Shell: health and metrics of the autoscaler.
//!
//! Knative's metrics of a Revision (`kn.revision.*`) have the names that an OpenTelemetry exporter gives them in
//! Prometheus, so that dashboards keep working. Source: knative/serving `pkg/autoscaler/scaling/metrics.go` and
//! `pkg/reconciler/autoscaling/kpa/metrics.go` at 98e5ef9. They are computed on each scrape, and only for Revisions
//! that are awake and have a decision. A Revision that is asleep has no values and costs nothing.

use std::{fmt, sync::Arc};

use common::{
    admin::AdminState,
    link::ComponentLink,
    wire::{ClientComponent, ConnectionPath, NamespacedName, ScaleMetric},
};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{counter::ConstCounter, gauge::ConstGauge},
    registry::Registry,
};

use crate::{
    evaluator::ScaleEvaluator,
    revision::{ScaleMetrics, ScaledRevision},
};

/// Builds the autoscaler's admin pages. The autoscaler is ready while it has a stream of routes from the controller.
pub fn admin_pages(evaluator: Arc<ScaleEvaluator>, routes: Arc<ComponentLink>) -> AdminState {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(ScaleMetricsCollector { evaluator }));
    let not_ready_reasons = move || match routes.is_connected() {
        true => Vec::new(),
        false => vec!["no stream of routes from the controller".to_owned()],
    };
    AdminState::always_healthy(registry, Box::new(not_ready_reasons))
}

#[derive(Debug)]
struct ScaleMetricsCollector {
    evaluator: Arc<ScaleEvaluator>,
}

/// One metric of a Revision: name, help, and the function that reads its value; `None` where it does not apply.
type ScaleMetricSpec =
    (&'static str, &'static str, fn(&ScaledRevision, &ScaleMetrics) -> Option<f64>);

const SCALE_METRICS: [ScaleMetricSpec; 17] = [
    ("kn_revision_pods_desired", "Pods the load asks for", |_, metrics| {
        metrics.desired_scale.pods.map(f64::from)
    }),
    ("kn_revision_pods_requested", "Pods decided", |_, it| it.requested_pods.map(f64::from)),
    ("kn_revision_pods_count", "Pods that take requests", |rev, _| Some(rev.pods.ready.into())),
    ("kn_revision_pods_not_ready_count", "Pods starting", |rev, _| Some(rev.pods.starting.into())),
    ("kn_revision_pods_pending_count", "Pods without an address yet", |rev, _| {
        Some(rev.pods.pending.into())
    }),
    ("kn_revision_pods_terminating_count", "Pods draining", |rev, _| {
        Some(rev.pods.draining.into())
    }),
    ("kn_revision_capacity_excess", "Burst capacity to spare, in requests", |_, metrics| {
        Some(metrics.desired_scale.excess_burst_capacity)
    }),
    ("kn_revision_panic_mode", "Whether panic holds", |_, it| Some(it.is_panicking.into())),
    ("kn_revision_concurrency_stable", "Requests at once, stable window", |rev, metrics| {
        value_if_metric(rev, ScaleMetric::Concurrency, metrics.averages.stable)
    }),
    ("kn_revision_concurrency_panic", "Requests at once, panic window", |rev, metrics| {
        value_if_metric(rev, ScaleMetric::Concurrency, metrics.averages.panic)
    }),
    ("kn_revision_concurrency_target", "Requests at once aimed at for one pod", |rev, metrics| {
        value_if_metric(rev, ScaleMetric::Concurrency, metrics.desired_scale.target)
    }),
    ("kn_revision_rps_stable", "Requests a second, stable window", |rev, metrics| {
        value_if_metric(rev, ScaleMetric::Rps, metrics.averages.stable)
    }),
    ("kn_revision_rps_panic", "Requests a second, panic window", |rev, metrics| {
        value_if_metric(rev, ScaleMetric::Rps, metrics.averages.panic)
    }),
    ("kn_revision_rps_target", "Requests a second aimed at for one pod", |rev, metrics| {
        value_if_metric(rev, ScaleMetric::Rps, metrics.desired_scale.target)
    }),
    ("rouse_revision_in_flight_requests", "Requests in flight and waiting", |rev, _| {
        Some(rev.load.in_flight() as f64)
    }),
    ("rouse_revision_waiting_requests", "Requests waiting for a pod", |rev, _| {
        Some(rev.load.waiting() as f64)
    }),
    ("rouse_revision_direct", "Whether new connections go straight to pods", |_, metrics| {
        Some(f64::from(u8::from(metrics.path == ConnectionPath::Direct)))
    }),
];

fn value_if_metric(revision: &ScaledRevision, metric: ScaleMetric, value: f64) -> Option<f64> {
    (revision.metric() == metric).then_some(value)
}

type ScaleMetricLabels = [(&'static str, String); 4];

fn revision_labels(name: &NamespacedName, revision: &ScaledRevision) -> ScaleMetricLabels {
    let [service, configuration] = revision.owner_names(&name.name);
    [
        ("k8s_namespace_name", name.namespace.to_string()),
        ("kn_service_name", service.to_string()),
        ("kn_configuration_name", configuration.to_string()),
        ("kn_revision_name", name.name.to_string()),
    ]
}

impl Collector for ScaleMetricsCollector {
    fn encode(&self, mut out: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        // One lock for all values, so that they belong to one moment; encoding happens without it.
        let (counts, rows, evaluations, agents, activators) = self.evaluator.read(|revisions| {
            let row = |(name, revision): (&NamespacedName, &ScaledRevision)| {
                Some((
                    revision_labels(name, revision),
                    metric_values(revision)?,
                    revision.load.requests_started(),
                ))
            };
            let rows: Vec<(ScaleMetricLabels, ScaleMetricValues, u64)> =
                revisions.revisions().filter_map(row).collect();
            // A Revision is awake from its first load on, a moment before its first decision and its row.
            let awake = revisions.revisions().filter(|(_, it)| it.is_awake()).count();
            let counts = [awake, revisions.revisions().count() - awake];
            let senders_of = |role| revisions.online_senders(role);
            let (agents, activators) =
                (senders_of(ClientComponent::Agent), senders_of(ClientComponent::Activator));
            (counts, rows, revisions.evaluations, agents, activators)
        });
        for (index, (name, help, _)) in SCALE_METRICS.iter().enumerate() {
            encode_gauge(
                &mut out,
                name,
                help,
                rows.iter().filter_map(|(labels, values, _)| Some((&labels[..], values[index]?))),
            )?;
        }
        encode_requests(&mut out, &rows)?;
        let (awake_label, asleep_label) =
            ([("state", "awake".to_owned())], [("state", "asleep".to_owned())]);
        let [awake, asleep] = counts;
        let counts = [(&awake_label[..], awake), (&asleep_label[..], asleep)];
        encode_gauge(&mut out, "rouse_autoscaler_revisions", "Revisions", counts.map(with_f64))?;
        let (agent_label, activator_label) =
            ([("role", "agent".to_owned())], [("role", "activator".to_owned())]);
        let senders = [(&agent_label[..], agents), (&activator_label[..], activators)];
        encode_gauge(
            &mut out,
            "rouse_autoscaler_senders",
            "Open usage streams",
            senders.map(with_f64),
        )?;
        encode_counter(&mut out, "rouse_autoscaler_evaluations", "Evaluations made", evaluations)?;
        encode_counter(
            &mut out,
            "rouse_autoscaler_decisions",
            "Decisions sent",
            self.evaluator.decisions_sent(),
        )?;
        let usage = self.evaluator.usage_items().load(std::sync::atomic::Ordering::Relaxed);
        encode_counter(&mut out, "rouse_autoscaler_usage_items", "Usage items received", usage)
    }
}

fn encode_requests(
    out: &mut DescriptorEncoder<'_>,
    rows: &[(ScaleMetricLabels, ScaleMetricValues, u64)],
) -> fmt::Result {
    let kind = prometheus_client::metrics::MetricType::Counter;
    let help = "Requests that have begun at pods";
    let mut family = out.encode_descriptor("rouse_revision_requests", help, None, kind)?;
    for (labels, _, started) in rows {
        ConstCounter::new(*started).encode(family.encode_family(&labels.to_vec())?)?;
    }
    Ok(())
}

type ScaleMetricValues = [Option<f64>; SCALE_METRICS.len()];

fn metric_values(revision: &ScaledRevision) -> Option<ScaleMetricValues> {
    let metrics = revision.scale_metrics()?;
    Some(SCALE_METRICS.map(|(_, _, read)| read(revision, &metrics)))
}

fn with_f64<L>((labels, count): (L, usize)) -> (L, f64) {
    (labels, count as f64)
}

fn encode_gauge<'a>(
    out: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    rows: impl IntoIterator<Item = (&'a [(&'static str, String)], f64)>,
) -> fmt::Result {
    let kind = prometheus_client::metrics::MetricType::Gauge;
    let mut family = out.encode_descriptor(name, help, None, kind)?;
    for (labels, value) in rows {
        let labels = labels.to_vec();
        ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}

fn encode_counter(
    out: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    value: u64,
) -> fmt::Result {
    let kind = prometheus_client::metrics::MetricType::Counter;
    ConstCounter::new(value).encode(out.encode_descriptor(name, help, None, kind)?)
}
