//! Shell: Services of the cluster to which rules of the Gateway API lead.
//!
//! Such a Service has no Revision. It is a Revision of its own here, with one pod at the ClusterIP. The node leads each
//! connection there to an endpoint, as for every client.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, atomic::AtomicU64},
    time::{Duration, Instant},
};

use common::{
    service_routing::{NodeTopology, TopologyHints},
    wire::{
        AppProtocol, ConnectionPath, GatewayHostEntry, HttpRule, NamespacedName, PlainBackend,
        RouteBackend,
    },
};

use crate::{
    edge::header_edits::HeaderEdits,
    revisions::{
        revision::{ActivatorRevision, RevisionContext},
        route_settings::{
            ActivatorTopology, PodTable, PodTableEntry, RequestTimeouts, RevisionOwnerNames,
            RevisionRouteSettings,
        },
    },
    routes::{
        gateway_rules::{GatewayHostRules, GatewayRule, RoutedBackend, RoutedTarget},
        service::{RoutedService, TrafficShare},
    },
};

/// Time limit of a request to a Service of the cluster, for which routes state none.
const PLAIN_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// Services of the cluster that are backends, by name, address and protocol. Rules of an HTTPRoute and of a GRPCRoute
/// may lead to one port in two protocols. The services keep their connections while a rule has them.
#[derive(Debug, Default)]
pub(super) struct PlainServices {
    services: HashMap<(NamespacedName, SocketAddr, AppProtocol), Arc<RoutedService>>,
}

/// Returns the context of Services of the cluster. No autoscaler knows them, so their usage is reported to none.
pub(super) fn plain_context(context: &RevisionContext) -> RevisionContext {
    RevisionContext {
        peers: Arc::clone(&context.peers),
        queue_bounds: context.queue_bounds,
        pod_settings: context.pod_settings.clone(),
        usage_reporter: Arc::default(),
        next_pod_id: AtomicU64::new(0),
        reports: context.reports.clone(),
    }
}

impl PlainServices {
    /// Makes the rules of a host, with the Services that they lead to.
    pub(super) fn resolve(
        &mut self,
        entry: GatewayHostEntry,
        context: &Arc<RevisionContext>,
    ) -> GatewayHostRules {
        let host = &entry.key.host;
        let rules = entry.rules.into_iter().map(|mut rule: HttpRule| {
            let backends = std::mem::take(&mut rule.backends).into_iter().map(|it| RoutedBackend {
                weight: it.weight.get(),
                request_headers: HeaderEdits::new(&it.request_headers),
                response_headers: HeaderEdits::new(&it.response_headers),
                target: match it.target {
                    RouteBackend::Service(name) => RoutedTarget::Service(name),
                    RouteBackend::Plain(plain) => {
                        RoutedTarget::Plain(self.get_or_create(&plain, context))
                    }
                    RouteBackend::Unresolved => RoutedTarget::Unresolved,
                },
            });
            let backends = backends.collect();
            GatewayRule::new(host.clone(), rule, backends)
        });
        let rules = rules.collect();
        GatewayHostRules::new(entry.key, entry.certificates, &entry.reserved_hosts, rules)
    }

    /// Service of a backend. It is the same as before while name, address and protocol are, and keeps its connections.
    fn get_or_create(
        &mut self,
        backend: &PlainBackend,
        context: &Arc<RevisionContext>,
    ) -> Arc<RoutedService> {
        let key = (backend.name.clone(), backend.address, backend.protocol);
        let known = self.services.entry(key);
        Arc::clone(known.or_insert_with(|| Arc::new(plain_service(backend, context))))
    }

    /// Returns true without any Service.
    pub(super) fn is_empty(&self) -> bool {
        self.services.is_empty()
    }

    /// Drops Services to which no rule leads any more, and that no request uses.
    pub(super) fn drop_unused(&mut self, context: &RevisionContext) {
        self.services.retain(|(name, ..), service| {
            // References are copied from here or from another reference, so that none can arise again.
            let is_used = Arc::strong_count(service) > 1;
            if !is_used {
                context.usage_reporter.remove_revision(name);
            }
            is_used
        });
    }

    /// Revisions that stand for the Services.
    pub(super) fn revisions(&self) -> impl Iterator<Item = &Arc<ActivatorRevision>> {
        self.services.values().flat_map(|it| it.targets.iter().map(|it| &it.revision))
    }
}

/// Makes the Service of a backend, with one pod at its ClusterIP.
fn plain_service(backend: &PlainBackend, context: &Arc<RevisionContext>) -> RoutedService {
    let revision = ActivatorRevision::new(backend.name.clone(), Arc::clone(context));
    let revision = Arc::new(revision);
    let timeouts =
        RequestTimeouts { total: PLAIN_TIMEOUT, response_start: None, between_frames: None };
    let owner_names =
        RevisionOwnerNames { service: backend.name.name.clone(), configuration: "".into() };
    revision.set_route_settings(Some(RevisionRouteSettings {
        concurrency_limit: 0,
        protocol: backend.protocol,
        timeouts,
        allowed_sources: None,
        owner_names,
    }));
    // To the request path, the ClusterIP is the only pod of a Revision, and it is always ready.
    let pod = PodTableEntry {
        address: Some(backend.address),
        is_ready: true,
        is_starting: false,
        is_early_ready: false,
        standby: None,
        name: backend.name.name.clone(),
        place: NodeTopology::default(),
        hints: TopologyHints::default(),
        ports: Box::default(),
    };
    let pods = PodTable::from([(backend.name.to_string(), pod)]);
    // It has no requests yet that could be dispatched under a lock of the caller.
    revision.set_pods(&pods, &ActivatorTopology::default());
    RoutedService {
        name: backend.name.clone(),
        targets: Box::new([TrafficShare { revision, percent: 100 }]),
        path: ConnectionPath::Activator,
        path_since: Instant::now(),
        protocol: Some(backend.protocol),
        service_port: None,
        serves_local_tls: false,
        port: 0,
        hosts: Box::default(),
        gateway_rules: None,
    }
}
