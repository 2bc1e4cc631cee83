//! Shell: the totals of Revisions as Prometheus metrics.
//!
//! Histogram and labels have the names that an OpenTelemetry exporter gives those of Knative's sidecar
//! (`kn.serving.invocation.duration` with `kn.revision.name` and the like, knative/serving `pkg/queue` at 98e5ef9).
//! There is no label for the pod: with a series for each pod, every cold start would leave some sixty series behind.
//! And the counts of a pod after its last scrape would be lost.

use std::fmt;

use datapath::abi::{LATENCY_BOUNDS_US, ResponseCounters};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _, MetricEncoder},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
};

use crate::{
    lock::lock,
    usage::{
        revision_totals::{ExportedTotals, merge_buckets},
        revision_totals_store::SharedRevisionTotals,
    },
};

/// Bounds of `kn.serving.invocation.duration`, in µs.
const KNATIVE_BOUNDS_US: [u64; 14] = [
    5_000, 10_000, 25_000, 50_000, 75_000, 100_000, 250_000, 500_000, 750_000, 1_000_000,
    2_500_000, 5_000_000, 7_500_000, 10_000_000,
];

/// Collector that exports the totals of each Revision at each scrape.
#[derive(Debug)]
pub(crate) struct RevisionTotalsCollector(pub(crate) SharedRevisionTotals);

type RevisionMetricLabel = (&'static str, String);
/// Labels of a Revision, and its totals.
type LabeledTotals = (Vec<RevisionMetricLabel>, ExportedTotals);

impl Collector for RevisionTotalsCollector {
    fn encode(&self, mut out: DescriptorEncoder<'_>) -> fmt::Result {
        // Copied, so that the agent's loop does not wait for the lock while the page is encoded.
        let exported = lock(&self.0).exported();
        let all: Vec<LabeledTotals> = exported
            .into_iter()
            .map(|(name, [service, configuration], totals)| {
                let labels = vec![
                    ("k8s_namespace_name", name.namespace.to_string()),
                    ("kn_service_name", service.into()),
                    ("kn_configuration_name", configuration.into()),
                    ("kn_revision_name", name.name.to_string()),
                ];
                (labels, totals)
            })
            .collect();
        encode_durations(&mut out, &all)?;
        encode_requests(&mut out, &all)?;
        encode_connections(&mut out, &all)
    }
}

fn encode_durations(out: &mut DescriptorEncoder<'_>, all: &[LabeledTotals]) -> fmt::Result {
    let help = "Time from a request's head to the end of its response, in Knative's buckets";
    histogram(out, "kn_serving_invocation_duration_seconds", help, &KNATIVE_BOUNDS_US, all)?;
    let help = "Time from a request's head to the end of its response";
    histogram(out, "rouse_agent_request_duration_seconds", help, &LATENCY_BOUNDS_US, all)
}

/// Encodes what is counted of requests and responses, and the requests in flight.
fn encode_requests(out: &mut DescriptorEncoder<'_>, all: &[LabeledTotals]) -> fmt::Result {
    counter(out, "rouse_agent_requests", "Requests begun at pods", all, |totals| {
        totals.row.started
    })?;
    let help = "Responses of pods by status class; unseen: the kernel cannot read it";
    let classes = ["1xx", "2xx", "3xx", "4xx", "5xx", "unseen"];
    counter_by_label(out, "rouse_agent_responses", help, "code", &classes, all, |totals| {
        let ResponseCounters { status: [one, two, three, four, five], unknown_status, .. } =
            totals.row.responses;
        [one, two, three, four, five, unknown_status]
    })?;
    let help = "gRPC calls by outcome, where the kernel can read it";
    counter_by_label(
        out,
        "rouse_agent_grpc_calls",
        help,
        "outcome",
        &["ok", "failed"],
        all,
        |totals| [totals.row.responses.grpc_ok, totals.row.responses.grpc_failed],
    )?;
    let help = "Requests that ended without a whole response";
    counter(out, "rouse_agent_requests_cut", help, all, |totals| totals.row.responses.aborted)?;
    let help = "Responses that no request had asked for, as to garbage or to silence";
    counter(out, "rouse_agent_responses_stray", help, all, |totals| totals.row.stray)?;
    gauge(out, "rouse_agent_requests_in_flight", "Requests in flight at pods", all, |totals| {
        totals.levels.in_flight
    })
}

fn encode_connections(out: &mut DescriptorEncoder<'_>, all: &[LabeledTotals]) -> fmt::Result {
    let help = "Payload bytes that came to pods";
    counter(out, "rouse_agent_received_bytes", help, all, |totals| totals.row.responses.received)?;
    let help = "Payload bytes that pods have sent";
    counter(out, "rouse_agent_sent_bytes", help, all, |totals| totals.row.responses.sent)?;
    gauge(out, "rouse_agent_connections_open", "Open connections of pods", all, |totals| {
        totals.levels.connections
    })?;
    let help = "Connections whose message boundaries were lost: from there on their requests are an estimate";
    counter(out, "rouse_agent_connections_desync", help, all, |totals| totals.row.desync)?;
    let help =
        "Open connections whose requests are an estimate, because their protocol is not parsed";
    gauge(out, "rouse_agent_connections_estimated", help, all, |totals| totals.levels.estimated)
}

fn histogram(
    out: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    bounds_us: &[u64],
    all: &[LabeledTotals],
) -> fmt::Result {
    let mut family = out.encode_descriptor(name, help, None, MetricType::Histogram)?;
    for (labels, totals) in all {
        let ResponseCounters { latency, latency_sum_ns, .. } = totals.row.responses;
        let buckets = merge_buckets(&latency, bounds_us);
        let count = latency.iter().sum();
        let mut metric = family.encode_family(labels)?;
        // Prometheus has times in seconds.
        metric.encode_histogram::<[RevisionMetricLabel; 0]>(
            latency_sum_ns as f64 / 1e9,
            count,
            &buckets,
            None,
        )?;
    }
    Ok(())
}

fn counter(
    out: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    all: &[LabeledTotals],
    read: impl Fn(&ExportedTotals) -> u64,
) -> fmt::Result {
    let mut family = out.encode_descriptor(name, help, None, MetricType::Counter)?;
    all.iter().try_for_each(|(labels, totals)| encode_count(&mut family, labels, read(totals)))
}

/// Encodes a counter with one more label.
fn counter_by_label<const N: usize>(
    out: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    label: &'static str,
    values: &[&str; N],
    all: &[LabeledTotals],
    read: impl Fn(&ExportedTotals) -> [u64; N],
) -> fmt::Result {
    let mut family = out.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (labels, totals) in all {
        for (value, number) in values.iter().zip(read(totals)) {
            let further = std::iter::once((label, (*value).to_owned()));
            let labels: Vec<RevisionMetricLabel> = labels.iter().cloned().chain(further).collect();
            encode_count(&mut family, &labels, number)?;
        }
    }
    Ok(())
}

fn encode_count(
    family: &mut MetricEncoder<'_>,
    labels: &Vec<RevisionMetricLabel>,
    number: u64,
) -> fmt::Result {
    ConstCounter::new(number).encode(family.encode_family(labels)?)
}

fn gauge(
    out: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    all: &[LabeledTotals],
    read: impl Fn(&ExportedTotals) -> u64,
) -> fmt::Result {
    let mut family = out.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (labels, totals) in all {
        let level = i64::try_from(read(totals)).unwrap_or(i64::MAX);
        ConstGauge::new(level).encode(family.encode_family(labels)?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use common::wire::NamespacedName;
    use datapath::abi;
    use prometheus_client::{encoding::text::encode, registry::Registry};

    use super::*;
    use crate::{kernel::totals_row::TotalsRow, usage::revision_totals::RevisionLevels};

    /// Returns the page of one Revision whose totals all differ.
    fn page() -> String {
        let mut latency = [0; abi::LATENCY_BUCKETS];
        // 0.4 ms, 4 ms, 8 ms, 30 s, and two of half an hour.
        for (bucket, count) in [(0, 1), (3, 1), (4, 1), (17, 1), (19, 2)] {
            latency[bucket] = count;
        }
        let responses = ResponseCounters {
            status: [1, 2, 3, 4, 5],
            unknown_status: 6,
            grpc_ok: 7,
            grpc_failed: 8,
            aborted: 9,
            received: 10,
            sent: 11,
            latency_sum_ns: 1_500_000_000,
            latency,
        };
        let row = TotalsRow { responses, started: 12, desync: 13, stray: 15 };
        let (shown, name) =
            (SharedRevisionTotals::default(), NamespacedName::new("prod", "hello-00001"));
        let mut totals = lock(&shown);
        totals.assign_slot(1, &name);
        totals.set_owners(&name, ["hello".into(), "config".into()]);
        totals.update_slot(
            1,
            row,
            RevisionLevels { in_flight: 16, connections: 17, estimated: 14 },
        );
        drop(totals);
        let mut registry = Registry::default();
        registry.register_collector(Box::new(RevisionTotalsCollector(shown)));
        let mut text = String::new();
        encode(&mut text, &registry).expect("it is text");
        text
    }

    const OF: &str = "k8s_namespace_name=\"prod\",kn_service_name=\"hello\",kn_configuration_name=\"config\",kn_revision_name=\"hello-00001\"";

    #[test]
    fn every_total_of_a_revision_is_exported_by_its_name() {
        let page = page();
        let lines: Vec<String> = page
            .lines()
            .filter(|line| line.starts_with("rouse_agent_") && !line.contains("duration"))
            .map(|line| line.replace(OF, ""))
            .collect();
        let want = [
            "rouse_agent_requests_total{} 12",
            "rouse_agent_responses_total{,code=\"1xx\"} 1",
            "rouse_agent_responses_total{,code=\"2xx\"} 2",
            "rouse_agent_responses_total{,code=\"3xx\"} 3",
            "rouse_agent_responses_total{,code=\"4xx\"} 4",
            "rouse_agent_responses_total{,code=\"5xx\"} 5",
            "rouse_agent_responses_total{,code=\"unseen\"} 6",
            "rouse_agent_grpc_calls_total{,outcome=\"ok\"} 7",
            "rouse_agent_grpc_calls_total{,outcome=\"failed\"} 8",
            "rouse_agent_requests_cut_total{} 9",
            "rouse_agent_responses_stray_total{} 15",
            "rouse_agent_requests_in_flight{} 16",
            "rouse_agent_received_bytes_total{} 10",
            "rouse_agent_sent_bytes_total{} 11",
            "rouse_agent_connections_open{} 17",
            "rouse_agent_connections_desync_total{} 13",
            "rouse_agent_connections_estimated{} 14",
        ];
        assert_eq!(lines, want);
    }

    #[test]
    fn durations_are_exported_in_knatives_buckets_and_in_finer_ones() {
        let page = page();
        let series = |name: &str| -> Vec<String> {
            let ours = page.lines().filter(|line| line.starts_with(name));
            ours.map(|line| line[name.len()..].replace(&format!("{OF},"), "").replace(OF, ""))
                .collect()
        };
        let bucket = |le: &str, count: u64| format!("_bucket{{le=\"{le}\"}} {count}");
        let rest = |buckets: &[(&str, u64)]| -> Vec<String> {
            let first = ["_sum{} 1.5".to_owned(), "_count{} 6".to_owned()];
            first.into_iter().chain(buckets.iter().map(|(le, count)| bucket(le, *count))).collect()
        };
        let exported = series("kn_serving_invocation_duration_seconds");
        let exported: Vec<String> = exported.into_iter().map(without_comma_after_le).collect();
        let upper = [
            "0.025", "0.05", "0.075", "0.1", "0.25", "0.5", "0.75", "1.0", "2.5", "5.0", "7.5",
            "10.0",
        ];
        let mut want = vec![("0.005", 2), ("0.01", 3)];
        want.extend(upper.map(|le| (le, 3)));
        want.push(("+Inf", 6));
        assert_eq!(exported, rest(&want));
        let exported = series("rouse_agent_request_duration_seconds");
        let exported: Vec<String> = exported.into_iter().map(without_comma_after_le).collect();
        let mut want = vec![("0.0005", 1), ("0.001", 1), ("0.0025", 1), ("0.005", 2), ("0.01", 3)];
        want.extend(upper.map(|le| (le, 3)));
        want.extend([("60.0", 4), ("300.0", 4), ("+Inf", 6)]);
        assert_eq!(exported, rest(&want));
    }

    /// Removes the comma that is left if `prometheus-client` has written `le` before the labels in [`OF`].
    fn without_comma_after_le(line: String) -> String {
        line.replace("\",}", "\"}")
    }
}
