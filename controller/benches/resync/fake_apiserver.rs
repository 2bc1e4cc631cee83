//! Fake API server: it serves lists, watches and the Lease, and counts requests to write.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::State,
    http::{Method, Request, StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse as _, Response},
};
use controller::model::object::ResourceKind;
use futures::StreamExt as _;
use serde_json::Value;
use tokio::net::TcpListener;

use super::desired_cluster::{DesiredCluster, SYSTEM};

/// All objects, serialized for lists.
pub(super) struct FakeApiObjects {
    /// Objects by the path of their list.
    lists: BTreeMap<String, Vec<Box<str>>>,
    /// Number of requests to write anything but the Lease.
    writes: AtomicU64,
    /// Number of writes of the Lease.
    lease: AtomicU64,
}

impl FakeApiObjects {
    /// Returns the objects of a cluster, with the metadata that an API server adds.
    pub(super) fn from_cluster(cluster: DesiredCluster) -> Self {
        let mut lists: BTreeMap<String, Vec<Box<str>>> = BTreeMap::new();
        for (version, ((resource, name), mut object)) in cluster.objects.into_iter().enumerate() {
            object["metadata"]["resourceVersion"] = Value::from(version.to_string());
            let fields = managed_fields(&object);
            object["metadata"]["managedFields"] = fields;
            let is_system = name.namespace == SYSTEM;
            lists
                .entry(list_path(resource, is_system))
                .or_default()
                .push(object.to_string().into());
        }
        Self { lists, writes: AtomicU64::new(0), lease: AtomicU64::new(0) }
    }

    /// Returns the number of objects and their total size in bytes.
    pub(super) fn count_and_bytes(&self) -> (usize, usize) {
        let all = || self.lists.values().flatten();
        (all().count(), all().map(|it| it.len()).sum())
    }

    /// Returns the number of requests to write.
    pub(super) fn writes(&self) -> u64 {
        self.writes.load(Ordering::Relaxed)
    }

    /// Returns one page of a list as JSON.
    fn list_page(&self, path: &str, limit: usize, from: usize) -> String {
        let all = self.lists.get(path).map(Vec::as_slice).unwrap_or_default();
        let to = from.saturating_add(limit).min(all.len());
        let next = if to < all.len() { to.to_string() } else { String::new() };
        let items = all.get(from..to).unwrap_or_default().join(",");
        format!(
            r#"{{"kind":"List","apiVersion":"v1","metadata":{{"resourceVersion":"900000","continue":"{next}"}},"items":[{items}]}}"#
        )
    }

    /// Returns the Lease from the request, with a new version.
    fn lease(&self, body: &[u8]) -> String {
        let mut lease: Value = serde_json::from_slice(body).unwrap_or_default();
        let version = self.lease.fetch_add(1, Ordering::Relaxed) + 1_000_000;
        lease["metadata"]["resourceVersion"] = Value::from(version.to_string());
        lease.to_string()
    }
}

/// Returns `managedFields` for an object: the managers of each field, on a real API server a third of each object.
fn managed_fields(object: &Value) -> Value {
    fn fields(value: &Value) -> Value {
        match value {
            Value::Object(all) => {
                let named = all.iter().map(|(name, value)| (format!("f:{name}"), fields(value)));
                Value::Object(named.collect())
            }
            _ => Value::Object(serde_json::Map::new()),
        }
    }
    let of = |part: &str| fields(&object[part]);
    let set = serde_json::json!({"f:metadata": {"f:labels": fields(&object["metadata"]["labels"])}, "f:spec": of("spec"), "f:status": of("status")});
    serde_json::json!([{
        "manager": "rouse", "operation": "Apply", "apiVersion": object["apiVersion"], "fieldsType": "FieldsV1",
        "time": object["metadata"]["creationTimestamp"], "fieldsV1": set,
    }])
}

/// Returns the path of a kind's list, in the system namespace or in all namespaces.
fn list_path(resource: ResourceKind, system: bool) -> String {
    let root = if resource.group().is_empty() { "api" } else { "apis" };
    let namespace_path = if system { format!("/namespaces/{SYSTEM}") } else { String::new() };
    format!("/{root}/{}{namespace_path}/{}", resource.api_version(), resource.plural())
}

/// Serves the objects; returns the address.
pub(super) async fn serve(objects: Arc<FakeApiObjects>) -> std::io::Result<SocketAddr> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
    let address = listener.local_addr()?;
    let router = Router::new().fallback(respond).with_state(objects);
    tokio::spawn(async move { axum::serve(listener, router).await });
    Ok(address)
}

async fn respond(State(objects): State<Arc<FakeApiObjects>>, request: Request<Body>) -> Response {
    let (path, query) =
        (request.uri().path().to_owned(), request.uri().query().unwrap_or_default().to_owned());
    let parameter = |name: &str| {
        query.split('&').find_map(|it| it.strip_prefix(name)?.strip_prefix('=')).map(str::to_owned)
    };
    let number = |name: &str| parameter(name).and_then(|it| it.parse().ok());
    let is_lease = path.contains("/leases");
    match *request.method() {
        Method::GET if parameter("watch").is_some() => {
            // A watch without events: after the first list nothing changes in the cluster.
            let nothing = futures::stream::pending::<Result<Bytes, Infallible>>();
            json_response(Body::from_stream(nothing.boxed()))
        }
        Method::GET if is_lease && !path.ends_with("/leases") => {
            // No Lease at first, so the controller creates it and becomes the leader.
            let none = r#"{"kind":"Status","status":"Failure","reason":"NotFound","message":"not found","code":404}"#;
            (StatusCode::NOT_FOUND, json_response(none.into())).into_response()
        }
        Method::GET => json_response(
            objects
                .list_page(
                    &path,
                    number("limit").unwrap_or(usize::MAX),
                    number("continue").unwrap_or(0),
                )
                .into(),
        ),
        ref method => {
            let method = method.clone();
            let body =
                axum::body::to_bytes(request.into_body(), usize::MAX).await.unwrap_or_default();
            if is_lease {
                return json_response(objects.lease(&body).into());
            }
            // A complete start writes nothing, so the first few writes show the bug.
            if objects.writes.fetch_add(1, Ordering::Relaxed) < 5 {
                tracing::warn!(%method, path, body = %String::from_utf8_lossy(&body), "written");
            }
            json_response(body.into())
        }
    }
}

fn json_response(body: Body) -> Response {
    ([(CONTENT_TYPE, "application/json")], body).into_response()
}
