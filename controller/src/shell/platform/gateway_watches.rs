//! Shell: watches of the Gateway API; begun once the API server has its kinds and lets the controller list them.

use std::time::Duration;

use common::once_signal::OnceSignal;
use kube::{
    Api, Client,
    api::{DynamicObject, ListParams},
};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::KubernetesPlatform;
use crate::{
    model::object::ResourceKind,
    shell::api::{
        client::api_resource,
        watch_scope::{GATEWAY_KINDS, gateway_scopes, grpc_route_scopes},
    },
};

/// Time between two questions for the kinds while the API server has none. To watch kinds that are missing would mean a
/// request every few seconds for each, and a warning.
const PRESENCE_INTERVAL: Duration = Duration::from_secs(60);

impl KubernetesPlatform {
    /// Waits for the kinds of the Gateway API and follows their objects, without an end. Sets `listed` once all objects
    /// are listed. Sets it too if the API server answers that it has no such kinds, or forbids to list one.
    pub(super) async fn watch_gateways(&self, listed: OnceSignal, shutdown: &CancellationToken) {
        // All or none: with routes but no ReferenceGrants, a grant that exists would count as missing.
        self.wait_for_kinds(&GATEWAY_KINDS, || listed.set()).await;
        info!("the Gateway API is installed: its objects are followed");
        let (gateways_listed, grpc_routes_known) = (OnceSignal::new(), OnceSignal::new());
        let gateways = self.follow_scopes(gateway_scopes(), shutdown, || gateways_listed.set());
        let grpc_routes = self.follow_grpc_routes(&grpc_routes_known, shutdown);
        // Without the GRPCRoutes, a new leader would take their hosts out of the RouteTable until they are listed.
        let all_known = async {
            gateways_listed.wait().await;
            grpc_routes_known.wait().await;
            listed.set();
        };
        tokio::join!(gateways, grpc_routes, all_known);
        // The watches end with the replica, which the caller ends.
        std::future::pending().await
    }

    /// Waits for the kind of GRPCRoutes, which a cluster with all other kinds may lack, and follows its objects. Sets
    /// `known` once they are listed, or if the API server answers that it has no such kind or forbids to list it.
    async fn follow_grpc_routes(&self, known: &OnceSignal, shutdown: &CancellationToken) {
        self.wait_for_kinds(&[ResourceKind::GrpcRoute], || known.set()).await;
        self.follow_scopes(grpc_route_scopes(), shutdown, || known.set()).await;
    }

    /// Waits until the API server has all of these kinds and lets the controller list them. Calls `on_missing` at each
    /// answer that it does not.
    pub(super) async fn wait_for_kinds(&self, kinds: &[ResourceKind], on_missing: impl Fn()) {
        let mut denied_before = None;
        loop {
            if self.has_kinds(kinds).await {
                let denied = first_denied_kind(&self.client, kinds).await;
                let Some(kind) = denied else { return };
                // A missing permission is logged when it is found, and not at each attempt.
                if denied_before.replace(kind) != Some(kind) {
                    let (kind, group) = (kind.kind(), kind.api_version());
                    warn!(kind, group, "objects are not followed: they may not be listed");
                }
            }
            on_missing();
            sleep(PRESENCE_INTERVAL).await;
        }
    }
}

/// Returns the first of these kinds whose objects the API server does not let the controller list, or does not have. Any
/// other failure may pass, and the watches try again.
async fn first_denied_kind(client: &Client, kinds: &[ResourceKind]) -> Option<ResourceKind> {
    for kind in kinds {
        let api: Api<DynamicObject> = Api::all_with(client.clone(), &api_resource(*kind));
        let listed = api.list(&ListParams::default().limit(1)).await;
        if let Err(kube::Error::Api(status)) = listed
            && matches!(status.code, 403 | 404)
        {
            return Some(*kind);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::json;

    use super::*;

    /// Returns a client of an API server that answers requests for HTTPRoutes with this status, and lists all else.
    fn client(code: u16) -> Client {
        let service = tower::service_fn(move |request: Request<Body>| {
            let is_route = request.uri().path().ends_with("/httproutes");
            async move {
                let (code, body) = if is_route && code != 200 {
                    let status = json!({
                        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                        "code": code, "reason": "Forbidden", "message": "refused",
                    });
                    (code, status)
                } else {
                    let list = json!({
                        "apiVersion": "v1", "kind": "List", "metadata": {}, "items": [],
                    });
                    (200, list)
                };
                Response::builder().status(code).body(Body::from(body.to_string().into_bytes()))
            }
        });
        Client::new(service, "default")
    }

    /// A controller whose ClusterRole is older than itself would otherwise wait for lists that never come.
    #[tokio::test]
    async fn a_kind_that_may_not_be_listed_is_denied_and_a_failure_is_not() {
        for (code, expected) in [
            (200, None),
            (403, Some(ResourceKind::HttpRoute)),
            (404, Some(ResourceKind::HttpRoute)),
            (500, None),
        ] {
            assert_eq!(first_denied_kind(&client(code), &GATEWAY_KINDS).await, expected, "{code}");
        }
    }
}
