//! Shell: writes of plans into the kernel's maps.

use std::collections::BTreeMap;

use common::{link::chain, wire};
use tracing::warn;

use super::Agent;
use crate::{
    clock::monotonic_ns,
    maps,
    plan::{Plan, TooBig},
};

/// Progress of one plan: its writes, and lists that remain.
pub(super) struct Wrote {
    pub(super) writes: usize,
    /// True if lists of the previous table are still in force.
    pub(super) waits: bool,
}

impl Agent {
    /// Plans and writes the changes. Returns the progress, or the reason for which the next sweep tries again.
    pub(super) fn write(&mut self) -> Result<Wrote, String> {
        if self.torn {
            self.start_over().map_err(|error| chain(&error))?;
        }
        let plan = self.planner.plan(monotonic_ns(), &self.planned);
        let plan = plan.map_err(|too_big| too_big.to_string())?;
        // Before the writes: a pod that becomes a target again must not lose connections that these writes bring.
        self.move_kept(&plan);
        if let Err(error) = self.ends.maps.apply(&plan.ops) {
            // The planner assumes that its plan is in force; only reading the maps again makes its picture true.
            self.torn = true;
            return Err(chain(&error));
        }
        let Plan { ops, refused, waits, .. } = plan;
        self.refuse(refused);
        Ok(Wrote { writes: ops.len(), waits })
    }

    /// Reports the services that do not fit the maps. They are planned again at each sweep.
    fn refuse(&mut self, refused: BTreeMap<wire::Name, TooBig>) {
        self.ends.metrics.refused.set(i64::try_from(refused.len()).unwrap_or(i64::MAX));
        // Logged and shown only when the set changes, as each sweep repeats it.
        if self.refused.keys().ne(refused.keys()) {
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
            self.ends.troubles.set("services", first);
        }
        self.refused = refused;
    }

    /// Restarts the planner from the maps' present content, after a write failed midway.
    fn start_over(&mut self) -> Result<(), maps::Error> {
        self.planner.restart(self.ends.maps.read()?, monotonic_ns());
        self.torn = false;
        Ok(())
    }
}
