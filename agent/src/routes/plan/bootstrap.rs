//! Pure: the Services that a node must reach first: their facts for the bootstrap file, and the operations that fill
//! empty maps from it.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv6Addr, SocketAddr},
};

use common::wire::NamespacedName;
use datapath::abi::FrontendKey;

use super::{
    BackendListKey, BackendListUpdate, MapCapacityError, MapPlan, RoutePlanner,
    cluster_services::{endpoint_list, is_api_server_service},
    map_plan::OrderedMapOps,
};
use crate::{
    kernel::map_op::{BackendTarget, KernelRoutes, MapOp, to_v6_octets},
    routes::bootstrap::{BootstrapFrontend, BootstrapServices},
    service_facts::ServiceSource,
};

impl RoutePlanner {
    /// Returns the facts for the bootstrap file if they may have changed since the last call, once all Services of the
    /// cluster are known.
    pub fn take_bootstrap_services(&mut self) -> Option<BootstrapServices> {
        let numbers = self.table.cluster.take_bootstrap_change()?;
        let cluster = &self.table.cluster;
        let frontends = numbers.into_iter().flat_map(|number| {
            let name = cluster.service_name(number).unwrap_or(NamespacedName::EMPTY);
            let lists = cluster.desired_lists(number).into_iter();
            lists.map(move |(key, list)| BootstrapFrontend {
                namespace: name.namespace.to_string(),
                name: name.name.to_string(),
                protocol: key.protocol,
                address: frontend_address(&key),
                affinity_seconds: list.info.affinity_seconds,
                endpoints: list.backends.iter().filter_map(BackendTarget::pod_address).collect(),
            })
        });
        let frontends = frontends.collect();
        Some(BootstrapServices { api_servers: cluster.api_servers(), frontends })
    }
}

/// Returns the operations that fill maps without frontends with these lists, as an earlier agent would have written
/// them. A planner that then starts keeps them until the Services of the cluster are known.
///
/// `own` are the addresses at which the agent reaches API servers without their Service; frontends there are left out.
/// `None`: the agent needs their Service, whose frontends are left out. It could not correct a list that leads nowhere.
pub fn bootstrap_ops(
    kernel: KernelRoutes,
    frontends: &[BootstrapFrontend],
    own: Option<&BTreeSet<IpAddr>>,
    now_ns: u64,
) -> Result<Vec<MapOp>, MapCapacityError> {
    let mut planner = RoutePlanner::resume(kernel, now_ns);
    let (mut seen, mut updates) = (BTreeSet::new(), Vec::new());
    let is_allowed = |it: &&BootstrapFrontend| {
        let name = NamespacedName::new(it.namespace.as_str(), it.name.as_str());
        let is_own = own.is_some_and(|own| own.contains(&it.address.ip()));
        !is_own && (!is_api_server_service(&name) || own.is_some())
    };
    for frontend in frontends.iter().filter(is_allowed) {
        let key = frontend_key_of(frontend);
        let endpoints: Vec<SocketAddr> = frontend.endpoints.iter().copied().collect();
        // A file that was edited may name a frontend twice.
        if seen.insert(key) {
            let next = endpoint_list(&endpoints, frontend.affinity_seconds);
            updates.push(BackendListUpdate { target: BackendListKey::Frontend(key), next });
        }
    }
    let (mut ops, mut replaced) = (OrderedMapOps::default(), Vec::new());
    planner.switch_lists(&updates, ServiceSource::Service, &mut ops, &mut replaced)?;
    let mut plan = MapPlan::default();
    ops.finish(&mut plan);
    Ok(plan.ops)
}

fn frontend_key_of(frontend: &BootstrapFrontend) -> FrontendKey {
    FrontendKey {
        address: to_v6_octets(frontend.address.ip()),
        port_be: frontend.address.port().to_be(),
        protocol: frontend.protocol,
        reserved: 0,
    }
}

fn frontend_address(key: &FrontendKey) -> SocketAddr {
    let ip = Ipv6Addr::from(key.address).to_canonical();
    SocketAddr::new(ip, u16::from_be(key.port_be))
}
