//! Pure: operations that give maps the lists of earlier maps, which have other sizes.

use std::collections::BTreeSet;

use datapath::{
    abi::{self, FrontendKey},
    load_balancing::{SvcInfo, SvcState},
};

use super::{
    BackendListKey, BackendListUpdate, DesiredBackendList, MapCapacityError, MapPlan, RoutePlanner,
    map_plan::OrderedMapOps,
};
use crate::{
    kernel::map_op::{BackendTarget, KernelRoutes, MapOp},
    service_facts::ServiceSource,
};

/// Returns the operations that give maps with the content `kernel` all lists of `earlier`, as an earlier agent would
/// have written them. A planner that then starts keeps each list until its source is known.
///
/// All other frontends are removed. Maps that were in force before the earlier ones may still exist, with lists of services
/// that are gone.
///
/// # Errors
/// The lists do not all fit. Then none is to be copied, since a connect to a missing frontend would go on unchanged.
pub fn copy_ops(
    mut kernel: KernelRoutes,
    earlier: &KernelRoutes,
    now_ns: u64,
) -> Result<Vec<MapOp>, MapCapacityError> {
    let is_gone = |key: &&FrontendKey| !earlier.frontends.contains_key(*key);
    let gone: Vec<FrontendKey> = kernel.frontends.keys().filter(is_gone).copied().collect();
    kernel.frontends.retain(|key, _| earlier.frontends.contains_key(key));
    let mut planner = RoutePlanner::resume(kernel, now_ns);
    let (mut ops, mut replaced) = (OrderedMapOps::default(), Vec::new());
    for source in ServiceSource::ALL {
        let updates = list_updates(earlier, source);
        planner.switch_lists(&updates, source, &mut ops, &mut replaced)?;
    }
    let mut plan = MapPlan::default();
    ops.finish(&mut plan);
    // First, as their entries may be needed.
    let removals = gone.into_iter().map(|key| MapOp::RemoveFrontend { key });
    Ok(removals.chain(plan.ops).collect())
}

/// Returns the lists of one source.
fn list_updates(earlier: &KernelRoutes, source: ServiceSource) -> Vec<BackendListUpdate> {
    let activators = [abi::ACTIVATORS_V4, abi::ACTIVATORS_V6]
        .map(|service_id| (BackendListKey::Activators(service_id), service_id));
    let frontends = earlier
        .frontends
        .iter()
        .map(|(&key, &service_id)| (BackendListKey::Frontend(key), service_id));
    let updates = activators.into_iter().chain(frontends).filter_map(|(target, service_id)| {
        let (state, info, backends) = earlier.services.get(&service_id)?;
        let is_of_source = source_of(&target, info) == source;
        is_of_source.then(|| BackendListUpdate {
            next: copied_list(state, *info, backends, earlier),
            target,
        })
    });
    updates.collect()
}

/// Returns the source of a list. Only services of the RouteTable have a port at the activators.
fn source_of(target: &BackendListKey, info: &SvcInfo) -> ServiceSource {
    match target {
        BackendListKey::Frontend(_) if info.port_be == 0 => ServiceSource::Service,
        BackendListKey::Activators(_) | BackendListKey::Frontend(_) => ServiceSource::Route,
    }
}

fn copied_list(
    state: &SvcState,
    info: SvcInfo,
    backends: &[u32],
    earlier: &KernelRoutes,
) -> DesiredBackendList {
    // The rows and listeners of pods are in other maps, which are new as well. Until the pods are registered there, each
    // backend is one without a row.
    let unregistered = |it: &BackendTarget| BackendTarget { cookie: 0, slot: 0, ..*it };
    let backends: BTreeSet<BackendTarget> =
        backends.iter().filter_map(|id| earlier.backends.get(id)).map(unregistered).collect();
    DesiredBackendList { mode: state.mode, info, backends: backends.into_iter().collect() }
}
