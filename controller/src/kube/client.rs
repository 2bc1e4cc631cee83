//! Shell: how the API server is reached.

use std::path::Path;

use common::wire::Name;
use kube::{
    Api, Client, Config,
    api::{ApiResource, DynamicObject},
    config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError},
};

use crate::children::Resource;

/// The API server cannot be reached at all.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Not run in a pod, and no file given.
    #[error("cannot use the pod's own account (outside a pod give --kubeconfig FILE)")]
    InCluster(#[source] InClusterError),
    /// The file cannot be used.
    #[error("cannot use kubeconfig {file}")]
    Kubeconfig {
        /// Which.
        file: String,
        #[source]
        /// Why.
        cause: KubeconfigError,
    },
    /// What it says makes no client.
    #[error("cannot make a client for {server}")]
    Client {
        /// Where the API server should be.
        server: String,
        #[source]
        /// Why.
        cause: kube::Error,
    },
}

/// A client for the API server that `kubeconfig` names, or for that of the pod we run in. What the environment
/// says of other clusters is not looked at.
pub async fn connect(kubeconfig: Option<&Path>) -> Result<Client, ClientError> {
    let mut config = match kubeconfig {
        None => Config::incluster().map_err(ClientError::InCluster)?,
        Some(path) => from_file(path)
            .await
            .map_err(|cause| ClientError::Kubeconfig { file: path.display().to_string(), cause })?,
    };
    // The writer's queue knows better when to try again, and what else to do meanwhile.
    config.default_retry = false;
    let server = config.cluster_url.to_string();
    Client::try_from(config).map_err(|cause| ClientError::Client { server, cause })
}

async fn from_file(path: &Path) -> Result<Config, KubeconfigError> {
    let file = Kubeconfig::read_from(path)?;
    Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await
}

/// What the API calls a kind of object.
pub fn api_resource(resource: Resource) -> ApiResource {
    ApiResource {
        group: resource.group().into(),
        version: resource.version().into(),
        api_version: resource.api_version(),
        kind: resource.kind().into(),
        plural: resource.plural().into(),
    }
}

/// Objects of one kind in the namespace of `name`.
pub fn api_of(client: &Client, resource: Resource, name: &Name) -> Api<DynamicObject> {
    let kind = api_resource(resource);
    if resource.namespaced() {
        Api::namespaced_with(client.clone(), &name.namespace, &kind)
    } else {
        Api::all_with(client.clone(), &kind)
    }
}
