//! Shell: writes of plans into the kernel's maps.

use std::collections::BTreeMap;

use common::{link::chain, wire};
use tracing::warn;

use super::Agent;
use crate::{
    clock::monotonic_ns,
    maps,
    plan::{MapCapacityError, MapPlan},
};

/// Progress of one plan: its writes, and lists that remain.
pub(super) struct MapPlanProgress {
    pub(super) writes: usize,
    /// True if lists of the previous table are still in force.
    pub(super) is_partial: bool,
}

impl Agent {
    /// Plans and writes the changes. Returns the progress, or the reason for which the next sweep tries again.
    pub(super) fn write_plan(&mut self) -> Result<MapPlanProgress, String> {
        if self.maps_inconsistent {
            self.restart_planner().map_err(|error| chain(&error))?;
        }
        let plan = self.planner.plan(monotonic_ns(), &self.planned_pods);
        let plan = plan.map_err(|too_big| too_big.to_string())?;
        // Before the writes: a pod that becomes a target again must not lose connections that these writes bring.
        self.update_stale_addresses(&plan);
        if let Err(error) = self.handles.maps.apply(&plan.ops) {
            // The planner assumes that its plan is in force; only reading the maps again makes its picture true.
            self.maps_inconsistent = true;
            return Err(chain(&error));
        }
        let MapPlan { ops, refused, is_partial: waits, .. } = plan;
        self.report_refused(refused);
        Ok(MapPlanProgress { writes: ops.len(), is_partial: waits })
    }

    /// Reports the services that do not fit the maps. They are planned again at each sweep.
    fn report_refused(&mut self, refused: BTreeMap<wire::NamespacedName, MapCapacityError>) {
        self.handles.metrics.services_refused.set(i64::try_from(refused.len()).unwrap_or(i64::MAX));
        // Logged and shown only when the set changes, as each sweep repeats it.
        if self.refused_services.keys().ne(refused.keys()) {
            for (service, why) in &refused {
                warn!(%service, error = %why, "service does not fit: its connects go by the activators");
            }
            let first = refused.iter().next().map(|(service, why)| {
                let more = match refused.len() - 1 {
                    0 => String::new(),
                    more => format!(" (and {more} more)"),
                };
                format!("connects to {service}{more} go by the activators: {why}")
            });
            self.handles.not_ready.set("services", first);
        }
        self.refused_services = refused;
    }

    /// Restarts the planner from the maps' present content, after a write failed midway.
    fn restart_planner(&mut self) -> Result<(), maps::KernelMapError> {
        self.planner.restart(self.handles.maps.read_routes()?, monotonic_ns());
        self.maps_inconsistent = false;
        Ok(())
    }
}
