//! Pure: Images, for the controllers of image caches.

use serde_json::json;

use super::{ChildObject, RevisionView, meta};
use crate::model::object::{ResourceKind, names::image_name};

/// Builds one Image for each container, so that an image cache may pull it in advance.
pub fn image_objects(revision: &RevisionView<'_>) -> Vec<ChildObject> {
    let pod = &revision.spec.pod;
    let containers = pod.init_containers.iter().flatten().chain(&pod.containers);
    let one = |container: &k8s_openapi::api::core::v1::Container| {
        let image = revision.resolved_image(&container.name);
        // Until the digest is known, the cache may at least pull by the tag.
        let image = image.or(container.image.as_deref()).unwrap_or_default();
        let mut spec = json!({ "image": image });
        let account = pod.service_account_name.as_deref().filter(|it| !it.is_empty());
        if let Some(account) = account {
            spec["serviceAccountName"] = json!(account);
        }
        if let Some(secrets) = pod.image_pull_secrets.as_ref().filter(|it| !it.is_empty()) {
            spec["imagePullSecrets"] = json!(secrets);
        }
        let meta = meta::child_meta(revision, image_name(revision.name, &container.name));
        ChildObject::new(ResourceKind::Image, meta, json!({ "spec": spec }))
    };
    containers.map(one).collect()
}
