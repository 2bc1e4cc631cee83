//! Shell: one line on standard output for each finished request, while operators have the request log on.
//!
//! A request puts its line into a bounded queue, and a thread writes the lines from there. A full pipe, a slow disk or
//! a closed output therefore delays no request. Lines that the full buffer drops, or that cannot be written, are
//! counted. So are lines without a thread, because it could not be started.

use std::{
    borrow::Cow,
    fmt, io,
    sync::{
        Arc, Mutex, OnceLock, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    },
    time::{Duration, Instant},
};

use common::{
    link::RouteBatch,
    request_log::{CapturedRequest, LoggedRequest, LoggedResponse, LoggedRevision},
    wire::{self, NamespacedName, RouteChange, RouteKey},
};
use http::{HeaderValue, Method, Version, header, request};
use http_body::Body;
use tokio::sync::oneshot;
use tracing::{info, warn};

use crate::{
    clients::client_info::ClientInfo,
    edge::platform_probe,
    entrypoint::{Entrypoint, TrafficOrigin},
    metrics::RequestLogCounters,
    pods::endpoint::PodEndpoint,
    revisions::route_settings::RevisionOwnerNames,
};

/// Maximum number of lines that wait to be written.
const MAX_QUEUED_LINES: usize = 8192;
/// Maximum number of bytes of these lines.
const MAX_QUEUED_BYTES: usize = 8 << 20;
/// Size of a batch in bytes from which no further line is added to it.
const WRITE_BATCH_BYTES: usize = 64 << 10;
/// Pause before a flush looks again for room in the full queue.
const FLUSH_RETRY_DELAY: Duration = Duration::from_millis(5);
/// Code of a request whose client was gone before the response: nginx's, because HTTP has none.
pub(crate) const CLIENT_CLOSED_REQUEST: u16 = 499;

/// Output that lines are written to.
pub type RequestLogSink = Box<dyn io::Write + Send>;

/// Request log, off until the settings of the RouteTable turn it on.
pub struct RequestLogger {
    is_on: AtomicBool,
    settings: RwLock<Option<Arc<wire::RequestLogSettings>>>,
    sink: Mutex<Option<RequestLogSink>>,
    /// Channel to the writing thread, which is started with the first settings. Unset while it could not be started.
    line_sender: OnceLock<SyncSender<LogWriterMessage>>,
    /// Bytes of the lines that wait.
    queued_bytes: Arc<AtomicUsize>,
    counters: RequestLogCounters,
}

/// Work of the writing thread.
type LogWriterTask = Box<dyn FnOnce() + Send>;

/// Message to the writing thread.
enum LogWriterMessage {
    Line(String),
    /// Request for a notice once everything before it is written.
    Flush(oneshot::Sender<()>),
}

impl RequestLogger {
    /// Creates a log that writes to standard output, once it is on.
    pub fn new(counters: RequestLogCounters) -> Self {
        Self {
            is_on: AtomicBool::new(false),
            settings: RwLock::default(),
            sink: Mutex::new(Some(Box::new(io::stdout()))),
            line_sender: OnceLock::new(),
            queued_bytes: Arc::default(),
            counters,
        }
    }

    /// Sets another output. It has no effect once the log was on.
    pub fn set_sink(&self, sink: RequestLogSink) {
        *self.sink.lock().unwrap_or_else(PoisonError::into_inner) = Some(sink);
    }

    /// Applies the settings of a batch of the RouteTable.
    pub fn apply_batch(&self, batch: &RouteBatch) {
        match batch.changes.get(&RouteKey::Settings) {
            Some(RouteChange::Settings(it)) => self.apply_settings(it.request_log.clone()),
            None if !batch.is_snapshot => {}
            Some(_) | None => self.apply_settings(None),
        }
    }

    /// Sets the settings for requests that arrive from now on. `None`: requests are not logged.
    fn apply_settings(&self, settings: Option<wire::RequestLogSettings>) {
        let mut now = self.settings.write().unwrap_or_else(PoisonError::into_inner);
        // The thread is running before the first request can see the log as on. If it could not be started, each
        // message about the settings tries again, even if they are the same.
        if settings.is_some() {
            self.start_writer(spawn_writer);
        }
        if now.as_deref() == settings.as_ref() {
            return;
        }
        let (is_on, probes) =
            (settings.is_some(), settings.as_ref().is_some_and(|it| it.logs_probes));
        info!(is_on, probes, "request log set");
        *now = settings.map(Arc::new);
        self.is_on.store(is_on, Ordering::Release);
    }

    /// Starts the writing thread, unless it is running.
    fn start_writer(&self, spawn: impl FnOnce(LogWriterTask) -> io::Result<()>) {
        if self.line_sender.get().is_some() {
            return;
        }
        let (message_tx, messages) = sync_channel(MAX_QUEUED_LINES);
        // The thread gets the output once it exists, so that the output is not lost if it cannot be started.
        let (sink_tx, sink_rx) = sync_channel(1);
        let (queued, counts) = (Arc::clone(&self.queued_bytes), self.counters.clone());
        let write = move || {
            if let Ok(sink) = sink_rx.recv() {
                run_writer(sink, &messages, &queued, &counts);
            }
        };
        match spawn(Box::new(write)) {
            Ok(()) => {
                let mut sink = self.sink.lock().unwrap_or_else(PoisonError::into_inner);
                sink.take().into_iter().for_each(|sink| drop(sink_tx.send(sink)));
                drop(self.line_sender.set(message_tx));
            }
            Err(error) => warn!(%error, "cannot start a thread: requests are not logged"),
        }
    }

    /// Returns true if requests are logged.
    pub fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    /// Starts the entry of a request that has arrived. `None`: the request is not logged.
    pub fn start_entry(
        self: &Arc<Self>,
        head: &request::Parts,
        body: &impl Body,
        entrypoint: Entrypoint,
        client: ClientInfo,
    ) -> Option<Box<RequestLogEntry>> {
        // Off is the usual case: it costs one relaxed load for each request, and no lock.
        if !self.is_on() {
            return None;
        }
        let settings = self.settings.read().unwrap_or_else(PoisonError::into_inner).clone()?;
        let is_probe = entrypoint.traffic_origin() == TrafficOrigin::Internal
            && platform_probe::parse_probe(head).is_some();
        if is_probe && !settings.logs_probes {
            return None;
        }
        let captured = capture_request(&settings, head, body, client);
        Some(Box::new(RequestLogEntry {
            log: Arc::clone(self),
            settings,
            captured,
            started_at: Instant::now(),
            is_probe,
            revision: None,
            pod: None,
            status: CLIENT_CLOSED_REQUEST,
            body_bytes: 0,
        }))
    }

    /// Waits until the lines so far are written, at most for `bound`.
    pub async fn flush(&self, bound: Duration) {
        let Some(messages) = self.line_sender.get() else { return };
        let (done, written) = oneshot::channel();
        let flush = async {
            let mut message = LogWriterMessage::Flush(done);
            // A full queue has no room for the message yet, and wakes no task once it has.
            while let Err(TrySendError::Full(unsent)) = messages.try_send(message) {
                message = unsent;
                tokio::time::sleep(FLUSH_RETRY_DELAY).await;
            }
            let _writer_has_ended = written.await;
        };
        let _in_time = tokio::time::timeout(bound, flush).await;
    }

    fn enqueue_line(&self, line: String) {
        let Some(messages) = self.line_sender.get() else {
            self.counters.dropped.inc();
            return;
        };
        let size = line.len();
        // Counted before the line is sent, so that several requests at once cannot exceed the bound together.
        let fits = self.queued_bytes.fetch_add(size, Ordering::Relaxed) + size <= MAX_QUEUED_BYTES;
        if !fits || messages.try_send(LogWriterMessage::Line(line)).is_err() {
            self.queued_bytes.fetch_sub(size, Ordering::Relaxed);
            self.counters.dropped.inc();
        }
    }
}

impl fmt::Debug for RequestLogger {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("RequestLogger").field("is_on", &self.is_on).finish_non_exhaustive()
    }
}

/// Captures the parts of a request that the template needs.
fn capture_request(
    settings: &wire::RequestLogSettings,
    head: &request::Parts,
    body: &impl Body,
    client: ClientInfo,
) -> CapturedRequest {
    let headers = |name: &str| head.headers.get_all(name).iter().map(header_text).collect();
    let uri = &head.uri;
    // In HTTP/2 every request has scheme and host in its target. Go's `Request.RequestURI` contains neither.
    let is_whole = uri.scheme().is_some() && head.version < Version::HTTP_2;
    let target = match uri.path_and_query() {
        Some(target) if !is_whole => Cow::Borrowed(target.as_str()),
        _ => uri.to_string().into(),
    };
    let host_header = head.headers.get(header::HOST).map(header_text);
    let authority = || uri.authority().map_or("", |it| it.as_str()).to_owned();
    let host = host_header.unwrap_or_else(authority);
    let length = if body.is_end_stream() { Some(0) } else { body.size_hint().exact() };
    // Of CONNECT, only handshakes of WebSockets are forwarded. They are logged as in HTTP/1.1, which Envoy does too.
    let is_websocket = head.method == Method::CONNECT;
    settings.template.capture(&LoggedRequest {
        method: if is_websocket { "GET" } else { head.method.as_str() },
        target: &target,
        path: uri.path(),
        query: uri.query().unwrap_or_default(),
        host: &host,
        version: version_numbers(head.version),
        remote: client.socket_addr(),
        length: length.and_then(|it| i64::try_from(it).ok()).unwrap_or(-1),
        headers: &headers,
    })
}

/// Value of a header as text. Bytes that are not UTF-8 are replaced; Knative's log does not show them either.
fn header_text(value: &HeaderValue) -> String {
    String::from_utf8_lossy(value.as_bytes()).into_owned()
}

fn version_numbers(version: Version) -> (u8, u8) {
    match version {
        Version::HTTP_10 => (1, 0),
        Version::HTTP_2 => (2, 0),
        _ => (1, 1),
    }
}

/// Entry of a request that is logged once it has ended, for whatever reason: dropping the entry queues the line.
#[derive(Debug)]
pub struct RequestLogEntry {
    log: Arc<RequestLogger>,
    settings: Arc<wire::RequestLogSettings>,
    captured: CapturedRequest,
    started_at: Instant,
    is_probe: bool,
    /// Revision of the request, with its owners. Requests without a Revision are not logged, except probes.
    revision: Option<(NamespacedName, RevisionOwnerNames)>,
    pod: Option<Arc<PodEndpoint>>,
    status: u16,
    body_bytes: u64,
}

impl RequestLogEntry {
    /// Sets the Revision of the request.
    pub fn set_revision(&mut self, name: &NamespacedName, owners: &RevisionOwnerNames) {
        self.revision = Some((name.clone(), owners.clone()));
    }

    /// Sets the pod that has sent the response.
    pub fn set_pod(&mut self, pod: &Arc<PodEndpoint>) {
        self.pod = Some(Arc::clone(pod));
    }

    /// Sets the status code of the response, which has begun.
    pub fn set_status(&mut self, code: http::StatusCode) {
        self.status = code.as_u16();
    }

    /// Adds bytes of the response that were passed on.
    pub fn add_body_bytes(&mut self, bytes: usize) {
        self.body_bytes = self.body_bytes.saturating_add(u64::try_from(bytes).unwrap_or(u64::MAX));
    }

    /// Number of bytes that the entry holds.
    pub fn held_bytes(&self) -> usize {
        size_of::<Self>() + self.captured.held_bytes()
    }

    fn format_line(&self) -> String {
        let response = LoggedResponse {
            code: self.status,
            size: self.body_bytes,
            latency: self.started_at.elapsed().as_secs_f64(),
        };
        let of = |field: fn(&(NamespacedName, RevisionOwnerNames)) -> &str| {
            self.revision.as_ref().map_or("", field)
        };
        let revision = LoggedRevision {
            name: of(|(name, _)| name.name.as_str()),
            namespace: of(|(name, _)| name.namespace.as_str()),
            service: of(|(_, owners)| owners.service.as_str()),
            configuration: of(|(_, owners)| owners.configuration.as_str()),
            pod_name: self.pod.as_ref().map_or("", |pod| &*pod.name),
            pod_ip: self.pod.as_ref().map(|pod| pod.key.address.ip()),
        };
        self.settings.template.render_line(&self.captured, &response, &revision)
    }
}

impl Drop for RequestLogEntry {
    fn drop(&mut self) {
        if self.is_probe || self.revision.is_some() {
            self.log.enqueue_line(self.format_line());
        }
    }
}

/// Starts the writing thread, which runs until all senders are gone.
fn spawn_writer(write: LogWriterTask) -> io::Result<()> {
    std::thread::Builder::new().name("request-log".to_owned()).spawn(write).map(drop)
}

/// Writes lines until all senders are gone.
fn run_writer(
    mut sink: RequestLogSink,
    messages: &Receiver<LogWriterMessage>,
    queued: &AtomicUsize,
    counts: &RequestLogCounters,
) {
    let mut is_broken = false;
    while let Ok(message) = messages.recv() {
        // The last write may have ended within a line.
        let mut batch = if is_broken { "\n".to_owned() } else { String::new() };
        // Lines that wait together are written together: one system call for each line would limit the rate.
        let (mut lines, mut size, mut flushed) = (0, 0, Vec::new());
        let mut next = Some(message);
        while let Some(message) = next {
            match message {
                LogWriterMessage::Line(line) => {
                    lines += 1;
                    size += line.len();
                    batch.push_str(&line);
                }
                LogWriterMessage::Flush(done) => flushed.push(done),
            }
            next = if batch.len() < WRITE_BATCH_BYTES { messages.try_recv().ok() } else { None };
        }
        let written = sink.write_all(batch.as_bytes()).and_then(|()| sink.flush());
        // Written or not, the bytes do not wait any more.
        queued.fetch_sub(size, Ordering::Relaxed);
        match &written {
            Ok(()) => {
                counts.written.inc_by(lines);
            }
            Err(error) => {
                if !is_broken {
                    warn!(%error, "request log cannot be written");
                }
                counts.dropped.inc_by(lines);
            }
        }
        is_broken = written.is_err();
        for done in flushed {
            let _flush_timed_out = done.send(());
        }
    }
}

#[cfg(test)]
mod tests;
