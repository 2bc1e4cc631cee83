//! Shell: client of the API server for the installation.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use controller::shell::api::client::connect;
use kube::{
    Api, Client,
    api::{ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
    core::GroupVersionKind,
};
use serde_json::Value;

use super::{configs, objects::kind_and_name};

/// Field manager of this command in `managedFields`.
pub(super) const FIELD_MANAGER: &str = "rouse-install";
/// Interval between two reads of an awaited object.
const POLL_INTERVAL: Duration = Duration::from_millis(300);

/// Time for which an object is retried while the API server cannot accept it.
const RETRY_TIMEOUT: Duration = Duration::from_secs(60);

/// Client of the cluster that a kubeconfig file names.
pub(crate) struct ClusterClient(Client);

impl ClusterClient {
    /// Connects to the cluster of `kubeconfig`. Clusters named by the environment are never used.
    pub(crate) async fn connect(kubeconfig: &Path) -> Result<Self> {
        Ok(Self(connect(Some(kubeconfig)).await?))
    }

    fn dynamic_api(
        &self,
        api_version: &str,
        kind: &str,
        namespace: Option<&str>,
    ) -> Api<DynamicObject> {
        let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
        match namespace {
            Some(namespace) => Api::namespaced_with(self.0.clone(), namespace, &resource),
            None => Api::all_with(self.0.clone(), &resource),
        }
    }

    fn api_of(&self, object: &Value) -> Api<DynamicObject> {
        let text = |value: &'_ Value| value.as_str().unwrap_or_default().to_owned();
        let namespace = object["metadata"]["namespace"].as_str();
        self.dynamic_api(&text(&object["apiVersion"]), &text(&object["kind"]), namespace)
    }

    /// Reads the present state of an object.
    pub(super) async fn get(&self, object: &Value) -> Result<Option<Value>> {
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        let result = self.api_of(object).get_opt(name).await;
        let found = result.with_context(|| format!("cannot read {}", kind_and_name(object)))?;
        found.map(serde_json::to_value).transpose().context("an object is JSON")
    }

    /// Reads a page of the API server, such as one of a pod behind its proxy.
    pub(crate) async fn get_text(&self, path: &str) -> Result<String> {
        let request = http::Request::get(path).body(Vec::new()).context("a bad path")?;
        self.0.request_text(request).await.with_context(|| format!("cannot read {path}"))
    }

    /// Lists all objects of a kind that the label selector `labels` selects; an empty one selects all. Without a
    /// namespace, objects of the whole cluster are listed.
    pub(crate) async fn list(
        &self,
        api_version: &str,
        kind: &str,
        namespace: Option<&str>,
        labels: &str,
    ) -> Result<Vec<Value>> {
        let list = self.dynamic_api(api_version, kind, namespace);
        let list = list.list(&ListParams::default().labels(labels)).await;
        let location = namespace.unwrap_or("the cluster");
        let list = list.with_context(|| format!("cannot list {kind}s of {location}"))?;
        let to_whole_object = |object: &DynamicObject| {
            let mut object = serde_json::to_value(object).context("an object is JSON")?;
            // Items of a list omit both fields, which only the list itself has.
            object["apiVersion"] = api_version.into();
            object["kind"] = kind.into();
            Ok(object)
        };
        list.items.iter().map(to_whole_object).collect()
    }

    /// Applies an object. One that belongs to the operator is only created where it is missing.
    ///
    /// The API server may fail for a moment, for example while it calls the webhook of a controller that is just
    /// starting. An object of an earlier installation may still be terminating: applied fields would be deleted with
    /// it, so its end is awaited.
    pub(super) async fn apply(&self, object: &Value) -> Result<()> {
        let started = Instant::now();
        loop {
            let tried = self.try_apply(object).await;
            let is_late = started.elapsed() >= RETRY_TIMEOUT;
            match tried {
                // Server errors are retried; client errors are final, since the object itself is wrong.
                Err(kube::Error::Api(status)) if status.code >= 500 && !is_late => {}
                Ok(existing) if !is_terminating(&existing) => return Ok(()),
                Ok(_) if is_late => bail!(
                    "{} is being deleted for too long: check its finalizers",
                    kind_and_name(object)
                ),
                Ok(_) => {}
                Err(error) => {
                    return Err(error)
                        .with_context(|| format!("cannot apply {}", kind_and_name(object)));
                }
            }
            wait_poll_interval().await;
        }
    }

    /// Tries once to apply an object, and returns its state in the cluster.
    async fn try_apply(&self, object: &Value) -> Result<DynamicObject, kube::Error> {
        let api = self.api_of(object);
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        if !configs::is_operator_owned(object) {
            // Forced: fields that another manager took over belong to the installation again.
            let params = PatchParams::apply(FIELD_MANAGER).force();
            return api.patch(name, &params, &Patch::Apply(object)).await;
        }
        if let Some(existing) = api.get_opt(name).await? {
            return Ok(existing);
        }
        let body = serde_json::from_value(object.clone()).map_err(kube::Error::SerdeError)?;
        let params =
            PostParams { field_manager: Some(FIELD_MANAGER.into()), ..PostParams::default() };
        match api.create(&params, &body).await {
            // Another client created it between the two calls.
            Err(kube::Error::Api(status)) if status.code == 409 => api.get(name).await,
            result => result,
        }
    }

    /// Tries to create an object as a dry run, and returns the error of storage or admission, if any.
    pub(super) async fn dry_run_error(&self, object: &Value) -> Result<Option<String>> {
        let body = serde_json::from_value(object.clone()).context("an object is JSON")?;
        let params = PostParams { dry_run: true, ..PostParams::default() };
        let tried = self.api_of(object).create(&params, &body).await;
        Ok(tried.err().map(|reason| reason.to_string()))
    }

    /// Deletes all objects of a kind in all namespaces, each after its dependents. Returns the names of those still
    /// there.
    pub(super) async fn delete_everywhere(
        &self,
        api_version: &str,
        kind: &str,
    ) -> Result<Vec<String>> {
        let failed = || format!("cannot delete {kind}s of {api_version}");
        let objects =
            match self.dynamic_api(api_version, kind, None).list(&ListParams::default()).await {
                // The kind does not exist, so there are no objects.
                Err(kube::Error::Api(status)) if status.code == 404 => return Ok(Vec::new()),
                objects => objects.with_context(failed)?,
            };
        let mut remaining = Vec::new();
        for object in &objects.items {
            let namespace = object.metadata.namespace.as_deref();
            let api = self.dynamic_api(api_version, kind, namespace);
            let name = object.metadata.name.as_deref().unwrap_or_default();
            remaining.push(format!("{}/{name}", namespace.unwrap_or_default()));
            // Foreground deletion keeps the owner until its dependents are gone, so the caller can wait for the pods.
            match api.delete(name, &DeleteParams::foreground()).await {
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                result => result.map(drop).with_context(failed)?,
            }
        }
        Ok(remaining)
    }

    /// Deletes all objects of a kind with these labels in a namespace.
    pub(super) async fn delete_labelled(
        &self,
        api_version: &str,
        kind: &str,
        namespace: &str,
        labels: &str,
    ) -> Result<()> {
        let api = self.dynamic_api(api_version, kind, Some(namespace));
        // EndpointSlices, the only kind deleted here, have no dependents, so there is nothing to wait for.
        let labelled = ListParams::default().labels(labels);
        let deleted = api.delete_collection(&DeleteParams::background(), &labelled).await;
        deleted.map(drop).with_context(|| format!("cannot delete {kind}s of namespace {namespace}"))
    }

    /// Patches an object until no other client changes it between read and patch. `patch` makes the merge patch for the
    /// present state; `None`: nothing is to be changed. Returns true if the object was changed.
    pub(super) async fn merge(
        &self,
        object: &Value,
        patch: impl Fn(&Value) -> Option<Value>,
    ) -> Result<bool> {
        let started = Instant::now();
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        let params =
            PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() };
        loop {
            let Some(present) = self.get(object).await? else { return Ok(false) };
            let Some(body) = patch(&present) else { return Ok(false) };
            match self.api_of(object).patch(name, &params, &Patch::Merge(&body)).await {
                Ok(_) => return Ok(true),
                Err(kube::Error::Api(status))
                    // Another client has changed the object since it was read, so the patch is made again.
                    if status.code == 409 && started.elapsed() < RETRY_TIMEOUT => {}
                Err(error) => {
                    return Err(error)
                        .with_context(|| format!("cannot change {}", kind_and_name(object)));
                }
            }
            wait_poll_interval().await;
        }
    }

    /// Deletes an object; returns false if there was none.
    pub(super) async fn delete(&self, object: &Value) -> Result<bool> {
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        match self.api_of(object).delete(name, &DeleteParams::background()).await {
            Ok(_) => Ok(true),
            // An object that is already gone makes a repeated uninstall succeed.
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(false),
            Err(error) => {
                Err(error).with_context(|| format!("cannot delete {}", kind_and_name(object)))
            }
        }
    }
}

/// Returns true if the object is being deleted.
fn is_terminating(object: &DynamicObject) -> bool {
    object.metadata.deletion_timestamp.is_some()
}

/// Sleeps until the next read of an awaited object.
pub(super) async fn wait_poll_interval() {
    tokio::time::sleep(POLL_INTERVAL).await;
}
