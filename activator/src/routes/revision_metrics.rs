//! Shell: gauges of the Revisions, computed for each scrape.

use std::{fmt, sync::Arc};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric as _},
    metrics::{family::Family, gauge::Gauge},
};

use crate::{revisions::revision::RevisionQueueMetrics, routes::index::RouteIndex};

/// Gauges of each Revision that has pods or requests, computed for each scrape. Names and labels are those of Knative's
/// activator (`pkg/activator/handler/metrics.go`, in the spelling of Prometheus).
#[derive(Debug)]
pub struct RevisionQueueCollector(pub Arc<RouteIndex>);

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct KnativeRevisionLabels {
    k8s_namespace_name: String,
    kn_revision_name: String,
}

impl Collector for RevisionQueueCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let revisions = self.0.revisions();
        let all = revisions.iter().map(|it| (&it.name, it.queue_metrics()));
        // Revisions that are asleep have no series: ten thousand of them would fill every scrape with zeros.
        let all = all.filter(|(_, metrics)| *metrics != RevisionQueueMetrics::default());
        let [queued, active, concurrency] =
            [(); 3].map(|()| Family::<KnativeRevisionLabels, Gauge>::default());
        for (name, metrics) in all {
            let of = KnativeRevisionLabels {
                k8s_namespace_name: name.namespace.to_string(),
                kn_revision_name: name.name.to_string(),
            };
            let (waiting, at_pods) = (
                i64::try_from(metrics.waiting).unwrap_or(i64::MAX),
                i64::try_from(metrics.at_pods).unwrap_or(i64::MAX),
            );
            queued.get_or_create(&of).set(waiting);
            active.get_or_create(&of).set(at_pods);
            concurrency.get_or_create(&of).set(waiting.saturating_add(at_pods));
        }
        for (name, help, family) in [
            ("kn_revision_request_queued", "Requests that wait for a pod", queued),
            ("kn_revision_request_active", "Requests at pods", active),
            ("kn_revision_request_concurrency", "Requests that wait or are at pods", concurrency),
        ] {
            let each = encoder.encode_descriptor(name, help, None, family.metric_type())?;
            family.encode(each)?;
        }
        Ok(())
    }
}
