//! Shell: one line on standard output for each finished request, while operators have the request log on.
//!
//! A request puts its line into a bounded queue, and a thread writes the lines from there. A full pipe, a slow disk or
//! a closed output therefore delays no request. Lines that find no room, or cannot be written, are counted.

use std::{
    borrow::Cow,
    fmt, io,
    sync::{
        Arc, Mutex, OnceLock, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    time::{Duration, Instant},
};

use common::{
    link::RouteBatch,
    request_log::{CapturedRequest, LoggedRequest, LoggedResponse, LoggedRevision},
    wire::{self, NamespacedName, RouteChange, RouteKey},
};
use http::{HeaderValue, Version, header, request};
use http_body::Body;
use prometheus_client::metrics::counter::Counter;
use tokio::sync::oneshot;
use tracing::{info, warn};

use crate::{
    gateway::{ClientInfo, Entrypoint},
    headers::TrafficOrigin,
    pods::PodEndpoint,
    probe,
    revision::RevisionOwnerNames,
};

/// Maximum number of lines that wait to be written.
const MOST_LINES: usize = 8192;
/// Maximum number of bytes of these lines.
const MOST_BYTES: usize = 8 << 20;
/// Bytes that are written at once if as many wait.
const BATCH: usize = 64 << 10;
/// Code of a request whose client was gone before the response: nginx's, because HTTP has none.
const CLIENT_CLOSED_REQUEST: u16 = 499;

/// Output that lines are written to.
pub type RequestLogSink = Box<dyn io::Write + Send>;

/// Counters of lines, by outcome.
#[derive(Clone, Debug, Default)]
pub struct RequestLogCounters {
    /// Number of lines written.
    pub written: Counter,
    /// Number of lines that found no room or could not be written.
    pub dropped: Counter,
}

/// Request log, off until the settings of the RouteTable turn it on.
pub struct RequestLogger {
    is_on: AtomicBool,
    rules: RwLock<Option<Arc<wire::RequestLogSettings>>>,
    sink: Mutex<Option<RequestLogSink>>,
    /// Channel to the writing thread, which is started with the first rules.
    lines: OnceLock<SyncSender<LogWriterMessage>>,
    /// Bytes of the lines that wait.
    queued: Arc<AtomicUsize>,
    counts: RequestLogCounters,
}

/// Message to the writing thread.
enum LogWriterMessage {
    Line(String),
    /// Request for a notice once everything before it is written.
    Flush(oneshot::Sender<()>),
}

impl RequestLogger {
    /// Creates a log that writes to standard output, once it is on.
    pub fn new(counts: RequestLogCounters) -> Self {
        Self {
            is_on: AtomicBool::new(false),
            rules: RwLock::default(),
            sink: Mutex::new(Some(Box::new(io::stdout()))),
            lines: OnceLock::new(),
            queued: Arc::default(),
            counts,
        }
    }

    /// Sets another output. It has no effect once the log was on.
    pub fn write_to(&self, sink: RequestLogSink) {
        *self.sink.lock().unwrap_or_else(PoisonError::into_inner) = Some(sink);
    }

    /// Applies the settings of a batch of the RouteTable.
    pub fn follow(&self, batch: &RouteBatch) {
        match batch.changes.get(&RouteKey::Settings) {
            Some(RouteChange::Settings(it)) => self.set(it.request_log.clone()),
            None if !batch.is_whole => {}
            Some(_) | None => self.set(None),
        }
    }

    /// Sets the rules for requests that arrive from now on. `None`: requests are not logged.
    fn set(&self, rules: Option<wire::RequestLogSettings>) {
        let mut now = self.rules.write().unwrap_or_else(PoisonError::into_inner);
        if now.as_deref() == rules.as_ref() {
            return;
        }
        let (is_on, probes) = (rules.is_some(), rules.as_ref().is_some_and(|it| it.probes));
        info!(is_on, probes, "request log set");
        // The thread is running before the first request can see the log as on.
        if is_on {
            self.start();
        }
        *now = rules.map(Arc::new);
        self.is_on.store(is_on, Ordering::Release);
    }

    fn start(&self) {
        let Some(sink) = self.sink.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            return;
        };
        let (lines, words) = sync_channel(MOST_LINES);
        let (queued, counts) = (Arc::clone(&self.queued), self.counts.clone());
        let write = move || write(sink, &words, &queued, &counts);
        match std::thread::Builder::new().name("request-log".to_owned()).spawn(write) {
            Ok(_runs_until_all_senders_are_gone) => drop(self.lines.set(lines)),
            Err(error) => warn!(%error, "cannot start a thread: requests are not logged"),
        }
    }

    /// Starts the entry of a request that has arrived. `None`: the request is not logged.
    pub fn begin(
        self: &Arc<Self>,
        head: &request::Parts,
        body: &impl Body,
        door: Entrypoint,
        client: ClientInfo,
    ) -> Option<Box<RequestLogEntry>> {
        // Off is the usual case: it costs one relaxed load for each request, and no lock.
        if !self.is_on.load(Ordering::Relaxed) {
            return None;
        }
        let rules = self.rules.read().unwrap_or_else(PoisonError::into_inner).clone()?;
        let is_probe = door.side() == TrafficOrigin::Inside && probe::probe(head).is_some();
        if is_probe && !rules.probes {
            return None;
        }
        let taken = take(&rules, head, body, client);
        Some(Box::new(RequestLogEntry {
            log: Arc::clone(self),
            rules,
            taken,
            begun: Instant::now(),
            is_probe,
            revision: None,
            pod: None,
            code: CLIENT_CLOSED_REQUEST,
            size: 0,
        }))
    }

    /// Waits until the lines so far are written, at most for `bound`.
    pub async fn flush(&self, bound: Duration) {
        let Some(lines) = self.lines.get() else { return };
        let (done, written) = oneshot::channel();
        if lines.try_send(LogWriterMessage::Flush(done)).is_ok() {
            let _in_time = tokio::time::timeout(bound, written).await;
        }
    }

    fn push(&self, line: String) {
        let Some(lines) = self.lines.get() else { return };
        let size = line.len();
        // Reserved before it is sent, so that several requests at once cannot exceed the bound together.
        let has_room = self.queued.fetch_add(size, Ordering::Relaxed) + size <= MOST_BYTES;
        if !has_room || lines.try_send(LogWriterMessage::Line(line)).is_err() {
            self.queued.fetch_sub(size, Ordering::Relaxed);
            self.counts.dropped.inc();
        }
    }
}

impl fmt::Debug for RequestLogger {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("RequestLog").field("is_on", &self.is_on).finish_non_exhaustive()
    }
}

/// Captures the parts of a request that the template needs.
fn take(
    rules: &wire::RequestLogSettings,
    head: &request::Parts,
    body: &impl Body,
    client: ClientInfo,
) -> CapturedRequest {
    let headers = |name: &str| head.headers.get_all(name).iter().map(text).collect();
    let uri = &head.uri;
    // In HTTP/2 every request has scheme and host in its target, and Go shows neither in this field.
    let is_whole = uri.scheme().is_some() && head.version < Version::HTTP_2;
    let target = match uri.path_and_query() {
        Some(target) if !is_whole => Cow::Borrowed(target.as_str()),
        _ => uri.to_string().into(),
    };
    let asked = head.headers.get(header::HOST).map(text);
    let authority = || uri.authority().map_or("", |it| it.as_str()).to_owned();
    let host = asked.unwrap_or_else(authority);
    let known = if body.is_end_stream() { Some(0) } else { body.size_hint().exact() };
    rules.template.take(&LoggedRequest {
        method: head.method.as_str(),
        target: &target,
        path: uri.path(),
        query: uri.query().unwrap_or_default(),
        host: &host,
        version: version(head.version),
        remote: client.socket(),
        length: known.and_then(|it| i64::try_from(it).ok()).unwrap_or(-1),
        headers: &headers,
    })
}

/// Value of a header as text; Go shows no byte that is not UTF-8 either.
fn text(value: &HeaderValue) -> String {
    String::from_utf8_lossy(value.as_bytes()).into_owned()
}

fn version(version: Version) -> (u8, u8) {
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
    rules: Arc<wire::RequestLogSettings>,
    taken: CapturedRequest,
    begun: Instant,
    is_probe: bool,
    /// Revision of the request, with its owners. Requests without a revision are not logged, except probes.
    revision: Option<(NamespacedName, RevisionOwnerNames)>,
    pod: Option<Arc<PodEndpoint>>,
    code: u16,
    size: u64,
}

impl RequestLogEntry {
    /// Sets the revision of the request.
    pub fn set_revision(&mut self, name: &NamespacedName, owners: &RevisionOwnerNames) {
        self.revision = Some((name.clone(), owners.clone()));
    }

    /// Sets the pod that has answered the request.
    pub fn set_pod(&mut self, pod: &Arc<PodEndpoint>) {
        self.pod = Some(Arc::clone(pod));
    }

    /// Sets the status code of the response, which has begun.
    pub fn set_status(&mut self, code: http::StatusCode) {
        self.code = code.as_u16();
    }

    /// Adds bytes of the response that were passed on.
    pub fn passed_on(&mut self, bytes: usize) {
        self.size = self.size.saturating_add(u64::try_from(bytes).unwrap_or(u64::MAX));
    }

    fn line(&self) -> String {
        let response = LoggedResponse {
            code: self.code,
            size: self.size,
            latency: self.begun.elapsed().as_secs_f64(),
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
        self.rules.template.line(&self.taken, &response, &revision)
    }
}

impl Drop for RequestLogEntry {
    fn drop(&mut self) {
        if self.is_probe || self.revision.is_some() {
            self.log.push(self.line());
        }
    }
}

/// Writes lines until all senders are gone.
fn write(
    mut sink: RequestLogSink,
    words: &Receiver<LogWriterMessage>,
    queued: &AtomicUsize,
    counts: &RequestLogCounters,
) {
    let mut is_broken = false;
    while let Ok(word) = words.recv() {
        // The last write may have ended within a line.
        let mut batch = if is_broken { "\n".to_owned() } else { String::new() };
        // Lines that wait together are written together: one system call for each line would limit the rate.
        let (mut lines, mut size, mut flushed) = (0, 0, Vec::new());
        let mut next = Some(word);
        while let Some(word) = next {
            match word {
                LogWriterMessage::Line(line) => {
                    lines += 1;
                    size += line.len();
                    batch.push_str(&line);
                }
                LogWriterMessage::Flush(done) => flushed.push(done),
            }
            next = if batch.len() < BATCH { words.try_recv().ok() } else { None };
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
            let _nobody_waits = done.send(());
        }
    }
}
