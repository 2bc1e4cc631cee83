//! Shell: TokenReviews by the API server, authorities in a Secret, trusted certificates in a ConfigMap.

use std::collections::BTreeMap;

use k8s_openapi::{
    ByteString,
    api::{
        authentication::v1::{TokenReview, TokenReviewSpec},
        core::v1::{ConfigMap, Secret},
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::json;

use super::{
    TokenReviewer,
    authority_store::{AuthorityStore, AuthorityStoreError},
    token_review::{AUDIENCE, TokenReviewResult},
};
use crate::model::object::FIELD_MANAGER;

/// Key in the Secret: authorities with their private keys.
const SECRET_KEY: &str = "authorities.json";
/// Label of ConfigMaps whose certificates Knative's components trust (knative/networking `pkg/apis/networking`,
/// `TrustBundleLabelKey`).
const TRUST_BUNDLE_LABEL: &str = "networking.knative.dev/trust-bundle";

/// Objects that hold the authorities of one kind.
#[derive(Clone, Copy, Debug)]
struct AuthorityObjects {
    /// Name of the Secret with the private keys.
    secret: &'static str,
    /// Name of the ConfigMap with the certificates.
    bundle: &'static str,
    /// Key in the ConfigMap: certificates in PEM.
    bundle_key: &'static str,
    /// True if Knative's components are to trust the ConfigMap.
    is_trust_bundle: bool,
}

/// Objects of the authorities of components, which mount the ConfigMap.
const COMPONENT_OBJECTS: AuthorityObjects = AuthorityObjects {
    secret: "rouse-authorities",
    bundle: "rouse-authorities",
    bundle_key: "ca.pem",
    is_trust_bundle: false,
};

/// Objects of the authorities of names inside the cluster.
const LOCAL_OBJECTS: AuthorityObjects = AuthorityObjects {
    secret: "rouse-local-authorities",
    bundle: "rouse-trust-bundle",
    bundle_key: "ca.crt",
    is_trust_bundle: true,
};

/// Client of the cluster for reviews, Secret and ConfigMap.
#[derive(Clone)]
pub struct IdentityApiClient {
    reviews: Api<TokenReview>,
    secrets: Api<Secret>,
    bundles: Api<ConfigMap>,
    objects: AuthorityObjects,
}

impl std::fmt::Debug for IdentityApiClient {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("IdentityApiClient").finish_non_exhaustive()
    }
}

impl IdentityApiClient {
    /// Creates a client for the cluster of `client`, with the authorities of components; Rouse runs in `namespace`.
    pub fn new(client: &Client, namespace: &str) -> Self {
        Self::with_objects(client, namespace, COMPONENT_OBJECTS)
    }

    /// Creates a client with the authorities of names inside the cluster.
    pub fn for_local_names(client: &Client, namespace: &str) -> Self {
        Self::with_objects(client, namespace, LOCAL_OBJECTS)
    }

    fn with_objects(client: &Client, namespace: &str, objects: AuthorityObjects) -> Self {
        Self {
            reviews: Api::all(client.clone()),
            secrets: Api::namespaced(client.clone(), namespace),
            bundles: Api::namespaced(client.clone(), namespace),
            objects,
        }
    }
}

#[tonic::async_trait]
impl TokenReviewer for IdentityApiClient {
    async fn review(&self, token: &str) -> Result<TokenReviewResult, AuthorityStoreError> {
        let spec =
            TokenReviewSpec { audiences: Some(vec![AUDIENCE.to_owned()]), token: token.to_owned() };
        let review = TokenReview { metadata: ObjectMeta::default(), spec, status: None };
        let status = self.reviews.create(&PostParams::default(), &review).await?.status;
        let status = status.ok_or("the API server answered a TokenReview without a status")?;
        let user = status.user.unwrap_or_default();
        Ok(TokenReviewResult {
            is_authentic: status.authenticated.unwrap_or(false),
            audiences: status.audiences.unwrap_or_default(),
            user: user.username.unwrap_or_default(),
            extra: user.extra.unwrap_or_default(),
        })
    }
}

#[tonic::async_trait]
impl AuthorityStore for IdentityApiClient {
    async fn load(&self) -> Result<Option<(String, String)>, AuthorityStoreError> {
        let Some(secret) = self.secrets.get_opt(self.objects.secret).await? else {
            return Ok(None);
        };
        let version = secret.metadata.resource_version.unwrap_or_default();
        let text = secret.data.and_then(|mut data| data.remove(SECRET_KEY));
        // A Secret without the key counts as empty; the leader then fills it under its version.
        let text = text.map_or_else(|| Ok("[]".to_owned()), |it| String::from_utf8(it.0));
        Ok(Some((text?, version)))
    }

    async fn save(&self, text: &str, version: Option<&str>) -> Result<(), AuthorityStoreError> {
        let metadata = ObjectMeta {
            name: Some(self.objects.secret.to_owned()),
            resource_version: version.map(str::to_owned),
            ..ObjectMeta::default()
        };
        let data = BTreeMap::from([(SECRET_KEY.to_owned(), ByteString(text.as_bytes().to_vec()))]);
        let secret = Secret { metadata, data: Some(data), ..Secret::default() };
        let params =
            PostParams { field_manager: Some(FIELD_MANAGER.into()), ..PostParams::default() };
        // Both fail if another replica was faster: `create` with 409 AlreadyExists, `replace` with 409 Conflict.
        match version {
            None => self.secrets.create(&params, &secret).await?,
            Some(_) => self.secrets.replace(self.objects.secret, &params, &secret).await?,
        };
        Ok(())
    }

    async fn publish(&self, bundle: &str) -> Result<(), AuthorityStoreError> {
        let params = PatchParams::apply(FIELD_MANAGER).force();
        let AuthorityObjects { bundle: name, bundle_key, is_trust_bundle, .. } = self.objects;
        let mut body = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": name },
            "data": { bundle_key: bundle },
        });
        if is_trust_bundle {
            body["metadata"]["labels"] = json!({ TRUST_BUNDLE_LABEL: "true" });
        }
        self.bundles.patch(name, &params, &Patch::Apply(body)).await?;
        Ok(())
    }
}
