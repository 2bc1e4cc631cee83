//! Shell: the API server, as far as installing needs it.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use controller::kube::client::connect;
use kube::{
    Api, Client,
    api::{ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
    core::GroupVersionKind,
};
use serde_json::Value;

use super::{configs, objects::name};

/// Who we are in `managedFields`.
pub(super) const MANAGER: &str = "rouse-install";
/// Between two looks at what is waited for.
const LOOK: Duration = Duration::from_millis(300);

/// How long an object is tried that the API server cannot take just now.
const PATIENCE: Duration = Duration::from_secs(60);

/// A cluster that a file names.
pub(super) struct Cluster(Client);

impl Cluster {
    /// Reaches the one that `kubeconfig` names. What the environment says of others is not looked at.
    pub(super) async fn of(kubeconfig: &Path) -> Result<Self> {
        Ok(Self(connect(Some(kubeconfig)).await?))
    }

    fn api(&self, api_version: &str, kind: &str, namespace: Option<&str>) -> Api<DynamicObject> {
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
        self.api(&text(&object["apiVersion"]), &text(&object["kind"]), namespace)
    }

    /// The object of this name as it is there.
    pub(super) async fn get(&self, object: &Value) -> Result<Option<Value>> {
        let short = object["metadata"]["name"].as_str().unwrap_or_default();
        let got = self.api_of(object).get_opt(short).await;
        let got = got.with_context(|| format!("cannot read {}", name(object)))?;
        got.map(serde_json::to_value).transpose().context("an object is JSON")
    }

    /// All objects of a kind in a namespace, with these labels; without a namespace: of the whole cluster.
    pub(super) async fn list(
        &self,
        api_version: &str,
        kind: &str,
        namespace: Option<&str>,
        labels: &str,
    ) -> Result<Vec<Value>> {
        let list = self.api(api_version, kind, namespace);
        let list = list.list(&ListParams::default().labels(labels)).await;
        let of = namespace.unwrap_or("the cluster");
        let list = list.with_context(|| format!("cannot list {kind}s of {of}"))?;
        let whole = |it: &DynamicObject| {
            let mut object = serde_json::to_value(it).context("an object is JSON")?;
            // A list says it once for all.
            object["apiVersion"] = api_version.into();
            object["kind"] = kind.into();
            Ok(object)
        };
        list.items.iter().map(whole).collect()
    }

    /// Brings an object about. One that is its operator's is only made where it is missing.
    ///
    /// The API server may be unable to for a moment: to ask admission of a controller that is just starting, for one. An
    /// object of a former installation that is still on its way out takes what is applied to it along: it is waited for.
    pub(super) async fn apply(&self, object: &Value) -> Result<()> {
        let started = Instant::now();
        loop {
            let tried = self.try_to_apply(object).await;
            let is_late = started.elapsed() >= PATIENCE;
            match tried {
                Err(kube::Error::Api(status)) if status.code >= 500 && !is_late => {}
                Ok(there) if !is_going(&there) => return Ok(()),
                Ok(_) if is_late => bail!(
                    "{} is being deleted and does not go: see what finalizers it has",
                    name(object)
                ),
                Ok(_) => {}
                Err(error) => {
                    return Err(error).with_context(|| format!("cannot apply {}", name(object)));
                }
            }
            pause().await;
        }
    }

    /// Returns the object as it is there now.
    async fn try_to_apply(&self, object: &Value) -> Result<DynamicObject, kube::Error> {
        let api = self.api_of(object);
        let short = object["metadata"]["name"].as_str().unwrap_or_default();
        if !configs::is_operators(object) {
            let params = PatchParams::apply(MANAGER).force();
            return api.patch(short, &params, &Patch::Apply(object)).await;
        }
        if let Some(there) = api.get_opt(short).await? {
            return Ok(there);
        }
        let body = serde_json::from_value(object.clone()).map_err(kube::Error::SerdeError)?;
        let params = PostParams { field_manager: Some(MANAGER.into()), ..PostParams::default() };
        match api.create(&params, &body).await {
            // Somebody was faster.
            Err(kube::Error::Api(status)) if status.code == 409 => api.get(short).await,
            made => made,
        }
    }

    /// Why an object would not be taken now, by storage or by admission; nothing is kept of the attempt.
    pub(super) async fn refuses(&self, object: &Value) -> Result<Option<String>> {
        let body = serde_json::from_value(object.clone()).context("an object is JSON")?;
        let params = PostParams { dry_run: true, ..PostParams::default() };
        let tried = self.api_of(object).create(&params, &body).await;
        Ok(tried.err().map(|why| why.to_string()))
    }

    /// Removes all objects of a kind, wherever they are, each after what was made for it. Names those that there still are.
    pub(super) async fn clear(&self, api_version: &str, kind: &str) -> Result<Vec<String>> {
        let failed = || format!("cannot delete {kind}s of {api_version}");
        let all = match self.api(api_version, kind, None).list(&ListParams::default()).await {
            // There is no such kind.
            Err(kube::Error::Api(status)) if status.code == 404 => return Ok(Vec::new()),
            all => all.with_context(failed)?,
        };
        let mut left = Vec::new();
        for object in &all.items {
            let namespace = object.metadata.namespace.as_deref();
            let api = self.api(api_version, kind, namespace);
            let name = object.metadata.name.as_deref().unwrap_or_default();
            left.push(format!("{}/{name}", namespace.unwrap_or_default()));
            match api.delete(name, &DeleteParams::foreground()).await {
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                done => done.map(drop).with_context(failed)?,
            }
        }
        Ok(left)
    }

    /// Removes all objects of a kind with these labels from a namespace.
    pub(super) async fn delete_all(
        &self,
        api_version: &str,
        kind: &str,
        namespace: &str,
        labels: &str,
    ) -> Result<()> {
        let api = self.api(api_version, kind, Some(namespace));
        let labelled = ListParams::default().labels(labels);
        let deleted = api.delete_collection(&DeleteParams::background(), &labelled).await;
        deleted.map(drop).with_context(|| format!("cannot delete {kind}s of namespace {namespace}"))
    }

    /// Removes an object; says whether there was one.
    pub(super) async fn delete(&self, object: &Value) -> Result<bool> {
        let short = object["metadata"]["name"].as_str().unwrap_or_default();
        match self.api_of(object).delete(short, &DeleteParams::background()).await {
            Ok(_) => Ok(true),
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(false),
            Err(error) => Err(error).with_context(|| format!("cannot delete {}", name(object))),
        }
    }
}

/// Whether it is deleted, though not gone yet.
fn is_going(object: &DynamicObject) -> bool {
    object.metadata.deletion_timestamp.is_some()
}

/// Waits before the next look at the cluster.
pub(super) async fn pause() {
    tokio::time::sleep(LOOK).await;
}
