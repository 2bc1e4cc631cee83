//! Shell: patches by which the writer reduces and restores the resource requests of pods on standby.

use std::time::Duration;

use kube::api::{DynamicObject, Patch, PatchParams};
use tracing::info;

use super::ObjectWriter;
use crate::{
    model::object::{
        FIELD_MANAGER, ObjectPartKey, PodRequests, REQUESTS_NOT_REDUCED, REQUESTS_NOT_RESTORED,
        WriteError,
    },
    shell::api::{
        client::object_api,
        object_cache::ObjectOrigin,
        pod_resize::{ResizePatches, plan_resize},
        write_decision::WriteAction,
        write_outcome::WriteOutcome,
    },
};

/// Name of the subresource that resizes a pod, in the list of the core API's resources. It exists from Kubernetes 1.33
/// on.
const RESIZE_RESOURCE: &str = "pods/resize";
/// Time after which the writer asks the API server again for the list of its resources.
const SUPPORT_CHECK_INTERVAL: Duration = Duration::from_secs(3600);

impl ObjectWriter {
    /// Gives the pod with this UID the resource requests that it should have. An API server that cannot resize pods is
    /// no error: the pod keeps its requests, and the log says so. The reason of another error states what was not
    /// possible.
    pub(super) async fn resize(
        &self,
        key: &ObjectPartKey,
        uid: &str,
        requests: PodRequests,
    ) -> WriteOutcome {
        let outcome = self.attempt_resize(key, uid, requests).await;
        with_purpose(outcome, requests)
    }

    /// Reads a pod and changes its requests. A pod with another UID is left alone.
    async fn attempt_resize(
        &self,
        key: &ObjectPartKey,
        uid: &str,
        requests: PodRequests,
    ) -> WriteOutcome {
        match self.can_resize().await {
            Ok(true) => {}
            Ok(false) => return WriteOutcome::Done,
            Err(error) => return self.handle_error(key, error).await,
        }
        let api = object_api(&self.client, key.resource, &key.name);
        let pod = match api.get_opt(&key.name.name).await {
            Ok(pod) => pod.filter(|it| it.metadata.uid.as_deref() == Some(uid)),
            Err(error) => return self.handle_error(key, error).await,
        };
        // The pod is gone, or another one has its name. The watch reports that, if it has not done so yet.
        let Some(Ok(pod)) = pod.map(serde_json::to_value) else { return WriteOutcome::Done };
        let patches = match plan_resize(&pod, requests) {
            Ok(patches) => patches,
            Err(error) => return WriteOutcome::Unsupported(error),
        };
        // Before the patches: an attempt that fails may have sent a part of them, so the pod's requests are not known.
        self.with_state(|state| state.reduced_pods.remove(key));
        match self.send_patches(key, &patches).await {
            Ok(Some(object)) => {
                info!(object = %key, ?requests, "resized");
                self.store_response(key, object, ObjectOrigin::Observed);
            }
            Ok(None) => {}
            Err(error) => return self.handle_error(key, error).await,
        }
        // Remembered, so that a later action with the same requests costs no request to the API server.
        if requests != PodRequests::Original {
            let reduced = (uid.into(), requests);
            self.with_state(|state| state.reduced_pods.insert(key.clone(), reduced));
        }
        WriteOutcome::Done
    }

    /// Sends the patches in their order. Returns the last response; `None`: there was nothing to send.
    async fn send_patches(
        &self,
        key: &ObjectPartKey,
        patches: &ResizePatches,
    ) -> Result<Option<DynamicObject>, kube::Error> {
        let (api, name) = (object_api(&self.client, key.resource, &key.name), &key.name.name);
        let params =
            PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() };
        let mut latest = None;
        if let Some(note) = &patches.note {
            latest = Some(api.patch(name, &params, &Patch::Merge(note)).await?);
        }
        if let Some(body) = &patches.resize {
            let patch = Patch::Strategic(body);
            latest = Some(api.patch_subresource("resize", name, &params, &patch).await?);
        }
        // The note is removed last: while requests may be reduced, it must name the original ones.
        if let Some(release) = &patches.release {
            latest = Some(api.patch(name, &params, &Patch::Merge(release)).await?);
        }
        Ok(latest)
    }

    /// Returns true if the API server can resize pods. The result is used for an hour, as the API server may be
    /// upgraded.
    async fn can_resize(&self) -> Result<bool, kube::Error> {
        let now = self.now();
        // The lock is not held over the request.
        let known = self.with_state(|state| state.resize_support.filter(|(_, end)| now < *end));
        if let Some((can_resize, _)) = known {
            return Ok(can_resize);
        }
        let resources = self.client.list_core_api_resources("v1").await?.resources;
        let can_resize = resources.iter().any(|it| it.name == RESIZE_RESOURCE);
        if !can_resize {
            info!("frozen pods keep their requests: the API server has no pods/resize");
        }
        let interval = u64::try_from(SUPPORT_CHECK_INTERVAL.as_millis()).unwrap_or(u64::MAX);
        self.with_state(|state| state.resize_support = Some((can_resize, now.plus_ms(interval))));
        Ok(can_resize)
    }

    /// Returns true if this leader has given the pod the reduced requests of the action already. A pod that it has
    /// restored has no desired requests once the watch has reported that.
    pub(super) fn is_resized(&self, key: &ObjectPartKey, action: &WriteAction) -> bool {
        let WriteAction::Resize { uid, requests } = action else { return false };
        self.with_state(|state| {
            let reduced = state.reduced_pods.get(key);
            reduced.is_some_and(|(known_uid, known)| known_uid == uid && known == requests)
        })
    }
}

/// Replaces the reason of an error by that of a failed reduction or restoration. When the error is handled, other
/// requests may be due, so they would not show what the resize was for.
fn with_purpose(outcome: WriteOutcome, requests: PodRequests) -> WriteOutcome {
    let reason = match requests {
        PodRequests::Original => REQUESTS_NOT_RESTORED,
        PodRequests::Reduced { .. } => REQUESTS_NOT_REDUCED,
    };
    let named = |error: WriteError| WriteError { reason, ..error };
    match outcome {
        WriteOutcome::Retry(Some(error)) => WriteOutcome::Retry(Some(named(error))),
        WriteOutcome::Refused(error) => WriteOutcome::Refused(named(error)),
        // A pod that cannot be resized has a reason of its own, by which no smaller reduction is tried.
        WriteOutcome::Unsupported(error) if requests == PodRequests::Original => {
            WriteOutcome::Unsupported(named(error))
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use common::wire::NamespacedName;
    use hyper::{Method, Request, Response};
    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        model::{
            knative::key::ORIGINAL_REQUESTS,
            object::{ObjectPart, RESIZE_UNSUPPORTED, ResourceKind},
        },
        shell::api::write_queue::WriteLimits,
    };

    /// API server with one pod. It refuses patches of the subresource with `resize_code`, unless that is 200.
    struct ResizeApiServer {
        resources: Value,
        pod: Value,
        resize_code: u16,
        requests: Vec<String>,
    }

    impl ResizeApiServer {
        fn new() -> Self {
            let container = json!({
                "name": "user-container", "resources": {"requests": {"cpu": "500m", "memory": "64Mi"}},
            });
            let status =
                json!({"name": "user-container", "state": {"running": {}}, "resources": {}});
            let pod = json!({
                "apiVersion": "v1", "kind": "Pod",
                "metadata": {"name": "a-1", "namespace": "default", "uid": "u", "resourceVersion": "7"},
                "spec": {"containers": [container]},
                "status": {"qosClass": "Burstable", "containerStatuses": [status]},
            });
            let resource = |name: &str| {
                json!({
                    "name": name, "singularName": "", "namespaced": true, "kind": "Pod", "verbs": ["patch"],
                })
            };
            let resources = json!([resource("pods"), resource("pods/resize")]);
            Self { resources, pod, resize_code: 200, requests: Vec::new() }
        }

        fn answer(&mut self, method: &Method, path: &str, body: &Value) -> (u16, Value) {
            self.requests.push(format!("{method} {path}"));
            let requests = &body["spec"]["containers"][0]["resources"]["requests"];
            match path.rsplit('/').next() {
                Some("v1") => {
                    let list = json!({
                        "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "v1",
                        "resources": self.resources,
                    });
                    return (200, list);
                }
                Some("resize") if self.resize_code != 200 => {
                    let code = self.resize_code;
                    let message = "pods \"a-1\" is forbidden: exceeded quota: small";
                    let status = json!({
                        "kind": "Status", "status": "Failure", "code": code, "message": message,
                    });
                    return (code, status);
                }
                Some("resize") => {
                    for (resource, amount) in requests.as_object().into_iter().flatten() {
                        self.pod["spec"]["containers"][0]["resources"]["requests"][resource] =
                            amount.clone();
                    }
                }
                _ if *method == Method::PATCH => {
                    let annotations = body["metadata"]["annotations"].as_object();
                    let set = annotations.into_iter().flatten().filter(|(_, it)| !it.is_null());
                    let set: serde_json::Map<String, Value> =
                        set.map(|(name, value)| (name.clone(), value.clone())).collect();
                    self.pod["metadata"]["annotations"] = Value::Object(set);
                }
                _ => {}
            }
            (200, self.pod.clone())
        }
    }

    fn writer_for(server: ResizeApiServer) -> (ObjectWriter, Arc<Mutex<ResizeApiServer>>) {
        let server = Arc::new(Mutex::new(server));
        let answering = Arc::clone(&server);
        let service = tower::service_fn(move |request: Request<Body>| {
            let answering = Arc::clone(&answering);
            async move {
                let (method, path) = (request.method().clone(), request.uri().path().to_owned());
                let body = request.into_body().collect_bytes().await.expect("a body");
                let body = serde_json::from_slice(&body).unwrap_or_default();
                let (code, answer) =
                    answering.lock().expect("no panic").answer(&method, &path, &body);
                let body = Body::from(answer.to_string().into_bytes());
                Response::builder().status(code).body(body)
            }
        });
        let client = kube::Client::new(service, "default");
        (ObjectWriter::new(client, WriteLimits::default(), Arc::default()), server)
    }

    fn key() -> ObjectPartKey {
        let name = NamespacedName::new("default", "a-1");
        ObjectPartKey::new(ResourceKind::Pod, ObjectPart::Resize, name)
    }

    const REDUCED: PodRequests = PodRequests::Reduced { memory_mib: Some(10) };
    const POD: &str = "/api/v1/namespaces/default/pods/a-1";

    fn is_resized(writer: &ObjectWriter) -> bool {
        writer.is_resized(&key(), &WriteAction::Resize { uid: "u".into(), requests: REDUCED })
    }

    /// Before the first patch of the subresource, the note must be stored: nothing else keeps the original requests.
    #[tokio::test(start_paused = true)]
    async fn requests_are_noted_then_reduced_and_restored_before_the_note_goes() {
        let (writer, server) = writer_for(ResizeApiServer::new());
        assert!(!is_resized(&writer));
        assert_eq!(writer.resize(&key(), "u", REDUCED).await, WriteOutcome::Done);
        assert!(is_resized(&writer), "the key need not be written again");
        let stored = server.lock().expect("no panic").pod.clone();
        let requests = |pod: &Value| pod["spec"]["containers"][0]["resources"]["requests"].clone();
        assert_eq!(requests(&stored), json!({"cpu": "1m", "memory": "10Mi"}));
        assert!(stored["metadata"]["annotations"][ORIGINAL_REQUESTS].is_string());
        assert_eq!(writer.resize(&key(), "u", PodRequests::Original).await, WriteOutcome::Done);
        assert!(!is_resized(&writer));
        let server = server.lock().expect("no panic");
        assert_eq!(requests(&server.pod), json!({"cpu": "500m", "memory": "64Mi"}));
        assert_eq!(server.pod["metadata"]["annotations"], json!({}));
        let expected = [
            "GET /api/v1".to_owned(),
            format!("GET {POD}"),
            format!("PATCH {POD}"),
            format!("PATCH {POD}/resize"),
            format!("GET {POD}"),
            format!("PATCH {POD}/resize"),
            format!("PATCH {POD}"),
        ];
        assert_eq!(server.requests, expected);
    }

    #[tokio::test(start_paused = true)]
    async fn an_api_server_without_the_subresource_is_asked_once() {
        let mut server = ResizeApiServer::new();
        server.resources = json!([]);
        let (writer, server) = writer_for(server);
        for _ in 0..2 {
            assert_eq!(writer.resize(&key(), "u", REDUCED).await, WriteOutcome::Done);
        }
        assert_eq!(server.lock().expect("no panic").requests, ["GET /api/v1"]);
        // It may be upgraded, and then the pod must not count as resized.
        assert!(!is_resized(&writer));
        tokio::time::advance(SUPPORT_CHECK_INTERVAL).await;
        server.lock().expect("no panic").resources = ResizeApiServer::new().resources;
        assert_eq!(writer.resize(&key(), "u", REDUCED).await, WriteOutcome::Done);
        assert!(is_resized(&writer));
    }

    #[tokio::test(start_paused = true)]
    async fn a_refused_restoration_keeps_the_note_and_is_tried_again() {
        let (writer, server) = writer_for(ResizeApiServer::new());
        assert_eq!(writer.resize(&key(), "u", REDUCED).await, WriteOutcome::Done);
        server.lock().expect("no panic").resize_code = 403;
        let outcome = writer.resize(&key(), "u", PodRequests::Original).await;
        let WriteOutcome::Retry(Some(error)) = outcome else { panic!("{outcome:?}") };
        assert_eq!(error.reason, REQUESTS_NOT_RESTORED);
        assert!(!is_resized(&writer), "a part of the patches may have been sent");
        assert!(error.message.contains("exceeded quota"), "{}", error.message);
        let note = server.lock().expect("no panic").pod["metadata"]["annotations"].clone();
        assert!(note[ORIGINAL_REQUESTS].is_string(), "{note}");
        server.lock().expect("no panic").resize_code = 200;
        assert_eq!(writer.resize(&key(), "u", PodRequests::Original).await, WriteOutcome::Done);
        let pod = server.lock().expect("no panic").pod.clone();
        assert_eq!(pod["spec"]["containers"][0]["resources"]["requests"]["cpu"], "500m");
    }

    #[tokio::test(start_paused = true)]
    async fn a_refused_reduction_is_told_by_its_reason() {
        for code in [403, 422] {
            let mut server = ResizeApiServer::new();
            server.resize_code = code;
            let (writer, _server) = writer_for(server);
            let error = match writer.resize(&key(), "u", REDUCED).await {
                WriteOutcome::Retry(Some(error)) | WriteOutcome::Refused(error) => error,
                other => panic!("{other:?}"),
            };
            assert_eq!(error.reason, REQUESTS_NOT_REDUCED, "{code}");
            assert!(!is_resized(&writer));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn another_pod_of_the_name_and_one_that_cannot_be_resized_get_no_patch() {
        let mut server = ResizeApiServer::new();
        server.pod["status"]["qosClass"] = json!("Guaranteed");
        let (writer, server) = writer_for(server);
        assert_eq!(writer.resize(&key(), "earlier", REDUCED).await, WriteOutcome::Done);
        let outcome = writer.resize(&key(), "u", REDUCED).await;
        let WriteOutcome::Unsupported(error) = outcome else { panic!("{outcome:?}") };
        assert_eq!(error.reason, RESIZE_UNSUPPORTED);
        let requests = server.lock().expect("no panic").requests.clone();
        assert!(requests.iter().all(|it| it.starts_with("GET")), "{requests:?}");
    }
}
