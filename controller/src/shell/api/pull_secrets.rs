//! Shell: pull secrets, read from the API server one by one when a registry is asked for a digest.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Secret, ServiceAccount};
use kube::{Api, Client};
use registry::PullSecret;

use crate::{
    decide::machine::PullAccount,
    shell::image_digests::resolver::{PullSecretError, PullSecretSource},
};

/// Reader of a cluster's pull secrets. It watches and keeps nothing.
#[derive(Clone)]
pub struct ClusterPullSecrets(Client);

impl std::fmt::Debug for ClusterPullSecrets {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("ClusterPullSecrets").finish_non_exhaustive()
    }
}

impl ClusterPullSecrets {
    /// Returns a reader with the permissions of this client.
    pub fn new(client: Client) -> Self {
        Self(client)
    }

    async fn account_secret_names(
        &self,
        account: &PullAccount,
    ) -> Result<Vec<String>, kube::Error> {
        let name = Some(account.service_account.as_str()).filter(|it| !it.is_empty());
        let api: Api<ServiceAccount> = Api::namespaced(self.0.clone(), &account.namespace);
        // If the service account does not exist, the kubelet reports that on the pod, better than an error here.
        let account = api.get_opt(name.unwrap_or("default")).await?;
        let all = account.and_then(|it| it.image_pull_secrets).unwrap_or_default();
        Ok(all.into_iter().map(|it| it.name).collect())
    }

    async fn read_secret(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Option<PullSecret>, kube::Error> {
        let api: Api<Secret> = Api::namespaced(self.0.clone(), namespace);
        let secret = api.get_opt(name).await?;
        Ok(secret.map(|secret| {
            let data = secret.data.unwrap_or_default().into_iter().map(|(key, it)| (key, it.0));
            let data: BTreeMap<String, Vec<u8>> = data.collect();
            PullSecret { name: name.to_owned(), kind: secret.type_.unwrap_or_default(), data }
        }))
    }
}

impl PullSecretSource for ClusterPullSecrets {
    async fn pull_secrets(
        &self,
        account: &PullAccount,
    ) -> Result<Vec<PullSecret>, PullSecretError> {
        let mut names = account.pull_secrets.clone();
        // The order matters: of equal paths in two secrets, the one of the earlier secret is used.
        for name in self.account_secret_names(account).await? {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        let mut all = Vec::with_capacity(names.len());
        for name in names {
            all.extend(self.read_secret(&account.namespace, &name).await?);
        }
        Ok(all)
    }
}
