//! Shell: an API server of Services, EndpointSlices, namespaces, nodes and ServiceCIDRs, for lists and watches.
//! It keeps Events that are written.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use agent::pods::namespace::NetworkNamespace;
use futures::{StreamExt as _, stream};
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{
    Request, Response, StatusCode,
    body::{Bytes, Frame, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::sync::watch;

type ResponseBody = UnsyncBoxBody<Bytes, Infallible>;

/// Address of the first server in the namespace of the node.
pub(super) const SERVER_ADDRESS: &str = "127.0.0.1:6443";

/// Kinds that the server knows: path, API version, kind.
const KINDS: [(&str, &str, &str); 5] = [
    ("/api/v1/services", "v1", "Service"),
    ("/apis/discovery.k8s.io/v1/endpointslices", "discovery.k8s.io/v1", "EndpointSlice"),
    ("/api/v1/namespaces", "v1", "Namespace"),
    ("/api/v1/nodes", "v1", "Node"),
    ("/apis/networking.k8s.io/v1/servicecidrs", "networking.k8s.io/v1", "ServiceCIDR"),
];

/// The server, which runs until it is dropped.
pub(super) struct FakeWatchServer {
    address: &'static str,
    objects: Arc<ApiObjects>,
    /// `None` while the server is stopped.
    runtime: Option<tokio::runtime::Runtime>,
}

/// Objects and their history.
struct ApiObjects {
    /// True if the first objects of a watch may come as its events.
    streams_lists: bool,
    state: Mutex<ApiState>,
    /// Last resource version.
    version: watch::Sender<u64>,
}

#[derive(Default)]
struct ApiState {
    version: u64,
    /// Objects by kind and name.
    objects: BTreeMap<(String, String), Value>,
    /// Events of watches by resource version, each with its kind.
    events: Vec<(u64, String, Value)>,
    /// Kubernetes Events that clients have created or changed, in this order.
    written_events: Vec<Value>,
}

impl FakeWatchServer {
    /// Starts the server in the namespace of a test's node. It streams lists, as Kubernetes does since 1.32.
    pub(super) fn start(netns: &str) -> Self {
        Self::start_with_lists(netns, true)
    }

    /// Starts the server as [`Self::start`] does; `streams_lists` is true if it streams lists.
    pub(super) fn start_with_lists(netns: &str, streams_lists: bool) -> Self {
        let objects = Arc::new(ApiObjects {
            streams_lists,
            state: Mutex::default(),
            version: watch::Sender::new(0),
        });
        let mut server = Self { address: SERVER_ADDRESS, objects, runtime: None };
        server.resume(netns);
        server
    }

    /// Starts another server with the same objects, at another address in the namespace.
    pub(super) fn start_replica(&self, netns: &str, address: &'static str) -> Self {
        let mut server = Self { address, objects: Arc::clone(&self.objects), runtime: None };
        server.resume(netns);
        server
    }

    /// Closes the listener and all connections.
    pub(super) fn stop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(60));
        }
    }

    /// Serves again in the namespace, with the same objects.
    pub(super) fn resume(&mut self, netns: &str) {
        let namespace = NetworkNamespace::open(format!("/run/netns/{netns}")).expect("it exists");
        let address: SocketAddr = self.address.parse().expect("an address");
        let listener = namespace
            .run_inside("listen", || std::net::TcpListener::bind(address))
            .expect("the port is free");
        listener.set_nonblocking(true).expect("a socket");
        let objects = Arc::clone(&self.objects);
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener).expect("a listener");
            while let Ok((stream, _)) = listener.accept().await {
                let objects = Arc::clone(&objects);
                let service = service_fn(move |request: Request<Incoming>| {
                    let objects = Arc::clone(&objects);
                    async move {
                        let (head, body) = request.into_parts();
                        let body = body.collect().await.map(|it| it.to_bytes());
                        let body = body.unwrap_or_default();
                        Ok::<_, Infallible>(objects.respond(&head.uri, &body))
                    }
                });
                tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
            }
        });
        self.runtime = Some(runtime);
    }

    /// Returns a kubeconfig that leads to the server.
    pub(super) fn kubeconfig() -> Value {
        let named = |key: &str, value: Value| json!([{"name": "test", key: value}]);
        json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": named("cluster", json!({"server": format!("http://{SERVER_ADDRESS}")})),
            "users": named("user", json!({})),
            "contexts": named("context", json!({"cluster": "test", "user": "test"})),
        })
    }

    /// Returns the Kubernetes Events that clients have written so far.
    pub(super) fn written_events(&self) -> Vec<Value> {
        self.objects.lock().written_events.clone()
    }

    /// Creates or replaces an object.
    pub(super) fn set(&self, object: Value) {
        self.objects.change(object, false);
    }

    /// Deletes an object.
    pub(super) fn delete(&self, kind: &str, name: &str) {
        let key = (kind.to_owned(), name.to_owned());
        let object = self.objects.lock().objects.get(&key).cloned();
        self.objects.change(object.expect("it exists"), true);
    }

    /// Deletes an object of which watches learn nothing, as one that is deleted while they are broken for long.
    pub(super) fn delete_silently(&self, kind: &str, name: &str) {
        let mut state = self.objects.lock();
        state.objects.remove(&(kind.to_owned(), name.to_owned())).expect("it exists");
        // Watches begin again with a list.
        state.events.clear();
        state.version += 1;
    }
}

impl ApiObjects {
    fn lock(&self) -> std::sync::MutexGuard<'_, ApiState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, mut object: Value, is_deleted: bool) {
        let mut state = self.lock();
        state.version += 1;
        let version = state.version;
        object["metadata"]["resourceVersion"] = version.to_string().into();
        let text = |value: &Value| value.as_str().expect("text").to_owned();
        let kind = text(&object["kind"]);
        let key = (kind.clone(), text(&object["metadata"]["name"]));
        let existed = match is_deleted {
            true => state.objects.remove(&key),
            false => state.objects.insert(key, object.clone()),
        };
        let event = match (is_deleted, existed) {
            (true, _) => "DELETED",
            (false, Some(_)) => "MODIFIED",
            (false, None) => "ADDED",
        };
        state.events.push((version, kind, json!({"type": event, "object": object})));
        drop(state);
        self.version.send_replace(version);
    }

    fn respond(self: &Arc<Self>, uri: &hyper::Uri, body: &[u8]) -> Response<ResponseBody> {
        if uri.path().starts_with("/apis/events.k8s.io/v1/") {
            let event: Value = serde_json::from_slice(body).expect("an Event");
            self.lock().written_events.push(event.clone());
            return json_response(StatusCode::CREATED, &event);
        }
        if let Some(name) = uri.path().strip_prefix("/api/v1/namespaces/default/services/") {
            let key = ("Service".to_owned(), name.to_owned());
            let found = self.lock().objects.get(&key).cloned();
            let response = found.map(|object| json_response(StatusCode::OK, &object));
            return response.unwrap_or_else(not_found);
        }
        let query = uri.query().unwrap_or_default();
        let parameter = |name: &str| {
            let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
            pairs.into_iter().find(|(key, _)| *key == name).map(|(_, value)| value)
        };
        let Some((_, api_version, kind)) = KINDS.iter().find(|(path, ..)| *path == uri.path())
        else {
            return not_found();
        };
        if parameter("watch").is_none() {
            return json_response(StatusCode::OK, &self.list(api_version, kind));
        }
        let is_streamed_list = parameter("sendInitialEvents") == Some("true");
        if is_streamed_list && !self.streams_lists {
            let message = "sendInitialEvents is forbidden for watch";
            let status = json!({
                "apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": "Invalid",
                "message": message, "code": 422,
            });
            return json_response(StatusCode::UNPROCESSABLE_ENTITY, &status);
        }
        let since = parameter("resourceVersion").and_then(|it| it.parse().ok()).unwrap_or(0);
        self.watch(api_version, kind, since, is_streamed_list)
    }

    fn list(&self, api_version: &str, kind: &str) -> Value {
        let state = self.lock();
        let items = state.objects.iter().filter(|((it, _), _)| it == kind).map(|(_, it)| it);
        json!({
            "apiVersion": api_version, "kind": format!("{kind}List"),
            "metadata": {"resourceVersion": state.version.to_string()},
            "items": items.collect::<Vec<_>>(),
        })
    }

    /// Returns the events of a kind since a version; first all objects, if the list is streamed.
    fn watch(
        self: &Arc<Self>,
        api_version: &str,
        kind: &str,
        since: u64,
        is_streamed_list: bool,
    ) -> Response<ResponseBody> {
        let (first, since) = match is_streamed_list {
            true => self.initial_events(api_version, kind),
            false => (Vec::new(), since),
        };
        let (objects, kind) = (Arc::clone(self), kind.to_owned());
        let state = (objects, self.version.subscribe(), since);
        let later = stream::unfold(state, move |(objects, mut version, since)| {
            let kind = kind.clone();
            async move {
                loop {
                    let current = *version.borrow_and_update();
                    let events = objects.events_since(&kind, since);
                    if !events.is_empty() {
                        return Some((stream::iter(events), (objects, version, current)));
                    }
                    version.changed().await.ok()?;
                }
            }
        });
        let events = stream::iter(first).chain(later.flatten());
        let lines = events.map(|event| Ok(Frame::data(Bytes::from(format!("{event}\n")))));
        let body = StreamBody::new(lines).boxed_unsync();
        let response = Response::builder().header("content-type", "application/json");
        response.body(body).expect("a valid response")
    }

    /// Returns all objects of a kind as events, with the bookmark that ends them, and their version.
    fn initial_events(&self, api_version: &str, kind: &str) -> (Vec<Value>, u64) {
        let state = self.lock();
        let objects = state.objects.iter().filter(|((it, _), _)| it == kind);
        let mut events: Vec<Value> =
            objects.map(|(_, object)| json!({"type": "ADDED", "object": object})).collect();
        let metadata = json!({
            "resourceVersion": state.version.to_string(),
            "annotations": {"k8s.io/initial-events-end": "true"},
        });
        let end = json!({"apiVersion": api_version, "kind": kind, "metadata": metadata});
        events.push(json!({"type": "BOOKMARK", "object": end}));
        (events, state.version)
    }

    fn events_since(&self, kind: &str, since: u64) -> Vec<Value> {
        let state = self.lock();
        let new = state.events.iter().filter(|(at, it, _)| *at > since && it == kind);
        new.map(|(.., event)| event.clone()).collect()
    }
}

fn not_found() -> Response<ResponseBody> {
    let status = json!({
        "apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": "NotFound",
        "message": "not found", "code": 404,
    });
    json_response(StatusCode::NOT_FOUND, &status)
}

fn json_response(status: StatusCode, value: &Value) -> Response<ResponseBody> {
    let response = Response::builder().status(status).header("content-type", "application/json");
    let body = Full::new(Bytes::from(value.to_string())).boxed_unsync();
    response.body(body).expect("a valid response")
}
