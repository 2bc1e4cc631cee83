//! Shell: the API server that this node's kubelet asks, from the kubelet's kubeconfig.

use std::path::{Path, PathBuf};

use kube::config::{Kubeconfig, KubeconfigError};

use crate::api_servers::{ApiServerUrl, ApiServerUrlError};

/// Error: the kubelet's kubeconfig gives no API server.
#[derive(Debug, thiserror::Error)]
pub enum KubeletKubeconfigError {
    /// The file is missing, or is no kubeconfig.
    #[error("cannot read --kubelet-kubeconfig {}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        source: KubeconfigError,
    },
    /// The file names no server.
    #[error(
        "--kubelet-kubeconfig {}: the cluster of its current context, or its only cluster, must have a server",
        path.display()
    )]
    NoServer {
        /// Path of the file.
        path: PathBuf,
    },
    /// The server's URL has another form.
    #[error("--kubelet-kubeconfig {}: use --apiserver instead", path.display())]
    Url {
        /// Path of the file.
        path: PathBuf,
        source: ApiServerUrlError,
    },
}

/// Reads the URL of the API server from a kubelet's kubeconfig. Nothing else in the file is used.
pub(crate) fn read_api_server(path: &Path) -> Result<ApiServerUrl, KubeletKubeconfigError> {
    let owned = || path.to_owned();
    let kubeconfig = Kubeconfig::read_from(path)
        .map_err(|source| KubeletKubeconfigError::Read { path: owned(), source })?;
    let server =
        server_of(&kubeconfig).ok_or_else(|| KubeletKubeconfigError::NoServer { path: owned() })?;
    server.parse().map_err(|source| KubeletKubeconfigError::Url { path: owned(), source })
}

/// Returns the server of the current context's cluster. Without a current context, that of the only cluster.
fn server_of(kubeconfig: &Kubeconfig) -> Option<&str> {
    let named = match kubeconfig.current_context.as_deref().filter(|it| !it.is_empty()) {
        Some(current) => {
            let context = kubeconfig.contexts.iter().find(|it| it.name == current)?;
            let cluster = &context.context.as_ref()?.cluster;
            kubeconfig.clusters.iter().find(|it| it.name == *cluster)?
        }
        None => match kubeconfig.clusters.as_slice() {
            [only] => only,
            _ => return None,
        },
    };
    named.cluster.as_ref()?.server.as_deref()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(text: &str) -> Option<String> {
        let kubeconfig = Kubeconfig::from_yaml(text).expect("a kubeconfig");
        server_of(&kubeconfig).map(str::to_owned)
    }

    #[test]
    fn the_server_is_that_of_the_current_context() {
        let two = "\
clusters:
- {name: a, cluster: {server: \"https://10.0.0.1:6443\"}}
- {name: b, cluster: {server: \"https://10.0.0.2:6443\"}}
contexts:
- {name: of-a, context: {cluster: a, user: u}}
- {name: of-b, context: {cluster: b, user: u}}
";
        let current = |name: &str| server(&format!("{two}current-context: {name}\n"));
        assert_eq!(current("of-b").as_deref(), Some("https://10.0.0.2:6443"));
        assert_eq!(current("other"), None, "there is no such context");
        assert_eq!(server(two), None, "it is not known which");
        let one = "clusters: [{name: a, cluster: {server: \"https://10.0.0.1:6443\"}}]\n";
        assert_eq!(server(one).as_deref(), Some("https://10.0.0.1:6443"));
        assert_eq!(server("clusters: [{name: a, cluster: {}}]\n"), None);
    }

    #[test]
    fn a_file_that_cannot_be_used_is_named_with_the_flag() {
        let missing = read_api_server(Path::new("/no/such/file")).expect_err("there is none");
        assert_eq!(missing.to_string(), "cannot read --kubelet-kubeconfig /no/such/file");
    }
}
