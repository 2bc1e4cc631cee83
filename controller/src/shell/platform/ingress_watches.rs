//! Shell: watch of Knative's Ingresses; begun once the API server has the kind and lets the controller list it.

use tokio_util::sync::CancellationToken;
use tracing::info;

use super::KubernetesPlatform;
use crate::{
    decide::machine::ControllerEvent, model::object::ResourceKind,
    shell::api::watch_scope::ingress_scopes,
};

impl KubernetesPlatform {
    /// Waits for the kind Ingress of Knative and follows its objects, without an end. No route waits for the list: until
    /// it is complete, the classes of Routes stay as they were written.
    pub(super) async fn watch_ingresses(&self, shutdown: &CancellationToken) {
        self.wait_for_kinds(&[ResourceKind::Ingress], || {}).await;
        info!("Ingresses of other controllers are followed");
        let listed = || self.runtime.step(ControllerEvent::IngressesListed);
        self.follow_scopes(ingress_scopes(), shutdown, listed).await;
        // The watch ends with the replica, which the caller ends.
        std::future::pending().await
    }
}
