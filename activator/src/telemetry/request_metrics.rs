//! Shell: the request metrics on the page `/metrics`.

use std::{fmt, sync::Arc};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, NoLabelSet},
    metrics::MetricType,
};

use crate::telemetry::{
    recorder::TelemetryRecorder,
    request_rows::{
        DURATION_HELP, Distribution, OTHER, RequestRow, RequestRows, RowLabels, SIZE_HELP,
    },
};

/// Histogram of the requests by host and Revision, for `/metrics`. Names are those of Knative's activator, in the
/// spelling of Prometheus.
#[derive(Debug)]
pub struct RequestMetricsCollector(pub Arc<TelemetryRecorder>);

impl Collector for RequestMetricsCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let rows = self.0.request_rows();
        if rows.rows().next().is_none() {
            return Ok(());
        }
        let durations = "http_server_request_duration_seconds";
        encode_histogram(&mut encoder, (durations, DURATION_HELP), &rows, |it| &it.durations)?;
        let sizes = "http_server_response_body_size_bytes";
        encode_histogram(&mut encoder, (sizes, SIZE_HELP), &rows, |it| &it.response_sizes)
    }
}

fn encode_histogram(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help): (&str, &str),
    rows: &RequestRows,
    field: fn(&RequestRow) -> &Distribution,
) -> Result<(), fmt::Error> {
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
    for (labels, row) in rows.rows() {
        let (labels, values) = (prometheus_labels(labels), field(row));
        let bounds = values.bounds.iter().copied().chain([f64::MAX]);
        let buckets: Vec<(f64, u64)> = bounds.zip(values.buckets.iter().copied()).collect();
        let mut each = family.encode_family(&labels)?;
        each.encode_histogram::<NoLabelSet>(values.sum, values.count, &buckets, None)?;
    }
    Ok(())
}

fn prometheus_labels(labels: Option<&RowLabels>) -> Vec<(String, String)> {
    let status = labels.map_or_else(|| OTHER.to_owned(), |it| it.status.to_string());
    let of = |field: fn(&RowLabels) -> &str| labels.map_or(OTHER, field).to_owned();
    [
        ("k8s_namespace_name", of(|it| it.namespace.as_str())),
        ("kn_service_name", of(|it| it.service.as_str())),
        ("kn_configuration_name", of(|it| it.configuration.as_str())),
        ("kn_revision_name", of(|it| it.revision.as_str())),
        ("server_address", of(|it| it.host.as_str())),
        ("http_request_method", of(|it| it.method)),
        ("http_response_status_code", status),
        ("network_protocol_name", of(|_| "http")),
        ("network_protocol_version", of(|it| it.version)),
        ("url_scheme", of(|it| it.scheme)),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .to_vec()
}
