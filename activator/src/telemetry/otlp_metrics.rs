//! Pure: the request metrics in the form of OTLP.

use opentelemetry_proto::tonic::{
    common::v1::KeyValue,
    metrics::v1::{
        AggregationTemporality, Gauge, Histogram, HistogramDataPoint, Metric, NumberDataPoint,
        ResourceMetrics, ScopeMetrics, metric::Data, number_data_point,
    },
    resource::v1::Resource,
};

use crate::telemetry::{
    request_rows::{
        DURATION_HELP, Distribution, OTHER, RequestRow, RequestRows, RowLabels, SIZE_HELP,
    },
    span::{number_attribute, scope, text_attribute},
};

/// Attributes of a row in OTLP. As in OpenTelemetry, empty ones are left out.
fn otlp_attributes(labels: Option<&RowLabels>) -> Vec<KeyValue> {
    let of = |field: fn(&RowLabels) -> &str| labels.map_or(OTHER, field);
    let mut all: Vec<KeyValue> = [
        ("k8s.namespace.name", of(|it| it.namespace.as_str())),
        ("kn.service.name", of(|it| it.service.as_str())),
        ("kn.configuration.name", of(|it| it.configuration.as_str())),
        ("kn.revision.name", of(|it| it.revision.as_str())),
        ("server.address", of(|it| it.host.as_str())),
        ("http.request.method", of(|it| it.method)),
        ("network.protocol.name", of(|_| "http")),
        ("network.protocol.version", of(|it| it.version)),
        ("url.scheme", of(|it| it.scheme)),
    ]
    .into_iter()
    .filter(|(_, value)| !value.is_empty())
    .map(|(name, value)| text_attribute(name, value))
    .collect();
    all.extend(labels.map(|it| number_attribute("http.response.status_code", it.status)));
    all
}

/// Requests of one Revision at this activator, at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RevisionGauges {
    /// Namespace of the Revision.
    pub namespace: String,
    /// Name of the Revision.
    pub revision: String,
    /// Requests that wait for a pod.
    pub queued: i64,
    /// Requests at pods.
    pub active: i64,
}

/// Message with all metrics. The rows are sums since `start_ns`.
pub fn resource_metrics(
    resource: Resource,
    rows: &RequestRows,
    gauges: &[RevisionGauges],
    times @ (_, now_ns): (u64, u64),
) -> ResourceMetrics {
    // Names and units are those of OpenTelemetry's conventions for HTTP servers, so that common dashboards fit.
    let durations = ["http.server.request.duration", DURATION_HELP, "s"];
    let sizes = ["http.server.response.body.size", SIZE_HELP, "By"];
    let mut metrics = vec![
        histogram_metric(durations, rows, |it| &it.durations, times),
        histogram_metric(sizes, rows, |it| &it.response_sizes, times),
    ];
    type Value = fn(&RevisionGauges) -> i64;
    let all: [(&str, Value); 3] = [
        ("kn.revision.request.queued", |it| it.queued),
        ("kn.revision.request.active", |it| it.active),
        // Waiting requests count as concurrency, as in Knative's activator.
        ("kn.revision.request.concurrency", |it| it.queued.saturating_add(it.active)),
    ];
    // A gauge has no start: it says what holds at this moment, so only `now_ns` goes along.
    for (name, value) in all {
        metrics.push(gauge_metric(name, gauges, value, now_ns));
    }
    let scope_metrics = ScopeMetrics { scope: Some(scope()), metrics, ..ScopeMetrics::default() };
    ResourceMetrics {
        resource: Some(resource),
        scope_metrics: vec![scope_metrics],
        ..ResourceMetrics::default()
    }
}

/// Returns a histogram with a data point for each row, as sums since `start_ns`.
fn histogram_metric(
    [name, description, unit]: [&str; 3],
    rows: &RequestRows,
    field: fn(&RequestRow) -> &Distribution,
    (start_ns, now_ns): (u64, u64),
) -> Metric {
    let point = |(labels, row): (Option<&RowLabels>, &RequestRow)| {
        let values = field(row);
        HistogramDataPoint {
            attributes: otlp_attributes(labels),
            start_time_unix_nano: start_ns,
            time_unix_nano: now_ns,
            // Bounds and buckets go together: OTLP wants one bucket more than bounds, and the last has no bound.
            count: values.count,
            sum: Some(values.sum),
            bucket_counts: values.buckets.to_vec(),
            explicit_bounds: values.bounds.to_vec(),
            ..HistogramDataPoint::default()
        }
    };
    let histogram = Histogram {
        data_points: rows.rows().map(point).collect(),
        // Sums since the start survive a lost message: the next one has everything. With deltas it would be gone.
        aggregation_temporality: AggregationTemporality::Cumulative.into(),
    };
    Metric {
        name: name.to_owned(),
        description: description.to_owned(),
        unit: unit.to_owned(),
        data: Some(Data::Histogram(histogram)),
        ..Metric::default()
    }
}

/// Returns a gauge with a data point for each Revision.
fn gauge_metric(
    name: &str,
    gauges: &[RevisionGauges],
    value: fn(&RevisionGauges) -> i64,
    now_ns: u64,
) -> Metric {
    let point = |it: &RevisionGauges| NumberDataPoint {
        attributes: vec![
            text_attribute("k8s.namespace.name", &it.namespace),
            text_attribute("kn.revision.name", &it.revision),
        ],
        time_unix_nano: now_ns,
        value: Some(number_data_point::Value::AsInt(value(it))),
        ..NumberDataPoint::default()
    };
    let gauge = Gauge { data_points: gauges.iter().map(point).collect() };
    Metric {
        name: name.to_owned(),
        unit: "{request}".to_owned(),
        data: Some(Data::Gauge(gauge)),
        ..Metric::default()
    }
}
