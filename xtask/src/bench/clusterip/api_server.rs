//! Shell: a stand-in for the API server: lists and watches of the objects that service proxies read, from memory.
//!
//! Each proxy has a server of its own, with objects of its own, so that a change reaches one proxy only. A change is
//! written to the proxy's watch by the thread that makes it. So its time is known, and no other step is part of it.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    io::{self, BufRead, BufReader, Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    os::fd::AsRawFd as _,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};
use nix::sys::socket;
use serde_json::{Value, json};

use crate::load::unix_us;

/// Pause between two bookmarks, by which clients see that a watch is alive. The API server sends one a minute.
const BOOKMARK_PERIOD: Duration = Duration::from_secs(20);
/// Size from which a part of a streamed list is sent, in bytes.
const CHUNK_BYTES: usize = 64 << 10;
/// Head of the response to a watch.
const WATCH_HEAD: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\
    transfer-encoding: chunked\r\n\r\n";

/// Kinds that the server knows: path, API version, kind.
const KINDS: [(&str, &str, &str); 5] = [
    ("/api/v1/services", "v1", "Service"),
    ("/apis/discovery.k8s.io/v1/endpointslices", "discovery.k8s.io/v1", "EndpointSlice"),
    ("/api/v1/namespaces", "v1", "Namespace"),
    ("/api/v1/nodes", "v1", "Node"),
    ("/apis/networking.k8s.io/v1/servicecidrs", "networking.k8s.io/v1", "ServiceCIDR"),
];

/// A running server. It closes its listener and all connections on drop.
#[derive(Debug)]
pub(super) struct BenchApiServer {
    objects: Arc<ServedObjects>,
    listener: TcpListener,
    /// The thread that sends bookmarks ends when this is dropped.
    _bookmarks: mpsc::Sender<()>,
}

/// Times of one change, Unix time in µs.
#[derive(Clone, Copy, Debug)]
pub(super) struct EventTimes {
    /// Begin of the write to the watch.
    pub(super) begun_us: u64,
    /// End of the write: the proxy's socket has the event.
    pub(super) received_us: u64,
}

/// Objects of all kinds, in the order of [`KINDS`], and the connections to be closed.
#[derive(Debug, Default)]
struct ServedObjects {
    kinds: [Mutex<ServedKind>; KINDS.len()],
    connections: Mutex<Vec<TcpStream>>,
}

/// Objects of one kind, and its watches.
#[derive(Debug, Default)]
struct ServedKind {
    version: u64,
    /// Objects as JSON, by name.
    objects: BTreeMap<String, String>,
    watches: Vec<TcpStream>,
}

/// Head of a request.
#[derive(Debug, PartialEq, Eq)]
struct ApiRequest {
    is_get: bool,
    path: String,
    query: String,
}

impl BenchApiServer {
    /// Serves on the listener. The objects must all have names.
    pub(super) fn start(
        listener: TcpListener,
        first_objects: impl Iterator<Item = Value>,
    ) -> Result<Self> {
        let objects = Arc::new(ServedObjects::default());
        let (bookmarks, stopped) = mpsc::channel();
        let accepting = listener.try_clone().context("cannot share a listener")?;
        let shared = Arc::clone(&objects);
        thread::spawn(move || {
            for stream in accepting.incoming().map_while(Result::ok) {
                shared.serve(stream);
            }
        });
        let shared = Arc::clone(&objects);
        thread::spawn(move || {
            // The channel ends with the server: its sender is never used.
            while stopped.recv_timeout(BOOKMARK_PERIOD) == Err(mpsc::RecvTimeoutError::Timeout) {
                shared.send_bookmarks();
            }
        });
        let server = Self { objects, listener, _bookmarks: bookmarks };
        for object in first_objects {
            server.set(object)?;
        }
        Ok(server)
    }

    /// Creates or replaces an object, and writes the event to the watches of its kind.
    pub(super) fn set(&self, mut object: Value) -> Result<EventTimes> {
        let index = KINDS.iter().position(|(.., kind)| object["kind"] == *kind);
        let index = index.with_context(|| format!("the kind {} is not served", object["kind"]))?;
        let name = object["metadata"]["name"].as_str().context("an object without a name")?;
        let name = name.to_owned();
        let mut kind = lock(&self.objects.kinds[index]);
        kind.version += 1;
        object["metadata"]["resourceVersion"] = kind.version.to_string().into();
        let text = object.to_string();
        let event = if kind.objects.contains_key(&name) { "MODIFIED" } else { "ADDED" };
        let chunk = encode_chunk(&event_line(event, &text));
        kind.objects.insert(name, text);
        // Taken last, so that the time does not contain the work of this server.
        let begun_us = unix_us();
        kind.write_to_watches(&chunk);
        Ok(EventTimes { begun_us, received_us: unix_us() })
    }
}

impl Drop for BenchApiServer {
    fn drop(&mut self) {
        // Errors mean that a socket is closed already. A listener that is shut down ends the thread that accepts.
        let _ = socket::shutdown(self.listener.as_raw_fd(), socket::Shutdown::Both);
        for stream in lock(&self.objects.connections).drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl ServedObjects {
    /// Serves a connection in a thread of its own.
    fn serve(self: &Arc<Self>, stream: TcpStream) {
        let shared = Arc::clone(self);
        if let Ok(closable) = stream.try_clone() {
            lock(&self.connections).push(closable);
        }
        // An error means that the client has closed the connection.
        thread::spawn(move || drop(shared.serve_requests(stream)));
    }

    fn serve_requests(&self, mut stream: TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        let mut reader = BufReader::new(stream.try_clone()?);
        while let Some(request) = read_request(&mut reader)? {
            let index = KINDS.iter().position(|(path, ..)| *path == request.path);
            let Some(index) = index.filter(|_| request.is_get) else {
                write_status(&mut stream, 404, "NotFound")?;
                continue;
            };
            if request.parameter("watch").is_none() {
                let list = lock(&self.kinds[index]).list(index);
                write_json(&mut stream, "200 OK", &list)?;
            } else if lock(&self.kinds[index]).open_watch(index, &request, &mut stream)? {
                // The connection is the watch's from here on. A client sends nothing more, and closes it in the end.
                io::copy(&mut reader, &mut io::sink())?;
                return Ok(());
            }
        }
        Ok(())
    }

    fn send_bookmarks(&self) {
        for (index, kind) in self.kinds.iter().enumerate() {
            let mut kind = lock(kind);
            let line = bookmark_line(index, kind.version, &json!({}));
            kind.write_to_watches(&encode_chunk(&line));
        }
    }
}

impl ServedKind {
    /// Writes to each watch, and forgets those whose client is gone.
    fn write_to_watches(&mut self, chunk: &[u8]) {
        self.watches.retain_mut(|stream| stream.write_all(chunk).is_ok());
    }

    fn list(&self, index: usize) -> String {
        let (_, api_version, kind) = KINDS[index];
        let metadata = json!({"resourceVersion": self.version.to_string()});
        let objects: Vec<&str> = self.objects.values().map(String::as_str).collect();
        format!(
            "{{\"kind\":\"{kind}List\",\"apiVersion\":\"{api_version}\",\
             \"metadata\":{metadata},\"items\":[{}]}}",
            objects.join(",")
        )
    }

    /// Answers a watch request. Returns true if the watch is open.
    fn open_watch(
        &mut self,
        index: usize,
        request: &ApiRequest,
        stream: &mut TcpStream,
    ) -> io::Result<bool> {
        let is_streamed_list = request.parameter("sendInitialEvents") == Some("true");
        let since = request.parameter("resourceVersion").unwrap_or("0");
        // A watch from version 0 begins with all objects, as the Kubernetes API defines it for an unset version, too.
        let begins_with_all = is_streamed_list || matches!(since, "" | "0");
        // Without a history only the present version can be continued, as after a compaction.
        if !begins_with_all && since != self.version.to_string() {
            write_status(stream, 410, "Expired")?;
            return Ok(false);
        }
        stream.write_all(WATCH_HEAD)?;
        let mut lines = String::new();
        for object in self.objects.values().filter(|_| begins_with_all) {
            lines += &event_line("ADDED", object);
            if lines.len() >= CHUNK_BYTES {
                stream.write_all(&encode_chunk(&lines))?;
                lines.clear();
            }
        }
        // A client of WatchList waits for this bookmark, which ends its initial list.
        if is_streamed_list {
            let annotations = json!({"k8s.io/initial-events-end": "true"});
            lines += &bookmark_line(index, self.version, &annotations);
        }
        // An empty chunk would end the response.
        if !lines.is_empty() {
            stream.write_all(&encode_chunk(&lines))?;
        }
        // Under the lock that events take, so that none comes before the list or is missed.
        self.watches.push(stream.try_clone()?);
        Ok(true)
    }
}

impl ApiRequest {
    /// Parses the first line of a request.
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        let (method, target) = (words.next()?, words.next()?);
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        Some(Self { is_get: method == "GET", path: path.to_owned(), query: query.to_owned() })
    }

    /// Returns the value of a parameter that needs no decoding.
    fn parameter(&self, name: &str) -> Option<&str> {
        let mut pairs = self.query.split('&').filter_map(|pair| pair.split_once('='));
        pairs.find(|(key, _)| *key == name).map(|(_, value)| value)
    }
}

/// Reads a request and drops its body. Returns `None` at the end of the connection.
fn read_request(reader: &mut impl BufRead) -> io::Result<Option<ApiRequest>> {
    let mut first = String::new();
    if reader.read_line(&mut first)? == 0 {
        return Ok(None);
    }
    let mut body_bytes = 0;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Ok(None);
        }
        if line.trim().is_empty() {
            break;
        }
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            body_bytes = value.trim().parse().unwrap_or(0);
        }
    }
    // A body that is not read would be taken for the next request.
    io::copy(&mut reader.take(body_bytes), &mut io::sink())?;
    Ok(ApiRequest::parse(&first))
}

fn event_line(event: &str, object: &str) -> String {
    format!("{{\"type\":\"{event}\",\"object\":{object}}}\n")
}

fn bookmark_line(index: usize, version: u64, annotations: &Value) -> String {
    let (_, api_version, kind) = KINDS[index];
    let metadata = json!({"resourceVersion": version.to_string(), "annotations": annotations});
    let object = json!({"apiVersion": api_version, "kind": kind, "metadata": metadata});
    event_line("BOOKMARK", &object.to_string())
}

/// Encodes a part of a response whose length is not known.
fn encode_chunk(text: &str) -> Vec<u8> {
    let mut chunk = String::with_capacity(text.len() + 16);
    // Writing to a string cannot fail.
    let _ = write!(chunk, "{:x}\r\n{text}\r\n", text.len());
    chunk.into_bytes()
}

fn write_json(stream: &mut TcpStream, status: &str, body: &str) -> io::Result<()> {
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())
}

fn write_status(stream: &mut TcpStream, code: u16, reason: &str) -> io::Result<()> {
    let status = json!({
        "apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": reason,
        "message": reason, "code": code,
    });
    write_json(stream, &format!("{code} {reason}"), &status.to_string())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(name: &str, port: u16) -> Value {
        json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "port": port})
    }

    fn start(objects: Vec<Value>) -> BenchApiServer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        BenchApiServer::start(listener, objects.into_iter()).unwrap()
    }

    /// Sends requests and returns the reader of their responses.
    fn send(server: &BenchApiServer, requests: &str) -> BufReader<TcpStream> {
        let mut stream = TcpStream::connect(server.listener.local_addr().unwrap()).unwrap();
        stream.write_all(requests.as_bytes()).unwrap();
        BufReader::new(stream)
    }

    /// Reads the lines of a response until one contains `end`.
    fn read_until(reader: &mut impl BufRead, end: &str) -> String {
        let mut text = String::new();
        loop {
            let mut line = String::new();
            assert_ne!(reader.read_line(&mut line).unwrap(), 0, "no {end} in {text}");
            text += &line;
            if line.contains(end) {
                return text;
            }
        }
    }

    #[test]
    fn a_streamed_list_ends_with_its_bookmark_and_changes_follow() {
        let server = start(vec![service("one", 1), service("two", 2)]);
        let query = "watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan";
        let mut watch = send(&server, &format!("GET /api/v1/services?{query} HTTP/1.1\r\n\r\n"));
        let first = read_until(&mut watch, "initial-events-end");
        assert_eq!(first.matches("\"ADDED\"").count(), 2, "{first}");
        let times = server.set(service("two", 3)).unwrap();
        assert!(times.begun_us <= times.received_us);
        let changed = read_until(&mut watch, "MODIFIED");
        assert!(changed.contains("\"port\":3") && changed.contains("\"3\""), "{changed}");
        server.set(service("three", 4)).unwrap();
        read_until(&mut watch, "ADDED");
    }

    #[test]
    fn a_connection_serves_a_list_after_a_refused_request_and_then_a_watch() {
        let server = start(vec![service("one", 1)]);
        let requests = "POST /apis/events HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody\
            GET /api/v1/services?limit=500 HTTP/1.1\r\n\r\n\
            GET /api/v1/services?watch=true&resourceVersion=7 HTTP/1.1\r\n\r\n\
            GET /api/v1/services?resourceVersion=1&watch=true HTTP/1.1\r\n\r\n";
        let mut connection = send(&server, requests);
        read_until(&mut connection, "404 NotFound");
        read_until(&mut connection, "content-type");
        let listed = read_until(&mut connection, "410 Expired");
        assert!(listed.contains("\"ServiceList\"") && listed.contains("\"one\""), "{listed}");
        read_until(&mut connection, "chunked");
        server.set(service("one", 2)).unwrap();
        let changed = read_until(&mut connection, "MODIFIED");
        assert!(!changed.contains("ADDED"), "{changed}");
    }

    #[test]
    fn an_unknown_kind_is_refused() {
        let server = start(Vec::new());
        let error = server.set(json!({"kind": "Pod", "metadata": {"name": "p"}})).unwrap_err();
        assert_eq!(error.to_string(), "the kind \"Pod\" is not served");
    }
}
