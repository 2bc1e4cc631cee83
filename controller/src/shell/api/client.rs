//! Shell: clients of the API server.

use std::path::Path;

use common::wire::NamespacedName;
use kube::{
    Api, Client, Config,
    api::{ApiResource, DynamicObject},
    config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError},
};

use crate::model::object::ResourceKind;

/// The controller cannot get a client of the API server.
#[derive(Debug, thiserror::Error)]
pub enum KubeClientError {
    /// The process runs outside a pod, and no kubeconfig is given.
    #[error("cannot use the pod's own account (outside a pod give --kubeconfig FILE)")]
    InCluster(#[source] InClusterError),
    /// The kubeconfig file cannot be read.
    #[error("cannot use kubeconfig {file}")]
    Kubeconfig {
        /// Path of the kubeconfig file.
        file: String,
        #[source]
        /// Error from reading the file.
        cause: KubeconfigError,
    },
    /// The configuration is readable, but no client can be made from it.
    #[error("cannot make a client for {server}")]
    Client {
        /// URL of the API server.
        server: String,
        #[source]
        /// Error from making the client.
        cause: kube::Error,
    },
}

/// Returns a client of the API server that `kubeconfig` names, or else of the cluster whose pod this process runs in.
/// Variables such as `KUBECONFIG` are ignored.
pub async fn connect(kubeconfig: Option<&Path>) -> Result<Client, KubeClientError> {
    let mut config = match kubeconfig {
        None => Config::incluster().map_err(KubeClientError::InCluster)?,
        Some(path) => config_from_file(path).await.map_err(|cause| {
            KubeClientError::Kubeconfig { file: path.display().to_string(), cause }
        })?,
    };
    // The writer's queue decides when to try again, and can write other objects meanwhile.
    config.default_retry = false;
    watches::bound_silence(&mut config);
    let server = config.cluster_url.to_string();
    Client::try_from(config).map_err(|cause| KubeClientError::Client { server, cause })
}

async fn config_from_file(path: &Path) -> Result<Config, KubeconfigError> {
    let file = Kubeconfig::read_from(path)?;
    Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await
}

/// Returns the API group, version and plural of a kind, as kube needs them.
pub fn api_resource(resource: ResourceKind) -> ApiResource {
    ApiResource {
        group: resource.group().into(),
        version: resource.version().into(),
        api_version: resource.api_version(),
        kind: resource.kind().into(),
        plural: resource.plural().into(),
    }
}

/// Returns a client for objects of one kind in the namespace of `name`.
pub fn object_api(
    client: &Client,
    resource: ResourceKind,
    name: &NamespacedName,
) -> Api<DynamicObject> {
    let kind = api_resource(resource);
    if resource.is_namespaced() {
        Api::namespaced_with(client.clone(), &name.namespace, &kind)
    } else {
        Api::all_with(client.clone(), &kind)
    }
}
