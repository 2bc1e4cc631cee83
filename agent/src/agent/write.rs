//! Shell: plans, and what of them is written into the kernel's maps.

use std::collections::BTreeMap;

use common::{link::chain, wire};
use tracing::warn;

use super::Agent;
use crate::{
    clock::monotonic_ns,
    maps,
    plan::{Plan, TooBig},
};

/// How far a plan was carried out.
pub(super) struct Wrote {
    pub(super) writes: usize,
    /// Whether lists of the table before are still in force.
    pub(super) waits: bool,
}

impl Agent {
    /// Plans and writes what changed. Returns how far it got, or why there is a next try at the next sweep.
    pub(super) fn write(&mut self) -> Result<Wrote, String> {
        if self.torn {
            self.start_over().map_err(|error| chain(&error))?;
        }
        let plan = self.planner.plan(monotonic_ns(), &self.planned);
        let plan = plan.map_err(|too_big| too_big.to_string())?;
        self.move_kept(&plan);
        if let Err(error) = self.ends.maps.apply(&plan.ops) {
            self.torn = true;
            return Err(chain(&error));
        }
        let Plan { ops, refused, waits, .. } = plan;
        self.refuse(refused);
        Ok(Wrote { writes: ops.len(), waits })
    }

    /// Says which services do not fit. They are planned again at each sweep.
    fn refuse(&mut self, refused: BTreeMap<wire::Name, TooBig>) {
        self.ends.metrics.refused.set(i64::try_from(refused.len()).unwrap_or(i64::MAX));
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

    /// A write was refused half-way: plans go on from what the maps hold now.
    fn start_over(&mut self) -> Result<(), maps::Error> {
        self.planner.restart(self.ends.maps.read()?, monotonic_ns());
        self.torn = false;
        Ok(())
    }
}
