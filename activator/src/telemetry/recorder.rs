//! Shell: settings of traces and request metrics in force, and the tasks that send to collectors.
//!
//! A request puts its spans into a bounded queue, and a task sends them from there. A slow or dead collector therefore
//! delays no request, and takes no more memory than the queue. Spans that do not fit, or that the collector does not
//! take or rejects, are counted and lost.

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use common::{
    link::{RouteBatch, error_chain},
    wire::{
        OtlpCollector, RequestMetricsSettings, RouteChange, RouteKey, SamplingRate,
        TelemetrySettings,
    },
};
use opentelemetry_proto::tonic::{
    collector::{metrics::v1::ExportMetricsServiceRequest, trace::v1::ExportTraceServiceRequest},
    resource::v1::Resource,
    trace::v1::Span,
};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, sleep_until},
};
use tracing::{info, warn};

use crate::{
    clock::now_ns,
    metrics::ExportCounters,
    telemetry::{
        collector_client::{CollectorClient, ExportError, ExportResponse, OtlpMessage},
        otlp_metrics::{RevisionGauges, resource_metrics},
        request_rows::{RequestFigures, RequestRows, RowLabels},
        span::{resource, resource_spans, span_bytes},
    },
};

/// Maximum number of requests whose spans wait: that of OpenTelemetry's batch processor.
const MAX_QUEUED_REQUESTS: usize = 2048;
/// Most bytes of the spans that wait, whatever clients and failed dials put into them.
const MAX_QUEUED_BYTES: usize = 16 << 20;
/// Number of spans from which no further request is added to a message.
const MAX_BATCH_SPANS: usize = 512;
/// Longest time that spans wait for others to be sent with them.
const BATCH_DELAY: Duration = Duration::from_secs(1);
/// Length of a collector's reason in the log.
const MAX_REASON_CHARS: usize = 200;
const NANOS_PER_SECOND: u64 = 1_000_000_000;

/// Source of the gauges of all Revisions with requests.
pub type GaugeSource = Box<dyn Fn() -> Vec<RevisionGauges> + Send + Sync>;

/// Item of the queue of spans.
enum QueueItem {
    /// Spans of one request, and the number of their bytes.
    Spans(Vec<Span>, usize),
    /// Request for a notice once everything before it was sent or lost.
    Flush(oneshot::Sender<()>),
}

/// Recorder of spans and request metrics, off until the settings of the RouteTable turn it on.
pub struct TelemetryRecorder {
    is_on: AtomicBool,
    records_metrics: AtomicBool,
    /// Threshold of the sampling rate in force; 0: no request is sampled.
    sampling_threshold: AtomicU64,
    settings: watch::Sender<TelemetrySettings>,
    rows: Mutex<RequestRows>,
    gauges: OnceLock<GaugeSource>,
    queue: mpsc::Sender<QueueItem>,
    /// Bytes of the spans in the queue.
    queued_bytes: Arc<AtomicUsize>,
    /// Other end of the queue, until the exporting task has it.
    queued: Mutex<Option<mpsc::Receiver<QueueItem>>>,
    spans: ExportCounters,
    metric_messages: ExportCounters,
    resource: Resource,
    started_ns: u64,
}

impl TelemetryRecorder {
    /// Creates the recorder of the activator with this name.
    pub fn new(activator: &str, spans: ExportCounters, metric_messages: ExportCounters) -> Self {
        let (queue, queued) = mpsc::channel(MAX_QUEUED_REQUESTS);
        Self {
            is_on: AtomicBool::new(false),
            records_metrics: AtomicBool::new(false),
            sampling_threshold: AtomicU64::new(0),
            settings: watch::Sender::new(TelemetrySettings::default()),
            rows: Mutex::default(),
            gauges: OnceLock::new(),
            queue,
            queued_bytes: Arc::default(),
            queued: Mutex::new(Some(queued)),
            spans,
            metric_messages,
            resource: resource(activator),
            started_ns: now_ns(),
        }
    }

    /// Sets the source of the gauges, once. Without one, no gauges are exported.
    pub fn set_gauges(&self, source: GaugeSource) {
        // A second source would show the same Revisions.
        let _is_set_already = self.gauges.set(source);
    }

    /// Applies the settings of a batch of the RouteTable.
    pub fn apply_batch(self: &Arc<Self>, batch: &RouteBatch) {
        match batch.changes.get(&RouteKey::Settings) {
            Some(RouteChange::Settings(it)) => self.apply_settings(&it.telemetry),
            None if !batch.is_snapshot => {}
            Some(_) | None => self.apply_settings(&TelemetrySettings::default()),
        }
    }

    /// Sets the settings for requests that arrive from now on.
    fn apply_settings(self: &Arc<Self>, next: &TelemetrySettings) {
        let is_on = *next != TelemetrySettings::default();
        // Without the tasks, the queue would fill up and never be read.
        if is_on && !self.start_tasks() {
            return;
        }
        let is_changed = self.settings.send_if_modified(|now| {
            let is_changed = *now != *next;
            now.clone_from(next);
            is_changed
        });
        if !is_changed {
            return;
        }
        let traces = next.traces.as_ref().map(|it| it.collector.to_string());
        let metrics = next.metrics.as_ref().and_then(|it| it.collector.as_ref());
        let metrics = metrics.map(OtlpCollector::to_string);
        info!(is_on, ?traces, ?metrics, "telemetry set");
        let threshold = next.traces.as_ref().map_or(0, |it| it.sampling.threshold());
        self.sampling_threshold.store(threshold, Ordering::Relaxed);
        self.records_metrics.store(next.metrics.is_some(), Ordering::Relaxed);
        // Last, so that a request which finds telemetry on also finds its settings.
        self.is_on.store(is_on, Ordering::Release);
    }

    /// Starts the exporting tasks, unless they are running. They end with the recorder. Returns false if they cannot be
    /// started.
    fn start_tasks(self: &Arc<Self>) -> bool {
        let mut queued = self.queued.lock().unwrap_or_else(PoisonError::into_inner);
        if queued.is_none() {
            return true;
        }
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            warn!("telemetry needs a runtime: nothing is recorded");
            return false;
        };
        if let Some(queued) = queued.take() {
            let exporter = SignalExporter::new("traces", self.spans.clone());
            let settings = self.settings.subscribe();
            let queued = QueuedSpans { items: queued, bytes: Arc::clone(&self.queued_bytes) };
            runtime.spawn(export_spans(queued, settings, self.resource.clone(), exporter));
            let exporter = SignalExporter::new("metrics", self.metric_messages.clone());
            let settings = self.settings.subscribe();
            // A weak reference, or the task would keep the recorder alive forever.
            runtime.spawn(export_metrics(Arc::downgrade(self), settings, exporter));
        }
        true
    }

    /// Returns true if requests are to be observed. Off is the usual case, and costs one relaxed load.
    pub fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    /// Returns true if request metrics are recorded.
    pub fn records_metrics(&self) -> bool {
        self.records_metrics.load(Ordering::Relaxed)
    }

    /// Sampling rate in force; `None`: no spans are recorded.
    pub fn sampling_rate(&self) -> Option<SamplingRate> {
        let rate = SamplingRate::from_threshold(self.sampling_threshold.load(Ordering::Relaxed));
        rate.filter(|rate| !rate.is_never())
    }

    /// Counts one finished request.
    pub fn observe_request(&self, labels: RowLabels, figures: RequestFigures) {
        self.lock_rows().observe(now_ns() / NANOS_PER_SECOND, labels, figures);
    }

    /// Rows of the request metrics as they are now.
    pub fn request_rows(&self) -> RequestRows {
        self.lock_rows().clone()
    }

    /// Queues the spans of one finished request for the collector.
    pub fn enqueue_spans(&self, spans: Vec<Span>) {
        let count = u64::try_from(spans.len()).unwrap_or(u64::MAX);
        let bytes: usize = spans.iter().map(span_bytes).sum();
        // Counted before the spans are queued, so that several requests at once cannot exceed the bound together.
        let fits =
            self.queued_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes <= MAX_QUEUED_BYTES;
        if !fits || self.queue.try_send(QueueItem::Spans(spans, bytes)).is_err() {
            self.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
            self.spans.dropped.inc_by(count);
        }
    }

    /// Sends the spans and the request metrics so far, and waits until they are sent or lost, at most for `bound`.
    pub async fn flush(&self, bound: Duration) {
        tokio::join!(self.flush_spans(bound), self.flush_metrics(bound));
    }

    /// Sends the request metrics once more: an activator that stops is not there at the end of the interval.
    async fn flush_metrics(&self, bound: Duration) {
        let metrics = self.settings.borrow().metrics.clone();
        let Some(collector) = metrics.and_then(|it| it.collector) else { return };
        let mut exporter = SignalExporter::new("metrics", self.metric_messages.clone());
        let send = exporter.send(collector, self.metrics_message(), 1);
        let _in_time = tokio::time::timeout(bound, send).await;
    }

    async fn flush_spans(&self, bound: Duration) {
        if self.queued.lock().unwrap_or_else(PoisonError::into_inner).is_some() {
            return;
        }
        let flush = async {
            let (done, sent) = oneshot::channel();
            if self.queue.send(QueueItem::Flush(done)).await.is_ok() {
                let _exporter_has_ended = sent.await;
            }
        };
        let _in_time = tokio::time::timeout(bound, flush).await;
    }

    fn metrics_message(&self) -> OtlpMessage {
        let gauges = self.gauges.get().map(|gauges| gauges()).unwrap_or_default();
        let (rows, times) = (self.request_rows(), (self.started_ns, now_ns()));
        let metrics = resource_metrics(self.resource.clone(), &rows, &gauges, times);
        OtlpMessage::Metrics(ExportMetricsServiceRequest { resource_metrics: vec![metrics] })
    }

    fn lock_rows(&self) -> MutexGuard<'_, RequestRows> {
        // A panic elsewhere cannot leave a row inconsistent beyond one request.
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for TelemetryRecorder {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("TelemetryRecorder").field("is_on", &self.is_on).finish_non_exhaustive()
    }
}

/// Part of the last message that a collector has taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CollectorState {
    TakesAll,
    RejectsSome,
    TakesNothing,
}

/// Sender of one signal, which logs when the collector begins to fail and when it works again.
struct SignalExporter {
    signal: &'static str,
    counters: ExportCounters,
    client: Option<CollectorClient>,
    collector_state: CollectorState,
}

impl SignalExporter {
    fn new(signal: &'static str, counters: ExportCounters) -> Self {
        Self { signal, counters, client: None, collector_state: CollectorState::TakesAll }
    }

    /// Sends a message with `count` items to the collector. Items that it rejects are lost.
    async fn send(&mut self, collector: OtlpCollector, message: OtlpMessage, count: u64) {
        let signal = self.signal;
        let address = collector.to_string();
        let result = self.try_send(collector, message).await;
        let (state, lost) = match &result {
            Ok(response) if response.rejected == 0 => (CollectorState::TakesAll, 0),
            Ok(response) => (CollectorState::RejectsSome, response.rejected.min(count)),
            Err(_) => (CollectorState::TakesNothing, count),
        };
        self.counters.exported.inc_by(count - lost);
        self.counters.dropped.inc_by(lost);
        // Only changes are logged: a collector that is away would add a line for each message.
        if std::mem::replace(&mut self.collector_state, state) == state {
            return;
        }
        match result {
            Ok(ExportResponse { rejected: 0, reason: _ }) => {
                info!(signal, collector = %address, "collector works again");
            }
            Ok(ExportResponse { rejected, reason }) => {
                // The text comes from outside, and may have any length.
                let reason: String = reason.chars().take(MAX_REASON_CHARS).collect();
                warn!(signal, collector = %address, rejected, reason, "collector rejects a part");
            }
            Err(error) => {
                let error = error_chain(&error);
                warn!(signal, collector = %address, %error, "collector takes nothing");
            }
        }
    }

    async fn try_send(
        &mut self,
        collector: OtlpCollector,
        message: OtlpMessage,
    ) -> Result<ExportResponse, ExportError> {
        let known = self.client.take().filter(|it| *it.collector() == collector);
        let client = match known {
            Some(client) => client,
            None => CollectorClient::new(collector)?,
        };
        self.client.insert(client).send(message).await
    }
}

/// Other end of the queue of spans.
struct QueuedSpans {
    items: mpsc::Receiver<QueueItem>,
    /// Bytes of the spans in the queue.
    bytes: Arc<AtomicUsize>,
}

impl QueuedSpans {
    /// Takes the next item from the queue; `None`: the recorder is gone. If the future is dropped, no item is lost.
    async fn next(&mut self) -> Option<QueueItem> {
        let item = self.items.recv().await?;
        if let QueueItem::Spans(_, bytes) = &item {
            self.bytes.fetch_sub(*bytes, Ordering::Relaxed);
        }
        Some(item)
    }
}

/// Sends spans in batches until the recorder is gone.
async fn export_spans(
    mut queued: QueuedSpans,
    settings: watch::Receiver<TelemetrySettings>,
    resource: Resource,
    mut exporter: SignalExporter,
) {
    while let Some(first) = queued.next().await {
        let (spans, flushed) = collect_batch(first, &mut queued).await;
        let count = u64::try_from(spans.len()).unwrap_or(u64::MAX);
        // Read for each batch, not once: a change of the collector also applies to spans that wait already.
        let collector = settings.borrow().traces.as_ref().map(|it| it.collector.clone());
        match collector {
            _ if spans.is_empty() => {}
            Some(collector) => {
                let resource_spans = vec![resource_spans(resource.clone(), spans)];
                let message = OtlpMessage::Traces(ExportTraceServiceRequest { resource_spans });
                exporter.send(collector, message, count).await;
            }
            // Turned off while they waited.
            None => {
                exporter.counters.dropped.inc_by(count);
            }
        }
        // Only after the send, also if it failed: a stopping activator waits for this notice.
        for done in flushed {
            let _flush_timed_out = done.send(());
        }
    }
}

/// Collects the spans of a message: those that are there, and those that come soon. A flush ends it at once.
async fn collect_batch(
    first: QueueItem,
    queued: &mut QueuedSpans,
) -> (Vec<Span>, Vec<oneshot::Sender<()>>) {
    let (mut spans, mut flushed) = (Vec::new(), Vec::new());
    let delay = tokio::time::sleep(BATCH_DELAY);
    tokio::pin!(delay);
    let mut next = Some(first);
    while let Some(item) = next {
        match item {
            QueueItem::Spans(more, _) => spans.extend(more),
            QueueItem::Flush(done) => flushed.push(done),
        }
        // A flush waits for its answer, so it ends the batch without the delay.
        if spans.len() >= MAX_BATCH_SPANS || !flushed.is_empty() {
            break;
        }
        next = tokio::select! {
            biased;
            item = queued.next() => item,
            () = delay.as_mut() => None,
        };
    }
    (spans, flushed)
}

/// Sends the request metrics after each interval, until the recorder is gone.
async fn export_metrics(
    recorder: Weak<TelemetryRecorder>,
    mut settings: watch::Receiver<TelemetrySettings>,
    mut exporter: SignalExporter,
) {
    // End of the interval that has begun, with its settings: a change of others, as of traces, must not put it off.
    let mut due: Option<(RequestMetricsSettings, Instant)> = None;
    loop {
        let metrics = settings.borrow_and_update().metrics.clone();
        // An interval that has begun goes on only with its own settings.
        let begun = due.take().filter(|(of, _)| metrics.as_ref() == Some(of));
        let Some(RequestMetricsSettings { collector: Some(collector), interval }) = metrics else {
            match settings.changed().await {
                Ok(()) => continue,
                Err(_recorder_is_gone) => return,
            }
        };
        let ends_at = begun.map_or_else(|| Instant::now() + interval, |(_, ends_at)| ends_at);
        tokio::select! {
            biased;
            changed = settings.changed() => match changed {
                Ok(()) => {
                    let of = RequestMetricsSettings { collector: Some(collector), interval };
                    due = Some((of, ends_at));
                    continue;
                }
                Err(_recorder_is_gone) => return,
            },
            () = sleep_until(ends_at) => {}
        }
        let Some(message) = recorder.upgrade().map(|it| it.metrics_message()) else { return };
        exporter.send(collector, message, 1).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::span::text_attribute;

    #[test]
    fn spans_that_wait_are_bounded_in_bytes() {
        let recorder = TelemetryRecorder::new("a", ExportCounters::default(), Default::default());
        let attributes = vec![text_attribute("key", &"v".repeat(512)); 32];
        let spans = || vec![Span { attributes: attributes.clone(), ..Span::default() }; 2];
        let of_request: usize = spans().iter().map(span_bytes).sum();
        for _ in 0..MAX_QUEUED_REQUESTS {
            recorder.enqueue_spans(spans());
        }
        let queued = recorder.queued_bytes.load(Ordering::Relaxed);
        assert!(queued <= MAX_QUEUED_BYTES && queued + of_request > MAX_QUEUED_BYTES, "{queued}");
        let requests = MAX_QUEUED_REQUESTS - queued / of_request;
        assert_eq!(recorder.spans.dropped.get(), 2 * u64::try_from(requests).expect("few"));
    }

    #[tokio::test]
    async fn spans_that_are_taken_make_room_for_others() {
        let (sender, items) = mpsc::channel(1);
        let bytes = Arc::new(AtomicUsize::new(7));
        let mut queued = QueuedSpans { items, bytes: Arc::clone(&bytes) };
        assert!(sender.send(QueueItem::Spans(Vec::new(), 7)).await.is_ok());
        assert!(queued.next().await.is_some());
        assert_eq!(bytes.load(Ordering::Relaxed), 0);
    }
}
